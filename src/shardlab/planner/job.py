"""`mode=plan`: plans the run that a config describes, shows the plan, and writes `plan.json`."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from shardlab.config import Config, check_offload, parse
from shardlab.errors import ConfigError
from shardlab.planner.cluster import ClusterConfig, ClusterDevice, resolve
from shardlab.planner.plan import Plan, make_plan
from shardlab.run_folder import RunFolder, Status
from shardlab.tracking import format_gib


def plan(cfg: DictConfig, *, folder: RunFolder, choices: Mapping[str, str]) -> dict[str, Any]:
    """Plans rank 0 of a run.

    Args:
        cfg: what Hydra composed over the schema; its `cluster` says for how many ranks, and of what kind.
        folder: of this job.
        choices: the name of the choice for each config group.

    Returns:
        The summary, as in `summary.json`.

    Raises:
        ConfigError: for a mistake in the config.
    """
    given: ClusterConfig = OmegaConf.to_object(cfg.cluster)  # type: ignore[assignment]
    cluster = resolve(given, allow_cuda=cfg.device.name != "cpu")
    config = parse(cfg, world_size=cluster.world_size, nodes=cluster.nodes or 1)
    check_offload(config, on_cpu=cluster.device is ClusterDevice.cpu)
    if config.precision.autocast and cluster.device is not ClusterDevice.cpu:
        # The simulated device has no lists of which operators autocast casts: its plan would be one in fp32.
        raise ConfigError(
            f"precision.autocast={config.precision.autocast.name} cannot be planned for GPUs: plan it for cluster=cpu, "
            "or use precision=bf16 or fp16"
        )
    folder.check_unused()
    folder.write_config(config)
    print(f"  planning for {cluster.world_size} x {cluster.name or cluster.device.name} ...", flush=True)
    made = make_plan(config, cluster)
    (folder.path / "plan.json").write_text(json.dumps(made.to_dict(), indent=2) + "\n")
    summary = {
        "status": Status.completed.value,
        "error": None,
        "world_size": made.world_size,
        "plan": {
            "allocated_peak_bytes": made.peak.allocated_bytes,
            "reserved_peak_bytes": made.peak.reserved_bytes,
            "fits": made.fits,
        },
    }
    folder.write_summary(summary)
    _show(made, config, cluster, choices, str(folder.path / "plan.json"))
    return summary


def _show(made: Plan, config: Config, cluster: ClusterConfig, choices: Mapping[str, str], file: str) -> None:
    peak, ranks = made.peak, f"{made.world_size} x {cluster.name or cluster.device.name}"
    if made.capacity_bytes is None or made.headroom_bytes is None:
        verdict = f"{format_gib(peak.needed_bytes)} on each of {ranks}"
    else:
        fits = f"fits, with {format_gib(made.headroom_bytes)} to spare"
        lacks = f"does not fit: {format_gib(-made.headroom_bytes)} too much"
        of = f"{format_gib(peak.needed_bytes)} of {format_gib(made.capacity_bytes)} on each of {ranks}"
        verdict = f"{fits if made.fits else lacks} ({of})"
    where = f"in {peak.phase}" + (f" of {peak.module}" if peak.module else "")
    groups = ("model", "sharding", "precision", "optimizer", "activation")
    train, steps = config.train, config.accumulation.steps
    seq_len = config.data.get("seq_len")
    rows = [
        ("plan", verdict),
        *((group, choices[group]) for group in groups if choices.get(group)),
        (
            "batch",
            f"{train.micro_batch} samples x {steps} micro-batches x {made.world_size} ranks = {train.global_batch}"
            + (f", {seq_len} tokens each" if seq_len else ""),
        ),
        ("peak allocated", f"{format_gib(peak.allocated_bytes)}, {where}"),
    ]
    if peak.reserved_bytes is not None:
        rows.append(("peak reserved", format_gib(peak.reserved_bytes)))
    rows += [(f"  {name.replace('_', ' ')}", format_gib(nbytes)) for name, nbytes in peak.breakdown.items() if nbytes]
    if made.host_peak_bytes > 1 << 20:
        rows.append(("host memory", format_gib(made.host_peak_bytes)))
    rows += [
        (name.removesuffix("_bytes").replace("_", "-"), f"{format_gib(nbytes)} per rank and step")
        for name, nbytes in made.comm.items()
        if nbytes
    ]
    rows += [("planned in", f"{made.wall_s:.1f} s"), ("file", file)]
    width = max(len(label) for label, _ in rows)
    sys.stdout.write("".join(f"  {label.ljust(width)}  {text}\n" for label, text in rows))
