"""From the cells of an nvprof GPU trace, all of them text, to rows of our tables.

Sizes and times are printed with few digits. Unified Memory moves whole pages, so its sizes are
rounded to pages; the sizes of explicit copies stay as near as they are printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import polars as pl

from nsan import schema
from nsan.io.nsys_tables import COUNTS, SIZES, TIMES
from nsan.io.nvprof_tables import typed
from nsan.units import GIB, KIB, MIB, NS_PER_MS, NS_PER_S, NS_PER_US
from nsan.uvm import constants as uvm

_TIME_UNITS: Final = {"ns": 1, "us": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S}
_SIZE_UNITS: Final = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB}
_COPY_KINDS: Final = [label for label in uvm.COPY_KINDS.values() if label != "unknown"]

_GPU_FAULTS: Final = "[Unified Memory GPU page faults]"
_CPU_FAULTS: Final = "[Unified Memory CPU page faults]"
_DIRECTIONS: Final = {
    f"[Unified Memory Memcpy {name}]": name.lower() for name in ("HtoD", "DtoH", "DtoD")
}
_DRIVER_EVENTS: Final = {
    "[Unified Memory page thrash]": "thrashing",
    "[Unified Memory page throttle]": "throttling",
    "[Unified Memory remote map]": "remote_map",
}
_UM: Final = "[Unified Memory "
UM_NAMES: Final = (_GPU_FAULTS, _CPU_FAULTS, *_DIRECTIONS, *_DRIVER_EVENTS)
"""Names of the rows that are about Unified Memory."""

_MEMSET: Final = "[CUDA memset]"
_COPY: Final = r"^\[CUDA memcpy (\w+)\]$"
_CORRELATION: Final = r"^(.*) \[(\d+)\]$"

COLUMNS: Final = {
    "Start": "start",
    "Duration": "duration",
    "Grid Size": "grid",
    "Block Size": "block",
    "Size": "size",
    "SrcMemType": "memory",
    "Device": "device",
    "Context": "context",
    "Stream": "stream",
    "Unified Memory": "um",
    "Virtual Address": "va",
    "Name": "name",
    "Correlation_ID": "correlation",
    **{
        f"{what} {axis}": f"{what.lower()}_{axis.lower()}"
        for what in ("Grid", "Block")
        for axis in "XYZ"
    },
}
"""Columns of the text and of the CSV form by their head, and what they are called here."""

UNITS: Final = ("start", "duration", "size", "um")
"""Columns whose unit stands under the head in the CSV form, and behind each number in the text."""


class BadCellError(Exception):
    """A cell of a row cannot be read; ``row`` counts from 0."""

    def __init__(self, row: int, column: str) -> None:
        self.row, self.column = row, column
        super().__init__(column)


@dataclass
class Devices:
    """Numbers the GPUs of a trace by their names, as they come."""

    ids: dict[str, int] = field(default_factory=dict)

    def number(self, name: str) -> int | None:
        """Return the number of a name: its suffix ``(n)`` if it has one, else the next free number.

        A list of processors, as thrashing has it, is cut to fit its column: what follows the CPU
        is the GPU that begins so, if that is only one.
        """
        processors = [part.strip() for part in name.split(",")]
        gpus = [part for part in processors if part != "CPU"]
        if len(gpus) != 1:
            return None
        if len(processors) > 1:
            found = {number for known, number in self.ids.items() if known.startswith(gpus[0])}
            return found.pop() if len(found) == 1 else None
        if gpus[0] not in self.ids:
            suffix = re.search(r"\((\d{1,4})\)$", gpus[0])
            free = next(n for n in range(len(self.ids) + 1) if n not in self.ids.values())
            self.ids[gpus[0]] = int(suffix[1]) if suffix else free
        return self.ids[gpus[0]]


def parse(cells: pl.DataFrame, units: dict[str, str], devices: Devices) -> dict[str, pl.DataFrame]:
    """Turn rows of one trace into rows of our tables.

    Parameters
    ----------
    cells : DataFrame
        Text columns among the values of :data:`COLUMNS`, null where there is nothing; ``pid``,
        ``sequence`` (Int64).
    units : dict of str to str
        Unit of the columns whose numbers do not carry one.
    devices : Devices
        The GPUs seen so far; new ones are added.

    Returns
    -------
    dict of str to DataFrame
        Rows by table of ours.

    Raises
    ------
    BadCellError
        If a number cannot be read.
    """
    texts = dict.fromkeys(COLUMNS.values(), pl.String)
    cells = cells.with_columns(
        pl.lit(None, dtype).alias(name)
        for name, dtype in texts.items()
        if name not in cells.columns
    )
    numbered = {
        name: devices.number(name)
        for name in cells["device"].drop_nulls().unique(maintain_order=True)
    }
    device = pl.col("device").replace_strict(numbered, default=None, return_dtype=pl.Int64)
    name = pl.col("name").str.extract(_CORRELATION, 1)
    rows = cells.with_columns(
        device_id=device,
        name=pl.coalesce(name, "name"),
        correlation_id=pl.coalesce("correlation", pl.col("name").str.extract(_CORRELATION, 2)),
        start_ns=_believed(_scaled("start", _TIME_UNITS, units).round(), TIMES),
        duration_ns=_believed(_scaled("duration", _TIME_UNITS, units).round(), TIMES),
        va=_hexadecimal(pl.col("va")),
    ).with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    _check_names(rows["name"])
    _check(cells, rows, {"start": "start_ns", "duration": "duration_ns", "va": "va"})
    if rows["start_ns"].null_count():
        raise BadCellError(_first(rows["start_ns"].is_null()), "start")
    rows = rows.with_columns(
        pl.col("context", "stream", "correlation_id").cast(pl.Int64, strict=False)
    )
    return {
        "gpu_faults": _gpu_faults(rows),
        "cpu_faults": _cpu_faults(rows),
        "migrations": _migrations(rows, units),
        "driver_events": _driver_events(rows, units),
        **_explicit(rows, units),
    }


def _scaled(column: str, factors: dict[str, int], units: dict[str, str]) -> pl.Expr:
    """Read a number and its unit, in whole steps of the smallest unit; null if it is none."""
    text = pl.col(column).str.strip_chars()
    value = text.str.extract(r"^(\d+(?:\.\d*)?)\s*[A-Za-z]*$", 1).cast(pl.Float64, strict=False)
    written = text.str.extract(r"([A-Za-z]+)$", 1).fill_null(units.get(column, ""))
    return value * written.replace_strict(factors, default=None, return_dtype=pl.Float64)


def _believed(number: pl.Expr, limits: tuple[int, int]) -> pl.Expr:
    """Make a whole number; null where it is none, or none that an event can have."""
    return pl.when(number.is_between(*limits)).then(number.cast(pl.Int64, strict=False))


def _hexadecimal(text: pl.Expr) -> pl.Expr:
    digits = text.str.extract("^0x([0-9a-fA-F]{1,16})$", 1)
    return digits.str.to_integer(base=16, dtype=pl.UInt64, strict=False)


def _first(wrong: pl.Series) -> int:
    return int(wrong.arg_true()[0])


def _check(before: pl.DataFrame, after: pl.DataFrame, columns: dict[str, str]) -> None:
    for text, value in columns.items():
        wrong = before[text].is_not_null() & after[value].is_null()
        if wrong.any():
            raise BadCellError(_first(wrong), text)


def _check_names(names: pl.Series) -> None:
    """Refuse a row of Unified Memory whose name another cell has run into: it would be of no kind."""
    wrong = names.str.contains(_UM, literal=True) & ~names.str.starts_with(_UM)
    if wrong.any():
        raise BadCellError(_first(wrong), "name")


def _known(rows: pl.DataFrame, column: str, line: pl.Series) -> pl.DataFrame:
    """Return rows in which a value must be there."""
    if rows[column].null_count():
        raise BadCellError(int(line[_first(rows[column].is_null())]), column)
    return rows


def _named(rows: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    return rows.with_row_index("_row").filter(pl.col("name").is_in(names))


def _gpu_faults(rows: pl.DataFrame) -> pl.DataFrame:
    found = _named(rows, [_GPU_FAULTS]).with_columns(
        n_page_faults=_believed(pl.col("um").cast(pl.Int64, strict=False), COUNTS),
        access=pl.lit("unknown"),
    )
    for column in ("n_page_faults", "va", "end_ns"):
        _known(found, column, found["_row"])
    return typed(found, schema.GPU_FAULTS)


def _cpu_faults(rows: pl.DataFrame) -> pl.DataFrame:
    pc = _hexadecimal(pl.col("um").str.strip_prefix("PC "))
    found = _named(rows, [_CPU_FAULTS]).with_columns(pc=pc)
    for column in ("pc", "va"):
        _known(found, column, found["_row"])
    return typed(found, schema.CPU_FAULTS)


def _pages(units: dict[str, str]) -> pl.Expr:
    pages = (_scaled("um", _SIZE_UNITS, units) / uvm.PAGE_BYTES).round()
    return _believed(pages * uvm.PAGE_BYTES, SIZES)


def _migrations(rows: pl.DataFrame, units: dict[str, str]) -> pl.DataFrame:
    found = _named(rows, list(_DIRECTIONS)).with_columns(
        bytes=_pages(units),
        direction=pl.col("name").replace_strict(_DIRECTIONS, default=None, return_dtype=pl.String),
        cause=pl.lit("unknown"),
    )
    for column in ("bytes", "va", "end_ns"):
        _known(found, column, found["_row"])
    return typed(found, schema.MIGRATIONS)


def _driver_events(rows: pl.DataFrame, units: dict[str, str]) -> pl.DataFrame:
    found = _named(rows, list(_DRIVER_EVENTS)).with_columns(
        bytes=_pages(units),
        kind=pl.col("name").replace_strict(_DRIVER_EVENTS, default=None, return_dtype=pl.String),
        by_cpu=pl.col("device").str.contains(r"^CPU\b").fill_null(value=False),
        # Thrashing and remote maps are instants.
        end_ns=pl.coalesce("end_ns", "start_ns"),
    )
    return typed(_known(found, "va", found["_row"]), schema.DRIVER_EVENTS)


def _explicit(rows: pl.DataFrame, units: dict[str, str]) -> dict[str, pl.DataFrame]:
    """Make the tables of what the program itself asked for."""
    explicit = pl.col("name").str.starts_with(_UM).not_()
    rows = (
        rows.with_row_index("_row")
        .filter(explicit)
        .with_columns(
            context_id="context",
            stream_id="stream",
            bytes=_believed(_scaled("size", _SIZE_UNITS, units).round(), SIZES),
            copied=pl.col("name").str.extract(_COPY, 1).str.to_lowercase(),
            grid=_triple("grid"),
            block=_triple("block"),
        )
    )
    _known(rows.filter(pl.col("size").is_not_null()), "bytes", rows.drop_nulls("size")["_row"])
    is_kernel = pl.col("grid").is_not_null()
    is_call = pl.col("name").str.contains(r"^cu(?:da)?[A-Z]\w*$") & is_kernel.not_()
    copy_kind = pl.when(pl.col("copied").is_in(_COPY_KINDS)).then(pl.col("copied"))
    memory = pl.col("memory").str.to_lowercase().str.replace_all(" ", "_")
    known_memory = pl.when(memory.is_in(list(uvm.MEMORY_KINDS.values()))).then(memory)
    return {
        "kernels": _kernels(rows.filter(is_kernel)),
        "copies": typed(
            rows.filter(pl.col("copied").is_not_null()).with_columns(
                kind=copy_kind.fill_null("other"), n_operations=pl.lit(1)
            ),
            schema.COPIES,
        ),
        "memsets": typed(
            rows.filter(pl.col("name") == _MEMSET).with_columns(
                kind=pl.coalesce(known_memory, pl.lit("unknown"))
            ),
            schema.MEMSETS,
        ),
        "api_calls": typed(rows.filter(is_call), schema.API_CALLS),
    }


def _triple(what: str) -> pl.Expr:
    axes = [pl.col(f"{what}_{axis}").cast(pl.Int64, strict=False) for axis in "xyz"]
    together = pl.col(what).str.extract_all(r"\d+").cast(pl.List(pl.Int64), strict=False)
    apart = pl.concat_list(axes)
    chosen = (
        pl.when(axes[0].is_not_null()).then(apart).when(together.list.len() == 3).then(together)
    )
    return chosen.list.to_array(3)


def _kernels(rows: pl.DataFrame) -> pl.DataFrame:
    # What stands before the arguments, without return type and namespaces.
    own = pl.col("name").str.replace_all(r"\(anonymous namespace\)::|<unnamed>::", "")
    short = own.str.extract(r"^([^<(]*)", 1).str.strip_chars().str.extract(r"(\w+)$", 1)
    named = rows.with_columns(demangled="name", name=pl.coalesce(short, "name"))
    return typed(named.with_columns(is_graph_launch=pl.lit(value=False)), schema.KERNELS)
