"""`nsan bench`: what is at a run's place is never lost, and a run is marked by what its trace shows."""

from __future__ import annotations

import csv
import errno
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import bench_programs
import bench_tables
import exports as x
import pytest
from bench_programs import SMALL, wrapped
from bench_tables import row

import nsan
from nsan.cli import main
from nsan.io import tidy
from nsan.microbench import places
from nsan.microbench.places import RunKeptError, making

KIB, MIB, VA = x.KIB, x.MIB, x.VA


@pytest.fixture(scope="module")
def uvm_bench():
    return bench_programs.uvm_bench()


@pytest.fixture
def run(uvm_bench, capfd):
    """Run `nsan bench run uvm_bench --no-nsys`; return its exit status and what it says."""

    def call(place, *options, program=uvm_bench, flags=SMALL):
        command = ["bench", "run", "uvm_bench", "--program", str(program), "-o", str(place)]
        status = main([*command, "--no-nsys", *options, "--", *flags])
        return status, *capfd.readouterr()

    return call


@pytest.fixture
def sweep(uvm_bench, tmp_path, capfd):
    def call(*options, program=uvm_bench, flags=SMALL):
        command = ["bench", "sweep", "uvm_bench", "--program", str(program), "--no-nsys"]
        status = main([*command, "-o", str(tmp_path / "sweep"), *options, "--", *flags])
        return status, *capfd.readouterr()

    return call


def names(folder):
    return sorted(each.name for each in Path(folder).iterdir())


def document(place):
    return json.loads((Path(place) / "bench.json").read_text())


def table(folder):
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# What comes to the place while a run is made


def test_a_file_that_comes_meanwhile_stays_and_the_run_is_kept_beside_it(run, uvm_bench, tmp_path):
    place = tmp_path / "add"
    comes = f"mkdir -p '{place}'; echo mine > '{place}/notes.txt'"
    status, _, err = run(place, program=wrapped(uvm_bench, tmp_path, before=comes))
    assert status == 1
    assert (place / "notes.txt").read_text() == "mine\n"
    assert f"which is kept in {tmp_path / 'add.kept'}" in err
    assert names(tmp_path / "add.kept") == ["add.alone", "bench.json"]
    assert document(tmp_path / "add.kept")["status"] == "ok"
    # The next one does not take that place either.
    (place / "notes.txt").unlink()
    assert run(place, program=wrapped(uvm_bench, tmp_path, before=comes))[0] == 1
    assert names(tmp_path / "add.kept-2") == ["add.alone", "bench.json"]


def test_of_two_runs_of_one_name_at_once_both_are_there_in_the_end(uvm_bench, tmp_path):
    gate, place = tmp_path / "gate", tmp_path / "runs" / "twin"
    waits = f"while [ ! -e '{gate}' ]; do sleep 0.01; done"
    program = wrapped(uvm_bench, tmp_path, before=waits, log=tmp_path / "log")
    command = ["bench", "run", "uvm_bench", "--no-nsys", "--program", program, "-o", place]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "nsan", *command, "--", *SMALL],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for _ in range(3000):
        log = tmp_path / "log"
        if log.exists() and len(log.read_text().splitlines()) == 2:
            break
        time.sleep(0.01)
    gate.touch()
    said = [process.communicate(timeout=60)[1].decode() for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], said
    assert names(tmp_path / "runs") == ["twin", "twin.kept"]
    assert {document(tmp_path / "runs" / each)["status"] for each in names(place.parent)} == {"ok"}


