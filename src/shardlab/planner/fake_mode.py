"""FakeTensorMode with a short way for the commonest operators."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

from shardlab.initialization import RANDOM_OPS

_aten = torch.ops.aten
# Their results lie on the device that all arguments lie on: views, and what a transformer's blocks consist of.
_COMMON = {
    _aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.detach.default,
    _aten.alias.default, _aten.slice.Tensor, _aten.select.int, _aten.expand.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.permute.default, _aten.as_strided.default, _aten.view_as_complex.default,
    _aten.view_as_real.default, _aten._conj.default, _aten.mm.default, _aten.mul.Tensor, _aten.add.Tensor,
    _aten.silu.default, _aten.silu_backward.default, _aten.sum.dim_IntList, _aten.view_as.default, _aten.clone.default,
    _aten.sigmoid.default, _aten._to_copy.default, _aten.empty_like.default, _aten.zeros_like.default,
    _aten.split_with_sizes.default, _aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.fill_.Scalar,
    _aten.add.Scalar, _aten.new_zeros.default, _aten._fused_rms_norm.default, _aten._fused_rms_norm_backward.default,
}  # fmt: skip
_MAKES = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default}  # of no other tensor
_META = torch.device("meta")


class QuickFakeMode(FakeTensorMode):
    """Runs the meta kernels of common operators at once.

    FakeTensorMode keeps a cache of results by all that describes the arguments, which takes longer to ask than these
    kernels take to run. A plan is a third quicker without.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.dispatch(func, types, args, kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch.compile would be kept out of each operator, which takes longer than some of them

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COMMON:
            tensors: list[Any] = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if all(type(tensor) is FakeTensor and tensor.fake_mode is self for tensor in tensors):
                device = tensors[0].fake_device
                if all(tensor.fake_device == device for tensor in tensors) and kwargs.get("device") in (None, device):
                    if "device" in kwargs:
                        kwargs = {**kwargs, "device": _META}
                    return self._on_meta(func, args, kwargs, device)
        elif func is torch.ops.prim.device.default:
            return args[0].device
        elif func in RANDOM_OPS:
            return args[0]  # nothing is made, and there are thousands when a model is initialised
        elif func in _MAKES and not kwargs.get("pin_memory"):
            device = torch.device(kwargs.get("device") or "cpu")
            return self._on_meta(func, args, {**kwargs, "device": _META}, device)
        elif func.namespace in ("aten", "fsdp") and not func._schema.returns:
            return None  # it writes into what is there: fused optimizers, and others that take lists
        elif func.namespace == "fsdp":
            return self._on_meta(func, args, kwargs, args[0][0].fake_device)
        elif func is _aten._grouped_mm.default and args[0].dtype == args[1].dtype:
            return self._grouped_mm(*args, **kwargs)
        return super().dispatch(func, types, args, kwargs)

    def _on_meta(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
        with in_kernel_invocation_manager(self):
            out = func(*args, **kwargs)
        if isinstance(out, (list, tuple)):
            return type(out)(self._faked(part, device) for part in out)
        return self._faked(out, device)

    def _faked(self, out: torch.Tensor, device: torch.device) -> FakeTensor:
        return out if isinstance(out, FakeTensor) else FakeTensor(self, out, device)  # as it is: an argument

    def _grouped_mm(
        self,
        mat_a: FakeTensor,
        mat_b: FakeTensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> FakeTensor:
        """Mixture of experts: PyTorch's own meta kernel takes nothing but bf16, where its real ones do."""
        from torch._meta_registrations import _create_grouped_mm_output_tensor  # PyTorch's own, by version

        with in_kernel_invocation_manager(self):
            out = _create_grouped_mm_output_tensor(mat_a, mat_b, offs, out_dtype or mat_a.dtype)
        return FakeTensor(self, out, mat_a.fake_device)
