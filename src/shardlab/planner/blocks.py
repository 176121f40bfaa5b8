"""Equal blocks: simulates a few of them, and repeats their part of the record for the others.

A transformer's blocks do the same one after the other, so that the record of a run is a path through them: up in
forward, down in backward, up again wherever the build or the optimizer goes through the parameters. `shorten` leaves a
model with a few of its blocks, `lengthen` gives the record that the whole model would have made, by repeating at each
pass what happened while the path was at an inner block. It is the same to the byte as simulating all blocks
(tests/planner/test_blocks.py); where that cannot be known, both return None, and all blocks must be simulated.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from shardlab.config import Config
from shardlab.sharding import find_blocks, match_modules
from shardlab.telemetry.events import Entry, Event, Phase
from shardlab.telemetry.ledger import Ledger

KEPT = 6  # blocks: the first and the last two, which FSDP2 treats otherwise, and two inner ones to compare
_REPEATED = 2  # the inner block whose record is repeated; the next one must have the same


@dataclass(frozen=True)
class Blocks:
    """The equal blocks of a model, of which it has KEPT left."""

    prefix: str  # their names are "prefix.0", "prefix.1", ...
    count: int  # in the whole model

    def index(self, name: str) -> int | None:
        """Which block a module or parameter lies in."""
        if not name.startswith(f"{self.prefix}."):
            return None
        return int(name[len(self.prefix) + 1 :].partition(".")[0])

    def moved(self, name: str, index: int) -> str:
        """The name in another block; others as they are."""
        if self.index(name) is None:
            return name
        _, _, rest = name[len(self.prefix) + 1 :].partition(".")
        return ".".join(part for part in (self.prefix, str(index), rest) if part)


# ---- shorten


def shorten(model: nn.Module, config: Config) -> Blocks | None:
    """Takes all blocks but KEPT out of a model on the meta device, in place.

    Returns:
        What it has taken out; None where it has left the model as it was, because the blocks are few, differ in
        anything but their parameters' values, or are not each a unit of its own.
    """
    names = [name for name, _ in find_blocks(model, config.model.get("units"))]
    prefix = names[0].rpartition(".")[0] if names else ""
    container = model.get_submodule(prefix)
    if not prefix or not isinstance(container, (nn.ModuleList, nn.Sequential)) or len(container) <= KEPT:
        return None
    if names != [f"{prefix}.{index}" for index in range(len(container))]:
        return None
    units = config.sharding.units if config.sharding.units is not None else config.model.get("units")
    if not _each_is_a_unit(model, units or [], names):
        return None
    if not _chosen_alike(model, config.activation.blocks or [], names):
        return None
    first, *others = (_signature(block) for block in container)
    if any(other != first for other in others) or _shares_parameters(model, prefix):
        return None
    blocks = Blocks(prefix, len(container))
    del container[KEPT:]
    return blocks


def _each_is_a_unit(model: nn.Module, patterns: Sequence[Any], blocks: Sequence[str]) -> bool:
    """Whether each block is one unit, and any within it are alike."""
    grouped = [part for pattern in patterns if not isinstance(pattern, str) for part in pattern]
    if any(set(_chosen(model, part, blocks)) for part in grouped):
        return False
    single = [pattern for pattern in patterns if isinstance(pattern, str)]
    owners = {name for pattern in single for name, _ in match_modules(model, pattern)}
    return owners.issuperset(blocks) and _chosen_alike(model, single, blocks)


def _chosen_alike(model: nn.Module, patterns: Sequence[str], blocks: Sequence[str]) -> bool:
    """Whether each pattern names the same in all blocks."""
    for pattern in patterns:
        chosen = _chosen(model, pattern, blocks)
        if chosen and any(chosen.get(block) != chosen.get(blocks[0]) for block in blocks):
            return False
    return True


def _chosen(model: nn.Module, pattern: str, blocks: Sequence[str]) -> dict[str, list[str]]:
    """The names relative to its block of all modules in blocks that a pattern names, by block."""
    chosen: dict[str, list[str]] = {}
    for name, _ in match_modules(model, pattern):
        for block in blocks:
            if name == block or name.startswith(f"{block}."):
                chosen.setdefault(block, []).append(name[len(block) :])
    return chosen


def _signature(module: nn.Module) -> Any:
    """All that decides what a module does, but for the values of its parameters."""

    def tensors(named: Mapping[str, torch.Tensor | None]) -> list[Any]:
        return [
            (name, t if t is None else (t.shape, t.dtype, t.requires_grad, t.device, type(t)))
            for name, t in named.items()
        ]

    own = {
        name: setting
        for name, setting in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules") and not isinstance(setting, torch.Tensor)
    }
    return (
        type(module),
        tensors(module._parameters),
        tensors(module._buffers),
        own,
        [(name, child and _signature(child)) for name, child in module._modules.items()],
    )


def _shares_parameters(model: nn.Module, prefix: str) -> bool:
    """Whether a block has a parameter in common with another one, or with the rest of the model."""
    owners: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = name.startswith(f"{prefix}.")
        owner = name[len(prefix) + 1 :].partition(".")[0] if inside else ""
        if owners.setdefault(parameter, owner) != owner:
            return True
    return False


# ---- lengthen


class _Birth(NamedTuple):
    """Where a storage was born: on which way through the blocks, at which of them, and as which event there."""

    way: int
    block: int
    place: int


@dataclass
class _Visit:
    """What happened while the path was at one block: the events from `first` to before `end`."""

    way: int  # up or down through all blocks, once; an end where the path turns belongs to the way that leads there
    down: bool
    block: int
    first: int
    end: int = 0


class _Irregular(Exception):
    """The record is not one path through equal blocks."""


@dataclass(frozen=True)
class Count:
    """Bytes that a collective communicated while the record was made."""

    position: int  # number of events before it
    key: str  # of `StepCost.comm_bytes`
    amount: int
    entry: Entry | None = None  # the storage whose bytes these are


def lengthen(ledger: Ledger, counts: Sequence[Count], blocks: Blocks) -> tuple[Ledger, Sequence[Count]] | None:
    """Turns the record of a shortened model into that of the whole one, in place.

    Args:
        ledger: of the shortened model, all steps.
        counts: what was counted meanwhile.
        blocks: as `shorten` returned it.

    Returns:
        The ledger, and what would have been counted; None where the record does not repeat itself.
    """
    try:
        path = _Path(ledger.events, ledger.step_starts, counts, blocks)
        ledger.events, ledger.step_starts, counts = path.lengthened()
    except _Irregular:
        return None
    return ledger, counts


class _Path:
    """The record of a shortened model as visits to its blocks."""

    def __init__(self, events: Sequence[Event], starts: Sequence[int], counts: Sequence[Count], blocks: Blocks):
        self.events = events
        self.blocks = blocks
        self.extra = blocks.count - KEPT
        self.visits = self._visits()
        self._names: dict[tuple[str, int, int], str] = {}
        self._growths: dict[int, int] = {}
        self.births: dict[int, _Birth] = {}
        self.born_bytes: dict[int, int] = {}
        for visit in self.visits:
            for index in range(visit.first, visit.end):
                entry = events[index].entry
                if id(entry) not in self.births:
                    self.births[id(entry)] = _Birth(visit.way, visit.block, index - visit.first)
                    self.born_bytes[id(entry)] = events[index].after
        ends = [visit.end for visit in self.visits]
        # What falls between two visits belongs to the first.
        self.starts = [(bisect_left(ends, start), start) for start in starts]
        self.counts: dict[int, list[Count]] = defaultdict(list)
        for count in counts:
            self.counts[bisect_left(ends, count.position)].append(count)
        self._check_that_inner_blocks_are_alike()

    def lengthened(self) -> tuple[list[Event], list[int], list[Count]]:
        """Events, beginnings of steps, and counts of the whole model."""
        events: list[Event] = []
        counts: list[Count] = []
        starts: list[int] = []
        made: dict[_Birth, Entry] = {}
        for number, visit in enumerate(self.visits):
            for block in self._repeats(visit):
                shift = len(events) - visit.first
                events += [self._event(event, visit, block, made) for event in self._events_of(visit)]
                counts += [self._count(count, shift) for count in self.counts[number]]
            starts += [start + shift for at, start in self.starts if at == number]
        return events, starts, counts

    # The path

    def _visits(self) -> list[_Visit]:
        last, visits = KEPT - 1, [_Visit(0, False, 0, 0)]
        for index, block in enumerate(self._labels()):
            here = visits[-1]
            if block is None or block == here.block:
                continue
            here.end = index
            step = block - here.block
            if step == (-1 if here.down else 1):
                visits.append(_Visit(here.way, here.down, block, index))
            elif abs(step) == 1 and here.block in (0, last):  # it turns
                visits.append(_Visit(here.way + 1, not here.down, block, index))
            elif abs(step) == last:  # from the end of one way to the beginning of another in the same direction
                visits.append(_Visit(here.way + 1, step > 0, block, index))
            else:
                raise _Irregular
        visits[-1].end = len(self.events)
        if visits[-1].block not in (0, last):
            raise _Irregular
        return visits

    def _labels(self) -> list[int | None]:
        """In which block each event happened; None where that is not known."""
        labels: list[int | None] = []
        for deaths, group in groupby(self.events, key=_is_death_in_update):
            here = [self._block(event) for event in group]
            # Where a loop over parameters makes something, what it made for the one before dies: that is no way back.
            # Deaths lead somewhere only where something dies in all blocks one after the other, such as gradients.
            labels += here if not deaths or set(range(KEPT)).issubset(here) else [None] * len(here)
        return labels

    def _block(self, event: Event) -> int | None:
        if event.phase in (Phase.forward, Phase.backward):
            return self.blocks.index(event.module)
        return self._owner(event.entry)

    def _owner(self, entry: Entry) -> int | None:
        """The block of the parameter that a storage belongs to, or was made from."""
        while not entry.name:
            if len(entry.made_from) != 1 or entry.made_from[0] is None:
                return None
            entry = entry.made_from[0]
        return self.blocks.index(entry.name)

    def _check_that_inner_blocks_are_alike(self) -> None:
        records: dict[int, dict[int, list[Any]]] = {_REPEATED: {}, _REPEATED + 1: {}}
        for number, visit in enumerate(self.visits):
            if visit.block in records:
                records[visit.block][visit.way] = [
                    *(self._relative(event, visit) for event in self._events_of(visit)),
                    *((count.position - visit.first, count.key, count.amount) for count in self.counts[number]),
                ]
        first, second = records.values()
        if first != second:
            raise _Irregular

    def _events_of(self, visit: _Visit) -> Iterator[Event]:
        return (self.events[index] for index in range(visit.first, visit.end))

    def _relative(self, event: Event, visit: _Visit) -> tuple:
        """An event, told so that it is equal for blocks that do the same."""
        entry, birth = event.entry, self.births[id(event.entry)]
        if abs(birth.block - visit.block) > 1:
            raise _Irregular
        return (
            (birth.way, birth.block - visit.block, birth.place),
            (entry.device, entry.category, self.blocks.moved(entry.name, 0), id(event.stream)),
            (event.before, event.after, event.phase, self._relative_module(event.module, visit)),
        )

    def _relative_module(self, name: str, visit: _Visit) -> Any:
        index = self.blocks.index(name)
        return name if index is None else (index - visit.block, self.blocks.moved(name, 0))

    # The longer one

    def _repeats(self, visit: _Visit) -> Sequence[int]:
        """The whole model's blocks at which what happened at this visit happens, in the order of the path."""
        if visit.block != _REPEATED:
            return [self._moved(visit.block)]
        repeats = range(_REPEATED, _REPEATED + self.extra + 1)
        return repeats[::-1] if visit.down else repeats

    def _moved(self, block: int) -> int:
        return block if block <= _REPEATED else block + self.extra

    def _event(self, event: Event, visit: _Visit, block: int, made: dict[_Birth, Entry]) -> Event:
        """What an event of a visit is when the path is at `block` of the whole model."""
        entry, birth = event.entry, self.births[id(event.entry)]
        key = _Birth(birth.way, self._place(birth.block, visit, block), birth.place)
        new = made.get(key)
        if new is None:
            name = self._name(entry.name, visit, block)
            new = made[key] = Entry(entry.device, entry.stream, entry.category, name=name)
        before, after = self._size(entry, event.before), self._size(entry, event.after)
        return Event(new, event.stream, before, after, event.phase, self._name(event.module, visit, block))

    def _name(self, name: str, visit: _Visit, block: int) -> str:
        """A module's or parameter's name in the whole model."""
        if not name:
            return name
        key = (name, visit.block, block)
        if key not in self._names:
            index = self.blocks.index(name)
            self._names[key] = name if index is None else self.blocks.moved(name, self._place(index, visit, block))
        return self._names[key]

    def _place(self, index: int, visit: _Visit, block: int) -> int:
        """Where in the whole model that lies which is in block `index` as seen from a visit."""
        distance = index - visit.block
        if abs(distance) <= 1:
            return block + distance
        if _REPEATED in (index, visit.block):
            raise _Irregular  # it would have to happen to each of the repeated blocks
        return self._moved(index)

    def _size(self, entry: Entry, size: int) -> int:
        """A size, which is larger in the whole model for what joins a part of each parameter."""
        growth = self._growths.get(id(entry))
        if growth is None:
            growth = self._growths[id(entry)] = self._growth(entry)
        return size + self.extra * growth if growth and size == self.born_bytes[id(entry)] else size

    def _growth(self, entry: Entry) -> int:
        """Bytes by which a storage grows with each block."""
        parts = entry.made_from
        if len(parts) == 1 and parts[0] is not None and id(parts[0]) in self.born_bytes:
            same = self.born_bytes[id(parts[0])] == self.born_bytes[id(entry)]
            return self._growth(parts[0]) if same else 0
        sizes = [(part and self._owner(part), self.born_bytes.get(id(part), 0)) for part in parts]
        if len(sizes) < 2 or sum(size for _, size in sizes) != self.born_bytes[id(entry)]:
            return 0
        return sum(size for owner, size in sizes if owner == _REPEATED)

    def _count(self, count: Count, shift: int) -> Count:
        amount = count.amount if count.entry is None else self._size(count.entry, count.amount)
        return replace(count, position=count.position + shift, amount=amount)


def _is_death_in_update(event: Event) -> bool:
    return event.phase in (Phase.init, Phase.optimizer) and event.after < event.before
