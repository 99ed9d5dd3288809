"""Turns a layer table into the operations of training steps, as eager PyTorch 2 runs them in fp32.

Checked against torch 2.13.0 (CPU, two steps, small sizes): the allocations and frees of all four networks have the
same sizes in the same order (frees that follow each other were compared as a set; additions to gradients, which
are in place but for a tied weight, by torch's memory profiler). Not checked so is what only a GPU has: workspaces,
the temporary of softmax's backward pass, those of the loss. What kernels touch, and their FLOPs, is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from nsan.errors import ProgramError
from nsan.model.networks.layers import INT64_BYTES, Network, State, parameter_count, states
from nsan.model.networks.passes import LOSSES, forward
from nsan.model.networks.tape import Tape, Value, expected
from nsan.model.networks.tensors import (
    Compute,
    Create,
    Operation,
    Phase,
    Step,
    TensorProgram,
    live_bytes,
    peak,
)
from nsan.units import KIB, MIB

N_CHANNELS: Final = 3
CUBLAS_WORKSPACE_BYTES: Final = 2 * 4096 * KIB + 8 * 16 * KIB
"""``CUBLAS_WORKSPACE_CONFIG`` as PyTorch sets it, ``:4096:2:16:8``; 32 MiB on Hopper."""

ASSUMPTIONS: Final = (
    "eager PyTorch 2, fp32, one GPU, one stream; autograd frees what it saved as soon as a node has run",
    "weights are initialised by the CPU and copied, one tensor each, in order of the forward pass",
    "a step is a function: inputs, output and loss live until its end",
    "gradients are dropped at the start of the next step (zero_grad with set_to_none)",
    "the optimizer is the fused one: one kernel per parameter, no temporaries; the foreach AdamW "
    "would need a temporary of the size of all parameters",
    "cuBLAS: 8 519 680 B in each of two threads, kept, and 1 MiB for cuBLASLt where a bias is added "
    "(as in a real history of torch 2.9; later versions share one); allocated, not counted as touched",
    "cuDNN workspaces are assumed: the unfolded matrix of one image per convolution, at most 32 MiB, "
    "none for 1 x 1; batch norm needs none",
    "FLOPs: 2 M N K for products and convolutions, a few per element elsewhere",
)
"""What a program takes for granted, in words."""


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    Attributes
    ----------
    batch : int, optional
        Images or texts per step; by default the network's.
    extent : int, optional
        Side of the images in pixels, or tokens per text; by default the network's.
    steps : int, default 2
        Training steps.
    varying : bool, default False
        From step to step the texts have other lengths: each of the batch between a quarter of ``extent`` and
        all of it, padded to the longest. For images the batch varies instead, between its half and all of it.
    seed : int, default 0
        Of what varies.
    gemm_workspace_bytes : int
        What cuBLAS keeps per thread.
    epilogue_workspace_bytes : int
        What cuBLASLt keeps.
    conv_workspace_cap_bytes : int
        The most that a convolution may ask for; 0: none.
    """

    batch: int | None = None
    extent: int | None = None
    steps: int = 2
    varying: bool = False
    seed: int = 0
    gemm_workspace_bytes: int = CUBLAS_WORKSPACE_BYTES
    epilogue_workspace_bytes: int = MIB
    conv_workspace_cap_bytes: int = 32 * MIB


