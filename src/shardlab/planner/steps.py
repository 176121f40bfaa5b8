"""Equal steps, and equal micro-batches of a step: those that begin as the one before did need not be simulated."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from shardlab.telemetry.events import Entry, Event
from shardlab.telemetry.ledger import Ledger


def repeat_step(ledger: Ledger) -> bool:
    """Records the last step once more, in place, as if it had been simulated again.

    That is so if the step leaves what it found: each storage at its size, or in its place another one of the same size
    and kind. The first step does not: optimizer state is born in it.

    Args:
        ledger: of two steps or more, the last one over.

    Returns:
        Whether the step could be repeated; if not, nothing has been changed.
    """
    start, over = ledger.step_starts[-1], len(ledger.events)
    gc.collect()  # as the next step would begin with
    again = {event.entry: event.entry for event in ledger.events[:start]}
    replaced: defaultdict[tuple, list[Entry]] = defaultdict(list)  # those that are gone, or new, by size and kind
    replacing: defaultdict[tuple, list[Entry]] = defaultdict(list)
    for entry, (found, left) in _found_and_left(ledger.events[start:]).items():
        if found == left:
            continue
        if found and left:
            return False
        kind = found or left, entry.category, entry.device, entry.stream
        (replaced if found else replacing)[kind].append(entry)
        again.pop(entry, None)
    if {kind: len(entries) for kind, entries in replaced.items()} != {k: len(e) for k, e in replacing.items()}:
        return False
    for kind, entries in replaced.items():
        again |= zip(entries, replacing[kind], strict=True)
    ledger.step_starts.append(len(ledger.events))
    _record_again(ledger, start, over, again)
    return True


class RepeatedMicroBatches:
    """Takes the place of a step's `micro_batch`: the third one of a step and those after it are not simulated.

    They are recorded as the one before them was, if that has left each storage as it found it. The first one does not,
    since gradients are born in it. The last one, which reduces them, is always simulated.
    """

    def __init__(self, micro_batch: Callable[..., None], ledger: Ledger, repeated: Callable[[int, int], None]):
        """
        Args:
            micro_batch: of the step.
            ledger: that records it.
            repeated: is told of what has been recorded again, by indices in the ledger's events: where that begins and
                ends. It lies right behind.
        """
        self._micro_batch = micro_batch
        self._ledger = ledger
        self._repeated = repeated
        self._step = self._number = self._start = 0  # of the current step and micro-batch, counted from one
        self._known: set[Entry] = set()  # storages that were there before the micro-batch that may be repeated
        self._looked_at = 0  # events, for these

    def __call__(self, *args: Any, is_last: bool) -> None:
        ledger = self._ledger
        step, start, over = len(ledger.step_starts), self._start, len(ledger.events)
        self._number = self._number + 1 if step == self._step else 1
        self._step, self._start = step, over
        if self._number < 3 or is_last or not self.repeat(start, over):
            self._micro_batch(*args, is_last=is_last)

    def repeat(self, start: int, over: int) -> bool:
        """Records the events of a micro-batch once more, if it has left what it found. Returns whether it has."""
        sizes = _found_and_left(self._ledger.events[start:over])
        if any(found != left for found, left in sizes.values()):
            return False
        self._known.update(event.entry for event in self._ledger.events[self._looked_at : start])
        self._looked_at = start
        _record_again(self._ledger, start, over, {entry: entry for entry in sizes if entry in self._known})
        self._ledger.forwards_left -= 1
        self._repeated(start, over)
        return True


def _found_and_left(events: Iterable[Event]) -> dict[Entry, tuple[int, int]]:
    """The size of each storage of some events before and after them."""
    sizes: dict[Entry, tuple[int, int]] = {}
    for event in events:
        found, _ = sizes.get(event.entry, (event.before, 0))
        sizes[event.entry] = found, event.after
    return sizes


def _record_again(ledger: Ledger, start: int, over: int, again: dict[Entry, Entry]) -> None:
    """Adds some events once more, of the storages that `again` names for theirs, and of new ones for all others."""
    for event in ledger.events[start:over]:
        entry = event.entry
        if entry not in again:
            again[entry] = Entry(entry.device, entry.stream, entry.category, name=entry.name, made_from=entry.made_from)
        ledger.events.append(event._replace(entry=again[entry]))
