#!/usr/bin/env python3
"""Tests of live.py without the binary: correct results pass, and mistakes are found.

    parity/run test

torch in float32 replaces the binary behind the same commands. It shares code with the reference, so these tests prove nothing
about Plimsoll. They show that the checks can pass and can fail.
"""

import contextlib
import io
import json
import math
import random
import tempfile
import tomllib
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import live
import reference
from reference import Training


class StandIn(live.Plimsoll):
    """Answers the commands of live.py correctly or with one named mistake."""

    def __init__(self, mistake=""):
        self.mistake = mistake

    def run(self, command, *arguments):
        return getattr(self, f"run_{command}")(*map(str, arguments))

    def load(self, directory, adapter=None):
        if directory.endswith("-whole"):  # a model with images; its text part is beside it
            directory = directory.removesuffix("-whole") + "-text"
        if adapter is None:
            return reference.load(directory, torch.float32)
        model = reference.load_adapter(directory, adapter, torch.float32)
        if self.mistake == "adapters not scaled":
            for module in model.modules():
                if isinstance(getattr(module, "scaling", None), dict):
                    module.scaling["default"] = 1.0
        return model

    def run_export(self, base, _adapter, adapter, _merged, out):
        assert (_adapter, _merged) == ("--adapter", "--merged")
        self.load(base, adapter).merge_and_unload().save_pretrained(out)

    def run_eval(self, directory, _data, file, _format, form, _json, _adapter="--adapter", adapter=None):
        assert (_data, _format, form, _json, _adapter) == ("--data", "--format", "tokens", "--json", "--adapter")
        model, samples = self.load(directory, adapter), reference.read_samples(file)
        result = reference.evaluate(model, samples)
        if self.mistake == "mean of means":
            means = [reference.evaluate(model, [sample])["loss"] for sample in samples if sample.labelled]
            result["loss"] = math.fsum(means) / len(means)
        return json.dumps(result)

    def run_train(self, run_file):
        run = tomllib.loads(Path(run_file).read_text())
        wanted, directory = run["train"], Path(run["run"]["dir"])
        sequence, pack = run["data"]["sequence"], run["data"]["pack"]
        if self.mistake == "not packed":
            pack = False
        training = Training(
            steps=wanted["steps"],
            rows_per_step=wanted["batch_tokens"] // sequence,
            micro_batch=run["recipe"]["micro_batch"],
            learning_rate=wanted["learning_rate"],
            betas=tuple(wanted["betas"]),
            eps=wanted["eps"],
            weight_decay=wanted["weight_decay"],
            clip_norm=wanted["clip_norm"],
        )
        if self.mistake == "norms decayed":
            training = replace(training, decays=lambda name, p: True)
        adapter = run["model"].get("adapter")
        assert (wanted["method"] == "lora") == (adapter is not None)
        model = self.load(run["model"]["path"], adapter)
        rows = reference.rows_of(reference.read_samples(run["data"]["train"]), sequence, pack)
        steps = reference.train(model, rows, training)
        if self.mistake == "a bias of keys not trained":
            name = "model.layers.0.self_attn.k_proj.bias"
            start = self.load(run["model"]["path"]).get_parameter(name)
            model.get_parameter(name).data = start.detach()
        model.save_pretrained(directory / ("adapter" if adapter else "model"))
        if self.mistake == "tensor forgotten":
            file = directory / "model" / "model.safetensors"
            weights = load_file(file)
            weights.pop("model.norm.weight")
            save_file(weights, file, metadata={"format": "pt"})
        events = [{"event": "start"}]
        events += [{"event": "step", "loss": s["loss"], "norm": s["norm"], "labelled_tokens": s["tokens"]} for s in steps]
        (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    def run_generate(self, directory, _prompt, prompt, _count, count, _temperature, temperature):
        assert (_prompt, _count, _temperature, float(temperature)) == ("--prompt", "--max-tokens", "--temperature", 0.0)
        tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
        tokens = tokenizer.encode(prompt).ids
        tokens += reference.greedy(self.load(directory), tokens, int(count))[0]
        return tokenizer.decode(tokens[:-1] if self.mistake == "token lost" else tokens) + "\n"


def outcome(plimsoll, models, check=live.check_all):
    """Runs the checks of live.py on models. Returns the report and the names of the failed checks."""
    report, printed = live.Report(), io.StringIO()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(printed):
        check(report, plimsoll, Path(directory), seed=77, models=models)
    lines = printed.getvalue().splitlines()
    assert len(lines) == report.passed + report.failed
    return report, [line.removeprefix("FAIL ") for line in lines if line.startswith("FAIL")]


class Live(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)

    def test_torch_float32_passes_every_check(self):
        report, failed = outcome(StandIn(), live.MODELS)
        self.assertEqual(failed, [])
        self.assertEqual(report.passed, 25 * len(live.MODELS))

    def test_mistake_fails_its_check(self):
        for mistake, check in {
            "mean of means": "eval uneven loss",
            "norms decayed": "train weights",
            "tensor forgotten": "train ValueError",
            "not packed": "packed step loss",
            "token lost": "generate",
        }.items():
            _, failed = outcome(StandIn(mistake), live.MODELS[:2])
            self.assertTrue(any(check in line for line in failed), (mistake, failed))

    def test_noise_limit_hides_no_mistake(self):
        _, failed = outcome(StandIn("a bias of keys not trained"), live.MODELS[4:5])
        self.assertTrue(any("change of weights" in line for line in failed), failed)

    def test_adapters_pass_and_missing_scale_fails(self):
        report, failed = outcome(StandIn(), live.ADAPTED, live.check_adapters)
        self.assertEqual((failed, report.passed), ([], 10 * len(live.ADAPTED)))
        _, failed = outcome(StandIn("adapters not scaled"), live.ADAPTED[:1], live.check_adapters)
        for check in ("eval loss", "merged loss", "step loss"):
            self.assertTrue(any(check in line for line in failed), (check, failed))

    def test_text_parts_pass_and_mistakes_fail(self):
        report, failed = outcome(StandIn(), live.WHOLE_MODELS, live.check_text_parts)
        self.assertEqual((failed, report.passed), ([], 11 * len(live.WHOLE_MODELS)))
        for mistake, check in {"mean of means": "gemma3 loss", "tensor forgotten": "ValueError"}.items():
            _, failed = outcome(StandIn(mistake), live.WHOLE_MODELS[:1], live.check_text_parts)
            self.assertTrue(any(check in line for line in failed), (mistake, failed))

    def test_failing_binary_is_a_failed_check(self):
        with tempfile.TemporaryDirectory() as directory:
            binary = Path(directory) / "binary"
            binary.write_text("#!/bin/sh\necho 'error: does not fit' >&2\nexit 3\n")
            binary.chmod(0o755)
            report, failed = outcome(live.Plimsoll(binary), live.MODELS[:1])
        self.assertEqual((report.passed, report.failed), (0, 4))
        self.assertTrue(all("exit 3: error: does not fit" in line for line in failed), failed)

    def test_hanging_binary_is_a_failed_check(self):
        with mock.patch.object(live, "SECONDS_MAX", 0.2), self.assertRaisesRegex(live.PlimsollFailed, "no end"):
            live.Plimsoll("/bin/sleep").run("30")

    def test_run_file_requests_reference_training(self):
        run = tomllib.loads(live.run_file_of(Training(micro_batch=1), live.CUT[1], "a \"model\"", "data.jsonl", "out"))
        self.assertEqual(run["model"]["path"], 'a "model"')
        self.assertEqual(run["train"]["batch_tokens"], 4 * 50)
        self.assertEqual((run["data"]["pack"], run["data"]["long"]), (True, "split"))
        self.assertEqual(run["train"]["betas"], [0.9, 0.95])
        self.assertEqual(run["recipe"]["micro_batch"], 1)

    def test_words_after_accepts_output_without_prompt(self):
        self.assertEqual(live.words_after("t1 t2", "t1 t2 t3 t4\n"), ["t3", "t4"])
        self.assertEqual(live.words_after("t1 t2", "t3 t4\n"), ["t3", "t4"])
        self.assertEqual(live.words_after("t1 t2", "300 tokens/s\nt3\n"), ["t3"])

    def test_tokenizer_knows_every_token(self):
        with tempfile.TemporaryDirectory() as directory:
            live.write_tokenizer(Path(directory), 60)
            tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
        self.assertEqual(tokenizer.encode(live.words_of([59, 0, 7])).ids, [59, 0, 7])
        self.assertEqual(tokenizer.decode([59, 0, 7]), "t59 t0 t7")

    def test_odd_samples_cover_edge_cases(self):
        labelled = [sample.labelled for sample in live.odd_samples(50, random.Random(1))]
        self.assertEqual(labelled, [0, 1, 0, live.SEQUENCE - 1, 0])


if __name__ == "__main__":
    unittest.main()