def training_program(network: Network, training: Training | None = None) -> TensorProgram:
    """Write down training steps of a network.

    Parameters
    ----------
    network : Network
        The layer table.
    training : Training, optional
        By default the network's batch and extent, 2 steps.

    Returns
    -------
    TensorProgram
        Creation of the weights, then the steps: inputs, forward, backward, update. Modelled, like its facts:

        - ``parameter_count``; ``parameter_bytes``, ``buffer_bytes``, ``optimizer_bytes`` (after the first step)
        - ``optimizer``, ``batch``, ``extent``, ``steps``: what was run
        - ``peak_bytes``, ``peak_operation``, ``peak_bytes_by_role``: of live tensors, without rounding
        - ``per_step``: one dict per step: ``step``, ``batch``, ``extent``, ``n_operations``, ``n_kernels``,
          ``n_tensors`` (created), ``flops``, ``read_bytes``, ``written_bytes``, ``peak_bytes``,
          ``saved_bytes`` (of the role activation when the backward pass begins)
        - ``sparse_reads``: kernel name to the bytes that it reads of its largest input, where not all
        - ``assumptions``: in words

    Raises
    ------
    ProgramError
        If a number is out of its bounds.
    """
    training = training or Training()
    batch, extent = _checked(network, training)
    tape = Tape(
        gemm_workspace_bytes=training.gemm_workspace_bytes,
        epilogue_workspace_bytes=training.epilogue_workspace_bytes,
        conv_workspace_cap_bytes=training.conv_workspace_cap_bytes,
    )
    _make_states(tape, network)
    sizes = tuple(_sizes(network, training, batch, extent))
    for number, size in enumerate(sizes, start=1):
        tape.step = number
        tape.operations.append(Step(number))
        _step(tape, network, *size)
    operations = tuple(tape.operations)
    facts = {
        **_facts(network, operations),
        "batch": batch,
        "extent": extent,
        "steps": training.steps,
        "per_step": _per_step(operations, sizes, tape.sparse_reads),
        "sparse_reads": dict(tape.sparse_reads),
        "assumptions": ASSUMPTIONS,
    }
    return TensorProgram(network.name, operations, facts)


def _checked(network: Network, training: Training) -> tuple[int, int]:
    batch = network.batch if training.batch is None else training.batch
    extent = network.extent if training.extent is None else training.extent
    what = "tokens per text" if network.is_text else "pixels a side"
    for value, low, high, name in (
        (batch, 1, 1 << 20, "a batch"),
        (extent, network.smallest, network.largest, what),
        (training.steps, 1, 1 << 20, "steps"),
    ):
        if not low <= value <= high:
            problem = f"{network.name} cannot be trained with {value} for {name}"
            raise ProgramError(problem, f"Choose {low} to {high}")
    sizes = (
        training.gemm_workspace_bytes,
        training.epilogue_workspace_bytes,
        training.conv_workspace_cap_bytes,
    )
    if min(sizes) < 0:
        raise ProgramError(f"A workspace of {min(sizes)} B cannot be", "Choose 0 or more")
    return batch, extent


