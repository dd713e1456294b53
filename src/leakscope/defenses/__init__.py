"""Protections of the update, one a file. The same object serves the audit and utility training."""

from collections.abc import Mapping
from types import MappingProxyType

from leakscope.defenses.gradient_noise import GradientNoise
from leakscope.defenses.gradient_pruning import GradientPruning
from leakscope.federation import Defense

DEFENSES: Mapping[str, type[Defense]] = MappingProxyType(
    {"gradient-noise": GradientNoise, "gradient-pruning": GradientPruning}
)

__all__ = ["DEFENSES", "Defense", "GradientNoise", "GradientPruning"]
