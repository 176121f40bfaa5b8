"""Loss, perplexity and accuracy over all ranks, as torchmetrics accumulates them."""

import math

import torch
from torchmetrics import MeanMetric, MetricCollection


class Quality:
    """Means weighted by valid labels, over the steps since the last `compute` and over all ranks.

    The step hands over sums, so these are exact means over labels. Nothing is read from the device before `compute`.
    (torchmetrics' own Perplexity would make a softmax of all logits; the mean loss says the same.)
    """

    def __init__(self, device: torch.device):
        # nan_strategy: any other would wait for the device at each update.
        self._means = MetricCollection(
            {
                "loss": MeanMetric(nan_strategy="disable"),
                "accuracy": MeanMetric(nan_strategy="disable"),
            },
            compute_groups=False,
        ).to(device)

    def update(self, loss_sum: torch.Tensor, correct: torch.Tensor, valid: torch.Tensor) -> None:
        """Args: 0-d tensors on the device, of this rank: summed loss, correct predictions, valid labels."""
        labels = valid.clamp(min=1)
        self._means["loss"].update(loss_sum / labels, weight=valid)
        self._means["accuracy"].update(correct / labels, weight=valid)

    def compute(self) -> dict[str, float]:
        """`loss` (nats), `perplexity`, `accuracy` (0 to 1) since the last call. Collective; waits for the device."""
        means = {name: value.item() for name, value in self._means.compute().items()}
        self._means.reset()
        loss = means["loss"]
        means["perplexity"] = math.inf if loss > 700 else math.exp(loss)  # e^709 is the largest float
        return means
