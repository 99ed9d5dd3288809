"""The tables that several commands print: their columns for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nsan.tabular.text import Field, dash, word
from nsan.text import cause_word, direction_word
from nsan.units import format_bytes, format_count, format_rate, format_time


def share(value: float | None) -> str:
    """Write a fraction as percent; what is not all is not written as 100 %."""
    if value is None:
        return "-"
    return f"{0.999 if 0.9995 <= value < 1 else value:.1%}"


MIGRATION_FIELDS: Final = (
    Field("direction", "Direction", direction_word, right=False),
    Field("cause", "Cause", cause_word, right=False),
    Field("device_id", "GPU", word),
    Field("pid", "Pid", word),
    Field("n", "Count", format_count),
    Field("bytes", "Total", format_bytes),
    Field("bytes_fraction", "Share", share),
    Field("min_bytes", "Min", format_bytes),
    Field("max_bytes", "Max", format_bytes),
    Field("busy_ns", "Busy", format_time),
    Field("bytes_per_s", "Rate", format_rate),
)
MIGRATION_COLUMNS: Final = (
    "direction",
    "cause",
    "device_id",
    "pid",
    "n",
    "bytes",
    "bytes_fraction",
    "min_bytes",
    "max_bytes",
    "busy_ns",
    "bytes_per_s",
    "min_va",
    "max_va",
)

FAULT_FIELDS: Final = (
    Field("processor", "Faulting", word, right=False),
    Field("access", "Access", dash, right=False),
    Field("device_id", "GPU", dash),
    Field("pid", "Pid", word),
    Field("n_rows", "Rows", format_count),
    Field("n_page_faults", "Recorded count", format_count),
    Field("n_addresses", "Addresses", format_count),
    Field("n_va_blocks", "VA blocks", format_count),
)
FAULT_COLUMNS: Final = tuple(field.key for field in FAULT_FIELDS)


def migration_rows(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add each group's share of all bytes."""
    known = [row["bytes"] for row in groups]
    whole = sum(known) if None not in known else None
    return [
        row | {"bytes_fraction": row["bytes"] / whole if whole else None}
        for row in map(dict, groups)
    ]


def fault_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Put GPU and CPU fault groups into one table; CPU faults have no GPU, access type or count."""
    gpu = [{"processor": "GPU", **row} for row in document["gpu_faults"]["groups"] or ()]
    bare = {"access": None, "device_id": None, "n_page_faults": None}
    cpu = [{"processor": "CPU", **bare, **row} for row in document["cpu_faults"]["groups"] or ()]
    return gpu + cpu


def unanswered(document: Mapping[str, Any], kind: str) -> str:
    """Say why there is no figure, and what would give one."""
    switch, reason = document["switches"][kind], document["reasons"][kind]
    what = "not recorded" if document["capture"][kind] == "not_recorded" else "unknown"
    again = f" Profile again with `nsys profile {switch} ...`." if switch else ""
    return f"{what}: {reason}.{again}"
