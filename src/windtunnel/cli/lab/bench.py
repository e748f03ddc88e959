"""`windtunnel bench`: measure a real server under a workload, with records in the columns of a simulation."""

import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from windtunnel.cli.options import with_load
from windtunnel.cli.output import answer, remark
from windtunnel.cli.progress import status
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import check_replaceable, write_text
from windtunnel.lab.bench.client import FIRST_TOKEN_ID, Endpoint, bench
from windtunnel.lab.servers import started
from windtunnel.lab.tiny_models import write_tiny_model
from windtunnel.metrics.client import client_summary
from windtunnel.report.lab.bench import bench_document, bench_report, vllm_document, write_bench
from windtunnel.report.render.json import as_text
from windtunnel.report.serving.run import check_folder
from windtunnel.schema import read_yaml
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.units import format_count
from windtunnel.workload.generate.requests import generate

LATE_S = 0.1
"""A client that sends later than this measures itself, not the server."""


def command(options: Options) -> None:
    """Measure a server, write the records and print the summary."""
    if (options.endpoint is None) == (options.start is None):
        raise InputError("give either --endpoint or --start", "a running server's address, or an engine to start")
    if options.out is not None:
        check_folder(options.out, options.overwrite)
    check_replaceable(options.save_result, options.overwrite)
    scenario = _scenario_of(options)
    load = generate(scenario.workload, scenario.seed)
    with ExitStack() as stack:
        endpoint = _running(options, stack)
        with status() as say:
            progress = lambda done, total: say(f"{done:,} of {total:,} answered")  # noqa: E731
            warning = f"; a request fails after {endpoint.timeout_s:g} s (--timeout)"
            tell_silence = lambda silence_s: remark(f"no answer for {silence_s:.0f} s{warning}")  # noqa: E731
            run = bench(endpoint, load, scenario.seed, progress, tell_silence)
    summary = client_summary(run.requests, run.tokens, scenario.slo)
    about = {"model": run.model, "endpoint": endpoint.url, **_remarks(run, summary)}
    document = bench_document(summary, about, scenario)
    if options.out is not None:
        write_bench(options.out, run.requests, run.tokens, document, scenario)
        remark(f"wrote {options.out}")
    if options.save_result is not None:
        document_of_vllm = vllm_document(summary, run.requests, run.tokens, scenario.workload.arrivals)
        write_text(options.save_result, as_text(document_of_vllm) + "\n")
        remark(f"wrote {options.save_result}")
    answer(options.as_json, lambda: document, lambda: bench_report(summary, about))
    if summary.num_failed:
        remark(f"{summary.num_failed:,} of {format_count(summary.num_requests + summary.num_failed, 'request')} failed")
        click.get_current_context().exit(1)


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
        vocabulary=options.vocabulary,
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


def _scenario_of(options: Options) -> Scenario:
    """Return the scenario whose workload is sent; model and device, which the server decides, may be left out."""
    workload: Path | None = options.workload
    raw = read_yaml(workload) if workload is not None else {}
    if not isinstance(raw, dict):
        raise InputError(f"{workload} is neither a scenario nor a workload: keys and values are needed")
    if workload is not None and "workload" not in raw:
        raw = {"workload": raw}
    raw = with_load(raw, options.of("requests", "bench_settings"), options.slo)
    raw.setdefault("model", "unknown")
    # Tables of a wrong type are left to the decoder, which refuses them.
    if isinstance(deployment := raw.setdefault("deployment", {}), dict):
        deployment.setdefault("device", "unknown")
    if isinstance(raw["workload"], dict) and not raw["workload"].keys() & {"arrivals", "trace", "clients", "tenants"}:
        raise InputError("there is nothing to send", "give --workload, --trace, or --rate with --input-tokens")
    folder = workload.parent if workload is not None and options.trace is None else None
    return scenario_from(raw, "" if workload is None else str(workload), folder)


def _remarks(run: Any, summary: Any) -> dict[str, str]:
    """Return remarks for the reader: failures, and answers or prompts of another length than requested."""
    requests = run.requests.where(~run.requests["is_warmup"] & ~run.requests["failed"])
    remarks = {}
    if summary.num_failed:
        remarks["failed"] = f"{format_count(summary.num_failed, 'request')}: {'; '.join(run.errors[:3])}"
    elif (output := int(requests["output_tokens"].sum())) != run.asked_output_tokens:
        remarks["answers"] = f"{format_count(output, 'token')} in all; {run.asked_output_tokens:,} were requested"
    elif (prompts := int(requests["input_tokens"].sum())) != run.asked_input_tokens:
        remarks["prompts"] = f"{prompts:,} tokens as the server counts; {run.asked_input_tokens:,} were requested"
    late_s = float(requests["sent_late_s"].max())
    if late_s > LATE_S:
        remarks["client"] = f"sent a request {late_s:.2g} s too late: this machine is too slow for the load"
    return remarks
