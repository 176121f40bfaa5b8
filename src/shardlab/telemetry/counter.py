"""FLOPs and communicated bytes of one step, counted from the operators that it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

# Which collective an operator is, by a part of its name without underscores. Those in `c10d` are what
# torch.distributed's functions call, those in `_c10d_functional` what DTensor does.
_COLLECTIVES = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}

# PyTorch has no formula for attention on a CPU, whose arguments begin as those of the GPU's kernel.
_aten = torch.ops.aten
_SAME_FORMULA = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


@dataclass
class StepCost:
    """What one step costs one rank."""

    flops: int = 0  # multiplications and additions, of all matrix products and attention
    recomputed_flops: int = 0  # of these, what activation checkpointing computes again
    optimizer_flops: int = 0  # of these, the optimizer's own, such as Muon's Newton-Schulz iterations
    comm_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COLLECTIVES.values(), 0))

    def add(self, key: str, amount: int) -> None:
        """Adds to one of the fields, or to the bytes of one kind of collective."""
        if key in self.comm_bytes:
            self.comm_bytes[key] += amount
        else:
            setattr(self, key, getattr(self, key) + amount)

    @property
    def model_flops(self) -> int:
        """FLOPs that the model needs; the numerator of MFU (PaLM, appendix B): forward and backward, nothing twice."""
        return self.flops - self.recomputed_flops - self.optimizer_flops


class StepCounter(TorchDispatchMode):
    """Counts while it is entered; `cost` holds the sums.

    FLOPs come from PyTorch's formulas (`torch.utils.flop_counter`): causal attention counts as if nothing were masked,
    and fused attention's backward as five products, one of them the scores once more. `comm_bytes` are unsharded
    bytes: the output of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = StepCost()
        self._optimizing = False
        self._hooks: list[RemovableHandle] = []

    def __enter__(self):
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: setattr(self, "_optimizing", True)),
            register_optimizer_step_post_hook(lambda *_: setattr(self, "_optimizing", False)),
        ]
        return super().__enter__()

    def __exit__(self, *exception):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor takes itself apart, and what it does to local tensors is seen here
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            if sent := communicated(func, args, out):
                collective, tensor = sent
                self.cost.add(collective, tensor.nbytes)
        elif FakeTensor in types:
            pass  # DTensor works out a result's global shape; no work of this rank
        elif formula := flop_registry.get(_SAME_FORMULA.get(func.overloadpacket, func.overloadpacket)):
            flops = formula(*args, **kwargs, out_val=out)
            self.cost.add("flops", flops)
            if self._optimizing:
                self.cost.add("optimizer_flops", flops)
            # Backward formulas run with grad mode off; checkpointing turns it on to run a block's forward again.
            elif torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
                self.cost.add("recomputed_flops", flops)
        return out


def communicated(func: OpOverload, args: Sequence[Any], out: Any) -> tuple[str, torch.Tensor] | None:
    """What a collective sends or receives, whichever is unsharded.

    Args:
        func: of PyTorch's `c10d` or `_c10d_functional`.
        args: that it was called with.
        out: its result.

    Returns:
        Key of `StepCost.comm_bytes`, and the tensor; None for other operators, and where nothing is sent.
    """
    if _group_size(args) == 1:
        return None
    name = func.overloadpacket.__name__.replace("_", "")
    for part, collective in _COLLECTIVES.items():
        if part in name:
            tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
            # Inputs and outputs alike; the largest is the unsharded side.
            return (collective, max(tensors, key=lambda tensor: tensor.nbytes)) if tensors else None
    return None


def _group_size(args: Sequence[Any]) -> int:
    """Ranks that take part in a collective: `c10d` operators are given the group, `_c10d_functional` ones its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).size()
        if isinstance(arg, str) and arg in dist.distributed_c10d._world.pg_names.values():
            return dist.distributed_c10d._resolve_process_group(arg).size()  # type: ignore[arg-type]
    return 0
