"""The tables that a program wrote beside its capture: allocations get their names from them, or none."""

from __future__ import annotations

import shutil

import exports as x
import pytest
from bench_tables import START_UTC_NS, row, write
from fake_nsys import fake

import nsan
from nsan.cli import main
from nsan.io.bench_truth import TruthError, read_truth, stem_of, truth_beside
from nsan.io.manifest import fingerprint

KIB, MIB, VA = x.KIB, x.MIB, x.VA
SECOND = 1_000_000_000


def capture(path, *events, start=START_UTC_NS, others=()):
    export = x.Export().add(x.MEMORY, *events).add(x.MEMCPY, x.migration(50, 60, 4096))
    export.add("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": start})
    for table, rows in others:
        export.add(table, *rows)
    return export.write(path)


def two_arrays(path, **how):
    """Arrays a and b of 4 and 8 KiB, and 2 MiB on the GPU; the address of a is used again, for 16 KiB."""
    return capture(
        path,
        x.memory_event(10, VA, 4 * KIB),
        x.memory_event(20, VA + MIB, 8 * KIB),
        x.memory_event(25, VA + 8 * MIB, 2 * MIB, kind=2),
        x.memory_event(30, VA, 4 * KIB, free=True),
        x.memory_event(40, VA, 16 * KIB),
        **how,
    )


TWO = (
    row("a", VA, 4 * KIB, 11, free_ns=31),
    row("b", VA + MIB, 8 * KIB, 21),
    row("ballast", VA + 8 * MIB, 2 * MIB, 26, kind="device"),
    row("a again", VA, 16 * KIB, 41),
)


def names(path):
    """Names of the allocations by address, then by time."""
    found = nsan.open_trace(path).allocations.sort("va", "alloc_ns").collect()
    return found["name"].to_list()


def warned(path):
    return nsan.open_trace(path).info.warnings


@pytest.fixture
def run(tmp_path):
    """A capture with its program's tables beside it; both may be other ones."""

    def make(rows=TWO, *, made=two_arrays, **how):
        write(tmp_path / "run.truth", rows, **how)
        return made(tmp_path / "run.sqlite")

    return make


# Names


def test_allocations_have_the_names_that_the_program_gave_them(run):
    path = run()
    assert names(path) == ["a", "a again", "b", "ballast"]
    assert warned(path) == []
    assert nsan.open_trace(path).info.allocation_names == "run.truth"


def test_without_tables_allocations_have_no_name(tmp_path):
    path = two_arrays(tmp_path / "run.sqlite")
    assert names(path) == [None] * 4
    assert nsan.open_trace(path).info.allocation_names is None


def test_a_name_that_the_profiler_recorded_stays(run):
    def made(path):
        return capture(path, x.memory_event(10, VA, 4 * KIB, name="variable"))

    path = run([row("a", VA, 4 * KIB, 11)], made=made)
    assert names(path) == ["variable"]
    assert nsan.open_trace(path).info.allocation_names is None


def test_names_reach_what_is_said_of_allocations(run, capfd):
    path = run(
        made=lambda path: capture(path, x.memory_event(10, VA, 8 * KIB)),
        rows=[row("weights", VA, 8 * KIB, 11)],
    )
    assert main(["attribute", str(path), "--by", "allocation"]) == 0
    assert "weights" in capfd.readouterr().out
    assert main(["info", str(path)]) == 0
    assert "names of allocations: from run.truth" in capfd.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        'quoted "name"',
        "two\nlines",
        "comma, too",
        "",
        "\x1b[31mred",
        "=1+1",
        "näme",
        "\r\n",
        "\u2028",
        "a\x0b\x1cb",
    ],
)
def test_a_name_is_data_whatever_is_in_it(run, name):
    path = run([row(name, VA, 4 * KIB, 11), *TWO[1:]])
    assert names(path) == [name, "a again", "b", "ballast"]
    assert warned(path) == []


def test_a_name_that_is_no_utf8_is_replaced_and_the_others_stay(run, tmp_path):
    path = run([row("MARK", VA, 4 * KIB, 11), *TWO[1:]])
    table = tmp_path / "run.truth" / "allocations.csv"
    table.write_bytes(table.read_bytes().replace(b"MARK", b"\xff\xfe"))
    assert names(path) == ["��", "a again", "b", "ballast"]


