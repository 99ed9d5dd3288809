"""Training steps of networks: counts, bytes and order, against sums written out by hand.

"As PyTorch does" in a name means: the sequence was recorded with torch 2.13.0 (CPU, eager, small sizes), by its
memory profiler, from models written after torchvision, transformers and nanoGPT.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import numpy as np
import pytest

from nsan.errors import ProgramError
from nsan.model.networks import NETWORKS, SMALL, Training, training_program
from nsan.model.networks.layers import Embeddings, Linear, Sequence, Table, states, walk
from nsan.model.networks.tensors import (
    Compute,
    Create,
    Drop,
    HostWrite,
    Phase,
    Step,
    Tensor,
    TensorProgram,
    check,
    peak,
)

N = 2000 if os.environ.get("NSAN_SOAK") == "1" else 30
BY_NAME = {network.name: network for network in NETWORKS}
NAMES = tuple(BY_NAME)
TEXTS = ("bert-base", "gpt2-small")
IMAGES = ("alexnet", "resnet-50")

ALEXNET, RESNET_50 = 61_100_840, 25_557_032
BERT_BASE, GPT2_SMALL = 109_482_240, 124_439_808
COUNTS = dict(zip(NAMES, (ALEXNET, RESNET_50, BERT_BASE, GPT2_SMALL), strict=True))
CUBLAS = 2 * (2 * 4096 + 8 * 16) * 1024 + 1024 * 1024
"""Two threads with 2 x 4096 KiB and 8 x 16 KiB each, and 1 MiB for cuBLASLt."""


def built(name, **sizes):
    return BY_NAME[name].build(**sizes)


def small(name, *, batch=1, steps=2, varying=False):
    size = {"sequence": 16} if name in TEXTS else {"image": 64}
    return built(name, batch=batch, steps=steps, varying=varying, **size)


def creations(program):
    return {o.tensor.name: o.tensor for o in program.operations if isinstance(o, Create)}


def places(program, kind):
    """Index of the operations of a kind, by name; the last of each name."""
    return {o.name: i for i, o in enumerate(program.operations) if isinstance(o, kind)}


def kernels(program, pattern, *, step=None):
    """Names of kernels that match, in order."""
    found, now = [], 0
    for operation in program.operations:
        if isinstance(operation, Step):
            now = operation.number
        if isinstance(operation, Compute) and (step is None or now == step):
            match = re.fullmatch(pattern, operation.name)
            found += [match[1] if match.groups() else operation.name] if match else []
    return found


# Parameters ---------------------------------------------------------------------------------------


def test_alexnet_has_the_parameters_of_the_paper_sum():
    convolutions = (
        64 * 363 + 64,
        192 * 1600 + 192,
        384 * 1728 + 384,
        256 * 3456 + 256,
        256 * 2304 + 256,
    )
    assert convolutions == (23_296, 307_392, 663_936, 884_992, 590_080)
    linear = 9216 * 4096 + 4096, 4096 * 4096 + 4096, 4096 * 1000 + 1000
    assert linear == (37_752_832, 16_781_312, 4_097_000)
    assert sum(convolutions) + sum(linear) == ALEXNET
    assert built("alexnet", steps=1, batch=1).facts["parameter_count"] == ALEXNET


def test_resnet_50_has_the_parameters_of_its_blocks():
    # conv1 of 7 x 7 x 3 x 64 and its norm; blocks of 1 x 1, 3 x 3, 1 x 1 with norms of 2 w, 2 w, 8 w.
    stem = 9_408 + 128
    stage_1 = 75_008 + 2 * 70_400  # 64*64 + 9*64*64 + 64*256 + 256*64 + norms 128 + 128 + 512 + 512
    stage_2 = 379_392 + 3 * 280_064
    stage_3 = 1_512_448 + 5 * 1_117_184
    stage_4 = 6_039_552 + 2 * 4_462_592
    assert (stage_1, stage_2, stage_3, stage_4) == (215_808, 1_219_584, 7_098_368, 14_964_736)
    head = 2048 * 1000 + 1000
    assert stem + stage_1 + stage_2 + stage_3 + stage_4 + head == RESNET_50
    program = built("resnet-50", steps=1, batch=1)
    assert program.facts["parameter_count"] == RESNET_50


def test_resnet_8_has_the_parameters_of_its_blocks_and_saves_their_outputs():
    # Convolutions of 3 x 3 with a norm each; two blocks have a projection of 1 x 1 with a norm.
    stem, stage_1 = 27 * 16 + 32, 2 * (144 * 16 + 32)
    stage_2 = 144 * 32 + 288 * 32 + 16 * 32 + 3 * 64
    stage_3 = 288 * 64 + 576 * 64 + 32 * 64 + 3 * 128
    parameters = stem + stage_1 + stage_2 + stage_3 + 64 * 10 + 10
    assert parameters == 78_042
    (network,) = SMALL
    program = network.build(steps=1, batch=3)
    assert program.facts["parameter_count"] == parameters
    # A convolution's output is saved by its norm, a ReLU's result by the next convolution.
    elements = 6 * 16 * 32**2 + 5 * 32 * 16**2 + 5 * 64 * 8**2
    per_image = 4 * elements + 4 * 64 + 2 * 4 * 10
    statistics = 2 * 4 * (3 * 16 + 3 * 32 + 3 * 64)
    assert program.facts["per_step"][0]["saved_bytes"] == 3 * per_image + statistics + 8
    assert check(program) == []


def test_running_statistics_are_buffers_and_not_parameters():
    # Channels of all norms: 64; 3 x (64+64+256) + 256; 4 x (128+128+512) + 512; and so on.
    channels = 64 + 1_408 + 3_584 + 10_240 + 11_264
    assert channels == 26_560
    program = built("resnet-50", steps=1, batch=1)
    # Mean and variance in fp32, and an int64 count for each of 53 norms.
    assert program.facts["buffer_bytes"] == 2 * 4 * channels + 53 * 8


def test_bert_base_has_the_parameters_of_the_encoder_with_its_pooler():
    d = 768
    embeddings = (30_522 + 512 + 2) * d + 2 * d
    layer = 4 * (d * d + d) + 2 * d + (d * 4 * d + 4 * d) + (4 * d * d + d) + 2 * d
    assert (embeddings, layer) == (23_837_184, 7_087_872)
    assert embeddings + 12 * layer + d * d + d == BERT_BASE
    assert small("bert-base", steps=1).facts["parameter_count"] == BERT_BASE


def test_gpt2_small_has_its_parameters_with_the_head_tied_to_the_embedding():
    d = 768
    embeddings = (50_257 + 1_024) * d
    layer = (
        2 * d + (3 * d * d + 3 * d) + (d * d + d) + 2 * d + (4 * d * d + 4 * d) + (4 * d * d + d)
    )
    assert (embeddings, layer) == (39_383_808, 7_087_872)
    assert embeddings + 12 * layer + 2 * d == GPT2_SMALL
    program = small("gpt2-small", steps=1)
    assert program.facts["parameter_count"] == GPT2_SMALL
    assert "lm_head.weight" not in creations(program)


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_is_one_tensor_filled_by_the_cpu_before_the_first_step(name):
    program = small(name, steps=1)
    before = program.operations[: program.operations.index(Step(1))]
    made = [o.tensor for o in before if isinstance(o, Create) and o.tensor.role == "parameter"]
    assert sum(t.n_bytes for t in made) == 4 * COUNTS[name]
    assert {t.name for t in made} <= {o.name for o in before if isinstance(o, HostWrite)}
    assert not any(isinstance(o, Compute) for o in before)


# What is kept -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_parameters_gradients_and_optimizer_take_three_or_four_times_the_parameters(name):
    program = small(name, steps=2)
    left = dict.fromkeys(("parameter", "gradient", "optimizer", "activation", "input"), 0)
    alive = creations(program)
    for operation in program.operations:
        if isinstance(operation, Drop):
            del alive[operation.name]
    for tensor in alive.values():
        left[tensor.role] = left.get(tensor.role, 0) + tensor.n_bytes
    n_tensors = sum(t.role == "parameter" for t in alive.values())
    # AdamW keeps two moments and a step counter of 4 B per parameter; SGD keeps one momentum.
    states_bytes = 8 * COUNTS[name] + 4 * n_tensors if name in TEXTS else 4 * COUNTS[name]
    assert left["parameter"] == left["gradient"] == 4 * COUNTS[name]
    assert left["optimizer"] == states_bytes == program.facts["optimizer_bytes"]
    assert left["activation"] == left["input"] == 0
    assert left["workspace"] == CUBLAS


def test_the_networks_have_as_many_parameter_tensors_as_their_layers():
    n_tensors = {
        name: sum(
            o.tensor.role == "parameter" for o in small(name).operations if isinstance(o, Create)
        )
        for name in NAMES
    }
    # 8 layers with biases; 53 convolutions, 53 norms, fc; 3 tables, norm, 12 x 8 layers, pooler;
    # 2 tables, 12 x 6 layers, norm.
    assert n_tensors == {
        "alexnet": 16,
        "resnet-50": 53 + 106 + 2,
        "bert-base": 3 + 2 + 12 * 16 + 2,
        "gpt2-small": 2 + 12 * 12 + 2,
    }


# What the backward pass needs ---------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_alexnet_saves_for_its_backward_pass_what_the_sum_says(batch):
    # Per image, elements: convolutions whose ReLU is in place, then pools (value and int64 index).
    convolutions = 4 * (64 * 55**2 + 192 * 27**2 + 384 * 13**2 + 2 * 256 * 13**2)
    pools = 12 * (64 * 27**2 + 192 * 13**2 + 256 * 6**2)
    # Dropouts keep a mask byte and their result, which the linear layer saves; ReLUs their result.
    classifier = 5 * 9216 + 4 * 4096 + 5 * 4096 + 4 * 4096
    # The output is a local of the step, log_softmax is saved; loss and total weight have 4 B each.
    head = 4 * 1000 + 4 * 1000
    per_image = convolutions + pools + classifier + head
    assert per_image == 3_107_136
    step = built("alexnet", batch=batch, steps=1).facts["per_step"][0]
    assert step["saved_bytes"] == batch * per_image + 8


@pytest.mark.parametrize("batch", [1, 3])
def test_resnet_50_saves_for_its_backward_pass_what_the_sum_says(batch):
    # Elements per image. A convolution's output is saved by its norm, the ReLU's result by the next
    # convolution. A block has 2 w s, 2 w s, 2 (4 w) s; the first also what its shortcut's norm saves,
    # and its first convolution still has the side of the stage before.
    stem = 2 * 64 * 112**2 + 64 * 56**2
    stage_1 = 3 * (2 + 2 + 8) * 64 * 56**2 + 256 * 56**2
    stage_2 = 4 * 12 * 128 * 28**2 + 2 * 128 * (56**2 - 28**2) + 512 * 28**2
    stage_3 = 6 * 12 * 256 * 14**2 + 2 * 256 * (28**2 - 14**2) + 1024 * 14**2
    stage_4 = 3 * 12 * 512 * 7**2 + 2 * 512 * (14**2 - 7**2) + 2048 * 7**2
    assert stem + stage_1 + stage_2 + stage_3 + stage_4 == 20_923_392
    # The pool's int64 indices; input of fc; output and log_softmax.
    per_image = 4 * 20_923_392 + 8 * 64 * 56**2 + 4 * 2048 + 2 * 4 * 1000
    statistics = 2 * 4 * 26_560
    step = built("resnet-50", batch=batch, steps=1).facts["per_step"][0]
    assert step["saved_bytes"] == batch * per_image + statistics + 8


def transformer_layer(batch, length):
    """Bytes that one layer of width 768 with 12 heads saves."""
    n = batch * length
    # 8 tensors of the width in fp32 (input, norm's output or sum, q, k, v, context, and so on), two of four
    # times the width around gelu, two dropout masks of a byte; mean and deviation of two norms.
    rows = (8 * 4 + 2 * 16 + 2) * 768 * n + 2 * 2 * 4 * n
    # Softmax, dropout mask, dropout result.
    return rows + (4 + 1 + 4) * 12 * batch * length**2


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (3, 16), (2, 128)])
def test_bert_base_saves_for_its_backward_pass_what_the_sum_says(batch, length):
    n = batch * length
    embeddings = 4 * 768 * n + 2 * 4 * n + 768 * n  # input and statistics of the norm, dropout mask
    pooler = 4 * 768 * n + 4 * 768 * batch  # its input is a view of the last layer's output
    step = built("bert-base", batch=batch, sequence=length, steps=1).facts["per_step"][0]
    expected = embeddings + 12 * transformer_layer(batch, length) + pooler + 4
    assert step["saved_bytes"] == expected


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (3, 16), (1, 256)])
def test_gpt2_small_saves_for_its_backward_pass_what_the_sum_says(batch, length):
    n = batch * length
    embeddings = 8 * length + 768 * n  # positions, dropout mask
    layers = 12 * (transformer_layer(batch, length) + length**2)  # and the causal mask of a byte
    head = 2 * 4 * 768 * n + 2 * 4 * n + 2 * 4 * 50_257 * n  # norm, its output; logits, log_softmax
    step = built("gpt2-small", batch=batch, sequence=length, steps=1).facts["per_step"][0]
    assert step["saved_bytes"] == embeddings + layers + head + 8


# Peaks --------------------------------------------------------------------------------------------


def test_the_peak_of_alexnet_is_where_the_second_pool_has_its_gradient():
    found = peak(built("alexnet").operations)
    # Gradients of all but the first two convolutions are there.
    gradients = 4 * (ALEXNET - 23_296 - 307_392)
    # ReLU 2 backward: its result, the gradient from above and its own; what the layers below saved.
    relu = 3 * 4 * 32 * 192 * 27**2
    below = 12 * 32 * 64 * 27**2 + 4 * 32 * 64 * 55**2
    activations = relu + below + 4 * 32 * 1000 + 8
    images = 4 * 32 * 3 * 224**2 + 8 * 32
    assert found.n_bytes == 2 * 4 * ALEXNET + gradients + activations + images + CUBLAS
    assert found.n_bytes == 865_815_528


def test_the_peak_of_resnet_50_is_in_the_first_block_of_the_last_stage():
    found = peak(built("resnet-50").operations)
    # What stem and stages 1 to 3 save (see the test above), and of layer4.0 what conv1 and bn1 left.
    elements = 1_806_336 + 8_028_160 + 5_820_416 + 4_114_432 + 2 * 512 * 14**2
    saved = 8 * (4 * elements + 8 * 64 * 56**2) + 8 * (64 + 1_408 + 3_584 + 10_240 + 512)
    # Gradients: from the shortcut to the block's input, and before and after the first ReLU.
    gradients = 4 * 8 * (1024 * 14**2 + 2 * 512 * 14**2)
    local = 4 * 8 * 1000 + 8
    # Parameters' gradients: fc, layer4.2, layer4.1, and layer4.0 but conv1 and bn1.
    own = 4 * (2_049_000 + 2 * 4_462_592 + 6_039_552 - 1024 * 512 - 2 * 512)
    images = 4 * 8 * 3 * 224**2 + 8 * 8
    kept = 2 * 4 * RESNET_50 + 212_904 + CUBLAS
    assert found.n_bytes == saved + gradients + local + own + images + kept
    assert found.n_bytes == 958_417_872


def test_the_peak_of_bert_base_is_at_the_last_gradient():
    found = peak(built("bert-base").operations)
    kept = 16 * BERT_BASE + 4 * 199 + 2 * 512 * 8 + CUBLAS
    inputs = 3 * 8 * 2 * 128 + 4 * 2 * 768
    rest = (
        4 * 2 * 128 * 768 + 4 * 2 * 768 + 4 + 4
    )  # gradient of the sum; output, loss and its gradient
    assert found.n_bytes == kept + inputs + rest == 1_770_617_636


def test_the_peak_of_gpt2_small_is_where_the_gradients_of_the_tied_weight_are_added():
    found = peak(built("gpt2-small").operations)
    mask = 12 * 4 * 1024**2
    kept = 16 * GPT2_SMALL + 4 * 148 + mask + CUBLAS
    # From the head, from the embedding, and their sum; one of them is among the 16 above.
    tied = 2 * 4 * 50_257 * 768
    rest = 2 * 8 * 256 + 4 * 256 * 50_257 + 4 + 4
    assert found.n_bytes == kept + tied + rest == 2_419_703_384


@pytest.mark.parametrize("name", NAMES)
def test_defaults_have_a_peak_between_half_and_three_gigabytes(name):
    facts = built(name).facts
    assert 0.5e9 < facts["peak_bytes"] < 3e9
    assert sum(facts["peak_bytes_by_role"].values()) == facts["peak_bytes"]
    assert facts["peak_bytes"] == max(row["peak_bytes"] for row in facts["per_step"])


# Order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_programs_do_nothing_that_a_program_may_not(name, batch, varying):
    assert check(built(name, batch=batch, varying=varying, steps=3)) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_backward_pass_visits_the_layers_in_reverse(name):
    program = small(name, steps=1)
    kinds = "convolution|batch_norm|addmm|layer_norm|embedding"
    forward = kernels(program, rf"(\S+) (?:{kinds}) forward")
    backward = kernels(
        program, r"(\S+) (?:convolution|mm|layer_norm|batch_norm|embedding) backward(?: weight)?"
    )
    assert len(forward) == len(set(forward)) > 7
    assert backward == forward[::-1]


@pytest.mark.parametrize("name", NAMES)
def test_steps_have_their_phases_in_order_and_update_each_parameter_once(name):
    program = small(name, steps=2)
    marks = [o for o in program.operations if isinstance(o, (Step, Phase))]
    phases = [Phase("forward"), Phase("backward"), Phase("update")]
    assert marks == [Step(1), *phases, Step(2), *phases]
    parameters = [o.name for o in states(BY_NAME[name].network.body) if o.is_parameter]
    for step in (1, 2):
        assert kernels(program, r"(?:sgd|adamw) (\S+\.(?:weight|bias))", step=step) == parameters


@pytest.mark.parametrize("name", NAMES)
def test_no_input_of_a_layer_is_dropped_before_the_backward_pass_used_it(name):
    program = small(name, batch=2, steps=1)
    dropped = places(program, Drop)
    backward = places(program, Compute)
    inputs = {
        o.name.split()[0]: o.reads[0]
        for o in program.operations
        if isinstance(o, Compute) and re.search(r"(convolution|addmm) forward$", o.name)
    }
    assert len(inputs) > 7
    for layer, read in inputs.items():
        kind = "convolution" if f"{layer} convolution backward weight" in backward else "mm"
        assert dropped[read] > backward[f"{layer} {kind} backward weight"]


@pytest.mark.parametrize("name", NAMES)
def test_all_activations_and_inputs_of_a_step_are_dropped_by_its_end(name):
    program = small(name, batch=2, steps=3, varying=True)
    alive, roles = set(), {n: t.role for n, t in creations(program).items()}
    n_checked = 0
    for operation in (*program.operations, Step(4)):
        if isinstance(operation, Create):
            alive.add(operation.tensor.name)
        elif isinstance(operation, Drop):
            alive.discard(operation.name)
        elif isinstance(operation, Step):
            left = {n for n in alive if roles[n] in {"activation", "input"}}
            assert left == set()
            n_checked += 1
    assert n_checked == 4


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_dropped_when_the_next_step_begins_and_made_again(name):
    program = small(name, steps=2)
    start = program.operations.index(Step(2))
    end = next(i for i, o in enumerate(program.operations) if i > start and not isinstance(o, Drop))
    gone = {o.name for o in program.operations[start + 1 : end]}
    made = creations(program)
    assert sum(made[n].n_bytes for n in gone) == 4 * COUNTS[name]
    assert {made[n].role for n in gone} == {"gradient"}


def test_optimizer_states_are_made_in_the_first_update_before_any_parameter_changes():
    program = small("bert-base", steps=2)
    update = program.operations.index(Phase("update"))
    made = [
        i
        for i, o in enumerate(program.operations)
        if isinstance(o, Create) and o.tensor.role == "optimizer"
    ]
    first = places(program, Compute)
    changes = next(
        i
        for i, o in enumerate(program.operations)
        if isinstance(o, Compute) and o.name == "adamw embeddings.word_embeddings.weight"
    )
    assert len(made) == 3 * 199
    assert update < min(made) < max(made) < changes < first["adamw pooler.dense.bias"]


def test_an_update_reads_gradient_and_states_and_writes_parameter_and_states():
    program = small("gpt2-small", steps=1)
    (update,) = (
        o
        for o in program.operations
        if isinstance(o, Compute) and o.name == "adamw h.3.mlp.c_fc.weight"
    )
    own = tuple(f"h.3.mlp.c_fc.weight.{what}#1" for what in ("exp_avg", "exp_avg_sq", "step"))
    assert update.reads == ("h.3.mlp.c_fc.weight", "h.3.mlp.c_fc.weight.grad#1", *own)
    assert update.writes == ("h.3.mlp.c_fc.weight", *own)


def test_the_first_update_of_sgd_does_not_read_the_momentum_that_it_makes():
    program = small("alexnet", steps=2)
    updates = [
        o for o in program.operations if isinstance(o, Compute) and o.name == "sgd features.0.bias"
    ]
    momentum = "features.0.bias.momentum_buffer#1"
    assert [momentum in o.reads for o in updates] == [False, True]
    assert all(momentum in o.writes for o in updates)


def test_a_relu_in_place_makes_no_tensor_and_its_backward_pass_makes_one():
    program = small("alexnet", steps=1)
    found = {o.name: o for o in program.operations if isinstance(o, Compute)}
    relu = found["features.4 relu_ forward"]
    assert relu.reads == relu.writes == ("features.3.output#1",)
    assert found["features.4 threshold backward"].writes == ("features.4.input.grad#1",)


# As PyTorch does ----------------------------------------------------------------------------------

GPT2_BLOCK_FORWARD = """
+n +r +r +3n +n +n +s +s -s +h +s -s +s -s +sm +s +n +n +n -n +n +m +n -n -3n +n -n
+n +r +r +4n +4n +n +m +n -n +n -n
"""
GPT2_BLOCK_BACKWARD = """
+n -m +4n +4w +b -n -4n +4n -4n -4n +n +4w +4b -4n -n +n +b +b -n -n -r -r -n
+n -m +n +w +b -n -n +n -n +n +s -n -n -s +s -s -sm +s -s -s +s -s -h +s -s +n +n -s -n -n
+n -n +n -n +3n -n -n -n +n +3w +3b -3n -n +n +b +b -n -n -r -r -n
"""
BERT_LAYER_FORWARD = """
+n +n +n +n +n +s +s -s +s -s +s -s +sm +s +n +n +n -n -n -n -n +n +m +n -n +n +n +r +r -n
+4n +4n +n +m +n -n +n +n +r +r -n
"""
RESNET_BLOCK_FORWARD = "+4q +4q +c +c +q +q +c +c +4q +4q +4c +4c +4q +4q +4c +4c -4q"
"""The first block of the second stage: three convolutions and norms, then those of the shortcut."""

BLOCK_SIZES = {
    "n": 4 * 2 * 32 * 768,
    "m": 2 * 32 * 768,
    "r": 4 * 2 * 32,
    "s": 4 * 2 * 12 * 32**2,
    "sm": 2 * 12 * 32**2,
    "h": 32**2,
    "w": 4 * 768**2,
    "b": 4 * 768,
    "q": 4 * 2 * 128 * 12**2,
    "c": 4 * 128,
}
"""Two texts of 32 tokens: activations, masks, rows, scores, hidden pairs, weights, biases; two images of
96 x 96: a quarter of the wide activations, channels."""


def recorded(text):
    """Signed sizes of a transcript, frees that follow each other in any order."""
    found = []
    for word in text.split():
        sign, times, what = re.fullmatch(r"([+-])(\d*)(\w+)", word).groups()
        found.append((-1 if sign == "-" else 1) * int(times or 1) * BLOCK_SIZES[what])
    return in_runs(found)


def in_runs(sizes):
    """Sort what is made, or freed, without the other in between."""
    runs = [[]]
    for size in sizes:
        if runs[-1] and (runs[-1][-1] > 0) != (size > 0):
            runs.append([])
        runs[-1].append(size)
    return [sorted(run) for run in runs]


def between(program, first, last):
    """Signed sizes from the creation of one tensor up to that of another."""
    made, sizes, inside = creations(program), [], False
    for operation in program.operations:
        if isinstance(operation, Create):
            if operation.tensor.name == last:
                break
            inside = inside or operation.tensor.name == first
            n_bytes = operation.tensor.n_bytes
        elif isinstance(operation, Drop):
            n_bytes = -made[operation.name].n_bytes
        else:
            continue
        name = operation.tensor.name if isinstance(operation, Create) else operation.name
        # The temporary of softmax's backward pass, and workspaces, exist only on a GPU.
        if inside and "softmax.product" not in name and made[name].role != "workspace":
            sizes.append(n_bytes)
    return in_runs(sizes)


def test_a_block_of_gpt2_makes_and_frees_in_the_forward_pass_as_pytorch_does():
    program = built("gpt2-small", batch=2, sequence=32, steps=1)
    found = between(program, "h.5.ln_1.output#1", "h.6.ln_1.output#1")
    assert found == recorded(GPT2_BLOCK_FORWARD)


def test_a_block_of_gpt2_makes_and_frees_in_the_backward_pass_as_pytorch_does():
    program = built("gpt2-small", batch=2, sequence=32, steps=1)
    found = between(program, "h.5.mlp.dropout.input.grad#1", "h.4.mlp.dropout.input.grad#1")
    assert found == recorded(GPT2_BLOCK_BACKWARD)


def test_a_layer_of_bert_makes_and_frees_in_the_forward_pass_as_pytorch_does():
    program = built("bert-base", batch=2, sequence=32, steps=1)
    query = "encoder.layer.{}.attention.self.query.output#1"
    found = between(program, query.format(5), query.format(6))
    assert found == recorded(BERT_LAYER_FORWARD)


def test_a_block_of_resnet_makes_and_frees_in_the_forward_pass_as_pytorch_does():
    program = built("resnet-50", batch=2, image=96, steps=1)
    found = between(program, "layer2.0.conv1.output#1", "layer2.1.conv1.output#1")
    assert found == recorded(RESNET_BLOCK_FORWARD)


def test_one_text_per_batch_needs_no_copies_of_q_and_k_and_v():
    one, two = (small("bert-base", batch=batch, steps=1) for batch in (1, 2))
    assert kernels(one, r".*layer\.0\..*copy [qkv]") == []
    assert len(kernels(two, r".*layer\.0\..*copy [qkv]")) == 3
    # The gradient of k comes out transposed, and one text needs no order of its own.
    assert kernels(one, r".*layer\.0\..*copy ([qkv]) backward") == ["v", "q"]
    assert kernels(two, r".*layer\.0\..*copy ([qkv]) backward") == ["v", "k", "q"]
    joined = small("gpt2-small", batch=2, steps=1)
    assert kernels(joined, r"h\.0\..*copy ([qkv]) backward") == ["v", "q"]


def test_the_workspaces_of_cublas_come_after_the_output_of_the_first_product_and_stay():
    # In a real history of torch 2.9: output, 8 519 680 B, 1 048 576 B, within the first linear layer.
    operations = small("bert-base", steps=1).operations
    at = [
        i
        for i, o in enumerate(operations)
        if isinstance(o, Create) and o.tensor.role == "workspace"
    ]
    sizes = [operations[i].tensor.n_bytes for i in at]
    assert sizes == [8_519_680, 1_048_576, 8_519_680]
    assert operations[at[0] - 1].tensor.name == "encoder.layer.0.attention.self.query.output#1"
    backward = operations.index(Phase("backward"))
    assert at[1] < backward < at[2]


def test_many_tokens_need_sorted_indices_for_the_gradient_of_an_embedding():
    few = built("gpt2-small", batch=3, sequence=1024, steps=1)
    many = built("gpt2-small", batch=4, sequence=1024, steps=1)
    assert kernels(few, r"wte sort indices") == []
    assert kernels(many, r"wte sort indices") == ["wte sort indices"]
    assert creations(many)["wte.sorted_indices#1"].n_bytes == 8 * 4 * 1024


# Work ---------------------------------------------------------------------------------------------


def forward_flops(program):
    end = program.operations.index(Phase("backward"))
    pattern = r"(convolution|addmm|bmm \w+) forward$"
    return sum(
        o.flops
        for o in program.operations[:end]
        if isinstance(o, Compute) and re.search(pattern, o.name)
    )


def test_products_of_the_image_networks_have_the_published_flops():
    # Multiply-adds of one image: convolutions 655 566 528 and linear 58 621 952; ResNet-50 4 089 184 256.
    assert forward_flops(built("alexnet", batch=1, steps=1)) == 2 * 714_188_480
    assert forward_flops(built("resnet-50", batch=1, steps=1)) == 2 * 4_089_184_256


@pytest.mark.parametrize(
    ("name", "extra"), [("bert-base", 0), ("gpt2-small", 50_257 * 768 * 3 * 64)]
)
def test_products_of_the_text_networks_have_the_flops_of_their_shapes(name, extra):
    # Per layer 12 d^2 weights for each of 3 x 64 tokens, and two products of 3 x 64^2 x d.
    layer = 12 * 768**2 * 3 * 64 + 2 * 3 * 64**2 * 768
    pooler = 768**2 * 3 if name == "bert-base" else 0
    program = built(name, batch=3, sequence=64, steps=1)
    assert forward_flops(program) == 2 * (12 * layer + extra + pooler)


def test_the_backward_pass_of_products_has_twice_the_flops_of_the_forward_pass():
    program = built("gpt2-small", batch=2, sequence=32, steps=1)
    pattern = r"(mm backward (input|weight)|bmm \w+ backward (left|right))$"
    backward = sum(
        o.flops for o in program.operations if isinstance(o, Compute) and re.search(pattern, o.name)
    )
    assert backward == 2 * forward_flops(program)


def test_a_lookup_reads_the_rows_that_it_takes_and_not_the_table():
    program = small("bert-base", batch=2, steps=1)
    rows = 4 * 2 * 16 * 768
    assert program.facts["sparse_reads"]["embeddings.word_embeddings embedding forward"] == rows
    made = creations(program)
    read = sum(
        made[name].n_bytes for o in program.operations if isinstance(o, Compute) for name in o.reads
    )
    # Words: the rows instead of the table; positions: 16 rows; types: both, of 32 looked up.
    saved = 4 * 768 * (30_522 - 32) + 4 * 768 * (512 - 16)
    assert program.facts["per_step"][0]["read_bytes"] == read - saved


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_counted_as_they_are(name):
    program = small(name, batch=2, steps=2)
    second = program.operations[program.operations.index(Step(2)) :]
    computes = [o for o in second if isinstance(o, Compute)]
    row = program.facts["per_step"][1]
    assert row["n_operations"] == len(second)
    assert row["n_kernels"] == len(computes)
    assert row["n_tensors"] == sum(isinstance(o, Create) for o in second)
    assert row["flops"] == sum(o.flops for o in computes)
    sizes = {n: t.n_bytes for n, t in creations(program).items()}
    assert row["written_bytes"] == sum(sizes[n] for o in computes for n in o.writes)


# Sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_varying_texts_have_other_lengths_with_the_seed_deciding(name):
    def lengths(seed):
        program = built(name, batch=2, sequence=64, steps=5, varying=True, seed=seed)
        assert [row["batch"] for row in program.facts["per_step"]] == [2] * 5
        return [row["extent"] for row in program.facts["per_step"]]

    found = lengths(1)
    assert found == lengths(1)
    assert found != lengths(2)
    assert len(set(found)) > 2
    assert all(16 <= length <= 64 for length in found)


def test_varying_images_come_in_other_batches():
    program = small("resnet-50", batch=8, steps=12, varying=True)
    batches = [row["batch"] for row in program.facts["per_step"]]
    assert len(set(batches)) > 2
    assert min(batches) >= 4
    assert max(batches) <= 8
    made = creations(program)
    for step, batch in enumerate(batches, start=1):
        assert made[f"images#{step}"].n_bytes == 4 * batch * 3 * 64**2


def test_what_a_step_saves_grows_evenly_with_the_batch():
    for name in NAMES:
        two, three, four = (
            small(name, batch=batch, steps=1).facts["per_step"][0]["saved_bytes"]
            for batch in (2, 3, 4)
        )
        assert three - two == four - three > 0


def test_random_programs_are_right_and_each_tensor_has_one_life():
    random = np.random.default_rng(6)
    for _ in range(N):
        name = NAMES[random.integers(len(NAMES))]
        is_text = name in TEXTS
        training = Training(
            batch=int(random.integers(1, 9)),
            extent=int(random.integers(2, 100) if is_text else random.integers(64, 160)),
            steps=int(random.integers(1, 4)),
            varying=bool(random.integers(2)),
            seed=int(random.integers(1 << 20)),
            conv_workspace_cap_bytes=int(random.choice([0, 1000, 32 << 20])),
        )
        program = training_program(BY_NAME[name].network, training)
        assert check(program) == []
        names = [o.tensor.name for o in program.operations if isinstance(o, Create)]
        assert len(names) == len(set(names))
        assert len(program.facts["per_step"]) == training.steps


def test_a_cap_of_zero_leaves_convolutions_without_workspace():
    training = Training(batch=1, extent=64, steps=1, conv_workspace_cap_bytes=0)
    program = training_program(BY_NAME["alexnet"].network, training)
    names = [t.name for t in creations(program).values() if t.role == "workspace"]
    assert all(name.startswith("cublas") for name in names)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("bert-base", {"sequence": 513}, "513 for tokens per text. Choose 2 to 512"),
        ("gpt2-small", {"sequence": 1}, "1 for tokens per text. Choose 2 to 1024"),
        ("alexnet", {"image": 32}, "32 for pixels a side. Choose 64 to 4096"),
        ("resnet-50", {"batch": 0}, "0 for a batch. Choose 1 to"),
        ("alexnet", {"steps": 0}, "0 for steps. Choose 1 to"),
        ("alexnet", {"sequence": 8}, "takes images, and a size of texts"),
        ("bert-base", {"image": 224}, "takes texts, and a size of images"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_what_can(name, sizes, said):
    with pytest.raises(ProgramError, match=re.escape(said)):
        built(name, **sizes)


def test_a_workspace_below_zero_is_refused():
    with pytest.raises(ProgramError, match="-1 B cannot be"):
        training_program(BY_NAME["alexnet"].network, Training(gemm_workspace_bytes=-1))


# The checker and the tables -----------------------------------------------------------------------

A = Tensor("a", 4, "activation")
PROGRAMS = {
    "a is used before it is created": [Compute("k", ("a",), (), 0.0)],
    "a is used after its drop": [Create(A), Drop("a"), Compute("k", (), ("a",), 0.0)],
    "a is dropped a second time": [Create(A), Drop("a"), Drop("a")],
    "a is dropped before it is created": [Drop("a")],
    "a is created a second time": [Create(A), Drop("a"), Create(A), Drop("a")],
    "a has 0 bytes": [Create(replace(A, n_bytes=0)), Drop("a")],
    "a has the role 'other'": [Create(replace(A, role="other")), Drop("a")],
    "a (activation) is never dropped": [Create(A)],
    "b (workspace) is never dropped": [Create(Tensor("b", 4, "workspace"))],
    "k has -1.0 FLOPs": [Compute("k", (), (), -1.0)],
    "update where backward is due": [Step(1), Phase("forward"), Phase("update"), Phase("update")],
    "step 3 where 2 is due": [Step(1), *map(Phase, ("forward", "backward", "update")), Step(3)],
    "a step begins before the backward": [Step(1), Phase("forward"), Step(2)],
    "forward where the next step is due": [Phase("forward")],
    "never.written is used before": [HostWrite("never.written")],
}


@pytest.mark.parametrize("said", PROGRAMS)
def test_the_checker_finds_what_is_wrong(said):
    found = check(TensorProgram("wrong", tuple(PROGRAMS[said])))
    assert len(found) == 1
    assert said in found[0]


def test_the_checker_counts_different_tensors_of_a_kernel():
    made = [Create(replace(A, name=f"t{i}")) for i in range(13)]
    drops = [Drop(f"t{i}") for i in range(13)]
    names = tuple(f"t{i}" for i in range(13))
    twelve = Compute("k", names[:12], names[:12], 0.0)
    assert check(TensorProgram("right", (*made, twelve, *drops))) == []
    found = check(
        TensorProgram("wrong", (*made, Compute("k", names[:12], names[12:], 0.0), *drops))
    )
    assert found == ["operation 13: k uses 13 tensors, of at most 12"]


def test_what_is_kept_may_outlive_a_program():
    roles = ("parameter", "gradient", "optimizer", "buffer")
    kept = [Create(Tensor(role, 4, role)) for role in roles]
    kept.append(Create(Tensor("cublas.workspace.forward", 4, "workspace")))
    assert check(TensorProgram("right", tuple(kept))) == []


def test_a_peak_counts_what_is_alive_at_one_time():
    b = Tensor("b", 10, "input")
    found = peak(
        [Create(A), Create(b), Drop("a"), Create(replace(A, name="c", n_bytes=3)), Drop("b")]
    )
    assert (found.n_bytes, found.operation) == (14, 1)
    assert (found.by_role["activation"], found.by_role["input"]) == (4, 10)
    assert peak([]).operation == -1


def test_a_table_of_an_own_network_can_be_trained():
    tables = (Table("words", 10, 4, "tokens"), Table("places", 8, 4, "positions"))
    body = Sequence("own", (Embeddings("own", tables), Linear("head", 4, 10)))
    network = replace(
        BY_NAME["gpt2-small"].network, name="own", body=body, largest=8, optimizer="sgd"
    )
    program = training_program(network, Training(batch=2, extent=8))
    assert check(program) == []
    assert program.facts["parameter_count"] == 10 * 4 + 8 * 4 + 4 * 10 + 10
    assert [layer.name for layer in walk(body)] == ["own", "own", "head"]
