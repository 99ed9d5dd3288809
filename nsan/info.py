"""What is known about a capture besides its rows. Standard library only: the warm path reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

Answer = Literal["recorded", "not_recorded", "unknown"]
Window = tuple[int, int]
"""A half-open interval of time, ns."""

_LONGEST_NUMBER: Final = 9
NEWEST_SCHEMA: Final = (3, 28, 1)
"""The newest nsys export schema that nsan's readers were checked against."""

MODEL_KIND: Final = "nsan-model"
"""Kind of a source that nsan's own driver model wrote, whatever its format."""

MODELLED: Final = "written by nsan's UVM driver model, not recorded"
"""What a reader of such a source is told."""


@dataclass(frozen=True)
class Capture:
    """Whether one kind of event was recorded: three answers, never two."""

    answer: Answer
    switch: str
    """The `nsys profile` switch that records it."""
    reason: str
    """Why this answer, for people."""


@dataclass(frozen=True)
class TraceInfo:
    """What is known about a capture besides its rows. Holds no private data of the export."""

    source: str
    """Name of the file, without its folder."""
    kind: str
    nsys_version: str | None = None
    export_schema: str | None = None
    session_start_utc_ns: int | None = None
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    cpu: str | None = None
    cpu_architecture: str | None = None
    platform: str | None = None
    """``wsl``, ``tegra`` or null."""
    graph_mode: str | None = None
    capture: dict[str, Capture] = field(default_factory=dict)
    """By kind of event: gpu_faults, cpu_faults, migrations, allocations, nvtx, kernels."""
    losses: dict[str, dict[str, int]] = field(default_factory=dict)
    """By table and column of the export: cells that could not be read."""
    absent_columns: dict[str, list[str]] = field(default_factory=dict)
    """By table of the export: columns that nsan reads and that are not there."""
    shared_ordinals: list[int] = field(default_factory=list)
    """GPU ordinals that several processes use, where nothing says whether it is one GPU."""
    warnings: list[str] = field(default_factory=list)
    """Sentences about the source itself: not whole, not verified."""
    doubtful: list[str] = field(default_factory=list)
    """Figures that cannot be known here: span, busy, gpus, managed_allocations, managed_calls."""
    allocation_names: str | None = None
    """Name of the folder of the program's own tables that allocations have their names from, if any."""
    rank: int | None = None
    """Place of the recorded process in its parallel program (MPI, torchrun, SLURM), where the export says it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TraceInfo:
        """Read back what :meth:`to_dict` wrote."""
        capture = {kind: Capture(**answer) for kind, answer in data["capture"].items()}
        return cls(**{**data, "capture": capture})


def parse_version(text: str | None) -> tuple[int, ...] | None:
    """Read a dotted version; None if it is none.

    Examples
    --------
    >>> parse_version("3.24.14"), parse_version("next")
    ((3, 24, 14), None)
    """
    parts = (text or "").strip().split(".")
    if not all(part.isdecimal() and len(part) <= _LONGEST_NUMBER for part in parts):
        return None
    return tuple(map(int, parts))
