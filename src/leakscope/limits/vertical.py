"""Which samples of a vertical model announced batches give away (:mod:`leakscope.limits.index_bounds`)."""

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from leakscope.contracts.checks import BYTES, FLOAT, expected, refuse, whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.tables import html_table
from leakscope.contracts.task import Classification, label_count
from leakscope.equations.decomposition import rank_of
from leakscope.equations.index_matrix import Identifiability, Indices, identify, seen_rows
from leakscope.federation.vertical import Sampling, default_rounds, draw_batches
from leakscope.limits import index_bounds
from leakscope.limits.report import example_problems, plain_values
from leakscope.models.split import VerticalModel
from leakscope.network.layers import FirstDense, first_dense
from leakscope.network.recorder import cut_at

_AT_ONCE = 100  # samples that go through the model at a time


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """What one worker gives away through its first dense layer.

    ``invisible``: samples whose output gradient is zero here. ``determined``: samples whose layer inputs follow by
    steps I and II; ``separable``: by the gradients of all rounds together, None where steps I and II do.
    """

    worker: int
    share: str
    features: int
    layer: str
    inputs: int
    units: int
    bias: bool
    invisible: tuple[int, ...]
    signal_rank: int
    input_rank: int
    input_condition: float
    determined: int
    separable: int | None
    theorem: index_bounds.Theorem
    bounds: tuple[index_bounds.RecoveryBound, ...]

    @property
    def enough_inputs(self) -> bool:
        """Tell whether the layer reads at least as many numbers as the worker has features: necessary for step III."""
        return self.inputs >= self.features


