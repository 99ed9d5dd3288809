"""Names for the allocations of a capture, out of the tables that the recorded program wrote beside it.

nsys records where and how much a program allocates, and no name. The program knows the name, the
address and the size, and both know the order: the k-th allocation at an address is the same one, if
there are as many in both, all sizes agree, and so do the times. Where they do not, nothing is named.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import polars as pl

from nsan.info import TraceInfo
from nsan.io.bench_truth import Truth, TruthError, read_truth
from nsan.io.source import CaptureSource, Progress, Sink
from nsan.schema import ALLOCATIONS
from nsan.units import NS_PER_S, counted, format_count
from nsan.uvm.constants import MANAGED_KINDS

MOST_APART_NS: Final = 10 * NS_PER_S
"""By how much the clocks of a capture and of its program may differ: both are of one machine."""

_SOONER_NS: Final = NS_PER_S // 20
_LATER_NS: Final = NS_PER_S // 4
"""By how much the time between an allocation and its note may be less, or more, than it mostly is in a run. A program
notes an allocation as soon as it has it; it may be interrupted then."""

_DRIFT: Final = 2000
"""The clocks of a capture and of its program may drift apart by 1 ns in so many (500 ppm)."""

_FAR_NS: Final = 1 << 62
"""No sum of it and a time is more than 64 bits hold."""

_PLACE: Final = ["truth_kind", "va"]
_SCHEMA: Final = {
    "truth_kind": pl.String,
    "va": pl.UInt64,
    "truth_bytes": pl.Int64,
    "truth_name": pl.String,
    "truth_ns": pl.Int64,
}


@dataclass(frozen=True)
class Named:
    """Allocations with the names that could be told.

    Attributes
    ----------
    allocations : DataFrame, ``ALLOCATIONS``
        The rows in their order; names that nsys recorded are kept.
    n_named : int
        Rows that got their name here.
    problem : str
        What could not be told, as a sentence; empty if all could.
    """

    allocations: pl.DataFrame
    n_named: int
    problem: str = ""


def named(allocations: pl.DataFrame, truth: Truth, session_start_utc_ns: int | None) -> Named:
    """Give allocations the names under which the program knows them.

    Parameters
    ----------
    allocations : DataFrame, ``ALLOCATIONS``
        Of the capture.
    truth : Truth
        What the program says.
    session_start_utc_ns : int, optional
        When the times of the capture begin.

    Returns
    -------
    Named
        An allocation whose place has other sizes, times, or another number of allocations, in the capture than
        the program says gets no name; nor does any if process or time show that the run is another one.
    """
    if not truth.rows:
        return Named(allocations, 0)
    paired = _in_time(_paired(_placed(allocations, truth.pid), _known(truth)))
    problem = _other_run(allocations, paired, truth, session_start_utc_ns)
    if problem:
        return Named(allocations, 0, problem)
    fits = pl.col("fits") & pl.col("name").is_null()
    names = paired.with_columns(name=pl.when(fits).then("truth_name").otherwise("name"))
    result = names.select(ALLOCATIONS.schema.keys())
    return Named(result, int(paired.select(fits.sum()).item()), _unnamed(paired, truth))


def _known(truth: Truth) -> pl.DataFrame:
    """Count the program's allocations at each place, in their order."""
    rows = [(row.kind, row.va, row.n_bytes, row.name, row.alloc_ns) for row in truth.rows]
    known = pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    known = known.sort("truth_ns", maintain_order=True)
    return known.with_columns(
        turn=pl.int_range(pl.len()).over(_PLACE), n_known=pl.len().over(_PLACE).cast(pl.Int64)
    )


def _placed(allocations: pl.DataFrame, pid: int) -> pl.DataFrame:
    """Count the allocations of a process at each place, in the order of the capture, which is by time."""
    kind = (
        pl.when(pl.col("kind").is_in(MANAGED_KINDS))
        .then(pl.lit("managed"))
        .when(pl.col("kind") == "device")
        .then(pl.lit("device"))
    )
    own = pl.when(pl.col("pid") == pid).then(kind)
    return allocations.with_columns(truth_kind=own).with_columns(
        turn=pl.int_range(pl.len()).over(_PLACE), n_recorded=pl.len().over(_PLACE).cast(pl.Int64)
    )


