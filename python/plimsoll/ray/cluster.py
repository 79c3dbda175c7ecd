"""The state of the cluster: its nodes, their devices and free memory, their runs and reservations."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from plimsoll import api
from plimsoll.errors import InputError
from plimsoll.ray import local_state, membership
from plimsoll.ray.devices import format_bytes
from plimsoll.ray.failures import describe

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: Seconds that a node has to answer, which includes the start of a process.
ANSWER_TIMEOUT_SECONDS = 30.0

#: Ray's numbers for the death reasons of a node that was asked to end: expected termination (1), and the end after
#: draining (3, 4).
LEFT_REASONS = (1, 3, 4)

#: Name of the processes that only read (:mod:`plimsoll.ray.inspection`). They belong to no run.
INSPECTION_OWNER = "plimsoll inspection"


class Worker(TypedDict):
    """A worker process of a run on a node."""

    #: The host and the folder of the run: ``alpha:/home/me/runs/sums``.
    owner: str
    pid: int


class Reservation(TypedDict):
    """Memory that Ray has reserved on a node."""

    #: The host and the folder of a run, or ``a sweep of alpha``.
    owner: str
    #: The kind of memory: ``vram_mib`` for that of the device, or ``memory`` for that of the host.
    resource: str
    bytes: int


class Node(TypedDict):
    """A node of the cluster: a raylet with its device."""

    #: ``alpha/cuda:0``; for a node that was not joined with ``plimsoll join``, its address.
    name: str
    id: str
    ip: str
    alive: bool
    #: Ray's reason for the loss of the node.
    lost_reason: NotRequired[str]
    #: Product name of the device.
    model: str
    simulated: bool
    cpus: float
    gpus: float
    #: The load line of the device in MiB; ``None`` for a CPU, which uses the machine's memory.
    vram_mib: int | None
    memory_bytes: int
    #: Memory of the device that a new run can get: measured free memory, but at most the unreserved memory. ``None`` if
    #: the node did not answer.
    free_bytes: int | None
    #: The reason why the node did not answer.
    no_answer_reason: NotRequired[str]
    runs: list[Worker]
    reservations: list[Reservation]


class Cluster(TypedDict):
    """All nodes; lost nodes come last."""

    address: str
    nodes: list[Node]


@contextlib.contextmanager
def connected(address: str | None = None) -> Iterator[str]:
    """Connects to the cluster that this machine has joined, or to the cluster at ``address``."""
    membership.check_ray()
    joined = local_state.load_membership()
    own_ip = None
    # Ray reads these variables when it is imported.
    os.environ.update(membership.INLINE_RESULTS)
    if address is None and joined and any(map(local_state.is_raylet_running, joined.raylets)):
        address, own_ip = joined.address, joined.ip
        os.environ.update(membership.environment())
        if "ray" in sys.modules:
            # Ray was imported with the old variables and has to read them again. Its type stubs omit this function.
            importlib.import_module("ray._raylet").Config.initialize("")
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None and joined:
        raise _dropped_out(joined)
    if address is None:
        raise InputError("this machine has joined no cluster", ["start one: plimsoll join --head", "or name one: --address"])
    try:
        membership.check_reachable(address)
    except InputError:
        if joined and own_ip and joined.head:
            # This machine's own head has ended. Its other processes end a little later.
            raise _dropped_out(joined) from None
        raise
    if joined and own_ip and membership.is_known_to_head(joined) is False:
        # Ray would wait a minute for a node that the head regards as lost.
        raise _dropped_out(joined)
    import ray
    from ray._private import worker

    # Ray's messages about nodes are not printed. Without a head, this listener would also poll with a full core.
    setattr(worker, "listen_error_messages", lambda *_: None)  # noqa: B010
    try:
        ray.init(
            address=address, namespace="plimsoll", log_to_driver=False, logging_level="ERROR", _node_ip_address=own_ip
        )
    except Exception as error:
        raise InputError(f"no cluster answers at {address}: {describe(error)}") from error
    try:
        yield address
    finally:
        ray.shutdown()


def _dropped_out(joined: local_state.Membership) -> InputError:
    message = f"this machine has dropped out of the cluster at {joined.address}: it was unreachable too long, or its raylet has ended"
    return InputError(message, [f"to join again: {joined.command}"])


def nodes() -> list[Node]:
    """Returns the nodes as Ray describes them, without asking the nodes themselves."""
    import ray
    from ray._private import state, worker  # Ray publishes actors and start times of nodes through its dashboard only.

    runs: dict[str, list[Worker]] = {}
    for actor in state.actors().values():
        owner = without_suffix(actor["Name"] or actor["ActorClassName"])
        if actor["State"] == "ALIVE" and owner != INSPECTION_OWNER:
            runs.setdefault(actor["Address"]["NodeID"], []).append(Worker(owner=owner, pid=actor["Pid"]))
    infos_by_id = worker.global_worker.gcs_client.get_all_node_info()
    infos = {node.hex(): info for node, info in infos_by_id.items()}
    reservations, listed, lifetimes = _reservations(), list[Node](), dict[str, Lifetime]()
    for entry in ray.nodes():
        left = entry.get("DeathReason") in LEFT_REASONS
        if info := infos.get(entry["NodeID"]):
            entry["Labels"] = dict(info.labels)
            lifetimes[entry["NodeID"]] = Lifetime(info.start_time_ms, info.end_time_ms, left)
        elif left:
            continue
        listed.append(_node(entry, runs.get(entry["NodeID"], []), reservations.get(entry["NodeID"], [])))
    return current_nodes(listed, lifetimes)


def alive_nodes(nodes: list[Node]) -> list[Node]:
    """Returns the nodes that are alive."""
    return [node for node in nodes if node["alive"]]


class Lifetime(NamedTuple):
    """Start and end of a node in milliseconds since 1970, 0 if unknown, and whether the node left the cluster on request."""

    start_ms: int = 0
    end_ms: int = 0
    left: bool = False


def current_nodes(listed: list[Node], lifetimes: Mapping[str, Lifetime]) -> list[Node]:
    """Returns the alive nodes and the lost nodes, each sorted by name.

    Of several lost nodes with one name, only the last counts. A node is not lost if it left on request, or if its machine has
    joined again since, with any devices.
    """
    lifetime = {node["id"]: lifetimes.get(node["id"], Lifetime()) for node in listed}
    alive, last_dead = list[Node](), dict[tuple[str, str], Node]()
    for node in sorted(listed, key=lambda node: lifetime[node["id"]].start_ms):
        key = (node["name"], node["ip"])
        last_dead.pop(key, None)
        if node["alive"]:
            alive.append(node)
        elif not lifetime[node["id"]].left:
            last_dead[key] = node

    def is_replaced(dead: Node) -> bool:
        end_ms = lifetime[dead["id"]].end_ms
        return any(node["ip"] == dead["ip"] and 0 < end_ms < lifetime[node["id"]].start_ms for node in alive)

    lost = [node for node in last_dead.values() if not is_replaced(node)]
    return sorted(alive, key=lambda node: node["name"]) + sorted(lost, key=lambda node: node["name"])


def without_suffix(name: str) -> str:
    """Removes the suffix that makes a name unique for Ray, as in ``alpha:/runs/sums (1234-56ab-1)``."""
    return re.sub(r" \([0-9a-f-]+\)$", "", name)


def _reservations() -> dict[str, list[Reservation]]:
    """Returns the reservations on each node, by node id."""
    from ray.util.placement_group import placement_group_table

    reservations: dict[str, list[Reservation]] = {}
    for group in placement_group_table().values():
        # A group that has lost a node is being rescheduled, and still holds its other nodes.
        if group["state"] in ("CREATED", "RESCHEDULING"):
            for index, bundle in group["bundles"].items():
                for resource, unit in (("vram_mib", 1 << 20), ("memory", 1)):
                    if amount := int(bundle.get(resource, 0.0)) * unit:
                        reservation = Reservation(owner=without_suffix(group["name"]), resource=resource, bytes=amount)
                        reservations.setdefault(group["bundles_to_node_id"].get(index, ""), []).append(reservation)
    return reservations


#: Unreserved amount of each resource by node id, as Ray counts it.
UnreservedResources = Mapping[str, Mapping[str, float]]


def unreserved_resources() -> UnreservedResources:
    """Returns the unreserved amount of each resource on each node, by node id."""
    from ray._private import state  # Ray publishes only the sum over all nodes.

    unreserved: UnreservedResources = state.available_resources_per_node()
    return unreserved


def budget_bytes(node: Node) -> int:
    """Returns the load line of a node's device, in bytes."""
    return node["memory_bytes"] if node["vram_mib"] is None else node["vram_mib"] << 20


