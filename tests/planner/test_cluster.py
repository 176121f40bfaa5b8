"""Clusters: the files of conf/cluster, the machine at hand, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from shardlab.device import Cuda
from shardlab.errors import ConfigError
from shardlab.planner.allocator_settings import cublas_workspace_bytes
from shardlab.planner.cluster import GIB, ClusterConfig, ClusterDevice, resolve
from tests.training import ROOT

FILES = sorted((ROOT / "conf" / "cluster").glob("*.yaml"))
GPUS = ("a100_40gb", "a100_80gb", "b200", "h100_80gb", "h100_96gb", "h200", "l40s", "rtx4090")


def load(name: str, **changes) -> ClusterConfig:
    """A choice over the schema, as Hydra composes it."""
    choice = OmegaConf.load(ROOT / "conf" / "cluster" / f"{name}.yaml")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ClusterConfig), choice, changes))


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two CUDA devices, of which the second is smaller."""
    devices = [
        SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIB - 512),
        SimpleNamespace(name="NVIDIA A100-SXM4-40GB", major=8, minor=0, total_memory=40 * GIB),
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])


# ---- the files


def test_there_is_a_file_for_each_cluster():
    assert [path.stem for path in FILES] == sorted(("auto", "cpu", *GPUS))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_opens_with_what_it_is_and_sets_and_explains_each_key(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert list(OmegaConf.load(path)) == list(ClusterConfig.__dataclass_fields__)
    for line, before in zip(lines[1:], lines, strict=False):
        assert "#" in line or before.startswith("#"), line
        assert len(line) <= 125, line


@pytest.mark.parametrize("name", GPUS)
def test_gpu_clusters_are_complete(name):
    cluster = load(name)
    assert resolve(cluster, environ={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) == cluster
    assert cluster.device is ClusterDevice.cuda
    # Their names, too, are known: peak FLOP/s are looked up by them.
    assert cluster.name is not None and any(
        part in cluster.name for part in ("A100", "H100", "H200", "B200", "L40S", "RTX 4090")
    )
    assert 1.0 <= cluster.set_aside_gib <= 2.0
    assert cluster.usable_bytes == pytest.approx((cluster.memory_gib - cluster.set_aside_gib) * GIB, abs=1)
    hopper_or_later = name in ("h100_80gb", "h100_96gb", "h200", "b200")
    workspace = cublas_workspace_bytes(tuple(cluster.capability))
    assert workspace == (32 << 20 if hopper_or_later else 8_519_680)


def test_nodes_multiply_ranks():
    assert resolve(load("h100_96gb", nodes=16)).world_size == 128
    assert resolve(load("rtx4090")).world_size == 4


def test_torchtitans_published_run_fits_its_cluster():
    """90.28 GiB reserved, 94.99 % of the device, in torchtitan#165 on 8 such GPUs."""
    cluster = load("h100_96gb")
    assert 90.28 / cluster.memory_gib == pytest.approx(0.9499, abs=5e-5)
    assert cluster.usable_bytes > 90.28 * GIB


# ---- the machine at hand


def test_a_machine_without_gpus_is_two_cpu_ranks(no_cuda):
    cluster = resolve(load("auto"), environ={})
    assert (cluster.device, cluster.world_size, cluster.usable_bytes) == (ClusterDevice.cpu, 2, None)
    assert resolve(ClusterConfig(), environ={}) == cluster


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_cpu_ranks_are_those_that_torchrun_started(no_cuda, name):
    cluster = resolve(load(name), environ={"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"})
    assert (cluster.gpus_per_node, cluster.nodes, cluster.world_size) == (3, 2, 6)
    assert resolve(load(name), environ={"WORLD_SIZE": "4"}).world_size == 4
    assert resolve(load(name, gpus_per_node=8, nodes=1), environ={"WORLD_SIZE": "4"}).world_size == 8


def test_gpus_at_hand_count_as_the_smallest_of_them(two_gpus):
    cluster = resolve(load("auto"), environ={})
    assert (cluster.device, cluster.name) == (ClusterDevice.cuda, "NVIDIA A100-SXM4-40GB")
    assert (cluster.world_size, cluster.memory_gib, cluster.capability) == (2, 40.0, [8, 0])
    assert cluster.usable_bytes == 40 * GIB - 3 * GIB // 2


def test_gpus_that_torchrun_leaves_unused_do_not_count(two_gpus):
    cluster = resolve(load("auto"), environ={"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    assert (cluster.world_size, cluster.memory_gib * GIB) == (1, 80 * GIB - 512)


def test_what_is_set_overrides_the_machine(two_gpus):
    cluster = resolve(load("auto", memory_gib=24.0, gpus_per_node=8, nodes=4, capability=[8, 9]), environ={})
    assert (cluster.memory_gib, cluster.world_size, cluster.capability) == (24.0, 32, [8, 9])


def test_a_run_on_the_cpu_is_planned_for_the_cpu(two_gpus):
    assert resolve(load("auto"), environ={}, allow_cuda=False).device is ClusterDevice.cpu


def test_allocator_settings_come_from_the_environment_of_the_machine_at_hand_only(two_gpus):
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert resolve(load("auto"), environ=environ).allocator_settings.expandable_segments
    chosen = load("auto", alloc_conf="max_split_size_mb:128")
    assert resolve(chosen, environ=environ).allocator_settings.max_split_bytes == 128 << 20
    assert resolve(load("h200"), environ=environ).alloc_conf == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_real_machine():
    device = Cuda(torch.device("cuda", 0))
    cluster = resolve(ClusterConfig(), environ={"WORLD_SIZE": "1"})
    assert (cluster.name, cluster.world_size) == (device.name, 1)
    assert cluster.memory_gib * GIB == torch.cuda.get_device_properties(0).total_memory


# ---- what is refused


@pytest.mark.parametrize(("change", "message"), [
    ({"nodes": 0}, "cluster.nodes=0 must be at least 1"),
    ({"gpus_per_node": -1}, "cluster.gpus_per_node=-1 must be at least 1"),
    ({"gpus_per_node": None}, "cluster.gpus_per_node=null, but cluster.device=cuda needs it"),
    ({"memory_gib": None}, "cluster.memory_gib=null, but cluster.device=cuda needs it"),
    ({"memory_gib": 0.0}, "cluster.memory_gib=0.0 must be positive"),
    ({"capability": None}, r"set it, e.g. cluster.capability=\[9,0\]"),
    ({"capability": [9]}, r"cluster.capability=\[9\] must be two numbers"),
    ({"set_aside_gib": -1.0}, "cluster.set_aside_gib=-1.0 must not be negative"),
    ({"set_aside_gib": 200.0}, "cluster.set_aside_gib=200.0 leaves nothing of cluster.memory_gib=139.8"),
    ({"alloc_conf": "expandable:True"}, "cluster.alloc_conf=expandable:True: unknown allocator setting 'expandable'"),
])  # fmt: skip
def test_values_that_make_no_sense_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(replace(load("h200"), **change), environ={})
    assert "\n" not in str(caught.value)
