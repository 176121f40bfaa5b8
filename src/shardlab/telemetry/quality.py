"""Loss, perplexity and accuracy over all ranks, as torchmetrics accumulates them."""

import math

import torch
from torchmetrics import Metric


class Quality:
    """Means over valid labels, of the steps since the last `compute` and of all ranks.

    The step hands over sums, so these are exact means over labels. Nothing is read from the device before `compute`.
    (torchmetrics' own Perplexity would make a softmax of all logits; the mean loss says the same.)
    """

    def __init__(self, device: torch.device):
        self._means = _MeansOverLabels().to(device)

    def update(self, loss_sum: torch.Tensor, correct: torch.Tensor, valid: torch.Tensor) -> None:
        """Args: 0-d tensors on the device, of this rank: summed loss, correct predictions, valid labels."""
        self._means.update(loss_sum, correct, valid)

    def compute(self) -> dict[str, float]:
        """`loss` (nats), `perplexity`, `accuracy` (0 to 1) since the last call. Collective; waits for the device."""
        means = {name: value.item() for name, value in self._means.compute().items()}
        self._means.reset()
        loss = means["loss"]
        means["perplexity"] = math.inf if loss > 700 else math.exp(loss)  # e^709 is the largest float
        return means


class _MeansOverLabels(Metric):
    """Sums, and their quotients.

    Not MeanMetric: with `nan_strategy="disable"` it forgets the weights (Lightning-AI/torchmetrics#3434), and with any
    other it waits for the device at each update.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.loss_sum: torch.Tensor
        self.correct: torch.Tensor
        self.valid: torch.Tensor
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("correct", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("valid", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_sum: torch.Tensor, correct: torch.Tensor, valid: torch.Tensor) -> None:
        self.loss_sum += loss_sum
        self.correct += correct
        self.valid += valid

    def compute(self) -> dict[str, torch.Tensor]:
        return {"loss": self.loss_sum / self.valid, "accuracy": self.correct / self.valid}
