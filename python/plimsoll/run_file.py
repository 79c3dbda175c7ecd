"""The run file as keyword arguments, with the names of its sections and keys. ``docs/run-file.md`` describes each key.

Every key is optional. Values are those of the run file; a path may also be a ``Path``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict, Union

from plimsoll.errors import InputError
from plimsoll.results import Level as Level
from plimsoll.results import Rung as Rung

#: A file or folder.
AnyPath = Union[str, "os.PathLike[str]"]


#: A format of records.
Format = Literal[
    "auto", "text", "tokens", "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "prompt", "rollouts"
]


class ModelSection(TypedDict, total=False):
    """``[model]``: the model; one of ``path`` and ``preset``."""

    path: AnyPath
    preset: str
    init: Literal["pretrained", "random"]
    adapter: AnyPath
    ignore_config_keys: Sequence[str]


class DataSource(TypedDict, total=False):
    """``[[data.source]]``: a source of training data."""

    path: AnyPath | Sequence[AnyPath]
    weight: float
    format: Format
    split: Literal["train", "validation", "test"]


class DataSection(TypedDict, total=False):
    """``[data]``: training and evaluation data."""

    train: AnyPath | Sequence[AnyPath]
    eval: AnyPath | Sequence[AnyPath]
    format: Format
    template: AnyPath
    train_on: Literal["assistant", "last", "all", "completion"]
    train_on_end: Literal["turn", "last", "none"]
    not_prefix: Literal["split", "refuse"]
    sequence: int
    pack: bool
    long: Literal["split", "refuse"]
    shuffle: bool
    source: Sequence[DataSource]


class TrainSection(TypedDict, total=False):
    """``[train]``: the length, the optimizer and other settings; at most one of ``steps``, ``epochs`` and ``hours``."""

    steps: int
    epochs: float
    hours: float
    batch_tokens: int
    objective: Literal["supervised", "dpo", "grpo"]
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
    """``[lora]``: adapters, for ``train.method = "lora"``."""

    rank: int
    alpha: float
    rslora: bool
    dropout: float
    targets: str | Sequence[str]
    layers: Sequence[int]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]


class DpoSection(TypedDict, total=False):
    """``[dpo]``: direct preference optimization, for ``train.objective = "dpo"``."""

    beta: float
    loss_type: Literal["sigmoid", "hinge", "ipo"]
    label_smoothing: float
    reference_free: bool


class GrpoSection(TypedDict, total=False):
    """``[grpo]``: group relative policy optimization, for ``train.objective = "grpo"``."""

    num_generations: int
    prompts_per_step: int
    max_prompt_length: int
    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    beta: float
    use_bias_correction_kl: bool
    epsilon: float
    epsilon_high: float
    num_iterations: int
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"]
    scale_rewards: Literal["group", "batch", "none"]
    importance_sampling_level: Literal["token", "sequence"]
    mask_truncated_completions: bool
    rewards: Sequence[str | Callable[..., object]]
    reward_weights: Sequence[float]
    reward_timeout_seconds: float


class MemorySection(TypedDict, total=False):
    """``[memory]``: load lines (``"90%"`` of free memory, or ``"6GiB"``) and permitted lossy rungs."""

    budget: str
    host: str
    file: str
    file_dir: AnyPath
    allow: str | Sequence[Rung]


class RecipeSection(TypedDict, total=False):
    """``[recipe]``: choices that the user makes instead of the planner."""

    micro_batch: int
    slots: int
    recompute: Level | Sequence[Level]


class RunSection(TypedDict, total=False):
    """``[run]``: the run folder and the devices."""

    dir: AnyPath
    devices: str
    max_temperature: float
    heartbeat_seconds: float
    threads: int | Literal["auto"]
    fallback: Literal["cpu", "none"]
    parallelism: Literal["auto", "data", "sharded", "pipeline", "all"]
    nccl: bool
    deterministic: bool


class WatchSection(TypedDict, total=False):
    """``[watch]``: logs of the run for other programs."""

    tensorboard: bool
    webhook: str


class RunFile(TypedDict, total=False):
    """All sections of a run file."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    lora: LoraSection
    dpo: DpoSection
    grpo: GrpoSection
    memory: MemorySection
    recipe: RecipeSection
    run: RunSection
    watch: WatchSection


def settings(sections: Mapping[str, object]) -> list[str]:
    """Converts sections with their keys to settings, as ``--set`` takes them: ``train.steps=20``.

    Raises :class:`plimsoll.InputError` for a reward function that another process cannot import.
    """
    return [
        f"{section}.{key}={_toml(_with_names(value) if (section, key) == ('grpo', 'rewards') else value)}"
        for section, keys in sections.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
    ]


def _toml(value: object) -> str:
    """Formats a value as TOML, on one line. Strings, numbers and booleans are written as in JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, os.PathLike):
        return _toml(os.fspath(value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=_refuse)


def _with_names(rewards: object) -> object:
    """Replaces the functions among rewards by their entries in a run file."""
    if not isinstance(rewards, Sequence) or isinstance(rewards, str):
        return rewards
    return [_reward_of(reward) if callable(reward) else reward for reward in rewards]


def _reward_of(function: Callable[..., object]) -> str:
    """Returns the entry of ``grpo.rewards`` for a function of a module that has a file."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    # Functions within functions, those without a name, and methods of an object are not found by their name.
    if found is not function or not file.endswith(".py"):
        raise InputError(
            f"the reward function {name or function!r} cannot be imported from a file",
            ["define it with def at the top level of a .py file, or name it as in python:rewards.py:FUNCTION"],
        )
    return f"python:{os.path.abspath(file)}:{name}"


def _refuse(value: object) -> object:
    raise TypeError(f"a run file cannot contain {value!r}")
