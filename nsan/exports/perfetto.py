"""A trace as a native file of Perfetto, for its page, its SQL and its Python package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Final

import polars as pl

import nsan
from nsan.exports.counters import write_counters
from nsan.exports.layout import Layout
from nsan.exports.slices import Sheet, write_batches, write_migrations, write_slices
from nsan.exports.trace_file import TraceFile
from nsan.info import MODEL_KIND, MODELLED
from nsan.schema import TABLES
from nsan.text import shortened
from nsan.units import counted

if TYPE_CHECKING:
    from nsan.asking import Asked

_TIMED: Final = [name for name, table in TABLES.items() if "start_ns" in table.schema]


def write_perfetto(asked: Asked, opened: IO[bytes]) -> list[str]:
    """Write a trace for Perfetto.

    Parameters
    ----------
    asked : Asked
        The trace, as filtered, and perhaps the memory snapshot of its run.
    opened : binary file
        Where to.

    Returns
    -------
    list of str
        What is not in the file, and why.

    Raises
    ------
    NsanError
        If a snapshot was named that is not of this run.
    """
    is_modelled = asked.trace.info.kind == MODEL_KIND
    first, last, n_untimed = _span(asked)
    shift = max(0, -first)
    file = TraceFile(opened, shift_ns=shift)
    layout = Layout(file, asked.trace, " (modelled)" * is_modelled)
    sheet = Sheet(asked, file, layout, is_modelled, -shift)
    # First of all: a page that is open on a large file shows what it is of.
    about = layout.top("About this trace", "Where this file is from; click the mark.")
    batches = asked.rows_of("batches")
    missing = write_counters(sheet, batches)
    if batches is not None:
        write_batches(sheet, batches)
    write_migrations(sheet)
    write_slices(sheet)
    if n_untimed:
        missing.append(f"{counted(n_untimed, 'row')} without a time")
    if last < first:
        missing.append(f"any event: {'filters left' if asked.filters else 'there is'} none")
    mark = {"track": [about], "start_ns": [first], "name": ["About this trace"]}
    facts = {name: [text] for name, text in _facts(asked, shift, missing)}
    file.instants(pl.DataFrame(mark | facts), "about")
    file.close()
    return missing


def _span(asked: Asked) -> tuple[int, int, int]:
    """Find the first and the last start, and count rows without one."""
    found = pl.concat(
        asked.events(name).select(
            first=pl.col("start_ns").min(),
            last=pl.col("start_ns").max(),
            n_untimed=pl.col("start_ns").null_count().cast(pl.Int64),
        )
        for name in _TIMED
    ).collect()
    first, last = found["first"].min(), found["last"].max()
    n_untimed = int(found["n_untimed"].sum())
    return (0, -1, n_untimed) if first is None else (first, last, n_untimed)  # type: ignore[return-value]


def _facts(asked: Asked, shift: int, missing: Sequence[str]) -> list[tuple[str, str]]:
    """Say what the file is of, in pairs of a name and a text."""
    info = asked.trace.info
    zero = "the session start" if not shift else f"{shift} ns before the session start"
    facts = [
        ("written by", f"nsan {nsan.__version__}"),
        ("source", shortened(info.source, 200)),
        ("times", f"ns, from {zero}"),
        (
            "kinds",
            "recorded: rows; derived: exact arithmetic on rows; reconstructed: inferred; modelled: by a model",
        ),
    ]
    if info.kind == MODEL_KIND:
        facts.append(("modelled", f"Everything here was {MODELLED}."))
    if asked.is_part:
        facts.append(("part", "Filters chose a part of the capture."))
    for kind, found in info.capture.items():
        facts.append((kind.replace("_", " "), f"{found.answer.replace('_', ' ')}: {found.reason}"))
    left_out = [(f"left out{f' ({at})' * (at > 1)}", text) for at, text in enumerate(missing, 1)]
    return facts + left_out
