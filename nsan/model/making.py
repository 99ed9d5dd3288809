"""Make a trace with known truth: run a workload, write the export, and the truth beside it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import polars as pl

import nsan
from nsan.errors import OutputExistsError, OutputWriteError, PlaceTakenError, ProgramError
from nsan.io.tidy import scratch_beside, undisturbed
from nsan.io.torch_snapshot import write_snapshot
from nsan.model.allocator_history import snapshot_frames
from nsan.model.figures import figures
from nsan.model.machine import Progress, run
from nsan.model.nsys_export import DEFAULT_OPTIONS, ExportOptions, Machine, write_export
from nsan.model.origin import Origin, program_text
from nsan.model.placing import Placed
from nsan.model.program import Allocate, Program
from nsan.model.recording import PLAIN, Style, record
from nsan.model.settings import DEFAULT_SETTINGS, Settings
from nsan.model.tensor_truth import dead_bytes
from nsan.model.truth import TRUTH_ROWS, truth
from nsan.uvm.constants import VA_BLOCK_BYTES

TRUTH: Final = "truth"
SNAPSHOT: Final = "snapshot.pickle"
ABOUT: Final = "model.json"
PROGRAM: Final = "program.json"
"""The program, word by word, where no name makes it again."""


@dataclass(frozen=True)
class Recipe:
    """All that decides a trace.

    Attributes
    ----------
    program : Program
        What runs.
    settings : Settings
        On which machine.
    style : Style
        How the profiler writes its rows.
    options : ExportOptions
        Schema, switches and order of the export.
    placed : Placed, optional
        Where the program is a tensor program under an allocator: gives the run a memory snapshot.
    origin : Built or Trained, optional
        The name that makes the program again: ``model.json`` says it, so that changes can be tried later.
        Without one the program is written beside it.
    """

    program: Program
    settings: Settings = DEFAULT_SETTINGS
    style: Style = PLAIN
    options: ExportOptions = DEFAULT_OPTIONS
    placed: Placed | None = None
    origin: Origin | None = None

    def digest(self) -> str:
        """Give a SHA-256 of all that decides the trace: equal recipes, equal files."""
        parts = (self.program, self.settings, self.style, self.options)
        return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def peak_bytes(program: Program) -> int:
    """Give the most managed bytes that a program has allocated at one time."""
    sizes: dict[str, int] = {}
    peak = 0
    for operation in program.operations:
        if isinstance(operation, Allocate):
            sizes[operation.name] = operation.n_bytes
            peak = max(peak, sum(sizes.values()))
        else:
            sizes.pop(getattr(operation, "name", ""), None)
    return peak


def oversubscribed(settings: Settings, footprint_bytes: int, factor: float) -> Settings:
    """Give each GPU so little memory that a footprint oversubscribes it by a factor.

    Parameters
    ----------
    settings : Settings
        The machine.
    footprint_bytes : int
        What the program needs at one time: :func:`peak_bytes`, or the peak of its live tensors, which
        does not depend on the allocator.
    factor : float
        Footprint over capacity (F1 of ``domain.md`` A.4): 1.5 leaves two thirds of the room needed.

    Returns
    -------
    Settings
        With the capacity cut to whole 2 MiB chunks, at least one, at most what it had.
    """
    if not 0 < factor < float("inf"):
        raise ProgramError(f"An oversubscription factor of {factor}", "Take one above 0, as 1.5")
    chunks = max(int(footprint_bytes / factor) // VA_BLOCK_BYTES, 1)
    chunks = min(chunks, settings.capacity_chunks)
    return replace(settings, capacity_bytes=chunks * VA_BLOCK_BYTES)


def check_factor(settings: Settings, footprint_bytes: int, factor: float) -> None:
    """Refuse a factor that whole chunks of the GPU's memory cannot give.

    Parameters
    ----------
    settings : Settings
        The machine, as :func:`oversubscribed` gave it.
    footprint_bytes : int
        What the program needs at one time.
    factor : float
        What was asked for.

    Raises
    ------
    ProgramError
        If footprint over capacity is another factor, by more than a quarter.
    """
    capacity = settings.capacity_chunks * VA_BLOCK_BYTES
    found = footprint_bytes / capacity
    if not 0.8 <= found / factor <= 1.25:
        room = "all its memory" if found > factor else "one chunk of 2 MiB"
        raise ProgramError(
            f"An oversubscription factor of {factor:g} for {footprint_bytes} byte: with {room} the GPU "
            f"gives {found:.3g}",
            "Ask for that, or for another size",
        )


def is_whole(folder: Path) -> bool:
    """Say whether a folder holds all that a run of its ``model.json`` left.

    Parameters
    ----------
    folder : Path
        What :func:`make` wrote, perhaps changed since.

    Returns
    -------
    bool
        The export, each table of the truth and, of a tensor program, the snapshot are there.
    """
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        files = [export_name(folder), *(f"{TRUTH}/{table}.parquet" for table in about["truth"])]
        files += [SNAPSHOT] if "allocator" in about else []
        files += [PROGRAM] if "file" in about.get("origin", {}) else []
        return "figures" in about and all((folder / file).is_file() for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def export_name(folder: Path) -> str:
    """Name the export in a folder: after it, so that a trace is known by its file."""
    return f"{folder.resolve().name}.sqlite"


def make(
    recipe: Recipe, folder: Path | str, *, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Run a program on the modelled machine and write its trace and truth.

    Parameters
    ----------
    recipe : Recipe
        What to run and how to write it.
    folder : Path or str
        Gets ``FOLDER.sqlite``, ``truth/*.parquet``, ``model.json``, of a tensor program
        ``snapshot.pickle``, and ``program.json`` of a program without a name that makes it again; it
        gets its name when all is written.
    overwrite : bool, default False
        Replace a folder that such a run made.
    progress : callable, optional
        As in :func:`nsan.model.machine.run`.

    Returns
    -------
    dict
        What ``model.json`` says: recipe, profiles with their errors, and counts. Equal recipes give
        equal files.

    Raises
    ------
    ProgramError
        If the program cannot be run.
    OutputExistsError, OutputWriteError
        If the folder is there already, is not one of these, or cannot be written.
    """
    folder = Path(folder).resolve()
    _check_place(folder, overwrite=overwrite)
    settings, name = recipe.settings, recipe.program.name
    happened = run(recipe.program, settings, progress)
    plain = record(happened, settings, name)
    is_plain = recipe.style == PLAIN
    tables = plain if is_plain else record(happened, settings, name, recipe.style)
    with _building(folder, overwrite=overwrite) as scratch:
        machine = Machine(f"nsan-model {name}", _note(settings), 0, happened.end_ns)
        (scratch / TRUTH).mkdir()
        # Beside each other: one waits for SQLite, the other for the compression.
        with ThreadPoolExecutor(1) as pool:
            history = recipe.placed.history if recipe.placed else None
            parts = truth(happened, settings, plain, history)
            written = pool.submit(_write_truth, scratch / TRUTH, parts)
            write_export(scratch / export_name(folder), tables, machine, recipe.options)
            facts, dead = written.result()
        costs = figures(plain, happened.end_ns)
        about = {**_about(recipe, tables, facts), "figures": {**costs, **dead}}
        about["origin"] = _write_origin(scratch, recipe)
        if recipe.placed is not None:
            about["allocator"] = _allocator_facts(recipe.placed, about["capacity_bytes"])
            frames = snapshot_frames(recipe.placed.history, happened.operation_ns)
            model = {
                "nsan": nsan.__version__,
                "network": recipe.placed.history.network,
                "allocator": recipe.placed.history.allocator,
            }
            write_snapshot(scratch / SNAPSHOT, frames, model=model)
        (scratch / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return about


def _write_origin(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Say how the program is made again; without a name that does, write the program itself."""
    origin = recipe.origin
    # A recipe changed by hand may still bear the name of what it was.
    if origin is not None and origin.made(recipe.settings)[0] == recipe.program:
        return origin.document()
    text = program_text(recipe.program)
    if text is None:
        return {}
    (folder / PROGRAM).write_text(text, encoding="utf-8")
    return {"file": PROGRAM}


def _write_truth(
    folder: Path, tables: Iterable[tuple[str, pl.DataFrame]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Write the truth; count the rows of each table and, of a tensor program, the dead bytes."""
    n_rows: dict[str, int] = {}
    dead: dict[str, int] = {}
    for name, rows in tables:
        n_rows[name] = rows.height
        rows.write_parquet(folder / f"{name}.parquet")
        if name == "tensor_moves":
            dead = dead_bytes(rows)
    return n_rows, dead


def _note(settings: Settings) -> str:
    return f"model of nsan {nsan.__version__}, host {settings.host}"


def _allocator_facts(placed: Placed, capacity_bytes: int) -> dict[str, Any]:
    return {
        "kind": placed.history.allocator,
        "hints": [str(hint) for hint in placed.hints],
        "peak_tensor_bytes": placed.peak_tensor_bytes,
        "tensor_oversubscription_factor": placed.peak_tensor_bytes / capacity_bytes,
        "history_entries": len(placed.history.entries),
    }


def _about(
    recipe: Recipe, tables: Mapping[str, pl.DataFrame], facts: Mapping[str, int]
) -> dict[str, Any]:
    settings = recipe.settings
    host, gpu = settings.host_profile, settings.gpu_profile
    managed, capacity = peak_bytes(recipe.program), settings.capacity_chunks * VA_BLOCK_BYTES
    return {
        "kind": "modelled",
        "nsan": nsan.__version__,
        "recipe_sha256": recipe.digest(),
        "program": recipe.program.name,
        "n_operations": len(recipe.program.operations),
        "peak_managed_bytes": managed,
        "capacity_bytes": capacity,
        "oversubscription_factor": managed / capacity,
        "settings": asdict(settings),
        "profiles": {
            "host": {"description": host.description, "source": host.source, "error": host.error},
            "gpu": {"description": gpu.description, "source": gpu.source, "error": gpu.error},
        },
        "style": asdict(recipe.style),
        "export": asdict(recipe.options),
        "rows": {table: frame.height for table, frame in tables.items() if frame.height},
        "truth": {
            table: {"rows": n_rows, "row": TRUTH_ROWS[table]} for table, n_rows in facts.items()
        },
    }


def _check_place(folder: Path, *, overwrite: bool) -> None:
    """Refuse a place that is taken by anything but an earlier run."""
    if not folder.exists():
        return
    if not _is_ours(folder):
        raise PlaceTakenError(folder, "exists, and holds what `nsan model` did not make")
    if not overwrite:
        raise OutputExistsError(folder)


def _is_ours(folder: Path) -> bool:
    """Say whether a folder holds a run and nothing else."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        found = {path.name for path in folder.iterdir()}
        truths = {path.name for path in (folder / TRUTH).iterdir()}
    except (OSError, ValueError):
        return False
    whole = isinstance(about, dict) and about.get("kind") == "modelled" and "nsan" in about
    ours = {ABOUT, TRUTH, SNAPSHOT, PROGRAM} | {name for name in found if name.endswith(".sqlite")}
    return whole and found <= ours and truths <= {f"{table}.parquet" for table in TRUTH_ROWS}


@contextlib.contextmanager
def _building(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """Fill a scratch folder, and put it in place when it is whole."""
    scratch: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = scratch_beside(folder, "model")
        made = scratch / "made"
        made.mkdir()
        yield made
        with undisturbed():
            _check_place(folder, overwrite=overwrite)  # it may have come meanwhile
            if folder.exists():
                folder.rename(scratch / "before")
            made.rename(folder)
    except OSError as error:
        raise OutputWriteError(folder, error.strerror or str(error)) from error
    except OutputWriteError as error:  # of a file in the scratch folder, which nobody knows
        raise OutputWriteError(folder, error.reason) from error
    except pl.exceptions.ComputeError as error:
        raise OutputWriteError(folder, str(error).split("\n", 1)[0]) from error
    finally:
        if scratch is not None:
            with undisturbed():
                shutil.rmtree(scratch, ignore_errors=True)
