"""The rules, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from nsan.analysis.advisor.advice import Said
from nsan.analysis.advisor.facts import Facts
from nsan.analysis.advisor.rules import (
    allocator,
    bouncing,
    capacity,
    first_touch,
    fragmentation,
    placement,
    prefetch_back,
    prefetch_harm,
    prefetching,
    recording,
    small_copies,
)


@dataclass(frozen=True)
class Rule:
    """A rule: what it asks, and the function that answers.

    Attributes
    ----------
    name : str
        As an advice names it.
    question : str
        What it looks for, as a question.
    ask : callable
        Takes facts; gives advice, or why there is none.
    yields_to : tuple of str
        Rules whose advice for the same allocation makes this one moot: with ping-pong, a prefetch is no remedy.
    """

    name: str
    question: str
    ask: Callable[[Facts], Iterator[Said]]
    yields_to: tuple[str, ...] = ()


RULES: Final = (
    Rule(
        prefetching.BEFORE_USE,
        "Does a kernel wait for page faults on memory that could have been there before?",
        prefetching.before_use,
        yields_to=(
            "ping_pong",
            "capacity_thrash",
            "first_touch_side",
            "read_mostly",
            "prefetch_harm",
            "allocator_returns_memory",
        ),
    ),
    Rule(
        prefetch_harm.HARM,
        "Do prefetches of the program evict what is needed, or come late?",
        prefetch_harm.prefetch_harm,
    ),
    Rule(
        prefetch_back.BACK,
        "Does the CPU fetch by page faults what a GPU has?",
        prefetch_back.prefetch_back,
        yields_to=("ping_pong", "read_mostly", "place_and_map", "tiny_migrations"),
    ),
    Rule(
        first_touch.SIDE,
        "Does the CPU fill memory that the GPU then writes anew?",
        first_touch.first_touch_side,
        yields_to=("ping_pong", "capacity_thrash"),
    ),
    Rule(
        small_copies.TINY,
        "Does memory move in many tiny pieces?",
        small_copies.tiny_migrations,
        yields_to=("ping_pong", "prefetch_before_use", "first_touch_side", "capacity_thrash"),
    ),
    Rule(
        placement.READ_MOSTLY,
        "Do several processors read the same memory in turn?",
        placement.read_mostly,
    ),
    Rule(
        placement.PLACE,
        "Does memory move of which the GPU uses little?",
        placement.place_and_map,
    ),
    Rule(
        bouncing.PING_PONG,
        "Does a part of memory bounce between processors?",
        bouncing.ping_pong,
    ),
    Rule(
        capacity.THRASH,
        "Does each step bring back what the one before evicted?",
        capacity.capacity_thrash,
        yields_to=("place_and_map", "prefetch_harm", "dead_cache_traffic"),
    ),
    Rule(
        allocator.RETURNS_MEMORY,
        "Does managed memory go back to the driver, and is made again?",
        allocator.returns_memory,
    ),
    Rule(
        allocator.DEAD_TRAFFIC,
        "Does cached memory that no tensor holds move?",
        allocator.dead_traffic,
    ),
    Rule(
        fragmentation.FRAGMENTATION,
        "Would stitching of free blocks save memory?",
        fragmentation.fragmentation,
    ),
    Rule(
        recording.LOST_ROWS,
        "Did the recording lose rows?",
        recording.lost_rows,
    ),
    Rule(
        recording.SWITCHES_MISSING,
        "Was everything recorded that would tell?",
        recording.switches_missing,
    ),
)
"""Every rule."""
