"""`windtunnel explain`: one step, operator by operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from windtunnel import catalog
from windtunnel.cli.output import remark_left_out

if TYPE_CHECKING:
    from cli.conftest import Command

LLAMA = ("--model", "meta-llama/Llama-3.1-8B", "--device", "h100_sxm")


@pytest.mark.parametrize("width", [80, 120])
def test_it_shows_every_operator_and_their_sum(
    windtunnel: Command, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = windtunnel("explain", *LLAMA, "--tp", "2", "--batch", "63", "--context", "2048")
    assert done.code == 0
    for words in ("qkv_proj", "attention_decode", "lm_head", "64 x 3072 x 4096 bf16", "padded to the CUDA graph of 64"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= width


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V2-Lite"])
def test_json_adds_up(windtunnel: Command, model: str) -> None:
    options = ("--model", model, "--device", "h100_sxm", "--prefill-tokens", "512")
    document = json.loads(windtunnel("explain", *options, "--json").stdout)
    operators = document["operators"]
    assert document["batch"]["decode_requests"] == 0
    assert sum(operator["total_s"] for operator in operators) == pytest.approx(document["device_s"])
    for name in ("kind", "bound", "coverage", "source"):
        assert sum(document[f"seconds_by_{name}"].values()) == pytest.approx(document["device_s"])
    assert document["memory"]["kv_tokens"] > 0
    assert {operator["name"] for operator in operators} >= {"o_proj", "lm_head", "sample"}
    assert document["sampling"]["text"] == "greedy"


def test_sampling_is_a_family_of_its_own(windtunnel: Command) -> None:
    options = (*LLAMA, "--engine-version", "0.16.0", "--temperature", "0.8", "--top-p", "0.95")
    document = json.loads(windtunnel("explain", *options, "--json").stdout)
    assert document["sampling"]["kernel"] == "sort"
    assert document["sampling"]["source"].startswith("as given")
    greedy = json.loads(windtunnel("explain", *LLAMA, "--engine-version", "0.16.0", "--json").stdout)
    assert document["seconds_by_kind"]["sampling"] > 10 * greedy["seconds_by_kind"]["sampling"] > 0
    assert "temperature 0.8, top-p 0.95 by PyTorch's sort" in windtunnel("explain", *options).stdout


def test_it_reads_a_scenario(windtunnel: Command, small: tuple[str, ...], tmp_path: Path) -> None:
    windtunnel("simulate", *small, "--quant", "fp8", "--out", str(tmp_path))
    # The scenario's requests are short, and so its engine's max_model_len.
    done = windtunnel("explain", str(tmp_path / "scenario.yaml"), "--batch", "4", "--context", "64", "--json")
    assert json.loads(done.stdout)["precision"]["weights"] == "fp8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "the step is empty"),
        (["--batch", "-1"], "batch is -1"),
        (["--context", "0"], "attends to one token at least"),
        (["--prefill-context", "100"], "no prompt is computed"),
        (["--batch", "2000"], "above --max-num-seqs 1,024"),
        (["--prefill-tokens", "9000"], "above --max-num-batched-tokens 8,192"),
        (["--context", "200000", "--batch", "1"], "accepts 131,072"),
        (["--context", "100000", "--batch", "500"], "tokens of KV cache"),
    ],
)
def test_a_step_that_the_engine_never_forms_is_refused(windtunnel: Command, options: list[str], message: str) -> None:
    done = windtunnel("explain", *LLAMA, *options)
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize(("device", "tp", "is_noted"), [("l4", 2, True), ("l4", 1, False), ("h100_sxm", 2, False)])
def test_an_assumed_node_is_announced(windtunnel: Command, device: str, tp: int, is_noted: bool) -> None:
    words = ("explain", "--model", "llama-3.1-8b", "--device", device, "--tp", str(tp), "--batch", "4")
    done = windtunnel(*words, "--context", "100")
    assert done.code == 0
    assert ("no node of l4 is known, so eight devices on PCIe are assumed" in done.stderr) == is_noted


def test_an_assumed_switch_is_announced(windtunnel: Command, tmp_path: Path) -> None:
    lines = ["name: mine", "title: Mine", "vendor: nvidia", "architecture: hopper", "scale_up_bytes_per_s: 300GB/s"]
    lines += ["memory_bytes: 80GiB", "memory_bytes_per_s: 3TB/s", "peak_flops_per_s: {bf16: 900TFLOPS}"]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    words = ("explain", "--model", "llama-3.1-8b", "--device", str(tmp_path / "mine.yaml"), "--tp", "2", "--batch", "4")
    stderr = " ".join(windtunnel(*words, "--context", "100").stderr.split())
    assert "so eight devices behind a switch of their scale_up_bytes_per_s are assumed" in stderr


def test_a_tower_that_is_left_out_is_said_once_beside_the_result(windtunnel: Command) -> None:
    done = windtunnel("explain", "--model", "google/gemma-3-4b-it", "--device", "h100_sxm", "--json")
    assert done.code == 0
    assert done.stderr.count("note: google/gemma-3-4b-it is predicted without its vision tower: text only") == 1
    assert "tower" not in done.stdout
    text = windtunnel("explain", "--model", "google/gemma-2-9b", "--device", "h100_sxm", "--json")
    assert "tower" not in text.stderr


def test_a_tower_of_unknown_size_is_said_to_be_missing_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    model = msgspec.structs.replace(catalog.model("google/gemma-3-4b-it"), tower_parameters=0)
    remark_left_out(model)
    assert "text only; the memory of its vision tower is not counted" in capsys.readouterr().err
    # Layers that attend to images are in memory beside the tower (Llama 3.2 Vision).
    parts = ("vision tower", "attention to images", "audio tower")
    remark_left_out(msgspec.structs.replace(model, tower_parameters=1, left_out=parts))
    assert "and audio tower: text only; the memory of its audio tower is not counted" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "is_noted"), [("google/gemma-4-31B-it", True), ("XiaomiMiMo/MiMo-7B-Base", False)])
def test_a_prediction_layer_that_is_not_known_is_announced(windtunnel: Command, model: str, is_noted: bool) -> None:
    drafts = "deployment.engine.speculative={method: mtp, num_draft_tokens: 1, acceptance_fraction: 0.7}"
    done = windtunnel("explain", "--model", model, "--device", "h200_sxm", "--batch", "1", "--set", drafts)
    assert done.code == 0
    assert ("has a prediction layer; one like its last is assumed" in done.stderr) == is_noted


@pytest.mark.parametrize("model", ["Qwen/Qwen3-Next-80B-A3B-Instruct", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_recurrences_are_shown_as_json(windtunnel: Command, model: str) -> None:
    done = windtunnel("explain", "--model", model, "--device", "h100_sxm", "--tp", "4", "--json")
    assert done.code == 0
    shapes = {operator["kind"]: operator["shape"] for operator in json.loads(done.stdout)["operators"]}
    assert {"gated_delta", "state_space_scan"} & set(shapes)


def test_the_answer_comes_before_the_operators(windtunnel: Command) -> None:
    printed = windtunnel("explain", *LLAMA).stdout
    assert printed.index("A step takes 13.3 ms, bound by memory.") < printed.index("qkv_proj")


POOLS = """
model: llama-3.1-8b
deployment:
  device: h100_sxm
  pools:
    - {name: prompts, role: prefill, parallelism: {tp: 2}}
    - {name: tokens, role: decode, engine: {max_num_seqs: 96}}
