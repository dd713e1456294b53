"""The limits of a model as small tables of text."""

import math
from dataclasses import dataclass

from leakscope.limits.cramer_rao import Floor
from leakscope.limits.report import Limits
from leakscope.limits.security import LayerSystem
from leakscope.limits.vertical import VerticalLimits
from leakscope.report.words import TEXTS, likeness

FACTS = ("what", "value", "meaning")
_NOTES: dict[str, str] = TEXTS["limits"]
#: The error of always guessing the middle of the range, at most: above it the floor excludes nothing of interest.
_GREY = 0.5


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, rows of as many cells, and a remark below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None = None


def tables_of(limits: Limits | VerticalLimits) -> tuple[Table, ...]:
    """The tables of one gradient or of rounds of vertical learning, whichever was asked."""
    return vertical_tables(limits) if isinstance(limits, VerticalLimits) else limits_tables(limits)


def limits_tables(limits: Limits) -> tuple[Table, ...]:
    return (
        _observed(limits),
        _published(limits),
        _rank(limits),
        _reach(limits),
        _layers(limits),
        _floor(limits),
        _orders(limits),
    )


def brief(value: float | None) -> str:
    """Three digits, or a word.

    >>> brief(0.12345), brief(float("inf")), brief(None)
    ('0.123', 'infinite', 'not computed')
    """
    if value is None or math.isnan(value):
        return "not computed"
    return "infinite" if math.isinf(value) else f"{value:.3g}"


def met(value: bool | None) -> str:
    return "met" if value else "not met"


def _observed(limits: Limits) -> Table:
    first = f"{limits.first_layer}: {limits.first_layer_kind} {limits.first_layer_size}"
    labels = "one value per class and example, where the labels are not known"
    enough = "at least as many equations as unknowns; necessary, not sufficient"
    rows = (
        ("first layer", first, "the first layer with parameters that reads the input"),
        ("observed gradient entries", str(limits.gradient_entries), "equations: one per trainable weight"),
        ("unknown input values", str(limits.unknowns), "batch size times values per example"),
        ("unknowns with labels", str(limits.unknowns_with_labels), f"the same and {labels}"),
        ("count, labels known", met(limits.count_met), enough),
        ("count, labels unknown", met(limits.count_met_with_labels), "the same with the labels' unknowns"),
        ("first linear layer", "yes" if limits.closed_form or limits.span_readable else "no", limits.first_linear),
    )
    return Table("What is observed", FACTS, rows)


def _reach(limits: Limits) -> Table:
    rows = tuple((layer.name, str(layer.alone), str(layer.below), layer.reason) for layer in limits.reach)
    lowest, images = limits.lowest, "one image" if limits.batch == 1 else f"{limits.batch} images"
    if lowest is None:
        last = ("batch", "not determined", "", f"no layer alone determines {images}")
    else:
        last = ("batch", "determined", "", f"{images}, by {lowest[0]!r}, and down to the input of {lowest[1]!r}")
    title = "Images that each layer determines"
    return Table(title, ("layer", "alone", "once the layer above is known", "by"), (*rows, last))


def _published(limits: Limits) -> Table:
    rows = tuple((p.name, met(p.met) if p.applies else "does not apply", p.statement) for p in limits.propositions)
    return Table("Published conditions", ("proposition", "condition", "meaning"), rows)


def _rank(limits: Limits) -> Table:
    jacobian = limits.jacobian
    word = {True: "identifiable", False: "not identifiable", None: "open"}[limits.identifiable]
    conclusion = ("conclusion", word, limits.conclusion)
    if jacobian.rank is None:
        row = ("rank of the Jacobian", "not computed", jacobian.reason or "")
        return Table("Identifiability", FACTS, (row, conclusion))
    meaning = (
        f"directions of the inputs that show in the gradient, at {limits.point}; by its {jacobian.method}, "
        f"singular values below {brief(jacobian.tolerance)} counting as zero"
    )
    ratio = "the ratio of the two; where it is large, rounding or a little noise hides directions"
    rows = (
        ("rank of the Jacobian", f"{jacobian.rank} of {jacobian.unknowns}", meaning),
        ("smallest singular value", brief(jacobian.smallest), "how faintly the weakest one shows"),
        ("largest singular value", brief(jacobian.largest), "how strongly the strongest one shows"),
        ("condition number", brief(jacobian.condition), ratio),
        conclusion,
    )
    return Table("Identifiability", FACTS, rows)


