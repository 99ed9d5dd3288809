"""What must not leave: a store may hold whole paths (`nsan import --keep-paths`), an export never does."""

from __future__ import annotations

import polars as pl


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
