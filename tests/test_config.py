"""Both config forms, the tensors' word against the config's, and what is refused."""

import copy
from typing import Any

import pytest
from checkpoint.synthetic import hf_native, tiny_config

from sglang_dsv4.bench.published import FLASH, PRO
from sglang_dsv4.config import LayerKind, flat_config, from_config_dict
from sglang_dsv4.errors import ConfigError
from sglang_dsv4.kernels.reference.rope import YarnParams

SWA, CSA, HCA = LayerKind.SWA, LayerKind.CSA, LayerKind.HCA
MODELS = pytest.mark.parametrize("official", [FLASH, PRO], ids=["flash", "pro"])


def without(config: dict[str, Any], *paths: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for path in paths:
        *parents, last = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        del place[last]
    return config


@MODELS
def test_both_forms_give_equal_dims(official: dict[str, Any]):
    flat, flat_warnings = from_config_dict(official)
    native, native_warnings = from_config_dict(hf_native(official))
    assert flat == native
    assert flat_warnings == native_warnings == []


def test_flash_dims():
    dims, _ = from_config_dict(FLASH)
    assert (dims.hidden_size, dims.num_attention_heads, dims.nope_head_dim) == (4096, 64, 448)
    assert dims.layers_of(SWA) == (0, 1)
    assert dims.layers_of(CSA) == tuple(range(2, 43, 2))
    assert dims.layers_of(HCA) == tuple(range(3, 43, 2))
    assert dims.yarn == YarnParams(16.0, 65536, 32.0, 1.0)
    assert (dims.rope_theta, dims.compress_rope_theta) == (10000.0, 160000.0)


def test_pro_has_no_window_only_layer():
    """The trailing 0 of compress_ratios is the MTP slot, not layer 60."""
    dims, _ = from_config_dict(PRO)
    assert len(PRO["compress_ratios"]) == 62
    assert [len(dims.layers_of(kind)) for kind in (SWA, CSA, HCA)] == [0, 30, 31]
    assert dims.layer_kinds[60] is CSA


def test_dspark_config_ends_in_three_mtp_slots():
    dims, warnings = from_config_dict(
        FLASH | {"compress_ratios": FLASH["compress_ratios"] + [0] * 2}
    )
    assert dims == from_config_dict(FLASH)[0]
    assert warnings == []


def test_small_model():
    dims, warnings = from_config_dict(tiny_config())
    assert warnings == []
    assert dims.layer_kinds == (HCA, HCA, CSA, HCA, CSA, SWA)
    assert (dims.hidden_size, dims.num_attention_heads, dims.index_topk) == (256, 8, 64)
    assert (dims.n_routed_experts, dims.num_experts_per_tok, dims.num_hash_layers) == (16, 4, 1)
    assert (dims.q_lora_rank, dims.o_groups, dims.o_lora_rank, dims.vocab_size) == (
        128,
        2,
        128,
        2048,
    )


def test_ratio_and_coff():
    assert [kind.ratio for kind in (SWA, CSA, HCA)] == [0, 4, 128]
    assert [kind.coff for kind in (SWA, CSA, HCA)] == [0, 2, 1]


def test_yarn_in_main_is_ignored():
    """transformers 5.8.0 wrote the YaRN values there too; window-only layers are not scaled."""
    config = hf_native(FLASH)
    config["rope_parameters"]["main"] |= {"rope_type": "yarn", "factor": 99.0}
    assert from_config_dict(config)[0] == from_config_dict(FLASH)[0]


def test_tensors_win_and_the_warning_names_the_layers():
    kinds = [
        CSA if i == 40 else kind for i, kind in enumerate(from_config_dict(FLASH)[0].layer_kinds)
    ]
    kinds[3] = SWA
    dims, warnings = from_config_dict(FLASH, kinds)
    assert dims.layer_kinds == tuple(kinds)
    assert len(warnings) == 1
    assert "compress_ratios" in warnings[0]
    assert "3 is SWA (config: HCA)" in warnings[0]
    assert "40 is" not in warnings[0]


def test_61_ratios_of_pro_are_settled_by_the_tensors():
    """A list without the MTP slot whose last entry is 0 contradicts layer 60."""
    kinds = from_config_dict(PRO)[0].layer_kinds
    wrong = PRO | {"compress_ratios": [*PRO["compress_ratios"][:60], 0]}
    assert from_config_dict(wrong)[0].layer_kinds[60] is SWA
    dims, warnings = from_config_dict(wrong, kinds)
    assert dims.layer_kinds == kinds
    assert warnings == [
        "config.json: compress_ratios contradicts the tensors, which win: layer 60 is CSA "
        "(config: SWA)."
    ]


def test_layer_kinds_may_be_left_to_the_tensors():
    config = without(FLASH, "compress_ratios")
    kinds = from_config_dict(FLASH)[0].layer_kinds
    assert from_config_dict(config, kinds) == (from_config_dict(FLASH)[0], [])
    with pytest.raises(ConfigError, match="compress_ratios and layer_types are missing"):
        from_config_dict(config)


def test_hash_layers_of_the_tensors_win():
    dims, warnings = from_config_dict(FLASH, num_hash_layers_from_tensors=1)
    assert dims.num_hash_layers == 1
    assert len(warnings) == 1
    assert "[1, 2]" in warnings[0]
    config = without(FLASH, "num_hash_layers")
    assert from_config_dict(config, num_hash_layers_from_tensors=3)[0] == from_config_dict(FLASH)[0]


def test_layer_types_and_compress_ratios_that_differ():
    config = hf_native(FLASH) | {"compress_ratios": [128, *FLASH["compress_ratios"][1:]]}
    dims, warnings = from_config_dict(config)
    assert dims.layer_kinds[0] is SWA
    assert len(warnings) == 1
    assert "layers [0]" in warnings[0]


@MODELS
def test_flat_config_restores_the_official_fields(official: dict[str, Any]):
    native = hf_native(official)
    before = copy.deepcopy(native)
    dims, _ = from_config_dict(native)
    flat = flat_config(native, dims, num_mtp_layers=1)
    assert native == before
    changed = {key for key in official if flat.get(key) != official[key]}
    # torch_dtype is transformers' own; rope_scaling gains the newer name of its type.
    assert changed == {"torch_dtype", "rope_scaling"}
    assert flat["rope_scaling"] == official["rope_scaling"] | {"rope_type": "yarn"}


def test_flat_config_is_idempotent_and_keeps_the_rest():
    native = tiny_config()
    dims, _ = from_config_dict(native)
    flat = flat_config(native, dims)
    assert flat_config(flat, dims) == flat
    assert from_config_dict(flat) == (dims, [])
    assert flat["compress_ratios"] == [128, 128, 4, 128, 4, 0]
    assert flat["num_nextn_predict_layers"] == 0
    assert flat["num_hash_layers"] == 1
    assert {key: flat[key] for key in native} == native


def test_flat_config_without_mtp_tensors_drops_the_mtp_slot():
    dims, _ = from_config_dict(FLASH)
    flat = flat_config(FLASH, dims)
    assert len(flat["compress_ratios"]) == 43
    assert flat["num_nextn_predict_layers"] == 0


def test_flat_config_follows_the_tensors():
    native = tiny_config()
    dims, _ = from_config_dict(native, [HCA, HCA, CSA, HCA, CSA, CSA], 2)
    flat = flat_config(native, dims)
    assert flat["compress_ratios"] == [128, 128, 4, 128, 4, 4]
    assert flat["layer_types"][5] == "compressed_sparse_attention"
    assert flat["mlp_layer_types"] == ["hash_moe"] * 2 + ["moe"] * 4


def test_unscaled_rope():
    config = tiny_config()
    config["rope_parameters"]["compress"] = {"rope_type": "default", "rope_theta": 160000.0}
    dims, _ = from_config_dict(config)
    assert dims.yarn is None
    assert from_config_dict(flat_config(config, dims))[0] == dims


@pytest.mark.parametrize(
    "path",
    [
        *("hidden_size", "num_hidden_layers", "head_dim", "q_lora_rank", "swiglu_limit"),
        *("norm_topk_prob", "num_hash_layers", "compress_rope_theta", "rope_theta", "hc_mult"),
        *("rope_scaling", "rope_scaling.factor", "vocab_size", "n_routed_experts"),
    ],
)
def test_missing_field_is_named(path: str):
    with pytest.raises(ConfigError) as caught:
        from_config_dict(without(FLASH, path))
    message = str(caught.value)
    assert path in message
    assert "is missing" in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "4096"}, "hidden_size is '4096', an integer >= 1"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 4096.0}, "hidden_size is 4096.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, true or false"),
        ({"hc_eps": "1e-6"}, "hc_eps is '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"head_dim": 256}, "head_dim is 256, 512 was wanted"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32, 64 was wanted"),
        ({"model_type": "deepseek_v41"}, "model_type is 'deepseek_v41'"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"compress_ratios": [2] * 44}, r"compress_ratios\[0\] is 2"),
        ({"compress_ratios": [0, 0, 4]}, "compress_ratios has 3 entries, a list of at least 43"),
        ({"compress_ratios": 4}, "compress_ratios has 4"),
        ({"layer_types": ["full_attention"] * 43}, r"layer_types\[0\] is 'full_attention'"),
        (
            {"compress_rates": {"compressed_sparse_attention": 8}},
            "compressed_sparse_attention is 8",
        ),
        ({"mlp_layer_types": ["moe", "hash_moe", *["moe"] * 41]}, r"hash_moe at layers \[1\]"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "type 'linear'"),
        ({"num_experts_per_tok": 300}, "300 of 256 experts"),
        ({"o_groups": 7}, "64 heads in 7 o_groups"),
    ],
)
def test_wrong_value_is_named(change: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        from_config_dict(FLASH | change)


def test_partial_rotary_factor_that_is_not_64_dimensions():
    config = hf_native(FLASH) | {"partial_rotary_factor": 0.25}
    with pytest.raises(ConfigError, match="rotates 128 dimensions, 64"):
        from_config_dict(config)


def test_layer_count_of_the_tensors():
    with pytest.raises(ConfigError, match="num_hidden_layers is 43, the tensors hold 42 layers"):
        from_config_dict(FLASH, from_config_dict(FLASH)[0].layer_kinds[:42])


def test_not_an_object():
    with pytest.raises(ConfigError, match="found a list, a JSON object"):
        from_config_dict([])  # type: ignore[arg-type]
