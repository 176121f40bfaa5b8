"""Objects that the config names by `_target_`: models, data sets, optimizers."""

from collections.abc import Collection, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from shardlab.errors import ConfigError


def make(key: str, config: Mapping[str, Any], *args: Any, without: Collection[str] = (), **kwargs: Any) -> Any:
    """Calls what `config._target_` names.

    Args:
        key: the config key of `config`, for messages.
        config: `_target_` and its keyword arguments.
        *args: positional arguments that the config cannot hold.
        without: keys of `config` that are meant for others.
        **kwargs: more keyword arguments.

    Raises:
        ConfigError: where there is no such target, or it refuses its arguments.
    """
    target = config.get("_target_")
    if not target:
        raise ConfigError(
            f"{key}._target_ is missing: name a class by its full path, e.g. my_package.my_module.MyClass"
        )
    arguments = {name: value for name, value in config.items() if name not in without}
    try:
        return instantiate({"_convert_": "all", **arguments}, *args, **kwargs)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(f"{key}._target_={target} could not be made: {_one_line(cause)}") from error


def _one_line(error: BaseException) -> str:
    """Hydra puts the call's arguments behind the first line of what went wrong, its reason sometimes on the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
