"""The real binary on a stand-in for a GPU (it runs on the CPU): end_to_end.py PROGRAM LIBRARIES [test...]

PROGRAM is plimsoll, LIBRARIES the folder that the stand-in was built into
(crates/plimsoll-device/tests/cuda_stand_in). Called by `cargo xtask stand-in`.
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
from gpu_check import contents, last_json, run_file, samples, settings, write_config, write_samples

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
        cls.made = {}

    @classmethod
    def tearDownClass(cls):
        cls.home.cleanup()

    def run_program(self, *arguments, exit=0, libraries=None, more=None, **stand_in):
        """What it says, and what it complains about."""
        child = self.start(arguments, libraries, more, **stand_in)
        try:
            said, complained = child.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            child.kill()
            self.fail(f"{child.args} does not end: {child.communicate()}")
        self.assertEqual(child.returncode, exit, f"{child.args}\n{said}\n{complained}")
        return said + complained

    def start(self, arguments, libraries=None, more=None, **stand_in):
        # Measuring the machine takes longer than all else: once is enough.
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
        """What it says. With the plan of the run that it is like: on a busy machine rates waver, and plans with them."""
        plan = ["--plan", self.root / like / "plan.json"] if like else []
        return self.run_program(*self.arguments(run, **more), *plan, exit=exit, libraries=libraries, **(stand_in or {}))

    def records(self, run):
        path = self.root / run / "events.jsonl"
        # The last line may be half written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return list(map(json.loads, lines))

    def warnings(self, run):
        return [record["message"] for record in self.records(run) if record.get("event") == "warning"]

    def losses(self, run):
        return [record["loss"] for record in self.records(run) if record.get("event") == "step"]

    def result(self, run):
        return json.loads((self.root / run / "result.json").read_text())

    def once(self, run, **more):
        """A run that several tests look at."""
        if run not in self.made:
            self.train(run, **more)
            self.made[run] = True
        return run

    def test_the_device_is_listed_and_says_that_it_is_none(self):
        said = self.run_program("devices", MEMORY="24GiB,8GiB", ARCH="89,86", FOREIGN="1GiB")
        self.assertEqual(said.count(NAME), 2)
        for word in ("cuda:0", "cuda:1", "24.00 GiB", "8.00 GiB", "Ada", "Ampere"):
            self.assertIn(word, said)

    def test_f32_is_the_cpus(self):
        self.once("cpu-f32", device="cpu"), self.once("gpu-f32")
        for ours, cpus in zip(self.losses("gpu-f32"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)

    def test_bf16_is_f32_within_its_rounding(self):
        self.once("cpu-f32", device="cpu"), self.once("gpu-bf16", precision="bf16")
        for ours, cpus in zip(self.losses("gpu-bf16"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=2e-2)

    def test_planned_is_used(self):
        for run, precision in [("gpu-f32", "f32"), ("gpu-bf16", "bf16")]:
            self.once(run, precision=precision)
            memory = self.result(run)["memory"][0]
            self.assertEqual(memory["arena_bytes"], memory["arena_measured_bytes"])
            off = abs(memory["measured_bytes"] - memory["predicted_bytes"])
            self.assertLessEqual(off, memory["predicted_bytes"] / 100 + (64 << 20), memory)
            self.assertLessEqual(memory["measured_bytes"], memory["budget_bytes"])

    def test_any_order_that_streams_allow_gives_the_same_bits(self):
        self.once("gpu-bf16", precision="bf16")
        expected = contents(self.root / "gpu-bf16")
        for seed in (2, 3, 4):
            self.train(f"seed-{seed}", like="gpu-bf16", precision="bf16", stand_in=dict(SEED=seed))
            self.assertEqual(contents(self.root / f"seed-{seed}"), expected, f"seed {seed}")

    def test_a_run_that_lost_its_device_goes_on_to_the_same_bits(self):
        self.once("gpu-bf16", precision="bf16")
        expected = contents(self.root / "gpu-bf16")
        _, whole, _ = self.counted()
        for share in (0.7, 0.95):
            run = f"lost-{share}"
            lost = dict(LOST_AT=int(share * whole))
            said = self.train(run, like="gpu-bf16", precision="bf16", exit=4, stand_in=lost)
            self.assertIn("--resume", said)
            # What this machine knows of its GPU is lost, too: the checkpoint knows how products were done.
            cache = self.cache(f"{run}-cache", ["algorithms.json", "charges.json"])
            self.run_program("train", "--quiet", "--resume", self.root / run, more=cache)
            self.assertEqual(self.warnings(run), [])
            self.assertEqual(contents(self.root / run), expected, run)

    def test_another_driver_chooses_algorithms_anew_and_says_so(self):
        run = "another-driver"
        _, whole, _ = self.counted()
        self.train(run, precision="bf16", exit=4, stand_in=dict(LOST_AT=int(0.95 * whole)))
        self.run_program("train", "--quiet", "--resume", self.root / run, DRIVER=13030)
        warnings = self.warnings(run)
        self.assertTrue(any("CUDA 13.3" in said and "CUDA 13.2" in said for said in warnings), warnings)

    def test_the_load_line_holds_from_the_first_moment_on(self):
        self.once("gpu-bf16", precision="bf16")
        budget = self.result("gpu-bf16")["memory"][0]["predicted_bytes"] + (1 << 20)
        cache = self.cache("line-cache", ["charges.json"])
        said = self.train("line", precision="bf16", stand_in=dict(COUNT=1, more=cache), **{"memory.budget": f"{budget}B"})
        *_, most = self.counts(said)
        self.assertLessEqual(most, budget)
        self.assertGreater(most, budget - (16 << 20))

    def counted(self):
        """Allocations and launches of a whole run in bf16, and the most bytes that it held."""
        self.once("gpu-bf16", precision="bf16")
        if "counted" not in self.made:
            said = self.train("counted", precision="bf16", stand_in=dict(COUNT=1))
            self.made["counted"] = self.counts(said)
        return self.made["counted"]

    def counts(self, said):
        words = r"(\d+) contexts opened, (\d+) allocations, (\d+) launches, at most (\d+) bytes"
        opened, *counts = map(int, re.search(words, said).groups())
        # However often a process opens its GPU: what is measured once is what is held.
        self.assertEqual(opened, 1)
        return counts

    def cache(self, name, without):
        """A cache like that of all runs, which nobody has told some things."""
        self.once("gpu-f32")
        shutil.copytree(self.root / "cache", self.root / name, ignore=shutil.ignore_patterns(*without))
        return {"PLIMSOLL_CACHE": str(self.root / name)}

    def test_any_allocation_that_is_refused_is_a_message_and_leaves_nothing_half_done(self):
        allocations, *_ = self.counted()
        self.once("gpu-bf16", precision="bf16")
        for number in sorted({1, 2, allocations // 2, allocations}):
            said = self.train(f"refused-{number}", precision="bf16", exit=3, stand_in=dict(OOM_AT=number))
            self.assertNotIn("bug", said)

    def test_a_model_is_evaluated_and_generates(self):
        self.once("gpu-f32")
        model, data = self.root / "gpu-f32/model", self.data
        loss = {}
        for device in ("cpu", "cuda:0"):
            said = self.run_program("eval", model, "--data", data, "--format", "tokens", "--devices", device, "--json")
            # What it tells a person beside it goes to stderr.
            loss[device] = last_json(said)["loss"]
        self.assertAlmostEqual(loss["cuda:0"] / loss["cpu"], 1, delta=1e-5)

    def test_devices_are_measured_one_by_one_and_all_at_once(self):
        out = self.root / "bench.json"
        said = self.run_program("bench", "devices", "--duration", "3s", "--json", out, MEMORY="4GiB,2GiB", ARCH="89,86")
        bench = json.loads(out.read_text())
        names = ["cpu", "cuda:0", "cuda:1"]
        self.assertEqual(sorted({device["device"] for device in bench["devices"]}), names)
        self.assertEqual(bench["all"]["devices"], names)
        self.assertEqual([rate["dtype"] for rate in bench["all"]["products"]], ["f32", "bf16"])
        for gpu in names[1:]:
            self.assertGreater(bench["all"]["conditions"][gpu]["temperature_celsius"], 0)
            self.assertIn(f"{gpu} among all: 36 °C", said)

    def test_a_step_is_timed(self):
        for dtype in ("f32", "bf16"):
            said = self.run_program(
                "bench", "step", "--device", "cuda:0", "--dtype", dtype, "--vocab", 64, "--layers", 2, "--hidden", 32,
                "--heads", 4, "--kv-heads", 2, "--ffn", 48, "--sequence", 16, "--batch", 2, "--steps", 2, "--warmup", 1)
            report = last_json(said)
            self.assertEqual(report["arena_bytes"], report["arena_measured_bytes"])
            self.assertIn("stand-in", report["device_model"])

    def test_a_driver_that_only_says_it_maps_memory_gives_a_plain_arena_with_the_same_bits(self):
        self.once("gpu-bf16", precision="bf16")
        plan = self.root / "gpu-bf16/plan.json"
        for number, maps in enumerate((1, 0, "forbidden")):
            self.run_program(*self.arguments(f"maps-{number}", precision="bf16"), "--plan", plan, VMM=maps)
            self.assertTrue(contents(self.root / f"maps-{number}") == contents(self.root / "maps-0"), maps)

    def test_a_budget_that_is_too_small_is_refused_with_what_would_do(self):
        small = {"memory.budget": "310MiB"}
        said = self.train("too-small", exit=3, **small, **{"run.fallback": "none"})
        self.assertRegex(said, r"--budget \d+MiB|[\d.]+ MiB")
        # The processor is the last rung, and is named.
        self.train("too-small-on-cpu", **small)
        self.assertEqual(self.result("too-small-on-cpu")["memory"][0]["device"], "cpu")
        self.assertTrue(any(said.startswith("fallback to CPU: cuda:0") for said in self.warnings("too-small-on-cpu")))

    def test_a_run_feels_what_others_take_of_its_gpu(self):
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
            retreat = wait_for("retreat", 1)[0]
            self.assertIn("others need memory", retreat["why"])
            self.assertLess(retreat["arena_bytes"], retreat["arena_bytes_before"])
            wait_for("step", len(self.losses("pressed")) + 2)
            child.send_signal(signal.SIGINT)
            self.assertEqual(child.wait(60), 4)
        finally:
            child.kill()
            child.communicate()
        # What the smaller recipe's products are done with is kept as well.
        newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
        kept = json.loads((newest / "checkpoint.json").read_text())["algorithms"]["chosen"]
        self.assertLess(before.items(), kept.items())

    def test_what_is_missing_is_named_with_what_brings_it(self):
        folder = self.root / "libraries"
        for missing, word in [("libcuda.so.1", "NVIDIA driver"), ("libnvrtc.so.13", "NVRTC"), ("libcublasLt.so.13", "cuBLASLt")]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(LIBRARIES, folder, ignore=lambda _, names: [name for name in names if name == missing or name == "units"])
            # Only these: nothing that lies elsewhere on this machine.
            said = self.run_program(*self.arguments("missing"), exit=2, libraries=folder)
            self.assertIn(word, said)

    def test_what_waits_on_the_host_has_the_same_bits_pinned_or_not(self):
        self.once("gpu-bf16", precision="bf16")
        plan = json.loads((self.root / "gpu-bf16/plan.json").read_text())

        def run(name, stand_in, **waits):
            # Left to itself, a plan lets something wait where that is predicted to be faster by the rates of the moment.
            nothing = dict(optimizer=0, gradients=0, weights=0, inputs=0, embedding=False, head=False, update=False)
            plan["recipe"]["offload"] = {**nothing, **waits}
            path = self.root / f"{name}.json"
            path.write_text(json.dumps(plan))
            self.run_program(*self.arguments(name, precision="bf16"), "--plan", path, **stand_in)
            return contents(self.root / name)

        plain = run("waits-none", {})
        for update in (False, True):
            for seed, pinned in enumerate((1, 0, "forbidden"), 3):
                stand_in = dict(REGISTER=pinned, SEED=seed)
                name = f"waits-{update}-{pinned}"
                found = run(name, stand_in, optimizer=2, gradients=2, weights=1, inputs=1, update=update)
                # Not assertEqual: it would print megabytes.
                self.assertTrue(found == plain, name)

    def test_the_first_driver_that_starts_is_taken(self):
        stub, libraries = self.root / "stub", self.root / "behind-stub"
        stub.mkdir()
        source = stub / "stub.c"
        source.write_text("int cuInit(unsigned flags) { return 34; }\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", stub / "libcuda.so.1", source], check=True)
        shutil.copytree(LIBRARIES, libraries, copy_function=os.symlink)
        said = self.run_program("devices", libraries=f"{stub}:{libraries}")
        self.assertIn(NAME, said)
        self.assertIn(str(libraries), said)
        # Where there is no other, what it said is told.
        said = self.run_program(*self.arguments("stub-run"), exit=2, libraries=stub)
        self.assertIn("stub", said)

    def test_a_kernel_whose_tiles_are_too_large_is_named(self):
        said = self.run_program(*self.arguments("tiles"), exit=2, SHARED="16KiB")
        self.assertRegex(said, r"attention\w* needs .* of shared memory for a block, and .* has 16.00 KiB")

    def test_without_nvml_it_runs_all_the_same(self):
        folder = self.root / "no-nvml"
        # Links: what is loaded under several names has to be one library.
        shutil.copytree(LIBRARIES, folder, copy_function=os.symlink, ignore=shutil.ignore_patterns("libnvidia-ml.so.1"))
        self.run_program(*self.arguments("no-nvml-run"), libraries=folder)
        memory = self.result("no-nvml-run")["memory"][0]
        self.assertNotIn("measured_bytes", memory)
        self.assertNotIn("measured_by", memory)

    def test_two_gpus_train_what_one_does(self):
        self.once("cpu-f32", device="cpu")
        stand_in = dict(MEMORY="8GiB,6GiB", ARCH="89,86")
        self.train("team", device="cuda:0,cuda:1", stand_in=stand_in, **{"run.team": "all"})
        for ours, cpus in zip(self.losses("team"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)
        result = self.result("team")
        self.assertEqual([member["device"] for member in result["team"]], ["cuda:0", "cuda:1"])
        self.assertEqual(sum(member["sequences"] for member in result["team"]), ROWS)
        for memory in result["memory"]:
            self.assertEqual(memory["arena_bytes"], memory["arena_measured_bytes"])
            self.assertLessEqual(memory["measured_bytes"], memory["budget_bytes"])
        # Any order that streams allow gives the same bits.
        again = {**stand_in, "SEED": 2}
        self.train("team-2", like="team", device="cuda:0,cuda:1", stand_in=again, **{"run.team": "all"})
        self.assertEqual(contents(self.root / "team-2"), contents(self.root / "team"))

    def test_two_gpus_that_have_nccl_exchange_by_it_with_the_same_bits(self):
        both = dict(device="cuda:0,cuda:1", **{"run.team": "all"})
        stand_in = dict(MEMORY="8GiB,6GiB", ARCH="89,86")
        with_nccl = f"{LIBRARIES}:{LIBRARIES}/nccl"
        self.once("by-host", stand_in=stand_in, **both)
        by_host = self.result("by-host")
        self.assertTrue(all("collectives" not in member for member in by_host["team"]))
        self.train("by-nccl", like="by-host", stand_in=stand_in, libraries=with_nccl, **both)
        result = self.result("by-nccl")
        self.assertEqual([member["collectives"] for member in result["team"]], 2 * [{"by": "nccl"}])
        self.assertEqual(contents(self.root / "by-nccl"), contents(self.root / "by-host"))
        # Switched off by the run file.
        self.train("no-nccl", like="by-host", stand_in=stand_in, libraries=with_nccl, **both, **{"run.nccl": False})
        self.assertTrue(all("collectives" not in member for member in self.result("no-nccl")["team"]))
        for memory, without in zip(result["memory"], self.result("no-nccl")["memory"], strict=True):
            # What NCCL holds is planned, and seen: a communicator, scratch, and a module.
            self.assertEqual(memory["predicted_bytes"] - without["predicted_bytes"], 576 << 20)
            self.assertEqual(memory["measured_bytes"] - without["measured_bytes"], 266 << 20)
            self.assertLessEqual(memory["measured_bytes"], memory["budget_bytes"])
        # More than was planned is given back, and so is what cannot be had: they go on through memory of the host.
        for run, faults, why in [
            ("wide", dict(NCCL_MEMORY="600MiB"), r"it holds \d+\.\d+ MiB on the gpu, more than the 576.00 MiB"),
            ("wrong", dict(NCCL_CORRUPTS=1), r"NCCL refuses to exchange: what came of rank 0 is not what it has sent"),
            # The others look for who cannot come for a minute.
            ("refused", dict(NCCL_REFUSES=1), r"NCCL refuses to bring the ranks together: unhandled system error"),
        ]:
            self.train(run, like="by-host", stand_in={**stand_in, **faults}, libraries=with_nccl, **both)
            ways = [member["collectives"] for member in self.result(run)["team"]]
            self.assertEqual([way["by"] for way in ways], ["host", "host"])
            self.assertRegex(ways[1]["why"], why)
            self.assertEqual(contents(self.root / run), contents(self.root / "by-host"))

    def test_two_gpus_train_as_a_pipeline_what_one_does(self):
        self.once("cpu-f32", device="cpu")
        stand_in = dict(MEMORY="8GiB,6GiB", ARCH="89,86")
        devices = {"device": "cuda:0,cuda:1", "run.team": "all"}
        arguments = [word for word in self.arguments("stages", **devices)[1:] if word != "--quiet"]
        plan = json.loads(self.run_program("plan", *arguments, "--json", **stand_in))
        # A model so small is never planned as one: its plan is written by hand.
        plan["sharing"] = "layers"
        for number, member in enumerate(plan["team"]):
            member.update(sequences=ROWS, layers=[number, number + 1])
            member["recipe"].update(micro_batch=2, recompute=member["recipe"]["recompute"][number:number + 1])
        (self.root / "stages.json").write_text(json.dumps(plan))
        for run, seed in ("stages", 1), ("stages-2", 2):
            arguments = [*self.arguments(run, **devices), "--plan", self.root / "stages.json"]
            self.run_program(*arguments, SEED=seed, **stand_in)
            result = self.result(run)
            self.assertEqual(result["sharing"], "layers", self.warnings(run))
            for ours, cpus in zip(self.losses(run), self.losses("cpu-f32"), strict=True):
                self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)
            for memory in result["memory"]:
                self.assertEqual(memory["arena_bytes"], memory["arena_measured_bytes"])
        self.assertEqual(contents(self.root / "stages"), contents(self.root / "stages-2"))

    def test_a_gpu_and_the_processor_train_together(self):
        self.once("cpu-f32", device="cpu")
        self.train("mixed", device="cuda:0,virtual:b=1GiB@0.5", **{"run.team": "all"})
        for ours, cpus in zip(self.losses("mixed"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)

    def test_a_gpu_that_is_gone_leaves_the_team(self):
        self.once("cpu-f32", device="cpu")
        stand_in = dict(MEMORY="8GiB,8GiB")
        arguments = self.arguments("left", device="cuda:0,cuda:1", **{"run.team": "all"})
        self.run_program(*arguments, "--inject-loss", "cuda:1:3", **stand_in)
        for ours, cpus in zip(self.losses("left"), self.losses("cpu-f32"), strict=True):
            self.assertAlmostEqual(ours / cpus, 1, delta=1e-5)

    def test_what_nobody_says_is_not_called_measured(self):
        self.once("gpu-f32")
        self.assertEqual(self.result("gpu-f32")["memory"][0]["measured_by"], "process")
        # As in a container: the driver does not say who holds what.
        self.train("hidden", stand_in=dict(PROCESSES=0))
        memory = self.result("hidden")["memory"][0]
        self.assertEqual(memory["measured_by"], "free_memory")
        off = abs(memory["measured_bytes"] - memory["predicted_bytes"])
        self.assertLessEqual(off, memory["predicted_bytes"] / 100 + (64 << 20), memory)

    def test_a_driver_without_a_gpu_is_a_message(self):
        said = self.run_program(*self.arguments("none"), exit=2, MEMORY="none")
        self.assertIn("GPU", said)

    def test_a_gpu_that_is_too_old_is_named(self):
        said = self.run_program(*self.arguments("old"), exit=2, ARCH="75")
        self.assertIn("7.5", said)

    def test_auto_takes_the_gpu_and_bf16(self):
        arguments = [word for word in self.arguments("auto", precision="auto") if word not in ("--devices", "cuda:0")]
        self.run_program(*arguments)
        self.assertEqual(self.result("auto")["memory"][0]["device"], "cuda:0")
        self.assertIn('precision = "bf16"', (self.root / "auto/run.toml").read_text())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    PROGRAM, LIBRARIES = map(os.path.abspath, sys.argv[1:3])
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
