"""From near to exact: solved pictures, and a certificate that is false everywhere else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leakscope.equations.conjugate_gradients import conjugate_gradients
from leakscope.equations.gated_equations import blocks_of, whitening_matrix
from leakscope.equations.gated_inverse import SILENT, GatedProblem, SolverSettings
from leakscope.models.resnet import ResidualBlock
from leakscope.network.gates import read_gated
from leakscope.network.recorder import inputs_of

CERTIFIED = 1e-6
#: Looks at an input, and does not move it.
LOOK = SolverSettings(passes=1)


def conv_net(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 16, 3, padding=1), activation(), nn.Conv2d(16, 24, 3, 2, 1), activation()),
        *(nn.Conv2d(24, 32, 3, 2, 1), activation(), nn.Flatten(), nn.Linear(32 * 9, 6)),
    )


def pooled_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 9, 6)),
    )


def residual_net() -> nn.Module:
    net = nn.Sequential(
        *(nn.Conv2d(2, 24, 3, padding=1), nn.ReLU(), ResidualBlock(24, 24, 1), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(24 * 36, 6)),
    )
    draws = torch.Generator().manual_seed(2)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.copy_(torch.randn(24, generator=draws) / 10)
            module.running_var.copy_(0.2 + torch.rand(24, generator=draws) / 5)
    return net


def signal_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(2, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 16, 5, 2, 2), nn.ReLU()),
        *(nn.Conv1d(16, 20, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(20 * 12, 6)),
    )


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ReLU": (conv_net, (2, 12, 12)),
    "LeakyReLU": (lambda: conv_net(lambda: nn.LeakyReLU(0.1)), (2, 12, 12)),
    "max pooling": (pooled_net, (2, 12, 12)),
    "residual": (residual_net, (2, 12, 12)),
    "Conv1d": (signal_net, (2, 48)),
}


class Case:
    """A net, private inputs in [0, 1], and what an adversary knows at the cut and of the gradients."""

    def __init__(self, name: str = "ReLU", examples: int = 1, seed: int = 0) -> None:
        build, shape = NETS[name]
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)
            self.model = build().double().eval()
        draws = torch.Generator().manual_seed(seed + 10)
        self.x = torch.rand((examples, *shape), generator=draws, dtype=torch.float64)
        self.draws = draws
        head = self.model[-1]
        assert isinstance(head, nn.Linear)
        self.network = read_gated(self.model, shape, str(len(list(self.model.children())) - 1))
        self.adjoints = torch.randn((examples, 6), generator=draws, dtype=torch.float64) @ head.weight.detach()
        self.problem = self.problem_of(self.x)

    def problem_of(self, x: Tensor) -> GatedProblem:
        head = self.model[-1]
        features = inputs_of(head, self.model, x).flatten(1)
        below = {name: value for name, value in self.model.named_parameters() if value not in set(head.parameters())}
        gradients = torch.autograd.grad((features * self.adjoints).sum(), list(below.values()))
        known = dict(zip(below, gradients, strict=True))
        return GatedProblem(self.network, features.detach(), self.adjoints, known, project=lambda z: z.clamp(0, 1))

    def near(self, noise: float) -> Tensor:
        """The truth, off by so much in the root mean square."""
        off = torch.randn(self.x.shape, generator=self.draws, dtype=torch.float64)
        return (self.x + noise * off).clamp(0, 1)

    def with_gradients(self, change: Callable[[str, Tensor], Tensor]) -> GatedProblem:
        problem = self.problem
        changed = {name: change(name, value) for name, value in problem.gradients.items()}
        return GatedProblem(problem.network, problem.features, problem.adjoints, changed, problem.project)


def decibel(x: Tensor, found: Tensor) -> float:
    return -10 * math.log10(max(float((x - found).square().mean()), 1e-30))


@pytest.mark.parametrize("noise", [0.02, 0.05])
@pytest.mark.parametrize("name", NETS)
def test_a_near_picture_becomes_the_exact_one(name: str, noise: float) -> None:
    case = Case(name)
    start = case.near(noise)
    assert decibel(case.x, start) < 36
    solution = case.problem.solve(start)
    assert solution.certificate < CERTIFIED
    assert decibel(case.x, solution.inputs) > 80
    assert solution.history[0] > 1e-3
    assert 0 <= float(solution.inputs.min()) <= float(solution.inputs.max()) <= 1


@pytest.mark.parametrize("name", ["ReLU", "max pooling"])
def test_a_batch_of_two(name: str) -> None:
    case = Case(name, examples=2)
    solution = case.problem.solve(case.near(0.02))
    assert solution.certificate < CERTIFIED
    assert decibel(case.x, solution.inputs) > 80


def test_pixels_at_their_bounds_stay_inside() -> None:
    case = Case()
    case.x = case.x.round() * 0.5 + case.x.clamp(0.25, 0.75) * 0.5
    case.x[:, :, :6] = case.x[:, :, :6].round()
    problem = case.problem_of(case.x)
    solution = problem.solve(case.near(0.03))
    assert solution.certificate < CERTIFIED
    assert decibel(case.x, solution.inputs) > 80
    assert 0 <= float(solution.inputs.min()) <= float(solution.inputs.max()) <= 1


def test_without_bounds_too() -> None:
    case = Case()
    known = case.problem
    problem = GatedProblem(known.network, known.features, known.adjoints, known.gradients)
    solution = problem.solve(case.near(0.03))
    assert solution.certificate < CERTIFIED
    assert decibel(case.x, solution.inputs) > 80


def test_gradients_rounded_to_float32_are_enough() -> None:
    case = Case()
    solution = case.with_gradients(lambda _, value: value.float()).solve(case.near(0.03))
    assert solution.certificate < CERTIFIED
    assert decibel(case.x, solution.inputs) > 80


@pytest.mark.parametrize("name", NETS)
def test_the_truth_has_the_certificate_and_stays(name: str) -> None:
    case = Case(name)
    looked = case.problem.solve(case.x, LOOK)
    assert looked.certificate < 1e-12
    assert torch.equal(looked.inputs, case.x)
    assert case.problem.certificate(case.x) < 1e-12


@pytest.mark.parametrize("name", ["ReLU", "max pooling"])
def test_a_unit_that_is_barely_active_does_not_cost_the_certificate(name: str) -> None:
    """Its features are zero for rounding, and its gradient is not: a bias near zero on a black background."""
    case = Case(name)
    last = [module for module in case.model.modules() if isinstance(module, nn.Conv2d)][-1]
    assert last.bias is not None
    with torch.no_grad():
        last.weight[3], last.bias[3] = 0.0, 1e-7
    case.network = read_gated(case.model, case.x.shape[1:], str(len(list(case.model.children())) - 1))
    problem = case.problem_of(case.x)
    assert problem.certificate(case.x) < CERTIFIED
    assert problem.solve(case.near(0.01)).certificate < CERTIFIED


@pytest.mark.parametrize("name", NETS)
def test_no_near_miss_has_the_certificate(name: str) -> None:
    """Twenty pictures from 30 to 60 dB beside the truth: none is called exact."""
    case = Case(name)
    for number in range(20):
        level = 30 + 30 * number / 19
        planted = case.near(10 ** (-level / 20))
        assert 29 < decibel(case.x, planted) < 64
        looked = case.problem.solve(planted, LOOK)
        assert torch.equal(looked.inputs, planted)
        assert looked.certificate > 100 * CERTIFIED
        assert len(looked.history) == 1


@pytest.mark.slow
def test_a_picture_that_explains_only_the_units_counted_on_has_none() -> None:
    """In a narrow net the solver can explain the few units that it keeps by many pictures."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)),
        ).double()
    draws = torch.Generator().manual_seed(1)
    tempted = 0
    for _ in range(7):
        x = torch.rand((1, 1, 8, 8), generator=draws, dtype=torch.float64)
        adjoints = torch.randn((1, 5), generator=draws, dtype=torch.float64) @ net[5].weight.detach()
        features = inputs_of(net[5], net, x).flatten(1)
        below = dict(list(net.named_parameters())[:4])
        gradients = torch.autograd.grad((features * adjoints).sum(), list(below.values()))
        known = dict(zip(below, gradients, strict=True))
        problem = GatedProblem(
            read_gated(net, (1, 8, 8), "5"), features.detach(), adjoints, known, lambda z: z.clamp(0, 1)
        )
        solution = problem.solve(torch.rand(x.shape, generator=draws, dtype=torch.float64))
        assert solution.certificate > CERTIFIED or decibel(x, solution.inputs) > 80
        tempted += min(solution.history) < CERTIFIED
        assert problem.certificate(x) < 1e-12
    assert tempted, "units that the solver left out would have hidden it"


