"""The storage ledger: when each storage is born, resized and freed, and what it is for.

It sees real tensors (a run is measured) and fake ones (a run is planned) alike, so that the two can be compared to the
byte. What it does not see is memory that a kernel takes and gives back within one operator.
"""

import gc
import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shardlab.telemetry.collectives import is_waited_for, settled
from shardlab.telemetry.events import Category, Entry, Event, Peak, Phase, peak_of

_FAKE = torch._C._TorchDispatchModeKey.FAKE
ROOT_UNIT = "the root"  # the name of FSDP2's unit for what no other one has taken
WINDOW_STEPS = 3  # of the memory window: optimizer state is born in the first step, so later ones peak higher


# FSDP2's own operators say what their arguments are (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
_COPY_IN = "fsdp::all_gather_copy_in"  # its outputs are the all-gather's buffer
_CHUNK_CAT = "fsdp::chunk_cat"  # reads unsharded gradients, writes the reduce-scatter's buffer


class Ledger(TorchDispatchMode):
    """Records while it is entered, which may be several times; enter it first around `build`.

    Categories may be learnt after a storage's birth (what forward made turns out to be a gathered parameter), so
    figures are worked out from the events when they are asked for. Deaths are seen at any time, births only while
    entered: metrics, logging and the loading of data stay out of the account.

    Python's cyclic garbage is collected where a step begins, and not in between: else some tensors would live until a
    moment that depends on what else the process does.
    """

    def __init__(self, device: torch.device, *, fake_mode: FakeTensorMode | None = None):
        """
        Args:
            device: whose memory the figures are of; storages elsewhere are recorded with their device.
            fake_mode: the mode that makes the tensors of a planned run; None for a real one.
        """
        super().__init__()
        self.device = device.type
        self.events: list[Event] = []
        self.step_starts: list[int] = []  # index in `events` where each step begins; before the first lies `build`
        self.forwards_left = 0  # in this step
        self.on_collective: Callable[[OpOverload, Sequence[Any], Any], None] | None = None  # told of each one's result
        self.failed_at: tuple[str, str] | None = None  # the first operator that raised an error, and in which module
        self._phase = Phase.init
        self._born_as = Category.other
        self._fake_mode = fake_mode
        self._live: dict[int, tuple[weakref.ref, Entry]] = {}
        self._paused = False
        self._modules: list[str] = [""]  # whose forward is running, the innermost last
        # Where autograd's sequence number stood when a forward was entered or left, and in whose forward that led.
        self._numbers: list[int] = []
        self._names: list[str] = []
        self._unpatch: list[Callable[[], None]] = []
        self._hooks: list[RemovableHandle] = []

    def watch(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Learns the categories of a built model's storages, as they come; call it after `build`."""
        self._label(model.parameters(), Category.parameters)
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            self._name(tensor, name)
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter_module, name)))
            self._hooks.append(module.register_forward_hook(self._leave_module, always_call=True))
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.learn(model)))
            self._hooks.append(optimizer.register_step_post_hook(self._end_update))

    def close(self) -> None:
        """Ends the account: takes all hooks off the model, and forgets what is alive."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._live.clear()

    def begin_step(self, micro_batches: Iterable[Iterable[torch.Tensor]]) -> None:
        """Begins a step; what it makes before the first forward are its inputs.

        Args:
            micro_batches: the tensors of each. Those that lie on the device already count from now on.
        """
        gc.collect()
        self.step_starts.append(len(self.events))
        self._phase, self._born_as = Phase.forward, Category.inputs
        self.forwards_left = 0
        for batch in micro_batches:
            self.forwards_left += 1
            for tensor in batch:
                if tensor.device.type == self.device:
                    self._track(tensor, makes_storage=True)

    def learn(self, model: nn.Module) -> None:
        """Learns what is a gradient and what a gathered parameter: where an update begins, or a step has failed."""
        for name, parameter in model.named_parameters():
            self._label([parameter.grad], Category.gradients)
            self._name(parameter.grad, name)
        for unit, tensor in _gathered_parameters(model):
            self._label([tensor], Category.unsharded_parameters)
            self._name(tensor, unit)

    def peak(self, device: str | None = None) -> Peak:
        """The most that was allocated at a time, and of what; on the ledger's device or on that of another type."""
        events = [event for event in self.events if event.entry.device == (device or self.device)]
        return peak_of(events, [event.after for event in events])

    def __enter__(self) -> "Ledger":
        if gc.isenabled():
            gc.disable()
            self._unpatch.append(gc.enable)
        self._patch_resize()
        self._patch_sharding_propagation()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        while self._unpatch:
            self._unpatch.pop()()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch.compile would be kept out of each operator: a tenth of a plan

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # more than half of all that a fake tensor is asked, by C++
            return args[0].device
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor takes itself apart, and what it does to local tensors is seen here
        settles = self._fake_mode is None and self.device == "cpu" and is_waited_for(func, args)
        try:
            if self._fake_mode is not None:
                out = _faked(func, types, args, kwargs or {})
            else:
                out = settled(func, args, kwargs or {}) if settles else func(*args, **(kwargs or {}))
        except Exception:
            self.failed_at = self.failed_at or (str(func).removesuffix(".default"), self._where()[1])
            raise
        if self._paused or func.is_view:
            return out
        results = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
        for index, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor):
                born = self._track(tensor, makes_storage=_makes_storage(func))
                if born is not None and self._phase in (Phase.init, Phase.optimizer):
                    born.made_from = self._sources(args, index, len(results))
        if func.namespace == "fsdp":
            self._learn_from_fsdp(func.name(), args, kwargs, out)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._label(tree_leaves(out), Category.communication, only_born_as=Category.activations)
            if self.on_collective is not None:
                self.on_collective(func, args, out)
        return out

    # Births, changes of size, deaths

    def _track(self, tensor: torch.Tensor, *, makes_storage: bool) -> Entry | None:
        """Notes what a tensor's storage is now. Returns its entry where it has just been born."""
        if tensor.is_meta or not self._is_ours(tensor):
            return None
        if isinstance(tensor, AsyncCollectiveTensor):  # owns nothing: the tensor that it wraps has been seen already
            return None
        storage = tensor.untyped_storage()
        found = self._live.get(storage._cdata)
        if found is not None and found[0]() is storage:
            self._resize(found[1], storage.nbytes())
            return None
        if not makes_storage:
            return None  # born out of sight, such as gloo's own copy of what it reduces
        category = Category.activations if _in_backward() else self._born_as
        entry = Entry(tensor.device.type, _current_stream(tensor.device), category)
        key = storage._cdata
        self._live[key] = (weakref.ref(storage, lambda _: self._die(key)), entry)
        self._resize(entry, storage.nbytes())
        return entry

    def entry_of(self, tensor: Any) -> Entry | None:
        """The entry of a tensor's storage while it lives; None where it is not recorded, and for what is no tensor."""
        if not isinstance(tensor, torch.Tensor):
            return None
        found = self._live.get(_local(tensor).untyped_storage()._cdata)
        return found and found[1]

    def _sources(self, args: Sequence[Any], index: int, results: int) -> Sequence[Entry | None]:
        """What the result `index` of an operator was made from: of a list with one result each, its own tensor."""
        if args and isinstance(args[0], (list, tuple)):
            own = args[0][index : index + 1] if len(args[0]) == results else args[0]
            return [self.entry_of(tensor) for tensor in own]
        return [entry for arg in args if (entry := self.entry_of(arg))][:1]

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is memory: in a real run fake tensors are not, in a planned one only they are."""
        if self._fake_mode is None:
            return not isinstance(tensor, FakeTensor)
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._fake_mode

    def _resize(self, entry: Entry, nbytes: int) -> None:
        if nbytes != entry.size:
            self.events.append(Event(entry, entry.stream, entry.size, nbytes, *self._where()))
            entry.size = nbytes

    def _die(self, key: int) -> None:
        if found := self._live.pop(key, None):
            self._resize(found[1], 0)

    def _where(self) -> tuple[Phase, str]:
        """The phase, and the module in whose forward or backward this happens."""
        if not _in_backward():
            return self._phase, self._modules[-1]
        if self.forwards_left == 0:  # what follows is the update: unscaling and clipping, before the optimizer's step
            self._phase, self._born_as = Phase.optimizer, Category.other
        if len(self._modules) > 1:  # a forward within backward: recomputation
            return Phase.backward, self._modules[-1]
        node = torch._C._current_autograd_node()
        if node is None or not self._numbers:
            return Phase.backward, ""
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        return Phase.backward, self._names[max(index, 0)]

    # Categories

    def _label(self, tensors: Iterable[Any], category: Category, *, only_born_as: Category | None = None) -> None:
        for tensor in tensors:
            entry = self.entry_of(tensor)
            if entry is not None and only_born_as in (None, entry.category):
                entry.category = category

    def _name(self, tensor: torch.Tensor | None, name: str) -> None:
        if entry := self.entry_of(tensor):
            entry.name = entry.name or name

    def _learn_from_fsdp(self, name: str, args: tuple, kwargs: Mapping[str, Any] | None, out: Any) -> None:
        if name.startswith(_COPY_IN):
            self._label(tree_leaves(out), Category.communication)
        elif name.startswith(_CHUNK_CAT):
            self._label(args[0], Category.unsharded_gradients)
            self._label(tree_leaves((args[1:], kwargs)), Category.communication)

    def _end_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._label(_state(optimizer), Category.optimizer)

    def _enter_module(self, name: str, module: nn.Module, args: Any) -> None:
        if name == "":
            self._phase, self._born_as = Phase.forward, Category.activations
            self.forwards_left -= 1
        self._modules.append(name)
        self._note_number()

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()
        self._note_number()

    def _note_number(self) -> None:
        if _in_backward():
            return  # what is recomputed has no nodes of its own in the graph, and another thread's numbers
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._names.append(self._modules[-1])

    # What does not pass through dispatch

    def _patch_resize(self) -> None:
        """FSDP2 frees and refills unsharded parameters by `UntypedStorage.resize_`."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            if found := self._live.get(storage._cdata):
                found[1].stream = _current_stream(torch.device(found[1].device))
                self._resize(found[1], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore
        self._unpatch.append(lambda: setattr(torch.UntypedStorage, "resize_", original))

    def _patch_sharding_propagation(self) -> None:
        """DTensor works out its layouts on fake tensors of the global shape, which are no memory."""
        name = "_propagate_tensor_meta_non_cached"
        original = getattr(ShardingPropagator, name)

        def propagate(*args: Any, **kwargs: Any) -> Any:
            before, self._paused = self._paused, True
            try:
                return original(*args, **kwargs)
            finally:
                self._paused = before

        setattr(ShardingPropagator, name, propagate)
        self._unpatch.append(lambda: setattr(ShardingPropagator, name, original))


def _faked(func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Hands an operator to the fake mode, as PyTorch's dispatcher would, which takes a tenth of a plan for it."""
    mode: Any = torch._C._unset_dispatch_mode(_FAKE)
    if mode is None:
        return func(*args, **kwargs)
    try:
        return mode.dispatch(func, types, args, kwargs)
    finally:
        torch._C._set_dispatch_mode(mode)


@cache
def _makes_storage(func: OpOverload) -> bool:
    """Whether an operator's results are new storages: views and in-place operators return those of their arguments."""
    return all(result.alias_info is None for result in func._schema.returns)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _state(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for entry in optimizer.state.values():
        yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def _gathered_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of FSDP2 that hold unsharded parameters while they are gathered, with the name of their unit."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    for buffer in parameter.all_gather_outputs:
                        yield group._module_fqn or ROOT_UNIT, buffer


def _current_stream(device: torch.device) -> object:
    """The stream that an allocation belongs to; None on devices without streams."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).current_stream(device)
