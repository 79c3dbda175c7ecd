"""Runs of the built-in example over hosts, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

import hosts
from hosts import Host
from plimsoll.ray.cluster import Cluster

#: How long a run may take to come to a step, or to its end.
RUN_SECONDS = 150.0
#: Links as they are said to be, so that the plan of both runs is the same; what is measured is tested by itself.
NEAR = "virtual:a=280MiB@0.4::10GB/s+10us", "virtual:b=280MiB@0.2::10GB/s+10us"
SETTINGS = ["run.team=all", "run.threads=1", "train.batch_tokens=768", "train.eval_every=4", "train.save_every=3"]


class Left:
    """What a run has left behind."""

    def __init__(self, folder: Path) -> None:
        self.result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        self.losses = [event["loss"] for event in events if event["event"] in ("step", "evaluation")]
        self.model = (folder / "model" / "model.safetensors").read_bytes()


def words(folder: Path, devices: str, steps: int) -> list[str]:
    """The command."""
    settings = [*SETTINGS, f"train.steps={steps}", f"run.dir={folder}", f"run.devices={devices},host=1MiB"]
    return ["train", "--quiet", *(word for setting in settings for word in ("--set", setting))]


def train(host: Host, folder: Path, devices: str, steps: int) -> Left:
    """A run, to its end."""
    trained = host.plimsoll(*words(folder, devices, steps))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    return Left(folder)


class Started:
    """A run that is under way."""

    def __init__(self, host: Host, folder: Path, devices: str, steps: int) -> None:
        self.folder = folder
        self.process = host.start(hosts.COMMAND, *words(folder, devices, steps))

    def until_step(self, step: int) -> None:
        """Waits until a step is done."""
        events, patience = self.folder / "events.jsonl", time.monotonic() + RUN_SECONDS
        while not (events.exists() and f'"step","step":{step},' in events.read_text().replace(" ", "")):
            assert self.process.poll() is None and time.monotonic() < patience, self.process.communicate(timeout=5)[0]
            time.sleep(0.05)

    def left(self) -> Left:
        """Waits for its end, which is a good one."""
        said, _ = self.process.communicate(timeout=RUN_SECONDS)
        assert self.process.returncode == 0, said
        return Left(self.folder)


def lost_beta(left: Left, plain: Left) -> None:
    """That a run has lost the second host, and come to the losses of one that has not."""
    assert [lost["device"] for lost in left.result["lost"]] == ["beta/virtual:b"]
    assert len(left.losses) == len(plain.losses)
    for one, other in zip(left.losses, plain.losses):
        assert one == pytest.approx(other, rel=1e-4)


def worker(device: str) -> int:
    """The process of a run on a device of this name: hosts of the tests have all their processes together."""
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            title, env = (place / "cmdline").read_bytes(), (place / "environ").read_bytes()
            if title.startswith(b"ray::Worker") and f"PLIMSOLL_RAY_DEVICE={device}\0".encode() in env:
                return int(place.name)
    raise AssertionError(f"no run is on {device}")


def workers(host: Host) -> dict[str, int]:
    """Processes of runs, by their devices."""
    said = host.plimsoll("cluster", "--json")
    seen: Cluster = json.loads(said.stdout)
    return {node["name"]: one["pid"] for node in seen["nodes"] for one in node["runs"]}
