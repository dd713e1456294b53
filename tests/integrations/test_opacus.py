"""The Opacus integration against the installed Opacus: nothing changes, the channel is true, leakage beside epsilon."""

from __future__ import annotations

import copy
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import leakscope as ls

pytest.importorskip("opacus", reason="opacus is not installed: pip install 'leakscope[opacus]'")

from opacus import GradSampleModule, PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager

from leakscope.capture.recordings import recordings
from leakscope.integrations.opacus import EMPTY, OTHER_BATCH, UNCOUNTED, StepAudit, epsilon_of, why_not_private

TILES = ls.load_data("tiles", limit=99)
DELTA = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:opacus.*", "ignore::FutureWarning", "ignore:Full backward")


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.ReLU(), nn.Linear(16, 9))


def make_private(noise: float, *, clip: float = 1.0, poisson: bool = True, batch: int = 4, **options: Any) -> Any:
    """Model, optimiser, loader and engine, with every draw from a generator of its own."""
    model = net()
    loader = DataLoader(
        TensorDataset(TILES.x[:24], TILES.y[:24]), batch_size=batch, generator=torch.Generator().manual_seed(2)
    )
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader, *_ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=clip,
        poisson_sampling=poisson,
        noise_generator=torch.Generator().manual_seed(3),
        **options,
    )
    return private, optimizer, loader, engine


def audit_of(model: nn.Module, optimizer: Any, **options: Any) -> StepAudit:
    facts: dict[str, Any] = {"input_shape": TILES.shape, "num_classes": 9, "value_range": TILES.value_range}
    return StepAudit(model, optimizer, **{**facts, **options})


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, audit: StepAudit | None = None) -> None:
    if audit is not None:
        audit.batch(x, y)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def train(noise: float, audited: bool, *, epochs: int = 2) -> tuple[Any, Any, StepAudit | None]:
    model, optimizer, loader, engine = make_private(noise)
    audit = audit_of(model, optimizer, every=2) if audited else None
    for _ in range(epochs):
        for x, y in loader:
            step(model, optimizer, x, y, audit)
    return model, engine, audit


def test_weights_accountant_and_random_numbers_are_the_same_with_and_without() -> None:
    torch.manual_seed(0)
    plain, plain_engine, _ = train(1.0, audited=False)
    after_plain = torch.random.get_rng_state()
    torch.manual_seed(0)
    audited, engine, audit = train(1.0, audited=True)
    assert torch.equal(torch.random.get_rng_state(), after_plain)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, audited.state_dict()[name]), name
    assert engine.accountant.history == plain_engine.accountant.history
    assert engine.get_epsilon(DELTA) == plain_engine.get_epsilon(DELTA) > 0
    assert audit is not None
    assert audit.steps == sum(steps for _, _, steps in engine.accountant.history) == 12


def test_a_hook_that_was_there_runs_once_a_step_and_comes_back() -> None:
    model, optimizer, _, _ = make_private(1.0, poisson=False)
    calls: list[Tensor] = []
    optimizer.attach_step_hook(lambda one: calls.append(one.params[0].grad.clone()))
    before = optimizer.step_hook
    audit = audit_of(model, optimizer)
    step(model, optimizer, TILES.x[:4], TILES.y[:4], audit)
    assert len(calls) == 1
    audit.detach()
    assert optimizer.step_hook is before


