"""Which rows of a trace the filters keep: a mask over the rows of each table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from nsan.analysis.intervals import union
from nsan.analysis.views.keeping import in_places, in_windows, with_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nsan.analysis.views.events import Events, Part


@dataclass(frozen=True, eq=False)
class Choice:
    """What filters keep; None of anything keeps all.

    Attributes
    ----------
    owners : list of int, optional
        Processes and GPUs.
    running : DataFrame, optional
        ``owner``, ``start_ns``, ``end_ns``: when the chosen kernels run, as :func:`running_of` gives it.
    windows : DataFrame, optional
        ``start_ns``, ``end_ns``: when the chosen ranges are open, for every owner.
    held : DataFrame, optional
        ``place_start``, ``place_end``, ``alloc_ns``, ``free_ns``: the chosen allocations.
    """

    owners: list[int] | None = None
    running: pl.DataFrame | None = None
    windows: pl.DataFrame | None = None
    held: pl.DataFrame | None = None

    def mask(self, part: Part) -> NDArray[np.bool_] | None:
        """Say which rows of a table stay; None: all."""
        masks = []
        if self.owners is not None:
            masks.append(with_numbers(part.owner, self.owners))
        if self.running is not None:
            masks.append(_while_running(part, self.running))
        if self.windows is not None:
            masks.append(in_windows(part, self.windows))
        if self.held is not None:
            masks.append(in_places(part, self.held))
        return np.logical_and.reduce(masks) if masks else None

    def kept(self, events: Events) -> Events:
        """Keep a part of the events; axes, layers and owners stay as they are."""
        parts = {}
        for name, part in events.parts.items():
            mask = self.mask(part)
            left = part if mask is None or mask.all() else part.taken(mask)
            if left.n_rows:
                parts[name] = left
        return events if parts == dict(events.parts) else replace(events, parts=parts)


def running_of(kernels: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame:
    """Find when kernels run, for each process and GPU.

    Parameters
    ----------
    kernels : DataFrame
        ``pid``, ``device_id``, ``start_ns``, ``end_ns``.
    owners : DataFrame
        ``owner``, ``pid``, ``device_id`` (null: rows that belong to no GPU, such as CPU faults).

    Returns
    -------
    DataFrame
        ``owner``, ``start_ns``, ``end_ns``, disjoint and ascending for each owner: kernels of its process
        and GPU; for rows of no GPU those of its process.
    """
    no_gpu = pl.col("device_id").is_null()
    times = ("start_ns", "end_ns")
    own = owners.filter(~no_gpu).join(kernels, on=["pid", "device_id"], nulls_equal=True)
    loose = owners.filter(no_gpu).join(kernels, on="pid", nulls_equal=True)
    both = pl.concat([each.select("owner", *times) for each in (own, loose)])
    return union(both.lazy(), by=["owner"]).collect()


def _while_running(part: Part, running: pl.DataFrame) -> NDArray[np.bool_]:
    """Say which rows start while a chosen kernel of their own process and GPU runs."""
    mask = np.zeros(part.n_rows, bool)
    for (owner,), times in running.partition_by("owner", as_dict=True).items():
        rows: Any = np.flatnonzero(part.owner == owner)
        starts, ends = (times[name].to_numpy() for name in ("start_ns", "end_ns"))
        at = np.searchsorted(starts, part.start[rows], side="right") - 1
        mask[rows] = (at >= 0) & (part.start[rows] < ends[np.maximum(at, 0)])
    return mask
