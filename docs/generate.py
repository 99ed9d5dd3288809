"""Write the reference pages again, out of the code: `make docs`.

`columns.md` comes from the schemas and the catalogue of analyses, `json.md` from `nsan.contract_keys`,
`commands.md` from the parsers of the command line. A test compares the files with what this makes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl

from nsan import cli, contract_keys
from nsan.analysis.catalog import Analysis, catalog
from nsan.analysis.pca.tables import JOINED_TABLES
from nsan.analysis.result import Figure
from nsan.cli import allocator, attribute, clusters, faults, migrations
from nsan.contract import SCHEMA
from nsan.contract_advice import ADVICE_KEYS
from nsan.contract_compare import COMPARE_KEYS
from nsan.contract_fleet import FLEET_KEYS
from nsan.schema import TABLES, Table
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

HERE: Final = Path(__file__).parent
WIDTH: Final = 100
_MARK: Final = "<!-- Written by `make docs` from the code. Do not edit. -->"

_MOST_VALUES: Final = 12
"""An enumeration that has more values than this is not spelled out."""


def pages() -> dict[str, str]:
    """Make every page, by the name of its file."""
    return {
        "columns.md": _columns_page(),
        "json.md": _json_page(),
        "commands.md": _commands_page(),
    }


def main() -> None:
    """Write the pages beside this file."""
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")


# Markdown ---------------------------------------------------------------------------------------


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([_MARK, f"# {title}", *parts]) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class _Markup(str):
    """Markdown, ready as it is."""


def _cell(text: str) -> str:
    """Keep what stands in backticks; elsewhere nothing is markup."""
    if isinstance(text, _Markup):
        return text
    plain = re.sub(r":(?:mod|func|class|data):`~?", "`", text.replace("|", r"\|"))
    spans = plain.split("`")
    spans[::2] = [re.sub(r"([*_<\[\]])", r"\\\1", span) for span in spans[::2]]
    return "`".join(spans)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _link(name: str) -> str:
    return _Markup(f"[`{name}`](#{name.replace(' ', '-')})")


# Columns ----------------------------------------------------------------------------------------


def _columns_page() -> str:
    analyses = catalog().values()
    groups: dict[str, list[Analysis]] = {}
    for each in analyses:
        groups.setdefault(_group_of(each), []).append(each)
    tables = (
        ("Tables of a trace", "`trace.NAME` of `nsan.open_trace(FILE)`.", TABLES),
        ("Tables of a snapshot", "`snapshot.NAME` of `nsan.open_snapshot(FILE)`.", SNAPSHOT_TABLES),
        ("Tables of a join", "`joined.NAME` of `nsan.join(TRACE, SNAPSHOT)`.", JOINED_TABLES),
    )
    return _page(
        "Tables and columns",
        "Every table of a trace, of a memory snapshot and of both joined, and what every analysis "
        "gives. Times are ns from the session start, intervals half-open, addresses unsigned. An id "
        "means something only together with its process. Null is what was not recorded, or could "
        "not be read.",
        "**Kinds**: recorded, rows as they are and sums of them; derived, exact arithmetic on rows; "
        "reconstructed, an inference with checks of its own; modelled, from the driver model (then "
        "every figure is).",
        "## Contents",
        *(f"**{title}**: {', '.join(_link(name) for name in found)}" for title, _, found in tables),
        *(_contents_of(title, found) for title, found in groups.items()),
        *(part for table in tables for part in _tables_part(*table)),
        "## Analyses",
        *(part for each in analyses for part in _analysis_part(each)),
    )


_GROUPS: Final = {
    "driver": "What the driver did",
    "clustering": "Where faults crowd",
    "traffic": "What moved",
    "user_prefetch": "What moved",
    "memory": "Memory: residency, refaults, oversubscription",
    "attribution": "Whose it is",
    "loss": "What the recording lost",
    "allocator": "PyTorch's caching allocator",
    "pca": "A trace and a snapshot joined",
    "views": "For charts",
}
"""What the packages of analyses are about."""


def _group_of(analysis: Analysis) -> str:
    return _GROUPS[analysis.function.__module__.split(".")[2]]


def _contents_of(title: str, analyses: Iterable[Analysis]) -> str:
    rows = [(_link(each.name), each.question, _code(_command_of(each))) for each in analyses]
    return f"**{title}**\n\n{_table(('Analysis', 'Question', 'Command'), rows)}"


def _command_of(analysis: Analysis) -> str:
    """Name the shortest command that gives an analysis."""
    choices: tuple[tuple[str, Mapping[str, str]], ...] = (
        ("nsan faults TRACE", faults.BY),
        ("nsan migrations TRACE", migrations.BY),
        ("nsan attribute TRACE", attribute.BY),
        ("nsan clusters TRACE", clusters.BY),
        ("nsan allocator SNAPSHOT", allocator.BY),
        ("nsan allocator TRACE --snapshot FILE", allocator.BY_JOINED),
    )
    for command, by in choices:
        for choice, name in by.items():
            if name == analysis.name:
                return f"{command} --by {choice}"
    subject = {"snapshot": "SNAPSHOT", "trace": "TRACE", "joined": "TRACE --snapshot FILE"}
    return f"nsan analyse {analysis.name} {subject[analysis.subject]}"


def _tables_part(title: str, how: str, tables: Mapping[str, Table]) -> Iterator[str]:
    yield f"## {title}"
    yield how
    for table in tables.values():
        yield f"### {table.name}"
        yield f"One row is {_cell(table.row)}."
        yield _columns_of(table)


def _analysis_part(analysis: Analysis) -> Iterator[str]:
    yield f"### {analysis.name}"
    yield f"**{_cell(analysis.question)}** `{_command_of(analysis)}`"
    reads = "; ".join(
        f"`{table}` ({', '.join(f'`{name}`' for name in columns)})"
        for table, columns in analysis.reads.items()
    )
    facts = [f"One row is {_cell(analysis.result.row)}.", f"Reads {reads}."]
    if analysis.options:
        options = ", ".join(f"`{name}={value}`" for name, value in analysis.options.items())
        facts.append(f"Options: {options}.")
    facts.append(f"Cost: {_cell(analysis.complexity)}.")
    if analysis.whole:
        facts.append("Needs the whole capture: takes no filter.")
    # What is cited by section stands in notes that do not come with nsan.
    sources = [each for each in analysis.source.split("; ") if each and ".md" not in each]
    if sources:
        facts.append(f"Source: {_cell('; '.join(sources))}.")
    yield " ".join(facts)
    yield _columns_of(analysis.result)


def _columns_of(table: Table) -> str:
    has_kinds = all(isinstance(column, Figure) for column in table.columns)
    rows = [
        (
            f"`{column.name}`",
            _type_of(column.dtype),
            column.unit,
            *((column.kind,) if isinstance(column, Figure) else ()),
            column.doc + _values_of(column.dtype),
        )
        for column in table.columns
    ]
    kind = ("Kind",) if has_kinds else ()
    return _table(("Column", "Type", "Unit", *kind, "Meaning"), rows)


def _type_of(dtype: Any) -> str:
    if isinstance(dtype, pl.Enum):
        return "Enum"
    if isinstance(dtype, pl.Array):
        return f"{dtype.size} x {_type_of(dtype.inner)}"
    if isinstance(dtype, pl.List):
        return f"List of {_type_of(dtype.inner)}"
    if isinstance(dtype, pl.Struct):
        return "Struct"
    return str(dtype)


def _values_of(dtype: Any) -> str:
    if not isinstance(dtype, pl.Enum) or len(dtype.categories) > _MOST_VALUES:
        return ""
    return f" One of {', '.join(f'`{value}`' for value in dtype.categories)}."


# JSON -------------------------------------------------------------------------------------------


def _json_page() -> str:
    return _page(
        "The JSON contract",
        f"Version {SCHEMA}: every document says it under `schema`. Keys may be added; none changes "
        "its meaning within a version.",
        "Times are ns, sizes bytes, addresses hexadecimal text (no reader rounds them). Null is "
        "what was not recorded, what this kind of source does not keep, or what could not be read: "
        "never 0. A flag is true or false. `[]` stands for the entries of a list, `<...>` for keys "
        "that come from the data.",
        "## The summary",
        "`nsan summary TRACE --json`, and `nsan.summary(trace)` in Python. `nsan migrations` and "
        "`nsan faults` with `--json` give the part of it that they are about; what `kinds` says "
        "of a name holds wherever the name stands.",
        _keys(contract_keys.SUMMARY_KEYS),
        "## A recording",
        "`nsan record --json PROGRAM`: the summary, and",
        _keys(contract_keys.RECORDING_KEYS),
        "## An analysis",
        "`nsan analyse NAME TRACE --json`, and every command with `--by`. Names, units and meanings "
        "of its columns are in [columns.md](columns.md).",
        _keys(contract_keys.ANALYSIS_KEYS),
        "## Advice",
        "`nsan advise TRACE --json`.",
        _keys(ADVICE_KEYS),
        "## Comparison",
        "`nsan compare A B --json`.",
        _keys(COMPARE_KEYS),
        "## A fleet",
        "`nsan summary DIR --json`, where DIR holds several reports.",
        _keys(FLEET_KEYS),
        "## Other documents",
        "`info`, `allocator`, `pca`, `doctor` and the `--list` of `analyse` and `export` write JSON, "
        "too. What they have in common with the tables above has the same names; the rest may "
        "change with a version of nsan.",
    )


def _keys(keys: Iterable[contract_keys.Key]) -> str:
    rows = [(f"`{key.path}`", key.type + ", or null" * key.null, key.unit, key.doc) for key in keys]
    return _table(("Key", "Type", "Unit", "Meaning"), rows)


# Commands ---------------------------------------------------------------------------------------


def _commands_page() -> str:
    parsers = list(_parsers(cli.parser()))
    contents = ", ".join(_link(name) for name, _ in parsers)
    return _page(
        "Commands",
        "What `--help` says. Exit status: 0 all that was asked was done, 1 error, 2 usage, 3 a "
        "question about Unified Memory and the trace has no such data.",
        contents,
        *(part for name, parser in parsers for part in _command_part(name, parser)),
    )


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """List a parser and those of its subcommands, each with the words that call it."""
    yield parser.prog, parser
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to list them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for each in action.choices.values():
                yield from _parsers(each)


def _command_part(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    parser.formatter_class = type("Help", (_FixedHelp, parser.formatter_class), {})
    parser.color = False  # Python 3.14 has colours
    yield f"## {name}"
    yield f"```text\n{parser.format_help().rstrip()}\n```"


class _FixedHelp(argparse.HelpFormatter):
    """Help as wide as the pages are, and alike in every version of Python."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # Python 3.13 no longer repeats the value: -o, --output FILE.
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        # Versions of Python break a long usage at other places.
        self._width = sys.maxsize
        line = super()._format_usage(usage, actions, groups, prefix).strip()
        self._width = WIDTH
        pieces = re.findall(r"\[.*?\]+(?=\s|$)|\S+", line)
        indent = " " * len(f"usage: {self._prog} ")
        rows = [" ".join(pieces[:2])]
        for piece in pieces[2:]:
            if len(rows[-1]) + 1 + len(piece) > WIDTH:
                rows.append(f"{indent}{piece}")
            else:
                rows[-1] += f" {piece}"
        return "\n".join(rows) + "\n\n"


if __name__ == "__main__":
    main()
