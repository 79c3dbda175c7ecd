"""The helper process between a run and Ray.

It resolves the devices that a run file names, has Ray reserve their memory and place a worker on each, and forwards requests to
the workers. The run starts it and speaks with it over a pipe (``crates/plimsoll-train/src/remote/ray.rs`` is the other end).
When this process ends, Ray ends the workers. Tensors pass neither through this process nor through Ray: workers have
connections of their own.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any

from plimsoll import _native
from plimsoll.errors import Bug, DoesNotFit, InputError, PlimsollError, Stopped
from plimsoll.ray import local_state, ports
from plimsoll.ray.cluster import Node, UnreservedResources, alive_nodes, budget_bytes, connected, nodes, unreserved_resources
from plimsoll.ray.devices import DeviceAttributes, parse_devices
from plimsoll.ray.failures import describe

MIB = 1 << 20
#: Seconds that a worker has to start, which includes the start of a process.
START_TIMEOUT_SECONDS = 60.0
#: Seconds between two checks whether a node is alive.
POLL_SECONDS = 1.0
#: Seconds to wait for memory that is being freed, because Ray's accounting lags behind. A sweep also waits for runs that end.
FREED_TIMEOUT_SECONDS, SWEEP_FREED_TIMEOUT_SECONDS = 5.0, 20.0
#: Seconds to wait for Ray when this process frees its reservations. Ray also frees them after this process has ended.
RELEASE_TIMEOUT_SECONDS = 5.0
#: Seconds that the runs of a sweep have to stop after its end: one step and one checkpoint.
RUNS_STOP_TIMEOUT_SECONDS = 600.0
#: Environment variable with the placement group that a sweep has reserved for a run (``RESERVATION_ENV`` in ``remote/ray.rs``).
RESERVATION_ENV = "PLIMSOLL_RAY_KEPT"
#: Suffix and counter for unique names of workers and placement groups. Ray does not reuse a name while a handle exists, not even
#: of a dead actor. Processes of other machines may have the same pid.
UNIQUE_SUFFIX, NUMBERS = f"{os.getpid()}-{secrets.token_hex(3)}", itertools.count(1)


@dataclass
class RequestedDevice:
    """A device of the run, resolved to a node."""

    #: Name in the run: ``beta/virtual:b``.
    name: str
    #: Text of the run file: ``ray:beta/virtual:b@0.3``.
    text: str
    #: The load line to reserve: ``200MiB``.
    budget: str
    node: Node
    #: Resources that Ray reserves for the worker.
    bundle: dict[str, float]
    #: The device with which ``plimsoll join`` added its node to the cluster; ``None`` if another command did.
    joined_as: str | None = None
    #: Ray's scheduling strategy for the reservation, and the name of its placement group.
    strategy: Any = None
    group_name: str = ""

    @property
    def full_text(self) -> str:
        """The device with all its attributes: ``beta/virtual:b=200MiB@0.3``."""
        return _native.with_node_defaults(self.text, self.budget, self.joined_as)


class Worker:
    """The worker process on a device, an actor of Ray. The native device server does all the work."""

    def __init__(self, alone: bool) -> None:
        import ray

        gpu = 0 if os.environ.get("PLIMSOLL_RAY_DEVICE", "").startswith("cuda") else None
        # A worker without peers leaves the ports that a firewall allows to other workers.
        self.server = _native.DeviceServer(ray.util.get_node_ip_address(), [0] if alone else ports.wire_ports(), gpu)

    def device(self) -> str | None:
        """Returns the device with which ``plimsoll join`` added this node to the cluster; ``None`` if another command did."""
        return os.environ.get("PLIMSOLL_RAY_DEVICE")

    def answer(self, request: bytes) -> bytes:
        """Answers a request of the run."""
        return self.server.answer(request)


def resolve(texts: list[str], budget: str | None, listed: list[Node], unreserved: UnreservedResources) -> list[RequestedDevice]:
    """Resolves entries of ``run.devices`` to nodes; ``ray`` stands for all alive nodes.

    ``budget`` is the load line of each device that is named without one: an amount, or a share of unreserved memory.
    """
    alive = alive_nodes(listed)
    resolved: list[RequestedDevice] = []

    def add(node: Node, name: str, attributes: DeviceAttributes) -> None:
        if any(one.name == name for one in resolved):
            raise InputError(f"run.devices: {name} is named twice")
        resolved.append(_request_device(node, name, attributes, budget, unreserved, resolved))

    for attributes in itertools.chain.from_iterable(map(parse_devices, texts)):
        if attributes["host"] is None:
            for node in alive:
                _check_name(_device_name(node))
                add(node, _device_name(node), {**attributes, "text": f"ray:{_device_name(node)}"})
            continue
        name = f"{attributes['host']}/{attributes['device']}"
        by_name = {_device_name(node): node for node in alive}
        # A CPU beside other devices, or a simulated device that the run creates, uses the memory of its host.
        uses_host_memory = re.match("cpu$|virtual:", attributes["device"]) and attributes["budget"]
        # The last entry of a host counts, so this is its node with the most memory.
        by_memory = sorted(alive, key=lambda node: unreserved.get(node["id"], {}).get("memory", 0.0))
        by_host = {_device_name(node).partition("/")[0]: node for node in by_memory if uses_host_memory}
        found = by_name.get(name) or by_host.get(name.partition("/")[0])
        if found is None:
            raise _unknown_device(name, attributes, listed)
        add(found, name, attributes)
    return resolved


def _unknown_device(name: str, attributes: DeviceAttributes, listed: list[Node]) -> InputError:
    """Returns the error for a device that no alive node has."""
    host, names = name.partition("/")[0], [_device_name(node) for node in alive_nodes(listed)]
    host_nodes = [node for node in listed if _device_name(node).partition("/")[0] == host]
    if host_nodes and not alive_nodes(host_nodes) or any(_device_name(node) == name for node in host_nodes):
        return InputError(f"run.devices: {name} is lost", ["to see how it joins again, run on its machine: plimsoll cluster"])
    hints = [f"the cluster has: {', '.join(names)}"] if names else ["the cluster has no nodes: see plimsoll cluster"]
    if host_nodes and re.match("cpu$|virtual:", attributes["device"]):
        hints.insert(0, f"a device in the memory of the host needs a load line: ray:{name}=600MiB")
    return InputError(f"run.devices: the cluster has no node {name}", hints)


def _check_name(name: str) -> None:
    """Checks that a run file can name a device. A node that was not joined with ``plimsoll join`` may have any name."""
    try:
        parse_devices(f"ray:{name}")
    except InputError:
        hint = "expected HOST/DEVICE of letters, digits and `.-_`, such as alpha/cuda:0; plimsoll cluster lists the names"
        raise InputError(f"run.devices: the cluster has a device `{name}`, whose name is not valid in a run file", [hint]) from None


def _device_name(node: Node) -> str:
    """Returns the name of a node's device in run files. Without a slash, the name of the node is that of the host."""
    if "/" in node["name"]:
        return node["name"]
    return f"{node['name']}/{'cpu' if node['vram_mib'] is None else 'cuda:0'}"