@dataclass(frozen=True, kw_only=True, eq=False)
class VerticalLimits:
    """Facts and conditions of a vertical model; :attr:`conclusion` is the one sentence.

    ``given``: the rounds were not drawn. ``together``: samples in no round, or that share all rounds with another.
    """

    samples: int
    batch: int
    rounds: int
    sampling: Sampling
    given: bool
    seed: int
    point: str
    index: Identifiability
    together: int
    needed: index_bounds.RoundsNeeded
    theorem: index_bounds.Theorem
    workers: tuple[WorkerLimits, ...]

    @property
    def identifiable(self) -> bool:
        return all(worker.determined == self.samples for worker in self.workers)

    @property
    def conclusion(self) -> str:
        least = min(worker.determined for worker in self.workers)
        if self.identifiable:
            return (
                f"Identifiable: {self.index.reason}, so that what the first dense layer of every worker reads of each "
                "sample follows by linear least squares."
            )
        if self.index.identifiable:
            return (
                f"Partly identifiable: {self.index.reason}, but some samples leave no output gradient with a worker; "
                f"at least {least} of {self.samples} follow by linear least squares for every worker."
            )
        together = min(max(worker.determined, worker.separable or 0) for worker in self.workers)
        if together > least:
            return (
                f"Identifiable in principle: {self.index.reason}, so that steps I and II alone determine {least}; but "
                f"fewer rounds than samples are no safety, as the gradients of all rounds together determine "
                f"{'all' if together == self.samples else together} for every worker."
            )
        word = "Partly identifiable" if least else "Not identifiable"
        return (
            f"{word} by steps I and II: {self.index.reason}. For every worker at least {least} of {self.samples} "
            "samples follow; later layers, or knowledge of what samples look like, may tell more."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it; an infinite number becomes None."""
        facts: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del facts["index"]  # at the end, without its tensor
        facts |= {name: dataclasses.asdict(facts[name]) for name in ("needed", "theorem")}
        facts["workers"] = [{**dataclasses.asdict(one), "enough_inputs": one.enough_inputs} for one in self.workers]
        names = ("rank", "smallest", "condition", "determined", "absent", "identifiable", "reason")
        facts["index"] = {name: getattr(self.index, name) for name in names}
        facts["index"]["determined"] = int(self.index.determined.sum())
        facts |= {"identifiable": self.identifiable, "conclusion": self.conclusion}
        return {name: plain_values(value) for name, value in facts.items()}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def _repr_html_(self) -> str:
        shown = ("worker", "share", "features", "layer", "inputs", "units", "signal_rank", "determined")
        lines = [{name.replace("_", " "): getattr(one, name) for name in shown} for one in self.workers]
        return html_table("Limits of a vertical model", lines, [self.conclusion])


def vertical_limits(
    model: VerticalModel,
    samples: int,
    batch: int,
    rounds: int | None = None,
    *,
    sampling: Sampling = "uniform",
    inputs: Tensor | None = None,
    labels: Tensor | None = None,
    indices: Indices | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> VerticalLimits:
    """Compute what ``rounds`` announced batches of ``batch`` of the ``samples`` give away; ``model`` is not touched.

    The batches are ``indices``, or drawn; ``rounds=None`` is a quarter more than step I needs at least. The samples
    are ``inputs`` with ``labels``, or random ones in [0, 1] with the labels 0, 1, 2, ... The model is taken to stand
    still, and the adversary to know which samples are in each batch.
    """
    outputs = _outputs(model)
    problems = whole(samples=samples, batch=batch, **({} if rounds is None else {"rounds": rounds}))
    if not problems and batch > samples:
        problems.append(f"batch: expected at most the {samples} samples, got {batch}")
    if indices is not None and rounds not in (None, len(indices)):
        problems.append(f"rounds: expected {len(indices)}, as there are indices, or None, got {rounds}")
    problems += expected("'uniform' or 'epochs'", lambda word: word in get_args(Sampling), sampling=sampling)
    if not problems:
        tried = BYTES.problem(FLOAT * samples * max(samples, rounds or 0), "Look at fewer samples.")
        problems += [] if tried is None else [f"samples: who is in which batch: {tried}"]
    refuse("vertical_limits", problems + example_problems(inputs, labels, (samples, *model.input_shape), outputs))
    point = "random samples in [0, 1]" if inputs is None else "the samples that were given"
    given = indices is not None
    if indices is None:
        count = rounds or default_rounds(samples, batch, sampling)
        drawn = draw_batches(samples, batch, count, sampling, torch.Generator().manual_seed(seed))
        indices = [numbers.tolist() for numbers in drawn]
    index = identify(indices, samples)
    if inputs is None or labels is None:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.rand((samples, *model.input_shape), generator=generator, dtype=torch.float64)
        labels = torch.arange(samples) % label_count(outputs)
    at_layers = layer_signals(model, inputs, labels, batch, progress)
    workers = []
    for dense, (signals, reads) in zip(first_dense(model), at_layers, strict=True):
        workers.append(_worker(dense, batch, index, indices, signals, reads))
        if progress is not None:
            progress("workers", len(workers), len(at_layers))
    return VerticalLimits(
        samples=samples,
        batch=batch,
        rounds=index.rounds,
        sampling=sampling,
        given=given,
        seed=seed,
        point=point,
        index=index,
        together=samples - int(index_bounds.distinct_columns(indices, samples).sum()),
        needed=index_bounds.rounds_needed(samples, batch, sampling),
        theorem=index_bounds.theorem1(samples, batch),
        workers=tuple(workers),
    )


def _worker(
    dense: FirstDense, batch: int, index: Identifiability, indices: Indices, signals: Tensor, reads: Tensor
) -> WorkerLimits:
    apart = None
    if not index.identifiable:
        # The gradient of a bias is that of a weight whose input is always 1.
        with_bias = torch.cat([reads, torch.ones_like(reads[:, :1])], dim=1) if dense.bias else reads
        apart = int(index_bounds.separable(indices, signals, with_bias).sum())
    rank = rank_of(reads)
    return WorkerLimits(
        worker=dense.worker,
        share=dense.share.name,
        features=len(dense.share.places),
        layer=dense.name,
        inputs=dense.inputs,
        units=dense.units,
        bias=dense.bias,
        invisible=tuple(torch.nonzero(~seen_rows(signals)).flatten().tolist()),
        signal_rank=rank_of(signals).rank or 0,
        input_rank=rank.rank or 0,
        input_condition=math.inf if rank.condition is None else rank.condition,
        determined=int(index_bounds.determined_inputs(index, signals).sum()),
        separable=apart,
        theorem=index_bounds.theorem2(index.samples, batch, dense.units, signals),
        bounds=index_bounds.recovery_bounds(batch, signals, reads),
    )


def layer_signals(
    model: VerticalModel,
    inputs: Tensor,
    labels: Tensor,
    batch: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return V (N, d2), of the mean loss of ``batch`` samples, and H (N, d1) of each worker's first dense layer."""
    net = copy.deepcopy(model).double().eval().requires_grad_(False)
    layers = [dense.module(net) for dense in first_dense(net)]
    device = layers[0].weight.device
    pairs: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in layers]
    for start in range(0, len(inputs), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        with cut_at(layers) as cuts:
            answer = net(inputs[part].to(device=device, dtype=torch.float64))
        loss = Classification().loss(answer, labels[part].to(device), "sum") / batch
        outputs = [cuts[layer][1] for layer in layers]
        gradients = torch.autograd.grad(loss, outputs, allow_unused=True)
        for (signals, reads), layer, output, gradient in zip(pairs, layers, outputs, gradients, strict=True):
            signals.append((torch.zeros_like(output) if gradient is None else gradient).detach().cpu())
            reads.append(cuts[layer][0].detach().cpu())
        if progress is not None:
            progress("samples", min(start + _AT_ONCE, len(inputs)), len(inputs))
    return [(torch.cat(signals), torch.cat(reads)) for signals, reads in pairs]


def _outputs(model: VerticalModel) -> int:
    if not isinstance(model, VerticalModel):
        got = type(model).__name__
        raise UserError(f"model: expected a leakscope.VerticalModel, got {got}; for others there is limits()")
    like = first_dense(model)[0].module(model).weight
    with torch.no_grad():
        return int(copy.deepcopy(model).eval()(like.new_zeros((1, *model.input_shape))).shape[1])
