"""What the browser is told once: title, axes, colours, lanes, filters and the overview."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.charts.palette import ACCESSES, CAUSES, Shade
from nsan.errors import UsageError
from nsan.info import MODEL_KIND, MODELLED
from nsan.offline import packed
from nsan.schema import TABLES
from nsan.text import cause_word, shortened
from nsan.units import counted, format_address, format_bytes, format_time
from nsan.widgets.facts import FAULT_WORDS
from nsan.widgets.filters import KEYS, said
from nsan.widgets.names import fitting
from nsan.widgets.scene import BYS, OVERVIEW_COLUMNS, OVERVIEW_SHAPE, Scene
from nsan.widgets.selecting import pick_of
from nsan.widgets.strips import Unsized

if TYPE_CHECKING:
    from nsan.trace import Trace
    from nsan.widgets.clusters import Clusters
    from nsan.widgets.scene import Span

BACKGROUND: Final = ("finding fault clusters", "finding what came back after evictions")
"""What is said while something is computed."""

VERSION: Final = 1
"""Of the protocol between Python and the browser."""

MOST_PANELS: Final = 50
"""Clusters whose facts are in an offline copy."""

MOST_RUNS: Final = 300
"""Runs of addresses that the browser knows one by one."""

_RUN_BYTES: Final = 30_000
"""Bytes of these runs, as sent."""

_RUN: Final = 110
"""Bytes of a run beside its name."""


def trace_of(source: Any) -> Trace:
    """Return the trace of what an explorer was asked to show.

    Parameters
    ----------
    source : Trace, Joined, str or Path
        A trace, what holds one, or the path of one.

    Returns
    -------
    Trace
        The trace.

    Raises
    ------
    UsageError
        If it is something else.
    """
    if isinstance(source, str | Path):
        from nsan.opening import open_trace

        return open_trace(source)
    trace: Any = getattr(source, "trace", source)
    if all(hasattr(trace, name) for name in TABLES):
        return trace  # type: ignore[no-any-return]
    msg = (
        f"The explorer shows a trace, and this is a {type(source).__name__}. "
        "Give what nsan.open_trace(PATH) returns, or the path."
    )
    raise UsageError(msg)


def configuration(scene: Scene, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write what the browser is told.

    Parameters
    ----------
    scene : Scene
        What is shown.
    options : mapping
        ``height`` and ``theme``.

    Returns
    -------
    dict
        Plain containers; every text is harmless and short.
    """
    info, origin = scene.trace.info, scene.origin_ns
    strip = scene.strip(scene.extent, OVERVIEW_COLUMNS)
    return {
        "version": VERSION,
        "title": shortened(info.source),
        "subtitle": _subtitle(scene.trace),
        "kind": "modelled" if info.kind == MODEL_KIND else "recorded",
        "kind_word": "modelled" if info.kind == MODEL_KIND else "recorded",
        "origin_ns": str(origin),
        "extent": [0, scene.extent[1] - origin],
        "places": scene.places[1],
        "runs": _runs(scene),
        "categories": {
            "cause": _shades(CAUSES, words=True),
            "access": _shades(ACCESSES, words=False),
        },
        "bys": [
            {"id": by, "label": _by_label(scene, by), "unit": unit} for by, unit in BYS.items()
        ],
        "scale": dict(BYS),
        "lanes": scene.lane_config(),
        "filters": {key: scene.options.entries(key) for key in KEYS},
        "filters_cut": scene.options.cut(),
        "overview": scene.overview(strip),
        "figures": scene.facts(scene.extent, strip),
        "notes": _notes(scene),
        "offline": False,
        **options,
    }


def _by_label(scene: Scene, by: str) -> str:
    """Name a way to colour; latency is that of fault rows, or of copies where there are none."""
    if by != "latency":
        return by
    return f"latency ({'fault rows' if 'gpu_faults' in scene.all_events.parts else 'copies'})"


def _shades(shades: Mapping[str, Shade], *, words: bool) -> list[dict[str, str]]:
    return [
        {
            "id": name,
            "label": cause_word(name) if words else name,
            "light": shade.light,
            "dark": shade.dark,
        }
        for name, shade in shades.items()
    ]


