"""What comes back: dictionaries with the names of ``plan.json``, ``result.json``, ``events.jsonl`` and ``devices --json``.

Bytes and seconds are whole units. What is predicted says so by its place (all of a plan) or its name; all else is measured.
A dictionary can be written with ``json.dump``, and read by whatever reads those files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from plimsoll.run_file import Level, Rung

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: What recipes do to the numbers of a run.
Class = Literal["identical", "reordered", "lossy"]
#: How a team shares the work.
Sharing = Literal["batch", "state", "layers"]


class InFile(TypedDict):
    """What waits in the scratch file, in layers."""

    optimizer: int
    gradients: int
    weights: int


class Offload(TypedDict):
    """What waits on the host, in layers."""

    optimizer: int
    gradients: int
    weights: int
    inputs: int
    embedding: bool
    head: bool
    update: NotRequired[bool]
    file: NotRequired[InFile]


class Recipe(TypedDict):
    """The planner's choices."""

    micro_batch: int
    recompute: list[Level]
    offload: NotRequired[Offload]
    rungs: NotRequired[list[Rung]]


class DevicePlan(TypedDict):
    """What a device, the host or a file holds under a plan. All bytes are predicted."""

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


class Algorithms(TypedDict):
    """What the products of a GPU are done with."""

    library: int
    gpu: str
    driver: int
    chosen: dict[str, str]


class Need(TypedDict):
    """A budget that would fit when the named rungs are allowed."""

    allow: list[Rung]
    budget_bytes: int
    host_bytes: NotRequired[int]
    file_bytes: NotRequired[int]
    peak_bytes: NotRequired[int]
    others: NotRequired[dict[str, int]]


class Fallback(TypedDict):
    """A device whose work the processor does."""

    device: str
    budget_bytes: int
    needs_bytes: int


class Effect(TypedDict):
    """What taking a rung does; predicted."""

    freed_bytes: int
    host_bytes: int
    file_bytes: NotRequired[int]
    costs_seconds: float
    tokens_per_second: float


RungPrice = TypedDict(
    "RungPrice",
    {
        "rung": str,
        "class": Class,
        "loses": str,
        "allowed": bool,
        "alone": Effect,
        "in_plan": "NotRequired[Effect]",
    },
)
RungPrice.__doc__ = "What a rung of the ladder frees and costs; predicted."


class Member(TypedDict):
    """What one device of a team is given; predicted."""

    device: str
    recipe: Recipe
    sequences: int
    layers: NotRequired[list[int]]
    state: NotRequired[int]
    why: NotRequired[str]
    algorithms: NotRequired[Algorithms]
    busy_seconds: float
    idle_seconds: float
    ladder: NotRequired[list[RungPrice]]


class Evaluates(TypedDict):
    """What a device does beside the steps; predicted."""

    recipe: Recipe
    device: DevicePlan
    rows: NotRequired[int]
    seconds: float
    team_seconds: float
    hand_over_seconds: float


class LeftOut(TypedDict):
    """A device that takes no part in the steps."""

    device: str
    number: int
    why: str
    used_by: NotRequired[str]
    tokens_per_second: NotRequired[float]
    evaluates: NotRequired[Evaluates]


class FasterAlone(TypedDict):
    """A device, or of several hosts one, that would be faster without the others."""

    name: str
    tokens_per_second: float


class Worth(TypedDict):
    """What a team does, beside what its devices do alone; predicted tokens a second."""

    alone: float
    at_most: float


class Alternative(TypedDict):
    """A way to share out that was looked at."""

    sharing: NotRequired[Sharing]
    devices: list[str]
    shares: list[str]
    fits: bool
    peak_bytes: list[int]
    predicted: Predicted


class PlanOf(TypedDict):
    """What a plan was made for."""

    parameters: int
    sequence: int
    batch_tokens: int


