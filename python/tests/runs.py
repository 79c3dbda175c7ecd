"""Runs of the built-in example over hosts, and their output."""

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

import hosts
from hosts import Host
from plimsoll.ray.cluster import Cluster

#: Seconds that a run may take to reach a step or its end.
RUN_TIMEOUT_SECONDS = 200.0
#: Devices with given links, so that runs on one host and on two hosts have equal plans. Other tests cover measured links.
FAST_LINK_DEVICES = "virtual:a=280MiB@0.4::10GB/s+10us", "virtual:b=280MiB@0.2::10GB/s+10us"
SETTINGS = ["run.parallelism=all", "run.threads=1", "train.batch_tokens=768", "train.eval_every=4", "train.save_every=3"]


def events(folder: Path) -> list[dict[str, Any]]:
    """Reads the events of a run so far, without a line that is being written."""
    path = folder / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


class RunOutput:
    """The files of an ended run."""

    def __init__(self, folder: Path) -> None:
        self.result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        self.events = events(folder)
        self.losses = [event["loss"] for event in self.events if event["event"] in ("step", "evaluation")]
        self.model = (folder / "model" / "model.safetensors").read_bytes()


def read_float_tensors(file: Path) -> dict[str, tuple[str, list[float]]]:
    """Reads the f32 and f64 tensors of a safetensors file: dtype and values by name."""
    stored = file.read_bytes()
    (length,) = struct.unpack_from("<Q", stored)
    tensors: dict[str, dict[str, Any]] = json.loads(stored[8 : 8 + length])
    by_name = dict[str, tuple[str, list[float]]]()
    for name, tensor in tensors.items():
        if code := {"F32": "f", "F64": "d"}.get(tensor.get("dtype", "")):
            first, end = (8 + length + offset for offset in tensor["data_offsets"])
            by_name[name] = tensor["dtype"], list(array(code, stored[first:end]))
    return by_name


def train_arguments(folder: Path, devices: str, steps: int, *more: str) -> list[str]:
    """Returns the arguments of `plimsoll train`, with more settings."""
    settings = [*SETTINGS, f"train.steps={steps}", f"run.dir={folder}", f"run.devices={devices},host=4KiB", *more]
    return ["train", "--quiet", *(word for setting in settings for word in ("--set", setting))]


def train(host: Host, folder: Path, devices: str, steps: int, *more: str) -> RunOutput:
    """Trains to the end."""
    trained = host.plimsoll(*train_arguments(folder, devices, steps, *more))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    return RunOutput(folder)


class RunningRun:
    """A run that was started and may not have ended."""

    def __init__(self, host: Host, folder: Path, devices: str, steps: int, *more: str) -> None:
        self.folder = folder
        self.process = host.start(hosts.COMMAND, *train_arguments(folder, devices, steps, *more))

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is completed."""
        self.wait_for_event("step", lambda event: event["step"] == step)

    def wait_for_event(self, kind: str, matches: Callable[[dict[str, Any]], bool] = lambda _: True, after: int = 0) -> int:
        """Waits for an event of this kind after the first `after` events. Returns the number of events up to it."""
        deadline = time.monotonic() + RUN_TIMEOUT_SECONDS
        while True:
            for number, event in enumerate(events(self.folder)[after:], after + 1):
                if event["event"] == kind and matches(event):
                    return number
            self.check_running(deadline)
            time.sleep(0.05)

    def wait_until_settled(self, kind: str, steps: int = 40) -> int:
        """Waits until the last device event is of this kind and many steps have followed. Returns the number of events."""
        deadline = time.monotonic() + RUN_TIMEOUT_SECONDS
        while True:
            there = events(self.folder)
            said = [event["event"] for event in there if event["event"] in ("device_lost", "device_returned", "step")]
            if len(said) > steps and said[-steps:] == ["step"] * steps:
                if next(event for event in reversed(said) if event != "step") == kind:
                    return len(there)
            self.check_running(deadline)
            time.sleep(0.1)

    def check_running(self, deadline: float) -> None:
        """Fails with the output of the run, and kills it, if it has ended or the deadline has passed."""
        if self.process.poll() is None and time.monotonic() < deadline:
            return
        there = events(self.folder)
        # Only the last of consecutive steps is shown.
        ends = (event for event, after in zip(there, [*there[1:], {}]) if not event["event"] == after.get("event") == "step")
        self.process.kill()
        said = ""
        # Processes that it has started end after it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = self.process.communicate(timeout=30)
        raise AssertionError("\n".join([said, *map(json.dumps, ends)]))

    def stop(self) -> None:
        """Interrupts the run and waits for its end."""
        self.process.send_signal(signal.SIGINT)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> str:
        """Waits until the run has stopped resumably. Returns its output."""
        said, _ = self.process.communicate(timeout=RUN_TIMEOUT_SECONDS)
        assert self.process.returncode == 4, said
        assert f"plimsoll train --resume {shlex.quote(str(self.folder))}\n" in said, said
        return said

    def output(self) -> RunOutput:
        """Waits until the run has succeeded. Returns its files."""
        said, _ = self.process.communicate(timeout=RUN_TIMEOUT_SECONDS)
        assert self.process.returncode == 0, said
        return RunOutput(self.folder)


def processes(host: Host) -> Iterator[tuple[int, bytes]]:
    """Yields pid and command line of the processes of a host. `/proc` lists the processes of all hosts together."""
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words, env = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            if f"PLIMSOLL_RAY_STATE={host.state}\0".encode() in env:
                yield int(path.name), words


def worker_pid(host: Host) -> int:
    """Returns the pid of a worker on a host."""
    return next(pid for pid, words in processes(host) if words.startswith(b"ray::Worker"))


def worker_pids(host: Host) -> dict[str, int]:
    """Returns the pids of workers by device."""
    said = host.plimsoll("cluster", "--json")
    seen: Cluster = json.loads(said.stdout)
    return {node["name"]: one["pid"] for node in seen["nodes"] for one in node["runs"]}


def listening_ports(pid: int, ip: str) -> set[int]:
    """Returns the listening ports of an address, or of all addresses, in the network namespace of a process."""
    here = {socket.inet_aton(one)[::-1].hex().upper() for one in (ip, "0.0.0.0")} | {"0" * 32}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    addresses = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {int(port, 16) for address, port in addresses if address in here}
