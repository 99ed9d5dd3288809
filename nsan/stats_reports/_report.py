"""What the reports share: their options, the part of the capture that is asked for, and what is printed.

A report is a class of the interface of nsys. It computes its rows in Python, puts them into a temporary table,
and the interface reads them from there, so that each of its formats works.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Iterable, NamedTuple, Sequence, Tuple

from nsan.stats_reports import _vendor
from nsan.stats_reports._export import Export, Part, unsigned
from nsan.stats_reports._recorded import KINDS, Recorded

Row = Tuple[Any, ...]

_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_LONGEST = 200
_MOST = (1 << 63) - 1
_RANGES = (59, 60, 70, 71)
_DOMAIN = 75
_ANY = -1
_OPTIONS: Sequence[Any] = (
    [["start"], {"type": int, "help": "only rows that start at this time or later, ns"}],
    [["end"], {"type": int, "help": "only rows that start before this time, ns"}],
    [["nvtx"], {"type": str, "help": "only the time and process of this NVTX range"}],
    [["process"], {"type": int, "help": "only this process", "default": _ANY}],
)
FILTERS = """
    Options:
        rows=<limit> - Rows before the rest is added up in one. Default is {ROW_LIMIT}; -1 is all.
        process=<id> - Only this process.
        start=<ns>, end=<ns>, nvtx=<range> - As `nsys stats --filter-time` and `--filter-nvtx` set them:
            rows that start in that time; of busy time, what lies in it.
