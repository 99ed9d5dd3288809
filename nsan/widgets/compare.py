"""Two traces one above the other, on one clock and one scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from nsan.errors import ExtraMissingError, UnknownFilterValueError

try:
    import ipywidgets  # type: ignore[import-untyped]
except ModuleNotFoundError as _missing:
    raise ExtraMissingError("The view of two traces", "ipywidgets", "lab") from _missing

from nsan.text import shortened
from nsan.widgets import page, static
from nsan.widgets.checking import named_options
from nsan.widgets.computed import Sealed
from nsan.widgets.explorer import Explorer

if TYPE_CHECKING:
    from nsan.joined import Joined
    from nsan.trace import Trace
    from nsan.widgets.scene import Span


class Comparison(Sealed, ipywidgets.VBox):
    """Two explorers whose windows move together; make one with :func:`nsan.compare_view`.

    Attributes
    ----------
    a, b : Explorer
        The views, above and below. Windows are the same, each from the start of its own trace or
        range, and so are the way to colour and the top of its scale; addresses, filters and picks are each one's own.
    """

    settable = tuple(f"{side}.{name}" for side in "ab" for name in Explorer.settable)

    def __init__(self, a: Explorer, b: Explorer) -> None:
        self.a, self.b = a, b
        self._echo = False
        super().__init__(children=(a, b))
        for one, other in ((a, b), (b, a)):
            one.observe(self._follow(one, other), names=["window", "by"])
            one.observe(self._rescale(other), names=["place", "filters"])
            one.share_scale(_top_of(one, other))
        self._is_made = True

    def _follow(self, one: Explorer, other: Explorer) -> Callable[[Mapping[str, Any]], None]:
        def follow(change: Mapping[str, Any]) -> None:
            if change["name"] == "by":
                other.by = change["new"]
            elif one.is_echo:
                # The browser shows what it was told to: no reason to move the other one again.
                return
            else:
                shift = other.scene.origin_ns - one.scene.origin_ns
                other.move_to((change["new"][0] + shift, change["new"][1] + shift))

        return follow

    @staticmethod
    def _rescale(other: Explorer) -> Callable[[Mapping[str, Any]], None]:
        """Draw the other view again: the top of the scale that they share may be another."""

        def rescale(_: Mapping[str, Any]) -> None:
            other.send({"kind": "stale"})

        return rescale

    def ready(self, timeout: float | None = None) -> bool:
        """Wait for what both compute in the background.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most for each; None waits as long as it takes.

        Returns
        -------
        bool
            Whether all is there.
        """
        return all([self.a.ready(timeout), self.b.ready(timeout)])

    def to_html(self, path: str | Path, *, force_overwrite: bool = False) -> Path:
        """Write an offline copy of both to one HTML file; see :meth:`Explorer.to_html`.

        Parameters
        ----------
        path : str or Path
            Where; ends in ``.html``.
        force_overwrite : bool, default False
            Replace a file that is there.

        Returns
        -------
        Path
            Where it is.
        """
        both = (self.a, self.b)
        title = " and ".join(shortened(each.config["title"], 60) for each in both)
        text = page.page(title, [each.offline_copy() for each in both], *page.sources())
        return page.write_page(path, text, force_overwrite=force_overwrite)

    def __str__(self) -> str:
        return f"{self.a}\n\n{self.b}"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return static.bundle(
            [self.a, self.b], lambda: super(Comparison, self)._repr_mimebundle_(**options)
        )


def _top_of(one: Explorer, other: Explorer) -> Callable[[Span, str, tuple[int, int]], float]:
    """Find the top of the scale of the other view in the same part."""

    def top(window: Span, by: str, shape: tuple[int, int]) -> float:
        shift = other.scene.origin_ns - one.scene.origin_ns
        return other.scene.top((window[0] + shift, window[1] + shift), other.place, by, shape)

    return top


@named_options
def compare_view(
    a: Trace | Joined | str | Path,
    b: Trace | Joined | str | Path,
    *,
    align: str | None = None,
    height: int | None = None,
    theme: str = "auto",
) -> Comparison:
    """Show two traces one above the other, with one clock and one scale.

    Parameters
    ----------
    a, b : Trace, Joined, str or Path
        Traces, or the paths of some.
    align : str, optional
        Name of an NVTX range: its first instance is time 0 in both, and is shown first. None: time
        0 is the first event of each.
    height : int, optional
        Height of each map, pixels.
    theme : {"auto", "light", "dark"}
        Their ground; "auto" follows the notebook.

    Returns
    -------
    Comparison
        Both views; its ``a`` and ``b`` are explorers.

    Raises
    ------
    UnknownFilterValueError
        If one of the traces has no such range; the message lists those it has.
    ExtraMissingError
        If ipywidgets or anywidget is not installed.
    """
    views = [Explorer(each, height=height, theme=theme) for each in (a, b)]
    starts = [_aligned(each, align) for each in views]
    # Both cover the same time around it, so that one scale fits both.
    spans = [
        (view.scene.extent[0] - start[0], view.scene.extent[1] - start[0])
        for view, start in zip(views, starts, strict=True)
    ]
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    longest = max(end - start for start, end in starts)
    for view, (start, _) in zip(views, starts, strict=True):
        view.widen((start + low, start + high))
        if align is not None:
            view.window = (start, start + longest)
    return Comparison(*views)


def _aligned(view: Explorer, align: str | None) -> Span:
    """Find the time that is put at 0: the first instance of a range, or all that there is."""
    if align is None:
        return view.scene.extent
    ranges = view.scene.intervals.ranges.filter(pl.col("start_ns").is_not_null())
    found = ranges.filter(pl.col("name") == align).sort("start_ns", "end_ns").head(1)
    if found.is_empty():
        names = ranges["name"].drop_nulls().value_counts(sort=True)["name"].to_list()
        shown = [repr(shortened(name)) for name in names]
        what = f"NVTX range in {shortened(view.config['title'])}"
        raise UnknownFilterValueError(what, repr(shortened(align)), shown)
    row = found.row(0, named=True)
    return row["start_ns"], max(row["end_ns"], row["start_ns"] + 1)