@pytest.mark.parametrize("name", NETS)
def test_noise_is_not_certified(name: str) -> None:
    case = Case(name)
    for _ in range(3):
        noise = torch.rand(case.x.shape, generator=case.draws, dtype=torch.float64)
        assert case.problem.solve(noise, LOOK).certificate > 0.01


def test_another_pictures_gradient_is_not_certified() -> None:
    case = Case()
    other = case.problem_of(torch.rand(case.x.shape, generator=case.draws, dtype=torch.float64))
    assert other.solve(case.x, LOOK).certificate > 0.01
    mixed = GatedProblem(case.network, case.problem.features, case.adjoints, other.gradients, case.problem.project)
    assert mixed.solve(case.near(0.02), SolverSettings(passes=8)).certificate > 0.01


def doubled(name: str, value: Tensor) -> Tensor:
    return 2 * value if name == "2.weight" else value


def noisy(_name: str, value: Tensor) -> Tensor:
    drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=value.dtype)
    return value + 1e-3 * drawn * value.norm() / drawn.norm()


def one_row(name: str, value: Tensor) -> Tensor:
    value = value.clone()
    if name == "4.weight":
        value[3] *= 1.5
    return value


@pytest.mark.parametrize("change", [doubled, noisy, one_row])
def test_an_altered_gradient_is_not_certified(change: Callable[[str, Tensor], Tensor]) -> None:
    case = Case()
    altered = case.with_gradients(change)
    assert altered.solve(case.x, LOOK).certificate > 1e-4
    solution = altered.solve(case.near(0.02), SolverSettings(passes=10))
    assert solution.certificate > 1e-4
    assert bool(torch.isfinite(solution.inputs).all())


