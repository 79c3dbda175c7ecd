"""A cluster of two hosts with a gigabit link between them: join, list, verify, network failures and leave."""

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
from plimsoll.ray import local_state
from plimsoll.ray.cluster import Cluster
from plimsoll.ray.verification import Report
from runs import FAST_LINK_DEVICES, RunOutput, RunningRun, listening_ports, processes, train, worker_pids

MIB = 1 << 20
#: Seconds until a lost node is noticed. The health checks take 9 s; a busy machine takes longer.
NOTICED_SECONDS = 30.0
#: Pause of a node that is too short for the health checks to notice.
SLOW_SECONDS = 4.0
#: Seconds until a raylet without a head ends: 30 s without contact, 20 s of search for the head, and time for a busy machine.
GIVEN_UP_SECONDS = 120.0

pytest.importorskip("ray", reason="no Ray: pip install 'plimsoll-train[ray]'")
missing = hosts.missing_requirement()
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


def query_cluster(host: Host) -> Cluster:
    said = host.plimsoll("cluster", "--json")
    assert said.returncode == 0, said.stderr
    return cast(Cluster, json.loads(said.stdout))


def query_complete_cluster(host: Host) -> Cluster:
    """Queries the cluster until all nodes have answered. A busy machine needs some time to start a process on each node."""
    until = time.monotonic() + GIVEN_UP_SECONDS
    while True:
        seen = query_cluster(host)
        if time.monotonic() > until or all(node["free_bytes"] is not None for node in seen["nodes"] if node["alive"]):
            return seen


def test_both_hosts_list_all_nodes_and_free_memory(pair: tuple[Host, Host]) -> None:
    for host in pair:
        nodes = query_complete_cluster(host)["nodes"]
        assert [(node["name"], node["ip"], node["alive"]) for node in nodes] == [
            ("alpha/virtual:a", "10.77.0.1", True),
            ("beta/virtual:b", "10.77.0.2", True),
        ]
        assert all(node["simulated"] for node in nodes)
        assert [(node["vram_mib"], node["free_bytes"]) for node in nodes] == [(600, 600 * MIB), (300, 300 * MIB)]
    shown = pair[1].plimsoll("cluster").stdout
    assert "alpha/virtual:a (simulated)" in shown and "beta/virtual:b (simulated)" in shown


def test_second_join_of_member_is_refused(pair: tuple[Host, Host]) -> None:
    again = pair[1].plimsoll("join", "10.77.0.1", "--token", TOKEN)
    assert again.returncode == 2
    assert again.stderr.startswith("error: this machine has already joined 10.77.0.1:7300\n")


CONNECT_CODE = """
import ray, sys
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)
print("inside", len(ray.nodes()))
"""


def test_ray_client_is_refused_without_token(pair: tuple[Host, Host]) -> None:
    alpha, _ = pair

    def connect(**env: str) -> subprocess.Popen[str]:
        return alpha.start(sys.executable, "-c", CONNECT_CODE, "10.77.0.1:7300", "10.77.0.1", env={f"RAY_AUTH_{key}": env[key] for key in env})

    # A refused client retries for 20 s.
    refused = [connect(MODE="disabled"), connect(MODE="token", TOKEN="another")]
    accepted = connect(MODE="token", TOKEN=TOKEN)
    for tried, inside in [*((tried, False) for tried in refused), (accepted, True)]:
        said, _ = tried.communicate(timeout=GIVEN_UP_SECONDS)
        assert (tried.returncode == 0, "inside 2" in said) == (inside, inside), said
        assert inside or "Authentication" in said, said


#: Requests of an attacker: gRPC calls for the nodes and for the memory of a node, and HTTP pages of an agent.
CALLS = "ray.rpc.NodeInfoGcsService/GetAllNodeInfo", "ray.rpc.NodeManagerService/GetNodeStats"
PLAIN = "", "get_or_create_runtime_env", "metrics"


