"""Numbers as the display writes them."""


def format_count(count: float) -> str:
    """A count with three digits at most: `950`, `1.2 M`, `8.0 B`."""
    for size, suffix in [(1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")]:
        if abs(count) >= 0.9995 * size:  # 999 950 is 1.0 M, not 1000 k
            return _short(count / size) + suffix
    return f"{count:.0f}" if count == int(count) else _short(count)


def format_gib(nbytes: float) -> str:
    """A size in bytes as GiB (2^30), as MiB below 0.1 GiB, as KiB below 0.1 MiB, and below 0.1 KiB as it is."""
    for size, unit in [(2**30, "GiB"), (2**20, "MiB")]:
        if abs(nbytes) >= 0.1 * size:
            number = nbytes / size
            return f"{number:.1f} {unit}" if unit == "MiB" or abs(number) >= 100 else f"{number:.2f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB" if abs(nbytes) >= 0.1 * 2**10 or nbytes == 0 else f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration: `350 ms`, `3.2 s`, then as a clock, `1:32` and `2:05:09`, with days where there are any."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 99.95 else f"{number:.1f}"


def format_batch(micro_batch: int, steps: int, ranks: int) -> str:
    """How a global batch comes about, in samples."""
    micro_batches = f" x {steps} micro-batches" if steps != 1 else ""
    return f"{micro_batch} samples{micro_batches} x {ranks} ranks = {micro_batch * steps * ranks}"
