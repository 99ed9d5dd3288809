"""The last rules of the verdict: where it happens, and how far to trust what is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsan.report.blocks import quoted
from nsan.report.sections.saying import part_of
from nsan.report.sentences import KERNELS, TELLING, Said, capital, not_known
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes

if TYPE_CHECKING:
    from nsan.report.evidence import Evidence, Place


def where(evidence: Evidence) -> list[Said]:
    """Name the kernel, the range and the allocation that matter most."""
    said = [*_kernel(evidence), *_range(evidence.range), *_allocation(evidence.allocation)]
    if said:
        return said
    if evidence.moved is None:
        return [Said(f"Not known, {not_known(evidence)}", "")]
    if evidence.moved:
        asked = (*KERNELS, "faults_by_nvtx", "faults_by_allocation")
        return [Said("No kernel, range or allocation stands out", "", asked)]
    return [Said("Nothing moved, so there is no place to name", "")]


def _kernel(evidence: Evidence) -> list[Said]:
    held, came = evidence.held, evidence.to_gpu_bytes
    if 2 * evidence.alone_bytes > came:
        part = capital(part_of(evidence.alone_bytes, came))
        text = f"{part} of what came to GPUs came while no kernel was seen to run"
        return [Said(text, "derived", KERNELS)]
    if held is not None and held.in_bytes:
        part = part_of(held.in_bytes, came)
        text = f"Kernel {quoted(held.name)}: {part} of what came to GPUs"
        return [Said(text, "derived", KERNELS)]
    if held is not None and held.n_rows and evidence.n_fault_rows:
        n, n_all = held.n_rows, evidence.n_fault_rows
        part = "all" if n == n_all else f"{share(n / n_all)} of"
        return [Said(f"Kernel {quoted(held.name)}: {part} GPU fault rows", "derived", KERNELS)]
    return []


def _range(place: Place | None) -> list[Said]:
    if place is None or not place.bytes or place.bytes < TELLING * place.all_bytes:
        return []
    part = part_of(place.bytes, place.all_bytes)
    whose = "Launched in NVTX range" if place.is_by_launch else "NVTX range"
    text = f"{whose} {quoted(place.name)}: {part} of what came to GPUs"
    return [Said(text, "derived", ("faults_by_nvtx",))]


def _allocation(place: Place | None) -> list[Said]:
    if place is None or not place.bytes:
        return []
    part, size = part_of(place.bytes, place.all_bytes), format_bytes(place.size_bytes)
    what, kind = ("Memory", "reconstructed") if place.is_guessed else ("Allocation", "derived")
    text = f"{what} {quoted(place.name)} ({size}): {part} of what moved"
    return [Said(text, kind, ("faults_by_allocation",))]


def trust(evidence: Evidence) -> list[Said]:
    """Say what the figures stand on, and what they cannot say."""
    n_failed = sum(status == "fail" for status in evidence.checks.values())
    said = {
        "nsan's model of the driver made this trace, and no GPU": evidence.is_modelled,
        _of_fault_rows(evidence): True,
        _COARSE: evidence.is_coarse,
        "nvprof does not print why memory moved": evidence.is_nvprof
        and evidence.bytes_of("htod", "unknown"),
        _LOST.get(evidence.checks.get("lost_rows", ""), ""): True,
        "On this platform little traffic does not mean that data is local": "platform"
        in evidence.checks,
        f"{counted(n_failed, 'check')} of the capture failed, see above": n_failed,
        "This is a part of the capture: what came before, or is elsewhere, is left out": evidence.is_part,
    }
    return [Said(text, "") for text, holds in said.items() if holds]


_COARSE: Final = (
    "Start times are coarse, so it is not known when copies overlapped and how long GPUs were busy"
)


def _of_fault_rows(evidence: Evidence) -> str:
    if evidence.answers.get("gpu_faults") != "recorded":
        return (
            "Without rows of GPU page faults, batches and waits are put together from copies, and first "
            "touches do not show"
        )
    if not evidence.n_fault_rows:
        return "GPU page faults were recorded, and there was none"
    rows = "A GPU fault row is one batch of the driver, not one fault"
    slow = "; to record them slows a program, so compare times only with runs recorded alike"
    return rows + slow * (not evidence.is_modelled)


_LOST: Final = {
    "warn": "Rows are missing, so sums are lower bounds",
    "unknown": "Whether rows were lost cannot be told",
    "ok": "No sign of lost rows",
}
