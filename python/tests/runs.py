"""Runs of the built-in example over hosts, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
import struct
import subprocess
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hosts
from hosts import Host
from plimsoll.ray.cluster import Cluster

#: How long a run may take to come to a step, or to its end.
RUN_SECONDS = 200.0
#: Links as they are said to be, so that the plan of both runs is the same; what is measured is tested by itself.
NEAR = "virtual:a=280MiB@0.4::10GB/s+10us", "virtual:b=280MiB@0.2::10GB/s+10us"
SETTINGS = ["run.team=all", "run.threads=1", "train.batch_tokens=768", "train.eval_every=4", "train.save_every=3"]


def events(folder: Path) -> list[dict[str, Any]]:
    """What a run has said so far; of a line that is being written nothing."""
    path = folder / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


class Left:
    """What a run has left behind."""

    def __init__(self, folder: Path) -> None:
        self.result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        self.events = events(folder)
        self.losses = [event["loss"] for event in self.events if event["event"] in ("step", "evaluation")]
        self.model = (folder / "model" / "model.safetensors").read_bytes()


def numbers(file: Path) -> dict[str, tuple[str, list[float]]]:
    """What is stored in a file, by name: how, and its numbers, of those that are floats of 32 or 64 bits."""
    stored = file.read_bytes()
    (length,) = struct.unpack_from("<Q", stored)
    tensors: dict[str, dict[str, Any]] = json.loads(stored[8 : 8 + length])
    found = dict[str, tuple[str, list[float]]]()
    for name, tensor in tensors.items():
        if code := {"F32": "f", "F64": "d"}.get(tensor.get("dtype", "")):
            first, end = (8 + length + offset for offset in tensor["data_offsets"])
            found[name] = tensor["dtype"], list(array(code, stored[first:end]))
    return found


def words(folder: Path, devices: str, steps: int, *more: str) -> list[str]:
    """The command, with more settings."""
    settings = [*SETTINGS, f"train.steps={steps}", f"run.dir={folder}", f"run.devices={devices},host=1MiB", *more]
    return ["train", "--quiet", *(word for setting in settings for word in ("--set", setting))]


def train(host: Host, folder: Path, devices: str, steps: int, *more: str) -> Left:
    """A run, to its end."""
    trained = host.plimsoll(*words(folder, devices, steps, *more))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    return Left(folder)


class Started:
    """A run that is under way."""

    def __init__(self, host: Host, folder: Path, devices: str, steps: int, *more: str) -> None:
        self.folder = folder
        self.process = host.start(hosts.COMMAND, *words(folder, devices, steps, *more))

    def until_step(self, step: int) -> None:
        """Waits until a step is done."""
        self.until("step", lambda event: event["step"] == step)

    def until(self, what: str, such: Callable[[dict[str, Any]], bool] = lambda _: True, after: int = 0) -> int:
        """Waits until it says something after so many events, and counts the events until there."""
        patience = time.monotonic() + RUN_SECONDS
        while True:
            for number, event in enumerate(events(self.folder)[after:], after + 1):
                if event["event"] == what and such(event):
                    return number
            self.goes_on(patience)
            time.sleep(0.05)

    def until_settled(self, what: str, steps: int = 40) -> int:
        """Waits until the last that became of a device is this, so many steps ago, and counts the events until there."""
        patience = time.monotonic() + RUN_SECONDS
        while True:
            there = events(self.folder)
            said = [event["event"] for event in there if event["event"] in ("lost", "back", "step")]
            if len(said) > steps and said[-steps:] == ["step"] * steps:
                if next(event for event in reversed(said) if event != "step") == what:
                    return len(there)
            self.goes_on(patience)
            time.sleep(0.1)

    def goes_on(self, patience: float) -> None:
        """That it is still at work, and this moment is not past. Else what it has said is told, and it is ended."""
        if self.process.poll() is None and time.monotonic() < patience:
            return
        there = events(self.folder)
        # Of steps in a row the last is enough.
        ends = (event for event, after in zip(there, [*there[1:], {}]) if not event["event"] == after.get("event") == "step")
        self.process.kill()
        said = ""
        # What it has started ends after it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = self.process.communicate(timeout=30)
        raise AssertionError("\n".join([said, *map(json.dumps, ends)]))

    def stop(self) -> None:
        """Has it end early."""
        self.process.send_signal(signal.SIGINT)
        self.stopped()

    def stopped(self) -> str:
        """Waits for its end, which is one that it goes on from; what it said."""
        said, _ = self.process.communicate(timeout=RUN_SECONDS)
        assert self.process.returncode == 4, said
        assert f"plimsoll train --resume {shlex.quote(str(self.folder))}\n" in said, said
        return said

    def left(self) -> Left:
        """Waits for its end, which is a good one."""
        said, _ = self.process.communicate(timeout=RUN_SECONDS)
        assert self.process.returncode == 0, said
        return Left(self.folder)


def processes(host: Host) -> Iterator[tuple[int, bytes]]:
    """Numbers and words of what runs on a host: the machine has those of all hosts together, of other networks, too."""
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words, env = (place / "cmdline").read_bytes(), (place / "environ").read_bytes()
            if f"PLIMSOLL_RAY_STATE={host.state}\0".encode() in env:
                yield int(place.name), words


def worker(host: Host) -> int:
    """The process of a run on a host's device."""
    return next(pid for pid, words in processes(host) if words.startswith(b"ray::Worker"))


def workers(host: Host) -> dict[str, int]:
    """Processes of runs, by their devices."""
    said = host.plimsoll("cluster", "--json")
    seen: Cluster = json.loads(said.stdout)
    return {node["name"]: one["pid"] for node in seen["nodes"] for one in node["runs"]}


def listening(pid: int, ip: str) -> set[int]:
    """The ports of an address, or of all, on which anything listens in the network that a process is in."""
    here = {socket.inet_aton(one)[::-1].hex().upper() for one in (ip, "0.0.0.0")} | {"0" * 32}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {int(port, 16) for at, port in places if at in here}
