"""Every attack in the registry through one table: tiny problems with a known answer, and controls that must fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import ATTACKS, make_attack, standard_attacks
from leakscope.contracts.attack import Attack
from leakscope.contracts.errors import MissingKnowledge
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.federation import FedAvg, FedSGD, Vertical
from leakscope.metrics import assign, psnr
from leakscope.models import build_model


def one_gradient(examples: int) -> Protocol:
    return FedSGD()


def local_training(examples: int) -> Protocol:
    return FedAvg(epochs=2, batch_size=1, lr=0.05)


def many_rounds(examples: int) -> Protocol:
    return Vertical(batch_size=max(1, examples // 2), rounds=4 * examples)


@dataclass(frozen=True)
class Case:
    """A tiny problem that the attack is known to solve to ``reaches`` dB.

    ``protocol`` and ``trained`` are what the clients do, for so many examples: once, and with local training. Where the
    attack chooses the model, ``net`` is what it makes of it (with ``options``), and its server is a malicious one.
    """

    model: str
    shape: tuple[int, ...]
    reaches: float
    options: dict[str, Any] = field(default_factory=dict)
    quick: dict[str, Any] = field(default_factory=dict)
    signal_model: str = "signal-cnn"
    net: dict[str, Any] = field(default_factory=dict)
    signal_net: dict[str, Any] = field(default_factory=dict)
    examples: int = 1
    protocol: Callable[[int], Protocol] = one_gradient
    trained: Callable[[int], Protocol] = local_training


CASES = {
    "gauss-newton": Case(
        "dlg-lenet", (1, 8, 8), 100, {}, {"steps": 2, "restarts": 1, "smooth_only": False}, signal_model="mlp"
    ),
    "hybrid": Case("cnn2-c2", (3, 12, 12), 25, {"iterations": 1000}, {"iterations": 3}, signal_model="fcn3"),
    "rgap": Case("cnn3-c3", (3, 12, 12), 60, {}, {}, signal_model="fcn3"),
    "inverting-gradients": Case("convnet", (3, 16, 16), 30, {"iterations": 200}, {"iterations": 3}),
    "head-first": Case("convnet", (3, 16, 16), 80, {}, {"iterations": 3, "tries": 1, "solve": False}),
    "dlg": Case("dlg-lenet", (1, 8, 8), 40, {"iterations": 600}, {"iterations": 3}),
    "idlg": Case("dlg-lenet", (1, 8, 8), 40, {"iterations": 600}, {"iterations": 3}),
    "sapag": Case("dlg-lenet", (1, 8, 8), 30, {"iterations": 400}, {"iterations": 3}),
    "learn-from-gradients": Case("dlg-lenet", (1, 8, 8), 30, {"iterations": 800}, {"iterations": 3}),
    "sme": Case("convnet", (3, 16, 16), 30, {"iterations": 200}, {"iterations": 3}),
    "dlfa": Case("convnet", (3, 16, 16), 30, {"iterations": 200}, {"iterations": 3}),
    "systematic": Case(
        "convnet", (3, 16, 16), 28, {"canvas": "pixels", "lr": 0.1, "iterations": 200, "tv": 0.001}, {"iterations": 3}
    ),
    "learning-to-invert": Case(
        "dlg-lenet", (1, 8, 8), 28, {"clients": 500, "hidden": 0}, {"clients": 60}, net={"init": "default"}
    ),
    "linear-layer": Case("mlp", (3, 8, 8), 80, {}, {}, signal_model="mlp"),
    "cocktail-party": Case(
        "mlp", (3, 12, 12), 80, {}, {"solve": False, "iterations": 3}, signal_model="mlp", examples=4
    ),
    "cafe": Case(
        "cafe-cnn",
        (1, 8, 8),
        35,
        {},
        {"iterations": 3},
        signal_model="cafe-cnn",
        net={"filters": (16, 48), "hidden": 32, "middle": 16, "activation": "tanh"},
        signal_net={"filters": (4, 6), "hidden": 8, "middle": 6, "slices": "strips"},
        examples=4,
        protocol=many_rounds,
        trained=many_rounds,
    ),
    "robbing-the-fed": Case("convnet", (3, 16, 16), 80, {"bins": 64}, {"bins": 64}, examples=3),
    "provable-reconstruction": Case(
        *("mlp", (3, 8, 8), 80, {}, {}, "mlp"),
        net={"hidden": 1024},
        signal_net={"hidden": 512},
        examples=3,
    ),
}


#: These draw nothing at random, or from a setting.
CLOSED_FORM = ("linear-layer", "rgap", "hybrid", "robbing-the-fed", "learning-to-invert")
#: These solve from the update alone: the weights of the client's own model do not enter.
WEIGHTS_DO_NOT_ENTER = ("linear-layer", "robbing-the-fed", "provable-reconstruction")


def picture(shape: tuple[int, ...], examples: int = 1, seed: int = 11) -> Tensor:
    """A smooth random picture: noise, blurred along the last axes, stretched to [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(examples, *shape, generator=generator)
    for axis in range(2, x.dim()):
        x = (x + x.roll(1, axis) + x.roll(-1, axis)) / 3
    flat = x.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low)).reshape(x.shape)


