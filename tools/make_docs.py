"""Write the generated parts of docs/*.md again: tables and texts that come from the code itself.

    python tools/make_docs.py            write
    python tools/make_docs.py --check    exit code 1, and which pages, if something is out of date

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; everything else in a page is left alone. The
same code gives the same text: nothing of the clock, the machine or its data enters.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from leakscope.attacks import ATTACKS, FLAGS, STANDARD, STANDARD_VERTICAL, STANDARD_WEIGHT_UPDATES
from leakscope.audit.spec import AuditSpec, DataSpec, ModelSpec, Policy, TrainingSpec
from leakscope.data import DATA
from leakscope.defenses import DEFENSES
from leakscope.federation import PROTOCOLS
from leakscope.matching import DISTANCES
from leakscope.models import MODELS
from leakscope.observation import KNOWLEDGE_PRESETS, Knowledge
from leakscope.papers import PAPERS

DOCS = Path(__file__).resolve().parents[1] / "docs"
_PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: What the settings of attacks mean; a setting that is not here is explained in its attack's own text.
ATTACK_SETTINGS = {
    "iterations": "steps of the search; with L-BFGS one evaluation a step",
    "restarts": "searches from different starts, side by side; the smallest objective wins",
    "labels": '"recover": known or inferred first; "joint": optimised with the input where they are not known',
    "compile": "whether the step is compiled, see [the engine](engine.md#when-the-step-is-compiled)",
    "distance": "name of a [distance](engine.md#distances)",
    "tv": "weight of total variation",
    "batchnorm": "weight of the BatchNorm-statistics prior; 0 leaves it out",
    "lr": "step size of Adam",
    "gradient": "what Adam is given: the gradient, its sign, or a soft sign",
    "schedule": "how the step size falls over the run",
    "start": "where the search starts",
    "space": "whether pixels in [0, 1] or the model's own inputs are searched",
    "update": "how a weight update is simulated",
    "history": "moves that L-BFGS remembers",
    "line_search": "halve a step until the objective falls, or take every step as it is",
    "soft_range": "weight of the soft box around [0, 1]; it needs a known value range",
    "tolerance": "objective at which the search stops",
    "patience": "steps without a fall of a twentieth after which the search stops; 0 never",
    "guard": "least width of a kernel, in current mean squared differences",
    "weight": "the prior's weight at the start",
    "decay": "factor of the prior's weight",
    "every": "steps between two decays",
    "steps": "trial steps at most, accepted or not",
    "damping": "mu at the start: how much of the mean diagonal of J'J is added to it",
    "dense": "unknowns up to which the Jacobian is made",
    "noise": "standard deviation of the noise on the update, as far as the adversary knows it",
    "smoothness": "standard deviation of neighbouring pixels' differences under the prior; 0 for no prior",
    "hold_back_signal": "take the loss's derivative from the head's bias gradient where it is seen",
    "smooth_only": "decline models with kinks such as ReLU",
    "reached": "relative length of the residual at which the objective counts as reached",
    "form": "the equations as a penalty, or kept to the letter",
    "weights": "of matching, total variation and equations, one row a layer",
    "fade": "what the weight of total variation is multiplied by over the search",
    "trust": "leave out terms that say nothing new or are known to be wrong",
    "clip": "largest size of a tanh output that is inverted; None: what the update's precision can tell from 1",
    "ranks": "compute the rank of each layer's equations",
    "squared": "squared norm instead of the plain one",
    "optimizer": "which optimiser",
    "tv_variant": "which definition of [total variation](engine.md#priors)",
    "beta": "where the search for the point begins: 0 the weights before, 1 those after",
    "beta_lr": "step size of Adam for beta; 0 keeps it where it is",
    "beta_every": "steps between two derivatives by beta",
    "variant": "what is replayed: every step on one copy an epoch, on one copy, one step an epoch, or one gradient",
    "agreement": "weight of what the copies must have in common",
    "statistic": "what of an epoch's pictures must agree: their mean or their maximum",
    "norm": "how disagreement is measured",
    "filters": "random 3x3 filters before the statistic; 0 takes the pictures themselves",
    "factor": "what the distance is multiplied by, at the first step and from `factor_steps` on",
    "factor_steps": "steps from the first factor to the last",
    "clamp": "whether pixels are kept in the valid box",
    "checkpoint": "keep only the weights before each local step and compute the rest again: less memory",
    "dlfa.distance": 'name of a [distance](engine.md#distances), or "layered-l2", the published one',
    "dlfa.decay": "factor of the step size at each step",
    "cafe.method": "solve steps I and II outright, approach them in loops, or match gradients only",
    "cafe.iterations": "steps of step III: for each sample if direct, rounds visited otherwise",
    "cafe.first_iterations": "rounds visited by step I and by step II of the nested loops",
    "cafe.steps": "how the loops move in steps I and II",
    "cafe.gradient": "weight of the gradient term (alpha); the direct method has none",
    "cafe.tv": "weight of total variation (beta) at the start",
    "cafe.labels": '"recover": known, or read off the last layer by step I; "joint": searched with the data',
    "signal_lr": "step size of step I under `descent`",
    "input_lr": "step size of step II under `descent`",
    "relative": "terms relative to the size of what is observed, or sums as published",
    "threshold": "total variation from which on it counts (xi)",
    "representation": "weight of the representation term (gamma)",
    "group": "pictures of each sample searched side by side",
    "consistency": "weight of their distance from their mean",
    "linear-layer.tolerance": "relative singular value below which a direction counts as rounding noise",
}

#: Type and meaning of each key of a spec. A key that the code has and this table lacks is an error, as is the reverse.
SPEC_KEYS = {
    "model": ("name or mapping", "the victim; see the keys of `model`"),
    "data": ("name or mapping", "the private examples; see the keys of `data`"),
    "training": (
        "mapping",
        "federated training before the audit; see the keys of `training`; default: the model is attacked as it is",
    ),
    "examples": (
        "whole number",
        "how many examples to attack, a multiple of `batch`; default: the fewest full batches that hold 8, as far as "
        "the data goes",
    ),
    "batch": (
        "whole number",
        "examples a client holds, in vertical learning the samples that the workers share; batch b holds the examples "
        "b·batch to (b+1)·batch − 1",
    ),
    "protocols": ("name, mapping or list", "[protocols](protocols-and-defenses.md)"),
    "defenses": ("name, mapping or list", "[defences](protocols-and-defenses.md#defences); `none` is the bare update"),
    "attacks": ("name, mapping or list", "[attacks](attacks.md); `standard` stands for several"),
    "knowledge": (
        "preset or mapping",
        "[the threat model](threat-models.md); default: `honest_server`, or `vertical_server` where every protocol is "
        "vertical",
    ),
    "seeds": ("number or list", "a number n means the seeds 0 to n − 1"),
    "policy": ("mapping", "limits of the verdict; see the keys of `policy`"),
    "pictures": ("true or false", "whether originals and reconstructions are kept; default: only if not private"),
    "controls": ("true or false", "whether each attack also runs on an update without information"),
    "lpips": ("path", "file of LPIPS weights; default: the one in the folder `LEAKSCOPE_DATA`, if there is one"),
    "device": ("text", "where attacks run, as torch names it"),
    "dtype": ("`float32` or `float64`", "precision of attacks; default: that of the update"),
    "threads": ("whole number", "threads a job"),
    "executor": ("`serial` or `processes`", "where jobs run; on the command line the default is `processes`"),
    "workers": ("whole number", "worker processes; default: processors divided by `threads`"),
    "timeout": (
        "seconds",
        "a job that takes longer, diagnosis, theory and repeated training included, is stopped and counts as failed; "
        "needs `processes`",
    ),
}
MODEL_KEYS = {
    "name": ("text", "a [reference model](models-and-data.md#models) or `package.module:factory`"),
    "options": ("mapping", "the model's own options"),
    "seed": ("whole number", "seed of the initial weights"),
    "weights": ("path", "a `.safetensors` file of the state dictionary, loaded over the initial weights"),
}
DATA_KEYS = {
    "name": ("text", "a [data set](models-and-data.md#data)"),
    "path": ("path", "where the files are; default: the folder `LEAKSCOPE_DATA`"),
    "split": ("text", "a split, where the reader has them"),
    "limit": ("whole number", "use only the first so many examples; also shrinks the pool for identification"),
    "options": ("mapping", "the reader's own options"),
    "mean": ("list of numbers", "with `std`: normalise (unit value − mean) / std, one number a channel or one for all"),
    "std": ("list of numbers", "see `mean`"),
}
TRAINING_KEYS = {
    "rounds": ("whole number", "the model is attacked as a client receives it in this round; 1 is the initial model"),
    "split": (
        "`iid`, `dirichlet` or `group`",
        "how the data is divided: at random, with label shares from a Dirichlet, or a client a group, such as a writer",
    ),
    "clients": ("whole number", "how many clients; required with `iid` and `dirichlet`, not for `group`"),
    "alpha": ("number", "with `dirichlet`, and required there: the smaller, the fewer clients share a class"),
    "clients_per_round": (
        "whole number",
        "clients that the server draws each round; all of them where there are fewer",
    ),
    "epochs": ("whole number", "local epochs, as in [FedAvg](protocols-and-defenses.md)"),
    "batch_size": ("whole number", "size of the local batches"),
    "lr": ("number", "local learning rate of SGD"),
    "seed": ("whole number", "seed of the split, of the server's draws and of the order of local batches"),
}
POLICY_KEYS = {
    "max_psnr": ("dB", "a reconstruction this good leaks, if it also has the lift"),
    "min_lift": ("dB", "by how much it must exceed its null control; 0 or less: no control is needed"),
    "max_ssim": ("−1 to 1", "any attempt with this SSIM leaks; no lift is asked for"),
    "max_identification": ("0 to 1", "a larger share of identified examples leaks"),
}
KNOWLEDGE_FIELDS = {
    "labels": "`no`, `counts` (how many of each class) or `yes` (every label)",
    "num_examples": "how many examples are behind the update",
    "local_epochs": "epochs of local training",
    "batch_size": "size of the local batches",
    "learning_rate": "learning rate, optimiser and momentum",
    "batch_order": "which examples were in each local step",
    "batch_indices": "which samples are in a batch; the server of vertical learning announces them",
    "batchnorm_statistics": "mean and variance of the private batch at each BatchNorm layer",
    "normalisation": "the value range of inputs, hence where [0, 1] lies",
    "choose_weights": "a server that may choose the weights it sends out",
    "choose_structure": "a server that may choose the structure",
}


def standard(name: str) -> str:
    if name in STANDARD:
        return "yes"
    if name in STANDARD_VERTICAL:
        return "for vertical learning"
    return "for weight updates" if name in STANDARD_WEIGHT_UPDATES else ""


def attacks() -> str:
    rows = [[f"[`{e.name}`](#{e.name})", e.cls.__name__, e.summary, standard(e.name)] for e in ATTACKS.values()]
    parts = [table(["name", "class", "what it does", "in `standard`"], rows)]
    for entry in ATTACKS.values():
        cls = entry.cls
        needs = ", ".join(f"`{name}`" for name in cls.requires) or "nothing"
        settings = [
            [f"`{f.name}`", kind(f.type), code(repr(f.default)), meaning(entry.name, f.name)]
            for f in dataclasses.fields(cls)
        ]
        parts += [
            f"## {entry.name}",
            f"`leakscope.attacks.{cls.__name__}`: {entry.summary}. Source: {entry.paper}. It must know: {needs}.",
            prose(inspect.getmodule(cls).__doc__ or ""),
            prose(cls.__doc__ or ""),
            table(["setting", "type", "default", "meaning"], settings),
        ]
        if cls.presets:
            shown = [
                [f"`{name}`", ", ".join(f"`{key}={value!r}`" for key, value in values.items())]
                for name, values in cls.presets.items()
            ]
            parts.append(table(["preset", "changes"], shown))
    return "\n\n".join(parts)


def models() -> str:
    rows = [
        [
            f"`{e.name}`",
            e.summary,
            size(e.input_shape),
            str(e.num_classes),
            ", ".join(f"`{name}`" for name in e.options()) or "none",
        ]
        for e in MODELS.values()
    ]
    return table(["name", "what it is", "input", "classes", "options"], rows)


def data() -> str:
    rows = [
        [
            f"`{e.name}`",
            e.summary,
            "its own" if e.shape is None else size(e.shape),
            "yes" if e.needs_path else "no",
            ", ".join(f"`{name}`" for name in e.options()) or "none",
        ]
        for e in DATA.values()
    ]
    return table(["name", "what it is", "shape", "needs files", "options"], rows)


def spec() -> str:
    return pydantic_table(AuditSpec, SPEC_KEYS)


def spec_model() -> str:
    return pydantic_table(ModelSpec, MODEL_KEYS)


def spec_data() -> str:
    return pydantic_table(DataSpec, DATA_KEYS)


def spec_training() -> str:
    return pydantic_table(TrainingSpec, TRAINING_KEYS)


def spec_policy() -> str:
    return pydantic_table(Policy, POLICY_KEYS)


def knowledge() -> str:
    names = [f.name for f in dataclasses.fields(Knowledge)]
    same_keys("Knowledge", names, KNOWLEDGE_FIELDS)
    rows = []
    for name in names:
        values = [getattr(preset, name) for preset in KNOWLEDGE_PRESETS.values()]
        shown = [value if isinstance(value, str) else "yes" if value else "no" for value in values]
        rows.append([f"`{name}`", KNOWLEDGE_FIELDS[name], *shown])
    return table(["field", "what is known", *(f"`{name}`" for name in KNOWLEDGE_PRESETS)], rows)


def protocols() -> str:
    return table(["name", "class", "what it does", "settings"], [_settings(n, c) for n, c in PROTOCOLS.items()])


def defenses() -> str:
    return table(["name", "class", "what it does", "settings"], [_settings(n, c) for n, c in DEFENSES.items()])


def distances() -> str:
    rows = []
    for name, distance in DISTANCES.items():
        summary = (type(distance).__doc__ or "").strip().split("\n\n")[0]
        rows.append([f"`{name}`", code(repr(distance)), inline(" ".join(summary.split()))])
    return table(["name", "object", "value"], rows)


def flags() -> str:
    return table(["flag", "meaning"], [[f"`{name}`", words] for name, words in FLAGS.items()])


def papers() -> str:
    rows = []
    for entry in PAPERS.values():
        for scale, words in entry.scales.items():
            first = scale == next(iter(entry.scales))
            rows.append([f"`{entry.name}`" if first else "", entry.paper if first else "", f"`{scale}`", words])
    return table(["table", "paper", "scale", "what it runs"], rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "attacks": attacks,
    "models": models,
    "data": data,
    "spec": spec,
    "spec-model": spec_model,
    "spec-data": spec_data,
    "spec-training": spec_training,
    "spec-policy": spec_policy,
    "knowledge": knowledge,
    "protocols": protocols,
    "defenses": defenses,
    "distances": distances,
    "flags": flags,
    "papers": papers,
}


def _settings(name: str, cls: type) -> list[str]:
    summary = inline(" ".join((cls.__doc__ or "").strip().split("\n\n")[0].split()))
    fields = ", ".join(code(f"{f.name}={f.default!r}") for f in dataclasses.fields(cls)) or "none"
    return [f"`{name}`", f"`{cls.__name__}`", summary, fields]


def pydantic_table(model: type[BaseModel], keys: Mapping[str, tuple[str, str]]) -> str:
    # Objects are given from Python only; in a file the word is an error.
    fields = {name: field for name, field in model.model_fields.items() if name != "instance"}
    same_keys(model.__name__, fields, keys)
    rows = []
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            shown = "see below"
        elif default is PydanticUndefined:
            shown = "required"
        else:
            shown = "unset" if default is None else code(yaml_like(default))
        rows.append([f"`{name}`", keys[name][0], shown, keys[name][1]])
    return table(["key", "type", "default", "meaning"], rows)


def same_keys(what: str, code_has: Iterable[str], told: Iterable[str]) -> None:
    missing, stale = sorted(set(code_has) - set(told)), sorted(set(told) - set(code_has))
    if missing or stale:
        raise ValueError(
            f"{what}: tools/make_docs.py lacks {missing or 'nothing'}, and explains {stale or 'nothing'} more"
        )


def yaml_like(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(yaml_like(item) for item in value) + "]"
    return str(value)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: Any) -> str:
    return f"`{text}`"


def kind(annotation: Any) -> str:
    """A type as a reader types it: the choices of a literal, or the type's name."""
    choices = re.fullmatch(r"Literal\[(.*)\]", str(annotation))
    if choices is None:
        return code(annotation)
    return ", ".join(code(choice.strip().strip("'\"")) for choice in choices[1].split(","))


