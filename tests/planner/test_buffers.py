"""The buffer that a unit's gradients are reduced from, to the byte: NVIDIA-NeMo/Automodel#3708.

There, an untied embedding and output of 248,320 x 5,120 (Qwen3.8-27B) shared the root unit on 64 H100. Joined for
reduction in fp32 they are 2 x 248,320 x 5,120 x 4 = 10,171,187,200 bytes in one piece, for which no room was found. A
unit for each bounds the piece by one matrix.
"""

from collections import Counter

import pytest

from shardlab.planner.simulation import simulate
from shardlab.telemetry.events import Category
from tests.ranks import one_process
from tests.training import config_of

RUN = (
    "model=llama_tiny", "model.vocab_size=248320", "model.dim=5120", "model.layers=1", "model.heads=40",
    "model.ffn_dim=64", "data=random_tokens", "data.vocab_size=248320", "data.seq_len=8", "train.micro_batch=1",
    "train.steps=1", "precision=bf16",
)  # fmt: skip


def communication_buffers(units: str, world_size: int) -> Counter[int]:
    """How many buffers of each size, in bytes, a simulated step allocates for communication."""
    config = config_of(*RUN, f"sharding.units={units}", world_size=world_size)
    ledger = simulate(config, world_size=world_size, on_cpu=False).ledger
    return Counter(event.after for event in ledger.events if event.entry.category is Category.communication)


@pytest.fixture(scope="module")
def simulated():
    """Simulates in a process of its own."""
    with one_process() as pool:
        yield lambda *args: pool.submit(communication_buffers, *args).result()


@pytest.mark.parametrize(("units", "world_size", "nbytes"), [
    ('["layers.*", "norm"]', 64, 10_171_187_200),
    ('["layers.*", "norm"]', 7, 2 * 7 * 35_475 * 5120 * 4),  # 248,320 rows are padded to 7 x 35,475
    ('["layers.*"]', 64, 10_171_187_200 + 4 * 5120),  # the last norm lies in the root too
    ('["layers.*", "norm", "output"]', 64, 10_171_187_200 // 2),
])  # fmt: skip
def test_a_unit_is_reduced_from_one_buffer_of_all_its_gradients_in_fp32(simulated, units, world_size, nbytes):
    buffers = simulated(units, world_size)
    assert max(buffers) == nbytes
    assert buffers[nbytes] == (2 if "output" in units else 1)
