"""Faults of a cluster in the middle of runs: a worker is killed, a raylet is killed, a cable is pulled, a host hangs, at a moment that is drawn.
The run has to end by itself, with the losses of one that nothing happened to; when it noticed, and when it went on, is in its
events. Where the head is killed, its machine's raylet, or that of the machine where the run was started, it has to stop so that it
can be resumed, everybody to give back what they hold, and the run to come to those losses when it is resumed in the cluster that
is joined again.

    python tests/faults.py --times 20 --seed 1

does that so often with each, on three hosts, and prints the tables of docs/measured/ray.md. In one more run, workers are killed
again and again, each as soon as the one before is taken in again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import hosts
from hosts import Host
from plimsoll.ray import ours
from plimsoll.ray.cluster import columns
from runs import Left, Started, events, processes, train, worker

#: What a run goes on after, and what ends it: the head, the raylet of the head's machine, that of the machine where it was started.
Kind = Literal["worker", "raylet", "cable", "hang"]
End = Literal["head", "head-raylet", "own-raylet"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ENDS: tuple[End, ...] = get_args(End)

#: How far a loss may be from that of the undisturbed run: the sums of a step are taken in another order by those who are left.
SPREAD = 1e-4
#: One fault, with all that is mended after it, takes no longer; one that hangs ends the soak with the place where it does.
WATCHDOG_SECONDS = 400
#: What a run that something has ended held is free after that.
FREE_SECONDS = 150


@dataclass(frozen=True)
class Survived:
    """What a run said of a fault."""

    kind: Kind
    #: Who was lost: ``beta/virtual:b``.
    device: str
    #: The step that was being done.
    step: int
    #: From the fault until the run says that the device is lost.
    noticed_seconds: float
    #: From there until the next step is done.
    resumed_seconds: float
    #: The step of the checkpoint that it went back to, if it had to.
    back_to: int | None
    #: How far a loss is from that of the undisturbed run, at most, as a part of it.
    spread: float


def happen(kind: Kind | End, host: Host) -> None:
    """Something happens to a host that a run is on."""
    if kind == "worker":
        os.kill(worker(host), signal.SIGKILL)
    elif kind == "cable":
        host.pull_cable()
    elif kind == "hang":
        signal_all(host, signal.SIGSTOP)
    else:
        os.kill(of_ray(host, "gcs_server" if kind == "head" else "raylet"), signal.SIGKILL)


def mend(kind: Kind, host: Host, device: str) -> None:
    """The host is part of the cluster again, as it was."""
    if kind == "cable":
        host.plug_in()
    if kind == "hang":
        signal_all(host, signal.SIGCONT)
    if kind != "worker":
        host.plimsoll("leave")
        hosts.join(host, device)


def all_of_ray(host: Host) -> list[int]:
    """What Ray has started on a host, workers too."""
    (started,) = json.loads((host.state / "joined.json").read_text())["raylets"]
    return ours.members(ours.Raylet(**started))


def signal_all(host: Host, what: signal.Signals) -> None:
    """Sends all of that a signal; some of it may end meanwhile."""
    for pid in all_of_ray(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def of_ray(host: Host, name: str) -> int:
    """Ray's process of this name on a host."""
    return next(pid for pid in all_of_ray(host) if Path(f"/proc/{pid}/comm").read_text().strip() == name)


def survived(kind: Kind, name: str, left: Left, plain: Left, happened: float) -> Survived:
    """That a run has lost the host of this name, nobody else, and has come to the losses of one that has not; ``happened`` is
    when, in seconds since the epoch."""
    (lost,) = left.result["lost"]
    back_to = lost.get("back_to")
    # Until then it is the same run.
    same = lost["step"] if back_to is None else back_to + 1
    assert lost["device"].partition("/")[0] == name, lost
    (said,) = [number for number, event in enumerate(left.events) if event["event"] == "lost"]
    noticed = left.events[said]
    after = next(event for event in left.events[said:] if event["event"] == "step")
    return Survived(
        kind=kind,
        device=lost["device"],
        step=lost["step"],
        noticed_seconds=noticed["time"] - happened,
        resumed_seconds=after["time"] - noticed["time"],
        back_to=back_to,
        spread=spread_of(left, plain, same),
    )


def spread_of(left: Left, plain: Left, same: int) -> float:
    """That a run has come to the losses of another: to the bit before step ``same``, and how far from them at most, as a part
    of each."""
    spread = 0.0
    for what in ("step", "evaluation"):
        came, due = losses(left, what), losses(plain, what)
        assert came.keys() == due.keys()
        for step, loss in due.items():
            assert step >= same or came[step] == loss, (what, step)
            spread = max(spread, abs(came[step] / loss - 1.0))
    assert spread <= SPREAD, spread
    return spread


def losses(left: Left, what: str) -> dict[int, float]:
    """The loss of each step, or evaluation; of what was done again the last."""
    return {event["step"]: event["loss"] for event in left.events if event["event"] == what}


# The soak, from here on.

