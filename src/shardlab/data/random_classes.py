"""Random features with classes that can be learned from them."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardlab.data.checks import check_int, check_split
from shardlab.data.seeds import stable_seed


class RandomClasses(Dataset[tuple[Tensor, Tensor]]):
    """Normal random features; a fixed random linear teacher says which class they are.

    `dataset[i]` is (inputs, label): (features,) float32 and () int64, and depends on (seed, split, i) alone. Both
    parts share the teacher, so what is learned from one holds for the other.

    Args:
        features: numbers per sample.
        classes: labels are in [0, classes).
        samples: samples in the training part.
        seed: of teacher and features.
        eval_samples: samples in the held-out part.
        split: "train" or "eval".

    Raises:
        ConfigError: a setting is out of its range.
    """

    def __init__(
        self, features: int, classes: int, samples: int, seed: int, eval_samples: int = 256, split: str = "train"
    ) -> None:
        check_int("features", features, minimum=1)
        check_int("classes", classes, minimum=2)
        check_int("samples", samples, minimum=1)
        check_int("eval_samples", eval_samples, minimum=1)
        check_split(split)
        self.features = features
        self.samples = samples if split == "train" else eval_samples
        self.seed = seed
        self.split = split
        teacher = torch.Generator().manual_seed(stable_seed("teacher", seed))
        self.teacher = torch.randn(classes, features, generator=teacher)  # (classes, features)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        generator = torch.Generator().manual_seed(stable_seed("features", self.seed, self.split, index))
        inputs = torch.randn(self.features, generator=generator)
        return inputs, (self.teacher @ inputs).argmax()
