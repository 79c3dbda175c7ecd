"""Finds the longest completions that Plimsoll and TRL's GRPOTrainer train on under one memory limit.

    parity/run grpo --longest MIB

One step samples a group of 8 completions, all of the same length, and trains a Llama shape on them, in f32 on the CPU. The limit
of Plimsoll is its load line, which counts the whole process. The limit of TRL begins after its imports: it counts model, training
and all memory that comes later (RLIMIT_DATA). TRL has its smallest settings: one completion in a backward pass, and gradient
checkpointing. It generates a group at once.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOTrainer

import cases
import grpo

MIB = 1 << 20
STEP = 32  # tokens: lengths are multiples of it
LENGTH_MAX = 16384
OUT_OF_MEMORY = 3  # exit code of the TRL process, and of plimsoll
SECONDS_MAX = 1800  # time limit of one run
OBJECTIVE = grpo.Objective("longest", "dapo")


@dataclass(frozen=True)
class Setup:
    """A model with prompts, and the memory limit."""

    plimsoll: Path
    folder: Path
    limit: int  # bytes

    @property
    def model(self):
        return self.folder / "model"

    @property
    def prompts(self):
        return self.folder / "prompts.jsonl"


def longest(fits):
    """Returns the largest length for which `fits` is true, by bisection."""
    low, high = 0, STEP
    while high <= LENGTH_MAX and fits(high):
        low, high = high, 2 * high
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def run_plimsoll(setup, completion, command):
    """Runs `plan` or `train` with completions of this length. Returns whether they fit, and the largest resident
    memory of the program in bytes."""
    quoted = lambda path: json.dumps(str(path))
    text = grpo.RUN_FILE.format(
        model=quoted(setup.model), adapter="", data=quoted(setup.prompts), dir=quoted(setup.folder / "run"), format="prompt", steps=1,
        learning_rate=OBJECTIVE.learning_rate, method="full", generations=8, prompts_per_step=1, prompt_max=grpo.SPEED_PROMPT,
        completion_max=completion, epsilon=grpo.EPSILON, epsilon_high=grpo.EPSILON_HIGH,
        settings=grpo.settings_of(OBJECTIVE) + f"rewards = {json.dumps([f'regex:{grpo.ODD}'])}\n", micro_batch='"auto"',
    )
    file = setup.folder / "run.toml"
    file.write_text(text.replace('devices = "cpu"', f'devices = "cpu={setup.limit}"') + "threads = 2\n")
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen([setup.plimsoll, command, file], stdout=errors, stderr=errors) as run:
        peak, begin = 0, time.monotonic()
        while run.poll() is None:
            # The peak of the program alone: that of the process counts this one before it starts the program.
            peak = max(peak, status_bytes(f"/proc/{run.pid}/status", "VmHWM"))
            if time.monotonic() - begin > SECONDS_MAX:
                run.kill()
            time.sleep(0.05)
        if run.returncode not in (0, OUT_OF_MEMORY):
            errors.seek(0)
            raise RuntimeError(f"plimsoll {command}: exit {run.returncode}: {errors.read()}")
    return run.returncode == 0, peak


def run_trl(setup, completion):
    """Runs a step of TRL in a process of its own. Returns whether it fits."""
    arguments = [sys.executable, __file__, str(setup.folder), str(completion), str(setup.limit)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS_MAX)
    if done.returncode not in (0, OUT_OF_MEMORY):
        raise RuntimeError(f"TRL: exit {done.returncode}: {done.stderr[-2000:]}")
    print(f"  TRL, {completion} tokens: {'fits' if done.returncode == 0 else 'out of memory'}", flush=True)
    return done.returncode == 0


def status_bytes(file, key):
    """Returns a figure of a process; 0 after its end."""
    try:
        lines = Path(file).read_text().splitlines()
    except ProcessLookupError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


def train_with_trl(folder, completion, limit):
    """Trains one step under the limit. Exits with OUT_OF_MEMORY if the limit is too low."""
    torch.set_num_threads(grpo.SPEED_THREADS)
    # Threads that begin later would count with their stacks.
    torch.ones(256, 256).mm(torch.ones(256, 256))
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("/proc/self/status", "VmData") + limit, resource.RLIM_INFINITY))
    try:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "model" / "tokenizer.json"), eos_token=f"t{cases.END}", pad_token="t1", unk_token="t0"
        )
        settings = grpo.trl_settings(
            OBJECTIVE, str(folder / "trl"), max_steps=1, num_generations=8, max_completion_length=completion,
            per_device_train_batch_size=1, gradient_accumulation_steps=8,
        )
        settings.gradient_checkpointing = True
        prompts = list(map(json.loads, (folder / "prompts.jsonl").read_text().splitlines()))
        trainer = GRPOTrainer(
            model=model, args=settings, reward_funcs=grpo.reward_odd, processing_class=tokenizer, train_dataset=Dataset.from_list(prompts)
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if isinstance(error, MemoryError) or "memory" in text or "alloc" in text:
            os._exit(OUT_OF_MEMORY)
        raise
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    grpo.check_lengths("TRL", completion, [entry["completions/min_length"], entry["completions/max_length"]])
    # Threads of libraries may fail in their destructors at the limit.
    os._exit(0)


def measure(binary, mib):
    """Prints the longest completions of both programs under a limit in MiB, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(Path(binary).resolve(), Path(folder), mib * MIB)
        case, loads = grpo.SPEED_SHAPES["small"]
        case = replace(case, max_positions=2 * LENGTH_MAX)
        cases.write_model(setup.model, case)
        grpo.adapt_weights(setup.model)
        grpo.write_tokenizer(setup.model, case.vocab)
        grpo.write_prompts(setup.prompts, case.vocab, random.Random(1), loads[0])
        ours = longest(lambda length: run_plimsoll(setup, length, "plan")[0])
        print(f"{mib} MiB: plimsoll plans completions of up to {ours} tokens", flush=True)
        # A plan assumes what the process holds beside the arena; a run measures it before it begins.
        fits, peak = run_plimsoll(setup, ours, "train")
        while not fits:
            ours -= STEP
            fits, peak = run_plimsoll(setup, ours, "train")
        result = json.loads((setup.folder / "run" / "result.json").read_text())
        if result["status"] != "done":
            raise RuntimeError(f"plimsoll train: {result}")
        print(f"  and trains on {ours}; the largest resident memory of the process is {peak / MIB:.0f} MiB", flush=True)
        theirs = longest(lambda length: run_trl(setup, length))
        print(f"{mib} MiB: plimsoll {ours} tokens, TRL {theirs} tokens, ratio {ours / max(theirs, 1):.2f}")


if __name__ == "__main__":
    train_with_trl(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
