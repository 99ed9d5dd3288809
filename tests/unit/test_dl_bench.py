"""dl_bench over a GPU that the CPU plays: what it counts, allocates, launches, hints and proves.

The tape that most tests play is worked out by hand: see ``TAPE``.
"""

from __future__ import annotations

import csv
import json

import cpp
import pytest
from conftest import SOAK

from nsan.microbench.tapes import tape_text
from nsan.model.networks import NETWORKS, SMALL
from nsan.model.placing import placed
from nsan.model.profiles import GPUS

BY_NAME = {network.name: network for network in (*NETWORKS, *SMALL)}
PARAMETERS = {
    "alexnet": 61_100_840,
    "resnet-50": 25_557_032,
    "bert-base": 109_482_240,
    "gpt2-small": 124_439_808,
}
"""As torchvision and transformers count them."""

MIB = 1 << 20
TAPE = """nsan-tape 1
network	tiny
fact	parameter_count	262144
fact	optimizer	sgd
c	0	1048576	parameter	fc.weight
h	0
c	1	10000	parameter	fc.bias
h	1
s	1
c	2	2097152	input	x#1
h	2
p	forward
c	3	1048580	activation	y#1
k	1000	3	2	0	1	1	3	fc forward
p	backward
c	4	1048576	gradient	fc.weight.grad#1
k	2000	2	2	3	1	4	fc backward
d	3
p	update
k	0	2	0	4	1	0	sgd fc.weight
d	2
s	2
d	4
c	5	2097152	input	x#2
h	5
p	forward
c	6	1048580	activation	y#2
k	1000	3	5	0:524288	1	1	6	fc forward
p	backward
c	7	1048576	gradient	fc.weight.grad#2
k	2000	2	5	6	1	7	fc backward
d	6
p	update
k	0	2	0	7	1	0	sgd fc.weight
d	5
end	31
"""
"""Step 1 reads x, weight, bias; x, y; weight, gradient, and writes y, gradient, weight. Step 2 reads half the weight."""
READ = 2 * MIB + MIB + 10000 + 2 * MIB + MIB + 4 + MIB + MIB
WRITTEN = MIB + 4 + MIB + MIB
PEAK = MIB + 10000 + 2 * MIB + MIB + 4 + MIB
"""Weight, bias, x, y, gradient."""
BIG = TAPE.replace("end\t31", f"c\t8\t{24 * MIB}\tworkspace\tscratch\nd\t8\nend\t33")
"""Large enough that less than its peak is still what a driver needs, 16 MiB; nobody touches the scratch."""
BIG_PEAK = 24 * MIB + 2 * MIB + 10000
"""Scratch, weight, gradient, bias."""


@pytest.fixture(scope="session")
def program():
    return cpp.built("dl_bench", ["dl_bench_host.cpp"])


@pytest.fixture(scope="session")
def cases():
    return cpp.built("test_dl_bench", ["test_dl_bench.cpp"])


@pytest.fixture
def play(program, tmp_path):
    """Play a tape; flags and environment as given. The run has json, calls and tables."""

    def played(*flags, tape=TAPE, **environment):
        path = tmp_path / "net.tape"
        path.write_text(tape, encoding="utf-8")
        machine = tmp_path / "machine"
        (machine / "proc").mkdir(parents=True, exist_ok=True)
        (machine / "proc" / "meminfo").write_text("MemAvailable: 67108864 kB\n")
        environment = {"DL_BENCH_ROOT": str(machine), **environment}
        log = tmp_path / "calls"
        environment["NSAN_HOST_LOG"] = str(log)
        done = cpp.run(program, "--tape", path, *flags, environment=environment)
        done.json = json.loads(done.stdout) if done.stdout else None
        done.calls = log.read_text().splitlines() if log.exists() else []
        return done

    return played


