"""Pictures of a reconstruction in a notebook, for who asks for them: what an attack recovered is private data."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.report.pictures import draw

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
