"""Runs over the hosts of a cluster: which devices a run file means, and that a run over two hosts ends with the bits of one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import plimsoll
from hosts import BETA, Host
from plimsoll.ray.cluster import Node
from plimsoll.ray.hosting import Asked, find
from runs import NEAR, Started, lost_beta, train, worker, workers

MIB = 1 << 20


def node(name: str, vram_mib: int | None = None, memory_mib: int = 1000) -> Node:
    return Node(
        name=name,
        id=name,
        ip="10.0.0.1",
        alive=True,
        model="card",
        simulated=False,
        cpus=1,
        gpus=0,
        vram_mib=vram_mib,
        memory_bytes=memory_mib * MIB,
        free_bytes=None,
        runs=[],
    )


#: A machine with two cards, one that gives its processor, and one that was not joined with `plimsoll join`.
THERE = [node("a/cuda:0", 20000), node("a/cuda:1", 6000), node("b/cpu"), node("10.0.0.9", 8000)]
FREE = {
    "a/cuda:0": {"vram_mib": 20000.0, "memory": 500.0 * MIB},
    "a/cuda:1": {"vram_mib": 1500.0, "memory": 1000.0 * MIB},
    "b/cpu": {"memory": 1000.0 * MIB},
    "10.0.0.9": {"vram_mib": 8000.0},
}


def found(*words: str, budget_bytes: int | None = None) -> list[Asked]:
    return find(list(words), budget_bytes, THERE, FREE)


def test_ray_is_every_node_with_what_is_free_of_it() -> None:
    every = found("ray")
    assert [one.name + one.rest for one in every] == [
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
    held = found("ray", budget_bytes=2000 * MIB)
    assert [one.rest for one in held] == ["=2000MiB", "=1500MiB", "=1000MiB", "=2000MiB"]


@pytest.mark.parametrize(
    ("word", "rest", "kept"),
    [
        ("ray:a/cuda:1", "=1500MiB", {"vram_mib": 1500}),
        ("a/cuda:1=1GiB", "=1024MiB", {"vram_mib": 1024}),
        ("ray:a/cuda:0=50%@10gbit", "=10000MiB@10gbit", {"vram_mib": 10000}),
        ("a/cuda:0@1gbit", "=20000MiB@1gbit", {"vram_mib": 20000}),
        ("ray:b/cpu", "=1000MiB", {"memory": 1000 * MIB}),
        ("ray:b/virtual:x=300MiB@0.3::10GB/s", "=300MiB@0.3::10GB/s", {"memory": 300 * MIB}),
    ],
)
def test_a_device_is_named_with_its_line_and_link_or_without(word: str, rest: str, kept: dict[str, float]) -> None:
    (one,) = found(word)
    assert (one.rest, one.bundle) == (rest, kept)


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("ray:c/cuda:0", plimsoll.InputError, "no node of the cluster is called c/cuda:0"),
        ("ray:a/cuda:2", plimsoll.InputError, "there is: a/cuda:0, a/cuda:1, b/cpu, 10.0.0.9/cuda:0"),
        ("b/virtual:x", plimsoll.InputError, "no node of the cluster is called b/virtual:x"),
        ("a/cuda:1=2GiB", plimsoll.DoesNotFit, "a/cuda:1: 2048 MiB would be kept, and 1500 MiB are free"),
        ("b/virtual:x=2GiB@0.3", plimsoll.DoesNotFit, "b/virtual:x: 2048 MiB would be kept, and 1000 MiB are free"),
        ("b/cpu=much", plimsoll.InputError, "`much` is no budget"),
    ],
)
def test_what_is_not_there_is_named(word: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        found(word)
    assert said in str(caught.value)


#: Enough for somebody to be lost in the middle.
STEPS = 60

# Over a real cluster, from here on.


def test_a_run_over_two_hosts_ends_with_the_bits_of_one(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, _ = pair
    here = train(alpha, tmp_path / "here", ",".join(NEAR), 8)
    there = train(alpha, tmp_path / "there", f"ray:alpha/{NEAR[0]},ray:beta/{NEAR[1]}", 8)
    recipes = [[(member["sequences"], member["recipe"]) for member in left.result["team"]] for left in (here, there)]
    assert recipes[0] == recipes[1]
    assert here.losses == there.losses and len(here.losses) >= 8
    assert here.model == there.model
    # Each host's line is held, as its own process has measured it.
    assert [device["device"] for device in there.result["memory"]] == ["alpha/virtual:a", "beta/virtual:b"]
    for device in there.result["memory"]:
        assert 0 < device["measured_bytes"] <= device["budget_bytes"] == 280 * MIB
        assert device["arena_measured_bytes"] == device["arena_bytes"]
    # The run is over, and so are its workers.
    patience = time.monotonic() + 30
    while (left_over := workers(alpha)) and time.monotonic() < patience:
        time.sleep(0.2)
    assert left_over == {}


def test_a_plan_over_the_cluster_says_what_its_links_cost(pair: tuple[Host, Host]) -> None:
    alpha, _ = pair
    settings = ["--set", "run.team=all", "--set", "run.threads=1"]
    planned = alpha.plimsoll("plan", "--devices", "ray", *settings, "--json")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    plan = json.loads(planned.stdout)
    assert [device["name"] for device in plan["devices"]] == ["alpha/virtual:a", "beta/virtual:b"]
    assert [device["budget_bytes"] for device in plan["devices"]] == [600 * MIB, 300 * MIB]
    assert plan["link_seconds"] > 0.0
    shown = alpha.plimsoll("plan", "--devices", "ray", *settings).stdout
    # tc lets 125 MB/s through.
    (line,) = [line for line in shown.splitlines() if "MB/s each way" in line]
    rate = float(line.partition("between them: ")[2].partition(" MB/s")[0])
    assert 1.0 < rate < 130.0, shown
    assert "(measured); links cost" in " ".join(shown.split())


def test_a_worker_that_is_killed_is_a_device_that_is_lost(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, _ = pair
    plain = train(alpha, tmp_path / "plain", ",".join(NEAR), STEPS)
    run = Started(alpha, tmp_path / "killed", f"ray:alpha/{NEAR[0]},ray:beta/{NEAR[1]}", STEPS)
    run.until_step(3)
    os.kill(worker(BETA), signal.SIGKILL)
    lost_beta(run.left(), plain)
