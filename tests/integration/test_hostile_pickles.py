"""Pickles that would run something, take all memory, or break their reader: refused, and nothing is run."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys

import pytest
import snapshots as s
from conftest import SOAK

import nsan
from nsan.errors import (
    NotASnapshotError,
    SnapshotError,
    UnsafeSnapshotError,
)
from nsan.io.torch_snapshot import child, limits, opcodes, reader
from nsan.io.torch_snapshot.refusal import RefusedError

MIB = s.MIB

_MEASURE = """
import json, resource, subprocess, sys
for path in json.loads(sys.argv[1]):
    with open(path, "rb") as file:
        done = subprocess.run(json.loads(sys.argv[2]), stdin=file, capture_output=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, done.stdout[8:100])
"""


def peak_mib(*paths):
    """The most memory that the reader's process takes for any of some files, and its last answer.

    A process of its own starts it: a child's peak is never below what its parent had.
    """
    command = [sys.executable, "-I", "-S", "-c", _MEASURE]
    told = [json.dumps([str(path) for path in paths]), json.dumps(reader._command())]
    done = subprocess.run([*command, *told], check=True, capture_output=True, text=True)
    peak, answer = done.stdout.split(maxsplit=1)
    return int(peak) / 1024, answer


@pytest.fixture
def refused(tmp_path):
    """Open bytes that must be refused; return the message."""

    def run(data, kind=UnsafeSnapshotError):
        path = tmp_path / "bad.pickle"
        path.write_bytes(bytes(data))
        with pytest.raises(kind) as error:
            nsan.open_snapshot(path)
        message = str(error.value)
        assert message.startswith("bad.pickle ")
        assert len(message) < 700
        assert all(line.isprintable() for line in message.split("\n"))
        return message

    return run


def hand(*parts, protocol=4):
    """A pickle of some opcodes."""
    return bytes(s.Opcodes(protocol).add(*parts, b".").data)


def string(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def running(command):
    """Pickles that run a command when a plain unpickler loads them, by the opcode that does it."""
    call = string(command) + b"\x85R"
    classic = b"(" + string(command)
    return {
        "GLOBAL and REDUCE": b"cos\nsystem\n" + call,
        "STACK_GLOBAL and REDUCE": string("os") + string("system") + b"\x93" + call,
        "STACK_GLOBAL by memo": b"".join(
            (string("os"), b"\x94", string("system"), b"\x94", b"00h\x00h\x01\x93", call)
        ),
        "INST": classic + b"ios\nsystem\n",
        "OBJ": b"(cos\nsystem\n" + string(command) + b"o",
        "NEWOBJ": b"csubprocess\nPopen\n(" + string(command) + b"NNNNNN" + b"\x88t\x81",
        "BUILD": b"cnsan\nNsan\n)R}" + string("x") + string(command) + b"sb",
        "in a setting": b"".join(
            (b"}", string("segments"), b"]s", string("x"), b"cos\nsystem\n", call, b"s")
        ),
        "in a frame": b"\x95" + struct.pack("<Q", 11 + len(call)) + b"cos\nsystem\n" + call,
    }


@pytest.mark.parametrize("name", running(""))
def test_nothing_is_run_that_a_pickle_asks_for(refused, tmp_path, name):
    marker = tmp_path / "was run"
    data = hand(running(f"touch '{marker}'")[name])
    assert "nothing in this file was run" in refused(data).replace("\n", " ").lower()
    assert not marker.exists()


@pytest.mark.parametrize("name", ["GLOBAL and REDUCE", "STACK_GLOBAL and REDUCE", "INST", "OBJ"])
def test_the_commands_of_these_tests_do_run_in_a_plain_unpickler(tmp_path, name):
    marker = tmp_path / "was run"
    pickle.loads(hand(running(f"touch '{marker}'")[name]))
    assert marker.exists()


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (b"cos\nsystem\n", "asks for the global 'os.system'"),
        (string("posix") + string("system") + b"\x93", "asks for the global 'posix.system'"),
        (b"(ios\nsystem\n", "asks for the global 'os.system'"),
        (b"c\x1b[31m\nev\xffil\n", "asks for the global '?[31m."),
        (b"c" + b"a" * 100_000, "aaa...'"),
        (b"N)R", "calls a function (REDUCE)"),
        (b"(No", "makes an object (OBJ)"),
        (b"N)\x81", "makes an object (NEWOBJ)"),
        (b"N)}\x92", "makes an object (NEWOBJ_EX)"),
        (b"}}b", "sets the state of an object (BUILD)"),
        (b"\x82\x01", "names a registered class (EXT1)"),
        (b"\x83\x01\x00", "names a registered class (EXT2)"),
        (b"\x84\x01\x00\x00\x00", "names a registered class (EXT4)"),
        (b"Pfile\n", "names an object outside the file (PERSID)"),
        (string("file") + b"Q", "names an object outside the file (BINPERSID)"),
        (b"\x97", "names a buffer outside the file"),
        (b"\x8f", "holds a set"),
        (b"\x96" + struct.pack("<Q", 10_000_000_000), "holds a bytearray"),
        (b"X" + struct.pack("<I", 4_000_000_000), "holds a text of 4000000000 bytes"),
        (b"\x8d" + struct.pack("<Q", 10_000_000_000), "holds a text of 10000000000 bytes"),
        (b"\x8e" + struct.pack("<Q", 1 << 63), "holds a text of 9223372036854775808 bytes"),
        (b"B" + struct.pack("<I", 2_000_000_000), "holds a text of 2000000000 bytes"),
        (b"\x8b" + struct.pack("<I", 2_000_000_000), "holds an integer of more than 255 bytes"),
        (b"\x8a\xff" + b"\x7f" * 255, "holds an integer of 255 bytes"),
        (b"]r" + struct.pack("<I", 1 << 31), "stores item number 2147483648 of a file that has"),
        (b"]r" + struct.pack("<I", 70_000), "stores item number 70000 of a file that has 9 bytes"),
        (b"]p99999999999\n", "an item of pickle protocol 0"),
        (b"I99999999999\n", "an item of pickle protocol 0"),
        (b"N2", "drops or doubles items"),
        (b"\x80\x04}", "begins a second pickle"),
    ],
)
def test_what_no_snapshot_holds_is_refused_before_it_is_loaded(refused, parts, named):
    message = refused(hand(parts))
    assert named in message
    with pytest.raises(RefusedError, match="byte"):
        opcodes.check(hand(parts))


def test_a_frame_longer_than_the_file_is_refused(refused):
    claim = hand(b"\x95" + struct.pack("<Q", 1 << 40), b"}")
    assert "claims 1099511627776 more bytes, and 2 follow" in refused(claim, SnapshotError)


def test_the_unpickler_itself_refuses_globals_too(tmp_path):
    path = tmp_path / "x"
    marker = tmp_path / "was run"
    for data in (hand(running(f"touch '{marker}'")["STACK_GLOBAL and REDUCE"]), hand(b"Pfile\n")):
        path.write_bytes(data)
        with path.open("rb") as file, pytest.raises(RefusedError, match=r"asks for|outside"):
            child.PlainUnpickler(file).load()
    assert not marker.exists()


def nested(opcode, n):
    """A container in a container in ...: ``n`` deep."""
    return b"]" * n + b"a" * (n - 1) if opcode == b"a" else b")" + opcode * n


def colliding(n):
    """A dict whose keys, pairs of numbers, all have one hash."""
    first, second, fifth = 11400714785074694791, 14029467366897019727, 2870177450012600261
    word = (1 << 64) - 1
    turned = (12345 * pow(first, -1, 1 << 64)) & word
    wanted = (turned >> 31 | turned << 33) & word
    back = pow(second, -1, 1 << 64)
    numbers, keys = random.Random(1), []
    while len(keys) < n:
        a = numbers.randrange(1 << 60)
        state = (fifth + a * second) & word
        state = (state << 31 | state >> 33) & word
        b = (wanted - state * first) * back & word
        if b < (1 << 61) - 1:
            keys.append((a, b))
    assert len({hash(key) for key in keys[:100]}) == 1
    number = struct.Struct("<BBQ").pack
    items = (number(0x8A, 8, a) + number(0x8A, 8, b) + b"\x86N" for a, b in keys)
    return hand(b"}(" + b"".join(items) + b"u")


def shared_lists(depth, width):
    """A list of lists of ... of which there are ten at each depth, all of them one: 10^depth items."""
    inner = b"]\x94"
    for level in range(depth):
        inner = b"](" + inner + (b"h" + bytes([level])) * (width - 1) + b"e\x94"
    return inner


def in_snapshot(key, value):
    return b"}(" + string("segments") + b"]" + string(key) + value + b"u"


N = 1_000_000
TRACE = b"](" + b"}" * 1000 + b"e\x94"
HEAVY = {
    "a list in a list a million times": (hand(nested(b"a", N)), NotASnapshotError),
    "a tuple in a tuple a million times": (hand(nested(b"\x85", N)), NotASnapshotError),
    "deep settings": (
        hand(in_snapshot("allocator_settings", b"}" + (string("a") + b"}") * N + b"s" * N)),
        None,
    ),
    "a deep key of a dict": (hand(b"}", nested(b"\x85", N), b"Ns"), SnapshotError),
    "a deep pool": (
        hand(in_snapshot("device_traces", b"]](}" + string("pool_id") + nested(b"\x85", N) + b"sea")),
        None,
    ),
    "a list that holds itself": (hand(b"]\x94h\x00a"), NotASnapshotError),
    "a dict that holds itself": (hand(in_snapshot("allocator_settings", b"}\x94" + string("a") + b"h\x00s")), None),
    "segments that hold themselves": (hand(b"}" + string("segments") + b"]\x94h\x00as"), NotASnapshotError),
    "a trace that holds itself": (hand(in_snapshot("device_traces", b"]\x94h\x00a")), NotASnapshotError),
    "frames that hold themselves": (
        hand(in_snapshot("device_traces", b"]]}" + string("frames") + b"]\x94h\x00asaa")),
        NotASnapshotError,
    ),
    "ten lists of ten lists of ...": (hand(shared_lists(60, 10)), NotASnapshotError),
    "the same in the history": (hand(in_snapshot("device_traces", shared_lists(60, 10))), NotASnapshotError),
    "one history a thousand times": (
        hand(b"}(" + string("x") + TRACE + string("segments") + b"]" + string("device_traces"), b"](" + b"h\x00" * 1000 + b"eu"),
        UnsafeSnapshotError,
    ),
    "the same blocks in each segment": (
        hand(
            b"}(" + string("x") + TRACE + string("y") + b"}(" + string("address") + b"K\x00",
            string("total_size") + b"K\x00" + string("blocks") + b"h\x00u\x94",
            string("segments") + b"](" + b"h\x01" * 1000 + b"eu",
        ),
        UnsafeSnapshotError,
    ),
    "one entry with many keys, a thousand times": (
        hand(
            b"}(" + string("x"),
            b"}(" + b"".join(string(f"k{i}") + b"N" for i in range(1000)) + b"u\x94",
            string("segments") + b"]" + string("device_traces") + b"](](" + b"h\x00" * 1000 + b"eeu",
        ),
        UnsafeSnapshotError,
    ),
    "settings of one dict of one dict of ...": (
        hand(
            b"}(" + string("x") + b"}(" + b"".join(string(f"k{i}") + b"N" for i in range(200)) + b"u\x94",
            string("y") + b"}(" + b"".join(string(f"k{i}") + b"h\x00" for i in range(200)) + b"u\x94",
            string("segments") + b"]" + string("allocator_settings"),
            b"}(" + b"".join(string(f"k{i}") + b"h\x01" for i in range(200)) + b"uu",
        ),
        UnsafeSnapshotError,
    ),
    "a number that is no item": (hand(b"h\x07"), SnapshotError),
    "an empty stack": (hand(b""), SnapshotError),
    "a mark too few": (hand(b"]Ne"), SnapshotError),
    "a key that cannot be one": (hand(b"}]Ns"), SnapshotError),
    "a text that is not UTF-8": (hand(b"\x8c\x02\xff\xff"), SnapshotError),
    "no opcode": (hand(b"\xf0"), SnapshotError),
    "a longer end": (hand(b"}") + b"and more", SnapshotError),
    "two pickles": (hand(b"}") * 2, SnapshotError),
}  # fmt: skip


@pytest.mark.parametrize("name", HEAVY)
def test_a_pickle_that_would_grow_or_recurse_is_refused_or_read(refused, tmp_path, name):
    data, kind = HEAVY[name]
    if kind is not None:
        assert refused(data, kind)
        return
    path = tmp_path / "odd.pickle"
    path.write_bytes(data)
    info = nsan.open_snapshot(path).info
    assert sum(info.odd_cells.values()) == 1


def test_memory_stays_in_proportion_to_the_file(tmp_path):
    paths = []
    for i, (data, _) in enumerate(HEAVY.values()):
        paths.append(tmp_path / f"{i}.pickle")
        paths[-1].write_bytes(data)
    for i, parts in enumerate(
        (b"]r" + struct.pack("<I", 1 << 31), b"\x8e" + struct.pack("<Q", 1 << 34))
    ):
        paths.append(tmp_path / f"claim{i}.pickle")
        paths[-1].write_bytes(hand(parts))
    largest = max(len(data) for data, _ in HEAVY.values())
    # An empty list takes one byte in a file, and 72 in memory, and 8 in the list that holds it.
    assert peak_mib(*paths)[0] < 40 + 150 * largest / MIB


def test_the_limit_of_memory_holds_where_the_check_of_opcodes_does_not(tmp_path):
    path = tmp_path / "dicts.pickle"
    path.write_bytes(hand(b"(" + b"}" * 6_000_000 + b"t"))
    peak, answer = peak_mib(path)
    assert '"refused": "memory"' in answer
    assert peak < 300 + 33 * path.stat().st_size / MIB


def test_keys_of_one_hash_end_by_the_limit_of_time(refused):
    assert "takes far longer to read than" in refused(colliding(16_000))


def test_unpickling_has_a_time_of_its_own(monkeypatch):
    """Keys of one hash cost their time before any of them is seen."""
    spent = []
    monkeypatch.setattr(child, "_loaded", lambda _: spent.append("load") or [])
    child.read(
        pickle.dumps([]),
        before_loading=lambda: spent.append("before"),
        after_loading=lambda: spent.append("after"),
    )
    assert spent == ["before", "load", "after"]
    for n in (1 << 10, 5 << 20, 100 << 20):
        assert limits.loading_seconds(n) < limits.allowed_seconds(n) / 1.9


def test_the_child_holds_unpickling_to_its_own_time(tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import sys; sys.path.append(sys.argv[1])\n"
        "from nsan.io.torch_snapshot import child\n"
        "from nsan.io.torch_snapshot import limits\n"
        "limits.allowed_seconds = child.allowed_seconds = lambda _: 60\n"
        "child.main()\n"
    )
    path = tmp_path / "keys.pickle"
    path.write_bytes(colliding(16_000))
    command = [sys.executable, "-I", "-S", str(probe), str(s.REPOSITORY)]
    with path.open("rb") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, check=False)
    assert done.returncode == -signal.SIGPROF


def test_a_file_of_holes_is_refused_at_its_first_bytes(tmp_path):
    path = tmp_path / "holes.pickle"
    for head, kind in (
        (b"", NotASnapshotError),
        (b"\x80\x04", SnapshotError),
        (b"\x80\x04X\xff\xff\xff\x7f", UnsafeSnapshotError),
        (b"\x1f\x8b", SnapshotError),
    ):
        path.write_bytes(head)
        os.truncate(path, 2 << 30)
        with pytest.raises(kind):
            nsan.open_snapshot(path)
    path.write_bytes(b"\x80\x04X\xff\xff\xff\x7f")
    os.truncate(path, 2 << 30)
    assert peak_mib(path)[0] < 100


def test_gzip_data_that_unpacks_to_far_more_is_refused(tmp_path):
    path = tmp_path / "bomb.pickle.gz"
    path.write_bytes(gzip.compress(b"\x80\x04]" + bytes(70 * MIB) + b".", compresslevel=1))
    peak, answer = peak_mib(path)
    assert "unpacks to more than 64 MiB" in answer
    assert peak < 200


@pytest.mark.parametrize("name", ["kivi", "flexgen_oom"])
def test_a_file_that_is_cut_anywhere_is_named_as_such(refused, name):
    whole = s.real_bytes(name)
    places = random.Random(6).sample(range(3, len(whole)), 200 if SOAK else 6)
    for n in [2, 3, len(whole) - 1, *places]:
        message = refused(whole[:n], SnapshotError)
        assert "cut short" in message or "claims" in message or n < 3


def test_a_file_with_wrong_bytes_is_read_or_refused_and_nothing_else():
    """Any change of any byte gives a snapshot or a refusal; what goes wrong is foreseen."""
    whole = pickle.dumps(s.snapshot((2, 12)), protocol=4)
    choose = random.Random(7)
    outcomes = set()
    for _ in range(5000 if SOAK else 400):
        data = bytearray(whole)
        for _ in range(choose.randrange(1, 4)):
            data[choose.randrange(2, len(data))] = choose.randrange(256)
        try:
            child.read(bytes(data))
            outcomes.add("read")
        except RefusedError as error:
            outcomes.add(error.kind)
    assert outcomes >= {"read", "damaged", "unsafe", "other"}


def test_the_child_can_do_nothing_but_answer(tmp_path):
    """A pickle that got control would find no file to open or write and no program to start."""
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import sys; sys.path.append(sys.argv[1])\n"
        "from nsan.io.torch_snapshot import child\n"
        "def read(data, **how):\n"
        "    found = []\n"
        "    for name, act in (('open', lambda: open(sys.argv[2], 'wb')),\n"
        "                      ('read', lambda: open(sys.argv[0])),\n"
        "                      ('listen', lambda: __import__('_socket').socket())):\n"
        "        try: act(); found.append(name)\n"
        "        except (OSError, ImportError): pass\n"
        "    return [repr(found).encode()]\n"
        "child.read = read\n"
        "child.main()\n"
    )
    home, marker = str(s.REPOSITORY), tmp_path / "was made"
    path = s.write(tmp_path / "s.pickle", s.snapshot())
    with path.open("rb") as file:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(probe), home, str(marker)],
            stdin=file, capture_output=True, check=True,
        )  # fmt: skip
    assert done.stdout == b"[]"
    assert not marker.exists()


def test_a_child_that_cannot_start_or_answer_is_named(tmp_path, monkeypatch):
    path = s.write(tmp_path / "s.pickle", s.snapshot())
    for program, words in (
        ("import os; os.kill(os.getpid(), 9)", "ended with signal 9"),
        ("import sys; sys.exit('no \\x1b[31m luck')", "ended with status 1: no  [31m luck"),
        ("pass", "ended with status 0: no words"),
    ):
        monkeypatch.setattr(reader, "_PROGRAM", program)
        with pytest.raises(SnapshotError) as error:
            nsan.open_snapshot(path)
        assert words in str(error.value)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(SnapshotError, match="Python cannot be started"):
        nsan.open_snapshot(path)


def test_a_child_that_hangs_is_stopped(tmp_path, monkeypatch):
    path = s.write(tmp_path / "s.pickle", s.snapshot())
    monkeypatch.setattr(reader, "_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(reader, "patience_seconds", lambda _: 0.3)
    with pytest.raises(SnapshotError, match="was not read within 0 s, and reading was stopped"):
        nsan.open_snapshot(path)


def test_the_child_imports_nothing_but_the_standard_library():
    code = (
        "import sys; sys.path.append(sys.argv[1]); import nsan.io.torch_snapshot.child; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(s.REPOSITORY)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['__main__', 'nsan']"
