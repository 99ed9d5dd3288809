"""Seeded exports of any size, shaped like real ones: batches, their copies, kernels.

The rows obey the driver's rules (one fault row per batch, its copies inside it and chained), so that
no check is short-cut; their places are drawn at random. They are made up, and only timed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from exports import (
    CPU_FAULTS,
    GPU_FAULTS,
    KERNEL,
    MEMCPY,
    PREFETCH,
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
_PAGES = 1 << 20


def _page(i: int, seed: int) -> int:
    """Draw the first page of a batch: scattered, on a 64 KiB line, the same for fault and copies."""
    return ((i + seed) * 2_654_435_761 >> 7) % _PAGES & ~15


def _faults(n: int, seed: int) -> Iterator[dict]:
    for i in range(n):
        start, page = i * _BATCH_NS, _page(i, seed)
        yield gpu_fault(start, start + _BATCH_NS, VA + 4096 * page, n=1 + page // 16 % 200)


def _migrations(n_faults: int, n: int, seed: int) -> Iterator[dict]:
    """Two chained copies, the faulted page and what the prefetcher adds, in evenly spread batches."""
    step = max(1, n_faults // max(1, n // 2))
    for i in range(n):
        batch = i // 2 * step
        start, va = batch * _BATCH_NS + 10_000, VA + 4096 * _page(batch, seed)
        if i % 2:
            yield migration(start + 1_501, start + 5_500, 61_440, va + 4096, cause=PREFETCH)
        else:
            yield migration(start, start + 1_500, 4096, va)
