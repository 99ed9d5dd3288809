"""Where a corpus lies: a local folder, or any place that fsspec knows by its URL.

An object store has no rename, and does not need one: an object is there whole, or not at all. In a
local folder a file is written beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from nsan.corpus_errors import CorpusPlaceError
from nsan.errors import ExtraMissingError, NoPermissionError
from nsan.io.manifest import cache_folder
from nsan.io.probe import CORPUS_FILE
from nsan.io.tidy import postponed, scratch_beside

_SIDE_BY_SIDE: Final = 16
"""Files that are read at once: each waits for its answer."""

_OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"}
)

_URL: Final = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z][A-Za-z0-9+.-]+)*):/{1,2}(?!/$)(.*)", re.DOTALL
)


class CorpusPlace(Protocol):
    """Files below one place, named by paths with ``/``."""

    address: str
    """As a user would name it."""

    location: str
    """As it is named from any folder and machine."""

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """Read files; one that is not there is left out."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        ...

    def put(self, file: Path, name: str, *, move: bool) -> None:
        """Copy a local file here, or move it where that is cheaper."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; one that is not there is no error."""
        ...

    def sizes(self) -> dict[str, int]:
        """List all files with their sizes in bytes."""
        ...

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """Make a local folder for a report under construction, which goes afterwards."""
        ...


def place_at(where: str | Path) -> CorpusPlace:
    """Return the place that a path or a URL names.

    Parameters
    ----------
    where : str or Path
        A local folder, ``file://`` or another URL.

    Returns
    -------
    CorpusPlace
        The place; it need not exist.

    Raises
    ------
    ExtraMissingError
        If it is a URL, and fsspec is not installed.
    CorpusPlaceError
        If fsspec does not know such URLs, or cannot reach the place.
    """
    url = url_of(where)
    if url is None:
        return LocalPlace(Path(where))
    if url.startswith("file://"):
        return LocalPlace(Path(unquote(urlsplit(url).path)))
    return RemotePlace(url)


def url_of(where: str | Path) -> str | None:
    """Return a URL that was given, also where a path was made of it; None for a path.

    Examples
    --------
    >>> url_of("s3://bucket/fleet"), url_of(Path("s3://bucket/fleet")), url_of("runs/monday")
    ('s3://bucket/fleet', 's3://bucket/fleet', None)
    """
    found = _URL.fullmatch(os.fspath(where))
    if found is None:
        return None
    # A Path has taken one of the two slashes away; a folder may still be called like that.
    if "://" not in os.fspath(where) and os.path.lexists(where):
        return None
    return f"{found[1]}://{'/' * (found[1] == 'file')}{found[2].lstrip('/')}"


def is_corpus(where: str | Path) -> bool:
    """Say whether a place holds a corpus.

    Parameters
    ----------
    where : str or Path
        As for :func:`place_at`.

    Returns
    -------
    bool
        A URL that cannot be reached is an error, not a no.

    Raises
    ------
    NsanError
        If the place cannot be looked at.
    """
    if url_of(where) is None:
        try:
            return (Path(where) / CORPUS_FILE).is_file()
        except PermissionError as error:
            raise NoPermissionError(Path(where)) from error
        except OSError:  # a name that is too long, as a rule: nothing is called so
            return False
    return bool(place_at(where).read([CORPUS_FILE]))


