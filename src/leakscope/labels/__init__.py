"""Recover labels and label counts from an update."""

from leakscope.labels.counts import (
    certain_counts_from_bias,
    counts_to_labels,
    label_counts_from_bias,
    label_counts_from_weight,
    round_to_total,
    scale_from_absent_classes,
)
from leakscope.labels.directions import nearest_labels
from leakscope.labels.recover import (
    METHODS,
    RecoveredLabels,
    label_candidates,
    local_steps,
    mean_gradient_scale,
    recover_labels,
)
from leakscope.labels.rules import (
    bias_label,
    bias_present,
    gradinversion_labels,
    idlg_label,
    llg_bias_labels,
    llg_labels,
)
