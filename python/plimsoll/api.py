"""The functions of the package. Each does what the command of that name does, in the native module without the GIL."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from plimsoll import _native
from plimsoll.errors import InputError
from plimsoll.results import BestBatch, Event, Machine, BudgetChange, Plan, Trained
from plimsoll.run_file import AnyPath, RunFile, settings

if TYPE_CHECKING:
    from typing_extensions import Unpack


def plan(run_file: AnyPath | None = None, *, explain: bool = False, **sections: Unpack[RunFile]) -> Plan:
    """Plans a run: its memory to the byte, and its predicted speed. Runs nothing.

    ``sections`` (``model={"preset": "llama-3.2-1b"}``) change ``run_file``. Without a run file, they are a run of their own if
    they name a model; otherwise they change the built-in example. With ``explain``, the plan contains the effect of each rung
    and the alternatives for a team.

    If the run does not fit, ``fits`` is false and ``needs`` lists remedies.

    Raises :class:`plimsoll.InputError`.
    """
    return cast(Plan, json.loads(_native.plan(run_file, settings(sections), explain, False)))


def train(
    run_file: AnyPath | None = None,
    *,
    resume: AnyPath | None = None,
    save: bool = True,
    on_event: Callable[[Event], object] | None = None,
    **sections: Unpack[RunFile],
) -> Trained:
    """Trains, and returns when the run has ended.

    ``run_file`` and ``sections`` are those of :func:`plan`. ``resume`` is the folder of a run to resume instead; for a run that
    is done, its result is returned, without events or samples. ``save=False`` writes neither checkpoints nor a model.

    ``on_event`` gets each line of ``events.jsonl`` as a dictionary, and warnings about logs (``watch``) in the same form. It is
    called in the calling thread while the run continues on its own thread. If it returns ``False`` or raises, the run finishes
    its step, saves and ends. An exception of ``on_event`` is then raised here.

    Ctrl-C also ends the run after its step: ``KeyboardInterrupt`` is raised once everything is saved, and its message says how
    to resume. A second Ctrl-C raises at once and keeps the newest checkpoint.

    ``grpo={"rewards": [function]}`` takes functions at the top level of a file, in the form of TRL. They run in processes of this
    interpreter (docs/rewards.md).

    Raises :class:`plimsoll.InputError` and :class:`plimsoll.DoesNotFit` before training starts, and :class:`plimsoll.Stopped`
    if the run cannot continue now but can be resumed.
    """
    if "PLIMSOLL_REWARD_PROCESS" in os.environ:
        raise InputError(
            "this file is imported for its reward functions, and trains", ['put the training under if __name__ == "__main__":']
        )
    os.environ["PLIMSOLL_REWARD_PYTHON"] = sys.executable
    handle_line = None if on_event is None else lambda line: on_event(json.loads(line))
    return cast(Trained, json.loads(_native.train(run_file, settings(sections), resume, save, handle_line)))


def devices() -> Machine:
    """Returns the devices of this machine with their free memory and the default limits of a run."""
    return cast(Machine, json.loads(_native.devices()))


def budget(run_dir: AnyPath, budget: str, *, device: str | None = None) -> BudgetChange:
    """Changes the load line of a running run, in this or another process, to an amount or a share of free memory.

    ``budget`` is written as ``"6GiB"`` or ``"50%"``. ``device`` names the device if the run has several. Returns when the run
    has answered, after its current step.

    Raises :class:`plimsoll.DoesNotFit` if no recipe fits under the new load line. The run then continues unchanged.
    """
    return cast(BudgetChange, json.loads(_native.budget(run_dir, budget, device)))


def best_batch(run_file: AnyPath | None = None, **sections: Unpack[RunFile]) -> list[BestBatch]:
    """Returns the micro-batch of the fastest plan on each device; 0 on a storage-only device of a sharded team.

    The arguments are those of :func:`plan`. The result is planned, not measured. ``train.batch_tokens``, the tokens of an
    optimizer step, does not change.

    Raises :class:`plimsoll.DoesNotFit` if no recipe fits.
    """
    planned = cast(Plan, json.loads(_native.plan(run_file, settings(sections), False, True)))
    workload = planned["planned_for"]
    workers = [(worker["recipe"], worker["sequences"]) for worker in planned.get("team", [])]
    single = (planned["recipe"], workload["batch_tokens"] // workload["sequence"])
    return [
        BestBatch(
            device=device["name"],
            micro_batch=recipe["micro_batch"],
            sequences=sequences,
            peak_bytes=device["peak_bytes"],
            budget_bytes=device["budget_bytes"],
        )
        for device, (recipe, sequences) in zip(planned["devices"], workers or [single])
    ]
