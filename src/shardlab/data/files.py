"""Which files a text data set consists of, and tokens that stay in files."""

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from shardlab.errors import ConfigError

# Tests and bundled data are no prose of the library; installed packages differ from machine to machine.
_STDLIB_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class FileTokens:
    """The tokens of several files, one after the other, read from disk when asked for.

    Nothing is held in memory, so a corpus may be of any size, start-up only looks at file sizes, and all ranks of a
    machine share the operating system's page cache. Worker processes need no care: no file stays open.

    Args:
        files: in order; they must not change while in use.
        dtype: of one token in the files.
    """

    def __init__(self, files: Sequence[Path], dtype: torch.dtype = torch.uint8) -> None:
        self.files = list(files)
        self.dtype = dtype
        self.ends = list(accumulate(os.path.getsize(file) for file in self.files))  # in bytes

    def __len__(self) -> int:
        return self.ends[-1] // self.dtype.itemsize if self.ends else 0

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(len(self))
        data = self._read(start * self.dtype.itemsize, stop * self.dtype.itemsize)
        return torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)

    def _read(self, start: int, stop: int) -> bytearray:
        data = bytearray()
        number = bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[number - 1] if number else 0
            wanted = min(stop, self.ends[number]) - start
            with open(self.files[number], "rb") as file:
                file.seek(start - begin)
                piece = file.read(wanted)
            if len(piece) < wanted:
                raise RuntimeError(f"{self.files[number]} has become shorter since the run began; start it again")
            data += piece
            start += wanted
            number += 1
        return data


def stdlib_files() -> list[Path]:
    """The Python standard library's own sources, in a fixed order.

    Raises:
        ConfigError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in _walk(root, _STDLIB_SKIP) if file.suffix == ".py")
    if not files:
        raise ConfigError(f"data.path=null means Python's own sources, but {root} has none; set data.path to your text")
    return files


def text_files(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """Finds the text files that `data.path` names.

    Folders are searched to the bottom, in sorted order, without hidden files and folders; files in them that are not
    text (a zero byte among their first 8 KiB, git's own rule) are passed over. A file that is reached twice counts
    once, for its second copy might be held out while the first is trained on.

    Args:
        path: a file, a folder, or several of them.

    Returns:
        Files in the order of `path`, each with at least one byte.

    Raises:
        ConfigError: something named does not exist, cannot be read or is no text, or nothing is left.
    """
    files: dict[str, Path] = {}  # by real path
    for entry in [path] if isinstance(path, (str, Path)) else path:
        root = Path(entry).expanduser()
        if root.is_dir():
            found = [file for file in sorted(_walk(root, {"__pycache__"})) if _is_text(file)]
        elif root.is_file():
            if not _is_text(root):
                raise ConfigError(f"data.path={entry} is not a text file (it holds zero bytes); give text files")
            found = [root]
        else:
            raise ConfigError(
                f"data.path={entry} does not exist; give a file, a folder or a list of them, "
                "or null for Python's own sources"
            )
        for file in found:
            files.setdefault(os.path.realpath(file), file)
    result = [file for file in files.values() if file.stat().st_size]
    if not result:
        raise ConfigError(f"data.path={path} holds no text (no files, or only empty and binary ones); give text files")
    return result


def _walk(root: Path, skip: set[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _is_text(file: Path) -> bool:
    if not file.is_file():  # a dangling link, a socket
        return False
    try:
        with open(file, "rb") as stream:
            return b"\0" not in stream.read(8192)
    except OSError as error:
        raise ConfigError(
            f"data.path: cannot read {file} ({error.strerror}); make it readable or leave it out"
        ) from error
