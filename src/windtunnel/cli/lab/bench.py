"""`windtunnel bench`: measure a real server under a workload, with records in the columns of a simulation."""

import math
import shlex
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from windtunnel.cli.options import with_load
from windtunnel.cli.output import answer, interrupted, remark, status
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import check_replaceable, write_text
from windtunnel.formats.telemetry.prometheus import answer_of, scrape_text
from windtunnel.lab.bench.client import FIRST_TOKEN_ID, BenchRun, Endpoint, bench
from windtunnel.lab.servers import started
from windtunnel.lab.tiny_models import TINY, write_tiny_model
from windtunnel.metrics.client import ClientSummary, client_summary
from windtunnel.model.sampling import Sampling
from windtunnel.report.comparison import ComparedRun, read_run
from windtunnel.report.lab import bench as report
from windtunnel.report.results import entry_of
from windtunnel.report.serving.run import check_folder
from windtunnel.schema import decode, encode, json_text, read_yaml
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.serving.scenario import load as load_scenario
from windtunnel.units import format_count
from windtunnel.workload.generate.requests import RequestArrays, generate

UNKNOWN = "unknown"
"""Model and device of a scenario that says nothing of the deployment."""
SERVER = ("prompt_tokens", "generation_tokens", "cache_hits", "preemptions")
"""Counters of the server's /metrics that are shown beside the client's figures."""
SEEN_BEFORE = 0.05
"""Share of prompt tokens in the server's prefix cache from which prompts that share nothing were sent before."""
LATE_S = 0.1
"""A client that sends later than this measures itself, not the server."""


def command(options: Options) -> None:
    """Measure a server, write the records and print the summary."""
    if options.sweep is not None:
        _sweep(options)
        return
    check_folder(options.out, options.overwrite)
    check_replaceable(options.save_result, options.overwrite)
    scenario = _scenario_of(options)
    load = generate(scenario.workload, scenario.seed)
    with ExitStack() as stack:
        run, summary, document = _measured(_running(options, stack), scenario, load, scenario.seed)
    about = {name: value for name, value in document.items() if isinstance(value, str) and name != "windtunnel"}
    answer(options, lambda: document, lambda: report.bench_report(summary, about, scenario.slo))
    # What was measured is shown before it is written: a disk may be full.
    if options.out is not None:
        report.write_bench(options.out, run.requests, run.tokens, document, scenario)
        remark(f"wrote {options.out}")
    if options.save_result is not None:
        document_of_vllm = report.vllm_document(
            summary, run.requests, run.tokens, scenario.workload.arrivals, run.model
        )
        write_text(options.save_result, json_text(document_of_vllm) + "\n")
        remark(f"wrote {options.save_result}")
    if summary.num_failed:
        remark(f"{summary.num_failed:,} of {format_count(summary.num_requests + summary.num_failed, 'request')} failed")
    if run.num_left:
        raise interrupted(str(document["cut"]), None)
    if summary.num_failed:
        click.get_current_context().exit(1)


def _measured(
    endpoint: Endpoint, scenario: Scenario, load: RequestArrays, text_seed: int
) -> tuple[BenchRun, ClientSummary, dict[str, Any]]:
    """Send a scenario's requests; returns the records, their summary and the document.

    `text_seed` draws the text of the prompts: a server's prefix cache knows those that it has seen.
    """
    before, sampling = _counters(endpoint), request_sampling(scenario)
    if load.media is not None:
        remark("note: images and videos are not sent; text of as many tokens stands for them")
    with status() as say:
        progress = lambda done, total: say(f"{done:,} of {total:,} answered")  # noqa: E731
        warning = f"; a request fails after {endpoint.timeout_s:g} s (--timeout)"
        tell_silence = lambda silence_s: remark(f"no answer for {silence_s:.0f} s{warning}")  # noqa: E731
        run = bench(replace(endpoint, sampling=sampling), load, text_seed, progress, tell_silence)
    after = _counters(endpoint)
    counted = {name: after[name] - before[name] for name in SERVER if name in after and name in before}
    summary = client_summary(run.requests, run.tokens, scenario.slo)
    about = {"model": run.model, "endpoint": endpoint.url, **_remarks(run, summary)}
    cached = summary.cache_hit_fraction
    if cached is None:
        cached = counted.get("cache_hits", 0.0) / max(counted.get("prompt_tokens", 0.0), 1.0)
    if load.prefixes is None and cached > SEEN_BEFORE:
        about["cache"] = (
            f"{cached:.0%} of the prompt tokens were in the server's prefix cache already, though no two prompts "
            "begin with the same tokens: an earlier run sent them; another --seed sends others"
        )
    workload = msgspec.structs.replace(scenario.workload, sampling=decode(sampling, Sampling, "sampling"))
    sent = msgspec.structs.replace(scenario, workload=workload)
    return run, summary, report.bench_document(summary, about, sent) | ({"server": counted} if counted else {})


