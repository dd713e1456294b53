"""The audit that runs when nobody says what to audit: embedded pictures, a small network, two defences."""

from __future__ import annotations

from typing import Any

DEFAULT_SPEC: dict[str, Any] = {
    "model": "convnet",
    "data": "tiles",
    "examples": 6,
    "batch": 1,
    "protocols": ["fedsgd"],
    "defenses": ["none", {"gradient-noise": {"sigma": 0.01}}, {"gradient-pruning": {"fraction": 0.9}}],
    "attacks": "standard",
    "seeds": [0],
}
