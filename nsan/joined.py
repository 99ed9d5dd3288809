"""A trace joined with a memory snapshot of the same run: what the driver moved, by tensor and state.

The join is made once, on the whole capture, when a table of it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.pca.tables import JOINED_TABLES
from nsan.errors import NotAlignedError, UsageError
from nsan.schema import TABLES
from nsan.text import safe
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

if TYPE_CHECKING:
    from nsan.info import TraceInfo
    from nsan.snapshot import Snapshot
    from nsan.trace import Trace

_BY_START: Final = ("tensor_moves", "tensor_faults")


@dataclass(frozen=True)
class Part:
    """What filters left of a join: of which, and its processes and GPUs; None is all."""

    whole: Joined
    pids: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None


class Joined:
    """A trace and a memory snapshot of the same run.

    Every table of the trace and of the snapshot is an attribute, and so are those of the join: lazy
    frames named and typed as in :data:`nsan.analysis.pca.tables.JOINED_TABLES`.

    Parameters
    ----------
    trace : Trace
        The whole capture.
    snapshot : Snapshot or None
        Of PyTorch's caching allocator; None: the program had no cache, and each of its managed
        allocations counts as a tensor.
    part : Part, optional
        What :meth:`filter` left; the trace is filtered then.

    Attributes
    ----------
    info : TraceInfo
        What is known about the trace.
    """

    def __init__(
        self, trace: Trace, snapshot: Snapshot | None, *, part: Part | None = None
    ) -> None:
        if trace.is_filtered and part is None:
            msg = "Join the whole trace, and filter what the join gives: `nsan.join(...).filter(...)`."
            raise UsageError(msg)
        self.trace, self.snapshot = trace, snapshot
        self._part = part

    def __repr__(self) -> str:
        other = "no snapshot" if self.snapshot is None else self.snapshot.info.source
        return f"<Joined {safe(self.trace.info.source)}, {safe(other)}>"

    def __getattr__(self, name: str) -> pl.LazyFrame:
        if name in JOINED_TABLES:
            return self._kept(name)
        if name.startswith("_"):
            raise AttributeError(name)
        for source in (self.trace, self.snapshot):
            table = getattr(source, name, None)
            if isinstance(table, pl.LazyFrame):
                return table
        msg = f"a join has no table {name!r}"
        raise AttributeError(msg)

    @property
    def info(self) -> TraceInfo:
        """What is known about the trace."""
        return self.trace.info

    @cached_property
    def tables(self) -> dict[str, pl.DataFrame]:
        """The tables of the join by name, of the whole capture.

        Raises
        ------
        NotAlignedError
            If the snapshot is not of this run.
        """
        if self._part is not None:
            return self._part.whole.tables
        from nsan.analysis.pca.join import JoinInput, join

        of_snapshot = None
        if self.snapshot is not None:
            of_snapshot = {name: getattr(self.snapshot, name) for name in SNAPSHOT_TABLES}
        found = JoinInput(
            trace={name: getattr(self.trace, name) for name in TABLES},
            snapshot=of_snapshot,
            session_start_utc_ns=self.info.session_start_utc_ns,
        )
        try:
            return join(found)
        except NotAlignedError as error:
            named = "this snapshot" if self.snapshot is None else self.snapshot.info.source
            raise NotAlignedError(error.reason, named, self.info.source) from error

    def filter(
        self,
        *,
        time: tuple[int | None, int | None] | str | None = None,
        pid: int | Iterable[int] | None = None,
        device: int | Iterable[int] | None = None,
        nvtx: str | None = None,
    ) -> Joined:
        """Keep a part; the parameters are those of :meth:`nsan.Trace.filter`.

        Parameters
        ----------
        time : (start_ns, end_ns) or str, optional
            Window on the trace's clock: migrations and faults belong to it if they start in it.
        pid, device : int or iterable of int, optional
            Processes and GPUs to keep.
        nvtx : str, optional
            A range: the union of its instances in time.

        Returns
        -------
        Joined
            What is left. Of the tensors those of the processes and GPUs, and those that the rows are of,
            whenever they lived.
        """
        before = self._part or Part(self)
        part = Part(before.whole, _narrowed(before.pids, pid), _narrowed(before.devices, device))
        trace = self.trace.filter(time=time, pid=pid, device=device, nvtx=nvtx)
        return Joined(trace, self.snapshot, part=part)

    def _kept(self, name: str) -> pl.LazyFrame:
        """Give a table of the join without what filters leave out."""
        table = self.tables[name].lazy()
        part = self._part
        if part is None or name == "clock_fits":
            return table
        if name == "tensor_lives" and (part.pids is not None or part.devices is not None):
            # A GPU may move what is of another one's tensors.
            of_rows = pl.concat([self._kept(each).select("tensor_id") for each in _BY_START])
            used = pl.col("tensor_id").is_in(of_rows.collect()["tensor_id"].implode())
            return table.filter(used | self._is_chosen())
        table = table.filter(self._is_chosen())
        if self.trace.windows is not None and name in _BY_START:
            start = pl.col("start_ns")
            inside = [(start >= a) & (start < b) for a, b in self.trace.windows]
            table = table.filter(pl.any_horizontal(pl.lit(value=False), *inside))
        return table

    def _is_chosen(self) -> pl.Expr:
        """Say of a row whether its process and GPU were kept."""
        part = self._part or Part(self)
        chosen = pl.lit(value=True)
        if part.pids is not None:
            chosen &= pl.col("pid").is_in(part.pids)
        if part.devices is not None:
            # Faults of the CPU have no GPU, and stay, as in a trace.
            chosen &= pl.col("device_id").is_in(part.devices).fill_null(value=True)
        return chosen


def _narrowed(
    before: tuple[int, ...] | None, wanted: int | Iterable[int] | None
) -> tuple[int, ...] | None:
    if wanted is None:
        return before
    chosen = (wanted,) if isinstance(wanted, int) else tuple(wanted)
    return chosen if before is None else tuple(each for each in before if each in chosen)


def join(trace: Trace | str | Path, snapshot: Snapshot | str | Path | None) -> Joined:
    """Join a trace with the memory snapshot of the same run.

    Parameters
    ----------
    trace : Trace, str or Path
        The whole capture, or where it is.
    snapshot : Snapshot, str, Path or None
        What ``torch.cuda.memory._dump_snapshot`` wrote in that run, or where it is. None: the program
        had no caching allocator; each of its managed allocations counts as a tensor.

    Returns
    -------
    Joined
        Nothing is computed before a table of it is collected or an analysis is run on it.

    Raises
    ------
    NsanError
        If one of them cannot be opened. That they are not of the same run shows when the join is made
        (:class:`nsan.errors.NotAlignedError`).

    Examples
    --------
    >>> import nsan
    >>> joined = nsan.join("run/run.sqlite", "run/snapshot.pickle")  # doctest: +SKIP
    >>> nsan.analyse(joined, "pca_effect").collect()  # doctest: +SKIP
    """
    from nsan.opening import open_snapshot, open_trace

    if isinstance(trace, str | Path):
        trace = open_trace(trace)
    if isinstance(snapshot, str | Path):
        snapshot = open_snapshot(snapshot)
    return Joined(trace, snapshot)
