"""What advice gains by the driver model, graded against the same remedies written by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SOAK, hide_package
from planting import duration_ns, written
from plants import PLANTS

from nsan.advising import advised as advised_of
from nsan.analysis.advisor.advice import Advice, Change, Target
from nsan.asking import Asked
from nsan.errors import ExtraMissingError
from nsan.model.access import Stream
from nsan.model.making import Recipe, make, oversubscribed
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    Fill,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.model.recording import BASE_VA
from nsan.model.samples import SAMPLES
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.sweep import Case
from nsan.model.sweep import recipe as training
from nsan.model.workloads import network, workload
from nsan.model.workloads.training import TrainingRun
from nsan.units import MIB
from nsan.what_if import what_if

pytest.importorskip("numba")

X, Y = (
    Target(va=BASE_VA, bytes=4 * MIB, allocation_id=0),
    Target("y", 1, 4 * MIB, BASE_VA + 4 * MIB),
)


def advised(*changes):
    """Advice that stands on nothing, with a remedy."""
    return Advice("rule", "Do it", "", (), (), "", (), (), "", changes=changes)


@pytest.fixture
def asked(tmp_path):
    """Write the trace of a recipe, and ask it."""

    def ask(recipe, name="made", **options):
        make(recipe, tmp_path / name)
        return Asked(tmp_path / name / f"{name}.sqlite", **options)

    return ask


# Graded -------------------------------------------------------------------------------------------


def built(name, n_bytes=8 * MIB, factor=None, **size):
    program = workload(name).build(Size(n_bytes, **size))
    settings = Settings() if factor is None else oversubscribed(Settings(), n_bytes, factor)
    return Recipe(program, settings)


def in_turn(*advice, n_steps=4):
    """Host and GPU read the same array in turn."""
    kernel = Kernel("use", 4096, 256, (Stream(allocation="x"), Stream(allocation="y", write=True)))
    start = (Allocate("x", 4 * MIB), Allocate("y", 4 * MIB), HostTouch("x", write=True))
    return Recipe(
        Program(
            "in_turn",
            (*start, *advice, *(Launch(kernel), Synchronize(), HostTouch("x")) * n_steps),
        )
    )


def initialised(*, by_gpu):
    """An array that the host or the GPU fills with zeros before kernels use it."""
    stream = Stream(allocation="x", write=True)
    first = (Prefetch("x"), Fill("x")) if by_gpu else (HostTouch("x", write=True),)
    return Recipe(
        Program(
            "initialised",
            (Allocate("x", 4 * MIB), *first, Launch(Kernel("use", 4096, 256, (stream,))), Synchronize()),
        )
    )  # fmt: skip


def trained(allocator):
    case = Case(1.3, allocator, "none")
    return training(network("resnet-8"), TrainingRun(batch=64), Settings(), case)


TIGHT = built("sweep", factor=1.5, iterations=3)
LOOSE = Recipe(TIGHT.program, Settings())
GRADED = {
    "prefetch": (
        built("stream"),
        built("stream", prefetch="ahead"),
        (Change("prefetch", X), Change("prefetch", Y)),
    ),
    "prefetch both ways": (
        built("stream"),
        built("stream", prefetch="back"),
        (Change("prefetch", X), Change("prefetch", Y), Change("prefetch", Y, device=CPU)),
    ),
    "no prefetch": (
        built("sweep", factor=1.5, iterations=3, prefetch="ahead"),
        TIGHT,
        (Change("no_prefetch", Target()),),
    ),
    "read mostly": (
        in_turn(),
        in_turn(Advise("x", "read_mostly")),
        (Change("advise", X, "read_mostly"),),
    ),
    "kept at the CPU": (
        in_turn(),
        in_turn(Advise("x", "preferred_location", CPU), Advise("x", "accessed_by", 0)),
        (Change("advise", X, "preferred_location", CPU), Change("advise", X, "accessed_by", 0)),
    ),
    "first touch": (
        initialised(by_gpu=False),
        initialised(by_gpu=True),
        (Change("first_touch", X),),
    ),
    "fit": (TIGHT, LOOSE, (Change("fit"),)),
    "allocator": (trained("raw"), trained("caching"), (Change("allocator", advice="caching"),)),
    "prefetcher off": (
        built("random", factor=1.25),
        replace(built("random", factor=1.25), settings=Settings(prefetch=False, capacity_bytes=6 * MIB)),
        (Change("prefetcher_off"),),
    ),
}  # fmt: skip
"""A program, the same with a remedy written by hand, and the remedy as an advice says it."""


@pytest.mark.parametrize("name", GRADED)
def test_the_gain_of_a_remedy_is_that_of_the_same_written_by_hand_within_its_error(name, asked):
    before, after, changes = GRADED[name]
    found = what_if(asked(before), [advised(*changes)])
    gain = found.tried[0].gain
    truth = duration_ns(before) - duration_ns(after)
    assert gain.kind == "modelled"
    assert abs(gain.ns - truth) <= gain.error_ns
    assert gain.error_ns < max(abs(truth), 100_000)  # an error beyond the gain says nothing


def test_what_a_remedy_costs_is_a_gain_below_zero(asked):
    ping = asked(TIGHT)
    gain = what_if(ping, [advised(Change("prefetch", Target()))]).tried[0].gain
    ahead = built("sweep", factor=1.5, iterations=3, prefetch="ahead")
    assert gain.ns == pytest.approx(duration_ns(TIGHT) - duration_ns(ahead), abs=gain.error_ns)
    assert gain.ns < -gain.error_ns


def test_more_seeds_are_more_runs(asked):
    calls = []
    found = what_if(
        asked(replace(built("stream", MIB), settings=Settings(seed=7))),
        [advised(Change("prefetch", Target())), advised(Change("prefetch", Target()))],
        n_runs=4,
        progress=lambda done, whole: calls.append((done, whole)),
    )
    assert found.seeds == (7, 8, 9, 10)
    assert found.tried[0] == found.tried[1]  # the same program is not run again
    assert calls == [(n, 8) for n in range(9)]
    assert "4 runs" in found.tried[0].gain.how


def test_the_error_is_that_of_one_more_run_19_times_of_20():
    from nsan.what_if import _error_ns

    # Student's t for 2 degrees of freedom is 4.303; mean 20 us, standard deviation 10.
    assert _error_ns([10_000, 20_000, 30_000], 0) == pytest.approx(
        4.303 * 10_000 * (4 / 3) ** 0.5, rel=1e-4
    )
    assert _error_ns([20, 20, 20], 3) == 12_000
    assert _error_ns([20, 20, 20], 0) == 1_000  # that three agree does not say that one more does


def test_what_the_profiles_state_of_themselves_is_passed_on(asked):
    recipe = replace(built("stream", MIB), settings=Settings(gpu="v100-sxm2-16gb", host="power9"))
    errors = what_if(asked(recipe), [advised(Change("prefetch", Target()))]).errors
    assert errors == (
        "v100-sxm2-16gb: rows within 5 % + 0.5 us",
        "power9: hotspot kernels 0.7 to 1.2 of the real",
    )


# Where it is not known ----------------------------------------------------------------------------


def test_a_recorded_trace_has_no_program():
    sample = Path(__file__).parents[2] / "sample_data" / "um_vector_add_rtx4060l.sqlite"
    found = what_if(Asked(sample), [advised(Change("fit"))])
    assert found.tried == ()
    assert found.reason.startswith("This trace was recorded: which program ran,")


def test_a_part_of_a_trace_is_no_program(asked):
    found = what_if(asked(built("stream", MIB), filters={"time": "0/1ms"}), [])
    assert found.reason == "The driver model runs whole programs: leave the filters out."


def test_a_trace_away_from_its_model_json_is_not_known(asked, tmp_path):
    trace = asked(built("stream", MIB)).path
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(trace, tmp_path / "alone" / "trace.sqlite")
    found = what_if(Asked(alone), [])
    assert found.reason.startswith("How the trace was made is not known. model.json,")


def test_the_model_json_of_another_trace_is_not_believed(asked):
    small, large = asked(built("stream", MIB), "small"), asked(built("stream"), "large")
    shutil.copy(large.path, small.path)
    found = what_if(Asked(small.path), [])
    assert found.reason.endswith("model.json beside it is of another trace.")


def test_what_another_version_made_is_not_known(asked):
    trace = asked(built("stream", MIB))
    place = trace.path.with_name("model.json")
    place.write_text(json.dumps({**json.loads(place.read_text()), "recipe_sha256": "0"}))
    assert "is another program today" in what_if(trace, []).reason


@pytest.mark.parametrize("rows", [[1], None, "x"])
def test_counts_of_rows_that_are_none_are_of_another_trace(asked, rows):
    trace = asked(built("stream", MIB))
    place = trace.path.with_name("model.json")
    place.write_text(json.dumps({**json.loads(place.read_text()), "rows": rows}))
    assert what_if(trace, []).reason.endswith("model.json beside it is of another trace.")


def test_switches_that_were_off_do_not_hide_the_program(asked):
    from nsan.model.nsys_export import ExportOptions

    off = ExportOptions(gpu_faults=False, cpu_faults=False, memory_usage=False)
    recipe = replace(built("stream", MIB), options=off)
    found = what_if(asked(recipe), [advised(Change("prefetch", replace(X, bytes=MIB // 2)))])
    assert found.tried[0].gain is not None


def test_each_change_that_cannot_be_made_says_why(asked):
    gone = Target(va=BASE_VA + (1 << 40), bytes=MIB)
    advice = [
        advised(),
        advised(Change("fit")),
        advised(Change("allocator", advice="caching")),
        advised(Change("prefetch", gone)),
        advised(Change("advise", X, "sticky")),
        advised(Change("prefetch", X, device=3)),
    ]
    found = what_if(asked(built("stream", MIB)), advice)
    assert found.reason == ""
    assert [each.gain for each in found.tried] == [None] * 6
    assert [each.reason for each in found.tried] == [
        "It is no change of the program that the driver model can run.",
        "The modelled GPU gives the program all its memory already.",
        "Which tensors the program has is known of networks of nsan only.",
        "The program has no managed allocation at that address.",
        "The driver model cannot run the changed program: There is no advice 'sticky'. There are "
        "read_mostly, preferred_location, accessed_by, each also with unset_ before it",
        "No launch on that GPU uses the memory.",
    ]


def test_without_numba_it_says_what_to_install(asked, monkeypatch):
    trace = asked(built("stream", MIB))
    hide_package(monkeypatch, "numba")
    with pytest.raises(ExtraMissingError, match=r"numba.*nsan\[model\]"):
        what_if(trace, [])


def test_a_recorded_trace_needs_no_numba(monkeypatch):
    hide_package(monkeypatch, "numba")
    sample = Path(__file__).parents[2] / "sample_data" / "um_vector_add_rtx4060l.sqlite"
    assert what_if(Asked(sample), []).reason


@pytest.mark.parametrize("name", ["stream", "pca_on"])
def test_the_program_of_a_sample_is_known(name):
    folder = Path(__file__).parents[2] / "sample_data" / "model" / name
    found = what_if(Asked(folder / f"{name}.sqlite"), [])
    assert found.reason == ""
    assert found.errors[0].startswith(SAMPLES[name].recipe().settings.gpu)


# Planted programs -----------------------------------------------------------------------------------

FEW = ("no-prefetch", "prefetch-in-pieces", "sparse-and-full")
GRADABLE = [plant for plant in PLANTS.values() if plant.remedied and (SOAK or plant.name in FEW)]


def remedied(plant, changes):
    """Give the program with the remedy; where that makes the data fit, here the memory grows instead."""
    if [change.kind for change in changes] == ["fit"]:
        return replace(plant.recipe, settings=replace(plant.recipe.settings, capacity_bytes=None))
    return plant.remedied


@pytest.mark.parametrize("plant", GRADABLE, ids=lambda plant: plant.name)
def test_what_a_rule_advises_gains_what_the_remedy_by_hand_does(plant, tmp_path):
    trace = Asked(written(plant, tmp_path))
    first = advised_of(trace).advice[0]
    found = what_if(trace, [first]).tried[0]
    if found.gain is None:
        assert not first.changes or "networks of nsan only" in found.reason
        return
    truth = duration_ns(plant.recipe) - duration_ns(remedied(plant, first.changes))
    assert abs(found.gain.ns - truth) <= found.gain.error_ns
