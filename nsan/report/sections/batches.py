"""Section "batches" of a report: how the driver serviced page faults, and how long that took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.report.blocks import Text
from nsan.report.sections.saying import (
    FOR_P90,
    FOR_P99,
    SILENT,
    Said,
    added_up,
    did_not_fault,
    gpu_word,
    has_rows,
    inside,
    kind_of,
    not_recorded,
    paragraph,
    shown,
    unsized,
    with_enough,
    without_moves,
    worst,
)
from nsan.report.shown import Blocks
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_count, format_time

if TYPE_CHECKING:
    from nsan.report.report import Report

_STYLES: Final = {
    "batch": "A GPU fault row is one driver batch here, and the copies bear that out",
    "no_copies": "A GPU fault row is one driver batch, by the rows alone: nothing was copied for them",
    "coarse": "A GPU fault row is one driver batch; start times have few digits, so services are less exact",
    "page": "A GPU fault row is one page of a batch here: rows with the same end were put together",
    "va_block": "A GPU fault row is one VA block of a batch here: rows with the same end were put together",
}
"""What a fault row is, by style; any other style is of no use."""

_UNUSABLE: Final = "The GPU fault rows are not driver batches here ({style}): batches were put together from copies"
_OUTCOMES: Final = {
    "first_touch": SILENT,
    "throttled": "were held back because of ping-pong",
    "stale": "found their page there already",
}
_FEW_WORDS: Final = {"first_touch": "nothing copied"}
"""Outcomes of which a table says more than their name claims."""

_LATENCY: Final = (
    "outcome",
    "n_batches",
    "latency_p50_ns",
    "latency_p90_ns",
    "latency_p99_ns",
    "latency_max_ns",
    "service_p50_ns",
    "service_sum_ns",
    "time_step_ns",
)
_GAPS: Final = ("n_gaps", "gap_p10_ns", "gap_p50_ns", "gap_p90_ns", "gap_p99_ns", "gap_max_ns")
_FIT: Final = ("term", "estimate_ns", "low_ns", "high_ns")


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if has_rows(report, "gpu_faults"):
        return _of_rows(report)
    if did_not_fault(report):
        return Blocks([Text(_no_rows(report), "note")])
    if (nothing := without_moves(report, "batches of page faults", of_faults=True)) is not None:
        return Blocks([nothing])
    return _of_copies(report)


def _no_rows(report: Report) -> str:
    """Say that there are no batches, where faults were traced and copies do not contradict."""
    part = " in the part that was asked for" * report.is_part
    if has_rows(report, "migrations"):
        return (
            f"There are no batches{part}: GPU faults were traced and none was recorded, and no copy names a "
            "cause that would tell of one."
        )
    return f"The GPU did not fault{part}, so there are no batches."


# With fault rows ------------------------------------------------------------------------------------


def _of_rows(report: Report) -> Blocks:
    """Write what fault rows tell: batches with latency and service."""
    latency = report.frame("batch_latency").sort(
        "service_sum_ns", "pid", "device_id", "outcome", descending=[True, False, False, False]
    )
    if latency.is_empty():
        return Blocks([paragraph(_rows_are(report))]) + _of_copies(report)
    said = [*_serviced(report, latency), *_rows_are(report)]
    rows = with_enough(latency, "n_batches").with_columns(
        pl.col("outcome").cast(pl.String).replace(_FEW_WORDS)
    )
    return (
        Blocks([paragraph(said)])
        + report.chart("batch_rate")
        + report.chart("batch_service")
        + report.table(
            "batch_latency",
            frame=rows,
            columns=shown("batch_latency", rows, _LATENCY),
            title=(
                "How long batches take: latency from raised to replayed, service the driver's part of it"
                f"{_of_many(latency, rows)}"
            ),
        )
        + _spent(report)
    )


def _of_many(all_of: pl.DataFrame, shown_of: pl.DataFrame) -> str:
    """Say which percentiles were left out, if some were."""
    if all_of.null_count().sum_horizontal().item() == shown_of.null_count().sum_horizontal().item():
        return ""
    return f"; p90 of {FOR_P90} or more, p99 of {FOR_P99} or more"


def _serviced(report: Report, latency: pl.DataFrame) -> Iterator[Said]:
    """Say how many batches there were, how long they took, and what became of them."""
    kinds = report.kinds("batch_latency", latency)
    n, service = int(latency["n_batches"].sum()), int(latency["service_sum_ns"].sum())
    span = report.summary["duration_ns"]
    gpus = latency.select("pid", "device_id").n_unique()
    of_all = (
        f", {share(service / span)} of the capture"
        if span and gpus == 1 and not report.is_part
        else ""
    )
    yield (
        f"The driver serviced {counted(n, 'batch', 'batches')} of GPU page faults in "
        f"{format_time(service)} of service{of_all}{added_up(latency)}.",
        worst(kinds, ["n_batches", "service_sum_ns"]),
    )
    data = latency.filter(pl.col("outcome") == "data").sort("n_batches", descending=True)
    if not data.is_empty():
        row = data.row(0, named=True)
        gpu = gpu_word(row, latency)
        yield (
            f"A batch that moved data{f' to {gpu}' if gpu else ''} took {_lasted(row)}.",
            worst(kinds, ["latency_p50_ns", "latency_p99_ns"]),
        )
    others = dict(latency.group_by("outcome").agg(pl.col("n_batches").sum()).iter_rows())
    told = [
        f"{format_count(others[key])} {word}" for key, word in _OUTCOMES.items() if key in others
    ]
    if told:
        yield f"Of all, {', '.join(told)}.", worst(kinds, ["outcome", "n_batches"])


def _lasted(row: Mapping[str, Any]) -> str:
    """Say how long batches take in the median, and the longest as far as there are enough."""
    n, usual = row["n_batches"], f"{format_time(row['latency_p50_ns'])} in the median"
    if n >= FOR_P99:
        return f"{usual}, and one in a hundred over {format_time(row['latency_p99_ns'])}"
    if n >= FOR_P90:
        return f"{usual}, and one in ten over {format_time(row['latency_p90_ns'])}"
    longest = format_time(row["latency_max_ns"])
    return f"{usual}, and at most {longest}" if n > 1 else f"{longest} (there is one)"


def _rows_are(report: Report) -> Iterator[Said]:
    """Say what a fault row is here."""
    found = report.frame("fault_row_checks").filter(pl.col("n_rows") > 0)
    kind = worst(report.kinds("fault_row_checks", found), ["style"])
    for (style,), rows in found.group_by("style", maintain_order=True):
        many = found["style"].n_unique() > 1
        where = f"{gpu_word(rows.row(0, named=True), found)}: " if many and rows.height == 1 else ""
        said = _STYLES.get(str(style)) or _UNUSABLE.format(style=str(style).replace("_", " "))
        outside = int(rows["n_copies_outside"].fill_null(0).sum())
        copies = int(rows["n_copies"].fill_null(0).sum())
        odd = (
            f" ({format_count(outside)} of {counted(copies, 'copy', 'copies')} fit no row)"
            * bool(outside)
        )
        yield f"{where}{said}{odd}.", kind


def _spent(report: Report) -> Blocks:
    """Show what the service of a batch is spent on, where enough batches tell."""
    found = report.frame("service_fit").filter(pl.col("estimate_ns").is_not_null())
    if found.is_empty():
        return Blocks()
    fits = found.unique(["pid", "device_id"], maintain_order=True)
    # Where all services take the same time, there is no variance to explain.
    known = fits["r2"].drop_nulls().to_list()
    least = share(min(known)) + " or more" * (len(known) > 1) if known else ""
    explains = f" that explains {least} of the variance" if known else ""
    return report.table(
        "service_fit",
        frame=found,
        columns=shown("service_fit", found, _FIT),
        title=(
            f"What service is spent on, per batch and each thing in it: a fit{explains}, with its 95 % interval "
            "(one that holds 0 tells nothing)"
        ),
    )


# Without --------------------------------------------------------------------------------------------


def _of_copies(report: Report) -> Blocks:
    """Write what copies alone tell: that there were batches, and the time between them."""
    found = report.frame("batch_gaps")
    serviced = (
        report.lazy("batches")
        .select(n=pl.len(), bytes=pl.col("bytes").sum(), blocks=pl.col("n_va_blocks").mean())
        .collect()
        .row(0, named=True)
    )
    if not serviced["n"]:
        return Blocks([Text(_none(report), "note")])
    said: list[Said] = [
        (
            f"Copies show {counted(serviced['n'], 'batch', 'batches')} of GPU page faults that brought "
            f"{format_bytes(serviced['bytes'])}.",
            kind_of(report, "reconstructed"),
        )
    ]
    if not found.is_empty():
        row = found.sort("n_gaps", descending=True).row(0, named=True)
        gpu = gpu_word(row, found)
        said.append(
            (
                f"From the last copy of one to the first of the next{f' on {gpu}' if gpu else ''} it takes "
                f"{format_time(row['gap_p50_ns'])} in the median: the driver's work, and whatever the "
                "program did in between.",
                worst(report.kinds("batch_gaps", found), ["gap_p50_ns"]),
            )
        )
    if not report.is_recorded("gpu_faults"):
        said.append(
            (
                "How long a fault waited only fault rows tell: "
                f"{inside(not_recorded(report, 'gpu_faults'))}.",
                "",
            )
        )
    elif not has_rows(report, "gpu_faults"):
        said.append(("GPU faults were traced, yet no row of one is there.", ""))
    said += unsized(report)
    if found.is_empty():
        return Blocks([paragraph(said)])
    enough = with_enough(found, "n_gaps")
    gaps = report.table(
        "batch_gaps",
        frame=enough,
        columns=shown("batch_gaps", enough, _GAPS),
        title=(
            "Time between two batches, from the last copy of one to the first of the next"
            f"{_of_many(found, enough)}"
        ),
    )
    return Blocks([paragraph(said)]) + report.chart("batch_rate") + gaps


def _none(report: Report) -> str:
    """Say that copies show no batch, and what they cannot show."""
    if report.is_recorded("gpu_faults"):
        return "There are no batches: page faults brought nothing to a GPU."
    return (
        "Copies show no batches: page faults brought nothing to a GPU. What it touched first is not known: "
        f"{inside(not_recorded(report, 'gpu_faults'))}."
    )
