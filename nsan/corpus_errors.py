"""What can go wrong with a fleet and its corpus, in words that carry the way out; see :mod:`nsan.errors`."""

from __future__ import annotations

from nsan.errors import NsanError, UsageError


class NotACorpusError(NsanError):
    """A place holds no corpus."""

    def __init__(self, place: str) -> None:
        self.place = place
        super().__init__(
            f"{place} holds no corpus: there is no corpus.json. "
            f"Make one of many reports: `nsan import FOLDER -o {place}`."
        )


class BrokenCorpusError(NsanError):
    """A corpus is not whole, or was written by another nsan."""

    def __init__(self, place: str, detail: str) -> None:
        self.place, self.detail = place, detail
        super().__init__(
            f"The corpus {place} cannot be used: {detail}.\n"
            f"Import its reports once more: `nsan import FOLDER -o {place}` makes only what is missing."
        )


class UnreadableCorpusError(BrokenCorpusError):
    """What makes a place a corpus is damaged; its reports may be whole."""

    def __init__(self, place: str) -> None:
        super().__init__(place, "its corpus.json cannot be read")


class CorpusPlaceError(NsanError):
    """The place of a corpus cannot be read or written."""

    def __init__(self, place: str, reason: str) -> None:
        self.place, self.reason = place, reason
        super().__init__(
            f"{place} cannot be used for a corpus: {reason}.\n"
            "What is in it stays as it is. Check the address, and that you may read and write there."
        )


class GivenBesideError(UsageError):
    """A corpus was given where folders of reports are meant."""

    def __init__(self, place: str) -> None:
        self.place = place
        super().__init__(
            f"{place} is a corpus already, and a corpus is read alone: `nsan summary {place}`. To have its reports "
            "beside others, import all their folders into one: `nsan import FOLDER FOLDER -o CORPUS`."
        )


class UnseenCorpusError(NsanError):
    """A worker does not see the corpus that it is to write to."""

    def __init__(self, place: str) -> None:
        self.place = place
        super().__init__(
            f"The worker does not see the corpus {place}. "
            "Put it on a file system that all workers share, or into an object store."
        )


class ClusterError(NsanError):
    """A dask cluster cannot be used, or is gone."""

    def __init__(self, address: str, reason: str) -> None:
        self.address, self.reason = address, reason
        super().__init__(f"The dask cluster {address} cannot be used: {reason}")
