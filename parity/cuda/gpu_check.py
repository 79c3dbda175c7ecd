#!/usr/bin/env python3
"""Checks that need a real GPU, in less than eight minutes.

    python3 gpu_check.py [--device cuda:0] [--seconds 470] [--out FOLDER] [--only found,ops,...]

`cargo xtask gpu-check` packs this script with the programs that it runs (plimsoll, plimsoll-check, torch_step.py). It
needs neither Rust nor a network, and torch and transformers only for comparisons.

Each section writes its results to FOLDER (or $OUT) when it ends, so that an interrupted run leaves the earlier ones:

    gpu-check.json   all figures
    gpu-check.txt    the table of results
    gpu-check.log    output of every program

The table is printed last, also if a section fails or the run is interrupted. The exit code is 0 if every check passed.

`--rehearse` runs the same flow with small sizes on the stand-in for a GPU.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time

from gpu_inputs import run_file, samples, settings, write_config, write_samples

HERE = pathlib.Path(__file__).resolve().parent
MIB, GIB = 1 << 20, 1 << 30

# Sizes of the real check and of the rehearsal. Seconds are time limits of the sections.
REAL = {
    "seconds": {"found": 65, "attention": 30, "ops": 35, "plans": 55, "soak": 20, "kill": 30, "curve": 65, "speed": 200},
    "dtypes": ["f32", "bf16"],
    "cases": 100_000,
    "case_seconds": 25,
    "soak_cases": 100_000,
    "plans": 120,
    "plans_least": 100,
    "plan_size": "large",
    "kills": 3,
    "kill_model": dict(hidden=512, layers=6, heads=8, kv_heads=4, ffn=1408, vocab=8192),
    "kill_run": dict(sequence=256, batch_tokens=16384, steps=60, save_every=10),
    # SmolLM2-135M (its config.json on the hub).
    "curve_model": dict(hidden=576, layers=30, heads=9, kv_heads=3, ffn=1536, vocab=49152),
    "curve_run": dict(sequence=512, rows=8, steps=40),
    # Llama-3.2-1B and Qwen2.5-1.5B (their config.json), with an untied head, as in torch_step.py. The batch is expected to
    # fit compiled PyTorch on 80 GB; if it does not, half of it is used.
    "shapes": {
        "llama-3.2-1b": dict(vocab=128256, layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, sequence=2048, batch=8),
        "qwen2.5-1.5b": dict(vocab=151936, layers=28, hidden=1536, heads=12, kv_heads=2, ffn=8960, sequence=2048, batch=6),
    },
    # Share of PyTorch's memory that Plimsoll gets, and share of PyTorch's speed that it must reach.
    "memory": 0.6,
    "pace": 0.8,
    "step": dict(steps=6, warmup=3),
    "bench_seconds": 8,
}
REHEARSAL = {
    "seconds": {"found": 240, "attention": 240, "ops": 240, "plans": 240, "soak": 240, "kill": 240, "curve": 240, "speed": 240},
    "dtypes": ["f32", "bf16"],
    "cases": 2,
    "case_seconds": 200,
    "soak_cases": 1,
    "plans": 2,
    "plans_least": 1,
    "plan_size": "small",
    "kills": 1,
    "kill_model": dict(hidden=32, layers=2, heads=2, kv_heads=1, ffn=48, vocab=97),
    "kill_run": dict(sequence=16, batch_tokens=64, steps=6, save_every=2),
    "curve_model": dict(hidden=32, layers=2, heads=2, kv_heads=1, ffn=48, vocab=97),
    "curve_run": dict(sequence=24, rows=2, steps=6),
    "shapes": {"toy": dict(vocab=128, layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, sequence=16, batch=2)},
    "memory": 0.6,
    "pace": 0.8,
    "step": dict(steps=2, warmup=1),
    "bench_seconds": 1,
}


class Failed(Exception):
    """A program failed; `output` is what it had printed."""

    def __init__(self, reason, output=""):
        super().__init__(reason)
        self.output = output


class Interrupted(BaseException):
    """The run was interrupted; results so far are still reported."""


class Report:
    """Collects rows of the table, and figures for the JSON file."""

    def __init__(self):
        self.rows, self.figures, self.began = [], {}, time.monotonic()

    def add(self, section, what, figure, passed):
        """Adds a row. `passed` is None for a figure without a requirement, or a check that could not run."""
        self.rows.append({"section": section, "what": what, "figure": str(figure), "passed": passed})
        print(f"   {MARKS[passed]} {what}: {figure}", flush=True)

    def failed(self):
        return [row for row in self.rows if row["passed"] is False]

    def table(self, what):
        """Returns all rows as text."""
        width = max((len(f"{row['section']}: {row['what']}") for row in self.rows), default=0)
        lines = [f"{what}, {time.monotonic() - self.began:.0f} s, begun {self.figures['began']}, "
                 f"commit {self.figures['about'].get('commit', 'not known')}", ""]
        lines += [f"{MARKS[row['passed']]}  {row['section'] + ': ' + row['what']:{width}}  {row['figure']}" for row in self.rows]
        return "\n".join([*lines, "", f"{len(self.rows)} rows, {len(self.failed())} failed", ""])

    def write(self, folder, what):
        """Writes all results so far to two files."""
        whole = {**self.figures, "rows": self.rows, "seconds": time.monotonic() - self.began}
        for name, text in {"gpu-check.json": json.dumps(whole, indent=1), "gpu-check.txt": self.table(what)}.items():
            (folder / name).write_text(text)


MARKS = {True: "ok  ", False: "FAIL", None: "–   "}


class Section:
    """Context of a section: programs, folder, sizes and deadline."""

    def __init__(self, options, sizes, folder, report, name, deadline):
        self.options, self.sizes, self.report, self.name, self.deadline = options, sizes, report, name, deadline
        self.folder = folder / name
        self.folder.mkdir()

    @property
    def left(self):
        return max(1.0, self.deadline - time.monotonic())

    def add(self, what, figure, passed):
        self.report.add(self.name, what, figure, passed)

    def keep(self, name, figure):
        self.report.figures.setdefault(self.name, {})[name] = figure

    def environment(self):
        environment = {"PLIMSOLL_CACHE": str(self.folder.parent / "cache"), **os.environ, "NO_COLOR": "1"}
        # Prefer the libraries of this script's Python, which torch uses.
        if sys.prefix != sys.base_prefix:
            environment["VIRTUAL_ENV"] = sys.prefix
        here = str(pathlib.Path(sys.executable).parent)
        environment["PATH"] = ":".join(filter(None, [here, environment.get("PATH")]))
        if self.options.libraries:
            # For Plimsoll alone: torch has its own libraries.
            known = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(self.options.libraries), known]))
        return environment

    def log(self, command, outcome, seconds, output, errors):
        """Logs the output of a program (its errors in full) and its exit."""
        words = [str(word) if len(str(word)) < 200 else f"{str(word)[:200]}…" for word in command]
        with open(self.options.out / "gpu-check.log", "a") as log:
            log.write(f"== {self.name}: {' '.join(words)}\n== {outcome}, {seconds:.1f} s\n")
            for stream in [(output or "")[-4000:], (errors or "")[-40000:]]:
                log.write(f"{stream.rstrip()}\n" if stream.strip() else "")

    def start(self, *arguments, program="plimsoll", **more):
        command = [str(self.options.programs / program), *map(str, arguments)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment(), start_new_session=True, **more,
        )

    def ended(self, child, command, name, seconds):
        """Waits for a program, logs it, and returns its stdout and stderr."""
        started = time.monotonic()
        try:
            output, errors = child.communicate(timeout=seconds or self.left)
        except (subprocess.TimeoutExpired, Interrupted) as over:
            output, errors = end(child)
            self.log(command, "no end in time", time.monotonic() - started, output, errors)
            if isinstance(over, Interrupted):
                raise
            raise Failed(f"{name}: no end in time", output) from None
        self.log(command, f"exit {child.returncode}", time.monotonic() - started, output, errors)
        return output, errors

    def run(self, *arguments, program="plimsoll", seconds=None, exits=(0,)):
        """Runs a program of Plimsoll and returns its standard output."""
        child, name = self.start(*arguments, program=program), f"{program} {arguments[0]}"
        output, errors = self.ended(child, [program, *arguments], name, seconds)
        if child.returncode not in exits:
            lines = (errors.strip() or output.strip()).splitlines()
            raise Failed(f"{name}: exit {child.returncode}: {' / '.join(lines[-4:])}")
        return output

    def python(self, *arguments, seconds=None):
        """Runs a script with this Python and returns its standard output."""
        command = [sys.executable, *map(str, arguments)]
        name = pathlib.Path(command[1]).name
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        output, errors = self.ended(child, command, name, seconds)
        if child.returncode != 0:
            raise Failed(f"{name}: {' / '.join(errors.strip().splitlines()[-3:])}", errors)
        return output


def end(child):
    """Kills a program with its children, which might hang and keep the GPU and the pipes. Returns its stdout and stderr."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        return child.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        return "", ""


