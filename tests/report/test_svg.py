"""Charts and pictures on their own."""

from __future__ import annotations

import dataclasses
import io
import math
from xml.etree import ElementTree

import pytest
import torch
from fabricate import setting
from PIL import Image

from leakscope.report import svg
from leakscope.report.pictures import draw, png
from leakscope.results import SettingVerdict, StrongestExample
from leakscope.results.names import Part, short_names

NAN = math.nan


def row(value: float = 25.0, ends: tuple[float, float] = (22.0, 28.0), baseline: float = 10.0) -> SettingVerdict:
    """A setting with two examples at the ends of its interval."""
    place = {"attack": "", "attack_name": "", "seed": 0, "key": "", "protocol": "P()", "defense": "none"}
    examples = [StrongestExample(index=n, values={"psnr": psnr}, **place) for n, psnr in enumerate(ends)]
    facts = {"mean_psnr": value, "interval": ends, "baseline_psnr": baseline, "examples": examples}
    return dataclasses.replace(setting("S1", "P()", "none"), outcome="leaks", **facts)


@pytest.mark.parametrize("label_width", [0, 200])
def test_dot_plot_places_means_in_order_and_is_well_formed(label_width: int) -> None:
    rows = [row(value=12.0), row(value=25.0), row(NAN, (NAN, NAN), NAN)]
    chart = svg.dot_plot(rows, policy=20.0, identity="x", width=600, label_width=label_width)
    tree = ElementTree.fromstring(chart)
    places = [float(c.get("cx", "")) for c in tree.iter("circle") if c.get("class") == "mean"]
    (line,) = [float(c.get("x1", "")) for c in tree.iter("line") if c.get("class") == "policy"]
    assert places[0] < line < places[1]
    assert tree.find("title") is not None
    first, _, unmeasured = [str(title.text) for title in tree.iter("title")][1:]
    assert first == "S1 none · P(): leaks, mean 12.0 dB, interval 22.0 to 28.0 dB, zero-information baseline 10.0 dB."
    assert unmeasured == "S1 none · P(): leaks, no finite mean."
    assert str(tree.findtext("desc")).startswith(f"The policy allows less than 20 dB. {first} ")
    assert tree.get("aria-labelledby") == "x-t x-d"


@pytest.mark.parametrize("values", [[NAN], [math.inf, 1.0], [0.0, -1.0], [], [5.0], [1e-30, 1e30]])
def test_curves_of_any_values_are_well_formed(values: list[float]) -> None:
    chart = svg.curve_plot([("restart <1>", values)], title='a "title"', identity="c")
    assert "nan" not in chart.replace("nothing finite", "")
    ElementTree.fromstring(chart)


def test_infinite_psnr_does_not_stretch_the_chart() -> None:
    chart = svg.dot_plot([row(value=math.inf)], policy=20.0, identity="x", width=600, label_width=0)
    assert "inf" not in ElementTree.fromstring(chart).attrib["viewBox"]
    assert "NaN" not in chart
    assert 'cx="inf"' not in chart


def test_an_exact_copy_does_not_squeeze_the_chart() -> None:
    rows = [row(200.0, (200.0, 200.0)), row()]
    chart = svg.dot_plot(rows, policy=20.0, identity="x", width=600, label_width=0)
    assert "60 and more at the edge" in chart
    places = [float(c.get("cx", "")) for c in ElementTree.fromstring(chart).iter("circle")]
    assert max(places) <= 600


def test_logarithmic_only_where_positive() -> None:
    assert "logarithmic" in svg.curve_plot([("a", [1.0, 0.1])], title="t", identity="c")
    assert "linear" in svg.curve_plot([("a", [1.0, 0.0])], title="t", identity="c")


def test_png_keeps_the_pixels() -> None:
    image = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0))
    back = Image.open(io.BytesIO(png(image)))
    assert back.size == (7, 5)
    assert back.mode == "RGB"
    assert back.getpixel((6, 4)) == tuple(int(v) for v in (image[:, 4, 6] * 255).round())
    assert Image.open(io.BytesIO(png(torch.full((1, 2, 2), NAN)))).getpixel((0, 0)) == 0


def test_a_picture_without_pixels_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an image"):
        png(torch.zeros(1, 0, 4))


def test_scalars_and_signals_are_drawn() -> None:
    for shape in ((), (1,), (4,), (2, 4)):
        picture = draw(torch.zeros(shape), alt="a", identity="i", behind=torch.ones(shape))
        assert picture.drawing is not None
        ElementTree.fromstring(picture.drawing)


def test_short_names_never_merge_two_reprs() -> None:
    reprs = ["A(x=1, y='a')", "A(x=1, y='b')", "A(x=2, y='a')", "B(z=None)", "none", "odd(", ""]
    assert len(set(short_names(reprs).values())) == len(reprs)
    assert short_names(["A(f=g(1, 2), h=[3, 4])"]) == {"A(f=g(1, 2), h=[3, 4])": "A(f=g(1, 2), h=[3, 4])"}
    told = Part.read("A(...)", {"name": "a", "class": "A", "options": {"sigma": 0.1, "law": "normal"}})
    assert short_names(["A(...)", "none"], {"A(...)": told})["A(...)"] == "A(sigma=0.1)"
