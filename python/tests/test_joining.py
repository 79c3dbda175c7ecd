"""What `join` decides and remembers, without a Ray that runs."""

from __future__ import annotations

import errno
import json
import os
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
from plimsoll.ray import cluster, devices, joining, ours, ports
from plimsoll.ray.cluster import Facts, Life, Node, columns, of_interest
from plimsoll.ray.reasons import reason
from plimsoll.ray.verifying import Device, Report, span, table, warnings
from shapes import MIB, node


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIMSOLL_RAY_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


#: What starts with it ignores what asks it to end.
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def session(children: int, leads: str = "import time") -> tuple[subprocess.Popen[bytes], ours.Raylet]:
    """A process that leads a session, with stubborn children."""
    child = f"{STUBBORN}; time.sleep(600)"
    starts = f"import subprocess, sys; [subprocess.Popen([sys.executable, '-c', {child!r}]) for _ in range({children})]"
    leader = subprocess.Popen([sys.executable, "-c", f"{leads}; {starts}; time.sleep(600)"], start_new_session=True)
    raylet = ours.Raylet("here/cpu", "cpu", leader.pid, ours.started(leader.pid) or 0)
    while len(ours.members(raylet)) <= children:
        time.sleep(0.02)
    return leader, raylet


def test_what_is_stopped_is_a_session_with_all_that_is_in_it() -> None:
    leader, raylet = session(2)
    other, others = session(1)
    assert ours.runs(raylet) and os.getpid() not in ours.members(raylet)
    began = time.monotonic()
    assert ours.stop([raylet]) == 3
    # What a leader leaves behind is not waited for.
    assert time.monotonic() - began < ours.PATIENCE_SECONDS / 2
    leader.wait()
    assert not ours.runs(raylet) and ours.members(raylet) == []
    assert ours.runs(others) and len(ours.members(others)) == 2
    # A number that the system has given to another process since is not ours.
    assert ours.members(ours.Raylet("here/cpu", "cpu", other.pid, others.started - 1)) == []
    ours.stop([others])
    other.wait()


def test_a_leader_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "PATIENCE_SECONDS", 0.3)
    leader, raylet = session(1, STUBBORN)
    assert ours.stop([raylet]) == 2
    leader.wait()
    assert ours.members(raylet) == []


def test_what_is_left_of_a_leader_that_was_killed_is_found() -> None:
    leader, raylet = session(2)
    leader.kill()
    leader.wait()
    assert not ours.runs(raylet) and len(ours.members(raylet)) == 2
    assert ours.stop([raylet]) == 2 and ours.members(raylet) == []


def test_what_was_joined_is_remembered_and_the_token_is_for_this_user_alone(state: Path) -> None:
    assert ours.known() is None
    joined = ours.Joined("10.0.0.1:7300", "10.0.0.2", False, [ours.Raylet("b/cuda:0", "cuda:0", 12, 34)])
    ours.keep(joined)
    ours.keep_token("sesame")
    assert ours.known() == joined
    assert (ours.token_path().read_text(), ours.token_path().stat().st_mode & 0o777) == ("sesame", 0o600)
    assert state.stat().st_mode & 0o777 == 0o700
    ours.forget()
    assert ours.known() is None and not ours.token_path().exists()


def test_a_second_join_does_not_touch_what_the_first_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    joined = ours.Joined("10.0.0.1:7300", "10.0.0.2", False)
    with ours.alone():
        ours.keep(joined)
        ours.keep_token("sesame")
        assert commands.main(["join", "--head"]) == 2
    assert capsys.readouterr().err.startswith("error: another `plimsoll join` is at work on this machine\n")
    assert ours.known() == joined and ours.token_path().read_text() == "sesame"
    with ours.alone():
        pass