def made(folder, status="ok"):
    """A run by hand, as far as places look at it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {"nsan_bench": 1, "status": status, "digest": "d", "reason": None, "condition": {}}
    text |= {"profiled": False, "seconds_alone": 0.5, "seconds_nsys": None, "expected": None}
    (folder / "bench.json").write_text(json.dumps(text))
    return folder


def comes_late(tape, swaps):
    """An exchange before which another run comes to the place; it works the first, the second time, or not."""
    real, works = tidy.exchange, list(swaps)

    def exchange(left, right):
        if len(works) == len(swaps):
            made(right, "ok")
            (right / "run.tape").write_text(tape)
        return works.pop(0) and real(left, right)

    return exchange


SWAPS = [(True, True), (True, False), (False,)]


@pytest.mark.parametrize("swaps", SWAPS)
def test_what_comes_in_the_last_moment_is_put_back(tmp_path, monkeypatch, swaps):
    """Between the look at the place and the exchange, a failed run there is replaced by one that is well."""
    place = made(tmp_path / "run", "failed")
    monkeypatch.setattr(places, "exchange", comes_late("other", swaps))
    with (
        pytest.raises(RunKeptError, match="is kept in") as raised,
        making(place, overwrite=False) as folder,
    ):
        (made(folder) / "run.tape").write_text("own")
    assert (place / "run.tape").read_text() == "other"
    assert (raised.value.kept / "run.tape").read_text() == "own"
    assert names(tmp_path) == ["run", "run.kept"]


@pytest.mark.parametrize("swaps", SWAPS)
@pytest.mark.parametrize("fails", ["to the name beside", "to the place", "as it looks again"])
def test_whatever_goes_wrong_in_the_last_moment_what_was_there_is_back(
    tmp_path, monkeypatch, swaps, fails
):
    place = made(tmp_path / "run", "failed")
    rename, check = Path.rename, places._check
    refused = []

    def refuse(*of):
        refused.append(of)
        raise OSError(errno.EIO, "Input/output error")

    def renamed(self, target):
        beside, home = target.name.endswith(".kept"), target == place and "-old" not in self.name
        if beside if fails == "to the name beside" else home and fails == "to the place":
            refuse(self, target)
        return rename(self, target)

    def checked(found, at, **how):
        if found != at and fails == "as it looks again":
            refuse(found)
        check(found, at, **how)

    monkeypatch.setattr(places, "exchange", comes_late("theirs", swaps))
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(places, "_check", checked)
    with (
        pytest.raises((OSError, RunKeptError)),
        making(place, overwrite=False) as folder,
    ):
        (made(folder) / "run.tape").write_text("own")
    assert refused
    assert (place / "run.tape").read_text() == "theirs"
    assert set(names(tmp_path)) <= {"run", "run.kept"}


def test_a_file_of_the_users_in_the_folder_of_a_failed_run_is_not_lost(run, tmp_path, monkeypatch):
    place = tmp_path / "add"
    monkeypatch.setenv("NSAN_HOST_FAIL", "launch:1")
    assert run(place)[0] == 1
    monkeypatch.delenv("NSAN_HOST_FAIL")
    (place / "notes.txt").write_text("mine")
    for options in ((), ("--force-overwrite",)):
        status, _, err = run(place, *options)
        assert status == 1
        assert "holds 'notes.txt', which is of no run of `nsan bench`" in err
    assert (place / "notes.txt").read_text() == "mine"
    (place / "notes.txt").unlink()
    assert run(place)[0] == 0


# Links


def test_a_link_stays_one_and_the_run_is_where_it_leads(run, tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "add"
    link.symlink_to(tmp_path / "disk" / "first")
    assert run(link)[0] == 0
    assert link.is_symlink()
    assert names(tmp_path / "disk" / "first") == ["bench.json", "first.alone"]
    assert run(link)[0] == 1
    assert run(link, "--force-overwrite")[0] == 0
    assert link.is_symlink()
    assert names(tmp_path / "disk") == ["first"]


def test_links_in_a_circle_are_said(run, tmp_path):
    (tmp_path / "add").symlink_to(tmp_path / "add")
    status, _, err = run(tmp_path / "add")
    assert status == 1
    assert "its links lead in a circle" in err


def test_a_sweep_goes_where_a_link_leads(sweep, tmp_path):
    (tmp_path / "sweep").symlink_to(tmp_path / "disk")
    assert sweep()[0] == 0
    assert names(tmp_path / "disk") == ["raw-free-none", "sweep.csv", "sweep.json"]


# Sweeps side by side, and runs that differ


def test_a_second_sweep_in_a_folder_is_refused_while_the_first_is_at_work(
    sweep, uvm_bench, tmp_path
):
    gate, log = tmp_path / "gate", tmp_path / "log"
    waits = f"while [ ! -e '{gate}' ]; do sleep 0.01; done"
    program = wrapped(uvm_bench, tmp_path, before=waits, log=log)
    command = ["bench", "sweep", "uvm_bench", "--no-nsys", "--program", program]
    first = subprocess.Popen(
        [sys.executable, "-m", "nsan", *command, "-o", tmp_path / "sweep", "--", *SMALL],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    for _ in range(3000):
        if log.exists():
            break
        time.sleep(0.01)
    status, _, err = sweep(program=program)
    assert status == 1
    assert "sweep is where another sweep is at work now. Choose another place." in err
    gate.touch()
    _, said = first.communicate(timeout=60)
    assert first.returncode == 0, said
    assert len(log.read_text().splitlines()) == 1
    assert sweep(program=program)[0] == 0  # which finds the run there


def test_flags_that_do_not_fit_one_condition_mark_that_run_and_the_sweep_goes_on(sweep, tmp_path):
    """48 KiB are three arrays of vector-add, and too little for gather."""
    flags = ("--bytes", "48KiB", "--iterations", "1")
    status, out, err = sweep("--patterns", "gather,vector-add", flags=flags)
    rows = table(tmp_path / "sweep")
    assert status == 1, err
    assert [each["status"] for each in rows] == ["usage", "ok"]
    assert "is too little for --pattern gather" in rows[0]["reason"]
    assert "gather-raw-free-none: --bytes 49152 is too little" in out
    assert "bench.json" in names(tmp_path / "sweep" / "gather-raw-free-none")


def test_a_run_that_is_refused_by_its_factor_does_not_keep_others_from_running(sweep, tmp_path):
    status, _, err = sweep("--factors", "2000,free")
    assert status == 1, err
    assert [each["status"] for each in table(tmp_path / "sweep")] == ["usage", "ok"]


def test_runs_that_did_not_end_well_cost_nothing_and_one_reason_is_said_once(
    sweep, tmp_path, monkeypatch
):
    monkeypatch.setenv("NSAN_HOST_WITHOUT", "managed_memory")
    status, out, _ = sweep("--prefetches", "none,whole", "--patterns", "vector-add", flags=())
    assert status == 1
    assert out.count("has no managed memory") == 1
    assert "vector-add-raw-free-none, vector-add-raw-free-prefetch-whole: " in out
    for each in table(tmp_path / "sweep"):
        known = {key for key, value in each.items() if value}
        assert known == {"allocator", "hint", "pattern", "status", "reason", "folder"}


# Damaged documents


DAMAGED = {
    "a part is missing": lambda found: found.pop("profiled"),
    "a time is text": lambda found: found.update(seconds_alone="x"),
    "a reason is a list": lambda found: found.update(reason=[1]),
    "a condition is none": lambda found: found.update(condition=None),
    "a status is a number": lambda found: found.update(status=0),
    "counts are missing": lambda found: found.update(expected={"n_checked": 1}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_document_is_said_in_one_line_and_nothing_is_replaced(
    run, sweep, tmp_path, damage
):
    assert sweep()[0] == 0
    place = tmp_path / "sweep" / "raw-free-none"
    found = document(place)
    DAMAGED[damage](found)
    (place / "bench.json").write_text(json.dumps(found))
    before = (place / "bench.json").read_bytes()
    for status, _, err in (sweep(), run(place), run(place, "--force-overwrite")):
        assert status == 1
        assert "holds a run whose bench.json is damaged" in err
        assert "Traceback" not in err
    assert (place / "bench.json").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        ({"phases": None}, "check_ns"),
        ({"phases": [1]}, "check_ns"),
        ({"phases": [{"ns": 3}]}, "check_ns"),
        ({"phases": [{"name": "check", "ns": "x"}]}, "check_ns"),
        ({"footprint": [1]}, "managed_bytes"),
        ({"footprint": {"managed_bytes": [1]}}, "managed_bytes"),
        ({"verified": [1]}, "verified"),
        ({"driver": "x"}, None),
    ],
)
def test_a_resumed_sweep_leaves_out_what_is_damaged_in_a_run(sweep, tmp_path, damage, lost):
    assert sweep()[0] == 0
    before = table(tmp_path / "sweep")[0]
    assert lost is None or before[lost]
    about = tmp_path / "sweep" / "raw-free-none" / "raw-free-none.alone" / "run.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | damage))
    status, _, err = sweep()
    assert status == 0, err
    (found,) = table(tmp_path / "sweep")
    assert found["status"] == "ok"
    assert not found.get(lost)
    kept = {"seconds_alone", "managed_bytes", "verified"} - {lost}
    assert {key: found[key] for key in kept} == {key: before[key] for key in kept}


# Programs and names


def test_a_program_in_the_folder_one_stands_in_is_found_with_and_without_its_dot(
    run, uvm_bench, tmp_path, monkeypatch
):
    wrapped(uvm_bench, tmp_path).rename(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    for number, program in enumerate(("./mine", "mine", tmp_path / "mine")):
        status, _, err = run(tmp_path / f"run{number}", program=program)
        assert status == 0, err


# What a trace shows: the program and nsys are stand-ins, the trace is by hand

_NSYS = """\
#!/bin/sh
case "$1" in
--version) echo "NVIDIA Nsight Systems version 2023.4.4.1-abc"; exit 0 ;;
profile) shift
  while [ "$1" != --output ]; do shift; done
  printf '1.\\nNVIDIA Tegra Profiler Report' > "$2"; shift 2; exec "$@" ;;
