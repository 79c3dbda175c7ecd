"""The devices that a machine contributes to a cluster, and the share of the machine that each raylet gets.

By default there is one raylet for each usable GPU, or one for the CPU if there is none. ``--devices`` names others.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, cast

from plimsoll import _native, api
from plimsoll.errors import InputError
from plimsoll.run_file import settings

MIB = 1 << 20
#: Formats bytes as the other commands do.
format_bytes = _native.format_bytes
#: Share of a raylet's memory for Ray's object store, with its bounds. Tensors do not pass through the store.
STORE_SHARE, STORE_BYTES_MIN, STORE_BYTES_MAX = 0.1, 128 * MIB, 1024 * MIB


class DeviceAttributes(TypedDict):
    """The attributes that an entry of ``run.devices`` states.

    An attribute that it does not state is ``None``, and comes from the device's host or from the run.
    """

    #: The whole entry in the notation of the run file.
    text: str
    #: The host of the device.
    host: str | None
    #: The device as named on its host; ``ray`` stands for every device of the cluster.
    device: str
    #: The load line: an amount, or a share of free memory.
    budget: str | None
    #: The pace of a simulated device in CPU cores.
    pace: float | None


def parse_devices(text: str) -> list[DeviceAttributes]:
    """Parses a list in the notation of ``run.devices`` into the attributes of each device."""
    return cast("list[DeviceAttributes]", json.loads(_native.parse_devices(text)))


@dataclass(frozen=True)
class Device:
    """A device on which the workers of a raylet compute."""

    #: Name on its machine: ``cuda:1``.
    name: str
    kind: Literal["cpu", "virtual", "cuda"]
    #: Product name of the hardware.
    model: str
    #: The load line.
    budget_bytes: int
    #: Name in ``run.devices`` for a worker of this raylet. A GPU is ``cuda:0``, because the worker sees no other.
    worker_name: str
    #: Value of ``CUDA_VISIBLE_DEVICES`` for the workers; ``None`` if the device is not a GPU.
    visible: str | None = None

    @property
    def simulated(self) -> bool:
        """Whether figures of this device come from a simulation."""
        return self.kind == "virtual"


def local_devices(named: str | None = None) -> list[Device]:
    """Returns the devices of this machine.

    ``named`` selects devices in the notation of ``run.devices``. ``None`` selects all usable GPUs, or the CPU if there are none.
    """
    machine = api.devices()["devices"]
    cpu, gpus = machine[0], [found for found in machine[1:] if not found.get("gpu", {}).get("unusable")]
    cards = [
        Device(found["name"], "cuda", found["model"], found["defaults"]["budget_bytes"], "cuda:0", _visible(found["gpu"]["uuid"]))
        for found in gpus
    ]
    cpu_budget = cpu["defaults"]["budget_bytes"]
    if named is None:
        return cards or [Device("cpu", "cpu", cpu["model"], cpu_budget, f"cpu={cpu_budget // MIB}MiB")]
    selected: list[Device] = []
    texts = {attributes["device"]: attributes["text"] for attributes in parse_devices(named)}
    # Resolved without rates, which `measure_rates` measures.
    for spec in json.loads(_native.list_named_devices(settings({"run": {"devices": named}}))):
        name, kind, budget = spec["name"], spec["kind"], spec["budget"]
        if kind == "cuda":
            selected += [replace(card, budget_bytes=budget) for card in cards if card.name == name]
        elif kind == "cpu":
            selected.append(Device(name, "cpu", cpu["model"], budget, f"cpu={budget // MIB}MiB"))
        elif kind == "virtual":
            selected.append(Device(name, "virtual", f"part of {cpu['model']}", budget, texts[name]))
        else:
            raise InputError(f"--devices: `{name}` is a paper device: it cannot run anything")
    return selected


def measure_rates(devices: list[Device]) -> None:
    """Measures the rates of the CPU and of simulated devices, unless they are known.

    A worker without rates would measure them before each run, and with smaller arrays under a low load line. Rates of a GPU
    are measured by its worker.
    """
    if names := [device.worker_name for device in devices if device.kind != "cuda"]:
        print("measuring the rates of the CPU, unless they are known (20 s)", file=sys.stderr)
        _native.resolve_devices(settings({"run": {"devices": ",".join(names)}}))


def _visible(uuid: str) -> str:
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


@dataclass(frozen=True)
class RayletResources:
    """The resources that a raylet offers to Ray."""

    cpus: int
    gpus: int
    #: Memory for workers, without the object store.
    memory_bytes: int
    store_bytes: int
    #: The load line of a device with memory of its own, in MiB; ``None`` for a CPU, which uses the machine's memory.
    vram_mib: int | None
    labels: dict[str, str]


def divide_resources(devices: list[Device]) -> list[RayletResources]:
    """Divides the machine among the raylets of its devices.

    Cores are divided evenly. The raylet of the CPU gets its load line as memory. The other raylets share the rest of the host
    memory evenly, without the load lines of simulated devices.
    """
    cpu = api.devices()["devices"][0]
    count = len(devices)
    free = cpu["defaults"]["budget_bytes"]
    remaining = max(free - sum(device.budget_bytes for device in devices if device.kind == "virtual"), 0)
    # The load line of a CPU without an amount includes the memory of simulated devices.
    for_cpu = min(sum(device.budget_bytes for device in devices if device.kind == "cpu"), remaining)
    for_others = (remaining - for_cpu) // max(sum(device.kind != "cpu" for device in devices), 1)
    resources = []
    for index, device in enumerate(devices):
        memory = for_cpu if device.kind == "cpu" else for_others
        store = int(min(max(memory * STORE_SHARE, STORE_BYTES_MIN), STORE_BYTES_MAX))
        # At least one core each. The first raylets get the remainder.
        cpus = max(cpu["threads"] // count + (index < cpu["threads"] % count), 1)
        resources.append(
            RayletResources(
                cpus=cpus,
                gpus=int(device.kind == "cuda"),
                memory_bytes=max(memory - store, STORE_BYTES_MIN),
                store_bytes=store,
                vram_mib=None if device.kind == "cpu" else device.budget_bytes // MIB,
                labels={
                    "plimsoll-device": to_label(device.name),
                    "plimsoll-model": to_label(device.model),
                    "plimsoll-simulated": str(device.simulated).lower(),
                },
            )
        )
    return resources


def to_label(text: str) -> str:
    """Converts a text to a label of Ray: at most 63 letters, digits and ``-_.``, with a letter or digit at both ends."""
    return re.sub(r"[^A-Za-z0-9]+$", "", re.sub(r"[^A-Za-z0-9_.]+", "-", text).lstrip("-_.")[:63])
