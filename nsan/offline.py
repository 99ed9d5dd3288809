"""What a page that asks nobody for anything is made of: data as text, and scripts that are named by hash."""

from __future__ import annotations

import base64
import hashlib
import zlib


def script_hash(text: str) -> str:
    """Name a script or a style for the policy of a page, which allows no other.

    Parameters
    ----------
    text : str
        What stands in its element.

    Returns
    -------
    str
        A source expression, with its quotes.
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def packed(data: bytes) -> str:
    """Deflate data, and write them as text.

    Parameters
    ----------
    data : bytes
        Anything.

    Returns
    -------
    str
        Base64 of what zlib made of them; ``DecompressionStream("deflate")`` reads it.
    """
    return base64.b64encode(zlib.compress(data, 9)).decode()
