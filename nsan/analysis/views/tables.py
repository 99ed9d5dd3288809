"""The tables of the explorer: layers, owners, what is selected, and what a grid or strip gives.

A view of ten million events keeps two small numbers per row instead of names: its *layer* (what it
is) and its *owner* (whose it is). These tables say what the numbers mean.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.schema import ACCESS, CAUSE, DIRECTION, Column, Table

EVENT_TABLES: Final = ("migrations", "gpu_faults", "cpu_faults")
"""Tables of a trace whose rows have a place in memory, in the order of their layers."""

EVENT_TABLE: Final = pl.Enum(EVENT_TABLES)

_TABLE = Column("table", EVENT_TABLE, "label", "Table of the trace that the row is from.")
_DIRECTION = Column("direction", DIRECTION, "label", "Direction of a migration; else null.")
_CAUSE = Column("cause", CAUSE, "label", "Cause of a migration; else null.")
_ACCESS = Column(
    "access",
    ACCESS,
    "label",
    "Access of a GPU fault row; of a copy by page faults that of its batch; null: not known.",
)
_PID = Column("pid", pl.UInt32, "id", "Process.")
_DEVICE = Column("device_id", pl.Int64, "id", "CUDA ordinal of the GPU in its process.")
_LAYER = Column("layer", pl.UInt8, "id", "Number of the layer.")
_OWNER = Column("owner", pl.UInt16, "id", "Number of the pair of process and GPU.")
_PLACES = (
    Column("place_start", pl.Int64, "byte", "First byte in the folded address space."),
    Column("place_end", pl.Int64, "byte", "End in the folded address space, exclusive."),
)

LAYERS: Final = Table(
    "layers",
    "one kind of event that the capture holds",
    (_LAYER, _TABLE, _DIRECTION, _CAUSE, _ACCESS),
)

OWNERS: Final = Table(
    "owners",
    "one pair of process and GPU that has events",
    (_OWNER, _PID, _DEVICE),
)

RUNS: Final = Table(
    "runs",
    "one run of used 2 MiB blocks between gaps that no event and no managed allocation uses",
    (
        *_PLACES,
        _PID,
        Column("va_start", pl.UInt64, "byte address", "First byte of the run."),
        Column("n_blocks", pl.Int64, "VA blocks", "Blocks of 2 MiB in the run."),
        Column("name", pl.String, "text", "Name of the one named allocation in it; else null."),
    ),
)

SELECTED: Final = Table(
    "selected",
    "one event as recorded",
    (
        _TABLE,
        Column("start_ns", pl.Int64, "ns", "Start, from the session start."),
        Column("end_ns", pl.Int64, "ns", "End, exclusive; null: the table has none."),
        _PID,
        _DEVICE,
        Column("va", pl.UInt64, "byte address", "First byte moved, or the faulted page."),
        Column("bytes", pl.Int64, "byte", "Size of a migration; else null."),
        Column("n_page_faults", pl.Int64, "faults", "Recorded count of a GPU fault row."),
        _DIRECTION,
        _CAUSE,
        _ACCESS,
    ),
)

RECORDED: Final = Table(
    "recorded",
    "one event as recorded",
    (
        *SELECTED.columns,
        _LAYER,
        _OWNER,
        Column("place", pl.Int64, "byte", "First byte in the folded space; null: it has none."),
    ),
)

MARKS: Final = Table("marks", "one event as recorded", (*SELECTED.columns, *_PLACES))

CELLS: Final = Table(
    "cells",
    "one cell of a grid of time and place that holds something",
    (
        Column("column", pl.UInt16, "id", "Column, by time, from 0."),
        Column("row", pl.UInt16, "id", "Row, by place, from 0."),
        Column("category", pl.String, "label", "Cause or access that has most in the cell."),
        Column("value", pl.Float64, "number", "In the unit of `by`; null: known of no row."),
        Column("n", pl.Int64, "rows", "Events whose first byte lies here."),
        Column("bytes", pl.Int64, "byte", "Migrated bytes."),
    ),
)

STRIP: Final = Table(
    "strip",
    "one layer in one column of time",
    (
        Column("column", pl.UInt16, "id", "Column, by time, from 0."),
        _LAYER,
        Column("n", pl.Int64, "rows", "Events that start here."),
        Column("bytes", pl.Int64, "byte", "Migrated; null where the layer is no migration."),
        Column("n_page_faults", pl.Int64, "faults", "Recorded; null where it is no GPU fault."),
    ),
)
