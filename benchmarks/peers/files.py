"""The files that all are asked about: real captures, model samples, and made exports of any size.

Needs `tests` on the path, as :mod:`benchmarks.generate` does.
"""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.generate import write
from benchmarks.peers.tables import CPU_FAULTS, GPU_FAULTS, KERNEL, MEMCPY

SAMPLES = Path(__file__).parents[2] / "sample_data"
_BATCH_NS = 20_000
_PER_KERNEL = 1_000
_PAUSE_NS = 1_000_000
_KERNEL_NS = _BATCH_NS * _PER_KERNEL
_NAMES = 5
_FUNCTIONS = 7
_COPIES = "(11, 'Unified Host-to-Device'), (12, 'Unified Device-to-Host'), (13, 'Unified Device-to-Device')"


@dataclass(frozen=True)
class File:
    """A file, and what the document calls it."""

    path: Path
    label: str


def samples() -> list[File]:
    """Give the exports that are shipped."""
    model = "model sample"
    return [
        File(
            SAMPLES / "um_vector_add_rtx4060l.sqlite",
            "real capture of `vector_add`, no page faults",
        ),
        *(
            File(SAMPLES / "model" / name / f"{name}.sqlite", f"{model} `{name}`{more}")
            for name, more in (
                ("oversubscribed_sweep", ""),
                ("two_gpus", ", with device-to-device"),
            )
        ),
    ]


def made(folder: Path, n: int, seed: int = 1) -> File:
    """Make an export of n fault rows, n migrations, kernels and CPU faults."""
    path = folder / f"made_{n}_{seed}.sqlite"
    n_kernels = max(n // _PER_KERNEL, 2)
    write(path, faults=n, migrations=n, kernels=n_kernels, seed=seed)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        _shape(connection, n, n_kernels)
        connection.commit()
    return File(path, f"made, {n:,} fault rows, {n:,} migrations")


def _shape(connection: sqlite3.Connection, n: int, n_kernels: int) -> None:
    """Let kernels cover nine tenths of the faults, with a pause after each; name what is only numbered."""
    later = f"+ start / {_KERNEL_NS} * {_PAUSE_NS}"
    for table in (GPU_FAULTS, MEMCPY):
        connection.execute(f"UPDATE {table} SET start = start {later}, end = end {later}")
    step, per_kernel = (
        _KERNEL_NS + _PAUSE_NS,
        f"((rowid - 1) * {max(n // n_kernels // _PER_KERNEL, 1)})",
    )
    connection.execute(
        f"UPDATE {KERNEL} SET start = {per_kernel} * {step}, "
        f"end = {per_kernel} * {step} + {_KERNEL_NS}, shortName = 1000 + rowid % {_NAMES}, "
        f"demangledName = 1000 + rowid % {_NAMES}"
    )
    connection.execute(f"DELETE FROM {KERNEL} WHERE rowid > {max(n_kernels * 9 // 10, 1)}")
    span = max(n, _PER_KERNEL) // _PER_KERNEL * step
    connection.execute(
        f"UPDATE {CPU_FAULTS} SET start = (rowid - 1) * {max(span // max(n // 50, 1), 1)}, "
        f"CpuInstruction = 2000 + rowid % {_FUNCTIONS}"
    )
    names = [(1000 + i, f"kernel_{i}") for i in range(_NAMES)]
    names += [(2000 + i, f"fill_{i}") for i in range(_FUNCTIONS)]
    connection.executemany("INSERT INTO StringIds (id, value) VALUES (?, ?)", names)
    connection.execute(f"INSERT INTO ENUM_CUDA_MEMCPY_OPER (id, label) VALUES {_COPIES}")


def snapshot(folder: Path, megabytes: int) -> list[File]:
    """Unpack the shipped history of PyTorch's allocator, and repeat it to a size."""
    from benchmarks.snapshots import SAMPLE, make

    small = folder / "sample.pickle"
    small.write_bytes(gzip.decompress(SAMPLE.read_bytes()))
    found = [File(small, f"snapshot of a real run, {small.stat().st_size / 1e6:.0f} MB")]
    if megabytes:
        large = folder / "repeated.pickle"
        make(large, megabytes * 1_000_000)
        size = large.stat().st_size / 1e6
        found.append(File(large, f"the same history again and again, {size:.0f} MB"))
    return found


def warm(file: Path) -> None:
    """Read a file once, so that it is in the page cache for all."""
    with file.open("rb") as opened:
        while opened.read(1 << 24):
            pass
