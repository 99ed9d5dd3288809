"""How the modelled driver and machine are set: module parameters, capacity, profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nsan.errors import ProgramError
from nsan.model.engine.state import Rules
from nsan.model.profiles import (
    REMOTE_LATENCY_NS,
    GpuProfile,
    HostProfile,
    gpu_profile,
    host_profile,
)
from nsan.uvm.constants import BIG_PAGE_BYTES, FAULT_BATCH_SIZE, VA_BLOCK_BYTES


@dataclass(frozen=True)
class Settings:
    """A machine and its driver.

    Attributes
    ----------
    gpu, host : str
        Profiles, by name.
    n_gpus : int, default 1
        GPUs of the machine.
    capacity_bytes : int, optional
        Memory for managed pages on each GPU, cut to whole 2 MiB chunks; by default what the GPU has
        less 512 MiB.
    prefetch : bool, default True
        The density prefetcher (``uvm_perf_prefetch_enable``).
    prefetch_threshold : int, default 51
        Percent (``uvm_perf_prefetch_threshold``).
    batch_size : int, default 256
        Entries in a batch (``uvm_perf_fault_batch_count``).
    thrashing : bool, default True
        Measures against ping-pong (``uvm_perf_thrashing_enable``).
    thrashing_threshold, pin_after : int
        Quick moves that mark a page; throttles after which it is pinned.
    lapse_ns, nap_ns, pin_ns, epoch_ns : int
        What counts as quick; one throttle; one pin; a quiet time that ends it. ns.
    peer : bool, default True
        GPUs copy from each other directly; else through the CPU.
    shuffle_window, burst, entry_gap_ns : int
        The GPU's front end: how far thread blocks overtake each other after a replay, how many
        entries one writes before the next has its turn, and the time between entries, ns. Not
        known from any document: chosen once for all GPUs and programs.
    seed : int, default 1
        Everything random follows from it.
    """

    gpu: str = "a100-sxm4-40gb"
    host: str = "epyc-7763"
    n_gpus: int = 1
    capacity_bytes: int | None = None
    prefetch: bool = True
    prefetch_threshold: int = 51
    batch_size: int = FAULT_BATCH_SIZE
    thrashing: bool = True
    thrashing_threshold: int = 3
    pin_after: int = 10
    lapse_ns: int = 500_000
    nap_ns: int = 500_000
    pin_ns: int = 150_000_000
    epoch_ns: int = 1_000_000_000
    peer: bool = True
    shuffle_window: int = 1024
    burst: int = 8
    turn_ns: int = 500
    jitter_ns: int = 4_000
    entry_gap_ns: int = 10
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what no driver takes."""
        if not 1 <= self.n_gpus <= 7:
            raise ProgramError(f"{self.n_gpus} GPUs", "The model knows 1 to 7")
        if not 1 <= self.batch_size <= 4096:
            raise ProgramError(f"A batch of {self.batch_size} entries", "Take 1 to 4096")
        if not 1 <= self.prefetch_threshold <= 100:
            raise ProgramError(
                f"A prefetch threshold of {self.prefetch_threshold} %", "Take 1 to 100"
            )
        most = self.gpu_profile.memory_bytes
        if self.capacity_bytes is not None and self.capacity_bytes > most:
            raise ProgramError(
                f"A capacity of {self.capacity_bytes} byte", f"The GPU has {most}: take no more"
            )
        self._check_numbers()
        if self.capacity_chunks < 1:
            raise ProgramError(
                f"A capacity of {self.capacity_bytes} byte", "Take at least one chunk of 2 MiB"
            )

    def _check_numbers(self) -> None:
        """Refuse numbers that would stop the machine, or that its counters cannot hold."""
        limits = {
            "thrashing_threshold": (1, 255),
            "pin_after": (0, 255),
            "shuffle_window": (1, 1 << 20),
            "burst": (1, 4096),
            "turn_ns": (1, 10**9),
            "jitter_ns": (1, 10**9),
            "entry_gap_ns": (1, 10**9),
            "lapse_ns": (0, 10**12),
            "nap_ns": (1, 10**12),
            "pin_ns": (1, 10**12),
            "epoch_ns": (1, 10**15),
            "seed": (0, (1 << 62) - 1),
        }
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ProgramError(f"{name} of {getattr(self, name)}", f"Take {least} to {most}")

    @property
    def gpu_profile(self) -> GpuProfile:
        """The GPU."""
        return gpu_profile(self.gpu)

    @property
    def host_profile(self) -> HostProfile:
        """The host."""
        return host_profile(self.host)

    @property
    def capacity_chunks(self) -> int:
        """Root chunks of 2 MiB for managed pages on each GPU."""
        size = self.capacity_bytes
        if size is None:
            size = self.gpu_profile.memory_bytes - (512 << 20)
        return size // VA_BLOCK_BYTES

    def rules(self) -> Rules:
        """Give the engine's plain numbers."""
        host, gpu = self.host_profile, self.gpu_profile
        replay_ns, retry_ns = int(host.replay_ns), 100
        return Rules(
            page_bytes=host.page_bytes,
            block_pages=VA_BLOCK_BYTES // host.page_bytes,
            leaf_pages=BIG_PAGE_BYTES // host.page_bytes,
            batch_size=self.batch_size,
            prefetch=int(self.prefetch),
            threshold=self.prefetch_threshold,
            thrashing=int(self.thrashing),
            thrash_events=self.thrashing_threshold,
            lapse_ns=self.lapse_ns,
            nap_ns=self.nap_ns,
            pin_after=self.pin_after,
            pin_ns=self.pin_ns,
            epoch_ns=self.epoch_ns,
            peer=int(self.peer),
            shuffle_window=self.shuffle_window,
            burst=self.burst,
            turn_ns=self.turn_ns,
            jitter_ns=self.jitter_ns,
            entry_gap_ns=self.entry_gap_ns,
            retry_ns=retry_ns,
            interrupt_ns=max(int(host.between_ns) - replay_ns - retry_ns, 1_000),
            cold_ns=int(host.cold_ns),
            block_ns=int(host.block_ns),
            page_ns=float(host.page_ns),
            first_block_ns=int(host.first_block_ns),
            fault_ns=float(host.fault_ns),
            skip_ns=int(host.spin_ns),
            replay_ns=replay_ns,
            turnaround_ns=int(gpu.turnaround_ns),
            evict_ns=int(host.evict_ns),
            cpu_fault_ns=int(host.cpu_fault_ns),
            cpu_touch_ns=int(host.cpu_touch_ns),
            wake_ns=5_000,
            remote_ns=REMOTE_LATENCY_NS,
            prefetch_block_ns=int(host.prefetch_block_ns),
            htod_latency_ns=gpu.htod[0] * 1_000,
            htod_ns_per_byte=1 / gpu.htod[1],
            dtoh_latency_ns=gpu.dtoh[0] * 1_000,
            dtoh_ns_per_byte=1 / gpu.dtoh[1],
            dtod_latency_ns=gpu.dtod[0] * 1_000,
            dtod_ns_per_byte=1 / gpu.dtod[1],
        )


DEFAULT_SETTINGS: Final = Settings()
"""One A100 with all its memory, the driver as NVIDIA ships it."""
