"""The text and CSV of a GPU trace: lines that are cut, doubled, hostile; other bytes; damaged gzip data."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter

from fuzz import damage, nvprof_files, values
from fuzz.asking import WrongError
from fuzz.made import Made, look_closer_at_trace, shown, summarised

look_closer = look_closer_at_trace
_COUNTED = {
    "gpu_faults": r"\[Unified Memory GPU page faults\]",
    "cpu_faults": r"\[Unified Memory CPU page faults\]",
    "migrations": r"\[Unified Memory Memcpy (?:HtoD|DtoH|DtoD)\]",
    "driver_events": r"\[Unified Memory (?:page thrash|page throttle|remote map)\]",
}
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_PAGE = 4096


def make(random, folder):
    """Make a trace; change its lines or its bytes, and pack some."""
    raw = nvprof_files.printed(random)
    done, pick = [], random.random()
    if pick < 0.75:
        raw = _changed(random, raw, done)
    if pick >= 0.65:
        name, raw = damage.damaged(random, raw)
        done.append(name)
    path = folder / "a.log"
    if random.random() < 0.3:
        raw = gzip.compress(raw, compresslevel=1, mtime=0)
        if random.random() < 0.4:
            name, raw = damage.damaged(random, raw)
            done.append(f"gzip {name}")
        path = folder / "a.log.gz"
    path.write_bytes(raw)
    return Made(path, ", ".join(done))


def _changed(random, raw, done):
    lines = raw.split(b"\n")
    for _ in range(random.choice((1, 1, 2, 6))):
        how = random.choice(
            (
                _other_cell,
                _other_cell,
                _other_cell,
                _line_cut,
                _line_doubled,
                _line_left_out,
                _line_more,
                _ends,
                _exchanged,
            )
        )
        at = random.randrange(len(lines))
        lines = how(random, lines, at)
        done.append(how.__name__[1:])
    return b"\n".join(lines)


_NUMBERS = (
    b"0",
    b"-1",
    b"1e9",
    b"99999999999999999999",
    b"nan",
    b"inf",
    b"1.",
    b".5",
    b"18446744073709551615",
    b"1,5",
    b"0x",
    b"4.0000XB",
    b"1e308GB",
    b"9007199254740993",
)


def _other_cell(random, lines, at):
    words = re.split(rb"(\s{2,}|,)", lines[at])
    cell = random.randrange(len(words))
    text = random.choice(
        (
            *_NUMBERS,
            values.encoded(values.text(random)),
            b"",
            b"-",
            b"0x" + b"f" * 16,
            b"0x" + b"f" * 17,
        )
    )
    words[cell] = text.replace(b"\n", b" ")
    return [*lines[:at], b"".join(words), *lines[at + 1 :]]


def _line_cut(random, lines, at):
    return [*lines[:at], lines[at][: random.randrange(len(lines[at]) + 1)], *lines[at + 1 :]]


def _line_doubled(random, lines, at):
    return [*lines[: at + 1], *lines[at : at + random.choice((1, 5, 50))], *lines[at + 1 :]]


def _line_left_out(random, lines, at):
    return [*lines[:at], *lines[at + random.choice((1, 3, 20)) :]]


def _line_more(random, lines, at):
    more = random.choice((b"", b"   ", b"==1== Warning: /home/alice/x lost 5 records", b"\x1b[2J", b"x" * 5000, b"[Unified Memory GPU page faults]",
                          b"==77== Profiling result:", values.encoded(values.text(random)).replace(b"\n", b" "), b"y" * (1 << 20)))  # fmt: skip
    return [*lines[:at], more, *lines[at:]]


def _ends(random, lines, _):
    end = random.choice((b"\r", b"\x00", b"\x0b", b"\xc2\x85", b" "))
    return [line + end for line in lines]


def _exchanged(random, lines, at):
    other = random.randrange(len(lines))
    lines = list(lines)
    lines[at], lines[other] = lines[other], lines[at]
    return lines


def _plainly_read(path):
    """Unpack a trace; None where that fails."""
    raw = path.read_bytes()
    if not raw.startswith(b"\x1f\x8b"):
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error):
        return None


def _rows(raw):
    """Give the lines that name a row of Unified Memory at their end, as nvprof prints them."""
    for line in raw.split("\n"):
        for table, pattern in _COUNTED.items():
            if re.match(r'\s*"?[0-9]', line) and re.search(pattern + r'"?\s*$', line):
                yield table, line


def expected(raw):
    """Count the rows of Unified Memory, and add up the sizes of those that are printed with one."""
    counts, n_bytes = Counter(), 0
    unit = re.search(r"^(?:m?s|us),(?:[^,\n]*,)*?([KMG]?B),", raw, re.MULTILINE)
    for table, line in _rows(raw):
        counts[table] += 1
        if table == "migrations":
            size = re.search(r"([0-9.]+)([KMG]?B)[\s,]+\"?0x", line)
            if size is None or unit is not None:
                return counts, None
            n_bytes += round(float(size[1]) * _UNITS[size[2]] / _PAGE) * _PAGE
    return counts, n_bytes


def check(made, stores, note_time):
    """Summarise it, and compare with patterns over its lines."""
    found = summarised(made, stores)
    note_time()
    raw = _plainly_read(made.path)
    if found is None:
        return "refused" if raw is None else "refused*"
    if raw is None:
        raise WrongError("it was read, and its gzip data is damaged")
    document, manifest = found
    counts, n_bytes = expected(raw.decode("utf-8", "replace"))
    got = {table: manifest["totals"]["counts"][table] for table in _COUNTED}
    if got != {table: counts[table] for table in _COUNTED}:
        raise WrongError(f"rows {got}, and patterns find {dict(counts)}")
    if n_bytes is not None and counts["migrations"] and document["migrations"]["bytes"] != n_bytes:
        raise WrongError(
            f"{document['migrations']['bytes']} bytes migrated, and the printed sizes add up to {n_bytes}"
        )
    shown(made)
    return "right"
