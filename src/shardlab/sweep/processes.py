"""The torchrun of a job, as launchers start it on each node. Imported on a cluster's nodes, and so without PyTorch."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

LOG_FILE = "launch.log"  # what a job's processes print
MARK = "SHARDLAB_SWEEP_JOB"  # environment variable by which the processes of a job on a node are known


def torchrun_arguments(ranks: int, *, nodes: int = 1, node: int = 0, endpoint: str = "", job_id: str = "") -> list[str]:
    """How torchrun is told of a job's ranks, and finds the other nodes.

    Args:
        ranks: on each node.
        nodes: of the job.
        node: this one, from 0.
        endpoint: host:port on the first node, where there are several.
        job_id: the same on all nodes.
    """
    arguments = ["--nproc-per-node", str(ranks)]
    if nodes == 1:
        return [*arguments, "--standalone"]  # a rendezvous of its own, on a port that is free
    return [
        *arguments,
        *("--nnodes", str(nodes), "--node-rank", str(node)),
        # c10d has rank 0 on any node, and it would not be where the records are.
        *("--rdzv-backend", "static", "--rdzv-id", job_id, "--rdzv-endpoint", endpoint),
    ]


def log_name(node: int) -> str:
    """What a node's ranks print to."""
    return f"launch.node{node}.log" if node else LOG_FILE


def mark_of(folder: Path, node: int) -> str:
    """The value of `MARK`: another one for each node, since several may be on one machine."""
    return f"{node}:{folder}"


def start_torchrun(
    arguments: Sequence[str],
    *,
    folder: Path,
    node: int,
    log: IO[bytes],
    environment: Mapping[str, str],
    **more: Any,
) -> "subprocess.Popen[bytes]":
    """Starts the torchrun of a job; it ends with this process, however that ends.

    Args:
        arguments: of torchrun.
        folder: of the job.
        node: this one, from 0.
        log: what it prints to.
        environment: all of it.
        **more: of `subprocess.Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "shardlab.sweep.elastic", str(_exit_codes_file(folder, node)), *arguments],
        env={**environment, MARK: mark_of(folder, node)},
        stdin=subprocess.PIPE,  # closes with this process
        stdout=log,
        stderr=subprocess.STDOUT,
        **more,
    )


def take_exit_codes(folder: Path, node: int) -> dict[str, int]:
    """The exit codes of a node's ranks that failed, negative for signals; the file that has them is removed."""
    file = _exit_codes_file(folder, node)
    codes = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    return codes


def _exit_codes_file(folder: Path, node: int) -> Path:
    return folder / f".node{node}.exit_codes"
