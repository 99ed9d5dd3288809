"""Whether a trace shows the bytes that its program says must migrate.

A program of the microbenchmark knows, for some phases and allocations, how many bytes migrate whatever
the driver decides (``expected.csv``). A trace of the run that shows others is wrong, or was read wrongly:
by the profiler, or by nsan. Where the trace and the tables cannot be laid side by side, nothing is
judged, and the reason is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from nsan.errors import NsanError
from nsan.info import Capture
from nsan.io.bench_truth import (
    EXPECTED,
    PHASES,
    ExpectedRow,
    PhaseRow,
    Truth,
    TruthError,
    TruthRow,
    read_expected,
    read_phases,
    read_truth,
)
from nsan.io.probe import display_name
from nsan.text import direction_word, shortened
from nsan.trace import MAX_NS, MIN_NS, Trace
from nsan.units import KIB, NS_PER_S, counted, format_bytes
from nsan.uvm.constants import MANAGED_KINDS

NVTX_DOMAIN: Final = "nsan"
"""Domain of the programs' ranges."""

_NEEDED: Final = {
    "migrations": "migrations",
    "nvtx": "NVTX ranges",
    "allocations": "allocations",
}

_APART: Final = 1 << 66
"""Groups lie so far from each other in the key that joins them: farther than addresses reach."""

_WIDE: Final = pl.Int128

_NEAR_NS: Final = NS_PER_S // 1000
"""By how much a migration, whose time is the GPU's, may seem to start before a phase, whose times are the host's."""


class ExpectedError(NsanError):
    """The tables of a run cannot be laid beside its trace; ``problem`` says why."""

    def __init__(self, folder: Path, problem: str) -> None:
        self.folder, self.problem = folder, problem
        super().__init__(
            f"{display_name(folder)}, which should say how many bytes migrate, cannot be compared with the trace: "
            f"{problem}. Copy it again from where the benchmark ran, or run that again."
        )


@dataclass(frozen=True)
class Expectations:
    """What a trace shows of the bytes that must migrate.

    Attributes
    ----------
    n_checked, n_right : int
        Rows of ``expected.csv`` that were compared, and those that the trace agrees with.
    wrong : tuple of str
        One line for each of the others.
    demands_bytes : bool
        Some row demands that something migrates at all; else a trace without migrations is right.
    reason : str
        Why nothing could be compared; empty if all rows were.
    """

    n_checked: int
    n_right: int
    wrong: tuple[str, ...]
    demands_bytes: bool
    reason: str = ""


class _NotComparableError(Exception):
    """Carries the reason to :func:`compared`."""


def compared(trace: Trace, truth: Path) -> Expectations:
    """Compare the migrations of a trace with what its program says must migrate.

    Parameters
    ----------
    trace : Trace
        The whole capture of the run.
    truth : Path
        The tables of the same run, as :func:`nsan.io.bench_truth.truth_beside` finds them.

    Returns
    -------
    Expectations
        All rows compared, or none and the reason.

    Raises
    ------
    ExpectedError
        If a table is missing or damaged.
    """
    try:
        known = read_truth(truth)
        phases = read_phases(truth)
        expected = read_expected(truth, len(phases), len(known.rows))
    except TruthError as error:
        raise ExpectedError(error.folder, error.problem) from error
    demands_bytes = any(row.least_bytes > 0 for row in expected)
    try:
        _check_comparable(trace, known, expected)
        windows = _windows(trace, known.pid, phases)
        cells = _cells(trace, known, windows, expected)
        moved = _moved(_in_windows(_migrations(trace, known), windows), cells)
    except _NotComparableError as why:
        return Expectations(0, 0, (), demands_bytes, str(why))
    wrong = tuple(
        _line(row, n_bytes, known.rows[row.allocation], phases[row.phase])
        for row, n_bytes in zip(expected, moved, strict=True)
        if not row.least_bytes <= n_bytes <= row.most_bytes
    )
    return Expectations(len(expected), len(expected) - len(wrong), wrong, demands_bytes)


def _check_comparable(trace: Trace, truth: Truth, expected: Sequence[ExpectedRow]) -> None:
    status = truth.about.get("status")
    if status != "ok":
        raise _NotComparableError(
            f"the run did not end well (status {shortened(status)!r}), so what it did is not certain"
        )
    if not expected:
        raise _NotComparableError(
            f"{EXPECTED} has no row: nothing that migrates in this run is certain (see `nsan bench list`, "
            "and take --allocator raw without --prefetch and --advice, and arrays of 2 MiB or more that fit)"
        )
    if trace.is_filtered:
        raise _NotComparableError("this is a part of the capture: compare the whole one")
    for kind, word in _NEEDED.items():
        _check_recorded(trace.info.capture.get(kind), word)


def _check_recorded(capture: Capture | None, word: str) -> None:
    if capture is None:
        raise _NotComparableError(f"whether {word} were recorded is not known")
    if capture.answer == "recorded":
        return
    what = (
        f"{word} were not recorded"
        if capture.answer == "not_recorded"
        else f"whether {word} were recorded is not known"
    )
    way_out = f"; `nsys profile {capture.switch}` records them" if capture.switch else ""
    raise _NotComparableError(f"{what}: {capture.reason}{way_out}")


