"""Hypothesis strategies: edits of a seed that keep its structure, with values that fit, nearly fit, or do not fit."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st

from fuzz.inputs import Edit, Place, Tree, edited, places, seeds, value_at
from windtunnel import catalog
from windtunnel.lab.experiments.schema import Experiment
from windtunnel.network.topology import Topology
from windtunnel.search.space.space import Space
from windtunnel.serving.calibration import Calibration
from windtunnel.serving.codes import PER_REQUEST_SCHEDULERS, SCHEDULERS
from windtunnel.serving.scenario import Scenario
from windtunnel.training.job import TrainingJob

SCHEMAS: dict[str, tuple[Any, ...]] = {
    "scenario.yaml": (Scenario,),
    "job.yaml": (TrainingJob,),
    "space.yaml": (Space, Scenario),
    "experiment.yaml": (Experiment,),
    "topology.yaml": (Topology,),
    "calibration.yaml": (Calibration,),
}
"""Name of a seed's file -> the schemas that it is decoded as."""

SMALL = [0, 1, 2, 3, 4, 7, 8, 16, 100]
EXTREME = [
    *(-1, 10**6, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**18, 10**30, -(2**63), -(2**70)),
    *(0.0, -0.0, 0.1, 0.5, 1.0, 1.5, 1e-300, 5e-324, 1e-9, 1e9, 1e300, 1.7e308, -1e-9, -1e300),
    *(float("nan"), float("inf"), float("-inf")),
]
TEXTS = [
    *("", " ", "0", "-1", "1e400", "nan", "inf", "None", "null", "true", "yes", "~", "1_000", "0x10", "1,000"),
    *("2026-13-45", "2026-01-31", "2023-11-16 18:01:51", "12:30:45", "1s", "1 parsec", "-5ms", "1e300h", "10GiB"),
    *("<script>alert(1)</script>", "'\"><b>x", "{{7*7}}", "%s%n", "a\0b", "a\nb", "\ud800", "\u202eabc", "é" * 50),
    *("\U0001f600" * 3, "../../etc/passwd", "/etc/passwd", "/dev/null/x", "~", "x" * 300, "x" * 5000, "[1, 2", "-"),
    *("&a [*a]", "!!python/object:os.system", "module:function", "os:system", "math:sqrt", "5%", "1e9d", "0-0"),
    *("1-5", "5-1", "1:2:0", "1:9:1e-9", "a=b", "=", "tp=1", "ttft=1s", "*"),
]  # fmt: skip
KEYS = ["x", "", "type", "name", "path", "é", "<b>", "__class__", "0"]
FORBIDDEN = (
    *("--hub", "--open", "--start", "--ray", "--executor", "--processes", "--workers", "--address", "--store"),
    *("--resume", "fetch"),
)
"""Words that would use the network, another process, or files of the user's."""


@cache
def vocabulary() -> list[str]:
    """Names of the catalog and of alternatives, and every text in the seeds."""
    texts = {
        value for tree in seeds().values() for place in places(tree) if isinstance(value := value_at(tree, place), str)
    }
    names = [name for kind in ("models", "devices", "nodes", "engines", "traces") for name in catalog.names(kind)]
    short = sorted(text for text in texts if len(text) < 200)
    return [*short, *names[::3], *SCHEDULERS, *PER_REQUEST_SCHEDULERS]


@cache
def by_key() -> dict[str, list[Any]]:
    """Every value in the seeds, by the last key of its place."""
    values: dict[str, list[Any]] = {}
    for tree in seeds().values():
        for place in places(tree):
            if isinstance(place[-1], str):
                values.setdefault(place[-1], []).append(value_at(tree, place))
    return values


@cache
def numbers() -> st.SearchStrategy[Any]:
    return st.sampled_from(SMALL) | st.sampled_from(EXTREME) | st.floats() | st.integers(-(2**70), 2**70)


@cache
def scalars() -> st.SearchStrategy[Any]:
    return st.one_of(numbers(), st.sampled_from(TEXTS), st.none(), st.booleans(), st.text(max_size=20))


@cache
def structures() -> st.SearchStrategy[Any]:
    huge = st.sampled_from([[1] * 5000, ["a"] * 3000, {str(key): 1 for key in range(2000)}, [[[[[[[1]]]]]]]])
    return st.one_of(
        st.lists(scalars(), max_size=3), st.dictionaries(st.sampled_from(KEYS), scalars(), max_size=2), huge
    )


@cache
def any_word() -> st.SearchStrategy[Any]:
    short = st.sampled_from(["0", "1", "2", "8", "0.5", "3"])
    return st.one_of(st.sampled_from(vocabulary()), st.sampled_from(TEXTS), short)


@cache
def wild() -> st.SearchStrategy[Any]:
    return scalars() | structures()


@cache
def keys() -> st.SearchStrategy[str]:
    return st.sampled_from([*KEYS, *by_key()])


@st.composite
def near(draw: st.DrawFn, old: Any, key: Any) -> Any:
    """A value that may fit where `old` is: another one of that key, a word, or the number changed a little."""
    choices: list[st.SearchStrategy[Any]] = []
    if isinstance(old, bool):
        choices.append(st.just(not old))
    elif isinstance(old, int | float):
        choices += [st.sampled_from([old + 1, old - 1, old * 2, old / 2, -old, 0, 1]), st.sampled_from(SMALL)]
    elif isinstance(old, str):
        choices.append(any_word())
    if others := by_key().get(str(key)):
        choices.append(st.sampled_from(others))
    if not choices:
        choices.append(scalars())
    return draw(st.one_of(choices))


