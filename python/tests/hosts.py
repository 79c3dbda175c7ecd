"""Two or three simulated hosts on one machine, as network namespaces.

Each has its own address, a link with a limited rate, and a cable that can be unplugged. The switch between them is a namespace
too, so the network of the machine itself does not change.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import plimsoll

# The folders of `ip` and `tc`, which are not in every user's PATH.
os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

#: The command line that the wheel has installed.
COMMAND = Path(sys.executable).parent / "plimsoll"
#: Counter of networks, of which several may exist at once.
NETWORKS = itertools.count()
#: Devices of the hosts of a cluster, and its token.
ALPHA, BETA, GAMMA = "virtual:a=600MiB@0.5", "virtual:b=300MiB@0.3", "virtual:c=300MiB@0.3"
TOKEN = "of-the-tests"
#: Seconds that a command may take.
COMMAND_TIMEOUT_SECONDS = 360


@dataclass
class Host:
    """A host that is connected to the switch."""

    name: str
    ip: str
    namespace: str
    switch: str
    port: str
    state: Path
    tmp: Path
    #: Additional environment variables of all its processes.
    env: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """Returns the environment of its processes, with its own state folder and its own folder for Ray's sockets."""
        return {**os.environ, "PLIMSOLL_RAY_STATE": str(self.state), "TMPDIR": str(self.tmp), **self.env}

    def _in_namespace(self, words: Sequence[str | Path]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *map(str, words)]

    def run(self, *words: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host."""
        return subprocess.run(
            self._in_namespace(words),
            env={**self.environment(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            cwd=self.tmp,
        )

    def plimsoll(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs `plimsoll` on the host."""
        return self.run(COMMAND, *words)

    def start(self, *words: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command on the host, in a session of its own."""
        process = subprocess.Popen(
            self._in_namespace(words),
            env={**self.environment(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=self.tmp,
        )
        self.started.append(process)
        return process

    def pull_cable(self) -> None:
        """Disconnects the host from the switch."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def plug_in(self) -> None:
        """Connects the host to the switch again."""
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def end(self) -> None:
        """Leaves the cluster and ends all started processes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.plimsoll("leave")
        self.end_started()

    def end_started(self) -> None:
        """Kills the started processes that are still running."""
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout:
                process.stdout.close()
        self.started.clear()


def missing_requirement() -> str | None:
    """Returns the reason why this machine cannot simulate hosts; `None` if it can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no `ip` or no `tc` (Debian: iproute2)"
    name = f"plm{os.getpid()}t"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=10)
    if tried.returncode:
        return f"network namespaces are not permitted: {tried.stderr.strip()}"
    tried = subprocess.run(["ip", "-n", name, "link", "add", "switch", "type", "bridge"], capture_output=True, text=True, timeout=10)
    _ip("netns", "del", name)
    return f"a bridge cannot be created in a namespace: {tried.stderr.strip()}" if tried.returncode else None


def prepare_script() -> None:
    """Exits with 2 if hosts cannot be simulated. Makes signals raise `SystemExit`, so that the cluster is removed at exit."""
    if missing := missing_requirement():
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))


@contextlib.contextmanager
def network(names: Sequence[str], *, rate: str = "1gbit") -> Iterator[list[Host]]:
    """Creates hosts on a switch, each of which sends at most at ``rate``."""
    mark, tmp = f"plm{os.getpid()}n{next(NETWORKS)}", Path(tempfile.mkdtemp(prefix="plm", dir="/tmp"))
    switch, hosts = f"{mark}s", list[Host]()
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names, 1):
            namespace, port, ip = f"{mark}h{number}", f"port{number}", f"10.77.0.{number}"
            _ip("netns", "add", namespace)
            state, own = tmp / f"state{number}", tmp / str(number)
            own.mkdir()
            hosts.append(Host(name, ip, namespace, switch, port, state, own))
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", namespace, "addr", "add", f"{ip}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            # The default route makes the host use this address. No route leads out of the switch.
            _ip("-n", namespace, "route", "add", "default", "via", "10.77.0.254")
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", "eth0", "root", *shape], check=True, timeout=10)
        yield hosts
    finally:
        for host in hosts:
            host.end()
        for namespace in [switch, *(host.namespace for host in hosts)]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=10)
        shutil.rmtree(tmp, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def cluster(devices: Sequence[str] = (ALPHA, BETA)) -> Iterator[list[Host]]:
    """Creates hosts that have joined a cluster with these devices. The first host is the head."""
    with network(["alpha", "beta", "gamma"][: len(devices)]) as (alpha, *others):
        for host in (alpha, *others):
            host.env["PLIMSOLL_CACHE"] = str(host.tmp)
            write_rates(host.tmp)
        join_head(alpha, devices[0], "--token", TOKEN)
        for host, device in zip(others, devices[1:]):
            join(host, device)
        yield [alpha, *others]


def join_head(host: Host, device: str = ALPHA, *words: str) -> None:
    """Starts the cluster on a host with this device. A host that was the head before still has the token."""
    joined = host.plimsoll("join", "--head", "--name", host.name, "--devices", device, *words)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.startswith(f"head of the cluster at {host.ip}:7300, as {host.ip}\n")
    assert f"{host.name}/{device.partition('=')[0]} (simulated)" in joined.stdout
    assert f"plimsoll join {host.ip}:7300 --token {TOKEN}\n" in joined.stdout


def join(host: Host, device: str = BETA) -> None:
    """Joins the cluster with this device."""
    joined = host.plimsoll("join", "10.77.0.1", "--name", host.name, "--token", TOKEN, "--devices", device)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.startswith(f"member of the cluster at 10.77.0.1:7300, as {host.ip}\n")


def repair_cluster(all_hosts: Sequence[Host], devices: Sequence[str] = (ALPHA, BETA)) -> None:
    """Makes all hosts members of the cluster again, after a test that failed half way."""
    head, *others = all_hosts
    for host in all_hosts:
        host.plug_in()
    state = head.plimsoll("cluster", "--json")
    alive = {node["ip"] for node in json.loads(state.stdout)["nodes"] if node["alive"]} if state.returncode == 0 else set()
    if head.ip not in alive:
        head.plimsoll("leave")
        join_head(head, devices[0], "--token", TOKEN)
    for host, device in zip(others, devices[1:]):
        if host.ip not in alive:
            host.plimsoll("leave")
            join(host, device)


def write_rates(folder: Path) -> None:
    """Stores fixed rates as if they had been measured, so that plans do not depend on the load of this machine."""
    cpu = plimsoll.devices()["devices"][0]
    rates = {
        "f32_flops": 5e10,
        "bf16_flops": 5e10,
        "memory_bytes_per_second": 2e10,
        "op_seconds": 2e-6,
        "host_link": {"bytes_per_second": 1e10, "latency_seconds": 2e-6},
        "measured": True,
    }
    entry = {"plimsoll": plimsoll.__version__, "device": "cpu", "model": cpu["model"], "features": cpu["features"], "rates": rates}
    entries = [{**entry, "threads": threads} for threads in range(1, cpu["threads"] + 1)]
    (folder / "devices.json").write_text(json.dumps(entries))
