"""Loss, perplexity and accuracy over ranks and steps, against one mean over all labels."""

import math

import pytest
import torch
import torch.distributed as dist

from shardlab.telemetry.quality import Quality
from tests.training import CPU, HostReads

# On each of two ranks, step by step: the losses of its valid labels, and how many of them were right.
LOSSES = [[[0.5, 1.5, 4.0], [], [2.0]], [[3.0], [0.25, 0.75], []]]
CORRECT = [[1, 0, 1], [1, 2, 0]]


def tensors(losses: list[float], correct: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(sum(losses), dtype=torch.float32), torch.tensor(correct), torch.tensor(len(losses))


def quality_of(losses, correct) -> dict[str, float]:
    quality, rank = Quality(CPU), dist.get_rank()
    for step_losses, step_correct in zip(losses[rank], correct[rank], strict=True):
        quality.update(*tensors(step_losses, step_correct))
    return quality.compute()


def test_means_are_over_all_labels_of_all_ranks(on_ranks):
    everything = [loss for rank in LOSSES for step in rank for loss in step]
    mean = sum(everything) / len(everything)
    for got in on_ranks(2)(quality_of, LOSSES, CORRECT):
        assert got == pytest.approx({"loss": mean, "perplexity": math.exp(mean), "accuracy": 5 / 7}, rel=1e-6)


def test_a_rank_without_valid_labels_changes_nothing(on_ranks):
    for got in on_ranks(2)(quality_of, [[[1.0, 2.0]], [[]]], [[1], [0]]):
        assert got == pytest.approx({"loss": 1.5, "perplexity": math.exp(1.5), "accuracy": 0.5}, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_passes_through(on_ranks, bad):
    for got in on_ranks(2)(quality_of, [[[1.0], [1.0]], [[1.0], [bad]]], [[0, 0], [0, 0]]):
        assert (math.isnan(got["loss"]), math.isinf(got["loss"])) == (math.isnan(bad), math.isinf(bad))
        assert (math.isnan(got["perplexity"]), math.isinf(got["perplexity"])) == (math.isnan(bad), math.isinf(bad))


def test_a_loss_too_large_for_its_perplexity_gives_infinity(on_ranks):
    for got in on_ranks(2)(quality_of, [[[1000.0]], [[1000.0]]], [[0], [0]]):
        assert (got["loss"], got["perplexity"]) == (1000.0, math.inf)


def two_intervals() -> list[dict[str, float]]:
    quality = Quality(CPU)
    seen = []
    for loss in (4.0, 2.0):
        quality.update(*tensors([loss, loss], 1))
        seen.append(quality.compute())
    return seen


def test_each_interval_begins_anew(on_ranks):
    for first, second in on_ranks(2)(two_intervals):
        assert (first["loss"], second["loss"]) == (4.0, 2.0)


def reads_on_the_host() -> tuple[int, int]:
    """How many tensors updates read, and the computation of the means."""
    quality = Quality(CPU)
    steps = [tensors([1.0, math.nan], 1) for _ in range(3)]
    with HostReads() as host:
        for step in steps:
            quality.update(*step)
        updating = len(host.reads)
        quality.compute()
    return updating, len(host.reads) - updating


def test_an_update_never_waits_for_the_device(on_ranks):
    for updating, computing in on_ranks(2)(reads_on_the_host):
        assert updating == 0
        assert computing == 2  # loss and accuracy: the mode sees what is read
