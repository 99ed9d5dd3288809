"""`nsan pca` on modelled runs of a little training program under every allocator, and its ledgers in detail."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict

import polars as pl
import pytest

import nsan
from nsan.analysis.pca.decomposition import decomposition
from nsan.analysis.pca.ratios import warm_steps
from nsan.cli import main
from nsan.cli.pca import COLUMNS, table_rows
from nsan.model.hints import Hint
from nsan.model.making import Recipe, make, oversubscribed
from nsan.model.networks import tensors as t
from nsan.model.placing import placed
from nsan.model.settings import Settings
from nsan.pca_found import find_runs
from nsan.pca_runs import open_run
from nsan.pca_text import text_of
from nsan.units import MIB, format_bytes
from nsan.uvm.constants import VA_BLOCK_BYTES

ALLOCATORS = (
    "raw",
    "caching",
    *(f"caching:{s}" for s in ("release", "drop", "apart", "release+drop", "release+apart")),
    *("caching:drop+apart", "caching:release+drop+apart"),
)
N_STEPS = 3
N_LAYERS = 3


def little():
    """Train a few layers: large and small activations that live for a part of a step, and parameters."""
    weights = [t.Tensor(f"w{i}", 5 * MIB + 300_000 * i, "parameter") for i in range(N_LAYERS)]
    done = [t.Create(weight) for weight in weights]
    for step in range(1, N_STEPS + 1):
        last = t.Tensor(f"x#{step}", 700_000, "input")
        done += [t.Step(step), t.Phase("forward"), t.Create(last), t.HostWrite(last.name)]
        made, gone = [], [last.name]
        for i, weight in enumerate(weights):
            out = t.Tensor(f"a{i}#{step}", (3 + i) * MIB + 200_000, "activation")
            mask = t.Tensor(f"m{i}#{step}", 40_000, "activation")
            done += [t.Create(out), t.Create(mask)]
            done.append(t.Compute(f"f{i}", (last.name, weight.name), (out.name, mask.name), 1e9))
            made.append((out, mask))
            last = out
        done.append(t.Phase("backward"))
        for i, (out, mask) in reversed([*enumerate(made)]):
            grad = t.Tensor(f"g{i}#{step}", out.n_bytes, "activation")
            reads = (out.name, mask.name, gone[-1], weights[i].name)
            done += [t.Create(grad), t.Compute(f"b{i}", reads, (grad.name, weights[i].name), 1e9)]
            done += [t.Drop(out.name), t.Drop(mask.name), t.Drop(gone.pop())]
            gone.append(grad.name)
        done.append(t.Drop(gone.pop()))
    return t.TensorProgram("little", tuple(done))


@pytest.fixture(scope="module")
def folder(cache, tmp_path_factory):
    """A folder of runs as a sweep leaves it: memory for less than what lives at a time."""
    assert cache
    place = tmp_path_factory.mktemp("sweep")
    program = little()
    for allocator in ALLOCATORS:
        under = placed(program, allocator, Settings().gpu_profile)
        machine = oversubscribed(Settings(), under.peak_tensor_bytes, 1.4)
        name = allocator.replace(":", "-").replace("+", "-")
        make(Recipe(under.program, machine, placed=under), place / f"{name}-1.4-none")
    return place


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for all that only reads: an import a run."""
    place = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", place)
        yield place


@pytest.fixture(autouse=True)
def _shared_cache(cache, monkeypatch):
    monkeypatch.setenv("NSAN_CACHE_DIR", cache)


