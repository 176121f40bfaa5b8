"""Checks of constructor arguments that the models share."""

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
