"""A progress bar on stderr, in terminals and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, name: str, *, show: bool) -> Iterator[Callable[[str, int], None]]:
    """Count rows on a bar.

    Parameters
    ----------
    total : int
        Rows to come.
    name : str
        What is read.
    show : bool
        Draw the bar; without it nothing is drawn or imported.

    Yields
    ------
    callable
        Takes the table that rows came from, and their number.
    """
    if not show:
        yield lambda _table, _count: None
        return
    from tqdm.auto import tqdm

    with tqdm(
        total=total, unit=" rows", unit_scale=True, desc=f"import {name}", leave=False
    ) as bar:

        def advance(table: str, count: int) -> None:
            bar.set_postfix_str(table.removeprefix("CUPTI_ACTIVITY_KIND_").lower(), refresh=False)
            bar.update(count)

        yield advance
