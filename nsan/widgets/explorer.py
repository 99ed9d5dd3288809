"""The explorer: one linked view of a trace in a notebook, and what is selected in it as a frame.

Python holds the state and answers questions; ``explorer.js`` draws. What the browser sends is checked
like any other input, and an error that it causes, also in an observer of yours, is shown under the view.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from nsan.errors import ExtraMissingError, UnknownNameError
from nsan.text import safe

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as _missing:
    raise ExtraMissingError("The explorer", _missing.name or "anywidget", "lab") from _missing

from nsan.widgets import page, static
from nsan.widgets.checking import (
    asked_pick,
    asked_view,
    checked_by,
    checked_options,
    checked_pick,
    inside,
    last_lines,
    named_options,
    numbers,
    span,
)
from nsan.widgets.clusters import Clusters, find_clusters, table
from nsan.widgets.computed import Change, Checked, Computed, Sealed
from nsan.widgets.configuring import BACKGROUND, configuration, offline_views, trace_of
from nsan.widgets.filters import checked
from nsan.widgets.refaulted import find_refaults
from nsan.widgets.scene import Scene
from nsan.widgets.selecting import Pick, hover_lines, pick_of, selected

if TYPE_CHECKING:
    import polars as pl

    from nsan.joined import Joined
    from nsan.trace import Trace
    from nsan.widgets.scene import Span

_HERE: Final = Path(__file__).parent
_SENT: Final = 50
"""Moves on behalf of another view that are remembered."""


class Explorer(Sealed, anywidget.AnyWidget):
    """One linked view of a trace: overview, lanes, map of addresses and time, clusters and facts.

    Make one with :func:`nsan.explore`.

    Attributes
    ----------
    window : (int, int)
        Time that is shown, ns from the session start, half-open. Set it to move the view, also with
        a text such as ``"1s/1s250ms"``, or None for all; observable.
    place : (int, int)
        Stretch of the map that is shown, in bytes of addresses with their gaps folded; None for all.
    by : str
        What colour says: "cause", "access", "density" or "latency".
    filters : dict
        What is kept, by "pid", "device", "cause", "access", "kernel", "nvtx", "allocation": a list, or
        None for all.
    picked : dict or None
        What was picked: ``what`` ("kernel", "nvtx", "batch", "cluster", "box"), and ``id`` or ``window``
        and ``place``.
    selection : DataFrame
        The rows in what was picked, else in the window and place, with what the filters keep:
        ``nsan.analysis.views.tables.SELECTED``. Computed when read; observers hear of each change.
    error : str
        The last lines of an error that the browser caused; "" if there is none.
    """

    settable: ClassVar[tuple[str, ...]] = ("window", "place", "by", "filters", "picked")

    _esm: ClassVar[Any] = _HERE / "explorer.js"
    _css: ClassVar[Any] = _HERE / "explorer.css"

    config = traitlets.Dict().tag(sync=True)
    clusters = traitlets.Dict().tag(sync=True)
    panel = traitlets.Dict().tag(sync=True)
    error = traitlets.Unicode("").tag(sync=True)
    busy = traitlets.Unicode("").tag(sync=True)
    filters = Checked(lambda me, value: checked(value, me.scene.options), {}).tag(sync=True)

    window = Checked(lambda me, value: inside(value, me.scene.extent, "window"), (0, 1))
    place = Checked(lambda me, value: inside(value, me.scene.places, "place"), (0, 1))
    by = Checked(lambda _, value: checked_by(value), "cause")
    picked = Checked(lambda me, value: me.find_pick(value))
    selection = Computed(
        lambda explorer: explorer.selected_rows(), "set window, place, picked or filters."
    )

    def __init__(self, trace: Trace | Joined | str | Path, **options: Any) -> None:
        self._pick: Pick | None = None
        self._cached: tuple[tuple[Any, ...], pl.DataFrame] | None = None
        self._lock = threading.RLock()
        self._found: Clusters | None = None
        self._from_browser = False
        self._peer: Callable[[Span, str, tuple[int, int]], float] | None = None
        self._sent: list[Span] = []
        self.is_echo = False
        self._options = checked_options(options)
        self.scene = scene = Scene(trace_of(trace))
        super().__init__()
        with self._moved_by(browser=True):
            self.filters, self.window, self.place = scene.filters, scene.extent, scene.places
        self.config = configuration(scene, self._options)
        self.on_msg(self._on_message)
        self._work = threading.Thread(target=self._compute, daemon=True)
        self.clusters, self.busy = {"state": "computing"}, BACKGROUND[0]
        self._work.start()
        self._is_made = True

    def selected_rows(self) -> pl.DataFrame:
        """Compute :attr:`selection`; the rows are kept while what they follow from stays."""
        # The browser is answered in another thread while a cell runs: no order of events tells.
        window, place, pick, known = self.window, self.place, self._pick, self._cached
        asked = (window, place, id(pick), self.scene.filters)
        if known is None or known[0] != asked:
            known = self._cached = (asked, selected(self.scene, pick, window, place))
        return known[1]

    def _changed_selection(self) -> None:
        """Forget the rows and tell observers, who compute them only if they look."""
        known, self._cached = self._cached, None
        old = None if known is None else known[1]
        self.notify_change(Change(name="selection", old=old, owner=self, type="change"))

    def find_pick(self, asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Check what :attr:`picked` is set to, and find it."""
        wanted = None if asked is None else checked_pick(asked, self.scene)
        self._pick = None if wanted is None else pick_of(self.scene, wanted, self._found)
        return wanted

    @traitlets.observe("window", "place", "by")
    def _on_move(self, change: Mapping[str, Any]) -> None:
        if self._from_browser:
            return
        self._go(**{change["name"]: change["new"]})
        if self._pick is None and change["name"] != "by":
            self._changed_selection()

    @traitlets.observe("filters")
    def _on_filters(self, _: Mapping[str, Any]) -> None:
        if self.filters == self.scene.filters:
            return
        self.scene.set_filters(self.filters)
        self.config = configuration(self.scene, self._options)
        self.send({"kind": "stale"})
        if self._pick is not None:
            self.panel = self._described()
        self._changed_selection()

    @traitlets.observe("picked")
    def _on_picked(self, _: Mapping[str, Any]) -> None:
        self.panel = self._described()
        self._go_to_pick()
        self._changed_selection()

    def _described(self) -> dict[str, Any]:
        if self._pick is None or self.picked is None:
            return {}
        return {**self._pick.panel(self.scene), "id": self.picked.get("id")}

    def _go_to_pick(self) -> None:
        if self._pick is None or self._pick.what == "box":
            return
        window, place = self._pick.view(self.scene)
        self._go(window=window, place=place)
        # The browser goes there; its next look is no move of the user's.
        with self._moved_by(browser=True):
            self.window, self.place = window, self.place if place is None else place

    def _go(
        self, *, window: Span | None = None, place: Span | None = None, by: str | None = None
    ) -> None:
        """Move the view: by a message, since the browser alone knows what it shows just now."""
        sent: dict[str, Any] = {"kind": "go"}
        if window is not None:
            origin = self.scene.origin_ns
            sent["window"] = [window[0] - origin, window[1] - origin]
        if place is not None:
            sent["place"] = list(place)
        if by is not None:
            sent["by"] = by
        self.send(sent)

    def widen(self, extent: Span) -> None:
        """Cover more time than the trace has; the window is all of it.

        Parameters
        ----------
        extent : (int, int)
            Time, ns from the session start; holds the trace's own.
        """
        # The clusters may still be looked for: their table takes the times of whichever is last.
        with self._lock:
            self.scene.extent = extent
            if self._found is not None:
                self.clusters = table(self.scene.trace, self._found, extent[0], self.scene.place_of)
        with self._moved_by(browser=True):
            self.window = extent
        self.config = configuration(self.scene, self._options)

    def share_scale(self, top: Callable[[Span, str, tuple[int, int]], float]) -> None:
        """Let the colour scale reach as high as another view's.

        Parameters
        ----------
        top : callable
            Top of the other's scale for a window, a way to colour and a shape.
        """
        self._peer = top

    def move_to(self, window: Span) -> None:
        """Move the view because another one moved; :attr:`is_echo` is true while the browser agrees.

        Parameters
        ----------
        window : (int, int)
            Time, ns from the session start.
        """
        wanted = span(window, self.scene.extent, "window")
        if wanted == self.window:
            return
        self._sent = [*self._sent[-_SENT:], wanted]
        with self._moved_by(browser=False):
            self.window = wanted

    def _on_message(self, _: Any, content: Any, buffers: Sequence[Any] = ()) -> None:  # noqa: ARG002
        """Answer a message; whatever goes wrong is shown under the view, and the view lives on."""
        handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "look": self._on_look,
            "hover": self._on_hover,
            "pick": self._on_pick,
            "filter": self._on_filter,
            "clear_error": self._on_failed,
            "failed": self._on_failed,
        }
        kind = content.get("kind") if isinstance(content, Mapping) else None
        try:
            with self._moved_by(browser=True):
                if kind not in handlers:
                    raise UnknownNameError("message", str(kind), handlers)
                handlers[kind](content)
        except Exception as error:  # noqa: BLE001  an observer may raise anything
            self.error = last_lines(error)

    @contextlib.contextmanager
    def _moved_by(self, *, browser: bool) -> Iterator[None]:
        """Say who sets the traits: what the browser shows already is not sent to it."""
        before, self._from_browser = self._from_browser, browser
        try:
            yield
        finally:
            self._from_browser = before

    def _on_look(self, asked: Mapping[str, Any]) -> None:
        address = {"view": asked.get("view"), "id": asked.get("id")}
        try:
            shown = (self.window, self.place, self.by)
            window, place, by, shape = asked_view(asked, self.scene, shown)
            high = self._peer(window, by, shape) if self._peer else None
            message, buffers = self.scene.view(window, place, by, shape, high=high)
        except Exception:
            # The browser waits for one answer at a time.
            self.send({"kind": "failed", **address})
            raise
        self.send({**message, **address}, buffers)
        self.is_echo = window in self._sent
        if self.is_echo:
            # What was asked for before that will not be shown any more.
            self._sent = self._sent[self._sent.index(window) + 1 :]
        if asked.get("moved", True) is not True:
            # A view that only draws again what it shows: another one may have moved since.
            self.is_echo = False
            return
        moved = (window, place) != (self.window, self.place)
        try:
            # All three are set before an observer hears of the first.
            with self._lock, self.hold_trait_notifications():
                self.window, self.place, self.by = window, place, by
        finally:
            self.is_echo = False
            if moved and self._pick is None:
                self._changed_selection()

    def _on_hover(self, asked: Mapping[str, Any]) -> None:
        t, y, dt, dy = numbers([asked.get(key) for key in ("t", "y", "dt", "dy")], "hover", n=4)
        at = (t + self.scene.origin_ns, y)
        lines = hover_lines(self.scene, at, (abs(dt), abs(dy)))
        self.send(
            {"kind": "hover", "view": asked.get("view"), "id": asked.get("id"), "lines": lines}
        )

    def _on_pick(self, asked: Mapping[str, Any]) -> None:
        if asked.get("what") is None:
            self.picked = None
            return
        wanted = asked_pick(asked, self.scene)
        if wanted == self.picked:  # once more: back to it
            self._go_to_pick()
        self.picked = wanted

    def _on_filter(self, asked: Mapping[str, Any]) -> None:
        self.filters = asked.get("filters")

    def _on_failed(self, asked: Mapping[str, Any]) -> None:
        """Show an error of the browser's own, or take away what is shown."""
        failed = asked["kind"] == "failed"
        self.error = "In the browser: " + safe(str(asked.get("text"))[:2000]) if failed else ""

    def _compute(self) -> None:
        """Find the clusters and then the refaults; an error is shown under the view."""
        try:
            self.scene.warm()
            self._find_clusters()
            with self._lock:
                self.busy = BACKGROUND[1]
            self.scene.refaults = find_refaults(self.scene.trace)
        except Exception as error:  # noqa: BLE001  nobody else would see it
            with self._lock:
                self.error = last_lines(error)
        finally:
            with self._lock:
                self.busy = ""

    def _find_clusters(self) -> None:
        scene = self.scene
        try:
            found = find_clusters(scene.short_trace)
        except Exception:
            with self._lock:
                self.clusters = {"state": "failed"}
            raise
        with self._lock:
            self._found = found
            self.clusters = table(scene.trace, found, scene.origin_ns, scene.place_of)

    def ready(self, timeout: float | None = None) -> bool:
        """Wait for what is computed in the background: clusters, and what came back after evictions.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; None waits as long as it takes.

        Returns
        -------
        bool
            Whether it is there.
        """
        self._work.join(timeout)
        return not self._work.is_alive()

    def to_html(self, path: str | Path, *, force_overwrite: bool = False) -> Path:
        """Write a copy that works offline: one HTML file, which asks nobody for anything.

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

        Raises
        ------
        UsageError, OutputExistsError, OutputWriteError
            If the name is no page's, the file exists, or it cannot be written.
        """
        text = page.page(self.config["title"], [self.offline_copy()], *page.sources())
        return page.write_page(path, text, force_overwrite=force_overwrite)

    def offline_copy(self) -> dict[str, Any]:
        """Collect what an offline copy shows: the whole trace in each way to colour.

        Returns
        -------
        dict
            Plain containers, ready for JSON.
        """
        self.ready()
        copy = offline_views(self.scene, self._found, self._peer)
        config = {**self.config, "offline": True}
        said = {"clusters": self.clusters, "panel": {}, "error": "", "filters": self.filters}
        return {"config": config, **said, **copy}

    def __str__(self) -> str:
        return static.text(self.config, self.clusters)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Show the view where there is a front end, else its static form."""
        return static.bundle([self], lambda: super(Explorer, self)._repr_mimebundle_(**options))


@named_options
def explore(
    trace: Trace | Joined | str | Path,
    *,
    height: int | None = None,
    theme: str = "auto",
) -> Explorer:
    """Show a trace as one linked view in a notebook.

    Parameters
    ----------
    trace : Trace, Joined, str or Path
        A trace, whole or filtered, or the path of one.
    height : int, optional
        Height of the map, pixels.
    theme : {"auto", "light", "dark"}
        Its ground; "auto" follows the notebook.

    Returns
    -------
    Explorer
        The view; show it as the last line of a cell. Without a front end (a plain script, nbconvert) it
        has a static form.

    Raises
    ------
    ExtraMissingError
        If ipywidgets or anywidget is not installed.
    NsanError
        If the path holds no trace.

    Examples
    --------
    >>> import nsan
    >>> nsan.explore("sample_data/um_vector_add_rtx4060l.sqlite")  # doctest: +SKIP
    """
    return Explorer(trace, height=height, theme=theme)
