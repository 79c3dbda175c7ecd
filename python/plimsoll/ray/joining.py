"""``join`` and ``leave``: raylets of this machine, started and stopped."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from plimsoll.errors import InputError
from plimsoll.ray import ours, ports
from plimsoll.ray.reasons import reason, versions_differ
from plimsoll.ray.devices import Device, Given, measure, of_this_machine, share_out

#: What this needs of Ray, and the one that the wheel brings: machines of one cluster need the same, to the patch.
RAY, RAY_PATCH = "2.60", "2.60.0"
#: How long a raylet may take to start.
START_SECONDS = 90.0
#: How long the head may take to say who belongs to its cluster.
ANSWER_SECONDS = 10.0
#: How long it is looked for, and how often: after a cable was plugged in it takes some seconds until there is a way.
WAY_SECONDS, LOOK_SECONDS = 10.0, 0.5
#: How long it may take to answer that it is there.
THERE_SECONDS = 5.0

#: Asks for the address of an interface (netdevice(7)).
SIOCGIFADDR = 0x8915

#: A node that does not answer is missed after three looks, one a second and two seconds each: 9 s. A slow one answers in time.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # One that cannot find the head any more gives back all that its workers hold.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
    # A token that is refused is refused again.
    "RAY_NUM_REDIS_GET_RETRIES": "5",
    # Who leaves does so at once: a run on it is told, and would not end before it is.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # Ray would have its workers give way to every other program, and a team to the one that does.
    "RAY_worker_niceness": "0",
}
#: A piece of a file that goes to or from a worker (1 MiB, ``run/far/host.rs``) is said to whom it is for: Ray would put it in its
#: store of objects, which each process that has looked at it holds, beside its load line.
INLINE = {"RAY_max_direct_call_object_size": "2097152"}
#: What else would grow in a worker as it works: what it tells Ray of its tasks, which nobody asks for here, and heaps of threads
#: that keep what others could use.
LEAN = {"RAY_task_events_report_interval_ms": "0", "MALLOC_ARENA_MAX": "1"}


def check_ray() -> None:
    """That this interpreter has Ray, of the version that this goes with."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith(f"{RAY}."):
        hint = f"{sys.executable} -m pip install 'ray=={RAY_PATCH}'"
        raise InputError(f"this needs Ray {RAY}; {sys.executable} has {version}", [hint])


@ours.alone()
def join(
    *,
    head: bool,
    address: str | None,
    token: str | None,
    ip: str | None,
    devices: str | None,
    base: int,
    name: str | None,
    words: str = "plimsoll join",
) -> tuple[ours.Joined, list[tuple[Device, Given]]]:
    """Makes this machine the head of a new cluster, or a part of the one at ``address``, and says with which devices, and what each
    one's raylet has. ``words`` is what was typed for that, without the token."""
    check_ray()
    host = _host(name)
    before = ours.known()
    if before and _belongs(before):
        if not (ended := ours.ended(before)):
            raise InputError(f"this machine is part of {before.address} already", ["leave it first: plimsoll leave"])
        return before, _start_again(before, ended, devices, words)
    if before:
        # What is left of one that was killed, was cut off for long, or has lost its head.
        ours.stop(before.raylets)
    here = of_this_machine(devices)
    if address is not None and ":" not in address:
        address = f"{address}:{base}"
    if before and (before.head if head else before.address == address):
        # One that takes part again has the token that it had, or that the others were told.
        token = token or _kept_token()
    if ip in ("127.0.0.1", "localhost"):
        # Ray takes the machine's address in its place.
        ip = None
    if head:
        ip = ip or _own_ip()
        address, token = f"{ip}:{base}", token or secrets.token_hex(16)
        _check_free(ip, base)
    elif address is None or token is None:
        what = "where to?" if address is None else f"{address} lets nobody in without its token"
        raise InputError(what, ["plimsoll join ADDRESS --token TOKEN, as `plimsoll join --head` says it there"])
    else:
        check_answers(address, WAY_SECONDS)
        ip = ip or _ip_towards(address)
    token_before = _kept_token()
    ours.keep_token(token)
    joined = ours.Joined(address=address, ip=ip, head=head, words=words, base=base)
    try:
        there = {} if head else _alive(address)
        if there is None:
            raise _refused(address)
        for other, at in there.items():
            if other.partition("/")[0] == host and at != ip:
                raise InputError(f"{host} is the name of {at} already", ["give this machine another name: --name second"])
        for number in range(len(here)):
            for port in ports.of_raylet(base, number).pinned:
                # Ray would say so on some line of many, after half a minute.
                _check_free(ip, port)
        measure(here)
        shares = list(zip(here, share_out(here)))
        for number, (device, given) in enumerate(shares):
            first = head and number == 0
            _start(joined, f"{host}/{device.name}", device, given, number, first)
    except BaseException:
        ours.stop(joined.raylets)
        ours.forget()
        if before:
            # What it was part of it can still join again, with the token that it has.
            ours.keep(before)
        if before and token_before:
            ours.keep_token(token_before)
        raise
    if before and (had := [raylet.name for raylet in before.raylets]) != [raylet.name for raylet in joined.raylets]:
        print(f"it gave {', '.join(had)} before, as it was joined with: {before.words}", file=sys.stderr)
    return joined, shares


