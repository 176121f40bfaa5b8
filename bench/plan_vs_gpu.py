"""Plans against one real GPU, which runs rank 0 of 8 to 1024 ranks with a fake process group.

    python bench/plan_vs_gpu.py               # 16 cases, about 5 minutes; writes bench/results/plan_vs_gpu.json
    python bench/plan_vs_gpu.py fp16 1024     # only cases whose name has one of these; writes nothing
    python bench/plan_vs_gpu.py --device cpu  # small cases, plan against ledger, which must agree to the byte

Each case runs the trainer's own `build` and three steps in a fresh process, on real tensors: the allocations, streams
and kernels of a run on so many GPUs, of which only the communication is missing. Its peaks are those of PyTorch's
allocator, from before `build` to the end of the third step, and beside them the ledger's, which has neither scratch of
kernels nor rounding. Another process, which sees no GPU, plans the same config for such GPUs as this one.

The fake process group copies rank 0's own part to where a collective would put the others' (torch 2.13), so what is
computed is no model's training, and fp16 may overflow. No memory depends on that: a step branches on no value, and the
loss scale skips an update on the device, after the fused optimizers have made their state.

Not covered: NCCL's own memory and the CUDA context, which lie outside of the allocator (`cluster.set_aside_gib`).
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tests' configs and batches

import torch
import torch.distributed as dist
from record import record
from tests.training import batches_of, config_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardlab.build import build
from shardlab.config import Config, DeviceChoice
from shardlab.device import choose_device
from shardlab.planner.cluster import GIB, ClusterConfig, ClusterDevice, resolve
from shardlab.planner.plan import make_plan
from shardlab.sharding import make_mesh
from shardlab.telemetry.ledger import WINDOW_STEPS, Ledger

LIMIT_SECONDS = 150.0  # for one process of a case
Row = dict[str, Any]  # figures by name


@dataclass(frozen=True)
class Case:
    """A config and the ranks that it is meant for.

    Attributes:
        overrides: of the config, as on the command line.
        nodes: of `gpus_per_node` GPUs each; hybrid strategies have a replica group on each.
        needs_gib: memory of the GPU; on a smaller one the case is left out.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF.
    """

    overrides: str
    nodes: int = 1
    gpus_per_node: int = 8
    needs_gib: float = 32.0
    alloc_conf: str = ""

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def name(self) -> str:
        words = [word for word in self.overrides.split() if not word.startswith(("data=", "data.vocab_size="))]
        return " ".join([f"{self.world_size:4}", *words, *([self.alloc_conf] if self.alloc_conf else [])])

    def compose(self) -> Config:
        run = (*self.overrides.split(), f"train.steps={WINDOW_STEPS}", "train.eval_every=0")
        return config_of(*run, world_size=self.world_size, nodes=self.nodes)


_SMALL = "model=llama_125m data=random_tokens data.vocab_size=50304 data.seq_len=1024 train.micro_batch=8"
_LARGE = "model=llama3_8b data=random_tokens data.vocab_size=128256 data.seq_len=4096 train.micro_batch=1"
GPU_CASES = [
    Case(f"{_SMALL} sharding=full_shard precision=bf16"),
    Case(f"{_SMALL} sharding=no_shard precision=fp32 train.micro_batch=4"),
    Case(f"{_SMALL} model.vocab_size=1024 data.vocab_size=1024 sharding=shard_optimizer precision=bf16"),
    Case(f"{_SMALL} sharding=shard_grad_op precision=bf16_autocast activation=selective", nodes=8),
    Case(f"{_SMALL} sharding=hybrid_shard precision=fp16 activation=full accumulation=reduce_last", nodes=8),
    Case(f"{_LARGE} model.layers=8 sharding=full_shard precision=bf16 activation=selective", nodes=8),
    Case(f"{_LARGE} model.layers=8 sharding=full_shard precision=bf16 activation=full", nodes=32),
    Case(f"{_LARGE} model.layers=8 sharding=full_shard precision=bf16 activation=none", nodes=128),
    Case(f"{_LARGE} model.layers=4 sharding=shard_grad_op precision=bf16 accumulation=reduce_last", nodes=8),
    Case(f"{_LARGE} model.layers=4 sharding=hybrid_shard precision=fp16 activation=selective", nodes=32),
    Case(f"{_LARGE} model.layers=2 sharding=hybrid_shard_zero2 precision=fp32 optimizer=adam", nodes=8),
    Case(f"{_LARGE} model.layers=8 sharding=full_shard precision=bf16 activation=selective", nodes=8,
         alloc_conf="expandable_segments:True"),
    Case(f"{_LARGE} model.layers=4 sharding=full_shard precision=bf16_pure optimizer=muon activation=full"),
    Case(f"{_LARGE} model.layers=2 data.seq_len=128 sharding=no_shard precision=bf16"),
    Case("experiment=published/torchtitan_llama3_8b_8xh100", needs_gib=90),
    Case("experiment=published/torchtitan_llama3_8b_128xh100", nodes=16, needs_gib=90),
]  # fmt: skip

_TINY = "model=llama_tiny model.layers=2 data=random_tokens data.seq_len=32 train.micro_batch=2"
CPU_CASES = [
    Case(f"{_TINY} sharding=full_shard precision=bf16 activation=selective"),
    Case(f"{_TINY} sharding=hybrid_shard precision=fp16 accumulation=reduce_last accumulation.steps=2", nodes=8),
    Case(f"{_TINY} sharding=shard_grad_op precision=bf16_autocast activation=full", nodes=32),
    Case(f"{_TINY} sharding=no_shard precision=fp32 optimizer=muon", nodes=128),
]


def measure(config: Config, world_size: int, device: DeviceChoice) -> Row:
    """Runs rank 0's memory window on this process's device, as the trainer does.

    Returns:
        In bytes: `ledger_bytes` (its peak) with `breakdown`, and on CUDA `allocated_bytes`, `reserved_bytes` (peaks)
        and `before_bytes`, allocated before `build`; `alloc_retries`; `step_s`, seconds of the last step.
    """
    chosen = choose_device(device, local_rank=0, local_world_size=1)
    on_cuda = chosen.torch_device.type == "cuda"
    torch.set_float32_matmul_precision(config.precision.float32_matmul.value)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh = make_mesh(config.sharding, device_type=chosen.torch_device.type, world_size=world_size)
    steps = batches_of(config)
    before = torch.cuda.memory_allocated() if on_cuda else 0
    chosen.reset_peak_memory()
    ledger = Ledger(chosen.torch_device)
    with ledger:
        built = build(config, device=chosen.torch_device, mesh=mesh)
    ledger.watch(built.model, built.optimizers)
    began = 0.0
    while steps:
        micro_batches = steps.pop(0)
        chosen.synchronize()
        began = time.perf_counter()
        with ledger:
            ledger.begin_step(micro_batches)
            built.step(micro_batches)
        del micro_batches  # on a CPU the step's inputs are these themselves
    chosen.synchronize()
    step_s = time.perf_counter() - began
    memory, peak = chosen.memory_bytes(), ledger.peak()
    dist.destroy_process_group()
    return {
        "allocated_bytes": memory.get("allocated_peak"),
        "reserved_bytes": memory.get("reserved_peak"),
        "before_bytes": before,
        "alloc_retries": memory.get("alloc_retries"),
        "ledger_bytes": peak.bytes,
        "phase": peak.phase.value,
        "module": peak.module,
        "breakdown": peak.breakdown,
        "step_s": step_s,
    }


def planned(config: Config, cluster: ClusterConfig) -> Row:
    """The plan's peak, as `plan.json` has it, and how long it took."""
    plan = make_plan(config, cluster).to_dict()
    return {**plan["peak"], "wall_s": plan["wall_s"]}


