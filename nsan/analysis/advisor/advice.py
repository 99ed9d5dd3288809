"""What a rule says: a finding with its numbers and rows, what to do, what that may gain, and how to see that it did.

A rule that has nothing to advise says why it is silent: that a trace is clean is an answer with reasons, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, get_args

from nsan.text import shortened
from nsan.units import format_bytes

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysis.result import Kind

Level = Literal["high", "medium", "low", "info"]
LEVELS: Final[tuple[str, ...]] = get_args(Level)
"""How much an advice is worth, most first; of "info" nothing has to be done."""


_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_WORDS: Final = frozenset(
    [
        "alignas",
        "alignof",
        "and",
        "and_eq",
        "asm",
        "auto",
        "bitand",
        "bitor",
        "bool",
        "break",
        "case",
        "catch",
        "char",
        "char16_t",
        "char32_t",
        "char8_t",
        "class",
        "co_await",
        "co_return",
        "co_yield",
        "compl",
        "concept",
        "const",
        "const_cast",
        "consteval",
        "constexpr",
        "constinit",
        "continue",
        "decltype",
        "default",
        "delete",
        "do",
        "double",
        "dynamic_cast",
        "else",
        "enum",
        "explicit",
        "export",
        "extern",
        "false",
        "float",
        "for",
        "friend",
        "goto",
        "if",
        "inline",
        "int",
        "long",
        "mutable",
        "namespace",
        "new",
        "noexcept",
        "not",
        "not_eq",
        "nullptr",
        "operator",
        "or",
        "or_eq",
        "private",
        "protected",
        "public",
        "register",
        "reinterpret_cast",
        "requires",
        "return",
        "short",
        "signed",
        "sizeof",
        "static",
        "static_assert",
        "static_cast",
        "struct",
        "switch",
        "template",
        "this",
        "thread_local",
        "throw",
        "true",
        "try",
        "typedef",
        "typeid",
        "typename",
        "union",
        "unsigned",
        "using",
        "virtual",
        "void",
        "volatile",
        "wchar_t",
        "while",
        "xor",
        "xor_eq",
        "device",
        "stream",
    ]
)
"""Words that name no variable in a line of ours: those of C++, and those that stand for something else there."""


@dataclass(frozen=True)
class Number:
    """A figure that a finding stands on.

    Attributes
    ----------
    label : str
        What it is, in a few words.
    value : int or float
        How much.
    unit : str
        As of :class:`nsan.analysis.result.Figure`: "ns", "byte", "fraction", "number", or the plural of
        what is counted.
    kind : str
        "recorded", "derived", "reconstructed" or "modelled".
    """

    label: str
    value: int | float
    unit: str
    kind: Kind


@dataclass(frozen=True)
class Rows:
    """Rows of an analysis that a finding stands on.

    Attributes
    ----------
    analysis : str
        Its name; "" for rows of the trace itself.
    frame : DataFrame
        The telling rows, a few, with the columns of the analysis that matter.
    options : mapping of str to str
        Options that it was run with.
    """

    analysis: str
    frame: pl.DataFrame
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What an advice is about, as the trace knows it.

    nsys knows the names of static variables only: other allocations are told by their number, size and address.

    Attributes
    ----------
    allocation : str
        Name of a managed allocation or of a tensor; "" where it has none, or the advice is about none.
    allocation_id : int, optional
        Its number in the process by time of allocation, from 0, as ``faults_by_allocation`` counts.
    bytes : int, optional
        Its size.
    va : int, optional
        Its first byte.
    kernel : str
        Name of a kernel, as the trace has it; "" if it is about none.
    is_guessed : bool
        Its bounds were guessed from addresses, as allocations were not recorded.
    pid : int, optional
        Its process: two of them have the same addresses.
    """

    allocation: str = ""
    allocation_id: int | None = None
    bytes: int | None = None
    va: int | None = None
    kernel: str = ""
    is_guessed: bool = False
    pid: int | None = None

    @property
    def label(self) -> str:
        """Name it for people: "`x`", or "allocation 2 (16.00 MiB at 0x7f0001000000)"."""
        if self.allocation:
            return f"`{shortened(self.allocation, 60)}`"
        if self.va is None:
            return ""
        which = "the memory" if self.allocation_id is None or self.is_guessed else "allocation"
        number = "" if self.allocation_id is None or self.is_guessed else f" {self.allocation_id}"
        size = "" if self.bytes is None else f"{format_bytes(self.bytes)} "
        return f"{which}{number} ({size}at 0x{self.va:x})"

    @property
    def pointer(self) -> str:
        """Name it in a line of C++: its own name where that is one, or ``p2`` for allocation 2."""
        if _NAME.fullmatch(self.allocation) and self.allocation not in _WORDS:
            return self.allocation
        return "p" if self.allocation_id is None else f"p{self.allocation_id}"


