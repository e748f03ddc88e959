"""Loads of benchmark clients beside a server: in scripts, and in recipes of srt-slurm."""

from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.launch.loads import recipe_load
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.serving.scenario import scenario_from
from windtunnel.workload.client_load import ClientLoad

SERVER = "vllm serve qwen3-8b &\n"


def load_of(text: str) -> ClientLoad:
    load = read_launch_command(SERVER + text).load
    assert load is not None
    return load


def uniform(low: int, high: int) -> dict[str, Any]:
    return {"type": "uniform", "min_tokens": low, "max_tokens": high}


def closed(concurrency: int, **rest: float) -> dict[str, Any]:
    return {"type": "closed_loop", "concurrency": concurrency, **rest}


@pytest.mark.parametrize(
    ("client", "workload"),
    [
        (
            (
                "vllm bench serve --random-input-len 600 --random-output-len=90 --random-range-ratio 0.5 "
                "--num-prompts 80 --max-concurrency 8"
            ),
            {
                "input_tokens": uniform(300, 900),
                "output_tokens": uniform(45, 135),
                "arrivals": closed(8),
                "num_requests": 80,
                "client": "vllm",
            },
        ),
        (
            "vllm bench serve --request-rate 3 --burstiness 4 --random-prefix-len 50",
            {
                "input_tokens": 1024,
                "output_tokens": 128,
                "arrivals": {"type": "gamma", "rate_per_s": 3, "cv": 0.5},
                "num_requests": 1000,
                "client": "vllm",
                "shared_prompts": {"tokens": 50},
            },
        ),
        (
            (
                "python3 -m sglang.bench_serving --backend sglang --dataset-name random --random-input 200 "
                "--random-output 100 --random-range-ratio 0.25 --num-prompts 40 --request-rate 6 --max-concurrency 4"
            ),
            {
                "input_tokens": uniform(50, 200),
                "output_tokens": uniform(25, 100),
                "arrivals": closed(4, rate_per_s=6, cv=1),
                "num_requests": 40,
                "client": "sglang",
            },
        ),
        (
            (
                "python3 benchmark_serving.py --dataset-name random --random-input-len 1000 --random-output-len 500 "
                "--random-range-ratio 0.8"
            ),
            {
                "input_tokens": uniform(800, 1000),
                "output_tokens": uniform(400, 500),
                "arrivals": {"type": "burst"},
                "num_requests": 1000,
                "client": "inferencex",
            },
        ),
        (
            (
                "aiperf profile --isl 300 --isl-stddev 20 --osl 40 --request-rate 5 --arrival-pattern constant "
                "--request-count 60"
            ),
            {
                "input_tokens": {"type": "normal", "mean_tokens": 300, "std_tokens": 20},
                "output_tokens": 40,
                "arrivals": {"type": "static", "rate_per_s": 5},
                "num_requests": 60,
                "client": "aiperf",
            },
        ),
        (
            "genai-perf profile --output-tokens-mean 40",
            {"input_tokens": 550, "output_tokens": 40, "arrivals": closed(1), "client": "aiperf"},
        ),
        (
            (
                "prepare_dataset.py --output d token-norm-dist --input-mean 128 --output-mean 64 --input-stdev 0 "
                "--num-requests 300\ntrtllm-bench --model m throughput --dataset d.txt --concurrency 16"
            ),
            {"input_tokens": 128, "output_tokens": 64, "arrivals": closed(16), "num_requests": 300},
        ),
    ],
)
def test_a_client_beside_the_server_says_the_load(client: str, workload: dict[str, Any]) -> None:
    load = load_of(client)
    assert load.workload() == workload
    assert not load.left_out
    scenario = {"model": "qwen3-8b", "deployment": {"device": "h100_sxm"}, "workload": {"num_requests": 5} | workload}
    assert scenario_from(scenario).workload.client == workload.get("client")


LOOP = """ISL=512
for CONC in 4 16; do
  run_benchmark_serving --input-len "$ISL" --output-len 64 --num-prompts "$((CONC * 5))" --max-concurrency "$CONC"
done
"""


