"""The cluster as it is: who belongs to it, what each node has and has free, and what runs where."""

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
from plimsoll.ray import joining, ours
from plimsoll.ray.devices import readable
from plimsoll.ray.reasons import reason

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: How long a node may take to answer: it may have to start a process for it.
ANSWER_SECONDS = 30.0


#: Why a node is gone that was told to end, as Ray numbers it: it ended, or drained first.
LEFT = (1, 3, 4)


class Worker(TypedDict):
    """A process that runs on a node."""

    #: Of a run its host and folder: ``alpha:/home/me/runs/sums``.
    what: str
    pid: int


class Kept(TypedDict):
    """What is kept of a node's device."""

    #: For whom: a run, as above, or ``a sweep of alpha``.
    what: str
    #: ``vram_mib``, or ``memory`` of its host.
    resource: str
    bytes: int


class Node(TypedDict):
    """A raylet: a device and what goes with it."""

    #: ``alpha/cuda:0``; of a node that was not joined with ``plimsoll join``, its address.
    name: str
    id: str
    ip: str
    alive: bool
    #: Why a node that is gone is gone, as Ray says it.
    gone: NotRequired[str]
    #: What its maker calls the device.
    model: str
    simulated: bool
    cpus: float
    gpus: float
    #: The load line of the device, in MiB; none where that is the machine's memory.
    vram_mib: int | None
    memory_bytes: int
    #: What a run would be given of the device's memory now: what nobody has had kept, as far as it is free, measured; none where
    #: nobody answered.
    free_bytes: int | None
    #: Why nobody did.
    silent: NotRequired[str]
    runs: list[Worker]
    kept: list[Kept]


class Cluster(TypedDict):
    """All nodes; those that are gone come last."""

    address: str
    nodes: list[Node]


@contextlib.contextmanager
def connected(address: str | None = None) -> Iterator[str]:
    """Speaks with the cluster that this machine is part of, or with the one at ``address``."""
    joining.check_ray()
    joined = ours.known()
    own_ip = None
    # Read when Ray is imported.
    os.environ.update(joining.INLINE)
    if address is None and joined and any(map(ours.serves, joined.raylets)):
        address, own_ip = joined.address, joined.ip
        os.environ.update(joining.environment())
        if "ray" in sys.modules:
            # It has read them already, when it was imported. Of this, its types say nothing.
            importlib.import_module("ray._raylet").Config.initialize("")
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None and joined:
        raise _dropped_out(joined)
    if address is None:
        raise InputError("this machine is part of no cluster", ["plimsoll join --head starts one", "or name one: --address"])
    try:
        joining.check_answers(address)
    except InputError:
        if joined and own_ip and joined.head:
            # It is this machine's own head that is gone; what it had started beside that ends a little later.
            raise _dropped_out(joined) from None
        raise
    if joined and own_ip and joining.takes_part(joined) is False:
        # Ray would wait a minute for a node that the head has given up.
        raise _dropped_out(joined)
    import ray
    from ray._private import worker

    # What it has to say of nodes is for no screen, and without a head it would ask again and again, with all of a core.
    setattr(worker, "listen_error_messages", lambda *_: None)  # noqa: B010
    try:
        ray.init(
            address=address, namespace="plimsoll", log_to_driver=False, logging_level="ERROR", _node_ip_address=own_ip
        )
    except Exception as error:
        raise InputError(f"no cluster answers at {address}: {reason(error)}") from error
    try:
        yield address
    finally:
        ray.shutdown()


def _dropped_out(joined: ours.Joined) -> InputError:
    gone = f"this machine has dropped out of the cluster at {joined.address}: it was cut off for long, or its part was ended"
    return InputError(gone, [f"it takes part again with what it joined with: {joined.words}"])


def nodes() -> list[Node]:
    """All that Ray knows of the nodes, without asking them."""
    import ray
    from ray._private import state, worker  # What actors there are, and since when nodes, is public with a dashboard only.

    runs: dict[str, list[Worker]] = {}
    for actor in state.actors().values():
        if actor["State"] == "ALIVE":
            what = unmarked(actor["Name"] or actor["ActorClassName"])
            runs.setdefault(actor["Address"]["NodeID"], []).append(Worker(what=what, pid=actor["Pid"]))
    told = worker.global_worker.gcs_client.get_all_node_info()
    infos = {node.hex(): info for node, info in told.items()}
    kept, listed, lives = _kept(), list[Node](), dict[str, Life]()
    for known in ray.nodes():
        left = known.get("DeathReason") in LEFT
        if info := infos.get(known["NodeID"]):
            known["Labels"] = dict(info.labels)
            lives[known["NodeID"]] = Life(info.start_time_ms, info.end_time_ms, left)
        elif left:
            continue
        listed.append(_node(known, runs.get(known["NodeID"], []), kept.get(known["NodeID"], [])))
    return of_interest(listed, lives)


def alive(every: list[Node]) -> list[Node]:
    """Those that are there."""
    return [node for node in every if node["alive"]]


class Life(NamedTuple):
    """When a node started and ended, in milliseconds since the epoch, and whether it was told to end; 0 is not known, or not yet."""

    start_ms: int = 0
    end_ms: int = 0
    left: bool = False


