"""Single features from the activation patterns of units that all hear the same of an example; float64.

Behind a ReLU and a head of one constant for each unit, a row of the gradient, divided by that constant, is the sum of
c_i y_i over the examples that make the unit active: one of at most 2^n vectors. Two patterns that differ in one example
differ by c_i y_i exactly, and no other difference occurs as often. So the most frequent differences between distinct
rows are the features, however much these look alike; noise or missing entries leave nothing to count.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Distinct rows that are compared with each other, and how near, relative to the largest, rows count as the same.
MOST_ROWS, SAME = 600, 1e-4
#: A difference counts as a feature where it occurs at least so often.
LEAST_OCCURRENCES = 3


def frequent_differences(rows: Tensor, generator: torch.Generator) -> Tensor | None:
    """The n most frequent differences (n, n) between distinct ``rows`` (m, n), as unit rows that are independent.

    None where there are no n that occur often enough.

    >>> draws = torch.Generator().manual_seed(0)
    >>> features = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
    >>> gates = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]).double()
    >>> frequent_differences((gates @ features).repeat(3, 1), draws) is None  # two differences for each
    True
    >>> three = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.1], [0.8, 0.9, 0.3]]).double()
    >>> gates = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 3)
    >>> found = frequent_differences(gates @ three, draws)
    >>> bool(((torch.nn.functional.normalize(three, dim=1) @ found.T).abs().amax(1) > 1 - 1e-12).all())
    True
    """
    count = rows.shape[1]
    distinct = _distinct(rows, generator)
    if len(distinct) > MOST_ROWS:
        distinct = distinct[torch.randperm(len(distinct), generator=generator)[:MOST_ROWS]]
    first, second = torch.triu_indices(len(distinct), len(distinct), offset=1)
    differences = distinct[first] - distinct[second]
    probe = torch.randn(count, generator=generator, dtype=torch.float64)
    differences = differences * torch.where(differences @ probe < 0, -1.0, 1.0)[:, None]
    keys = _keys(differences, float(rows.abs().max()), generator)
    _, group, occurrences = keys.unique(return_inverse=True, return_counts=True)
    chosen: list[Tensor] = []
    for place in torch.argsort(occurrences, descending=True, stable=True):
        if int(occurrences[place]) < LEAST_OCCURRENCES or len(chosen) == count:
            break
        # The mean of all of them has less rounding than any one.
        vector = torch.nn.functional.normalize(differences[group == place].mean(0), dim=0)
        basis = torch.linalg.qr(torch.stack(chosen).T)[0] if chosen else vector[:, None] * 0
        if float((vector - basis @ (basis.T @ vector)).norm()) > SAME:
            chosen.append(vector)
    return torch.stack(chosen) if len(chosen) == count else None


def _distinct(rows: Tensor, generator: torch.Generator) -> Tensor:
    """One row of each kind."""
    keys = _keys(rows, float(rows.abs().max()), generator)
    _, group = keys.unique(return_inverse=True)
    places = torch.full((int(group.max()) + 1,), len(rows)).scatter_reduce_(0, group, torch.arange(len(rows)), "amin")
    return rows[places]


def _keys(rows: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Whole numbers that are the same for rows that are the same, but for those at a rounding's edge."""
    probe = torch.randn((rows.shape[1], 1), generator=generator, dtype=torch.float64)
    return (rows @ probe / (SAME * max(size, 1e-300))).round().flatten().long()
