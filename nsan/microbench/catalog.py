"""What can be run, in words: the patterns of ``uvm_bench`` and the values of the axes.

The programs have the same names (`--help` prints them), and tests compare the two.
"""

from __future__ import annotations

from typing import Final

SCRIPTS: Final = {
    "torch_uvm": "training steps of a PyTorch model, with or without PyTorch's cache; needs PyTorch",
}
"""What can be run and need not be compiled, by name."""

PATTERNS: Final = {
    "stream": "a = b + s c over three arrays of doubles",
    "stride": "one word of each stride",
    "random": "every word of an array once, in an order that only the seed knows",
    "gather": "rows of a table, a few of them most of the time (Zipf)",
    "stencil2d": "five points of a grid, two buffers in turn",
    "pointer-chase": "one thread follows a cycle through all nodes",
    "ping-pong": "CPU and GPU write the same pages in turn",
    "broadcast-read": "all blocks read one small buffer, which the CPU writes anew each time",
    "first-touch": "the GPU writes memory that nobody has touched",
    "signature": "one thread reads one page after another: the prefetcher's signature",
    "hotspot": "Rodinia's hotspot: temperature and power of a chip",
    "vector-add": "c = a + b, NVIDIA's first sample",
}
"""Access patterns by name, and what each is."""

ALLOCATORS: Final = {
    "raw": "cudaMallocManaged and cudaFree for each tensor",
    "caching": "blocks of a caching allocator with PyTorch's rules, over managed segments",
}
PREFETCHES: Final = {
    "none": "no cudaMemPrefetchAsync",
    "whole": "all of it before it is used; not of torch_uvm",
    "ahead": "the next part while one is used",
}
ADVICES: Final = {
    "none": "no cudaMemAdvise",
    "read-mostly": "copies of pages that are read stay on both sides",
    "preferred-cpu": "pages stay with the CPU, and the GPU reads them from there",
    "accessed-by": "the GPU gets a mapping in place of a migration",
}
EXIT_STATUSES: Final = {
    0: "done",
    1: "a CUDA call failed or a result is wrong, or nsan failed",
    2: "the command line",
    3: "it ran, and its trace has no Unified Memory data",
    5: "no driver, or no GPU",
    6: "this machine cannot do it",
    7: "it could leave the machine without memory",
}
"""What `nsan bench run` ends with; from 5 on they are the program's own."""
