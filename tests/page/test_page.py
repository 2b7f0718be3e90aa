"""Figures and templates: drawings that stand by themselves, styles of lines, and text that is never taken for HTML."""

import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
from jinja2 import UndefinedError

from threepass.page.figure import Figure, Line, Panel, over_runs
from threepass.page.grid import Shade, grid
from threepass.page.render import render
from threepass.page.writer import Cell, Table, write_page


def test_a_figure_stands_by_itself():
    lines = [Line(0, [1, 2, 3], [1.0, 0.1, math.nan], [0.9, 0.05, 1.0], [1.1, 0.2, 1.0]), Line(9, [1, 2], [2.0, 0.0])]
    figure = Figure(Panel("a", "A <title>", "epoch", lines, "note", logarithmic=True), [f"<{k}>" for k in range(10)])
    root = ET.fromstring(figure.alone)
    assert root.find("{*}title").text == "A <title>"
    assert root.find("{*}style") is not None
    assert "nan" not in figure.alone.replace("A &lt;title&gt;, by epoch: &lt;0&gt; from 1 to nan", "")
    assert root.get("viewBox") == root.get("data-whole")
    shapes = {g.get("data-series"): g.find("{*}path[@class='mark']").get("d") for g in root.findall("{*}g/{*}g")}
    assert len(shapes) == 10
    assert shapes["0"] != shapes["8"]  # colours come again, with other markers
    on_page = ET.fromstring(figure.on_page)
    assert on_page.find("{*}style") is None
    assert on_page.get("viewBox") != on_page.get("data-whole")


def test_styles_of_lines():
    x, y = [0, 1, 2], [1.0, 2.0, 3.0]
    lines = [Line(k, x, y, style=style) for k, style in enumerate(("solid", "dashed", "bare", "points"))]
    root = ET.fromstring(Figure(Panel("a", "t", "x", lines, ""), list("abcd")).alone)
    found = {g.get("class").split()[1]: [p.get("class") for p in g] for g in root.findall("{*}g[@data-series]")}
    assert found == {
        "solid": ["line", "mark", "mark", "mark"],
        "dashed": ["line"],
        "bare": ["line"],
        "points": ["mark", "mark", "mark"],
    }


def test_points_lie_where_their_values_say():
    line = Line(0, [0, 5, 10], [0.0, 50.0, 100.0], style="points")
    root = ET.fromstring(Figure(Panel("a", "t", "x", [line], "", top=100.0), ["s"]).alone)
    marks = root.findall("{*}g[@data-series]/{*}path")
    places = [tuple(map(float, re.findall(r"[\d.]+", m.get("transform")))) for m in marks]
    assert places == [(50.0, 212.0), (209.0, 112.0), (368.0, 12.0)]  # the corners and the middle of the axes
    labels = {t.text: float(t.get("y")) - 4 for t in root.findall("{*}text") if t.get("text-anchor") == "end"}
    assert labels["0"] == 212.0
    assert labels["100"] == 12.0


def test_zeros_lie_below_the_smallest_value_on_a_logarithmic_axis():
    line = Line(0, [0, 1, 2], [1.0, 0.1, 0.0], style="points")
    root = ET.fromstring(Figure(Panel("a", "t", "x", [line], "", logarithmic=True), ["s"]).alone)
    heights = [float(re.findall(r"[\d.]+", m.get("transform"))[1]) for m in root.findall("{*}g[@data-series]/{*}path")]
    assert heights == sorted(heights)
    assert heights[2] < 212  # above the axis


def test_the_data_of_a_figure_are_json_without_markup():
    line = Line(0, [1, 2], [0.5, math.nan], label="</script>")
    data = Figure(Panel("a", "t", "x", [line], ""), ["s"]).data
    assert "</script" not in data
    assert json.loads(data)["lines"][0]["y"] == [0.5, None]
    assert json.loads(data)["lines"][0]["label"] == "</script>"


@pytest.mark.parametrize(
    ("values", "top", "both"), [([1.0, 2.0], None, True), ([-1.0, 2.0], None, False), ([1.0, 2.0], 100.0, False)]
)
def test_a_switch_where_both_scales_have_a_place(values, top, both):
    assert Figure(Panel("a", "t", "x", [Line(0, [0, 1], values)], "", top=top), ["s"]).has_both_scales == both


def test_the_band_goes_from_the_lowest_run_to_the_highest():
    assert over_runs(1, [0, 1], [[1.0, 2.0], [3.0, 6.0]]) == Line(1, [0, 1], [2.0, 4.0], [1.0, 2.0], [3.0, 6.0])
    assert over_runs(1, [0, 1], [[1.0, 2.0]], dashed=True) == Line(1, [0, 1], [1.0, 2.0], style="dashed")


def test_a_grid_of_cells():
    root = ET.fromstring(grid("<t>", {"a": [Shade("1.0", "#ffffff"), Shade("x", "#000000", True)]}, ["p", "q"]))
    assert [t.text for t in root.findall("{*}text")] == ["<t>", "p", "q", "a", "1.0", "x"]
    assert [r.get("fill") for r in root.findall("{*}rect")] == ["#fff", "#ffffff", "#000000"]


def test_text_is_escaped_and_figures_are_written(tmp_path):
    figure = Figure(Panel("f", "<b>", "x", [Line(0, [0, 1], [1.0, 2.0])], ""), ["<i>"])
    table = Table("<caption>", ["<column>"], [("<head>", [Cell("<cell>", "<below>", True)])])
    values = {"schemes": ["<i>"], "nets": {"<net>": [figure]}, "agreement": table, "no_solution": {}}
    settings = {"draws": 1, "batch": 2, "depth": 3, "width": 4}
    page = write_page(tmp_path / "new" / "p.html", "init_study.html.j2", [figure], settings=settings, **values)
    text = page.read_text()
    for word in ("b", "i", "net", "caption", "column", "head", "cell", "below"):
        assert f"&lt;{word}&gt;" in text
    assert not re.search(r"<(net|column|head|cell|below)>(?!\n<meta)", text)
    assert (tmp_path / "new" / "figures" / "f.svg").read_text() == figure.alone
    with pytest.raises(UndefinedError):
        render("init_study.html.j2", **values)  # what a template needs and does not get is an error
