"""ML.ENERGY's rows as scenarios, and how far a few of them are predicted; nothing is fitted to them."""

import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mlenergy import BLOCK_TOKENS, ScoredRow, conversations, measured_as, output_lengths, scenario_of, scored
from windtunnel.errors import InputError
from windtunnel.metrics.records import Table
from windtunnel.model.precision import Format
from windtunnel.serving.scenario import resolve
from windtunnel.workload.arrivals import ClosedLoop
from windtunnel.workload.lengths import Uniform

ROW = {
    "task": "lm-arena-chat",
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "gpu_model": "H100",
    "num_gpus": "1",
    "expert_parallel": "1",
    "max_num_seqs": "16",
    "avg_output_len": "400",
}
HISTOGRAM = {"bins": [0.0, 100.0, 300.0], "counts": [1, 1]}


def test_a_row_has_the_documented_settings() -> None:
    setup = resolve(scenario_of(ROW, {}, "0.11.1"))
    assert (setup.engine.max_num_seqs, setup.engine.max_num_batched_tokens) == (16, 8192)
    assert setup.engine.async_scheduling
    assert setup.engine.sampler == "sort"
    assert setup.sampling.text == "temperature 0.8, top-p 0.95"
    assert resolve(scenario_of(ROW, {}, None)).engine.version != "0.11.1"


def test_prompts_of_unknown_length_are_refused() -> None:
    with pytest.raises(InputError, match="prompt lengths of audio-chat are not documented"):
        scenario_of(ROW | {"task": "audio-chat"}, {}, "0.11.1")


def test_chat_sends_every_turn_with_all_turns_before_it() -> None:
    """The published figures of the prompts; most of a later turn's prompt is that of the turn before."""
    requests = [json.loads(line) for line in conversations(2048).read_text(encoding="utf-8").splitlines()]
    tokens = np.array([request["input_length"] for request in requests[:1024]])
    figures = (tokens.mean(), *np.quantile(tokens, [0.5, 0.9, 0.95]))
    assert figures == pytest.approx((674, 105, 2200, 3050), rel=0.06)
    blocks = [set(request["hash_ids"]) for request in requests[:1024]]
    repeated = sum(len(turn & before) for before, turn in pairwise(blocks)) * BLOCK_TOKENS
    assert 0.7 < repeated / tokens.sum() < 0.85
    assert requests[1024:] == requests[:1024]
    trace = scenario_of(ROW | {"max_num_seqs": "512"}, {}, None).workload.trace
    assert trace is not None
    assert trace.path == str(conversations(2048))


def test_images_and_videos_are_those_of_the_vision_tower_or_tokens() -> None:
    """Gemma 3 has 256 tokens for any image; models without a catalogue entry are their language model."""
    gemma = scenario_of(ROW | {"task": "image-chat", "model_id": "google/gemma-3-27b-it"}, {}, "0.11.1").workload
    assert (gemma.input_tokens, gemma.media_tokens) == (Uniform(min_tokens=20, max_tokens=150), (256, 0))
    qwen = ROW | {"task": "video-chat", "model_id": "Qwen/Qwen3-VL-8B-Instruct"}
    assert scenario_of(qwen, {}, None).workload.media_tokens == (0, 2 * 28 * 20)
    omni = ROW | {"task": "video-chat", "model_id": "Qwen/Qwen3-Omni-30B-A3B-Instruct"}
    assert scenario_of(omni, {}, None).model == "Qwen/Qwen3-30B-A3B"
    assert scenario_of(omni, {}, None).workload.input_tokens == Uniform(min_tokens=470, max_tokens=1950)
    assert scenario_of(omni | {"max_num_seqs": "512"}, {}, None).workload.num_requests == 1024
    with pytest.raises(InputError, match="prompt lengths of video-chat"):
        scenario_of(omni | {"model_id": "google/gemma-3-27b-it"}, {}, None)


def test_hybrids_of_nemotron_keep_their_states_in_fp32() -> None:
    """As the benchmark's launch files say."""
    nemotron = scenario_of(ROW | {"model_id": "nvidia/NVIDIA-Nemotron-Nano-12B-v2"}, {}, None)
    assert nemotron.precision is not None
    assert nemotron.precision.recurrent_state is Format.FP32


def test_output_lengths_have_the_row_s_mean() -> None:
    lengths = output_lengths(ROW, {"meta-llama/Llama-3.1-8B-Instruct|lm-arena-chat": HISTOGRAM})
    assert lengths["values"] == [160, 640]
    assert np.average(lengths["values"], weights=lengths["weights"]) == 400
    assert output_lengths(ROW, {}) == 400


def test_all_requests_are_sent_at_once() -> None:
    """1,024 prompts or gpqa's 198, more than once where they would not fill a steady state."""
    assert scenario_of(ROW, {}, None).workload.arrivals == ClosedLoop(concurrency=1024)
    assert scenario_of(ROW | {"max_num_seqs": "512"}, {}, None).workload.num_requests == 2048
    assert scenario_of(ROW | {"task": "gpqa", "max_num_seqs": "256"}, {}, None).workload.num_requests == 396


def test_the_mean_is_of_the_steady_state_and_the_median_of_the_whole_run() -> None:
    """A steady state lasts from the first token in the last place to the request whose place stays empty."""
    steps = {
        "start_s": np.array([0.0, 10.0, 20.0, 30.0]),
        "duration_s": np.array([10.0, 1.0, 3.0, 9.0]),
        "num_steps": np.array([1, 1, 1, 1]),
        "decode_tokens": np.array([1, 3, 1, 6]),
        "num_sampled": np.array([4, 3, 2, 1]),
    }
    requests = {"finish_s": np.array([9.0, 21.0, 29.0, 40.0]), "first_token_s": np.array([10.0, 10.0, 11.0, 25.0])}
    found = measured_as(Table(steps, {}), Table(requests, {}), 1)
    assert found == {"median": 9.0, "mean": 1.5, "rate": 5 / 4}


@pytest.mark.slow
@pytest.mark.compiled
def test_dense_models_on_h100_are_predicted(reference: Path) -> None:
    """Every fourth row of dense models and gpt-oss."""
    with (reference / "mlenergy" / "llm_serving_energy.csv").open(newline="", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["gpu_model"] == "H100" and row["task"] in ("gpqa", "lm-arena-chat")
        ]
    dense = [
        row for row in rows if "gemma" in row["model_id"] or "gpt-oss" in row["model_id"] or "-8B" in row["model_id"]
    ]
    done = [row for row in scored(dense[::4], {}, "0.11.1") if isinstance(row, ScoredRow)]
    errors = np.array([abs(row.error("median")) for row in done])
    assert len(done) >= 8
    assert np.median(errors) < 0.08
