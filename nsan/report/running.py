"""A notebook run by papermill, in a kernel of this very Python.

papermill runs in a thread of its own: so an interrupt ends the kernel and comes up here, where nbclient
would otherwise swallow it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from nsan.errors import ExtraMissingError, NsanError
from nsan.report.notebook_file import read_notebook
from nsan.report.parameters import checked, parameters_of
from nsan.text import safe, shortened

NEEDED: Final = {
    "papermill": "papermill",
    "nbconvert": "nbconvert",
    "ipykernel": "ipykernel",
    "altair": "altair",
    "vl_convert": "vl-convert-python",
}
"""What a report needs beyond the base install: modules, and the packages that bring them."""

_KERNEL_ENVIRONMENT: Final = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
_WAY_OUT: Final = " If memory ran out, ask for a part of the trace: --filter-time, --gpu."
_LOG: Final = "kernel.log"
_GRACE_S: Final = 5.0
_LONGEST_SOCKET: Final = 90
"""Characters: the name of a socket may have 107, and kernels put something behind it."""


class NotebookFailedError(NsanError):
    """A cell of a notebook raised an error; ``notebook`` holds what ran until then."""

    def __init__(self, name: str, cell: int, reason: str, notebook: Any) -> None:
        self.name, self.cell, self.reason, self.notebook = name, cell, reason, notebook
        said = shortened(" ".join(reason.split()), 400)
        super().__init__(f"{safe(name)}, code cell {cell}: {said}")


class KernelLostError(NsanError):
    """The kernel did not start, or ended before the notebook did."""

    def __init__(self, name: str, error: Exception, last: str, *, is_dead: bool) -> None:
        self.name, self.last = name, last
        reason = shortened(str(error) or type(error).__name__, 200).rstrip(".")
        said = f" Its last words: {shortened(last, 300)}." if last else ""
        super().__init__(
            f"{safe(name)} did not run to its end: {reason}.{said}{_WAY_OUT * is_dead}".rstrip()
        )


def check_installed() -> None:
    """Refuse before anything is opened if a package that a report needs is not there.

    Raises
    ------
    ExtraMissingError
        For the first that is missing.
    """
    import importlib.util

    for module, package in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise ExtraMissingError("A report", package, "report")


def execute(
    notebook: Any, parameters: Mapping[str, Any], *, name: str, progress: bool = False
) -> Any:
    """Run a notebook from top to bottom.

    Parameters
    ----------
    notebook : NotebookNode
        The notebook; it is not changed.
    parameters : mapping
        Values for its parameters.
    name : str
        Its name, for messages.
    progress : bool, default False
        Show a bar on stderr.

    Returns
    -------
    NotebookNode
        The notebook with its outputs.

    Raises
    ------
    NsanError
        If the notebook has no cell of parameters, or not these, before anything runs; if a cell raises
        an error.
    """
    values = checked(parameters_of(notebook, name), parameters, name)
    with tempfile.TemporaryDirectory(prefix="nsan-report-") as folder:
        job = _Job(notebook, values, Path(folder) / "run.ipynb", progress=progress)
        job.start()
        try:
            while job.is_alive():
                job.join(0.2)
        except BaseException:
            # Whoever presses Ctrl-C again must not keep the kernel from being ended.
            with _undisturbed():
                job.stop()
            raise
        return job.result(name)


@contextmanager
def _undisturbed() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class _Job(threading.Thread):
    """papermill at work."""

    def __init__(
        self, notebook: Any, values: Mapping[str, Any], place: Path, *, progress: bool
    ) -> None:
        super().__init__(name="nsan-report", daemon=True)
        self._notebook, self._values, self._place = notebook, dict(values), place
        self._progress = progress
        self._kernels: list[Any] = []
        self._found: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        import papermill
        from jupyter_core.utils import ensure_event_loop

        # What goes wrong is said by result(), and once.
        logging.getLogger("papermill").addHandler(logging.NullHandler())
        # What nbclient waits on belongs to this thread, and is closed with it.
        loop = ensure_event_loop()
        try:
            self._found = papermill.execute_notebook(
                self._notebook,
                str(self._place),
                parameters=self._values,
                kernel_name="python3",
                language="python",
                kernel_manager_class=_kernel_class(self._kernels, self._place.parent),
                progress_bar=self._progress,
                # Written once, and only if a cell fails.
                request_save_on_cell_execute=False,
            )
        except Exception as error:  # noqa: BLE001 - told by result()
            self._error = error
        finally:
            loop.close()

    def stop(self) -> None:
        """End the kernel with all that it started, and with it the run."""
        processes = [kernel.provisioner.process for kernel in self._kernels if kernel.has_kernel]
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, sent)
            self.join(_GRACE_S)
            if not self.is_alive():
                break
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)

    def _last_words(self) -> str:
        log = self._place.with_name(_LOG)
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def result(self, name: str) -> Any:
        """Give the notebook, or say what went wrong."""
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError

        if self._error is None:
            return self._found
        if not isinstance(self._error, PapermillExecutionError):
            is_dead = isinstance(self._error, DeadKernelError)
            raise KernelLostError(
                name, self._error, self._last_words(), is_dead=is_dead
            ) from self._error
        failed = self._error
        partial = read_notebook(self._place) if self._place.exists() else None
        reason = f"{failed.ename}: {failed.evalue}"
        # papermill puts the values into a cell of its own, in front of the others.
        cell = (failed.exec_count or 0) - bool(self._values)
        raise NotebookFailedError(name, cell, reason, partial) from failed


def _kernel_class(started: list[Any], folder: Path) -> type:
    """Make the class of a kernel of this Python, whatever kernels are installed for the user.

    It is spoken to through sockets in a folder that only this user may enter, not through open ports.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        """A kernel that runs where nsan runs."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            place = folder / "kernel.json"
            if len(str(place)) <= _LONGEST_SOCKET:
                self.transport, self.connection_file = "ipc", str(place)
            started.append(self)

        async def start_kernel(self, **how: Any) -> Any:  # type: ignore[override]
            """Start it, with what it says of itself in a file: a terminal is not the place."""
            with (folder / _LOG).open("ab") as log:
                return await super()._async_start_kernel(**{**how, "stdout": log, "stderr": log})

        @property
        def kernel_spec(self) -> KernelSpec:
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(
                argv=command,
                display_name="Python 3",
                language="python",
                env=dict(_KERNEL_ENVIRONMENT),
            )

    return ThisPython