@pytest.fixture
def tables(tmp_path):
    def read(name):
        with (tmp_path / "out" / f"{name}.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return read


def out(tmp_path):
    return "--out", str(tmp_path / "out")


def without(calls, *starts):
    return [call for call in calls if not call.startswith(starts)]


# Kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "reads_each_byte",
        "writes_each_byte_and_no_other",
        "a_wrong_word_goes_into_the_output",
        "changes_in_place",
        "reads_the_front_only",
        "reads_rows_anywhere",
        "computes_without_changing_anything",
        "sizes_follow_the_arithmetic",
        "what_it_did_is_added_up",
    ],
)
def test_a_kernel(cases, case):
    done = cpp.run(cases, case)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_each_case_of_a_kernel_is_run(cases):
    assert len(cpp.run(cases).stdout.split()) == 9


# Counts -------------------------------------------------------------------------------------------


def test_bytes_of_a_step_are_the_sums_of_its_kernels(play):
    first, second = play("--dry-run").json["per_step"]
    assert (first["read_bytes"], first["written_bytes"]) == (READ, WRITTEN)
    assert (second["read_bytes"], second["written_bytes"]) == (READ - MIB // 2, WRITTEN)
    assert first["peak_bytes"] == second["peak_bytes"] == PEAK
    assert (first["n_kernels"], first["n_tensors"], first["flops"]) == (3, 3, 3000)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("varying", [False, True] if SOAK else [False])
def test_bytes_of_each_network_and_step_are_those_of_the_model(play, name, varying):
    model = BY_NAME[name].build(steps=3 if SOAK else 2, varying=varying)
    found = play("--dry-run", tape=tape_text(model)).json
    for counted, expected in zip(found["per_step"], model.facts["per_step"], strict=True):
        assert counted == {key: expected[key] for key in counted}
        assert len(counted) == 8
    assert found["peak_tensor_bytes"] == model.facts["peak_bytes"]
    assert found["n_steps"] == len(model.facts["per_step"])


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_weights_on_a_tape_are_as_many_as_published(play, name):
    text = tape_text(BY_NAME[name].build(steps=1))
    assert play("--dry-run", tape=text).json["facts"]["parameter_count"] == PARAMETERS[name]
    lines = [line.split("\t") for line in text.splitlines()]
    n_bytes = sum(int(line[2]) for line in lines if line[0] == "c" and line[3] == "parameter")
    assert n_bytes == 4 * PARAMETERS[name]


def test_a_dry_run_uses_no_gpu(play):
    done = play("--dry-run", NSAN_HOST_WITHOUT="driver")
    assert done.returncode == 0
    assert done.json["dry_run"] is True
    assert done.json["facts"] == {"parameter_count": 262144, "optimizer": "sgd"}
    # Weight, gradient, y: 1 MiB, which are small, and 4 byte more, which is large; x and y from 20 MiB.
    assert done.json["peak_reserved_bytes"] == 2 * 2 * MIB + 20 * MIB
    assert done.calls == []


def test_only_the_first_steps_are_played_if_that_is_asked_for(play):
    done = play("--steps", 1)
    assert done.json["n_steps"] == 1
    assert (len(done.json["per_step"]), done.json["n_kernels"]) == (1, 3)
    assert sum(call.startswith("launch") for call in done.calls) == 3
    assert done.json["verified"] is True


@pytest.mark.parametrize("steps", ["3", "0", "two"])
def test_steps_that_the_tape_does_not_have_are_refused(play, steps):
    done = play("--steps", steps)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"dl_bench: --steps: '{steps}'" if steps != "3" else "dl_bench: --steps 3: "
    )
    assert done.stdout == ""


# Memory -------------------------------------------------------------------------------------------


def test_without_a_cache_each_tensor_is_an_allocation_of_its_own(play, tables, tmp_path):
    assert play(*out(tmp_path)).json["verified"] is True
    rows = [row for row in tables("allocations") if row["kind"] == "managed"]
    assert [(row["name"], row["role"], int(row["bytes"])) for row in rows] == [
        ("fc.weight", "parameter", MIB),
        ("fc.bias", "parameter", 10000),
        ("x#1", "input", 2 * MIB),
        ("y#1", "activation", MIB + 4),
        ("fc.weight.grad#1", "gradient", MIB),
        ("x#2", "input", 2 * MIB),
        ("y#2", "activation", MIB + 4),
        ("fc.weight.grad#2", "gradient", MIB),
    ]
    lives = {row["name"]: (int(row["alloc_ns"]), int(row["free_ns"])) for row in rows}
    assert lives["y#1"][1] < lives["x#1"][1] < lives["fc.weight.grad#1"][1] < lives["x#2"][0]
    assert not (tmp_path / "out" / "history.csv").exists()


