"""Parameter counts against the published ones."""

import pytest

from windtunnel import catalog
from windtunnel.model.attention.gated_delta import GatedDeltaAttention
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.parameters import count_parameters
from windtunnel.model.shape import LayerGroup, ModelSpec

SAFETENSORS = "parameters in the safetensors files, three digits, as the model's page on huggingface.co shows"
CARD = "model card"

QWEN3 = "safetensors metadata of the Qwen3 that is its language model"

TOTALS = [
    # model, published number of parameters in billions, source
    ("meta-llama/Llama-2-7b-hf", 6.74, SAFETENSORS),
    ("meta-llama/Llama-2-13b-hf", 13.0, SAFETENSORS),
    ("meta-llama/Llama-2-70b-hf", 69.0, SAFETENSORS),
    ("codellama/CodeLlama-7b-hf", 6.74, SAFETENSORS),
    ("codellama/CodeLlama-34b-hf", 33.7, SAFETENSORS),
    ("ibm-granite/granite-3.1-2b-instruct", 2.53, SAFETENSORS),
    ("ibm-granite/granite-3.1-8b-instruct", 8.17, SAFETENSORS),
    ("moonshotai/Kimi-VL-A3B-Instruct", 16.0, CARD),
    ("meta-llama/Meta-Llama-3-8B", 8.03, SAFETENSORS),
    ("meta-llama/Meta-Llama-3-70B", 70.6, SAFETENSORS),
    ("meta-llama/Llama-3.1-8B", 8.03, SAFETENSORS),
    ("meta-llama/Llama-3.1-70B", 70.6, SAFETENSORS),
    ("meta-llama/Llama-3.1-405B", 406.0, SAFETENSORS),
    ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", 49.9, SAFETENSORS),
    ("meta-llama/Llama-3.2-1B", 1.24, SAFETENSORS),
    ("meta-llama/Llama-3.2-3B", 3.21, SAFETENSORS),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1, SAFETENSORS),
    ("mistralai/Mistral-7B-v0.1", 7.24, SAFETENSORS),
    ("mistralai/Mistral-7B-v0.3", 7.25, SAFETENSORS),
    ("mistralai/Mistral-Nemo-Base-2407", 12.2, SAFETENSORS),
    ("mistralai/Mistral-Small-24B-Base-2501", 23.6, SAFETENSORS),
    ("mistralai/Mistral-Large-Instruct-2407", 123.0, SAFETENSORS),
    ("mistralai/Mixtral-8x7B-v0.1", 46.7, SAFETENSORS),
    ("mistralai/Mixtral-8x22B-v0.1", 141.0, SAFETENSORS),
    ("Qwen/Qwen-72B", 72.3, SAFETENSORS),
    ("Qwen/Qwen1.5-MoE-A2.7B", 14.3, SAFETENSORS),
    ("Qwen/Qwen2-7B", 7.62, SAFETENSORS),
    ("Qwen/Qwen2-72B", 72.7, SAFETENSORS),
    ("Qwen/Qwen2.5-0.5B", 0.494, SAFETENSORS),
    ("Qwen/Qwen2.5-1.5B", 1.54, SAFETENSORS),
    ("Qwen/Qwen2.5-3B", 3.09, SAFETENSORS),
    ("Qwen/Qwen2.5-7B", 7.62, SAFETENSORS),
    ("Qwen/Qwen2.5-14B", 14.8, SAFETENSORS),
    ("Qwen/Qwen2.5-32B", 32.8, SAFETENSORS),
    ("Qwen/Qwen2.5-72B", 72.7, SAFETENSORS),
    ("Qwen/Qwen3-0.6B", 0.6, CARD),
    ("Qwen/Qwen3-4B", 4.02, SAFETENSORS),
    ("Qwen/Qwen3-8B", 8.19, SAFETENSORS),
    ("Qwen/Qwen3-14B", 14.8, SAFETENSORS),
    ("Qwen/Qwen3-32B", 32.8, SAFETENSORS),
    ("Qwen/Qwen2.5-VL-3B-Instruct", 3.09, "as Qwen2.5-3B; its safetensors files have 3.75 with the vision tower"),
    ("Qwen/Qwen2.5-VL-7B-Instruct", 7.62, "as Qwen2.5-7B; its safetensors files have 8.29 with the vision tower"),
    ("Qwen/Qwen2.5-VL-72B-Instruct", 72.7, "as Qwen2.5-72B; its safetensors files have 73.4 with the vision tower"),
    ("Qwen/Qwen3-30B-A3B", 30.5, SAFETENSORS),
    ("Qwen/Qwen3-235B-A22B", 235.0, SAFETENSORS),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480.0, SAFETENSORS),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", 80.0, CARD),
    ("Qwen/Qwen3.5-27B", 27.0, CARD),
    ("Qwen/Qwen3.5-35B-A3B", 35.0, CARD),
    ("Qwen/Qwen3.6-35B-A3B", 35.0, "its name; the shapes of nvidia/Qwen3.6-35B-A3B-NVFP4's config.json are Qwen3.5's"),
    ("Qwen/Qwen3.5-122B-A10B", 122.0, CARD),
    ("Qwen/Qwen3.5-397B-A17B", 397.0, CARD),
    ("microsoft/phi-2", 2.78, SAFETENSORS),
    ("microsoft/Phi-3-mini-4k-instruct", 3.82, SAFETENSORS),
    ("microsoft/Phi-3-medium-4k-instruct", 14.0, SAFETENSORS),
    ("microsoft/Phi-3.5-MoE-instruct", 41.9, SAFETENSORS),
    ("microsoft/phi-4", 14.7, SAFETENSORS),
    ("google/gemma-7b", 8.54, SAFETENSORS),
    ("google/gemma-2-2b", 2.61, SAFETENSORS),
    ("google/gemma-2-9b", 9.24, SAFETENSORS),
    ("google/gemma-2-27b", 27.2, SAFETENSORS),
    ("google/gemma-3-4b-it", 0.675 + 3.209, "Gemma 3 report (arXiv:2503.19786), table 1, without the vision encoder"),
    ("google/gemma-3-12b-it", 1.012 + 10.759, "Gemma 3 report (arXiv:2503.19786), table 1, without the vision encoder"),
    ("google/gemma-3-27b-it", 1.416 + 25.600, "Gemma 3 report (arXiv:2503.19786), table 1, without the vision encoder"),
    ("internlm/internlm-20b", 20.1, CARD),
    ("internlm/internlm2-20b", 19.9, SAFETENSORS),
    ("01-ai/Yi-34B", 34.4, SAFETENSORS),
    ("bigcode/starcoder2-15b", 16.0, SAFETENSORS),
    ("allenai/OLMo-2-1124-7B", 7.3, SAFETENSORS),
    ("deepseek-ai/deepseek-llm-67b-base", 67.0, CARD),
    ("deepseek-ai/DeepSeek-V2-Lite", 15.7, CARD),
    ("deepseek-ai/DeepSeek-V2", 236.0, SAFETENSORS),
    ("deepseek-ai/DeepSeek-V3", 671.0, "model card, the main model without its 14B of multi-token prediction"),
    ("deepseek-ai/DeepSeek-R1", 671.0, CARD),
    ("moonshotai/Kimi-K2-Instruct", 1030.0, SAFETENSORS),
    ("openai/gpt-oss-20b", 20.91, "gpt-oss model card (arXiv:2508.10925), table 1"),
    ("openai/gpt-oss-120b", 116.83, "gpt-oss model card (arXiv:2508.10925), table 1"),
    ("MiniMaxAI/MiniMax-M2.5", 229.0, SAFETENSORS),
    (
        "zai-org/GLM-4.5",
        355.0,
        "GLM-4.5 report (arXiv:2508.06471), table 1; counts the prediction layer, not embeddings",
    ),
    ("zai-org/GLM-4.5-Air", 106.0, "GLM-4.5 report (arXiv:2508.06471), table 1"),
    ("zai-org/GLM-5", 744.0, CARD),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, SAFETENSORS),
    ("nvidia/Nemotron-H-56B-Base-8K", 56.0, CARD),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8.89, SAFETENSORS),
    ("nvidia/NVIDIA-Nemotron-Nano-12B-v2", 12.31, SAFETENSORS),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 120.6, "Nemotron 3 Super, technical report"),
    ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 550.0, CARD),
    ("MiniMaxAI/MiniMax-M3", 428.0, "model card, with the vision tower"),
    ("zai-org/GLM-5.2", 744.0, "model card of GLM-5, which has 57 indexers more"),
    ("XiaomiMiMo/MiMo-V2-Flash", 309.0, CARD),
    ("google/gemma-4-26B-A4B", 25.2, CARD),
    ("google/gemma-4-31B-it", 30.7, CARD),
    ("stepfun-ai/Step-3.7-Flash", 196.0, "model card of Step-3.5-Flash, which has the same layers"),
    ("Qwen/Qwen3.6-27B", 27.0, CARD),
    ("Qwen/Qwen3-VL-4B-Instruct", 4.02, QWEN3),
    ("Qwen/Qwen3-VL-8B-Instruct", 8.19, QWEN3),
    ("Qwen/Qwen3-VL-32B-Instruct", 32.8, QWEN3),
    ("Qwen/Qwen3-VL-30B-A3B-Instruct", 30.5, QWEN3),
    ("Qwen/Qwen3-VL-235B-A22B-Instruct", 235.0, QWEN3),
    ("deepseek-ai/DeepSeek-V3.2", 671.878, "transformers 5.23, DeepseekV32ForCausalLM on the meta device"),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 400.0, CARD),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 107.77, "transformers 5.23, Llama4ForCausalLM on the meta device"),
]

