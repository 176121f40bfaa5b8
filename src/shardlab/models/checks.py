"""Checks that the models share: of constructor arguments, and whether the data goes with the model."""

import torch.nn as nn

from shardlab.errors import ConfigError


def require_positive(**sizes: int) -> None:
    """Refuse sizes below 1.

    Args:
        sizes: Values by their name under `model.`.

    Raises:
        ConfigError: Names the first key whose value is no positive integer.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"model.{name}={size} must be a positive integer")


def check_data(model: nn.Module, *, tokens_per_sample: int | None, vocab_size: int | None) -> None:
    """Refuse data with token ids, or positions, that the model does not know.

    Args:
        model: Whose `max_seq_len` and `vocab_size`, where it has them, say what it knows.
        tokens_per_sample: Of the data; None where it has no tokens.
        vocab_size: Token ids of the data, None where that is not known.

    Raises:
        ConfigError: Names both sizes.
    """
    longest, known = getattr(model, "max_seq_len", None), getattr(model, "vocab_size", None)
    if longest and tokens_per_sample and tokens_per_sample > longest:
        raise ConfigError(
            f"data.seq_len={tokens_per_sample} is longer than model.max_seq_len={longest}: lower the one, or raise the "
            "other"
        )
    if vocab_size and known and vocab_size > known:
        raise ConfigError(
            f"model.vocab_size={known} is smaller than the {vocab_size} token ids of the data: set model.vocab_size to "
            f"at least {vocab_size}, or choose other data or another data.tokenizer"
        )
