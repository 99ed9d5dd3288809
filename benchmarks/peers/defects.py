"""Small exports of known truth on which the vendor's reports are wrong or silent, asked in the same run.

Each is a defect that was found on real files, in the smallest form that shows it. On most captures the
vendor's figures are right, and the other tables of the document say so; these show where to be careful.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from exports import (
    CPU_FAULTS,
    DTOD,
    DTOH,
    GPU_FAULTS,
    MEMCPY,
    MIB,
    VA,
    Export,
    cpu_fault,
    gpu_fault,
    migration,
)

from benchmarks.peers import files, nsan_way, vendor
from benchmarks.peers.measuring import run
from benchmarks.peers.tables import connect

_PAGE, _SECOND, _MB = 4096, 1_000_000_000, 1_000_000
NOTHING = "prints no table"


@dataclass(frozen=True)
class Case:
    """One defect: what the file holds, what is asked, what SQL says, and how answers are read."""

    what: str
    holds: str
    question: str
    sql: str
    form: str
    export: Export | Path
    theirs: Callable[[str], str]
    ours: Callable[[dict], str]
    their_arguments: tuple[str, ...] = ()
    our_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shown:
    """A defect with what each says."""

    case: Case
    truth: str
    by_version: dict[str, str]
    ours: str


def _export(gpu: Iterable[dict], cpu: Iterable[dict], moved: Iterable[dict], **how) -> Export:
    export = Export("2023.4.4", **({"lazy": False} | how))
    for table, rows in ((GPU_FAULTS, gpu), (CPU_FAULTS, cpu), (MEMCPY, moved)):
        export.add(table, *rows) if (rows := list(rows)) else None
    return export


def _both_ways() -> list[dict]:
    return [migration(0, 10, _MB), migration(20, 30, _MB, kind=DTOH)]


def cases() -> list[Case]:
    """Give all cases."""
    inside = [gpu_fault(i, i + 1, VA + _PAGE * (i + 1)) for i in range(5)]
    two = [gpu_fault(0, 9, n=3), gpu_fault(10, 19, n=4, pid=4343, device=1)]
    steps = [cpu_fault(i * _SECOND // 39, VA + _PAGE * i) for i in range(200)]
    at_second = [migration(_SECOND + 1, _SECOND + 9, _MB)]
    no_cpu = {"lazy": True, "options": {"COLLECT_UVM_CPU_PAGE_FAULTS": "false"}}
    one_fault, one_cpu = [gpu_fault(0, 9)], [cpu_fault(1)]
    return [
        Case(
            "throughput", "100 GB moved in 2.5 s at one address", "places",
            f"SELECT sum(bytes) * 1000.0 / sum(end - start) FROM {MEMCPY}", "{0:,.0f} MB/s",
            _export(one_fault, one_cpu, [migration(0, _SECOND * 5 // 2, 100_000 * _MB)]),
            _their_speed, _our_speed,
        ),
        Case(
            "which rows are shown", "the model sample `oversubscribed_sweep`", "places",
            f"SELECT sum(n), total FROM (SELECT sum(numberOfPageFaults) AS n, (SELECT "
            f"sum(numberOfPageFaults) FROM {GPU_FAULTS}) AS total FROM {GPU_FAULTS} "
            "GROUP BY address ORDER BY 1 DESC LIMIT 10)",
            "the ten addresses with most hold {0:,} of {1:,} page faults",
            files.SAMPLES / "model/oversubscribed_sweep/oversubscribed_sweep.sqlite",
            _their_ten, _our_ten, our_arguments=("faults", "--by", "va-block"),
        ),
        Case(
            "a table is absent", "GPU page faults, 2 MiB moved; CPU page faults not recorded",
            "totals",
            f"SELECT sum(numberOfPageFaults), (SELECT sum(bytes) FROM {MEMCPY}) FROM {GPU_FAULTS}",
            "{0} page faults, {1:,} bytes; CPU faults not known",
            _export([gpu_fault(0, 9, n=5)], [], [migration(0, 9, 2 * MIB)], **no_cpu),
            _their_totals, _our_totals,
        ),
        Case(
            "lowest address", "one copy to the GPU, none back", "totals",
            f"SELECT min(virtualAddress) FROM {MEMCPY}", "{0:#x}",
            _export(one_fault, one_cpu, [migration(0, 9, _MB)]),
            _their_lowest, lambda said: _address(nsan_way.totals(said)),
        ),
        Case(
            "device to device", "1 MB each way, and 7 MB from GPU to GPU", "totals",
            f"SELECT sum(bytes) FROM {MEMCPY}", "{0:,} bytes",
            _export(one_fault, one_cpu, [*_both_ways(), migration(40, 50, 7 * _MB, kind=DTOD)]),
            lambda text: _bytes(vendor.totals(text)), lambda said: _bytes(nsan_way.totals(said)),
        ),
        Case(
            "two processes on two GPUs", "page faults of both at the same address", "places",
            "SELECT min(n), max(n) FROM (SELECT sum(numberOfPageFaults) AS n "
            f"FROM {GPU_FAULTS} GROUP BY globalPid, deviceId)", "{0} and {1}",
            _export(two, one_cpu, _both_ways()), _their_counts, _our_counts,
        ),
        Case(
            "faults inside what was moved", "one copy of 2 MiB, page faults inside it", "places",
            f"SELECT count(*), count(DISTINCT address / {2 * MIB}) FROM {GPU_FAULTS}",
            "{0} page faults in {1} VA block",
            _export(inside, one_cpu, [migration(0, 9, 2 * MIB)]), _their_rows, _our_rows,
            our_arguments=("faults", "--by", "va-block"),
        ),
        Case(
            "a filter by time", "200 CPU page faults, some of them in the window", "totals",
            f"SELECT count(*) FROM {CPU_FAULTS} WHERE start >= {_SECOND} AND start < {2 * _SECOND}",
            "{0} CPU page faults",
            _export([gpu_fault(_SECOND + 1, _SECOND + 9)], steps, at_second), _their_cpu, _our_cpu,
            (f"start={_SECOND}", f"end={2 * _SECOND}"), ("summary", "--filter-time", "1s/2s"),
        ),
    ]  # fmt: skip


# --- How answers are read -------------------------------------------------------------------------


def _their_speed(text):
    (row,) = vendor.by_address(text).values()
    return f"{row['bytes_per_s'] / 1e6:,.0f} MB/s"


def _our_speed(said):
    (group,) = said["migrations"]["groups"]
    return f"{group['bytes_per_s'] / 1e6:,.0f} MB/s"


def _their_ten(text):
    rows = vendor.by_address(text).values()
    return f"its {len(rows)} rows hold {sum(row['n_page_faults'] or 0 for row in rows):,}"


def _our_ten(said):
    held = sum(row["n_page_faults"] for row in said["rows"][:10])
    return f"its first ten VA blocks hold {held:,}"


def _their_totals(text):
    figures = vendor.totals(text)["totals"]["all"]
    return f"{figures['n_page_faults']} page faults, {figures['htod_bytes']:,} bytes"


def _our_totals(said):
    figures = nsan_way.totals(said)["totals"]["all"]
    cpu = figures["n_cpu_faults"]
    known = f"{figures['n_page_faults']} page faults, {figures['htod_bytes']:,} bytes"
    return f"{known}; CPU faults {'not known' if cpu is None else cpu}"


def _address(answer):
    lowest = answer["totals"]["all"]["min_va"]
    return "empty" if lowest is None else f"{lowest:#x}"


def _their_lowest(text):
    return _address(vendor.totals(text))


def _bytes(answer):
    figures = answer["totals"]["all"]
    return f"{sum(figures.get(f'{d}_bytes', 0) for d in ('htod', 'dtoh', 'dtod')):,} bytes"


def _our_counts(said):
    counts = sorted(group["n_page_faults"] for group in said["gpu_faults"]["groups"])
    return " and ".join(map(str, counts))


def _their_counts(text):
    counts = [row["n_page_faults"] for row in vendor.by_address(text).values()]
    return f"{', '.join(str(n) for n in counts if n)} in one row" if counts else "no row"


def _their_rows(text):
    return f"{len(vendor.by_address(text))} rows by address, none of which holds both"


def _our_rows(said):
    (row,) = said["rows"]
    return f"{row['n_page_faults']} page faults in 1 VA block"


def _their_cpu(text):
    return f"{vendor.totals(text)['totals']['all']['n_cpu_faults']} CPU page faults"


def _our_cpu(said):
    return f"{said['cpu_faults']['n']} CPU page faults"


# --- Asking ---------------------------------------------------------------------------------------


def ask(folder: Path, found: Iterable[vendor.Installation], env: dict[str, str]) -> list[Shown]:
    """Ask every installation and nsan about each case."""
    shown = []
    for i, case in enumerate(cases()):
        file = case.export
        if isinstance(file, Export):
            file = file.write(folder / f"case_{i}.sqlite")
        theirs = {one.version: _theirs(case, one, file, env) for one in found}
        words = case.our_arguments or ("summary",)
        taken = run([*nsan_way.NSAN, *words, "-q", "--json", str(file)], env)
        with closing(connect(file)) as connection:
            truth = case.form.format(*connection.execute(case.sql).fetchone())
        shown.append(Shown(case, truth, theirs, case.ours(json.loads(taken.output))))
    return shown


def _theirs(case: Case, one: vendor.Installation, file: Path, env: dict[str, str]) -> str:
    script = one.script(case.question)
    if script is None:
        return "has no such report"
    command = vendor.script_command(script, str(file), *case.their_arguments)
    taken = run(command, env | {"PYTHONPATH": str(one.library)})
    if vendor.table(taken.output) is None:
        unknown = case.their_arguments and "unrecognized" in taken.messages
        return "has no such filter" if unknown else f"{NOTHING}, exit status {taken.status}"
    return case.theirs(taken.output)
