"""Clients: found by name or written out, gaps filled by the default one, added to the server's times."""

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.serving.deployment import HostOverheads
from windtunnel.workload.client import CLIENT_TIMES, DEFAULT_CLIENT, Client, client_entry, client_of, name_of


@pytest.mark.parametrize("name", catalog.names("clients"))
def test_every_entry_says_where_its_values_come_from(name: str) -> None:
    entry, resolved = client_entry(name), client_of(name)
    given = {time for time in CLIENT_TIMES if getattr(entry, time) is not None}
    assert given <= set(entry.sources) or "all" in entry.sources
    assert entry.sources
    assert all(getattr(resolved, time) is not None for time in CLIENT_TIMES)
    assert resolved.title == entry.title


def test_a_workload_without_a_client_has_the_default_one() -> None:
    assert client_of(None) == client_of(DEFAULT_CLIENT)
    assert (name_of(None), name_of("socket"), name_of(Client())) == (DEFAULT_CLIENT, "socket", "")


def test_values_given_win_and_the_default_fills_the_gaps() -> None:
    own = client_of(Client(first_token_s=0.02, think_s=1.0))
    assert (own.first_token_s, own.think_s) == (0.02, 1.0)
    assert own.stream_s == client_of(None).stream_s


def test_times_add_up_with_the_servers() -> None:
    server = HostOverheads(first_token_s=5e-3, stream_s=1e-4, prompt_token_s=1e-6)
    both = Client(first_token_s=3e-3, stream_s=5e-5, prompt_token_s=2e-6, think_s=0.5).behind(server)
    # 8 ms, 10 streams of 150 us, 1,000 tokens of 3 us.
    assert both.ttft_s(1000, 10) == pytest.approx(8e-3 + 1.5e-3 + 3e-3)
    assert both.think_s == 0.5


def test_an_unknown_client_is_refused() -> None:
    with pytest.raises(InputError, match="no client 'sockets'") as error:
        client_of("sockets")
    assert "socket" in str(error.value.hint)
