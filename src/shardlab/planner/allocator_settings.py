"""What environment variables decide about CUDA memory: `PYTORCH_CUDA_ALLOC_CONF` and `CUBLAS_WORKSPACE_CONFIG`.

Keys, limits and defaults are those of torch 2.13; names in comments are functions and constants of its source, of
`c10/core/AllocatorConfig.h` / `.cpp` and `c10/cuda/CUDAAllocatorConfig.h` / `.cpp` unless another file is named.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, nextafter

MIB = 1 << 20
MIN_LARGE_REQUEST = 10 * MIB  # kMinLargeAlloc: from here on a segment is as large as its request
INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: from 1 MiB, one per power of two

MODELLED = (
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
)
ONLY = {"backend": "native", "throw_on_cudamalloc_oom": "False"}  # known to PyTorch; other values are not modelled
WITHOUT_EFFECT = (  # here: host memory, locks, CUDA graphs
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
)


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of PyTorch's CUDA caching allocator; the defaults are PyTorch's.

    Attributes:
        expandable_segments: one growing segment per stream and pool in place of one segment per `cudaMalloc`.
        large_segment_bytes: segment for requests above 1 and below 10 MiB; the page of an expandable large segment.
        max_split_bytes: blocks from this size on are never split; None = all may be.
        max_non_split_rounding_bytes: a request of at least `max_split_bytes` takes a cached block only if that is less
            than this much larger; None = `large_segment_bytes`.
        roundup_power2_divisions: for requests from each power of two to the next, beginning with 1 MiB (16 values;
            smaller and larger requests use the first and the last): the steps between the two that sizes are rounded
            up to; 0 and 1 = off. Empty = off.
        garbage_collection_threshold: above this fraction of the allowed memory, cached blocks that have long lain idle
            are freed before the device is asked for more; 0 = off. As in PyTorch it has no effect unless
            `per_process_memory_fraction` is below 1.
        per_process_memory_fraction: of the device's memory, allowed to this process.
    """

    expandable_segments: bool = False
    large_segment_bytes: int = 20 * MIB  # large_segment_size_
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "AllocatorSettings":
        """The settings that PyTorch would take from an environment (the first variable that is set decides).

        Raises:
            ValueError: as `parse`.
        """
        # AcceleratorAllocatorConfig::instance: the newest name comes last, whatever the header's comment says.
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        return cls.parse(next((environ[name] for name in names if name in environ), ""))

    @classmethod
    def parse(cls, text: str) -> "AllocatorSettings":
        """Reads e.g. `expandable_segments:True,max_split_size_mb:512`.

        Raises:
            ValueError: a key that PyTorch does not know, or a value that it refuses or that is not modelled.
        """
        values = dict(_pairs(text))
        known = {*MODELLED, *ONLY, *WITHOUT_EFFECT}
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"unknown allocator setting {key!r}; PyTorch knows {', '.join(sorted(known))}")
            if value != ONLY.get(key, value):
                raise ValueError(f"allocator setting {key}:{value} is not modelled, only {key}:{ONLY[key]} is")
        # parseLargeSegmentSize: above kMinLargeAlloc; parseMaxSplitSize, parseMaxNonSplitRoundingSize: not below it.
        large = _mebibytes(values, "large_segment_size_mb", MIN_LARGE_REQUEST // MIB + 1) or cls.large_segment_bytes
        return cls(
            expandable_segments=_boolean(values, "expandable_segments"),
            large_segment_bytes=large,
            max_split_bytes=_mebibytes(values, "max_split_size_mb", large // MIB),
            max_non_split_rounding_bytes=_mebibytes(values, "max_non_split_rounding_mb", large // MIB),
            roundup_power2_divisions=_divisions(values.get("roundup_power2_divisions", "")),
            garbage_collection_threshold=_number(
                values, "garbage_collection_threshold", 0.0, nextafter(0, 1), nextafter(1, 0), "between 0 and 1"
            ),
            per_process_memory_fraction=_number(values, "per_process_memory_fraction", 1.0, 0, 1, "from 0 to 1"),
        )


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Splits at commas outside of brackets; like ConfigTokenizer, it ignores white space and a comma at the end."""
    text = "".join(text.split())
    while text:
        if not (match := re.match(r"([^:,\[\]]+):(\[[^\]]+\]|[^:,\[\]]+)(?:,|$)", text)):
            raise ValueError(f"allocator settings must be written key:value,key:value; cannot read {text!r}")
        yield match[1], match[2]
        text = text[match.end() :]


def _boolean(values: Mapping[str, str], key: str) -> bool:
    value = values.get(key, "False")
    if value not in ("True", "False"):
        raise ValueError(f"allocator setting {key}:{value} must be True or False")
    return value == "True"


def _number(values: Mapping[str, str], key: str, default: float, low: float, high: float, valid: str) -> float:
    if key not in values:
        return default
    try:
        value = float(values[key])
    except ValueError:
        value = -1.0
    if not low <= value <= high:
        raise ValueError(f"allocator setting {key}:{values[key]} must be a number {valid}")
    return value


def _mebibytes(values: Mapping[str, str], key: str, least: int) -> int | None:
    return int(_number(values, key, 0, least, inf, f"of at least {least} (MiB)")) * MIB or None


def _divisions(text: str) -> tuple[int, ...]:
    """parseRoundUpPower2Divisions: `4`, or `[256:1,512:2,>:4]` with boundaries in MiB, `>` being all above the last."""
    if not text:
        return ()
    pairs = [entry.rpartition(":")[::2] for entry in text.strip("[]").split(",")]
    for boundary, count in pairs:
        powers = [count] if boundary in ("", ">") else [count, boundary]
        if not all(n.isdigit() and int(n).bit_count() <= 1 for n in powers) or boundary == "0" or text == "0":
            raise ValueError(f"allocator setting roundup_power2_divisions:{text} must be made of powers of two")
    if not text.startswith("["):
        return (int(text),) * INTERVALS
    table, last, first = [0] * INTERVALS, 0, True
    for boundary, count in pairs:
        if boundary == ">":
            table[last + 1 :] = [int(count)] * (INTERVALS - 1 - last)
            continue
        last = min(int(boundary).bit_length() - 1, INTERVALS - 1)
        if first:  # the first boundary speaks for what is smaller, too
            table[:last], first = [int(count)] * last, False
        table[last] = int(count)
    return tuple(table)


def cublas_workspace_bytes(capability: tuple[int, int], config: str = "") -> int:
    """Bytes of one cuBLAS workspace (parseChosenWorkspaceSize in `aten/src/ATen/cuda/CublasHandlePool.cpp`).

    Args:
        capability: of the device, e.g. (8, 0) for A100, (9, 0) for H100.
        config: value of `CUBLAS_WORKSPACE_CONFIG`, e.g. `:4096:2:16:8` for 2 buffers of 4096 KiB and 8 of 16 KiB.

    Returns:
        What `config` adds up to; by default 32 MiB on Hopper and Blackwell (major 9, 10 and 12), else that of
        `:4096:2:16:8`, 8,519,680 bytes.
    """
    if buffers := re.findall(r":(\d+):(\d+)", config):
        return sum(int(kibibytes) * 1024 * int(count) for kibibytes, count in buffers)
    return 32 * MIB if capability[0] in (9, 10, 12) else 2 * 4096 * 1024 + 8 * 16 * 1024
