"""Experiments: command lines, result folders and resumption with stand-ins for the profilers, and a real model."""

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import nsys_report
from formats.captures.test_ncu import raw_page
from lab import fake_profilers
from windtunnel.errors import InputError, MissingExtraError, WindtunnelError
from windtunnel.formats.captures.capture import read_capture
from windtunnel.lab.experiments import run as lab
from windtunnel.lab.experiments.run import check_tools, finished_run, run_experiment, run_sweep, top_kernel_pattern
from windtunnel.lab.experiments.schema import Experiment, NcuOptions, TorchOptions
from windtunnel.report.lab.experiment import write_experiment_page
from windtunnel.schema import decode

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`nsys` and `ncu` on PATH, and packages that seem to be installed; the folder of what the tools leave behind."""
    on_path, folder = fake_profilers.install(tmp_path / "tools", "nsys", "ncu")
    nsys_report.write_report(folder / "capture.sqlite")
    (folder / "counters.csv").write_text(
        raw_page(True).replace("gemm_kernel<128, 64>", "flash::flash_fwd_splitkv_kernel")
    )
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setattr(lab, "find_spec", lambda _: object())
    return folder


def commands(recorded: Path) -> list[str]:
    return (recorded / "commands.txt").read_text().splitlines()


def test_under_nsys_a_run_leaves_everything_that_it_promises(recorded: Path, tmp_path: Path) -> None:
    done = run_experiment(Experiment(model="m/tiny", mode="nsys"), tmp_path / "results")
    assert done.folder.name.startswith("tiny_nsys_20")
    for name in ("config.yaml", "experiment.log", "summary.json", "metrics.json", "inference_script.py"):
        assert (done.folder / name).stat().st_size > 0
    profile, export = commands(recorded)
    assert profile.startswith("nsys profile --trace=cuda,nvtx,osrt")
    for option in ("--cuda-graph-trace=node", "--trace-fork-before-exec=true", "--sample=none"):
        assert option in profile
    assert "gpu-metrics" not in profile
    assert profile.endswith(str(done.folder / "inference_script.py"))
    assert export.startswith("nsys export --type=sqlite")
    metrics = json.loads((done.folder / "nsys_metrics.json").read_text())
    top = metrics["summary"]["top_kernels"][0]
    assert (top["name"], round(top["time_percentage"], 1)) == ("nvjet_tst_128x64_64x8_2x1_v_bz_TNN", 65.8)
    with (done.folder / "nsys_summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["name"], rows[0]["class"], rows[0]["count"]) == (top["name"], "gemm", "24")
    assert (done.folder / "kernels.parquet").exists()


def test_no_file_of_a_run_but_the_report_itself_holds_the_environment(recorded: Path, tmp_path: Path) -> None:
    done = run_experiment(Experiment(model="m/tiny", mode="nsys"), tmp_path / "results")
    page = write_experiment_page(done.folder)
    assert page.parent.name == "visualization"
    assert b"hf_secret" in (recorded / "capture.sqlite").read_bytes()
    files = [path for path in done.folder.rglob("*") if path.is_file()]
    assert [path.name for path in files if b"hf_secret" in path.read_bytes()] == []
    assert [path.name for path in page.parent.iterdir()] == [f"{done.folder.name}_report.html"]
    assert all(caption in page.read_text() for caption in ("The kernels that take most of it", "Calls of the API"))


def test_counting_takes_the_top_kernels_and_sets_both_profilers_side_by_side(recorded: Path, tmp_path: Path) -> None:
    done = run_experiment(Experiment(model="m/tiny", mode="nsys_ncu"), tmp_path / "results")
    counted = commands(recorded)[2]
    assert counted.startswith("ncu --target-processes=all --set=full --clock-control=none")
    assert "--kernel-name=regex:^(nvjet_tst_128x64_64x8_2x1_v_bz_TNN|ncclDevKernel_AllReduce" in counted
    assert commands(recorded)[3].endswith("--csv --page=raw --print-units=base")
    with (done.folder / "kernel_comparison.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["class"] == "attention"
    assert (row["nsys_count"], row["ncu_count"]) == ("6", "2")
    assert float(row["ncu_mean_s"]) == pytest.approx(31.872e-6)
    assert json.loads((done.folder / "ncu_metrics.json").read_text())["summary"]["tool"] == "ncu"


def test_a_kernel_pattern_of_the_users_is_taken_as_it_is(recorded: Path, tmp_path: Path) -> None:
    options = {"kernel_name": "flash.*", "launch_count": 3, "set": "roofline"}
    wanted = Experiment(model="m", mode="nsys_ncu", ncu_options=decode(options, NcuOptions))
    run_experiment(wanted, tmp_path)
    assert "--set=roofline --clock-control=none --kernel-name=regex:flash.* --launch-count=3" in commands(recorded)[2]


def test_the_pattern_has_each_function_once(tmp_path: Path) -> None:
    nsys_report.write_report(tmp_path / "s.sqlite")
    pattern = top_kernel_pattern(read_capture(tmp_path / "s.sqlite"), 3)
    assert pattern == (
        "^(nvjet_tst_128x64_64x8_2x1_v_bz_TNN|ncclDevKernel_AllReduce_Sum_bf16_RING_LL|flash_fwd_splitkv_kernel)$"
    )


@pytest.mark.full
def test_a_finished_run_is_found_and_a_broken_or_other_one_is_not(recorded: Path, tmp_path: Path) -> None:
    wanted = Experiment(model="m/tiny", mode="nsys")
    assert finished_run(wanted, tmp_path / "results") is None
    first = run_experiment(wanted, tmp_path / "results")
    again = run_experiment(wanted, tmp_path / "results", resume=True)
    assert (again.folder, again.was_there) == (first.folder, True)
    assert not run_experiment(Experiment(model="m/tiny", mode="nsys", seed=1), tmp_path / "results", True).was_there
    assert run_experiment(wanted, tmp_path / "results").folder != first.folder
    (tmp_path / "one").mkdir()
    stopped = tmp_path / "one" / first.folder.name
    first.folder.rename(stopped)
    (stopped / "summary.json").write_text('{"status": "do')
    assert finished_run(wanted, tmp_path / "one") is None
    assert len(commands(recorded)) == 6


def test_a_profiler_that_fails_leaves_the_log_and_says_where(recorded: Path, tmp_path: Path) -> None:
    (recorded / "fail").touch()
    with pytest.raises(WindtunnelError, match="nsys ended with exit code 1") as caught:
        run_experiment(Experiment(model="m", mode="nsys"), tmp_path / "results")
    (folder,) = (tmp_path / "results").iterdir()
    assert str(folder / "experiment.log") in str(caught.value.hint)
    assert "the injection library died" in (folder / "experiment.log").read_text()
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


def test_a_sweep_goes_on_after_a_failure_and_repeats_nothing_that_is_done(recorded: Path, tmp_path: Path) -> None:
    points = [Experiment(model="m", mode="nsys", batch_size=size) for size in (1, 2)]
    points.append(Experiment(model="m", mode="nsys", tensor_parallel_size=2))
    first, second = ([*run_sweep(points, tmp_path)] for _ in range(2))
    assert [(outcome.is_done, outcome.was_there) for outcome in first] == [(True, False), (True, False), (False, False)]
    assert [(outcome.is_done, outcome.was_there) for outcome in second] == [(True, True), (True, True), (False, False)]
    assert len(commands(recorded)) == 4


@pytest.mark.parametrize(("mode", "tool"), [("nsys", "nsys"), ("nsys_ncu", "ncu")])
def test_a_missing_profiler_is_named(mode: str, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path, _ = fake_profilers.install(tmp_path, *(["nsys"] if tool == "ncu" else []))
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setattr(lab, "find_spec", lambda _: object())
    with pytest.raises(InputError, match=f"there is no {tool} on PATH"):
        run_experiment(Experiment(model="m", mode=mode), tmp_path / "results")  # type: ignore[arg-type]
    assert not (tmp_path / "results").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine, package, error in (("vllm", "vllm", InputError), ("transformers", "torch", MissingExtraError)):
        monkeypatch.setattr(lab, "find_spec", lambda name, missing=package: None if name == missing else object())
        with pytest.raises(error, match=f"{package} is not installed"):
            check_tools(Experiment(model="m", engine=engine))  # type: ignore[arg-type]


def test_ranks_in_processes_of_their_own_are_not_left_out_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "find_spec", lambda _: object())
    with pytest.raises(InputError, match=r"torch\.profiler records this process alone") as refused:
        check_tools(Experiment(model="m", engine="vllm", mode="torch", tensor_parallel_size=2))
    assert refused.value.hint == "take --mode nsys, which follows them"


needs_transformers = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("transformers") is None, reason="torch or transformers is not installed"
)


@needs_transformers
@pytest.mark.slow
def test_a_real_model_runs_under_the_torch_profiler(tmp_path: Path) -> None:
    """A model made on the spot, on the CPU: what it records agrees with what its profile shows."""
    import pyarrow.parquet as pq

    from windtunnel.formats.captures.step_operators import captured_steps

    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    options = TorchOptions(num_steps=3)
    wanted = Experiment(
        model=str(tmp_path / "tiny"),
        mode="torch",
        prompt_tokens=16,
        max_tokens=5,
        batch_size=2,
        device="cpu",
        torch_options=options,
    )
    done = run_experiment(wanted, tmp_path / "results")
    steps = pq.read_table(done.folder / "steps.parquet").to_pydict()
    assert (steps["prefill_tokens"], steps["decode_tokens"]) == ([32, 0, 0, 0, 0], [0, 2, 2, 2, 2])
    assert steps["context_tokens"] == [0, 34, 36, 38, 40]
    requests = pq.read_table(done.folder / "requests.parquet").to_pydict()
    assert requests["output_tokens"] == [5, 5]
    assert requests["finish_s"][0] == pytest.approx(steps["start_s"][-1] + steps["duration_s"][-1])
    assert requests["ttft_s"][0] == pytest.approx(steps["duration_s"][0])
    capture = read_capture(done.folder / "torch_trace.json.gz")
    found = captured_steps(capture)
    assert [step.batch.num_tokens for step in found] == [32, 2, 2]
    # Two layers of seven products, and the head.
    gemms = capture.kernels.where(capture.kernels["kernel_class"] == 0)
    assert len(gemms) == 3 * (2 * 7 + 1)
    answers = (done.folder / "generated_output.txt").read_text()
    assert answers.count("--- request") == 2
    text = write_experiment_page(done.folder).read_text()
    assert (text.count('<table class="bars">'), text.count('<div class="chart">')) >= (2, 1)


def test_a_model_that_is_not_there_is_said_in_one_sentence(tmp_path: Path) -> None:
    wanted = Experiment(model=str(tmp_path / "none"), device="cpu")
    with pytest.raises(InputError, match="there is no model") as caught:
        run_experiment(wanted, tmp_path / "results")
    assert "config.json" in str(caught.value.hint)