@dataclass(frozen=True)
class Gain:
    """What following an advice may save of the time of the run.

    Attributes
    ----------
    ns : int
        Derived or reconstructed: at most this much. Modelled: this much.
    kind : str
        "derived" or "reconstructed" (a bound from the rows of the trace), or "modelled" (the driver model ran
        the program with the change).
    how : str
        In a few words how it was found, as "time in which page faults waited, less that of one copy of it all".
    error_ns : int, optional
        Of a modelled gain: how far off it may be, either way.
    """

    ns: int
    kind: Kind
    how: str
    error_ns: int | None = None


ChangeKind = Literal[
    "prefetch", "no_prefetch", "advise", "first_touch", "fit", "allocator", "prefetcher_off"
]


@dataclass(frozen=True)
class Change:
    """A remedy as a change of the program, exact enough to be tried in the driver model.

    Attributes
    ----------
    kind : str
        "prefetch": ``cudaMemPrefetchAsync`` to ``device`` before each launch of the target's kernel. "no_prefetch": its prefetches are left out. "advise": ``cudaMemAdvise``
        after the program has filled it. "first_touch": the GPU fills it instead of the CPU. "fit": what is
        in use at a time fits into the GPU. "allocator": tensors are allocated in the way ``advice`` names.
        "prefetcher_off": the driver's own prefetcher is off.
    target : Target
        Which allocation, and for a prefetch before which kernel ("": before each that uses it). Without an
        allocation it is about all.
    advice : str
        "read_mostly", "preferred_location" or "accessed_by"; of "allocator" one of the model's names.
    device : int
        GPU, or -1 for the CPU.
    offset_bytes, n_bytes : int, optional
        The part of the allocation; by default all of it.
    """

    kind: ChangeKind
    target: Target = Target()
    advice: str = ""
    device: int = 0
    offset_bytes: int = 0
    n_bytes: int | None = None


@dataclass(frozen=True)
class Advice:
    """One thing to change, and everything that speaks for it.

    Attributes
    ----------
    rule : str
        Name of the rule.
    title : str
        What to do, in one short line that begins with a verb: "Prefetch x before scale".
    finding : str
        What was found: one or two sentences with the numbers that matter.
    numbers : tuple of Number
        What it stands on.
    rows : tuple of Rows
        And the rows.
    remedy : str
        What to do, in a sentence or two, with its price where it has one.
    calls : tuple of str
        The exact lines: C++ calls, PyTorch or RMM settings, options of nsys.
    targets : tuple of Target
        What it is about, what matters most first; empty if it is about no allocation and no kernel.
    check : str
        What would show that it worked, a sentence.
    gate : str
        The same for ``nsan compare BEFORE AFTER --fail-on GATE``; "" if no figure tells.
    gain : Gain, optional
        What it may save; None where no number can be given, and then ``level`` is stated.
    level : str, optional
        Of an advice without a gain in time; else it follows from the gain.
    is_conditional : bool
        It helps only under a condition that the trace does not show, and may cost time without: the title says it.
        Such advice is never "high", makes no other moot, and comes after others of its level.
    changes : tuple of Change
        The remedy for the driver model; empty if it cannot be tried there.
    """

    rule: str
    title: str
    finding: str
    numbers: tuple[Number, ...]
    rows: tuple[Rows, ...]
    remedy: str
    calls: tuple[str, ...]
    targets: tuple[Target, ...]
    check: str
    gate: str = ""
    gain: Gain | None = None
    level: Level | None = None
    is_conditional: bool = False
    changes: tuple[Change, ...] = ()

    @property
    def target(self) -> Target:
        """What it is about most."""
        return self.targets[0] if self.targets else Target()


@dataclass(frozen=True)
class Silent:
    """Why a rule advises nothing.

    Attributes
    ----------
    rule : str
        Name of the rule.
    reason : str
        A sentence: "No page fault brought data while a kernel ran."
    is_known : bool
        False: the capture does not tell, as what the rule looks at was not recorded.
    """

    rule: str
    reason: str
    is_known: bool = True


Said = Advice | Silent
"""What a rule gives, at least one."""
