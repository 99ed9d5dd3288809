"""A page as PDF, printed by a Chromium that is cut off from every network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from nsan.errors import NsanError
from nsan.text import shortened

PROGRAM_VARIABLE: Final = "NSAN_CHROMIUM"
NAMES: Final = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
"""Programs that can print a page, by what is asked first."""

SECONDS: Final = 120.0
"""A page that is not printed by then never will be."""

_WAYS_OUT: Final = (
    "Write .html instead, and print that from any browser; it is made for paper, too."
)
_OPTIONS: Final = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    # No name has an address, and what has one is asked through a proxy that is not there.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--no-pdf-header-footer",
)


class ChromiumNotFoundError(NsanError):
    """There is no program that prints a page."""

    def __init__(self, asked: str) -> None:
        self.asked = asked
        what = (
            f"{PROGRAM_VARIABLE}={shortened(asked)} is no program"
            if asked
            else "A report as PDF is printed by Chromium or Chrome, and none was found"
        )
        super().__init__(f"{what}. Install one, or set {PROGRAM_VARIABLE} to its path. {_WAYS_OUT}")


class PrintingFailedError(NsanError):
    """Chromium was there, but gave no PDF; ``reason`` is what it said."""

    def __init__(self, program: str, reason: str) -> None:
        self.program, self.reason = program, reason
        super().__init__(f"{program} gave no PDF ({shortened(reason, 300)}). {_WAYS_OUT}")


def find_chromium() -> str:
    """Find the program that prints.

    Returns
    -------
    str
        What ``NSAN_CHROMIUM`` names, else a Chromium or Chrome on the path.

    Raises
    ------
    ChromiumNotFoundError
        If there is none.
    """
    asked = os.environ.get(PROGRAM_VARIABLE, "")
    for name in [asked] if asked else NAMES:
        if found := shutil.which(name):
            return found
    raise ChromiumNotFoundError(asked)


def pdf_of(page: str) -> bytes:
    """Print a page.

    Parameters
    ----------
    page : str
        HTML, as :func:`nsan.report.page.page_of` writes it with ``live=False``: without a script.

    Returns
    -------
    bytes
        PDF.

    Raises
    ------
    ChromiumNotFoundError
        If there is nothing that prints.
    PrintingFailedError
        If it fails, or takes longer than two minutes.
    """
    program = find_chromium()
    with tempfile.TemporaryDirectory(prefix="nsan-pdf-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        source, target = folder / "report.html", folder / "report.pdf"
        source.write_text(page, encoding="utf-8")
        said = _run(
            [
                program,
                *_OPTIONS,
                # Its sandbox does not start for root, who needs none to harm the machine.
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
                f"--user-data-dir={folder / 'profile'}",
                f"--print-to-pdf={target}",
                source.as_uri(),
            ],
            folder,
        )
        try:
            printed = target.read_bytes()
        except OSError:
            printed = b""
    if not printed.startswith(b"%PDF-"):
        raise PrintingFailedError(Path(program).name, said)
    return printed


def _run(command: Sequence[str], home: Path) -> str:
    """Run Chromium with a home of its own; all that it started ends with it. Return its last words."""
    words = home / "said.txt"
    try:
        with words.open("wb") as file:  # a pipe would stay open as long as anything that it started
            process = subprocess.Popen(  # noqa: S603 - found by name, without a shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env={**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home)},
                start_new_session=True,
            )
    except OSError as error:
        return error.strerror or str(error)
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    # Where nobody has a desktop, it complains of that, and prints.
    said = words.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in said if line.strip() and "dbus/" not in line]
    return lines[-1] if lines else f"exit status {process.returncode}"
