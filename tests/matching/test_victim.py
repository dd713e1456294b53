"""Operations are counted as torch counts them, without the libraries that it loads for that."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

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


#: The attacks of the default audit, cut short, and its findings.
WITHOUT_COMPILER = """
import sys
import leakscope as ls

tiles = ls.load_data("tiles", limit=4)
small = ls.data.from_tensors(tiles.x[:, :, ::4, ::4], tiles.y, private=False)
net = ls.build_model("one-layer-cnn", input_shape=small.shape, num_classes=9)
attacks = [{name: {"iterations": 20}} for name in ("head-first", "inverting-gradients", "idlg")]
result = ls.audit(model=net, data=small, examples=1, attacks=attacks, controls=False, executor="serial")
assert [row.status for row in result.rows] == 3 * ["done"]
print(*({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)), end="")
"""


def test_an_audit_that_compiles_nothing_does_not_load_the_compiler() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
