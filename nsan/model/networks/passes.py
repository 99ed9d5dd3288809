"""Runs a tree of layers forward, and gives the backward pass of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from nsan.model.networks import attention, image_layers, text_layers
from nsan.model.networks import layers as table
from nsan.model.networks.layers import Layer, Residual, Sequence
from nsan.model.networks.tape import Backward, Tape, Value, expected

RUNS: Final[dict[type, Callable[[Tape, Any, Value], tuple[Value, Backward]]]] = {
    table.Conv2d: image_layers.conv2d,
    table.BatchNorm2d: image_layers.batch_norm,
    table.Relu: image_layers.relu,
    table.MaxPool2d: image_layers.max_pool,
    table.AdaptiveAveragePool2d: image_layers.average_pool,
    table.Flatten: image_layers.flatten,
    table.Dropout: text_layers.dropout,
    table.Linear: text_layers.linear,
    table.LayerNorm: text_layers.layer_norm,
    table.Gelu: text_layers.gelu,
    table.Tanh: text_layers.tanh,
    table.FirstToken: text_layers.first_token,
    table.PaddingMask: text_layers.padding_mask,
    table.Embeddings: text_layers.embeddings,
    table.Attention: attention.attention,
}
"""What runs a layer, by its type."""


def forward(tape: Tape, layer: Layer, x: Value) -> tuple[Value, Backward]:
    """Run a layer, or a tree of them.

    Parameters
    ----------
    tape : Tape
        Takes down what happens.
    layer : Layer
        What to run.
    x : Value
        The input; the caller keeps its reference.

    Returns
    -------
    tuple of Value and Backward
        The output, as a new reference, and the backward pass, to be called once.
    """
    if isinstance(layer, Sequence):
        return _sequence(tape, layer, x)
    if isinstance(layer, Residual):
        return _residual(tape, layer, x)
    return RUNS[type(layer)](tape, layer, x)


def _sequence(tape: Tape, layer: Sequence, x: Value) -> tuple[Value, Backward]:
    backs: list[Backward] = []
    with tape.frame():
        value = tape.hold(x)
        for inner in layer.layers:
            following, back = forward(tape, inner, value)
            tape.release(value)
            value = following
            backs.append(back)

    def backward(gradient: Value, so_far: Value | None) -> Value | None:
        for back in reversed(backs[1:]):
            gradient = expected(back(gradient, None))
        return backs[0](gradient, so_far)

    return value, backward


def _residual(tape: Tape, layer: Residual, x: Value) -> tuple[Value, Backward]:
    main, back_main = forward(tape, layer.main, x)
    back_shortcut: Backward | None = None
    shortcut = tape.hold(x)
    if layer.shortcut is not None:
        tape.release(shortcut)
        shortcut, back_shortcut = forward(tape, layer.shortcut, x)
    total = tape.hold(main) if layer.inplace else tape.new(f"{layer.name}.output", main.shape)
    name = f"{layer.name} {'add_' if layer.inplace else 'add'} forward"
    tape.compute(name, (main, shortcut), (total,), total.count)
    if layer.is_local:
        tape.keep(tape.hold(main))
    tape.release(main, shortcut)

    def backward(gradient: Value, so_far: Value | None) -> Value | None:
        # Both branches get the same tensor; autograd runs the one that was recorded last first.
        below: Value | None = tape.hold(gradient)
        if back_shortcut is not None:
            below = back_shortcut(expected(below), so_far)
        elif so_far is not None:
            below = tape.add_gradient(layer.name, so_far, expected(below))
        return back_main(gradient, below)

    return total, backward


def cross_entropy(tape: Tape, logits: Value, labels: Value) -> tuple[Value, Backward]:
    """Run ``F.cross_entropy`` over the last dimension: it saves the log-softmax and a weight."""
    chances = tape.new("loss.log_softmax", logits.shape)
    tape.compute("loss log_softmax forward", (logits,), (chances,), 5.0 * logits.count)
    loss, weight = tape.new("loss", ()), tape.new("loss.total_weight", ())
    tape.compute("loss nll_loss forward", (chances, labels), (loss, weight), labels.count)
    saved_labels = tape.hold(labels)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        into_chances = tape.new("loss.log_softmax.grad", logits.shape)
        tape.compute("loss zero fill", (), (into_chances,))
        reads = (gradient, saved_labels, weight)
        tape.compute("loss nll_loss backward", reads, (into_chances,), labels.count)
        tape.release(gradient, saved_labels, weight)
        below = tape.new("logits.grad", logits.shape)
        name = "loss log_softmax backward"
        tape.compute(name, (into_chances, chances), (below,), 4.0 * logits.count)
        tape.release(into_chances, chances)
        return tape.add_gradient("logits", so_far, below)

    return loss, backward


def mean_squared_error(tape: Tape, output: Value, targets: Value) -> tuple[Value, Backward]:
    """Run ``F.mse_loss``: it saves both of its inputs."""
    loss = tape.new("loss", ())
    squares = tape.new("loss.squares", output.shape)
    tape.compute("loss mse_loss forward", (output, targets), (squares,), 2.0 * output.count)
    tape.compute("loss mean forward", (squares,), (loss,), output.count)
    tape.release(squares)
    saved = (tape.hold(output), tape.hold(targets))

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new("output.grad", output.shape)
        reads = (gradient, *saved)
        tape.compute("loss mse_loss backward", reads, (below,), 3.0 * output.count)
        tape.release(gradient, *saved)
        return tape.add_gradient("output", so_far, below)

    return loss, backward


LOSSES: Final[dict[str, Callable[[Tape, Value, Value], tuple[Value, Backward]]]] = {
    "cross entropy": cross_entropy,
    "mean squared error": mean_squared_error,
}
"""Losses by name."""