def test_what_is_recorded_is_the_noised_gradient_and_the_channel_tells_its_true_noise() -> None:
    """Against an oracle that takes each example's gradient by itself, clips it, and looks at what is left."""
    model, optimizer, _, _ = make_private(0.7, clip=0.5, poisson=False)
    audit = audit_of(model, optimizer)
    x, y = TILES.x[:3], TILES.y[:3]  # fewer than the four that the optimiser expects and divides by
    weights = copy.deepcopy(net())
    step(model, optimizer, x, y, audit)
    (seen,) = audit.observations
    total = {name: torch.zeros_like(value) for name, value in weights.named_parameters()}
    for i in range(3):
        loss = nn.functional.cross_entropy(weights(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(weights.parameters()))
        norm = torch.stack([value.square().sum() for value in gradients]).sum().sqrt()
        for name, value in zip(total, gradients, strict=True):
            total[name] += value * min(1.0, 0.5 / float(norm))
    rest = torch.cat([(seen.message.update[n] - total[n] / 3).flatten() for n in total])
    assert seen.channel is not None
    assert seen.channel.noise == pytest.approx(0.7 * 0.5 / 3)
    assert float(rest.std()) == pytest.approx(0.7 * 0.5 / 3, rel=0.02)
    assert abs(float(rest.mean())) < 4 * float(rest.std()) / len(rest) ** 0.5
    assert seen.channel.clip == 0.5
    assert seen.channel.clip_per == "example"
    # The weights are those before the step.
    for name, value in weights.state_dict().items():
        assert torch.equal(seen.model.state_dict()[name], value)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_without_noise_everything_leaks_with_noise_nothing_does(mode: str) -> None:
    """Positive and negative control of the whole way, beside epsilon."""
    reports = {}
    for noise in (0.0, 2.0):
        model, optimizer, _, engine = make_private(noise, poisson=False, batch=1, grad_sample_mode=mode)
        audit = audit_of(model, optimizer)
        for i in range(2):
            step(model, optimizer, TILES.x[i : i + 1], TILES.y[i : i + 1], audit)
        reports[noise] = audit.report("linear-layer", accountant=engine.accountant, delta=DELTA, others=TILES.x[30:])
    bare, noisy = reports[0.0], reports[2.0]
    assert bare.epsilon == float("inf")
    assert 0 < noisy.epsilon < 100
    assert [min(one.lift) > 60 for one in bare.leakage] == [True, True]
    assert max(max(one.lift) for one in noisy.leakage) < 3
    assert bare.identified == (2, 2)
    assert bare.worst is not None
    assert "epsilon inf at delta 1e-05" in bare.describe()
    assert "zero information" in noisy.describe()


def test_epsilon_is_the_accountants_and_a_bound_where_its_grid_would_not_fit() -> None:
    accountant = PRVAccountant()
    accountant.step(noise_multiplier=2.0, sample_rate=0.1)
    assert epsilon_of(accountant, DELTA) == accountant.get_epsilon(DELTA)
    accountant.step(noise_multiplier=1e-3, sample_rate=0.1)  # 20 GB by itself
    assert 1e4 < epsilon_of(accountant, DELTA) < float("inf")
    assert epsilon_of(PRVAccountant(), DELTA) == 0


def test_knowing_the_noise_is_worth_something_and_the_attack_is_told() -> None:
    model, optimizer, _, _ = make_private(1e-3, poisson=False)
    audit = audit_of(model, optimizer)
    step(model, optimizer, TILES.x[:4], TILES.y[:4], audit)
    (seen,) = audit.observations
    assert seen.knowledge.defense
    report = audit.report(ls.attacks.InvertingGradients(iterations=20), controls=False)
    assert not [note for note in report.leakage[0].notes if "no defence" in note]
    assert report.epsilon is None


def test_poisson_batches_of_every_size_the_empty_one_is_told(tmp_path: Path) -> None:
    model, optimizer, _, engine = make_private(1.0)
    audit = audit_of(model, optimizer, folder=tmp_path / "steps")
    sizes = (3, 0, 5)
    for size in sizes:
        step(model, optimizer, TILES.x[:size], TILES.y[:size], audit)
    assert [seen.num_examples for seen in audit.observations] == [3, 5]
    assert audit.skipped == {2: EMPTY}
    assert len(engine.accountant.history) == 1
    found = recordings(tmp_path / "steps")
    assert [one.origin.number for one in found] == [1, 3]
    truth = found[1].truth()
    assert truth is not None
    assert torch.equal(truth[0], TILES.x[:5])
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (tmp_path / "steps").iterdir())
    loaded = found[0].observation(net())
    assert loaded.channel == audit.observations[0].channel
    events: list[str] = []
    report = audit.report("linear-layer", controls=False, progress=lambda event: events.append(event["event"]))
    assert events[0] == "planned"
    assert "finished" in events
    assert EMPTY in report.describe()


def test_only_empty_batches_give_no_report() -> None:
    model, optimizer, _, _ = make_private(1.0)
    audit = audit_of(model, optimizer)
    step(model, optimizer, TILES.x[:0], TILES.y[:0], audit)
    with pytest.raises(ValueError, match="no step was recorded of 1: an empty batch"):
        audit.report()


def test_a_batch_in_parts_is_one_observation() -> None:
    """Opacus' BatchMemoryManager accumulates; only the last part makes a step."""
    updates = []
    for told in (True, False):
        model, optimizer, loader, _ = make_private(1e-6, poisson=False, batch=6)
        audit = audit_of(model, optimizer, every=100)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
            for x, y in parts:
                step(model, optimizer, x, y, audit if told else None)
        if not told:
            assert audit.skipped == {1: UNCOUNTED}
            continue
        (seen,) = audit.observations
        assert seen.num_examples == 6
        updates.append(seen.message.update)
    model, optimizer, loader, _ = make_private(1e-6, poisson=False, batch=6)
    audit = audit_of(model, optimizer, every=100)
    x, y = next(iter(loader))
    step(model, optimizer, x, y, audit)
    for name, value in audit.observations[0].message.update.items():
        assert torch.allclose(value, updates[0][name], atol=1e-5)


def test_a_truth_that_is_not_the_batch_is_not_measured_against() -> None:
    model, optimizer, _, _ = make_private(1.0, poisson=False)
    audit = audit_of(model, optimizer)
    audit.batch(TILES.x[:1], TILES.y[:1])
    step(model, optimizer, TILES.x[:4], TILES.y[:4])
    assert audit.skipped == {1: OTHER_BATCH.format(1, 4)}