def unreserved_bytes(node: Node, unreserved: UnreservedResources) -> int:
    """Returns the unreserved memory of a node's device, in bytes."""
    resources = unreserved.get(node["id"], {})
    return int(resources.get("memory", 0.0)) if node["vram_mib"] is None else int(resources.get("vram_mib", 0.0)) << 20


def _node(entry: dict[str, Any], runs: list[Worker], reservations: list[Reservation]) -> Node:
    labels, resources = entry.get("Labels", {}), entry["Resources"]
    vram = resources.get("vram_mib")
    node = Node(
        name=entry.get("NodeName") or entry["NodeManagerAddress"],
        id=entry["NodeID"],
        ip=entry["NodeManagerAddress"],
        alive=entry["Alive"],
        model=labels.get("plimsoll-model", labels.get("ray.io/accelerator-type", "")),
        simulated=labels.get("plimsoll-simulated") == "true",
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        vram_mib=None if vram is None else int(vram),
        memory_bytes=int(resources.get("memory", 0)),
        free_bytes=None,
        runs=runs,
        reservations=reservations,
    )
    if not node["alive"]:
        reason = entry.get("DeathReasonMessage") or ""
        reason = reason if reason and "heartbeat" not in reason else "it no longer answers"
        node["lost_reason"] = f"{reason}; to see how it joins again, run on its machine: plimsoll cluster"
    return node


