"""What the caching allocator changes, in sentences: runs compared, pair by pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsan.pca_document import all_notes
from nsan.pca_text import sentences_of
from nsan.report.blocks import Point, Points, Text
from nsan.report.shown import Blocks


def pca_answer(document: Mapping[str, Any]) -> Blocks:
    """Say in a sentence for each pair of runs what the caching allocator changes, how sure that is, and why.

    Parameters
    ----------
    document : mapping
        Of :func:`nsan.pca_document.pca_document`.

    Returns
    -------
    Blocks
        A list, and what must be known of it.
    """
    kind = document["kinds"]["pairs"]
    points = tuple(Point("", sentence, kind) for sentence in sentences_of(document))
    return Blocks([Points(points), *(Text(note, "note") for note in all_notes(document))])
