"""What PyTorch's caching allocator did to the driver in one run (domain.md E-19), GPU by GPU."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.call_sites import SITE_COLUMNS
from nsan.analysis.catalog import analysis
from nsan.analysis.driver.batches import BATCH_READS
from nsan.analysis.pca.first_touch import (
    KEYS,
    LedgerInput,
    fault_places,
    gpus_of,
    judged_batches,
    ledger_input,
    nulled,
    silent_batches,
    with_sharers,
)
from nsan.analysis.pca.ledger import IS_CALLED, LEDGER_READS, marked_moves, move_sums
from nsan.analysis.pca.sharing import with_service, with_tensors_there
from nsan.analysis.pca.stream_order import rule_of
from nsan.analysis.pca.tables import N_FAULT_ROWS, OF_BATCHES
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed

PCA_EFFECT: Final = Result(
    "pca_effect",
    "one GPU of a process, over the whole trace",
    (
        PID,
        DEVICE,
        derived("n_managed_allocs", pl.Int64, "allocations", "Managed allocations of the driver."),
        derived("n_managed_frees", pl.Int64, "allocations", "Of these given back in the trace."),
        derived("n_tensors", pl.Int64, "tensors", "Tensors that the history allocates."),
        N_FAULT_ROWS,
        derived("fault_rows_per_alloc", pl.Float64, "number", "Fault rows per managed allocation."),
        *OF_BATCHES,
        derived("tensor_bytes", pl.Int64, "byte", "Blocks of the tensors."),
        derived("reused_bytes", pl.Int64, "byte", "Of these on memory that a tensor held before."),
        reconstructed(
            "n_first_touch_avoided",
            pl.Int64,
            "batches",
            "First touches that reused bytes would have cost at the rate of fresh ones of the same line.",
        ),
        reconstructed(
            "n_first_touch_avoided_error",
            pl.Float64,
            "batches",
            "Standard error of that by counting.",
        ),
        derived("in_bytes", pl.Int64, "byte", "Migrated into the GPU."),
        derived("out_bytes", pl.Int64, "byte", "Migrated out of it."),
        derived("dead_in_bytes", pl.Int64, "byte", "Of `in_bytes` dead: cached, unused or stale."),
        derived(
            "stale_in_bytes", pl.Int64, "byte", "Of these for a tensor younger than the bytes."
        ),
        derived("dead_out_bytes", pl.Int64, "byte", "Of `out_bytes` dead: cached or unused."),
        derived(
            "dead_fraction",
            pl.Float64,
            "fraction",
            "Share of the bytes of known state that is dead.",
        ),
        derived("dead_in_ns", pl.Int64, "ns", "Copy time of the dead bytes in."),
        derived("dead_out_ns", pl.Int64, "ns", "Copy time of the dead bytes out."),
        derived(
            "mean_tensors_per_va_block",
            pl.Float64,
            "number",
            "Tensors of a segment that held bytes of a VA block, mean over its services by copies.",
        ),
        derived("most_tensors_per_va_block", pl.Int64, "tensors", "Most of these."),
        derived("neighbour_in_bytes", pl.Int64, "byte", "Live, beside a tensor that faulted."),
        derived("neighbour_out_bytes", pl.Int64, "byte", "Live, evicted beside a larger tensor."),
        derived("neighbour_in_ns", pl.Int64, "ns", "Copy time of the neighbours' bytes in."),
        derived("neighbour_out_ns", pl.Int64, "ns", "Copy time of the neighbours' bytes out."),
        derived("outside_bytes", pl.Int64, "byte", "Moved, in no segment then; both ways."),
        derived(
            "unknown_bytes",
            pl.Int64,
            "byte",
            "Moved, both ways, where the history does not tell what it was: not in the figures above "
            "but `in_bytes` and `out_bytes`.",
        ),
        derived(
            "overlap_bytes",
            pl.Int64,
            "byte",
            "Moved, both ways, while several pieces of work ran that were launched at different positions: "
            "may be of another of them. Without unknown ones.",
        ),
        derived(
            "host_order_bytes",
            pl.Int64,
            "byte",
            "Moved into the GPU, evicted or prefetched, and placed by its time alone, as no work of the GPU "
            "tells: may be of another tensor. Without unknown ones.",
        ),
        reconstructed(
            "clock_residual_ns", pl.Float64, "ns", "Most that the clocks disagree once aligned."
        ),
    ),
    nothing="The trace has no managed memory, and the snapshot no tensor.",
)

_READS: Final = {
    "clock_fits": ("is_used", "residual_max_ns"),
    "tensor_moves": (*LEDGER_READS["tensor_moves"], "order"),
    "tensor_faults": LEDGER_READS["tensor_faults"],
    "tensor_lives": (*LEDGER_READS["tensor_lives"], *(column.name for column in SITE_COLUMNS)),
    "allocations": LEDGER_READS["allocations"],
    **BATCH_READS,
}


@analysis(
    question="What did the caching allocator do to the driver: faults saved, dead traffic, neighbours?",
    result=PCA_EFFECT,
    reads=_READS,
    source="domain.md A.2, E-19",
    whole=True,
)
def pca_effect(  # noqa: PLR0913, PLR0917 - the tables that it reads count too
    clock_fits: pl.LazyFrame,
    tensor_moves: pl.LazyFrame,
    tensor_faults: pl.LazyFrame,
    tensor_lives: pl.LazyFrame,
    allocations: pl.LazyFrame,
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
) -> pl.LazyFrame:
    """Add up, per GPU, what the caching allocator changed for the driver.

    Parameters
    ----------
    clock_fits, tensor_moves, tensor_faults, tensor_lives : LazyFrame
        Tables of a join, in any order.
    allocations, gpu_faults, migrations : LazyFrame
        Tables of the trace that was joined, whole, in any order.

    Returns
    -------
    LazyFrame, ``PCA_EFFECT``
        By process and GPU. Terms as of :func:`nsan.analysis.pca.ledger.step_ledger`, over the whole trace
        and so with what is outside all steps. Means of tensors count a VA block once per service and
        segment in which a tensor held bytes (:func:`nsan.analysis.pca.sharing.with_service`).
        Figures of fault rows are null where these were not recorded. A count of batches is null where
        some of them cannot be told (``n_dead_rows``: memory of unknown state; first touches:
        :func:`nsan.analysis.pca.first_touch.silent_batches`). All other figures of dead, stale and neighbours'
        memory are of moves of known state; ``unknown_bytes`` says how much is left.

    Notes
    -----
    ``n_first_touch_avoided`` is the sum of reused bytes x first touches / fresh bytes over classes of
    tensors; fresh is what of a block no tensor held before. A class is the tensors that one line of the
    program allocates; those of a line that never got fresh memory, or without a call stack, are classed by
    the power of two of their size, and the last by nothing. Its error is that of counting: the root of
    the sum of (reused / fresh bytes)^2 x first touches (at least 1) over classes. Not in the error is what no
    trace can tell: that the reused bytes are touched first by the GPU as far as the fresh ones were, and
    that other memory would have been at hand. Null if no byte was fresh. In
    modelled training, beside runs whose pages end with every tensor: AlexNet at factors 0.8, 1.5, 2.5:
    114, 114, 109 +- 56 against 127, 122, 109; GPT-2 at 1.5: 1378 +- 121 against 1287; ResNet-50 at 1.5:
    219 +- 57 against 353, too few by more than the error says. One rate for all bytes gave 329, 329, 266 for AlexNet.

    Examples
    --------
    >>> from nsan.analysis.pca.tables import JOINED_TABLES
    >>> from nsan.schema import TABLES
    >>> tables = {**JOINED_TABLES, **TABLES}
    >>> pca_effect(*(tables[name].empty() for name in _READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = ledger_input(
            tensor_moves, tensor_faults, tensor_lives, allocations, gpu_faults, migrations
        )
        table = gpus_of(found)
        for part in _parts(found):
            table = table.join(part, on=KEYS, how="left", nulls_equal=True, maintain_order="left")
        residual = clock_fits.filter("is_used").collect()["residual_max_ns"].max()
        counts = pl.selectors.integer() - pl.selectors.by_name(
            *KEYS, "n_first_touch_avoided", "most_tensors_per_va_block"
        )
        table = table.with_columns(counts.fill_null(0)).with_columns(
            clock_residual_ns=pl.lit(residual, pl.Float64)
        )
        return _with_shares(_without_parts(nulled(table, found)))

    return PCA_EFFECT.from_rows(build)


_AVOIDED: Final = ("n_first_touch_avoided", "n_first_touch_avoided_error")


def _without_parts(table: pl.DataFrame) -> pl.DataFrame:
    """Make null what stands on batches of which some cannot be told, or placed."""
    untold = {
        "_n_untold": ("n_first_touch", "first_touch_ns", "n_shared_first_touch"),
        "_n_unplaced": ("n_shared_first_touch", *_AVOIDED),
        "_n_unjudged": ("n_dead_rows",),
    }
    for count, names in untold.items():
        whole = pl.col(count).fill_null(0) == 0
        table = table.with_columns(pl.when(whole).then(pl.col(names)))
    return table


def _with_shares(table: pl.DataFrame) -> pl.DataFrame:
    """Add ratios, and make null what stands on counts that are null."""
    moved = pl.col("in_bytes") + pl.col("out_bytes") - pl.col("unknown_bytes")
    dead = pl.col("dead_in_bytes") + pl.col("dead_out_bytes")
    made, known = pl.col("n_managed_allocs"), pl.col("n_first_touch").is_not_null()
    return table.with_columns(
        pl.when(known).then(pl.col(_AVOIDED)),
        dead_fraction=pl.when(moved > 0).then(dead / moved),
        fault_rows_per_alloc=pl.when(made > 0).then(pl.col("n_fault_rows") / made),
    )


def _parts(found: LedgerInput) -> list[pl.DataFrame]:
    """Count by process and GPU, table by table."""
    silent = silent_batches(found)
    touches = with_sharers(silent.filter("is_first"), found)
    size, state = pl.col("bytes"), pl.col("state")
    unknown, order = state == "unknown", pl.col("order")
    tensors = found.lives.filter(pl.col("alloc_sequence").is_not_null())
    return [
        found.allocations.group_by(KEYS).agg(
            n_managed_allocs=IS_CALLED.sum(),
            n_managed_frees=pl.col("free_ns").filter(IS_CALLED).count(),
        ),
        tensors.group_by(KEYS).agg(
            pl.col("reused_bytes").sum(),
            n_tensors=pl.len(),
            tensor_bytes=pl.col("block_bytes").sum(),
        ),
        found.gpu_faults.group_by(KEYS).agg(n_fault_rows=pl.len()),
        touches.group_by(KEYS).agg(
            n_first_touch=pl.len(),
            first_touch_ns=pl.col("service_ns").sum(),
            n_shared_first_touch=pl.col("is_shared").sum(),
            _n_unplaced=pl.col("is_shared").is_null().sum(),
        ),
        silent.group_by(KEYS).agg(_n_untold=pl.col("is_first").is_null().sum()),
        judged_batches(found.moves)
        .group_by(KEYS)
        .agg(n_dead_rows=pl.col("is_dead").sum(), _n_unjudged=pl.col("is_dead").is_null().sum()),
        marked_moves(found)
        .group_by(KEYS)
        .agg(
            *move_sums(),
            stale_in_bytes=size.filter(pl.col("is_dead"), state == "live").sum(),
            outside_bytes=size.filter(state == "outside").sum(),
            unknown_bytes=size.filter(unknown).sum(),
            overlap_bytes=size.filter(~unknown, order == "overlap").sum(),
            # Copies that CPU faults ask for are in the order of the host.
            host_order_bytes=size.filter(~unknown, order == "host", rule_of() != "host").sum(),
        ),
        _tensors_per_va_block(found),
        _avoided(touches, found, tensors),
    ]


def _tensors_per_va_block(found: LedgerInput) -> pl.DataFrame:
    """Average over the services of VA blocks how many tensors of a segment held bytes there."""
    one = ["pid", "device_id", "service", "va_block", "segment_va"]
    services = (
        with_service(found.moves)
        .filter(pl.col("segment_va").is_not_null() & pl.col("position").is_not_null())
        .group_by(one)
        .agg(pl.col("position").min())
    )
    held = with_tensors_there(services, found.lives).filter(pl.col("n_held") > 0)
    return held.group_by(KEYS).agg(
        mean_tensors_per_va_block=pl.col("n_held").mean(),
        most_tensors_per_va_block=pl.col("n_held").max(),
    )


def _avoided(touches: pl.DataFrame, found: LedgerInput, tensors: pl.DataFrame) -> pl.DataFrame:
    """Estimate the first touches that reused memory saved, by those that fresh memory cost."""
    holders = fault_places(found).select(*KEYS, "batch_id", "va", "tensor_id")
    touched = (
        touches.join(holders, on=[*KEYS, "batch_id", "va"], nulls_equal=True)
        .group_by("tensor_id")
        .agg(touches=pl.len())
    )
    known = (
        tensors.join(touched, on="tensor_id", how="left", maintain_order="left")
        .with_columns(pl.col("reused_bytes", "touches").fill_null(0))
        .with_columns(
            fresh=pl.col("block_bytes") - pl.col("reused_bytes"),
            size_class=pl.col("block_bytes").log(2).floor(),
        )
    )
    rest, parts = known, []
    for by in _ALIKE:
        keys = [*KEYS, *by]
        # Without a call stack all tensors would be of one line.
        named = known.filter(pl.col("part") != "unattributed") if "part" in by else known
        rates = named.group_by(keys).agg(pl.col("touches", "fresh").sum())
        rates = rates.filter(pl.col("fresh") > 0)
        alike = rest.group_by(keys).agg(pl.col("reused_bytes").sum())
        parts.append(
            alike.join(rates, on=keys, nulls_equal=True).select(
                *KEYS, "touches", share=pl.col("reused_bytes") / pl.col("fresh")
            )
        )
        rest = rest.join(rates, on=keys, how="anti", nulls_equal=True)
    count, share = pl.col("touches"), pl.col("share")
    return (
        pl.concat(parts)
        .group_by(KEYS)
        .agg(
            n_first_touch_avoided=(share * count).sum().round().cast(pl.Int64),
            # A class without any first touch might have had one.
            n_first_touch_avoided_error=(share.pow(2) * count.clip(1)).sum().sqrt(),
        )
    )


_ALIKE: Final = (tuple(column.name for column in SITE_COLUMNS), ("size_class",), ())
"""What tensors have in common that fault alike: the line that allocates them, else their size, else nothing."""
