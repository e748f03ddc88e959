"""Schemas of scenarios and jobs: frozen structs, decoded strictly, with units converted on the way in; range checks."""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, dataclass_transform, get_args, get_type_hints

import msgspec

from windtunnel.disk_cache import home, keep, recall
from windtunnel.errors import InputError, did_you_mean, unreadable, unwritable
from windtunnel.units import parse_quantity, units_for, whole


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Schema(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, repr_omit_defaults=True
):
    """A frozen, strictly decoded struct. Equality and hash are by value.

    The range of a field of numbers is part of its type, as one of the checks below: `Annotated[float, check_positive]`.
    `check` of a subclass says what its fields must be besides; they are in their ranges then.
    """

    def __post_init__(self) -> None:
        """Raise ValueError unless every number is in the range of its field, and `check` finds nothing wrong."""
        for name, check in _ranges(type(self)):
            if isinstance(value := getattr(self, name), int | float):
                check(**{name: value})
        self.check()

    def check(self) -> None:
        """Raise ValueError unless the fields go together."""

    def over(self, default: Self) -> Self:
        """Merge with `default`: own values win, `default` fills the gaps, which are None."""
        gaps = [name for name in self.__struct_fields__ if getattr(self, name) is None]
        return msgspec.structs.replace(self, **fields_of(default, *gaps))


@cache
def _ranges(schema: type[Schema]) -> tuple[tuple[str, Callable[..., None]], ...]:
    """Return (field, check) for every field whose type has a range."""
    hints = get_type_hints(schema, include_extras=True)
    parts = ((name, part) for name, hint in hints.items() for part in (hint, *get_args(hint)))
    return tuple((name, check) for name, part in parts for check in getattr(part, "__metadata__", ()))


SchemaT = TypeVar("SchemaT")

_PROBLEM = re.compile(
    r"(?:Object (?:contains (?P<unknown>unknown)|missing required) field `(?P<field>[^`]*)`"
    r"|Invalid (?:enum )?value (?P<value>'[^']*'|-?\d+)|Expected `(?P<expected>[^`]*)`, got `(?P<given>[^`]*)`"
    r"|(?P<key>\w+) is (?P<word>'[^']*'); known: (?P<known>[^`]*?))"
    r"(?: - at `(?P<path>[^`]*)`)?$"
)
"""Messages of msgspec that are told in other words."""
_TYPE_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a table of keys and values",
    "str": "text",
}
_MAX_SHOWN = 60
"""Most characters of a wrong value that a message repeats."""


def decode(raw: Any, schema: type[SchemaT], source: str = "") -> SchemaT:
    """Decode `raw` (dicts, lists and scalars as YAML or JSON gives them) as a `schema`; quantities may have units.

    Words that a field chooses from are taken in any letter case. InputError for an unknown or missing key, a value of
    the wrong type, unit or range; names the path.

    Args:
        source: file or option that `raw` comes from, named in errors.
    """
    where = f"{source}: " if source else ""
    try:
        values = _to_si(raw, where)
    except InputError:  # of another tool's file, a strange key says more than a strange quantity
        fields = getattr(schema, "__struct_fields__", ())
        strange = next((key for key in raw if key not in fields), None) if fields and isinstance(raw, dict) else None
        if strange is None:
            raise
        raise _input_error(f"Object contains unknown field `{strange}`", where, schema, raw) from None
    while True:
        try:
            return msgspec.convert(values, type=schema, dec_hook=_decode_custom)
        except msgspec.ValidationError as error:
            if not _respell(str(error), schema, values):
                raise _input_error(str(error), where, schema, raw) from None


def _respell(message: str, schema: type, values: Any) -> bool:
    """Spell a word of `values` that `message` refuses as the choice that differs in letter case alone, if one does."""
    match = _PROBLEM.match(message)
    if match is None or not (match["value"] or match["word"]):
        return False
    path, word, known = _choice(match, schema)
    owner, _, name = path.rpartition(".")
    table, spelt = _value_at(values, owner), {each.lower(): each for each in known}.get(word.lower(), word)
    if spelt == word or not isinstance(table, dict) or table.get(name) != word:
        return False
    table[name] = spelt
    return True


