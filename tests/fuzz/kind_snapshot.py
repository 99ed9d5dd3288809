"""Memory snapshots of PyTorch: other values, other shapes, other bytes, damaged gzip data."""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import pickle
import random as randoms
from collections import Counter

import snapshots as s

from fuzz import damage, values
from fuzz.asking import WrongError, ask
from fuzz.made import Made

_SMALL = ("flexgen_opt1.3b", "flexgen_oom", "kivi")
_BY = (
    "utilization",
    "timeline",
    "segment",
    "held",
    "va-block",
    "tensor",
    "frame",
    "oom",
    "stitching",
    "settings",
    "replay",
)
_FULL = 1 << 64


def make(random, folder):
    """Make a snapshot; change its content, its bytes, or both."""
    content = _base(random)
    pick, done = random.random(), []
    if pick < 0.8:
        done += _changed(random, content)
    protocol = random.choice((2, 3, 3, 4, 4, 4, 4, 4, 4, 5, 5, random.randrange(6)))
    try:
        raw = pickle.dumps(content, protocol=protocol)
    except (RecursionError, ValueError):
        raw = pickle.dumps(s.snapshot(), protocol=protocol)
    if pick >= 0.75:
        name, raw = damage.damaged(random, raw)
        done.append(f"pickle {name}")
    path = folder / "s.pickle"
    if random.random() < 0.25:
        raw = gzip.compress(raw, compresslevel=1, mtime=0)
        if random.random() < 0.3:
            name, raw = damage.damaged(random, raw)
            done.append(f"gzip {name}")
        path = folder / "s.pickle.gz"
    path.write_bytes(raw)
    return Made(path, ", ".join(done))


def _base(random):
    if random.random() < 0.15:
        return pickle.loads(s.real_bytes(random.choice(_SMALL)))
    found = s.snapshot(random.choice(s.VERSIONS))
    if random.random() < 0.1:
        return found["segments"]
    if random.random() < 0.4:
        found["device_traces"][0] *= random.choice((2, 40))
    return found


def _places(content):
    """Every place of a value: the container and the key or number in it."""
    waiting, seen = [content], set()
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])


def _drawn(random, places):
    """Draw a place, mostly of one number or text: a snapshot with another shape is none."""
    for _ in range(8):
        holder, key = random.choice(places)
        plain = isinstance(holder, dict) and not isinstance(holder.get(key), dict | list)
        if plain and key not in {"filename", "line"}:
            break
    return holder, key


def _changed(random, content):
    """Change values of a snapshot in place; return how."""
    places, done = list(_places(content)), []
    if not places:
        return ["empty"]
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        holder, key = _drawn(random, places)
        pick = random.random()
        if pick < 0.65:
            value = _value(random)
            done.append(f"{str(key)[:20]} = {type(value).__name__}")
            holder[key] = value
        elif pick < 0.75 and isinstance(holder, dict):
            holder.pop(key, None)
            done.append(f"no {str(key)[:20]}")
            places = list(_places(content)) or places
        elif pick < 0.85:
            other, its = random.choice(places)
            if its in other if isinstance(other, dict) else its < len(other):
                holder[key] = other[its]
                done.append(f"{str(key)[:20]} = that of {str(its)[:20]}")
        elif pick < 0.92 and isinstance(holder, list):
            holder.append(_value(random))
            done.append("one more")
        elif isinstance(holder, dict):
            holder[random.choice((7, None, "", "\x1b[31m", (1, 2), values.text(random)))] = _value(
                random
            )
            done.append("a key more")
        if isinstance(holder, list) and key >= len(holder):
            places = list(_places(content))
    return done


_HUGE = (1 << 64, (1 << 64) - 1, 1 << 70, -(1 << 70), 1 << 2000, 1 << 48)
_ODD = (True, False, None, b"", b"\xff\x00", 1j, frozenset({1}))
_SHAPES = ([], {}, (), [{}], [[]], [None], {"a": {"b": [1]}}, (1, "2"), ((0, 0), 1))


def _value(random):
    draw = random.choices(
        (
            values.integer,
            lambda r: r.choice(_HUGE),
            lambda r: r.choice((*values.REALS, float("nan"))),
            values.text,
            lambda r: r.choice(_ODD),
            lambda r: copy.deepcopy(r.choice(_SHAPES)),
            _deep,
            _loop,
        ),
        (45, 10, 10, 15, 5, 7, 4, 4),
    )[0]
    return draw(random)