def _subtitle(trace: Trace) -> str:
    parts = []
    if trace.info.kind == MODEL_KIND:
        parts.append(MODELLED)
    elif trace.info.nsys_version:
        parts.append(f"nsys {shortened(trace.info.nsys_version, 30)}")
    devices = trace.devices.select("name", "total_memory_bytes").unique(maintain_order=True)
    rows = devices.collect().rows()
    for name, size in rows[:2]:
        memory = f", {format_bytes(size)}" if size else ""
        parts.append(f"{shortened(name, 40)}{memory}" if name else "GPU not described")
    if len(rows) > 2:
        parts.append(f"and {counted(len(rows) - 2, 'other kind of GPU', 'other kinds of GPU')}")
    if trace.is_filtered:
        parts.append("a part of the capture")
    return "; ".join(parts)


def _runs(scene: Scene) -> list[dict[str, Any]]:
    """List the runs of addresses; what is beyond the first ones is one run without an address."""
    runs = scene.all_events.addresses.runs
    names = [shortened(name, 60) if name else "" for name in runs["name"].head(MOST_RUNS)]
    most = fitting(names, _RUN_BYTES, _RUN)[0]
    if most < runs.height:
        most -= 1
    found = [
        {
            "start": run["place_start"],
            "end": run["place_end"],
            "va": format_address(run["va_start"]),
            "pid": run["pid"],
            "name": name or None,
        }
        for run, name in zip(runs.head(most).iter_rows(named=True), names, strict=False)
    ]
    if runs.height > most:
        last = {"start": found[-1]["end"], "end": int(runs["place_end"][-1])}
        name = f"{runs.height - most} more runs of addresses"
        found.append({**last, "va": None, "pid": None, "name": name})
    return found


def _part(scene: Scene) -> list[str]:
    """Say which part of a capture this is, where a filter has taken the rest away."""
    if not scene.trace.is_filtered:
        return []
    windows = scene.trace.windows or ()
    if not windows:
        return ["This is a part of the capture, by process or GPU (trace.filter)."]
    start, end = (format_time(side) for side in scene.extent)
    times = f" in {len(windows)} windows of time" if len(windows) > 1 else ""
    return [f"This is a part of the capture: {start} to {end}{times} (trace.filter)."]


def _notes(scene: Scene) -> list[str]:
    """Say what a reader must know: what was not recorded, what is not shown."""
    info, notes = scene.trace.info, _part(scene)
    for kind, what in (("migrations", "Migrations"), *FAULT_WORDS.items()):
        capture = info.capture.get(kind)
        if capture is not None and capture.answer != "recorded":
            answer = "were not recorded" if capture.answer == "not_recorded" else "may be missing"
            switch = f" Record them with {capture.switch}." if capture.switch else ""
            notes.append(f"{what} {answer}.{switch}")
    if scene.all_events.n_without_start:
        rows = counted(scene.all_events.n_without_start, "row")
        notes.append(f"{rows} without a readable start are not shown.")
    unsized = Unsized(scene.all_events).total
    if unsized:
        rows = counted(unsized, "migration")
        notes.append(f"{rows} without a readable size: their bytes are missing in every sum.")
    notes += scene.intervals.left_out()
    notes += [shortened(warning, 200) for warning in info.warnings[:4]]
    filtered = said(scene.filters, scene.options)
    if filtered:
        notes.append("Shown is only: " + "; ".join(filtered) + ".")
    return notes


def offline_views(
    scene: Scene,
    clusters: Clusters | None,
    top: Callable[[Span, str, tuple[int, int]], float] | None = None,
) -> dict[str, Any]:
    """Draw the whole trace in each way to colour, for a copy without Python.

    Parameters
    ----------
    scene : Scene
        What is shown.
    clusters : Clusters or None
        The clusters, where they are known.
    top : callable, optional
        Top of the scale of another view that shares it.

    Returns
    -------
    dict
        ``views`` by way to colour, with deflated buffers, and ``panels`` by number of the cluster.
    """
    views = {}
    for by in BYS:
        high = top(scene.extent, by, OVERVIEW_SHAPE) if top else None
        message, buffers = scene.view(scene.extent, scene.places, by, OVERVIEW_SHAPE, high=high)
        views[by] = {"message": message, "buffers": [packed(each) for each in buffers]}
    rows = clusters.rows[:MOST_PANELS] if clusters else []
    panels = {}
    for number, _ in enumerate(rows):
        picked = pick_of(scene, {"what": "cluster", "id": number}, clusters)
        panels[str(number)] = {**picked.panel(scene), "id": number}
    return {"views": views, "panels": panels}
