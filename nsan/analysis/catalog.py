"""The table of contents: every analysis with its question, what it reads, gives and costs.

An analysis is a function whose positional parameters are named as tables of a trace
(:data:`nsan.schema.TABLES`), of a memory snapshot
(:data:`nsan.torch_alloc.tables.SNAPSHOT_TABLES`) or of both joined
(:data:`nsan.analysis.pca.tables.JOINED_TABLES`) and take lazy frames, whose keyword-only parameters are
options with defaults, and which returns a lazy frame. The decorator says the rest. A user's own function
is found and run in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Literal, TypeVar

import polars as pl

from nsan.analysis.keeping import handed
from nsan.analysis.pca.tables import JOINED_TABLES
from nsan.analysis.result import Result
from nsan.errors import AnalysisError, SchemaMismatchError, UnknownNameError, UsageError
from nsan.schema import TABLES
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

Function = TypeVar("Function", bound=Callable[..., pl.LazyFrame])

MODULES: Final = (
    "driver.fault_rows",
    "driver.pushes",
    "driver.batches",
    "driver.fault_places",
    "driver.latency",
    "clustering.episodes",
    "clustering.clusters",
    "clustering.patterns",
    "traffic",
    "memory.amplification",
    "user_prefetch",
    "memory.residency",
    "memory.refaults",
    "memory.ping_pong",
    "memory.oversubscription",
    "memory.working_set",
    "attribution.kernels",
    "attribution.nvtx",
    "attribution.allocations",
    "attribution.functions",
    "attribution.work",
    "attribution.iterations",
    "loss.lost_rows",
    "allocator.state",
    "allocator.utilization",
    "allocator.timeline",
    "allocator.segments",
    "allocator.va_blocks",
    "allocator.tensors",
    "allocator.oom",
    "allocator.stitching",
    "allocator.what_if",
    "allocator.agreement",
    "pca.effect",
    "pca.traffic",
    "pca.sharing",
    "pca.ledger",
    "pca.rows",
    "views.rates",
    "views.map",
    "views.transfers",
    "views.spread",
    "views.largest",
    "views.work_lanes",
    "views.steps",
    "views.segment_map",
)
"""Modules of this package that hold analyses, in the order of the table of contents."""

_ATTRIBUTE: Final = "__nsan_analysis__"

_KNOWN: Final = {**TABLES, **SNAPSHOT_TABLES, **JOINED_TABLES}

Subject = Literal["trace", "snapshot", "joined"]
"""What an analysis is about: a trace, a memory snapshot of PyTorch's allocator, or both joined."""


