"""Executed notebooks for tests of reports, made by hand: no kernel runs."""

from __future__ import annotations

import random

import altair as alt
import polars as pl
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from nsan.charts.saving import rendered, specification
from nsan.charts.theme import themed
from nsan.report.blocks import Picture
from nsan.report.shown import Blocks


def executed(*cells):
    """Make a notebook; a text is a cell of Markdown."""
    made = [new_markdown_cell(each) if isinstance(each, str) else each for each in cells]
    for number, cell in enumerate(made):
        cell.id = f"cell-{number}"
    return new_notebook(cells=made)


def shows(*blocks, source="report.section('x')"):
    """Make a cell whose output is blocks of nsan's."""
    return gives(Blocks(blocks)._repr_mimebundle_(), source=source)


def gives(data, *, source="x"):
    """Make a cell whose output has these forms."""
    return new_code_cell(source, outputs=[new_output("display_data", data=data)])


def picture(name="bars", *, title="What is there?", rows=None, theme="light"):
    """Draw a chart of a few rows, or of these; each has a ``name`` and a ``value``."""
    frame = pl.DataFrame(rows or [{"name": f"n{i}", "value": i} for i in range(1, 4)])
    bars = alt.Chart(frame, title=name).mark_bar().encode(x="value:Q", y="name:N", tooltip="name:N")
    chart = themed(bars, theme)
    return Picture(name, title, specification(chart), rendered(chart, ".svg").decode())


def scattered(n_rows, *, seed=1):
    """Draw a chart of so many marks, none like the other."""
    chance = random.Random(seed)
    frame = pl.DataFrame(
        {
            "time": [chance.random() * 1000 for _ in range(n_rows)],
            "value": [chance.random() for _ in range(n_rows)],
            "name": [f"kernel {chance.randrange(6)}" for _ in range(n_rows)],
        }
    )
    points = alt.Chart(frame, width=640, height=300).mark_point()
    chart = themed(
        points.encode(x="time:Q", y="value:Q", color="name:N", tooltip="name:N"), "light"
    )
    svg = rendered(chart, ".svg").decode()
    return Picture("scattered", "Where do they lie?", specification(chart), svg)
