"""The lecture's SimpleModel: two linear layers with a ReLU between them."""

import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.models.checks import require_positive


class MLP(nn.Module):
    """`fc2(relu(fc1(x)))`.

    Args:
        input_size: Features of a sample.
        hidden_size: Width of the hidden layer.
        output_size: Classes.
    """

    def __init__(self, input_size: int = 10, hidden_size: int = 20, output_size: int = 5) -> None:
        super().__init__()
        require_positive(input_size=input_size, hidden_size=hidden_size, output_size=output_size)
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, output_size)

    def forward(self, x: Tensor) -> Tensor:
        """Classify.

        Args:
            x: (..., input_size), floating point.

        Returns:
            Logits (..., output_size).
        """
        return self.fc2(F.relu(self.fc1(x)))
