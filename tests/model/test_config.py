"""Reading config.json: one test a family, the errors, and the published configs of a hundred checkpoints."""

import json
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.gated_delta import GatedDeltaAttention
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.launches.forward import token_launches
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format, Precision
from windtunnel.model.shape import ModelSpec, Shard

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
}
MOE = LLAMA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = MOE | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
HYBRID = MOE | {
    "model_type": "qwen3_next",
    "head_dim": 16,
    "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def read(config: dict[str, Any], quant_config: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return model_from_config(config | changes, "tiny", quant_config)


def grouped_query(model: ModelSpec, group: int = 0) -> GroupedQueryAttention:
    attention = model.layers[group].attention
    assert isinstance(attention, GroupedQueryAttention)
    return attention


def dense(model: ModelSpec) -> DenseFeedForward:
    feed_forward = model.layers[0].feed_forward
    assert isinstance(feed_forward, DenseFeedForward)
    return feed_forward


def experts(model: ModelSpec, group: int = -1) -> ExpertsFeedForward:
    feed_forward = model.layers[group].feed_forward
    assert isinstance(feed_forward, ExpertsFeedForward)
    return feed_forward


def windows(model: ModelSpec) -> list[tuple[int, int | None]]:
    return [(group.num_layers, grouped_query(model, index).window_tokens) for index, group in enumerate(model.layers)]


class TestDense:
    def test_llama(self) -> None:
        model = read(LLAMA)
        assert (model.num_layers, model.hidden_size, model.vocab_size, model.max_context_tokens) == (4, 64, 1000, 4096)
        assert grouped_query(model) == GroupedQueryAttention(num_heads=8, num_kv_heads=2, head_dim=8)
        assert dense(model) == DenseFeedForward(intermediate_size=128)
        assert not model.tie_word_embeddings
        assert model.precision == Precision()

    def test_without_kv_heads_attention_is_multi_head(self) -> None:
        assert grouped_query(read(LLAMA, num_key_value_heads=None)).num_kv_heads == 8

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"attn_type": "multihead_attention", "alibi": True}, 8),
            ({"attn_type": "grouped_query_attention", "kv_n_heads": 2, "alibi": True}, 2),
            ({"attn_type": "multiquery_attention", "alibi": True}, 1),
        ],
    )
    def test_mpt_has_settings_of_attention_in_an_object(self, settings: dict[str, Any], expected: int) -> None:
        mpt = {"model_type": "mpt", "architectures": ["MPTForCausalLM"], "num_key_value_heads": None}
        model = read(LLAMA, **mpt, attn_config=settings)
        assert grouped_query(model).num_kv_heads == expected
        assert (grouped_query(model).rotary, model.rotary_values) == (False, 0)
        with pytest.raises(InputError, match="has no num_global_key_value_heads or num_key_value_heads"):
            read(LLAMA, **mpt, attn_config={"attn_type": "grouped_query_attention"})

    @pytest.mark.parametrize("model_type", ["gpt2", "opt", "gpt_bigcode", "bloom", "falcon"])
    def test_learned_positions_and_alibi_rotate_nothing(self, model_type: str) -> None:
        model = read(LLAMA, model_type=model_type, alibi=model_type == "falcon")
        assert (grouped_query(model).rotary, model.rotary_values) == (False, 0)
        launches = token_launches(Shard(model, model.precision, Parallelism()), 16)
        assert "rope" not in {launch.name for launch in launches}
        assert grouped_query(read(LLAMA, model_type="falcon")).rotary

    @pytest.mark.parametrize(
        ("scaling", "longest"),
        [
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
            ({"type": "linear", "factor": 2.0}, 8192),
            ({"rope_type": "dynamic", "factor": 2.0}, 8192),
            ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
            ({"rope_type": "default"}, 4096),
        ],
    )
    def test_stretched_rotations_lengthen_the_context(self, scaling: dict[str, Any], longest: int) -> None:
        assert read(LLAMA, rope_scaling=scaling).max_context_tokens == longest

    def test_model_max_length_wins(self) -> None:
        """As vLLM reads Command-R, which also has rotations of so many positions, and Kimi-Linear."""
        longer = read(LLAMA, model_type="cohere", model_max_length=131_072)
        assert longer == read(LLAMA, model_type="cohere", max_position_embeddings=131_072)
        assert read(LLAMA, max_position_embeddings=None, model_max_length=512).max_context_tokens == 512
        learned = read(LLAMA, model_type="gpt2", model_max_length=512)
        assert (learned.max_context_tokens, learned.learned_positions) == (512, 4096)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("num_kv_groups", 2),
            ("num_kv_heads_for_linear_attn", 2),
            ("n_experts", 8),
            ("num_common_experts", 1),
            ("shared_experts_dim", 96),
            ("experts_per_tok", 2),
            ("use_shared_kv", True),
        ],
    )
    def test_keys_that_decide_shapes_are_read_or_refused(self, key: str, value: object) -> None:
        with pytest.raises(InputError, match=rf"tiny: {key} is {value}; this key is not known") as raised:
            read(MOE, **{key: value})
        assert "leave it out of a copy of config.json" in str(raised.value.hint)
        assert read(MOE, **{key: None}) == read(MOE, **{key: 0}) == read(MOE)
        # These are known, although they do not matter here.
        assert read(LLAMA, num_experts_per_tok=2, moe_shared_expert_overlap=True, num_expert_group=1) == read(LLAMA)

    def test_head_dim_need_not_divide_the_hidden_size(self) -> None:
        assert grouped_query(read(LLAMA, head_dim=128)).query_size == 1024

    @pytest.mark.parametrize(
        ("model_type", "qkv", "output"),
        [("llama", True, True), ("qwen2", True, False), ("glm4_moe", True, False), ("gpt_oss", True, True)],
    )
    def test_biases_follow_the_architecture(self, model_type: str, qkv: bool, output: bool) -> None:
        attention = grouped_query(read(LLAMA, model_type=model_type, attention_bias=True))
        assert (attention.qkv_bias, attention.output_bias) == (qkv, output)

    def test_qwen2_has_a_query_bias_that_its_config_does_not_mention(self) -> None:
        assert grouped_query(read(LLAMA, model_type="qwen2")).qkv_bias

    def test_qwen3_normalises_queries_and_keys(self) -> None:
        assert all(grouped_query(read(LLAMA, model_type=name)).qk_norm for name in ("qwen3", "exaone4"))
        assert not grouped_query(read(LLAMA)).qk_norm

    def test_qwen1_publishes_twice_the_width(self) -> None:
        config = LLAMA | {"model_type": "qwen", "kv_channels": 8, "seq_length": 2048, "no_bias": True}
        assert dense(read(config)).intermediate_size == 64
        assert grouped_query(read(config, num_key_value_heads=None)).num_kv_heads == 8

    def test_phi_has_parallel_blocks_biases_and_two_matrices(self) -> None:
        model = read(LLAMA, model_type="phi", hidden_act="gelu_new", num_key_value_heads=None)
        assert model.layers[0].num_norms == 1
        assert (model.norm_bias, model.lm_head_bias) == (True, True)
        assert dense(model) == DenseFeedForward(intermediate_size=128, gated=False, bias=True)

    def test_chatglm_calls_everything_otherwise(self) -> None:
        model = model_from_config(
            {
                "architectures": ["ChatGLMForConditionalGeneration"],
                "model_type": "chatglm",
                "hidden_size": 64,
                "ffn_hidden_size": 96,
                "num_layers": 3,
                "num_attention_heads": 8,
                "multi_query_group_num": 2,
                "kv_channels": 8,
                "padded_vocab_size": 500,
                "seq_length": 2048,
                "add_qkv_bias": True,
                "add_bias_linear": False,
            },
            "tiny",
        )
        assert grouped_query(model) == GroupedQueryAttention(num_heads=8, num_kv_heads=2, head_dim=8, qkv_bias=True)
        assert (model.num_layers, model.vocab_size, dense(model).intermediate_size) == (3, 500, 96)

    def test_an_unknown_type_is_refused_with_the_nearest_ones(self) -> None:
        with pytest.raises(InputError, match=r"model_type 'qwen9' is not known, so that nothing says") as raised:
            read(LLAMA, model_type="qwen9")
        assert str(raised.value.hint).startswith("did you mean qwen")
        with pytest.raises(InputError, match=r"config\.json has no model_type"):
            read(LLAMA, model_type=None)

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (LLAMA, 0),
            (LATENT, 1),
            (LATENT | {"num_nextn_predict_layers": 0}, 0),
            (LLAMA | {"mtp_num_hidden_layers": 2}, 2),
            (MOE | {"model_type": "minimax_m2", "num_mtp_modules": 3}, 3),
            (MOE | {"model_type": "solar_open"}, None),
        ],
    )
    def test_prediction_layers(self, config: dict[str, Any], expected: int | None) -> None:
        assert read(config).prediction_layers == expected

    @pytest.mark.parametrize(
        ("key", "value"),
        [("is_causal", False), ("use_bidirectional_attention", True), ("use_bidirectional_attention", "all")],
    )
    def test_decoders_that_see_later_tokens_are_refused(self, key: str, value: object) -> None:
        with pytest.raises(InputError, match=rf"see later ones \({key} is {value!r}\) cannot be"):
            read(LLAMA, **{key: value})
        assert read(LLAMA, is_causal=True, use_bidirectional_attention="vision") == read(LLAMA)

    def test_published_names_of_classes_and_keys(self) -> None:
        bloom = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
        assert read(bloom, model_type="bloom", architectures=["BloomForCausalLM"], n_embed=64).hidden_size == 64
        assert read(LLAMA, model_type="chatglm", architectures=["ChatGLMModel"]).num_layers == 4

    @pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification"])
    def test_a_decoder_without_an_output_layer_gets_a_hint_that_works(self, ending: str) -> None:
        mistral = LLAMA | {"model_type": "mistral"}
        with pytest.raises(InputError, match="is a decoder without an output layer") as raised:
            read(mistral, architectures=[f"Mistral{ending}"])
        assert '"architectures": ["MistralForCausalLM"]' in str(raised.value.hint)
        assert read(mistral, architectures=["MistralForCausalLM"]).num_layers == 4

    @pytest.mark.parametrize("model_type", ["smollm3", "minicpm3", "youtu"])
    def test_embeddings_that_transformers_ties_are_tied(self, model_type: str) -> None:
        assert read(LATENT if model_type != "smollm3" else LLAMA, model_type=model_type).tie_word_embeddings

    def test_rotary_tables_of_transformers_5_are_those_of_its_layers(self) -> None:
        """As Gemma 3 is saved: a table of eight times the positions, and one of its windows."""
        types = ["sliding_attention", "full_attention"] * 2
        gemma = LLAMA | {
            "model_type": "gemma3",
            "sliding_window": 512,
            "layer_types": types,
            "rope_local_base_freq": 1e4,
        }
        both = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
        expected = read(gemma, rope_scaling={"rope_type": "linear", "factor": 8.0})
        assert read(gemma, rope_parameters=both) == expected
        assert expected.rotary_values == 4096 * 256 * (8 + 1)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"rope_scaling": {"rope_type": "linear", "factor": 1e308}},
                r"factor is 1e\+308; a number from 0 to 10,000",
            ),
            ({"rope_scaling": {"type": "linear"}}, "factor is None; a number from 0"),
            ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor is nan; a number from 0 to 1 is"),
            ({"rope_parameters": {"full_attention": {"rotary_pct": 2}}}, "rotary_pct is 2; a number from 0 to 1 is"),
        ],
    )
    def test_rotations_that_cannot_be_are_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            read(LLAMA, **change)

    def test_a_missing_key_is_named_once(self) -> None:
        with pytest.raises(InputError, match="has no num_attention_heads") as raised:
            read(LLAMA, num_attention_heads=None, num_key_value_heads=None)
        assert " or " not in raised.value.message

    def test_unknown_keys_do_not_matter(self) -> None:
        assert read(LLAMA, rope_scaling={"type": "yarn"}, use_cache=True, torch_dtype="bfloat16") == read(LLAMA)


