"""What must not leave: a store may hold whole paths (`nsan import --keep-paths`), an export never does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import polars as pl

if TYPE_CHECKING:
    from nsan.trace import Trace

_PATHS: Final = {"processes": ("name",), "cpu_faults": ("module", "source_file")}
"""Columns that may hold folders, by table."""


def without_folders(trace: Trace) -> Trace:
    """Cut the folders off all that a trace names, so that no analysis of it can give them on.

    Parameters
    ----------
    trace : Trace
        Perhaps of a store that keeps whole paths.

    Returns
    -------
    Trace
        The same rows.
    """
    cut: dict[str, Any] = {
        table: getattr(trace, table).with_columns(last_part(column) for column in columns)
        for table, columns in _PATHS.items()
    }
    whole = trace.unwindowed and without_folders(trace.unwindowed)
    return replace(trace, **cut, unwindowed=whole)


def last_part(column: str) -> pl.Expr:
    """Cut the folders off a path.

    Parameters
    ----------
    column : str
        Name of a column of text.

    Returns
    -------
    Expr
        Its last part, of Linux's and of Windows' paths.
    """
    return pl.col(column).str.replace(r"^(?s:.*)[/\\]", "")
