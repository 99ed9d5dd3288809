"""Which access brought a copy: that of the fault row of its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.addresses import AT_ONCE
from nsan.analysis.views.compact import filled
from nsan.schema import CAUSE, DIRECTION

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FAULTED: Final = [CAUSE.categories.to_list().index(name) for name in ("coherence", "prefetch")]
_OUT: Final = DIRECTION.categories.to_list().index("dtoh")
_NONE: Final = 255
_READS: Final = ("start_ns", "end_ns", "direction", "cause")


def copy_access(
    migrations: pl.DataFrame,
    gpu_faults: pl.DataFrame,
    owners: tuple[NDArray[Any], NDArray[Any]],
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Find the access of each copy by page faults: that of the fault row in which it lies.

    A fault row is a driver batch, and its copies start in (previous end, end]. One search in sorted
    ends finds the row; the full set of checks (:mod:`nsan.analysis.driver.batches`) sorts and groups
    all copies, which takes too long before a first picture.

    Parameters
    ----------
    migrations : DataFrame
        Reads ``start_ns``, ``end_ns``, ``direction``, ``cause``, ordered by start.
    gpu_faults : DataFrame
        Reads ``start_ns``, ``end_ns``, ``access``.
    owners : (array of int, array of int)
        Number of the process and GPU of each migration, and of each fault row.

    Returns
    -------
    (rows, access)
        Numbers of the migrations whose access is known, and its number in the enumeration. Not known
        is that of a copy that is no answer to a GPU page fault, that reaches out of the row that ends
        next, or where rows of different accesses end together.
    """
    batches = {owner: _batches(gpu_faults, owners[1], owner) for owner in _distinct(owners[1])}
    rows, access, at = [np.empty(0, np.int64)], [np.empty(0, np.uint8)], 0
    for piece in migrations.select(_READS).iter_slices(AT_ONCE):
        asked = _asked(piece)
        mine = owners[0][at : at + piece.height]
        for owner in _distinct(mine):
            copies = asked if _is_only(mine) else asked[mine[asked] == owner]
            if len(copies) and owner in batches and len(batches[owner][0]):
                found = _looked_up(piece, copies, batches[owner])
                known = np.flatnonzero(found != _NONE)
                rows.append(copies[known] + at)
                access.append(found[known])
        at += piece.height
    return np.concatenate(rows), np.concatenate(access)


def _is_only(owner: NDArray[Any]) -> bool:
    """Say whether the numbers are one, repeated without memory."""
    return len(owner) > 0 and owner.strides[0] == 0


def _distinct(owner: NDArray[Any]) -> list[int]:
    return [int(owner[0])] if _is_only(owner) else np.flatnonzero(np.bincount(owner)).tolist()


def _asked(copies: pl.DataFrame) -> NDArray[np.int64]:
    """Find the copies to a GPU by a page fault or by the driver's prefetcher."""
    cause = filled(copies["cause"].to_physical(), np.uint8, _NONE)
    direction = filled(copies["direction"].to_physical(), np.uint8, _NONE)
    wanted = np.zeros(256, bool)
    wanted[_FAULTED] = True
    return np.flatnonzero(wanted.take(cause) & (direction != _OUT))


def _batches(
    faults: pl.DataFrame, owners: NDArray[Any], owner: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Give end, start and access of each batch of an owner by end: rows that end together are one."""
    mine = faults.select(
        "end_ns", "start_ns", access=pl.col("access").to_physical().fill_null(_NONE)
    )
    rows = (mine if _is_only(owners) else mine.filter(owners == owner)).drop_nulls("end_ns")
    if not rows["end_ns"].is_sorted():
        rows = rows.sort("end_ns", maintain_order=True)
    end, start, access = (rows[name].to_numpy() for name in ("end_ns", "start_ns", "access"))
    if len(end) < 2 or (end[1:] != end[:-1]).all():
        return end, start, access
    first = np.flatnonzero(np.r_[True, end[1:] != end[:-1]])
    low, high = np.minimum.reduceat(access, first), np.maximum.reduceat(access, first)
    agreed = np.where(low == high, low, np.uint8(_NONE))
    return end[first], np.minimum.reduceat(start, first), agreed


def _looked_up(
    copies: pl.DataFrame, rows: NDArray[np.int64], batches: tuple[NDArray[Any], ...]
) -> NDArray[np.uint8]:
    """Give the access of the batch in which each copy lies; copies are in order of start."""
    begins = copies["start_ns"].to_numpy()[rows]
    # A copy whose end is not known lies in no batch.
    ends = filled(copies["end_ns"], np.int64, np.iinfo(np.int64).max)[rows]
    low, high = np.searchsorted(batches[0], [begins[0], begins[-1]]).tolist()
    near = slice(low, high + 1)
    end, start, access = (each[near] for each in batches)
    if not len(end):
        return np.full(len(rows), _NONE, np.uint8)
    at = np.minimum(np.searchsorted(end, begins), len(end) - 1)
    inside = (begins >= start[at]) & (begins <= end[at]) & (ends <= end[at])
    return np.where(inside, access[at], np.uint8(_NONE))
