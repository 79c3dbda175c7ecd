"""The run file as keyword arguments: sections and keys have its names, and what a key means is in the book (``run-file.md``).

Every key may be left out. A value is what the run file has there; a path may be a ``Path``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, Union

#: A file or folder.
AnyPath = Union[str, "os.PathLike[str]"]
#: Coarser arithmetic that the planner may take where nothing else fits.
Rung = Literal["bf16", "adam8bit", "lora", "int8", "nf4"]
#: What a layer computes again instead of keeping it.
Level = Literal["nothing", "norms", "feed_forward", "attention", "block"]


class ModelSection(TypedDict, total=False):
    """``[model]``: what is trained; one of ``path`` and ``preset``."""

    path: AnyPath
    preset: str
    init: Literal["pretrained", "random"]
    adapter: AnyPath
    ignore_config_keys: Sequence[str]


class DataSection(TypedDict, total=False):
    """``[data]``: what it is trained on."""

    train: AnyPath | Sequence[AnyPath]
    eval: AnyPath | Sequence[AnyPath]
    format: Literal["text", "tokens"]
    sequence: int
    pack: bool
    long: Literal["split", "refuse"]
    shuffle: bool


class TrainSection(TypedDict, total=False):
    """``[train]``: how it is trained; one of ``steps``, ``epochs`` and ``hours``."""

    steps: int
    epochs: float
    hours: float
    batch_tokens: int
    optimizer: Literal["adamw", "sgd"]
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    weight_decay: float
    betas: Sequence[float]
    eps: float
    clip_norm: float
    precision: Literal["auto", "f32", "bf16", "f64"]
    method: Literal["full", "lora"]
    rungs: Sequence[Rung]
    seed: int
    eval_every: int
    save_every: int
    save_every_minutes: float
    keep: int


class LoraSection(TypedDict, total=False):
    """``[lora]``: adapters."""

    rank: int
    alpha: float
    dropout: float
    targets: Sequence[str]


class MemorySection(TypedDict, total=False):
    """``[memory]``: load lines (``"90%"`` of what is free, or ``"6GiB"``) and permissions."""

    budget: str
    host: str
    file: str
    file_dir: AnyPath
    allow: str | Sequence[Rung]


class RecipeSection(TypedDict, total=False):
    """``[recipe]``: choices taken out of the planner's hands."""

    micro_batch: int
    recompute: Level | Sequence[Level]


class RunSection(TypedDict, total=False):
    """``[run]``: where it runs."""

    dir: AnyPath
    devices: str
    max_temperature: float
    heartbeat_seconds: float
    threads: int | Literal["auto"]
    fallback: Literal["cpu", "none"]
    team: Literal["auto", "all"]
    nccl: bool


class RunFile(TypedDict, total=False):
    """All sections."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    lora: LoraSection
    memory: MemorySection
    recipe: RecipeSection
    run: RunSection


def settings(sections: Mapping[str, object]) -> list[str]:
    """The sections as settings of the command line: ``train.steps=20``."""
    return [
        f"{section}.{key}={_toml(value)}"
        for section, keys in sections.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
    ]


def _toml(value: object) -> str:
    """A value as TOML writes it: for text, numbers, truth and lists of them that is as JSON does."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a run file cannot say {value!r}")
