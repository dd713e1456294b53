"""Compare reconstructions with the truth: pure functions in unit space, one number an example."""

from leakscope.metrics.assignment import assign, cost_matrix
from leakscope.metrics.evaluate import (
    MAX_CANDIDATES,
    Evaluation,
    chance,
    evaluate,
    identified,
    label_accuracy,
    label_correct,
)
from leakscope.metrics.features import feature_cosines, feature_error, feature_errors, random_span_error
from leakscope.metrics.image import mse, psnr, rmse, rmse_maxnorm, ssim
from leakscope.metrics.measures import MEASURES, PSNR_CAP, Measure, interval
from leakscope.metrics.perceptual import Lpips, find_lpips, load_lpips
