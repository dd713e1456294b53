"""Tables 10 and 11 and figure 8 of "CAFE: Catastrophic Data Leakage in Vertical Federated Learning" (NeurIPS 2021).

Four workers hold a quarter of each picture; the server announces the batches of K out of N samples and sees every
gradient. ``cafe/table10``: PSNR by batch size and epoch of the attack, published for 800 samples of Linnaeus 5, which
cannot be had: CIFAR-10 and its published settings take its place. An epoch is N/K steps of the single loop. Beside it
stand the direct method and, on a few samples, plain gradient matching. ``cafe/faces``: figure 8, without numbers.

``cafe/table11``: the training loss at iteration 8000 without a defence, with fake gradients, and with DP-SGD whose
noise keeps to its epsilon over all rounds together. The paper tells neither its data, learning rate and sigma of the
fake gradients, nor how its noise was chosen: here CIFAR-10, a rate at which undefended training works, and the default
sigma.

PSNR is that of the assembled picture in [0, 1], clipped; the paper means over the slices of the workers instead. The
model stands still under attack, where the paper lets it learn at a rate of 1e-6. Weights are Glorot's, biases zero, as
the published network starts; from PyTorch's smaller weights plain gradient descent hardly leaves the start.
"""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from leakscope.attacks.cafe import CAFE
from leakscope.audit.keys import derived_seed
from leakscope.contracts.defense import Defense
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.data import Examples
from leakscope.defenses import DPSGD, FakeGradients
from leakscope.federation import Vertical
from leakscope.federation.vertical import default_rounds
from leakscope.metrics import psnr
from leakscope.models import build_model
from leakscope.papers import base

PSNR = "PSNR (dB)"
SAMPLES = 800
#: Batch size of 800 samples, and the published PSNR by epoch of the attack.
TABLE_10: Mapping[int, Mapping[int, float]] = {
    10: {100: 12.30, 350: 24.86},
    20: {100: 14.76, 350: 25.86},
    40: {100: 15.33, 350: 22.62},
    80: {100: 11.84, 350: 21.05},
    100: {100: 11.79, 350: 18.90},
}
#: Numbers of the version submitted to ICLR, on CIFAR-10.
CONTEXT: Mapping[str, float] = {
    "ICLR version, ratio 0.1, K=40, CAFE": 43.31,
    "ICLR version, ratio 0.1, K=40, cosine": 30.96,
    "ICLR version, ratio 0.1, K=40, loss of Geiping et al.": 12.76,
    "ICLR version, ratio 0.2, K=8, CAFE": 41.80,
    "ICLR version, ratio 0.2, K=40, CAFE": 59.51,
    "ICLR version, ratio 0.2, K=80, CAFE": 57.20,
    "ICLR version, ratio 0.2, K=160, CAFE": 54.74,
}
RIVALS = ("dlg", "cosine", "sapag", "batchnorm", "group-consistency")
#: Pictures of a grid.
SHOWN = 8


@dataclass(frozen=True)
class Scene:
    """Describe what is observed: K of N samples a round, and the network. ``batchnorm``: its statistics are known too.

    ``whole``: every round is kept whole, which the single loop needs; else as many as the direct method needs (12 MB
    each).
    """

    samples: int
    batch: int
    filters: tuple[int, int] = (64, 128)
    hidden: int = 256
    whole: bool = False
    batchnorm: bool = False

    def protocol(self) -> Vertical:
        cover = covering(self.samples, self.batch)
        rounds = max(cover, default_rounds(self.samples, self.batch, "uniform"))
        return Vertical(batch_size=self.batch, rounds=rounds, whole_rounds=None if self.whole else cover)

    def network(self, examples: Examples, seed: int) -> nn.Module:
        options: dict[str, Any] = {"filters": self.filters, "hidden": self.hidden, "batchnorm": self.batchnorm}
        shape, classes = examples.shape, examples.num_classes
        net = build_model("cafe-cnn", input_shape=shape, num_classes=classes, seed=seed, **options)
        return glorot(net, draws(seed, "weights"))

    def observe(self, examples: Examples, seed: int) -> Observation:
        knowledge = dataclasses.replace(Knowledge.vertical_server, batchnorm_statistics=self.batchnorm)
        net, generator = self.network(examples, seed), draws(seed, "client")
        box, classes = examples.value_range, examples.num_classes
        return self.protocol().observe(
            net, examples.x, examples.y, None, knowledge, generator, value_range=box, num_classes=classes
        )


