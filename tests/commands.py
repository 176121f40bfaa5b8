"""Runs train.py as a user does, in a folder of its own: what tests of the command line share."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.training import ROOT

SECONDS = 120.0  # until a command counts as hanging

# Small, silent and quick; what a test wants otherwise comes later on the command line.
QUICK = (
    "model=mlp",
    "data=random_classes",
    "tracking=none",
    "train.eval_every=null",
    "plan.before_train=false",
    "plan.timeline=false",
)

# A user's own model and data, which do as asked on one rank, at the first sample of one step.
USERS_MODULE = """
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

import shardlab.interrupt

shardlab.interrupt.GRACE_SECONDS = 1.0
RANK = int(os.environ.get("RANK", 0))


class Net(torch.nn.Module):
    def __init__(self, width=20, scratch_bytes=0):
        super().__init__()
        self.scratch_bytes = scratch_bytes
        self.layers = torch.nn.Sequential(torch.nn.Linear(10, width), torch.nn.ReLU(), torch.nn.Linear(width, 5))

    def forward(self, features):
        torch.empty(self.scratch_bytes, dtype=torch.uint8)
        return self.layers(features)


class NoModule:
    pass


class Data(Dataset):
    def __init__(self, split, does="nothing", on_rank=1, at_step=3, micro_batch=8):
        self.does = does if on_rank == RANK else "nothing"
        self.last_sample = (at_step - 1) * micro_batch
        self.samples = 0

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.samples += 1
        if self.samples > self.last_sample:
            self.misbehave()
        generator = torch.Generator().manual_seed(index)
        labels = torch.tensor(index % 5)
        return torch.randn(10, generator=generator), labels[None] if self.does == "misshapen" else labels

    def misbehave(self):
        if self.does == "raise":
            raise KeyError("no such sample")
        if self.does == "raise_once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise KeyError("no such sample")
        if self.does == "exit":
            sys.exit("enough")
        if self.does == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "sleep":
            Path("asleep").touch()
            time.sleep(600)
        if self.does == "allocate":
            torch.empty(1 << 50, dtype=torch.uint8)
        if self.does == "exceed":  # a limit of the process, as a container has it
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
            torch.empty(1 << 30, dtype=torch.uint8)
"""


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float  # since it was started

    @property
    def errors(self) -> list[str]:
        """The lines that name a mistake or a failure."""
        return [line for line in self.err.splitlines() if "error: " in line]

    @property
    def tracebacks(self) -> int:
        """How many tracebacks were shown; torchrun's own, about the ranks that failed, is left out."""
        return self.err.count("Traceback (") - self.err.count("launch_agent(")


class Command:
    """A command that runs, in a process group of its own; one at a time in a folder."""

    def __init__(self, folder: Path, *arguments: str, ranks: int | None = None, program: str = "train.py"):
        """Args:
        folder: to run in.
        *arguments: of train.py.
        ranks: how many torchrun starts; None = `python train.py`.
        program: a path relative to the repository.
        """
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
        command = [sys.executable, *torchrun, str(ROOT / program), *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
        self._mark = f"SHARDLAB_TEST={folder}\0".encode()
        environment |= {
            "SHARDLAB_TEST": str(folder),
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
            "MPLCONFIGDIR": tempfile.gettempdir(),  # torchmetrics imports matplotlib, whose cache is made at HOME else
            "WANDB_MODE": "offline",
        }
        self.began = time.monotonic()
        self.folder = folder
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True
            )

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Waits until something is so, as long as the command runs."""
        try:
            while not condition():
                assert self.process.poll() is None, (self.folder / "stderr").read_text()
                assert self.elapsed() < SECONDS, "nothing has come of it"
                time.sleep(0.02)
        except BaseException:
            self._kill()
            raise

    def interrupt(self) -> None:
        """As a terminal does on Ctrl-C: every process of the group gets the signal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Waits for the end; nothing of the command is left then."""
        try:
            code = self.process.wait(seconds)
            seconds = self.elapsed()
            patience = time.monotonic() + 20.0  # W&B's process sees only after a while that it is alone
            while (left := self.processes()) and time.monotonic() < patience:
                time.sleep(0.05)
        finally:
            self._kill()
        assert not left, f"processes {left} are left over"
        return Ended(code, (self.folder / "stdout").read_text(), (self.folder / "stderr").read_text(), seconds)

    def _kill(self) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """What was started and still runs, wherever in the tree of processes; torchrun's ranks have own sessions."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # gone meanwhile, or another user's
                if self._mark in file.read_bytes():  # empty for a process that has ended
                    found.append(int(file.parent.name))
        return found


def run(folder: Path, *arguments: str, ranks: int | None = None) -> Ended:
    """Runs train.py to its end."""
    return Command(folder, *arguments, ranks=ranks).wait()


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def rows_of(run_folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl so far."""
    file = run_folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
