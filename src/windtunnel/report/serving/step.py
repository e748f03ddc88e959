"""One forward step, operator by operator."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from windtunnel.model import operators as ops
from windtunnel.report.numbers import number, percent
from windtunnel.report.render.json import fields_of
from windtunnel.report.render.plots import Axis, bar_chart
from windtunnel.report.report import Bars, Block, Column, Facts, Figures, OnPage, Report, Section, Table, table_of
from windtunnel.report.serving.run import memory_document
from windtunnel.report.serving.setup import (
    deployment_line,
    model_line,
    network_lines,
    provenance_rows,
    sampling_document,
    sampling_rows,
)
from windtunnel.report.version import version
from windtunnel.schema import encode
from windtunnel.serving.explain import ExplainedLaunch, Explanation
from windtunnel.units import format_bytes, format_count, format_seconds, format_si

MAX_DRAWN_OPERATORS = 20
WORK_HEADS = ("work of one run", "shape", "FLOP", "of peak", "bytes", "of peak")


def step_document(step: Explanation) -> dict[str, Any]:
    """Document one explained step."""
    setup = step.setup
    return {
        "windtunnel": version(),
        "model": setup.model.name,
        "device": setup.device.name,
        "node": setup.node.name,
        "parallelism": fields_of(setup.parallelism, *setup.parallelism.__struct_fields__),
        "precision": fields_of(setup.precision, *setup.precision.__struct_fields__),
        "engine": encode(setup.engine),
        "sampling": sampling_document(setup),
        "batch": asdict(step.batch),
        **fields_of(step, "num_computed_tokens", "device_s", "host_s", "host_overlaps"),
        **fields_of(step, "launch_s", "unhidden_s", "step_s", "bound_by"),
        "seconds_by_kind": step.seconds_by(lambda launch: launch.family),
        "seconds_by_bound": step.seconds_by(lambda launch: launch.bound_by),
        "seconds_by_coverage": step.seconds_by(lambda launch: launch.coverage.value),
        "seconds_by_source": step.seconds_by(lambda launch: launch.source),
        "operators": [
            {
                "name": launch.name,
                "kind": launch.op.kind,
                "shape": asdict(launch.op),
                **fields_of(launch, "count", "each_s", "total_s", "flops", "num_bytes"),
                **fields_of(launch, "flops_fraction", "bandwidth_fraction", "bound_by"),
                "coverage": launch.coverage.value,
                "source": launch.source,
            }
            for launch in step.launches
        ],
        "memory": memory_document(step.memory),
    }


def step_report(step: Explanation) -> Report:
    """Return the report of a step: its operators in the order of a layer, their sums, and where times come from."""
    lead = [deployment_line(step.setup), *network_lines(step.setup.network), batch_line(step)]
    return Report(model_line(step.setup), lead, step_sections(step))


def step_sections(step: Explanation) -> list[Section]:
    """Return the sections of a step's report."""
    document = step_document(step)
    by_kind = {name.replace("_", " "): share for name, share in _shares(document["seconds_by_kind"]).items()}
    sources = [_shares(document[f"seconds_by_{name}"]) for name in ("coverage", "source")]
    return [
        Section(
            "",
            [
                OnPage(lambda: [_operator_figure(document)]),
                time_table(document),
                Table(WORK_HEADS, [_work_row(launch) for launch in step.launches], left=2),
                Facts([*totals_rows(step), *sampling_rows(document["sampling"])]),
            ],
            heading="Operators",
        ),
        Section(
            f"Where the device's time goes: bound by {step.bound_by}",
            [
                Bars(_shares(document["seconds_by_bound"]), "by what bounds it", "share of the device's time (%)"),
                Bars(by_kind, "by kind of operator", "share of the device's time (%)"),
            ],
        ),
        Section("Where the operator times come from", [Facts(provenance_rows(*sources))]),
    ]


def time_table(document: Mapping[str, Any]) -> Table:
    """Return the table of the operators' times, from the document of a step."""
    columns: Mapping[str, Column] = {
        "operator": "name",
        "runs": lambda operator: f"{operator['count']:g}",
        "each": "each_s",
        "total": "total_s",
        "share": lambda operator: percent(operator["total_s"] / document["device_s"]),
        "bound by": "bound_by",
        "found": "coverage",
    }
    return table_of(document["operators"], columns)


