"""What every reader of a capture offers, so that one import serves them all."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import polars as pl

from nsan.info import TraceInfo

Sink = Callable[[str, int, pl.DataFrame], None]
"""Takes a table of ours, the number of a range of it, and its rows; called from several threads."""

Progress = Callable[[str, int], None]
"""Takes the name of a table and how many of its rows have just been read."""


class CaptureSource(Protocol):
    """A capture on disk, open for reading; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...

    def n_source_rows(self) -> int:
        """Estimate the rows to read, for progress."""
        ...

    def copy_tables(self, sink: Sink, progress: Progress) -> None:
        """Hand every table of :mod:`nsan.schema` that has rows to a sink.

        Rows of event tables come in ranges, numbered in the order of the source.
        """
        ...

    def info(self) -> TraceInfo:
        """Describe the capture; called after :meth:`copy_tables`, whose rows decide."""
        ...
