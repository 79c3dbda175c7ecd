"""Runs over the hosts of a cluster: which devices a run file means, and that a run over two hosts ends with the bits of one."""

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
from hosts import ALPHA, BETA, Host
from plimsoll.ray.cluster import Cluster
from plimsoll.ray.hosting import Asked, Hosting, find
from runs import NEAR, RUN_SECONDS, SETTINGS, Left, Started, events, listening, numbers, processes, train, words, workers
from shapes import MIB, node

#: A machine with two cards, one that gives its processor, and one that was not joined with `plimsoll join`.
THERE = [node("a/cuda:0", 20000), node("a/cuda:1", 6000), node("b/cpu"), node("10.0.0.9", 8000)]
FREE = {
    "a/cuda:0": {"vram_mib": 20000.0, "memory": 500.0 * MIB},
    "a/cuda:1": {"vram_mib": 1500.0, "memory": 1000.0 * MIB},
    "b/cpu": {"memory": 1000.0 * MIB},
    "10.0.0.9": {"vram_mib": 8000.0},
}


def found(*words: str, budget: str | None = None) -> list[Asked]:
    return find(list(words), budget, THERE, FREE)


def test_ray_is_every_node_with_what_is_free_of_it() -> None:
    every = found("ray")
    assert [one.word for one in every] == [
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
    held = found("ray", budget="2000MiB")
    assert [one.line for one in held] == ["2000MiB", "1500MiB", "1000MiB", "2000MiB"]
    half = found("ray", "ray:b/virtual:x=25%@0.2", budget="50%")
    assert [one.line for one in half] == ["10000MiB", "750MiB", "500MiB", "4000MiB", "250MiB"]
    assert half[-1].word == "b/virtual:x=250MiB@0.2"


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
def test_a_device_is_named_with_its_line_and_link_or_without(word: str, rest: str, kept: dict[str, float]) -> None:
    (one,) = found(word)
    assert (one.word, one.bundle) == (one.name + rest, kept)


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
def test_a_simulated_device_keeps_what_it_joined_with_unless_that_is_named(word: str, whole: str) -> None:
    (one,) = find([word], None, [node("c/virtual:a", 600)], {"c/virtual:a": {"vram_mib": 600.0}})
    one.joined_as = "virtual:a=600MiB@0.5:12GB/s:10gbit"
    assert one.word == f"c/virtual:a{whole}"


def test_a_device_that_is_one_of_all_is_not_named_beside_them() -> None:
    for words in (["ray", "ray:a/cuda:0=6GiB"], ["ray:b/cpu=400MiB", "ray"]):
        with pytest.raises(plimsoll.InputError, match="run.devices: (a/cuda:0|b/cpu) is named twice"):
            found(*words, budget="50%")


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("ray:c/cuda:0", plimsoll.InputError, "no node of the cluster is called c/cuda:0"),
        ("ray:a/cuda:2", plimsoll.InputError, "there is: a/cuda:0, a/cuda:1, b/cpu, 10.0.0.9/cuda:0"),
        ("ray:b/virtual:x", plimsoll.InputError, "no node of the cluster is called b/virtual:x"),
        ("ray:b/virtual:x@1gbit", plimsoll.InputError, "no node of the cluster is called b/virtual:x"),
        ("ray:a/cuda:0=6GiB@fast", plimsoll.InputError, "run.devices: device `a/cuda:0`: `fast` is no link"),
        ("a/cpu", plimsoll.InputError, "no node of the cluster is called a/cpu"),
        ("a/cuda:1=2GiB", plimsoll.DoesNotFit, "a/cuda:1: 2048 MiB are asked for, and 1500 of its 6000 MiB are free"),
        ("b/virtual:x=2GiB@0.3", plimsoll.DoesNotFit, "b/virtual:x: 2048 MiB are asked for, and 1000 of its 1000 MiB are free"),
        ("b/cpu=much", plimsoll.InputError, "`much` is no budget"),
    ],
)
def test_what_is_not_there_is_named(word: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        found(word)
    assert said in str(caught.value)


def test_more_than_a_node_joined_with_is_had_by_joining_again() -> None:
    for word, more in (("a/cuda:1=2GiB", False), ("a/cuda:1=7000MiB", True)):
        with pytest.raises(plimsoll.DoesNotFit) as caught:
            found(word)
        assert any(hint.startswith("its node joined with 6000 MiB; ") for hint in caught.value.hints) == more


def test_shares_of_one_device_that_are_too_much_together_are_refused() -> None:
    words = ["b/virtual:x=40%@0.2", "b/virtual:y=600MiB@0.2"]
    assert [one.bundle for one in found(*words)] == [{"memory": 400 * MIB}, {"memory": 600 * MIB}]
    for second in ("b/virtual:y=60%@0.2", "b/cpu=600MiB"):
        with pytest.raises(plimsoll.DoesNotFit, match="600 MiB are asked for, and 400 of its 1000 MiB are free"):
            found("b/virtual:x=60%@0.2", second)


#: Enough for somebody to be lost in the middle.
STEPS = 40


def test_who_is_gone_is_said_to_be_so_and_how_a_processor_is_named() -> None:
    there = [*THERE, node("d/cuda:0", 6000, alive=False, gone="it does not answer any more")]
    assert [one.name for one in find(["ray"], None, there, FREE)] == [one.name for one in found("ray")]
    with pytest.raises(plimsoll.InputError, match="run.devices: d/cuda:0 is gone"):
        find(["ray:d/cuda:0"], None, there, FREE)
    with pytest.raises(plimsoll.InputError, match="run.devices: d/virtual:x is gone"):
        find(["ray:d/virtual:x=300MiB@0.2"], None, there, FREE)
    with pytest.raises(plimsoll.InputError, match="needs a load line: ray:a/cpu=600MiB"):
        find(["ray:a/cpu"], None, there, FREE)
    with pytest.raises(plimsoll.InputError, match="called `my machine/cuda:0`, which no run can name\n  hint: a node's name is"):
        find(["ray"], None, [node("my machine/cuda:0", 6000)], FREE)


def test_of_several_nodes_of_a_host_that_with_the_most_memory_gives_its_processor() -> None:
    there = [node("a/cuda:0", 20000), node("a/cuda:1", 6000), node("a/cuda:2", 6000)]
    free = {name: {"vram_mib": 1000.0, "memory": memory * MIB} for name, memory in (("a/cuda:0", 200.0), ("a/cuda:1", 900.0), ("a/cuda:2", 300.0))}
    (asked,) = find(["a/cpu=800MiB"], None, there, free)
    assert (asked.node["name"], asked.bundle) == ("a/cuda:1", {"memory": 800 * MIB})


@pytest.mark.parametrize(("ended", "words"), [("ActorDiedError", []), ("OutOfMemoryError", ["too much"])])
def test_a_worker_that_is_gone_is_started_anew_whoever_has_ended_it(
    monkeypatch: pytest.MonkeyPatch, ended: str, words: list[str]
) -> None:
    import ray

    error = getattr(ray.exceptions, ended)(*words)
    hosting, gone, started = Hosting.__new__(Hosting), mock.MagicMock(), threading.Event()
    hosting.asked, hosting.workers = found("b/cpu"), {"b/cpu": gone}
    hosting.starting, hosting.one_at_a_time, hosting.over = set(), threading.Lock(), False
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=error))
    monkeypatch.setattr(hosting, "_start_anew", lambda one, before: started.set() if before is gone else None)
    with pytest.raises(type(error)):
        hosting.answer("b/cpu", False, b"")
    assert started.wait(10.0)


