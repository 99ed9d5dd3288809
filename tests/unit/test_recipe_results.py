"""What a recipe's notebook shows, from the files beside it alone."""

from __future__ import annotations

import builtins
import json

import exports as x
import polars as pl
import pytest
from recipe_framework import run

from nsan.cli.recipe_shells import RECIPE_FOLDER, recipe_names
from nsan.recipe.pictures import labelled
from nsan.recipe.results import NoResultsError, Results

SAMPLE = x.REPOSITORY / "sample_data" / "model" / "two_gpus" / "two_gpus.sqlite"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each recipe over two reports."""
    base = tmp_path_factory.mktemp("results")
    small = x.Export().add(x.MEMCPY, x.migration(0, 900, x.MIB)).write(base / "rank1.sqlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(base / "cache"))
        return {name: run(name, [SAMPLE, small], base / name) for name in recipe_names()}


def cells(folder, name):
    notebook = json.loads((folder / f"{name}.ipynb").read_text())
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("name", recipe_names())
def test_every_cell_of_a_notebook_shows_something_without_any_report(name, folders, monkeypatch):
    monkeypatch.chdir(folders[name])
    scope = {}
    sources = cells(folders[name], name)
    exec(sources[0].rpartition("\n")[0], scope)
    shown = [
        eval(sources[0].rpartition("\n")[2], scope),
        *(eval(each, scope) for each in sources[1:]),
    ]
    assert all(block for each in shown for block in each)
    texts = [str(each) for each in shown]
    assert "2 reports, read by nsan" in texts[0]
    assert not [text for text in texts if "No chart without" in text]


@pytest.mark.parametrize("name", recipe_names())
def test_a_notebook_ships_without_output_and_defines_nothing(name):
    notebook = json.loads((RECIPE_FOLDER / name / f"{name}.ipynb").read_text())
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert not any(c["outputs"] or c["execution_count"] for c in code)
    assert not any("def " in "".join(c["source"]) for c in code)


def test_a_table_shows_units_and_says_what_is_left_out(folders):
    text = str(Results(folders["uvm_sum"]).table("all_migrations", rows=1))
    assert "MiB" in text
    assert "more row" in text
    assert "all_migrations.parquet" in text


def test_a_table_whose_rows_have_units_of_their_own_shows_each_in_its_unit(folders):
    text = str(Results(folders["uvm_sum"]).table("all_stats", rows=100))
    duration = next(line for line in text.splitlines() if "duration_ns" in line)
    assert " ms" in duration
    moved = next(line for line in text.splitlines() if "htod_bytes" in line)
    assert "MiB" in moved


def test_counts_of_a_row_are_counts_whatever_the_unit_of_its_values(folders):
    table = Results(folders["uvm_sum"]).table("all_stats", rows=100)[0]
    row = next(row for row in table.rows if row[0] == "duration_ns")
    cells = dict(zip(table.heads, row, strict=True))
    assert (cells["Reports"], cells["Unknown"]) == ("2", "0")
    assert cells["Total"].endswith(" ms")


def test_without_the_packages_that_draw_a_notebook_says_which_to_install(folders, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "altair" or name.startswith("nsan.charts"):
            raise ModuleNotFoundError(name="altair")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    text = str(Results(folders["uvm_sum"]).chart("bytes_by_report"))
    assert "pip install 'nsan[report]'" in text


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 2}', "[1]"])
def test_a_folder_that_no_recipe_wrote_says_so(tmp_path, content):
    if content:
        (tmp_path / "about.json").write_text(content)
    with pytest.raises(NoResultsError, match=r"about\.json"):
        Results(tmp_path)


def test_a_table_that_is_not_there_is_named_with_those_that_are(folders):
    with pytest.raises(NoResultsError, match="rank_migrations"):
        Results(folders["uvm_sum"]).frame("nothing")


def test_labels_of_reports_are_short_and_each_another():
    frame = pl.DataFrame(
        {
            "run": ["a", "a", "b", "b", "b"],
            "rank": [0, 1, 0, None, None],
            "source": [
                "x/0.nsys-rep",
                "x/1.nsys-rep",
                "y/0.nsys-rep",
                "y/n/r.nsys-rep",
                "y/m/r.nsys-rep",
            ],
        }
    )
    labels = labelled(frame)["report"].to_list()
    assert labels[:3] == ["a rank 0", "a rank 1", "b rank 0"]
    assert len(set(labels)) == 5