def of_interest(listed: list[Node], lives: Mapping[str, Life]) -> list[Node]:
    """The nodes that are there, and those that are missed: of a name the last, unless that has left, and none whose machine has
    joined again since, with whatever devices."""
    life = {node["id"]: lives.get(node["id"], Life()) for node in listed}
    there, last = list[Node](), dict[tuple[str, str], Node]()
    for node in sorted(listed, key=lambda node: life[node["id"]].start_ms):
        named = (node["name"], node["ip"])
        last.pop(named, None)
        if node["alive"]:
            there.append(node)
        elif not life[node["id"]].left:
            last[named] = node

    def replaced(gone: Node) -> bool:
        return any(node["ip"] == gone["ip"] and 0 < life[gone["id"]].end_ms < life[node["id"]].start_ms for node in there)

    missed = [node for node in last.values() if not replaced(node)]
    return sorted(there, key=lambda node: node["name"]) + sorted(missed, key=lambda node: node["name"])


def unmarked(name: str) -> str:
    """A name without what makes it Ray's only one."""
    return re.sub(r" \([0-9a-f-]+\)$", "", name)


def _kept() -> dict[str, list[Kept]]:
    """What is kept on each node, for whom."""
    from ray.util.placement_group import placement_group_table

    kept: dict[str, list[Kept]] = {}
    for group in placement_group_table().values():
        # One that has lost a node is being placed anew, and has the others still.
        if group["state"] in ("CREATED", "RESCHEDULING"):
            for number, bundle in group["bundles"].items():
                for resource, unit in (("vram_mib", 1 << 20), ("memory", 1)):
                    if amount := int(bundle.get(resource, 0.0)) * unit:
                        of = Kept(what=unmarked(group["name"]), resource=resource, bytes=amount)
                        kept.setdefault(group["bundles_to_node_id"].get(number, ""), []).append(of)
    return kept


#: What is free on each node, as Ray counts it.
Free = Mapping[str, Mapping[str, float]]


def available() -> Free:
    """What nobody has had kept of each node."""
    from ray._private import state  # What is free on each node is public in sum only.

    free: Free = state.available_resources_per_node()
    return free


def whole_bytes(node: Node) -> int:
    """The load line of a node's device."""
    return node["memory_bytes"] if node["vram_mib"] is None else node["vram_mib"] << 20


def available_bytes(node: Node, free: Free) -> int:
    """What nobody has had kept of it."""
    has = free.get(node["id"], {})
    return int(has.get("memory", 0.0)) if node["vram_mib"] is None else int(has.get("vram_mib", 0.0)) << 20


def _node(known: dict[str, Any], runs: list[Worker], kept: list[Kept]) -> Node:
    labels, has = known.get("Labels", {}), known["Resources"]
    vram = has.get("vram_mib")
    node = Node(
        name=known.get("NodeName") or known["NodeManagerAddress"],
        id=known["NodeID"],
        ip=known["NodeManagerAddress"],
        alive=known["Alive"],
        model=labels.get("plimsoll-model", labels.get("ray.io/accelerator-type", "")),
        simulated=labels.get("plimsoll-simulated") == "true",
        cpus=has.get("CPU", 0.0),
        gpus=has.get("GPU", 0.0),
        vram_mib=None if vram is None else int(vram),
        memory_bytes=int(has.get("memory", 0)),
        free_bytes=None,
        runs=runs,
        kept=kept,
    )
    if not node["alive"]:
        why = known.get("DeathReasonMessage") or ""
        why = why if why and "heartbeat" not in why else "it does not answer any more"
        node["gone"] = f"{why}; what brings it back is said on its machine by: plimsoll cluster"
    return node


class Facts(TypedDict):
    """What a process on a node says of itself."""

    python: str
    ray: str
    plimsoll: str
    system: str
    #: Of NVIDIA, where there is one.
    driver: str | None
    #: Graphics cards of NVIDIA's on the machine's bus, used or not.
    cards: int
    free_bytes: int
    clock: float


def facts() -> Facts:
    """What this process, on its node, says of itself. A raylet's GPU is the only one that its processes see."""
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
        cards=machine["nvidia"]["on_bus"],
        free_bytes=(found or machine["devices"])[0]["memory_free_bytes"],
        clock=time.time(),
    )


def on(node: Node) -> dict[str, Any]:
    """Options that place a process on a node, and nowhere else, without taking of its cores."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node["id"], soft=False)}


def look() -> Cluster:
    """Asks every node, all at once."""
    import ray

    seen = nodes()
    ask = ray.remote(max_retries=0)(facts)
    asked = [(node, ask.options(**on(node)).remote()) for node in alive(seen)]
    patience, unkept = time.monotonic() + ANSWER_SECONDS, available()
    for node, answer in asked:
        try:
            free = ray.get(answer, timeout=max(patience - time.monotonic(), 0.1))["free_bytes"]
            node["free_bytes"] = min(free, available_bytes(node, unkept))
        except Exception as error:  # Whatever keeps one from answering, the others are shown.
            node["silent"] = reason(error)
    return Cluster(address=ray.get_runtime_context().gcs_address, nodes=seen)


def table(cluster: Cluster) -> str:
    """The cluster for a person."""
    rows = [["node", "address", "device", "memory", "free", "cores", "runs"]]
    for node in cluster["nodes"]:
        memory = whole_bytes(node)
        free = node["free_bytes"]
        state = readable(free) if free is not None else "no answer" if node["alive"] else "gone"
        runs = ", ".join(f"{worker['what']} ({worker['pid']})" for worker in node["runs"])
        name = node["name"] + (" (simulated)" if node["simulated"] else "")
        rows.append([name, node["ip"], node["model"], readable(memory) if node["alive"] else "-", state, f"{node['cpus']:g}", runs or "-"])
    lines = [f"cluster at {cluster['address']}", "", columns(rows)]
    for node in cluster["nodes"]:
        why = node.get("gone", node.get("silent"))
        lines += [f"{node['name']}: {why}"] if why else []
    return "\n".join(lines)


def columns(rows: list[list[str]]) -> str:
    """Rows of a table, the first its titles."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
