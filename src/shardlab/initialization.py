"""Weights from (seed, parameter name, rows) alone, equal at any world size, with no full tensor on any rank."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.errors import ConfigError
from shardlab.sharding import rows_of

_BLOCKS = 64  # a parameter is drawn in so many blocks of rows, or in single rows if it has fewer
RANDOM_OPS = {torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default}


class WithoutDraws(TorchDispatchMode):
    """Draws nothing: on the meta device there is nothing to draw, and PyTorch takes milliseconds to find that out."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        drawn_on_meta = func in RANDOM_OPS and args[0].device.type == "meta"
        return args[0] if drawn_on_meta else func(*args, **(kwargs or {}))


@dataclass
class _Target:
    """A parameter or buffer that is to be initialised."""

    name: str
    shape: torch.Size  # over all ranks
    local: torch.Tensor  # this rank's rows
    first_row: int
    written: bool = False


class _RowwiseInit(TorchDispatchMode):
    """Runs `torch.nn.init` on sharded parameters so that each rank draws just its own rows.

    DTensor's own random operators do not do: on a CPU, two ranks drew the same rows, and results depend on the mesh.
    Here the rows of a parameter are cut into blocks whose bounds depend on its global shape alone, each drawn from a
    generator of its own, seeded by (seed, name, number of the draw, number of the block). Elementwise operators
    (`fill_`, `mul_`, `erfinv_`, ...) pass through.
    """

    def __init__(self, seed: int, targets: list[_Target]):
        super().__init__()
        self.seed = seed
        self.by_storage = {_storage(target.local): target for target in targets}
        self.draws: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = self._target_of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if target is None:
            return func(*args, **kwargs)
        if func in RANDOM_OPS:
            self._draw(target, func, args, kwargs)
            return args[0]
        if func is torch.ops.aten.select.int and isinstance(args[0], DTensor) and args[1] == 0:
            # One row, such as an embedding's padding row: this rank's own, or one that is thrown away.
            row = args[2] % args[0].shape[0] - target.first_row
            mine = 0 <= row < len(target.local)
            return target.local[row] if mine else target.local.new_empty(target.shape[1:])
        target.written |= func._schema.is_mutable
        return func(*args, **kwargs)

    def _target_of(self, tensor: torch.Tensor) -> _Target | None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return self.by_storage.get(_storage(local))

    def _draw(self, target: _Target, func, args, kwargs) -> None:
        local = target.local
        if args[0].shape != target.shape:
            raise ConfigError(f"model: {target.name} is initialised in parts by random numbers: fill it as a whole")
        target.written = True
        draw = self.draws[target.name]
        self.draws[target.name] += 1
        rows = local if local.ndim else local.view(1)
        global_rows = target.shape[0] if local.ndim else 1
        per_block = -(-global_rows // _BLOCKS)
        first, last = target.first_row, target.first_row + len(rows)
        starts = range(first - first % per_block, last, per_block)
        parts = rows.split([stop - start for start, stop in pairwise([first, *starts[1:], last])])
        kwargs["generator"] = generator = torch.Generator(local.device)
        for start, part in zip(starts, parts, strict=False):  # where there are no rows, there may be one part of none
            size = min(per_block, global_rows - start)
            generator.manual_seed(_seed(self.seed, target.name, draw, start // per_block))
            if len(part) == size:
                func(part, *args[1:], **kwargs)
            else:  # shared with another rank. Draw it whole: part of a block would not be the block's part
                block = func(rows.new_empty((size, *rows.shape[1:])), *args[1:], **kwargs)
                part.copy_(block[max(0, first - start) :][: len(part)])


@torch.no_grad()
def initialize(model: nn.Module, *, device: torch.device, parameter_device: torch.device, seed: int) -> None:
    """Gives a sharded meta-device model memory, and weights by its modules' own `reset_parameters`, children first.

    Args:
        model: its parameters and buffers are on the meta device; parameters may be DTensors. Tied ones stay tied.
        device: where the model runs; buffers go there.
        parameter_device: where parameters are stored; the CPU with `sharding.cpu_offload`.
        seed: the run's seed.

    Raises:
        ConfigError: for parameters and buffers that no `reset_parameters` writes, since they would hold garbage.
    """
    _materialize(model, device=device, parameter_device=parameter_device)
    with torch.device(device), _RowwiseInit(seed, list(_targets(model))) as mode:
        model.apply(_reset)
    _check_buffers_and_parameters(model, mode)


def _materialize(model: nn.Module, *, device: torch.device, parameter_device: torch.device) -> None:
    """As `nn.Module.to_empty`, which would untie tied parameters that are DTensors."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    data = torch.empty_like(parameter, device=parameter_device)
                    made[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(buffer, torch.empty_like(buffer, device=device))


def _targets(model: nn.Module) -> Iterator[_Target]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh  # whose last dimension is `shard`
            first_row = rows_of(parameter.shape[0], mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)).start
            yield _Target(name, parameter.shape, parameter.to_local(), first_row)
        else:
            yield _Target(name, parameter.shape, parameter.data, 0)
    for name, buffer in model.named_buffers():
        yield _Target(name, buffer.shape, buffer, 0)


def _reset(module: nn.Module) -> None:
    # `_reset_parameters` is what nn.MultiheadAttention and nn.Transformer call theirs.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def _check_buffers_and_parameters(model: nn.Module, mode: _RowwiseInit) -> None:
    """Each tensor must have been written; one that `reset_parameters` replaced by another is as good."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        target = mode._target_of(tensor)
        if target is not None and not target.written:
            raise ConfigError(
                f"model: no reset_parameters() sets {name}: give the module that owns it one, since models are made on "
                "the meta device and initialised after sharding"
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _seed(*key: object) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
