"""An installed package adds an engine: its defaults, its command line, and a shipped scheduler by name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from plugin_package import installed_plugin
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.formats.launch.scripts import kubernetes_manifests, launch_script, start_remark, write_launch_command
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Format, Precision
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.command_line import NO_COMMAND
from windtunnel.serving.engines.contract import Behaviour, Engine, behaviour_of, engine_of
from windtunnel.serving.engines.defaults import with_defaults
from windtunnel.serving.engines.launches import graph_sizes, num_launches
from windtunnel.serving.scenario import Scenario, resolve, scenario_from
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.simulate import simulate

MODULE = '''
"""A toy engine that quantises apart and forms batches as vLLM does; its graphs hold half of what they capture."""

from windtunnel.serving.engines.contract import Engine

ENGINE = Engine(most_tokens_in_pieces=lambda _shard, _engine, largest: largest / 2)
'''
BEHAVIOUR = "launches: {quantises_apart: [fp8]}"
DEFAULTS = """
title: Toy
default_version: "2.0"
versions:
  - since: "1.0"
    settings:
      scheduler: vllm_v1
      max_num_seqs: 12
      max_num_batched_tokens: 1024
      enable_chunked_prefill: true
      enable_prefix_caching: false
      scheduling_policy: fcfs
      block_size: 16
      gpu_memory_utilization: 0.8
      reserved_bytes: 1GiB
      max_cudagraph_capture_size: 64
      async_scheduling: false
      host: {step_s: 1ms}
"""
COMMAND_LINE = """
command: [toy-serve]
starts: [toy-serve, "toy-image*"]
image: "example.org/toy:{version}"
port: 9000
flags:
  model: {sets: model, type: text}
  gpus: "[tp]"
  seqs: engine.max_num_seqs
  memory: {sets: engine.gpu_memory_utilization, type: number}
other_names: {n: seqs}
"""


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[list[Path]]:
    """The files of the installed package that its author writes."""
    with installed_plugin(tmp_path, "windtunnel.engines", "toy", MODULE):
        # As a package, since an engine is a folder.
        package = tmp_path / "plugin_toy"
        package.mkdir()
        (tmp_path / "plugin_toy.py").rename(package / "__init__.py")
        (package / "defaults.yaml").write_text(DEFAULTS)
        (package / "behaviour.yaml").write_text(BEHAVIOUR)
        (package / "command_line.yaml").write_text(COMMAND_LINE)
        yield sorted(package.iterdir())
    assert "toy" not in catalog.names("engines")


def served(engine: str) -> Scenario:
    return scenario_from(
        {
            "model": "Qwen/Qwen2.5-0.5B",
            "deployment": {"device": "a40", "engine": {"name": engine}},
            "workload": {"arrivals": {"type": "burst"}, "input_tokens": 100, "output_tokens": 20, "num_requests": 40},
        }
    )


@pytest.mark.usefixtures("toy")
def test_it_is_found_and_simulated() -> None:
    assert catalog.names("engines") == ["sglang", "toy", "trtllm", "vllm"]
    result = simulate(served("toy"))
    assert len(result.requests["arrival_s"]) == 40
    assert result.steps["num_running"].max() == 12
    assert result.scenario.deployment.engine.version == "2.0"
    tpot = result.intervals["tpot"]
    assert tpot.low < result.summary.tpot_s.mean < tpot.high


def test_it_takes_four_files(toy: list[Path]) -> None:
    assert [path.name for path in toy] == ["__init__.py", "behaviour.yaml", "command_line.yaml", "defaults.yaml"]


@pytest.mark.usefixtures("toy")
def test_its_command_is_read_and_written() -> None:
    command = read_launch_command("toy-serve Qwen/Qwen2.5-0.5B --gpus 2 -n 7 --memory 0.7 --port 9")
    assert command.raw["deployment"] == {
        "parallelism": {"tp": 2},
        "engine": {"name": "toy", "max_num_seqs": 7, "gpu_memory_utilization": 0.7},
    }
    assert (command.without_effect, command.unknown) == (["--port"], [])
    raw = {**command.raw, "deployment": {**command.raw["deployment"], "device": "a40"}}
    scenario = scenario_from({**raw, "workload": msgspec.to_builtins(served("toy").workload)})
    assert "toy-serve Qwen/Qwen2.5-0.5B --gpus 2 --seqs 7 --memory 0.7\n" in launch_script(scenario, {"toy": "2.0"})
    assert "image: example.org/toy:2.0" in kubernetes_manifests(scenario, {"toy": "2.0"})


@pytest.mark.usefixtures("toy")
def test_its_launches_are_its_own() -> None:
    """A GEMM of eight bits takes a kernel more than in an engine that compiles the model."""
    setup = resolve(served("vllm"))
    shard = replace(shard_of(setup), precision=Precision(weights=Format.FP8))
    toy, vllm = (float(num_launches(shard, EngineSettings(name=name), 1.0)) for name in ("toy", "vllm"))
    assert toy >= vllm + 4 * setup.model.num_layers
    graphs = EngineSettings(name="toy", piecewise_cudagraphs=True, max_cudagraph_capture_size=64)
    inside, beyond = num_launches(shard, graphs, np.array([32, 33]))
    assert inside < beyond == toy


@pytest.mark.usefixtures("toy")
def test_it_has_the_limits_of_its_scheduler() -> None:
    """As vLLM's scheduler demands, a step has a token for every running request."""
    assert with_defaults(EngineSettings(name="toy", max_num_batched_tokens=8), catalog.device("a40")).max_num_seqs == 8