def test_an_address_above_two_to_the_63_and_the_largest_are_matched(tmp_path):
    high, top = (1 << 63) + 4096, (1 << 64) - 4096
    events = [x.memory_event(10, va - (1 << 64), 4096) for va in (high, top)]
    path = capture(tmp_path / "run.sqlite", *events)
    write(tmp_path / "run.truth", [row("high", high, 4096, 11), row("top", top, 4096, 12)])
    assert names(path) == ["high", "top"]


# Never a wrong name


def test_an_address_where_a_size_differs_gets_no_name_at_all_and_others_do(run):
    path = run([row("a", VA, 12 * KIB, 11), *TWO[1:]])
    assert names(path) == [None, None, "b", "ballast"]
    assert warned(path) == [
        "Of the 4 allocations that run.truth names in this capture, 2 differ from it in size, time or number: "
        "these have no name from it."
    ]


def test_an_address_that_was_used_more_often_than_the_program_says_gets_no_name(run):
    path = run(TWO[:3])  # the second use of the address of a is missing
    assert names(path) == [None, None, "b", "ballast"]
    assert "1 differ from it in size, time or number" in warned(path)[0]


def test_an_address_that_was_used_less_often_than_the_program_says_gets_no_name(tmp_path):
    """The capture began between two uses of equal size: which of them it has, nothing says."""
    path = capture(tmp_path / "run.sqlite", x.memory_event(40, VA, 4 * KIB))
    rows = [row("a", VA, 4 * KIB, 11, free_ns=31), row("a again", VA, 4 * KIB, 41)]
    write(tmp_path / "run.truth", rows)
    assert names(path) == [None]
    assert "2 differ from it in size, time or number" in warned(path)[0]


def test_the_order_is_that_of_the_times_and_not_that_of_the_table(run):
    path = run([TWO[3], *TWO[:3]])
    assert names(path) == ["a", "a again", "b", "ballast"]
    assert warned(path) == []


def one_place_twice(*times):
    """Two allocations of 4 KiB at one address at these seconds; b, c and d at 20, 21 and 22 s."""

    def made(path):
        first, second = (time * SECOND for time in times)
        return capture(
            path,
            *(x.memory_event((20 + i) * SECOND, VA + (i + 1) * MIB, 8 * KIB) for i in range(3)),
            x.memory_event(first, VA, 4 * KIB),
            x.memory_event(first + SECOND, VA, 4 * KIB, free=True),
            x.memory_event(second, VA, 4 * KIB),
        )

    return made


TWICE = (
    row("a", VA, 4 * KIB, 10 * SECOND, free_ns=30 * SECOND),
    *(row(name, VA + (i + 1) * MIB, 8 * KIB, (20 + i) * SECOND) for i, name in enumerate("bcd")),
    row("a again", VA, 4 * KIB, 40 * SECOND),
)


def test_a_place_that_was_used_at_other_times_gets_no_name_and_others_do(run):
    """The first use is missing, and one that the program does not know of came later: two here and there."""
    path = run(TWICE, made=one_place_twice(40, 90))
    assert names(path) == [None, None, "b", "c", "d"]
    assert "2 differ from it in size, time or number" in warned(path)[0]


def test_a_place_that_was_used_again_has_the_names_of_both_times(run):
    path = run(TWICE, made=one_place_twice(10, 40))
    assert names(path) == ["a", "a again", "b", "c", "d"]


def test_a_place_that_was_used_once_has_its_name_whenever_it_was_noted(run):
    """A program notes c when it has d: of the other places, a is used twice, and its times are as always."""
    rows = [(*each[:5], 22 * SECOND, *each[6:]) if each[0] == "c" else each for each in TWICE]
    assert names(run(rows, made=one_place_twice(10, 40))) == ["a", "a again", "b", "c", "d"]