def _layers(limits: Limits) -> Table:
    title = "Layer by layer: the linear system of each, for one example"
    if not limits.layers:
        return Table(title, (), (), limits.layers_reason)
    columns = ("layer", "equations", "unknowns", "rank", "deficiency", "smallest value", "condition", "share of c(M)")
    convolutions = [layer for layer in limits.layers if layer.convolutional]
    rows = tuple(_layer(layer, convolutions) for layer in limits.layers)
    security = limits.security
    known = security is not None and not math.isnan(security)
    note = (f"c(M) = {security:g}" if known else "c(M) is not known") + _NOTES["security"]
    return Table(title, columns, rows, note)


def _layer(layer: LayerSystem, convolutions: list[LayerSystem]) -> tuple[str, ...]:
    rank = share = deficiency = "not known"
    if layer.rank is not None:
        rank = str(layer.rank)
    elif layer.predicted_rank is not None:
        rank = f"{layer.predicted_rank} by size"
    if layer.deficiency is not None:
        deficiency = str(layer.deficiency)
    if not layer.convolutional:
        share = "0"
    elif layer.deficiency is not None:
        place, depth = convolutions.index(layer), len(convolutions)
        share = f"{(depth - place) / depth * layer.deficiency:g}"
    size = (layer.name, str(layer.rows), str(layer.unknowns))
    return *size, rank, deficiency, brief(layer.smallest), brief(layer.condition), share


def _floor(limits: Limits) -> Table:
    title = "Least error of an unbiased adversary (Cramér–Rao)"
    floor, channel = limits.floor, limits.channel
    if floor is None or channel is None:
        return Table(title, (), (), limits.floor_reason)
    spread = "" if floor.interval is None else " ({} to {})".format(*map(brief, floor.interval))
    psnr = f"at most {floor.psnr:.1f} dB" if math.isfinite(floor.psnr) else "no number of dB"
    allowed = "not computed" if math.isnan(floor.psnr) else likeness(floor.psnr)
    if floor.psnr == -math.inf:
        allowed = "no complete copy"
    rows = [
        ("what is seen", f"|g| = {brief(floor.gradient_norm)}", channel.describe()),
        ("least RMSE", brief(floor.rmse) + spread, "root-mean-square error, in units of the value range"),
        ("what theory allows", allowed, f"{psnr}; every 20 dB more make the error ten times smaller"),
        ("loosened RMSE", brief(floor.loosened), "the cheap lower bound sqrt(n / trace of the Fisher information)"),
    ]
    if floor.rank is not None:
        rows += [
            ("rank", f"{floor.rank} of {floor.unknowns}", "directions that show in what is seen"),
            ("condition number", brief(floor.condition), "of the Jacobian of what is seen"),
        ]
        if floor.rank < floor.unknowns:
            rows.append(("visible RMSE", brief(floor.visible_rmse), "along directions that show, for orientation"))
    if channel.masked:
        rows.append(("surviving", f"{100 * floor.surviving:.3g} %", "squared Jacobian that pruning and dropout leave"))
    if channel.clip is not None:
        rows.append(("clip factor", brief(floor.clip_factor), "what clipping multiplied the gradient with"))
    if floor.example_rmse is not None and len(floor.example_rmse) > 1:
        rows.append(("each example", ", ".join(map(brief, floor.example_rmse)), "least RMSE of each example"))
    return Table(title, FACTS, tuple(rows), _floor_note(floor, limits.point))


def _floor_note(floor: Floor, point: str) -> str:
    how = "exact" if floor.method == "exact" else f"estimated with {floor.probes} probes"
    words = [f"At {point}, labels known, {how}; a prior on the inputs may go below it."]
    if floor.interval is not None:
        words.append("In brackets the 95 % interval over the probes.")
    if floor.reason is not None:
        words.append(f"{floor.reason[0].upper()}{floor.reason[1:]}.")
    if _GREY < floor.rmse < math.inf:
        words.append("Above 0.5 guessing grey is better: weak directions dominate, others may be seen well.")
    return " ".join(words)