def _paired(placed: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """Put the program's row beside each of the capture's; ``fits`` says that all of the place agree."""
    joined = placed.join(known, on=[*_PLACE, "turn"], how="left", maintain_order="left")
    same = (pl.col("n_recorded") == pl.col("n_known")) & (pl.col("bytes") == pl.col("truth_bytes"))
    alike = same.fill_null(value=False).all().over(_PLACE)
    return joined.with_columns(fits=alike & pl.col("truth_kind").is_not_null())


def _in_time(paired: pl.DataFrame) -> pl.DataFrame:
    """Take back ``fits`` where a time does not agree: the capture has another allocation of that place and size.

    Both clocks run nearly alike, so that the time from an allocation to its note is nearly the same in all of a run,
    whatever the clocks show. A place that was used once, here and there, has no other allocation: some programs note
    all of a model when it is there, and :func:`_other_run` judges such times.
    """
    apart = pl.col("alloc_ns") - pl.col("truth_ns")
    fitting = paired.filter("fits")
    usual, middle = fitting.select(
        apart.median().cast(pl.Int64).alias("usual"),
        pl.col("truth_ns").median().cast(pl.Int64).alias("middle"),
    ).row(0)
    drift = (pl.col("truth_ns") - (middle or 0)).abs() // _DRIFT
    agrees = (apart - (usual or 0)).is_between(-_LATER_NS - drift, _SOONER_NS + drift)
    agrees |= pl.col("n_known") == 1
    return paired.with_columns(
        fits=(pl.col("fits") & agrees).fill_null(value=False).all().over(_PLACE) & pl.col("fits")
    )


def _other_run(
    allocations: pl.DataFrame, paired: pl.DataFrame, truth: Truth, session_start_utc_ns: int | None
) -> str:
    """Say why the tables are of another run than the capture; empty if nothing speaks for it."""
    pids = allocations["pid"].drop_nulls().unique()
    if len(pids) and truth.pid not in pids:
        return (
            f"{truth.source} beside this capture is of another run: its process {truth.pid} has no allocation "
            "here. Allocations have no name from it."
        )
    begun = truth.start_utc_ns
    if begun is None or session_start_utc_ns is None:
        return ""
    # Some note an allocation only when all of a model is there: it was made after the program began, and
    # before the note.
    offset = min(max(session_start_utc_ns - begun, -_FAR_NS), _FAR_NS)
    recorded = pl.col("alloc_ns") + offset
    outside = pl.max_horizontal(-recorded, recorded - pl.col("truth_ns"))
    apart = paired.filter("fits").select(outside.max()).item()
    if apart is None or apart <= MOST_APART_NS:
        return ""
    return (
        f"{truth.source} beside this capture is of another run: the times of its allocations are "
        f"{apart / NS_PER_S:.0f} s away. Allocations have no name from it."
    )


def _unnamed(paired: pl.DataFrame, truth: Truth) -> str:
    """Say which of the program's allocations were not found as it says."""
    n_known = len(truth.rows)
    if paired.is_empty():
        return (
            f"{truth.source} names {counted(n_known, 'allocation')}, and the capture has none: if it was not "
            "switched on, `nsys profile --cuda-memory-usage=true` records them."
        )
    there = paired.drop_nulls("truth_kind").select("truth_kind", "va", "fits").unique()
    of_program = _known(truth).join(there, on=_PLACE, how="left")
    differ = of_program.filter(~pl.col("fits")).height
    # Not every kind of allocation on the GPU is recorded; managed memory is.
    absent = of_program.filter(pl.col("fits").is_null() & (pl.col("truth_kind") == "managed"))
    parts = [f"{format_count(differ)} differ from it in size, time or number"] if differ else []
    parts += [f"{format_count(absent.height)} are not in it"] if absent.height else []
    if not parts:
        return ""
    return (
        f"Of the {format_count(n_known)} allocations that {truth.source} names in this capture, "
        f"{' and '.join(parts)}: these have no name from it."
    )


class NamedSource:
    """A capture whose allocations get names on their way; otherwise what it was.

    Parameters
    ----------
    opened : context manager of CaptureSource
        The capture; entered and left with this one.
    truth : Truth or TruthError
        What its program says, or why that cannot be used.
    """

    def __init__(
        self, opened: AbstractContextManager[CaptureSource], truth: Truth | TruthError
    ) -> None:
        self._opened = opened
        self._truth = truth
        self._names: str | None = None
        self._problem = str(truth) if isinstance(truth, TruthError) else ""

    def __enter__(self) -> Self:
        self._source = self._opened.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, tb)

    def n_source_rows(self) -> int:
        """Estimate the rows to read, for progress."""
        return self._source.n_source_rows()

    def copy_tables(self, sink: Sink, progress: Progress) -> None:
        """Hand every table to a sink; that of allocations last, as its names need the clock of the capture."""
        held: list[tuple[int, pl.DataFrame]] = []

        def pass_on(name: str, number: int, frame: pl.DataFrame) -> None:
            if name == ALLOCATIONS.name:
                held.append((number, frame))
            else:
                sink(name, number, frame)

        self._source.copy_tables(pass_on, progress)
        for number, frame in held:
            sink(ALLOCATIONS.name, number, self._with_names(frame))

    def _with_names(self, frame: pl.DataFrame) -> pl.DataFrame:
        if isinstance(self._truth, TruthError):
            return frame
        found = named(frame, self._truth, self._source.info().session_start_utc_ns)
        self._names = self._truth.source if found.n_named else None
        self._problem = found.problem
        return found.allocations

    def info(self) -> TraceInfo:
        """Describe the capture, and say where its names come from."""
        info = self._source.info()
        warnings = [*info.warnings, *filter(None, [self._problem])]
        return replace(info, warnings=warnings, allocation_names=self._names)


def with_names(opened: AbstractContextManager[CaptureSource], folder: Path) -> NamedSource:
    """Open a capture so that its allocations have the names that its program gave them.

    Parameters
    ----------
    opened : context manager of CaptureSource
        The capture.
    folder : Path
        What :func:`nsan.io.bench_truth.truth_beside` found.

    Returns
    -------
    NamedSource
        The capture with names; if the folder is damaged, the capture as it is, whose info says so.
    """
    truth: Truth | TruthError
    try:
        truth = read_truth(folder)
    except TruthError as error:
        truth = error
    return NamedSource(opened, truth)