ALL, NO_EMBEDDING, NO_VOCABULARY = "all", "without the embedding", "without embedding and output layer"

ACTIVE = [
    # model, published active parameters in billions, half a unit of the last published digit, what is counted, source
    ("mistralai/Mixtral-8x7B-v0.1", 12.9, 0.05, ALL, "Mixtral of Experts (arXiv:2401.04088): 13B; mistral.ai: 12.9B"),
    ("mistralai/Mixtral-8x22B-v0.1", 39.0, 0.5, ALL, "mistral.ai, Cheaper, Better, Faster, Stronger"),
    ("Qwen/Qwen1.5-MoE-A2.7B", 2.7, 0.05, ALL, CARD),
    ("Qwen/Qwen3-30B-A3B", 3.3, 0.1, ALL, "model card, which truncates"),
    ("Qwen/Qwen3-235B-A22B", 22.0, 0.5, ALL, CARD),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 35.0, 0.5, ALL, CARD),
    ("Qwen/Qwen3.5-397B-A17B", 17.0, 0.5, ALL, CARD),
    ("microsoft/Phi-3.5-MoE-instruct", 6.6, 0.05, ALL, CARD),
    ("deepseek-ai/DeepSeek-V2", 21.0, 0.5, ALL, "DeepSeek-V2 (arXiv:2405.04434)"),
    ("deepseek-ai/DeepSeek-V2-Lite", 2.4, 0.1, NO_EMBEDDING, "DeepSeek-V2 (arXiv:2405.04434), appendix B, truncated"),
    ("deepseek-ai/DeepSeek-V3", 37.0, 0.5, NO_EMBEDDING, "DeepSeek-V3 (arXiv:2412.19437)"),
    ("moonshotai/Kimi-K2-Instruct", 32.0, 0.5, NO_EMBEDDING, CARD),
    ("openai/gpt-oss-20b", 3.61, 0.005, NO_EMBEDDING, "gpt-oss model card (arXiv:2508.10925), table 1"),
    ("openai/gpt-oss-120b", 5.13, 0.005, NO_EMBEDDING, "gpt-oss model card (arXiv:2508.10925), table 1"),
    ("MiniMaxAI/MiniMax-M2.5", 10.0, 0.5, NO_VOCABULARY, CARD),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 17.0, 0.5, ALL, CARD),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 17.0, 0.5, ALL, CARD),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 3.2, 0.05, NO_EMBEDDING, "Nemotron 3 Nano, technical report"),
    ("zai-org/GLM-5", 40.0, 0.5, NO_VOCABULARY, CARD),
    ("zai-org/GLM-4.5", 32.0, 0.5, NO_VOCABULARY, "GLM-4.5 report (arXiv:2508.06471), table 1"),
    ("zai-org/GLM-4.5-Air", 12.0, 0.5, NO_VOCABULARY, "GLM-4.5 report (arXiv:2508.06471), table 1"),
]


