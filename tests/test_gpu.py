"""On one CUDA device: NCCL, the allocator's figures, the loss scale, running out of memory, no waiting.

Each test trains in a process of its own, so that none inherits another's memory, limits or process group.
"""

import json
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlab.build import Built, build, make_model
from shardlab.config import Config, DeviceChoice
from shardlab.data import batches
from shardlab.device import choose_device
from shardlab.distributed import Ranks, process_group
from shardlab.sharding import make_mesh
from shardlab.telemetry.quality import Quality
from shardlab.trainer import Datasets
from tests.training import ROOT, config_of, full_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

CPU = torch.device("cpu")
RUN = ("model=llama_tiny", "data=random_tokens", "data.seq_len=64", "train.micro_batch=4", "train.eval_every=null")
LIMITED = """
import runpy, sys, torch
memory_bytes = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction({limit_bytes} / memory_bytes, 0)
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


# --- in a process with a process group on the device ---


def on_gpu(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a module-level function as `function(device, *args)`; there NCCL serves CUDA tensors, gloo others."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_process_group, function, args).result(timeout=240)


def _with_process_group(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    device = choose_device(DeviceChoice.cuda, local_rank=0, local_world_size=1)
    with process_group(Ranks(), device):
        return function(device.torch_device, *args)


def built_on(device: torch.device, config: Config) -> Built:
    mesh = make_mesh(config.sharding, device_type=device.type, world_size=1)
    return build(config, device=device, mesh=mesh)


def batches_for(config: Config) -> list[Any]:
    train = config.train
    source = batches(
        Datasets(config).train,
        seed=config.seed,
        micro_batch=train.micro_batch,
        micro_batches=config.accumulation.steps or 1,
        rank=0,
        world_size=1,
        steps=train.steps,
    )
    return list(source)


def losses_here_and_on_a_cpu(device: torch.device, precision: str) -> tuple[list[float], list[float], str]:
    """Losses of the same steps from the same weights: in `precision` on the device, in fp32 on the CPU."""
    run = (*RUN, "train.steps=5", "data.samples=4")  # the same four sequences at each step: learnt by heart
    cpu_config, config = config_of(*run, world_size=1), config_of(*run, f"precision={precision}", world_size=1)
    on_cpu, on_device = built_on(CPU, cpu_config), built_on(device, config)
    weights = full_weights(on_cpu.model)
    with torch.no_grad():
        for name, parameter in on_device.model.named_parameters():
            parameter.to_local().copy_(weights[name])  # type: ignore[attr-defined]
    losses: list[list[float]] = []
    for built in (on_device, on_cpu):
        outputs = [built.step(micro_batches) for micro_batches in batches_for(config)]
        losses.append([(output.loss_sum / output.valid).item() for output in outputs])
    return losses[0], losses[1], next(on_device.model.parameters()).device.type


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_nccl_trains_as_a_cpu_does(precision, tolerance):
    here, on_cpu, device_type = on_gpu(losses_here_and_on_a_cpu, precision)
    assert device_type == "cuda"
    assert here == pytest.approx(on_cpu, rel=tolerance)
    assert here != on_cpu  # other kernels: not to the last bit
    assert here[-1] < here[0]


def overflow_at_the_second_step(device: torch.device) -> list[tuple[float, float, bool]]:
    """After each of four steps: the gradient's norm, the loss scale, whether the weights stayed as they were."""
    config = config_of("model=mlp", "data=random_classes", "optimizer=adam", "precision=fp16", world_size=1)
    built = built_on(device, config)
    inputs, labels = batches_for(config)[0][0]
    seen = []
    for step in range(4):
        before = full_weights(built.model)
        norm = built.step([(torch.full_like(inputs, math.inf) if step == 1 else inputs, labels)]).grad_norm.item()
        after = full_weights(built.model)
        seen.append((norm, built.scaler.get_scale(), all(torch.equal(before[name], after[name]) for name in before)))
    return seen


def test_fp16_skips_an_overflow_and_recovers():
    norms, scales, unchanged = zip(*on_gpu(overflow_at_the_second_step), strict=True)
    assert unchanged == (False, True, False, False)
    assert scales == (65536.0, 32768.0, 32768.0, 32768.0)
    assert [math.isfinite(norm) for norm in norms] == [True, False, True, True]