def _counters(endpoint: Endpoint) -> Mapping[str, float]:
    """Return what a server's /metrics has counted so far; nothing where it has none."""
    try:
        return scrape_text(answer_of(endpoint.url.rstrip("/").removesuffix("/v1") + "/metrics"), 0.0).values
    except InputError:
        return {}


def request_sampling(scenario: Scenario) -> dict[str, float]:
    """Return the workload's sampling parameters as a request gives them; greedy where it has none."""
    sampling = scenario.workload.sampling
    given = {} if sampling is None else {key: value for key, value in encode(sampling).items() if value is not None}
    if given.pop("structured_output", False):
        raise InputError("workload.sampling.structured_output cannot be sent", "it needs a grammar; leave it out")
    return {"temperature": 0.0, **given}


def _sweep(options: Options) -> None:
    """Measure a server at several loads, one after the other, and print the curve; what is measured is kept."""
    kind, loads = _loads(options.sweep)
    scenarios = {load: _scenario_of(options, {kind: load if kind == "rate" else round(load)}) for load in loads}
    requests = {load: generate(each.workload, each.seed) for load, each in scenarios.items()}
    folders = {load: options.out / f"{kind}-{load:g}" for load in loads} if options.out is not None else {}
    known = {load: folder for load, folder in folders.items() if _is_measured(options, folder, scenarios[load])}
    runs: dict[float, ComparedRun] = {load: read_run(folder) for load, folder in known.items()}
    cut = ""
    with ExitStack() as stack:
        endpoint = _running(options, stack) if len(known) < len(loads) else None
        for load in loads:
            if load in runs or endpoint is None:
                remark(f"{kind} {load:g}: measured before")
                continue
            own_texts = np.random.SeedSequence([scenarios[load].seed, round(load * 1000)]).generate_state(1)
            try:
                run, summary, document = _measured(endpoint, scenarios[load], requests[load], int(own_texts[0]))
            except KeyboardInterrupt:
                cut = f"{kind} {load:g} is interrupted before its first answer"
                break
            if run.num_left:
                cut = f"{kind} {load:g} is {document['cut']} and is not kept"
                break
            runs[load] = ComparedRun(entry_of(document, f"{kind}-{load:g}"), document, run.requests)
            remark(f"{kind} {load:g}: {summary.num_requests:,} answered, {summary.num_failed:,} failed")
            if load in folders:
                report.write_bench(folders[load], run.requests, run.tokens, document, scenarios[load])
    if cut and not runs:
        raise interrupted(cut, None)
    sweep = report.Sweep(
        kind, [report.Level(load, runs[load], _predicted(scenarios[load])) for load in loads if load in runs]
    )
    if options.out is not None:
        write_text(options.out / "sweep.json", json_text(report.sweep_document(sweep)) + "\n")
        remark(f"wrote {options.out}")
    answer(options, report.sweep_document, report.sweep_report, sweep)
    if cut:
        raise interrupted(cut, None if options.out is None else "the same command goes on from there")
    if any(run.document["summary"]["num_failed"] for run in runs.values()):
        click.get_current_context().exit(1)


def _loads(text: str) -> tuple[str, list[float]]:
    """Parse `rate=1,2,4` or `concurrency=8,16`; returns the kind of load, and the loads ascending."""
    kind, _, values = text.partition("=")
    try:
        loads = sorted({float(value) for value in values.split(",")})
    except ValueError:
        loads = [0.0]
    whole = kind != "concurrency" or all(load == round(load) for load in loads)
    if kind not in ("rate", "concurrency") or not whole or not 0 < loads[0] <= loads[-1] < math.inf:
        raise InputError(f"--sweep: {text!r} is no load and its values", "rate=1,2,4 or concurrency=8,16,32")
    return kind, loads


def _is_measured(options: Options, folder: Path, scenario: Scenario) -> bool:
    """Whether a former run measured a load with the same requests; refuse a folder that holds something else."""
    if options.overwrite or not (folder / "summary.json").is_file():
        check_folder(folder, options.overwrite)
        return False
    if load_scenario(folder / "scenario.yaml") != scenario:
        raise InputError(f"{folder} has other requests", "choose another folder, or replace them with --overwrite")
    return True


