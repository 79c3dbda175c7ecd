"""The cluster commands without a running Ray: membership records, processes, ports, devices, error messages."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import plimsoll
from plimsoll import _native
from plimsoll.ray import __main__ as commands
from plimsoll.ray import cluster, devices, local_state, membership, ports
from plimsoll.ray.cluster import Facts, Lifetime, Node, columns, current_nodes
from plimsoll.ray.failures import describe
from plimsoll.ray.verification import DeviceResult, Report, format_seconds, table, warnings
from shapes import MIB, node


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIMSOLL_RAY_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


#: Code of a process that ignores SIGTERM.
IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def start_session(children: int, leader_code: str = "import time") -> tuple[subprocess.Popen[bytes], local_state.Raylet]:
    """Starts a process that leads a session, with children that ignore SIGTERM."""
    child = f"{IGNORES_SIGTERM}; time.sleep(600)"
    starts = f"import subprocess, sys; [subprocess.Popen([sys.executable, '-c', {child!r}]) for _ in range({children})]"
    leader = subprocess.Popen([sys.executable, "-c", f"{leader_code}; {starts}; time.sleep(600)"], start_new_session=True)
    raylet = local_state.Raylet("here/cpu", "cpu", leader.pid, local_state.start_ticks(leader.pid) or 0)
    while len(local_state.session_pids(raylet)) <= children:
        time.sleep(0.02)
    return leader, raylet


def test_stop_ends_whole_session_only() -> None:
    leader, raylet = start_session(2)
    other, others = start_session(1)
    assert local_state.is_leader_running(raylet) and os.getpid() not in local_state.session_pids(raylet)
    began = time.monotonic()
    assert local_state.stop([raylet]) == 3
    # Children that outlive their leader are killed without a timeout.
    assert time.monotonic() - began < local_state.STOP_TIMEOUT_SECONDS / 2
    leader.wait()
    assert not local_state.is_leader_running(raylet) and local_state.session_pids(raylet) == []
    assert local_state.is_leader_running(others) and len(local_state.session_pids(others)) == 2
    # A pid that the system has given to another process does not count.
    assert local_state.session_pids(local_state.Raylet("here/cpu", "cpu", other.pid, others.start_ticks - 1)) == []
    local_state.stop([others])
    other.wait()


def test_stop_kills_stubborn_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_state, "STOP_TIMEOUT_SECONDS", 0.3)
    leader, raylet = start_session(1, IGNORES_SIGTERM)
    assert local_state.stop([raylet]) == 2
    leader.wait()
    assert local_state.session_pids(raylet) == []


def test_stop_finds_children_of_killed_leader() -> None:
    leader, raylet = start_session(2)
    leader.kill()
    leader.wait()
    assert not local_state.is_leader_running(raylet) and len(local_state.session_pids(raylet)) == 2
    assert local_state.stop([raylet]) == 2 and local_state.session_pids(raylet) == []


def test_membership_is_saved_with_private_token(state: Path) -> None:
    assert local_state.load_membership() is None
    joined = local_state.Membership("10.0.0.1:7300", "10.0.0.2", False, [local_state.Raylet("b/cuda:0", "cuda:0", 12, 34)])
    local_state.save_membership(joined)
    local_state.save_token("sesame")
    assert local_state.load_membership() == joined
    assert (local_state.token_path().read_text(), local_state.token_path().stat().st_mode & 0o777) == ("sesame", 0o600)
    assert state.stat().st_mode & 0o777 == 0o700
    local_state.delete_membership()
    assert local_state.load_membership() is None and not local_state.token_path().exists()


def test_open_state_folder_is_closed_or_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.mkdir()
    state.chmod(0o777)
    (state / "0.log").touch()
    local_state.save_token("sesame")
    assert state.stat().st_mode & 0o777 == 0o700
    # A folder with other files may serve other programs.
    (state / "letters").touch()
    local_state.save_token("sesame")
    state.chmod(0o755)
    with pytest.raises(plimsoll.InputError, match="open to other users, and not only Plimsoll uses it"):
        local_state.save_token("sesame")
    assert state.stat().st_mode & 0o777 == 0o755
    (state / "letters").unlink()
    state.chmod(0o1777)
    with pytest.raises(plimsoll.InputError, match="open to other users"):
        local_state.save_token("sesame")
    monkeypatch.setenv("PLIMSOLL_RAY_STATE", str(state.parent / "deep" / "state"))
    assert local_state.make_state_folder().parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(plimsoll.InputError, match="belongs to another user"):
        local_state.save_token("sesame")


def test_concurrent_join_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    joined = local_state.Membership("10.0.0.1:7300", "10.0.0.2", False)
    with local_state.join_lock():
        local_state.save_membership(joined)
        local_state.save_token("sesame")
        assert commands.main(["join", "--head"]) == 2
    assert capsys.readouterr().err.startswith("error: another `plimsoll join` is running on this machine\n")
    assert local_state.load_membership() == joined and local_state.token_path().read_text() == "sesame"
    with local_state.join_lock():
        pass


def test_raylet_is_recorded_before_start_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, started, seen = subprocess.Popen, list["subprocess.Popen[bytes]"](), list[local_state.Membership | None]()

    def sleeps(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(starts([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[-1]

    def waits(*_: object) -> None:
        seen.append(local_state.load_membership())
        raise plimsoll.InputError("it does not start")

    monkeypatch.setattr(membership, "_own_ip", lambda: "127.0.0.1")
    monkeypatch.setattr(membership, "_check_port_free", lambda *_: None)
    monkeypatch.setattr(membership, "measure_rates", lambda _: None)
    monkeypatch.setattr(membership, "_wait_until_started", waits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", sleeps)
        assert commands.main(["join", "--head", "--name", "here", "--devices", "virtual:a=100MiB@0.1"]) == 2
    (process,), (joined,) = started, seen
    assert joined and [(raylet.name, raylet.pid) for raylet in joined.raylets] == [("here/virtual:a", process.pid)]
    # After the failure, the process and the record are gone.
    process.wait(10)
    assert local_state.load_membership() is None and not local_state.token_path().exists()


@pytest.mark.parametrize("name", ["my machine", "alpha/one", "", "straße"])
def test_invalid_host_name_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"error: `{name}` cannot be the name of a machine in run.devices\n  hint: allowed are "
    assert commands.main(["join", "--head", "--name", name]) == 2
    assert capsys.readouterr().err.startswith(said)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert commands.main(["join", "--head"]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert membership._host_name("Alpha-1.home_net") == "Alpha-1.home_net"


#: Prints the token that Ray uses. Ray reads the environment when it is imported.
PRINT_TOKEN = "from ray._raylet import AuthenticationTokenLoader as Loader; print(Loader.instance().get_token_for_http_header())"


def test_saved_token_precedes_environment() -> None:
    pytest.importorskip("ray")
    local_state.save_token("sesame")
    env = {**os.environ, "RAY_AUTH_TOKEN": "another", **membership.environment()}
    said = subprocess.run([sys.executable, "-c", PRINT_TOKEN], capture_output=True, text=True, timeout=60, env=env)
    assert said.stdout == "{'authorization': 'Bearer sesame'}\n", said.stdout + said.stderr


@pytest.mark.parametrize("written", ["{", "[]", "{}", '{"raylets": [{"id": 3}]}', '{"raylets": [], "address": "a", "since": 3}'])
def test_unreadable_membership_record_is_reported_with_path(
    written: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state.mkdir()
    (state / "joined.json").write_text(written)
    assert commands.main(["leave"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {state / 'joined.json'} cannot be read: ")


def test_exceptions_become_errors_or_bugs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(error: BaseException) -> tuple[int, str]:
        def raises() -> None:
            raise error

        monkeypatch.setattr(membership, "leave", raises)
        code = commands.main(["leave"])
        return code, capsys.readouterr().err

    monkeypatch.setattr(membership, "other_machines", list)
    exceptions = pytest.importorskip("ray.exceptions")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/state/token")
    assert fails(full) == (2, "error: /state/token: no space left on device\n")
    assert fails(exceptions.RaySystemError("it is down")) == (2, "error: Ray does not answer\n")
    assert fails(KeyboardInterrupt()) == (4, "error: interrupted\n")
    code, said = fails(KeyError("raylets"))
    assert code == 1 and said.startswith(f"error: this is a bug in plimsoll: KeyError: 'raylets' ({__file__}:"), said
    assert "hint: please report it: " in said
    monkeypatch.setattr(membership, "check_ray", lambda: 1 // 0)
    assert commands.main(["cluster", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["exit"] == 1


def test_ports_of_raylets_do_not_overlap() -> None:
    taken = [7300]
    for number in range(8):
        at = ports.raylet_ports(7300, number)
        fixed = [at.node_manager, at.object_manager, at.runtime_env_agent, at.metrics_export, at.dashboard_agent]
        taken += [*fixed, at.dashboard_agent_grpc, *range(at.worker_first, at.worker_last + 1)]
        taken += range(at.wires_first, at.wires_last + 1)
    assert len(set(taken)) == len(taken)
    assert (min(taken), ports.raylet_ports(7300, 0).wires_last) == (7300, 7419)


def test_occupied_port_is_reported_before_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(membership, "_own_ip", lambda: "127.0.0.1")
    # Below the ports that the system gives to connections, so that no other port of the range is taken.
    port = 24_000 + os.getpid() % 1000
    for of_head in (True, False):
        with socket.create_server(("127.0.0.1", port)):
            base = port if of_head else port - (ports.raylet_ports(0, 1).metrics_export)
            devices = "virtual:a=100MiB@0.1,virtual:b=100MiB@0.1"
            assert commands.main(["join", "--head", "--devices", devices, "--ports", str(base)]) == 2
        assert capsys.readouterr().err.startswith(f"error: port {port} of 127.0.0.1 is not available: ")
        assert local_state.load_membership() is None and not local_state.token_path().exists()


def test_named_devices_are_given_except_paper_devices() -> None:
    a, b = devices.local_devices("virtual:a=600MiB@0.5,virtual:b=200MiB@0.3")
    assert (a.name, a.budget_bytes, a.simulated, a.worker_name) == ("virtual:a", 600 * MIB, True, "virtual:a=600MiB@0.5")
    given = devices.divide_resources([a, b])
    assert [one.vram_mib for one in given] == [600, 200] and [one.gpus for one in given] == [0, 0]
    assert all(one.labels["plimsoll-simulated"] == "true" and one.cpus >= 1 for one in given)
    (cpu,) = devices.local_devices("cpu=1GiB")
    (alone,) = devices.divide_resources([cpu])
    assert (cpu.worker_name, alone.vram_mib, alone.memory_bytes + alone.store_bytes) == ("cpu=1024MiB", None, 1024 * MIB)
    # The memory of a simulated device is not shared with others.
    free = plimsoll.devices()["devices"][0]["defaults"]["budget_bytes"]
    both = devices.divide_resources(devices.local_devices("cpu=1GiB,virtual:a=600MiB@0.5"))
    assert sum(one.memory_bytes + one.store_bytes for one in both) == pytest.approx(free - 600 * MIB, rel=0.05)
    # A CPU with all free memory does not include it either.
    both = devices.divide_resources(devices.local_devices("cpu,virtual:a=600MiB@0.5"))
    held = sum(one.memory_bytes + one.store_bytes for one in both) - 2 * devices.STORE_BYTES_MIN
    assert 0 < held + 600 * MIB <= 1.02 * free
    with pytest.raises(plimsoll.InputError, match="`rtx3090` is a paper device"):
        devices.local_devices("rtx3090")
    with pytest.raises(plimsoll.InputError, match="run.devices: virtual:a and virtual:b may hold 900.00 TiB, and this machine"):
        devices.local_devices("virtual:a=64MiB@0.1,virtual:b=921600GiB@0.1")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("NVIDIA GeForce RTX 3090", "NVIDIA-GeForce-RTX-3090"),
        ("cuda:0", "cuda-0"),
        ("AMD Ryzen 9 (16-Core)", "AMD-Ryzen-9-16-Core"),
        ("x" * 80, "x" * 63),
    ],
)
def test_names_become_ray_labels(text: str, label: str) -> None:
    assert devices.to_label(text) == label


def test_head_without_default_route_uses_only_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(not ip.startswith("127.") and len(ip.split(".")) == 4 for ip in membership._interface_addresses())

    def no_route(address: str) -> str:
        raise plimsoll.InputError(f"no network route leads to {address}")

    monkeypatch.setattr(membership, "_ip_towards", no_route)
    monkeypatch.setattr(membership, "_interface_addresses", lambda: ["10.0.0.1"])
    assert membership._own_ip() == "10.0.0.1"
    monkeypatch.setattr(membership, "_interface_addresses", lambda: ["10.0.0.1", "192.168.0.2"])
    with pytest.raises(plimsoll.InputError, match="has the addresses 10.0.0.1, 192.168.0.2") as asked:
        membership._own_ip()
    assert asked.value.hints == ["name the address by which the others reach it: --ip 10.0.0.1"]


def test_program_that_is_no_head_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions, raylet = (pytest.importorskip(f"ray.{name}") for name in ("exceptions", "_raylet"))

    def times_out(address: str) -> None:
        raise exceptions.RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr(raylet, "GcsClient", times_out)
    with pytest.raises(plimsoll.InputError, match="the program at 10.0.0.1:7300 does not answer as the head"):
        membership._alive_nodes("10.0.0.1:7300")


def test_processes_of_an_earlier_boot_are_ignored() -> None:
    leader, raylet = start_session(children=1)
    try:
        before = replace(raylet, boot_id="another")
        assert local_state.is_leader_running(raylet) and not local_state.is_leader_running(before) and local_state.session_pids(before) == []
        assert local_state.stop([before]) == 0 and leader.poll() is None
    finally:
        local_state.stop([raylet])
        leader.wait()


def test_ray_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    within = membership._temp_dir()
    assert within.parent.parent == tmp_path and within.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(plimsoll.InputError, match="nowhere/plimsoll-ray-.* cannot be created"):
        membership._temp_dir()


def facts(**other: object) -> Facts:
    plain = Facts(
        python="3.11.2", ray="2.60.0", plimsoll="0.1.0", system="6.1", driver=None, cards=0, free_bytes=1, clock=100.0
    )
    return {**plain, **other}  # type: ignore[typeddict-item]


def device(name: str, tflops: float = 1.0, **other: object) -> DeviceResult:
    return DeviceResult(
        name=name,
        model="card",
        simulated=False,
        requested_bytes=1,
        held_bytes=1,
        refused_beyond=True,
        tflops=tflops,
        busy=False,
        verdict="ok",
        facts=facts(**other),
    )


def test_verify_warns_about_differences() -> None:
    assert warnings([node("a"), node("b")], [device("a"), device("b")]) == []
    said = warnings(
        [node("a"), node("b"), node("c", alive=False, lost_reason="no heartbeat")],
        [device("a", 2.0, cards=1), device("b", 0.5, ray="2.60.1", python="3.11.3", clock=103.0)],
    )
    assert said == [
        "c is lost: no heartbeat",
        "Python differs: a has 3.11.2, b has 3.11.3",
        "Ray differs: a has 2.60.0, b has 2.60.1",
        "clocks are 3.0 s apart, or a node is slow to answer",
        "NVIDIA cards of a: 1 installed, 0 used",
        "b computes at 0.500 TFLOP/s, another card at 2.000",
    ]


def test_busy_device_shows_no_figures() -> None:
    busy = DeviceResult(**{**device("b"), "held_bytes": None, "tflops": None, "busy": True, "verdict": "busy: 0 B are free"})
    report = Report(passed=False, devices=[device("a"), busy], links=[], warnings=[])
    shown = table(report).splitlines()
    assert [line.split()[:5] for line in shown[1:3]] == [["a", "1", "B", "1", "B"], ["b", "-", "-", "-", "-"]]
    assert shown[-1] == "every tested device and link works; busy devices were not tested"
    failed = DeviceResult(**{**busy, "busy": False, "verdict": "it failed"})
    assert table(Report(passed=False, devices=[failed], links=[], warnings=[])).endswith("\nsome devices or links fail")


def test_lost_node_is_listed_until_machine_rejoins() -> None:
    def one(name: str, number: int, alive: bool) -> Node:
        made = node(f"{name}#{number}", alive=alive)
        made["name"], made["ip"] = name, name.partition("/")[0]
        return made

    def listed(*nodes: tuple[Node, int, int, bool]) -> list[str]:
        lifetimes = {node["id"]: Lifetime(start, end, left) for node, start, end, left in nodes}
        return [node["id"] for node in current_nodes([node for node, *_ in nodes], lifetimes)]

    a, b = (one("m/a", 1, True), 10, 0, False), (one("m/b", 1, False), 11, 50, False)
    assert listed(a, b) == ["m/a#1", "m/b#1"]
    # The node has joined again, its machine has joined again with other devices, or the node has left.
    assert listed(b, a, (one("m/b", 2, True), 60, 0, False)) == ["m/a#1", "m/b#2"]
    assert listed((one("m/a", 1, False), 10, 50, False), b, (one("m/a", 2, True), 60, 0, False)) == ["m/a#2"]
    assert listed(a, b, (one("m/b", 2, False), 60, 70, True)) == ["m/a#1"]
    # A join of another machine does not matter.
    assert listed(b, (one("n/a", 1, True), 60, 0, False)) == ["n/a#1", "m/b#1"]


def fail_connections(monkeypatch: pytest.MonkeyPatch, failures: list[OSError]) -> list[tuple[str, int]]:
    """Makes the next connections fail with these errors. Returns the addresses of all attempts."""
    tried, connect, failing = list[tuple[str, int]](), socket.create_connection, iter(failures)

    def connects(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(address)
        if (failure := next(failing, None)) is not None:
            raise failure
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", connects)
    monkeypatch.setattr(membership, "RETRY_INTERVAL_SECONDS", 0.01)
    return tried


def no_route(number: int = errno.EHOSTUNREACH) -> OSError:
    return OSError(number, os.strerror(number))


def test_missing_route_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        tried = fail_connections(monkeypatch, [no_route(), no_route(errno.ENETUNREACH), TimeoutError("timed out")])
        membership.check_reachable(address, 10.0)
        assert len(tried) == 4
        # Without a retry time, the error is immediate.
        tried = fail_connections(monkeypatch, [no_route()])
        with pytest.raises(plimsoll.InputError, match=f"^no answer from {address}: no network route leads there\n"):
            membership.check_reachable(address)
        assert len(tried) == 1
    tried = fail_connections(monkeypatch, [no_route()] * 1000)
    began = time.monotonic()
    with pytest.raises(plimsoll.InputError, match="no network route leads there") as caught:
        membership.check_reachable(address, 0.2)
    assert 0.2 <= time.monotonic() - began < 5.0 and len(tried) > 2
    assert "check that the machine is on" in str(caught.value) and "rrno" not in str(caught.value)


def test_refused_connection_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    tried = fail_connections(monkeypatch, [])
    with pytest.raises(plimsoll.InputError, match=f"no answer from {address}: the machine is reachable, but runs no head on this port"):
        membership.check_reachable(address, 10.0)
    assert len(tried) == 1
    for wrong in ("10.0.0.1:many", "10.0.0.1:73000"):
        with pytest.raises(plimsoll.InputError, match=f"`{wrong}` is not an address of a machine"):
            membership.check_reachable(wrong, 10.0)


def test_dropped_out_machine_is_told_its_join_command() -> None:
    words = ["join", "10.0.0.1", "--token", "sesame", "--devices", "virtual:a=600MiB@0.5", "--name", "second", "--ports", "7500"]
    ended = local_state.Raylet("b/cpu", "cpu", 2**22 + 1, 1)
    joined: list[str] = []

    def joins(*, command: str, **_: object) -> local_state.Membership:
        joined.append(command)
        raise plimsoll.InputError("not attempted in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "join", joins)
        assert commands.main(words) == 2
    # The recorded command does not contain the token.
    assert joined == ["plimsoll join 10.0.0.1 --name second --devices virtual:a=600MiB@0.5 --ports 7500"]
    local_state.save_membership(local_state.Membership("10.0.0.1:7500", "10.0.0.2", False, [ended], joined[0]))

    def message() -> str:
        with pytest.raises(plimsoll.InputError) as caught, cluster.connected():
            pass
        return str(caught.value)

    first = message()
    assert first.startswith("this machine has dropped out of the cluster at 10.0.0.1:7500: ")
    assert f"to join again: {joined[0]}" in first
    # The raylet runs, but the head regards it as lost: the error is immediate, while Ray would wait for a minute.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_state, "is_raylet_running", lambda _: True)
        patch.setattr(membership, "check_reachable", lambda *_: None)
        patch.setattr(membership, "_alive_nodes", lambda _: {"a/cpu": "10.0.0.1"})
        assert message() == first
    # The own head has ended, while other processes of this machine still run.
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    local_state.save_membership(local_state.Membership(nobody, "127.0.0.1", True, [ended], "plimsoll join --head"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_state, "is_raylet_running", lambda _: True)
        assert "to join again: plimsoll join --head" in message()


def test_join_measures_rates_of_simulated_devices() -> None:
    asked: list[list[str]] = []

    def resolve(settings: list[str]) -> str:
        asked.append(settings)
        return "[]"

    gpu = devices.Device("cuda:0", "cuda", "a card", 8192 * MIB, "cuda:0")
    simulated = devices.Device("virtual:a", "virtual", "part of a processor", 600 * MIB, "virtual:a=600MiB@0.5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "resolve_devices", resolve)
        devices.measure_rates([gpu])
        assert asked == []
        devices.measure_rates([gpu, simulated])
    assert asked == [['run.devices="virtual:a=600MiB@0.5"']]


def test_local_devices_measures_no_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "cache"))
    began = time.monotonic()
    cpu, part = devices.local_devices("cpu=1GiB,virtual:a=600MiB@0.5")
    assert (cpu.budget_bytes, part.budget_bytes) == (1024 * MIB, 600 * MIB)
    assert time.monotonic() - began < 5.0 and not (tmp_path / "cache" / "devices.json").exists()
    with pytest.raises(plimsoll.InputError, match="`ray:a/cuda:0` is a device of a cluster"):
        devices.local_devices("ray:a/cuda:0")


def test_leaving_head_names_affected_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(membership, "other_machines", lambda: ["beta", "gamma"])
    assert commands.main(["leave"]) == 0
    assert capsys.readouterr().err.startswith("warning: this machine is the head of the cluster, so the cluster ends for beta, gamma too: ")
    monkeypatch.setattr(membership, "other_machines", list)
    assert commands.main(["leave"]) == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster", "--bogus"], "error: `plimsoll cluster` has no option `--bogus`\n  hint: for all options: plimsoll cluster --help\n"),
        (["join", "--ports", "many"], "error: argument --ports: invalid int value: 'many'\n  hint: for all options: plimsoll join --help\n"),
    ],
)
def test_unknown_option_is_an_input_error(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([*words, "--json"]) == 2
    told = capsys.readouterr()
    assert told.err == said and json.loads(told.out)["error"]["exit"] == 2


def test_exceptions_are_described_in_plain_words() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    assert describe(exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError: RPC error", b"x" * 16)) == "it cannot be reached"
    assert describe(exceptions.ActorDiedError()) == "its process has ended, or cannot be reached"
    assert describe(exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")) == "it does not answer"
    failed = exceptions.RayTaskError("answer", "Traceback", no_route())
    assert describe(failed) == describe(failed.as_instanceof_cause()) == "no network route leads there"
    fits = exceptions.RayTaskError("take", "Traceback", plimsoll.DoesNotFit("too much", ["take less"]))
    assert describe(fits.as_instanceof_cause()) == "too much"
    assert describe(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "no space left on device"
    assert describe(KeyError("a")) == "KeyError: 'a'"


def test_short_times_use_fitting_unit() -> None:
    assert [format_seconds(seconds) for seconds in (4.2e-6, 0.00035, 0.0012)] == ["4 µs", "350 µs", "1.20 ms"]


def test_columns_are_aligned() -> None:
    assert columns([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc  d"


def test_python_command_without_ray_names_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.3")
    assert commands.main(["cluster", "--json"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: this needs Ray 2.60; ") and " has 2.9.3\n" in said.err
    assert json.loads(said.out)["error"]["exit"] == 2


@pytest.fixture
def no_ray(tmp_path: Path) -> dict[str, str]:
    """An environment with an old version of Ray, which must not be imported before the version is checked."""
    (tmp_path / "ray.py").write_text("raise ImportError('it is too old')")
    (tmp_path / "ray-2.9.3.dist-info").mkdir()
    (tmp_path / "ray-2.9.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.3\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "RAY_ADDRESS": "127.0.0.1:9"}


@pytest.mark.parametrize("words", [("train", "--devices", "ray"), ("plan", "--devices", "ray"), ("join", "--head")])
def test_command_line_without_ray_names_the_package(
    command: Path, tmp_path: Path, no_ray: dict[str, str], words: tuple[str, ...]
) -> None:
    said = subprocess.run([command, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=no_ray)
    assert said.returncode == 2
    assert said.stderr.startswith("error: this needs Ray 2.60; ") and " has 2.9.3\n" in said.stderr, said.stderr


LEAVE_JSON = json.dumps({"address": "192.0.2.1:7300", "processes_ended": 2, "ends_for": []}, indent=2) + "\n"


def test_leave_works_without_ray(command: Path, tmp_path: Path, no_ray: dict[str, str]) -> None:
    def leaves(*words: str) -> tuple[int, str]:
        words = (str(command), "leave", *words)
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=no_ray)
        return ended.returncode, ended.stdout

    assert leaves() == (0, "this machine has joined no cluster\n")
    for words, said in ((), "left 192.0.2.1:7300; processes ended: 2\n"), (("--json",), LEAVE_JSON):
        leader, raylet = start_session(1)
        local_state.save_membership(local_state.Membership("192.0.2.1:7300", "192.0.2.2", False, [raylet]))
        assert leaves(*words) == (0, said)
        leader.wait(10)
        assert local_state.session_pids(raylet) == []


def test_closed_output_pipe_is_no_failure(command: Path, tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        ended = subprocess.run([command, "leave"], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path)
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_program_without_neighbor_python_uses_path(command: Path, tmp_path: Path) -> None:
    alone = shutil.copy(command, tmp_path / "plimsoll")

    def leaves(path: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": path}
        env.pop("PLIMSOLL_PYTHON", None)
        return subprocess.run([alone, "leave"], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env)

    found = leaves(str(Path(sys.executable).parent))
    assert (found.returncode, found.stdout) == (0, "this machine has joined no cluster\n"), found.stderr
    nobody = leaves("/nonexistent")
    assert nobody.returncode == 2 and "need Python with the Plimsoll wheel: python3 cannot be started" in nobody.stderr, nobody.stderr


def test_help_of_cluster_commands_is_complete_without_wheel(command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {**os.environ, "PLIMSOLL_PYTHON": "/nonexistent/python3"}
    for name in ("join", "leave", "cluster", "verify"):
        helped = subprocess.run([command, name, "--help"], capture_output=True, text=True, timeout=60, env=env)
        with pytest.raises(SystemExit):
            commands.main([name, "--help"])
        options = re.findall(r"--[a-z]+", capsys.readouterr().out)
        assert helped.returncode == 0 and options and all(option in helped.stdout for option in options), helped.stdout


def test_command_line_passes_all_arguments_to_python(command: Path, tmp_path: Path) -> None:
    (tmp_path / "plimsoll").mkdir()  # A folder of this name in the working directory must not hide the package.
    wrong = subprocess.run([command, "verify", "--share", "0%"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert wrong.returncode == 2
    nobody = subprocess.run(
        [command, "cluster"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PLIMSOLL_PYTHON": "/nonexistent/python3"},
    )
    assert nobody.returncode == 2
    assert nobody.stderr.startswith("error: cluster commands need Python with the Plimsoll wheel: /nonexistent/python3")
