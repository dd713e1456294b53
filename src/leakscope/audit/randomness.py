"""What an audit has to say of its own draws."""

from __future__ import annotations

from leakscope.audit.spec import AuditSpec
from leakscope.results.records import counted


def randomness_sentence(spec: AuditSpec) -> str:
    """That noise and the clients' other draws are simulated: whoever has the seeds can compute them again."""
    first = ", ".join(map(str, spec.seeds[:5])) + (", ..." if len(spec.seeds) > 5 else "")
    seeds = f"{counted(len(spec.seeds), 'seed')}: {first}"
    return (
        f"Noise, masks and the order of batches are simulated, reproducible by seed ({seeds}). A real client must draw "
        "them from the system's randomness: what can be computed again can be subtracted."
    )
