"""What the model did beside what nsan infers of the trace that it wrote: how far the inferences hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.catalog import find
from nsan.errors import NsanError
from nsan.info import MODEL_KIND
from nsan.model.profiles import host_profile
from nsan.report.blocks import Text
from nsan.report.sections.saying import table_of
from nsan.report.shown import Blocks
from nsan.schema import GPU_FAULTS
from nsan.tabular.text import Field
from nsan.units import format_bytes, format_count

if TYPE_CHECKING:
    from nsan.report.report import Report

_FOLDER: Final = "truth"
_ABOUT: Final = "model.json"
_FIELDS: Final = (
    Field("what", "What", str, right=False),
    Field("model", "The model did", str),
    Field("nsan", "nsan infers", str),
    Field("from_", "From", str, right=False),
)

_OUTCOMES: Final = (
    # First touches and remote mappings look alike in rows, so these are compared together.
    (
        "copied nothing, not throttled",
        ("first_touch", "remote_map", "stale"),
        ("first_touch", "stale", "unknown"),
    ),
    ("were held back (throttled)", ("throttled",), ("throttled",)),
)
"""What batches did, and by which outcomes the model and nsan know it."""


@dataclass(frozen=True)
class _Pair:
    """A figure of the model and nsan's own, as text; from what nsan infers it."""

    what: str
    model: str
    nsan: str
    from_: str


def compared(report: Report) -> Blocks:
    """Put what the model did beside what nsan infers, where the model's own record lies beside the trace.

    Parameters
    ----------
    report : Report
        The report.

    Returns
    -------
    Blocks
        A table; nothing for a recorded trace, for a part of one, or without the record.
    """
    folder = report.path.parent / _FOLDER
    if report.trace.info.kind != MODEL_KIND or report.is_part or not folder.is_dir():
        return Blocks()
    try:
        rows = [vars(pair) for pair in _pairs(report, folder) if _tells(pair)]
    except (OSError, ValueError, LookupError, NsanError, pl.exceptions.PolarsError) as error:
        return Blocks(
            [Text(f"The model's own record cannot be read: {type(error).__name__}.", "warning")]
        )
    if not rows:
        return Blocks()
    note = (
        "The model's figures are from its own record of the run, which a real trace does not have."
    )
    return Blocks([table_of(rows, _FIELDS, "How far the inferences hold: the model knows", note)])


def _tells(pair: _Pair) -> bool:
    return {pair.model, pair.nsan} != {"0"}


def _pairs(report: Report, folder: Path) -> Iterator[_Pair]:
    """List the figures that both have."""
    about = json.loads((folder.parent / _ABOUT).read_text(encoding="utf-8"))
    if _has(folder, "batches"):
        yield from _batches(report, folder)
    if _has(folder, "evictions", "refaults"):
        yield from _evictions(report, folder)
    if _has(folder, "ping_pong"):
        yield from _bounces(report, folder, about)
    yield from _factor(report, about)


def _has(folder: Path, *tables: str) -> bool:
    """Say whether the record has these tables: a small sample may ship a part of it."""
    return all((folder / f"{table}.parquet").is_file() for table in tables)


def _true(folder: Path, table: str) -> pl.LazyFrame:
    return pl.scan_parquet(folder / f"{table}.parquet", glob=False)


def _count(frame: pl.LazyFrame) -> int:
    return int(frame.select(pl.len()).collect().item())


def _batches(report: Report, folder: Path) -> Iterator[_Pair]:
    """Compare batches and what became of them, with fault rows and without."""
    true = _true(folder, "batches")
    known = dict(true.group_by("outcome").agg(pl.len()).collect().iter_rows())
    if report.is_recorded("gpu_faults"):
        outcomes = report.frame("batch_latency").group_by("outcome").agg(pl.col("n_batches").sum())
        seen = dict(outcomes.iter_rows())
        yield _counts("Batches", sum(known.values()), sum(seen.values()), "fault rows")
        for what, in_model, in_rows in _OUTCOMES:
            n_model, n_seen = (
                sum(counts.get(key, 0) for key in keys)
                for counts, keys in ((known, in_model), (seen, in_rows))
            )
            yield _counts(f"Batches that {what}", n_model, n_seen, "fault rows and copies")
    tables = {"gpu_faults": GPU_FAULTS.empty(), "migrations": report.trace.migrations}
    found = _count(find("batches").run(tables))
    yield _counts("Batches that copied", known.get("data", 0), found, "copies alone")


def _evictions(report: Report, folder: Path) -> Iterator[_Pair]:
    """Compare evictions and what came back."""
    true = (
        _true(folder, "evictions")
        .select(n=pl.len(), bytes=pl.col("copied_bytes").sum())
        .collect()
        .row(0, named=True)
    )
    if not true["n"]:
        return
    seen = report.frame("refault_totals")
    yield _counts("Evictions", true["n"], int(seen["n_evictions"].sum()), "copies")
    left, back = (int(seen[name].sum()) for name in ("evicted_bytes", "refaulted_bytes"))
    yield _sizes("Evicted", true["bytes"], left, "copies")
    came = int(_true(folder, "refaults").select(pl.col("bytes").sum()).collect().item())
    yield _sizes("Came back (refaults)", came, back, "copies")


def _bounces(report: Report, folder: Path, about: Mapping[str, Any]) -> Iterator[_Pair]:
    """Compare the memory that bounced."""
    page = host_profile(about["settings"]["host"]).page_bytes
    known = _count(_true(folder, "ping_pong")) * page
    seen = int(report.frame("ping_pong")["bytes"].sum())
    if known or seen:
        yield _sizes("Memory that bounced", known, seen, "copies")


def _factor(report: Report, about: Mapping[str, Any]) -> Iterator[_Pair]:
    """Compare the oversubscription factor with what residency shows of it."""
    true = about["oversubscription_factor"]
    seen = report.frame("oversubscription_factor")["observed_factor"].drop_nulls().to_list()
    if true is not None and seen:
        most = f"{max(seen):.2f} at most"
        yield _Pair("Oversubscription factor", f"{true:.2f}", most, "what was known to be resident")


def _counts(what: str, model: int, nsan: int, from_: str) -> _Pair:
    return _Pair(what, format_count(model), format_count(nsan), from_)


def _sizes(what: str, model: int, nsan: int, from_: str) -> _Pair:
    return _Pair(what, format_bytes(model), format_bytes(nsan), from_)
