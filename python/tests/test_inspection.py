"""The cluster as ``plimsoll doctor`` and ``plimsoll watch`` read it: ports, clocks and figures of all nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hosts
from hosts import ALPHA, TOKEN, Host
from plimsoll.ray import inspection
from plimsoll.ray.inspection import compare_clock, listening_ports, try_ports

MIB = 1 << 20
#: Seconds by which the clock of a host is ahead in a test.
AHEAD_SECONDS = 5.0
#: Ports for connections of runs of the first device of each host.
WIRES = range(7400, 7420)
#: Findings of the doctor about a cluster begin with one of these words.
ABOUT_CLUSTER = ("cluster-", "clock-", "ports-")

needs_hosts = pytest.mark.skipif((missing := hosts.missing_requirement()) is not None, reason=str(missing))


def listener(backlog: int) -> socket.socket:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(backlog)
    return listening


def test_ports_are_open_refused_or_silent() -> None:
    free = socket.socket()
    free.bind(("127.0.0.1", 0))
    with listener(8) as open_, listener(0) as full, free, socket.socket() as first:
        # With its only place taken, the system answers no further connection.
        first.connect(full.getsockname())
        assert try_ports([s.getsockname() for s in (open_, free, full)], timeout_seconds=0.3) == ["open", "refused", "silent"]
        assert {open_.getsockname()[1], full.getsockname()[1]} <= listening_ports()
        assert free.getsockname()[1] not in listening_ports()


def test_listening_ports_of_damaged_tables_are_skipped(tmp_path: Path) -> None:
    row = "   0: 00000000:1CEC 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0"
    (tmp_path / "tcp").write_text("\n".join(["  sl  local_address", row.format("0A"), row.format("01").replace("1CEC", "1CED"), "  1:"]))
    assert listening_ports(tmp_path) == {7404}


def test_clock_with_shortest_round_trip_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    own, delays = [1000.0], iter([0.4, 0.2, 0.002, 0.3, 0.2, 0.2, 0.2, 0.2])
    monkeypatch.setattr("plimsoll.ray.inspection.time.time", lambda: own[0])
    monkeypatch.setattr("plimsoll.ray.inspection.time.monotonic", lambda: own[0])

    def read() -> float:
        # The answer leaves early, so that half of the round trip is the greatest error.
        theirs = own[0] + AHEAD_SECONDS
        own[0] += next(delays)
        return theirs

    clock = compare_clock(read)
    assert clock["error_seconds"] == pytest.approx(0.001)
    assert abs(clock["offset_seconds"] - AHEAD_SECONDS) <= clock["error_seconds"] + 1e-9


def test_figures_of_silent_node_become_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("plimsoll.ray.inspection.time.monotonic", lambda: now[0])
    watched = inspection.Watch("10.0.0.1:7300", "10.0.0.1")
    watched.figures["id"] = (100.0, {"name": "cuda:0"})
    assert watched._fresh_figures("id") == {"name": "cuda:0"} and watched._fresh_figures("other") is None
    now[0] += inspection.FIGURES_LIFETIME_SECONDS
    assert watched._fresh_figures("id") is None


@pytest.mark.parametrize("words", [["check"], ["watch", "1"]])
def test_machine_without_cluster_gets_a_message(tmp_path: Path, words: list[str]) -> None:
    pytest.importorskip("ray", reason="no Ray: pip install 'plimsoll-train[ray]'")
    # The folder of the tests holds the sources of the package without its library.
    env = {**os.environ, "PLIMSOLL_RAY_STATE": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "plimsoll.ray.inspection", *words]
    # The process ends early when its input is closed.
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert process.wait(timeout=60) == 2
    assert json.loads(said)["error"]["message"] == "this machine has joined no cluster"


def test_doctor_and_watch_need_no_cluster(command: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PLIMSOLL_RAY_STATE": str(tmp_path), "PLIMSOLL_PYTHON": "/nonexistent"}
    for words in (["doctor", "--json"], ["watch", "--json"]):
        said = subprocess.run([command, *words], env=env, capture_output=True, text=True, timeout=60)
        assert said.returncode == 0 and "cluster" not in said.stdout, said.stdout
    # A member whose Python is missing is told so.
    (tmp_path / "joined.json").write_text("{}")
    said = subprocess.run([command, "doctor", "--json"], env=env, capture_output=True, text=True, timeout=60)
    (finding,) = about_cluster(json.loads(said.stdout))
    assert finding["id"] == "cluster-unreachable" and "/nonexistent cannot be started" in finding["text"]
    snapshot = json.loads(subprocess.run([command, "watch", "--json"], env=env, capture_output=True, text=True, timeout=60).stdout)
    assert any(warning.startswith("the cluster is not shown: ") for warning in snapshot["warnings"])


def about_cluster(report: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the findings of the doctor about a cluster."""
    return [finding for finding in report["findings"] if finding["id"].startswith(ABOUT_CLUSTER)]


