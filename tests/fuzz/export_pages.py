"""Damage to the file of a database: its header, pages, cells, free pages, and logs beside it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from fuzz import damage

_HEADER = 100


def page_bytes(raw):
    """Return the size of a page."""
    found = int.from_bytes(raw[16:18], "big")
    return 65536 if found == 1 else max(found, 512)


def header(random, raw):
    """Bits of the first hundred bytes, the magic text mostly spared."""
    return damage.flipped(random, raw, within=(16, _HEADER) if random.random() < 0.9 else (0, 16))


def page_head(random, raw):
    """The head of a page and its cell pointers."""
    size = page_bytes(raw)
    at = random.randrange(max(1, len(raw) // size)) * size + (
        _HEADER if random.random() < 0.1 else 0
    )
    return damage.flipped(random, raw, within=(at, min(len(raw), at + random.choice((8, 12, 40)))))


def cells(random, raw):
    """Bytes near the end of a page, where cells are."""
    size = page_bytes(raw)
    end = random.randrange(1, max(2, len(raw) // size + 1)) * size
    return damage.flipped(
        random, raw, within=(max(0, end - random.choice((60, 400, 2000))), min(len(raw), end))
    )


def _pages(random, raw):
    size = page_bytes(raw)
    n = max(1, len(raw) // size)
    return size, random.randrange(n), random.randrange(n)


def page_zeroed(random, raw):
    """A page of zeros or of noise."""
    size, at, _ = _pages(random, raw)
    fill = random.choice((bytes(size), b"\xff" * size, random.randbytes(size)))
    return raw[: at * size] + fill + raw[(at + 1) * size :]


def page_copied(random, raw):
    """A page in the place of another."""
    size, one, other = _pages(random, raw)
    page = raw[other * size : (other + 1) * size]
    return raw[: one * size] + page + raw[(one + 1) * size :]


def pages_exchanged(random, raw):
    """Two pages in the place of each other."""
    size, one, other = _pages(random, raw)
    one, other = min(one, other), max(one, other)
    if one == other:
        return raw
    parts = [raw[at * size : (at + 1) * size] for at in range(-(-len(raw) // size))]
    parts[one], parts[other] = parts[other], parts[one]
    return b"".join(parts)


_BYTES = (
    header,
    page_head,
    page_head,
    cells,
    cells,
    cells,
    page_zeroed,
    page_copied,
    pages_exchanged,
)


def free_pages(random, path):
    """Free some pages, then damage the list of them."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE filler (a)")
        connection.executemany("INSERT INTO filler VALUES (?)", [(bytes(3000),)] * 20)
        connection.execute("DROP TABLE filler")
    raw = bytearray(path.read_bytes())
    trunk = int.from_bytes(raw[32:36], "big")
    if trunk:
        at = (trunk - 1) * page_bytes(raw)
        raw = bytearray(damage.flipped(random, bytes(raw), within=(at, at + 40)))
    path.write_bytes(bytes(raw))
    return "free_pages"


def log_beside(random, path):
    """A log of another database, of noise, or a damaged one of its own."""
    suffix = random.choice(("-wal", "-wal", "-journal"))
    log = Path(f"{path}{suffix}")
    pick = random.randrange(3)
    if pick == 0 or suffix == "-journal":
        head = b"\x37\x7f\x06\x82" if suffix == "-wal" else b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
        log.write_bytes(
            (head if random.random() < 0.7 else b"")
            + random.randbytes(random.choice((10, 28, 600, 5000)))
        )
        return "log_beside"
    own = _written_log(path)
    log.write_bytes(own if pick == 1 else damage.damaged(random, own)[1])
    return "log_beside"


def _written_log(path):
    """Change a copy of a database in WAL mode; return its log. The database itself learns of the mode."""
    copy = path.with_name("writer")
    copy.write_bytes(path.read_bytes())
    try:
        with closing(sqlite3.connect(copy, isolation_level=None)) as writer:
            writer.execute("PRAGMA journal_mode = WAL")
            writer.execute("PRAGMA wal_autocheckpoint = 0")
            writer.execute("CREATE TABLE in_log (a)")
            writer.execute("INSERT INTO in_log VALUES (1)")
            log = Path(f"{copy}-wal").read_bytes()
            path.write_bytes(copy.read_bytes())
    finally:
        for each in (copy, Path(f"{copy}-wal"), Path(f"{copy}-shm")):
            each.unlink(missing_ok=True)
    return log


def change(random, path):
    """Damage the file of a database; return the names of what was done."""
    pick = random.random()
    if pick < 0.08:
        return [free_pages(random, path)]
    if pick < 0.16:
        return [log_beside(random, path)]
    raw = path.read_bytes()
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if random.random() < 0.25:
            name, raw = damage.damaged(random, raw)
        else:
            how = random.choice(_BYTES)
            name, raw = how.__name__, how(random, raw)
        done.append(name)
    path.write_bytes(raw)
    return done
