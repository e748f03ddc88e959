"""SimAI's `SimAI.conf`: one `KEY value` a line, for its ns-3 backend.

Format: `ReadConf` in SimAI 1.6's `network_frontend/ns3/common.h`. There a missing file is an endless loop, an unknown
key is ignored and a value that is no number keeps what was there; here each is an error.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from windtunnel.errors import InputError, did_you_mean, unreadable
from windtunnel.network.packet_settings import SIMAI_PACKETS, EcnThreshold
from windtunnel.network.settings import SIMAI_SETTINGS, NetworkSettings
from windtunnel.units import parse_quantity

CONGESTION = {0: "none", 1: "dcqcn", 3: "hpcc", 7: "timely", 8: "dctcp"}
"""`CC_MODE`"""

_US = 1e-6

_PLAIN: dict[str, tuple[str, float]] = {
    "EWMA_GAIN": ("ewma_gain", 1.0),
    "ALPHA_RESUME_INTERVAL": ("alpha_interval_s", _US),
    "RATE_DECREASE_INTERVAL": ("decrease_interval_s", _US),
    "RP_TIMER": ("increase_interval_s", _US),
    "U_TARGET": ("target_utilisation", 1.0),
    "QLEN_MON_INTERVAL": ("trace_interval_s", _US),
}
"""Key -> field, and what its unit is in SI. Times are in microseconds."""

_COUNTS: dict[str, tuple[str, int]] = {
    "FAST_RECOVERY_TIMES": ("fast_recovery_times", 1),
    "L2_ACK_INTERVAL": ("ack_interval_bytes", 1),
    "MI_THRESH": ("most_increases", 1),
    "BUFFER_SIZE": ("buffer_bytes", 2**20),
}

_FLAGS = {
    "ENABLE_QCN": "ecn",
    "USE_DYNAMIC_PFC_THRESHOLD": "dynamic_pfc",
    "CLAMP_TARGET_RATE": "clamp_target_rate",
    "VAR_WIN": "window_follows_rate",
    "FAST_REACT": "fast_react",
    "ACK_HIGH_PRIO": "acks_first",
}

_RATES = {
    "RATE_AI": "rate_ai_bytes_per_s",
    "RATE_HAI": "rate_hai_bytes_per_s",
    "MIN_RATE": "min_rate_bytes_per_s",
    "DCTCP_RATE_AI": "dctcp_rate_ai_bytes_per_s",
}

_MAPS = {"KMIN_MAP": "min_bytes", "KMAX_MAP": "max_bytes", "PMAX_MAP": "max_probability"}

_FIXED = {
    "L2_BACK_TO_ZERO": "0",
    "MULTI_RATE": "0",
    "SAMPLE_FEEDBACK": "0",
    "RATE_BOUND": "1",
    "LINK_DOWN": "0 0 0",
}
"""What only has one value here: others are not simulated."""

_UNUSED = [
    "TOPOLOGY_FILE",
    "FLOW_FILE",
    "TRACE_FILE",
    "TRACE_OUTPUT_FILE",
    "FCT_OUTPUT_FILE",
    "PFC_OUTPUT_FILE",
    "SEND_OUTPUT_FILE",
    "QLEN_MON_FILE",
    "BW_MON_FILE",
    "RATE_MON_FILE",
    "CNP_MON_FILE",
    "ENABLE_TRACE",
    "MON_START",
    "MON_END",
    "QP_MON_INTERVAL",
    "BW_MON_INTERVAL",
    "SIMULATOR_STOP_TIME",
    "PAUSE_TIME",
    "DATA_RATE",
    "LINK_DELAY",
    "L2_CHUNK_SIZE",
    "INT_MULTI",
    "PINT_LOG_BASE",
    "PINT_PROB",
    "GLOBAL_T",
    "NIC_TOTAL_PAUSE_TIME",
    "ERROR_RATE_PER_LINK",
]
"""Paths and intervals of files that are not written here, what ns-3 reads and does not use, and what SimAI overrides:
GLOBAL_T is always 1. Link errors stand in the topology file; ERROR_RATE_PER_LINK may only be 0.
"""


def read_simai_conf(path: Path) -> NetworkSettings:
    """The settings of a configuration file, for `compat: simai`.

    Raises:
        InputError: the file is missing, a key is unknown or a value is wrong; names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    packet: dict[str, object] = {}
    network: dict[str, object] = {"backend": "packet"}
    maps: dict[str, dict[float, float]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words:
            where = f"{path}, line {number}: {words[0]}"
            _read_key(words[0], words[1:], where, packet, network, maps)
    if not text.strip():
        raise InputError(f"{path}, line 1: it is empty; a SimAI configuration has a key and its values on each line")
    if maps:
        packet["ecn_thresholds"] = _thresholds(maps, path)
    if packet.pop("has_window", True) is False:
        packet["window"] = "none"
    try:
        settings = msgspec.convert(
            msgspec.to_builtins(SIMAI_PACKETS) | msgspec.to_builtins(packet), type(SIMAI_PACKETS)
        )
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {error}") from None
    try:
        raw = msgspec.to_builtins(SIMAI_SETTINGS) | network
        return msgspec.structs.replace(msgspec.convert(raw, NetworkSettings), packet=settings)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {error}") from None


def _read_key(
    key: str,
    values: list[str],
    where: str,
    packet: dict[str, object],
    network: dict[str, object],
    maps: dict[str, dict[float, float]],
) -> None:
    if key in _MAPS:
        maps[_MAPS[key]] = _map(values, where)
    elif key in _PLAIN:
        field, unit = _PLAIN[key]
        packet[field] = _one(values, where, float) * unit
    elif key in _COUNTS:
        field, factor = _COUNTS[key]
        packet[field] = _one(values, where, int) * factor
    elif key in _FLAGS:
        packet[_FLAGS[key]] = _flag(values, where)
    elif key == "HAS_WIN":
        packet["has_window"] = _flag(values, where)
    elif key in _RATES:
        packet[_RATES[key]] = _rate(values, where)
    elif key == "CC_MODE":
        packet["congestion"] = _congestion(values, where)
    elif key == "PACKET_PAYLOAD_SIZE":
        network["payload_bytes"] = _one(values, where, int)
    elif key in _FIXED:
        if " ".join(values) != _FIXED[key]:
            raise InputError(f"{where} is {' '.join(values) or 'empty'}; only {_FIXED[key]} is simulated")
    elif key == "ERROR_RATE_PER_LINK":
        if _one(values, where, float) != 0:
            raise InputError(
                f"{where} is {values[0]}; only 0 is possible", "give links their error rates in the topology"
            )
    elif key not in _UNUSED:
        known = [
            *_MAPS,
            *_PLAIN,
            *_COUNTS,
            *_FLAGS,
            *_RATES,
            *_FIXED,
            *_UNUSED,
            "CC_MODE",
            "HAS_WIN",
            "PACKET_PAYLOAD_SIZE",
        ]
        raise InputError(f"{where} is no key of a SimAI configuration", did_you_mean(key, known))


def _one(values: list[str], where: str, kind: Callable[[str], float]) -> float:
    """The only value of a key."""
    if len(values) != 1:
        raise InputError(f"{where} has {len(values)} values; 1 is needed")
    try:
        value = kind(values[0])
    except ValueError:
        raise InputError(f"{where} is {values[0]}; a number is needed") from None
    if not 0 <= value < float("inf"):
        raise InputError(f"{where} is {values[0]}; at least 0 is needed")
    return value


def _flag(values: list[str], where: str) -> bool:
    if values not in (["0"], ["1"]):
        raise InputError(f"{where} is {' '.join(values) or 'empty'}; 0 or 1 is needed")
    return values == ["1"]


def _rate(values: list[str], where: str) -> float:
    """`50Mb/s`, as ns-3 writes rates."""
    try:
        if values[0][-1].isdigit():
            raise ValueError("no unit")
        return parse_quantity("rate_bytes_per_s", values[0].replace("b/s", "bps"))
    except (IndexError, ValueError, InputError):
        raise InputError(f"{where} is {' '.join(values) or 'empty'}; a rate such as 50Mb/s is needed") from None


def _congestion(values: list[str], where: str) -> str:
    mode = int(_one(values, where, int))
    if mode not in CONGESTION:
        known = ", ".join(f"{number} {name}" for number, name in CONGESTION.items())
        raise InputError(
            f"{where} is {mode}; there are {known}", "HPCC-PINT (10) is not simulated" if mode == 10 else None
        )
    return CONGESTION[mode]


def _map(values: list[str], where: str) -> dict[float, float]:
    """`2 100000000000 400 400000000000 1600`: how many, then rate in bit/s and value of each."""
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
