"""How fast the link of a GPU can be, as its own copies show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

if TYPE_CHECKING:
    from nsan.analysis.advisor.facts import Facts

_LARGE_BYTES: Final = 512 << 10


def bytes_per_s(
    facts: Facts, pid: int | None, device_id: int | None, direction: str
) -> float | None:
    """Give the best rate that copies of a direction show.

    Parameters
    ----------
    facts : Facts
        A trace.
    pid, device_id : int, optional
        Process and GPU.
    direction : str
        "htod" or "dtoh".

    Returns
    -------
    float, optional
        The higher of the rate of the best class of large steps and of the fitted one; None where neither a step of
        512 KiB nor two sizes show what the link can do, for small copies do not.
    """
    rates = []
    enough = {"transfer_efficiency": ("min_bytes", _LARGE_BYTES), "copy_cost": ("n_sizes", 2)}
    for name, (column, least) in enough.items():
        found = facts.rows_of(name)
        if found is not None:
            here = (
                (pl.col(column) >= least)
                & (pl.col("direction").cast(pl.String) == direction)
                & pl.col("pid").eq_missing(pl.lit(pid, pl.UInt32))
                & pl.col("device_id").eq_missing(pl.lit(device_id, pl.Int64))
            )
            rates.append(found.filter(here)["bytes_per_s"].max())
    known = [float(rate) for rate in rates if isinstance(rate, int | float) and rate > 0]
    return max(known, default=None)