STEPS, LONG = 80, 20000
#: Steps after which one that has come back is lost like any other.
SETTLED = 20
#: What each host gives the cluster, and of that a run; the line of a device is far above what it needs.
GIVEN = dict(zip(("alpha", "beta", "gamma"), (hosts.ALPHA, hosts.BETA, hosts.GAMMA)))
TAKEN = {"alpha": "virtual:a=280MiB@0.4", "beta": "virtual:b=280MiB@0.2", "gamma": "virtual:c=280MiB@0.2"}
#: How the links are said to be, and what is shared then: over slow ones everybody has the whole model, over fast ones a part of
#: the state is on everybody, so that a run without one of them goes back to a checkpoint.
LINKS = {"batch": "1gbit", "state": "10GB/s+10us"}
#: A run whose head is killed takes the same at a quarter of the pace: who can still speak with each other are not done before
#: they give up.
HEADLESS, SLOW = 100, {"alpha": "virtual:a=280MiB@0.1", "beta": "virtual:b=280MiB@0.05", "gamma": "virtual:c=280MiB@0.05"}


def devices(sharing: str, taken: dict[str, str] = TAKEN) -> str:
    """``run.devices`` of all hosts."""
    return ",".join(f"ray:{name}/{word}::{LINKS[sharing]}" for name, word in taken.items())


def one(kind: Kind, sharing: str, there: list[Host], plain: Left, folder: Path, draw: random.Random) -> Survived:
    """A run to which something happens."""
    # The run itself is on the head, with which its raylet and its cable go.
    host = draw.choice(there if kind == "worker" else there[1:])
    seconds = statistics.median(event["seconds"] for event in plain.events if event["event"] == "step")
    run = Started(there[0], folder, devices(sharing), STEPS)
    run.until_step(draw.randint(1, int(0.7 * STEPS)))
    time.sleep(draw.uniform(0.0, 2.0 * seconds))
    happened = time.time()
    happen(kind, host)
    try:
        return survived(kind, host.name, run.left(), plain, happened)
    finally:
        mend(kind, host, GIVEN[host.name])


@dataclass(frozen=True)
class Resumed:
    """What a run came to that something ended. Seconds are counted from there."""

    kind: End
    #: Where the run was started.
    home: str
    #: Until it says that a device is lost.
    noticed_seconds: float
    #: Until it has ended.
    ended_seconds: float
    #: Until nobody holds anything for it on any host.
    free_seconds: float
    #: From the first word of joining again until the first step of the run that goes on.
    resumed_seconds: float
    spread: float


