"""Fault injection in runs on a cluster of simulated hosts, at random moments.

Faults that a run survives: a killed worker, a killed raylet, an unplugged cable, a paused host. The run must end by itself with
the losses of an undisturbed run. Its events tell when it noticed the fault and when it continued.

Faults that end a run: the head is killed, or the raylet of the head's machine, or that of the run's own machine. The run must
stop resumably, and all machines must free its memory. After joining again, the resumed run must reach the losses of an
undisturbed run.

    python tests/faults.py --times 20 --seed 1

injects each fault 20 times on three hosts and prints the tables of docs/measured/ray.md. In one more run, workers are killed
repeatedly, each after the previous one has returned.
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
from plimsoll.ray import local_state
from plimsoll.ray.cluster import columns
from runs import RunOutput, RunningRun, events, processes, train, worker_pid

#: Faults that a run survives.
Kind = Literal["worker", "raylet", "cable", "hang"]
#: Faults that end a run, by the killed process: the head, the raylet of the head's machine, the raylet of the run's machine.
End = Literal["head", "head-raylet", "own-raylet"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ENDS: tuple[End, ...] = get_args(End)

#: Largest relative difference of a loss from the undisturbed run. The remaining devices add up sums in another order.
LOSS_DIFFERENCE_MAX = 1e-4
#: Longest time of one fault with its repair. A fault that hangs ends the script with a traceback.
WATCHDOG_SECONDS = 400
#: Seconds after which the memory of an ended run must be free.
FREED_TIMEOUT_SECONDS = 150


@dataclass(frozen=True)
class SurvivedFault:
    """Measurements of a fault that a run survived."""

    kind: Kind
    #: The lost device: ``beta/virtual:b``.
    device: str
    #: The step in which the device was lost.
    step: int
    #: Seconds from the fault to the event ``device_lost``.
    noticed_seconds: float
    #: Seconds from there to the end of the next step.
    resumed_seconds: float
    #: Step of the checkpoint from which the run continued, if completed steps were lost.
    resumed_from_step: int | None
    #: Largest relative difference of a loss from the undisturbed run.
    loss_difference: float


def inject(kind: Kind | End, host: Host) -> None:
    """Injects a fault on a host."""
    if kind == "worker":
        os.kill(worker_pid(host), signal.SIGKILL)
    elif kind == "cable":
        host.pull_cable()
    elif kind == "hang":
        signal_all(host, signal.SIGSTOP)
    else:
        os.kill(ray_process(host, "gcs_server" if kind == "head" else "raylet"), signal.SIGKILL)


def repair(kind: Kind, host: Host, device: str) -> None:
    """Makes the host a member of the cluster again."""
    if kind == "cable":
        host.plug_in()
    if kind == "hang":
        signal_all(host, signal.SIGCONT)
    if kind != "worker":
        host.plimsoll("leave")
        hosts.join(host, device)


def raylet_pids(host: Host) -> list[int]:
    """Returns the pids of all processes of the host's raylet, including workers."""
    (raylet,) = json.loads((host.state / "joined.json").read_text())["raylets"]
    return local_state.session_pids(local_state.Raylet(**raylet))


