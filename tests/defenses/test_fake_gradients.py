"""Fake gradients: by hand, against a plain reimplementation, and what they hide and do not hide."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leakscope.contracts.defense import Defense
from leakscope.data import load_data
from leakscope.defenses import DPSGD, FakeGradients
from leakscope.defenses import fake_gradients as module
from leakscope.federation import FedAvg, FedSGD
from leakscope.models import build_model

Update = dict[str, Tensor]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("order", "sent"),
    [
        # In order 3, 0.5, -1, -4: 3 is cut to 2, 0.5 is below 1 and stays, the lower half becomes -1 and -2.
        ("signed", [2.0, -1.0, 0.5, -2.0]),
        # In order -4, 3, -1, 0.5: -4 is cut to -2, 3 to 1, the two next to zero become -1 and -2.
        ("magnitude", [1.0, -1.0, -2.0, -2.0]),
    ],
)
def test_by_hand(order, sent, monkeypatch) -> None:
    monkeypatch.setattr(module, "_sorted_normal", lambda like, generator: torch.tensor([2.0, 1.0, -1.0, -2.0]))
    rule = FakeGradients(sigma=1.0, threshold=10.0, order=order, units="absolute")
    out = rule.protect_message({"w": torch.tensor([[3.0, -1.0], [0.5, -4.0]])}, seeded())
    assert out["w"].tolist() == [sent[:2], sent[2:]]


def plain(rule: FakeGradients, update: Update, seed: int) -> dict[str, list[float]] | None:
    """Algorithm 5 in lists of Python numbers, drawing the same numbers; None where no candidate is near enough."""
    draws = seeded(seed)
    entries = {name: value.double().flatten().tolist() for name, value in update.items()}
    places = {}
    for name, g in entries.items():
        shuffled = torch.randperm(len(g), generator=draws).tolist()
        key = (lambda i, g=g: g[i]) if rule.order == "signed" else (lambda i, g=g: abs(g[i]))
        places[name] = sorted(shuffled, key=key, reverse=True)
    length = math.sqrt(sum(v * v for g in entries.values() for v in g))
    limit = rule.threshold * (length if rule.units == "relative" else 1)
    for _ in range(1 + rule.retries):
        found = []
        for _ in range(rule.candidates):
            psi = {}
            for name, g in entries.items():
                size = rule.sigma * (math.sqrt(sum(v * v for v in g) / len(g)) if rule.units == "relative" else 1)
                numbers = torch.randn(len(g), generator=draws).tolist()
                psi[name] = [size * v for v in sorted(numbers, reverse=True)]
            gaps = ((psi[k][l] - g[place]) ** 2 for k, g in entries.items() for l, place in enumerate(places[k]))
            found.append((math.sqrt(sum(gaps)), psi))
        distance, psi = min(found, key=lambda pair: pair[0])
        if distance <= limit:
            out = {name: [0.0] * len(g) for name, g in entries.items()}
            for name, g in entries.items():
                for l, place in enumerate(places[name]):
                    out[name][place] = min(psi[name][l], max(g[place], -psi[name][l]))
            return out
    return None


VALUES = st.floats(-1e3, 1e3).map(lambda v: 0.0 if abs(v) < 1e-6 else v) | st.just(0.0)
UPDATES = st.lists(st.lists(VALUES, min_size=1, max_size=12), min_size=1, max_size=4).map(
    lambda rows: {f"t{i}": torch.tensor(row, dtype=torch.float64) for i, row in enumerate(rows)}
)


@settings(max_examples=150, deadline=None)
@given(
    update=UPDATES,
    seed=st.integers(0, 99),
    sigma=st.sampled_from([0.1, 0.5, 3.0]),
    threshold=st.sampled_from([0.3, 0.8, 2.0]),
    candidates=st.integers(1, 4),
    retries=st.integers(0, 2),
    order=st.sampled_from(["signed", "magnitude"]),
    units=st.sampled_from(["relative", "absolute"]),
)
def test_is_the_algorithm(update, seed, **given_settings) -> None:
    rule = FakeGradients(**given_settings)
    expected = plain(rule, update, seed)
    if expected is None:
        with pytest.raises(ValueError, match="larger threshold"):
            rule.protect_message(update, seeded(seed))
        return
    out = rule.protect_message(update, seeded(seed))
    for name, values in expected.items():
        assert out[name].tolist() == pytest.approx(values, rel=1e-12, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(update=UPDATES, seed=st.integers(0, 99))
def test_the_defaults_take_any_update(update, seed) -> None:
    out = FakeGradients().protect_message(update, seeded(seed))
    assert all(bool(torch.isfinite(value).all()) for value in out.values())


@settings(max_examples=100, deadline=None)
@given(true=st.lists(VALUES, min_size=1, max_size=30), seed=st.integers(0, 99), sigma=st.sampled_from([0.1, 1.0, 30.0]))
def test_what_the_rule_sends(true, seed, sigma) -> None:
    g = torch.tensor(true, dtype=torch.float64).sort(descending=True).values
    psi = sigma * torch.randn(len(g), generator=seeded(seed), dtype=torch.float64).sort(descending=True).values
    out = module.cut_to(g, psi)
    upper = psi >= 0
    assert torch.equal(out[~upper], psi[~upper])
    assert torch.equal(out[upper], torch.clamp(g[upper], -psi[upper], psi[upper]))
    assert bool((out <= g.clamp_min(0)).all()), "a positive value sent is at most the true one, which is positive"
    # Ranks survive in the lower half, in what is sent as positive, and so everywhere if the upper half is positive.
    assert bool((out[~upper].diff() <= 0).all())
    assert bool((out[out > 0].diff() <= 0).all())
    if bool((g[upper] >= 0).all()):
        assert bool((out.diff() <= 0).all())


def test_ranks_may_break_where_less_than_half_is_positive() -> None:
    out = module.cut_to(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([2.0, 0.5, -0.1]))
    assert out.tolist() == pytest.approx([-1.0, -0.5, -0.1]), "here they turn round"


def test_a_huge_sigma_sends_half_of_the_update_as_it_is() -> None:
    """The negative control: more random numbers are not more protection."""
    g = torch.randn(2000, generator=seeded(3))
    sent = FakeGradients(sigma=1e6, threshold=1e7).protect_message({"w": g}, seeded())["w"]
    same = sent == g
    assert torch.equal(same, sent >= -10)
    assert 0.9 < int(same.sum()) / 1000 < 1.1
    moderate = FakeGradients().protect_message({"w": g}, seeded())["w"]
    assert int((moderate == g).sum()) < 100


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
def test_in_signed_order_the_direction_stays(sigma) -> None:
    """Not a virtue: what is parallel to the update serves an attack as it serves training."""
    g = torch.randn(5000, generator=seeded(3)) ** 3
    cosines = {}
    for order in ("signed", "magnitude"):
        sent = FakeGradients(sigma=sigma, order=order).protect_message({"w": g}, seeded())["w"]
        cosines[order] = float(torch.cosine_similarity(g, sent, dim=0))
    assert cosines["signed"] > 0.7
    assert cosines["magnitude"] < cosines["signed"] - 0.05


def test_an_unmet_threshold_is_one_clear_error() -> None:
    update = {"w": torch.randn(500, generator=seeded(1))}
    rule = FakeGradients(sigma=0.5, threshold=0.2, candidates=3, retries=2)
    with pytest.raises(ValueError, match=r"threshold of 0\.2 times the norm.*got 0\.\d+ as the nearest of 9.*sigma"):
        rule.protect_message(update, seeded())
    with pytest.raises(ValueError, match=r"threshold of 0\.2, got \d+\.\d+ as"):
        FakeGradients(threshold=0.2, units="absolute").protect_message(update, seeded())


def test_a_broken_update_is_told_as_such() -> None:
    with pytest.raises(ValueError, match=r"finite values.*in w: the training diverged"):
        FakeGradients().protect_message({"w": torch.tensor([1.0, math.nan]), "b": torch.ones(2)}, seeded())


def test_same_seed_same_message_whatever_the_precision() -> None:
    update = {"w": torch.randn(30, 20, generator=seeded(1)), "b": torch.randn(30, generator=seeded(2))}
    first, again = (FakeGradients().protect_message(update, seeded(5)) for _ in range(2))
    other = FakeGradients().protect_message(update, seeded(6))
    assert all(torch.equal(first[k], again[k]) for k in update)
    assert not torch.equal(first["w"], other["w"])
    double = FakeGradients().protect_message({k: v.double() for k, v in update.items()}, seeded(5))
    assert all(torch.allclose(first[k].double(), double[k], atol=1e-6) for k in update)
    half = FakeGradients().protect_message({k: v.half() for k, v in update.items()}, seeded(5))
    assert all(v.dtype == torch.float16 and v.shape == update[k].shape for k, v in half.items())


def test_units_follow_the_size_of_the_update_or_not() -> None:
    update = {"w": torch.randn(400, generator=seeded(1)), "b": 7 * torch.randn(10, generator=seeded(2))}
    sent = FakeGradients().protect_message(update, seeded(3))
    scaled = FakeGradients().protect_message({k: 8 * v for k, v in update.items()}, seeded(3))
    assert all(torch.allclose(scaled[k], 8 * sent[k]) for k in update)
    fixed = FakeGradients(units="absolute", sigma=0.01, threshold=1e6)
    small, large = (fixed.protect_message({"b": s * update["b"]}, seeded(3))["b"] for s in (1, 1000))
    assert float(small.abs().max()) < 0.05
    assert float(large.abs().max()) < 0.05


def test_equal_entries_get_fake_values_in_no_order() -> None:
    update = {"w": torch.cat([torch.ones(1), torch.zeros(400)])}
    sent = FakeGradients().protect_message(update, seeded())["w"][1:]
    fake = sent[sent != 0]
    assert 150 < len(fake) < 250
    falls = float((fake.diff() < 0).double().mean())
    assert 0.4 < falls < 0.6, "no trend along the tensor"
    assert bool((FakeGradients().protect_message({"w": torch.zeros(5)}, seeded())["w"] == 0).all())


@pytest.mark.parametrize("protocol", [FedSGD(), FedSGD(reduction="sum"), FedAvg(epochs=2, batch_size=2)], ids=repr)
def test_protects_the_message_of_each_protocol(protocol) -> None:
    tiles = load_data("tiles", limit=4)
    net = build_model("convnet", input_shape=tiles.shape, num_classes=9, filters=4)
    bare = protocol.observe(net, tiles.x, tiles.y, generator=seeded(1)).message.update
    sent = protocol.observe(net, tiles.x, tiles.y, FakeGradients(), generator=seeded(1)).message.update
    for name, value in bare.items():
        assert sent[name].shape == value.shape
        assert not torch.equal(sent[name], value)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"sigma": 0.0, "threshold": math.nan}, r"(?s)sigma: expected.*threshold: expected"),
        ({"candidates": 0, "retries": -1}, r"(?s)candidates: expected.*at least 1.*retries: expected.*at least 0"),
        ({"order": "random", "units": "percent"}, r"(?s)order: expected.*units: expected"),
    ],
)
def test_all_bad_settings_are_told(bad, words) -> None:
    with pytest.raises(ValueError, match=words):
        FakeGradients(**bad)


def closed_form(defense: Defense, messages: int = 60) -> float:
    """Mean correlation of 12 pictures with what many messages of one net with a linear first layer give away.

    Which pictures are in which batch is known, as in vertical learning. Each message is then a known mixture of the
    gradients of single pictures, found by least squares; each of these is a picture times the gradient of the bias.
    """
    draws = seeded(4)
    x, y = torch.rand(12, 3, 8, 8, generator=draws), torch.arange(12) % 4
    net = build_model("mlp", input_shape=(3, 8, 8), num_classes=4, hidden=(32,))
    shares, weights, biases = torch.zeros(messages, 12), [], []
    for number in range(messages):
        rows = torch.randperm(12, generator=draws)[:3]
        shares[number, rows] = 1 / 3
        sent = FedSGD().observe(net, x[rows], y[rows], defense, generator=seeded(number)).message.update
        weights.append(sent["fc1.weight"])
        biases.append(sent["fc1.bias"])
    solve = torch.linalg.pinv(shares)
    weight, bias = torch.einsum("nm,mkd->nkd", solve, torch.stack(weights)), solve @ torch.stack(biases)
    found = torch.einsum("nkd,nk->nd", weight, bias) / bias.square().sum(1, keepdim=True)
    pairs = [torch.corrcoef(torch.stack([one, other]))[0, 1] for one, other in zip(found, x.flatten(1), strict=True)]
    return float(torch.stack(pairs).mean())


def test_many_messages_of_one_model_give_the_pictures_away() -> None:
    assert closed_form(Defense()) > 0.999
    assert closed_form(FakeGradients()) > 0.9, "ranks are enough"
    assert closed_form(DPSGD()) < 0.2, "the control: noise for a promise does hide them"
