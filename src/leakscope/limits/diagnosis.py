"""Tell why a reconstruction is what it is: recovered, the optimiser failed, or the inputs are not identifiable.

The Jacobian J of the update at the result tells which. With r what is left of the observed update: J^+ r is how far the
nearest explanation of the update lies, the part of the error that the search is to blame for;
sigma sqrt(trace (J'J)^-1) with sigma^2 = ||r||^2 / (entries - unknowns) is what noise in the update leaves open; and
directions in which J is nothing but rounding cannot be seen at all. The last two mean something only where most of the
update is explained. All of it is linear and local, and none of it knows the truth. Where the Jacobian is large, sums of
its entries with random signs take the place of entries: sizes are then right to a factor of two or so.

Where all of this leaves it undecided, one layer may still determine the batch (:mod:`leakscope.limits.determined`): a
result that does not explain the update then missed inputs that are there.
"""

import contextlib
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from leakscope.contracts.certificate import Certificate
from leakscope.contracts.channel import Channel
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import RECOVERED, Diagnosis, DiagnosisOutcome, Reconstruction
from leakscope.labels import recover_labels
from leakscope.limits.determined import determined_by
from leakscope.limits.effort import Effort, effort_of
from leakscope.limits.jacobian import MAX_UNKNOWNS, QUICK_UNKNOWNS
from leakscope.matching import GradientMap
from leakscope.matching.determinacy import free_directions
from leakscope.matching.least_squares import SKETCH
from leakscope.matching.unexplained import explain as explain_update

#: A result that leaves more of the update than this says nothing of the place where the inputs lie.
EXPLAINED = 0.1
#: Unknowns times entries, and operations up to which the Jacobian is made without being asked for: seconds.
QUICK_WORK, QUICK_COLUMNS_WORK = 2**27, 2e10
#: ... and at all: minutes, and a gigabyte or two.
MAX_WORK, THOROUGH_COLUMNS_WORK = 2**32, 5e11
#: Products with a Jacobian that is not made: at least and at most, and operations of them all, which are seconds.
PROBES, PROBES_WORK = (100, 3000), 5e9
#: Above so many numbers in it the Jacobian is sketched.
EXACT_ENTRIES = 2**25


def diagnose(observation: Observation, result: Reconstruction, *, thorough: bool = False) -> Diagnosis:
    """Say why a result is what it is: by its certificates, which overrule the attack's own word, or by the Jacobian.

    ``thorough`` allows a Jacobian that takes minutes.
    """
    proved, own = from_certificates(result), result.diagnosis
    if own is not None and (proved is None or proved.outcome == own.outcome):
        return own
    if proved is not None:
        return proved
    found = _by_jacobian(observation, result, thorough)
    return _beside_layers(found, observation, result) if found.outcome == "undecided" else found


def _beside_layers(found: Diagnosis, observation: Observation, result: Reconstruction) -> Diagnosis:
    """Say where one layer's gradient determines the batch, whatever the inputs that were found leave of the update."""
    exact = determined_by(observation)
    if exact is None:
        return found
    left = _left(observation, result)
    if left is not None and left <= EXPLAINED:
        return found
    facts: dict[str, Any] = {"layer": exact.layer, "lowest": exact.lowest}
    if exact.whole and left is not None:
        return dataclasses.replace(found, outcome="optimiser failed", reason=str(exact), **facts)
    return dataclasses.replace(found, reason=f"{found.reason}; {exact}", **facts)


def _left(observation: Observation, result: Reconstruction) -> float | None:
    """Return what a result leaves of the update, with labels that the update tells where it has none; None without."""
    labels, inputs = result.labels, result.inputs
    if labels is None:
        with contextlib.suppress(ValueError):  # no head to read, or a number of examples that is not known
            labels = recover_labels(observation).labels
    if labels is None or len(labels) != len(inputs):
        return None
    if not bool(torch.isfinite(inputs).all()):
        return math.inf
    # An unknown defence may have clipped the update.
    return explain_update(observation, inputs, labels).left_at_best_length


