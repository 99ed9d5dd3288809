"""A memory snapshot by Python's own unpickler: what it holds, counted. Only for snapshots of our own."""

from __future__ import annotations

import pickle
from pathlib import Path


def entries_of(path: Path) -> dict[str, int]:
    """Count what a snapshot holds, by Python's own unpickler."""
    with path.open("rb") as file:
        content = pickle.load(file)
    segments = content["segments"]
    return {
        "n_entries": sum(map(len, content["device_traces"])),
        "n_segments": len(segments),
        "reserved_bytes": sum(segment["total_size"] for segment in segments),
        "allocated_bytes": sum(segment["allocated_size"] for segment in segments),
    }
