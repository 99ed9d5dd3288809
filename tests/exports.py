"""Build nsys SQLite exports by hand: real schemas of 19 versions, rows of one's own.

The schemas are those of real exports (``tests/data/nsys/schema_by_version.json``); the rows are
whatever a test writes, so their truth is known. Like nsys itself, a lazy export has only the tables
that have rows.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from urllib.parse import quote

DATA = Path(__file__).parent / "data"
TRACES = DATA / "traces"
REPOSITORY = Path(__file__).parents[1]

GPU_FAULTS = "CUDA_UM_GPU_PAGE_FAULT_EVENTS"
CPU_FAULTS = "CUDA_UM_CPU_PAGE_FAULT_EVENTS"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"
GPU = "TARGET_INFO_GPU"
CUDA_DEVICE = "TARGET_INFO_CUDA_DEVICE"

PID = 4242
VM = 1 << 48
"""The virtual machine part of a global id, as in real exports."""

HTOD, DTOH, DTOD = 11, 12, 13
USER, COHERENCE, PREFETCH, EVICTION = 1, 2, 3, 4
READ, WRITE, ATOMIC = 1, 2, 3
VA = 0x7F00_0000_0000
KIB = 1024
MIB = 1024 * KIB


@cache
def schemas() -> dict[str, dict[str, str]]:
    """By full version: table to its columns, as ``name TYPE[!]`` with ! for NOT NULL."""
    text = (DATA / "nsys" / "schema_by_version.json").read_text()
    return {version.split(" ")[0]: tables for version, tables in json.loads(text).items()}


def versions() -> list[str]:
    """All full versions with a schema."""
    return list(schemas())


def global_pid(pid: int) -> int:
    return VM | pid << 24


def global_tid(pid: int, tid: int) -> int:
    return global_pid(pid) | tid


def gpu_fault(start, end, va=VA, *, n=1, access=READ, device=0, pid=PID):
    return {
        "start": start,
        "end": end,
        "globalPid": global_pid(pid),
        "deviceId": device,
        "address": va,
        "numberOfPageFaults": n,
        "faultAccessType": access,
    }


def cpu_fault(start, va=VA, *, pid=PID, pc=0x1000, function=None, module=None):
    return {
        "start": start,
        "globalPid": global_pid(pid),
        "address": va,
        "originalFaultPc": pc,
        "CpuInstruction": function or 0,
        "module": module or 0,
    }


def migration(start, end, size, va=VA, *, kind=HTOD, cause=COHERENCE, device=0, pid=PID):
    return {
        "start": start,
        "end": end,
        "globalPid": global_pid(pid),
        "deviceId": device,
        "contextId": 0,
        "streamId": 0,
        "correlationId": 0,
        "bytes": size,
        "copyKind": kind,
        "migrationCause": cause,
        "virtualAddress": va,
    }


def copy(start, end, size, *, kind=1, device=0, pid=PID, correlation=1, count=None):
    row = migration(start, end, size, None, kind=kind, cause=None, device=device, pid=pid)
    extra = {} if count is None else {"copyCount": count}
    return row | {"contextId": 1, "streamId": 7, "correlationId": correlation} | extra


def kernel(start, end, *, device=0, pid=PID, name=1, correlation=1):
    return {
        "start": start,
        "end": end,
        "globalPid": global_pid(pid),
        "deviceId": device,
        "contextId": 1,
        "streamId": 7,
        "correlationId": correlation,
        "shortName": name,
        "demangledName": name,
        "gridX": 1,
        "gridY": 1,
        "gridZ": 1,
        "blockX": 256,
        "blockY": 1,
        "blockZ": 1,
    }


def api_call(start, end, *, name=2, pid=PID, tid=PID, correlation=1):
    return {
        "start": start,
        "end": end,
        "globalTid": global_tid(pid, tid),
        "correlationId": correlation,
        "nameId": name,
        "returnValue": 0,
    }


def nvtx(start, end, text=None, *, kind=59, pid=PID, tid=PID, domain=0, text_id=None):
    return {
        "start": start,
        "end": end,
        "eventType": kind,
        "text": text,
        "textId": text_id,
        "globalTid": global_tid(pid, tid),
        "domainId": domain,
    }


def memory_event(start, va, size, *, free=False, kind=4, pid=PID, device=0, name=None):
    return {
        "start": start,
        "globalPid": global_pid(pid),
        "deviceId": device,
        "address": va,
        "bytes": size,
        "memKind": kind,
        "memoryOperationType": int(free),
        "name": name,
    }


class Export:
    """An export under construction.

    Parameters
    ----------
    version : str
        Full nsys version, one of :func:`versions`, or a beginning of one.
    lazy : bool
        Leave out tables without rows, as nsys does by default.
    options : dict
        Capture options for META_DATA_CAPTURE where the version has it; a value of None leaves the
        option out.
    """

    def __init__(self, version="2023.4.4", *, lazy=True, options=()):
        self.version = next(v for v in versions() if v.startswith(version))
        self.tables = schemas()[self.version]
        self.lazy = lazy
        self.rows: dict[str, list[dict]] = {}
        self.options = {
            "COLLECT_CUDA_TRACE": "true",
            "COLLECT_NVTX_TRACE": "true",
            "COLLECT_UVM_GPU_PAGE_FAULTS": "true",
            "COLLECT_UVM_CPU_PAGE_FAULTS": "true",
            "COLLECT_GPU_MEMORY_USAGE": "true",
        } | dict(options)
        self.strings = {1: "add", 2: "cudaMallocManaged_v6000", 3: "main", 4: "/home/user/bin/app"}

    def add(self, table, *rows):
        self.rows.setdefault(table, []).extend(rows)
        return self

    def _metadata(self):
        name = "META_DATA_EXPORT" if "META_DATA_EXPORT" in self.tables else "EXPORT_META_DATA"
        lazy = "EXPORT_PARAM_LAZY" if name == "META_DATA_EXPORT" else "EXPORT_LAZY"
        schema = self.schema_version()
        facts = {"EXPORT_PRODUCT_VERSION": self.version, lazy: str(self.lazy).lower()}
        facts |= {"EXPORT_SCHEMA_VERSION": schema} if schema else {}
        return name, [{"name": key, "value": value} for key, value in facts.items()]

    def schema_version(self):
        text = (DATA / "nsys" / "schema_by_version.json").read_text()
        full = next(key for key in json.loads(text) if key.startswith(self.version))
        found = full.partition("(schema ")[2].rstrip(")")
        return None if found == "-" else found

    def write(self, path):
        """Write the export; return its path."""
        path = Path(path)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            rows = dict(self.rows)
            if self.version != "unversioned":
                name, facts = self._metadata()
                rows.setdefault(name, facts)
            if "META_DATA_CAPTURE" in self.tables:
                stored = [
                    {"name": f"PROCESS_0:{key}", "value": value}
                    for key, value in self.options.items()
                    if value is not None
                ]
                rows.setdefault("META_DATA_CAPTURE", stored)
            rows.setdefault("StringIds", [{"id": i, "value": v} for i, v in self.strings.items()])
            for table in dict.fromkeys([*rows, *(() if self.lazy else self.tables)]):
                self._create(connection, table, rows.get(table, []))
            connection.commit()
        return path

    def columns(self, table):
        """Columns of a table with their declared type, in the version of this export or a newer one."""
        known = self.tables.get(table) or next(t[table] for t in schemas().values() if table in t)
        return {c.split(" ")[0]: c.split(" ")[1] for c in known.split(", ")}

    def _create(self, connection, table, rows):
        columns = self.columns(table)
        declared = ", ".join(
            f'"{name}" {kind.rstrip("!")}{" NOT NULL" if kind.endswith("!") else ""}'
            for name, kind in columns.items()
        )
        connection.execute(f'CREATE TABLE "{table}" ({declared})')
        marks = ", ".join("?" * len(columns))
        values = ([self._value(row, name, kind) for name, kind in columns.items()] for row in rows)
        connection.executemany(f'INSERT INTO "{table}" VALUES ({marks})', values)

    @staticmethod
    def _value(row, name, kind):
        value = row.get(name)
        if value is None and kind.endswith("!"):
            return "" if kind.startswith("TEXT") else 0
        return value


def real_traces():
    """Names of the real exports that are shipped, without suffix."""
    return sorted(path.name.removesuffix(".sqlite.gz") for path in TRACES.glob("*.sqlite.gz"))


def unpack(name, folder):
    """Unpack a real export into a folder; return its path."""
    path = Path(folder) / f"{name}.sqlite"
    path.write_bytes(gzip.decompress((TRACES / f"{name}.sqlite.gz").read_bytes()))
    return path


def ask(path, query, *parameters):
    """Ask the database itself, with plain sqlite3: the independent oracle."""
    with closing(
        sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
    ) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        return connection.execute(query, parameters).fetchall()
