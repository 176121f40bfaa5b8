"""Tokens/s and peak memory of `train.py`'s loop, telemetry on, against a plain FSDP2 loop of the same model.

    torchrun --nproc-per-node 2 bench/overhead.py    # about 5 minutes on 2 cores; writes bench/results/overhead.json
    torchrun --nproc-per-node 2 bench/overhead.py train.micro_batch=2 model.layers=2    # any overrides of the config

Both loops live in the same processes and take turns, a block of steps each, so that a slow minute of the machine falls
on both. Ours is `Trainer.fit` itself, with the counter, quality, memory and throughput, rows to metrics.jsonl and to an
offline W&B run, each 10 steps. The plain loop is what one would write by hand: the same model, units, dtype, batches,
weights, clipping and fused AdamW, the mean loss, and nothing else. A block's ratio is its speed over that of the plain
blocks before and after it.

Peak memory is that of the storages which a loop's own tensors occupy over three separate steps, from before its model
is built (`shardlab.telemetry.ledger`). The resident set of the process would not do: it holds both loops, and what a C
allocator has freed but not returned.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from record import record
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardlab.build import build
from shardlab.config import Config, parse, to_dict
from shardlab.data import Batch, batches
from shardlab.device import Device, choose_device
from shardlab.distributed import Ranks, process_group, ranks
from shardlab.interrupt import Interrupt
from shardlab.models.transformer import Transformer, rope_table
from shardlab.sharding import make_mesh
from shardlab.telemetry.ledger import Ledger
from shardlab.tracking import RunHeader, make_tracker
from shardlab.trainer import Datasets, Trainer

COMMAND = "torchrun --nproc-per-node 2 bench/overhead.py"
BLOCK = 10  # steps; a log step ends each
BLOCKS = 16
RUN = (
    f"train.steps={BLOCK * (BLOCKS + 1)}",  # the first block warms up
    f"train.log_every={BLOCK}",
    "train.eval_every=0",
    "optimizer.warmup_steps=0",
    "optimizer.decay=constant",
    "tracking.wandb.mode=offline",
    "tracking.display=none",
)


class PlainLoop:
    """A training loop as PyTorch's FSDP2 tutorial has it."""

    def __init__(self, config: Config, device: torch.device):
        self.device = device
        self.clip_norm = config.train.clip_norm or 0.0
        sizes = {key: size for key, size in config.model.items() if key not in ("_target_", "units")}
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        with torch.device("meta"):
            model = Transformer(**sizes)
        for unit in (model.tok_embeddings, *model.layers, [model.norm, model.output]):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device=device)
        model.rope = rope_table(model.max_seq_len, model.head_dim, model.rope_theta, device)  # weights are copied
        self.model = model
        arguments = {key: config.optimizer[key] for key in ("lr", "betas", "eps", "weight_decay")}
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **arguments)

    def step(self, batch: Batch) -> torch.Tensor:
        inputs = batch.inputs.to(self.device, non_blocking=True)
        labels = batch.labels.to(self.device, non_blocking=True)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class InterleavedTrainer(Trainer):
    """The trainer, which steps aside before each block."""

    step_aside: Callable[[], None]

    def _batches(self) -> Iterator[list[Batch]]:
        for step, micro_batches in enumerate(super()._batches()):
            if step % BLOCK == 0:
                self.step_aside()
            yield micro_batches


@torch.no_grad()
def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        theirs.to_local().copy_(ours.to_local())  # type: ignore[attr-defined]


def batches_of(config: Config, datasets: Datasets, place: Ranks, device: Device) -> Iterator[list[Batch]]:
    return batches(
        datasets.train,
        seed=config.seed,
        micro_batch=config.train.micro_batch,
        micro_batches=1,
        rank=place.rank,
        world_size=place.world_size,
        pin_memory=device.pin_memory,
    )


