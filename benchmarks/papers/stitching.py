"""Table 3: utilization and fragmentation of the caching allocator, with and without stitching (GMLake)."""

from __future__ import annotations

from pathlib import Path

import nsan
from benchmarks.papers.claims import claim, claims_table
from benchmarks.papers.markdown import Column, listed, mib, number, percent, points, spread, table
from nsan.analysing import kinds_of
from nsan.analysis.allocator.stitching import stitching
from nsan.analysis.allocator.utilization import allocator_utilization
from nsan.analysis.catalog import find
from nsan.model.allocator_history import snapshot_frames
from nsan.model.networks import NETWORKS
from nsan.model.settings import Settings
from nsan.model.workloads import network
from nsan.model.workloads.training import TrainingRun, trained
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

SNAPSHOTS = Path(__file__).parents[2] / "sample_data" / "snapshots"
STEPS = 12
SEEDS = (1, 2, 3)
GB = 1e9

_PEAKS = (
    ("peak_active_bytes", "Peak active, MiB", mib),
    ("peak_reserved_bytes", "Peak reserved, MiB", mib),
    ("utilization_fraction", "Utilization", percent),
    ("fragmentation_fraction", "Fragmentation", percent),
    ("stitched_reserved_bytes", "Reserved, stitched, MiB", mib),
    ("stitched_utilization_fraction", "Utilization, stitched", percent),
    ("gain_fraction", "Gain, points", points),
    ("saved_bytes", "Saved, MiB", mib),
)
_ENDS = (
    ("final_utilization_fraction", "Utilization at the end", percent),
    ("free_chunk_bytes", "Free whole chunks at the end, MiB", mib),
    ("largest_stitched_bytes", "Largest request they could serve, stitched, MiB", mib),
    ("largest_free_block_bytes", "and unstitched, MiB", mib),
)


def with_gain(row):
    """Add what stitching gains in utilization, and what whole chunks cost more than blocks."""
    before, after = row["utilization_fraction"], row["stitched_utilization_fraction"]
    known = before is not None and after is not None
    row["gain_fraction"] = after - before if known else None
    row["rounding_bytes"] = (
        row["stitched_reserved_bytes"] - row["peak_active_bytes"] if known else None
    )
    row["idle_bytes"] = row["peak_reserved_bytes"] - row["peak_active_bytes"] if known else None
    return row


def real_rows(folder=SNAPSHOTS):
    """Measure the real snapshots: a row each, and the kind of each figure."""
    rows, kinds = [], {}
    for path in sorted(folder.glob("*.pickle.gz")):
        snapshot = nsan.open_snapshot(path)
        row = {"name": path.name.removesuffix(".pickle.gz"), "torch": snapshot.info.torch_versions}
        row["history"] = listed({device.history for device in snapshot.info.devices})
        for name in ("allocator_utilization", "stitching"):
            found = nsan.analyse(snapshot, name).collect()
            row |= found.row(0, named=True)
            kinds |= kinds_of(snapshot, find(name), found)
        rows.append(with_gain(row))
    return rows, kinds | {"gain_fraction": "modelled"}


def modelled_row(name, *, varying, steps, seed=1, **sizes):
    """Train a network on the modelled allocator, and measure its history."""
    gpu = Settings().gpu_profile
    made = trained(network(name), TrainingRun(steps, varying=varying, seed=seed, **sizes), gpu)
    # No figure of this table depends on times: the operations may be 1 us long.
    times = [1000 * i for i in range(len(made.program.operations) + 1)]
    frames = snapshot_frames(made.history, times)
    tables = (
        *(frames[table].lazy() for table in ("segments", "blocks", "allocator_events")),
        SNAPSHOT_TABLES["allocator_settings"].empty(),
    )
    row = {"name": name, "shapes": f"varying, seed {seed}" if varying else "fixed"}
    row |= {"varying": varying, "steps": steps}
    row["varies"] = "length of the texts" if network(name).has_sequence else "images in a batch"
    for measure in (allocator_utilization, stitching):
        row |= measure(*tables).collect().row(0, named=True)
    return with_gain(row)


