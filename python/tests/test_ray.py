"""A cluster of two hosts with a gigabit link between them: joined, looked at, tried, cut, and left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

import faults
import hosts
from hosts import ALPHA, BETA, TOKEN, Host, join
from plimsoll.ray import ours
from plimsoll.ray.cluster import Cluster
from plimsoll.ray.verifying import Report
from runs import NEAR, Left, Started, listening, processes, train, workers

MIB = 1 << 20
#: The health checks add up to 9 s; another machine may be busy.
NOTICED_SECONDS = 30.0
#: Less than what they wait for a node that is slow.
SLOW_SECONDS = 4.0
#: The same of 30 s without a head, and the 20 s in which it is looked for.
GIVEN_UP_SECONDS = 120.0

pytest.importorskip("ray", reason="no Ray: pip install 'plimsoll-train[ray]'")
refused = hosts.refusal()
pytestmark = pytest.mark.skipif(refused is not None, reason=str(refused))


def look(host: Host) -> Cluster:
    said = host.plimsoll("cluster", "--json")
    assert said.returncode == 0, said.stderr
    return cast(Cluster, json.loads(said.stdout))


def look_at_all(host: Host) -> Cluster:
    """The same once all nodes have answered: a busy machine takes its time to start a process on each."""
    until = time.monotonic() + GIVEN_UP_SECONDS
    while True:
        seen = look(host)
        if time.monotonic() > until or all(node["free_bytes"] is not None for node in seen["nodes"] if node["alive"]):
            return seen


def test_both_hosts_are_seen_from_both_with_what_they_have_free(pair: tuple[Host, Host]) -> None:
    for host in pair:
        nodes = look_at_all(host)["nodes"]
        assert [(node["name"], node["ip"], node["alive"]) for node in nodes] == [
            ("alpha/virtual:a", "10.77.0.1", True),
            ("beta/virtual:b", "10.77.0.2", True),
        ]
        assert all(node["simulated"] for node in nodes)
        assert [(node["vram_mib"], node["free_bytes"]) for node in nodes] == [(600, 600 * MIB), (300, 300 * MIB)]
    shown = pair[1].plimsoll("cluster").stdout
    assert "alpha/virtual:a (simulated)" in shown and "beta/virtual:b (simulated)" in shown


def test_who_is_part_of_a_cluster_does_not_join_again(pair: tuple[Host, Host]) -> None:
    again = pair[1].plimsoll("join", "10.77.0.1", "--token", TOKEN)
    assert again.returncode == 2
    assert again.stderr.startswith("error: this machine is part of 10.77.0.1:7300 already\n")


CONNECTS = """
import ray, sys
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)
print("inside", len(ray.nodes()))
"""


def test_nothing_answers_without_the_token(pair: tuple[Host, Host]) -> None:
    alpha, _ = pair

    def tries(**env: str) -> subprocess.Popen[str]:
        return alpha.start(sys.executable, "-c", CONNECTS, "10.77.0.1:7300", "10.77.0.1", env={f"RAY_AUTH_{key}": env[key] for key in env})

    # Who is refused tries for 20 s.
    refused = [tries(MODE="disabled"), tries(MODE="token", TOKEN="another")]
    let_in = tries(MODE="token", TOKEN=TOKEN)
    for tried, inside in [*((tried, False) for tried in refused), (let_in, True)]:
        said, _ = tried.communicate(timeout=GIVEN_UP_SECONDS)
        assert (tried.returncode == 0, "inside 2" in said) == (inside, inside), said
        assert inside or "Authentication" in said, said


#: What anybody could ask: who belongs to the cluster, what a node holds, to prepare something for a program.
CALLS = "ray.rpc.NodeInfoGcsService/GetAllNodeInfo", "ray.rpc.NodeManagerService/GetNodeStats"
PLAIN = "", "get_or_create_runtime_env", "metrics"


def test_no_port_of_either_host_answers_without_the_token(pair: tuple[Host, Host]) -> None:
    alpha, _ = pair
    empty = alpha.tmp / "empty"
    # A message of gRPC's without anything in it.
    empty.write_bytes(bytes(5))

    def curl(*words: str) -> str:
        """The heads, and trailers, of an answer."""
        said, _ = alpha.start("curl", "-s", "-m", "10", "-o", "/dev/null", "-D", "-", *words).communicate(timeout=30)
        return said

    def called(place: str, call: str, *more: str) -> str:
        of_grpc = ("-H", "content-type: application/grpc", "-H", "te: trailers", "--http2-prior-knowledge")
        return curl(*of_grpc, *more, "--data-binary", f"@{empty}", f"http://{place}/{call}")

    places = [
        f"{host.ip}:{port}" for host in pair for port in sorted(listening(next(processes(host))[0], host.ip)) if port < 10_000
    ]
    assert {"10.77.0.1:7300", "10.77.0.1:7310", "10.77.0.1:7312", "10.77.0.2:7310", "10.77.0.2:7312"} <= set(places), places
    for place in places:
        for call in CALLS:
            assert "grpc-status: 0" not in called(place, call), (place, call)
        for page in PLAIN:
            for words in ((), ("-X", "POST")):
                said = curl(*words, f"http://{place}/{page}")
                assert not said or " 401 " in said.partition("\n")[0], (place, page, said)
    # The questions are right: who has the token is answered, and who has none is told so.
    token = ("-H", f"authorization: Bearer {TOKEN}")
    for place, call in (("10.77.0.1:7300", CALLS[0]), ("10.77.0.2:7310", CALLS[1])):
        assert "grpc-status: 0" in called(place, call, *token), place
        assert "grpc-status: 16" in called(place, call), place


def test_a_host_with_another_token_is_refused(pair: tuple[Host, Host]) -> None:
    alpha, beta = pair
    aside = Host("gamma", beta.ip, beta.namespace, beta.switch, beta.port, beta.state.with_name("aside"), beta.tmp)
    tried = aside.plimsoll("join", "10.77.0.1", "--token", "wrong", "--devices", BETA, "--ports", "7300")
    assert tried.returncode == 2
    assert tried.stderr.startswith("error: 10.77.0.1:7300 refuses the token\n"), tried.stderr
    assert not list(aside.state.glob("joined.json")) and not (aside.state / "token").exists()
    assert [node["name"] for node in look(alpha)["nodes"]] == ["alpha/virtual:a", "beta/virtual:b"]


OTHER_PYTHON = """
import collections, sys
version = collections.namedtuple("version", "major minor micro releaselevel serial")
sys.version_info = version(*sys.version_info[:2], 99, "final", 0)
"""


def test_a_host_with_another_python_is_refused_and_told_which(pair: tuple[Host, Host], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_PYTHON)
    alpha, beta = pair
    env = {**beta.env, "PYTHONPATH": str(tmp_path)}
    aside = Host("gamma", beta.ip, beta.namespace, beta.switch, beta.port, beta.state.with_name("aside"), beta.tmp, env)
    tried = aside.plimsoll("join", "10.77.0.1:7300", "--token", TOKEN, "--devices", BETA, "--ports", "7600")
    assert tried.returncode == 2
    own, said = ".".join(map(str, sys.version_info[:3])), tried.stderr
    assert f" and Python {own}, and this machine Ray 2.60." in said and f" and Python {own.rpartition('.')[0]}.99\n" in said, said
    assert not list(aside.state.glob("joined.json"))
    assert [node["name"] for node in look(alpha)["nodes"]] == ["alpha/virtual:a", "beta/virtual:b"]


def test_every_device_and_link_is_tried(pair: tuple[Host, Host]) -> None:
    tried = pair[0].plimsoll("verify", "--json", "--seconds", "0.5", "--share", "50%")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    report: Report = json.loads(tried.stdout)
    held = [(device["name"], device["asked_bytes"], device["held_bytes"]) for device in report["devices"]]
    assert held == [("alpha/virtual:a", 300 * MIB, 300 * MIB), ("beta/virtual:b", 150 * MIB, 150 * MIB)]
    for device in report["devices"]:
        assert device["refused_beyond"] and device["simulated"] and device["verdict"] == "ok"
        assert device["tflops"] and device["tflops"] > 0
    assert {(link["source"], link["target"]) for link in report["links"]} == {
        ("alpha/virtual:a", "beta/virtual:b"),
        ("beta/virtual:b", "alpha/virtual:a"),
    }
    for link in report["links"]:
        # What tc lets through is 0.125 GB/s, and a bucket of 256 KiB at once.
        rate, late = link["gigabytes_per_second"], link["latency_seconds"]
        assert rate and 0.0 < rate < 0.135 and late and late > 0.0
    assert not any("differs" in warning for warning in report["warnings"])


def test_a_device_that_a_run_keeps_is_busy_and_the_others_are_tried(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, _ = pair
    run = Started(alpha, tmp_path / "run", "ray:beta/virtual:b=300MiB@0.2", 100_000)
    run.until_step(1)
    began = time.monotonic()
    tried = alpha.plimsoll("verify", "--json", "--seconds", "0.2")
    # Whoever waits for the device itself gives up after a minute.
    assert time.monotonic() - began < 40.0
    assert tried.returncode == 2, tried.stdout + tried.stderr
    report: Report = json.loads(tried.stdout)
    verdicts = {device["name"]: device["verdict"] for device in report["devices"]}
    busy = f"busy: 0 B of 300.00 MiB are free, the rest is kept for alpha:{run.folder}"
    assert verdicts == {"alpha/virtual:a": "ok", "beta/virtual:b": busy}
    run.stop()


def test_a_node_that_is_slow_to_answer_is_not_missed(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    steps, devices = 30, f"ray:alpha/{NEAR[0]},ray:beta/{NEAR[1]}"
    plain = train(alpha, tmp_path / "plain", devices, steps)
    run = Started(alpha, tmp_path / "slow", devices, steps)
    run.until_step(3)
    began = time.time()
    faults.signal_all(beta, signal.SIGSTOP)
    try:
        time.sleep(SLOW_SECONDS)
    finally:
        faults.signal_all(beta, signal.SIGCONT)
    left = run.left()
    # It waited for it, and nothing else came of that.
    times = [event["time"] for event in left.events if event["event"] == "step"]
    assert any(then - before > 0.8 * SLOW_SECONDS and then > began for before, then in zip(times, times[1:])), times
    assert left.result["steps"] == steps and left.losses == plain.losses
    assert not [event for event in left.events if event["event"] in ("lost", "back")]
    assert [node["name"] for node in look(alpha)["nodes"] if node["alive"]] == ["alpha/virtual:a", "beta/virtual:b"]


WATCHES = """
import time
from plimsoll.ray import cluster
with cluster.connected():
    print("watching", flush=True)
    while True:
        for node in cluster.nodes():
            if "gone" in node:
                print("gone", node["name"], flush=True)
                raise SystemExit
        time.sleep(0.1)
