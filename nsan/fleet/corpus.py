"""An open corpus: every table of every report as one lazy frame, and each report as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from nsan.corpus_errors import BrokenCorpusError
from nsan.errors import UnknownNameError, UsageError
from nsan.fleet.finding import in_order
from nsan.fleet.member import Failure, Member
from nsan.info import TraceInfo
from nsan.io.corpus import FailedRecord, Record, check_corpus, read_records
from nsan.io.corpus_frames import corpus_table, report_table
from nsan.io.corpus_place import CorpusPlace, place_at
from nsan.schema import TABLES
from nsan.text import safe
from nsan.trace import Trace

_REPORTS = pl.Schema(
    {
        "run": pl.String,
        "rank": pl.Int64,
        "source": pl.String,
        "kind": pl.String,
        "nsys_version": pl.String,
        "session_start_utc_ns": pl.Int64,
        "n_rows": pl.Int64,
        "bytes": pl.Int64,
        "nsan_version": pl.String,
    }
)


@dataclass(frozen=True, repr=False)
class Corpus:
    """Many reports as typed lazy frames.

    Attributes
    ----------
    gpu_faults, cpu_faults, migrations, copies, memsets, kernels, driver_events, api_calls, nvtx_ranges, \
nvtx_marks, allocations, devices, processes, diagnostics : LazyFrame
        As of a :class:`nsan.Trace`, with ``run``, ``rank`` and ``source`` before the columns of the
        table. Ids, times and addresses mean something within one report only.
    reports : DataFrame
        One row per report: ``run``, ``rank``, ``source``, what wrote it, rows and bytes.
    members : tuple of Member
        What is known about each report, in the same order.
    failures : tuple of Failure
        Reports that the last import could not read.
    """

    gpu_faults: pl.LazyFrame
    cpu_faults: pl.LazyFrame
    migrations: pl.LazyFrame
    copies: pl.LazyFrame
    memsets: pl.LazyFrame
    kernels: pl.LazyFrame
    driver_events: pl.LazyFrame
    api_calls: pl.LazyFrame
    nvtx_ranges: pl.LazyFrame
    nvtx_marks: pl.LazyFrame
    allocations: pl.LazyFrame
    devices: pl.LazyFrame
    processes: pl.LazyFrame
    diagnostics: pl.LazyFrame
    reports: pl.DataFrame
    members: tuple[Member, ...]
    failures: tuple[Failure, ...]
    _place: CorpusPlace
    _records: tuple[Record, ...]

    def __repr__(self) -> str:
        n_runs = len({member.run for member in self.members})
        return f"<Corpus {safe(self._place.address)}, {len(self.members)} reports, {n_runs} runs>"

    def trace(self, run: str, rank: int | None = None, *, source: str | None = None) -> Trace:
        """Return one report as a trace, for every analysis that there is.

        Parameters
        ----------
        run : str
            Its run.
        rank : int, optional
            Its rank; None is a report without one.
        source : str, optional
            Its name, where a run has several reports of that rank.

        Returns
        -------
        Trace
            As :func:`nsan.open_trace` gives it.

        Raises
        ------
        UnknownNameError
            If there is no such report; the message lists those of the run.
        UsageError
            If there are several.
        """
        of_run = [record for record in self._records if record.run == run]
        if not of_run:
            runs = sorted({record.run for record in self._records})
            raise UnknownNameError("run", run, runs)
        found = [r for r in of_run if r.rank == rank and source in {None, r.source}]
        if not found:
            there = [f"{record.rank} ({record.source})" for record in of_run]
            raise UnknownNameError(f"report of run {run!r} and rank", str(rank), there)
        if len(found) > 1:
            names = ", ".join(record.source for record in found[:10])
            msg = f"Run {run!r} has {len(found)} reports of rank {rank}: give source=, one of {names}."
            raise UsageError(msg)
        record = found[0]
        frames: dict[str, Any] = {
            table: report_table(self._place, record, table) for table in TABLES
        }
        info = TraceInfo.from_dict(record.info)
        return Trace(**frames, info=info, capture_totals=record.totals)


def open_corpus(place: str | Path) -> Corpus:
    """Open a corpus that `nsan import` made of many reports.

    Parameters
    ----------
    place : str or Path
        Its folder, or a URL that fsspec knows, as ``s3://bucket/fleet``.

    Returns
    -------
    Corpus
        Lazy frames over all reports. Filters on run and rank leave the files of others unopened.

    Raises
    ------
    NsanError
        If there is no corpus, or it is not whole; the message says what helps.

    Examples
    --------
    >>> import nsan
    >>> corpus = nsan.open_corpus("fleet")  # doctest: +SKIP
    >>> corpus.migrations.group_by("run", "rank").agg(bytes=pl.col("bytes").sum())  # doctest: +SKIP
    >>> nsan.summary(corpus.trace("monday/train", 3))  # doctest: +SKIP
    """
    at, records, failed = _read(place)
    frames: dict[str, Any] = {table: corpus_table(at, records, table) for table in TABLES}
    return Corpus(
        **frames,
        reports=_reports(records),
        members=tuple(map(_member, records)),
        failures=tuple(map(_failure, failed)),
        _place=at,
        _records=tuple(records),
    )


def members_of(place: str | Path) -> tuple[tuple[Member, ...], tuple[Failure, ...]]:
    """Return what a corpus knows about its reports.

    Parameters
    ----------
    place : str or Path
        As for :func:`open_corpus`.

    Returns
    -------
    tuple of Member
        Reports, in order.
    tuple of Failure
        Reports that the last import could not read.

    Raises
    ------
    NsanError
        If there is no corpus, or it is not whole.
    """
    _, records, failed = _read(place)
    return tuple(map(_member, records)), tuple(map(_failure, failed))


def _read(place: str | Path) -> tuple[CorpusPlace, list[Record], list[FailedRecord]]:
    at = place_at(place)
    check_corpus(at)
    records, failed, unusable = read_records(at, at.sizes())
    if unusable:
        more = f", and {len(unusable) - 1} more like it" if len(unusable) > 1 else ""
        raise BrokenCorpusError(at.address, f"{unusable[0]}{more}")
    records.sort(key=_order)
    failed.sort(key=_order)
    return at, records, failed


def _order(each: Record | FailedRecord) -> tuple[str, bool, int, str]:
    return in_order(each.run, each.rank, each.source)


def _member(record: Record) -> Member:
    return Member(record.run, record.rank, record.source, record.info, record.totals)


def _failure(failed: FailedRecord) -> Failure:
    return Failure(failed.run, failed.rank, failed.source, failed.reason)


def _reports(records: list[Record]) -> pl.DataFrame:
    rows = [
        {
            "run": record.run,
            "rank": record.rank,
            "source": record.source,
            "kind": record.info["kind"],
            "nsys_version": record.info["nsys_version"],
            "session_start_utc_ns": record.info["session_start_utc_ns"],
            "n_rows": record.n_rows,
            "bytes": sum(record.files.values()),
            "nsan_version": record.nsan_version,
        }
        for record in records
    ]
    return pl.DataFrame(rows, schema=_REPORTS)
