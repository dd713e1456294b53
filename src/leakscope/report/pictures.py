"""Tensors in unit space as pictures inside the page, and which of a store may be shown beside their originals."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any

import torch
from markupsafe import Markup
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import SPACES, InputSpace, space_from_facts
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.report import svg, words
from leakscope.results.records import Row, counted, mapping
from leakscope.results.setting_verdict import StrongestExample
from leakscope.results.store import Store
from leakscope.results.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One drawn example: either ``uri`` (an image) or ``drawing`` (an SVG, or text)."""

    alt: str
    uri: str | None = None
    drawing: Markup | None = None
    pixelated: bool = True


def channel_note(shape: Sequence[int]) -> str | None:
    """What the pictures of data of this shape leave out, if anything.

    >>> channel_note((3, 32, 32)) is None, channel_note((1, 28, 28)) is None
    (True, True)
    >>> channel_note((5, 32, 32))
    'Pictures show the first of 5 channels, in grey.'
    """
    if len(shape) == 3 and shape[0] not in (1, 3):
        return f"Pictures show the first of {shape[0]} channels, in grey."
    if len(shape) == 2 and shape[0] != 1:
        return f"Lines show the first of {shape[0]} channels."
    if len(shape) == 1:
        return "Lines show the features of each record in their order, each scaled to [0, 1]."
    return None


def png(image: Tensor) -> bytes:
    """PNG bytes of an image (C, H, W) in [0, 1]; what is not finite becomes black.

    >>> png(torch.zeros(1, 2, 2))[:4]
    b'\\x89PNG'
    """
    if image.dim() != 3 or 0 in image.shape:
        raise UserError(f"expected an image of shape (channels, height, width), got {tuple(image.shape)}")
    clean = torch.nan_to_num(image.detach().float().cpu(), nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)
    pixels = (clean * 255).round().to(torch.uint8)
    array = pixels.permute(1, 2, 0).contiguous().numpy() if image.shape[0] == 3 else pixels[0].numpy()
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, format="PNG")
    return stream.getvalue()


def draw(
    value: Tensor, *, alt: str, identity: str, behind: Tensor | None = None, inputs: InputSpace | None = None
) -> Picture:
    """Draw an example of unit space as ``inputs`` shows it: text, an image, or a line over its original ``behind``."""
    if inputs is not None and (text := inputs.text(value)) is not None:
        return Picture(alt=alt, drawing=Markup("<code>{}</code>").format(text))
    if value.dim() == 3:
        uri = "data:image/png;base64," + base64.b64encode(png(value)).decode("ascii")
        return Picture(alt=alt, uri=uri, pixelated=max(value.shape[1:]) <= 96)
    pair = (_trace(value), None) if behind is None else (_trace(behind), _trace(value))
    return Picture(alt=alt, drawing=svg.signal_pair(*pair, title=alt, identity=identity))


def _trace(value: Tensor) -> list[float]:
    """The one line that stands for a signal or a record.

    >>> _trace(torch.tensor([[0.0, 1.0], [5.0, 5.0]]))
    [0.0, 1.0]
    """
    while value.dim() > 1:
        value = value[0]
    return [float(v) for v in value.detach().float().cpu().reshape(-1)]


#: Pictures that are drawn at most; a notebook keeps them all in its file.
MOST = 16


@dataclass(frozen=True)
class Pictures:
    """HTML with pictures, which a notebook shows."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show(reconstruction: Reconstruction, observation: Observation, most: int = MOST) -> Pictures:
    """The first pictures of ``reconstruction`` as a notebook draws them; they stay in its file when it is saved."""
    unit = observation.inputs.to_unit(reconstruction.inputs.detach())
    parts = []
    for number, value in enumerate(unit[:most]):
        name = f"reconstruction {number}"
        picture = draw(value, alt=name, identity=f"reconstruction-{number}", inputs=observation.inputs)
        if picture.uri is None:
            parts.append(str(picture.drawing))
        else:
            crisp = "image-rendering:pixelated;" if picture.pixelated else ""
            parts.append(f'<img alt="{escape(picture.alt)}" src="{picture.uri}" style="{crisp}width:96px;margin:2px">')
    return Pictures(f"<div>{''.join(parts)}</div>")


MAX_EXAMPLES = 40
SHOWN_AT_ONCE = 6

_TEXTS = words.TEXTS["pictures"]


class Gallery:
    """The pictures of one store; opens each artifact only when a picture of it is wanted."""

    def __init__(self, store: Store, rows: Sequence[Row], data: Mapping[str, Any], stored: bool, wanted: bool | None):
        self.places = {row.key: [example.index for example in row.examples] for row in rows}
        self.data = data
        told = data.get("inputs") or {}
        # A space of the user's own may not be known to whoever makes the page; its examples are drawn then.
        self._inputs = space_from_facts(told) if told.get("kind") in SPACES else None
        private = bool(data.get("private", True))
        #: Whether labels are told; stores of versions before 0.14 hold those of private data, too.
        self.labelled = not private or mapping(store.meta("spec")).get("show_names") is True
        self.allowed = wanted if wanted is not None else (not private or stored)
        self.refusal = _TEXTS["hidden" if wanted is False and not private else "private"]
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
        """The true label of an example in words; empty where labels stay out."""
        return words.label_name(example.label, self.data.get("class_names")) if self.labelled else ""

    def pair(self, example: StrongestExample, identity: str) -> tuple[Picture | None, Picture | None]:
        """Original and reconstruction of one example, where both may be shown and exist."""
        key, index = example.key, example.index
        if not self.allowed or index not in self.places.get(key, ()):
            return None, None
        place, tensors = self.places[key].index(index), self._artifact(key)
        originals, guesses = tensors.get("originals"), tensors.get("reconstructions")
        if originals is None or guesses is None or place >= min(len(originals), len(guesses)):
            return None, None
        original, guess = originals[place], guesses[place]
        try:
            first = draw(original, alt=f"original of example {index}", identity=f"{identity}-o", inputs=self._inputs)
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
            message = _TEXTS["absent"] if ordered else "No example has been measured yet."
            return {"message": message, "lines": [], "notes": notes}
        return {"message": "", "lines": lines, "at_once": SHOWN_AT_ONCE, "notes": notes}

    def _line(self, index: int, strongest: Sequence[StrongestExample | None]) -> dict[str, Any]:
        cells: list[tuple[StrongestExample | None, Picture | None]] = []
        original, label = None, ""
        for place, example in enumerate(strongest):
            first, guess = self.pair(example, f"p{index}-{place}") if example else (None, None)
            original, label = original or first, self.label_of(example) if example else label
            cells.append((example, guess))
        return {"index": index, "label": label, "original": original, "cells": cells}
