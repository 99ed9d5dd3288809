"""The tables that give events their context: NVTX, allocations, devices, processes, messages.

Unlike event tables these are read whole: a range's depth depends on the ranges around it, a
release belongs to its allocation.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan import schema
from nsan.io.nsys_tables import (
    SIZES,
    TIMES,
    Source,
    Strings,
    address,
    labelled,
    last_part,
    pid_of,
    tid_of,
)
from nsan.uvm import constants as uvm

PUSH_POP: Final = (59, 70)
START_END: Final = (60, 71)
MARKS: Final = (34, 65)
DOMAIN_CREATE: Final = 75

NVTX: Final = Source(
    "NVTX_EVENTS",
    {
        "start": "integer",
        "end": "integer",
        "eventType": "integer",
        "text": "text",
        "textId": "integer",
        "globalTid": "integer",
        "domainId": "integer",
    },
    ("start", "eventType"),
    {},
    {"start": TIMES, "end": TIMES},
    expected=("end", "text", "globalTid"),
)

MEMORY_EVENTS: Final = Source(
    "CUDA_GPU_MEMORY_USAGE_EVENTS",
    {
        "start": "integer",
        "globalPid": "integer",
        "deviceId": "integer",
        "address": "integer",
        "bytes": "integer",
        "memKind": "integer",
        "memoryOperationType": "integer",
        "name": "text",
        "correlationId": "integer",
    },
    ("start", "globalPid", "address", "bytes", "memKind", "memoryOperationType"),
    {},
    # An operation other than an allocation and a release would be paired with neither.
    {"start": TIMES, "bytes": SIZES, "memoryOperationType": (0, 1)},
)

STRING_IDS: Final = Source("StringIds", {"id": "integer", "value": "text"}, ("id", "value"), {})

DIAGNOSTIC_EVENTS: Final = Source(
    "DIAGNOSTIC_EVENT",
    {"timestamp": "integer", "severity": "integer", "text": "text", "globalPid": "integer"},
    (),
    {},
    {"timestamp": TIMES},
)

_TELLING: Final = r"(?i)cuda|cupti|unified|uvm|page.?fault|nvtx|lost|drop|overflow|buffer|out of memory|profiling has"
"""Messages about the recording itself. Others may quote anything of the program or the machine."""

_HOME: Final = r"[/\\](?:home|Users)[/\\][^/\\\s'\"]+"
_PATH: Final = r"[^\s'\"`(<>{|=@]*[/\\](?:[^\n]*[/\\])|~[^\s]*[/\\]"
"""From where a path begins to the last slash of the line: folders may have spaces in their names."""

_NAMED: Final = r"\S+@\S+|--?[\w-]+=\S+"
"""Who, where, and options with their values."""

_SEVERITIES: Final = {0: "unknown", 1: "information", 2: "warning", 3: "error"}


def nvtx_ranges(rows: pl.DataFrame, strings: Strings, trace_end_ns: int | None) -> pl.DataFrame:
    """Make ranges of NVTX rows.

    Parameters
    ----------
    rows : DataFrame
        Rows of NVTX_EVENTS, columns as in :data:`NVTX`.
    strings : Strings
        Registered texts.
    trace_end_ns : int or None
        Where a range ends that the program never closed.

    Returns
    -------
    DataFrame, ``NVTX_RANGES``
        One row per range, by start, the outer one first. Depth and parent follow the nesting of
        pushed ranges within one thread and domain.
    """
    kinds = dict.fromkeys(PUSH_POP, "push_pop") | dict.fromkeys(START_END, "start_end")
    named = _with_names(rows, strings)
    ranges = (
        named.filter(pl.col("eventType").is_in(list(kinds)) & pl.col("start").is_not_null())
        .with_columns(
            kind=pl.col("eventType").replace_strict(kinds, default=None, return_dtype=pl.String),
            closed=pl.col("end").is_not_null(),
            start_ns=pl.col("start"),
            end_ns=pl.coalesce("end", pl.lit(trace_end_ns, pl.Int64)),
        )
        .with_columns(end_ns=pl.max_horizontal("start_ns", "end_ns"))
        .sort(["start_ns", "end_ns"], descending=[False, True], maintain_order=True)
        .with_row_index("range_id")
    )
    nested = _nested(ranges)
    return nested.select(
        pl.col(name).cast(dtype) for name, dtype in schema.NVTX_RANGES.schema.items()
    )


def latest(rows: pl.DataFrame) -> int | None:
    """Say when the last range ends or mark is, of rows of NVTX_EVENTS; other rows are no events."""
    kind = pl.col("eventType")
    ends = pl.col("end").filter(kind.is_in([*PUSH_POP, *START_END])).max()
    starts = pl.col("start").filter(kind.is_in([*PUSH_POP, *START_END, *MARKS])).max()
    value = rows.select(pl.max_horizontal(ends, starts)).item()
    return value if isinstance(value, int) else None


def _nested(ranges: pl.DataFrame) -> pl.DataFrame:
    """Add ``depth`` and ``parent``: a sweep over starts and ends within each stack."""
    stack = ["pid", "tid", "domain_key"]
    pushed = ranges.filter(pl.col("kind") == "push_pop").select(
        "range_id", "start_ns", "end_ns", *stack
    )
    # A range of no length would close before it opens: give it one nanosecond on the stack.
    closes = pushed.select(
        "range_id",
        *stack,
        time=pl.max_horizontal("end_ns", pl.col("start_ns") + 1),
        step=pl.lit(-1, pl.Int64),
    )
    opens = pushed.select("range_id", *stack, time="start_ns", step=pl.lit(1, pl.Int64))
    depths = (
        pl.concat([closes, opens])
        .sort([*stack, "time", "step", "range_id"])
        .with_columns(depth=pl.col("step").cum_sum().over(stack) - 1)
        .filter(pl.col("step") == 1)
        .select("range_id", *stack, "depth")
    )
    return ranges.join(
        _parents(depths, stack), on="range_id", how="left", maintain_order="left"
    ).with_columns(pl.col("depth").fill_null(0))


def _parents(depths: pl.DataFrame, stack: list[str]) -> pl.DataFrame:
    """Add ``parent``: the last range one level up in the same stack.

    One search for all: a program that never closes its ranges nests as deep as it has ranges.
    """
    # Numbered, for a search takes no null for a value.
    stacks = depths.select(stack).unique(maintain_order=True).with_row_index("_stack")
    rows = depths.join(
        stacks, on=stack, how="left", nulls_equal=True, maintain_order="left"
    ).with_row_index("_at")
    above = rows.select("_at", "_stack", pl.col("depth") + 1, parent="range_id")
    # The ranges of a stack come in their order.
    found = rows.join_asof(above, on="_at", by=["_stack", "depth"], check_sortedness=False)
    return found.select("range_id", "depth", "parent")


def nvtx_marks(rows: pl.DataFrame, strings: Strings) -> pl.DataFrame:
    """Make marks of NVTX rows: one row per mark, by start (``NVTX_MARKS``)."""
    marks = _with_names(rows.filter(pl.col("eventType").is_in(MARKS)), strings, domains=rows)
    marks = marks.with_columns(start_ns=pl.col("start")).sort("start_ns", maintain_order=True)
    return marks.select(
        pl.col(name).cast(dtype) for name, dtype in schema.NVTX_MARKS.schema.items()
    )


def _with_names(
    rows: pl.DataFrame, strings: Strings, domains: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Add pid, tid, name (own text, then registered text, then a placeholder) and domain."""
    everything = rows if domains is None else domains
    named = strings.resolve(rows, {"registered": "textId"}).with_columns(
        pid_of("globalTid"),
        tid_of("globalTid"),
        name=pl.coalesce("text", "registered", pl.lit("(unnamed)")),
        domain_key=pl.col("domainId").fill_null(0),
    )
    created = (
        strings.resolve(
            everything.filter(pl.col("eventType") == DOMAIN_CREATE), {"registered": "textId"}
        )
        .select(
            pid_of("globalTid"),
            domain_key=pl.col("domainId").fill_null(0),
            domain=pl.coalesce("text", "registered"),
        )
        .unique(["pid", "domain_key"], keep="first", maintain_order=True)
    )
    return named.join(
        created, on=["pid", "domain_key"], how="left", nulls_equal=True, maintain_order="left"
    )


