"""Forward and backward of the layers of image networks: what is allocated, computed and saved.

Each function takes the tape, the layer and a borrowed input, and gives the output with its backward pass
(:data:`nsan.model.networks.tape.Backward`). Convolutions and batch norms run in cuDNN.
"""

from __future__ import annotations

from nsan.model.networks.layers import (
    FLOAT_BYTES,
    INT64_BYTES,
    AdaptiveAveragePool2d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    MaxPool2d,
    Relu,
)
from nsan.model.networks.tape import Backward, Tape, Value


def pooled_side(side: int, kernel: int, stride: int, padding: int) -> int:
    """Tell the side of what a square window gives.

    Examples
    --------
    >>> pooled_side(224, 11, 4, 2)
    55
    """
    return (side + 2 * padding - kernel) // stride + 1


def conv2d(tape: Tape, layer: Conv2d, x: Value) -> tuple[Value, Backward]:
    """Run a convolution: it saves its input.

    cuDNN chooses an algorithm, and with it the workspace, by rules that are not public. Assumed for each of
    forward, input gradient and weight gradient: the unfolded matrix of one image, capped by the tape; none for
    1 x 1 kernels. FLOPs: ``2 * outputs * inputs per output``, for each of the three.
    """
    batch, _, height, width = x.shape
    rows, columns = (
        pooled_side(side, layer.kernel, layer.stride, layer.padding) for side in (height, width)
    )
    weight = tape.held[f"{layer.name}.weight"]
    y = tape.new(f"{layer.name}.output", (batch, layer.n_out, rows, columns))
    window = layer.n_in * layer.kernel**2
    scratch = window * rows * columns * FLOAT_BYTES if layer.kernel > 1 else 0
    flops = 2.0 * y.count * window
    _convolve(tape, f"{layer.name} convolution forward", (x, weight), y, (scratch, flops))
    if layer.bias:
        bias = tape.held[f"{layer.name}.bias"]
        tape.compute(f"{layer.name} bias add", (y, bias), (y,), y.count)
    saved = tape.hold(x)

    def backward(gradient: Value, so_far: Value | None) -> Value | None:
        below = None
        if saved.needs_gradient:
            below = tape.new(f"{layer.name}.input.grad", saved.shape)
            name = f"{layer.name} convolution backward input"
            _convolve(tape, name, (gradient, weight), below, (scratch, flops))
        own = tape.new(f"{layer.name}.weight.grad", weight.shape, role="gradient")
        name = f"{layer.name} convolution backward weight"
        _convolve(tape, name, (gradient, saved), own, (scratch, flops))
        if layer.bias:
            bias_gradient(tape, layer.name, gradient, layer.n_out)
        tape.release(gradient, saved)
        tape.set_gradient(f"{layer.name}.weight", own)
        return None if below is None else tape.add_gradient(layer.name, so_far, below)

    return y, backward


def _convolve(
    tape: Tape, name: str, reads: tuple[Value, ...], y: Value, cost: tuple[int, float]
) -> None:
    scratch = tape.scratch(name, cost[0])
    tape.compute(name, reads, (y, *scratch), cost[1])
    tape.release(*scratch)


def bias_gradient(tape: Tape, layer: str, gradient: Value, n: int) -> None:
    """Sum the gradient of an output over all but the features."""
    own = tape.new(f"{layer}.bias.grad", (n,), role="gradient")
    tape.compute(f"{layer} sum backward bias", (gradient,), (own,), gradient.count)
    tape.set_gradient(f"{layer}.bias", own)