def last_json(output):
    for line in reversed(output.strip().splitlines()):
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            continue
    raise Failed(f"no JSON in {output[-200:]!r}")


def whole_json(output):
    """Parses a JSON object that may span several lines."""
    try:
        return json.loads(output)
    except json.JSONDecodeError:
        return last_json(output)


def found(section):
    """The machine and its GPUs."""
    try:
        query = "--query-gpu=name,driver_version,memory.total,memory.used,temperature.gpu,clocks.sm"
        smi = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
        section.keep("nvidia_smi", smi.stdout.strip() or smi.stderr.strip())
        section.add("nvidia-smi", smi.stdout.strip().splitlines()[0], None)
    except (OSError, IndexError, subprocess.TimeoutExpired):
        section.add("nvidia-smi", "not here", None)
    # The readable listing, for the log.
    section.run("devices")
    machine = whole_json(section.run("devices", "--json"))
    section.keep("devices", machine)
    gpus = [device for device in machine["devices"] if device["kind"] == "cuda"]
    ours = [device for device in gpus if device["name"] == section.options.device]
    section.add("the device", ", ".join(f"{d['name']}: {d['model']}" for d in gpus) or "none", bool(ours))
    if not ours:
        raise Failed(f"there is no {section.options.device}: all that follows needs it")
    libraries = (machine.get("nvidia") or {}).get("libraries", [])
    section.add("libraries", ", ".join(f"{one['library']} {one['version']}" for one in libraries if one.get("version")), None)
    seconds = section.sizes["bench_seconds"]
    bench = section.folder / "bench.json"
    try:
        section.run("bench", "devices", "--duration", f"{seconds}s", "--json", bench)
        section.keep("bench", json.loads(bench.read_text()))
    except Failed as failed:
        section.add("bench devices", failed, False)
    memory_ledger(section)


