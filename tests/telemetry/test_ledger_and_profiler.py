"""The measured ledger against torch.profiler, which is told of each block that the CPU allocator gives out.

The two agree on storages to the byte. What the profiler sees besides is told apart by the operator around it: scratch,
which an operator takes and gives back; gloo's own copies of what it sends; and the states of the random number
generator, which checkpointing keeps. `bench/ledger_vs_profiler.py` tabulates them.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from shardlab.telemetry import Ledger
from tests.training import CPU, batches_of, built_from, config_of

STORAGE, PROCESS_GROUP, GENERATOR_STATE = "storage", "process group", "generator state"  # other kinds: operators
RUN = (
    "model=llama_tiny", "model.layers=2", "data=random_tokens", "data.seq_len=64", "train.micro_batch=2",
    "train.steps=2", "train.eval_every=0",
)  # fmt: skip
NOTABLE_BYTES = 4096
# What takes more than that, and the ledger does not see.
KNOWN = {
    PROCESS_GROUP,
    GENERATOR_STATE,  # 5,056 bytes for each block, made by no operator
    "aten::_scaled_dot_product_flash_attention_for_cpu",  # a tile of scores for each thread
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::mm",  # in bf16, on CPUs without instructions for it
    "fsdp::chunk_cat",  # where it also casts, bf16 to fp32: a CPU joins the gradients first, where CUDA has one kernel
}


@dataclass(frozen=True)
class Comparison:
    """One rank, from before `build` to the end of the last step; in bytes."""

    ledger: int  # its peak
    storages: int  # the profiler's peak, without what storages are not
    untold: int  # of storages whose end the profiler missed: `storages` may be too high by as much
    profiler: int  # its peak of all
    unseen: dict[str, int]  # what of that the ledger does not see, by kind
    largest: dict[str, int]  # the largest block of each such kind at any time, where it is notable


@dataclass(eq=False)
class _Block:
    nbytes: int
    kind: str
    born_ns: int
    died_ns: int | None
    noted_ns: int  # when the ledger hears of it: a result is noted when its operator has ended


def compare(*overrides: str) -> Comparison:
    """Builds and trains on this rank, while ledger and profiler both watch."""
    config = config_of(*overrides)
    steps = batches_of(config)
    gc.collect()
    ledger = Ledger(CPU)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with ledger:
            built = built_from(config)
        ledger.watch(built.model, built.optimizers)
        for micro_batches in steps:
            mine = [(inputs.clone(), labels.clone()) for inputs, labels in micro_batches]  # so that both see them
            with ledger:
                ledger.begin_step(mine)
                built.step(mine)
            del mine
        ledger.close()
        del built
        gc.collect()
    blocks, untold = _blocks(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    largest: dict[str, int] = {}
    for block in blocks:
        if block.kind != STORAGE and block.nbytes > NOTABLE_BYTES:
            largest[block.kind] = max(block.nbytes, largest.get(block.kind, 0))
    storages = [(block.noted_ns, block) for block in blocks if block.kind == STORAGE]
    at_peak = _peak((block.born_ns, block) for block in blocks)
    return Comparison(
        ledger=ledger.peak().bytes,
        storages=_peak(storages).total(),
        untold=untold,
        profiler=at_peak.total(),
        unseen={kind: nbytes for kind, nbytes in at_peak.items() if nbytes and kind != STORAGE},
        largest=largest,
    )


def _blocks(tree: Iterable[Any]) -> tuple[list[_Block], int]:
    """All blocks that were given out in the window, and the bytes of storages whose end was not told.

    The profiler hears of a block's end only from threads that it knows, and gloo's are such only while they work. What
    one of them is the last to hold, and lets go of later, is seen to be gone when its address is given out again.
    """
    events = [event for event in _walk(tree) if event.tag == _EventType.Allocation]
    blocks: list[_Block] = []
    live: dict[int, tuple[_Block, Any]] = {}  # by address
    untold = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        address, nbytes, now = event.typed[1].ptr, event.typed[1].alloc_size, event.start_time_ns
        found = live.pop(address, None)
        if found is not None:
            block, birth = found
            block.died_ns = now
            if nbytes > 0:
                untold += block.nbytes * (block.kind == STORAGE)
            elif block.kind == STORAGE and (operator := _operator(birth)) in _ancestors(event):
                block.kind = operator.name
        if nbytes > 0:
            operator = _operator(event)
            noted = now if operator is None else operator.end_time_ns
            block = _Block(nbytes, _kind(event, operator), now, None, noted)
            blocks.append(block)
            live[address] = block, event
    return blocks, untold + sum(block.nbytes for block, _ in live.values() if block.kind == STORAGE)


def _kind(event: Any, operator: Any) -> str:
    if any(ancestor.name.startswith(("c10d::", "gloo:")) for ancestor in _ancestors(event)):
        return PROCESS_GROUP  # these operators write into tensors that exist already
    if operator is None and event.typed[1].alloc_size == torch.get_rng_state().nbytes:
        return GENERATOR_STATE
    return STORAGE


def _operator(event: Any) -> Any:
    """The operator around an event as a dispatch mode sees it, or None."""
    inner = None
    for ancestor in _ancestors(event):
        if ancestor.name == "PythonDispatchMode":
            return inner
        inner = ancestor
    return None


def _ancestors(event: Any) -> Iterator[Any]:
    while event := event.parent:
        yield event


def _walk(tree: Iterable[Any]) -> Iterator[Any]:
    stack = list(tree)
    while stack:
        event = stack.pop()
        yield event
        stack += event.children


def _peak(blocks: Iterable[tuple[int, _Block]]) -> Counter[str]:
    """The most that was live at a time, by kind; of blocks with the moment from which each counts."""
    changes = []
    for since, block in blocks:
        changes.append((since, block.nbytes, block.kind))
        if block.died_ns is not None:
            changes.append((max(since, block.died_ns), -block.nbytes, block.kind))
    live, highest = Counter[str](), Counter[str]()
    total = most = 0
    for _, change, kind in sorted(changes, key=lambda change: change[0]):
        live[kind] += change
        total += change
        if total > most:
            most, highest = total, live.copy()
    return highest


@pytest.mark.parametrize("overrides", [
    ["precision=fp32", "sharding=full_shard"],
    ["precision=bf16", "sharding=full_shard", "activation=full"],
])  # fmt: skip
def test_the_ledgers_peak_is_the_profilers(on_ranks, overrides):
    for rank in on_ranks(2)(compare, *RUN, *overrides):
        assert rank.ledger <= rank.storages <= rank.ledger + rank.untold
        assert rank.largest.keys() <= KNOWN
        scratch = [nbytes for kind, nbytes in rank.largest.items() if kind != PROCESS_GROUP]
        assert max(scratch) < 0.02 * rank.ledger
