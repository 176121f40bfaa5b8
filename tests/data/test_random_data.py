"""Synthetic data: a sample depends on (seed, split, i), and classes can be learned."""

import os
import subprocess
import sys

import pytest
import torch

from shardlab.data import IGNORE_INDEX
from shardlab.data.random_classes import RandomClasses
from shardlab.data.random_tokens import RandomTokens
from shardlab.data.seeds import stable_seed
from shardlab.errors import ConfigError

TOKENS = {"vocab_size": 11, "seq_len": 32, "samples": 8, "seed": 3}
CLASSES = {"features": 10, "classes": 5, "samples": 8, "seed": 3}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("kind", "settings"), [(RandomTokens, TOKENS), (RandomClasses, CLASSES)])
def test_sample_depends_on_seed_split_and_index_alone(kind, settings):
    sample = kind(**settings)[5]
    longer = kind(**settings | {"samples": 800})
    longer[7]  # what was read before has no influence
    assert same(sample, longer[5])
    assert not same(sample, longer[6])
    assert not same(sample, kind(**settings | {"seed": 4})[5])
    assert not same(sample, kind(**settings, split="eval")[5])


def test_stable_seed_is_the_same_in_another_process():
    code = "from shardlab.data.seeds import stable_seed; print(stable_seed('tokens', 3, 'train', 5))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(printed.stdout) == stable_seed("tokens", 3, "train", 5)


def test_labels_are_the_inputs_moved_on_by_one():
    inputs, labels = RandomTokens(**TOKENS)[0]
    assert inputs.shape == labels.shape == (32,)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs[1:], labels[:-1])


def test_tokens_fill_the_vocabulary():
    data = RandomTokens(**TOKENS | {"samples": 50})
    tokens = torch.cat([data[i][0] for i in range(len(data))])
    assert tokens.unique().tolist() == list(range(11))
    assert data.vocab_size == 11
    assert data.tokens_per_sample == 32


def test_ignore_fraction_hides_that_share_of_labels_and_nothing_else():
    plain, holed = (
        RandomTokens(**TOKENS | {"seq_len": 5000}),
        RandomTokens(**TOKENS | {"seq_len": 5000}, ignore_fraction=0.3),
    )
    (inputs, labels), (holed_inputs, holed_labels) = plain[0], holed[0]
    hidden = holed_labels == IGNORE_INDEX
    assert hidden.double().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(inputs, holed_inputs)
    assert torch.equal(labels[~hidden], holed_labels[~hidden])


def test_parts_have_the_lengths_asked_for():
    assert [len(RandomTokens(**TOKENS, eval_samples=3, split=split)) for split in ("train", "eval")] == [8, 3]
    assert [len(RandomClasses(**CLASSES, eval_samples=3, split=split)) for split in ("train", "eval")] == [8, 3]
    with pytest.raises(IndexError):
        RandomTokens(**TOKENS)[8]


def test_classes_learned_on_training_samples_hold_for_the_held_out_ones():
    settings = CLASSES | {"samples": 2000, "eval_samples": 500}
    (x, y), (held_x, held_y) = (
        map(torch.stack, zip(*(data[i] for i in range(len(data))), strict=True))
        for data in (RandomClasses(**settings), RandomClasses(**settings, split="eval"))
    )
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (x.shape, y.shape) == ((2000, 10), (2000,))
    assert torch.bincount(y, minlength=5).min() > 100  # every class is there to be learned
    learned = torch.linalg.lstsq(x, torch.nn.functional.one_hot(y, 5).float()).solution  # (features, classes)
    accuracy = ((held_x @ learned).argmax(1) == held_y).double().mean().item()
    assert accuracy > 0.7  # chance: about 0.2


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        (RandomTokens, TOKENS | {"vocab_size": 0}, "vocab_size=0"),
        (RandomTokens, TOKENS | {"seq_len": 0}, "seq_len=0"),
        (RandomTokens, TOKENS | {"samples": 0}, "samples=0"),
        (RandomTokens, TOKENS | {"seq_len": "long"}, "seq_len=long"),
        (RandomTokens, TOKENS | {"ignore_fraction": 1.0}, "ignore_fraction=1.0"),
        (RandomClasses, CLASSES | {"classes": 1}, "classes=1"),
        (RandomClasses, CLASSES | {"features": 0}, "features=0"),
        (RandomClasses, CLASSES | {"eval_samples": 0}, "eval_samples=0"),
    ],
)
def test_impossible_setting_is_named(kind, settings, key):
    with pytest.raises(ConfigError, match=rf"^data\.{key} is not possible; give "):
        kind(**settings)
