"""Check the arguments of public functions against their annotations."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from windtunnel.errors import InputError, check_known, listed

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


def checked(function: Callable[Parameters, Answer]) -> Callable[Parameters, Answer]:
    """Let a public function refuse an argument whose type its annotation does not allow, with InputError."""
    names = signature(function)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in names.parameters.values())
    in_order = [name for name, each in names.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]

    @wraps(function)
    def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Answer:
        for name in () if takes_any else named:
            check_known(name, names.parameters, f"{function.__name__} has no argument {name!r}")
        if len(arguments) > len(in_order):
            message = f"{function.__name__} takes {', '.join(in_order)} by position; {len(arguments)} are given"
            others = ", ".join([*names.parameters][len(in_order) :]) or "none"
            is_list = len(in_order) == len(names.parameters) == 1
            raise InputError(message, f"in a list: {function.__name__}([...])" if is_list else f"by name: {others}")
        for name, value in names.bind(*arguments, **named).arguments.items():
            kinds = _argument_kinds(function).get(name, ())
            if kinds and not any(_is_of(kind, value) for kind in kinds):
                words = [word for kind in kinds if (word := _ARGUMENT_WORDS.get(kind, _with_article(kind)))]
                needed = listed(words, "or")
                given = repr(value) if isinstance(value, str | int | float | NoneType) else _with_article(type(value))
                message = f"{name} of {function.__name__} is {given:.60}; {needed} is needed"
                raise InputError(message, f"help({function.__name__}) says what each argument is")
        return function(*arguments, **named)

    return call


def _with_article(kind: type) -> str:
    return f"a{'n' if kind.__name__[0].lower() in 'aeiou' else ''} {kind.__name__}"


_ARGUMENT_WORDS: dict[Any, str] = {
    str: "text", Path: "a path", int: "a whole number", float: "a number", bool: "True or False", NoneType: "",
    Mapping: "a dictionary", Sequence: "a list", Callable: "a function",
}  # fmt: skip


@cache
def _argument_kinds(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return argument -> classes that its annotation allows; none where it allows anything."""
    hints = get_type_hints(function)
    rest = {name for name, each in signature(function).parameters.items() if each.kind is each.VAR_KEYWORD}
    kinds = {name: _classes(hint) for name, hint in hints.items() if name not in rest}
    return {name: allowed for name, allowed in kinds.items() if object not in allowed}


def _classes(hint: Any) -> tuple[Any, ...]:
    origin = get_origin(hint)
    if isinstance(hint, UnionType) or origin is Union:
        return tuple(kind for part in get_args(hint) for kind in _classes(part))
    kind = origin or hint
    return (kind,) if isinstance(kind, type) and kind is not Any else (object,)


def _is_of(kind: Any, value: Any) -> bool:
    if kind is Callable:
        return callable(value)
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(kind) if not name.startswith("_"))
    return isinstance(value, {int: Integral, float: Real}.get(kind, kind))  # numpy's numbers are none of Python's
