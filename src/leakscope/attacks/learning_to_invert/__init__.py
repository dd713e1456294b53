"""Learning to Invert: learn the way back from protected updates to inputs, with examples of one's own.

Ruihan Wu, Xiangyu Chen, Chuan Guo, Kilian Weinberger, "Learning To Invert: Simple Adaptive Attacks for Gradient
Inversion in Federated Learning", UAI 2023. The adversary has examples x of the same kind, and the client's code. It
plays clients, defence and all, and fits a regression from what they send to what they hold,

    min over f of the sum over played clients |f(defence(update(x))) - x|^2,

whose answer to the observed update is the reconstruction. No objective is matched, so the defence need not be
differentiable: signs, rounding, pruning, noise, clipping are all learned alike.

Differences from the paper and its published code. The defence acts where the client applies it; that code compresses
each example's gradient before they are averaged, which overstates what a batch leaks. In place of one network of 3000
hidden units trained for 200 epochs on all of a data set, regressions are fitted to a few thousand played clients:
ridge, linear or with a Gaussian kernel, and a small network with early stopping that corrects the best of them. The
least error on held-out examples wins, and the mean of all examples if nothing beats it. Batches are learned in an order
(by class, within a class by mean) instead of up to one. FedAvg is played where its recipe is known. Equal settings
share one regression, which depends on nothing of the client; so its draws come from the setting ``seed``.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from leakscope.attacks.learning_to_invert.regression import (
    WIDTHS,
    Featuriser,
    Mean,
    Pairs,
    Regressor,
    choose_ridge,
    fit_network,
    refit_ridge,
)
from leakscope.attacks.shared_work import shared
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import ClientSide, batch_gradient, client_copy, own_randomness, train_locally, visits
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting

#: Examples of its own for each in a batch (of at least four) below which an adversary learns nothing worth the name.
LEAST_PER_EXAMPLE = 8
#: A tensor this many times larger or smaller than any that a played client sent was not sent by such a client.
UNLIKE = 2.0


@dataclass(frozen=True, eq=False)
class Inversion:
    featuriser: Featuriser
    regressor: Regressor
    scaled: bool
    error: float
    prior_error: float
    clients: int
    scale_range: tuple[Tensor, Tensor]

    def __deepcopy__(self, _memo: dict[int, Any]) -> Inversion:
        return self  # it does not change, and is large

    def __call__(self, update: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
        features, scales = self.featuriser(update)
        row = features[None] if self.scaled else self.featuriser.unscaled(features[None], scales[None])
        low, high = self.scale_range
        alike = bool(((scales >= low / UNLIKE) & (scales <= high * UNLIKE)).all())
        return self.regressor(row)[0], alike


@dataclass(frozen=True, kw_only=True)
class LearningToInvert(Attack):
    """Learn the way back from protected updates to inputs with examples of one's own; any defence, no channel."""

    requires: ClassVar[tuple[str, ...]] = ("num_examples", "defense", "auxiliary_data")
    runs_defense: ClassVar[bool] = True

    clients: int = setting(4000, "Played clients at most.", ge=8)
    features: int = setting(2048, "Numbers that an update is hashed to where it has more.", ge=1)
    held_out: float = setting(0.1, "Share of the adversary's examples that choices are made on.", gt=0, le=0.5)
    kernel: bool = setting(True, "Whether ridge regressions with a Gaussian kernel are fitted too.")
    hidden: int = setting(512, "Units in each hidden layer of the network; 0 leaves it out.", ge=0)
    epochs: int = setting(40, "Epochs of the network at most.", ge=1)
    lr: float = setting(1e-3, "The network's learning rate.", gt=0)
    seed: int = setting(0, "What played clients and the fits draw from; the same for all updates of a setting.", ge=0)

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        count = observation.num_examples
        assert count is not None
        x, y = self._examples(observation, count)
        client = PlayedClient.of(observation)
        draws = torch.Generator().manual_seed(self.seed)

        seen, message = observation, observation.message
        facts = (seen.task, seen.training, seen.reduction, seen.batchnorm, message.kind, tuple(message.update))
        parts = (self, seen.defense, count, *facts)
        tables: list[Mapping[str, Tensor]] = [seen.model.state_dict(), {"auxiliary inputs": x, "auxiliary targets": y}]
        numbers = self.clients * (self.features + count * seen.inputs.size)
        inversion: Inversion = shared(
            *(seen.shared, "learning-to-invert", parts, seen.model, tables, draws, numbers),
            lambda: self._learn(client, x, y, draws, progress),
        )
        flat, alike = inversion(message.update)
        inputs = seen.inputs.project(flat.reshape(count, *seen.input_shape))
        labels = seen.labels
        if labels is not None and not labels.is_floating_point() and labels.dim() == 1:
            labels = labels.sort().values  # as inputs are returned
        left = inversion.error / inversion.prior_error if inversion.prior_error else 1.0
        return Reconstruction(
            inputs=inputs,
            labels=labels,
            scores=inputs.new_full((count,), inversion.error),
            flags=() if alike else ("unlike the simulations",),
            notes=(
                f"learned from {inversion.clients} played clients: {inversion.regressor.name}, held-out error "
                f"{inversion.error:.2g}, {left:.0%} of what the mean of all examples has",
            ),
            info={
                **{"steps": inversion.clients, "restarts": 1, "compiled": False},
                **{"regression": inversion.regressor.name, "held_out_mse": inversion.error},
                "prior_mse": inversion.prior_error,
            },
        )

    def _examples(self, observation: Observation, count: int) -> tuple[Tensor, Tensor]:
        least = LEAST_PER_EXAMPLE * max(4, count)
        got = 0 if observation.auxiliary is None else len(observation.auxiliary[0])
        if observation.auxiliary is None or got < least:
            raise NotApplicable(
                f"expected at least {least} examples of the adversary's own to learn from, got {got}. Give more: data "
                "beyond the attacked examples in an audit, auxiliary=(x, y) in observe(...)"
            )
        x, y = observation.auxiliary
        return x.to(observation.dtype), y

    def _batches(self, examples: int, count: int, draws: torch.Generator) -> tuple[list[Tensor], int]:
        """Return which examples each played client holds, none on both sides, and how many clients are learned from."""
        order = torch.randperm(examples, generator=draws)
        held = max(4 * count, round(self.held_out * examples))
        checks = max(4, round(self.held_out * self.clients))
        learn = [order[held:][batch] for batch in drawn_batches(examples - held, count, self.clients, draws)]
        check = [order[:held][batch] for batch in drawn_batches(held, count, checks, draws)]
        return [*learn, *check], len(learn)

    def _learn(
        self, client: PlayedClient, x: Tensor, y: Tensor, draws: torch.Generator, progress: Progress | None
    ) -> Inversion:
        count = client.observation.num_examples or 1
        batches, learned = self._batches(len(x), count, draws)
        done, total = itertools.count(1), len(batches) + (self.epochs if self.hidden else 0)

        def tell(objective: float) -> None:
            if progress is not None:
                progress(next(done), total, objective)

        featuriser = Featuriser.of(client.observation.message.update, self.features, draws)
        played, scales, targets = [], [], []
        for batch in batches:
            features, scale = featuriser(client.update(x[batch], y[batch], draws))
            played.append(features)
            scales.append(scale)
            targets.append(x[batch][in_order(x[batch], y[batch])].flatten())
            tell(math.nan)
        scaled, sizes, wanted = torch.stack(played), torch.stack(scales), torch.stack(targets)
        if not bool(torch.isfinite(scaled).all()):
            raise NotApplicable("updates of played clients are not finite: this recipe diverges on other examples")
        plain, even = (
            Pairs(rows[:learned], wanted[:learned], rows[learned:], wanted[learned:])
            for rows in (featuriser.unscaled(scaled, sizes), scaled)
        )
        regressor: Regressor = Mean(plain.targets.mean(0))
        prior = error = plain.error(regressor)
        tried = [(plain, choose_ridge(plain, [None, *(WIDTHS if self.kernel else ())]))]
        tried += [(even, choose_ridge(even, WIDTHS))] if self.kernel else []
        fits = [(pairs, *fit) for pairs, fit in tried if fit is not None and fit[1] < prior]
        pairs = plain
        if fits:
            pairs, ridge, error = min(fits, key=lambda fit: fit[2])
            ridge, error = refit_ridge(ridge, error, pairs)
            regressor = ridge
            if self.hidden:
                size = {"hidden": self.hidden, "epochs": self.epochs}
                regressor, error = fit_network(ridge, pairs, draws, **size, lr=self.lr, tell=tell)
        bounds = sizes.amin(0), sizes.amax(0)
        return Inversion(featuriser, regressor, pairs is even, error, prior, learned, bounds)


