"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU (arXiv 2302.13971, 2407.21783).

Weights follow PyTorch's own convention: every module that owns parameters or buffers has `reset_parameters()`. Built on
the meta device and moved with `to_empty`, the model is initialised by calling it on every module, children first. A
block, and then the whole model, set their linear layers' weights again: the scales depend on depth and width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.errors import ConfigError
from shardlab.models.checks import require_positive

INIT_STD = 0.02  # GPT-2's; torchtitan's Llama has it too


def rope_table(max_seq_len: int, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Tabulate the rotations of rotary position embedding (arXiv 2104.09864, eq. 15).

    Args:
        max_seq_len: Positions.
        head_dim: Size of one attention head; even.
        theta: Base of the wavelengths, which run from 2 pi to 2 pi theta.
        device: Where the table is computed.

    Returns:
        (max_seq_len, head_dim / 2, 2) fp32: cosine and sine of `position * theta ** (-2 i / head_dim)`.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim  # (head_dim / 2,)
    positions = torch.arange(max_seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)  # (max_seq_len, head_dim / 2)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate neighbouring pairs of features by their position's angles, in fp32.

    Args:
        x: (batch, seq, heads, head_dim).
        rope: (seq, head_dim / 2) complex64 rotations.

    Returns:
        As `x`, in its dtype.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (batch, seq, heads, head_dim / 2)
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; `heads // kv_heads` query heads share one key and value head (arXiv 2305.13245)."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.groups = heads // kv_heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Attend to earlier positions.

        Args:
            x: (batch, seq, dim).
            rope: (seq, head_dim / 2) complex64.

        Returns:
            (batch, seq, dim).
        """
        heads = (-1, self.head_dim)
        q = rotate(self.wq(x).unflatten(-1, heads), rope).transpose(1, 2)  # (batch, heads, seq, head_dim)
        k = rotate(self.wk(x).unflatten(-1, heads), rope).transpose(1, 2)  # (batch, kv_heads, seq, head_dim)
        v = self.wv(x).unflatten(-1, heads).transpose(1, 2)
        # Flash and cuDNN know grouped heads. In fp32 CUDA has the memory-efficient kernel alone, which learned of them
        # only with pytorch#191085: enable_gqa would silently take the math path, with its (seq, seq) matrices.
        if self.groups > 1 and q.dtype == torch.float32:
            k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position, (..., dim) to (..., dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, norm_eps: float) -> None:
        super().__init__()
        # Each layer adds twice to the residual stream: scaled so, its variance does not grow with depth (GPT-2, 2.3).
        self.residual_std = INIT_STD / (2 * layers) ** 0.5
        self.attention = Attention(dim, heads, kv_heads)
        self.feed_forward = FeedForward(dim, ffn_dim)
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the block's projections; its norms have set themselves to one."""
        # Not trunc_normal_: torch 2.13 draws again until all values fit, and neither a fake tensor nor a rank with some
        # of the rows can tell when that is.
        attention, feed_forward = self.attention, self.feed_forward
        for linear in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
            nn.init.normal_(linear.weight, std=INIT_STD)
        for linear in (attention.wo, feed_forward.w2):
            nn.init.normal_(linear.weight, std=self.residual_std)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Add the block's two updates to the residual stream.

        Args:
            x: (batch, seq, dim).
            rope: (seq, head_dim / 2) complex64.

        Returns:
            (batch, seq, dim).
        """
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Llama-style decoder from token ids to logits.

    Args:
        vocab_size: Token ids that the embedding accepts, and logits per position.
        dim: Width of the residual stream.
        layers: Blocks.
        heads: Query heads; `dim / heads` must be even.
        kv_heads: Key and value heads; a divisor of `heads`.
        ffn_dim: Hidden width of the feed-forward layers.
        max_seq_len: Positions in the rotary table.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: One matrix as embedding and output. Both must then lie in one FSDP unit, or in the root.

    Raises:
        ConfigError: Sizes that do not fit together.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        ffn_dim: int,
        max_seq_len: int,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        require_positive(vocab_size=vocab_size, dim=dim, layers=layers, heads=heads)
        require_positive(kv_heads=kv_heads, ffn_dim=ffn_dim, max_seq_len=max_seq_len)
        if dim % (2 * heads):
            raise ConfigError(
                f"model.dim={dim} must be a multiple of twice model.heads={heads}, for heads of equal and even size"
            )
        if heads % kv_heads:
            raise ConfigError(f"model.kv_heads={kv_heads} must divide model.heads={heads}: each serves equally many")
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.head_dim = dim // heads
        self.rope_theta = rope_theta
        self.tie_embeddings = tie_embeddings
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            TransformerBlock(dim, layers, heads, kv_heads, ffn_dim, norm_eps) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.rope: Tensor
        self.register_buffer("rope", torch.empty(max_seq_len, self.head_dim // 2, 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise embedding and output, tie them again, and compute the rotary table on the device where it lies."""
        # A new table, not copy_: a model moved to bf16 as a whole gets its angles back in fp32.
        self.rope = rope_table(self.max_seq_len, self.head_dim, self.rope_theta, self.rope.device)
        nn.init.normal_(self.tok_embeddings.weight)  # as torchtitan's Llama; RMSNorm follows before anything else
        if self.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight  # to_empty gave each module a parameter of its own
        nn.init.normal_(self.output.weight, std=self.output.in_features**-0.5)  # logits of variance one

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict each position's next token.

        Args:
            tokens: (batch, seq) token ids, int64.

        Returns:
            Logits (batch, seq, vocab_size) in the compute dtype.

        Raises:
            ConfigError: The sequence is longer than the rotary table.
        """
        seq_len = tokens.shape[1]
        if seq_len > self.max_seq_len:
            raise ConfigError(
                f"data.seq_len={seq_len} is longer than model.max_seq_len={self.max_seq_len}: "
                "lower the one, or raise the other"
            )
        # Complex, because FSDP2 casts floating-point inputs of its units to param_dtype, and bf16 angles are useless.
        # On a CPU it is also more than twice as fast, forward and backward, as cosines and sines apart.
        rope = torch.view_as_complex(self.rope[:seq_len].float())  # (seq, head_dim / 2)
        x = self.tok_embeddings(tokens)  # (batch, seq, dim)
        for layer in self.layers:
            x = layer(x, rope)
        return self.output(self.norm(x))  # (batch, seq, vocab_size)
