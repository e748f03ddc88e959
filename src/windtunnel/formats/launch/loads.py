"""Find the load that the benchmark client of a script or of a recipe sends (`clients.yaml`)."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.containers import Command, commands_of, table
from windtunnel.schema import Schema
from windtunnel.workload.client_load import ClientLoad, Tokens

RANDOM = ("random", "random-ids")
"""Data sets whose lengths the options say."""
PER_CLIENT = re.compile(r"\$\(\((?:\s*(\d+)\s*\*[\s\w$]*|[\s\w$]*\*\s*(\d+)\s*)\)\)")
"""A number of requests that is a multiple of a variable, which loops over the concurrencies."""
MOST_TOKENS = 2**31 - 1


class Client(Schema):
    """The options of one benchmark client."""

    starts: tuple[str, ...]
    """Its programs, as patterns, with the subcommands behind some."""
    ratio: Literal["around", "below"]
    options: dict[str, str]
    """Option -> the field of the load that it says."""
    defaults: dict[str, int | str]
    program: str | None = None
    """Its name in the catalog of clients."""
    concurrency: int | None = None
    """Where neither it nor a rate is said; None: all requests are sent at once."""
    is_joined: bool = False
    """Whether several commands say one load."""


class Clients(Schema):
    """`clients.yaml`."""

    sources: dict[str, str]
    recipe_variables: dict[str, str]
    clients: dict[str, Client]


@cache
def _known() -> Clients:
    return catalog.entry(Path(__file__).with_name("clients.yaml"), Clients)


def client_load(commands: Sequence[Command]) -> ClientLoad | None:
    """Return the load that the clients among the commands of a text send; None where there is none.

    Commands that differ in their concurrency alone are runs of one load. Of several loads, that with the most requests
    is taken. InputError where an option has a value that it does not take.
    """
    given: list[tuple[str, dict[str, str]]] = []
    for name, options in (found for command in commands for found in _clients_in(command)):
        if _known().clients[name].is_joined and name in dict(given):
            dict(given)[name].update(options)
        else:
            given.append((name, options))
    loads = [_load(name, _known().clients[name], options) for name, options in given]
    # A function of the script that starts the client says variables alone.
    loads = [load for load in loads if None not in load.lengths] or loads
    if not loads:
        return None
    chosen = max(loads, key=ClientLoad.most_requests)
    runs = [load for load in loads if (load.client, load.lengths) == (chosen.client, chosen.lengths)]
    several = tuple(sorted({number for run in runs for number in run.concurrencies}))
    others = len(loads) - len(runs)
    left_out = "1 other load of the text is" if others == 1 else f"{others} other loads of the text are"
    note = (f"{left_out} left out: --input-tokens and others say one",)
    return replace(chosen, concurrencies=several, left_out=(*chosen.left_out, *(note if others else ())))


def recipe_load(benchmark: Mapping[str, Any]) -> ClientLoad | None:
    """Return the load of a recipe's `benchmark`; None where it runs no client.

    Source: `docs/benchmarks.md` and `benchmarks/scripts/sa-bench/bench.sh` of srt-slurm: lengths are drawn from 0.8
    times `isl` and `osl` on, and ten requests are sent for each of the concurrency. Its warm-up is left out. InputError
    for a value that is none of its key.
    """
    kind = str(benchmark.get("type") or ("sa-bench" if "isl" in benchmark else "manual"))
    if kind == "custom":
        variables = {str(name): str(value) for name, value in table(benchmark.get("env")).items()}
        exported = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        if (load := client_load(commands_of("\n".join([*exported, str(benchmark.get("command", ""))])))) is not None:
            return load
        names = _known().recipe_variables
        known = {names[name]: value for name, value in variables.items() if name in names}
        if not {"isl", "osl"} <= known.keys():
            return ClientLoad("custom", left_out=("the load of the recipe's own command is not read",))
        return _of_recipe("the recipe's own command", known)
    if kind == "manual":
        return None
    is_random = benchmark.get("dataset_name", "random") in RANDOM
    if "isl" not in benchmark or "osl" not in benchmark or not is_random:
        return ClientLoad(kind, left_out=(f"the load of {kind} is not read: --input-tokens and others say one",))
    return _of_recipe(kind, benchmark)


def _of_recipe(kind: str, benchmark: Mapping[str, Any]) -> ClientLoad:
    values = {name: benchmark[name] for name in benchmark if benchmark[name] is not None}
    ratio = _number("benchmark.random_range_ratio", values.get("random_range_ratio", 0.8), least=0)
    inputs, outputs = (
        _spread(_count(f"benchmark.{name}", values.get(name)), ratio, "below") for name in ("isl", "osl")
    )
    several = values.get("concurrencies", values.get("concurrency", ()))
    rate = _number("benchmark.req_rate", values.get("req_rate", math.inf))
    fixed = values.get("num_requests")
    return ClientLoad(
        kind,
        inputs,
        outputs,
        concurrencies=_counts("benchmark.concurrencies", several),
        rate_per_s=None if rate == math.inf else rate,
        num_requests=None if fixed is None else _count("benchmark.num_requests", fixed),
        requests_per_client=_count("benchmark.num_prompts_mult", values.get("num_prompts_mult", 10)),
        program="sglang" if kind == "sglang-bench" else "inferencex",
    )


def _clients_in(command: Command) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the client that a command starts, and its options by the fields that they say."""
    for i, word in enumerate(command.words):
        for name, client in _known().clients.items():
            for start in client.starts:
                program, *subcommands = start.split()
                rest = command.words[i + 1 :]
                if fnmatchcase(word.rpartition("/")[2], program) and rest[: len(subcommands)] == subcommands:
                    yield name, _options(client, rest[len(subcommands) :])
                    return


