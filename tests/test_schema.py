import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import windtunnel
from windtunnel.errors import InputError
from windtunnel.hardware import Device, Link, Node
from windtunnel.schema import Positive, Schema, check_between, decode, differences, encode, flattened, read_yaml
from windtunnel.serving.deployment import Deployment
from windtunnel.serving.scenario import Scenario

LINK = {"name": "nvlink", "bytes_per_s": "450GB/s", "latency_s": "1us"}


def raw_scenario(**changes: object) -> dict[str, object]:
    workload = {"arrivals": {"type": "poisson", "rate_per_s": 1.0}, "input_tokens": 8, "output_tokens": 8}
    return {"model": "m", "deployment": {"device": "h100_sxm"}, "workload": workload | {"num_requests": 5}, **changes}


def message(raw: object, schema: type, source: str = "") -> tuple[str, str | None]:
    with pytest.raises(InputError) as caught:
        decode(raw, schema, source)
    return caught.value.message, caught.value.hint


def test_units_are_converted_once() -> None:
    assert decode(LINK, Link) == Link(name="nvlink", bytes_per_s=450e9, latency_s=1e-6)
    assert decode(encode(decode(LINK, Link)), Link) == decode(LINK, Link)


def test_units_reach_the_entries_of_a_table() -> None:
    class Rates(Schema):
        peak_flops_per_s: dict[str, float]
        sources: dict[str, str] = {}

    rates = decode({"peak_flops_per_s": {"bf16": "989TFLOPS"}, "sources": {"latency_s": "5us, a guess"}}, Rates)
    assert rates.peak_flops_per_s == {"bf16": 989e12}
    assert rates.sources["latency_s"] == "5us, a guess"


def test_an_unknown_key_names_its_path_and_its_neighbour() -> None:
    raw = raw_scenario(deployment={"device": "h100_sxm", "engine": {"max_num_seq": 3}})
    assert message(raw, Scenario, "s.yaml") == (
        "s.yaml: unknown key $.deployment.engine.max_num_seq",
        "did you mean max_num_seqs or max_waiting_steps?",
    )


def test_an_unknown_key_is_named_before_a_wrong_unit_below_it() -> None:
    assert message({"traceEvents": [{"s": "g"}]}, Scenario)[0] == "unknown key $.traceEvents"


def test_an_unknown_key_of_an_alternative_is_not_offered_again() -> None:
    """`concurrency` is a field of another alternative; to suggest it for this one would be a circle."""
    raw = raw_scenario()
    raw["workload"]["arrivals"]["concurrency"] = 3  # type: ignore[index]
    assert message(raw, Scenario) == ("unknown key $.workload.arrivals.concurrency", "known here: rate_per_s")


def test_an_unknown_key_inside_a_list() -> None:
    class Links(Schema):
        links: tuple[Link, ...]

    found, hint = message({"links": [LINK, LINK | {"latencies": 1}]}, Links)
    assert found == "unknown key $.links[1].latencies"
    assert hint == "did you mean latency_s?"


def test_an_unknown_tag_and_an_unknown_enum_value() -> None:
    raw = raw_scenario(precision={"weights": "fp7"})
    assert message(raw, Scenario)[0] == "$.precision.weights is 'fp7', which is not known"
    raw = raw_scenario()
    raw["workload"]["arrivals"] = {"type": "poison", "rate_per_s": 1}  # type: ignore[index]
    assert message(raw, Scenario)[1] == "did you mean poisson?"
    raw["workload"]["arrivals"] = {"rate_per_s": 1}  # type: ignore[index]
    found, hint = message(raw, Scenario)
    assert found == "$.workload.arrivals.type is missing"
    assert hint is not None
    assert "closed_loop" in hint


def test_words_that_a_field_chooses_from_are_taken_in_any_case() -> None:
    deployment: dict[str, Any] = {"device": "h100_sxm", "router": "Round_Robin", "replicas": 2}
    raw = raw_scenario(precision={"weights": "FP8", "kv_cache": "Fp8"}, deployment=deployment)
    raw["workload"]["arrivals"] = {"type": "Poisson", "rate_per_s": 1}  # type: ignore[index]
    lower = json.loads(json.dumps(raw).replace("Round_Robin", "round_robin").replace("Poisson", "poisson").lower())
    assert decode(raw, Scenario) == decode(lower, Scenario)
    assert raw["precision"]["weights"] == "FP8"  # type: ignore[index]
    assert message({**raw, "deployment": {**deployment, "router": "Robin"}}, Scenario)[0].endswith("which is not known")


