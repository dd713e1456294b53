"""Fabricated audit stores: plain sqlite3 and safetensors, exactly by the schema, without any attack run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from leakscope.results import FindingRow, SettingVerdict
from leakscope.results.store import SCHEMA, seal

SGD = "FedSGD(reduction='mean', batchnorm='eval')"
AVG = "FedAvg(epochs=5, batch_size=10, lr=0.004, shuffle=True, optimizer='sgd', momentum=0.0, batchnorm='eval')"
VERTICAL = "Vertical(batchnorm='eval', batch_size=3, rounds=15, lr=0.1, sampling='uniform', whole_rounds=None)"
PRUNING = "GradientPruning(fraction=0.9, scope='tensor')"
NOISE = "GradientNoise(sigma=0.01)"
GEIPING = "InvertingGradients(iterations=500, restarts=2, tv=0.1, optimizer='signed-adam', labels=None)"
DLG = "DeepLeakage(iterations=300, optimizer='lbfgs')"
ANALYTIC = "AnalyticLinear()"
HOSTILE = "<script>alert(1)</script>"
HOSTILE_ATTRIBUTE = '"><img src=x onerror=alert(1)>'


@dataclass
class Fabricated:
    """A store to be: change ``meta``, ``jobs`` and ``findings`` at will, then ``write``."""

    meta: dict[str, Any]
    jobs: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    histories: dict[str, dict[str, Any]] = field(default_factory=dict)

    def find(self, kind: str, setting: tuple[str, str], content: Any, batch: int = 0, **changes: Any) -> None:
        """Add a finding."""
        number = len(self.findings)
        subject = {"protocol": setting[0], "defense": setting[1], "batch": batch, "seed": 0}
        self.findings.append(
            {
                **{"key": f"finding{number}", "position": len(self.jobs) + number, "kind": kind, "status": "done"},
                **{"subject": subject, "content": content, "error": None, "seconds": 0.5, "finished": None, **changes},
            }
        )

    def write(self, directory: Path) -> Path:
        (directory / "artifacts").mkdir(parents=True)
        connection = sqlite3.connect(directory / "audit.sqlite")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", [(k, json.dumps(v)) for k, v in self.meta.items()])
        for row in self.jobs:
            result = None if row["result"] is None else json.dumps(row["result"])
            values = (row["key"], row["status"], json.dumps(row["job"]), result)
            self._insert(connection, "jobs", row, (*values, *_fate(row), "{}"))
        for row in self.findings:
            texts = json.dumps(row["subject"]), json.dumps(row["content"])
            self._insert(connection, "findings", row, (row["key"], row["kind"], row["status"], *texts, *_fate(row)))
        connection.commit()
        connection.close()
        for key, tensors in self.artifacts.items():
            save_file(tensors, directory / "artifacts" / f"{key}.safetensors")
        for key, history in self.histories.items():
            (directory / "artifacts" / f"{key}.json").write_text(json.dumps({"history": history}))
        return directory

    def _insert(self, connection: sqlite3.Connection, table: str, row: dict[str, Any], values: tuple[Any, ...]) -> None:
        stored = (values[0], row["position"], *values[1:], seal(values))
        connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(stored))})", stored)


def _fate(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["error"], None if row["seconds"] is None else float(row["seconds"]), row["finished"]


def finding(kind: str, content: Any, setting: tuple[str, str], **changes: Any) -> FindingRow:
    """A finding on a setting, as the store gives it."""
    subject = {"protocol": setting[0], "defense": setting[1], "batch": changes.pop("batch", 0), "seed": 0}
    status = changes.pop("status", "done")
    return dataclasses.replace(FindingRow.read("f", 0, kind, status, subject, content), **changes)


def setting(name: str, protocol: str, defense: str) -> SettingVerdict:
    """A setting as the page names it, without results."""
    place = {"protocol": protocol, "defense": defense, "protocol_short": protocol, "defense_short": defense}
    return SettingVerdict(name=name, outcome="inconclusive", **place)


def smooth(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random smooth picture or signal in [0, 1]: a few waves for each channel."""
    sizes = shape[1:] if len(shape) > 1 else shape
    axes = torch.meshgrid(*(torch.linspace(0, 1, n) for n in sizes), indexing="ij")
    channels = []
    for _ in range(shape[0] if len(shape) > 1 else 1):
        field_ = torch.zeros(sizes)
        for _ in range(4):
            frequencies = torch.rand(len(sizes), generator=generator) * 10 - 5
            phase = float(torch.rand((), generator=generator)) * math.tau
            field_ += torch.sin(sum(f * a for f, a in zip(frequencies, axes, strict=True)) * 2 + phase)
        channels.append((field_ - field_.min()) / (field_.max() - field_.min() + 1e-9))
    return torch.stack(channels) if len(shape) > 1 else channels[0]


