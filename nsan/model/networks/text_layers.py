"""Forward and backward of the layers of text networks: what is allocated, computed and saved.

Each function takes the tape, the layer and a borrowed input, and gives the output with its backward pass
(:data:`nsan.model.networks.tape.Backward`).
"""

from __future__ import annotations

import math
from typing import Final

from nsan.model.networks.image_layers import bias_gradient
from nsan.model.networks.layers import (
    FLOAT_BYTES,
    INT64_BYTES,
    Dropout,
    Embeddings,
    FirstToken,
    Gelu,
    LayerNorm,
    Linear,
    PaddingMask,
    Table,
    Tanh,
)
from nsan.model.networks.tape import Backward, Tape, Value

FEW_INDICES: Final = 3072
"""Up to so many indices the gradient of an embedding needs no sort (ATen ``Embedding.cu``)."""

EXTENDED_MASK: Final = "extended_attention_mask"


def linear(tape: Tape, layer: Linear, x: Value) -> tuple[Value, Backward]:
    """Run a matrix product: it saves its input.

    FLOPs: ``2 * rows * n_in * n_out`` for each of forward, input gradient and weight gradient. The workspaces of
    cuBLAS are allocated, but not counted as touched: which kernels use them is not public.
    """
    weight = tape.held[layer.weight]
    rows = x.count // layer.n_in
    flops = 2.0 * rows * layer.n_in * layer.n_out
    y = tape.new(f"{layer.name}.output", (*x.shape[:-1], layer.n_out))
    tape.use_gemm(epilogue=layer.bias)
    biases = (tape.held[f"{layer.name}.bias"],) if layer.bias else ()
    tape.compute(f"{layer.name} addmm forward", (x, weight, *biases), (y,), flops)
    saved = tape.hold(x)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        tape.use_gemm()
        # With a bias (addmm) the input's gradient comes first, without (mm) the weight's.
        if not layer.bias:
            own = _weight_gradient(tape, layer, gradient, saved)
        below = tape.new(f"{layer.name}.input.grad", saved.shape)
        tape.compute(f"{layer.name} mm backward input", (gradient, weight), (below,), flops)
        if layer.bias:
            own = _weight_gradient(tape, layer, gradient, saved)
            bias_gradient(tape, layer.name, gradient, layer.n_out)
        tape.release(gradient, saved)
        tape.set_gradient(layer.weight, own)
        return tape.add_gradient(layer.name, so_far, below)

    return y, backward


def _weight_gradient(tape: Tape, layer: Linear, gradient: Value, x: Value) -> Value:
    own = tape.new(f"{layer.name}.weight.grad", (layer.n_out, layer.n_in), role="gradient")
    flops = 2.0 * gradient.count * layer.n_in
    tape.compute(f"{layer.name} mm backward weight", (gradient, x), (own,), flops)
    return own


def dropout(tape: Tape, layer: Dropout, x: Value) -> tuple[Value, Backward]:
    """Run a dropout (``native_dropout``): it saves a mask of one byte per element."""
    mask = tape.new(f"{layer.name}.mask", x.shape, element_bytes=1)
    y = tape.new(f"{layer.name}.output", x.shape)
    tape.compute(f"{layer.name} native_dropout forward", (x,), (y, mask), 2.0 * x.count)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new(f"{layer.name}.input.grad", gradient.shape)
        name = f"{layer.name} native_dropout backward"
        tape.compute(name, (gradient, mask), (below,), 2.0 * gradient.count)
        tape.release(gradient, mask)
        return tape.add_gradient(layer.name, so_far, below)

    return y, backward


