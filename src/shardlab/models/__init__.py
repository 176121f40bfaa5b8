"""Models that `model._target_` can name; any `nn.Module` of the user's own will do as well."""

from shardlab.models.hf import CausalLM
from shardlab.models.mlp import MLP
from shardlab.models.transformer import Transformer

__all__ = ["MLP", "CausalLM", "Transformer"]
