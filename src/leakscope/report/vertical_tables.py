"""The limits of a vertical model as small tables of text."""

from __future__ import annotations

from leakscope.limits.report import Limits
from leakscope.limits.vertical import VerticalLimits
from leakscope.report.limits_tables import FACTS, Table, brief, limits_tables, met


def tables_of(limits: Limits | VerticalLimits) -> tuple[Table, ...]:
    """The tables of one gradient or of rounds of vertical learning, whichever was asked."""
    return vertical_tables(limits) if isinstance(limits, VerticalLimits) else limits_tables(limits)


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
    note = (
        "The adversary is taken to know which samples are in each batch, and the model to stand still: where it learns "
        "from round to round, output gradients drift."
    )
    return Table("Announced batches", FACTS, rows, note)


def _needed(limits: VerticalLimits) -> Table:
    covered = limits.needed.covered
    least, apart = ("no number" if n is None else str(n) for n in (limits.needed.least, limits.needed.apart))
    rows = (
        ("for step I", least, "least number of rounds with as many independent batches as samples"),
        ("to have all samples", brief(covered), "expected rounds until every sample was in a batch"),
        (
            "to tell all apart",
            apart,
            "from here on fewer than one pair of samples is expected to have always been together",
        ),
    )
    note = (
        "Fewer rounds than samples are no safety: where the inputs of the first dense layer are linearly independent "
        "(no more samples than inputs), telling all apart can be enough."
    )
    return Table("Rounds that it takes", FACTS, rows, note)


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
    note = (
        f"At {limits.point}. V: output gradients of the layer, a row per sample; those that are zero are invisible. H: "
        "what the layer reads."
    )
    few = [worker.share for worker in limits.workers if not worker.enough_inputs]
    if few:
        note += (
            f" Fewer inputs than features: {', '.join(few)}; there H alone cannot give the features without prior "
            "knowledge of them."
        )
    bare = [worker.share for worker in limits.workers if not worker.bias]
    if bare:
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
    note = (
        "Squared error at most so many times the expected squared loss of step I (of step II in the last column), for "
        "batches drawn evenly. What is printed is too small in general; infinite where a bound does not apply. The "
        "Cramér-Rao floor and the rank of the Jacobian are left out for vertical models: too large."
    )
    return Table("Recovery bounds", columns, rows, note)
