"""Damage to the bytes of any file."""

from __future__ import annotations


def flipped(random, raw, n=None, within=None):
    """Flip some bits, anywhere or within a stretch."""
    data = bytearray(raw)
    first, last = within or (0, len(data))
    if last <= first:
        return bytes(data)
    for _ in range(n or random.choice((1, 1, 2, 5, 30))):
        data[random.randrange(first, last)] ^= 1 << random.randrange(8)
    return bytes(data)


def replaced(random, raw):
    """Put other bytes in the place of some."""
    data = bytearray(raw)
    at = random.randrange(len(data) + 1)
    n = random.choice((1, 2, 4, 8, 100, 5000))
    fill = random.choice((b"\x00", b"\xff", b"\x80", None))
    data[at : at + n] = random.randbytes(n) if fill is None else fill * n
    return bytes(data[: max(len(raw), 1)])


def cut(random, raw):
    """Leave out the end."""
    return raw[: random.choice((random.randrange(len(raw) + 1), len(raw) - 1, len(raw) // 2))]


def appended(random, raw):
    """Put something behind the end."""
    more = random.choice((b"\x00" * 5000, random.randbytes(300), raw[: len(raw) // 3], b"\n", b"x"))
    return raw + more


def moved(random, raw):
    """Leave out, double or exchange a stretch."""
    first, last = sorted(random.randrange(len(raw) + 1) for _ in range(2))
    last = min(last, first + random.choice((1, 10, 200, 4096)))
    part = raw[first:last]
    pick = random.randrange(3)
    if pick == 0:
        return raw[:first] + raw[last:]
    if pick == 1:
        return raw[:last] + part + raw[last:]
    return raw[:first] + part[::-1] + raw[last:]


DAMAGES = (flipped, flipped, replaced, cut, appended, moved)


def damaged(random, raw):
    """Do one kind of damage; return its name and the bytes."""
    how = random.choice(DAMAGES)
    return how.__name__, how(random, raw)
