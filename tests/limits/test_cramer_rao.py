"""The Cramér–Rao floor against estimators that reach it, finite differences and closed forms."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacfwd, vmap

from leakscope.contracts.channel import Channel
from leakscope.contracts.inputs import ValueRange
from leakscope.defenses import DPSGD
from leakscope.equations import decomposition as decomposition_module
from leakscope.equations.decomposition import decompose
from leakscope.limits import Floor, cramer_rao, gradient_map_at
from leakscope.limits import jacobian as jacobian_module
from leakscope.limits.jacobian import decompose_at, make_jacobian
from leakscope.matching.gradient_map import GradientMap, affordable_steps
from leakscope.models import build_model

# The function of this name hides the module in its package.
floor_module = importlib.import_module("leakscope.limits.cramer_rao")


def tanh_net(features: int = 6, hidden: int = 8, classes: int = 4, seed: int = 0) -> nn.Module:
    return build_model("mlp", input_shape=(features,), num_classes=classes, hidden=hidden, activation="tanh", seed=seed)


def at(batch: int = 2, features: int = 6, **facts: int) -> tuple[GradientMap, Tensor]:
    net = tanh_net(features, **facts)
    return gradient_map_at(net, (features,), batch, facts.get("classes", 4), seed=1)


def linear_observation() -> tuple[GradientMap, Tensor]:
    """A map that is linear in the inputs: with the output gradient held, the head's gradient is signal x (A input)'."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 9, bias=False), nn.Linear(9, 3)).requires_grad_(False)
    net[1].requires_grad_(True)
    mapping, flat = gradient_map_at(net, (5,), 1, 3)
    return dataclasses.replace(mapping, output_gradient=torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)), flat


def clipped(gradient: Tensor, bound: float | None) -> Tensor:
    return gradient if bound is None else gradient / max(1.0, float(gradient.norm()) / bound)


