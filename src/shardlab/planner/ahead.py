"""The plan ahead of a training run: of the same config, for the devices at hand, in a process of its own.

That process runs this module. It is told what to plan on its standard input, which stays open as long as the run wants
the plan: where it closes, the run has ended in some way, and the plan with it.
"""

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from shardlab.config import Config
from shardlab.distributed import Ranks, environment_of_no_rank
from shardlab.errors import describe
from shardlab.files import write_json
from shardlab.interrupt import when_input_closes
from shardlab.planner.cluster import ClusterConfig, resolve
from shardlab.telemetry.prediction import Prediction

log = logging.getLogger(__name__)

LIMIT_SECONDS = 30.0  # from the start of a plan until the run goes on without it
_POLL_SECONDS = 0.02


class NoPlan(RuntimeError):
    """There is no plan; the message is one line that says why."""


class Ahead:
    """A plan in the making. To be entered; when it is left, nothing of the plan runs any more."""

    def __init__(self, config: Config, *, place: Ranks, on_cpu: bool, file: Path):
        """Starts to plan. Fails in no way but that `result` has no plan then.

        Args:
            config: of the run, as `config.parse` returned it.
            place: of this rank: how many there are, and on how many machines.
            on_cpu: whether the run is on CPUs.
            file: where the plan goes, as `Plan.to_dict` has it.
        """
        self._file = file
        self._began = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._problem: str | None = None
        self._errors = None
        try:
            cluster = cluster_of_run(ClusterConfig(), place.world_size, nodes=place.nodes, on_cpu=on_cpu)
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = _start(self._errors)
            assert self._process.stdin is not None
            pickle.dump((config, cluster, file), self._process.stdin)
            self._process.stdin.flush()
        except Exception as error:
            self._problem = describe(error)

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def result(self, check: Callable[[], None]) -> Prediction:
        """Waits for the plan, until `LIMIT_SECONDS` after its start.

        Args:
            check: called while waiting; what it raises ends the wait.

        Raises:
            NoPlan: where the plan failed or is given up.
        """
        while self._problem is None and self._running():
            check()
            if time.monotonic() - self._began >= LIMIT_SECONDS:
                self._problem = f"not finished within {LIMIT_SECONDS:g} s"
            time.sleep(_POLL_SECONDS)
        try:
            if problem := self._problem or self._failure():
                raise NoPlan(problem)
            return Prediction.of_plan(json.loads(self._file.read_text()))
        except (OSError, ValueError, LookupError) as error:
            raise NoPlan(describe(error)) from error
        finally:
            self._end()

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _failure(self) -> str | None:
        """Why the process that has ended did so without a plan; its traceback goes to the log."""
        assert self._process is not None and self._errors is not None
        code = self._process.returncode
        if code == 0:
            return None
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        log.info("the plan ahead of the run failed:\n%s", text)
        return text.splitlines()[-1] if code > 0 and text else f"its process ended with code {code}"

    def _end(self) -> None:
        """Ends the process and what it started. A second call does nothing."""
        if self._process is not None:
            if self._running():
                with suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, on a disk that is gone
                    self._process.wait(5.0)
            assert self._process.stdin is not None
            with suppress(OSError):  # what it never read
                self._process.stdin.close()
        if self._errors is not None:
            self._errors.close()


def cluster_of_run(given: ClusterConfig, world_size: int, *, nodes: int, on_cpu: bool) -> ClusterConfig:
    """What a run has: its ranks, on devices as those of this machine, unless the cluster says otherwise.

    Args:
        given: as composed.
        world_size: ranks of the run.
        nodes: that they are on.
        on_cpu: whether the run is set to the CPU.

    Raises:
        ConfigError: for a cluster that cannot be.
    """
    per_node = world_size // nodes
    if given.gpus_per_node is None:
        given = replace(given, gpus_per_node=per_node)
    here = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(per_node)}
    return resolve(given, environ=os.environ | here, allow_cuda=not on_cpu)


def _start(errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    environment = environment_of_no_rank() | {  # the plan is none of them
        "CUDA_VISIBLE_DEVICES": "",  # a GPU is simulated; a real one's memory is the run's
        # Modules are found where the run finds them, and in the same order.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONSAFEPATH": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # a group that can be killed as a whole, and that a terminal's Ctrl-C does not reach
    )


def _main() -> None:
    config, cluster, file = pickle.load(sys.stdin.buffer)
    # A run that is killed cannot end its plan.
    when_input_closes(lambda: os.killpg(0, signal.SIGKILL))
    try:
        from shardlab.planner.plan import make_plan  # imports FSDP, which takes seconds

        plan = make_plan(config, cluster).to_dict()
        write_json(file, plan)
    except Exception as error:
        traceback.print_exc()
        sys.exit(describe(error))


if __name__ == "__main__":
    _main()