class TestWindows:
    def test_mistral_slides_in_every_layer(self) -> None:
        assert windows(read(LLAMA, model_type="mistral", sliding_window=512)) == [(4, 512)]

    def test_null_zero_and_wider_than_the_context_mean_none(self) -> None:
        for window in (None, 0, 4096, 8192):
            assert windows(read(LLAMA, model_type="mistral", sliding_window=window)) == [(4, None)]

    def test_qwen_names_a_window_that_it_does_not_use(self) -> None:
        assert windows(read(LLAMA, model_type="qwen2", sliding_window=512, use_sliding_window=False)) == [(4, None)]

    def test_qwen_slides_from_a_layer_on(self) -> None:
        model = read(LLAMA, model_type="qwen2", sliding_window=512, use_sliding_window=True, max_window_layers=1)
        assert windows(model) == [(1, None), (3, 512)]

    @pytest.mark.parametrize(
        ("model_type", "expected"),
        [
            ("gemma2", [(6, 512), (6, None)]),
            ("gemma3_text", [(10, 512), (2, None)]),
            ("gpt_oss", [(6, 512), (6, None)]),
        ],
    )
    def test_alternating_windows(self, model_type: str, expected: list[tuple[int, int | None]]) -> None:
        model = read(LLAMA, model_type=model_type, num_hidden_layers=12, sliding_window=512)
        assert windows(model) == expected

    def test_layer_types_win_over_the_architectures_pattern(self) -> None:
        types = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
        assert windows(read(LLAMA, model_type="gemma2", sliding_window=512, layer_types=types)) == [(1, None), (3, 512)]

    def test_gemma3_config_is_nested_and_leaves_out_its_defaults(self) -> None:
        text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
        model = read({"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}})
        assert grouped_query(model) == GroupedQueryAttention(
            num_heads=8, num_kv_heads=4, head_dim=256, window_tokens=1024, qk_norm=True
        )
        assert (model.vocab_size, model.tie_word_embeddings, model.layers[0].num_norms) == (262208, True, 4)


class TestExperts:
    def test_prompts_without_images_skip_the_layers_that_attend_to_them(self) -> None:
        """meta-llama/Llama-3.2-11B-Vision: 9,775,192,080 parameters in transformers 5.24 (`MllamaForCausalLM`), of
        which 8 rows of the table, and norms and gates of 8 layers, are left out here."""
        text = LLAMA | {"model_type": "mllama_text_model", "hidden_size": 4096, "intermediate_size": 14336}
        text |= {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        text |= {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "architectures": None}
        outer = {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "text_config": text}
        model = read(outer)
        assert model.num_layers == 32
        assert model.left_out == ("attention to images",)
        counted = count_parameters(model).total + model.tower_parameters
        assert counted == 9_775_192_080 - 8 * 4096 - 8 * (2 * 128 + 2)
        tower = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_global_layers": 8}
        whole = read(outer | {"vision_config": tower | {"patch_size": 14, "attention_heads": 16}})
        assert (whole.left_out, whole.vision) == (("vision tower", "attention to images"), None)
        assert counted + whole.tower_parameters - model.tower_parameters == pytest.approx(10.67e9, rel=0.01)

    def test_the_class_around_a_known_language_model_says_nothing_of_it(self) -> None:
        """As nvidia/Nemotron-3-Nano-Omni writes it; a class that makes vectors or scores is refused as before."""
        inner = {key: value for key, value in MOE.items() if key != "architectures"} | {"model_type": "qwen3_moe"}
        outer = {
            "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
            "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        }
        outer |= {"llm_config": inner, "vision_config": {"model_type": "radio"}, "sound_config": {}}
        model = read(outer)
        assert model.layers == read(MOE | {"model_type": "qwen3_moe"}).layers
        assert model.left_out == ("vision tower", "audio tower")
        for odd in ("NovaModel", "NovaForSequenceClassification"):
            with pytest.raises(InputError, match="without an output layer"):
                read(outer | {"architectures": [odd]})

    def test_an_omni_model_is_its_thinker(self) -> None:
        text = MOE | {"model_type": "qwen3_omni_moe_text", "architectures": None}
        vision = {"depth": 4, "hidden_size": 32, "intermediate_size": 64, "patch_size": 16, "num_heads": 2}
        omni = {
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "model_type": "qwen3_omni_moe",
            "thinker_config": {
                "model_type": "qwen3_omni_moe_thinker",
                "text_config": text,
                "vision_config": vision | {"deepstack_visual_indexes": [1], "fullatt_block_indexes": [3]},
                "audio_config": {"d_model": 8},
            },
            "talker_config": {"model_type": "qwen3_omni_moe_talker"},
        }
        model = read(omni)
        assert model.layers == read(MOE | {"model_type": "qwen3_vl_moe"}).layers
        assert model.left_out == ("vision tower", "audio tower", "speech")
        assert model.vision is not None
        assert (model.vision.rule, model.vision.num_full_layers) == ("qwen", 0)
        dense = LLAMA | {"model_type": "qwen2_5_omni_text"}
        thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": dense}
        former = read({"architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker})
        assert former.layers == read(LLAMA | {"model_type": "qwen2"}).layers

    def test_mixtral_names_the_experts_width_as_a_dense_one(self) -> None:
        config = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
        assert experts(read(config)) == ExpertsFeedForward(num_experts=8, experts_per_token=2, intermediate_size=128)

    def test_layers_whose_experts_are_chosen_by_a_hash_are_mixtures(self) -> None:
        kinds = ["dense", "hash_moe", "moe", "sparse"]
        assert [group.num_layers for group in read(MOE, mlp_layer_types=kinds).layers] == [1, 3]

    def test_blocks_as_transformers_5_names_them(self) -> None:
        names = {"mamba": "linear_attention", "attention": "full_attention"}
        nano = catalog.model_config("nvidia/NVIDIA-Nemotron-Nano-9B-v2")
        letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        blocks = [letters[letter] for letter in nano.pop("hybrid_override_pattern")]
        saved = nano | {"layers_block_type": [names.get(block, block) for block in blocks]}
        assert read(saved) == read(nano | {"layers_block_type": blocks})

    def test_layers_whose_sizes_were_searched(self) -> None:
        """Each part of a layer has sizes of its own or is left out, as in Nemotron-NAS."""
        block = {"attention": {"n_heads_in_group": 4, "window_length": None}, "ffn": {"ffn_mult": 5.25}}
        alone = {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"ffn_mult": 1.3}}
        without = {"attention": {"n_heads_in_group": 8}, "ffn": {"no_op": True}}
        nothing = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
        searched = {"model_type": "nemotron-nas", "num_key_value_heads": None, "intermediate_size": None}
        config = LLAMA | searched | {"hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 5}

        model = read(config, block_configs=[block, block, alone, without, nothing])

        sizes = [
            (
                group.num_layers,
                group.num_norms,
                getattr(group.attention, "num_kv_heads", None),
                getattr(group.feed_forward, "intermediate_size", None),
            )
            for group in model.layers
        ]
        # 2 x 5.25 x 1,024 / 3 is 3,584, a multiple of 256; 887 is rounded up.
        assert sizes == [(2, 2, 2, 3584), (1, 1, None, 1024), (1, 1, 1, None)]
        with pytest.raises(InputError, match="each of the 5 layers"):
            read(config, block_configs=[block])
        linear = {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}}
        with pytest.raises(InputError, match="replace_with_linear of layer 1 is True, which cannot be modelled"):
            read(config, block_configs=[block, linear, *[alone] * 3])
        with pytest.raises(InputError, match="a different block in every layer"):
            read(LLAMA, block_configs=[block] * 4)

    def test_a_list_of_equal_numbers_is_that_number(self) -> None:
        """As Hunyuan-A13B gives one number for each layer."""
        lists = {"moe_topk": [2] * 4, "num_experts_per_tok": None, "moe_intermediate_size": [32] * 4}
        hunyuan = MOE | {"model_type": "hunyuan_v1_moe"}
        assert read(hunyuan, **lists, num_shared_expert=[1] * 4) == read(hunyuan, n_shared_experts=1)
        with pytest.raises(InputError, match=r"moe_topk is \[2, 2, 2, 3\]; a whole number"):
            read(hunyuan, **lists | {"moe_topk": [2, 2, 2, 3]})

    def test_qwen_moe_may_keep_some_layers_dense(self) -> None:
        model = read(MOE, model_type="qwen3_moe", mlp_only_layers=[0], decoder_sparse_step=2)
        assert [(group.num_layers, type(group.feed_forward)) for group in model.layers] == [
            (2, DenseFeedForward),
            (2, ExpertsFeedForward),
        ]

    def test_a_shared_expert_with_its_gate(self) -> None:
        spec = experts(read(MOE, model_type="qwen2_moe", shared_expert_intermediate_size=48))
        assert (spec.shared_intermediate_size, spec.shared_gate) == (48, True)

    def test_gpt_oss_has_biases_and_sinks(self) -> None:
        model = read(MOE, model_type="gpt_oss", attention_bias=True)
        assert experts(model).bias
        assert experts(model).router_bias
        assert grouped_query(model).sinks

    def test_glm4_moe_begins_with_dense_layers(self) -> None:
        model = read(MOE, model_type="glm4_moe", first_k_dense_replace=3, n_shared_experts=1)
        assert [group.num_layers for group in model.layers] == [3, 1]
        assert experts(model).shared_intermediate_size == 32

    def test_moe_layer_freq_as_a_list(self) -> None:
        model = read(MOE, moe_layer_freq=[0, 1, 1, 0])
        assert [group.num_layers for group in model.layers] == [2, 2]

    @pytest.mark.parametrize(
        "layers",
        [
            {"is_moe_layer": [False, True, True, True]},
            {"is_moe_layer": [False, True, True, True], "first_last_k_dense_replace": 1},
            {"first_last_k_dense_replace": 1},
            {"moe_layers_enum": "1,2,3"},
            {"moe_layers_enum": [1, 2, 3]},
        ],
    )
    def test_layers_with_experts_as_exaone_and_step_list_them(self, layers: dict[str, Any]) -> None:
        assert read(MOE, model_type="exaone_moe", **layers) == read(MOE, model_type="exaone_moe", mlp_only_layers=[0])

    def test_lists_may_go_on_to_prediction_layers(self) -> None:
        types = ["full_attention", "sliding_attention"] * 2
        window = {"sliding_window": 32, "num_nextn_predict_layers": 2}
        longer = read(LLAMA, layer_types=[*types, "sliding_attention", "sliding_attention"], **window)
        assert longer == read(LLAMA, layer_types=types, **window)
        with pytest.raises(InputError, match="each of the 4 layers"):
            read(LLAMA, layer_types=[*types, "sliding_attention"], **window)

    def test_no_experts_is_dense(self) -> None:
        assert isinstance(read(LLAMA, n_routed_experts=None, num_experts=0).layers[0].feed_forward, DenseFeedForward)


class TestLatent:
    def test_deepseek_v3(self) -> None:
        model = read(LATENT)
        assert [group.num_layers for group in model.layers] == [1, 3]
        assert model.layers[0].attention == LatentAttention(
            num_heads=8, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        )
        assert (experts(model).shared_intermediate_size, experts(model).router_bias) == (64, True)

    def test_v2_lite_does_not_compress_queries(self) -> None:
        attention = read(LATENT, model_type="deepseek_v2", q_lora_rank=None).layers[0].attention
        assert isinstance(attention, LatentAttention)
        assert attention.q_lora_rank is None

    def test_values_of_minicpm3_share_the_hidden_size(self) -> None:
        attention = read(LATENT, model_type="minicpm3", v_head_dim=None).layers[0].attention
        assert isinstance(attention, LatentAttention)
        assert attention.v_head_dim == 64 // 8
        with pytest.raises(InputError, match="has no v_head_dim"):
            read(LATENT, v_head_dim=None)


class TestHybrid:
    def test_every_fourth_layer_attends(self) -> None:
        model = read(HYBRID)
        delta, full = model.layers
        assert (delta.num_layers, full.num_layers) == (3, 1)
        assert delta.attention == GatedDeltaAttention(
            num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8, conv_kernel_size=4
        )
        assert grouped_query(model, 1).output_gate
        assert experts(model).shared_gate

    def test_an_interval_or_a_list_say_the_same(self) -> None:
        types = ["linear_attention", "full_attention"] * 2
        assert read(HYBRID, full_attention_interval=2) == read(HYBRID, layer_types=types)


class TestErrors:
    @pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
    def test_a_missing_key_is_named(self, key: str) -> None:
        config = {name: value for name, value in LLAMA.items() if name != key}
        with pytest.raises(InputError, match=f"has no {key}"):
            read(config)

    def test_a_misspelt_key_is_suggested(self) -> None:
        config = {name: value for name, value in LLAMA.items() if name != "intermediate_size"}
        with pytest.raises(InputError) as raised:
            read(config, intermediate_sise=128)
        assert raised.value.hint == "did you mean intermediate_sise?"

    @pytest.mark.parametrize("value", [0, -4, 2.5, "4", True, [4]])
    def test_an_impossible_count_is_named(self, value: Any) -> None:
        with pytest.raises(InputError, match="tiny: num_hidden_layers is"):
            read(LLAMA, num_hidden_layers=value)

    def test_heads_must_divide(self) -> None:
        with pytest.raises(InputError, match="num_attention_heads 8 is not a multiple of num_key_value_heads 3"):
            read(LLAMA, num_key_value_heads=3)
        with pytest.raises(InputError, match="hidden_size 60 is not a multiple of num_attention_heads 8"):
            read(LLAMA, hidden_size=60)
        with pytest.raises(InputError, match="linear_num_value_heads 5 is not a multiple"):
            read(HYBRID, linear_num_value_heads=5)

    def test_a_token_cannot_use_more_experts_than_there_are(self) -> None:
        with pytest.raises(InputError, match="each token uses 9 experts, and there are 8"):
            read(MOE, num_experts_per_tok=9)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("hybrid_override_pattern", "M-MZ"),
            ("state_size", 16),
            ("attn_type_list", [0, 0, 0, 1]),
            ("layer_types", ["lightning"] * 4),
        ],
    )
    def test_layers_of_no_kind_are_refused(self, key: str, value: Any) -> None:
        with pytest.raises(InputError, match="cannot be modelled"):
            read(LLAMA, **{key: value})

    def test_encoders_are_refused(self) -> None:
        with pytest.raises(InputError, match=r"BertForMaskedLM.*neither a decoder-only"):
            read(LLAMA, model_type="bert", architectures=["BertForMaskedLM"], hidden_act="gelu")
        with pytest.raises(InputError, match=r"ModernBertForMaskedLM.*neither a decoder-only") as raised:
            read(LLAMA, model_type="modernbert", architectures=["ModernBertForMaskedLM"])
        assert 'write "architectures": ["ModernBertModel"]' in str(raised.value.hint)
        assert read(LLAMA, model_type="modernbert", architectures=["ModernBertModel"]).is_encoder

    def test_layer_types_must_name_every_layer(self) -> None:
        with pytest.raises(InputError, match="each of the 4 layers"):
            read(LLAMA, layer_types=["full_attention"])

    def test_a_config_must_be_an_object(self) -> None:
        with pytest.raises(InputError, match="holds list"):
            model_from_config([1], "tiny")  # type: ignore[arg-type]

    def test_a_billion_layers_are_refused_at_once(self) -> None:
        with pytest.raises(InputError, match="1000000000 layers are not plausible"):
            read(LLAMA, num_hidden_layers=10**9)


FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SPARSE = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}
INT4_EXPERTS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}


class TestQuantisation:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (FP8_BLOCK, Precision(weights=Format.FP8_BLOCK)),
            ({"quant_method": "fp8"}, Precision(weights=Format.FP8)),
            ({"quant_method": "fbgemm_fp8"}, Precision(weights=Format.FP8)),
            ({"quant_method": "awq", "bits": 4, "group_size": 128}, Precision(weights=Format.INT4)),
            ({"quant_method": "gptq", "bits": 4}, Precision(weights=Format.INT4)),
            ({"quant_method": "gptq", "bits": 4, "group_size": 64}, Precision(weights=Format.INT4, int4_bits=4.25)),
            ({"quant_method": "gptq", "bits": 4, "group_size": -1}, Precision(weights=Format.INT4, int4_bits=4.0)),
            (
                # A scale of 16 bits and a zero point of 4 for 32 weights.
                {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
                Precision(weights=Format.INT4, int4_bits=4 + 20 / 32),
            ),
            ({"quant_method": "gptq", "bits": 8, "group_size": 128}, Precision(weights=Format.W8A16)),
            ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Precision(weights=Format.W8A16, w8a16_bits=8.0)),
            (
                # A scale of 16 bits and a zero point of 8 for 32 weights.
                {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False},
                Precision(weights=Format.W8A16, w8a16_bits=8 + 24 / 32),
            ),
            ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, Precision(weights=Format.INT4)),
            ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, Precision(weights=Format.MXFP8)),
            ({"quant_method": "fp8", "weight_block_size": [1, 32]}, Precision(weights=Format.MXFP8)),
            (FP8_BLOCK | {"weight_block_size": "128x128"}, Precision(weights=Format.FP8_BLOCK)),
            (FP8_BLOCK | {"weight_block_size": ["128", "128"]}, Precision(weights=Format.FP8_BLOCK)),
            ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, Precision(weights=Format.MXFP8)),
            ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, Precision(weights=Format.NVFP4A16)),
            (
                {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": 64},
                Precision(weights=Format.INT4A8, int4_bits=4.25),
            ),
            (FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "gate"]}, Precision(weights=Format.FP8_BLOCK)),
            (
                {
                    "quant_method": "modelopt",
                    "quant_algo": "NVFP4",
                    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
                },
                Precision(weights=Format.NVFP4, kv_cache=Format.FP8),
            ),
        ],
    )
    def test_one_format_for_all_layers(self, config: dict[str, Any], expected: Precision) -> None:
        assert read(LLAMA, quantization_config=config).precision == expected

    @pytest.mark.parametrize(
        ("weights", "activations", "expected"),
        [
            ({"num_bits": 8, "type": "float", "strategy": "tensor"}, {"num_bits": 8}, Format.FP8),
            ({"num_bits": 8, "type": "float", "block_structure": [128, 128]}, {"num_bits": 8}, Format.FP8_BLOCK),
            ({"num_bits": 8, "type": "int"}, {"num_bits": 8}, Format.INT8),
            ({"num_bits": 4, "type": "int", "group_size": 128}, None, Format.INT4),
            ({"num_bits": 4, "type": "float", "group_size": 16}, {"num_bits": 4}, Format.NVFP4),
            ({"num_bits": 4, "type": "float", "group_size": 16}, None, Format.NVFP4A16),
            ({"num_bits": 4, "type": "float", "group_size": 32}, None, Format.MXFP4),
            ({"num_bits": 4, "type": "float", "group_size": 32}, {"num_bits": 4}, Format.MXFP4A4),
            ({"num_bits": 8, "type": "float", "group_size": 32}, {"num_bits": 8}, Format.MXFP8),
            ({"num_bits": 8, "type": "float", "strategy": "channel"}, None, Format.W8A16),
            ({"num_bits": 8, "type": "int", "strategy": "channel"}, None, Format.W8A16),
            ({"num_bits": 4, "type": "int", "group_size": 128}, {"num_bits": 8, "type": "float"}, Format.INT4A8),
        ],
    )
    def test_compressed_tensors(self, weights: Any, activations: Any, expected: Format) -> None:
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
        # Eight bits alone have a scale for each channel here.
        stored = {"w8a16_bits": 8.0} if expected is Format.W8A16 else {}
        assert read(LLAMA, quantization_config=config).precision == Precision(weights=expected, **stored)

    def test_gpt_oss_quantises_only_its_experts(self) -> None:
        config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        assert read(MOE, model_type="gpt_oss", quantization_config=config).precision == Precision(experts=Format.MXFP4)

    def test_kimi_k25_quantises_only_its_routed_experts(self) -> None:
        assert read(LATENT, quantization_config=INT4_EXPERTS).precision == Precision(experts=Format.INT4, int4_bits=4.5)

    def test_nested_models_may_carry_it_outside(self) -> None:
        nested = {"model_type": "kimi_k25", "text_config": LATENT, "quantization_config": INT4_EXPERTS}
        assert read(nested).precision == Precision(experts=Format.INT4, int4_bits=4.5)

    def test_the_keys_of_a_quantisation_are_asked_in_the_order_of_vllm(self) -> None:
        four, inner = {"compression_config": INT4_EXPERTS}, {"text_config": LATENT | {"quantization_config": FP8_BLOCK}}
        int4 = Precision(experts=Format.INT4, int4_bits=4.5)
        assert read(LATENT | four).precision == read({"text_config": LATENT} | four).precision == int4
        assert read(inner | four).precision.weights == Format.FP8_BLOCK
        assert read(inner | {"quantization_config": INT4_EXPERTS}).precision == int4

    def test_attention_left_alone_layer_by_layer(self) -> None:
        exclude = ["lm_head", *(f"model.layers.{index}.self_attn*" for index in range(4))]
        quant = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": exclude}}
        assert read(LATENT, quant).precision == Precision(
            weights=Format.NVFP4, attention=Format.BF16, kv_cache=Format.FP8
        )

    def test_the_format_of_most_layers_counts(self) -> None:
        quant = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["model.layers.3.self_attn*"]}}
        assert read(LLAMA, quant).precision == Precision(weights=Format.FP8)

    def test_where_one_layers_projections_differ_the_widest_counts_and_the_output_projection_has_its_own(self) -> None:
        """As nvidia/DeepSeek-V3.1-NVFP4 leaves all projections alone but the last one."""
        exclude = [f"model.layers.{index}.self_attn.{part}" for index in range(4) for part in ("q_a_proj", "kv_b_proj")]
        quant = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": exclude}}
        expected = Precision(weights=Format.NVFP4, attention=Format.BF16, attention_output=Format.NVFP4)
        assert read(LATENT, quant).precision == expected
        mixed = ["layers.0.self_attn.o_proj", *exclude]
        assert read(LATENT, {"quant_algo": "NVFP4", "exclude_modules": mixed}).precision == expected

    @pytest.mark.parametrize("ending", ["", "."])
    def test_whole_layers_left_alone(self, ending: str) -> None:
        three = [f"model.layers.{index}{ending}" for index in range(3)]
        assert read(LLAMA, quantization_config=FP8_BLOCK | {"ignored_layers": three}).precision == Precision()
        some = FP8_BLOCK | {"ignored_layers": three[:1]}
        assert read(LLAMA, quantization_config=some).precision == Precision(weights=Format.FP8_BLOCK)

    def test_layers_of_a_vision_tower_are_not_those_of_the_text(self) -> None:
        tower = [f"model.visual.blocks.{index}" for index in range(4)] + ["vision_model.encoder.layers.0.mlp.down_proj"]
        config = FP8_BLOCK | {"modules_to_not_convert": [*tower, *(name + ".mlp.down_proj" for name in tower)]}
        assert read(LLAMA, quantization_config=config).precision == Precision(weights=Format.FP8_BLOCK)

    @pytest.mark.parametrize("name", ["LlamaAttention", "Llama4TextAttention", "LlamaMLP", "LlamaRMSNorm"])
    def test_a_class_that_holds_projections_is_not_theirs(self, name: str) -> None:
        """compressed-tensors compares a module's own class (`utils/match.py`, `_match_class`)."""
        group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
        config = {"config_groups": {"group_0": group | {"input_activations": {"num_bits": 8}}}, "ignore": [name]}
        assert read(LLAMA, quantization_config=config).precision == Precision(weights=Format.FP8)
        assert read(LLAMA, quantization_config=config | {"ignore": ["Linear"]}).precision == Precision()

    @pytest.mark.parametrize(
        ("config", "names", "expected"),
        [
            (
                {"model_type": "internlm2"},
                ["model.layers.{}.attention.wqkv", "model.layers.{}.attention.wo"],
                "attention",
            ),
            ({"model_type": "falcon"}, ["transformer.h.{}.self_attention"], "attention"),
            ({"model_type": "gpt_neox"}, ["gpt_neox.layers.{}.attention.query_key_value", "attention"], "attention"),
            ({"model_type": "mpt"}, ["transformer.blocks.{}.attn"], "attention"),
            ({"model_type": "gpt2"}, ["transformer.h.{}.mlp.c_proj"], "weights"),
            ({"model_type": "llama4"}, ["model.layers.{}.feed_forward.shared_expert.down_proj"], "weights"),
            ({"model_type": "llama4"}, ["language_model.model.layers.{}.feed_forward.experts"], "experts"),
            ({"model_type": "hunyuan_v1_moe"}, ["re:.*shared_mlp.*"], "weights"),
            ({"model_type": "granitemoe"}, ["re:.*block_sparse_moe.*"], "experts"),
            ({"model_type": "granitemoehybrid", "shared_intermediate_size": 48}, ["re:.*shared_mlp.*"], "weights"),
            ({"model_type": "granitemoehybrid", "shared_intermediate_size": 48}, ["block_sparse_moe"], "experts"),
            ({"model_type": "step3p5", "share_expert_dim": 48}, ["model.layers.{}.share_expert"], "weights"),
            ({"model_type": "step3p5", "share_expert_dim": 48}, ["model.layers.{}.moe"], "experts"),
            ({"model_type": "mixtral"}, ["model.layers.{}.block_sparse_moe.experts.0.w2"], "experts"),
        ],
    )
    def test_modules_by_the_names_of_each_architecture(
        self, config: dict[str, Any], names: list[str], expected: str
    ) -> None:
        """Attention, experts, or else dense layers and shared experts are left alone."""
        ignored = [name.format(index) for name in names for index in range(4)]
        base = LLAMA if config["model_type"] in {"internlm2", "falcon", "gpt_neox", "mpt", "gpt2"} else MOE
        model = read(base, **config, quantization_config=FP8_BLOCK | {"modules_to_not_convert": ignored})
        parts = {
            "weights": model.precision.weights,
            "attention": model.precision.attention_format,
            "experts": model.precision.experts_format if base is MOE else Format.FP8_BLOCK,
        }
        assert {part for part, part_format in parts.items() if part_format == Format.BF16} == {expected}

    @pytest.mark.parametrize("names", [["re:.*mamba.*"], ["mamba.in_proj", "mamba.out_proj"]])
    def test_recurrences_count_as_attention(self, names: list[str]) -> None:
        mamba = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
        types = {"layer_types": ["mamba", "mamba", "mamba", "attention"], "mamba_chunk_size": 256}
        granite = LLAMA | mamba | types | {"model_type": "granitemoehybrid", "position_embedding_type": "nope"}
        group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
        config = {"config_groups": {"group_0": group | {"input_activations": {"num_bits": 8}}}, "ignore": names}
        expected = Precision(weights=Format.FP8, attention=Format.BF16)
        assert read(granite, quantization_config=config).precision == expected

    def test_a_name_in_a_list_is_a_whole_part_of_a_path(self) -> None:
        # `gate` is the router; `gate_proj`, and so the feed-forward, stays quantised.
        config = FP8_BLOCK | {"modules_to_not_convert": ["gate", "o", "mlp.down"]}
        assert read(MOE, quantization_config=config).precision == Precision(weights=Format.FP8_BLOCK)

    def test_mixed_precision_lists_every_module(self) -> None:
        layers = {
            f"model.layers.{i}.self_attn.{part}": {"quant_algo": "FP8"}
            for i in range(4)
            for part in ("q_proj", "o_proj")
        }
        layers |= {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4"} for i in range(4)}
        layers["lm_head"] = {"quant_algo": "FP8"}
        quant = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
        assert read(MOE, quant).precision == Precision(weights=Format.FP8, experts=Format.NVFP4, lm_head=Format.FP8)

    def test_config_groups_give_parts_of_a_layer_formats_of_their_own(self) -> None:
        """As llm-compressor writes FP8 attention beside NVFP4 experts without quantised activations."""
        fp8 = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}
        four = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "input_activations": None}
        groups = {
            "group_0": {"targets": ["re:.*self_attn.*"], **fp8},
            "group_1": {"targets": ["re:.*mlp.experts.*"], **four},
        }
        config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
        assert read(MOE, quantization_config=config).precision == Precision(weights=Format.FP8, experts=Format.NVFP4A16)

    @pytest.mark.parametrize(
        "left_alone",
        [
            {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*self_attn.*": {}}},
            {
                "quant_method": "auto-round",
                "bits": 4,
                "extra_config": {
                    f"model.layers.{index}.self_attn.{part}": {"bits": 16}
                    for index in range(4)
                    for part in ("q_proj", "o_proj")
                },
            },
            {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]},
        ],
    )
    def test_integer_methods_leave_modules_alone(self, left_alone: dict[str, Any]) -> None:
        expected = Precision(weights=Format.INT4, attention=Format.BF16)
        assert read(LLAMA, quantization_config=left_alone).precision == expected

    @pytest.mark.parametrize(
        "own_bits",
        [
            {"+:.*self_attn.*": {"bits": 8}, "+:.*lm_head$": {"bits": 8}, "-:.*layers\\.0\\.mlp.*": {}},
            # AutoRound has names, or expressions that may begin anywhere.
            {"self_attn.[qkvo]_proj": {"bits": 8}, "lm_head": {"bits": 8}, "model.layers.0.mlp": {"bits": 16}},
        ],
    )
    def test_integer_methods_give_modules_other_bits(self, own_bits: dict[str, Any]) -> None:
        method = ("gptq", "dynamic") if any(":" in name for name in own_bits) else ("auto-round", "extra_config")
        config = {"quant_method": method[0], "bits": 4, "group_size": 128, method[1]: own_bits}
        model = read(LLAMA, quantization_config=config)
        assert model.precision == Precision(weights=Format.INT4, attention=Format.W8A16, lm_head=Format.W8A16)
        layers = model.num_layers
        assert dict(model.mixed_bits) == {"weights": pytest.approx((16 + (layers - 1) * 4.125) / layers)}

    def test_quark_names_layers(self) -> None:
        """As AMD publishes MXFP4 checkpoints: the experts have four bits, attention FP8, the rest is left alone."""
        four, fp8 = {"dtype": "fp4", "group_size": 32}, {"dtype": "fp8_e4m3"}
        config = {
            "quant_method": "quark",
            "global_quant_config": {"weight": four, "input_tensors": four},
            "layer_quant_config": {"*self_attn*": {"weight": fp8, "input_tensors": fp8}},
            "kv_cache_quant_config": {"*k_proj": {"output_tensors": fp8}},
            "exclude": ["lm_head", "re:.*mlp.gate$"],
        }
        assert read(MOE, quantization_config=config).precision == Precision(
            weights=Format.FP8, experts=Format.MXFP4A4, kv_cache=Format.FP8
        )
        weight_only = {"quant_method": "quark", "global_quant_config": {"weight": four, "input_tensors": None}}
        assert read(LLAMA, quantization_config=weight_only).precision == Precision(weights=Format.MXFP4)
        for weight, inputs, expected in ((fp8, None, Format.W8A16), ({"dtype": "int4"}, fp8, Format.INT4A8)):
            every = {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs}}
            assert read(LLAMA, quantization_config=every).precision == Precision(weights=expected)

    def test_hf_quant_config_wins(self) -> None:
        quant = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
        model = read(LLAMA, quant, quantization_config={"quant_method": "awq", "bits": 4})
        assert model.precision == Precision(weights=Format.FP8, kv_cache=Format.FP8)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"quant_method": "quip"}, "quant_method 'quip' is not known"),
            ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not known; allowed: 4, 8"),
            ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; a positive whole number"),
            ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 3}}}, "dynamic gives .* 3 bits; allowed"),
            (
                {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 2}}},
                "extra_config gives 'lm_head' 2 bits; allowed: 4, 8, 16",
            ),
            ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp' is not known"),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' cannot be modelled: its kernels"),
            ({"quant_method": "gguf"}, "'gguf' cannot be modelled"),
            (
                {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "int4"}]}},
                "in several stages cannot be modelled",
            ),
            (
                {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6"}}},
                "fp6 weights in groups of None with 16-bit activations are not known",
            ),
            (
                {
                    "config_groups": {
                        "group_0": {
                            "weights": {"num_bits": 4, "type": "int", "group_size": 128},
                            "input_activations": {"num_bits": 8, "type": "int"},
                        }
                    }
                },
                "int weights of 4 bits in groups of 128 with int activations of 8 bits are not known",
            ),
            (
                {"config_groups": {}, "sparsity_config": {"sparsity_structure": "2:4"}},
                r"sparse weights \('2:4'\) cannot",
            ),
            ({"quant_method": "compressed-tensors", "sparsity_config": SPARSE}, "weights .'sparse-24-bitmask'. cannot"),
            ({"config_groups": {"group_0": {"format": "marlin-24"}}}, r"weights \('marlin-24'\) cannot be modelled"),
            ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin_24"}, "sparse weights"),
            ({"quant_method": "gptq_marlin_24", "bits": 4}, "sparse weights"),
            ({"quant_method": "compressed-tensors"}, r"\(compressed-tensors\) has no config_groups"),
            ({"quant_method": "modelopt"}, r"quantization_config \(modelopt\) has no quant_algo"),
            ({"quant_method": "fp8", "weight_block_size": [1, 64]}, r"weight_block_size is \[1, 64\]"),
            ({"quant_method": "fp8", "weight_block_size": 128}, r"weight_block_size is 128"),
            ({"quant_method": "modelopt", "quant_algo": "FP3"}, "quant_algo 'FP3' is not known"),
            (
                {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP2"},
                "KV cache's format 'FP2'",
            ),
            ("fp8", "quantization_config is 'fp8'; an object is needed"),
            (FP8_BLOCK | {"modules_to_not_convert": "lm_head"}, "a list of names is needed"),
        ],
    )
    def test_unknown_formats_are_refused(self, config: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read(LLAMA, quantization_config=config)

    @pytest.mark.parametrize(
        ("kind", "bits", "group_size", "taken"),
        [
            ("float", 4, 16, ("float", 8)),
            ("float", 4, 32, ("float", 8)),
            ("float", 4, 16, ("int", 4)),
            ("float", 8, None, ("int", 8)),
            ("float", 8, 32, ("int", 8)),
            ("int", 8, None, ("float", 8)),
            ("int", 8, None, ("int", 4)),
        ],
    )
    def test_activations_of_another_type_are_refused(
        self, kind: str, bits: int, group_size: int | None, taken: tuple[str, int]
    ) -> None:
        weights = {"type": kind, "num_bits": bits, "group_size": group_size}
        group = {"weights": weights, "input_activations": {"type": taken[0], "num_bits": taken[1]}}
        with pytest.raises(InputError, match=f"{kind} weights of {bits} bits .* {taken[0]} activations of {taken[1]}"):
            read(LLAMA, quantization_config={"config_groups": {"group_0": group}})

    def test_a_sparsity_of_none_is_no_sparsity(self) -> None:
        dense = {"quant_method": "fp8", "format": "dense", "sparsity_config": {"format": "dense"}}
        assert read(LLAMA, quantization_config=dense).precision.weights == Format.FP8


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats() | st.sampled_from(["", "fp8", "re:(", "*", "FP8"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["quant_algo", "type"]), inner),
    max_leaves=4,
)
QUANTISED = [
    LLAMA | {"quantization_config": FP8_BLOCK | {"modules_to_not_convert": ["lm_head"]}},
    LATENT | {"quantization_config": INT4_EXPERTS},
    HYBRID | {"quantization_config": {"quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
    MOE | {"layer_types": ["full_attention"] * 4, "sliding_window": 32, "moe_layer_freq": 1, "mlp_only_layers": []},
]


@pytest.mark.full
@given(st.data())
def test_whatever_stands_in_a_config_is_read_or_refused(data: st.DataObject) -> None:
    """No value of any key, quantisation included, ends in a traceback."""
    config = dict(data.draw(st.sampled_from(QUANTISED)))
    quantization = dict(config.get("quantization_config", {}))
    key = data.draw(st.sampled_from(sorted(config)))
    config[key] = data.draw(JUNK)
    if quantization and key != "quantization_config" and data.draw(st.booleans()):
        quantization[data.draw(st.sampled_from(sorted(quantization)))] = data.draw(JUNK)
        config["quantization_config"] = quantization
    with suppress(InputError):
        assert read(config).num_layers > 0


def published_configs() -> list[Path]:
    package = find_spec("aiconfigurator_core")
    folders = package.submodule_search_locations if package else None
    return sorted(Path(folders[0], "model_configs").glob("*_config.json")) if folders else []


CONFIGS = [path for path in published_configs() if "hf_quant" not in path.name]


@pytest.mark.full
@pytest.mark.skipif(not CONFIGS, reason="aiconfigurator-core is not installed")
def test_published_configs_are_read_or_refused_with_the_reason() -> None:
    """Of the configs that aiconfigurator-core 0.12 ships, only those beyond `ModelSpec` are refused."""
    refused = {}
    for path in CONFIGS:
        quantisation = path.with_name(path.name.replace("_config.json", "_hf_quant_config.json"))
        quant_config = json.loads(quantisation.read_text()) if quantisation.exists() else None
        try:
            model_from_config(json.loads(path.read_text()), path.stem, quant_config)
        except InputError as error:
            refused[path.stem] = error.message
    assert len(CONFIGS) - len(refused) >= 45
    reasons = ("cannot be modelled", "model_type 'step3p7' is not known")
    assert all(any(reason in message for reason in reasons) for message in refused.values()), refused