@dataclass(frozen=True)
class Trial:
    setting: str
    published: float | None
    note: str
    scene: Scene
    attack: CAFE
    shown: bool = False


def covering(samples: int, batch: int) -> int:
    """Count random rounds until every sample was in one, but for one chance in 400.

    >>> covering(800, 40), covering(40, 2)
    (254, 194)
    """
    return math.ceil(samples / batch * (math.log(samples) + 6))


def glorot(net: nn.Module, generator: torch.Generator) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return net


@dataclass(frozen=True)
class Reconstruction:
    """Describe table 10 at one scale. ``batches``: published K and ours at about the same share of the samples.

    ``loops``: those with the single loop, for ``epochs`` in place of the published 100 and 350. ``direct``: steps of
    the direct method. ``rivals``: samples, batch and steps of plain gradient matching.
    """

    scene: Scene
    batches: Mapping[int, int]
    loops: tuple[int, ...]
    epochs: tuple[int, int]
    direct: int
    rivals: tuple[int, int, int]


RECONSTRUCTIONS: Mapping[str, Reconstruction] = {
    "smoke": Reconstruction(Scene(16, 2, (32, 64), 128), {100: 2}, (100,), (1, 2), 40, (6, 3, 2)),
    "small": Reconstruction(Scene(40, 5, (32, 64), 128), {40: 2, 80: 4, 100: 5}, (100,), (100, 350), 120, (20, 5, 200)),
    "paper": Reconstruction(
        Scene(SAMPLES, 40), {k: k for k in TABLE_10}, tuple(TABLE_10), (100, 350), 120, (40, 8, 2000)
    ),
}


