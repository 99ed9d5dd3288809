"""What the keys of `nsan summary DIR --json` mean, beside :mod:`nsan.fleet.document`, which writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nsan.contract_keys import JsonType, Key

_EVENTS: Final = ("gpu_faults", "cpu_faults", "migrations", "allocations", "nvtx", "kernels")
_TIMES: Final = {
    "duration_ns": "From the first start of an event to the last end.",
    "um_ns": (
        "A migration was in flight or a batch of GPU faults in service. Null where one of both was not recorded, or "
        "where both took time and it is not known how much of it was common."
    ),
    "um_at_least_ns": "The larger of the two times below that are known: the union of both is at least so long.",
    "migrations_busy_ns": "At least one migration was in flight, per GPU, summed over GPUs.",
    "gpu_faults_busy_ns": "At least one batch of GPU faults was in service, per GPU, summed over GPUs.",
    "kernels_busy_ns": "At least one kernel ran; the same.",
}
_BYTES: Final = {
    "bytes": "All bytes that migrated.",
    "htod_bytes": "Host to device.",
    "dtoh_bytes": "Device to host.",
    "dtod_bytes": "Device to device.",
    "coherence_bytes": "Because of a page fault.",
    "prefetch_bytes": "By the driver's prefetcher.",
    "user_bytes": "Because the program asked for it.",
    "eviction_bytes": "Evicted for want of GPU memory.",
    "access_counters_bytes": "Because of access counters.",
    "other_bytes": "For another cause, or one that is not known.",
}


def _numbers(at: str, kind: JsonType, unit: str, docs: dict[str, str]) -> tuple[Key, ...]:
    return tuple(Key(f"{at}.{name}", kind, unit, doc, null=True) for name, doc in docs.items())


def _sums(at: str) -> tuple[Key, ...]:
    return (
        Key(f"{at}.n_reports", "integer", "reports", "How many there are."),
        Key(f"{at}.n_known", "integer", "reports", "How many have the figure."),
        Key(f"{at}.sum", "integer", "", "Over all; null where one lacks it.", null=True),
        Key(f"{at}.known_sum", "integer", "", "Over those that have it.", null=True),
        Key(f"{at}.min", "integer", "", "The least of those known.", null=True),
        Key(f"{at}.median", "number", "", "Median of those known.", null=True),
        Key(f"{at}.max", "integer", "", "The largest of those known.", null=True),
    )


def _named(at: str, what: str) -> tuple[Key, ...]:
    return (
        Key(f"{at}", "list", "", f"{what}, the most frequent first."),
        Key(f"{at}[]", "object", "", "One of them."),
        Key(f"{at}[].name", "text", "name", "The name; several have a comma between.", null=True),
        Key(f"{at}[].n_reports", "integer", "reports", "Reports that have it."),
    )


def _who(at: str) -> tuple[Key, ...]:
    return (
        Key(f"{at}.run", "text", "name", "Its run."),
        Key(f"{at}.rank", "integer", "id", "Its rank; null: nothing names one.", null=True),
    )


def _of_events(events: Iterable[str]) -> Iterable[Key]:
    for kind in events:
        yield Key(f"capture.{kind}", "object", "", "Of one kind of event.")
        for answer in ("recorded", "not_recorded", "unknown"):
            yield Key(f"capture.{kind}.{answer}", "integer", "reports", "Reports of this answer.")


_HEAD: Final = (
    Key("schema", "integer", "version", "Version of this contract."),
    Key("nsan_version", "text", "version", "The nsan that wrote the document."),
    Key(
        "document", "text", "label", "`fleet`: of many reports. The summary of one has no such key."
    ),
    Key("name", "text", "name", "Of the folders or files that were given."),
    Key("n_reports", "integer", "reports", "Reports that could be read."),
    Key("n_failed", "integer", "reports", "Reports that could not."),
    Key("n_runs", "integer", "runs", "Runs that have either."),
    Key("n_modelled", "integer", "reports", "Written by nsan's driver model, not recorded."),
    Key("n_without_um_data", "integer", "reports", "Without any Unified Memory data."),
    *_named("programs", "Programs"),
    *_named("gpus", "GPUs"),
    Key("capture", "object", "", "By kind of event, of how many reports which answer holds."),
    *_of_events(_EVENTS),
    Key("switches", "object", "", "The switch that records what some report did not."),
    *(
        Key(f"switches.{kind}", "text", "option", "Empty: there is none, or all have it.")
        for kind in _EVENTS
    ),
)

_SUMS: Final = (
    Key("totals", "list", "", "What the reports add up to."),
    Key("totals[]", "object", "", "One figure."),
    Key("totals[].figure", "text", "name", "As in `reports[]`, where it is explained."),
    Key("totals[].unit", "text", "label", "Unit of its values."),
    *_sums("totals[]"),
    Key("migrations", "list", "", "Migrations of all reports, most bytes first."),
    Key("migrations[]", "object", "", "One direction and cause."),
    Key("migrations[].direction", "text", "label", "`htod`, `dtoh`, `dtod`.", null=True),
    Key("migrations[].cause", "text", "label", "Cause.", null=True),
    Key("migrations[].n_reports", "integer", "reports", "Reports that have such."),
    Key("migrations[].n", "integer", "migrations", "Rows.", null=True),
    Key("migrations[].bytes", "integer", "byte", "Their bytes.", null=True),
    Key(
        "migrations[].busy_ns",
        "integer",
        "ns",
        "One was in flight, added up over GPUs, processes and reports.",
        null=True,
    ),
    Key("runs", "list", "", "The runs."),
    Key("runs[]", "object", "", "One run."),
    Key("runs[].run", "text", "name", "Its name."),
    Key("runs[].n_reports", "integer", "reports", "Its reports that could be read."),
    Key("runs[].n_failed", "integer", "reports", "Those that could not."),
    Key("runs[].n_outliers", "integer", "reports", "Those that stand out."),
    Key(
        "runs[].started_utc_ns",
        "integer",
        "ns",
        "Earliest start of a session, since 1970, by the clock of its machine.",
        null=True,
    ),
    Key("runs[].figures", "object", "", "What its reports add up to."),
    Key("runs[].figures.<figure>", "object", "", "Of a figure of `reports[]`."),
    *_sums("runs[].figures.<figure>"),
)

_FOUND: Final = (
    Key("outliers", "list", "", "Ranks, then runs, that stand out by UM time; the farthest first."),
    Key("outliers[]", "object", "", "One of them, by the figure by which it is farthest."),
    Key("outliers[].scope", "text", "label", "`rank` or `run`."),
    *_who("outliers[]"),
    Key("outliers[].source", "text", "name", "Of a rank: its report.", null=True),
    Key("outliers[].side", "text", "label", "`more` or `less` than the median."),
    Key("outliers[].figure", "text", "name", "The figure; of a run, the median of its ranks."),
    Key("outliers[].value_ns", "number", "ns", "Its value."),
    Key("outliers[].median_ns", "number", "ns", "Median of those that it is judged against."),
    Key("outliers[].mad_ns", "number", "ns", "Their median absolute deviation (MAD)."),
    Key("outliers[].excess_ns", "number", "ns", "Value less median."),
    Key("outliers[].times_median", "number", "number", "Null: the median is 0.", null=True),
    Key("outliers[].mads", "number", "number", "Excess over MAD; null: that is 0.", null=True),
    Key(
        "outliers[].score",
        "number",
        "number",
        "Distance in robust standard deviations: the lesser of those on a linear and a logarithmic scale.",
    ),
    Key(
        "outliers[].bound", "number", "number", "What normal values keep below in 99 of 100 groups."
    ),
    Key("outliers[].n_peers", "integer", "", "How many were judged together."),
    Key("outliers[].n_together", "integer", "", "Of those, how many stand out by the figure."),
    Key("outliers[].is_group", "flag", "", "So many that they are a group of their own."),
    Key("outliers[].reasons", "list", "", "What differs."),
    Key("outliers[].reasons[]", "text", "sentence", "One difference."),
    Key("outliers[].text", "text", "sentence", "All of it for people."),
    Key("judged", "list", "", "What was judged, by each figure: ranks of a run, then runs."),
    Key("judged[]", "object", "", "Those that were judged together."),
    Key("judged[].scope", "text", "label", "`rank` or `run`."),
    Key("judged[].run", "text", "name", "Run of the ranks; null: runs were judged.", null=True),
    Key("judged[].figure", "text", "name", "By which."),
    Key("judged[].group", "text", "name", "Program that they have in common.", null=True),
    Key("judged[].size", "integer", "reports", "Of runs: reports of each; null: ranks.", null=True),
    Key("judged[].n_peers", "integer", "", "How many were judged."),
    Key("judged[].n_beyond", "integer", "", "How many are beyond the bound."),
    Key("judged[].n_together", "integer", "", "How many are apart from the others, too."),
    Key("judged[].min_ns", "integer", "ns", "Least value."),
    Key("judged[].median_ns", "number", "ns", "Median."),
    Key("judged[].max_ns", "integer", "ns", "Largest value."),
    Key(
        "judged[].needed_ns",
        "number",
        "ns",
        "From here on one above the median could stand out; null: from nowhere.",
        null=True,
    ),
    Key("stragglers", "list", "", "Of each run the report that takes longest."),
    Key("stragglers[]", "object", "", "One of them. Durations are compared, not times of day."),
    *_who("stragglers[]"),
    Key("stragglers[].source", "text", "name", "Its report."),
    Key("stragglers[].n_peers", "integer", "reports", "Of the run, with a known duration."),
    Key("stragglers[].duration_ns", "integer", "ns", "Its duration."),
    Key("stragglers[].median_ns", "number", "ns", "Median duration of the run."),
    Key("stragglers[].excess_ns", "number", "ns", "What it takes longer than that."),
    Key(
        "stragglers[].spread",
        "number",
        "fraction",
        "Longest less shortest, over the median.",
        null=True,
    ),
    Key("stragglers[].is_outlier", "flag", "", "Beyond chance; null: too few ranks.", null=True),
    Key(
        "stragglers[].um_figure",
        "text",
        "name",
        "Figure of the next; null: not all have one.",
        null=True,
    ),
    Key(
        "stragglers[].um_excess_ns",
        "number",
        "ns",
        "UM time beyond the median of the run.",
        null=True,
    ),
    Key(
        "stragglers[].um_max_ns",
        "integer",
        "ns",
        "Most UM time in the run; null: not all have recorded it.",
        null=True,
    ),
    Key("stragglers[].text", "text", "sentence", "The same for people."),
    Key("notes", "list", "", "What could not be judged, and what to know about what was."),
    Key("notes[]", "text", "sentence", "One note."),
)

_REPORTS: Final = (
    Key("reports", "list", "", "The reports, run by run."),
    Key("reports[]", "object", "", "One report. Its figures are those of its own summary."),
    *_who("reports[]"),
    Key("reports[].source", "text", "name", "Its name, relative to the folder that was given."),
    Key("reports[].source_kind", "text", "label", "As in the summary."),
    Key("reports[].program", "text", "name", "Names of its processes.", null=True),
    Key("reports[].gpus", "text", "name", "Names of its GPUs.", null=True),
    Key("reports[].n_gpus", "integer", "GPUs", "GPUs of its machine that it names."),
    Key("reports[].session_start_utc_ns", "integer", "ns", "As in the summary.", null=True),
    Key("reports[].last_ns", "integer", "ns", "As in the summary.", null=True),
    *_numbers("reports[]", "integer", "ns", _TIMES),
    Key("reports[].n_migrations", "integer", "migrations", "Rows.", null=True),
    *_numbers("reports[]", "integer", "byte", _BYTES),
    Key("reports[].n_fault_rows", "integer", "fault rows", "GPU faults: batches.", null=True),
    Key("reports[].n_page_faults", "integer", "faults", "Their counts added up.", null=True),
    Key("reports[].n_cpu_faults", "integer", "faults", "CPU page faults.", null=True),
    Key("reports[].n_kernels", "integer", "kernels", "Kernels.", null=True),
    Key("reports[].managed_bytes", "integer", "byte", "Managed allocations.", null=True),
    Key("reports[].gpu_memory_bytes", "integer", "byte", "Memory of its GPUs.", null=True),
    Key("reports[].health", "text", "label", "Worst status of its checks.", null=True),
    Key("failures", "list", "", "Reports that could not be read."),
    Key("failures[]", "object", "", "One report."),
    *_who("failures[]"),
    Key("failures[].source", "text", "name", "Its name."),
    Key("failures[].reason", "text", "sentence", "Why, and what helps."),
    Key("kinds", "object", "", "What kind of number a figure is."),
    *(
        Key(f"kinds.{name}", "text", "label", "`recorded` or `derived`.")
        for name in (
            *_TIMES,
            "n_migrations",
            *_BYTES,
            *("n_fault_rows", "n_page_faults", "n_cpu_faults", "n_kernels", "managed_bytes"),
        )
    ),
)

FLEET_KEYS: Final = (*_HEAD, *_SUMS, *_FOUND, *_REPORTS)
"""Keys of a fleet's document, in its order."""