def _by_jacobian(observation: Observation, result: Reconstruction, thorough: bool) -> Diagnosis:
    inputs, observation = observation.relax(result.inputs), observation.relaxed()
    labels, unknowns = result.labels, inputs.numel()
    entries = sum(value.numel() for value in observation.message.update.values())
    if (reason := _obstacle(observation, result, entries)) is not None:
        return Diagnosis(outcome="undecided", reason=reason, unknowns=unknowns)
    if entries < unknowns:
        reason = f"{entries} observed entries cannot determine {unknowns} unknowns"
        return Diagnosis(outcome="not identifiable", reason=reason, unknowns=unknowns)
    assert labels is not None
    # The precision of the update, not of this computation, decides what can be seen in it.
    precision = torch.finfo(observation.dtype).eps
    wide = observation.to(device="cpu", dtype=torch.float64)
    mapping = GradientMap.of(wide, labels.cpu())
    flat = mapping.flat(inputs.detach().cpu().double())
    observed = torch.cat([value.flatten() for value in wide.message.update.values()])
    effort = effort_of(observation.model, observation.input_shape, len(inputs))
    try:
        if (too_large := _too_large(unknowns, entries, effort, thorough)) is not None:
            undecided = Diagnosis(outcome="undecided", reason=too_large, unknowns=unknowns)
            # Under known noise a result far from the inputs is no failure that free directions would have to explain.
            return undecided if _known_noise(observation) else _by_probes(mapping, flat, observed, effort, undecided)
        columns = SKETCH * unknowns if entries * unknowns > EXACT_ENTRIES else None
        matrix: Tensor | None = None
        if observation.dtype == torch.float32:  # no finer than the update itself, which is several times faster
            with contextlib.suppress(RuntimeError):  # some kernels have no derivative: those of recurrent layers, say
                matrix = mapping.narrow().jacobian(flat.float(), columns=columns)
        matrix = mapping.jacobian(flat, columns=columns) if matrix is None else matrix
        value, pull = vjp(mapping, flat)[:2]
        rest = observed - value.detach()
        right = pull(rest)[0].detach()
    except RuntimeError as error:  # an operation without a forward derivative, or one that vmap does not know
        reason = f"the model cannot be differentiated twice in forward mode: {str(error).strip().splitlines()[0]}"
        return Diagnosis(outcome="undecided", reason=reason, unknowns=unknowns)
    # Without a known range that of the result has to do.
    span = 1.0 if wide.inputs.bounded else float(flat.max() - flat.min()) or 1.0
    sigma = _known_noise(observation)
    return explain(matrix.double() * span, rest, right * span, float(observed.norm()), precision, sigma)


def from_certificates(result: Reconstruction) -> Diagnosis | None:
    """Return the diagnosis that the certificates give; None where they leave it open.

    >>> x = torch.zeros(1, 12)
    >>> def proof(free: int) -> Certificate:
    ...     return Certificate(residual=0.2, tolerance=1.0, free_directions=free, method="Gauss-Newton")
    >>> [from_certificates(Reconstruction(x, None, x[:, 0], certificates=(proof(n),))).reason for n in (0, 5)]
    ['certified (Gauss-Newton)', 'explains the update, but 5 directions of the inputs are not determined']
    """
    proofs: list[Certificate] = [proof for proof in result.certificates if proof is not None]
    unknowns = result.inputs.numel()
    hidden = sum(proof.free_directions or 0 for proof in proofs if proof.not_unique)
    if hidden:
        what = "1 direction of the inputs is" if hidden == 1 else f"{hidden:,} directions of the inputs are"
        reason = f"explains the update, but {what} not determined"
        return Diagnosis(outcome="not identifiable", reason=reason, unknowns=unknowns, hidden=hidden)
    if proofs and result.certified == len(result.inputs):
        reason = f"certified ({', '.join(dict.fromkeys(proof.method for proof in proofs))})"
        return Diagnosis(outcome="recovered", reason=reason, unknowns=unknowns, hidden=0)
    return None


def _known_noise(observation: Observation) -> float:
    """Return the least noise that is known to be on every entry, so that it hides no more than it does."""
    channel = observation.channel
    return 0.0 if channel is None else min(channel.information_level(name) for name in observation.message.update)


