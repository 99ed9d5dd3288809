"""An input, and what every kind of trace does with one."""

from __future__ import annotations

import json
import random as randoms
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuzz.asking import WrongError, ask, check_cache

_COMMANDS = (
    ("info",),
    ("migrations",),
    ("migrations", "--by", "size"),
    ("migrations", "--by", "refault-total"),
    ("faults",),
    ("faults", "--by", "latency"),
    ("clusters",),
    ("attribute",),
    ("attribute", "--by", "allocation"),
    ("attribute", "--by", "nvtx"),
    ("advise",),
    ("summary", "--format", "markdown"),
    ("summary", "--filter-time", "0/1ms"),
)
_REPORT_EVERY = 25


@dataclass(frozen=True)
class Made:
    """An input on disk.

    Attributes
    ----------
    path : Path
        What is given to nsan; all of the input lies in its folder.
    what : str
        How it was made.
    """

    path: Path
    what: str


def summarised(made, stores):
    """Ask for the summary as JSON and as text; return the document and the manifest, or None where it was refused."""
    answer = ask("summary", made.path, "--json")
    check_cache(stores, refused=answer.is_refusal)
    if answer.is_refusal:
        return None
    document = json.loads(answer.out)
    (manifest,) = stores.glob("stores/*/manifest.json")
    return document, json.loads(manifest.read_text(encoding="utf-8"))


def shown(made):
    """Ask for the summary for people: what could be read can be shown."""
    if ask("summary", made.path).is_refusal:
        raise WrongError("the summary is refused as text, and not as JSON")


@cache
def analyses():
    """Names of all analyses of a trace."""
    from nsan.analysis.catalog import catalog

    return tuple(sorted(name for name, found in catalog().items() if found.subject == "trace"))


def look_closer_at_trace(made, stores, turn):
    """Run some commands and analyses on a trace that could be read; of a few, write a report."""
    random = randoms.Random(turn)
    if turn % _REPORT_EVERY == 0:
        ask("report", made.path, "-o", stores / "report.html", "-q")
        return
    command = random.choice(_COMMANDS)
    ask(*command[:1], made.path, *command[1:])
    for name in random.sample(analyses(), 2):
        ask("analyse", name, made.path)