def allocations(rows: pl.DataFrame) -> pl.DataFrame:
    """Pair each allocation with its release.

    Parameters
    ----------
    rows : DataFrame
        Rows of CUDA_GPU_MEMORY_USAGE_EVENTS, columns as in :data:`MEMORY_EVENTS`.

    Returns
    -------
    DataFrame, ``ALLOCATIONS``
        One row per allocation, by ``alloc_ns``. A release without an allocation is one that was
        made before the capture: its ``alloc_ns`` is null and it comes first.
    """
    place = ["pid", "va"]
    events = (
        rows.with_columns(
            pid_of("globalPid"),
            va=address("address"),
            device_id=pl.col("deviceId"),
            kind=labelled("memKind", uvm.MEMORY_KINDS, schema.MEMORY_KIND),
            correlation_id=pl.col("correlationId"),
            is_alloc=pl.col("memoryOperationType") == 0,
        )
        .filter(pl.col("is_alloc").is_not_null())
        .sort([*place, "start", "is_alloc"], maintain_order=True)
        .with_columns(
            next_is_alloc=pl.col("is_alloc").shift(-1).over(place),
            next_start=pl.col("start").shift(-1).over(place),
            previous_is_alloc=pl.col("is_alloc").shift(1).over(place),
        )
    )
    orphan = pl.col("is_alloc").not_() & pl.col("previous_is_alloc").fill_null(value=False).not_()
    return (
        events.filter(pl.col("is_alloc") | orphan)
        .with_columns(
            alloc_ns=pl.when("is_alloc").then(pl.col("start")),
            free_ns=pl.when(pl.col("is_alloc").not_())
            .then(pl.col("start"))
            .when(pl.col("next_is_alloc").not_())
            .then(pl.col("next_start")),
        )
        .sort("alloc_ns", "va", nulls_last=False)
        .select(pl.col(name).cast(dtype) for name, dtype in schema.ALLOCATIONS.schema.items())
    )


