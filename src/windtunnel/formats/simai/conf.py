"""Read `SimAI.conf`: one `KEY value` a line, for SimAI's ns-3 backend.

Format: `ReadConf` in SimAI 1.6's `network_frontend/ns3/common.h`. There a missing file is an endless loop, an unknown
key is ignored and a value that is no number keeps the previous one; here each is an error.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import InputError, did_you_mean
from windtunnel.files import parse_number, parse_whole, read_text
from windtunnel.network.settings import SIMAI_PACKETS, SIMAI_SETTINGS, EcnThreshold, NetworkSettings, PacketSettings
from windtunnel.schema import read_yaml
from windtunnel.units import parse_quantity

CONGESTION = {0: "none", 1: "dcqcn", 3: "hpcc", 7: "timely", 8: "dctcp"}
"""`CC_MODE`"""

Reader = Callable[[list[str], str], Any]
"""Turns the values of a key, and its place for messages, into a setting."""


def _only(values: list[str], where: str) -> str:
    if len(values) != 1:
        raise InputError(f"{where} has {len(values)} values; 1 is needed")
    return values[0]


def _scaled(parse: Callable[[str, str], float], scale: float = 1) -> Reader:
    return lambda values, where: parse(_only(values, where), where) * scale


def _flag(values: list[str], where: str) -> bool:
    if values not in (["0"], ["1"]):
        raise InputError(f"{where} is {' '.join(values) or 'empty'}; 0 or 1 is needed")
    return values == ["1"]


def _rate(values: list[str], where: str) -> float:
    """Read `50Mb/s`, as ns-3 writes rates."""
    try:
        if values[0][-1].isdigit():
            raise ValueError("no unit")
        return parse_quantity("rate_bytes_per_s", values[0].replace("b/s", "bps"))
    except (IndexError, ValueError, InputError):
        raise InputError(f"{where} is {' '.join(values) or 'empty'}; a rate such as 50Mb/s is needed") from None


def _congestion(values: list[str], where: str) -> str:
    mode = parse_whole(_only(values, where), where)
    if mode not in CONGESTION:
        known = ", ".join(f"{number} {name}" for number, name in CONGESTION.items())
        raise InputError(
            f"{where} is {mode}; there are {known}", "HPCC-PINT (10) is not simulated" if mode == 10 else None
        )
    return CONGESTION[mode]


READERS: Mapping[str, Reader] = {
    "congestion": _congestion,
    "flag": _flag,
    "number": _scaled(parse_number),
    "microseconds": _scaled(parse_number, 1e-6),
    "whole": _scaled(parse_whole),
    "MiB": _scaled(parse_whole, 2**20),
    "rate": _rate,
}
"""Name in `conf.yaml` -> how the values of a key are read."""

KEYS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("conf.yaml"))
"""Keys of a configuration by their use."""


def read_simai_conf(path: Path) -> NetworkSettings:
    """Read the settings of a configuration file, for `compat: simai`. InputError where the file is missing, a key is
    unknown or a value is wrong; names the file and the line."""
    text = read_text(path)
    if not text.strip():
        raise InputError(f"{path}, line 1: it is empty; a SimAI configuration has a key and its values on each line")
    fields: dict[str, dict[str, Any]] = {"packet": {}, "network": {"backend": "packet"}}
    maps: dict[str, dict[float, float]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, *values = line.split() or [""]
        where = f"{path}, line {number}: {key}"
        owner = next((name for name in fields if key in KEYS[name]), None)
        if owner is not None:
            field, reader = KEYS[owner][key]
            fields[owner][field] = READERS[reader](values, where)
        elif key in KEYS["maps"]:
            try:
                numbers = [float(value) for value in values]
            except ValueError:
                raise InputError(f"{where} has a value that is no number: {' '.join(values)}") from None
            if not numbers or len(numbers) != 1 + 2 * numbers[0]:
                raise InputError(
                    f"{where} announces {values[0] if values else 'no'} rates; {len(values[1:]) / 2:g} follow"
                )
            maps[KEYS["maps"][key]] = dict(zip(numbers[1::2], numbers[2::2], strict=True))
        elif key in KEYS["fixed"]:
            if " ".join(values) != KEYS["fixed"][key]:
                raise InputError(f"{where} is {' '.join(values) or 'empty'}; only {KEYS['fixed'][key]} is simulated")
        elif key == "ERROR_RATE_PER_LINK":
            if READERS["number"](values, where) != 0:
                hint = "give links their error rates in the topology"
                raise InputError(f"{where} is {values[0]}; only 0 is possible", hint)
        elif key and key not in KEYS["unused"]:
            known = ["ERROR_RATE_PER_LINK", *(name for names in KEYS.values() for name in names)]
            raise InputError(f"{where} is no key of a SimAI configuration", did_you_mean(key, known))
    return _settings(path, fields["packet"], fields["network"], maps)


def _settings(
    path: Path, packet: dict[str, Any], network: dict[str, Any], maps: dict[str, dict[float, float]]
) -> NetworkSettings:
    if maps:
        packet["ecn_thresholds"] = _thresholds(maps, path)
    if packet.pop("has_window", True) is False:
        packet["window"] = "none"
    to_builtins = msgspec.to_builtins
    try:
        packets = msgspec.convert(to_builtins(SIMAI_PACKETS) | to_builtins(packet), PacketSettings)
        settings = msgspec.convert(to_builtins(SIMAI_SETTINGS) | network, NetworkSettings)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {error}") from None
    return msgspec.structs.replace(settings, packet=packets)


def _thresholds(maps: dict[str, dict[float, float]], path: Path) -> list[EcnThreshold]:
    if len(maps) < 3 or len({frozenset(values) for values in maps.values()}) > 1:
        raise InputError(f"{path}: KMIN_MAP, KMAX_MAP and PMAX_MAP must be given for the same rates")
    try:
        return [
            EcnThreshold(
                bytes_per_s=rate / 8,
                min_bytes=round(low * 1000),
                max_bytes=round(maps["max_bytes"][rate] * 1000),
                max_probability=maps["max_probability"][rate],
            )
            for rate, low in maps["min_bytes"].items()
        ]
    except ValueError as error:
        raise InputError(f"{path}: KMIN_MAP, KMAX_MAP, PMAX_MAP: {error}") from None
