"""FLOPs and communicated bytes of one step, counted from the operators that it runs."""

from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Which collective an operator is, by a part of its name without underscores. Those in `c10d` are what
# torch.distributed's functions call, those in `_c10d_functional` what DTensor does.
_COLLECTIVES = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


@dataclass
class StepCost:
    """What one step costs one rank."""

    flops: int = 0  # multiplications and additions, of matrix products and attention, with recomputation
    recomputed_flops: int = 0  # of these, what activation checkpointing computes again
    comm_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COLLECTIVES.values(), 0))

    @property
    def model_flops(self) -> int:
        """FLOPs that the model needs; the numerator of MFU (PaLM, appendix B), which leaves recomputation out."""
        return self.flops - self.recomputed_flops


class StepCounter(TorchDispatchMode):
    """Counts while it is entered; `cost` holds the sums.

    FLOPs come from PyTorch's formulas (`torch.utils.flop_counter`). `comm_bytes` are unsharded bytes: the output of an
    all-gather, the input of a reduce-scatter, the tensor of an all-reduce.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = StepCost()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor takes itself apart, and what it does to local tensors is seen here
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args, out)
        elif formula := flop_registry.get(func.overloadpacket):
            flops = formula(*args, **kwargs, out_val=out)
            self.cost.flops += flops
            # Backward formulas run with grad mode off; checkpointing turns it on to run a block's forward again.
            if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
                self.cost.recomputed_flops += flops
        return out

    def _count_collective(self, func, args, out) -> None:
        name = func.overloadpacket.__name__.replace("_", "")
        for part, collective in _COLLECTIVES.items():
            if part in name:
                tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
                # Inputs and outputs alike are among them; the largest is the unsharded side.
                self.cost.comm_bytes[collective] += max((t.nbytes for t in tensors), default=0)
