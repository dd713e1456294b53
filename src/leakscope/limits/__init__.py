"""What theory says before any attack: counts, published conditions, the rank of the gradient's Jacobian, and when
the update of many local steps is as good as one gradient."""

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
from leakscope.limits.surrogate import CosineProfile, cosine_profile, drift_bound, leading_shares, parallel_beta

__all__ = [
    "MAX_ENTRIES",
    "MAX_UNKNOWNS",
    "CosineProfile",
    "Filters",
    "HiddenUnits",
    "JacobianRank",
    "Limits",
    "Proposition",
    "SingleExample",
    "cosine_profile",
    "drift_bound",
    "features_bound",
    "filters",
    "filters_bound",
    "hidden_units",
    "hidden_units_bound",
    "jacobian_rank",
    "leading_shares",
    "limits",
    "output_side",
    "parallel_beta",
    "rank_of",
    "single_example",
]
