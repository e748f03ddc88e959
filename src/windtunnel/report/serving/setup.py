"""Model, deployment and load in a line each; and the sources of operator times."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec

from windtunnel import catalog
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.sampling import GREEDY
from windtunnel.network.settings import ClusterNetwork
from windtunnel.network.topology import assumed_kinds
from windtunnel.report.layout import filled, layouts_beside
from windtunnel.report.numbers import formats, percent
from windtunnel.schema import encode, fields_of
from windtunnel.serving.deployment import Deployment
from windtunnel.serving.engines.contract import scheduler_of
from windtunnel.serving.engines.defaults import engine_defaults
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.setup.estimators import NVIDIA, sampler_kernel
from windtunnel.units import format_count, format_seconds
from windtunnel.workload.arrivals import Arrivals, ClosedLoop, RateCurve
from windtunnel.workload.client import CLIENT_TIMES, client_of
from windtunnel.workload.lengths import Fixed, Lengths
from windtunnel.workload.media import Images
from windtunnel.workload.schema import GREEDY_CLIENT, RequestSource, Workload

LAYOUT = layouts_beside(__file__)
SMALL_SHARE = 0.0005
"""Sources below this share of the device's time get no row."""


def model_line(setup: Setup) -> str:
    """Return model and formats: `meta-llama/Llama-3.1-70B, fp8 weights, bf16 KV cache`."""
    model, text = setup.model, formats(setup.precision)
    text = text.rpartition(", ")[0] if model.is_encoder else text
    name = f"{model.name} (by its name: {model.named_after})" if model.named_after else model.name
    name += f" (read like {model.architecture})" if model.unknown_type else ""
    return f"{name}, {text}"


def deployment_line(setup: Setup, replicas: int = 1, max_replicas: int | None = None) -> str:
    """Return devices, their split, engine and scheduler; with the range of replicas where it varies."""
    parallelism, engine = setup.parallelism, setup.engine
    copies = _replicas_text(replicas, max_replicas or replicas)
    how = split_text(parallelism)
    scheduler, title = scheduler_of(engine).title or engine.scheduler, engine_defaults(engine.name).title
    return f"{copies}{parallelism.num_devices} x {setup.device.title}{how}; {title} {engine.version}, {scheduler}"


def deployment_text(deployment: Deployment) -> str:
    """Return a deployment in the scenario's own words, without looking anything up: `4 x h100_sxm (TP 4); vllm`."""
    if deployment.pools:
        texts = []
        for pool in deployment.pools:
            each = (pool.parallelism or deployment.parallelism).num_devices
            numbers = sorted({pool.fewest_replicas * each, pool.most_replicas * each})
            texts.append(f"{pool.name}: {' to '.join(map(str, numbers))} x {pool.device or deployment.device}")
        return "; ".join(texts)
    parallelism, engine = deployment.parallelism, deployment.engine
    copies = _replicas_text(deployment.replicas, deployment.most_replicas)
    served_by = " ".join(filter(None, (engine.name, engine.version)))
    return f"{copies}{parallelism.num_devices} x {deployment.device}{split_text(parallelism)}; {served_by}"


def _replicas_text(fewest: int, largest: int) -> str:
    if largest <= 1:
        return ""
    return f"{fewest} to {largest} replicas of " if largest > fewest else f"{fewest} replicas of "


def split_text(parallelism: Parallelism) -> str:
    """Return the degrees of parallelism, ` (TP 4, PP 2)`; empty on a single device."""
    degrees = {
        "TP": parallelism.tp,
        "DCP": parallelism.dcp,
        "PP": parallelism.pp,
        "EP": parallelism.ep,
        "attention DP": parallelism.attention_dp,
        "FFN": 0 if parallelism.ffn is None else parallelism.ffn.devices,
    }
    ways = [f"{name} {degree}" for name, degree in degrees.items() if degree > (name != "FFN")]
    return f" ({', '.join(ways)})" if ways else ""


def network_lines(network: ClusterNetwork | None) -> list[str]:
    """Name the network between nodes, where the scenario or job has one."""
    if network is None:
        return []
    return [f"network between nodes: {network.topology or 'the nodes on rails'}, {network.backend} level"]


def network_notes(*setups: Setup) -> list[str]:
    """Return the notes on links between nodes whose kind decides what a replica's collectives take and is assumed."""
    decided = [each for each in setups if each.network is not None or each.device.vendor == NVIDIA]
    notes = (assumed_kinds(each.network, each.node, each.parallelism.num_devices) for each in decided)
    return list(dict.fromkeys(chain.from_iterable(notes)))


def sampling_document(setup: Setup) -> dict[str, Any]:
    """Document the sampling of requests, its source, and the kernel that filters by top-k and top-p, if one does."""
    sampling = setup.sampling
    kernel = sampler_kernel(setup) if sampling.keeps_top_k or sampling.keeps_top_p else None
    return {**encode(sampling), "text": sampling.text, "source": setup.sampling_source, "kernel": kernel}


def sampling_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row of the sampling, from its document; none for greedy benchmark clients."""
    if not document or (document["text"] == GREEDY.text and document["source"] == GREEDY_CLIENT):
        return []
    kernel = f" by {LAYOUT['sampling_kernels'][document['kernel']]}" if document["kernel"] else ""
    return [("sampling", f"{document['text']}{kernel} ({document['source']})")]


def client_document(setup: Setup) -> dict[str, Any]:
    """Document the client that is assumed: its title and its own times, and those of client and API server together."""
    return {
        "title": setup.client.title,
        **fields_of(setup.client, *CLIENT_TIMES),
        "with_server": fields_of(setup.frontend, *CLIENT_TIMES),
    }


def client_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row of the client, from its document; none for the one that stands for all others."""
    if not document or document["title"] == client_of(None).title:
        return []
    return [("client", f"{document['title']}: {format_seconds(document['first_token_s'])} of TTFT, at least")]