def test_each_tensor_is_freed_when_the_tape_says_so(play):
    calls = [c for c in play().calls if c.startswith(("allocate", "free", "launch"))]
    names = {MIB: "1M", 10000: "bias", 2 * MIB: "x", MIB + 4: "y", 8 * 4097: "tally"}
    short = [
        call.split()[1] if call.startswith("launch") else f"{call[0]} {names[int(call.split()[1])]}"
        for call in calls
    ]
    step = ["a x", "a y", "forward_op", "a 1M", "backward_op", "f y", "update_op", "f x"]
    last = ["f 1M", *step]
    assert short[:-4] == ["a tally", "a 1M", "a bias", *step, *last]
    assert sorted(short[-4:]) == ["f 1M", "f 1M", "f bias", "f tally"]


def test_with_a_cache_the_allocations_are_segments(play, tables, tmp_path):
    done = play(*out(tmp_path), "--allocator", "caching")
    segments = [row for row in tables("allocations") if row["role"] == "segment"]
    assert [(row["name"], int(row["bytes"])) for row in segments] == [
        ("segment 1 (small)", 2 * MIB),
        ("segment 2 (large)", 20 * MIB),
        ("segment 3 (small)", 2 * MIB),
    ]
    assert done.json["verified"] is True
    assert done.json["peak_reserved_bytes"] == 24 * MIB
    assert done.json["footprint"]["managed_bytes"] == 24 * MIB
    left = {row["tensor"] for row in tables("blocks") if row["state"] == "active_allocated"}
    assert left == {"fc.weight", "fc.bias", "fc.weight.grad#2"}


def test_the_cache_is_asked_for_the_same_as_in_the_driver_model(play, tables, tmp_path):
    model = BY_NAME["resnet-8"].build(steps=2, batch=4)
    history = placed(model, "caching", GPUS["a100-pcie"]).history
    done = play(
        *out(tmp_path), "--allocator", "caching", "--flops-scale", "0", tape=tape_text(model)
    )
    assert done.json["verified"] is True
    found = [(r["action"], int(r["bytes"]), r["tensor"]) for r in tables("history")]
    assert found == [(e.action, e.n_bytes, e.stack) for e in history.entries]


@pytest.mark.parametrize("allocator", ["raw", "caching"])
def test_a_whole_network_is_played_and_proved(play, allocator):
    model = BY_NAME["resnet-8"].build(steps=2, batch=64 if SOAK else 2)
    done = play("--allocator", allocator, "--flops-scale", "0", tape=tape_text(model))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.json["verified"] is True
    assert sum(call.startswith("launch") for call in done.calls) == 228
    steps = done.json["per_step"]
    assert [s["read_bytes"] for s in steps] == [s["read_bytes"] for s in model.facts["per_step"]]


LOOKUP = """nsan-tape 1
network	words
c	0	1048576	parameter	wte.weight
h	0
s	1
c	1	800	input	tokens#1
h	1
p	forward
c	2	64000	activation	wte.output#1
k	0	2	1	0:64000/640	1	2	wte embedding forward
p	backward
c	3	1048576	gradient	wte.weight.grad#1
k	0	2	2	1	1	3	wte embedding backward
d	1
d	2
p	update
k	0	2	0	3	1	0	sgd wte.weight
end	15
"""


def test_a_lookup_of_rows_is_played_and_proved(play):
    done = play(tape=LOOKUP)
    assert done.json["verified"] is True
    assert done.json["per_step"][0]["read_bytes"] == 800 + 64000 + 64000 + 800 + 2 * MIB
    assert play(tape=LOOKUP, DL_BENCH_SKIP="1").returncode == 1


# Steps and hints ----------------------------------------------------------------------------------


