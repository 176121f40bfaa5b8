"""Model of PyTorch's CUDA caching allocator (native backend): which bytes a run reserves, and when it runs out.

Rules and constants are those of torch 2.13. Names in comments are functions and constants of its source, of class
`DeviceCachingAllocator` in `c10/cuda/CUDACachingAllocator.cpp` unless another file is named.

Left out: private pools (CUDA graphs, `torch.cuda.MemPool`), and `record_stream`, which FSDP2 does not use; without it a
freed block is reusable at once, and PyTorch's "active" bytes equal its allocated bytes.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from sys import maxsize

from shardlab.planner.allocator_blocks import (
    MIN_BLOCK,
    SMALL_SEGMENT,
    SMALL_SIZE,
    Block,
    Pool,
    Segment,
    SegmentInfo,
    merge,
    potential_bytes,
)
from shardlab.planner.allocator_settings import MIB, MIN_LARGE_REQUEST, AllocatorSettings, cublas_workspace_bytes

GIB = 1 << 30
ROUND_LARGE = 2 * MIB  # kRoundLarge (c10/core/AllocatorConfig.h): segments of large requests are rounded up to this
DEFAULTS = AllocatorSettings()
UNBOUNDED_ADDRESS_SPACE = 1 << 46  # of an expandable segment where no capacity is given: more than any device's memory


class OutOfMemory(RuntimeError):
    """The device cannot give what was asked for, though all that is wholly free was given back to it.

    Attributes:
        requested_bytes: what the device was asked for: a segment.
        allocated_bytes: then held by callers.
        reserved_bytes: then held by the allocator.
        capacity_bytes: of the device, or what of it this process is allowed.
    """

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int):
        fragmented_bytes = reserved_bytes - allocated_bytes
        super().__init__(
            f"out of memory: {requested_bytes / GIB:.2f} GiB more do not fit in {capacity_bytes / GIB:.2f} GiB, where "
            f"{allocated_bytes / GIB:.2f} GiB are allocated and {fragmented_bytes / GIB:.2f} GiB lost to fragmentation"
        )
        self.requested_bytes, self.capacity_bytes = requested_bytes, capacity_bytes
        self.allocated_bytes, self.reserved_bytes = allocated_bytes, reserved_bytes


class CachingAllocator:
    """Serves `malloc` and `free` as the caching allocator of one GPU would.

    Attributes:
        allocated_bytes: in blocks that callers hold, rounding included (`torch.cuda.memory_allocated`).
        reserved_bytes: obtained from the device (`torch.cuda.memory_reserved`): segments; of expandable ones, what is
            mapped.
        allocated_peak_bytes: the maximum of `allocated_bytes` since `reset_peaks`.
        reserved_peak_bytes: the maximum of `reserved_bytes` since `reset_peaks`.
        retries: how often all that was cached was released because the device was full (`num_alloc_retries`).
    """

    def __init__(self, capacity_bytes: int | None = None, settings: AllocatorSettings = DEFAULTS):
        """Args:
        capacity_bytes: what the device can give, without context and libraries' own memory; None = no limit.
        settings: of the process; they do not change.
        """
        self.settings = settings
        self._capacity = maxsize if capacity_bytes is None else capacity_bytes
        fraction, threshold = settings.per_process_memory_fraction, settings.garbage_collection_threshold
        # setMemoryFraction: a limit only if the fraction is below 1 (PyTorch: of all memory, here: of what is usable),
        # and garbage is collected only where there is a limit.
        self._allowed = round(fraction * self._capacity) if fraction < 1 else maxsize
        self._threshold = int(threshold * self._allowed) if threshold and fraction < 1 else None
        self._max_split = settings.max_split_bytes or maxsize
        self._rounding = settings.max_non_split_rounding_bytes or settings.large_segment_bytes
        self._plain_fit = settings.max_split_bytes is None and not settings.expandable_segments
        self._small: dict[Hashable, Pool] = {}
        self._large: dict[Hashable, Pool] = {}
        self._segments: dict[int, Segment] = {}
        self._next_address = 0
        self._searches = 0  # in large pools: the clock that tells how long a block has been idle
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.reserved_bytes = self.reserved_peak_bytes = 0
        self.retries = 0

    def malloc(self, nbytes: int, stream: Hashable) -> Block | None:
        """Allocates on a stream; None for 0 bytes, which take no memory.

        Raises:
            OutOfMemory: the capacity does not suffice.
        """
        if nbytes == 0:
            return None
        size = self._round(nbytes) if self.settings.roundup_power2_divisions else (nbytes + 511) & -MIN_BLOCK
        small = size <= SMALL_SIZE
        pools = self._small if small else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = Pool(small, stream, self.settings)
        free = pool.free
        self._searches += not small
        index = bisect_left(free, (size,)) if self._plain_fit else self._best_fit(free, size)
        block = free.pop(index)[2] if index < len(free) else self._grow(pool, size)
        rest = block.size - size
        if rest >= pool.least_rest and size < pool.split_below:
            block.size = size
            address = block.address + size
            insort(free, (rest, address, Block(address, rest, block.segment, block, block.next)))
        block.allocated = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes
        return block

    def free(self, block: Block | None) -> None:
        """Returns a block to its stream's pool, merged with its free neighbours; None is ignored.

        Raises:
            ValueError: the block is not allocated.
        """
        if block is None:
            return
        if not block.allocated:
            raise ValueError(f"the block at address {block.address} is not allocated; was it freed twice?")
        block.allocated = False
        self.allocated_bytes -= block.size
        block = merge(block)
        block.freed_at = self._searches
        insort(block.segment.pool.free, (block.size, block.address, block))

    def empty_cache(self) -> None:
        """release_cached_blocks: gives back what is wholly free, segments or pages of expandable ones."""
        for pool in (*self._large.values(), *self._small.values()):
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Takes the present figures for the peaks."""
        self.allocated_peak_bytes = self.allocated_bytes
        self.reserved_peak_bytes = self.reserved_bytes

    def segments(self) -> list[SegmentInfo]:
        """By address; of an expandable segment, each contiguous mapped range counts as one (as in snapshot)."""
        infos = []
        for segment in self._segments.values():
            run: list[Block] = []
            block: Block | None = segment.head
            while block is not None:
                if block.mapped:
                    run.append(block)
                if run and (not block.mapped or block.next is None):
                    blocks = tuple((b.address, b.size, b.allocated) for b in run)
                    size = sum(b.size for b in run)
                    infos.append(SegmentInfo(run[0].address, size, segment.pool.stream, segment.pool.small, blocks))
                    run = []
                block = block.next
        return infos

    # ---- finding memory

    def _round(self, nbytes: int) -> int:
        """round_size with roundup_power2_divisions: to equal steps between a power of two and the next."""
        power = nbytes.bit_length() - 1
        table = self.settings.roundup_power2_divisions
        divisions = table[min(max(power - 20, 0), len(table) - 1)]
        step = (1 << power) // divisions if divisions > 1 and nbytes > MIN_BLOCK * divisions else MIN_BLOCK
        return -(-nbytes // step) * step

    def _best_fit(self, free: list[tuple[int, int, Block]], size: int) -> int:
        """get_free_block where the smallest block that is large enough need not be taken; `len(free)` if none is."""
        index = bisect_left(free, (size,))
        if index == len(free):
            return index
        if self.settings.expandable_segments:
            # A block at the growing end counts with the size that it can grow to, and is so kept for larger requests.
            while index + 1 < len(free) and potential_bytes(free[index + 1][2]) < potential_bytes(free[index][2]):
                index += 1
        found = free[index][0]
        unsplittable = size < self._max_split <= found
        wasteful = size >= self._max_split and found >= size + self._rounding
        return len(free) if unsplittable or wasteful else index

    def _grow(self, pool: Pool, size: int) -> Block:
        """malloc when no cached block fits: asks the device, if need be again after giving memory back."""
        if self._threshold is not None:
            self._collect_garbage(self._threshold)
        if pool.small:  # get_allocation_size
            segment_bytes = SMALL_SEGMENT
        elif size < MIN_LARGE_REQUEST:
            segment_bytes = self.settings.large_segment_bytes
        else:
            segment_bytes = -(-size // ROUND_LARGE) * ROUND_LARGE
        block = self._ask_device(pool, size, segment_bytes)
        if block is None and self._release_oversize(pool, size):
            block = self._ask_device(pool, size, segment_bytes)
        if block is None:
            self.empty_cache()
            self.retries += 1  # alloc_block counts the attempt (isRetry), whether it succeeds or not
            block = self._ask_device(pool, size, segment_bytes)
        if block is None:
            limit = min(self._capacity, self._allowed)
            raise OutOfMemory(segment_bytes, self.allocated_bytes, self.reserved_bytes, limit)
        return block

    def _ask_device(self, pool: Pool, size: int, segment_bytes: int) -> Block | None:
        """alloc_block: a block of at least `size` bytes that the pool does not list, or None if the device is full."""
        # The process's own limit is checked for a whole segment, even where an expandable one would map less.
        if self.reserved_bytes + segment_bytes > self._allowed:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        return self._new_segment(pool, segment_bytes).head if self._reserve(segment_bytes) else None

    def _reserve(self, nbytes: int) -> bool:
        """`cudaMalloc` or `cuMemCreate`: whether the device had so much left."""
        if self.reserved_bytes + nbytes > self._capacity:
            return False
        self.reserved_bytes += nbytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: Pool, size: int) -> Segment:
        # Addresses only decide between blocks of one size. The driver's are not known; here each is above the last.
        segment = self._segments[self._next_address] = Segment(self._next_address, size, pool)
        self._next_address += size
        return segment

    # ---- expandable segments

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """try_allocate_expandable_block: grows the block at the lowest address with enough room behind it."""
        start = self._find_room(pool, size)
        grown = start if start is None or start.mapped else self._map(start, size)
        while grown is not None and grown.size < size:
            assert grown.next is not None  # _find_room saw that free or unmapped blocks follow
            grown = self._map(grown.next, size - grown.size)
        if grown is not None:
            pool.remove(grown)
        return grown

    def _find_room(self, pool: Pool, size: int) -> Block | None:
        """find_expandable_block: `size` bytes of contiguous address space that no caller holds."""
        for _, unmapped in pool.unmapped:
            before = unmapped.prev
            start = unmapped if before is None or before.allocated else before
            room = 0
            block: Block | None = start
            while room < size and block is not None and not block.allocated:
                room, block = room + block.size, block.next
            if room >= size:
                return start
        # ExpandableSegment: address space for 1 1/8 of the device's memory, in whole pages.
        space = UNBOUNDED_ADDRESS_SPACE if self._capacity == maxsize else self._capacity + self._capacity // 8
        space = -(-space // pool.page) * pool.page
        if space < size:
            return None
        head = self._new_segment(pool, space).head
        head.mapped = False
        pool.add(head)
        return head

    def _map(self, block: Block, size: int) -> Block | None:
        """map_block: backs `size` bytes of an unmapped block with pages, and merges it; None if the device is full."""
        pool = block.segment.pool
        mapped = -(-min(size, block.size) // pool.page) * pool.page
        if not self._reserve(mapped):
            return None
        pool.remove(block)
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, block.segment, block, block.next)
            rest.mapped = False
            pool.add(rest)
        block.size, block.mapped = mapped, True
        block = merge(block)
        pool.add(block)
        return block

    def _unmap(self, block: Block) -> None:
        """unmap_block: gives back the whole pages within a free block, and drops a segment that has none left."""
        segment = block.segment
        pool, page, base = segment.pool, segment.pool.page, segment.address
        stop = block.address + block.size
        first = base - (base - block.address) // page * page  # rounded up
        last = base + (stop - base) // page * page
        if first >= last:
            return
        pool.remove(block)
        if last < stop:
            pool.add(Block(last, stop - last, segment, block, block.next))
        if first > block.address:
            block.size = first - block.address
            pool.add(block)
            block = Block(first, 0, segment, block, block.next)
        block.size, block.mapped = last - first, False
        self.reserved_bytes -= block.size
        block = merge(block)
        if block.size == segment.size:
            del self._segments[base]  # release_expandable_segment
        else:
            pool.add(block)

    # ---- giving memory back under pressure

    def _release(self, block: Block) -> None:
        """release_block: `cudaFree` of a segment that is one free block."""
        block.segment.pool.remove(block)
        self.reserved_bytes -= block.size
        del self._segments[block.address]

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """release_available_cached_blocks: as few unsplittable blocks of this pool as make room for `size` bytes."""
        if self._max_split == maxsize or self.settings.expandable_segments:
            return False
        target = max(size, self._max_split)
        index = bisect_left(pool.free, (target,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < target and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= target

    def _collect_garbage(self, threshold_bytes: int) -> None:
        """garbage_collect_cached_blocks: whole large segments, those idle for longer than the average first."""
        excess = self.reserved_bytes - threshold_bytes
        free = [block for pool in self._large.values() for _, _, block in pool.free]
        idle = [block for block in free if block.prev is None and block.next is None]
        while idle and excess > 0:
            average = sum(self._searches - block.freed_at for block in idle) / len(idle)
            old = [block for block in idle if self._searches - block.freed_at >= average]
            idle = [block for block in idle if self._searches - block.freed_at < average]
            for block in old:
                excess -= block.size
                self._release(block)


class CublasWorkspaces:
    """Allocates cuBLAS workspaces when PyTorch does: once for each (cuBLAS handle, stream), kept to the process's end.

    From `aten/src/ATen/cuda/CublasHandlePool.cpp`: getCurrentCUDABlasHandle, called for each matrix product, allocates
    the workspace on the current stream if the pair is new. Handles belong to threads (`detail/DeviceThreadHandles.h`),
    and autograd runs backward on a thread of its own: a training step that computes on one stream holds two workspaces.
    cuBLASLt (linear layers with a bias) uses the same ones: TORCH_CUBLASLT_UNIFIED_WORKSPACE is on unless set to 0.
    Later versions (from pytorch#194311, after 2.13) take a workspace for each product and return it at once.
    """

    def __init__(self, allocator: CachingAllocator, capability: tuple[int, int], config: str = ""):
        """Args:
        allocator: that workspaces are taken from.
        capability: of the device, e.g. (9, 0).
        config: value of `CUBLAS_WORKSPACE_CONFIG`.
        """
        self._allocator = allocator
        self._nbytes = cublas_workspace_bytes(capability, config)
        self._blocks: dict[tuple[Hashable, Hashable], Block | None] = {}

    def use(self, thread: Hashable, stream: Hashable) -> None:
        """A thread issues a matrix product on a stream.

        Raises:
            OutOfMemory: its workspace does not fit.
        """
        if (thread, stream) not in self._blocks:
            self._blocks[thread, stream] = self._allocator.malloc(self._nbytes, stream)
