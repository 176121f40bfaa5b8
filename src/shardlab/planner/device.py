"""A simulated accelerator: a device of PyTorch's that allocates nothing and computes nothing.

It exists so that the trainer's own `build` and `step` run unchanged where there is no GPU, under FakeTensorMode.
Streams and events are there because FSDP2 asks for them: which stream an allocation belongs to decides what the caching
allocator can give it. What CUDA does otherwise than the operators' CPU paths is mapped in `cuda_kernels.py` and
`autocast.py`, and nowhere else.

`install` changes this process for good (`torch.accelerator`, the PrivateUse1 key): plan in a process of its own.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.profiler import record_function
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard
from torch.utils import backend_registration

from shardlab.planner import cuda_kernels
from shardlab.planner.autocast import Autocast
from shardlab.sharding import rows_of

NAME = "sim"
_registered: list[torch.library.Library] = []  # kept, since a library takes its registrations back when it dies


class _Stream:
    """A queue of work; only its identity matters."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.priority = priority

    def wait_stream(self, other: "_Stream") -> None: ...
    def wait_event(self, event: "_Event") -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return (event or _Event()).record(self)


class _Event:
    """A mark in a stream."""

    def __init__(self, **_: Any): ...

    def record(self, stream: _Stream | None = None) -> "_Event":
        return self

    def wait(self, stream: _Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Accelerator(backend_registration._DummyBackendModule):
    """What `torch.sim` is: the functions that PyTorch looks for on a device module."""

    Stream = _Stream
    Event = _Event

    def __init__(self) -> None:
        self._streams = [_Stream()]  # the current one last

    def current_stream(self, device: Any = None) -> _Stream:
        return self._streams[-1]

    def set_device(self, device: Any) -> None: ...
    def synchronize(self, device: Any = None) -> None: ...

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @contextlib.contextmanager
    def stream(self, stream: _Stream | None) -> Iterator[None]:
        self._streams.append(stream or self._streams[-1])
        try:
            yield
        finally:
            self._streams.pop()

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield


_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1
_raise_pending = ctypes.pythonapi.Py_IsInitialized  # as ctypes does after any call of Python's C API
_errors: list[BaseException] = []  # that steps of backward failed with


class _Guard(torch._C._acc.DeviceGuard):
    """Tells autograd the type of the device, and takes the error that a step of backward fails with.

    Autograd sets its stream back while that error is pending, and asks for the type to do so (`exchangeStream` in
    PyTorch's acc/Module.cpp). Python fails calls that return while an error is pending, which would abort the process.
    """

    __slots__ = ()  # nor is anything found beside an instance's dictionary while an error is pending

    def type_(self) -> Any:
        try:
            _raise_pending()
        except BaseException as error:
            _errors.append(error)
        return _DEVICE_TYPE


def error_in_backward() -> BaseException | None:
    """The error that backward failed with on the device, told once: backward itself raises a SystemError without it."""
    error = _errors[0] if _errors else None
    _errors.clear()
    return error


@cache
def install() -> torch.device:
    """Registers the device in this process, once. Returns it."""
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=Accelerator(), device_guard=_Guard()
    )
    _map_generators()
    _map_pinned_memory()
    _map_profiler()
    _map_tensor_factory()
    _map_chunks()
    _map_meshes()
    _registered.extend([cuda_kernels.register(), *Autocast(NAME).register()])
    return torch.device(NAME, 0)


def _map_tensor_factory() -> None:
    """Lets `torch.tensor(data, device)` be made: on the host first, since there is no device to make it on."""
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment, method-assign]


class _Chunks:
    """`torch.chunk` and empty tensors up to the number asked for, each made when it is looked at."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int):
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        rows = rows_of(self._tensor.shape[self._dim], self._count, range(self._count)[index])
        if rows.start == rows.stop:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, rows.start, rows.stop - rows.start)


def _map_chunks() -> None:
    """Cuts parameters into shards one by one: FSDP2 needs two of them, which of 1024 fake ones takes most of a plan."""
    _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]


def _map_meshes() -> None:
    """Makes the mesh of a partial reshard of real tensors: DeviceMesh reads its ranks, and fake ones have no values."""
    real = _fully_shard._get_post_forward_mesh_info

    def make(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return real(*args, **kwargs)

    _fully_shard._get_post_forward_mesh_info = make


def _map_generators() -> None:
    """Lets `torch.Generator(device)` be made for the device: nothing is drawn from it."""
    real = torch.Generator

    class Generator(real):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return real.__new__(cls, "cpu" if torch.device(device).type == NAME else device)  # type: ignore[call-arg]

    torch.Generator = Generator  # type: ignore[misc]


def _map_pinned_memory() -> None:
    """Page-locks host tensors (CPU offload) in name only: there is no driver to ask, and they take the same bytes."""
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore
    torch.Tensor.is_pinned = lambda tensor, device=None: True  # type: ignore


def _map_profiler() -> None:
    """Lets FSDP2 and optimizers set no marks for a profiler: there is none, and each mark is two operators."""
    record_function.__enter__ = lambda mark: mark  # type: ignore[method-assign]
    record_function.__exit__ = lambda *_: None  # type: ignore[method-assign]
