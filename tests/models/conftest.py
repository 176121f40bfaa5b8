"""Shared by the models' tests: initialise as the trainer does, and watch which operators run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorLog(TorchDispatchMode):
    """Notes each operator's name, and the two last dimensions of each tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.matrices: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        if isinstance(out, torch.Tensor):
            self.matrices.add(tuple(out.shape[-2:]))
        return out


def initialise(module: nn.Module) -> None:
    """Call `reset_parameters` of every module, children first, as the trainer does after `to_empty`."""
    with torch.no_grad():
        module.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)


def through_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build on meta, move with `to_empty` onto memory full of NaN, and initialise."""
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    initialise(module)
    return module


@pytest.fixture
def tools() -> SimpleNamespace:
    return SimpleNamespace(OperatorLog=OperatorLog, initialise=initialise, through_meta=through_meta)


@pytest.fixture
def sharded_rank():
    """A function `(rank, world_size) -> mesh`; nothing is sent in its process group, so one process plays any rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, world_size: int) -> dist.device_mesh.DeviceMesh:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return dist.device_mesh.init_device_mesh("cpu", (world_size,))

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