def test_the_best_pass_is_returned() -> None:
    case = Case()
    solution = case.with_gradients(noisy).solve(case.near(0.02), SolverSettings(passes=10))
    assert solution.certificate >= min(solution.history)
    assert decibel(case.x, solution.inputs) > 40, "noise of a thousandth costs the certificate, not the picture"


def test_layers_without_a_gradient_are_left_out() -> None:
    case = Case()
    known = case.problem
    frozen = {name: value for name, value in known.gradients.items() if not name.startswith("0.")}
    problem = GatedProblem(known.network, known.features, known.adjoints, frozen, known.project)
    solution = problem.solve(case.near(0.02))
    assert solution.certificate < CERTIFIED
    assert decibel(case.x, solution.inputs) > 80
    nothing = GatedProblem(known.network, known.features, known.adjoints, {}, known.project)
    start = case.near(0.02)
    looked = nothing.solve(start)
    assert looked.certificate == math.inf
    assert torch.equal(looked.inputs, start)


def test_products_are_counted_by_size() -> None:
    one, two = Case(), Case(examples=2)
    assert one.problem.affordable_products() == pytest.approx(2 * two.problem.affordable_products(), rel=0.01)


@pytest.mark.parametrize("least", [1e-6, 0.01, 0.3])
def test_whitening_makes_strong_signals_equal_and_leaves_the_weak_weak(least: float) -> None:
    draws = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn((5, 5), generator=draws, dtype=torch.float64))[0]
    sizes = torch.tensor([1.0, 0.5, 0.1, 1e-3, 0.0], dtype=torch.float64)
    places = torch.linalg.qr(torch.randn((8, 5), generator=draws, dtype=torch.float64))[0]
    signal = (basis * sizes) @ places.T
    white = whitening_matrix(signal.reshape(5, 2, 4).transpose(0, 1), least) @ signal
    assert len(white) == 4, "a direction without signal has no equations"
    own = torch.linalg.svdvals(white)
    expected = sizes[:4] / (sizes[:4] ** 2 + least**2).sqrt()
    assert torch.allclose(own, expected, atol=1e-6)


