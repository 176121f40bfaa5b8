"""What differs between a CPU and a CUDA device, in one place."""

import resource
import sys
from dataclasses import dataclass

import torch

from shardlab.config import DeviceChoice
from shardlab.errors import ConfigError

# Dense peak of matrix products in FLOP/s, without sparsity, by a part of the device's name, the longest match first.
# From NVIDIA's datasheets: A100 (SXM and PCIe alike), H100 SXM, PCIe and NVL, H200, B200 (HGX), L40S, RTX 4090 (Ada
# whitepaper, with fp32 accumulation).
_PEAK_FLOPS = {
    "H100 NVL": {torch.bfloat16: 835e12, torch.float16: 835e12, "tf32": 417e12, torch.float32: 60e12},
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float16: 756e12, "tf32": 378e12, torch.float32: 51e12},
    "H100": {torch.bfloat16: 989e12, torch.float16: 989e12, "tf32": 494e12, torch.float32: 67e12},
    "H200": {torch.bfloat16: 989e12, torch.float16: 989e12, "tf32": 494e12, torch.float32: 67e12},
    "B200": {torch.bfloat16: 2250e12, torch.float16: 2250e12, "tf32": 1125e12, torch.float32: 75e12},
    "A100": {torch.bfloat16: 312e12, torch.float16: 312e12, "tf32": 156e12, torch.float32: 19.5e12},
    "L40S": {torch.bfloat16: 362e12, torch.float16: 362e12, "tf32": 183e12, torch.float32: 91.6e12},
    "RTX 4090": {torch.bfloat16: 165.2e12, torch.float16: 165.2e12, "tf32": 82.6e12, torch.float32: 82.6e12},
}


@dataclass(frozen=True)
class Cpu:
    """A process on the CPU, with gloo."""

    torch_device: torch.device
    backend = "gloo"
    pin_memory = False
    name = "CPU"

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""

    def reset_peak_memory(self) -> None:
        """No allocator counts on a CPU."""

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return None


@dataclass(frozen=True)
class Cuda:
    """One CUDA device, with NCCL (and gloo for tensors that are offloaded to the host)."""

    torch_device: torch.device
    backend = "cpu:gloo,cuda:nccl"
    pin_memory = True

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def memory_bytes(self) -> dict[str, int]:
        """Peaks since the last reset and events since the start, from the caching allocator (no synchronisation).

        Returns:
            `allocated_peak`, `active_peak`, `reserved_peak` in bytes; `alloc_retries`, `ooms` as counts.
        """
        stats = torch.cuda.memory_stats(self.torch_device)
        return {
            "allocated_peak": stats.get("allocated_bytes.all.peak", 0),
            "active_peak": stats.get("active_bytes.all.peak", 0),
            "reserved_peak": stats.get("reserved_bytes.all.peak", 0),
            "alloc_retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
        }

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense peak in FLOP/s for matrix products in `dtype`, None where the device is not in the table."""
        for part in sorted(_PEAK_FLOPS, key=len, reverse=True):
            if part in self.name:
                tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
                return _PEAK_FLOPS[part]["tf32" if tf32 else dtype]
        return None


Device = Cpu | Cuda


def choose_device(choice: DeviceChoice, *, local_rank: int, local_world_size: int) -> Device:
    """The device of this process: CUDA where there is one (or where `device=cuda` asks for it), else the CPU.

    Raises:
        ConfigError: where there are fewer CUDA devices than processes on this machine.
    """
    available = torch.cuda.device_count()
    if choice is DeviceChoice.cpu or (choice is DeviceChoice.auto and available == 0):
        return Cpu(torch.device("cpu"))
    if available < local_world_size:
        raise ConfigError(
            f"device={choice.name}: {local_world_size} processes on this machine, but {available} CUDA devices: "
            + (f"use --nproc-per-node {available}, or device=cpu" if available else "use device=cpu")
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return Cuda(device)


def host_rss_peak_bytes() -> int:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_rss_bytes() -> int:
    """Resident set of this process now; its peak where /proc is missing."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return host_rss_peak_bytes()
