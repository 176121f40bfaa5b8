"""Which device a process gets, and what is known of it."""

import os
import subprocess
import sys

import pytest
import torch

from shardlab.config import DeviceChoice
from shardlab.device import Cpu, Cuda, choose_device, host_rss_bytes, host_rss_peak_bytes
from shardlab.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n, name)` makes the machine look as if it had n CUDA devices; returns the list of those that are chosen."""

    def pretend(count: int, name: str = "NVIDIA H100 80GB HBM3") -> list[torch.device]:
        chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


def choose(choice: str, *, local_rank: int = 0, local_world_size: int = 1):
    return choose_device(DeviceChoice(choice), local_rank=local_rank, local_world_size=local_world_size)


def test_auto_is_the_cpu_where_there_is_no_gpu(gpus):
    gpus(0)
    device = choose("auto", local_world_size=4)
    assert isinstance(device, Cpu)
    assert (device.torch_device, device.backend, device.pin_memory) == (torch.device("cpu"), "gloo", False)


def test_auto_is_each_ranks_own_gpu_where_there_are_some(gpus):
    chosen = gpus(4)
    device = choose("auto", local_rank=3, local_world_size=4)
    assert isinstance(device, Cuda)
    assert device.torch_device == torch.device("cuda", 3)
    assert chosen == [torch.device("cuda", 3)]
    assert "nccl" in device.backend
    assert device.name == "NVIDIA H100 80GB HBM3"


def test_the_cpu_can_be_asked_for_where_there_are_gpus(gpus):
    chosen = gpus(4)
    assert isinstance(choose("cpu", local_world_size=8), Cpu)
    assert chosen == []


def test_cuda_without_a_device_is_refused(gpus):
    gpus(0)
    with pytest.raises(ConfigError, match=r"device=cuda: .*0 CUDA devices: use device=cpu"):
        choose("cuda")


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused(gpus, choice):
    chosen = gpus(2)
    says = f"device={choice}: 3 processes on this machine, but 2 CUDA devices: use --nproc-per-node 2, or device=cpu"
    with pytest.raises(ConfigError, match=says):
        choose(choice, local_world_size=3)
    assert chosen == []


@pytest.mark.parametrize(("name", "dtype", "peak"), [
    # Dense peaks in TFLOP/s from NVIDIA's datasheets, where those with sparsity are twice as high.
    ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
    ("NVIDIA H100 PCIe", torch.bfloat16, 756),
    ("NVIDIA H100 NVL", torch.bfloat16, 835),
    ("NVIDIA H200", torch.float16, 989),
    ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
    ("NVIDIA A100-PCIE-40GB", torch.float32, 19.5),
    ("NVIDIA B200", torch.bfloat16, 2250),
    ("NVIDIA L40S", torch.float16, 362),
    ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
])  # fmt: skip
def test_peaks_are_found_by_name(gpus, name, dtype, peak):
    gpus(1, name)
    assert choose("cuda").peak_flops(dtype) == pytest.approx(peak * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1080", "Tesla V100-SXM2-16GB", "NVIDIA L40", "Instinct MI300X"])
def test_a_device_that_is_not_in_the_table_has_no_peak(gpus, name):
    gpus(1, name)
    assert choose("cuda").peak_flops(torch.bfloat16) is None


def test_a_cpu_has_no_peak():
    assert Cpu(torch.device("cpu")).peak_flops(torch.float32) is None


@pytest.mark.parametrize(("matmul", "peak"), [("highest", 67), ("high", 494)])
def test_fp32_products_in_tf32_have_its_peak(gpus, matmul, peak):
    gpus(1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(matmul)
    try:
        assert choose("cuda").peak_flops(torch.float32) == pytest.approx(peak * 1e12)
        assert choose("cuda").peak_flops(torch.bfloat16) == pytest.approx(989e12)
    finally:
        torch.set_float32_matmul_precision(before)


GROW_AND_SHRINK = """
from shardlab.device import host_rss_bytes, host_rss_peak_bytes
before = host_rss_bytes()
block = b"x" * (200 << 20)
grown = host_rss_bytes()
del block
print(before, grown, host_rss_bytes(), host_rss_peak_bytes())
"""


def test_host_memory_follows_the_process_and_the_peak_stays():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.check_output([sys.executable, "-c", GROW_AND_SHRINK], text=True, env=environment)
    before, grown, after, peak = map(int, output.split())
    mib = 1 << 20
    assert grown - before == pytest.approx(200 * mib, abs=10 * mib)
    assert after == pytest.approx(before, abs=10 * mib)
    assert peak >= grown - mib


def test_this_process_fits_its_own_peak():
    assert 10 << 20 < host_rss_bytes() <= host_rss_peak_bytes() + (1 << 20)
