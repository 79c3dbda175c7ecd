"""Types of the results: dictionaries with the keys of ``plan.json``, ``result.json``, ``events.jsonl`` and ``devices --json``.

The types mirror the structs of ``crates/plimsoll-core``; a test compares them with real results. Bytes and seconds are plain
numbers, not multiples. All figures of a plan are predicted. All other figures are measured, unless their name contains
``predicted``. ``json.dump`` writes a dictionary in the format of the file that it mirrors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from plimsoll.run_file import Level, Rung

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: Effect of a recipe on the numbers of a run.
Class = Literal["identical", "reordered", "lossy"]
#: Parallelism of a team: data parallel, sharded (FSDP, ZeRO-3), or pipeline parallel.
Parallelism = Literal["data", "sharded", "pipeline"]


class ScratchOffload(TypedDict):
    """Numbers of layers with tensors offloaded to the scratch file."""

    optimizer: int
    gradients: int
    weights: int


class Offload(TypedDict):
    """Tensors offloaded to the host; numbers count layers."""

    optimizer: int
    gradients: int
    weights: int
    inputs: int
    embedding: bool
    head: bool
    update: NotRequired[bool]
    file: NotRequired[ScratchOffload]


class Recipe(TypedDict):
    """The planner's choices for one device."""

    micro_batch: int
    recompute: list[Level]
    offload: NotRequired[Offload]
    rungs: NotRequired[list[Rung]]


class DevicePlan(TypedDict):
    """Predicted memory of a device, of the host or of the scratch file."""

    name: str
    simulated: bool
    budget_bytes: int
    arena_bytes: int
    charges_bytes: int
    peak_bytes: int
    by_category: dict[str, int]
    by_program: dict[str, int]
    lower_bound_bytes: int


class Predicted(TypedDict):
    """Predicted speed."""

    step_seconds: float
    tokens_per_second: float


class GemmAlgorithms(TypedDict):
    """The cuBLASLt algorithm of each matrix product of a GPU."""

    library: int
    gpu: str
    driver: int
    chosen: dict[str, str]


class Remedy(TypedDict):
    """The smallest load lines that fit if the named lossy rungs are allowed."""

    allow: list[Rung]
    budget_bytes: int
    host_bytes: NotRequired[int]
    file_bytes: NotRequired[int]
    peak_bytes: NotRequired[int]
    other_budget_bytes: NotRequired[dict[str, int]]


class Fallback(TypedDict):
    """A device that the CPU replaces, because no permitted recipe fits on it."""

    device: str
    budget_bytes: int
    required_bytes: int


class RungEffect(TypedDict):
    """The predicted effect of taking a rung."""

    freed_bytes: int
    host_bytes: int
    file_bytes: NotRequired[int]
    added_seconds: float
    tokens_per_second: float


RungPrice = TypedDict(
    "RungPrice",
    {
        "rung": str,
        "class": Class,
        "accuracy_impact": str,
        "allowed": bool,
        "alone": RungEffect,
        "in_plan": "NotRequired[RungEffect]",
    },
)
RungPrice.__doc__ = "A rung of the memory ladder with its predicted effects."


class WorkerPlan(TypedDict):
    """The plan of one worker (device) of a team."""

    device: str
    recipe: Recipe
    sequences: int
    layers: NotRequired[list[int]]
    shard_1024ths: NotRequired[int]
    reason: NotRequired[str]
    algorithms: NotRequired[GemmAlgorithms]
    busy_seconds: float
    idle_seconds: float
    ladder: NotRequired[list[RungPrice]]


class EvaluatorPlan(TypedDict):
    """The plan of a device outside the team that evaluates while the team trains."""

    recipe: Recipe
    device: DevicePlan
    rows: NotRequired[int]
    seconds: float
    team_seconds: float
    weight_transfer_seconds: float


class ExcludedDevice(TypedDict):
    """A device that takes no part in the training steps."""

    device: str
    device_index: int
    reason: str
    remedy: NotRequired[str]
    tokens_per_second: NotRequired[float]
    evaluator_plan: NotRequired[EvaluatorPlan]


class FasterAlone(TypedDict):
    """A device, or a host with its devices, that would be faster without the rest of the team."""

    name: str
    tokens_per_second: float


class ScalingEfficiency(TypedDict):
    """Sum of the throughputs of the team's devices used separately, and the upper bound of the team."""

    single_device_tokens_per_second: float
    upper_bound_tokens_per_second: float


class Alternative(TypedDict):
    """A considered plan for the team that was not chosen."""

    parallelism: NotRequired[Parallelism]
    devices: list[str]
    shares: list[str]
    fits: bool
    peak_bytes: list[int]
    predicted: Predicted


class PlannedWorkload(TypedDict):
    """The workload that a plan was made for."""

    parameters: int
    sequence: int
    batch_tokens: int