def signal_all(host: Host, what: signal.Signals) -> None:
    """Sends a signal to all processes of the host's raylet."""
    for pid in raylet_pids(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def ray_process(host: Host, name: str) -> int:
    """Returns the pid of the Ray process with this name on a host."""
    return next(pid for pid in raylet_pids(host) if Path(f"/proc/{pid}/comm").read_text().strip() == name)


def check_survival(kind: Kind, name: str, output: RunOutput, plain: RunOutput, injected_at: float) -> SurvivedFault:
    """Checks that a run lost only a device of the host `name`, and that its losses are those of the undisturbed run `plain`.

    ``injected_at`` is the time of the fault in seconds since 1970.
    """
    (lost,) = output.result["lost"]
    resumed_from_step = lost.get("resumed_from_step")
    # Earlier steps have equal bits.
    same_before = lost["step"] if resumed_from_step is None else resumed_from_step + 1
    assert lost["device"].partition("/")[0] == name, lost
    (index,) = [number for number, event in enumerate(output.events) if event["event"] == "device_lost"]
    noticed = output.events[index]
    after = next(event for event in output.events[index:] if event["event"] == "step")
    return SurvivedFault(
        kind=kind,
        device=lost["device"],
        step=lost["step"],
        noticed_seconds=noticed["time"] - injected_at,
        resumed_seconds=after["time"] - noticed["time"],
        resumed_from_step=resumed_from_step,
        loss_difference=max_loss_difference(output, plain, same_before),
    )


def max_loss_difference(output: RunOutput, plain: RunOutput, same_before: int) -> float:
    """Checks the losses of a run against those of another, bit by bit before the step `same_before`.

    Returns the largest relative difference.
    """
    difference = 0.0
    for kind in ("step", "evaluation"):
        actual, expected = losses(output, kind), losses(plain, kind)
        assert actual.keys() == expected.keys()
        for step, loss in expected.items():
            assert step >= same_before or actual[step] == loss, (kind, step)
            difference = max(difference, abs(actual[step] / loss - 1.0))
    assert difference <= LOSS_DIFFERENCE_MAX, difference
    return difference


def losses(output: RunOutput, kind: str) -> dict[int, float]:
    """Returns the loss of each step or evaluation. If a step was repeated, the last loss counts."""
    return {event["step"]: event["loss"] for event in output.events if event["event"] == kind}


# The script.

STEPS, LONG = 80, 20000
#: Steps after which the loss of a returned device is handled like a first loss.
SETTLED_STEPS = 20
#: The device of each host in the cluster, and in a run. The load lines are far above the demand.
CLUSTER_DEVICES = dict(zip(("alpha", "beta", "gamma"), (hosts.ALPHA, hosts.BETA, hosts.GAMMA)))
RUN_DEVICES = {"alpha": "virtual:a=280MiB@0.4", "beta": "virtual:b=280MiB@0.2", "gamma": "virtual:c=280MiB@0.2"}
#: The given link with which the planner chooses each parallelism. If a shard is lost, the run continues from a checkpoint.
LINKS = {"data": "1gbit", "sharded": "10GB/s+10us"}
#: Steps and devices of a run for faults that kill the head. At a quarter of the pace, the devices that still reach each other do not
#: complete the run before they end.
HEADLESS_STEPS, SLOW_DEVICES = 100, {"alpha": "virtual:a=280MiB@0.1", "beta": "virtual:b=280MiB@0.05", "gamma": "virtual:c=280MiB@0.05"}


def devices(parallelism: str, taken: dict[str, str] = RUN_DEVICES) -> str:
    """Returns ``run.devices`` with the devices of all hosts."""
    return ",".join(f"ray:{name}/{word}::{LINKS[parallelism]}" for name, word in taken.items())


def survived_fault(kind: Kind, parallelism: str, all_hosts: list[Host], plain: RunOutput, folder: Path, draw: random.Random) -> SurvivedFault:
    """Runs once with a fault at a random moment."""
    # The run itself is on the head, so raylet and cable of the head are not touched.
    host = draw.choice(all_hosts if kind == "worker" else all_hosts[1:])
    seconds = statistics.median(event["seconds"] for event in plain.events if event["event"] == "step")
    run = RunningRun(all_hosts[0], folder, devices(parallelism), STEPS)
    run.wait_for_step(draw.randint(1, int(0.7 * STEPS)))
    time.sleep(draw.uniform(0.0, 2.0 * seconds))
    injected_at = time.time()
    inject(kind, host)
    try:
        return check_survival(kind, host.name, run.output(), plain, injected_at)
    finally:
        repair(kind, host, CLUSTER_DEVICES[host.name])


@dataclass(frozen=True)
class ResumedRun:
    """Measurements of a fault that ended a run, and of the resumed run. Seconds count from the fault."""

    kind: End
    #: The host on which the run was started.
    home: str
    #: Until the event ``device_lost``.
    noticed_seconds: float
    #: Until the run has ended.
    ended_seconds: float
    #: Until no worker of the run remains on any host.
    free_seconds: float
    #: From the start of joining again to the end of the first resumed step.
    resumed_seconds: float
    loss_difference: float


def resumed_run(kind: End, all_hosts: list[Host], plain: RunOutput, folder: Path, draw: random.Random) -> ResumedRun:
    """Runs once with a fault that ends the run, joins the cluster again, and resumes the run."""
    home = draw.choice(all_hosts[1:] if kind == "own-raylet" else all_hosts)
    out = [home] if kind == "own-raylet" else all_hosts
    run = RunningRun(home, folder, devices("data", SLOW_DEVICES), HEADLESS_STEPS)
    run.wait_for_step(draw.randint(1, HEADLESS_STEPS // 4))
    injected_at = time.time()
    inject(kind, out[0])
    run.wait_until_stopped()
    ended = time.time()
    while any(words.startswith(b"ray::Worker") for host in all_hosts for _, words in processes(host)):
        assert time.time() - injected_at < FREED_TIMEOUT_SECONDS
        time.sleep(0.1)
    free = time.time()
    events_before = events(folder)
    lost = [event for event in events_before if event["event"] == "device_lost"]
    for host in out:
        join = hosts.join_head if host is all_hosts[0] else hosts.join
        join(host, CLUSTER_DEVICES[host.name])
    resumed_process = home.plimsoll("train", "--quiet", "--resume", str(folder))
    assert resumed_process.returncode == 0, resumed_process.stdout + resumed_process.stderr
    output = RunOutput(folder)
    step = next(event for event in output.events[len(events_before) :] if event["event"] == "step")
    # Earlier steps have equal bits.
    same_before = min(event["resumed_from_step"] + 1 if "resumed_from_step" in event else event["step"] for event in lost)
    assert output.result["steps"] == HEADLESS_STEPS
    return ResumedRun(
        kind=kind,
        home=home.name,
        noticed_seconds=lost[0]["time"] - injected_at,
        ended_seconds=ended - injected_at,
        free_seconds=free - injected_at,
        resumed_seconds=step["time"] - free,
        loss_difference=max_loss_difference(output, plain, min(same_before, step["step"])),
    )


def resumed_runs_table(found: list[ResumedRun]) -> str:
    """Formats the measurements of resumed runs."""
    titles = [word for title in ("noticed after", "ended after", "all free after", "joined and resumed in") for word in (title, "longest")]
    rows = [["killed", "run", "times", *titles, "largest loss difference"]]
    for kind in ENDS:
        for where, on_head in (("on the head's machine", True), ("elsewhere", False)):
            these = [one for one in found if one.kind == kind and (one.home == "alpha") == on_head]
            if these:
                names = ("noticed_seconds", "ended_seconds", "free_seconds", "resumed_seconds")
                spans = [[getattr(one, name) for one in these] for name in names]
                took = [f"{take(span):.1f} s" for span in spans for take in (statistics.median, max)]
                rows.append([kind, where, str(len(these)), *took, f"{max(one.loss_difference for one in these):.1e}"])
    return columns(rows)


@dataclass(frozen=True)
class ReturnedWorker:
    """Measurements of a worker that was killed and returned."""

    device: str
    noticed_seconds: float
    #: Seconds from there to the event ``device_returned``.
    returned_seconds: float
    #: Seconds from there to the end of the next step.
    resumed_seconds: float


def returned_workers(all_hosts: list[Host], folder: Path, times: int, draw: random.Random) -> list[ReturnedWorker]:
    """Kills workers of one run repeatedly, each when all have returned.

    Losses are not compared: over so many steps, other orders of sums alone make them differ (docs/measured/ray.md).
    """
    # With many remaining steps, the run takes every returned device back, although that needs a checkpoint.
    run, found, said = RunningRun(all_hosts[0], folder / "killed", devices("data"), LONG), list[ReturnedWorker](), 0
    for _ in range(times):
        for _ in range(SETTLED_STEPS):
            said = run.wait_for_event("step", after=said)
        time.sleep(draw.uniform(0.0, 1.0))
        injected_at = time.time()
        inject("worker", draw.choice(all_hosts))
        lost = run.wait_for_event("device_lost", after=said)
        back = run.wait_for_event("device_returned", after=lost)
        said = run.wait_for_event("step", after=back)
        at = events(run.folder)
        lost_at, back_at, after = (at[number - 1] for number in (lost, back, said))
        came = ReturnedWorker(
            device=back_at["device"],
            noticed_seconds=lost_at["time"] - injected_at,
            returned_seconds=back_at["time"] - lost_at["time"],
            resumed_seconds=after["time"] - back_at["time"],
        )
        assert lost_at["device"] == came.device
        found.append(came)
        print(came, flush=True)
    run.stop()
    return found


def returned_workers_table(found: list[ReturnedWorker]) -> str:
    """Formats the measurements of returned workers."""
    rows = [["workers killed", "noticed after", "longest", "returned after", "longest", "next step after", "longest"]]
    spans = [[getattr(one, name) for one in found] for name in ("noticed_seconds", "returned_seconds", "resumed_seconds")]
    rows.append([str(len(found)), *(f"{take(span):.2f} s" for span in spans for take in (statistics.median, max))])
    return columns(rows)


def survived_faults_table(found: list[SurvivedFault], parallelism_of: dict[SurvivedFault, str]) -> str:
    """Formats the measurements by fault and parallelism."""
    rows = [["fault", "parallelism", "times", "noticed after", "longest", "next step after", "longest", "largest loss difference"]]
    for kind in KINDS:
        for parallelism in LINKS:
            these = [one for one in found if one.kind == kind and parallelism_of[one] == parallelism]
            if these:
                noticed, resumed = [one.noticed_seconds for one in these], [one.resumed_seconds for one in these]
                took = [f"{take(seconds):.2f} s" for seconds in (noticed, resumed) for take in (statistics.median, max)]
                rows.append([kind, parallelism, str(len(these)), *took, f"{max(one.loss_difference for one in these):.1e}"])
    return columns(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Injects faults in runs on three simulated hosts, and measures how the runs continue."
    )
    parser.add_argument("--times", type=int, default=20, help="runs per fault [default: %(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="seed of hosts and moments [default: %(default)s]")
    parser.add_argument("--kinds", default=",".join((*KINDS, *ENDS)), help="faults to inject [default: %(default)s]")
    parser.add_argument("--back", type=int, default=20, help="workers to kill one after another in one run [default: %(default)s]")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - {*KINDS, *ENDS}:
        parser.error(f"--kinds: unknown: {', '.join(unknown)}")
    hosts.prepare_script()
    draw, parallelism_of, ends, failed = random.Random(args.seed), dict[SurvivedFault, str](), list[ResumedRun](), 0
    with hosts.cluster(list(CLUSTER_DEVICES.values())) as all_hosts, tempfile.TemporaryDirectory(prefix="plimsoll-faults-") as tmp:
        plain = {parallelism: train(all_hosts[0], Path(tmp) / parallelism, devices(parallelism), STEPS) for parallelism in LINKS}
        for parallelism, output in plain.items():
            assert output.result["parallelism"] == parallelism and len(output.result["team"]) == len(RUN_DEVICES), output.result
        if any(kind in ENDS for kind in kinds):
            whole = train(all_hosts[0], Path(tmp) / "whole", devices("data", SLOW_DEVICES), HEADLESS_STEPS)
        for number in range(args.times):
            for kind in kinds:
                faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
                parallelism = list(LINKS)[number % len(LINKS)]
                folder = Path(tmp) / f"{kind}-{number}"
                try:
                    if kind in ENDS:
                        ends.append(resumed_run(kind, all_hosts, whole, folder, draw))
                        print(f"{kind} {number}: {ends[-1]}", flush=True)
                        continue
                    came = survived_fault(kind, parallelism, all_hosts, plain[parallelism], folder, draw)
                except Exception as error:  # Counted as failed; the other faults follow.
                    failed += 1
                    # Processes of the failed run must not disturb the next.
                    for host in all_hosts:
                        host.end_started()
                    hosts.repair_cluster(all_hosts, list(CLUSTER_DEVICES.values()))
                    print(f"{kind} {number}, {parallelism}: FAILED: {error!r}; {folder}", flush=True)
                    continue
                finally:
                    faulthandler.cancel_dump_traceback_later()
                parallelism_of[came] = parallelism
                print(f"{kind} {number}, {parallelism}: {came}", flush=True)
        if args.back:
            back = returned_workers(all_hosts, Path(tmp), args.back, draw)
            print(f"\n{returned_workers_table(back)}")
    passed = len(parallelism_of) + len(ends)
    print(f"\n{passed} of {passed + failed} runs passed")
    if parallelism_of:
        print(f"\n{survived_faults_table(list(parallelism_of), parallelism_of)}")
    if ends:
        print(f"\n{resumed_runs_table(ends)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