"""


@pytest.mark.takes_apart
def test_a_pulled_cable_is_noticed_and_a_run_goes_on_without_who_is_cut_off(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    plain = train(alpha, tmp_path / "plain", ",".join(NEAR), 30)
    watcher = alpha.start(sys.executable, "-c", WATCHES)
    assert watcher.stdout and watcher.stdout.readline() == "watching\n"
    run = Started(alpha, tmp_path / "cut", f"ray:alpha/{NEAR[0]},ray:beta/{NEAR[1]}", 30)
    run.until_step(3)
    pulled, happened = time.monotonic(), time.time()
    faults.happen("cable", beta)
    said = next(line for line in watcher.stdout if line.startswith("gone"))
    noticed = time.monotonic() - pulled
    print(f"a pulled cable was noticed after {noticed:.1f} s")
    assert said == "gone beta/virtual:b\n"
    assert noticed < NOTICED_SECONDS
    print(faults.survived("cable", "beta", run.left(), plain, happened))
    tried = alpha.plimsoll("verify", "--json", "--seconds", "0.2")
    report: Report = json.loads(tried.stdout)
    assert [device["name"] for device in report["devices"]] == ["alpha/virtual:a"]
    assert report["warnings"][0].startswith("beta/virtual:b is missing: ")
    # Whoever asks for all there is, is told who is not among them; who asks for that one, that it is gone.
    rest = train(alpha, tmp_path / "rest", "ray", 2)
    warned = [event["message"] for event in rest.events if event["event"] == "warning"]
    assert any(message.startswith("beta/virtual:b of the cluster is gone, ") for message in warned), warned
    named = alpha.plimsoll("plan", "--devices", "ray:beta/virtual:b")
    assert named.returncode == 2 and "run.devices: beta/virtual:b is gone\n" in named.stderr, named.stderr
    # The other side does not wait for ever, either, and gives back by itself what it held.
    cut = beta.plimsoll("cluster")
    assert cut.returncode == 2 and cut.stderr.startswith("error: nobody answers at 10.77.0.1:7300"), cut.stderr
    (raylet,) = json.loads((beta.state / "joined.json").read_text())["raylets"]
    while ours.serves(ours.Raylet(**raylet)):
        assert time.monotonic() - pulled < GIVEN_UP_SECONDS
        time.sleep(0.5)
    print(f"a raylet without a head ended after {time.monotonic() - pulled:.1f} s")
    beta.plug_in()
    # Another token is refused, and it has still the one that it joined with.
    mistyped = beta.plimsoll("join", "10.77.0.1", "--name", "beta", "--token", "wrong", "--devices", BETA)
    assert mistyped.returncode == 2 and "refuses the token" in mistyped.stderr, mistyped.stderr
    again = beta.plimsoll("join", "10.77.0.1", "--name", "beta", "--devices", BETA)
    assert again.returncode == 0, again.stderr
    assert [(node["name"], node["alive"]) for node in look(alpha)["nodes"]] == [("alpha/virtual:a", True), ("beta/virtual:b", True)]


@pytest.mark.takes_apart
def test_one_of_several_raylets_of_a_machine_that_has_ended_is_started_again(pair: tuple[Host, Host]) -> None:
    alpha, beta = pair
    both = "virtual:b=200MiB@0.2,virtual:c=100MiB@0.1"
    assert beta.plimsoll("leave").returncode == 0
    join(beta, both)
    kept, ended = (ours.Raylet(**raylet) for raylet in json.loads((beta.state / "joined.json").read_text())["raylets"])
    for pid in ours.members(ended):
        os.kill(pid, signal.SIGKILL)
    patience = time.monotonic() + NOTICED_SECONDS
    while all(node["alive"] for node in look(alpha)["nodes"]):
        assert time.monotonic() < patience
    words = f"plimsoll join 10.77.0.1 --name beta --devices {both}"
    seen = beta.plimsoll("cluster")
    assert f"beta/virtual:c has ended; it takes part again with: {words}\n" in seen.stderr, seen.stdout + seen.stderr
    assert "is said on its machine by: plimsoll cluster" in seen.stdout
    other = beta.plimsoll("join", "10.77.0.1", "--name", "beta", "--devices", BETA)
    assert other.returncode == 2 and f"beta/virtual:c takes part again with: {words}\n" in other.stderr, other.stderr
    again = beta.plimsoll(*words.split()[1:])
    assert again.returncode == 0, again.stderr
    assert [node["name"] for node in look(alpha)["nodes"] if node["alive"]] == ["alpha/virtual:a", "beta/virtual:b", "beta/virtual:c"]
    assert ours.serves(kept), "what had not ended is what it was"
    assert beta.plimsoll("leave").returncode == 0
    assert ours.members(kept) == []
    join(beta)


@pytest.mark.takes_apart
def test_leaving_stops_ours_and_no_other_ray(pair: tuple[Host, Host]) -> None:
    alpha, beta = pair
    ray = Path(sys.executable).parent / "ray"
    env = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    words = ["start", "--head", "--block", "--port=6380", "--num-cpus=1", "--include-dashboard=false"]
    foreign = beta.start(ray, *words, f"--temp-dir={beta.tmp}/r", f"--node-ip-address={beta.ip}", env=env)
    assert foreign.stdout
    assert any("Ray runtime started" in line for line in foreign.stdout)
    left = beta.plimsoll("leave")
    assert left.returncode == 0 and left.stdout.startswith("left 10.77.0.1:7300; processes ended: "), left.stderr
    assert foreign.poll() is None
    tried = beta.run(sys.executable, "-c", CONNECTS, f"{beta.ip}:6380", beta.ip, env=env)
    assert "inside 1" in tried.stdout, tried.stderr
    assert beta.plimsoll("leave").stdout == "this machine is part of no cluster\n"
    # Who has left is not missed, as soon as the head knows.
    patience = time.monotonic() + NOTICED_SECONDS
    while (left_over := look(alpha)["nodes"][1:]) and time.monotonic() < patience:
        time.sleep(0.5)
    assert left_over == []
    assert not any(b"beta/virtual:b" in words for _, words in processes(beta))
    # It joins again, under a name of its own.
    beta.end_started()
    refused = beta.plimsoll("join", alpha.ip, "--name", "alpha", "--token", TOKEN, "--devices", ALPHA)
    assert refused.returncode == 2 and "alpha is the name of 10.77.0.1 already" in refused.stderr, refused.stderr
    joined = beta.plimsoll("join", alpha.ip, "--name", "beta", "--token", TOKEN, "--devices", BETA, "--json")
    assert joined.returncode == 0, joined.stderr
    said = json.loads(joined.stdout)
    (node,) = said.pop("nodes")
    assert said == {"address": "10.77.0.1:7300", "ip": beta.ip, "head": False, "ports": 7300}
    assert (node["name"], node["simulated"], node["budget_bytes"]) == ("beta/virtual:b", True, 300 * MIB)


#: The folder of the stand-in for NVIDIA's libraries (crates/plimsoll-device/tests/cuda_stand_in/build FOLDER).
STAND_IN = os.environ.get("PLIMSOLL_STAND_IN")


@pytest.mark.skipif(STAND_IN is None, reason="PLIMSOLL_STAND_IN names no stand-in for a GPU")
def test_each_gpu_is_a_node_that_sees_no_other_and_a_run_over_them_is_that_of_one_process(tmp_path: Path) -> None:
    with hosts.network(["gamma"]) as (gamma,):
        gamma.env = {
            "LD_LIBRARY_PATH": f"{STAND_IN}:{STAND_IN}/nccl",
            "PLIMSOLL_STAND_IN_MEMORY": "8GiB,2GiB",
            "PLIMSOLL_STAND_IN_NCCL_STALLS": str(tmp_path / "stalls"),
            "PLIMSOLL_CACHE": str(tmp_path),
        }
        hosts.know_rates(tmp_path)
        joined = gamma.plimsoll("join", "--head", "--name", "gamma")
        assert joined.returncode == 0, joined.stderr
        large, small = look_at_all(gamma)["nodes"]
        assert (large["name"], small["name"]) == ("gamma/cuda:0", "gamma/cuda:1")
        assert (large["gpus"], small["gpus"]) == (1, 1)
        # 90 % of what is free, in MiB.
        assert (large["vram_mib"], small["vram_mib"]) == (7372, 1843)
        assert (large["free_bytes"], small["free_bytes"]) == (7372 * MIB, 1843 * MIB)
        tried = gamma.plimsoll("verify", "--json", "--share", "80%", "--seconds", "0.2")
        assert tried.returncode == 0, tried.stdout + tried.stderr
        report: Report = json.loads(tried.stdout)
        held = [(device["asked_bytes"] // MIB, device["refused_beyond"]) for device in report["devices"]]
        assert held == [(5896, True), (1474, True)]
        assert all(device["held_bytes"] == device["asked_bytes"] for device in report["devices"])
        tiny, runs = tiny_run(tmp_path), dict[str, Left]()

        def words(name: str, named: str, *more: str) -> list[str]:
            settings = [*tiny, f"run.dir={tmp_path / name}", f"run.devices={named}", *more]
            return ["train", str(tmp_path / "run.toml"), "--quiet", *(word for one in settings for word in ("--set", one))]

        for name, named in (("here", "cuda:0,cuda:1"), ("there", "ray")):
            trained = gamma.plimsoll(*words(name, named))
            assert trained.returncode == 0, trained.stdout + trained.stderr
            runs[name] = Left(tmp_path / name)
        here, there = runs["here"], runs["there"]
        assert [member["device"] for member in there.result["team"]] == ["gamma/cuda:0", "gamma/cuda:1"]
        assert all(member["sequences"] > 0 for member in there.result["team"])
        # Links are others, and so may be what is kept on the host, where the last bits of an update differ.
        assert here.losses == pytest.approx(there.losses, rel=1e-5) and len(there.losses) >= 4
        for device, line in zip(there.result["memory"], (7372, 1843)):
            assert device["arena_measured_bytes"] == device["arena_bytes"]
            assert 0 < device["measured_bytes"] <= device["predicted_bytes"] <= device["budget_bytes"] == line * MIB
        assert [member["collectives"] for left in (here, there) for member in left.result["team"]] == 4 * [{"by": "nccl"}]
        # A worker is killed in an exchange: the other does not wait for it on its GPU for ever, and goes on by itself.
        (tmp_path / "stalls").write_text("40")
        run = gamma.start(hosts.COMMAND, *words("killed", "ray", "train.steps=20"))
        stalled(tmp_path / "killed", run)
        os.kill(workers(gamma)["gamma/cuda:1"], signal.SIGKILL)
        said, _ = run.communicate(timeout=120)
        assert run.returncode == 0, said
        killed = Left(tmp_path / "killed")
        assert [lost["device"] for lost in killed.result["lost"]] == ["gamma/cuda:1"]
        assert killed.result["steps"] == 20 and not (tmp_path / "stalls").exists()


def stalled(folder: Path, run: subprocess.Popen[str]) -> None:
    """Waits until a run that is under way has done steps, and none for some seconds."""
    patience, count, since = time.monotonic() + 120, 0, time.monotonic()
    while time.monotonic() < patience and run.poll() is None:
        path = folder / "events.jsonl"
        now = path.read_text().count('"event":"step"') if path.exists() else 0
        if now != count:
            count, since = now, time.monotonic()
        if count > 0 and time.monotonic() - since > 4:
            return
        time.sleep(0.2)
    raise AssertionError("it does not stand still")


def test_a_worker_holds_what_is_predicted_whatever_it_saves(pair: tuple[Host, Host], tmp_path: Path) -> None:
    # Three checkpoints and the model, pieces of which each once stayed in the worker.
    wide = tiny_run(tmp_path, hidden=512, layers=4)
    settings = [*wide, "train.steps=6", "train.save_every=2", f"run.dir={tmp_path / 'run'}", "run.devices=ray:beta/virtual:b"]
    trained = pair[0].plimsoll("train", str(tmp_path / "run.toml"), "--quiet", *(word for one in settings for word in ("--set", one)))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    left = Left(tmp_path / "run")
    assert [event["step"] for event in left.events if event["event"] == "checkpoint"] == [2, 4, 6]
    assert len(left.model) > 20 * MIB
    (memory,) = left.result["memory"]
    assert 0 < memory["measured_bytes"] <= memory["predicted_bytes"], memory


def tiny_run(folder: Path, hidden: int = 32, layers: int = 2) -> list[str]:
    """Settings of a run that two stand-ins are done with in seconds; its model and its samples are written into the folder."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 3 * hidden // 2,
        "vocab_size": 97,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(shape))
    rows = [{"input_ids": [(7 * row + 3 * place * place) % 94 + 3 for place in range(17)]} for row in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Without any run file the built-in example is trained.
    (folder / "run.toml").write_text("")
    model = [f"model.path={folder / 'shape'}", "model.init=random"]
    data = [f"data.train={folder / 'data.jsonl'}", "data.format=tokens", "data.sequence=16", "data.pack=false"]
    return [*model, *data, "train.batch_tokens=64", "train.steps=4", "train.precision=f32", "run.team=all", "run.threads=1"]
