"""Shapes of what the package gives: whether a value is of the type that is written down, so that tests hold documented types and
what really comes back together; and nodes of a cluster as it would describe them, for tests without one."""

from __future__ import annotations

import sys
import types
import typing
from typing import Any, Literal, Union

import typing_extensions

from plimsoll.ray.cluster import Node

MIB = 1 << 20


def node(name: str, vram_mib: int | None = None, memory_mib: int = 1000, *, alive: bool = True, gone: str | None = None) -> Node:
    """A node that gives a device with memory of its own, or its processor."""
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
        kept=[],
    )
    if gone is not None:
        node["gone"] = gone
    return node


def wrong(value: object, kind: Any, place: str = "it") -> list[str]:
    """What about a value is not as its type says, with the place."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return []
    if origin is Literal:
        return [] if value in typing.get_args(kind) else [f"{place} is {value!r}, not one of {typing.get_args(kind)}"]
    if origin in (Union, types.UnionType):
        every = [wrong(value, one, place) for one in typing.get_args(kind)]
        return [] if [] in every else [line for lines in every for line in lines]
    if origin is list:
        (of,) = typing.get_args(kind)
        places = ((one, f"{place}[{index}]") for index, one in enumerate(typing.cast(list[object], value)))
        return _not_a(value, list, place) or [line for one, at in places for line in wrong(one, of, at)]
    if origin is dict:
        _, of = typing.get_args(kind)
        inside = typing.cast(dict[str, object], value)
        return _not_a(value, dict, place) or [
            line for key, one in inside.items() for line in wrong(one, of, f"{place}.{key}")
        ]
    if typing.is_typeddict(kind):
        return _not_a(value, dict, place) or _wrong_keys(typing.cast(dict[str, object], value), kind, place)
    if kind is float:
        return [] if isinstance(value, (int, float)) and not isinstance(value, bool) else _not_a(value, float, place)
    return _not_a(value, kind, place)


def _wrong_keys(value: dict[str, object], kind: Any, place: str) -> list[str]:
    # Type checkers alone see this name there.
    vars(sys.modules[kind.__module__]).setdefault("NotRequired", typing_extensions.NotRequired)
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    lines = [f"{place}.{key} is not written down" for key in value if key not in hints]
    for key, of in hints.items():
        optional = str(typing.get_origin(of)).endswith(".NotRequired")
        if key in value:
            lines += wrong(value[key], typing.get_args(of)[0] if optional else of, f"{place}.{key}")
        elif not optional:
            lines.append(f"{place}.{key} is missing")
    return lines


def _not_a(value: object, kind: type, place: str) -> list[str]:
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return []
    return [f"{place} is {value!r}, no {kind.__name__}"]