def diagnostics(rows: pl.DataFrame) -> pl.DataFrame:
    """Make messages of DIAGNOSTIC_EVENT rows, by time; absolute paths are cut to their last part."""
    messages = rows.select(
        pid_of("globalPid"),
        time_ns=pl.col("timestamp"),
        severity=labelled("severity", _SEVERITIES, schema.SEVERITY),
        text=harmless(pl.col("text")),
    ).sort("time_ns", maintain_order=True)
    return messages.select(
        pl.col(name).cast(dtype) for name, dtype in schema.DIAGNOSTICS.schema.items()
    )


def harmless(text: pl.Expr) -> pl.Expr:
    """Keep messages about the recording, without people, options and all but the last part of paths.

    Parameters
    ----------
    text : Expr
        Messages of nsys.

    Returns
    -------
    Expr
        The same; null where a message is about something else.
    """
    plain = (
        text.str.replace_all(_NAMED, "...").str.replace_all(_HOME, "/~").str.replace_all(_PATH, "")
    )
    return pl.when(text.str.contains(_TELLING)).then(plain)


def processes(rows: pl.DataFrame, pids: list[int], strings: Strings) -> pl.DataFrame:
    """Name the processes that have events; every other process of the machine stays out.

    Parameters
    ----------
    rows : DataFrame
        ``globalPid`` (Int64), ``name`` (String) of PROCESSES.
    pids : list of int
        Processes with events.
    strings : Strings
        Says whether whole paths are kept.

    Returns
    -------
    DataFrame, ``PROCESSES``
        One row per process, by pid.
    """
    name = pl.col("name") if strings.keep_paths else last_part(pl.col("name"))
    names = (
        rows.select(pid_of("globalPid"), name=name)
        .drop_nulls()
        .unique("pid", keep="last", maintain_order=True)
    )
    wanted = pl.DataFrame({"pid": sorted(pids)}, schema={"pid": pl.UInt32})
    return wanted.join(names, on="pid", how="left", maintain_order="left")


def devices(gpus: pl.DataFrame, ordinals: pl.DataFrame, used: pl.DataFrame) -> pl.DataFrame:
    """List the GPUs as processes number them.

    A CUDA ordinal is not the row id of the GPU table: on some machines they run in opposite
    directions. ``TARGET_INFO_CUDA_DEVICE`` maps them per process, ``cuDevice`` for all.

    Parameters
    ----------
    gpus : DataFrame
        Rows of TARGET_INFO_GPU: ``id``, ``cuDevice``, ``name`` and properties.
    ordinals : DataFrame
        Rows of TARGET_INFO_CUDA_DEVICE: ``gpuId``, ``cudaId``, ``pid``; may be empty.
    used : DataFrame
        ``device_id`` (Int64), ``pid`` (Int64): ordinals that events name, and in which process.

    Returns
    -------
    DataFrame, ``DEVICES``
        One row per ordinal and process that the export maps, and one without a process for every
        other ordinal that is described or used, by ordinal.
    """
    described = gpus.select(
        gpu_id="id",
        device_id="cuDevice",
        name="name",
        chip="chipName",
        total_memory_bytes="totalMemory",
        memory_bytes_per_s="memoryBandwidth",
        n_sms="smCount",
        compute_capability=pl.format("{}.{}", "computeMajor", "computeMinor"),
    )
    mapped = ordinals.select(device_id="cudaId", pid="pid", gpu_id="gpuId").drop_nulls("device_id")
    per_process = mapped.join(described.drop("device_id"), on="gpu_id", how="left")
    unmapped = used.join(mapped, on=["device_id", "pid"], how="anti").select("device_id").unique()
    anywhere = _for_any_process(described)
    # An ordinal that is mapped for every process that uses it needs no row for the others.
    spare = mapped.join(unmapped, on="device_id", how="anti")
    anywhere = anywhere.join(spare, on="device_id", how="anti")
    bare = unmapped.drop_nulls().join(anywhere, on="device_id", how="anti")
    return (
        pl.concat([per_process, anywhere, bare], how="diagonal_relaxed")
        .sort("device_id", "pid", nulls_last=False)
        .select(pl.col(name).cast(dtype) for name, dtype in schema.DEVICES.schema.items())
    )


def _for_any_process(described: pl.DataFrame) -> pl.DataFrame:
    """Take the GPUs by ``cuDevice``; of several with one ordinal the NVIDIA one counts."""
    # Old exports have no cuDevice. Then a lone GPU can only be ordinal 0.
    lone = pl.lit(0) if described.height == 1 else pl.lit(None, pl.Int64)
    nvidia = pl.col("name").str.contains("(?i)nvidia|tesla|quadro|geforce")
    return (
        described.with_columns(device_id=pl.coalesce("device_id", lone), _nvidia=nvidia)
        .drop_nulls("device_id")
        .sort("device_id", "_nvidia", descending=[False, True], nulls_last=True)
        .unique("device_id", keep="first", maintain_order=True)
        .drop("_nvidia")
    )