def _start_again(joined: ours.Joined, ended: list[int], devices: str | None, words: str) -> list[tuple[Device, Given]]:
    """Starts those of a machine's raylets that have ended, beside the others; what each of all has."""
    here, names = of_this_machine(devices), [raylet.name for raylet in joined.raylets]
    host = names[0].rpartition("/")[0]
    if words != joined.words or [f"{host}/{device.name}" for device in here] != names:
        gone = " and ".join(names[number] for number in ended)
        hints = [f"{gone} takes part again with: {joined.words}", "to give others, leave first: plimsoll leave"]
        raise InputError(f"this machine is part of {joined.address} already, and what it gave has partly ended", hints)
    measure(here)
    shares = list(zip(here, share_out(here)))
    for number in ended:
        # What is left of it.
        ours.stop([joined.raylets[number]])
        device, given = shares[number]
        _start(joined, names[number], device, given, number, head=False)
    return shares


def _host(name: str | None) -> str:
    """What this machine is called in the cluster, and so in ``run.devices``."""
    host = socket.gethostname() if name is None else name
    if re.fullmatch("[A-Za-z0-9._-]+", host) is None:
        hint = "its letters are a-z, A-Z, 0-9, `.`, `-` and `_`: --name second"
        raise InputError(f"`{host}` cannot be the name of a machine in run.devices", [hint])
    return host


def _kept_token() -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return ours.token_path().read_text()
    return None


def _refused(address: str) -> InputError:
    return InputError(f"{address} refuses the token", ["take the one that `plimsoll join --head` printed there"])


def _belongs(joined: ours.Joined) -> bool:
    """Whether a cluster still has this machine in it. A head that was started again knows of nobody, and Ray's processes that
    look for the one before it end by themselves only after a minute."""
    if not any(map(ours.serves, joined.raylets)):
        return False
    if joined.head and not ours.serves(joined.raylets[0]):
        # The head ends with it.
        return False
    try:
        check_answers(joined.address, 0.0 if joined.head else WAY_SECONDS)
    except InputError:
        # One elsewhere may be reached again; one that was here has ended.
        return not joined.head
    return takes_part(joined) is True


def takes_part(joined: ours.Joined) -> bool | None:
    """Whether the head knows of this machine's part, too: one that was cut off for long is missed there, though it runs. None where
    it refuses the token."""
    alive = _alive(joined.address)
    return None if alive is None else any(alive.get(raylet.name) == joined.ip for raylet in joined.raylets)


