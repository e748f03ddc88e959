"""The server of Hugging Face transformers, with its continuous batching."""

from windtunnel.lab.servers import OFFLINE, EngineServer

SERVER = EngineServer(
    ("-c", "from transformers.cli.transformers import main; main()", "serve", "--continuous-batching"),
    environment=OFFLINE,
)
