"""Bins of time on the common clock of reports, and how much of each Unified Memory covered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from nsan.analysis.intervals import union
from nsan.info import Window
from nsan.memory_budget import check_tables
from nsan.recipe.jobs import WHO, Job, opened
from nsan.recipe.time_tables import RANK_STATS
from nsan.trace import Trace

KINDS: Final = ("migrations", "gpu_faults")
"""Tables whose events are time of Unified Memory."""
_BYTES_PER_ROW: Final = 300
"""Of memory, measured: events of each kind, merged."""
_WORDS: Final = {"migrations": "migrations", "gpu_faults": "batches of GPU faults"}


@dataclass(frozen=True)
class Grid:
    """Bins of one length on the common clock: bin i is [first + i * width, first + (i + 1) * width)."""

    first_ns: int
    width_ns: int
    n: int

    def frame(self) -> pl.DataFrame:
        """Give all bins."""
        start = self.first_ns + pl.col("bin") * self.width_ns
        return pl.DataFrame({"bin": pl.int_range(self.n, eager=True)}).with_columns(
            start_ns=start, end_ns=start + self.width_ns
        )


@dataclass(frozen=True)
class Placed:
    """A report on the common clock: the start of its session, first and last event; the latter null if unknown."""

    offset_ns: int
    first_ns: int | None
    last_ns: int | None


@dataclass(frozen=True)
class Binned:
    """Bins of one report: of all of it, by process and GPU, and its totals."""

    whole: pl.DataFrame
    by_gpu: pl.DataFrame
    totals: pl.DataFrame


def grid_of(placed: Sequence[Placed], bins: int) -> Grid | None:
    """Choose bins that cover what all reports recorded.

    Parameters
    ----------
    placed : sequence of Placed
        Where each report lies on the common clock.
    bins : int
        How many bins.

    Returns
    -------
    Grid or None
        Of whole ns; fewer bins if there are fewer ns than bins. None where no report has a time.
    """
    firsts = [each.first_ns for each in placed if each.first_ns is not None]
    lasts = [each.last_ns for each in placed if each.last_ns is not None]
    if not firsts:
        return None
    first, length = min(firsts), max(1, max(lasts) - min(firsts))
    width = -(-length // bins)
    return Grid(first, width, -(-length // width))


def binned(job: Job, *, grid: Grid) -> Binned:
    """Measure the time of Unified Memory of one report in each bin.

    Parameters
    ----------
    job : Job
        The report, with its place on the common clock.
    grid : Grid
        The bins.

    Returns
    -------
    Binned
        Times are unions: no moment counts twice. Null where rows lack a time, where a kind of event was
        not recorded, and in bins in which the report recorded nothing at all.

    Raises
    ------
    OverBudgetError
        If its events need more memory than may be used.
    """
    (job, trace), at = opened(job), job.place
    events = [trace.reaching_in(kind) for kind in KINDS]
    # The framework has names of its own for the options that choose a part.
    check_tables("uvm_time_map", events, _BYTES_PER_ROW, has_parts=False)
    rows, known = _events(trace, at.offset_ns)
    alive = in_bins(_alive(at, trace.windows), grid)
    return Binned(
        job.named(_filled(rows.drop(_GPU), known, grid, alive)),
        job.named(_filled(rows, known, grid, alive)),
        job.named(_totals(rows, known, at)),
    )


def _events(trace: Trace, offset: int) -> tuple[pl.DataFrame, list[str]]:
    """Merge the events of each kind, process and GPU, on the common clock; say which kinds are known."""
    found, known = [], []
    for kind in KINDS:
        rows = trace.reaching_in(kind)
        n, lacking = (
            rows.select(
                n=pl.len(), lacking=pl.any_horizontal(pl.col("start_ns", "end_ns").is_null()).any()
            )
            .collect()
            .row(0)
        )
        about = trace.info.capture.get(kind)
        is_recorded = n > 0 or (about is not None and about.answer == "recorded")
        if is_recorded and not lacking and "busy" not in trace.info.doubtful:
            known.append(kind)
        merged = union(rows, by=_GPU).collect()
        found.append(_clipped(merged, trace.windows).with_columns(kind=pl.lit(kind)))
    return pl.concat(found).with_columns(pl.col("start_ns", "end_ns") + offset), known


def _clipped(rows: pl.DataFrame, windows: Sequence[Window] | None) -> pl.DataFrame:
    if windows is None:
        return rows
    parts = [
        rows.with_columns(
            pl.col("start_ns").clip(lower_bound=a), pl.col("end_ns").clip(upper_bound=b)
        ).filter(pl.col("start_ns") < pl.col("end_ns"))
        for a, b in windows
    ]
    return pl.concat([rows.clear(), *parts])


def _alive(at: Placed, windows: Sequence[Window] | None) -> pl.DataFrame:
    """Give the time in which the report recorded something, within the windows that were asked for."""
    spans = [] if at.first_ns is None or at.last_ns is None else [(at.first_ns, at.last_ns)]
    frame = pl.DataFrame(spans, schema={"start_ns": pl.Int64, "end_ns": pl.Int64}, orient="row")
    shifted = windows and [(a + at.offset_ns, b + at.offset_ns) for a, b in windows]
    return _clipped(frame, shifted)


_MEASURES: Final = {
    "um_covered_ns": KINDS,
    "migrations_covered_ns": ("migrations",),
    "gpu_faults_covered_ns": ("gpu_faults",),
}
_GPU: Final = ("pid", "device_id")


def _merged(rows: pl.DataFrame, kinds: Sequence[str], by: Sequence[str]) -> pl.DataFrame:
    return union(rows.lazy().filter(pl.col("kind").is_in(kinds)), by=by).collect()


def _shown(known: Sequence[str]) -> pl.Expr:
    """Choose the time that stands for a report: of both kinds, or of the one that is known."""
    return pl.col("um_covered_ns" if len(known) != 1 else f"{known[0]}_covered_ns")


def _filled(
    rows: pl.DataFrame, known: Sequence[str], grid: Grid, alive: pl.DataFrame
) -> pl.DataFrame:
    """Fill the grid for each process and GPU that has events, and for all together."""
    keys = [key for key in _GPU if key in rows.columns]
    cells = rows.select(keys).unique().sort(keys) if keys else pl.DataFrame({"_": [0]})
    found = cells.join(grid.frame(), how="cross").select(*keys, "bin", "start_ns", "end_ns")
    found = found.with_columns(alive=pl.col("bin").is_in(alive["bin"].implode()))
    for name, kinds in _MEASURES.items():
        covered = in_bins(_merged(rows, kinds, keys), grid, by=keys)
        found = found.join(
            covered, on=[*keys, "bin"], how="left", nulls_equal=True, maintain_order="left"
        )
        is_known = pl.col("alive") & set(kinds).issubset(known)
        time = pl.when(is_known).then(pl.col("covered_ns").fill_null(0))
        found = found.with_columns(time.cast(pl.Int64).alias(name)).drop("covered_ns")
    return found.drop("alive").with_columns(
        um_fraction=pl.col("um_covered_ns") / grid.width_ns,
        shown_fraction=_shown(known) / grid.width_ns,
    )


def in_bins(intervals: pl.DataFrame, grid: Grid, *, by: Sequence[str] = ()) -> pl.DataFrame:
    """Measure how much of each bin disjoint intervals cover.

    Parameters
    ----------
    intervals : DataFrame
        ``start_ns``, ``end_ns`` and the columns of ``by``; disjoint within a group.
    grid : Grid
        The bins; what lies outside is left out.
    by : sequence of str
        Groups.

    Returns
    -------
    DataFrame
        ``by``, ``bin`` and ``covered_ns`` (Int64): bins that are covered at all, each once.

    Examples
    --------
    >>> rows = pl.DataFrame({"start_ns": [5, 25], "end_ns": [12, 26]})
    >>> in_bins(rows, Grid(0, 10, 3)).rows()
    [(0, 5), (1, 2), (2, 1)]
    """
    end = grid.first_ns + grid.n * grid.width_ns
    inside = intervals.with_columns(
        pl.col("start_ns").clip(lower_bound=grid.first_ns), pl.col("end_ns").clip(upper_bound=end)
    ).filter(pl.col("start_ns") < pl.col("end_ns"))
    first = (pl.col("start_ns") - grid.first_ns) // grid.width_ns
    last = (pl.col("end_ns") - 1 - grid.first_ns) // grid.width_ns
    pieces = inside.with_columns(bin=pl.int_ranges(first, last + 1)).explode("bin")
    start = grid.first_ns + pl.col("bin") * grid.width_ns
    length = pl.min_horizontal("end_ns", start + grid.width_ns) - pl.max_horizontal(
        "start_ns", start
    )
    return pieces.group_by(*by, "bin").agg(covered_ns=length.sum()).sort(*by, "bin")


def _totals(rows: pl.DataFrame, known: Sequence[str], at: Placed) -> pl.DataFrame:
    row: dict[str, Any] = vars(at) | {"shown": " and ".join(_WORDS[kind] for kind in known)}
    for name, kinds in _MEASURES.items():
        merged = _merged(rows, kinds, ())
        time = int((merged["end_ns"] - merged["start_ns"]).sum())
        row[name] = time if set(kinds).issubset(known) else None
    schema = {name: dtype for name, dtype in RANK_STATS.schema.items() if name not in WHO}
    length = pl.col("last_ns") - pl.col("first_ns")
    length = pl.when(length > 0).then(length)
    return pl.DataFrame([row], schema=schema, orient="row").with_columns(
        um_fraction=pl.col("um_covered_ns") / length, shown_fraction=_shown(known) / length
    )
