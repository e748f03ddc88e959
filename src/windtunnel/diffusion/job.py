"""A diffusion job: a model, what it makes, and the devices that make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from windtunnel import catalog
from windtunnel.diffusion.model import HINT, DiffusionModel, diffusion_model
from windtunnel.diffusion.operators import Share
from windtunnel.errors import InputError
from windtunnel.hardware import Device, Node, check_node, check_reach
from windtunnel.schema import AtLeastOne, NonNegative, Positive, Schema, decode, encode


class SequenceParallelism(Schema):
    """How devices divide one batch: the sequence by Ulysses and rings (USP, arXiv:2405.07719), guidance by passes."""

    ulysses: AtLeastOne = 1
    """Devices that exchange heads for tokens (DeepSpeed-Ulysses, arXiv:2309.14509)."""
    ring: AtLeastOne = 1
    """Devices that pass keys and values round (Ring Attention, arXiv:2310.01889)."""
    cfg: Literal[1, 2] = 1
    """2: one half of the devices computes the pass with the prompt, the other the pass without."""

    @property
    def num_devices(self) -> int:
        return self.ulysses * self.ring * self.cfg


class DiffusionJob(Schema, kw_only=True):
    """What to make and on what; None takes the model's own size, frames and steps."""

    kind: Literal["diffusion"] = "diffusion"
    model: str | dict[str, Any]
    device: str
    node: str | None = None
    height: AtLeastOne | None = None
    width: AtLeastOne | None = None
    frames: AtLeastOne | None = None
    steps: AtLeastOne | None = None
    batch: AtLeastOne = 1
    """Images or videos that are made together."""
    guidance: bool | None = None
    """Whether a step runs the passes of classifier-free guidance; None: as the model is used."""
    parallelism: SequenceParallelism = SequenceParallelism()
    attention: Literal["flash2", "flash3"] = "flash2"
    """FlashAttention 2, whose matrix instructions are those of Ampere on every later device, or a kernel that is
    written for the device."""
    efficiency: Positive | None = None
    """Speed of the kernels against the closed forms; None: as fitted on its architecture."""
    host_us: NonNegative | None = None
    """Host time of one launch in eager PyTorch; 0: CUDA graphs. None: as fitted."""
    price_usd_per_hour: Positive | None = None
    """Of one device; None takes the catalog's list price."""
    limit_s: Positive | None = None
    """Longest time of a batch; a search passes over slower points."""


@dataclass(frozen=True)
class DiffusionSetup:
    """A job with its names resolved and its gaps filled."""

    job: DiffusionJob
    model: DiffusionModel
    device: Device
    node: Node
    image_tokens: int

    @property
    def passes(self) -> int:
        return 2 if self.model.guidance != "none" and self.job.guidance is not False else 1

    @property
    def sequential_passes(self) -> int:
        """Forward passes that a device runs one after the other."""
        is_apart = self.model.guidance == "sequential" and self.job.parallelism.cfg == 1
        return self.passes if is_apart else 1

    @property
    def share(self) -> Share:
        """What one device computes of a forward pass."""
        split = self.job.parallelism
        rows = self.job.batch * self.passes // self.sequential_passes // split.cfg
        return Share(rows, self.image_tokens, self.model.text_tokens, split.ulysses, split.ring)


def job_from(raw: Mapping[str, Any], where: str = "") -> DiffusionJob:
    """Decode a job; InputError where a key is wrong."""
    return decode(dict(raw), DiffusionJob, where)


def resolve(job: DiffusionJob) -> DiffusionSetup:
    """Look up the model, device and node, fill the gaps from the model, and check that they go together.

    Raises:
        InputError: a name is unknown, or the job cannot be split so.
    """
    model, device = diffusion_model(job.model), catalog.device(job.device)
    node = catalog.node(job.node) if job.node else catalog.default_node(device)
    check_node(node, device)
    sizes = {name: getattr(job, name) or getattr(model, name) for name in ("height", "width", "frames", "steps")}
    filled = decode({**encode(job), **sizes}, DiffusionJob)
    tokens = model.latent_tokens(sizes["height"], sizes["width"], sizes["frames"])
    split = job.parallelism
    check_reach(node, split.num_devices, "the job")
    if split.num_devices > node.num_devices:
        raise InputError(
            f"the job needs {split.num_devices} devices; {node.name} has {node.num_devices}",
            "diffusion jobs are predicted within a node: lower ulysses, ring or cfg",
        )
    if model.num_heads % split.ulysses:
        raise InputError(
            f"ulysses is {split.ulysses}, which does not divide the {model.num_heads} heads of {model.name}",
            "lower ulysses and raise ring",
        )
    setup = DiffusionSetup(filled, model, device, node, tokens)
    if job.guidance and model.guidance == "none":
        raise InputError(f"guidance is true, but {model.name} is distilled to one pass", "leave guidance out")
    if split.cfg > setup.passes:
        raise InputError(f"cfg is 2, but a step of {model.name} has one pass", f"leave cfg out; {HINT}")
    return setup
