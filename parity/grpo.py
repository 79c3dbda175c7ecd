#!/usr/bin/env python3
"""Compares group relative policy optimization in the `plimsoll` binary with TRL's GRPOTrainer, on random models.

    parity/run grpo [--seed N]
    parity/run grpo --speed ROUNDS [--shape smollm2-135m]
    parity/run grpo --longest MIB

Both train on the same completions with the same rewards, in f32, with the same optimizer. Prints one line per check: ok or FAIL,
its name, the distance found and its limit. Exit code 1 if any failed. With --speed, both sample completions of the same prompts, in
turn, on two threads. It prints the tokens per second of sampling, the seconds of the whole step, and those of the step without
sampling. With --longest, it prints the longest completions that both train on under one memory limit (grpo_memory.py).
"""

import argparse
import itertools
import json
import logging
import operator
import os
import random
import re
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import cases
import live
import reference
from preference import LOSS_LIMIT, STEPS, StepTimer, compare_weights
from reference import relative

PROMPTS_PER_STEP, GENERATIONS = 2, 4
PROMPT_MAX, COMPLETION_MAX = 16, 24  # tokens
EPSILON, EPSILON_HIGH = 0.2, 0.28
LEARNING_RATE, ADAPTER_LEARNING_RATE = 3e-4, 1e-3  # a second iteration clips some tokens, but not all
METRIC_LIMIT = 1e-4  # absolute
OLD_NOISE = 0.3  # standard deviation of given old log-probabilities from those of the initial weights
# Names in the record of a round, and in TRL.
METRICS = [
    ("reward", "reward"), ("reward_std", "reward_std"), ("frac_reward_zero_std", "frac_reward_zero_std"), ("kl", "kl"),
    ("clip_ratio", "clip_ratio/region_mean"), ("completions/mean_length", "completions/mean_length"),
    ("completions/clipped_ratio", "completions/clipped_ratio"),
]


@dataclass(frozen=True)
class Objective:
    """A loss over groups of completions, with its settings."""

    name: str
    loss_type: str
    scale_rewards: str = "group"
    importance_sampling_level: str = "token"
    temperature: float = 1.0
    beta: float = 0.0
    use_bias_correction_kl: bool = True  # the KL term is multiplied with the ratio, TRL's default
    num_iterations: int = 1
    mask_truncated_completions: bool = False
    reward_weights: tuple = ()  # one per reward function; empty: one function
    old_logps: bool = False  # whether the rollouts have old log-probabilities
    adapters: bool = False

    @property
    def learning_rate(self):
        return ADAPTER_LEARNING_RATE if self.adapters else LEARNING_RATE

    @property
    def groups(self):
        """Returns the number of groups that all steps use."""
        return -(-STEPS // self.num_iterations) * PROMPTS_PER_STEP


# Models (by their name in live.MODELS), micro-batches in completions, and objectives.
OBJECTIVES = [
    ("llama", 8, Objective("grpo", "grpo")),
    ("llama", 3, Objective("bnpo, iterations", "bnpo", num_iterations=2)),
    ("llama", 1, Objective("dr_grpo, temperature", "dr_grpo", scale_rewards="none", temperature=0.7)),
    ("llama", 4, Objective("dapo, adapters", "dapo", adapters=True)),
    ("qwen2-tied", 2, Objective("dapo, batch, kl", "dapo", scale_rewards="batch", beta=0.1)),
    ("qwen2-tied", 5, Objective("grpo, sequence, old", "grpo", importance_sampling_level="sequence", old_logps=True)),
    ("qwen2-tied", 8, Objective("bnpo, weights", "bnpo", reward_weights=(1.0, 0.4))),
    ("qwen2-tied", 3, Objective("dapo, masked", "dapo", mask_truncated_completions=True)),
    ("qwen3", 6, Objective("grpo, sequence, iterations", "grpo", scale_rewards="batch", importance_sampling_level="sequence",
                           num_iterations=2)),
    ("qwen3", 4, Objective("dr_grpo, temperature, old", "dr_grpo", temperature=0.7, old_logps=True)),
    ("qwen3", 1, Objective("grpo, kl, adapters", "grpo", beta=0.1, adapters=True)),
    ("qwen3", 2, Objective("bnpo, none, uncorrected kl", "bnpo", scale_rewards="none", beta=0.1, use_bias_correction_kl=False,
                           num_iterations=2)),
    # All at once.
    ("llama", 5, Objective("dapo, all, adapters", "dapo", temperature=0.7, beta=0.1, num_iterations=2,
                           mask_truncated_completions=True, reward_weights=(0.7, 1.5), old_logps=True, adapters=True)),
    ("qwen3", 3, Objective("grpo, all", "grpo", scale_rewards="batch", importance_sampling_level="sequence", temperature=1.4,
                           beta=0.1, num_iterations=2, mask_truncated_completions=True, reward_weights=(-0.5, 1.0))),
]

RUN_FILE = """\
[model]
path = {model}
init = "pretrained"
{adapter}
[data]
train = {data}
format = "{format}"

[train]
objective = "grpo"
steps = {steps}
learning_rate = {learning_rate}
schedule = "constant"
warmup_steps = 0
weight_decay = 0.0
betas = [0.9, 0.95]
eps = 1e-6
clip_norm = 1.0
precision = "f32"
method = "{method}"

[grpo]
num_generations = {generations}
prompts_per_step = {prompts_per_step}
max_prompt_length = {prompt_max}
max_completion_length = {completion_max}
epsilon = {epsilon}
epsilon_high = {epsilon_high}
{settings}
[recipe]
micro_batch = {micro_batch}

[run]
dir = {dir}
devices = "cpu"
"""


def write_tokenizer(directory, vocab):
    """Writes a tokenizer in which token 17 is the word `t17`. Its end token is that of config.json."""
    live.write_tokenizer(directory, vocab)
    # TRL takes the token of padding for an end token, too. No completion has it.
    return PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token=f"t{cases.END}", pad_token="t1", unk_token="t0"
    )


