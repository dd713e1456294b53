"""What an adversary knows besides the model and the update: the threat model as an object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import Described, setting, settings_of

LabelKnowledge = Literal["no", "counts", "yes"]
#: Fields that are powers over the model and no facts.
_POWERS = {"choose_weights": "the weights", "choose_structure": "the structure"}


@dataclass(frozen=True, kw_only=True)
class Knowledge(Described):
    """What an adversary knows besides the model and the update; one field for each thing.

    >>> Knowledge.honest_server.labels, Knowledge.full.labels
    ('no', 'yes')
    >>> Knowledge.preset("eavesdropper").learning_rate
    False
    """

    labels: LabelKnowledge = setting("no", "the labels: none, how many examples each class has, or every label")
    num_examples: bool = setting(True, "the number of examples")
    local_epochs: bool = setting(False, "the number of local epochs")
    batch_size: bool = setting(False, "the local batch size")
    learning_rate: bool = setting(False, "the client's learning rate, optimiser and momentum")
    batch_order: bool = setting(False, "the order in which the client visited its examples")
    batch_indices: bool = setting(False, "which examples are in each batch")
    batchnorm_statistics: bool = setting(False, "the BatchNorm statistics of the private batch itself")
    normalisation: bool = setting(False, "the input normalisation and value range")
    defense: bool = setting(False, "which defence was used, and its settings")
    auxiliary_data: bool = setting(False, "examples of the same kind as the client's, which are not the client's own")
    choose_weights: bool = setting(False, "a server that may choose the weights it sends out")
    choose_structure: bool = setting(False, "a server that may choose the structure of the model")

    eavesdropper: ClassVar[Knowledge]
    honest_server: ClassVar[Knowledge]
    adaptive_server: ClassVar[Knowledge]
    informed_server: ClassVar[Knowledge]
    vertical_server: ClassVar[Knowledge]
    malicious_server: ClassVar[Knowledge]
    full: ClassVar[Knowledge]

    @classmethod
    def preset(cls, name: str) -> Knowledge:
        if name not in KNOWLEDGE_PRESETS:
            wanted = f"one of {', '.join(KNOWLEDGE_PRESETS)}, or a mapping of the fields of Knowledge"
            raise UserError(f"unknown knowledge preset {name!r}: expected {wanted}")
        return KNOWLEDGE_PRESETS[name]

    def grants(self, name: str) -> bool:
        """Whether the fact called ``name`` is known; of labels only every single one will do.

        >>> Knowledge(labels="counts").grants("labels"), Knowledge(labels="counts").grants("label_counts")
        (False, True)
        """
        if name == "label_counts":
            return self.labels != "no"
        return self.labels == "yes" if name == "labels" else bool(getattr(self, name))

    def describe(self) -> list[str]:
        """The threat model in plain words, one sentence a line."""
        labels = {
            "no": "It does not know the labels and must infer them.",
            "counts": "It knows how many examples each class has, not which example has which label.",
            "yes": "It knows every label.",
        }
        lines = ["The adversary sees the model's structure, the weights the client received, and the update it sent."]
        lines.append(labels[self.labels])
        facts = {s.name: s.help for s in settings_of(Knowledge) if s.name != "labels" and s.name not in _POWERS}
        for verb, granted in (("knows", True), ("does not know", False)):
            phrases = [phrase for name, phrase in facts.items() if getattr(self, name) is granted]
            lines += [f"It {verb} " + ", ".join(phrases) + "."] if phrases else []
        chosen = [words for name, words in _POWERS.items() if getattr(self, name)]
        honest = "It follows the protocol and may not change the model."
        return [*lines, f"It may choose {' and '.join(chosen)} of the model." if chosen else honest]


Knowledge.eavesdropper = Knowledge()
Knowledge.honest_server = Knowledge(local_epochs=True, batch_size=True, learning_rate=True, normalisation=True)
# Kerckhoffs's principle: a defence that protects only while nobody knows of it does not protect.
Knowledge.adaptive_server = dataclasses.replace(Knowledge.honest_server, defense=True)
# Who trains a model usually has some examples of its kind, and the code of the clients.
Knowledge.informed_server = dataclasses.replace(Knowledge.adaptive_server, auxiliary_data=True)
# In vertical learning the server itself announces the batches, unless indices are shuffled securely.
Knowledge.vertical_server = dataclasses.replace(Knowledge.honest_server, batch_indices=True)
Knowledge.malicious_server = dataclasses.replace(Knowledge.honest_server, choose_weights=True, choose_structure=True)
Knowledge.full = Knowledge(labels="yes", **{s.name: True for s in settings_of(Knowledge) if s.type is bool})

KNOWLEDGE_PRESETS: Mapping[str, Knowledge] = MappingProxyType(
    {name: value for name, value in vars(Knowledge).items() if isinstance(value, Knowledge)}
)


def nearest_preset(wanted: Knowledge) -> tuple[str, dict[str, bool]]:
    """Return the preset that differs from ``wanted`` in the fewest facts, and those facts; labels are apart.

    >>> nearest_preset(dataclasses.replace(Knowledge.honest_server, defense=True, labels="yes"))
    ('adaptive_server', {})
    >>> nearest_preset(dataclasses.replace(Knowledge.honest_server, batch_order=True))
    ('honest_server', {'batch_order': True})
    """
    changes = {
        name: {
            one.name: bool(getattr(wanted, one.name))
            for one in settings_of(Knowledge)
            if one.name != "labels" and getattr(preset, one.name) != getattr(wanted, one.name)
        }
        for name, preset in KNOWLEDGE_PRESETS.items()
    }
    return min(changes.items(), key=lambda entry: len(entry[1]))
