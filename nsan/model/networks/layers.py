"""The types of a layer table: what a network is made of, without any memory.

A network is a tree: :class:`Sequence` and :class:`Residual` hold layers, the others are modules of PyTorch
under the same names and with the same parameters. Shapes are NCHW for images and batch x sequence x width for
text, fp32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

FLOAT_BYTES: Final = 4
INT64_BYTES: Final = 8


@dataclass(frozen=True)
class State:
    """A parameter or a buffer of a layer.

    Attributes
    ----------
    name : str
        Full name, as in ``state_dict``.
    shape : tuple of int
        Empty for a scalar.
    is_parameter : bool, default True
        False for a buffer: it has no gradient.
    element_bytes : int, default 4
        4 for fp32, 8 for int64.
    """

    name: str
    shape: tuple[int, ...]
    is_parameter: bool = True
    element_bytes: int = FLOAT_BYTES

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Conv2d:
    """A square convolution."""

    name: str
    n_in: int
    n_out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = False


@dataclass(frozen=True)
class BatchNorm2d:
    """Batch normalisation, training, with running statistics."""

    name: str
    n_channels: int


@dataclass(frozen=True)
class Relu:
    """``ReLU(inplace=True)``."""

    name: str


@dataclass(frozen=True)
class MaxPool2d:
    """Maximum pooling."""

    name: str
    kernel: int
    stride: int
    padding: int = 0


@dataclass(frozen=True)
class AdaptiveAveragePool2d:
    """Average pooling to ``size`` x ``size``; to 1 x 1 PyTorch takes the mean instead."""

    name: str
    size: int


@dataclass(frozen=True)
class Flatten:
    """A view as batch x features."""

    name: str


@dataclass(frozen=True)
class Dropout:
    """``Dropout(p)`` with 0 < p < 1."""

    name: str
    p: float = 0.1


@dataclass(frozen=True)
class Linear:
    """A matrix product over the last dimension.

    ``tied_to`` is the name of another layer's weight that is used in place of an own one.
    """

    name: str
    n_in: int
    n_out: int
    bias: bool = True
    tied_to: str | None = None

    @property
    def weight(self) -> str:
        """Name of the weight."""
        return self.tied_to or f"{self.name}.weight"


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalisation over the last dimension."""

    name: str
    width: int


@dataclass(frozen=True)
class Gelu:
    """``F.gelu``, one kernel."""

    name: str


@dataclass(frozen=True)
class Tanh:
    """``torch.tanh``."""

    name: str


@dataclass(frozen=True)
class FirstToken:
    """The view ``x[:, 0]``."""

    name: str


@dataclass(frozen=True)
class Table:
    """An embedding table; ``index`` names the integers that look things up in it.

    ``index`` is "tokens", "segments" (both of batch x sequence) or "positions" (of the sequence).
    """

    name: str
    n_rows: int
    width: int
    index: str


@dataclass(frozen=True)
class Embeddings:
    """The sum of several lookups, in order of ``tables``.

    ``n_stored_positions`` > 0: positions (and default segments) are buffers of that many int64, as in BERT;
    0: positions are made by ``arange`` in every step, as in GPT-2.
    """

    name: str
    tables: tuple[Table, ...]
    n_stored_positions: int = 0


