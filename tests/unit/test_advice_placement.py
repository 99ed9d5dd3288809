"""Read-mostly, preferred location and ping-pong: when they are advised, what for, and when not."""

import pytest
from exports import (
    CPU_FAULTS,
    DTOD,
    DTOH,
    EVICTION,
    GPU_FAULTS,
    HTOD,
    KERNEL,
    KIB,
    MEMCPY,
    MEMORY,
    MIB,
    READ,
    VA,
    WRITE,
    Export,
    cpu_fault,
    gpu_fault,
    kernel,
    memory_event,
    migration,
)

from nsan.analysis.advisor.advice import Advice, Silent
from nsan.analysis.advisor.rules.bouncing import ping_pong
from nsan.analysis.advisor.rules.capacity import capacity_thrash
from nsan.analysis.advisor.rules.placement import place_and_map, read_mostly
from nsan.asking import Asked

US = 1_000
MS = 1_000 * US
PIECE = 64 * KIB
FAR = 20 * MS
"""Between two rounds: too long for ping-pong in any window."""

SERVICE = 92 * US
"""A batch of :func:`rounds`: 90 us from its fault to its replay, and 2 us that the access may take."""

PULL = 45 * US
"""The CPU's wait: 40 us from its fault to the end of the copy, and 5 us that the return may take."""


def rounds(n, *, apart=FAR, access=READ, at=VA, size=PIECE, cause=2):
    """Let a kernel fault for memory and the CPU take it back, n times."""
    export = Export()
    for i in range(n):
        start = (i + 1) * apart
        export.add(KERNEL, kernel(start, start + 150 * US))
        export.add(GPU_FAULTS, gpu_fault(start + 10 * US, start + 100 * US, at, access=access))
        export.add(MEMCPY, migration(start + 30 * US, start + 90 * US, size, at, cause=cause))
        back = start + 200 * US
        export.add(CPU_FAULTS, cpu_fault(back, at, function=3))
        export.add(
            MEMCPY, migration(back + 20 * US, back + 40 * US, size, at, kind=DTOH, cause=cause)
        )
    return export


def allocated(export, size, va=VA, **more):
    return export.add(MEMORY, memory_event(0, va, size, **more))


@pytest.fixture
def ask(built):
    """Ask rules about an export that a test has put together."""

    def asked(export, *rules, **filters):
        facts = Asked(built(export), filters=filters)
        answers = [list(rule(facts)) for rule in rules]
        return answers[0] if len(rules) == 1 else answers

    return asked


def test_memory_that_a_kernel_reads_and_the_cpu_takes_is_read_mostly_if_nobody_writes(ask):
    (advice,) = ask(allocated(rounds(4), PIECE), read_mostly)
    # Rows do not tell reads of the CPU from writes, and each write would throw all copies away.
    assert advice.is_conditional
    assert advice.title.endswith(", if neither the CPU nor a GPU writes it any more")
    assert advice.gain.how.startswith("if neither the CPU nor a GPU writes it any more, ")
    assert advice.finding.startswith("The CPU (mostly in `main`) and GPU 0 take")
    assert advice.finding.endswith("Whether the CPU reads or writes is not recorded.")
    assert advice.rule == "read_mostly"
    assert (advice.target.va, advice.target.kernel) == (VA, "add")
    assert advice.title.startswith("Mark allocation 0 (64.00 KiB at 0x7f0000000000) as read-mostly")
    assert advice.calls[0] == "cudaMemAdvise(p0, 65536, cudaMemAdviseSetReadMostly, 0);"
    values = {each.label: (each.value, each.kind) for each in advice.numbers}
    assert values["taken from GPUs by page faults"] == (4 * PIECE, "derived")
    assert values["came back"] == (3 * PIECE, "derived")
    assert values["GPU fault rows that read"] == (4, "recorded")


def fight(n=8, *, access=WRITE, apart=200 * US):
    """Let two GPUs take the same 64 KiB from each other by turns."""
    export = allocated(Export(), PIECE)
    for i in range(n):
        start, gpu = (i + 1) * apart, i % 2
        export.add(GPU_FAULTS, gpu_fault(start, start + 100 * US, access=access, device=gpu))
        moved = migration(start + 30 * US, start + 90 * US, PIECE, kind=DTOD, device=gpu)
        export.add(MEMCPY, moved | {"srcDeviceId": 1 - gpu, "dstDeviceId": gpu})
    return export