def net_for(case: Case, shape: tuple[int, ...] | None = None, seed: int = 0) -> nn.Module:
    shape = shape or case.shape
    name, options = (case.model, case.net) if len(shape) == 3 else (case.signal_model, case.signal_net)
    net = build_model(name, input_shape=shape, num_classes=4, seed=seed, **options)
    attack = attack_of(case)
    return attack.prepare(net, shape) if attack.chooses_model else net


def attack_of(case: Case) -> Attack:
    name = next(name for name, one in CASES.items() if one is case)
    return make_attack(name, **case.options)


def server_of(case: Case) -> Knowledge | None:
    """Who looks: the protocol's usual adversary, unless the attack chooses the model or has examples of its own."""
    if "auxiliary_data" in attack_of(case).requires:
        return Knowledge.informed_server
    return Knowledge.malicious_server if attack_of(case).chooses_model else None


def others_of(shape: tuple[int, ...], count: int = 64) -> tuple[Tensor, Tensor]:
    """Examples of the same kind for an adversary who has some; others are not told of them."""
    return picture(shape, count, seed=77), torch.arange(count) % 4


def labels_for(examples: int) -> Tensor:
    return (torch.arange(examples) + 2) % 4


def look(
    case: Case, shape: tuple[int, ...] | None = None, examples: int | None = None, seed: int = 11, **how: Any
) -> tuple[Observation, Tensor]:
    examples = case.examples if examples is None else examples
    x = picture(shape or case.shape, examples, seed)
    how.setdefault("knowledge", server_of(case))
    how.setdefault("auxiliary", others_of(shape or case.shape, 64 if shape else 560))
    return case.protocol(examples).observe(net_for(case, shape), x, labels_for(examples), **how), x


def score(x: Tensor, found: Tensor) -> float:
    found = found.clamp(0, 1)
    order = assign(x, found)
    return float(psnr(x[order >= 0], found[order[order >= 0]]).mean())


def test_the_table_has_every_attack() -> None:
    assert set(CASES) == set(ATTACKS)
    for protocol in (FedSGD(), FedAvg(), Vertical()):
        assert set(standard_attacks([protocol])) <= set(ATTACKS)
    assert standard_attacks([Vertical()]) == ["cafe"]
    assert "sme" in standard_attacks([FedSGD(), FedAvg()])
    assert "sme" not in standard_attacks([FedSGD()])


@pytest.fixture(params=CASES, scope="module")
def solved(request):
    case = CASES[request.param]
    attack = make_attack(request.param, **case.options)
    seen, x = look(case)
    return case, attack, seen, x, attack(seen, seed=0)


def test_solves_its_tiny_problem(solved) -> None:
    case, _, _, x, result = solved
    assert score(x, result.inputs) >= case.reaches
    if result.labels is not None:
        # A batch comes back in any order, each label with its input.
        order = assign(x, result.inputs.clamp(0, 1))
        assert torch.equal(result.labels[order], labels_for(case.examples))
    assert result.scores.shape == (case.examples,)
    assert {"seconds", "seed", "steps", "restarts", "compiled", "device", "dtype", "threads"} <= set(result.info)


def with_updates(seen: Observation, change: Callable[[Tensor], Tensor]) -> Observation:
    """Every tensor of every message changed."""
    updates = [{name: change(value) for name, value in message.update.items()} for message in seen.messages]
    messages = [dataclasses.replace(m, update=update) for m, update in zip(seen.messages, updates, strict=True)]
    return dataclasses.replace(seen, messages=tuple(messages))


def noise_like(seen: Observation, seed: int = 3) -> Observation:
    generator = torch.Generator().manual_seed(seed)

    def noise(value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator)
        return drawn * value.norm() / drawn.norm()

    return with_updates(seen, noise)


def zero_like(seen: Observation) -> Observation:
    return with_updates(seen, torch.zeros_like)


def other_batch(seen: Observation, case: Case) -> Observation:
    return dataclasses.replace(seen, messages=look(case, seed=99)[0].messages)


SLOW_CONTROLS = [pytest.param(name, marks=pytest.mark.slow) for name in ("zero", "wrong model", "other batch")]