def test_near_the_solution_the_masks_of_the_first_layer_are_decoded_too() -> None:
    """A wrong mask there is a false fixed point: the next input would reproduce it."""
    before = after = 0
    for seed in range(12):
        case = Case(seed=seed)
        truth = case.network.run(case.x).gates
        now = case.network.run(case.near(1e-3))
        first = case.network.layers[0].gate
        assert first is not None
        far, _, _ = case.problem._decode(now)
        near, _, _ = case.problem._decode(now, near=True)
        assert torch.equal(far[first], now.gates[first])
        before += int((far[first] != truth[first]).sum())
        after += int((near[first] != truth[first]).sum())
    assert before >= 6
    assert after <= before / 3, f"{after} of {before} wrong masks are left"


def test_features_within_their_noise_of_zero_do_not_open_units() -> None:
    """Without pooling each feature is one unit, and noise on a silent one would count as activity for sure."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).double()
    draws = torch.Generator().manual_seed(1)
    x = torch.rand((1, 1, 8, 8), generator=draws, dtype=torch.float64)
    network = read_gated(net, (1, 8, 8), "3")
    features = network.run(x).features.flatten(1).detach()
    noisy = features + 1e-3 * features.max() * torch.randn(features.shape, generator=draws, dtype=torch.float64)
    silent = (features == 0).reshape(1, 8, 6, 6)
    assert silent.any()
    for silence, opened in ((SILENT, True), (5e-3, False)):
        problem = GatedProblem(network, noisy, torch.zeros_like(noisy), {}, silence=silence)
        gates, _, _ = problem._decode(network.run(x))
        assert bool((gates[2][silent] > 0).any()) is opened


def test_blocks_have_norm_one_and_count_less_the_worse_they_are_explained() -> None:
    case = Case()
    now = case.network.run(case.near(0.02))
    _, layers, _ = case.problem._decode(now, first=False)
    equal, trusting = blocks_of(layers, 10.0, 0.0), blocks_of(layers, 10.0, 2.0)
    assert all(float(block.right.norm()) == pytest.approx(1) for block in equal)
    for state, block in zip(layers, trusting, strict=True):
        assert float(block.right.norm()) == pytest.approx(min(1, layers[0].residual / state.residual) ** 2)


def test_where_it_stalls_layers_that_are_explained_well_enough_count_in_full() -> None:
    case = Case()
    now = case.network.run(case.near(1e-4))
    _, layers, _ = case.problem._decode(now, first=False)
    assert max(state.residual for state in layers[:2]) < 1e-3
    blocks = blocks_of(layers[:2], 10.0, 2.0, fair=1e-3)
    assert all(float(block.right.norm()) == pytest.approx(1) for block in blocks)


@pytest.mark.parametrize("noise", [1e-4, 1e-3, 1e-2])
def test_inputs_that_the_highest_layer_does_not_determine_are_found_all_the_same(noise: float) -> None:
    """Softmax-like adjoints and a smooth picture: the highest layer and the features leave directions open."""
    case = Case()
    case.x = (case.x + case.x.roll(1, 2) + case.x.roll(1, 3)) / 3
    case.adjoints = case.adjoints * 0.1
    solution = case.problem_of(case.x).solve(case.near(noise))
    assert solution.certificate < CERTIFIED
    assert decibel(case.x, solution.inputs) > 80


def test_conjugate_gradients_solve_positive_definite_systems() -> None:
    draws = torch.Generator().manual_seed(0)
    factor = torch.randn((12, 12), generator=draws, dtype=torch.float64)
    matrix = factor @ factor.T + torch.eye(12, dtype=torch.float64)
    right = torch.randn(12, generator=draws, dtype=torch.float64)
    found = conjugate_gradients(lambda v: matrix @ v, right, 40, tolerance=1e-12)
    assert torch.allclose(matrix @ found, right, atol=1e-9)
    energies = []
    for steps in range(6):
        v = conjugate_gradients(lambda v: matrix @ v, right, steps, tolerance=1e-12)
        energies.append(float(v @ matrix @ v / 2 - right @ v))
    assert energies == sorted(energies, reverse=True)
    assert torch.equal(conjugate_gradients(lambda v: matrix @ v, torch.zeros_like(right), 5), torch.zeros_like(right))
