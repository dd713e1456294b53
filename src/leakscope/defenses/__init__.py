"""Protections of the update, one a file. The same object serves the audit and utility training."""

from leakscope.contracts.defense import Chain, Defense
from leakscope.contracts.registry import Entry, Registry
from leakscope.defenses.accounting import epsilon_of, noise_multiplier_for
from leakscope.defenses.compression import GradientDropout, GradientPruning, GradientQuantisation, TopK
from leakscope.defenses.fake_gradients import FakeGradients
from leakscope.defenses.mixup import MixUp
from leakscope.defenses.noise import DPSGD, GradientClipping, GradientNoise
from leakscope.defenses.random_network import NetworkDropout, Precode
from leakscope.defenses.soteria import Soteria

DEFENSES: Registry[Entry] = Registry(
    "defence",
    (
        Entry("gradient-noise", GradientNoise, "Gaussian or Laplace noise on every entry of the update"),
        Entry("gradient-clipping", GradientClipping, "the batch's gradient scaled down to a largest norm"),
        Entry("gradient-pruning", GradientPruning, "the smallest entries of the update set to zero"),
        Entry("top-k", TopK, "only the largest entries of the update sent: pruning, said the other way round"),
        Entry("gradient-dropout", GradientDropout, "entries of the update set to zero at random"),
        Entry("gradient-quantisation", GradientQuantisation, "signs, few bits a value, or half precision"),
        Entry("fake-gradients", FakeGradients, "the update cut down to sorted random numbers, or replaced by them"),
        Entry("dp-sgd", DPSGD, "each example's gradient clipped, and noise for a stated epsilon"),
        Entry("network-dropout", NetworkDropout, "hidden units of the client's network dropped at random"),
        Entry("mixup", MixUp, "weighted means of examples in place of the examples"),
        Entry("soteria", Soteria, "one dense layer's gradient made from a pruned representation"),
        Entry("precode", Precode, "a variational bottleneck in front of the head"),
        Entry("chain", Chain, "several defences, one after another; a list in a spec means this"),
    ),
    Defense,
)
