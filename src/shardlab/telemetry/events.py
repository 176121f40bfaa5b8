"""What happens to storages: the events that the ledger records, and the peak that they lead to."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Category(Enum):
    """What a storage is for; the keys of `breakdown`."""

    parameters = "parameters"  # this rank's shards
    gradients = "gradients"  # reduced, this rank's shards
    optimizer = "optimizer"
    unsharded_parameters = "unsharded_parameters"  # gathered for compute
    unsharded_gradients = "unsharded_gradients"  # not yet reduced
    activations = "activations"  # made by forward and backward
    communication = "communication"  # what collectives send and receive
    inputs = "inputs"
    other = "other"


class Phase(Enum):
    init = "init"
    forward = "forward"
    backward = "backward"
    optimizer = "optimizer"  # unscaling, norm and clipping too


@dataclass(eq=False)
class Entry:
    """One storage."""

    device: str
    stream: object  # on which it was allocated last
    category: Category
    size: int = 0  # bytes, now
    name: str = (
        ""  # of the parameter or buffer whose memory, or whose gradient's, this is; of the unit it is gathered for
    )
    made_from: Sequence["Entry | None"] = ()  # while building and updating: what an operator made it from


class Event(NamedTuple):
    """A change of one storage's size: from 0 at its birth, to 0 at its death."""

    entry: Entry
    stream: object  # on which it was allocated
    before: int
    after: int
    phase: Phase
    module: str


@dataclass(frozen=True)
class Peak:
    """The most that was allocated at a time."""

    bytes: int
    phase: Phase
    module: str
    breakdown: dict[str, int]  # bytes by category; they add up to `bytes`
    alive: Mapping[Entry, int]  # bytes of each storage


def peak_of(events: Sequence[Event], sizes: Sequence[int]) -> Peak:
    """The first moment at which most was allocated.

    Args:
        events: of one device.
        sizes: bytes that the event's storage takes after it.
    """
    sizes_now: dict[Entry, int] = {}
    total = highest = 0
    last = -1  # the event that leads to the peak
    for index, (event, size) in enumerate(zip(events, sizes, strict=True)):
        total += size - sizes_now.get(event.entry, 0)
        sizes_now[event.entry] = size
        if total > highest:
            highest, last = total, index
    alive = {event.entry: size for event, size in zip(events[: last + 1], sizes, strict=False)}
    breakdown: Counter[Category] = Counter()
    for entry, size in alive.items():
        breakdown[entry.category] += size
    phase, module = (events[last].phase, events[last].module) if events else (Phase.init, "")
    return Peak(highest, phase, module, {category.value: breakdown[category] for category in Category}, alive)
