"""Types of the results: dictionaries with the keys of ``plan.json``, ``result.json``, ``events.jsonl`` and ``devices --json``.

Generated from the Rust types by ``cargo xtask schema``: change those, not this file. Bytes and seconds are plain numbers, not
multiples. All figures of a plan are predicted. All other figures are measured, unless their name contains ``predicted``.
``json.dump`` writes a dictionary in the format of the file that it mirrors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, Union

from plimsoll._best_batch import BestBatch as BestBatch

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: The recompute level of a layer (activation checkpointing): the activations that the forward pass drops and the backward pass
#: recomputes. Each level includes all lower levels.
Level = Literal["nothing", "norms", "feed_forward", "attention", "block"]
#: A lossy rung that the user may allow.
Rung = Literal["bf16", "adam8bit", "lora", "int8", "nf4"]
#: The effect of a rung, or of a change of recipe, on the numbers of a run: its losses and weights.
Class = Literal["identical", "reordered", "lossy"]
#: The kind of work that a Program does.
WorkKind = Literal["load", "forward", "backward", "update", "evaluate", "score", "reference", "save", "generate", "re-plan"]
#: The parallelism of a team: how its devices divide the work of a step.
Parallelism = Literal["data", "sharded", "pipeline"]
#: The way in which a run ended.
RunStatus = Literal["done", "stopped"]
#: The source of a device's measured memory.
MeasuredBy = Literal["process", "free_memory"]
#: The kind of a device: CPU, simulated accelerator, GPU, or data sheet of a GPU.
DeviceKind = Literal["cpu", "virtual", "cuda", "paper"]
#: A library of NVIDIA that Plimsoll uses.
Library = Literal["driver", "nvml", "nvrtc", "cublaslt", "nccl"]


class ScratchOffload(TypedDict):
    """Offloaded tensors that the scratch file holds.

    They pass through windows of host memory. Numbers count layers from the first layer of the model, and never exceed the
    offloaded layers.
    """

    #: Number of layers with optimizer state and master weights in the file. If it is all layers, those of embedding and head
    #: are in the file too.
    optimizer: int
    #: Number of layers with gradients in the file.
    gradients: int
    #: Number of layers with weight matrices in the file.
    weights: int


class Offload(TypedDict):
    """The tensors that a recipe offloads to the host.

    They pass to the device through staging buffers that all layers share. Numbers count layers from the first layer of
    the model. Ops and the order of sums stay the same, so no bit changes. Gradients and weights of a trained layer are
    offloaded only if its optimizer state is, which is used least often.
    """

    #: Number of layers with offloaded optimizer state and master weights. If it is all layers, those of embedding and head are
    #: offloaded too.
    optimizer: int
    #: Number of layers with offloaded gradients, which the host accumulates over the micro-batches of a step.
    gradients: int
    #: Number of layers with offloaded weight matrices, which are fetched for each pass over the layer.
    weights: int
    #: Number of layers whose inputs are on the host between the forward and the backward pass.
    inputs: int
    #: Whether the embedding table and its gradient are offloaded. The host then looks up the rows of the tokens. A head that is
    #: tied to the embedding is offloaded with it.
    embedding: bool
    #: Whether the head and its gradient are offloaded. For the loss, the device then fetches the head in blocks of rows.
    head: bool
    #: Whether the host updates the parameters whose optimizer state is offloaded: their gradients go to the host, and new
    #: weights come back. If false, their optimizer state passes through the device in pieces.
    update: NotRequired[bool]
    #: The part of the offloaded tensors that the scratch file holds instead of host memory.
    file: NotRequired[ScratchOffload]


class Recipe(TypedDict):
    """The planner's choices for one device.

    They never change the experiment: tokens per step, sample order, learning rates, seeds, precision and method.
    """

    #: Sequences per forward and backward pass (the micro-batch); 0 for a storage-only worker, which computes none.
    micro_batch: int
    #: Recompute level of each layer, first layer first.
    recompute: list[Level]
    #: Tensors offloaded to the host.
    offload: NotRequired[Offload]
    #: Lossy rungs taken, each allowed by the user; absent if the recipe is lossless.
    rungs: NotRequired[list[Rung]]


class TimelinePoint(TypedDict):
    """The predicted memory of a device's arena at one time of a step: the fullest of a part of the work.

    All micro-batches use the same bytes, so the points of the forward and backward pass hold for each of them.
    """

    #: The kind of work at this point.
    work: WorkKind
    #: The part of the model or the tensor that is worked on, such as ``layer``, ``loss`` or ``embedding``; absent while the
    #: host fills inputs or reads outputs.
    part: NotRequired[str]
    #: The layer, counted from 0 at the first layer of the model; absent outside the layers.
    layer: NotRequired[int]
    #: The op that runs, such as ``product`` or ``attention_grad``; absent while the host fills inputs or reads outputs.
    op: NotRequired[str]
    #: The tensor that tells most about the op: a weight that it reads, else a gradient or optimizer state, else its output. A
    #: gathered or staged copy has the name of its tensor.
    tensor: NotRequired[str]
    #: Bytes of the arena in use. Their maximum over all points is the size of the arena.
    bytes: int
    #: The same bytes by category. Gaps between tensors count as workspace.
    by_category: dict[str, int]


class DevicePlan(TypedDict):
    """Predicted memory of a device, of the host or of the scratch file under a plan."""

    #: The name of the device; ``host`` for the host, ``file`` for the scratch file.
    name: str
    #: Whether figures of this device come from a simulation.
    simulated: bool
    #: The load line: the most bytes that arena and charges may hold together.
    budget_bytes: int
    #: Bytes of the arena, the only allocation for tensors.
    arena_bytes: int
    #: Bytes held outside the arena: CUDA context, kernels, library workspaces, and the process itself.
    charges_bytes: int
    #: Bytes of arena and charges together.
    peak_bytes: int
    #: Bytes of the tensors in the arena by category, at the moment when the arena is fullest. Empty if no tensor lies in it.
    by_category: dict[str, int]
    #: Most bytes of the arena in use during each kind of work. Empty if no tensor lies in the arena.
    by_program: dict[str, int]
    #: The arena over one step, in at most 32 points: loading, forward pass, backward pass, update, evaluation, generation and
    #: saving, in this order. The peak of each kind of work is among them, except of ``re-plan``, which runs no ops. Empty for
    #: the host and the scratch file.
    timeline: NotRequired[list[TimelinePoint]]
    #: Largest sum of the bytes of simultaneously live tensors. No placement of the tensors needs a smaller arena.
    lower_bound_bytes: int


class GemmAlgorithms(TypedDict):
    """The cuBLASLt algorithm of each matrix product of a run on a GPU.

    The algorithm decides the last bits of a product, so it is chosen once and stored with plan and checkpoint.
    """

    #: Version of cuBLASLt as reported by the library.
    library: int
    #: The GPU's model name, as reported by the driver.
    gpu: str
    #: Newest CUDA version supported by the driver: 12040 is 12.4.
    driver: int
    #: The algorithm of each matrix product, 64 bytes in hexadecimal, by the name of the product.
    chosen: dict[str, str]
    #: Whether further algorithms are those that the library proposes first, which are the same each time. Otherwise they are
    #: chosen by their measured time.
    untimed: NotRequired[bool]


class RungEffect(TypedDict):
    """The predicted effect of taking a rung."""

    #: Bytes freed on the device; negative if the device holds more.
    freed_bytes: int
    #: Bytes added on the host; negative if the host holds less.
    host_bytes: int
    #: Bytes added in the scratch file; negative if the file holds less.
    file_bytes: NotRequired[int]
    #: Seconds added to a step; negative if the step is faster.
    added_seconds: float
    #: Predicted tokens (including padding) per second with the rung.
    tokens_per_second: float


#: A rung of the memory ladder with its predicted effects.
RungPrice = TypedDict(
    "RungPrice",
    {
        #: Name of the rung: ``micro_batch``, ``recompute``, an offload such as ``offload.optimizer``, or a lossy rung such as
        #: ``nf4``.
        "rung": str,
        #: Effect of the rung on the numbers.
        "class": Class,
        #: The loss of accuracy, in words.
        "accuracy_impact": str,
        #: Whether the planner may take the rung. Always true for a rung that is not lossy.
        "allowed": bool,
        #: Effect of taking this rung in full on the plain recipe (one micro-batch, no recompute, no offload). No other rung is
        #: taken, except one that it requires.
        "alone": RungEffect,
        #: Effect of this rung in the plan, compared with the same plan without the rung. Absent if the plan does not take it.
        "in_plan": "NotRequired[RungEffect]",
    },
)


class WorkerPlan(TypedDict):
    """The plan of one worker (device) of a team. All figures are predicted."""

    #: The device's name.
    device: str
    #: The recipe of this worker.
    recipe: Recipe
    #: Number of sequences that the worker computes in each optimizer step. In a pipeline, these are all sequences. 0 for a
    #: storage-only worker.
    sequences: int
    #: Layers of the worker's pipeline stage, as two indices: its first layer, and the layer after its last. Absent unless the
    #: team is a pipeline.
    layers: NotRequired[list[int]]
    #: The worker's shard of weights, gradients and optimizer state in 1024ths. Absent unless the team is sharded.
    shard_1024ths: NotRequired[int]
    #: The reason why a storage-only worker computes no sequences; absent for a worker that computes.
    reason: NotRequired[str]
    #: The algorithms of the GPU's matrix products; absent before the GPU was opened, and for other devices.
    algorithms: NotRequired[GemmAlgorithms]
    #: Seconds of a step in which the worker computes.
    busy_seconds: float
    #: Seconds of a step in which the worker communicates or waits for other workers.
    idle_seconds: float
    #: Effect of each rung on this worker. Filled with ``--explain``, else absent.
    ladder: NotRequired[list[RungPrice]]


class ScalingEfficiency(TypedDict):
    """The throughput of the devices of a data parallel team if each runs alone, and the upper bound for the team.

    All figures are predicted tokens (including padding) per second.
    """

    #: Sum of the throughputs of all devices of the team, each running the whole step alone.
    single_device_tokens_per_second: float
    #: Throughput of the fastest data parallel split over these devices if the all-reduce took no time; 0 if no split is
    #: possible. It is below the sum of the single devices for two reasons. Sequences are not divided, so shares only
    #: approximate the speeds. Every device executes the whole optimizer update.
    upper_bound_tokens_per_second: float


class FasterAlone(TypedDict):
    """A part of the team that would be faster alone than the whole team."""

    #: The name of a device, or of a host that stands for all of its devices.
    name: str
    #: Predicted tokens (including padding) per second of that part.
    tokens_per_second: float


class EvaluatorPlan(TypedDict):
    """The plan of an evaluator: a device outside the team that evaluates while the team trains. All figures are predicted."""

    #: The recipe of the evaluator. Its micro-batch is the number of rows that one forward pass evaluates.
    recipe: Recipe
    #: Planned memory of the evaluator, under its own load line. The evaluator holds weights and activations only.
    device: DevicePlan
    #: Number of rows of an evaluation; absent if the evaluation data have not been read.
    rows: NotRequired[int]
    #: Seconds of a whole evaluation on the evaluator. If the number of rows is unknown, seconds per row of a long evaluation.
    seconds: float
    #: Seconds of a whole evaluation if the team itself evaluates. If the number of rows is unknown, seconds per row.
    team_seconds: float
    #: Seconds in which the team sends its weights to the evaluator, once per evaluation.
    weight_transfer_seconds: float


class ExcludedDevice(TypedDict):
    """A requested or detected device that takes no part in the training steps."""

    #: The device's name.
    device: str
    #: Index of the device, from 0, among all requested devices. Several paper devices may share a name.
    device_index: int
    #: The reason for the exclusion.
    reason: str
    #: Command-line settings with which the device would take part; absent if the planner found none.
    remedy: NotRequired[str]
    #: Predicted tokens (including padding) per second of the team with this device; absent if it cannot take part.
    tokens_per_second: NotRequired[float]
    #: The plan of the evaluations that the device does while the team trains; absent if the device stays idle.
    evaluator_plan: NotRequired[EvaluatorPlan]


class Predicted(TypedDict):
    """The predicted speed of a plan."""

    #: Seconds of one optimizer step; if nothing is trained, seconds of one evaluation.
    step_seconds: float
    #: Tokens (including padding) per second.
    tokens_per_second: float


class Alternative(TypedDict):
    """A plan for the team that the planner compared with others. ``--explain`` lists all of them, the chosen one included."""

    #: The parallelism of this alternative; absent if it is a single device.
    parallelism: NotRequired[Parallelism]
    #: Names of the devices that take part, by rank.
    devices: list[str]
    #: The work and the recipe of each device in words, by rank, such as ``3 sequences, micro-batch 3, …``.
    shares: list[str]
    #: Whether every device stays under its load line.
    fits: bool
    #: Predicted peak of each device in bytes, by rank, with charges. It is exact for the chosen plan, and for a data parallel
    #: team that seemed faster and was packed. For all others it is a lower bound.
    peak_bytes: list[int]
    #: Predicted speed of the alternative.
    predicted: Predicted


class MachineHost(TypedDict):
    """The host memory of one machine of a team."""

    #: The host as named in ``--devices``: ``pc1/host``, or ``host`` for the devices without a machine.
    name: str
    #: The load line of the host for offloaded tensors.
    budget_bytes: int
    #: Bytes that the devices of the machine offload to it.
    arena_bytes: int


class PredictedGeneration(TypedDict):
    """The predicted speed at which several sequences are generated at once, as in a run that samples completions."""

    #: Sequences that are generated at once, on all devices together.
    sequences: int
    #: Seconds for one more token of each of them. The choice of the tokens, on the host, comes on top.
    token_seconds: float


class SmallestRecipe(TypedDict):
    """The recipe of the smallest peak, for a run that samples completions."""

    #: The recipe.
    recipe: Recipe
    #: Completions that it samples at once.
    slots: int
    #: The lowest load line under which it fits.
    peak_bytes: int
    #: Most bytes of the arena in use during each kind of work.
    by_program: dict[str, int]
    #: Predicted seconds of one optimizer step.
    step_seconds: float


class Remedy(TypedDict):
    """A remedy for a run that does not fit: the smallest budget that fits if the given lossy rungs are allowed."""

    #: Lossy rungs that must be allowed; empty if the remedy needs none.
    allow: list[Rung]
    #: Smallest load line under which the run fits with the rungs in ``allow``: of the device, or of a team's first device.
    budget_bytes: int
    #: Required host memory; absent if the host's present load line is enough.
    host_bytes: NotRequired[int]
    #: Required size of the scratch file; absent if the file's present load line is enough.
    file_bytes: NotRequired[int]
    #: Predicted peak of the device with the rungs in ``allow``. Absent for a team, and if the remedy also needs a higher load
    #: line, more host memory or a larger scratch file.
    peak_bytes: NotRequired[int]
    #: Required load lines of the team's devices other than the first, by device name; absent if none has to change. If several
    #: devices share a name, each of them that has a lower load line is raised to this one.
    other_budget_bytes: NotRequired[dict[str, int]]


class PlannedWorkload(TypedDict):
    """The workload that a plan was made for. A run with another workload cannot use the plan."""

    #: Number of parameters of the model.
    parameters: int
    #: Number of tokens per sequence.
    sequence: int
    #: Number of tokens per optimizer step, including padding.
    batch_tokens: int


class Fallback(TypedDict):
    """The replacement of the requested device by the CPU (``run.fallback``).

    It takes place if no permitted recipe fits on the requested device.
    """

    #: The name of the device that the CPU replaces; of several, that of the first in the refused plan.
    device: str
    #: The requested device's load line.
    budget_bytes: int
    #: Smallest load line of the requested device under which the run would fit on it.
    required_bytes: int


class Recommendation(TypedDict):
    """A change of settings with its predicted effect."""

    #: The change and its effect, one line.
    text: str
    #: The command that applies it.
    command: str
    #: Predicted change of the peaks of all devices together, in bytes; negative if they fall.
    bytes: int
    #: Predicted speed after the change divided by that before it.
    speedup: float


#: A plan, or a refusal with the remedies that would make the run fit.
Plan = TypedDict(
    "Plan",
    {
        #: Whether the run fits under every load line.
        "fits": bool,
        #: The chosen recipe; of a team, the recipe of rank 0. If nothing fits, the smallest recipe.
        "recipe": Recipe,
        #: Effect of the plan's rungs on the results of the run, compared with the plain recipe.
        "class": Class,
        #: Lossy rungs taken; empty if the plan loses no accuracy.
        "rungs": list[Rung],
        #: Bytes of a checkpoint on disk.
        "checkpoint_bytes": int,
        #: Memory of each device that takes part, by rank. If nothing fits, memory of one device only.
        "devices": list[DevicePlan],
        #: The parallelism of the team; absent for a single device.
        "parallelism": "NotRequired[Parallelism]",
        #: The workers of the team by rank; absent for a single device.
        "team": "NotRequired[list[WorkerPlan]]",
        #: Throughput of the team compared with its devices. Absent for a single device, a sharded team, a pipeline, or workers
        #: taken over from an earlier plan.
        "scaling_efficiency": "NotRequired[ScalingEfficiency]",
        #: Predicted seconds that the links of the team add to a step; absent for a single device.
        "link_seconds": "NotRequired[float]",
        #: A device, or a host with its devices, that would be faster alone than the whole team. Absent if there is none. Also
        #: absent if the planner may exclude slow devices itself.
        "faster_alone": "NotRequired[FasterAlone]",
        #: Devices that take no part, with the reason; absent if all take part.
        "excluded": "NotRequired[list[ExcludedDevice]]",
        #: The plan and its alternatives for the team. Those that fit come first; among equals, faster ones come first. Filled
        #: with ``--explain``, else absent.
        "alternatives": "NotRequired[list[Alternative]]",
        #: Memory of the host. On several machines, the sum of their hosts.
        "host": DevicePlan,
        #: Memory of the host of each machine; absent if only one machine has host memory for offloaded tensors.
        "machine_hosts": "NotRequired[list[MachineHost]]",
        #: The scratch file; absent if the plan does not use it.
        "file": "NotRequired[DevicePlan]",
        #: Predicted speed.
        "predicted": Predicted,
        #: Predicted speed of generation; absent unless several sequences are generated at once.
        "generation": "NotRequired[PredictedGeneration]",
        #: The recipe of the smallest peak. Filled by ``plimsoll plan`` for a run that samples completions on one device, else
        #: absent.
        "smallest": "NotRequired[SmallestRecipe]",
        #: Remedies if the run does not fit, least loss first; empty if it fits.
        "needs": list[Remedy],
        #: The workload that was planned; absent if only a part of a run was planned.
        "planned_for": "NotRequired[PlannedWorkload]",
        #: A note that other programs used the CPU while its rates were measured, with the consequence and the remedy. absent if
        #: the measurement was undisturbed.
        "contention_note": "NotRequired[str]",
        #: A note on limits that earlier runs found and that this plan respects: a device could not hold all of its free memory,
        #: or was slower than calibrated. Absent if no limit applies.
        "shortfall_note": "NotRequired[str]",
        #: The algorithms of the GPU's matrix products; absent before the GPU was opened, and for other devices.
        "algorithms": "NotRequired[GemmAlgorithms]",
        #: The fallback from the requested device to the CPU; absent if the requested device is planned.
        "fallback": "NotRequired[Fallback]",
        #: Predicted effect of each rung. Filled with ``--explain`` for a single device, else absent.
        "ladder": "NotRequired[list[RungPrice]]",
        #: Changes of settings that the planner predicts to make the run faster. Those that keep the results come first; among
        #: equals, the fastest comes first. Filled with ``--advise``, else absent.
        "recommendations": "NotRequired[list[Recommendation]]",
    },
)


class RunEnvironment(TypedDict):
    """The program that started a run, and the machine that it started on.

    The models of GPUs are in the plan (``GemmAlgorithms``).
    """

    #: Version of Plimsoll.
    plimsoll_version: str
    #: Git commit from which the program was built; absent if the build was not given one (``PLIMSOLL_COMMIT``).
    commit: NotRequired[str]
    #: The operating system with its release, such as ``linux 6.8.0``.
    system: str
    #: Model name of the processor.
    processor: str
    #: Number of physical cores that the process may use.
    cores: int
    #: Memory of the machine, or a smaller limit on the process.
    memory_bytes: int


class HeldMemory(TypedDict):
    """Measured memory of a training device at one moment."""

    #: The device's name.
    device: str
    #: Bytes that the run holds on the device now (CPU: that the process holds).
    held_bytes: int
    #: Most bytes that the run has held there so far, by the count of its process; ``None`` if the system does not report it,
    #: and for a GPU.
    peak_bytes: int | None
    #: Measured bytes of the arena under the present plan by category, at the moment when the most bytes of tensors were in use
    #: so far. Written when they may have changed, and absent in the measurements between. Never written for devices that do not
    #: measure them, such as remote ones.
    arena_by_category: NotRequired[dict[str, int]]


class CompletionFigures(TypedDict):
    """Lengths of the completions of a round."""

    #: Number of completions.
    count: int
    #: Mean number of tokens.
    mean_length: float
    #: Share of completions, 0 to 1, without an end token.
    clipped_ratio: float


class RoundSeconds(TypedDict):
    """Measured seconds of the phases of a step over sampled completions. A phase that does not run takes 0."""

    #: Sampling of completions.
    generate: float
    #: Rewards of completions, after the last one was sampled.
    reward: float
    #: Log-probabilities of their tokens.
    score: float
    #: Log-probabilities of their tokens under the initial weights of the run.
    reference: float
    #: Gradients and update.
    update: float


class StartEvent(TypedDict):
    """Training starts, or continues after ``--resume``."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["start"]
    #: The next step to execute, counted from 1.
    step: int
    #: The last step of the run; 0 if the length of the run is given in hours.
    steps: int
    #: Number of parameters of the model.
    parameters: int
    #: Planned bytes of the arenas of all devices together, including the evaluator. Host arenas do not count.
    arena_bytes: int
    #: Predicted seconds of a step.
    predicted_step_seconds: float
    #: Number of floating-point operations in the matrix products of a step. Recomputed products do not count.
    product_flops: float
    #: Peak rate of matrix products of all training devices together, in floating-point operations per second. 0 if the rate is
    #: unknown, or if other programs disturbed its measurement.
    peak_flops: float
    #: Whether any training device is simulated; all seconds of the run are then simulated.
    simulated: bool
    #: Names of the devices that train.
    devices: list[str]
    #: The program and the machine of this start; absent in logs of earlier builds.
    environment: NotRequired[RunEnvironment]


