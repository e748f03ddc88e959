"""Find a fabric by its name: a file, a kind of topology with parameters, or a node of the catalog."""

from pathlib import Path
from typing import Any, get_args

import yaml

from windtunnel import catalog
from windtunnel.errors import InputError, did_you_mean
from windtunnel.network.fabric import Fabric
from windtunnel.network.topology import Topology, TopologyFile, build_fabric
from windtunnel.network.topology_file import read_topology
from windtunnel.schema import decode, parse_yaml, read_yaml

KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(Topology) if kind is not TopologyFile)
"""Kinds of topologies that can be built."""

_OTHER_NAMES = {"spectrumx": "spectrum_x", "alibabahpn": "alibaba_hpn", "hpn": "alibaba_hpn", "dcn": "dcn_plus"}
"""SimAI's name, in lower case and without signs -> kind."""


def fabric_of(text: str) -> Fabric:
    """Return the fabric that `text` means.

    Args:
        text: the path of a topology file in SimAI's format or of a YAML file; a kind with parameters
            (`spectrum_x:num_gpus=128,num_spines=8`); or a node of the catalog (`dgx_h100`, `dgx_h100:num_servers=4`).

    Raises:
        InputError: nothing is called that, or its parameters are wrong.
    """
    path = Path(text)
    if path.is_file():
        if path.suffix in (".yaml", ".yml"):
            return fabric_from(read_yaml(path), str(path))
        return read_topology(path)
    name, _, parameters = text.partition(":")
    if "/" in name:
        raise InputError(f"there is no file {text}")
    return fabric_from({"type": name, **_parameters(parameters, text)}, "")


def fabric_from(raw: Any, source: str) -> Fabric:
    """Return the fabric of a topology's fields; `type` may also be SimAI's name of it, or a node's.

    Raises:
        InputError: a field is wrong; names `source`.
    """
    if not isinstance(raw, dict) or "type" not in raw:
        raise InputError(f"{source or 'the topology'} has no type", f"one of: {', '.join(KINDS)}")
    plain = str(raw["type"]).lower().replace("-", "_").replace("+", "")
    kind = _OTHER_NAMES.get(plain.replace("_", ""), plain)
    raw = {**raw, "type": kind}
    if kind not in KINDS and kind != "file":
        otherwise = f"a file, a node of `windtunnel catalog nodes`, or one of: {', '.join(KINDS)}"
        nodes = catalog.names("nodes")
        if kind not in nodes:
            raise InputError(f"there is no topology {kind!r}", did_you_mean(kind, [*KINDS, *nodes], otherwise))
        raw |= {"type": "node", "node": kind}
    schema: Any = Topology
    return build_fabric(decode(raw, schema, source))


def _parameters(text: str, name: str) -> dict[str, Any]:
    """Read `a=1,b=[2,3]` as fields."""
    if not text:
        return {}
    try:
        values = parse_yaml("{" + text.replace("=", ": ") + "}")
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict) or None in values.values():
        raise InputError(f"{text!r} in {name!r} is not of the form name=value,...", "spectrum_x:num_gpus=128")
    return values