def memory_ledger(section):
    """Memory of the GPU by NVML and by the driver, from before a context to after its end."""
    try:
        ledger = last_json(section.run("memory", section.options.device, program="plimsoll-check"))
    except Failed as failed:
        section.add("memory ledger", failed, False)
        return
    section.keep("memory", ledger)
    mib = lambda bytes: "not reported" if bytes is None else f"{bytes / MIB:,.1f} MiB"
    section.add("memory ledger", f"arena {mib(ledger['arena_bytes'])}, charges {mib(ledger['charges_bytes'])}", None)
    for at in ledger["moments"]:
        section.add(f"memory {at['moment']}", f"this process {mib(at['nvml_process_bytes'])}; free: NVML "
                    f"{mib(at['nvml_free_bytes'])}, driver {mib(at['driver_free_bytes'])}", None)


def tally(section, what, *arguments):
    """Runs a part of the soak test and reports its checks."""
    command = ["soak", "--device", section.options.device, "--json", "--case-seconds", section.sizes["case_seconds"], *arguments]
    cut_off = None
    try:
        output = section.run(*command, program="plimsoll-check", exits=(0, 1), seconds=section.left + 20)
    except Failed as failed:
        # Results before the interruption count.
        cut_off, output = failed, failed.output
        if not output.strip():
            raise
    tally = last_json(output)
    section.keep(what, tally)
    passed = sum(kind["passed"] for kind in tally["kinds"].values())
    wrong = [line for kind in tally["kinds"].values() for line in kind["failed"]]
    section.add(what, f"{passed} checks, {len(wrong)} failed", passed > 0 and not wrong)
    if cut_off:
        section.add(f"{what}: ends", cut_off, False)
    for line in wrong[:3]:
        print(f"        {line[:600]}")
    return tally