esac
while [ "$#" -gt 0 ]; do
  case "$1" in --tables=*) exit 1 ;; --output) cp {trace} "$2"; exit 0 ;; esac
  shift
done
"""
_PROGRAM = """\
#!/bin/sh
while [ "$1" != --out ]; do shift; done
cp -r {tables} "$2"
"""


def script(path, text, **names):
    path.write_text(text.format(**{key: shlex.quote(str(value)) for key, value in names.items()}))
    path.chmod(0o755)
    return path


@pytest.fixture
def recorded(tmp_path, monkeypatch, capfd):
    """Run a program with these tables under an nsys that makes this trace."""

    def call(export, expected, *, options=()):
        tables = bench_tables.write(tmp_path / "tables", [row("a", VA, 4 * MIB, 11)])
        (tables / "phases.csv").write_text("phase,name,iteration,start_ns,end_ns\n0,run,0,1,2\n")
        head = "phase,allocation,direction,least_bytes,most_bytes"
        (tables / "expected.csv").write_text("\n".join([head, *expected, ""]))
        trace = export.add(x.MEMORY, x.memory_event(10, VA, 4 * MIB)).write(tmp_path / "t.sqlite")
        monkeypatch.setenv("NSYS", str(script(tmp_path / "nsys", _NSYS, trace=trace)))
        program = script(tmp_path / "program", _PROGRAM, tables=tables)
        command = ["bench", "run", "uvm_bench", "--program", str(program)]
        status = main([*command, "-o", str(tmp_path / "run"), *options])
        return status, *capfd.readouterr()

    return call


def phase(start, end):
    """The phase of the tables as a range of the programs' domain."""
    return (x.nvtx(0, 0, "nsan", kind=75, domain=1), x.nvtx(start, end, "run", domain=1))


