"""The sentences of the verdict: of which kind their figures are, and on which analyses they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from nsan.report.evidence import Evidence

TELLING: Final = 0.1
"""From this part on a wait or a share is worth a word: a choice of ours."""

KERNELS: Final = ("faults_by_kernel",)
"""The analysis that most sentences about kernels stand on."""


class Said(NamedTuple):
    """A sentence without its full stop, the kind of its figures, and the analyses that it stands on.

    A kind of "" has no figure; what stands on no analysis is from the summary.
    """

    text: str
    kind: str = "recorded"
    on: tuple[str, ...] = ()


def not_known(evidence: Evidence) -> str:
    """Say in a clause why it is not known what moved.

    Parameters
    ----------
    evidence : Evidence
        Without bytes that moved.

    Returns
    -------
    str
        As it follows a comma.
    """
    return {
        "recorded": "for sizes of migrations could not be read",
        "not_recorded": "for migrations were not recorded",
    }.get(
        evidence.answers.get("migrations", "unknown"),
        "and the capture does not say whether migrations were recorded",
    )


def capital(text: str) -> str:
    """Begin a sentence.

    Examples
    --------
    >>> capital("all of it")
    'All of it'
    """
    return text[0].upper() + text[1:]


def listed(parts: list[str]) -> str:
    """Put parts of a sentence together.

    Examples
    --------
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
