"""The real binary on a stand-in for a GPU (it runs on the CPU): end_to_end.py PROGRAM LIBRARIES [test...]

PROGRAM is plimsoll, LIBRARIES the folder that the stand-in was built into
(crates/plimsoll-device/tests/cuda_stand_in). Called by `cargo xtask stand-in`.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_check import contents, run_file, samples, settings, write_config, write_samples

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

    def run_program(self, *arguments, exit=0, libraries=None, **stand_in):
        """What it says, and what it complains about."""
        # Measuring the machine takes longer than all else: once is enough.
        environment = {"PLIMSOLL_CACHE": str(self.root / "cache"), **os.environ, "NO_COLOR": "1"}
        environment["LD_LIBRARY_PATH"] = str(libraries or LIBRARIES)
        environment.update({f"PLIMSOLL_STAND_IN_{name}": str(value) for name, value in stand_in.items()})
        command = [PROGRAM, *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
        self.assertEqual(done.returncode, exit, f"{command}\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def arguments(self, run, device="cuda:0", precision="f32", **more):
        return ["train", run_file(self.root), "--quiet", "--devices", device, *settings({
            "model.path": str(self.model), "model.init": "random", "data.train": str(self.data),
            "data.eval": str(self.data), "data.format": "tokens", "data.sequence": SEQUENCE, "data.pack": False,
            "train.batch_tokens": ROWS * SEQUENCE, "train.steps": STEPS, "train.save_every": 2, "train.warmup_steps": 0,
            "train.learning_rate": 1e-2, "train.precision": precision, "run.dir": str(self.root / run), **more,
        })]

    def train(self, run, exit=0, stand_in=None, **more):
        said = self.run_program(*self.arguments(run, **more), exit=exit, **(stand_in or {}))
        return said

    def losses(self, run):
        records = map(json.loads, (self.root / run / "events.jsonl").read_text().splitlines())
        return [record["loss"] for record in records if record.get("event") == "step"]

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
            self.train(f"seed-{seed}", precision="bf16", stand_in=dict(SEED=seed))
            self.assertEqual(contents(self.root / f"seed-{seed}"), expected, f"seed {seed}")

    def test_a_run_that_lost_its_device_goes_on_to_the_same_bits(self):
        self.once("gpu-bf16", precision="bf16")
        expected = contents(self.root / "gpu-bf16")
        _, whole = self.counted()
        for share in (0.7, 0.95):
            run = f"lost-{share}"
            said = self.train(run, precision="bf16", exit=4, stand_in=dict(LOST_AT=int(share * whole)))
            self.assertIn("--resume", said)
            self.run_program("train", "--quiet", "--resume", self.root / run)
            self.assertEqual(contents(self.root / run), expected, run)

    def counted(self):
        """Allocations and launches of a whole run in bf16."""
        said = self.train("counted", precision="bf16", stand_in=dict(COUNT=1))
        return map(int, re.search(r"(\d+) allocations, (\d+) launches", said).groups())

    def test_any_allocation_that_is_refused_is_a_message_and_leaves_nothing_half_done(self):
        allocations, _ = self.counted()
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
            loss[device] = json.loads(said)["loss"]
        self.assertAlmostEqual(loss["cuda:0"] / loss["cpu"], 1, delta=1e-5)

    def test_a_step_is_timed(self):
        for dtype in ("f32", "bf16"):
            said = self.run_program(
                "bench", "step", "--device", "cuda:0", "--dtype", dtype, "--vocab", 64, "--layers", 2, "--hidden", 32,
                "--heads", 4, "--kv-heads", 2, "--ffn", 48, "--sequence", 16, "--batch", 2, "--steps", 2, "--warmup", 1)
            report = json.loads(said.strip().splitlines()[-1])
            self.assertEqual(report["arena_bytes"], report["arena_measured_bytes"])
            self.assertIn("stand-in", said)

    def test_a_budget_that_is_too_small_is_refused_with_what_would_do(self):
        said = self.train("too-small", exit=3, **{"memory.budget": "310MiB"})
        self.assertIn("MiB", said)

    def test_what_is_missing_is_named_with_what_brings_it(self):
        folder = self.root / "libraries"
        for missing, word in [("libcuda.so.1", "NVIDIA driver"), ("libnvrtc.so.13", "NVRTC"), ("libcublasLt.so.13", "cuBLASLt")]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(LIBRARIES, folder, ignore=lambda _, names: [name for name in names if name == missing or name == "units"])
            # Only these: nothing that lies elsewhere on this machine.
            said = self.run_program(*self.arguments("missing"), exit=2, libraries=folder)
            self.assertIn(word, said)

    def test_without_nvml_it_runs_all_the_same(self):
        folder = self.root / "no-nvml"
        shutil.copytree(LIBRARIES, folder, ignore=lambda _, names: [name for name in names if name in ("libnvidia-ml.so.1", "units")])
        self.run_program(*self.arguments("no-nvml-run"), libraries=folder)

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
