"""The server of llama-cpp-python: a .gguf file, one request after the other."""

from windtunnel.lab.servers import EngineServer

SERVER = EngineServer(
    # Unless told otherwise, it breaks off an answer when the next request comes.
    ("-m", "llama_cpp.server", "--interrupt_requests", "False"),
    "--model",
    ready="/v1/models",
    takes_gguf=True,
)