@pytest.mark.parametrize(("name", "published", "source"), TOTALS, ids=[name for name, *_ in TOTALS])
def test_totals_agree_with_published_ones(name: str, published: float, source: str) -> None:
    ours = count_parameters(catalog.model(name)).total / 1e9
    assert ours == pytest.approx(published, rel=0.01), source


@pytest.mark.parametrize(("name", "published", "digit", "counted", "source"), ACTIVE, ids=[name for name, *_ in ACTIVE])
def test_active_parameters_agree_with_published_ones(
    name: str, published: float, digit: float, counted: str, source: str
) -> None:
    count = count_parameters(catalog.model(name))
    left_out = {ALL: 0, NO_EMBEDDING: count.embedding, NO_VOCABULARY: count.embedding + count.lm_head}[counted]
    assert (count.active - left_out) / 1e9 == pytest.approx(published, rel=0.01, abs=digit), source


EXACT = [
    # Elements over all tensors of the checkpoint (safetensors metadata), vision and prediction layers left out.
    ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
    ("meta-llama/Llama-3.1-8B", 8_030_261_248),
    ("meta-llama/Llama-3.1-70B", 70_553_706_496),
    ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
    ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
    ("Qwen/Qwen2.5-7B", 7_615_616_512),
    ("Qwen/Qwen2.5-0.5B", 494_032_768),
    ("Qwen/Qwen3-8B", 8_190_735_360),
    ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    ("microsoft/phi-2", 2_779_683_840),
    ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552),
    ("google/gemma-2-9b", 9_241_705_984),
    ("meta-llama/Llama-3.2-1B", 1_235_814_400),
    ("zai-org/GLM-4.5-Air", 106_852_251_264),
    ("Qwen/Qwen3.5-35B-A3B", 34_660_610_688),
]


