"""Tensors in unit space as pictures inside the page: PNG data URIs, or line pairs for signals."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import InputSpace
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.report import svg


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
