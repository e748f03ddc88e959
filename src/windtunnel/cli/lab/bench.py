"""`windtunnel bench`: measure a real server under a workload, with records in the columns of a simulation."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from windtunnel.cli.options import Verb, options_in, options_of, with_load
from windtunnel.cli.output import answer, check_replaceable, remark
from windtunnel.cli.progress import status
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.lab.bench.client import Endpoint
    from windtunnel.serving.scenario import Scenario


class ServerOptions(NamedTuple):
    """Options that say which server is measured, and how requests are put to it."""

    endpoint: str | None
    start: str | None
    served_model: str | None
    tiny: bool
    engine_args: str
    python: str | None
    api: str
    words: bool
    vocabulary: int
    no_ignore_eos: bool
    api_key: str | None
    timeout: float

    def running(self, stack: ExitStack) -> "Endpoint":
        """Return the server to measure; one that is started ends with `stack`."""
        import shlex
        import sys

        from windtunnel.lab.bench.client import FIRST_TOKEN_ID, Endpoint
        from windtunnel.lab.servers import server_of, started

        if self.vocabulary <= FIRST_TOKEN_ID:
            raise InputError(f"--vocabulary is {self.vocabulary}; more than {FIRST_TOKEN_ID} is needed")
        if not self.timeout > 0:
            raise InputError(f"--timeout is {self.timeout:g}; more than 0 is needed")
        url, model = self.endpoint or "", self.served_model
        if self.start is not None:
            model = self._model_folder(stack, server_of(self.start).takes_gguf)
            remark(f"starting {self.start}")
            server = started(self.start, model, shlex.split(self.engine_args), self.python or sys.executable)
            url = stack.enter_context(server)
        return Endpoint(
            url=url,
            model=model,
            api=self.api,
            token_ids=not self.words,
            vocabulary=self.vocabulary,
            ignore_eos=not self.no_ignore_eos,
            timeout_s=self.timeout,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
        )

    def _model_folder(self, stack: ExitStack, takes_gguf: bool) -> str:
        """Return the folder of the served model; a tiny one is written for as long as `stack` is open."""
        import tempfile

        from windtunnel.lab.tiny_models import write_tiny_gguf, write_tiny_model

        if self.tiny == (self.served_model is not None):
            hint = "give --served-model FOLDER, or --tiny for one with random weights"
            raise InputError("--start needs a model", hint)
        if self.served_model is not None:
            return self.served_model
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="windtunnel-tiny-"))
        return str((write_tiny_gguf if takes_gguf else write_tiny_model)(Path(folder)))


class BenchFiles(NamedTuple):
    """Files that the measurements are written to."""

    out: Path | None
    overwrite: bool
    save_result: Path | None


@click.command(cls=Verb, epilog="vLLM's names work too: --max-concurrency, --request-rate, --num-prompts, ...")
@options_of(ServerOptions)
@options_in("bench", "requests", "bench_settings", "slo")
@options_of(BenchFiles)
@options_in("json")
def command(server: ServerOptions, files: BenchFiles, workload: Path | None, as_json: bool, **given: Any) -> None:
    """Measure a real server under a workload, with the records of a simulation.

    \b
    windtunnel bench --endpoint http://localhost:8000/v1 --workload scenario.yaml --out runs/real
    windtunnel bench --start vllm --tiny --rate 4 --input-tokens 64 --output-tokens 16
    """
    from windtunnel.files import write_text
    from windtunnel.lab.bench.client import bench
    from windtunnel.metrics.client import client_summary
    from windtunnel.report.lab.bench import bench_document, bench_report, vllm_document, write_bench
    from windtunnel.report.render.json import as_text
    from windtunnel.report.serving.files import check_folder
    from windtunnel.workload.generate.requests import generate

    if (server.endpoint is None) == (server.start is None):
        raise InputError("give either --endpoint or --start", "a running server's address, or an engine to start")
    if files.out is not None:
        check_folder(files.out, files.overwrite)
    check_replaceable(files.save_result, files.overwrite)
    scenario = _scenario_of(workload, given)
    load = generate(scenario.workload, scenario.seed)
    with ExitStack() as stack:
        endpoint = server.running(stack)
        with status() as say:
            progress = lambda done, total: say(f"{done:,} of {total:,} answered")  # noqa: E731
            run = bench(endpoint, load, scenario.seed, progress, partial(_tell_silence, endpoint.timeout_s))
    summary = client_summary(run.requests, run.tokens, scenario.slo)
    about = {"model": run.model, "endpoint": endpoint.url, **_remarks(run, summary)}
    document = bench_document(summary, about, scenario)
    if files.out is not None:
        write_bench(files.out, run.requests, run.tokens, document, scenario)
        remark(f"wrote {files.out}")
    if files.save_result is not None:
        document_of_vllm = vllm_document(summary, run.requests, run.tokens, scenario.workload.arrivals)
        write_text(files.save_result, as_text(document_of_vllm) + "\n")
        remark(f"wrote {files.save_result}")
    answer(as_json, lambda: document, lambda: bench_report(summary, about))
    if summary.num_failed:
        remark(f"{summary.num_failed:,} of {format_count(summary.num_requests + summary.num_failed, 'request')} failed")
        click.get_current_context().exit(1)


def _tell_silence(timeout_s: float, silence_s: float) -> None:
    remark(f"no answer for {silence_s:.0f} s; a request fails after {timeout_s:g} s (--timeout)")


def _scenario_of(workload: Path | None, given: dict[str, Any]) -> "Scenario":
    """Return the scenario whose workload is sent; model and device, which the server decides, may be left out."""
    from windtunnel.schema import read_yaml
    from windtunnel.serving.scenario import scenario_from

    raw = read_yaml(workload) if workload is not None else {}
    if not isinstance(raw, dict):
        raise InputError(f"{workload} is neither a scenario nor a workload: keys and values are needed")
    if workload is not None and "workload" not in raw:
        raw = {"workload": raw}
    raw = with_load(raw, given)
    raw.setdefault("model", "unknown")
    raw.setdefault("deployment", {}).setdefault("device", "unknown")
    if not raw["workload"].keys() & {"arrivals", "trace", "clients", "tenants"}:
        raise InputError("there is nothing to send", "give --workload, --trace, or --rate with --input-tokens")
    folder = workload.parent if workload is not None and given["trace"] is None else None
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


LATE_S = 0.1
"""A client that sends later than this measures itself, not the server."""
