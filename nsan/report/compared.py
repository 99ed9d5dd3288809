"""A comparison as a section of a report: the same words and tables as `nsan compare` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from nsan.analysis.compare.tables import BASE
from nsan.asking import Asked
from nsan.comparing.conditions import captures_in
from nsan.comparing.text import (
    MOST_DIFFERENCES,
    MOST_ROWS,
    conditions_in_words,
    differences_of,
    gates_in_words,
    headline,
    labels_of,
    mover_fields,
    mover_rows,
    remarks,
    warnings_of,
)
from nsan.errors import UsageError
from nsan.notebooks import capture_path
from nsan.report.blocks import Block, Heading, Point, Points, Table, Text
from nsan.report.shown import Blocks
from nsan.text import shortened
from nsan.units import counted

if TYPE_CHECKING:
    from nsan.comparing.document import Comparison
    from nsan.trace import Trace


def compared(found: Comparison, *, rows: int = MOST_ROWS) -> Blocks:
    """Show a comparison.

    Parameters
    ----------
    found : Comparison
        Of :func:`nsan.compare`.
    rows : int, default 30
        Rows of a table at most.

    Returns
    -------
    Blocks
        What the conditions are, what makes their comparison doubtful; for each condition what its
        program does differently and which figures moved; what became of gates.
    """
    return Blocks(_blocks(found.to_dict(), rows))


def _blocks(document: dict[str, Any], rows: int) -> Iterator[Block]:
    conditions = conditions_in_words(document)
    yield Points(tuple(Point(label, said, kind) for label, said, kind in conditions))
    for each in warnings_of(document):
        yield Text(each, "warning")
    labels = labels_of(document)
    for label in labels:
        if len(labels) > 1:
            yield Heading(f"{label} against {BASE}")
        yield from _of_pair(document, label, rows)
    if document["gates"]:
        yield Heading("Limits")
        yield Points(tuple(Point("", said) for said in gates_in_words(document)))


def _of_pair(document: dict[str, Any], label: str, most: int) -> Iterator[Block]:
    yield Text(headline(document, label))
    differs = differences_of(document, label)
    if differs:
        yield Text("What the programs do differently:")
        yield Points(tuple(Point("", said) for said in differs[:MOST_DIFFERENCES]))
    rows, fields = mover_rows(document, label), mover_fields(document, label)
    notes = [*remarks(document, label)]
    if len(rows) > most:
        notes.insert(0, f"{counted(len(rows) - most, 'more row')}.")
    if not rows:
        yield Text(f"No figure of {label} differs from that of {BASE}.")
        for note in notes:
            yield Text(note, "note")
        return
    yield Table(
        tuple(field.header for field in fields),
        tuple(tuple(row[field.key] for field in fields) for row in rows[:most]),
        tuple(field.right for field in fields),
        f"What moved, {label} against {BASE}: what is beyond noise first, then by the size of the change",
        tuple(notes),
    )


def conditions_of(base: str, other: str, more: Iterable[str] = ()) -> list[list[Path]]:
    """Find what the parameters of a notebook name.

    Parameters
    ----------
    base, other : str
        A and B: a trace or a folder of traces each.
    more : iterable of str
        As "B=FILE": a further run of B; "C=FILE": of a third condition.

    Returns
    -------
    list of list of Path
        As :func:`nsan.compare` takes them.

    Raises
    ------
    NsanError
        If one of ``more`` has another form, or there is nothing at a path.
    """
    found = {"A": [capture_path(base)], "B": [capture_path(other)]}
    for text in more:
        label, equals, place = text.partition("=")
        if not equals or label not in set(ascii_uppercase):
            raise UsageError(f"{shortened(text)!r}: write LABEL=FILE, as B=second.sqlite.")
        found.setdefault(label, []).append(capture_path(place))
    return [found[label] for label in sorted(found)]


def filters_of(only: Iterable[str]) -> dict[str, Any]:
    """Read filters as the parameters of a notebook name them.

    Parameters
    ----------
    only : iterable of str
        As "nvtx=forward/3", "time=1s/2s", "device=0" or "pid=4242"; the last two may come several times.

    Returns
    -------
    dict
        As :meth:`nsan.Trace.filter` takes them.

    Raises
    ------
    UsageError
        If one has another form.
    """
    found: dict[str, Any] = {}
    for text in only:
        key, _, value = text.partition("=")
        if key in {"device", "pid"} and value.isdecimal():
            found.setdefault(key, []).append(int(value))
        elif key in {"time", "nvtx"} and value:
            found[key] = value
        else:
            msg = f"{shortened(text)!r} is no filter: write nvtx=NAME, time=START/END, device=N or pid=N."
            raise UsageError(msg)
    return found


def first_runs(
    conditions: Sequence[Sequence[Path]], filters: Mapping[str, Any] | None = None
) -> tuple[Trace, Trace]:
    """Open the first run of the base, and of the first condition that is compared with it.

    Parameters
    ----------
    conditions : sequence of sequence of Path
        As :func:`nsan.compare` takes them.
    filters : mapping, optional
        Of :meth:`nsan.Trace.filter`.

    Returns
    -------
    tuple of Trace
        What the filters leave of them.
    """
    places = (captures_in(paths[0])[0] for paths in conditions[:2])
    a, b = (Asked(place, filters=filters).trace for place in places)
    return a, b
