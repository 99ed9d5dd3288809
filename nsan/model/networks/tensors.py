"""The words of a tensor program, a checker of programs, and what lives when.

A tensor program says what a training loop does to GPU memory and in which order: tensors come and go,
kernels read and write them. It knows no addresses: an allocator decides those. A word is a small frozen
dataclass, an operation is one of ``Create``, ``Drop``, ``Compute``, ``HostWrite``, ``Step``, ``Phase``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

ROLES: Final = (
    "parameter",
    "gradient",
    "optimizer",
    "activation",
    "workspace",
    "input",
    "buffer",
)
"""What a tensor is for.

``gradient`` is the gradient of a parameter; ``activation`` is every other tensor that forward or backward makes:
outputs, what autograd saves (masks, indices, statistics), gradients of activations, temporaries, losses.
``workspace`` is scratch of cuBLAS and cuDNN. ``buffer`` is state of a module that is no parameter (running
statistics of a batch norm, a causal mask).
"""

PHASES: Final = ("forward", "backward", "update")
"""The phases of a step, in order."""

MOST_TENSORS: Final = 12
"""As many different tensors may one kernel use."""

KEPT_ROLES: Final = frozenset({"parameter", "gradient", "optimizer", "buffer"})
"""Roles whose tensors may outlive the program."""

KEPT_WORKSPACES: Final = "cublas.workspace"
"""Workspaces whose name begins so are made once and kept, as PyTorch keeps those of cuBLAS."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's memory, from its creation to its drop.

    Attributes
    ----------
    name : str
        Unique: a name has one life in a program. ``#3`` at its end means "made in step 3".
    n_bytes : int
        What PyTorch asks its allocator for, at least 1.
    role : str
        One of ``ROLES``.
    """

    name: str
    n_bytes: int
    role: str


@dataclass(frozen=True)
class Create:
    """The memory of a tensor is allocated; nothing is touched."""

    tensor: Tensor


@dataclass(frozen=True)
class Drop:
    """The last reference to a tensor is gone; its memory is freed."""

    name: str


@dataclass(frozen=True)
class Compute:
    """One kernel.

    Attributes
    ----------
    name : str
        What it does, and for which layer: ``layer1.0.conv2 convolution forward``.
    reads, writes : tuple of str
        Names of tensors; one that is changed in place is in both. Every tensor is used whole, except by
        lookups in an embedding table (``facts["sparse_reads"]``).
    flops : float
        Additions and multiplications; a matrix product of M x K and K x N counts ``2 M N K``.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: float


@dataclass(frozen=True)
class HostWrite:
    """The CPU fills a tensor: an input batch, initial weights."""

    name: str


@dataclass(frozen=True)
class Step:
    """A training step begins; steps count from 1."""

    number: int


@dataclass(frozen=True)
class Phase:
    """A phase of the step begins: one of ``PHASES``."""

    name: str


Operation = Create | Drop | Compute | HostWrite | Step | Phase


@dataclass(frozen=True)
class TensorProgram:
    """What a training loop does to GPU memory, in order.

    Attributes
    ----------
    name : str
        The network.
    operations : tuple of Operation
        In the order in which PyTorch would do them, on one stream.
    facts : dict
        Counts and formulas; see :func:`nsan.model.networks.training.training_program`.
    """

    name: str
    operations: tuple[Operation, ...]
    facts: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Peak:
    """When most bytes are alive.

    Attributes
    ----------
    n_bytes : int
        Sum of ``Tensor.n_bytes`` that are alive, without any rounding by an allocator.
    operation : int
        Number of the operation after which it is so for the first time, from 0; -1 if nothing is ever alive.
    by_role : dict of str to int
        The same bytes by role; all of ``ROLES``, in that order.
    """

    n_bytes: int
    operation: int
    by_role: dict[str, int]


def live_bytes(operations: Iterable[Operation]) -> Iterator[dict[str, int]]:
    """Yield after each operation what is alive.

    Parameters
    ----------
    operations : iterable of Operation
        A program that :func:`check` finds right.

    Yields
    ------
    dict of str to int
        Bytes by role. It is the same object every time: copy it to keep it.
    """
    by_role = dict.fromkeys(ROLES, 0)
    alive: dict[str, Tensor] = {}
    for operation in operations:
        match operation:
            case Create(tensor):
                alive[tensor.name] = tensor
                by_role[tensor.role] += tensor.n_bytes
            case Drop(name):
                tensor = alive.pop(name)
                by_role[tensor.role] -= tensor.n_bytes
        yield by_role