def write_adapter(directory, adapter, seed):
    """Writes an adapter that changes the model, so that the model without it would be a wrong reference."""
    torch.manual_seed(seed)
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    get_peft_model(reference.load(directory, torch.float32), settings).save_pretrained(adapter)


def load(directory, adapter):
    """Loads the model, with trainable adapters if there is an adapter."""
    model = reference.load(directory, torch.float32)
    return PeftModel.from_pretrained(model, adapter, is_trainable=True) if adapter else model


def random_completion(vocab, rng, member):
    """Returns the tokens of a completion. The first of a group ends; some others are truncated, at any length."""
    length = COMPLETION_MAX if member == 1 else rng.randrange(1, COMPLETION_MAX + 1)
    tokens = [rng.randrange(3, vocab) for _ in range(length)]
    if member == 0 or rng.random() < 0.5:
        tokens[-1] = cases.END
    return tokens


def random_rewards(objective, rng, group, member):
    """Returns the rewards of a completion: one number, or one per reward function and null where that function does not apply.

    The completions of group 1 have equal rewards. With several functions, one completion of group 2 has rewards, and none of
    group 5.
    """
    reward = lambda: 0.25 if group == 1 else round(rng.gauss(0.0, 1.0), 3)
    if not objective.reward_weights:
        return reward()
    if group == 5 or (group == 2 and member > 0):
        return [None] * len(objective.reward_weights)
    absent = None if group == 1 else rng.choice([None, None, *range(len(objective.reward_weights))])
    return [None if index == absent else reward() for index in range(len(objective.reward_weights))]


def old_log_probabilities(model, prompt, completion, temperature, rng):
    """Returns the log-probability of each token of a completion, with noise on each token and on the whole completion."""
    with torch.no_grad():
        logits = reference.logits_of(model, prompt + completion)[len(prompt) - 1: -1] / temperature
    exact = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
    shift = rng.gauss(0.0, OLD_NOISE)
    return [round(value + shift + rng.gauss(0.0, OLD_NOISE), 6) for value in exact.tolist()]


