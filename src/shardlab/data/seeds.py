"""Seeds that are the same in every process, on every machine and in every Python release."""

import hashlib


def stable_seed(*parts: int | str) -> int:
    """Makes one seed of several parts, e.g. a run's seed and a sample's number.

    Python's `hash` of a string differs between processes, and a sum of parts makes neighbours collide.

    Args:
        parts: what the seed is to depend on, in order.

    Returns:
        An integer in [0, 2**63), fit for `torch.Generator.manual_seed`.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
