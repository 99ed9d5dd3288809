"""The table of contents of charts: each with its question and the analyses that it draws.

A chart is a function whose positional parameters are collected frames, those that the analyses named in
``draws`` give, and whose keyword-only parameters are ``width`` and ``theme``. It gives an Altair chart and
does nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import altair as alt
import polars as pl

from nsan.charts.palette import Theme
from nsan.charts.theme import THEMES, nothing
from nsan.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from nsan.analysis.catalog import Subject

P = ParamSpec("P")
R = TypeVar("R", bound=alt.TopLevelMixin)

MODULES: Final = (
    "traffic",
    "map",
    "transfers",
    "batches",
    "memory",
    "refaults",
    "places",
    "lanes",
    "steps",
    "allocator",
)
"""Modules of this package that hold charts, in the order of the table of contents."""

MAX_ROWS: Final = 5000
"""Rows of data in one chart: Altair's own limit, which is never lifted."""

NOTHING: Final = "There is nothing to draw: none of these events are here."
"""What a chart of frames without rows says; :func:`nsan.charting.chart` knows why, and says that."""

LEAST_WIDTH: Final = 200
MOST_WIDTH: Final = 4000

_ATTRIBUTE: Final = "__nsan_chart__"


@dataclass(frozen=True)
class Chart:
    """A chart and what is known about it.

    Attributes
    ----------
    name : str
        Name of the function.
    question : str
        What it answers, as a user would ask.
    title : str
        What it shows, in a few words: the title of an empty one.
    function : callable
        The function.
    draws : tuple of str
        Names of the analyses whose frames it takes, in order.
    options : mapping of str to mapping
        By analysis: values of its options that the chart needs.
    subject : str
        What it is about: "trace", "snapshot" or "joined".
    figures : tuple of str
        Columns of the analyses that are drawn: their kinds are told. Empty: all figures.
    """

    name: str
    question: str
    title: str
    function: Callable[..., alt.TopLevelMixin]
    draws: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    subject: Subject = "trace"
    figures: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Pixels of the drawn area where none are asked for."""
        return _default_width(self.function)

    def draw(
        self, *frames: pl.DataFrame, width: int | None = None, theme: Theme = "light"
    ) -> alt.TopLevelMixin:
        """Draw collected frames.

        Parameters
        ----------
        *frames : DataFrame
            What the analyses in ``draws`` gave, in order.
        width : int, optional
            Pixels of the drawn area; the chart's own by default.
        theme : {"light", "dark"}
            The ground.

        Returns
        -------
        altair chart
            The chart.
        """
        given = {} if width is None else {"width": width}
        return self.function(*frames, theme=theme, **given)


def chart(
    *,
    question: str,
    draws: tuple[str, ...],
    title: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    subject: Subject = "trace",
    figures: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a function to be a chart.

    The function is wrapped: without any row it gives a chart that says so, and a frame, width or theme
    that cannot be drawn is refused.

    Parameters
    ----------
    question : str
        What it answers, ending with a question mark.
    draws : tuple of str
        Analyses whose collected frames are its positional parameters, in order.
    title : str, optional
        What it shows; the name in words by default.
    options : mapping of str to mapping, optional
        By analysis: values of its options.
    subject : {"trace", "snapshot", "joined"}
        What it is about.
    figures : tuple of str, optional
        Columns that it draws: a note says of which kind these are. All figures by default.

    Returns
    -------
    callable
        A decorator.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        about = Chart(
            name=name,
            question=question,
            title=title or name.replace("_", " ").capitalize(),
            function=function,
            draws=draws,
            options=MappingProxyType(dict(options or {})),
            subject=subject,
            figures=figures,
        )
        _check_signature(about)

        @wraps(function)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> Any:
            frames = [each for each in args if isinstance(each, pl.DataFrame)]
            width = int(kwargs.get("width", _default_width(function)))  # type: ignore[call-overload]
            theme: Theme = kwargs.get("theme", "light")  # type: ignore[assignment]
            _check(about, frames, width, theme)
            if all(frame.is_empty() for frame in frames):
                return nothing(NOTHING, title=about.title, width=width, theme=theme)
            return function(*args, **kwargs)

        found = Chart(**{**vars(about), "function": drawn})
        setattr(drawn, _ATTRIBUTE, found)
        return drawn

    return declare


def _default_width(function: Callable[..., Any]) -> int:
    return int(inspect.signature(function).parameters["width"].default)


def _check_signature(about: Chart) -> None:
    """Refuse a declaration that does not fit its function."""
    parameters = inspect.signature(about.function).parameters.values()
    frames = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    rest = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    if len(frames) != len(about.draws) or rest != {"width", "theme"}:
        msg = (
            f"The chart {about.name} has the frames {frames} and the options {sorted(rest)}: it needs one "
            f"frame for each of {list(about.draws)}, and width and theme."
        )
        raise TypeError(msg)


def _check(about: Chart, frames: list[pl.DataFrame], width: int, theme: str) -> None:
    """Refuse what cannot be drawn, with the way out."""
    if theme not in THEMES:
        raise UnknownNameError("theme", theme, THEMES)
    if not LEAST_WIDTH <= width <= MOST_WIDTH:
        msg = f"A width of {width} pixels: ask for {LEAST_WIDTH} to {MOST_WIDTH}."
        raise UsageError(msg)
    for frame, name in zip(frames, about.draws, strict=True):
        if frame.height > MAX_ROWS:
            msg = (
                f"{name} gives {frame.height} rows, and a chart has {MAX_ROWS} at most: ask for a part "
                "(time, process, GPU), or for wider bins."
            )
            raise UsageError(msg)


def _charts_in(module: ModuleType) -> Iterator[Chart]:
    """List the charts that a module defines, in their order there."""
    for thing in vars(module).values():
        found = getattr(thing, _ATTRIBUTE, None)
        if isinstance(found, Chart) and found.function.__module__ == module.__name__:
            yield found


@cache
def charts() -> Mapping[str, Chart]:
    """List every chart of nsan by name."""
    modules = (import_module(f"nsan.charts.{name}") for name in MODULES)
    return {found.name: found for module in modules for found in _charts_in(module)}


def find_chart(name: str) -> Chart:
    """Find a chart by name.

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
    """
    found = charts().get(name.replace("-", "_"))
    if found is None:
        raise UnknownNameError("chart", name, charts())
    return found
