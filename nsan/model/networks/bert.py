"""BERT-base, uncased, as ``BertModel`` with its pooler: 109 482 240 parameters.

No head is added, so that the well-known count holds exactly. The loss is the mean squared error between the
pooled output and a given vector per text, as when an encoder is distilled from another. Attention is the eager
form; dropout is 0.1 everywhere.
"""

from __future__ import annotations

from typing import Final

from nsan.model.networks.layers import (
    Attention,
    Dropout,
    Embeddings,
    FirstToken,
    Gelu,
    LayerNorm,
    Linear,
    Network,
    PaddingMask,
    Residual,
    Sequence,
    Table,
    Tanh,
)

N_LAYERS: Final = 12
N_HEADS: Final = 12
WIDTH: Final = 768
N_TOKENS: Final = 30_522
N_POSITIONS: Final = 512


def _embeddings() -> Sequence:
    name = "embeddings"
    tables = (
        Table(f"{name}.word_embeddings", N_TOKENS, WIDTH, "tokens"),
        Table(f"{name}.token_type_embeddings", 2, WIDTH, "segments"),
        Table(f"{name}.position_embeddings", N_POSITIONS, WIDTH, "positions"),
    )
    return Sequence(
        name,
        (
            Embeddings(name, tables, n_stored_positions=N_POSITIONS),
            LayerNorm(f"{name}.LayerNorm", WIDTH),
            Dropout(f"{name}.dropout"),
        ),
    )


def _block(name: str) -> Sequence:
    inner, output = f"{name}.attention.self", f"{name}.attention.output"
    projections = tuple(Linear(f"{inner}.{p}", WIDTH, WIDTH) for p in ("query", "key", "value"))
    attention = (
        Sequence(inner, (Attention(inner, WIDTH, N_HEADS, projections),)),
        Linear(f"{output}.dense", WIDTH, WIDTH),
        Dropout(f"{output}.dropout"),
    )
    feed_forward = (
        Linear(f"{name}.intermediate.dense", WIDTH, 4 * WIDTH),
        Gelu(f"{name}.intermediate.gelu"),
        Linear(f"{name}.output.dense", 4 * WIDTH, WIDTH),
        Dropout(f"{name}.output.dropout"),
    )
    return Sequence(
        name,
        (
            _normed(output, Sequence(f"{name}.attention", attention)),
            _normed(f"{name}.output", Sequence(f"{name}.feed_forward", feed_forward)),
        ),
    )


def _normed(name: str, main: Sequence) -> Sequence:
    """Normalise the sum of input and output; the function still holds the output meanwhile."""
    add = Residual(f"{name}.add", main, is_local=True)
    return Sequence(name, (add, LayerNorm(f"{name}.LayerNorm", WIDTH)))


BERT_BASE: Final = Network(
    name="bert-base",
    body=Sequence(
        "bert-base",
        (
            _embeddings(),
            PaddingMask("extended_attention_mask"),
            *(_block(f"encoder.layer.{number}") for number in range(N_LAYERS)),
            FirstToken("pooler.first_token"),
            Linear("pooler.dense", WIDTH, WIDTH),
            Tanh("pooler.activation"),
        ),
    ),
    loss="mean squared error",
    optimizer="adamw",
    batch=2,
    extent=128,
    smallest=2,
    largest=N_POSITIONS,
    inputs=("tokens", "mask", "segments", "targets"),
)
"""AdamW. Default: batch 2 of 128 tokens."""