@dataclass(frozen=True)
class PaddingMask:
    """What hides padding: ``(1 - mask) * lowest``, once per step, added to the scores of every layer."""

    name: str


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention as plain operations (no fused kernel), without the output projection.

    Attributes
    ----------
    name : str
        Prefix of its layers.
    width, n_heads : int
        ``width / n_heads`` is the size of a head.
    projections : tuple of Linear
        One layer for q, k and v together, or three in this order.
    n_causal : int, default 0
        Side of the stored causal mask (fp32 buffer ``name.bias``); 0: the padding mask is used.
    p : float, default 0.1
        Dropout of the attention weights.
    """

    name: str
    width: int
    n_heads: int
    projections: tuple[Linear, ...]
    n_causal: int = 0
    p: float = 0.1


@dataclass(frozen=True)
class Sequence:
    """Layers one after another; what a Python function holds in locals lives until its end."""

    name: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Residual:
    """``main(x) + shortcut(x)``.

    Attributes
    ----------
    name : str
        Name of the sum.
    main : Sequence
        The long way.
    shortcut : Sequence, optional
        The short way; by default x itself.
    inplace : bool, default False
        ``main += shortcut``.
    is_local : bool, default False
        ``main`` is a local of the function around, and lives until that returns.
    """

    name: str
    main: Sequence
    shortcut: Sequence | None = None
    inplace: bool = False
    is_local: bool = False


Layer = (
    Conv2d
    | BatchNorm2d
    | Relu
    | MaxPool2d
    | AdaptiveAveragePool2d
    | Flatten
    | Dropout
    | Linear
    | LayerNorm
    | Gelu
    | Tanh
    | FirstToken
    | Embeddings
    | PaddingMask
    | Attention
    | Sequence
    | Residual
)


@dataclass(frozen=True)
class Network:
    """A network and how it is usually trained.

    Attributes
    ----------
    name : str
        Name on the command line.
    body : Sequence
        The layers.
    loss : str
        "cross entropy" over the last dimension of the output, or "mean squared error".
    optimizer : str
        "sgd" (with momentum: one state per parameter) or "adamw" (two, and a step counter).
    batch : int
        Default batch: peak bytes between 0.5 and 3 GB.
    extent : int
        Default side of the image, or length of the sequence.
    smallest, largest : int
        Bounds of ``extent``.
    inputs : tuple of str
        "images", or what a text model takes: "tokens", "mask", "segments"; "targets" or "labels".
    """

    name: str
    body: Sequence
    loss: str
    optimizer: str
    batch: int
    extent: int
    smallest: int
    largest: int
    inputs: tuple[str, ...]

    @property
    def is_text(self) -> bool:
        """Whether it takes tokens instead of images."""
        return "tokens" in self.inputs


def walk(layer: Layer) -> Iterator[Layer]:
    """Yield a layer and all in it, in order of the forward pass.

    Examples
    --------
    >>> [x.name for x in walk(Sequence("s", (Relu("a"), Residual("r", Sequence("m", (Relu("b"),))))))]
    ['s', 'a', 'r', 'm', 'b']
    """
    yield layer
    if isinstance(layer, Sequence):
        for inner in layer.layers:
            yield from walk(inner)
    elif isinstance(layer, Residual):
        yield from walk(layer.main)
        if layer.shortcut is not None:
            yield from walk(layer.shortcut)
    elif isinstance(layer, Attention):
        for projection in layer.projections:
            yield from walk(projection)


def states(layer: Layer) -> Iterator[State]:
    """Yield the parameters and buffers of a layer and of all in it, each once.

    Parameters
    ----------
    layer : Layer
        Any layer.

    Yields
    ------
    State
        In order of the forward pass; per layer weight, bias, then buffers. A tied weight is not repeated.
    """
    for inner in walk(layer):
        yield from _own_states(inner)


def _own_states(layer: Layer) -> tuple[State, ...]:
    name = layer.name
    found: tuple[State, ...] = ()
    match layer:
        case Conv2d():
            shape = (layer.n_out, layer.n_in, layer.kernel, layer.kernel)
            found = (State(f"{name}.weight", shape), *_bias(name, layer.n_out, bias=layer.bias))
        case Linear():
            own = () if layer.tied_to else (State(layer.weight, (layer.n_out, layer.n_in)),)
            found = (*own, *_bias(name, layer.n_out, bias=layer.bias))
        case LayerNorm():
            found = (State(f"{name}.weight", (layer.width,)), *_bias(name, layer.width, bias=True))
        case BatchNorm2d():
            found = _batch_norm_states(layer)
        case Embeddings():
            found = _embedding_states(layer)
        case Attention() if layer.n_causal:
            side = layer.n_causal
            found = (State(f"{name}.bias", (1, 1, side, side), is_parameter=False),)
    return found


def _bias(name: str, n: int, *, bias: bool) -> tuple[State, ...]:
    return (State(f"{name}.bias", (n,)),) if bias else ()


def _batch_norm_states(layer: BatchNorm2d) -> tuple[State, ...]:
    name, shape = layer.name, (layer.n_channels,)
    return (
        State(f"{name}.weight", shape),
        State(f"{name}.bias", shape),
        State(f"{name}.running_mean", shape, is_parameter=False),
        State(f"{name}.running_var", shape, is_parameter=False),
        State(f"{name}.num_batches_tracked", (), is_parameter=False, element_bytes=INT64_BYTES),
    )


def _embedding_states(layer: Embeddings) -> tuple[State, ...]:
    tables = tuple(State(f"{t.name}.weight", (t.n_rows, t.width)) for t in layer.tables)
    if not layer.n_stored_positions:
        return tables
    buffers = tuple(
        State(
            f"{layer.name}.{what}",
            (1, layer.n_stored_positions),
            is_parameter=False,
            element_bytes=INT64_BYTES,
        )
        for what in ("position_ids", "token_type_ids")
    )
    return (*tables, *buffers)


def parameter_count(layer: Layer) -> int:
    """Count the elements of all parameters; buffers are not counted.

    Examples
    --------
    >>> parameter_count(Linear("fc", 3, 2))
    8
    """
    return sum(state.count for state in states(layer) if state.is_parameter)
