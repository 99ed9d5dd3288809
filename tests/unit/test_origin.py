"""A made trace says how it is made again."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from programs import programs

from nsan.model.access import Matrix, Random, Stencil, Stream, Zipf
from nsan.model.hints import Hint
from nsan.model.making import Recipe, is_whole, make
from nsan.model.nsys_export import ExportOptions
from nsan.model.origin import (
    MOST_OPERATIONS,
    Built,
    Trained,
    origin_of,
    program_of,
    program_text,
)
from nsan.model.program import (
    Allocate,
    Copy,
    Discard,
    Fill,
    HostTouch,
    HostWait,
    Kernel,
    Launch,
    Mark,
    MarkDead,
    PopRange,
    Program,
    PushRange,
    Synchronize,
)
from nsan.model.recording import Style
from nsan.model.remaking import RecipeUnknownError, recipe_of
from nsan.model.samples import SAMPLES
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.sweep import Case
from nsan.model.sweep import recipe as swept
from nsan.model.workloads import network
from nsan.model.workloads.training import TrainingRun
from nsan.units import KIB, MIB

SMALL = Program("small", (Allocate("x", MIB), HostTouch("x", write=True), Synchronize()))


def about(folder):
    return json.loads((folder / "model.json").read_text())


def change(folder, **values):
    (folder / "model.json").write_text(json.dumps({**about(folder), **values}))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_says_its_origin_and_that_makes_the_same_program(name):
    recipe = SAMPLES[name].recipe()
    written = json.loads(json.dumps(recipe.origin.document()))
    again = origin_of(written)
    assert again == recipe.origin
    assert again.made(recipe.settings)[0] == recipe.program


@pytest.mark.parametrize(
    "origin",
    [
        Built("stride", Size(3 * MIB, 2, "late", 1, 7)),
        Trained("resnet-8", TrainingRun(steps=1, batch=2)),
        Trained(
            "alexnet",
            TrainingRun(
                1, 2, image=64, varying=True, allocator="caching:release+drop",
                hints=(Hint("prefetch", ("parameter", "optimizer")), Hint("read-mostly", names=("a", "b"))),
                seed=5,
            ),
        ),
    ],
)  # fmt: skip
def test_an_origin_survives_json(origin):
    assert origin_of(json.loads(json.dumps(origin.document()))) == origin


@given(programs(marked=True))
def test_any_program_survives_being_written_word_by_word(drawn):
    program, _ = drawn
    again = program_of(program_text(program))
    assert again == program
    assert repr(again) == repr(program)


def test_every_word_is_written_and_read():
    streams = (
        Zipf(allocation="x", exponent=2, element_bytes=64),
        Random(allocation="x", draws=3, seed=9, phase=1),
        Stencil(allocation="x", width=8, height=4, tile=2, halo=1),
        Matrix(allocation="x", role="B", n=64, offset_bytes=4096, n_bytes=16384),
        Stream(allocation="x", backward=True, write=True),
    )
    program = Program(
        "all",
        (
            Allocate("x", MIB),
            Launch(Kernel("k", 2, 64, streams, compute_ns_per_mib=1.5, repeat=2)),
            Fill("x", n_bytes=4096),
            Copy("x", to_managed=False, offset_bytes=4096),
            Discard("x", 0, 8192),
            MarkDead("x", dead=False),
            PushRange("a"),
            Mark("b"),
            HostWait(5),
            PopRange(),
        ),
        descending=True,
    )
    assert repr(program_of(program_text(program))) == repr(program)


def test_an_operation_that_comes_again_is_written_once():
    touch = HostTouch("flag", ns_per_mib=1_600_000.0)
    text = program_text(Program("polls", (Allocate("flag", 64 * KIB), *[touch] * 300)))
    assert text.count("HostTouch") == 1
    assert len(text) < 1000


def test_numbers_that_are_equal_but_written_differently_stay_apart():
    program = Program("p", tuple(HostTouch("x", ns_per_mib=n) for n in (5, 5.0, 5)))
    assert repr(program_of(program_text(program))) == repr(program)


def test_a_word_of_ones_own_is_not_written():
    class Own(Stream):
        pass

    launch = Launch(Kernel("k", 1, 32, (Own(allocation="x"),)))
    assert program_text(Program("own", (Allocate("x", MIB), launch))) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"do":"Launch","kernel":5}',
        '{"do":"Popen","args":"x"}',
        '{"do":"Allocate","name":5,"n_bytes":4096}',
        '{"do":"Allocate","name":"x","n_bytes":"4096"}',
        '{"do":"HostWait","ns":true}',
        '{"do":"HostWait","ns":1.5}',
        '{"do":"HostWait"}',
        '{"do":"HostWait","ns":1,"more":2}',
        "5",
    ],
)
def test_a_program_that_is_none_is_refused(tmp_path, text):
    folder = tmp_path / "small"
    make(Recipe(SMALL), folder)
    whole = json.loads((folder / "program.json").read_text())
    (folder / "program.json").write_text(json.dumps({**whole, "operations": [json.loads(text)]}))
    with pytest.raises(RecipeUnknownError):
        recipe_of(folder / "small.sqlite")


# Beside a trace -----------------------------------------------------------------------------------


def test_the_recipe_of_a_trace_is_that_it_was_made_from(tmp_path):
    recipe = Recipe(
        Built("stream", Size(2 * MIB)).made(Settings())[0],
        Settings(gpu="v100-sxm2-16gb", host="power9", capacity_bytes=4 * MIB, seed=3),
        Style(rows="page", jitter_ns=5),
        ExportOptions(schema="3.25", cpu_faults=False),
        origin=Built("stream", Size(2 * MIB)),
    )
    folder = tmp_path / "made"
    make(recipe, folder)
    assert not (folder / "program.json").exists()
    assert recipe_of(folder / "made.sqlite") == recipe
    assert recipe_of(folder) == recipe


def test_the_recipe_of_a_training_has_its_allocator(tmp_path):
    case = Case(1.25, "caching:drop", "prefetch:parameter")
    recipe = swept(network("resnet-8"), TrainingRun(1, 4), Settings(), case)
    make(recipe, tmp_path / "made")
    again = recipe_of(tmp_path / "made" / "made.sqlite")
    assert again.digest() == recipe.digest() == about(tmp_path / "made")["recipe_sha256"]
    assert again.placed.history.allocator == "caching:drop"
    assert again.placed.peak_tensor_bytes == recipe.placed.peak_tensor_bytes


def test_a_program_of_ones_own_is_written_beside_the_trace(tmp_path):
    folder = tmp_path / "small"
    make(Recipe(SMALL), folder)
    assert about(folder)["origin"] == {"file": "program.json"}
    assert recipe_of(folder / "small.sqlite") == Recipe(SMALL)
    assert is_whole(folder)
    (folder / "program.json").unlink()
    assert not is_whole(folder)
    with pytest.raises(RecipeUnknownError, match="cannot be read"):
        recipe_of(folder / "small.sqlite")


def test_a_folder_with_a_program_can_be_replaced(tmp_path):
    make(Recipe(SMALL), tmp_path / "small")
    make(Recipe(SMALL), tmp_path / "small", overwrite=True)
    assert recipe_of(tmp_path / "small").program == SMALL


def test_a_name_that_the_program_has_outgrown_is_not_believed(tmp_path):
    origin = Built("stream", Size(2 * MIB))
    changed = Recipe(SMALL, origin=origin)
    make(changed, tmp_path / "changed")
    assert recipe_of(tmp_path / "changed").program == SMALL


def test_a_program_with_words_of_its_own_is_not_known(tmp_path):
    class Own(Stream):
        pass

    launch = Launch(Kernel("k", 1, 32, (Own(allocation="x"),)))
    make(Recipe(Program("own", (Allocate("x", MIB), launch))), tmp_path / "own")
    assert about(tmp_path / "own")["origin"] == {}
    with pytest.raises(RecipeUnknownError, match="words of its own"):
        recipe_of(tmp_path / "own")


def test_what_another_version_made_is_not_known(tmp_path):
    make(replace(Recipe(SMALL), settings=Settings(seed=2)), tmp_path / "small")
    change(tmp_path / "small", recipe_sha256="0" * 64, nsan="0.0.7")
    with pytest.raises(RecipeUnknownError, match=r"another program today: nsan 0\.0\.7 made"):
        recipe_of(tmp_path / "small")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("{}", "does not say which program"),
        ('{"origin": {"workload": "stream"}}', "cannot be read"),
        ('{"origin": 5, "settings": {}, "style": {}, "export": {}}', "cannot be read"),
        ('{"origin": {"workload": "x", "size": {}}, "settings": {}, "style": {}, "export": {}}', "no workload"),
    ],
)  # fmt: skip
def test_a_model_json_that_does_not_tell_gets_a_reason(tmp_path, text, said):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(RecipeUnknownError, match=said):
        recipe_of(tmp_path / "trace.sqlite")


def nested(folder):
    (folder / "program.json").write_text("[" * 100_000)


def piped(folder):
    (folder / "program.json").unlink()
    os.mkfifo(folder / "program.json")


def endless(folder):
    text = json.loads((folder / "program.json").read_text())
    (folder / "program.json").write_text(json.dumps({**text, "order": [0] * (MOST_OPERATIONS + 1)}))


@pytest.mark.parametrize("spoil", [nested, piped, endless])
def test_a_program_that_would_crash_hang_or_never_end_is_refused(tmp_path, spoil):
    make(Recipe(SMALL), tmp_path / "small")
    spoil(tmp_path / "small")
    with pytest.raises(RecipeUnknownError, match="cannot be read"):
        recipe_of(tmp_path / "small")


def test_a_pipe_in_the_place_of_model_json_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.json")
    with pytest.raises(RecipeUnknownError, match="cannot be read"):
        recipe_of(tmp_path / "trace.sqlite")


def test_a_program_too_long_to_be_read_is_not_written(monkeypatch):
    monkeypatch.setattr("nsan.model.origin.MOST_OPERATIONS", 2)
    assert program_text(SMALL) is None


def test_a_trace_alone_has_no_recipe(tmp_path):
    with pytest.raises(RecipeUnknownError, match=r"model\.json, .* does not lie beside it"):
        recipe_of(tmp_path / "trace.sqlite")
