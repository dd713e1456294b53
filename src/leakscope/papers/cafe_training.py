"""Table 11 of "CAFE: Catastrophic Data Leakage in Vertical Federated Learning" (NeurIPS 2021): what defences cost.

Training loss at iteration 8000 with no defence, with fake gradients and with DP-SGD, whose noise keeps to its epsilon
over all rounds together. The paper tells neither its data, learning rate and sigma of the fake gradients, nor how its
noise was chosen. Here it is CIFAR-10, a rate at which undefended training works, and the default sigma.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from leakscope.contracts.defense import Defense
from leakscope.defenses import DPSGD, FakeGradients
from leakscope.federation import Vertical
from leakscope.papers.base import Curves, Findings, PaperTable, Progress, Row, examples_or_reason, measured_row, not_run
from leakscope.papers.cafe import PAPER, SAMPLES, Scene, draws

LOSS = "training loss"
EPSILONS = (10, 5, 1, 0.1)
TABLE_11: Mapping[str, float] = MappingProxyType(
    {"no defence": 0.46, "fake gradients": 1.15, **{f"DP-SGD, epsilon {e:g}": 2.69 for e in EPSILONS}}
)


@dataclass(frozen=True)
class Training:
    """Table 11 at one scale; the mean loss of the ``last`` rounds counts."""

    scene: Scene
    rounds: int
    lr: float

    @property
    def last(self) -> int:
        return min(self.rounds, max(5, self.rounds // 20))


TRAININGS = MappingProxyType(
    {
        "smoke": Training(Scene(8, 4, (8, 16), 32), rounds=25, lr=0.1),
        "small": Training(Scene(40, 8, (8, 16), 32), rounds=600, lr=0.02),
        "paper": Training(Scene(SAMPLES, 40), rounds=8000, lr=0.01),
    }
)


def defenses(size: Training) -> dict[str, Defense]:
    """The defences by the name of their row."""
    share = size.scene.batch / size.scene.samples
    private: dict[str, Defense] = {
        f"DP-SGD, epsilon {e:g}": DPSGD(clip=3.0, epsilon=e, steps=size.rounds, sampling_rate=share) for e in EPSILONS
    }
    return {"no defence": Defense(), "fake gradients": FakeGradients(), **private}


def run(scale: str, seed: int, progress: Progress | None = None) -> Findings:
    """One row a defence, and all losses as curves."""
    size = TRAININGS[scale]
    examples = examples_or_reason("cifar10", split="train", limit=size.scene.samples)
    if isinstance(examples, str):
        return Findings([not_run(name, LOSS, value, examples) for name, value in TABLE_11.items()])
    lines: dict[str, tuple[float, ...]] = {}
    rows = []
    table = defenses(size)
    for number, (name, defense) in enumerate(table.items()):
        losses: list[float] = []

        def tell(done: int, total: int, loss: float, before: int = number, losses: list[float] = losses) -> None:
            losses.append(loss)
            if progress is not None:
                progress(before * total + done, len(table) * total, loss)

        protocol = Vertical(batch_size=size.scene.batch, rounds=size.rounds, lr=size.lr)
        problem = ""
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
        Curves(title=f"{what}, {scene}", x_label="round", y_label="loss of the round's batch", lines=some)
        for what, some in (("Every defence", lines), ("Without DP-SGD", trainable))
    ]
    return Findings(rows, curves=tuple(curves))


def _loss_row(name: str, losses: list[float], size: Training, defense: Defense, problem: str) -> Row:
    full = TRAININGS["paper"]
    words = [f"mean of the last {size.last} rounds of {size.rounds}", f"learning rate {size.lr:g}"]
    if size != full:
        filters = " and ".join(map(str, size.scene.filters))
        words.append(f"K={size.scene.batch} of {size.scene.samples}, {filters} filters, published after {full.rounds}")
    if isinstance(defense, DPSGD):
        words.append(f"noise multiplier {defense.noise:.3g} for all rounds together")
    if problem or not all(math.isfinite(loss) for loss in losses):
        note = "; ".join((problem or "the loss is not finite", *words))
        return Row(name, LOSS, TABLE_11[name], None, None, len(losses), "above", note)
    return measured_row(name, LOSS, TABLE_11[name], losses, "; ".join(words))


TABLE = PaperTable(
    "cafe/table11",
    run,
    "what the defences cost: the loss of vertical training on CIFAR-10 after many rounds",
    PAPER,
    title="Training loss with fake gradients and with DP-SGD",
    scales={
        "smoke": "25 rounds, 8 samples, a small net",
        "small": "600 rounds, 40 samples, a small net",
        "paper": "8000 rounds, 800 samples, about a day",
    },
)
