"""Many reports as one: what a fleet is, who stands out and why, UM time by rank, runs over time, what failed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.errors import NsanError
from nsan.fleet.tables import (
    RANK_FIELDS,
    RUN_FIELDS,
    TRAFFIC_FIELDS,
    has_large_runs,
    rank_tables,
    run_rows,
    telling_fields,
    traffic_rows,
    worst_runs,
)
from nsan.fleet.text import (
    MOST_RUNS,
    MOST_TABLES,
    failure_lines,
    head_lines,
    outlier_lines,
    straggler_lines,
    title,
)
from nsan.report import fleet_charts
from nsan.report.blocks import Block, Heading, Point, Points, Table, Text
from nsan.report.shown import Blocks
from nsan.text import safe
from nsan.units import counted, format_count

if TYPE_CHECKING:
    from nsan.charts.palette import Theme
    from nsan.tabular.text import Field, Row

_MOST_LINES: Final = 30
_MEANT: Final = {
    "UM time": (
        "the time in which migrations were in flight, and that in which GPU faults were in service. How much of it "
        "is common to both is not known, so that the larger of the two is shown: UM was at work at least so long. It "
        "may lie beside kernels."
    ),
    "What stands out": (
        "is judged against ranks of the same run and program, and runs of the same program and size, by median and "
        "median absolute deviation (MAD), on a linear and a logarithmic scale. The bound is larger the fewer they are; of "
        "normal or lognormal times chance alone would name one in a hundred groups at most, of times with heavier tails "
        "more. What is named is also at least twice as far from the median as all others, 20 % beside it, and by 1 % of "
        "the duration. Of three to five little is certain: even twice the median is mostly not named."
    ),
    "Clocks": "of different machines are not aligned: durations are compared, times of day are not.",
    "Kinds": "counts and bytes are recorded, sums of rows; times, shares and medians are derived from them.",
}


class NotAFleetError(NsanError):
    """A file does not hold what `nsan summary --json` writes of many reports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{safe(path)} is no summary of a fleet. Write one with `nsan summary DIR --json -o FILE`."
        )


class FleetReport:
    """A fleet as the sections of a report.

    Parameters
    ----------
    document : mapping
        Of :func:`nsan.fleet.document.fleet_document`, or as `nsan summary DIR --json` writes it.
    rows : int, default 10
        Rows of a table at most.
    theme : {"light", "dark"}, default "light"
        The ground of the charts.
    """

    def __init__(
        self, document: Mapping[str, Any], *, rows: int = 10, theme: Theme = "light"
    ) -> None:
        self.document, self.rows, self.theme = document, rows, theme

    def head(self) -> Blocks:
        """Say what the fleet is, and what its reports add up to."""
        points = tuple(Point("", line) for line in head_lines(self.document))
        return Blocks([Text(title(self.document)), Points(points)])

    def standing_out(self) -> Blocks:
        """Say which ranks and runs stand out and why, and who takes longest."""
        lines = outlier_lines(self.document)
        if not lines:
            return _empty("One report only: there is nothing that it could stand out from.")
        blocks: list[Block] = [*_listed(lines)]
        if longest := straggler_lines(self.document):
            blocks += [Heading("Who takes longest"), *_listed(longest)]
        return Blocks(blocks)

    def um_time(self) -> Blocks:
        """Draw UM time by rank, of the runs where somebody stands out or where it is largest."""
        return fleet_charts.um_time(self.document, worst_runs(self.document), self.theme)

    def runs(self) -> Blocks:
        """Draw and list the runs one after the other; nothing where there is one."""
        if self.document["n_runs"] < 2:
            return _empty("There is one run.")
        drawn = fleet_charts.over_time(self.document, self.theme)
        if not has_large_runs(self.document):
            return drawn
        rows = run_rows(self.document)
        table = _table(telling_fields(RUN_FIELDS, rows), rows, "Runs", max(self.rows, MOST_RUNS))
        return Blocks([*drawn, table])

    def causes(self) -> Blocks:
        """Say why memory moved, over all and in the ranks that moved most."""
        rows = traffic_rows(self.document)
        if not rows:
            return _empty("No report has migrations, or none has recorded them.")
        table = _table(TRAFFIC_FIELDS, rows, "Migrations of all reports", self.rows)
        return Blocks([table, *fleet_charts.causes(self.document, self.theme)])

    def ranks(self) -> Blocks:
        """List the ranks of the runs in which somebody stands out, or with most UM time."""
        tables = rank_tables(self.document)
        blocks: list[Block] = [
            _table(telling_fields(RANK_FIELDS, rows), rows, head, self.rows)
            for head, rows in tables[:MOST_TABLES]
        ]
        if len(tables) > MOST_TABLES:
            more = counted(len(tables) - MOST_TABLES, "more run")
            blocks.append(Text(f"{more}: `nsan summary DIR --format csv` has all.", "note"))
        return Blocks(blocks) if blocks else _empty("No report could be read.")

    def failed(self) -> Blocks:
        """Name the reports that could not be read."""
        lines = failure_lines(self.document)
        return Blocks(_listed(lines)) if lines else _empty("None failed.")

    def provenance(self) -> Blocks:
        """Say what the figures are, and what wrote them."""
        points = [Point(f"{label}:", text) for label, text in _MEANT.items()]
        made = f"nsan {self.document['nsan_version']}, of {counted(self.document['n_reports'], 'report')}"
        return Blocks([Points((Point("Made by:", made), *points))])


def fleet_at(
    traces: Sequence[str | Path], *, summary: str = "", pattern: str = ""
) -> dict[str, Any]:
    """Read what `nsan summary --json` wrote of a fleet, or gather its reports.

    Parameters
    ----------
    traces : sequence of str or Path
        Folders of reports, reports, or a corpus.
    summary : str, default ""
        A file with the summary; empty: the reports are read, one after the other.
    pattern : str, default ""
        As of --rank-pattern: how names say which run and rank a report is of.

    Returns
    -------
    dict
        Of :func:`nsan.fleet.document.fleet_document`.

    Raises
    ------
    NsanError
        If there is nothing at a path, or the file holds something else.
    """
    if summary:
        return _summary(Path(summary))
    from nsan.fleet.document import fleet_document, fleet_name
    from nsan.fleet.gathering import gather
    from nsan.fleet.how import How
    from nsan.notebooks import capture_path

    paths = [capture_path(each) for each in traces]
    found = gather(paths, how=How(None, None, pattern or None))
    return fleet_document(found.members, found.failures, name=fleet_name(paths))


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotAFleetError(path) from error
    if not isinstance(found, dict) or found.get("document") != "fleet":
        raise NotAFleetError(path)
    return found


def _empty(text: str) -> Blocks:
    return Blocks([Text(text, "empty")])


def _listed(lines: Sequence[str]) -> Iterator[Block]:
    yield Points(tuple(Point("", line) for line in lines[:_MOST_LINES]))
    if len(lines) > _MOST_LINES:
        rest = format_count(len(lines) - _MOST_LINES)
        yield Text(f"And {rest} more: `nsan summary DIR --rows {len(lines)}`.", "note")


def _table(fields: Sequence[Field], rows: Sequence[Row], head: str, most: int) -> Table:
    notes = []
    if len(rows) > most:
        notes.append(
            f"{counted(len(rows) - most, 'more row')}: `nsan summary DIR --rows {len(rows)}`."
        )
    return Table(
        tuple(field.header for field in fields),
        tuple(tuple(field.write(row[field.key]) for field in fields) for row in rows[:most]),
        tuple(field.right for field in fields),
        head,
        tuple(notes),
    )
