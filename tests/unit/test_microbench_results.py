"""What a device check brings home is data from another machine: it decides nothing about where things are written."""

from __future__ import annotations

import io
import lzma
import tarfile
import tracemalloc
from pathlib import Path

import pytest

import nsan
from nsan.errors import InputMissingError
from nsan.microbench.checking import row_rule
from nsan.microbench.device_cases import cases
from nsan.microbench.device_errors import ResultsError
from nsan.microbench.results import unpack
from nsan.totals import totals

MODEL = Path(__file__).parents[2] / "sample_data" / "model"
HEAD = "case\tstatus\talone\trecorded\tseconds_alone\tseconds_nsys\tstream_bytes\treason\n"
FILES = {
    "results/status.tsv": HEAD
    + "signature\tok\t0\t0\t0.250\t1.500\t1234\t\n"
    + "stream\ttimed_out\t124\t\t60.000\t\t\tit did not end\n",
    "results/cases.tsv": "signature\tuvm_bench\t8\tno\t--pattern signature --bytes 8MiB\n",
    "results/machine.txt": "gpu.name\tSome GPU\ndriver\t580.1\n",
    "results/switches": "--trace=cuda,nvtx\n--sample=none\n",
    "results/signature.truth/run.json": "{}",
}


def tar_of(files, *, mode="w"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in files.items():
            entry = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(content, tarfile.TarInfo) else content.encode()
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def special(name, kind, target=""):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def put(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "mode"),
    [("results.tar.xz", "w:xz"), ("results.tar.gz", "w:gz"), ("results.tar", "w")],
)
def test_an_archive_is_read_however_it_is_compressed(tmp_path, empty, name, mode):
    found = unpack([put(tmp_path, name, tar_of(FILES, mode=mode))], empty)
    assert found.machine == {"gpu.name": "Some GPU", "driver": "580.1"}
    assert found.switches == ("--trace=cuda,nvtx", "--sample=none")
    first, second = found.cases
    assert (first.name, first.status, first.exit_alone, first.exit_recorded) == (
        "signature",
        "ok",
        0,
        0,
    )
    assert (first.seconds_alone, first.seconds_nsys) == (0.25, 1.5)
    assert first.command == "uvm_bench --pattern signature --bytes 8MiB"
    assert (second.status, second.exit_recorded, second.seconds_nsys) == ("timed_out", None, None)
    assert second.reason == "it did not end"
    assert (empty / "results" / "signature.truth" / "run.json").read_text() == "{}"


