"""What a profiler would have recorded of a run: the tables of a trace, in a chosen style.

nsys has never been seen to write fault rows. The default style is what CUPTI hands on, measured on 4708
rows of an older profiler: one row per batch. The other styles exist to test that analyses notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan import schema
from nsan.errors import ProgramError
from nsan.model.engine import state as st
from nsan.model.happened import COPY, FILL, KERNEL, Happened, Life, Work
from nsan.model.settings import Settings
from nsan.uvm import constants as uvm

PID: Final = 4242
BASE_VA: Final = 0x7F00_0000_0000
_CONTEXT: Final = 1
_STREAM: Final = 7
_PC: Final = 0x40_1000
QUEUE_ROWS: Final = 8192
"""Entries of the driver's event queue, beyond which rows are lost (measured: calibration.md 7.1)."""

_MOST_NS: Final = 10**15
_MOST_PPM: Final = 100_000

ROWS: Final = ("batch", "page", "block")


@dataclass(frozen=True)
class Style:
    """How the profiler writes down what happened.

    Attributes
    ----------
    rows : str, default "batch"
        One fault row per "batch" (its lowest page), per "page" of it with a shared end, or per VA
        "block" of it with a shared end.
    jitter_ns : int, default 0
        Ends of fault rows are late by up to this much.
    lost_ns : int, default 0
        After 8192 rows of the driver, rows are lost for this long.
    skew_ns : int, default 0
        By how much the CPU's clock (all but the driver's copies and GPU faults) is ahead of the GPU's.
    drift_ppm : float, default 0
        How fast that grows.
    seed : int, default 1
        For the jitter.
    """

    rows: str = "batch"
    jitter_ns: int = 0
    lost_ns: int = 0
    skew_ns: int = 0
    drift_ppm: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse a style that is not known."""
        if self.rows not in ROWS:
            raise ProgramError(f"No fault rows per {self.rows!r}", f"There are: {', '.join(ROWS)}")
        if not (0 <= self.jitter_ns < _MOST_NS and 0 <= self.lost_ns < _MOST_NS):
            raise ProgramError("A jitter or a loss of less than 0", "Take 0 or more")
        if not (abs(self.skew_ns) < _MOST_NS and abs(self.drift_ppm) <= _MOST_PPM):
            raise ProgramError(
                f"A clock {self.skew_ns} ns ahead that drifts by {self.drift_ppm} ppm",
                f"Take a drift of at most {_MOST_PPM} ppm, one way or the other",
            )


PLAIN: Final = Style()
"""What CUPTI hands on."""


def address(settings: Settings, page: str = "page") -> pl.Expr:
    """Turn a page number into its address."""
    return pl.col(page).cast(pl.UInt64) * settings.host_profile.page_bytes + BASE_VA


def record(
    happened: Happened, settings: Settings, program_name: str, style: Style = PLAIN
) -> dict[str, pl.DataFrame]:
    """Write down a run as the tables of a trace.

    Parameters
    ----------
    happened : Happened
        What a machine left.
    settings : Settings
        The machine.
    program_name : str
        What the trace calls the program.
    style : Style
        How the profiler writes.

    Returns
    -------
    dict of str to DataFrame
        Tables of :mod:`nsan.schema`, by name, each in order of start.
    """
    tables = {
        "gpu_faults": _gpu_faults(happened, settings, style),
        "cpu_faults": _cpu_faults(happened, settings, program_name),
        "migrations": _migrations(happened, settings),
        "kernels": _kernels(happened),
        "copies": _copies(happened),
        "memsets": _memsets(happened),
        "api_calls": _api_calls(happened),
        "nvtx_ranges": _ranges(happened),
        "nvtx_marks": _marks(happened),
        "allocations": _allocations(happened.lives),
        "driver_events": _measures(happened, settings),
        "devices": _devices(settings),
        "processes": pl.DataFrame({"pid": [PID], "name": [program_name]}),
    }
    typed = {name: _typed(frame, name) for name, frame in tables.items()}
    return _skewed(_lossy(typed, style), style)


def _typed(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    wanted = schema.TABLES[table].schema
    missing = [
        pl.lit(None, dtype).alias(name) for name, dtype in wanted.items() if name not in frame
    ]
    return frame.with_columns(missing).select(
        pl.col(name).cast(dtype) for name, dtype in wanted.items()
    )


def _labels(column: str, labels: dict[int, str]) -> pl.Expr:
    return pl.col(column).cast(pl.Int64).replace_strict(labels, return_dtype=pl.String)


def _gpu_faults(happened: Happened, settings: Settings, style: Style) -> pl.DataFrame:
    batches = happened.log["batches"]
    if style.rows != "batch":
        batches = _split_rows(happened, settings, style)
    end = pl.col("end_ns")
    if style.jitter_ns:
        # Spread evenly by a multiplicative hash: the same on every machine and polars version.
        late = (pl.int_range(1, pl.len() + 1) + abs(style.seed)) * _GOLDEN % (1 << 32)
        end = end + late * style.jitter_ns // (1 << 32)
    return (
        batches.with_columns(end_ns=end)
        .sort("end_ns", "page", maintain_order=True)
        .select(
            start_ns="raised_ns",
            end_ns="end_ns",
            pid=pl.lit(PID),
            device_id="gpu",
            va=address(settings),
            n_page_faults="n_page_faults",
            access=_labels("access", dict(uvm.ACCESSES)),
            access_id="access",
        )
    )


def _split_rows(happened: Happened, settings: Settings, style: Style) -> pl.DataFrame:
    """Give each page, or each VA block, of a batch a row of its own."""
    batches = happened.log["batches"].select("batch", "gpu", "raised_ns", "end_ns")
    pages = happened.log["faulted"]
    if style.rows == "block":
        per_block = uvm.VA_BLOCK_BYTES // settings.host_profile.page_bytes
        pages = (
            pages.group_by("batch", block=pl.col("page") // per_block, maintain_order=True)
            .agg(pl.col("page").first(), pl.col("n_entries").sum(), pl.col("access").first())
            .drop("block")
        )
    return pages.join(batches, on="batch", how="left", maintain_order="left").rename(
        {"n_entries": "n_page_faults"}
    )


def _cpu_faults(happened: Happened, settings: Settings, program_name: str) -> pl.DataFrame:
    faults = happened.log["cpu_faults"].sort("start_ns", maintain_order=True)
    writes = pl.col("access") == st.WRITE
    return faults.select(
        start_ns="start_ns",
        pid=pl.lit(PID),
        va=address(settings),
        pc=pl.when(writes).then(_PC).otherwise(_PC + 0x100),
        function=pl.when(writes).then(pl.lit("host_write")).otherwise(pl.lit("host_read")),
        module=pl.lit(program_name),
    )


def _migrations(happened: Happened, settings: Settings) -> pl.DataFrame:
    to_gpu = pl.col("dst") > 0
    both = to_gpu & (pl.col("src") > 0)
    kind = (
        pl.when(both)
        .then(uvm.COPY_KIND_UM_DTOD)
        .when(to_gpu)
        .then(uvm.COPY_KIND_UM_HTOD)
        .otherwise(uvm.COPY_KIND_UM_DTOH)
    )
    device = pl.when(to_gpu).then("dst").otherwise("src") - 1
    copies = happened.log["copies"].sort("start_ns", "page", maintain_order=True)
    return copies.with_columns(kind=kind).select(
        start_ns="start_ns",
        end_ns="end_ns",
        pid=pl.lit(PID),
        device_id=device,
        va=address(settings),
        bytes=pl.col("n_pages").cast(pl.Int64) * settings.host_profile.page_bytes,
        direction=_labels("kind", dict(uvm.DIRECTIONS)),
        cause=_labels("cause", dict(uvm.CAUSES)),
        cause_id="cause",
        src_device_id=pl.when(both).then(pl.col("src") - 1),
        dst_device_id=pl.when(both).then(pl.col("dst") - 1),
    )


def _work(happened: Happened, kind: str) -> list[tuple[int, Work]]:
    chosen = [(gpu, work) for gpu, work in happened.work if work.kind == kind]
    return sorted(chosen, key=lambda item: (item[1].start_ns, item[0]))


def _on_stream(gpu: int, work: Work) -> dict[str, object]:
    return {
        "start_ns": work.start_ns,
        "end_ns": work.end_ns,
        "pid": PID,
        "device_id": gpu,
        "context_id": _CONTEXT + gpu,
        "stream_id": _STREAM,
        "correlation_id": work.correlation,
    }


def _frame(rows: Sequence[Mapping[str, object]], table: str) -> pl.DataFrame:
    wanted = schema.TABLES[table].schema
    return pl.DataFrame(rows, schema={n: t for n, t in wanted.items() if not rows or n in rows[0]})


def _kernels(happened: Happened) -> pl.DataFrame:
    rows: list[dict[str, object]] = []
    for gpu, work in _work(happened, KERNEL):
        if work.kernel is None:
            continue
        rows.append(
            {
                **_on_stream(gpu, work),
                "name": work.name,
                "demangled": work.name,
                "grid": [work.kernel.grid, 1, 1],
                "block": [work.kernel.threads, 1, 1],
                "is_graph_launch": False,
            }
        )
    return _frame(rows, "kernels")


def _copies(happened: Happened) -> pl.DataFrame:
    rows = [
        {
            **_on_stream(gpu, work),
            "bytes": work.n_bytes,
            "kind": uvm.COPY_KINDS[work.copy_kind],
            "kind_id": work.copy_kind,
            "n_operations": 1,
        }
        for gpu, work in _work(happened, COPY)
    ]
    return _frame(rows, "copies")


def _memsets(happened: Happened) -> pl.DataFrame:
    rows = [
        {**_on_stream(gpu, work), "bytes": work.n_bytes, "kind": "managed", "kind_id": 4}
        for gpu, work in _work(happened, FILL)
    ]
    return _frame(rows, "memsets")


def _api_calls(happened: Happened) -> pl.DataFrame:
    rows = [
        {
            "start_ns": call.start_ns,
            "end_ns": call.end_ns,
            "pid": PID,
            "tid": PID,
            "correlation_id": call.correlation,
            "name": call.name,
            "return_value": 0,
        }
        for call in sorted(happened.calls, key=lambda call: call.start_ns)
    ]
    return _frame(rows, "api_calls")


def _ranges(happened: Happened) -> pl.DataFrame:
    numbers = {
        i: n for n, i in enumerate(i for i, r in enumerate(happened.regions) if not r.is_mark)
    }
    rows = [
        {
            "start_ns": region.start_ns,
            "end_ns": region.end_ns,
            "pid": PID,
            "tid": PID,
            "domain": None,
            "name": region.text,
            "kind": "push_pop",
            "depth": region.depth,
            "parent": None if region.parent is None else numbers[region.parent],
            "closed": region.closed,
            "range_id": numbers[i],
        }
        for i, region in enumerate(happened.regions)
        if not region.is_mark
    ]
    return _frame(rows, "nvtx_ranges")


def _marks(happened: Happened) -> pl.DataFrame:
    rows = [
        {"start_ns": r.start_ns, "pid": PID, "tid": PID, "domain": None, "name": r.text}
        for r in happened.regions
        if r.is_mark
    ]
    return _frame(rows, "nvtx_marks")


def _allocations(lives: list[Life]) -> pl.DataFrame:
    rows = [
        {
            "alloc_ns": life.alloc_ns,
            "free_ns": life.free_ns,
            "pid": PID,
            "device_id": life.device or 0,
            "va": BASE_VA + life.start,
            "bytes": life.n_bytes,
            "kind": "managed" if life.device is None else "device",
            "name": None,
            "correlation_id": life.correlation,
        }
        for life in lives
    ]
    return _frame(rows, "allocations")


def _measures(happened: Happened, settings: Settings) -> pl.DataFrame:
    kinds = {st.THRASHING: "thrashing", st.THROTTLING: "throttling", st.REMOTE_MAP: "remote_map"}
    labels = {int(number): label for number, label in kinds.items()}
    by_cpu = pl.col("by_cpu") != 0
    return (
        happened.log["measures"]
        .sort("start_ns", maintain_order=True)
        .select(
            start_ns="start_ns",
            end_ns="end_ns",
            pid=pl.lit(PID),
            device_id=pl.when(pl.col("processor") > 0).then(pl.col("processor") - 1),
            va=address(settings),
            bytes=pl.col("n_pages").cast(pl.Int64) * settings.host_profile.page_bytes,
            kind=_labels("kind", labels),
            by_cpu=by_cpu,
        )
    )


def _devices(settings: Settings) -> pl.DataFrame:
    profile = settings.gpu_profile
    return pl.DataFrame(
        [
            {
                "device_id": gpu,
                "pid": PID,
                "gpu_id": gpu,
                "name": profile.description,
                "chip": profile.chip,
                "total_memory_bytes": profile.memory_bytes,
                "memory_bytes_per_s": profile.memory_bytes_per_s,
                "n_sms": profile.n_sms,
                "compute_capability": profile.compute_capability,
            }
            for gpu in range(settings.n_gpus)
        ],
        schema=schema.DEVICES.schema,
    )


_DRIVER_ROWS: Final = ("gpu_faults", "cpu_faults", "migrations")


def _lossy(tables: dict[str, pl.DataFrame], style: Style) -> dict[str, pl.DataFrame]:
    """Lose what comes in a hole behind the first 8192 rows of the driver."""
    if not style.lost_ns:
        return tables
    starts = pl.concat([tables[name].select("start_ns") for name in _DRIVER_ROWS])[
        "start_ns"
    ].sort()
    if len(starts) <= QUEUE_ROWS:
        return tables
    full = starts[QUEUE_ROWS]
    lost = pl.col("start_ns").is_between(full, full + style.lost_ns, closed="left")
    return tables | {name: tables[name].filter(~lost) for name in _DRIVER_ROWS}


_GOLDEN: Final = 2654435761
"""Knuth's multiplier: 2^32 over the golden ratio."""

_CPU_CLOCK: Final = {
    "cpu_faults": ("start_ns",),
    "api_calls": ("start_ns", "end_ns"),
    "nvtx_ranges": ("start_ns", "end_ns"),
    "nvtx_marks": ("start_ns",),
    "allocations": ("alloc_ns", "free_ns"),
    "kernels": ("start_ns", "end_ns"),
    "copies": ("start_ns", "end_ns"),
    "memsets": ("start_ns", "end_ns"),
}


def _skewed(tables: dict[str, pl.DataFrame], style: Style) -> dict[str, pl.DataFrame]:
    """Put all but the driver's copies and GPU faults on a clock that is ahead of theirs."""
    if not style.skew_ns and not style.drift_ppm:
        return tables
    return tables | {
        name: tables[name].with_columns(
            (pl.col(c) + style.skew_ns + pl.col(c) * style.drift_ppm / 1e6).cast(pl.Int64)
            for c in columns
        )
        for name, columns in _CPU_CLOCK.items()
    }