@pytest.mark.parametrize(("name", "published"), EXACT, ids=[name for name, _ in EXACT])
def test_shapes_are_counted_to_the_last_parameter(name: str, published: int) -> None:
    assert count_parameters(catalog.model(name)).total == published


def spec_of(group: LayerGroup, **changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "name": "tiny", "hidden_size": 10, "vocab_size": 100, "max_context_tokens": 64, "layers": (group,)
    }  # fmt: skip
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


def test_each_part_of_a_dense_model_by_hand() -> None:
    attention = GroupedQueryAttention(
        num_heads=4, num_kv_heads=2, head_dim=3, qkv_bias=True, output_bias=True, qk_norm=True
    )
    group = LayerGroup(num_layers=2, attention=attention, feed_forward=DenseFeedForward(intermediate_size=7, bias=True))
    count = count_parameters(spec_of(group, norm_bias=True, lm_head_bias=True))
    assert count.embedding == 1000
    assert count.lm_head == 1000 + 100
    # q 12, k 6, v 6 and out 12 wide; biases 24 and 10.
    assert count.attention == 2 * (10 * (24 + 12) + 24 + 10)
    assert count.feed_forward.dense == 2 * (3 * 10 * 7 + 2 * 7 + 10)
    assert count.norms == 2 * (2 * 20 + 2 * 3) + 20
    assert count.total == count.active == 1000 + 1100 + 788 + 468 + 112


def test_each_part_of_a_mixture_of_experts_by_hand() -> None:
    experts = ExpertsFeedForward(
        num_experts=8, experts_per_token=2, intermediate_size=5, shared_intermediate_size=6, shared_gate=True,
        router_bias=True,
    )  # fmt: skip
    attention = LatentAttention(
        num_heads=2, q_lora_rank=None, kv_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=1, v_head_dim=2
    )
    count = count_parameters(spec_of(LayerGroup(num_layers=1, attention=attention, feed_forward=experts)))
    assert count.feed_forward.routed == 8 * 3 * 10 * 5
    assert count.feed_forward.inactive == 6 * 3 * 10 * 5
    assert count.feed_forward.shared == 3 * 10 * 6
    assert count.feed_forward.router == 10 * 8 + 8 + 10
    # q 10 x 8, down 10 x 5, up 4 x 10, out 4 x 10.
    assert count.attention == 80 + 50 + 40 + 40
    assert count.norms == 20 + 4 + 10
    assert count.total - count.active == count.feed_forward.inactive


def test_query_compression_replaces_the_query_projection() -> None:
    plain = LatentAttention(
        num_heads=2, q_lora_rank=None, kv_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=1, v_head_dim=2
    )
    compressed = LatentAttention(
        num_heads=2, q_lora_rank=3, kv_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=1, v_head_dim=2
    )
    dense = DenseFeedForward(intermediate_size=4)
    counts = [
        count_parameters(spec_of(LayerGroup(num_layers=1, attention=part, feed_forward=dense)))
        for part in (plain, compressed)
    ]
    assert counts[1].attention - counts[0].attention == 3 * (10 + 8) - 10 * 8
    assert counts[1].norms - counts[0].norms == 3


def test_gated_delta_and_gated_attention_by_hand() -> None:
    delta = GatedDeltaAttention(
        num_key_heads=2, num_value_heads=4, key_head_dim=3, value_head_dim=5, conv_kernel_size=4
    )
    dense = DenseFeedForward(intermediate_size=4)
    count = count_parameters(spec_of(LayerGroup(num_layers=1, attention=delta, feed_forward=dense)))
    # q and k 6 wide, v, z and out 20, beta and alpha 4 each; a convolution over q, k and v; a rate and a bias a head.
    assert count.attention == 10 * (6 + 6 + 20 + 20 + 8) + 20 * 10 + 32 * 4 + 8
    assert count.norms == 20 + 5 + 10
    plain = GroupedQueryAttention(num_heads=4, num_kv_heads=2, head_dim=3, sinks=True)
    gated = GroupedQueryAttention(num_heads=4, num_kv_heads=2, head_dim=3, sinks=True, output_gate=True)
    plain_count, gated_count = (
        count_parameters(spec_of(LayerGroup(num_layers=1, attention=part, feed_forward=dense)))
        for part in (plain, gated)
    )
    assert plain_count.attention == 10 * (24 + 12) + 4
    assert gated_count.attention - plain_count.attention == 10 * 12


def test_a_tied_output_layer_is_counted_once() -> None:
    model = catalog.model("Qwen/Qwen3-4B")
    assert model.tie_word_embeddings
    assert count_parameters(model).lm_head == 0


def test_models_are_keys() -> None:
    assert {catalog.model("llama-3.1-8b"): 1}[catalog.model("llama-3.1-8b")] == 1
