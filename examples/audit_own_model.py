"""Audit a model class of your own on numpy arrays, and print the verdict with what to do about it."""

import numpy as np
import torch

import leakscope as ls


class Net(torch.nn.Module):
    """A model as you have one: inputs in, logits out."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(features, 16)
        self.out = torch.nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(x)))


def main() -> None:
    random = np.random.default_rng(0)
    x = random.random((40, 12), dtype=np.float32)  # forty people, twelve columns scaled to [0, 1]
    y = random.integers(0, 3, 40)
    torch.manual_seed(0)  # audit the weights that will go out: load them here

    audit = ls.audit(model=Net(12, 3), data=(x, y), examples=2, attacks=["linear-layer"], findings=False)

    print(audit.verdict.outcome)
    for reason in audit.verdict.reasons:
        print("-", reason)


if __name__ == "__main__":
    main()
