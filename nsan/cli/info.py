"""What a capture holds: versions, what was recorded and how to record the rest, rows per table, health."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from nsan.cli.arguments import add_input, add_output, located, show_progress
from nsan.cli.output import write_document
from nsan.cli.summary import gpu_lines, health_text
from nsan.cli.terminal import painter
from nsan.info import MODEL_KIND, MODELLED
from nsan.tabular.text import Field, indented, name, table, word
from nsan.text import safe
from nsan.units import format_count

_CAPTURE_FIELDS: Final = (
    Field("kind", "Events", word, right=False),
    Field("answer", "Recorded", word, right=False),
    Field("n", "Rows", format_count),
    Field("reason", "Why", word, right=False),
    Field("switch", "nsys profile switch", word, right=False),
)
_TABLE_FIELDS: Final = (
    Field("table", "Table", word, right=False),
    Field("n_rows", "Rows", format_count),
)
_ANSWERS: Final = {"recorded": "yes", "not_recorded": "no", "unknown": "unknown"}
_ROWS_OF: Final = {
    "gpu_faults": ("gpu_faults",),
    "cpu_faults": ("cpu_faults",),
    "migrations": ("migrations",),
    "allocations": ("allocations",),
    "nvtx": ("nvtx_ranges", "nvtx_marks"),
    "kernels": ("kernels",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_input(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from nsan.opening import store_of

    folder, manifest = store_of(located(args), progress=show_progress(args))
    document = _document(manifest)
    write_document(args, document, lambda: _text(document, args, folder))
    return 0


def _document(manifest: Mapping[str, Any]) -> dict[str, Any]:
    from nsan.contract import SCHEMA
    from nsan.health import checks

    info, totals, tables = manifest["info"], manifest["totals"], manifest["tables"]
    rows = {name: table["n_rows"] for name, table in tables.items()}
    capture = {
        kind: capture
        | {"n": sum(rows[t] for t in _ROWS_OF[kind]) if capture["answer"] == "recorded" else None}
        for kind, capture in info["capture"].items()
    }
    return {
        "schema": SCHEMA,
        "nsan_version": manifest["nsan_version"],
        **{key: value for key, value in info.items() if key != "capture"},
        "capture": capture,
        "tables": rows,
        "devices": totals["devices"],
        "processes": totals["processes"],
        "health": [asdict(check) for check in checks(info, totals)],
    }


def _text(document: Mapping[str, Any], args: argparse.Namespace, folder: Path) -> str:
    markdown = args.format == "markdown"
    facts = [
        ("kind", document["kind"]),
        ("nsys", document["nsys_version"]),
        ("export schema", document["export_schema"]),
        ("driver", document["driver_version"]),
        ("CUDA driver", document["cuda_driver_version"]),
        ("CPU", document["cpu"]),
    ]
    if document["kind"] == MODEL_KIND:
        facts.insert(1, ("modelled", MODELLED))
    if document.get("allocation_names"):
        facts.append(("names of allocations", f"from {document['allocation_names']}"))
    lines = [f"{fact}: {name(word(value), markdown=markdown)}" for fact, value in facts]
    lines += gpu_lines(document["devices"], markdown=markdown)
    capture = [
        {"kind": kind, **answer, "answer": _ANSWERS[answer["answer"]]}
        for kind, answer in document["capture"].items()
    ]
    rows = [
        {"table": name, "n_rows": n} for name, n in document["tables"].items() if n or args.verbose
    ]
    bullet = "- " if markdown else "  "
    head = f"{'# ' * markdown}{name(document['source'], markdown=markdown)}" + "\n" * markdown
    parts = [
        head + "\n" + "\n".join(bullet + line for line in lines),
        _shown(table(capture, _CAPTURE_FIELDS, markdown=markdown), markdown=markdown),
        _shown(table(rows, _TABLE_FIELDS, markdown=markdown), markdown=markdown),
        health_text(
            document["health"], verbose=True, markdown=markdown, paint=painter(args.output)
        ),
    ]
    if args.verbose:
        parts.append(f"store: {safe(folder)}")
    return "\n\n".join(parts) + "\n"


def _shown(text: str, *, markdown: bool) -> str:
    return text if markdown else indented(text)
