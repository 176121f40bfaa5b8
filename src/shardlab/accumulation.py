"""Which collectives a micro-batch's backward issues."""

from torch.distributed.fsdp import FSDPModule

from shardlab.config import Reduce, Strategy


def set_gradient_sync(model: FSDPModule, *, is_last: bool, reduce: Reduce, strategy: Strategy) -> None:
    """Tells FSDP2 what to do with the gradients of the coming backward.

    With `reduce=last` only the last micro-batch reduces; until then each rank accumulates unsharded gradients in
    `reduce_dtype`. With `reduce=every` each one reduce-scatters. The all-reduce across the replicas of a hybrid mesh
    happens once per step all the same, since the shards can be accumulated; `no_shard` and `shard_optimizer` have no
    other reduction than the all-reduce, so there `every` means just that.

    Args:
        model: the root.
        is_last: whether this is the step's last micro-batch.
        reduce: when to reduce.
        strategy: how the model is sharded.
    """
    reduces = is_last or reduce is Reduce.every
    # `set_is_last_backward(False)` is not called: it would keep FSDP2's list of which unit to prefetch from one
    # micro-batch to the next, and the first unit's backward would gather a unit of the micro-batch before, once more
    # for nothing.
    model.set_requires_gradient_sync(reduces)
    model.set_requires_all_reduce(is_last if strategy.is_hybrid else reduces)