def _operator_figure(document: Mapping[str, Any]) -> Block:
    largest = sorted(document["operators"], key=lambda operator: -operator["total_s"])[:MAX_DRAWN_OPERATORS]
    names = [operator["name"] for operator in largest]
    milliseconds = [operator["total_s"] * 1e3 for operator in largest]
    return Figures([(bar_chart(names, milliseconds, Axis("time (ms)"), width=520), "device's time by operator")])


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total_s = sum(seconds.values())
    return {name: part / total_s for name, part in seconds.items()}


def batch_line(step: Explanation) -> str:
    """Describe the batch of a step."""
    batch = step.batch
    parts = []
    if batch.decode_requests:
        parts.append(
            f"{format_count(batch.decode_requests, 'decoding request')} of {batch.decode_context_tokens:,.0f} tokens"
        )
    if batch.prefill_tokens:
        cached = batch.prefill_pairs / batch.prefill_tokens - 0.5 * batch.prefill_tokens
        after = f" after {cached:,.0f}" if cached else ""
        parts.append(f"a prompt chunk of {format_count(batch.prefill_tokens, 'token')}{after}")
    padded = step.num_computed_tokens != batch.num_tokens
    note = f", padded to the CUDA graph of {step.num_computed_tokens:,}" if padded else ""
    ranks = step.setup.parallelism.attention_dp
    where = f" on each of {ranks} ranks" if ranks > 1 else ""
    return f"one step{where}: {' and '.join(parts)}{note}"


def _work_row(launch: ExplainedLaunch) -> list[str]:
    """Return an operator's work, under `WORK_HEADS`."""
    return [
        launch.name,
        launch.op.text,
        format_si(launch.flops / launch.count, "").rstrip() if launch.flops else "",
        percent(launch.flops_fraction) if launch.flops else "",
        format_bytes(launch.num_bytes / launch.count),
        percent(launch.bandwidth_fraction),
    ]


def _host(step: Explanation) -> str:
    beside = "beside the device's" if step.host_overlaps else "before the device's"
    parts = [f"{format_seconds(step.host_s)}, {beside}", f"{format_seconds(step.unhidden_s)} after it"]
    if step.launch_s:
        parts.append(f"{format_seconds(step.launch_s)} to launch what no graph covers")
    return "; ".join(parts)


def totals_rows(step: Explanation) -> list[tuple[str, str]]:
    """Return the totals of a step: time, host, work, memory, KV cache."""
    memory, setup = step.memory, step.setup
    flops, num_bytes = sum(launch.flops for launch in step.launches), _memory_bytes(step)
    num_operators = sum(launch.count for launch in step.launches)
    rows = {
        "step": f"{format_seconds(step.step_s)}, as the simulator takes it; {_rate(step)}",
        "device": f"{format_seconds(step.device_s)} in {num_operators:,.0f} operators",
        "host": _host(step),
        "work": (
            f"{format_si(flops, 'FLOP')} ({format_si(flops / step.device_s, 'FLOP/s')}), "
            f"{format_bytes(num_bytes)} of memory ({format_si(num_bytes / step.device_s, 'B/s')}) on each device"
        ),
        "memory": (
            f"{format_bytes(memory.weight_bytes)} weights, {format_bytes(memory.activation_bytes)} activations, "
            f"{format_bytes(memory.reserved_bytes)} reserve, {format_bytes(memory.kv_cache_bytes)} KV cache "
            f"of {format_bytes(memory.device_bytes)} on each device"
        ),
        "KV cache": (
            f"{memory.kv_tokens:,} tokens of {format_bytes(memory.kv_bytes_per_token)}; "
            f"blocks of {memory.block_size}; max_num_seqs {setup.engine.max_num_seqs:,}"
        ),
    }
    return list(rows.items())


def _memory_bytes(step: Explanation) -> float:
    return sum(launch.num_bytes for launch in step.launches if not isinstance(launch.op, ops.Collective))


def _rate(step: Explanation) -> str:
    tokens = step.batch.num_tokens * step.setup.parallelism.attention_dp
    return f"{number(tokens / step.step_s)} tokens/s"
