from __future__ import annotations

import copy

import nbformat
import pytest

from nsan.errors import NsanError, UsageError
from nsan.report.parameters import (
    NoParametersError,
    UnknownParameterError,
    checked,
    hide_paths,
    parameters_of,
    parse_parameters,
)

CELL = '''\
"""What can be set."""
TRACE: str = "a=b # c"  # the trace
LIMIT = 3
SHARE: float = 0.5  # of all
DEEP: bool = False
GPUS: list[int] = [
    0,
    1,
]  # which
WHEN = pick()
first, second = 1, 2
'''


def notebook(*cells):
    """A notebook of code cells: (source, tags)."""
    made = [nbformat.v4.new_code_cell(source, metadata={"tags": tags}) for source, tags in cells]
    return nbformat.v4.new_notebook(cells=made)


@pytest.fixture
def known():
    return parameters_of(notebook(("import os", []), (CELL, ["parameters"])), "my.ipynb")


def test_parameters_are_what_the_tagged_cell_assigns_with_type_default_and_comment(known):
    assert list(known) == ["TRACE", "LIMIT", "SHARE", "DEEP", "GPUS", "WHEN"]
    found = {name: (each.type, each.default, each.help) for name, each in known.items()}
    # papermill's own search loses a line with two equals signs.
    assert found["TRACE"] == ("str", "a=b # c", "the trace")
    assert found["LIMIT"] == ("int", 3, "")
    assert found["SHARE"] == ("float", 0.5, "of all")
    assert found["DEEP"] == ("bool", False, "")
    assert found["GPUS"] == ("list", [0, 1], "which")
    assert found["WHEN"] == ("", None, "")


def test_a_notebook_without_the_tag_is_refused_with_the_way_out():
    with pytest.raises(NoParametersError, match=r"my\.ipynb has no cell tagged .*Cell Tags"):
        parameters_of(notebook((CELL, ["parameter"])), "my.ipynb")


def test_the_tag_on_a_markdown_cell_is_none():
    cell = nbformat.v4.new_markdown_cell("TRACE = 1", metadata={"tags": ["parameters"]})
    with pytest.raises(NoParametersError):
        parameters_of(nbformat.v4.new_notebook(cells=[cell]), "my.ipynb")


def test_a_cell_of_parameters_that_is_no_python_is_told_with_its_line():
    with pytest.raises(NsanError, match=r"my\.ipynb: its cell of parameters is no Python .*line 2"):
        parameters_of(notebook(("A = 1\nB = = 2", ["parameters"])), "my.ipynb")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("TRACE=x=y", "x=y"),
        ("TRACE=", ""),
        ("TRACE=12", "12"),
        ("LIMIT=7", 7),
        ("SHARE=1e-3", 0.001),
        ("SHARE=2", 2.0),
        ("DEEP=yes", True),
        ("DEEP=False", False),
        ("GPUS=2,3", [2, 3]),
        ("GPUS=['a', 1]", ["a", 1]),
        ("GPUS=", []),
        ("WHEN=1.5", 1.5),
        ("WHEN=soon", "soon"),
        ("WHEN=true", True),
    ],
)
def test_a_value_is_read_as_the_type_that_the_notebook_says(known, text, value):
    found = parse_parameters(known, [text], "my.ipynb")
    assert found == {text.partition("=")[0]: value}
    assert type(next(iter(found.values()))) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("LIMIT=many", "LIMIT is a whole number"),
        ("LIMIT=1.5", "LIMIT is a whole number"),
        ("SHARE=half", "SHARE is a number"),
        ("DEEP=2", "DEEP is true or false"),
        ("GPUS=[1", "GPUS is a list"),
        ("LIMIT", "write NAME=VALUE"),
        ("=3", "write NAME=VALUE"),
    ],
)
def test_a_value_of_another_type_is_refused(known, text, said):
    with pytest.raises(UsageError, match=said):
        parse_parameters(known, [text], "my.ipynb")


def test_an_unknown_parameter_is_refused_and_the_known_ones_are_listed_with_their_comments(known):
    with pytest.raises(UnknownParameterError) as refused:
        parse_parameters(known, ["trace=x"], "my.ipynb")
    said = str(refused.value)
    assert "my.ipynb has no parameter 'trace'" in said
    assert "  SHARE: float = 0.5  (of all)" in said.splitlines()
    with pytest.raises(UnknownParameterError):
        checked(known, {"SNAPSHOT": "x"}, "my.ipynb")


def test_the_last_of_two_values_wins(known):
    assert parse_parameters(known, ["LIMIT=1", "LIMIT=2"], "my.ipynb") == {"LIMIT": 2}


def test_paths_do_not_leave_in_what_papermill_notes_down(tmp_path):
    private = tmp_path / "zoe"
    ran = notebook(
        ('TRACE = "x"', ["parameters"]),
        (f'# Parameters\nTRACE = "{private}/x.sqlite"\nLIMIT = 3', ["injected-parameters"]),
        ('print("TRACE = 1")', []),
    )
    ran.metadata["papermill"] = {
        "input_path": f"{private}/my.ipynb",
        "output_path": f"{private}/run.ipynb",
        "parameters": {"TRACE": f"{private}/x.sqlite"},
        "environment_variables": {"USER": "zoe"},
        "duration": 1.5,
        "version": "2.7.0",
    }
    other = copy.deepcopy(ran.cells[2])
    hide_paths(ran, {"TRACE": "x.sqlite"})
    assert "zoe" not in nbformat.writes(ran)
    assert ran.cells[1].source == "# Parameters\nTRACE = 'x.sqlite'\nLIMIT = 3"
    assert ran.metadata["papermill"] == {"duration": 1.5, "version": "2.7.0"}
    assert ran.cells[2] == other
