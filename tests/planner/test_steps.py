"""Which steps may be repeated: those that leave what they found."""

from types import SimpleNamespace

import pytest

from shardlab.planner.steps import repeat_step
from shardlab.telemetry.events import Category, Entry, Event, Phase


def ledger_of(*changes: tuple[Entry, int, int]) -> SimpleNamespace:
    """A ledger of these changes of size; the second step begins after the first one of them."""
    events = [Event(entry, None, before, after, Phase.forward, "") for entry, before, after in changes]
    return SimpleNamespace(events=events, step_starts=[0, 1])


def entry(category: Category = Category.activations) -> Entry:
    return Entry("sim", None, category)


def test_what_a_step_makes_and_frees_is_made_anew_and_what_it_resizes_is_the_same():
    kept, made = entry(), entry()
    ledger = ledger_of((kept, 0, 8), (kept, 8, 0), (made, 0, 4), (kept, 0, 8), (made, 4, 0))
    assert repeat_step(ledger)
    assert ledger.step_starts == [0, 1, 5]
    again = ledger.events[5:]
    assert [(e.before, e.after) for e in again] == [(8, 0), (0, 4), (0, 8), (4, 0)]
    assert again[0].entry is again[2].entry is kept
    assert again[1].entry is again[3].entry is not made


def test_what_one_step_leaves_and_the_next_one_frees_takes_turns():
    old, new = entry(), entry()
    ledger = ledger_of((old, 0, 4), (new, 0, 4), (old, 4, 0))
    assert repeat_step(ledger)
    last, freed = (event.entry for event in ledger.events[3:])
    assert freed is new
    assert last not in (old, new)


@pytest.mark.parametrize("changes", [
    ((entry(), 0, 4),),  # leaves more
    ((entry(Category.optimizer), 0, 8),),  # of another kind than what it frees
])  # fmt: skip
def test_a_step_that_leaves_something_else_is_not_repeated(changes):
    old = entry()
    ledger = ledger_of((old, 0, 8), *changes, (old, 8, 0))
    events = list(ledger.events)
    assert not repeat_step(ledger)
    assert (ledger.events, ledger.step_starts) == (events, [0, 1])


def test_a_step_that_leaves_a_storage_at_another_size_is_not_repeated():
    grown = entry()
    assert not repeat_step(ledger_of((grown, 0, 8), (grown, 8, 12)))
