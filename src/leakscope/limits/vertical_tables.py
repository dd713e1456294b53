"""The limits of a vertical model as small tables of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leakscope.limits.tables import Table, number

if TYPE_CHECKING:
    from leakscope.limits.vertical import VerticalLimits

_FACTS = ("what", "value", "meaning")


def vertical_tables(found: VerticalLimits) -> tuple[Table, ...]:
    return _rounds(found), _needed(found), _workers(found), _follows(found), _bounds(found)


def _rounds(found: VerticalLimits) -> Table:
    index, samples = found.index, found.samples
    how = "given" if found.given else f"drawn with seed {found.seed}, {_sampling(found)}"
    rows = (
        ("rounds", f"{found.rounds} of {found.batch} of {samples} samples", how),
        ("independent batches", f"{index.rank} of {samples}", "as many as samples make step I solvable for all"),
        ("condition number", number(index.condition), "by how much step I can magnify rounding or noise"),
        ("determined by step I", f"{int(index.determined.sum())} of {samples}", "back-signals that follow exactly"),
        ("in no round", str(len(index.absent)), "samples that were never used"),
        (
            "not told apart",
            str(found.together),
            "in no round, or always together with another: out of reach of steps I and II",
        ),
        (
            "theorem 1",
            "met" if found.theorem.corrected else "not met",
            f"in expectation over all batches {found.theorem.statement}; modulus {number(found.theorem.modulus)}",
        ),
    )
    note = (
        "The adversary is taken to know which samples are in each batch, and the model to stand still: where it learns "
        "from round to round, back-signals drift."
    )
    return Table("Announced batches", _FACTS, rows, note)


def _sampling(found: VerticalLimits) -> str:
    return "each batch anew" if found.sampling == "uniform" else "in shuffled epochs"


def _needed(found: VerticalLimits) -> Table:
    needed = found.needed
    rows = (
        (
            "for step I",
            _rounds_or_never(needed.least),
            "least number of rounds with as many independent batches as samples",
        ),
        ("to have all samples", number(needed.covered), "expected rounds until every sample was in a batch"),
        (
            "to tell all apart",
            _rounds_or_never(needed.apart),
            "from here on fewer than one pair of samples is expected to have always been together",
        ),
    )
    note = (
        "Fewer rounds than samples are no safety: where the inputs of the first dense layer are linearly independent "
        "(no more samples than inputs), telling all apart can be enough."
    )
    return Table("Rounds that it takes", _FACTS, rows, note)


def _rounds_or_never(rounds: int | None) -> str:
    return "no number" if rounds is None else str(rounds)


def _workers(found: VerticalLimits) -> Table:
    columns = (
        *("worker", "features", "first dense layer", "inputs", "units", "bias"),
        *("invisible", "rank of V", "rank of H", "condition of H"),
    )
    rows = tuple(
        (
            worker.share,
            str(worker.features),
            worker.layer,
            str(worker.inputs),
            str(worker.units),
            "yes" if worker.bias else "no",
            str(len(worker.invisible)),
            str(worker.signal_rank),
            str(worker.input_rank),
            number(worker.input_condition),
        )
        for worker in found.workers
    )
    note = (
        f"At {found.point}. V: back-signals of the layer, a row a sample; those that are zero are invisible. H: what "
        "the layer reads."
    )
    few = [worker.share for worker in found.workers if not worker.enough_inputs]
    if few:
        note += (
            f" Fewer inputs than features: {', '.join(few)}; there H alone cannot give the features without prior "
            "knowledge of them."
        )
    bare = [worker.share for worker in found.workers if not worker.bias]
    if bare:
        note += f" No bias: {', '.join(bare)}; there H follows only up to the length and sign of each row."
    return Table("Workers", columns, rows, note)


def _follows(found: VerticalLimits) -> Table:
    columns = ("worker", "theorem 2 as printed", "theorem 2 corrected", "by steps I and II", "by all rounds together")
    rows = tuple(
        (
            worker.share,
            "met" if worker.theorem.printed else "not met",
            "met" if worker.theorem.corrected else "not met",
            f"{worker.determined} of {found.samples}",
            "not needed" if worker.separable is None else f"{worker.separable} of {found.samples}",
        )
        for worker in found.workers
    )
    note = f"In expectation over all batches {found.workers[0].theorem.statement}."
    return Table("Samples whose H follows", columns, rows, note)


def _bounds(found: VerticalLimits) -> Table:
    columns = ("worker", "bound", "error of V", "error of H, from step I", "error of H, from step II")
    rows = tuple(
        (
            worker.share,
            bound.name,
            number(bound.signals),
            number(bound.inputs_phi1),
            number(bound.inputs_phi2),
        )
        for worker in found.workers
        for bound in worker.bounds
    )
    note = (
        "Squared error at most so many times the expected squared loss of step I (of step II in the last column), for "
        "batches drawn evenly. What is printed is too small in general; infinite where a bound does not apply. The "
        "Cramér-Rao floor and the rank of the Jacobian are left out for vertical models: too large."
    )
    return Table("Recovery bounds", columns, rows, note)