def test_phases_follow_each_other_inside_steps(play, tables, tmp_path):
    done = play(*out(tmp_path))
    step = ["push_range input", "pop_range"]
    for phase, layer in (
        ("forward", "fc forward"),
        ("backward", "fc backward"),
        ("update", "sgd fc.weight"),
    ):
        step += [f"push_range {phase}", f"push_range {layer}", "pop_range", "pop_range"]
    ranges = [call for call in done.calls if "range" in call]
    outer = ["push_range init", "pop_range"]
    steps = ["push_range step", *step, "pop_range"]
    assert ranges == [*outer, *steps, *steps, "push_range verify", "pop_range"]
    phases = [(row["name"], row["iteration"]) for row in tables("phases")]
    names = ["input", "forward", "backward", "update"]
    assert phases == [
        ("init", ""),
        *((name, iteration) for iteration in "01" for name in names),
        ("verify", ""),
    ]


def test_ranges_of_layers_can_be_left_out(play):
    ranges = {call for call in play("--no-layer-ranges").calls if call.startswith("push_range")}
    names = ("init", "step", "input", "forward", "backward", "update", "verify")
    assert ranges == {f"push_range {name}" for name in names}


def test_the_gpu_is_waited_for_once_a_phase(play):
    calls = play().calls
    # init, two steps of four phases, verify, and the end of the program; cudaFree waits by itself.
    assert calls.count("synchronize") == 1 + 2 * 4 + 1 + 1


STEP_1 = """nsan-tape 1
network	tiny
c	0	1048576	parameter	a
h	0
c	1	1048575	parameter	too small
h	1
s	1
p	forward
c	2	2097152	activation	b
k	0	2	0	1	1	2	one
c	3	4194304	gradient	c
k	0	2	0	2	1	3	two
p	backward
d	2
p	update
k	0	2	0	3	1	0	three
end	14
"""


def hints(calls):
    """Prefetches, launches and waits of streams, shortened: sizes in MiB."""
    found = []
    for call in calls:
        word, *rest = call.split()
        if word == "prefetch":
            found.append(f"{int(rest[0]) // MIB} {rest[2]}")
            assert rest[1] == "gpu"
        elif word in {"launch", "follow"}:
            found.append(rest[0] if word == "launch" else " after ".join(rest))
    return found


def test_nothing_is_prefetched_without_being_asked(play):
    assert hints(play(tape=STEP_1).calls) == ["forward_op", "forward_op", "update_op"]


def test_whole_prefetches_what_a_kernel_uses_before_it(play):
    assert hints(play("--prefetch", "whole", tape=STEP_1).calls) == [
        *("1 main", "2 main", "forward_op"),
        *("1 main", "2 main", "4 main", "forward_op"),
        *("1 main", "4 main", "update_op"),
    ]


def test_ahead_prefetches_what_the_next_kernel_uses_beside_a_kernel(play):
    waits = ["main after prefetch", "prefetch after main"]
    assert hints(play("--prefetch", "ahead", tape=STEP_1).calls) == [
        *("1 prefetch", "2 prefetch", *waits, "forward_op"),  # there is no kernel before
        *("1 prefetch", "2 prefetch"),  # a and b for the second
        *("4 prefetch", *waits, "forward_op"),
        *("1 prefetch", "4 prefetch"),
        *(*waits, "update_op"),
    ]


def test_ahead_does_not_look_beyond_a_step(play):
    found = hints(play("--prefetch", "ahead").calls)
    # After the last kernel of step 1 comes what the first of step 2 uses: x, the weight and y, in one go.
    at = found.index("update_op")
    waits = ["main after prefetch", "prefetch after main"]
    assert found[at + 1 : at + 7] == [
        "2 prefetch",
        "1 prefetch",
        "1 prefetch",
        *waits,
        "forward_op",
    ]
    calls = play("--prefetch", "ahead").calls
    update = next(i for i, call in enumerate(calls) if call.startswith("launch update_op"))
    assert (
        "push_range step" in calls[update : calls.index(f"prefetch {2 * MIB} gpu prefetch", update)]
    )


def test_hints_are_for_the_roles_that_are_named(play):
    done = play("--prefetch", "whole", "--roles", "gradient+input", tape=STEP_1)
    assert hints(done.calls) == ["forward_op", "4 main", "forward_op", "4 main", "update_op"]