def test_no_port_answers_without_token(pair: tuple[Host, Host]) -> None:
    alpha, _ = pair
    empty = alpha.tmp / "empty"
    # An empty gRPC message.
    empty.write_bytes(bytes(5))

    def curl(*words: str) -> str:
        """Returns the headers and trailers of a response."""
        said, _ = alpha.start("curl", "-s", "-m", "10", "-o", "/dev/null", "-D", "-", *words).communicate(timeout=30)
        return said

    def called(place: str, call: str, *more: str) -> str:
        of_grpc = ("-H", "content-type: application/grpc", "-H", "te: trailers", "--http2-prior-knowledge")
        return curl(*of_grpc, *more, "--data-binary", f"@{empty}", f"http://{place}/{call}")

    places = [
        f"{host.ip}:{port}" for host in pair for port in sorted(listening_ports(next(processes(host))[0], host.ip)) if port < 10_000
    ]
    assert {"10.77.0.1:7300", "10.77.0.1:7310", "10.77.0.1:7312", "10.77.0.2:7310", "10.77.0.2:7312"} <= set(places), places
    for place in places:
        for call in CALLS:
            assert "grpc-status: 0" not in called(place, call), (place, call)
        for page in PLAIN:
            for words in ((), ("-X", "POST")):
                said = curl(*words, f"http://{place}/{page}")
                assert not said or " 401 " in said.partition("\n")[0], (place, page, said)
    # The requests themselves are valid: with the token they succeed, and without it the status is 16 (unauthenticated).
    token = ("-H", f"authorization: Bearer {TOKEN}")
    for place, call in (("10.77.0.1:7300", CALLS[0]), ("10.77.0.2:7310", CALLS[1])):
        assert "grpc-status: 0" in called(place, call, *token), place
        assert "grpc-status: 16" in called(place, call), place


def test_join_with_wrong_token_is_refused(pair: tuple[Host, Host]) -> None:
    alpha, beta = pair
    aside = Host("gamma", beta.ip, beta.namespace, beta.switch, beta.port, beta.state.with_name("aside"), beta.tmp)
    tried = aside.plimsoll("join", "10.77.0.1", "--token", "wrong", "--devices", BETA, "--ports", "7300")
    assert tried.returncode == 2
    assert tried.stderr.startswith("error: 10.77.0.1:7300 refuses the token\n"), tried.stderr
    assert not list(aside.state.glob("joined.json")) and not (aside.state / "token").exists()
    assert [node["name"] for node in query_cluster(alpha)["nodes"]] == ["alpha/virtual:a", "beta/virtual:b"]


OTHER_PYTHON = """
import collections, sys
version = collections.namedtuple("version", "major minor micro releaselevel serial")
sys.version_info = version(*sys.version_info[:2], 99, "final", 0)
"""


def test_join_with_other_python_version_is_refused(pair: tuple[Host, Host], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_PYTHON)
    alpha, beta = pair
    env = {**beta.env, "PYTHONPATH": str(tmp_path)}
    aside = Host("gamma", beta.ip, beta.namespace, beta.switch, beta.port, beta.state.with_name("aside"), beta.tmp, env)
    tried = aside.plimsoll("join", "10.77.0.1:7300", "--token", TOKEN, "--devices", BETA, "--ports", "7600")
    assert tried.returncode == 2
    own, said = ".".join(map(str, sys.version_info[:3])), tried.stderr
    assert f" and Python {own}, and this machine Ray 2.60." in said and f" and Python {own.rpartition('.')[0]}.99\n" in said, said
    assert not list(aside.state.glob("joined.json"))
    assert [node["name"] for node in query_cluster(alpha)["nodes"]] == ["alpha/virtual:a", "beta/virtual:b"]