"""
"""What the options of every report do, for its usage."""


class Column(NamedTuple):
    """A column: its header, which says the unit as nsys wants it, and whether its values add up."""

    header: str
    adds: bool = False


class Rows(NamedTuple):
    """Rows of a report: those that may be cut to a limit, and those that always stand below them."""

    ranked: list[Row]
    always: Sequence[Row] = ()


class UmReport(_vendor.StatsReport):
    """A report on Unified Memory."""

    DEFAULT_ROW_LIMIT = 20

    # nsys looks at these files, too, for reports to list. What it notes of this class, its subclasses would
    # inherit: each report names its script itself.
    script_name = "_report"
    columns: Sequence[Column] = ()
    rest_at = 0
    """Which column says of how many rows the rest is the sum."""
    one_of: Sequence[str] = ("migrations", "gpu_faults", "cpu_faults")
    """Kinds of events of which the report needs at least one row."""
    says: Sequence[str] = ("migrations", "gpu_faults", "cpu_faults")
    """Kinds of events whose figures it shows."""

    _arg_opts = (
        [["rows"], {"type": int, "help": "max rows"}],
        *(option for option in _OPTIONS if option[0][0] not in _vendor.OPTIONS),
    )

    def rows(self) -> Rows:
        """Compute the rows of the report."""
        raise NotImplementedError

    def filter_time_range(self, *_limits: object) -> None:
        """Leave the tables as they are: rows are chosen where they are read, CPU faults among them."""

    def setup(self) -> str | None:
        """Read the options, and say why there is nothing to report if there is nothing."""
        message: str | None = super().setup()
        if message is not None:
            return message
        if self.parsed_args.process < _ANY:
            raise self.Error_ArgumentError(
                f"{self.script_name}: process= takes the id of a process."
            )
        self.export = Export(self._dbcon, self._tables)
        self.recorded = Recorded(self.export)
        try:
            problem = self._choose_part() or self._nothing() or self.why_empty()
        except self._dbcon.Error as error:
            problem = _unreadable(error)
        # The interface formats what it is handed.
        return problem and "{DBFILE}: " + problem.replace("{", "{{").replace("}", "}}")

    def run_statements(self) -> str | None:
        """Compute the rows and put them where the interface reads them."""
        message: str | None = super().run_statements()
        if message is not None:
            return message
        try:
            self._keep(self._limited(self.rows()))
        except self._dbcon.Error as error:
            return f"{self._dbfile}: {_unreadable(error)}"
        self._warn()
        return None

    def why_empty(self) -> str | None:
        """Say what else the report needs and does not find; None where it finds it."""
        return None

    def get_query(self) -> str:
        """Write the query that gives the rows."""
        named = (f'c{i} AS "{column.header}"' for i, column in enumerate(self.columns))
        return f"SELECT {', '.join(named)} FROM temp.nsan_report ORDER BY rowid"

    def MessageNoResult(self) -> str:  # noqa: N802 - the name that nsys calls
        """Say that nothing is left."""
        return "No row of Unified Memory is in the part that was asked for."

    def known(self, kind: str, value: Any) -> Any:
        """Give a figure of a kind of event, or None where that was not recorded: it is unknown then, not 0."""
        return value if self.recorded.has(kind) else None

    def _choose_part(self) -> str | None:
        asked = self.parsed_args
        begin, end, pid = asked.start, asked.end, asked.process
        part = Part(begin, end, None if pid == _ANY else pid)
        if asked.nvtx is not None:
            found = self._nvtx_range(asked.nvtx)
            if found is None:
                return f"it has no NVTX range {shown(asked.nvtx)!r} (NAME, NAME@DOMAIN, or either with /INDEX)."
            if part.pid not in {None, found.pid}:
                return f"that NVTX range is not of process {part.pid}."
            part = Part(
                found.begin if begin is None else begin,
                found.end if end is None else end,
                found.pid,
            )
        if part.begin is not None and part.end is not None and part.begin > part.end:
            return "the start of the time that is asked for lies after its end."
        self.export.part = part
        return None

    def _nvtx_range(self, wanted: str) -> Part | None:
        """Find an instance of a range: NAME[@DOMAIN][/INDEX] as nsys reads it, or the whole text as a name."""
        text, slash, index = wanted.rpartition("/")
        if slash and index.isdigit() and len(index) < 10:
            found = self._instance(text, int(index))
            if found is not None:
                return found
        return self._instance(wanted, 0)

    def _instance(self, wanted: str, index: int) -> Part | None:
        cell, table = self.export.cell, "NVTX_EVENTS"
        columns = ("start", "end", "eventType", "globalTid", "domainId", "textId")
        cells = {name: cell(table, name) for name in columns}
        events = self.export.select(table, {**cells, "text": cell(table, "text", "text")})
        strings = {"id": cell("StringIds", "id"), "value": cell("StringIds", "value", "text")}
        found = self.export.ask(
            f"""
            WITH events AS (
                SELECT e.*, globalTid >> 24 AS process, COALESCE(text, value) AS name
                FROM ({events}) AS e
                LEFT JOIN ({self.export.select("StringIds", strings)}) ON id = textId
            ),
            domains AS (
                SELECT process, COALESCE(domainId, 0) AS domain, MIN(name) AS domain_name
                FROM events WHERE eventType = {_DOMAIN} GROUP BY 1, 2
            ),
            ranges AS (
                SELECT start, "end", process, name || COALESCE('@' || domain_name, '') AS name
                FROM events LEFT JOIN domains USING (process)
                WHERE eventType IN {_RANGES} AND start IS NOT NULL
                  AND (domain IS NULL OR domain = COALESCE(domainId, 0))
                UNION
                SELECT start, "end", process, name FROM events
                WHERE eventType IN {_RANGES} AND start IS NOT NULL
            )
            SELECT start, "end", process & 16777215 FROM ranges WHERE name = ?
            ORDER BY start, "end" LIMIT 1 OFFSET ?
            """,
            (wanted, index),
        )
        return next((Part(start, end, pid) for start, end, pid in found), None)

    def _nothing(self) -> str | None:
        """Say why the report would be empty, and which switch of nsys would have helped."""
        part = self.export.part
        if any(self._has_rows(kind) for kind in self.one_of):
            return None
        self.export.part = Part()
        elsewhere = not part.is_all and any(self._has_rows(kind) for kind in self.one_of)
        self.export.part = part
        if elsewhere:
            return "nothing of Unified Memory starts in the time, or in the process, that was asked for."
        words = " or ".join(KINDS[kind].words for kind in self.one_of)
        lacking = [kind for kind in self.one_of if not self.recorded.has(kind)]
        if not lacking:
            return f"it has no {words}, although they were recorded: there were none."
        switches = " ".join(KINDS[kind].switch for kind in lacking)
        return f"it has no {words}. Profile again with `nsys profile {switches} ...`."

    def _has_rows(self, kind: str) -> bool:
        return bool(self.export.one(f"SELECT EXISTS (SELECT 1 FROM {self.export.rows(kind)})")[0])

    def _limited(self, rows: Rows) -> list[Row]:
        asked = self.parsed_args.rows
        limit: int = self.DEFAULT_ROW_LIMIT if asked is None else asked
        if limit < 0 or len(rows.ranked) <= limit:
            return [*rows.ranked, *rows.always]
        rest = rows.ranked[limit:]
        added = [
            _sum_of(row[i] for row in rest) if c.adds else None for i, c in enumerate(self.columns)
        ]
        added[self.rest_at] = f"({len(rest)} more)"
        return [*rows.ranked[:limit], tuple(added), *rows.always]

    def _keep(self, rows: Iterable[Row]) -> None:
        names = ", ".join(f"c{i}" for i in range(len(self.columns)))
        self._dbcon.execute(f"CREATE TEMP TABLE nsan_report ({names})")
        marks = ", ".join("?" * len(self.columns))
        kept = ([_fitting(value) for value in row] for row in rows)
        self._dbcon.executemany(f"INSERT INTO nsan_report VALUES ({marks})", kept)

    def _warn(self) -> None:
        lacking = self.recorded.lacking(*self.says)
        if lacking and sys.stderr is not None:
            sys.stderr.write(f"nsan: not recorded, so empty: {', '.join(lacking)}.\n")


def shown(text: Any) -> str:
    """Make a name of the program harmless and short; as :func:`nsan.text.shortened`."""
    raw = str(text)
    if len(raw) > _LONGEST:
        raw = raw[: _LONGEST // 2] + "…" + raw[-(_LONGEST // 2 - 1) :]
    return _UNSAFE.sub(lambda found: f"\\x{ord(found[0]):02x}", raw)


def address(va: int | None) -> Any:
    """Give an address for a column of addresses: a number, or text where SQLite cannot hold it."""
    if va is None:
        return None
    value = unsigned(va)
    return value if value <= _MOST else f"0x{value:X}"


def per_second(size: int | None, time_ns: int | None) -> float | None:
    """Divide bytes by time; None where either is unknown, or there is no time."""
    return size * 1e9 / time_ns if size is not None and time_ns else None


def added(one: int | None, other: int | None) -> int | None:
    """Add two figures; None where either is unknown."""
    return None if one is None or other is None else one + other


def percent(part: int | None, whole: int | None) -> float | None:
    """Give a share in percent; None where it has no meaning."""
    return round(100 * part / whole, 1) if part is not None and whole else None


def hottest(*figures: Any) -> tuple[Any, ...]:
    """Give the key that sorts the largest figures first; an unknown one comes last."""
    return tuple((value is None, -(value or 0)) for value in figures)


def ordered(*keys: Any) -> tuple[Any, ...]:
    """Give the key that sorts by numbers, of which some may be unknown: those come last."""
    return tuple((key is None, 0 if key is None else key) for key in keys)


def _sum_of(values: Iterable[Any]) -> Any:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _fitting(value: Any) -> Any:
    """Give a number that SQLite can hold."""
    return float(value) if isinstance(value, int) and abs(value) > _MOST else value


def _unreadable(error: Exception) -> str:
    return (
        f"SQLite cannot read it ({error}). Is the file whole? Export it again with `nsys export`."
    )


class Busy(NamedTuple):
    """Time in which copies ran, ns, and whether one of them lies across an edge of the window."""

    ns: int = 0
    is_cut: bool = False

    def rate(self, size: int | None, time_ns: int | None) -> float | None:
        """Divide bytes by time; None where they are not of the same copies: bytes of a copy are not cut, its time is."""
        return None if self.is_cut else per_second(size, time_ns)


def busy_times(export: Export, by: Sequence[str]) -> dict[Row, Busy]:
    """Measure the time in which at least one migration of each group ran, cut at the edges of the window.

    Parameters
    ----------
    export : Export
        The export.
    by : sequence of str
        SQL of what makes a group.

    Returns
    -------
    dict
        By group: a union, never a sum of rows that overlap. Groups without time are left out.
    """
    groups = ", ".join(f"{sql} AS g{i}" for i, sql in enumerate(by))
    names = ", ".join(f"g{i}" for i in range(len(by)))
    found = export.ask(
        f"""
        SELECT {names}, SUM(CASE
            WHEN reached IS NULL OR start >= reached THEN "end" - start
            WHEN "end" > reached THEN "end" - reached
            ELSE 0 END), MAX(is_cut)
        FROM (
            SELECT {names}, start, "end", is_cut, MAX("end") OVER (
                PARTITION BY {names} ORDER BY start ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS reached
            FROM (SELECT {groups}, start, "end", is_cut FROM {export.reaching("migrations")})
            WHERE start < "end"
        )
        GROUP BY {names}
        """
    )
    return {row[:-2]: Busy(row[-2], bool(row[-1])) for row in found}
