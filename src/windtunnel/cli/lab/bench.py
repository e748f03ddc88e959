"""`windtunnel bench`: a simulator's workload against a real server, its records in the simulator's columns."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import WRITTEN_FILE, Verb, assignments, limits, option
from windtunnel.cli.progress import status
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.lab.bench.client import Load
    from windtunnel.serving.scenario import Scenario

_SERVER, _LOAD, _OUT = "Server", "Load", "Result"


@click.command(cls=Verb, epilog="vLLM's names work too: --max-concurrency, --request-rate, --num-prompts, ...")
@option("--endpoint", section=_SERVER, metavar="URL", help="Of a running server, as http://localhost:8000/v1.")
@option(
    "--start", section=_SERVER, metavar="ENGINE", help="Start one: vllm, sglang, transformers, llama.cpp, openvino."
)
@option("--served-model", section=_SERVER, metavar="NAME", help="Its model; a folder with --start.  [the first listed]")
@option("--tiny", section=_SERVER, is_flag=True, help="With --start: serve a tiny model with random weights.")
@option("--engine-args", section=_SERVER, default="", metavar="ARGS", help="With --start: of the engine's command.")
@option("--python", section=_SERVER, metavar="PATH", help="With --start: the engine's interpreter.  [this one]")
@option("--api", section=_SERVER, default="completions", metavar="NAME", help="completions or chat.  [completions]")
@option("--words", section=_SERVER, is_flag=True, help="Prompts of words, for servers that take no token ids.")
@option("--vocabulary", section=_SERVER, type=int, default=1000, metavar="N", help="Token ids are below it.  [1000]")
@option("--no-ignore-eos", section=_SERVER, is_flag=True, help="Do not ask for answers of exactly the wanted length.")
@option("--api-key", section=_SERVER, envvar="OPENAI_API_KEY", metavar="KEY", help="Sent as bearer token.")
@option(
    "--workload",
    section=_LOAD,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A scenario, or its workload alone, as `windtunnel simulate` takes it.",
)
@option("--input-tokens", section=_LOAD, metavar="N|MIN-MAX", help="Prompt tokens of a request.")
@option("--output-tokens", section=_LOAD, metavar="N|MIN-MAX", help="Generated tokens of a request.")
@option(
    "--concurrency",
    section=_LOAD,
    type=int,
    metavar="N",
    help="Most requests under way; alone: a closed loop.",
)
@option("--rate", section=_LOAD, type=float, metavar="X", help="Poisson arrivals a second: an open loop.")
@option("--num-requests", section=_LOAD, type=int, metavar="N", help="Requests in all.")
@option("--trace", section=_LOAD, metavar="FILE", help="Recorded requests.")
@option("--seed", section=_LOAD, type=int, metavar="N", help="Of the random draws.  [the scenario's]")
@option("--set", "settings", section=_LOAD, multiple=True, metavar="PATH=VALUE", help="Set a field of the scenario.")
@option("--slo", section=_OUT, metavar="LIMITS", help="For goodput: ttft=2s,tpot=50ms,e2e=30s.")
@option(
    "--out",
    section=_OUT,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write requests.parquet, tokens.parquet, summary.json and scenario.yaml.",
)
@option("--overwrite", section=_OUT, is_flag=True, help="Replace the files of a former run.")
@option(
    "--save-result",
    section=_OUT,
    type=WRITTEN_FILE,
    metavar="FILE",
    help="Write the JSON of `vllm bench serve --save-result --save-detailed`.",
)
@option("--json", "as_json", section="General", is_flag=True, help="Print JSON.")
def command(
    endpoint: str | None,
    start: str | None,
    served_model: str | None,
    tiny: bool,
    engine_args: str,
    python: str | None,
    out: Path | None,
    overwrite: bool,
    save_result: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure a real server under a workload, with the records of a simulation.

    \b
    windtunnel bench --endpoint http://localhost:8000/v1 --workload scenario.yaml --out runs/real
    windtunnel bench --start vllm --tiny --rate 4 --input-tokens 64 --output-tokens 16
    """
    import sys

    from windtunnel.files import write_text
    from windtunnel.lab.bench.client import bench
    from windtunnel.metrics.client import client_summary
    from windtunnel.report.documents import as_text
    from windtunnel.report.lab.bench import bench_document, bench_report, vllm_document, write_bench
    from windtunnel.report.render.tables import show
    from windtunnel.report.serving.files import check_folder

    if (endpoint is None) == (start is None):
        raise InputError("give either --endpoint or --start", "a running server's address, or an engine to start")
    if out is not None:
        check_folder(out, overwrite)
    if save_result is not None and save_result.exists() and not overwrite:
        raise InputError(f"{save_result} exists", "choose another file, or replace it with --overwrite")
    scenario = _scenario_of(**given)
    load = _load_of(scenario, given["vocabulary"])
    with ExitStack() as stack:
        if start is not None:
            served_model = _model_folder(stack, start, served_model, tiny)
            endpoint = stack.enter_context(_started(start, served_model, engine_args, python or sys.executable))
        server = _endpoint_of(str(endpoint), served_model, **given)
        with status() as say:
            run = bench(server, load, scenario.seed, lambda done, total: say(f"{done:,} of {total:,} answered"))
    summary = client_summary(run.requests, run.tokens, scenario.slo)
    about = {"model": run.model, "endpoint": str(endpoint), **_remarks(run, summary)}
    document = bench_document(summary, about, scenario)
    if out is not None:
        write_bench(out, run.requests, run.tokens, document, scenario)
        click.echo(f"wrote {out}", err=True)
    if save_result is not None:
        saved = vllm_document(summary, run.requests, run.tokens, scenario.workload.arrivals)
        write_text(save_result, as_text(saved) + "\n")
        click.echo(f"wrote {save_result}", err=True)
    if as_json:
        click.echo(as_text(document))
    else:
        show(*bench_report(summary, about))


