"""MixUp: the client trains on weighted means of its examples.

Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", ICLR 2018; as a defence in Huang et al.,
"Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", NeurIPS 2021 (GradAttack). In place of the
i-th example of a batch stands

    sum over j = 1..k of lambda_ij x_(pi_j(i)),    lambda_i from Dirichlet(3, 1, ..., 1),

pi_1 the identity, the others random permutations of the batch; lambda_i is drawn anew until all of it lies in [least,
most]. Targets are mixed alike, so that labels become a probability for each class. In a batch of one there is nothing
to mix with, and the example stays as it is.

Promise: none. A matching attack recovers the mixtures as well as it would the examples. Nor do the parts stay mixed: a
batch is as many equations as unknown pictures, and the shares are in the soft labels, which the gradient of the head
gives away (equations/mixtures.py). ``head-first`` and the matching attacks that know the defence take the mixtures
apart; a result where that could not be done carries the flag "defence approximated".
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction

#: The weight of the example itself in Dirichlet(3, 1, ..., 1), a whole number.
_OWN = 3
_TRIES = 1000


@dataclass(frozen=True, kw_only=True)
class MixUp(Defense):
    """Train on mixtures of ``images`` examples each, drawn anew for every batch."""

    images: int = setting(2, "Examples in a mixture.", ge=1)
    least: float = setting(0.0, "The smallest share of an example in a mixture.", ge=0, lt=1)
    most: float = setting(0.65, "The largest share of an example in a mixture.", gt=0, le=1)
    classes: int | None = setting(None, "Outputs of the model; read off it unless told.", ge=1)

    def problems(self) -> list[str]:
        if self.images > 1 and not self.least < 1 / self.images < self.most:
            wanted = f"on either side of 1/{self.images}, for {self.images} shares add up to 1"
            return [f"least, most: expected them {wanted}, got {self.least:g} and {self.most:g}"]
        return []

    def for_model(self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Self:
        return dataclasses.replace(self, classes=output_shape[0]) if len(output_shape) == 1 else self

    def protect_batch(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.images == 1 or len(x) == 1:
            return x, y
        targets = self._numbers(y, x)
        shares = self._shares(len(x), generator).to(x)
        partners = [torch.arange(len(x))]
        partners += [torch.randperm(len(x), generator=generator) for _ in range(self.images - 1)]
        return _mixed(x, shares, partners), _mixed(targets, shares, partners)

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(mixed=self.images) if examples > 1 else Channel()

    def _numbers(self, y: Tensor, like: Tensor) -> Tensor:
        if y.is_floating_point():
            return y
        if y.dim() != 1 or self.classes is None:
            raise UserError(f"mixup: expected one class an example, or targets that are numbers, got {tuple(y.shape)}")
        return y.to(like) if self.classes == 1 else nn.functional.one_hot(y, self.classes).to(like)

    def _shares(self, count: int, generator: torch.Generator) -> Tensor:
        rows = torch.empty(count, self.images, dtype=torch.float64)
        open_rows = torch.arange(count)
        for _ in range(_TRIES):
            rows[open_rows] = _dirichlet(len(open_rows), self.images, generator)
            outside = (rows[open_rows] > self.most) | (rows[open_rows] < self.least)
            open_rows = open_rows[outside.any(1)]
            if not len(open_rows):
                return rows
        wanted = f"shares between {self.least:g} and {self.most:g} in {_TRIES} draws"
        raise UserError(f"mixup: expected {wanted}, got none; set least and most farther apart")


def _dirichlet(count: int, parts: int, generator: torch.Generator) -> Tensor:
    """Rows of Dirichlet(3, 1, ..., 1): sums of three exponential numbers, and single ones, over their total."""
    draws = -torch.log1p(-torch.rand(count, parts + _OWN - 1, generator=generator, dtype=torch.float64))
    weights = torch.cat([draws[:, :_OWN].sum(1, keepdim=True), draws[:, _OWN:]], dim=1)
    return weights / weights.sum(1, keepdim=True)


def _mixed(values: Tensor, shares: Tensor, partners: list[Tensor]) -> Tensor:
    columns = shares.to(values).reshape(*shares.shape, *[1] * (values.dim() - 1))
    return torch.stack([columns[:, j] * values[order.to(values.device)] for j, order in enumerate(partners)]).sum(0)
