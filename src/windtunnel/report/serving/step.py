"""One forward step, operator by operator."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from windtunnel.model import operators as ops
from windtunnel.report.layout import filled, layouts_beside, rows_of, table_of
from windtunnel.report.numbers import shares_of, words
from windtunnel.report.render.json import version
from windtunnel.report.report import Bars, Facts, OnPage, Report, Section, Table
from windtunnel.report.serving import setup as setup_text
from windtunnel.report.serving.run import memory_document
from windtunnel.schema import encode, fields_of, plain
from windtunnel.serving.explain import ExplainedLaunch, Explanation
from windtunnel.serving.setup.overlap import PingPong
from windtunnel.units import format_seconds

BEYOND = 1.005
"""Rates above this share of a peak, which is published with three digits, are remarked on."""
LAYOUT = layouts_beside(__file__)


def step_document(step: Explanation) -> dict[str, Any]:
    """Document one explained step."""
    setup = step.setup
    return {
        "windtunnel": version(),
        "model": setup.model.name,
        "device": setup.device.name,
        "node": setup.node.name,
        "parallelism": {name: value for name, value in plain(setup.parallelism).items() if value is not None},
        "precision": msgspec.structs.asdict(setup.precision),
        "engine": encode(setup.engine),
        "sampling": setup_text.sampling_document(setup),
        **({"pool": step.pool} if step.pool else {}),
        "batch": asdict(step.batch),
        **fields_of(step, "num_computed_tokens", "device_s", "host_s", "host_overlaps"),
        **fields_of(step, "launch_s", "unhidden_s", "step_s", "bound_by"),
        "seconds_by_kind": step.seconds_by(lambda launch: launch.family),
        "seconds_by_bound": step.seconds_by(lambda launch: launch.bound_by),
        "seconds_by_coverage": step.seconds_by(lambda launch: launch.coverage.value),
        "seconds_by_source": step.seconds_by(lambda launch: launch.source),
        "operators": [_operator_document(launch) for launch in step.launches],
        **(
            {"encoder_s": step.encoder_s, "encoder": list(map(_operator_document, step.encoder))}
            if step.encoder
            else {}
        ),
        **({"sides": sides_document(step.sides)} if step.sides is not None else {}),
        **({"hidden_s": step.hidden_s} if step.hidden_s else {}),
        "memory": memory_document(step.memory),
    }


def sides_document(sides: PingPong) -> dict[str, Any]:
    """Document a layer of one micro-batch on both sides, and the share of the step for which each computes."""
    attention_s, ffn_s = (float(side_s) / float(sides.step_s) for side_s in sides.busy_s)
    return {
        **{name: float(getattr(sides, name)) for name in ("attention_s", "ffn_s", "hop_s")},
        "microbatches": int(sides.microbatches),
        "num_layers": sides.num_layers,
        "attention_busy_fraction": attention_s,
        "ffn_busy_fraction": ffn_s,
        "bound_by": sides.bound_by,
    }


def _operator_document(launch: ExplainedLaunch) -> dict[str, Any]:
    return {
        "name": launch.name,
        "kind": launch.op.kind,
        "shape": asdict(launch.op),
        **fields_of(launch, "count", "each_s", "total_s", "flops", "num_bytes"),
        **fields_of(launch, "flops_fraction", "bandwidth_fraction", "bound_by"),
        "coverage": launch.coverage.value,
        "source": launch.source,
    }


def step_report(step: Explanation) -> Report:
    """Return the report of a step: its operators in the order of a layer, their sums, and where times come from."""
    lead = [setup_text.deployment_line(step.setup), *setup_text.network_lines(step.setup.network), batch_line(step)]
    headline = headline_of(step_document(step))
    return Report(setup_text.model_line(step.setup), lead, step_sections(step), verdict=headline)


def headline_of(document: Mapping[str, Any]) -> str:
    """Say how long a step takes and what bounds it, from its document."""
    pool = f" of the pool {document['pool']}" if document.get("pool") else ""
    return f"A step{pool} takes {format_seconds(document['step_s'])}, bound by {words(document['bound_by'])}."


def step_sections(step: Explanation) -> list[Section]:
    """Return the sections of a step's report."""
    document = step_document(step)
    sources = [shares_of(document[f"seconds_by_{name}"], has_words=False) for name in ("coverage", "source")]
    shares = {operator["name"]: operator["total_s"] / document["device_s"] for operator in document["operators"]}
    encoder_heading = f"An image or video adds {format_seconds(step.encoder_s)} to the step that begins it"
    return [
        Section(
            "",
            [
                OnPage(lambda: [Bars(shares, "The device's time by operator", document["device_s"])]),
                time_table(document["operators"]),
                table_of(map(_work, step.launches), LAYOUT["work"], left=2),
                Facts([*rows_of(_totals(step), LAYOUT["totals"]), *setup_text.sampling_rows(document["sampling"])]),
            ],
            heading="Operators",
        ),
        Section(
            f"Where the device's time goes: bound by {step.bound_by}",
            [
                Bars(shares_of(document["seconds_by_bound"], has_words=False), "By what bounds it"),
                Bars(shares_of(document["seconds_by_kind"]), "By kind of operator"),
            ],
        ),
        *([Section(encoder_heading, [time_table(document["encoder"])])] if step.encoder else []),
        Section("Where the operator times come from", [Facts(setup_text.provenance_rows(*sources))]),
    ]


