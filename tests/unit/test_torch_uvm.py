"""torch_uvm: what stands against a run, what hooks do, what is written. Neither PyTorch nor a GPU is needed for most."""

from __future__ import annotations

import csv
import ctypes
import json
import math
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from nsan.io.bench_truth import read_truth
from nsan.microbench import torch_machine as machine
from nsan.microbench import torch_networks as networks
from nsan.microbench import torch_record as recording
from nsan.microbench import torch_uvm
from nsan.units import GIB, MIB

FOLDER = Path(torch_uvm.__file__).parent
FILES = ("torch_uvm.py", "torch_machine.py", "torch_networks.py", "torch_record.py")


@pytest.fixture
def no_torch(monkeypatch):
    """Python without PyTorch, also where it is installed."""
    monkeypatch.setitem(sys.modules, "torch", None)


def ended(function, *arguments, **named):
    """Exit status and reason of what a function refuses."""
    with pytest.raises(machine.EndedError) as error:
        function(*arguments, **named)
    return error.value.status, str(error.value)


@pytest.mark.parametrize(
    ("version", "allocator", "least"),
    [("2.7.1+cu126", "caching", "2.8"), ("1.13.1", "raw", "2.0"), ("nightly", "raw", "2.0")],
)
def test_a_version_that_cannot_do_it_is_refused_with_the_one_that_can(version, allocator, least):
    status, reason = ended(machine.check_version, version, allocator)
    assert status == machine.SKIPPED
    assert (
        f"--allocator {allocator} needs PyTorch {least} or newer, and this is {version}" in reason
    )


@pytest.mark.parametrize(
    ("version", "allocator", "n_notes"),
    [
        ("2.8.0", "caching", 1),
        ("2.12.1", "caching", 1),
        ("2.13.0a0+git1", "caching", 0),
        ("3.0", "caching", 0),
        ("2.7.1", "raw", 0),
        ("2.0.0", "raw", 0),
    ],
)
def test_a_version_that_does_not_poll_in_a_pool_runs_with_a_note(version, allocator, n_notes):
    assert len(machine.check_version(version, allocator)) == n_notes


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, "PYTORCH_NO_CUDA_MEMORY_CACHING is set"),
        ({"PYTORCH_ALLOC_CONF": "Expandable_Segments: True"}, "expandable_segments:true"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,backend:cudaMallocAsync"},
            "backend:cudamallocasync",
        ),
    ],
)
def test_a_setting_that_takes_cache_or_managed_memory_away_is_refused(environment, said):
    status, reason = ended(machine.check_environment, environment, "caching")
    assert status == machine.USAGE
    assert said in reason
    assert "unset it" in reason


def test_settings_that_change_nothing_here_are_let_be():
    machine.check_environment({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "caching")
    machine.check_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "raw")


@pytest.mark.parametrize(
    ("managed", "available", "host", "is_allowed"),
    [
        (8 * GIB, 8 * GIB, 64 * GIB, False),
        (56 * GIB, 8 * GIB, 64 * GIB, True),  # an eighth of the host's 64 GiB stays free
        (GIB, 8 * GIB, GIB + 512 * MIB, False),  # at least 512 MiB do
    ],
)
def test_a_footprint_that_gpu_and_host_have_room_for_is_taken(managed, available, host, is_allowed):
    machine.check_footprint(managed, available, host, is_allowed=is_allowed)


@pytest.mark.parametrize(
    ("managed", "available", "host", "is_allowed", "said"),
    [
        (8 * GIB + 1, 8 * GIB, 64 * GIB, False, "8192 MiB of managed memory is more than the 8192"),
        (56 * GIB + 1, 8 * GIB, 64 * GIB, True, "8192 MiB must stay free"),
        (GIB, 8 * GIB, GIB + 511 * MIB, False, "512 MiB must stay free"),
        (1, GIB, 0, True, "the host has 0 MiB available"),
    ],
)
def test_a_footprint_that_could_leave_gpu_or_host_without_memory_is_refused(
    managed, available, host, is_allowed, said
):
    status, reason = ended(machine.check_footprint, managed, available, host, is_allowed=is_allowed)
    assert status == machine.REFUSED
    assert said in reason
    assert "choose a smaller --batch" in reason