def trials_10(size: Reconstruction) -> Iterator[Trial]:
    for published, batch in size.batches.items():
        looped = published in size.loops
        scene = dataclasses.replace(size.scene, batch=batch, whole=looped)
        named = f"K={published} of {SAMPLES}"
        words = ["CIFAR-10 in place of Linnaeus 5", "PSNR of whole pictures, published by slice"]
        if size.scene.samples < SAMPLES:
            filters = " and ".join(map(str, scene.filters))
            words.insert(0, f"run with K={batch} of {scene.samples}, {filters} filters")
        for epoch, ours in zip(TABLE_10[published], size.epochs, strict=True) if looped else ():
            attack = CAFE.preset("cifar10", iterations=ours * (scene.samples // batch))
            note = "; ".join(words if ours == epoch else (f"search cut to epoch {ours}", *words))
            setting, value = f"{named}, epoch {epoch}, single loop", TABLE_10[published][epoch]
            yield Trial(setting, value, note, scene, attack, shown=epoch == 350)
        note = "; ".join(("beside epoch 350 of the single loop", *words))
        yield Trial(f"{named}, direct", TABLE_10[published][350], note, scene, CAFE(iterations=size.direct), looped)
    samples, batch, steps = size.rivals
    scene = dataclasses.replace(size.scene, samples=samples, batch=batch, whole=True, batchnorm=True)
    named = f"comparison, K={batch} of {samples}"
    note = "network with BatchNorm; published numbers are not at hand"
    yield Trial(f"{named}, direct", None, note, scene, CAFE(iterations=size.direct))
    for rival in RIVALS:
        more = "; given the statistics of each batch" if rival == "batchnorm" else ""
        remark = f"{steps} steps of gradient matching; {note}{more}"
        yield Trial(f"{named}, {rival}", None, remark, scene, CAFE.preset(rival, iterations=steps))


def run_table_10(scale: str, seed: int, progress: base.Progress | None = None) -> base.Findings:
    examples = base.examples_or_reason("cifar10", split="test")
    findings = _attacked(tuple(trials_10(RECONSTRUCTIONS[scale])), examples, seed, progress)
    reason = "context only: another algorithm under the same name"
    context = [base.Line(name, PSNR, value).not_run(reason) for name, value in CONTEXT.items()]
    return dataclasses.replace(findings, rows=[*findings.rows, *context])


#: Figure 8 by scale: the scene, and steps of the published single loop, of which 0 leaves it out.
FACES: Mapping[str, tuple[Scene, int]] = {
    "smoke": (Scene(12, 3, (32, 64), 128), 4),
    "small": (Scene(40, 10), 0),
    "paper": (Scene(160, 40), 20_000),
}


def run_faces(scale: str, seed: int, progress: base.Progress | None = None) -> base.Findings:
    scene, loop = FACES[scale]
    named = f"K={scene.batch} of {scene.samples} faces"
    trials = [Trial(f"{named}, direct", None, "", scene, CAFE(), shown=True)]
    if loop:
        whole, attack = dataclasses.replace(scene, whole=True), CAFE.preset("yale", iterations=loop)
        note = f"published settings, {'' if loop == FACES['paper'][1] else 'search cut to '}{loop} steps"
        trials.append(Trial(f"{named}, single loop", None, note, whole, attack, shown=True))
    # People can be recognised: shown only on request, whatever the reader says of the files.
    return _attacked(tuple(trials), base.examples_or_reason("yale"), seed, progress, private=True)


def _attacked(
    trials: Sequence[Trial], examples: Examples | str, seed: int, progress: base.Progress | None, private: bool = False
) -> base.Findings:
    control = "no information, mean of the other pictures"
    if isinstance(examples, str):
        rows = [base.Line(trial.setting, PSNR, trial.published).not_run(examples) for trial in trials]
        return base.Findings([*rows, base.Line(control, PSNR, None).not_run(examples)])
    order = torch.randperm(len(examples), generator=draws(seed, "samples"))
    rows, grids = [], []
    for scene, group in itertools.groupby(trials, key=lambda trial: trial.scene):
        some = examples.subset(order[: scene.samples])
        observation = scene.observe(some, seed)
        for trial in group:
            found = base.attacked(observation, trial.attack, some.x, some.y, seed)
            # In the order that the announced batches give.
            truth, pictures = (some.value_range.to_unit(x) for x in (some.x, base.recovered(found)))
            values = psnr(truth, pictures.clamp(0, 1)).tolist()
            rows.append(base.Line(trial.setting, PSNR, trial.published, trial.note).measured(values))
            if trial.shown:
                captions = tuple(f"{value:.1f} dB" for value in values[:SHOWN])
                run = f"K={scene.batch} of {scene.samples}"
                title = trial.setting if run in trial.setting else f"{trial.setting}, run with {run}"
                hidden, first, ours = private or examples.private, truth[:SHOWN], pictures.clamp(0, 1)[:SHOWN]
                grids.append(
                    base.PictureGrid(title=title, originals=first, recovered=ours, captions=captions, private=hidden)
                )
            if progress is not None:
                progress(len(rows), len(trials), sum(values) / len(values))
        del observation  # two at a time may be too much for the memory
    some = examples.subset(order[: trials[0].scene.samples])
    values = without_information(some.value_range.to_unit(some.x))
    rows.append(base.Line(control, PSNR, None, "what any attack must beat").measured(values))
    return base.Findings(rows, pictures=tuple(grids))


def without_information(x: torch.Tensor) -> list[float]:
    """PSNR of each picture if the mean of all others is the guess."""
    return psnr(x, (x.sum(0, keepdim=True) - x) / (len(x) - 1)).tolist()


def draws(seed: int, what: str) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(seed, 0, what))


LOSS = "training loss"
EPSILONS = (10, 5, 1, 0.1)
TABLE_11: Mapping[str, float] = {
    "no defence": 0.46,
    "fake gradients": 1.15,
    **{f"DP-SGD, epsilon {e:g}": 2.69 for e in EPSILONS},
}


@dataclass(frozen=True)
class Training:
    """Describe table 11 at one scale; the mean loss of the ``last`` rounds counts."""

    scene: Scene
    rounds: int
    lr: float

    @property
    def last(self) -> int:
        return min(self.rounds, max(5, self.rounds // 20))


TRAININGS: Mapping[str, Training] = {
    "smoke": Training(Scene(8, 4, (8, 16), 32), rounds=25, lr=0.1),
    "small": Training(Scene(40, 8, (8, 16), 32), rounds=600, lr=0.02),
    "paper": Training(Scene(SAMPLES, 40), rounds=8000, lr=0.01),
}


def defenses(size: Training) -> dict[str, Defense]:
    share = size.scene.batch / size.scene.samples
    private: dict[str, Defense] = {
        f"DP-SGD, epsilon {e:g}": DPSGD(clip=3.0, epsilon=e, steps=size.rounds, sampling_rate=share) for e in EPSILONS
    }
    return {"no defence": Defense(), "fake gradients": FakeGradients(), **private}


def run_table_11(scale: str, seed: int, progress: base.Progress | None = None) -> base.Findings:
    size = TRAININGS[scale]
    examples = base.examples_or_reason("cifar10", split="train", limit=size.scene.samples)
    if isinstance(examples, str):
        return base.Findings([base.Line(name, LOSS, value).not_run(examples) for name, value in TABLE_11.items()])
    lines: dict[str, tuple[float, ...]] = {}
    rows, table = [], defenses(size)
    for number, (name, defense) in enumerate(table.items()):
        losses: list[float] = []

        def tell(done: int, total: int, loss: float, before: int = number, losses: list[float] = losses) -> None:
            losses.append(loss)
            if progress is not None:
                progress(before * total + done, len(table) * total, loss)

        protocol, problem = Vertical(batch_size=size.scene.batch, rounds=size.rounds, lr=size.lr), ""
        try:
            net = size.scene.network(examples, seed)
            protocol.train(net, examples.x, examples.y, defense, draws(seed, "client"), tell)
        except ValueError as error:
            if not losses:
                raise
            problem = f"stopped in round {len(losses)}: {textwrap.shorten(str(error), 100, placeholder=' …')}"
        lines[name] = tuple(losses)
        rows.append(_loss_row(name, losses[-size.last :], size, defense, problem))
    # The noise of DP-SGD leaves no room for the others, which therefore have a chart of their own.
    trainable = {name: losses for name, losses in lines.items() if not isinstance(table[name], DPSGD)}
    scene = f"K={size.scene.batch} of {size.scene.samples} samples"
    curves = [
        base.Curves(title=f"{what}, {scene}", x_label="round", y_label="loss of the round's batch", lines=some)
        for what, some in (("Every defence", lines), ("Without DP-SGD", trainable))
    ]
    return base.Findings(rows, curves=tuple(curves))


def _loss_row(name: str, losses: list[float], size: Training, defense: Defense, problem: str) -> base.Row:
    full = TRAININGS["paper"]
    words = [f"mean of the last {size.last} rounds of {size.rounds}", f"learning rate {size.lr:g}"]
    if size != full:
        filters = " and ".join(map(str, size.scene.filters))
        words.append(f"K={size.scene.batch} of {size.scene.samples}, {filters} filters, published after {full.rounds}")
    if isinstance(defense, DPSGD):
        words.append(f"noise multiplier {defense.noise:.3g} for all rounds together")
    if problem or not all(math.isfinite(loss) for loss in losses):
        note = "; ".join((problem or "the loss is not finite", *words))
        return base.Row(name, LOSS, TABLE_11[name], None, None, len(losses), "above", note)
    return base.Line(name, LOSS, TABLE_11[name], "; ".join(words)).measured(losses)


TABLES = base.paper_tables("cafe", {"table10": run_table_10, "faces": run_faces, "table11": run_table_11})