def resumed(kind: End, there: list[Host], plain: Left, folder: Path, draw: random.Random) -> Resumed:
    """A run that something ends, and that is resumed when all who are out of the cluster have joined again, with their words."""
    home = draw.choice(there[1:] if kind == "own-raylet" else there)
    out = [home] if kind == "own-raylet" else there
    run = Started(home, folder, devices("batch", SLOW), HEADLESS)
    run.until_step(draw.randint(1, HEADLESS // 4))
    happened = time.time()
    happen(kind, out[0])
    run.stopped()
    ended = time.time()
    while any(words.startswith(b"ray::Worker") for host in there for _, words in processes(host)):
        assert time.time() - happened < FREE_SECONDS
        time.sleep(0.1)
    free = time.time()
    said = events(folder)
    lost = [event for event in said if event["event"] == "lost"]
    for host in out:
        join = hosts.join_head if host is there[0] else hosts.join
        join(host, GIVEN[host.name])
    went_on = home.plimsoll("train", "--quiet", "--resume", str(folder))
    assert went_on.returncode == 0, went_on.stdout + went_on.stderr
    left = Left(folder)
    step = next(event for event in left.events[len(said) :] if event["event"] == "step")
    # Until then it is the same run.
    same = min(event["back_to"] + 1 if "back_to" in event else event["step"] for event in lost)
    assert left.result["steps"] == HEADLESS
    return Resumed(
        kind=kind,
        home=home.name,
        noticed_seconds=lost[0]["time"] - happened,
        ended_seconds=ended - happened,
        free_seconds=free - happened,
        resumed_seconds=step["time"] - free,
        spread=spread_of(left, plain, min(same, step["step"])),
    )


def table_of_ends(found: list[Resumed]) -> str:
    """What these came to."""
    titles = [word for title in ("noticed after", "ended after", "all free after", "joined and resumed in") for word in (title, "longest")]
    rows = [["lost", "run", "times", *titles, "spread of losses, at most"]]
    for kind in ENDS:
        for where, at_head in (("on the head's machine", True), ("elsewhere", False)):
            these = [one for one in found if one.kind == kind and (one.home == "alpha") == at_head]
            if these:
                names = ("noticed_seconds", "ended_seconds", "free_seconds", "resumed_seconds")
                spans = [[getattr(one, name) for one in these] for name in names]
                took = [f"{take(span):.1f} s" for span in spans for take in (statistics.median, max)]
                rows.append([kind, where, str(len(these)), *took, f"{max(one.spread for one in these):.1e}"])
    return columns(rows)


@dataclass(frozen=True)
class Returned:
    """A worker that was killed, and came back."""

    device: str
    noticed_seconds: float
    #: From there until the run takes it in.
    back_seconds: float
    #: From there until the next step is done.
    resumed_seconds: float


def returned(there: list[Host], folder: Path, times: int, draw: random.Random) -> list[Returned]:
    """Workers of one run are killed so often, each when all are back. Over so many steps losses grow apart by other orders of sums
    alone (docs/measured/ray.md): they are not compared."""
    # More steps than will be done: each device is worth the way by a checkpoint.
    run, found, said = Started(there[0], folder / "killed", devices("batch"), LONG), list[Returned](), 0
    for _ in range(times):
        for _ in range(SETTLED):
            said = run.until("step", after=said)
        time.sleep(draw.uniform(0.0, 1.0))
        happened = time.time()
        happen("worker", draw.choice(there))
        lost = run.until("lost", after=said)
        back = run.until("back", after=lost)
        said = run.until("step", after=back)
        at = events(run.folder)
        lost_at, back_at, after = (at[number - 1] for number in (lost, back, said))
        came = Returned(
            device=back_at["device"],
            noticed_seconds=lost_at["time"] - happened,
            back_seconds=back_at["time"] - lost_at["time"],
            resumed_seconds=after["time"] - back_at["time"],
        )
        assert lost_at["device"] == came.device
        found.append(came)
        print(came, flush=True)
    run.stop()
    return found


def table_of_returns(found: list[Returned]) -> str:
    """What these came to."""
    rows = [["workers killed", "noticed after", "longest", "taken in after", "longest", "next step after", "longest"]]
    spans = [[getattr(one, name) for one in found] for name in ("noticed_seconds", "back_seconds", "resumed_seconds")]
    rows.append([str(len(found)), *(f"{take(span):.2f} s" for span in spans for take in (statistics.median, max))])
    return columns(rows)


def table(found: list[Survived], sharings: dict[Survived, str]) -> str:
    """Of each kind, and of each way to share, how many there were and what they came to."""
    rows = [["lost", "shared", "times", "noticed after", "longest", "next step after", "longest", "spread of losses, at most"]]
    for kind in KINDS:
        for sharing in LINKS:
            these = [one for one in found if one.kind == kind and sharings[one] == sharing]
            if these:
                noticed, resumed = [one.noticed_seconds for one in these], [one.resumed_seconds for one in these]
                took = [f"{take(seconds):.2f} s" for seconds in (noticed, resumed) for take in (statistics.median, max)]
                rows.append([kind, sharing, str(len(these)), *took, f"{max(one.spread for one in these):.1e}"])
    return columns(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Workers, raylets and the head are killed, cables pulled, hosts stopped, in the middle of runs over three hosts."
    )
    parser.add_argument("--times", type=int, default=20, help="of each [default: %(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="where hosts and moments are drawn from [default: %(default)s]")
    parser.add_argument("--kinds", default=",".join((*KINDS, *ENDS)), help="which [default: %(default)s]")
    parser.add_argument("--back", type=int, default=20, help="workers that are killed and come back in one run [default: %(default)s]")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - {*KINDS, *ENDS}:
        parser.error(f"--kinds: unknown: {', '.join(unknown)}")
    hosts.ready_for_script()
    draw, sharings, ends, failed = random.Random(args.seed), dict[Survived, str](), list[Resumed](), 0
    with hosts.cluster(list(GIVEN.values())) as there, tempfile.TemporaryDirectory(prefix="plimsoll-faults-") as tmp:
        plain = {sharing: train(there[0], Path(tmp) / sharing, devices(sharing), STEPS) for sharing in LINKS}
        for sharing, left in plain.items():
            assert left.result["sharing"] == sharing and len(left.result["team"]) == len(TAKEN), left.result
        if any(kind in ENDS for kind in kinds):
            whole = train(there[0], Path(tmp) / "whole", devices("batch", SLOW), HEADLESS)
        for number in range(args.times):
            for kind in kinds:
                faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
                sharing = list(LINKS)[number % len(LINKS)]
                folder = Path(tmp) / f"{kind}-{number}"
                try:
                    if kind in ENDS:
                        ends.append(resumed(kind, there, whole, folder, draw))
                        print(f"{kind} {number}: {ends[-1]}", flush=True)
                        continue
                    came = one(kind, sharing, there, plain[sharing], folder, draw)
                except Exception as error:  # The others are tried all the same, and it counts.
                    failed += 1
                    # Whatever it has left behind is in nobody's way.
                    for host in there:
                        host.end_started()
                    hosts.mend(there, list(GIVEN.values()))
                    print(f"{kind} {number}, {sharing}: FAILED: {error!r}; {folder}", flush=True)
                    continue
                finally:
                    faulthandler.cancel_dump_traceback_later()
                sharings[came] = sharing
                print(f"{kind} {number}, {sharing}: {came}", flush=True)
        if args.back:
            back = returned(there, Path(tmp), args.back, draw)
            print(f"\n{table_of_returns(back)}")
    right = len(sharings) + len(ends)
    print(f"\n{right} of {right + failed} runs ended as they should")
    if sharings:
        print(f"\n{table(list(sharings), sharings)}")
    if ends:
        print(f"\n{table_of_ends(ends)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
