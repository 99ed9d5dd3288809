"""Seeded exports of any size, shaped like real ones: batches, their copies, kernels.

    PYTHONPATH=tests python -m benchmarks.generate FILE --rows 100e6 [--any-order]

writes a huge one (:mod:`benchmarks.huge_rows`) in bounded memory.

The rows obey the driver's rules (one fault row per batch, its copies inside it and chained), so that
no check is short-cut; their places are drawn at random. They are made up, and only timed.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import adbc_driver_manager
import adbc_driver_sqlite
import numpy as np
import polars as pl
from exports import (
    CPU_FAULTS,
    CUDA_DEVICE,
    GPU,
    GPU_FAULTS,
    KERNEL,
    MEMCPY,
    MEMORY,
    NVTX,
    PREFETCH,
    VA,
    Export,
    cpu_fault,
    gpu_fault,
    kernel,
    memory_event,
    migration,
    nvtx,
)

from benchmarks import huge_rows as huge

_ROWS_AT_ONCE = 1 << 19


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


def write_huge(path: Path, n_rows: int, *, any_order: bool = False) -> Path:
    """Write an export of about so many fault and migration rows, in memory that does not grow with them.

    Parameters
    ----------
    path : Path
        Where; what is there is replaced.
    n_rows : int
        GPU fault rows (70 %) and migrations (30 %).
    any_order : bool, default False
        Rows of these tables in no order of time, as nsys 2025.6 may write them.

    Returns
    -------
    Path
        The file.
    """
    shape = huge.Shape.of_rows(n_rows)
    path.unlink(missing_ok=True)
    export = _context(shape)
    export.write(path)
    for table, count, rows in (
        (GPU_FAULTS, shape.n_faults, huge.faults),
        (MEMCPY, shape.n_copies, huge.copies),
    ):
        columns = export.columns(table)
        for numbers in _numbers(count, any_order=any_order):
            frame = rows(shape, numbers)
            if not any_order:
                frame = frame.sort("start", maintain_order=True)
            _append(path, table, _complete(frame, columns))
    return path


def _context(shape: huge.Shape) -> Export:
    """Put kernels, ranges, allocations, CPU faults and GPUs beside the rows."""
    export = Export("2023.4.4", lazy=False)
    for number, (pid, device) in enumerate(huge.LANES):
        export.add(GPU, {"id": number, "name": "bench", "totalMemory": 40 << 30})
        export.add(CUDA_DEVICE, {"gpuId": number, "cudaId": device, "pid": pid})
        size = shape.blocks * huge.VA_BLOCK_BYTES
        base = VA + (number << 36)
        export.add(MEMORY, memory_event(0, base, size, pid=pid, device=device))
        for i in range(0, shape.blocks, 4):
            place = base + i * huge.VA_BLOCK_BYTES
            export.add(CPU_FAULTS, cpu_fault(1_000 + i * 1_000 + number, place, pid=pid))
    edges = np.arange(shape.n_kernels + 1) * huge.BATCHES_PER_KERNEL
    starts = huge.batch_ns(edges).tolist()
    for i, start in enumerate(starts[:-1]):
        end = start + huge.BATCHES_PER_KERNEL * huge.BATCH_NS + 10_000
        for pid, device in huge.LANES:
            export.add(
                KERNEL, kernel(start - 5_000, end, pid=pid, device=device, name=1, correlation=i)
            )
        if i % 5 == 0:
            export.add(
                NVTX,
                *(
                    nvtx(
                        start - 9_000,
                        starts[min(i + 5, len(starts) - 1)] - 10_000,
                        "step",
                        pid=pid,
                        tid=pid,
                    )
                    for pid in sorted({pid for pid, _ in huge.LANES})
                ),
            )
    return export


def _numbers(count: int, *, any_order: bool) -> Iterator[np.ndarray]:
    """Number rows, so many at a time: in order, or by a step that comes to each of them once."""
    step = 1
    if any_order:
        step = next(n for n in range(int(count * 0.618) | 1, count + 3) if np.gcd(n, count) == 1)
    for first in range(0, count, _ROWS_AT_ONCE):
        numbers = np.arange(first, min(first + _ROWS_AT_ONCE, count), dtype=np.int64)
        yield numbers * step % count


def _complete(frame: pl.DataFrame, columns: dict[str, str]) -> pl.DataFrame:
    """Add what the table has besides, as zeros where a cell may not be null."""
    rest = (
        pl.lit(0 if kind.endswith("!") else None, pl.Int64).alias(name)
        for name, kind in columns.items()
        if name not in frame.columns
    )
    return frame.with_columns(rest).select(*columns)


def _append(path: Path, table: str, frame: pl.DataFrame) -> None:
    with (
        adbc_driver_sqlite.connect(os.fspath(path)) as database,
        adbc_driver_manager.AdbcConnection(database) as connection,
        adbc_driver_manager.AdbcStatement(connection) as statement,
    ):
        statement.set_options(
            **{"adbc.ingest.target_table": table, "adbc.ingest.mode": "adbc.ingest.mode.append"}
        )
        statement.bind_stream(frame)
        statement.execute_update()


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description="Write a huge export.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=float, required=True, help="fault and migration rows")
    parser.add_argument("--any-order", action="store_true", help="rows in no order of time")
    args = parser.parse_args()
    write_huge(args.file, int(args.rows), any_order=args.any_order)


if __name__ == "__main__":
    main()
