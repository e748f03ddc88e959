"""SimAI's configuration file, right and wrong."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.simai.conf import read_simai_conf
from windtunnel.network.settings import GBPS, SIMAI_PACKETS, SIMAI_SETTINGS


def write(folder: Path, *lines: str) -> Path:
    path = folder / "SimAI.conf"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_shipped_file_is_what_simai_packets_says(reference: Path) -> None:
    settings = read_simai_conf(reference / "simai" / "SimAI.conf")
    assert settings.payload_bytes == SIMAI_SETTINGS.payload_bytes
    assert settings.packet is not None
    for field in SIMAI_PACKETS.__struct_fields__:
        assert getattr(settings.packet, field) == pytest.approx(getattr(SIMAI_PACKETS, field)), field


def test_values_become_si(tmp_path: Path) -> None:
    path = write(tmp_path, "CC_MODE 8", "RP_TIMER 300", "RATE_AI 5Gb/s", "BUFFER_SIZE 16", "HAS_WIN 0", "ENABLE_QCN 0")
    packet = read_simai_conf(path).packet
    assert packet is not None
    assert packet.congestion == "dctcp"
    assert packet.increase_interval_s == pytest.approx(300e-6)
    assert packet.rate_ai_bytes_per_s == 5 * GBPS
    assert packet.buffer_bytes == 16 * 2**20
    assert packet.window == "none"
    assert not packet.ecn


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("CC_MODE 10", r"line 2: CC_MODE is 10; there are 0 none, 1 dcqcn, 3 hpcc, 7 timely, 8 dctcp"),
        ("CC_MODE fast", r"line 2: CC_MODE is 'fast'; a whole number is needed"),
        ("CC_MODE", r"line 2: CC_MODE has 0 values; 1 is needed"),
        ("RATE_AI 50", r"line 2: RATE_AI is 50; a rate such as 50Mb/s is needed"),
        ("RATE_AI banana", r"line 2: RATE_AI is banana; a rate such as 50Mb/s is needed"),
        ("ENABLE_QCN 2", r"line 2: ENABLE_QCN is 2; 0 or 1 is needed"),
        ("KMIN_MAP 2 1000 5", r"line 2: KMIN_MAP announces 2 rates; 1 follow"),
        ("KMIN_MAP 1 1000 5", r"KMIN_MAP, KMAX_MAP and PMAX_MAP must be given for the same rates"),
        ("BUFFER_SIZE 0", r"buffer_bytes is 0; at least 1 is needed"),
        ("RP_TIMR 3", r"line 2: RP_TIMR is no key of a SimAI configuration"),
        ("LINK_DOWN 100 0 1", r"line 2: LINK_DOWN is 100 0 1; only 0 0 0 is simulated"),
        ("PACKET_PAYLOAD_SIZE -1", r"line 2: PACKET_PAYLOAD_SIZE is -1; at least 0 is needed"),
        ("PACKET_PAYLOAD_SIZE 0", r"payload_bytes is 0; at least 1 is needed"),
    ],
)
def test_a_wrong_line_is_one_sentence_that_names_it(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, "EWMA_GAIN 0.5", line)
    with pytest.raises(InputError, match=message) as caught:
        read_simai_conf(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*none\.conf"):
        read_simai_conf(tmp_path / "none.conf")
