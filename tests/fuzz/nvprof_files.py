"""Files of nvprof to damage: the text and CSV of a GPU trace, and databases, also as a session."""

from __future__ import annotations

import base64
import gzip
import sqlite3
from contextlib import closing
from functools import cache

from exports import DATA

LOGS = DATA / "nvprof"
_LOGS = (
    "x86_hotspot_11_64",
    "x86_hotspot_11_128",
    "x86_hotspot_11_256",
    "x86_bfs_111100_graph4096",
    "p9_hotspot_11_64",
    "p9_bfs_111100_graph65536",
)

UM = "CUPTI_ACTIVITY_KIND_UNIFIED_MEMORY_COUNTER"
KERNEL = "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
MEMCPY, MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
DEVICE, STRINGS = "CUPTI_ACTIVITY_KIND_DEVICE", "StringTable"
_ID = "_id_ INTEGER PRIMARY KEY AUTOINCREMENT"
_GPU_WORK = "start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT"
SCHEMA = {
    STRINGS: f"{_ID}, value TEXT NOT NULL UNIQUE",
    "Version": "version INTEGER",
    UM: f"{_ID}, counterKind INT NOT NULL, value INT NOT NULL, start INT NOT NULL, end INT NOT NULL, address INT NOT NULL, "
    "srcId INT NOT NULL, dstId INT NOT NULL, streamId INT NOT NULL, processId INT NOT NULL, flags INT NOT NULL",
    KERNEL: f"{_ID}, {_GPU_WORK}, gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT, name INT",
    MEMCPY: f"{_ID}, {_GPU_WORK}, bytes INT, copyKind INT",
    MEMSET: f"{_ID}, {_GPU_WORK}, bytes INT, memoryKind INT, value INT",
    RUNTIME: f"{_ID}, cbid INT, start INT, end INT, processId INT, threadId INT, correlationId INT, returnValue INT",
    DEVICE: f"{_ID}, id INT, name INT, globalMemorySize INT, globalMemoryBandwidth INT, numMultiprocessors INT, "
    "computeCapabilityMajor INT, computeCapabilityMinor INT",
}
T0, VA, PID = 1_608_667_294_000_000_000, 0x7F00_0000_0000, 4242


@cache
def log(name):
    """Give the text of a real trace."""
    return gzip.decompress((LOGS / f"v100_{name}.log.gz").read_bytes())


def printed(random):
    """Give a GPU trace as nvprof prints it: a real one, or its rows as CSV."""
    if random.random() < 0.7:
        return log(random.choice(_LOGS))
    return "\n".join(_csv(random)).encode()


def _csv(random):
    yield f"=={PID}== Profiling application: ./app"
    yield f"=={PID}== Profiling result:"
    yield '"Start","Duration","Device","Context","Stream","Unified Memory","Virtual Address","Name"'
    yield "ms,ms,,,,,,"
    at = 100.0
    for _ in range(random.choice((3, 20, 80))):
        at += random.randrange(1, 9000) / 1e6
        va = hex(VA + random.randrange(4096) * 4096)
        gpu, kind = '"Tesla V100 (0)"', random.randrange(4)
        if kind == 0:
            yield f'{at:.6f},0.004000,{gpu},,,{random.randrange(1, 257)},{va},"[Unified Memory GPU page faults]"'
        elif kind == 1:
            yield f'{at:.6f},0.001000,{gpu},,,{random.choice((4, 64, 2048)):.6f}KB,{va},"[Unified Memory Memcpy HtoD]"'
        elif kind == 2:
            yield f'{at:.6f},0.001000,{gpu},,,{random.choice((4, 64)):.6f}KB,{va},"[Unified Memory Memcpy DtoH]"'
        else:
            yield f'{at:.6f},,"CPU",,,PC 0x401234,{va},"[Unified Memory CPU page faults]"'
    yield ""


def database(random, path):
    """Write a database."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for table, columns in SCHEMA.items():
            connection.execute(f"CREATE TABLE {table} ({columns})")
        connection.executemany(
            f"INSERT INTO {STRINGS} VALUES (?, ?)",
            [(0, "-- null --"), (1, "secret/prog --key"), (2, "_ZN2ns4loopIfEEvPT_"), (3, "GPU X")],
        )
        connection.execute("INSERT INTO Version VALUES (12)")
        for _ in range(random.choice((2, 15, 60))):
            connection.execute(
                f"INSERT INTO {UM} (counterKind, value, start, end, address, srcId, dstId, streamId, processId, flags) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                _um_row(random),
            )
        for table, n in ((KERNEL, 3), (MEMCPY, 2), (MEMSET, 1), (RUNTIME, 4), (DEVICE, 1)):
            for i in range(n):
                _insert(random, connection, table, i)
        connection.commit()
    return path


def _um_row(random):
    kind = random.choice((1, 1, 2, 3, 4, 4, 5, 6, 7, 8))
    start = T0 + random.randrange(100_000)
    end = 0 if kind in {3, 5, 7} else start + random.randrange(5000)
    value = {3: 0x401234, 4: random.randrange(1, 257), 6: 0}.get(
        kind, 4096 * random.randrange(1, 32)
    )
    return (
        kind,
        value,
        start,
        end,
        VA + 4096 * random.randrange(2048),
        random.choice((0, 0, -1)),
        0,
        0,
        PID,
        random.randrange(5),
    )


def _insert(random, connection, table, i):
    start = T0 + random.randrange(100_000)
    known = {"start": start, "end": start + random.randrange(5000), "processId": PID, "threadId": -5, "contextId": 1, "streamId": 7,
             "correlationId": i, "name": 3 if table == DEVICE else 2, "cbid": random.choice((13, 206, 9999)), "bytes": 4096, "copyKind": 1,
             "memoryKind": 5, "globalMemorySize": 1 << 33, "globalMemoryBandwidth": 1 << 28}  # fmt: skip
    names = [part.split()[0] for part in SCHEMA[table].split(", ")][1:]
    marks = ", ".join("?" * len(names))
    connection.execute(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})",
        [known.get(name, 1 if name.startswith(("grid", "block")) else 0) for name in names],
    )


def session(raw, size=5000):
    """Write a database as the Visual Profiler does."""
    packed = (
        gzip.compress(raw[at : at + size], compresslevel=1, mtime=0)
        for at in range(0, len(raw), size)
    )
    pieces = "".join(f"<split>{base64.b64encode(piece).decode()}</split>" for piece in packed)
    return (
        '<?xml version="1.0"?>\n<session version="2" name="a.nvvp">\n<executable file="/secret/prog" args="--key" uvmprofiling="true"/>\n'
        f"<timelinepdm>\n<pdm>\n{pieces}</pdm>\n</timelinepdm>\n<analysispdm><pdm><split>never</split></pdm></analysispdm></session>\n"
    ).encode()
