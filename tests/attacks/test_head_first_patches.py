"""One image behind a ViT with learned positions: solved and certified, or refused, and never certified wrongly."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import HeadFirst
from leakscope.attacks.head_first import patches as stage
from leakscope.attacks.head_first.case import Case
from leakscope.attacks.head_first.patches import PATCHES, SolvePatches, find_label, recover_patches
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.defenses import DPSGD, GradientPruning, GradientQuantisation
from leakscope.equations.patch_embedding import SolvedPatches
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import psnr
from leakscope.models import build_model
from leakscope.network.patches import PatchEmbedding, find_patches
from vit_cases import CLASSES, DIM, NETS, SHAPE, Timm, built, image

LABEL = torch.tensor([3])


def recover(observation: Observation) -> tuple[PatchEmbedding, SolvedPatches]:
    place = find_patches(observation.model, observation.input_shape, observation.message.update)
    return place, recover_patches(observation, place)


QUICK = HeadFirst(iterations=2, tries=1, rival=False)


def vit(**options: object) -> nn.Module:
    return build_model("vit", input_shape=SHAPE, num_classes=CLASSES, **{"dim": DIM, "depth": 2, "heads": 2, **options})


def seen(net: nn.Module, x: Tensor | None = None, **facts: object) -> Observation:
    return FedSGD(**facts).observe(net, image() if x is None else x, LABEL)


def certified(result: Reconstruction) -> bool:
    return bool(result.certificates) and all(one.holds for one in result.certificates)


def proposed(observation: Observation) -> tuple[Case, list]:
    case = Case(QUICK, observation, torch.Generator().manual_seed(0))
    return case, list(SolvePatches().propose(case)) if SolvePatches().applies(case) else []


@pytest.mark.parametrize("name", list(NETS))
def test_a_users_own_layout_is_found_and_solved(name: str) -> None:
    found = QUICK(seen(built(name)), seed=0)
    assert certified(found)
    assert found.info["method"].startswith(PATCHES)
    assert found.labels.tolist() == [3]
    assert float(psnr(image(), found.inputs)) > 80


@pytest.mark.parametrize("options", [{}, {"pool": "mean"}, {"patch": 3}, {"patch": 16}], ids=str)
def test_the_reference_model_is_solved(options: dict) -> None:
    """Patches of three do not divide the image, and are padded with zeros; one of sixteen is the whole image."""
    found = QUICK(seen(vit(**{"dim": 64, **options})), seed=0)
    assert certified(found)
    assert float(psnr(image(), found.inputs)) > 80


def test_norms_hide_one_direction_so_that_tokens_need_one_unit_more() -> None:
    """What comes back through a norm adds up to zero over units: the signals have no more than d - 1 directions."""
    with pytest.raises(NotApplicable, match="16 units tell 15 directions of 16 patches"):
        recover(seen(vit(dim=16)))
    assert recover(seen(vit(dim=17, heads=1)))[1].error < 1e-3


class Square(nn.Module):
    """As many units as tokens, and no norm: any gradient has patches that fit it exactly."""

    def __init__(self, units: int = 16) -> None:
        super().__init__()
        self.stem, self.place = nn.Conv2d(3, units, 4, 4), nn.Parameter(torch.zeros(16, units))
        self.inner, self.head = nn.Linear(16 * units, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tanh(self.stem(x).flatten(2).transpose(1, 2) + self.place)
        return self.head(torch.tanh(self.inner(tokens.flatten(1))))


def square() -> Observation:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return seen(Square())


def test_a_square_system_is_solved_and_certified_by_the_whole_update() -> None:
    (found,) = proposed(square())[1]
    assert float(psnr(image(), found.inputs)) > 60
    assert found.settles


@pytest.mark.parametrize("name", ["stem.weight", "place", "inner.weight"])
def test_a_square_system_that_fits_another_update_is_not_certified(name: str) -> None:
    observation = square()
    update = dict(observation.message.update)
    update[name] = update[name].flip(0)
    for found in proposed(observation.with_update(update))[1]:
        assert not found.proved
        assert not found.settles


def test_an_image_of_bytes_is_exact_to_the_bit() -> None:
    x = (255 * image()).round() / 255
    found = QUICK(seen(built("torchvision"), x), seed=0)
    assert found.info["method"] == f"{PATCHES}, whole bytes"
    assert torch.equal(found.inputs, x)
    assert certified(found)


def test_one_local_step_is_solved_whatever_its_rate() -> None:
    observation = FedAvg(epochs=1, batch_size=1, lr=0.1).observe(built("torchvision").double(), image().double(), LABEL)
    place, solved = recover(observation)
    assert solved.error < 1e-4
    assert float(psnr(image().double(), place.image(solved.patches).reshape(1, *SHAPE))) > 80


def zero_head(net: nn.Module) -> nn.Module:
    nn.init.zeros_(net.get_parameter("head.weight"))
    return net


def frozen(name: str) -> Callable[[nn.Module], nn.Module]:
    def change(net: nn.Module) -> nn.Module:
        net.get_parameter(name).requires_grad_(False)
        return net

    return change


class Normed(Timm):
    """A norm between the embedding and the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.patch_embed.proj(x).flatten(2).transpose(1, 2))
        start = torch.cat([self.cls_token, self.dist_token], 1).expand(len(x), -1, -1)
        return self.head(self.norm(self.blocks(torch.cat([start, x], 1) + self.pos_embed))[:, 0])


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fixed positions": (lambda: vit(learned_positions=False), "no learned position embedding"),
    "frozen positions": (lambda: frozen("position")(vit()), "no learned position embedding"),
    "frozen embedding": (lambda: frozen("embedding.weight")(vit()), "says nothing of the first layer"),
    "zero head": (lambda: zero_head(vit()), "nothing comes back"),
    "more tokens than units": (lambda: vit(patch=2), "directions of 64 patches"),
    "norm in between": (Normed, "no parameter of the update is added"),
    "no transformer": (lambda: build_model("convnet", input_shape=SHAPE, num_classes=CLASSES), "no learned position"),
    "norm first": (
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Flatten(), nn.Linear(768, CLASSES)),
        "is no patch embedding",
    ),
    "pooling first": (
        lambda: nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(32, CLASSES)),
        "not the pixels",
    ),
    "stride beyond kernel": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 2, 4), nn.Flatten(), nn.Linear(128, CLASSES)),
        "does not read every pixel",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_at_once_with_the_reason(name: str) -> None:
    make, words = REFUSED[name]
    observation = seen(make())
    started = time.process_time()
    with pytest.raises(NotApplicable, match=words):
        recover(observation)
    assert time.process_time() - started < 0.5
    case, found = proposed(observation)
    assert not found
    assert not case.notes or words in case.notes[-1]


