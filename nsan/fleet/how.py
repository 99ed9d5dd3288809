"""How the reports of a fleet are read: by which workers, and named by what."""

from __future__ import annotations

from dataclasses import dataclass

from nsan.errors import UsageError


@dataclass(frozen=True)
class How:
    """By whom reports are read, and how their names are understood.

    Attributes
    ----------
    workers : int or None
        Processes of this machine; None reads in this process.
    dask : str or None
        Address of the scheduler of a dask cluster, as ``tcp://host:8786``.
    pattern : str or None
        A regular expression with groups named run and rank, searched in the name of each report.
    """

    workers: int | None = None
    dask: str | None = None
    pattern: str | None = None

    def checked(self) -> How:
        """Return itself.

        Returns
        -------
        How
            The same.

        Raises
        ------
        UsageError
            If both kinds of workers are asked for.
        """
        if self.workers is not None and self.dask is not None:
            msg = (
                "--workers starts processes here, --dask uses a cluster that runs already: "
                "give one of both."
            )
            raise UsageError(msg)
        return self
