"""`nsan bench run torch_uvm`: the PyTorch harness under a Python that has PyTorch, and under one that has not.

No PyTorch is here: where a run must end well, a script stands in for the Python that has it. It answers whether it has
PyTorch, and leaves what the harness leaves.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import bench_tables
import pytest
from vendor import need

from nsan.cli import main
from nsan.microbench import building, torch_machine, torch_uvm
from nsan.microbench.catalog import ADVICES, ALLOCATORS, PREFETCHES

FILES = ["torch_machine.py", "torch_networks.py", "torch_record.py", "torch_uvm.py"]


@pytest.fixture
def run(capfd):
    """Run `nsan bench run torch_uvm` or sweep it; return the exit status and what it says."""

    def call(*arguments, flags=(), action="run"):
        status = main(["bench", action, "torch_uvm", *map(str, arguments), "--", *flags])
        return status, *capfd.readouterr()

    return call


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(b"")
    return path


def script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def with_torch(tmp_path):
    """A Python that has PyTorch, and logs how it is called; it writes the tables of a run, and its snapshot."""
    tables = bench_tables.write(tmp_path / "tables", [])
    about = {"axes": {"allocator": "caching", "prefetch": "none", "advice": "none"}}
    about |= {"network": "cnn", "torch": "2.9.1"}
    bench_tables.write(tables, [], about=about)
    return script(
        tmp_path / "python",
        f"""printf '%s\\n' "$*" >> {shlex.quote(str(tmp_path / "log"))}
[ "$1" != -c ] || exit 0
while [ $# -gt 0 ]; do
  case $1 in
    --out) cp -r {shlex.quote(str(tables))} "$2"; shift ;;
    --snapshot) echo snapshot > "$2"; shift ;;
  esac
  shift
