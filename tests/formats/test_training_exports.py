"""One graph, several formats: each holds the same communication, and that is what closed forms say it is."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.formats.aicb.csv_records import read_records, records_text
from windtunnel.formats.aicb.job import training_records
from windtunnel.formats.chakra.trace import ChakraCollective, ChakraKind, ChakraTrace, read_trace, value_of
from windtunnel.formats.chakra.training import GroupNames, training_traces, write_training_traces
from windtunnel.formats.simai.training import left_out, training_workload
from windtunnel.formats.simai.workload import SimaiWorkload, meaning, read_workload, workload_text
from windtunnel.model.operators import Collective as CollectiveOp
from windtunnel.schema import decode
from windtunnel.training.job import TrainingJob
from windtunnel.training.layers.chunks import chunk_parameters, chunks
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Rank
from windtunnel.training.program import device_program
from windtunnel.training.setup import TrainingSetup, resolve

HIDDEN = 1024


def model_of(feed_forward: dict[str, Any], attention: dict[str, Any] | None = None) -> dict[str, Any]:
    """Eight layers, so that a test is quick; what they are made of is that of a real model."""
    grouped = {"type": "grouped_query", "num_heads": 16, "num_kv_heads": 8, "head_dim": 64}
    return {
        "name": "small",
        "hidden_size": HIDDEN,
        "vocab_size": 8000,
        "max_context_tokens": 4096,
        "layers": [{"num_layers": 8, "attention": attention or grouped, "feed_forward": feed_forward}],
    }


DENSE = model_of({"type": "dense", "intermediate_size": 2816})
EXPERTS = model_of({"type": "experts", "num_experts": 8, "experts_per_token": 2, "intermediate_size": 1536})
LATENT = model_of(
    {
        "type": "experts",
        "num_experts": 8,
        "experts_per_token": 2,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
    },
    {
        "type": "latent",
        "num_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
)


def setup_of(model: dict[str, Any] = DENSE, **fields: Any) -> TrainingSetup:
    job = {"model": model, "device": "h100_sxm", "sequence_tokens": 4096, "global_batch": 16, **fields}
    return resolve(decode(job, TrainingJob))


def micro(task: Task) -> float:
    """A price that needs no tables: one microsecond for every operator."""
    return 1e-6 * task.count


def in_program(setup: TrainingSetup, device: int = 0) -> Counter[tuple[str, str]]:
    """(group, operation) -> bytes of a device's step."""
    sizes: Counter[tuple[str, str]] = Counter()
    for action in device_program(setup, device):
        for task in action.tasks:
            if isinstance(task.op, CollectiveOp) and task.name != "gradient_norm_all_reduce":
                sizes[str(task.group), task.op.op] += round(float(task.op.message_bytes) * task.count)
    return sizes


def in_workload(workload: SimaiWorkload) -> Counter[tuple[str, str]]:
    sizes: Counter[tuple[str, str]] = Counter()
    for layer in workload.layers():
        for phase, is_weight in ((layer.forward, False), (layer.input_gradient, False), (layer.weight_gradient, True)):
            said = meaning(phase.collective, is_weight)
            if said:
                sizes[{"dp_ep": "experts_dp"}.get(said[1], said[1]), said[0]] += phase.size_bytes
    return sizes


degrees = st.sampled_from([1, 2, 4])


