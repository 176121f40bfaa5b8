"""FakeTensorMode with a short way for the commonest operators."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

from shardlab.initialization import RANDOM_OPS

_aten = torch.ops.aten
# One result, on the device that all arguments lie on: views, and what a transformer's blocks consist of.
_COMMON = {
    _aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.detach.default,
    _aten.alias.default, _aten.slice.Tensor, _aten.select.int, _aten.expand.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.permute.default, _aten.as_strided.default, _aten.view_as_complex.default,
    _aten.view_as_real.default, _aten._conj.default, _aten.mm.default, _aten.mul.Tensor, _aten.add.Tensor,
    _aten.silu.default, _aten.silu_backward.default, _aten.sum.dim_IntList,
}  # fmt: skip


class QuickFakeMode(FakeTensorMode):
    """Runs the meta kernels of common operators at once.

    FakeTensorMode keeps a cache of results by all that describes the arguments, which takes longer to ask than these
    kernels take to run. A plan is a fifth to a third quicker without.
    """

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in RANDOM_OPS:
            return args[0]  # nothing is made, and there are thousands when a model is initialised
        if func in _COMMON:
            tensors: list[Any] = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if all(type(tensor) is FakeTensor and tensor.fake_mode is self for tensor in tensors):
                device = tensors[0].fake_device
                if all(tensor.fake_device == device for tensor in tensors):
                    with in_kernel_invocation_manager(self):
                        out = func(*args, **(kwargs or {}))
                    return FakeTensor(self, out, device)
        return super().dispatch(func, types, args, kwargs or {})