workload: {arrivals: {type: poisson, rate_per_s: 2}, input_tokens: 512, output_tokens: 64, num_requests: 10}
"""


@pytest.mark.parametrize(
    ("given", "pool", "tp"),
    [
        ((), "tokens", 1),
        (("--batch", "90"), "tokens", 1),
        (("--prefill-tokens", "512"), "prompts", 2),
        (("--pool", "prompts"), "prompts", 2),
        (("--pool", "tokens", "--prefill-tokens", "512"), "tokens", 1),
    ],
)
def test_a_step_of_pools_is_that_of_one_pool(
    windtunnel: Command, tmp_path: Path, given: tuple[str, ...], pool: str, tp: int
) -> None:
    (path := tmp_path / "pools.yaml").write_text(POOLS)
    done = windtunnel("explain", str(path), *given)
    assert done.code == 0
    assert f"A step of the pool {pool} takes " in done.stdout
    other = {"prompts": "tokens", "tokens": "prompts"}[pool]
    assert f"--pool {other} explains another" in done.stderr
    document = json.loads(windtunnel("explain", str(path), *given, "--json").stdout)
    assert (document["pool"], document["parallelism"]["tp"]) == (pool, tp)
    assert bool(document["batch"]["prefill_tokens"]) == (pool == "prompts" or "--prefill-tokens" in given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--pool", "prompt"), "did you mean prompts"),
        (("--pool", "prompts", "--batch", "4"), "hint: give --prefill-tokens, and no --batch"),
        (("--batch", "100"), "hint: raise --max-num-seqs"),
        (("--batch", "-1"), "hint: "),
        (("--context", "200000"), "hint: use a shorter context"),
    ],
)
def test_a_wrong_step_of_pools_is_answered_with_a_hint(
    windtunnel: Command, tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    (path := tmp_path / "pools.yaml").write_text(POOLS)
    done = windtunnel("explain", str(path), *given)
    assert done.code == 2
    assert message in done.stderr


def test_a_deployment_without_pools_has_none_to_name(windtunnel: Command) -> None:
    done = windtunnel("explain", *LLAMA, "--pool", "decode")
    assert done.code == 2
    assert "there is no pool 'decode': the deployment has no pools" in done.stderr
