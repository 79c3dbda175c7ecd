"""Joining and leaving a cluster: starts and stops the raylets of this machine."""

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
from plimsoll.ray import local_state, ports
from plimsoll.ray.devices import Device, RayletResources, divide_resources, local_devices, measure_rates
from plimsoll.ray.failures import describe, version_mismatch

#: The supported minor version of Ray, and the patch version that the wheel installs. All machines need the same patch version.
RAY, RAY_PATCH = "2.60", "2.60.0"
#: Seconds that a raylet has to start.
START_TIMEOUT_SECONDS = 90.0
#: Seconds that the head has to list the nodes of its cluster.
ANSWER_TIMEOUT_SECONDS = 10.0
#: Seconds to retry a connection to the head, and the interval. A network has no route for some seconds after it is plugged in.
CONNECT_RETRY_SECONDS, RETRY_INTERVAL_SECONDS = 10.0, 0.5
#: Seconds that the head has to accept a connection.
CONNECT_TIMEOUT_SECONDS = 5.0

#: The ioctl that reads the address of an interface (netdevice(7)).
SIOCGIFADDR = 0x8915

#: Ray's settings for the detection of lost nodes. A node is lost after three failed health checks, one per second with a
#: timeout of two seconds: 9 s. A slow node answers in time.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # A raylet that cannot reach the head ends, which frees the memory of its workers.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
    # A refused token stays refused, so few retries suffice.
    "RAY_NUM_REDIS_GET_RETRIES": "5",
    # A node leaves at once: a run on it would otherwise hear of it only at the end of the drain time.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # By default Ray lowers the priority of its workers, which would slow a whole team.
    "RAY_worker_niceness": "0",
}
#: Ray's setting for large results. Pieces of files are 1 MiB (``device_server.rs``) and are sent directly. In Ray's object store
#: they would be mapped by each process that reads them, outside its load line.
INLINE_RESULTS = {"RAY_max_direct_call_object_size": "2097152"}
#: Settings that keep the memory of a worker constant: no reports about tasks, and one heap for all threads.
CONSTANT_MEMORY = {"RAY_task_events_report_interval_ms": "0", "MALLOC_ARENA_MAX": "1"}


