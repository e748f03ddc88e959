"""The `windtunnel` command. Results go to stdout, everything else to stderr; wrong input exits 2, failures exit 1."""

import codecs
import errno
import gc
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.errors import FULL, WindtunnelError, unwritable
from windtunnel.plugins import failed_plugin, plugin_modules

if TYPE_CHECKING:
    import click

DEBUG_VARIABLE = "WINDTUNNEL_DEBUG"
_PLACES = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST),
    *(*FULL, errno.ENAMETOOLONG),
)
"""Error numbers of a place where nothing can be written."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""
_ASCII = {"\u2501": "-", "\u2026": "...", "\u00b1": "+-", "\u2588": "#"}
"""Character of the output -> what a stream without it gets; another one is a question mark."""


def main() -> None:
    """Run the command line that the program was called with, and exit.

    SIGTERM and SIGHUP end a command as Ctrl-C does, with their own exit codes.
    """
    gc.set_threshold(400_000)  # looking for garbage after every 700 new objects takes 8% of a start
    ended_by: list[int] = []

    def end(number: int, _frame: Any) -> None:
        ended_by.append(number)
        raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # nohup has a command ignore SIGHUP.
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end)
    _mend_streams()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    code = run(sys.argv[1:])
    gc.freeze()  # the interpreter's last look takes 80 ms
    sys.exit(128 + ended_by[0] if ended_by and code == INTERRUPTED else code)


def _mend_streams() -> None:
    """Let stdout and stderr take any text, whatever their encoding; a closed stderr swallows it."""
    codecs.register_error("windtunnel", _as_ascii)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="windtunnel")


def _as_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_ASCII.get(character, "?") for character in text), error.end


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit code: 0, 1 for a failure, 2 for wrong input, 130 after Ctrl-C.
    """
    import click

    from windtunnel.cli.verbs import windtunnel

    if sys.stdout is None:
        return _fail("stdout is closed, and results go there", "redirect it: > FILE, or > /dev/null", 1)
    try:
        code = windtunnel.main(list(arguments), prog_name="windtunnel", standalone_mode=False)
        sys.stdout.flush()
    except WindtunnelError as error:
        return _fail(error.message, error.hint, error.exit_code)
    except click.UsageError as error:
        return _fail(*_usage_error(error), error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), None, error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        if isinstance(error.__cause__, EOFError):  # click takes it for Ctrl-C; a full disk cuts what Python compiled
            hint = "an input file may be incomplete; if none is, delete the __pycache__ folders of windtunnel"
            return _fail(f"input ended early ({error.__cause__})", hint, 1)
        return _fail("interrupted; nothing was written", None, INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough. What is still buffered must not fail again at exit.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        return 1
    except MemoryError:
        return _fail("this machine's memory does not hold that", "fewer requests, replicas or devices take less", 1)
    except RecursionError:
        return _fail("something in the input is nested too deeply", None, 2)
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        if isinstance(error, OSError) and error.errno in _PLACES:
            return _no_place(error)
        what = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
        if plugin := failed_plugin(error):
            return _fail(
                f"an installed package failed in {plugin}: {what}", f"mend it; {DEBUG_VARIABLE}=1 shows more", 2
            )
        hint = f"set {DEBUG_VARIABLE}=1 to see where, and please report it"
        if used := sorted(plugin_modules() & sys.modules.keys()):
            hint = f"{hint}; or an installed package gave a wrong value: {', '.join(used)}"
        return _fail(f"sorry, this is a bug in windtunnel ({what})", hint, 1)
    return code if isinstance(code, int) else 0


def _no_place(error: OSError) -> int:
    """Answer that something cannot be written there; without a name it is the output itself."""
    if error.filename is None:
        # What is still buffered must not fail again at exit.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    refusal = unwritable(Path(str(error.filename or "the output")), error)
    return _fail(refusal.message, refusal.hint, refusal.exit_code)


def _fail(message: str, hint: str | None, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")
    return code


def _usage_error(error: "click.UsageError") -> tuple[str, str | None]:
    import click

    from windtunnel.serving.other_names import other_names

    verb = error.ctx.command_path if error.ctx else "windtunnel"
    see = f"see `{verb} --help`"
    if isinstance(error, click.NoSuchOption):
        typed, names = error.option_name.lstrip("-").replace("_", "-"), other_names()
        other = names.get(typed, "")
        instead = getattr(error.ctx and error.ctx.command, "instead", {})
        if hint := instead.get(other, instead.get(typed)):
            return f"there is no option {error.option_name}", hint
        said, near = names.get(other, other), sorted(error.possibilities or [])
        see = getattr(error.ctx and error.ctx.command, "other_options", None) or see
        see = said if " " in said else f"did you mean {' or '.join(near)}?" if near else see
        if error.ctx and any(each.name == "from_command" for each in error.ctx.command.params):
            from windtunnel.formats.launch.read import servers

            owners = " and ".join(engine for engine, server in servers().items() if server.flag(typed))
            see = f"a server's option ({owners}): --from-command takes the server's whole command" if owners else see
        return f"there is no option {error.option_name}", see
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.opts[0] if isinstance(error.param, click.Option) else error.param.human_readable_name
        return f"{name} is missing", see
    if isinstance(error, click.BadParameter) and error.param is not None:
        comma = re.match(r"'(\d+),(\d+)' is not a valid (float|integer)", error.message)
        if comma is not None:
            see = f"without a comma: {comma[1]}{'.' if comma[3] == 'float' else ''}{comma[2]}"
        return f"{error.param.opts[0]}: {_sentence(error.message)}", see
    if isinstance(error, click.BadOptionUsage) and error.ctx and "requires an argument" in error.message:
        option = next(each for each in error.ctx.command.params if error.option_name in each.opts)
        about = f"{error.option_name} {option.metavar}: {getattr(option, 'help', '')}"
        return f"{error.option_name} is given without its {option.metavar}", about.rstrip(".")
    message = _sentence(error.format_message())
    if error.ctx and message.startswith("got unexpected extra"):
        options = {getattr(option, "metavar", None): option.opts[0] for option in reversed(error.ctx.command.params)}
        kind = "URL" if "(http" in message else "FILE"
        see = f"did you mean {options[kind]} {kind}?" if options.get(kind) in ("--endpoint", "--workload") else see
    return message, see


def _sentence(message: str) -> str:
    return f"{message[:1].lower()}{message[1:]}".rstrip(".")
