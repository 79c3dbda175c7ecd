"""Runs over the hosts of a cluster: resolution of devices, equal results on one and two hosts, and lost devices."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import faults
import hosts
import plimsoll
from hosts import BETA, Host
from plimsoll.ray.cluster import Cluster
from plimsoll.ray.run_helper import Placement, RequestedDevice, resolve
from runs import FAST_LINK_DEVICES, RUN_TIMEOUT_SECONDS, SETTINGS, RunOutput, RunningRun, events, listening_ports, processes, read_float_tensors, train, train_arguments, worker_pids
from shapes import MIB, node

#: Nodes of a machine with two GPUs, of one with its CPU, and of one that was not joined with `plimsoll join`.
NODES = [node("a/cuda:0", 20000), node("a/cuda:1", 6000), node("b/cpu"), node("10.0.0.9", 8000)]
FREE = {
    "a/cuda:0": {"vram_mib": 20000.0, "memory": 500.0 * MIB},
    "a/cuda:1": {"vram_mib": 1500.0, "memory": 1000.0 * MIB},
    "b/cpu": {"memory": 1000.0 * MIB},
    "10.0.0.9": {"vram_mib": 8000.0},
}


def resolved(*words: str, budget: str | None = None) -> list[RequestedDevice]:
    return resolve(list(words), budget, NODES, FREE)


def test_ray_resolves_to_all_nodes_with_free_memory() -> None:
    every = resolved("ray")
    assert [one.full_text for one in every] == [
        "a/cuda:0=20000MiB",
        "a/cuda:1=1500MiB",
        "b/cpu=1000MiB",
        "10.0.0.9/cuda:0=8000MiB",
    ]
    assert [one.bundle for one in every] == [
        {"vram_mib": 20000},
        {"vram_mib": 1500},
        {"memory": 1000 * MIB},
        {"vram_mib": 8000},
    ]
    held = resolved("ray", budget="2000MiB")
    assert [one.budget for one in held] == ["2000MiB", "1500MiB", "1000MiB", "2000MiB"]
    half = resolved("ray", "ray:b/virtual:x=25%@0.2", budget="50%")
    assert [one.budget for one in half] == ["10000MiB", "750MiB", "500MiB", "4000MiB", "250MiB"]
    assert half[-1].full_text == "b/virtual:x=250MiB@0.2"


@pytest.mark.parametrize(
    ("word", "rest", "kept"),
    [
        ("ray:a/cuda:1", "=1500MiB", {"vram_mib": 1500}),
        ("a/cuda:1=1GiB", "=1GiB", {"vram_mib": 1024}),
        ("ray:a/cuda:0=50%@10gbit", "=10000MiB@10gbit", {"vram_mib": 10000}),
        ("a/cuda:0@1gbit", "=20000MiB@1gbit", {"vram_mib": 20000}),
        ("ray:b/cpu", "=1000MiB", {"memory": 1000 * MIB}),
        ("ray:b/virtual:x=300MiB@0.3::10GB/s", "=300MiB@0.3::10GB/s+10us", {"memory": 300 * MIB}),
        ("ray:b/virtual:x=300MiB@1gbit", "=300MiB::1gbit", {"memory": 300 * MIB}),
        ("ray:b/virtual:x = 300MiB @ 0.3 : 12GB/s", "=300MiB@0.3:12GB/s+10us", {"memory": 300 * MIB}),
        ("ray:a/cpu=300MiB", "=300MiB", {"memory": 300 * MIB}),
    ],
)
def test_device_text_may_state_budget_and_link(word: str, rest: str, kept: dict[str, float]) -> None:
    (one,) = resolved(word)
    assert (one.full_text, one.bundle) == (one.name + rest, kept)


@pytest.mark.parametrize(
    ("word", "whole"),
    [
        ("ray:c/virtual:a", "=600MiB@0.5:12GB/s+10us:10gbit"),
        ("ray:c/virtual:a@1gbit", "=600MiB@0.5:12GB/s+10us:1gbit"),
        ("ray:c/virtual:a=50%@1gbit", "=300MiB@0.5:12GB/s+10us:1gbit"),
        ("ray:c/virtual:a=300MiB::1gbit", "=300MiB@0.5:12GB/s+10us:1gbit"),
        ("ray:c/virtual:a=300MiB@0.2", "=300MiB@0.2"),
    ],
)
def test_simulated_device_keeps_unstated_attributes_of_its_node(word: str, whole: str) -> None:
    (one,) = resolve([word], None, [node("c/virtual:a", 600)], {"c/virtual:a": {"vram_mib": 600.0}})
    one.joined_as = "virtual:a=600MiB@0.5:12GB/s:10gbit"
    assert one.full_text == f"c/virtual:a{whole}"


def test_device_named_besides_ray_is_refused_as_duplicate() -> None:
    for words in (["ray", "ray:a/cuda:0=6GiB"], ["ray:b/cpu=400MiB", "ray"]):
        with pytest.raises(plimsoll.InputError, match="run.devices: (a/cuda:0|b/cpu) is named twice"):
            resolved(*words, budget="50%")


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("ray:c/cuda:0", plimsoll.InputError, "the cluster has no node c/cuda:0"),
        ("ray:a/cuda:2", plimsoll.InputError, "the cluster has: a/cuda:0, a/cuda:1, b/cpu, 10.0.0.9/cuda:0"),
        ("ray:b/virtual:x", plimsoll.InputError, "the cluster has no node b/virtual:x"),
        ("ray:b/virtual:x@1gbit", plimsoll.InputError, "the cluster has no node b/virtual:x"),
        ("ray:a/cuda:0=6GiB@fast", plimsoll.InputError, "run.devices: device `a/cuda:0`: `fast` is not a link"),
        ("a/cpu", plimsoll.InputError, "the cluster has no node a/cpu"),
        ("a/cuda:1=2GiB", plimsoll.DoesNotFit, "a/cuda:1: 2048 MiB are requested, and 1500 of its 6000 MiB are free"),
        ("b/virtual:x=2GiB@0.3", plimsoll.DoesNotFit, "b/virtual:x: 2048 MiB are requested, and 1000 of its 1000 MiB are free"),
        ("b/cpu=much", plimsoll.InputError, "`much` is not a budget"),
    ],
)
def test_unresolvable_devices_are_reported_by_name(word: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        resolved(word)
    assert said in str(caught.value)


def test_budget_above_node_hints_at_joining_again() -> None:
    for word, more in (("a/cuda:1=2GiB", False), ("a/cuda:1=7000MiB", True)):
        with pytest.raises(plimsoll.DoesNotFit) as caught:
            resolved(word)
        assert any(hint.startswith("its node joined with 6000 MiB; ") for hint in caught.value.hints) == more


def test_shares_exceeding_one_device_together_are_refused() -> None:
    words = ["b/virtual:x=40%@0.2", "b/virtual:y=600MiB@0.2"]
    assert [one.bundle for one in resolved(*words)] == [{"memory": 400 * MIB}, {"memory": 600 * MIB}]
    for second in ("b/virtual:y=60%@0.2", "b/cpu=600MiB"):
        with pytest.raises(plimsoll.DoesNotFit, match="600 MiB are requested, and 400 of its 1000 MiB are free"):
            resolved("b/virtual:x=60%@0.2", second)


#: Length of a run in which a device is lost.
STEPS = 40
#: Devices at a quarter of the pace. They wait instead of computing, so that runs which wait for Ray leave the processor to it.
SLOW_DEVICES = [word.replace("@0.4", "@0.1").replace("@0.2", "@0.05") for word in FAST_LINK_DEVICES]


def test_lost_nodes_and_missing_budgets_are_reported() -> None:
    there = [*NODES, node("d/cuda:0", 6000, alive=False, lost_reason="it no longer answers")]
    assert [one.name for one in resolve(["ray"], None, there, FREE)] == [one.name for one in resolved("ray")]
    with pytest.raises(plimsoll.InputError, match="run.devices: d/cuda:0 is lost"):
        resolve(["ray:d/cuda:0"], None, there, FREE)
    with pytest.raises(plimsoll.InputError, match="run.devices: d/virtual:x is lost"):
        resolve(["ray:d/virtual:x=300MiB@0.2"], None, there, FREE)
    with pytest.raises(plimsoll.InputError, match="needs a load line: ray:a/cpu=600MiB"):
        resolve(["ray:a/cpu"], None, there, FREE)
    with pytest.raises(plimsoll.InputError, match="a device `my machine/cuda:0`, whose name is not valid in a run file\n  hint: expected HOST/DEVICE"):
        resolve(["ray"], None, [node("my machine/cuda:0", 6000)], FREE)


def test_cpu_of_host_uses_node_with_most_memory() -> None:
    there = [node("a/cuda:0", 20000), node("a/cuda:1", 6000), node("a/cuda:2", 6000)]
    free = {name: {"vram_mib": 1000.0, "memory": memory * MIB} for name, memory in (("a/cuda:0", 200.0), ("a/cuda:1", 900.0), ("a/cuda:2", 300.0))}
    (asked,) = resolve(["a/cpu=800MiB"], None, there, free)
    assert (asked.node["name"], asked.bundle) == ("a/cuda:1", {"memory": 800 * MIB})


@pytest.mark.parametrize(("ended", "words"), [("ActorDiedError", []), ("OutOfMemoryError", ["too much"])])
def test_ended_worker_is_restarted(
    monkeypatch: pytest.MonkeyPatch, ended: str, words: list[str]
) -> None:
    import ray

    error = getattr(ray.exceptions, ended)(*words)
    placement, dead, restarted = Placement.__new__(Placement), mock.MagicMock(), threading.Event()
    placement.devices, placement.workers = resolved("b/cpu"), {"b/cpu": dead}
    placement.restarting, placement.lock, placement.released = set(), threading.Lock(), False
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=error))
    monkeypatch.setattr(placement, "_restart_worker", lambda one, ended: restarted.set() if ended is dead else None)
    with pytest.raises(type(error)):
        placement.answer("b/cpu", False, b"")
    assert restarted.wait(10.0)


# Tests on a real cluster.


@pytest.fixture(scope="module")
def here(shared_pair: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> RunOutput:
    """The output of a run on one host."""
    return train(shared_pair[0], tmp_path_factory.mktemp("runs") / "here", ",".join(FAST_LINK_DEVICES), 8)


def test_two_host_run_has_bits_of_one_host(pair: tuple[Host, Host], here: RunOutput, tmp_path: Path) -> None:
    alpha, _ = pair
    there = train(alpha, tmp_path / "there", f"ray:alpha/{FAST_LINK_DEVICES[0]},ray:beta/{FAST_LINK_DEVICES[1]}", 8)
    recipes = [[(worker["sequences"], worker["recipe"]) for worker in output.result["team"]] for output in (here, there)]
    assert recipes[0] == recipes[1]
    assert here.losses == there.losses and len(here.losses) >= 8
    assert here.model == there.model
    # Each host stays under its load line, as measured by its own process.
    assert [device["device"] for device in there.result["memory"]] == ["alpha/virtual:a", "beta/virtual:b"]
    for device in there.result["memory"]:
        assert 0 < device["measured_bytes"] <= device["budget_bytes"] == 280 * MIB
        assert device["arena_measured_bytes"] == device["arena_bytes"]
    # The workers have ended with the run, and the next run gets their memory without waiting.
    assert worker_pids(alpha) == {}
    again = alpha.plimsoll(*train_arguments(tmp_path / "again", "ray", 1))
    assert again.returncode == 0, again.stderr
    lines = [device["budget_bytes"] for device in json.loads((tmp_path / "again" / "plan.json").read_text())["devices"]]
    assert lines == [600 * MIB, 300 * MIB]


def test_explicit_budget_share_applies_to_cluster_device(pair: tuple[Host, Host], tmp_path: Path) -> None:
    for share, line in (((), 600), (("memory.budget=90%",), 540), (("memory.budget=50%",), 300)):
        settings = [*SETTINGS, "run.devices=ray:alpha/virtual:a,host=1MiB", *share]
        planned = pair[0].plimsoll("plan", "--json", *(word for setting in settings for word in ("--set", setting)))
        assert planned.returncode == 0, planned.stderr
        assert [device["budget_bytes"] for device in json.loads(planned.stdout)["devices"]] == [line * MIB]


def test_device_too_small_for_worker_process_is_refused(
    pair: tuple[Host, Host], tmp_path: Path
) -> None:
    # The interpreter with Ray alone takes more memory than that.
    for command in ("plan", "train"):
        settings = [*SETTINGS, f"run.dir={tmp_path / 'run'}", "run.devices=ray:beta/virtual:b=90MiB"]
        refused = pair[0].plimsoll(command, *(word for setting in settings for word in ("--set", setting)))
        assert refused.returncode == 3, refused.stdout + refused.stderr
        assert "does not fit: the smallest recipe holds " in refused.stderr and "fallback" not in refused.stdout, refused.stdout
    assert not (tmp_path / "run" / "run.toml").exists()


def test_worker_measures_missing_rates_under_its_load_line(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    known, aside = beta.tmp / "devices.json", tmp_path / "devices.json"
    known.rename(aside)
    held = 0
    try:
        run = RunningRun(alpha, tmp_path / "run", "ray:beta/virtual:b=150MiB@0.3", 2)
        deadline = time.monotonic() + RUN_TIMEOUT_SECONDS
        while run.process.poll() is None:
            assert time.monotonic() < deadline
            for pid in [pid for pid, words in processes(beta) if words.startswith(b"ray::Worker")]:
                with contextlib.suppress(OSError):
                    said = Path(f"/proc/{pid}/status").read_text().splitlines()
                    held = max([held, *(int(line.split()[1]) << 10 for line in said if line.startswith("VmHWM:"))])
            time.sleep(0.02)
        output = run.output()
        # Rates measured with so little memory are not stored.
        assert not known.exists()
    finally:
        aside.rename(known)
    (memory,) = output.result["memory"]
    assert 0 < memory["measured_bytes"] <= memory["predicted_bytes"]
    # The memory of the measurement is not part of the run's peak, but stays under the load line too.
    assert memory["measured_bytes"] + 8 * MIB < held <= memory["budget_bytes"] == 150 * MIB


@pytest.fixture(scope="module")
def alone(shared_pair: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an f64 run on one device."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train(shared_pair[0], folder, FAST_LINK_DEVICES[0], 8, "train.precision=f64")
    return folder


#: Load lines of both devices in MiB and the link with which the planner chooses each parallelism. Only the first lines hold the
#: whole model. Charges of a worker differ between machines, so the test also tries lines that are lower or higher by OFFSETS.
TEAMS = {"data": (280, 280, "1gbit"), "sharded": (164, 134, "10GB/s+10us"), "pipeline": (136, 136, "20MB/s+10us")}
OFFSETS = (0, 1, -1, 2, -2, 4, -4, 6, -6, 8, -8, 10, -10)


@pytest.mark.parametrize("parallelism", TEAMS)
def test_two_host_run_matches_one_device(pair: tuple[Host, Host], alone: Path, tmp_path: Path, parallelism: str) -> None:
    alpha_mib, beta_mib, link = TEAMS[parallelism]
    for offset in OFFSETS:
        lines = f"{alpha_mib - offset}MiB", f"{beta_mib - offset}MiB"
        devices = f"ray:alpha/virtual:a={lines[0]}@0.4::{link},ray:beta/virtual:b={lines[1]}@0.2::{link}"
        folder = tmp_path / f"run{offset}"
        trained = pair[0].plimsoll(*train_arguments(folder, devices, 8, "train.precision=f64"))
        assert trained.returncode in (0, 3), trained.stdout + trained.stderr
        result = RunOutput(folder).result if trained.returncode == 0 else {}
        # A device whose rate was measured beside other work may only store a shard.
        if result.get("parallelism") == parallelism and all(worker["sequences"] > 0 for worker in result["team"]):
            break
    output = RunOutput(folder)
    assert output.result["parallelism"] == parallelism and all(worker["sequences"] > 0 for worker in output.result["team"])
    expected_events = [event for event in events(alone) if event["event"] in ("step", "evaluation")]
    actual_events = [event for event in output.events if event["event"] in ("step", "evaluation")]
    assert len(actual_events) == len(expected_events) > 8 and expected_events[-1]["loss"] < expected_events[0]["loss"]
    differences = {"losses": 0.0, "norms": 0.0, "weights": 0.0, "weights and state": 0.0}
    for one, other in zip(expected_events, actual_events):
        assert (one["event"], one["step"]) == (other["event"], other["step"])
        for what, key in (("losses", "loss"), ("norms", "norm")):
            if key in one:
                differences[what] = max(differences[what], abs(other[key] / one[key] - 1.0))
    for what, file in (("weights", "model/model.safetensors"), ("weights and state", "checkpoints/step-8/state.safetensors")):
        stored, others = read_float_tensors(alone / file), read_float_tensors(folder / file)
        assert stored.keys() == others.keys() and {dtype for dtype, _ in stored.values()} == {"F64"}
        for name, (_, values) in stored.items():
            # Differences count relative to the largest element of the tensor.
            largest = max(map(abs, values))
            spread = max(abs(one - other) for one, other in zip(values, others[name][1], strict=True))
            differences[what] = max(differences[what], spread / largest if largest else spread)
    print(f"f64, {parallelism}:", ", ".join(f"{what} {spread:.1e} apart" for what, spread in differences.items()))
    assert max(differences.values()) < 1e-9


def test_resumed_mixed_team_is_bitwise_equal(
    pair: tuple[Host, Host], here: RunOutput, tmp_path: Path
) -> None:
    alpha, _ = pair
    run = RunningRun(alpha, tmp_path / "run", f"{FAST_LINK_DEVICES[0]},ray:beta/{FAST_LINK_DEVICES[1]}", 8)
    run.wait_for_step(2)
    # Devices of this machine accept connections only on the ports of docs/ray.md, which a firewall allows.
    met = listening_ports(run.process.pid, alpha.ip)
    assert met & set(range(7400, 7420)) and met <= {7300, *range(7310, 7420)}, met
    run.stop()
    resumed = alpha.plimsoll("train", "--quiet", "--resume", str(run.folder))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    output = RunOutput(run.folder)
    assert [device["device"] for device in output.result["memory"]] == ["virtual:a", "beta/virtual:b"]
    assert output.model == here.model


def test_full_disk_while_saving_remote_devices_loses_nothing(
    pair: tuple[Host, Host], here: RunOutput, tmp_path: Path
) -> None:
    alpha, _ = pair
    small = tmp_path / "small"
    small.mkdir()
    # Room for the example and two checkpoints of 4 MiB, not for a third.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=21m", "tmpfs", small], check=True, timeout=10)
    try:
        tried = alpha.plimsoll(*train_arguments(small / "run", f"ray:alpha/{FAST_LINK_DEVICES[0]},ray:beta/{FAST_LINK_DEVICES[1]}", 8, "train.keep=9"))
        assert tried.returncode == 2 and "no space left on the disk for " in tried.stderr, tried.stdout + tried.stderr
        assert f"plimsoll train --resume {small / 'run'}" in tried.stderr, tried.stderr
        assert sorted(path.name for path in (small / "run" / "checkpoints").iterdir()) == ["step-3", "step-6"]
        subprocess.run(["mount", "-o", "remount,size=100m", small], check=True, timeout=10)
        resumed = alpha.plimsoll("train", "--quiet", "--resume", str(small / "run"))
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert RunOutput(small / "run").model == here.model
    finally:
        subprocess.run(["umount", "--lazy", small], check=True, timeout=10)


def test_reserved_memory_is_refused_to_a_second_run(
    pair: tuple[Host, Host], tmp_path: Path
) -> None:
    alpha, _ = pair
    # 60 % of the device's 300 MiB.
    share = "ray:beta/virtual:b=180MiB@0.3"
    # The run is long enough for a second one to start meanwhile. The pace does not change its results.
    plain = train(alpha, tmp_path / "plain", share.replace("@0.3", "@0.9"), STEPS)
    one = RunningRun(alpha, tmp_path / "one", share, STEPS)
    one.wait_for_step(1)
    two = alpha.plimsoll(*train_arguments(tmp_path / "two", share, STEPS))
    assert two.returncode == 3, two.stdout + two.stderr
    assert "beta/virtual:b: 180 MiB are requested, and 120 of its 300 MiB are free" in two.stderr
    # All commands name the owner of the other memory.
    owner = f"alpha:{one.folder}"
    assert f"hint: 180 MiB are reserved for {owner}\n" in two.stderr
    seen: Cluster = json.loads(alpha.plimsoll("cluster", "--json").stdout)
    (node,) = [node for node in seen["nodes"] if node["name"] == "beta/virtual:b"]
    assert node["free_bytes"] == 120 * MIB and [run["owner"] for run in node["runs"]] == [owner]
    assert node["reservations"] == [{"owner": owner, "resource": "vram_mib", "bytes": 180 * MIB}]
    assert one.output().model == plain.model


def test_worker_recovers_under_its_limit_without_affecting_neighbour(
    pair: tuple[Host, Host], tmp_path: Path
) -> None:
    alpha, beta = pair
    # On a CPU, all memory of the worker process counts, including the interpreter.
    # The limit is checked once a second, or more rarely on a busy machine, so the run must go on for some time.
    share, steps, more = "ray:beta/cpu=260MiB", 40, ("train.batch_tokens=6144", "train.save_every=0")
    plain = train(alpha, tmp_path / "plain", share, steps, *more)
    one = RunningRun(alpha, tmp_path / "one", share, steps, *more)
    one.wait_for_step(1)
    # The run cannot get more than its reservation, although the machine has more memory.
    asked = alpha.plimsoll("budget", str(one.folder), "1GiB")
    most = "load line 260.00 MiB, the most that beta/cpu may hold for this run (1.00 GiB was requested): "
    assert asked.stdout.startswith(most), asked
    pid = only_worker(beta)
    # The run is paused until there is a neighbour. On a fast machine it would otherwise have ended by then.
    one.process.send_signal(signal.SIGSTOP)
    other = RunningRun(alpha, tmp_path / "other", share, steps, *more)
    other.wait_for_step(1)
    # A lower limit on the process makes the run recover with less memory at once, and it cannot grow again.
    arena = largest_mapping_bytes(pid)
    limit = data_bytes(pid) + 4 * MIB
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    one.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + RUN_TIMEOUT_SECONDS
    while not [event for event in events(one.folder) if event["event"] == "recovery"]:
        one.check_running(deadline)
        # Threads of Ray that have ended meanwhile leave memory free, any amount of it. The limit follows until the run
        # has replaced its arena with a smaller one, about half as large.
        if (lower := data_bytes(pid) + 4 * MIB) < limit and largest_mapping_bytes(pid) > arena * 3 // 4:
            limit = lower
            resource.prlimit(pid, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        time.sleep(0.2)
    asked = alpha.plimsoll("budget", str(one.folder), "260MiB")
    assert ", the most that beta/cpu may hold for this run (260.00 MiB was requested): " in asked.stdout, asked
    output, neighbour = one.output(), other.output()
    recovery, *_ = [event for event in output.events if event["event"] == "recovery"]
    assert recovery["reason"].startswith("ulimit -d, the limit on data has ") and recovery["device"] == "beta/cpu"
    assert recovery["arena_bytes"] < recovery["arena_bytes_before"] and recovery["held_bytes"] < recovery["held_bytes_before"]
    for run in (output, neighbour):
        (memory,) = run.result["memory"]
        assert 0 < memory["measured_bytes"] <= memory["budget_bytes"] <= 260 * MIB
    assert output.losses == pytest.approx(plain.losses, rel=faults.LOSS_DIFFERENCE_MAX)
    assert neighbour.losses == plain.losses and neighbour.model == plain.model
    assert neighbour.result["recoveries"] == []


def data_bytes(pid: int) -> int:
    """Returns the size of a process's private writable memory."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024


