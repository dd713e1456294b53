"""What a channel keeps of an update, against the defence itself; and what it refuses."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from leakscope.contracts.channel import Channel
from leakscope.defenses import GradientPruning


def test_pruning_keeps_what_the_defence_keeps() -> None:
    torch.manual_seed(0)
    update = {"a": torch.randn(4, 7), "b": torch.randn(5), "c": torch.randn(1)}
    for scope, share in itertools.product(("tensor", "global"), (0.2, 0.5, 0.9)):
        protected = GradientPruning(fraction=share, scope=scope).protect_message(update, torch.Generator())  # type: ignore[arg-type]
        wanted = torch.cat([value.flatten() for value in protected.values()]) != 0
        kept = Channel(prune=share, prune_scope=scope).kept(list(update.values()), torch.Generator())  # type: ignore[arg-type]
        assert kept is not None
        assert torch.equal(kept, wanted)


def test_dropout_is_seeded_nested_and_of_the_right_size() -> None:
    update = [torch.ones(100_000)]

    def kept(share: float, seed: int = 0) -> Tensor:
        found = Channel(dropout=share).kept(update, torch.Generator().manual_seed(seed))
        assert found is not None
        return found

    assert torch.equal(kept(0.3), kept(0.3))
    assert not torch.equal(kept(0.3), kept(0.3, seed=1))
    assert not bool((kept(0.6) & ~kept(0.3)).any())
    assert float(kept(0.3).double().mean()) == pytest.approx(0.7, abs=0.01)


def test_wrong_channels_are_told_all_at_once() -> None:
    with pytest.raises(ValueError, match="Channel:") as caught:
        Channel(noise=math.nan, clip=0.0, prune=1.0, dropout=-0.1, prune_scope="row", clip_per="row")  # type: ignore[arg-type]
    for word in ("noise:", "clip:", "prune:", "dropout:", "prune_scope:", "clip_per:"):
        assert word in str(caught.value)
    for levels in ({"fc.weight": -1.0}, {"fc.weight": math.inf}):
        with pytest.raises(ValueError, match="noise: expected finite numbers >= 0"):
            Channel(noise=levels)
