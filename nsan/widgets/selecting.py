"""What is selected: the rows in what was picked, else in the window; and what a pick is.

A pick names a kernel, an NVTX range, a driver batch, a cluster or a box of the map. It says which rows
belong to it, where it is, and the facts for the panel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.views.tables import SELECTED
from nsan.errors import UnknownNameError, UsageError
from nsan.text import cause_word, direction_word, shortened
from nsan.units import counted, format_address, format_time
from nsan.widgets import facts
from nsan.widgets.clusters import shown_of, window_of
from nsan.widgets.refaulted import refault_fact

if TYPE_CHECKING:
    from nsan.widgets.clusters import Clusters
    from nsan.widgets.scene import Scene, Span

PICKS: Final = ("kernel", "nvtx", "batch", "cluster", "box")
"""What can be picked."""

MOST_ROWS: Final = 3_000_000
"""More rows than this are not looked at one by one for the panel: it shows sums instead."""

_MARGIN: Final = 0.1
"""Share of its length that is shown on either side of what was picked."""


@dataclass(frozen=True)
class Pick:
    """Something that was picked.

    Attributes
    ----------
    what : str
        One of :data:`PICKS`.
    window : (int, int)
        Its rows start in this half-open time, ns.
    place : (int, int) or None
        Its rows lie here on the map; None: anywhere, or nowhere.
    keys : mapping
        ``pid`` and ``device_id`` of its rows, where it has them.
    thing : mapping
        Its row of the table that it is from.
    batches : DataFrame or None
        Of a cluster: process, GPU and end of its fault rows, whose starts are from ``first_ns`` to
        ``last_ns``. None: time, place and keys say which rows are its own.
    """

    what: str
    window: Span
    place: Span | None
    keys: Mapping[str, int | None]
    thing: Mapping[str, Any]
    batches: pl.DataFrame | None = None

    def rows(self, scene: Scene) -> pl.DataFrame:
        """Return its rows, with what the filters keep.

        Parameters
        ----------
        scene : Scene
            Where it was picked.

        Returns
        -------
        DataFrame
            Columns of ``SELECTED``, in order of start.
        """
        found = rows_in(scene, self.window, self.place)
        pid, device = pl.col("pid"), pl.col("device_id")
        if self.keys.get("pid") is not None:
            found = found.filter(pid == self.keys["pid"])
        if self.keys.get("device_id") is not None:
            # A CPU fault belongs to no GPU.
            found = found.filter((device == self.keys["device_id"]) | device.is_null())
        if self.what == "batch":
            found = found.filter(_of_batch(self.thing))
        if self.batches is not None:
            others = found.filter(pl.col("table") != "gpu_faults")
            rows = pl.concat([_of_batches(scene, self.batches), others])
            found = rows.sort("start_ns", maintain_order=True)
        return found

    def panel(self, scene: Scene) -> facts.Panel:
        """Describe it.

        Parameters
        ----------
        scene : Scene
            Where it was picked.

        Returns
        -------
        dict
            ``title``, ``what``, ``facts``.
        """
        if scene.pyramid.count(self.window, self.place, layers=scene.layers) > MOST_ROWS:
            panel = _summed(self, scene)
        else:
            panel = self._described(scene)
        return {**panel, "facts": [*panel["facts"], *self._refaults(scene)]}

    def _refaults(self, scene: Scene) -> list[facts.Fact]:
        if scene.refaults is None:
            return []
        places = None if self.place is None else _box_places(scene, self.place)[0]
        return [refault_fact(scene.trace, scene.refaults, self.window, self.keys, places)]

    def _described(self, scene: Scene) -> facts.Panel:
        trace, rows = scene.trace, self.rows(scene)
        if self.what == "kernel":
            return facts.kernel_panel(trace, self.thing, rows)
        if self.what == "nvtx":
            return facts.range_panel(trace, self.thing, rows)
        if self.what == "batch":
            return facts.batch_panel(trace, self.thing, rows)
        if self.what == "cluster":
            return facts.cluster_panel(trace, self.thing, rows)
        return facts.box_panel(trace, self.window, *_box_places(scene, self.place), rows)

    def view(self, scene: Scene) -> tuple[Span, Span | None]:
        """Say which part of the trace shows it, with some room around it.

        Parameters
        ----------
        scene : Scene
            Where it was picked.

        Returns
        -------
        (int, int), (int, int) or None
            Time, ns; stretch of the map, None to leave it as it is.
        """
        if self.what == "box":
            return self.window, self.place
        window = shown_of(self.thing) if self.what == "cluster" else self.window
        return _with_room(window, scene.extent), (
            None if self.place is None else _with_room(self.place, scene.places)
        )


def _of_batch(batch: Mapping[str, Any]) -> pl.Expr:
    """Tell the fault rows of a batch from those of batches in service at the same time."""
    own: pl.Expr = pl.col("end_ns") == batch["end_ns"]
    return own | (pl.col("table") != "gpu_faults")


def _of_batches(scene: Scene, batches: pl.DataFrame) -> pl.DataFrame:
    """Return the fault rows of some batches, with what the filters keep."""
    layers = scene.all_events.layers.filter(pl.col("table") == "gpu_faults")["layer"].to_list()
    if scene.layers is not None:
        layers = [layer for layer in layers if layer in scene.layers]
    starts = batches.select(pl.col("first_ns").min(), pl.col("last_ns").max() + 1)
    window = starts.row(0) if batches.height else (0, 1)
    found = scene.pyramid.rows(window, None, layers=layers).select(SELECTED.schema.names())
    keys = ["pid", "device_id", "end_ns"]
    return found.join(batches, on=keys, how="semi", nulls_equal=True, maintain_order="left")


def _with_room(span: Span, whole: Span) -> Span:
    room = max(1, round((span[1] - span[0]) * _MARGIN))
    return max(whole[0], span[0] - room), min(whole[1], span[1] + room)


def _summed(pick: Pick, scene: Scene) -> facts.Panel:
    """Describe what has too many rows to look at each: sums of all processes and GPUs in its time."""
    found = facts.when(scene.trace, *pick.window)
    more = scene.facts(pick.window, scene.strip(pick.window, 1))[1:]
    name = pick.thing.get("name") or pick.what
    note = ["rows", "all in this time, of every process and GPU", ""]
    return {
        "title": shortened(name),
        "what": pick.what,
        "facts": [*found, note, *more],
    }


def rows_in(scene: Scene, window: Span, place: Span | None) -> pl.DataFrame:
    """Return the rows that start in a window and, where one is given, lie in a stretch of the map."""
    found = scene.pyramid.rows(window, place, layers=scene.layers)
    return found.select(SELECTED.schema.names())


def selected(scene: Scene, pick: Pick | None, window: Span, place: Span) -> pl.DataFrame:
    """Return the rows of what is picked, or else those in the window and stretch of the map."""
    if pick is not None:
        return pick.rows(scene)
    return rows_in(scene, window, None if place == scene.places else place)


def pick_of(scene: Scene, asked: Mapping[str, Any], clusters: Clusters | None) -> Pick:
    """Find what was picked.

    Parameters
    ----------
    scene : Scene
        Where.
    asked : mapping
        ``what``, and ``id``, or ``window`` (ns) and ``place`` for a box.
    clusters : Clusters or None
        The clusters, where they are known.

    Returns
    -------
    Pick
        What it is.

    Raises
    ------
    UsageError
        If there is no such thing.
    """
    what = asked.get("what")
    if what not in PICKS:
        raise UnknownNameError("thing to pick called", str(what), PICKS)
    if what == "box":
        return _box(scene, asked)
    if what == "cluster":
        row = _numbered(clusters.rows if clusters else [], what, asked)
        return _cluster(scene, row, clusters.batches_of(row) if clusters else None)
    if what == "kernel":
        row = _row(scene.trace.kernels, scene.intervals.kernels, what, asked)
        return Pick(what, _time(row), None, _keys(row), row)
    if what == "nvtx":
        row = _row(scene.trace.nvtx_ranges, scene.intervals.ranges, what, asked)
        return Pick(what, _time(row), None, {"pid": row["pid"]}, row)
    return _batch(scene, asked)


def _numbered(rows: Any, what: str, asked: Mapping[str, Any]) -> Any:
    number = asked.get("id")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(rows):
        msg = f"There is no {what} with the number {number!r:.20}; there are {len(rows)}."
        raise UsageError(msg)
    return rows[number]


def _row(
    table: pl.LazyFrame, known: pl.DataFrame, what: str, asked: Mapping[str, Any]
) -> dict[str, Any]:
    number = _numbered(range(known.height), what, asked)
    row: dict[str, Any] = table.slice(number, 1).collect().row(0, named=True)
    if row["start_ns"] is None or row["end_ns"] is None:
        raise UsageError(f"This {what} has no time in the capture.")
    return row


def _time(row: Mapping[str, Any]) -> Span:
    return row["start_ns"], max(row["end_ns"], row["start_ns"] + 1)


def _keys(row: Mapping[str, Any]) -> dict[str, int | None]:
    return {"pid": row["pid"], "device_id": row["device_id"]}


def _batch(scene: Scene, asked: Mapping[str, Any]) -> Pick:
    part = scene.intervals.batches
    number = _numbered(range(0 if part is None else part.n_rows), "batch", asked)
    row = {**scene.intervals.batch(number), "kind": "recorded"}
    # Its last copy may begin at the very end.
    return Pick("batch", (row["start_ns"], row["end_ns"] + 1), None, _keys(row), row)


def _cluster(scene: Scene, row: Mapping[str, Any], batches: pl.DataFrame | None) -> Pick:
    place = None
    if row.get("va") is not None and row.get("span_bytes"):
        place = scene.place_of(row["pid"], row["va"], row["span_bytes"])
    return Pick("cluster", window_of(row), place, _keys(row), row, batches)


def _box(scene: Scene, asked: Mapping[str, Any]) -> Pick:
    window = asked.get("window") or scene.extent
    place = asked.get("place")
    return Pick("box", (window[0], window[1]), None if place is None else tuple(place), {}, {})


def _box_places(scene: Scene, place: Span | None) -> tuple[list[Span], list[str]]:
    """Say which addresses a stretch of the map stands for, and which allocations lie there."""
    if place is None:
        return [], []
    runs = scene.all_events.addresses.runs.filter(
        pl.col("place_start") < place[1], pl.col("place_end") > place[0]
    )
    spans = []
    for run in runs.iter_rows(named=True):
        low = max(place[0], run["place_start"]) - run["place_start"]
        high = min(place[1], run["place_end"]) - run["place_start"]
        spans.append((run["va_start"] + low, run["va_start"] + high))
    options = scene.options
    pairs = zip(options.values["allocation"], options.labels["allocation"], strict=True)
    held = [
        label
        for row, label in pairs
        if any(row["va"] < high and low < row["va"] + row["bytes"] for low, high in spans)
    ]
    return spans, held


def hover_lines(scene: Scene, at: tuple[float, float], reach: tuple[float, float]) -> list[str]:
    """Say in a few lines what lies under the pointer.

    Parameters
    ----------
    scene : Scene
        Where.
    at : (float, float)
        Time, ns from the session start, and place, folded bytes.
    reach : (float, float)
        Half the width and height of what counts as under the pointer.

    Returns
    -------
    list of str
        Time, address, allocation, and what is there by kind; harmless text.
    """
    start, end = round(at[0] - reach[0]), round(at[0] + reach[0]) + 1
    low, high = round(at[1] - reach[1]), round(at[1] + reach[1]) + 1
    whole = scene.places
    low, high = max(low, whole[0]), min(max(high, low + 1), whole[1])
    lines = [format_time(round(at[0]))]
    found = scene.all_events.addresses.va_at(min(max(round(at[1]), 0), whole[1] - 1))
    if found is not None:
        pid, va = found
        lines.append(f"{format_address(va)}" + (f" of process {pid}" if pid is not None else ""))
        lines += _box_places(scene, (low, high))[1][:2]
    lines += _running(scene, round(at[0]))
    return lines + _contents(scene, (start, end), (low, high))


def _running(scene: Scene, t: int) -> list[str]:
    """Name what runs at an instant, one line for each lane."""
    lines = []
    for each in scene.lanes:
        if each.pick == "batch":
            continue
        found = each.within((t, t + 1), n_columns=1, most=1)
        lines += [f"{each.label}: {shortened(name, 60)}" for name in found["name"].drop_nulls()]
    return lines


def _contents(scene: Scene, window: Span, place: Span) -> list[str]:
    n = scene.pyramid.count(window, place, layers=scene.layers)
    if not n:
        return ["nothing here"]
    if n > 20_000:
        return [counted(n, "row") + " here"]
    sums = (
        rows_in(scene, window, place)
        .group_by("table", "direction", "cause")
        .agg(
            n=pl.len(),
            n_bytes=pl.col("bytes").cast(pl.Int64).sum(),
            n_unknown=pl.col("bytes").null_count(),
        )
        .sort(["table", "n_bytes", "cause", "direction"], descending=[False, True, False, False])
    )
    lines = []
    for table, direction, cause, rows, size, n_unknown in sums.iter_rows():
        if table == "migrations":
            word = f"{direction_word(direction or '-')}, {cause_word(cause or 'unknown')}"
            lines.append(f"{word}: {facts.size_words(size, rows, n_unknown)}")
        else:
            lines.append(
                counted(rows, "GPU fault row" if table == "gpu_faults" else "CPU page fault")
            )
    return lines
