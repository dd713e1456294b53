"""Features in front of a dense layer: exact cases, altered gradients, controls that must fail, and refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import leakscope as ls
from leakscope.attacks.gaussian_neurons import with_gaussian_neurons
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.equations.feature_span import completed_span, leading_span, span_residual
from leakscope.equations.features import recover_features
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import feature_cosines, feature_error, random_span_error
from leakscope.network.recorder import inputs_of

CLASSES = 6


def deep_net(activation: nn.Module, bias: bool = True, width: int = 1200, random: bool = True) -> nn.Module:
    """A convolution, 32 features, a wide layer, a head; weights of its own draws."""
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 32), nn.Tanh()),
        *(nn.Linear(32, width, bias=bias), activation, nn.Linear(width, CLASSES)),
    ).double()
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / max(parameter[0].numel(), 1) ** 0.5)
    return with_gaussian_neurons(net, (1, 6, 6), seed=3) if random else net


def batch(examples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn((examples, 1, 6, 6), generator=draws, dtype=torch.float64)
    return x, torch.randperm(CLASSES, generator=draws)[:examples]


def look(net: nn.Module, examples: int = 3, seed: int = 0, **how) -> tuple[Observation, Tensor]:
    """What is seen of a batch, and its true features in front of the wide layer."""
    x, y = batch(examples, seed)
    protocol = how.pop("protocol", FedSGD())
    with torch.no_grad():
        truth = inputs_of(net[5], net, x)
    return protocol.observe(net, x, y, generator=torch.Generator().manual_seed(5), **how), truth


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Tanh(), nn.GELU()], ids=repr)
@pytest.mark.parametrize("examples", [1, 4])
def test_the_span_of_an_untouched_gradient_is_exact(activation, examples) -> None:
    seen, truth = look(deep_net(activation, random=False), examples)
    found = recover_features(seen)
    assert found.layer == "5"
    assert found.method in ("svd", "unmixing")
    assert feature_error(truth, found.span) <= 1e-10
    assert found.residual <= 1e-8
    assert torch.allclose(found.span @ found.span.T, torch.eye(examples).double(), atol=1e-12)
    assert torch.allclose(found.directions.norm(dim=1), torch.ones(examples).double())


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1)], ids=repr)
def test_single_features_of_a_random_layer_are_exact_with_sign_and_length(activation) -> None:
    seen, truth = look(deep_net(activation), 4)
    found = recover_features(seen)
    assert found.separated
    assert found.signed
    assert found.quality > 1 - 1e-8
    assert feature_cosines(truth, found.directions).min() > 1 - 1e-10
    features = found.features
    order = (truth @ found.directions.T).argmax(1)
    assert torch.allclose(features[order], truth, atol=1e-8)


def test_without_a_bias_the_slopes_of_a_relu_still_tell_signs() -> None:
    seen, truth = look(deep_net(nn.ReLU(), bias=False), 3)
    found = recover_features(seen)
    assert found.lengths is None
    assert found.signed
    cosines = nn.functional.normalize(truth, dim=1) @ found.directions.T
    assert cosines.amax(1).min() > 1 - 1e-10


def test_tanh_is_separated_by_order_three() -> None:
    seen, truth = look(deep_net(nn.Tanh(), width=4000), 2)
    found = recover_features(seen)
    assert feature_cosines(truth, found.directions).min() > 0.99


@pytest.mark.parametrize("fraction", [0.5, 0.7])
def test_pruning_is_undone_by_the_heads_gradient(fraction) -> None:
    seen, truth = look(deep_net(nn.ReLU()), 3, defense=GradientPruning(fraction=fraction))
    plain = recover_features(seen, methods=("svd",))
    found = recover_features(seen)
    assert found.method == "refined"
    assert feature_error(truth, plain.span) > 0.05
    assert feature_error(truth, found.span) < 0.1 * feature_error(truth, plain.span)


def test_noise_is_averaged_over_both_gradients() -> None:
    seen, truth = look(deep_net(nn.ReLU()), 3, defense=GradientNoise(sigma=0.003))
    plain = recover_features(seen, methods=("svd",))
    found = recover_features(seen)
    assert found.method == "refined"
    assert feature_error(truth, found.span) < 0.5 * feature_error(truth, plain.span)


def test_local_steps_on_frozen_features_keep_the_span() -> None:
    net = deep_net(nn.ReLU())
    for layer in net[:5]:
        layer.requires_grad_(False)
    seen, truth = look(net, 3, protocol=FedAvg(epochs=5, batch_size=3, lr=0.01))
    assert feature_error(truth, recover_features(seen).span) <= 1e-8


def test_a_completion_needs_no_head() -> None:
    seen, truth = look(deep_net(nn.ReLU()), 3, defense=GradientPruning(fraction=0.5))
    plain = recover_features(seen, methods=("svd",))
    found = recover_features(seen, methods=("svd", "completion"))
    assert found.method == "completion"
    assert feature_error(truth, found.span) < 0.5 * feature_error(truth, plain.span)


@pytest.mark.parametrize("control", ["noise", "other batch"])
def test_controls_find_no_more_than_chance(control) -> None:
    net = deep_net(nn.ReLU())
    seen, truth = look(net, 3)
    if control == "noise":
        draws = torch.Generator().manual_seed(1)
        update = {name: torch.randn(v.shape, generator=draws).double() for name, v in seen.message.update.items()}
        found = recover_features(seen.with_update(update))
        assert not found.signed
        assert found.residual > 0.5
        assert feature_error(truth, found.span) > 0.8 * random_span_error(3, 32)
    else:
        found = recover_features(seen.with_update(look(net, 3, seed=9)[0].message.update))
        assert feature_error(truth, found.span) > 0.01


def test_the_wrong_weights_do_not_separate_features() -> None:
    seen, truth = look(deep_net(nn.ReLU()), 3)
    other = with_gaussian_neurons(seen.model, (1, 6, 6), seed=99)
    found = recover_features(dataclasses.replace(seen, model=other))
    assert feature_error(truth, found.span) <= 1e-10  # the span needs no weights
    assert not found.signed
    assert found.quality < 0.9


def test_the_count_is_read_from_the_gradient_where_nobody_tells() -> None:
    seen, truth = look(deep_net(nn.ReLU()), 3)
    unknown = dataclasses.replace(
        seen, num_examples=None, knowledge=dataclasses.replace(seen.knowledge, num_examples=False)
    )
    found = recover_features(unknown)
    assert len(found.span) == 3
    assert feature_error(truth, found.span) <= 1e-10


def test_what_nothing_confirms_is_not_called_signed() -> None:
    few, _ = look(deep_net(nn.Sigmoid(), random=False, width=60), 3)
    found = recover_features(few, layer="5")
    assert found.quality is None
    assert not found.signed
    coarse, truth = look(deep_net(nn.ReLU(), random=False, width=300), 3, defense=GradientPruning(fraction=0.9))
    found = recover_features(coarse)
    assert not found.signed or feature_cosines(truth, found.directions).min() > 0.95


def test_an_odd_activation_without_a_bias_has_no_sign() -> None:
    seen, truth = look(deep_net(nn.Tanh(), bias=False), 2, defense=GradientNoise(sigma=0.001))
    found = recover_features(seen)
    assert not found.signed
    assert feature_error(truth, found.span) < 0.1


def test_equal_examples_are_counted_once_and_a_note_says_so() -> None:
    net = deep_net(nn.ReLU())
    x, y = batch(3)
    x, y = torch.cat((x, x[:1])), torch.cat((y, y[:1]))
    found = recover_features(FedSGD().observe(net, x, y))
    assert len(found.span) == 3
    assert any("1 of 4 examples" in note for note in found.notes)
    with torch.no_grad():
        assert feature_error(inputs_of(net[5], net, x), found.span) <= 1e-8


def test_the_same_generator_gives_the_same_features_and_nothing_is_changed() -> None:
    seen, _ = look(deep_net(nn.ReLU()), 3, defense=GradientNoise(sigma=0.001))
    state = torch.random.get_rng_state()
    first, second = (recover_features(seen, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first.directions, second.directions)
    assert torch.equal(first.span, second.span)
    assert torch.equal(state, torch.random.get_rng_state())
    assert ls.recover_features is recover_features


def test_refusals_say_what_stands_in_the_way() -> None:
    net = deep_net(nn.ReLU())
    seen, _ = look(net, 3)
    with pytest.raises(ValueError, match=r"^methods"):
        recover_features(seen, methods=("guess",))
    with pytest.raises(NotApplicable, match=r"^layer"):
        recover_features(seen, layer="0")
    with pytest.raises(NotApplicable, match="40"):
        recover_features(seen, count=40)
    zero = seen.with_update({name: torch.zeros_like(value) for name, value in seen.message.update.items()})
    with pytest.raises(NotApplicable, match="is zero"):
        recover_features(zero)
    net[5].requires_grad_(False)
    with pytest.raises(NotApplicable, match="frozen"):
        recover_features(look(net, 3)[0])
    small = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, CLASSES)).double()
    x, y = batch(2)
    with pytest.raises(NotApplicable, match="recover_embedding"):
        recover_features(FedSGD().observe(small, x, y))


def test_a_head_of_equal_rows_says_nothing_comes_back() -> None:
    net = deep_net(nn.ReLU())
    with torch.no_grad():
        net[7].weight.copy_(net[7].weight[:1].expand_as(net[7].weight))
    seen, _ = look(net, 2)
    assert float(seen.message.update["5.weight"].abs().max()) < 1e-15
    with pytest.raises(NotApplicable, match=r"zero|stein"):
        recover_features(seen, methods=("stein",))


def test_a_span_that_is_wrong_leaves_a_residual() -> None:
    draws = torch.Generator().manual_seed(0)
    rows = torch.randn((80, 3), generator=draws).double() @ torch.randn((3, 40), generator=draws).double()
    everything = torch.ones_like(rows, dtype=torch.bool)
    right, sizes = leading_span(rows, 3, draws)
    wrong = torch.linalg.qr(torch.randn((40, 3), generator=draws).double())[0].T
    assert span_residual(rows, everything, right, draws) < 1e-10
    assert span_residual(rows, everything, wrong, draws) > 0.9
    assert float(sizes[3]) < 1e-12 * float(sizes[0])
    assert feature_error(right, completed_span(rows, everything, right, draws)) < 1e-6
