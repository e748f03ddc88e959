"""The shipped catalog: everything in it loads, is found by the names that people use, and is plausible."""

import csv
import json
import re
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import msgspec
import pytest

import windtunnel as wt
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.config import model_from_config
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format, Precision
from windtunnel.model.sampling import Sampling
from windtunnel.schema import read_yaml

CATALOG = catalog.search_path()[-1]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An extra catalog folder."""
    monkeypatch.setenv(catalog.SEARCH_PATH_VARIABLE, str(tmp_path))
    return tmp_path


class TestModels:
    @pytest.mark.parametrize("name", catalog.names("models"))
    def test_every_model_loads_under_its_name(self, name: str) -> None:
        model = catalog.model(name)
        assert model.name == name
        assert model.num_layers == sum(group.num_layers for group in model.layers) > 0

    def test_there_are_many(self) -> None:
        assert len(list((CATALOG / "models").glob("*.json"))) >= 36

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
            ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
            ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
            ("Meta-Llama-3.1-70B", "meta-llama/Llama-3.1-70B"),
            ("deepseek-r1-0528-fp4-v2", "nvidia/DeepSeek-R1-0528-NVFP4-v2"),
        ],
    )
    def test_names_that_people_use(self, name: str, found: str) -> None:
        assert catalog.model(name).name == found

    def test_a_variant_has_its_bases_shape_and_its_own_formats(self) -> None:
        base, variant = catalog.model("meta-llama/Llama-3.1-70B"), catalog.model("nvidia/Llama-3.3-70B-Instruct-FP8")
        assert variant.layers == base.layers
        assert variant.precision == Precision(weights=Format.FP8, kv_cache=Format.FP8)

    @pytest.mark.parametrize(
        ("name", "model", "formats"),
        [
            ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "meta-llama/Llama-3.3-70B-Instruct", "fp8 fp8 bf16"),
            (
                "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16",
                "meta-llama/Llama-3.1-70B-Instruct",
                "int4 int4 bf16",
            ),
            ("Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen/Qwen2.5-72B-Instruct", "int4 int4 bf16"),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen/Qwen3-30B-A3B-Instruct-2507", "fp8_block fp8_block bf16"),
            ("nvidia/GLM-4.7-NVFP4", "zai-org/GLM-4.7", "bf16 nvfp4 fp8"),
            ("nvidia/Qwen3-14B-NVFP4", "Qwen/Qwen3-14B", "nvfp4 nvfp4 fp8"),
        ],
    )
    def test_a_checkpoint_may_be_known_by_its_name(self, name: str, model: str, formats: str) -> None:
        found, whole = catalog.model(name), catalog.model(model)
        assert (found.name, found.named_after) == (name, model)
        assert (found.layers, found.max_context_tokens) == (whole.layers, whole.max_context_tokens)
        precision = found.precision
        assert f"{precision.weights} {precision.experts_format} {precision.kv_cache}" == formats
        assert whole.named_after == ""

    @pytest.mark.parametrize(
        ("name", "tokens"),
        [
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", 262144),
            ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", 262144),
            ("Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8", 262144),
            ("Qwen/Qwen3-235B-A22B-FP8", 40960),
            ("Qwen/Qwen2-72B-Instruct", 32768),
        ],
    )
    def test_a_checkpoint_has_its_own_context(self, name: str, tokens: int) -> None:
        assert catalog.model(name).max_context_tokens == tokens

    @pytest.mark.parametrize("name", ["nvidia/Foo-FP8", "unsloth/Llama-3.3-70B-Instruct-bnb-4bit", "a/Qwen3-8B-mine"])
    def test_a_name_that_says_no_model_or_no_format_is_refused(self, name: str) -> None:
        with pytest.raises(InputError, match="there is no model"):
            catalog.model(name)

    @pytest.mark.parametrize(
        ("name", "formats"),
        [
            ("nvidia/Qwen3-30B-A3B-FP4", "nvfp4 nvfp4 fp8"),
            ("nvidia/Llama-4-Maverick-17B-128E-Instruct-NVFP4", "nvfp4 nvfp4 fp8"),
            ("nvidia/Qwen3.5-397B-A17B-NVFP4", "bf16 nvfp4 fp8"),
            ("nvidia/Qwen3.5-397B-A17B-NVFP4-V2", "fp8 nvfp4 fp8"),
        ],
    )
    def test_nvidias_mixtures_differ_in_the_format_beside_their_experts(self, name: str, formats: str) -> None:
        found = catalog.model(name)
        precision = found.precision
        assert f"{precision.weights} {precision.experts_format} {precision.kv_cache}" == formats
        assert found.named_after == ""

    def test_names_say_the_formats_of_known_checkpoints(self) -> None:
        """Of checkpoints that the catalog has, their names alone say the format of the routed experts, or of all."""
        entries = catalog._models()
        said = []
        for name, known in entries.items():
            if isinstance(known, catalog.Variant) and known.precision is not None:
                others = {key: value for key, value in entries.items() if name not in (key, value)}
                if (by_name := catalog._named_after(name, others)) is not None:
                    assert by_name.precision is not None
                    said.append(by_name.precision.experts_format == known.precision.experts_format)
        assert len(said) > 60
        assert sum(said) > 0.85 * len(said)

    def test_every_model_of_the_published_runs_is_known(self, reference: Path) -> None:
        with (reference / "silicon" / "dev.csv").open() as file:
            names = {row["model_path"] for row in csv.DictReader(file)}
        with (reference / "silicon" / "engine_settings.csv").open() as file:
            for row in csv.DictReader(file):
                names |= {name for name in (*row["model_path"].split("|"), row["hf_model"]) if name}
        for name in names:
            catalog.model(name)

    @pytest.mark.full
    def test_variants_have_the_formats_of_the_published_checkpoints(self) -> None:
        """Wherever aiconfigurator-core ships the same checkpoint's config, shape and formats agree with ours."""
        package = find_spec("aiconfigurator_core")
        if package is None or not package.submodule_search_locations:
            pytest.skip("aiconfigurator-core is not installed")
        folder = Path(package.submodule_search_locations[0]) / "model_configs"
        compared = 0
        known = {name.lower(): name for name in catalog.names("models")}
        for path in folder.glob("*_config.json"):
            name = path.name.removesuffix("_config.json").replace("--", "/")
            if "hf_quant" in path.name or name.lower() not in known:
                continue
            quantisation = path.with_name(path.name.replace("_config.json", "_hf_quant_config.json"))
            quant_config = json.loads(quantisation.read_text()) if quantisation.exists() else None
            theirs = model_from_config(json.loads(path.read_text()), known[name.lower()], quant_config)
            ours = msgspec.structs.replace(catalog.model(name), generation=None)
            # Kimi-K2 is computed by DeepSeek-V3's code, and a quantised checkpoint of it says so; some checkpoints of
            # DeepSeek-V4 call its code by another name.
            if (ours.architecture, theirs.architecture) in (
                ("kimi_k2", "deepseek_v3"),
                ("deepseek_v4", "deepseek_ref"),
                ("minimax_m3", "minimax_m3_vl"),
            ):
                ours = msgspec.structs.replace(ours, architecture=theirs.architecture)
            if not ours.left_out:  # the text model's config.json names no tower
                theirs = msgspec.structs.replace(theirs, left_out=(), tower_parameters=0, vision=None)
            if ours.architecture == "step3p7":  # their file leaves out the heads of layers with a window
                ours = msgspec.structs.replace(theirs, precision=ours.precision)
            assert ours == theirs
            compared += 1
        assert compared >= 25

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("meta-llama/Llama-3.3-70B-Instruct", "temperature 0.6, top-p 0.9"),
            ("Qwen/Qwen3-30B-A3B-Thinking-2507", "temperature 0.6, top-p 0.95, top-k 20"),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", "temperature 0.7, top-p 0.8, top-k 20"),
            ("google/gemma-3-27b-it", "temperature 1, top-p 0.95, top-k 64"),
            ("openai/gpt-oss-120b", "temperature 1"),
        ],
    )
    def test_a_model_has_its_own_generation_config_or_its_base_s(self, name: str, text: str) -> None:
        generation = catalog.model(name).generation
        assert generation is not None
        assert generation.text == text

    def test_every_generation_config_is_a_model_s(self) -> None:
        published = read_yaml(CATALOG / "models" / "generation.yaml")
        assert set(published) <= set(catalog.names("models"))

    def test_a_generation_config_beside_a_config(self, tmp_path: Path) -> None:
        source = (CATALOG / "models" / "Qwen--Qwen3-8B.json").read_text()
        write(tmp_path / "mine" / "config.json", source)
        write(tmp_path / "mine" / "generation_config.json", '{"do_sample": true, "top_k": 7, "eos_token_id": 1}')
        assert catalog.model(str(tmp_path / "mine")).generation == Sampling(temperature=1.0, top_k=7)

    def test_near_names_are_suggested(self) -> None:
        with pytest.raises(InputError) as raised:
            catalog.model("meta-lama/Llama-3.1-8")
        assert "meta-llama/Llama-3.1-8B" in str(raised.value.hint)

    def test_a_name_that_two_organisations_use_is_ambiguous(self, own: Path) -> None:
        source = (CATALOG / "models" / "Qwen--Qwen3-8B.json").read_text()
        write(own / "models" / "other--Qwen3-8B.json", source)
        with pytest.raises(InputError, match="may be Qwen/Qwen3-8B or other/Qwen3-8B"):
            catalog.model("Qwen3-8B")

    def test_a_folder_with_a_config(self, tmp_path: Path) -> None:
        source = (CATALOG / "models" / "Qwen--Qwen3-8B.json").read_text()
        write(tmp_path / "mine" / "config.json", source)
        write(tmp_path / "mine" / "hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}')
        for path in (tmp_path / "mine", tmp_path / "mine" / "config.json"):
            model = catalog.model(str(path))
            assert (model.name, model.precision.weights) == ("mine", Format.FP8)

    def test_an_unknown_type_names_the_model_with_the_most_alike_keys(self, tmp_path: Path) -> None:
        keys = catalog.model_config("Qwen/Qwen3-30B-A3B") | {"model_type": "nova_moe", "nova_bias": True}
        (tmp_path / "config.json").write_text(json.dumps(keys))
        with pytest.raises(InputError, match="model_type 'nova_moe' is not known") as raised:
            catalog.model(str(tmp_path))
        assert re.match(r"its keys are most like those of Qwen/Qwen3-\d+B-A\d+B; ", str(raised.value.hint))
        assert f"windtunnel catalog add {tmp_path} --like qwen3_moe" in str(raised.value.hint)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "nova_vl", "text_config": keys, "seen": True}))
        with pytest.raises(InputError) as raised:
            catalog.model(str(tmp_path))
        assert f"windtunnel catalog add {tmp_path} --like qwen3_moe" in str(raised.value.hint)
        (tmp_path / "config.json").write_text('{"model_type": "nova_moe", "width": 4096}')
        with pytest.raises(InputError) as raised:
            catalog.model(str(tmp_path))
        assert "most like" not in str(raised.value.hint)

    def test_broken_files(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="there is no file"):
            catalog.model(str(tmp_path / "config.json"))
        with pytest.raises(InputError, match="is not valid JSON"):
            catalog.model(str(write(tmp_path / "config.json", "{")))

    def test_an_own_catalog_comes_first(self, own: Path) -> None:
        config = json.loads((CATALOG / "models" / "Qwen--Qwen3-8B.json").read_text())
        write(own / "models" / "Qwen--Qwen3-8B.json", json.dumps(config | {"num_hidden_layers": 2}))
        write(own / "models" / "aliases.yaml", "small: Qwen/Qwen3-8B\n")
        assert catalog.model("Qwen/Qwen3-8B").num_layers == 2
        assert catalog.model("small").num_layers == 2
        assert catalog.model("Qwen/Qwen3-14B").num_layers == 40

    def test_a_hint_on_an_unknown_type_does_not_lead_to_another_unknown_one(self, tmp_path: Path) -> None:
        """As of Step3, whose outer keys are like those of Kimi-VL: its language model is what is read."""
        config = catalog.model_config("moonshotai/Kimi-VL-A3B-Instruct")
        for model_type in ("step3_text", "kimi_vl"):
            config["text_config"]["model_type"] = model_type
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(InputError) as raised:
                catalog.model(str(tmp_path))
            named = re.search(r"--like (\w+)$", str(raised.value.hint))
            assert named is not None
        (tmp_path / "config.json").write_text(json.dumps(config | {"windtunnel_like": named[1]}))
        assert catalog.model(str(tmp_path)).num_layers == 27

    @pytest.mark.parametrize(
        ("aliases", "message"),
        [
            ("a: b\nb: a\n", "leads to"),
            ("a: nothing\n", "leads to 'nothing'"),
            ("a: {base: nothing}\n", "has the base 'nothing'"),
            ("a: {base: Qwen/Qwen3-8B, precision: {weights: fp9}}\n", "fp9"),
            ("a: {bse: Qwen/Qwen3-8B}\n", "bse|base"),
        ],
    )
    def test_wrong_aliases(self, own: Path, aliases: str, message: str) -> None:
        write(own / "models" / "aliases.yaml", aliases)
        with pytest.raises(InputError, match=message):
            catalog.model("a")

    def test_without_leave_nothing_is_downloaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("urllib.request.urlopen", lambda *_args, **_keywords: pytest.fail("name the hub"))
        with pytest.raises(InputError, match="there is no model"):
            catalog.model("somebody/something")

    def test_a_failed_download_is_one_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_args: object, **_keywords: object) -> None:
            raise OSError("no route to host")

        monkeypatch.setattr("urllib.request.urlopen", refuse)
        with pytest.raises(InputError, match=r"cannot be fetched .*: no route to host"):
            catalog.model("somebody/something", allow_download=True)

    def test_a_file_of_modelopt_is_asked_for_only_where_the_config_says_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published = catalog.model_config("llama-2-7b-hf")
        fetched = [published | {"compression_config": {"quant_method": "fp8"}}]
        monkeypatch.setattr(catalog, "_fetch_json", lambda *_args: fetched.pop())
        assert catalog.model("somebody/something", allow_download=True).precision.weights == "fp8"


