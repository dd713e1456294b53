"""One compiled step a setting: found again by its graph, bounded in number, and never a reason for a run to fail."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from leakscope.contracts.observation import Observation
from leakscope.federation import FedSGD
from leakscope.matching import (
    Adam,
    BatchNormStatistics,
    Cosine,
    DirectionL1,
    Matcher,
    Orthogonality,
    SegmentGradient,
    TotalVariation,
    UnrolledSteps,
    Victim,
    compilation,
)
from leakscope.matching import problem as problem_module
from leakscope.matching.compilation import DIRECTORY, DROPPED, FIRST, OTHER_INPUTS, CannotCompile, CompiledFunctions
from leakscope.models import build_model
from matching_problems import SITUATIONS, problem, rows_of

pytestmark = pytest.mark.slow


@pytest.fixture
def compiles(monkeypatch) -> list[str]:
    """What was compiled, as graphs that run as they are: a compiler takes seconds, and is tested apart."""
    made: list[str] = []

    def pretend(graph, inputs):
        made.append(graph.code)
        return graph

    monkeypatch.setattr(compilation, "_compile", pretend)
    monkeypatch.setattr(problem_module, "FUNCTIONS", CompiledFunctions())
    return made


def net(hidden: int = 6) -> nn.Module:
    return build_model("mlp", input_shape=(1, 4, 4), num_classes=3, hidden=[hidden])


def look(model: nn.Module, seed: int, batch: int = 2) -> tuple[Observation, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, 1, 4, 4, generator=generator)
    y = torch.randint(3, (batch,), generator=generator)
    return FedSGD().observe(model, x, y), y


def run(matcher: Matcher, seen: Observation, y: Tensor | None, seed: int = 0):
    return matcher.run(
        Victim.of(seen),
        dict(seen.message.update),
        inputs=seen.inputs,
        count=seen.num_examples,
        targets=y,
        output_shape=seen.output_shape,
        generator=torch.Generator().manual_seed(seed),
    )


MATCHER = Matcher(distance=Cosine(), priors=(TotalVariation(weight=0.1),), iterations=3, compile="always")


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if "replayed" not in name])
def test_a_traced_step_is_the_step(situation, compiles) -> None:
    task = problem(**SITUATIONS[situation])
    for own, oracle in zip(
        task.evaluator_by("compiled")(rows_of(task), 2), task.evaluator_by("plain")(rows_of(task), 2), strict=True
    ):
        assert float((own - oracle).abs().max()) <= 1e-10 * float(oracle.abs().max())
    assert len(compiles) == 1


def test_a_traced_step_reads_the_iteration_and_the_row(compiles) -> None:
    """Nothing of the trace's own example may have been taken for a constant."""
    task = problem(**SITUATIONS["another judge"])
    traced, plain = task.evaluator_by("compiled"), task.evaluator_by("plain")
    for iteration in (0, 1, 5):
        rows = rows_of(task) * (1 + iteration)
        for own, oracle in zip(traced(rows, iteration), plain(rows, iteration), strict=True):
            assert torch.allclose(own, oracle, rtol=1e-10)


def test_another_image_label_seed_or_weight_compiles_nothing(compiles) -> None:
    infos = []
    for seed in range(3):
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)
            model = net()
        seen, y = look(model, seed)
        compiled = run(MATCHER, seen, y, seed)
        plain = run(dataclasses.replace(MATCHER, compile="never"), seen, y, seed)
        assert torch.allclose(compiled.inputs, plain.inputs, atol=1e-5)
        infos.append(compiled.info)
    assert len(compiles) == 1
    assert [info["compiled"] for info in infos] == [True] * 3
    assert [info.get("compiled_because") for info in infos] == [FIRST, None, None]


def test_more_restarts_or_another_optimiser_use_the_same_step(compiles) -> None:
    seen, y = look(net(), 0)
    run(MATCHER, seen, y)
    for change in ({"restarts": 3}, {"iterations": 5}, {"optimiser": Adam(lr=0.01)}, {"tolerance": 0.1}):
        run(dataclasses.replace(MATCHER, **change), seen, y)
    assert len(compiles) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"distance": DirectionL1()},
        {"priors": ()},
        {"priors": (TotalVariation(weight=0.2),)},
    ],
    ids=str,
)
def test_what_changes_the_computation_compiles_anew(change, compiles) -> None:
    seen, y = look(net(), 0)
    run(MATCHER, seen, y)
    assert run(dataclasses.replace(MATCHER, **change), seen, y).info["compiled_because"] == FIRST
    assert len(compiles) == 2


def test_another_model_batch_or_kind_of_labels_compiles_anew(compiles) -> None:
    run(MATCHER, *look(net(), 0))
    wider = run(MATCHER, *look(net(hidden=7), 0))
    more = run(MATCHER, *look(net(), 0, batch=3))
    searched = run(MATCHER, look(net(), 0)[0], None)
    for match in (wider, more, searched):
        assert match.info["compiled_because"] in (FIRST, OTHER_INPUTS)
    assert len(compiles) == 4