# ---------------------------------------------------------------------------------------------- values of a schema


type_info = cache(msgspec.inspect.type_info)


def _fields(kind: Any, place: Place) -> Iterator[msgspec.inspect.Field]:
    """The fields of the structs that may stand at `place` below a type."""
    kinds = [type_info(kind)]
    for key in place:
        below: list[Any] = []
        for each in _flat(kinds):
            if isinstance(each, msgspec.inspect.StructType):
                below += [field.type for field in each.fields if field.encode_name == key]
            elif isinstance(each, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
                below.append(each.item_type)
            elif isinstance(each, msgspec.inspect.DictType):
                below.append(each.value_type)
        kinds = below
    for each in _flat(kinds):
        if isinstance(each, msgspec.inspect.StructType):
            yield from each.fields


def _flat(kinds: list[Any]) -> list[Any]:
    return [
        part
        for kind in kinds
        for part in (_flat(list(kind.types)) if isinstance(kind, msgspec.inspect.UnionType) else [kind])
    ]


def of_type(kind: Any, name: str, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that a field of a schema may have, mostly."""
    match kind:
        case msgspec.inspect.UnionType():
            return st.one_of([of_type(part, name, depth) for part in kind.types])
        case msgspec.inspect.StructType():
            return _struct(kind, depth)
        case msgspec.inspect.EnumType():
            return st.sampled_from([member.value for member in kind.cls])
        case msgspec.inspect.LiteralType():
            return st.sampled_from(list(kind.values))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            return st.sampled_from(SMALL)
        case msgspec.inspect.FloatType():
            return st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 30.0])
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.StrType():
            return st.sampled_from(known) if (known := _words(name)) else st.sampled_from(vocabulary())
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return st.lists(of_type(kind.item_type, name, depth + 1), max_size=2)
        case msgspec.inspect.TupleType():
            return st.tuples(*(of_type(item, name, depth + 1) for item in kind.item_types)).map(list)
        case msgspec.inspect.DictType():
            return st.dictionaries(
                st.sampled_from(_words(name) or KEYS), of_type(kind.value_type, name, depth + 1), max_size=2
            )
        case _:
            return st.sampled_from(by_key().get(name) or [1, "x", {}])


def _words(name: str) -> list[str]:
    return [value for value in by_key().get(name, []) if isinstance(value, str)]


@st.composite
def _struct(draw: st.DrawFn, kind: msgspec.inspect.StructType, depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {kind.tag_field: kind.tag} if kind.tag_field else {}
    for field in kind.fields:
        if field.required or (depth < 3 and draw(st.integers(0, 3)) == 0):
            value[field.encode_name] = draw(of_type(field.type, field.encode_name, depth + 1))
    return value


# ---------------------------------------------------------------------------------------------------------- edits


@st.composite
def edits(draw: st.DrawFn, tree: Tree) -> list[Edit]:
    """One to four edits, one after the other."""
    made: list[Edit] = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4]))):
        made.append(draw(_edit(edited(tree, made))))
    return made


@st.composite
def _edit(draw: st.DrawFn, tree: Tree) -> Edit:
    every = [place for place in places(tree) if place[0] in ("command", "files", "http") and place != ("command", 0)]
    every = [place for place in every if len(place) > 1]
    if not every:
        return Edit("set", ("files", "x"), "")
    place = draw(st.sampled_from(every))
    old = value_at(tree, place)
    kind = draw(st.sampled_from([*["near"] * 6, *["fill"] * 4, "wild", "delete", "double", "new", "move", "text"]))
    if place[0] == "command" and kind in ("new", "fill"):
        return _checked(Edit("set", ("command", place[1]), draw(any_word())))
    if kind == "fill" and place[0] == "files":
        if filled := draw(_filled(place)):
            return filled
        kind = "near"
    match kind:
        case "near" | "fill":
            return _checked(Edit("set", place, draw(near(old, place[-1]))))
        case "wild":
            return _checked(Edit("set", place, draw(wild())))
        case "new":
            owner = place if isinstance(old, dict) else place[:-1]
            return Edit("set", (*owner, draw(keys())), draw(wild()))
        case "move":
            return Edit("move", place, draw(keys()))
        case "text" if place[0] == "files":
            words = draw(st.sampled_from([*TEXTS, "\t", ",", "\n", "}", "[", "\r\n", ":", '"', "\ufeff"]))
            share = draw(st.floats(0, 1))
            return draw(st.sampled_from([Edit("cut", place[:2], share), Edit("insert", place[:2], [share, words])]))
        case _:
            return Edit("double" if kind == "double" else "delete", place)


@st.composite
def _filled(draw: st.DrawFn, place: Place) -> Edit | None:
    """Give a struct one more field of its schema, or a field another value of its type."""
    for _ in range(3):
        choices = [field for schema in SCHEMAS.get(str(place[1]), ()) for field in _fields(schema, place[2:])]
        if choices:
            field = draw(st.sampled_from(choices))
            return Edit("set", (*place, field.encode_name), draw(of_type(field.type, field.encode_name)))
        place = place[:-1]
        if len(place) < 2:
            return None
    return None


def _checked(edit: Edit) -> Edit:
    """An edit of a command keeps its words texts, and puts none there that would leave this process."""
    if edit.place[0] != "command":
        return edit
    word = edit.value if isinstance(edit.value, str) else str(edit.value)
    word = word[:5000].replace("\0", "")
    if any(word.startswith(name) for name in FORBIDDEN):
        word = "x"
    return Edit("set", edit.place, word)
