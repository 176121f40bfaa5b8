"""From text to token ids."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from shardlab.errors import ConfigError, shorten
from shardlab.hub import from_hub

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PIECE_CHARS = 1 << 16  # a tokenizer's time and memory per call stay small, and many pieces share the cores


class Encoder:
    """Token ids of a Hugging Face tokenizer, or the bytes of the text where there is none.

    No special tokens are added: the text decides where they stand.

    Args:
        tokenizer: of the `tokenizers` library; None = bytes.
    """

    def __init__(self, tokenizer: "Tokenizer | None" = None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = 256
        if tokenizer is not None:
            # A tokenizer.json may ask to cut each text to its model's context, or to fill it up.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            # Not get_vocab_size(): ids may have gaps.
            self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.typecode, self.dtype = _smallest_type(self.vocab_size)

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of one text, in this thread alone (safe in a forked worker)."""
        if self.tokenizer is None:
            return text.encode(errors="replace")
        ids: list[int] = []
        for piece in _pieces(text):
            ids += self.tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def encode_all(self, texts: Iterable[str]) -> Iterator[array]:
        """Token ids of many texts, one after the other, on all cores.

        Texts above 64 Ki characters are cut after a line (or a word) first, so a token that would span the cut
        becomes two.

        Yields:
            Arrays of token ids, in the smallest type that holds them (`dtype`).
        """
        if self.tokenizer is None:
            yield from (array("B", text.encode(errors="replace")) for text in texts)
            return
        group: list[str] = []
        chars = 0
        for text in texts:
            for piece in _pieces(text):
                group.append(piece)
                chars += len(piece)
                if chars >= 64 * _PIECE_CHARS:
                    yield self._encode_group(group)
                    group, chars = [], 0
        yield self._encode_group(group)

    def tensor(self, texts: Iterable[str]) -> Tensor:
        """Token ids of all texts, (tokens,) of type `dtype`, in memory."""
        tokens = array(self.typecode)
        for part in self.encode_all(texts):
            tokens.extend(part)
        return torch.frombuffer(tokens, dtype=self.dtype) if tokens else torch.empty(0, dtype=self.dtype)

    def _encode_group(self, group: list[str]) -> array:
        assert self.tokenizer is not None
        tokens = array(self.typecode)
        for encoding in self.tokenizer.encode_batch_fast(group, add_special_tokens=False):
            tokens.extend(encoding.ids)
        return tokens


def load_encoder(tokenizer: str | Path | None) -> Encoder:
    """Makes the encoder that `data.tokenizer` names.

    Args:
        tokenizer: None for bytes; a path that ends in .json for a file of the `tokenizers` library; else the name (or
            folder) of a `transformers` tokenizer, from the hub or its cache.

    Raises:
        ConfigError: the file or name leads to no usable tokenizer, or the library is missing.
    """
    if tokenizer is None:
        return Encoder()
    if not str(tokenizer).endswith(".json"):
        return Encoder(_from_transformers(str(tokenizer)))
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"data.tokenizer={tokenizer} needs a package: pip install tokenizers") from error
    path = Path(tokenizer).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.tokenizer={tokenizer} does not exist; give a tokenizer.json file, or null for bytes")
    try:
        return Encoder(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"data.tokenizer={tokenizer} is no valid tokenizer file ({shorten(error)}); "
            "give one that tokenizer.save() wrote, or null for bytes"
        ) from error


def _from_transformers(name: str) -> "Tokenizer":
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"data.tokenizer={name} needs a package: pip install transformers") from error
    try:
        loaded = from_hub(AutoTokenizer.from_pretrained, name)
    except Exception as error:  # network, permissions, names, formats: all mean that the name leads nowhere
        raise ConfigError(
            f"data.tokenizer={name} could not be loaded ({shorten(error)}); "
            "check the name and the network, or give a tokenizer.json file"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"data.tokenizer={name} has no fast version; give a tokenizer.json file")
    return backend


def _smallest_type(vocab_size: int) -> tuple[Literal["B", "H", "i"], torch.dtype]:
    """Type code for `array` and dtype that hold ids below `vocab_size`."""
    if vocab_size <= 1 << 8:
        return "B", torch.uint8
    if vocab_size <= 1 << 16:
        return "H", torch.uint16
    return "i", torch.int32


def _pieces(text: str) -> Iterator[str]:
    """Cuts a long text after a line where there is one, else after a word, else anywhere."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        limit = start + _PIECE_CHARS
        cut = text.rfind("\n", start, limit) + 1 or text.rfind(" ", start, limit) or limit
        cut = cut if cut > start else limit
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]
