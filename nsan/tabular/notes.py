"""What is said beside a table: of which kind its figures are, and what they lack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsan.info import MODEL_KIND, MODELLED
from nsan.tabular.columns import header_of
from nsan.tabular.totals import unanswered
from nsan.units import counted

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysing import Source
    from nsan.analysis.catalog import Analysis
    from nsan.analysis.result import Figure

_WHAT: Final = {"trace": "capture", "snapshot": "snapshot", "joined": "capture"}


def notes_on(source: Source, analysis: Analysis, found: pl.DataFrame) -> list[str]:
    """Say what the figures of a result stand on, and what they lack.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        On what the analysis was run.
    analysis : Analysis
        What was run.
    found : DataFrame
        What it gave.

    Returns
    -------
    list of str
        Sentences: why there is no row, that the model made the figures, what was not recorded and how to record it.
    """
    notes = []
    if not found.height:
        notes.append(
            f"No row{' in the part that was asked for' * is_part(source)}. {analysis.result.nothing}"
        )
    return [*notes, *origin_of(source, analysis), *missing_of(source, analysis)]


def is_part(source: Source) -> bool:
    """Say whether filters chose a part of the capture."""
    return bool(getattr(getattr(source, "trace", source), "is_filtered", False))


def origin_of(source: Source, analysis: Analysis) -> list[str]:
    """Say that the model wrote what was analysed; nothing if it was recorded."""
    if source.info.kind != MODEL_KIND:
        return []
    return [f"The {_WHAT[analysis.subject]} was {MODELLED}: every figure is the model's."]


def missing_of(source: Source, analysis: Analysis) -> list[str]:
    """Say what an analysis reads that was not recorded, and how to record it: a sentence for each."""
    capture = source.info.to_dict().get("capture", {})
    notes = []
    for kind in analysis.reads:
        answer = capture.get(kind)
        if answer and answer["answer"] != "recorded":
            said: dict[str, dict[str, Any]] = {
                "capture": {kind: answer["answer"]},
                "switches": {kind: answer["switch"]},
                "reasons": {kind: answer["reason"]},
            }
            notes.append(f"{table_word(kind)}: {unanswered(said, kind)}")
    return notes


def table_word(kind: str) -> str:
    """Write the name of a kind of events for people.

    Examples
    --------
    >>> table_word("gpu_faults")
    'GPU faults'
    """
    if kind == "nvtx":
        return "NVTX ranges"
    name = (
        kind.replace("_", " ").replace("gpu", "GPU").replace("cpu", "CPU").replace("nvtx", "NVTX")
    )
    return name[0].upper() + name[1:]


def kinds_in_words(columns: Iterable[Figure], kinds: Mapping[str, str]) -> str:
    """Say the kind of each column, the most common one first and in one word.

    Parameters
    ----------
    columns : iterable of Figure
        Those that are shown, at least one.
    kinds : mapping of str to str
        By column, as :func:`nsan.analysing.kinds_of` gives them.

    Returns
    -------
    str
        A sentence.
    """
    by_kind: dict[str, list[str]] = defaultdict(list)
    for column in columns:
        by_kind[kinds[column.name]].append(header_of(column))
    most = max(by_kind, key=lambda kind: len(by_kind[kind]))
    rest = [f"{kind}: {', '.join(names)}" for kind, names in by_kind.items() if kind != most]
    return f"Figures are {most}" + (f", but {'; '.join(rest)}." if rest else ".")


def few(names: Iterable[str], most: int = 6) -> str:
    """List some names, and say how many others there are."""
    known = list(names)
    rest = len(known) - most
    return ", ".join(known[:most]) + (f" and {counted(rest, 'other')}" if rest > 0 else "")