def _scenario_of(
    workload: Path | None,
    settings: tuple[str, ...],
    slo: str | None,
    rate: float | None,
    concurrency: int | None,
    trace: str | None,
    **given: Any,
) -> "Scenario":
    """The scenario whose workload is sent; model and device, which the server decides, may be left out."""
    from windtunnel.schema import read_yaml
    from windtunnel.serving.scenario import scenario_from
    from windtunnel.serving.shorthand import parse_lengths, raw_scenario

    raw = read_yaml(workload) if workload is not None else {}
    if not isinstance(raw, dict):
        raise InputError(f"{workload} is neither a scenario nor a workload: keys and values are needed")
    if workload is not None and "workload" not in raw:
        raw = {"workload": raw}
    options = {name: given[name] for name in ("num_requests", "seed") if given[name] is not None}
    for stream in ("input_tokens", "output_tokens"):
        if given[stream] is not None:
            options[stream] = parse_lengths(f"--{stream.replace('_', '-')}", given[stream])
    raw = raw_scenario(raw, options, rate, concurrency, trace, limits(slo), assignments(settings))
    raw.setdefault("model", "unknown")
    raw.setdefault("deployment", {}).setdefault("device", "unknown")
    if not raw["workload"].keys() & {"arrivals", "trace", "clients", "tenants"}:
        raise InputError("there is nothing to send", "give --workload, --trace, or --rate with --input-tokens")
    folder = workload.parent if workload is not None and trace is None else None
    return scenario_from(raw, "" if workload is None else str(workload), folder)


def _load_of(scenario: "Scenario", vocabulary: int) -> "Load":
    from windtunnel.lab.bench.client import Load, shared_prompts
    from windtunnel.workload.generate.requests import generate

    requests = generate(scenario.workload, scenario.seed)
    found = requests.prefixes
    shared = (
        shared_prompts(found.node_parent, found.node_tokens, found.request_node, vocabulary, scenario.seed)
        if found is not None
        else {}
    )
    return Load(
        requests.arrival_s,
        requests.input_tokens,
        requests.output_tokens,
        requests.concurrency,
        requests.num_warmup,
        requests.previous,
        requests.think_s,
        shared,
    )


def _endpoint_of(url: str, served_model: str | None, **given: Any) -> Any:
    from windtunnel.lab.bench.client import FIRST_TOKEN_ID, Endpoint

    if given["vocabulary"] <= FIRST_TOKEN_ID:
        raise InputError(f"--vocabulary is {given['vocabulary']}; more than {FIRST_TOKEN_ID} is needed")
    return Endpoint(
        url=url,
        model=served_model,
        api=given["api"],
        token_ids=not given["words"],
        vocabulary=given["vocabulary"],
        ignore_eos=not given["no_ignore_eos"],
        headers={"Authorization": f"Bearer {given['api_key']}"} if given["api_key"] else {},
    )


def _model_folder(stack: ExitStack, engine: str, served_model: str | None, tiny: bool) -> str:
    import tempfile

    from windtunnel.lab.engines.tiny_models import write_tiny_gguf, write_tiny_model

    if tiny == (served_model is not None):
        raise InputError("--start needs a model", "give --served-model FOLDER, or --tiny for one with random weights")
    if served_model is not None:
        return served_model
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="windtunnel-tiny-"))
    return str((write_tiny_gguf if engine == "llama.cpp" else write_tiny_model)(Path(folder)))


def _started(engine: str, model: str, engine_args: str, python: str) -> Any:
    import shlex

    from windtunnel.lab.engines.servers import started

    click.echo(f"starting {engine}", err=True)
    return started(engine, model, shlex.split(engine_args), python)


def _remarks(run: Any, summary: Any) -> dict[str, str]:
    """What the reader must know: failures, and answers or prompts of another length than asked for."""
    requests = run.requests.where(~run.requests["is_warmup"] & ~run.requests["failed"])
    remarks = {}
    if summary.num_failed:
        remarks["failed"] = f"{format_count(summary.num_failed, 'request')}: {'; '.join(run.errors[:3])}"
    elif (output := int(requests["output_tokens"].sum())) != run.asked_output_tokens:
        remarks["answers"] = f"{format_count(output, 'token')} in all; {run.asked_output_tokens:,} were asked for"
    elif (prompts := int(requests["input_tokens"].sum())) != run.asked_input_tokens:
        remarks["prompts"] = f"{prompts:,} tokens as the server counts; {run.asked_input_tokens:,} were wanted"
    late_s = float(requests["sent_late_s"].max())
    if late_s > LATE_S:
        remarks["client"] = f"sent a request {late_s:.2g} s too late: this machine is too slow for the load"
    return remarks


LATE_S = 0.1
"""A client that sends later than this measures itself."""
