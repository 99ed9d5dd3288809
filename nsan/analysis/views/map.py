"""The address-time map, little enough to be drawn: cells of time and place, and the runs of used memory."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.result import PID, Result, derived, recorded
from nsan.analysis.views.addresses import Addresses
from nsan.analysis.views.copy_access import copy_access
from nsan.analysis.views.rates import N_FAR, near_rows, round_width, stretch_columns
from nsan.schema import ACCESS
from nsan.uvm.constants import PAGE_BYTES

LAYERS: Final = ("faults", "in", "out")

MAX_CELLS: Final = 4500
"""What all layers together may have, so that a chart has room for more than cells."""

_MOST_RUNS: Final = 100
_SHRINK: Final = 0.8
_SPOT: Final = ["layer", "start_ns", "end_ns", "row"]

_READS: Final = {
    "gpu_faults": ("start_ns", "end_ns", "pid", "device_id", "va", "access"),
    "migrations": (
        *("start_ns", "end_ns", "pid", "device_id", "va", "bytes", "direction", "cause"),
    ),
}

ADDRESS_TIME_CELLS: Final = Result(
    "address_time_cells",
    "what one layer holds in one stretch of time and one row of the folded address space",
    (
        derived("layer", pl.Enum(LAYERS), "label", "GPU faults, copies into GPUs, or out of them."),
        derived("start_ns", pl.Int64, "ns", "Where the stretch starts."),
        derived("end_ns", pl.Int64, "ns", "Where it ends."),
        derived("row", pl.Int64, "id", "Number of the row, from 0 at the lowest address."),
        derived("place_start", pl.Int64, "byte", "Where the row begins in the folded space."),
        derived("place_end", pl.Int64, "byte", "Where it ends."),
        derived("va", pl.UInt64, "byte address", "First address of the row."),
        derived("category", pl.String, "label", "Access or cause that has most of it."),
        derived("category_fraction", pl.Float64, "fraction", "Share of that access or cause."),
        derived("n_rows", pl.Int64, "rows", "Rows of the trace whose first byte is here."),
        derived("bytes", pl.Int64, "byte", "Bytes copied; of faults those of faulted pages."),
        derived("n_pages", pl.Int64, "pages", "These bytes in pages of 4 KiB."),
        N_FAR,
    ),
    nothing="Nothing with an address moved or faulted on a GPU, or it was not recorded.",
)

ADDRESS_RUNS: Final = Result(
    "address_runs",
    "a run of used 2 MiB blocks between gaps that nothing uses",
    (
        PID,
        derived("va_start", pl.UInt64, "byte address", "First byte of the run."),
        derived("place_start", pl.Int64, "byte", "Where it begins in the folded space."),
        derived("place_end", pl.Int64, "byte", "Where it ends."),
        derived("n_blocks", pl.Int64, "VA blocks", "Blocks of 2 MiB."),
        recorded("name", pl.String, "text", "Name of the one named allocation in it; else null."),
        derived("n_runs", pl.Int64, "runs", "All runs of the process; the longest 100 are listed."),
    ),
    nothing=ADDRESS_TIME_CELLS.nothing,
)


def _moved(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Keep the copies that a map can show."""
    return migrations.filter(
        pl.col("start_ns").is_not_null() & pl.col("va").is_not_null() & (pl.col("bytes") > 0)
    )


def _raised(gpu_faults: pl.LazyFrame) -> pl.LazyFrame:
    return gpu_faults.filter(pl.col("start_ns").is_not_null() & pl.col("va").is_not_null())