def batch_norm(tape: Tape, layer: BatchNorm2d, x: Value) -> tuple[Value, Backward]:
    """Run a batch norm: it saves its input, mean and inverse deviation.

    FLOPs: 8 per element forward, 11 backward, counted from the formulas.
    """
    name, shape = layer.name, (layer.n_channels,)
    weight, bias, mean, var, seen = (
        tape.held[f"{name}.{what}"]
        for what in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    )
    tape.compute(f"{name} count batches", (seen,), (seen,), 1)
    y = tape.new(f"{name}.output", x.shape)
    save = (tape.new(f"{name}.save_mean", shape), tape.new(f"{name}.save_invstd", shape))
    reads = (x, weight, bias, mean, var)
    tape.compute(f"{name} batch_norm forward", reads, (y, mean, var, *save), 8.0 * x.count)
    saved = (tape.hold(x), *save)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new(f"{name}.input.grad", gradient.shape)
        own = tuple(
            tape.new(f"{name}.{what}.grad", shape, role="gradient") for what in ("weight", "bias")
        )
        reads = (gradient, *saved, weight)
        tape.compute(f"{name} batch_norm backward", reads, (below, *own), 11.0 * gradient.count)
        tape.release(gradient, *saved)
        tape.set_gradient(f"{name}.weight", own[0])
        tape.set_gradient(f"{name}.bias", own[1])
        return tape.add_gradient(name, so_far, below)

    return y, backward


def relu(tape: Tape, layer: Relu, x: Value) -> tuple[Value, Backward]:
    """Run a ReLU in place: it saves its result, which is its input's memory."""
    tape.compute(f"{layer.name} relu_ forward", (x,), (x,), x.count)
    saved = tape.hold(x)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new(f"{layer.name}.input.grad", gradient.shape)
        name = f"{layer.name} threshold backward"
        tape.compute(name, (gradient, saved), (below,), gradient.count)
        tape.release(gradient, saved)
        return tape.add_gradient(layer.name, so_far, below)

    return tape.hold(x), backward


def max_pool(tape: Tape, layer: MaxPool2d, x: Value) -> tuple[Value, Backward]:
    """Run a maximum pooling: it saves its input and the int64 place of each maximum."""
    batch, channels, height, width = x.shape
    rows, columns = (
        pooled_side(side, layer.kernel, layer.stride, layer.padding) for side in (height, width)
    )
    shape = (batch, channels, rows, columns)
    y = tape.new(f"{layer.name}.output", shape)
    places = tape.new(f"{layer.name}.indices", shape, element_bytes=INT64_BYTES)
    flops = float(y.count) * layer.kernel**2
    tape.compute(f"{layer.name} max_pool2d forward", (x,), (y, places), flops)
    saved = (places, tape.hold(x))

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new(f"{layer.name}.input.grad", saved[1].shape)
        name = f"{layer.name} max_pool2d backward"
        tape.compute(name, (gradient, *saved), (below,), flops)
        tape.release(gradient, *saved)
        return tape.add_gradient(layer.name, so_far, below)

    return y, backward


def average_pool(tape: Tape, layer: AdaptiveAveragePool2d, x: Value) -> tuple[Value, Backward]:
    """Run an adaptive average pooling: it saves its input; to 1 x 1 it is a mean and saves nothing."""
    batch, channels = x.shape[:2]
    is_mean = layer.size == 1
    kind = "mean" if is_mean else "adaptive_avg_pool2d"
    y = tape.new(f"{layer.name}.output", (batch, channels, layer.size, layer.size))
    tape.compute(f"{layer.name} {kind} forward", (x,), (y,), x.count)
    shape = x.shape
    saved = () if is_mean else (tape.hold(x),)

    def backward(gradient: Value, so_far: Value | None) -> Value:
        below = tape.new(f"{layer.name}.input.grad", shape)
        tape.compute(f"{layer.name} {kind} backward", (gradient, *saved), (below,), below.count)
        tape.release(gradient, *saved)
        return tape.add_gradient(layer.name, so_far, below)

    return y, backward


def flatten(tape: Tape, layer: Flatten, x: Value) -> tuple[Value, Backward]:
    """Give a view; nothing is computed or saved."""
    shape = x.shape
    y = tape.hold(x).viewed(shape[0], x.count // shape[0])

    def backward(gradient: Value, so_far: Value | None) -> Value:
        return tape.add_gradient(layer.name, so_far, gradient.viewed(*shape))

    return y, backward