def at_seconds(tmp_path, times, noted):
    """Two uses of each place at these times, a second between them, and their notes; return what is named."""
    events, rows = [], []
    for i, (time, note) in enumerate(zip(times, noted, strict=True)):
        for turn in range(2):
            at = int((time + turn) * SECOND)
            free = x.memory_event(at + SECOND // 2, VA + i * MIB, 4 * KIB, free=True)
            events += [x.memory_event(at, VA + i * MIB, 4 * KIB), free]
            known = int((note + turn) * SECOND)
            rows.append(row(f"{i}", VA + i * MIB, 4 * KIB, known, free_ns=known + SECOND // 2))
    write(tmp_path / "run.truth", rows)
    found = names(capture(tmp_path / "run.sqlite", *sorted(events, key=lambda e: e["start"])))
    assert found[::2] == found[1::2]
    return [name is not None for name in found[::2]]


@pytest.mark.parametrize(
    ("seconds", "named"), [(0, True), (0.2, True), (0.3, False), (-0.1, False)]
)
def test_a_note_may_be_a_little_later_than_mostly_and_not_sooner(tmp_path, seconds, named):
    """Three places noted at once, and one this much later."""
    times = [10, 20, 30, 40]
    noted = [10, 20, 30, 40 + seconds]
    assert at_seconds(tmp_path, times, noted) == [True, True, True, named]


@pytest.mark.parametrize("drift", [-0.0004, 0.0004])
def test_clocks_that_drift_apart_in_a_long_run_do_no_harm(tmp_path, drift):
    """400 ppm of an hour are 1.44 s: half of that before the middle of the run, and half after."""
    times = [10 + 600 * i for i in range(7)]
    assert at_seconds(tmp_path, times, [time * (1 + drift) for time in times]) == [True] * 7


def test_clocks_that_drift_more_than_clocks_do_name_what_is_near_the_middle_only(tmp_path):
    times = [10 + 600 * i for i in range(7)]
    found = at_seconds(tmp_path, times, [time * (1 - 0.001) for time in times])
    assert (found[0], found[3], found[6]) == (False, True, False)


def test_torch_notes_its_tensors_when_all_of_a_model_is_there(tmp_path):
    """A minute apart, noted together; each has a place of its own."""
    events = [x.memory_event(i * 60 * SECOND, VA + i * MIB, 4 * KIB) for i in range(3)]
    path = capture(tmp_path / "run.sqlite", *events)
    rows = [row(str(i), VA + i * MIB, 4 * KIB, 121 * SECOND) for i in range(3)]
    write(tmp_path / "run.truth", rows, about={"program": "torch_uvm"})
    assert names(path) == ["0", "1", "2"]


def test_memory_on_the_gpu_is_not_taken_for_managed_memory(run):
    path = run([*TWO[:2], row("ballast", VA + 8 * MIB, 2 * MIB, 26), TWO[3]])
    assert names(path) == ["a", "a again", "b", None]
    assert "1 are not in it" in warned(path)[0]


def test_allocations_of_another_process_get_no_name(tmp_path):
    events = [x.memory_event(10, VA, 4096), x.memory_event(10, VA, 4096, pid=7)]
    path = capture(tmp_path / "run.sqlite", *events)
    write(tmp_path / "run.truth", [row("mine", VA, 4096, 11)])
    found = nsan.open_trace(path).allocations.sort("pid").collect()
    assert found.select("pid", "name").rows() == [(7, None), (x.PID, "mine")]


def test_tables_of_a_process_that_is_not_in_the_capture_name_nothing(run):
    path = run(pid=7)
    assert names(path) == [None] * 4
    assert (
        "run.truth beside this capture is of another run: its process 7 has no allocation here"
        in warned(path)[0]
    )


def test_tables_of_another_time_name_nothing(run):
    """The same process number and addresses, as in containers, and an hour between the runs."""
    path = run(about={"start_utc_ns": START_UTC_NS - 3600 * SECOND})
    assert names(path) == [None] * 4
    assert "the times of its allocations are 3600 s away" in warned(path)[0]


@pytest.mark.parametrize(
    "start", [START_UTC_NS - 9 * SECOND, START_UTC_NS + 9 * SECOND, None, "soon"]
)
def test_clocks_that_nearly_agree_or_are_not_known_do_no_harm(run, start):
    assert names(run(about={"start_utc_ns": start})) == ["a", "a again", "b", "ballast"]


def noted(seconds):
    """The tables of two arrays whose program noted each this long after it had it."""
    rows = [(*each[:5], each[5] + seconds * SECOND, each[6]) for each in TWO]
    return [(*each[:6], "") for each in rows]


def test_what_a_program_notes_only_when_all_of_it_is_there_has_its_name(run):
    """torch_uvm without a cache: the model has moved to the GPU, which took two minutes."""
    assert names(run(noted(120))) == ["a", "a again", "b", "ballast"]


@pytest.mark.parametrize(("began", "apart"), [(-132, 12), (11, 11)])
def test_an_allocation_after_its_note_or_before_the_program_is_of_another_run(run, began, apart):
    """Noted 120 s after the program began, and made 132 s after that; or 11 s before it began."""
    path = run(noted(120), about={"start_utc_ns": START_UTC_NS + began * SECOND})
    assert names(path) == [None] * 4
    assert f"the times of its allocations are {apart} s away" in warned(path)[0]


def test_what_was_allocated_before_the_capture_began_is_not_named_after_what_came_later(tmp_path):
    """The release of a is in the capture, its allocation is not: two uses, of which one has no size."""
    path = capture(
        tmp_path / "run.sqlite",
        x.memory_event(30, VA, 0, free=True),
        x.memory_event(40, VA, 4 * KIB),
    )
    write(
        tmp_path / "run.truth",
        [row("a", VA, 4 * KIB, 11, free_ns=31), row("a again", VA, 4 * KIB, 41)],
    )
    assert names(path) == [None, None]


def test_a_capture_without_allocations_says_how_to_record_them(run):
    path = run(made=capture)
    assert names(path) == []
    assert "names 4 allocations, and the capture has none" in warned(path)[0]
    assert "--cuda-memory-usage=true" in warned(path)[0]


def test_a_run_that_allocated_nothing_is_no_reason_to_warn(run):
    path = run([])
    assert names(path) == [None] * 4
    assert warned(path) == []


# Damage


def _cut(folder):
    table = folder / "allocations.csv"
    table.write_bytes(table.read_bytes()[:-3])


def _replace(name, old, new):
    def damage(folder):
        path = folder / name
        path.write_text(path.read_text().replace(old, new))

    return damage


def _fifo(folder):
    import os

    (folder / "allocations.csv").unlink()
    os.mkfifo(folder / "allocations.csv")


DAMAGES = {
    "allocations.csv was cut short": _cut,
    "allocations.csv is missing": lambda folder: (folder / "allocations.csv").unlink(),
    "run.json is missing": lambda folder: (folder / "run.json").unlink(),
    "run.json is no JSON": lambda folder: (folder / "run.json").write_text(
        '{"nsan_microbench": 1,'
    ),
    "not written by the benchmark": lambda folder: (folder / "run.json").write_text("[]"),
    "another version of the benchmark": _replace(
        "run.json", '"nsan_microbench": 1', '"nsan_microbench": 2'
    ),
    "does not say which process ran": _replace("run.json", f'"pid": {x.PID}', '"pid": "me"'),
    "has other columns": _replace("allocations.csv", "alloc_ns", "allocated"),
    "says a time at which nothing ran": _replace("run.json", str(START_UTC_NS), str(1 << 70)),
    "run.json is no JSON, or": _replace("run.json", str(START_UTC_NS), "NaN"),
    "line 2 of allocations.csv is damaged": _replace("allocations.csv", "managed", "paged"),
    "line 3 of allocations.csv is damaged": _replace("allocations.csv", str(8 * KIB), "8KiB"),
    "line 5 of allocations.csv is damaged": _replace("allocations.csv", "a again,", ""),
    "is damaged (": _replace("allocations.csv", "\n1,b", '\n1,"b'),
    "line 4 of allocations.csv is damaged": _replace(
        "allocations.csv", str(VA + 8 * MIB), str(1 << 64)
    ),
    "allocations.csv is missing (a pipe)": _fifo,
}


@pytest.mark.parametrize("says", DAMAGES)
def test_damaged_tables_are_said_in_one_line_and_the_capture_is_read_without_them(
    run, tmp_path, says
):
    path = run()
    DAMAGES[says](tmp_path / "run.truth")
    (line,) = warned(path)
    assert says.partition(" (a pipe)")[0] in line
    assert line.startswith(
        "run.truth, which should name the allocations of this capture, is not used:"
    )
    assert "\n" not in line
    assert names(path) == [None] * 4
    health = nsan.summary(path)["health"]
    assert [each["status"] for each in health if each["id"] == "source"] == ["warn"]


def test_a_table_that_may_not_be_read_is_said_too(run, tmp_path):
    import os

    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = run()
    (tmp_path / "run.truth" / "allocations.csv").chmod(0)
    assert "allocations.csv cannot be read (Permission denied)" in warned(path)[0]


def test_the_error_names_the_folder_and_the_way_out(tmp_path):
    folder = write(tmp_path / "run.truth", [])
    (folder / "run.json").unlink()
    with pytest.raises(TruthError, match="Copy it again from where the benchmark ran") as raised:
        read_truth(folder)
    assert str(tmp_path) not in str(raised.value)


# Where the tables are


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("run.nsys-rep", "run"),
        ("run.qdrep", "run"),
        ("run.qdstrm", "run"),
        ("run.sqlite", "run"),
        ("run.v2.nsys-rep", "run.v2"),
        ("run_pqtdir", "run"),
        ("run_arwdir", "run"),
        ("run", "run"),
    ],
)
def test_what_lies_beside_a_capture_shares_its_name(tmp_path, name, stem):
    assert stem_of(tmp_path / name) == stem


def test_a_folder_of_something_else_is_not_taken_for_tables(tmp_path):
    path = two_arrays(tmp_path / "run.sqlite")
    (tmp_path / "run.truth").mkdir()
    (tmp_path / "run.truth" / "notes.txt").write_text("mine")
    assert truth_beside(path) is None
    assert warned(path) == []


def test_a_folder_of_tables_that_is_named_by_a_dot_has_its_tables_beside_it(tmp_path, monkeypatch):
    inside = tmp_path / "run_pqtdir"
    inside.mkdir()
    folder = write(tmp_path / "run.truth", [])
    monkeypatch.chdir(inside)
    from pathlib import Path

    assert truth_beside(Path()) == folder
    assert truth_beside(Path("..")) is None


def test_a_link_to_a_capture_has_the_tables_of_either_name(tmp_path):
    path = two_arrays(tmp_path / "run.sqlite")
    write(tmp_path / "run.truth", TWO)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "latest.sqlite"
    link.symlink_to(path)
    assert truth_beside(link) == tmp_path / "run.truth"
    assert names(link) == ["a", "a again", "b", "ballast"]
    own = write(tmp_path / "links" / "latest.truth", TWO)
    assert truth_beside(link) == own


def test_a_raw_stream_has_names_too(tmp_path, monkeypatch):
    """Through programs that stand in for nsys and its importer: what they make is an export by hand."""
    made = two_arrays(tmp_path / "made.sqlite")
    place = tmp_path / "nsys-2023.4.4"
    fake(place / "host-linux-x64" / "QdstrmImporter", makes=made)
    monkeypatch.setenv("NSYS", str(fake(place / "target-linux-x64" / "nsys", makes=made).program))
    stream = tmp_path / "run.qdstrm"
    stream.write_bytes(b"Nsight Systems Stream 2023.4.4.54")
    write(tmp_path / "run.truth", TWO)
    assert names(stream) == ["a", "a again", "b", "ballast"]
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"1.\nNVIDIA Tegra Profiler Report")
    assert names(report) == ["a", "a again", "b", "ballast"]