def layer_norm(tape: Tape, layer: LayerNorm, x: Value) -> tuple[Value, Backward]:
    """Run a layer norm: it saves its input, and mean and inverse deviation of each row.

    FLOPs: 8 per element forward, 11 backward, counted from the formulas.
    """
    name, rows, wide = layer.name, (x.count // layer.width,), (layer.width,)
    weight, bias = tape.held[f"{name}.weight"], tape.held[f"{name}.bias"]
    y = tape.new(f"{name}.output", x.shape)
    saved = (tape.hold(x), tape.new(f"{name}.mean", rows), tape.new(f"{name}.rstd", rows))
    writes = (y, *saved[1:])
    tape.compute(f"{name} layer_norm forward", (x, weight, bias), writes, 8.0 * x.count)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new(f"{name}.input.grad", gradient.shape)
        own = tuple(
            tape.new(f"{name}.{what}.grad", wide, role="gradient") for what in ("weight", "bias")
        )
        reads = (gradient, *saved, weight)
        tape.compute(f"{name} layer_norm backward input", reads, (below,), 8.0 * gradient.count)
        tape.compute(f"{name} layer_norm backward weight", reads[:4], own, 3.0 * gradient.count)
        tape.release(gradient, *saved)
        tape.set_gradient(f"{name}.weight", own[0])
        tape.set_gradient(f"{name}.bias", own[1])
        return tape.add_gradient(name, so_far, below)

    return y, backward


def gelu(tape: Tape, layer: Gelu, x: Value) -> tuple[Value, Backward]:
    """Run a gelu: it saves its input."""
    return _pointwise(tape, layer.name, "gelu", x)


def tanh(tape: Tape, layer: Tanh, x: Value) -> tuple[Value, Backward]:
    """Run a tanh: it saves its output."""
    return _pointwise(tape, layer.name, "tanh", x)


def _pointwise(tape: Tape, name: str, kind: str, x: Value) -> tuple[Value, Backward]:
    y = tape.new(f"{name}.output", x.shape)
    tape.compute(f"{name} {kind} forward", (x,), (y,), 8.0 * x.count)
    saved = tape.hold(y if kind == "tanh" else x)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new(f"{name}.input.grad", gradient.shape)
        tape.compute(f"{name} {kind} backward", (gradient, saved), (below,), 12.0 * gradient.count)
        tape.release(gradient, saved)
        return tape.add_gradient(name, so_far, below)

    return y, backward


def first_token(tape: Tape, layer: FirstToken, x: Value) -> tuple[Value, Backward]:
    """Give a view of the first token; its backward fills a whole gradient with zeros."""
    shape = x.shape
    y = tape.hold(x).viewed(shape[0], *shape[2:])

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new(f"{layer.name}.input.grad", shape)
        tape.compute(f"{layer.name} zero fill", (), (below,))
        tape.compute(f"{layer.name} select backward copy", (gradient,), (below,))
        tape.release(gradient)
        return tape.add_gradient(layer.name, so_far, below)

    return y, backward


def padding_mask(tape: Tape, layer: PaddingMask, x: Value) -> tuple[Value, Backward]:
    """Make the mask that hides padding, for all layers; the input passes through."""
    mask = tape.held["mask"]
    batch, length = mask.shape
    shape = (batch, 1, 1, length)
    as_float = tape.new(f"{layer.name}.float", shape)
    tape.compute(f"{layer.name} to float", (mask,), (as_float,))
    inverted = tape.new(f"{layer.name}.inverted", shape)
    tape.compute(f"{layer.name} rsub", (as_float,), (inverted,), inverted.count)
    extended = tape.new(f"{layer.name}.extended", shape)
    tape.compute(f"{layer.name} mul", (inverted,), (extended,), extended.count)
    tape.release(inverted, as_float)
    tape.held[EXTENDED_MASK] = tape.keep(extended)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        return tape.add_gradient(layer.name, so_far, gradient)

    return tape.hold(x), backward


def embeddings(tape: Tape, layer: Embeddings, x: Value) -> tuple[Value, Backward]:
    """Add several lookups: each saves its indices, and is a local of the caller until that returns.

    The input ``x`` is the batch of tokens. The first two are added into a new tensor, the others in place.
    """
    batch, length = x.shape
    places = _positions(tape, layer, length)
    found = [_lookup(tape, t, places if t.index == "positions" else None) for t in layer.tables[:2]]
    total = tape.new(f"{layer.name}.sum", (batch, length, layer.tables[0].width))
    tape.compute(f"{layer.name} add", (found[0][0], found[1][0]), (total,), total.count)
    for table in layer.tables[2:]:
        more = _lookup(tape, table, places if table.index == "positions" else None)
        tape.compute(f"{layer.name} add_", (total, more[0]), (total,), total.count)
        found.append(more)

    def backward(gradient: Value, so_far: Value | None) -> None:  # noqa: ARG001
        for table, (looked_up, indices) in reversed(list(zip(layer.tables, found, strict=True))):
            part = gradient if table is layer.tables[0] else tape.hold(gradient)
            if table.index == "positions" and looked_up.shape != gradient.shape:
                # The same positions serve the whole batch: their gradients are summed over it.
                total = tape.new(f"{table.name}.output.grad", looked_up.shape)
                tape.compute(f"{table.name} sum backward", (gradient,), (total,), gradient.count)
                tape.release(part)
                part = total
            _lookup_gradient(tape, table, part, indices)

    return total, backward


def _positions(tape: Tape, layer: Embeddings, length: int) -> Value:
    if layer.n_stored_positions:
        return tape.held[f"{layer.name}.position_ids"].viewed(1, length)
    places = tape.keep(tape.new("positions", (length,), element_bytes=INT64_BYTES))
    tape.compute("positions arange", (), (places,))
    return places


def _lookup(tape: Tape, table: Table, places: Value | None) -> tuple[Value, Value]:
    indices = tape.held[table.index] if places is None else places
    weight = tape.held[f"{table.name}.weight"]
    y = tape.new(f"{table.name}.output", (*indices.shape, table.width))
    name = f"{table.name} embedding forward"
    tape.compute(name, (indices, weight), (y,))
    tape.sparse_reads[name] = min(y.count, weight.count) * FLOAT_BYTES
    tape.keep(y)
    return y, tape.hold(indices)


def _lookup_gradient(tape: Tape, table: Table, gradient: Value, indices: Value) -> None:
    own = tape.new(f"{table.name}.weight.grad", (table.n_rows, table.width), role="gradient")
    tape.compute(f"{table.name} zero fill", (), (own,))
    n_indices = math.prod(indices.shape)
    orders: tuple[Value, ...] = ()
    if n_indices > FEW_INDICES:
        orders = tuple(
            tape.new(f"{table.name}.{what}_indices", (n_indices,), element_bytes=INT64_BYTES)
            for what in ("sorted", "orig")
        )
        tape.compute(f"{table.name} sort indices", (indices,), orders, float(n_indices))
    used = orders or (indices,)
    name = f"{table.name} embedding backward"
    tape.compute(name, (gradient, *used, own), (own,), gradient.count)
    tape.release(*orders, gradient, indices)
    tape.set_gradient(f"{table.name}.weight", own)