def _cells(
    trace: Trace, truth: Truth, windows: pl.DataFrame, expected: Sequence[ExpectedRow]
) -> pl.DataFrame:
    """Say where and when each expected row looks for migrations.

    One row each: ``cell`` (its number), ``window`` (that of its phase), ``direction``, ``low``, ``high`` (addresses),
    ``start_ns``, ``end_ns`` (the time in which both the phase and the allocation are there).
    """
    lives = _lives(trace, truth, sorted({row.allocation for row in expected}))
    rows = pl.DataFrame(
        {
            "window": [row.phase for row in expected],
            "allocation": [row.allocation for row in expected],
            "direction": [row.direction for row in expected],
            "nothing": [row.most_bytes == 0 for row in expected],
        }
    ).with_row_index("cell")
    return (
        _lent(rows, windows)
        .join(windows, on="window", how="left", maintain_order="left")
        .join(lives, on="allocation", how="left", maintain_order="left")
        .with_columns(
            start_ns=pl.max_horizontal(pl.coalesce("early_ns", "start_ns"), "alloc_ns"),
            end_ns=pl.min_horizontal("end_ns", "until_ns", "free_ns"),
        )
    )


def _lent(rows: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Move the border between a phase that expects nothing and one that follows at once.

    The times of migrations and of phases are of two clocks: what seems to migrate at the end of the first belongs to
    the second. Adds ``early_ns``, from when a row of the second looks, and ``until_ns``, until when one of the first
    does; null: as its phase.
    """
    near = (
        windows.sort("start_ns")
        .with_columns(first=pl.col("window").shift(), after=pl.col("end_ns").shift())
        .filter(pl.col("start_ns") - pl.col("after") < _NEAR_NS)
        .select("window", "first", border=pl.col("start_ns") - _NEAR_NS)
    )
    cell = ["allocation", "direction"]
    asked = rows.group_by("window", *cell).agg(pl.col("nothing").all())
    nothing = asked.filter("nothing").select(*cell, first="window")
    moved = near.join(asked, on="window").join(nothing, on=["first", *cell])
    early = moved.select("window", *cell, early_ns="border")
    until = moved.select(*cell, window="first", until_ns="border")
    for each in (early, until):
        rows = rows.join(each, on=["window", *cell], how="left", maintain_order="left")
    return rows


def _windows(trace: Trace, pid: int, phases: Sequence[PhaseRow]) -> pl.DataFrame:
    """Find the range of each phase: the k-th one of its name for the k-th phase of that name."""
    names = list(dict.fromkeys(phase.name for phase in phases))
    ranges = (
        trace.nvtx_ranges.filter(
            pl.col("pid") == pid, pl.col("domain") == NVTX_DOMAIN, pl.col("name").is_in(names)
        )
        .sort("start_ns", maintain_order=True)
        .select("name", "start_ns", "end_ns", "closed", turn=pl.int_range(pl.len()).over("name"))
        .collect()
    )
    there = Counter(ranges["name"].to_list())
    for name, n_phases in Counter(phase.name for phase in phases).items():
        if there[name] != n_phases:
            raise _NotComparableError(
                f"of process {pid} the capture has {counted(there[name], 'NVTX range')} {shortened(name)!r} in the "
                f"domain {NVTX_DOMAIN}, and {PHASES} says {n_phases}: it is of another run, or not whole"
            )
    if not ranges["closed"].all():
        raise _NotComparableError(f"the capture ends before process {pid} does")
    known = pl.DataFrame({"name": [phase.name for phase in phases]}, schema={"name": pl.String})
    return (
        known.with_columns(turn=pl.int_range(pl.len()).over("name"))
        .with_row_index("window")
        .join(ranges, on=["name", "turn"], how="left", maintain_order="left")
        .select(pl.col("window").cast(pl.Int64), "start_ns", "end_ns")
    )


def _lives(trace: Trace, truth: Truth, wanted: Sequence[int]) -> pl.DataFrame:
    """Find the life of allocations: the k-th one at an address is the program's k-th one there."""
    place = pl.col("va")
    rows = [(i, row.va, row.n_bytes) for i, row in enumerate(truth.rows) if row.kind == "managed"]
    schema = {"allocation": pl.Int64, "va": pl.UInt64, "n_bytes": pl.Int64}
    known = pl.DataFrame(rows, schema=schema, orient="row").with_columns(
        turn=pl.int_range(pl.len()).over(place), n=pl.len().over(place)
    )
    recorded = (
        trace.allocations.filter(pl.col("pid") == truth.pid, pl.col("kind").is_in(MANAGED_KINDS))
        .sort("alloc_ns", maintain_order=True)
        .select("va", "bytes", "alloc_ns", "free_ns")
        .with_columns(turn=pl.int_range(pl.len()).over(place), n_recorded=pl.len().over(place))
        .collect()
    )
    paired = pl.DataFrame({"allocation": wanted}, schema={"allocation": pl.Int64}).join(
        known.join(recorded, on=["va", "turn"], how="left"), on="allocation", how="left"
    )
    same = (pl.col("n") == pl.col("n_recorded")) & (pl.col("bytes") == pl.col("n_bytes"))
    strange = paired.filter(~same.fill_null(value=False))
    if strange.height:
        row = truth.rows[strange["allocation"][0]]
        raise _NotComparableError(
            f"the capture does not have {counted(strange.height, 'allocation')} as {truth.source} says, first "
            f"{shortened(row.name)!r} ({format_bytes(row.n_bytes)} at {row.va:#x}): it is of another run, or not whole"
        )
    low = pl.col("va").cast(_WIDE)
    return paired.select(
        "allocation",
        low=low,
        high=low + pl.col("n_bytes").cast(_WIDE),
        alloc_ns=pl.col("alloc_ns").fill_null(MIN_NS),
        free_ns=pl.col("free_ns").fill_null(MAX_NS),
    )


def _migrations(trace: Trace, truth: Truth) -> pl.DataFrame:
    """Take the migrations of the process; refuse them if one of them lacks what the comparison needs."""
    needed = ("start_ns", "va", "bytes", "direction")
    own = pl.col("pid").is_null() | (pl.col("pid") == truth.pid)
    rows = trace.migrations.filter(own).select("pid", *needed).collect()
    n_lacking = rows.filter(~pl.all_horizontal(pl.all().is_not_null())).height
    if n_lacking:
        raise _NotComparableError(
            f"the capture does not say of {counted(n_lacking, 'migration')} which process, when, where, how much or "
            "in which direction, so that the others would add up to too little"
        )
    return rows.select(
        "start_ns",
        "bytes",
        low=pl.col("va").cast(_WIDE),
        direction=pl.col("direction").cast(pl.String),
    )


def _in_windows(migrations: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Add the ``window`` of the last phase that began before, and once more that of one which begins at once.

    Phases follow each other.
    """
    known = windows.sort("start_ns").select(
        "window", _from="start_ns", _next="window", _next_from=pl.col("start_ns").shift(-1)
    )
    known = known.with_columns(pl.col("_next").shift(-1))
    found = migrations.sort("start_ns").join_asof(known, left_on="start_ns", right_on="_from")
    near = pl.col("_next_from") - pl.col("start_ns") <= _NEAR_NS
    again = found.filter(near).with_columns(window="_next")
    return pl.concat([found, again])


def _moved(migrations: pl.DataFrame, cells: pl.DataFrame) -> list[int]:
    """Add up, for each cell, the bytes inside its addresses of the migrations that start in its time.

    A migration and a cell belong together where they overlap in a key that holds group and address: cells of one
    phase and direction are a group. That is one join of ranges, and gives no pair that does not overlap.
    """
    groups = cells.select("window", "direction").unique().sort("window", "direction")
    groups = groups.with_columns(offset=pl.int_range(pl.len()).cast(_WIDE) * pl.lit(_APART, _WIDE))
    placed = cells.join(groups, on=["window", "direction"], maintain_order="left").select(
        "cell",
        cell_low=pl.col("low") + pl.col("offset"),
        cell_high=pl.col("high") + pl.col("offset"),
        cell_start="start_ns",
        cell_end="end_ns",
    )
    low, size = pl.col("low") + pl.col("offset"), pl.col("bytes").cast(_WIDE)
    rows = migrations.join(groups, on=["window", "direction"]).select(
        "start_ns", low=low, high=low + size
    )
    pairs = rows.join_where(
        placed, pl.col("low") < pl.col("cell_high"), pl.col("high") > pl.col("cell_low")
    ).filter(
        (pl.col("start_ns") >= pl.col("cell_start")) & (pl.col("start_ns") < pl.col("cell_end"))
    )
    inside = pl.min_horizontal("high", "cell_high") - pl.max_horizontal("low", "cell_low")
    sums = pairs.group_by("cell").agg(n_bytes=inside.sum())
    found = cells.select("cell").join(sums, on="cell", how="left", maintain_order="left")
    return [int(n_bytes) for n_bytes in found["n_bytes"].fill_null(0)]


def _line(row: ExpectedRow, n_bytes: int, allocation: TruthRow, phase: PhaseRow) -> str:
    """Write a row that the trace does not agree with."""
    when = shortened(phase.name) + ("" if phase.iteration is None else f" {phase.iteration}")
    bounds = (row.least_bytes, row.most_bytes)
    wanted = " to ".join(_exact(bound) for bound in dict.fromkeys(bounds))
    return (
        f"phase {when}, allocation {shortened(allocation.name)}, {direction_word(row.direction)}: "
        f"{_exact(n_bytes)} in the trace, {wanted} expected"
    )


def _exact(n_bytes: int) -> str:
    """Write bytes for people, and all of them."""
    return f"{format_bytes(n_bytes)} ({n_bytes} B)" if n_bytes >= KIB else f"{n_bytes} B"
