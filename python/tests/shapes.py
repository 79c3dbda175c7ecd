"""A check that real results match their declared types, and nodes of a cluster for tests without one."""

from __future__ import annotations

import sys
import types
import typing
from typing import Any, Literal, Union

import typing_extensions

from plimsoll.ray.cluster import Node

MIB = 1 << 20


def node(name: str, vram_mib: int | None = None, memory_mib: int = 1000, *, alive: bool = True, lost_reason: str | None = None) -> Node:
    """Creates a node with a GPU of `vram_mib`, or with a CPU."""
    node = Node(
        name=name,
        id=name,
        ip=name,
        alive=alive,
        model="card",
        simulated=False,
        cpus=1,
        gpus=0,
        vram_mib=vram_mib,
        memory_bytes=memory_mib * MIB,
        free_bytes=None,
        runs=[],
        reservations=[],
    )
    if lost_reason is not None:
        node["lost_reason"] = lost_reason
    return node


def type_errors(value: object, kind: Any, path: str = "value") -> list[str]:
    """Returns the differences between a value and its declared type, each with its path."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return []
    if origin is Literal:
        return [] if value in typing.get_args(kind) else [f"{path} is {value!r}, not one of {typing.get_args(kind)}"]
    if origin in (Union, types.UnionType):
        every = [type_errors(value, one, path) for one in typing.get_args(kind)]
        return [] if [] in every else [line for lines in every for line in lines]
    if origin is list:
        (of,) = typing.get_args(kind)
        elements = ((one, f"{path}[{index}]") for index, one in enumerate(typing.cast(list[object], value)))
        return _class_errors(value, list, path) or [line for one, element_path in elements for line in type_errors(one, of, element_path)]
    if origin is dict:
        _, of = typing.get_args(kind)
        inside = typing.cast(dict[str, object], value)
        return _class_errors(value, dict, path) or [
            line for key, one in inside.items() for line in type_errors(one, of, f"{path}.{key}")
        ]
    if typing.is_typeddict(kind):
        return _class_errors(value, dict, path) or _key_errors(typing.cast(dict[str, object], value), kind, path)
    if kind is float:
        return [] if isinstance(value, (int, float)) and not isinstance(value, bool) else _class_errors(value, float, path)
    return _class_errors(value, kind, path)


def _key_errors(value: dict[str, object], kind: Any, path: str) -> list[str]:
    # The module imports this name for type checkers only.
    vars(sys.modules[kind.__module__]).setdefault("NotRequired", typing_extensions.NotRequired)
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    lines = [f"{path}.{key} is not declared" for key in value if key not in hints]
    for key, of in hints.items():
        optional = str(typing.get_origin(of)).endswith(".NotRequired")
        if key in value:
            lines += type_errors(value[key], typing.get_args(of)[0] if optional else of, f"{path}.{key}")
        elif not optional:
            lines.append(f"{path}.{key} is missing")
    return lines


def _class_errors(value: object, kind: type, path: str) -> list[str]:
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return []
    return [f"{path} is {value!r}; expected {kind.__name__}"]
