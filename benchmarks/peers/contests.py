"""Who is asked what: each contest is one question about one file, or about many files at once."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.peers import nsan_reports, nsan_way, vendor
from benchmarks.peers.agreement import Answer
from benchmarks.peers.files import File
from benchmarks.peers.measuring import Taken
from benchmarks.peers.tables import CPU_FAULTS, GPU_FAULTS, MEMCPY, capture, connect, present

Reader = Callable[[Taken], Answer | None]
_SCAN = {
    GPU_FAULTS: "start end globalPid deviceId address numberOfPageFaults faultAccessType",
    CPU_FAULTS: "start globalPid address originalFaultPc",
    MEMCPY: "start end deviceId globalPid bytes copyKind migrationCause virtualAddress",
}
QUESTIONS = {
    "totals": "Bytes by direction and cause, page faults, lowest and highest address",
    "places": "What happened in each VA block of 2 MiB",
    "functions": "CPU page faults of each function",
    "transfers": "Migrations of many reports: count, bytes and time by direction",
    "parquet": "An export as Parquet",
    "kernels": "Page faults of each kernel",
    "episodes": "Stretches of faulting without a pause of 0.5 ms",
    "snapshot": "A memory snapshot of PyTorch",
}


@dataclass(frozen=True)
class Contestant:
    """A command that answers a question, and how its answer is read."""

    name: str
    kind: str
    command: Sequence[str]
    env: dict[str, str]
    read: Reader | None = None
    before: Callable[[], object] = lambda: None
    first: bool = False
    """Run it once before it is measured: what is measured is any later run."""


@dataclass(frozen=True)
class Contest:
    """One question about one file: the contestants, whose answer is true, and whose time is the unit."""

    question: str
    label: str
    contestants: list[Contestant]
    truth: Callable[[], Answer] | None = None
    """None: the answer of plain SQL, which is a contestant."""

    notes: list[str] = field(default_factory=list)
    absent: str = ""
    """Tables of Unified Memory that the file does not have."""

    n_bytes: int = 0
    """Size of what is asked about."""


@dataclass(frozen=True)
class Setting:
    """Where contests take place: scratch folder, environment, and what is installed."""

    folder: Path
    env: dict[str, str]
    installations: list[vendor.Installation]

    def module(self, name: str, *words: str) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.peers.{name}", *words]


def has(package: str) -> bool:
    """Say whether this Python has a package, without importing it."""
    return importlib.util.find_spec(package) is not None


def scan(setting: Setting, files: Sequence[Path]) -> Contestant:
    """Read the columns of Unified Memory once and keep the largest value: the unit of ratios."""
    with closing(connect(files[0])) as connection:
        there = [table for table in _SCAN if table in present(connection)]
    query = "; ".join(
        f"SELECT {', '.join(f'max({chr(34)}{c}{chr(34)})' for c in _SCAN[table].split())} "
        f'FROM "{table}"'
        for table in there
    )
    program = shutil.which("sqlite3")
    if program:
        each = f'for f in "$@"; do {program} -readonly "$f" {_quoted(query)} || exit 1; done'
        command = ["sh", "-c", each, "sh", *map(str, files)]
        return Contestant("`sqlite3`, one scan", "scan", command, setting.env)
    code = (
        "import sqlite3, sys\nfor file in sys.argv[2:]:\n    for query in sys.argv[1].split(';'):\n"
        "        sqlite3.connect(file).execute(query).fetchall()"
    )
    command = [sys.executable, "-c", code, query, *map(str, files)]
    return Contestant("Python's sqlite3, one scan", "scan", command, setting.env)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _printed(taken: Taken) -> Answer:
    return json.loads(taken.output)


def _plain(setting: Setting, question: str, files: Sequence[Path]) -> list[Contestant]:
    """Whom one asks without a tool: SQL, NumPy, pandas."""
    from benchmarks.peers import numpy_way

    words = (question, *map(str, files))
    loop = question in ("kernels", "episodes")
    found = [("sql", "sqlite3 and a Python loop" if loop else "SQL, in Python's sqlite3")]
    if question in numpy_way.QUESTIONS:
        found.append(("numpy", "sqlite3 + NumPy"))
    if has("pandas"):
        found.append(("pandas", "pandas"))
    return [
        Contestant(
            name, kind, setting.module("sql" if kind == "sql" else f"{kind}_way", *words),
            setting.env, _printed,
        )
        for kind, name in found
    ]  # fmt: skip


def _ours(setting: Setting, question: str, file: Path) -> list[Contestant]:
    """nsan, on an export it never saw, and on one it did."""
    command = nsan_way.command(question, str(file))
    read = partial(nsan_way.read, question)
    shown = " ".join(("nsan", *nsan_way.COMMANDS[question]))
    cold, warm = (setting.folder / name for name in ("cold", "warm"))
    return [
        Contestant(
            f"`{shown}`, first time", "nsan", command,
            setting.env | {"NSAN_CACHE_DIR": str(cold)}, read,
            partial(shutil.rmtree, cold, ignore_errors=True),
        ),
        Contestant(
            f"`{shown}`, again", "nsan", command, setting.env | {"NSAN_CACHE_DIR": str(warm)}, read,
            first=True,
        ),
    ]  # fmt: skip


def _theirs(setting: Setting, question: str, file: Path) -> list[Contestant]:
    found = []
    for one in setting.installations:
        script = one.script(question) if question in vendor.SCRIPTS else None
        if script is None:
            continue
        words = ("rows=-1",) if question == "places" else ()
        found.append(
            Contestant(
                f"`{script.stem}`, nsys {one.version}", "vendor",
                vendor.script_command(script, str(file), *words),
                setting.env | {"PYTHONPATH": str(one.library)}, partial(vendor.read, question),
            )
        )  # fmt: skip
    return found


def _our_reports(setting: Setting, question: str, file: Path) -> list[Contestant]:
    """nsan's reports for `nsys stats`, by the newest nsys."""
    name, *words = nsan_reports.SCRIPTS.get(question, ("",))
    script = nsan_reports.FOLDER / f"{name}.py"
    if not setting.installations or not script.is_file():
        return []
    one = setting.installations[0]
    return [
        Contestant(
            f"nsan's report `{name}`, nsys {one.version}", "nsan",
            vendor.script_command(script, str(file), *words),
            setting.env | {"PYTHONPATH": str(one.library)}, partial(nsan_reports.read, question),
        )
    ]  # fmt: skip


