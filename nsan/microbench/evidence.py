"""Whether a trace shows that the driver was traced: one rule for runs here and for those that come home."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from nsan.contract import has_um_data

Lack = Literal["", "data", "traffic", "migration"]
"""What a trace lacks: nothing, all of Unified Memory, all but allocations, or the migration that must be there."""


def lack_of(info: Mapping[str, Any], totals: Mapping[str, Any], *, demands_bytes: bool) -> Lack:
    """Say what is missing in the trace of a program that ended well.

    A managed allocation alone is recorded by whoever intercepts calls: it does not tell that the driver was traced. A
    fault does, unless something must migrate: then only a migration does.

    Parameters
    ----------
    info, totals : mapping
        Of a manifest.
    demands_bytes : bool
        Whether by what the program knows something migrates.

    Returns
    -------
    str
        Empty if nothing is missing, or rows that could not be told apart may be what is.
    """
    counts = totals["counts"]
    if counts["migrations"]:
        return ""
    if has_um_data(info, _without_rows(totals)):
        return ""  # for the doubts alone
    if demands_bytes and has_um_data(info, totals):
        return "migration"
    # A fault of the CPU shows the driver, and nothing of the GPU.
    if counts["gpu_faults"] or (counts["cpu_faults"] and counts["kernels"]):
        return ""
    return "traffic" if has_um_data(info, totals) else "data"


def _without_rows(totals: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "counts": dict.fromkeys(totals["counts"], 0),
        "managed": dict.fromkeys(totals["managed"], 0),
    }
