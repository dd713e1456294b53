"""The two nets that the literature calls LeNet: of Deep Leakage from Gradients, and of Surrogate Model Extension."""

from __future__ import annotations

from torch import Tensor, nn

from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Shape
from leakscope.models.common import activation_layer, image_shape, output_size, sequence, sides_after, too_small


def dlg_lenet(
    *, input_shape: Shape, num_classes: int, activation: str = "sigmoid", init: str = "uniform"
) -> nn.Sequential:
    """The net of Deep Leakage from Gradients (Zhu, Liu, Han, NeurIPS 2019) and iDLG.

    Three 5x5 convolutions of 12 filters with strides 2, 2, 1, then one linear layer (768 features for 32x32,
    588 for 28x28). ``init="uniform"`` draws every weight and bias from U(-0.5, 0.5) as that code does; the
    attack lives on the large gradients that this choice gives. ``init="default"`` keeps PyTorch's own.
    """
    if init not in ("uniform", "default"):
        raise UserError(f"dlg-lenet: init: expected 'uniform' or 'default', got {init!r}")
    channels, height, width = image_shape("dlg-lenet", input_shape)
    height, width = sides_after((height, width), kernel=5, strides=(2, 2, 1), padding=2)
    model = sequence(
        conv1=nn.Conv2d(channels, 12, 5, stride=2, padding=2),
        activation1=activation_layer(activation),
        conv2=nn.Conv2d(12, 12, 5, stride=2, padding=2),
        activation2=activation_layer(activation),
        conv3=nn.Conv2d(12, 12, 5, stride=1, padding=2),
        activation3=activation_layer(activation),
        flatten=nn.Flatten(),
        fc=nn.Linear(12 * height * width, num_classes),
    )
    if init == "uniform":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


class LeNetTanh(nn.Module):
    """LeNet-5 with tanh and padded average pooling; returns probabilities, which the loss takes for logits.

    The net of Surrogate Model Extension (ICML 2023). Its published code ends in a softmax and feeds that to
    the cross-entropy, which applies another; ``softmax=False`` gives the usual logits instead.
    """

    def __init__(self, *, input_shape: Shape, num_classes: int, softmax: bool = True) -> None:
        super().__init__()
        channels, height, width = image_shape("lenet-tanh", input_shape)
        for _ in range(2):
            height = output_size(output_size(height, kernel=5), kernel=2, stride=2, padding=1)
            width = output_size(output_size(width, kernel=5), kernel=2, stride=2, padding=1)
            if min(height, width) < 2:
                raise too_small("lenet-tanh", input_shape, "two 5x5 convolutions without padding need 10 pixels a side")
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.AvgPool2d(2, 2, padding=1)
        self.activation = nn.Tanh()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(16 * height * width, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)
        self.output = nn.Softmax(dim=1) if softmax else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.activation(self.conv1(x)))
        x = self.pool(self.activation(self.conv2(x)))
        x = self.activation(self.fc1(self.flatten(x)))
        x = self.activation(self.fc2(x))
        return self.output(self.fc3(x))