class TestDevices:
    @pytest.mark.parametrize("name", catalog.names("devices"))
    def test_every_device_is_plausible_and_says_where_its_values_come_from(self, name: str) -> None:
        device = catalog.device(name)
        assert device.name == name
        assert 10e9 < device.memory_bytes < 400e9
        assert 0.2e12 < device.memory_bytes_per_s < 10e12
        assert set(device.peak_flops_per_s) <= {"bf16", "fp8", "fp4", "int8", "fp32"}
        assert 10e12 < device.peak_flops_per_s["bf16"] < 3e15
        stated = {key for key, value in msgspec.to_builtins(device).items() if value is not None}
        assert stated - {"name", "title", "vendor", "architecture", "measured_as", "sources"} == set(device.sources)

    def test_rates_have_a_least_value_and_counts_have_none_whatever_the_file_is_called(self, tmp_path: Path) -> None:
        shipped = msgspec.to_builtins(catalog.device("h100_sxm"))
        path = tmp_path / "bytes_per_s.yaml"
        path.write_text(json.dumps(shipped))
        assert catalog.device(str(path)).num_sms == 132
        path.write_text(json.dumps(shipped | {"peak_flops_per_s": {"bf16": 999.0}}))
        with pytest.raises(InputError, match=r"peak_flops_per_s\.bf16 is 999\.0; at least 1e\+06 a second is needed"):
            catalog.device(str(path))

    def test_there_are_many(self) -> None:
        assert len(catalog.names("devices")) >= 28

    def test_h100(self) -> None:
        device = catalog.device("h100_sxm")
        assert device.memory_bytes_per_s == 3.35e12
        assert device.peak_flops_per_s["fp8"] == 1979e12
        assert (device.num_sms, device.tdp_w, device.scale_up_bytes_per_s) == (132, 700, 450e9)

    @pytest.mark.parametrize("name", ["a100_sxm", "a40", "h100_sxm", "h100_pcie", "l4", "a10", "a30"])
    def test_peaks_follow_from_units_and_clock(self, name: str) -> None:
        """SMs x FLOP per clock and SM of the tensor cores (NVIDIA's whitepapers) x clock."""
        device = catalog.device(name)
        per_clock = {"hopper": 4096, "ampere": 2048, "ada": 1024}[device.architecture]
        if name in ("a40", "a10"):
            per_clock = 1024  # GA102 has half of GA100's tensor cores in an SM
        assert device.num_sms
        assert device.clock_per_s
        expected = device.num_sms * per_clock * device.clock_per_s
        assert device.peak_flops_per_s["bf16"] == pytest.approx(expected, rel=0.01)

    def test_every_measured_system_is_a_device(self) -> None:
        """Names under which aiconfigurator-core 0.12 has measured tables."""
        measured = {catalog.device(name).measured_as for name in catalog.names("devices")}
        assert measured - {None} == {
            "a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200", "gb300", "l40s", "b60",
            "rtx_pro_6000_server",
        }  # fmt: skip

    @pytest.mark.parametrize("name", ["H100-SXM", "h100 sxm", "H100_SXM"])
    def test_case_and_dashes_do_not_matter(self, name: str) -> None:
        assert catalog.device(name).name == "h100_sxm"

    def test_near_names_are_suggested(self) -> None:
        with pytest.raises(InputError, match="there is no device 'h100_smx'") as raised:
            catalog.device("h100_smx")
        assert "h100_sxm" in str(raised.value.hint)
        with pytest.raises(InputError, match="there is no device 'Mac Studio'") as raised:
            catalog.device("Mac Studio")
        assert str(raised.value.hint).endswith("or give a YAML file that describes yours")

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("memory_bytes: 0GiB", r"memory_bytes is 0"),
            ("memory_bytes: 80 parsecs", "parsecs"),
            ("memory_bytes_per_s: -1GB/s", "memory_bytes_per_s is -1"),
            ("memory_bytes_per_s: 2500", r"memory_bytes_per_s is 2500.0; .*\n?.*rates have units: 3.3TB/s"),
            ("memory_bytes: 80", r"memory_bytes is 80; .*\n?.*sizes have units: 80GiB"),
            ("peak_flops_per_s: {bf16: 0TFLOPS}", "bf16 is 0"),
            ("peak_flops_per_s: {}", "peak_flops_per_s is empty"),
            ("memory_bites: 80GiB", "memory_bites"),
            ("sources: [1]", "sources"),
        ],
    )
    def test_wrong_files_are_refused(self, tmp_path: Path, line: str, message: str) -> None:
        key = line.partition(":")[0]
        good = (
            (CATALOG / "devices" / "t4.yaml")
            .read_text()
            .replace("peak_flops_per_s:\n", "peak_flops_per_s: {bf16: 65TFLOPS}\n")
        )
        lines = [row for row in good.partition("sources:")[0].splitlines() if not row.startswith((f"{key}:", "  "))]
        path = write(tmp_path / "mine.yaml", "\n".join([*lines, line]) + "\n")
        with pytest.raises(InputError, match=message):
            catalog.device(str(path))

    def test_an_own_device_and_its_default_node(self, own: Path) -> None:
        text = (CATALOG / "devices" / "t4.yaml").read_text().replace("name: t4", "name: t5")
        write(own / "devices" / "t5.yaml", text)
        device = catalog.device("t5")
        assert catalog.default_node(device).device == "t5"
        write(own / "nodes" / "defaults.yaml", "t5: dgx_h100\n")
        assert catalog.default_node(device).name == "dgx_h100"

    def test_an_own_device_with_a_rate_of_its_links_is_behind_a_switch(self, own: Path) -> None:
        text = (CATALOG / "devices" / "t4.yaml").read_text().replace("name: t4", "name: t5")
        write(own / "devices" / "t5.yaml", text.replace("sources:", "scale_up_bytes_per_s: 300GB/s\nsources:"))
        node = catalog.default_node(catalog.device("t5"))
        assert (node.device, node.num_devices, node.scale_up.bytes_per_s) == ("t5", 8, 300e9)
        assert node.scale_out == catalog.node("pcie").scale_out
        scenario = wt.scenario(model="qwen3-0.6b", device="t5", concurrency=1, input_tokens=8, output_tokens=2)
        resolved = wt.simulate(scenario).scenario
        assert wt.resolve(resolved).node == node

    def test_a_card_with_a_bridge_is_on_pcie(self) -> None:
        """NVLink joins two A30 alone."""
        assert catalog.default_node(catalog.device("a30")).scale_up == catalog.node("pcie").scale_up


