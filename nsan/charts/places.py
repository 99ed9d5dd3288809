"""Which kernels and allocations move and fault most: bytes to the right and left, faults beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.memory import largest, left_out, muted, panels, part_title
from nsan.charts.palette import Theme
from nsan.charts.theme import LETTER_PX, Part, byte_unit, cause_color, name_label, themed, titled
from nsan.text import CAUSE_WORDS
from nsan.units import format_bytes

_NAME_PX: Final = 190
_GAP_PX: Final = 18
_ROW_PX: Final = 21
_REMAINDERS: Final = {
    "cpu": "(CPU page faults)",
    "user_prefetch": "(prefetch calls)",
    "ambiguous": "(several kernels at once)",
}
_BETWEEN: Final = "GPU to GPU"
_UNNAMED: Final = "(no name)"
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+, [0-9]+ byte")


@chart(
    question="Which kernels move most memory and fault most?",
    draws=("top_kernels",),
    title="Faults and bytes by kernel",
    figures=("in_bytes", "out_bytes", "n_fault_rows"),
)
def faults_of_kernels(
    kernels: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw what moved and faulted while each kernel ran.

    Parameters
    ----------
    kernels : DataFrame, ``TOP_KERNELS``
        The kernels that move or fault most, all others, and the remainders.
    width : int, default 640
        Pixels of the drawn area, names among them.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Bars of bytes by cause, to the GPU right and to the CPU left of zero, and of fault rows, for each
        GPU, at most three.
    """
    labelled = kernels.with_columns(
        label=_labels("n_names", "(no kernel ran)"),
        between=pl.lit(0),
        faults=_faults(kernels, "n_fault_rows"),
    )
    notes = [
        "Laid to the kernel that ran when it began; copies and memsets count where no kernel ran.",
        *_fault_note(kernels, "n_fault_rows"),
        *left_out(kernels, "GPU"),
    ]
    look = _Look(_causes("", "between"), _counted(kernels, "n_fault_rows"), width, theme)
    drawn = _panels(labelled, ("pid", "device_id"), look)
    return _finished(drawn, titled("Faults and bytes by kernel", width, notes), theme)


