"""What advice would gain: the driver model runs the program again, without and with what is advised.

That needs to know the program: of traces that ``nsan model`` made it does, of no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final

from nsan.analysis.advisor.advice import Advice, Change, ChangeKind, Gain, Target
from nsan.info import MODEL_KIND

if TYPE_CHECKING:
    from nsan.asking import Asked
    from nsan.model.making import Recipe
    from nsan.model.parts import Spot

RUNS: Final = 3
"""Of each program, each with other random numbers."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Tried:
    """What the driver model says of one advice.

    Attributes
    ----------
    gain : Gain, optional
        Modelled: what it saved there, less than 0 if it cost time.
    reason : str
        Why there is none, in a sentence; "" beside a gain.
    """

    gain: Gain | None = None
    reason: str = ""


@dataclass(frozen=True)
class WhatIf:
    """What the driver model says of advice.

    Attributes
    ----------
    tried : tuple of Tried
        One for each advice, in their order; empty if none could be.
    reason : str
        Why none could be tried, in a sentence; "" where some could.
    seeds : tuple of int
        Of the runs.
    errors : tuple of str
        How far the model itself may be off from real machines, as its profiles state it: GPU, then host.
    """

    tried: tuple[Tried, ...] = ()
    reason: str = ""
    seeds: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()


def what_if(
    asked: Asked,
    advice: Sequence[Advice],
    *,
    n_runs: int = RUNS,
    progress: Progress | None = None,
) -> WhatIf:
    """Try advice in the driver model.

    Parameters
    ----------
    asked : Asked
        The trace.
    advice : sequence of Advice
        What the rules say of it.
    n_runs : int, default 3
        Of each program, at least 2: how they differ is the error of a gain, and more of them make it smaller.
    progress : callable, optional
        Called with the runs done and the runs in all.

    Returns
    -------
    WhatIf
        A gain for each advice, or why there is none.

    Raises
    ------
    ExtraMissingError
        If the model made the trace, and numba is not installed.
    """
    if reason := _no_program(asked):
        return WhatIf(reason=reason)
    from nsan.model import check_installed

    check_installed()
    from nsan.model.remaking import RecipeUnknownError

    try:
        recipe = _recipe(asked)
    except RecipeUnknownError as error:
        return WhatIf(reason=f"How the trace was made is not known. {error.reason}")
    changed = [_changed(recipe, each.changes) for each in advice]
    seeds = tuple(recipe.settings.seed + i for i in range(max(n_runs, 2)))
    runs = _Runs(seeds, progress or (lambda _done, _all: None))
    if made := [each for each in changed if not isinstance(each, str)]:
        runs.announce([recipe, *made])
    return WhatIf(
        tuple(
            _tried(runs, recipe, each, _words(own.changes))
            for own, each in zip(advice, changed, strict=True)
        ),
        seeds=seeds,
        errors=_errors(recipe),
    )


def _no_program(asked: Asked) -> str:
    """Say why the program of a trace cannot be known; "" if it may be."""
    if asked.summary["source_kind"] != MODEL_KIND:
        return (
            "This trace was recorded: which program ran, the driver model does not know. It tries advice on "
            "traces that `nsan model` made."
        )
    if asked.is_part:
        return "The driver model runs whole programs: leave the filters out."
    return ""


def _recipe(asked: Asked) -> Recipe:
    """Read how the trace was made; refuse what is of another trace."""
    from nsan.model.making import ABOUT
    from nsan.model.remaking import RecipeUnknownError, about_of, recipe_of

    found = recipe_of(asked.path)
    rows: Any = about_of(asked.path).get("rows")
    rows = rows if isinstance(rows, Mapping) else {}
    summary = asked.summary
    counts = {
        "kernels": summary["kernels"]["n"],
        "migrations": summary["migrations"]["n"],
        "gpu_faults": summary["gpu_faults"]["n_rows"],
    }
    if any(n is not None and n != rows.get(table, 0) for table, n in counts.items()):
        raise RecipeUnknownError(f"{ABOUT} beside it is of another trace.")
    return found


def _errors(recipe: Recipe) -> tuple[str, ...]:
    gpu, host = recipe.settings.gpu_profile, recipe.settings.host_profile
    return f"{gpu.name}: {gpu.error}", f"{host.name}: {host.error}"


# Changes ------------------------------------------------------------------------------------------


def _changed(recipe: Recipe, changes: Sequence[Change]) -> Recipe | str:
    """Make all changes of an advice to a program, or say why one cannot be made."""
    from nsan.errors import NsanError

    if not changes:
        return "It is no change of the program that the driver model can run."
    try:
        for change in changes:
            recipe = _one_changed(recipe, change)
    except NsanError as error:
        return str(error)
    return recipe


