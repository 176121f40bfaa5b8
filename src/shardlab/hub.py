"""The Hugging Face hub, asked once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Loaded = TypeVar("Loaded")


def from_hub(load: Callable[..., Loaded], name: str, **settings: Any) -> Loaded:
    """Loads by a `from_pretrained` of transformers: from a folder or the cache, else from the hub.

    Without a network, `from_pretrained` itself retries for 20 to 40 seconds, and prints each attempt.

    Args:
        load: a `from_pretrained`.
        name: a folder, or what the hub calls it.
        **settings: of `load`.

    Raises:
        Exception: of many types, where the name leads nowhere.
    """
    import huggingface_hub

    try:
        return load(name, local_files_only=True, **settings)
    except (OSError, ValueError):
        if Path(name).exists():
            raise
    huggingface_hub.HfApi().model_info(name, timeout=10)
    return load(name, **settings)
