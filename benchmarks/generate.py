"""Seeded exports of any size, shaped like real ones: batches, their copies, kernels.

The rows obey the driver's rules (one fault row per batch, its copies inside it and chained), so that
no check is short-cut; their places are drawn at random. They are made up, and only timed.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from exports import (
    CPU_FAULTS,
    GPU_FAULTS,
    KERNEL,
    MEMCPY,
    VA,
    Export,
    cpu_fault,
    gpu_fault,
    kernel,
    migration,
)


def write(path: Path, *, faults: int, migrations: int, kernels: int, seed: int = 1) -> Path:
    """Write an export with all tables (``--lazy=false``), so that the vendor's scripts run on it."""
    export = Export("2023.4.4", lazy=False)
    export.add(KERNEL, *(kernel(i * 1000, i * 1000 + 900, correlation=i) for i in range(kernels)))
    export.add(CPU_FAULTS, *(cpu_fault(i * 7, VA + 4096 * i) for i in range(faults // 50)))
    export.write(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        for table, rows in (
            (GPU_FAULTS, _faults(faults, seed)),
            (MEMCPY, _migrations(faults, migrations, seed)),
        ):
            columns = list(export.columns(table))
            names, marks = ", ".join(f'"{c}"' for c in columns), ", ".join("?" * len(columns))
            sql = f'INSERT INTO "{table}" ({names}) VALUES ({marks})'
            connection.executemany(sql, (tuple(row.get(c) for c in columns) for row in rows))
        connection.commit()
    return path


_BATCH_NS = 20_000


def _faults(n: int, seed: int) -> Iterator[dict]:
    draw = random.Random(seed)
    for i in range(n):
        page = draw.randrange(1 << 20)
        yield gpu_fault(
            i * _BATCH_NS, (i + 1) * _BATCH_NS, VA + 4096 * page, n=draw.randrange(1, 200)
        )


def _migrations(n_faults: int, n: int, seed: int) -> Iterator[dict]:
    draw = random.Random(seed)
    per_batch = max(1, n_faults // max(1, n))
    for i in range(n):
        page = draw.randrange(1 << 20) & ~15
        start = i * per_batch * _BATCH_NS + 10_000
        if i % 3:
            yield migration(start, start + 4_000, 61_440, VA + 4096 * page + 4096, cause=3)
        else:
            yield migration(start, start + 1_500, 4096, VA + 4096 * page)