def about(setting: Setting, question: str, file: File) -> Contest:
    """Ask all about one export."""
    path = file.path
    contestants = [
        scan(setting, [path]),
        *_ours(setting, question, path),
        *_our_reports(setting, question, path),
        *_theirs(setting, question, path),
        *_plain(setting, question, [path]),
    ]
    return Contest(
        question, file.label, contestants, absent=_absent(path), n_bytes=path.stat().st_size
    )


def _absent(path: Path) -> str:
    return ", ".join(table for table, there in capture_of(path).items() if not there)


def capture_of(path: Path) -> dict[str, bool]:
    """Say which tables of Unified Memory an export has."""
    with closing(connect(path)) as connection:
        return capture(connection)


_NEEDS = {"functions": CPU_FAULTS, "kernels": GPU_FAULTS, "episodes": GPU_FAULTS}


def answerable(question: str, there: dict[str, bool]) -> bool:
    """Say whether a file can answer: faults of kernels need faults."""
    return there.get(_NEEDS.get(question, MEMCPY), False)


# --- Parquet --------------------------------------------------------------------------------------

_EVENTS = {
    "migrations": (MEMCPY, "copyKind IN (11, 12, 13)"),
    "gpu_faults": (GPU_FAULTS, "true"),
    "cpu_faults": (CPU_FAULTS, "true"),
}
_CARRIED = (
    *(table for table, _ in _EVENTS.values()), "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMSET", "NVTX_EVENTS",
    "CUDA_GPU_MEMORY_USAGE_EVENTS", "StringIds", "TARGET_INFO_GPU",
)  # fmt: skip
"""What nsan's import reads, so that pandas carries as much."""