def test_the_ballast_leaves_the_footprint_over_the_factor():
    assert machine.ballast_of(GIB, 80 * GIB, None) == 0
    # 1000 MiB at factor 1.25 need 800 MiB; of 1001 MiB free 201 go, in whole 2 MiB.
    assert machine.ballast_of(1000 * MIB, 1001 * MIB, 1.25) == 200 * MIB
    assert machine.ballast_of(1000 * MIB, 800 * MIB, 1.25) == 0


@pytest.mark.parametrize(("factor", "needs"), [(0.5, "2000 MiB"), (100.0, "10 MiB")])
def test_a_factor_that_the_gpu_cannot_give_is_refused_with_what_it_can(factor, needs):
    status, reason = ended(machine.ballast_of, 1000 * MIB, 800 * MIB, factor)
    assert status == machine.REFUSED
    assert f"needs {needs} available" in reason
    assert "from 16 to 800 MiB can be had" in reason


def written(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_host_has_what_is_available_within_the_limit_of_the_container(tmp_path):
    written(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:    1024 kB\n")
    assert machine.host_available(str(tmp_path)) == MIB
    group = {
        "sys__fs__cgroup__memory_dot_max": "900000",
        "sys__fs__cgroup__memory_dot_current": "1",
    }
    written(tmp_path, **group)
    assert machine.host_available(str(tmp_path)) == 899_999
    written(tmp_path, sys__fs__cgroup__memory_dot_max="max\n")
    assert machine.host_available(str(tmp_path)) == MIB


def test_the_driver_is_described_as_far_as_it_can_be_read(tmp_path):
    assert machine.driver_facts(str(tmp_path)) == {"version": None, "uvm_parameters": {}}
    written(
        tmp_path,
        sys__module__nvidia__version="580.65.06\n",
        sys__module__nvidia_uvm__parameters__uvm_perf_prefetch_enable="1\n",
    )
    assert machine.driver_facts(str(tmp_path)) == {
        "version": "580.65.06",
        "uvm_parameters": {"uvm_perf_prefetch_enable": "1"},
    }


def test_before_a_module_runs_the_next_one_is_prefetched_and_in_the_backward_pass_the_one_before():
    order = ["stem", "block", "head"]
    assert [torch_uvm.neighbour(order, name, 1) for name in order] == ["block", "head", None]
    assert [torch_uvm.neighbour(order, name, -1) for name in order] == [None, "stem", "block"]
    assert torch_uvm.neighbour(order, "unknown", 1) is None


def test_what_is_smaller_than_a_mebibyte_or_was_named_before_gets_no_hint():
    places = [(4096, MIB), (0, MIB - 1), (4096, MIB), (8 * MIB, 2 * MIB)]
    assert torch_uvm.worth_a_hint(places) == [(4096, MIB), (8 * MIB, 2 * MIB)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "0"], "--batch: '0' is not a whole number from 1 on"),
        (["--batch", "1e3"], "'1e3' is not a whole number"),
        (["--seed", "9" * 12], "is not a whole number"),
        (["--oversubscription-factor", "nan"], "'nan' is not a factor above 0"),
        (["--oversubscription-factor", "-1"], "'-1' is not a factor above 0"),
        (["--network", "resnet"], "invalid choice: 'resnet'"),
        (["--network", "transformer", "--width", "100"], "multiple of 64"),
        (["--snapshot", "x.pickle"], "without a cache there is nothing to show"),
        (["--out", str(FOLDER)], "is there and holds something"),
        (["--out", __file__], "is there and holds something"),
        (["--iter", "3"], "unrecognized arguments"),
    ],
)
def test_a_command_line_that_cannot_be_understood_is_said_in_one_line(arguments, said, capsys):
    assert torch_uvm.main(arguments) == machine.USAGE
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("torch_uvm: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.usefixtures("no_torch")
def test_without_pytorch_the_run_is_skipped_and_its_tables_say_so(tmp_path, capsys):
    assert torch_uvm.main(["--out", str(tmp_path / "new" / "run.truth")]) == machine.SKIPPED
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("torch_uvm: PyTorch cannot be imported")
    assert error.count("\n") == 1
    folder = tmp_path / "new" / "run.truth"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["run.truth"]
    run = json.loads((folder / "run.json").read_text())
    assert (run["nsan_microbench"], run["program"], run["status"]) == (1, "torch_uvm", "skipped")
    assert run["axes"]["allocator"] == "raw"
    assert str(tmp_path) not in (folder / "run.json").read_text()
    assert read_truth(folder).rows == ()


@pytest.mark.usefixtures("no_torch")
def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert torch_uvm.main(["--out", str(tmp_path / "file" / "x")]) == machine.FAILED
    assert capsys.readouterr().err.count("\n") == 1


def test_the_files_alone_run_where_nsan_is_not_installed(tmp_path):
    for name in FILES:
        shutil.copy(FOLDER / name, tmp_path)
    # Without site-packages: neither nsan nor PyTorch nor polars.
    command = [sys.executable, "-S", "-E", "torch_uvm.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (machine.SKIPPED, "")
    assert done.stderr.startswith("torch_uvm: PyTorch cannot be imported")


def test_tables_are_those_of_the_programs_and_a_reader_of_them_finds_the_allocations(tmp_path):
    record = recording.Record()
    record.allocated('conv"1,a', "parameter", (0x7F00_0000_0000, 600))
    record.allocated("empty", "parameter", (0, 0))
    record.phases.append(["forward", 0, 5, 9])
    record.phases.append(["init", None, 1, None])
    folder = tmp_path / "run.truth"
    recording.write_tables(folder, record, {"nsan_microbench": 1, "pid": 7})
    (row,) = read_truth(folder).rows
    assert (row.name, row.kind, row.va, row.n_bytes) == (
        'conv"1,a',
        "managed",
        0x7F00_0000_0000,
        600,
    )
    assert (folder / "phases.csv").read_text() == (
        "phase,name,iteration,start_ns,end_ns\n0,forward,0,5,9\n1,init,,1,\n"
    )
    assert (folder / "expected.csv").read_text() == (
        "phase,allocation,direction,least_bytes,most_bytes\n"
    )
    with (folder / "allocations.csv").open(newline="") as file:
        (cells,) = csv.DictReader(file)
    assert (cells["allocation"], cells["role"], cells["free_ns"]) == ("0", "parameter", "")


def test_run_json_names_no_path():
    axes = torch_uvm.parse(["--library", "/home/alice/lib.so", "--allocator", "caching"])
    run = torch_uvm.described(axes, recording.Record(), {}, "/home/alice/lib.so cannot be loaded")
    assert run["reason"] == "lib.so cannot be loaded"
    assert "/home" not in json.dumps(run)
    assert run["axes"]["allocator"] == "caching"


def segment(address, n_bytes, kind="large", pool=(0, 1)):
    return {
        "address": address,
        "total_size": n_bytes,
        "segment_type": kind,
        "segment_pool_id": list(pool),
    }


def snapshot(*segments):
    made = [
        {"action": "segment_alloc", "addr": 0x2000, "time_us": 1_000_002, "size": 20},
        {"action": "alloc", "addr": 0x1000, "time_us": 1_000_003, "size": 1},
        {"action": "segment_alloc", "addr": 0x1000, "time_us": 1_000_005, "size": 2},
    ]
    return {"segments": list(segments), "device_traces": [made]}


def test_the_segments_of_the_pool_are_the_allocations_in_the_order_in_which_they_were_made():
    taken = snapshot(segment(0x1000, 2 * MIB, "small"), segment(0x2000, 20 * MIB))
    assert recording.segments_of(taken, (0, 1), 1_000_000_000) == [
        ["segment 1 (large)", "segment", "managed", 0x2000, 20 * MIB, 2000, None],
        ["segment 2 (small)", "segment", "managed", 0x1000, 2 * MIB, 5000, None],
    ]


def test_memory_outside_of_the_managed_pool_ends_the_run():
    taken = snapshot(segment(0x1000, 2 * MIB, "small"), segment(0x9000, 20 * MIB, pool=(0, 0)))
    status, reason = ended(recording.segments_of, taken, (0, 1), 0)
    assert status == machine.FAILED
    assert f"{20 * MIB} byte of PyTorch's memory are outside of the managed pool" in reason


def test_a_snapshot_is_written_whole_or_not_at_all(tmp_path):
    recording.write_snapshot(tmp_path / "run.pickle", snapshot())
    assert pickle.loads((tmp_path / "run.pickle").read_bytes()) == snapshot()
    status, reason = ended(recording.write_snapshot, tmp_path / "no" / "run.pickle", snapshot())
    assert status == machine.FAILED
    assert "choose another place" in reason
    assert [path.name for path in tmp_path.iterdir()] == ["run.pickle"]


# The library for PyTorch: compiled, loaded, and asked for memory that no driver gives here.


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc here (CUDA toolkit)")
    path = tmp_path_factory.mktemp("library") / "libmanaged_alloc.so"
    warnings = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Wshadow,-Werror"]
    shared = ["-shared", "-Xcompiler=-fPIC", "-arch=sm_90", "-std=c++17", "-lineinfo"]
    source = FOLDER / "cuda" / "managed_alloc.cu"
    done = subprocess.run(
        [nvcc, *shared, *warnings, "-o", path, source], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return path


ASK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
take, give = library.nsan_managed_alloc, library.nsan_managed_free
take.restype = ctypes.c_void_p
take.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
give.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
print([take(n, 0, None) for n in (0, -1, int(sys.argv[2]))])
give(None, 0, 0, None)
"""


def test_the_library_gives_null_and_says_why_where_there_is_no_memory(library):
    # More than any GPU or host has: refused with a driver as without one.
    done = subprocess.run(
        [sys.executable, "-c", ASK, library, str(1 << 60)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[None, None, None]\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("managed_alloc: cuda")
    assert f"of {1 << 60} byte: cudaError" in line


# With PyTorch, on its CPU: what its own modules make of the hooks and the estimate.


class Runtime:
    """Notes what the CUDA runtime is asked."""

    def __init__(self, unmanaged=()):
        self.calls = []
        self.unmanaged = unmanaged

    def is_managed(self, address):
        return address not in self.unmanaged

    def prefetch(self, place, stream):
        self.calls.append(("prefetch", place, stream))

    def advise(self, place, advice):
        self.calls.append(("advise", place, advice))


class HostCuda:
    """What train() asks of torch.cuda, on the CPU."""

    def __init__(self):
        self.calls = []
        self.nvtx = self

    def range_push(self, name):
        self.calls.append(f"push {name}")

    def range_pop(self):
        self.calls.append("pop")

    def mark(self, text):
        self.calls.append(f"mark {text.rsplit(' ', 1)[0]}")

    def synchronize(self):
        self.calls.append("synchronize")


class HostTorch:
    """PyTorch whose GPU is the CPU."""

    def __init__(self, torch):
        self._torch, self.cuda = torch, HostCuda()

    def __getattr__(self, name):
        return getattr(self._torch, name)

    def device(self, *_):
        return self._torch.device("cpu")


SIZES = {"batch": 2, "image": 8, "sequence": 6, "vocabulary": 50, "iterations": 2}


def axes_of(network, **named):
    return Namespace(network=network, seed=1, device=0, width=16, depth=1, **SIZES, **named)


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        # 3x3 convolutions 3>16, 16>16, 16>16; three batch norms; a linear layer 16>1000.
        ("cnn", 432 + 2 * 2304 + 3 * 32 + 17_000),
        # Embedding and head 50x16; norms 3x32; qkv 16>48, 16>16, 16>64, 64>16 with biases.
        ("transformer", 2 * 800 + 96 + 816 + 272 + 1088 + 1040),
    ],
)
def test_the_networks_have_the_parameters_that_their_layers_make(network, parameters):
    torch = pytest.importorskip("torch")
    made = networks.network(torch, axes_of(network))
    assert sum(p.numel() for p in made.parameters()) == parameters
    assert networks.estimate(torch, axes_of(network))["parameter_bytes"] == 4 * parameters


def test_the_estimate_has_what_the_backward_pass_needs_and_no_weights():
    torch = pytest.importorskip("torch")
    axes = axes_of("cnn")
    axes.depth, axes.image = 0, 64
    plan = networks.estimate(torch, axes)
    # The image, and what batch norm and ReLU keep of 16 channels: the rest is below 64 KiB.
    kept = 4 * 2 * 64 * 64 * (3 + 16 + 16)
    assert kept <= plan["saved_bytes"] <= kept + 65_536
    activation = 4 * 2 * 64 * 64 * 16
    others = 3 * plan["parameter_bytes"] + 2 * activation + networks.WORKSPACE_BYTES
    assert plan["managed_bytes"] == plan["saved_bytes"] + others


@pytest.mark.parametrize("network", ["cnn", "transformer"])
def test_training_marks_its_steps_and_phases_and_knows_what_lives_to_the_end(network):
    torch = HostTorch(pytest.importorskip("torch"))
    record = recording.Record()
    hooks = torch_uvm.Hooks(Runtime(), "none", None)
    assert math.isfinite(torch_uvm.train(torch, axes_of(network), record, hooks))
    names = [(name, iteration) for name, iteration, _, _ in record.phases]
    steps = [(name, i) for i in (0, 1) for name in ("forward", "backward", "update")]
    assert names == [("init", None), *steps]
    assert all(start <= end for _, _, start, end in record.phases)
    phase = ["push {}", "synchronize", "pop"]
    step = [line.format(name) for name in ("forward", "backward", "update") for line in phase]
    assert torch.cuda.calls == [
        *["mark nsan clock", "push init", "synchronize", "pop"],
        *["push step", *step, "pop"] * 2,
    ]
    roles = [role for _, role, *_ in record.allocations]
    n_parameters = len(list(networks.network(torch, axes_of(network)).parameters()))
    assert roles.count("optimizer") == n_parameters
    assert roles.count("input") == 2
    addresses = [va for *_, va, _, _, _ in record.allocations]
    assert len(set(addresses)) == len(addresses)


def two_layers(torch, n):
    model = torch.nn.Sequential(
        torch.nn.Linear(n, n, bias=False), torch.nn.Linear(n, n, bias=False)
    )
    return model, torch_uvm.place_of(model[0].weight), torch_uvm.place_of(model[1].weight)


def test_parameters_are_prefetched_one_module_ahead_in_both_passes():
    torch = pytest.importorskip("torch")
    model, first, second = two_layers(torch, 512)  # weights of 1 MiB
    runtime = Runtime()
    torch_uvm.Hooks(runtime, "none", 71).put_on(model)
    model(torch.ones(1, 512)).sum().backward()
    # The first forward pass learns the order; its backward pass is the first to know it.
    assert runtime.calls == [("prefetch", first, 71)]
    runtime.calls.clear()
    model(torch.ones(1, 512)).sum().backward()
    assert runtime.calls == [("prefetch", second, 71), ("prefetch", first, 71)]


def test_the_backward_pass_prefetches_activations_that_are_still_needed():
    torch = pytest.importorskip("torch")
    model, first, _ = two_layers(torch, 512)
    runtime = Runtime()
    torch_uvm.Hooks(runtime, "none", 71).put_on(model)
    given = torch.ones(512, 512)
    model(given).sum().backward()
    places = [place for _, place, _ in runtime.calls]
    assert places[0] == first
    assert torch_uvm.place_of(given) in places
    assert all(place[1] == MIB for place in places)


@pytest.mark.parametrize(("advice", "n_activations"), [("accessed-by", 2), ("read-mostly", 0)])
def test_advice_goes_to_parameters_and_but_for_read_mostly_to_activations(advice, n_activations):
    torch = pytest.importorskip("torch")
    model, *weights = two_layers(torch, 512)
    runtime = Runtime()
    torch_uvm.Hooks(runtime, advice, None).put_on(model)
    assert runtime.calls == [("advise", place, advice) for place in weights]
    model(torch.ones(512, 512))
    assert len(runtime.calls) == 2 + n_activations


def test_a_tensor_that_is_not_managed_ends_the_run():
    torch = pytest.importorskip("torch")
    model, first, _ = two_layers(torch, 4)
    hooks = torch_uvm.Hooks(Runtime(unmanaged={first[0]}), "none", None)
    status, reason = ended(hooks.put_on, model)
    assert status == machine.FAILED
    assert reason.startswith("0 is not in managed memory")


def test_without_a_driver_pytorch_ends_with_the_status_of_that():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("a GPU, or a PyTorch without CUDA")
    status, reason = ended(machine.Runtime, 0)
    assert status == machine.NO_DRIVER
    assert "install an NVIDIA driver" in reason


def test_a_location_is_passed_as_cuda_13_wants_it():
    assert ctypes.sizeof(machine.Location) == 8
    place = machine.Location(1, 3)
    assert (place.type, place.id) == (1, 3)