@analysis(
    question="Which memory is used, from which address to which, with the gaps left out?",
    result=ADDRESS_RUNS,
    reads={
        "gpu_faults": ("start_ns", "pid", "va"),
        "migrations": ("start_ns", "pid", "va", "bytes"),
        "allocations": ("pid", "va", "bytes", "name"),
    },
    source="domain.md E-7",
)
def address_runs(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, allocations: pl.LazyFrame
) -> pl.LazyFrame:
    """List runs of 2 MiB blocks in which something moved or faulted, put one behind the other.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order; may be empty.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    allocations : LazyFrame, ``ALLOCATIONS``
        Where names are from; may be empty.

    Returns
    -------
    LazyFrame, ``ADDRESS_RUNS``
        One row per run, by process and address; of a process with more than 100 the longest. Places are
        those of :func:`address_time_cells`.
    """

    def build() -> pl.DataFrame:
        faults, moves, names = pl.collect_all(
            [
                _raised(gpu_faults).select("pid", "va"),
                _moved(migrations).select("pid", "va", "bytes"),
                allocations.select("pid", "va", "bytes", "name").drop_nulls("va"),
            ]
        )
        runs = Addresses.build([faults, moves], names).runs
        longest = pl.col("n_blocks").rank("ordinal", descending=True).over("pid") <= _MOST_RUNS
        return runs.with_columns(n_runs=pl.len().over("pid")).filter(longest)

    return ADDRESS_RUNS.from_rows(build)


@analysis(
    question="What faulted and moved, when and where?",
    result=ADDRESS_TIME_CELLS,
    reads=_READS,
    source="domain.md E-7",
)
def address_time_cells(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    *,
    n_columns: int = 120,
    n_rows: int = 60,
    keep_far: bool = False,
) -> pl.LazyFrame:
    """Add up faults and copies in cells of a map of time and folded addresses.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order; may be empty.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    n_columns, n_rows : int, default 120 and 60
        Stretches of time and rows of addresses at most; fewer where there would be more than 4 500
        cells with something in them.
    keep_far : bool, default False
        Keep the few rows that are far in time from all others
        (:func:`nsan.analysis.views.rates.main_part`).

    Returns
    -------
    LazyFrame, ``ADDRESS_TIME_CELLS``
        One row per layer and cell with something in it, by time and place. A row of the map is a power
        of two of bytes, so it may reach over a gap that is folded. A copy counts in the stretch where it
        starts, with its bytes in each row that it covers and as a row where it begins: bytes add up to
        those of all copies with a start and an address, without ``n_far`` rows. The layer of faults has the pages copied since
        they faulted, by the access of their batch, and the rows of the fault table at the lowest page of
        each batch.
    """
    return ADDRESS_TIME_CELLS.from_rows(
        lambda: _cells(gpu_faults, migrations, (n_columns, n_rows), keep_far=keep_far)
    )


def _cells(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    shape: tuple[int, int],
    *,
    keep_far: bool,
) -> pl.DataFrame:
    faults, moves = pl.collect_all([_raised(gpu_faults), _moved(migrations)])
    addresses = Addresses.build([faults.select("pid", "va"), moves.select("pid", "va", "bytes")])
    events = _events(_with_access(moves, faults), faults, addresses)
    n_rows = int(events["n_rows"].sum())
    events = near_rows(events, "start_ns", keep_far=keep_far)
    # A copy by faults stands in two layers, and counts in one.
    n_far = n_rows - int(events["n_rows"].sum())
    if events.is_empty():
        return ADDRESS_TIME_CELLS.empty().collect()
    found = _grid(events, addresses, *shape)
    columns, rows = (float(each) for each in shape)
    while found.height > MAX_CELLS:
        columns, rows = max(columns * _SHRINK, 1.0), max(rows * _SHRINK, 1.0)
        found = _grid(events, addresses, int(columns), int(rows))
    starts = {row: addresses.va_at(row) for row in found["place_start"].unique().to_list()}
    known = {row: at[1] for row, at in starts.items() if at is not None}
    va = pl.col("place_start").replace_strict(known, default=None, return_dtype=pl.UInt64)
    return found.with_columns(va=va, n_far=pl.lit(n_far, pl.Int64)).sort("layer", "start_ns", "row")