@pytest.mark.parametrize(
    "text",
    [
        LOOP,
        LOOP.replace("for CONC in 4 16", 'LIST=(4 16)\nfor CONC in "${LIST[@]}"'),
        LOOP.replace("(CONC", "(5 * $CONC").replace(" * 5)", ")"),
    ],
)
def test_a_loop_over_concurrencies_is_several_runs(text: str) -> None:
    load = load_of(text)
    assert (load.concurrencies, load.requests_per_client) == ((4, 16), 5)
    assert load.workload()["num_requests"] == 80
    assert load.workload(4)["num_requests"] == 20
    assert "--vary concurrency=4,16" in load.sentence(load.workload(), {"arrivals"})


def test_clients_one_after_the_other_are_runs_of_one_load_or_the_largest_is_taken() -> None:
    runs = "\n".join(f"vllm bench serve --max-concurrency {number} --num-prompts {2 * number}" for number in (2, 8))
    assert load_of(runs).concurrencies == (2, 8)
    load = load_of(f"{runs}\nvllm bench serve --random-input-len 10 --num-prompts 3")
    assert load.concurrencies == (2, 8)
    assert load.left_out == ("1 other load of the text is left out: --input-tokens and others say one",)


def test_what_a_script_does_not_set_is_said() -> None:
    load = load_of('run_benchmark_serving --input-len "$ISL" --output-len 64 --max-concurrency 4')
    assert (load.input_tokens, load.output_tokens) == (None, 64)
    assert load.left_out == ("run_benchmark_serving says $ISL, which the text does not set",)
    assert "sharegpt" in load_of("vllm bench serve --dataset-name sharegpt").left_out[0]


def test_no_client_is_no_load() -> None:
    assert read_launch_command(SERVER).load is None


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max-concurrency many", "the concurrency of vllm bench serve is 'many'; a number above 0 is needed"),
        ("--num-prompts 1.5", "the number of requests of vllm bench serve is '1.5'; a whole number is needed"),
        ("--request-rate -2", "the rate of vllm bench serve is '-2'"),
        ("--random-range-ratio 3", "a range ratio of 3"),
    ],
)
def test_wrong_values_are_named(option: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_of(f"vllm bench serve {option}")


@pytest.mark.parametrize(
    ("benchmark", "workload"),
    [
        (
            {"type": "sa-bench", "isl": 500, "osl": 100, "concurrencies": "2x6", "req_rate": "inf"},
            {
                "input_tokens": uniform(400, 500),
                "output_tokens": uniform(80, 100),
                "arrivals": closed(6),
                "num_requests": 60,
                "client": "inferencex",
            },
        ),
        (
            {"isl": 500, "osl": 100, "concurrencies": [6], "req_rate": 9, "random_range_ratio": 1}
            | {"num_prompts_mult": 3},
            {
                "input_tokens": 500,
                "output_tokens": 100,
                "arrivals": closed(6, rate_per_s=9, cv=1),
                "num_requests": 18,
                "client": "inferencex",
            },
        ),
        (
            {"type": "custom", "command": "./bench.sh", "env": {"ISL": "64", "OSL": "8", "CONC_LIST": "4 8"}},
            {
                "input_tokens": uniform(51, 64),
                "output_tokens": uniform(6, 8),
                "arrivals": closed(8),
                "num_requests": 80,
                "client": "inferencex",
            },
        ),
        (
            {"type": "custom", "command": "aiperf profile --isl $N --osl 9 --concurrency 2,5", "env": {"N": 70}},
            {"input_tokens": 70, "output_tokens": 9, "arrivals": closed(5), "client": "aiperf"},
        ),
    ],
)
def test_the_benchmark_of_a_recipe_says_the_load(benchmark: dict[str, Any], workload: dict[str, Any]) -> None:
    load = recipe_load(benchmark)
    assert load is not None
    assert load.workload() == workload


@pytest.mark.parametrize("kind", ["gpqa", "custom", "mooncake-router"])
def test_a_benchmark_without_lengths_is_said(kind: str) -> None:
    load = recipe_load({"type": kind})
    assert load is not None
    assert load.lengths == (None, None)
    assert "is not read" in load.left_out[0]
    assert recipe_load({}) is recipe_load({"type": "manual"}) is None


def test_a_wrong_benchmark_is_named() -> None:
    with pytest.raises(InputError, match=r"benchmark\.concurrencies is 'few'; a number above 0 is needed"):
        recipe_load({"isl": 1, "osl": 1, "concurrencies": "few"})