def check_ray() -> None:
    """Checks that this interpreter has a supported version of Ray."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith(f"{RAY}."):
        hint = f"{sys.executable} -m pip install 'ray=={RAY_PATCH}'"
        raise InputError(f"this needs Ray {RAY}; {sys.executable} has {version}", [hint])


@local_state.join_lock()
def join(
    *,
    head: bool,
    address: str | None,
    token: str | None,
    ip: str | None,
    devices: str | None,
    base_port: int,
    name: str | None,
    command: str = "plimsoll join",
) -> tuple[local_state.Membership, list[tuple[Device, RayletResources]]]:
    """Starts the head of a new cluster on this machine, or joins the cluster at ``address``.

    ``command`` is the command line without the token. Returns the membership, and each device with the resources of its raylet.
    """
    check_ray()
    host = _host_name(name)
    before = local_state.load_membership()
    if before and _is_member(before):
        if not (ended := local_state.ended_raylets(before)):
            raise InputError(f"this machine has already joined {before.address}", ["leave it first: plimsoll leave"])
        return before, _restart_raylets(before, ended, devices, command)
    if before:
        # Ends remaining processes of the old membership, after killed raylets or a lost head.
        local_state.stop(before.raylets)
    here = local_devices(devices)
    if address is not None and ":" not in address:
        address = f"{address}:{base_port}"
    if before and (before.head if head else before.address == address):
        # A machine that joins again uses its old token, which the other machines know.
        token = token or _saved_token()
    if ip in ("127.0.0.1", "localhost"):
        # Ray replaces it by the machine's address.
        ip = None
    if head:
        ip = ip or _own_ip()
        address, token = f"{ip}:{base_port}", token or secrets.token_hex(16)
        _check_port_free(ip, base_port)
    elif address is None or token is None:
        message = "the address of the head is missing" if address is None else f"{address} requires its token"
        raise InputError(message, ["plimsoll join ADDRESS --token TOKEN, as printed by `plimsoll join --head` on the head"])
    else:
        check_reachable(address, CONNECT_RETRY_SECONDS)
        ip = ip or _ip_towards(address)
    token_before = _saved_token()
    local_state.save_token(token)
    joined = local_state.Membership(address=address, ip=ip, head=head, command=command, base_port=base_port)
    try:
        nodes = {} if head else _alive_nodes(address)
        if nodes is None:
            raise _token_refused(address)
        for node, node_ip in nodes.items():
            if node.partition("/")[0] == host and node_ip != ip:
                raise InputError(f"{node_ip} has the name {host} already", ["give this machine another name: --name second"])
        for index in range(len(here)):
            for port in ports.raylet_ports(base_port, index).required:
                # Ray reports an occupied port only after half a minute, among many other lines.
                _check_port_free(ip, port)
        measure_rates(here)
        shares = list(zip(here, divide_resources(here)))
        for index, (device, resources) in enumerate(shares):
            _start_raylet(joined, f"{host}/{device.name}", device, resources, index, head=head and index == 0)
    except BaseException:
        local_state.stop(joined.raylets)
        local_state.delete_membership()
        if before:
            # The machine can still join its previous cluster again, with the token of that cluster.
            local_state.save_membership(before)
        if before and token_before:
            local_state.save_token(token_before)
        raise
    if before and (old := [raylet.name for raylet in before.raylets]) != [raylet.name for raylet in joined.raylets]:
        print(f"this machine gave {', '.join(old)} before, joined with: {before.command}", file=sys.stderr)
    return joined, shares


def _restart_raylets(
    joined: local_state.Membership, ended: list[int], devices: str | None, command: str
) -> list[tuple[Device, RayletResources]]:
    """Restarts the raylets of this machine with the indices ``ended``. Returns all devices with the resources of their raylets.

    Raises :class:`plimsoll.InputError` if ``command`` or ``devices`` differ from those with which the machine joined.
    """
    here, names = local_devices(devices), [raylet.name for raylet in joined.raylets]
    host = names[0].rpartition("/")[0]
    if command != joined.command or [f"{host}/{device.name}" for device in here] != names:
        ended_names = " and ".join(names[index] for index in ended)
        hints = [f"to start {ended_names} again: {joined.command}", "to give other devices, leave first: plimsoll leave"]
        raise InputError(f"this machine has already joined {joined.address}, and some of its raylets have ended", hints)
    measure_rates(here)
    shares = list(zip(here, divide_resources(here)))
    for index in ended:
        # Ends remaining processes of its session.
        local_state.stop([joined.raylets[index]])
        device, resources = shares[index]
        _start_raylet(joined, names[index], device, resources, index, head=False)
    return shares


def _host_name(name: str | None) -> str:
    """Returns the name of this machine in the cluster and in ``run.devices``: ``name``, or its host name if that is ``None``."""
    host = socket.gethostname() if name is None else name
    if re.fullmatch("[A-Za-z0-9._-]+", host) is None:
        hint = "allowed are a-z, A-Z, 0-9, `.`, `-` and `_`: --name second"
        raise InputError(f"`{host}` cannot be the name of a machine in run.devices", [hint])
    return host


def _saved_token() -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return local_state.token_path().read_text()
    return None


def _token_refused(address: str) -> InputError:
    return InputError(f"{address} refuses the token", ["use the token that `plimsoll join --head` printed there"])


def _is_member(joined: local_state.Membership) -> bool:
    """Returns whether this machine is still part of the cluster that it joined.

    A head that was restarted does not know its former nodes. Their raylets look for the old head for a minute before they end.
    """
    if not any(map(local_state.is_raylet_running, joined.raylets)):
        return False
    if joined.head and not local_state.is_raylet_running(joined.raylets[0]):
        # The head ends together with its raylet.
        return False
    try:
        check_reachable(joined.address, 0.0 if joined.head else CONNECT_RETRY_SECONDS)
    except InputError:
        # A head on another machine may become reachable again; a head on this machine has ended.
        return not joined.head
    return is_known_to_head(joined) is True


def is_known_to_head(joined: local_state.Membership) -> bool | None:
    """Returns whether the head lists a raylet of this machine; ``None`` if the head refuses the token.

    After a long network failure the head regards a running raylet as lost.
    """
    alive = _alive_nodes(joined.address)
    return None if alive is None else any(alive.get(raylet.name) == joined.ip for raylet in joined.raylets)


def _alive_nodes(address: str) -> dict[str, str] | None:
    """Returns the addresses of a cluster's alive nodes by node name; ``None`` if the head refuses the token."""
    os.environ.update(environment())
    # The public function works on nodes of the cluster only. Ray's type stubs omit this one.
    client, errors = importlib.import_module("ray._raylet").GcsClient, importlib.import_module("ray.exceptions")
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        # Ray prints about a refused token, which the caller reports in other words.
        os.dup2(devnull, 2)
        nodes = client(address=address).get_all_node_info(timeout=ANSWER_TIMEOUT_SECONDS).values()
    except errors.AuthenticationError:
        return None
    except (errors.RpcError, errors.RaySystemError, errors.GetTimeoutError) as error:
        hints = ["check that this is the port of the head, and that `plimsoll cluster` answers there"]
        raise InputError(f"the program at {address} does not answer as the head of a cluster: {describe(error)}", hints) from error
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)
    return {node.node_name: node.node_manager_address for node in nodes if node.state == 0}


