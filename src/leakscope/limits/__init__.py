"""What theory says before any attack: counts, published conditions, and the rank of the gradient's Jacobian."""

from leakscope.limits.counting import (
    Filters,
    HiddenUnits,
    SingleExample,
    features_bound,
    filters,
    filters_bound,
    hidden_units,
    hidden_units_bound,
    output_side,
    single_example,
)
from leakscope.limits.jacobian import MAX_ENTRIES, MAX_UNKNOWNS, JacobianRank, jacobian_rank, rank_of
from leakscope.limits.propositions import Proposition
from leakscope.limits.report import Limits, limits

__all__ = [
    "MAX_ENTRIES",
    "MAX_UNKNOWNS",
    "Filters",
    "HiddenUnits",
    "JacobianRank",
    "Limits",
    "Proposition",
    "SingleExample",
    "features_bound",
    "filters",
    "filters_bound",
    "hidden_units",
    "hidden_units_bound",
    "jacobian_rank",
    "limits",
    "output_side",
    "rank_of",
    "single_example",
]
