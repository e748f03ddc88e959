"""SGLang's server; it was not run, but the parser of SGLang 0.5.23 takes this command."""

from windtunnel.lab.servers import EngineServer

SERVER = EngineServer(("-m", "sglang.launch_server"), "--model-path")