#: ``plan.json``: a plan, or with ``fits`` false a refusal with remedies in ``needs``.
Plan = TypedDict(
    "Plan",
    {
        "fits": bool,
        "recipe": Recipe,
        "class": Class,
        "rungs": list[Rung],
        "checkpoint_bytes": int,
        "devices": list[DevicePlan],
        "parallelism": "NotRequired[Parallelism]",
        "team": "NotRequired[list[WorkerPlan]]",
        "scaling_efficiency": "NotRequired[ScalingEfficiency]",
        "link_seconds": "NotRequired[float]",
        "faster_alone": "NotRequired[FasterAlone]",
        "excluded": "NotRequired[list[ExcludedDevice]]",
        "alternatives": "NotRequired[list[Alternative]]",
        "host": DevicePlan,
        "file": "NotRequired[DevicePlan]",
        "predicted": Predicted,
        "needs": list[Remedy],
        "planned_for": "NotRequired[PlannedWorkload]",
        "contention_note": "NotRequired[str]",
        "shortfall_note": "NotRequired[str]",
        "algorithms": "NotRequired[GemmAlgorithms]",
        "fallback": "NotRequired[Fallback]",
        "ladder": "NotRequired[list[RungPrice]]",
    },
)


class LossSpan(TypedDict):
    """The training loss of the first and the last step; ``None`` if no step completed."""

    first: float | None
    last: float | None


class StepSeconds(TypedDict):
    """Seconds of an optimizer step."""

    median: float
    p95: float
    predicted: float


class EvalResult(TypedDict):
    """The last evaluation."""

    loss: float
    exact_match: NotRequired[float]


class DeviceMemory(TypedDict):
    """Planned and measured memory of a device."""

    device: str
    budget_bytes: int
    budget_bytes_at_end: NotRequired[int]
    arena_bytes: int
    arena_measured_bytes: int
    predicted_bytes: int
    measured_bytes: NotRequired[int]
    measured_by: NotRequired[Literal["process", "free_memory"]]


class CollectiveBackend(TypedDict):
    """The backend of a GPU's collectives. If this GPU prevents NCCL, ``reason`` says why."""

    backend: Literal["nccl", "host"]
    reason: NotRequired[str]


class WorkerResult(TypedDict):
    """A worker of the team in the last step."""

    device: str
    simulated: bool
    sequences: int
    recipe: Recipe
    compute_slowdown: float
    collectives: NotRequired[CollectiveBackend]


class EvaluatorResult(TypedDict):
    """A device that evaluated while the team trained."""

    device: str
    simulated: bool
    recipe: Recipe
    evaluations: int
    seconds: float
    predicted_seconds: float
    weight_transfer_seconds: float
    predicted_weight_transfer_seconds: float


class LostDevice(TypedDict):
    """A device lost during a run."""

    device: str
    step: int
    resumed_from_step: NotRequired[int]
    returned_after_step: NotRequired[int]


class RunResult(TypedDict):
    """``result.json``: the result of a run."""

    status: Literal["done", "stopped"]
    steps: int
    loss: LossSpan
    tokens_per_second: float
    step_seconds: StepSeconds
    eval: EvalResult | None
    memory: list[DeviceMemory]
    recipe: Recipe
    parallelism: NotRequired[Parallelism]
    team: NotRequired[list[WorkerResult]]
    evaluator: NotRequired[EvaluatorResult]
    recoveries: list[dict[str, Any]]
    lost: NotRequired[list[LostDevice]]
    faults_not_triggered: NotRequired[list[str]]
    thermal_pause_seconds: float
    fallback: NotRequired[Fallback]


class Sample(TypedDict):
    """The trained model's answer to a prompt of the evaluation data."""

    prompt: str
    expected: str
    answer: str


class Trained(TypedDict):
    """The outcome of :func:`plimsoll.train`."""

    #: The content of ``result.json``.
    result: RunResult
    samples: list[Sample]
    #: Folder of the saved model; ``None`` if the run was stopped or saves nothing.
    model: str | None
    #: The run folder.
    folder: str


#: A line of ``events.jsonl``. ``event`` is its kind and ``time`` the seconds since 1970; all other keys depend on the kind.
Event = dict[str, Any]


class DefaultLimits(TypedDict):
    """The load line and the threads that Plimsoll uses by default, with the reason."""

    budget_bytes: int
    threads: int
    reason: str


class Cache(TypedDict):
    """A cache of a CPU."""

    level: int
    bytes: int
    shared_by: int


class Gpu(TypedDict):
    """Details of a GPU."""

    family: str
    compute_capability: str
    uuid: str
    bus: str
    held_bytes: int | None
    reserved_bytes: int | None
    processes: list[dict[str, Any]]
    pcie: dict[str, int] | None
    condition: dict[str, Any]
    unusable: str | None


class DeviceInfo(TypedDict):
    """A device of this machine."""

    name: str
    kind: Literal["cpu", "cuda"]
    model: str
    memory_total_bytes: int
    memory_free_bytes: int
    memory_bound_by: str
    cores: int
    threads: int
    features: list[str]
    caches: list[Cache]
    defaults: DefaultLimits
    gpu: NotRequired[Gpu]


class Machine(TypedDict):
    """The devices of this machine (first the CPU, then every GPU), and the installed NVIDIA software."""

    devices: list[DeviceInfo]
    nvidia: dict[str, Any]


class BudgetChange(TypedDict):
    """A load line that was changed during a run."""

    budget_bytes: int
    message: str


class BestBatch(TypedDict):
    """The micro-batch of the fastest plan on a device, predicted."""

    device: str
    #: Sequences per forward and backward pass.
    micro_batch: int
    #: Sequences of each optimizer step that this device computes.
    sequences: int
    peak_bytes: int
    budget_bytes: int
