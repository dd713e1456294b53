"""iDLG: Improved Deep Leakage from Gradients. Bo Zhao, Konda Reddy Mopuri, Hakan Bilen. 2020.

The label of a single example is read off the last layer, then DLG searches the input alone with the label fixed.

Differences: the label comes from the bias gradient where the head has a bias, which is exact for every activation; the
published rule (smallest row sum of the weight gradient) serves heads without one. Batches are allowed, their labels
found by counting. Otherwise as :mod:`leakscope.attacks.dlg`.
"""

from dataclasses import dataclass

from leakscope.attacks.dlg import DLG
from leakscope.attacks.gradient_matching import LABELS, LabelChoice
from leakscope.contracts.settings import setting


@dataclass(frozen=True, kw_only=True)
class IDLG(DLG):
    """Read the label off the last layer, then search the input by L-BFGS."""

    labels: LabelChoice = setting("recover", LABELS)
