"""Which tracks there are, in which order, and on which of them each row lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import polars as pl

from nsan.exports.lanes import lanes, nesting
from nsan.exports.trace_file import Counter, TraceFile, Track
from nsan.text import shortened

if TYPE_CHECKING:
    from nsan.trace import Trace

_NAME: Final = 60
"""Characters of a program's, GPU's or domain's name in the name of a track."""

Key: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Place:
    """Where rows of one key go.

    Attributes
    ----------
    parent : int
        The track that theirs stand under.
    name : str
        Name of their tracks; lanes of one name are drawn as one.
    rank : int
        Place among the siblings.
    about : str
        What they are, and of which kind.
    """

    parent: int
    name: str
    rank: int
    about: str


class Layout:
    """Hands out tracks: processes, their GPUs and threads, and what stands under these.

    Parameters
    ----------
    file : TraceFile
        Gets each track before anything is laid on it.
    trace : Trace
        Names of its processes and GPUs.
    note : str
        Said behind each process; empty where all is as recorded.
    """

    def __init__(self, file: TraceFile, trace: Trace, note: str) -> None:
        self._file, self._note = file, note
        self._known: dict[Key, int] = {}
        self._programs = dict(trace.processes.select("pid", "name").collect().iter_rows())
        gpus = trace.devices.select("pid", "device_id", "name").collect()
        self._gpus = {(pid, device): name for pid, device, name in gpus.iter_rows()}

    def process(self, pid: int | None) -> int:
        """Give the track of a process."""
        name = shortened(self._programs.get(pid) or "program", _NAME) + self._note
        if not pid:
            return self._track(("process", pid), name, 0)
        return self._track(("process", pid), name, 0, pid=pid)

    def gpu(self, pid: int | None, device: int | None) -> int:
        """Give the track under which all of one GPU of a process stands."""
        product = self._gpus.get((pid, device)) or self._gpus.get((None, device)) or ""
        name = "GPU not known" if device is None else f"GPU {device}"
        name = f"{name} {shortened(product, _NAME)}".strip()
        rank = -1000 + (device or 0)
        return self._track(("gpu", pid, device), name, self.process(pid), rank=rank)

    def thread(self, pid: int | None, tid: int | None) -> int:
        """Give the track of a thread."""
        if not pid or not tid:
            return self._track(("thread", pid, tid), "CUDA API", self.process(pid))
        # The page writes the thread's number behind its name.
        return self._track(("thread", pid, tid), "CUDA API", self.process(pid), pid=pid, tid=tid)

    def top(self, name: str, about: str) -> int:
        """Give a track that stands above all processes."""
        return self._track(("top", name), name, 0, about=about, rank=-1000)

    def counter(self, place: Place, unit: str) -> int:
        """Give the track of a counter; without a unit it counts bytes."""
        key = ("counter", place.parent, place.name)
        more = {"about": place.about, "rank": place.rank, "counter": Counter(unit)}
        return self._track(key, place.name, place.parent, **more)

    def laid(
        self, rows: pl.DataFrame, keys: Sequence[str], placed: Callable[..., Place]
    ) -> pl.DataFrame:
        """Lay slices that may overlap on lanes.

        Parameters
        ----------
        rows : DataFrame
            With ``start_ns``, ``end_ns`` (Int64, no null) and the keys.
        keys : sequence of str
            What has tracks of its own.
        placed : callable
            Where the rows of one key go.

        Returns
        -------
        DataFrame
            The rows with ``track``, in the order in which a track wants them.
        """
        rows = _grouped(rows, keys)
        lane = lanes(*_intervals(rows))
        return self._with_tracks(rows.with_columns(_lane=pl.Series(lane)), keys, placed)

    def nested(
        self, rows: pl.DataFrame, keys: Sequence[str], placed: Callable[..., Place]
    ) -> pl.DataFrame:
        """Lay slices that nest as calls do; those that cut through others go on lanes beside them.

        Parameters
        ----------
        rows, keys, placed
            As of :meth:`laid`. The first lane of a place is its parent itself where it has no name.

        Returns
        -------
        DataFrame
            As of :meth:`laid`.
        """
        rows = _grouped(rows, keys)
        fits = pl.Series(nesting(*_intervals(rows)))
        inner = rows.filter(fits).with_columns(_lane=pl.lit(0, pl.Int64))
        others = rows.filter(~fits)
        others = others.with_columns(_lane=pl.Series(lanes(*_intervals(others))) + 1)
        return self._with_tracks(pl.concat([inner, others]), keys, placed)

    def moments(
        self, rows: pl.DataFrame, keys: Sequence[str], placed: Callable[..., Place]
    ) -> pl.DataFrame:
        """Lay moments, which never are in each other's way.

        Parameters
        ----------
        rows, keys, placed
            As of :meth:`laid`, without an end.

        Returns
        -------
        DataFrame
            As of :meth:`laid`.
        """
        rows = _grouped(rows, keys).with_columns(_lane=pl.lit(0, pl.Int64), end_ns="start_ns")
        return self._with_tracks(rows, keys, placed).drop("end_ns")

    def _with_tracks(
        self, rows: pl.DataFrame, keys: Sequence[str], placed: Callable[..., Place]
    ) -> pl.DataFrame:
        """Make the tracks of each key and lane, and sort the rows as a track wants them."""
        kinds = rows.select("_group", "_lane", *keys).unique().sort("_group", "_lane")
        tracks = []
        for group, lane, *key in kinds.iter_rows():
            tracks.append((group, lane, self._lane(placed(*key), tuple(keys) + tuple(key), lane)))
        schema = {"_group": pl.UInt32, "_lane": pl.Int64, "track": pl.Int64}
        found = pl.DataFrame(tracks, schema, orient="row")
        return (
            rows.join(found, on=["_group", "_lane"], how="left", maintain_order="left")
            .drop("_group", "_lane")
            .sort(
                "track", "start_ns", "end_ns", descending=[False, False, True], maintain_order=True
            )
        )

    def _lane(self, place: Place, key: Key, lane: int) -> int:
        if not place.name and not lane:
            return place.parent
        name = place.name or "overlapping calls"
        more = {"about": place.about, "rank": place.rank}
        return self._track((*key, place.name, lane), name, place.parent, **more)

    def _track(self, key: Key, name: str, parent: int, **rest: Any) -> int:
        if key not in self._known:
            self._known[key] = len(self._known) + 1
            self._file.tracks([Track(self._known[key], parent, name, **rest)])
        return self._known[key]


def _grouped(rows: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Give rows that share tracks a number."""
    if not keys:
        return rows.with_columns(_group=pl.lit(0, pl.UInt32))
    groups = rows.select(keys).unique().sort(keys, nulls_last=True).with_row_index("_group")
    return rows.join(groups, on=list(keys), how="left", nulls_equal=True, maintain_order="left")


def _intervals(rows: pl.DataFrame) -> Any:
    columns = (rows["_group"].cast(pl.Int64), rows["start_ns"], rows["end_ns"])
    return tuple(each.to_numpy() for each in columns)