def test_without_truth_no_psnr_is_claimed() -> None:
    model, optimizer, _, _ = make_private(1e-6, poisson=False, batch=1)
    audit = audit_of(model, optimizer)
    step(model, optimizer, TILES.x[:1], TILES.y[:1])
    report = audit.report("linear-layer")
    assert report.leakage[0].psnr is None
    assert report.worst is None
    assert report.identified == (0, 0)
    unexplained = report.leakage[0].unexplained
    assert unexplained is not None
    assert unexplained < 0.1


def test_a_hook_attached_after_the_audit_is_noticed() -> None:
    model, optimizer, _, engine = make_private(1.0)
    audit = audit_of(model, optimizer)
    optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(0.1))
    with pytest.raises(RuntimeError, match="another was attached after it"):
        audit.batch(TILES.x[:1], TILES.y[:1])
    with pytest.raises(ValueError, match="no step was recorded of 0: the optimiser's step hook"):
        audit.report()


def test_a_model_that_cannot_be_private_is_told_in_opacus_words() -> None:
    """Opacus itself takes BatchNorm without trainable parameters, which mixes the examples of a batch all the same."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 9))
    model[2].eval()
    modes = [module.training for module in model.modules()]
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # with fixed statistics the layer is one like any other
        audit = audit_of(wrapped, optimizer)
    assert [module.training for module in model.modules()] == modes
    wrapped.train()
    audit.batch(TILES.x[:2], TILES.y[:2])
    nn.functional.cross_entropy(wrapped(TILES.x[:2]), TILES.y[:2]).backward()
    with pytest.warns(UserWarning, match="BatchNorm cannot support training with differential privacy"):
        optimizer.step()
    report = audit.report("linear-layer", controls=False)
    assert "The promise does not hold. 2 has no trainable parameters" in report.describe()
    with pytest.warns(UserWarning, match="passes it over: BatchNorm cannot support"):
        audit_of(wrapped, optimizer)
    assert why_not_private(net()) == []


def test_dropout_is_told_as_an_approximation() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 4), nn.Dropout(0.5), nn.Linear(4, 9))
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=2
    )
    audit = audit_of(wrapped, optimizer)
    audit.batch(TILES.x[:2], TILES.y[:2])
    nn.functional.cross_entropy(wrapped(TILES.x[:2]), TILES.y[:2]).backward()
    optimizer.step()
    assert "defence approximated" in audit.report("linear-layer", controls=False).leakage[0].reconstruction.flags  # type: ignore[union-attr]


def test_ghost_clipping_gives_the_same_observation() -> None:
    """Its gradients are clipped without per-example gradients; the number of examples comes from batch(x, y)."""
    seen = []
    for mode in ("hooks", "ghost"):
        model = net()
        engine = PrivacyEngine()
        parts = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(TILES.x[:8], TILES.y[:8]), batch_size=4),
            noise_multiplier=1e-6,
            max_grad_norm=0.5,
            poisson_sampling=False,
            grad_sample_mode=mode,
            criterion=nn.CrossEntropyLoss(),
        )
        private, optimizer = parts[0], parts[1]
        criterion = parts[2] if mode == "ghost" else nn.CrossEntropyLoss()
        audit = audit_of(private, optimizer)
        audit.batch(TILES.x[:4], TILES.y[:4])
        optimizer.zero_grad()
        criterion(private(TILES.x[:4]), TILES.y[:4]).backward()
        optimizer.step()
        seen.append(audit.observations[0])
    for name, value in seen[0].message.update.items():
        assert torch.allclose(value, seen[1].message.update[name], atol=1e-4)


def test_bad_settings_are_refused() -> None:
    model, optimizer, _, engine = make_private(1.0)
    with pytest.raises(ValueError, match=r"every: expected(?s:.*)got SGD; call make_private first"):
        audit_of(model, torch.optim.SGD(model.parameters(), lr=0.1), every=0)
    with pytest.raises(ValueError, match="expected the one that the optimiser trains; 4 of its 4"):
        audit_of(net(), optimizer)
    other = net()
    per_layer = DPPerLayerOptimizer(
        torch.optim.SGD(other.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=[1.0] * 4,
        expected_batch_size=2,
    )
    with pytest.raises(ValueError, match="DPPerLayerOptimizer clips or adds noise otherwise"):
        audit_of(other, per_layer)
    audit = audit_of(model, optimizer)
    step(model, optimizer, TILES.x[:2], TILES.y[:2], audit)
    with pytest.raises(ValueError, match="expected both or none"):
        audit.report(accountant=engine.accountant)


@pytest.mark.slow
def test_nothing_loads_opacus_unasked_and_its_absence_is_told() -> None:
    code = (
        "import sys, leakscope, leakscope.integrations; assert 'opacus' not in sys.modules\n"
        "sys.modules['opacus'] = None\n"
        "try:\n    import leakscope.integrations.opacus\n"
        "except ImportError as error:\n    assert \"pip install 'leakscope[opacus]'\" in str(error), error\n"
        "else:\n    raise SystemExit('imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
