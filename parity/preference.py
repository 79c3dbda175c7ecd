#!/usr/bin/env python3
"""Compares direct preference optimization in the `plimsoll` binary with TRL's DPOTrainer, on random models.

    parity/run preference [--seed N]
    parity/run preference --speed ROUNDS

Both train on the same pairs of answers, in f32, with the same optimizer. Prints one line per check: ok or FAIL, its name, the
distance found and its limit. Exit code 1 if any failed. With --speed, it prints the seconds of a step of both, in turn.
"""

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer

import cases
import live
import reference
from reference import normwise, relative

STEPS, PAIRS_PER_STEP, SEQUENCE = 5, 6, 64
LOSS_LIMIT = 1e-4  # absolute for a step's loss, relative for a norm
REWARD_LIMIT = 1e-4  # absolute; rewards begin at 0
WEIGHT_LIMIT = 1e-4  # normwise, of a parameter
CHANGE_LIMIT = 2e-3  # normwise, of a parameter's change over all steps
END = "</s>"


@dataclass(frozen=True)
class Objective:
    """A loss over pairs, with its settings."""

    name: str
    loss_type: str
    beta: float


OBJECTIVES = [Objective("sigmoid", "sigmoid", 0.1), Objective("hinge", "hinge", 0.3), Objective("ipo", "ipo", 0.5)]

RUN_FILE = """\
[model]
path = {model}
init = "pretrained"
{adapter}
[data]
train = {data}
eval = {data}
sequence = {sequence}
pack = false
shuffle = false

[train]
objective = "dpo"
steps = {steps}
batch_tokens = {batch_tokens}
learning_rate = {learning_rate}
schedule = "constant"
warmup_steps = 0
weight_decay = 0.0
betas = [0.9, 0.95]
eps = 1e-6
clip_norm = 1.0
precision = "f32"
method = "{method}"

[dpo]
beta = {beta}
loss_type = "{loss_type}"

[recipe]
micro_batch = {micro_batch}

[run]
dir = {dir}
devices = "cpu"
"""
LEARNING_RATE = 2e-3


def write_tokenizer(directory, vocab):
    """Writes a tokenizer in which token 17 is the word `t17`, and token 1 ends an answer."""
    words = {END if token == 1 else f"t{token}": token for token in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="t2", unk_token="t0")
    fast.save_pretrained(directory)
    return fast


