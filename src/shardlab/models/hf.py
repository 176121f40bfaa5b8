"""Any causal language model of Hugging Face transformers, built from its config with fresh weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardlab.errors import ConfigError, shorten
from shardlab.hub import from_hub


def load_config(name_or_path: str | None, config: Any) -> Any:
    """Find a model's config.

    Args:
        name_or_path: Hub id, or a folder that holds a `config.json`.
        config: `{"model_type": ..., ...}`, as in a `config.json`; dict or OmegaConf.

    Returns:
        `transformers.PreTrainedConfig`.

    Raises:
        ConfigError: transformers is missing, not exactly one of the two is given, or there is no such config.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError("model=hf needs transformers, which is not installed: pip install transformers") from error
    if (name_or_path is None) == (config is None):
        found = "neither model.name_or_path nor" if config is None else f"both model.name_or_path={name_or_path} and"
        raise ConfigError(
            f"{found} model.config is given: give a hub id or local folder, or else a config with its model_type"
        )
    try:
        if name_or_path is not None:
            # The hub's code never runs here, whatever the config asks for.
            return from_hub(AutoConfig.from_pretrained, name_or_path, trust_remote_code=False)
        values: Any = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
        return AutoConfig.for_model(values.pop("model_type", None), **values)
    except Exception as error:  # OSError, ValueError, KeyError or one of huggingface_hub's own, by version and cause
        key = "config" if name_or_path is None else f"name_or_path={name_or_path}"
        raise ConfigError(f"model.{key} is no config that transformers can build: {shorten(error, 200)}") from error


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Keep transformers from looking for several sequences packed into one row: ours hold one, from position 0 on.

    It would read the positions back from the device in every forward. Fake tensors cannot be read: there it assumes
    packing, and makes a (seq, seq) mask that no real run makes.
    """
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


class CausalLM(nn.Module):
    """An `AutoModelForCausalLM` that maps token ids to logits.

    Weights are fp32 and fresh; transformers takes `F.scaled_dot_product_attention` for every architecture that has it.

    Args:
        name_or_path: Hub id, or a folder that holds a `config.json`.
        config: Instead: the config itself, with its `model_type`.

    Raises:
        ConfigError: See `load_config`; or the config belongs to no causal language model.
    """

    def __init__(self, name_or_path: str | None = None, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        hf_config = load_config(name_or_path, config)
        from transformers import AutoModelForCausalLM

        try:
            # Configs on the hub ask for bf16 weights; what is stored and what computes is decided by `precision`.
            self.model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, trust_remote_code=False)
        except ValueError as error:
            kind = hf_config.model_type
            raise ConfigError(f"model_type={kind} has no causal language model: {shorten(error, 200)}") from error
        text_config = hf_config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.max_seq_len: int | None = getattr(text_config, "max_position_embeddings", None)

    def reset_parameters(self) -> None:
        """Initialise all weights and buffers as transformers does, over what the submodules set themselves."""
        for module in self.model.modules():
            module.__dict__.pop(
                "_is_hf_initialized", None
            )  # set by an earlier call, which would make this one do nothing
        self.model.initialize_weights()
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                zero_row(module.weight, module.padding_idx)
        self.model.tie_weights(recompute_mapping=False)  # to_empty gave each module a parameter of its own

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict each position's next token.

        Args:
            tokens: (batch, seq) token ids, int64.

        Returns:
            Logits (batch, seq, vocab_size).

        Raises:
            ConfigError: The sequence is longer than the model has positions.
        """
        seq_len = tokens.shape[1]
        if self.max_seq_len is not None and seq_len > self.max_seq_len:
            raise ConfigError(
                f"data.seq_len={seq_len} is longer than the model's max_position_embeddings={self.max_seq_len}: "
                "lower the one, or raise the other in model.config"
            )
        with one_sequence_per_row():  # and no attention mask: a causal one is implied, without a (seq, seq) matrix
            return self.model(input_ids=tokens, use_cache=False).logits


def zero_row(weight: Tensor, row: int) -> None:
    """Set one row to zero in place; of a sharded weight too, where `weight[row]` would be a copy.

    Args:
        weight: (rows, ...), plain or a DTensor.
        row: Index of the row.
    """
    keep = torch.ones(weight.shape[0], *[1] * (weight.dim() - 1), device=weight.device, dtype=weight.dtype)
    keep[row] = 0
    if isinstance(weight, DTensor):
        keep = distribute_tensor(keep, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.mul_(keep)