def _sizes(
    network: Network, training: Training, batch: int, extent: int
) -> Iterator[tuple[int, int]]:
    """Yield batch and extent of each step."""
    random = np.random.default_rng(training.seed)
    for _ in range(training.steps):
        if not training.varying:
            yield batch, extent
        elif network.is_text:
            shortest = max(network.smallest, extent // 4)
            yield batch, int(random.integers(shortest, extent, size=batch, endpoint=True).max())
        else:
            yield int(random.integers(max(batch // 2, 1), batch, endpoint=True)), extent


def _make_states(tape: Tape, network: Network) -> None:
    for state in states(network.body):
        role = "parameter" if state.is_parameter else "buffer"
        value = tape.new(state.name, state.shape, role=role, element_bytes=state.element_bytes)
        tape.held[state.name] = value
        tape.host_write(value)


def _parameters(network: Network) -> list[State]:
    return [state for state in states(network.body) if state.is_parameter]


def _step(tape: Tape, network: Network, batch: int, extent: int) -> None:
    tape.release(*tape.gradients.values())
    tape.gradients.clear()
    inputs = [_input(tape, what, network, batch, extent) for what in network.inputs]
    tape.begin_phase("forward")
    output, back = forward(tape, network.body, inputs[0])
    loss, back_loss = LOSSES[network.loss](tape, output, inputs[-1])
    tape.begin_phase("backward")
    one = tape.new("loss.grad", ())
    tape.compute("loss ones fill", (), (one,))
    back(expected(back_loss(tape.hold(one), None)), None)
    tape.release(one)
    tape.begin_phase("update")
    if tape.step == 1:
        _make_optimizer(tape, network)
    for state in _parameters(network):
        _update(tape, network, state)
    tape.release(*inputs, output, loss)


def _input(tape: Tape, what: str, network: Network, batch: int, extent: int) -> Value:
    if what == "images":
        value = tape.new(what, (batch, N_CHANNELS, extent, extent), role="input")
        value = Value(value.storage, value.shape, needs_gradient=False)
    elif what == "targets":
        width = next(s.shape[0] for s in reversed(_parameters(network)))
        value = tape.new(what, (batch, width), role="input")
    else:
        shape = (batch, extent) if network.is_text else (batch,)
        value = tape.new(what, shape, role="input", element_bytes=INT64_BYTES)
    tape.host_write(value)
    tape.held[what] = value
    return value


def _make_optimizer(tape: Tape, network: Network) -> None:
    """Make the states of all parameters before the first update, as PyTorch does."""
    for state in _parameters(network):
        if network.optimizer == "sgd":
            name = f"{state.name}.momentum_buffer"
            tape.held[name] = _kept(tape, name, state.shape)
            continue
        for what, shape in (("step", ()), ("exp_avg", state.shape), ("exp_avg_sq", state.shape)):
            name = f"{state.name}.{what}"
            tape.held[name] = _kept(tape, name, shape)
            tape.compute(f"adamw zero fill {name}", (), (tape.held[name],))


def _kept(tape: Tape, name: str, shape: tuple[int, ...]) -> Value:
    return tape.new(name, shape, role="optimizer")


def _update(tape: Tape, network: Network, state: State) -> None:
    parameter, gradient = tape.held[state.name], tape.gradients[state.name]
    if network.optimizer == "sgd":
        momentum = tape.held[f"{state.name}.momentum_buffer"]
        # The first update copies the gradient into the momentum, which holds nothing yet.
        before = (momentum,) if tape.step > 1 else ()
        reads, writes = (parameter, gradient, *before), (parameter, momentum)
        tape.compute(f"sgd {state.name}", reads, writes, 4.0 * state.count)
        return
    own = tuple(tape.held[f"{state.name}.{what}"] for what in ("exp_avg", "exp_avg_sq", "step"))
    name = f"adamw {state.name}"
    tape.compute(name, (parameter, gradient, *own), (parameter, *own), 14.0 * state.count)


def _facts(network: Network, operations: tuple[Operation, ...]) -> dict[str, object]:
    found = peak(operations)
    made: dict[str, int] = {}
    for operation in operations:
        if isinstance(operation, Create):
            role = operation.tensor.role
            made[role] = made.get(role, 0) + operation.tensor.n_bytes
    return {
        "parameter_count": parameter_count(network.body),
        "parameter_bytes": made["parameter"],
        "buffer_bytes": made.get("buffer", 0),
        "optimizer_bytes": made["optimizer"],
        "optimizer": network.optimizer,
        "peak_bytes": found.n_bytes,
        "peak_operation": found.operation,
        "peak_bytes_by_role": found.by_role,
    }


def _per_step(
    operations: tuple[Operation, ...],
    sizes: tuple[tuple[int, int], ...],
    sparse_reads: dict[str, int],
) -> tuple[dict[str, float], ...]:
    n_bytes: dict[str, int] = {}
    rows: list[dict[str, float]] = []
    for operation, by_role in zip(operations, live_bytes(operations), strict=True):
        if isinstance(operation, Create):
            n_bytes[operation.tensor.name] = operation.tensor.n_bytes
        if isinstance(operation, Step):
            rows.append(_empty_row(operation.number, *sizes[len(rows)]))
        if not rows:
            continue
        row = rows[-1]
        row["n_operations"] += 1
        row["n_tensors"] += isinstance(operation, Create)
        row["peak_bytes"] = max(row["peak_bytes"], sum(by_role.values()))
        if operation == Phase("backward"):
            row["saved_bytes"] = by_role["activation"]
        if isinstance(operation, Compute):
            _count_kernel(row, operation, n_bytes, sparse_reads)
    return tuple(rows)


def _empty_row(step: int, batch: int, extent: int) -> dict[str, float]:
    counts = dict.fromkeys(
        ("n_operations", "n_kernels", "n_tensors", "read_bytes", "written_bytes", "peak_bytes"), 0
    )
    return {
        "step": step,
        "batch": batch,
        "extent": extent,
        **counts,
        "saved_bytes": 0,
        "flops": 0.0,
    }


def _count_kernel(
    row: dict[str, float], kernel: Compute, n_bytes: dict[str, int], sparse_reads: dict[str, int]
) -> None:
    read = [n_bytes[name] for name in kernel.reads]
    if kernel.name in sparse_reads:
        read.remove(max(read))
        read.append(sparse_reads[kernel.name])
    row["n_kernels"] += 1
    row["read_bytes"] += sum(read)
    row["written_bytes"] += sum(n_bytes[name] for name in kernel.writes)
    row["flops"] += kernel.flops
