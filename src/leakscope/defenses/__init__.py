"""Protections of the update, one a file. The same object serves the audit and utility training."""

from collections.abc import Mapping
from types import MappingProxyType

from leakscope.defenses.accounting import epsilon_of, noise_multiplier_for
from leakscope.defenses.dp_sgd import DPSGD
from leakscope.defenses.fake_gradients import FakeGradients
from leakscope.defenses.gradient_noise import GradientNoise
from leakscope.defenses.gradient_pruning import GradientPruning
from leakscope.federation import Defense

DEFENSES: Mapping[str, type[Defense]] = MappingProxyType(
    {
        "gradient-noise": GradientNoise,
        "gradient-pruning": GradientPruning,
        "fake-gradients": FakeGradients,
        "dp-sgd": DPSGD,
    }
)

__all__ = [
    "DEFENSES",
    "DPSGD",
    "Defense",
    "FakeGradients",
    "GradientNoise",
    "GradientPruning",
    "epsilon_of",
    "noise_multiplier_for",
]
