"""Plans of a sweep's combinations, in a pool of processes that are forked with all imports done."""

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from shardlab.config import parse
from shardlab.errors import ConfigError, describe
from shardlab.launch import one_line
from shardlab.planner.ahead import cluster_of_run
from shardlab.planner.cluster import ClusterConfig, resolve
from shardlab.planner.job import cores, plan
from shardlab.planner.plan import make_plan
from shardlab.planner.workers import Lost, Workers
from shardlab.run_folder import RunFolder, Status
from shardlab.sweep.processes import LOG_FILE
from shardlab.sweep.stop import Stop
from shardlab.sweep.tasks import Task
from shardlab.telemetry.prediction import Prediction
from shardlab.tracking import format_gib

_MISTAKES = (ConfigError, HydraException, OmegaConfBaseException)


def plan_tasks(
    tasks: Sequence[Task],
    *,
    stop: Stop,
    started: Callable[[Task], None],
    ended: Callable[[Task, Mapping[str, Any], float], None],
) -> None:
    """Plans each task, as `train.py` would with `mode=plan`, into its folder.

    What a plan prints goes to `launch.log`. A contradiction is `skipped`, any other error `failed`; a plan whose
    process is killed is `killed`, and stops no other.

    Args:
        tasks: in the order in which they are to begin.
        stop: whether a signal has asked the sweep to end; what has begun and is unfinished then is `interrupted`.
        started: called where a task begins.
        ended: called with the summary and the seconds that it took, where a task has ended.
    """
    _read_devices()

    def planned(index: int) -> dict[str, Any]:
        return _plan(tasks[index])

    running: dict[int, float] = {}  # since when, by index

    def begun(index: int) -> None:
        running[index] = time.monotonic()
        started(tasks[index])

    with Workers(planned, min(cores(), len(tasks))) as workers:
        for index, summary, seconds in workers.run_all(
            range(len(tasks)), begun=begun, stopped=lambda: stop.signal is not None
        ):
            del running[index]
            if isinstance(summary, Lost):
                summary = _ended(tasks[index].folder, *_verdict(summary))
            ended(tasks[index], summary, seconds)
    for index, since in running.items():
        ended(tasks[index], _interrupted(tasks[index].folder), time.monotonic() - since)


def predict(tasks: Sequence[Task], *, world_size: int, nodes: int, stop: Stop) -> dict[int, Prediction]:
    """Plans training runs before any of them begins.

    Each is planned for its `cluster`: by default for devices as those of this machine.

    Args:
        tasks: to be trained.
        world_size: ranks that the launcher starts; `cluster` may say otherwise.
        nodes: that they are on.
        stop: whether a signal has asked the sweep to end; it is left unfinished then.

    Returns:
        Predictions by the tasks' numbers, without those that cannot be planned.
    """
    _read_devices()

    def predicted(index: int) -> Prediction | None:
        return _predict(tasks[index], world_size, nodes)

    predictions = {}
    with Workers(predicted, min(cores(), len(tasks))) as workers:
        for index, prediction, _ in workers.run_all(
            range(len(tasks)), begun=lambda index: None, stopped=lambda: stop.signal is not None
        ):
            if isinstance(prediction, Prediction):
                predictions[tasks[index].number] = prediction
    return predictions


def does_not_fit(prediction: Prediction) -> str:
    """Why a run is skipped, as one line."""
    assert prediction.capacity_bytes is not None
    needed, there = format_gib(prediction.needed_bytes), format_gib(prediction.capacity_bytes)
    return f"predicted peak {needed} is more than the {there} of {prediction.device or 'the device'}"


def _read_devices() -> None:
    """Reads what this machine has: a forked process cannot ask CUDA for it where this one has done so."""
    resolve(ClusterConfig())


def _plan(task: Task) -> dict[str, Any]:
    """Plans a task. Returns its summary, which is written."""
    task.folder.mkdir(parents=True, exist_ok=True)
    with _printing_to(task.folder / LOG_FILE):
        try:
            hydra = _enter_job(task)
            choices = {group: str(choice) for group, choice in hydra.runtime.choices.items()}
            return plan(task.cfg, folder=RunFolder(task.folder), choices=choices, in_sweep=True)
        except _MISTAKES as mistake:
            print(f"error: {one_line(mistake)}")
            return _ended(task.folder, Status.skipped, one_line(mistake))
        except Exception as error:
            traceback.print_exc()
            return _ended(task.folder, Status.failed, describe(error))


def _enter_job(task: Task) -> Any:
    """Lets this process be in the task's Hydra job, as `hydra.core.utils.run_job` does."""
    composed = task.composed
    with read_write(composed.hydra), open_dict(composed.hydra):
        composed.hydra.runtime.output_dir = str(task.folder)
    HydraConfig.instance().set_config(composed)
    return HydraConfig.get()


def _interrupted(folder: Path) -> dict[str, Any]:
    """The summary of a plan whose worker was ended; that which it wrote before, where it had just come so far."""
    file = folder / "summary.json"
    return json.loads(file.read_text()) if file.exists() else _ended(folder, Status.interrupted, None)


def _ended(folder: Path, status: Status, error: str | None) -> dict[str, Any]:
    """The summary of a plan that did not complete, written."""
    summary = {"status": status.value, "error": error}
    RunFolder(folder).write_summary(summary)
    return summary


def _verdict(lost: Lost) -> tuple[Status, str]:
    if lost.code == -signal.SIGKILL:
        return Status.killed, "its process was killed (SIGKILL), perhaps by the kernel for its memory (see dmesg)"
    how = f"ended by {signal.Signals(-lost.code).name}" if lost.code < 0 else f"ended with code {lost.code}"
    return Status.failed, f"its process {how}"


def _predict(task: Task, world_size: int, nodes: int) -> Prediction | None:
    with _printing_to(Path(os.devnull)):
        try:
            given: ClusterConfig = OmegaConf.to_object(task.cfg.cluster)  # type: ignore[assignment]
            cluster = cluster_of_run(given, world_size, nodes=nodes, on_cpu=task.cfg.device.name == "cpu")
            config = parse(task.cfg, world_size=cluster.world_size, nodes=cluster.nodes or 1)
            return Prediction.of_plan(make_plan(config, cluster).to_dict(), cluster.name)
        except Exception:  # the run itself will tell
            return None


@contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    """Lets all that this process prints and logs go to a file, what libraries print past Python too."""
    root, disabled = logging.getLogger(), logging.root.manager.disable
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with file.open("a") as log, redirect_stdout(log), redirect_stderr(log):
        handlers, root.handlers = root.handlers, [logging.StreamHandler(log)]
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        logging.disable(logging.NOTSET)
        try:
            yield
        finally:
            log.flush()
            logging.disable(disabled)
            root.handlers = handlers
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
