"""The simulated accelerator: casts as CUDA's autocast does, and takes the memory that CUDA's kernels take."""

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shardlab.planner import autocast
from shardlab.planner.device import NAME, install
from shardlab.telemetry import Ledger


@pytest.fixture(scope="module")
def on_device():
    """Calls a function in a process that has the simulated device; installing it changes a process for good."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=install) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def like_cuda(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=NAME, requires_grad=grad)


def alive(ledger: Ledger) -> int:
    """Bytes allocated now."""
    return sum(event.after - event.before for event in ledger.events)


# Autocast

# "CUDA Op-Specific Behavior", https://docs.pytorch.org/docs/stable/amp.html. Arguments are bf16 where that must be made
# fp32, and fp32 where it must be made bf16.
DOCUMENTED: dict[torch.dtype, dict[str, Callable[..., torch.Tensor]]] = {
    torch.bfloat16: {
        "addbmm": lambda x, w, b: torch.addbmm(w, b.float(), b),
        "addmm": lambda x, w, b: torch.addmm(w.float(), x, w),
        "addmv": lambda x, w, b: torch.addmv(x[0], x, x[0].float()),
        "addr": lambda x, w, b: torch.addr(w.float(), x[0], x[0]),
        "baddbmm": lambda x, w, b: torch.baddbmm(b, b.float(), b),
        "bmm": lambda x, w, b: torch.bmm(b.float(), b),
        "chain_matmul": lambda x, w, b: torch.chain_matmul(x.float(), w, w),
        "multi_dot": lambda x, w, b: torch.linalg.multi_dot([x.float(), w, w]),
        "conv1d": lambda x, w, b: F.conv1d(b.float(), b[..., :3].float()),
        "conv_transpose1d": lambda x, w, b: F.conv_transpose1d(b.float(), b[..., :3].float()),
        "linear": lambda x, w, b: F.linear(x.float(), w.float(), w[0].float()),
        "matmul": lambda x, w, b: x.float() @ w,
        "mm": lambda x, w, b: torch.mm(x.float(), w),
        "mv": lambda x, w, b: torch.mv(w, x[0].float()),
        "prelu": lambda x, w, b: F.prelu(x.float(), x[0, :1].float()),
        "einsum": lambda x, w, b: torch.einsum("ij,jk->ik", x.float(), w),
        "scaled_dot_product_attention": lambda x, w, b: F.scaled_dot_product_attention(*[b[None].float()] * 3),
        # On no list: they run in the dtypes of their arguments.
        "gelu": lambda x, w, b: F.gelu(x),
        "add": lambda x, w, b: x + x,
    },
    torch.float32: {
        "pow": lambda x, w, b: x**2,
        "rpow": lambda x, w, b: 2**x,
        "rdiv": lambda x, w, b: 1 / x,
        "acos": lambda x, w, b: x.acos(),
        "binary_cross_entropy_with_logits": lambda x, w, b: F.binary_cross_entropy_with_logits(x, x),
        "cdist": lambda x, w, b: torch.cdist(x, x),
        "cosine_similarity": lambda x, w, b: F.cosine_similarity(x, x),
        "cross_entropy": lambda x, w, b: F.cross_entropy(x, x[0].long()),
        "cumsum": lambda x, w, b: x.cumsum(0),
        "exp": lambda x, w, b: x.exp(),
        "group_norm": lambda x, w, b: F.group_norm(x, 2),
        "kl_div": lambda x, w, b: F.kl_div(x, x),
        "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), x[0].float()),
        "log_softmax": lambda x, w, b: F.log_softmax(x, -1),
        "mse_loss": lambda x, w, b: F.mse_loss(x, x),
        "nll_loss": lambda x, w, b: F.nll_loss(x, x[0].long()),
        "norm": lambda x, w, b: x.norm(),
        "norm of rows": lambda x, w, b: x.norm(dim=1, keepdim=True),
        "normalize": lambda x, w, b: F.normalize(x),
        "prod": lambda x, w, b: x.prod(),
        "rsqrt": lambda x, w, b: x.rsqrt(),
        "softmax": lambda x, w, b: F.softmax(x, -1),
        "softmax as a method": lambda x, w, b: x.softmax(dim=-1, dtype=None),
        "softplus": lambda x, w, b: F.softplus(x),
        "sum": lambda x, w, b: x.sum(),
        "sum of rows": lambda x, w, b: x.sum(1),
        # The widest of their arguments.
        "addcmul": lambda x, w, b: torch.addcmul(x, x.float(), x),
        "atan2": lambda x, w, b: torch.atan2(x, x.float()),
        "dot": lambda x, w, b: torch.dot(x[0], x[0].float()),
        "scatter_add": lambda x, w, b: x.scatter_add(0, x.long(), x.float()),
        "tensordot": lambda x, w, b: torch.tensordot(x, x.float(), 2),
    },
    torch.float64: {"double is left alone": lambda x, w, b: x.double() @ w.double()},
}


def documented_results(expected: torch.dtype) -> dict[str, torch.dtype]:
    with FakeTensorMode(), torch.autocast(NAME, dtype=torch.bfloat16):
        arguments = like_cuda(8, 8), like_cuda(8, 8), like_cuda(8, 8, 8)
        return {name: call(*arguments).dtype for name, call in DOCUMENTED[expected].items()}


@pytest.mark.parametrize("expected", DOCUMENTED, ids=str)
def test_autocast_gives_the_dtypes_that_are_documented_for_cuda(on_device, expected):
    assert on_device(documented_results, expected) == dict.fromkeys(DOCUMENTED[expected], expected)


def test_the_lists_are_those_of_the_installed_torch():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def operators(macro: str) -> set[str]:
        lines = header.split(f"#define {macro}(_)")[1].split("\n\n")[0]
        return {".".join(re.split(r",\s*", names)) for names in re.findall(r"_\((\w+(?:,\s*\w+)?)\)", lines)}

    # Registered apart from the macros, in autocast_mode.cpp.
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert set(autocast.LOWER_PRECISION.split()) == operators("AT_FORALL_LOWER_PRECISION_FP") | cudnn
    assert set(autocast.FP32.split()) == operators("AT_FORALL_FP32")
    assert set(autocast.FP32_RESULT.split()) == operators("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert set(autocast.PROMOTE.split()) == operators("AT_FORALL_PROMOTE")
    on_cuda = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    ours = (autocast.LOWER_PRECISION, autocast.FP32, autocast.FP32_RESULT, autocast.FP32_RESULT_OVERLOADS)
    assert on_cuda == {*" ".join((*ours, autocast.PROMOTE, autocast.BANNED)).split()}


def banned() -> None:
    with FakeTensorMode(), torch.autocast(NAME, dtype=torch.bfloat16):
        F.binary_cross_entropy(like_cuda(2), like_cuda(2))


def test_autocast_refuses_what_cuda_refuses(on_device):
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        on_device(banned)


def sizes_over_a_step(device_type: str, dtype: torch.dtype, recompute: bool) -> list[int]:
    """Each change of a storage's size, in bytes, as a step on a small model goes on.

    What is freed at one go is sorted: PyTorch's own cache of casts lies in order of addresses.
    """
    device = torch.device(device_type)
    with FakeTensorMode() as fake_mode, Ledger(device, fake_mode=fake_mode) as ledger:
        shared, last = nn.Linear(8, 8, device=device), nn.Linear(8, 5, device=device)
        block = nn.Sequential(shared, nn.ReLU(), shared)
        inputs, labels = torch.empty(3, 8, device=device), torch.empty(3, dtype=torch.int64, device=device)
        with torch.autocast(device_type, dtype=dtype):
            hidden = checkpoint(block, inputs, use_reentrant=False) if recompute else block(inputs)
            loss = F.cross_entropy(last(hidden).float(), labels)  # as `step.py` does
        loss.backward()
        del hidden, loss
    changes = [event.after - event.before for event in ledger.events]
    runs = groupby(changes, lambda change: change > 0)
    return [change for births, run in runs for change in (run if births else sorted(run))]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_live_as_long_as_those_of_pytorchs_own_autocast(on_device, dtype, recompute):
    # The reference is the C++ autocast of the CPU, whose lists are as CUDA's for these operators.
    assert on_device(sizes_over_a_step, NAME, dtype, recompute) == on_device(sizes_over_a_step, "cpu", dtype, recompute)


def kept_by_autocast() -> tuple[int, ...]:
    """Bytes that are alive beside weight (64 x 64) and input (16 x 64): in autocast, after it, and with a graph."""
    with FakeTensorMode() as fake_mode, Ledger(torch.device(NAME), fake_mode=fake_mode) as ledger:
        weight, inputs = like_cuda(64, 64, dtype=torch.float32, grad=True), like_cuda(16, 64, dtype=torch.float32)
        before = alive(ledger)
        kept = []
        with torch.autocast(NAME, dtype=torch.bfloat16):
            with torch.no_grad():
                F.linear(inputs, weight)
            F.linear(inputs, weight)
            kept.append(alive(ledger) - before)
        kept.append(alive(ledger) - before)
        with torch.autocast(NAME, dtype=torch.bfloat16):
            out = F.linear(F.linear(inputs, weight), weight)
        kept.append(alive(ledger) - before)
        del out
        return tuple(kept)


def test_a_weight_is_cast_once_and_its_cast_kept_until_autocast_ends_or_backward_needs_it_no_more(on_device):
    weight, activation = 2 * 64 * 64, 2 * 16 * 64  # bytes in bf16
    # Cast inputs and results are freed with their call, unless a graph is there for which they are saved.
    assert on_device(kept_by_autocast) == (weight, 0, weight + 3 * activation)


# Kernels


class Calls(TorchDispatchMode):
    """Notes operators, and the bytes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = tuple(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.calls.append((func.overloadpacket.__name__, sizes))
        return out


def attention_kernel(dtype: torch.dtype, shapes: tuple, options: dict[str, Any], mask: torch.dtype | None) -> str:
    with FakeTensorMode(), Calls() as calls:
        query, key, value = (like_cuda(*shape, dtype=dtype) for shape in shapes)
        if mask is not None:
            options = options | {"attn_mask": like_cuda(query.shape[-2], key.shape[-2], dtype=mask)}
        out = F.scaled_dot_product_attention(query, key, value, **options)
        assert out.shape == (*query.shape[:-1], value.shape[-1])
    names = {name for name, _ in calls.calls}
    return next((k for k in ("flash", "efficient") if f"_scaled_dot_product_{k}_attention" in names), "math")


# "scaled_dot_product_attention" in PyTorch's documentation, and the constraints in its sdp_utils.cpp.
BF16, FP32, SAME = torch.bfloat16, torch.float32, ((2, 4, 16, 32),) * 3
GROUPED = ((2, 4, 16, 32), (2, 2, 16, 32), (2, 2, 16, 32))


@pytest.mark.parametrize(("dtype", "shapes", "options", "mask", "kernel"), [
    (BF16, SAME, {}, None, "flash"),
    (torch.float16, SAME, {"is_causal": True, "dropout_p": 0.1}, None, "flash"),
    (BF16, GROUPED, {"is_causal": True, "enable_gqa": True}, None, "flash"),
    (BF16, ((2, 4, 16, 20),) * 3, {}, None, "flash"),  # padded to a head of 24
    (BF16, ((2, 4, 16, 264),) * 3, {}, None, "efficient"),  # flash stops at 256
    (BF16, SAME, {}, torch.bool, "efficient"),  # flash takes no mask
    (BF16, ((2, 4, 16, 32), (2, 4, 8, 32), (2, 4, 8, 32)), {"is_causal": True}, None, "efficient"),
    (BF16, ((2, 4, 16, 32), (2, 4, 12, 32), (2, 4, 12, 32)), {}, BF16, "efficient"),
    (FP32, SAME, {"is_causal": True}, None, "efficient"),
    (FP32, GROUPED, {"enable_gqa": True}, None, "math"),
    (FP32, ((2, 4, 16, 30),) * 3, {}, None, "math"),  # no rows of 16 bytes
    (torch.float64, SAME, {}, None, "math"),
    (BF16, ((4, 16, 32),) * 3, {}, None, "math"),  # no batch
])  # fmt: skip
def test_attention_takes_the_kernel_that_cuda_would(on_device, dtype, shapes, options, mask, kernel):
    assert on_device(attention_kernel, dtype, shapes, options, mask) == kernel


def backward_calls(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """What backward calls for an operator, with bytes of results; of views nothing, for they take no memory."""
    with FakeTensorMode():
        if kind == "attention":  # 8 heads of 80 in 2 groups, 200 positions
            shapes = (2, 200, 8, 80), (2, 200, 2, 80), (2, 200, 2, 80)
            query, key, value = (like_cuda(*shape, grad=True).transpose(1, 2) for shape in shapes)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            grad = like_cuda(2, 200, 8, 80).transpose(1, 2)
        else:
            tokens = torch.empty(int(kind.split()[-1]), dtype=torch.int64, device=NAME)
            out = F.embedding(tokens, like_cuda(1000, 48, grad=True))
            grad = torch.empty_like(out)
        with Calls() as calls:
            out.backward(grad)
    views = ("transpose", "view", "detach", "device")
    return [call for call in calls.calls if call[0] not in views]


def test_backward_of_attention_takes_the_scratch_of_flash_attention(on_device):
    query, key = 2 * 200 * 8 * 80 * 2, 2 * 200 * 2 * 80 * 2  # bytes in bf16
    softmax_d = 2 * 8 * 256 * 4  # fp32; positions rounded up to 128
    dq_accum = softmax_d * 96  # heads rounded up to 32
    assert on_device(backward_calls, "attention") == [
        ("_scaled_dot_product_flash_attention_backward", (query, key, key)),
        *(("empty", (size,)) for size in (softmax_d, dq_accum, query, query)),
    ]


def test_backward_of_an_embedding_takes_scratch_for_partial_sums_above_3072_tokens(on_device):
    table = 1000 * 48 * 2
    assert on_device(backward_calls, "embedding of 3072") == [("embedding_dense_backward", (table,))]
    partial_sums = 4000 // 10 + 1000  # at most: each 10 tokens, and the rest of each of 1000 segments
    assert on_device(backward_calls, "embedding of 4000") == [
        ("embedding_dense_backward", (table,)),
        *(("empty", (8 * size,)) for size in (4000, 4000, 1000, 1000, 1000, partial_sums)),
        ("empty", (4 * partial_sums * 48,)),
    ]


def rms_norm_keeps(weight_dtype: torch.dtype) -> int:
    """Bytes that RMSNorm of (16, 64) in bf16 keeps for backward, beside its input, weight and output."""
    with FakeTensorMode() as fake_mode, Ledger(torch.device(NAME), fake_mode=fake_mode) as ledger:
        inputs, weight = like_cuda(16, 64, grad=True), like_cuda(64, dtype=weight_dtype, grad=True)
        before = alive(ledger)
        out = F.rms_norm(inputs, (64,), weight)
        return alive(ledger) - before - out.nbytes


def test_rms_norm_is_fused_where_weight_and_input_have_one_dtype(on_device):
    assert on_device(rms_norm_keeps, torch.bfloat16) == 16 * 4  # an fp32 number per row
    assert on_device(rms_norm_keeps, torch.float32) > 16 * 64 * 4  # an fp32 copy of the input


def made_from_data() -> tuple[str, torch.Size]:
    with FakeTensorMode():
        tensor = torch.tensor([1.0, 2.0], device=NAME)
        return tensor.device.type, tensor.shape


def test_tensors_can_be_made_from_data_on_the_device(on_device):
    assert on_device(made_from_data) == (NAME, torch.Size([2]))
