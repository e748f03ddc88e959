"""A server of OpenVINO GenAI, for a checkpoint or for a model that optimum-intel exported."""

from pathlib import Path

from windtunnel.lab.servers import OFFLINE, EngineServer

SERVER = EngineServer((str(Path(__file__).with_name("_openvino_server.py")),), "--model", environment=OFFLINE)
