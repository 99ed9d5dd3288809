"""Whether the folder of the results can be made: it is tried before hours of reading go into what cannot be written."""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from nsan.errors import NsanError


class NoOutputFolderError(NsanError):
    """The folder of the results cannot be made."""

    def __init__(self, place: Path, reason: str) -> None:
        self.place, self.reason = place, reason
        super().__init__(
            f"--output {place}: the folder cannot be made ({reason}). No report was read. Choose another place."
        )


def check_output(args: argparse.Namespace) -> None:
    """Try to make the folder that was asked for, and leave all as it was.

    Parameters
    ----------
    args : Namespace
        ``output`` and ``force_overwrite``, as the framework has them; either may be absent.

    Raises
    ------
    NoOutputFolderError
        If the folder cannot be made. One that is there already is only replaced when the results are.
    """
    asked, force = getattr(args, "output", None), getattr(args, "force_overwrite", False)
    place = Path(asked) if asked else Path()
    try:
        if not os.path.lexists(place):
            _make_and_remove(place)
        elif asked and force:
            _try_in(place.resolve().parent if place.is_dir() else place)
        else:
            _try_in(Path())  # the framework takes a name of its own there
    except OSError as error:
        raise NoOutputFolderError(place, error.strerror or str(error)) from error


def _try_in(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".nsan-", dir=folder):
        pass


def _make_and_remove(place: Path) -> None:
    missing = [each for each in (place, *place.parents) if not os.path.lexists(each)]
    try:
        place.mkdir(parents=True)
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