def test_a_trace_that_shows_the_certain_bytes_is_said_to_be_right(recorded, tmp_path):
    export = x.Export().add(x.MEMCPY, x.migration(110, 120, 2 * MIB)).add(x.NVTX, *phase(100, 200))
    status, _, err = recorded(export, [f"0,0,htod,{2 * MIB},{4 * MIB}", "0,0,dtoh,0,0"])
    assert status == 0, err
    assert "Certain bytes: 2 of 2 as expected" in err
    found = document(tmp_path / "run")
    assert found["expected"] == {
        "n_checked": 2,
        "n_right": 2,
        "wrong": [],
        "demands_bytes": True,
        "reason": "",
    }


def test_what_differs_from_the_certain_bytes_is_said(recorded, tmp_path):
    export = x.Export().add(x.MEMCPY, x.migration(110, 120, MIB)).add(x.NVTX, *phase(100, 200))
    status, _, err = recorded(export, [f"0,0,htod,{2 * MIB},{4 * MIB}", "0,0,dtoh,0,0"])
    assert status == 0, err
    assert "Certain bytes: 1 of 2 as expected" in err
    assert "phase run 0, allocation a, HtoD: 1.00 MiB" in err
    assert document(tmp_path / "run")["expected"]["n_right"] == 1


def test_certain_bytes_that_cannot_be_compared_say_why(recorded):
    export = x.Export().add(x.MEMCPY, x.migration(110, 120, MIB))
    status, _, err = recorded(export, [f"0,0,htod,{2 * MIB},{4 * MIB}"])
    assert status == 0, err
    assert "Certain bytes were not compared: " in err


