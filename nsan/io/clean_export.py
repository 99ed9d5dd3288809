"""A copy of an nsys export that can be given away: events and what explains them, nothing about people or the machine.

What is copied is named here; anything else stays behind: the environment, user and host names, the command line, the
processes of the machine, its network and its serial numbers.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from nsan.errors import DamagedExportError, NsanError
from nsan.io import nsys_info
from nsan.io.nsys_context import DIAGNOSTIC_EVENTS, MEMORY_EVENTS, NVTX, harmless
from nsan.io.nsys_tables import STREAMED
from nsan.text import shortened

_EVENTS: Final = (
    *(source.table for source in (*STREAMED, NVTX, MEMORY_EVENTS)),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    "PROFILER_OVERHEAD",
    "TARGET_INFO_CUDA_DEVICE",
    "TARGET_INFO_CUDA_CONTEXT_INFO",
    "TARGET_INFO_CUDA_STREAM",
)
"""Tables that are copied as they are."""

_BLANKED: Final = {
    "TARGET_INFO_GPU": (
        *("uuid", "luid", "busLocation", "pwGpuId", "vmId"),
        *("ctxswDevPath", "ctrlDevPath", "nodeMask"),
    ),
    "TARGET_INFO_SESSION_START_TIME": ("utcTime", "localTime"),
    # Of a recording over the network, it names the machine.
    nsys_info.ENVIRONMENT_TABLE: ("devStateName",),
}
"""Tables that are copied without some columns: those become null, or 0 or empty where they may not be null."""

_PAIRS: Final = {
    **dict.fromkeys(nsys_info.EXPORT_TABLES, nsys_info.EXPORT_KEYS),
    nsys_info.CAPTURE_TABLE: nsys_info.CAPTURE_KEYS,
    nsys_info.ENVIRONMENT_TABLE: nsys_info.ENVIRONMENT_KEYS,
}
"""Tables of names and values, and the names that are copied."""

_SECRET_KEYS: Final = (
    *("EXPORT_HOST", "EXPORT_USER", "DEVICE_DISPLAY_NAME", "USER_NAME", "Hostname"),
    *("WORKING_DIR", "DeviceEnvironment", "PROFILING_SESSION_UUID"),
)
_SHORTEST_INSIDE: Final = 5
"""Values with marks in them ("node-17") that are as long are found inside of words, too."""

_SHORTEST_WORD: Final = 4
"""Shorter names ("vm", "jo", "max") are words that mean something else, too: they tell only as part of a path."""

_LONGEST_SHOWN: Final = 60

_VARIABLES: Final = frozenset({"DeviceEnvironment", "ENVIRONMENT_VARIABLE"})
"""Keys whose values are variables: ``A=b;C=d``, or ``A="b"``."""

_OF_PEOPLE: Final = frozenset({"USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME", "HOST"})
_CONFIDENTIAL: Final = re.compile(r"(?i)token|secret|passw|credential|api_?key|private")
_VARIABLE: Final = re.compile(r'([A-Za-z_]\w*)="?(.*?)"?\Z', re.S)
_ABSOLUTE: Final = re.compile(r"(?<![\w./~-])/[^\s:;,=\"'|()<>]+")
_WHOSE: Final = frozenset({"WORKING_DIR", "COMMAND"})

_COMMON: Final = re.compile(
    r"(?i)[a-z]?|[\d._-]+|bench|bin|boot|build|\.?cache|containers?|conda3?|miniconda3?|config|cuda[-.\w]*|data|dev|"
    r"docs?|etc|games|home|include|lib(?:exec|32|64|nvvm)?|local|logs?|main|media|mnt|nsight[-_.\w]*|nvidia|"
    r"nsys[-.\w]*|opt|out|proc|projects?|python[\d.]*|results|root|run|runs|sbin|scratch|share|site-packages|snap|"
    r"src|srv|sys|target-[-\w]+|tmp|tests?|tools|users?|usr|var|venv|work|workspace|x86_64-linux-gnu|"
    r"aarch64-linux-gnu|nsan(?:-device-check)?|localhost|true|false|yes|no|on|off|none|null|"
    # nsan's own programs, their patterns and what a device check records.
    r"uvm_bench|dl_bench|torch_uvm|tapes|(?:stream|stride|random|gather|stencil2d|pointer-chase|ping-pong|"
    r"broadcast-read|first-touch|signature|hotspot|vector-add)(?:-oversubscribed)?|resnet-8(?:-raw|-caching)?"
)
"""Folders that many machines have, names that many have, and nsan's own: they tell nothing of anybody."""