def in_own_process(function: Callable[..., dict[str, Any]], *args: Any, environment: Mapping[str, str]) -> Row:
    """Calls a function of this file in a fresh process. Returns its result, or its `error` in one line."""
    command = [sys.executable, __file__, "--call", function.__name__]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    try:
        done = subprocess.run(
            command, input=pickle.dumps(args), env=variables, capture_output=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished within {LIMIT_SECONDS:g} s"}
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return {"error": next((line for line in reversed(lines) if "Error" in line), f"exit code {done.returncode}")}
    return json.loads(done.stdout.splitlines()[-1])


def run(cases: list[Case], device: DeviceChoice) -> list[Row]:
    """Measures the cases one after another, while others are planned; prints a line for each.

    Returns:
        For each case `case`, `world_size`, and `planned` and `measured`, which hold `error` alone where they failed.
    """
    rows = []
    configs = [case.compose() for case in cases]  # not in the threads: Hydra's state is global
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        plans = [pool.submit(plan_case, case, config, device) for case, config in zip(cases, configs, strict=True)]
        for case, config, plan in zip(cases, configs, plans, strict=True):
            environment = _allocator_environment(case)
            measured = in_own_process(measure, config, case.world_size, device, environment=environment)
            row = {"case": case.name, "world_size": case.world_size, "planned": plan.result(), "measured": measured}
            print(line(row), flush=True)
            rows.append(row)
    return rows


def plan_case(case: Case, config: Config, device: DeviceChoice) -> Row:
    """Plans a case for such devices as this machine has."""
    kind = ClusterDevice.cpu if device is DeviceChoice.cpu else ClusterDevice.auto
    given = ClusterConfig(device=kind, gpus_per_node=case.gpus_per_node, nodes=case.nodes)
    cluster = resolve(given, environ=os.environ | _allocator_environment(case))
    return in_own_process(planned, config, cluster, environment={"CUDA_VISIBLE_DEVICES": ""})


def _allocator_environment(case: Case) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": case.alloc_conf} if case.alloc_conf else {}


def line(row: Row) -> str:
    """A case in the table; sizes in GiB, errors of the plan in percent of what was measured."""
    plan, measured = row["planned"], row["measured"]
    cells = []
    for key in ("allocated_bytes", "reserved_bytes"):
        # On a CPU the ledger is what measures, and nothing is reserved.
        true = measured.get(key) or (measured.get("ledger_bytes") if key == "allocated_bytes" else None)
        guess = plan.get(key)
        cells += [_gib(guess), _gib(true), f"{100 * (guess / true - 1):+6.2f}" if guess and true else " " * 6]
    cells.append(_gib(measured.get("ledger_bytes")))
    errors = [f"{who}: {part['error']}" for who, part in (("plan", plan), ("run", measured)) if "error" in part]
    return "  ".join([*cells, row["case"], *errors])


HEAD = "   plan  alloc.       %    plan  reserv.      %  ledger  ranks, config (GiB)"


def _gib(nbytes: int | None) -> str:
    return "      -" if nbytes is None else f"{nbytes / GIB:7.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="only cases whose name has one of these")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--call", help=argparse.SUPPRESS)  # a function of this file, with what stands on standard input
    options = parser.parse_args()
    if options.call:
        print(json.dumps(globals()[options.call](*pickle.load(sys.stdin.buffer))))
        return
    device = DeviceChoice[options.device]
    cases = CPU_CASES
    if device is DeviceChoice.cuda:
        if not torch.cuda.is_available():
            sys.exit("there is no CUDA device here; --device cpu compares plan and ledger on small cases")
        memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
        cases = [case for case in GPU_CASES if case.needs_gib <= memory_gib]
    cases = [case for case in cases if not options.names or any(name in case.name for name in options.names)]
    print(HEAD)
    rows = run(cases, device)
    if device is DeviceChoice.cpu:
        if any(row["planned"].get("allocated_bytes", 0) != row["measured"].get("ledger_bytes") for row in rows):
            sys.exit("plan and ledger differ")
    elif not options.names:
        print("written to", record("plan_vs_gpu", "python bench/plan_vs_gpu.py", rows))


if __name__ == "__main__":
    main()