def parts_of(tmp_path, n):
    data = tar_of(FILES, mode="w:xz")
    size = -(-len(data) // n)
    folder = tmp_path / "parts"
    folder.mkdir()
    return [
        put(folder, f"results.tar.xz.part-a{chr(97 + at)}", data[at * size : (at + 1) * size])
        for at in range(n)
    ]


def test_parts_are_joined_in_their_order_whatever_the_order_they_are_given_in(tmp_path, empty):
    parts = parts_of(tmp_path, 5)
    assert len(unpack([parts[3], parts[0], parts[4], parts[2], parts[1]], empty).cases) == 2


def test_a_folder_stands_for_the_archive_in_it(tmp_path, empty):
    folder = parts_of(tmp_path, 3)[0].parent
    (folder / "notes.txt").write_text("of mine")
    assert len(unpack([folder], empty).cases) == 2


def test_a_missing_part_is_named(tmp_path, empty):
    parts = parts_of(tmp_path, 4)
    with pytest.raises(ResultsError, match="part-ac is missing"):
        unpack([parts[0], parts[1], parts[3]], empty)


def test_a_missing_last_part_is_noticed(tmp_path, empty):
    with pytest.raises(ResultsError, match="not all of it is here"):
        unpack(parts_of(tmp_path, 4)[:3], empty)


def test_parts_of_two_checks_are_not_mixed(tmp_path, empty):
    parts = parts_of(tmp_path, 2)
    other = put(tmp_path, "other.tar.xz.part-ab", b"")
    with pytest.raises(ResultsError, match="several archives"):
        unpack([parts[0], other], empty)
    with pytest.raises(ResultsError, match="given twice"):
        unpack([parts[0], parts[1], parts[1]], empty)


@pytest.mark.parametrize(
    "member",
    [
        {"../outside": "x"},
        {"/etc/outside": "x"},
        {"results/../../outside": "x"},
        {"results/.hidden": "x"},
        {"results/a/b/c": "x"},
        {"elsewhere/a": "x"},
        {"results": "a file where the folder belongs"},
        {"link": special("results/link", tarfile.SYMTYPE, "/etc/passwd")},
        {"hard": special("results/hard", tarfile.LNKTYPE, "results/status.tsv")},
        {"device": special("results/device", tarfile.CHRTYPE)},
        {"pipe": special("results/pipe", tarfile.FIFOTYPE)},
    ],
    ids=lambda member: next(iter(member)),
)
def test_what_no_check_writes_is_refused_and_nothing_lies_outside(tmp_path, empty, member):
    path = put(tmp_path, "results.tar", tar_of(member | FILES))
    with pytest.raises(ResultsError, match="which"):
        unpack([path], empty)
    assert not (tmp_path / "outside").exists()
    assert not [each for each in empty.rglob("*") if each.is_symlink()]
    assert {each.name for each in tmp_path.iterdir()} == {"empty", "results.tar"}


def twice(*names):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"no archive at all", "damaged"),
        (tar_of(FILES, mode="w:xz")[:-200], "damaged"),
        (lzma.compress(b"not a tar inside"), "damaged"),
        (tar_of({"results/machine.txt": "a\tb\n"}), "holds no results/status.tsv"),
        (tar_of(FILES | {"results/status.tsv": "case\tfate\n"}), "not that of this version"),
        (
            tar_of(FILES | {"results/status.tsv": HEAD + ("a\tok" + "\t" * 6 + "\n") * 2}),
            "'a' twice",
        ),
        (
            tar_of(FILES | {"results/status.tsv": HEAD + "check.json\tok" + "\t" * 6 + "\n"}),
            "called 'check.json'",
        ),
        (tar_of(FILES | {"results/machine.txt": "a" * (5 << 20)}), "machine.txt is far larger"),
        (twice("results/signature.log", "results/signature.log"), "signature.log' twice"),
        (twice("results/signature.log", "results/signature.log/a"), "signature.log/a' twice"),
        (twice("results/signature.log/a", "results/signature.log"), "signature.log' twice"),
        (tar_of(FILES | {"results/status.tsv": HEAD + "../a\tok" + "\t" * 6 + "\n"}), "cannot be"),
    ],
)
def test_a_damaged_archive_says_what_is_wrong_and_what_to_bring(tmp_path, empty, data, said):
    with pytest.raises(ResultsError, match=said) as caught:
        unpack([put(tmp_path, "results.tar", data)], empty)
    assert "Bring home again" in str(caught.value)


BAD = {
    "too few cells": "bad\tok",
    "no number": "bad\tok\tx" + "\t" * 5,
    "no time": "bad\tok\t0\t0\tnan\t1.0\t\t",
    "a time without end": "bad\tok\t0\t0\t1.0\tinf\t\t",
    "a time that ran back": "bad\tok\t0\t0\t-1.0\t1.0\t\t",
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD)
def test_a_case_whose_line_cannot_be_read_does_not_lose_the_others(tmp_path, empty, line):
    table = f"{FILES['results/status.tsv']}{line}\n"
    path = put(tmp_path, "results.tar", tar_of(FILES | {"results/status.tsv": table}))
    first, second, bad = unpack([path], empty).cases
    assert (first.status, second.status) == ("ok", "timed_out")
    assert (bad.name, bad.status, bad.exit_alone, bad.seconds_alone) == (
        *("bad", "unreadable"),
        *(None, None),
    )
    assert "cannot be read" in bad.reason