# Over a real cluster, from here on.


@pytest.fixture(scope="module")
def here(pair_of_all: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Left:
    """A run on one host."""
    return train(pair_of_all[0], tmp_path_factory.mktemp("runs") / "here", ",".join(NEAR), 8)


def test_a_run_over_two_hosts_ends_with_the_bits_of_one(pair: tuple[Host, Host], here: Left, tmp_path: Path) -> None:
    alpha, _ = pair
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
    # The run is over, and so are its workers; what they had is free for the next one, which does not have to wait.
    assert workers(alpha) == {}
    again = alpha.plimsoll(*words(tmp_path / "again", "ray", 1))
    assert again.returncode == 0, again.stderr
    lines = [device["budget_bytes"] for device in json.loads((tmp_path / "again" / "plan.json").read_text())["devices"]]
    assert lines == [600 * MIB, 300 * MIB]


def test_a_share_that_is_named_is_taken_even_if_it_is_the_usual_one(pair: tuple[Host, Host], tmp_path: Path) -> None:
    for share, line in (((), 600), (("memory.budget=90%",), 540), (("memory.budget=50%",), 300)):
        settings = [*SETTINGS, "run.devices=ray:alpha/virtual:a,host=1MiB", *share]
        planned = pair[0].plimsoll("plan", "--json", *(word for setting in settings for word in ("--set", setting)))
        assert planned.returncode == 0, planned.stderr
        assert [device["budget_bytes"] for device in json.loads(planned.stdout)["devices"]] == [line * MIB]


def test_one_device_that_cannot_hold_its_own_process_is_refused_and_nothing_is_put_elsewhere(
    pair: tuple[Host, Host], tmp_path: Path
) -> None:
    # Its interpreter with Ray takes more than that, whatever the run's own process would do with.
    for command in ("plan", "train"):
        settings = [*SETTINGS, f"run.dir={tmp_path / 'run'}", "run.devices=ray:beta/virtual:b=90MiB"]
        refused = pair[0].plimsoll(command, *(word for setting in settings for word in ("--set", setting)))
        assert refused.returncode == 3, refused.stdout + refused.stderr
        assert "does not fit: the smallest recipe holds " in refused.stderr and "fallback" not in refused.stdout, refused.stdout
    assert not (tmp_path / "run" / "run.toml").exists()


def test_a_worker_that_finds_no_rates_measures_them_under_its_line(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    known, aside = beta.tmp / "devices.json", tmp_path / "devices.json"
    known.rename(aside)
    held = 0
    try:
        run = Started(alpha, tmp_path / "run", "ray:beta/virtual:b=150MiB@0.3", 2)
        patience = time.monotonic() + RUN_SECONDS
        while run.process.poll() is None:
            assert time.monotonic() < patience
            for pid in [pid for pid, words in processes(beta) if words.startswith(b"ray::Worker")]:
                with contextlib.suppress(OSError):
                    said = Path(f"/proc/{pid}/status").read_text().splitlines()
                    held = max([held, *(int(line.split()[1]) << 10 for line in said if line.startswith("VmHWM:"))])
            time.sleep(0.02)
        left = run.left()
        # With so little it was measured for this run alone.
        assert not known.exists()
    finally:
        aside.rename(known)
    (memory,) = left.result["memory"]
    assert 0 < memory["measured_bytes"] <= memory["predicted_bytes"]
    # What measuring took is no part of what the run held, but under its line, too.
    assert memory["measured_bytes"] + 8 * MIB < held <= memory["budget_bytes"] == 150 * MIB


@pytest.fixture(scope="module")
def alone(pair_of_all: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one device, in f64."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train(pair_of_all[0], folder, NEAR[0], 8, "train.precision=f64")
    return folder


#: Load lines in MiB and the link with which a run is shared out in each way: only with the first is there room for the whole
#: model. What a worker is charged with beside that differs from machine to machine: so far down, or up, it is looked.
WAYS = {"batch": (280, 280, "1gbit"), "state": (154, 124, "10GB/s+10us"), "layers": (126, 126, "20MB/s+10us")}
LESS = (0, 1, -1, 2, -2, 4, -4, 6, -6, 8, -8)


@pytest.mark.parametrize("sharing", WAYS)
def test_a_run_over_two_hosts_is_that_of_one_device(pair: tuple[Host, Host], alone: Path, tmp_path: Path, sharing: str) -> None:
    of_alpha, of_beta, link = WAYS[sharing]
    for less in LESS:
        lines = f"{of_alpha - less}MiB", f"{of_beta - less}MiB"
        devices = f"ray:alpha/virtual:a={lines[0]}@0.4::{link},ray:beta/virtual:b={lines[1]}@0.2::{link}"
        folder = tmp_path / f"run{less}"
        trained = pair[0].plimsoll(*words(folder, devices, 8, "train.precision=f64"))
        assert trained.returncode in (0, 3), trained.stdout + trained.stderr
        if trained.returncode == 0 and Left(folder).result.get("sharing") == sharing:
            break
    left = Left(folder)
    assert left.result["sharing"] == sharing and all(member["sequences"] > 0 for member in left.result["team"])
    due = [event for event in events(alone) if event["event"] in ("step", "evaluation")]
    came = [event for event in left.events if event["event"] in ("step", "evaluation")]
    assert len(came) == len(due) > 8 and due[-1]["loss"] < due[0]["loss"]
    apart = {"losses": 0.0, "norms": 0.0, "weights": 0.0, "weights and state": 0.0}
    for one, other in zip(due, came):
        assert (one["event"], one["step"]) == (other["event"], other["step"])
        for what, key in (("losses", "loss"), ("norms", "norm")):
            if key in one:
                apart[what] = max(apart[what], abs(other[key] / one[key] - 1.0))
    for what, file in (("weights", "model/model.safetensors"), ("weights and state", "checkpoints/step-8/state.safetensors")):
        stored, others = numbers(alone / file), numbers(folder / file)
        assert stored.keys() == others.keys() and {dtype for dtype, _ in stored.values()} == {"F64"}
        for name, (_, values) in stored.items():
            # Near zero a number has fewer digits than the largest beside it.
            largest = max(map(abs, values))
            spread = max(abs(one - other) for one, other in zip(values, others[name][1], strict=True))
            apart[what] = max(apart[what], spread / largest if largest else spread)
    print(f"f64, {sharing}:", ", ".join(f"{what} {spread:.1e} apart" for what, spread in apart.items()))
    assert max(apart.values()) < 1e-9


def test_a_run_over_own_and_other_devices_that_is_resumed_ends_with_the_same_bits(
    pair: tuple[Host, Host], here: Left, tmp_path: Path
) -> None:
    alpha, _ = pair
    run = Started(alpha, tmp_path / "run", f"{NEAR[0]},ray:beta/{NEAR[1]}", 8)
    run.until_step(2)
    # Whoever is met is met on ports that a firewall was told of: docs/ray.md.
    met = listening(run.process.pid, alpha.ip)
    assert met & set(range(7400, 7420)) and met <= {7300, *range(7310, 7420)}, met
    run.stop()
    resumed = alpha.plimsoll("train", "--quiet", "--resume", str(run.folder))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    left = Left(run.folder)
    assert [device["device"] for device in left.result["memory"]] == ["virtual:a", "beta/virtual:b"]
    assert left.model == here.model


def test_a_disk_that_is_full_while_far_devices_are_saved_loses_nothing(
    pair: tuple[Host, Host], here: Left, tmp_path: Path
) -> None:
    alpha, _ = pair
    small = tmp_path / "small"
    small.mkdir()
    # Room for the example and two checkpoints of 4 MiB, not for a third.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=21m", "tmpfs", small], check=True, timeout=10)
    try:
        tried = alpha.plimsoll(*words(small / "run", f"ray:alpha/{NEAR[0]},ray:beta/{NEAR[1]}", 8, "train.keep=9"))
        assert tried.returncode == 2 and "no space left on the disk for " in tried.stderr, tried.stdout + tried.stderr
        assert f"plimsoll train --resume {small / 'run'}" in tried.stderr, tried.stderr
        assert sorted(path.name for path in (small / "run" / "checkpoints").iterdir()) == ["step-3", "step-6"]
        subprocess.run(["mount", "-o", "remount,size=100m", small], check=True, timeout=10)
        resumed = alpha.plimsoll("train", "--quiet", "--resume", str(small / "run"))
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert Left(small / "run").model == here.model
    finally:
        subprocess.run(["umount", "--lazy", small], check=True, timeout=10)


def test_a_device_is_not_given_twice_and_runs_beside_each_other_feel_nothing_of_it(
    pair: tuple[Host, Host], tmp_path: Path
) -> None:
    alpha, _ = pair
    # 60 % of the device's 300 MiB.
    share = "ray:beta/virtual:b=180MiB@0.3"
    # Long enough for the second to ask while it runs.
    # Its pace is no part of what it computes.
    plain = train(alpha, tmp_path / "plain", share.replace("@0.3", "@0.9"), STEPS)
    one = Started(alpha, tmp_path / "one", share, STEPS)
    one.until_step(1)
    two = alpha.plimsoll(*words(tmp_path / "two", share, STEPS))
    assert two.returncode == 3, two.stdout + two.stderr
    assert "beta/virtual:b: 180 MiB are asked for, and 120 of its 300 MiB are free" in two.stderr
    # Whose the rest is, is known everywhere.
    whose = f"alpha:{one.folder}"
    assert f"hint: 180 MiB are kept for {whose}\n" in two.stderr
    seen: Cluster = json.loads(alpha.plimsoll("cluster", "--json").stdout)
    (node,) = [node for node in seen["nodes"] if node["name"] == "beta/virtual:b"]
    assert node["free_bytes"] == 120 * MIB and [run["what"] for run in node["runs"]] == [whose]
    assert node["kept"] == [{"what": whose, "resource": "vram_mib", "bytes": 180 * MIB}]
    assert one.left().model == plain.model


def test_a_worker_that_would_pass_its_share_gives_way_and_its_neighbour_feels_nothing(
    pair: tuple[Host, Host], tmp_path: Path
) -> None:
    alpha, beta = pair
    # Of a processor every byte of the worker counts, the interpreter's, too.
    share, steps, more = "ray:beta/cpu=260MiB", 16, ("train.batch_tokens=6144", "train.save_every=0")
    plain = train(alpha, tmp_path / "plain", share, steps, *more)
    one = Started(alpha, tmp_path / "one", share, steps, *more)
    one.until_step(1)
    # It is not given more than its share, though the machine has more.
    asked = alpha.plimsoll("budget", str(one.folder), "1GiB")
    most = "load line 260.00 MiB, the most that beta/cpu may hold for this run (1.00 GiB was asked for): "
    assert asked.stdout.startswith(most), asked
    pid = only_worker(beta)
    # It waits until there is a neighbour: on a fast machine it would be at its end by then.
    one.process.send_signal(signal.SIGSTOP)
    other = Started(alpha, tmp_path / "other", share, steps, *more)
    other.until_step(1)
    # Where the system refuses it what it holds, it gives way at once, and cannot have it back.
    (held,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmData:")]
    resource.prlimit(pid, resource.RLIMIT_DATA, (int(held.split()[1]) * 1024 + 4 * MIB, resource.RLIM_INFINITY))
    one.process.send_signal(signal.SIGCONT)
    one.until("retreat")
    asked = alpha.plimsoll("budget", str(one.folder), "260MiB")
    assert ", the most that beta/cpu may hold for this run (260.00 MiB was asked for): " in asked.stdout, asked
    left, neighbour = one.left(), other.left()
    retreat, *_ = [event for event in left.events if event["event"] == "retreat"]
    assert retreat["why"].startswith("ulimit -d, the limit on data leaves ") and retreat["device"] == "beta/cpu"
    assert retreat["arena_bytes"] < retreat["arena_bytes_before"] and retreat["held_bytes"] < retreat["held_bytes_before"]
    for run in (left, neighbour):
        (memory,) = run.result["memory"]
        assert 0 < memory["measured_bytes"] <= memory["budget_bytes"] <= 260 * MIB
    assert left.losses == pytest.approx(plain.losses, rel=faults.SPREAD)
    assert neighbour.losses == plain.losses and neighbour.model == plain.model
    assert neighbour.result["retreats"] == []


def only_worker(host: Host) -> int:
    """The one process of a run on a host's device, once those of runs before have ended."""
    patience = time.monotonic() + 30
    while True:
        pids = [pid for pid, words in processes(host) if words.startswith(b"ray::Worker")]
        if len(pids) == 1:
            return pids[0]
        assert time.monotonic() < patience, pids
        time.sleep(0.1)


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


def test_what_a_plan_over_two_hosts_says_fits_runs(pair: tuple[Host, Host], tmp_path: Path) -> None:
    def devices(*lines: int) -> str:
        return f"ray:alpha/virtual:a={lines[0]}MiB@0.4,ray:beta/virtual:b={lines[1]}MiB@0.2"

    def planned(*lines: int) -> dict[str, Any]:
        said = pair[0].plimsoll("plan", "--json", *words(tmp_path / "run", devices(*lines), 2, "run.team=all")[2:])
        assert said.returncode == 0, said.stdout + said.stderr
        return json.loads(said.stdout)  # type: ignore[no-any-return]

    # A node's charges waver by a step of their rounding from start to start.
    lines = [device["peak_bytes"] // MIB + 5 for device in planned(280, 280)["devices"]]
    plan = planned(*lines)
    left = train(pair[0], tmp_path / "run", devices(*lines), 2, "run.team=all")
    charges = [[device["charges_bytes"] for device in plan["devices"]] for plan in (plan, left.plan)]
    assert all(abs(one - other) <= 4 * MIB for one, other in zip(*charges, strict=True)), charges


@pytest.fixture(scope="session")
def undisturbed(pair_of_all: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Left:
    """What runs that lose a device are compared with."""
    return train(pair_of_all[0], tmp_path_factory.mktemp("runs") / "undisturbed", ",".join(NEAR), STEPS)


def test_a_worker_that_is_killed_is_a_device_that_is_lost(pair: tuple[Host, Host], undisturbed: Left, tmp_path: Path) -> None:
    is_survived("worker", pair, undisturbed, tmp_path)


@pytest.mark.takes_apart
def test_a_run_goes_on_without_a_node_whose_raylet_is_killed(
    pair: tuple[Host, Host], undisturbed: Left, tmp_path: Path
) -> None:
    is_survived("raylet", pair, undisturbed, tmp_path)
    faults.mend("raylet", pair[1], BETA)


@pytest.mark.takes_apart
def test_a_run_goes_on_without_a_host_that_hangs(pair: tuple[Host, Host], undisturbed: Left, tmp_path: Path) -> None:
    is_survived("hang", pair, undisturbed, tmp_path)
    faults.mend("hang", pair[1], BETA)


@pytest.mark.takes_apart
def test_who_was_lost_and_is_there_again_is_taken_in(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    # More steps than will be done: each device is worth the way by a checkpoint, however often it was lost.
    run = Started(alpha, tmp_path / "run", f"ray:alpha/{NEAR[0]},ray:beta/{NEAR[1]}", 100_000)
    run.until_step(3)
    faults.happen("worker", beta)
    lost = run.until("lost")
    back = run.until("back", after=lost)
    # Ray has started another worker; now its node goes, and joins again.
    faults.happen("raylet", beta)
    lost = run.until("lost", after=back)
    faults.mend("raylet", beta, BETA)
    # A worker outlives its raylet for a moment, and may be taken in until it goes, too.
    settled = run.until_settled("back")
    # What is kept for the other was kept together with what is gone.
    faults.happen("worker", alpha)
    lost = run.until("lost", after=settled)
    run.until("back", after=lost)
    run.stop()
    said = [event for event in events(run.folder) if event["event"] in ("lost", "back")]
    assert [event["device"] for event in said] == ["beta/virtual:b"] * (len(said) - 2) + ["alpha/virtual:a"] * 2
    # A worker of a raylet that is gone is not taken in again and again.
    assert 6 <= len(said) <= 12 and [event["event"] for event in said] == ["lost", "back"] * (len(said) // 2)
    assert all(event["team"] == ["alpha/virtual:a", "beta/virtual:b"] for event in said if event["event"] == "back")


@pytest.mark.takes_apart
def test_a_head_that_is_lost_takes_no_run_with_it(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    # More than who is left does alone until the others have joined again.
    steps = 3 * STEPS
    plain = train(beta, tmp_path / "plain", ",".join(NEAR), steps)
    of_the_cluster = Started(beta, tmp_path / "cluster", f"ray:alpha/{NEAR[0]},ray:beta/{NEAR[1]}", steps, "train.save_every=0")
    with_its_own = Started(beta, tmp_path / "own", f"{NEAR[0]},ray:alpha/{NEAR[1]}", steps)
    for run in (of_the_cluster, with_its_own):
        run.until_step(3)
    faults.happen("head", alpha)
    # Who joins again ends what its machine holds: not before what is left of a run without checkpoints has been saved.
    of_the_cluster.until("checkpoint")
    # The words by which they joined; what still looks for the head that is gone is in nobody's way.
    hosts.join_head(alpha)
    hosts.join(beta, BETA)
    of_the_cluster.stopped()
    # Nothing was to be saved but what the devices hold that are left, and may be gone next.
    after = [event["event"] for event in events(of_the_cluster.folder) if event["event"] in ("lost", "checkpoint")]
    assert after[:2] == ["lost", "checkpoint"], after
    resumed = beta.plimsoll("train", "--quiet", "--resume", str(of_the_cluster.folder))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    faults.spread_of(Left(of_the_cluster.folder), plain, 3)
    went_on = with_its_own.left()
    assert [lost["device"] for lost in went_on.result["lost"]] == ["alpha/virtual:b"]
    faults.spread_of(went_on, plain, 3)


@pytest.mark.takes_apart
def test_a_run_that_loses_its_own_raylet_is_resumed_when_its_machine_has_joined_again(
    pair: tuple[Host, Host], undisturbed: Left, tmp_path: Path
) -> None:
    alpha, beta = pair
    # At a quarter of the pace: it is not done before it notices.
    slow = (word.replace("@0.4", "@0.1").replace("@0.2", "@0.05") for word in NEAR)
    run = Started(beta, tmp_path / "cut", ",".join(f"ray:{host.name}/{word}" for host, word in zip(pair, slow)), STEPS)
    run.until_step(3)
    faults.happen("own-raylet", beta)
    assert "is said by: plimsoll cluster\n" in run.stopped()
    assert any(event["event"] == "lost" for event in events(run.folder))
    until = time.monotonic() + faults.FREE_SECONDS
    while any(words.startswith(b"ray::Worker") for host in pair for _, words in processes(host)):
        assert time.monotonic() < until, "the other machine has not given back what it held"
        time.sleep(0.1)
    # This one takes part again with its words.
    hosts.join(beta, BETA)
    resumed = beta.plimsoll("train", "--quiet", "--resume", str(run.folder))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    # Other paces may share a batch out otherwise, and sums are taken in another order.
    faults.spread_of(Left(run.folder), undisturbed, 1)


def is_survived(kind: faults.Kind, pair: tuple[Host, Host], undisturbed: Left, folder: Path) -> None:
    alpha, beta = pair
    run = Started(alpha, folder / "lost", f"ray:alpha/{NEAR[0]},ray:beta/{NEAR[1]}", STEPS)
    run.until_step(3)
    happened = time.time()
    faults.happen(kind, beta)
    print(faults.survived(kind, "beta", run.left(), undisturbed, happened))
