"""Random tokens: any vocabulary and length, no files."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardlab.data.batches import IGNORE_INDEX
from shardlab.data.checks import check_fraction, check_int, check_split
from shardlab.data.seeds import stable_seed


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """Uniform random tokens; sample i depends on (seed, split, i) alone.

    `dataset[i]` is (inputs, labels), both (seq_len,) int64; labels are the inputs moved on by one token.

    Args:
        vocab_size: tokens are in [0, vocab_size).
        seq_len: tokens per sequence.
        samples: sequences in the training part.
        seed: of the tokens.
        eval_samples: sequences in the held-out part.
        ignore_fraction: chance of each label to be IGNORE_INDEX, so that ranks hold unequal numbers of valid labels.
        split: "train" or "eval".

    Raises:
        ConfigError: a setting is out of its range.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        samples: int,
        seed: int,
        eval_samples: int = 256,
        ignore_fraction: float = 0.0,
        split: str = "train",
    ) -> None:
        check_int("vocab_size", vocab_size, minimum=1)
        check_int("seq_len", seq_len, minimum=1)
        check_int("samples", samples, minimum=1)
        check_int("eval_samples", eval_samples, minimum=1)
        check_fraction("ignore_fraction", ignore_fraction)
        check_split(split)
        self.vocab_size = vocab_size
        self.tokens_per_sample = seq_len
        self.samples = samples if split == "train" else eval_samples
        self.seed = seed
        self.ignore_fraction = ignore_fraction
        self.split = split

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        generator = torch.Generator().manual_seed(stable_seed("tokens", self.seed, self.split, index))
        window = torch.randint(self.vocab_size, (self.tokens_per_sample + 1,), generator=generator)
        inputs, labels = window[:-1].clone(), window[1:].clone()
        if self.ignore_fraction:
            labels[torch.rand(labels.shape, generator=generator) < self.ignore_fraction] = IGNORE_INDEX
        return inputs, labels
