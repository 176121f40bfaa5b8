"""Data sets, and the batches that each rank takes from them.

What `conf/data/*.yaml` names lies in one file each; the entry point makes it with `split="train"` or `split="eval"`.
"""

from shardlab.data.batches import IGNORE_INDEX, Batch, batches, eval_batches

__all__ = ["IGNORE_INDEX", "Batch", "batches", "eval_batches"]
