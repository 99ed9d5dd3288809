"""Section "places" of a report: which kernels, NVTX ranges, allocations and VA blocks fault and move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.attribution.work import REMAINDERS
from nsan.report.blocks import Block, Text
from nsan.report.sections.saying import has_rows, not_recorded, nothing_moved, of_gpus
from nsan.report.shown import Blocks
from nsan.waiting import by_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsan.report.report import Report

_KERNEL: Final = (
    "name",
    "n_instances",
    "time_ns",
    "exposed_ns",
    "exposed_fraction",
    "in_bytes",
    "evicted_bytes",
    "n_batches",
)
_RANGE: Final = (
    "name",
    "domain",
    "n_ranges",
    "time_ns",
    "exposed_ns",
    "inclusive_in_bytes",
    "in_bytes",
    "evicted_bytes",
    "n_fault_rows",
)
_ALLOCATION: Final = (
    "name",
    "bytes",
    "in_bytes",
    "between_bytes",
    "out_bytes",
    "evicted_bytes",
    "amplification",
    "density_fraction",
    "n_lowest_page_rows",
)
_BLOCK: Final = (
    "va",
    "n_faulted_pages",
    "n_distinct_pages",
    "n_fault_rows",
    "n_cpu_faults",
    "prefetch_bytes",
    "evicted_bytes",
)
_MOST_BLOCKS: Final = 5
_KEPT: Final = {"exposed_ns", "exposed_fraction", "in_bytes", "out_bytes"}
"""Columns that say something even where they are 0 throughout."""


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if not has_rows(report, "migrations") and not has_rows(report, "gpu_faults"):
        return Blocks([nothing_moved(report, "such places")])
    parts = {
        ("faults_by_kernel", "top_kernels"): report.part(lambda: _kernels(report)),
        ("faults_by_nvtx",): report.part(lambda: _ranges(report)),
        ("faults_by_allocation", "top_allocations"): report.part(lambda: _allocations(report)),
        ("faults_by_va_block",): report.part(lambda: _va_blocks(report)),
    }
    report.rests_on(name for names, blocks in parts.items() if blocks for name in names)
    return Blocks([*(block for blocks in parts.values() for block in blocks), *_missing(report)])


def _kernels(report: Report) -> list[Block]:
    if not report.is_recorded("kernels"):
        return []
    found = by_kernel(report)
    if found is None:
        return []
    is_rest = pl.col("work").is_in(list(REMAINDERS))
    is_kernel = pl.col("work").is_in(["kernel", "graph"])
    figures = ("exposed_ns", "in_bytes", "evicted_bytes", "n_batches")
    found = found.filter(is_kernel | _something(found, figures))
    found = found.with_columns(name=pl.coalesce("name", _remainder("work")))
    order = ("exposed_ns", "in_bytes", "evicted_bytes", "time_ns")
    found = found.sort(order, descending=True, nulls_last=True, maintain_order=True)
    found = _with_rest(found, is_rest, report.rows)
    inside = ", times inside this part" * (report.trace.windows is not None)
    return [
        *report.chart("faults_of_kernels"),
        *_table(
            report,
            "faults_by_kernel",
            found,
            _KERNEL,
            f"By kernel and other work of the GPU{inside}, the longest wait first",
        ),
    ]


def _remainder(column: str) -> pl.Expr:
    """Name what is no kernel, range or allocation: in brackets, as no name of a trace needs them."""
    words = pl.col(column).cast(pl.String).str.replace_all("_", " ")
    return pl.format("({})", words)


def _with_rest(found: pl.DataFrame, is_rest: pl.Expr, most: int) -> pl.DataFrame:
    """Put remainders behind the first few rows, so that a short table shows them too."""
    rest, named = found.filter(is_rest), found.filter(is_rest.not_())
    first = max(most - rest.height, 1)
    return pl.concat([named.head(first), rest, named.slice(first)])


def _something(found: pl.DataFrame, columns: Sequence[str]) -> pl.Expr:
    """Choose rows in which one of some figures is neither 0 nor unknown."""
    known = [name for name in columns if name in found.columns]
    return pl.any_horizontal(pl.col(name).fill_null(0) > 0 for name in known)


def _ranges(report: Report) -> list[Block]:
    options = report.nvtx_options()
    found = report.rows_of("faults_by_nvtx", options) if report.is_recorded("nvtx") else None
    if found is None or not (found["part"] == "range").any():
        return []
    is_range = pl.col("part") == "range"
    figures = ("exposed_ns", "in_bytes", "evicted_bytes", "n_fault_rows")
    found = found.filter(is_range | _something(found, figures))
    named = pl.col("name").fill_null("(no text)")
    found = found.with_columns(name=pl.when(is_range).then(named).otherwise(_remainder("part")))
    order = ("inclusive_in_bytes", "n_inclusive_fault_rows", "time_ns")
    found = found.sort(order, descending=True, nulls_last=True, maintain_order=True)
    found = _with_rest(found, is_range.not_(), report.rows)
    whose = "GPU work launched in it" if options else "what happened meanwhile"
    title = f"By NVTX range ({whose}), the one that brought most to GPUs first"
    # Times are those of whole ranges and of what was launched in them, wherever a part ends.
    cut = report.trace.windows is not None
    columns = [name for name in _RANGE if not (cut and name.endswith("_ns"))]
    return _table(report, "faults_by_nvtx", found, columns, title)


def _allocations(report: Report) -> list[Block]:
    found = report.rows_of("faults_by_allocation")
    if found is None:
        return []
    figures = ("in_bytes", "out_bytes", "between_bytes", "n_lowest_page_rows", "n_cpu_faults")
    rest = pl.col("part") == "unattributed"
    found = found.filter(_something(found, figures))
    if not found.height:
        return []
    moved = pl.sum_horizontal(pl.col("in_bytes", "out_bytes", "between_bytes").fill_null(0))
    # The size of one without a name stands in a column of its own.
    plain = pl.col("name").str.replace(r"^(0x[0-9a-f]+), \d+ byte$", "$1")
    found = found.with_columns(name=pl.when(rest).then(_remainder("part")).otherwise(plain))
    found = found.sort(moved, descending=True, maintain_order=True)
    found = _with_rest(found, rest, report.rows)
    guessed = (found["part"] == "guessed").any()
    title = "By allocation" + ", guessed from addresses" * bool(guessed) + ", what moved most first"
    return [
        *report.chart("faults_of_allocations"),
        *_table(report, "faults_by_allocation", found, _ALLOCATION, title),
    ]


def _va_blocks(report: Report) -> list[Block]:
    found = report.rows_of("faults_by_va_block")
    if found is None:
        return []
    first = found.head(_MOST_BLOCKS)
    if not first.select(_something(first, ("n_faulted_pages", "n_fault_rows")).any()).item():
        return []
    columns = _told(first, _BLOCK)
    title = "The VA blocks (2 MiB) that fault most"
    return list(
        report.table(
            "faults_by_va_block", columns=columns, rows=_MOST_BLOCKS, title=title, frame=found
        )
    )


def _table(
    report: Report, name: str, found: pl.DataFrame, columns: Sequence[str], title: str
) -> list[Block]:
    shown = of_gpus(found, _told(found, columns))
    return list(report.table(name, columns=shown, title=title, frame=found))


def _told(found: pl.DataFrame, columns: Sequence[str]) -> list[str]:
    """Leave out columns of which no row says anything."""
    return [
        name
        for name in columns
        if found[name].null_count() < found.height and (name in _KEPT or not _is_zero(found[name]))
    ]


def _is_zero(column: pl.Series) -> bool:
    return bool(column.dtype.is_numeric() and (column.fill_null(0) == 0).all())


def _missing(report: Report) -> list[Text]:
    """Say in one line what would tell more places."""
    absent = [kind for kind in ("kernels", "nvtx", "allocations") if not report.is_recorded(kind)]
    if not absent:
        return []
    return [Text(" ".join(f"{not_recorded(report, kind)}." for kind in absent), "missing")]
