"""Why a run did not end well, in one line without folders, which may name people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from nsan.io.recording import Ran

_NEUTRAL: Final = ("/proc/", "/sys/", "/dev/")
_QUOTED: Final = re.compile(r"(?<=['\"])~?/[^'\"\n]*/")
_PATH: Final = re.compile(
    r"(?<![\w.~-])~?/(?:[^\s'\"()/]+(?:(?<![:;,.]) [^\s'\"()/]+){0,3}/|/)+",
)
"""Folders, whose names may have blanks: a word or some belong to one if a slash follows them."""


def reason_of(program: str, ran: Ran, about: Mapping[str, Any], known: Mapping[int, str]) -> str:
    """Say why a program did not end well: as its tables do, or its last words.

    Parameters
    ----------
    program : str
        Its name.
    ran : Ran
        How it ended.
    about : mapping
        What it says of its run; may be empty.
    known : mapping of int to str
        Exit statuses that need no word beside what the program says.

    Returns
    -------
    str
        With folders in it: see :func:`without_folders`.
    """
    if about.get("reason"):
        return str(about["reason"])
    said = [line.removeprefix(f"{program}: ") for line in ran.lines[-1:]]
    how = [f"killed by signal {-ran.status}" if ran.status < 0 else f"exit status {ran.status}"]
    if ran.status in known and said:
        how = []
    return ": ".join([*how, *said])


def without_folders(text: str, own: Iterable[Path] = ()) -> str:
    """Leave only the names of files.

    Parameters
    ----------
    text : str
        Anything that a program or nsys says.
    own : iterable of Path
        Folders that may stand in it; known ones are found whatever their names are.

    Returns
    -------
    str
        In one line.

    Examples
    --------
    >>> without_folders("cannot open /home/alice/my files/x/y.so: no such file")
    'cannot open y.so: no such file'
    >>> without_folders("see /proc/meminfo")
    'see /proc/meminfo'
    """
    folders = {str(folder) for folder in (*own, Path.home(), Path.cwd())} - {"/", "."}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    for pattern in (_QUOTED, _PATH):
        text = pattern.sub(lambda found: _kept(found[0]), text)
    return " ".join(text.split())


def _kept(folders: str) -> str:
    return folders if folders.startswith(_NEUTRAL) else ""