def _alive(address: str) -> dict[str, str] | None:
    """The nodes of a cluster, by their names, each with its address; none where the token is refused."""
    os.environ.update(environment())
    # Public for those alone whom a node lets in. Of this, Ray's types say nothing.
    client, errors = importlib.import_module("ray._raylet").GcsClient, importlib.import_module("ray.exceptions")
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        # What Ray has to say of a token is said here in our words.
        os.dup2(nowhere, 2)
        there = client(address=address).get_all_node_info(timeout=ANSWER_SECONDS).values()
    except errors.AuthenticationError:
        return None
    except (errors.RpcError, errors.RaySystemError, errors.GetTimeoutError) as error:
        hints = ["is it the head's port? does `plimsoll cluster` answer there?"]
        raise InputError(f"what listens at {address} does not answer as the head of a cluster: {reason(error)}", hints) from error
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
    return {node.node_name: node.node_manager_address for node in there if node.state == 0}


def others() -> list[str]:
    """The other machines of the cluster that this one is the head of, which is gone when this one leaves."""
    joined = ours.known()
    if joined is None or not joined.head or not any(map(ours.serves, joined.raylets)):
        return []
    with contextlib.suppress(Exception):  # One that does not answer any more has nobody who would miss it.
        alive = _alive(joined.address) or {}
        return sorted({name.rpartition("/")[0] or name for name, ip in alive.items() if ip != joined.ip})
    return []


def leave() -> tuple[ours.Joined, int] | None:
    """Stops what this machine has started, and says what that was."""
    joined = ours.known()
    if joined is None:
        return None
    ended = ours.stop(joined.raylets)
    ours.forget()
    return joined, ended


def environment() -> dict[str, str]:
    """What a process needs to speak with the cluster."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(ours.token_path()),
        # Ray would take one that is set here before that file, and passes over an empty one.
        "RAY_AUTH_TOKEN": "",
        "RAY_USAGE_STATS_ENABLED": "0",
        **INLINE,
    }


def _start(joined: ours.Joined, name: str, device: Device, given: Given, number: int, head: bool) -> None:
    """Starts a machine's raylet, counted from 0, and notes it in what is joined."""
    at = ports.of_raylet(joined.base, number)
    resources = "{}" if given.vram_mib is None else f'{{"vram_mib": {given.vram_mib}}}'
    words = {
        "node-ip-address": joined.ip,
        "node-name": name,
        "num-cpus": given.cpus,
        "num-gpus": given.gpus,
        "memory": given.memory_bytes,
        "object-store-memory": given.store_bytes,
        "resources": resources,
        "labels": ",".join(f"{key}={value}" for key, value in given.labels.items()),
        "node-manager-port": at.node_manager,
        "object-manager-port": at.object_manager,
        "runtime-env-agent-port": at.runtime_env_agent,
        "metrics-export-port": at.metrics_export,
        "dashboard-agent-listen-port": at.dashboard_agent,
        "dashboard-agent-grpc-port": at.dashboard_agent_grpc,
        "min-worker-port": at.worker_first,
        "max-worker-port": at.worker_last,
        # One a machine.
        "include-log-monitor": str(number == 0).lower(),
        # Of its own: Ray would take the head's path.
        "temp-dir": str(_temp_dir()),
    }
    if head:
        words |= {"port": joined.base, "include-dashboard": "false"}
        kind = ["--head", "--no-monitor"]
        # Of a head that was killed Ray would say that it runs, as long as it sees anybody look for it.
        (_temp_dir() / "ray_current_cluster").unlink(missing_ok=True)
    else:
        kind = [f"--address={joined.address}"]
    # Where grpcio is installed, the head would open a port for Ray's clients, which nobody asks for here: 10001.
    starts = "from ray.scripts import scripts; scripts.get_ray_client_dependency_error = lambda: 'unwanted'; scripts.main()"
    command = [sys.executable, "-c", starts, "start", "--block", "--disable-usage-stats", *kind]
    command += [f"--{word}={value}" for word, value in words.items()]
    env = {**os.environ, **environment(), **HEALTH, **LEAN, "PLIMSOLL_RAY_DEVICE": device.worker_name, "PLIMSOLL_RAY_WIRES": at.wires}
    # A worker that asks for no GPU may look at the one that is there.
    env |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "CUDA_VISIBLE_DEVICES": device.visible or ""}
    path = ours.folder() / f"{number}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    raylet = ours.Raylet(name, device.worker_name, process.pid, ours.started(process.pid) or 0)
    joined.raylets[number : number + 1] = [raylet]
    # Before it is waited for: `leave` finds it whatever becomes of this.
    ours.keep(joined)
    try:
        _wait(process, path, joined.address)
    except BaseException:
        ours.stop([raylet])
        raise