@chart(
    question="Which allocations move most memory and fault most?",
    draws=("top_allocations",),
    title="Faults and bytes by allocation",
    figures=("in_bytes", "out_bytes", "n_lowest_page_rows"),
)
def faults_of_allocations(
    allocations: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw what moved and faulted in each managed allocation.

    Parameters
    ----------
    allocations : DataFrame, ``TOP_ALLOCATIONS``
        The allocations that move or fault most, all others, and what lies in none.
    width : int, default 640
        Pixels of the drawn area, names among them.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Bars as of :func:`faults_of_kernels`, for each process, at most three.
    """
    labelled = allocations.with_columns(
        name=_with_size(allocations), faults=_faults(allocations, "n_lowest_page_rows")
    ).with_columns(label=_labels("n_allocations", "(in no allocation)"))
    guessed = (allocations["part"] == "guessed").any()
    notes = [
        "By address: a fault row counts where its lowest page is.",
        *_fault_note(allocations, "n_lowest_page_rows"),
        *(["No allocation was recorded: ranges are guessed from addresses."] if guessed else []),
        *left_out(allocations, "process", ["pid"]),
    ]
    counted = _counted(allocations, "n_lowest_page_rows")
    look = _Look(_causes("in_", "between_bytes"), counted, width, theme)
    drawn = _panels(labelled, ("pid",), look)
    return _finished(drawn, titled("Faults and bytes by allocation", width, notes), theme)


def _finished(
    drawn: Sequence[alt.HConcatChart], title: alt.TitleParams, theme: Theme
) -> alt.TopLevelMixin:
    return themed(alt.vconcat(*drawn, spacing=16).properties(title=title), theme)


def _with_size(allocations: pl.DataFrame) -> pl.Series:
    """Write the size of an allocation without a name as people do; the analysis writes bytes."""
    texts = [
        f"{name.split(',')[0]}, {format_bytes(size)}" if name and _ADDRESS.fullmatch(name) else name
        for name, size in allocations.select("name", "bytes").iter_rows()
    ]
    return pl.Series("name", texts, dtype=pl.String)


def _labels(count: str, nowhere: str) -> pl.Expr:
    """Name each row; equal names after shortening are told apart by their rank."""
    part = pl.col("part").cast(pl.String)
    short = name_label("name", 30).fill_null(_UNNAMED)
    label = (
        pl.when(part == "others")
        .then(
            pl.format(
                "({} other{})",
                count,
                pl.when(pl.col(count) == 1).then(pl.lit("")).otherwise(pl.lit("s")),
            )
        )
        .when(part == "unattributed")
        .then(pl.lit(nowhere))
        .when(part.is_in([*_REMAINDERS]))
        .then(part.replace(_REMAINDERS))
        .otherwise(short)
    )
    is_twice = (pl.len().over(label) > 1) & pl.col("rank").is_not_null()
    return pl.when(is_twice).then(pl.format("{} #{}", label, pl.col("rank"))).otherwise(label)


def _faults(frame: pl.DataFrame, rows: str) -> pl.Expr:
    """Choose fault rows, or without them driver batches."""
    return pl.col("n_batches") if _without_rows(frame, rows) else pl.col(rows)


def _counted(frame: pl.DataFrame, rows: str) -> str:
    return "Batches" if _without_rows(frame, rows) else "Fault rows"


def _without_rows(frame: pl.DataFrame, rows: str) -> bool:
    return frame[rows].null_count() == frame.height


def _fault_note(frame: pl.DataFrame, rows: str) -> list[str]:
    faults = "A fault row is one driver batch; pages are not counted by it."
    if _without_rows(frame, rows):
        faults = "Without fault rows: driver batches, reconstructed from the copies."
    no_cause = frame["evicted_bytes"].null_count() == frame.height
    return [faults, *(["No causes were recorded: bytes are grey."] if no_cause else [])]


def _causes(into: str, between: str) -> Mapping[str, pl.Expr]:
    """Bytes by cause, negative where they go to the CPU; what no column names is the rest.

    ``into`` begins the columns of faulted and prefetched bytes, ``between`` is that of bytes from other GPUs
    that are told apart.
    """
    faulted, ahead = _zero(f"{into}coherence_bytes"), _zero(f"{into}prefetch_bytes")
    asked, evicted = _zero("in_user_bytes"), _zero("evicted_bytes")
    back, ahead_out, sent = (_zero(f"out_{n}_bytes") for n in ("coherence", "prefetch", "user"))
    return {
        "coherence": faulted,
        "prefetch": ahead,
        "user": asked,
        "between": pl.col(between),
        "unknown": pl.col("in_bytes") - faulted - ahead - asked,
        "-eviction": -evicted,
        "-coherence": -back,
        "-prefetch": -ahead_out,
        "-user": -sent,
        "-unknown": -(pl.col("out_bytes") - evicted - back - ahead_out - sent),
    }


def _zero(name: str) -> pl.Expr:
    """Take an unknown part as nothing: it stays in the rest, whose cause is not known."""
    return pl.col(name).fill_null(0)


@dataclass(frozen=True)
class _Look:
    """What the panels share: bytes by cause, what is counted beside them, the width, and the theme."""

    causes: Mapping[str, pl.Expr]
    counted: str
    width: int
    theme: Theme


def _panels(labelled: pl.DataFrame, keys: Sequence[str], look: _Look) -> list[alt.HConcatChart]:
    parts = panels(labelled, keys)
    used = [part.with_columns(order=pl.int_range(pl.len())) for part in parts]
    longest = max(largest(part["label"].str.len_chars()) for part in used)
    return [_bars(part, look, longest, is_only=len(parts) == 1) for part in used]


def _bars(part: pl.DataFrame, look: _Look, longest: int, *, is_only: bool) -> alt.HConcatChart:
    names = min(int(longest * LETTER_PX) + 12, _NAME_PX)
    drawn = max(look.width - names - _GAP_PX, 120)
    size = {"height": max(_ROW_PX * part.height, 40)}
    # The same room for names in all panels, so that their bars begin at the same place.
    axis = alt.Axis(labelLimit=_NAME_PX, labelOverlap=False, minExtent=names, maxExtent=names)
    order = part["label"].to_list()
    y = alt.Y("label:N", sort=order, title=None, axis=axis)
    moved = _moved(part, look).encode(y=y)
    bare = alt.Y("label:N", sort=order, title=None, axis=alt.Axis(labels=False, ticks=False))
    both = alt.hconcat(
        moved.properties(width=round(drawn * 0.66), **size),
        _counts(part, look, bare).properties(width=round(drawn * 0.34), **size),
        spacing=_GAP_PX,
    )
    if is_only:
        return both
    of_gpu = "device_id" in part.columns
    name = part_title(part, is_only=False) if of_gpu else f"Process {part['pid'][0]}"
    return both.properties(title=name)


def _moved(part: pl.DataFrame, look: _Look) -> alt.Chart:
    """Draw bytes by cause, to the CPU left of zero."""
    unit, size = byte_unit(max(largest(part["in_bytes"]), largest(part["out_bytes"])))
    rows = _by_cause(part, look.causes, size)
    both = (rows["bytes"] < 0).any()
    title = f"{unit}: to the CPU | to the GPU" if both else f"To the GPU, {unit}"
    axis = alt.Axis(labelExpr="format(abs(datum.value), '~r')", tickCount=5)
    bars = alt.Chart(rows).mark_bar()
    return bars.encode(
        x=alt.X("bytes:Q", title=title, stack="zero", axis=axis),
        color=cause_color(rows, look.theme, look.width),
        tooltip=[
            alt.Tooltip("label:N", title="Name"),
            alt.Tooltip("cause:N", title="Cause"),
            alt.Tooltip("bytes:Q", title=f"{unit} (to the CPU below 0)", format=".2f"),
        ],
    )


def _counts(part: pl.DataFrame, look: _Look, y: alt.Y) -> Part:
    """Draw fault rows, or batches where there are none; what is not known has no bar, and says so."""
    counts = part.select("label", "faults")
    # Without anything but zeros the axis would have its 0 in the middle.
    scale = alt.Undefined if largest(counts["faults"]) else alt.Scale(domain=[0, 1])
    known = alt.Chart(counts.drop_nulls()).mark_bar(color=muted(look.theme))
    bars = known.encode(
        x=alt.X("faults:Q", title=look.counted, scale=scale, axis=alt.Axis(tickCount=3)),
        y=y,
        tooltip=[
            alt.Tooltip("label:N", title="Name"),
            alt.Tooltip("faults:Q", title=look.counted, format=","),
        ],
    )
    unknown = counts.filter(pl.col("faults").is_null())
    if unknown.is_empty():
        return bars
    said = alt.Chart(unknown).mark_text(align="left", dx=4, fontSize=10, color=muted(look.theme))
    texts = said.encode(x=alt.value(0), y=y, text=alt.value("not recorded"))
    return texts if unknown.height == counts.height else alt.layer(bars, texts)


def _by_cause(part: pl.DataFrame, causes: Mapping[str, pl.Expr], size: int) -> pl.DataFrame:
    """List the bytes of each row by cause; a row without any keeps one of 0, so that it is drawn."""
    known = {**CAUSE_WORDS, "between": _BETWEEN}
    words = {name: known.get(name.lstrip("-"), name.lstrip("-")) for name in causes}
    parts = [
        part.select("label", "order", pl.lit(words[name]).alias("cause"), bytes=value / size)
        for name, value in causes.items()
    ]
    found = pl.concat(parts).filter(pl.col("bytes") != 0)
    first = found["cause"].first() if found.height else words["unknown"]
    bare = part.filter(~pl.col("label").is_in(found["label"].to_list())).select(
        "label", "order", pl.lit(first).alias("cause"), bytes=pl.lit(0.0)
    )
    return pl.concat([found, bare]).sort("order", maintain_order=True).drop("order")