def measure_memory(config: Config, place: Ranks, device: Device) -> tuple[int, int]:
    """Peak bytes of ours and of the plain loop on this rank.

    Raises:
        RuntimeError: where the two do not compute the same losses, and so must not be compared.
    """
    steps = [next(batches_of(config, Datasets(config), place, device)) for _ in range(3)]
    mesh = make_mesh(config.sharding, device_type=device.torch_device.type, world_size=place.world_size)
    with Ledger(device.torch_device) as our_ledger:
        built = build(config, device=device.torch_device, mesh=mesh)
    with Ledger(device.torch_device) as plain_ledger:
        plain = PlainLoop(config, device.torch_device)
    copy_weights(built.model, plain.model)
    for step in steps:
        with our_ledger:
            output = built.step(step)
        with plain_ledger:
            loss = plain.step(step[0])
        if not torch.allclose(output.loss_sum / output.valid, loss, rtol=1e-4):
            raise RuntimeError(f"the loops differ: losses {output.loss_sum / output.valid} and {loss}")
        del output, loss  # of either, nothing counts in the next step
    return our_ledger.peak().bytes, plain_ledger.peak().bytes


def measure_speed(config: Config, place: Ranks, device: Device) -> tuple[list[float], list[float]]:
    """Seconds of each of our blocks, and of the plain blocks before, between and after them."""
    datasets = Datasets(config)
    mesh = make_mesh(config.sharding, device_type=device.torch_device.type, world_size=place.world_size)
    built = build(config, device=device.torch_device, mesh=mesh)
    plain = PlainLoop(config, device.torch_device)
    copy_weights(built.model, plain.model)
    source = batches_of(config, datasets, place, device)
    ours, theirs = [], []

    def now() -> float:
        """The time when all ranks have arrived, with their devices at rest."""
        device.synchronize()
        dist.barrier()
        return time.perf_counter()

    def plain_block() -> None:
        began = now()
        for _ in range(BLOCK):
            plain.step(next(source)[0])
        theirs.append(now() - began)

    def step_aside() -> None:
        nonlocal began
        if began is not None:
            ours.append(now() - began)
        plain_block()
        began = now()

    began: float | None = None
    with tempfile.TemporaryDirectory() as folder:
        tracker = make_tracker(config.tracking, Path(folder), config=to_dict(config), tags=[], rank=place.rank)
        tracker.start(RunHeader(rows=[], total_steps=config.train.steps))
        trainer = InterleavedTrainer(
            config,
            built=built,
            ledger=Ledger(device.torch_device),
            datasets=datasets,
            device=device,
            place=place,
            tracker=tracker,
            interrupt=Interrupt(),
        )
        trainer.step_aside = step_aside
        trainer.fit()
        step_aside()
        tracker.finish({"status": "completed"}, table=[])
    return ours[1:], theirs[1:]  # without the blocks that warm up


def main() -> None:
    place = ranks()
    with initialize_config_dir(str(Path(__file__).parent.parent / "conf"), version_base="1.3"):
        composed = compose("config", overrides=[*RUN, *sys.argv[1:]])
    config = parse(composed, world_size=place.world_size, nodes=place.nodes)
    device = choose_device(config.device, local_rank=place.local_rank, local_world_size=place.local_world_size)
    with process_group(place, device):
        our_peak, plain_peak = measure_memory(config, place, device)
        ours, plain = measure_speed(config, place, device)
    if not place.is_first:
        return
    ratios = [(before + after) / 2 / block for before, block, after in zip(plain, ours, plain[1:], strict=False)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    tokens = BLOCK * (config.train.global_batch or 0) * config.data["seq_len"]
    results = {
        "ratio": {"median": median, "quartiles": [lower, upper], "min": min(ratios), "max": max(ratios)},
        "tokens_per_s": {"ours": tokens / statistics.median(ours), "plain": tokens / statistics.median(plain)},
        "peak_bytes": {"ours": our_peak, "plain": plain_peak},
        "blocks": len(ratios),
        "block_steps": BLOCK,
        "world_size": place.world_size,
    }
    print(
        f"tokens/s, ours over plain: median {median:.4f}, quartiles {lower:.4f} to {upper:.4f}, "
        f"range {min(ratios):.4f} to {max(ratios):.4f} ({len(ratios)} blocks of {BLOCK} steps)"
    )
    speeds = results["tokens_per_s"]
    print(f"tokens/s: ours {speeds['ours']:,.0f}, plain {speeds['plain']:,.0f}")
    print(f"peak memory of rank 0: ours {our_peak / 2**20:.2f} MiB, plain {plain_peak / 2**20:.2f} MiB")
    print("written to", record("overhead", " ".join([COMMAND, *sys.argv[1:]]), results))


if __name__ == "__main__":
    main()
