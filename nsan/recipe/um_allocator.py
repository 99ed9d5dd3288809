"""The recipe `uvm_allocator`: what each rank allocates, by how much that is too much, and what a cache changes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import polars as pl

from nsan.analysing import analyse
from nsan.analysis.catalog import find
from nsan.analysis.result import Figure, Result, derived, recorded
from nsan.contract import has_um_data
from nsan.errors import NsanError, UsageError, listed
from nsan.fleet.member import Member
from nsan.joined import join
from nsan.opening import open_snapshot
from nsan.recipe.jobs import WHO, Job, Mapper, by_name, member_of, opened
from nsan.recipe.plan import NAMED, Plan, Reduced, is_modelled, no_um_data, notes_on, warnings_on
from nsan.trace import Trace
from nsan.uvm.constants import MANAGED_KINDS

_SUFFIXES: Final = (".pickle", ".pickle.gz", ".pkl")
_GPU: Final = ("pid", "device_id")


def _of(analysis: str) -> tuple[Figure, ...]:
    return tuple(c for c in find(analysis).result.columns if c.name not in _GPU)


RANK_STATS: Final = Result(
    "rank_stats",
    "a process and GPU of a report",
    (
        *NAMED,
        recorded("pid", pl.UInt32, "id", "Process."),
        recorded("device_id", pl.Int64, "id", "CUDA ordinal of the GPU in its process."),
        recorded("n_managed_allocations", pl.Int64, "allocations", "Managed allocations of the process; null: not recorded."),
        *_of("oversubscription_factor"),
        recorded("snapshot", pl.String, "text", "Name of its memory snapshot of PyTorch; null: none was found."),
    ),
    "No process of a report names a GPU.",
)  # fmt: skip
"""From the trace alone: how much is allocated, and whether the GPU has room for it."""

RANK_EFFECT: Final = Result(
    "rank_pca_effect",
    "a process and GPU of a report with a memory snapshot",
    (*NAMED, *find("pca_effect").result.columns),
    "No report has a memory snapshot.",
)
"""What PyTorch's caching allocator did to the driver: `nsan allocator TRACE --snapshot FILE --by effect`."""

RANK_UTILIZATION: Final = Result(
    "rank_utilization",
    "a GPU of a memory snapshot",
    (*NAMED, *find("allocator_utilization").result.columns),
    "No report has a memory snapshot.",
)
"""How well the allocator's memory is used, by report."""

ALL_STATS: Final = Result(
    "all_stats",
    "a figure over all processes and GPUs",
    (
        derived("table", pl.String, "text", "The table that it is from."),
        derived("figure", pl.String, "text", "Name of the figure there."),
        derived("unit", pl.String, "text", "Its unit."),
        derived("n", pl.Int64, "rows", "Rows that know it."),
        derived("n_unknown", pl.Int64, "rows", "Rows that do not."),
        derived("min", pl.Float64, "number", "Least of these."),
        derived("median", pl.Float64, "number", "Median of these."),
        derived("mean", pl.Float64, "number", "Mean of these."),
        derived("max", pl.Float64, "number", "Most of these."),
        derived("max_source", pl.String, "text", "The report that has it; the first of several."),
    ),
)


@dataclass(frozen=True)
class Found:
    """Of one report: what is known, tables by name, and why its snapshot could not be used, if so."""

    member: Member
    tables: dict[str, pl.DataFrame]
    snapshot: str | None
    trouble: str = ""


def allocator(job: Job, *, snapshots: Path | None) -> Found:
    """Read what one report, and its memory snapshot if there is one, say of allocations.

    Parameters
    ----------
    job : Job
        The report; whole.
    snapshots : Path or None
        Folder with snapshots; None: they lie beside the reports.

    Returns
    -------
    Found
        A snapshot that cannot be used is told as trouble, and the rest is there.
    """
    job, trace = opened(job)
    snapshot = snapshot_of(job.path, snapshots)
    tables = {"rank_stats": _of_trace(trace, snapshot)}
    trouble = ""
    if snapshot is not None:
        try:
            tables |= _of_snapshot(trace, snapshot)
        except (NsanError, OSError) as error:
            trouble = " ".join(str(error).split())
    named = {name: job.named(table) for name, table in tables.items()}
    return Found(member_of(job, trace), named, None if snapshot is None else snapshot.name, trouble)


def snapshot_of(report: Path, folder: Path | None) -> Path | None:
    """Find the memory snapshot of a report: by its own name, or the only one beside the only report.

    Parameters
    ----------
    report : Path
        The report.
    folder : Path or None
        Where snapshots are; None: beside the report.

    Returns
    -------
    Path or None
        ``STEM.pickle``, ``STEM.pickle.gz`` or ``STEM.pkl``; beside a report that is alone in its folder
        ``snapshot.pickle`` as well. With several reports that one may be of another.
    """
    place = report.parent if folder is None else folder
    stems = [report.stem]
    if folder is None and len(list(report.parent.glob(f"*{report.suffix}"))) == 1:
        stems.append("snapshot")
    names = [f"{stem}{suffix}" for stem in stems for suffix in _SUFFIXES]
    return next((place / name for name in names if (place / name).is_file()), None)


