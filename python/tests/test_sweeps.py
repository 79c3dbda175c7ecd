"""Sweeps over the hosts of a cluster: packing of runs on all devices, resuming, and lost devices."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import faults
import hosts
from hosts import BETA, Host
from runs import RUN_TIMEOUT_SECONDS, RunOutput, events
from shapes import MIB

#: Seeds and steps with which both devices work for some seconds.
SEEDS, STEPS, LONG = range(1, 5), 12, 24


def sweep_arguments(folder: Path, devices: str, seeds: range, steps: int) -> list[str]:
    """Returns the arguments of `plimsoll sweep`."""
    settings = [f"train.seed={','.join(map(str, seeds))}", f"train.steps={steps}", "train.batch_tokens=768", "train.save_every=3"]
    said = [word for setting in settings for word in ("--set", setting)]
    return ["sweep", *said, "--devices", devices, "--dir", str(folder)]


def report(folder: Path) -> dict[str, Any]:
    """Reads the report of a sweep so far."""
    content: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return content


def wait_for_checkpoint(folder: Path, device: str, run: subprocess.Popen[str]) -> str:
    """Waits until a run on this device has a checkpoint. Returns the name of the run."""
    deadline = time.monotonic() + RUN_TIMEOUT_SECONDS
    while run.poll() is None and time.monotonic() < deadline:
        there = report(folder)["runs"] if (folder / "sweep.json").exists() else []
        for row in there:
            if row.get("device") == device and any(event["event"] == "checkpoint" for event in events(folder / row["name"])):
                return str(row["name"])
        time.sleep(0.05)
    run.kill()
    raise AssertionError(f"no checkpoint on {device}:\n{run.communicate(timeout=30)[0]}")


def steps(folder: Path) -> list[int]:
    """Returns the completed steps of a run in order."""
    return [event["step"] for event in events(folder) if event["event"] == "step"]


def test_sweep_packs_runs_over_all_hosts(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, _ = pair
    swept = alpha.plimsoll(*sweep_arguments(tmp_path / "sweep", "ray", SEEDS, STEPS))
    assert swept.returncode == 0, swept.stdout + swept.stderr
    told = report(tmp_path / "sweep")
    assert [run["state"] for run in told["runs"]] == ["done"] * len(SEEDS)
    lines = {device["name"]: device["budget_bytes"] for device in told["devices"]}
    assert lines == {"alpha/virtual:a": 600 * MIB, "beta/virtual:b": 300 * MIB}
    # Several runs share a device, each under its own load line.
    assert all(device["workers"] >= 1 for device in told["devices"]) and max(device["workers"] for device in told["devices"]) >= 2
    assert all(device["simulated"] and 0 < device["peak_reserved_bytes"] <= device["budget_bytes"] for device in told["devices"])
    for run in told["runs"]:
        assert 0 < run["measured_bytes"] <= run["predicted_bytes"]
        left = RunOutput(tmp_path / "sweep" / run["name"])
        assert [device["device"] for device in left.result["memory"]] == [run["device"]]
    # The device does not change the results.
    alone = alpha.plimsoll(*sweep_arguments(tmp_path / "alone", "virtual:a=280MiB@0.5", SEEDS, STEPS))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    for run, other in zip(told["runs"], report(tmp_path / "alone")["runs"]):
        assert (run["name"], run["loss"]) == (other["name"], pytest.approx(other["loss"], rel=1e-5))


def test_killed_sweep_saves_runs_and_resumes(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, _ = pair
    folder = tmp_path / "sweep"
    run = alpha.start(hosts.COMMAND, *sweep_arguments(folder, "ray", SEEDS[:2], LONG))
    name = wait_for_checkpoint(folder, "alpha/virtual:a", run)
    run.kill()
    run.wait()
    deadline = time.monotonic() + RUN_TIMEOUT_SECONDS
    while not (folder / name / "result.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    left = json.loads((folder / name / "result.json").read_text())
    assert left["status"] == "stopped" and left["steps"] == steps(folder / name)[-1], "the run saved after its last step"
    # The sweep waits until Ray has accounted for the freed memory.
    resumed = alpha.plimsoll("sweep", "--resume", str(folder), "--quiet")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert steps(folder / name) == list(range(1, LONG + 1))
    assert all(device["budget_bytes"] in (600 * MIB, 300 * MIB) for device in report(folder)["devices"])


@pytest.mark.disrupts_cluster
def test_runs_of_lost_device_continue_on_another(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    folder = tmp_path / "sweep"
    run = alpha.start(hosts.COMMAND, *sweep_arguments(folder, "ray", SEEDS, LONG))
    name = wait_for_checkpoint(folder, "beta/virtual:b", run)
    try:
        faults.inject("raylet", beta)
        said, _ = run.communicate(timeout=RUN_TIMEOUT_SECONDS)
    finally:
        faults.repair("raylet", beta, BETA)
    assert run.returncode == 0, said
    assert "beta/virtual:b is lost" in said
    rows = {row["name"]: row for row in report(folder)["runs"]}
    assert [row["state"] for row in rows.values()] == ["done"] * len(SEEDS)
    # The run continued from its checkpoint.
    assert rows[name]["retries"] >= 1 and rows[name]["device"] == "alpha/virtual:a"
    assert steps(folder / name)[-1] == LONG and steps(folder / name).count(1) == 1
