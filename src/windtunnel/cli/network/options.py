"""Options that several verbs of the network share: how it is simulated, and what of it has failed."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.network.fabric import Fabric
    from windtunnel.network.settings import NetworkSettings


class NetworkOptions(NamedTuple):
    """Options that become `NetworkSettings`."""

    backend: str | None
    routing: str | None
    compat: str | None
    conf: Path | None
    send_latency: str | None
    seed: int | None

    def settings(self) -> "NetworkSettings":
        """Return these options, over the fields of a SimAI.conf, over the defaults of `compat`."""
        from windtunnel.network.settings import BACKENDS, settings_from

        given = {name: value for name, value in self._asdict().items() if name != "conf" and value is not None}
        backend = given.get("backend", "analytic")
        unused = next((name for name in ("routing", "send_latency", "seed") if name in given), None)
        if unused is not None and hasattr(BACKENDS.get(backend), "run_collective"):
            option = f"--{unused.replace('_', '-')}"
            raise InputError(f"{option} is for flows; the {backend} backend has none", "give --backend flow")
        if "send_latency" in given:
            given["send_latency_s"] = given.pop("send_latency")
        if self.conf is not None:
            from windtunnel.formats.simai.conf import read_simai_conf
            from windtunnel.schema import encode

            given = {**encode(read_simai_conf(self.conf)), **given}
        return settings_from(given)


class Failures(NamedTuple):
    """Links and switches that have failed."""

    fail_links: tuple[str, ...]
    fail_nodes: tuple[int, ...]

    def fabric(self, topology: str) -> "Fabric":
        """Return the fabric of a file, a type with parameters or a node, without what has failed."""
        from windtunnel.network.fabric import without
        from windtunnel.network.named_fabrics import fabric_of

        return without(fabric_of(topology), tuple(_node_pair(text) for text in self.fail_links), self.fail_nodes)


def _node_pair(text: str) -> tuple[int, int]:
    first, dash, second = text.partition("-")
    if not (dash and first.isdecimal() and second.isdecimal()):
        raise InputError(f"--fail-link: {text!r} is not two node ids, as 0-128")
    return int(first), int(second)