def test_an_unknown_role_is_refused_with_what_there_is(play):
    done = play("--roles", "parameter+gradients")
    assert done.returncode == 2
    assert "gradients" in done.stderr
    assert "did you mean gradient?" in done.stderr


@pytest.mark.parametrize("advice", ["read-mostly", "preferred-cpu", "accessed-by"])
def test_advice_is_given_when_a_tensor_is_made(play, advice):
    calls = without(play("--advice", advice, tape=STEP_1).calls, "push", "pop", "sync", "free")
    assert calls[2:4] == [f"allocate_managed {MIB}", f"advise {MIB} {advice}"]
    assert calls[4] == f"allocate_managed {MIB - 1}"  # too small for a hint
    assert sum(call.startswith("advise") for call in calls) == 3


def test_the_cpu_waits_before_it_writes_what_a_kernel_may_use(play):
    lines = TAPE.replace(
        "k\t2000\t2\t2\t3\t1\t4\tfc backward\nd\t3",
        "k\t2000\t2\t2\t3\t1\t4\tfc backward\nh\t2\nd\t3",
        1,
    )
    calls = play("--allocator", "caching", tape=lines.replace("end\t31", "end\t32")).calls
    assert calls.count("synchronize") == 1 + 2 * 4 + 1 + 1 + 1


# What must migrate --------------------------------------------------------------------------------


def expected(tables):
    names = {str(i): row["name"] for i, row in enumerate(tables("allocations"))}
    phases = {str(i): f"{r['name']} {r['iteration']}" for i, r in enumerate(tables("phases"))}
    return [
        (
            phases[row["phase"]],
            names[row["allocation"]],
            row["direction"],
            int(row["least_bytes"]),
            int(row["most_bytes"]),
        )
        for row in tables("expected")
    ]


def test_what_the_cpu_filled_comes_to_the_gpu_once_with_its_first_kernel(play, tables, tmp_path):
    play(*out(tmp_path))
    assert expected(tables) == [
        # The weight, 1 MiB, and the bias may share their VA blocks.
        ("forward 0", "x#1", "htod", 2 * MIB, 2 * MIB),
        ("forward 1", "x#2", "htod", 2 * MIB, 2 * MIB),
    ]


def test_nothing_is_certain_of_a_table_that_is_read_in_part_first(play, tables, tmp_path):
    text = TAPE.replace("k\t1000\t3\t2\t0\t1", "k\t1000\t3\t2:1048576\t0\t1", 1)
    assert text != TAPE
    assert play(*out(tmp_path), tape=text).returncode == 0
    assert [row[1] for row in expected(tables)] == ["x#2"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--allocator", "caching"),
        ("--prefetch", "whole"),
        ("--advice", "read-mostly"),
        ("--oversubscription-factor", "1.25", "--allow-oversubscription"),
    ],
)
def test_with_hints_a_cache_or_too_little_memory_nothing_is_certain(play, tables, tmp_path, flags):
    assert play(*out(tmp_path), *flags, tape=BIG).returncode == 0
    assert expected(tables) == []


# When something is wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", ["raw", "caching"])
@pytest.mark.parametrize("launch", range(1, 7))
def test_a_kernel_that_did_not_run_is_found(play, launch, allocator):
    done = play("--allocator", allocator, DL_BENCH_SKIP=str(launch))
    assert done.returncode == 1
    assert "the results are wrong" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("allocator", ["raw", "caching"])
