"""Where a program is from: a name and sizes that make it again, or its own words written down.

``model.json`` says by name how a program is made, where it has one: that is short, whatever the program does.
Any other program goes word by word into ``program.json`` beside it (at most some megabytes: GPT-2 small without
a cache has 5 625 operations, 1.3 MB as Python writes them).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, get_args

from nsan.model import access
from nsan.model import program as words
from nsan.model.hints import parse_hint
from nsan.model.placing import Placed
from nsan.model.program import Program
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.workloads import network, workload
from nsan.model.workloads.training import TrainingRun, trained

_WORDS: Final[dict[str, Any]] = {
    each.__name__: each
    for each in (
        *get_args(words.Operation),
        words.Kernel,
        access.Stream,
        access.Strided,
        access.Random,
        access.Zipf,
        access.Stencil,
        access.Matrix,
        access.Chase,
        access.Broadcast,
    )
}
"""What a program may be made of."""

MOST_OPERATIONS: Final = 1_000_000
"""Of a program that is written word by word: more would be read for minutes, and modelled for hours."""


@dataclass(frozen=True)
class Built:
    """A small program by name.

    Attributes
    ----------
    workload : str
        A name of :data:`nsan.model.workloads.WORKLOADS`.
    size : Size
        What it was asked to do.
    """

    workload: str
    size: Size

    def made(self, _settings: Settings) -> tuple[Program, Placed | None]:
        """Make the program again."""
        return workload(self.workload).build(self.size), None

    def document(self) -> dict[str, Any]:
        """Write it down for ``model.json``."""
        return {"workload": self.workload, "size": asdict(self.size)}


@dataclass(frozen=True)
class Trained:
    """Training steps of a network by name.

    Attributes
    ----------
    network : str
        A name of :data:`nsan.model.workloads.NETWORKS`.
    training : TrainingRun
        How it is trained, its allocator and hints included.
    """

    network: str
    training: TrainingRun

    def made(self, settings: Settings) -> tuple[Program, Placed | None]:
        """Make the program again."""
        placed = trained(network(self.network), self.training, settings.gpu_profile)
        return placed.program, placed

    def document(self) -> dict[str, Any]:
        """Write it down for ``model.json``."""
        hints = [str(hint) for hint in self.training.hints]
        return {"network": self.network, "training": {**asdict(self.training), "hints": hints}}


Origin = Built | Trained
"""Programs that a name makes again."""


def origin_of(document: Mapping[str, Any]) -> Origin:
    """Read what :meth:`Built.document` or :meth:`Trained.document` wrote.

    Parameters
    ----------
    document : mapping
        As in ``model.json``.

    Returns
    -------
    Built or Trained
        How the program is made; whether there is such a workload is seen when it is made.

    Raises
    ------
    KeyError, TypeError, ValueError
        If it is none of both.
    """
    if "workload" in document:
        return Built(document["workload"], _read(Size, document["size"]))
    written = dict(document["training"])
    hints = tuple(hint for hint in map(parse_hint, written.pop("hints")) if hint is not None)
    return Trained(document["network"], _read(TrainingRun, {**written, "hints": hints}))


def program_text(program: Program) -> str | None:
    """Write a program down word by word.

    Parameters
    ----------
    program : Program
        Any program; an operation that comes again is written once.

    Returns
    -------
    str or None
        JSON; None if it has a word of somebody's own, which nobody else could read, or more than
        ``MOST_OPERATIONS``.
    """
    if len(program.operations) > MOST_OPERATIONS:
        return None
    # 1 and 1.0 are equal, but not the same recipe: operations are told apart as they are written.
    written = [repr(each) for each in program.operations]
    first = dict(zip(reversed(written), reversed(program.operations), strict=True))
    numbers = {each: i for i, each in enumerate(dict.fromkeys(written))}
    try:
        operations = [_plain(first[each]) for each in numbers]
    except KeyError:
        return None
    document = {
        "name": program.name,
        "descending": program.descending,
        "operations": operations,
        "order": [numbers[each] for each in written],
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def program_of(text: str) -> Program:
    """Read what :func:`program_text` wrote.

    Parameters
    ----------
    text : str
        JSON.

    Returns
    -------
    Program
        The same program.

    Raises
    ------
    KeyError, IndexError, TypeError, ValueError
        If the text is something else.
    """
    document = json.loads(text)
    known = [_word(each) for each in document["operations"]]
    if len(document["order"]) > MOST_OPERATIONS:
        msg = f"more than {MOST_OPERATIONS} operations"
        raise ValueError(msg)
    operations = tuple(known[i] for i in document["order"])
    return Program(document["name"], operations, bool(document["descending"]))


def _plain(value: Any) -> Any:
    """Write a word as its name and what is not by default; what stands in it likewise."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = type(value).__name__
    known = _WORDS[name]
    if known is not type(value):
        raise KeyError(name)
    own = {each.name: (getattr(value, each.name), each.default) for each in fields(known)}
    told = {k: each for k, (each, default) in own.items() if repr(each) != repr(default)}
    return {"do": name, **{key: _plain(each) for key, each in told.items()}}


def _word(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_word, value))
    if not isinstance(value, dict):
        return value
    own = {key: _word(each) for key, each in value.items() if key != "do"}
    return _read(_WORDS[value["do"]], own)


_JSON_TYPES: Final[dict[str, Any]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
}


def _read(kind: Any, given: Mapping[str, Any]) -> Any:
    """Make a word; refuse a number where a name has to be, and the like."""
    for each in fields(kind):
        wanted = _JSON_TYPES.get(str(each.type).removesuffix(" | None"))
        value = given.get(each.name)
        fits = value is None or wanted is None or isinstance(value, wanted)
        if not fits or (isinstance(value, bool) and wanted is not bool):
            msg = f"{each.name} of {kind.__name__} is {value!r}"
            raise TypeError(msg)
    return kind(**given)
