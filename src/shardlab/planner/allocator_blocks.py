"""What the model of the caching allocator is made of: segments cut into blocks, and pools of those nobody holds.

Names in comments are those of torch 2.13: constants (k...) of `c10/core/AllocatorConfig.h`, functions of
`c10/cuda/CUDACachingAllocator.cpp`.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from sys import maxsize

from shardlab.planner.allocator_settings import MIB, AllocatorSettings

MIN_BLOCK = 512  # kMinBlockSize: sizes are multiples of it
SMALL_SIZE = MIB  # kSmallSize: the largest request served from the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer; also the page of an expandable small segment


class Block:
    """A piece of a segment. It is the caller's from `malloc` to `free`, then the allocator's again.

    Attributes:
        address: of its first byte.
        size: in bytes; may exceed the request.
        allocated: held by a caller.
        mapped: backed by memory; false only for the unused address space of an expandable segment.
    """

    __slots__ = ("address", "allocated", "freed_at", "mapped", "next", "prev", "segment", "size")

    def __init__(self, address: int, size: int, segment: "Segment", prev: "Block | None", next: "Block | None"):
        self.address, self.size, self.segment = address, size, segment
        self.allocated, self.mapped, self.freed_at = False, True, 0
        self.prev, self.next = prev, next
        if prev is not None:
            prev.next = self
        if next is not None:
            next.prev = self


class Pool:
    """Blocks of one size class and one stream that no caller holds (PyTorch sorts one BlockPool by stream first).

    Attributes:
        small: the pool of requests up to 1 MiB.
        stream: that alone may use its blocks.
        free: (size, address, block), sorted: the first that fits fits best.
        unmapped: (address, block), sorted: unused address space of expandable segments.
        page: unit of mapping in expandable segments, in bytes.
        least_rest: bytes from which on the rest of a block is split off ...
        split_below: ... for requests below this size.
    """

    __slots__ = ("free", "least_rest", "page", "small", "split_below", "stream", "unmapped")

    def __init__(self, small: bool, stream: Hashable, settings: AllocatorSettings):
        self.small, self.stream = small, stream
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.page = SMALL_SEGMENT if small else settings.large_segment_bytes
        # should_split: in large segments a rest of up to 1 MiB stays with its block, unless they are expandable.
        exact = small or settings.expandable_segments
        self.least_rest = MIN_BLOCK if exact else SMALL_SIZE + 1
        self.split_below = maxsize if exact else settings.max_split_bytes or maxsize

    def add(self, block: Block) -> None:
        """Lists a block as free or unmapped."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Takes a block off the list that it is in."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Segment:
    """What one `cudaMalloc` gave, or the address space of one expandable segment; `head` is its first block."""

    __slots__ = ("address", "head", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool):
        self.address, self.size, self.pool = address, size, pool
        self.head = Block(address, size, self, None, None)  # for good: merging keeps the left block


@dataclass(frozen=True)
class SegmentInfo:
    """A contiguous range of reserved memory, as in `torch.cuda.memory_snapshot()`.

    Attributes:
        address: of its first byte.
        size: in bytes.
        stream: that alone may use it.
        small: of the small pool.
        blocks: (address, size, allocated) of each, by address.
    """

    address: int
    size: int
    stream: Hashable
    small: bool
    blocks: tuple[tuple[int, int, bool], ...]


def merge(block: Block) -> Block:
    """try_merge_blocks with both neighbours, where they are free and mapped alike; those leave their pool's lists.

    Args:
        block: free, in no list of its pool.

    Returns:
        What remains of the merged blocks, the leftmost, in no list.
    """
    after = block.next
    if after is not None and not after.allocated and after.mapped is block.mapped:
        block.segment.pool.remove(after)
        block.size += after.size
        block.next = after.next
        if block.next is not None:
            block.next.prev = block
    before = block.prev
    if before is not None and not before.allocated and before.mapped is block.mapped:
        block.segment.pool.remove(before)
        before.size += block.size
        before.next = block.next
        if before.next is not None:
            before.next.prev = before
        return before
    return block


def potential_bytes(block: Block) -> int:
    """Size of a block, with the unmapped address space that follows it (expandable_size in get_free_block)."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