def largest_mapping_bytes(pid: int) -> int:
    """Returns the size of the largest writable mapping of a process without a file: that of its arena, if it has one."""
    mappings = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    ranges = [words[0].split("-") for words in mappings if len(words) == 5 and "w" in words[1]]
    return max(int(end, 16) - int(start, 16) for start, end in ranges)


def only_worker(host: Host) -> int:
    """Returns the only worker process on a host, once workers of earlier runs have ended."""
    deadline = time.monotonic() + 30
    while True:
        pids = [pid for pid, words in processes(host) if words.startswith(b"ray::Worker")]
        if len(pids) == 1:
            return pids[0]
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)


def test_cluster_plan_reports_cost_of_links(pair: tuple[Host, Host]) -> None:
    alpha, _ = pair
    settings = ["--set", "run.parallelism=all", "--set", "run.threads=1"]
    planned = alpha.plimsoll("plan", "--devices", "ray", *settings, "--json")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    plan = json.loads(planned.stdout)
    assert [device["name"] for device in plan["devices"]] == ["alpha/virtual:a", "beta/virtual:b"]
    assert [device["budget_bytes"] for device in plan["devices"]] == [600 * MIB, 300 * MIB]
    assert plan["link_seconds"] > 0.0
    shown = alpha.plimsoll("plan", "--devices", "ray", *settings).stdout
    # tc limits the link to 125 MB/s.
    (line,) = [line for line in shown.splitlines() if "MB/s each way" in line]
    rate = float(line.partition("slowest link: ")[2].partition(" MB/s")[0])
    assert 1.0 < rate < 130.0, shown
    assert "(measured); links cost" in " ".join(shown.split())