def compare_ops(section, part, what):
    """Compares every op of the cases of one part of the soak test with the CPU in f64, in each dtype."""
    dtypes = section.sizes["dtypes"]
    for number, dtype in enumerate(dtypes):
        seconds = int(section.left / (len(dtypes) - number)) - 2
        found = tally(section, f"{what} in {dtype}", "--only", part, "--dtype", dtype, "--runs", section.sizes["cases"],
                      "--seconds", max(1, seconds))
        kinds = {name: kind["worst"] for name, kind in found["kinds"].items() if " off the CPU's" in name}
        if kinds:
            worst = max(kinds, key=lambda name: kinds[name] or 0)
            section.add(f"{what} in {dtype}: how many, the worst", f"{len(kinds)}, {kinds[worst]:.1e} ({worst.split()[0]})",
                        None)


def attention(section):
    """Attention of heads of 64 to 128 elements and up to 700 tokens, op by op against the CPU in f64."""
    compare_ops(section, "attention", "attention")


def ops(section):
    """Every op against the CPU in f64, on models of odd shapes."""
    compare_ops(section, "ops", "ops")


def soak(section):
    """Soak test of random cases on this device."""
    dtypes = section.sizes["dtypes"]
    for number, dtype in enumerate(dtypes):
        seconds = int(section.left / (len(dtypes) - number)) - 2
        tally(section, f"soak in {dtype}", "--only", "cases", "--dtype", dtype, "--runs", section.sizes["soak_cases"],
              "--seconds", max(1, seconds), "--seed", 5)


def plans(section):
    """Planned memory equals used memory, for the arena and the whole device, and stays within a given budget."""
    seconds, started = max(1, int(section.left) - 3), time.monotonic()
    shown = tally(section, "plans", "--only", "plans", "--dtype", "bf16", "--runs", section.sizes["plans"], "--size",
                  section.sizes["plan_size"], "--seconds", seconds)
    time_was_over = time.monotonic() - started >= seconds
    unseen = sum(count for sort, count in shown["covered"].items() if sort.startswith("whole device not seen"))
    if unseen:
        section.add("whole device and budgets, for want of NVML", f"not seen in {unseen}", False)
    ran = sum(count for sort, count in shown["covered"].items() if sort.startswith("under "))
    least = section.sizes["plans_least"]
    # A slower GPU runs fewer of them in the same time, which is no failure.
    enough = None if 0 < ran < least and time_was_over else ran >= least
    wanted = f"at least {least}" + (f"; not judged, {seconds} s were over" if enough is None else "")
    section.add("configurations that fit and ran", f"{ran} ({wanted})", enough)