class LocalPlace:
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100 - a link stays one
        self.address = str(folder)
        self.location = str(self.folder)

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """Read files; one that is not there is left out."""
        found = {}
        for name in names:
            with self._explained(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found[name] = (self.folder / name).read_bytes()
        return found

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        target = self.folder / name
        with self._explained():
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = self._beside(target)
            try:
                beside.write_bytes(data)
                beside.replace(target)
            finally:
                beside.unlink(missing_ok=True)

    def put(self, file: Path, name: str, *, move: bool) -> None:
        """Move a file here where it lies on the same file system, else copy it."""
        target = self.folder / name
        with self._explained():
            target.parent.mkdir(parents=True, exist_ok=True)
            if move:
                with contextlib.suppress(OSError):
                    file.replace(target)
                    return
            beside = self._beside(target)
            try:
                shutil.copyfile(file, beside)
                beside.replace(target)
            finally:
                beside.unlink(missing_ok=True)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, and folders that are empty then."""
        with self._explained():
            for name in names:
                file = self.folder / name
                file.unlink(missing_ok=True)
                for folder in file.parents:
                    if folder == self.folder:
                        break
                    try:
                        folder.rmdir()
                    except OSError:  # not empty, as a rule
                        break

    def sizes(self) -> dict[str, int]:
        """List all files with their sizes; hidden ones are under construction."""
        found = {}
        with self._explained():
            for folder, folders, files in os.walk(self.folder, onerror=_raised):
                folders[:] = [each for each in folders if not each.startswith(".")]
                for name in files:
                    file = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        found[file.relative_to(self.folder).as_posix()] = file.stat().st_size
        return found

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a hidden folder in the corpus itself, from where parts need only be renamed."""
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
        with _scratch(self.folder / "scratch", self._explained) as folder:
            yield folder

    def path(self, name: str) -> Path:
        """Return where a file lies."""
        return self.folder / name

    @staticmethod
    def _beside(target: Path) -> Path:
        return target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise CorpusPlaceError(self.address, error.strerror or str(error)) from error


def _raised(error: OSError) -> None:
    """Stop at a folder that cannot be listed: its files would be taken for missing."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


class RemotePlace:
    """A place that fsspec reaches."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec.core
        except ImportError as error:
            raise ExtraMissingError(
                f"A corpus at {url.split(':', maxsplit=1)[0]}://", "fsspec", "scale"
            ) from error
        self.address = self.location = url
        with self._explained():
            self._system, root = fsspec.core.url_to_fs(url)
            self._root: str = root.rstrip("/")

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """Read files, side by side where the store can; one that is not there is left out."""
        if len(names) == 1:
            found = [self._read(names[0])]
        else:
            with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
                found = list(pool.map(self._read, names))
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    def _read(self, name: str) -> bytes | None:
        with self._explained():
            try:
                data: bytes = self._system.cat_file(self._at(name))
            except FileNotFoundError:
                return None
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file as one object."""
        self._send(name, lambda at: self._system.pipe_file(at, data))

    def put(self, file: Path, name: str, *, move: bool) -> None:  # noqa: ARG002 - it is a copy anyway
        """Upload a file as one object."""
        self._send(name, lambda at: self._system.put_file(str(file), at))

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; one that is not there is no error."""
        with self._explained():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(self._at(name))

    def sizes(self) -> dict[str, int]:
        """List all files with their sizes in bytes."""
        root = self._root.lstrip("/")
        with self._explained():
            self._system.invalidate_cache()
            found = self._system.find(self._root, detail=True)
        return {
            path.lstrip("/").removeprefix(root).lstrip("/"): int(entry["size"] or 0)
            for path, entry in found.items()
        }

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a folder in nsan's cache."""
        with self._explained():
            cache_folder().mkdir(parents=True, exist_ok=True)
        with _scratch(cache_folder() / "corpus", self._explained) as folder:
            yield folder

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _send(self, name: str, send: Callable[[str], object]) -> None:
        """Write a file; make its folder first where there are folders."""
        at = self._at(name)
        with self._explained():
            try:
                send(at)
            except FileNotFoundError:
                # An object store has none, and would make a bucket instead.
                if self.address.split(":")[0].lower() in _OBJECT_STORES:
                    raise
                self._system.makedirs(at.rpartition("/")[0], exist_ok=True)
                send(at)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each store has errors of its own
            lines = str(error).splitlines() or [type(error).__name__]
            raise CorpusPlaceError(self.address, lines[0][:300].rstrip(".")) from error


@contextlib.contextmanager
def _scratch(
    beside: Path, explained: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[Path]:
    # Signals are put off, not masked: a mask holds for one thread, and polars has others.
    folder: Path | None = None
    try:
        with explained(), postponed():
            folder = scratch_beside(beside, "importing")
        yield folder
    finally:
        if folder is not None:
            with postponed():
                shutil.rmtree(folder, ignore_errors=True)


def manifest_names(sizes: Iterable[str], folder: str) -> list[str]:
    """List the JSON files of a folder, out of a listing of all files."""
    return sorted(
        name for name in sizes if name.startswith(f"{folder}/") and name.endswith(".json")
    )