def _deep(random):
    """A container in a container in ..."""
    nested = []
    for _ in range(random.choice((3, 60, 600))):
        nested = [nested] if random.random() < 0.5 else {"frames": nested, "blocks": nested}
    return nested


def _loop(random):
    """A container that holds itself."""
    loop = random.choice(([], {}))
    if isinstance(loop, list):
        loop.append(loop)
    else:
        loop["blocks"] = loop
    return loop


class _Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}")


def plainly_read(path):
    """Load a snapshot with Python's own unpickler, held to plain data."""
    raw = path.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        raw = gzip.decompress(raw)
    return _Plain(io.BytesIO(raw)).load()


def _whole(value):
    """Read a whole number of 64 bits; None if it is none."""
    if type(value) is float and math.isfinite(value) and value == int(value):
        value = int(value)
    return value if type(value) is int and values.MIN <= value <= values.MAX else None


def _possible(row, size_key):
    """Say whether a machine can have this segment or block."""
    size, va = row.get(size_key), row.get("address")
    if type(size) in {int, float} and size > 1 << 47:
        return False
    if type(va) is float and math.isfinite(va) and va == int(va):
        va = int(va)
    if type(va) is not int or not values.MIN <= va < _FULL:
        return True
    number = _whole(size)
    known = number if number is not None and 0 <= number <= 1 << 47 else 0
    return va % _FULL + known <= _FULL


def expected(content):
    """By GPU: what its segments and blocks add up to."""
    segments = content if type(content) is list else content["segments"]
    found = {}
    for segment in segments:
        device = segment.get("device")
        if type(device) in {int, float} and not 0 <= device < 128:
            continue
        if not _possible(segment, "total_size"):
            continue
        sums = found.setdefault(_whole(device) or 0, Counter())
        sums["n_segments"] += 1
        sums["reserved_bytes"] += _whole(segment["total_size"])
        for block in segment.get("blocks", []):
            if not _possible(block, "size"):
                continue
            size, state = _whole(block["size"]), block.get("state")
            sums["n_blocks"] += 1
            if state == "active_allocated":
                sums["allocated_bytes"] += size
                sums["n_allocated_blocks"] += 1
            elif state in ("active_pending_free", "active_awaiting_free"):
                sums["pending_bytes"] += size
                sums["n_pending_blocks"] += 1
            elif state == "inactive":
                sums["cached_bytes"] += size
                sums["n_cached_blocks"] += 1
            else:
                sums["n_other_blocks"] += 1
            if state != "inactive":
                sums["active_bytes"] += size
    return found


_SUMS = ("n_segments", "n_blocks", "reserved_bytes", "allocated_bytes", "pending_bytes", "cached_bytes", "active_bytes",
         "n_allocated_blocks", "n_pending_blocks", "n_cached_blocks", "n_other_blocks")  # fmt: skip


def check(made, _stores, note_time):
    """Ask for the state, and add up what Python's own unpickler finds."""
    answer = ask("allocator", made.path, "--by", "pool", "--json")
    note_time()
    if answer.is_refusal:
        return "refused*" if "pickle " not in made.what and "gzip " not in made.what else "refused"
    content = plainly_read(made.path)
    rows = {row["device_id"]: row for row in json.loads(answer.out)["rows"] if row["pool"] == "all"}
    right = expected(content)
    if set(rows) != set(right):
        raise WrongError(f"GPUs {sorted(rows)}, and a plain reading has {sorted(right)}")
    wrong = [
        f"GPU {device} {name}: {rows[device][name]}, and a plain reading has {sums[name]}"
        for device, sums in right.items()
        for name in _SUMS
        if (rows[device][name] or 0) != sums[name]
    ]
    if wrong:
        raise WrongError("; ".join(wrong[:5]))
    return "right"


def look_closer(made, _stores, turn):
    """Ask for the first answer about the allocator, and one more analysis."""
    random = randoms.Random(turn)
    ask("allocator", made.path)
    ask("allocator", made.path, "--by", random.choice(_BY))
