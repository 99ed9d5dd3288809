"""Tapes: a tensor program written out for dl_bench, against text written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsan.errors import ProgramError
from nsan.microbench.tapes import tape_text
from nsan.model.networks import NETWORKS, SMALL
from nsan.model.networks.tensors import (
    Compute,
    Create,
    Drop,
    HostWrite,
    Phase,
    Step,
    Tensor,
    TensorProgram,
)
from nsan.model.placing import placed
from nsan.model.profiles import GPUS

BY_NAME = {network.name: network for network in (*NETWORKS, *SMALL)}


def made(name, n_bytes, role="activation"):
    return Create(Tensor(name, n_bytes, role))


def one_step(*forward, before=(), facts=None):
    """One step that does something in its forward pass."""
    marks = Phase("backward"), Phase("update")
    operations = (*before, Step(1), Phase("forward"), *forward, *marks)
    return TensorProgram("tiny net", operations, facts or {})


def fields(text, kind):
    """Fields of the lines of a kind, without the kind."""
    lines = [line.split("\t") for line in text.splitlines()]
    return [line[1:] for line in lines if line[0] == kind]


def lookup(index_role="input", *, row_bytes=64, n_bytes=640):
    """Ten indices choose rows of a table of 100."""
    return one_step(
        made("words", 80, index_role),
        made("out", n_bytes),
        Compute("wte embedding forward", ("words", "wte.weight"), ("out",), 0.0),
        Drop("words"),
        Drop("out"),
        before=(made("wte.weight", 100 * row_bytes, "parameter"), HostWrite("wte.weight")),
        facts={"sparse_reads": {"wte embedding forward": n_bytes}},
    )


def test_a_program_is_written_one_operation_a_line():
    program = one_step(
        made("x#1", 640, "input"),
        HostWrite("x#1"),
        made("y#1", 4),
        Compute("fc forward, with blanks", ("x#1", "fc.weight"), ("y#1",), 2048.0),
        Compute("fc add_", ("y#1",), ("y#1",), 1.0),
        Drop("x#1"),
        Drop("y#1"),
        before=(made("fc.weight", 1000, "parameter"), HostWrite("fc.weight")),
        facts={"batch": 2, "optimizer": "sgd", "assumptions": ("none",), "peak_bytes_by_role": {}},
    )
    assert tape_text(program) == (
        "nsan-tape 1\n"
        "network\ttiny net\n"
        "fact\tbatch\t2\n"
        "fact\toptimizer\tsgd\n"
        "c\t0\t1000\tparameter\tfc.weight\n"
        "h\t0\n"
        "s\t1\n"
        "p\tforward\n"
        "c\t1\t640\tinput\tx#1\n"
        "h\t1\n"
        "c\t2\t4\tactivation\ty#1\n"
        "k\t2048\t2\t1\t0\t1\t2\tfc forward, with blanks\n"
        "k\t1\t1\t2\t1\t2\tfc add_\n"
        "d\t1\n"
        "d\t2\n"
        "p\tbackward\n"
        "p\tupdate\n"
        "end\t13\n"
    )


def test_words_of_a_text_choose_rows_anywhere_in_a_table():
    # Ten words of 8 byte; 640 byte come out, so a row has 64.
    assert fields(tape_text(lookup()), "k") == [
        ["0", "2", "1", "0:640/64", "1", "2", "wte embedding forward"]
    ]


def test_positions_choose_the_first_rows_of_a_table():
    assert fields(tape_text(lookup("buffer")), "k")[0][3] == "0:640"


def test_a_lookup_that_reads_all_of_its_table_is_no_part():
    whole = lookup()
    facts = {"sparse_reads": {"wte embedding forward": 6400}}
    assert fields(tape_text(replace(whole, facts=facts)), "k")[0][3] == "0"


@pytest.mark.parametrize("sizes", [{"row_bytes": 20, "n_bytes": 200}, {"n_bytes": 632}])
def test_rows_that_no_thread_can_load_whole_are_refused(sizes):
    with pytest.raises(ProgramError, match=r"wte embedding forward reads .* multiples of 16"):
        tape_text(lookup(**sizes))


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\rb", "a\x1bb", ""])
def test_a_name_that_would_break_the_line_is_refused(name):
    with pytest.raises(ProgramError, match="cannot be written on a tape"):
        tape_text(one_step(made(name, 4), Drop(name)))


def test_a_name_may_be_in_any_script():
    assert "c\t0\t4\tactivation\tGewichte: été, 重み\n" in tape_text(
        one_step(made("Gewichte: été, 重み", 4), Drop("Gewichte: été, 重み"))
    )


def test_a_program_that_is_not_right_is_refused_with_what_is_wrong():
    program = one_step(Drop("x"), Drop("y"))
    with pytest.raises(ProgramError, match=r"tiny net .* x is dropped before .*, and 1 more"):
        tape_text(program)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_operation_of_every_network_is_on_its_tape(name):
    program = BY_NAME[name].build(steps=2, **small_sizes(name))
    text = tape_text(program)
    kinds = {Create: "c", Drop: "d", HostWrite: "h", Compute: "k", Step: "s", Phase: "p"}
    body = [line for line in text.splitlines() if line.split("\t")[0] in kinds.values()]
    assert [line[0] for line in body] == [kinds[type(each)] for each in program.operations]
    assert fields(text, "end") == [[str(len(program.operations))]]
    assert ["parameter_count", str(program.facts["parameter_count"])] in fields(text, "fact")


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("gpt2-small", {"wte"}),
        ("bert-base", {"embeddings.word_embeddings"}),
    ],
)
def test_a_lookup_touches_its_table_as_in_the_driver_model(name, spread):
    # The model knows tables by their names, a tape by what chooses the rows: both must say the same.
    program = BY_NAME[name].build(steps=1, batch=1, sequence=16)
    launches = {
        o.kernel.name: o.kernel
        for o in placed(program, "raw", GPUS["a100-pcie"]).program.operations
        if hasattr(o, "kernel")
    }
    found = set()
    for line in fields(tape_text(program), "k"):
        parts = [each for each in line[2 : 2 + int(line[1])] if ":" in each]
        is_random = any(type(s).__name__ == "Random" for s in launches[line[-1]].streams)
        assert is_random == any("/" in part for part in parts), line
        if is_random:
            # A row of both networks is 768 floats.
            assert parts[0].endswith(f":{16 * 3072}/3072")
            found.add(line[-1].removesuffix(" embedding forward"))
    assert found == spread


def small_sizes(name):
    if BY_NAME[name].has_sequence:
        return {"batch": 1, "sequence": 16}
    return {"batch": 1, "image": 32 if name == "resnet-8" else 64}
