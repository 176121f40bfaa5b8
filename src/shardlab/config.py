"""The schema of every config group, and the checks that span groups.

Hydra composes YAML files of `conf/` over these dataclasses, so a misspelt key or a wrong type ends the run before it
begins. `model`, `data` and `optimizer` stay open: their keys are the arguments of whatever `_target_` names.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from shardlab.errors import ConfigError
from shardlab.planner.cluster import ClusterConfig
from shardlab.tracking.config import TrackingConfig


class Mode(Enum):
    train = "train"
    plan = "plan"  # predict peak memory, on any machine


class DeviceChoice(Enum):
    auto = "auto"  # CUDA where there is a device, else the CPU
    cpu = "cpu"
    cuda = "cuda"


class Strategy(Enum):
    """Where parameters, gradients and optimizer state are sharded (names from FSDP1's `ShardingStrategy`)."""

    full_shard = "full_shard"  # ZeRO-3
    shard_grad_op = "shard_grad_op"  # ZeRO-2
    hybrid_shard = "hybrid_shard"  # ZeRO-3 within a group, replicated across groups
    hybrid_shard_zero2 = "hybrid_shard_zero2"
    no_shard = "no_shard"  # as DDP
    shard_optimizer = "shard_optimizer"  # ZeRO-1

    @property
    def is_hybrid(self) -> bool:
        return self in (Strategy.hybrid_shard, Strategy.hybrid_shard_zero2)

    @property
    def replicates(self) -> bool:
        """Whether each rank holds all parameters: a mesh of shape (N, 1)."""
        return self in (Strategy.no_shard, Strategy.shard_optimizer)

    @property
    def reshards(self) -> bool:
        """Whether parameters are resharded after forward, unless `sharding.reshard_after_forward` says otherwise.

        On a mesh of shape (N, 1) that costs no communication: FSDP2 frees its local copy of the parameters and makes it
        anew, so that one unit's copy is alive at a time instead of all of them.
        """
        return self not in (Strategy.shard_grad_op, Strategy.hybrid_shard_zero2)


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        return getattr(torch, self.value)


class Reduce(Enum):
    every = "every"  # gradients are reduced after each micro-batch
    last = "last"  # only after the last one; until then each rank holds unsharded gradients


class ActivationPolicy(Enum):
    none = "none"
    full = "full"
    selective = "selective"


class Float32Matmul(Enum):
    highest = "highest"  # fp32 throughout
    high = "high"  # TF32 on GPUs that have it


@dataclass
class TrainConfig:
    steps: int = 100
    micro_batch: int = 8
    global_batch: int | None = None
    log_every: int | None = 10
    eval_every: int | None = None
    eval_samples: int | None = None
    clip_norm: float | None = 1.0


@dataclass
class ShardingConfig:
    strategy: Strategy = MISSING
    units: list[Any] | None = None
    reshard_after_forward: bool | int | None = None
    reshard_last_unit: bool | None = None
    reshard_root: bool | None = None
    replicas: int | str = "auto"
    cpu_offload: bool = False


@dataclass
class PrecisionConfig:
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    autocast: Dtype | None = None
    grad_scaler: bool = False
    init_scale: float = 65536.0
    growth_interval: int = 2000
    storage_dtype: Dtype = Dtype.float32
    float32_matmul: Float32Matmul = Float32Matmul.highest


@dataclass
class AccumulationConfig:
    steps: int | None = None
    default_steps: int = 1
    reduce: Reduce = Reduce.every


@dataclass
class ActivationConfig:
    policy: ActivationPolicy = ActivationPolicy.none
    blocks: list[str] | None = None
    save: list[str] = field(default_factory=list)
    save_every_second: list[str] = field(default_factory=list)


class Fit(Enum):
    micro_batch = "micro_batch"  # train.micro_batch
    seq_len = "seq_len"  # data.seq_len


@dataclass
class PlanConfig:
    before_train: bool = True
    fit: Fit | None = None
    changes: int | None = None
    timeline: bool | None = None
    repeat: bool = True


class Order(Enum):
    given = "given"
    predicted = "predicted"  # what is predicted to take least memory first


@dataclass
class SweepConfig:
    resume: str | None = None
    skip_predicted_oom: bool = False
    order: Order = Order.given
    objectives: list[str] = field(default_factory=list)


@dataclass
class Config:
    mode: Mode = Mode.train
    seed: int = 0
    device: DeviceChoice = DeviceChoice.auto
    train: TrainConfig = field(default_factory=TrainConfig)
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: dict[str, Any] = MISSING
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


_SCHEMA = OmegaConf.structured(Config)
ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver("first_of", lambda *values: next((value for value in values if value), None))


def typed(cfg: DictConfig) -> DictConfig:
    """The config over the schema, which a run's own `config.yaml` is composed without."""
    if isinstance(cfg.mode, Mode):
        return cfg
    merged = OmegaConf.merge(_SCHEMA, cfg)
    assert isinstance(merged, DictConfig)
    return merged


def parse(cfg: DictConfig, *, world_size: int, nodes: int) -> Config:
    """Turns a composed config into dataclasses, fills in what follows from the world size, and checks it.

    Args:
        cfg: what Hydra composed over the schema.
        world_size: number of ranks.
        nodes: number of machines that they run on.

    Returns:
        The config with `train.global_batch`, `accumulation.steps` and (for hybrid strategies) `sharding.replicas` set.

    Raises:
        ConfigError: for settings that are out of range or contradict each other.
    """
    # Over the schema once more: Hydra lets `+key=value` add what it lacks, and a run's config.yaml is composed without.
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    config: Config = OmegaConf.to_object(OmegaConf.merge(_SCHEMA, plain))  # type: ignore
    _check_ranges(config)
    _check_precision(config)
    return replace(
        config,
        sharding=_resolve_sharding(config.sharding, world_size=world_size, nodes=nodes),
        **_resolve_batch(config, world_size),
    )


def check_offload(config: Config, *, on_cpu: bool) -> None:
    """Raises ConfigError where `sharding.cpu_offload` has nowhere to offload from."""
    if config.sharding.cpu_offload and on_cpu:
        raise ConfigError(
            "sharding.cpu_offload=true on a CPU run offloads nothing: set it to false, or run on CUDA devices"
        )


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain nested dicts, lists and strings, as it is written to `config.yaml`."""
    container = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _check_ranges(config: Config) -> None:
    train, precision = config.train, config.precision
    at_least_one = {
        "train.steps": train.steps,
        "train.micro_batch": train.micro_batch,
        "train.global_batch": train.global_batch,
        "train.eval_samples": train.eval_samples,
        "accumulation.steps": config.accumulation.steps,
        "accumulation.default_steps": config.accumulation.default_steps,
        "precision.growth_interval": precision.growth_interval,
    }
    for key, count in at_least_one.items():
        if count is not None and count < 1:
            raise ConfigError(f"{key}={count} must be at least 1")
    for key, every in {"train.log_every": train.log_every, "train.eval_every": train.eval_every}.items():
        if every is not None and every < 0:
            raise ConfigError(f"{key}={every} must be a number of steps, or 0 or null for never")
    if config.plan.changes is not None and config.plan.changes < 0:
        raise ConfigError(f"plan.changes={config.plan.changes} must be a number of changes to show, or 0 for none")
    if train.clip_norm is not None and train.clip_norm < 0:
        raise ConfigError(f"train.clip_norm={train.clip_norm} must be positive, or 0 or null for no clipping")
    if precision.init_scale <= 0:
        raise ConfigError(f"precision.init_scale={precision.init_scale} must be positive")


def _check_precision(config: Config) -> None:
    precision = config.precision
    if precision.autocast and precision.param_dtype:
        raise ConfigError(
            f"precision.autocast={precision.autocast.name} and precision.param_dtype={precision.param_dtype.name} both "
            "choose the compute dtype: set one of them to null"
        )
    if precision.autocast is Dtype.float32:
        raise ConfigError("precision.autocast=float32 casts nothing: use bfloat16, float16 or null")
    if precision.storage_dtype is Dtype.float16:
        raise ConfigError(
            "precision.storage_dtype=float16 loses small updates and cannot be unscaled: use float32 or bfloat16"
        )
    if precision.grad_scaler:
        if Dtype.float16 not in (precision.param_dtype, precision.autocast):
            raise ConfigError(
                "precision.grad_scaler=true scales fp16 gradients, but nothing computes in fp16: set it to false, or "
                "choose precision=fp16 or precision=fp16_autocast"
            )
        if not config.optimizer.get("fused"):
            raise ConfigError(
                f"optimizer._target_={config.optimizer.get('_target_')} without optimizer.fused=true cannot skip a "
                "step "
                "after an fp16 overflow without waiting for the device: use optimizer=adamw or adam with "
                "optimizer.fused=true, or precision=bf16"
            )
        if config.sharding.cpu_offload:
            raise ConfigError(
                "precision.grad_scaler=true with sharding.cpu_offload=true would wait for the device at each step: use "
                "precision=bf16, or sharding.cpu_offload=false"
            )


def _resolve_batch(config: Config, world_size: int) -> dict[str, Any]:
    """Makes train.global_batch = train.micro_batch x accumulation.steps x ranks hold."""
    train, accumulation = config.train, config.accumulation
    per_pass = train.micro_batch * world_size  # samples that all ranks take in one forward pass
    if train.global_batch is None:
        steps = accumulation.steps or accumulation.default_steps
    elif train.global_batch % per_pass:
        raise ConfigError(
            f"train.global_batch={train.global_batch} is no multiple of train.micro_batch={train.micro_batch} x "
            f"{world_size} ranks = {per_pass}: change one of them"
        )
    else:
        steps = train.global_batch // per_pass
        if accumulation.steps not in (None, steps):
            raise ConfigError(
                f"accumulation.steps={accumulation.steps} contradicts train.global_batch={train.global_batch}, which "
                "needs "
                f"{steps} with train.micro_batch={train.micro_batch} on {world_size} ranks: leave one of them null"
            )
    return {
        "train": replace(train, global_batch=steps * per_pass),
        "accumulation": replace(accumulation, steps=steps),
    }


def _resolve_sharding(sharding: ShardingConfig, *, world_size: int, nodes: int) -> ShardingConfig:
    replicas = sharding.replicas
    if isinstance(replicas, str) and replicas != "auto":
        raise ConfigError(f"sharding.replicas={replicas} must be a number of replica groups or auto")
    if not sharding.strategy.is_hybrid:
        if replicas != "auto":
            raise ConfigError(
                f"sharding.replicas={replicas} means nothing for sharding.strategy={sharding.strategy.name}: leave "
                "it at "
                "auto, or use hybrid_shard"
            )
        shard_size = 1 if sharding.strategy.replicates else world_size
    else:
        replicas = nodes if replicas == "auto" else int(replicas)
        if replicas < 1 or world_size % replicas:
            raise ConfigError(
                f"sharding.replicas={replicas} does not divide the {world_size} ranks: use one of "
                f"{[n for n in range(1, world_size + 1) if world_size % n == 0]}"
            )
        shard_size = world_size // replicas
    partial = sharding.reshard_after_forward
    if isinstance(partial, int) and not isinstance(partial, bool) and (partial < 1 or shard_size % partial):
        raise ConfigError(
            f"sharding.reshard_after_forward={partial} does not divide the {shard_size} ranks that share a copy of the "
            f"parameters: use true, false or one of {[n for n in range(1, shard_size + 1) if shard_size % n == 0]}"
        )
    return replace(sharding, replicas=replicas)