def _choice(match: re.Match[str], schema: type) -> tuple[str, str, list[str]]:
    """Return the path of a word that is not known, the word, and the choices there."""
    path = match["path"] or "$"
    if match["word"]:
        return f"{path}.{match['key']}", match["word"][1:-1], match["known"].split(", ")
    return path, match["value"].strip("'"), list(dict.fromkeys(_tags_at(schema, path)))


def _decode_custom(kind: Any, raw: Any) -> Any:
    """Decode a value whose type is no schema but a class that chooses one: its `from_builtins` does."""
    return kind.from_builtins(raw)


def encode(struct: Any) -> Any:
    """Encode a struct as builtins, the inverse of `decode`: SI numbers, defaults left out."""
    return msgspec.to_builtins(struct)


def plain(value: Any) -> Any:
    """Return a struct, or what holds some, as JSON types with every field present: `encode` leaves defaults out."""
    if isinstance(value, Schema):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        return {"type": tag, **fields} if tag is not None else fields
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else msgspec.to_builtins(value)


def json_text(document: Any) -> str:
    """Return a document as indented JSON: numbers of numpy are plain ones, those that are not finite null."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=methodcaller("item")), indent=2).decode()


def yaml_text(struct: Any) -> str:
    """Return a struct as YAML; loading it gives an equal one."""
    import yaml

    return yaml.safe_dump(encode(struct), sort_keys=False, width=120)


def save(struct: Any, path: Path | str) -> None:
    """Write a struct as JSON where the file's name ends so, else as YAML; loading the file gives an equal one.

    Raises:
        InputError: the file cannot be written, or JSON has no such number.
    """
    try:
        is_json = Path(path).suffix == ".json"
        text = json.dumps(encode(struct), indent=2, allow_nan=False) if is_json else yaml_text(struct)
        Path(path).write_text(text, encoding="utf-8")
    except ValueError:
        raise InputError(f"{path}: JSON has no infinite numbers", "save it as .yaml") from None
    except OSError as error:
        raise unwritable(Path(path), error) from None


def read_yaml(path: Path) -> Any:
    """Read the content of a YAML or JSON file; InputError where it is missing, unreadable or not valid YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    if _PACKAGE in path.parents:
        return _shipped(path, text)
    import yaml

    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", error)
        raise InputError(f"{path} is not valid YAML{line}: {problem}", "is it cut off, or indented wrongly?") from None


def read_table(path: Path, kind: str, hint: str) -> dict[str, Any]:
    """Read the keys and values of a YAML or JSON file. InputError as `read_yaml`; or the file is not a `kind`, such as
    "a scenario"."""
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not {kind}: keys and values are needed", hint)
    return raw


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, with numbers such as 1e-3 and repeated keys as in `read_yaml`.

    Raises:
        yaml.YAMLError: it is not valid YAML, or holds itself, is nested too deeply or grows too large by its anchors.
    """
    from windtunnel.yaml_loader import load  # late: of shipped files the values are cached

    return load(text)


_PACKAGE = Path(__file__).parent


def _shipped(path: Path, text: str) -> Any:
    """Return the value of a YAML file of this package, from the user's cache where it was read before."""
    key = [str(path), zlib.crc32(text.encode()), len(text)]
    kept = home() / "yaml" / f"{zlib.crc32(str(path).encode()):08x}-{path.name}"
    content = recall(kept)
    if content is not None:
        with suppress(msgspec.DecodeError, ValueError):
            former, value = msgspec.msgpack.decode(content)
            if former == key:
                return value
    value = parse_yaml(text)
    with suppress(TypeError, OverflowError):
        content = msgspec.msgpack.encode([key, value])
        if msgspec.msgpack.decode(content)[1] == value:
            keep(kept, content)
    return value


_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that neither a file's name nor UTF-8 can hold."""

_MAX_INT = 2**63 - 1