def _of_trace(trace: Trace, snapshot: Path | None) -> pl.DataFrame:
    found = analyse(trace, "oversubscription_factor").collect()
    about = trace.info.capture.get("allocations")
    known = about is not None and about.answer == "recorded"
    managed = (
        trace.allocations.filter(pl.col("kind").is_in(MANAGED_KINDS))
        .group_by("pid")
        .agg(n_managed_allocations=pl.len().cast(pl.Int64))
        .collect()
    )
    count = pl.col("n_managed_allocations").fill_null(0)
    return (
        found.join(managed, on="pid", how="left", nulls_equal=True, maintain_order="left")
        .with_columns(
            n_managed_allocations=pl.when(pl.lit(known)).then(count),
            snapshot=pl.lit(snapshot and snapshot.name, pl.String),
        )
        .select(pl.col(n).cast(t) for n, t in RANK_STATS.schema.items() if n not in WHO)
    )


def _of_snapshot(trace: Trace, path: Path) -> dict[str, pl.DataFrame]:
    snapshot = open_snapshot(path)
    return {
        "rank_utilization": analyse(snapshot, "allocator_utilization").collect(),
        "rank_pca_effect": analyse(join(trace, snapshot), "pca_effect").collect(),
    }


def reduced(mapper: Mapper, jobs: Sequence[Job], args: argparse.Namespace) -> Reduced:
    """Put the figures of the reports side by side."""
    given = getattr(args, "snapshot_dir", None)
    folder = None if given is None else Path(given)
    if folder is not None and not folder.is_dir():
        msg = f"--snapshot-dir {given}: no such folder."
        raise UsageError(msg)
    answers = mapper(partial(allocator, snapshots=folder), jobs)
    found = sorted((each for _, each in answers), key=lambda each: by_name(each.member))
    members = [each.member for each in found]
    if not found:
        return Reduced({}, 0)
    if not any(has_um_data(m.info, m.totals) for m in members) and not any(
        each.snapshot for each in found
    ):
        return Reduced({}, len(members), warnings_on(members), nothing=no_um_data(members))
    tables = {
        name: pl.concat([f.tables[name] for f in found if name in f.tables] or [_empty(result)])
        for name, result in _RANKED.items()
    }
    tables["all_stats"] = all_stats(tables)
    notes = [*_snapshot_notes(found, folder), *notes_on(members)]
    return Reduced(tables, len(members), notes, is_modelled(members))


def _empty(result: Result) -> pl.DataFrame:
    return pl.DataFrame(schema=result.schema)


def _snapshot_notes(found: Sequence[Found], folder: Path | None) -> list[str]:
    notes = [
        f"{each.snapshot}, the memory snapshot of {each.member.source}, could not be used: {each.trouble}"
        for each in found
        if each.trouble
    ]
    missing = [each.member.source for each in found if each.snapshot is None]
    if missing:
        place = "beside it" if folder is None else f"in {folder.name}"
        stem = Path(missing[0]).stem
        notes.append(
            f"{len(missing)} of {len(found)} reports have no memory snapshot of PyTorch, and so no effect of its "
            f"cache: {listed(missing)}. Looked for: {stem}.pickle {place}, as `torch.cuda.memory._dump_snapshot` "
            "writes it; `--snapshot-dir` names another folder."
        )
    return notes


def all_stats(tables: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """Summarise each figure of each table over its rows.

    Parameters
    ----------
    tables : dict of str to DataFrame
        Tables by name, with the columns of their results.

    Returns
    -------
    DataFrame, ``ALL_STATS``
        One row per table and figure that some row knows.
    """
    rows = []
    for table, result in _RANKED.items():
        frame = tables[table]
        for column in result.columns:
            if column.unit in {"id", "label", "text", "flag"}:
                continue
            known = frame.filter(pl.col(column.name).is_not_null())
            if known.height:
                rows.append(
                    {
                        "table": table,
                        "figure": column.name,
                        "unit": column.unit,
                        "n_unknown": frame.height - known.height,
                    }
                    | _spread(known, column.name)
                )
    return pl.DataFrame(rows, schema=ALL_STATS.schema, orient="row")


def _spread(known: pl.DataFrame, name: str) -> dict[str, Any]:
    values = known[name].cast(pl.Float64)
    return {
        "n": known.height,
        "min": values.min(),
        "median": values.median(),
        "mean": values.mean(),
        "max": values.max(),
        "max_source": known["source"][values.arg_max() or 0],
    }


_RANKED: Final = {
    "rank_stats": RANK_STATS,
    "rank_pca_effect": RANK_EFFECT,
    "rank_utilization": RANK_UTILIZATION,
}

PLAN: Final = Plan(
    "uvm_allocator",
    reduced,
    {**_RANKED, "all_stats": ALL_STATS},
    own=(
        (
            "--snapshot-dir",
            {
                "metavar": "folder",
                "help": "Folder with memory snapshots of PyTorch, each named like its report: STEM.pickle\n"
                "By default they are looked for beside the reports",
            },
        ),
    ),
)
