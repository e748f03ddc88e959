"""A real engine of one's own: one file, found by name."""

import sys
from pathlib import Path

import numpy as np
import pytest

from plugin_package import installed_plugin
from windtunnel.errors import InputError
from windtunnel.lab.bench.client import Endpoint, bench
from windtunnel.lab.servers import started
from windtunnel.workload.generate.requests import RequestArrays

ENGINE = """
from windtunnel.lab.servers import EngineServer

SERVER = EngineServer(("-c", '''
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": sys.argv[1]}]}))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}
        self.answer(f"data: {json.dumps(event)}" + chr(10) * 2 + "data: [DONE]" + chr(10) * 2)

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
'''))
"""


@pytest.mark.full
def test_an_engine_is_one_file(tmp_path: Path) -> None:
    pytest.importorskip("httpx", reason="httpx is not installed; the client speaks with it")
    load = RequestArrays(np.zeros(2), np.full(2, 4), np.full(2, 1), np.zeros(2, np.int64))
    with installed_plugin(tmp_path, "windtunnel.lab_engines", "echo", ENGINE) as files:
        with started("echo", "my-model", python=sys.executable) as url:
            run = bench(Endpoint(url), load)
        assert len(files) == 1
    assert run.model == "my-model"
    assert run.requests["output_tokens"].tolist() == [1, 1]
    with pytest.raises(InputError, match="'echo' cannot be started"), started("echo", "my-model"):
        pass