done""",
    )


def calls(tmp_path):
    """How the Python was called, but for the question whether it has PyTorch."""
    lines = (tmp_path / "log").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("-c ")]


def names(folder):
    return sorted(each.name for each in Path(folder).iterdir())


# Without PyTorch


def test_a_python_without_pytorch_is_told_before_anything_is_compiled(run, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", str(tmp_path / "no-such-nvcc"))
    # Without site-packages, there is none for certain.
    python = script(tmp_path / "python", f'exec {shlex.quote(sys.executable)} -S -E "$@"')
    for action in ("run", "sweep"):
        place = tmp_path / action
        status, out, err = run("--python", python, "-o", place, action=action)
        assert (status, out) == (6, "")
        assert err.startswith(f"nsan: torch_uvm did not run: {python} has no PyTorch: install it")
        assert err.count("\n") == 1
        assert not place.exists()


def test_a_pytorch_that_cannot_be_imported_leaves_a_run_that_says_so(run, tmp_path, library):
    broken = tmp_path / "packages" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.12 is missing')\n")
    python = script(
        tmp_path / "python",
        f'PYTHONPATH={shlex.quote(str(broken.parent))} exec {shlex.quote(sys.executable)} -S "$@"',
    )
    place, flags = tmp_path / "cnn", ("--library", str(library), "--batch", "2")
    status, _, err = run("--python", python, "-o", place, flags=flags)
    assert status == 6
    assert "torch_uvm: skipped: PyTorch cannot be imported (libcudart.so.12 is missing)" in err
    assert names(place) == ["bench.json", "cnn.alone"]
    made = json.loads((place / "bench.json").read_text())
    assert (made["status"], made["exit_status"]) == ("skipped", torch_machine.SKIPPED)
    assert made["condition"]["axes"]["batch"] == 2
    assert made["arguments"] == ["--library", "lib.so", "--batch", "2"]


def test_what_is_no_python_is_a_usage_error(run, tmp_path):
    for python, says in (
        (tmp_path / "none", "no such program"),
        (script(tmp_path / "sad", "echo 'out of order' >&2; exit 1"), "and says: out of order"),
    ):
        status, _, err = run("--python", python, "-o", tmp_path / "run")
        assert status == 2
        assert says in err
        assert not (tmp_path / "run").exists()


# With it


@pytest.mark.parametrize("allocator", ["raw", "caching"])
def test_the_harness_gets_the_library_and_a_folder_and_leaves_its_tables(
    run, tmp_path, monkeypatch, with_torch, allocator
):
    nvcc = '[ "$1" != --version ] || { echo "release 12.4, V12.4.131"; exit 0; }\n'
    nvcc += 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", nvcc)))
    place = tmp_path / "cnn"
    status, _, err = run(
        "--no-nsys", "--python", with_torch, "-o", place, flags=["--allocator", allocator]
    )
    assert status == 0, err
    assert "compiling managed_alloc" in err
    (call,) = calls(tmp_path)
    cache = Path(os.environ["NSAN_CACHE_DIR"])
    assert [call[1:3], call[3], call[5]] == [["--allocator", allocator], "--library", "--out"]
    assert Path(call[4]) == building.built(["managed_alloc"])["managed_alloc"]
    assert Path(call[6]).name == "cnn.alone"
    # Nothing but these files lies where PyTorch looks for its modules first.
    assert Path(call[0]).name == "torch_uvm.py"
    assert cache in Path(call[0]).parents
    assert names(Path(call[0]).parent) == FILES
    assert names(place) == ["bench.json", "cnn.alone"]
    made = json.loads((place / "bench.json").read_text())
    assert made["versions"]["torch"] == "2.9.1"
    assert made["condition"]["network"] == "cnn"
    assert made["arguments"] == ["--allocator", allocator]
    assert str(tmp_path) not in (place / "bench.json").read_text()


@pytest.mark.nsys
def test_under_nsys_it_also_writes_the_snapshot_of_its_cache(
    run, tmp_path, monkeypatch, with_torch, library
):
    monkeypatch.setenv("NSYS", str(need("2023.4.4") / "nsys"))
    flags = ["--library", str(library), "--allocator=caching"]
    place = tmp_path / "cnn"
    # It calls no CUDA here, so its trace is empty.
    status, _, err = run("--python", with_torch, "-o", place, flags=flags)
    assert status == 3, err
    alone, recorded = calls(tmp_path)
    assert alone[1:4] == recorded[1:4] == flags
    assert "--snapshot" not in alone
    assert [recorded[4], Path(recorded[5]).name] == ["--snapshot", "cnn.pickle"]
    assert [Path(call[-1]).name for call in (alone, recorded)] == ["cnn.alone", "cnn.truth"]
    assert (place / "cnn.pickle").read_text() == "snapshot\n"


def test_a_sweep_gives_it_the_axes_that_it_has(run, tmp_path, with_torch, library):
    wanted = ("--allocators", "raw,caching", "--factors", "0.5", "--prefetches", "none,ahead")
    flags = ["--library", str(library)]
    place = tmp_path / "sweep"
    more = ("--no-nsys", "--python", with_torch, "-o", place)
    status, out, err = run(*wanted, *more, flags=flags, action="sweep")
    assert status == 0, err
    folders = [f"{a}-0.5-{hint}" for a in ("raw", "caching") for hint in ("none", "prefetch-ahead")]
    assert names(place) == sorted([*folders, "sweep.csv", "sweep.json"])
    assert calls(tmp_path)[1][1:9] == [
        *("--allocator", "raw", "--prefetch", "ahead"),
        *("--advice", "none", "--oversubscription-factor", "0.5"),
    ]
    # A second one has nothing to do.
    assert run(*wanted, *more, flags=flags, action="sweep")[1] == out
    assert len(calls(tmp_path)) == 4


def test_the_values_of_its_axes_are_those_of_the_programs():
    choices = {name: set(values) for name, (values, _) in torch_uvm.CHOICES.items()}
    assert choices["allocator"] == set(ALLOCATORS)
    assert choices["advice"] == set(ADVICES)
    assert choices["prefetch"] == set(PREFETCHES) - {"whole"}


# What is asked


@pytest.mark.parametrize(
    ("options", "flags", "says"),
    [
        ((), ("--snapshot", "x"), "--snapshot is given by nsan itself"),
        ((), ("--out=x",), "--out is given by nsan itself"),
        (("--batch", "2"), (), "--batch is a flag of torch_uvm itself: write it behind --"),
        (("--network", "cnn"), (), "--network is a flag of torch_uvm itself"),
        (("--steps", "2"), (), "--steps means nothing to torch_uvm"),
        (("--program", "x"), (), "--program means nothing to torch_uvm"),
    ],
)
def test_what_does_not_fit_is_refused(run, tmp_path, options, flags, says):
    status, _, err = run(*options, "-o", tmp_path / "x", flags=flags)
    assert status == 2
    assert says in err
    assert names(tmp_path) == []


def test_a_sweep_has_no_prefetch_that_the_harness_has_not(run, tmp_path):
    for option, value, says in (
        ("--prefetches", "none,whole", "no --prefetch whole: --prefetches none,ahead"),
        ("--patterns", "stream", "--patterns means nothing to torch_uvm"),
    ):
        status, _, err = run(option, value, "-o", tmp_path / "x", action="sweep")
        assert status == 2
        assert says in err


def test_python_is_for_the_harness_alone(tmp_path, capfd):
    command = ["bench", "run", "uvm_bench", "--python", "python3", "-o", str(tmp_path / "x")]
    assert main(command) == 2
    assert "--python means nothing to uvm_bench" in capfd.readouterr().err


def test_a_question_is_answered_without_pytorch_or_a_compiler(run, monkeypatch, tmp_path):
    monkeypatch.setenv("NVCC", str(tmp_path / "no-such-nvcc"))
    status, out, _ = run(flags=["--help"])
    assert status == 0
    assert out.startswith("usage: torch_uvm ")


def test_files_of_an_earlier_call_that_are_damaged_are_written_again(run, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", str(tmp_path / "no-such-nvcc"))
    assert run(flags=["--help"])[0] == 0
    (place,) = (Path(os.environ["NSAN_CACHE_DIR"]) / "bench").iterdir()
    (place / "torch_record.py").write_text("damaged(")
    shutil.rmtree(place / "__pycache__", ignore_errors=True)
    (place / "torch_machine.py").unlink()
    assert run(flags=["--help"])[0] == 0
