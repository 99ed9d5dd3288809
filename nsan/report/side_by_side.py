"""Two traces side by side: figures with difference and ratio, traffic on one scale, step against step.

Tables that say what is there, no verdict: whether a difference matters is for the reader, or for a gate, to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysing import analyse, kinds_of
from nsan.analysis.catalog import find as find_analysis
from nsan.contract import summary
from nsan.info import MODEL_KIND, MODELLED
from nsan.report.blocks import Block, Picture, Point, Points, Table, Text, quoted
from nsan.report.shown import Blocks
from nsan.tabular.notes import few
from nsan.text import cause_word, shortened
from nsan.units import counted, format_bytes, format_count, format_time
from nsan.widgets.static import has_front_end

if TYPE_CHECKING:
    from nsan.charts.palette import Theme
    from nsan.trace import Trace

Number = int | float | None


@dataclass(frozen=True)
class _Figure:
    """A line of the table: where it is in a summary, the kind of events that it needs, and how it is written."""

    label: str
    part: str
    key: str
    capture: str
    write: Callable[[Any], str]
    is_derived: bool = False


_FIGURES: Final = (
    _Figure("Duration, first to last event", "", "duration_ns", "", format_time, is_derived=True),
    _Figure("GPU fault rows", "gpu_faults", "n_rows", "gpu_faults", format_count),
    _Figure(
        "VA blocks with fault rows",
        "gpu_faults",
        "n_va_blocks",
        "gpu_faults",
        format_count,
        is_derived=True,
    ),
    _Figure("CPU page faults", "cpu_faults", "n", "cpu_faults", format_count),
    _Figure("Copies of managed memory", "migrations", "n", "migrations", format_count),
    _Figure("Moved into GPUs", "migrations", "htod_bytes", "migrations", format_bytes),
    _Figure("Moved out of GPUs", "migrations", "dtoh_bytes", "migrations", format_bytes),
    _Figure("Moved between GPUs", "migrations", "dtod_bytes", "migrations", format_bytes),
)
_LATER: Final = (
    _Figure(
        "Time with a copy running",
        "migrations",
        "busy_ns",
        "migrations",
        format_time,
        is_derived=True,
    ),
    _Figure("Kernels", "kernels", "n", "kernels", format_count),
    _Figure(
        "Time with a kernel running", "kernels", "busy_ns", "kernels", format_time, is_derived=True
    ),
    _Figure("Managed allocations", "managed", "n_allocations", "allocations", format_count),
    _Figure("Managed bytes allocated", "managed", "bytes", "allocations", format_bytes),
)
_HEADS: Final = ("", "A", "B", "B - A", "B / A")
_NO_CAUSE: Final = "unknown"
_MOST_STEPS: Final = 24

_STEP_COLUMNS: Final = {
    "time_ns": format_time,
    "n_fault_rows": format_count,
    "in_bytes": format_bytes,
    "out_bytes": format_bytes,
}


def side_by_side(a: Trace, b: Trace) -> Blocks:
    """Compare the summaries of two traces.

    Parameters
    ----------
    a, b : Trace
        Two traces, whole or filtered; on either side of each difference.

    Returns
    -------
    Blocks
        Which is which, and a table: a figure in each row, of both traces, with difference and ratio. What
        was not recorded has neither.
    """
    documents = (summary(a), summary(b))
    rows = [_row(label, values, write) for label, values, write in _lines(documents)]
    none = [row[0] for row in rows if row[1:3] == ("0", "0") or row[1:3] == ("0 B", "0 B")]
    shown = tuple(row for row in rows if row[0] not in none)
    notes = [f"Neither has any: {', '.join(none)}."] if none else []
    table = Table(_HEADS, shown, (False, *[True] * 4), "", (*notes, _kinds(documents, shown)))
    return Blocks([_which(documents), table, *_doubts(documents)])


def _which(documents: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Points:
    """Say which trace is A and which is B."""
    points = []
    for label, document in zip("AB", documents, strict=True):
        gpus = dict.fromkeys(shortened(d["name"] or "unknown", 40) for d in document["devices"])
        on = f" on {', '.join(gpus)}" if gpus else ""
        kind = "modelled" if _is_modelled(document) else "recorded"
        part = ", a part of it" * (document["windows_ns"] is not None)
        points.append(Point(label, f"{quoted(document['source'])}{on}{part}", kind))
    return Points(tuple(points))


def _is_modelled(document: Mapping[str, Any]) -> bool:
    return bool(document["source_kind"] == MODEL_KIND)


def _lines(
    documents: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> Iterator[tuple[str, tuple[Number | str, ...], Callable[[Any], str]]]:
    """List the figures of both: a label, the values (a text where there is none), and how they are written."""
    for each in _FIGURES:
        yield each.label, tuple(_value(document, each) for document in documents), each.write
    causes = dict.fromkeys(
        cause for document in documents for cause in document["migrations"]["by_cause"] or {}
    )
    for cause in causes:
        values = tuple(_of_cause(document, cause) for document in documents)
        why = "for a cause that is not known" if cause == _NO_CAUSE else f"by {cause_word(cause)}"
        yield f"Moved {why}", values, format_bytes
    for each in _LATER:
        yield each.label, tuple(_value(document, each) for document in documents), each.write


def _value(document: Mapping[str, Any], figure: _Figure) -> Number | str:
    """Give a figure, or say why there is none."""
    found: Number = (document[figure.part] if figure.part else document)[figure.key]
    if found is not None:
        return found
    return _why_not(document, figure.capture)


def _why_not(document: Mapping[str, Any], kind: str) -> str:
    return "not recorded" if document["capture"].get(kind) == "not_recorded" else "unknown"


def _of_cause(document: Mapping[str, Any], cause: str) -> Number | str:
    """Give the bytes of a cause; 0 only where the causes of all copies are known."""
    found = document["migrations"]["by_cause"]
    if found is None:
        return _why_not(document, "migrations")
    if cause not in found:
        return "unknown" if _NO_CAUSE in found else 0
    n_bytes: Number = found[cause]["bytes"]
    return "unknown" if n_bytes is None else n_bytes


def _row(
    label: str, values: tuple[Number | str, ...], write: Callable[[Any], str]
) -> tuple[str, ...]:
    """Write a line: both values, and what can be said of both."""
    a, b = values
    cells = tuple(each if isinstance(each, str) else write(each) for each in values)
    return (label, *cells, *_compared(a, b, write))


def _compared(a: Number | str, b: Number | str, write: Callable[[Any], str]) -> tuple[str, str]:
    """Write difference and ratio; a dash where there is none."""
    if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
        return "-", "-"
    difference = b - a
    sign = "+" * (difference > 0)
    return f"{sign}{write(difference)}", f"{b / a:.3g}" if a else "-"


def _kinds(documents: tuple[Mapping[str, Any], Mapping[str, Any]], rows: tuple[Any, ...]) -> str:
    """Say of which kind the figures of the table are."""
    modelled = [_is_modelled(each) for each in documents]
    if all(modelled):
        return f"Every figure is the model's: both were {MODELLED}."
    shown = {row[0] for row in rows}
    derived = [
        each.label for each in (*_FIGURES, *_LATER) if each.is_derived and each.label in shown
    ]
    said = f"Figures are recorded, but derived: {', '.join(derived)}."
    if any(modelled):
        said += f" Those of {'AB'[modelled.index(True)]} are the model's: it was {MODELLED}."
    return said


_ODD: Final = ("warn", "fail")
"""Findings about a recording that make its figures doubtful."""
_SAID_BY_THE_TABLE: Final = "_recorded"


def _doubts(documents: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Iterator[Block]:
    """Say what makes a comparison doubtful: a faulty recording, or different machines and profilers."""
    for label, document in zip("AB", documents, strict=True):
        for check in document["health"]:
            if check["status"] in _ODD and not check["id"].endswith(_SAID_BY_THE_TABLE):
                yield Text(f"{label}: {check['text']}", "warning")
    for what, found in _settings(documents):
        if found[0] != found[1]:
            said = " and ".join(shortened(each or "unknown", 60) for each in found)
            yield Text(f"They differ in their {what}: {said}.", "note")


def _settings(
    documents: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> Iterator[tuple[str, list[str]]]:
    gpus = [", ".join(str(d["name"]) for d in each["devices"]) for each in documents]
    yield "GPUs", gpus
    for key, what in (
        ("driver_version", "drivers"),
        ("cpu", "CPUs"),
        ("nsys_version", "profilers"),
    ):
        yield what, [each[key] or "" for each in documents]


# Traffic --------------------------------------------------------------------------------------------


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


# Steps ----------------------------------------------------------------------------------------------


def steps_of_two(a: Trace, b: Trace, *, nvtx: str = "") -> Blocks:
    """Compare two traces step by step, the first with the first and so on.

    Parameters
    ----------
    a, b : Trace
        Two traces.
    nvtx : str, default ""
        NVTX range of a step. By default, and where a trace has no such range, what
        :func:`nsan.analysis.attribution.iterations.iterations` finds.

    Returns
    -------
    Blocks
        A table with a step in each row; a text where a trace has no steps, and where it has not the range.
    """
    return Blocks(_steps_table(a, b, nvtx))


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


def _steps_table(a: Trace, b: Trace, nvtx: str) -> Iterator[Block]:
    """Write the steps of both; where one has not the range that was asked for, its steps are looked for."""
    names = [_range_names(each) for each in (a, b)]
    absent = [*_absent(names, nvtx)] if nvtx else []
    if absent:
        yield Text(f"{'; '.join(absent)}. Steps were looked for there.", "note")
    frames = [
        _steps(each, nvtx if nvtx in known else "")
        for each, known in zip((a, b), names, strict=True)
    ]
    without = [label for label, each in zip("AB", frames, strict=True) if each.is_empty()]
    if without:
        said = (
            f"{' and '.join(without)} {'has' if len(without) == 1 else 'have'} no steps: neither an NVTX range nor "
            'a sequence of kernels repeats. Mark them with `nvtxRangePush("step")`, in Python with '
            "`torch.cuda.nvtx.range('step')`."
        )
        yield Text(said, "missing")
        return
    rows = [_step_row(pair) for pair in zip_longest(*(each.to_dicts() for each in frames))]
    notes = [_steps_note(frames), _steps_kind(a, b)]
    if len(rows) > _MOST_STEPS:
        notes.insert(0, f"{counted(len(rows) - _MOST_STEPS, 'more step')}.")
    heads = ["Step"]
    for what in ("Time", "Fault rows", "In", "Out"):
        heads += [f"{what}, A", f"{what}, B", "B / A"]
    yield Table(tuple(heads), tuple(rows[:_MOST_STEPS]), (True,) * len(heads), "", tuple(notes))


def _absent(names: list[list[str]], nvtx: str) -> Iterator[str]:
    """Say which of two has not a range, and which it has instead."""
    for label, known in zip("AB", names, strict=True):
        if not known:
            yield f"{label} has no NVTX range"
        elif nvtx not in known:
            others = few((quoted(each, 40) for each in known), 4)
            yield f"{label} has no NVTX range {quoted(nvtx, 40)}, but {others}"


def _steps(trace: Trace, nvtx: str) -> pl.DataFrame:
    """List the steps of a trace, of the process and GPU that moves most."""
    found = analyse(trace, "iterations", options={"nvtx": nvtx} if nvtx else None)
    steps = found.filter(pl.col("part") == "step").collect()
    parts = steps.partition_by("pid", "device_id", maintain_order=True)
    return max(parts, key=lambda part: int(part["in_bytes"].sum()), default=steps)


def _step_row(pair: tuple[Mapping[str, Any] | None, ...]) -> tuple[str, ...]:
    number = next(each["step_id"] for each in pair if each is not None)
    cells = [str(number)]
    for column, write in _STEP_COLUMNS.items():
        a, b = (None if each is None else each[column] for each in pair)
        cells += ["-" if value is None else write(value) for value in (a, b)]
        cells.append(_compared(a, b, write)[1])
    return tuple(cells)


def _steps_note(frames: list[pl.DataFrame]) -> str:
    said = []
    for label, each in zip("AB", frames, strict=True):
        row = each.row(0, named=True)
        how = "NVTX range" if row["basis"] == "nvtx" else "repeats of the kernels from"
        said.append(f"{label} has {counted(each.height, 'step')} ({how} {quoted(row['name'], 40)})")
    return f"Step n of A against step n of B. {'; '.join(said)}."


def _steps_kind(a: Trace, b: Trace) -> str:
    analysis = find_analysis("iterations")
    kinds = set()
    for each in (a, b):
        of = kinds_of(each, analysis, analyse(each, "iterations").head(0).collect())
        kinds |= {of[column] for column in _STEP_COLUMNS}
    return f"Figures are {' and '.join(sorted(kinds))}."