def _with_access(moves: pl.DataFrame, faults: pl.DataFrame) -> pl.DataFrame:
    """Give each copy by a GPU fault the access of the fault row in which it lies (:func:`copy_access`)."""
    moves = moves.sort("start_ns", maintain_order=True)
    keys = ["pid", "device_id"]
    both = pl.concat([moves.select(keys), faults.select(keys)])
    owners = both.unique(maintain_order=True).with_row_index("owner")
    placed = both.join(owners, on=keys, how="left", nulls_equal=True, maintain_order="left")
    owner = placed["owner"].to_numpy()
    rows, found = copy_access(moves, faults, (owner[: moves.height], owner[moves.height :]))
    access = np.full(moves.height, -1, np.int16)
    access[rows] = found
    known = pl.Series(access).replace(-1, None).cast(pl.UInt8).cat.to(ACCESS)
    return moves.with_columns(access=known)


def _events(moves: pl.DataFrame, faults: pl.DataFrame, addresses: Addresses) -> pl.DataFrame:
    """Put faults and copies into one table: layer, category, time, place, bytes, rows."""

    def layer(rows: pl.DataFrame, name: str, category: str, *, counts: bool) -> pl.DataFrame:
        size = pl.col("bytes") if "bytes" in rows.columns else pl.lit(0, pl.Int64)
        return rows.select(
            "start_ns",
            "place",
            size.alias("bytes"),
            n_rows=pl.lit(int(counts), pl.Int64),
            layer=pl.lit(name, pl.Enum(LAYERS)),
            category=pl.col(category).cast(pl.String).fill_null("unknown"),
        )

    moves, faults = addresses.place(moves), addresses.place(faults)
    out = pl.col("direction") == "dtoh"
    asked = ~out & (pl.col("cause") == "coherence")
    return pl.concat(
        [
            layer(faults, "faults", "access", counts=True),
            layer(moves.filter(asked), "faults", "access", counts=False),
            layer(moves.filter(~out), "in", "cause", counts=True),
            layer(moves.filter(out), "out", "cause", counts=True),
        ]
    ).filter(pl.col("place").is_not_null())


def _grid(events: pl.DataFrame, addresses: Addresses, n_columns: int, n_rows: int) -> pl.DataFrame:
    """Add up events in a grid, and keep of each cell the category that has most."""
    first, last = events.select(pl.min("start_ns"), last=pl.max("start_ns")).row(0)
    grain = PAGE_BYTES
    while grain * n_rows < addresses.total_bytes:
        grain *= 2
    placed = _spread(events, grain, addresses.total_bytes).with_columns(
        stretch_columns("start_ns", round_width(last - first + 1, n_columns))
    )
    by_category = placed.group_by(*_SPOT, "category").agg(pl.col("bytes", "n_rows").sum())
    # A fault row has no bytes; it weighs as the page that it names.
    weight = pl.col("bytes") + PAGE_BYTES * pl.col("n_rows")
    return (
        by_category.sort("category")
        .group_by(_SPOT)
        .agg(
            category=pl.col("category").get(weight.arg_max()),
            most=weight.max(),
            whole=weight.sum(),
            bytes=pl.col("bytes").sum(),
            n_rows=pl.col("n_rows").sum(),
        )
        .with_columns(
            category_fraction=pl.col("most") / pl.col("whole"),
            place_start=pl.col("row") * grain,
            place_end=(pl.col("row") + 1) * grain,
            n_pages=pl.col("bytes") // PAGE_BYTES,
        )
    )


def _spread(events: pl.DataFrame, grain: int, total: int) -> pl.DataFrame:
    """Cut copies at the edges of rows; each counts as a row of the trace where it begins."""
    end = pl.min_horizontal(pl.col("place") + pl.col("bytes"), pl.lit(total, pl.Int64))
    low = pl.col("place") // grain
    high = pl.max_horizontal(low, (end - 1) // grain)
    one = events.filter(low == high).with_columns(row=low)
    many = (
        events.filter(low != high)
        .with_columns(row=pl.int_ranges(low, high + 1), end=end)
        .explode("row")
        .with_columns(
            bytes=pl.min_horizontal("end", (pl.col("row") + 1) * grain)
            - pl.max_horizontal("place", pl.col("row") * grain),
            n_rows=pl.when(pl.col("row") == low).then("n_rows").otherwise(0),
        )
    )
    return pl.concat([one, many.select(one.columns)])
