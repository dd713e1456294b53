"""Who owns which features, which batches are announced, and a model that is held in parts."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.equations.index_matrix import identify
from leakscope.federation.vertical import default_rounds, draw_batches
from leakscope.models.split import Share, VerticalModel, assemble, check_shares, make_shares
from leakscope.network.layers import first_dense
from leakscope.network.recorder import inputs_of


def samples(shape: tuple[int, ...], count: int = 3) -> Tensor:
    return torch.rand((count, *shape), generator=torch.Generator().manual_seed(2))


CUTS: list[tuple[tuple[int, ...], Any, int]] = [
    ((3, 8, 8), "quadrants", 4),
    ((1, 5, 7), "quadrants", 4),
    ((1, 2, 2), "quadrants", 4),
    ((3, 7, 4), "strips", 3),
    ((1, 4, 4), "strips", 1),
    ((2, 11), "strips", 4),
    ((16,), "strips", 5),
    ((3,), "strips", 3),
    ((9,), {"bank": ["0-3", 8], "shop": "4-6", "clinic": 7}, 3),
    ((2, 6), {"left": [5, 0], "right": ["1-4"]}, 2),
    ((3, 4, 6), {"edge": [0, 5], "middle": range(1, 5)}, 2),
]


@pytest.mark.parametrize("shape, slices, workers", CUTS, ids=str)
def test_parts_hold_every_feature_once_and_make_the_whole_again(shape, slices, workers) -> None:
    shares = make_shares(shape, slices, workers)
    assert len(shares) == workers
    assert len({share.name for share in shares}) == workers
    x = samples(shape)
    parts = [share.take(x) for share in shares]
    assert [part.shape[1:] for part in parts] == [share.shape for share in shares]
    assert torch.equal(torch.cat([part.flatten() for part in parts]).sort().values, x.flatten().sort().values)
    assert torch.equal(assemble(shares, parts, shape), x)


def test_quadrants_are_blocks_of_the_picture_also_where_a_side_is_odd() -> None:
    x = samples((3, 5, 7))
    found = {share.name: share.take(x) for share in make_shares((3, 5, 7))}
    assert torch.equal(found["top left"], x[:, :, :3, :4])
    assert torch.equal(found["top right"], x[:, :, :3, 4:])
    assert torch.equal(found["bottom left"], x[:, :, 3:, :4])
    assert torch.equal(found["bottom right"], x[:, :, 3:, 4:])


def test_strips_are_rows_of_a_picture_and_stretches_of_a_signal() -> None:
    x, signal = samples((3, 7, 4)), samples((2, 11))
    assert [share.shape[1] for share in make_shares((3, 7, 4), "strips", 3)] == [3, 2, 2]
    assert torch.equal(make_shares((3, 7, 4), "strips", 3)[1].take(x), x[:, :, 3:5])
    assert torch.equal(make_shares((2, 11), "strips", 4)[-1].take(signal), signal[:, :, 9:])


def test_named_groups_keep_their_names_and_their_order() -> None:
    x = samples((9,))
    bank, shop = make_shares((9,), {"bank": [8, "0-3"], "shop": ["4-7"]})
    assert (bank.name, shop.name) == ("bank", "shop")
    assert torch.equal(bank.take(x), x[:, [8, 0, 1, 2, 3]])
    picture = samples((3, 4, 6))
    edge, _ = make_shares((3, 4, 6), {"edge": [5, 0], "middle": "1-4"})
    assert torch.equal(edge.take(picture), picture[..., [5, 0]])


@pytest.mark.parametrize(
    "shape, slices, workers, words",
    [
        ((16,), "quadrants", 4, r"quadrants need images .* at least 2x2, got \(16,\).*strips"),
        ((3, 1, 8), "quadrants", 4, "at least 2x2"),
        ((3, 8, 8), "quadrants", 2, "expected 4 for quadrants, got 2; use 'strips'"),
        ((8,), "strips", 9, "expected 1 to 8 strips of inputs .* got 9"),
        ((3, 8, 8), "strips", 0, "got 0"),
        ((8,), "strips", True, "got True"),
        ((8,), "halves", 2, "expected 'quadrants', 'strips' or a mapping .* got 'halves'"),
        ((4,), {}, 4, "at least one worker, got none"),
        ((4,), {"a": "0-2", "b": "2-3"}, 2, r"exactly one worker; not so: 2 \(2 times\)"),
        ((4,), {"a": "0-1", "b": 3}, 2, r"not so: 2 \(0 times\)"),
        ((40,), {"a": 0}, 1, r"8 \(0 times\) and 31 more"),
        ((4,), {"a": [0, 0], "b": "1-3"}, 2, r"0 \(2 times\)"),
        ((4,), {"a": "0-4"}, 1, r"a: expected some of the features 0 to 3, got '0-4'"),
        ((4,), {"a": "0-3", "b": []}, 2, "b: expected some of the features 0 to 3, got none"),
        ((4,), {"a": "few"}, 1, "a: expected feature numbers or rising ranges such as '3-9', got 'few'"),
        ((4,), {"a": "0-99999999999999"}, 1, "got '0-99999999999999'"),
        ((4,), {"a": "3-0"}, 1, "got '3-0'"),
        ((4,), {"a": "1-"}, 1, "got '1-'"),
        ((4,), {"a": [-1]}, 1, "got -1"),
        ((4,), {"a": None}, 1, "got None"),
    ],
    ids=str,
)
def test_cuts_that_cannot_be_made_say_why(shape, slices, workers, words) -> None:
    with pytest.raises(ValueError, match=words):
        make_shares(shape, slices, workers)


def test_shares_made_by_hand_are_checked() -> None:
    check_shares([Share("all", (1, 0), (2,))], (2,))
    for places, shape in (((0, 1), (3,)), ((0, 5), (2,)), ((-1, 0), (2,))):
        with pytest.raises(ValueError, match="wrong: 2 places do not fit the shape"):
            check_shares([Share("wrong", places, shape)], (2,))


# --- batches ---------------------------------------------------------------------------------------------------------


def drawn(count: int, batch: int, rounds: int, sampling: Any, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [indices.tolist() for indices in draw_batches(count, batch, rounds, sampling, generator)]


def test_uniform_batches_are_different_samples_each_as_often_as_another() -> None:
    batches = drawn(10, 3, 2000, "uniform")
    assert all(batch == sorted(set(batch)) and len(batch) == 3 for batch in batches)
    often = torch.bincount(torch.tensor(batches).flatten(), minlength=10)
    # 2000 draws with probability 0.3: standard deviation 20.5.
    assert int((often - 600).abs().max()) < 100
    pairs = sum({0, 1} <= set(batch) for batch in batches)
    assert abs(pairs - 2000 * 3 * 2 / 90) < 60


def test_epochs_go_through_all_samples_and_drop_what_is_left_over() -> None:
    batches = drawn(10, 3, 12, "epochs")
    for epoch in range(4):
        visited = [i for batch in batches[3 * epoch : 3 * epoch + 3] for i in batch]
        assert len(visited) == len(set(visited)) == 9
    left_out = [set(range(10)) - {i for batch in batches[3 * e : 3 * e + 3] for i in batch} for e in range(4)]
    assert len({next(iter(out)) for out in left_out}) > 1
    assert drawn(6, 6, 3, "epochs") == [list(range(6))] * 3


@pytest.mark.parametrize("sampling", ["uniform", "epochs"])
def test_batches_follow_the_generator_and_nothing_else(sampling) -> None:
    assert drawn(9, 2, 20, sampling, 1) == drawn(9, 2, 20, sampling, 1) != drawn(9, 2, 20, sampling, 2)
    state = torch.random.get_rng_state()
    drawn(9, 2, 20, sampling)
    assert torch.equal(state, torch.random.get_rng_state())
    # A longer run begins with the shorter one.
    generator = torch.Generator().manual_seed(1)
    assert [b.tolist() for b in islice(draw_batches(9, 2, 50, sampling, generator), 5)] == drawn(9, 2, 5, sampling, 1)


@pytest.mark.parametrize("sampling, batch", [("uniform", 8), ("uniform", 15), ("epochs", 4), ("epochs", 9)])
def test_the_default_number_of_rounds_determines_every_sample(sampling, batch) -> None:
    rounds = default_rounds(30, batch, sampling)
    assert rounds >= 30
    found = [identify(drawn(30, batch, rounds, sampling, seed), 30).identifiable for seed in range(10)]
    assert sum(found) >= 9


# --- the model -------------------------------------------------------------------------------------------------------


def dense_worker(inputs: int, outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def two_workers(**changes: Any) -> VerticalModel:
    torch.random.default_generator.manual_seed(0)
    facts: dict[str, Any] = {
        "workers": [dense_worker(4), dense_worker(3, 3)],
        "head": nn.Linear(5, 3),
        "shares": make_shares((7,), {"a": [6, "0-2"], "b": "3-5"}),
        "input_shape": (7,),
    }
    return VerticalModel(**{**facts, **changes})


def test_the_model_is_its_parts_put_together() -> None:
    model, x = two_workers(), samples((7,))
    one, two = model.workers
    assert torch.equal(model(x), model.head(torch.cat([one(x[:, [6, 0, 1, 2]]), two(x[:, 3:6])], dim=1)))
    assert "a: 4; b: 3" in repr(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))


def test_a_model_with_parts_that_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a worker for each of 2 shares, got 1"):
        two_workers(workers=[dense_worker(4)])
    with pytest.raises(ValueError, match=r"every feature must belong to exactly one worker; not so: 7 \(0 times\)"):
        two_workers(input_shape=(8,))


class Backwards(nn.Module):
    """The layer that runs first is defined last, and deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(6, 2)
        self.inner = nn.ModuleDict({"first": nn.Linear(4, 6, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.second(torch.relu(self.inner["first"](2 * x)))
        return answer


def test_the_first_dense_layer_is_the_one_that_runs_first() -> None:
    model = two_workers(workers=[Backwards(), dense_worker(3, 3)]).train()
    state = torch.random.get_rng_state()
    one, two = first_dense(model)
    assert (one.name, one.inputs, one.units, one.bias) == ("workers.0.inner.first", 4, 6, False)
    assert (two.name, two.inputs, two.units, two.bias) == ("workers.1.1", 3, 5, True)
    assert (one.worker, two.worker, one.share.name) == (0, 1, "a")
    assert one.module(model) is model.get_submodule("workers.0.inner.first")
    assert model.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_worker_that_is_one_dense_layer() -> None:
    model = two_workers(workers=[nn.Linear(4, 2), dense_worker(3, 3)])
    assert first_dense(model)[0].name == "workers.0"
    assert first_dense(model)[0].module(model) is model.workers[0]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.out(self.layer(torch.tanh(self.layer(x))))
        return answer


@pytest.mark.parametrize(
    "worker, words",
    [
        (nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 4), nn.Flatten()), "it runs none"),
        (
            nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 1), nn.Flatten()),
            r"once, got one with outputs \(2, 2, 1",
        ),
        (Twice(), "read each sample once, got one used 2 times"),
    ],
)
def test_workers_whose_first_dense_layer_gives_no_row_a_sample_are_refused(worker, words) -> None:
    with pytest.raises(ValueError, match=f"worker 'a': .*{words}"):
        first_dense(two_workers(workers=[worker, dense_worker(3, 3)]))


def test_inputs_of_a_layer_are_what_it_reads() -> None:
    worker = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 2))
    x = samples((1, 6)).requires_grad_(True)
    found = inputs_of(worker[3], worker, x)
    assert torch.equal(found, worker[:3](x))
    assert found.requires_grad
    assert not worker[3]._forward_pre_hooks
    with pytest.raises(ValueError, match="a layer that the model runs"):
        inputs_of(nn.Linear(2, 2), worker, x)
    with pytest.raises(RuntimeError):
        inputs_of(worker[3], worker, x[:, :, :2])
    assert not worker[3]._forward_pre_hooks