def parquet(setting: Setting, file: File) -> Contest:
    """Turn an export into Parquet, and compare what was written."""
    # Not "store": nsan would find it beside the file, and no later first time would be one.
    ours, theirs = setting.folder / "imported", setting.folder / "tables"
    tables = [word for name in _CARRIED for word in ("--table", name)]
    command = [*nsan_way.NSAN, "import", "-q", "--force-overwrite", str(file.path), "-o", str(ours)]
    contestants = [
        scan(setting, [file.path]),
        Contestant("`nsan import`", "nsan", command, setting.env, lambda _: _in_store(ours)),
    ]  # fmt: skip
    if has("pandas") and has("pyarrow"):
        contestants.append(
            Contestant(
                "pandas, `to_parquet`", "pandas",
                setting.module("pandas_way", "parquet", str(file.path), "-o", str(theirs), *tables),
                setting.env, lambda _: _in_tables(theirs),
                partial(shutil.rmtree, theirs, ignore_errors=True),
            ),
        )  # fmt: skip
    notes = [
        "`nsan import` also types and checks the rows, decodes causes and names, looks for rows that the "
        "recording lost, and computes the totals that later summaries read. pandas writes the tables as "
        "they are.",
    ]
    size = file.path.stat().st_size
    truth = partial(_in_export, file.path)
    return Contest("parquet", file.label, contestants, truth, notes, n_bytes=size)


def _in_export(file: Path) -> Answer:
    rows = {}
    with closing(connect(file)) as connection:
        for name, (table, where) in _EVENTS.items():
            if table in present(connection):
                sql = f"SELECT count(*), sum(start) FROM {table} WHERE {where}"
                rows[name] = dict(
                    zip(("n_rows", "start_ns"), connection.execute(sql).fetchone(), strict=True)
                )
    return {"Parquet": rows}


def _in_store(folder: Path) -> Answer:
    import polars as pl

    import nsan

    trace, rows = nsan.open_trace(folder), {}
    for name in _EVENTS:
        found = getattr(trace, name).select(pl.len(), pl.col("start_ns").sum()).collect().row(0)
        if found[0]:
            rows[name] = dict(zip(("n_rows", "start_ns"), found, strict=True))
    return {"Parquet": rows}


def _in_tables(folder: Path) -> Answer:
    import polars as pl

    rows = {}
    for name, (table, _) in _EVENTS.items():
        path = folder / f"{table}.parquet"
        if path.is_file():
            frame = pl.scan_parquet(path)
            frame = (
                frame.filter(pl.col("copyKind").is_in([11, 12, 13])) if table == MEMCPY else frame
            )
            found = frame.select(pl.len(), pl.col("start").sum()).collect().row(0)
            rows[name] = dict(zip(("n_rows", "start_ns"), found, strict=True))
    return {"Parquet": rows}


# --- Snapshots ------------------------------------------------------------------------------------

_UNPICKLE = """
import json, sys
from pathlib import Path
from benchmarks.peers.unpickled import entries_of
print(json.dumps({"snapshot": {"all": entries_of(Path(sys.argv[1]))}}))
"""


def snapshot(setting: Setting, file: File, memory_viz: tuple[str, str] | None) -> Contest:
    """Read a snapshot of PyTorch's allocator; the unit is Python's own unpickler.

    Parameters
    ----------
    setting : Setting
        Where.
    file : File
        Snapshot.
    memory_viz : tuple of str, optional
        Python with PyTorch, and the program of PyTorch that reads snapshots.
    """
    command = [*nsan_way.NSAN, "allocator", "-q", "--json", str(file.path)]
    unpickle = [sys.executable, "-c", _UNPICKLE, str(file.path)]
    contestants = [
        Contestant("`pickle.load`", "scan", unpickle, setting.env, _printed),
        Contestant("`nsan allocator`", "nsan", command, setting.env, nsan_way.snapshot),
    ]
    if memory_viz:
        python, program = memory_viz
        page = str(setting.folder / "trace_plot.html")
        contestants += [
            Contestant(
                "PyTorch `_memory_viz.py stats`", "torch", [python, program, "stats", str(file.path)],
                setting.env, _segments,
            ),
            Contestant(
                "PyTorch `_memory_viz.py trace_plot`", "torch",
                [python, program, "trace_plot", str(file.path), "-o", page], setting.env,
                lambda taken: None if taken.status else {},
            ),
        ]  # fmt: skip
    size = file.path.stat().st_size
    return Contest("snapshot", file.label, contestants, partial(_entries, file.path), n_bytes=size)


def _entries(path: Path) -> Answer:
    from benchmarks.peers.unpickled import entries_of

    return {"snapshot": {"all": entries_of(path)}}


def _segments(taken: Taken) -> Answer | None:
    lines = dict(line.split(": ", 1) for line in taken.output.splitlines() if ": " in line)
    n = lines.get("segments")
    return {"snapshot": {"all": {"n_segments": int(n)}}} if n else None
