"""Every defence in the registry with every protocol through one table: what must hold whatever a defence does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leakscope.defenses
from leakscope.audit.parts import protocol_part
from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Chain, Defense
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.settings import settings_of
from leakscope.defenses import (
    DEFENSES,
    DPSGD,
    FakeGradients,
    GradientClipping,
    GradientDropout,
    GradientNoise,
    GradientPruning,
    GradientQuantisation,
    MixUp,
    NetworkDropout,
    Precode,
    Soteria,
    TopK,
)
from leakscope.federation import PROTOCOLS, FedAvg, FederatedTraining, FedSGD, SecureAggregation, Vertical
from leakscope.models import build_model

#: Each defence of the registry, one or more settings of it.
TABLE: dict[str, list[Defense]] = {
    "gradient-noise": [GradientNoise(sigma=0.01), GradientNoise(sigma=0.01, law="laplace")],
    "gradient-clipping": [GradientClipping(norm=0.1)],
    "gradient-pruning": [GradientPruning(fraction=0.5), GradientPruning(fraction=0.9, scope="global")],
    "top-k": [TopK(share=0.3)],
    "gradient-dropout": [GradientDropout(probability=0.5), GradientDropout(probability=0.5, scaled=True)],
    "gradient-quantisation": [
        *(GradientQuantisation(values=values) for values in ("sign", "float16", "bfloat16")),
        GradientQuantisation(bits=4),
        GradientQuantisation(bits=4, stochastic=True),
    ],
    "fake-gradients": [FakeGradients()],
    "dp-sgd": [DPSGD(clip=0.5, noise_multiplier=0.1)],
    "network-dropout": [NetworkDropout(probability=0.5)],
    "mixup": [MixUp(images=2)],
    "soteria": [Soteria(fraction=0.5)],
    "precode": [Precode(size=3)],
    "chain": [
        Chain(parts=(GradientClipping(norm=0.1), GradientNoise(sigma=0.01))),
        Chain(parts=(DPSGD(clip=0.5, noise_multiplier=0.1), GradientPruning(fraction=0.5))),
        Chain(parts=(NetworkDropout(), Precode(size=3), GradientQuantisation(values="sign"))),
    ],
}
CASES = [defense for cases in TABLE.values() for defense in cases]
PROTOCOL_CASES = [
    FedSGD(),
    FedAvg(epochs=2, batch_size=2, lr=0.05, shuffle=False),
    Vertical(batch_size=2, rounds=2, sampling="epochs"),
    SecureAggregation(clients=2),
]
#: What draws nothing at random.
FIXED = (GradientClipping, GradientPruning, TopK, Soteria)
#: What no adversary's calculation is known for.
NO_CHANNEL = (FakeGradients,)


def scene(protocol: Protocol) -> tuple[nn.Module, Tensor, Tensor]:
    name = "vertical-mlp" if isinstance(protocol, Vertical) else "mlp"
    options: dict[str, Any] = {"slices": "strips", "workers": 2} if isinstance(protocol, Vertical) else {"hidden": 7}
    net = build_model(name, input_shape=(1, 4, 4), num_classes=3, **options)
    return net, torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 1])


def look(protocol: Protocol, defense: Defense, seed: int, dtype: torch.dtype = torch.float32) -> Observation:
    net, x, y = scene(protocol)
    draws = torch.Generator().manual_seed(seed)
    knowledge = dataclasses.replace(protocol.default_knowledge, defense=True)
    return protocol.observe(net.to(dtype), x.to(dtype), y, defense, knowledge, draws)


def entries(observation: Observation) -> Tensor:
    return torch.cat([value.flatten().double() for m in observation.messages for value in m.update.values()])


def draws_nothing(defense: Defense) -> bool:
    if isinstance(defense, GradientQuantisation):
        return not defense.stochastic
    return isinstance(defense, FIXED)


def test_the_tables_name_every_defence_and_protocol() -> None:
    assert set(TABLE) == set(DEFENSES)
    assert all(type(defense) is DEFENSES[name].target for name, cases in TABLE.items() for defense in cases)
    assert {type(protocol) for protocol in PROTOCOL_CASES} == {entry.target for entry in PROTOCOLS.values()}
    assert all(hasattr(leakscope.defenses, entry.target.__name__) for entry in DEFENSES.values())


@pytest.mark.parametrize("protocol", PROTOCOL_CASES, ids=lambda protocol: type(protocol).__name__)
@pytest.mark.parametrize("defense", CASES, ids=repr)
def test_an_update_is_finite_whole_and_follows_its_seed(protocol: Protocol, defense: Defense) -> None:
    globe = torch.random.get_rng_state()
    first, again, other = (look(protocol, defense, seed) for seed in (0, 0, 1))
    assert torch.equal(globe, torch.random.get_rng_state())
    parameters = dict(first.model.named_parameters())
    for message in first.messages:
        assert list(message.update) == list(parameters)
        for name, value in message.update.items():
            assert (value.shape, value.dtype) == (parameters[name].shape, parameters[name].dtype)
            assert bool(torch.isfinite(value).all())
    assert torch.equal(entries(first), entries(again))
    if not isinstance(protocol, Vertical):  # whose batches are drawn too
        assert torch.equal(entries(first), entries(other)) == draws_nothing(defense)
    bare = look(protocol, Defense(), 0)
    if not isinstance(defense, Precode) and "Precode" not in repr(defense):
        assert not torch.allclose(entries(first), entries(bare), rtol=1e-6, atol=0)
        for name, value in bare.model.state_dict().items():
            assert torch.equal(value, first.model.state_dict()[name])


@pytest.mark.parametrize("defense", CASES, ids=repr)
def test_double_precision_stays_double_and_the_callers_things_stay_as_they_are(defense: Defense) -> None:
    net, x, y = scene(FedSGD())
    before, modes = (
        {name: value.clone() for name, value in net.state_dict().items()},
        [m.training for m in net.modules()],
    )
    pictures, labels = x.clone(), y.clone()
    for protocol in (FedSGD(), FedAvg(batch_size=2), SecureAggregation(clients=2, protocol=FedAvg(batch_size=1))):
        protocol.observe(net, x, y, defense, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert torch.equal(x, pictures)
    assert torch.equal(y, labels)
    assert look(FedSGD(), defense, 0, torch.float64).dtype == torch.float64


@pytest.mark.parametrize("protocol", PROTOCOL_CASES, ids=lambda protocol: type(protocol).__name__)
@pytest.mark.parametrize("defense", CASES, ids=repr)
def test_its_channel_goes_through_a_file_and_says_what_it_is(protocol: Protocol, defense: Defense) -> None:
    channel = look(protocol, defense, 0).channel
    if isinstance(defense, NO_CHANNEL):
        assert channel is None
    if isinstance(protocol, FedSGD) and not isinstance(defense, NO_CHANNEL):
        assert channel is not None
        assert channel.describe() != Channel().describe()
    if channel is not None:
        assert Channel(**json.loads(json.dumps(channel.facts()))) == channel
    net, x, y = scene(protocol)
    unknowing = protocol.observe(net, x, y, defense, generator=torch.Generator().manual_seed(0))
    assert unknowing.channel is None  # nobody told this adversary


@pytest.mark.parametrize("defense", CASES, ids=repr)
def test_its_repr_says_everything(defense: Defense) -> None:
    names = {name: getattr(leakscope.defenses, name) for name in vars(leakscope.defenses) if name[0].isupper()}
    assert eval(repr(defense), names) == defense
    assert all(f"{one.name}=" in repr(defense) for one in settings_of(type(defense)))


@pytest.mark.parametrize("defense", CASES, ids=repr)
def test_it_serves_training_as_it_serves_an_audit(defense: Defense) -> None:
    net, x, y = scene(FedSGD())
    protocol = FedAvg(batch_size=2, lr=0.01)
    training = FederatedTraining(rounds=2, protocol=protocol)
    clients = [(x[:2], y[:2]), (x[2:], y[2:])]
    run = training.run(net, clients, defense=defense)
    assert all(bool(torch.isfinite(p).all()) for p in run.last.parameters())
    after = protocol.observe(run.last, x, y, defense)  # a model that is protected already
    assert list(after.model.state_dict()) == list(run.last.state_dict())


def nonsense() -> Iterator[tuple[type[Defense], dict[str, Any]]]:
    nan = float("nan")
    yield from ((GradientNoise, {"sigma": value}) for value in (-1.0, nan, float("inf")))
    yield GradientNoise, {"law": "cauchy"}
    yield from ((GradientClipping, {"norm": value}) for value in (0.0, -1.0, nan))
    yield from ((TopK, {"share": value}) for value in (0.0, 1.1, nan))
    yield from ((GradientPruning, {"fraction": value}) for value in (1.0, -0.1, nan))
    yield from ((kind, {"probability": p}) for kind in (GradientDropout, NetworkDropout) for p in (1.0, -0.1, nan))
    yield from ((GradientQuantisation, {"bits": value}) for value in (1, 33, 4.5))
    yield GradientQuantisation, {"values": "sign", "stochastic": True}
    yield from ((DPSGD, {"clip": value}) for value in (0.0, nan))
    yield from ((MixUp, options) for options in ({"images": 0}, {"most": 0.5}, {"least": 0.6}, {"least": nan}))
    yield from ((Soteria, {"fraction": value}) for value in (1.0, -0.5, nan))
    yield from ((Precode, {"size": 0}), (Chain, {"parts": ("gradient-noise",)}))


@pytest.mark.parametrize(("kind", "options"), list(nonsense()), ids=repr)
def test_nonsense_is_refused_in_one_error(kind: type[Defense], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"(?s){kind.__name__}.*(expected|applies)"):
        kind(**options)


def test_where_it_does_not_apply_it_says_so() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    conv = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    _, x, y = scene(FedSGD())
    with pytest.raises(ValueError, match="hidden units"):
        FedSGD().observe(flat, x, y, NetworkDropout())
    with pytest.raises(ValueError, match="layers: expected linear or convolution"):
        FedSGD().observe(flat, x, y, NetworkDropout(layers=("fc",)))
    with pytest.raises(ValueError, match="layer: expected a trained dense layer"):
        FedSGD().observe(conv, x, y, Soteria())
    with pytest.raises(ValueError, match="layer: expected a trained dense layer"):
        FedSGD().observe(flat, x, y, Soteria(layer="fc"))
    with pytest.raises(ValueError, match="linear"):
        FedSGD().observe(conv, x, y, Precode())
    with pytest.raises(ValueError, match="a list of them"):
        FedSGD().observe(flat, x, y, "gradient-noise")
    with pytest.raises(ValueError, match="clients: expected at most 4"):
        SecureAggregation(clients=5).observe(flat, x, y)


def test_secure_aggregation_of_gradients_is_one_batch_of_all_examples() -> None:
    net, x, y = scene(FedSGD())
    for reduction in ("mean", "sum"):
        whole = entries(FedSGD(reduction=reduction).observe(net, x, y))
        for clients in (1, 2, 3, 4):
            protocol = SecureAggregation(clients=clients, protocol=FedSGD(reduction=reduction))
            seen = protocol.observe(net, x, y, knowledge=Knowledge.full)
            assert torch.allclose(entries(seen), whole, rtol=0, atol=1e-6)
            assert seen.num_examples == 4
            assert seen.label_counts is not None
            assert seen.label_counts.tolist() == [1, 2, 1]
            assert seen.reduction == reduction
            assert len(seen.messages) == 1  # of whom is not told


def test_secure_aggregation_of_training_is_the_mean_of_the_clients_updates_by_their_size() -> None:
    net, x, y = scene(FedSGD())
    inner = FedAvg(epochs=2, batch_size=2, lr=0.1, shuffle=False)
    seen = SecureAggregation(clients=3, protocol=inner).observe(net, x, y, knowledge=Knowledge.full)
    parts = [entries(inner.observe(net, x[rows], y[rows])) for rows in (slice(0, 2), slice(2, 3), slice(3, 4))]
    assert torch.allclose(entries(seen), (2 * parts[0] + parts[1] + parts[2]) / 4, rtol=0, atol=1e-7)
    assert seen.message.kind == "weight_delta"
    # As one client of all examples with as many steps; who was in a batch with whom is no fact about it.
    assert (seen.training.epochs, seen.training.batch_size, seen.training.batch_order) == (2, 4, None)


def test_the_noise_of_a_cohort_is_what_its_channel_says() -> None:
    net = build_model("mlp", input_shape=(1, 4, 4), num_classes=3, hidden=500)
    _, x, y = scene(FedSGD())
    bare = entries(FedSGD().observe(net, x, y))
    for defense in (GradientNoise(sigma=0.3), DPSGD(clip=100.0, noise_multiplier=0.01)):
        protocol = SecureAggregation(clients=3)
        seen = protocol.observe(net, x, y, defense, Knowledge.adaptive_server, torch.Generator().manual_seed(0))
        assert seen.channel is not None
        assert float((entries(seen) - bare).std()) == pytest.approx(seen.channel.level("fc.weight"), rel=0.03)


def test_secure_aggregation_in_the_words_of_a_spec_and_back() -> None:
    words = {"secure-aggregation": {"clients": 3, "protocol": {"fedavg": {"epochs": 2}}}}
    part = protocol_part(words)
    assert part.instance == SecureAggregation(clients=3, protocol=FedAvg(epochs=2))
    assert protocol_part({part.name: part.options}).instance == part.instance
    assert protocol_part({"secure-aggregation": {"protocol": "FedSGD"}}).instance == SecureAggregation()
    with pytest.raises(ValueError, match="expected fedsgd or fedavg"):
        protocol_part({"secure-aggregation": {"protocol": "vertical"}})
    with pytest.raises(ValueError, match="batchnorm: expected that of the protocol"):
        SecureAggregation(protocol=FedSGD(batchnorm="train"))
