"""What the browser and the user give, checked: numbers, ranges, options; and errors as text."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from nsan.errors import NsanError, UnknownNameError, UsageError
from nsan.text import safe, shortened
from nsan.units import format_time, parse_window
from nsan.widgets import messages
from nsan.widgets.scene import BYS

if TYPE_CHECKING:
    from nsan.widgets.scene import Scene, Span

P = ParamSpec("P")
R = TypeVar("R")

THEMES: Final = ("auto", "light", "dark")
_LAST_LINES: Final = 12
_NOT_THE_USERS: Final = ("nsan", "traitlets", "ipywidgets", "anywidget", "contextlib")
"""Packages whose lines of a traceback say nothing about the user's mistake."""

_OPTIONS: Final = {"height": None, "theme": "auto"}
_LEAST_HEIGHT, _MOST_HEIGHT = 120, 4000


def named_options(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse a keyword that a function does not have with the names of those that it has.

    Parameters
    ----------
    function : callable
        Its keyword-only parameters are its options.

    Returns
    -------
    callable
        The function.
    """
    known = inspect.signature(function).parameters
    names = [name for name, each in known.items() if each.kind is each.KEYWORD_ONLY]

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise UnknownNameError(f"option of {function.__name__}", name, names)
        return function(*args, **kwargs)

    return called


def checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of an explorer.

    Parameters
    ----------
    given : mapping
        ``height`` and ``theme``, where they are given.

    Returns
    -------
    dict
        Every option.

    Raises
    ------
    UsageError
        If there is no such option, or it cannot have this value.
    """
    for name in given:
        if name not in _OPTIONS:
            raise UnknownNameError("option of the explorer", name, _OPTIONS)
    options: dict[str, Any] = {**_OPTIONS, **given}
    if options["theme"] not in THEMES:
        raise UnknownNameError("theme", str(options["theme"]), THEMES)
    height = options["height"]
    plain = isinstance(height, int) and not isinstance(height, bool)
    if height is not None and not (plain and _LEAST_HEIGHT <= height <= _MOST_HEIGHT):
        msg = f"height={height!r:.40}: give {_LEAST_HEIGHT} to {_MOST_HEIGHT} pixels."
        raise UsageError(msg)
    return options


def numbers(value: Any, name: str, n: int = 2) -> list[float]:
    """Check that something is a list of so many numbers, none of them huge, infinite or NaN."""
    plain = isinstance(value, list | tuple) and len(value) == n
    # Below 2^62 in size: so no infinity and no NaN either.
    if not plain or not all(
        isinstance(each, int | float) and abs(each) < 1 << 62 for each in value
    ):
        msg = f"{name}={value!r:.80}: expected {n} numbers."
        raise UsageError(msg)
    return list(value)


def size(value: Any, most: int) -> int:
    """Bring a number of columns or rows into what a message may have; anything else is the most."""
    plain = isinstance(value, int | float) and value == value  # noqa: PLR0124  NaN
    return int(min(max(value, 1), most)) if plain else most


def span(value: Any, whole: Span, name: str, read: Callable[[str], Any] | None = None) -> Span:
    """Bring a range into the whole.

    Parameters
    ----------
    value : (start, end), str or None
        The range; None: the whole, as an end that is None is that of the whole.
    whole : (int, int)
        What there is.
    name : str
        What it is called.
    read : callable, optional
        Reads a text.

    Returns
    -------
    (int, int)
        At least 1 long, inside the whole.

    Raises
    ------
    UsageError
        If it is no range, or ends before it starts.
    """
    if value is None:
        return whole
    if isinstance(value, str) and read is not None:
        value = read(value)
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if len(sides) == 2:
        sides = [end if side is None else side for side, end in zip(sides, whole, strict=True)]
    start, end = (round(side) for side in numbers(sides, name))
    if end < start:
        raise UsageError(f"{name}={value!r:.80}: it ends before it starts.")
    start = min(max(start, whole[0]), whole[1] - 1)
    return start, min(max(end, start + 1), whole[1])


def inside(value: Any, whole: Span, name: str) -> Span:
    """Check a range that code asks for: as :func:`span`, and some of it must lie in the whole.

    Parameters
    ----------
    value : (start, end), str or None
        The range; a text is a window of time.
    whole : (int, int)
        What there is.
    name : str
        What it is called; "window" is a time.

    Returns
    -------
    (int, int)
        What of it there is.

    Raises
    ------
    UsageError
        If it is no range, or nothing is in it.
    """
    everything = (1 - (1 << 62), (1 << 62) - 1)
    asked = span(value, everything, name, read=parse_window if name == "window" else None)
    empty = isinstance(value, str | list | tuple) and _is_empty(value)
    if empty or asked[0] >= whole[1] or asked[1] <= whole[0]:
        why = "it is empty" if empty else "nothing is there"
        there = (
            f"The view covers {format_time(whole[0])} to {format_time(whole[1])} "
            f"({whole[0]} to {whole[1]} ns from the session start)"
            if name == "window"
            else f"The map has the bytes {whole[0]} to {whole[1]}"
        )
        raise UsageError(f"{name}={value!r:.80}: {why}. {there}.")
    return max(asked[0], whole[0]), min(asked[1], whole[1])


def _is_empty(value: Any) -> bool:
    start, end = parse_window(value) if isinstance(value, str) else value
    return start is not None and end is not None and round(start) == round(end)


def checked_pick(asked: Any, scene: Scene) -> dict[str, Any]:
    """Check what is asked to be picked; a box is brought into what there is."""
    if not isinstance(asked, Mapping):
        msg = f"picked={asked!r:.80}: give a dict with 'what' and 'id', or None."
        raise UsageError(msg)
    box = dict(asked)
    if box.get("what") == "box":
        box["window"] = inside(box.get("window"), scene.extent, "window")
        if box.get("place") is not None:
            box["place"] = inside(box["place"], scene.places, "place")
    return box


def last_lines(error: BaseException) -> str:
    """Write an error for people: nsan's own message, or what was raised and the user's lines to it."""
    if isinstance(error, NsanError):
        return "\n".join(map(safe, str(error).splitlines()))
    known = traceback.extract_tb(error.__traceback__)
    walked = traceback.walk_tb(error.__traceback__)
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walked]
    mine = [
        line
        for line, name in zip(known, names, strict=True)
        if name.partition(".")[0] not in _NOT_THE_USERS
    ]
    # Where none of it is the user's, the fault is in one of these packages: all of it counts.
    frames = "".join(traceback.format_list(mine or known)).rstrip().splitlines()
    raised = "".join(traceback.format_exception_only(error)).rstrip().splitlines()
    return "\n".join(safe(line) for line in [*raised[:_LAST_LINES], *frames[-_LAST_LINES:]])


