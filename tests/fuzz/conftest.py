"""The command line in this process, as the tests of the command line have it."""

from cli.conftest import windtunnel

__all__ = ["windtunnel"]