@pytest.mark.parametrize("control", ["noise", *SLOW_CONTROLS])
def test_negative_controls_do_not_succeed(solved, control) -> None:
    """An attack that finds the truth where it is not has been told it."""
    case, attack, seen, x, result = solved
    if control == "wrong model" and _name(solved) in WEIGHTS_DO_NOT_ENTER:
        pytest.skip("solves from the update alone: the model's weights do not enter")
    seen = {
        "noise": lambda: noise_like(seen),
        "zero": lambda: zero_like(seen),
        "wrong model": lambda: dataclasses.replace(seen, model=net_for(case, seed=5)),
        "other batch": lambda: other_batch(seen, case),
    }[control]()
    found = attack(seen, seed=0).inputs
    assert torch.isfinite(found).all()
    assert score(x, found) < min(case.reaches, score(x, result.inputs)) - 10


def test_is_deterministic_and_leaves_everything_as_it_was(solved) -> None:
    case, _, seen, _, _ = solved
    attack: Attack = make_attack(_name(solved), **case.quick)
    before = {k: v.clone() for k, v in seen.model.state_dict().items()}
    updates = [{k: v.clone() for k, v in message.update.items()} for message in seen.messages]
    globe = torch.random.get_rng_state()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in seen.model.modules())
    first, second, other = attack(seen, seed=1), attack(seen, seed=1), attack(seen, seed=2)
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.scores, second.scores)
    if _name(solved) not in CLOSED_FORM:
        assert not torch.equal(first.inputs, other.inputs)
    assert all(torch.equal(before[k], v) for k, v in seen.model.state_dict().items())
    for update, message in zip(updates, seen.messages, strict=True):
        assert all(torch.equal(update[k], v) for k, v in message.update.items())
    assert all(parameter.requires_grad for parameter in seen.model.parameters())
    assert torch.equal(globe, torch.random.get_rng_state())
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in seen.model.modules())


def _name(solved) -> str:
    return next(name for name, entry in ATTACKS.items() if type(solved[1]) is entry.target)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(1, 16, 16), (4, 16, 16), (3, 15, 11), (2, 64)], ids=str)
@pytest.mark.parametrize("examples", [1, 3])
def test_works_for_any_channels_sizes_signals_and_batches(name, shape, examples) -> None:
    case = CASES[name]
    seen, x = look(case, shape, examples)
    result = make_attack(name, **case.quick)(seen)
    assert result.inputs.shape == x.shape
    assert torch.isfinite(result.inputs).all()
    assert result.labels is None or result.labels.shape == (examples,)
    assert len(result.scores) == examples


@pytest.mark.parametrize("name", CASES)
def test_takes_weight_updates_double_precision_and_restarts(name) -> None:
    case = CASES[name]
    x = picture(case.shape, 2)
    others = others_of(case.shape)
    seen = case.trained(2).observe(net_for(case), x, torch.tensor([0, 3]), None, server_of(case), auxiliary=others)
    options = dict(case.quick)
    if "restarts" in {f.name for f in dataclasses.fields(ATTACKS[name].target)}:
        options["restarts"] = 2
    result = make_attack(name, **options)(seen, dtype=torch.float64)
    assert result.inputs.dtype == torch.float64
    assert result.info["dtype"] == "float64"
    assert torch.isfinite(result.inputs).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_update_is_one_clear_error(name, value) -> None:
    case = CASES[name]
    seen, _ = look(case)
    *others, last = seen.messages
    update = {k: v.clone() for k, v in last.update.items()}
    first = next(iter(update))
    update[first].view(-1)[0] = value
    broken = dataclasses.replace(seen, messages=(*others, dataclasses.replace(last, update=update)))
    with pytest.raises(ValueError, match=f"message {len(others)}: .* NaN or infinite entries in {first}"):
        make_attack(name, **case.quick)(broken)


@pytest.mark.parametrize("name", CASES)
def test_refuses_what_it_does_not_know(name) -> None:
    with pytest.raises(ValueError, match="unknown setting 'nonsense'"):
        make_attack(name, nonsense=1)
    with pytest.raises(TypeError):
        ATTACKS[name].target(nonsense=1)
    with pytest.raises(TypeError):
        ATTACKS[name].target(100)  # settings are keyword-only
    with pytest.raises(ValueError, match="preset"):
        make_attack(name, preset="nonsense")
    with pytest.raises(ValueError, match="Observation"):
        ATTACKS[name].target()("not an observation")
    cls = ATTACKS[name].target
    if cls.requires:
        seen, _ = look(CASES[name], knowledge=Knowledge(num_examples=False))
        with pytest.raises(MissingKnowledge, match="num_examples"):
            cls()(seen)


@pytest.mark.parametrize("name", CASES)
def test_describes_itself(name) -> None:
    entry = ATTACKS[name]
    attack = entry.target()
    assert all(f"{f.name}=" in repr(attack) for f in dataclasses.fields(attack))
    import importlib

    module = importlib.import_module(entry.target.__module__)
    assert module.__doc__
    assert len(module.__doc__) > 200
    for preset in entry.target.presets:
        assert isinstance(entry.target.preset(preset), entry.target)
    assert eval(repr(attack), {entry.target.__name__: entry.target}) == attack
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.iterations = 3
