"""Named hosts and GPUs: what their work costs, where the figures are from, and how far to trust them.

The service costs follow host and driver more than GPU; figures of one host on another miss by 40 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nsan.errors import UnknownNameError
from nsan.units import GIB, MIB

REMOTE_LATENCY_NS: Final = 1_000
"""What a thread block waits for an access to the host's memory, beside its time on the link, ns: assumed
for PCIe, on every GPU; no capture shows it."""


@dataclass(frozen=True)
class HostProfile:
    """What the driver's work costs on a host.

    The CPU's service of a block takes ``block_ns + page_ns`` per page moved ``+ fault_ns`` per page
    faulted, and ``first_block_ns`` more the first time. The next batch's service starts
    ``between_ns`` after the last copy.

    Attributes
    ----------
    name : str
        What it is chosen by.
    description : str
        CPU and driver.
    page_bytes : int
        Page size of the host.
    block_ns, page_ns, fault_ns, first_block_ns, between_ns : float
        The coefficients a, b, e, f and R, ns.
    replay_ns : float
        From the last copy of a batch to the end of its replay, a part of ``between_ns``.
    spin_ns : float
        Service of a batch that moves nothing, ns.
    cold_ns : float
        What the first batch of a process costs more, ns.
    cpu_fault_ns, cpu_touch_ns : float
        From a CPU fault to its copy; of a first touch by the CPU, ns.
    prefetch_block_ns : float
        Between two blocks of a user's prefetch, ns.
    evict_ns : float
        Choosing and unmapping a victim, ns; not calibrated, no capture has an eviction.
    source, error : str
        Captures that were fitted, and how well.
    """

    name: str
    description: str
    page_bytes: int
    block_ns: float
    page_ns: float
    fault_ns: float
    first_block_ns: float
    between_ns: float
    replay_ns: float
    spin_ns: float
    cold_ns: float
    cpu_fault_ns: float
    cpu_touch_ns: float
    prefetch_block_ns: float
    evict_ns: float
    source: str
    error: str


@dataclass(frozen=True)
class GpuProfile:
    """A GPU: its size, and what its copies cost, ``latency + bytes / bandwidth`` per row.

    Attributes
    ----------
    name, description, chip : str
        What it is chosen by; what a trace calls it.
    memory_bytes : int
        Memory of the device.
    n_sms, blocks_per_sm : int
        Multiprocessors, and resident thread blocks of 256 threads on each.
    compute_capability : str
        As ``major.minor``.
    memory_bytes_per_s : int
        Bandwidth of its memory.
    htod, dtoh, dtod : (float, float)
        Latency in us and bandwidth in GB/s (10^9 byte). A kernel that uses the host's memory in place
        reads at the rate of htod and writes at that of dtoh: assumed, no capture shows it.
    turnaround_ns : float
        Between two pushes, ns.
    source, error : str
        Captures that were fitted, and how well.
    """

    name: str
    description: str
    chip: str
    memory_bytes: int
    n_sms: int
    blocks_per_sm: int
    compute_capability: str
    memory_bytes_per_s: int
    htod: tuple[float, float]
    dtoh: tuple[float, float]
    dtod: tuple[float, float]
    turnaround_ns: float
    source: str
    error: str


_EPYC: Final = HostProfile(
    "epyc-7763",
    "AMD EPYC 7763, driver 525",
    4096,
    8_000.0,
    200.0,
    700.0,
    45_000.0,
    20_000.0,
    2_400.0,
    5_000.0,
    250_000.0,
    21_000.0,
    9_000.0,
    45_000.0,
    10_000.0,
    "calibration.md 5 (S1 to S6, L1 to L4, I1 to I3)",
    "kernels of the captures 0.78 to 1.21 of the real (S, L); another host x/ 2",
)

HOSTS: Final[dict[str, HostProfile]] = {
    host.name: host
    for host in (
        _EPYC,
        HostProfile(
            "epyc-7713",
            "AMD EPYC 7713, driver 525",
            4096,
            15_000.0,
            470.0,
            0.0,
            130_000.0,
            8_300.0,
            2_400.0,
            5_000.0,
            500_000.0,
            30_000.0,
            9_000.0,
            100_000.0,
            10_000.0,
            "calibration.md 5 (I4, I5)",
            "kernels of the captures 0.77 to 0.98 of the real (I4, I5, C1); another host x/ 2",
        ),
        HostProfile(
            "desktop",
            "desktop with PCIe 3 or 4 (i7-9700K and the like)",
            4096,
            8_000.0,
            350.0,
            0.0,
            31_000.0,
            23_000.0,
            2_400.0,
            5_000.0,
            120_000.0,
            21_000.0,
            9_000.0,
            1_300.0,
            10_000.0,
            "calibration.md 5 (G1, V, H)",
            "kernels of the captures 0.57 to 1.46 of the real (V, H on a stand-in, G1)",
        ),
        HostProfile(
            "v100-x86",
            "x86-64 host of Tesla V100 (AWS p3.2xlarge likely)",
            4096,
            15_000.0,
            250.0,
            2_500.0,
            45_000.0,
            25_000.0,
            8_000.0,
            3_000.0,
            650_000.0,
            21_000.0,
            9_000.0,
            45_000.0,
            10_000.0,
            "fault_rows.md 2.2 (X x86: row durations p50 177 us)",
            "hotspot kernels 0.7 to 1.2 of the real where they are no race, else up to 2.3",
        ),
        HostProfile(
            "power9",
            "IBM POWER9, 64 KiB pages",
            65536,
            30_000.0,
            4_000.0,
            2_500.0,
            45_000.0,
            35_000.0,
            15_000.0,
            3_000.0,
            250_000.0,
            21_000.0,
            9_000.0,
            45_000.0,
            10_000.0,
            "fault_rows.md 2.2 (X POWER9: row durations p50 172 us)",
            "hotspot kernels 0.7 to 1.2 of the real",
        ),
    )
}
"""Hosts by name."""

GPUS: Final[dict[str, GpuProfile]] = {
    gpu.name: gpu
    for gpu in (
        GpuProfile(
            "a100-sxm4-40gb",
            "NVIDIA A100-SXM4-40GB",
            "GA100",
            40 * GIB,
            108,
            8,
            "8.0",
            1_555_000_000_000,
            (1.93, 26.8),
            (1.64, 26.3),
            (1.9, 200.0),
            2_600.0,
            "calibration.md 3 (S, L, I1 to I3)",
            "97 to 100 % of rows within 2 % + 0.5 us in one clock state; device to device not calibrated",
        ),
        GpuProfile(
            "a100-pcie",
            "NVIDIA A100-PCIE-40GB",
            "GA100",
            40 * GIB,
            108,
            8,
            "8.0",
            1_555_000_000_000,
            (2.91, 20.0),
            (2.50, 16.8),
            (2.9, 20.0),
            2_500.0,
            "calibration.md 3 (I4, I5: the slow state)",
            "rows within 2 % + 0.5 us; rate up to 1.5 x in the fast state",
        ),
        GpuProfile(
            "rtx-3060",
            "NVIDIA GeForce RTX 3060",
            "GA106",
            12 * GIB,
            28,
            6,
            "8.6",
            360_000_000_000,
            (1.10, 13.2),
            (0.75, 12.7),
            (1.1, 13.0),
            1_300.0,
            "calibration.md 3 (G1)",
            "rows within 2 % + 0.5 us",
        ),
        GpuProfile(
            "rtx-4060-laptop",
            "NVIDIA GeForce RTX 4060 Laptop GPU",
            "AD107",
            7933 * MIB,
            24,
            6,
            "8.9",
            256_032_000_000,
            (1.38, 12.8),
            (0.73, 13.5),
            (1.4, 13.0),
            2_500.0,
            "calibration.md 3 (V)",
            "rows within 2 % + 0.5 us",
        ),
        GpuProfile(
            "v100-sxm2-16gb",
            "Tesla V100-SXM2-16GB",
            "GV100",
            16 * GIB,
            80,
            8,
            "7.0",
            900_000_000_000,
            (2.5, 11.2),
            (1.6, 12.9),
            (1.9, 24.0),
            2_500.0,
            "rows of the hotspot traces of ../nvprof (x86)",
            "rows within 5 % + 0.5 us",
        ),
    )
}
"""GPUs by name."""


def host_profile(name: str) -> HostProfile:
    """Find a host by name.

    Raises
    ------
    UnknownNameError
        If there is none of that name; the error lists those there are.
    """
    if name not in HOSTS:
        raise UnknownNameError("host profile", name, sorted(HOSTS))
    return HOSTS[name]


def gpu_profile(name: str) -> GpuProfile:
    """Find a GPU by name.

    Raises
    ------
    UnknownNameError
        If there is none of that name; the error lists those there are.
    """
    if name not in GPUS:
        raise UnknownNameError("GPU profile", name, sorted(GPUS))
    return GPUS[name]
