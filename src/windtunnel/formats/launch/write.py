"""Write deployments as server command lines, so that reading one back gives the same deployment."""

from collections.abc import Iterator, Mapping
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import servers
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.command_line import ENGINE, Options
from windtunnel.serving.engines.contract import engine_of


def server_of(engine: EngineSettings) -> Options:
    """Return the options of an engine's server.

    Raises:
        InputError: nothing is known of its command.
    """
    known, name = servers(), catalog.spelling("engines", engine.name)
    if name not in known:
        raise InputError(f"no command of {name} is known", f"known: those of {', '.join(known)}")
    return known[name]


def write_launch_command(
    model: str,
    parallelism: Parallelism,
    engine: EngineSettings,
    weights: str | None = None,
    kv_cache: str | None = None,
    state: str | None = None,
    task: str = "generate",
    is_encoder: bool = False,
) -> tuple[str, ...]:
    """Return the words of a command that starts one replica; settings that are None keep the engine's default.

    Args:
        model: model name that the engine loads.
        parallelism: parallelism of one replica.
        engine: settings as requested, not resolved.
        weights, kv_cache, state: formats that differ from the published checkpoint's; an engine without an option for
            recurrent states has no word for the last.
        task: of the workload.
        is_encoder: whether the model sees a prompt in both directions.
    """
    server, line = server_of(engine), engine_of(engine.name).command_line
    words, separator = [*server.command, model], "_" if server.spelt_with_underscores else "-"
    for name, value in (
        *_split_options(server, line.write_split(parallelism)),
        *_engine_options(server, engine),
        *line.write_rest(engine, weights, kv_cache),
        *_state_options(server, state),
        *line.write_task(task, is_encoder),
    ):
        option, dot, key = name.partition(".")
        words.append("--" + option.replace("-", separator) + dot + key.replace("-", "_"))
        if value is not None:
            words.append(str(value))
    return tuple(words)


def _split_options(server: Options, degrees: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options that set the degrees of parallelism."""
    for sets, degree in degrees.items():
        yield server.option(sets), None if degree is True else degree


def _state_options(server: Options, state: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the option that sets the format of recurrent states."""
    for name in server.flags if state is not None else ():
        flag = server.flag(name)
        if flag is not None and flag.path == "precision.recurrent_state":
            yield name, flag.word_for(state)


def _engine_options(server: Options, engine: EngineSettings) -> Iterator[tuple[str, Any]]:
    """Yield options for the settings of `engine` that one option decides."""
    written: set[str] = set()
    for name in server.flags:
        flag = server.flag(name)
        assert flag is not None
        setting = flag.path.removeprefix(ENGINE)
        value = getattr(engine, setting, None) if setting != flag.path else None
        if value is None or setting in written or name in server.in_file_only:
            continue
        if flag.value is None:
            word = None if setting == "max_cudagraph_capture_size" and value == 0 else flag.word_for(value)
            if word is not None:
                yield name, word
                written.add(setting)
        elif flag.value == value and isinstance(flag.value, bool) == isinstance(value, bool):
            yield name, None
            written.add(setting)
