"""The memory timeline: what it draws equals what the ledger's events say, and it needs nothing but itself."""

import json
import random
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardlab.telemetry.events import Category, Entry, Event, Phase
from shardlab.telemetry.ledger import Ledger
from shardlab.telemetry.timeline import MAX_POINTS, write_timeline
from tests.training import CPU, recorded_run


def views_of(ledger: Ledger, file: Path) -> list[dict[str, Any]]:
    """What the page that is written of a ledger draws."""
    write_timeline(file, ledger, title="a run")
    (data,) = re.findall(r"^const views = (.*);$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return json.loads(data)


def bytes_of(view: dict[str, Any]) -> dict[str, list[int]]:
    return {series["name"]: series["bytes"] for series in view["series"]}


def ledger_of(events: list[Event], *, step_starts: list[int]) -> Ledger:
    ledger = Ledger(CPU)
    ledger.events, ledger.step_starts = events, step_starts
    return ledger


def birth(
    size: int, *, category: Category = Category.activations, phase: Phase = Phase.forward, device: str = "cpu"
) -> Event:
    return Event(Entry(device, None, category), None, 0, size, phase, "layers.0")


def death(event: Event, *, phase: Phase = Phase.backward) -> Event:
    return Event(event.entry, None, event.after, 0, phase, "layers.1")


def random_events(count: int) -> list[Event]:
    """Births and deaths on two devices, one of which is the ledger's."""
    draw = random.Random(0)
    events: list[Event] = []
    alive: list[Event] = []
    while len(events) < count:
        if alive and draw.random() < 0.5:
            events.append(death(alive.pop(draw.randrange(len(alive)))))
        else:
            category, device = draw.choice(list(Category)), draw.choice(["cpu", "cpu", "meta"])
            alive.append(birth(draw.randrange(1, 1 << 25), category=category, device=device))
            events.append(alive[-1])
    return events


def replayed(events: list[Event], *, begin: int) -> list[Counter[str]]:
    """Live bytes by category where the event `begin` comes, and after each that follows, on the CPU."""
    sizes: dict[Entry, int] = {}

    def now() -> Counter[str]:
        live: Counter[str] = Counter()
        for entry, size in sizes.items():
            live[entry.category.value.replace("_", " ")] += size
        return live

    states = []
    for index, event in enumerate(events):
        if index == begin:
            states.append(now())
        if event.entry.device == "cpu":
            sizes[event.entry] = event.after
            if index >= begin:
                states.append(now())
    return states


def totals_of(events: list[Event]) -> list[int]:
    return list(accumulate((e.after - e.before for e in events if e.entry.device == "cpu"), initial=0))


def test_each_point_is_the_state_after_so_many_events(tmp_path):
    ledger = ledger_of(random_events(1000), step_starts=[200, 600])
    step, window = views_of(ledger, tmp_path / "page.html")
    assert (step["name"], window["name"]) == ("step 2", "whole window")
    for view, begin in ((step, 600), (window, 0)):
        states = replayed(ledger.events, begin=begin)
        assert view["points"] == list(range(len(states)))
        drawn = bytes_of(view)
        assert drawn.pop("total") == [state.total() for state in states]
        assert drawn == {name: [state[name] for state in states] for name in drawn}
        assert sum(map(sum, drawn.values())) == sum(state.total() for state in states)
    assert bytes_of(window)["total"][window["peak"]] == ledger.peak().bytes


def test_a_step_begins_with_what_is_alive_then(tmp_path):
    kept = birth(100, category=Category.parameters)
    kept.entry.category = Category.optimizer  # learnt after its birth
    step, window = views_of(ledger_of([kept, birth(7)], step_starts=[1]), tmp_path / "page.html")
    assert bytes_of(step) == {"optimizer": [100, 100], "activations": [0, 7], "total": [100, 107]}
    assert bytes_of(window)["total"] == [0, 100, 107]


def test_every_spike_of_a_long_step_is_drawn_and_the_page_stays_small(tmp_path):
    events: list[Event] = []
    for place, event in enumerate(random_events(60_000)):
        events.append(event)
        if place % 500 == 250:
            spike = birth((1 << 40) + place)
            events += [spike, death(spike)]
    file = tmp_path / "page.html"
    step, _ = views_of(ledger_of(events, step_starts=[0]), file)
    totals, drawn = totals_of(events), bytes_of(step)["total"]
    spikes = [total for total in totals if total > 1 << 40]
    assert len(spikes) == 120
    assert [total for total in drawn if total > 1 << 40] == spikes
    assert drawn[step["peak"]] == max(totals)
    assert drawn == [totals[point] for point in step["points"]]
    assert (step["points"][0], step["points"][-1]) == (0, len(totals) - 1)
    assert len(drawn) <= MAX_POINTS
    assert file.stat().st_size < 8_000_000  # of which plotly.js has 5


def test_the_peak_is_marked_and_told_to_the_byte(tmp_path):
    events = [birth(3 << 30), birth((1 << 30) + 1, phase=Phase.backward)]
    file = tmp_path / "page.html"
    step, _ = views_of(ledger_of([*events, *map(death, events)], step_starts=[0]), file)
    mark = step["layout"]["annotations"][-1]
    assert (mark["x"], mark["y"], mark["text"]) == (2, 4 + 2**-30, "<b>peak 4.00 GiB</b>")
    sentence = "Peak of step 1: 4.00 GiB (4,294,967,297 bytes) after event 2 of 4: backward of layers.0."
    assert f"<p>{sentence}</p>" in file.read_text(encoding="utf-8")


def test_phases_of_several_micro_batches_are_numbered(tmp_path):
    """The norm and the clipping of gradients: of no forward, though none has begun to call itself otherwise."""
    phases = [Phase.forward, Phase.backward, Phase.forward, Phase.backward, Phase.optimizer]
    events = [birth(1, phase=phase) for phase in phases for _ in range(2)]
    step, _ = views_of(ledger_of(events, step_starts=[0]), tmp_path / "page.html")
    labels = [note["text"] for note in step["layout"]["annotations"][:-1]]
    assert labels == ["forward 1", "backward 1", "forward 2", "backward 2", "optimizer"]
    assert [(band["x0"], band["x1"]) for band in step["layout"]["shapes"]] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert step["places"][9] == "optimizer of layers.0"


def test_a_ledger_without_a_step_or_without_events_still_gives_a_page(tmp_path):
    (window,) = views_of(ledger_of([birth(5)], step_starts=[]), tmp_path / "page.html")
    assert bytes_of(window)["total"] == [0, 5]
    step, window = views_of(ledger_of([birth(5, device="meta")], step_starts=[0]), tmp_path / "page.html")
    assert bytes_of(step) == bytes_of(window) == {"total": [0]}


def test_the_page_loads_nothing_and_takes_no_markup_from_its_texts(tmp_path):
    evil = Event(Entry("cpu", None, Category.other), None, 0, 1, Phase.forward, "</script><script src=x>")
    file = tmp_path / "page.html"
    write_timeline(file, ledger_of([evil], step_starts=[0]), title="</title><img src=x>")
    page = file.read_text(encoding="utf-8")
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:" in page
    assert page.count("</script>") == page.count("\n<script>") == 2
    own = re.sub(r"(?s)<script>/\*\*\n\* plotly.js.*?</script>", "", page)
    assert len(own) < 20_000
    assert not re.search(r"<(link|img|iframe)|<\w+ [^>]*\b(src|href)=|@import|url\(|fetch\(|://", own)


def timeline_of_run(file: Path, *overrides: str) -> list[dict[str, Any]]:
    """Trains as configured with a ledger, as the trainer does; checks the page against the events."""
    ledger = recorded_run(*overrides)
    ledger.close()
    views = views_of(ledger, file)
    totals = totals_of(ledger.events)
    assert [bytes_of(view)["total"][view["peak"]] for view in views] == [
        max(totals[ledger.step_starts[-1] :]),
        ledger.peak().bytes,
    ]
    return views


def test_the_timeline_of_a_run(on_ranks, tmp_path):
    run = ("model=llama_tiny", "model.layers=2", "data=random_tokens", "data.seq_len=32", "train.micro_batch=2",
           "train.steps=2", "accumulation=reduce_every", "accumulation.steps=2", "activation=full")  # fmt: skip
    ((step, window),) = on_ranks(1)(timeline_of_run, tmp_path / "page.html", *run)
    labels = [note["text"] for note in step["layout"]["annotations"]]
    assert labels[:-1] == ["forward 1", "backward 1", "forward 2", "backward 2", "optimizer"]
    assert [note["text"] for note in window["layout"]["annotations"]][:-1] == ["step 1", "step 2"]
    assert any(place.startswith("forward of layers.1") for place in step["places"])
    assert any(place.startswith("backward of layers.1") for place in step["places"])
    drawn = bytes_of(step)
    assert drawn.keys() >= {"parameters", "optimizer", "gradients", "activations", "unsharded parameters", "inputs"}
    assert all(nbytes > 0 for nbytes in drawn["parameters"] + drawn["optimizer"])
    assert drawn["gradients"][0] == drawn["gradients"][-1] == 0