_TEXT_COLUMNS: Final = frozenset(
    {"nameId", "textId", "shortName", "demangledName", "mangledName", "CpuInstruction", "module"}
    | {"sourceFile"}
)
_MESSAGES: Final = DIAGNOSTIC_EVENTS.table
_WITH_TEXTS: Final = frozenset({"PROCESSES", "StringIds", _MESSAGES})
"""Tables whose rows are not copied as they are."""

_FILES: Final = frozenset({"module", "sourceFile"})
_TEXT_REFERENCE: Final = re.compile(r'^\s*"?(\w+)"?\s+INTEGER[^\n]*REFERENCES StringIds', re.M)
_PID_BITS: Final = 24


class LeakError(NsanError):
    """A cleaned export still holds something private; ``what`` says what, and where it comes from."""

    def __init__(self, source: Path, what: str) -> None:
        self.source, self.what = source, what
        super().__init__(
            f"{source.name} is not given away: after cleaning it still holds {what}. "
            "A name in the program holds it: rename that, or what it is named after, and record again."
        )


@dataclass(frozen=True)
class _Told:
    """Something that may not be found in a copy.

    Attributes
    ----------
    value : str
        The text.
    what : str
        What it is, for people; without the value if that is secret.
    is_folder : bool
        A part of a path: what nsan or nsys write themselves may be named so, too.
    """

    value: str
    what: str
    is_folder: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """Find it as a word of its own; a short one as a part of a path."""
        word = re.escape(self.value)
        if len(self.value) < _SHORTEST_WORD:
            return re.compile(rf"[/\\]{word}(?!\w)|(?<!\w){word}[/\\]")
        if (
            len(self.value) >= _SHORTEST_INSIDE
            and not self.is_folder
            and re.search(r"\W", self.value)
        ):
            return re.compile(word)
        return re.compile(rf"(?<!\w){word}(?!\w)")