def test_clipping_hides_nothing_of_the_image() -> None:
    """The length of the update is not that of the image's gradient: its direction speaks for the image."""
    clipped = FedSGD().observe(vit(), image(), LABEL, DPSGD(clip=0.01, noise_multiplier=0.0))
    _, (found,) = proposed(clipped)
    assert found.settles
    assert not found.certificates
    assert float(psnr(image(), found.inputs)) > 60


def test_several_images_are_refused() -> None:
    observation = FedSGD().observe(vit(), torch.cat([image(0), image(1)]), torch.tensor([1, 2]))
    assert not SolvePatches().applies(proposed(observation)[0])


@pytest.mark.parametrize("defence", [GradientPruning(fraction=0.5), GradientQuantisation(bits=8)], ids=repr)
def test_pruned_and_rounded_updates_are_never_certified(defence: object) -> None:
    for known in (True, False):
        observation = FedSGD().observe(vit(), image(), LABEL, defense=defence)
        observation = observation if known else observation.without_channel()
        assert not any(found.proved for found in proposed(observation)[1])


@pytest.mark.parametrize("name", ["torchvision", "timm"])
@pytest.mark.parametrize("level", [1e-6, 1e-5, 1e-4, 1e-2, 1.0])
def test_noise_is_never_certified_unless_the_image_is_right(level: float, name: str) -> None:
    observation, draws = seen(built(name)), torch.Generator().manual_seed(0)
    noisy = {
        key: value + level * value.square().mean().sqrt() * torch.randn(value.shape, generator=draws)
        for key, value in observation.message.update.items()
    }
    for found in proposed(observation.with_update(noisy))[1]:
        assert not found.proved or float(psnr(image(), found.inputs)) > 80
        assert level < 1e-2


