"""Forward and backward of attention as plain operations: what is allocated, computed and saved.

With q, k, v of batch x heads x tokens x head size: scores = q k', scaled, masked, softmax, dropout, times v. In
batches of two and more, q, k' and v are copied into the order that the batched matrix product needs; with one
text per batch they are views.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nsan.model.networks.layers import FLOAT_BYTES, Attention, Dropout
from nsan.model.networks.tape import Backward, Tape, Value, expected
from nsan.model.networks.text_layers import EXTENDED_MASK, dropout, linear

_Three = tuple[Value, Value, Value]
_BackProjections = Callable[[_Three, "Value | None"], "Value | None"]


@dataclass(frozen=True)
class _Shape:
    """Sizes of one call."""

    batch: int
    length: int
    width: int
    n_heads: int

    @property
    def scores(self) -> tuple[int, ...]:
        return (self.batch, self.n_heads, self.length, self.length)

    @property
    def heads(self) -> tuple[int, ...]:
        return (self.batch, self.n_heads, self.length, self.width // self.n_heads)

    @property
    def flat(self) -> tuple[int, ...]:
        return (self.batch, self.length, self.width)

    @property
    def product_flops(self) -> float:
        """FLOPs of one of the two products, and of each of their gradients."""
        return 2.0 * self.batch * self.length**2 * self.width


def attention(tape: Tape, layer: Attention, x: Value) -> tuple[Value, Backward]:
    """Run attention up to, and without, the output projection.

    It saves q, k and v, the softmax, the mask of the dropout and its result, and, if causal, a mask of one byte
    per pair of tokens. q, k and v as they leave the projections are locals of the caller until that returns.
    """
    shape = _Shape(x.shape[0], x.shape[1], layer.width, layer.n_heads)
    (query, key, value), back_projections = _projections(tape, layer, x)
    q, k = _as_heads(tape, layer, query, "q"), _as_heads(tape, layer, key, "k")
    scores = tape.new(f"{layer.name}.scores", shape.scores)
    name = f"{layer.name} bmm scores forward"
    tape.use_gemm()
    tape.compute(name, (q, k), (scores,), shape.product_flops)
    weights, back_weights = _weights(tape, layer, scores)
    v = _as_heads(tape, layer, value, "v")
    context = tape.new(f"{layer.name}.context", shape.heads)
    tape.compute(f"{layer.name} bmm context forward", (weights, v), (context,), shape.product_flops)
    y = tape.new(f"{layer.name}.output", shape.flat)
    tape.compute(f"{layer.name} contiguous", (context,), (y,))
    tape.release(context)

    def backward(gradient: Value, so_far: Value | None) -> Value | None:
        into_weights, into_v = _back_context(tape, layer, gradient, (weights, v))
        into_scores = expected(back_weights(into_weights, None))
        into_q, into_k = _back_product(tape, f"{layer.name} bmm scores", into_scores, (q, k))
        return back_projections((into_q, into_k, into_v), so_far)

    return y, backward


def _as_heads(tape: Tape, layer: Attention, value: Value, which: str) -> Value:
    """Give q, k or v as the batched product takes it: a copy, or a view if the batch is one."""
    batch, length, width = (*value.shape[:2], layer.width)
    heads = (batch, layer.n_heads, length, width // layer.n_heads)
    if batch == 1:
        return tape.hold(value).viewed(*heads)
    copy = tape.new(f"{layer.name}.{which}", heads)
    tape.compute(f"{layer.name} copy {which}", (value,), (copy,))
    return copy


def _weights(tape: Tape, layer: Attention, scores: Value) -> tuple[Value, Backward]:
    """Scale, mask, softmax and drop out; takes over the scores."""
    name = layer.name
    scaled = tape.new(f"{name}.scaled", scores.shape)
    tape.compute(f"{name} scale forward", (scores,), (scaled,), scores.count)
    tape.release(scores)
    masked, hidden = _masked(tape, layer, scaled)
    tape.release(scaled)
    soft = tape.new(f"{name}.softmax", scores.shape)
    tape.compute(f"{name} softmax forward", (masked,), (soft,), 5.0 * scores.count)
    tape.release(masked)
    weights, back_dropout = dropout(tape, Dropout(f"{name}.attn_dropout", layer.p), soft)

    def backward(gradient: Value, so_far: Value | None) -> Value | None:
        into_soft = expected(back_dropout(gradient, None))
        into_scaled = _back_softmax(tape, name, into_soft, soft)
        if hidden:
            below = tape.new(f"{name}.scaled.grad", scores.shape)
            reads = (into_scaled, *hidden)
            tape.compute(f"{name} masked_fill backward", reads, (below,), scores.count)
            tape.release(into_scaled, *hidden)
            into_scaled = below
        below = tape.new(f"{name}.scores.grad", scores.shape)
        tape.compute(f"{name} scale backward", (into_scaled,), (below,), scores.count)
        tape.release(into_scaled)
        return tape.add_gradient(name, so_far, below)

    return weights, backward


def _masked(tape: Tape, layer: Attention, scaled: Value) -> tuple[Value, tuple[Value, ...]]:
    """Hide what a token may not see; also give what is saved for the backward pass."""
    name, shape = layer.name, scaled.shape
    if not layer.n_causal:
        masked = tape.new(f"{name}.masked", shape)
        added = tape.held[EXTENDED_MASK]
        tape.compute(f"{name} add mask forward", (scaled, added), (masked,), scaled.count)
        return masked, ()
    length = shape[-1]
    hidden = tape.new(f"{name}.hidden", (length, length), element_bytes=1)
    compare = f"{name} eq"
    tape.compute(compare, (tape.held[f"{name}.bias"],), (hidden,), length**2)
    tape.sparse_reads[compare] = length**2 * FLOAT_BYTES
    masked = tape.new(f"{name}.masked", shape)
    tape.compute(f"{name} masked_fill forward", (scaled, hidden), (masked,), scaled.count)
    return masked, (hidden,)


def _back_softmax(tape: Tape, name: str, gradient: Value, soft: Value) -> Value:
    """Run the softmax backward; ATen multiplies gradient and output into a temporary first."""
    below = tape.new(f"{name}.masked.grad", gradient.shape)
    product = tape.new(f"{name}.softmax.product", gradient.shape)
    count = float(gradient.count)
    tape.compute(f"{name} softmax backward mul", (gradient, soft), (product,), count)
    tape.compute(f"{name} softmax backward", (product, soft), (below,), 3.0 * count)
    tape.release(product, gradient, soft)
    return below


def _back_product(
    tape: Tape, name: str, gradient: Value, factors: tuple[Value, Value]
) -> tuple[Value, Value]:
    """Run the backward of a batched product; takes over its saved factors."""
    left, right = factors
    flops = 2.0 * gradient.count * left.shape[-1]
    tape.use_gemm()
    into_right = tape.new(f"{name}.right.grad", right.shape)
    tape.compute(f"{name} backward right", (left, gradient), (into_right,), flops)
    into_left = tape.new(f"{name}.left.grad", left.shape)
    tape.compute(f"{name} backward left", (gradient, right), (into_left,), flops)
    tape.release(gradient, right, left)
    return into_left, into_right


def _back_context(
    tape: Tape, layer: Attention, gradient: Value, factors: tuple[Value, Value]
) -> tuple[Value, Value]:
    """Run the backward of weights times v, with the copy into heads that it needs."""
    heads = factors[1].shape
    if heads[0] == 1:
        gradient = gradient.viewed(*heads)
    else:
        copy = tape.new(f"{layer.name}.context.grad", heads)
        tape.compute(f"{layer.name} copy context backward", (gradient,), (copy,))
        tape.release(gradient)
        gradient = copy
    return _back_product(tape, f"{layer.name} bmm context", gradient, factors)


def _projections(
    tape: Tape, layer: Attention, x: Value
) -> tuple[tuple[Value, Value, Value], _BackProjections]:
    """Run the projections; their outputs are locals of the running function."""
    if len(layer.projections) == 1:
        return _joined(tape, layer, x)
    (query, back_q), (key, back_k), (value, back_v) = (
        linear(tape, projection, x) for projection in layer.projections
    )

    def backward(gradients: _Three, so_far: Value | None) -> Value | None:
        for which, gradient, back in (
            ("v", gradients[2], back_v),
            ("k", gradients[1], back_k),
            ("q", gradients[0], back_q),
        ):
            so_far = back(_flat_gradient(tape, layer, which, gradient), so_far)
        return so_far

    return (tape.keep(query), tape.keep(key), tape.keep(value)), backward


def _joined(tape: Tape, layer: Attention, x: Value) -> tuple[_Three, _BackProjections]:
    """Run one projection for q, k and v, which are views of its output."""
    together, back = linear(tape, layer.projections[0], x)
    tape.keep(together)
    part = together.viewed(*x.shape)

    def backward(gradients: _Three, so_far: Value | None) -> Value | None:
        v, q, k = (
            _flat_gradient(tape, layer, which, gradient)
            for which, gradient in zip("vqk", (gradients[2], *gradients[:2]), strict=True)
        )
        whole = tape.new(f"{layer.name}.split.grad", together.shape)
        tape.compute(f"{layer.name} cat backward", (q, k, v), (whole,))
        tape.release(q, k, v)
        return back(whole, so_far)

    return (part, part, part), backward


def _flat_gradient(tape: Tape, layer: Attention, which: str, gradient: Value) -> Value:
    """Bring the gradient of q, k or v from heads to rows.

    The reshape of a transposed view is a copy, but for k: its gradient comes out transposed already, and is
    copied only to join the texts of a batch for the matrix product of an own projection.
    """
    batch, n_heads, length, size = gradient.shape
    shape = (batch, length, n_heads * size)
    if which == "k" and (batch == 1 or len(layer.projections) == 1):
        return gradient.viewed(*shape)
    flat = tape.new(f"{layer.name}.{which}.grad", shape)
    tape.compute(f"{layer.name} copy {which} backward", (gradient,), (flat,))
    tape.release(gradient)
    return flat
