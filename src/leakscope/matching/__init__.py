"""The gradient-matching engine that optimisation attacks share: distances, priors, canvas, optimisers, one loop."""

from leakscope.matching.canvas import Canvas, Drawing, Pixels
from leakscope.matching.distances import (
    DISTANCES,
    L1,
    Cosine,
    DirectionL1,
    Distance,
    GaussianKernel,
    RelativeSquaredL2,
    Reweighted,
    SquaredL2,
    as_distance,
)
from leakscope.matching.gradient_map import GradientMap, Linearisation
from leakscope.matching.least_squares import Fit, LevenbergMarquardt, Preconditioner, Roughness
from leakscope.matching.loop import Match, Matcher, Progress, Ramp
from leakscope.matching.optimisers import LBFGS, Adam, Optimiser
from leakscope.matching.orders import steps_in_order
from leakscope.matching.priors import (
    BatchNormStatistics,
    EpochAgreement,
    FeatureMatching,
    L2Norm,
    Orthogonality,
    Prior,
    SoftRange,
    TotalVariation,
    total_variation,
)
from leakscope.matching.problem import Problem
from leakscope.matching.simulations import SegmentGradient, Simulation, SingleGradient, UnrolledSteps
from leakscope.matching.victim import Victim, VictimTensors
