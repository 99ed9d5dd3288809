"""What a report says of faults: their clusters, and the batches in which the driver serviced them."""

from __future__ import annotations

import exports as x
import polars as pl
import pytest
import reports

from nsan.report.blocks import Picture
from nsan.report.report import Report
from nsan.report.sections.saying import paragraph
from nsan.units import format_bytes, format_time

INTO_BY_FAULTS = "SELECT sum(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 11 AND migrationCause IN (2, 3)"


def said(sample, name):
    return " ".join(reports.texts(reports.section(sample, name)))


def truth(sample, table):
    return pl.read_parquet(reports.path_of(sample).parent / "truth" / f"{table}.parquet")


@pytest.mark.parametrize("sample", ["real", "oversubscribed_sweep"])
def test_a_single_cluster_holds_all_that_faults_brought(sample):
    ((brought,),) = x.ask(reports.path_of(sample), INTO_BY_FAULTS)
    assert f"One cluster holds all of the {format_bytes(brought)}" in said(sample, "clusters")


def test_the_largest_cluster_comes_first_and_the_sentence_tells_its_share():
    rows = reports.tables(reports.section("pca_on", "clusters"))["The largest clusters"]
    shares = [float(row["Traffic share"].rstrip("%")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert f"the largest {rows[0]['Traffic share']}" in said("pca_on", "clusters")


def test_clusters_of_copies_alone_say_so_and_what_would_show_more():
    text = said("real", "clusters")
    assert "This rests on copies alone" in text
    assert "`--cuda-um-gpu-page-faults=true`" in text
    assert "This rests on copies alone" not in said("oversubscribed_sweep", "clusters")


def test_a_log_without_causes_is_said_to_count_every_copy():
    assert "whatever caused them" in said("hotspot_8192", "clusters")


def test_first_touches_that_copy_nothing_form_no_cluster():
    assert said("first_touch", "clusters") == (
        "There are no fault clusters: faults brought nothing to a GPU."
    )


@pytest.fixture
def hostile(built):
    """Two VA blocks that a kernel with a nasty name faults in."""
    export = x.Export()
    export.strings[10] = "`<script>alert(1)</script>\x1b[31m`"
    export.add(x.KERNEL, x.kernel(0, 9_000_000, name=10))
    for place in range(40):
        start = 100_000 * place
        va = x.VA + place * 64 * x.KIB
        export.add(x.MEMCPY, x.migration(start, start + 5_000, 64 * x.KIB, va))
    return Report(built(export))


def test_a_kernels_name_ends_no_code_and_hides_no_control_character(hostile):
    text = reports.texts(hostile.section("clusters"))[0]
    assert "`'<script>alert(1)</script>\\x1b[31m'`" in text
    assert "<script>" not in hostile.section("clusters")._repr_mimebundle_()["text/html"]


def test_batches_are_counted_as_the_model_made_them():
    made = truth("pca_on", "batches")
    touched = made.filter(pl.col("outcome") == "first_touch").height
    text = said("pca_on", "batches")
    assert f"serviced {made.height:,}".replace(",", " ") in text
    assert f"{touched} copied nothing (first touch, or mapped remotely)" in text


def test_pages_that_were_mapped_remotely_are_not_called_first_touches():
    """The model mapped them on advice; rows do not tell that from a first touch."""
    made = truth("advice", "batches").group_by("outcome").len()
    n = dict(made.iter_rows())["remote_map"]
    blocks = reports.section("advice", "batches")
    assert f"{n} copied nothing (first touch, or mapped remotely)" in " ".join(
        reports.texts(blocks)
    )
    outcomes = [
        row["Outcome"]
        for rows in reports.tables(blocks).values()
        for row in rows
        if "Outcome" in row
    ]
    assert outcomes == ["data", "nothing copied"]


def batches_of(n, *, pids=(x.PID,)):
    """Batches of 100 to 100 + n - 1 us in each process, each with one copy of 64 KiB."""
    export = x.Export()
    for pid in pids:
        for place in range(n):
            start, va = 1_000_000 * place, x.VA + place * 2 * x.MIB
            end = start + 100_000 + 1000 * place
            export.add(x.GPU_FAULTS, x.gpu_fault(start, end, va, pid=pid))
            export.add(
                x.MEMCPY, x.migration(start + 60_000, start + 80_000, 64 * x.KIB, va, pid=pid)
            )
    return export


@pytest.mark.parametrize(
    ("n", "longest", "columns"),
    [
        (2, "100.500 us in the median, and at most 101.000 us", set()),
        (20, "109.500 us in the median, and one in ten over 117.100 us", {"p90"}),
        (100, "149.500 us in the median, and one in a hundred over 198.010 us", {"p90", "p99"}),
    ],
)
def test_a_percentile_is_told_only_of_enough_batches(built, n, longest, columns):
    blocks = Report(built(batches_of(n))).section("batches")
    (rows,) = (
        rows for title, rows in reports.tables(blocks).items() if title.startswith("How long")
    )
    assert longest in reports.texts(blocks)[0]
    assert {name.split()[1] for name in rows[0] if name.startswith("Latency p9")} == columns


def test_one_batch_has_no_median(built):
    text = reports.texts(Report(built(batches_of(1))).section("batches"))[0]
    assert "A batch that moved data took 100.000 us (there is one)" in text


def test_times_of_two_processes_on_one_gpu_are_said_to_be_added_up(built):
    report = Report(built(batches_of(2, pids=(42, 43))))
    assert (
        "402.000 us of service (added up over 2 processes)"
        in reports.texts(report.section("batches"))[0]
    )
    assert "together (added up over 2 processes)" in reports.texts(report.section("clusters"))[0]
    assert "of the GPU for process 42 were known" in reports.texts(report.section("memory"))[0]


def test_a_share_of_one_gpu_stands_in_no_table_of_several():
    rows = reports.tables(reports.section("two_gpus", "clusters"))["The largest clusters"]
    assert {row["GPU"] for row in rows} == {"0", "1"}
    assert "Traffic share" not in rows[0]
    assert (
        "Traffic share"
        in reports.tables(reports.section("pca_on", "clusters"))["The largest clusters"][0]
    )


@pytest.fixture
def copies(built):
    """Build the report of nine copies to the GPU, without a fault row."""

    def make(*, cause=x.COHERENCE, size=64 * x.KIB, traced="true"):
        export = x.Export(options={"COLLECT_UVM_GPU_PAGE_FAULTS": traced})
        for place in range(9):
            start, va = 1_000_000 * place, x.VA + place * 64 * x.KIB
            export.add(x.MEMCPY, x.migration(start, start + 100_000, size, va, cause=cause))
        return Report(built(export))

    return make


def test_traced_faults_without_a_row_and_copies_without_a_cause_are_no_faults(copies):
    report = copies(cause=None)
    for name in ("clusters", "batches"):
        (block,) = report.section(name)
        assert "GPU faults were traced and none was recorded" in block.text, name
    assert "recording names no causes" in reports.texts(report.section("memory"))[0]


def test_copies_by_faults_without_a_fault_row_are_said_to_contradict(copies):
    for name in ("clusters", "batches"):
        text = reports.texts(copies().section(name))[0]
        assert "GPU faults were traced, yet no row of one is there" in text, name


def test_copies_by_prefetch_do_not_tell_that_the_gpu_did_not_fault(copies):
    text = reports.texts(copies(cause=x.USER, traced="false").section("batches"))[0]
    assert "What it touched first is not known: GPU faults were not recorded" in text


@pytest.mark.parametrize("name", ["clusters", "batches", "memory", "ping_pong", "transfers"])
def test_sizes_that_cannot_be_read_are_not_0(copies, name):
    report = copies(size=1 << 62)
    (block,) = report.section(name)
    assert "the sizes of copies cannot be read" in block.text
    assert "0 B" not in block.text


def test_sizes_of_which_some_cannot_be_read_give_no_rate(built):
    export = x.Export()
    export.add(
        x.MEMCPY,
        x.migration(0, 100_000, 64 * x.KIB),
        x.migration(200_000, 300_000, 1 << 62, x.VA + x.MIB),
    )
    text = " ".join(reports.texts(Report(built(export)).section("transfers")))
    assert "64.00 KiB moved HtoD at least, at a rate that is not known" in text
    assert "The sizes of some copies cannot be read" in text


@pytest.mark.parametrize("name", ["clusters", "batches"])
def test_where_nothing_moved_and_faults_were_not_recorded_they_are_unknown(real, name):
    (block,) = Report(real("nokernels_rtx4060_2025.5.1")).section(name)
    assert "Whether the GPU faulted is not known: GPU faults were not recorded" in block.text
    assert "there are no" not in block.text


def test_fault_rows_that_copied_nothing_form_no_cluster(built):
    export = x.Export().add(
        x.GPU_FAULTS,
        *[x.gpu_fault(k * 10**6, k * 10**6 + 10**5, x.VA + k * x.MIB) for k in range(9)],
    )
    report = Report(built(export))
    assert "these are made of copies to the GPU" in reports.texts(report.section("clusters"))[0]
    assert "serviced 9 batches" in reports.texts(report.section("batches"))[0]


def test_the_service_is_the_time_in_which_a_batch_was_under_way():
    path = reports.path_of("pca_on")
    ((service,),) = x.ask(
        path,
        "SELECT sum(end - max(start, coalesce(before, start))) FROM (SELECT start, end, "
        f"lag(end) OVER (ORDER BY end) AS before FROM {x.GPU_FAULTS})",
    )
    assert f"in {format_time(service)} of service" in said("pca_on", "batches")


def test_without_fault_rows_batches_are_of_copies_and_no_latency_is_told():
    text = said("real", "batches")
    assert "Copies show 12 batches" in text
    assert "reconstructed" in text
    titles = list(reports.tables(reports.section("real", "batches")))
    assert not [title for title in titles if "latency" in title]


def test_a_log_with_few_digits_says_that_services_are_less_exact():
    assert "start times have few digits" in said("hotspot_8192", "batches")


def test_fault_rows_that_are_no_batches_are_said_to_be_unusable(built):
    # Each copy begins long after the only row is over, or before it is raised.
    export = x.Export()
    for place in range(60):
        start = 1_000_000 + 100_000 * place
        va = x.VA + place * x.MIB
        export.add(x.GPU_FAULTS, x.gpu_fault(start, start + 30_000, va))
        export.add(x.MEMCPY, x.migration(start + 50_000, start + 90_000, 64 * x.KIB, va))
    text = " ".join(reports.texts(Report(built(export)).section("batches")))
    assert "are not driver batches here" in text
    assert "put together from copies" in text


def test_a_program_that_does_not_fault_has_no_batches():
    assert (
        said("user_prefetch", "batches")
        == "There are no batches: page faults brought nothing to a GPU."
    )


def test_what_the_service_is_spent_on_names_only_what_the_fit_can_tell():
    tables = reports.tables(reports.section("oversubscribed_sweep", "batches"))
    (rows,) = (rows for title, rows in tables.items() if title.startswith("What service"))
    assert "VA block evicted" in {row["Term"] for row in rows}
    assert not [row for row in rows if row["Estimate"] == "-"]


@pytest.mark.parametrize("name", ["clusters", "batches"])
def test_a_section_has_at_most_two_charts_and_three_tables(name):
    blocks = reports.section("pca_on", name)
    assert sum(isinstance(block, Picture) for block in blocks) <= 2
    assert len(reports.tables(blocks)) <= 3


def test_kinds_are_told_once_where_all_are_of_one_and_else_behind_each():
    one = paragraph([("2 rows.", "derived"), ("1 GB/s.", "derived")])
    two = paragraph([("2 rows.", "recorded"), ("1 GB/s.", "derived"), ("So.", "")])
    assert one.text == "2 rows. 1 GB/s (all derived)."
    assert two.text == "2 rows. 1 GB/s (derived). So."
