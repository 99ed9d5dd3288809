"""How a program of the microbenchmark ends, and what it leaves: the tables, the line, the status."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import cpp
import polars as pl
import pytest

MIB = 2**20
GIB = 2**30
FILES = ["allocations.csv", "expected.csv", "history.csv", "phases.csv", "run.json"]
ROOT_FILES = {
    "proc/meminfo": "MemAvailable: 33554432 kB\n",
    "sys/module/nvidia/version": "580.65.06\n",
    "sys/module/nvidia_uvm/parameters/uvm_perf_prefetch_enable": "1\n",
}


@pytest.fixture(scope="module")
def program():
    return cpp.built("test_program", ["test_program.cpp"])


@pytest.fixture
def start(program, tmp_path):
    """Run the program on a machine of its own, with tables; what it printed, wrote and called."""
    root, out, log = tmp_path / "root", tmp_path / "out", tmp_path / "calls"
    for path, text in ROOT_FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    def run(*flags, out=out, **environment):
        environment |= {"NSAN_TEST_ROOT": str(root), "NSAN_HOST_LOG": str(log)}
        environment |= dict.fromkeys(PROFILER_VARIABLES, "") | environment
        log.unlink(missing_ok=True)
        done = cpp.run(program, "--bytes=64KiB", "--out", out, *flags, environment=environment)
        return SimpleNamespace(
            status=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            out=out,
            json=json.loads((out / "run.json").read_text())
            if (out / "run.json").is_file()
            else None,
            calls=log.read_text().splitlines() if log.exists() else None,
        )

    run.program, run.out = program, out
    return run


PROFILER_VARIABLES = (
    "NSYS_PROFILING_SESSION_ID",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def table(done, name):
    return pl.read_csv(done.out / name, infer_schema_length=None)


def test_a_run_that_ends_well_prints_its_json_on_one_line_and_nothing_else(start):
    done = start()
    assert (done.status, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout) == done.json
    assert names_in(done.out) == FILES


def test_run_json_says_what_ran_and_on_what(start):
    found = start("--seed=9", "--tape", "/home/alice/x.tape").json
    phases = found.pop("phases")
    assert [(phase["name"], phase["iteration"]) for phase in phases] == [
        ("run", 0),
        ("run", 1),
        ("run", 2),
        ("check", None),
    ]
    assert all(phase["ns"] > 0 for phase in phases)
    assert found.pop("pid") > 1
    assert found.pop("start_utc_ns") > 1_700_000_000 * 10**9
    assert found == {
        "nsan_microbench": 1,
        "program": "tester",
        "status": "ok",
        "reason": None,
        "profiled": False,
        "axes": {
            "bytes": 65536,
            "oversubscription_factor": None,
            "prefetch": "none",
            "advice": "none",
            "allocator": "raw",
            "iterations": 3,
            "seed": 9,
            "device": 0,
            "allow_oversubscription": False,
            "mode": "well",
        },
        "device": {
            "ordinal": 0,
            "name": "HostDevice",
            "compute_capability": "8.0",
            "n_sms": 2,
            "total_bytes": 8 * GIB,
            "free_bytes": 8 * GIB,
            "managed_memory": True,
            "concurrent_managed_access": True,
            "pageable_memory_access": False,
            "uses_host_page_tables": False,
            "is_wsl": False,
        },
        "driver": {
            "version": "580.65.06",
            "cuda_driver_api": 13000,
            "cuda_runtime_api": 13000,
            "uvm_parameters": {"uvm_perf_prefetch_enable": "1"},
        },
        "footprint": {
            "tensor_bytes": 65536,
            "managed_bytes": 65536,
            "free_bytes": 8 * GIB,
            "ballast_bytes": 0,
            "available_bytes": 8 * GIB,
            "tensor_oversubscription_factor": 65536 / (8 * GIB),
            "oversubscription_factor": 65536 / (8 * GIB),
            "free_bytes_at_end": 8 * GIB,
        },
        "verified": True,
        "pattern": "fill",
        "kernel_written_bytes": 65536,
    }


def test_under_a_profiler_the_run_says_so(start):
    assert start(NSYS_PROFILING_SESSION_ID="108775").json["profiled"] is True


def test_the_tables_hold_allocations_phases_and_certain_bytes(start):
    done = start("--iterations=2")
    (allocation,) = table(done, "allocations.csv").rows(named=True)
    assert allocation.pop("va") % (2 * MIB) == 0
    assert 0 <= allocation.pop("alloc_ns") < allocation.pop("free_ns")
    assert allocation == {
        "allocation": 0,
        "name": 'weights, "first"',
        "role": "parameter",
        "kind": "managed",
        "bytes": 65536,
    }
    phases = table(done, "phases.csv")
    assert phases["name"].to_list() == ["run", "run", "check"]
    assert phases["iteration"].to_list() == [0, 1, None]
    assert (phases["end_ns"] > phases["start_ns"]).all()
    assert (phases["start_ns"].shift(-1) >= phases["end_ns"]).all()
    assert table(done, "expected.csv").rows() == [
        (0, 0, "htod", 0, 65536),
        (1, 0, "htod", 0, 65536),
    ]


def test_ranges_lie_around_each_phase_and_step_and_a_phase_waits_for_its_work(start):
    assert start("--iterations=1").calls == [
        "allocate_managed 65536",
        "push_range step",
        "push_range run",
        "launch fill 2x32 main",
        "synchronize",
        "pop_range",
        "pop_range",
        "push_range check",
        "synchronize",
        "pop_range",
        "free 65536",
        "synchronize",
    ]


REASONS = {
    "failed": (
        1,
        "failed",
        "cudaLaunchKernel: cudaErrorIllegalAddress: in {}uvm_bench.cu:7 and more [31m",
    ),
    "runtime": (1, "failed", "unexpected error: a library's own"),
    "int": (1, "failed", "unexpected error of an unknown kind"),
    "memory": (1, "failed", "the host has no memory left for it; a smaller --bytes takes less"),
    "skipped": (6, "skipped", "this GPU cannot do that: take another"),
    "sigint": (130, "interrupted", "interrupted by SIGINT: what was recorded so far is kept"),
    "sigterm": (143, "interrupted", "interrupted by SIGTERM: what was recorded so far is kept"),
    "late-hold": (
        1,
        "failed",
        "unexpected error: hold() comes before the first managed allocation",
    ),
}


@pytest.mark.parametrize("mode", REASONS)
def test_a_run_that_does_not_end_well_says_why_on_one_line_and_keeps_its_tables(start, mode):
    status, name, reason = REASONS[mode]
    done = start("--mode", mode)
    assert (done.status, done.stdout) == (status, "")
    assert done.stderr == f"tester: {reason.format('/home/alice/src/')}\n"
    assert done.json["status"] == name
    assert done.json["verified"] is False
    assert done.json["reason"] == reason.format("")  # no path in it
    assert names_in(done.out) == [name for name in FILES if name != "history.csv"]


def test_the_phase_that_an_exception_left_has_no_end(start):
    done = start("--mode=failed")
    phases = table(done, "phases.csv")
    assert phases["iteration"].to_list() == [0, 1]
    assert phases["end_ns"].is_null().to_list() == [False, True]
    assert [phase["ns"] is None for phase in done.json["phases"]] == [False, True]
    assert table(done, "allocations.csv")["free_ns"].to_list() == [None]
    assert done.calls.count("pop_range") == sum(
        call.startswith("push_range") for call in done.calls
    )


def test_an_interrupt_waits_for_the_end_of_its_phase(start):
    done = start("--mode=sigint")
    assert table(done, "phases.csv")["end_ns"].is_null().to_list() == [False, False]
    assert "push_range check" not in done.calls


def test_an_interrupt_in_the_last_phase_counts_too(start):
    done = start("--mode=sigint-last")
    assert (done.status, done.json["status"]) == (130, "interrupted")
    assert table(done, "phases.csv")["end_ns"].null_count() == 0


def test_a_second_interrupt_kills_and_leaves_no_table(start):
    done = start("--mode=twice")
    assert done.status == -2
    assert names_in(done.out) == [".partial"]
    again = start()
    assert again.status == 2
    assert again.stderr == (
        f"tester: --out {done.out} is being written by another run, or one was killed there: "
        "remove it, or name another folder\n"
    )


@pytest.mark.parametrize(
    ("call", "n_open"),
    [("allocate_managed", 0), ("launch:2", 1), ("synchronize:2", 1), ("free", 0)],
)
def test_whichever_call_fails_the_run_ends_with_its_reason(start, call, n_open):
    done = start(NSAN_HOST_FAIL=call)
    name = call.partition(":")[0]
    assert (done.status, done.stdout) == (1, "")
    assert done.stderr == f"tester: {name}: cudaErrorUnknown (HostDevice): told to fail\n"
    assert done.json["reason"] == f"{name}: cudaErrorUnknown (HostDevice): told to fail"
    assert table(done, "phases.csv")["end_ns"].null_count() == n_open
    assert done.calls.count("pop_range") == sum(
        call.startswith("push_range") for call in done.calls
    )


def test_without_a_driver_the_status_is_its_own(start):
    done = start(NSAN_HOST_WITHOUT="driver")
    assert (done.status, done.stdout) == (5, "")
    assert done.stderr.startswith("tester: no NVIDIA driver was found")
    assert done.stderr.count("\n") == 1
    assert done.json["status"] == "no_driver"
    assert (done.json["device"], done.json["footprint"], done.json["phases"]) == (None, None, [])
    assert done.json["driver"]["cuda_driver_api"] is done.json["driver"]["cuda_runtime_api"] is None
    assert table(done, "allocations.csv").height == 0


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        ("managed_memory", "device 0 (HostDevice) has no managed memory"),
        ("concurrent_managed_access", "device 0 (HostDevice) has no concurrent managed access"),
        ("gpu_page_tables", "device 0 (HostDevice) uses the page tables of the host (a coherent"),
        ("linux", "under WSL a GPU does not fault on managed memory: run on Linux itself"),
    ],
)
def test_a_machine_that_cannot_do_it_is_skipped_before_anything_runs(start, without, reason):
    done = start(NSAN_HOST_WITHOUT=without)
    assert (done.status, done.stdout) == (6, "")
    assert done.stderr.startswith(f"tester: {reason}")
    assert done.stderr.count("\n") == 1
    assert done.json["status"] == "skipped"
    assert done.json["device"]["name"] == "HostDevice"
    assert done.calls == []


def test_a_factor_is_held_by_a_ballast_that_is_recorded_and_given_back(start):
    done = start("--bytes=32MiB", "--oversubscription-factor=2", "--allow-oversubscription")
    assert done.status == 0
    ballast = 8 * GIB - 16 * MIB
    assert done.json["footprint"] == {
        "tensor_bytes": 32 * MIB,
        "managed_bytes": 32 * MIB,
        "free_bytes": 8 * GIB,
        "ballast_bytes": ballast,
        "available_bytes": 16 * MIB,
        "tensor_oversubscription_factor": 2,
        "oversubscription_factor": 2,
        "free_bytes_at_end": 16 * MIB,  # the ballast is still there
    }
    assert done.calls[:2] == [f"allocate_device {ballast}", f"allocate_managed {32 * MIB}"]
    assert done.calls[-1] == f"free {ballast}"
    assert table(done, "allocations.csv").select("name", "role", "kind", "bytes").row(0) == (
        "ballast",
        "ballast",
        "device",
        ballast,
    )
    assert table(done, "allocations.csv")["free_ns"].null_count() == 0


def test_a_ballast_that_took_more_than_asked_is_made_smaller(start):
    # The "driver" takes 3 MiB beside each cudaMalloc: 2 granules less leave the 16 MiB.
    flags = ["--bytes=16MiB", "--oversubscription-factor=1", "--allow-oversubscription"]
    done = start(*flags, NSAN_HOST_OVERHEAD_BYTES=str(3 * MIB))
    assert done.status == 0
    first = 8 * GIB - 16 * MIB
    assert [call for call in done.calls if "device" in call] == [
        f"allocate_device {first}",
        f"allocate_device {first - 4 * MIB}",
    ]
    assert done.json["footprint"]["available_bytes"] == 17 * MIB
    assert done.json["footprint"]["ballast_bytes"] == first - 4 * MIB
    assert done.json["footprint"]["oversubscription_factor"] == pytest.approx(16 / 17, rel=1e-15)
    assert not any(call.startswith("leaked") for call in done.calls)


def test_a_ballast_comes_in_pieces_where_one_cannot_be_had(start):
    flags = ("--bytes=16MiB", "--oversubscription-factor=1", "--allow-oversubscription")
    gpu = {"NSAN_HOST_GPU_BYTES": str(64 * MIB), "NSAN_HOST_LARGEST_BYTES": str(20 * MIB)}
    done = start(*flags, **gpu)
    assert done.status == 0
    # 48 MiB of 64 are asked for, then half of that, then 12 until they are there.
    asked = [int(call.split()[1]) // MIB for call in done.calls if "device" in call]
    assert asked == [48, 24, 12, 12, 12, 12]
    assert done.json["footprint"]["ballast_bytes"] == 48 * MIB
    assert done.json["footprint"]["oversubscription_factor"] == 1
    pieces = table(done, "allocations.csv").filter(pl.col("role") == "ballast")
    assert pieces["bytes"].to_list() == [12 * MIB] * 4
    assert pieces["free_ns"].null_count() == 0
    assert not any(call.startswith("leaked") for call in done.calls)


def test_a_ballast_that_cannot_be_had_says_so_and_which_factor_is(start):
    flags = ("--bytes=16MiB", "--oversubscription-factor=1", "--allow-oversubscription")
    gpu = {"NSAN_HOST_GPU_BYTES": str(64 * MIB), "NSAN_HOST_LARGEST_BYTES": str(MIB)}
    done = start(*flags, **gpu)
    assert (done.status, done.stdout) == (7, "")
    assert done.stderr == (
        "tester: of a ballast of 48 MiB the GPU gives 0 B, in pieces: its memory is fragmented, or it is a part of a card, "
        "as MIG makes them. End what else runs there, or take --oversubscription-factor 0.25\n"
    )
    assert not any(call.startswith("leaked") for call in done.calls)
    other = start(*flags, **gpu, NSAN_HOST_FAIL="allocate_device", out=start.out.with_name("other"))
    assert other.stderr == "tester: allocate_device: cudaErrorUnknown (HostDevice): told to fail\n"


def test_what_the_code_of_kernels_takes_of_the_gpu_is_not_planned_with(start):
    found = start(NSAN_HOST_CODE_BYTES=str(100 * MIB)).json["footprint"]
    assert found["free_bytes"] == found["available_bytes"] == 8 * GIB - 100 * MIB


@pytest.mark.parametrize(("mode", "status"), [("stuck", 130), ("stuck-term", 143)])
def test_a_run_that_an_interrupt_cannot_end_ends_by_an_alarm(start, mode, status):
    done = start("--mode", mode)
    assert (done.status, done.stdout, done.stderr) == (status, "", "")


def test_the_ballast_is_given_back_when_the_run_fails(start):
    flags = ("--bytes=16MiB", "--oversubscription-factor=1", "--allow-oversubscription")
    done = start(*flags, "--mode=failed")
    assert done.status == 1
    assert done.calls[-2] == f"free {8 * GIB - 16 * MIB}"
    assert done.calls[-1] == "leaked 1"  # what the body of this test has not freed


def test_a_way_out_that_is_another_size_is_told_as_the_program_makes_it(start):
    """The tester makes it by --bytes, as its `About` says."""
    too_large = start("--bytes=9GiB")
    assert too_large.stderr.endswith("does it all the same; a smaller --bytes takes less\n")
    assert too_large.json["reason"].endswith("; a smaller --bytes takes less")
    too_small = start("--bytes=8MiB", "--oversubscription-factor=1")
    assert too_small.stderr.endswith(
        "at most factor 0.5, or more managed memory; a larger --bytes takes more\n"
    )
    no_memory = start(NSAN_HOST_MANAGED_BYTES="4096")
    assert (no_memory.status, no_memory.stderr) == (
        1,
        "tester: cudaErrorMemoryAllocation (HostDevice): out of memory; a smaller --bytes takes less\n",
    )
    other = start(NSAN_HOST_FAIL="allocate_managed")
    assert "--bytes" not in other.stderr


def test_too_much_is_refused_before_anything_is_allocated(start):
    done = start("--bytes=9GiB")
    assert (done.status, done.stdout) == (7, "")
    assert done.stderr.startswith(
        "tester: 9 GiB of managed memory is more than the 7.75 GiB that fit safely into the 8 GiB"
    )
    assert done.json["status"] == "refused"
    assert done.calls == []


def test_the_command_line_is_looked_at_before_the_gpu_and_leaves_nothing(start):
    for flags, reason in {
        ("--mode=checked",): "--mode: 'checked' is refused before a GPU is asked for",
        ("--bites=1",): "unknown flag '--bites'; did you mean --bytes?",
    }.items():
        done = start(*flags, NSAN_HOST_WITHOUT="driver")
        assert (done.status, done.stdout) == (2, "")
        assert done.stderr == f"tester: {reason}\n"
        assert not done.out.exists()


def test_a_usage_error_that_the_body_finds_leaves_nothing_either(start):
    done = start("--mode=usage")
    assert (done.status, done.stderr) == (2, "tester: --mode: these two do not go together\n")
    assert not done.out.exists()


def test_help_and_what_needs_no_gpu_work_without_a_driver(start):
    done = start("--help", NSAN_HOST_WITHOUT="driver")
    assert done.status == 0
    assert done.stdout.startswith("usage: tester [FLAGS]\n\nA program of the tests.\n")
    dry = start("--mode=dry", NSAN_HOST_WITHOUT="driver")
    assert (dry.status, dry.stdout, dry.stderr) == (0, '{"n": 3}\n', "")
    assert not dry.out.exists()


def test_without_out_nothing_is_written(program, tmp_path):
    done = cpp.run(program, "--bytes=64KiB", cwd=tmp_path)
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "ok"
    assert names_in(tmp_path) == []


def test_the_line_that_cannot_be_printed_is_a_failure(start):
    with Path("/dev/full").open("w") as full:
        done = cpp.run(start.program, "--bytes=64KiB", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "tester: cannot write the JSON line to stdout: is the disk full?\n"


def test_an_empty_folder_will_do_and_its_parents_are_made(start, tmp_path):
    (tmp_path / "empty").mkdir()
    assert start(out=tmp_path / "empty").status == 0
    assert start(out=tmp_path / "a" / "b" / "c").status == 0
    assert names_in(tmp_path / "a" / "b" / "c") == FILES


def test_a_link_to_an_empty_folder_stays_a_link(start, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert start(out=tmp_path / "link").status == 0
    assert (tmp_path / "link").is_symlink()
    assert names_in(tmp_path / "real") == FILES


def test_a_folder_that_holds_something_else_is_refused_and_not_touched(start, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    done = start(out=tmp_path / "mine")
    assert (done.status, done.stdout, done.calls) == (2, "", None)
    assert done.stderr == (
        f"tester: --out {tmp_path}/mine holds something else (thesis.txt): name a new or an empty "
        "folder\n"
    )
    assert names_in(tmp_path / "mine") == ["thesis.txt"]


def test_the_tables_of_a_run_that_ended_well_are_kept(start):
    first = start()
    second = start("--seed=2")
    assert second.status == 2
    assert second.stderr == (
        f"tester: --out {first.out} holds the tables of a run that ended well: remove it, or name "
        "another folder\n"
    )
    assert second.json == first.json


def test_the_tables_of_a_run_that_failed_give_way_whole(start):
    start("--mode=failed")
    (start.out / "blocks.csv").write_text("old")
    done = start()
    assert (done.status, done.json["status"]) == (0, "ok")
    assert names_in(done.out) == FILES


def test_a_file_where_the_folder_should_be_is_refused(start, tmp_path):
    (tmp_path / "file").write_text("x")
    done = start(out=tmp_path / "file")
    assert done.status == 2
    assert done.stderr.endswith("/file is no folder: name a new or an empty one\n")
    below = start(out=tmp_path / "file" / "below")
    assert below.status == 2
    assert below.stderr.count("\n") == 1
    assert (tmp_path / "file").read_text() == "x"


def test_tables_that_cannot_be_moved_into_place_are_a_failure(start):
    done = start("--mode=no-tables")
    assert (done.status, done.stdout) == (1, "")
    assert "cannot move the tables there" in done.stderr
    assert done.json is None


def test_hostile_names_are_cells(program, tmp_path):
    assert cpp.run(program, "tables", tmp_path / "t").returncode == 0
    found = pl.read_csv(tmp_path / "t" / "allocations.csv", schema_overrides={"bytes": pl.UInt64})
    assert found["name"].to_list() == [
        "a,b",
        'say "hi"',
        "two\nlines",
        "cr\r",
        "",
        "gr\ufffdn",
        "../../etc/passwd",
        "=1+1",
    ]
    assert set(found["role"]) == {"r,ole"}
    assert found["bytes"].to_list() == [2**64 - 1] * 8
    assert found["va"].to_list() == [0x7F0000000000 + i * 2 * MIB for i in range(8)]
    assert found["free_ns"].to_list() == [0, *[None] * 7]
    phases = pl.read_csv(tmp_path / "t" / "phases.csv")
    assert phases.select("name", "iteration", "end_ns").rows() == [("ph,ase", None, None)]
