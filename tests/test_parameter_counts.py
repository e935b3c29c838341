"""The paper's models have the paper's numbers of parameters, derived without allocating one."""

import re

import pytest

from gshard_exp.config import assemble
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.state import abstract_params, num_params

# Table 1 of the paper prints 600B, 200B, 150B, 50B, 37B, 12.5B, 1T, 2.3B and 0.4B; the longer
# figures follow from the widths that its text names (M=1024, H=8192, 16 heads, 64k + 32k pieces).
PRINTED = {
    "moe_2048e_36l": "619.4B",
    "moe_2048e_12l": "206.5B",
    "moe_512e_36l": "155.5B",
    "moe_512e_12l": "51.9B",
    "moe_128e_36l": "39.5B",
    "moe_128e_12l": "13.2B",
    "moe_2048e_60l": "1032B",
    "dense_96l": "2.313B",
    "bilingual_big": "0.4B",
}


def model(name):
    files = [f"gin/paper/{name}.gin", "gin/tasks/random.gin"]
    return assemble(Experiment, files, ["MODEL_DIR='x'"]).tree.model


def matrices(layers, sparse, experts, heads_width, *, width=1024, hidden=8192):
    """Count encoder + decoder of `layers` each by hand; norms and embeddings included."""
    attention = 4 * width * heads_width
    ffn = 2 * width * hidden
    blocks = 3 * layers * attention + 2 * (layers - sparse) * ffn
    blocks += 2 * sparse * (experts * ffn + width * experts)
    norms = (2 + 3) * layers * width + 2 * width
    return blocks + norms + (64_000 + 32_000) * width


@pytest.mark.parametrize("name", PRINTED)
def test_parameter_count_is_the_printed_one(name):
    count = num_params(abstract_params(model(name))[0])
    printed = PRINTED[name]
    decimals = len(re.sub(r"^\d+\.?|B$", "", printed))
    assert f"{count / 1e9:.{decimals}f}B" == printed


def test_parameter_count_of_the_largest_model_of_table_1_by_hand():
    # 18 + 18 layers, 9 + 9 sparse, 2048 experts, 16 heads of 128.
    count = num_params(abstract_params(model("moe_2048e_36l"))[0])
    assert count == matrices(18, 9, 2048, 16 * 128)


def test_parameter_count_of_transformer_base_by_hand():
    # 6 + 6 dense layers, M=512, H=2048, 8 heads of 64.
    count = num_params(abstract_params(model("bilingual_base"))[0])
    assert count == matrices(6, 0, 0, 512, width=512, hidden=2048)


def test_models_take_the_same_room_with_more_layers_in_the_stack():
    # What is derived is the shape of a stack, not one array after another: 60 layers have as many
    # arrays as 12.
    few, many = (abstract_params(model(f"moe_2048e_{n}l"))[0] for n in (12, 60))
    assert few["encoder"].keys() == many["encoder"].keys()
