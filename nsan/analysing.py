"""One way to run any analysis on a trace or snapshot: by name, with options, a user's own like nsan's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import polars as pl

from nsan.analysis.catalog import Analysis, find
from nsan.analysis.costs import check_cost, rows_held, rows_read, takes_places_apart
from nsan.analysis.result import KIND, Figure
from nsan.errors import OverBudgetError, UsageError
from nsan.info import MODEL_KIND
from nsan.plugins import own_analyses
from nsan.schema import TABLES

if TYPE_CHECKING:
    from nsan.analysis.catalog import Subject
    from nsan.joined import Joined
    from nsan.snapshot import Snapshot
    from nsan.trace import Trace

    Source: TypeAlias = Trace | Snapshot | Joined


def analyse(
    source: Source,
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> pl.LazyFrame:
    """Run an analysis on a trace, on a memory snapshot or on both joined.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        A whole trace, what :meth:`nsan.Trace.filter` left of it, a snapshot of PyTorch's allocator, or
        what :func:`nsan.join` made of both: on that run the analyses of each, too.
    name : str
        Name of the analysis, as listed by ``nsan analyse --list``.
    options : mapping, optional
        Values for its options.
    plugins : iterable of str or Path
        Python files with analyses of your own.

    Returns
    -------
    LazyFrame
        The result; nothing is computed before it is collected.

    Raises
    ------
    NsanError
        If there is no such analysis or option, it is about the other kind of source, or a plug-in
        cannot be used.

    Examples
    --------
    >>> import nsan
    >>> trace = nsan.open_trace("sample_data/um_vector_add_rtx4060l.sqlite")  # doctest: +SKIP
    >>> nsan.analyse(trace, "batches").collect().height  # doctest: +SKIP
    12
    """
    return run_analysis(source, find(name, own_analyses(plugins)), options)


_CONTEXT: Final = ("kernels", "copies", "memsets")
"""Tables that say what ran meanwhile: a window keeps the rows that reach into it."""

_NEEDS: Final[dict[str, str]] = {
    r"^n_(inclusive_)?(fault_rows|page_faults)$": "gpu_faults",
    r"^(n_(shared_)?first_touch|n_first_touch_avoided(_error)?|n_dead_rows)$": "gpu_faults",
    r"^(first_touch_ns|fault_rows_per_alloc)$": "gpu_faults",
    r"^(n_managed_(allocs|frees)|fault_rows_per_alloc)$": "allocations",
    r"^n_(lowest_page_rows|read_rows|write_rows|atomic_rows|other_rows|full)$": "gpu_faults",
    r"^n_(inclusive_)?cpu_faults$": "cpu_faults",
}
"""Figures that count rows of a table: where it was not recorded they are unknown, never 0."""

_SPLIT: Final = r"^(in_|out_)?(coherence|prefetch|user|eviction|evicted)_bytes$|^inclusive_evicted_bytes$|^n_(faulted|distinct)_pages$|^n_(gpu|cpu)_copies$"
"""Figures that tell causes apart: where no cause was recorded they are unknown."""


def run_analysis(
    source: Source, analysis: Analysis, options: Mapping[str, Any] | None = None
) -> pl.LazyFrame:
    """Run an analysis that was found already; see :func:`analyse`.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        A whole trace, a part of one, a snapshot, or both joined.
    analysis : Analysis
        What to run.
    options : mapping, optional
        Values for its options.

    Returns
    -------
    LazyFrame
        The result. Counts of rows that were not recorded are null, never 0.

    Raises
    ------
    UsageError
        If the analysis needs the whole capture and the trace is a part of it, or it is about the
        other kind of source.
    OverBudgetError
        If it would need more memory than may be used.
    """
    mine = subject_of(source)
    if mine == "joined" and analysis.subject != "joined":
        return run_analysis(_half(cast("Joined", source), analysis), analysis, options)
    if analysis.subject != mine:
        msg = f"{analysis.name} reads {_NAMED[analysis.subject]}, and {source.info.source} is {_NAMED[mine]}."
        raise UsageError(msg + _HOW_TO_JOIN * (analysis.subject == "joined"))
    tables = {table: getattr(source, table) for table in analysis.reads}
    if mine == "snapshot":
        return analysis.run(tables, options)
    trace = cast("Joined", source).trace if mine == "joined" else cast("Trace", source)
    _check_whole(trace, analysis)
    _check_cost(trace, analysis)
    return _run_on_trace(trace, analysis, tables, options)


def _check_whole(trace: Trace, analysis: Analysis) -> None:
    """Refuse a part of a capture where only the whole tells."""
    if analysis.whole and trace.is_filtered:
        msg = (
            f"{analysis.name} needs the whole capture: what came before, or from elsewhere, decides. Ask "
            "without filters; the rows name their process and GPU."
        )
        raise UsageError(msg)


def _check_cost(trace: Trace, analysis: Analysis) -> None:
    """Refuse an analysis that would not fit into memory; rows are counted only where that decides."""
    known = trace.capture_totals
    if known is not None:
        try:
            check_cost(analysis, rows_read(analysis, known["counts"]))
        except OverBudgetError:
            if not trace.is_filtered and not takes_places_apart(analysis):
                raise
        else:
            return
    tables = {table: getattr(trace, table) for table in analysis.reads if table in TABLES}
    check_cost(analysis, rows_held(analysis, tables))


def _half(joined: Joined, analysis: Analysis) -> Source:
    """Choose the half of a join that an analysis is about."""
    if analysis.subject == "trace":
        return joined.trace
    if joined.snapshot is None:
        msg = f"{analysis.name} reads {_NAMED['snapshot']}, and {joined.info.source} was joined with none."
        raise UsageError(msg)
    return joined.snapshot


_NAMED: Final = {
    "trace": "a trace of nsys",
    "snapshot": "a memory snapshot of PyTorch",
    "joined": "a trace joined with the memory snapshot of the same run",
}
_HOW_TO_JOIN: Final = " Give both: `--snapshot FILE`, or nsan.join(trace, snapshot)."


def subject_of(source: Source) -> Subject:
    """Say what a source is.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        What was opened.

    Returns
    -------
    str
        "trace", "snapshot" or "joined", as :attr:`nsan.analysis.catalog.Analysis.subject`.
    """
    if hasattr(source, "trace"):
        return "joined"
    return "snapshot" if hasattr(source, "allocator_events") else "trace"


def _run_on_trace(
    trace: Trace,
    analysis: Analysis,
    tables: dict[str, pl.LazyFrame],
    options: Mapping[str, Any] | None,
) -> pl.LazyFrame:
    if trace.windows is not None:
        tables |= {table: trace.reaching_in(table) for table in _CONTEXT if table in analysis.reads}
    found = analysis.run(tables, options)
    unknown = unknown_columns(trace, analysis)
    return found.with_columns(
        pl.lit(None, dtype).alias(name)
        for name, dtype in analysis.result.schema.items()
        if name in unknown
    )


def unknown_columns(trace: Trace, analysis: Analysis) -> set[str]:
    """Name the figures of an analysis that a capture cannot give.

    Parameters
    ----------
    trace : Trace
        The capture.
    analysis : Analysis
        Whose columns.

    Returns
    -------
    set of str
        Columns that count rows of a table that was not recorded, or that split by cause where no
        cause was recorded.
    """
    capture = trace.info.capture
    absent = {kind for kind, found in capture.items() if found.answer != "recorded"}
    patterns = [pattern for pattern, table in _NEEDS.items() if table in absent]
    if trace.info.kind == "nvprof-text":
        patterns.append(_SPLIT)
    own = {column.name for column in analysis.result.columns}
    return {name for name in own if any(re.match(pattern, name) for pattern in patterns)}


def kinds_of(source: Source, analysis: Analysis, found: pl.DataFrame) -> dict[str, str]:
    """Say of which kind each column of a result is.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        Where it is from: every figure of what the model made is modelled.
    analysis : Analysis
        What gave it.
    found : DataFrame
        The result; where a column of it says the kind row by row, the rows decide.

    Returns
    -------
    dict of str to str
        By column: "recorded", "derived", "reconstructed" or "modelled"; of rows of two kinds the less
        certain one.
    """
    if source.info.kind == MODEL_KIND:
        return {column.name: "modelled" for column in analysis.result.columns}
    kinds = {column.name: str(column.kind) for column in analysis.result.columns}
    inferred = [
        column
        for column in analysis.result.columns
        if column.dtype == KIND
        and column.name in found.columns
        and (found[column.name] == "reconstructed").any()
    ]
    for each in inferred:
        for column in analysis.result.columns:
            if _governs(each, column):
                kinds[column.name] = "reconstructed"
    return kinds


def _governs(kind: Figure, column: Figure) -> bool:
    """Say whether a column that says the kind row by row speaks of another."""
    if not kind.governs:
        return column.unit not in {"id", "label"}
    # What is copied from the file stays so, whatever the inference beside it is worth.
    inferred = column.kind != "recorded" and column.dtype != KIND
    return inferred and re.match(kind.governs, column.name) is not None


def parse_options(analysis: Analysis, texts: Iterable[str]) -> dict[str, Any]:
    """Read options written as ``NAME=VALUE``; the default says what type a value is of.

    Parameters
    ----------
    analysis : Analysis
        Whose options.
    texts : iterable of str
        One per option.

    Returns
    -------
    dict
        Values by name.

    Raises
    ------
    UsageError
        If a text is no option of the analysis.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in analysis.options:
            known = ", ".join(f"{key}={_written(each)}" for key, each in analysis.options.items())
            msg = f"{text!r} sets no option of {analysis.name}. Options and defaults: {known or 'none'}."
            raise UsageError(msg)
        found[name] = _parsed(analysis, name, value.strip())
    return found


def _written(value: object) -> str:
    return "" if value is None else str(value)


def _parsed(analysis: Analysis, name: str, text: str) -> Any:
    default = analysis.options[name]
    try:
        if isinstance(default, bool):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                text.lower()
            ]
        if isinstance(default, int):
            return int(text.replace("_", ""))
        if isinstance(default, float):
            return float(text)
    except (ValueError, KeyError) as error:
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        msg = f"{name}={text!r}: {name} of {analysis.name} is {kind} (default {default})."
        raise UsageError(msg) from error
    return text
