"""Captured updates as five systems send them: each attacked in one line, the wrong sign noticed in each."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leakscope.cli import main
from leakscope.contracts.observation import Observation
from leakscope.models import build_model

SHAPE, CLASSES = (3, 8, 8), 10
MODEL = ["--model", "mlp", "--input", "3x8x8", "--classes", "10", "--range", "0,1"]
#: Exact on a dense first layer and quick, so that what is tested is the way from the file to the page.
QUICK = ["--attack", "linear-layer"]


def leakscope(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in this process, where the libraries are loaded already."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["leakscope", *words])
        patch.setenv("COLUMNS", "400")
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def private(count: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.rand((count, *SHAPE), generator=draws), torch.tensor([3, 5, 7, 8][:count])


def stepped(net: nn.Module, count: int, lr: float = 0.1) -> nn.Module:
    client, (x, y) = copy.deepcopy(net).train(), private(count)
    rule = torch.optim.SGD(client.parameters(), lr=lr)
    nn.functional.cross_entropy(client(x), y).backward()
    rule.step()
    return client


def flower(folder: Path) -> tuple[str, str, list[str]]:
    """Lists of ndarrays in the order of the state dict."""
    net = build_model("mlp", input_shape=SHAPE, num_classes=CLASSES)
    for name, model in (("before", net), ("after", stepped(net, 1))):
        np.savez(folder / f"{name}.npz", *[value.cpu().numpy() for value in model.state_dict().values()])
    return "before.npz", "after.npz", [*MODEL, "--examples", "1", *QUICK]


def fedml(folder: Path) -> tuple[str, str, list[str]]:
    """Pairs of a number of samples and an ordered state dict."""
    net = build_model("mlp", input_shape=SHAPE, num_classes=CLASSES)
    for name, model in (("before", net), ("after", stepped(net, 1))):
        torch.save((1, OrderedDict(model.state_dict())), folder / f"{name}.pt")
    return "before.pt", "after.pt", [*MODEL, *QUICK]


def plain_torch(folder: Path) -> tuple[str, str, list[str]]:
    """State dicts by torch.save."""
    net = build_model("mlp", input_shape=SHAPE, num_classes=CLASSES)
    for name, model in (("before", net), ("after", stepped(net, 1))):
        torch.save(model.state_dict(), folder / f"{name}.pth")
    return "before.pth", "after.pth", [*MODEL, "--examples", "1", *QUICK]


def opacus(folder: Path) -> tuple[str, str, list[str]]:
    """A DP-SGD step: names begin with _module., gradients are clipped, noise is added."""
    engine = pytest.importorskip("opacus")
    net, (x, y) = build_model("mlp", input_shape=SHAPE, num_classes=CLASSES), private(1)
    client = copy.deepcopy(net).train()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, rule, _ = engine.PrivacyEngine().make_private(
            module=client,
            optimizer=torch.optim.SGD(client.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=0.005,
            max_grad_norm=1.0,
            poisson_sampling=False,
            noise_generator=torch.Generator().manual_seed(0),
        )
        nn.functional.cross_entropy(wrapped(x), y).backward()
        rule.step()
    save_file({f"_module.{name}": value for name, value in net.state_dict().items()}, folder / "before.safetensors")
    assert all(name.startswith("_module.") for name in wrapped.state_dict())
    torch.save(wrapped.state_dict(), folder / "after.pt")
    return "before.safetensors", "after.pt", [*MODEL, "--examples", "1", *QUICK]


def batchnorm(folder: Path) -> tuple[str, str, list[str]]:
    """A network with BatchNorm, whose clients send its buffers."""
    net, x = build_model("captured_nets:batchnorm_net"), private(2)[0]
    client = copy.deepcopy(net).train()
    rule = torch.optim.SGD(client.parameters(), lr=0.01)
    nn.functional.cross_entropy(client(x), torch.tensor([1, 4])).backward()
    rule.step()
    for name, model in (("before", net), ("after", client)):
        torch.save(model.state_dict(), folder / f"{name}.pt")
    model = ["--model", "captured_nets:batchnorm_net", *MODEL[2:], "--examples", "2"]
    return "before.pt", "after.pt", [*model, "--attack", "inverting-gradients:iterations=2,restarts=1"]


SYSTEMS = [flower, fedml, plain_torch, opacus, batchnorm]


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.__name__)
def test_five_captured_updates_each_attacked_in_one_line(system, tmp_path: Path) -> None:
    before, after, words = system(tmp_path)
    done = leakscope("attack", "--before", before, "--after", after, *words, "--out", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Sign: right" in done.stdout
    told = json.loads((tmp_path / "found" / "reconstruction.json").read_text())
    assert told["made"]["sign"] == "right"
    assert told["made"]["sources"] == [before, after]
    assert told["measures"] is None
    page = (tmp_path / "found" / "report.html").read_text()
    assert "no likeness is claimed" in page
    assert "PSNR" not in page
    assert "PSNR" not in done.stdout
    found = load_file(tmp_path / "found" / "reconstruction.safetensors")["inputs"]
    if system in (flower, fedml, plain_torch):
        assert float((found - private(1)[0]).abs().max()) < 1e-3
        # The images are noise, which no page without a certificate calls recovered.
        assert told["outcome"] == ("looks recovered" if told["certified"] else "cannot say")
    if system is batchnorm:
        assert "those of the private batch are known" in " ".join(told["made"]["notes"])
        assert "Statistics of the batch</dt><dd>known" in page


@pytest.mark.parametrize("command", ["import", "attack"])
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.__name__)
def test_the_wrong_sign_is_noticed_in_each_and_nothing_is_written(system, command: str, tmp_path: Path) -> None:
    before, after, words = system(tmp_path)
    words = words[: words.index("--attack")]
    files = sorted(path.name for path in tmp_path.iterdir())
    done = leakscope(command, "--before", after, "--after", before, *words, "--out", "found", cwd=tmp_path)
    assert done.returncode == 4, done.stdout
    assert "points the wrong way" in done.stderr
    assert "swap before and after" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_import_then_attack_measures_with_the_truth_and_hides_it_unless_asked(tmp_path: Path) -> None:
    before, after, _ = plain_torch(tmp_path)
    words = [*MODEL, "--examples", "1", "--out", "seen.safetensors"]
    done = leakscope("import", "--before", before, "--after", after, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Update of 1 example: weights before minus weights after;")
    x, y = private(1)
    np.savez(tmp_path / "truth.npz", x=x.numpy(), y=y.numpy())
    attack = ["attack", "seen.safetensors", *QUICK, "--truth", "truth.npz", "--out"]
    assert leakscope(*attack, "plain", cwd=tmp_path).returncode == 0
    shown = leakscope(*attack, "shown", "--pictures", cwd=tmp_path)
    assert re.search(r"PSNR against the truth, dB: \d+", shown.stdout)
    plain_page, page = ((tmp_path / name / "report.html").read_text() for name in ("plain", "shown"))
    assert "PSNR, dB" in plain_page
    assert "Originals are left out" in plain_page
    assert "original 0" not in plain_page
    assert "original 0" in page
    told = json.loads((tmp_path / "plain" / "reconstruction.json").read_text())
    assert told["measures"][0]["psnr"] > 50
    assert told["measures"][0]["label_correct"] is None  # this attack names no label
    assert not {"label", "label_guess"} & told["measures"][0].keys()


def test_labels_of_a_captured_update_are_told_only_if_asked_for(tmp_path: Path) -> None:
    before, after, words = plain_torch(tmp_path)
    words = [*words[: words.index("--attack")], "--attack", "inverting-gradients:iterations=2,restarts=1"]
    attack = ["attack", "--before", before, "--after", after, *words, "--out"]
    assert leakscope(*attack, "plain", cwd=tmp_path).returncode == 0
    assert leakscope(*attack, "shown", "--show-names", cwd=tmp_path).returncode == 0
    plain, shown = ((tmp_path / name / "report.html").read_text() for name in ("plain", "shown"))
    told = [json.loads((tmp_path / name / "reconstruction.json").read_text())["labels"] for name in ("plain", "shown")]
    assert told[0] is None
    assert f"<figcaption>label {told[1][0]}," in shown
    assert "<figcaption>label" not in plain
    assert "--show-names" in plain


def test_an_update_file_with_its_sign(tmp_path: Path) -> None:
    net, (x, y) = build_model("mlp", input_shape=SHAPE, num_classes=CLASSES), private(2)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    gradient = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    named = {name: -value for (name, _), value in zip(net.named_parameters(), gradient, strict=True)}
    np.savez(tmp_path / "update.npz", **{name: value.numpy() for name, value in named.items()})
    words = ["--before", "weights.pt", "--update", "update.npz", *MODEL, "--examples", "2", "--kind", "gradient"]
    done = leakscope("import", *words, "--out", "x", cwd=tmp_path)
    assert done.returncode == 4
    assert "negate it" in done.stderr
    assert leakscope("import", *words, "--sign", "flip", "--out", "x", cwd=tmp_path).returncode == 0
    seen = Observation.load(tmp_path / "x", net)
    assert all(torch.equal(seen.message.update[name], -value) for name, value in named.items())
    kept = leakscope("import", *words, "--sign", "trust", "--out", "y", cwd=tmp_path)
    assert "Sign: wrong" in kept.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--after", "after.pth"], "--before: expected the weights the client received"),
        (["--before", "before.pth"], "got neither"),
        (["--before", "before.pth", "--update", "after.pth"], "expected --kind"),
        (["--before", "before.pth", "--after", "after.pth", "--kind", "gradient"], "with --update only"),
        (["--before", "before.pth", "--after", "after.pth", "--mean", "0.5"], "both or neither"),
        (["--before", "before.pth", "--after", "after.pth", "--labels", "a"], "--labels"),
        (["--before", "before.pth", "--after", "nowhere.pt"], "expected a file"),
        (["--before", "before.pth", "--after", "notes.txt"], "expected a file that ends in"),
        (["--before", "before.pth", "--after", "evil.pt"], "refused"),
        (["--before", "before.pth", "--after", "after.pth", "--out", "after.pth.safetensors"], None),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(words: list[str], expected: str | None, tmp_path: Path) -> None:
    plain_torch(tmp_path)
    torch.save(nn.Linear(2, 2), tmp_path / "evil.pt")
    (tmp_path / "notes.txt").write_text("nothing")
    base = ["--model", "mlp", "--input", "3x8x8", "--classes", "10", "--examples", "1"]
    done = leakscope("import", *words, *base, *([] if "--out" in words else ["--out", "made"]), cwd=tmp_path)
    if expected is None:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 4
    assert expected in done.stderr
    assert not list(tmp_path.glob("made*"))


def test_hostile_names_are_escaped_in_the_page(tmp_path: Path) -> None:
    before, after, words = plain_torch(tmp_path)
    evil = "<script>alert(1)<script>.pth"
    (tmp_path / after).rename(tmp_path / evil)
    done = leakscope("attack", "--before", before, "--after", evil, *words, "--no-control", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "leakscope-attack" / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page


def test_an_update_that_says_nothing_is_no_better_than_its_baseline(tmp_path: Path) -> None:
    """Noise in place of the update: the page must not sell what the attack drew of it."""
    net, draws = build_model("mlp", input_shape=SHAPE, num_classes=CLASSES), torch.Generator().manual_seed(0)
    noise = {name: torch.randn(value.shape, generator=draws) for name, value in net.named_parameters()}
    torch.save(net.state_dict(), tmp_path / "before.pt")
    save_file(noise, tmp_path / "noise.safetensors")
    words = ["--before", "before.pt", "--update", "noise.safetensors", "--kind", "gradient", *MODEL, "--examples", "1"]
    attack = ["--attack", "inverting-gradients:iterations=20,restarts=1"]
    done = leakscope("attack", *words, *attack, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Sign: cannot be told" in done.stdout
    assert "Probably not recovered" in done.stdout
    page = (tmp_path / "leakscope-attack" / "report.html").read_text()
    assert '<h1 id="verdict">Probably not recovered</h1>' in page
    assert "Recovered</h2>" not in page


def test_options_of_a_capture_do_not_go_with_an_observation(tmp_path: Path) -> None:
    done = leakscope("attack", "seen.safetensors", "--examples", "1", "--after", "a.pt", cwd=tmp_path)
    assert done.returncode == 4
    assert "--after, --examples: expected without an observation" in done.stderr
    done = leakscope("attack", "seen.safetensors", "--pictures", cwd=tmp_path)
    assert "with --truth only" in done.stderr
