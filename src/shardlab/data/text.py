"""The user's own text, or the Python standard library's sources."""

from collections.abc import Sequence
from pathlib import Path

from shardlab.data.checks import check_fraction, check_int, check_split
from shardlab.data.encoder import load_encoder
from shardlab.data.files import FileTokens, stdlib_files, text_files
from shardlab.data.token_cache import tokenized
from shardlab.data.windows import TokenWindows
from shardlab.errors import ConfigError


class Text(TokenWindows):
    """Windows over the text of all files, one after the other, nothing between them.

    The held-out part is the end of the text: with several files that means files which are not trained on, a more
    honest test than every n-th sequence, whose neighbours would be. The parts share no token.

    Args:
        path: a file, a folder (searched to the bottom, sorted) or several; None = Python's standard library.
        seq_len: tokens per sequence.
        tokenizer: None = bytes (vocabulary 256); a tokenizer.json file; or a `transformers` tokenizer's name.
        eval_fraction: share of the tokens that is held out.
        split: "train" or "eval".

    Raises:
        ConfigError: a path or tokenizer leads nowhere, or a part is shorter than one sequence.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path] | None = None,
        seq_len: int = 256,
        tokenizer: str | Path | None = None,
        eval_fraction: float = 0.05,
        split: str = "train",
    ) -> None:
        check_int("seq_len", seq_len, minimum=1)
        check_fraction("eval_fraction", eval_fraction)
        check_split(split)
        if split == "eval" and eval_fraction == 0:
            raise ConfigError("data.eval_fraction=0 holds nothing out; raise it, or set train.eval_every=0")

        encoder = load_encoder(tokenizer)
        files = stdlib_files() if path is None else text_files(path)
        tokens = FileTokens(files) if encoder.tokenizer is None else tokenized(files, encoder)
        boundary = len(tokens) - int(len(tokens) * eval_fraction)
        start, stop = (0, boundary) if split == "train" else (boundary, len(tokens))
        super().__init__(tokens, seq_len, encoder.vocab_size, start, stop)
        if not len(self):
            raise ConfigError(
                f"data.seq_len={seq_len} is too long: the {split} part of data.path={path} holds {stop - start} tokens "
                f"and one sequence takes {seq_len + 1}; give more text, lower data.seq_len or change data.eval_fraction"
            )
