"""What the pages show is what the verbs' documents say."""

import json
import re
import shutil
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from dashboard.conftest import SERVED, Ask, printed
from windtunnel.search.space.space import Space
from windtunnel.search.store import Store


@pytest.mark.full
def test_the_runs_page_names_every_result(ask: Ask) -> None:
    page = ask("/").text
    for name in ("served/slow", "served/fast", "real", "found", "capacity.json", "grid.json", "torn", "half"):
        assert f">{name}<" in page
    listed = {one["name"]: one for one in ask("/api/runs").document["runs"]}
    assert f'data-value="{listed["served/slow"]["figures"]["ttft_s"]!r}"' in page


def test_an_empty_folder_says_so(serve: object, tmp_path: Path) -> None:
    page = serve(tmp_path)("/")  # type: ignore[operator]
    assert page.status == 200
    assert "no result below this folder yet" in page.text


def test_a_saved_run_says_first_that_its_server_would_not_start(serve: object, tmp_path: Path) -> None:
    load = (
        "--device",
        "h100_sxm",
        "--rate",
        "1",
        "--input-tokens",
        "64",
        "--output-tokens",
        "8",
        "--num-requests",
        "9",
    )
    server = ("--from-command", "vllm serve qwen3-8b --max-model-len 200000", "--slo", "ttft=1s")
    document = printed("simulate", *server, *load, "--out", str(tmp_path / "long"), "--json")
    ask = serve(tmp_path)  # type: ignore[operator]
    assert '<div class="verdict bad"><p class="answer">vllm would not start: ' in ask("/run/long").text
    assert "would not start" in ask("/").text
    assert "holds the SLO" not in ask("/").text
    assert ask("/api/run/long").text == document


@pytest.mark.full
def test_a_runs_document_is_its_summary(ask: Ask, folder: Path) -> None:
    assert ask("/api/run/served/slow").text == (folder / "served" / "slow" / "summary.json").read_text()


@pytest.mark.parametrize(
    "name", ["found", "capacity.json", "grid.json", "step.json", "step_of_training.json", "images.json", "real"]
)
def test_every_kind_of_result_has_a_page(ask: Ask, name: str) -> None:
    page = ask(f"/run/{name}")
    assert page.status == 200
    assert "<h2>" in page.text


def test_the_page_of_a_recommendation_begins_with_its_answer(ask: Ask, folder: Path) -> None:
    advised = folder / "advised"
    shutil.copytree(folder / "found", advised)
    try:
        document = json.loads((advised / "search.json").read_text())
        document["recommendation"] = "Add --max-num-seqs 64: it gains much."
        (advised / "search.json").write_text(json.dumps(document))
        assert "Add --max-num-seqs 64: it gains much." in ask("/run/advised").text
    finally:
        shutil.rmtree(advised)


def test_text_of_a_result_is_never_markup(ask: Ask) -> None:
    page = ask("/run/real").text
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "<b>no" not in page


def test_requests_are_sorted_over_all_pages(ask: Ask, folder: Path) -> None:
    ttft_s = pq.read_table(folder / "served" / "slow" / "requests.parquet")["ttft_s"].to_numpy()
    pages = [ask(f"/api/requests/served/slow?sort=ttft_s&down=1&page={page}").document for page in (1, 2)]
    at = pages[0]["columns"].index("ttft_s")
    shown = [row[at] for page in pages for row in page["rows"]]
    assert shown == sorted(ttft_s.tolist(), reverse=True)
    assert (pages[0]["num_pages"], pages[0]["num_requests"]) == (2, SERVED["num_requests"])


def test_what_a_client_does_not_know_stands_at_the_end(ask: Ask) -> None:
    rows = ask("/api/requests/real?sort=ttft_s&down=1").document["rows"]
    assert rows[-1][0] == 2  # the request that failed


def test_the_timeline_has_every_step(ask: Ask, folder: Path) -> None:
    steps = pq.read_table(folder / "served" / "fast" / "steps.parquet").to_pydict()
    found = ask("/api/timeline/served/fast").document
    assert [track["name"] for track in found["tracks"]] == ["replica 0", "replica 1"]
    slices = [one for track in found["tracks"] for one in track["slices"]]
    assert len(slices) == len(steps["start_s"])
    assert sum(one[4] for one in slices) == sum(steps["num_steps"])


