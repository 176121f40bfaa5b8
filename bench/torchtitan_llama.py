"""Llama as torchtitan composed it until 2025: the same model in other operators, which keep other activations.

torchtitan's published figures (bench/published.py) are of this composition; presets plan shardlab's own model, unless
`model._target_=bench.torchtitan_llama.Transformer` says otherwise. Different from shardlab's:

- RMSNorm in single operators, partly in fp32 (torchtitan/models/norms.py, until torchtitan#985); CUDA had no fused
  kernel before pytorch#153666.
- keys and values are repeated for the query heads in memory, where `enable_gqa` reads them several times;
- logits in fp32 made by the model and, until torchtitan#391 (June 2024), kept to the end of the next step's forward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.models import transformer


class RMSNorm(nn.RMSNorm):
    """Normalises in fp32, scales in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None  # the model gives it
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(transformer.Attention):
    """Rotates queries and keys together, and repeats keys and values."""

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        pairs = [torch.view_as_complex(t.float().unflatten(-1, (-1, 2))) for t in (q, k)]
        turned = [torch.view_as_real(t * rope[:, None]).flatten(3) for t in pairs]
        q, k = (t.type_as(x) for t in turned)
        del pairs, turned
        keys, values = (self._repeat(t) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
        )
        return self.wo(out.transpose(1, 2).flatten(2))

    def _repeat(self, x: Tensor) -> Tensor:
        """(batch, seq, kv_heads, head_dim) to (batch, seq, heads, head_dim)."""
        return x if self.groups == 1 else x.unsqueeze(3).expand(-1, -1, -1, self.groups, -1).flatten(2, 3)


class Transformer(transformer.Transformer):
    """`shardlab.models.transformer.Transformer`, composed so.

    Args:
        keep_logits: as torchtitan did before torchtitan#391.
        **sizes: as there.
    """

    def __init__(self, *, keep_logits: bool = False, **sizes: Any):
        super().__init__(**sizes)
        self.keep_logits = keep_logits
        self.logits: Tensor | None = None
        for module in self.modules():  # same parameters, other forward
            if type(module) is nn.RMSNorm:
                module.__class__ = RMSNorm
            elif type(module) is transformer.Attention:
                module.__class__ = Attention

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if self.keep_logits:
            logits = self.logits = logits.float()
        return logits