@pytest.mark.usefixtures("toy")
def test_a_server_without_an_option_starts_all_the_same() -> None:
    """What no option of it decides is named by its setting, and refused where a command would need it."""
    scenario = served("toy")
    assert start_remark(scenario, NO_COMMAND) == ""
    settings = msgspec.structs.replace(scenario.deployment.engine, num_gpu_blocks=100)
    deployment = msgspec.structs.replace(scenario.deployment, engine=settings)
    told = start_remark(msgspec.structs.replace(scenario, deployment=deployment), NO_COMMAND)
    assert told == ""
    with pytest.raises(InputError, match=r"no option of `toy-serve` that decides parallelism\.pp is known"):
        write_launch_command("m", Parallelism(pp=2), EngineSettings(name="toy"))


@pytest.mark.parametrize(
    ("limited", "problem"),
    [("replace(resolved, max_num_seqs=3)", ""), ("None", "limited of the engine 'strict' returned None, not Eng")],
)
def test_it_sets_limits_of_its_own_behind_those_of_its_scheduler(tmp_path: Path, limited: str, problem: str) -> None:
    source = "from msgspec.structs import replace\nfrom windtunnel.serving.engines.contract import Engine\n"
    source += f"ENGINE = Engine(limited=lambda given, resolved: {limited})\n"
    with installed_plugin(tmp_path, "windtunnel.engines", "strict", source):
        (tmp_path / "defaults.yaml").write_text(DEFAULTS)
        if problem:
            with pytest.raises(InputError, match=problem):
                with_defaults(EngineSettings(name="strict"), catalog.device("a40"))
        else:
            assert with_defaults(EngineSettings(name="strict"), catalog.device("a40")).max_num_seqs == 3


def test_a_scheduler_in_its_behaviour_is_refused(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.engines", "describing", MODULE):
        (tmp_path / "defaults.yaml").write_text(DEFAULTS)
        (tmp_path / "behaviour.yaml").write_text("schedulers: {mine: {title: Mine}}\n")
        with pytest.raises(InputError, match=r"behaviour\.yaml of the installed engine 'describing' describes"):
            behaviour_of("describing")


def test_a_catalog_entry_alone_has_neutral_behaviour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "mine.yaml").write_text(DEFAULTS)
    monkeypatch.setenv(catalog.SEARCH_PATH_VARIABLE, str(tmp_path))
    assert (engine_of("mine"), behaviour_of("mine")) == (Engine(), Behaviour())
    assert simulate(served("mine")).steps["num_running"].max() == 12
    with pytest.raises(InputError, match="no command of mine is known"):
        launch_script(served("mine"), {"mine": "2.0"})


def test_a_package_with_something_else_is_refused(tmp_path: Path) -> None:
    with installed_plugin(tmp_path, "windtunnel.engines", "mute", "ENGINE = 42\n"):
        (tmp_path / "defaults.yaml").write_text(DEFAULTS)
        with pytest.raises(InputError, match="ENGINE of the package of the engine 'mute' is no"):
            engine_of("mute")


def test_a_package_without_its_files_is_told_which_is_missing(tmp_path: Path) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.engines", "bare", MODULE),
        pytest.raises(InputError, match=f"the installed engine 'bare' has no defaults.yaml in {tmp_path}"),
    ):
        with_defaults(EngineSettings(name="bare"), catalog.device("a40"))


@pytest.mark.parametrize("sizes", [64, ["many"], [0, 1], None])
@pytest.mark.usefixtures("toy")
def test_sizes_of_graphs_are_numbers(sizes: object, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replace(engine_of("toy"), captured_sizes=lambda _settings: sizes)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr("windtunnel.serving.engines.launches.engine_of", lambda _name: engine)
    with pytest.raises(InputError, match=r"captured_sizes of the engine 'toy' returned ") as found:
        graph_sizes(EngineSettings(name="toy", max_cudagraph_capture_size=64))
    assert "batch sizes" in str(found.value.hint)
