"""What a file is that is no snapshot, by its first bytes. Standard library only."""

from __future__ import annotations

from typing import Final

from nsan.io.torch_snapshot.opcodes import PROTOCOLS

PROBE_BYTES: Final = 4096
GZIP_MAGIC: Final = b"\x1f\x8b"

_OLD_CHECKPOINT: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_WITH_TRACE: Final = "`nsan summary FILE`, and with the snapshot of its run by `nsan allocator TRACE --snapshot FILE`."
_MAGIC: Final = (
    (b"SQLite format 3\0", "a SQLite database", f"Open an nsys export with {_WITH_TRACE}"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes (a checkpoint?)", ""),
    (_OLD_CHECKPOINT, "a checkpoint of torch.save", ""),
    (b"PAR1", "a Parquet file", ""),
    (b"ARROW1", "an Arrow file", ""),
    (b"\x7fELF", "a program or a library", ""),
    (b"\x28\xb5\x2f\xfd", "zstandard data", "Unpack it first: `unzstd FILE`."),
    (b"BZh", "bzip2 data", "Unpack it first: `bunzip2 FILE`."),
    (b"\xfd7zXZ\0", "xz data", "Unpack it first: `unxz FILE`."),
)
_REPORT_MARKS: Final = (b"NVIDIA Tegra Profiler Report", b"Nsight Systems Stream")
_OLD_PICKLES: Final = (b"(dp", b"(lp", b"}q\x00", b"]q\x00")
_PROTO: Final = 0x80
_AGAIN: Final = "Write it again: `pickle.dump(snapshot, file, protocol=4)`."


def what_is(head: bytes) -> tuple[str, str] | None:
    """Say what a file is, by its beginning.

    Parameters
    ----------
    head : bytes
        The first bytes; more than a hundred tell most.

    Returns
    -------
    tuple of (str, str), or None
        What it is and what helps (or an empty text); None where it begins as a pickle that may be
        read, or as gzip data.
    """
    if not head:
        return "an empty file", "The program probably ended before it was written: record it again."
    for magic, what, advice in _MAGIC:
        if head.startswith(magic):
            return what, advice
    if any(mark in head for mark in _REPORT_MARKS):
        return "an nsys report", f"Open it with {_WITH_TRACE}"
    if head.startswith(_OLD_PICKLES):
        return "a pickle of protocol 0 or 1", _AGAIN
    if head[0] == _PROTO and len(head) > 1:
        known = head[1] in PROTOCOLS
        what = f"a pickle of protocol {head[1]}, which nsan does not know"
        return None if known else (what, _AGAIN)
    return None if head.startswith(GZIP_MAGIC) else _text_or_data(head)


def _text_or_data(head: bytes) -> tuple[str, str]:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] in {b"{", b"["}:
        return "JSON", ""
    if text[:1] == b"<":
        return ("HTML" if b"<html" in head.lower() else "XML or HTML"), ""
    if not head.strip(b"\0"):
        return "a file that begins with zeros", "It was not written to its end: record it again."
    try:
        head.decode()
    except UnicodeDecodeError:
        return "no pickle", ""
    return "a text", ""