def test_a_kernel_whose_output_nobody_reads_is_found_too(play, allocator):
    """The gradient of step 1, if no update reads it, goes unseen in step 2."""
    text = TAPE.replace("k\t0\t2\t0\t4\t1\t0\tsgd", "k\t0\t1\t0\t1\t0\tsgd")
    assert text != TAPE
    assert play("--allocator", allocator, tape=text).json["verified"] is True
    done = play("--allocator", allocator, tape=text, DL_BENCH_SKIP="2")
    assert (done.returncode, done.stdout) == (1, "")
    # Kernel n adds n for each of its quads and once more: 21 in all, of which 2 are missing, and the quads.
    quads = [2 * MIB // 16, 2 * MIB // 16, MIB // 16]
    every = [(n + 1) * (i + 1) for i, n in enumerate(quads * 2)]
    assert (
        f"whose tally is {sum(every) - every[1]} and must be {sum(every)}, one did not run"
        in done.stderr
    )


def test_an_interrupt_comes_between_two_operations(play, tables, tmp_path):
    done = play(*out(tmp_path), NSAN_HOST_INTERRUPT="launch:2")
    assert (done.returncode, done.stdout) == (130, "")
    assert [row["name"] for row in tables("phases") if not row["end_ns"]] == ["backward"]
    assert f"free {MIB + 4}" in done.calls  # y, by the end of the run and not by the tape
    assert not any(call.startswith("leaked") for call in done.calls)


@pytest.mark.parametrize("launch", [1, 2, 4, 5])
def test_a_bit_that_changed_is_found_by_the_next_kernel_that_reads_it(play, launch):
    done = play(DL_BENCH_FLIP=str(launch))
    assert done.returncode == 1
    reader = "fc backward" if launch in {1, 4} else "sgd fc.weight"
    assert f"kernel {launch + 1} ({reader}) did not find what was written" in done.stderr


def test_the_names_of_another_step_are_right_where_only_some_steps_are_played(play):
    done = play("--steps", "1", DL_BENCH_FLIP="2")
    assert "kernel 3 (sgd fc.weight)" in done.stderr


def test_a_call_that_fails_ends_the_run_with_one_line_and_its_tables(play, tables, tmp_path):
    done = play(*out(tmp_path), NSAN_HOST_FAIL="launch:2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "failed"
    assert [row["name"] for row in tables("phases")][-1] == "backward"


def test_a_factor_takes_the_rest_of_the_gpu(play):
    # 80 % of the peak are left, in granules of 2 MiB.
    done = play("--oversubscription-factor", "1.25", "--allow-oversubscription", tape=BIG)
    footprint = done.json["footprint"]
    assert footprint["tensor_bytes"] == BIG_PEAK
    assert 1.12 < footprint["tensor_oversubscription_factor"] <= 1.25
    # Scratch, weight, gradient and bias in whole blocks: 24 + 2 + 2 + 2.
    assert footprint["managed_bytes"] == 30 * MIB
    left = footprint["available_bytes"]
    assert footprint["oversubscription_factor"] == pytest.approx(30 * MIB / left)
    assert done.json["verified"] is True


def test_a_factor_leaves_the_same_memory_with_a_cache_and_without(play):
    flags = "--oversubscription-factor", "1.25", "--allow-oversubscription"
    raw = play(*flags, tape=BIG).json
    cached = play(*flags, "--allocator", "caching", tape=BIG).json
    left = raw["footprint"]["available_bytes"]
    assert cached["footprint"]["available_bytes"] == left
    for run in (raw, cached):
        assert run["footprint"]["tensor_bytes"] == BIG_PEAK
        assert run["footprint"]["tensor_oversubscription_factor"] == pytest.approx(BIG_PEAK / left)
    # Two small segments, one of 20 MiB for x and y, one for the scratch.
    assert cached["footprint"]["oversubscription_factor"] == pytest.approx(48 * MIB / left)


def test_a_cache_that_would_not_fit_is_refused_though_its_tensors_would(play):
    def with_factor(factor, *flags):
        return play("--oversubscription-factor", factor, *flags, tape=BIG)

    # 26.01 MiB over 48 + 64 that stay free. At 0.25 those 104.04 MiB are left, in granules of 2 less 32 KiB: 105.97.
    highest = "without it, at most --oversubscription-factor 0.2322"
    done = with_factor("0.25", "--allocator", "caching")
    assert (done.returncode, done.stdout) == (7, "")
    assert (
        "48 MiB of managed memory, which the caching allocator reserves in whole segments for 26.01 MiB of tensors, is "
        "more than the 41.97 MiB that" in done.stderr
    )
    assert done.stderr.endswith(f"; {highest}; a smaller {BATCH} takes less\n")
    assert with_factor("0.25").returncode == 0
    assert with_factor("0.2322", "--allocator", "caching").returncode == 0


def test_without_a_cache_what_must_fit_counts_whole_blocks(play):
    done = play("--oversubscription-factor", "0.28", tape=BIG)
    assert (done.returncode, done.stdout) == (7, "")
    # 26.01 MiB over 30 + 64.
    assert (
        "30 MiB of managed memory, which are whole blocks of 2 MiB for 26.01 MiB of tensors, is more than the"
        in done.stderr
    )
    assert "at most --oversubscription-factor 0.2766" in done.stderr
    assert play("--oversubscription-factor", "0.2766", tape=BIG).returncode == 0
    forced = play("--oversubscription-factor", "0.28", "--allow-oversubscription", tape=BIG)
    assert forced.returncode == 0
    assert play("--dry-run", tape=BIG).json["peak_block_bytes"] == 30 * MIB


BATCH = "batch (nsan bench run dl_bench --network NAME --batch N)"


def test_a_factor_for_which_the_network_is_too_small_says_that_a_batch_is_larger(play):
    done = play("--oversubscription-factor", "1")
    assert (done.returncode, done.stdout) == (7, "")
    assert "the driver needs 16 MiB: at most factor 0." in done.stderr
    assert done.stderr.endswith(f"; a larger {BATCH} takes more\n")


def test_memory_that_cannot_be_had_says_that_a_batch_is_smaller(play):
    for allocator in ("raw", "caching"):
        done = play("--allocator", allocator, NSAN_HOST_MANAGED_BYTES=str(3 * MIB))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith(f"(HostDevice): out of memory; a smaller {BATCH} takes less\n")
        assert "--bytes" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "way_out"),
    [
        (
            "--bytes=1GiB",
            "--bytes is not for dl_bench: the tape decides how much memory it takes; `nsan bench run dl_bench --network "
            "NAME --batch N` writes another",
        ),
        (
            "--iterations=5",
            "--iterations is not for dl_bench: the tape decides how many steps there are; --steps N plays the first N",
        ),
    ],
)
def test_flags_that_could_have_no_effect_are_refused(play, flag, way_out):
    done = play(flag, "--dry-run")
    assert (done.returncode, done.stdout, done.calls) == (2, "", [])
    assert done.stderr == f"dl_bench: {way_out}\n"
    name, value = flag.split("=")
    assert play(name, value).stderr == done.stderr