def _predicted(scenario: Scenario) -> ComparedRun | None:
    """Return the simulation of a load, where the workload's file describes the deployment."""
    if UNKNOWN in (scenario.model, scenario.deployment.device):
        return None
    from windtunnel.report.serving.run import run_document
    from windtunnel.serving.simulate import simulate

    result = simulate(scenario)
    document = run_document(result)
    return ComparedRun(entry_of(document, "predicted"), document, result.requests)


def _running(options: Options, stack: ExitStack) -> Endpoint:
    """Return the server to measure; one that is started ends with `stack`."""
    if options.vocabulary <= FIRST_TOKEN_ID:
        raise InputError(f"--vocabulary is {options.vocabulary}; more than {FIRST_TOKEN_ID} is needed")
    if not options.timeout > 0:
        raise InputError(f"--timeout is {options.timeout:g}; more than 0 is needed")
    url, model = options.endpoint or "", options.served_model
    if options.start is not None:
        model = _model_folder(options, stack)
        remark(f"starting {options.start}")
        server = started(options.start, model, shlex.split(options.engine_args), options.python or sys.executable)
        url = stack.enter_context(server)
    return Endpoint(
        url=url,
        model=model,
        api=options.api,
        token_ids=not options.words,
        vocabulary=min(options.vocabulary, TINY["vocab_size"]) if options.tiny else options.vocabulary,
        ignore_eos=not options.no_ignore_eos,
        timeout_s=options.timeout,
        headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else {},
    )


def _model_folder(options: Options, stack: ExitStack) -> str:
    """Return the folder of the served model; a tiny one is written for as long as `stack` is open."""
    model: str | None = options.served_model
    if options.tiny == (model is not None):
        hint = "give --served-model FOLDER, or --tiny for one with random weights"
        raise InputError("--start needs a model", hint)
    if model is not None:
        return model
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="windtunnel-tiny-"))
    return str(write_tiny_model(Path(folder)))


def _scenario_of(options: Options, load: Mapping[str, float] = {}) -> Scenario:
    """Return the scenario whose workload is sent, at another `load`; model and device may be left out."""
    workload: Path | None = options.workload
    raw = read_yaml(workload) if workload is not None else {}
    if not isinstance(raw, dict):
        raise InputError(f"{workload} is neither a scenario nor a workload: keys and values are needed")
    if workload is not None and "workload" not in raw:
        raw = {"workload": raw}
    raw = with_load(raw, {**options.of("requests", "bench_settings"), **load}, options.slo)
    raw.setdefault("model", UNKNOWN)
    # Tables of a wrong type are left to the decoder, which refuses them.
    if isinstance(deployment := raw.setdefault("deployment", {}), dict):
        deployment.setdefault("device", UNKNOWN)
    if isinstance(raw["workload"], dict) and not raw["workload"].keys() & {"arrivals", "trace", "clients", "tenants"}:
        raise InputError("there is nothing to send", "give --workload, --trace, or --rate with --input-tokens")
    folder = workload.parent if workload is not None and options.trace is None else None
    return scenario_from(raw, "" if workload is None else str(workload), folder)


def _remarks(run: Any, summary: Any) -> dict[str, str]:
    """Return remarks for the reader: failures, and answers or prompts of another length than requested."""
    requests = run.requests.where(~run.requests["is_warmup"] & ~run.requests["failed"])
    remarks = {}
    if run.num_left:
        ended = summary.num_requests + summary.num_failed
        remarks["cut"] = f"interrupted after {ended:,} of {format_count(ended + run.num_left, 'request')}"
    if summary.num_failed:
        remarks["failed"] = f"{format_count(summary.num_failed, 'request')}: {'; '.join(run.errors[:3])}"
    elif (output := int(requests["output_tokens"].sum())) != run.asked_output_tokens:
        remarks["answers"] = f"{format_count(output, 'token')} in all; {run.asked_output_tokens:,} were requested"
    elif (prompts := int(requests["input_tokens"].sum())) != run.asked_input_tokens:
        remarks["prompts"] = f"{prompts:,} tokens as the server counts; {run.asked_input_tokens:,} were requested"
    if run.num_uncounted:
        told = f"the server does not tell how many tokens {format_count(run.num_uncounted, 'answer')} had (no usage)"
        remarks["tokens"] = f"{told}: each part counts as one, and TPOT is too long where parts hold several"
    late_s = float(requests["sent_late_s"].max())
    if late_s > LATE_S:
        remarks["client"] = f"sent a request {late_s:.2g} s too late: this machine is too slow for the load"
    return remarks