def test_noise_of_the_size_of_the_update_proposes_nothing() -> None:
    observation, draws = seen(vit()), torch.Generator().manual_seed(0)
    noise = {
        key: value.square().mean().sqrt() * torch.randn(value.shape, generator=draws)
        for key, value in observation.message.update.items()
    }
    assert not proposed(observation.with_update(noise))[1]


def test_the_gradient_of_another_image_in_one_tensor_is_not_certified() -> None:
    """Each tensor by itself is a right one; only the whole update shows that they do not belong together."""
    net = built("torchvision")
    one, two = (seen(net, image(seed)).message.update for seed in (0, 1))
    for name in ("conv_proj.weight", "encoder.pos_embedding", "heads.weight", "encoder.layers.0.linear1.weight"):
        mixed = seen(net).with_update({**one, name: two[name]})
        assert not any(found.proved for found in proposed(mixed)[1])


def test_the_sum_of_two_images_told_as_one_is_not_certified() -> None:
    net = built("torchvision")
    two = FedSGD().observe(net, torch.cat([image(0), image(1)]), torch.tensor([3, 3]))
    told = seen(net).with_update(dict(two.message.update))
    assert not any(found.proved for found in proposed(told)[1])


@pytest.mark.parametrize(("limit", "proved"), [(1.0, True), (1e-12, False)])
def test_the_expected_error_decides_on_the_certificate(
    monkeypatch: pytest.MonkeyPatch, limit: float, proved: bool
) -> None:
    monkeypatch.setattr(stage, "CLEAR", limit)
    (found,) = proposed(seen(built("torchvision")))[1]
    assert found.proved == proved
    assert found.settles


@pytest.mark.parametrize(("limit", "count"), [(1.0, 1), (1e-12, 0)])
def test_a_start_that_is_too_far_away_is_not_proposed(
    monkeypatch: pytest.MonkeyPatch, limit: float, count: int
) -> None:
    monkeypatch.setattr(stage, "NEAR", limit)
    assert len(proposed(seen(built("torchvision")))[1]) == count


def test_refining_makes_a_weak_image_clear() -> None:
    """Noise of 1e-6 on the embedding alone; the rest of the update is exact to rounding."""
    observation, draws = seen(vit()), torch.Generator().manual_seed(0)
    update = dict(observation.message.update)
    value = update["embedding.weight"]
    size = 3e-7 * value.square().mean().sqrt()
    update["embedding.weight"] = value + size * torch.randn(value.shape, generator=draws)
    noisy = observation.with_update(update)
    place, solved = recover(noisy)
    before = place.image(solved.patches).reshape(1, *SHAPE)
    after, expected = stage.refine_patches(noisy, place, solved, before, LABEL)
    assert float(psnr(image(), after)) > float(psnr(image(), before)) + 1
    error = float((image() - after).square().mean().sqrt())
    assert 0.5 * expected < error < 2 * expected


def test_known_labels_are_taken_and_others_found() -> None:
    observation = seen(built("columns"))
    assert find_label(observation, image()).tolist() == [3]
    known = dataclasses.replace(observation.knowledge, labels="yes")
    assert find_label(observation.with_facts(knowledge=known, labels=torch.tensor([1])), image()).tolist() == [1]


def test_positions_may_be_columns_and_a_table() -> None:
    net = built("map")
    found = find_patches(net, SHAPE, dict(net.named_parameters()))
    assert (found.layer, found.position, found.units_first) == ("stem", "place", True)
    net = built("columns")
    found = find_patches(net, SHAPE, dict(net.named_parameters()))
    assert (found.position, found.rows.tolist()) == ("where.weight", list(range(15, -1, -1)))
    assert found.factor == pytest.approx(3.0, rel=1e-5)
    net = built("timm")
    found = find_patches(net, SHAPE, dict(net.named_parameters()))
    assert found.rows.tolist() == list(range(2, 18))
    x = image()[0].double()
    patches = found.patches(x.flatten())
    expected = ((x - net.mean.double()) / net.std.double())[:, :4, :4].flatten()
    assert torch.allclose(patches[0], expected, atol=1e-5)
    assert torch.allclose(found.image(patches), x.flatten(), atol=1e-6)
