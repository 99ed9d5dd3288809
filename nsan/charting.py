"""One way to draw any chart of a trace or snapshot: by name, with options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsan.analysing import kinds_of, run_analysis, subject_of
from nsan.analysing import parse_options as parsed
from nsan.analysis.catalog import find as find_analysis
from nsan.analysis.result import KINDS, Result
from nsan.errors import ExtraMissingError, UnknownNameError
from nsan.info import MODELLED
from nsan.tabular.notes import is_part, table_word
from nsan.text import shortened

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysing import Source
    from nsan.analysis.catalog import Analysis
    from nsan.charts.catalog import Chart
    from nsan.charts.theme import Drawing, Theme

_KIND_NOTES: Final = {
    "recorded": "",
    "derived": "derived from recorded rows",
    "reconstructed": "reconstructed: an inference with self-checks",
    "modelled": f"modelled: {MODELLED}",
}
"""What is said of figures, by the least certain kind among them."""

NOT_COUNTED: Final = {"id", "label", "text", "flag", "byte address"}
"""Units of columns that name a row instead of measuring it."""


def chart(
    source: Source,
    name: str,
    *,
    theme: Theme = "light",
    width: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Drawing:
    """Draw a chart of a trace, of a memory snapshot or of both joined.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        What to draw; a filtered trace gives the chart of its part.
    name : str
        Name of the chart, as listed by ``nsan export --list``.
    theme : {"light", "dark"}, default "light"
        The ground.
    width : int, optional
        Pixels of the drawn area, without axes; the chart's own by default.
    options : mapping, optional
        Values for options of the analyses that are drawn.

    Returns
    -------
    altair chart
        A value: nothing is shown or saved. At most 5 000 rows of data.

    Raises
    ------
    NsanError
        If there is no such chart, theme or option, it is about the other kind of source, or Altair is
        not installed.

    Examples
    --------
    >>> import nsan
    >>> trace = nsan.open_trace("sample_data/um_vector_add_rtx4060l.sqlite")  # doctest: +SKIP
    >>> picture = nsan.chart(trace, "migrations_over_time")  # doctest: +SKIP
    """
    return chart_or_reason(source, find(name), theme=theme, width=width, options=options)[0]


def chart_or_reason(
    source: Source,
    chosen: Chart,
    *,
    theme: Theme = "light",
    width: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Drawing, str]:
    """Draw a chart, and say so if there is nothing to draw.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        What to draw.
    chosen : Chart
        The chart.
    theme, width, options : optional
        As of :func:`chart`.

    Returns
    -------
    altair chart
        The chart.
    str
        Why nothing is in it; empty where something is. The chart says the same.

    Raises
    ------
    NsanError
        As of :func:`chart`.
    """
    frames, notes = drawn_frames(source, chosen, options)
    from nsan.charts.theme import nothing, with_notes

    room = width or chosen.width
    found, said = chosen.draw(*frames, width=width, theme=theme), ""
    if all(frame.is_empty() for frame in frames):
        said = _why_nothing(source, chosen)
        found = nothing(said, title=chosen.title, width=room, theme=theme)
    return with_notes(found, notes, room), said


def _why_nothing(source: Source, chosen: Chart) -> str:
    """Say why no analysis has a row; a part of a capture says nothing about the whole."""
    reasons = [each.result.nothing for each in analyses_of(chosen)]
    reasons = [each for each in reasons if each != Result.nothing]
    if is_part(source):
        reasons.insert(0, "Nothing is in the part that was asked for.")
    return " ".join(dict.fromkeys(reasons or [Result.nothing]))


def find(name: str) -> Chart:
    """Find a chart by name, or say what must be installed to draw any.

    Parameters
    ----------
    name : str
        Its name; dashes count as underscores.

    Returns
    -------
    Chart
        The chart.

    Raises
    ------
    UsageError
        If there is none; the message lists the names.
    ExtraMissingError
        If Altair is not installed.
    """
    return _catalog().find_chart(name)  # type: ignore[no-any-return]


def _catalog() -> Any:
    try:
        from nsan.charts import catalog
    except ModuleNotFoundError as error:
        if error.name != "altair":
            raise
        raise ExtraMissingError("Drawing a chart", "altair", "report") from error
    return catalog


def parse_options(chosen: Chart, texts: Iterable[str]) -> dict[str, Any]:
    """Read options of a chart's analyses written as ``NAME=VALUE``.

    Parameters
    ----------
    chosen : Chart
        The chart.
    texts : iterable of str
        One per option.

    Returns
    -------
    dict
        Values by name, of the type of the default.

    Raises
    ------
    UsageError
        If a text is no option of any analysis that is drawn.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name = text.partition("=")[0].strip().replace("-", "_")
        owners = [each for each in analyses_of(chosen) if name in each.options]
        if not owners:
            raise UnknownNameError(f"option of {chosen.name}", name, options_of(chosen))
        found |= parsed(owners[0], [text])
    return found


