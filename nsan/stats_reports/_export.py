"""The tables of an export, made safe to read: what is absent or of another type is NULL.

Every value is checked as in :mod:`nsan.io.nsys_tables`: an integer within the limits that are believed, or
NULL. A table that is absent is one without rows. Everything is read from the export itself (schema
``main``), so that no view of another filter is in the way.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, NamedTuple

MIGRATED = (11, 12, 13)
HTOD, DTOH, DTOD = MIGRATED
USER, FAULT, PREFETCH, EVICTION = 1, 2, 3, 4
"""Causes of migrations, by number; labels differ between versions of nsys and one is misspelt."""

BLOCK_BITS = 21
"""A VA block is 2 MiB."""

BLOCK_BYTES = 1 << BLOCK_BITS
ALL_BITS = (1 << 64) - 1

_TIME = (-(1 << 61), 1 << 61)
_SIZE = (0, 1 << 46)
_COUNT = (0, 1 << 40)
_LIMITS = {"start": _TIME, "end": _TIME, "bytes": _SIZE, "numberOfPageFaults": _COUNT}

MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "migrations": (
        MEMCPY,
        {
            "device": "deviceId",
            "va": "virtualAddress",
            "bytes": "bytes",
            "kind": "copyKind",
            "cause": "migrationCause",
            "source": "srcDeviceId",
        },
    ),
    "gpu_faults": (
        "CUDA_UM_GPU_PAGE_FAULT_EVENTS",
        {"device": "deviceId", "va": "address", "faults": "numberOfPageFaults"},
    ),
    "cpu_faults": ("CUDA_UM_CPU_PAGE_FAULT_EVENTS", {"va": "address"}),
    "copies": (MEMCPY, {"device": "deviceId", "kind": "copyKind"}),
    "memsets": ("CUPTI_ACTIVITY_KIND_MEMSET", {"device": "deviceId", "kind": "memKind"}),
    "kernels": (
        "CUPTI_ACTIVITY_KIND_KERNEL",
        {
            "device": "deviceId",
            "short": "shortName",
            "full": "demangledName",
            "mangled": "mangledName",
            "node": "graphNodeId",
        },
    ),
    "graphs": ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", {"device": "deviceId", "graph": "graphId"}),
    "memory_events": (
        "CUDA_GPU_MEMORY_USAGE_EVENTS",
        {
            "device": "deviceId",
            "va": "address",
            "bytes": "bytes",
            "kind": "memKind",
            "operation": "memoryOperationType",
        },
    ),
}
"""By name of ours: the table of the export, and its columns besides time and process."""

_WHICH = {
    "migrations": "kind IN (11, 12, 13)",
    "copies": "kind NOT IN (11, 12, 13)",
}


class Part(NamedTuple):
    """What of a capture is asked for: the rows that start in ``[begin, end)``, of one process or all."""

    begin: int | None = None
    end: int | None = None
    pid: int | None = None

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self.begin is None and self.end is None and self.pid is None

    def holds(self, time: int) -> bool:
        """Say whether a time is in the window."""
        return (self.begin is None or time >= self.begin) and (self.end is None or time < self.end)


class Export:
    """An export that nsys opened.

    Parameters
    ----------
    connection : sqlite3.Connection
        Open, read-only; temporary tables are possible.
    tables : iterable of str
        Names of its tables and views.
    """

    def __init__(self, connection: Any, tables: Iterable[str]) -> None:
        self.connection = connection
        # A text that is no UTF-8 would else end the report.
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self.part = Part()
        self._spelt = {name.lower(): name for name in tables}
        self._columns: dict[str, dict[str, str]] = {}

    def ask(self, sql: str, values: Iterable[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Run a query and give its rows."""
        return iter(self.connection.execute(sql, tuple(values)))

    def one(self, sql: str, values: Iterable[Any] = ()) -> tuple[Any, ...]:
        """Run a query that has one row."""
        return next(self.ask(sql, values))

    def has_table(self, table: str) -> bool:
        """Say whether the export has a table."""
        return table.lower() in self._spelt

    def table_of(self, name: str) -> str:
        """Name the table of the export that ours is made of."""
        return _TABLES[name][0]

    def cell(self, table: str, column: str, kind: str = "integer") -> str:
        """Write the SQL of a column: its value where it is of the kind and believed, or NULL."""
        spelt = self._columns_of(table).get(column.lower())
        if spelt is None:
            return "NULL"
        quoted = '"' + spelt.replace('"', '""') + '"'
        believed = f"typeof({quoted}) = '{kind}'"
        if column in _LIMITS:
            believed += " AND {} BETWEEN {} AND {}".format(quoted, *_LIMITS[column])
        return f"CASE WHEN {believed} THEN {quoted} END"

    def select(self, table: str, cells: dict[str, str]) -> str:
        """Write the SQL that reads cells (by name) of a table; no rows where there is no such table."""
        listed = ", ".join(f'{cell} AS "{name}"' for name, cell in cells.items())
        if not self.has_table(table):
            return f"SELECT {listed} WHERE 0"
        spelt = self._spelt[table.lower()].replace('"', '""')
        return f'SELECT {listed} FROM main."{spelt}"'

    def rows(self, name: str, *, whole: bool = False) -> str:
        """Write the SQL of a table of ours, as a subquery: the part that is asked for, or all of it.

        It has ``start``, ``end`` (not before the start), ``pid`` and the columns of ``_TABLES``; addresses are
        signed, as in the export.
        """
        where = [_WHICH[name]] if name in _WHICH else []
        if not whole:
            where += self._in_part("start")
        return self._read(name, where)

    def reaching(self, name: str) -> str:
        """Write the SQL of the rows that reach into the window, cut at its edges, and whether each is (``is_cut``)."""
        part = self.part
        edges = [edge for edge in (part.begin, part.end) if edge is not None]
        cut = " OR ".join(f'(start < {edge} AND "end" > {edge})' for edge in edges) or "0"
        begin = "start" if part.begin is None else f"MAX(start, {part.begin})"
        end = '"end"' if part.end is None else f'MIN("end", {part.end})'
        source = f"SELECT * FROM {self.rows(name, whole=True)}"
        keep = "" if part.pid is None else f" WHERE pid = {part.pid}"
        others = ", ".join(n for n in _TABLES[name][1] if n not in {"start", "end"})
        cells = f'{begin} AS start, {end} AS "end", {cut} AS is_cut, pid, {others}'
        return f"(SELECT {cells} FROM ({source}){keep})"

    def work(self, name: str) -> str:
        """Write the SQL of GPU work that reaches into the window, uncut."""
        part = self.part
        where = [_WHICH[name]] if name in _WHICH else []
        where += [] if part.pid is None else [f"pid = {part.pid}"]
        where += [] if part.end is None else [f"start < {part.end}"]
        # Work of no length reaches in where it starts.
        where += [] if part.begin is None else [f'MAX("end", start + 1) > {part.begin}']
        return self._read(name, where)

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Look up texts by their ids."""
        wanted = set(ids)
        cells = {
            "id": self.cell("StringIds", "id"),
            "value": self.cell("StringIds", "value", "text"),
        }
        found: dict[int, str] = {}
        for key, text in self.ask(self.select("StringIds", cells)):
            if key in wanted and text is not None:
                found.setdefault(key, text)
        return found

    def _in_part(self, time: str) -> list[str]:
        part = self.part
        bounds = [(">=", part.begin), ("<", part.end)]
        where = [f"{time} {sign} {bound}" for sign, bound in bounds if bound is not None]
        return where if part.pid is None else [*where, f"pid = {part.pid}"]

    def _read(self, name: str, where: list[str]) -> str:
        table, columns = _TABLES[name]
        start, end = self.cell(table, "start"), self.cell(table, "end")
        cells = {
            "start": start,
            "end": f"MAX({start}, {end})" if end != "NULL" else "NULL",
            "pid": f"({self.cell(table, 'globalPid')} >> 24) & 16777215",
            **{ours: self.cell(table, theirs) for ours, theirs in columns.items()},
        }
        inner = self.select(table, cells)
        kept = f" WHERE {' AND '.join(where)}" if where else ""
        return f"(SELECT * FROM ({inner}){kept})"

    def _columns_of(self, table: str) -> dict[str, str]:
        if table not in self._columns:
            listed = self.ask(
                "SELECT name FROM pragma_table_info(?)", [self._spelt.get(table.lower())]
            )
            self._columns[table] = {str(name).lower(): str(name) for (name,) in listed}
        return self._columns[table]


def unsigned(va: int) -> int:
    """Read an address as it is: SQLite has signed integers only."""
    return va & ALL_BITS


def block_of(va: str = "va") -> str:
    """Write the SQL of the number of a VA block, from an address."""
    return f"(({va} >> {BLOCK_BITS}) & {ALL_BITS >> BLOCK_BITS})"


def in_order(*columns: str) -> str:
    """Write the SQL that orders by columns, addresses as unsigned numbers."""
    return ", ".join(f"{c} < 0, {c}" if c == "va" else c for c in columns)


def complete(column: str, *, where: str = "1") -> str:
    """Write the SQL of a sum that is NULL where a row lacks the value, and 0 of no rows."""
    missing = f"SUM(CASE WHEN ({where}) AND {column} IS NULL THEN 1 END)"
    return f"CASE WHEN {missing} IS NULL THEN COALESCE(SUM(CASE WHEN {where} THEN {column} END), 0) END"