def peak(operations: Iterable[Operation]) -> Peak:
    """Find when most bytes are alive.

    Examples
    --------
    >>> a, b = Tensor("a", 8, "input"), Tensor("b", 4, "activation")
    >>> found = peak([Create(a), Drop("a"), Create(b)])
    >>> found.n_bytes, found.operation
    (8, 0)
    """
    best = Peak(0, -1, dict.fromkeys(ROLES, 0))
    for number, by_role in enumerate(live_bytes(operations)):
        total = sum(by_role.values())
        if total > best.n_bytes:
            best = Peak(total, number, dict(by_role))
    return best


def check(program: TensorProgram) -> list[str]:
    """Look for what no program may do.

    Parameters
    ----------
    program : TensorProgram
        Any program.

    Returns
    -------
    list of str
        One sentence per violation, in order: a use before creation or after the drop, a second life of a name,
        a second drop, more than ``MOST_TENSORS`` tensors in one kernel, a size or role that cannot be, steps and
        phases out of order, and, at the end, tensors that were never dropped though they must be (all but
        parameters, buffers, gradients, optimizer states and the kept workspaces). Empty if there is none.
    """
    checker = _Checker()
    for number, operation in enumerate(program.operations):
        checker.look(number, operation)
    left = (t for t in checker.alive.values() if t.role not in KEPT_ROLES)
    never = [
        f"{t.name} ({t.role}) is never dropped"
        for t in left
        if not (t.role == "workspace" and t.name.startswith(KEPT_WORKSPACES))
    ]
    return checker.found + never


class _Checker:
    """What is alive, and what was wrong so far."""

    def __init__(self) -> None:
        self.alive: dict[str, Tensor] = {}
        self.ended: set[str] = set()
        self.found: list[str] = []
        self.step = 0
        self.phase = len(PHASES)

    def look(self, number: int, operation: Operation) -> None:
        """Take the next operation."""
        match operation:
            case Create(tensor):
                problems = self._create(tensor)
            case Drop(name):
                problems = self._drop(name)
            case Compute():
                problems = self._compute(operation)
            case HostWrite(name):
                problems = self._missing((name,))
            case Step() | Phase():
                problems = self._mark(operation)
        self.found += [f"operation {number}: {problem}" for problem in problems]

    def _create(self, tensor: Tensor) -> list[str]:
        problems = []
        if tensor.name in self.alive or tensor.name in self.ended:
            problems.append(f"{tensor.name} is created a second time")
        if tensor.n_bytes < 1:
            problems.append(f"{tensor.name} has {tensor.n_bytes} bytes")
        if tensor.role not in ROLES:
            problems.append(f"{tensor.name} has the role {tensor.role!r}")
        self.alive[tensor.name] = tensor
        return problems

    def _drop(self, name: str) -> list[str]:
        if name not in self.alive:
            how = "a second time" if name in self.ended else "before it is created"
            return [f"{name} is dropped {how}"]
        del self.alive[name]
        self.ended.add(name)
        return []

    def _compute(self, kernel: Compute) -> list[str]:
        names = dict.fromkeys((*kernel.reads, *kernel.writes))
        problems = self._missing(tuple(names))
        if len(names) > MOST_TENSORS:
            problems.append(f"{kernel.name} uses {len(names)} tensors, of at most {MOST_TENSORS}")
        if kernel.flops < 0:
            problems.append(f"{kernel.name} has {kernel.flops} FLOPs")
        return problems

    def _missing(self, names: tuple[str, ...]) -> list[str]:
        gone = [name for name in names if name not in self.alive]
        return [
            f"{name} is used {'after its drop' if name in self.ended else 'before it is created'}"
            for name in gone
        ]

    def _mark(self, mark: Step | Phase) -> list[str]:
        if isinstance(mark, Step):
            due, self.step = self.step + 1, mark.number
            ended, self.phase = self.phase, 0
            problems = [f"step {mark.number} where {due} is due"] if mark.number != due else []
            if ended != len(PHASES):
                problems.append(f"a step begins before the {PHASES[ended]} of the last one")
            return problems
        due_phase = PHASES[self.phase] if self.phase < len(PHASES) else "the next step"
        self.phase = min(self.phase + 1, len(PHASES))
        return [f"{mark.name} where {due_phase} is due"] if mark.name != due_phase else []
