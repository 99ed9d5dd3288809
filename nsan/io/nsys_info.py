"""Versions, switches and the three answers, from the metadata tables of an export.

Those tables also hold the whole environment of the process, user and host names and the command
line. Only the names listed here are ever read out of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nsan.info import Answer, Capture

EXPORT_TABLES: Final = ("META_DATA_EXPORT", "EXPORT_META_DATA")
CAPTURE_TABLE: Final = "META_DATA_CAPTURE"
ENVIRONMENT_TABLE: Final = "TARGET_INFO_SYSTEM_ENV"

MODEL_PRODUCT: Final = "nsan UVM driver model"
"""Who wrote an export that was not recorded: the product that its metadata names."""

EXPORT_KEYS: Final = (
    "EXPORT_PRODUCT_NAME",
    "EXPORT_PRODUCT_VERSION",
    "EXPORT_SCHEMA_VERSION",
    "EXPORT_PARAM_LAZY",
    "EXPORT_LAZY",
    "EXPORT_PARAM_TABLES_TO_EXPORT",
    "EXPORT_CONFIG_TIME_SHIFT",
)
ENVIRONMENT_KEYS: Final = (
    "NvDriverVersion",
    "CudaDriverVersion",
    "CpuArchitecture",
    "CpuDescription",
    "SoftwareReleaseVersion",
)
SWITCHES: Final = {
    "gpu_faults": "--cuda-um-gpu-page-faults=true",
    "cpu_faults": "--cuda-um-cpu-page-faults=true",
    "migrations": "--trace=cuda",
    "allocations": "--cuda-memory-usage=true",
    "nvtx": "--trace=cuda,nvtx",
    "kernels": "--trace=cuda",
}
_OPTIONS: Final = {
    "gpu_faults": "COLLECT_UVM_GPU_PAGE_FAULTS",
    "cpu_faults": "COLLECT_UVM_CPU_PAGE_FAULTS",
    "migrations": "COLLECT_CUDA_TRACE",
    "allocations": "COLLECT_GPU_MEMORY_USAGE",
    "nvtx": "COLLECT_NVTX_TRACE",
    "kernels": "COLLECT_CUDA_TRACE",
}
CAPTURE_KEYS: Final = (*sorted(set(_OPTIONS.values())), "CUDA_GRAPH_TRACE_OPTIONS:MODE")
NOT_TRACED: Final = "(?i)unified memory cannot be traced"
"""How nsys says, in its messages, that a platform does not let it trace Unified Memory."""

_OF_UNIFIED_MEMORY: Final = frozenset({"gpu_faults", "cpu_faults", "migrations"})
_WITH_CUDA: Final = frozenset({"migrations", "kernels"})


@dataclass(frozen=True)
class Evidence:
    """What an export says about one kind of event.

    Attributes
    ----------
    n_rows : int
        Rows of it.
    has_table : bool
        Its table exists.
    readable : bool
        The column that tells its rows from others could be read.
    lazy : bool or None
        The export leaves out tables without rows; None where it does not say.
    option : bool or None
        The capture option; None where it does not say.
    cuda_seen : bool
        Any CUDA event is there, so CUDA was traced.
    refused : bool
        nsys said that it cannot trace Unified Memory here.
    """

    n_rows: int
    has_table: bool
    readable: bool
    lazy: bool | None
    option: bool | None
    cuda_seen: bool
    refused: bool = False


def option_of(kind: str, options: Mapping[str, list[str]]) -> bool | None:
    """Say whether a capture option was on: in any scope, per process or for the session."""
    values = {value.strip().lower() for value in options.get(_OPTIONS[kind], [])}
    if "true" in values or "1" in values:
        return True
    return False if values & {"false", "0"} else None


def answer(kind: str, seen: Evidence) -> Capture:
    """Decide between recorded, not recorded and unknown; rows win over what the options say.

    Migrations and kernels come with plain CUDA trace, so any CUDA event shows that they were
    traced, even where the options are missing or say otherwise.
    """
    switch = SWITCHES[kind]
    if not seen.readable:
        return Capture("unknown", switch, "the column that tells its rows apart cannot be read")
    if seen.n_rows:
        return Capture("recorded", switch, "rows are there")
    if seen.refused and kind in _OF_UNIFIED_MEMORY:
        # No switch helps: the platform is the reason.
        return Capture("not_recorded", "", "nsys could not trace Unified Memory on this platform")
    traced = seen.option
    if kind in _WITH_CUDA and seen.cuda_seen:
        traced = True
    if traced is None:
        return Capture("unknown", switch, "the export does not store its capture options")
    if not traced:
        return Capture("not_recorded", switch, "the switch was off")
    return Capture(*_traced_without_rows(kind, seen))


def _traced_without_rows(kind: str, seen: Evidence) -> tuple[Answer, str, str]:
    switch = SWITCHES[kind]
    if seen.has_table or seen.lazy or (seen.lazy is None and seen.option):
        return "recorded", switch, "traced, and there was none"
    return "unknown", switch, "it was traced, but the export lacks its table"


def is_true(text: str | None) -> bool | None:
    """Read a flag of the metadata tables; None if it is not there."""
    return None if text is None else text.strip().lower() in {"true", "1", "yes"}


def driver_version(text: str | None) -> str | None:
    """Write a driver version with dots; nsys 2022 stores it as one number.

    Examples
    --------
    >>> driver_version("52510517"), driver_version("550.163.01")
    ('525.105.17', '550.163.01')
    """
    if not text or text == "0":
        return None  # a machine without a driver
    packed = re.fullmatch(r"(\d{3})(\d{2,3})(\d{2})", text)
    return ".".join(packed.groups()) if packed else text


def platform_of(release: str | None, architecture: str | None) -> str | None:
    """Name the platforms on which Unified Memory works differently: ``wsl`` and ``tegra``."""
    release = (release or "").lower()
    if "microsoft" in release or "wsl" in release:
        return "wsl"
    return "tegra" if "tegra" in release and "aarch64" in (architecture or "") else None
