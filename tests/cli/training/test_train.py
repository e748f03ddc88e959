"""`windtunnel train` as people run it."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from windtunnel.search.executors import run_chunk

if TYPE_CHECKING:
    from cli.conftest import Command

JOB = """
model: meta-llama/Llama-3.1-8B
device: h100_sxm
num_devices: 16
sequence_tokens: 8192
global_batch: 32
parallelism: {tp: 2, pp: 2}
total_tokens: 1.0e+12
faults: {device_mtbf_s: 1000d, checkpoint_bytes_per_s: 10GB/s}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize("width", [80, 120])
def test_it_shows_the_step_memory_and_the_whole_run(
    windtunnel: Command, job: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = windtunnel("train", str(job), "--explain")
    assert done.code == 0
    for words in ("MFU", "pipeline bubble", "stage 0: fits", "To 1.00 trillion tokens", "checkpoints", "interpolated"):
        assert words in done.stdout
    assert "qkv_proj" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= width


def test_json_adds_up(windtunnel: Command, job: Path) -> None:
    document = json.loads(windtunnel("train", str(job), "--explain", "--json").stdout)
    assert sum(document["breakdown_s"].values()) == pytest.approx(document["step_s"])
    assert document["degrees"]["dp"] == 4
    assert document["run"]["num_steps"] == -(-(10**12) // (32 * 8192))
    assert {task["phase"] for task in document["tasks"]} == {"forward", "backward", "weights' gradients"}


def test_options_override_the_file(windtunnel: Command, job: Path) -> None:
    given = ("train", str(job), "--pp", "4", "--schedule", "zb_h1", "--set", "recompute.granularity=full", "--json")
    document = json.loads(windtunnel(*given).stdout)
    assert (document["degrees"]["pp"], document["job"]["schedule"]) == (4, "zb_h1")
    assert document["hfu"] > document["mfu"]


SCRIPT = """
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
    --num-attention-heads 32 --seq-length 4096 --swiglu --untie-embeddings-and-output-weights --vocab-size 32000 \\
    --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 4 --use-distributed-optimizer \\
    --bf16 --lr 1e-4
"""


@pytest.mark.full
def test_a_script_of_a_framework_is_predicted_with_options_over_it(windtunnel: Command, tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(SCRIPT)
    options = ("--device", "h100_sxm", "--micro-batch", "2", "--set", "recompute.granularity=full")
    done = windtunnel("train", str(script), *options)
    assert "16 x NVIDIA H100 SXM5 80GB (TP 4, DP 4, ZeRO-1); megatron" in done.stdout
    assert "8 microbatches of 2 on each rank; recompute full" in done.stdout
    assert "without effect on a prediction, or not read: --lr" in done.stdout
    page = tmp_path / "page.html"
    document = json.loads(windtunnel("train", str(script), *options, "--json", "--html", str(page)).stdout)
    assert document["job_file"] == {"format": "Megatron arguments", "ignored": ["--lr"]}
    assert "not read: --lr" in page.read_text()
    assert "16 x NVIDIA B200" in windtunnel("train", str(script), "--device", "b200_sxm").stdout
    without = windtunnel("train", str(script))
    assert (without.code, without.stdout) == (2, "")
    assert "--device is missing" in without.stderr


@pytest.mark.full
def test_the_best_layout_of_a_script_is_said_in_its_words(windtunnel: Command, tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(SCRIPT.replace("--bf16", "--bf16 --recompute-granularity full"))
    done = windtunnel("train", str(script), "--device", "h100_sxm", "--search")
    said = re.search(r"change in \S+pretrain.sh: (.*); without (.*)", done.stderr)
    assert said is not None
    changed, dropped = said[1], said[2].split(", ")
    best = re.search(r"Best: tp (\d+), pp (\d+)", done.stdout)
    assert best is not None
    assert f"--tensor-model-parallel-size {best[1]}" in changed
    assert "--recompute-granularity" in dropped
    # The script with these changes is the best layout.
    edited = SCRIPT.replace("--tensor-model-parallel-size 4", changed.replace(", ", " "))
    script.write_text(edited)
    step = re.search(r"A step takes ([\d.]+ \w+)", done.stdout)
    assert step is not None
    assert f"A step takes {step[1]}" in windtunnel("train", str(script), "--device", "h100_sxm").stdout


def test_a_fine_tuning_job_is_predicted(windtunnel: Command, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    job = tmp_path / "sft.yaml"
    text = "model_name_or_path: llama-3.1-8b\nfinetuning_type: lora\ncutoff_len: 1024\nbf16: true\nneat_packing: true\n"
    job.write_text(f"{text}per_device_train_batch_size: 2\ndeepspeed: zero.json\nuse_rslora: true\n")
    done = windtunnel("train", str(job), "--device", "h100_sxm", "--num-devices", "8", "--set", "lora.rank=64")
    assert "8 x NVIDIA H100 SXM5 80GB (DP 8, ZeRO-2); deepspeed" in done.stdout
    assert "LoRA rank 64" in done.stdout
    assert "sequences are packed or padded to 1,024 tokens" in done.stdout
    assert "use_rslora" in done.stdout
    without = windtunnel("train", str(job), "--device", "h100_sxm")
    assert (without.code, without.stdout) == (2, "")
    assert "give --num-devices" in without.stderr
    job.write_text(f"{text}quantization_bit: 3\n")
    refused = windtunnel("train", str(job), "--device", "h100_sxm", "--num-devices", "8")
    assert (refused.code, refused.stdout) == (2, "")
    assert "quantization_bit = 3 is not modelled" in refused.stderr


@pytest.mark.full
def test_other_tools_names_of_options_are_known(windtunnel: Command) -> None:
    words = "--model llama-3.1-8b --device h100_sxm --num-devices 16 --tensor-model-parallel-size 2"
    done = windtunnel("train", *words.split(), "--seq-length", "4096", "--global-batch-size", "32")
    assert "16 x NVIDIA H100 SXM5 80GB (TP 2, DP 8, ZeRO-1)" in done.stdout
    others = "--gpus 16 --parallelism.tensor_parallel_degree 2 --training.seq_len 4096 --per_device_train_batch_size 1"
    same = windtunnel("train", *words.split()[:4], *others.split(), "--global-batch", "32")
    assert same.stdout == done.stdout
    # Another command has no such option by either name.
    assert "there is no option --seq-length" in windtunnel("simulate", "--seq-length", "4096").stderr


@pytest.mark.full
def test_no_file_is_needed(windtunnel: Command) -> None:
    done = windtunnel(
        *("train", "--model", "llama-3.1-8b", "--device", "h100_sxm", "--num-devices", "8"),
        *("--sequence-tokens", "8192", "--global-batch", "64", "--micro-batch", "2"),
    )
    assert done.code == 0
    assert "It would fit" in done.stdout
    fastest = next(line for line in done.stdout.splitlines() if line.startswith("--")).split("  ")[0]
    answer = done.stdout.splitlines()[1]
    assert f"of 79.6 GiB; with {fastest} it fits, at " in answer
    assert " a step. --search tries every layout." in " ".join(done.stdout.split())
    assert "--recompute full " in done.stdout


@pytest.mark.full
def test_what_makes_a_job_fit_is_said_as_it_is_typed(windtunnel: Command) -> None:
    job = ("train", "--model", "llama-3.1-70b", "--device", "h100_sxm", "--num-devices", "64", "--tp", "4", "--pp", "4")
    job = (*job, "--vpp", "5", "--sequence-tokens", "8192", "--global-batch", "128")
    lines = windtunnel(*job).stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("option ")) + 2
    changes = [line.split("  ")[0] for line in itertools.takewhile(bool, lines[first:])]
    assert "--tp 8" in changes
    assert any(change.startswith("--set 'recompute={granularity: selective") for change in changes)
    for change in changes:
        assert "Does not fit" not in windtunnel(*job, *shlex.split(change)).stdout


@pytest.mark.full
def test_the_layout_of_a_search_is_simulated_as_it_is_named(
    windtunnel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """126 layers are taken from both ends of 64 chunks, and the run's time leads."""
    monkeypatch.setenv("COLUMNS", "80")
    model = ("--model", "llama-3.1-405b", "--device", "h100_sxm", "--num-devices", "4096", "--sequence-tokens", "8192")
    job = ("train", *model, "--global-batch", "2048", "--total-tokens", "15e12")
    done = windtunnel(*job, "--tp", "8", "--cp", "2", "--pp", "8", "--vpp", "8")
    assert done.code == 0, done.stderr
    assert "layers of the 64 chunks: 1, 62 x 2, 1\n" in done.stdout
    sentence = " ".join(done.stdout.split())
    assert re.search(r"A step takes \S+ s; .* The run takes [\d,]+ days and costs \$[\d,]+ at list price\.", sentence)
    paid = windtunnel(*job, "--tp", "8", "--cp", "2", "--pp", "8", "--vpp", "8", "--set", "price_usd_per_hour=0.5")
    assert re.search(r"costs \$[\d,]+ at \$0\.50 an hour\.", " ".join(paid.stdout.split()))
    assert re.search(r"cost +\$[\d,]+ at \$0\.50 an hour\n", paid.stdout)
    assert "list price" not in paid.stdout
    even = windtunnel(*job, "--tp", "8", "--cp", "2", "--pp", "16")
    assert "chunks: 7, 14 x 8, 7" in even.stdout
    refused = windtunnel(*job)
    assert "let --search find the best layout" in refused.stderr


@pytest.mark.full
def test_a_search_of_layouts_leads_with_the_step_and_the_run(
    windtunnel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = ("--model", "llama-3.1-8b", "--device", "h100_sxm", "--num-devices", "8", "--sequence-tokens", "4096")
    done = windtunnel("train", *model, "--global-batch", "64", "--total-tokens", "1e12", "--search")
    assert re.search(r"\)\. A step takes \S+ s, the run [\d.]+ days and \$[\d,]+\.", " ".join(done.stdout.split()))
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("typed", "message", "hint"),
    [
        ("--lora 0", "--lora is 0; at least 1 is needed", ""),
        (
            "--precision mxfp8",
            "h100_sxm has no matrix units for mxfp8: it publishes no rate of fp4, whose units have it",
            "set --precision to one of fp32, fp16, bf16, fp8, fp8_current, fp8_rowwise, fp8_block, int8",
        ),
        (
            "--micro-batch 9",
            "global_batch = dp x micro_batch x num_microbatches does not hold: 64 is not a multiple of 72",
            "dp is 8: raise --tp, --pp or --cp, or let --search find the best layout",
        ),
        (
            "--offload parameters --zero 2",
            "--offload parameters of deepspeed needs --zero 3; it is 2",
            "set --zero to 3",
        ),
        ("--zero 3 --pp 2", "DeepSpeed has no pipeline with ZeRO-3: --pp 2", "set --zero to 0 or 1, or --pp to 1"),
    ],
)
def test_settings_are_named_as_they_are_typed(windtunnel: Command, typed: str, message: str, hint: str) -> None:
    words = (
        "train",
        "--model",
        "llama-3.1-8b",
        "--device",
        "h100_sxm",
        "--num-devices",
        "8",
        "--framework",
        "deepspeed",
    )
    done = windtunnel(*words, "--sequence-tokens", "4096", "--global-batch", "64", *typed.split())
    assert (done.code, done.stderr) == (2, f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))


def test_a_setting_of_a_file_is_named_by_its_key(windtunnel: Command, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: llama-3.1-8b\ndevice: h100_sxm\nnum_devices: 8\nsequence_tokens: 4096\nglobal_batch: 64\n"
        "framework: deepspeed\nsharding: {zero: 3}\nparallelism: {pp: 2}\n"
    )
    assert "set sharding.zero to 0 or 1, or parallelism.pp to 1" in windtunnel("train", str(job)).stderr


def test_the_timeline_of_an_offloaded_step_is_as_long_as_the_step(windtunnel: Command, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    words = ("train", "--model", "qwen2.5-7b", "--device", "a100_sxm", "--num-devices", "2", "--framework", "deepspeed")
    words = (*words, "--zero", "2", "--offload", "optimizer", "--sequence-tokens", "2048", "--global-batch", "8")
    document = json.loads(windtunnel(*words, "--recompute", "full", "--timeline", str(file), "--json").stdout)
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert "optimizer on the host" in {event["name"] for event in events}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(document["step_s"] * 1e6, abs=1)


@pytest.mark.parametrize(("device", "is_noted"), [("l4", True), ("h100_sxm", False)])
def test_an_assumed_node_is_announced(windtunnel: Command, device: str, is_noted: bool) -> None:
    words = ("train", "--model", "llama-3.1-8b", "--device", device, "--num-devices", "8", "--tp", "8")
    done = windtunnel(*words, "--sequence-tokens", "2048", "--global-batch", "8")
    assert ("eight devices on PCIe are assumed" in done.stderr) == is_noted
    assert done.code == 0


@pytest.mark.full
def test_the_timeline_holds_every_pass(windtunnel: Command, job: Path, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    assert windtunnel("train", str(job), "--timeline", str(file)).code == 0
    events = json.loads(file.read_text())["traceEvents"]
    passes = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    # 2 devices, 8 micro-batches, forward and backward.
    assert len(passes) == 2 * 8 * 2
    for device in (0, 1):
        own = [event for event in passes if event["pid"] == device]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(own))
    document = json.loads(windtunnel("train", str(job), "--json").stdout)
    ends = [event for event in events if event["ph"] == "X" and event["tid"] == 1 and event["pid"] == 0]
    assert {"optimizer"} <= {event["name"] for event in ends} <= document["breakdown_s"].keys()
    assert ends[-1]["ts"] + ends[-1]["dur"] == pytest.approx(document["step_s"] * 1e6, abs=1)
    assert windtunnel("train", str(job), "--timeline", str(file)).code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "3"), "num_devices = tp x cp x pp x dp"),
        (("--schedule", "zb"), "--schedule is 'zb', which is not known\nhint: did you mean"),
        (("--zero", "5"), "--zero is 5; one of 0, 1, 2, 3 is needed"),
        (("--recompute", "some"), "--recompute is 'some', which is not known"),
        (("--cp", "2", "--sequence-tokens", "4097"), "--sequence-tokens 4097 does not split"),
        (("--set", "overlap.tensor=true"), "unknown key $.overlap.tensor"),
        (("--device", "h1000"), "did you mean h100_sxm"),
        (("--ep", "2"), "has no experts"),
    ],
)
def test_wrong_input_exits_with_2_and_says_why(
    windtunnel: Command, job: Path, options: tuple[str, ...], message: str
) -> None:
    done = windtunnel("train", str(job), *options)
    assert done.code == 2
    assert message in done.stderr
    assert not done.stdout


def test_what_is_missing_is_named(windtunnel: Command) -> None:
    done = windtunnel("train", "--model", "llama-3.1-8b")
    assert (done.code, done.stdout) == (2, "")
    assert "device is missing" in done.stderr


@pytest.mark.full
def test_a_search_shows_the_fastest_layouts_that_fit(windtunnel: Command) -> None:
    given = ("--model", "llama-3.1-8b", "--device", "h100_sxm", "--num-devices", "4", "--sequence-tokens", "4096")
    done = windtunnel("train", *given, "--global-batch", "8", "--search", "--json")
    found = json.loads(done.stdout)
    assert list(found["space"]["vary"]) == ["tp", "pp", "vpp", "micro_batch", "recompute", "zero"]
    points = found["workloads"][0]["points"]
    shown = windtunnel("train", *given, "--global-batch", "8", "--search").stdout
    assert re.search(r"recompute    none: (no point|[\d.]+%), selective: [\d.]+%", shown)
    steps = [point["figures"]["step_s"] for point in points]
    assert steps == sorted(steps)
    assert len(steps) == 10
    assert all(point["holds"] and point["figures"]["memory_fraction"] < 1 for point in points)


@pytest.mark.full
def test_the_options_of_the_best_layout_give_its_step(windtunnel: Command) -> None:
    given = ("--model", "qwen2.5-0.5b", "--device", "h100_sxm", "--num-devices", "2", "--sequence-tokens", "8192")
    shown = windtunnel("train", *given, "--global-batch", "8", "--search").stdout
    options = re.search(r"as options of `windtunnel train`: (.*?)\n\n", shown, re.DOTALL)
    assert options
    done = windtunnel("train", *given, "--global-batch", "8", *shlex.split(options[1]))
    assert re.findall(r"A step takes [\d.]+ m?s", done.stdout) == re.findall(r"A step takes [\d.]+ m?s", shown)


@pytest.mark.full
def test_a_search_says_what_it_varied_and_held_and_holds_what_is_typed(windtunnel: Command) -> None:
    given = ("--model", "qwen2.5-0.5b", "--device", "h100_sxm", "--num-devices", "2", "--sequence-tokens", "2048")
    done = windtunnel(
        "train",
        *given,
        "--global-batch",
        "8",
        "--framework",
        "deepspeed",
        "--tp",
        "1",
        "--total-tokens",
        "2e12",
        "--search",
    )
    text = " ".join(done.stdout.split())
    varied, held = text[text.index(" varied ") :].split(" held ", 1)
    assert "zero 0, 1, 2, 3" in varied
    assert "; tp 1 " in held
    assert "total_tokens 2,000,000,000,000" in held
    assert "framework deepspeed; " in held
    assert re.search(r"as options of `windtunnel train`: .*--zero \d", text)


def test_what_a_device_needs_is_without_what_fragmentation_may_fill(windtunnel: Command) -> None:
    """A device that has room for some of it alone is not said to be full."""
    shape = ("--num-devices", "4", "--sequence-tokens", "8192", "--global-batch", "32", "--recompute", "full")
    done = windtunnel("train", "--model", "llama-3-8b", "--device", "h100_sxm", *shape)
    table = dict(re.findall(r"^(\w.*?)  +([\d.]+) GiB", done.stdout, re.MULTILINE))
    parts = ("parameters", "gradients", "optimizer", "context, NCCL", "temporaries")
    kept = next(float(size) for name, size in table.items() if name.startswith("activations"))
    assert float(table["stage 0: fits"]) == pytest.approx(kept + sum(float(table[part]) for part in parts), abs=0.1)
    assert "fragmentation, up to" in done.stdout


@pytest.mark.full
def test_waiting_for_slow_stages_is_apart_from_the_bubbles_of_the_schedule(windtunnel: Command) -> None:
    shape = (
        "--num-devices",
        "8",
        "--pp",
        "8",
        "--sequence-tokens",
        "4096",
        "--global-batch",
        "512",
        "--device",
        "h100_sxm",
    )
    stages = ("--set", "parallelism.layers_per_stage=[3, 3, 3, 14, 3, 2, 2, 2]")
    text = windtunnel("train", "--model", "llama-3-8b", *shape, *stages, "--recompute", "full").stdout
    assert re.search(r"in the schedule's bubbles, the rest waiting for stage 3, the slowest", " ".join(text.split()))
    even = " ".join(
        windtunnel(
            "train", "--model", "llama-3-8b", *shape, "--global-batch", "8", "--recompute", "full"
        ).stdout.split()
    )
    assert "the rest waiting for slower stages" in even


def test_a_short_run_has_small_units(windtunnel: Command, job: Path) -> None:
    text = windtunnel("train", str(job), "--set", "total_tokens=2.62e6", "--set", "faults={}").stdout
    assert "To 2.62 million tokens" in text
    assert re.search(r"not counted +failures \(set faults.device_mtbf_s\), checkpoints \(set", text)
    assert re.search(r"energy +\d[\d.]* k?Wh at", text)
    assert re.search(r"cost +\$\d+\.\d\d at", text)


@pytest.mark.full
def test_a_job_that_needs_more_than_may_be_used_says_how_much_that_is(windtunnel: Command) -> None:
    shape = ("--num-devices", "8", "--sequence-tokens", "4096", "--global-batch", "32")
    done = windtunnel("train", "--model", "llama-3-8b", "--device", "h100_sxm", *shape)
    needed, usable, whole = map(float, re.findall(r"([\d.]+) GiB", done.stdout.splitlines()[1]))
    assert usable < needed < whole


@pytest.mark.full
def test_the_page_of_a_job_that_does_not_fit_shows_what_would_fit(windtunnel: Command, tmp_path: Path) -> None:
    page = tmp_path / "job.html"
    shape = ("--num-devices", "8", "--sequence-tokens", "4096", "--global-batch", "32", "--html", str(page))
    windtunnel("train", "--model", "llama-3-8b", "--device", "h100_sxm", *shape)
    text = page.read_text(encoding="utf-8")
    assert "<section>\n<h2>It would fit" in text


@pytest.mark.full
def test_counts_are_read_as_for_servers(windtunnel: Command, job: Path) -> None:
    """In options, in `--set` and in files; 8k is 8,000 and 8K is 8,192, as vLLM reads them."""
    whole = windtunnel("train", str(job), "--json").stdout
    for given in (["--sequence-tokens", "8K"], ["--set", "sequence_tokens=8K"]):
        assert windtunnel("train", str(job), *given, "--json").stdout == whole
    job.write_text(job.read_text().replace("sequence_tokens: 8192", "sequence_tokens: 8K"))
    assert windtunnel("train", str(job), "--json").stdout == whole
    done = windtunnel("train", str(job), "--sequence-tokens", "8x")
    assert "--sequence-tokens: '8x' is not a valid integer" in done.stderr


@pytest.mark.full
def test_ctrl_c_in_a_search_prints_the_best_so_far(windtunnel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run_some(evaluator: Any, number: int, chunk: Any) -> Any:
        calls.append(number)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run_chunk(evaluator, number, chunk)

    monkeypatch.setattr("windtunnel.search.executors.run_chunk", run_some)
    job = ("--model", "llama-3.1-8b", "--device", "h100_sxm", "--num-devices", "8", "--global-batch", "16")
    done = windtunnel("train", *job, "--sequence-tokens", "4096", "--search")
    assert done.code == 130
    best = re.search(r"^Best: (.*) \(([\d,]+) tokens/s/device\)", done.stdout, re.MULTILINE)
    assert best is not None
    assert done.stdout.index("Best:") < done.stdout.index("points evaluated")
    counts = re.search(r"interrupted: ([\d,]+) of ([\d,]+) points are evaluated; the best", done.stderr)
    assert counts is not None
    evaluated, points = (int(text.replace(",", "")) for text in counts.groups())
    assert 0 < evaluated < points
    calls.clear()
    asked = windtunnel("train", *job, "--sequence-tokens", "4096", "--search", "--json")
    assert (asked.code, asked.stdout) == (130, "")
