"""A corpus of reports: Hive-partitioned Parquet, and one JSON document per report.

``corpus.json``
    Makes the place a corpus.
``TABLE/run=RUN/rank=RANK/REPORT-STATE-NUMBER.parquet``
    Rows of one report, as its store holds them.
``reports/REPORT.json``
    What is known about a report, and its parts. It is written last and all at once, so that a report is
    there whole or not at all. Whoever reads through nsan reads the parts that these documents list.
``failures/REPORT.json``
    A report that could not be read, and why.

STATE is a digest of what was imported. Whoever imports the same report once more writes the same files, so
an import that was cut short is taken up by doing it again, and two imports at once do no harm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import nsan
from nsan.corpus_errors import BrokenCorpusError, NotACorpusError, UnreadableCorpusError
from nsan.errors import PlaceTakenError
from nsan.io.corpus_place import CorpusPlace, LocalPlace, manifest_names
from nsan.io.manifest import STORE_FORMAT, TABLE_NAMES, TOTALS_KEYS, Fingerprint, is_store
from nsan.io.probe import CORPUS_FILE

CORPUS_FORMAT: Final = 1
"""Raise it when the layout changes."""

REPORTS: Final = "reports"
FAILURES: Final = "failures"
NO_RANK: Final = "__HIVE_DEFAULT_PARTITION__"
"""How Hive writes a null into a path."""


@dataclass(frozen=True)
class Record:
    """One report of a corpus.

    Attributes
    ----------
    report : str
        Identifies it.
    run, rank, source : str, int or None, str
        As of a :class:`nsan.fleet.member.Member`.
    within : str
        Name of the folder that was given when it was imported; its source begins with it.
    fingerprint : Fingerprint
        Of what was imported.
    info, totals : dict
        As in the manifest of a store.
    tables : dict
        By table: ``n_rows``, and ``parts`` with the name of each file in the corpus and its bytes.
    leftover : list of str
        Parts of an earlier state, which go as soon as this document is written.
    base : str
        Digest of where the folder that was given lay: tells it from another one of that name.
    nsan_version : str
        Who wrote it.
    store_format : int
        Of the parts.
    """

    report: str
    run: str
    rank: int | None
    source: str
    within: str
    fingerprint: Fingerprint
    info: dict[str, Any]
    totals: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    leftover: list[str] = field(default_factory=list)
    base: str = ""
    nsan_version: str = nsan.__version__
    store_format: int = STORE_FORMAT

    @property
    def files(self) -> dict[str, int]:
        """All parts by name, with their bytes."""
        parts = (part for table in self.tables.values() for part in table["parts"])
        return {part["name"]: part["bytes"] for part in parts}

    @property
    def n_rows(self) -> int:
        """Rows of all tables."""
        return sum(table["n_rows"] for table in self.tables.values())

    def is_of(self, source: Fingerprint) -> bool:
        """Say whether it was made from this very file by this very nsan; the file may have moved."""
        moved = {**asdict(source), "place": self.fingerprint.place}
        made_by = self.nsan_version, self.store_format
        return asdict(self.fingerprint) == moved and made_by == (nsan.__version__, STORE_FORMAT)


@dataclass(frozen=True)
class FailedRecord:
    """A report of a corpus that could not be read.

    Attributes
    ----------
    report : str
        Identifies it.
    run, rank, source, within : str, int or None, str, str
        As of a :class:`Record`.
    reason : str
        One line: why.
    base : str
        As of a :class:`Record`.
    is_folder : bool
        It is a folder that could not be looked into.
    """

    report: str
    run: str
    rank: int | None
    source: str
    within: str
    reason: str
    base: str = ""
    is_folder: bool = False


def start_corpus(place: CorpusPlace) -> None:
    """Make a place a corpus, if it is none; where what makes it one is lost or damaged, write that again.

    Raises
    ------
    PlaceTakenError
        If something else is there.
    CorpusPlaceError
        If it cannot be written.
    """
    if CORPUS_FILE in place.read([CORPUS_FILE]):
        try:
            check_corpus(place)
        except UnreadableCorpusError:
            if not _has_reports(place):
                raise
        else:
            return
    elif _has_reports(place):
        pass
    elif isinstance(place, LocalPlace):
        _check_folder(place.folder)
    elif place.sizes():
        raise PlaceTakenError(Path(place.address), "has other files, and is no corpus")
    place.write(CORPUS_FILE, _json({"corpus_format": CORPUS_FORMAT, "written_by": "nsan"}))


def _has_reports(place: CorpusPlace) -> bool:
    """Say whether a report is listed that can be read."""
    documents = place.read(manifest_names(place.sizes(), REPORTS))
    return any(_is_record(data) for data in documents.values())


def _is_record(data: bytes) -> bool:
    try:
        return _record(data) is not None
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def _check_folder(folder: Path) -> None:
    if is_store(folder):
        raise PlaceTakenError(folder, "is the store of one report, and a corpus holds many")
    if folder.is_dir():
        if any(not each.name.startswith(".scratch.") for each in folder.iterdir()):
            raise PlaceTakenError(folder, "is a folder with other files, not a corpus")
    elif folder.exists():
        raise PlaceTakenError(folder, "is a file, and a corpus is a folder")


def check_corpus(place: CorpusPlace) -> None:
    """Check that a place holds a corpus of this format.

    Raises
    ------
    NotACorpusError, BrokenCorpusError
        If it does not.
    """
    found = place.read([CORPUS_FILE])
    if CORPUS_FILE not in found:
        raise NotACorpusError(place.address)
    try:
        written: Any = json.loads(found[CORPUS_FILE])["corpus_format"]
    except (ValueError, TypeError, KeyError) as error:
        raise UnreadableCorpusError(place.address) from error
    if written != CORPUS_FORMAT:
        raise BrokenCorpusError(place.address, "it was written by another version of nsan")


def read_records(
    place: CorpusPlace, sizes: Mapping[str, int]
) -> tuple[list[Record], list[FailedRecord], list[str]]:
    """Read what a corpus knows about its reports.

    Parameters
    ----------
    place : CorpusPlace
        The corpus.
    sizes : mapping of str to int
        Its files.

    Returns
    -------
    list of Record
        Reports that are whole and can be read by this nsan.
    list of FailedRecord
        Reports that could not be imported.
    list of str
        Documents of reports that cannot be used, and parts that they miss: one line each.
    """
    records, unusable = [], []
    for name, data in sorted(place.read(manifest_names(sizes, REPORTS)).items()):
        try:
            record = _record(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            unusable.append(f"{name} cannot be read ({error})")
            continue
        if record is None:
            unusable.append(f"{name} was written by another version of nsan")
            continue
        lacking = [part for part, size in record.files.items() if sizes.get(part) != size]
        if lacking:
            unusable.append(f"{lacking[0]} of {record.source} is missing or cut short")
            continue
        records.append(record)
    failures = []
    for data in place.read(manifest_names(sizes, FAILURES)).values():
        try:
            failures.append(FailedRecord(**json.loads(data)))
        except (ValueError, TypeError):
            continue  # it says nothing that the next import does not say again
    return records, failures, unusable


def _record(data: bytes) -> Record | None:
    content = json.loads(data)
    if content["store_format"] != STORE_FORMAT:
        return None
    record = Record(**{**content, "fingerprint": Fingerprint(**content["fingerprint"])})
    for key in TOTALS_KEYS:
        record.totals[key]
    for table in TABLE_NAMES:
        record.tables[table]["parts"]
    return record


def read_record(place: CorpusPlace, report: str) -> Record | None:
    """Read what a corpus knows about one report; None where it has nothing that can be used."""
    name = f"{REPORTS}/{report}.json"
    try:
        return _record(place.read([name])[name])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def write_record(place: CorpusPlace, record: Record) -> None:
    """Make a report present: its parts are there already; those of an earlier state go now."""
    place.write(f"{REPORTS}/{record.report}.json", _json(asdict(record)))
    place.remove([*record.leftover, f"{FAILURES}/{record.report}.json"])


def write_failure(place: CorpusPlace, failed: FailedRecord) -> None:
    """Keep why a report could not be imported."""
    place.write(f"{FAILURES}/{failed.report}.json", _json(asdict(failed)))


def drop_records(place: CorpusPlace, records: Iterable[Record | FailedRecord]) -> None:
    """Take reports out of a corpus: first what lists their parts, then those."""
    for record in records:
        place.remove([f"{REPORTS}/{record.report}.json", f"{FAILURES}/{record.report}.json"])
        if isinstance(record, Record):
            place.remove(list(record.files))


def put_tables(
    place: CorpusPlace, record: Record, store: Path, *, move: bool
) -> dict[str, dict[str, Any]]:
    """Put the parts of a store into a corpus.

    Parameters
    ----------
    place : CorpusPlace
        The corpus.
    record : Record
        Whose parts they are; its tables are those of the store's manifest.
    store : Path
        The store.
    move : bool
        It is not needed any more.

    Returns
    -------
    dict
        The tables for the record: names are those in the corpus.
    """
    stem = f"{record.report}-{_state(record)}"
    folder = hive_folder(record.run, record.rank)
    tables = {}
    for table, content in record.tables.items():
        parts = []
        for number, part in enumerate(content["parts"]):
            name = f"{table}/{folder}/{stem}-{number:05}.parquet"
            place.put(store / table / part["name"], name, move=move)
            parts.append({"name": name, "bytes": part["bytes"]})
        tables[table] = {"n_rows": content["n_rows"], "parts": parts}
    return tables


def _state(record: Record) -> str:
    """Digest what decides the bytes of the parts."""
    known = asdict(record.fingerprint) | {"place": ""}
    text = json.dumps([known, record.nsan_version, record.store_format], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def hive_folder(run: str, rank: int | None) -> str:
    """Name the partition of a run and a rank as Hive does.

    Examples
    --------
    >>> hive_folder("monday/train", 3), hive_folder("a b", None)
    ('run=monday%2Ftrain/rank=3', 'run=a%20b/rank=__HIVE_DEFAULT_PARTITION__')
    """
    # A run that is called like Hive's null is none.
    escaped = run.replace("_", "\0", 1) if run == NO_RANK else run
    named = quote(escaped, safe="").replace("%00", "%5F")
    return f"run={named}/rank={NO_RANK if rank is None else rank}"


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, allow_nan=False).encode()
