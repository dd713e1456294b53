"""Attacks, one paper a file, and the table that names them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from leakscope.attacks.cafe import CAFE
from leakscope.attacks.cocktail_party import CocktailParty
from leakscope.attacks.dlfa import DLFA
from leakscope.attacks.dlg import DLG
from leakscope.attacks.gauss_newton import GaussNewton
from leakscope.attacks.gradient_matching import GradientMatching
from leakscope.attacks.head_first import HeadFirst
from leakscope.attacks.hybrid import Hybrid
from leakscope.attacks.idlg import IDLG
from leakscope.attacks.inverting_gradients import InvertingGradients
from leakscope.attacks.learn_from_gradients import LearnFromGradients
from leakscope.attacks.learning_to_invert import LearningToInvert
from leakscope.attacks.linear_layer import LinearLayer
from leakscope.attacks.provable_reconstruction import ProvableReconstruction
from leakscope.attacks.rgap import RGAP
from leakscope.attacks.robbing_the_fed import RobbingTheFed
from leakscope.attacks.sapag import SAPAG
from leakscope.attacks.sme import SME
from leakscope.attacks.systematic_evaluation import SystematicEvaluation
from leakscope.contracts.attack import Attack, MissingKnowledge, NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.registry import Entry, Registry


@dataclass(frozen=True)
class AttackEntry(Entry):
    """``standard_for``: kinds of messages for which "standard" has it; ``standard_with``: a power it then needs."""

    standard_for: tuple[str, ...] = ()
    standard_with: str | None = None


def _entry(
    name: str, target: type[Attack], source: str, standard_for: tuple[str, ...] = (), **facts: Any
) -> AttackEntry:
    line = (target.__doc__ or "").partition("\n")[0].removesuffix(".")
    return AttackEntry(name, target, line[:1].lower() + line[1:], source, standard_for, **facts)


_ONE = ("gradient", "weight_delta")
#: In the order in which an audit runs them: closed forms first, then the strongest.
ATTACKS: Registry[AttackEntry] = Registry(
    "attack",
    (
        _entry("linear-layer", LinearLayer, "Phong et al., 2018; Geiping et al., 2020", _ONE),
        _entry("cocktail-party", CocktailParty, "Kariyappa et al., Cocktail Party Attack, ICML 2023", _ONE),
        AttackEntry(
            *("head-first", HeadFirst),
            "solve the head, match below it, decode ReLU masks and solve: the strongest on trained nets and batches",
            *("this project's own", _ONE),
        ),
        AttackEntry(
            *("gauss-newton", GaussNewton),
            "second-order least squares on the gradient: exact in a handful of steps on smooth nets",
            *("Levenberg 1944, Marquardt 1963; this project's own use of them", _ONE),
        ),
        _entry("inverting-gradients", InvertingGradients, "Geiping et al., Inverting Gradients, NeurIPS 2020", _ONE),
        _entry("dlg", DLG, "Zhu, Liu, Han, Deep Leakage from Gradients, NeurIPS 2019"),
        # Behind head-first in dB on nets with kinks, and yet: under strong noise on a ConvNet 5 of 6 pictures were
        # identified by it, where head-first and inverting-gradients had 1.
        _entry("idlg", IDLG, "Zhao, Mopuri, Bilen, iDLG, 2020", _ONE),
        _entry("sapag", SAPAG, "Wang et al., SAPAG, 2020"),
        _entry("learn-from-gradients", LearnFromGradients, "Qian, Hansen, What Can We Learn from Gradients?, 2021"),
        _entry("rgap", RGAP, "Zhu, Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021"),
        _entry(
            *("hybrid", Hybrid),
            "Chen, Campbell, Analysing Training-Data Leakage from Gradients through Linear Systems and Gradient "
            "Matching, BMVC 2022",
        ),
        _entry("sme", SME, "Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023", ("weight_delta",)),
        _entry("dlfa", DLFA, "Dimitrov et al., Data Leakage in Federated Averaging, TMLR 2022"),
        _entry(
            *("systematic", SystematicEvaluation),
            "Liu et al., Data Reconstruction Attacks and Defenses: A Systematic Evaluation",
        ),
        _entry(
            *("learning-to-invert", LearningToInvert),
            "Wu et al., Learning To Invert: Simple Adaptive Attacks for Gradient Inversion in Federated Learning, "
            "UAI 2023",
        ),
        _entry(
            *("cafe", CAFE, "Jin et al., CAFE: Catastrophic Data Leakage in Vertical Federated Learning, NeurIPS 2021"),
            standard_for=("rounds",),
        ),
        _entry(
            *("robbing-the-fed", RobbingTheFed),
            "Fowl et al., Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models, "
            "ICLR 2022",
            standard_for=_ONE,
            standard_with="choose_structure",
        ),
        _entry(
            *("provable-reconstruction", ProvableReconstruction),
            "Wang, Lee, Lei, Reconstructing Training Data from Model Gradient, Provably, AISTATS 2023",
        ),
    ),
    Attack,
)


#: The strongest search of the table: run once more without its knowledge of the defence, where it has any.
STRONGEST_SEARCH = "head-first"


def message_kind(protocol: Protocol) -> str:
    """Return what a client sends under this protocol, as the table of attacks names it."""
    return "rounds" if protocol.sends_rounds else protocol.kind


def standard_attacks(protocols: Iterable[Protocol], knowledge: Knowledge | None = None) -> list[str]:
    """Return the strongest attacks of each kind that fit these protocols, and a model that the server may choose."""
    kinds = {message_kind(protocol) for protocol in protocols}
    fitting = [entry for entry in ATTACKS.values() if kinds & set(entry.standard_for)]
    return [
        entry.name
        for entry in fitting
        if entry.standard_with is None or (knowledge is not None and knowledge.grants(entry.standard_with))
    ]


def make_attack(name: str, *, preset: str | None = None, **options: Any) -> Attack:
    """An attack by the name in the table or ``package.module:Class``, with options or a published preset.

    >>> make_attack("dlg", iterations=10).iterations
    10
    """
    cls: type[Attack] = ATTACKS.target(name)
    return cls.build(options if preset is None else {**cls.published(preset), **options})