def fabricate(
    *,
    shape: tuple[int, ...] = (1, 16, 16),
    settings: tuple[tuple[str, str], ...] = ((SGD, "none"), (SGD, PRUNING), (SGD, NOISE)),
    level: tuple[float, ...] = (0.03, 0.12, 0.35),
    examples: int = 4,
    seeds: int = 2,
    private: bool = False,
    pictures: bool = True,
    failures: bool = True,
    missing: int = 0,
) -> Fabricated:
    """Three attacks over ``settings``, each with a zero-information control; ``level``: error of the best."""
    generator = torch.Generator().manual_seed(7)
    originals = [smooth(shape, generator) for _ in range(examples)]
    built = Fabricated(meta=_meta(shape, private, pictures, examples, settings))
    attacks = (("inverting-gradients", GEIPING, 1.0), ("deep-leakage", DLG, 1.8), ("analytic", ANALYTIC, 3.0))
    for (protocol, defense), error in zip(settings, level, strict=True):
        for name, attack, factor in attacks:
            # As in a true plan, a control belongs to the protocol and is recorded once, with no defence.
            for control in (None, "noise") if defense == "none" else (None,):
                for number in range(examples):
                    for seed in range(seeds):
                        noise = 0.45 if control else min(0.45, error * factor * (1 + 0.2 * number))
                        status = "done"
                        if failures and name == "analytic" and not control and defense != "none":
                            status = "refused"
                        if failures and name == "deep-leakage" and seed == 1 and number == 0 and not control:
                            status = "failed"
                        job = {
                            "protocol": protocol,
                            "defense": defense,
                            "control": control,
                            "attack": attack,
                            "attack_name": name,
                            "seed": seed,
                            "batch": number,
                            "indices": [number],
                            "knowledge": {"labels": "no"},
                        }
                        _add(built, job, status, originals[number], noise, generator, number)
    for protocol, defense in settings:
        _find(built, (protocol, defense), examples)
    built.meta["plan"] = {"total": len(built.jobs) + missing, "findings": len(built.findings)}
    return built


def _add(
    built: Fabricated,
    job: dict[str, Any],
    status: str,
    original: Tensor,
    noise: float,
    generator: torch.Generator,
    number: int,
) -> None:
    key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
    row: dict[str, Any] = {
        "key": key,
        "position": len(built.jobs),
        "status": status,
        "job": job,
        "result": None,
        "error": None,
        "seconds": round(1.5 + float(torch.rand((), generator=generator)) * 4, 3),
        "finished": f"2025-03-01T10:{len(built.jobs) // 60 % 60:02d}:{len(built.jobs) % 60:02d}+00:00",
    }
    built.jobs.append(row)
    if status == "failed":
        row["error"] = "RuntimeError: the line search produced a NaN objective at step 12\nTraceback: ..."
        return
    if status == "refused":
        row["error"] = "NotApplicable: the first layer must be linear with a bias; got Conv2d(1, 12)"
        return
    guess = (original + noise * torch.randn(original.shape, generator=generator)).clamp(0, 1)
    mse = float(((guess - original) ** 2).mean())
    psnr = -10 * math.log10(mse)
    image = original.dim() == 3
    row["result"] = {
        "examples": [
            {
                "index": number,
                "label": number % 10,
                "label_guess": number % 10 if not job["control"] else (number + 3) % 10,
                "label_correct": not job["control"],
                "mse": mse,
                "rmse": mse**0.5,
                "rmse_maxnorm": mse**0.5,
                "psnr": psnr,
                "ssim": max(0.0, min(1.0, (psnr - 5) / 30)) if image else None,
                "lpips": None,
                "identified": psnr > 14,
                "score": 1 / psnr,
            }
        ],
        "reasons": {"lpips": "no perceptual network is installed"}
        | ({} if image else {"ssim": "not an image: SSIM needs two spatial axes"}),
        "flags": ["restarts disagree"] if job["defense"] != "none" and job["seed"] == 1 else [],
        "notes": ["labels inferred from the last layer"],
        "info": {"seconds": row["seconds"], "steps": 500, "restarts": 2, "compiled": False, "device": "cpu"},
        "adaptive": job["defense"] != "none",
        "peak_memory_mb": 212.4,
    }
    if built.meta["pictures"]:
        built.artifacts[key] = {"originals": original[None].clone(), "reconstructions": guess[None].clone()}
    start = 0.5 + float(torch.rand((), generator=generator))
    built.histories[key] = {
        "objective": [
            [start * math.exp(-step / (60 + 20 * restart)) + noise * 0.1 for step in range(0, 500, 5)]
            for restart in range(2)
        ]
    }


def _find(built: Fabricated, setting: tuple[str, str], examples: int) -> None:
    """The findings of a setting: a floor, a trajectory of every client, or rounds and their cost."""
    protocol, bare = setting[0], setting[1] == "none"
    if protocol.startswith("FedSGD"):
        built.find("floor", setting, floor(60.0 if bare else 25.0))
    if protocol.startswith("FedAvg"):
        for number in range(examples):
            built.find("trajectory", setting, weight_update((0.999 if bare else 0.85) - 0.002 * number), number)
    if protocol.startswith("Vertical"):
        told = rounds(moves=True, alters=not bare, invisible=(3, 1), rounds=9 if bare else 15)
        built.find("rounds", setting, told)
        built.find("cost", setting, cost(0.46 if bare else 1.15))