@pytest.mark.parametrize("odd", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", '"'])
def test_whatever_a_program_says_last_no_line_is_parted_by_it(tmp_path, empty, odd):
    table = HEAD + f"signature\tfailed\t1\t1\t0.1\t0.2\t5\thalf{odd}done\n"
    files = FILES | {"results/status.tsv": table, "results/machine.txt": f"gpu.name\ta{odd}b\n"}
    found = unpack([put(tmp_path, "results.tar", tar_of(files))], empty)
    assert [case.reason for case in found.cases] == [f"half{odd}done"]
    assert found.machine == {"gpu.name": f"a{odd}b"}


def bomb(kind, size):
    """Compress an archive whose first header says that a header of so many zeros comes."""
    entry = tarfile.TarInfo("results/a")
    entry.type, entry.size = kind, size
    packer = lzma.LZMACompressor(preset=0)
    data = packer.compress(entry.tobuf(tarfile.USTAR_FORMAT))
    for _ in range(size >> 20):
        data += packer.compress(bytes(1 << 20))
    return data + packer.flush()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_says_it_is_huge_is_not_read(tmp_path, empty, kind):
    path = put(tmp_path, "results.tar.xz", bomb(kind, 64 << 20))
    tracemalloc.start()
    with pytest.raises(ResultsError, match="a header larger than any"):
        unpack([path], empty)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_headers_of_headers_without_end_are_damage(tmp_path, empty):
    out = io.BytesIO()
    for _ in range(5000):
        entry = tarfile.TarInfo("x")
        entry.type, entry.size = tarfile.XHDTYPE, 0
        out.write(entry.tobuf(tarfile.USTAR_FORMAT))
    with pytest.raises(ResultsError):
        unpack([put(tmp_path, "results.tar", out.getvalue())], empty)


def test_a_path_without_anything_is_said_to_be_so(tmp_path, empty):
    with pytest.raises(InputMissingError):
        unpack([tmp_path / "results.tar"], empty)
    with pytest.raises(ResultsError, match="this folder holds no"):
        unpack([empty], empty)


def test_every_case_has_its_own_name_and_small_managed_memory():
    found = cases()
    assert len({case.name for case in found}) == len(found) == 10
    assert [case.name for case in found if case.oversubscribes] == [found[-1].name]
    assert max(case.footprint_mib for case in found) <= 256
    assert {"resnet-8-raw", "resnet-8-caching", "hotspot", "signature"} <= {c.name for c in found}
    assert not [flag for case in found for flag in case.flags if not flag or " " in flag]


def rule_of(path):
    return row_rule(totals(nsan.open_trace(path)))


def test_rows_of_the_model_are_batches_and_a_capture_without_rows_says_so():
    # The model writes one row per batch (docs/model.md); the program of user_prefetch does not fault.
    assert rule_of(MODEL / "stream" / "stream.sqlite") == "holds"
    assert rule_of(MODEL / "user_prefetch" / "user_prefetch.sqlite") == "no rows"


def figures(**changed):
    names = "rows ends out_of_order counts_outside other_access rows_above copies copies_outside"
    counts = dict.fromkeys([f"n_{name}" for name in (*names.split(), "descending")], 0)
    return {"fault_rows": [counts | {"style": "batch", "n_rows": 9, "n_copies": 7} | changed]}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "holds"),
        ({"n_copies": 0, "style": "no_copies"}, "no copies"),
        ({"style": "page"}, "one per page"),
        ({"style": "va_block"}, "one per VA block"),
        ({"style": "other"}, "fails: other"),
        ({"n_copies_outside": 3}, "fails: 3 copies fall into no row"),
        (
            {"n_out_of_order": 1, "n_rows_above": 2},
            "fails: 1 end out of order, 2 lie above their lowest faulted page",
        ),
    ],
)
def test_the_rule_is_judged_by_each_of_its_checks(changed, said):
    assert row_rule(figures(**changed)) == said
