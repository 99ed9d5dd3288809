"""A trace, and perhaps a memory snapshot, as sections of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nsan.advising import advised
from nsan.analysis.catalog import find as find_analysis
from nsan.analysis.result import KINDS
from nsan.asking import Asked
from nsan.charting import analyses_of, chart_or_reason
from nsan.charting import find as find_chart
from nsan.charts.saving import rendered, specification
from nsan.errors import NsanError, OverBudgetError, UsageError
from nsan.report.blocks import Block, Picture, Text
from nsan.report.shown import Blocks
from nsan.report.standing import worst_kind
from nsan.report.tables import as_table, no_row
from nsan.tabular.notes import table_word
from nsan.tabular.totals import unanswered

if TYPE_CHECKING:
    import polars as pl

    from nsan.advising import Advised
    from nsan.analysing import Source
    from nsan.analysis.catalog import Analysis
    from nsan.charts.palette import Theme


T = TypeVar("T")

_LEFT_OUT: Final = "Left out of this report:"


class Report(Asked):
    """A trace as the sections of a report.

    Parameters
    ----------
    trace : str or Path
        Report or export of nsys, log of nvprof, or store of nsan.
    snapshot : str or Path, optional
        Memory snapshot of PyTorch that the same run wrote. By default ``snapshot.pickle`` beside the
        trace, or the trace's own name with ``.pickle``, if there is one.
    filters : mapping, optional
        Of :meth:`nsan.Trace.filter`: ``time``, ``nvtx``, ``device``, ``pid``.
    rows : int, default 10
        Rows of a table at most.
    theme : {"light", "dark"}, default "light"
        The ground of the charts.

    Attributes
    ----------
    trace : Trace
        What the filters left of the trace.
    path : Path
        Where the trace is.
    filters : dict
        The filters that were given, by name.
    used : dict
        By section, in the order of writing: the analyses that its figures stand on, each with the
        least certain kind among its figures.

    Examples
    --------
    >>> from nsan.report.report import Report
    >>> report = Report("sample_data/um_vector_add_rtx4060l.sqlite")  # doctest: +SKIP
    >>> report.section("verdict")  # doctest: +SKIP
    >>> report.table("batches", rows=5) + report.chart("batch_rate")  # doctest: +SKIP
    """

    def __init__(
        self,
        trace: str | Path,
        snapshot: str | Path | None = None,
        *,
        filters: Mapping[str, Any] | None = None,
        rows: int = 10,
        theme: Theme = "light",
    ) -> None:
        super().__init__(trace, snapshot, filters=filters)
        self.rows, self.theme = rows, theme
        self.used: dict[str, dict[str, str]] = {}
        self._section = ""

    @cached_property
    def advised(self) -> Advised:
        """What the rules of the advisor say of the trace."""
        return advised(self)

    def head(self) -> Blocks:
        """Say of what the report is, as its first lines.

        Returns
        -------
        Blocks
            Name, profiler, GPUs, processes and time.
        """
        from nsan.report.sections import head

        return head.write(self)

    # Sections -------------------------------------------------------------------------------------

    def section(self, name: str) -> Blocks:
        """Write a section.

        Parameters
        ----------
        name : str
            Of :data:`nsan.report.contents.SECTIONS`.

        Returns
        -------
        Blocks
            What a notebook shows.
        """
        from nsan.report.contents import find_section

        section, before = find_section(name), self._section
        self._section = name
        try:
            found = Blocks(section.write(self))
        except OverBudgetError as error:
            self.used.pop(name, None)
            return Blocks([Text(f"{_LEFT_OUT} {error}", "warning")])
        finally:
            self._section = before
        if section.needs_events and not self.is_part and self.is_empty:
            return Blocks(
                replace(each, tone="empty") if isinstance(each, Text) else each for each in found
            )
        return found

    def part(self, write: Callable[[], Iterable[Block]]) -> list[Block]:
        """Write a part of a section; one that would need too much memory is one line that says so.

        Parameters
        ----------
        write : callable
            Gives the blocks of the part.

        Returns
        -------
        list of Block
            What stands in the section.
        """
        none: Iterable[Block] = ()
        found, left_out = self.attempt(write, none)
        return [*found, *left_out]

    def attempt(self, ask: Callable[[], T], otherwise: T) -> tuple[T, list[Block]]:
        """Ask for what may need too much memory.

        Parameters
        ----------
        ask : callable
            Gives it.
        otherwise : object
            What stands for it where it does not fit.

        Returns
        -------
        object, list of Block
            It, or what stands for it and a line that says so.
        """
        try:
            return ask(), []
        except OverBudgetError as error:
            return otherwise, [Text(f"{_LEFT_OUT} {error}", "warning")]

    def rests_on(self, names: Iterable[str]) -> None:
        """Keep of the analyses that the section being written asked those that it stands on.

        Parameters
        ----------
        names : iterable of str
            Analyses of which a figure, or that there is none, stands in the section.
        """
        kept = set(names)
        asked = self.used.pop(self._section, {})
        if used := {name: kind for name, kind in asked.items() if name in kept}:
            self.used[self._section] = used

    def lazy(self, name: str, options: Mapping[str, Any] | None = None) -> pl.LazyFrame:
        """Run an analysis; the section that is being written stands on it. See :meth:`nsan.asking.Asked.lazy`."""
        found = super().lazy(name, options)
        self._note_use(find_analysis(name))
        return found

    def frame(self, name: str, options: Mapping[str, Any] | None = None) -> pl.DataFrame:
        """Run an analysis once, likewise. See :meth:`nsan.asking.Asked.frame`."""
        found = super().frame(name, options)
        self._note_use(find_analysis(name), found)
        return found

    def _note_use(self, analysis: Analysis, found: pl.DataFrame | None = None) -> None:
        """Note that the section which is being written stands on an analysis, be it that it found nothing."""
        used = self.used.setdefault(self._section, {})
        # That there is nothing is as certain as what there might have been.
        rows = found if found is not None and found.height else None
        kind = worst_kind(self.source_of(analysis), analysis, rows)
        used[analysis.name] = max(kind, used.get(analysis.name, kind), key=KINDS.index)

    # Blocks ---------------------------------------------------------------------------------------

    def table(
        self,
        name: str,
        *,
        columns: Sequence[str] = (),
        rows: int | None = None,
        title: str | None = None,
        options: Mapping[str, Any] | None = None,
        frame: pl.DataFrame | None = None,
    ) -> Blocks:
        """Show the result of an analysis as a table.

        Parameters
        ----------
        name : str
            Name of the analysis.
        columns : sequence of str, optional
            Columns to show, in this order; by default those that tell something, the first few.
        rows : int, optional
            Rows at most; the report's by default.
        title : str, optional
            What stands above it; the question of the analysis by default, "" for nothing.
        options : mapping, optional
            Values for its options.
        frame : DataFrame, optional
            Rows of the result to show instead of all: sorted, filtered, with the columns of the result.

        Returns
        -------
        Blocks
            A table with small print; a text where there is no row or the analysis cannot be run.
        """
        analysis = find_analysis(name)
        try:
            found = self.frame(name, options) if frame is None else frame
            kinds = self.kinds(name, found)
        except NsanError as error:
            return Blocks([Text(f"{analysis.question} {error}", "warning")])
        if not found.height:
            return no_row(self.source_of(analysis), analysis)
        most = rows or self.rows
        return Blocks([as_table(analysis, found, kinds, columns=columns, rows=most, title=title)])

    def chart(
        self, name: str, *, width: int | None = None, options: Mapping[str, Any] | None = None
    ) -> Blocks:
        """Show a chart.

        Parameters
        ----------
        name : str
            Name of the chart, as listed by ``nsan export --list``.
        width : int, optional
            Pixels of the drawn area.
        options : mapping, optional
            Values for options of the analyses that are drawn.

        Returns
        -------
        Blocks
            The chart; a text where there is nothing to draw.
        """
        chosen = find_chart(name)
        try:
            source = self._charted(chosen.subject)
            drawn, reason = chart_or_reason(
                source, chosen, theme=self.theme, width=width, options=options
            )
            if reason:
                return Blocks([Text(f"{chosen.question} {reason}", "note")])
            for analysis in analyses_of(chosen):
                self._note_use(analysis)
            picture = rendered(drawn, ".svg").decode()
        except NsanError as error:
            return Blocks([Text(f"{chosen.question} {error}", "warning")])
        return Blocks([Picture(name, chosen.question, specification(drawn), picture)])

    def _charted(self, subject: str) -> Source:
        source: Source | None = {"trace": self.trace}.get(subject) or (
            self.snapshot if subject == "snapshot" else self.joined
        )
        if source is None:
            msg = "It needs a memory snapshot of PyTorch: `nsan report TRACE --snapshot FILE`."
            raise UsageError(msg)
        return source

    def missing(self, *kinds: str) -> Blocks:
        """Say what was not recorded, and how to record it.

        Parameters
        ----------
        *kinds : str
            Of ``gpu_faults``, ``cpu_faults``, ``migrations``, ``allocations``, ``nvtx``, ``kernels``.

        Returns
        -------
        Blocks
            A text for each that was not; nothing for the others.
        """
        return Blocks(
            Text(f"{table_word(kind)}: {unanswered(self.summary, kind)}", "missing")
            for kind in kinds
            if not self.is_recorded(kind)
        )
