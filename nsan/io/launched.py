"""The rank of a recorded process in its parallel program, as far as its export says it.

An export holds the whole environment of who recorded. Of that only the variables below are read, and
of those only whole numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import polars as pl

from nsan.errors import NsanError
from nsan.io.nsys_info import CAPTURE_TABLE, ENVIRONMENT_TABLE
from nsan.io.sqlite_file import CellType, SqliteFile

RANK_VARIABLES: Final = (
    "RANK",  # torchrun
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
    "SLURM_PROCID",
)
"""Variables that launchers number processes by. The finest comes first: under `srun torchrun` SLURM
numbers nodes; and in a batch script SLURM says 0 whatever MPI starts."""

_MPI_TABLE: Final = "MPI_RANKS"
_OPTION: Final = r"^PROCESS_\d+:ENVIRONMENT_VARIABLE$"
_ALL_VARIABLES: Final = "DeviceEnvironment"
_ROWS: Final = 1 << 16
_MOST_DIGITS: Final = 9


class Tables(Protocol):
    """What is asked: a database, or a folder of tables."""

    def has_table(self, table: str) -> bool:
        """Say whether a table exists."""
        ...

    def row_ranges(self, table: str, *, rows: int) -> list[tuple[int, int]]:
        """Cut a table into ranges."""
        ...

    def read(
        self, table: str, columns: dict[str, CellType], between: tuple[int, int]
    ) -> tuple[pl.DataFrame, dict[str, int]]:
        """Read a range of rows."""
        ...


def recorded_rank(database: Tables) -> int | None:
    """Find the rank of the recorded process.

    Parameters
    ----------
    database : Tables
        An open export.

    Returns
    -------
    int or None
        What MPI said of itself, else what a launcher said in the environment; None where neither
        did, or where one export holds several ranks.
    """
    ranks = _mpi_ranks(database)
    if ranks:
        return ranks.pop() if len(ranks) == 1 else None
    said = _variables(database)
    for name in RANK_VARIABLES:
        if name in said:
            return said[name].pop() if len(said[name]) == 1 else None
    return None


def rank_in(path: Path) -> int | None:
    """Look up the rank that a database holds, without importing it.

    Parameters
    ----------
    path : Path
        An SQLite export.

    Returns
    -------
    int or None
        As :func:`recorded_rank` finds it; None also where the file cannot be read: its import says why.
    """
    try:
        with SqliteFile(path) as database:
            return recorded_rank(database)
    except (NsanError, OSError):
        return None


def _mpi_ranks(database: Tables) -> set[int]:
    rows = _rows(database, _MPI_TABLE, {"rank": "integer"})
    return {rank for frame in rows for rank in frame["rank"].drop_nulls().to_list() if rank >= 0}


def _variables(database: Tables) -> dict[str, set[int]]:
    """Collect the numbers that the whitelisted variables hold."""
    found: dict[str, set[int]] = {}
    pairs: dict[str, CellType] = {"name": "text", "value": "text"}
    for frame in _rows(database, CAPTURE_TABLE, pairs):
        values = frame.drop_nulls().filter(pl.col("name").str.contains(_OPTION))["value"]
        _note(found, values.to_list(), r'^({})="?(\d+)"?$')
    for frame in _rows(database, ENVIRONMENT_TABLE, pairs):
        values = frame.drop_nulls().filter(pl.col("name") == _ALL_VARIABLES)["value"]
        _note(found, values.to_list(), r"(?:^|;)({})=(\d+)(?=;|$)")
    return found


def _note(found: dict[str, set[int]], texts: list[str], form: str) -> None:
    names = "|".join(RANK_VARIABLES)
    for text in texts:
        for name, number in re.findall(form.format(names), text):
            if len(number) <= _MOST_DIGITS:
                found.setdefault(name, set()).add(int(number))


def _rows(database: Tables, table: str, columns: dict[str, CellType]) -> Iterator[pl.DataFrame]:
    if not database.has_table(table):
        return
    for between in database.row_ranges(table, rows=_ROWS):
        frame, _ = database.read(table, columns, between)
        yield frame