def test_a_number_that_is_no_choice_names_the_choices() -> None:
    class Stage(Schema):
        zero: Literal[0, 1, 3] | None = None

    assert message({"zero": 2}, Stage)[0] == "$.zero is 2; one of 0, 1, 3 is needed"


def test_a_missing_field() -> None:
    assert message({}, Deployment)[0] == "$.device is missing"


def test_all_missing_fields_are_said_at_once() -> None:
    node = {"name": "mine", "title": "Mine", "num_devices": 2, "scale_up": {"name": "nvlink"}}
    assert message(node, Node)[0] == "$.scale_up.bytes_per_s, $.scale_up.latency_s are missing"
    link = {"name": "nvlink", "bytes_per_s": 1e9, "latency_s": 0.0}
    assert message({"title": "Mine", "scale_up": link}, Node)[0] == "$.name, $.device, $.num_devices are missing"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_with_its_path(value: float) -> None:
    assert message(LINK | {"latency_s": value}, Link)[0].startswith("$.latency_s is")

    class Some(Schema):
        values_s: tuple[float, ...]

    assert message({"values_s": [1.0, value]}, Some)[0].startswith("$.values_s[1] is")


def test_a_wrong_unit_names_the_allowed_ones() -> None:
    assert message(LINK | {"latency_s": "4GB"}, Link)[0] == (
        "$.latency_s: '4GB' has the unit 'GB'; allowed: ns, us, ms, s, min, h, d"
    )


def test_a_wrong_type_is_one_sentence() -> None:
    assert message(LINK | {"name": 0.24}, Link) == ("$.name is 0.24; text is needed", "put it in quotes")
    assert message(raw_scenario(seed=1.5), Scenario)[0] == "$.seed is 1.5; a whole number is needed"
    assert message([], Link)[0] == "$ is a list; a table of keys and values is needed"


def test_a_word_for_a_table_names_what_the_table_may_hold() -> None:
    raw = raw_scenario(deployment={"device": "h100_sxm", "parallelism": 4})
    found, hint = message(raw, Scenario)
    assert found == "$.deployment.parallelism is 4; a table of keys and values is needed"
    assert hint == "its keys: tp, pp, ep, attention_dp, dcp, ffn"
    raw = raw_scenario()
    raw["workload"]["arrivals"] = "poisson"  # type: ignore[index]
    found, hint = message(raw, Scenario)
    assert found == "$.workload.arrivals is 'poisson'; a table of keys and values is needed"
    assert hint == "its types: poisson, gamma, static, burst, closed_loop, curve, recorded"


class Tank(Schema):
    depth_m: Positive
    lid: Annotated[float, partial(check_between, 0, 1)] | Link | None = None


class Basin(Tank):
    name: str = ""

    def check(self) -> None:
        if self.name == "sea":
            raise ValueError("name is 'sea', which is no basin")