@pytest.mark.full
@settings(max_examples=25)
@given(degrees, degrees, degrees, st.booleans(), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_dense_communication_equals_its_closed_forms(
    tp: int, pp: int, dp: int, split: bool, virtual_stages: int, micro_batch: int
) -> None:
    virtual_stages = virtual_stages if pp > 1 else 1
    setup = setup_of(
        micro_batch=micro_batch,
        global_batch=16 * micro_batch,
        parallelism={"tp": tp, "pp": pp, "dp": dp, "sequence_parallel": split, "virtual_stages": virtual_stages},
    )
    m = 16 // dp
    full_bytes = 2 * micro_batch * 4096 * HIDDEN  # bytes of a micro-batch of hidden states, T
    for device in range(pp):
        sizes = in_program(setup, device)
        first, last = device == 0, device == pp - 1
        layers = 8 // pp
        parameters = sum(chunk_parameters(Rank(setup), c).total for c in chunks(setup) if c.stage == device)
        if tp == 1:
            assert not any(group == "tp" for group, _ in sizes)
        elif split:
            # A layer: 2 AG and 2 RS forward, 2 AG and 2 RS backward, 2 AG of kept inputs. Embedding: RS, AG. Head: AG,
            # then RS and AG. Norms: one AR of 2 h fp32 gradients a layer.
            assert sizes["tp", "all_gather"] == m * full_bytes * (6 * layers + first + 2 * last)
            assert sizes["tp", "reduce_scatter"] == m * full_bytes * (4 * layers + first + last)
            norms = 2 * HIDDEN * 4 * layers
        else:
            # Two AR forward and two backward; the embedding's forward, the head's backward.
            entropy = 3 * 4 * micro_batch * 4096 * last
            assert sizes["tp", "all_reduce"] == m * (full_bytes * (4 * layers + first + last) + entropy)
        if split and tp > 1:
            assert sizes["tp", "all_reduce"] == m * 3 * 4 * micro_batch * 4096 * last + norms
        if dp > 1:
            assert sizes["dp", "reduce_scatter"] == pytest.approx(4 * parameters, abs=64)
            assert sizes["dp", "all_gather"] == pytest.approx(2 * parameters, abs=64)
        messages = [m for a in device_program(setup, device) for m in (a.receives, a.sends) if m]
        # Each chunk of a device sends and receives at both of its ends, but at the ends of the pipeline.
        assert len(messages) == 2 * m * (2 * virtual_stages - first - last) * (pp > 1)
        assert all(message.size_bytes == full_bytes / (tp if split else 1) for message in messages)


@settings(max_examples=10)
@given(st.sampled_from([1, 2]), st.sampled_from([2, 4, 8]), st.sampled_from([8, 16]))
def test_expert_communication_equals_its_closed_forms(tp: int, ep: int, dp: int) -> None:
    setup = setup_of(EXPERTS, parallelism={"tp": tp, "dp": dp, "ep": ep, "experts_tp": 1})
    sizes = in_program(setup)
    tokens = 4096 // tp  # with sequence parallelism every rank routes its own part
    m, topk, layers = 16 // dp, 2, 8
    # Dispatch and combine, forward and backward.
    assert sizes["ep", "all_to_all"] == m * layers * 4 * 2 * tokens * topk * HIDDEN
    experts = layers * 8 // ep * 3 * HIDDEN * 1536
    experts_dp = tp * dp // ep
    if experts_dp > 1:
        assert sizes["experts_dp", "reduce_scatter"] == 4 * experts
        assert sizes["experts_dp", "all_gather"] == 2 * experts


JOBS: dict[str, dict[str, Any]] = {
    "dense": {"parallelism": {"tp": 2, "pp": 2, "dp": 4}},
    "interleaved": {"parallelism": {"tp": 2, "pp": 2, "dp": 2, "virtual_stages": 2}},
    "late reduction": {"parallelism": {"tp": 2, "dp": 8}, "overlap": {"gradient_reduce": False}},
    "all recomputed": {"parallelism": {"tp": 2, "dp": 8}, "recompute": {"granularity": "full"}},
    "no sequence parallelism": {"parallelism": {"tp": 4, "dp": 4, "sequence_parallel": False}},
    "one rank a model": {"parallelism": {"dp": 16}},
    "experts": {"model": EXPERTS, "parallelism": {"tp": 2, "dp": 8, "ep": 4}},
    "shared experts' ranks": {"model": EXPERTS, "parallelism": {"tp": 2, "dp": 8, "ep": 4, "experts_tp": 2}},
    "latent attention": {"model": LATENT, "parallelism": {"dp": 8, "ep": 8}},
}


@pytest.mark.parametrize("name", JOBS)
def test_simai_workloads_hold_the_graphs_bytes(name: str, tmp_path: Path) -> None:
    setup = setup_of(**JOBS[name])
    for device in range(setup.degrees.pp):
        workload = training_workload(setup, micro, device)
        program = in_program(setup, device)
        shared = Counter({("tp" if group == "experts_tp" else group, op): 0 for group, op in program})
        for (group, op), size in program.items():
            shared["tp" if group == "experts_tp" else group, op] += size
        assert in_workload(workload) == shared
        path = tmp_path / f"{device}.txt"
        path.write_text(workload_text(workload))
        assert list(read_workload(path).layers()) == list(workload.layers())
        assert workload.header.num_devices == setup.degrees.num_devices
        assert workload.header.vpp == setup.degrees.virtual_stages


def test_simai_times_are_the_graphs() -> None:
    setup = setup_of(**JOBS["all recomputed"])
    layers = list(training_workload(setup, micro).layers())
    workload = sum(
        p.compute_ns for layer in layers for p in (layer.forward, layer.input_gradient, layer.weight_gradient)
    )
    program = sum(micro(task) for action in device_program(setup, 0) for task in action.tasks if task.group is None)
    assert workload == pytest.approx(program * 1e9, rel=1e-6)


@pytest.mark.parametrize("name", JOBS)
def test_aicb_lists_hold_the_graphs_bytes(name: str, tmp_path: Path) -> None:
    setup = setup_of(**JOBS[name])
    names = {"tp_group": "tp", "dp_group": "dp", "ep_group": "ep", "ep_dp_group": "experts_dp"}
    for device in range(setup.degrees.pp):
        records = training_records(setup, device)
        sizes: Counter[tuple[str, str]] = Counter()
        for record in records.records():
            if (
                record.kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
                and "gradient_norm" not in record.stage
            ):
                assert isinstance(record.size, int)
                sizes[names[str(record.group)], record.kind] += record.size
        program = in_program(setup, device)
        shared: Counter[tuple[str, str]] = Counter()
        for (group, op), size in program.items():
            shared["tp" if group == "experts_tp" else group, op] += size
        assert sizes == shared
        path = tmp_path / f"{device}.csv"
        path.write_text(records_text([records]))
        assert [list(message.records()) for message in read_records(path)] == [list(records.records())]


def test_messages_of_a_pipeline_meet_in_aicb_lists() -> None:
    setup = setup_of(**JOBS["dense"])
    first, second = (
        Counter(record.additional for record in training_records(setup, device).records() if record.additional)
        for device in (0, 1)
    )
    assert first == {"send_next": 4, "recv_next": 4}
    assert second == {"recv_prev": 4, "send_prev": 4}


def traces_of(setup: TrainingSetup) -> tuple[dict[int, ChakraTrace], GroupNames]:
    names: GroupNames = {}
    return dict(training_traces(setup, micro, names)), names


ALL_JOBS = {
    **JOBS,
    "context parallelism": {"parallelism": {"cp": 4, "dp": 2}},
    "sharded parameters": {"parallelism": {"dp": 4}, "framework": "fsdp2"},
    "dualpipe": {"parallelism": {"pp": 2}, "schedule": "dualpipe"},
}


@pytest.mark.parametrize(
    "name", ["dense", "interleaved", "experts", "context parallelism", "sharded parameters", "dualpipe"]
)
def test_chakra_traces_run_to_their_end(name: str) -> None:
    traces, names = traces_of(setup_of(**ALL_JOBS[name]))
    ranks_of = {number: ranks for ranks, number in names.items()}
    done: dict[int, set[int]] = {rank: set() for rank in traces}
    waiting = {rank: list(trace.nodes) for rank, trace in traces.items()}
    sent: Counter[tuple[Any, ...]] = Counter()
    arrived: dict[tuple[Any, ...], dict[int, int]] = {}
    # Collectives of a group start in the order of each member's trace; every member must come to the same ones.
    moved = True
    while moved:
        moved = False
        for rank, nodes in waiting.items():
            left = []
            for node in nodes:
                if not set(node.data_dependencies) <= done[rank]:
                    left.append(node)
                    continue
                if node.kind == ChakraKind.RECEIVE:
                    key = tuple(value_of(node, part) for part in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                    if not sent[key]:
                        left.append(node)
                        continue
                    sent[key] -= 1
                elif node.kind == ChakraKind.SEND:
                    sent[tuple(value_of(node, part) for part in ("comm_src", "comm_dst", "comm_tag", "comm_size"))] += 1
                elif node.kind == ChakraKind.COLLECTIVE:
                    group = str(value_of(node, "pg_name"))
                    key = (
                        group,
                        node.name,
                        value_of(node, "phase"),
                        value_of(node, "microbatch"),
                        value_of(node, "chunk"),
                        value_of(node, "comm_size"),
                    )
                    counts = arrived.setdefault(key, dict.fromkeys(ranks_of[group], 0))
                    counts[rank] += 1
                done[rank].add(node.id)
                moved = True
            waiting[rank] = left
    assert not any(waiting.values())
    assert not +sent
    for counts in arrived.values():
        assert len(set(counts.values())) == 1


def test_chakra_sizes_are_what_astra_sim_counts() -> None:
    setup = setup_of(**JOBS["dense"])
    traces, names = traces_of(setup)
    ranks_of = {number: ranks for ranks, number in names.items()}
    operations = {
        ChakraCollective.ALL_REDUCE: "all_reduce",
        ChakraCollective.ALL_GATHER: "all_gather",
        ChakraCollective.REDUCE_SCATTER: "reduce_scatter",
    }
    sizes: Counter[str] = Counter()
    for node in traces[0].nodes:
        if node.kind == ChakraKind.COLLECTIVE and value_of(node, "pg_name") != "0":
            kind = ChakraCollective(int(str(value_of(node, "comm_type"))))
            share = len(ranks_of[str(value_of(node, "pg_name"))]) if kind is ChakraCollective.ALL_GATHER else 1
            sizes[operations[kind]] += int(str(value_of(node, "comm_size"))) * share
    expected: Counter[str] = Counter()
    for (_, op), size in in_program(setup).items():
        expected[op] += size
    assert sizes == expected


def test_chakra_durations_add_up_to_a_microsecond() -> None:
    traces = dict(training_traces(setup_of(**JOBS["dense"]), lambda task: 0.3e-6 * task.count))
    nodes = [node for node in traces[0].nodes if node.kind == ChakraKind.COMPUTE]
    exact_us = sum(int(str(value_of(node, "exact_ns"))) for node in nodes) / 1000
    assert sum(node.duration_us for node in nodes) == pytest.approx(exact_us, abs=1 + 0.0005 * len(nodes))


def test_chakra_files_are_written_for_every_rank(tmp_path: Path) -> None:
    setup = setup_of(parallelism={"tp": 2, "dp": 2}, global_batch=2)
    written = write_training_traces(setup, micro, tmp_path / "job")
    assert [path.name for path in written] == [*(f"job.{rank}.et" for rank in range(4)), "job.groups.json"]
    groups = json.loads((tmp_path / "job.groups.json").read_text())
    assert sorted(groups.values()) == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert read_trace(written[3]) == dict(training_traces(setup, micro))[3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallelism": {"cp": 2, "dp": 8}}, "no group for context parallelism"),
        ({"parallelism": {"dp": 16}, "framework": "fsdp2"}, "ZeRO-3"),
        ({"parallelism": {"pp": 2}, "schedule": "dualpipe"}, "DualPipe both"),
        ({"parallelism": {"dp": 16}, "sharding": {"group": 4}}, "replicas"),
        (
            {"model": EXPERTS, "parallelism": {"tp": 4, "dp": 4, "ep": 2, "experts_tp": 2}},
            "experts_tp = 2 beside tp = 4",
        ),
    ],
)
def test_what_simai_has_no_word_for_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        training_workload(setup_of(**fields), micro)
    if "group for context" in message or message == "replicas":
        with pytest.raises(InputError, match="AICB's lists have no name for the group"):
            training_records(setup_of(**fields))


def test_what_simai_leaves_out_is_told() -> None:
    tied = setup_of(DENSE | {"tie_word_embeddings": True}, **JOBS["dense"])
    told = left_out(tied)
    assert told[0].startswith(f"embedding_gradient_all_reduce, {8000 * HIDDEN // 2 * 4:,} bytes over 2 ranks")
    assert in_workload(training_workload(tied, micro)) == in_program(tied) - Counter(
        {("embedding", "all_reduce"): 8000 * HIDDEN // 2 * 4}
    )


def test_a_pipeline_device_that_is_not_there() -> None:
    for export in (lambda setup: training_workload(setup, micro, 2), lambda setup: training_records(setup, 2)):
        with pytest.raises(InputError, match="devices 0 to 1; there is no device 2"):
            export(setup_of(**JOBS["dense"]))
