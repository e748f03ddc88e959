"""Read YAML text by YAML 1.2's rules where PyYAML follows 1.1, and refuse text that would fill the memory."""

import re
from typing import Any, ClassVar

import yaml


def load(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError: it is not valid YAML, or holds itself, is nested too deeply or grows too large by its anchors.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # A tag such as `!!int` before text that is none.
        raise yaml.MarkedYAMLError(problem=f"a value does not fit its tag ({error})") from None
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deeply") from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's fast loader, which follows YAML 1.1, with three of 1.2's rules.

    1e-3 is a number, 2026-01-31 a text, and keys may not repeat.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        repeated = next((key for position, key in enumerate(keys) if key in keys[:position]), None)
        if repeated is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {repeated!r} is repeated", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_MAX_YAML_DEPTH, _MAX_YAML_VALUES = 100, 10_000_000


def _count_values(node: yaml.Node, counted: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the number of values at and below a YAML node, and their depth, as if aliases were written out.

    Args:
        counted: results of the nodes met so far, by id; None for a node whose values are being counted.
    """
    problem = None
    if id(node) not in counted:
        counted[id(node)] = None
        below: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            below = [part for entry in node.value for part in entry]
        sizes = [_count_values(child, counted) for child in below]
        counted[id(node)] = 1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    size, depth = counted[id(node)] or (0, 0)
    if not size:
        problem = "a value holds itself"
    elif size > _MAX_YAML_VALUES:
        problem = f"its anchors stand for more than {_MAX_YAML_VALUES:,} values"
    elif depth > _MAX_YAML_DEPTH:
        problem = "it is nested too deeply"
    if problem:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return size, depth


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