def explain(
    matrix: Tensor, rest: Tensor, right: Tensor, size: float, precision: float, sigma: float = 0.0
) -> Diagnosis:
    """Diagnose from the Jacobian (one row an unknown), the rest of the update, J' times it, and the update's norm.

    ``sigma`` is a known level of noise on every entry: no search is to blame for what it moves the nearest explanation.

    >>> J, rest = torch.eye(2, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    >>> explain(J, rest, J @ rest, size=1.0, precision=1e-7).outcome
    'recovered'
    >>> far = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    >>> explain(J, far, J @ far, size=1.0, precision=1e-7).outcome
    'optimiser failed'
    >>> explain(J, far, J @ far, size=1.0, precision=1e-7, sigma=0.5).outcome
    'not identifiable'
    >>> explain(J, 9 * J[1].roll(1), J @ (9 * J[1].roll(1)), size=10.0, precision=1e-7, sigma=0.5).outcome
    'undecided'
    >>> explain(J * torch.tensor([[1.0], [0.0]]), rest, J @ rest, size=1.0, precision=1e-7).outcome
    'not identifiable'
    """
    unknowns = len(matrix)
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    sizes = values.clamp(min=0).sqrt()
    residual = float(rest.norm()) / size if size else math.inf
    # A pattern of the whole picture, a third of the range in each pixel, that changes the update by less than its own
    # rounding. Squaring the matrix cost half of float64's digits; its own precision may be less.
    lost = max(1e-8, 4 * precision) * float(sizes[-1])
    floor = max(precision * size / (0.3 * math.sqrt(unknowns)), lost)
    visible = sizes > floor
    hidden = unknowns - int(visible.sum())
    condition = float(sizes[-1] / sizes[0]) if hidden == 0 else math.inf
    parts = (vectors.T @ right)[visible] / values[visible]
    missed = float(parts.square().sum().div(unknowns).sqrt())
    spare = max(1, len(rest) - unknowns)
    # What no change of the inputs explains, to first order.
    unexplained = max(0.0, float(rest @ rest) - float(parts.square() @ values[visible]))
    noise = math.sqrt(unexplained * float(values[visible].reciprocal().sum()) / spare / unknowns)
    expected = math.hypot(missed, noise)
    facts: dict[str, Any] = {"unknowns": unknowns, "residual": residual, "hidden": hidden, "condition": condition}
    unclear = f"{residual:.0%} of the update stays unexplained: a false minimum, or noise or a defence altered it"
    if hidden and residual > EXPLAINED:
        return Diagnosis(outcome="undecided", reason=unclear, **facts)
    if hidden:
        reason = f"in {hidden} of {unknowns} directions the inputs leave no trace in the update beyond its rounding"
        return Diagnosis(outcome="not identifiable", reason=reason, **facts)
    moved = sigma * math.sqrt(float(values[visible].reciprocal().sum()) / unknowns)
    # What is left must be of the size of the noise: at a false minimum nothing is missed either.
    is_noise = float(rest.norm()) <= 2 * sigma * math.sqrt(len(rest))
    if moved > RECOVERED and missed <= 2 * moved and is_noise:
        reason = f"the known noise hides the inputs: it moves the nearest explanation by {moved:.1g} of their range"
        return Diagnosis(outcome="not identifiable", reason=reason, expected_rmse=math.hypot(missed, moved), **facts)
    words = f"expected error {expected:.1g} of the inputs' range, condition number {condition:.1e}"
    if missed > RECOVERED:
        reason = f"the update determines the inputs, but its nearest explanation lies further on: {words}"
        outcome: DiagnosisOutcome = "optimiser failed"
    elif residual > EXPLAINED:
        reason, outcome = unclear, "undecided"
    elif noise > RECOVERED:
        reason = f"what the update has besides the inputs, noise or a defence, hides them: {words}"
        outcome = "not identifiable"
    else:
        reason, outcome = f"the inputs explain the update and nothing near them does: {words}", "recovered"
    return Diagnosis(outcome=outcome, reason=reason, expected_rmse=expected, **facts)


def _by_probes(mapping: GradientMap, flat: Tensor, observed: Tensor, effort: Effort, undecided: Diagnosis) -> Diagnosis:
    """Look for free directions by products with a Jacobian that is too large to be made; else it is ``undecided``.

    Where most of the update is unexplained any input must have them, and not the result alone.
    """
    effort = effort.with_calls()  # without a chunk of directions at a time the calls of a recurrent layer decide
    if effort.refusal("a probe", PROBES[0], PROBES_WORK) is not None:
        return undecided
    limit = int(min(PROBES[1], PROBES_WORK / max(effort.operations, 1)))
    residual = float((mapping(flat).detach() - observed).norm() / observed.norm().clamp_min(1e-300))
    anywhere = torch.rand(flat.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(flat)
    hidden = mapping.unknowns
    for place in (flat,) if residual <= EXPLAINED else (flat, anywhere):
        counts = free_directions(mapping, place, limit=limit)
        hidden = min(hidden, sum(count or 0 for count in counts))
        if not hidden:
            return undecided
    reason = f"in about {hidden:,} of {mapping.unknowns:,} directions the inputs leave no trace in the update"
    facts: dict[str, Any] = {"unknowns": mapping.unknowns, "residual": residual, "hidden": hidden}
    return Diagnosis(outcome="not identifiable", reason=reason, **facts)


def _too_large(unknowns: int, entries: int, effort: Effort, thorough: bool) -> str | None:
    limit, work = (MAX_UNKNOWNS, MAX_WORK) if thorough else (QUICK_UNKNOWNS, QUICK_WORK)
    if unknowns > limit or unknowns * entries > work:
        more = "too many" if thorough else "thorough=True allows more"
        return f"the Jacobian of {unknowns} unknowns and {entries} entries was not computed; {more}"
    return effort.refusal("the Jacobian", unknowns, THOROUGH_COLUMNS_WORK if thorough else QUICK_COLUMNS_WORK)


def _obstacle(observation: Observation, result: Reconstruction, entries: int) -> str | None:
    if observation.has_rounds:
        return "the calculation is for one update of all examples, and there are rounds on some of them"
    if "mixture" in result.flags:
        return "a mixture of examples is no candidate for any of them"
    if observation.message.kind != "gradient":
        return "the message is a weight update, and the Jacobian is that of one gradient"
    if observation.num_examples != len(result.inputs):
        return "the number of examples is not known"
    if entries < result.inputs.numel():
        return None  # the count alone decides
    channel = Channel(inexact=True) if observation.dropout == "train" else observation.channel
    if type(channel) is Channel and channel.beyond_theory is not None:
        return channel.beyond_theory
    return "the attack gives no labels, which the Jacobian needs" if result.labels is None else None
