"""Defences one after another: their order, what an adversary knows of them, and what they promise together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leakscope as ls
from leakscope.audit.parts import defense_part
from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import composed
from leakscope.contracts.knowledge import Knowledge
from leakscope.defenses import (
    DPSGD,
    Chain,
    FakeGradients,
    GradientClipping,
    GradientDropout,
    GradientNoise,
    GradientPruning,
    GradientQuantisation,
    MixUp,
    TopK,
)
from leakscope.federation import FedAvg, FedSGD


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scene() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    net = ls.build_model("mlp", input_shape=(1, 4, 4), num_classes=3, hidden=300)
    return net, torch.rand(4, 1, 4, 4, generator=seeded()), torch.tensor([0, 1, 2, 1])


def flat(update) -> torch.Tensor:
    return torch.cat([value.flatten() for value in update.values()])


def test_parts_act_in_the_order_of_the_list_at_each_hook() -> None:
    update = {"w": torch.tensor([3.0, 1.0, -2.0, 0.5])}
    pruned_then_noisy = Chain(parts=(GradientPruning(fraction=0.5), GradientNoise(sigma=1.0)))
    noisy_then_pruned = Chain(parts=(GradientNoise(sigma=1.0), GradientPruning(fraction=0.5)))
    first = pruned_then_noisy.protect_message(update, seeded())["w"]
    second = noisy_then_pruned.protect_message(update, seeded())["w"]
    assert int((first == 0).sum()) == 0
    assert int((second == 0).sum()) == 2
    alone = GradientNoise(sigma=1.0).protect_message(
        GradientPruning(fraction=0.5).protect_message(update, seeded()), seeded()
    )
    assert torch.equal(first, alone["w"])


def test_hooks_have_an_order_of_their_own_whatever_the_list_says() -> None:
    net, x, y = scene()
    parts = (GradientNoise(sigma=0.1), GradientClipping(norm=0.01))
    one, other = (
        FedSGD().observe(net, x, y, order, Knowledge.adaptive_server, seeded()) for order in (parts, parts[::-1])
    )
    assert torch.equal(flat(one.message.update), flat(other.message.update))
    assert one.channel == other.channel == Channel(clip=0.01, noise=0.1)
    assert float(flat(one.message.update).norm()) > 1  # the noise was not clipped


def test_a_list_is_a_chain_and_a_chain_in_a_chain_is_one() -> None:
    net, x, y = scene()
    parts = [GradientClipping(norm=0.1), GradientNoise(sigma=0.01)]
    by_list = FedSGD().observe(net, x, y, parts, generator=seeded()).message.update
    by_chain = FedSGD().observe(net, x, y, Chain(parts=tuple(parts)), generator=seeded()).message.update
    assert torch.equal(flat(by_list), flat(by_chain))
    nested = Chain(parts=(Chain(parts=(parts[0],)), parts[1]))
    assert nested == Chain(parts=tuple(parts))
    assert FedSGD().observe(net, x, y, [parts[1]], generator=seeded()).channel is None


def test_in_a_spec_a_list_is_a_defence() -> None:
    wanted = Chain(parts=(GradientClipping(norm=4.0), GradientNoise(sigma=0.01)))
    spec = [{"gradient-clipping": {"norm": 4.0}}, {"gradient-noise": {"sigma": 0.01}}]
    part = defense_part(spec)
    assert part.instance == wanted
    assert part.identity() == repr(wanted)
    assert defense_part({"chain": part.options}).instance == wanted
    assert defense_part(["none", *spec]).instance == wanted
    given = defense_part(wanted)
    assert given.instance == wanted
    assert defense_part({"chain": given.options}).instance == wanted
    with pytest.raises(ValueError, match="at least two"):
        defense_part(["gradient-noise"])
    with pytest.raises(ValueError, match="gradient-noise: sigma"):
        defense_part([{"gradient-noise": {"sigma": -1}}, "top-k"])


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ((GradientClipping(norm=4.0), GradientClipping(norm=2.0)), Channel(clip=2.0)),
        ((GradientPruning(fraction=0.9), GradientNoise(sigma=0.1)), Channel(prune=0.9, noise=0.1)),
        ((GradientNoise(sigma=0.1), TopK(share=0.1)), Channel(prune=0.9, noise=0.1, zeros_last=True)),
        ((GradientNoise(sigma=0.3), GradientNoise(sigma=0.4)), Channel(noise=0.5)),
        ((GradientPruning(fraction=0.5), GradientPruning(fraction=0.9)), Channel(prune=0.9)),
        ((GradientPruning(fraction=0.5), GradientDropout(probability=0.5)), Channel(prune=0.5, dropout=0.5)),
        ((GradientDropout(probability=0.5), GradientDropout(probability=0.5)), Channel(dropout=0.75)),
        (
            (GradientNoise(sigma=0.1), GradientQuantisation(values="sign")),
            Channel(noise=0.1, rounding="sign"),
        ),
        (
            (DPSGD(clip=1.0, noise_multiplier=1.0), GradientQuantisation(bits=4)),
            Channel(clip=1.0, clip_per="example", noise=1.0, rounding="uniform", bits=4),
        ),
        ((GradientNoise(sigma=0.1, law="laplace"), GradientNoise(sigma=0.1)), None),
        ((GradientQuantisation(bits=4), GradientNoise(sigma=0.1)), None),
        ((GradientDropout(probability=0.5), GradientPruning(fraction=0.5)), None),
        ((GradientPruning(fraction=0.5), GradientPruning(fraction=0.5, scope="global")), None),
        ((DPSGD(clip=1.0, noise_multiplier=1.0), GradientClipping(norm=1.0)), None),
        ((FakeGradients(), GradientNoise()), None),
        ((MixUp(), GradientNoise(sigma=0.1)), Channel(noise=0.1)),  # one example, with nothing to mix
    ],
    ids=repr,
)
def test_what_an_adversary_knows_of_a_chain(parts, wanted) -> None:
    assert Chain(parts=parts).channel() == wanted


def test_noise_before_zeros_shows_the_zeros_and_theory_knows_which_it_may() -> None:
    seen = {"w": torch.tensor([0.3, 0.0])}
    assert Channel(prune=0.5, noise=0.1, zeros_last=True).survivors(seen)["w"].tolist() == [1.0, 0.0]
    assert Channel(prune=0.5, noise=0.1).survivors(seen) == {}
    assert Channel(prune=0.5, noise=0.1, zeros_last=True).beyond_theory is not None
    assert Channel(dropout=0.5, noise=0.1, zeros_last=True).beyond_theory is None
    for channel in (Channel(rounding="sign"), Channel(unreliable=("w",)), Channel(inexact=True)):
        assert channel.beyond_theory is not None
        joined = composed(
            [channel, Channel(noise=0.1)] if channel.rounding == "none" else [Channel(noise=0.1), channel]
        )
        assert joined is not None
        assert joined.beyond_theory is not None


def test_epsilon_is_that_of_its_dp_sgd_where_the_others_only_work_on_its_result() -> None:
    private = DPSGD(clip=1.0, noise_multiplier=2.0)
    after = Chain(parts=(private, GradientPruning(fraction=0.9), GradientQuantisation(values="sign")))
    for passes in (None, 1, 7):
        assert after.epsilon_for(passes) == private.epsilon_for(passes)
        assert Chain(parts=(GradientNoise(), private)).epsilon_for(passes) == private.epsilon_for(passes)
    assert Chain(parts=(MixUp(), private)).epsilon_for(None) is None  # an example is in several mixtures
    assert Chain(parts=(GradientClipping(), GradientNoise())).epsilon_for(None) is None
    assert Chain(parts=(private, private)).epsilon_for(None) is None


def test_epsilon_of_local_training_is_the_accountants_for_its_real_number_of_steps() -> None:
    from opacus.accountants import RDPAccountant

    protocol, rule = FedAvg(epochs=3, batch_size=2), DPSGD(clip=1.0, noise_multiplier=2.0)
    accountant = RDPAccountant()
    for _ in range(protocol.passes(4)):
        accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    spent = rule.epsilon_for(protocol.passes(4))
    # Ours refines the best order, so it is never above and hardly below.
    assert spent <= accountant.get_epsilon(delta=1e-5) * (1 + 1e-9)
    assert spent == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=0.02)


def test_in_local_training_step_noise_adds_up_and_message_noise_does_not() -> None:
    protocol = FedAvg(epochs=3, batch_size=2, lr=0.1)
    chain = Chain(parts=(DPSGD(clip=1.0, noise_multiplier=0.2), GradientNoise(sigma=0.04)))
    channel = protocol.channel(chain, 6)
    assert channel is not None
    assert channel.level("w") == pytest.approx(((0.1 * 3 * 0.1) ** 2 + 0.04**2) ** 0.5)
    clipped = protocol.channel(Chain(parts=(GradientClipping(norm=2.0), GradientNoise(sigma=0.04))), 6)
    assert clipped == Channel(clip=2.0, clip_per="step", noise=0.04)


def test_the_noise_of_a_chain_is_what_its_channel_says() -> None:
    net, x, y = scene()
    bare = flat(FedSGD().observe(net, x, y).message.update)
    parts = (GradientClipping(norm=100.0), GradientNoise(sigma=0.3), GradientNoise(sigma=0.4))
    seen = FedSGD().observe(net, x, y, parts, Knowledge.adaptive_server, seeded())
    assert seen.channel == Channel(clip=100.0, noise=0.5)
    assert float((flat(seen.message.update) - bare).std()) == pytest.approx(0.5, rel=0.03)
