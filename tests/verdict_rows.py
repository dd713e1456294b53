"""Rows for the tests of the verdict: attempts and controls with chosen facts."""

from __future__ import annotations

from typing import Any

from leakscope.results import Row

SGD, NOISE = "FedSGD()", "GradientNoise(sigma=0.1)"


def make(
    position: int,
    psnr: float | None = 10.0,
    *,
    index: int = 0,
    attack: str = "A()",
    defense: str = "none",
    control: str | None = None,
    status: str = "done",
    seed: int = 0,
    flags: tuple[str, ...] = (),
    error: str = "RuntimeError: no",
    adaptive: bool = False,
    knows: bool = False,
    chose_model: bool = False,
    chooses: bool = False,
    labels: str = "no",
    diagnosis: str | None = None,
    given_psnr: float | None = None,
    residuals: tuple[float | None, float | None] = (None, None),
    **numbers: Any,
) -> Row:
    job = {
        "protocol": SGD,
        "defense": defense,
        "control": control,
        "control_kind": {"planted": "positive", "undefended": "positive", "prior-mean": "held-out"}.get(control or ""),
        "attack": attack,
        "attack_name": attack.lower().strip("()"),
        "seed": seed,
        "batch": index,
        "indices": [index],
        "knowledge": {"labels": labels, "defense": knows, "choose_structure": chooses},
    }
    example = {"index": index, "label": 1, "psnr": psnr, "ssim": 0.5, "identified": False, **numbers}
    given = [] if given_psnr is None else [{**example, "psnr": given_psnr}]
    why = None if diagnosis is None else {"outcome": diagnosis, "reason": "so it is"}
    facts = {"flags": list(flags), "adaptive": adaptive, "given_labels": given, "diagnosis": why}
    facts |= {"chose_model": chose_model, "unexplained": residuals[0], "unexplained_by_truth": residuals[1]}
    result = {"examples": [example], **facts} if status == "done" else None
    told = None if status == "done" else error
    return Row.read(f"key{position}", position, status, job, result, told, 1.0, "now")  # type: ignore[arg-type]


def control(position: int, psnr: float | None = 8.0, **changes: Any) -> Row:
    return make(position, psnr, control="noise", **changes)


def planted(position: int, psnr: float = 40.0, **changes: Any) -> Row:
    """A positive control that succeeds, without which nothing passes."""
    return make(position, psnr, control="planted", **changes)


def held_out(position: int, psnr: float, **changes: Any) -> Row:
    return make(position, psnr, attack="none", control="prior-mean", **changes)
