"""The model of the CUDA caching allocator against its rules, worked out by hand, and against a naive one."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardlab.planner.allocator import CachingAllocator, CublasWorkspaces, OutOfMemory
from shardlab.planner.allocator_settings import AllocatorSettings, cublas_workspace_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def allocator(config: str = "", capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity, AllocatorSettings.parse(config))


def layout(a: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """(size, allocated) of the blocks of each segment."""
    return [[(size, allocated) for _, size, allocated in segment.blocks] for segment in a.segments()]


# ---- size classes: a request is rounded up to 512 bytes. Up to 1 MiB it comes from a segment of 2 MiB, below 10 MiB
# from one of 20 MiB, else from one of its own size rounded up to 2 MiB. What remains of a segment is split off.


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB - 1, MIB, 2 * MIB),  # rounded first, classed after
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB or less stays with a large block
        (GIB + MIB + 1, GIB + 2 * MIB, GIB + 2 * MIB),
    ],
)
def test_a_request_gets_a_block_and_a_segment_of_its_size_class(nbytes, block, segment):
    a = allocator()
    assert a.malloc(nbytes, 0).size == block
    assert (a.allocated_bytes, a.reserved_bytes) == (block, segment)


def test_no_bytes_take_no_memory():
    a = allocator()
    a.free(a.malloc(0, 0))
    assert a.reserved_bytes == 0


def test_the_large_segment_size_can_be_set():
    a = allocator("large_segment_size_mb:64")
    a.malloc(2 * MIB, 0)
    assert a.reserved_bytes == 64 * MIB


def test_a_small_rest_is_split_off_from_512_bytes():
    a = allocator()
    for _ in range(4095):
        a.malloc(512, 0)
    assert layout(a) == [[(512, True)] * 4095 + [(512, False)]]
    a.malloc(1, 0)
    assert a.reserved_bytes == a.allocated_bytes == 2 * MIB


@pytest.mark.parametrize(("rest", "split"), [(MIB, False), (MIB + 512, True)])
def test_a_large_rest_is_split_off_above_1_mib(rest, split):
    a = allocator()
    a.malloc(20 * MIB - rest, 0)
    a.free(a.malloc(1, 0))  # the small pool plays no part
    expected = [(20 * MIB - rest, True), (rest, False)] if split else [(20 * MIB, True)]
    assert layout(a)[0] == expected


@pytest.mark.parametrize(
    ("nbytes", "config", "block"),
    [
        # between 1 and 2 MiB, four steps are 1.25, 1.5, 1.75 MiB
        (1200 * KIB, "4", 1280 * KIB),
        (1280 * KIB, "4", 1280 * KIB),
        (1281 * KIB, "4", 1536 * KIB),
        # divided only above 512 bytes times the divisions
        (2048, "4", 2048),
        (2049, "4", 2560),
        (1025, "4", 1536),
        # tables: up to and at 256 MiB none, from 512 MiB two steps, above 1 GiB eight
        (300 * MIB, "[256:1,512:2,1024:4,>:8]", 300 * MIB),
        (520 * MIB, "[256:1,512:2,1024:4,>:8]", 768 * MIB),
        (1025 * MIB, "[256:1,512:2,1024:4,>:8]", 1280 * MIB),
        (2049 * MIB, "[256:1,512:2,1024:4,>:8]", 2304 * MIB),
        (100 * GIB, "[256:1,512:2,1024:4,>:8]", 104 * GIB),
    ],
)
def test_sizes_are_rounded_to_divisions_of_a_power_of_two(nbytes, config, block):
    assert allocator(f"roundup_power2_divisions:{config}").malloc(nbytes, 0).size == block


# ---- reuse: the smallest block of the stream's pool that is large enough; of equal ones that at the lowest address


def test_the_best_fit_is_taken_and_the_lower_address_of_two():
    a = allocator()
    sizes = [40 * MIB, 12 * MIB, 30 * MIB, 12 * MIB]
    blocks = [a.malloc(size, 0) for size in sizes]
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        a.free(block)
    assert [a.malloc(11 * MIB, 0).address for _ in range(3)] == [addresses[1], addresses[3], addresses[2]]
    assert a.reserved_bytes == sum(sizes)


def test_freed_neighbours_merge_on_both_sides():
    a = allocator()
    first, second, third = (a.malloc(4 * MIB, 0) for _ in range(3))
    a.free(first)
    a.free(third)  # with the rest of the segment
    assert layout(a) == [[(4 * MIB, False), (4 * MIB, True), (12 * MIB, False)]]
    a.free(second)
    assert layout(a) == [[(20 * MIB, False)]]


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_streams_and_pools_do_not_share_blocks(config):
    a = allocator(config)
    a.free(a.malloc(20 * MIB, "compute"))
    a.malloc(20 * MIB, "all-gather")
    a.malloc(512, "compute")
    assert a.reserved_bytes == (20 + 20 + 2) * MIB
    a.malloc(20 * MIB, "compute")
    assert a.reserved_bytes == (20 + 20 + 2) * MIB


def test_freeing_twice_is_an_error():
    a = allocator()
    block = a.malloc(1, 0)
    a.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        a.free(block)


def test_peaks():
    a = allocator()
    held = [a.malloc(30 * MIB, 0), a.malloc(30 * MIB, 1)]
    a.free(held[0])
    a.malloc(2 * MIB, 0)  # 28 MiB of the freed segment lie idle
    a.malloc(40 * MIB, 0)
    assert (a.reserved_peak_bytes, a.allocated_peak_bytes) == (100 * MIB, 72 * MIB)
    a.malloc(10 * MIB, 0)
    a.free(held[1])
    assert (a.reserved_peak_bytes, a.allocated_peak_bytes) == (100 * MIB, 82 * MIB)
    a.empty_cache()
    assert (a.reserved_bytes, a.reserved_peak_bytes) == (70 * MIB, 100 * MIB)
    a.reset_peaks()
    assert (a.reserved_peak_bytes, a.allocated_peak_bytes) == (70 * MIB, 52 * MIB)


# ---- max_split_size: blocks from this size on are not split, and serve only requests of nearly their size


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests():
    a = allocator("max_split_size_mb:100")
    a.free(a.malloc(200 * MIB, 0))
    a.malloc(50 * MIB, 0)
    assert a.reserved_bytes == 250 * MIB  # 50 MiB is below the limit, the cached 200 MiB are not
    a.malloc(180 * MIB, 0)
    assert a.reserved_bytes == 430 * MIB  # 200 MiB are 20 MiB more: too many
    assert a.malloc(181 * MIB, 0).size == 200 * MIB  # less than 20 MiB more: taken whole
    assert a.reserved_bytes == 430 * MIB
    a.free(a.malloc(100 * MIB, 0))  # just oversize
    a.malloc(90 * MIB, 0)
    assert a.reserved_bytes == 620 * MIB


def test_the_waste_of_oversize_blocks_can_be_set():
    a = allocator("max_split_size_mb:100,max_non_split_rounding_mb:64")
    a.free(a.malloc(200 * MIB, 0))
    assert a.malloc(137 * MIB, 0).size == 200 * MIB


# ---- under pressure


def test_a_full_device_gets_back_what_is_cached_and_is_asked_again():
    a = allocator(capacity=100 * MIB)
    a.free(a.malloc(60 * MIB, "compute"))
    a.free(a.malloc(512, "compute"))
    a.malloc(80 * MIB, "all-gather")  # 62 MiB are reserved: only 38 are left
    assert (a.retries, a.reserved_bytes, a.reserved_peak_bytes) == (1, 80 * MIB, 80 * MIB)


def test_running_out_of_memory_tells_the_figures():
    a = allocator(capacity=100 * MIB)
    held = [a.malloc(4 * MIB, 0) for _ in range(20)]  # four segments, full
    for block in held[::2]:
        a.free(block)  # 40 MiB are free, in pieces of 4
    with pytest.raises(OutOfMemory, match=r"0\.02 GiB more do not fit in 0\.10 GiB.* 0\.04 GiB lost") as error:
        a.malloc(21 * MIB, 0)
    e = error.value
    assert (e.requested_bytes, e.capacity_bytes) == (22 * MIB, 100 * MIB)
    assert (e.allocated_bytes, e.reserved_bytes) == (40 * MIB, 80 * MIB)
    assert a.retries == 1
    a.malloc(20 * MIB, 0)  # goes on working
    assert a.reserved_bytes == 100 * MIB


def test_oversize_blocks_are_released_before_everything_is():
    a = allocator("max_split_size_mb:20", capacity=100 * MIB)
    cached = [a.malloc(size * MIB, 0) for size in (24, 30, 10)]
    for block in cached:
        a.free(block)
    a.malloc(60 * MIB, 0)  # no cached block is as large: the largest go first, but 30 + 24 MiB do not suffice
    assert (a.retries, a.reserved_bytes) == (1, 60 * MIB)  # so everything went
    a = allocator("max_split_size_mb:20", capacity=100 * MIB)
    for block in [a.malloc(size * MIB, 0) for size in (24, 30, 10)]:
        a.free(block)
    a.malloc(50 * MIB, 0)
    assert (a.retries, a.reserved_bytes) == (0, 60 * MIB)  # 30 + 24 MiB suffice: the 10 MiB stay cached
    a = allocator("max_split_size_mb:20", capacity=100 * MIB)
    for block in [a.malloc(size * MIB, 0) for size in (24, 70)]:
        a.free(block)
    a.malloc(40 * MIB, 0)  # a cached block is larger, but too large to be used: it goes alone
    assert (a.retries, a.reserved_bytes) == (0, 64 * MIB)


def test_a_process_may_be_held_to_a_fraction_of_the_device():
    a = allocator("per_process_memory_fraction:0.5", capacity=100 * MIB)
    a.malloc(50 * MIB, 0)
    with pytest.raises(OutOfMemory, match=r"fit in 0\.05 GiB"):
        a.malloc(1, 0)


def test_garbage_is_collected_above_the_threshold_where_a_fraction_is_set():
    for fraction, reserved in [("", 114 * MIB), (",per_process_memory_fraction:0.9", 74 * MIB)]:
        a = allocator("garbage_collection_threshold:0.5" + fraction, capacity=200 * MIB)  # threshold: 90 MiB
        old, recent = a.malloc(40 * MIB, 0), a.malloc(34 * MIB, 0)
        a.free(old)
        a.free(a.malloc(20 * MIB, 1))
        a.free(a.malloc(20 * MIB, 1))
        a.free(recent)
        a.malloc(20 * MIB, 0)  # from the cache, with a search that ages what stays there
        a.malloc(20 * MIB, 2)  # 94 MiB are reserved: the oldest cached segment is freed, if any is
        assert a.reserved_bytes == reserved


def test_of_blocks_idle_equally_long_all_are_collected():
    a = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9", capacity=200 * MIB)
    a.free(a.malloc(100 * MIB, 0))
    a.malloc(20 * MIB, 1)
    assert a.reserved_bytes == 20 * MIB


# ---- expandable segments: one per stream and pool, mapped by pages of 2 MiB (small) and 20 MiB (large)


def test_expandable_segments_map_whole_pages():
    a = allocator("expandable_segments:True")
    a.malloc(512, 0)
    assert a.reserved_bytes == 2 * MIB
    a.malloc(MIB + 1, 0)
    assert a.reserved_bytes == 22 * MIB
    a.malloc(30 * MIB, 0)  # behind the first large block 19 MiB - 512 are free: one page more
    assert a.reserved_bytes == 42 * MIB
    assert layout(a)[1] == [(MIB + 512, True), (30 * MIB, True), (9 * MIB - 512, False)]


def test_expandable_segments_split_every_rest():
    a = allocator("expandable_segments:True")
    a.malloc(20 * MIB - 512, 0)
    assert layout(a) == [[(20 * MIB - 512, True), (512, False)]]


def test_expandable_segments_avoid_fragmentation():
    """Sizes that grow from step to step: each freed segment is too small for the next, but an end can be extended."""
    reserved = {}
    for config in ("", "expandable_segments:True"):
        a = allocator(config)
        for step in range(10):
            a.free(a.malloc((20 + 20 * step) * MIB, 0))
        reserved[config] = a.reserved_bytes
    assert reserved == {"": sum(range(20, 201, 20)) * MIB, "expandable_segments:True": 200 * MIB}


def test_a_growing_end_is_kept_for_larger_requests():
    a = allocator("expandable_segments:True")
    first, _ = a.malloc(40 * MIB, 0), a.malloc(25 * MIB, 0)  # 15 MiB are left at the end
    a.free(first)
    # 10 MiB fit into the 15 at the end and the 40 before; the end can grow and so counts as larger.
    assert a.malloc(10 * MIB, 0).address == first.address


def test_pages_move_to_another_stream_under_pressure():
    a = allocator("expandable_segments:True", capacity=100 * MIB)
    first, second = a.malloc(50 * MIB, "compute"), a.malloc(25 * MIB, "compute")  # four pages, 5 MiB left over
    a.free(first)
    a.malloc(40 * MIB, "all-gather")  # one page left; pages 1 and 2 are wholly free, page 3 is not
    assert (a.retries, a.reserved_bytes) == (1, 80 * MIB)
    assert layout(a) == [[(10 * MIB, False), (25 * MIB, True), (5 * MIB, False)], [(40 * MIB, True)]]
    a.free(second)
    a.malloc(40 * MIB, "compute")
    assert (a.retries, a.reserved_bytes) == (1, 80 * MIB)


def test_a_gap_is_mapped_even_where_the_block_behind_it_needs_less():
    """try_allocate_expandable_block begins at the lowest address: it maps the whole gap, then merges what follows."""
    a = allocator("expandable_segments:True", capacity=100 * MIB)
    first, second = a.malloc(40 * MIB, 0), a.malloc(40 * MIB, 0)
    a.free(first)
    a.empty_cache()
    a.free(second)
    a.malloc(42 * MIB, 0)  # a page at the end would do
    assert (a.retries, a.reserved_bytes) == (0, 80 * MIB)


def test_unmapped_gaps_are_filled_at_the_lowest_address():
    a = allocator("expandable_segments:True")
    first, _ = a.malloc(40 * MIB, 0), a.malloc(20 * MIB, 0)
    a.free(first)
    a.empty_cache()
    assert a.reserved_bytes == 20 * MIB
    assert a.malloc(20 * MIB, 0).address == first.address
    assert a.malloc(60 * MIB, 0).address > first.address  # 20 MiB are left of the gap: it goes to the end
    assert a.reserved_bytes == 100 * MIB


def test_a_segment_without_pages_is_dropped():
    a = allocator("expandable_segments:True", capacity=100 * MIB)
    block = a.malloc(20 * MIB, 0)
    a.free(block)
    a.empty_cache()
    assert (a.reserved_bytes, a.segments()) == (0, [])
    assert a.malloc(20 * MIB, 0).address != block.address


def test_the_address_space_of_a_segment_exceeds_the_device_by_an_eighth():
    a = allocator("expandable_segments:True", capacity=160 * MIB)
    first, _, last = (a.malloc(size * MIB, 0) for size in (20, 120, 20))
    a.free(first)
    a.empty_cache()
    a.free(last)
    assert a.malloc(40 * MIB, 0).address == last.address  # 20 MiB mapped, 20 more behind the device's 160
    assert (a.retries, a.reserved_bytes) == (0, 160 * MIB)


# ---- cuBLAS workspaces


def test_cublas_workspaces_are_allocated_once_per_thread_and_stream():
    a = allocator()
    workspaces = CublasWorkspaces(a, (9, 0))
    for _ in range(2):
        workspaces.use("main", "compute")
        workspaces.use("backward", "compute")
    assert (a.allocated_bytes, a.reserved_bytes) == (64 * MIB, 64 * MIB)
    a = allocator()
    CublasWorkspaces(a, (8, 0)).use("main", "compute")
    # As in discuss.pytorch.org/t/178671: 8,519,680 bytes allocated, in a segment of 20 MiB.
    assert (a.allocated_bytes, a.reserved_bytes) == (8_519_680, 20 * MIB)


def test_the_size_of_cublas_workspaces():
    assert [cublas_workspace_bytes((major, 0)) >> 20 for major in (7, 8, 9, 10, 12)] == [8, 8, 32, 32, 32]
    assert cublas_workspace_bytes((9, 0), ":4096:8") == 32 * MIB
    assert cublas_workspace_bytes((9, 0), ":16:8") == 128 * KIB


# ---- settings


def test_settings_are_read_from_the_environment():
    read = AllocatorSettings.from_env
    assert read({}) == AllocatorSettings()
    assert read({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    assert read(both) == AllocatorSettings(max_split_bytes=512 * MIB)


def test_all_settings_are_parsed():
    text = """expandable_segments:True, large_segment_size_mb:32, max_split_size_mb:64, max_non_split_rounding_mb:48,
    roundup_power2_divisions:[64:8,>:1], garbage_collection_threshold:0.8, per_process_memory_fraction:0.9,
    pinned_use_background_threads:True, backend:native,"""
    assert AllocatorSettings.parse(text) == AllocatorSettings(
        True, 32 * MIB, 64 * MIB, 48 * MIB, (8,) * 7 + (1,) * 9, 0.8, 0.9
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:512", "unknown allocator setting 'max_split_size'.*max_split_size_mb"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is not modelled, only backend:native is"),
        ("per_process_memory_fraction:1.5", "per_process_memory_fraction:1.5 must be a number from 0 to 1"),
        ("expandable_segments", "written key:value,key:value; cannot read 'expandable_segments'"),
    ],
)
def test_a_mistake_in_the_settings_names_the_key(text, message):
    with pytest.raises(ValueError, match=message):
        AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("max_split_size_mb:20", True),
        ("max_split_size_mb:19", False),
        ("max_split_size_mb:30,large_segment_size_mb:40", False),
        ("max_split_size_mb:", False),
        ("max_non_split_rounding_mb:10", False),
        ("large_segment_size_mb:11,max_split_size_mb:11", True),
        ("large_segment_size_mb:10", False),
        ("expandable_segments:true", False),
        ("garbage_collection_threshold:0.5", True),
        ("garbage_collection_threshold:0", False),
        ("garbage_collection_threshold:1.0", False),
        ("roundup_power2_divisions:4", True),
        ("roundup_power2_divisions:3", False),
        ("roundup_power2_divisions:0", False),
        ("roundup_power2_divisions:[4:0,>:8]", True),
        ("roundup_power2_divisions:[3:2]", False),
        ("roundup_power2_divisions:[4:3]", False),
    ],
)
def test_limits_are_those_of_the_installed_torch(text, valid):
    def refused(parse) -> bool:
        try:
            parse(text)
        except (ValueError, RuntimeError):
            return True
        return False

    before = torch._C._accelerator_getAllocatorSettings()
    theirs = refused(torch._C._accelerator_setAllocatorSettings)
    # Of all settings, parseArgs does not reset this one.
    torch._C._accelerator_setAllocatorSettings(f"large_segment_size_mb:20,{before}")
    assert (refused(AllocatorSettings.parse), theirs) == (not valid, not valid)


# ---- properties

SIZES = st.one_of(
    st.integers(0, 4 * KIB), st.integers(1, MIB), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 90 * MIB)
)
CONFIGS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:24",
        "expandable_segments:True,max_split_size_mb:24",
        "roundup_power2_divisions:4,large_segment_size_mb:12",
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.7",
        "expandable_segments:True,garbage_collection_threshold:0.3,per_process_memory_fraction:0.7",
    ]
)


class Life(RuleBasedStateMachine):
    """Any sequence of calls, under any settings."""

    @initialize(config=CONFIGS, capacity=st.sampled_from([None, 100 * MIB, 301 * MIB]))
    def begin(self, config, capacity):
        self.a, self.capacity = allocator(config, capacity), capacity
        self.live: list[tuple[object, int, int]] = []
        self.peaks = (0, 0)

    @rule(nbytes=SIZES, stream=st.integers(0, 2))
    def malloc(self, nbytes, stream):
        try:
            block = self.a.malloc(nbytes, stream)
        except OutOfMemory:
            assert self.capacity is not None
            return
        if nbytes:
            self.live.append((block, nbytes, stream))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 1 << 16))
    def free(self, which):
        self.a.free(self.live.pop(which % len(self.live))[0])

    @rule()
    def empty_cache(self):
        self.a.empty_cache()

    @rule()
    def reset_peaks(self):
        self.a.reset_peaks()
        self.peaks = (0, 0)

    @invariant()
    def live_blocks_lie_apart_in_segments_of_their_stream(self):
        pieces = {}
        for segment in self.a.segments():
            address = segment.address
            for start, size, allocated in segment.blocks:
                assert start == address
                assert size >= 512
                address += size
                if allocated:
                    pieces[start] = (size, segment.stream)
            assert address == segment.address + segment.size
            free = [not allocated for _, _, allocated in segment.blocks]
            assert not any(a and b for a, b in pairwise(free)), "free neighbours have merged"
        assert pieces == {block.address: (block.size, stream) for block, _, stream in self.live}

    @invariant()
    def figures_agree(self):
        a = self.a
        segments = a.segments()
        assert a.reserved_bytes == sum(s.size for s in segments)
        assert a.allocated_bytes == sum(block.size for block, _, _ in self.live)
        assert a.reserved_bytes >= a.allocated_bytes >= sum(nbytes for _, nbytes, _ in self.live)
        assert all(block.size >= nbytes for block, nbytes, _ in self.live)
        assert self.capacity is None or a.reserved_bytes <= self.capacity
        peaks = (a.allocated_peak_bytes, a.reserved_peak_bytes)
        assert peaks >= self.peaks
        assert peaks[0] >= a.allocated_bytes
        assert peaks[1] >= a.reserved_bytes
        assert a.allocated_peak_bytes <= a.reserved_peak_bytes
        self.peaks = peaks

    def teardown(self):
        if not hasattr(self, "a"):
            return
        for block, _, _ in self.live:
            self.a.free(block)
        assert all(len(segment.blocks) == 1 for segment in self.a.segments())
        self.a.empty_cache()
        assert (self.a.allocated_bytes, self.a.reserved_bytes, self.a.segments()) == (0, 0, [])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


class Naive:
    """The default rules without any structure: lists of [address, size, free], searched from end to end."""

    def __init__(self):
        self.segments, self.end = [], 0

    def malloc(self, nbytes, stream):
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        mine = [blocks for blocks, owner in self.segments if owner == (stream, small)]
        fitting = [
            (size_, address, blocks) for blocks in mine for address, size_, free in blocks if free and size_ >= size
        ]
        if not fitting:
            total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            fitting = [(total, self.end, [[self.end, total, True]])]
            self.segments.append((fitting[0][2], (stream, small)))
            self.end += total
        found, address, blocks = min(fitting, key=lambda fit: fit[:2])
        rest = found - size
        i = blocks.index([address, found, True])
        if rest >= 512 if small else rest > MIB:
            blocks[i : i + 1] = [[address, size, False], [address + size, rest, True]]
        else:
            blocks[i][2] = False
        return address, blocks[i][1]

    def free(self, address):
        for blocks, _ in self.segments:
            for block in blocks:
                if block[0] == address:
                    block[2] = True
            merged = []
            for block in blocks:
                if merged and merged[-1][2] and block[2]:
                    merged[-1][1] += block[1]
                else:
                    merged.append(block)
            blocks[:] = merged


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES.filter(bool), st.integers(0, 1)), max_size=80))
def test_blocks_are_placed_as_by_a_naive_allocator(calls):
    a, naive = allocator(), Naive()
    live = []
    for allocate, number, stream in calls:
        if allocate or not live:
            block = a.malloc(number, stream)
            assert naive.malloc(number, stream) == (block.address, block.size)
            live.append(block)
        else:
            block = live.pop(number % len(live))
            naive.free(block.address)
            a.free(block)
    assert a.reserved_bytes == naive.end
