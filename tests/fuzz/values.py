"""Values that no program writes, and somebody's file holds: numbers, texts, bytes."""

from __future__ import annotations

MAX, MIN = (1 << 63) - 1, -(1 << 63)
INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    4095,
    4096,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    1 << 32,
    1 << 40,
    (1 << 40) + 1,
    1 << 46,
    (1 << 46) + 1,
    1 << 47,
    1 << 61,
    (1 << 61) + 1,
    -(1 << 61),
    -(1 << 61) - 1,
    1 << 62,
    MAX,
    MAX - 1,
    MIN,
    MIN + 1,
)
REALS = (
    0.0,
    -0.0,
    0.5,
    1.5,
    -1.5,
    1e300,
    -1e300,
    5e-324,
    float("inf"),
    float("-inf"),
    2.0**53,
    2.0**63,
)
TEXTS = (
    "",
    " ",
    "0",
    "12",
    "-1",
    "4096",
    "1e3",
    "0x10",
    "NULL",
    "nan",
    "\x00",
    "a\x00b",
    "\x1b[31mred\x1b[0m\x07",
    "\x9b31m",
    "\r\nforged: line\r",
    "\u202egnp.exe\u202c\u2066",
    "\ufeff\u200b\u2028\u2029\x85",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>&amp;\"'`",
    "'; DROP TABLE StringIds; --",
    "$(touch x) `touch x` ${HOME}",
    "| a | b |\n|---|---|",
    "=cmd|' /C calc'!A0",
    "../../../../etc/passwd",
    "C:\\Users\\alice\\a.exe",
    "/home/alice/" + "x" * 300,
    "%s%n%d{}{0}{name}",
    "\U0001f525" * 3,
    "e\u0301" * 40,
    "\udc80",
)
"""The last is no text that UTF-8 can hold: :func:`encoded` makes the bytes of it that files have."""

RAW = (
    b"\xff\xfe",
    b"\x80abc",
    b"caf\xe9",
    b"\xed\xa0\x80\xed\xb0\x80",
    b"\xc0\xaf",
    b"\xf4\x90\x80\x80",
    b"a\x00\xff",
)
"""Bytes that are not UTF-8."""

LONG = 1 << 20
"""Characters of a long text; few inputs have one."""


def integer(random):
    """Draw a number: one of the above, one beside it, or any of 64 bits."""
    pick = random.random()
    if pick < 0.7:
        return random.choice(INTEGERS)
    if pick < 0.9:
        return max(MIN, min(MAX, random.choice(INTEGERS) + random.randrange(-3, 4)))
    return random.getrandbits(64) - (1 << 63)


def text(random, *, long=0.02):
    """Draw a text; rarely a very long one."""
    if random.random() < long:
        return random.choice(("x", "\U0001f525", "<", "/")) * (LONG // 4)
    return random.choice(TEXTS)


def encoded(value):
    """Write a text as the bytes that a file has, whatever it holds."""
    return value.encode("utf-8", "surrogateescape")


def cell(random):
    """Draw the cell of a database: of any type."""
    pick = random.random()
    if pick < 0.35:
        return integer(random)
    if pick < 0.5:
        return random.choice(REALS)
    if pick < 0.7:
        return text(random).encode("utf-8", "replace").decode()
    if pick < 0.85:
        return random.choice(RAW) if random.random() < 0.5 else encoded(text(random))
    return None