def test_a_raylet_is_written_down_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, started, seen = subprocess.Popen, list["subprocess.Popen[bytes]"](), list[ours.Joined | None]()

    def sleeps(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(starts([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[-1]

    def waits(*_: object) -> None:
        seen.append(ours.known())
        raise plimsoll.InputError("it does not start")

    monkeypatch.setattr(joining, "_own_ip", lambda: "127.0.0.1")
    monkeypatch.setattr(joining, "_check_free", lambda *_: None)
    monkeypatch.setattr(joining, "measure", lambda _: None)
    monkeypatch.setattr(joining, "_wait", waits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", sleeps)
        assert commands.main(["join", "--head", "--name", "here", "--devices", "virtual:a=100MiB@0.1"]) == 2
    (process,), (joined,) = started, seen
    assert joined and [(raylet.name, raylet.pid) for raylet in joined.raylets] == [("here/virtual:a", process.pid)]
    # As it does not start, nothing is left of it.
    process.wait(10)
    assert ours.known() is None and not ours.token_path().exists()


@pytest.mark.parametrize("name", ["my machine", "alpha/one", "", "straße"])
def test_a_name_that_no_run_can_say_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"error: `{name}` cannot be the name of a machine in run.devices\n  hint: its letters are "
    assert commands.main(["join", "--head", "--name", name]) == 2
    assert capsys.readouterr().err.startswith(said)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert commands.main(["join", "--head"]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert joining._host("Alpha-1.home_net") == "Alpha-1.home_net"


#: Ray reads these when it is imported.
TELLS_TOKEN = "from ray._raylet import AuthenticationTokenLoader as Loader; print(Loader.instance().get_token_for_http_header())"


def test_the_token_of_the_cluster_comes_before_one_that_is_set_here() -> None:
    pytest.importorskip("ray")
    ours.keep_token("sesame")
    env = {**os.environ, "RAY_AUTH_TOKEN": "another", **joining.environment()}
    said = subprocess.run([sys.executable, "-c", TELLS_TOKEN], capture_output=True, text=True, timeout=60, env=env)
    assert said.stdout == "{'authorization': 'Bearer sesame'}\n", said.stdout + said.stderr


@pytest.mark.parametrize("written", ["{", "[]", "{}", '{"raylets": [{"id": 3}]}', '{"raylets": [], "address": "a", "since": 3}'])
def test_what_another_version_has_written_down_is_an_error_with_its_path(
    written: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state.mkdir()
    (state / "joined.json").write_text(written)
    assert commands.main(["leave"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {state / 'joined.json'} cannot be read: ")


def test_whatever_a_command_fails_with_is_an_error_and_a_bug_is_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(error: BaseException) -> tuple[int, str]:
        def raises() -> None:
            raise error

        monkeypatch.setattr(joining, "leave", raises)
        code = commands.main(["leave"])
        return code, capsys.readouterr().err

    monkeypatch.setattr(joining, "others", list)
    exceptions = pytest.importorskip("ray.exceptions")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/state/token")
    assert fails(full) == (2, "error: /state/token: no space left on device\n")
    assert fails(exceptions.RaySystemError("it is down")) == (2, "error: Ray does not answer\n")
    assert fails(KeyboardInterrupt()) == (4, "error: interrupted\n")
    code, said = fails(KeyError("raylets"))
    assert code == 1 and said.startswith(f"error: this is a bug in plimsoll: KeyError: 'raylets' ({__file__}:"), said
    assert "hint: please report it: " in said
    monkeypatch.setattr(joining, "check_ray", lambda: 1 // 0)
    assert commands.main(["cluster", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["exit"] == 1


def test_ports_of_raylets_do_not_meet() -> None:
    taken = [7300]
    for number in range(8):
        at = ports.of_raylet(7300, number)
        fixed = [at.node_manager, at.object_manager, at.runtime_env_agent, at.metrics_export, at.dashboard_agent]
        taken += [*fixed, at.dashboard_agent_grpc, *range(at.worker_first, at.worker_last + 1)]
        taken += range(at.wires_first, at.wires_last + 1)
    assert len(set(taken)) == len(taken)
    assert (min(taken), ports.of_raylet(7300, 0).wires_last) == (7300, 7419)


def test_a_port_that_another_program_has_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "_own_ip", lambda: "127.0.0.1")
    for of_head in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            base = port if of_head else port - (ports.of_raylet(0, 1).metrics_export)
            devices = "virtual:a=100MiB@0.1,virtual:b=100MiB@0.1"
            assert commands.main(["join", "--head", "--devices", devices, "--ports", str(base)]) == 2
        assert capsys.readouterr().err.startswith(f"error: 127.0.0.1:{port} cannot be taken: ")
        assert ours.known() is None and not ours.token_path().exists()


def test_devices_that_are_named_are_given_and_those_on_paper_are_not() -> None:
    a, b = devices.of_this_machine("virtual:a=600MiB@0.5,virtual:b=200MiB@0.3")
    assert (a.name, a.line_bytes, a.simulated, a.worker_name) == ("virtual:a", 600 * MIB, True, "virtual:a=600MiB@0.5")
    given = devices.share_out([a, b])
    assert [one.vram_mib for one in given] == [600, 200] and [one.gpus for one in given] == [0, 0]
    assert all(one.labels["plimsoll-simulated"] == "true" and one.cpus >= 1 for one in given)
    (cpu,) = devices.of_this_machine("cpu=1GiB")
    (alone,) = devices.share_out([cpu])
    assert (cpu.worker_name, alone.vram_mib, alone.memory_bytes + alone.store_bytes) == ("cpu=1024MiB", None, 1024 * MIB)
    # What is a device's own memory is no other's, too.
    free = plimsoll.devices()["devices"][0]["takes"]["budget_bytes"]
    both = devices.share_out(devices.of_this_machine("cpu=1GiB,virtual:a=600MiB@0.5"))
    assert sum(one.memory_bytes + one.store_bytes for one in both) == pytest.approx(free - 600 * MIB, rel=0.05)
    # Nor where the processor is given what is free.
    both = devices.share_out(devices.of_this_machine("cpu,virtual:a=600MiB@0.5"))
    held = sum(one.memory_bytes + one.store_bytes for one in both) - 2 * devices.STORE_LEAST
    assert 0 < held + 600 * MIB <= 1.02 * free
    with pytest.raises(plimsoll.InputError, match="`rtx3090` is a device on paper"):
        devices.of_this_machine("rtx3090")
    with pytest.raises(plimsoll.InputError, match="run.devices: virtual:a and virtual:b may hold 900.00 TiB, and this machine"):
        devices.of_this_machine("virtual:a=64MiB@0.1,virtual:b=921600GiB@0.1")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("NVIDIA GeForce RTX 3090", "NVIDIA-GeForce-RTX-3090"),
        ("cuda:0", "cuda-0"),
        ("AMD Ryzen 9 (16-Core)", "AMD-Ryzen-9-16-Core"),
        ("x" * 80, "x" * 63),
    ],
)
def test_names_become_labels(text: str, label: str) -> None:
    assert devices.label(text) == label


def test_without_a_way_to_everywhere_a_head_has_its_only_address_and_is_asked_for_one_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(not ip.startswith("127.") and len(ip.split(".")) == 4 for ip in joining._addresses())

    def no_way(address: str) -> str:
        raise plimsoll.InputError(f"no way leads to {address}")

    monkeypatch.setattr(joining, "_ip_towards", no_way)
    monkeypatch.setattr(joining, "_addresses", lambda: ["10.0.0.1"])
    assert joining._own_ip() == "10.0.0.1"
    monkeypatch.setattr(joining, "_addresses", lambda: ["10.0.0.1", "192.168.0.2"])
    with pytest.raises(plimsoll.InputError, match="has the addresses 10.0.0.1, 192.168.0.2") as asked:
        joining._own_ip()
    assert asked.value.hints == ["say by which the others reach it: --ip 10.0.0.1"]


def test_what_is_no_head_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions, raylet = (pytest.importorskip(f"ray.{name}") for name in ("exceptions", "_raylet"))

    def times_out(address: str) -> None:
        raise exceptions.RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr(raylet, "GcsClient", times_out)
    with pytest.raises(plimsoll.InputError, match="what listens at 10.0.0.1:7300 does not answer as the head"):
        joining._alive("10.0.0.1:7300")


def test_processes_of_another_start_of_the_machine_are_not_ours() -> None:
    leader, raylet = session(children=1)
    try:
        before = replace(raylet, boot="another")
        assert ours.runs(raylet) and not ours.runs(before) and ours.members(before) == []
        assert ours.stop([before]) == 0 and leader.poll() is None
    finally:
        ours.stop([raylet])
        leader.wait()


def test_ray_has_a_folder_that_nobody_else_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    within = joining._temp_dir()
    assert within.parent.parent == tmp_path and within.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(plimsoll.InputError, match="nowhere/plimsoll-ray-.* cannot be made"):
        joining._temp_dir()


def facts(**other: object) -> Facts:
    plain = Facts(
        python="3.11.2", ray="2.60.0", plimsoll="0.1.0", system="6.1", driver=None, cards=0, free_bytes=1, clock=100.0
    )
    return {**plain, **other}  # type: ignore[typeddict-item]


def device(name: str, tflops: float = 1.0, **other: object) -> Device:
    return Device(
        name=name,
        model="card",
        simulated=False,
        asked_bytes=1,
        held_bytes=1,
        refused_beyond=True,
        tflops=tflops,
        busy=False,
        verdict="ok",
        facts=facts(**other),
    )


def test_what_should_be_known_is_warned_of() -> None:
    assert warnings([node("a"), node("b")], [device("a"), device("b")]) == []
    said = warnings(
        [node("a"), node("b"), node("c", alive=False, gone="no heartbeat")],
        [device("a", 2.0, cards=1), device("b", 0.5, ray="2.60.1", python="3.11.3", clock=103.0)],
    )
    assert said == [
        "c is missing: no heartbeat",
        "Python differs: a has 3.11.2, b has 3.11.3",
        "Ray differs: a has 2.60.0, b has 2.60.1",
        "clocks are 3.0 s apart, or a node is slow to answer",
        "graphics cards of NVIDIA's in a: 1 there, 0 used",
        "b computes at 0.500 TFLOP/s, another card at 2.000",
    ]


def test_of_a_busy_device_no_figure_is_shown() -> None:
    busy = Device(**{**device("b"), "held_bytes": None, "tflops": None, "busy": True, "verdict": "busy: 0 B are free"})
    report = Report(right=False, devices=[device("a"), busy], links=[], warnings=[])
    shown = table(report).splitlines()
    assert [line.split()[:5] for line in shown[1:3]] == [["a", "1", "B", "1", "B"], ["b", "-", "-", "-", "-"]]
    assert shown[-1] == "what was tried works; not all could be"
    failed = Device(**{**busy, "busy": False, "verdict": "busy it is not"})
    assert table(Report(right=False, devices=[failed], links=[], warnings=[])).endswith("\nnot all of it works")


def test_who_is_gone_is_missed_until_its_machine_joins_again() -> None:
    def one(name: str, number: int, alive: bool) -> Node:
        made = node(f"{name}#{number}", alive=alive)
        made["name"], made["ip"] = name, name.partition("/")[0]
        return made

    def listed(*nodes: tuple[Node, int, int, bool]) -> list[str]:
        lives = {node["id"]: Life(start, end, left) for node, start, end, left in nodes}
        return [node["id"] for node in of_interest([node for node, *_ in nodes], lives)]

    a, b = (one("m/a", 1, True), 10, 0, False), (one("m/b", 1, False), 11, 50, False)
    assert listed(a, b) == ["m/a#1", "m/b#1"]
    # It is there again; or its machine is, with fewer devices; or it has left since.
    assert listed(b, a, (one("m/b", 2, True), 60, 0, False)) == ["m/a#1", "m/b#2"]
    assert listed((one("m/a", 1, False), 10, 50, False), b, (one("m/a", 2, True), 60, 0, False)) == ["m/a#2"]
    assert listed(a, b, (one("m/b", 2, False), 60, 70, True)) == ["m/a#1"]
    # Of another machine that says nothing.
    assert listed(b, (one("n/a", 1, True), 60, 0, False)) == ["n/a#1", "m/b#1"]


def reached_after(monkeypatch: pytest.MonkeyPatch, failures: list[OSError]) -> list[tuple[str, int]]:
    """Connections fail so, one after the other, and then come about; where they were tried."""
    tried, connect, failing = list[tuple[str, int]](), socket.create_connection, iter(failures)

    def connects(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(address)
        if (failure := next(failing, None)) is not None:
            raise failure
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", connects)
    monkeypatch.setattr(joining, "LOOK_SECONDS", 0.01)
    return tried


def no_way(number: int = errno.EHOSTUNREACH) -> OSError:
    return OSError(number, os.strerror(number))


def test_a_way_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        tried = reached_after(monkeypatch, [no_way(), no_way(errno.ENETUNREACH), TimeoutError("timed out")])
        joining.check_answers(address, 10.0)
        assert len(tried) == 4
        # Who only looks is told at once.
        tried = reached_after(monkeypatch, [no_way()])
        with pytest.raises(plimsoll.InputError, match=f"^nobody answers at {address}: no way leads there\n"):
            joining.check_answers(address)
        assert len(tried) == 1
    tried = reached_after(monkeypatch, [no_way()] * 1000)
    began = time.monotonic()
    with pytest.raises(plimsoll.InputError, match="no way leads there") as caught:
        joining.check_answers(address, 0.2)
    assert 0.2 <= time.monotonic() - began < 5.0 and len(tried) > 2
    assert "is the cable in" in str(caught.value) and "rrno" not in str(caught.value)


def test_a_machine_that_answers_that_nobody_listens_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    tried = reached_after(monkeypatch, [])
    with pytest.raises(plimsoll.InputError, match=f"nobody answers at {address}: the machine is there, and no head on it"):
        joining.check_answers(address, 10.0)
    assert len(tried) == 1
    for wrong in ("10.0.0.1:many", "10.0.0.1:73000"):
        with pytest.raises(plimsoll.InputError, match=f"`{wrong}` is no address of a machine"):
            joining.check_answers(wrong, 10.0)


def test_who_has_dropped_out_is_told_what_it_joined_with() -> None:
    words = ["join", "10.0.0.1", "--token", "sesame", "--devices", "virtual:a=600MiB@0.5", "--name", "second", "--ports", "7500"]
    ended = ours.Raylet("b/cpu", "cpu", 2**22 + 1, 1)
    joined: list[str] = []

    def joins(*, words: str, **_: object) -> ours.Joined:
        joined.append(words)
        raise plimsoll.InputError("it is not tried here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "join", joins)
        assert commands.main(words) == 2
    # The token stays in its file.
    assert joined == ["plimsoll join 10.0.0.1 --name second --devices virtual:a=600MiB@0.5 --ports 7500"]
    ours.keep(ours.Joined("10.0.0.1:7500", "10.0.0.2", False, [ended], joined[0]))
    def told() -> str:
        with pytest.raises(plimsoll.InputError) as caught, cluster.connected():
            pass
        return str(caught.value)

    first = told()
    assert first.startswith("this machine has dropped out of the cluster at 10.0.0.1:7500: ")
    assert f"takes part again with what it joined with: {joined[0]}" in first
    # One whose part runs, and which the head has given up, is told at once, too: Ray would wait for a minute.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "serves", lambda _: True)
        patch.setattr(joining, "check_answers", lambda *_: None)
        patch.setattr(joining, "_alive", lambda _: {"a/cpu": "10.0.0.1"})
        assert told() == first
    # So is a machine whose own head is gone, where what it had started beside that has not ended yet.
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    ours.keep(ours.Joined(nobody, "127.0.0.1", True, [ended], "plimsoll join --head"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "serves", lambda _: True)
        assert "takes part again with what it joined with: plimsoll join --head" in told()


def test_rates_of_all_that_is_no_gpu_are_known_before_a_part_starts() -> None:
    asked: list[list[str]] = []

    def named(settings: list[str]) -> str:
        asked.append(settings)
        return "[]"

    gpu = devices.Device("cuda:0", "cuda", "a card", 8192 * MIB, "cuda:0")
    simulated = devices.Device("virtual:a", "virtual", "part of a processor", 600 * MIB, "virtual:a=600MiB@0.5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "named_devices", named)
        devices.measure([gpu])
        assert asked == []
        devices.measure([gpu, simulated])
    assert asked == [['run.devices="virtual:a=600MiB@0.5"']]


def test_looking_at_devices_measures_no_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "cache"))
    began = time.monotonic()
    cpu, part = devices.of_this_machine("cpu=1GiB,virtual:a=600MiB@0.5")
    assert (cpu.line_bytes, part.line_bytes) == (1024 * MIB, 600 * MIB)
    assert time.monotonic() - began < 5.0 and not (tmp_path / "cache" / "devices.json").exists()
    with pytest.raises(plimsoll.InputError, match="`ray:a/cuda:0` is a device of a cluster"):
        devices.of_this_machine("ray:a/cuda:0")


def test_a_head_that_leaves_says_whose_cluster_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(joining, "others", lambda: ["beta", "gamma"])
    assert commands.main(["leave"]) == 0
    assert capsys.readouterr().err.startswith("warning: this machine is the head of the cluster, which ends for beta, gamma, too: ")
    monkeypatch.setattr(joining, "others", list)
    assert commands.main(["leave"]) == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster", "--bogus"], "error: `--bogus` is unknown to `plimsoll cluster`\n  hint: what there is: plimsoll cluster --help\n"),
        (["join", "--ports", "many"], "error: argument --ports: invalid int value: 'many'\n  hint: what there is: plimsoll join --help\n"),
    ],
)
def test_a_wrong_word_is_an_error_like_any_other(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([*words, "--json"]) == 2
    told = capsys.readouterr()
    assert told.err == said and json.loads(told.out)["error"]["exit"] == 2


def test_nobody_reads_the_words_of_ray_or_numbers_of_errors() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    assert reason(exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError: RPC error", b"x" * 16)) == "it cannot be reached"
    assert reason(exceptions.ActorDiedError()) == "its process has ended, or is cut off"
    assert reason(exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")) == "it does not answer"
    failed = exceptions.RayTaskError("answer", "Traceback", no_way())
    assert reason(failed) == reason(failed.as_instanceof_cause()) == "no way leads there"
    fits = exceptions.RayTaskError("take", "Traceback", plimsoll.DoesNotFit("too much", ["take less"]))
    assert reason(fits.as_instanceof_cause()) == "too much"
    assert reason(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "no space left on device"
    assert reason(KeyError("a")) == "KeyError: 'a'"


def test_short_times_are_shown_in_a_unit_that_shows_them() -> None:
    assert [span(seconds) for seconds in (4.2e-6, 0.00035, 0.0012)] == ["4 µs", "350 µs", "1.20 ms"]


def test_tables_line_up() -> None:
    assert columns([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc  d"


def test_without_ray_a_command_says_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.3")
    assert commands.main(["cluster", "--json"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: this needs Ray 2.60; ") and " has 2.9.3\n" in said.err
    assert json.loads(said.out)["error"]["exit"] == 2


@pytest.fixture
def no_ray(tmp_path: Path) -> dict[str, str]:
    """An environment in which Ray is too old."""
    # None may be asked for before its version.
    (tmp_path / "ray.py").write_text("raise ImportError('it is too old')")
    (tmp_path / "ray-2.9.3.dist-info").mkdir()
    (tmp_path / "ray-2.9.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.3\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "RAY_ADDRESS": "127.0.0.1:9"}


@pytest.mark.parametrize("words", [("train", "--devices", "ray"), ("plan", "--devices", "ray"), ("join", "--head")])
def test_without_ray_the_command_line_says_what_brings_it(
    command: Path, tmp_path: Path, no_ray: dict[str, str], words: tuple[str, ...]
) -> None:
    said = subprocess.run([command, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=no_ray)
    assert said.returncode == 2
    assert said.stderr.startswith("error: this needs Ray 2.60; ") and " has 2.9.3\n" in said.stderr, said.stderr


LEFT_JSON = """{
  "address": "192.0.2.1:7300",
  "processes_ended": 2,
  "ends_for": []
}
"""


def test_a_machine_leaves_without_ray(command: Path, tmp_path: Path, no_ray: dict[str, str]) -> None:
    def leaves(*words: str) -> tuple[int, str]:
        words = (str(command), "leave", *words)
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=no_ray)
        return ended.returncode, ended.stdout

    assert leaves() == (0, "this machine is part of no cluster\n")
    for words, said in ((), "left 192.0.2.1:7300; processes ended: 2\n"), (("--json",), LEFT_JSON):
        leader, raylet = session(1)
        ours.keep(ours.Joined("192.0.2.1:7300", "192.0.2.2", False, [raylet]))
        assert leaves(*words) == (0, said)
        leader.wait(10)
        assert ours.members(raylet) == []


def test_an_answer_that_nobody_reads_is_no_failure(command: Path, tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        ended = subprocess.run([command, "leave"], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path)
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_program_without_a_python_beside_it_takes_the_one_of_the_shell(command: Path, tmp_path: Path) -> None:
    alone = shutil.copy(command, tmp_path / "plimsoll")

    def leaves(path: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": path}
        env.pop("PLIMSOLL_PYTHON", None)
        return subprocess.run([alone, "leave"], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env)

    found = leaves(str(Path(sys.executable).parent))
    assert (found.returncode, found.stdout) == (0, "this machine is part of no cluster\n"), found.stderr
    nobody = leaves("/nonexistent")
    assert nobody.returncode == 2 and "need Python with Plimsoll's wheel: python3 cannot be started" in nobody.stderr, nobody.stderr


def test_commands_are_handed_over_with_all_their_words(command: Path, tmp_path: Path) -> None:
    (tmp_path / "plimsoll").mkdir()  # A folder of that name in the way is no package.
    helped = subprocess.run([command, "join", "--help"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert helped.returncode == 0 and "--head" in helped.stdout and "--ports" in helped.stdout
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
    assert nobody.stderr.startswith("error: several machines need Python with Plimsoll's wheel: /nonexistent/python3")