def _to_si(raw: Any, where: str, name: str = "", path: str = "$") -> Any:
    """Return `raw` with text values of fields whose names have a unit as SI numbers; refuse NaN and infinity.

    Entries of a table that is itself a quantity (`peak_flops_per_s: {bf16: 989TFLOPS}`) have its unit; `sources` and
    `type` are texts.
    """
    if name in ("sources", "type"):
        return raw
    raw = builtin(raw)
    if isinstance(raw, dict):
        return {key: _to_si(value, where, _quantity(str(key), name), f"{path}.{key}") for key, value in raw.items()}
    if isinstance(raw, list):
        return [_to_si(value, where, name, f"{path}[{index}]") for index, value in enumerate(raw)]
    if isinstance(raw, float) and not math.isfinite(raw):
        raise InputError(f"{where}{path} is {raw}; a finite number is needed")
    if isinstance(raw, int) and abs(raw) > _MAX_INT:
        raise InputError(f"{where}{path} is {raw:.3g}; at most {_MAX_INT:.3g} is needed")
    if isinstance(raw, str) and _NO_TEXT.search(raw):
        raise InputError(f"{where}{path} is {raw!r:.60}, which has characters that no text has")
    if isinstance(raw, str) and units_for(name) is not None:
        try:
            value = parse_quantity(name, raw)
        except InputError as error:
            raise InputError(f"{where}{path}: {error.message.removeprefix(name + ': ')}", error.hint) from None
        return int(value) if value.is_integer() else value
    if isinstance(raw, str) and f"_{name}".endswith("_tokens") and raw[:1].isdigit() and raw[-1:].isalpha():
        with suppress(ValueError):  # else the name of a trace's column
            return whole(raw)
    return raw


def builtin(value: Any) -> Any:
    """Return a path as its text, a range as a list, and numbers and arrays of numpy or pandas as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, range):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _quantity(key: str, table: str) -> str:
    """Return the name whose unit the entry `key` of `table` has."""
    return key if key == "type" or units_for(key) or not units_for(table) else table


def _input_error(message: str, where: str, schema: type, raw: Any) -> InputError:
    """Return msgspec's message as an `InputError` that lists near fields."""
    match = _PROBLEM.match(message)
    if match is None:
        return InputError(f"{where}{message[:1].lower()}{message[1:]}".replace(" - at `", " at ").replace("`", ""))
    path, field, value = match["path"] or "$", match["field"], match["value"]
    if match["unknown"]:
        known = _fields_at(schema, path, raw)
        hint = did_you_mean(field, known, f"known here: {', '.join(known)}" if known else None)
        elsewhere = [other for other in _paths_to(schema, field) if other != f"{path}.{field}"]
        hint = f"it is {' or '.join(elsewhere)}" if len(elsewhere) in (1, 2) else hint
        return InputError(f"{where}unknown key {path}.{field}", hint)
    if field is not None:
        known = _tags_at(schema, f"{path}.{field}")
        names = [field] if known else _fields_at(schema, path, raw, is_missing=True) or [field]
        missing = f"{', '.join(f'{path}.{name}' for name in names)} {'are' if names[1:] else 'is'} missing"
        return InputError(f"{where}{missing}", f"one of: {', '.join(known)}" if known else None)
    if match["expected"]:
        return _wrong_type(where, schema, raw, match["expected"].split(" | "), match["given"], path)
    path, word, known = _choice(match, schema)
    if value and not value.startswith("'"):
        return InputError(f"{where}{path} is {value}; one of {', '.join(known)} is needed")
    hint = did_you_mean(word, known, f"known here: {', '.join(known)}" if known else None)
    return InputError(f"{where}{path} is {word!r}, which is not known", hint)


def _wrong_type(where: str, schema: type, raw: Any, expected: list[str], given: str, path: str) -> InputError:
    needed = " or ".join(_TYPE_WORDS.get(word, word) for word in expected if word != "null")
    hint = None
    if "object" in expected:
        tags = _tags_at(schema, f"{path}.type")
        known = tags or _fields_at(schema, path, raw)
        hint = f"its {'types' if tags else 'keys'}: {', '.join(known)}" if known else None
    elif "str" in expected and given in ("int", "float"):
        hint = "put it in quotes"
    value = _value_at(raw, path)
    shown = repr(value) if isinstance(value, str | int | float) else _TYPE_WORDS.get(given, given)
    shown = f"{shown[:_MAX_SHOWN]}..." if len(shown) > _MAX_SHOWN else shown
    return InputError(f"{where}{path} is {shown}; {needed} is needed", hint)


def _steps(path: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*|\[[^\]]*\]", path.removeprefix("$"))


def _types_at(schema: type, path: str) -> list[Any]:
    """Return the struct or scalar types that may stand at `path` below `schema`."""
    types: list[Any] = [msgspec.inspect.type_info(schema)]
    for step in _steps(path):
        types = [inner for kind in _flatten(types) for inner in _descend(kind, step)]
    return _flatten(types)


