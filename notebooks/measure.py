"""Trains several configs one after another on the CPU ranks of one process group, and writes what each came to.

    torchrun --nproc-per-node 2 notebooks/measure.py jobs.json results.json

`jobs.json` maps names to lists of overrides, as on train.py's command line. It measures with train.py's own trainer;
but train.py starts new processes for each run, which takes longer than such small runs themselves.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from shardlab.build import build
from shardlab.config import Config, parse
from shardlab.device import Cpu
from shardlab.distributed import process_group, ranks
from shardlab.interrupt import Interrupt
from shardlab.sharding import make_mesh
from shardlab.telemetry import Ledger
from shardlab.tracking import Tracker
from shardlab.trainer import Datasets, Trainer, largest_over_ranks

CONF = Path(__file__).parent.parent / "conf"
DEVICE = Cpu(torch.device("cpu"))


def config_of(overrides: Sequence[str], *, world_size: int) -> Config:
    """The config that overrides give on so many ranks."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[*overrides, "plan.before_train=false"])
    return parse(cfg, world_size=world_size, nodes=1)


def train(config: Config) -> dict[str, Any]:
    """Trains; returns what `summary.json` would say, and the dtypes that parameters are kept in."""
    place = ranks()
    mesh = make_mesh(config.sharding, device_type="cpu", world_size=place.world_size)
    ledger = Ledger(DEVICE.torch_device)
    with ledger:
        built = build(config, device=DEVICE.torch_device, mesh=mesh)
    trainer = Trainer(
        config,
        built=built,
        ledger=ledger,
        datasets=Datasets(config),
        device=DEVICE,
        place=place,
        tracker=Tracker(Path()),  # tells nobody
        interrupt=Interrupt(),
    )
    trainer.fit()
    figures = trainer.figures()
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in built.model.parameters()})
    return {**figures, "memory": largest_over_ranks(figures["memory"]), "dtypes": dtypes}


if __name__ == "__main__":
    jobs, results = map(Path, sys.argv[1:])
    with process_group(ranks(), DEVICE):
        found = {
            name: train(config_of(overrides, world_size=ranks().world_size))
            for name, overrides in json.loads(jobs.read_text()).items()
        }
        if ranks().is_first:
            results.write_text(json.dumps(found, indent=2) + "\n")
