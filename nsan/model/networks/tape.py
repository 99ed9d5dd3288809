"""Writes a tensor program down while layers run, and counts references as PyTorch does.

A tensor's memory is dropped at the moment when its last reference goes: that of a Python variable, of a node of
the autograd graph, or of a gradient on its way. Views and in-place results share the memory of their origin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nsan.model.networks.layers import FLOAT_BYTES
from nsan.model.networks.tensors import (
    KEPT_WORKSPACES,
    Compute,
    Create,
    Drop,
    HostWrite,
    Operation,
    Phase,
    Tensor,
)


class Storage:
    """The memory of one tensor, shared by its views."""

    __slots__ = ("n_bytes", "name", "references")

    def __init__(self, name: str, n_bytes: int) -> None:
        self.name, self.n_bytes, self.references = name, n_bytes, 1


@dataclass(frozen=True, slots=True)
class Value:
    """One reference to a tensor.

    Attributes
    ----------
    storage : Storage
        Its memory.
    shape : tuple of int
        Its shape; a view may differ from its origin.
    needs_gradient : bool
        Whether backward goes on through it.
    """

    storage: Storage
    shape: tuple[int, ...]
    needs_gradient: bool = True

    @property
    def name(self) -> str:
        """Name of the memory."""
        return self.storage.name

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def viewed(self, *shape: int) -> Value:
        """Give the same reference another shape."""
        return replace(self, shape=shape)


Backward = Callable[[Value, "Value | None"], "Value | None"]
"""The backward pass of a layer: ``backward(gradient, so_far)``.

It takes over the gradient of the output, and what other users of the input have contributed to the gradient of
the input so far; it gives back the gradient of the input, or None if the input needs none.
"""


def expected(gradient: Value | None) -> Value:
    """Give the gradient of something inside a network, where every layer gives one.

    Raises
    ------
    TypeError
        If there is none: a layer table is wrong.
    """
    if gradient is None:
        raise TypeError("a layer inside a network gives no gradient of its input")
    return gradient


class Tape:
    """The program that has been written so far, and what is alive.

    Parameters
    ----------
    gemm_workspace_bytes, epilogue_workspace_bytes : int
        What cuBLAS and cuBLASLt get once per thread; the forward and the backward pass run in two.
    conv_workspace_cap_bytes : int
        The most that one convolution may ask for.

    Attributes
    ----------
    operations : list of Operation
        The program.
    held : dict of str to Value
        Parameters, buffers, optimizer states and inputs, by name.
    gradients : dict of str to Value
        Gradients of parameters, by the parameter's name.
    sparse_reads : dict of str to int
        For lookups, by the name of the kernel: bytes of the table that are read at most.
    step : int
        The step that is being written; 0 before the first.
    """

    def __init__(
        self,
        *,
        gemm_workspace_bytes: int,
        epilogue_workspace_bytes: int,
        conv_workspace_cap_bytes: int,
    ) -> None:
        self.gemm_workspace_bytes = gemm_workspace_bytes
        self.epilogue_workspace_bytes = epilogue_workspace_bytes
        self.conv_workspace_cap_bytes = conv_workspace_cap_bytes
        self.operations: list[Operation] = []
        self.held: dict[str, Value] = {}
        self.gradients: dict[str, Value] = {}
        self.sparse_reads: dict[str, int] = {}
        self.step = 0
        self.phase = ""
        self._lives: dict[str, int] = {}
        self._frames: list[list[Value]] = [[]]
        self._made: set[str] = set()

    def begin_phase(self, name: str) -> None:
        """Mark the begin of a phase."""
        self.phase = name
        self.operations.append(Phase(name))

    def new(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        role: str = "activation",
        element_bytes: int = FLOAT_BYTES,
    ) -> Value:
        """Allocate a tensor and take the first reference to it."""
        life = f"{name}#{self.step}" if self.step else name
        self._lives[life] = self._lives.get(life, 0) + 1
        if self._lives[life] > 1:
            life = f"{life}.{self._lives[life]}"
        n_bytes = math.prod(shape) * element_bytes
        self.operations.append(Create(Tensor(life, n_bytes, role)))
        return Value(Storage(life, n_bytes), shape)

    def hold(self, value: Value) -> Value:
        """Take one more reference."""
        value.storage.references += 1
        return value

    def release(self, *values: Value) -> None:
        """Give references back; the memory goes with the last one."""
        for value in values:
            value.storage.references -= 1
            if value.storage.references == 0:
                self.operations.append(Drop(value.name))

    def compute(
        self,
        name: str,
        reads: tuple[Value, ...],
        writes: tuple[Value, ...],
        flops: float = 0.0,
    ) -> None:
        """Launch a kernel."""
        names = tuple(dict.fromkeys(value.name for value in reads))
        written = tuple(dict.fromkeys(value.name for value in writes))
        self.operations.append(Compute(name, names, written, float(flops)))

    def host_write(self, value: Value) -> None:
        """Let the CPU fill a tensor."""
        self.operations.append(HostWrite(value.name))

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Keep what a Python function holds in its locals until it returns."""
        self._frames.append([])
        yield
        self.release(*self._frames.pop())

    def keep(self, value: Value) -> Value:
        """Hand a reference over to the running function's locals."""
        self._frames[-1].append(value)
        return value

    def add_gradient(self, name: str, so_far: Value | None, value: Value) -> Value:
        """Add a contribution to a gradient: in place if nobody else uses what is there."""
        if so_far is None:
            return value
        if so_far.storage.references == 1:
            total = self.hold(so_far)
        else:
            total = self.new(f"{name}.sum", so_far.shape)
        self.compute(f"{name} gradient add", (so_far, value), (total,), value.count)
        self.release(so_far, value)
        return total

    def set_gradient(self, parameter: str, value: Value) -> None:
        """Let a parameter keep its gradient; a second one makes a third, the sum.

        The first gradient of a tied weight comes through a transposed view, into which autograd does not add.
        """
        before = self.gradients.get(parameter)
        self.gradients[parameter] = value
        if before is None:
            return
        total = self.new(f"{parameter}.grad", value.shape, role="gradient")
        self.compute(f"{parameter} gradient add", (before, value), (total,), value.count)
        self.release(before, value)
        self.gradients[parameter] = total

    def use_gemm(self, *, epilogue: bool = False) -> None:
        """Make the workspaces of cuBLAS at the first matrix product of a thread.

        In a real history (torch 2.9) the first linear layer allocates its output, then 8 519 680 B for cuBLAS,
        then 1 MiB for cuBLASLt, which computes the bias with the product; both stay.
        """
        thread = "backward" if self.phase == "backward" else "forward"
        self._make_once(f"{KEPT_WORKSPACES}.{thread}", self.gemm_workspace_bytes)
        if epilogue:
            self._make_once(f"{KEPT_WORKSPACES}.lt.{thread}", self.epilogue_workspace_bytes)

    def _make_once(self, name: str, n_bytes: int) -> None:
        if n_bytes and name not in self._made:
            self._made.add(name)
            self.operations.append(Create(Tensor(name, n_bytes, "workspace")))

    def scratch(self, name: str, n_bytes: int) -> tuple[Value, ...]:
        """Allocate the workspace of one convolution, if it needs any."""
        n_bytes = min(n_bytes, self.conv_workspace_cap_bytes)
        if n_bytes <= 0:
            return ()
        return (self.new(f"{name}.workspace", (n_bytes,), role="workspace", element_bytes=1),)