def modelled_rows(names, *, steps=STEPS, seeds=SEEDS, **sizes):
    """Train each network with fixed and with varying shapes."""
    rows = []
    for name in names:
        rows.append(modelled_row(name, varying=False, steps=steps, **sizes))
        rows += [
            modelled_row(name, varying=True, steps=steps, seed=seed, **sizes) for seed in seeds
        ]
    return rows


def real_text(rows, kinds):
    """Write the table of the real snapshots."""
    columns = [
        Column("name", "Snapshot"),
        Column("torch", "torch"),
        Column("history", "History"),
        Column("n_entries", "Entries", number, kinds["n_entries"]),
        *(Column(key, title, show, kinds[key]) for key, title, show in (*_PEAKS, *_ENDS)),
    ]
    title = (
        "## Table 3a. Caching allocator with and without stitching: measured (real snapshots; what "
        "stitching would reserve is modelled)"
    )
    whole = [row for row in rows if row["gain_fraction"] is not None]
    said = [
        f"{len(whole)} of {len(rows)} snapshots hold a history of allocations; of the others only the "
        "final state is known, and no peak (-)."
    ]
    said += [stitched_sentence(row, row["name"]) for row in whole]
    idle = [row for row in rows if row["free_chunk_bytes"]]
    if idle:
        most = max(idle, key=lambda row: row["free_chunk_bytes"] / row["final_reserved_bytes"])
        share = most["free_chunk_bytes"] / most["final_reserved_bytes"]
        said.append(
            f"In the final states free whole chunks are at most {percent(share)} of what is reserved "
            f"({most['name']})."
        )
    return f"{title}\n\n{table(rows, columns)}\n\n{' '.join(said)}"


def stitched_sentence(row, name):
    """Say what stitching did to one history, and beside what bound, from its figures."""
    idle, rounding = mib(row["idle_bytes"]), mib(row["rounding_bytes"])
    over = row["stitched_reserved_bytes"] - row["least_reserved_bytes"]
    more = "more" if over > 0 else "less"
    bound = f"is {mib(abs(over))} MiB {more} than" if over else "is exactly what"
    why = (
        f"beyond the peak of active bytes PyTorch's rules reserve {idle} MiB, stitching {rounding} MiB; its "
        f"total {bound} active large tensors in whole chunks and the segments of the small pool take "
        "together at their most"
    )
    saved = row["saved_bytes"]
    if saved == 0:
        return f"{name}: stitching changes nothing ({why})."
    verb = "saves" if saved > 0 else "costs"
    return f"{name}: stitching {verb} {mib(abs(saved))} MiB ({why})."


def modelled_text(rows):
    """Write the table of the modelled training runs, and what follows from it."""
    columns = [
        Column("name", "Network"),
        Column("shapes", "Shapes"),
        Column("steps", "Steps", number),
        *(Column(key, title, show, "modelled") for key, title, show in _PEAKS),
    ]
    title = (
        "## Table 3b. Caching allocator with and without stitching: modelled (training steps, fixed and "
        "varying shapes)"
    )
    return f"{title}\n\n{table(rows, columns)}\n\n{verdict(rows)}"


def verdict(rows):
    """Say in words what the rows of training show."""
    better = [row for row in rows if row["saved_bytes"] > 0]
    worse = [row for row in rows if row["saved_bytes"] < 0]
    said = [
        f"Stitching reserves less in {len(better)} of {len(rows)} runs and more in {len(worse)}.",
        shapes_sentence(rows),
    ]
    extremes = (
        max(better, key=lambda row: row["saved_bytes"], default=None),
        min(worse, key=lambda row: row["saved_bytes"], default=None),
    )
    said += [stitched_sentence(row, f"{row['name']} ({row['shapes']})") for row in extremes if row]
    said.append(
        "Stitching here may use every block of 2 MiB and more: the most that it can do. Memory that is "
        "stitched is mapped by virtual memory calls and never managed: it excludes Unified Memory."
    )
    return " ".join(said)