def numeric_jacobian(function: Callable[[Tensor], Tensor], flat: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences, one row an unknown."""
    units = torch.eye(len(flat), dtype=torch.float64)
    return torch.stack([(function(flat + step * u) - function(flat - step * u)) / (2 * step) for u in units])


def test_a_linear_observation_has_the_error_of_least_squares() -> None:
    mapping, flat = linear_observation()
    matrix, value, sigma = numeric_jacobian(mapping, flat, 1.0).T, mapping(flat), 0.3
    floor = cramer_rao(mapping, flat, Channel(noise=sigma))
    assert floor.rmse == pytest.approx(sigma * math.sqrt(float(torch.linalg.inv(matrix.T @ matrix).trace()) / 5))
    generator, draws = torch.Generator().manual_seed(3), 4000
    noise = sigma * torch.randn(len(value), draws, generator=generator, dtype=torch.float64)
    offset = (value - matrix @ flat)[:, None]
    found = torch.linalg.lstsq(matrix, value[:, None] + noise - offset).solution
    ratio = float((found - flat[:, None]).square().mean()) / floor.rmse**2
    # 4000 draws of 5 unknowns: even if one of them had all the variance the ratio spreads by sqrt(2 / 4000) = 0.022.
    assert ratio == pytest.approx(1, abs=0.07)


def test_maximum_likelihood_on_a_small_tanh_net_reaches_the_floor() -> None:
    mapping, flat = at(batch=2)
    sigma, draws = 1e-4, 300
    floor = cramer_rao(mapping, flat, Channel(noise=sigma))
    noise = torch.randn(draws, mapping.entries, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen, guesses = mapping(flat) + sigma * noise, flat.repeat(draws, 1)
    for _ in range(3):  # Gauss-Newton from the truth: the nearest maximum of the likelihood
        rest = (seen - vmap(mapping)(guesses))[:, :, None]
        step = torch.linalg.lstsq(vmap(jacfwd(mapping))(guesses).detach(), rest.detach()).solution
        guesses = guesses + step.squeeze(2)
    assert float(step.abs().max()) < 1e-3 * floor.rmse
    ratio = float((guesses - flat).square().mean()) / floor.rmse**2
    assert 0.9 < ratio < 1.2
    assert floor.psnr == pytest.approx(-20 * math.log10(floor.rmse))


CHANNELS = [
    Channel(noise=0.01),
    Channel(noise=0.01, clip=0.05),
    Channel(noise=0.025, clip=0.05),
    Channel(noise=0.01, clip=1e6),
    Channel(noise=0.01, prune=0.3),
    Channel(noise=0.01, prune=0.3, prune_scope="global"),
    Channel(noise=0.01, dropout=0.2),
    Channel(noise=0.01, clip=0.05, prune=0.2, dropout=0.1),
]


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.describe())
def test_the_floor_is_that_of_finite_differences_of_the_real_channel(channel: Channel) -> None:
    mapping, flat = at(batch=2, hidden=12)
    sizes = [value.numel() for value in mapping.update(flat).values()]
    # Which entries go is the same nearby, so it may be settled at the point itself.
    kept = channel.kept(mapping(flat).split(sizes), torch.Generator().manual_seed(7))
    mask = torch.ones(mapping.entries, dtype=torch.bool) if kept is None else kept

    matrix = numeric_jacobian(lambda point: clipped(mapping(point), channel.clip)[mask], flat)
    level = channel.level("fc1.weight")
    inverse = torch.linalg.inv(matrix @ matrix.T) * level**2
    floor = cramer_rao(mapping, flat, channel, seed=7)
    assert floor.method == "exact"
    assert floor.rmse == pytest.approx(math.sqrt(float(inverse.trace()) / 12), rel=1e-5)
    assert floor.example_rmse == pytest.approx(inverse.diagonal().reshape(2, 6).mean(1).sqrt().tolist(), rel=1e-5)
    assert floor.loosened == pytest.approx(level * math.sqrt(12) / float(matrix.norm()), rel=1e-5)
    assert floor.loosened <= floor.rmse
    assert floor.rank == floor.unknowns == 12
    values = torch.linalg.svdvals(matrix)
    assert floor.smallest == pytest.approx(float(values[-1]), rel=1e-4)
    assert floor.condition == pytest.approx(float(values[0] / values[-1]), rel=1e-4)
    whole = numeric_jacobian(lambda point: clipped(mapping(point), channel.clip), flat)
    assert floor.surviving == pytest.approx(float(matrix.norm() / whole.norm()) ** 2, rel=1e-5)


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.describe())
def test_the_gram_matrix_gives_the_same_floor(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping, flat = at(batch=2, hidden=12)
    direct = cramer_rao(mapping, flat, channel)
    monkeypatch.setattr(decomposition_module, "MAX_SINGULAR_VALUES", 0)
    monkeypatch.setattr(floor_module, "MAX_SINGULAR_VALUES", 0)
    other = cramer_rao(mapping, flat, channel)
    assert other.rmse == pytest.approx(direct.rmse, rel=1e-6)
    assert other.example_rmse == pytest.approx(direct.example_rmse, rel=1e-6)
    assert other.condition == pytest.approx(direct.condition, rel=1e-5)


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.describe())
def test_the_estimate_agrees_within_its_own_error(channel: Channel) -> None:
    mapping, flat = at(batch=3, features=10, hidden=16)
    exact = cramer_rao(mapping, flat, channel)
    found = cramer_rao(mapping, flat, channel, method="estimate", probes=16, steps=200, seed=0)
    assert found.method == "estimate"
    assert found.converged == 1.0
    assert found.reason is None
    assert found.standard_error is not None
    assert abs(found.rmse - exact.rmse) <= 2.5 * found.standard_error + 1e-3 * exact.rmse
    assert found.interval is not None
    assert found.interval[0] < found.rmse < found.interval[1]
    # Hutchinson's estimate of |J|^2 with sixteen probes.
    assert found.loosened == pytest.approx(exact.loosened, rel=0.15)
    assert found.surviving == pytest.approx(exact.surviving, abs=0.1)
    assert (found.gradient_norm, found.clip_factor, found.sigma) == pytest.approx(
        (exact.gradient_norm, exact.clip_factor, exact.sigma)
    )


def test_a_stopped_probe_is_lower_and_says_so() -> None:
    mapping, flat = at(batch=3, features=10, hidden=16)
    floors = [
        cramer_rao(mapping, flat, Channel(noise=0.01), method="estimate", probes=4, steps=steps)
        for steps in (1, 3, 10, 300)
    ]
    assert all(one.rmse < two.rmse for one, two in itertools.pairwise(floors))
    assert floors[0].converged == 0.0
    assert "lower than the true floor" in (floors[0].reason or "")
    assert floors[0].rmse >= floors[0].loosened * (1 - 1e-12)
    assert floors[-1].converged == 1.0


def test_large_models_get_fewer_steps() -> None:
    small, _ = at(batch=1)
    wide, _ = gradient_map_at(nn.Linear(3000, 1000), (3000,), 4, 1000)
    assert affordable_steps(small) == 300
    assert 2 <= affordable_steps(wide) < 10


# --- noise that differs between tensors, and clipping of each example -------------------------------------------------

#: Standard deviations of the noise on the tensors of ``tanh_net``.
LEVELS = {"fc1.weight": 0.01, "fc1.bias": 0.3, "fc2.weight": 0.002, "fc2.bias": 0.05}


def levels_of(mapping: GradientMap, channel: Channel) -> Tensor:
    """The standard deviation of the noise on each entry of the update."""
    weights = mapping.victim.tensors.weights
    return torch.cat([torch.full((v.numel(),), channel.level(n), dtype=torch.float64) for n, v in weights.items()])


def dense_rmse(jacobian: Tensor, levels: Tensor) -> float:
    """sqrt(trace((J D^-2 J')^-1) / n) for a Jacobian with one row an unknown and noise D."""
    information = (jacobian / levels.square()) @ jacobian.T
    return math.sqrt(float(torch.linalg.inv(information).trace()) / len(jacobian))


def clipped_mean(net: nn.Module, labels: Tensor, clip: float, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """The mean of the examples' gradients, each clipped, by plain autograd."""
    exact = copy.deepcopy(net).double()

    def function(flat: Tensor) -> Tensor:
        each = []
        for x, y in zip(flat.reshape(len(labels), *shape), labels, strict=True):
            loss = nn.functional.cross_entropy(exact(x[None]), y[None])
            gradients = torch.autograd.grad(loss, list(exact.parameters()), create_graph=True)
            whole = torch.cat([gradient.flatten() for gradient in gradients])
            each.append(whole * (clip / whole.norm()).clamp(max=1.0))
        return torch.stack(each).mean(0)

    return function


def autograd_jacobian(function: Callable[[Tensor], Tensor], flat: Tensor) -> Tensor:
    """One row an unknown."""
    found = torch.autograd.functional.jacobian(function, flat)
    assert isinstance(found, Tensor)
    return found.T


def test_the_same_noise_on_every_tensor_is_one_number() -> None:
    mapping, flat = at(batch=2, hidden=12)
    for facts in ({}, {"clip": 0.05}, {"prune": 0.3}, {"clip": 0.05, "clip_per": "example"}):
        alike = cramer_rao(mapping, flat, Channel(noise=dict.fromkeys(LEVELS, 0.01), **facts))
        assert alike == cramer_rao(mapping, flat, Channel(noise=0.01, **facts))


def test_noise_by_tensor_weighs_every_entry_by_its_own_noise() -> None:
    mapping, flat = at(batch=2, hidden=12)
    channel = Channel(noise=LEVELS)
    wanted = dense_rmse(numeric_jacobian(mapping, flat), levels_of(mapping, channel))
    floor = cramer_rao(mapping, flat, channel)
    assert (floor.method, floor.sigma) == ("exact", 1.0)
    assert floor.rmse == pytest.approx(wanted, rel=1e-5)
    assert floor.gradient_norm == pytest.approx(float(mapping(flat).norm())), "in the units of the gradient"
    doubled = {name: 2 * level for name, level in LEVELS.items()}
    assert cramer_rao(mapping, flat, Channel(noise=doubled)).rmse == pytest.approx(2 * wanted, rel=1e-5)


def test_noise_by_tensor_is_no_worse_than_the_most_and_no_better_than_the_least() -> None:
    mapping, flat = at(batch=2, hidden=12)
    least, mixed, most = rmses(
        mapping, flat, [Channel(noise=min(LEVELS.values())), Channel(noise=LEVELS), Channel(noise=max(LEVELS.values()))]
    )
    assert least < mixed < most


@pytest.mark.parametrize("prune", [0.0, 0.3])
def test_clipping_of_the_batch_with_noise_by_tensor(prune: float) -> None:
    mapping, flat = at(batch=2, hidden=12)
    channel = Channel(noise=LEVELS, clip=0.05, prune=prune)
    assert float(mapping(flat).norm()) > 0.05
    sizes = [value.numel() for value in mapping.update(flat).values()]
    kept = channel.kept(mapping(flat).split(sizes), torch.Generator())
    mask = torch.ones(mapping.entries, dtype=torch.bool) if kept is None else kept
    jacobian = numeric_jacobian(lambda point: clipped(mapping(point), 0.05), flat)[:, mask]
    floor = cramer_rao(mapping, flat, channel)
    assert floor.rmse == pytest.approx(dense_rmse(jacobian, levels_of(mapping, channel)[mask]), rel=1e-5)
    assert floor.clip_factor == pytest.approx(0.05 / float(mapping(flat).norm()))


@pytest.mark.parametrize("share", [0.3, 0.97, 2.0])
@pytest.mark.parametrize("noise", [0.01, LEVELS], ids=["one", "by tensor"])
def test_clipping_of_each_of_two_examples_is_that_of_the_clipped_mean(share: float, noise: Any) -> None:
    """A share of the smaller norm clips both examples, 0.97 of the larger one of them, twice it none."""
    net = tanh_net(hidden=12)
    mapping, flat = gradient_map_at(net, (6,), 2, 4, seed=1)
    labels = mapping.targets
    norms = sorted(
        float(clipped_mean(net, labels[n : n + 1], math.inf, (6,))(flat.reshape(2, 6)[n]).norm().detach())
        for n in (0, 1)
    )
    clip = share * (norms[0] if share < 0.5 else norms[1])
    assert (clip < norms[0], norms[0] < clip < norms[1], norms[1] < clip) == (share == 0.3, share == 0.97, share == 2.0)
    channel = Channel(noise=noise, clip=clip, clip_per="example")
    function = clipped_mean(net, labels, clip, (6,))
    jacobian = autograd_jacobian(function, flat)
    assert torch.allclose(jacobian, numeric_jacobian(lambda point: function(point).detach(), flat), atol=1e-7)
    wanted = dense_rmse(jacobian, levels_of(mapping, channel))
    floor = cramer_rao(mapping, flat, channel)
    assert floor.method == "exact"
    assert floor.rank == 12
    assert floor.rmse == pytest.approx(wanted, rel=1e-6)
    unclipped = cramer_rao(mapping, flat, Channel(noise=noise))
    assert floor.rmse == pytest.approx(unclipped.rmse) if share == 2.0 else floor.rmse > unclipped.rmse


def test_clipping_of_each_example_is_estimated_too() -> None:
    net = tanh_net(features=10, hidden=16)
    mapping, flat = gradient_map_at(net, (10,), 3, 4, seed=1)
    channel = Channel(noise=LEVELS, clip=0.3, clip_per="example")
    exact = cramer_rao(mapping, flat, channel)
    wanted = dense_rmse(
        autograd_jacobian(clipped_mean(net, mapping.targets, 0.3, (10,)), flat), levels_of(mapping, channel)
    )
    assert exact.rmse == pytest.approx(wanted, rel=1e-6)
    found = cramer_rao(mapping, flat, channel, method="estimate", probes=16, steps=300)
    assert found.converged == 1.0
    assert found.standard_error is not None
    assert abs(found.rmse - exact.rmse) <= 2.5 * found.standard_error + 1e-3 * exact.rmse


@pytest.mark.parametrize("noise", [0.01, LEVELS], ids=["one", "by tensor"])
def test_of_one_example_clipping_is_that_of_the_batch(noise: Any) -> None:
    mapping, flat = at(batch=1, hidden=12)
    norm = float(mapping(flat).norm())
    for clip in (0.1 * norm, 2 * norm):
        of_batch = cramer_rao(mapping, flat, Channel(noise=noise, clip=clip))
        assert cramer_rao(mapping, flat, Channel(noise=noise, clip=clip, clip_per="example")) == of_batch


def test_a_known_decomposition_of_another_matrix_is_not_used() -> None:
    mapping, flat = at(batch=2, hidden=12)
    known = decompose_at(mapping, flat, vectors=True)
    assert not isinstance(known, str)
    for channel in (Channel(noise=LEVELS), Channel(noise=0.01, clip=0.05, clip_per="example")):
        assert cramer_rao(mapping, flat, channel, decomposition=known) == cramer_rao(mapping, flat, channel)


def test_the_channel_of_dp_sgd_is_the_noise_of_the_real_defence() -> None:
    """Many protected gradients of the real defence spread by what its channel says."""
    rule = DPSGD(clip=0.5, noise_multiplier=0.8)
    gradients = {"w": torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(0))}
    generator = torch.Generator().manual_seed(1)
    draws = torch.stack([rule.protect_example_gradients(gradients, generator)["w"].mean(0) for _ in range(2000)])
    level = rule.channel(examples=4).level("w")
    assert level == pytest.approx(0.1)
    assert float(draws.std(0).mean()) == pytest.approx(level, rel=0.02)


def rmses(mapping: GradientMap, flat: Tensor, channels: list[Channel]) -> list[float]:
    return [cramer_rao(mapping, flat, channel).rmse for channel in channels]


def rising(values: list[float]) -> bool:
    return all(one <= two * (1 + 1e-9) for one, two in itertools.pairwise(values)) and values[0] < values[-1]


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_more_pruning_never_lowers_the_floor(scope: str) -> None:
    mapping, flat = at(batch=2, hidden=12)
    channels = [Channel(noise=0.01, prune=share, prune_scope=scope) for share in (0, 0.1, 0.3, 0.5, 0.7)]  # type: ignore[arg-type]
    assert rising(rmses(mapping, flat, channels))
    surviving = [cramer_rao(mapping, flat, channel).surviving for channel in channels]
    assert surviving[0] == 1.0
    assert all(one >= two for one, two in itertools.pairwise(surviving))


def test_more_dropout_noise_or_clipping_never_lowers_the_floor() -> None:
    mapping, flat = at(batch=2, hidden=12)
    assert rising(rmses(mapping, flat, [Channel(noise=0.01, dropout=share) for share in (0, 0.1, 0.3, 0.5)]))
    assert rising(rmses(mapping, flat, [Channel(noise=noise) for noise in (0.001, 0.01, 0.1)]))
    norm = float(mapping(flat).norm())
    assert rising(rmses(mapping, flat, [Channel(noise=0.01, clip=norm * part) for part in (2, 1.01, 0.9, 0.5, 0.1)]))


def test_a_clip_above_the_norm_changes_nothing_and_one_below_costs_one_direction_only() -> None:
    mapping, flat = at(batch=2, hidden=12)
    norm = float(mapping(flat).norm())
    plain = cramer_rao(mapping, flat, Channel(noise=0.01))
    assert cramer_rao(mapping, flat, Channel(noise=0.01, clip=2 * norm)).rmse == pytest.approx(plain.rmse, rel=1e-9)
    # Where the noise shrinks with the bound, only the lost direction is left of clipping, whatever the bound.
    relative = [
        cramer_rao(mapping, flat, Channel(noise=0.01 * part, clip=norm * part)).rmse for part in (0.999999, 0.5, 1e-3)
    ]
    assert relative == pytest.approx([relative[0]] * 3, rel=1e-6)
    assert relative[0] >= plain.rmse
    factor = cramer_rao(mapping, flat, Channel(noise=0.01, clip=norm / 4))
    assert factor.clip_factor == pytest.approx(0.25)
    assert factor.gradient_norm == pytest.approx(norm)


def test_a_gradient_that_is_only_a_length_is_hidden_by_clipping() -> None:
    """With the output gradient held, a linear map's gradient scales with the input: clipping takes the length away."""
    mapping, flat = linear_observation()
    mapping = dataclasses.replace(mapping, victim=_without_bias(mapping))
    assert cramer_rao(mapping, flat, Channel(noise=0.1)).rank == 5
    floor = cramer_rao(mapping, flat, Channel(noise=0.1, clip=1e-3))
    assert floor.rank == 4
    assert floor.rmse == math.inf
    assert floor.psnr == -math.inf


def _without_bias(mapping: GradientMap):  # type: ignore[no-untyped-def]
    tensors = mapping.victim.tensors
    weights = {name: value for name, value in tensors.weights.items() if not name.endswith("bias")}
    fixed = {**tensors.fixed, **{name: value for name, value in tensors.weights.items() if name not in weights}}
    return dataclasses.replace(mapping.victim, tensors=tensors._replace(weights=weights, fixed=fixed))


def test_the_floor_does_not_depend_on_order_box_or_doubled_noise() -> None:
    net = tanh_net()
    inputs = torch.rand(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 3])

    def floor(order: list[int], box: ValueRange | None = None, noise: float = 0.01) -> Floor:
        mapping, flat = gradient_map_at(net, (6,), 3, 4, value_range=box, inputs=inputs[order], labels=labels[order])
        return cramer_rao(mapping, flat, Channel(noise=noise))

    plain, turned = floor([0, 1, 2]), floor([2, 0, 1])
    assert turned.rmse == pytest.approx(plain.rmse, rel=1e-9)
    assert plain.example_rmse is not None
    assert turned.example_rmse == pytest.approx([plain.example_rmse[k] for k in (2, 0, 1)], rel=1e-9)
    # Errors are in units of the value range: in one that is four times wider they are four times smaller.
    assert floor([0, 1, 2], ValueRange((-1.0,), (3.0,))).rmse == pytest.approx(plain.rmse / 4, rel=1e-9)
    assert floor([0, 1, 2], noise=0.02).psnr == pytest.approx(plain.psnr - 20 * math.log10(2))


def test_a_known_decomposition_saves_the_work_and_changes_nothing() -> None:
    mapping, flat = at()
    channel = Channel(noise=0.01)
    known = decompose_at(mapping, flat, vectors=True)
    assert not isinstance(known, str)
    assert cramer_rao(mapping, flat, channel, decomposition=known) == cramer_rao(mapping, flat, channel)
    pruned = Channel(noise=0.01, prune=0.3)
    assert cramer_rao(mapping, flat, pruned, decomposition=known) == cramer_rao(mapping, flat, pruned)


def test_without_noise_the_rank_decides() -> None:
    mapping, flat = at()
    assert cramer_rao(mapping, flat, Channel()).rmse == 0.0
    assert cramer_rao(mapping, flat, Channel()).psnr == math.inf
    open_ = cramer_rao(mapping, flat, Channel(), method="estimate")
    assert math.isnan(open_.rmse)
    assert math.isnan(open_.psnr)
    assert "rank" in (open_.reason or "")


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_leaves_no_trace_has_an_infinite_floor(noise: float) -> None:
    mapping, flat = at(batch=3, hidden=2, classes=2)  # 2 units cannot tell 3 examples apart
    floor = cramer_rao(mapping, flat, Channel(noise=noise))
    assert floor.rank is not None
    assert floor.rank < 18
    assert floor.rmse == floor.condition == math.inf
    assert "leave no trace" in (floor.reason or "")
    assert floor.visible_rmse is not None
    assert math.isfinite(floor.visible_rmse)
    assert (floor.visible_rmse > 0) == (noise > 0)


def test_an_example_that_is_seen_has_a_finite_floor_beside_one_that_is_not() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        net[0].weight[:] = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
        net[0].bias[:] = -torch.linspace(0.1, 0.6, 6)
    inputs = torch.stack([torch.full((4,), 0.9), torch.full((4,), 1e-3)]).double()  # no unit fires for the second
    mapping, flat = gradient_map_at(net, (4,), 2, 3, inputs=inputs, labels=torch.tensor([0, 1]))
    floor = cramer_rao(mapping, flat, Channel(noise=0.01))
    assert floor.rank == 4
    assert floor.example_rmse is not None
    assert math.isfinite(floor.example_rmse[0])
    assert floor.example_rmse[1] == math.inf


def test_the_estimate_sees_lost_directions_and_lacking_entries() -> None:
    mapping, flat = at(batch=3, hidden=2, classes=2)
    floor = cramer_rao(mapping, flat, Channel(noise=0.1), method="estimate", steps=400)
    assert floor.rmse == math.inf
    few = cramer_rao(*at(batch=3, hidden=8), Channel(noise=0.1, prune=0.95), method="estimate", steps=2)
    assert few.rmse == math.inf
    assert "cannot show" in (few.reason or "")
    pruned = cramer_rao(*at(batch=3, hidden=8), Channel(noise=0.1, prune=0.95))
    assert pruned.rmse == math.inf


def test_an_input_of_zeros_is_not_lost_by_compression() -> None:
    """Its share of the first layer's gradient is zero, but not the change of it."""
    inputs = torch.rand(2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs[1] = 0
    net = tanh_net(features=24, hidden=24)
    mapping, flat = gradient_map_at(net, (24,), 2, 4, inputs=inputs)
    made, whole = make_jacobian(mapping, flat), mapping.jacobian(flat, exact=True)
    assert not isinstance(made, str)
    assert torch.allclose(made @ made.T, whole @ whole.T, rtol=1e-9, atol=1e-15)
    direct = decompose(whole, vectors=True)
    assert cramer_rao(mapping, flat, Channel(noise=0.1)).rank == direct.rank == 48


def test_wrong_calls_are_told_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping, flat = at()
    with pytest.raises(ValueError, match="cramer_rao:") as caught:
        cramer_rao(mapping, flat[1:], Channel(), method="guess", probes=1, steps=0)  # type: ignore[arg-type]
    for word in ("flat:", "method:", "probes:", "steps:"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="finite"):
        cramer_rao(mapping, flat * math.nan, Channel())
    monkeypatch.setattr(jacobian_module, "MAX_UNKNOWNS", 4)
    with pytest.raises(ValueError, match="not possible exactly: 12 unknowns"):
        cramer_rao(mapping, flat, Channel(noise=0.1), method="exact")
    assert cramer_rao(mapping, flat, Channel(noise=0.1)).method == "estimate"


def test_convolutions_with_real_pictures(real_data) -> None:  # type: ignore[no-untyped-def]
    from leakscope.data import load_data

    digits = load_data("mnist", real_data, split="test", limit=2)
    net = build_model("dlg-lenet", input_shape=(1, 28, 28), num_classes=10)
    mapping, flat = gradient_map_at(
        net, (1, 28, 28), 1, 10, value_range=digits.value_range, inputs=digits.x[:1], labels=digits.y[:1]
    )
    exact = cramer_rao(mapping, flat, Channel(noise=1e-3))
    found = cramer_rao(mapping, flat, Channel(noise=1e-3), method="estimate", probes=2, steps=60)
    assert 0 < found.loosened <= found.rmse
    assert found.rmse < 1.3 * exact.rmse


def test_laplace_noise_tells_twice_as_much_as_gaussian_noise_of_its_variance() -> None:
    mapping, flat = gradient_map_at(torch.nn.Linear(2, 3), (2,), batch=1, num_classes=3)
    floors = [cramer_rao(mapping, flat, Channel(noise=0.1, noise_law=law)).rmse for law in ("gaussian", "laplace")]
    assert floors[0] / floors[1] == pytest.approx(math.sqrt(2))
    # The Fisher information of a location, by its definition, from the density itself.
    e = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    density = torch.exp(-math.sqrt(2) * e.abs()) / math.sqrt(2)
    score = torch.gradient(density.log(), spacing=(e,))[0]
    assert float(torch.trapezoid(score.square() * density, e)) == pytest.approx(2.0, rel=1e-3)


def test_stretched_entries_stand_out_of_the_noise() -> None:
    mapping, flat = gradient_map_at(torch.nn.Linear(2, 6), (2,), batch=1, num_classes=6)
    plain, scaled, last = (
        cramer_rao(mapping, flat, Channel(noise=0.1, dropout=0.5, **more)).rmse
        for more in ({}, {"dropout_scaled": True}, {"dropout_scaled": True, "zeros_last": True})
    )
    assert plain / scaled == pytest.approx(2.0)
    assert last == pytest.approx(plain)  # the noise was stretched along


@pytest.mark.parametrize(
    "channel",
    [
        Channel(noise=0.1, rounding="sign"),
        Channel(noise=0.1, unreliable=("weight",)),
        Channel(noise=0.1, inexact=True),
        Channel(noise=0.1, prune=0.5, zeros_last=True),
    ],
    ids=repr,
)
def test_no_floor_is_told_of_what_the_calculation_does_not_know(channel: Channel) -> None:
    mapping, flat = gradient_map_at(torch.nn.Linear(2, 3), (2,), batch=1, num_classes=3)
    with pytest.raises(ValueError, match="expected clipping, zeros and noise only"):
        cramer_rao(mapping, flat, channel)
