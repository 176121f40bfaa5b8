"""Collectives whose tensors the backend has let go of when they return, so that accounts of memory are reproducible."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._pytree import tree_leaves, tree_map

PATIENCE_S = 0.1  # at most, for a backend to let go of a collective's tensors; it takes a few microseconds


def is_waited_for(func: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether this is a collective that the run waits for itself, at once or before it launches another."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return False
    names = [argument.name for argument in func._schema.arguments]
    if func.namespace == "_c10d_functional":  # DTensor's; of all that take a group, only send and receive have tags
        return "group_name" in names and not {"tag", "tag_list"} & set(names)
    return "async_op" in names[: len(args)] and not args[names.index("async_op")]


def settled(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a collective, and waits until its backend holds none of the tensors any more.

    gloo's worker thread (`ProcessGroupGloo::runLoop`) drops a collective, and with it the tensors and its own views of
    them, only after it has woken up who waits for it. Where it is held up in between, by the scheduler or by Python's
    lock, a storage that the run lets go of would live on while others are born, and the peak of one run in many would
    be higher. The backend gets aliases here, so that it is all there in a storage's count of tensors.
    """
    counts = {key: torch._C._storage_Use_Count(key) for key in _storage_keys((args, kwargs))}
    out = tree_map(_waited_for, func(*tree_map(_alias, args), **tree_map(_alias, kwargs)))
    for key in _storage_keys(out):
        counts[key] = counts.get(key, 1) + 1  # a new storage's Python object counts as well
    until = time.monotonic() + PATIENCE_S
    while any(torch._C._storage_Use_Count(key) > count for key, count in counts.items()) and time.monotonic() < until:
        time.sleep(1e-5)
    return out


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _waited_for(value: Any) -> Any:
    """Of a collective's results: the same, with nothing left to wait for."""
    if isinstance(value, torch.ScriptObject):
        Work.unbox(value).wait()
        return FakeWork().boxed()
    return _alias(torch.ops._c10d_functional.wait_tensor(value)) if isinstance(value, torch.Tensor) else value


def _storage_keys(tensors: Any) -> list[int]:
    return [leaf.untyped_storage()._cdata for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