class TestNodes:
    @pytest.mark.parametrize("name", catalog.names("nodes"))
    def test_every_node_holds_a_known_device(self, name: str) -> None:
        node = catalog.node(name)
        assert node.name == name
        assert node.device in ("any", *catalog.names("devices"))
        assert {"scale_up", "latency_s"} <= set(node.sources)
        assert node.scale_up.bytes_per_s >= 1e9

    @pytest.mark.parametrize("name", catalog.names("devices"))
    def test_every_device_has_a_default_node(self, name: str) -> None:
        device = catalog.device(name)
        assert catalog.default_node(device).device == name

    def test_scale_up_agrees_with_the_device(self) -> None:
        for name in ("dgx_a100", "dgx_h100", "hgx_h200", "hgx_b200", "gb200_nvl72", "a40_pairwise_nvlink", "mi300x"):
            node = catalog.node(name)
            assert node.scale_up.bytes_per_s == catalog.device(node.device).scale_up_bytes_per_s

    def test_pairs_and_domains(self) -> None:
        assert catalog.node("a100_pairwise_nvlink").scale_up_group_size == 2
        assert catalog.node("gb200_nvl72").num_devices == 72


def test_names_are_sorted_and_of_a_known_kind() -> None:
    names = catalog.names("devices")
    assert names == sorted(names)
    with pytest.raises(InputError) as raised:
        catalog.names("device")
    assert raised.value.hint == "did you mean devices?"