def _one_changed(recipe: Recipe, change: Change) -> Recipe:
    from nsan.model import changes as model

    if change.kind == "fit":
        return model.fitting(recipe)
    if change.kind == "allocator":
        return model.allocating(recipe, change.advice)
    if change.kind == "prefetcher_off":
        return model.without_prefetcher(recipe)
    spot, program, device = _spot(change), recipe.program, change.device
    if change.kind == "prefetch":
        changed = model.with_prefetches(program, spot, device)
    elif change.kind == "no_prefetch":
        changed = model.without_prefetches(program, spot, device)
    elif change.kind == "advise":
        changed = model.with_advice(program, spot, change.advice, device)
    else:
        changed = model.with_first_touch(program, spot, device)
    return replace(recipe, program=changed, placed=None, origin=None)


_WORDS: Final[dict[ChangeKind, str]] = {
    "prefetch": "the prefetch before each launch",
    "no_prefetch": "the prefetches left out",
    "advise": "the advice before the first launch",
    "first_touch": "the GPU filling the memory, prefetched, in place of the host",
    "fit": "GPU memory for all of it",
    "allocator": "{advice} as allocator",
    "prefetcher_off": "the driver's prefetcher off",
}
"""What was tried: where a call stands, and what fits, is a choice of the model's."""


def _words(changes: Sequence[Change]) -> str:
    """Say what was tried."""
    said = (_WORDS[each.kind].format(advice=f"{each.advice!r}") for each in changes)
    return " and ".join(dict.fromkeys(said))


def _spot(change: Change) -> Spot:
    """Name what a change is about as the model takes it: a part of an allocation by its address."""
    from nsan.model.parts import Spot

    target: Target = change.target
    number = None if target.is_guessed else target.allocation_id
    if target.va is None:
        return Spot(number, kernel=target.kernel)
    size = target.bytes
    if change.n_bytes is not None:
        size = change.n_bytes
    elif size is not None:
        size -= change.offset_bytes
    return Spot(number, target.va + change.offset_bytes, size, target.kernel)


# Runs ---------------------------------------------------------------------------------------------


@dataclass
class _Runs:
    """Times of programs under each seed; a program that comes again is not run again."""

    seeds: tuple[int, ...]
    tell: Progress
    _ends: dict[str, list[int]] = field(default_factory=dict)
    _done: int = 0
    _all: int = 0

    def announce(self, recipes: Sequence[Recipe]) -> None:
        """Say how many runs there will be."""
        self._all = len({each.digest() for each in recipes}) * len(self.seeds)
        self.tell(0, self._all)

    def ends_ns(self, recipe: Recipe) -> list[int]:
        """Give the time of the program under each seed."""
        key = recipe.digest()
        if key not in self._ends:
            self._ends[key] = list(self._run(recipe))
        return self._ends[key]

    def _run(self, recipe: Recipe) -> Iterator[int]:
        from nsan.model.machine import run

        for seed in self.seeds:
            yield run(recipe.program, replace(recipe.settings, seed=seed)).end_ns
            self._done += 1
            self.tell(self._done, self._all)


def _tried(runs: _Runs, recipe: Recipe, changed: Recipe | str, words: str) -> Tried:
    from nsan.errors import ProgramError

    if isinstance(changed, str):
        return Tried(reason=changed)
    try:
        before, after = runs.ends_ns(recipe), runs.ends_ns(changed)
    except ProgramError as error:
        return Tried(reason=f"The driver model cannot run the changed program: {error}")
    n_added = max(len(changed.program.operations) - len(recipe.program.operations), 0)
    saved = [a - b for a, b in zip(before, after, strict=True)]
    how = f"mean of {len(saved)} runs of the driver model with {words}"
    return Tried(Gain(round(fmean(saved)), "modelled", how, _error_ns(saved, n_added)))


_CALL_NS: Final = 4_000
"""What a call more or less takes the modelled host: where exactly it stands is a choice."""

_LEAST_NS: Final = 1_000
"""An error is not stated finer: a few runs may agree to the ns by chance, and one more still differs."""


def _error_ns(saved_ns: Sequence[int], n_added: int) -> int:
    """Say between which limits one more run would lie, 19 times of 20: by what is random, and by added calls."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    n = len(saved_ns)
    factor = float(stdtrit(n - 1, 0.975)) * math.sqrt(1 + 1 / n)
    return max(math.ceil(factor * stdev(saved_ns) + n_added * _CALL_NS), _LEAST_NS)