def test_a_folder_of_tables_has_names_too(tmp_path):
    import sqlite3
    from contextlib import closing

    import polars as pl

    made = two_arrays(tmp_path / "made.sqlite")
    folder = tmp_path / "run_pqtdir"
    folder.mkdir()
    with closing(sqlite3.connect(made)) as connection:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        for (table,) in connection.execute(query).fetchall():
            cursor = connection.execute(f'SELECT * FROM "{table}"')
            columns = [each[0] for each in cursor.description]
            rows = pl.DataFrame(cursor.fetchall(), schema=columns, orient="row")
            rows.write_parquet(folder / f"{table}.parquet")
    write(tmp_path / "run.truth", TWO)
    assert names(folder) == ["a", "a again", "b", "ballast"]


# When it is read again


def test_tables_that_come_later_are_taken_in(tmp_path):
    path = two_arrays(tmp_path / "run.sqlite")
    assert names(path) == [None] * 4
    write(tmp_path / "run.truth", TWO)
    assert names(path) == ["a", "a again", "b", "ballast"]
    shutil.rmtree(tmp_path / "run.truth")
    assert names(path) == [None] * 4


def test_a_name_that_is_corrected_in_the_middle_of_a_large_table_is_read(tmp_path):
    """400 KiB of table, and as many bytes after the change as before."""
    path = two_arrays(tmp_path / "run.sqlite")
    others = [row(f"x{i:06}", (1 << 40) + i * MIB, 4096, 50) for i in range(8000)]
    write(tmp_path / "run.truth", [*others[:4000], *TWO, *others[4000:]])
    assert (tmp_path / "run.truth" / "allocations.csv").stat().st_size > 300 * KIB
    assert "ballast" in names(path)
    corrected = [*TWO[:2], ("BALLAST", *TWO[2][1:]), TWO[3]]
    write(tmp_path / "run.truth", [*others[:4000], *corrected, *others[4000:]])
    assert "BALLAST" in names(path)


def test_tables_that_change_make_another_fingerprint_and_their_times_do_not(run, tmp_path):
    import os

    path = run()
    before = fingerprint(path)
    for file in (tmp_path / "run.truth").iterdir():
        os.utime(file, ns=(1, 1))
    assert fingerprint(path) == before
    write(tmp_path / "run.truth", [row("A", VA, 4 * KIB, 11), *TWO[1:]])
    assert fingerprint(path).digest != before.digest
