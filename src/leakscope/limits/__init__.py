"""What theory says before any attack: counts, published conditions, ranks, floors of the error, and guarantees."""

from leakscope.contracts.channel import Channel
from leakscope.contracts.reconstruction import Diagnosis
from leakscope.equations.decomposition import JacobianRank, rank_of
from leakscope.equations.index_matrix import Identifiability, identify
from leakscope.limits.bounds import (
    ImprintGuarantee,
    Order,
    alone_distribution,
    imprint_guarantee,
    order_bounds,
    published_count,
)
from leakscope.limits.counting import (
    Filters,
    HiddenUnits,
    Proposition,
    SingleExample,
    features_bound,
    filters,
    filters_bound,
    hidden_units,
    hidden_units_bound,
    output_side,
    single_example,
)
from leakscope.limits.cramer_rao import Floor, affordable_floor, cramer_rao
from leakscope.limits.determined import Determined, determined_by
from leakscope.limits.diagnosis import diagnose
from leakscope.limits.effort import GRADIENTS_WORK, Effort, effort_of
from leakscope.limits.index_bounds import (
    RecoveryBound,
    RoundsNeeded,
    Theorem,
    determined_inputs,
    distinct_columns,
    index_spectrum,
    inputs_given_signals,
    recovery_bounds,
    rounds_needed,
    separable,
    theorem1,
    theorem2,
)
from leakscope.limits.jacobian import MAX_ENTRIES, MAX_UNKNOWNS, gradient_map_at, jacobian_rank
from leakscope.limits.report import Limits, limits
from leakscope.limits.security import LayerSystem, layer_systems, security_metric
from leakscope.limits.surrogate import CosineProfile, cosine_profile, drift_bound, leading_shares, parallel_beta
from leakscope.limits.vertical import VerticalLimits, WorkerLimits, layer_signals, vertical_limits
from leakscope.network.kinks import kinks