def test_merged_steps_keep_their_time_and_number(ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.dashboard.pages.timeline.MOST_SLICES", 5)
    steps = pq.read_table(folder / "served" / "fast" / "steps.parquet").to_pydict()
    tracks = ask("/api/timeline/served/fast").document["tracks"]
    assert all(track["is_merged"] and len(track["slices"]) <= 5 for track in tracks)
    slices = [one for track in tracks for one in track["slices"]]
    assert sum((end - start) * busy for start, end, busy, *_ in slices) == pytest.approx(sum(steps["duration_s"]))
    assert sum(one[4] for one in slices) == pytest.approx(sum(steps["num_steps"]))


def test_a_stretch_has_the_steps_that_lie_in_it(ask: Ask) -> None:
    whole = ask("/api/timeline/served/fast").document["tracks"][0]["slices"]
    start_s, end_s = whole[1][0], whole[1][1]
    part = ask(f"/api/timeline/served/fast?from={start_s}&to={(start_s + end_s) / 2}").document["tracks"][0]["slices"]
    assert part == [whole[1]]


def test_the_trace_is_perfettos(ask: Ask) -> None:
    answer = ask("/trace/served/slow")
    assert answer.headers["Content-Disposition"] == 'attachment; filename="slow-timeline.json.gz"'
    assert answer.status == 200


def test_a_step_is_what_explain_prints(ask: Ask) -> None:
    step = ask("/api/step/served/slow?batch=4&context=60").document
    assert step["batch"]["decode_requests"] == 4
    assert step["step_s"] > 0
    page = ask("/step/served/slow?batch=4&context=60").text
    assert f">{step['operators'][0]['name']}<" in page


def test_runs_are_compared_with_the_first(ask: Ask) -> None:
    found = ask("/api/compare?run=served/slow&run=served/fast").document
    slow, fast = found["figures"]["ttft_s"]
    assert found["differences"] == {"workload.arrivals.rate_per_s": [20.0, 200.0]}
    text = f"{fast / slow - 1:+.1%} worse" if fast < 2 * slow else f"×{fast / slow:.3g} worse"
    assert text in ask("/compare?run=served/slow&run=served/fast").text


@pytest.mark.full
def test_a_simulation_beside_a_measurement_says_whether_it_covers_it(ask: Ask) -> None:
    found = ask("/api/compare?run=real&run=served/slow").document
    low, high = found["intervals"]["tpot_s"][1]
    inside = low <= found["figures"]["tpot_s"][0] <= high
    page = ask("/compare?run=real&run=served/slow").text
    row = re.search(r"<tr><td class=\"text\">TPOT mean</td>.*?</tr>", page, re.DOTALL)
    assert row is not None
    assert f"measured {'within' if inside else 'outside'}" in row[0]
    # A client knows nothing of the engine.
    assert not any(path.startswith("deployment") for path in found["differences"])


@pytest.mark.parametrize("kind", ["models", "devices", "nodes", "engines", "traces", "calibrations"])
def test_the_catalog_lists_every_kind(ask: Ask, kind: str) -> None:
    page = ask(f"/catalog/{kind}")
    assert page.status == 200
    first = re.search(rf'href="(/catalog/{kind}/[^"]+)"', page.text)
    assert first is not None
    assert ask(first[1]).status == 200


def test_a_model_of_the_catalog_is_what_the_verb_prints(ask: Ask) -> None:
    assert ask("/api/catalog/devices/h100_sxm").document["memory_bytes"] > 80e9


def test_a_search_is_watched_from_its_store(ask: Ask, folder: Path) -> None:
    store = folder / "kept.sqlite"
    with sqlite3.connect(store) as connection:
        (name,) = connection.execute("select name from searches").fetchone()
    found = ask(f"/api/search?store=kept.sqlite&search={name[:12]}").document
    assert (found["num_points"], found["is_done"]) == (4, True)
    (only,) = found["workloads"]
    assert only["num_answered"] == 4
    written = json.loads((folder / "found" / "search.json").read_text())["workloads"][0]
    assert only["ranking"] == written["ranking"]
    assert sum(only["refusals"].values()) == 2  # 3 does not divide the heads
    page = ask(f"/search?store=kept.sqlite&search={name[:12]}").text
    assert re.search(r"done: 4 of 4 points</p>.*4 points evaluated: 2 cannot run, 2 meet the limits", page, re.DOTALL)


def test_the_written_search_shows_the_means_over_all_streams(ask: Ask, folder: Path) -> None:
    points = pq.read_table(folder / "found" / "points.parquet").to_pydict()
    worth: dict[int, list[float]] = {}
    for index, value in zip(points["point"], points["requests_per_usd"], strict=True):
        worth.setdefault(index, []).append(value)
    runs = max(worth.values(), key=lambda values: np.nan_to_num(np.mean(values)))
    assert len(runs) > 1
    page, written = ask("/run/found").text, (folder / "found" / "search.html").read_text()
    assert f"{np.mean(runs):,.0f}" in page
    assert f"{np.mean(runs):,.0f}" in written
    assert f"{runs[0]:,.0f}" not in page


def test_a_measured_run_with_failed_requests_does_not_hold_its_slo(ask: Ask) -> None:
    row = re.search(r'<tr[^>]*>(?:(?!</tr>).)*href="/run/real"(?:(?!</tr>).)*</tr>', ask("/").text, re.DOTALL)
    assert row is not None
    assert "1 request" in row[0]
    assert "holds the SLO" not in row[0]


def test_the_table_of_searches_names_the_best_point(ask: Ask) -> None:
    page = ask("/").text
    assert re.search(r"best: tp 1, max_num_seqs \d+", page)
    assert re.search(r"<td>(TTFT p99|queue)</td>", page)


def test_spans_of_requests_have_their_unit_in_the_cell_alone(ask: Ask) -> None:
    page = ask("/requests/served/slow").text
    assert ">ttft</a>" in page
    assert ">arrival_s</a>" in page


def test_a_capacity_shows_what_it_takes_of_its_limits(ask: Ask) -> None:
    assert re.search(
        r"<span>TTFT p99</span><small>[\d.]+% of the limit, 1.00 s</small>", ask("/run/capacity.json").text
    )


def test_a_search_of_training_jobs_names_its_model(serve: object, tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.sqlite", print)
    store.begin("a", msgspec.json.encode(Space(job={"model": "qwen3-8b"}, vary={"tp": [1]})).decode())
    store.close()
    page = serve(tmp_path)("/search").text  # type: ignore[operator]
    assert "<td>qwen3-8b</td>" in re.sub(r"<td[^>]*>", "<td>", page)
    assert "last answer" not in page  # the store keeps no time of each search


def test_what_is_no_store_is_named(serve: object, tmp_path: Path) -> None:
    (tmp_path / "other.sqlite").write_text("no database")
    assert "is no store of searches" in serve(tmp_path)("/search").text  # type: ignore[operator]