@pytest.fixture(scope="module")
def document(folder, tmp_path_factory):
    """What `nsan pca` says of all these runs."""
    out = tmp_path_factory.mktemp("out") / "pca.json"
    assert main(["pca", str(folder), "--json", "-q", "-o", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def opened(folder):
    """The runs that the figures of the ledger are counted again for, with their joins."""
    runs = {found.condition.allocator: found for found in find_runs(folder)}
    chosen = {name: open_run(runs[name]) for name in ("raw", "caching", "caching:drop")}
    return {name: (run, nsan.join(run.trace, run.found.snapshot)) for name, run in chosen.items()}


def trace_of(folder, name):
    return folder / f"{name}-1.4-none" / f"{name}-1.4-none.sqlite"


def parts_of(pair):
    return {(row["figure"], row["part"]): row for row in pair["decomposition"]}


def answer(capsys, *arguments, status=0):
    assert main(["pca", *map(str, arguments)]) == status
    return capsys.readouterr()


# What the pairs say ---------------------------------------------------------------------------------


def test_every_run_with_a_cache_has_its_pair(document):
    assert document["schema"] == 1
    assert [pair["allocator"] for pair in document["pairs"]] == sorted(
        ALLOCATORS[1:], key=lambda name: (name.count("+") + (":" in name), name)
    )
    for pair in document["pairs"]:
        assert (pair["network"], pair["factor"], pair["hint"]) == ("little", 1.4, "none")
        assert pair["off"] == ["raw-1.4-none"]
        assert pair["kind"] == "modelled"
        assert not [note for note in pair["notes"] if "has not settled" not in note]
    assert {run["n_warm_steps"] for run in document["runs"]} == {N_STEPS - 1}


def test_parts_and_remainder_add_up_in_every_pair(document):
    for pair in document["pairs"]:
        found = defaultdict(int)
        for (figure, part), row in parts_of(pair).items():
            found[figure] += (row["value"] or 0) * (-1 if part == "difference" else 1)
        assert set(found.values()) == {0}


def test_the_cache_avoids_first_touches_and_moves_dead_bytes(document):
    (pair,) = (pair for pair in document["pairs"] if pair["allocator"] == "caching")
    parts = parts_of(pair)
    assert parts["fault_rows", "reuse"]["value"] < -parts["fault_rows", "reuse"]["error"]
    assert parts["step_ns", "reuse"]["value"] < 0
    for figure in ("in_bytes", "out_bytes"):
        dead = parts[figure, "dead"]
        assert dead["value"] > dead["error"] > 0
        assert parts[figure, "packing"]["value"] > 0


def test_a_row_that_makes_memory_usable_is_one_whether_the_page_is_dropped_or_comes_back_dead(
    document,
):
    """Dropping dead pages turns their rows into first touches: the account of rows stays, that of time not."""
    dead = {pair["allocator"]: parts_of(pair) for pair in document["pairs"]}
    rows = [dead[name]["fault_rows", "reuse"] for name in ("caching", "caching:drop")]
    assert abs(rows[0]["value"] - rows[1]["value"]) <= max(row["error"] for row in rows)
    for parts in dead.values():
        row = parts["fault_rows", "dead"]
        assert (row["value"], row["error"], row["bound"]) == (0, 0, "exact")
    assert dead["caching"]["step_ns", "dead"]["value"] > 0


def test_the_account_of_a_step_is_that_of_its_ledger(opened):
    """Counted again from the ledgers of both runs, warm step by warm step."""
    off, on = (opened[name][0].ledger.filter(pl.col("step") >= 1) for name in ("raw", "caching"))
    found = decomposition(warm_steps(off, warmup=0), warm_steps(on, warmup=0))
    parts = {(row["figure"], row["part"]): row["value"] for row in found.to_dicts()}

    def more(*names):
        sums = [sum(frame[name].sum() for name in names) for frame in (off, on)]
        return round((sums[1] - sums[0]) / (N_STEPS - 1))

    assert parts["fault_rows", "reuse"] == more("n_first_touch", "n_dead_rows")
    assert parts["step_ns", "dead"] == more("dead_in_ns", "dead_out_ns")
    assert parts["step_ns", "packing"] == more("neighbour_in_ns", "neighbour_out_ns")
    assert parts["step_ns", "reuse"] == more("idle_ns", "new_only_ns")


@pytest.mark.parametrize(
    ("switch", "part"), [("release", "reuse"), ("drop", "dead"), ("apart", "packing")]
)
def test_the_part_of_a_mechanism_that_is_off_is_0_within_its_error(document, switch, part):
    pairs = [pair for pair in document["pairs"] if switch in pair["allocator"]]
    assert len(pairs) == 4
    for pair in pairs:
        for (figure, name), row in parts_of(pair).items():
            if name == part and row["value"] is not None:
                assert abs(row["value"]) <= row["error"], (pair["allocator"], figure)
                if switch == "apart":
                    assert row["value"] == 0


def test_whole_dead_pages_are_what_dropping_takes_away(document):
    """Of a page that cached and living blocks share, nothing can be dropped."""
    for pair in document["pairs"]:
        parts = parts_of(pair)
        if "drop" in pair["allocator"]:
            for figure in ("in_bytes", "out_bytes"):
                dead = parts[figure, "dead"]
                assert dead["value"] <= dead["systematic_error"]


def test_a_pair_without_cache_in_both_runs_has_no_part(folder, capsys):
    raw = folder / "raw-1.4-none"
    found = json.loads(answer(capsys, "--off", raw, "--on", raw, "--json").out)
    (pair,) = found["pairs"]
    assert {row["value"] for row in pair["decomposition"]} == {0, None}
    assert [row["ratio"] for row in pair["ratios"]] == [1.0] * 5
    assert found["switches"] == []
    text = answer(capsys, "--off", raw, "--on", raw).out
    said = "raw-1.4-none against raw-1.4-none: raw-1.4-none makes about as many fault rows (1.000 times"
    assert text.startswith(f"little, factor 1.4, {said}")
    assert "caching" not in text.split("An account")[0]
    # It is no run with all mechanisms at work, which one with a switch could be compared with.
    runs = (raw, folder / "caching-drop-1.4-none", "--off", raw, "--on", raw)
    both = json.loads(answer(capsys, *runs, "--json", "-q").out)
    assert [pair["allocator"] for pair in both["pairs"]] == ["raw", "caching:drop"]
    assert both["switches"] == []


def test_the_parts_by_switches_add_up_to_the_same_difference(document):
    (causal,) = document["switches"]
    (pair,) = (pair for pair in document["pairs"] if pair["allocator"] == "caching")
    assert causal["n_runs"] == 8
    by_part = {(row["figure"], row["part"]): row for row in causal["parts"]}
    for figure in ("fault_rows", "in_bytes", "out_bytes", "step_ns"):
        whole = by_part[figure, "difference"]["value"]
        assert whole == parts_of(pair)[figure, "difference"]["value"]
        names = ("reuse", "dead", "packing", "remainder")
        assert sum(by_part[figure, name]["value"] for name in names) == whole
        for name in names[:-1]:
            row = by_part[figure, name]
            assert row["low"] - 1 <= row["value"] <= row["high"] + 1


# The ledger, counted again --------------------------------------------------------------------------


def steps_of(run):
    return run.ledger.select("step", "start_ns", "end_ns").rows()


def test_fault_rows_and_bytes_of_a_step_are_those_of_the_trace(opened):
    for run, _ in opened.values():
        moves = run.trace.migrations.select("start_ns", "bytes", "direction").collect().rows()
        faults = run.trace.gpu_faults.collect()["start_ns"].to_list()
        for step, start, end in steps_of(run):
            row = run.ledger.row(step, named=True)
            inside = [(n, way) for at, n, way in moves if start <= at < end]
            assert row["in_bytes"] == sum(n for n, way in inside if way != "dtoh")
            assert row["out_bytes"] == sum(n for n, way in inside if way == "dtoh")
            assert row["n_fault_rows"] == sum(start <= at < end for at in faults)


def test_the_times_of_a_step_add_up_to_it(opened):
    copies = (f"{what}_{way}" for what in ("dead", "neighbour") for way in ("in", "out"))
    parts = ("idle", "new_only", "data_only", "rest", *copies)
    for run, _ in opened.values():
        for row in run.ledger.to_dicts():
            assert sum(row[f"{part}_ns"] for part in parts) == row["wall_ns"]
            assert all(row[f"{part}_ns"] >= 0 for part in parts)


def test_service_without_any_copy_taken_out_is_that_of_the_batches(opened):
    for run, joined in opened.values():
        batches = nsan.analyse(run.trace, "batches").collect()
        moves = joined.tensor_moves.filter(pl.col("batch_id").is_null()).collect()
        assert moves.is_empty()
        for step, start, end in steps_of(run):
            row = run.ledger.row(step, named=True)
            parts = (
                "new_only",
                "data_only",
                "dead_in",
                "dead_out",
                "neighbour_in",
                "neighbour_out",
            )
            inside = batches.filter(pl.col("start_ns").is_between(start, end, closed="left"))
            assert sum(row[f"{part}_ns"] for part in parts) == inside["service_ns"].sum()


def test_idle_time_is_when_nothing_ran_or_was_copied(opened):
    for run, _ in opened.values():
        times = [
            getattr(run.trace, name).select("start_ns", "end_ns").collect().rows()
            for name in ("kernels", "copies", "memsets", "migrations")
        ]
        calls = [
            row[:2]
            for row in run.trace.api_calls.select("start_ns", "end_ns", "name").collect().rows()
            if row[2].startswith(("cudaMallocManaged", "cudaFree"))
        ]
        for step, start, end in steps_of(run):
            row = run.ledger.row(step, named=True)
            busy = sorted(each for part in times for each in part)
            assert row["idle_ns"] == gaps(busy, start, end)
            assert row["other_idle_ns"] == gaps(sorted([*busy, *calls]), start, end)


def gaps(busy, start, end):
    """Add up what no interval covers, one after the other."""
    free, reached = 0, start
    for a, b in busy:
        if a >= end:
            break
        free += max(a - reached, 0)
        reached = max(reached, b)
    return free + max(end - reached, 0)


def test_packed_tensors_are_those_allocated_where_another_one_lay(opened):
    for run, joined in opened.values():
        lives = joined.tensor_lives.collect().to_dicts()
        for life in lives:
            life["from"] = -1 if life["alloc_sequence"] is None else life["alloc_sequence"]
            life["to"] = 1 << 62 if life["free_sequence"] is None else life["free_sequence"]
            life["blocks"] = (
                life["va"] // VA_BLOCK_BYTES,
                (life["va"] + life["block_bytes"] - 1) // VA_BLOCK_BYTES,
            )
        for step, start, end in steps_of(run):
            n = 0
            for life in lives:
                if not start <= life["alloc_ns"] < end:
                    continue
                others = (o for o in lives if o is not life and o["from"] <= life["from"] < o["to"])
                n += any(
                    o["blocks"][0] <= edge <= o["blocks"][1]
                    for o in others
                    for edge in life["blocks"]
                )
            assert run.ledger.row(step, named=True)["n_packed_tensors"] == n
    assert opened["caching"][0].ledger["n_packed_tensors"].min() > 0


def test_mixed_dead_bytes_lie_in_pages_that_are_not_all_dead(opened):
    for name, (run, joined) in opened.items():
        dead = defaultdict(int)
        for row in joined.tensor_moves.filter("is_dead").collect().to_dicts():
            at, end = row["va"], row["va"] + row["bytes"]
            while at < end:
                until = min(at - at % 4096 + 4096, end)
                dead[row["start_ns"], row["migration"], row["direction"], at // 4096] += until - at
                at = until
        for step, start, end in steps_of(run):
            mixed = {"htod": 0, "dtoh": 0}
            for (at, _, way, _), n in dead.items():
                if start <= at < end and n < 4096:
                    mixed[way] += n
            row = run.ledger.row(step, named=True)
            assert (row["mixed_dead_in_bytes"], row["mixed_dead_out_bytes"]) == (
                mixed["htod"],
                mixed["dtoh"],
            )
            if name == "caching:drop":
                assert row["dead_in_bytes"] == row["mixed_dead_in_bytes"]
    assert opened["caching:drop"][0].ledger["mixed_dead_out_bytes"].sum() > 0


# What people and machines get -----------------------------------------------------------------------


def test_the_first_line_says_what_changes_and_by_which_mechanism(document):
    text = text_of(document)
    first = text.splitlines()[0]
    assert first.startswith("little, factor 1.4: the caching allocator makes ")
    assert "about as many fault rows (0." in first
    assert " more traffic (1." in first
    assert "; dead traffic +" in first
    assert "(7 more pairs with switches set: -v)" in text
    assert "caching:drop" not in text
    assert "caching:drop" in text_of(document, verbose=True)
    assert text.rstrip().endswith("Every figure is the model's.")
    assert text_of(document, markdown=True).startswith("- little, factor 1.4: ")


def test_below_the_sentences_the_tables_come_without_them(document):
    whole, tables = (text_of(document, markdown=True, sentences=each) for each in (True, False))
    sentence = whole.splitlines()[0].removeprefix("- ")
    assert sentence not in tables
    assert "Note: " not in tables
    assert [line for line in tables.splitlines() if line.startswith("|")] == [
        line for line in whole.splitlines() if line.startswith("|")
    ]
    assert tables.rstrip().endswith("Every figure is the model's.")


def said_of(document, *, ratio, low, high):
    """Give the first sentence with one ratio of all figures."""
    (pair,) = (pair for pair in document["pairs"] if pair["allocator"] == "caching")
    own = {"off": 100.0, "on": 100 * ratio, "ratio": ratio, "ratio_low": low, "ratio_high": high}
    pair = {
        **pair,
        "ratios": [{**row, **own} for row in pair["ratios"]],
        "traffic": {**pair["traffic"], **own},
    }
    return text_of({**document, "pairs": [pair]}).splitlines()[0]


def test_a_sentence_says_more_or_fewer_only_where_the_interval_does_not_hold_1(document):
    said = said_of(document, ratio=1.016, low=0.93, high=1.138)
    assert said.count("(1.016 times, 95 % interval 0.930 to 1.138; ") == 3
    assert "about as many fault rows (" in said
    assert "about as much traffic (" in said
    assert "a step takes about the same time (" in said
    assert "takes about the same time (" in said_of(document, ratio=3.0, low=0.9, high=None)
    said = said_of(document, ratio=1.2, low=1.1, high=1.3)
    assert "20.0 % more fault rows (1.200 times, 95 % interval 1.100 to 1.300; " in said
    assert "20.0 % more traffic (" in said
    assert "takes 1.20 times as long (" in said
    said = said_of(document, ratio=0.8, low=None, high=None)
    assert "20.0 % fewer fault rows (0.800 times, one warm step; " in said
    assert "is 1.25 times as fast (0.800 times, one warm step; " in said


def test_the_ratio_of_the_traffic_is_that_of_both_directions(document):
    for pair in document["pairs"]:
        rows = {row["figure"]: row for row in pair["ratios"]}
        for side in ("off", "on"):
            both = rows["in_bytes"][side] + rows["out_bytes"][side]
            assert pair["traffic"][side] == pytest.approx(both)
        assert (
            pair["traffic"]["ratio_low"]
            <= pair["traffic"]["ratio"]
            <= pair["traffic"]["ratio_high"]
        )


def test_a_run_that_still_changes_says_so_with_its_numbers(folder, opened, document, capsys):
    def trends(found):
        return [note for pair in found["pairs"] for note in pair["notes"] if "settled" in note]

    for name, (run, _) in opened.items():
        folder_name = f"{name.replace(':', '-')}-1.4-none"
        noted = any(note.startswith(f"{folder_name} has") for note in trends(document))
        changes = []
        for column in ("wall_ns", "n_fault_rows"):
            _, first, last = run.ledger[column].to_list()
            changes.append(abs(first - last) > last / 10)
        assert noted == any(changes)
    runs = [folder / f"{name}-1.4-none" for name in ("raw", "caching")]
    found = json.loads(answer(capsys, *runs, "--json", "-q", "--warmup", "0").out)
    (said,) = (
        note for note in trends(found) if note.startswith("caching-1.4-none has not settled")
    )
    rows = opened["caching"][0].ledger["n_fault_rows"].to_list()
    mean = round(sum(rows[1:]) / 2)
    assert f"it makes {rows[0]} and the later ones {mean} fault rows (mean)" in said
    assert said.endswith("Leave it out with --warmup 1.")
    found = json.loads(answer(capsys, *runs, "--json", "-q", "--warmup", "2").out)
    assert trends(found) == []


def test_the_switches_say_what_they_are_worth(folder, document, capsys):
    text = text_of(document)
    sizes = [
        json.loads((folder / f"{name}-1.4-none" / "model.json").read_text())["peak_managed_bytes"]
        for name in ("caching-apart", "caching")
    ]
    assert sizes[0] > sizes[1]
    assert f"({format_bytes(sizes[0])} instead of {format_bytes(sizes[1])})" in text
    assert "carry no error of steps" in text
    assert "Why these differ from the account above:" in text
    runs = [folder / f"{name}-1.4-none" for name in ("raw", "caching", "caching-drop")]
    text = answer(capsys, *runs).out
    assert "These do not add up" in text
    assert "carry no error of steps" in text
    assert "of managed memory" not in text
    assert "instead of" not in text.split("These do not add up")[1]


def test_csv_and_parquet_have_a_row_for_each_pair_and_figure(folder, document, tmp_path, capsys):
    raw = folder / "raw-1.4-none"
    lines = answer(capsys, "--off", raw, "--on", raw, "--format", "csv").out.splitlines()
    assert lines[0].split(",") == [*COLUMNS]
    assert len(lines) == 1 + 5
    out = tmp_path / "pairs.parquet"
    answer(capsys, "--off", raw, "--on", raw, "--format", "parquet", "-o", out)
    assert pl.read_parquet(out).columns == [*COLUMNS]
    rows = table_rows(document)
    assert len(rows) == 8 * 5
    for row in rows:
        if row["figure"] == "step_ns":
            names = ("reuse", "dead", "packing", "remainder")
            assert sum(row[name] for name in names) == row["difference"]


def test_a_trace_without_model_file_is_told_apart_by_the_options(folder, tmp_path, capsys):
    off, on = trace_of(folder, "raw"), tmp_path / "with.sqlite"
    shutil.copy(trace_of(folder, "caching"), on)
    alone = json.loads(answer(capsys, "--off", off, "--on", on, "--json", "-q").out)["pairs"][0]
    assert parts_of(alone)["in_bytes", "dead"]["value"] is None
    assert parts_of(alone)["fault_rows", "reuse"]["error"] is None
    assert parts_of(alone)["fault_rows", "reuse"]["value"] is None
    assert "no memory snapshot" in alone["notes"][0]
    shutil.copy(folder / "caching-1.4-none" / "snapshot.pickle", tmp_path / "with.pickle")
    whole = json.loads(answer(capsys, on, "--off", off, "--json", "-q").out)["pairs"][0]
    assert parts_of(whole)["in_bytes", "dead"]["value"] > 0
    assert not [note for note in whole["notes"] if "has not settled" not in note]
    ratios = {
        name: [row["ratio"] for row in pair["ratios"]]
        for name, pair in (("a", alone), ("b", whole))
    }
    assert ratios["a"] == ratios["b"]


def test_a_snapshot_of_another_run_is_refused(folder, capsys):
    other = folder / "caching-apart-1.4-none" / "snapshot.pickle"
    said = answer(
        capsys, "--off", trace_of(folder, "raw"), "--on", trace_of(folder, "caching"),
        "--snapshot", other, status=1,
    )  # fmt: skip
    assert said.err.startswith(
        "nsan: Not aligned: snapshot.pickle is not of the run of caching-1.4"
    )
    assert said.out == ""


def test_what_cannot_be_compared_is_one_clear_message(folder, tmp_path, capsys):
    raw, caching = folder / "raw-1.4-none", folder / "caching-1.4-none"
    assert "No pair: raw-1.4-none: little, raw, factor 1.4" in answer(capsys, raw, status=2).err
    assert "Name runs to compare" in answer(capsys, status=2).err
    both = ("--off", raw, "--on", raw)
    assert (
        "It has 'backward', 'forward', 'step'"
        in answer(capsys, *both, "--step", "no", status=2).err
    )
    assert (
        "3 steps, and --warmup 3 leaves none"
        in answer(capsys, *both, "--warmup", "3", status=2).err
    )
    assert "one --on TRACE" in answer(capsys, raw, caching, "--snapshot", raw, status=2).err
    assert "is what is being read" in answer(capsys, folder, "-o", folder / "x.json", status=2).err
    broken = tmp_path / "lost"
    shutil.copytree(caching, broken)
    (broken / "snapshot.pickle").unlink()
    assert "lost has lost its snapshot.pickle" in answer(capsys, broken, raw, status=2).err
    (broken / "model.json").write_text('{"kind": ')
    assert "model.json of lost cannot be read" in answer(capsys, broken, raw, status=2).err
    (tmp_path / "empty").mkdir()
    assert "empty is a folder without" in answer(capsys, tmp_path / "empty", status=2).err


def test_sides_and_machines_that_cannot_be_compared_are_refused(folder, tmp_path, capsys):
    raw, caching = folder / "raw-1.4-none", folder / "caching-1.4-none"
    said = answer(capsys, "--off", caching, "--on", raw, status=2)
    assert "caching-1.4-none is named as a run without the caching allocator (--off)" in said.err
    # The snapshot of a run without the caching allocator says so, without any model.json.
    for name in ("raw", "caching"):
        (tmp_path / name).mkdir()
        shutil.copy(trace_of(folder, name), tmp_path / name)
        shutil.copy(folder / f"{name}-1.4-none" / "snapshot.pickle", tmp_path / name)
    both = json.loads(answer(capsys, tmp_path / "raw", tmp_path / "caching", "--json", "-q").out)
    (pair,) = both["pairs"]
    assert (pair["off"], pair["on"]) == (["raw-1.4-none.sqlite"], ["caching-1.4-none.sqlite"])
    said = answer(capsys, "--off", tmp_path / "caching", "--on", caching, status=2)
    assert "says itself that its allocator is 'caching'" in said.err
    other = tmp_path / "larger"
    shutil.copytree(raw, other)
    about = json.loads((other / "model.json").read_text())
    about["capacity_bytes"] *= 2
    (other / "model.json").write_text(json.dumps(about))
    for chosen in ((other, caching), ("--off", other, "--on", caching)):
        said = answer(capsys, *chosen, status=2).err
        assert "must have the same factor and GPU memory" in said
        assert "caching-1.4-none: factor 1.4, " in said


def test_notes_are_told_and_one_warm_step_has_no_interval(folder, document, capsys):
    raw = folder / "raw-1.4-none"
    assert (
        "One warm step has no interval and no error"
        in answer(capsys, "--off", raw, "--on", raw, "--warmup", "2").out
    )
    noted = [{**pair, "notes": ["They differ in `seed`."]} for pair in document["pairs"]]
    text = text_of({**document, "pairs": noted}, markdown=True)
    assert text.count("- Note: They differ in \\`seed\\`.") == 1


def test_runs_that_give_memory_advice_say_what_looks_like_a_first_touch(tmp_path, capsys):
    for allocator in ("raw", "caching"):
        under = placed(little(), allocator, Settings().gpu_profile, hints=[Hint("preferred-cpu")])
        make(Recipe(under.program, Settings(), placed=under), tmp_path / allocator)
    assert main(["pca", str(tmp_path), "-q"]) == 0
    assert "The runs give memory advice" in capsys.readouterr().out


def test_runs_without_memory_advice_do_not(document):
    notes = [note for pair in document["pairs"] for note in pair["notes"]]
    assert not [note for note in notes if "advice" in note]