def contents(run):
    """Returns the files of a run that must be reproducible: the model and the newest checkpoint."""
    steps = sorted((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    files = [*(run / "model").glob("*.safetensors"), *(steps[-1].rglob("*.safetensors") if steps else [])]
    if not files:
        raise Failed(f"{run.name} left no files")
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def kill(section):
    """A killed and resumed run ends with the same bits as an uninterrupted one."""
    sizes = section.sizes["kill_run"]
    model, data = section.folder / "shape", section.folder / "train.jsonl"
    write_config(model, section.sizes["kill_model"], sizes["sequence"])
    write_samples(data, samples(section.sizes["kill_model"]["vocab"], sizes["sequence"] * 3, 64, 1))

    def arguments(run):
        return ["train", run_file(section.folder), "--quiet", "--devices", section.options.device, *settings({
            "model.path": str(model), "model.init": "random", "data.train": str(data), "data.format": "tokens",
            "data.sequence": sizes["sequence"], "train.batch_tokens": sizes["batch_tokens"], "train.steps": sizes["steps"],
            "train.save_every": sizes["save_every"], "train.precision": "bf16", "run.dir": str(run),
        })]

    whole = section.folder / "whole"
    started = time.monotonic()
    section.run(*arguments(whole))
    lasted = time.monotonic() - started
    expected = contents(whole)
    again = section.folder / "again"
    # The first run also measures charges and times algorithms.
    started = time.monotonic()
    section.run(*arguments(again))
    lasted = time.monotonic() - started
    section.add("the same run twice", "the same bits", contents(again) == expected)
    draw = random.Random(7)
    for number in range(section.sizes["kills"]):
        if section.left < 2 * lasted + 5:
            section.add("kills", f"no time for more than {number}", None)
            break
        run = section.folder / f"killed-{number}"
        child = section.start(*arguments(run))
        moment = draw.uniform(0.35, 0.95) * lasted
        try:
            child.wait(moment)
            ended = "ended before it was killed,"
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            ended = "killed"
        child.communicate()
        begun = (run / "run.toml").exists()
        section.run(*(["train", "--quiet", "--resume", run] if begun else arguments(run)))
        # A run that ended before it was killed is no evidence.
        passed = contents(run) == expected
        section.add(f"{ended} after {moment:.1f} of {lasted:.1f} s, and resumed", "the same bits" if passed else "other bits",
                    passed if ended == "killed" or not passed else None)


def has_torch(section):
    try:
        section.python("-c", "import torch, transformers", seconds=min(60, section.left))
        return True
    except Failed as failed:
        section.add("transformers", f"not here, nothing to compare with: {failed}", None)
        return False


# Training variants of transformers that differ only in rounding: bf16 autocast with fused or eager attention, or with
# gradients of half batches; pure bf16 with f32 master weights.
VARIANTS = {
    "autocast": dict(),
    "autocast, attention in pieces": dict(attention="eager"),
    "autocast, half batches": dict(parts=2),
    "bf16 throughout": dict(throughout=True),
    "bf16 throughout, attention in pieces": dict(throughout=True, attention="eager"),
}


def out_of_band(ours, theirs):
    """Returns the largest distance of our curve from the mean of theirs, the spread of theirs, and the step of the distance."""
    steps = range(min(map(len, [ours, *theirs])))
    spread = max(max(curve[at] for curve in theirs) - min(curve[at] for curve in theirs) for at in steps)
    apart, at = max((abs(ours[at] - sum(curve[at] for curve in theirs) / len(theirs)), at + 1) for at in steps)
    return apart, spread, at


def curve(section):
    """The bf16 loss curve against that of transformers, and a model that transformers loads."""
    if not has_torch(section):
        return
    model, run = section.sizes["curve_model"], section.sizes["curve_run"]
    base = section.folder / "base"
    write_config(base, model, run["sequence"])
    # Each sample is one row; its last token is only a target.
    rows = samples(model["vocab"], run["sequence"] + 1, run["rows"] * run["steps"], 3)
    held_out = section.folder / "eval.jsonl"
    write_samples(held_out, samples(model["vocab"], run["sequence"] + 1, 2 * run["rows"], 3)[-run["rows"]:])
    random.Random(0).shuffle(rows)
    data = section.folder / "train.jsonl"
    write_samples(data, rows)
    work = {"base": str(base), "data": str(data), "rows": run["rows"], "learning_rate": 1e-3, "variants": list(VARIANTS),
            "device": "cpu" if section.options.rehearse else section.options.device, "seconds": section.left * 0.55}
    order = section.folder / "work.json"
    order.write_text(json.dumps(work))
    theirs = json.loads(last_line(section.python(__file__, "--worker", order)))
    folder = section.folder / "run"
    section.run("train", run_file(section.folder), "--quiet", "--devices", section.options.device, *settings({
        "model.path": str(base), "model.init": "pretrained", "data.train": str(data), "data.eval": str(held_out),
        "data.format": "tokens", "data.sequence": run["sequence"], "data.pack": False, "data.shuffle": False,
        "train.steps": run["steps"], "train.batch_tokens": run["rows"] * run["sequence"],
        "train.learning_rate": work["learning_rate"], "train.schedule": "constant", "train.warmup_steps": 0,
        "train.weight_decay": 0.1, "train.betas": [0.9, 0.95], "train.eps": 1e-8, "train.clip_norm": 1.0,
        "train.precision": "bf16", "train.eval_every": run["steps"], "run.dir": str(folder),
    }))
    records = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    ours = [record["loss"] for record in records if record.get("event") == "step"]
    result = json.loads((folder / "result.json").read_text())
    section.keep("ours", ours), section.keep("theirs", theirs), section.keep("memory", result["memory"])
    steps = run["steps"]
    lengths = [len(ours), *map(len, theirs.values())]
    section.add("steps of ours and of each of theirs", " ".join(map(str, lengths)), set(lengths) == {steps})
    apart, spread, at = out_of_band(ours, list(theirs.values()))
    section.add("runs of transformers in bf16, on the same samples in the same order", ", ".join(theirs), None)
    section.add("loss off the mean of theirs, most; their own spread from run to run, most", f"{apart:.4f} (step {at}); {spread:.4f}",
                apart <= spread if len(theirs) == len(VARIANTS) else None)
    section.add("loss, first and last", f"{ours[0]:.3f}, {ours[-1]:.3f}", ours[-1] < ours[0])
    # Loss of the trained model, by Plimsoll and by transformers.
    output = whole_json(section.run("eval", folder / "model", "--data", held_out, "--format", "tokens", "--devices",
                                  section.options.device, "--json"))["loss"]
    order.write_text(json.dumps({**work, "base": str(folder / "model"), "evaluate": str(held_out)}))
    loaded = json.loads(last_line(section.python(__file__, "--worker", order)))
    section.add("the model, loaded by transformers: loss of ours, of theirs", f"{output:.4f}, {loaded:.4f}",
                abs(output - loaded) <= 0.01 * loaded)


def last_line(output):
    return output.strip().splitlines()[-1]


def worker(path):
    """Trains a model with transformers in several variants, or evaluates it on a file. Runs in a separate process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    work = json.loads(pathlib.Path(path).read_text())
    device = work["device"]
    read = lambda file: torch.tensor([json.loads(line)["input_ids"] for line in open(file)], device=device)

    def loss_of(model, rows):
        # The model's own loss shifts labels, but the last token here is only a target.
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    if "evaluate" in work:
        model = AutoModelForCausalLM.from_pretrained(work["base"]).float().to(device).eval()
        with torch.no_grad():
            print(json.dumps(float(loss_of(model, read(work["evaluate"])))))
        return
    base = pathlib.Path(work["base"])
    if not list(base.glob("*.safetensors")):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).float().save_pretrained(base)
    started, curves = time.monotonic(), {}
    for name in work["variants"]:
        if curves and time.monotonic() - started > work["seconds"] * len(curves) / (len(curves) + 1):
            break
        curves[name] = loss_curve(torch, work, loss_of, read(work["data"]), **VARIANTS[name])
    print(json.dumps(curves))


def loss_curve(torch, work, loss_of, rows, attention="sdpa", parts=1, throughout=False):
    """Returns the losses of a transformers training, step by step, in one bf16 variant."""
    from transformers import AutoModelForCausalLM

    device = work["device"]
    load = lambda: AutoModelForCausalLM.from_pretrained(work["base"], attn_implementation=attention).to(device).train()
    model = load().float()
    masters = list(model.parameters())
    if throughout:
        # The model computes in bf16; master weights stay in f32, and so do rotary frequencies, as loaded in bf16.
        model = AutoModelForCausalLM.from_pretrained(
            work["base"], attn_implementation=attention, dtype=torch.bfloat16).to(device).train()
        masters = [parameter.detach().float().requires_grad_() for parameter in load().float().parameters()]
    groups = [{"params": [p for p in masters if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in masters if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=work["learning_rate"], betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for at in range(0, len(rows), work["rows"]):
        total = 0.0
        for part in rows[at: at + work["rows"]].chunk(parts):
            with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=not throughout):
                loss = loss_of(model, part) * len(part) / work["rows"]
            loss.backward()
            total = total + loss.detach()
        if throughout:
            for master, parameter in zip(masters, model.parameters()):
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if throughout:
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters()):
                    parameter.copy_(master)
        losses.append(total)
    return [float(loss) for loss in losses]


def speed(section):
    """A training step of PyTorch, then of Plimsoll within a share of its memory."""
    shapes = section.sizes["shapes"]
    for number, (name, shape) in enumerate(shapes.items()):
        until = time.monotonic() + section.left / (len(shapes) - number)
        if not speed_of(section, name, shape, until) and shape["batch"] > 1:
            smaller = {**shape, "batch": shape["batch"] // 2}
            speed_of(section, f"{name}, {smaller['batch']} sequences", smaller, until)


# Runs the peer script with its model created on the device, because creating it on the CPU takes most of the time.
ON_DEVICE = ("import sys, runpy, torch; torch.set_default_device(sys.argv[1]); sys.argv = sys.argv[2:]; "
             "runpy.run_path(sys.argv[0], run_name='__main__')")


def speed_of(section, name, shape, until):
    """Compares one shape. Returns whether PyTorch had enough memory for it in at least one mode."""
    left = lambda: max(1.0, until - time.monotonic())
    words = [word for key, value in {**shape, **section.sizes["step"]}.items()
             for word in (f"--{key.replace('_', '-')}", str(value))]
    # Without a memory limit first: it needs no figure of PyTorch, and least time.
    started = time.monotonic()
    free = step_of(section, f"{name}: ours as it comes", words, [], left())
    # Time that our measurement under the limit needs after PyTorch's.
    kept = max(25, 1.5 * (time.monotonic() - started))
    peers, missing = {}, []
    for kind, more in {"eager": [], "compile": ["--compile"]}.items():
        theirs = peer_step(section, f"{name}: PyTorch {kind}", kind, [*more, *words], left() - kept)
        if theirs:
            peers[kind] = theirs
        elif theirs is None:
            missing.append(kind)
    if not peers and not missing:
        return False
    best = max(peers.values(), key=lambda theirs: theirs["tokens_per_second"], default={})
    share, pace = section.sizes["memory"], section.sizes["pace"]
    # In a rehearsal PyTorch runs on the CPU and reports no memory of a device.
    line = 0.95 * free["arena_bytes"] / MIB if section.options.rehearse and free else share * best.get("peak_device_mib", 0.0)
    within = f"in {share} of its memory"
    held = step_of(section, f"{name}: ours {within}", words, ["--memory", f"{line:.2f}MiB"], left()) if line else None
    for way, ours in {"as it comes": free, within: held}.items():
        if not best or not ours:
            continue
        ratio = ours["tokens_per_second"] / best["tokens_per_second"]
        # Not judged in a rehearsal, or if one of the two PyTorch modes is missing.
        judged = None if section.options.rehearse or missing or way != within else ratio >= pace
        wanted = f"at least {pace}" + (f"; not judged, without PyTorch {' and '.join(missing)}" if missing else "")
        section.add(f"{name}: ours {way}, beside PyTorch's better", f"{ratio:.2f} × its speed ({wanted})", judged)
    return True


def missing_for_compile():
    """Returns what torch.compile needs and this machine lacks: a C compiler, and the headers of this Python."""
    compiler = os.environ.get("CC")
    found = any(map(shutil.which, [compiler] if compiler else ["cc", "gcc", "clang"]))
    header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    return [*([] if found else [f"no C compiler ({compiler or 'cc, gcc or clang'})"]),
            *([] if header.exists() else [f"no {header} (package python3-dev)"])]


def peer_step(section, what, kind, words, seconds):
    """Measures a step of PyTorch. Returns its figures; {} if PyTorch has too little memory, None if it gave no figure."""
    peer = section.options.programs / "torch_step.py"
    if not peer.exists() or (section.options.rehearse and kind == "compile"):
        section.add(what, "not here", None)
        return None
    if kind == "compile" and (absent := missing_for_compile()):
        section.add(what, f"not measured: {' and '.join(absent)}", None)
        return None
    device = "cpu" if section.options.rehearse else section.options.device
    try:
        theirs = last_json(section.python("-c", ON_DEVICE, device, peer, "--device", device, "--dtype", "bf16", *words,
                                          seconds=max(1.0, seconds)))
    except Failed as failed:
        has_no_room = "OutOfMemoryError" in failed.output
        section.add(what, "has no room for it" if has_no_room else failed, None)
        return {} if has_no_room else None
    section.keep(what, theirs)
    section.add(what, f"{theirs['tokens_per_second']:.0f} tokens/s, {theirs.get('peak_device_mib', 0):.0f} MiB", None)
    return theirs


def step_of(section, what, words, more, seconds):
    """Measures a step of Plimsoll. Returns its figures, or None. No figure includes the CUDA context."""
    try:
        ours = last_json(section.run("bench", "step", "--device", section.options.device, "--dtype", "bf16", *words, *more,
                                     "--threads", min(8, os.cpu_count() or 1), seconds=seconds))
    except Failed as failed:
        # Without a limit, a GPU that is too small is no failure; within the limit the step must run.
        section.add(what, failed, None if not more and "exit 3" in str(failed) else False)
        return None
    section.keep(what, ours)
    report_step(section, what, ours)
    return ours


def report_step(section, what, ours):
    """Adds the rows of a measured step of Plimsoll."""
    memory, whole = ours["arena_bytes"] / MIB, ours.get("device_mib") or 0.0
    section.add(what, f"{ours['tokens_per_second']:.0f} tokens/s, {memory:.0f} MiB ({whole:.0f} with context and libraries), "
                f"{ours['host_bytes'] / MIB:.0f} MiB on the host", None)
    recipe = ours["recipe"]
    levels = ", ".join(f"{recipe['recompute'].count(level)} × {level}" for level in sorted(set(recipe["recompute"])))
    section.add(f"{what}: recipe", f"micro-batches of {recipe['micro_batch']}; recomputed: {levels}", None)
    share = ours["limit_step_seconds"] / ours["step_seconds_median"]
    section.add(f"{what}: share of the measured product peak", f"{100 * share:.0f} %; predicted "
                f"{1e3 * ours['predicted_step_seconds']:.0f} ms, took {1e3 * ours['step_seconds_median']:.0f} ms", None)
    where = sorted(ours["seconds_by_op"].items(), key=lambda item: -item[1])[:6]
    total = sum(ours["seconds_by_op"].values()) or 1.0
    section.add(f"{what}: where it goes", ", ".join(f"{op} {100 * t / total:.0f} %" for op, t in where), None)


SECTIONS = {"found": found, "attention": attention, "ops": ops, "plans": plans, "soak": soak, "kill": kill, "curve": curve, "speed": speed}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, help="total time limit, shared by the sections")
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), type=pathlib.Path, help="folder for the results")
    parser.add_argument("--programs", default=HERE, type=pathlib.Path)
    parser.add_argument("--libraries", type=pathlib.Path, help="folder put before LD_LIBRARY_PATH, for Plimsoll alone")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def watch(folder):
    """Starts nvidia-smi, which logs clocks, temperature, load and memory every other second and keeps the driver active."""
    query = "--query-gpu=timestamp,index,clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,memory.used"
    try:
        with open(folder / "nvidia-smi.csv", "w") as file:
            return subprocess.Popen(["nvidia-smi", "-l", "2", query, "--format=csv"], stdin=subprocess.DEVNULL, stdout=file,
                                    stderr=subprocess.DEVNULL)
    except OSError:
        return None


def main():
    options = arguments()
    if options.worker:
        return worker(options.worker)
    sizes = REHEARSAL if options.rehearse else REAL
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        sys.exit(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    share = options.seconds / sum(sizes["seconds"][name] for name in wanted) if options.seconds else 1.0
    report = Report()
    began = report.began
    options.out.mkdir(parents=True, exist_ok=True)

    def cut_off(number, _):
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, cut_off)
    about = HERE / "about.json"
    report.figures["about"] = json.loads(about.read_text()) if about.exists() else {}
    report.figures["began"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    what = "a stand-in for a GPU (runs on the CPU)" if options.rehearse else options.device
    folder = pathlib.Path(tempfile.mkdtemp(prefix="plimsoll-gpu-check-"))
    monitor = watch(options.out)
    # Time that a section does not use goes to later sections.
    deadline = began
    try:
        for name, check in SECTIONS.items():
            if name not in wanted:
                continue
            deadline += sizes["seconds"][name] * share
            print(f"== {time.monotonic() - began:5.0f} s: {name}: {check.__doc__}", flush=True)
            section = Section(options, sizes, folder, report, name, deadline)
            started = time.monotonic()
            try:
                check(section)
            except Failed as failed:
                section.add("ends", failed, False)
                if name == "found":
                    break
            except Exception as error:  # a failed section must not hide the others
                section.add("ends", f"{type(error).__name__}: {error}", False)
            finally:
                section.keep("seconds", time.monotonic() - started)
                report.write(options.out, what)
    except Interrupted as word:
        report.add("all", "cut off", word, False)
    finally:
        if monitor:
            monitor.kill()
        shutil.rmtree(folder, ignore_errors=True)

    report.write(options.out, what)
    print(f"\nfigures in {options.out}\n{report.table(what)}", end="")
    sys.exit(1 if report.failed() else 0)


if __name__ == "__main__":
    main()