def meaning(attack: str, setting: str) -> str:
    return ATTACK_SETTINGS.get(f"{attack}.{setting}") or ATTACK_SETTINGS.get(setting, "see the text")


def size(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def inline(text: str) -> str:
    """Docstring marks as Markdown has them."""
    text = re.sub(r":(?:mod|meth|class|func|data|attr):`([^`]*)`", r"`\1`", text)
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def prose(docstring: str) -> str:
    """The paragraphs of a docstring, each on one line, without doctests."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    kept = [" ".join(p.split()) for p in paragraphs if p.strip() and not p.lstrip().startswith(">>>")]
    text = "\n\n".join(inline(p) for p in kept)
    # A mark of the source list behind a year says nothing to a reader.
    return re.sub(r" \(S\d+\)", "", text)


def regenerate(page: str) -> str:
    """``page`` with every generated part written anew."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in PARTS:
            raise ValueError(f"unknown generated part {name!r}: expected one of {', '.join(PARTS)}")
        return f"{match[1]}{PARTS[name]()}\n{match[3]}"

    return _PART.sub(fill, page)


def main(arguments: Sequence[str]) -> int:
    check = "--check" in arguments
    stale = []
    for path in sorted(DOCS.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = regenerate(before)
        if after != before:
            stale.append(path.name)
            if not check:
                path.write_text(after, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
