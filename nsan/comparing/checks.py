"""What is looked at before conditions are compared: their recordings, machines, switches and programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nsan.comparing.findings import Finding, Side
from nsan.comparing.programs import in_common, launch_shares, with_old_names
from nsan.health import NVPROF_KINDS
from nsan.info import MODEL_KIND, MODELLED
from nsan.tabular.notes import few, table_word
from nsan.text import shortened
from nsan.units import format_time

if TYPE_CHECKING:
    from nsan.comparing.findings import Bars, Level
    from nsan.comparing.profile import Profile

_TRACED: Final = ("gpu_faults", "cpu_faults")
"""What slows a program while it is recorded, by up to 70 %."""

_HARDLY: Final = 0.1
_HALF: Final = 0.5
"""Shares: of launches that two programs have in common, of work that is in steps."""

_MUCH_LOST: Final = 0.02
_INTERPRETERS: Final = re.compile(
    r"(?i)^(python|ipython|julia|java|node|perl|ruby|matlab|r$|main$|a\.out$)"
)
"""Names of processes that say nothing of the program."""


# One condition --------------------------------------------------------------------------------------


def of_one(side: Side) -> Iterator[Finding]:
    """Look at the recordings of a condition, whether there is anything, and all of it; and of one program."""
    yield from _repetitions(side)
    about = (side.label,)
    for run in side.runs:
        who = _named(side.label, [run])
        health = {check["id"]: check for check in run.summary["health"]}
        if "gpu_activity" in health:
            yield Finding(
                "empty", "refuse", about, f"{who}: {health['gpu_activity']['text']}", "all"
            )
        elif not run.has_um_data:
            said = (
                f"{who} holds no Unified Memory data: no migration, no page fault, no managed allocation. "
                "Record it with `nsan record`; or, if that is the change, compare with --anyway."
            )
            yield Finding("no_um_data", "refuse", about, said)
        elif run.is_empty:
            said = f"{who}: the part that was asked for has nothing of Unified Memory."
            yield Finding("empty_part", "warn", about, said)
        if run.lost_fraction:
            much = run.lost_fraction >= _MUCH_LOST
            said = (
                f"{who} has lost rows, about {run.lost_fraction:.1%} of what moved: its totals are too low. "
                "Record it again, with fewer switches or a shorter run (`nsan faults --by lost` says where)."
            )
            level: Level = "refuse" if much else "warn"
            yield Finding("lost_rows", level, about, said, "rows" if much else "none")
        if health.get("times", {"status": "ok"})["status"] != "ok":
            said = f"{who}: its times are too coarse to be compared, as nvprof printed them with few digits."
            yield Finding("coarse_times", "warn", about, said, "times")
        if run.is_timed:
            said = (
                "A window of time is on the clock of each run: other runs may do something else in it. "
                "An NVTX range (--filter-nvtx) is the same part of each."
            )
            yield Finding("window", "warn", (), said)


# Two conditions -------------------------------------------------------------------------------------


class _Setting(NamedTuple):
    """Something that must, or should, be equal in all runs."""

    id: str
    level: Level
    what: str
    value_of: Callable[[Profile], str]
    bars: Bars = "none"
    advice: str = ""
    implied_by: frozenset[str] = frozenset()


def _gpus(run: Profile) -> str:
    """Name the GPUs, each once; "" where they are not known."""
    names = _of_gpus(run, "name")
    counts = {name: names.count(name) for name in sorted(names)}
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


def _capabilities(run: Profile) -> str:
    return ", ".join(sorted(_of_gpus(run, "compute_capability")))


def _of_gpus(run: Profile, key: str) -> list[str]:
    """List what is known of each GPU of the machine; nothing where it is not known of one."""
    known: dict[Any, str | None] = {}
    for device in run.summary["devices"]:
        number = device["gpu_id"] if device["gpu_id"] is not None else device["device_id"]
        known[number] = device[key]
    found = [value for value in known.values() if value is not None]
    return [shortened(value, 40) for value in found] if len(found) == len(known) else []


def _profiler(run: Profile) -> str:
    kind = run.summary["source_kind"]
    if kind == MODEL_KIND:
        return MODELLED
    return "recorded by nvprof" if kind in NVPROF_KINDS else "recorded by nsys"


def _is_modelled(run: Profile) -> str:
    return "modelled" if run.summary["source_kind"] == MODEL_KIND else "recorded"


_SETTINGS: Final = (
    _Setting(
        "model",
        "refuse",
        "come from the model and from a machine",
        _is_modelled,
        "all",
        "The difference would be that of both. Compare modelled with modelled runs.",
    ),
    _Setting(
        "gpu",
        "refuse",
        "ran on different GPUs",
        _gpus,
        "machine",
        "What faults, what moves and how long it takes depends on the GPU and its memory.",
    ),
    _Setting(
        "compute_capability",
        "refuse",
        "ran on GPUs of different compute capability",
        _capabilities,
        "machine",
        implied_by=frozenset({"gpu"}),
    ),
    _Setting(
        "platform",
        "refuse",
        "ran on different platforms",
        lambda run: run.platform or "plain Linux",
        "machine",
        "There memory moves by other rules.",
    ),
    _Setting(
        "profiler",
        "refuse",
        "were recorded by different profilers",
        _profiler,
        "times",
        "They slow a program differently.",
        frozenset({"model"}),
    ),
    *(
        _Setting(name, "warn", f"differ in {what}", lambda run, key=key: run.summary[key] or "")  # type: ignore[misc]
        for name, what, key in (
            ("driver", "the driver", "driver_version"),
            ("cpu", "the CPU", "cpu"),
            ("profiler_version", "the version of the profiler", "nsys_version"),
        )
    ),
    _Setting(
        "processes",
        "warn",
        "have different numbers of processes",
        lambda run: str(len(run.summary["processes"])),
    ),
)


def _settings(base: Side, other: Side) -> Iterator[Finding]:
    """Look for settings that are not the same in all runs of both."""
    both, told = (base.label, other.label), set[str]()
    for each in _SETTINGS:
        values = [_distinct(map(each.value_of, side.runs)) for side in (base, other)]
        known = set(values[0] + values[1]) - {""}
        if each.id == "gpu" and len(known) == 1 and "" in values[0] + values[1]:
            yield _unknown_gpu(base, other)
        if len(known) < 2:
            continue
        if each.implied_by & told:
            continue
        told.add(each.id)
        said = "; ".join(
            f"{side.label}: {' or '.join(shortened(v or 'unknown', 120) for v in found)}"
            for side, found in zip((base, other), values, strict=True)
        )
        text = f"{' and '.join(both)} {each.what}. {said}. {each.advice}".rstrip()
        yield Finding(each.id, each.level, both, text, each.bars)


def _unknown_gpu(base: Side, other: Side) -> Finding:
    """Say of which conditions the GPU is not known, where it is of the rest."""
    both = (base.label, other.label)
    which = [side.label for side in (base, other) if "" in map(_gpus, side.runs)]
    text = f"The GPU of {' and '.join(which)} is not known: whether all ran on the same one cannot be told."
    return Finding("gpu_unknown", "warn", both, text)


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _switches(base: Side, other: Side) -> Iterator[Finding]:
    """Look for kinds of events that were recorded in some runs only."""
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for kind in base.runs[0].summary["capture"]:
        answers = tuple(
            tuple(_distinct(run.summary["capture"][kind] for run in side.runs))
            for side in (base, other)
        )
        if len(set(answers[0] + answers[1])) > 1:
            slows = kind in _TRACED and "recorded" in answers[0] + answers[1]
            alike.setdefault((*answers, ("slows",) * slows), []).append(kind)
    for (first, second, slow), kinds in alike.items():
        both = (base.label, other.label)
        said = "; ".join(
            f"{label}: {' or '.join(map(_answer, found))}"
            for label, found in zip(both, (first, second), strict=True)
        )
        names = " and ".join(map(table_word, kinds))
        text = f"{names} were not recorded alike. {said}."
        if slow:
            text += " Tracing page faults slows a program by up to 70 %, so times do not compare."
        text += _with_switches([*base.runs, *other.runs], kinds)
        surely = bool(slow) and "not_recorded" in first + second
        level, bars = ("refuse" if surely else "warn"), ("times" if slow else "none")
        yield Finding("switches", level, both, text, bars)  # type: ignore[arg-type]


def _with_switches(runs: Iterable[Profile], kinds: Iterable[str]) -> str:
    """Say with which switches all runs would be recorded alike."""
    known = [run.summary["switches"] for run in runs]
    switches = [next((each[kind] for each in known if each[kind]), "") for kind in kinds]
    told = " ".join(dict.fromkeys(filter(None, switches)))
    return f" Record all with the same switches (`nsys profile {told} ...`)." if told else ""


def _answer(answer: str) -> str:
    return {"not_recorded": "not recorded", "unknown": "it cannot be told"}.get(answer, answer)


def _same_file(base: Side, other: Side) -> Iterator[Finding]:
    """Say where a file stands on both sides."""
    known = {run.place for run in base.runs if run.place}
    if twice := [run.name for run in other.runs if run.place in known]:
        both = (base.label, other.label)
        text = f"{' and '.join(both)} share runs: {few(shortened(name) for name in twice)}."
        yield Finding("same_run", "warn", both, text)


def steps_without_work(sides: Sequence[Side]) -> Iterator[Finding]:
    """Look for steps outside of which most of the work is: their time says little of the program.

    Parameters
    ----------
    sides : sequence of Side
        The conditions, measured.

    Yields
    ------
    Finding
        For each condition of which a run is so.
    """
    for side in sides:
        for run in side.runs:
            busy = run.summary["kernels"]["busy_ns"]
            if run.steps_ns is None or not busy or run.steps_ns >= _HALF * busy:
                continue
            text = (
                f"{_named(side.label, [run])}: its steps last {format_time(run.steps_ns)} in all, its kernels "
                f"{format_time(busy)}. Most work is outside of the steps, as where their range only encloses "
                "launches: compare duration_ns, or end the range after a synchronisation."
            )
            yield Finding("steps", "warn", (side.label,), text)
            break


# Programs -------------------------------------------------------------------------------------------


def _programs(base: Side, other: Side) -> Iterator[Finding]:
    """Look whether both run the same program."""
    yield from _one_program((base.label, other.label), base, other)


def _repetitions(side: Side) -> Iterator[Finding]:
    """Look whether all runs of a condition are of one program: each against the first."""
    first, *rest = side.runs
    pairs = [
        (
            Side(f"{side.label} ({shortened(first.name, 60)})", [first]),
            Side(f"{side.label} ({shortened(run.name, 60)})", [run]),
        )
        for run in rest
    ]
    found = [each for pair in pairs for each in _one_program((side.label,), *pair)]
    # One of them says enough.
    yield from sorted(found, key=lambda each: each.level != "refuse")[:1]


def _one_program(about: tuple[str, ...], base: Side, other: Side) -> Iterator[Finding]:
    """Look for two programs: by the names of processes, and what kernels they have in common."""
    both, sides = (base.label, other.label), (base, other)
    names = [_distinct(name for run in side.runs for name in _processes(run)) for side in sides]
    known = all(names)
    same_name = known and bool(set(names[0]) & set(names[1]))
    telling = same_name and not all(map(_INTERPRETERS.search, set(names[0]) & set(names[1])))
    kernels = [launch_shares(run.kernels for run in side.runs) for side in sides]
    common = in_common(*kernels) if all(kernels) else None
    said = [] if same_name or not known else [_listed("Processes", both, names)]
    if common is not None and common < _HALF:
        only = [
            [name for name in mine if name not in yours] for mine, yours in (kernels, kernels[::-1])
        ]
        said.append(_listed("Kernels of one only", both, only))
    if not said:
        return
    hardly = (
        common is not None
        and not telling
        and in_common(kernels[0], with_old_names(*kernels)) < _HARDLY
    )
    if hardly:
        text = f"{' and '.join(both)} run different programs: hardly a kernel is in both. {' '.join(said)}"
        yield Finding("program", "refuse", about, text, "all")
        return
    text = f"{' and '.join(both)} may be different programs. {' '.join(said)}"
    yield Finding("program_names", "warn", about, text)


def _processes(run: Profile) -> list[str]:
    return [process["name"] for process in run.summary["processes"] if process["name"]]


def _listed(what: str, labels: Sequence[str], names: Sequence[Sequence[str]]) -> str:
    parts = [
        f"{label} {few((shortened(name, 50) for name in found), 3) if found else 'none'}"
        for label, found in zip(labels, names, strict=True)
    ]
    return f"{what}: {'; '.join(parts)}."


def _named(label: str, runs: Sequence[Profile]) -> str:
    return f"{label} ({', '.join(shortened(run.name, 60) for run in runs)})"


def of_two(base: Side, other: Side) -> Iterator[Finding]:
    """Look whether two conditions differ in what should be equal.

    Parameters
    ----------
    base, other : Side
        The conditions.

    Yields
    ------
    Finding
        What was recorded, and where; which program.
    """
    for check in (_settings, _switches, _programs, _same_file):
        yield from check(base, other)
