"""What a shell does to a script before it runs a command: variables, arithmetic, arrays and conditions."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from windtunnel.errors import InputError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[@\])?)(\+?)=(.*)", re.DOTALL)
_IN_ARRAY = r""" "(?:[^"\\]|\\.)*" | '[^']*' | \$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\) | [^()"'] """
ARRAY = re.compile(
    rf"""(^|;|&&|\bthen|\belse|\bdo)[ \t]*(\w+)(\+?)=\(((?:{_IN_ARRAY.replace(" ", "")})*+|[^()]*)\)""", re.MULTILINE
)
"""An array's assignment; parentheses in it are within quotes or `$(...)`."""
OF_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
VARIABLE = re.compile(r"\$(?:\((\w+)\)|\{(\w+)(?::?[-=]([^}]*))?\}|(\w+))")
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")

REFERENCE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
"""A variable in a word."""

Environment = Mapping[str, str]
"""Variable -> value; an array is a variable `NAME[@]` of words as a shell quotes them."""
Part = tuple[str, list[str]]
"""The operator before a simple command, as `&&` or a line's end, and its words."""

OPERATORS: dict[type[ast.operator] | type[ast.cmpop], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a // b if a * b >= 0 else -(-a // b),
    ast.Mod: operator.mod,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
MOST_WORDS = 10_000
LONGEST = 200
"""Characters of an arithmetic expression that is computed."""


def of_slurm(text: str) -> str:
    """Return assignments of the variables that Slurm sets for a script with `#SBATCH` lines; empty without them."""
    lines = " ".join(re.findall(r"(?m)^#SBATCH[ \t]+([^#\n]*)", text))
    said = dict(re.findall(r"(?<!\S)--?([\w-]+)[= ]\s*(?:[\w-]+:)*(\d+)", lines))
    nodes, each = said.get("nodes", said.get("N")), said.get("ntasks-per-node")
    tasks = said.get("ntasks", said.get("n")) or (each and str(int(nodes or 1) * int(each)))
    values = {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS": tasks, "NTASKS_PER_NODE": each}
    values["GPUS_PER_NODE"] = values["GPUS_ON_NODE"] = said.get("gpus-per-node", said.get("gres"))
    return "".join(f"SLURM_{name}={value}\n" for name, value in values.items() if value)


def with_arrays_as_variables(text: str) -> str:
    """Return a script whose arrays are assigned as one word, which `unfolded` takes apart."""
    return ARRAY.sub(lambda at: f"{at[1]} {at[2]}[@]{at[3]}={shlex.quote(' '.join(at[4].split()) + ' ')}", text)


def is_unset(word: str) -> bool:
    """Whether a word of a command is an array or a variable that the text does not set."""
    return bool(OF_ARRAY.fullmatch(word) or REFERENCE.fullmatch(word))


def unfolded(word: str, environment: Environment) -> list[str]:
    """Return a word, or the words of the array that it stands for."""
    match = OF_ARRAY.fullmatch(word)
    return shlex.split(environment.get(f"{match[1]}[@]", shlex.quote(word))) if match else [word]


def assigned(name: str, text: str, environment: Environment) -> str:
    """Return the value of a variable or an array that a text is assigned to. InputError for an array with unbalanced
    quotes, or with too many words."""
    value = filled(text, environment)
    if not name.endswith("[@]"):
        return value
    try:
        words = [part for word in shlex.split(value) for part in unfolded(word, environment)]
    except ValueError as error:
        raise InputError(f"--from-command: {error} in the command line") from None
    if len(words) > MOST_WORDS:
        raise InputError(f"--from-command: an array of {len(words):,} words; {MOST_WORDS:,} at most are read")
    return f"{shlex.join(words)} "


def filled(text: str, environment: Environment) -> str:
    """Return a text with the variables that are known, or have a default, in place."""

    def value(match: re.Match[str]) -> str:
        default = match[0] if match[3] is None else match[3]
        return environment.get(match[1] or match[2] or match[4], default)

    return ARITHMETIC.sub(lambda match: _computed(match, environment), VARIABLE.sub(value, text))


def command_in_variable(words: list[str], environment: Environment) -> str:
    """Return the command of several words that a variable, the first word, holds; empty where it holds none."""
    text = filled(words[0], environment) if words and REFERENCE.fullmatch(words[0]) else ""
    return text if " " in text.strip() and not {*referenced(words[:1])} & {*referenced([text])} else ""


def quoted(word: str) -> str:
    """Return a word as a shell is to read it: variables that a text did not set are left to the shell."""
    if not REFERENCE.search(word):
        return shlex.quote(word)
    pieces, end = list[str](), 0
    for match in REFERENCE.finditer(word):
        pieces += [word[end : match.start()] and shlex.quote(word[end : match.start()]), f'"{match[0]}"']
        end = match.end()
    return "".join([*pieces, word[end:] and shlex.quote(word[end:])])


def referenced(words: Iterable[str]) -> list[str]:
    """Return the names of the variables in some words."""
    return list(dict.fromkeys(match[1] or match[2] for word in words for match in REFERENCE.finditer(word)))


def _computed(match: re.Match[str], environment: Environment) -> str:
    """Return the value of `$((...))` of whole numbers; the text itself where a variable is not known or there is more
    in it than sums, products, comparisons and a choice."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: environment.get(name[0], name[0]), match[1])
    choice = re.fullmatch(r"([^?:]*)\?([^?:]*):([^?:]*)", text)
    python = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})" if choice else text
    is_plain = re.fullmatch(r"[\d\s()+*/%<>=!?:-]*", text) is not None
    with suppress(SyntaxError, ValueError, ArithmeticError, KeyError, RecursionError):
        if is_plain and len(python) <= LONGEST:
            return str(int(_number(ast.parse(python.strip(), mode="eval").body)))
    return match[0]


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_number(left), _number(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return OPERATORS[type(op)](_number(left), _number(right))
        case ast.IfExp(test=test, body=body, orelse=other):
            return _number(body if _number(test) else other)
        case _:
            raise ValueError


@dataclass
class _Branch:
    """A branch of an `if`; None: what decides is not known."""

    is_met: bool | None
    """Its condition."""
    is_past: bool | None = False
    """Whether an earlier branch was taken."""
    is_condition: bool = True
    """Whether its condition goes on."""


def live(parts: Iterable[Part], environment: Environment) -> Iterator[list[str]]:
    """Yield the words of each simple command that may run, in order: not those of a branch whose condition is false.

    A variable that is not set is empty, as in a shell. Of conditions that are not comparisons nothing is known: all of
    their branches are yielded.

    Args:
        parts: simple commands.
        environment: as it is when a command comes; whoever takes the words may set variables.
    """
    branches: list[_Branch] = []
    for before, words in parts:
        first, rest = words[0], words[1:]
        if first == "if":
            branches.append(_Branch(_holds(rest, environment)))
        elif branches and first == "fi":
            branches.pop()
            continue
        elif branches and first in ("elif", "else"):
            branch, condition = branches[-1], _holds(rest, environment) if first == "elif" else True
            branches[-1] = _Branch(condition, _either(branch.is_past, branch.is_met), first == "elif")
            words = [] if first == "elif" else rest
        elif branches and first == "then":
            branches[-1].is_condition, words = False, rest
        elif branches and branches[-1].is_condition:
            branch, holds = branches[-1], _holds(words, environment)
            branch.is_met = _either(branch.is_met, holds) if before == "||" else _both(branch.is_met, holds)
        is_live = all(branch.is_met is not False and branch.is_past is not True for branch in branches)
        if words and is_live:
            yield words


def _either(one: bool | None, other: bool | None) -> bool | None:
    return True if True in (one, other) else None if None in (one, other) else False


def _both(one: bool | None, other: bool | None) -> bool | None:
    return False if False in (one, other) else None if None in (one, other) else True


def _holds(words: list[str], environment: Environment) -> bool | None:
    """Say whether a test in brackets holds; None for another command, and for numbers that are none."""
    if words[:1] == ["!"]:
        holds = _holds(words[1:], environment)
        return None if holds is None else not holds
    if not {"[", "[[", "test", "]", "]]"} & set(words):
        return None
    match [VARIABLE.sub("", filled(word, environment)) for word in words if word not in ("[", "[[", "test", "]", "]]")]:
        case ["-n", text] | [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [text, "=" | "==", pattern]:
            return fnmatchcase(text, pattern)
        case [text, "!=", pattern]:
            return not fnmatchcase(text, pattern)
        case [one, comparison, other] if comparison in COMPARISONS:
            is_number = one.lstrip("-").isdecimal() and other.lstrip("-").isdecimal()
            return COMPARISONS[comparison](int(one), int(other)) if is_number else None
        case _:
            return None