def _orders(limits: Limits) -> Table:
    title = "Published orders of the error: constants and logarithms dropped"
    if not limits.orders:
        return Table(title, (), (), limits.orders_reason)
    rows = tuple((o.defense, _order(o.upper, o.upper_formula), _order(o.lower, o.lower_formula)) for o in limits.orders)
    return Table(title, ("defence", "an attack reaches", "no attack is better than"), rows, _NOTES["orders"])


def _order(value: float | None, formula: str | None) -> str:
    if formula is None:
        return "not known"
    return f"{'?' if value is None else format(value, '.3g')} = {formula}"


def vertical_tables(limits: VerticalLimits) -> tuple[Table, ...]:
    return _rounds(limits), _needed(limits), _workers(limits), _follows(limits), _bounds(limits)


def _rounds(limits: VerticalLimits) -> Table:
    index, samples = limits.index, limits.samples
    sampling = "each batch anew" if limits.sampling == "uniform" else "in shuffled epochs"
    how = "given" if limits.given else f"drawn with seed {limits.seed}, {sampling}"
    apart = "in no round, or always together with another: out of reach of steps I and II"
    theorem = f"in expectation over all batches {limits.theorem.statement}; modulus {brief(limits.theorem.modulus)}"
    rows = (
        ("rounds", f"{limits.rounds} of {limits.batch} of {samples} samples", how),
        ("independent batches", f"{index.rank} of {samples}", "as many as samples make step I solvable for all"),
        ("condition number", brief(index.condition), "by how much step I can magnify rounding or noise"),
        ("determined by step I", f"{int(index.determined.sum())} of {samples}", "output gradients that follow exactly"),
        ("in no round", str(len(index.absent)), "samples that were never used"),
        ("not told apart", str(limits.together), apart),
        ("theorem 1", met(limits.theorem.corrected), theorem),
    )
    return Table("Announced batches", FACTS, rows, _NOTES["batches"])


def _needed(limits: VerticalLimits) -> Table:
    least, apart = ("no number" if n is None else str(n) for n in (limits.needed.least, limits.needed.apart))
    together = "from here on fewer than one pair of samples is expected to have always been together"
    rows = (
        ("for step I", least, "least number of rounds with as many independent batches as samples"),
        ("to have all samples", brief(limits.needed.covered), "expected rounds until every sample was in a batch"),
        ("to tell all apart", apart, together),
    )
    return Table("Rounds that it takes", FACTS, rows, _NOTES["rounds"])


def _workers(limits: VerticalLimits) -> Table:
    columns = (
        *("worker", "features", "first dense layer", "inputs", "units", "bias"),
        *("invisible", "rank of V", "rank of H", "condition of H"),
    )
    rows = tuple(
        (
            *(w.share, str(w.features), w.layer, str(w.inputs), str(w.units), "yes" if w.bias else "no"),
            *(str(len(w.invisible)), str(w.signal_rank), str(w.input_rank), brief(w.input_condition)),
        )
        for w in limits.workers
    )
    note = _NOTES["workers"].format(point=limits.point)
    if few := [worker.share for worker in limits.workers if not worker.enough_inputs]:
        note += _NOTES["few-inputs"].format(names=", ".join(few))
    if bare := [worker.share for worker in limits.workers if not worker.bias]:
        note += f" No bias: {', '.join(bare)}; there H follows only up to the length and sign of each row."
    return Table("Workers", columns, rows, note)


def _follows(limits: VerticalLimits) -> Table:
    columns = ("worker", "theorem 2 as printed", "theorem 2 corrected", "by steps I and II", "by all rounds together")
    rows = tuple(
        (
            *(worker.share, met(worker.theorem.printed), met(worker.theorem.corrected)),
            f"{worker.determined} of {limits.samples}",
            "not needed" if worker.separable is None else f"{worker.separable} of {limits.samples}",
        )
        for worker in limits.workers
    )
    note = f"In expectation over all batches {limits.workers[0].theorem.statement}."
    return Table("Samples whose H follows", columns, rows, note)


def _bounds(limits: VerticalLimits) -> Table:
    columns = ("worker", "bound", "error of V", "error of H, from step I", "error of H, from step II")
    rows = tuple(
        (worker.share, bound.name, brief(bound.signals), brief(bound.inputs_phi1), brief(bound.inputs_phi2))
        for worker in limits.workers
        for bound in worker.bounds
    )
    return Table("Recovery bounds", columns, rows, _NOTES["bounds"])
