"""The rows of a trace as slices and moments on tracks: what they are called, and what they carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.driver.batches import BATCH_READS, with_batch_id
from nsan.exports.layout import Layout, Place
from nsan.exports.trace_file import TraceFile
from nsan.text import CAUSE_WORDS, DIRECTION_WORDS
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    from nsan.asking import Asked

_OF_GPU: Final = ["pid", "device_id"]
_FLOW_OF_BATCHES: Final = 1 << 62
"""Numbers of flows: calls have process and correlation id, batches begin here."""

COUNTERS, KERNELS, BATCHES, MIGRATIONS, EVENTS, COPIES = range(0, 600, 100)
"""Places of the tracks of a GPU."""


@dataclass(frozen=True)
class Sheet:
    """What all rows are drawn on.

    Attributes
    ----------
    asked : Asked
        The trace.
    file : TraceFile
        What is written.
    layout : Layout
        Its tracks.
    is_modelled : bool
        Whether the driver model wrote the trace.
    begin_ns : int, default 0
        Where the file begins: nothing may stand before it.
    """

    asked: Asked
    file: TraceFile
    layout: Layout
    is_modelled: bool
    begin_ns: int = 0

    def rows(self, table: str) -> pl.LazyFrame:
        """Give the rows of a table that have a time."""
        rows = self.asked.events(table).filter(pl.col("start_ns").is_not_null())
        if "end_ns" in rows.collect_schema():
            rows = rows.with_columns(pl.max_horizontal("start_ns", "end_ns").alias("end_ns"))
        return rows

    def about(self, text: str, kind: str = "recorded") -> str:
        """Say what is on a track, and of which kind it is."""
        return f"{text} Kind: {'modelled' if self.is_modelled else kind}."


def write_slices(sheet: Sheet) -> None:
    """Write all slices and moments of a trace.

    Parameters
    ----------
    sheet : Sheet
        What they are drawn on.
    """
    for write in (_kernels, _copies, _driver_events, _calls, _ranges, _marks, _cpu_faults):
        write(sheet)


def _kernels(sheet: Sheet) -> None:
    rows = sheet.rows("kernels").select(
        *_OF_GPU,
        "stream_id",
        "start_ns",
        "end_ns",
        "correlation_id",
        "context_id",
        "graph_node_id",
        name=pl.coalesce("name", "demangled").fill_null("(no name)"),
        demangled=pl.when(pl.col("demangled") != pl.col("name")).then("demangled"),
        grid=_sizes("grid"),
        block=_sizes("block"),
        graph_launch=pl.when("is_graph_launch").then(pl.lit(value=True)),
        flow=_flow(),
    )
    about = sheet.about("Kernels of one CUDA stream.")
    _lay(sheet, rows, "kernel", _on_stream(sheet, "Kernels", KERNELS, about))


def _copies(sheet: Sheet) -> None:
    words = pl.col("kind").cast(pl.String).replace(DIRECTION_WORDS)
    columns = (*_OF_GPU, "stream_id", "start_ns", "end_ns", "correlation_id", "context_id", "bytes")
    copies = sheet.rows("copies").select(*columns, name="copy " + words, flow=_flow())
    memsets = sheet.rows("memsets").select(*columns, name=pl.lit("memset"), flow=_flow())
    about = sheet.about("Explicit copies and memsets of one CUDA stream.")
    place = _on_stream(sheet, "Copies and memsets", COPIES, about)
    _lay(sheet, pl.concat([copies, memsets]), "copy", place)


def _driver_events(sheet: Sheet) -> None:
    rows = sheet.rows("driver_events").select(
        *_OF_GPU, "start_ns", "end_ns", "va", "bytes", "by_cpu", name=pl.col("kind").cast(pl.String)
    )

    def place(pid: int | None, device: int | None) -> Place:
        about = sheet.about("What the driver did against ping-pong.")
        return Place(sheet.layout.gpu(pid, device), "Driver events", EVENTS, about)

    found = rows.collect()
    sheet.file.slices(sheet.layout.laid(found, _OF_GPU, place), "driver")


def write_batches(sheet: Sheet, batches: pl.DataFrame) -> None:
    """Write a slice for each driver batch.

    Parameters
    ----------
    sheet : Sheet
        What they are drawn on.
    batches : DataFrame
        What the analysis ``batches`` gives.
    """
    kind = pl.lit("modelled") if sheet.is_modelled else pl.col("kind").cast(pl.String)
    start = pl.coalesce("start_ns", "first_copy_ns", "end_ns")
    rows = batches.select(
        *_OF_GPU,
        "batch_id",
        "access",
        "va",
        "n_page_faults",
        "n_faulted_pages",
        "n_va_blocks",
        "bytes",
        "prefetch_bytes",
        "evicted_bytes",
        "service_ns",
        "is_full",
        start_ns=start,
        end_ns=pl.max_horizontal("end_ns", start),
        name=pl.col("outcome").cast(pl.String).replace(_OUTCOME_WORDS),
        kind=kind,
        reconstructed=pl.col("kind") == "reconstructed",
        flow=_flow_of_batch(),
    ).filter(pl.col("start_ns").is_not_null())

    def place(pid: int | None, device: int | None, is_reconstructed: bool) -> Place:  # noqa: FBT001
        name = "Driver batches" + " (reconstructed)" * is_reconstructed
        about = "Put together from copies." if is_reconstructed else "From raised to replayed."
        kind = "reconstructed" if is_reconstructed else "derived"
        said = sheet.about(f"Driver batches. {about}", kind)
        return Place(sheet.layout.gpu(pid, device), name, BATCHES, said)

    laid = sheet.layout.laid(rows, [*_OF_GPU, "reconstructed"], place)
    sheet.file.slices(laid.drop("reconstructed", *_OF_GPU), "batch")


def write_migrations(sheet: Sheet) -> None:
    """Write a slice for each migration, tied to its batch.

    Parameters
    ----------
    sheet : Sheet
        What they are drawn on.
    """
    placed = sheet.asked.trace.gpu_faults, sheet.asked.trace.migrations
    keys = [name for name in BATCH_READS["migrations"] if name != "sequence"]
    known = with_batch_id(*placed).select(*keys, "batch_id")
    unplaced = sheet.rows("migrations").filter(pl.col("va").is_null()).select(keys)
    causes = sheet.rows("migrations").select("cause_id", "cause").unique()
    rows = (
        pl.concat([known, unplaced], how="diagonal")
        .join(causes, on="cause_id", how="left", nulls_equal=True)
        .select(
            *_OF_GPU,
            "direction",
            "cause",
            "start_ns",
            "bytes",
            "va",
            "batch_id",
            end_ns=pl.max_horizontal("start_ns", "end_ns"),
            va_block=(pl.col("va") // VA_BLOCK_BYTES).cast(pl.Int64),
            name=_words("direction", DIRECTION_WORDS) + " " + _words("cause", _CAUSE_WORDS),
            flow=_flow_of_batch(),
        )
    )

    def place(pid: int | None, device: int | None, direction: str | None, cause: str) -> Place:
        way = DIRECTION_WORDS.get(direction or "", "direction unknown")
        name = f"{way} {_CAUSE_WORDS.get(cause, cause)}"
        about = sheet.about("Migrations of managed memory of one direction and cause.")
        rank = MIGRATIONS + _RANKS.get((direction or "", cause), 50)
        return Place(sheet.layout.gpu(pid, device), name, rank, about)

    laid = sheet.layout.laid(rows.collect(), [*_OF_GPU, "direction", "cause"], place)
    sheet.file.slices(laid.drop("direction", "cause", *_OF_GPU), "migration")


_CAUSE_WORDS: Final = CAUSE_WORDS | {"unknown": "(cause unknown)", "other": "(other cause)"}

_RANKS: Final = {
    (direction, cause): 10 * at + rank
    for at, direction in enumerate(DIRECTION_WORDS)
    for rank, cause in enumerate(CAUSE_WORDS)
}

_OUTCOME_WORDS: Final = {
    "data": "data moved",
    "first_touch": "nothing copied",
    "stale": "page was there",
    "throttled": "throttled",
    "unknown": "outcome not known",
}


def _calls(sheet: Sheet) -> None:
    work = pl.concat(
        sheet.asked.events(table).select("pid", "correlation_id")
        for table in ("kernels", "copies", "memsets")
    )
    launched = work.unique().with_columns(_launches=pl.lit(value=True))
    rows = (
        sheet.rows("api_calls")
        .join(launched, on=["pid", "correlation_id"], how="left", maintain_order="left")
        .select(
            "pid",
            "tid",
            "start_ns",
            "end_ns",
            "correlation_id",
            name=pl.col("name").fill_null("(no name)"),
            error=pl.when(pl.col("return_value") != 0).then("return_value"),
            flow=pl.when("_launches").then(_flow()),
        )
    )

    def place(pid: int | None, tid: int | None) -> Place:
        about = sheet.about("CUDA API calls of one thread.")
        return Place(sheet.layout.thread(pid, tid), "", 0, about)

    laid = sheet.layout.nested(rows.collect(), ["pid", "tid"], place)
    sheet.file.slices(laid.drop("pid", "tid"), "api")


def _ranges(sheet: Sheet) -> None:
    rows = sheet.rows("nvtx_ranges").select(
        "pid",
        "tid",
        "domain",
        "start_ns",
        "end_ns",
        name=pl.col("name").fill_null("(no name)"),
        started_and_ended=pl.when(pl.col("kind") == "start_end").then(pl.lit(value=True)),
        not_closed=pl.when(~pl.col("closed")).then(pl.lit(value=True)),
    )
    laid = sheet.layout.nested(rows.collect(), ["pid", "tid", "domain"], _of_nvtx(sheet))
    sheet.file.slices(laid.drop("pid", "tid", "domain"), "nvtx")


def _marks(sheet: Sheet) -> None:
    rows = sheet.rows("nvtx_marks").select(
        "pid", "tid", "domain", "start_ns", name=pl.col("name").fill_null("(no name)")
    )
    laid = sheet.layout.moments(rows.collect(), ["pid", "tid", "domain"], _of_nvtx(sheet))
    sheet.file.instants(laid.drop("pid", "tid", "domain"), "nvtx")


def _of_nvtx(sheet: Sheet) -> Callable[..., Place]:
    def place(pid: int | None, tid: int | None, domain: str | None) -> Place:
        name = f"NVTX {domain[:60]}" if domain else "NVTX"
        about = sheet.about("NVTX ranges and marks of one thread and domain.")
        return Place(sheet.layout.thread(pid, tid), name, 1, about)

    return place


def _cpu_faults(sheet: Sheet) -> None:
    rows = sheet.rows("cpu_faults").select(
        "pid",
        "start_ns",
        "va",
        "function",
        "module",
        "source_file",
        "source_line",
        name=pl.lit("CPU page fault"),
    )

    def place(pid: int | None) -> Place:
        about = sheet.about("Page faults of the CPU on managed memory.")
        return Place(sheet.layout.process(pid), "CPU page faults", -500, about)

    laid = sheet.layout.moments(rows.collect(), ["pid"], place)
    sheet.file.instants(laid.drop("pid"), "fault")


def _lay(sheet: Sheet, rows: pl.LazyFrame, category: str, place: Callable[..., Place]) -> None:
    keys = [*_OF_GPU, "stream_id"]
    laid = sheet.layout.laid(rows.collect(), keys, place)
    sheet.file.slices(laid.drop(keys), category)


def _on_stream(sheet: Sheet, what: str, rank: int, about: str) -> Callable[..., Place]:
    def place(pid: int | None, device: int | None, stream: int | None) -> Place:
        name = what if stream is None else f"{what}, stream {stream}"
        return Place(sheet.layout.gpu(pid, device), name, rank + min(stream or 0, 99), about)

    return place


def _flow() -> pl.Expr:
    """Give the number that pairs GPU work with its call."""
    number = pl.col("correlation_id")
    pair = pl.col("pid").cast(pl.UInt64) * pl.lit(1 << 32, pl.UInt64) + number.cast(
        pl.UInt64, strict=False
    )
    return pl.when(number > 0, pl.col("pid").is_not_null()).then(pair)


def _flow_of_batch() -> pl.Expr:
    return pl.col("batch_id").cast(pl.UInt64) + pl.lit(_FLOW_OF_BATCHES, pl.UInt64)


def _sizes(column: str) -> pl.Expr:
    """Write a grid or a block as ``128 x 1 x 1``."""
    return pl.col(column).cast(pl.List(pl.Int64)).cast(pl.List(pl.String)).list.join(" x ")


def _words(column: str, words: dict[str, str]) -> pl.Expr:
    return pl.col(column).cast(pl.String).replace(words).fill_null("direction unknown")
