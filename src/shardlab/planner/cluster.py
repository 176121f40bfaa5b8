"""What a plan is for: which devices, how many of them, and how much memory each has. Schema of `conf/cluster`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

import torch

from shardlab.errors import ConfigError
from shardlab.planner.allocator_settings import AllocatorSettings

GIB = 1 << 30
CPU_RANKS = 2  # where neither the config nor torchrun says how many: the fewest that shard anything


class ClusterDevice(Enum):
    auto = "auto"  # CUDA where this machine has a device, else the CPU
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class ClusterConfig:
    """Equal nodes with equal devices; one rank uses one device.

    `set_aside_gib` is what a process holds on its device outside of PyTorch's allocator:

    - the CUDA context and loaded kernels: 0.41 to 0.49 GiB on L40S, RTX 4090, A100 (what `process has ... in use`
      exceeds allocated and cached memory by in Step-Video-T2V#8, torchchat#1341, CoSeR#10), 0.5 on H200 and 0.7 on B200
      (stas00/ml-engineering, debug/pytorch.md);
    - NCCL's buffers, for each communicator: 688 MB on A100 with NVLink (NVIDIA/nccl#964). They grow with the number of
      channels, and not beyond two nodes (NVIDIA/nccl#986). Both together, on 8 H100 before any all-to-all: 1.06 GB
      (NVIDIA/nccl#1685); on 4 A100 in training: 1.43 GiB (Vad-R1#11); on 8 RTX 4090: at most 0.6 (torchtune#2071).
      NVIDIA's own nccl-tests leave 1 GB free for it (NVIDIA/nccl-tests#198).

    full_shard and shard_grad_op need one communicator; hybrid strategies two or three (shard group, replicas, all
    ranks).
    """

    name: str | None = None
    device: ClusterDevice = ClusterDevice.auto
    gpus_per_node: int | None = None
    nodes: int | None = None
    memory_gib: float | None = None
    set_aside_gib: float = 1.5
    capability: list[int] | None = None
    alloc_conf: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks, of a resolved cluster."""
        assert self.gpus_per_node is not None and self.nodes is not None
        return self.gpus_per_node * self.nodes

    @property
    def device_bytes(self) -> int | None:
        """What one device can give to PyTorch's allocator; None where no capacity is known."""
        if self.memory_gib is None:
            return None
        return int((self.memory_gib - self.set_aside_gib) * GIB)

    @property
    def usable_bytes(self) -> int | None:
        """What PyTorch's allocator can reserve: less than the device has, where `alloc_conf` sets a fraction."""
        if self.device_bytes is None:
            return None
        return round(self.device_bytes * min(1.0, self.allocator_settings.per_process_memory_fraction))

    @property
    def allocator_settings(self) -> AllocatorSettings:
        return AllocatorSettings.parse(self.alloc_conf)


def resolve(
    cluster: ClusterConfig, *, environ: Mapping[str, str] = os.environ, allow_cuda: bool = True
) -> ClusterConfig:
    """Fills in what a cluster leaves open, and checks it.

    `device=auto` becomes what this machine has: its CUDA devices, as the smallest of them reports itself, with the
    allocator settings of the environment, or else the CPU. Keys that are set stay as they are. Numbers of ranks and
    nodes that are not set are those that torchrun started; without it, one node with all devices (on a CPU, two ranks).

    Args:
        cluster: as composed.
        environ: environment variables, for torchrun's and PyTorch's.
        allow_cuda: False where the run is set to the CPU; `device=auto` is then the CPU on any machine.

    Returns:
        The cluster with `device`, `gpus_per_node` and `nodes` set, and for CUDA also `memory_gib` and `capability`.

    Raises:
        ConfigError: for values out of range, or missing for CUDA.
    """
    if cluster.device is ClusterDevice.auto:
        use_cuda = allow_cuda and torch.cuda.device_count() > 0
        cluster = _cuda_at_hand(cluster, environ) if use_cuda else _cpu_at_hand(cluster)
    started = int(environ.get("WORLD_SIZE") or 0)
    started_per_node = int(environ.get("LOCAL_WORLD_SIZE") or started)
    if cluster.gpus_per_node is None and cluster.device is ClusterDevice.cpu:
        cluster = replace(cluster, gpus_per_node=started_per_node or CPU_RANKS)
    if cluster.nodes is None:
        cluster = replace(cluster, nodes=max(1, started // started_per_node) if started_per_node else 1)
    _check(cluster)
    return cluster


def _cuda_at_hand(cluster: ClusterConfig, environ: Mapping[str, str]) -> ClusterConfig:
    ranks = int(environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE") or torch.cuda.device_count())
    # Reading properties makes no CUDA context, which would take memory from the run (unsloth-zoo#1053).
    devices = [_device(torch.cuda.get_device_properties, i) for i in range(min(ranks, torch.cuda.device_count()))]
    least = min(devices, key=lambda device: device.total_memory)
    # The order in which AllocatorSettings.from_env, and so PyTorch, looks.
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return replace(
        cluster,
        device=ClusterDevice.cuda,
        name=cluster.name or least.name,
        gpus_per_node=ranks if cluster.gpus_per_node is None else cluster.gpus_per_node,
        memory_gib=least.total_memory / GIB if cluster.memory_gib is None else cluster.memory_gib,
        capability=cluster.capability or [least.major, least.minor],
        alloc_conf=cluster.alloc_conf or next((environ[name] for name in names if name in environ), ""),
    )


@cache
def _device(read: Callable[[int], Any], index: int) -> Any:
    """What a device reports, read once: a process that is forked after that cannot ask CUDA, and need not."""
    return read(index)


def _cpu_at_hand(cluster: ClusterConfig) -> ClusterConfig:
    return replace(cluster, device=ClusterDevice.cpu, name=cluster.name or "CPU", set_aside_gib=0.0)


def _check(cluster: ClusterConfig) -> None:
    if cluster.device is ClusterDevice.cuda:
        for key, example in {"gpus_per_node": "8", "memory_gib": "79.1", "capability": "[9,0]"}.items():
            if getattr(cluster, key) is None:
                raise ConfigError(
                    f"cluster.{key}=null, but cluster.device=cuda needs it: set it, e.g. cluster.{key}={example}, or "
                    "choose a cluster that has it"
                )
    for key in ("gpus_per_node", "nodes"):
        if getattr(cluster, key) < 1:
            raise ConfigError(f"cluster.{key}={getattr(cluster, key)} must be at least 1")
    if cluster.memory_gib is not None and cluster.memory_gib <= 0:
        raise ConfigError(f"cluster.memory_gib={cluster.memory_gib} must be positive, or null where it is not known")
    if cluster.set_aside_gib < 0:
        raise ConfigError(f"cluster.set_aside_gib={cluster.set_aside_gib} must not be negative")
    if cluster.memory_gib is not None and cluster.set_aside_gib >= cluster.memory_gib:
        raise ConfigError(
            f"cluster.set_aside_gib={cluster.set_aside_gib} leaves nothing of cluster.memory_gib={cluster.memory_gib}: "
            "one of them is wrong"
        )
    if cluster.capability is not None and (len(cluster.capability) != 2 or min(cluster.capability) < 0):
        raise ConfigError(f"cluster.capability={cluster.capability} must be two numbers, major and minor: e.g. [9,0]")
    try:
        _ = cluster.allocator_settings
    except ValueError as error:
        raise ConfigError(f"cluster.alloc_conf={cluster.alloc_conf}: {error}") from None
