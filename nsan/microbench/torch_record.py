"""What a run of torch_uvm knows of itself, and the tables and the snapshot that it writes.

Standard library only, Python 3.9 or newer: it travels beside ``torch_uvm.py``.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsan.microbench import torch_machine as machine
else:
    machine = importlib.import_module(__name__.replace("torch_record", "torch_machine"))


class Record:
    """Phases and allocations of a run, in ns since it began."""

    def __init__(self) -> None:
        self.start_utc_ns, self._begun = time.time_ns(), time.perf_counter_ns()
        self.phases: list[list[Any]] = []
        self.allocations: list[list[Any]] = []

    def now(self) -> int:
        """Give the time since the run began."""
        return time.perf_counter_ns() - self._begun

    @contextlib.contextmanager
    def phase(self, torch: Any, name: str, iteration: int | None = None) -> Iterator[None]:
        """Time a phase to the end of its work, under an NVTX range."""
        phase = [name, iteration, self.now(), None]
        self.phases.append(phase)
        torch.cuda.nvtx.range_push(name)
        try:
            yield
            torch.cuda.synchronize()
            phase[3] = self.now()
        finally:
            torch.cuda.nvtx.range_pop()

    def allocated(self, name: str, role: str, place: tuple[int, int]) -> None:
        """Note an allocation that lives to the end."""
        if place[1]:
            self.allocations.append([name, role, "managed", *place, self.now(), None])


def segments_of(
    snapshot: Mapping[str, Any], pool: tuple[int, int], start_utc_ns: int
) -> list[list[Any]]:
    """Give the segments of a pool as rows of allocations.csv, in the order in which they were made.

    A snapshot that also has segments of another pool is refused: what lies there is not managed.
    """
    outside = [s for s in snapshot["segments"] if tuple(s["segment_pool_id"]) != pool]
    if outside:
        n_bytes = sum(segment["total_size"] for segment in outside)
        raise machine.EndedError(
            machine.FAILED,
            f"{n_bytes} byte of PyTorch's memory are outside of the managed pool: another thread allocated them",
        )
    made = {
        entry["addr"]: entry["time_us"] * 1000 - start_utc_ns
        for trace in snapshot["device_traces"]
        for entry in trace
        if entry["action"] == "segment_alloc"
    }
    rows = []
    found = sorted(snapshot["segments"], key=lambda segment: made.get(segment["address"], 0))
    for number, segment in enumerate(found, 1):
        va, name = segment["address"], f"segment {number} ({segment['segment_type']})"
        rows.append([name, "segment", "managed", va, segment["total_size"], made.get(va, 0), None])
    return rows


def write_tables(folder: Path, record: Record, about: Mapping[str, Any]) -> None:
    """Write the truth tables to a folder that is new or empty; they appear all at once."""
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[Any]]]] = {
        "allocations.csv": (
            ("allocation", "name", "role", "kind", "va", "bytes", "alloc_ns", "free_ns"),
            [[i, *row] for i, row in enumerate(record.allocations)],
        ),
        "phases.csv": (
            ("phase", "name", "iteration", "start_ns", "end_ns"),
            [[i, *row] for i, row in enumerate(record.phases)],
        ),
        "expected.csv": (("phase", "allocation", "direction", "least_bytes", "most_bytes"), []),
    }
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        for name, (columns, rows) in tables.items():
            with (scratch / name).open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([columns, *rows])
        (scratch / "run.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_snapshot(path: Path, snapshot: Any) -> None:
    """Write a memory snapshot as PyTorch does; it gets its name when all is written."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        scratch.write_bytes(pickle.dumps(snapshot, protocol=4))
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        message = f"--snapshot {path} cannot be written: {error.strerror}; choose another place"
        raise machine.EndedError(machine.FAILED, message) from error
