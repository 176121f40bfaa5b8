import pytest

from shardlab.tracking import format_count, format_gib, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (325, "325"),
        (3.27, "3.3"),
        (999, "999"),
        (1000, "1.0 k"),
        (12_345, "12.3 k"),
        (999_949, "1.0 M"),
        (1_236_224, "1.2 M"),
        (124_439_808, "124 M"),
        (8_030_261_248, "8.0 B"),
        (15e12, "15.0 T"),
    ],
)
def test_counts_have_three_digits_at_most(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 KiB"),
        (1300, "1.3 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (0.0999 * 2**30, "102.3 MiB"),
        (0.1 * 2**30, "0.10 GiB"),
        (1.234 * 2**30, "1.23 GiB"),
        (139.8 * 2**30, "139.8 GiB"),
        (-2 * 2**30, "-2.00 GiB"),
    ],
)
def test_sizes_are_in_binary_units(nbytes: float, text: str) -> None:
    assert format_gib(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.35, "350 ms"),
        (0.9999, "1.0 s"),
        (3.21, "3.2 s"),
        (9.97, "0:10"),
        (92, "1:32"),
        (3599.7, "1:00:00"),
        (7509, "2:05:09"),
        (2 * 86400 + 7509, "2d 02:05:09"),
    ],
)
def test_long_durations_read_as_a_clock(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