class Facts(TypedDict):
    """Versions and hardware of a node, reported by a process on it."""

    python: str
    ray: str
    plimsoll: str
    system: str
    #: Version of the NVIDIA driver; ``None`` if there is none.
    driver: str | None
    #: Number of NVIDIA cards on the machine's bus, used or not.
    cards: int
    free_bytes: int
    #: Seconds since 1970 on the clock of the node.
    clock: float


def facts() -> Facts:
    """Returns versions and hardware of the node that this process runs on. A process sees only the GPU of its raylet."""
    import plimsoll
    import ray

    machine = api.devices()
    device = os.environ.get("PLIMSOLL_RAY_DEVICE", "cpu")
    found = [found for found in machine["devices"] if found["name"] == device.split("=")[0]]
    return Facts(
        python=platform.python_version(),
        ray=ray.__version__,
        plimsoll=plimsoll.__version__,
        system=platform.release(),
        driver=machine["nvidia"]["driver"],
        cards=machine["nvidia"]["cards_on_bus"],
        free_bytes=(found or machine["devices"])[0]["memory_free_bytes"],
        clock=time.time(),
    )


def options_for_node(node: Node) -> dict[str, Any]:
    """Returns Ray options that place a process on exactly this node and reserve no cores."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node["id"], soft=False)}


def query_cluster() -> Cluster:
    """Returns all nodes with their free memory. Asks all nodes at the same time."""
    import ray

    listed = nodes()
    ask = ray.remote(max_retries=0)(facts)
    requests = [(node, ask.options(**options_for_node(node)).remote()) for node in alive_nodes(listed)]
    deadline, unreserved = time.monotonic() + ANSWER_TIMEOUT_SECONDS, unreserved_resources()
    for node, request in requests:
        try:
            free = ray.get(request, timeout=max(deadline - time.monotonic(), 0.1))["free_bytes"]
            node["free_bytes"] = min(free, unreserved_bytes(node, unreserved))
        except Exception as error:  # The failure of one node must not hide the others.
            node["no_answer_reason"] = describe(error)
    return Cluster(address=ray.get_runtime_context().gcs_address, nodes=listed)


def table(cluster: Cluster) -> str:
    """Formats the cluster as a table with notes."""
    rows = [["node", "address", "device", "memory", "free", "cores", "runs"]]
    for node in cluster["nodes"]:
        memory = budget_bytes(node)
        free = node["free_bytes"]
        state = format_bytes(free) if free is not None else "no answer" if node["alive"] else "lost"
        runs = ", ".join(f"{worker['owner']} ({worker['pid']})" for worker in node["runs"])
        name = node["name"] + (" (simulated)" if node["simulated"] else "")
        memory_text = format_bytes(memory) if node["alive"] else "-"
        rows.append([name, node["ip"], node["model"], memory_text, state, f"{node['cpus']:g}", runs or "-"])
    lines = [f"cluster at {cluster['address']}", "", columns(rows)]
    for node in cluster["nodes"]:
        reason = node.get("lost_reason", node.get("no_answer_reason"))
        lines += [f"{node['name']}: {reason}"] if reason else []
    return "\n".join(lines)


def columns(rows: list[list[str]]) -> str:
    """Formats rows as aligned columns; the first row holds the titles."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
