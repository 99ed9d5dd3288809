"""Two traces side by side: traffic on one scale, and how two views above each other are laid to each other.

What differs in figures is for :func:`nsan.compare` to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from nsan.analysing import analyse
from nsan.info import MODEL_KIND, MODELLED
from nsan.report.blocks import Picture, Text, quoted
from nsan.report.shown import Blocks
from nsan.widgets.static import has_front_end

if TYPE_CHECKING:
    from nsan.charts.palette import Theme
    from nsan.trace import Trace


def traffic_of_two(
    a: Trace, b: Trace, *, width: int | None = None, theme: Theme = "light"
) -> Blocks:
    """Draw what moved over time in two traces, on one scale of time and one of bytes.

    Parameters
    ----------
    a, b : Trace
        Two traces, whole or filtered.
    width : int, optional
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    Blocks
        The chart; a text where nothing moved in either, or it was not recorded.
    """
    from nsan.charts.saving import rendered, specification
    from nsan.charts.theme import with_notes
    from nsan.charts.traffic import migrations_of_two

    frames = [analyse(each, "causes_over_time").collect() for each in (a, b)]
    widths = [each["end_ns"][0] - each["start_ns"][0] for each in frames if each.height]
    if not widths:
        return Blocks([Text("Nothing moved in either, or it was not recorded.", "note")])
    options = {"stretch_ns": max(widths)}
    frames = [analyse(each, "causes_over_time", options=options).collect() for each in (a, b)]
    names = tuple(f"{label}, {each.info.source}" for label, each in zip("AB", (a, b), strict=True))
    room = width or 640
    drawn = migrations_of_two(*frames, names=names, width=room, theme=theme)  # type: ignore[arg-type]
    modelled = [
        label for label, each in zip("AB", (a, b), strict=True) if each.info.kind == MODEL_KIND
    ]
    if modelled:
        drawn = with_notes(drawn, [f"{' and '.join(modelled)}: modelled, {MODELLED}."], room)
    picture = rendered(drawn, ".svg").decode()
    title = "When did memory move in each, which way and why?"
    return Blocks([Picture("migrations_of_two", title, specification(drawn), picture)])


def range_of_both(a: Trace, b: Trace, nvtx: str) -> str:
    """Choose the NVTX range at which two traces are laid to each other.

    Parameters
    ----------
    a, b : Trace
        Two traces.
    nvtx : str
        Name of a range; may be empty.

    Returns
    -------
    str
        The name if both have such a range, else "": then each begins with its first event.
    """
    return nvtx if all(nvtx in _range_names(each) for each in (a, b)) else ""


def about_views(a: Trace, b: Trace, *, nvtx: str = "") -> Blocks:
    """Say how two views above each other are laid to each other, and how they are used where they are live.

    Parameters
    ----------
    a, b : Trace
        Two traces.
    nvtx : str, default ""
        NVTX range that was asked for.

    Returns
    -------
    Blocks
        What is at time 0, and why; the keys where somebody can press them.
    """
    shared = range_of_both(a, b, nvtx)
    zero = f"time 0 is the first {quoted(shared, 40) if shared else 'event'} of each"
    if nvtx and not shared:
        zero += f", as not both have an NVTX range {quoted(nvtx, 40)}"
    if has_front_end():
        said = (
            f"One scale and one clock: {zero}. The windows move together: zoom or drag in one, and the "
            "other follows. Press `?` for the keys."
        )
    else:
        said = (
            "Here are pictures of both views, each on its own clock. In the page that the last cell writes they "
            f"are on one: {zero}."
        )
    return Blocks([Text(said)])


def _range_names(trace: Trace) -> list[str]:
    """Name the NVTX ranges of a trace that have a start and an end, the most frequent first."""
    whole = pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null())
    names = trace.nvtx_ranges.filter(whole).select("name").drop_nulls()
    counts = names.group_by("name").len().sort("len", "name", descending=[True, False])
    found: list[str] = counts.collect()["name"].to_list()
    return found