def test_memory_that_two_gpus_read_in_turn_is_read_mostly_for_what_is_recorded(ask):
    (advice,) = ask(fight(access=READ, apart=FAR), read_mostly)
    assert not advice.is_conditional
    assert advice.title.endswith(", if no GPU writes it any more")
    assert "the CPU" not in advice.finding


def test_the_gate_of_read_mostly_is_half_of_what_need_not_move(ask):
    (advice,) = ask(allocated(rounds(4), PIECE), read_mostly)
    # Of 8 copies, 4 each way, one has to be made.
    assert advice.gate == "migrations.bytes>-43%"
    (between,) = ask(fight(access=READ, apart=FAR), read_mostly)
    assert between.gate == "migrations.bytes>-43%"
    export = allocated(rounds(4), PIECE)
    export.add(MEMCPY, migration(FAR // 2, FAR // 2 + MS, 64 * PIECE, VA + 32 * MIB))
    (other,) = ask(allocated(export, 64 * PIECE, VA + 32 * MIB), read_mostly)
    assert other.gate == "migrations.bytes>-4%"


def test_the_gain_is_at_most_what_gpu_and_cpu_waited_for_it(ask):
    (advice,) = ask(allocated(rounds(4), PIECE), read_mostly)
    assert (advice.gain.ns, advice.gain.kind) == (4 * SERVICE + 4 * PULL, "derived")


def test_waits_for_other_memory_are_no_gain(ask):
    export = allocated(rounds(4), PIECE)
    other = VA + 8 * MIB
    export.add(GPU_FAULTS, gpu_fault(2 * MS, 3 * MS, other))
    export.add(MEMCPY, migration(2 * MS + US, 3 * MS - US, PIECE, other))
    (advice,) = ask(allocated(export, PIECE, other), read_mostly)
    assert advice.gain.ns == 4 * SERVICE + 4 * PULL


def test_without_rows_of_cpu_faults_the_gain_is_reconstructed(ask):
    export = allocated(rounds(4), PIECE)
    export.rows.pop(CPU_FAULTS)
    export.options["COLLECT_UVM_CPU_PAGE_FAULTS"] = "false"
    (advice,) = ask(export, read_mostly)
    # From 50 us before the copy of 20 us to 5 us after it.
    assert (advice.gain.ns, advice.gain.kind) == (4 * SERVICE + 4 * 75 * US, "reconstructed")


def test_memory_that_a_gpu_writes_is_not_read_mostly(ask):
    (said,) = ask(allocated(rounds(4, access=WRITE), PIECE), read_mostly)
    assert said == Silent(
        "read_mostly", "GPUs write all memory that page faults move to and fro.", is_known=True
    )


def test_without_fault_rows_nobody_knows_whether_gpus_only_read(ask):
    export = allocated(rounds(4), PIECE)
    export.rows.pop(GPU_FAULTS)
    export.options["COLLECT_UVM_GPU_PAGE_FAULTS"] = "false"
    (said,) = ask(export, read_mostly)
    assert not said.is_known
    assert "allocation 0" in said.reason


def test_once_there_and_once_back_is_no_turn(ask):
    said = ask(allocated(rounds(1), PIECE), read_mostly, place_and_map, ping_pong)
    assert all(isinstance(each, Silent) and each.is_known for (each,) in said)


def test_what_leaves_for_want_of_room_is_not_taken(ask):
    export = allocated(rounds(4), PIECE)
    for row in export.rows[MEMCPY]:
        if row["copyKind"] == DTOH:
            row["migrationCause"] = EVICTION
    (said,) = ask(export, read_mostly)
    assert isinstance(said, Silent)


def test_without_causes_nothing_is_said_of_read_mostly(ask):
    said = ask(allocated(rounds(4, cause=0), PIECE), read_mostly, place_and_map)
    assert [(each.is_known, "does not say why" in each.reason) for (each,) in said] == [
        (False, True)
    ] * 2


def test_without_migrations_all_are_silent_for_want_of_rows(ask):
    export = Export(options={"COLLECT_CUDA_TRACE": "false"})
    said = ask(export, read_mostly, place_and_map, ping_pong, capacity_thrash)
    assert [(each.is_known, each.reason) for (each,) in said] == [
        (False, "Migrations were not recorded.")
    ] * 4


def test_guessed_memory_is_named_by_its_address(ask):
    (advice,) = ask(rounds(4), read_mostly)
    assert advice.target.is_guessed
    assert "the memory (2.00 MiB at 0x7f0000000000)" in advice.title
    assert advice.calls[0].startswith("cudaMemAdvise(p0, 2097152, cudaMemAdviseSetReadMostly, 0);")
    assert "0x7f0000000000 in this run, guessed" in advice.calls[0]


def test_names_of_a_trace_are_made_harmless(ask):
    export = allocated(rounds(4), PIECE)
    export.strings[1] = "add\x1b[31m"
    (advice,) = ask(export, read_mostly)
    assert "\x1b" not in advice.title + advice.finding
    assert advice.target.kernel == "add\x1b[31m"


def test_a_part_that_bounces_soon_is_split_out(ask):
    at = VA + MIB
    export = allocated(rounds(6, apart=400 * US, access=WRITE, at=at, size=4 * KIB), 2 * MIB)
    (advice,), (said,) = ask(export, ping_pong, read_mostly)
    assert isinstance(said, Silent)
    assert advice.title == (
        "Split 4.00 KiB at offset 1048576 out of allocation 0 (2.00 MiB at 0x7f0000000000) that `add` uses"
    )
    assert advice.calls[:2] == (
        "cudaMemAdvise((char *)p0 + 1048576, 4096, cudaMemAdviseSetPreferredLocation, cudaCpuDeviceId);",
        "cudaMemAdvise((char *)p0 + 1048576, 4096, cudaMemAdviseSetAccessedBy, 0);",
    )
    assert "between the CPU (mostly in `main`) and GPU 0" in advice.finding
    assert "0x7f0000100000 to 0x7f0000101000" in advice.finding
    assert [(each.offset_bytes, each.n_bytes) for each in advice.changes] == [(MIB, 4 * KIB)] * 2
    assert advice.gain.ns == 6 * SERVICE + 6 * PULL


def test_an_allocation_that_bounces_as_a_whole_is_not_split(ask):
    export = allocated(rounds(6, apart=400 * US, access=WRITE, size=PIECE), PIECE)
    (advice,) = ask(export, ping_pong)
    assert advice.title.startswith("Pin allocation 0 (64.00 KiB at 0x7f0000000000)")


def test_two_gpus_that_fight_keep_the_page_at_one_of_them(ask):
    (advice,) = ask(fight(), ping_pong)
    assert [(each.advice, each.device) for each in advice.changes] == [
        ("preferred_location", 0),
        ("accessed_by", 1),
    ]
    assert "between GPU 0 and GPU 1" in advice.finding
    # One GPU maps another one's memory only with peer access; the CPU's it can map always.
    assert "only with peer access" in advice.remedy
    assert [line for line in advice.calls if line.startswith("// ")][:4] == [
        "// or, without peer access:",
        "// cudaMemAdvise(p0, 65536, cudaMemAdviseSetPreferredLocation, cudaCpuDeviceId);",
        "// cudaMemAdvise(p0, 65536, cudaMemAdviseSetAccessedBy, 0);",
        "// cudaMemAdvise(p0, 65536, cudaMemAdviseSetAccessedBy, 1);",
    ]


def test_what_bounces_with_the_cpu_needs_no_peer(ask):
    (advice,) = ask(allocated(rounds(6, apart=400 * US, access=WRITE), PIECE), ping_pong)
    assert "peer" not in advice.remedy + "".join(advice.calls)


def test_the_gate_of_ping_pong_is_half_of_what_the_part_is_of_all_that_faults_brought(ask):
    export = allocated(rounds(6, apart=400 * US, access=WRITE), PIECE)
    far = VA + 32 * MIB
    start = 50 * MS
    export.add(MEMCPY, migration(start, start + MS, 36 * PIECE, far))
    (advice,) = ask(allocated(export, 36 * PIECE, far), ping_pong)
    # 12 of 48 pieces: each of the 6 rounds moves one there and one back.
    assert advice.gate == "migrations.coherence_bytes>-12%"


def test_cpu_naps_of_the_driver_count_as_waiting(ask):
    export = allocated(rounds(6, apart=2 * MS, access=WRITE, size=4 * KIB), PIECE)
    (before,) = ask(export, ping_pong)
    first_pull = 2 * MS + 200 * US
    export.add(CPU_FAULTS, cpu_fault(first_pull - 480 * US))
    (after,) = ask(export, ping_pong)
    # The batch of that round lies in the nap.
    assert after.gain.ns - before.gain.ns == 480 * US - SERVICE


def test_a_first_touch_by_the_cpu_is_no_wait(ask):
    export = allocated(rounds(6, apart=2 * MS, access=WRITE, size=4 * KIB), PIECE)
    (before,) = ask(export, ping_pong)
    export.add(CPU_FAULTS, *(cpu_fault((20 + i) * MS, VA + i * 4 * KIB) for i in range(8)))
    (after,) = ask(export, ping_pong)
    assert after.gain.ns == before.gain.ns


def test_a_small_part_that_gpus_write_now_and_then_is_kept_at_the_cpu(ask):
    (advice,) = ask(allocated(rounds(4, access=WRITE), 8 * MIB), place_and_map)
    assert advice.title == (
        "Keep allocation 0 (8.00 MiB at 0x7f0000000000) at the CPU and map it for `add`"
    )
    assert advice.calls[:2] == (
        "cudaMemAdvise(p0, 8388608, cudaMemAdviseSetPreferredLocation, cudaCpuDeviceId);",
        "cudaMemAdvise(p0, 8388608, cudaMemAdviseSetAccessedBy, 0);",
    )
    assert "only 64.00 KiB of it ever moved" in advice.finding
    assert advice.gain.ns == 4 * SERVICE + 4 * PULL


def test_what_moves_as_a_whole_and_is_written_has_no_better_place(ask):
    said = ask(allocated(rounds(4, access=WRITE), PIECE), place_and_map, ping_pong, read_mostly)
    assert all(isinstance(each, Silent) for (each,) in said)


def crowded():
    """Let ten VA blocks with 64 KiB each, and one that is used wholly, push each other out."""
    export = Export()
    table, dense = VA, VA + 32 * MIB
    allocated(allocated(export, 20 * MIB, table), 2 * MIB, dense)
    moment = iter(range(MS, 100 * MS, MS))

    def comes(va, size):
        start = next(moment)
        export.add(GPU_FAULTS, gpu_fault(start, start + 100 * US, va))
        export.add(KERNEL, kernel(start - 5 * US, start + 150 * US))
        export.add(MEMCPY, migration(start + 50 * US, start + 90 * US, size, va))

    def leaves(va, size):
        start = next(moment) - MS + 10 * US  # while the batch that comes next is serviced
        export.add(MEMCPY, migration(start, start + 20 * US, size, va, kind=DTOH, cause=EVICTION))

    blocks = [table + i * 2 * MIB for i in range(10)]
    comes(dense, 2 * MIB)
    for _ in range(2):
        for va in blocks:
            comes(va, PIECE)
        leaves(dense, 2 * MIB)
        comes(dense, 2 * MIB)
        for va in blocks:
            leaves(va, PIECE)
    return export


def test_what_is_evicted_in_small_parts_is_kept_at_the_cpu(ask):
    (advice,), (said,) = ask(crowded(), place_and_map, capacity_thrash)
    assert (advice.target.va, advice.target.kernel) == (VA, "add")
    values = {each.label: each.value for each in advice.numbers}
    # Of 22 evictions 20 took 64 KiB of the table, and 2 took all of the other array.
    assert values["evictions of it"] == 20
    assert values["of all evictions"] == pytest.approx(20 / 22)
    assert values["on average of a VA block"] == PIECE
    assert "20 evictions (91% of all)" in advice.finding
    assert said.is_known
    assert "place_and_map" in said.reason


def test_a_part_of_a_capture_does_not_tell_what_is_evicted_in_small_parts(ask):
    said = ask(crowded(), place_and_map, capacity_thrash, time=(MS, 40 * MS))
    assert [each.is_known for (each,) in said] == [False, False]


def test_every_kind_of_kind_is_an_advice_or_a_reason(ask):
    for answers in ask(Export(), read_mostly, place_and_map, ping_pong, capacity_thrash):
        assert answers
        assert all(isinstance(each, Advice | Silent) for each in answers)


def test_other_directions_are_no_turns(ask):
    export = allocated(Export(), PIECE)
    for i in range(6):
        export.add(MEMCPY, migration(i * MS, i * MS + 50 * US, PIECE, kind=HTOD))
    (said,) = ask(export, ping_pong)
    assert isinstance(said, Silent)