def test_two_host_plan_that_fits_also_runs(pair: tuple[Host, Host], tmp_path: Path) -> None:
    def devices(*lines: int) -> str:
        return f"ray:alpha/virtual:a={lines[0]}MiB@0.4,ray:beta/virtual:b={lines[1]}MiB@0.2"

    def planned(*lines: int) -> dict[str, Any]:
        said = pair[0].plimsoll("plan", "--json", *train_arguments(tmp_path / "run", devices(*lines), 2, "run.parallelism=all")[2:])
        assert said.returncode == 0, said.stdout + said.stderr
        return json.loads(said.stdout)  # type: ignore[no-any-return]

    # Charges of a node differ by one rounding step between starts.
    lines = [device["peak_bytes"] // MIB + 5 for device in planned(280, 280)["devices"]]
    plan = planned(*lines)
    output = train(pair[0], tmp_path / "run", devices(*lines), 2, "run.parallelism=all")
    charges = [[device["charges_bytes"] for device in plan["devices"]] for plan in (plan, output.plan)]
    assert all(abs(one - other) <= 4 * MIB for one, other in zip(*charges, strict=True)), charges


@pytest.fixture(scope="session")
def undisturbed(shared_pair: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> RunOutput:
    """The output of a run without a fault, for comparison."""
    return train(shared_pair[0], tmp_path_factory.mktemp("runs") / "undisturbed", ",".join(FAST_LINK_DEVICES), STEPS)


def test_run_survives_killed_worker(pair: tuple[Host, Host], undisturbed: RunOutput, tmp_path: Path) -> None:
    check_survival("worker", pair, undisturbed, tmp_path)


@pytest.mark.disrupts_cluster
def test_run_survives_killed_raylet(
    pair: tuple[Host, Host], undisturbed: RunOutput, tmp_path: Path
) -> None:
    check_survival("raylet", pair, undisturbed, tmp_path)
    faults.repair("raylet", pair[1], BETA)


@pytest.mark.disrupts_cluster
def test_run_survives_unresponsive_host(pair: tuple[Host, Host], undisturbed: RunOutput, tmp_path: Path) -> None:
    check_survival("hang", pair, undisturbed, tmp_path)
    faults.repair("hang", pair[1], BETA)


@pytest.mark.disrupts_cluster
def test_returned_devices_join_the_team_again(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    # With many remaining steps, the run takes every returned device back, although that needs a checkpoint.
    run = RunningRun(alpha, tmp_path / "run", ",".join(f"ray:{host.name}/{word}" for host, word in zip(pair, SLOW_DEVICES)), 100_000)
    run.wait_for_step(3)
    faults.inject("worker", beta)
    lost = run.wait_for_event("device_lost")
    back = run.wait_for_event("device_returned", after=lost)
    # The worker was restarted. Now its node is lost and joins again.
    faults.inject("raylet", beta)
    lost = run.wait_for_event("device_lost", after=back)
    faults.repair("raylet", beta, BETA)
    # A worker outlives its raylet for a moment, and may return and be lost again meanwhile.
    settled = run.wait_until_settled("device_returned", 10)
    # The reservation of the other device was made together with the lost one.
    faults.inject("worker", alpha)
    lost = run.wait_for_event("device_lost", after=settled)
    run.wait_for_event("device_returned", after=lost)
    run.stop()
    said = [event for event in events(run.folder) if event["event"] in ("device_lost", "device_returned")]
    assert [event["device"] for event in said] == ["beta/virtual:b"] * (len(said) - 2) + ["alpha/virtual:a"] * 2
    # After its raylet has ended, a worker returns only a few times.
    assert 6 <= len(said) <= 12 and [event["event"] for event in said] == ["device_lost", "device_returned"] * (len(said) // 2)
    assert all(event["team"] == ["alpha/virtual:a", "beta/virtual:b"] for event in said if event["event"] == "device_returned")


@pytest.mark.disrupts_cluster
def test_runs_survive_or_resume_after_lost_head(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    # The remaining device does not complete the steps before the others have joined again.
    first, second = SLOW_DEVICES
    data_parallel = "run.parallelism=data"
    plain = train(beta, tmp_path / "plain", ",".join(SLOW_DEVICES), STEPS, data_parallel)
    of_the_cluster = RunningRun(beta, tmp_path / "cluster", f"ray:alpha/{first},ray:beta/{second}", STEPS, data_parallel, "train.save_every=0")
    with_its_own = RunningRun(beta, tmp_path / "own", f"{first},ray:alpha/{second}", STEPS, data_parallel)
    for run in (of_the_cluster, with_its_own):
        run.wait_for_step(3)
    faults.inject("head", alpha)
    # Joining again ends the workers of that machine, so the run has to save its checkpoint first.
    of_the_cluster.wait_for_event("checkpoint")
    # Raylets that still look for the old head do not prevent joining again.
    hosts.join_head(alpha)
    hosts.join(beta, BETA)
    of_the_cluster.wait_until_stopped()
    # The run saves the state of the remaining devices, which may be lost next.
    after = [event["event"] for event in events(of_the_cluster.folder) if event["event"] in ("device_lost", "checkpoint")]
    assert after[:2] == ["device_lost", "checkpoint"], after
    resumed = beta.plimsoll("train", "--quiet", "--resume", str(of_the_cluster.folder))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    faults.max_loss_difference(RunOutput(of_the_cluster.folder), plain, 3)
    went_on = with_its_own.output()
    assert [lost["device"] for lost in went_on.result["lost"]] == ["alpha/virtual:b"]
    faults.max_loss_difference(went_on, plain, 3)


@pytest.mark.disrupts_cluster
def test_run_losing_own_raylet_resumes_after_rejoin(
    pair: tuple[Host, Host], undisturbed: RunOutput, tmp_path: Path
) -> None:
    alpha, beta = pair
    # The run does not end before it notices the loss.
    run = RunningRun(beta, tmp_path / "cut", ",".join(f"ray:{host.name}/{word}" for host, word in zip(pair, SLOW_DEVICES)), STEPS)
    run.wait_for_step(3)
    faults.inject("own-raylet", beta)
    assert "to see the machines of the cluster and how they rejoin: plimsoll cluster\n" in run.wait_until_stopped()
    assert any(event["event"] == "device_lost" for event in events(run.folder))
    until = time.monotonic() + faults.FREED_TIMEOUT_SECONDS
    while any(words.startswith(b"ray::Worker") for host in pair for _, words in processes(host)):
        assert time.monotonic() < until, "the other machine still has a worker"
        time.sleep(0.1)
    # Only this machine joins again.
    hosts.join(beta, BETA)
    resumed = beta.plimsoll("train", "--quiet", "--resume", str(run.folder))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    # Another pace may divide the batch differently, and then sums have another order.
    faults.max_loss_difference(RunOutput(run.folder), undisturbed, 1)


def check_survival(kind: faults.Kind, pair: tuple[Host, Host], undisturbed: RunOutput, folder: Path) -> None:
    alpha, beta = pair
    run = RunningRun(alpha, folder / "lost", f"ray:alpha/{FAST_LINK_DEVICES[0]},ray:beta/{FAST_LINK_DEVICES[1]}", STEPS)
    run.wait_for_step(3)
    happened = time.time()
    faults.inject(kind, beta)
    print(faults.check_survival(kind, "beta", run.output(), undisturbed, happened))
