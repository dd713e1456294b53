"""What was audited, in sentences for the top of page and console; warnings where a verdict may not be what it seems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from leakscope.audit.setup import Setup
from leakscope.contracts.protocol import BATCHNORM, client_copy
from leakscope.contracts.task import outputs_of
from leakscope.results.records import counted

#: Settings of attacks that say how long they try.
_EFFORTS = ("iterations", "steps", "restarts")
EFFORT = "Effort"
WAIVED = "Waived"
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Statement:
    """One sentence on what was audited; a ``warning`` where it limits what the verdict says."""

    text: str
    warning: bool = False


def describe_audited(setup: Setup, asked: Mapping[str, Any]) -> list[Statement]:
    """What the verdict is about, most important first; ``asked`` is the spec of all runs in the folder."""
    return [
        _weights(setup),
        *_modes(setup),
        *_outputs(setup),
        _effort(asked),
        *_waived(setup),
        *_knowing(setup),
        *_privacy(setup),
        Statement(
            "Draws: the client's noise and order are simulated, reproducible by seed; a real client's are secret."
        ),
    ]


def _weights(setup: Setup) -> Statement:
    spec, mark = setup.spec, f"fingerprint {setup.model_fingerprint[:12]}"
    if spec.training is not None:
        return Statement(f"Weights: trained here, {spec.training.describe()} ({mark}).")
    if spec.model.weights is not None:
        return Statement(f"Weights: loaded from {spec.model.weights.name} ({mark}).")
    if spec.model.instance is not None:
        return Statement(f"Weights: those of the model given ({mark}).")
    text = f"Weights: random, seed {spec.model.seed} ({mark}): a trained model may leak less or more"
    return Statement(f"{text}. Load yours with --weights, or train first (training).", warning=True)


def _modes(setup: Setup) -> Iterator[Statement]:
    norms = [module for module in setup.model.modules() if isinstance(module, BATCHNORM)]
    modes = {part.instance.batchnorm for part in setup.spec.protocols}
    if norms:
        own = "train" if any(module.training for module in norms) else "eval"
        text = f"BatchNorm: {' and '.join(sorted(modes))} mode in the client"
        if own in modes:
            yield Statement(f"{text}, as in the model given.")
        else:
            words = f"{text}, but the model given is in {own} mode. Set batchnorm: {own} in the protocol if clients"
            yield Statement(f"{words} train so.", warning=True)
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in setup.model.modules()):
        yield Statement("Dropout: off in the client, which leaks more than training with it.", warning=True)


def _outputs(setup: Setup) -> Iterator[Statement]:
    task, data = setup.spec.task.instance, setup.data
    if not task.has_classes:
        return
    x, _ = setup.inputs(torch.tensor([0]))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        answer = outputs_of(client_copy(setup.model, "eval")(x))
    outputs = answer.shape[1] if answer.dim() > 1 else 1
    if outputs > max(data.num_classes, 2):
        unused = f"{outputs - data.num_classes} outputs belong to no class"
        text = f"Outputs: {outputs} for {data.num_classes} classes; {unused}, which makes labels easier to read"
        yield Statement(f"{text}. Check the number of classes.", warning=True)


def _effort(asked: Mapping[str, Any]) -> Statement:
    attacks = []
    for part in asked["attacks"]:
        told = [f"{name} {part['options'][name]}" for name in _EFFORTS if part["options"].get(name) is not None]
        attacks.append(f"{part['name']} ({', '.join(told)})" if told else part["name"])
    clients = f"{counted(asked['examples'], 'example')}, {asked['batch']} a client"
    count, seeds = counted(len(attacks), "attack"), counted(len(asked["seeds"]), "seed")
    return Statement(f"{EFFORT}: {count}: {', '.join(attacks)}; {seeds}; {clients}.")


def _waived(setup: Setup) -> Iterator[Statement]:
    """Standard attacks that the policy does without."""
    if names := setup.spec.policy.waive:
        text = f"{WAIVED}: the policy allows a pass without the standard attacks {', '.join(names)}"
        yield Statement(f"{text}. They may recover more.", warning=True)


def _knowing(setup: Setup) -> Iterator[Statement]:
    """That an attack which leaves out what it knows of a defence is run only where there is something to leave out."""
    ignoring = [part.name for part in setup.spec.attacks if part.instance.ignore_defense]
    if ignoring:
        text = f"Knowledge of the defence: {', '.join(dict.fromkeys(ignoring))} is also run without it"
        yield Statement(f"{text}; where there is no defence, or none that can be known, that would be the same again.")


def _privacy(setup: Setup) -> Iterator[Statement]:
    """Epsilon for what a client really sends, where a defence promises one."""
    for part in setup.spec.protocols:
        for defense in setup.spec.defenses:
            if defense.instance is None:
                continue
            passes = part.instance.passes(setup.spec.batch)
            spent, promised = defense.instance.epsilon_for(passes), defense.instance.epsilon_for(None)
            if spent is None or promised is None:
                continue
            text = f"Privacy: {defense.name} under {part.name} spends epsilon {spent:.3g} in one round"
            if spent > 1.001 * promised:
                why = f"for {passes} passes over its data, not the {promised:.3g} promised"
                yield Statement(f"{text}, {why}. Set steps: {passes} of the defence.", warning=True)
            else:
                yield Statement(f"{text} of a client; more rounds spend more.")
