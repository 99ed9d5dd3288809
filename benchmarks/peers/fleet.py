"""Many reports at once: a recipe of the vendor's, nsan's own, nsan, and pandas, over the same exports.

Each export lies beside a real report of this machine, newer than it: recipes take reports only, and read
the export beside.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.peers import nsan_way, vendor
from benchmarks.peers.agreement import Answer
from benchmarks.peers.contests import Contest, Contestant, Setting, has, scan
from benchmarks.peers.measuring import Taken, run
from benchmarks.peers.tables import DIRECTIONS

OUR_RECIPE = "uvm_sum"
_WORKERS = 2
_MODES = ("none", "concurrent")
_RECIPES = Path(__file__).parents[2] / "nsan" / "recipe" / "recipes"
_EACH = 'p=$1; shift; for f in "$@"; do "$p" -m nsan summary -q --json "$f" || exit 1; done'


def fleet(setting: Setting, exports: list[Path], exports_of: str) -> tuple[Contest, list[str]]:
    """Ask about many reports; also say what could not be asked, and why."""
    left_out: list[str] = []
    folder = setting.folder / "reports"
    folder.mkdir()
    with_recipes = next((one for one in setting.installations if one.recipes.is_dir()), None)
    reports: list[Path] = []
    if with_recipes is None:
        left_out.append("recipes: no installed nsys has any")
    elif lacks := vendor.recipe_needs():
        left_out.append(f"recipes of nsys {with_recipes.version}: this Python lacks {lacks}")
    else:
        reports = vendor.make_reports(with_recipes, exports, folder)
        if not reports:
            left_out.append(f"recipes: nsys {with_recipes.version} makes no report on this machine")
    if not reports:
        for export in exports:
            (folder / export.name).hardlink_to(export)
    files = [folder / export.name for export in exports]
    contestants = [
        scan(setting, files),
        _one_by_one(setting, files),
        *_as_one(setting, folder, left_out),
        *(_recipes(setting, with_recipes, folder, files, left_out) if reports else ()),
        Contestant(
            "SQL, in Python's sqlite3", "sql",
            setting.module("sql", "transfers", *map(str, files)), setting.env, _printed,
        ),
    ]  # fmt: skip
    if has("pandas"):
        words = ("transfers", *map(str, files))
        command = setting.module("pandas_way", *words)
        contestants.append(Contestant("pandas", "pandas", command, setting.env, _printed))
    notes = [
        "nsan's busy time is the union of the copies of one direction and cause, a recipe's total time the "
        "sum of all copies of a direction: two figures, each compared with SQL under its own name.",
    ]
    label = f"{len(files)} reports, each {exports_of}"
    size = sum(file.stat().st_size for file in files)
    contest = Contest("transfers", label, contestants, notes=notes, n_bytes=size)
    return contest, left_out


def _printed(taken: Taken) -> Answer:
    return json.loads(taken.output)


def _cold(setting: Setting) -> dict:
    place = setting.folder / "fleet-cold"
    return {
        "env": setting.env | {"NSAN_CACHE_DIR": str(place)},
        "before": partial(shutil.rmtree, place, ignore_errors=True),
    }


def _one_by_one(setting: Setting, files: list[Path]) -> Contestant:
    command = ["sh", "-c", _EACH, "sh", sys.executable, *map(str, files)]
    read = partial(_summaries, [file.stem for file in files])
    return Contestant(
        "`nsan summary`, of each in turn, first time", "nsan", command, read=read, **_cold(setting)
    )


def _summaries(names: list[str], taken: Taken) -> Answer:
    decoder, at, found = json.JSONDecoder(), 0, []
    while at < len(taken.output.rstrip()):
        said, at = decoder.raw_decode(taken.output, at)
        at += len(taken.output[at:]) - len(taken.output[at:].lstrip())
        found.append(said)
    rows: dict[str, dict] = {}
    busy: dict[str, dict] = {}
    for name, said in zip(names, found, strict=True):
        answer = nsan_way.totals(said)
        for row, cells in answer["by cause"].items():
            direction = rows.setdefault(f"{name} {row.split()[0]}", {"n": 0, "bytes": 0})
            direction["n"] += cells["n"]
            direction["bytes"] += cells["bytes"]
        for group in said["migrations"]["groups"]:
            cause = nsan_way.CAUSES.index(group["cause"])
            one = busy.setdefault(f"{name} {group['direction']} {cause}", {"busy_ns": 0})
            one["busy_ns"] += group["busy_ns"]
    return {"by direction": rows, "busy by cause": busy}


def _as_one(setting: Setting, folder: Path, left_out: list[str]) -> list[Contestant]:
    """`nsan summary` of the folder, where this nsan takes one."""
    command = [*nsan_way.NSAN, "summary", "-q", "--json", str(folder)]
    tried = run(command, _cold(setting)["env"])
    if tried.status:
        left_out.append("`nsan summary` of a folder: this nsan takes one report at a time")
        return []
    cold = Contestant(
        "`nsan summary` of the folder, first time", "nsan", command, read=_folder, **_cold(setting)
    )
    spread = [*command, "--workers", str(_WORKERS)]
    several = Contestant(
        f"`nsan summary --workers {_WORKERS}` of the folder, first time", "nsan", spread,
        read=_folder, **_cold(setting),
    )  # fmt: skip
    env = setting.env | {"NSAN_CACHE_DIR": str(setting.folder / "fleet-warm")}
    again = Contestant(
        "`nsan summary` of the folder, again", "nsan", command, env, _folder, first=True
    )
    return [cold, several, again]


def _folder(taken: Taken) -> Answer:
    """Read bytes by direction of each report."""
    rows = {}
    for report in json.loads(taken.output)["reports"]:
        name = Path(report["source"]).stem
        for direction in DIRECTIONS.values():
            if report[f"{direction}_bytes"]:
                rows[f"{name} {direction}"] = {"bytes": report[f"{direction}_bytes"]}
    return {"by direction": rows}


def _recipes(setting, one, folder, files, left_out) -> list[Contestant]:
    env = vendor.recipe_environment(setting.env)
    ours = env | {"NSYS_RECIPE_PATH": str(_RECIPES)}
    found = []
    for mode in _MODES:
        command = vendor.recipe_command(one, vendor.RECIPE, mode, folder)
        output = Path(command[-1])
        found.append(
            Contestant(
                f"recipe `{vendor.RECIPE}`, {mode}, nsys {one.version}", "vendor", command, env,
                lambda _, output=output: vendor.transfers(output, files[0]),
                partial(shutil.rmtree, output, ignore_errors=True),
            )
        )  # fmt: skip
    if not (_RECIPES / OUR_RECIPE).is_dir():
        left_out.append(f"nsan's recipe `{OUR_RECIPE}`: this nsan has none")
        return found
    for mode in _MODES:
        command = vendor.recipe_command(one, OUR_RECIPE, mode, folder)
        output = Path(command[-1])
        how = _cold(setting)
        found.append(
            Contestant(
                f"nsan's recipe `{OUR_RECIPE}`, {mode}, nsys {one.version}, first time", "nsan", command,
                ours | {"NSAN_CACHE_DIR": how["env"]["NSAN_CACHE_DIR"]},
                lambda _, output=output: _ours(output), partial(_forget, output, how["before"]),
            )
        )  # fmt: skip
    return found


def _forget(output: Path, before: Callable[[], object]) -> None:
    shutil.rmtree(output, ignore_errors=True)
    before()


def _ours(folder: Path) -> Answer | None:
    """Read the migrations by report of nsan's recipe."""
    import polars as pl

    table = folder / "rank_migrations.parquet"
    if not table.is_file():
        return None
    rows: dict[str, dict] = {}
    busy: dict[str, dict] = {}
    for cells in pl.read_parquet(table).iter_rows(named=True):
        name = Path(cells["source"]).stem
        direction = rows.setdefault(f"{name} {cells['direction']}", {"n": 0, "bytes": 0})
        direction["n"] += cells["n"]
        direction["bytes"] += cells["bytes"]
        row = f"{name} {cells['direction']} {nsan_way.CAUSES.index(cells['cause'])}"
        busy.setdefault(row, {"busy_ns": 0})["busy_ns"] += cells["busy_ns"]
    return {"by direction": rows, "busy by cause": busy}
