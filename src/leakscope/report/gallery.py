"""Originals beside reconstructions: which pictures may be shown, and how they are laid out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from leakscope.audit.store import Row, Store
from leakscope.audit.verdict import Verdict
from leakscope.report import words
from leakscope.report.pictures import Picture, channel_note, draw

MAX_EXAMPLES = 40
SHOWN_AT_ONCE = 6

_PRIVATE = (
    "The data is private, so its pictures and their reconstructions are left out of this page. To keep and "
    "show them, run the audit again with --pictures, then leakscope report DIR --pictures."
)
_HIDDEN = "Pictures were left out on request; leakscope report DIR --pictures shows what the store holds."
_ABSENT = "The store holds no pictures. To keep them, run the audit with --pictures."


class Gallery:
    """The pictures of one store; opens each artifact only when a picture of it is wanted."""

    def __init__(self, store: Store, rows: list[Row], data: dict[str, Any], kept: bool, asked: bool | None) -> None:
        self.rows = {row.key: row for row in rows}
        self.data = data
        private = bool(data.get("private", True))
        self.allowed = asked if asked is not None else (not private or kept)
        self.refusal = _HIDDEN if asked is False and not private else _PRIVATE
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

    def label_of(self, key: str, index: int) -> str:
        """The true label of an example in words."""
        example = self._example(key, index)
        label = None if example is None else example.get("label")
        names = self.data.get("class_names")
        if isinstance(label, int) and isinstance(names, list) and 0 <= label < len(names):
            return str(names[label])
        return words.DASH if label is None else str(label)

    def pair(self, key: str, index: int, identity: str) -> tuple[Picture | None, Picture | None]:
        """Original and reconstruction of one example of one job, where both may be shown and exist."""
        place = self._place(key, index)
        if not self.allowed or place is None:
            return None, None
        tensors = self._artifact(key)
        originals, guesses = tensors.get("originals"), tensors.get("reconstructions")
        if originals is None or guesses is None or place >= min(len(originals), len(guesses)):
            return None, None
        original, guess = originals[place], guesses[place]
        label = self.label_of(key, index)
        try:
            return (
                draw(original, alt=f"original of example {index}, label {label}", identity=f"{identity}-o"),
                draw(guess, alt=f"reconstruction of example {index}", identity=f"{identity}-r", behind=original),
            )
        except ValueError:
            self.unreadable.add(key)
            return None, None

    def section(self, verdict: Verdict, settings: list[dict[str, Any]]) -> dict[str, Any]:
        """One line an example, the most exposed first; one column a setting, with its strongest attack."""
        if not self.allowed:
            return {"message": self.refusal, "lines": [], "rest": [], "notes": []}
        strongest: dict[int, dict[int, Any]] = {}
        for number, setting in enumerate(verdict.settings):
            for example in setting.examples:
                strongest.setdefault(example.index, {})[number] = example
        ordered = sorted(
            strongest,
            key=lambda index: (-max((_rank(e.psnr) for e in strongest[index].values()), default=0.0), index),
        )
        lines = [self._line(index, strongest[index], settings) for index in ordered[:MAX_EXAMPLES]]
        notes = [note for note in (channel_note(self.data.get("shape") or ()),) if note]
        if len(ordered) > MAX_EXAMPLES:
            notes.append(f"The {MAX_EXAMPLES} most exposed of {len(ordered)} examples are shown.")
        if self.unreadable:
            notes.append(f"The pictures of {words.counted(len(self.unreadable), 'job')} could not be read.")
        if not any(line["original"] for line in lines):
            message = _ABSENT if ordered else "No example has been measured yet."
            return {"message": message, "lines": [], "rest": [], "notes": notes}
        return {"message": "", "lines": lines[:SHOWN_AT_ONCE], "rest": lines[SHOWN_AT_ONCE:], "notes": notes}

    def _line(self, index: int, found: dict[int, Any], settings: list[dict[str, Any]]) -> dict[str, Any]:
        cells: list[dict[str, Any] | None] = []
        original: Picture | None = None
        label = words.DASH
        for number in range(len(settings)):
            example = found.get(number)
            if example is None:
                cells.append(None)
                continue
            first, guess = self.pair(example.key, index, f"p{index}-{number}")
            original = original or first
            label = self.label_of(example.key, index)
            cells.append(
                {
                    "picture": guess,
                    "psnr": words.fixed(words.number(example.psnr)),
                    "ssim": words.fixed(words.number(example.ssim), 2),
                    "attack": example.attack_name,
                    "leaks": bool(example.leaks),
                }
            )
        return {"index": index, "label": label, "original": original, "cells": cells}

    def _place(self, key: str, index: int) -> int | None:
        row = self.rows.get(key)
        examples = (row.result or {}).get("examples", []) if row is not None else []
        return next((n for n, e in enumerate(examples) if e.get("index") == index), None)

    def _example(self, key: str, index: int) -> dict[str, Any] | None:
        place = self._place(key, index)
        return None if place is None else (self.rows[key].result or {})["examples"][place]


def _rank(psnr: Any) -> float:
    """PSNR for ordering; what was not measured comes last.

    >>> _rank(12.5), _rank(None)
    (12.5, -inf)
    """
    value = words.number(psnr)
    return float("-inf") if value != value else value
