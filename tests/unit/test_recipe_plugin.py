"""How a recipe lives with the framework: its options in every release, and what it says when helpers fail."""

from __future__ import annotations

import zipfile
from argparse import Namespace
from concurrent.futures.process import BrokenProcessPool

import exports as x
import pytest
from hatchling.builders.wheel import WheelBuilder
from recipe_framework import NEW, OLD, Plain, framework, recipe_class, run

from nsan.cli.recipe_shells import recipe_names
from nsan.errors import UsageError
from nsan.recipe.arguments import filters_in_words, filters_of, inputs_of
from nsan.recipe.output import check_output


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("options", [OLD, NEW], ids=["old", "new"])
def test_every_recipe_has_its_options_in_every_release(name, options):
    with framework(options):
        parser = recipe_class(name).get_argument_parser()
        # What a release adds by itself later on does no harm.
        parser.add_argument("--output", help="of the framework")
        args = parser.parse_args(["--input", "a", "--output", "b", "--csv"])
    assert (args.input, args.output, args.csv) == (["a"], "b", True)
    assert hasattr(args, "nvtx") == (name != "uvm_allocator")
    assert hasattr(args, "bins") == (name == "uvm_time_map")
    assert hasattr(args, "rows") == (name == "uvm_clusters")
    assert hasattr(args, "snapshot_dir") == (name == "uvm_allocator")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_class_of_its_own_with_a_plan_of_its_name(name):
    with framework():
        assert recipe_class(name).plan.name == name


def test_inputs_may_be_lists_within_a_list_as_some_releases_give_folders():
    assert inputs_of(Namespace(input=["a", ["b", "c"]])) == ["a", "b", "c"]
    assert inputs_of(Namespace(input=None)) == []


def test_filters_are_those_that_were_given():
    assert filters_of(Namespace()) == {}
    assert filters_of(Namespace(start=None, end=None, nvtx="")) == {}
    given = filters_of(Namespace(start=0, end=None, nvtx="step@library"))
    assert given == {"time": (0, None), "nvtx": "step@library"}
    assert filters_in_words(given) == (
        "what starts from 0 ns to the end of the session and what starts within the NVTX range 'step@library'"
    )
    with pytest.raises(UsageError):
        filters_of(Namespace(start=2, end=1, nvtx=None))


class Failing(Plain):
    """A context whose workers fail all together."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def wait(self, waitable):  # noqa: ARG002
        raise self.error


class KilledWorker(Exception):  # noqa: N818
    """Named as that of dask.distributed."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BrokenProcessPool("a child died"), "--mode none"),
        (KilledWorker("gave up"), "NSYS_DASK_N_WORKERS"),
        (ModuleNotFoundError("No module named 'nsan'", name="nsan"), "where the workers run"),
    ],
)
def test_workers_that_fail_all_together_are_an_error_with_a_way_out(tmp_path, caplog, error, said):
    path = x.Export().add(x.MEMCPY, x.migration(0, 5, 4096)).write(tmp_path / "a.sqlite")
    with pytest.raises(SystemExit) as stop:
        run("uvm_sum", [path], tmp_path / "out", context=Failing(error))
    assert stop.value.code == 1
    assert said in caplog.text


def test_results_that_cannot_be_written_are_an_error_in_one_line(tmp_path, caplog):
    path = x.Export().add(x.MEMCPY, x.migration(0, 5, 4096)).write(tmp_path / "a.sqlite")
    (tmp_path / "out").write_text("a file where a folder should be")
    with pytest.raises(SystemExit) as stop:
        run("uvm_sum", [path], tmp_path / "out")
    assert stop.value.code == 1
    assert "the results cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "file/out"], "Not a directory"),
        (["--output", "file", "--force-overwrite"], "Not a directory"),
        (["--output", f"{'x' * 300}"], "name too long"),
    ],
)
def test_an_output_that_cannot_be_made_is_told_before_any_report_is_read(
    tmp_path, monkeypatch, caplog, words, said
):
    monkeypatch.chdir(tmp_path)
    path = x.Export().add(x.MEMCPY, x.migration(0, 5, 4096)).write(tmp_path / "a.sqlite")
    (tmp_path / "file").write_text("mine")
    context = Plain()
    with pytest.raises(SystemExit) as stop:
        run("uvm_sum", [path], tmp_path / "unused", *words, context=context)
    assert stop.value.code == 1
    assert len(caplog.records) == 1
    assert said in caplog.text
    assert context.mapped == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.sqlite", "file"]


def test_results_of_before_stay_until_there_are_new_ones(tmp_path, caplog):
    (tmp_path / "none.sqlite").write_text("no capture")
    old = tmp_path / "out"
    old.mkdir()
    (old / "mine").write_text("of last week")
    with pytest.raises(SystemExit):
        run("uvm_sum", [tmp_path / "none.sqlite"], old, "--force-overwrite")
    assert "the report could not be read" in caplog.text
    assert (old / "mine").read_text() == "of last week"


def test_where_an_output_can_be_made_nothing_is_left_by_trying(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for output in (None, "new/and/deep", str(tmp_path / "x")):
        check_output(Namespace(output=output, force_overwrite=True))
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_holds_all_of_each_recipe(tmp_path):
    wheel = next(iter(WheelBuilder(str(x.REPOSITORY)).build(directory=str(tmp_path))))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in recipe_names():
        place = f"nsan/recipe/recipes/{name}"
        assert {f"{place}/{name}.py", f"{place}/{name}.ipynb", f"{place}/metadata.json"} <= names
