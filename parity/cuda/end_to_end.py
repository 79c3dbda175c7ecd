"""Runs the real binary on the stand-in for a GPU, which runs on the CPU: end_to_end.py PROGRAM LIBRARIES [test...]

PROGRAM is plimsoll. LIBRARIES is the build folder of the stand-in (crates/plimsoll-device/tests/cuda_stand_in). Called by `cargo xtask stand-in`.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_check import contents, last_json
from gpu_inputs import run_file, samples, settings, write_config, write_samples

PROGRAM = LIBRARIES = None
MODEL = dict(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=97)
SEQUENCE, ROWS, STEPS = 16, 4, 4
NAME = "stand-in for a GPU (runs on the CPU)"


class EndToEnd(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.home = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.home.name)
        cls.model, cls.data = cls.root / "shape", cls.root / "train.jsonl"
        write_config(cls.model, MODEL, SEQUENCE)
        write_samples(cls.data, samples(MODEL["vocab"], SEQUENCE + 1, 40, 1))
        cls.done_runs = {}

    @classmethod
    def tearDownClass(cls):
        cls.home.cleanup()

    def run_program(self, *arguments, exit=0, libraries=None, more=None, **stand_in):
        """Returns the combined output of the program; fails unless it ends with the exit code."""
        child = self.start(arguments, libraries, more, **stand_in)
        try:
            output, errors = child.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            child.kill()
            self.fail(f"{child.args} does not end: {child.communicate()}")
        self.assertEqual(child.returncode, exit, f"{child.args}\n{output}\n{errors}")
        return output + errors

    def start(self, arguments, libraries=None, more=None, **stand_in):
        # All runs share one cache, because measuring the machine takes longer than everything else.
        environment = {**os.environ, "PLIMSOLL_CACHE": str(self.root / "cache"), "NO_COLOR": "1", **(more or {})}
        environment["LD_LIBRARY_PATH"] = str(libraries or LIBRARIES)
        environment.update({f"PLIMSOLL_STAND_IN_{name}": str(value) for name, value in stand_in.items()})
        return subprocess.Popen(
            [PROGRAM, *map(str, arguments)], env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )

    def arguments(self, run, device="cuda:0", precision="f32", **more):
        return ["train", run_file(self.root), "--quiet", "--devices", device, *settings({
            "model.path": str(self.model), "model.init": "random", "data.train": str(self.data),
            "data.eval": str(self.data), "data.format": "tokens", "data.sequence": SEQUENCE, "data.pack": False,
            "train.batch_tokens": ROWS * SEQUENCE, "train.steps": STEPS, "train.save_every": 2, "train.warmup_steps": 0,
            "train.learning_rate": 1e-2, "train.precision": precision, "run.dir": str(self.root / run), **more,
        })]

    def train(self, run, exit=0, stand_in=None, like=None, libraries=None, **more):
        """Trains a run and returns its output.

        Uses the plan of run `like`, because measured rates and plans vary on a busy machine.
        """
        plan = ["--plan", self.root / like / "plan.json", "--set", "run.deterministic=false"] if like else []
        return self.run_program(*self.arguments(run, **more), *plan, exit=exit, libraries=libraries, **(stand_in or {}))

    def records(self, run):
        path = self.root / run / "events.jsonl"
        # The last line may be partly written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return list(map(json.loads, lines))

    def warnings(self, run):
        return [record["message"] for record in self.records(run) if record.get("event") == "warning"]

    def losses(self, run):
        return [record["loss"] for record in self.records(run) if record.get("event") == "step"]

    def result(self, run):
        return json.loads((self.root / run / "result.json").read_text())

    def once(self, run, **more):
        """Trains a run that several tests use, once."""
        if run not in self.done_runs:
            self.train(run, **more)
            self.done_runs[run] = True
        return run

    def test_devices_lists_the_stand_in(self):
        output = self.run_program("devices", MEMORY="24GiB,8GiB", ARCH="89,86", FOREIGN="1GiB")
        self.assertEqual(output.count(NAME), 2)
        for word in ("cuda:0", "cuda:1", "24.00 GiB", "8.00 GiB", "Ada", "Ampere"):
            self.assertIn(word, output)

    def test_f32_losses_match_cpu(self):
        self.once("cpu-f32", device="cpu"), self.once("gpu-f32")
        for ours, cpus in zip(self.losses("gpu-f32"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)

    def test_bf16_losses_match_f32_within_rounding(self):
        self.once("cpu-f32", device="cpu"), self.once("gpu-bf16", precision="bf16")
        for ours, cpus in zip(self.losses("gpu-bf16"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=2e-2)

    def test_planned_memory_equals_used_memory(self):
        for run, precision in [("gpu-f32", "f32"), ("gpu-bf16", "bf16")]:
            self.once(run, precision=precision)
            memory = self.result(run)["memory"][0]
            self.assertEqual(memory["arena_bytes"], memory["arena_measured_bytes"])
            off = abs(memory["measured_bytes"] - memory["predicted_bytes"])
            self.assertLessEqual(off, memory["predicted_bytes"] / 100 + (64 << 20), memory)
            self.assertLessEqual(memory["measured_bytes"], memory["budget_bytes"])

    def test_stream_order_does_not_change_bits(self):
        self.once("gpu-bf16", precision="bf16")
        expected = contents(self.root / "gpu-bf16")
        for seed in (2, 3, 4):
            self.train(f"seed-{seed}", like="gpu-bf16", precision="bf16", stand_in=dict(SEED=seed))
            self.assertEqual(contents(self.root / f"seed-{seed}"), expected, f"seed {seed}")

    def test_resume_after_device_loss_gives_same_bits(self):
        self.once("gpu-bf16", precision="bf16")
        expected = contents(self.root / "gpu-bf16")
        _, whole, _ = self.counted()
        for share in (0.7, 0.95):
            run = f"lost-{share}"
            lost = dict(LOST_AT=int(share * whole))
            output = self.train(run, like="gpu-bf16", precision="bf16", exit=4, stand_in=lost)
            self.assertIn("--resume", output)
            # The machine cache is lost, too: the checkpoint contains the GEMM algorithms.
            cache = self.cache(f"{run}-cache", ["algorithms.json", "charges.json"])
            self.run_program("train", "--quiet", "--resume", self.root / run, more=cache)
            self.assertEqual(self.warnings(run), [])
            self.assertEqual(contents(self.root / run), expected, run)

    def test_driver_change_warns_and_retunes(self):
        run = "another-driver"
        _, whole, _ = self.counted()
        self.train(run, like="gpu-bf16", precision="bf16", exit=4, stand_in=dict(LOST_AT=int(0.95 * whole)))
        self.run_program("train", "--quiet", "--resume", self.root / run, DRIVER=13030)
        warnings = self.warnings(run)
        self.assertTrue(any("CUDA 13.3" in output and "CUDA 13.2" in output for output in warnings), warnings)

    def test_load_line_holds_from_start(self):
        self.once("gpu-bf16", precision="bf16")
        budget = self.result("gpu-bf16")["memory"][0]["predicted_bytes"] + (1 << 20)
        cache = self.cache("line-cache", ["charges.json"])
        output = self.train("line", precision="bf16", stand_in=dict(COUNT=1, more=cache), **{"memory.budget": f"{budget}B"})
        *_, most = self.counts(output)
        self.assertLessEqual(most, budget)
        self.assertGreater(most, budget - (16 << 20))

    def counted(self):
        """Returns allocations, launches and peak bytes of a complete bf16 run with the plan of `gpu-bf16`."""
        self.once("gpu-bf16", precision="bf16")
        if "counted" not in self.done_runs:
            output = self.train("counted", like="gpu-bf16", precision="bf16", stand_in=dict(COUNT=1))
            self.done_runs["counted"] = self.counts(output)
        return self.done_runs["counted"]

    def counts(self, output):
        words = r"(\d+) contexts opened, (\d+) allocations, (\d+) launches, at most (\d+) bytes"
        opened, *counts = map(int, re.search(words, output).groups())
        # A process keeps one context, however often it opens its GPU.
        self.assertEqual(opened, 1)
        return counts

    def cache(self, name, without):
        """Copies the shared cache without some files; returns the environment variable for it."""
        self.once("gpu-f32")
        shutil.copytree(self.root / "cache", self.root / name, ignore=shutil.ignore_patterns(*without))
        return {"PLIMSOLL_CACHE": str(self.root / name)}

    def test_refused_allocation_is_no_bug(self):
        allocations, *_ = self.counted()
        self.once("gpu-bf16", precision="bf16")
        for number in sorted({2, max(2, allocations // 2), allocations}):
            refused = dict(OOM_AT=number)
            output = self.train(f"refused-{number}", like="gpu-bf16", precision="bf16", exit=3, stand_in=refused)
            self.assertNotIn("bug", output)
        # The first allocation tests whether memory can be mapped. Without it the arena is plain memory.
        self.train("refused-1", precision="bf16", stand_in=dict(OOM_AT=1))

    def test_gpu_of_another_process_is_an_input_error(self):
        output = self.train("taken", exit=2, stand_in=dict(TAKEN=1))
        self.assertIn("another process has it", output)

    def test_evaluation_matches_cpu(self):
        self.once("gpu-f32")
        model, data = self.root / "gpu-f32/model", self.data
        loss = {}
        for device in ("cpu", "cuda:0"):
            output = self.run_program("eval", model, "--data", data, "--format", "tokens", "--devices", device, "--json")
            # Messages for users go to stderr.
            loss[device] = last_json(output)["loss"]
        self.assertAlmostEqual(loss["cuda:0"] / loss["cpu"], 1, delta=1e-5)

    def test_devices_are_measured_singly_and_together(self):
        out = self.root / "bench.json"
        output = self.run_program("bench", "devices", "--duration", "3s", "--json", out, MEMORY="4GiB,2GiB", ARCH="89,86")
        bench = json.loads(out.read_text())
        names = ["cpu", "cuda:0", "cuda:1"]
        self.assertEqual(sorted({device["device"] for device in bench["devices"]}), names)
        self.assertEqual(bench["all"]["devices"], names)
        self.assertEqual([rate["dtype"] for rate in bench["all"]["products"]], ["f32", "bf16"])
        for gpu in names[1:]:
            self.assertGreater(bench["all"]["conditions"][gpu]["temperature_celsius"], 0)
            self.assertIn(f"{gpu} under combined load: 36 °C", output)

    def test_bench_step_reports_memory(self):
        for dtype in ("f32", "bf16"):
            output = self.run_program(
                "bench", "step", "--device", "cuda:0", "--dtype", dtype, "--vocab", 64, "--layers", 2, "--hidden", 32,
                "--heads", 4, "--kv-heads", 2, "--ffn", 48, "--sequence", 16, "--batch", 2, "--steps", 2, "--warmup", 1)
            report = last_json(output)
            self.assertEqual(report["arena_bytes"], report["arena_measured_bytes"])
            self.assertIn("stand-in", report["device_model"])

    def test_plain_arena_gives_same_bits(self):
        self.once("gpu-bf16", precision="bf16")
        plan = self.root / "gpu-bf16/plan.json"
        for number, maps in enumerate((1, 0, "forbidden")):
            self.run_program(*self.arguments(f"maps-{number}", precision="bf16"), "--plan", plan, VMM=maps)
            self.assertTrue(contents(self.root / f"maps-{number}") == contents(self.root / "maps-0"), maps)

    def test_small_budget_is_refused_with_remedy(self):
        small = {"memory.budget": "310MiB"}
        output = self.train("too-small", exit=3, **small, **{"run.fallback": "none"})
        self.assertRegex(output, r"--budget \d+MiB|[\d.]+ MiB")
        # The CPU is the last rung, and a warning names it.
        self.train("too-small-on-cpu", **small)
        self.assertEqual(self.result("too-small-on-cpu")["memory"][0]["device"], "cpu")
        self.assertTrue(any(output.startswith("fallback to CPU: cuda:0") for output in self.warnings("too-small-on-cpu")))

    def test_memory_pressure_triggers_recovery(self):
        total, foreign, run = 128 << 20, self.root / "foreign", self.root / "pressed"
        arguments = self.arguments("pressed", **{"train.batch_tokens": 96 * SEQUENCE, "train.steps": 10000})
        cache = self.cache("pressed-cache", ["charges.json"])
        child = self.start(arguments, more=cache, MEMORY=total, CONTEXT="2MiB", FOREIGN_FILE=foreign)

        def wait_for(event, count):
            for _ in range(600):
                found = [record for record in self.records(run) if record.get("event") == event]
                if len(found) >= count:
                    return found
                self.assertIsNone(child.poll(), child.stderr)
                time.sleep(0.2)
            self.fail(f"no {event} in two minutes: {self.warnings(run)}, {self.records(run)[-1:]}")

        try:
            held = wait_for("step", 2)[-1]["bytes"]
            before = json.loads((run / "plan.json").read_text())["algorithms"]["chosen"]
            # Half of the margin (a fiftieth of the GPU) stays free.
            foreign.write_text(str(total - held - total // 100))
            recovery = wait_for("recovery", 1)[0]
            self.assertIn("other processes need memory", recovery["reason"])
            self.assertLess(recovery["arena_bytes"], recovery["arena_bytes_before"])
            wait_for("step", len(self.losses("pressed")) + 2)
            child.send_signal(signal.SIGINT)
            self.assertEqual(child.wait(60), 4)
        finally:
            child.kill()
            child.communicate()
        # Algorithms of the smaller recipe are stored as well.
        newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
        kept = json.loads((newest / "checkpoint.json").read_text())["algorithms"]["chosen"]
        self.assertLess(before.items(), kept.items())

    def test_missing_library_is_named(self):
        folder = self.root / "libraries"
        for missing, word in [("libcuda.so.1", "NVIDIA driver"), ("libnvrtc.so.13", "NVRTC"), ("libcublasLt.so.13", "cuBLASLt")]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(LIBRARIES, folder, ignore=lambda _, names: [name for name in names if name == missing or name == "units"])
            # Uses only this folder, not libraries elsewhere on this machine.
            output = self.run_program(*self.arguments("missing"), exit=2, libraries=folder)
            self.assertIn(word, output)

    def test_offload_gives_same_bits_pinned_or_not(self):
        self.once("gpu-bf16", precision="bf16")
        plan = json.loads((self.root / "gpu-bf16/plan.json").read_text())

        def run(name, stand_in, **offload):
            # The offload is fixed, because the planner would choose it by the rates of the moment.
            nothing = dict(optimizer=0, gradients=0, weights=0, inputs=0, embedding=False, head=False, update=False)
            plan["recipe"]["offload"] = {**nothing, **offload}
            path = self.root / f"{name}.json"
            path.write_text(json.dumps(plan))
            self.run_program(*self.arguments(name, precision="bf16"), "--plan", path, **stand_in)
            return contents(self.root / name)

        plain = run("offload-none", {})
        for update in (False, True):
            for seed, pinned in enumerate((1, 0, "forbidden"), 3):
                stand_in = dict(REGISTER=pinned, SEED=seed)
                name = f"offload-{update}-{pinned}"
                found = run(name, stand_in, optimizer=2, gradients=2, weights=1, inputs=1, update=update)
                # Not assertEqual: it would print megabytes.
                self.assertTrue(found == plain, name)

    def test_first_driver_that_starts_is_used(self):
        stub, libraries = self.root / "stub", self.root / "behind-stub"
        stub.mkdir()
        source = stub / "stub.c"
        source.write_text("int cuInit(unsigned flags) { return 34; }\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", stub / "libcuda.so.1", source], check=True)
        shutil.copytree(LIBRARIES, libraries, copy_function=os.symlink)
        output = self.run_program("devices", libraries=f"{stub}:{libraries}")
        self.assertIn(NAME, output)
        self.assertIn(str(libraries), output)
        # Without another driver, its error is reported.
        output = self.run_program(*self.arguments("stub-run"), exit=2, libraries=stub)
        self.assertIn("stub", output)

    def test_kernel_with_too_much_shared_memory_is_named(self):
        output = self.run_program(*self.arguments("tiles"), exit=2, SHARED="16KiB")
        self.assertRegex(output, r"attention\w* needs .* of shared memory for a block, and .* has 16.00 KiB")

    def test_run_works_without_nvml(self):
        folder = self.root / "no-nvml"
        # Links, because all names must load one library.
        shutil.copytree(LIBRARIES, folder, copy_function=os.symlink, ignore=shutil.ignore_patterns("libnvidia-ml.so.1"))
        self.run_program(*self.arguments("no-nvml-run"), libraries=folder)
        memory = self.result("no-nvml-run")["memory"][0]
        self.assertNotIn("measured_bytes", memory)
        self.assertNotIn("measured_by", memory)

    def test_two_gpus_match_one_device(self):
        self.once("cpu-f32", device="cpu")
        stand_in = dict(MEMORY="8GiB,6GiB", ARCH="89,86")
        self.train("team", device="cuda:0,cuda:1", stand_in=stand_in, **{"run.parallelism": "all"})
        for ours, cpus in zip(self.losses("team"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)
        result = self.result("team")
        self.assertEqual([worker["device"] for worker in result["team"]], ["cuda:0", "cuda:1"])
        self.assertEqual(sum(worker["sequences"] for worker in result["team"]), ROWS)
        for memory in result["memory"]:
            self.assertEqual(memory["arena_bytes"], memory["arena_measured_bytes"])
            self.assertLessEqual(memory["measured_bytes"], memory["budget_bytes"])
        # Another stream order gives the same bits.
        again = {**stand_in, "SEED": 2}
        self.train("team-2", like="team", device="cuda:0,cuda:1", stand_in=again, **{"run.parallelism": "all"})
        self.assertEqual(contents(self.root / "team-2"), contents(self.root / "team"))

    def test_nccl_gives_same_bits_as_host_transport(self):
        both = dict(device="cuda:0,cuda:1", **{"run.parallelism": "all"})
        stand_in = dict(MEMORY="8GiB,6GiB", ARCH="89,86")
        with_nccl = f"{LIBRARIES}:{LIBRARIES}/nccl"
        self.once("by-host", stand_in=stand_in, **both)
        by_host = self.result("by-host")
        self.assertTrue(all("collectives" not in worker for worker in by_host["team"]))
        self.train("by-nccl", like="by-host", stand_in=stand_in, libraries=with_nccl, **both)
        result = self.result("by-nccl")
        self.assertEqual([worker["collectives"] for worker in result["team"]], 2 * [{"backend": "nccl"}])
        self.assertEqual(contents(self.root / "by-nccl"), contents(self.root / "by-host"))
        # Disabled in the run file.
        self.train("no-nccl", like="by-host", stand_in=stand_in, libraries=with_nccl, **both, **{"run.nccl": False})
        self.assertTrue(all("collectives" not in worker for worker in self.result("no-nccl")["team"]))
        for memory, without in zip(result["memory"], self.result("no-nccl")["memory"], strict=True):
            # NCCL memory is planned and measured: communicator, staging buffer and module.
            self.assertEqual(memory["predicted_bytes"] - without["predicted_bytes"], 576 << 20)
            self.assertEqual(memory["measured_bytes"] - without["measured_bytes"], 266 << 20)
            self.assertLessEqual(memory["measured_bytes"], memory["budget_bytes"])
        # A communicator that is too large, corrupt or refused is closed; the run continues through host memory.
        for run, faults, reason in [
            ("wide", dict(NCCL_MEMORY="600MiB"), r"it holds \d+\.\d+ MiB on the gpu, more than the planned 576.00 MiB"),
            ("wrong", dict(NCCL_CORRUPTS=1), r"NCCL refuses to exchange: received data from rank 0 differs from what that rank sent"),
            # The other ranks wait a minute for the failed one.
            ("refused", dict(NCCL_REFUSES=1), r"NCCL refuses to connect the ranks: unhandled system error"),
        ]:
            self.train(run, like="by-host", stand_in={**stand_in, **faults}, libraries=with_nccl, **both)
            backends = [worker["collectives"] for worker in self.result(run)["team"]]
            self.assertEqual([collectives["backend"] for collectives in backends], ["host", "host"])
            self.assertRegex(backends[1]["reason"], reason)
            self.assertEqual(contents(self.root / run), contents(self.root / "by-host"))

    def test_two_gpu_pipeline_matches_one_device(self):
        self.once("cpu-f32", device="cpu")
        stand_in = dict(MEMORY="8GiB,6GiB", ARCH="89,86")
        devices = {"device": "cuda:0,cuda:1", "run.parallelism": "all"}
        arguments = [word for word in self.arguments("stages", **devices)[1:] if word != "--quiet"]
        plan = json.loads(self.run_program("plan", *arguments, "--json", **stand_in))
        # The planner never chooses a pipeline for so small a model, so the plan is edited by hand.
        plan["parallelism"] = "pipeline"
        for number, worker in enumerate(plan["team"]):
            worker.update(sequences=ROWS, layers=[number, number + 1])
            worker["recipe"].update(micro_batch=2, recompute=worker["recipe"]["recompute"][number:number + 1])
        (self.root / "stages.json").write_text(json.dumps(plan))
        for run, seed in ("stages", 1), ("stages-2", 2):
            arguments = [*self.arguments(run, **devices), "--plan", self.root / "stages.json"]
            self.run_program(*arguments, SEED=seed, **stand_in)
            result = self.result(run)
            self.assertEqual(result["parallelism"], "pipeline", self.warnings(run))
            for ours, cpus in zip(self.losses(run), self.losses("cpu-f32"), strict=True):
                self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)
            for memory in result["memory"]:
                self.assertEqual(memory["arena_bytes"], memory["arena_measured_bytes"])
        self.assertEqual(contents(self.root / "stages"), contents(self.root / "stages-2"))

    def test_gpu_and_virtual_device_train_together(self):
        self.once("cpu-f32", device="cpu")
        self.train("mixed", device="cuda:0,virtual:b=1GiB@0.5", **{"run.parallelism": "all"})
        for ours, cpus in zip(self.losses("mixed"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)

    def test_lost_gpu_leaves_the_team(self):
        self.once("cpu-f32", device="cpu")
        stand_in = dict(MEMORY="8GiB,8GiB")
        arguments = self.arguments("left", device="cuda:0,cuda:1", **{"run.parallelism": "all"})
        self.run_program(*arguments, "--inject-loss", "cuda:1:3", **stand_in)
        for ours, cpus in zip(self.losses("left"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)

    def test_hidden_processes_are_measured_by_free_memory(self):
        self.once("gpu-f32")
        self.assertEqual(self.result("gpu-f32")["memory"][0]["measured_by"], "process")
        # As in a container: the driver does not report memory per process.
        self.train("hidden", stand_in=dict(PROCESSES=0))
        memory = self.result("hidden")["memory"][0]
        self.assertEqual(memory["measured_by"], "free_memory")
        off = abs(memory["measured_bytes"] - memory["predicted_bytes"])
        self.assertLessEqual(off, memory["predicted_bytes"] / 100 + (64 << 20), memory)

    def test_driver_without_gpu_is_an_error(self):
        output = self.run_program(*self.arguments("none"), exit=2, MEMORY="none")
        self.assertIn("GPU", output)

    def test_old_gpu_is_named(self):
        output = self.run_program(*self.arguments("old"), exit=2, ARCH="75")
        self.assertIn("7.5", output)

    def test_auto_selects_gpu_and_bf16(self):
        arguments = [word for word in self.arguments("auto", precision="auto") if word not in ("--devices", "cuda:0")]
        self.run_program(*arguments)
        self.assertEqual(self.result("auto")["memory"][0]["device"], "cuda:0")
        self.assertIn('precision = "bf16"', (self.root / "auto/run.toml").read_text())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    PROGRAM, LIBRARIES = map(os.path.abspath, sys.argv[1:3])
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
