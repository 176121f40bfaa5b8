"""What CUDA's kernels do otherwise than the operators' CPU and composite paths, for the simulated device.

Two kinds of difference matter to memory: which tensors an operator makes and saves for backward, and the scratch memory
that a kernel takes from the caching allocator and gives back at its end. From PyTorch's source, 2.13:

| operator | on CUDA | here |
|---|---|---|
| `scaled_dot_product_attention` | flash, memory-efficient or math kernel (`sdp_utils.cpp`) | mapped |
| `rms_norm` | fused: saves its input and an fp32 number per row (`layer_norm.cpp`) | mapped |
| attention's backward, flash | fp32 accumulator, full heads of grouped keys (`flash_api.cpp`) | mapped |
| `embedding`'s backward | fp32 partial sums per token (`EmbeddingBackwardKernel.cu`) | mapped |
| autocast | its own lists of operators | mapped in `autocast.py` |
| `dropout`, `layer_norm`, `group_norm`, `linear`, `cross_entropy` | as PrivateUse1 has them | nothing to do |
| attention on Hopper, Blackwell | cuDNN before flash; saves the same sizes (`sdp_utils.cpp`) | as flash |
| cuDNN's workspaces | known to cuDNN alone; a convolution's often tens of MiB | not, but for flash's in attention |
| attention's backward, efficient | fp32 accumulators in fp16 and bf16 | not: up to 4 bytes per element of q, k, v |
| `log_softmax(fp16, dtype=float32)` | no fp32 copy of its input | not: 4 bytes per logit too much, for a moment |
| `LSTM`, `GRU` | one cuDNN kernel | not: LSTMs are planned cell by cell, GRUs cannot be |
| norms' backward, reductions, sorts | partial results | not: below 5 MiB at language models' sizes |

A kernel's scratch is allocated right after its results, and freed before anything else is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def register() -> torch.library.Library:
    """Maps the differences for the simulated device.

    Returns:
        What keeps the registrations alive.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    # `rms_norm` calls the fused operator, which is taken apart on a device that has no kernel for it. None ever runs.
    library.impl("_fused_rms_norm", _unreachable, "PrivateUse1")
    for operator, scratch in SCRATCH.items():
        library.impl(operator._schema.name, partial(_with_scratch, operator, scratch), "AutogradPrivateUse1")
    return library


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the simulated device computes nothing")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` with CUDA's choice of kernel (`attention.cpp`, `sdp_utils.cpp`)."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    dense = query.dim() == 4 and len({t.shape[0] for t in (query, key, value)}) == 1
    dense = dense and all(t.stride(-1) == 1 for t in (query, key, value))
    grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    head_dims = [t.shape[-1] for t in (query, key, value)]
    square = query.shape[-2] == key.shape[-2]
    if (
        dense and half and attn_mask is None and len(set(head_dims)) == 1 and head_dims[0] <= 256
        and (square or not is_causal)
    ):  # fmt: skip
        padding = -head_dims[0] % 8
        scale = head_dims[0] ** -0.5 if scale is None else scale
        padded = (F.pad(t, (0, padding)) if padding else t for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return out[..., : head_dims[0]] if padding else out
    aligned = all(size % (8 if half else 4) == 0 for size in head_dims)
    if dense and (half or query.dtype == torch.float32) and not grouped and aligned:
        if attn_mask is not None:
            attn_mask = _attention_bias(attn_mask, query, key)
        needs_grad = any(t.requires_grad for t in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _attention_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the memory-efficient kernel takes it: added to the scores, rows aligned to 8 elements."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if padding := -mask.shape[-1] % 8:
        mask = F.pad(mask, (0, padding))[..., :-padding]
    return mask.expand(*query.shape[:3], key.shape[2])


def _with_scratch(operator: OpOverload, scratch: Callable[..., Sequence[int]], *args: Any, **kwargs: Any) -> Any:
    """Runs a backward operator, which is not differentiated again, and takes its kernel's scratch for a moment."""
    with torch._C._AutoDispatchBelowAutograd():
        out = operator(*args, **kwargs)
        taken = [torch.empty(nbytes, dtype=torch.uint8, device=args[0].device) for nbytes in scratch(*args)]
        del taken
    return out


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: Any) -> list[int]:
    """`mha_bwd` in `flash_attn/flash_api.cpp`, not deterministic; sizes in bytes, in the order of allocation."""
    batch, heads, seq, head_dim = query.shape
    seq_rounded = _round_up(seq, 128)
    copies = [t.nbytes for t in (grad, out) if not t.transpose(1, 2).is_contiguous()]
    softmax_d = 4 * batch * heads * seq_rounded
    dq_accum = 4 * batch * heads * seq_rounded * _round_up(head_dim, 32 if head_dim <= 128 else 64)
    expanded = query.element_size() * batch * heads * key.shape[2] * head_dim  # of dk and of dv, one head for each of q
    return [*copies, softmax_d, dq_accum, *([expanded] * 2 if key.shape[1] != heads else [])]


def _embedding_backward(grad: Tensor, indices: Tensor, num_weights: int, *_: Any) -> list[int]:
    """`embedding_dense_backward_cuda` and `embedding_backward_cuda_kernel`; sizes in bytes."""
    tokens = indices.numel()
    if tokens <= 3072:  # one kernel that needs none
        return []
    segments = min(tokens, num_weights)
    partial_segments = tokens // 10 + segments  # NROWS_PER_THREAD
    index = indices.element_size()
    sizes = [
        tokens,
        tokens,
        segments,
        segments,
        segments,
        partial_segments,
    ]  # sorted, original, segments' and partials'
    return [*(index * size for size in sizes), 4 * partial_segments * grad.shape[-1]]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# Backward operators, and the bytes that their kernels take beside their results.
SCRATCH: dict[OpOverload, Callable[..., Sequence[int]]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}
