"""Changes of a run that may save memory, as overrides on its command line; what they save is planned, not guessed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from shardlab.config import ActivationPolicy, Config, Dtype, Reduce, Strategy
from shardlab.planner.cluster import ClusterConfig, ClusterDevice
from shardlab.planner.plan import Plan, PlannedPeak

# Strategies that shard more, those that shard most first.
SHARDS_MORE = {
    Strategy.no_shard: ("full_shard", "shard_grad_op", "shard_optimizer"),
    Strategy.shard_optimizer: ("full_shard", "shard_grad_op"),
    Strategy.shard_grad_op: ("full_shard",),
    Strategy.hybrid_shard_zero2: ("full_shard", "hybrid_shard"),
    Strategy.hybrid_shard: ("full_shard",),
    Strategy.full_shard: (),
}
STATES = ("parameters", "gradients", "optimizer")
GATHERED = ("unsharded_parameters", "unsharded_gradients", "communication")
FRAGMENTATION = "fragmentation"  # reserved, and not allocated
# What a group's choice decides, and so replaces where the user has set it: keys, or the beginnings of keys.
DECIDES = {"activation": "activation.policy", "sharding": "sharding.strategy", "precision": "precision."}


@dataclass(frozen=True)
class Candidate:
    """A change that may save memory."""

    overrides: tuple[str, ...]
    # What share of each part of the peak it may save. That decides which candidates are planned first, no more.
    relieves: Mapping[str, float] = field(default_factory=dict)
    note: str = ""  # what it changes besides

    def expected_bytes(self, breakdown: Mapping[str, int], fragmentation_bytes: int) -> float:
        """What it may save, roughly, of a peak that consists of this."""
        parts = {**breakdown, FRAGMENTATION: fragmentation_bytes}
        return sum(share * parts.get(part, 0) for part, share in self.relieves.items())


@dataclass(frozen=True)
class Change:
    """A candidate that was planned; sizes in bytes."""

    overrides: tuple[str, ...]
    allocated_bytes: int
    reserved_bytes: int | None
    fits: bool | None
    saves_bytes: int  # of what must be there: reserved memory, allocated memory on a CPU
    note: str


def change_of(candidate: Candidate, peak: PlannedPeak, base: Plan) -> Change:
    """What a candidate comes to with this peak, beside the plan without it."""
    return Change(
        candidate.overrides,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        fits=None if base.capacity_bytes is None else peak.needed_bytes <= base.capacity_bytes,
        saves_bytes=base.peak.needed_bytes - peak.needed_bytes,
        note=candidate.note,
    )


def composed_with(*changes: Sequence[str]) -> DictConfig:
    """Composes the config of the running Hydra job anew, with changes on its command line.

    Args:
        *changes: overrides, in groups that are applied one after another.
    """
    hydra = HydraConfig.get()
    overrides: list[str] = list(hydra.overrides.task)
    for change in changes:
        overrides = apply(overrides, change)
    return compose(hydra.job.config_name, overrides=overrides)


def apply(overrides: Sequence[str], change: Sequence[str]) -> list[str]:
    """Overrides with a change added, and without what it replaces.

    Args:
        overrides: as on the command line.
        change: more of them, which contradict the others perhaps.
    """
    replaced = [_key(override) for override in change]
    decided = tuple(DECIDES[key] for key in replaced if key in DECIDES)
    kept = [o for o in overrides if _key(o) not in replaced and not (decided and _key(o).startswith(decided))]
    return [*kept, *change]


def _key(override: str) -> str:
    return override.split("=")[0].lstrip("+~")


def candidates(
    config: Config, cluster: ClusterConfig, *, composed: DictConfig, groups: Mapping[str, Any]
) -> list[Candidate]:
    """Changes that apply to a run and keep what it trains; those that are worth most as a rule first.

    Args:
        config: as `config.parse` returned it.
        cluster: resolved.
        composed: the config before that: what the user left open, and what not.
        groups: config groups that the run was composed of; others have no choices to name.
    """
    found = [
        *_of_activations(config, composed),
        *_of_sharding(config, cluster, composed),
        *_of_precision(config),
        *_of_cluster(config, cluster, composed),
    ]
    return [
        candidate
        for candidate in found
        if all("." in (key := _key(override)) or key in groups for override in candidate.overrides)
    ]


def _of_activations(config: Config, composed: DictConfig) -> Iterator[Candidate]:
    train, policy = config.train, config.activation.policy
    if policy is not ActivationPolicy.full:
        yield Candidate(("activation=full",), {"activations": 0.8}, "computes blocks twice")
    if train.micro_batch > 1:
        parts = next(n for n in range(2, train.micro_batch + 1) if train.micro_batch % n == 0)
        halved = [f"train.micro_batch={train.micro_batch // parts}", f"train.global_batch={train.global_batch}"]
        if composed.accumulation.steps is not None:
            halved.append("accumulation.steps=null")
        yield Candidate(tuple(halved), {"activations": 1 - 1 / parts, "inputs": 1 - 1 / parts})
    if policy is ActivationPolicy.none:
        yield Candidate(("activation=selective",), {"activations": 0.5}, "computes part of the blocks twice")
    if config.accumulation.reduce is Reduce.last and (config.accumulation.steps or 1) > 1:
        yield Candidate(("accumulation.reduce=every",), {"unsharded_gradients": 1.0}, "reduces each micro-batch")


def _of_sharding(config: Config, cluster: ClusterConfig, composed: DictConfig) -> Iterator[Candidate]:
    sharding = config.sharding
    if cluster.world_size > 1:
        for strategy in SHARDS_MORE[sharding.strategy]:
            overrides = [f"sharding={strategy}"]
            if strategy == "full_shard" and composed.sharding.replicas != "auto":
                overrides.append("sharding.replicas=auto")  # has no replicas
            yield Candidate(tuple(overrides), dict.fromkeys(GATHERED, 0.8) | dict.fromkeys(STATES, 0.8))
    if sharding.reshard_after_forward not in (None, True):
        yield Candidate(("sharding.reshard_after_forward=true",), {"unsharded_parameters": 0.8})
    if sharding.units is not None and config.model.get("units") and sharding.units != config.model["units"]:
        yield Candidate(("sharding.units=null",), dict.fromkeys(GATHERED, 0.5), "model.units instead")
    if cluster.device is ClusterDevice.cuda and not sharding.cpu_offload and not config.precision.grad_scaler:
        yield Candidate(("sharding.cpu_offload=true",), dict.fromkeys(STATES, 1.0), "states in host memory")


def _of_precision(config: Config) -> Iterator[Candidate]:
    precision = config.precision
    if precision.param_dtype in (None, Dtype.float32) and precision.storage_dtype is Dtype.float32:
        yield Candidate(("precision=bf16",), dict.fromkeys(("activations", *GATHERED), 0.4), "changes numerics")
    elif precision.storage_dtype is Dtype.float32:
        yield Candidate(("precision=bf16_pure",), dict.fromkeys((*STATES, *GATHERED), 0.4), "changes numerics")


def _of_cluster(config: Config, cluster: ClusterConfig, composed: DictConfig) -> Iterator[Candidate]:
    shards_over_all = config.sharding.strategy in (
        Strategy.full_shard,
        Strategy.shard_grad_op,
        Strategy.shard_optimizer,
    )
    batch, steps = composed.train.global_batch, config.accumulation.steps or 1
    if shards_over_all and (batch is None or (composed.accumulation.steps is None and steps % 2 == 0)):
        note = f"global batch {2 * (config.train.global_batch or 0)}" if batch is None else "half the micro-batches"
        yield Candidate((f"cluster.nodes={2 * (cluster.nodes or 1)}",), dict.fromkeys(STATES, 0.5), note)
    if cluster.device is ClusterDevice.cuda and not cluster.allocator_settings.expandable_segments:
        settings = ",".join(part for part in (cluster.alloc_conf, "expandable_segments:True") if part)
        value = f"'{settings}'" if "," in settings else settings
        yield Candidate((f"cluster.alloc_conf={value}",), {FRAGMENTATION: 0.8})