def checked_by(value: Any) -> str:
    """Check what colour is to say."""
    if not isinstance(value, str) or value not in BYS:
        raise UnknownNameError("way to colour", shortened(value), BYS)
    return str(value)


def asked_view(
    asked: Mapping[str, Any], scene: Scene, shown: tuple[Span, Span, str]
) -> tuple[Span, Span, str, tuple[int, int]]:
    """Read which part the browser asks to see.

    Parameters
    ----------
    asked : mapping
        Its message: ``window`` (ns from the origin), ``place``, ``by``, ``columns``, ``rows``.
    scene : Scene
        What there is.
    shown : tuple
        Window, place and way to colour that stay where it asks for none.

    Returns
    -------
    (int, int), (int, int), str, (int, int)
        Window (ns from the session start), place, way to colour, columns and rows.
    """
    by = checked_by(asked.get("by") or shown[2])
    window, place, origin = asked.get("window"), asked.get("place"), scene.origin_ns
    shape = (
        size(asked.get("columns"), messages.MOST_COLUMNS),
        size(asked.get("rows"), messages.MOST_ROWS),
    )
    if window is not None:
        moved = [side + origin for side in numbers(window, "window")]
        window = span(moved, scene.extent, "window")
    return (
        shown[0] if window is None else window,
        shown[1] if place is None else span(place, scene.places, "place"),
        by,
        shape,
    )


def asked_pick(asked: Mapping[str, Any], scene: Scene) -> dict[str, Any]:
    """Read what the browser picks: a box in ns from the origin, anything else by its number.

    A box of no width, or beyond an edge by less than a point of the screen, is the nearest there is.
    """
    if asked["what"] != "box":
        return {"what": asked["what"], "id": asked.get("id")}
    window = asked.get("window")
    place = asked.get("place")
    if window is not None:
        moved = [side + scene.origin_ns for side in numbers(window, "window")]
        window = span(moved, scene.extent, "window")
    if place is not None:
        place = span(place, scene.places, "place")
    return {"what": "box", "window": window, "place": place}
