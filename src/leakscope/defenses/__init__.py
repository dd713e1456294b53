"""Protections of the update, one a file. The same object serves the audit and utility training."""

from leakscope.contracts.defense import Defense
from leakscope.contracts.registry import Entry, Registry
from leakscope.defenses.accounting import epsilon_of, noise_multiplier_for
from leakscope.defenses.dp_sgd import DPSGD
from leakscope.defenses.fake_gradients import FakeGradients
from leakscope.defenses.gradient_noise import GradientNoise
from leakscope.defenses.gradient_pruning import GradientPruning

DEFENSES: Registry[Entry] = Registry(
    "defence",
    (
        Entry("gradient-noise", GradientNoise, "Gaussian noise on every entry of the update"),
        Entry("gradient-pruning", GradientPruning, "the smallest entries of the update set to zero"),
        Entry("fake-gradients", FakeGradients, "the update cut down to sorted random numbers, or replaced by them"),
        Entry("dp-sgd", DPSGD, "each example's gradient clipped, and noise for a stated epsilon"),
    ),
    Defense,
)