def write_clean(source: Path, target: Path) -> None:
    """Copy what an export says about Unified Memory, without anything private.

    Parameters
    ----------
    source : Path
        An export to SQLite of any version that nsan reads; it is only read.
    target : Path
        The file to make; it must not be there.

    Raises
    ------
    DamagedExportError
        If the export cannot be read.
    LeakError
        If something private is left in names of the program; then there is no file.
    """
    try:
        with closing(_opened(target)) as connection:
            connection.execute(
                "ATTACH ? AS source", (f"file:{_escaped(source)}?mode=ro&immutable=1",)
            )
            connection.execute("BEGIN")
            for table, statement in _tables(connection):
                connection.execute(statement)
                _copy(connection, table)
            _copy_messages(connection)
            _copy_processes(connection)
            _copy_strings(connection)
            _check_clean(source, connection)
            connection.execute("COMMIT")
            connection.execute("DETACH source")
            connection.execute("VACUUM")
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        raise DamagedExportError(source, str(error)) from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _opened(target: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{_escaped(target)}", isolation_level=None, uri=True)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


def _escaped(path: Path) -> str:
    """Write a path so that nothing in a name is taken for the options of an address."""
    return str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _tables(connection: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """Yield the tables to make, with the statement that makes each."""
    kept = {*_EVENTS, *_BLANKED, *_PAIRS, *_WITH_TEXTS, "ANALYSIS_DETAILS"}
    query = "SELECT name, sql FROM source.sqlite_master WHERE type = 'table' ORDER BY rowid"
    for name, statement in connection.execute(query).fetchall():
        if name in kept or name.startswith("ENUM_"):
            yield name, statement


def _copy(connection: sqlite3.Connection, table: str) -> None:
    """Copy the rows of a table."""
    if table in _WITH_TEXTS:
        return
    info = connection.execute(f'PRAGMA source.table_info("{table}")').fetchall()
    blanked = _BLANKED.get(table, ())
    cells = ", ".join(
        (("0" if kind.upper() == "INTEGER" else "''") if not_null else "NULL")
        if name in blanked
        else f'"{name}"'
        for _, name, kind, not_null, _, _ in info
    )
    rows = f'INSERT INTO main."{table}" SELECT {cells} FROM source."{table}"'  # noqa: S608 - names of the file's own
    if table not in _PAIRS:
        connection.execute(rows)
        return
    for name in _PAIRS[table]:
        connection.execute(
            f"{rows} WHERE name = ? OR name GLOB ?", (name, f"PROCESS_[0-9]*:{name}")
        )


def _copy_messages(connection: sqlite3.Connection) -> None:
    """Copy what nsys says of the recording, as the import does: texts of other things are left out."""
    if not _has(connection, _MESSAGES):
        return
    query = f"SELECT * FROM source.{_MESSAGES}"  # noqa: S608 - a name of nsan's own
    names = [each[0] for each in connection.execute(query).description]
    rows = connection.execute(query).fetchall()
    if "text" in names:
        at = names.index("text")
        texts = pl.DataFrame({"text": [row[at] for row in rows]}, schema={"text": pl.String})
        cleaned = texts.select(harmless(pl.col("text")).fill_null(""))["text"]
        rows = [(*row[:at], text, *row[at + 1 :]) for row, text in zip(rows, cleaned, strict=True)]
    marks = ", ".join("?" * len(names))
    connection.executemany(f"INSERT INTO main.{_MESSAGES} VALUES ({marks})", rows)  # noqa: S608


def _copy_processes(connection: sqlite3.Connection) -> None:
    """Copy the names of processes that have events, without their folders."""
    if not _has(connection, "PROCESSES"):
        return
    pids: set[int] = set()
    for table in filter(lambda each: _has(connection, each), _EVENTS):
        for column in ("globalPid", "globalTid"):
            if column in _columns(connection, table):
                query = f'SELECT DISTINCT "{column}" >> {_PID_BITS} FROM main."{table}"'  # noqa: S608
                pids |= {pid for (pid,) in connection.execute(query) if pid is not None}
    query = "SELECT * FROM source.PROCESSES"
    names = [each[0] for each in connection.execute(query).description]
    at_pid, at_name = names.index("globalPid"), names.index("name")
    marks = ", ".join("?" * len(names))
    for row in connection.execute(query).fetchall():
        cells = list(row)
        if isinstance(cells[at_pid], int) and cells[at_pid] >> _PID_BITS in pids:
            cells[at_name] = _last_part(cells[at_name])
            connection.execute(f"INSERT INTO main.PROCESSES VALUES ({marks})", cells)  # noqa: S608


def _copy_strings(connection: sqlite3.Connection) -> None:
    """Copy the texts that what was copied refers to; files without their folders."""
    if not _has(connection, "StringIds"):
        return
    used: set[int] = set()
    files: set[int] = set()
    tables = connection.execute("SELECT name, sql FROM main.sqlite_master WHERE type = 'table'")
    for table, statement in tables.fetchall():
        referring = {*_TEXT_REFERENCE.findall(statement), *_TEXT_COLUMNS}
        for column in referring & set(_columns(connection, table)):
            query = f'SELECT DISTINCT "{column}" FROM main."{table}"'  # noqa: S608 - names of the file's own
            found = {key for (key,) in connection.execute(query) if isinstance(key, int)}
            used |= found
            files |= found if column in _FILES else set()
    for key, text in connection.execute("SELECT id, value FROM source.StringIds").fetchall():
        if key in used:
            value = _last_part(text) if key in files else text
            connection.execute("INSERT INTO main.StringIds VALUES (?, ?)", (key, value))


def _check_clean(source: Path, connection: sqlite3.Connection) -> None:
    """Look for what may not be in the copy: folders in what programs wrote, all else in every text."""
    of_programs = _texts(connection, ("StringIds", *_OF_PROGRAMS))
    query = "SELECT name FROM main.sqlite_master WHERE type = 'table'"
    tables = [name for (name,) in connection.execute(query) if not name.startswith("ENUM_")]
    everything = _texts(connection, tables)
    for told in _all_told(connection):
        if told.pattern.search(of_programs if told.is_folder else everything):
            raise LeakError(source, told.what)


def _all_told(connection: sqlite3.Connection) -> list[_Told]:
    """Gather users, hosts, secrets and folders out of the environment and the command line; folders come last."""
    found: list[_Told] = []
    for table in filter(lambda each: _has(connection, each, "source"), _PAIRS):
        for name, value in connection.execute(f'SELECT name, value FROM source."{table}"'):  # noqa: S608
            if isinstance(value, str):
                found.extend(_told_by(str(name).rpartition(":")[2], value))
    private = dict.fromkeys(told for told in found if not _is_common(told.value))
    return sorted(private, key=lambda told: told.is_folder)


def _is_common(value: str) -> bool:
    return all(map(_COMMON.fullmatch, value.split("/")))


def _told_by(key: str, value: str) -> Iterator[_Told]:
    if key in _VARIABLES:
        for part in value.split(";") if key == "DeviceEnvironment" else [value]:
            variable = _VARIABLE.match(part)
            if variable is not None:
                yield from _told_by_variable(key, variable[1], variable[2])
    elif key in _WHOSE or re.fullmatch(r"ARGUMENT_\d+", key):
        yield from _folders(value, key, whole=key == "WORKING_DIR")
    if key in _SECRET_KEYS:
        is_shown = key not in _VARIABLES
        yield _Told(value, f"{_shown(value)} ({key})" if is_shown else f"the value of {key}")


def _told_by_variable(key: str, name: str, value: str) -> Iterator[_Told]:
    if name in _OF_PEOPLE:
        yield _Told(value, f"{_shown(value)} ({name} of {key})")
    elif _CONFIDENTIAL.search(name):
        yield _Told(value, f"the value of {name} ({key})")
    yield from _folders(value, f"{name} of {key}", whole=name in {"HOME", "PWD", "OLDPWD"})


def _folders(text: str, where: str, *, whole: bool) -> Iterator[_Told]:
    """Yield the folders of every path in a text; the last part of one is a file, unless it is ``whole``."""
    for path in _ABSOLUTE.findall(text):
        parts = [part for part in path.split("/") if part]
        for part in parts if whole else parts[:-1]:
            yield _Told(part, f"{_shown(part)} (a folder in {where})", is_folder=True)


def _shown(value: str) -> str:
    return repr(shortened(value, _LONGEST_SHOWN))


def _texts(connection: sqlite3.Connection, tables: Iterable[str]) -> str:
    """Join the texts of tables in the copy."""
    found: list[str] = []
    for table in filter(lambda each: _has(connection, each), tables):
        for _, name, kind, *_ in connection.execute(
            f'PRAGMA main.table_info("{table}")'
        ).fetchall():
            if kind.upper() not in {"INTEGER", "REAL"}:
                query = f'SELECT DISTINCT "{name}" FROM main."{table}"'  # noqa: S608 - names of nsan's own
                found += [cell for (cell,) in connection.execute(query) if isinstance(cell, str)]
    return "\n".join(found)


_OF_PROGRAMS: Final = (NVTX.table, _MESSAGES, "PROCESSES")


def _has(connection: sqlite3.Connection, table: str, where: str = "main") -> bool:
    query = f"SELECT 1 FROM {where}.sqlite_master WHERE type = 'table' AND name = ?"  # noqa: S608
    return connection.execute(query, (table,)).fetchone() is not None


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f'PRAGMA main.table_info("{table}")')]


def _last_part(text: object) -> object:
    return re.sub(r"(?s)^.*[/\\](?=[^/\\])", "", text) if isinstance(text, str) else text
