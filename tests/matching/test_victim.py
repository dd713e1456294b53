"""Operations are counted as torch counts them, without the libraries that it loads for that."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from leakscope.federation import FedSGD
from leakscope.matching import Victim
from leakscope.matching.victim import forward_flops
from leakscope.models import MODELS, build_model


class ManyKinds(nn.Module):
    """What is made of smaller operations, some of it by one kernel: recurrence, attention, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(5, 8, 2, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.convolution = nn.ConvTranspose1d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.attention(self.recurrent(x)[0]).transpose(1, 2)
        return torch.einsum("bcl,bcl->bc", *[self.convolution(features)] * 2)


def counted_by_torch(model: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_every_model_are_those_that_torch_counts(name: str) -> None:
    model, x = build_model(name).eval(), torch.zeros(2, *MODELS[name].input_shape)
    flops = forward_flops(model, x)
    assert flops == counted_by_torch(model, x) > 0
    assert forward_flops(model, torch.cat([x, x])) == 2 * flops


@pytest.mark.parametrize("training", [False, True])
def test_operations_of_other_layers_too(training: bool) -> None:
    model, x = ManyKinds().train(training), torch.zeros(2, 6, 5)
    assert forward_flops(model, x) == counted_by_torch(model, x) > 0


class TwoNames(nn.Module):
    """One weight matrix under two names."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_of_two_names_counts_under_both(tied: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    net, x, y = TwoNames(tied), torch.rand(2, 4, generator=draws), torch.tensor([1, 3])
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=draws))
    victim = Victim.of(FedSGD().observe(net, x, y))
    assert victim.tied is tied
    # Other values than the model's own, as a client has them after a step.
    moved = {name: 2 * value for name, value in victim.tensors.weights.items()}
    ours, _ = victim.gradient(victim.tensors._replace(weights=moved), x, y)
    with torch.no_grad():
        for value in net.parameters():
            value.mul_(2)
    theirs = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    for (name, _), value in zip(net.named_parameters(), theirs, strict=True):
        assert torch.allclose(ours[name], value, atol=1e-6)


#: What each worker of a default audit does, in small.
WITHOUT_COMPILER = """
import sys
import torch
import leakscope as ls
from leakscope.matching import GradientMap
from leakscope.network.gates import read_gated

net = ls.build_model("convnet", input_shape=(3, 8, 8), num_classes=9)
x, y = torch.full((1, 3, 8, 8), 0.3), torch.tensor([4])
seen = ls.FedSGD().observe(net, x, y)
for attack in (ls.attacks.InvertingGradients(iterations=3), ls.attacks.IDLG(iterations=3)):
    attack(seen, seed=0)
read_gated(net, (3, 8, 8), "fc")
products = GradientMap.of(seen, y).linearise(x.flatten())
assert products.backward(products.forward(x.flatten())).norm() > 0
print(*({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)), end="")
"""


@pytest.mark.slow
def test_what_compiles_nothing_does_not_load_the_compiler() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