#: ``plan.json``: a plan, or the word that there is none.
Plan = TypedDict(
    "Plan",
    {
        "fits": bool,
        "recipe": Recipe,
        "class": Class,
        "rungs": list[Rung],
        "checkpoint_bytes": int,
        "devices": list[DevicePlan],
        "sharing": "NotRequired[Sharing]",
        "team": "NotRequired[list[Member]]",
        "worth": "NotRequired[Worth]",
        "link_seconds": "NotRequired[float]",
        "faster_alone": "NotRequired[FasterAlone]",
        "left_out": "NotRequired[list[LeftOut]]",
        "alternatives": "NotRequired[list[Alternative]]",
        "host": DevicePlan,
        "file": "NotRequired[DevicePlan]",
        "predicted": Predicted,
        "needs": list[Need],
        "of": "NotRequired[PlanOf]",
        "disturbed": "NotRequired[str]",
        "learned": "NotRequired[str]",
        "algorithms": "NotRequired[Algorithms]",
        "fallback": "NotRequired[Fallback]",
        "ladder": "NotRequired[list[RungPrice]]",
    },
)


class LossSpan(TypedDict):
    """The training loss at both ends of a run; none where no step was done."""

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
    """What a device held, beside what the plan said."""

    device: str
    budget_bytes: int
    budget_bytes_at_end: NotRequired[int]
    arena_bytes: int
    arena_measured_bytes: int
    predicted_bytes: int
    measured_bytes: NotRequired[int]
    measured_by: NotRequired[Literal["process", "free_memory"]]


class CollectivesBy(TypedDict):
    """How a GPU exchanges with the others of its team; `why` where it is the reason why not by NCCL."""

    by: Literal["nccl", "host"]
    why: NotRequired[str]


class MemberResult(TypedDict):
    """What a device of a team did in the last step."""

    device: str
    simulated: bool
    sequences: int
    recipe: Recipe
    passes_over_predicted: float
    collectives: NotRequired[CollectivesBy]


class EvaluatorResult(TypedDict):
    """What a device did that evaluated beside the steps."""

    device: str
    simulated: bool
    recipe: Recipe
    evaluations: int
    seconds: float
    predicted_seconds: float
    hand_over_seconds: float
    predicted_hand_over_seconds: float


class LostDevice(TypedDict):
    """A device that was lost."""

    device: str
    step: int
    back_to: NotRequired[int]
    back_after: NotRequired[int]


class RunResult(TypedDict):
    """``result.json``: how a run ended."""

    status: Literal["done", "stopped"]
    steps: int
    loss: LossSpan
    tokens_per_second: float
    step_seconds: StepSeconds
    eval: EvalResult | None
    memory: list[DeviceMemory]
    recipe: Recipe
    sharing: NotRequired[Sharing]
    team: NotRequired[list[MemberResult]]
    evaluator: NotRequired[EvaluatorResult]
    retreats: list[dict[str, Any]]
    lost: NotRequired[list[LostDevice]]
    not_rehearsed: NotRequired[list[str]]
    rested_seconds: float
    fallback: NotRequired[Fallback]


class Sample(TypedDict):
    """What the model makes of a prompt of the evaluation, in the end."""

    prompt: str
    expected: str
    answer: str


class Trained(TypedDict):
    """What a training run leaves."""

    #: As in ``result.json``.
    result: RunResult
    samples: list[Sample]
    #: The written model; none where the run was stopped, or saves nothing.
    model: str | None
    #: The run folder.
    folder: str


#: A line of ``events.jsonl``: ``event`` says what happened, ``time`` when (seconds since 1970); the rest depends on it.
Event = dict[str, Any]


class Takes(TypedDict):
    """What Plimsoll would take of a device, and why."""

    budget_bytes: int
    threads: int
    why: str


class Cache(TypedDict):
    """A cache of a processor."""

    level: int
    bytes: int
    shared_by: int


class Gpu(TypedDict):
    """What only GPUs have."""

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


class Found(TypedDict):
    """A device that is here."""

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
    takes: Takes
    gpu: NotRequired[Gpu]


class Machine(TypedDict):
    """The devices of this machine: the processor, then every GPU; and NVIDIA's software."""

    devices: list[Found]
    nvidia: dict[str, Any]


class Moved(TypedDict):
    """A load line that was moved."""

    budget_bytes: int
    message: str


class BestBatch(TypedDict):
    """The fastest micro-batch that fits on a device, predicted."""

    device: str
    #: Sequences that go through the model at once.
    micro_batch: int
    #: Sequences of each optimizer step that this device computes.
    sequences: int
    peak_bytes: int
    budget_bytes: int