def test_verify_tests_every_device_and_link(pair: tuple[Host, Host]) -> None:
    tried = pair[0].plimsoll("verify", "--json", "--seconds", "0.5", "--share", "50%")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    report: Report = json.loads(tried.stdout)
    held = [(device["name"], device["requested_bytes"], device["held_bytes"]) for device in report["devices"]]
    assert held == [("alpha/virtual:a", 300 * MIB, 300 * MIB), ("beta/virtual:b", 150 * MIB, 150 * MIB)]
    for device in report["devices"]:
        assert device["refused_beyond"] and device["simulated"] and device["verdict"] == "ok"
        assert device["tflops"] and device["tflops"] > 0
    assert {(link["source"], link["target"]) for link in report["links"]} == {
        ("alpha/virtual:a", "beta/virtual:b"),
        ("beta/virtual:b", "alpha/virtual:a"),
    }
    for link in report["links"]:
        # tc limits the rate to 0.125 GB/s, after a burst of 256 KiB.
        rate, late = link["gigabytes_per_second"], link["latency_seconds"]
        assert rate and 0.0 < rate < 0.135 and late and late > 0.0
    assert not any("differs" in warning for warning in report["warnings"])


def test_verify_reports_busy_device_and_tests_others(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, _ = pair
    run = RunningRun(alpha, tmp_path / "run", "ray:beta/virtual:b=300MiB@0.2", 100_000)
    run.wait_for_step(1)
    began = time.monotonic()
    tried = alpha.plimsoll("verify", "--json", "--seconds", "0.2")
    # Waiting for the device itself would take a minute.
    assert time.monotonic() - began < 40.0
    assert tried.returncode == 2, tried.stdout + tried.stderr
    report: Report = json.loads(tried.stdout)
    verdicts = {device["name"]: device["verdict"] for device in report["devices"]}
    busy = f"busy: 0 B of 300.00 MiB are free, the rest is reserved for alpha:{run.folder}"
    assert verdicts == {"alpha/virtual:a": "ok", "beta/virtual:b": busy}
    run.stop()


def test_slow_node_is_not_lost(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    steps, devices = 30, f"ray:alpha/{FAST_LINK_DEVICES[0]},ray:beta/{FAST_LINK_DEVICES[1]}"
    plain = train(alpha, tmp_path / "plain", devices, steps)
    run = RunningRun(alpha, tmp_path / "slow", devices, steps)
    run.wait_for_step(3)
    began = time.time()
    faults.signal_all(beta, signal.SIGSTOP)
    try:
        time.sleep(SLOW_SECONDS)
    finally:
        faults.signal_all(beta, signal.SIGCONT)
    left = run.output()
    # The run waited for the node, without further consequences.
    times = [event["time"] for event in left.events if event["event"] == "step"]
    assert any(then - before > 0.8 * SLOW_SECONDS and then > began for before, then in zip(times, times[1:])), times
    assert left.result["steps"] == steps and left.losses == plain.losses
    assert not [event for event in left.events if event["event"] in ("device_lost", "device_returned")]
    assert [node["name"] for node in query_cluster(alpha)["nodes"] if node["alive"]] == ["alpha/virtual:a", "beta/virtual:b"]


WATCH_CODE = """
import time
from plimsoll.ray import cluster
with cluster.connected():
    print("watching", flush=True)
    while True:
        for node in cluster.nodes():
            if "lost_reason" in node:
                print("lost", node["name"], flush=True)
                raise SystemExit
        time.sleep(0.1)
"""


@pytest.mark.disrupts_cluster
def test_run_survives_pulled_cable(pair: tuple[Host, Host], tmp_path: Path) -> None:
    alpha, beta = pair
    plain = train(alpha, tmp_path / "plain", ",".join(FAST_LINK_DEVICES), 30)
    watcher = alpha.start(sys.executable, "-c", WATCH_CODE)
    assert watcher.stdout and watcher.stdout.readline() == "watching\n"
    run = RunningRun(alpha, tmp_path / "cut", f"ray:alpha/{FAST_LINK_DEVICES[0]},ray:beta/{FAST_LINK_DEVICES[1]}", 30)
    run.wait_for_step(3)
    pulled, happened = time.monotonic(), time.time()
    faults.inject("cable", beta)
    said = next(line for line in watcher.stdout if line.startswith("lost"))
    noticed = time.monotonic() - pulled
    print(f"a pulled cable was noticed after {noticed:.1f} s")
    assert said == "lost beta/virtual:b\n"
    assert noticed < NOTICED_SECONDS
    print(faults.check_survival("cable", "beta", run.output(), plain, happened))
    tried = alpha.plimsoll("verify", "--json", "--seconds", "0.2")
    report: Report = json.loads(tried.stdout)
    assert [device["name"] for device in report["devices"]] == ["alpha/virtual:a"]
    assert report["warnings"][0].startswith("beta/virtual:b is lost: ")
    # A run on all devices warns about the missing one; a run on the missing device is refused.
    rest = train(alpha, tmp_path / "rest", "ray", 2)
    warned = [event["message"] for event in rest.events if event["event"] == "warning"]
    assert any(message.startswith("beta/virtual:b of the cluster is unavailable and not used; ") for message in warned), warned
    named = alpha.plimsoll("plan", "--devices", "ray:beta/virtual:b")
    assert named.returncode == 2 and "run.devices: beta/virtual:b is lost\n" in named.stderr, named.stderr
    # The other machine gives up after some time and frees its memory.
    cut = beta.plimsoll("cluster")
    # The second message is that of a machine whose raylet has already ended.
    known = "error: no answer from 10.77.0.1:7300", "error: this machine has dropped out of the cluster at 10.77.0.1:7300"
    assert cut.returncode == 2 and cut.stderr.startswith(known), cut.stderr
    (raylet,) = json.loads((beta.state / "joined.json").read_text())["raylets"]
    while local_state.is_raylet_running(local_state.Raylet(**raylet)):
        assert time.monotonic() - pulled < GIVEN_UP_SECONDS
        time.sleep(0.5)
    print(f"a raylet without a head ended after {time.monotonic() - pulled:.1f} s")
    beta.plug_in()
    # After a refused token, the machine still has the token that it joined with.
    mistyped = beta.plimsoll("join", "10.77.0.1", "--name", "beta", "--token", "wrong", "--devices", BETA)
    assert mistyped.returncode == 2 and "refuses the token" in mistyped.stderr, mistyped.stderr
    again = beta.plimsoll("join", "10.77.0.1", "--name", "beta", "--devices", BETA)
    assert again.returncode == 0, again.stderr
    assert [(node["name"], node["alive"]) for node in query_cluster(alpha)["nodes"]] == [("alpha/virtual:a", True), ("beta/virtual:b", True)]


@pytest.mark.disrupts_cluster
def test_join_restarts_one_ended_raylet(pair: tuple[Host, Host]) -> None:
    alpha, beta = pair
    both = "virtual:b=200MiB@0.2,virtual:c=100MiB@0.1"
    assert beta.plimsoll("leave").returncode == 0
    join(beta, both)
    kept, ended = (local_state.Raylet(**raylet) for raylet in json.loads((beta.state / "joined.json").read_text())["raylets"])
    for pid in local_state.session_pids(ended):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + NOTICED_SECONDS
    while all(node["alive"] for node in query_cluster(alpha)["nodes"]):
        assert time.monotonic() < deadline
    words = f"plimsoll join 10.77.0.1 --name beta --devices {both}"
    seen = beta.plimsoll("cluster")
    assert f"the raylet of beta/virtual:c has ended; to start it again: {words}\n" in seen.stderr, seen.stdout + seen.stderr
    assert "to see how it joins again, run on its machine: plimsoll cluster" in seen.stdout
    other = beta.plimsoll("join", "10.77.0.1", "--name", "beta", "--devices", BETA)
    assert other.returncode == 2 and f"to start beta/virtual:c again: {words}\n" in other.stderr, other.stderr
    again = beta.plimsoll(*words.split()[1:])
    assert again.returncode == 0, again.stderr
    assert [node["name"] for node in query_cluster(alpha)["nodes"] if node["alive"]] == ["alpha/virtual:a", "beta/virtual:b", "beta/virtual:c"]
    assert local_state.is_raylet_running(kept), "the other raylet keeps running"
    assert beta.plimsoll("leave").returncode == 0
    assert local_state.session_pids(kept) == []
    join(beta)


@pytest.mark.disrupts_cluster
def test_leave_stops_no_other_ray(pair: tuple[Host, Host]) -> None:
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
    tried = beta.run(sys.executable, "-c", CONNECT_CODE, f"{beta.ip}:6380", beta.ip, env=env)
    assert "inside 1" in tried.stdout, tried.stderr
    assert beta.plimsoll("leave").stdout == "this machine has joined no cluster\n"
    # A machine that has left is not listed as lost, as soon as the head knows.
    deadline = time.monotonic() + NOTICED_SECONDS
    while (left_over := query_cluster(alpha)["nodes"][1:]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left_over == []
    assert not any(b"beta/virtual:b" in words for _, words in processes(beta))
    # It joins again; the name of another machine is refused.
    beta.end_started()
    refused = beta.plimsoll("join", alpha.ip, "--name", "alpha", "--token", TOKEN, "--devices", ALPHA)
    assert refused.returncode == 2 and "10.77.0.1 has the name alpha already" in refused.stderr, refused.stderr
    joined = beta.plimsoll("join", alpha.ip, "--name", "beta", "--token", TOKEN, "--devices", BETA, "--json")
    assert joined.returncode == 0, joined.stderr
    said = json.loads(joined.stdout)
    (node,) = said.pop("nodes")
    assert said == {"address": "10.77.0.1:7300", "ip": beta.ip, "head": False, "ports": 7300}
    assert (node["name"], node["simulated"], node["budget_bytes"]) == ("beta/virtual:b", True, 300 * MIB)


#: Folder of the simulated NVIDIA libraries (crates/plimsoll-device/tests/cuda_stand_in/build FOLDER).
STAND_IN = os.environ.get("PLIMSOLL_STAND_IN")


@pytest.mark.skipif(STAND_IN is None, reason="PLIMSOLL_STAND_IN names no folder with simulated NVIDIA libraries")
def test_each_gpu_is_a_node_of_its_own(tmp_path: Path) -> None:
    with hosts.network(["gamma"]) as (gamma,):
        gamma.env = {
            "LD_LIBRARY_PATH": f"{STAND_IN}:{STAND_IN}/nccl",
            "PLIMSOLL_STAND_IN_MEMORY": "2GiB,1536MiB",
            "PLIMSOLL_STAND_IN_NCCL_STALLS": str(tmp_path / "stalls"),
            "PLIMSOLL_CACHE": str(tmp_path),
        }
        hosts.write_rates(tmp_path)
        joined = gamma.plimsoll("join", "--head", "--name", "gamma")
        assert joined.returncode == 0, joined.stderr
        large, small = query_complete_cluster(gamma)["nodes"]
        assert (large["name"], small["name"]) == ("gamma/cuda:0", "gamma/cuda:1")
        assert (large["gpus"], small["gpus"]) == (1, 1)
        # 90 % of free memory, in MiB.
        assert (large["vram_mib"], small["vram_mib"]) == (1843, 1382)
        assert (large["free_bytes"], small["free_bytes"]) == (1843 * MIB, 1382 * MIB)
        tried = gamma.plimsoll("verify", "--json", "--share", "80%", "--seconds", "0.2")
        assert tried.returncode == 0, tried.stdout + tried.stderr
        report: Report = json.loads(tried.stdout)
        held = [(device["requested_bytes"] // MIB, device["refused_beyond"]) for device in report["devices"]]
        assert held == [(1474, True), (1104, True)]
        assert all(device["held_bytes"] == device["requested_bytes"] for device in report["devices"])
        tiny, runs = tiny_run(tmp_path), dict[str, RunOutput]()

        def words(name: str, named: str, *more: str) -> list[str]:
            settings = [*tiny, f"run.dir={tmp_path / name}", f"run.devices={named}", *more]
            return ["train", str(tmp_path / "run.toml"), "--quiet", *(word for one in settings for word in ("--set", one))]

        for name, named in (("here", "cuda:0,cuda:1"), ("there", "ray")):
            trained = gamma.plimsoll(*words(name, named))
            assert trained.returncode == 0, trained.stdout + trained.stderr
            runs[name] = RunOutput(tmp_path / name)
        here, there = runs["here"], runs["there"]
        assert [worker["device"] for worker in there.result["team"]] == ["gamma/cuda:0", "gamma/cuda:1"]
        assert all(worker["sequences"] > 0 for worker in there.result["team"])
        # The links differ, so offload to the host may differ too. An update on the host has other last bits.
        assert here.losses == pytest.approx(there.losses, rel=1e-5) and len(there.losses) >= 4
        for device, line in zip(there.result["memory"], (1843, 1382)):
            assert device["arena_measured_bytes"] == device["arena_bytes"]
            assert 0 < device["measured_bytes"] <= device["predicted_bytes"] <= device["budget_bytes"] == line * MIB
        assert [worker["collectives"] for left in (here, there) for worker in left.result["team"]] == 4 * [{"backend": "nccl"}]
        # A worker is killed during a collective: the other one aborts the collective and continues alone.
        (tmp_path / "stalls").write_text("40")
        run = gamma.start(hosts.COMMAND, *words("killed", "ray", "train.steps=20"))
        wait_until_stalled(tmp_path / "killed", run)
        os.kill(worker_pids(gamma)["gamma/cuda:1"], signal.SIGKILL)
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 0, said
        killed = RunOutput(tmp_path / "killed")
        assert [lost["device"] for lost in killed.result["lost"]] == ["gamma/cuda:1"]
        assert killed.result["steps"] == 20 and not (tmp_path / "stalls").exists()


def wait_until_stalled(folder: Path, run: subprocess.Popen[str]) -> None:
    """Waits until a run has completed steps, and then none for some seconds."""
    deadline, count, since = time.monotonic() + 120, 0, time.monotonic()
    while time.monotonic() < deadline and run.poll() is None:
        path = folder / "events.jsonl"
        now = path.read_text().count('"event":"step"') if path.exists() else 0
        if now != count:
            count, since = now, time.monotonic()
        if count > 0 and time.monotonic() - since > 4:
            return
        time.sleep(0.2)
    raise AssertionError("the run does not stall")


def test_worker_memory_stays_predicted_while_saving(pair: tuple[Host, Host], tmp_path: Path) -> None:
    # Three checkpoints and the model are sent in pieces, none of which may stay in the memory of the worker.
    wide = tiny_run(tmp_path, hidden=512, layers=4)
    settings = [*wide, "train.steps=6", "train.save_every=2", f"run.dir={tmp_path / 'run'}", "run.devices=ray:beta/virtual:b"]
    trained = pair[0].plimsoll("train", str(tmp_path / "run.toml"), "--quiet", *(word for one in settings for word in ("--set", one)))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    left = RunOutput(tmp_path / "run")
    assert [event["step"] for event in left.events if event["event"] == "checkpoint"] == [2, 4, 6]
    assert len(left.model) > 20 * MIB
    (memory,) = left.result["memory"]
    assert 0 < memory["measured_bytes"] <= memory["predicted_bytes"], memory


def tiny_run(folder: Path, hidden: int = 32, layers: int = 2) -> list[str]:
    """Writes a tiny model and its samples to the folder. Returns the settings of a run that takes seconds."""
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
    # Without a run file, the built-in example would be trained.
    (folder / "run.toml").write_text("")
    model = [f"model.path={folder / 'shape'}", "model.init=random"]
    data = [f"data.train={folder / 'data.jsonl'}", "data.format=tokens", "data.sequence=16", "data.pack=false"]
    return [*model, *data, "train.batch_tokens=64", "train.steps=4", "train.precision=f32", "run.parallelism=all", "run.threads=1"]
