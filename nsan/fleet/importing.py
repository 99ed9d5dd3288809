"""Many reports into one corpus: what is there already is kept, what failed is named, the rest is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nsan.corpus_errors import UnseenCorpusError
from nsan.errors import NsanError, listed
from nsan.fleet.finding import Found, Search, Unreadable, in_order, search, unmatched
from nsan.fleet.gathering import no_reports, one_file_twice
from nsan.fleet.how import How
from nsan.fleet.member import Failure
from nsan.fleet.running import performed
from nsan.fleet.task import identity, import_task, same_file
from nsan.io.corpus import (
    FailedRecord,
    Record,
    drop_records,
    read_records,
    start_corpus,
    write_failure,
    write_record,
)
from nsan.io.corpus_place import CorpusPlace, place_at
from nsan.io.manifest import TABLE_NAMES, place_of


@dataclass(frozen=True)
class Options:
    """How a corpus is made.

    Attributes
    ----------
    overwrite : bool
        Import again what is current, and replace reports of other folders that have the same name.
    keep_paths : bool
        Keep whole paths of programs and source files.
    prune : bool
        Remove reports that are no longer in the folders that were given, and files that belong to none.
    """

    overwrite: bool = False
    keep_paths: bool = False
    prune: bool = False


@dataclass
class Imported:
    """What an import of many reports did.

    Attributes
    ----------
    place : str
        The corpus.
    n_made, n_kept : int
        Reports that were imported now, and that were there and current.
    n_rows, n_bytes : int
        Of the reports that were imported now.
    failures : list of Failure
        Reports that could not be imported, in order.
    gone : list of str
        Reports of the corpus that the folders do not have any more.
    removed : list of str
        Those of them that were removed.
    alike : list of str
        Runs and ranks that several reports have: one line each.
    twice : list of str
        Reports that are one file twice: one line each.
    unmatched : list of str
        Names that the pattern does not match.
    """

    place: str
    n_made: int = 0
    n_kept: int = 0
    n_rows: int = 0
    n_bytes: int = 0
    failures: list[Failure] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)


Tell = Callable[[str, str | None, int], None]
"""Takes the name of a report that is done, why it failed if it did, and how many there are."""


def import_fleet(
    paths: Sequence[Path],
    place: str | Path,
    *,
    how: How | None = None,
    options: Options | None = None,
    tell: Tell | None = None,
) -> Imported:
    """Import the reports of folders into a corpus.

    Parameters
    ----------
    paths : sequence of Path
        Folders, single captures and stores.
    place : str or Path
        The corpus: a local folder or a URL. It is made, or taken up where an earlier import ended.
    how : How, optional
        By which workers, and how names are understood.
    options : Options, optional
        What is replaced, kept and removed.
    tell : callable, optional
        Called for each report that is done, with why it failed if it did.

    Returns
    -------
    Imported
        What was done; a report that cannot be read is among its failures, and so is a folder.

    Raises
    ------
    NsanError
        If there is no report, the place cannot be used, or the workers cannot.
    """
    how, options = how or How(), options or Options()
    there = search(paths, how.pattern)
    found = there.found
    if not found and not there.unreadable:
        raise no_reports(paths)
    at = place_at(place)
    start_corpus(at)
    sizes = at.sizes()
    records, failed, _ = read_records(at, sizes)
    at.remove([name for record in records for name in record.leftover if name in sizes])
    known = {record.report: record for record in records}
    done = _Import(at, known, tell, len(found))
    todo = [each for each in found if options.overwrite or not done.keeps(each, options)]
    about = {"keep_paths": options.keep_paths, "overwrite": options.overwrite}
    by_report = {each.report: each for each in todo}
    tasks = [import_task(each, at.location, **about) for each in todo]
    with closing(performed(tasks, how)) as results:
        for result in results:
            done.note(result, by_report[result["report"]])
    done.note_unreadable(there.unreadable)
    done.drop_renamed(found)
    done.clear_up(there, failed, prune=options.prune)
    return done.result(unmatched(found, how.pattern))


class _Import:
    """An import under way: what is known about each report, and what becomes of it."""

    def __init__(
        self, place: CorpusPlace, known: dict[str, Record], tell: Tell | None, n: int
    ) -> None:
        self.place = place
        self.known = known
        self.done = Imported(place.address)
        self.who = {key: (record.run, record.rank, record.source) for key, record in known.items()}
        self.same = {key: same_file(record.fingerprint) for key, record in known.items()}
        self._tell = tell or (lambda _name, _reason, _total: None)
        self._n = n
        self.made: set[str] = set()

    def keeps(self, found: Found, options: Options) -> bool:
        """Say whether a report is in the corpus as it is now."""
        record = self.known.get(found.report)
        if record is None:
            return False
        try:
            current = record.is_of(identity(found.path, keep_paths=options.keep_paths))
        except NsanError:
            return False  # its import says why
        named = found.named.settled(record.info.get("rank"))
        same = (record.run, record.rank, record.source, record.within)
        if not current or same != (named.run, named.rank, found.source, found.within):
            return False
        if record.base != found.base:  # the folder was moved, or is another one with the same file
            source = replace(record.fingerprint, place=place_of(found.path))
            record = replace(record, base=found.base, fingerprint=source)
            write_record(self.place, record)
            self.known[found.report] = record
        self.done.n_kept += 1
        self._tell(found.source, None, self._n)
        return True

    def note(self, result: dict[str, Any], found: Found) -> None:
        """Keep what became of a report."""
        who = result["run"], result["rank"], result["source"]
        if "unseen" in result:
            raise UnseenCorpusError(self.place.address)
        if "reason" in result:
            self.done.failures.append(Failure(*who, result["reason"]))
            reason = result["reason"]
            failed = FailedRecord(found.report, *who, found.within, reason, found.base)
            write_failure(self.place, failed)
        else:
            self.who[found.report] = who
            self.same[found.report] = result["same"]
            self.made.add(found.report)
            self.done.n_made += 1
            self.done.n_rows += result["n_rows"]
            self.done.n_bytes += result["bytes"]
        self._tell(found.source, result.get("reason"), self._n)

    def note_unreadable(self, folders: Sequence[Unreadable]) -> None:
        """Keep which folders could not be looked into."""
        for each in folders:
            why = each.failure
            self.done.failures.append(why)
            who = why.run, why.rank, why.source, each.within, why.reason
            write_failure(self.place, FailedRecord(each.report, *who, each.base, is_folder=True))

    def drop_renamed(self, found: Sequence[Found]) -> None:
        """Take out what was imported now from the same file under another name."""
        here = {each.report for each in found}
        places = {place_of(each.path) for each in found if each.report in self.made}
        twice = [
            record
            for key, record in self.known.items()
            if key not in here and record.fingerprint.place in places
        ]
        drop_records(self.place, twice)
        for record in twice:
            del self.known[record.report], self.who[record.report], self.same[record.report]

    def clear_up(self, there: Search, failed: Sequence[FailedRecord], *, prune: bool) -> None:
        """Find what the folders do not have any more; remove it, and what belongs to nothing."""
        before: list[Record | FailedRecord] = [*self.known.values(), *failed]
        of_these = [each for each in before if (each.within, each.base) in there.folders]
        seen: list[Found | Unreadable] = [*there.found, *there.unreadable]
        here = {each.report for each in seen}
        closed = tuple(f"{each.failure.source}/" for each in there.unreadable)
        gone = [each for each in of_these if each.report not in here]
        # A folder that can be read again is no report that is gone; nobody knows what a closed one has.
        drop_records(self.place, [each for each in gone if _is_folder(each)])
        gone = [e for e in gone if not _is_folder(e) and not e.source.startswith(closed)]
        self.done.gone = sorted({each.source for each in gone})
        if not prune:
            return
        drop_records(self.place, gone)
        for each in gone:
            self.who.pop(each.report, None)
            self.same.pop(each.report, None)
        self.done.removed, self.done.gone = self.done.gone, []
        _drop_strays(self.place)

    def result(self, unmatched_names: list[str]) -> Imported:
        """Return what was done."""
        by_place: dict[tuple[str, int | None], list[str]] = {}
        for run, rank, source in self.who.values():
            by_place.setdefault((run, rank), []).append(source)
        self.done.alike = [
            f"{run}, {'no rank' if rank is None else f'rank {rank}'}: {listed(sorted(sources), limit=3)}"
            for (run, rank), sources in sorted(by_place.items(), key=lambda each: str(each[0]))
            if len(sources) > 1
        ]
        files = ((same, self.who[key][2]) for key, same in self.same.items())
        self.done.twice = one_file_twice(files)
        self.done.failures.sort(key=lambda each: in_order(each.run, each.rank, each.source))
        self.done.unmatched = unmatched_names
        return self.done


def _is_folder(each: Record | FailedRecord) -> bool:
    return isinstance(each, FailedRecord) and each.is_folder


def _drop_strays(place: CorpusPlace) -> None:
    """Remove parts that no report lists."""
    sizes = place.sizes()
    records, _, unusable = read_records(place, sizes)
    if unusable:
        return  # what it lists is not known
    listed_parts = {name for record in records for name in record.files}
    place.remove([n for n in sizes if n.split("/")[0] in TABLE_NAMES and n not in listed_parts])