def _wait(process: subprocess.Popen[bytes], log: Path, address: str) -> None:
    patience = time.monotonic() + START_SECONDS
    while time.monotonic() < patience:
        said = log.read_text(errors="replace")
        if "Ray runtime started" in said:
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    said = log.read_text(errors="replace")
    if "nauthenticated" in said or "invalid auth" in said.lower() or "AuthenticationError" in said:
        raise _refused(address)
    if differ := versions_differ(said):
        raise InputError(differ, ["Ray takes no other: make a venv of that Python here, with that Ray in it"])
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    raise InputError(f"Ray does not start: {lines[-1] if lines else 'it says nothing'}", [f"all that it said: {log}"])


def _temp_dir() -> Path:
    """Where Ray has its sockets and logs: their paths must be short. Ray lets everybody into its folder; the one around it does not."""
    path = Path(tempfile.gettempdir()) / f"plimsoll-ray-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be made: {reason(error)}", ["name a folder that can be written to: TMPDIR=/tmp"]) from error
    owner = path.lstat()
    if owner.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
        raise InputError(f"{path} belongs to somebody else")
    path.chmod(0o700)
    return path / "r"


def _own_ip() -> str:
    """This machine's address towards everywhere else; where no way leads there, the only one that it has. Nothing is sent."""
    with contextlib.suppress(InputError):
        return _ip_towards("192.0.2.1:9")
    here = _addresses()
    if len(here) > 1:
        raise InputError(
            f"this machine has the addresses {', '.join(here)}, and none leads everywhere",
            [f"say by which the others reach it: --ip {here[0]}"],
        )
    # Without any network it can still be a cluster of its own.
    return here[0] if here else "127.0.0.1"


def _addresses() -> list[str]:
    """The addresses of this machine's interfaces, its own loop left out."""
    found = list[str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # It has none.
                answer = fcntl.ioctl(asks.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [ip for ip in found if not ip.startswith("127.")]


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"`{address}` is no address of a machine", ["such as 192.168.1.10, or 192.168.1.10:7300"])
    return host, int(port)


def _ip_towards(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_place(address))
        except OSError as error:
            raise InputError(f"no way leads to {address}: {reason(error)}") from error
        return str(probe.getsockname()[0])


def check_answers(address: str, patience_seconds: float = 0.0) -> None:
    """That somebody listens there: Ray itself would try for minutes. Where no way leads there, or nothing comes back, it is tried
    again for so long. A machine that says that nobody listens has answered."""
    at, until = _place(address), time.monotonic() + patience_seconds
    while True:
        try:
            return socket.create_connection(at, timeout=THERE_SECONDS).close()
        except ConnectionRefusedError as error:
            hints = ["run `plimsoll join --head` there, or say the port that it says"]
            raise InputError(f"nobody answers at {address}: the machine is there, and no head on it", hints) from error
        except OSError as error:
            if time.monotonic() >= until:
                hints = [
                    "is that machine on, and this its address? is the cable in, or the wireless network joined?",
                    "which ports a firewall must let through: docs/ray.md",
                ]
                raise InputError(f"nobody answers at {address}: {reason(error)}", hints) from error
        time.sleep(LOOK_SECONDS)


def _check_free(ip: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except (OSError, OverflowError) as error:
            hint = "choose others: --ports 7500, on every machine"
            raise InputError(f"{ip}:{port} cannot be taken: {reason(error)}", [hint]) from error