def shapes_sentence(rows):
    """Say whether varying shapes fragment more, network by network, and what varies in each."""
    ways = {"rises": [], "falls": [], "stays": []}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        fixed = [row["fragmentation_fraction"] for row in own if not row["varying"]]
        varying = [row for row in own if row["varying"]]
        if not fixed or not varying:
            continue
        changes = [row["fragmentation_fraction"] - fixed[0] for row in varying]
        change = sum(changes) / len(changes)
        way = "rises" if change > 0 else "falls" if change < 0 else "stays"
        shown, by_seed = points(change), spread(changes, points)
        seeds = f"; {by_seed} by seed" if by_seed != shown else ""
        ways[way].append(f"{name} ({varying[0]['varies']}: {shown} points{seeds})")
    said = [f"{way} for {listed(names)}" for way, names in ways.items() if names]
    if not said:
        return "Fixed and varying shapes cannot be compared: one of them was not run."
    return f"With varying shapes the mean fragmentation over the seeds {', '.join(said)}."


def found(real, modelled):
    """Answer each claim of paper 3 from the rows of both tables."""
    groups = {"Real histories": real, "Modelled training": modelled}
    known = {
        group: [row for row in rows if row["gain_fraction"] is not None]
        for group, rows in groups.items()
    }
    answers = {"definition": ["Both peaks are taken apart here too."]}
    for group, rows in known.items():
        for key, said in (_answers(rows) if rows else {}).items():
            answers.setdefault(key, []).append(f"{group}: {said}")
    answers.setdefault("reserved", []).append(_sizes([*known["Real histories"], *modelled]))
    answers.setdefault("caching", []).append("The speed of calls is not measured here.")
    return {key: " ".join(said) for key, said in answers.items()}


def _answers(rows):
    """Answer the claims from rows of one kind that know their peaks."""
    gains = [row["gain_fraction"] for row in rows]
    saved = [row["saved_bytes"] / GB for row in rows]
    fragmented = [row["fragmentation_fraction"] for row in rows]
    shares = [row["saved_bytes"] / row["peak_reserved_bytes"] for row in rows]
    best = max(rows, key=lambda row: row["gain_fraction"])
    gb = "{:+.2f}".format
    before, after = best["utilization_fraction"], best["stitched_utilization_fraction"]
    return {
        "points": f"{spread(gains, points)} points: {claim('points').count(gains)}.",
        "reserved": f"{spread(saved, gb)} GB saved: {claim('reserved').count(saved)}.",
        "best": (
            f"most by {best['name']}{', ' + best['shapes'] if 'shapes' in best else ''}: utilization "
            f"{percent(before)} to {percent(after)}, {gb(best['saved_bytes'] / GB)} GB saved."
        ),
        "caching": f"fragmentation {spread(fragmented, percent)}: {claim('caching').count(fragmented)}.",
        "mean": (
            f"mean of {len(rows)}: {gb(sum(saved) / len(saved))} GB, "
            f"{points(sum(shares) / len(shares))} % of what was reserved."
        ),
    }


def _sizes(rows):
    """Say how much memory these runs use: a saving cannot be larger."""
    peaks = [row["peak_reserved_bytes"] / GB for row in rows]
    largest, least = max(peaks), claim("reserved").low
    beyond = "more" if largest < least else "no more"
    return (
        f"The claim is of runs of 1.3 to 20 billion parameters on four GPUs; the largest run here "
        f"reserves {largest:.2f} GB in all: the least that is claimed is {beyond} than that."
    )


def make(job):
    """Make table 3.

    ``job`` says whether it is to be quick; nothing of this table needs a run of the driver model.
    """
    names = ["alexnet"] if job.quick else [each.name for each in NETWORKS]
    sizes = {"batch": 4, "image": 64} if job.quick else {}
    steps, seeds = (4, (1,)) if job.quick else (STEPS, SEEDS)
    real, kinds = real_rows()
    modelled = modelled_rows(names, steps=steps, seeds=seeds, **sizes)
    claims = f"### Paper 3 and these tables\n\n{claims_table(3, found(real, modelled))}"
    return "\n\n".join((real_text(real, kinds), modelled_text(modelled), claims)) + "\n"
