"""What figures stand on: the least certain kind among those of an analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsan.analysing import kinds_of
from nsan.analysis.result import KIND, KINDS
from nsan.charting import NOT_COUNTED
from nsan.info import MODEL_KIND

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysing import Source
    from nsan.analysis.catalog import Analysis


def worst_kind(source: Source, analysis: Analysis, found: pl.DataFrame | None) -> str:
    """Find the least certain kind among the figures of an analysis.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        On what it was run.
    analysis : Analysis
        What was run.
    found : DataFrame, optional
        What it gave, where that is at hand; else rows of the less certain kind are taken to be there.

    Returns
    -------
    str
        "recorded", "derived", "reconstructed" or "modelled".
    """
    if source.info.kind == MODEL_KIND:
        return "modelled"
    figures = [each for each in analysis.result.columns if each.unit not in NOT_COUNTED]
    if found is not None:
        kinds = kinds_of(source, analysis, found)
        known = [each.name for each in figures if found[each.name].null_count() < found.height]
        return max((kinds[name] for name in known), key=KINDS.index, default="recorded")
    if any(each.dtype == KIND for each in analysis.result.columns):
        return "reconstructed"  # as some of its rows may be
    return max((str(each.kind) for each in figures), key=KINDS.index, default="recorded")