class StepEvent(TypedDict):
    """An optimizer step completed."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["step"]
    #: The step, counted from 1.
    step: int
    #: Mean loss over the labelled tokens of the step. NaN, in JSON ``None``, if it has none.
    loss: float | None
    #: Global gradient norm before clipping.
    norm: float
    #: The learning rate of the step.
    learning_rate: float
    #: Number of tokens of the step, including padding.
    tokens: int
    #: Number of tokens that count in the loss.
    labelled_tokens: int
    #: Seconds that the step took.
    seconds: float
    #: Bytes that all training devices together hold after the step (CPU: that the process holds).
    bytes: int
    #: Memory of each training device. Written at most twice a second; absent in the events between.
    memory: NotRequired[list[HeldMemory]]


class EvaluationEvent(TypedDict):
    """An evaluation completed.

    If a device outside the team evaluates while training goes on, this event comes after the events of later steps.
    """

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["evaluation"]
    #: The step after which the weights were evaluated.
    step: int
    #: Mean loss over the labelled tokens. NaN, in JSON ``None``, for sampled completions, which have a reward.
    loss: float | None
    #: Mean reward of the most likely completions; absent for other objectives, and if none has a reward.
    reward: NotRequired[float]
    #: Share of answers, 0 to 1, with all tokens predicted correctly; ``None`` if the data are not all prompts with one short
    #: answer.
    exact_match: float | None
    #: Number of labelled tokens.
    tokens: int
    #: Seconds that the evaluation took.
    seconds: float
    #: The device that evaluated concurrently with training; absent if the training devices evaluated.
    device: NotRequired[str]


class ReferenceEvent(TypedDict):
    """Progress of the reference pass: log-probabilities of answers under the initial weights.

    Written about every ten seconds, and at the end of the pass.
    """

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["reference"]
    #: Number of rows that this pass has computed so far.
    rows: int
    #: Number of rows that were missing when this pass began.
    all_rows: int
    #: Seconds since this pass began.
    seconds: float


class PreferencesEvent(TypedDict):
    """Rewards of the pairs of a step before its update, or of the evaluation pairs.

    The event of the step or the evaluation follows.
    """

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["preferences"]
    #: The step; for an evaluation, the step after which the weights were evaluated.
    step: int
    #: Whether the answers are those of the evaluation data.
    evaluation: bool
    #: Number of pairs of answers.
    pairs: int
    #: Mean reward of the chosen answers.
    chosen_reward: float
    #: Mean reward of the rejected answers.
    rejected_reward: float
    #: Share of pairs, 0 to 1, in which the chosen answer has the larger reward.
    accuracy: float


class RoundEvent(TypedDict):
    """Figures of the completions of a step, before its update. The event of the step follows."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["round"]
    #: The step.
    step: int
    #: The round, counted from 1. It has several steps with ``grpo.num_iterations``.
    round: int
    #: Mean reward of the completions; NaN, in JSON ``None``, if none has a reward.
    reward: float | None
    #: Standard deviation of the rewards; NaN, in JSON ``None``, if fewer than two completions have one.
    reward_std: float | None
    #: Share of completions, 0 to 1, whose group has equal rewards. Such a group teaches nothing.
    frac_reward_zero_std: float
    #: Mean reward of each reward function, under its name. NaN, in JSON ``None``, without an opinion.
    rewards: NotRequired[dict[str, float | None]]
    #: Mean KL divergence of a token from the reference model; absent without KL penalty.
    kl: NotRequired[float]
    #: Mean entropy of the distribution of a token, in nats; absent for completions of a file.
    entropy: NotRequired[float]
    #: Share of tokens, 0 to 1, whose ratio is clipped; of completions with ratios of completions. Absent if all ratios are 1.
    clip_ratio: NotRequired[float]
    #: Mean absolute difference between the log-probabilities of the sampler and those of the loss; absent if they are not
    #: compared.
    sampling_difference: NotRequired[float]
    #: Lengths of the completions.
    completions: CompletionFigures
    #: Seconds of the phases.
    seconds: RoundSeconds