def _request_device(
    node: Node,
    name: str,
    attributes: DeviceAttributes,
    budget: str | None,
    unreserved: UnreservedResources,
    before: list[RequestedDevice],
) -> RequestedDevice:
    """Resolves a device on a node, with its load line in whole MiB. ``before`` holds the run's devices resolved so far.

    Raises :class:`plimsoll.DoesNotFit` if the node has too little unreserved memory for the load line.
    """
    resource = "vram_mib" if node["vram_mib"] is not None and name == _device_name(node) else "memory"
    unit = MIB if resource == "vram_mib" else 1
    node_unreserved = int(unreserved.get(node["id"], {}).get(resource, 0.0)) * unit
    used_before = int(sum(one.bundle.get(resource, 0.0) for one in before if one.node["id"] == node["id"])) * unit
    left = node_unreserved - used_before
    own = attributes["budget"]
    line = _native.budget_bytes(own, node_unreserved) if own else min(left, _native.budget_bytes(budget or "100%", left))
    line_mib = line // MIB
    if line_mib == 0 or line_mib * MIB > left:
        total_mib = (budget_bytes(node) if resource == "vram_mib" else node["memory_bytes"]) // MIB
        free_text = f"{left // MIB} of its {total_mib} MiB are free"
        reservations = [one for one in node["reservations"] if one["resource"] == resource]
        owners = [f"{one['bytes'] // MIB} MiB are reserved for {one['owner']}" for one in reservations]
        more = [f"its node joined with {total_mib} MiB; to contribute more, leave and join again there with --devices"]
        hints = [*owners, *(more if line_mib > total_mib else []), "to see its runs: plimsoll cluster"]
        raise DoesNotFit(f"{name}: {line_mib} MiB are requested, and {free_text}" if line_mib else f"{name}: {free_text}", hints)
    return RequestedDevice(name, attributes["text"], f"{line_mib}MiB", node, {resource: line_mib * MIB // unit})


class Placement:
    """The reservations and workers of a run, or the reservations of a sweep."""

    def __init__(self, request: dict[str, Any]) -> None:
        listed = nodes()
        self.owner = _owner(request["run"], alive_nodes(listed))
        group_name = None if request["for_runs"] else os.environ.get(RESERVATION_ENV)
        if group_name is not None:
            self.devices = _reserved_by_sweep(group_name, request["devices"], listed)
        else:
            self.devices = _resolve_when_freed(request, listed)
            if not self.devices:
                raise InputError("the cluster has no devices")
            # A sweep reserves each device separately, because it may lose them separately.
            for devices in [[one] for one in self.devices] if request["for_runs"] else [self.devices]:
                if not _reserve(devices, self.owner):
                    if lost := _lost(devices):
                        hints = ["to see the available nodes: plimsoll cluster"]
                        raise InputError(f"run.devices: {' and '.join(lost)} cannot be reached any more", hints)
                    raise DoesNotFit("Ray cannot reserve the memory that the run needs", ["to see other runs: plimsoll cluster"])
        # If all devices were requested, the run is told which ones are missing.
        self.missing = [node["name"] for node in nodes() if not node["alive"]] if "ray" in request["devices"] else []
        # A run of a sweep has one device and no peers.
        self.alone = group_name is not None
        self.workers = dict[str, Any]()
        #: Names of the devices for which a thread restarts the worker or reserves the memory again.
        self.restarting: set[str] = set()
        self.lock, self.released = threading.Lock(), False
        try:
            self._start_workers()
        except BaseException:
            self.release()
            raise

    def _start_workers(self) -> None:
        for one in self.devices:
            self.workers[one.name] = _start_worker(one, self.alone, self.owner)
        for one in self.devices:
            started = self.workers[one.name].device.remote()
            try:
                one.joined_as = _wait_for_response(one, started)
            except Exception as error:
                raise InputError(f"the worker on {one.name} does not start: {describe(error)}") from error

    def reply(self) -> dict[str, Any]:
        """Returns the first message to the run: its devices with all attributes, and this machine's address and ports."""
        import ray

        ip, joined = ray.util.get_node_ip_address(), local_state.load_membership()
        # The run's own devices accept connections on the ports of this machine's first raylet, which a firewall allows.
        local = ports.raylet_ports(joined.base_port, 0) if joined and joined.ip == ip else None
        wires = list(range(local.wires_first, local.wires_last + 1)) if local else [0]
        return {"devices": [one.full_text for one in self.devices], "ip": ip, "ports": wires, "missed": self.missing}

    def available_reservations(self) -> dict[str, str]:
        """Returns the placement group of each available device by name, in which a sweep places its runs.

        From the first call on, the reservations belong to these runs, and this process has no workers.
        """
        import ray

        while self.workers:
            ray.kill(self.workers.popitem()[1])
        by_name = {node["name"]: node for node in alive_nodes(nodes())}
        available = [(one, by_name[one.node["name"]]) for one in self.devices if one.node["name"] in by_name]
        for one, node in available:
            if node["id"] != one.node["id"]:
                # The new reservation takes some time, in which others can be queried.
                self._run_in_background(one.name, self._reserve_again, one, node)
        return {one.name: one.group_name for one, node in available if node["id"] == one.node["id"]}

    def wait_until_unused(self) -> None:
        """Waits until no run of an ended sweep uses its reservation, at most some minutes. The runs save and stop meanwhile."""
        deadline = time.monotonic() + RUNS_STOP_TIMEOUT_SECONDS
        while time.monotonic() < deadline and any(_is_in_use(one, unreserved_resources()) for one in self.devices):
            time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """Ends the workers and frees the reservations. Ray would do so a moment after this process ends, too late for a next run."""
        import ray
        from ray.util.placement_group import remove_placement_group

        # From now on no worker is restarted.
        self.released = True
        for worker in list(self.workers.values()):
            ray.kill(worker)
        if not self.alone:
            groups = {one.strategy.placement_group.id: one.strategy.placement_group for one in self.devices}
            for group in groups.values():
                remove_placement_group(group)

    def answer(self, device: str, out_of_band: bool, request: bytes) -> bytes:
        """Forwards a request to a worker and returns its response. Restarts a worker that has ended, for later requests."""
        import ray

        worker = self.workers[device]
        method = worker.answer.options(concurrency_group="out_of_band") if out_of_band else worker.answer
        try:
            return bytes(ray.get(method.remote(request)))
        except (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError):
            if worker is self.workers[device]:
                (one,) = [one for one in self.devices if one.name == device]
                self._run_in_background(device, self._restart_worker, one, worker)
            raise

    def _run_in_background(self, device: str, task: Callable[[RequestedDevice, Any], object], one: RequestedDevice, argument: Any) -> None:
        """Runs a task for a device on a thread of its own, unless a task for the device is running."""

        def work() -> None:
            try:
                task(one, argument)
            except Exception as error:  # The next request tries again.
                print(_native.printable_text(f"{device}: {describe(error)}"), file=sys.stderr)
            finally:
                self.restarting.discard(device)

        with self.lock:
            if device not in self.restarting and not self.released:
                self.restarting.add(device)
                threading.Thread(target=work, daemon=True).start()

    def _restart_worker(self, one: RequestedDevice, ended: Any) -> None:
        """Replaces a worker that has ended, if its node is alive or has joined again."""
        import ray

        if self.workers[one.name] is not ended:
            return
        node = next((node for node in alive_nodes(nodes()) if node["name"] == one.node["name"]), None)
        if node is None or not self._reserve_again(one, node):
            return
        worker = _start_worker(one, self.alone, self.owner)
        try:
            _wait_for_response(one, worker.device.remote())
        except BaseException:
            ray.kill(worker)
            raise
        self.workers[one.name] = worker

    def _reserve_again(self, one: RequestedDevice, node: Node) -> bool:
        """Reserves the memory of a device on a node that has joined again; the old reservation was lost with the old node.

        Returns whether the memory is reserved.
        """
        from ray.util.placement_group import remove_placement_group

        if node["id"] == one.node["id"]:
            return True
        renewed = replace(one, node=node)
        if not _reserve([renewed], self.owner):
            return False
        before, one.node, one.strategy, one.group_name = one.strategy, node, renewed.strategy, renewed.group_name
        if all(other.strategy.placement_group.id != before.placement_group.id for other in self.devices):
            remove_placement_group(before.placement_group)
        return True


def _resolve_when_freed(request: dict[str, Any], listed: list[Node]) -> list[RequestedDevice]:
    """Resolves the requested devices, and waits some seconds for memory that is being freed.

    A reservation without a worker is about to be freed; without waiting, the run would get only the memory beside it. A sweep
    that gets nothing also waits for runs to end.
    """
    start = time.monotonic()
    while True:
        unreserved, candidates = unreserved_resources(), alive_nodes(listed)
        resolved, failure = list[RequestedDevice](), None
        try:
            resolved = resolve(request["devices"], request["budget"], listed, unreserved)
            # Nodes of other runs do not matter.
            candidates = [one.node for one in resolved]
        except DoesNotFit as error:
            failure = error
        is_freeing = any(_has_unaccounted(node, unreserved) or node["reservations"] and not node["runs"] for node in candidates)
        for_sweep = request["for_runs"]
        may_free = is_freeing or failure is not None and for_sweep and any(node["reservations"] for node in candidates)
        timeout = SWEEP_FREED_TIMEOUT_SECONDS if failure and for_sweep else FREED_TIMEOUT_SECONDS
        if may_free and time.monotonic() - start < timeout:
            time.sleep(POLL_SECONDS / 2)
            listed = nodes()
        elif failure:
            raise failure
        else:
            return resolved


def _has_unaccounted(node: Node, unreserved: UnreservedResources) -> bool:
    """Returns whether some memory of a node is neither unreserved nor part of a reservation. Such memory is being freed."""

    def lacks(resource: str, total: int, unit: int) -> bool:
        left = int(unreserved.get(node["id"], {}).get(resource, 0.0)) * unit
        return left + sum(one["bytes"] for one in node["reservations"] if one["resource"] == resource) < total

    return lacks("memory", node["memory_bytes"], 1) or lacks("vram_mib", (node["vram_mib"] or 0) * MIB, MIB)


def _owner(run: str | None, alive: list[Node]) -> str:
    """Returns the name under which the cluster shows a run or a sweep: ``alpha:/runs/sums``, ``a sweep of alpha``."""
    import ray

    own = ray.util.get_node_ip_address()
    host = next((node["name"].partition("/")[0] for node in alive if node["ip"] == own), own)
    return f"{host}:{run}" if run else f"a sweep of {host}"


def _reserved_by_sweep(group_name: str, texts: list[str], listed: list[Node]) -> list[RequestedDevice]:
    """Returns the only device of a run that a sweep places in its reservation ``group_name``.

    Ray delays the run until earlier runs in the reservation have freed their memory.
    """
    from ray.util.placement_group import get_placement_group, placement_group_table

    try:
        group = get_placement_group(group_name)
        entry = placement_group_table(group)
        (one,) = resolve(texts, None, listed, {entry["bundles_to_node_id"][0]: entry["bundles"][0]})
    except (KeyError, ValueError) as error:
        raise InputError(f"{', '.join(texts)} is not available any more: its reservation is lost") from error
    one.strategy = _strategy(group, 0)
    return [one]


def _reserve(devices: list[RequestedDevice], owner: str) -> bool:
    """Has Ray reserve the memory of these devices, all or none. Returns whether it did."""
    from ray.util.placement_group import placement_group, remove_placement_group

    name = f"{owner} ({UNIQUE_SUFFIX}-{next(NUMBERS)})"
    selectors = [{"ray.io/node-id": one.node["id"]} for one in devices]
    group = placement_group([one.bundle for one in devices], bundle_label_selector=selectors, name=name)
    if not _wait_while_alive(devices, lambda: bool(group.wait(POLL_SECONDS))):
        remove_placement_group(group)
        return False
    for index, one in enumerate(devices):
        one.strategy, one.group_name = _strategy(group, index), name
    return True


def _strategy(group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _wait_while_alive(devices: list[RequestedDevice], is_done: Callable[[], bool]) -> bool:
    """Waits until ``is_done``. Returns ``False`` after a timeout, or if a node is lost, which Ray notices with a delay."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not is_done():
        if time.monotonic() > deadline or _lost(devices):
            return False
    return True


def _lost(devices: list[RequestedDevice]) -> list[str]:
    """Returns the names of those devices whose nodes are not alive."""
    alive = {node["id"] for node in alive_nodes(nodes())}
    return [one.name for one in devices if one.node["id"] not in alive]


def _is_in_use(one: RequestedDevice, unreserved: UnreservedResources) -> bool:
    """Returns whether a worker uses the reservation of a device."""
    group, (resource, amount) = one.strategy.placement_group, *one.bundle.items()
    key = f"{resource}_group_{one.strategy.placement_group_bundle_index}_{group.id.hex()}"
    left = unreserved.get(one.node["id"], {}).get(key, 0.0)
    return one.node["id"] in unreserved and left < amount


def _wait_for_response(one: RequestedDevice, response: Any) -> Any:
    """Waits for the response of a worker that is starting, and returns it. Raises if the node is lost or takes too long."""
    import ray

    if not _wait_while_alive([one], lambda: bool(ray.wait([response], timeout=POLL_SECONDS)[0])):
        raise InputError("its node is lost, or takes too long")
    return ray.get(response)


def _start_worker(one: RequestedDevice, alone: bool, owner: str) -> Any:
    """Starts a worker on a device, within its reservation."""
    import ray

    # No restarts by Ray: its handle would wait for them, while `Placement` has to know that a worker has ended.
    worker = ray.remote(max_restarts=0, max_concurrency=1, concurrency_groups={"out_of_band": 4})(Worker)
    return worker.options(
        num_cpus=0,
        memory=one.bundle.get("memory"),
        resources={name: amount for name, amount in one.bundle.items() if name != "memory"},
        name=f"{owner} ({UNIQUE_SUFFIX}-{next(NUMBERS)})",
        scheduling_strategy=one.strategy,
    ).remote(alone)


def _send(output: IO[bytes], *parts: bytes) -> None:
    output.write(sum(map(len, parts)).to_bytes(8, "little"))
    for part in parts:
        output.write(part)
    output.flush()


def _receive(source: IO[bytes]) -> bytes | None:
    """Reads the next message; ``None`` at the end of the stream."""
    length = source.read(8)
    return source.read(int.from_bytes(length, "little")) if len(length) == 8 else None


def forward_requests(placement: Placement, source: IO[bytes], output: IO[bytes]) -> None:
    """Forwards requests of the run to workers until the run ends. An unresponsive device does not block the requests for others."""
    output_lock = threading.Lock()

    def forward(header: dict[str, Any], request: bytes) -> None:
        failure, response = None, b""
        try:
            if header["device"] is None:
                response = json.dumps(placement.available_reservations()).encode()
            else:
                response = placement.answer(header["device"], header["aside"], request)
        except Exception as error:  # The run gets the failure as the response.
            failure = describe(error)
        response_header = json.dumps({"number": header["number"], "failed": failure}).encode()
        with output_lock:
            _send(output, len(response_header).to_bytes(8, "little"), response_header, response)

    threads = ThreadPoolExecutor(max_workers=8 * len(placement.devices), thread_name_prefix="forward")
    while (message := _receive(source)) is not None:
        header_end = 8 + int.from_bytes(message[:8], "little")
        threads.submit(forward, json.loads(message[8:header_end]), message[header_end:])


def main() -> None:
    """Serves one run over standard input and output."""
    source, output = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # All other output of this process goes to standard error.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.loads(_receive(source) or b"{}")
    try:
        with connected():
            placement = Placement(request)
            _send(output, json.dumps(placement.reply()).encode())
            forward_requests(placement, source, output)
            if request["for_runs"]:
                placement.wait_until_unused()
            # Without a head the calls to Ray never return. Threads that still wait for a worker end with this process.
            release = threading.Thread(target=placement.release, daemon=True)
            release.start()
            release.join(RELEASE_TIMEOUT_SECONDS)
    except PlimsollError as error:
        failure = error
    except Exception as error:
        failure = Bug(describe(error), traceback.format_exc().splitlines()[-3:])
    else:
        os._exit(0)
    if RESERVATION_ENV in os.environ and not request["for_runs"]:
        # The sweep had reserved the device a moment ago, so the run can resume later.
        failure = Stopped(failure.message, failure.hints)
    _send(output, json.dumps({"exit": failure.exit_code, "message": failure.message, "hints": failure.hints}).encode())
    os._exit(failure.exit_code)


if __name__ == "__main__":
    main()
