"""What an export says, by plain sqlite3 and arithmetic on whole numbers: the other side of every comparison.

Written from what the columns mean (the documents of nsys and of CUPTI), not from nsan.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from fuzz.sql_cells import COUNTS, SIZES, TIMES, Cells

GPU_FAULTS, CPU_FAULTS = "CUDA_UM_GPU_PAGE_FAULT_EVENTS", "CUDA_UM_CPU_PAGE_FAULT_EVENTS"
MEMCPY, MEMSET, KERNEL, GRAPH, RUNTIME = (
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("MEMCPY", "MEMSET", "KERNEL", "GRAPH_TRACE", "RUNTIME")
)
NVTX, MEMORY, STRINGS = "NVTX_EVENTS", "CUDA_GPU_MEMORY_USAGE_EVENTS", "StringIds"
OTHERS = ("PROCESSES", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE", "DIAGNOSTIC_EVENT", "META_DATA_EXPORT",
          "META_DATA_CAPTURE", "EXPORT_META_DATA", "TARGET_INFO_SYSTEM_ENV", "TARGET_INFO_SESSION_START_TIME")  # fmt: skip

DIRECTIONS = {11: "htod", 12: "dtoh", 13: "dtod"}
CAUSES = {
    None: "unknown",
    0: "unknown",
    1: "user",
    2: "coherence",
    3: "prefetch",
    4: "eviction",
    5: "access_counters",
}
ACCESSES = {None: "unknown", 0: "unknown", 1: "read", 2: "write", 3: "atomic", 4: "prefetch"}
MANAGED = (4, 6)
BLOCK = 2 << 20
TIMED = {"start": TIMES, "end": TIMES}
WORK = ("start", "end", "globalPid", "deviceId", "contextId", "streamId", "correlationId")
TABLES = {
    # columns, those that every row must fill, limits
    GPU_FAULTS: (
        (
            "start",
            "end",
            "globalPid",
            "deviceId",
            "address",
            "numberOfPageFaults",
            "faultAccessType",
        ),
        ("start", "end", "deviceId", "address", "numberOfPageFaults"),
        {**TIMED, "numberOfPageFaults": COUNTS},
    ),
    CPU_FAULTS: (
        (
            "start",
            "globalPid",
            "address",
            "originalFaultPc",
            "CpuInstruction",
            "module",
            "unresolvedFaultPc",
            "sourceFile",
            "sourceLine",
        ),
        ("start", "address"),
        {"start": TIMES},
    ),
    MEMCPY: (
        (
            *WORK,
            "bytes",
            "copyKind",
            "srcDeviceId",
            "dstDeviceId",
            "migrationCause",
            "virtualAddress",
            "copyCount",
        ),
        ("start", "end", "deviceId", "bytes", "copyKind"),
        {**TIMED, "bytes": SIZES, "copyCount": COUNTS},
    ),
    MEMSET: (
        (*WORK, "bytes", "memKind"),
        ("start", "end", "deviceId", "bytes"),
        {**TIMED, "bytes": SIZES},
    ),
    KERNEL: (
        (
            *WORK,
            "shortName",
            "demangledName",
            "mangledName",
            "gridX",
            "gridY",
            "gridZ",
            "blockX",
            "blockY",
            "blockZ",
            "graphNodeId",
        ),
        ("start", "end", "deviceId"),
        TIMED,
    ),
    GRAPH: ((*WORK, "graphId"), ("start", "end", "deviceId"), TIMED),
    RUNTIME: (
        ("start", "end", "globalTid", "correlationId", "nameId", "returnValue"),
        ("start", "end", "nameId"),
        TIMED,
    ),
    NVTX: (
        ("start", "end", "eventType", "textId", "globalTid", "domainId"),
        ("start", "eventType"),
        TIMED,
    ),
    MEMORY: (
        (
            "start",
            "globalPid",
            "deviceId",
            "address",
            "bytes",
            "memKind",
            "memoryOperationType",
            "correlationId",
        ),
        ("start", "globalPid", "address", "bytes", "memKind", "memoryOperationType"),
        {"start": TIMES, "bytes": SIZES, "memoryOperationType": (0, 1)},
    ),
}
"""What is read of each table."""


class Export:
    """The rows of an export."""

    def __init__(self, connection):
        cells = Cells(connection)
        self.views = cells.views(*TABLES, STRINGS, *OTHERS)
        self.strings, self.bad_strings = cells.texts(STRINGS, "id", "value")
        self.rows, self.notes = {}, {}
        for table, (columns, _, limits) in TABLES.items():
            self.rows[table], self.notes[table] = cells.rows(table, columns, limits)
        self.present = {table for table in TABLES if cells.has(table)}
        facts = cells.facts("META_DATA_EXPORT", "EXPORT_META_DATA")
        self.lazy = _lazy(facts)
        shift = _shift(facts)
        for rows in self.rows.values():
            for row in rows:
                for name in ("start", "end"):
                    if row.get(name) is not None:
                        row[name] -= shift
        mapping, _ = cells.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid"))
        self.mapped = bool(mapping)

    def damaged(self, table, *columns):
        """Say whether a column is absent, or a cell of it no value though it must have one."""
        notes = self.notes[table]
        if not notes:
            return False
        needed = TABLES[table][1]
        return any(
            notes[c]["absent"] or notes[c]["lacking" if c in needed else "misfits"] for c in columns
        )

    def losses(self):
        """By table and column: cells that are no value and should be, or are of another type."""
        found = {}
        for table, notes in self.notes.items():
            needed = TABLES[table][1]
            lost = {
                c: n["lacking" if c in needed else "misfits"]
                for c, n in notes.items()
                if not n["absent"]
            }
            if notes and {"start", "end"} <= set(notes):
                timed = [row for row in self.rows[table] if None not in (row["start"], row["end"])]
                lost["end before start"] = sum(row["end"] < row["start"] for row in timed)
            found[table] = {c: n for c, n in lost.items() if n}
        return {table: lost for table, lost in found.items() if lost}


def _lazy(facts):
    values = defaultdict(list)
    for name, value in facts:
        values[name].append(value.decode("utf-8", "replace"))
    if (values.get(b"EXPORT_PARAM_TABLES_TO_EXPORT") or [""])[0]:
        return False
    text = ([*values.get(b"EXPORT_PARAM_LAZY", []), None])[0] or (
        [*values.get(b"EXPORT_LAZY", []), None]
    )[0]
    return None if text is None else text.strip().lower() in {"true", "1", "yes"}


def _shift(facts):
    found = [value for name, value in facts if name == b"EXPORT_CONFIG_TIME_SHIFT"]
    text = found[0] if found else b""
    return int(text) if re.fullmatch(rb"-?[0-9]{1,18}|-?1[0-9]{18}", text) else 0


def pid_of(number):
    """Decode a global id."""
    return None if number is None else (number >> 24) & 0xFFFFFF


def unsigned(number):
    return None if number is None else number & ((1 << 64) - 1)


def total(values):
    """Add up; None where one is not known."""
    found = list(values)
    return None if None in found else sum(found)


def covered(rows):
    """Measure the time in which at least one row was running; None where one lacks a time."""
    if any(row["start"] is None or row["end"] is None for row in rows):
        return None
    busy, reached = 0, None
    for start, end in sorted((row["start"], max(row["start"], row["end"])) for row in rows):
        begin = start if reached is None else max(start, reached)
        if end > begin:
            busy += end - begin
            reached = end
    return busy


def _distinct(numbers, step=1):
    return None if None in numbers else len({unsigned(n) // step for n in numbers})


def grouped(rows, key):
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def migration_groups(rows):
    """By direction, cause, GPU and process: count, bytes, extremes, busy time."""

    def key(row):
        cause = CAUSES.get(row["migrationCause"], "other")
        return DIRECTIONS[row["copyKind"]], cause, row["deviceId"], pid_of(row["globalPid"])

    found = {}
    for group, members in grouped(rows, key).items():
        sizes = [row["bytes"] for row in members]
        places = [unsigned(row["virtualAddress"]) for row in members]
        whole, placed = None not in sizes, None not in places
        found[group] = {
            "n": len(members),
            "bytes": total(sizes),
            "min_bytes": min(sizes) if whole else None,
            "max_bytes": max(sizes) if whole else None,
            "min_va": hex(min(places)) if placed else None,
            "max_va": hex(max(places)) if placed else None,
            "busy_ns": covered(members),
        }
    return found


def busy_per_gpu(rows):
    """Add up the busy time of each GPU; None where a row lacks a time or its GPU."""
    if any(row["deviceId"] is None for row in rows):
        return None
    return total(
        covered(members) for members in grouped(rows, lambda row: row["deviceId"]).values()
    )


def figures(export):
    """Every total of a summary that can be worked out from the rows alone, by its path in the document.

    A tuple holds all that would be right.
    """
    rows = export.rows
    moves = [row for row in rows[MEMCPY] if row["copyKind"] in DIRECTIONS]
    return {
        **_migrations(export, moves),
        **_gpu_faults(export, rows[GPU_FAULTS]),
        **_cpu_faults(rows[CPU_FAULTS]),
        **_kernels(export),
        **_managed(export),
        **_span(export),
        **_counts(export, moves),
    }


def _answered(value, rows):
    """Return what may be said of a kind of event: without a row of it, also that it was not recorded."""
    return value if rows else (None, value)


def _migrations(export, moves):
    groups = migration_groups(moves)
    if export.damaged(MEMCPY, "copyKind"):
        # Which rows are migrations is not known.
        return {
            "migrations.n": None,
            "migrations.bytes": None,
            "migrations.htod_bytes": None,
            "migrations.busy_ns": None,
        }
    found = {"n": len(moves), "bytes": total(g["bytes"] for g in groups.values())}
    for way in DIRECTIONS.values():
        found[f"{way}_bytes"] = total(g["bytes"] for key, g in groups.items() if key[0] == way)
    if not export.mapped:
        found["busy_ns"] = busy_per_gpu(moves)
    found = {name: _answered(value, moves) for name, value in found.items()}
    return {
        **{f"migrations.{name}": value for name, value in found.items()},
        "migration groups": groups,
    }


def _gpu_faults(export, rows):
    counts = [row["numberOfPageFaults"] for row in rows]
    places = [row["address"] for row in rows]
    found = {
        "n_rows": len(rows),
        "n_page_faults": total(counts),
        "n_addresses": _distinct(places),
        "n_va_blocks": _distinct(places, BLOCK),
    }
    if not export.mapped:
        found["busy_ns"] = busy_per_gpu(rows)
    accesses = Counter(ACCESSES.get(row["faultAccessType"], "other") for row in rows)
    found["by_access"] = dict(accesses)
    return {f"gpu_faults.{name}": _answered(value, rows) for name, value in found.items()}


def _cpu_faults(rows):
    places = [row["address"] for row in rows]
    found = {
        "n": len(rows),
        "n_addresses": _distinct(places),
        "n_va_blocks": _distinct(places, BLOCK),
    }
    return {f"cpu_faults.{name}": _answered(value, rows) for name, value in found.items()}


def _kernels(export):
    kernels, graphs = export.rows[KERNEL], export.rows[GRAPH]
    found = {"n": len(kernels), "n_graph_launches": len(graphs)}
    if not export.mapped:
        found["busy_ns"] = busy_per_gpu(kernels + graphs)
    return {f"kernels.{name}": _answered(value, kernels) for name, value in found.items()}


def _managed(export):
    paired = ("start", "globalPid", "address", "memKind", "memoryOperationType")
    found = {}
    if export.damaged(MEMORY, *paired):
        found |= {"managed.n_allocations": None, "managed.bytes": None}
    else:
        events = [row for row in export.rows[MEMORY] if row["memoryOperationType"] is not None]
        kept = [row for row in _allocations(events) if row["memKind"] in MANAGED]
        found["managed.n_allocations"] = _answered(len(kept), events)
        found["managed.bytes"] = _answered(total(row["bytes"] for row in kept), events)
    calls = export.rows[RUNTIME]
    unclear = calls and (not export.strings or export.bad_strings)
    withheld = RUNTIME not in export.present and export.lazy is False
    if unclear or withheld or export.damaged(RUNTIME, "nameId"):
        return {**found, "managed.n_calls": None}
    names = [export.strings.get(row["nameId"]) or b"" for row in calls]
    found["managed.n_calls"] = sum(
        name.startswith((b"cudaMallocManaged", b"cuMemAllocManaged")) for name in names
    )
    return found


def _allocations(events):
    """Keep each allocation, and each release of what was allocated before the capture."""
    places = grouped(events, lambda row: (pid_of(row["globalPid"]), unsigned(row["address"])))
    for members in places.values():
        before = None
        for row in sorted(members, key=lambda row: (row["start"], row["memoryOperationType"] == 0)):
            is_allocation = row["memoryOperationType"] == 0
            if is_allocation or before is not True:
                yield row
            before = is_allocation


def _ranges(export):
    return [
        row
        for row in export.rows[NVTX]
        if row["eventType"] in {59, 70, 60, 71} and row["start"] is not None
    ]


def _marks(export):
    return [row for row in export.rows[NVTX] if row["eventType"] in {34, 65}]


def _span(export):
    unknown = {"first_ns": None, "last_ns": None, "duration_ns": None}
    if export.damaged(MEMCPY, "copyKind") or export.damaged(NVTX, "start", "end", "eventType"):
        return unknown
    timed = [
        row
        for table in (GPU_FAULTS, MEMCPY, MEMSET, KERNEL, GRAPH, RUNTIME)
        for row in export.rows[table]
    ]
    times = [(row["start"], row["end"]) for row in timed]
    instants = [row["start"] for row in export.rows[CPU_FAULTS] + _marks(export)]
    times += zip(instants, instants, strict=True)
    # A range that was never closed ends with the capture.
    times += [
        (row["start"], row["start"] if row["end"] is None else row["end"])
        for row in _ranges(export)
    ]
    if not times or any(None in pair for pair in times):
        return unknown
    first, last = min(start for start, _ in times), max(max(pair) for pair in times)
    return {"first_ns": first, "last_ns": last, "duration_ns": last - first}


def _counts(export, moves):
    rows = export.rows
    copies = [
        row
        for row in rows[MEMCPY]
        if row["copyKind"] is not None and row["copyKind"] not in DIRECTIONS
    ]
    found = {
        "gpu_faults": rows[GPU_FAULTS],
        "cpu_faults": rows[CPU_FAULTS],
        "migrations": moves,
        "copies": copies,
        "memsets": rows[MEMSET],
        "kernels": rows[KERNEL] + rows[GRAPH],
        "api_calls": rows[RUNTIME],
        "nvtx_ranges": _ranges(export),
        "nvtx_marks": _marks(export),
    }
    return {f"counts.{name}": len(members) for name, members in found.items()}
