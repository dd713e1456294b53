"""Compare reconstructions with the truth: pure functions in unit space, one number an example."""

from leakscope.metrics.assignment import assign, cost_matrix
from leakscope.metrics.bootstrap import interval
from leakscope.metrics.evaluate import PSNR_CAP, Evaluation, evaluate
from leakscope.metrics.features import feature_cosines, feature_error, feature_errors, random_span_error
from leakscope.metrics.identification import MAX_CANDIDATES, chance, identified
from leakscope.metrics.image import mse, psnr, rmse, rmse_maxnorm, ssim
from leakscope.metrics.labels import label_accuracy, label_correct
from leakscope.metrics.measures import MEASURES, Measure
from leakscope.metrics.perceptual import Lpips, find_lpips, load_lpips
