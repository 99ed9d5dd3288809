"""What a run says of itself besides its figures: how it was recorded, on what, and what the program does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysing import run_analysis
from nsan.analysis.catalog import find
from nsan.contract import document, has_um_data
from nsan.totals import totals

if TYPE_CHECKING:
    from nsan.asking import Asked
    from nsan.trace import Trace

_VERSION: Final = r"(_v\d+)?(_ptsz|_ptds)?$"
"""What CUPTI puts behind the name of a call."""

_MEMORY_CALL: Final = (
    r"^(cudaMalloc|cuMemAlloc|cudaFree|cuMemFree|cudaMemPrefetch|cuMemPrefetch|cudaMemAdvise|cuMemAdvise"
    r"|cudaMemDiscard|cuMemDiscard|cudaHostAlloc|cuMemHostAlloc|cudaHostRegister|cuMemHostRegister"
    r"|cudaStreamAttachMem|cuStreamAttachMem|cudaMemcpy|cuMemcpy|cudaMemset|cuMemset)"
)
"""Calls that allocate, free, move or advise memory: what the driver is told."""

_SIZES: Final = ("capacity_bytes", "available_bytes", "evicted_bytes")
_FACTORS: Final = ("oversubscription_factor", "observed_factor")


@dataclass(frozen=True)
class Profile:
    """A run apart from its figures.

    Attributes
    ----------
    name : str
        Name of the run, for people.
    summary : mapping
        The JSON contract of what the filters left of it (:func:`nsan.contract.summary`).
    place : str
        What tells its file from others.
    platform : str or None
        "wsl", "tegra" or None.
    has_um_data : bool
        Whether the whole capture has anything of Unified Memory.
    is_empty : bool
        Whether what the filters left has nothing of it.
    is_timed : bool
        Whether a window of time was chosen, in ns from the start of the session.
    lost_fraction : float
        Bytes that the recording has lost, of all that moved; 0 where no loss was found.
    kernels : mapping of str to int
        Launches by name.
    calls : mapping of str to int, or None
        Calls that manage memory, by name without version; None where no call was recorded.
    ranges : mapping of str to int, or None
        NVTX ranges by name; None where none were recorded.
    steps_ns : float or None
        Length of all steps together, warm or not; None where none were found.
    memory : mapping of str to float
        "capacity_bytes", "available_bytes" and "evicted_bytes" of all GPUs, "oversubscription_factor" and, where
        pages were evicted, "observed_factor", of the fullest GPU; without those that are unknown.
    """

    name: str
    summary: Mapping[str, Any]
    place: str = ""
    platform: str | None = None
    has_um_data: bool = True
    is_empty: bool = False
    is_timed: bool = False
    lost_fraction: float = 0.0
    kernels: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[str, int] | None = None
    ranges: Mapping[str, int] | None = None
    steps_ns: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)


def profile_of(asked: Asked, name: str) -> Profile:
    """Take the profile of a run, all but its memory: no event is looked at that the store has counted.

    Parameters
    ----------
    asked : Asked
        The run, opened.
    name : str
        Its name, for people.

    Returns
    -------
    Profile
        Of the whole program, but for GPUs and processes that a filter leaves out.
    """
    trace, info = asked.trace.unwindowed or asked.trace, asked.whole.info.to_dict()
    known = asked.whole.capture_totals or totals(asked.whole)
    return Profile(
        name,
        asked.summary if asked.filters else document(info, known),
        place=str(asked.path.resolve()),
        platform=asked.whole.info.platform,
        has_um_data=has_um_data(info, known),
        is_empty=bool(asked.filters) and asked.is_empty,
        is_timed="time" in asked.filters,
        lost_fraction=_lost(known),
        kernels=_launches(trace),
        calls=_calls(trace),
        ranges=_ranges(trace) if asked.is_recorded("nvtx") else None,
    )


def _lost(known: Mapping[str, Any]) -> float:
    """Say how much of what moved is missing, at least."""
    lost = sum(hole["lost_bytes"] or hole["least_bytes"] for hole in known["lost_rows"]["holes"])
    moved = sum(row["bytes"] or 0 for row in known["migrations"]["groups"])
    return lost / (moved + lost) if lost else 0.0


def _launches(trace: Trace) -> dict[str, int]:
    counts = trace.kernels.drop_nulls("name").group_by("name").len().sort("name").collect()
    return dict(counts.iter_rows())


def _calls(trace: Trace) -> dict[str, int] | None:
    """Count the calls that manage memory; None where no call of any kind is there."""
    plain = pl.col("name").str.replace(_VERSION, "")
    counts = trace.api_calls.group_by(plain).len().sort("name").collect()
    if counts.is_empty():
        return None
    return {name: n for name, n in counts.iter_rows() if name and re.match(_MEMORY_CALL, name)}


def _ranges(trace: Trace) -> dict[str, int]:
    """Count NVTX ranges by domain and name."""
    domain = pl.when(pl.col("domain").is_not_null()).then(pl.format("{}: ", "domain"))
    name = pl.concat_str(domain.fill_null(""), pl.col("name"))
    ranges = trace.nvtx_ranges.drop_nulls("name").group_by(name.alias("name")).len()
    return dict(ranges.sort("name").collect().iter_rows())


def steps_of(asked: Asked, nvtx: str = "") -> float | None:
    """Say how long all steps of a run are together, warm or not.

    Parameters
    ----------
    asked : Asked
        The run, opened.
    nvtx : str, optional
        NVTX range of a step; by default found.

    Returns
    -------
    float or None
        In ns, of the thread with most; None without steps.
    """
    found = asked.rows_of("iterations", {"nvtx": nvtx, "basis": "nvtx"} if nvtx else {})
    if found is None:
        return None
    each = found.filter(pl.col("part") == "step").group_by("step_id").agg(pl.col("time_ns").max())
    return float(each["time_ns"].sum()) if each.height else None


def memory_of(asked: Asked) -> dict[str, float]:
    """Say how much memory GPUs have, what of it is left for managed data, and how full that is.

    Parameters
    ----------
    asked : Asked
        The run, opened.

    Returns
    -------
    dict
        As :attr:`Profile.memory`.
    """
    found = run_analysis(asked.whole, find("oversubscription_factor")).collect()
    gpus = found.drop_nulls("device_id").unique("device_id", keep="any", maintain_order=True)
    sizes = {key: gpus[key] for key in _SIZES if gpus.height and not gpus[key].null_count()}
    sums = {key: float(column.sum()) for key, column in sizes.items()}
    factors = {key: found[key].max() for key in _FACTORS}
    return sums | {key: float(value) for key, value in factors.items() if value is not None}  # type: ignore[arg-type]