def write_rollouts(path, vocab, rng, objective, model):
    """Writes groups of completions of different length, and returns the lines."""
    rollouts = []
    for group in range(objective.groups):
        prompt = [rng.randrange(3, vocab) for _ in range(PROMPT_MAX if group == 3 else rng.randrange(1, PROMPT_MAX + 1))]
        for member in range(GENERATIONS):
            completion = random_completion(vocab, rng, member)
            rewards = random_rewards(objective, rng, group, member)
            rollout = {"prompt_ids": prompt, "completion_ids": completion, "rewards": rewards}
            if objective.old_logps:
                rollout["old_logps"] = old_log_probabilities(model, prompt, completion, objective.temperature, rng)
            rollouts.append(rollout)
    path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    return rollouts


class FromRollouts(GRPOTrainer):
    """A GRPOTrainer that uses the old log-probabilities of the rollouts, if they have any."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if "old_logps" in inputs[0]:  # the trainer adds the fields of the rollouts to its inputs
            batch["old_per_token_logps"] = pad_sequence([torch.tensor(line["old_logps"]) for line in inputs], batch_first=True)
        return batch


def reward_functions(objective):
    """Returns functions that read the rewards of the rollouts."""
    if not objective.reward_weights:
        return [lambda rewards, **_: rewards]
    column = lambda index: lambda rewards, **_: [line[index] for line in rewards]
    return [column(index) for index in range(len(objective.reward_weights))]


def trl_settings(objective, folder, **sizes):
    """Returns the settings of a GRPOTrainer that writes to `folder`. `sizes` are those of steps and completions."""
    return GRPOConfig(
        output_dir=folder, shuffle_dataset=False, loss_type=objective.loss_type, scale_rewards=objective.scale_rewards,
        importance_sampling_level=objective.importance_sampling_level, temperature=objective.temperature, beta=objective.beta,
        epsilon=EPSILON, epsilon_high=EPSILON_HIGH, num_iterations=objective.num_iterations,
        mask_truncated_completions=objective.mask_truncated_completions,
        use_bias_correction_kl=objective.use_bias_correction_kl, reward_weights=list(objective.reward_weights) or None,
        learning_rate=objective.learning_rate, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_beta1=0.9,
        adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, **sizes,
    )


def train_with_trl(model, rollouts, tokenizer, objective):
    """Trains with GRPOTrainer. Returns the log of each step, and the trained weights by name."""

    def generate(prompts, _):
        """Returns the rollouts of the groups that `prompts` numbers, each as often as it has completions."""
        first = int(prompts[0]) * GENERATIONS
        lines = rollouts[first: first + len(prompts)]
        assert prompts == [str((first + index) // GENERATIONS) for index in range(len(lines))], prompts
        return {key: [line[key] for line in lines] for key in lines[0]} | {"logprobs": None}

    with tempfile.TemporaryDirectory() as folder:
        settings = trl_settings(
            objective, folder, max_steps=STEPS, num_generations=GENERATIONS, max_completion_length=COMPLETION_MAX,
            per_device_train_batch_size=PROMPTS_PER_STEP * GENERATIONS,
        )
        trainer = FromRollouts(
            model=model, args=settings, reward_funcs=reward_functions(objective), processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": str(group)} for group in range(objective.groups)]), rollout_func=generate,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    trained = reference.trained(trainer.model)
    return steps, {name: parameter.detach().clone() for name, parameter in trained if ".ref." not in name}


def settings_of(objective):
    """Returns the lines of section `grpo` of a run file that differ between objectives."""
    settings = asdict(objective)
    for key in ("name", "old_logps", "adapters"):
        del settings[key]
    if objective.use_bias_correction_kl:  # the default
        del settings["use_bias_correction_kl"]
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def check_rounds(report, name, objective, steps, rounds, expected):
    """Compares the records of rounds. A round has one at its first step, and may have one at each."""
    numbers = [step["step"] for step in steps]
    recorded = {record["step"] for record in rounds}
    complete = recorded.issuperset(numbers[::objective.num_iterations]) and recorded.issubset(numbers)
    report.line(complete, f"{name} rounds", len(rounds))
    # TRL logs the rewards at the first step of a round only.
    latest = dict(zip(numbers, itertools.accumulate(expected, operator.or_), strict=True))
    for ours, theirs in METRICS:
        if theirs == "kl" and objective.beta == 0.0:
            continue
        value_of = lambda record: record["completions"][ours.split("/")[1]] if "/" in ours else record[ours]
        far = max(abs(value_of(record) - latest[record["step"]][theirs]) for record in rounds)
        report.within(f"{name} {theirs}", far, METRIC_LIMIT)


def check(report, name, plimsoll, directory, vocab, rng, tokenizer, objective, adapter, micro_batch):
    run, data = directory / "run", directory / "rollouts.jsonl"
    rollouts = write_rollouts(data, vocab, rng, objective, load(directory, adapter))
    quoted = lambda path: json.dumps(str(path))
    text = RUN_FILE.format(
        model=quoted(directory), adapter=f"adapter = {quoted(adapter)}\n" if adapter else "", data=quoted(data), dir=quoted(run),
        format="rollouts", steps=STEPS, learning_rate=objective.learning_rate, method="lora" if adapter else "full",
        generations=GENERATIONS, prompts_per_step=PROMPTS_PER_STEP, prompt_max=PROMPT_MAX, completion_max=COMPLETION_MAX,
        epsilon=EPSILON, epsilon_high=EPSILON_HIGH, settings=settings_of(objective), micro_batch=micro_batch,
    )
    (directory / "run.toml").write_text(text)
    plimsoll.train(directory / "run.toml")
    expected, weights = train_with_trl(load(directory, adapter), rollouts, tokenizer, objective)

    records = list(map(json.loads, (run / "events.jsonl").read_text().splitlines()))
    steps = [record for record in records if record["event"] == "step"]
    losses = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in zip(steps, expected, strict=True))
    report.within(f"{name} loss", losses, LOSS_LIMIT)
    # A norm is 0 if every completion is clipped.
    distance = lambda value, norm: relative(value, norm) if norm else value
    norms = max(distance(ours["norm"], theirs["grad_norm"]) for ours, theirs in zip(steps, expected, strict=True))
    report.within(f"{name} gradient norm", norms, LOSS_LIMIT)
    rounds = [record for record in records if record["event"] == "round"]
    check_rounds(report, name, objective, steps, rounds, expected)
    compare_weights(report, name, run, directory, adapter, weights)


# ---------------------------------------------------------------------------------------------------
# Speed
# ---------------------------------------------------------------------------------------------------

SPEED_STEPS = 4  # of one run; the first one does not count
SPEED_PROMPT = 32  # tokens of each prompt
SPEED_THREADS = 2
SPEED_SECONDS_MAX = 1800  # time limit of one run
ODD = "[13579]$"  # the reward of a completion is 1 if its last word is an odd number; in a group, about half of them


@dataclass(frozen=True)
class Load:
    """The completions of a step whose speed is measured. All of them have the same length."""

    prompts: int
    completion: int  # tokens
    generations: int = 8

    @property
    def completions(self):
        return self.prompts * self.generations


# Models with the loads that they are measured with.
SPEED_SHAPES = {
    "small": (cases.Case("small", "", "llama", 0, hidden=384, layers=6, heads=6, kv_heads=6, ffn=1024, vocab=8192),
              [Load(2, 128), Load(1, 128)]),
    "smollm2-135m": (cases.Case("smollm2-135m", "", "llama", 0, hidden=576, layers=30, heads=9, kv_heads=3, ffn=1536, vocab=49152,
                                tied=True, theta=1e5, max_positions=8192), [Load(1, 64)]),
}


@dataclass(frozen=True)
class Speed:
    """Median speed of a step, or its ratios to that of a peer. A ratio above 1 is faster than the peer."""

    sampling: float  # tokens per second
    step: float  # seconds of the whole step
    rest: float  # seconds of the step without sampling

    def over(self, peer):
        """Returns the ratios to the speed of `peer`."""
        return Speed(self.sampling / peer.sampling, peer.step / self.step, peer.rest / self.rest)


def median_speed(load, sampling, steps):
    """Returns the medians over steps, from the seconds of sampling and of the whole step. The first step does not count."""
    rests = [step - part for step, part in zip(steps, sampling, strict=True)]
    median = lambda seconds: statistics.median(seconds[1:])
    return Speed(load.completions * load.completion / median(sampling), median(steps), median(rests))


def check_lengths(program, expected, lengths):
    """Refuses completions of another length, which would be another amount of work."""
    if set(lengths) != {expected}:
        raise ValueError(f"{program}: completions of {sorted(set(lengths))} tokens instead of {expected}")


def measure_plimsoll(plimsoll, directory, prompts, objective, load):
    """Returns the speed of a run of `plimsoll train`."""
    with tempfile.TemporaryDirectory() as folder:
        run, quoted = Path(folder) / "run", lambda path: json.dumps(str(path))
        text = RUN_FILE.format(
            model=quoted(directory), adapter="", data=quoted(prompts), dir=quoted(run), format="prompt", steps=SPEED_STEPS,
            learning_rate=objective.learning_rate, method="full", generations=load.generations, prompts_per_step=load.prompts,
            prompt_max=SPEED_PROMPT, completion_max=load.completion, epsilon=EPSILON, epsilon_high=EPSILON_HIGH,
            settings=settings_of(objective) + f"rewards = {json.dumps([f'regex:{ODD}'])}\n", micro_batch='"auto"',
        )
        (Path(folder) / "run.toml").write_text(text + f"threads = {SPEED_THREADS}\n")
        plimsoll.train(Path(folder) / "run.toml")
        records = list(map(json.loads, (run / "events.jsonl").read_text().splitlines()))
    rounds = [record for record in records if record["event"] == "round"]
    check_lengths("plimsoll", load.completion, [record["completions"]["mean_length"] for record in rounds])
    sampling = [record["seconds"]["generate"] for record in rounds]
    return median_speed(load, sampling, [record["seconds"] for record in records if record["event"] == "step"])


def timed(function, seconds):
    """Returns a function that calls `function` and appends the seconds of each call to `seconds`."""

    def call(*arguments, **settings):
        begin = time.monotonic()
        result = function(*arguments, **settings)
        seconds.append(time.monotonic() - begin)
        return result

    return call


def reward_odd(completions, **_):
    """Returns the same rewards as `regex` in plimsoll."""
    return [float(re.search(ODD, completion) is not None) for completion in completions]


def measure_trl(directory, prompts, tokenizer, objective, load):
    """Returns the speed of GRPOTrainer. The model has the attention that transformers chooses."""
    model, sampling, timer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), [], StepTimer()
    model.generate = timed(model.generate, sampling)
    with tempfile.TemporaryDirectory() as folder:
        settings = trl_settings(
            objective, folder, max_steps=SPEED_STEPS, num_generations=load.generations, max_completion_length=load.completion,
            per_device_train_batch_size=load.completions,
        )
        trainer = GRPOTrainer(
            model=model, args=settings, reward_funcs=reward_odd, processing_class=tokenizer,
            train_dataset=Dataset.from_list(list(map(json.loads, prompts.read_text().splitlines()))), callbacks=[timer],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = [entry[f"completions/{kind}_length"] for entry in logs for kind in ("min", "max")]
    check_lengths("TRL", load.completion, lengths)
    return median_speed(load, sampling, timer.seconds)


def adapt_weights(directory):
    """Changes the weights of a Llama so that no completion ends early, and completions of a prompt differ.

    No layer changes dimension 0 of the hidden states. It is positive everywhere, and the end token has a large negative weight for
    it in the head. A tied head becomes smaller, because it would repeat a few tokens, and all rewards of a group would be equal.
    """
    file = directory / "model.safetensors"
    weights = load_tensors(file.read_bytes())  # in memory, because the file is overwritten
    embedding = weights["model.embed_tokens.weight"]
    embedding *= 1.0 if "lm_head.weight" in weights else 0.2
    embedding[:, 0] = 4.0
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    weights["model.norm.weight"][0] = 1.0
    weights.get("lm_head.weight", embedding)[cases.END, 0] = -100.0
    save_file(weights, file, metadata={"format": "pt"})


def write_prompts(path, vocab, rng, load):
    """Writes the prompts of all steps, as long as SPEED_PROMPT says."""
    words = lambda: live.words_of(rng.randrange(3, vocab) for _ in range(SPEED_PROMPT))
    path.write_text("".join(json.dumps({"prompt": words()}) + "\n" for _ in range(SPEED_STEPS * load.prompts)))


def measure_speed(binary, shape, rounds):
    """Prints the speed of sampling and of a step of both programs, in turn, and the medians of the ratios."""
    torch.set_num_threads(SPEED_THREADS)
    plimsoll, objective = live.Plimsoll(binary, SPEED_SECONDS_MAX), Objective("speed", "dapo")
    case, loads = SPEED_SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder:
        directory, rng = Path(folder), random.Random(1)
        prompts = directory / "prompts.jsonl"
        cases.write_model(directory, case)
        adapt_weights(directory)
        tokenizer = write_tokenizer(directory, case.vocab)
        for load in loads:
            print(f"{case.name}, {load.prompts} × {load.generations} completions of {load.completion} tokens:", flush=True)
            write_prompts(prompts, case.vocab, rng, load)
            ratios = []
            for _ in range(rounds):
                ours = measure_plimsoll(plimsoll, directory, prompts, objective, load)
                theirs = measure_trl(directory, prompts, tokenizer, objective, load)
                ratios.append(ours.over(theirs))
                print_speeds(ours, theirs, ratios[-1])
            medians = {key: statistics.median(getattr(ratio, key) for ratio in ratios) for key in ("sampling", "step", "rest")}
            print("  median ratio " + ", ".join(f"{key} {median:.2f}" for key, median in medians.items()), flush=True)


def print_speeds(ours, theirs, ratio):
    """Prints the speeds of both programs in a round, and their ratios."""
    print(
        f"  sampling: plimsoll {ours.sampling:.0f} tokens/s, TRL {theirs.sampling:.0f} tokens/s, ratio {ratio.sampling:.2f};"
        f" step: plimsoll {ours.step:.3f} s, TRL {theirs.step:.3f} s, ratio {ratio.step:.2f};"
        f" rest: plimsoll {ours.rest:.3f} s, TRL {theirs.rest:.3f} s, ratio {ratio.rest:.2f}", flush=True,
    )


def measure_memory(binary, mib):
    """Prints the longest completions under a limit in MiB."""
    import grpo_memory  # imports this file

    return grpo_memory.measure(binary, mib)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", type=int, metavar="ROUNDS")
    parser.add_argument("--shape", choices=SPEED_SHAPES, default="small", help="of the model for --speed")
    parser.add_argument("--longest", type=int, metavar="MIB")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bars()
    logging.disable(logging.WARNING)
    binary = Path(os.environ.get("PLIMSOLL", live.ROOT / "target/release/plimsoll"))
    if options.speed:
        return measure_speed(binary, options.shape, options.speed)
    if options.longest:
        return measure_memory(binary, options.longest)
    report, plimsoll = live.Report(), live.Plimsoll(binary)
    by_name = {case.name: case for case in live.MODELS}
    with tempfile.TemporaryDirectory() as folder:
        for index, (model, micro_batch, objective) in enumerate(OBJECTIVES):
            case = replace(by_name[model], seed=1000 * options.seed + index)
            directory, rng = Path(folder) / str(index), random.Random(case.seed)
            cases.write_model(directory, case)
            tokenizer = write_tokenizer(directory, case.vocab)
            adapter = directory / "adapter" if objective.adapters else None
            if adapter:
                write_adapter(directory, adapter, case.seed)
            report.guarded(
                f"{model} {objective.name}", check, plimsoll, directory, case.vocab, rng, tokenizer, objective, adapter,
                micro_batch,
            )
    print(f"{report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
