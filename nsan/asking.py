"""A trace, and perhaps a memory snapshot, that can be asked: each analysis once, what it gives kept if it is small."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysing import kinds_of, run_analysis
from nsan.analysis.catalog import find as find_analysis
from nsan.analysis.keeping import Keeping
from nsan.contract import summary
from nsan.errors import NsanError, OverBudgetError, UsageError
from nsan.joined import join
from nsan.opening import open_snapshot, open_trace
from nsan.pca_found import snapshot_beside
from nsan.tabular.notes import is_part

if TYPE_CHECKING:
    from nsan.analysing import Source
    from nsan.analysis.catalog import Analysis
    from nsan.joined import Joined
    from nsan.snapshot import Snapshot
    from nsan.trace import Trace

_MOST_KEPT: Final = 100_000
"""Rows of a result that is kept for a second asking; a larger one is computed again."""


class Asked:
    """A trace that can be asked.

    Parameters
    ----------
    trace : str or Path
        Report or export of nsys, log of nvprof, or store of nsan.
    snapshot : str or Path, optional
        Memory snapshot of PyTorch that the same run wrote. By default ``snapshot.pickle`` beside the
        trace, or the trace's own name with ``.pickle``, if there is one.
    filters : mapping, optional
        Of :meth:`nsan.Trace.filter`: ``time``, ``nvtx``, ``device``, ``pid``.

    Attributes
    ----------
    trace : Trace
        What the filters left of the trace.
    whole : Trace
        All of it.
    path : Path
        Where the trace is.
    filters : dict
        The filters that were given, by name.

    Examples
    --------
    >>> from nsan.asking import Asked
    >>> asked = Asked("sample_data/um_vector_add_rtx4060l.sqlite")  # doctest: +SKIP
    >>> asked.frame("batches").height  # doctest: +SKIP
    12
    """

    def __init__(
        self,
        trace: str | Path,
        snapshot: str | Path | None = None,
        *,
        filters: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(trace)
        given = (filters or {}).items()
        # A notebook's "" and [] are no filters; process 0 and GPU 0 are.
        self.filters = {key: value for key, value in given if value not in (None, "", [], ())}
        self.whole: Trace = open_trace(self.path)
        self.trace: Trace = self.whole.filter(**self.filters) if self.filters else self.whole
        self._asked_for_snapshot = snapshot
        self._kept: dict[tuple[str, str], pl.DataFrame] = {}
        # Analyses that are asked one after another build on the same things.
        self._keeping = Keeping()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The JSON contract of what the filters left; see :func:`nsan.contract.summary`."""
        return summary(self.trace)

    @cached_property
    def is_part(self) -> bool:
        """Whether filters chose a part of the capture."""
        return is_part(self.trace)

    @cached_property
    def is_empty(self) -> bool:
        """Whether there is no migration, no page fault and no managed allocation, as far as is known."""
        found = self.summary
        counts = (
            found["migrations"]["n"],
            found["gpu_faults"]["n_rows"],
            found["cpu_faults"]["n"],
            found["managed"]["n_allocations"],
            found["managed"]["n_calls"],
        )
        return not any(counts)

    @cached_property
    def snapshot_path(self) -> Path | None:
        """Where the memory snapshot is, if one was named or lies beside the trace."""
        asked = self._asked_for_snapshot
        return snapshot_beside(self.path) if asked is None else Path(asked)

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """The memory snapshot, if one was named or lies beside the trace."""
        return None if self.snapshot_path is None else open_snapshot(self.snapshot_path)

    @property
    def snapshot_name(self) -> str:
        """Name of the memory snapshot that was asked for, without its folder; empty if none was."""
        return Path(self._asked_for_snapshot).name if self._asked_for_snapshot else ""

    @property
    def is_snapshot_elsewhere(self) -> bool:
        """Whether a memory snapshot was asked for that does not lie in the folder of the trace."""
        if not self.snapshot_name or self.snapshot_path is None:
            return False
        return self.snapshot_path.resolve().parent != self.path.resolve().parent

    @cached_property
    def joined(self) -> Joined | None:
        """The trace joined with the snapshot; None without one."""
        if self.snapshot is None:
            return None
        whole = join(self.whole, self.snapshot)
        return whole.filter(**self.filters) if self.filters else whole

    def lazy(self, name: str, options: Mapping[str, Any] | None = None) -> pl.LazyFrame:
        """Run an analysis; nothing is computed before it is collected.

        Parameters
        ----------
        name : str
            Name of the analysis.
        options : mapping, optional
            Values for its options.

        Returns
        -------
        LazyFrame
            The result.
        """
        return self._run(find_analysis(name), options)

    def _run(self, analysis: Analysis, options: Mapping[str, Any] | None) -> pl.LazyFrame:
        return run_analysis(self.source_of(analysis), analysis, options)

    def frame(self, name: str, options: Mapping[str, Any] | None = None) -> pl.DataFrame:
        """Run an analysis once, and keep what it gives if that is small.

        Parameters
        ----------
        name : str
            Name of the analysis.
        options : mapping, optional
            Values for its options.

        Returns
        -------
        DataFrame
            The result.
        """
        key = (name, repr(sorted((options or {}).items())))
        analysis, found = find_analysis(name), self._kept.get(key)
        if found is None:
            found = self._run(analysis, options).collect()
        if found.height <= _MOST_KEPT:
            self._kept[key] = found
        return found

    def rows_of(self, name: str, options: Mapping[str, Any] | None = None) -> pl.DataFrame | None:
        """Run an analysis, as :meth:`frame`; None where it gives no row or cannot be asked, as of a part.

        Raises
        ------
        OverBudgetError
            If it would need more memory than may be used.
        """
        try:
            found = self.frame(name, options)
        except OverBudgetError:
            raise  # that there is nothing must not be read out of it
        except NsanError:
            return None
        return found if found.height else None

    def nvtx_options(self) -> dict[str, str]:
        """Choose how NVTX ranges are laid to: by the launch of GPU work, where its calls were recorded.

        By time alone what the GPU does belongs to the range in which the host waits for it.
        """
        calls = self.trace.api_calls.select(pl.len()).collect().item()
        return {"basis": "launch"} if calls and self.is_recorded("kernels") else {}

    def kinds(self, name: str, found: pl.DataFrame) -> dict[str, str]:
        """Say of which kind each column of a result is; see :func:`nsan.analysing.kinds_of`."""
        analysis = find_analysis(name)
        return kinds_of(self.source_of(analysis), analysis, found)

    def source_of(self, analysis: Analysis) -> Source:
        """Choose what an analysis is run on.

        Parameters
        ----------
        analysis : Analysis
            The analysis.

        Returns
        -------
        Trace, Snapshot or Joined
            What it is about.

        Raises
        ------
        UsageError
            If it needs a snapshot, and there is none.
        """
        if analysis.subject == "trace":
            return self.trace
        source: Source | None = self.snapshot if analysis.subject == "snapshot" else self.joined
        if source is None:
            msg = f"{analysis.name} needs a memory snapshot of PyTorch: add --snapshot FILE."
            raise UsageError(msg)
        return source

    def events(self, name: str) -> pl.LazyFrame:
        """Give a table of the trace, as filtered; see :data:`nsan.schema.TABLES`."""
        found: pl.LazyFrame = getattr(self.trace, name)
        return found

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a memory snapshot of PyTorch."""
        return self.snapshot_path is not None

    def is_recorded(self, *kinds: str) -> bool:
        """Say whether all these kinds of events were recorded (maybe without a row)."""
        return all(self.summary["capture"].get(kind) == "recorded" for kind in kinds)
