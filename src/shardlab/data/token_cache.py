"""Tokenized text, kept on disk: made once per machine, not once per rank and run."""

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardlab.data.encoder import Encoder
from shardlab.data.files import FileTokens

logger = logging.getLogger(__name__)


def tokenized(files: Sequence[Path], encoder: Encoder) -> FileTokens:
    """Tokenizes files, or finds what an earlier run made of them.

    The result lies in `$XDG_CACHE_HOME/shardlab` (`~/.cache/shardlab`; the temporary folder where that is not
    writable), under a name that follows from the tokenizer and each file's path, size and time of change. The first
    process of a machine writes it while the others wait.

    Args:
        files: UTF-8 text; invalid bytes become U+FFFD.
        encoder: with a tokenizer (bytes need no cache: the files are the tokens).

    Returns:
        The tokens of all files, one after the other.
    """
    target = _cache_folder() / f"{_digest(files, encoder)}.tokens"
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            logger.info("tokenizing %d files into %s", len(files), target)
            _write(target, files, encoder)
    return FileTokens([target], encoder.dtype)


def _write(target: Path, files: Sequence[Path], encoder: Encoder) -> None:
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        with open(partial, "wb") as out:
            for tokens in encoder.encode_all(file.read_text(errors="replace", encoding="utf-8") for file in files):
                tokens.tofile(out)
        os.replace(partial, target)  # whole or not at all
    finally:
        partial.unlink(missing_ok=True)


def _digest(files: Sequence[Path], encoder: Encoder) -> str:
    assert encoder.tokenizer is not None
    digest = hashlib.blake2b(encoder.tokenizer.to_str().encode(), digest_size=16)
    for file in files:
        stat = file.stat()
        digest.update(repr((os.path.realpath(file), stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shardlab")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        writable = False
    else:
        writable = os.access(folder, os.W_OK)
    if not writable:
        folder = Path(tempfile.gettempdir(), f"shardlab-{os.getuid()}")
        folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:  # closing it releases the lock, also when the process dies
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
