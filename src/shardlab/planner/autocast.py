"""CUDA's autocast for the simulated device: its lists of operators, and its cache of cast weights.

What autocast casts is decided by lists of operators for each kind of device, and a device registered from Python has
none: `torch.autocast` would cast nothing there, and a plan would be one in fp32. The lists and rules here are those of
`aten/src/ATen/autocast_mode.h` and `autocast_mode.cpp`; the casts are ordinary operators, so that autograd saves them
for backward as it does on a GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as Operator
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdRef

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

# Operators by rule, with their overload after a dot: AT_FORALL_* in autocast_mode.h, torch 2.13.
LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
"""
FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
FP32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
FP32_RESULT_OVERLOADS = "norm.Scalar norm.ScalarOpt_dim"
PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
BANNED = "binary_cross_entropy"


class Autocast:
    """The rules, and the casts of fp32 weights until the outermost autocast ends: one a forward, however often used."""

    def __init__(self, device_type: str):
        self.device_type = device_type
        self._casts: dict[WeakIdRef, Tensor] = {}

    def register(self) -> list[torch.library.Library]:
        """Gives the simulated device the rules.

        Returns:
            What keeps the registrations alive.
        """
        library, all_namespaces = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        all_namespaces.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        rules = [
            (LOWER_PRECISION, self._lower_precision),
            (FP32, self._fp32),
            (FP32_RESULT, self._fp32_result),
            (FP32_RESULT_OVERLOADS, self._fp32_result_overload),
            (PROMOTE, self._promote),
            (BANNED, self._banned),
        ]
        for names, rule in rules:
            for name in names.split():
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"):  # in this release
                    library.impl(name, partial(_without_autocast, rule, _operator(name)), "AutocastPrivateUse1")
        clear = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            clear()
            self._casts.clear()

        torch.clear_autocast_cache = clear_autocast_cache  # which torch.autocast calls where the outermost one ends
        return [library, all_namespaces]

    def _lower_precision(self, operator: Operator, args: tuple, kwargs: dict) -> Any:
        return self._call_cast(operator, args, kwargs, torch.get_autocast_dtype(self.device_type))

    def _fp32(self, operator: Operator, args: tuple, kwargs: dict) -> Any:
        return self._call_cast(operator, args, kwargs, torch.float32)

    def _fp32_result(self, operator: Operator, args: tuple, kwargs: dict) -> Any:
        """Asks for an fp32 result, unless the caller names its dtype: no cast of the argument is made, or saved."""
        position = [argument.name for argument in operator._schema.arguments].index("dtype")
        if self._is_eligible(args[0]) and len(args) <= position and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
        return operator(*args, **kwargs)

    def _fp32_result_overload(self, operator: Operator, args: tuple, kwargs: dict) -> Any:
        """As `_fp32_result`, where it is another overload that takes the dtype, and needs all its arguments."""
        arguments = {a.name: a.default_value for a in operator._schema.arguments}
        arguments |= dict(zip(arguments, args, strict=False)) | kwargs
        dtype = torch.float32 if self._is_eligible(args[0]) else args[0].dtype
        name = "ScalarOpt_dim_dtype" if "dim" in arguments else "ScalarOpt_dtype"
        return getattr(operator.overloadpacket, name)(*arguments.values(), dtype=dtype)

    def _promote(self, operator: Operator, args: tuple, kwargs: dict) -> Any:
        lower = torch.get_autocast_dtype(self.device_type)
        dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if self._is_eligible(leaf)}
        if not dtypes <= {lower, torch.float32}:
            raise RuntimeError(f"{operator}: autocast to {lower} cannot promote {dtypes}")
        return self._call_cast(operator, args, kwargs, torch.float32 if torch.float32 in dtypes else lower)

    def _banned(self, operator: Operator, args: tuple, kwargs: dict) -> Any:
        raise RuntimeError(f"{operator} is unsafe to autocast: use its `_with_logits` variant")

    def _call_cast(self, operator: Operator, args: tuple, kwargs: dict, dtype: torch.dtype) -> Any:
        cast = partial(self._cast, dtype)
        kwargs = tree_map(cast, kwargs)
        args = tuple(
            reversed([tree_map(cast, arg) for arg in reversed(args)])
        )  # last first, as GCC evaluates arguments
        return operator(*args, **kwargs)

    def _cast(self, dtype: torch.dtype, value: Any) -> Any:
        """`cached_cast`: weights (fp32 leaves that require gradients) are cast to the lower precision once."""
        if not self._is_eligible(value) or value.dtype == dtype:
            return value
        if not (
            dtype == torch.get_autocast_dtype(self.device_type)
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        ):
            return value.to(dtype)
        key = WeakIdRef(value)
        if key not in self._casts:
            self._casts[key] = value.to(dtype)
        return self._casts[key]

    def _is_eligible(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.device.type == self.device_type
            and value.is_floating_point()
            and value.dtype != torch.float64
        )


def _operator(name: str) -> Operator:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast(rule: Callable, operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator by its rule; what it calls in turn casts nothing."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return rule(operator, args, kwargs)