def doctor(host: Host) -> list[dict[str, str]]:
    """Runs the doctor on a host. Returns the findings about the cluster."""
    said = host.plimsoll("doctor", "--json")
    assert said.returncode in (0, 2), said.stderr
    return about_cluster(json.loads(said.stdout))


def watch(host: Host) -> dict[str, Any]:
    """Takes a snapshot on a host."""
    said = host.plimsoll("watch", "--json")
    assert said.returncode == 0, said.stderr
    snapshot: dict[str, Any] = json.loads(said.stdout)
    return snapshot


@needs_hosts
def test_watch_lists_simulated_devices_of_cluster(pair: tuple[Host, Host]) -> None:
    for host in pair:
        snapshot = watch(host)
        devices = {device["name"]: device for device in snapshot["devices"]}
        assert {"cpu", "alpha/virtual:a", "beta/virtual:b"} <= set(devices)
        beta = devices["beta/virtual:b"]
        assert (beta["simulated"], beta["total_bytes"], beta["load_line_bytes"]) == (True, 300 * MIB, 300 * MIB)
        assert beta["free_bytes"] is None and beta["in_run"] is False
        assert not any("cluster" in warning for warning in snapshot["warnings"]), snapshot["warnings"]


TAKE_PORTS = """
import socket, sys, time
held = []
for port in range(7400, 7420):
    listening = socket.socket()
    listening.bind(("10.77.0.2", port))
    listening.listen(0 if port == 7400 else 8)
    held.append(listening)
held.append(socket.create_connection(("10.77.0.2", 7400)))
print("taken", flush=True)
time.sleep(300)
"""


@needs_hosts
def test_doctor_finds_taken_and_silent_ports(pair: tuple[Host, Host]) -> None:
    alpha, beta = pair
    assert doctor(alpha) == []
    holder = beta.start(sys.executable, "-c", TAKE_PORTS)
    assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
    found = {finding["id"]: finding["text"] for finding in doctor(alpha)}
    assert found == {
        "ports-blocked": "from alpha/virtual:a to beta/virtual:b (10.77.0.2), ports 7400 neither accept nor refuse connections",
        "ports-taken": "all ports 7400-7419 for connections of runs on beta/virtual:b are taken",
    }


#: Sets the clock of each Python process forward.
CLOCK_AHEAD = f"""
import time
own = time.time
time.time = lambda: own() + {AHEAD_SECONDS}
"""


@needs_hosts
def test_clock_and_figures_of_another_host_are_read(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="no Ray: pip install 'plimsoll-train[ray]'")
    (tmp_path / "sitecustomize.py").write_text(CLOCK_AHEAD)
    with hosts.network(["alpha", "beta"]) as (alpha, beta):
        for host in (alpha, beta):
            host.env["PLIMSOLL_CACHE"] = str(host.tmp)
            hosts.write_rates(host.tmp)
        beta.env["PYTHONPATH"] = str(tmp_path)
        hosts.join_head(alpha, ALPHA, "--token", TOKEN)
        hosts.join(beta, "cpu=2GiB")
        (finding,) = doctor(alpha)
        assert finding["id"] == "clock-skew" and finding["text"].startswith("the clock of beta (10.77.0.2) is "), finding
        apart = float(finding["text"].partition(") is ")[2].split()[0])
        assert abs(apart - AHEAD_SECONDS) < 1.0 and " ahead of that of this machine (± " in finding["text"], finding
        devices = {device["name"]: device for device in watch(alpha)["devices"]}
        here, there = devices["cpu"], devices["beta/cpu"]
        assert there["processes"] == [], "the process that reads the figures is no run"
        # Both hosts are this machine.
        assert (there["model"], there["total_bytes"]) == (here["model"], here["total_bytes"])
        assert 0 < there["free_bytes"] <= there["total_bytes"] and not there["simulated"]
        assert 0 < there["load_line_bytes"] <= 2048 * MIB
        # The processes on the nodes end with the command.
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline and "Observer" in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout:
            time.sleep(0.2)
        assert "ray::Observer" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
