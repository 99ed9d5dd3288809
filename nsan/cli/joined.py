"""The first answer of a trace joined with a memory snapshot: what of the traffic is of which tensor."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.output import write_document
from nsan.cli.results import joined_sources, plain_rows
from nsan.info import MODEL_KIND, MODELLED
from nsan.tabular.joined import (
    LINE_FIELDS,
    STATE_FIELDS,
    clock_in_words,
    effect_in_words,
    line_row,
    state_rows,
)
from nsan.tabular.text import Row, dash, name, table
from nsan.text import safe

if TYPE_CHECKING:
    from nsan.joined import Joined

_PARTS: Final = {
    "clocks": "clock_alignment",
    "effect": "pca_effect",
    "states": "state_traffic",
    "lines": "line_traffic",
}
"""What the summary is made of: analysis by key of its document."""

_WHOLE: Final = ("effect",)
"""Parts that only a whole capture has."""

_MOST_ROWS: Final = 8


def summarise(args: argparse.Namespace) -> int:
    """Write the summary of a trace joined with the snapshot that was named.

    Parameters
    ----------
    args : Namespace
        Trace, snapshot, filters, format and output.

    Returns
    -------
    int
        Exit status.
    """
    joined = joined_sources(args)
    found = _document(joined)
    write_document(args, found, lambda: _text(found, markdown=args.format == "markdown"))
    return 0


def _document(joined: Joined) -> dict[str, Any]:
    from nsan.analysing import kinds_of, run_analysis
    from nsan.analysis.catalog import find
    from nsan.contract import SCHEMA

    snapshot = joined.snapshot
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "source": joined.info.source,
        "source_kind": joined.info.kind,
        "snapshot": None if snapshot is None else snapshot.info.source,
        "model": {} if snapshot is None else snapshot.info.model,
        "windows_ns": joined.trace.windows,
        "kinds": {},
    }
    for part, analysis_name in _PARTS.items():
        if part in _WHOLE and joined.trace.is_filtered:
            document[part] = None  # not none: only a whole capture has it
            continue
        analysis = find(analysis_name)
        rows = run_analysis(joined, analysis).collect()
        document[part] = plain_rows(analysis, rows)
        document["kinds"][part] = kinds_of(joined, analysis, rows)
    return document


def _text(document: Mapping[str, Any], *, markdown: bool) -> str:
    heading = "# " * markdown
    parts = [f"{heading}{_title(document, markdown=markdown)}", clock_in_words(document["clocks"])]
    if document["effect"] is None:
        parts.append(
            "Filtered: migrations that start in the part that was asked for. What the allocator did in all "
            "only the whole capture tells."
        )
    rows = document["states"] + (document["effect"] or [])
    gpus = sorted({(row["pid"], row["device_id"]) for row in rows}, key=str)
    for gpu in gpus:
        parts += _gpu(document, gpu, markdown=markdown)
    if not gpus:
        parts.append("Nothing was migrated.")
    return "\n\n".join(parts) + "\n"


def _title(document: Mapping[str, Any], *, markdown: bool) -> str:
    trace, snapshot = (name(document[key], markdown=markdown) for key in ("source", "snapshot"))
    made = document["model"]
    about = f", {made.get('network')} with the {made.get('allocator')} allocator" if made else ""
    modelled = f", {MODELLED}" * (document["source_kind"] == MODEL_KIND)
    return f"{trace} joined with {snapshot}{safe(about)}{modelled}"


def _gpu(document: Mapping[str, Any], gpu: tuple[Any, Any], *, markdown: bool) -> Iterator[str]:
    """Write what is known of one GPU of a process, a paragraph each."""

    def of(part: str) -> list[Row]:
        rows = document[part] or []
        return [row for row in rows if (row["pid"], row["device_id"]) == gpu]

    many = len({row["pid"] for row in document["states"]}) > 1
    yield f"{'## ' * markdown}GPU {dash(gpu[1])}{f' of process {dash(gpu[0])}' * many}"
    if rows := list(state_rows(of("states"))):
        fields = [f for f in STATE_FIELDS if any(row[f.key] for row in rows)]
        yield table(rows, fields, markdown=markdown)
    for effect in of("effect"):
        said = effect_in_words(effect, str(document["model"].get("allocator")))
        yield "\n".join(f"{'- ' * markdown}{line}" for line in said)
    if lines := of("lines"):
        yield f"{'### ' * markdown}Which lines of the program the traffic is of"
        rows = [line_row(row) for row in lines[:_MOST_ROWS]]
        yield table(rows, LINE_FIELDS, markdown=markdown)
        if len(lines) > _MOST_ROWS:
            yield f"({len(lines) - _MOST_ROWS} more: --by line)"