class CheckpointEvent(TypedDict):
    """A checkpoint is complete on disk."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["checkpoint"]
    #: The last step that the checkpoint contains.
    step: int
    #: The folder of the checkpoint.
    path: str
    #: Seconds that saving took.
    seconds: float


#: A device ran out of memory, or its load line moved. The run continued with another recipe, or repeated the failed work.
RecoveryEvent = TypedDict(
    "RecoveryEvent",
    {
        #: Version of the format of ``events.jsonl``.
        "version": int,
        #: Time of the event, in seconds since the Unix epoch.
        "time": float,
        "event": Literal["recovery"],
        #: The step during or after which the recovery took place.
        "step": int,
        #: The device that changed its recipe.
        "device": str,
        #: The cause of the recovery.
        "reason": str,
        #: The recipe before the recovery.
        "from": Recipe,
        #: The recipe after the recovery.
        "to": Recipe,
        #: Number of sequences that the device computes per step, before and after the recovery. Absent if this number did not
        #: change.
        "sequences": "NotRequired[list[int]]",
        #: Effect of the change on the results of the run.
        "class": Class,
        #: Planned bytes of the device's arena before the recovery.
        "arena_bytes_before": int,
        #: Planned bytes of the device's arena after the recovery.
        "arena_bytes": int,
        #: Measured bytes that the device (CPU: the process) held before the recovery; absent if the device kept its plan.
        "held_bytes_before": "NotRequired[int]",
        #: Measured bytes that the device (CPU: the process) held after the recovery; absent if the device kept its plan.
        "held_bytes": "NotRequired[int]",
        #: Measured seconds of the recovery, without the repeated work.
        "seconds": float,
        #: Predicted seconds of a step under the recipe before the recovery.
        "predicted_step_seconds_before": float,
        #: Predicted seconds of a step under the recipe after the recovery.
        "predicted_step_seconds": float,
        #: Measured median seconds of a step between the previous recovery and this one; absent if no step completed between
        #: them.
        "step_seconds_before": "NotRequired[float]",
        #: Measured median seconds of a step between this recovery and the next one, or the end of the run. Absent until the run
        #: has ended, and if no step completed between them.
        "step_seconds": "NotRequired[float]",
    },
)


class DeviceLostEvent(TypedDict):
    """A device was lost; training continues on the remaining devices."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["device_lost"]
    #: The step during or after which the device was lost.
    step: int
    #: The name of the lost device.
    device: str
    #: The cause, as far as it is known.
    reason: str
    #: Names of the devices that continue the run. A device that the plan excluded before may be among them.
    remaining_devices: list[str]
    #: Step of the checkpoint from which training continues; 0 if it begins anew. Absent if training continues without going
    #: back, because no completed step was lost.
    resumed_from_step: NotRequired[int]


