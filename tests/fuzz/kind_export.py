"""SQLite exports of nsys: changed row by row, then as files."""

from __future__ import annotations

import sqlite3

from fuzz import export_bases, export_oracle, export_pages, export_rows
from fuzz.asking import WrongError
from fuzz.export_compare import differences
from fuzz.made import Made, look_closer_at_trace, shown, summarised
from fuzz.sql_cells import opened

look_closer = look_closer_at_trace


def make(random, folder):
    """Make an export; damage rows, the file, or both."""
    path = export_bases.write(random, folder / "a.sqlite")
    pick, done = random.random(), []
    if pick < 0.75:
        done += export_rows.change(random, path)
    if pick >= 0.7:
        done += export_pages.change(random, path)
    return Made(path, ", ".join(done))


def read_by_sql(path):
    """Read an export with plain sqlite3; None, and why, where that fails."""
    try:
        with opened(path) as connection:
            return export_oracle.Export(connection), ""
    except (sqlite3.Error, UnicodeError, OverflowError) as error:
        return None, f"{type(error).__name__}: {error}"


def check(made, stores, note_time):
    """Summarise it, and compare every total with plain SQL."""
    found = summarised(made, stores)
    note_time()
    export, why_not = read_by_sql(made.path)
    if found is None:
        return "refused" if export is None or export.views else "refused*"
    if export is None:
        raise WrongError(f"it was read, and sqlite3 says {why_not}")
    wrong = differences(export, *found)
    if wrong:
        raise WrongError("; ".join(wrong[:6]))
    shown(made)
    return "right"