@pytest.mark.parametrize("schema", [Tank, Basin])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"depth_m": 0}, "depth_m is 0; more than 0 is needed"),
        ({"depth_m": 1, "lid": 2.5}, "lid is 2.5; from 0 to 1 is needed"),
    ],
)
def test_a_number_outside_the_range_of_its_field_is_refused(
    schema: type[Tank], raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        decode(raw, schema)
    with pytest.raises(ValueError, match=message):
        schema(**raw)


def test_a_range_is_only_of_numbers() -> None:
    """A field that may also hold something else, or nothing, takes that as it is."""
    link = Link(name="rope", bytes_per_s=1.0, latency_s=0.0)
    assert decode({"depth_m": 1, "lid": encode(link)}, Tank).lid == link
    assert Tank(depth_m=1).lid is None


def test_nouns_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        decode(LINK, Link).latency_s = 2.0  # type: ignore[misc]


def test_yaml_with_a_mistake_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: 1\nb: [1, 2\nc: 3\n")
    with pytest.raises(InputError, match=r"broken.yaml is not valid YAML at line 3"):
        read_yaml(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="broken"):
        read_yaml(path)
    with pytest.raises(InputError, match="there is no file") as caught:
        read_yaml(tmp_path / "brokn.yaml")
    assert caught.value.hint == "did you mean broken.yaml?"


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2.5E+2", 250.0), ("-1e3", -1e3), (".5e1", 5.0)])
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    """YAML 1.1 takes `1e-3` for a text, which nobody means."""
    path = tmp_path / "x.yaml"
    path.write_text(f"cv: {text}\n")
    assert read_yaml(path) == {"cv": value}


def test_words_with_an_e_stay_words(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1e\nb: e5\nc: 1e5x\nd: 1.0e+3\ne: 12\n")
    assert read_yaml(path) == {"a": "1e", "b": "e5", "c": "1e5x", "d": 1000.0, "e": 12}


def test_a_device_file_in_human_units() -> None:
    device = decode(
        {
            "name": "x",
            "title": "X",
            "vendor": "v",
            "architecture": "a",
            "memory_bytes": "80GiB",
            "memory_bytes_per_s": "3.35TB/s",
            "peak_flops_per_s": {"bf16": "989TFLOPS"},
        },
        Device,
    )
    assert (device.memory_bytes, device.memory_bytes_per_s) == (80 * 2**30, 3.35e12)


def test_differences_are_of_every_depth() -> None:
    one = {"a": {"b": 1, "c": [1, 2]}, "pools": [{"n": 1}, {"n": 2}]}
    other = {"a": {"b": 1, "c": [1, 3]}, "pools": [{"n": 1}]}
    assert differences([one, other]) == {"a.c": [[1, 2], [1, 3]], "pools.1.n": [2, None]}
    assert flattened({}) == {"": {}}


def test_checks_of_a_schema_keep_the_ranges_of_its_fields() -> None:
    """A `__post_init__` or a `check` that hides its parent's would take a share of 2, or a price below zero."""

    def below(schema: type[Schema]) -> Iterator[type[Schema]]:
        for child in schema.__subclasses__():
            yield child
            yield from below(child)

    for module in pkgutil.walk_packages(windtunnel.__path__, "windtunnel."):
        if not module.name.startswith("windtunnel.lab"):  # needs torch
            importlib.import_module(module.name)
    every = set(below(Schema))
    assert len([schema for schema in every if "check" in vars(schema)]) > 40
    for name in ("__post_init__", "check"):
        hiding = {schema for schema in every if name in vars(schema)}
        if name == "check":  # that of `Schema` itself does nothing
            hiding = {schema for schema in hiding if any("check" in vars(parent) for parent in schema.__mro__[1:-4])}
        lacking = [each for each in hiding if f"super().{name}()" not in inspect.getsource(getattr(each, name))]
        assert lacking == []


@pytest.mark.parametrize(
    "key", ["deployment.power.idle_fraction", "workload.duration_s", "deployment.power.carbon_g_per_kwh"]
)
def test_a_number_below_its_range_is_refused_in_every_table(key: str) -> None:
    first, _, rest = key.partition(".")
    second, _, last = rest.rpartition(".")
    table = {last: -1}
    raw = {"model": "qwen3-8b", first: {second: table} if second else table}
    with pytest.raises(InputError, match=f"{last} is -1"):
        decode(raw, Scenario)


def test_a_key_that_belongs_elsewhere_is_sent_there() -> None:
    found, hint = message(raw_scenario(device="h100_sxm"), Scenario)
    assert (found, hint) == ("unknown key $.device", "it is $.deployment.device")
    raw = raw_scenario()
    raw["workload"]["seed"] = 3  # type: ignore[index]
    assert message(raw, Scenario) == ("unknown key $.workload.seed", "it is $.seed")


def test_token_counts_of_files_take_the_suffixes_of_options() -> None:
    shared = {"type": "poisson", "rate_per_s": 1.0}
    workload = {"arrivals": shared, "num_requests": 1, "input_tokens": "2k", "output_tokens": 8}
    workload |= {"shared_prompts": {"tokens": "25k"}}
    found = decode({"model": "m", "deployment": {"device": "d"}, "workload": workload}, Scenario).workload
    assert (found.input_tokens, found.shared_prompts and found.shared_prompts.tokens) == (2000, 25_000)
