"""A Hugging Face dataset by name, streamed or downloaded."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardlab.data.checks import check_int, check_split
from shardlab.data.encoder import Encoder, load_encoder
from shardlab.data.seeds import stable_seed
from shardlab.data.windows import TokenWindows
from shardlab.errors import ConfigError, shorten


def hf_text(
    name: str,
    seq_len: int,
    seed: int,
    subset: str | None = None,
    data_files: str | list[str] | dict[str, Any] | None = None,
    text_column: str = "text",
    tokenizer: str | Path | None = None,
    separator: str = "\n",
    train_split: str = "train",
    eval_split: str | None = None,
    eval_documents: int = 200,
    streaming: bool = True,
    shuffle_buffer: int = 1000,
    split: str = "train",
) -> "StreamedText | TokenWindows":
    """Makes a data set of token windows from a Hugging Face dataset.

    Held out are the first `eval_documents` documents of `eval_split`, or of the training split, which then begins
    after them; they are always read into memory (1, 2 or 4 bytes a token), so an evaluation costs no second download.

    Args:
        name: on the hub, a local folder, or a format (json, text, parquet, ...) with `data_files`.
        seq_len: tokens per sequence.
        seed: of the order of streamed documents.
        subset: the dataset's configuration, e.g. "en".
        data_files: paths or URLs, as for `datasets.load_dataset`.
        text_column: the column that holds a document's text.
        tokenizer: None = bytes (vocabulary 256); a tokenizer.json file; or a `transformers` tokenizer's name.
        separator: text put after each document, e.g. the tokenizer's own "<|endoftext|>".
        train_split: the dataset's split to train on.
        eval_split: the split to evaluate on; None = hold out the head of the training split.
        eval_documents: documents to hold out; 0 = none.
        streaming: read documents as they are needed (`StreamedText`); False downloads all to the local cache first
            and keeps all tokens in this process's memory, shuffled like any finite data.
        shuffle_buffer: documents that wait in a buffer, of which a random one comes next; 0 = the dataset's order.
        split: "train" or "eval".

    Raises:
        ConfigError: the dataset cannot be reached, has no such split or column, or is shorter than one sequence.
    """
    check_int("seq_len", seq_len, minimum=1)
    check_int("eval_documents", eval_documents, minimum=0)
    check_int("shuffle_buffer", shuffle_buffer, minimum=0)
    check_split(split)
    if split == "eval" and not eval_documents:
        raise ConfigError("data.eval_documents=0 holds nothing out; raise it, or set train.eval_every=0")

    encoder = load_encoder(tokenizer)
    held_out_of_train = eval_split in (None, train_split)
    source = train_split if split == "train" or held_out_of_train else str(eval_split)
    documents = _load(name, subset, data_files, source, streaming, text_column)
    if split == "eval":
        documents = documents.take(eval_documents if streaming else min(eval_documents, len(documents)))
    elif held_out_of_train and eval_documents:
        # Taken off before any shuffling, which differs from epoch to epoch and would mix the parts.
        documents = documents.skip(eval_documents)

    texts = _Texts(documents, text_column, separator, seed, shuffle_buffer)
    too_short = ConfigError(
        f"data.name={name}: the {split} part (split {source!r}) is shorter than one sequence of "
        f"data.seq_len={seq_len}; lower data.seq_len or change data.eval_documents (now {eval_documents})"
    )
    if split == "train" and streaming:
        # Looked at here, unshuffled, as filling the buffer takes long, and an error in a worker is hard to read.
        if next(_windows(encoder, texts.in_order(), seq_len), None) is None:
            raise too_short
        return StreamedText(texts, encoder, seq_len)
    tokens = encoder.tensor(texts.in_order())
    windows = TokenWindows(tokens, seq_len, encoder.vocab_size, 0, len(tokens))
    if not len(windows):
        raise too_short
    return windows


class StreamedText(Dataset[tuple[Tensor, Tensor]]):
    """Windows over a stream of documents that is read forward only.

    Sample k is the k-th window of seq_len + 1 tokens (neighbours share one token) of all documents, one after the
    other, epoch after epoch; each epoch shuffles anew and leaves out what does not fill its last window. There is no
    `__len__`: training takes sample k at position k, so each is seen once an epoch.

    **What it costs to reach sample k**: everything before it is read and tokenized. Going on from the sample read
    last costs the samples between; going back, or resuming a run, starts from the beginning of the stream. Every rank
    reads the whole stream and keeps its own part, so the time to read a global batch does not fall with more ranks.
    So does every DataLoader worker: one (`num_workers=1`) takes the reading off the training process, more of them
    only repeat the work.

    `dataset[i]` is (inputs, labels), both (seq_len,) int64; labels are the inputs moved on by one token.

    Args:
        texts: the documents, in each epoch's order.
        encoder: from text to token ids.
        seq_len: tokens per sequence.
    """

    def __init__(self, texts: "_Texts", encoder: Encoder, seq_len: int) -> None:
        self.texts = texts
        self.encoder = encoder
        self.tokens_per_sample = seq_len
        self.vocab_size = encoder.vocab_size
        self._rewind()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index < 0:
            raise IndexError(f"sample {index}")
        if index < self._next or self._owner != os.getpid():  # a forked worker shares open files with its parent
            self._rewind()
        window: list[int] = []
        while self._next <= index:
            window = next(self._stream)
            self._next += 1
        tokens = torch.tensor(window)  # (seq_len + 1,)
        return tokens[:-1], tokens[1:]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_stream", "_next", "_owner")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rewind()

    def _rewind(self) -> None:
        self._stream = self._epochs()
        self._next = 0
        self._owner = os.getpid()

    def _epochs(self) -> Iterator[list[int]]:
        for epoch in count():
            yield from _windows(self.encoder, self.texts.shuffled(epoch), self.tokens_per_sample)


class _Texts:
    """The text of each document, with the separator after it."""

    def __init__(self, documents: Any, column: str, separator: str, seed: int, shuffle_buffer: int) -> None:
        self.documents = documents
        self.column = column
        self.separator = separator
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer

    def in_order(self) -> Iterator[str]:
        return self._read(self.documents)

    def shuffled(self, epoch: int) -> Iterator[str]:
        if not self.shuffle_buffer:
            return self._read(self.documents)
        # Not `set_epoch`: it writes to memory that all forked workers share, and they may be in different epochs.
        seed = stable_seed("documents", self.seed, epoch)
        return self._read(self.documents.shuffle(seed=seed, buffer_size=self.shuffle_buffer))

    def _read(self, documents: Any) -> Iterator[str]:
        # By batches, not one by one: inside a DataLoader worker, `iter(documents)` would give each worker some of the
        # files only, and a sample would depend on the number of workers.
        for batch in documents.iter(batch_size=16):
            yield from (text + self.separator for text in batch[self.column] if text)


def _windows(encoder: Encoder, texts: Iterator[str], seq_len: int) -> Iterator[list[int]]:
    """Windows of seq_len + 1 token ids, each beginning with the last token of the one before."""
    tokens: list[int] = []
    for text in texts:
        tokens += encoder.encode(text)
        start = 0
        while len(tokens) - start > seq_len:
            yield tokens[start : start + seq_len + 1]
            start += seq_len
        del tokens[:start]


def _load(name: str, subset: str | None, data_files: Any, split: str, streaming: bool, text_column: str) -> Any:
    """`datasets.load_dataset`, with every failure as one line and soon."""
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"data.name={name} needs a package: pip install datasets") from error
    datasets.disable_progress_bars()  # one per rank, across the run's own
    try:
        if not data_files and not Path(name).exists():
            # Asked once: without a network, load_dataset itself retries for 20 seconds and prints each attempt.
            try:
                huggingface_hub.HfApi().dataset_info(name, timeout=10)
            except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError):
                raise  # an answer: there is no such dataset, or not for this user
            except Exception:
                if streaming:
                    raise
                datasets.config.HF_HUB_OFFLINE = True  # an earlier download may lie in the cache
        documents = datasets.load_dataset(name, subset, data_files=data_files, split=split, streaming=streaming)
        first: dict[str, list[Any]] = next(documents.iter(batch_size=1), {})
    except Exception as error:  # the libraries raise many types: network, permissions, names, formats
        raise ConfigError(
            f"data.name={name} could not be loaded ({shorten(error)}); check data.name, data.subset, "
            f"data.data_files, the split {split!r} (data.train_split, data.eval_split) and the network"
        ) from error
    if first and text_column not in first:
        raise ConfigError(f"data.text_column={text_column} is not in {name}; its columns are {', '.join(first)}")
    if first and not isinstance(first[text_column][0], str | None):
        raise ConfigError(f"data.text_column={text_column} of {name} holds no text; its columns are {', '.join(first)}")
    return documents
