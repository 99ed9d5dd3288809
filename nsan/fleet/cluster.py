"""Workers of a dask cluster that somebody runs: on this machine, or on many that share a file system."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import nsan
from nsan.corpus_errors import ClusterError
from nsan.errors import ExtraMissingError
from nsan.fleet.task import failed, perform

if TYPE_CHECKING:
    from distributed import Client, Future

_PATIENCE: Final = "20s"
_PATIENCE_SECONDS: Final = 20

Task = Mapping[str, Any]
Result = dict[str, Any]


def on_cluster(tasks: Sequence[Task], address: str) -> Iterator[Result]:
    """Do tasks on the workers of a cluster; as many at a time as there are workers.

    So a worker that is killed takes one report with it, which dask gives to another one, as often
    as the cluster's setting `distributed.scheduler.allowed-failures` says.

    Parameters
    ----------
    tasks : sequence of mapping
        As :func:`nsan.fleet.task.perform` takes them.
    address : str
        Of the scheduler.

    Yields
    ------
    dict
        The result of each task, as they come; a task that ended its workers has a reason.

    Raises
    ------
    ExtraMissingError
        If dask is not installed.
    ClusterError
        If there is no such cluster, it has no worker, its workers have another nsan, or it ends.
    """
    try:
        import distributed  # noqa: F401 - is it there?
    except ImportError as error:
        raise ExtraMissingError("--dask", "distributed", "scale") from error
    client = _connected(address)
    try:
        _check_workers(client, address)
        yield from _results(client, address, tasks)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client.close()


def _connected(address: str) -> Client:
    from distributed import Client

    try:
        return Client(address, timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ClusterError(
            address, f"no scheduler answers there ({_first_line(error)}). Check the address."
        ) from error


def _check_workers(client: Client, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=_PATIENCE_SECONDS)
    except TimeoutError as error:
        why = f"it has no worker. Start one: `dask worker {address} --nthreads 1`."
        raise ClusterError(address, why) from error
    try:
        versions = client.run(_version)
    except Exception as error:  # whatever a worker that lacks nsan answers
        raise ClusterError(address, _lacking(_first_line(error))) from error
    others = sorted({str(version) for version in versions.values()} - {nsan.__version__})
    if others:
        raise ClusterError(address, _lacking(f"they have nsan {', '.join(others)}"))


def _lacking(what: str) -> str:
    return (
        f"its workers cannot run this nsan: {what}. "
        f"Install nsan {nsan.__version__} where they run, and start them again."
    )


def _version() -> str:
    return nsan.__version__


def _results(client: Client, address: str, tasks: Sequence[Task]) -> Iterator[Result]:
    from distributed import as_completed

    waiting = list(reversed(tasks))
    running: dict[str, Task] = {}

    def submit() -> list[Future]:
        started = []
        while waiting and len(running) < max(1, len(client.nthreads())):
            task = waiting.pop()
            future = client.submit(perform, dict(task), pure=False)
            running[future.key] = task
            started.append(future)
        return started

    done = as_completed(submit(), loop=client.loop)
    try:
        for future in done:
            result = _result_of(future, running.pop(future.key), address)
            future.release()
            done.update(submit())
            yield result
    finally:
        for future in list(done.futures):
            future.cancel()


def _result_of(future: Future, task: Task, address: str) -> Result:
    from distributed.scheduler import KilledWorker

    if future.status == "finished":
        result: Result = future.result()
        return result
    if future.status != "error":
        why = (
            "it ended, or dropped what it was to do. What is done is kept; run this again to go on."
        )
        raise ClusterError(address, why)
    error = future.exception()
    if isinstance(error, KilledWorker):
        reason = (
            "The workers that read it were ended, as a system does that is out of memory. "
            "Read it alone: `nsan summary FILE`."
        )
    else:
        reason = f"{type(error).__name__}: {_first_line(error)}"
    return failed(task, reason)


def _first_line(error: BaseException | None) -> str:
    lines = str(error).splitlines() or [""]
    return lines[0][:200].rstrip(".") or type(error).__name__