def test_a_wrong_search_path_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(catalog.SEARCH_PATH_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"WINDTUNNEL_CATALOG names .*nowhere, which is not a folder"):
        catalog.names("devices")


def test_one_item_costs_milliseconds() -> None:
    """Finding an item reads no other one: the best of five takes a small part of what reading all does."""

    def seconds(load: object) -> float:
        assert callable(load)
        best = float("inf")
        for _ in range(5):
            start = perf_counter()
            load()
            best = min(best, perf_counter() - start)
        return best

    one = seconds(lambda: catalog.device("h100_sxm"))
    everything = seconds(lambda: [catalog.device(name) for name in catalog.names("devices")])
    assert one < everything / 5


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt3-175b", 175e9), ("nemotron-4-15b", 15.6e9), ("nemotron-4-340b", 341e9)]
)
def test_models_that_only_papers_describe_have_their_size(name: str, parameters: float) -> None:
    assert count_parameters(catalog.model(name)).total == pytest.approx(parameters, rel=0.01)


def test_weights_on_another_machine_are_to_be_named() -> None:
    with pytest.raises(InputError, match="there is no file /data/weights") as caught:
        catalog.model("/data/weights")
    assert "--model NAME" in str(caught.value.hint)


def test_an_unknown_model_may_be_given_by_its_config() -> None:
    with pytest.raises(InputError, match="there is no model") as caught:
        catalog.model("TheBloke/Llama-2-13B-chat-AWQ")
    assert "did you mean meta-llama/Llama-2-13b-chat-hf" in str(caught.value.hint)
    assert "give the path of its config.json" in str(caught.value.hint)


def test_devices_are_found_by_the_names_that_drivers_and_kubernetes_print() -> None:
    aliases = read_yaml(CATALOG / "devices" / "aliases.yaml")
    for alias, device in aliases.items():
        assert catalog.device(alias).name == catalog.device(alias.replace(" ", "-")).name == device
    assert "aliases" not in catalog.names("devices")
