"""Options that several verbs of the network share: how it is simulated, and what of it has failed."""

from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.formats.simai.conf import read_simai_conf
from windtunnel.network.fabric import Fabric, without
from windtunnel.network.settings import BACKENDS, NetworkSettings, settings_from
from windtunnel.network.topology import fabric_of
from windtunnel.schema import encode


def network_settings(options: Options) -> NetworkSettings:
    """Return the settings of the options, over the fields of a SimAI.conf, over the defaults of `--compat`."""
    given = {name: value for name, value in options.of("network_settings").items() if value is not None}
    conf, backend = given.pop("conf", None), given.get("backend", "analytic")
    unused = next((name for name in ("routing", "send_latency", "seed") if name in given), None)
    if unused is not None and hasattr(BACKENDS.get(backend), "run_collective"):
        option = f"--{unused.replace('_', '-')}"
        raise InputError(f"{option} is for flows; the {backend} backend has none", "give --backend flow")
    if "send_latency" in given:
        given["send_latency_s"] = given.pop("send_latency")
    if conf is not None:
        given = {**encode(read_simai_conf(conf)), **given}
    return settings_from(given)


def fabric_with_failures(options: Options, topology: str) -> Fabric:
    """Return the fabric of a file, a type with parameters or a node, without what has failed."""
    return without(fabric_of(topology), tuple(map(_node_pair, options.fail_links)), options.fail_nodes)


def _node_pair(text: str) -> tuple[int, int]:
    first, dash, second = text.partition("-")
    if not (dash and first.isdecimal() and second.isdecimal()):
        raise InputError(f"--fail-link: {text!r} is not two node ids, as 0-128")
    return int(first), int(second)
