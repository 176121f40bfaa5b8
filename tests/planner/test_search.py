"""The search for the largest value that fits: exact, and in few tries."""

import pytest

from shardlab.planner.search import largest_that_fits, micro_batches, sequence_lengths

MIB = 1 << 20


def linear(value: int) -> int:
    return 3000 + 17 * value


def in_segments(value: int) -> int:
    """As an allocator reserves: in whole segments, so that a larger value takes less now and then."""
    return -(-(4 * value + value % 7) // 20) * 20


def with_activations_squared(value: int) -> int:
    return 5000 + 3 * value + value * value


def flat_then_steep(value: int) -> int:
    return 1000 + max(0, value - 300) * 50


def assert_exact(needed, capacity, values, start):
    found, tried = largest_that_fits(needed, capacity, values, start=start)
    assert tried == {value: needed(value) for value in tried}
    assert found in tried or (found is None and values[0] in tried)
    assert found is None or needed(found) <= capacity
    index = -1 if found is None else values.index(found)
    if index + 1 < len(values):
        assert tried[values[index + 1]] > capacity, "the next larger value was not seen to fail"
    return len(tried)


@pytest.mark.parametrize("needed", [linear, in_segments, with_activations_squared, flat_then_steep])
@pytest.mark.parametrize("values", [range(1, 3000), [1, 2, 3, 4, 6, 8, 12, 24], sequence_lengths(4000)], ids=str)
def test_the_value_found_fits_and_the_next_one_does_not(needed, values):
    for capacity in (needed(1) - 1, needed(1), needed(2) + 1, needed(301), needed(700) - 1, needed(2999), 10**9):
        for start in (1, 8, 500, 10_000):
            assert assert_exact(needed, capacity, values, start) <= 30


@pytest.mark.parametrize("start", [1, 8, 600])
def test_where_memory_grows_in_proportion_five_tries_are_enough(start):
    for capacity in range(linear(2), linear(3000), 997):
        assert assert_exact(linear, capacity, range(1, 1 << 20), start) <= 5


def test_a_global_batch_leaves_micro_batches_that_divide_it():
    assert micro_batches(global_batch=48, accumulation_steps=None, world_size=4) == [1, 2, 3, 4, 6, 12]
    assert micro_batches(global_batch=48, accumulation_steps=3, world_size=4) == [4]
    assert micro_batches(global_batch=None, accumulation_steps=3, world_size=4)[:3] == range(1, 4)


def test_sequences_grow_by_128_tokens_up_to_what_the_model_takes():
    assert sequence_lengths(100) == list(range(1, 101))
    assert sequence_lengths(512) == [*range(1, 128), 128, 256, 384, 512]
    assert sequence_lengths(300)[-3:] == [128, 256, 300]
    assert sequence_lengths(None)[-1] > 1_000_000