def _options(client: Client, words: Sequence[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    for position, word in enumerate(words):
        name, has_value, value = word.lstrip("-").partition("=")
        if word.startswith("--") and (field := client.options.get(name.replace("_", "-"))):
            following = words[position + 1] if position + 1 < len(words) else ""
            said[field] = value if has_value else following
    return said


def _load(name: str, client: Client, options: Mapping[str, str]) -> ClientLoad:
    """Return the load that a client's options say; what a variable that is not set says is left out, and noted."""
    values: dict[str, Any] = {**client.defaults, **options}
    per_client = PER_CLIENT.fullmatch(str(values.get("num_requests", "")))
    if per_client:
        del values["num_requests"]
    unset = [field for field, value in values.items() if "$" in str(value)]
    values = {field: value for field, value in values.items() if field not in unset}
    notes = [f"{name} says {options[field]}, which the text does not set" for field in unset]
    inputs, outputs = (_lengths(name, client, values, kind) for kind in ("input", "output"))
    if values.get("dataset") not in RANDOM:
        inputs, outputs = None, None
        notes.append(f"the data set of {name} is not read ({values.get('dataset')}): --input-tokens and others say one")
    rate = _number(f"the rate of {name}", values.get("rate", math.inf))
    burstiness = _number(f"the burstiness of {name}", values.get("burstiness", 1.0))
    fixed = values.get("num_requests")
    alone = client.concurrency if rate == math.inf and "concurrency" not in unset else None
    several = _counts(f"the concurrency of {name}", values.get("concurrency", () if alone is None else alone))
    return ClientLoad(
        name,
        inputs,
        outputs,
        concurrencies=several,
        rate_per_s=None if rate == math.inf else rate,
        gap_cv=0.0 if values.get("pattern") == "constant" else 1 / math.sqrt(burstiness),
        num_requests=None if fixed is None else _count(f"the number of requests of {name}", fixed),
        requests_per_client=int(per_client[1] or per_client[2]) if per_client else None,
        program=client.program,
        shared_tokens=int(_number(f"the prefix of {name}", values.get("shared_tokens", 0), least=0)),
        left_out=tuple(notes),
    )


def _lengths(name: str, client: Client, values: Mapping[str, Any], kind: str) -> Tokens:
    """Return the lengths of prompts (`input`) or outputs; None where nothing says them."""
    if f"{kind}_tokens" not in values or "range_ratio" not in values:
        return None
    tokens = _count(f"the {kind} tokens of {name}", values[f"{kind}_tokens"])
    spread = _number(f"the spread of {name}", values.get(f"{kind}_std", 0), least=0)
    if spread:
        return {"type": "normal", "mean_tokens": tokens, "std_tokens": spread}
    return _spread(tokens, _number(f"the range ratio of {name}", values["range_ratio"], least=0), client.ratio)


def _spread(tokens: int, ratio: float, kind: str) -> Tokens:
    """Return the lengths that a client draws from a length and a ratio."""
    if ratio > 1:
        raise InputError(f"--from-command: a range ratio of {ratio:g} for lengths; 0 to 1 is needed")
    bounds = (ratio, 1.0) if kind == "below" else (1 - ratio, 1 + ratio)
    low, high = (max(int(tokens * bound + 1e-9), 1) for bound in bounds)
    return high if low == high else {"type": "uniform", "min_tokens": low, "max_tokens": high}


def _number(name: str, value: Any, least: float | None = None) -> float:
    """Return a number of `least` or more; above zero where it is None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number > 0 or (least is not None and number >= least):
        return number
    raise InputError(
        f"--from-command: {name} is {value!r:.60}; a number {'of 0 or more' if least == 0 else 'above 0'} is needed"
    )


def _count(name: str, value: Any) -> int:
    number = _number(name, value)
    if number != number // 1 or number > MOST_TOKENS:
        raise InputError(f"--from-command: {name} is {value!r:.60}; a whole number is needed")
    return int(number)


def _counts(name: str, value: Any) -> tuple[int, ...]:
    """Return the numbers of a list, of `4x8x16`, or of a text that commas or spaces separate, in order."""
    parts = value if isinstance(value, list | tuple) else re.split(r"[x,\s]+", str(value).strip("[] "))
    return tuple(sorted({_count(name, part) for part in parts if part != ""}))
