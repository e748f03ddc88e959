"""Schema of a client: the time that the program which sends requests and stamps answers adds to what it measures."""

from typing import Any, Self

import msgspec

from windtunnel import catalog
from windtunnel.schema import NonNegative, Positive, Schema

DEFAULT_CLIENT = "python"
"""Client of a workload that names none."""


class Client(Schema):
    """Seconds of a client's own, beside the server's (`serving.deployment.HostOverheads`, which has terms of the same
    names).

    In a scenario, `workload.client` is the name of one in the catalog, or its values.
    """

    title: str = ""
    first_token_s: NonNegative | None = None
    """Per request: building and sending it, reading the first chunk; part of TTFT."""
    stream_s: NonNegative | None = None
    """Per other request whose tokens are being streamed, as the client reads a chunk of each first; part of TTFT."""
    prompt_token_s: NonNegative | None = None
    """Per prompt token: what its kind of prompt costs more than the server's usual one; part of TTFT."""
    think_s: NonNegative | None = None
    """Between an answer and the next request of the same closed-loop slot or session, beside the session's own."""
    launch_ratio: Positive | None = None
    """Time of launching a kernel on the servers that its published runs were of, over that on others' of the same kind
    (`serving.deployment.HostOverheads.launch_s`); None: its runs are of anybody's servers."""
    random_tokens: bool | None = None
    """Whether its prompts are random tokens by default; others are taken as text. What a model continues with follows.
    They reach fewer of a mixture's experts than text (`pricing/aiconfigurator/routing.py`)."""
    asks_for_chats: bool | None = None
    """Whether it sends messages (`/v1/chat/completions`), for which the server has a template, and not prompts."""
    sources: dict[str, str] = {}
    """Field -> where its value comes from."""

    def over(self, default: Self) -> Self:
        """Merge with `default`: own values win, `default` fills the gaps."""
        merged = super().over(default)
        return msgspec.structs.replace(merged, title=self.title or default.title, sources={})

    def behind(self, server: Any) -> "Client":
        """Add a server's seconds of the same names, to what a user sees of both."""
        both = {name: (getattr(self, name) or 0.0) + (getattr(server, name) or 0.0) for name in IN_TTFT}
        both["first_token_s"] += (server.chat_s or 0.0) * bool(self.asks_for_chats)
        return msgspec.structs.replace(self, **both)

    def ttft_s(self, input_tokens: Any, num_streams: Any) -> Any:
        """Return what is added to TTFT, for prompts of so many tokens (a number or an array).

        `num_streams`: other requests whose tokens the replica streams when the prompt's first token comes.
        """
        by_request = (self.first_token_s or 0.0) + (self.stream_s or 0.0) * num_streams
        return by_request + (self.prompt_token_s or 0.0) * input_tokens


IN_TTFT = ("first_token_s", "stream_s", "prompt_token_s")
"""Times that the server has, too."""
OF_A_CLIENT = (*IN_TTFT, "launch_ratio")
"""What a fit learns of a client."""
CLIENT_TIMES = (*IN_TTFT, "think_s")


def client_of(given: str | Client | None) -> Client:
    """Return a workload's client, gaps filled by the default one; InputError where the catalog has none of the name."""
    own = given if isinstance(given, Client) else client_entry(given or DEFAULT_CLIENT)
    return own.over(client_entry(DEFAULT_CLIENT))


def name_of(given: str | Client | None) -> str:
    """Return the name of a workload's client as the catalog spells it; empty where its times are given."""
    return "" if isinstance(given, Client) else catalog.spelling("clients", given or DEFAULT_CLIENT)


def client_entry(name: str) -> Client:
    """Return an entry of the catalog, as it is; InputError where there is none of that name."""
    return catalog.entry(catalog.find("clients", name), Client)