def time_table(operators: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of operators' times, from their documents."""
    total_s = sum(operator["total_s"] for operator in operators)
    rows = [{**operator, "share_fraction": operator["total_s"] / total_s} for operator in operators]
    return table_of(rows, LAYOUT["times"])


def batch_line(step: Explanation) -> str:
    """Describe the batch of a step."""
    batch, ranks, speculative = step.batch, step.setup.parallelism.attention_dp, step.setup.engine.speculative
    drafts = 0 if speculative is None else speculative.num_draft_tokens
    given_tokens = batch.num_tokens + drafts * batch.decode_requests
    known = {
        **asdict(batch),
        "num_ranks": ranks if ranks > 1 else None,
        "and": " and " if batch.decode_requests and batch.prefill_tokens else "",
        "cached": batch.prefill_tokens and batch.prefill_pairs / batch.prefill_tokens - 0.5 * batch.prefill_tokens,
        "drafts": drafts if batch.decode_requests and drafts else None,
        "padded": None if step.sides or step.num_computed_tokens == given_tokens else step.num_computed_tokens,
    }
    return filled(LAYOUT["batch"], known)


def _work(launch: ExplainedLaunch) -> dict[str, Any]:
    """Return the work of one run of an operator; without FLOPs their share is unknown."""
    return {
        **fields_of(launch, "name", "op", "bandwidth_fraction"),
        "flops": launch.flops / launch.count if launch.flops else None,
        "flops_fraction": launch.flops_fraction if launch.flops else None,
        "num_bytes": launch.num_bytes / launch.count,
    }


def _totals(step: Explanation) -> dict[str, Any]:
    """Return the totals of a step: time, host, work of a pipeline stage, memory, KV cache."""
    batch, setup, stages = step.batch, step.setup, step.setup.parallelism.pp
    gained = 1.0 if setup.engine.speculative is None else setup.engine.speculative.tokens_per_step
    tokens = (gained * batch.decode_requests + batch.prefill_tokens) * setup.parallelism.attention_dp
    flops = sum(launch.flops for launch in step.launches)
    beyond = [launch.name for launch in step.launches if max(launch.flops_over_peak, launch.bytes_over_peak) > BEYOND]
    num_bytes = sum(launch.num_bytes for launch in step.launches if not isinstance(launch.op, ops.Collective))
    return {
        **fields_of(step, "step_s", "device_s", "host_s", "unhidden_s", "launch_s", "memory"),
        "hidden_s": step.hidden_s or None,
        "tokens_per_s": tokens / step.step_s,
        "num_operators": sum(launch.count for launch in step.launches),
        "order": "beside" if step.host_overlaps else "before",
        "num_stages": stages if stages > 1 else None,
        "flops": flops / stages,
        "flops_per_s": flops / step.device_s,
        "num_bytes": num_bytes / stages,
        "bytes_per_s": num_bytes / step.device_s,
        "beyond": ", ".join(beyond) or None,
        "max_num_seqs": step.setup.engine.max_num_seqs,
        **({} if step.sides is None else {"sides": sides_document(step.sides)}),
    }