def test_a_damaged_table_of_certain_bytes_does_not_cost_the_run(recorded, tmp_path):
    export = x.Export().add(x.MEMCPY, x.migration(110, 120, MIB)).add(x.NVTX, *phase(100, 200))
    status, _, err = recorded(export, ["0,0,sideways,1,2"])
    assert status == 0, err
    assert "Certain bytes were not compared: " in err
    assert document(tmp_path / "run")["status"] == "ok"


@pytest.mark.parametrize(
    "expected",
    [[f"0,0,htod,{2 * MIB},{4 * MIB}"], [], ["0,0,htod,0,0"]],
    ids=["bytes are certain to move", "nothing is certain", "nothing moves for certain"],
)
def test_a_managed_allocation_alone_does_not_tell_that_the_driver_was_traced(
    recorded, tmp_path, expected
):
    export = x.Export().add(x.MEMCPY).add(x.NVTX, *phase(100, 200))
    status, _, err = recorded(export, expected)
    assert status == 3, err
    lacks = "no migration" if "4194304" in "".join(expected) else "managed allocations, and no"
    assert f"its trace has {lacks}" in err
    assert document(tmp_path / "run")["status"] == "not_recorded"


@pytest.mark.parametrize(
    "fault", [(x.GPU_FAULTS, x.gpu_fault(110, 120)), (x.CPU_FAULTS, x.cpu_fault(110))]
)
def test_faults_without_the_migration_that_must_be_there_are_no_recording(recorded, fault):
    export = x.Export().add(*fault).add(x.NVTX, *phase(100, 200)).add(x.KERNEL, x.kernel(105, 190))
    status, _, err = recorded(export, [f"0,0,htod,{2 * MIB},{4 * MIB}"])
    assert status == 3, err
    assert "no migration, although by what the program knows bytes migrate" in err


def test_a_fault_row_without_a_migration_is_a_trace_of_the_driver(recorded):
    """First touch on the GPU fills pages where they are."""
    export = x.Export().add(x.GPU_FAULTS, x.gpu_fault(110, 120)).add(x.NVTX, *phase(100, 200))
    assert recorded(export, [])[0] == 0


def test_the_run_opens_with_its_names(recorded, tmp_path):
    export = x.Export().add(x.MEMCPY, x.migration(110, 120, 2 * MIB)).add(x.NVTX, *phase(100, 200))
    assert recorded(export, [])[0] == 0
    trace = nsan.open_trace(tmp_path / "run")
    assert trace.allocations.collect()["name"].to_list() == ["a"]
