"""A first answer in minutes: one example, one local step, exact and cheap attacks."""

import dataclasses

from leakscope.audit.parts import Part, attack_part
from leakscope.audit.spec import AuditSpec
from leakscope.contracts.errors import UserError
from leakscope.federation import FedAvg, FedSGD

#: Steps of the searches that head-first falls back to, where they are kept short: a fifth of its own.
SEARCH = 60
#: Attacks of a quick audit: closed forms and least squares.
ATTACKS = ("linear-layer", "cocktail-party", "gauss-newton", {"head-first": {"iterations": SEARCH}})
#: Seconds after which a quick audit begins no further job, so that the answer is there within three minutes.
SECONDS = 90.0


def quickened(spec: AuditSpec) -> AuditSpec:
    """Return the audit of one example and one local step; raise UserError for protocols that have neither.

    It can find a leak. It passes nothing, as it lacks standard attacks.
    """
    changes = {
        **{"examples": 1, "batch": 1, "seeds": spec.seeds[:1], "findings": [], "utility": None},
        **{"protocols": _distinct([_one_step(part) for part in spec.protocols])},
        **{"attacks": [attack_part(attack) for attack in ATTACKS]},
        **{"budget": SECONDS if spec.budget is None else min(SECONDS, spec.budget)},
    }
    return spec.model_copy(update=changes)


def _one_step(part: Part) -> Part:
    if isinstance(part.instance, FedSGD):
        return part
    if isinstance(part.instance, FedAvg):
        instance = dataclasses.replace(part.instance, epochs=1)
        return part.model_copy(update={"instance": instance, "options": {**part.options, "epochs": 1}})
    raise UserError(f"--quick: expected the protocols fedsgd or fedavg, got {part.name}; leave out --quick")


def _distinct(parts: list[Part]) -> list[Part]:
    return list({part.identity(): part for part in parts}.values())
