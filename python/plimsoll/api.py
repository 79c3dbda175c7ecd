"""The calls. Each is what the command of that name does; the work is done by the Rust library, without the interpreter's lock."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from plimsoll import _native
from plimsoll.results import BestBatch, Event, Machine, Moved, Plan, Trained
from plimsoll.run_file import AnyPath, RunFile, settings

if TYPE_CHECKING:
    from typing_extensions import Unpack


def plan(run_file: AnyPath | None = None, *, explain: bool = False, **sections: Unpack[RunFile]) -> Plan:
    """What a run would hold, to the byte, and how fast it would be; nothing is run.

    ``run_file`` is read first, then ``sections`` (``model={"preset": "llama-3.2-1b"}``) change it. Without a run file they are
    a run of their own where they name a model, else they change the built-in example.
    With ``explain`` the plan says what each rung of the ladder frees and costs.

    A plan that does not fit is an answer: ``fits`` is false, and ``needs`` says what would.

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
    """Trains, and comes back when the run has ended.

    ``run_file`` and ``sections`` are those of :func:`plan`; ``resume`` is the folder of a run that goes on instead;
    of one that is done it gives what that left, without an event or samples.
    ``save=False`` leaves no checkpoint and no model. ``on_event`` is called, in this thread, with each line of
    ``events.jsonl`` as a dictionary, while the run goes on beside it; where it returns ``False`` or raises, the run finishes
    its step, saves and ends, and what it raised comes out of this call.

    Ctrl-C does the same: ``KeyboardInterrupt`` is raised when everything has been saved, and says how the run goes on.
    At the second one it is raised at once, and the newest checkpoint stands.

    Raises :class:`plimsoll.InputError`, :class:`plimsoll.DoesNotFit` before anything has started, and
    :class:`plimsoll.Stopped` where the run could not go on and can later.
    """
    told = None if on_event is None else lambda line: on_event(json.loads(line))
    return cast(Trained, json.loads(_native.train(run_file, settings(sections), resume, save, told)))


def devices() -> Machine:
    """The devices of this machine, what of each is free, and what Plimsoll would take."""
    return cast(Machine, json.loads(_native.devices()))


def budget(run_dir: AnyPath, budget: str, *, device: str | None = None) -> Moved:
    """Moves the load line of a run that is under way, in this process or another: to ``"6GiB"``, or ``"50%"``.

    ``device`` names the one that is meant where several work on the run. Comes back when the run has answered, after its step.

    Raises :class:`plimsoll.DoesNotFit` where it cannot do with so little: then it goes on as it was.
    """
    return cast(Moved, json.loads(_native.budget(run_dir, budget, device)))


def best_batch(run_file: AnyPath | None = None, **sections: Unpack[RunFile]) -> list[BestBatch]:
    """The micro-batch of the fastest plan, on each device that takes part (0 on one that only holds a part of the state);
    arguments as for :func:`plan`.

    Nothing is tried out: it is planned. What the optimizer sees, ``train.batch_tokens``, stays what it is.

    Raises :class:`plimsoll.DoesNotFit` where nothing fits.
    """
    planned = cast(Plan, json.loads(_native.plan(run_file, settings(sections), False, True)))
    of = planned["of"]
    team = [(member["recipe"], member["sequences"]) for member in planned.get("team", [])]
    return [
        BestBatch(
            device=device["name"],
            micro_batch=recipe["micro_batch"],
            sequences=sequences,
            peak_bytes=device["peak_bytes"],
            budget_bytes=device["budget_bytes"],
        )
        for device, (recipe, sequences) in zip(
            planned["devices"], team or [(planned["recipe"], of["batch_tokens"] // of["sequence"])]
        )
    ]
