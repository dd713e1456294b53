"""Attacks, one paper a file, and the table that names them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from leakscope.attacks.base import (
    FLAGS,
    Attack,
    MissingKnowledge,
    NotApplicable,
    Progress,
    Reconstruction,
)
from leakscope.attacks.cafe import CAFE
from leakscope.attacks.dlfa import DLFA
from leakscope.attacks.dlg import DLG
from leakscope.attacks.gauss_newton import GaussNewton
from leakscope.attacks.gradient_matching import GradientMatching
from leakscope.attacks.hybrid import Hybrid
from leakscope.attacks.idlg import IDLG
from leakscope.attacks.inverting_gradients import InvertingGradients
from leakscope.attacks.learn_from_gradients import LearnFromGradients
from leakscope.attacks.linear_layer import LinearLayer
from leakscope.attacks.rgap import RGAP
from leakscope.attacks.sapag import SAPAG
from leakscope.attacks.sme import SME


@dataclass(frozen=True)
class AttackEntry:
    name: str
    cls: type[Attack]
    summary: str
    paper: str


def _table(*entries: AttackEntry) -> Mapping[str, AttackEntry]:
    return MappingProxyType({entry.name: entry for entry in entries})


ATTACKS: Mapping[str, AttackEntry] = _table(
    AttackEntry(
        "gauss-newton",
        GaussNewton,
        "second-order least squares on the gradient: exact in a handful of steps on smooth nets",
        "Levenberg 1944, Marquardt 1963; this project's own use of them",
    ),
    AttackEntry(
        "inverting-gradients",
        InvertingGradients,
        "match the update's direction under total variation; gradients and unrolled weight updates",
        "Geiping et al., Inverting Gradients, NeurIPS 2020",
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
    ),
    AttackEntry(
        "sapag",
        SAPAG,
        "match tensor by tensor under an adaptive Gaussian kernel",
        "Wang et al., SAPAG, 2020",
    ),
    AttackEntry(
        "learn-from-gradients",
        LearnFromGradients,
        "L-BFGS or Adam with a decaying norm or orthogonality prior",
        "Qian, Hansen, What Can We Learn from Gradients?, 2021",
    ),
    AttackEntry(
        "linear-layer",
        LinearLayer,
        "closed form for a first linear layer: one input exactly, the span of a batch",
        "Phong et al., 2018; Geiping et al., 2020",
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
        "Chen, Campbell, Analysing Training-Data Leakage from Gradients through Linear Systems and Gradient Matching, "
        "BMVC 2022",
    ),
    AttackEntry(
        "sme",
        SME,
        "match a weight update by one gradient at a searched point between both ends; needs no recipe",
        "Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023",
    ),
    AttackEntry(
        "dlfa",
        DLFA,
        "replay every local step of a weight update, one copy of the examples an epoch",
        "Dimitrov et al., Data Leakage in Federated Averaging, TMLR 2022",
    ),
    AttackEntry(
        "cafe",
        CAFE,
        "vertical: solve each sample's part in the first dense layers from announced batches, then search the data",
        "Jin et al., CAFE: Catastrophic Data Leakage in Vertical Federated Learning, NeurIPS 2021",
    ),
)

#: What ``attacks="standard"`` runs: the strongest of each kind; those that do not apply to a model say so.
STANDARD: tuple[str, ...] = ("gauss-newton", "inverting-gradients", "idlg", "linear-layer")
#: ... and besides where clients send weight updates of local training.
STANDARD_WEIGHT_UPDATES: tuple[str, ...] = ("sme",)
#: What it runs instead where workers own different features of the same samples.
STANDARD_VERTICAL: tuple[str, ...] = ("cafe",)


def make_attack(name: str, *, preset: str | None = None, **options: Any) -> Attack:
    """An attack by the name in the table, with options or a published preset.

    >>> make_attack("dlg", iterations=10).iterations
    10
    """
    if name not in ATTACKS:
        near = difflib.get_close_matches(name, ATTACKS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown attack {name!r}: expected one of {', '.join(ATTACKS)}.{hint}")
    cls = ATTACKS[name].cls
    known = [f.name for f in dataclasses.fields(cls) if f.init]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ValueError(f"{name}: unknown option {', '.join(unknown)}; expected some of {', '.join(known)}")
    return cls(**options) if preset is None else cls.preset(preset, **options)


__all__ = [
    "ATTACKS",
    "CAFE",
    "DLFA",
    "DLG",
    "FLAGS",
    "IDLG",
    "RGAP",
    "SAPAG",
    "SME",
    "STANDARD",
    "STANDARD_VERTICAL",
    "STANDARD_WEIGHT_UPDATES",
    "Attack",
    "AttackEntry",
    "GaussNewton",
    "GradientMatching",
    "Hybrid",
    "InvertingGradients",
    "LearnFromGradients",
    "LinearLayer",
    "MissingKnowledge",
    "NotApplicable",
    "Progress",
    "Reconstruction",
    "make_attack",
]
