"""Read `SimAI.conf`: one `KEY value` a line, for SimAI's ns-3 backend.

Format: `ReadConf` in SimAI 1.6's `network_frontend/ns3/common.h`. There a missing file is an endless loop, an unknown
key is ignored and a value that is no number keeps the previous one; here each is an error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import InputError, did_you_mean
from windtunnel.files import read_text
from windtunnel.formats.parsing import parse_number, parse_whole
from windtunnel.network.packet_settings import SIMAI_PACKETS, EcnThreshold, PacketSettings
from windtunnel.network.settings import SIMAI_SETTINGS, NetworkSettings
from windtunnel.units import parse_quantity

CONGESTION = {0: "none", 1: "dcqcn", 3: "hpcc", 7: "timely", 8: "dctcp"}
"""`CC_MODE`"""

Reader = Callable[[list[str], str], Any]
"""Turns the values of a key, and its place for messages, into a setting."""


def _only(values: list[str], where: str) -> str:
    if len(values) != 1:
        raise InputError(f"{where} has {len(values)} values; 1 is needed")
    return values[0]


def _number(scale: float = 1.0) -> Reader:
    return lambda values, where: parse_number(_only(values, where), where) * scale


def _whole(scale: int = 1) -> Reader:
    return lambda values, where: parse_whole(_only(values, where), where) * scale


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


def _fixed(value: str) -> Reader:
    def check(values: list[str], where: str) -> None:
        if " ".join(values) != value:
            raise InputError(f"{where} is {' '.join(values) or 'empty'}; only {value} is simulated")

    return check


def _no_errors(values: list[str], where: str) -> None:
    if parse_number(_only(values, where), where) != 0:
        raise InputError(f"{where} is {values[0]}; only 0 is possible", "give links their error rates in the topology")


_US = 1e-6

_PACKET: dict[str, tuple[str, Reader]] = {
    "CC_MODE": ("congestion", _congestion),
    "HAS_WIN": ("has_window", _flag),
    "EWMA_GAIN": ("ewma_gain", _number()),
    "U_TARGET": ("target_utilisation", _number()),
    "ALPHA_RESUME_INTERVAL": ("alpha_interval_s", _number(_US)),
    "RATE_DECREASE_INTERVAL": ("decrease_interval_s", _number(_US)),
    "RP_TIMER": ("increase_interval_s", _number(_US)),
    "QLEN_MON_INTERVAL": ("trace_interval_s", _number(_US)),
    "FAST_RECOVERY_TIMES": ("fast_recovery_times", _whole()),
    "L2_ACK_INTERVAL": ("ack_interval_bytes", _whole()),
    "MI_THRESH": ("most_increases", _whole()),
    "BUFFER_SIZE": ("buffer_bytes", _whole(2**20)),
    "ENABLE_QCN": ("ecn", _flag),
    "USE_DYNAMIC_PFC_THRESHOLD": ("dynamic_pfc", _flag),
    "CLAMP_TARGET_RATE": ("clamp_target_rate", _flag),
    "VAR_WIN": ("window_follows_rate", _flag),
    "FAST_REACT": ("fast_react", _flag),
    "ACK_HIGH_PRIO": ("acks_first", _flag),
    "RATE_AI": ("rate_ai_bytes_per_s", _rate),
    "RATE_HAI": ("rate_hai_bytes_per_s", _rate),
    "MIN_RATE": ("min_rate_bytes_per_s", _rate),
    "DCTCP_RATE_AI": ("dctcp_rate_ai_bytes_per_s", _rate),
}
"""Key -> field of `PacketSettings`, and how its values are read; times are in microseconds."""

_MAPS = {"KMIN_MAP": "min_bytes", "KMAX_MAP": "max_bytes", "PMAX_MAP": "max_probability"}

_CHECKED: dict[str, Reader] = {
    "L2_BACK_TO_ZERO": _fixed("0"),
    "MULTI_RATE": _fixed("0"),
    "SAMPLE_FEEDBACK": _fixed("0"),
    "RATE_BOUND": _fixed("1"),
    "LINK_DOWN": _fixed("0 0 0"),
    "ERROR_RATE_PER_LINK": _no_errors,
}
"""Keys with only one value that is simulated. Link errors stand in the topology file."""

_UNUSED = (
    *("TOPOLOGY_FILE", "FLOW_FILE", "TRACE_FILE", "TRACE_OUTPUT_FILE", "FCT_OUTPUT_FILE", "PFC_OUTPUT_FILE"),
    *("SEND_OUTPUT_FILE", "QLEN_MON_FILE", "BW_MON_FILE", "RATE_MON_FILE", "CNP_MON_FILE", "ENABLE_TRACE"),
    *("MON_START", "MON_END", "QP_MON_INTERVAL", "BW_MON_INTERVAL", "SIMULATOR_STOP_TIME", "PAUSE_TIME"),
    *("DATA_RATE", "LINK_DELAY", "L2_CHUNK_SIZE", "INT_MULTI", "PINT_LOG_BASE", "PINT_PROB", "GLOBAL_T"),
    "NIC_TOTAL_PAUSE_TIME",
)
"""Paths and intervals of files that are not written here, keys that ns-3 reads and does not use, and GLOBAL_T, which
SimAI always sets to 1.
"""


def read_simai_conf(path: Path) -> NetworkSettings:
    """Read the settings of a configuration file, for `compat: simai`.

    Raises:
        InputError: the file is missing, a key is unknown or a value is wrong; names the file and the line.
    """
    text = read_text(path)
    if not text.strip():
        raise InputError(f"{path}, line 1: it is empty; a SimAI configuration has a key and its values on each line")
    packet: dict[str, Any] = {}
    network: dict[str, Any] = {"backend": "packet"}
    maps: dict[str, dict[float, float]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, *values = line.split() or [""]
        where = f"{path}, line {number}: {key}"
        if key in _PACKET:
            field, read = _PACKET[key]
            packet[field] = read(values, where)
        elif key in _MAPS:
            maps[_MAPS[key]] = _map(values, where)
        elif key == "PACKET_PAYLOAD_SIZE":
            network["payload_bytes"] = _whole()(values, where)
        elif key in _CHECKED:
            _CHECKED[key](values, where)
        elif key and key not in _UNUSED:
            known = [*_PACKET, *_MAPS, *_CHECKED, *_UNUSED, "PACKET_PAYLOAD_SIZE"]
            raise InputError(f"{where} is no key of a SimAI configuration", did_you_mean(key, known))
    return _settings(path, packet, network, maps)


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


def _map(values: list[str], where: str) -> dict[float, float]:
    """Read `2 100000000000 400 400000000000 1600`: the number of rates, then rate in bit/s and value of each."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        raise InputError(f"{where} has a value that is no number: {' '.join(values)}") from None
    if not numbers or len(numbers) != 1 + 2 * numbers[0]:
        raise InputError(f"{where} announces {values[0] if values else 'no'} rates; {len(values[1:]) / 2:g} follow")
    return dict(zip(numbers[1::2], numbers[2::2], strict=True))


def _thresholds(maps: dict[str, dict[float, float]], path: Path) -> list[EcnThreshold]:
    if len(maps) < len(_MAPS) or len({frozenset(values) for values in maps.values()}) > 1:
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
