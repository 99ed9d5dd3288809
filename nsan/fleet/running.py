"""Tasks of a fleet, done by whom the user asked for."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from nsan.fleet.how import How
from nsan.fleet.task import perform


def performed(tasks: Sequence[Mapping[str, Any]], how: How) -> Generator[dict[str, Any]]:
    """Do tasks: in this process, in processes of this machine, or on a cluster.

    Parameters
    ----------
    tasks : sequence of mapping
        As :func:`nsan.fleet.task.perform` takes them.
    how : How
        Who does them.

    Yields
    ------
    dict
        The result of each, as they come.

    Raises
    ------
    UsageError
        If both kinds of workers are asked for.
    NsanError
        If a cluster cannot be used.
    """
    how.checked()
    if not tasks:
        return
    if how.dask is not None:
        from nsan.fleet.cluster import on_cluster

        yield from on_cluster(tasks, how.dask)
    elif how.workers is not None:
        from nsan.fleet.workers import on_processes

        yield from on_processes(tasks, how.workers)
    else:
        yield from map(perform, tasks)
