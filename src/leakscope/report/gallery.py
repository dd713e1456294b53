"""Originals beside attempts at them: which pictures may be shown, and how they are laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from leakscope.contracts.inputs import SPACES, space_from_facts
from leakscope.report import words
from leakscope.report.pictures import Picture, channel_note, draw
from leakscope.results.records import Row, counted
from leakscope.results.store import Store
from leakscope.results.strongest import StrongestExample
from leakscope.results.verdict import Verdict

MAX_EXAMPLES = 40
SHOWN_AT_ONCE = 6

_PRIVATE = (
    "The data is private, so its pictures and what attacks made of them are left out of this page. To keep and "
    "show them, run the audit again with --pictures, then leakscope report DIR --pictures."
)
_HIDDEN = "Pictures were left out on request; leakscope report DIR --pictures shows what the store holds."
_ABSENT = "The store holds no pictures. To keep them, run the audit with --pictures."


class Gallery:
    """The pictures of one store; opens each artifact only when a picture of it is wanted."""

    def __init__(self, store: Store, rows: Sequence[Row], data: Mapping[str, Any], stored: bool, wanted: bool | None):
        self.places = {row.key: [example.index for example in row.examples] for row in rows}
        self.data = data
        told = data.get("inputs") or {}
        # A space of the user's own may not be known to whoever makes the page; its examples are drawn then.
        self._inputs = space_from_facts(told) if told.get("kind") in SPACES else None
        private = bool(data.get("private", True))
        self.allowed = wanted if wanted is not None else (not private or stored)
        self.refusal = _HIDDEN if wanted is False and not private else _PRIVATE
        self.unreadable: set[str] = set()

        @lru_cache(maxsize=8)
        def artifact(key: str) -> dict[str, Tensor]:
            try:
                return store.artifact(key) or {}
            except (ValueError, OSError, SafetensorError):
                # The page must come out even where a file is damaged; it says how many are.
                self.unreadable.add(key)
                return {}

        self._artifact = artifact

    def label_of(self, example: StrongestExample) -> str:
        """The true label of an example in words."""
        return words.label_name(example.label, self.data.get("class_names"))

    def pair(self, example: StrongestExample, identity: str) -> tuple[Picture | None, Picture | None]:
        """Original and reconstruction of one example, where both may be shown and exist."""
        key, index = example.key, example.index
        if not self.allowed or index not in self.places.get(key, ()):
            return None, None
        place, tensors = self.places[key].index(index), self._artifact(key)
        originals, guesses = tensors.get("originals"), tensors.get("reconstructions")
        if originals is None or guesses is None or place >= min(len(originals), len(guesses)):
            return None, None
        original, guess, label = originals[place], guesses[place], self.label_of(example)
        try:
            alt = f"original of example {index}, label {label}"
            first = draw(original, alt=alt, identity=f"{identity}-o", inputs=self._inputs)
            alt = f"example {index}, recovered" if example.leaks else f"attempt at example {index}"
            return first, draw(guess, alt=alt, identity=f"{identity}-r", behind=original, inputs=self._inputs)
        except ValueError:
            self.unreadable.add(key)
            return None, None

    def section(self, verdict: Verdict) -> dict[str, Any]:
        """One line an example, the most exposed first; one column a setting, with its strongest attack."""
        if not self.allowed:
            return {"message": self.refusal, "lines": [], "notes": []}
        strongest: dict[int, list[StrongestExample | None]] = {}
        for place, setting in enumerate(verdict.settings):
            for example in setting.examples:
                strongest.setdefault(example.index, [None] * len(verdict.settings))[place] = example
        ordered = sorted(strongest, key=lambda index: (-max(e.exposure for e in strongest[index] if e), index))
        lines = [self._line(index, strongest[index]) for index in ordered[:MAX_EXAMPLES]]
        drawn = self._inputs is None or not self._inputs.discrete
        notes = [note for note in (channel_note(self.data.get("shape") or ()),) if note and drawn]
        if len(ordered) > MAX_EXAMPLES:
            notes.append(f"The {MAX_EXAMPLES} most exposed of {len(ordered)} examples are shown.")
        if self.unreadable:
            notes.append(f"The pictures of {counted(len(self.unreadable), 'job')} could not be read.")
        if not any(line["original"] for line in lines):
            message = _ABSENT if ordered else "No example has been measured yet."
            return {"message": message, "lines": [], "notes": notes}
        return {"message": "", "lines": lines, "at_once": SHOWN_AT_ONCE, "notes": notes}

    def _line(self, index: int, strongest: Sequence[StrongestExample | None]) -> dict[str, Any]:
        cells: list[tuple[StrongestExample | None, Picture | None]] = []
        original, label = None, words.DASH
        for place, example in enumerate(strongest):
            first, guess = self.pair(example, f"p{index}-{place}") if example else (None, None)
            original, label = original or first, self.label_of(example) if example else label
            cells.append((example, guess))
        return {"index": index, "label": label, "original": original, "cells": cells}
