"""Sequences cut out of one long row of tokens."""

from typing import Protocol

from torch import Tensor
from torch.utils.data import Dataset


class Tokens(Protocol):
    """A row of token ids: a tensor, or files that are read where needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of seq_len + 1 tokens; neighbours share one, so each token but the first is a label once.

    `dataset[i]` is (inputs, labels), both (seq_len,) int64; labels are the inputs moved on by one token.

    Args:
        tokens: the row, of any integer type.
        seq_len: tokens per sequence.
        vocab_size: token ids are below this.
        start: first token of the row to use.
        stop: where to stop in the row; what does not fill a last window is left out.
    """

    def __init__(self, tokens: Tokens, seq_len: int, vocab_size: int, start: int, stop: int) -> None:
        self.tokens = tokens
        self.tokens_per_sample = seq_len
        self.vocab_size = vocab_size
        self.start = start
        self.samples = max(0, (stop - start - 1) // seq_len)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sequence {index} of {self.samples}")
        first = self.start + index * self.tokens_per_sample
        window = self.tokens[first : first + self.tokens_per_sample + 1].long()  # (seq_len + 1,)
        return window[:-1], window[1:]