#: What must be known of a recipe to replay it.
_RECIPE = ("epochs", "batch_size", "learning_rate", "optimizer")


@dataclass(frozen=True, eq=False)
class PlayedClient:
    """A client of the observed protocol with the observed model and defence, which trains on any examples."""

    observation: Observation
    defense: Defense
    model: nn.Module
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, observation: Observation) -> PlayedClient:
        if observation.defense is None:
            raise NotApplicable(
                "the observation does not carry the defence's code, only at most its channel (files do not hold it). "
                "Give it with dataclasses.replace(observation, defense=...), Defense() where there is none"
            )
        trained = {name for name, parameter in observation.model.named_parameters() if parameter.requires_grad}
        if trained != set(observation.message.update):
            raise NotApplicable("the update is not of all tensors that the model trains, and of no others")
        unknown = [name for name in _RECIPE if getattr(observation.training, name) is None]
        if observation.message.kind == "weight_delta" and unknown:
            raise NotApplicable(
                f"the client's recipe cannot be replayed: {', '.join(unknown)} not known. Grant local_epochs, "
                "batch_size and learning_rate in the knowledge"
            )
        client = client_copy(observation.model, observation.batchnorm, observation.dropout)
        model = observation.defense.protect_copy(client)
        return cls(observation, observation.defense, model, copy.deepcopy(model.state_dict()))

    def update(self, x: Tensor, y: Tensor, generator: torch.Generator) -> Gradient:
        self.model.load_state_dict(self.weights)  # local steps move the weights, BatchNorm its statistics
        client = ClientSide(self.model, x, y, self.observation.task, self.defense, generator, self.observation.model)
        with own_randomness(generator):
            update = self._trained(client)
        return self.defense.protect_message(update, generator)

    def _trained(self, client: ClientSide) -> Gradient:
        if self.observation.message.kind == "gradient":
            return batch_gradient(client, self.observation.reduction)
        recipe, count = self.observation.training, len(client.x)
        assert recipe.epochs is not None
        assert recipe.batch_size is not None
        assert recipe.learning_rate is not None
        batches: Iterator[Tensor] = visits(count, recipe.batch_size, recipe.epochs, client.generator)
        if recipe.batch_order is not None:
            batches = (torch.tensor(step) for step in recipe.batch_order)
        return train_locally(client, batches, recipe.learning_rate, recipe.optimizer or "sgd", recipe.momentum or 0)[0]


def drawn_batches(examples: int, size: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Draw at most ``count`` batches of ``size``; single examples are passed through once.

    >>> draws = torch.Generator().manual_seed(0)
    >>> [len(batch) for batch in drawn_batches(5, 2, 3, draws)], len(list(drawn_batches(5, 1, 9, draws)))
    ([2, 2, 2], 5)
    """
    made = 0
    while made < count:
        for batch in torch.randperm(examples, generator=generator)[: examples - examples % size].split(size):
            if made == count:
                return
            yield batch
            made += 1
        if size == 1:
            return


def in_order(x: Tensor, y: Tensor) -> Tensor:
    """Order a batch's examples by class, those of one class by their mean; without classes by the mean alone.

    >>> in_order(torch.tensor([[3.0], [1.0], [0.0]]), torch.tensor([0, 0, 7])).tolist()
    [1, 0, 2]
    """
    by_mean = torch.argsort(x.flatten(1).mean(1), stable=True)
    if y.is_floating_point() or y.dim() != 1:
        return by_mean
    return by_mean[torch.argsort(y[by_mean], stable=True)]
