"""Reports of the samples, each opened once, and what their blocks say."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from nsan.report.blocks import Points, Table, Text
from nsan.report.report import Report

SAMPLE_DATA = Path(__file__).parents[1] / "sample_data"
REAL = SAMPLE_DATA / "um_vector_add_rtx4060l.sqlite"


def path_of(sample):
    """Find a sample by its name; ``real`` is the vector add, ``hotspot_1024`` a log of nvprof."""
    if sample == "real":
        return REAL
    if sample.startswith("hotspot"):
        return SAMPLE_DATA / f"nvprof_{sample.replace('_', '_v100_')}.log.gz"
    return SAMPLE_DATA / "model" / sample / f"{sample}.sqlite"


@cache
def opened(sample):
    """Open the report of a sample."""
    return Report(path_of(sample))


@cache
def section(sample, name):
    """Write a section of the report of a sample."""
    return opened(sample).section(name)


def points(blocks):
    """By label: what the points of some blocks say."""
    found = [point for block in blocks if isinstance(block, Points) for point in block.points]
    return {point.label: point for point in found}


def tables(blocks):
    """The tables of some blocks, by title: each a list of rows as dicts."""
    found = [block for block in blocks if isinstance(block, Table)]
    return {
        block.title: [dict(zip(block.heads, row, strict=True)) for row in block.rows]
        for block in found
    }


def texts(blocks):
    """The paragraphs of some blocks."""
    return [block.text for block in blocks if isinstance(block, Text)]