def all_charts() -> Mapping[str, Chart]:
    """List every chart of nsan by name, or say what must be installed to draw any."""
    return _catalog().charts()  # type: ignore[no-any-return]


def analyses_of(chosen: Chart) -> tuple[Analysis, ...]:
    """Find the analyses that a chart draws, in the order of its frames."""
    return tuple(find_analysis(name) for name in chosen.draws)


def options_of(chosen: Chart) -> dict[str, Any]:
    """List the options of a chart's analyses, with the values that the chart gives them."""
    return {
        name: chosen.options.get(each.name, {}).get(name, value)
        for each in analyses_of(chosen)
        for name, value in each.options.items()
    }


def drawn_frames(
    source: Source, chosen: Chart, options: Mapping[str, Any] | None = None
) -> tuple[list[pl.DataFrame], list[str]]:
    """Compute what a chart draws.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        What to draw.
    chosen : Chart
        The chart.
    options : mapping, optional
        Values for options of its analyses.

    Returns
    -------
    list of DataFrame
        One for each of the chart's analyses.
    list of str
        What must be said under the title: of what, which kind the figures are, what was not recorded.

    Raises
    ------
    UsageError
        If none of its analyses has such an option.
    """
    given = dict(options or {})
    analyses = analyses_of(chosen)
    for option in given:
        if option not in options_of(chosen):
            raise UnknownNameError(f"option of {chosen.name}", option, options_of(chosen))
    frames = []
    for each in analyses:
        asked = {name: value for name, value in given.items() if name in each.options}
        chosen_options = {**chosen.options.get(each.name, {}), **asked}
        frames.append(run_analysis(source, each, chosen_options).collect())
    pairs = list(zip(analyses, frames, strict=True))
    return frames, [_origin(source, chosen, pairs), *_not_recorded(source, pairs)]


def _origin(source: Source, chosen: Chart, pairs: list[tuple[Analysis, pl.DataFrame]]) -> str:
    """Say what is drawn, of which part, and what kind of figures these are."""
    kinds = set()
    for analysis, frame in pairs:
        of_column = kinds_of(source, analysis, frame)
        for column in analysis.result.columns:
            counted = column.unit not in NOT_COUNTED
            if column.name in chosen.figures or (counted and not chosen.figures):
                kinds.add(of_column[column.name])
    worst = max(kinds, key=KINDS.index, default="recorded")
    parts = [shortened(source.info.source, 60)]
    snapshot = getattr(source, "snapshot", None)
    if snapshot is not None and chosen.subject == "joined":
        parts[0] += f" joined with {shortened(snapshot.info.source, 60)}"
    if is_part(source):
        parts.append("a part of the capture")
    if _KIND_NOTES[worst] and any(frame.height for _, frame in pairs):
        parts.append(_KIND_NOTES[worst])
    return ", ".join(parts) + "." * (len(parts) > 1)


def _not_recorded(source: Source, pairs: list[tuple[Analysis, pl.DataFrame]]) -> list[str]:
    """Say which events a chart lacks because the capture has none of them."""
    if subject_of(source) == "snapshot":
        return []
    capture = getattr(source.info, "capture", {})
    notes = []
    for kind in dict.fromkeys(table for analysis, _ in pairs for table in analysis.reads):
        found = capture.get(kind)
        if found is None or found.answer == "recorded":
            continue
        what = "not recorded" if found.answer == "not_recorded" else "not known to be recorded"
        notes.append(f"{table_word(kind)}: {what} ({found.reason}).")
    return notes
