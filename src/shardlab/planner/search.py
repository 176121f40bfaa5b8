"""Search for the largest value of a key whose plan fits."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

SEQ_LEN_STEP = 128  # tokens; shorter sequences are searched one by one
MOST_TOKENS = 1 << 24  # where the model sets no limit
MOST_SAMPLES = 1 << 40


def largest_that_fits(
    needed_bytes: Callable[[int], int], capacity_bytes: int, values: Sequence[int], *, start: int
) -> tuple[int | None, dict[int, int]]:
    """The value that fits while the next larger one does not, both of them tried.

    Memory is taken to grow with the value, nearly in proportion: the next try is where a straight line through two of
    the earlier ones meets the capacity. Where that leads on too slowly, the bracket is halved, or the step doubled.

    Args:
        needed_bytes: what a value takes.
        capacity_bytes: what there is.
        values: that are possible, ascending.
        start: the first to try, or the next smaller one that is possible.

    Returns:
        The value, None if even the smallest does not fit; and each value that was tried, with its bytes.
    """
    tried: dict[int, int] = {}
    fits, fails = -1, len(values)  # indices in `values` that are known to; the ends stand for what there is not
    guess, stride, is_slow = bisect_right(values, start) - 1, 1, False
    while fails - fits > 1:
        guess = min(max(guess, fits + 1), fails - 1)
        before, value = fails - fits, values[guess]
        tried[value] = needed_bytes(value)
        if tried[value] <= capacity_bytes:
            fits = guess
        else:
            fails = guess
        has_bracket = fits >= 0 and fails < len(values)
        is_slow = len(tried) > 3 and 2 * (fails - fits) > before and not is_slow
        if len(tried) == 1:
            guess = bisect_left(values, 2 * value) if fits >= 0 else bisect_right(values, value // 2) - 1
        elif has_bracket and is_slow:
            guess = (fits + fails) // 2
        else:
            # Without a bracket through the outermost tries: the longer the line, the less it minds whole segments.
            low, high = (values[fits], values[fails]) if has_bracket else (min(tried), max(tried))
            guess = bisect_right(values, _meets(capacity_bytes, (low, tried[low]), (high, tried[high]))) - 1
            if not has_bracket:
                guess = max(guess, fits + stride) if fits >= 0 else min(guess, fails - stride)
                stride *= 2
    return values[fits] if fits >= 0 else None, tried


def _meets(capacity_bytes: int, low: tuple[int, int], high: tuple[int, int]) -> float:
    """The value at which the line through two tries, (value, bytes) each, meets the capacity."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return low[0] + (capacity_bytes - low[1]) / slope if slope > 0 else 2 * high[0]


def micro_batches(*, global_batch: int | None, accumulation_steps: int | None, world_size: int) -> Sequence[int]:
    """Values of `train.micro_batch`: all, or those that a given `train.global_batch` allows."""
    if global_batch is None:
        return range(1, MOST_SAMPLES)
    per_rank = global_batch // world_size
    steps = range(1, per_rank + 1) if accumulation_steps is None else [accumulation_steps]
    return sorted(per_rank // count for count in steps if per_rank % count == 0) or [1]


def sequence_lengths(longest: int | None) -> Sequence[int]:
    """Values of `data.seq_len`: multiples of SEQ_LEN_STEP, below the first of them all, and the longest possible."""
    most = longest or MOST_TOKENS
    lengths = [*range(1, min(SEQ_LEN_STEP, most + 1)), *range(SEQ_LEN_STEP, most + 1, SEQ_LEN_STEP)]
    return lengths if lengths[-1] == most else [*lengths, most]
