"""Attacks, one paper a file, and the table that names them."""

from __future__ import annotations

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
    """``standard_for``: kinds of messages for which ``attacks="standard"`` has it; see :func:`standard_attacks`.

    ``standard_with``: a power over the model without which it is not standard.
    """

    standard_for: tuple[str, ...] = ()
    standard_with: str | None = None


_ONE_UPDATE = ("gradient", "weight_delta")
#: In the order in which an audit runs them: closed forms first, then the strongest.
ATTACKS: Registry[AttackEntry] = Registry(
    "attack",
    (
        AttackEntry(
            "linear-layer",
            LinearLayer,
            "closed form for a first linear layer: one input exactly, the span of a batch",
            "Phong et al., 2018; Geiping et al., 2020",
            standard_for=_ONE_UPDATE,
        ),
        AttackEntry(
            "cocktail-party",
            CocktailParty,
            "unmix the first dense layer's gradient into the inputs of a batch, then solve for them exactly",
            "Kariyappa et al., Cocktail Party Attack, ICML 2023",
            standard_for=_ONE_UPDATE,
        ),
        AttackEntry(
            "gauss-newton",
            GaussNewton,
            "second-order least squares on the gradient: exact in a handful of steps on smooth nets",
            "Levenberg 1944, Marquardt 1963; this project's own use of them",
            standard_for=_ONE_UPDATE,
        ),
        AttackEntry(
            "head-first",
            HeadFirst,
            "solve the head, match below it, decode ReLU masks and solve: the strongest on trained nets and batches",
            "this project's own",
            standard_for=_ONE_UPDATE,
        ),
        AttackEntry(
            "inverting-gradients",
            InvertingGradients,
            "match the update's direction under total variation; gradients and unrolled weight updates",
            "Geiping et al., Inverting Gradients, NeurIPS 2020",
            standard_for=_ONE_UPDATE,
        ),
        AttackEntry(
            "dlg",
            DLG,
            "search inputs and labels together by L-BFGS",
            "Zhu, Liu, Han, Deep Leakage from Gradients, NeurIPS 2019",
        ),
        AttackEntry(
            "idlg",
            IDLG,
            "read the label off the last layer, then search the input by L-BFGS",
            "Zhao, Mopuri, Bilen, iDLG, 2020",
            # Behind head-first in dB on nets with kinks, and yet: under strong noise on a ConvNet 5 of 6 pictures were
            # identified by it, where head-first and inverting-gradients had 1.
            standard_for=_ONE_UPDATE,
        ),
        AttackEntry(
            "sapag", SAPAG, "match tensor by tensor under an adaptive Gaussian kernel", "Wang et al., SAPAG, 2020"
        ),
        AttackEntry(
            "learn-from-gradients",
            LearnFromGradients,
            "L-BFGS or Adam with a decaying norm or orthogonality prior",
            "Qian, Hansen, What Can We Learn from Gradients?, 2021",
        ),
        AttackEntry(
            "rgap",
            RGAP,
            "solve a chain of layers one by one from the output, without a search",
            "Zhu, Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021",
        ),
        AttackEntry(
            "hybrid",
            Hybrid,
            "solve layer by layer as R-GAP, search where the equations leave something open",
            "Chen, Campbell, Analysing Training-Data Leakage from Gradients through Linear Systems and Gradient "
            "Matching, BMVC 2022",
        ),
        AttackEntry(
            "sme",
            SME,
            "match a weight update by one gradient at a searched point between both ends; needs no recipe",
            "Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023",
            standard_for=("weight_delta",),
        ),
        AttackEntry(
            "dlfa",
            DLFA,
            "replay every local step of a weight update, one copy of the examples an epoch",
            "Dimitrov et al., Data Leakage in Federated Averaging, TMLR 2022",
        ),
        AttackEntry(
            "systematic",
            SystematicEvaluation,
            "a network draws the pictures; tensors count by their size, and known features lead the way",
            "Liu et al., Data Reconstruction Attacks and Defenses: A Systematic Evaluation",
        ),
        AttackEntry(
            "learning-to-invert",
            LearningToInvert,
            "learn the way back from protected updates to inputs with examples of one's own; any defence, no channel",
            "Wu et al., Learning To Invert: Simple Adaptive Attacks for Gradient Inversion in Federated Learning, "
            "UAI 2023",
        ),
        AttackEntry(
            "cafe",
            CAFE,
            "vertical: solve each sample's part in the first dense layers from announced batches, then search the data",
            "Jin et al., CAFE: Catastrophic Data Leakage in Vertical Federated Learning, NeurIPS 2021",
            standard_for=("rounds",),
        ),
        AttackEntry(
            "robbing-the-fed",
            RobbingTheFed,
            "malicious server: an imprint block before the model, from whose bins inputs are read off exactly",
            "Fowl et al., Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models, "
            "ICLR 2022",
            standard_for=_ONE_UPDATE,
            standard_with="choose_structure",
        ),
        AttackEntry(
            "provable-reconstruction",
            ProvableReconstruction,
            "malicious server: a first layer of random units, whose gradient's moments tell a batch's inputs apart",
            "Wang, Lee, Lei, Reconstructing Training Data from Model Gradient, Provably, AISTATS 2023",
        ),
    ),
    Attack,
)


#: The strongest search of the table: run once more without its knowledge of the defence, where it has any.
STRONGEST_SEARCH = "head-first"


def standard_attacks(protocols: Iterable[Protocol], knowledge: Knowledge | None = None) -> list[str]:
    """Return the strongest attacks of each kind that fit these protocols, and a model that the server may choose."""
    kinds = {"rounds" if protocol.sends_rounds else protocol.kind for protocol in protocols}
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
