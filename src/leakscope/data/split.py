"""How examples are divided among clients: one writer each, label shares from a Dirichlet, or at random.

Every function gives one tensor of row numbers a client, ascending, and no row to two clients.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from leakscope.contracts.checks import is_whole, refuse, whole
from leakscope.data.examples import Examples


def split_by_group(examples: Examples, limit: int | None = None) -> list[Tensor]:
    """One client a group, such as a writer, in ascending order; of each at most its first ``limit`` examples.

    >>> from leakscope.contracts.inputs import ValueRange
    >>> group = torch.tensor([7, 3, 7, 7])
    >>> demo = Examples(torch.zeros(4, 2), torch.zeros(4).long(), 1, ValueRange(), "demo", group=group)
    >>> [rows.tolist() for rows in split_by_group(demo, limit=2)]
    [[1], [0, 2]]
    """
    problems = []
    if examples.group is None:
        problems.append(
            f"{examples.name}: expected data that says to whom each example belongs, got none; use data with "
            "groups, or another split: iid or dirichlet"
        )
    if limit is not None and not is_whole(limit):
        problems.append(f"limit: expected a whole number of at least 1, or None, got {limit!r}")
    refuse("split_by_group", problems)
    group = torch.as_tensor(examples.group)
    return [torch.nonzero(group == owner).flatten()[:limit] for owner in group.unique(sorted=True)]


def split_iid(count: int, clients: int, generator: torch.Generator) -> list[Tensor]:
    """``count`` examples dealt out at random, so that two clients differ by one example at most.

    >>> sorted(len(rows) for rows in split_iid(7, 3, torch.Generator().manual_seed(0)))
    [2, 2, 3]
    """
    refuse("split_iid", whole(count=count) + _client_problems(clients, count))
    return [rows.sort().values for rows in torch.randperm(count, generator=generator).tensor_split(clients)]


def split_dirichlet(labels: Tensor, clients: int, alpha: float, generator: torch.Generator) -> list[Tensor]:
    """Label skew: the examples of each class are shared out in proportions drawn from Dirichlet(alpha).

    Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022,
    distribution-based label imbalance. Small alpha gives a class to few clients; the larger it is, the closer every
    client comes to an equal share of every class. Deviation: a client left with nothing is given one example of the
    largest client, where the published code draws anew until all have enough, which for small alpha need not end.
    """
    problems = []
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point() or len(labels) == 0:
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        problems.append(f"labels: expected class numbers of shape (N,), N at least 1, got {got}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not (alpha > 0 and math.isfinite(alpha)):
        problems.append(f"alpha: expected a positive number, got {alpha!r}")
    refuse("split_dirichlet", problems + _client_problems(clients, len(labels) if not problems else None))
    labels = labels.cpu()
    # Torch draws no Dirichlet from a generator of one's own; NumPy does, and safely for tiny alpha.
    draws = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in labels.unique(sorted=True):
        rows = torch.nonzero(labels == label).flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        ends = (draws.dirichlet(np.full(clients, float(alpha))).cumsum()[:-1] * len(rows)).round().astype(int)
        # Whom rounding favours is drawn for each class, or a few clients would get every class of one example.
        for client, part in zip(
            torch.randperm(clients, generator=generator).tolist(), rows.tensor_split(ends.tolist()), strict=True
        ):
            parts[client].append(part)
    dealt = [torch.cat(part) for part in parts]
    for client in range(clients):
        if len(dealt[client]) == 0:
            largest = max(range(clients), key=lambda other: len(dealt[other]))
            dealt[client], dealt[largest] = dealt[largest][-1:], dealt[largest][:-1]
    return [rows.sort().values for rows in dealt]


def _client_problems(clients: int, count: int | None) -> list[str]:
    if is_whole(clients) and is_whole(count) and clients > (count or 0):
        return [f"clients: expected at most {count}, one example each, got {clients}"]
    return whole(clients=clients)
