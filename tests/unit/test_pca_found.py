"""Which runs there are, what they say of themselves, and which of them are a pair."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from nsan.errors import InputMissingError, UsageError
from nsan.pca_found import Condition, Found, find_runs, named_run
from nsan.pca_pairs import left_out, pairs_of, told_apart


def run_of(name, *, factor=1.5, hint="none", capacity=None, **same):
    allocator = name.split("/")[0]
    side = "off" if allocator == "raw" else "on"
    switches = frozenset(filter(None, allocator.partition(":")[2].split("+")))
    condition = Condition(
        side, allocator, switches, "alexnet", factor, hint, {"seed": 1, "chunks": factor, **same},
        is_modelled=True, said=side, capacity_bytes=capacity,
    )  # fmt: skip
    return Found(name, Path("/nowhere") / name / f"{factor}-{hint}.sqlite", None, condition)


def named(pairs):
    return [(pair.off[0].name, pair.on[0].name, pair.condition.factor) for pair in pairs]


def test_runs_that_differ_only_in_the_allocator_are_pairs_in_order_of_the_factor():
    runs = [run_of(n, factor=f) for f in (2, 0.8) for n in ("caching:drop", "raw", "caching")]
    assert named(pairs_of(runs, (), ())) == [
        ("raw", "caching", 0.8),
        ("raw", "caching:drop", 0.8),
        ("raw", "caching", 2),
        ("raw", "caching:drop", 2),
    ]


@pytest.mark.parametrize("other", [{"hint": "prefetch"}, {"factor": 2}, {"seed": 9}])
def test_what_has_no_partner_is_left_out(other):
    alone = run_of("caching/other", **other)
    runs = [alone, run_of("raw"), run_of("caching")]
    pairs = pairs_of(runs, (), ())
    assert named(pairs) == [("raw", "caching", 1.5)]
    assert left_out(runs, pairs) == [alone]


def test_one_run_of_each_kind_is_a_pair_that_says_what_else_differs():
    (pair,) = pairs_of([run_of("raw", seed=4), run_of("caching", hint="prefetch")], (), ())
    (note,) = pair.notes
    assert "hint (none and prefetch)" in note
    assert "seed (4 and 1)" in note
    assert "chunks" not in note


def test_runs_without_a_partner_are_one_clear_error():
    with pytest.raises(UsageError, match=r"No pair: caching: alexnet, caching, factor 1\.5"):
        pairs_of([run_of("caching"), run_of("caching:drop")], (), ())
    with pytest.raises(UsageError, match="Add the one that is missing"):
        pairs_of([run_of("raw")], (), ())


def test_named_sides_are_a_pair_and_raw_runs_may_be_compared():
    off, more, on = run_of("raw/a"), run_of("raw/b"), run_of("raw/c")
    (pair,) = pairs_of((), [off, more], [on])
    assert (pair.off, pair.on) == ((off, more), (on,))
    runs = [run_of("raw"), run_of("caching")]
    assert named(pairs_of(runs, [off], ())) == [("raw/a", "caching", 1.5)]
    assert named(pairs_of(runs, (), [on])) == [("raw", "raw/c", 1.5)]
    with pytest.raises(UsageError, match="No pair"):
        pairs_of((), [off], ())


def test_a_named_side_that_the_run_contradicts_is_refused():
    raw, caching = run_of("raw"), run_of("caching")
    silent = [
        Found("r", Path("/nowhere/r.sqlite"), None, Condition(side, name))
        for side, name in (("off", "raw"), ("on", "caching"))
    ]
    with pytest.raises(UsageError, match=r"caching is named as a run without .* is 'caching'"):
        pairs_of((), [caching], [raw])
    with pytest.raises(UsageError, match=r"raw is named as a run with the caching .* is 'raw'"):
        pairs_of((), [silent[0]], [raw])
    assert len(pairs_of((), [silent[0]], [caching])) == 1
    assert len(pairs_of((), [raw], [silent[1]])) == 1
    assert len(pairs_of((), *[[each] for each in silent])) == 1


@pytest.mark.parametrize("named_by_user", [True, False])
def test_runs_of_other_factors_or_gpu_memory_are_refused_and_what_is_not_known_is_not(
    named_by_user,
):
    def pair(**other):
        off, on = run_of("raw", capacity=4 << 20), run_of("caching", hint="prefetch", **other)
        return pairs_of(*(((), [off], [on]) if named_by_user else ([off, on], (), ())))

    assert len(pair(capacity=4 << 20)) == len(pair()) == 1
    with pytest.raises(UsageError, match=r"raw: factor 1\.5, 4\.00 MiB .* caching: factor 2\. "):
        pair(factor=2)
    with pytest.raises(UsageError, match=r"caching: factor 1\.5, 8\.00 MiB of GPU memory"):
        pair(capacity=8 << 20)


def test_runs_of_equal_names_are_told_apart_by_their_places():
    runs = [
        Found("r", Path(f"/x/{place}/r.sqlite"), None, Condition("off", "raw")) for place in "aba"
    ]
    assert told_apart(*runs) == ["a/r.sqlite", "b/r.sqlite", "a/r.sqlite"]
    other = Found("q", Path("/x/q.sqlite"), None, Condition("on", "caching"))
    assert told_apart(runs[0], other) == ["r", "q"]
    assert told_apart(runs[0], runs[2]) == ["r", "r"]
    modelled = [run_of("raw", seed=seed) for seed in (1, 2)]
    modelled[1] = replace(modelled[1], trace=Path("/elsewhere/raw/1.5-none.sqlite"))
    (pair,) = pairs_of((), modelled[:1], modelled[1:])
    assert pair.notes == (
        "nowhere/raw/1.5-none.sqlite and elsewhere/raw/1.5-none.sqlite differ in more than the "
        "allocator: seed (1 and 2).",
    )


def modelled_at(place, allocator="raw", **made):
    """Write what the model says of a run, with an empty trace beside it."""
    place.mkdir()
    (place / "run.sqlite").touch()
    (place / "snapshot.pickle").touch()
    about = {"kind": "modelled", "program": "alexnet", "capacity_bytes": 4 << 20}
    own = {"kind": allocator, "hints": [], "peak_tensor_bytes": 6 << 20, "training": {"batch": 2}}
    text = json.dumps({**about, "peak_managed_bytes": 9 << 20, "allocator": {**own, **made}})
    (place / "model.json").write_text(text)
    return place


def test_a_modelled_run_says_its_condition(tmp_path):
    (found,) = find_runs(modelled_at(tmp_path / "a", "caching:drop"))
    said = found.condition
    assert (said.side, said.said, said.switches) == ("on", "on", {"drop"})
    assert (said.factor, said.capacity_bytes, said.managed_bytes) == (1.5, 4 << 20, 9 << 20)
    assert named_run(tmp_path / "a", "off").condition.said == "on"
    raw = named_run(modelled_at(tmp_path / "b"), "on")
    assert (raw.condition.side, raw.condition.said, raw.snapshot) == ("on", "off", None)


def test_runs_trained_differently_are_not_matched(tmp_path):
    raw = modelled_at(tmp_path / "raw")
    for name, batch in (("same", 2), ("other", 3)):
        modelled_at(tmp_path / name, "caching", training={"batch": batch})
    runs = find_runs(tmp_path)
    pairs = pairs_of(runs, (), ())
    assert named(pairs) == [(raw.name, "same", 1.5)]
    assert [run.name for run in left_out(runs, pairs)] == ["other"]


def test_a_broken_model_file_and_a_folder_without_a_run_are_one_clear_message(tmp_path):
    broken = modelled_at(tmp_path / "broken")
    for text in ("{", "\xff"):
        (broken / "model.json").write_text(text, encoding="latin-1")
        for path in (broken, tmp_path, broken / "run.sqlite"):
            with pytest.raises(UsageError, match=r"model\.json of broken cannot be read"):
                find_runs(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    for found in (find_runs, lambda path: named_run(path, "on")):
        with pytest.raises(UsageError, match="empty is a folder without a run"):
            found(empty)


def snapshot_at(place, allocator=None):
    facts = {"nsan_model": {"allocator": allocator, "network": "alexnet"}} if allocator else {}
    place.write_bytes(pickle.dumps({"segments": [], "device_traces": [], **facts}))
    return place


def test_a_snapshot_that_says_its_allocator_decides_the_side(tmp_path):
    trace = tmp_path / "mine.sqlite"
    trace.touch()
    beside = snapshot_at(tmp_path / "snapshot.pickle", "raw")
    (found,) = find_runs(trace)
    assert (found.condition.side, found.condition.said, found.snapshot) == ("off", "off", None)
    assert named_run(trace, "on").condition.said == "off"
    snapshot_at(beside, "caching:drop")
    (found,) = find_runs(trace)
    assert (found.condition.side, found.condition.allocator) == ("on", "caching:drop")
    assert found.snapshot == beside
    assert named_run(trace, "off").condition.said == "on"
    # The snapshot may be of the other trace.
    (tmp_path / "other.sqlite").touch()
    assert named_run(trace, "off").condition.said is None
    snapshot_at(tmp_path / "mine.pickle", "caching")
    assert named_run(trace, "off").condition.said == "on"


def test_a_trace_without_snapshot_must_be_named_as_it_says_nothing_of_its_allocator(tmp_path):
    trace = tmp_path / "mine.sqlite"
    trace.touch()
    with pytest.raises(UsageError, match=r"mine\.sqlite has no memory snapshot .* --off or --on"):
        find_runs(trace)
    assert named_run(trace, "on").snapshot is None
    beside = snapshot_at(tmp_path / "snapshot.pickle")
    assert find_runs(trace)[0].snapshot == beside
    own = snapshot_at(tmp_path / "mine.pickle")
    assert named_run(trace, "on").snapshot == own
    assert named_run(trace, "off").snapshot is None
    assert named_run(trace, "off").condition.said is None
    with pytest.raises(InputMissingError):
        find_runs(tmp_path / "none.sqlite")
