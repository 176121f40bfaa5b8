"""Equal steps: the last one of the window need not be simulated where it begins as the one before did."""

import gc
from collections import Counter, defaultdict
from dataclasses import replace

from shardlab.telemetry.ledger import Entry, Ledger


def repeat_step(ledger: Ledger) -> bool:
    """Records the last step once more, in place, as if it had been simulated again.

    That is so if the step leaves what it found: each storage at its size, or in its place another one of the same size
    and kind. The first step does not: optimizer state is born in it.

    Args:
        ledger: of two steps or more, the last one over.

    Returns:
        Whether the step could be repeated; if not, nothing has been changed.
    """
    over = len(ledger.events)
    gc.collect()  # as the next step would begin with
    start = ledger.step_starts[-1]
    found: Counter[Entry] = Counter()
    for event in ledger.events[:start]:
        found[event.entry] = event.after
    left = found.copy()
    for event in ledger.events[start:]:
        left[event.entry] = event.after
    replaced: defaultdict[tuple, list[Entry]] = defaultdict(list)  # those that are gone, or new, by size and kind
    replacing: defaultdict[tuple, list[Entry]] = defaultdict(list)
    for entry, size in left.items():
        if found[entry] != size:
            old, new = found[entry], size
            if old and new:
                return False
            (replaced if old else replacing)[old or new, entry.category, entry.device, entry.stream].append(entry)
    if {kind: len(entries) for kind, entries in replaced.items()} != {k: len(e) for k, e in replacing.items()}:
        return False
    again = {entry: entry for entry, size in left.items() if found[entry] == size and entry in found}
    for kind, entries in replaced.items():
        again |= zip(entries, replacing[kind], strict=True)
    ledger.step_starts.append(len(ledger.events))
    for event in ledger.events[start:over]:
        if event.entry not in again:
            entry = event.entry
            again[entry] = Entry(entry.device, entry.stream, entry.category, name=entry.name, made_from=entry.made_from)
        ledger.events.append(replace(event, entry=again[event.entry]))
    return True