def step_that_may_not_wait(device: torch.device, overrides: tuple[str, ...]) -> float:
    """The loss of a step during which any wait for the device raises."""
    config = config_of(*RUN, "train.steps=3", *overrides, world_size=1)
    built, quality = built_on(device, config), Quality(device)
    *warm_up, last = batches_for(config)
    for micro_batches in warm_up:
        built.step(micro_batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = built.step(last)
        quality.update(output.loss_sum, output.correct, output.valid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return quality.compute()["loss"]


@pytest.mark.parametrize("overrides", [
    ("precision=bf16", "sharding=full_shard", "accumulation=reduce_last"),
    ("precision=fp16", "sharding=no_shard"),
    ("precision=fp16_autocast", "sharding=shard_optimizer", "activation=selective"),
])  # fmt: skip
def test_a_step_never_waits_for_the_device(overrides):
    assert on_gpu(step_that_may_not_wait, overrides) == pytest.approx(math.log(256), abs=1)


# --- by the command line ---


def train(folder: Path, *overrides: str, limit_bytes: int | None = None, exit_code: int = 0) -> dict[str, Any]:
    """Runs `python train.py`, with its memory limited where `limit_bytes` says so. Returns the summary."""
    program = ["train.py"] if limit_bytes is None else ["-c", LIMITED.format(limit_bytes=limit_bytes)]
    command = [sys.executable, *program, f"hydra.run.dir={folder}", "tracking=none", "train.log_every=1", *overrides]
    of_a_launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in of_a_launcher}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == exit_code, ended.stdout + ended.stderr
    return json.loads((folder / "summary.json").read_text())


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_memory_figures_are_the_allocators(tmp_path):
    overrides = (*RUN, "train.steps=4", "precision=bf16")
    summary = train(tmp_path / "run", "device=cuda", *overrides)
    memory, rows = summary["memory"], rows_of(tmp_path / "run")
    parameters = list(make_model(config_of(*overrides, world_size=1).model).parameters())
    states = {
        "parameters_bytes": 4 * sum(p.numel() for p in parameters),
        "gradients_bytes": 4 * sum(p.numel() for p in parameters),
        "optimizer_bytes": 8 * sum(p.numel() for p in parameters) + 4 * len(parameters),  # and a counter for each
    }
    assert summary["status"] == "completed"
    assert {key: memory[key] for key in states} == states
    assert sum(states.values()) < memory["allocated_peak_bytes"] <= memory["reserved_peak_bytes"]
    for row in rows:
        peaks = [row[f"memory/{kind}_peak_gib"] for kind in ("allocated", "active", "reserved")]
        assert 0 < peaks[0] <= peaks[1] <= peaks[2]
        assert (row["memory/alloc_retries"], row["memory/ooms"]) == (0, 0)
    for kind in ("allocated", "reserved"):
        assert max(row[f"memory/{kind}_peak_gib"] for row in rows) * 2**30 == memory[f"{kind}_peak_bytes"]
    assert 0 < rows[-1].get("perf/mfu", 0.5) < 1  # absent where the device's peak is unknown


def test_running_out_of_memory_ends_with_the_memory_at_that_moment(tmp_path):
    limit_bytes = 256 << 20
    # Some 3.5 GiB of activations: 65,536 tokens, 4 blocks, and in each some 3,500 fp32 values for a token.
    overrides = ("model=llama_tiny", "data=random_tokens", "data.seq_len=1024", "train.micro_batch=64")
    summary = train(tmp_path / "run", "device=cuda", *overrides, limit_bytes=limit_bytes, exit_code=1)
    assert summary["status"] == "oom"
    assert "out of memory" in summary["error"]
    assert summary["steps"] == 0
    memory = summary["memory"]
    parameters = make_model(config_of(*overrides, world_size=1).model).parameters()
    assert memory["parameters_bytes"] == 4 * sum(p.numel() for p in parameters)
    assert limit_bytes / 4 < memory["allocated_peak_bytes"] <= memory["reserved_peak_bytes"] <= limit_bytes
    assert "OutOfMemoryError" in (tmp_path / "run" / "train.log").read_text()


def test_offloaded_states_train_as_on_a_cpu_and_leave_the_device(tmp_path):
    steps = (*RUN, "train.steps=5")
    offloaded = train(tmp_path / "offloaded", "device=cuda", "sharding.cpu_offload=true", *steps)
    resident = train(tmp_path / "resident", "device=cuda", *steps)
    train(tmp_path / "cpu", "device=cpu", *steps)
    # Weights are drawn where they lie, so the offloaded run begins as the one on the CPU does.
    losses, expected = ([row["train/loss"] for row in rows_of(tmp_path / run)] for run in ("offloaded", "cpu"))
    assert losses == pytest.approx(expected, rel=1e-3)
    states = offloaded["memory"]["parameters_bytes"] + offloaded["memory"]["optimizer_bytes"]
    saved = resident["memory"]["allocated_peak_bytes"] - offloaded["memory"]["allocated_peak_bytes"]
    assert saved > states / 2
