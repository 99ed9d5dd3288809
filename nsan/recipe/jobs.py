"""What a recipe does with each report: it is opened, asked, and named where it cannot be read.

The functions here run in other processes, perhaps on other machines: they are found there by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nsan.errors import NsanError
from nsan.fleet.finding import in_order, reports_in
from nsan.fleet.member import Failure, Member
from nsan.fleet.naming import Named
from nsan.text import safe

if TYPE_CHECKING:
    import polars as pl

    from nsan.trace import Trace

T = TypeVar("T")

WHO: Final = ("run", "rank", "source")
"""The columns that name the report of a row."""


@dataclass(frozen=True)
class Job:
    """One report of a recipe, and which part of it is asked for.

    Attributes
    ----------
    path : Path
        The report.
    run, rank, source : str, int or None, str
        As of a :class:`nsan.fleet.member.Member`.
    says : Named
        What run and rank become if the report itself holds its rank.
    filters : mapping
        Of :meth:`nsan.Trace.filter`.
    place : object
        What a recipe found out about this report in a first pass, for a second one.
    """

    path: Path
    run: str
    rank: int | None
    source: str
    says: Named
    filters: Mapping[str, Any] = field(default_factory=dict)
    place: Any = None

    def named(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Put the columns that name this report before those of a frame."""
        import polars as pl

        return frame.select(
            pl.lit(self.run, pl.String).alias("run"),
            pl.lit(self.rank, pl.Int64).alias("rank"),
            pl.lit(self.source, pl.String).alias("source"),
            pl.all(),
        )


def jobs_of(inputs: Iterable[str | Path], filters: Mapping[str, Any]) -> list[Job]:
    """Make the jobs of the reports that were given, each report once.

    Parameters
    ----------
    inputs : iterable of str or Path
        Reports, as the framework has found them.
    filters : mapping
        Which part of each is asked for.

    Returns
    -------
    list of Job
        By run, rank and name; named as `nsan summary` of many reports names them.
    """
    found = reports_in([Path(each) for each in inputs])
    return [Job(each.path, each.run, each.rank, each.source, each.named, filters) for each in found]


def opened(job: Job) -> tuple[Job, Trace]:
    """Open the report of a job and keep the part that is asked for.

    Parameters
    ----------
    job : Job
        Named by its file.

    Returns
    -------
    Job, Trace
        The job as the report itself names its rank, and what the filters left.
    """
    from nsan.opening import open_trace

    trace = open_trace(job.path)
    says = job.says.settled(trace.info.rank)
    job = replace(job, run=says.run, rank=says.rank)
    return job, trace.filter(**job.filters) if job.filters else trace


def member_of(job: Job, trace: Trace) -> Member:
    """Give what fleets are made of; totals are counted anew only for a part of a capture."""
    from nsan.totals import totals

    known = None if trace.is_filtered else trace.capture_totals
    found = totals(trace) if known is None else known
    return Member(job.run, job.rank, job.source, trace.info.to_dict(), found)


def member(job: Job) -> Member:
    """Read what is known about one report."""
    return member_of(*opened(job))


def by_name(one: Member) -> tuple[str, bool, int, str]:
    """Return the key by which reports are in order: run, rank, name; the last without a rank."""
    return in_order(one.run, one.rank, one.source)


def attempt(work: Callable[[Job], T], job: Job) -> tuple[T | None, str]:
    """Do the work of one report; what goes wrong is told in one line, and stops no other report.

    Parameters
    ----------
    work : callable
        Takes a job; found by name in the process that runs it.
    job : Job
        One report.

    Returns
    -------
    tuple of result and str
        The result and "", or None and why there is none.
    """
    try:
        return work(job), ""
    except (NsanError, OSError) as error:
        return None, _line(error)
    except Exception as error:  # noqa: BLE001 - a defect in one report must not cost the others
        return (
            None,
            f"nsan did not foresee this ({type(error).__name__}: {_line(error)}). Please report it.",
        )


def _line(error: BaseException) -> str:
    return safe(" ".join(str(error).split()))


class Mapper:
    """Maps work over reports in the framework's context, and keeps those that failed.

    Parameters
    ----------
    context : object
        Of the framework: has ``map`` and ``wait``.

    Attributes
    ----------
    failures : list of Failure
        Reports that could not be read, so far.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self.failures: list[Failure] = []

    def __call__(self, work: Callable[[Job], T], jobs: Sequence[Job]) -> list[tuple[Job, T]]:
        """Do the work for each report.

        Parameters
        ----------
        work : callable
            A function of a module, or a partial of one.
        jobs : sequence of Job
            The reports.

        Returns
        -------
        list of (Job, result)
            Of the reports that could be read, in their order.
        """
        # Bound here: how a context passes keyword arguments on is its own business.
        answers = self._context.wait(self._context.map(partial(attempt, work), list(jobs)))
        found = []
        for job, (result, reason) in zip(jobs, answers, strict=True):
            if reason:
                self.failures.append(Failure(job.run, job.rank, job.source, reason))
            else:
                found.append((job, result))
        return found
