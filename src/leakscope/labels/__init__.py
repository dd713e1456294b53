"""Recover labels and label counts from an update: pure functions, one rule a file."""

from leakscope.labels.bias_sign import bias_label, bias_present
from leakscope.labels.candidates import label_candidates
from leakscope.labels.counts import (
    certain_counts_from_bias,
    counts_to_labels,
    label_counts_from_bias,
    label_counts_from_weight,
    round_to_total,
    scale_from_absent_classes,
)
from leakscope.labels.gradinversion import gradinversion_labels
from leakscope.labels.idlg import idlg_label
from leakscope.labels.llg import llg_bias_labels, llg_labels
from leakscope.labels.recover import METHODS, RecoveredLabels, local_steps, mean_gradient_scale, recover_labels
