"""The only conversion factors, and the only place where numbers become text for people."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from nsan.errors import BadSizeError, BadTimeError

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_TIME_UNITS: Final = {
    "ns": 1,
    "nsec": 1,
    "us": NS_PER_US,
    "usec": NS_PER_US,
    "ms": NS_PER_MS,
    "msec": NS_PER_MS,
    "s": NS_PER_S,
    "sec": NS_PER_S,
    "m": 60 * NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
}
_LONGEST_TIME: Final = 80
_TIME_PART = re.compile(r"(?P<value>\d+(?:\.\d+)?)(?P<unit>[a-z]*)")


def parse_time(text: str) -> int:
    """Turn a time as people write it into nanoseconds.

    Parameters
    ----------
    text : str
        One or more numbers with units, largest first or not: ``"1s250ms"``, ``"1.5s"``, ``"40us"``.
        A bare number is nanoseconds, as in nsys. A leading minus is allowed: traces may start
        before the session does.

    Returns
    -------
    int
        Nanoseconds, rounded to the nearest.

    Raises
    ------
    BadTimeError
        If the text is not a time.

    Examples
    --------
    >>> parse_time("1s250ms"), parse_time("40us"), parse_time("-12")
    (1250000000, 40000, -12)
    """
    body = text.strip().lower()
    sign = -1 if body.startswith("-") else 1
    body = body.removeprefix("-").replace("µs", "us")
    if len(body) > _LONGEST_TIME:
        raise BadTimeError(text[:_LONGEST_TIME] + "...")
    total, position = 0, 0
    for part in _TIME_PART.finditer(body):
        unit = part["unit"] or "ns"
        if part.start() != position or unit not in _TIME_UNITS:
            raise BadTimeError(text)
        total += _scaled(part["value"], _TIME_UNITS[unit])
        position = part.end()
    if position != len(body) or not body:
        raise BadTimeError(text)
    return sign * total


def _scaled(value: str, factor: int) -> int:
    # Exact arithmetic: a float would move large times by some nanoseconds.
    return round(Fraction(value) * factor)


def parse_window(text: str) -> tuple[int | None, int | None]:
    """Turn ``A/B`` into a half-open window of nanoseconds; an empty side is open.

    Examples
    --------
    >>> parse_window("10ms/1s")
    (10000000, 1000000000)
    >>> parse_window("/40us")
    (None, 40000)
    """
    start, slash, end = text.partition("/")
    if not slash:
        raise BadTimeError(text)
    window = (
        parse_time(start) if start.strip() else None,
        parse_time(end) if end.strip() else None,
    )
    if window[0] is not None and window[1] is not None and window[1] < window[0]:
        raise BadTimeError(text)
    return window


def parse_size(text: str) -> int:
    """Turn a size as people write it into bytes: 64MiB, 1.5GiB, 4096; KB and MB mean KiB and MiB.

    Parameters
    ----------
    text : str
        Number and unit, of any case; without a unit it is bytes.

    Returns
    -------
    int
        Bytes, at least 1.

    Raises
    ------
    BadSizeError
        If the text is no size.

    Examples
    --------
    >>> parse_size("1.5MiB")
    1572864
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*(|[kmgt]i?b?|b)", text.strip().lower())
    if found is None:
        raise BadSizeError(text)
    power = "bkmgt".index((found[2] or "b")[0])
    size = int(Fraction(found[1]) * (KIB**power))
    if size < 1:
        raise BadSizeError(text)
    return size


def format_time(ns: float | None) -> str:
    """Write nanoseconds with the unit that fits.

    Examples
    --------
    >>> format_time(2_337_721), format_time(412), format_time(None)
    ('2.338 ms', '412 ns', '-')
    """
    if ns is None:
        return "-"
    return _scaled_text(ns, 1000, (("ns", 0), ("us", 3), ("ms", 3), ("s", 3)))


def _scaled_text(value: float, step: int, units: tuple[tuple[str, int], ...]) -> str:
    """Write a value in the first unit in which it rounds to less than one step."""
    text = ""
    for power, (unit, digits) in enumerate(units):
        number = f"{value / step**power:.{digits}f}"
        text = f"{number} {unit}"
        if abs(float(number)) < step:
            break
    return text


def format_bytes(n: float | None) -> str:
    """Write bytes with a binary unit.

    Examples
    --------
    >>> format_bytes(8_388_608), format_bytes(4096), format_bytes(12)
    ('8.00 MiB', '4.00 KiB', '12 B')
    """
    if n is None:
        return "-"
    return _scaled_text(n, KIB, (("B", 0), ("KiB", 2), ("MiB", 2), ("GiB", 2), ("TiB", 2)))


def format_rate(bytes_per_s: float | None) -> str:
    """Write a rate with a decimal unit, as link speeds are quoted.

    Examples
    --------
    >>> format_rate(12.8e9), format_rate(3.5e6)
    ('12.80 GB/s', '3.50 MB/s')
    """
    if bytes_per_s is None:
        return "-"
    return _scaled_text(bytes_per_s, 1000, (("B/s", 0), ("kB/s", 2), ("MB/s", 2), ("GB/s", 2)))


def format_count(n: int | None) -> str:
    """Write a count with thin grouping.

    Examples
    --------
    >>> format_count(3202621), format_count(None)
    ('3 202 621', '-')
    """
    return "-" if n is None else f"{n:,}".replace(",", " ")


def counted(n: int | None, one: str, many: str | None = None) -> str:
    """Write a count with its noun.

    Examples
    --------
    >>> counted(1, "kernel"), counted(3442, "kernel")
    ('1 kernel', '3 442 kernels')
    """
    return f"{format_count(n)} {one if n == 1 else many or one + 's'}"


def format_address(va: int | None) -> str | None:
    """Write an address as unsigned hexadecimal; never through a float.

    Examples
    --------
    >>> format_address(0x7FB4C4000000), format_address(-140737488355328)
    ('0x00007fb4c4000000', '0xffff800000000000')
    """
    return None if va is None else f"0x{va & 0xFFFF_FFFF_FFFF_FFFF:016x}"
