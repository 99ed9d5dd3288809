"""What users install, and that the places that name it agree."""

from __future__ import annotations

import re
import tomllib
import zipfile

import exports as x
import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

import nsan

PYPROJECT = tomllib.loads((x.REPOSITORY / "pyproject.toml").read_text())
PINS = dict(
    line.split("==")
    for line in (x.REPOSITORY / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def _name(requirement):
    return re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower().replace("_", "-")


def _lower_bound(requirement):
    found = re.search(r">=\s*([\d.]+)", requirement)
    return tuple(map(int, found[1].split("."))) if found else ()


def _requirements():
    groups = PYPROJECT["project"]["optional-dependencies"].values()
    found = [*PYPROJECT["project"]["dependencies"], *(r for group in groups for r in group)]
    # An extra may name another one of this package.
    return [requirement for requirement in found if _name(requirement) != "nsan"]


@pytest.mark.parametrize("requirement", _requirements())
def test_every_requirement_is_pinned_at_or_above_its_lower_bound(requirement):
    pins = {_name(name): version for name, version in PINS.items()}
    assert _name(requirement) in pins
    pinned = tuple(int(n) for n in re.findall(r"\d+", pins[_name(requirement)])[:3])
    assert pinned >= _lower_bound(requirement)


def test_constraints_name_versions_and_no_address():
    assert all(re.fullmatch(r"\d[\w.+!-]*", version) for version in PINS.values())


def test_the_conda_environment_installs_this_package_with_its_extras_and_pins():
    environment = yaml.safe_load((x.REPOSITORY / "environment.yml").read_text())
    python = next(d for d in environment["dependencies"] if str(d).startswith("python"))
    assert python == "python" + PYPROJECT["project"]["requires-python"]
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    extras = re.search(r"\.\[([\w,]+)\]", " ".join(pip))[1].split(",")
    users = set(PYPROJECT["project"]["optional-dependencies"]) - {"dev", "recipe"}
    assert set(extras) == users
    assert "--constraint constraints.txt" in pip


def test_the_wheel_holds_the_package_its_types_and_its_licence(tmp_path):
    wheel = next(iter(WheelBuilder(str(x.REPOSITORY)).build(directory=str(tmp_path))))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "nsan/py.typed" in names
    assert "nsan/cli/summary.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert f"nsan-{nsan.__version__}-" in wheel
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)