def test_a_derivative_taken_now_and_then_has_two_steps(compiles) -> None:
    task = problem(**{**SITUATIONS["beta"], "simulation": SegmentGradient(beta=0.3, every=3)})
    traced, plain = task.evaluator_by("compiled"), task.evaluator_by("plain")
    assert len(compiles) == 2
    for iteration in range(5):
        for own, oracle in zip(traced(rows_of(task), iteration), plain(rows_of(task), iteration), strict=True):
            assert torch.allclose(own, oracle, rtol=1e-9)


def test_compiled_functions_are_few_and_the_oldest_goes_first(compiles) -> None:
    functions = CompiledFunctions(limit=2)
    one = (torch.ones(3),)
    add, double, square = (lambda x: (x + 1,)), (lambda x: (x * 2,)), (lambda x: (x * x,))
    assert [functions.get(each, one).because for each in (add, double)] == [FIRST, FIRST]
    assert not functions.get(add, one).fresh
    assert functions.get(add, (torch.ones(4),)).because == OTHER_INPUTS  # `double` went, not `add`
    assert len(functions) == 2
    assert functions.get(double, one).because == DROPPED
    assert functions.get(square, one).because == FIRST
    assert len(functions) == 2


def multiplied_by(factor: Tensor):
    return lambda x: (x * factor,)


def test_tensors_from_elsewhere_are_inputs_not_constants(compiles) -> None:
    functions = CompiledFunctions()
    for factor in (torch.tensor([2.0]), torch.tensor([5.0])):
        found = functions.get(multiplied_by(factor), (torch.ones(3),))
        assert found.function(torch.full((3,), 4.0))[0].tolist() == [4 * float(factor)] * 3
    assert len(compiles) == 1


def test_numbers_of_threads_are_not_mixed_up(compiles, monkeypatch) -> None:
    functions = CompiledFunctions()
    functions.get(lambda x: (x + 1,), (torch.ones(3),))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert functions.get(lambda x: (x + 1,), (torch.ones(3),)).because == OTHER_INPUTS


class Fickle(nn.Module):
    """A model whose course depends on its numbers: no graph describes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if bool(x.mean() > 0) else 2 * self.inner(x)


def test_a_step_that_cannot_be_compiled_stays_plain_and_says_why(compiles) -> None:
    seen, y = look(Fickle(), 0)
    long = dataclasses.replace(MATCHER, compile="auto")
    object.__setattr__(long, "_compiles", lambda *facts: True)
    match = run(long, seen, y)
    assert match.info["evaluation"] == "plain"
    assert not match.info["compiled"]
    assert "cannot be traced" in match.info["not_compiled_because"]
    with pytest.raises(ValueError, match=r"^compile"):
        run(MATCHER, seen, y)
    assert compiles == []


def test_a_compiler_that_fails_is_no_reason_to_fail(compiles, monkeypatch) -> None:
    def broken(graph, inputs):
        raise OSError("no space left")

    monkeypatch.setattr(compilation, "_compile", broken)
    with pytest.raises(CannotCompile, match="OSError: no space left"):
        CompiledFunctions().get(lambda x: (x + 1,), (torch.ones(3),))


def test_replayed_steps_are_not_compiled() -> None:
    with pytest.raises(ValueError, match="replayed local steps"):
        Matcher(distance=Cosine(), simulation=UnrolledSteps(0.1, ((0,),)), compile="always")


def directory() -> str | None:
    with compilation._directory():
        return os.environ.get(DIRECTORY)


def test_the_compilers_directory(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path / "ours"))
    monkeypatch.delenv(DIRECTORY, raising=False)
    assert directory() == str(tmp_path / "ours" / "compiled")
    assert (tmp_path / "ours" / "compiled").stat().st_mode & 0o777 == 0o700
    assert DIRECTORY not in os.environ
    monkeypatch.setenv(DIRECTORY, default_cache_dir())  # what the compiler sets itself when it is imported
    assert directory() == str(tmp_path / "ours" / "compiled")
    assert os.environ[DIRECTORY] == default_cache_dir()
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "chosen"))
    assert directory() == str(tmp_path / "chosen")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv(DIRECTORY)
    assert directory() is None


@pytest.mark.slow
def test_the_compiler_itself(monkeypatch) -> None:
    """Label logits, BatchNorm statistics and a prior that changes with the iteration are in the compiled graph."""
    monkeypatch.setattr(problem_module, "FUNCTIONS", CompiledFunctions())
    # Beside the compiler's own directory for temporary files, so that the next tests need not compile.
    monkeypatch.setenv(DIRECTORY, str(Path(default_cache_dir()) / "leakscope-tests"))
    settings = {**SITUATIONS["BatchNorm in train mode"], "labels": False, "distance": DirectionL1()}
    settings["priors"] = (
        TotalVariation(weight=0.1),
        BatchNormStatistics(weight=0.01),
        Orthogonality(weight=0.1, every=1),
    )
    for seed in range(2):
        task = problem(dtype=torch.float32, seed=seed, **settings)
        compiled, plain = task.evaluator_by("compiled"), task.evaluator_by("plain")
        assert compiled.compiled is not None
        assert compiled.compiled.fresh == (seed == 0)
        for iteration in range(2):
            for own, oracle in zip(compiled(rows_of(task), iteration), plain(rows_of(task), iteration), strict=True):
                assert float((own - oracle).abs().max()) <= 1e-5 * float(oracle.abs().max())