def floor(psnr: float, **changes: Any) -> dict[str, Any]:
    """A floor of theory at this PSNR."""
    return {"psnr": psnr, "rmse": 10 ** (-psnr / 20), "unknowns": 64, "sigma": 0.1, "method": "exact", **changes}


def weight_update(best: float, at: float = 0.6, steps: int = 25, **changes: Any) -> dict[str, Any]:
    """What a job tells of a weight update whose highest cosine is ``best``."""
    betas = [place / 20 for place in range(21)]
    cosines = [best - 0.05 * (beta - at) ** 2 for beta in betas]
    shares = [0.998 - 0.02 * math.sin(step / 4) ** 2 for step in range(steps)]
    return {
        **{"steps": steps, "chosen": list(range(steps)), "shares": shares, "share_min": min(shares)},
        **{"betas": betas, "cosines": cosines, "best_beta": at, "max_cosine": best, "start_cosine": cosines[0]},
        **{"message_cosine": 1.0, "loss_before": 2.3, "loss_after": 1.9, "bound": 41.5, "bound_reason": None},
        **{"gradient_norm": 2.0, "lipschitz": 1.5, "smoothness": 3.0, **changes},
    }


def rounds(
    *,
    rounds: int = 15,
    rank: int = 12,
    least: int | None = 12,
    determined: tuple[int, ...] = (12, 12),
    separable: tuple[int | None, ...] = (None, None),
    invisible: tuple[int, ...] = (0, 0),
    enough: tuple[bool, ...] = (True, True),
    **changes: Any,
) -> dict[str, Any]:
    """What a job tells of its rounds on batches of 3 of 12 samples."""
    workers = [
        {"share": share, "determined": d, "separable": s, "invisible": list(range(i)), "enough_inputs": e}
        for share, d, s, i, e in zip(("bank", "shop"), determined, separable, invisible, enough, strict=True)
    ]
    found = {
        **{"samples": 12, "batch": 3, "rounds": rounds, "workers": workers, "conclusion": "Fabricated conclusion."},
        **{"index": {"rank": rank, "condition": 4.86}, "needed": {"least": least, "covered": 11.6, "apart": 8}},
    }
    facts = {"kind": "vertical", "announced": True, "moves": False, "alters": False, "mixes": False}
    return {**facts, **changes, "found": found}


def cost(after: float, rounds: int = 100, **changes: Any) -> dict[str, Any]:
    """What a job tells of a training that ends at this loss."""
    points = [[n + 0.5, after + (2.2 - after) * math.exp(-n / rounds * 5)] for n in range(1, rounds, 5)]
    told = {"rounds": rounds, "points": points, "first": 2.2, "last_tenth": after, "before": 2.25, "after": after}
    return {**told, **changes}


def _meta(
    shape: tuple[int, ...],
    private: bool,
    pictures: bool,
    examples: int,
    settings: tuple[tuple[str, str], ...],
) -> dict[str, Any]:
    spec = {
        "model": {"name": "lenet", "seed": 0, "weights": None},
        "data": {"name": "digits", "examples": examples, "batch_size": 1},
        "protocols": sorted({protocol for protocol, _ in settings}),
        "defenses": sorted({defense for _, defense in settings}),
        "attacks": ["inverting-gradients", "deep-leakage", "analytic"],
        "seeds": [0, 1],
        "knowledge": "honest_server",
        "policy": {"max_psnr": 20.0, "min_lift": 3.0},
    }
    return {
        "format": 3,
        "spec": spec,
        "spec_hash": hashlib.sha256(json.dumps(spec).encode()).hexdigest(),
        "versions": {
            **{"leakscope": "0.1.0", "torch": "2.6.0", "numpy": "1.26.4", "python": "3.11.7"},
            "platform": "Linux-x86_64",
        },
        "plan": {"total": 0},
        "threat_model": [
            "The adversary sees the model's structure, its weights, and the update the client sent.",
            "It does not know the labels and must infer them.",
            "It knows the number of examples, the local batch size.",
            "It follows the protocol and may not change the model.",
        ],
        "model": {"name": "lenet", "parameters": 15826, "repr": "LeNet(\n  (conv1): Conv2d(1, 12, 5)\n)"},
        "data": {
            **{"name": "digits", "private": private, "credits": "Fabricated waves, public domain (CC0)."},
            **{"shape": list(shape), "num_classes": 10, "class_names": [f"digit {n}" for n in range(10)]},
            **{"count": 200, "fingerprint": hashlib.sha256(b"digits").hexdigest()},
        },
        "policy": {"max_psnr": 20.0, "min_lift": 3.0, "max_ssim": None, "max_identification": None},
        "pictures": pictures,
        "created": "2025-03-01T10:00:00+00:00",
    }