@dataclass(frozen=True)
class Analysis:
    """An analysis and what is known about it.

    Attributes
    ----------
    name : str
        Name of the function.
    question : str
        What it answers, as a user would ask.
    function : callable
        The function.
    result : Result
        What one row is; its columns with unit and kind.
    reads : mapping of str to tuple of str
        By table of the trace or snapshot: the columns that are read, no others.
    complexity : str
        Cost in time for n rows.
    source : str
        Where the definition is from.
    whole : bool
        Only a whole capture can be asked: what a filter leaves out would change the answer.
    """

    name: str
    question: str
    function: Callable[..., pl.LazyFrame]
    result: Result
    reads: Mapping[str, tuple[str, ...]]
    complexity: str
    source: str
    whole: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of the function with their defaults."""
        found = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY}

    @property
    def subject(self) -> Subject:
        """What it is about."""
        read = self.reads.keys()
        if read <= SNAPSHOT_TABLES.keys():
            return "snapshot"
        return "trace" if read <= TABLES.keys() else "joined"

    def run(
        self, tables: Mapping[str, pl.LazyFrame], options: Mapping[str, Any] | None = None
    ) -> pl.LazyFrame:
        """Run the analysis on the tables of a trace or of a snapshot.

        Parameters
        ----------
        tables : mapping of str to LazyFrame
            At least the tables that it reads.
        options : mapping, optional
            Values for its options.

        Returns
        -------
        LazyFrame
            The result, checked against what the analysis promises.

        Raises
        ------
        UsageError
            If there is no such option.
        AnalysisError
            If it gives another table than it promises.
        """
        given = dict(options or {})
        for name, value in given.items():
            if name not in self.options:
                raise UnknownNameError(f"option of {self.name}", name, self.options)
            self._check_number(name, value)
        # What it did not declare it does not get.
        frames = (handed(tables[table], columns) for table, columns in self.reads.items())
        found = self.function(*frames, **given)
        if not isinstance(found, pl.LazyFrame):
            raise AnalysisError(self.name, f"it gives {type(found).__name__}, not a LazyFrame")
        try:
            return self.result.validate(found)
        except SchemaMismatchError as error:
            raise AnalysisError(self.name, str(error)) from error

    def _check_number(self, name: str, value: Any) -> None:
        """Refuse a size or time below what its default allows: a default of 0 means "choose"."""
        default = self.options[name]
        plain = isinstance(default, int | float) and not isinstance(default, bool)
        if not plain or default < 0:
            return
        if value < 0 or (value == 0 and default > 0):
            least = "above 0" if default > 0 else "0 or more"
            msg = f"{name}={value} of {self.name}: it must be {least} (default {default})."
            raise UsageError(msg)


def analysis(
    *,
    question: str,
    result: Result,
    reads: Mapping[str, Iterable[str]],
    complexity: str = "O(n log n)",
    source: str = "",
    whole: bool = False,
) -> Callable[[Function], Function]:
    """Declare a function to be an analysis; the function stays as it is.

    Parameters
    ----------
    question : str
        What it answers, ending with a question mark.
    result : Result
        The table it gives.
    reads : mapping of str to iterable of str
        By table of the trace, the columns that are read. The tables are the function's positional
        parameters, in order.
    complexity : str, default "O(n log n)"
        Cost in time for n rows.
    source : str
        Where the definition is from.
    whole : bool, default False
        Refuse a filtered trace: what a filter leaves out would change the answer.

    Returns
    -------
    callable
        A decorator.
    """

    def declare(function: Function) -> Function:
        found = Analysis(
            name=function.__name__,
            question=question,
            function=function,
            result=result,
            reads={table: tuple(columns) for table, columns in reads.items()},
            complexity=complexity,
            source=source,
            whole=whole,
        )
        _check(found)
        setattr(function, _ATTRIBUTE, found)
        return function

    return declare


def _check(found: Analysis) -> None:
    """Refuse a declaration that does not fit its function or the tables of a trace."""
    parameters = inspect.signature(found.function).parameters.values()
    frames = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if frames != list(found.reads):
        said = f"its parameters are {frames}, and it declares to read {list(found.reads)}"
        raise AnalysisError(found.name, said)
    for table, columns in found.reads.items():
        if table not in _KNOWN:
            raise AnalysisError(
                found.name,
                f"a trace has no table {table!r}, it has {[*TABLES]}; a snapshot has "
                f"{[*SNAPSHOT_TABLES]}; both joined have {[*JOINED_TABLES]}",
            )
        absent = [name for name in columns if name not in _KNOWN[table].schema]
        if absent:
            has = [*_KNOWN[table].schema]
            raise AnalysisError(found.name, f"{table} has no column {absent}, it has {has}")
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            raise AnalysisError(found.name, f"its option {p.name!r} has no default")


def analyses_in(module: ModuleType) -> Iterator[Analysis]:
    """List the analyses that a module defines, in their order there.

    Parameters
    ----------
    module : module
        A module of this package, or a user's.

    Returns
    -------
    iterator of Analysis
        Those whose functions are defined in the module itself.
    """
    for thing in vars(module).values():
        found = getattr(thing, _ATTRIBUTE, None)
        if isinstance(found, Analysis) and found.function.__module__ == module.__name__:
            yield found


@cache
def catalog() -> Mapping[str, Analysis]:
    """List every analysis of nsan by name."""
    modules = (import_module(f"nsan.analysis.{name}") for name in MODULES)
    return {found.name: found for module in modules for found in analyses_in(module)}


def find(name: str, own: Iterable[Analysis] = ()) -> Analysis:
    """Find an analysis by name; a user's own comes first.

    Parameters
    ----------
    name : str
        Its name; dashes count as underscores.
    own : iterable of Analysis
        Analyses of plug-ins.

    Returns
    -------
    Analysis
        The analysis.

    Raises
    ------
    UsageError
        If there is none; the message lists the names.
    """
    known = {**catalog(), **{each.name: each for each in own}}
    found = known.get(name.replace("-", "_"))
    if found is None:
        raise UnknownNameError("analysis", name, sorted(known))
    return found