def test_flags_that_could_have_no_effect_are_in_no_help_and_no_json(program, play):
    text = cpp.run(program, "--help").stdout
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert "--seed" in flags
    assert not {"--bytes", "--iterations"} & set(flags)
    assert "--bytes" not in text
    axes = play().json["axes"]
    assert "seed" in axes
    assert not {"bytes", "iterations"} & set(axes)
    assert "did you mean" not in play("--iteration", "5").stderr


def test_without_a_driver_the_tape_is_checked_first(play):
    assert play(tape="nothing\n", NSAN_HOST_WITHOUT="driver").returncode == 2
    done = play(NSAN_HOST_WITHOUT="driver")
    assert done.returncode == 5
    assert done.stderr.startswith("dl_bench: no NVIDIA driver")


BAD = {
    "is no tape": (lambda _: "", ":1: this is no tape of nsan"),
    "is of a later version": (lambda t: t.replace("nsan-tape 1", "nsan-tape 2"), ":1: this tape is of version `2`"),
    "has no network": (lambda t: t.replace("network\ttiny\n", ""), ":2: the line `network NAME` is missing"),
    "was cut at a line": (lambda t: t[: t.index("end")], "the tape was cut short"),
    "was cut in a line": (lambda t: t[: t.index("end") + 5], "the tape was cut short: the line has no end"),
    "lost a line": (lambda t: t.replace("k\t0\t2\t0\t4\t1\t0\tsgd fc.weight\n", ""), "30 operations, of 31"),
    "goes on after its end": (lambda t: t + "d\t0\n", "more after the line `end`"),
    "uses a tensor early": (lambda t: t.replace("h\t1\n", "h\t2\n", 1), ":8: tensor 2 is written by the CPU before it is created"),
    "uses a tensor late": (lambda t: t.replace("d\t2\n", "d\t3\n", 1), "tensor 3 is dropped after its drop (y#1)"),
    "reads what is empty": (lambda t: t.replace("h\t0\n", "", 1), "nothing has written fc.weight"),
    "skips an id": (lambda t: t.replace("c\t1\t", "c\t9\t"), ":7: the id is 9, and 1 is due"),
    "has an empty tensor": (lambda t: t.replace("\t10000\t", "\t0\t"), ":7: 0 B cannot be"),
    "has a huge tensor": (lambda t: t.replace("\t10000\t", f"\t{1 << 60}\t"), "at most 2^48"),
    "overflows 64 bits": (lambda t: t.replace("\t10000\t", f"\t{1 << 64}\t"), "the size is `18446744073709551616`"),
    "has a negative size": (lambda t: t.replace("\t10000\t", "\t-1\t"), "the size is `-1`"),
    "has an unknown role": (lambda t: t.replace("\tparameter\tfc.bias", "\tweights\tfc.bias"), "there is no role `weights`"),
    "has an unknown word": (lambda t: t.replace("h\t0\n", "z\t0\n", 1), ":6: `z` is no operation"),
    "lacks a field": (lambda t: t.replace("h\t0\n", "h\n", 1), ":6: the id is missing"),
    "has a field too many": (lambda t: t.replace("h\t0\n", "h\t0\t1\n", 1), "more on the line than belongs there: `1`"),
    "counts tensors wrongly": (lambda t: t.replace("k\t1000\t3", "k\t1000\t13", 1), "13, of at most 12"),
    "reads a tensor twice": (lambda t: t.replace("3\t2\t0\t1\t1\t3", "3\t2\t2\t1\t1\t3", 1), "fc forward reads a tensor twice"),
    "writes a tensor twice": (lambda t: t.replace("2\t0\t4\t1\t0\tsgd", "2\t0\t4\t2\t0\t0\tsgd", 1), "sgd fc.weight writes a tensor twice"),
    "reads too much": (lambda t: t.replace("0:524288", "0:1048592"), "1048592 B cannot be read of fc.weight"),
    "reads a part of a load": (lambda t: t.replace("0:524288", "0:8"), "8 B cannot be read"),
    "has rows that are no loads": (lambda t: t.replace("0:524288", "0:524288/24"), "rows of 24 B cannot be read"),
    "changes a part in place": (lambda t: t.replace("k\t0\t2\t0\t4", "k\t0\t2\t0:16\t4", 1), "in place of which it reads a part"),
    "skips a step": (lambda t: t.replace("s\t2", "s\t3"), "step 3 where 2 is due"),
    "skips a phase": (lambda t: t.replace("p\tbackward\n", "", 1), "phase `update` where backward is due"),
    "has a kernel outside": (lambda t: t.replace("p\tforward\n", "", 1), "a kernel is outside of all phases"),
    "ends a step early": (lambda t: t.replace("p\tupdate\n", "", 1), "the step ends before its phase update"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD)
def test_a_tape_is_refused_that(play, how):
    spoil, message = BAD[how]
    done = play(tape=spoil(TAPE))
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert done.stderr.startswith("dl_bench: ")
    assert done.stderr.count("\n") == 1
    assert done.calls == []


def test_a_tape_that_is_not_there_is_said_to_be_missing(program, tmp_path):
    done = cpp.run(program, "--tape", tmp_path / "none.tape")
    assert done.returncode == 2
    assert "cannot be read. Check the path" in done.stderr
    done = cpp.run(program)
    assert done.returncode == 2
    assert "--tape FILE is missing" in done.stderr


def test_a_tape_from_windows_is_read(play):
    assert play("--dry-run", tape=TAPE.replace("\n", "\r\n")).json["network"] == "tiny"


@pytest.mark.parametrize("scale", ["0", "0.001", "2"])
def test_any_scale_of_the_computing_gives_the_same_contents(play, scale):
    assert play("--flops-scale", scale).json["verified"] is True


@pytest.mark.parametrize("scale", ["-1", "fast", "1e3", "1001"])
def test_a_scale_that_is_none_is_refused(play, scale):
    done = play(f"--flops-scale={scale}")
    assert done.returncode == 2
    assert "--flops-scale" in done.stderr


def test_the_json_names_no_path(play, tmp_path):
    assert str(tmp_path) not in play(*out(tmp_path)).stdout
