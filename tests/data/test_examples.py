"""The Examples class, tensors in memory, the embedded tiles and the table of names."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch

from leakscope.contracts.inputs import ValueRange
from leakscope.data import DATA, Examples, from_tensors, load_data

REPOSITORY = Path(__file__).parents[2]


def make(count: int = 6, **changes: object) -> Examples:
    generator = torch.Generator().manual_seed(1)
    facts: dict = {
        "x": torch.rand(count, 2, 4, 4, generator=generator),
        "y": torch.arange(count) % 3,
        "num_classes": 3,
        "value_range": ValueRange(),
        "name": "made",
        "group": torch.arange(count) * 10,
    }
    return Examples(**(facts | changes))


def test_subset_keeps_rows_together() -> None:
    examples = make()
    part = examples.subset([4, 1])
    assert torch.equal(part.x, examples.x[[4, 1]])
    assert part.y.tolist() == [1, 1]
    assert part.group is not None
    assert part.group.tolist() == [40, 10]
    assert part.num_classes == 3


@pytest.mark.parametrize("indices", [[], [6], [-1], [0.5], [[0]], [True]])
def test_subset_refuses(indices: list) -> None:
    with pytest.raises(ValueError, match="subset: expected"):
        make().subset(indices)


def test_batches_are_disjoint_and_full() -> None:
    examples = make()
    assert torch.equal(torch.cat([examples.batch(i, 2).x for i in range(3)]), examples.x)
    for number, size in ((3, 2), (0, 7), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="batch: made has 6 examples"):
            examples.batch(number, size)


def test_normalised_and_back() -> None:
    examples = make()
    normal = examples.normalised((0.5, 0.25), (0.1, 0.2))
    assert torch.allclose(normal.x[:, 1], (examples.x[:, 1] - 0.25) / 0.2, atol=1e-5)
    assert torch.allclose(normal.value_range.to_unit(normal.x), examples.x, atol=1e-6)
    # Normalising again starts from unit space, not from what was normalised before.
    assert torch.allclose(normal.normalised(0.0, 1.0).x, examples.x, atol=1e-6)
    with pytest.raises(ValueError, match="channels"):
        examples.normalised((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="positive std"):
        examples.normalised(0.5, 0.0)


def test_fingerprint_follows_the_content() -> None:
    examples = make()
    assert examples.fingerprint() == make(name="other").fingerprint()
    changed = examples.x.clone()
    changed[3, 1, 2, 2] += 1e-6
    others = [
        make(x=changed),
        make(y=(torch.arange(6) + 1) % 3),
        make(num_classes=4),
        make(group=None),
        make(value_range=ValueRange((0.0,), (2.0,))),
    ]
    prints = {examples.fingerprint(), *(o.fingerprint() for o in others)}
    assert len(prints) == 6
    assert all(len(p) == 64 for p in prints)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"x": torch.zeros(6, 2, dtype=torch.float64)}, "float32"),
        ({"x": torch.zeros(0, 2), "y": torch.zeros(0).long(), "group": None}, "N at least 1"),
        ({"x": torch.full((6, 2), float("nan"))}, "NaN"),
        ({"y": torch.zeros(5).long()}, "6 int64 labels"),
        ({"y": torch.full((6,), 3)}, "0 to 2"),
        ({"y": torch.full((6,), -1)}, "0 to 2"),
        ({"class_names": ("a",)}, "class_names"),
        ({"group": torch.zeros(2)}, "group"),
        ({"num_classes": 0}, "num_classes"),
        ({"value_range": ValueRange((0.0,) * 3, (1.0,) * 3)}, "3 channels"),
    ],
)
def test_invalid_examples(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_from_tensors() -> None:
    x = torch.rand(3, 1, 5, dtype=torch.float64)
    examples = from_tensors(x, torch.tensor([0, 4, 1]))
    assert (examples.num_classes, examples.private, examples.x.dtype) == (5, True, torch.float32)
    assert examples.value_range == ValueRange()
    x.zero_()
    assert examples.x.max() > 0  # a copy
    wide = from_tensors(torch.tensor([[-2.0, 3.0]]), torch.tensor([0], dtype=torch.int32), num_classes=2)
    assert wide.value_range == ValueRange((-2.0,), (3.0,))
    assert from_tensors(torch.full((1, 2), 7.0), torch.tensor([0])).value_range == ValueRange((6.5,), (7.5,))
    with pytest.raises(ValueError, match="two tensors"):
        from_tensors([[0.0]], [0])  # type: ignore[arg-type]
    numbers = from_tensors(torch.zeros(2, 2), torch.tensor([[0.5, -3.0], [1.0, 2.0]], dtype=torch.float64))
    assert (numbers.y.dtype, numbers.num_classes) == (torch.float32, 2)
    with pytest.raises(ValueError, match="y: expected finite values"):
        from_tensors(torch.zeros(1, 2), torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match="real inputs and targets"):
        from_tensors(torch.zeros(1, 2), torch.zeros(1, dtype=torch.complex64))


def test_tiles() -> None:
    tiles = load_data("tiles")
    assert tiles.x.shape == (144, 3, 32, 32)
    assert tiles.num_classes == 9
    assert tiles.class_names is not None
    assert tiles.class_names[0] == "astronaut"
    assert tiles.y[:9].tolist() == list(range(9))
    assert torch.bincount(tiles.y).tolist() == [16] * 9
    assert tiles.x.min() >= 0
    assert tiles.x.max() <= 1
    assert not tiles.private
    # Real content: no tile is nearly constant, no two are equal.
    assert tiles.x.mean(1).flatten(1).std(1).min() > 0.03
    assert len({t.numpy().tobytes() for t in tiles.x}) == 144
    assert torch.equal(load_data("tiles", limit=10).x, tiles.x[:10])


def test_tiles_are_small_and_credited() -> None:
    folder = REPOSITORY / "src" / "leakscope" / "data"
    assert (folder / "tiles.npz").stat().st_size < 1_000_000
    credits = (folder / "CREDITS.md").read_text(encoding="utf-8")
    for name in load_data("tiles").class_names or ():
        assert f"| {name} |" in credits
    assert credits.count("CC BY 2.0") == 2
    for author in ("danielbuechele", "vultilion"):
        assert author in credits
        assert author in load_data("tiles").credits


def test_the_tool_makes_the_tiles_again(tmp_path: Path) -> None:
    pytest.importorskip("skimage", reason="scikit-image holds the photos")
    pytest.importorskip("sklearn", reason="scikit-learn holds the photos")
    spec = importlib.util.spec_from_file_location("make_tiles", REPOSITORY / "tools" / "make_tiles.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    digests = set()
    for number in range(2):
        tool.main(tmp_path / f"{number}.npz")
        digests.add(hashlib.sha256((tmp_path / f"{number}.npz").read_bytes()).hexdigest())
    assert len(digests) == 1
    # Compared by content: compression may differ between versions of zlib.
    made = load_data("npz", tmp_path / "0.npz")
    assert torch.equal(made.x, load_data("tiles").x)
    assert torch.equal(made.y, load_data("tiles").y)


def test_table() -> None:
    for name in ("tiles", "cifar10", "cifar100", "mnist", "emnist", "npz", "folder"):
        assert DATA[name].name == name
        assert DATA[name].summary
        assert DATA[name].needs_path == (name != "tiles")
        assert "limit" in DATA[name].options()
    with pytest.raises(TypeError):
        DATA["x"] = DATA["tiles"]  # type: ignore[index]


def test_names_and_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"unknown data 'cifr10': expected one of tiles.*did you mean cifar10\?"):
        load_data("cifr10")
    with pytest.raises(ValueError, match=r"no option split; it takes limit"):
        load_data("tiles", split="test")
    with pytest.raises(ValueError, match="takes no path"):
        load_data("tiles", "somewhere")
    with pytest.raises(ValueError, match="data: expected a name"):
        load_data(3)  # type: ignore[arg-type]
    for limit in (0, -1, True, 2.5, "3"):
        with pytest.raises(ValueError, match="limit"):
            load_data("tiles", limit=limit)


@pytest.mark.parametrize("name", [n for n, e in DATA.items() if e.needs_path])
def test_without_path_or_environment(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LEAKSCOPE_DATA", raising=False)
    with pytest.raises(ValueError, match=r"path="):
        load_data(name)
    monkeypatch.setenv("LEAKSCOPE_DATA", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"path=|not a folder"):
        load_data(name)
    with pytest.raises(ValueError, match="no such"):
        load_data(name, tmp_path / "absent")
    with pytest.raises(ValueError, match=r"found none|no subfolders"):
        load_data(name, tmp_path)


def test_a_box_narrower_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="expected every input within"):
        from_tensors(torch.tensor([[0.0, 3.0]]), torch.tensor([1]), value_range=ValueRange())


def test_a_range_read_off_the_data_is_marked_as_such() -> None:
    assert not from_tensors(torch.tensor([[37.2, 81.0]]), torch.tensor([0])).range_known
    assert from_tensors(torch.tensor([[0.2, 0.8]]), torch.tensor([0])).range_known
    told = from_tensors(torch.tensor([[37.2, 81.0]]), torch.tensor([0]), value_range=ValueRange((0.0,), (100.0,)))
    assert told.range_known