class DeviceReturnedEvent(TypedDict):
    """A lost device returned and joined the team again."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["device_returned"]
    #: The last step completed without the device.
    step: int
    #: The name of the device.
    device: str
    #: Names of all devices that train from now on.
    team: list[str]


class ThermalPauseEvent(TypedDict):
    """Training paused between two steps, because a device was too warm or throttled by heat."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["thermal_pause"]
    #: The last step completed before the pause.
    step: int
    #: The name of the device.
    device: str
    #: Temperature of the device before the pause, in degrees Celsius.
    celsius: float
    #: Whether the device reported thermal throttling.
    throttled: bool
    #: Temperature of the device after the pause, in degrees Celsius.
    celsius_after: float
    #: Highest permitted temperature in degrees Celsius (``run.max_temperature``).
    max_celsius: float
    #: Duration of the pause in seconds.
    seconds: float


class WarningEvent(TypedDict):
    """A warning for the user."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["warning"]
    #: The warning, one line.
    message: str


class EndEvent(TypedDict):
    """The run ended."""

    #: Version of the format of ``events.jsonl``.
    version: int
    #: Time of the event, in seconds since the Unix epoch.
    time: float
    event: Literal["end"]
    #: The outcome of the run: ``done`` or ``stopped``.
    status: str
    #: Number of completed steps.
    step: int


#: One line of ``events.jsonl``.
Event = Union[
    StartEvent,
    StepEvent,
    EvaluationEvent,
    ReferenceEvent,
    PreferencesEvent,
    RoundEvent,
    CheckpointEvent,
    RecoveryEvent,
    DeviceLostEvent,
    DeviceReturnedEvent,
    ThermalPauseEvent,
    WarningEvent,
    EndEvent,
]


class LossSpan(TypedDict):
    """The training loss at both ends of a run, each the mean over the labelled tokens of a step.

    NaN, in JSON ``null``, if no step with a label completed.
    """

    #: Loss of the first step with a label.
    first: float | None
    #: Loss of the last step with a label.
    last: float | None


class StepSeconds(TypedDict):
    """Seconds of an optimizer step, measured and predicted."""

    #: Measured median over the steps since the last start of the run, in seconds.
    median: float
    #: Measured 95th percentile over the steps since the last start of the run, in seconds.
    p95: float
    #: Seconds of a step that the plan predicts.
    predicted: float


class PreferenceFigures(TypedDict):
    """Rewards of pairs of answers.

    The reward of an answer is ``dpo.beta`` times a difference, as in TRL: its log-probability under the current weights
    minus that under the initial weights.
    """

    #: Number of pairs of answers.
    pairs: int
    #: Mean reward of the chosen answers.
    chosen_reward: float
    #: Mean reward of the rejected answers.
    rejected_reward: float
    #: Share of pairs, 0 to 1, in which the chosen answer has the larger reward.
    accuracy: float


class EvalResult(TypedDict):
    """The result of an evaluation."""

    #: Mean loss over the labelled tokens. NaN, in JSON ``None``, for sampled completions, which have a reward.
    loss: float | None
    #: Share of answers, 0 to 1, with all tokens predicted correctly; absent if the data are not all prompts with one short
    #: answer.
    exact_match: NotRequired[float]
    #: Preferences between pairs of answers; absent for other data. The loss is then that of the objective, per pair.
    preferences: NotRequired[PreferenceFigures]
    #: Mean reward of the most likely completions; absent for other objectives, and if none has a reward.
    reward: NotRequired[float]


class RoundFigures(TypedDict):
    """Figures of the completions of a round, under the names of TRL. JSON has no NaN: it is written as ``null``."""

    #: Mean reward of the completions; NaN, in JSON ``None``, if none has a reward.
    reward: float | None
    #: Standard deviation of the rewards; NaN, in JSON ``None``, if fewer than two completions have one.
    reward_std: float | None
    #: Share of completions, 0 to 1, whose group has equal rewards. Such a group teaches nothing.
    frac_reward_zero_std: float
    #: Mean reward of each reward function, under its name. NaN, in JSON ``None``, without an opinion.
    rewards: NotRequired[dict[str, float | None]]
    #: Mean KL divergence of a token from the reference model; absent without KL penalty.
    kl: NotRequired[float]
    #: Mean entropy of the distribution of a token, in nats; absent for completions of a file.
    entropy: NotRequired[float]
    #: Share of tokens, 0 to 1, whose ratio is clipped; of completions with ratios of completions. Absent if all ratios are 1.
    clip_ratio: NotRequired[float]
    #: Mean absolute difference between the log-probabilities of the sampler and those of the loss; absent if they are not
    #: compared.
    sampling_difference: NotRequired[float]
    #: Lengths of the completions.
    completions: CompletionFigures
    #: Seconds of the phases.
    seconds: RoundSeconds


class DeviceMemory(TypedDict):
    """Planned and measured memory of a device."""

    #: The device's name.
    device: str
    #: The device's load line at the time when the device held the most bytes.
    budget_bytes: int
    #: The device's load line at the end of the run; absent if it did not move during the run.
    budget_bytes_at_end: NotRequired[int]
    #: Planned bytes of the arena.
    arena_bytes: int
    #: Measured high-water mark of the arena in bytes.
    arena_measured_bytes: int
    #: Measured bytes of the arena by category at the moment when the most bytes of tensors were in use. Gaps between tensors
    #: count as workspace, so the sum is ``arena_measured_bytes``. Absent if they were not measured, as on remote devices.
    arena_measured_by_category: NotRequired[dict[str, int]]
    #: Planned bytes of arena and charges together.
    predicted_bytes: int
    #: Measured peak of the device (CPU: of the process) in bytes; absent if the machine cannot measure it.
    measured_bytes: NotRequired[int]
    #: The source of ``measured_bytes``; absent without a measurement.
    measured_by: NotRequired[MeasuredBy]
    #: Measured bytes by which this process passed the load line at any time since its start; absent if it did not. For the CPU
    #: and virtual devices, the preparation of data and plan counts too.
    over_load_line_bytes: NotRequired[int]


class CollectiveBackend(TypedDict):
    """The backend by which a GPU exchanges with the other GPUs of its team."""

    backend: Literal["nccl", "host"]
    #: The reason why this GPU cannot exchange by NCCL; absent if another GPU of the team is the cause.
    reason: NotRequired[str]


class WorkerResult(TypedDict):
    """A worker of the team in the last step."""

    #: The device's name.
    device: str
    #: Whether the figures come from a simulation.
    simulated: bool
    #: Number of sequences that the worker computed in the last step.
    sequences: int
    #: The worker's recipe.
    recipe: Recipe
    #: Measured compute time of a step divided by the predicted one: the median over the steps since the last start of the run.
    #: Time spent waiting does not count. 0 for a worker without sequences.
    compute_slowdown: float
    #: The backend of the worker's collectives. Absent for a device without NCCL, and for a team that does not exchange by NCCL.
    collectives: NotRequired[CollectiveBackend]


class EvaluatorResult(TypedDict):
    """A device that evaluated while the team trained, since the last start of the run."""

    #: The device's name.
    device: str
    #: Whether the figures come from a simulation.
    simulated: bool
    #: The recipe of the evaluator. Its micro-batch is the number of rows that one forward pass evaluates.
    recipe: Recipe
    #: Number of evaluations since the last start of the run.
    evaluations: int
    #: Measured median of the seconds of an evaluation.
    seconds: float
    #: Predicted seconds of an evaluation.
    predicted_seconds: float
    #: Measured median of the seconds in which the team sent its weights to the evaluator once.
    weight_transfer_seconds: float
    #: Predicted seconds in which the team sends its weights to the evaluator once.
    predicted_weight_transfer_seconds: float


#: A change of a device's recipe during a run: to one with less memory after an out-of-memory error or under memory pressure, or
#: back to a faster one. If ``from`` equals ``to``, the device only repeated the work for which memory was refused, or its share
#: of the sequences changed.
Recovery = TypedDict(
    "Recovery",
    {
        #: The step during or after which the recovery took place.
        "step": int,
        #: The device that changed its recipe.
        "device": str,
        #: The cause of the recovery.
        "reason": str,
        #: The recipe before the recovery.
        "from": Recipe,
        #: The recipe after the recovery.
        "to": Recipe,
        #: Number of sequences that the device computes per step, before and after the recovery. Absent if this number did not
        #: change.
        "sequences": "NotRequired[list[int]]",
        #: Effect of the change on the results of the run.
        "class": Class,
        #: Planned bytes of the device's arena before the recovery.
        "arena_bytes_before": int,
        #: Planned bytes of the device's arena after the recovery.
        "arena_bytes": int,
        #: Measured bytes that the device (CPU: the process) held before the recovery; absent if the device kept its plan.
        "held_bytes_before": "NotRequired[int]",
        #: Measured bytes that the device (CPU: the process) held after the recovery; absent if the device kept its plan.
        "held_bytes": "NotRequired[int]",
        #: Measured seconds of the recovery, without the repeated work.
        "seconds": float,
        #: Predicted seconds of a step under the recipe before the recovery.
        "predicted_step_seconds_before": float,
        #: Predicted seconds of a step under the recipe after the recovery.
        "predicted_step_seconds": float,
        #: Measured median seconds of a step between the previous recovery and this one; absent if no step completed between
        #: them.
        "step_seconds_before": "NotRequired[float]",
        #: Measured median seconds of a step between this recovery and the next one, or the end of the run. Absent until the run
        #: has ended, and if no step completed between them.
        "step_seconds": "NotRequired[float]",
    },
)


class LostDevice(TypedDict):
    """A device lost during a run."""

    #: The device's name.
    device: str
    #: The step during or after which the device was lost.
    step: int
    #: Step of the checkpoint from which training continued on the other devices; 0 if it began anew. Absent if training
    #: continued without going back, because no completed step was lost.
    resumed_from_step: NotRequired[int]
    #: Last step that the team completed before the device joined it again; absent if the device did not return.
    returned_after_step: NotRequired[int]


class RunResult(TypedDict):
    """The content of ``result.json``. Figures are measured, except fields with ``predicted`` in their name."""

    #: Whether the run is done or stopped early.
    status: RunStatus
    #: Number of completed optimizer steps, including those before a resume.
    steps: int
    #: The training loss of the first and the last step.
    loss: LossSpan
    #: Number of steps without any label, including those before a resume; absent if every step had one.
    unlabelled_steps: NotRequired[int]
    #: Tokens (including padding) per second over all steps since the last start of the run. Time outside steps does not count.
    tokens_per_second: float
    #: Seconds of an optimizer step, measured and predicted.
    step_seconds: StepSeconds
    #: The last evaluation; ``None`` without evaluation data.
    eval: EvalResult | None
    #: Figures of the steps over sampled completions since the last start of the run, at most the last 1,000; absent for other
    #: objectives. All are in ``events.jsonl``.
    rounds: NotRequired[list[RoundFigures]]
    #: Memory of every device that took part.
    memory: list[DeviceMemory]
    #: The recipe of the last step; of a team, the recipe of rank 0.
    recipe: Recipe
    #: The parallelism of the last step; absent for a single device.
    parallelism: NotRequired[Parallelism]
    #: The workers of the team in the last step, by rank; absent for a single device.
    team: NotRequired[list[WorkerResult]]
    #: The device that evaluated while the team trained; absent without such a device.
    evaluator: NotRequired[EvaluatorResult]
    #: Recoveries since the last start of the run; empty if there was none.
    recoveries: list[Recovery]
    #: Devices lost since the last start of the run; absent if none was.
    lost: NotRequired[list[LostDevice]]
    #: Injected faults (``--inject-…``) that did not occur since the last start of the run, as given on the command line; absent
    #: if all occurred.
    faults_not_triggered: NotRequired[list[str]]
    #: Sum of the seconds in which training paused because a device was too warm, since the last start of the run.
    thermal_pause_seconds: float
    #: The fallback from the requested device to the CPU; absent if the requested device ran.
    fallback: NotRequired[Fallback]
    #: Whether the same command gives the same bits on the same kind of machine.
    reproducible: bool
    #: The reasons why the run is reproducible, or why it is not.
    reproducible_because: list[str]


class Cache(TypedDict):
    """A cache of the processor."""

    #: Level; 1 is nearest to the core.
    level: int
    #: Size of the cache.
    bytes: int
    #: Number of hardware threads that share the cache.
    shared_by: int


class DefaultLimits(TypedDict):
    """Default limits of a device, with their reason."""

    #: Load line; zero for a GPU that cannot be used.
    budget_bytes: int
    #: Number of threads that compute; 0 for a GPU.
    threads: int
    #: Explanation of the limits, or the reason why a GPU cannot be used.
    reason: str


class Process(TypedDict):
    """A process that computes or draws on a GPU."""

    #: Process id.
    pid: int
    #: Process name, often with its arguments; ``None`` if it is not visible.
    name: str | None
    #: Memory held by the process; ``None`` if the driver does not report it.
    held_bytes: int | None
    #: Whether the process draws on the GPU, as a display server does. It may compute as well.
    draws: bool


class Pcie(TypedDict):
    """The PCIe link between a GPU and the host."""

    #: The highest generation that both ends support; the present one if NVML does not report it.
    generation: int
    #: The highest number of lanes; the present one if NVML does not report it.
    lanes: int
    #: The present generation; idle GPUs reduce it.
    generation_now: int
    #: The present number of lanes.
    lanes_now: int


class Condition(TypedDict):
    """Temperature, clocks, power and load of a GPU at one moment."""

    #: Chip temperature in degrees Celsius; ``None`` if it is not reported.
    temperature_celsius: int | None
    #: Multiprocessor clock in MHz; ``None`` if it is not reported.
    clock_mhz: int | None
    #: The highest multiprocessor clock in MHz; ``None`` if it is not reported.
    clock_mhz_max: int | None
    #: Memory clock in MHz; ``None`` if it is not reported.
    memory_clock_mhz: int | None
    #: Reasons for reduced clocks; empty if there are none or they are not reported.
    throttled_by: list[str]
    #: Power draw in watts; ``None`` if it is not reported.
    power_watts: float | None
    #: Power limit in watts; ``None`` if it is not reported.
    power_watts_max: float | None
    #: Share of the recent sampling period in which a kernel ran, 0 to 1; ``None`` if it is not reported.
    busy: float | None


class Gpu(TypedDict):
    """Facts that only GPUs have."""

    #: Architecture family, such as ``Ampere``.
    family: str
    #: Compute capability, such as ``8.6``.
    compute_capability: str
    #: Unique identifier (UUID) that the driver gives the GPU.
    uuid: str
    #: Address on the PCI bus.
    bus: str
    #: Memory that all processes together use on the GPU. ``None`` if NVML does not report it.
    held_bytes: int | None
    #: Memory reserved by the driver. ``None`` if NVML does not report it.
    reserved_bytes: int | None
    #: Processes that compute or draw on the GPU; empty if there are none or NVML does not see them.
    processes: list[Process]
    #: Link to the host. ``None`` if NVML does not report it.
    pcie: Pcie | None
    #: Temperature, clocks and utilisation now.
    condition: Condition
    #: Reason why Plimsoll cannot use the GPU. ``None`` if it can.
    unusable: str | None


class DeviceInfo(TypedDict):
    """A device of this machine."""

    #: Name in run files and for ``--devices``.
    name: str
    #: Kind of the device.
    kind: DeviceKind
    #: Model name given by the maker.
    model: str
    #: Total memory of a GPU. For the processor: the machine's memory, or a smaller limit on this process, such as the
    #: container's.
    memory_total_bytes: int
    #: Free bytes of that memory now. If NVML does not report it for a GPU, all of its memory is assumed to be free.
    memory_free_bytes: int
    #: Source of the figure for free memory. For the processor: the limit that determines it. For a GPU: NVML, or the note that
    #: the figure is assumed.
    memory_bound_by: str
    #: Number of physical cores that this process may use; for a GPU, the number of its multiprocessors.
    cores: int
    #: Number of hardware threads that this process may use; 0 for a GPU.
    threads: int
    #: Instruction sets of the processor by which kernels are selected, such as ``avx2``; empty for a GPU.
    features: list[str]
    #: Caches of the processor, nearest to the core first; empty for a GPU, or if the system does not report them.
    caches: list[Cache]
    #: Limits that Plimsoll chooses if the run file sets none.
    defaults: DefaultLimits
    #: Facts that only GPUs have. Absent for a processor.
    gpu: NotRequired[Gpu]


class LibraryState(TypedDict):
    """An NVIDIA library with its path, or with the command that installs it."""

    #: The library.
    library: Library
    #: Path of the file. ``None`` if no usable version was found.
    path: str | None
    #: Version. ``None`` if no usable version was found, or if the version is not known without loading the library.
    version: str | None
    #: Kind of location, such as a system folder or a Python package. ``None`` if no usable version was found.
    place: str | None
    #: Reason why the library is not usable. ``None`` if it is usable.
    missing: str | None
    #: Command or advice that makes the library usable. ``None`` if it is usable.
    remedy: str | None


class Nvidia(TypedDict):
    """NVIDIA software on this machine."""

    #: Version of the driver. ``None`` if it is not installed or does not start.
    driver: str | None
    #: Newest CUDA version that the driver supports. ``None`` without a working driver.
    cuda: str | None
    #: Reason why no GPU can be used although a driver is installed. ``None`` if the driver works or is not installed.
    error: str | None
    #: State of each NVIDIA library that Plimsoll uses, usable or not.
    libraries: list[LibraryState]
    #: Number of NVIDIA graphics cards on the PCI bus, whether or not the driver lists them.
    cards_on_bus: int


class Machine(TypedDict):
    """The machine as this process sees it."""

    #: The processor, then every GPU that NVIDIA's driver lists, usable or not.
    devices: list[DeviceInfo]
    #: NVIDIA's driver and libraries.
    nvidia: Nvidia


class BudgetChange(TypedDict):
    """A load line that was changed."""

    #: The new load line in bytes.
    budget_bytes: int
    #: Description of the plan under the new load line.
    message: str


class Sample(TypedDict):
    """A prompt from evaluation data with the model's continuation and, if the data have one, the right answer."""

    #: The prompt.
    prompt: str
    #: The answer in the data; absent if the prompt has no single right answer, as in prose.
    expected: NotRequired[str]
    #: The model's continuation of the prompt.
    answer: str


class Trained(TypedDict):
    """Products of a run that ended. The Python function ``plimsoll.train`` returns them."""

    #: Contents of ``result.json``.
    result: RunResult
    #: Prompts of the evaluation data with the text that the model generates.
    samples: list[Sample]
    #: Folder of the written model; ``None`` if the run stopped early or saves nothing.
    model: str | None
    #: Run folder.
    folder: str
