"""The newcomer's path: what the README tells to type, typed in a fresh clone, in order, in one shell.

The clone makes an environment of its own, so this needs a package index, as `make test` does.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import exports as x
import pytest
from readme import blocks, text_of, typed
from vendor import need

NSYS = "2023.4.4"
OF_THE_TEST = (
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTEST_CURRENT_TEST",
)
"""What this process may have and a newcomer's shell has not."""

PROGRAM = "#!/bin/sh\necho from the program\n"
"""Stands for the reader's program. There is no GPU in it."""


def _git(*words):
    done = subprocess.run(["git", *words], cwd=x.REPOSITORY, capture_output=True, check=True)
    return done.stdout.decode()


def _clone(place):
    """Clone this repository, and take over what is not committed yet; in CI there is nothing of that."""
    _git("clone", "-q", str(x.REPOSITORY), str(place))
    for name in filter(None, _git("ls-files", "-z", "--deleted").split("\0")):
        (place / name).unlink(missing_ok=True)
    listed = _git("ls-files", "-z", "--modified", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (x.REPOSITORY / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(x.REPOSITORY / name, place / name)
    return place


def _type(commands, clone, folder):
    """Type commands into one shell; return the exit status of each, and all that was printed."""
    script, statuses = folder / "typed.sh", folder / "statuses"
    lines = [f"{command}\necho $? >&3\necho '--- {n}'" for n, command in enumerate(commands)]
    script.write_text("exec 3>" + str(statuses) + "\n" + "\n".join(lines) + "\n")
    shell = {key: value for key, value in os.environ.items() if key not in OF_THE_TEST}
    done = subprocess.run(
        ["bash", str(script)],
        cwd=clone,
        env=shell | {"NSYS": str(need(NSYS) / "nsys")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return list(map(int, statuses.read_text().split())), done.stdout.decode()


@pytest.mark.slow
@pytest.mark.nsys
def test_everything_that_the_readme_tells_to_type_does_what_it_says(tmp_path):
    if not (x.REPOSITORY / ".git").exists():
        pytest.skip("this is no clone, so it cannot be cloned")
    need(NSYS)
    clone = _clone(tmp_path / "nsan")
    (clone / "program").write_text(PROGRAM)
    (clone / "program").chmod(0o755)
    (clone / "block.py").write_text("\n".join(blocks("README.md", "python")))
    commands = typed("README.md")
    statuses, printed = _type([*commands, "python block.py"], clone, tmp_path)

    # Of the recording the README promises 3, for the program uses no Unified Memory.
    assert "exit status 3" in text_of("README.md")
    of_recording = [
        n for n, command in enumerate(commands) if "./program" in command or "run." in command
    ]
    expected = [3 if n in of_recording else 0 for n in range(len(commands) + 1)]
    assert statuses == expected, printed[-8000:]
    assert len(of_recording) == 4

    parts = printed.split("\n--- ")
    assert commands[0] == "make demo"
    assert parts[0].splitlines()[-1] == "demo-output/report.html"
    shown = blocks("README.md", "text")[0]
    assert shown in printed[printed.index("report-um_vector_add_rtx4060l.html") :]
    assert printed.count("from the program") == 2  # alone, and under nsys
    assert "holds no Unified Memory data" in printed
    for name in ("demo-output/report", "report-um_vector_add_rtx4060l", "report-run"):
        assert (clone / f"{name}.html").read_text().startswith("<!doctype html>")
    assert (clone / "run.nsan.json").is_file()