def _flatten(types: list[Any]) -> list[Any]:
    flat: list[Any] = []
    for kind in types:
        flat.extend(_flatten(list(kind.types)) if isinstance(kind, msgspec.inspect.UnionType) else [kind])
    return flat


def _descend(kind: Any, step: str) -> list[Any]:
    if isinstance(kind, msgspec.inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        return [kind.item_type]
    if isinstance(kind, msgspec.inspect.DictType):
        return [kind.value_type]
    return []


def _paths_to(schema: type, name: str) -> list[str]:
    """Return the paths of the keys `name` that lie nearest to the top of a schema, at most three tables deep."""
    level = [("$", msgspec.inspect.type_info(schema))]
    for _ in range(3):
        below = [
            (f"{path}.{field.encode_name}", field.type)
            for path, kind in level
            for struct in _flatten([kind])
            if isinstance(struct, msgspec.inspect.StructType)
            for field in struct.fields
        ]
        if found := [path for path, _ in below if path.endswith(f".{name}")]:
            return list(dict.fromkeys(found))
        level = below
    return []


def _fields_at(schema: type, path: str, raw: Any, is_missing: bool = False) -> list[str]:
    """Return the keys that `raw` may have at `path`, or needs and lacks; in a tagged union, those of the alternative
    that its tag chose."""
    structs = [kind for kind in _types_at(schema, path) if isinstance(kind, msgspec.inspect.StructType)]
    value = _value_at(raw, path)
    chosen = [kind for kind in structs if isinstance(value, dict) and value.get(kind.tag_field) == kind.tag]
    fields = [field for kind in chosen or structs for field in kind.fields if field.required or not is_missing]
    names = dict.fromkeys(field.encode_name for field in fields)
    return [name for name in names if not (is_missing and name in (value or ()))]


def _value_at(raw: Any, path: str) -> Any:
    for step in _steps(path):
        if isinstance(raw, dict):
            raw = raw.get(step)
        elif isinstance(raw, list) and step[1:-1].isdigit():
            raw = raw[int(step[1:-1])]
        else:
            return None
    return raw


def _tags_at(schema: type, path: str) -> list[str]:
    owner, _, last = path.rpartition(".")
    tags = [
        str(kind.tag)
        for kind in _types_at(schema, owner)
        if isinstance(kind, msgspec.inspect.StructType) and kind.tag_field == last
    ]
    enums = [kind.cls for kind in _types_at(schema, path) if isinstance(kind, msgspec.inspect.EnumType)]
    literals = [kind for kind in _types_at(schema, path) if isinstance(kind, msgspec.inspect.LiteralType)]
    words = [str(word) for kind in literals for word in kind.values]
    return tags + [member.value for cls in enums for member in cls] + words


MAX_SEED = 2**53
"""Largest seed: JSON numbers hold it exactly, and seeds of further streams, a little larger, fit in 64 bits."""


def fields_of(thing: Any, *names: str) -> dict[str, Any]:
    """Return the attributes `names` of a struct or another object by name, as the checks below take them."""
    return {name: getattr(thing, name) for name in names}


def _check(holds: Callable[[float], bool], needed: str, values: dict[str, float | None]) -> None:
    """Raise ValueError unless every value that is given passes; 0.0 is shown as people write it, as 0."""
    for name, value in values.items():
        if value is not None and not holds(value):
            raise ValueError(f"{name} is {str(value).removesuffix('.0')}; {needed} is needed")


def check_at_least(least: float, /, **values: float | None) -> None:
    """Raise ValueError unless every value that is given is at least `least`."""
    _check(lambda value: value >= least, f"at least {least}", values)


def check_finite(**values: float | None) -> None:
    """Raise ValueError unless every value that is given is finite."""
    _check(math.isfinite, "a finite number", values)


def check_non_negative(**values: float | None) -> None:
    """Raise ValueError unless every value that is given is finite and at least 0."""
    check_at_least(0, **values)
    check_finite(**values)


def check_positive(**values: float | None) -> None:
    """Raise ValueError unless every value that is given is finite and above 0."""
    _check(lambda value: value > 0, "more than 0", values)
    check_finite(**values)


Positive = Annotated[float, check_positive]
NonNegative = Annotated[float, check_non_negative]
AtLeastOne = Annotated[int, partial(check_at_least, 1)]
Whole = Annotated[int, partial(check_at_least, 0)]


def check_between(least: float, largest: float, /, **values: float | None) -> None:
    """Raise ValueError unless every value that is given is from `least` to `largest`."""
    _check(lambda value: least <= value <= largest, f"from {least} to {largest}", values)


def check_fraction(**values: float | None) -> None:
    """Raise ValueError unless every value that is given is from 0 to 1."""
    check_between(0, 1, **values)


def check_positive_fraction(**values: float | None) -> None:
    """Raise ValueError unless every value that is given is above 0 and at most 1."""
    check_positive(**values)
    check_fraction(**values)


Fraction = Annotated[float, check_fraction]
PositiveFraction = Annotated[float, check_positive_fraction]


def check_seed(seed: int) -> None:
    """Raise ValueError unless a seed is from 0 to `MAX_SEED`."""
    check_between(0, MAX_SEED, seed=seed)


def check_weights(weights: tuple[float, ...] | None, num_values: int) -> None:
    """Raise ValueError unless there is a weight for every value, none is negative, and they do not sum to 0."""
    if weights is None:
        return
    if len(weights) != num_values:
        raise ValueError(f"there are {num_values} values but {len(weights)} weights")
    for weight in weights:
        check_non_negative(weights=weight)
    check_positive(**{"the sum of weights": math.fsum(weights)})


def dotted(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted path -> value of a table of tables, as `set_path` takes them."""
    paths: dict[str, Any] = {}
    for key, value in table.items():
        paths |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return paths


def differences(scenarios: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return dotted path -> its value in each scenario, where not all are equal; None where it is missing."""
    flat = [flattened(scenario) for scenario in scenarios]
    paths = dict.fromkeys(path for scenario in flat for path in scenario)
    values_by_path = {path: [scenario.get(path) for scenario in flat] for path in paths}
    return {path: values for path, values in values_by_path.items() if any(value != values[0] for value in values)}


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """Return nested tables and lists as dotted path -> scalar."""
    if isinstance(value, Mapping) and value:
        parts = {f"{path}.{key}" if path else str(key): inner for key, inner in value.items()}
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        parts = {f"{path}.{index}": inner for index, inner in enumerate(value)}
    else:
        return {path: value}
    return {name: scalar for key, inner in parts.items() for name, scalar in flattened(inner, key).items()}


def with_defaults(raw: Mapping[str, Any], schema: type[Schema]) -> dict[str, Any]:
    """Return dotted path -> value of an encoded struct, with its defaults; empty where it is no such struct."""
    try:
        return flattened(plain(decode(raw, schema)))
    except InputError:
        return {}


def set_path(raw: dict[str, Any], dotted: str, value: Any) -> None:
    """Set the value at a dotted path below `raw`, making the tables on the way; entries of a list by position, from 0.
    InputError where the path goes through a value without keys, or past the end of a list."""
    table: Any = raw
    parents = dotted.split(".")
    for depth, name in enumerate(parents):
        path = ".".join(parents[:depth])
        key: Any = name
        if isinstance(table, list):
            key = _position(name, len(table), path, dotted)
        elif not isinstance(table, dict):
            raise InputError(f"{dotted} cannot be set: {path} is {table!r} and has no keys below it")
        if depth == len(parents) - 1:
            table[key] = builtin(value)
            return
        below = table.get(key) if isinstance(table, dict) else table[key]
        if below is None and parents[depth + 1].isdecimal():
            owner = ".".join(parents[: depth + 1])
            raise InputError(f"{dotted} cannot be set: there is no {owner} yet", f"give the whole list: {owner}=[...]")
        table[key] = {} if below is None else list(below) if isinstance(below, tuple) else below
        table = table[key]


def _position(name: str, length: int, path: str, dotted: str) -> int:
    if name.isdecimal() and int(name) < length:
        return int(name)
    known = "0" if length == 1 else f"0 to {length - 1}"
    raise InputError(
        f"{dotted} cannot be set: {path} is a list of {length}, and {name!r} is none of its positions",
        f"positions count from 0: {path}.{known}" if length else f"give the whole list: {path}=[...]",
    )


def short_path(dotted: str) -> str:
    """Return the last key of a dotted path, from its list on where it goes through one: `pools.1.replicas`."""
    parts = dotted.split(".")
    first = next((index - 1 for index, part in enumerate(parts) if part.isdecimal() and index), len(parts) - 1)
    return ".".join(parts[first:])