def load_line(scenario: Scenario, says_rate: bool = True) -> str:
    """Return a scenario's workload and seed; without the rate where that is sought."""
    return f"{workload_text(scenario.workload, says_rate)}; seed {scenario.seed}"


def workload_text(workload: Workload, says_rate: bool = True) -> str:
    """Describe a workload in a few words."""
    if workload.clients is not None:
        rate = f" at {workload.clients.rate_per_s:g}/s" if workload.clients.rate_per_s and says_rate else ""
        return f"the clients of {workload.clients.path}{rate}"
    if workload.tenants and not all(tenant.is_label for tenant in workload.tenants):
        names = ", ".join(tenant.name for tenant in workload.tenants)
        shared = f"{arrivals_text(workload.arrivals, says_rate)}, " if workload.arrivals else ""
        return f"{shared}{format_count(len(workload.tenants), 'tenant')}: {names}"
    parts = [_streams_text(workload, says_rate)]
    if workload.sessions is not None:
        parts.append("sessions of several turns" + (" with tool calls" if workload.sessions.tool_calls else ""))
    if workload.shared_prompts is not None:
        count = workload.shared_prompts.count
        parts.append("a shared prompt" if count == 1 else f"{count:,} shared prompts")
    if workload.is_pooling:
        parts.append("embeddings" if workload.task == "embed" else f"scores of {workload.documents:,} documents each")
    if workload.adapters is not None:
        parts.append(f"{format_count(workload.adapters.count, 'LoRA adapter')}, {workload.adapters.popularity}")
    return ", ".join([*parts, *_media_texts(workload)])


def _media_texts(workload: Workload) -> Iterator[str]:
    """Yield the images and the videos of a workload in a few words each."""
    *of_images, of_video = workload.media_tokens or (0, 0)
    for name, media in (("image", workload.images), ("video", workload.videos)):
        if media is None:
            continue
        number = format_count(media.count, name) if isinstance(media.count, int) else f"{name}s"
        if isinstance(media, Images) and media.sizes:
            yield f"{number} of {len(media.sizes)} sizes ({', '.join(f'{tokens:,}' for tokens in of_images)} tokens)"
        else:
            tokens = of_images[0] if isinstance(media, Images) else of_video
            yield f"{number} of {media.width} x {media.height} ({tokens:,} tokens each)"
        if isinstance(media, Images) and media.distinct is not None:
            yield f"drawn from {media.distinct:,} images"


def _streams_text(requests: RequestSource, says_rate: bool) -> str:
    trace = catalog.other_names("traces").get(requests.trace.path, requests.trace.path) if requests.trace else None
    parts = [arrivals_text(requests.arrivals, says_rate) if requests.arrivals else f"arrivals of {trace}"]
    if requests.total_tokens is not None:
        return f"{parts[0]}, {lengths_text(requests.total_tokens)} in and out, {requests.input_to_output_ratio:g} to 1"
    streams = {"in": requests.input_tokens, "out": requests.output_tokens}
    for name, tokens in streams.items() if not requests.is_pooling else (("in", requests.input_tokens),):
        parts.append(f"{lengths_text(tokens)} {name}" if tokens is not None else f"{name}put of {trace}")
    if trace is not None and requests.input_tokens is None and requests.output_tokens is None:
        parts[1:] = [f"lengths of {trace}"] if requests.arrivals else []
        parts[0] = parts[0] if requests.arrivals else f"replaying {trace}"
    return ", ".join(parts)


def arrivals_text(arrivals: Arrivals, says_rate: bool = True) -> str:
    """Describe arrivals in a few words."""
    known = msgspec.structs.asdict(arrivals)
    if isinstance(arrivals, RateCurve):
        rates = [point.rate_per_s * arrivals.scale for point in arrivals.points]
        known |= {"lowest_per_s": min(rates), "highest_per_s": max(rates)}
    if isinstance(arrivals, ClosedLoop):
        known["uneven_cv"] = arrivals.cv if arrivals.cv != 1 else None
    if not says_rate:
        known |= dict.fromkeys(("rate_per_s", "concurrency", "lowest_per_s"))
    return filled(LAYOUT["arrivals"][arrivals.__struct_config__.tag], known)


def lengths_text(tokens: Lengths) -> str:
    """Describe a distribution of lengths in a few words."""
    if isinstance(tokens, int | Fixed):
        return format_count(tokens if isinstance(tokens, int) else tokens.tokens, "token")
    return filled(LAYOUT["lengths"][tokens.__struct_config__.tag], tokens)


def provenance_rows(coverage: dict[str, float], sources: dict[str, float]) -> list[tuple[str, str]]:
    """Return the sources of operator times: by method, and by table with its share of the device's time.

    Args:
        coverage, sources: shares of the device's time, at most 1.
    """
    methods = ", ".join(f"{percent(share)} {how}" for how, share in coverage.items())
    rows = [(percent(share), source) for source, share in sources.items() if share >= SMALL_SHARE]
    return [("found", methods), *rows]
