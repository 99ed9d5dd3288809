"""Small samples out of a device check, to be kept with a repository: cleaned exports, their tables, and where they are from."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nsan.errors import NsanError, OutputExistsError, OutputWriteError
from nsan.io import nsys_cli
from nsan.io.clean_export import write_clean
from nsan.io.probe import REPORT_SUFFIXES
from nsan.io.tidy import put_in_place
from nsan.microbench.checking import OK
from nsan.microbench.device_errors import NoSampleError
from nsan.microbench.results import ABOUT
from nsan.units import MIB, format_bytes

README: Final = "README.md"
MOST_BYTES: Final = 2 * MIB
"""A sample that is larger is left out: a repository keeps every version of it."""

_HEAD: Final = """\
# Real traces of nsan's microbenchmark

Recorded by `nsan bench device-check` on one machine, on {date}. Exports of nsys, cleaned: user, host, folders, environment,
command line, processes and serial numbers were left out; no event row, time or address was touched. They are under the
licence of this repository: the programs are nsan's own, and the traces hold nothing else. `NAME.truth` beside a trace has the
tables that its program wrote of itself, `NAME.alone` those of the same program without nsys, `NAME.pickle` what its
caching allocator did, as a memory snapshot of PyTorch.

| | |
|---|---|
{machine}

Options of nsys: `{switches}`

| trace | size | recorded by |
|---|---|---|
"""
_MACHINE: Final = {
    "gpu.name": "GPU",
    "gpu.memory.total": "GPU memory, MiB",
    "gpu.compute_cap": "compute capability",
    "driver": "driver",
    "cuda": "CUDA of the driver",
    "nsys": "nsys",
    "cpu": "CPU",
    "kernel": "kernel",
    "programs": "programs",
}


@dataclass(frozen=True)
class Sample:
    """A sample, or why there is none.

    Attributes
    ----------
    name : str
        Of the case.
    file : str or None
        Name of the export; None: there is none.
    n_bytes : int or None
        Its size.
    reason : str
        Why there is none; empty if there is one.
    """

    name: str
    file: str | None
    n_bytes: int | None
    reason: str = ""


def make_samples(check: Path, output: Path, *, overwrite: bool = False) -> list[Sample]:
    """Make samples of the cases of a check that went well.

    Parameters
    ----------
    check : Path
        A folder that :func:`nsan.microbench.checking.import_check` made.
    output : Path
        The folder to make, with a README that says where they are from. It appears whole, or not at all.
    overwrite : bool, default False
        Replace what is there.

    Returns
    -------
    list of Sample
        One for each case.

    Raises
    ------
    NsanError
        If the folder is no check, or none of its cases makes a sample.
    """
    about = _about(check)
    if output.exists() and not overwrite:
        raise OutputExistsError(output)
    if output.exists() and not (output / README).is_file():
        raise OutputExistsError(output, "is no earlier folder of samples")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with put_in_place(output, "sampling") as folder:
            samples = [_sample(case, check, folder) for case in about["cases"]]
            if not any(each.file for each in samples):
                why = "; ".join(f"{each.name}: {each.reason}" for each in samples[:3])
                raise NoSampleError(check, f"none of its cases ended well ({why})")
            (folder / README).write_text(_readme(about, samples, check), encoding="utf-8")
    except OSError as error:
        raise OutputWriteError(output, error.strerror or str(error)) from error
    return samples


def _about(check: Path) -> dict[str, Any]:
    try:
        found = json.loads((check / ABOUT).read_text(encoding="utf-8"))
        cases = [(case["name"], case["status"]) for case in found["cases"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"it is no imported device check: it has no {ABOUT} that can be read"
        raise NoSampleError(check, problem) from error
    if any(Path(str(name)).name != name for name, _ in cases):
        raise NoSampleError(check, f"a name in its {ABOUT} is none of a case")
    return dict(found)


def _sample(case: dict[str, Any], check: Path, folder: Path) -> Sample:
    name = str(case["name"])
    if case["status"] != OK:
        return Sample(name, None, None, f"it did not end well ({case['status']})")
    place = check / name
    target = folder / f"real_{name.replace('-', '_')}.sqlite"
    try:
        _clean(place / (name + REPORT_SUFFIXES[0]), target)
    except NsanError as error:
        return Sample(name, None, None, str(error).splitlines()[0])
    n_bytes = target.stat().st_size
    if n_bytes > MOST_BYTES:
        target.unlink()
        return Sample(
            name, None, n_bytes, f"{format_bytes(n_bytes)} are more than {format_bytes(MOST_BYTES)}"
        )
    for ending in (".truth", ".alone"):
        tables = place / (name + ending)
        if tables.is_dir():
            shutil.copytree(tables, target.with_suffix(ending))
    snapshot = place / f"{name}.pickle"
    if snapshot.is_file():
        shutil.copyfile(snapshot, target.with_suffix(".pickle"))
    return Sample(name, target.name, n_bytes)


def _clean(report: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="nsan-sample-") as scratch:
        export = Path(scratch) / "whole.sqlite"
        nsys_cli.export_report(report, export)
        write_clean(export, target)


def _readme(about: dict[str, Any], samples: list[Sample], check: Path) -> str:
    machine: dict[str, str] = about["machine"]
    facts = [f"| {words} | {machine[key]} |" for key, words in _MACHINE.items() if key in machine]
    facts += [
        f"| nvidia_uvm `{key.removeprefix('uvm.')}` | {value} |"
        for key, value in machine.items()
        if key.startswith("uvm.")
    ]
    head = _HEAD.format(
        date=machine.get("started_utc", "an unknown day").partition("T")[0],
        machine="\n".join(facts),
        switches=" ".join(_switches(check, about)),
    )
    commands = {str(case["name"]): f"{case['program']} {case['flags']}" for case in about["cases"]}
    lines = [
        f"| `{each.file}` | {format_bytes(each.n_bytes or 0)} | `{commands[each.name]}` |"
        for each in samples
        if each.file
    ]
    return head + "\n".join(lines) + "\n"


def _switches(check: Path, about: dict[str, Any]) -> list[str]:
    """Read the options of nsys from what is known of the first recording."""
    for case in about["cases"]:
        facts = check / str(case["name"]) / f"{case['name']}.nsan.json"
        if facts.is_file():
            return list(json.loads(facts.read_text(encoding="utf-8"))["options"])
    return []
