"""The notebooks that come with nsan, and the samples that they show.

In a clone they are the files of ``notebooks/``, in an installed package copies of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import nsan
from nsan.errors import NsanError
from nsan.text import safe

_PACKAGE: Final = Path(nsan.__file__).resolve().parent
_CLONE: Final = _PACKAGE.parent
_SHIPPED: Final = "notebooks_data"


class UnknownNotebookError(NsanError):
    """No notebook of this name comes with nsan."""

    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        self.name, self.names = name, names
        there = ", ".join(names) or "none: this installation is damaged, install nsan again"
        super().__init__(f"no notebook {safe(name)!r} comes with nsan. There are: {there}.")


class CaptureNotFoundError(NsanError):
    """A notebook names a capture that is neither here nor a sample of nsan."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"there is no {safe(name)!r} here ({safe(Path.cwd())}), and no sample of that name.\n"
            "Set the parameter that names it to a file of yours: `nsan report --notebook ... -p NAME=FILE`. Samples "
            "come with nsan's source; `nsan model --help` says how to make one anywhere."
        )


def notebook_folder() -> Path:
    """Find the folder of the notebooks that come with nsan.

    Returns
    -------
    Path
        ``notebooks`` of the clone that nsan is imported from, else the copy in the package.
    """
    clone = _CLONE / "notebooks"
    # A folder of that name beside an installed package is somebody else's.
    return clone if (_CLONE / "pyproject.toml").is_file() else _PACKAGE / _SHIPPED


def notebook_names() -> tuple[str, ...]:
    """List the notebooks that come with nsan, in their order.

    Returns
    -------
    tuple of str
        Names without the number in front and the suffix, as ``explore``.
    """
    return tuple(_short(path) for path in sorted(notebook_folder().glob("*.ipynb")))


def notebook(name: str) -> Path:
    """Find a notebook that comes with nsan.

    Parameters
    ----------
    name : str
        As :func:`notebook_names` gives it.

    Returns
    -------
    Path
        The file; it is not for writing.

    Raises
    ------
    UnknownNotebookError
        None has this name.
    """
    for path in sorted(notebook_folder().glob("*.ipynb")):
        if _short(path) == name:
            return path
    raise UnknownNotebookError(name, notebook_names())


def capture_path(name: str | Path) -> Path:
    """Find the capture that a notebook names: from this folder, else a sample of nsan's clone.

    Parameters
    ----------
    name : str or Path
        A path. One that is not absolute is looked up from the current folder, which is the
        notebook's own in Jupyter, and then from the clone that nsan is imported from.

    Returns
    -------
    Path
        It exists.

    Raises
    ------
    CaptureNotFoundError
        There is none.
    """
    for folder in (Path(), _CLONE):
        # As it is first: the name of a file may begin with ~ too.
        for path in (folder / name, folder / _at_home(name)):
            if str(name) and path.exists():
                return path
    raise CaptureNotFoundError(str(name))


def _at_home(name: str | Path) -> Path:
    """Put the home of a user where the name begins with it."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # no such user
        return Path(name)


def _short(path: Path) -> str:
    return path.stem.partition("-")[2] or path.stem
