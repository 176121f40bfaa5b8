"""From a data set to this rank's batches: the same global batch at any world size.

Position `p = step * global_batch + index in the global batch` numbers every sample that a run ever sees. Rank r takes
r's contiguous share of each global batch, its micro-batches in order. A data set with a length is shuffled anew each
epoch (`epoch = p // len`); one without is read at position `p` itself.
"""

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardlab.data.checks import check_int
from shardlab.data.seeds import stable_seed
from shardlab.errors import ConfigError

IGNORE_INDEX = -100  # the loss skips labels of this value (PyTorch's default for cross-entropy)


class Batch(NamedTuple):
    """One micro-batch, on the host."""

    inputs: Tensor  # (micro_batch, ...)
    labels: Tensor  # (micro_batch, ...), IGNORE_INDEX where the loss is not to look


def batches(
    dataset: Dataset[Any],
    *,
    seed: int,
    micro_batch: int,
    micro_batches: int,
    rank: int,
    world_size: int,
    start_step: int = 0,
    steps: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[list[Batch]]:
    """Yields the micro-batches of one optimizer step after another, for this rank.

    Samples depend on (seed, step, index in the global batch) alone, whatever the world size and the number of workers,
    and starting at a later step replays nothing. A data set smaller than the global batch goes round within it.

    Args:
        dataset: map-style, `dataset[i] -> (inputs, labels)`; without `__len__` it is indexed by position.
        seed: of the order in which each epoch visits the samples.
        micro_batch: samples per rank and forward pass.
        micro_batches: forward passes per optimizer step.
        rank: this process, from 0.
        world_size: number of processes that share each global batch.
        start_step: first optimizer step, counted from 0.
        steps: how many optimizer steps to yield; None = no end.
        num_workers: processes that load ahead; 0 = load in this one.
        pin_memory: whether batches lie in page-locked memory, for asynchronous copies to a GPU.

    Returns:
        An iterator of lists of `micro_batches` batches, each with leading dimension `micro_batch`.

    Raises:
        ConfigError: the data set is empty, or its samples are not (inputs, labels).
    """
    index_of = _SampleIndex(dataset, seed)
    per_rank = micro_batch * micro_batches
    numbers = count(start_step) if steps is None else range(start_step, start_step + steps)

    def indices() -> Iterator[list[int]]:
        for step in numbers:
            first = step * per_rank * world_size + rank * per_rank
            for start in range(first, first + per_rank, micro_batch):
                yield [index_of(position) for position in range(start, start + micro_batch)]

    stream = _load(dataset, indices(), stable_seed("workers", seed, rank), num_workers, pin_memory)
    return _groups(stream, micro_batches)


def eval_batches(
    dataset: Dataset[Any],
    *,
    micro_batch: int,
    rank: int,
    world_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Yields this rank's share of one pass over held-out data, in order and without repeats.

    Every rank yields the same number of batches of the same shape, as collectives need: the tail is filled with
    samples whose labels are all IGNORE_INDEX, so a mean over valid labels is exact.

    Args:
        dataset: as for `batches`, with `__len__`.
        micro_batch: samples per rank and forward pass.
        rank: this process, from 0.
        world_size: number of processes that share the pass.
        num_workers: processes that load ahead; 0 = load in this one.
        pin_memory: whether batches lie in page-locked memory.

    Raises:
        ConfigError: the data set is empty or has no end, or its samples are not (inputs, labels).
    """
    size = _length(dataset)
    if size is None:
        raise ConfigError(
            f"data: the held-out part of {type(dataset).__name__} has no end: set train.eval_samples, or give it a "
            "__len__"
        )
    rows = micro_batch * world_size  # samples that all ranks take at once
    starts = range(rank * micro_batch, -(-size // rows) * rows, rows)
    indices = [list(range(start, start + micro_batch)) for start in starts]
    return _load(_Padded(dataset, size), indices, 0, num_workers, pin_memory)


def _length(dataset: Dataset[Any]) -> int | None:
    """Number of samples; None for a data set that has no end."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"data: {type(dataset).__name__} is an IterableDataset: make it map-style, with __getitem__(position), so "
            "that a sample does not depend on how many ranks and workers read"
        )
    if not hasattr(dataset, "__len__"):
        return None
    size = len(dataset)
    if size == 0:
        raise ConfigError(f"data: {type(dataset).__name__} holds no samples (its length is 0); give it some data")
    return size


class _SampleIndex:
    """Maps a position to a sample; remembers the order of one epoch, as positions only move forward."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.size = _length(dataset)
        self.seed = seed
        self.epoch = -1
        self.order = torch.empty(0, dtype=torch.int64)

    def __call__(self, position: int) -> int:
        if self.size is None:
            return position
        epoch, offset = divmod(position, self.size)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(stable_seed("epoch", self.seed, epoch))
            self.order = torch.randperm(self.size, generator=generator)
            self.epoch = epoch
        return int(self.order[offset])


class _Padded(Dataset[tuple[Tensor, Tensor]]):
    """`dataset`, and past its end samples that count for nothing."""

    def __init__(self, dataset: Dataset[Any], size: int) -> None:
        self.dataset = dataset
        self.size = size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.dataset[min(index, self.size - 1)]
        labels = torch.as_tensor(labels)
        return inputs, labels if index < self.size else torch.full_like(labels, IGNORE_INDEX)


def _load(
    dataset: Dataset[Any], indices: Iterable[list[int]], worker_seed: int, num_workers: int, pin_memory: bool
) -> Iterator[Batch]:
    """Batches of the given samples, in that order. Checks at once, loads when asked."""
    check_int("num_workers", num_workers, minimum=0)
    # Not persistent_workers: one iterator lives as long as the run, so there is nothing to keep them for.
    loader = DataLoader(
        dataset,
        batch_sampler=indices,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # A generator of its own: without one each new iterator, so each evaluation, would draw a number from the
        # global generator and change the dropout masks that follow.
        generator=torch.Generator().manual_seed(worker_seed),
    )
    return (_as_batch(dataset, collated) for collated in loader)


def _as_batch(dataset: Dataset[Any], collated: Any) -> Batch:
    if not (isinstance(collated, (list, tuple)) and len(collated) == 2 and all(torch.is_tensor(x) for x in collated)):
        raise ConfigError(
            f"data: samples of {type(dataset).__name__} must be a pair (inputs, labels) of tensors, "
            f"found {type(collated).__name__}; return such a pair from __getitem__"
        )
    return Batch(*collated)


def _groups(stream: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(stream, size)):
        yield group
