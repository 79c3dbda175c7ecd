"""Two or three hosts on one machine, as network namespaces: each with an address of its own, a link that is shaped, and a cable
that can be pulled. The switch between them is a namespace, too: nothing of the machine's own network is touched."""

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

# Where `ip` and `tc` are, and not every user looks.
os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

#: The command line that the wheel has brought.
COMMAND = Path(sys.executable).parent / "plimsoll"
#: Numbers of networks: several may be there at once.
NETWORKS = itertools.count()
#: What hosts of a cluster give it, and who may come in.
ALPHA, BETA, GAMMA = "virtual:a=600MiB@0.5", "virtual:b=300MiB@0.3", "virtual:c=300MiB@0.3"
TOKEN = "of-the-tests"
#: How long a command may take.
COMMAND_SECONDS = 150


@dataclass
class Host:
    """A host that has joined the switch."""

    name: str
    ip: str
    namespace: str
    switch: str
    port: str
    state: Path
    tmp: Path
    #: What else is set for all that runs here.
    env: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """What is different here: the state folder, and where Ray has its sockets."""
        return {**os.environ, "PLIMSOLL_RAY_STATE": str(self.state), "TMPDIR": str(self.tmp), **self.env}

    def _words(self, words: Sequence[str | Path]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *map(str, words)]

    def run(self, *words: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command here to its end."""
        return subprocess.run(
            self._words(words),
            env={**self.environment(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            cwd=self.tmp,
        )

    def plimsoll(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs the command line here."""
        return self.run(COMMAND, *words)

    def start(self, *words: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command here, in a session of its own."""
        process = subprocess.Popen(
            self._words(words),
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
        """From now on nothing comes or goes."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def plug_in(self) -> None:
        """The cable is back."""
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def end(self) -> None:
        """Ends what was started here, whatever its state."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.plimsoll("leave")
        self.end_started()

    def end_started(self) -> None:
        """Ends what was started here and has not ended."""
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout:
                process.stdout.close()
        self.started.clear()


def refusal() -> str | None:
    """Why there can be no namespaces here; none where there can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no `ip` or no `tc` (Debian: iproute2)"
    name = f"plm{os.getpid()}t"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=10)
    if tried.returncode:
        return f"network namespaces are not permitted: {tried.stderr.strip()}"
    tried = subprocess.run(["ip", "-n", name, "link", "add", "switch", "type", "bridge"], capture_output=True, text=True, timeout=10)
    _ip("netns", "del", name)
    return f"no bridge can be made in a namespace: {tried.stderr.strip()}" if tried.returncode else None


def ready_for_script() -> None:
    """Ends a script with 2 where there can be no hosts; whoever ends it later leaves no cluster behind."""
    if refused := refusal():
        print(f"error: {refused}", file=sys.stderr)
        sys.exit(2)
    for ends in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ends, lambda *_: sys.exit(1))


@contextlib.contextmanager
def network(names: Sequence[str], *, rate: str = "1gbit") -> Iterator[list[Host]]:
    """Hosts on a switch; each sends at ``rate`` at most."""
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
            # Asked for the way to anywhere, a host names its own address; nothing leads out of the switch.
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
    """Hosts that give these devices, the first of which is the head of a cluster that the others have joined."""
    with network(["alpha", "beta", "gamma"][: len(devices)]) as (alpha, *others):
        for host in (alpha, *others):
            host.env["PLIMSOLL_CACHE"] = str(host.tmp)
            know_rates(host.tmp)
        join_head(alpha, devices[0], "--token", TOKEN)
        for host, device in zip(others, devices[1:]):
            join(host, device)
        yield [alpha, *others]


def join_head(host: Host, device: str = ALPHA, *words: str) -> None:
    """The first joins, with this device; one that was the head has the token still."""
    joined = host.plimsoll("join", "--head", "--name", host.name, "--devices", device, *words)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.startswith(f"the head of the cluster at {host.ip}:7300, as {host.ip}\n")
    assert f"{host.name}/{device.partition('=')[0]} (simulated)" in joined.stdout
    assert f"plimsoll join {host.ip}:7300 --token {TOKEN}\n" in joined.stdout


def join(host: Host, device: str = BETA) -> None:
    """One of the others joins, with this device."""
    joined = host.plimsoll("join", "10.77.0.1", "--name", host.name, "--token", TOKEN, "--devices", device)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.startswith(f"part of the cluster at 10.77.0.1:7300, as {host.ip}\n")


def mend(there: Sequence[Host], devices: Sequence[str] = (ALPHA, BETA)) -> None:
    """Whoever a test that failed half way has left out of the cluster is part of it again."""
    head, *others = there
    for host in there:
        host.plug_in()
    said = head.plimsoll("cluster", "--json")
    alive = {node["ip"] for node in json.loads(said.stdout)["nodes"] if node["alive"]} if said.returncode == 0 else set()
    if head.ip not in alive:
        head.plimsoll("leave")
        join_head(head, devices[0], "--token", TOKEN)
    for host, device in zip(others, devices[1:]):
        if host.ip not in alive:
            host.plimsoll("leave")
            join(host, device)


def know_rates(folder: Path) -> None:
    """Rates as if they had been measured: plans are the same however busy this machine is."""
    cpu = plimsoll.devices()["devices"][0]
    rates = {
        "f32_flops": 5e10,
        "bf16_flops": 5e10,
        "memory_bytes_per_second": 2e10,
        "op_seconds": 2e-6,
        "host_link": {"bytes_per_second": 1e10, "latency_seconds": 2e-6},
        "measured": True,
    }
    of = {"plimsoll": plimsoll.__version__, "device": "cpu", "model": cpu["model"], "features": cpu["features"], "rates": rates}
    known = [{**of, "threads": threads} for threads in range(1, cpu["threads"] + 1)]
    (folder / "devices.json").write_text(json.dumps(known))
