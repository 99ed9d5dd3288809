"""A program that stands in for nsys or its importer, for the ways in which the real ones do not fail.

It is a shell script made in a test's own folder. It writes each call, one line, to a log.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = """\
#!/bin/sh
printf '%s\\n' "$*" >> {log}
if [ "$1" = --version ]; then echo "NVIDIA Nsight Systems version {version}.1-abc"; exit 0; fi
output=
previous=
tables=
for argument in "$@"; do
  case "$previous" in --output|--output-file) output=$argument ;; esac
  case "$argument" in --tables=*) tables=yes ;; esac
  previous=$argument
done
if [ -n "$tables" ]; then {start}; fi
{middle}
if [ -n {makes} ]; then cp {makes} "$output"; fi
printf '%s\\n' {says} >&2
exit {status}
"""


@dataclass(frozen=True)
class Fake:
    """A fake program and what it was asked."""

    program: Path
    log: Path

    @property
    def calls(self):
        """Arguments of each call, in one line each; without questions for the version."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line != "--version"]


def fake(
    program,
    *,
    version="2023.4.4",
    status=0,
    says="",
    makes=None,
    starts=None,
    hangs=False,
    dies=False,
) -> Fake:
    """Make a fake program.

    Parameters
    ----------
    program : Path
        Where; its folder is made.
    version : str
        What it says when asked for its version.
    status : int
        Its exit status.
    says : str
        What it writes to stderr.
    makes : Path, optional
        File that it copies to the output it is asked for.
    starts : Path, optional
        The same when asked for chosen tables only; without it, it does not know that option.
    hangs : bool
        Wait for a child that never ends.
    dies : bool
        End by a signal.
    """
    program.parent.mkdir(parents=True, exist_ok=True)
    log = program.with_name(f"{program.name}.log")
    unknown = "echo \"unrecognised option '--tables'\" >&2; exit 1"
    start = f'cp {shlex.quote(str(starts))} "$output"; exit 0' if starts else unknown
    program.write_text(
        _SCRIPT.format(
            log=shlex.quote(str(log)),
            version=version,
            start=start,
            middle=_middle(log, hangs=hangs, dies=dies),
            makes=shlex.quote(str(makes or "")),
            says=shlex.quote(says),
            status=status,
        )
    )
    program.chmod(0o755)
    return Fake(program, log)


def _middle(log, *, hangs, dies):
    if hangs:
        return f"sleep 600 & echo $! > {shlex.quote(str(log))}.child; wait"
    return "kill -9 $$" if dies else ""
