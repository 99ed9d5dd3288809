"""What rules may ask: the summary of a trace and the results of analyses, each computed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import polars as pl

from nsan.analysis.advisor.advice import Number, Target

if TYPE_CHECKING:
    from nsan.analysis.result import Kind

FAULTS: Final = ("coherence", "prefetch")
"""Causes of what page faults brought: the pages themselves, and what the driver's prefetcher added."""

_TORCH: Final = {
    "processes": ("name", r"(?i)^(python|pypy|ipython|torchrun)"),
    "kernels": ("demangled", r"\bat::native\b|\bc10::"),
    "nvtx_ranges": ("name", r"^aten::|(?i)torch"),
}
"""What PyTorch leaves in a trace: by table the column, and what stands in it."""


class Facts(Protocol):
    """A trace, and perhaps a memory snapshot of the same run."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """The JSON contract; see :func:`nsan.contract.summary`."""
        ...

    @property
    def is_part(self) -> bool:
        """Whether filters chose a part of the capture."""
        ...

    def rows_of(self, name: str, options: Mapping[str, Any] | None = None) -> pl.DataFrame | None:
        """Give the result of an analysis; None where it has no row or cannot be asked."""
        ...

    def lazy(self, name: str, options: Mapping[str, Any] | None = None) -> pl.LazyFrame:
        """Give the result of an analysis, not yet computed."""
        ...

    def kinds(self, name: str, found: pl.DataFrame) -> Mapping[str, str]:
        """Say of which kind each column of a result is."""
        ...

    def events(self, name: str) -> pl.LazyFrame:
        """Give a table of the trace, as filtered; see :mod:`nsan.schema`."""
        ...

    def is_recorded(self, *kinds: str) -> bool:
        """Say whether all these kinds of events were recorded, maybe without a row."""
        ...

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a memory snapshot of PyTorch."""
        ...


def span_ns(facts: Facts) -> int:
    """Give the time from the first event to the last, ns; 0 if it is not known.

    Where start times are too coarse for that (nvprof text), the time of kernels stands for it: at least that passed.
    """
    known = facts.summary["duration_ns"]
    if known is not None:
        return int(known)
    kernels = facts.rows_of("faults_by_kernel")
    return 0 if kernels is None else int(kernels["time_ns"].sum() or 0)


def is_modelled(facts: Facts) -> bool:
    """Say whether the driver model wrote the trace: then every figure is the model's."""
    return bool(facts.summary["source_kind"] == "nsan-model")


def hints_at_torch(facts: Facts) -> bool:
    """Say whether anything hints at PyTorch: a snapshot, Python, its kernels or its ranges.

    Parameters
    ----------
    facts : Facts
        A trace.

    Returns
    -------
    bool
        Where nothing does, advice about PyTorch is of no use to anybody.
    """
    if facts.has_snapshot:
        return True
    return any(
        facts.events(table).select(pl.col(name).str.contains(words).any()).collect().item()
        for table, (name, words) in _TORCH.items()
    )


def number(facts: Facts, label: str, value: float, unit: str, kind: Kind = "derived") -> Number:
    """Note a figure; of a modelled trace every figure is modelled.

    Parameters
    ----------
    facts : Facts
        Of which trace.
    label : str
        What it is.
    value : int or float
        How much.
    unit : str
        Of the value.
    kind : str
        Of which kind it would be in a recorded trace.

    Returns
    -------
    Number
        The figure.
    """
    return Number(label, value, unit, "modelled" if is_modelled(facts) else kind)


def moved_bytes(facts: Facts, direction: str, *causes: str) -> int:
    """Add up what moved one way, of some causes or of all; 0 where it is not known.

    Parameters
    ----------
    facts : Facts
        Of which trace.
    direction : str
        "htod", "dtoh" or "dtod".
    *causes : str
        Causes, as "coherence".

    Returns
    -------
    int
        Bytes.
    """
    groups = facts.summary["migrations"]["groups"] or ()
    return sum(
        row["bytes"] or 0
        for row in groups
        if row["direction"] == direction and (not causes or row["cause"] in causes)
    )


def gate_of(figure: str, part: float | None, whole: float | None) -> str:
    """Write a gate that holds if an advice takes away at least half of what it is about.

    Parameters
    ----------
    figure : str
        Of :mod:`nsan.comparing.figures`.
    part, whole : float, optional
        How much of the figure the advice is about, and the figure of the run.

    Returns
    -------
    str
        As "migrations.bytes>-34%": half the share that the part is of the whole, rounded towards 0. "" where that is
        nothing, or not known: then no change of the figure tells.
    """
    if not part or not whole:
        return ""
    percent = int(50 * min(part / whole, 1.0))
    return f"{figure}>-{percent}%" if percent else ""


def target_of(row: Mapping[str, Any], kernel: str = "") -> Target:
    """Point at an allocation, and perhaps at a kernel.

    Parameters
    ----------
    row : mapping
        Of ``faults_by_allocation``: part, allocation_id, name, bytes and va, and where it is known pid.
    kernel : str
        Name of a kernel.

    Returns
    -------
    Target
        Both.
    """
    unnamed = row["name"] == f"0x{row['va'] or 0:x}, {row['bytes']} byte"
    name = "" if unnamed or row["name"] is None else str(row["name"])
    return Target(
        allocation=name,
        allocation_id=row["allocation_id"],
        bytes=row["bytes"],
        va=row["va"],
        kernel=kernel,
        is_guessed=row["part"] == "guessed",
        pid=row.get("pid"),
    )