def write_pairs(path, vocab, rng, count, longest=12):
    """Writes pairs of answers of different length, and returns them."""
    words = lambda least, most: " ".join(f"t{rng.randrange(3, vocab)}" for _ in range(rng.randrange(least, most)))
    answer = lambda: " " + words(1, longest)
    pairs = [{"prompt": words(1, 9), "chosen": answer(), "rejected": answer()} for _ in range(count)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return pairs


def train_with_trl(directory, pairs, tokenizer, objective, adapter):
    """Trains with DPOTrainer. Returns the log of each step, the trained weights by name, and the seconds of each step."""
    model = reference.load(directory, torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(
            output_dir=folder, beta=objective.beta, loss_type=[objective.loss_type], max_steps=STEPS,
            per_device_train_batch_size=PAIRS_PER_STEP, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
            warmup_steps=0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=1.0,
            max_length=None, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
            gradient_checkpointing=False, disable_tqdm=True,
        )
        trainer = InOrder(model=model, args=settings, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        timer = StepTimer()
        trainer.add_callback(timer)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    trained = reference.trained(trainer.model)
    return steps, {name: parameter.detach().clone() for name, parameter in trained if ".ref." not in name}, timer.seconds


class StepTimer(TrainerCallback):
    """Measures the seconds of each step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.begin = time.monotonic()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.monotonic() - self.begin)


class InOrder(DPOTrainer):
    """A DPOTrainer that takes the pairs in their order."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def compare_weights(report, name, run, directory, adapter, weights):
    """Compares the weights that a run has written, and their change from those of `directory` or `adapter`, with `weights`."""
    if adapter:
        written, before = load_file(run / "adapter" / "adapter_model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    else:
        written = dict(reference.load(run / "model", torch.float32).named_parameters())
        before = dict(reference.load(directory, torch.float32).named_parameters())
    report.line(written.keys() == weights.keys(), f"{name} trained tensors", len(written))
    far = max(normwise(written[n].detach(), weights[n]) for n in weights)
    report.within(f"{name} weights", far, WEIGHT_LIMIT)
    change = lambda new, n: (new[n] - before[n]).detach()
    far = max(normwise(change(written, n), change(weights, n)) for n in weights)
    report.within(f"{name} change of weights", far, CHANGE_LIMIT)


def check(report, name, plimsoll, directory, pairs, tokenizer, objective, adapter, micro_batch):
    run = directory / f"run-{name.replace(' ', '-')}"
    quoted = lambda path: json.dumps(str(path))
    text = RUN_FILE.format(
        model=quoted(directory), adapter=f"adapter = {quoted(adapter)}\n" if adapter else "", data=quoted(directory / "pairs.jsonl"),
        dir=quoted(run), sequence=SEQUENCE, steps=STEPS, batch_tokens=PAIRS_PER_STEP * SEQUENCE,
        learning_rate=LEARNING_RATE, method="lora" if adapter else "full", beta=objective.beta,
        loss_type=objective.loss_type, micro_batch=micro_batch,
    )
    (directory / "run.toml").write_text(text)
    plimsoll.train(directory / "run.toml")
    expected, weights, _ = train_with_trl(directory, pairs, tokenizer, objective, adapter)

    records = list(map(json.loads, (run / "events.jsonl").read_text().splitlines()))
    steps = [record for record in records if record["event"] == "step"]
    preferences = [r for r in records if r["event"] == "preferences" and not r["evaluation"]]
    losses = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in zip(steps, expected, strict=True))
    report.within(f"{name} loss", losses, LOSS_LIMIT)
    norms = max(relative(ours["norm"], theirs["grad_norm"]) for ours, theirs in zip(steps, expected, strict=True))
    report.within(f"{name} gradient norm", norms, LOSS_LIMIT)
    for ours, theirs in (("chosen_reward", "rewards/chosen"), ("rejected_reward", "rewards/rejected"), ("accuracy", "rewards/accuracies")):
        far = max(abs(p[ours] - e[theirs]) for p, e in zip(preferences, expected, strict=True))
        report.within(f"{name} {theirs}", far, REWARD_LIMIT)
    compare_weights(report, name, run, directory, adapter, weights)


def measure_speed(plimsoll, rounds):
    """Prints the median seconds of a step of both programs, in turn. Answers have up to 120 words."""
    case = cases.Case("speed", "", "llama", 0, hidden=384, layers=6, heads=6, kv_heads=6, ffn=1024, vocab=8192)
    objective = replace(OBJECTIVES[0], name="speed")
    with tempfile.TemporaryDirectory() as folder:
        directory, rng = Path(folder), random.Random(1)
        cases.write_model(directory, case)
        tokenizer = write_tokenizer(directory, case.vocab)
        pairs = write_pairs(directory / "pairs.jsonl", case.vocab, rng, STEPS * PAIRS_PER_STEP, longest=120)
        ratios = []
        for number in range(rounds):
            text = RUN_FILE.format(
                model=json.dumps(str(directory)), adapter="", data=json.dumps(str(directory / "pairs.jsonl")),
                dir=json.dumps(str(directory / f"run-{number}")), sequence=256, steps=STEPS, batch_tokens=PAIRS_PER_STEP * 256,
                learning_rate=LEARNING_RATE, method="full", beta=objective.beta, loss_type=objective.loss_type, micro_batch='"auto"',
            )
            (directory / "run.toml").write_text(text + "threads = 2\n")
            plimsoll.train(directory / "run.toml")
            ours = json.loads((directory / f"run-{number}" / "result.json").read_text())["step_seconds"]["median"]
            theirs = statistics.median(train_with_trl(directory, pairs, tokenizer, objective, None)[2])
            ratios.append(theirs / ours)
            print(f"a step of {PAIRS_PER_STEP} pairs: plimsoll {ours:.3f} s, TRL {theirs:.3f} s, ratio {ratios[-1]:.2f}", flush=True)
        print(f"median ratio {statistics.median(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", type=int, metavar="ROUNDS")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bars()
    logging.disable(logging.WARNING)
    binary = Path(os.environ.get("PLIMSOLL", live.ROOT / "target/release/plimsoll"))
    report, plimsoll = live.Report(), live.Plimsoll(binary)
    if options.speed:
        return measure_speed(plimsoll, options.speed)
    by_name = {case.name: case for case in live.MODELS}
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, objective) in enumerate(zip(("llama", "qwen2-tied", "qwen3"), OBJECTIVES, strict=True)):
            case = replace(by_name[name], seed=1000 * options.seed + index)
            directory, rng = Path(folder) / name, random.Random(case.seed)
            cases.write_model(directory, case)
            tokenizer = write_tokenizer(directory, case.vocab)
            pairs = write_pairs(directory / "pairs.jsonl", case.vocab, rng, STEPS * PAIRS_PER_STEP)
            run = lambda label, *settings: report.guarded(
                f"{name} {objective.name}{label}", check, plimsoll, directory, pairs, tokenizer, objective, *settings
            )
            run("", None, (4, 1, 6)[index])
            if objective.loss_type == "sigmoid":
                adapter = directory / "adapter"
                settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
                get_peft_model(reference.load(directory, torch.float32), settings).save_pretrained(adapter)
                run(" adapters", adapter, 3)
    print(f"{report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