def other_machines() -> list[str]:
    """Returns the names of the cluster's other machines if this machine is its head. Without the head, the cluster ends for them.

    The list is empty on a machine that is not the head, and if the head does not answer.
    """
    joined = local_state.load_membership()
    if joined is None or not joined.head or not any(map(local_state.is_raylet_running, joined.raylets)):
        return []
    with contextlib.suppress(Exception):  # A cluster whose head does not answer has ended for the others already.
        alive = _alive_nodes(joined.address) or {}
        return sorted({name.rpartition("/")[0] or name for name, ip in alive.items() if ip != joined.ip})
    return []


def leave() -> tuple[local_state.Membership, int] | None:
    """Stops the raylets of this machine.

    Returns the former membership and the number of ended processes; ``None`` if this machine has joined no cluster.
    """
    joined = local_state.load_membership()
    if joined is None:
        return None
    process_count = local_state.stop(joined.raylets)
    local_state.delete_membership()
    return joined, process_count


def environment() -> dict[str, str]:
    """Returns the environment variables with which a process connects to the cluster."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(local_state.token_path()),
        # A token in this variable would take precedence over the file. Ray ignores an empty one.
        "RAY_AUTH_TOKEN": "",
        "RAY_USAGE_STATS_ENABLED": "0",
        **INLINE_RESULTS,
    }


def _start_raylet(
    joined: local_state.Membership, name: str, device: Device, resources: RayletResources, index: int, head: bool
) -> None:
    """Starts a raylet of this machine, with ``head`` also the head of the cluster, and adds it to the membership record."""
    raylet_ports = ports.raylet_ports(joined.base_port, index)
    custom = "{}" if resources.vram_mib is None else f'{{"vram_mib": {resources.vram_mib}}}'
    options = {
        "node-ip-address": joined.ip,
        "node-name": name,
        "num-cpus": resources.cpus,
        "num-gpus": resources.gpus,
        "memory": resources.memory_bytes,
        "object-store-memory": resources.store_bytes,
        "resources": custom,
        "labels": ",".join(f"{key}={value}" for key, value in resources.labels.items()),
        "node-manager-port": raylet_ports.node_manager,
        "object-manager-port": raylet_ports.object_manager,
        "runtime-env-agent-port": raylet_ports.runtime_env_agent,
        "metrics-export-port": raylet_ports.metrics_export,
        "dashboard-agent-listen-port": raylet_ports.dashboard_agent,
        "dashboard-agent-grpc-port": raylet_ports.dashboard_agent_grpc,
        "min-worker-port": raylet_ports.worker_first,
        "max-worker-port": raylet_ports.worker_last,
        # One per machine.
        "include-log-monitor": str(index == 0).lower(),
        # Without this option, Ray would use the path of the head's folder.
        "temp-dir": str(_temp_dir()),
    }
    if head:
        options |= {"port": joined.base_port, "include-dashboard": "false"}
        kind = ["--head", "--no-monitor"]
        # With this file, Ray would regard a killed head as running while any process looks for it.
        (_temp_dir() / "ray_current_cluster").unlink(missing_ok=True)
    else:
        kind = [f"--address={joined.address}"]
    # If grpcio is installed, the head would open port 10001 for Ray clients. This disables the unused server.
    starts = "from ray.scripts import scripts; scripts.get_ray_client_dependency_error = lambda: 'unwanted'; scripts.main()"
    command = [sys.executable, "-c", starts, "start", "--block", "--disable-usage-stats", *kind]
    command += [f"--{option}={value}" for option, value in options.items()]
    env = {**os.environ, **environment(), **HEALTH, **CONSTANT_MEMORY}
    env |= {"PLIMSOLL_RAY_DEVICE": device.worker_name, "PLIMSOLL_RAY_WIRES": raylet_ports.wires}
    # A worker that requests no GPU may still see the GPU of its raylet.
    env |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "CUDA_VISIBLE_DEVICES": device.visible or ""}
    path = local_state.state_folder() / f"{index}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    raylet = local_state.Raylet(name, device.worker_name, process.pid, local_state.start_ticks(process.pid) or 0)
    joined.raylets[index : index + 1] = [raylet]
    # Recorded before its start is complete: `leave` finds it if this process is killed meanwhile.
    local_state.save_membership(joined)
    try:
        _wait_until_started(process, path, joined.address)
    except BaseException:
        local_state.stop([raylet])
        raise


def _wait_until_started(process: subprocess.Popen[bytes], log: Path, address: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        output = log.read_text(errors="replace")
        if "Ray runtime started" in output:
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    output = log.read_text(errors="replace")
    if "nauthenticated" in output or "invalid auth" in output.lower() or "AuthenticationError" in output:
        raise _token_refused(address)
    if mismatch := version_mismatch(output):
        raise InputError(mismatch, ["Ray requires equal versions: make a venv with that Python here, and install that Ray in it"])
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raise InputError(f"Ray does not start: {lines[-1] if lines else 'it printed nothing'}", [f"its whole output: {log}"])


def _temp_dir() -> Path:
    """Returns Ray's folder for sockets and logs.

    Paths of sockets must be short. Ray makes its folder accessible to all users, so the folder around it is private.
    """
    path = Path(tempfile.gettempdir()) / f"plimsoll-ray-{os.getuid()}"
    local_state.make_private_folder(path, "name another folder, in which you may write: TMPDIR=FOLDER")
    return path / "r"


def _own_ip() -> str:
    """Returns the address of this machine on its default route, or else its only address. Sends nothing.

    Without any address, returns the loopback address.
    """
    with contextlib.suppress(InputError):
        return _ip_towards("192.0.2.1:9")
    here = _interface_addresses()
    if len(here) > 1:
        raise InputError(
            f"this machine has the addresses {', '.join(here)} and no default route",
            [f"name the address by which the others reach it: --ip {here[0]}"],
        )
    # A machine without a network can be a cluster of its own.
    return here[0] if here else "127.0.0.1"


def _interface_addresses() -> list[str]:
    """Returns the addresses of this machine's interfaces without the loopback addresses."""
    found = list[str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # The interface has no address.
                answer = fcntl.ioctl(query.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [ip for ip in found if not ip.startswith("127.")]


def _parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"`{address}` is not an address of a machine", ["expected for example 192.168.1.10 or 192.168.1.10:7300"])
    return host, int(port)


def _ip_towards(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_parse_address(address))
        except OSError as error:
            raise InputError(f"no network route leads to {address}: {describe(error)}") from error
        return str(probe.getsockname()[0])


def check_reachable(address: str, retry_seconds: float = 0.0) -> None:
    """Checks that a program accepts connections at an address; Ray itself would try for minutes.

    Retries for ``retry_seconds`` while there is no route or no response. A refused connection is final.
    """
    parsed, deadline = _parse_address(address), time.monotonic() + retry_seconds
    while True:
        try:
            return socket.create_connection(parsed, timeout=CONNECT_TIMEOUT_SECONDS).close()
        except ConnectionRefusedError as error:
            hints = ["run `plimsoll join --head` there, or give the port that it printed"]
            raise InputError(f"no answer from {address}: the machine is reachable, but runs no head on this port", hints) from error
        except OSError as error:
            if time.monotonic() >= deadline:
                hints = [
                    "check that the machine is on, its address, and the network connection of both machines",
                    "for the ports that a firewall must allow, see docs/ray.md",
                ]
                raise InputError(f"no answer from {address}: {describe(error)}", hints) from error
        time.sleep(RETRY_INTERVAL_SECONDS)


def _check_port_free(ip: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except (OSError, OverflowError) as error:
            hint = "choose other ports, on every machine: --ports 7500"
            raise InputError(f"port {port} of {ip} is not available: {describe(error)}", [hint]) from error
