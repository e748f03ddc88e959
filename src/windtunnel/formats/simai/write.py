"""Write SimAI workloads, byte for byte as AICB's generators do."""

from functools import cache

from windtunnel.formats.simai.schema import MICRO, SimaiWorkload, WorkloadLayer


def workload_text(workload: SimaiWorkload) -> str:
    """Return the file that holds `workload`, byte for byte as AICB's generators write it."""
    text_of = cache(_layer_line)
    body = ["".join(map(text_of, block.layers)) * block.repeats for block in workload.blocks]
    return "".join([f"{_header_line(workload)}\n{workload.num_layers}\n", *body])


def _header_line(workload: SimaiWorkload) -> str:
    header = workload.header
    if workload.policy == MICRO:
        return MICRO
    degrees = f"{workload.policy} model_parallel_NPU_group: {header.tp}"
    checkpoints = "checkpoints: 0 checkpoint_initiates: 0"
    if header.num_devices is None:
        return f"{degrees} {checkpoints}"
    degrees = f"{degrees} ep: {header.ep} pp: {header.pp}"
    loops = f"vpp: {header.vpp} ga: {header.num_microbatches}"
    devices = f"all_gpus: {header.num_devices}"
    tail = f"{checkpoints} pp_comm: {header.pp_comm_bytes or 0}"
    if header.inference:
        return f"{degrees} {devices} mode: 1 {loops} {tail}"
    return f"{degrees} {loops} {devices} {tail}"


def _layer_line(layer: WorkloadLayer) -> str:
    phases = (*layer.forward, *layer.input_gradient, *layer.weight_gradient)
    return "\t".join(map(str, (layer.name, -1, *phases, layer.update_ns))) + "\n"
