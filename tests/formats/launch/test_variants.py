"""Variants of a recipe: overrides of a base, and sweeps."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command

BASE: dict[str, Any] = yaml.safe_load("""
name: chat
model: {path: Qwen/Qwen3-8B}
resources: {gpu_type: h200, gpus_per_node: 8}
engine: vllm
roles:
  agg: {nodes: 1, workers: 2, gpus: 1, args: {tensor-parallel-size: 1, max-num-seqs: 64}, extra_args: [--enforce-eager]}
benchmark: {type: sa-bench, isl: 100, osl: 10, concurrencies: [4, 8]}
""")


def read(recipe: dict[str, Any], folder: Path, variant: str = "") -> Any:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return read_launch_command(f"{file}:{variant}" if variant else str(file))


def with_args(**args: Any) -> dict[str, Any]:
    return {"roles": {"agg": {"args": {name.replace("_", "-"): value for name, value in args.items()}}}}


OVERRIDES = {
    "schema": 2,
    "base": BASE,
    "override_wide": with_args(tensor_parallel_size=2, max_num_seqs=None),
    "zip_override_seqs": with_args(max_num_seqs=[16, 32]) | {"benchmark": {"concurrencies": [[2, 3], [5]]}},
}


def test_the_second_layout_is_read(tmp_path: Path) -> None:
    reading = read({"schema": 2, **BASE}, tmp_path)
    deployment = reading.raw["deployment"]
    assert (deployment["device"], deployment["replicas"]) == ("h200_sxm", 2)
    engine = {"name": "vllm", "max_num_seqs": 64, "max_cudagraph_capture_size": 0}
    assert deployment["engine"] == engine
    assert reading.load.concurrencies == (4, 8)
    assert not reading.container[1:]  # the recipe names no image


@pytest.mark.parametrize(
    ("variant", "tp", "max_num_seqs", "concurrencies"),
    [
        ("base", 1, 64, (4, 8)),
        ("override_wide", 2, None, (4, 8)),
        ("zip_override_seqs[0]", 1, 16, (2, 3)),
        ("zip_override_seqs[1]", 1, 32, (5,)),
        ("*wide", 2, None, (4, 8)),
    ],
)
def test_a_variant_is_its_base_with_the_override(
    variant: str, tp: int, max_num_seqs: int | None, concurrencies: tuple[int, ...], tmp_path: Path
) -> None:
    reading = read(OVERRIDES, tmp_path, variant)
    deployment = reading.raw["deployment"]
    assert (deployment["parallelism"]["tp"], deployment["engine"].get("max_num_seqs")) == (tp, max_num_seqs)
    assert reading.load.concurrencies == concurrencies


def test_several_variants_are_listed(tmp_path: Path) -> None:
    says = r"describes 3 variants: override_wide, zip_override_seqs\[0\], zip_override_seqs\[1\]"
    with pytest.raises(InputError, match=says) as refused:
        read(OVERRIDES, tmp_path)
    assert refused.value.hint is not None
    assert refused.value.hint.endswith("recipe.yaml:override_wide'")
    with pytest.raises(InputError, match="describes 2 variants: zip_override_seqs"):
        read(OVERRIDES, tmp_path, "zip_override_seqs")
    with pytest.raises(InputError, match="has no variant 'override_thin'"):
        read(OVERRIDES, tmp_path, "override_thin")


def test_the_only_override_is_taken(tmp_path: Path) -> None:
    recipe = {"base": BASE, "override_wide": OVERRIDES["override_wide"]}
    assert read(recipe, tmp_path).raw["deployment"]["parallelism"]["tp"] == 2


SWEPT = BASE | {"benchmark": BASE["benchmark"] | {"concurrencies": ["{conc}"]}}


def test_a_sweep_over_concurrencies_is_one_deployment(tmp_path: Path) -> None:
    assert read(SWEPT | {"sweep": {"conc": [32, 8]}}, tmp_path).load.concurrencies == (8, 32)
    assert read(SWEPT | {"sweep": {"conc": [32, 8]}}, tmp_path, "conc=8").load.concurrencies == (8,)
    overrides = {f"override_{number}": {"benchmark": {"concurrencies": [number]}} for number in (1, 2)}
    assert read({"base": BASE, **overrides}, tmp_path).load.concurrencies == (1, 2)


def test_a_sweep_over_settings_is_several(tmp_path: Path) -> None:
    recipe = BASE | with_args(max_num_seqs="{seqs}", served_model_name="chat-{seqs}") | {"sweep": {"seqs": [16, 32]}}
    recipe["roles"]["agg"]["workers"] = 1
    with pytest.raises(InputError, match="describes 2 variants: seqs=16, seqs=32"):
        read(recipe, tmp_path)
    assert read(recipe, tmp_path, "seqs=32").raw["deployment"]["engine"]["max_num_seqs"] == 32
    recipe |= {"benchmark": SWEPT["benchmark"], "sweep": {"conc": [4, 8], "seqs": [16, 32]}}
    reading = read(recipe, tmp_path, "seqs=32")
    assert (reading.raw["deployment"]["engine"]["max_num_seqs"], reading.load.concurrencies) == (32, (4, 8))


@pytest.mark.parametrize(
    ("recipe", "variant", "message"),
    [
        (BASE, "override_wide", "has no variant 'override_wide'"),
        ({"base": BASE, "zip_override_a": {"x": [1, 2], "y": [1, 2, 3]}}, "", "lists of zip_override_a have 2 and 3"),
        (BASE | {"sweep": {"a": [*range(100)], "b": [*range(100)]}}, "", "10,000 combinations; 1,000 at most"),
        ({"kind": "Pod"}, "base", "is no recipe with variants"),
    ],
)
def test_wrong_variants_are_refused(recipe: dict[str, Any], variant: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(recipe, tmp_path, variant)
