"""Tables that a program of the microbenchmark wrote beside its capture: other cells, lines and bytes."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path

import bench_tables
import exports as x

from fuzz import damage, export_oracle, values
from fuzz.asking import BrokenError, WrongError
from fuzz.export_compare import differences
from fuzz.made import Made, look_closer_at_trace, shown, summarised
from fuzz.sql_cells import opened

look_closer = look_closer_at_trace
_TABLES = ("run.json", "allocations.csv", "phases.csv", "expected.csv")


def make(random, folder):
    """Write a capture of some allocations, and the tables of its program; then damage the tables."""
    export, rows, at = x.Export(), [], 1000
    for i in range(random.choice((1, 3, 8))):
        va, size = x.VA + random.randrange(4) * x.MIB, random.choice((4096, 8192))
        export.add(
            x.MEMORY, x.memory_event(at, va, size), x.memory_event(at + 500, va, size, free=True)
        )
        rows.append(bench_tables.row(f"array {i}", va, size, at + 3, free_ns=at + 501))
        at += 1000
    export.add(x.MEMCPY, x.migration(50, 60, 4096))
    export.add("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": bench_tables.START_UTC_NS})
    path = export.write(folder / "a.sqlite")
    place = bench_tables.write(folder / "a.truth", rows)
    _write_more(random, place, len(rows))
    done = [_changed(random, place) for _ in range(random.choice((0, 1, 1, 1, 2)))]
    return Made(path, ", ".join(done))


def _write_more(random, place, n):
    phases = [
        "phase,name,iteration,start_ns,end_ns",
        *(f"{i},phase {i},{i or ''},{i},{i + 5}" for i in range(3)),
    ]
    lines = ["phase,allocation,direction,least_bytes,most_bytes"]
    lines += [f"{random.randrange(3)},{i},htod,0,{4096 * i}" for i in range(n)]
    (place / "phases.csv").write_text("\n".join(phases) + "\n")
    (place / "expected.csv").write_text("\n".join(lines) + "\n")


def _changed(random, place):
    name = random.choice((*_TABLES, "run.json", "allocations.csv", "allocations.csv"))
    file = place / name
    if not file.exists():
        return "nothing"
    raw, pick = file.read_bytes(), random.random()
    if pick < 0.25:
        how, raw = damage.damaged(random, raw)
    elif pick < 0.3:
        file.unlink()
        return f"no {name}"
    elif name == "run.json":
        how, raw = _other_fact(random, raw)
    else:
        how, raw = _other_cell(random, raw)
    file.write_bytes(raw)
    return f"{name} {how}"


def _other_fact(random, raw):
    try:
        facts = json.loads(raw)
    except ValueError:
        return "as it was", raw
    if not isinstance(facts, dict):
        return "as it was", raw
    key = random.choice(
        (
            "pid",
            "start_utc_ns",
            "nsan_microbench",
            "program",
            values.text(random).encode("utf-8", "replace").decode(),
        )
    )
    facts[key] = random.choice(
        (
            values.integer(random),
            random.choice(values.REALS),
            None,
            True,
            [[]],
            {"a": 1},
            10**400,
            "1",
            values.text(random, long=0),
        )
    )
    how = f"{key[:20]} = {str(facts[key])[:20]!r}"
    text = json.dumps(facts)
    if random.random() < 0.1:
        text = text.replace("{", '{"pid": 7, ' if random.random() < 0.5 else "[" * 3000 + "{", 1)
    return how, text.encode("utf-8", "replace") + b"\n"


_CELLS = (b"", b"-1", b"1.5", b"0x10", b"1e3", b" 7", b"7 ", b"\xd9\xa3", b"99999999999999999999999", b"18446744073709551615", b"9223372036854775807",
          b'"', b'"a""b"', b'"a\nb"', b'"a,b"', b"managed", b"device", b"\x00", b"caf\xe9", b"\xe2\x80\xa8", b"array 0", b"htod", b"0" * 30)  # fmt: skip


def _other_cell(random, raw):
    lines = raw.split(b"\n")
    at = random.randrange(len(lines))
    pick = random.random()
    if pick < 0.15:
        lines[at : at + 1] = [lines[at]] * random.randrange(3)
        return "lines", b"\n".join(lines)
    if pick < 0.25:
        end = random.choice((b"\r\n", b"\r", b"\n\n"))
        return f"ends {end!r}", end.join(lines)
    cells = lines[at].split(b",")
    cell = random.randrange(len(cells))
    text = values.encoded(values.text(random)) if random.random() < 0.3 else random.choice(_CELLS)
    cells[cell] = text
    lines[at] = b",".join(cells)
    return f"line {at + 1} cell {cell} = {text[:20]!r}", b"\n".join(lines)


def _facts(place):
    """Read run.json as its description says; None where it is not so."""
    try:
        facts = json.loads(
            (place / "run.json").read_bytes().decode("utf-8", "replace"), parse_constant=_not_json
        )
    except (OSError, ValueError, RecursionError):
        return None
    if (
        not isinstance(facts, dict)
        or facts.get("nsan_microbench") != 1
        or type(facts.get("pid")) is not int
    ):
        return None
    start = facts.get("start_utc_ns")
    return (
        facts
        if 0 < facts["pid"] < 1 << 32 and (type(start) is not int or 0 <= start < 1 << 62)
        else None
    )


def _not_json(word):
    raise ValueError(word)


def _table(place, name, columns):
    """Read a table with the csv module; None where it is not whole."""
    try:
        text = (place / name).read_bytes().decode("utf-8", "replace")
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (OSError, csv.Error):
        return None
    if not text.endswith("\n") or not rows or tuple(rows[0][: len(columns)]) != columns:
        return None
    return [dict(zip(columns, row, strict=False)) for row in rows[1:] if row]


def known(place):
    """Give what the tables say of each allocation: kind, address, size and name; None where they cannot be used."""
    rows = _table(place, "allocations.csv", bench_tables.COLUMNS)
    if _facts(place) is None or rows is None:
        return None
    found = []
    for row in rows:
        numbers = [
            _number(row.get(column), most)
            for column, most in (("va", 1 << 64), ("bytes", 1 << 63), ("alloc_ns", 1 << 62))
        ]
        if None in numbers or row.get("kind") not in {"managed", "device"}:
            return None
        found.append((row["kind"], *numbers[:2], row["name"]))
    return found


def _number(text, end):
    if (
        text is None
        or not text.isascii()
        or not text.isdigit()
        or len(text) > len(str(end - 1))
        or int(text) >= end
    ):
        return None
    return int(text)


def check(made, stores, note_time):
    """Summarise the capture: its totals do not depend on the tables, and names are those of the tables or none."""
    found = summarised(made, stores)
    note_time()
    if found is None:
        raise WrongError("the capture is refused for what lies beside it")
    document, manifest = found
    try:
        with opened(made.path) as connection:
            wrong = differences(export_oracle.Export(connection), document, manifest)
    except sqlite3.Error as error:
        raise WrongError(f"sqlite3 says {error}") from error
    wrong += _wrong_names(made, manifest)
    wrong += _wrong_tables(made.path.with_name("a.truth"))
    if wrong:
        raise WrongError("; ".join(wrong[:5]))
    shown(made)
    return "right"


def _wrong_names(made, manifest):
    import nsan

    place = made.path.with_name("a.truth")
    rows, warnings = known(place), manifest["info"]["warnings"]
    named = (
        nsan.open_trace(made.path)
        .allocations.collect()
        .select("kind", "va", "bytes", "name")
        .rows()
    )
    there = any((place / name).exists() for name in _TABLES[:2])
    if any("\n" in text for text in warnings):
        return ["a warning of several lines"]
    if rows is None:
        wrong = (
            ["named out of damaged tables"] if any(name is not None for *_, name in named) else []
        )
        return wrong + (
            ["damage is not said"]
            if there and not any("is not used" in text for text in warnings)
            else []
        )
    if any("is not used" in text for text in warnings):
        return [f"whole tables are not used: {warnings}"]
    if not made.what and any(name is None for *_, name in named):
        return ["no name out of whole tables"]
    return [f"{row} is in no table" for row in named if row[3] is not None and row not in rows]


def _wrong_tables(place: Path):
    """Read the other tables as the benchmark does."""
    from nsan.errors import NsanError
    from nsan.io.bench_truth import read_expected, read_phases

    try:
        read_phases(place)
        read_expected(place, 3, 8)
    except NsanError as error:
        return [] if len(str(error).splitlines()) == 1 else ["a message of several lines"]
    except Exception as error:
        raise BrokenError(f"{type(error).__name__}: {error}") from error
    return []
