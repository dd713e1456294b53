"""Flower: audit what the clients of a federation send, on their side and on the server's.

Mod and wrapper record observations while training runs, ``audit_recordings`` attacks them afterwards; or
``inline=Inline(...)`` attacks some at once, and the findings travel as metrics.
"""

from leakscope.capture.flower import Capture, channel_of_local_dp
from leakscope.capture.recordings import Recording, altered_on_the_way, recordings
from leakscope.integrations.flower_mod import AuditMod, Inline, audited_mods, hold_truth
from leakscope.integrations.flower_strategy import AuditedStrategy
from leakscope.integrations.leakage import audit_recordings, measure

__all__ = [
    "AuditMod",
    "AuditedStrategy",
    "Capture",
    "Inline",
    "Recording",
    "altered_on_the_way",
    "audit_recordings",
    "audited_mods",
    "channel_of_local_dp",
    "hold_truth",
    "measure",
    "recordings",
]
