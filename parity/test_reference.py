#!/usr/bin/env python3
"""Tests of the reference arithmetic, without Plimsoll.

    parity/run test
"""

import tempfile
import unittest
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import cases
import reference
from reference import IGNORED, Sample, Training

BY_NAME = {case.name: case for case in cases.CASES}


def directional_error(model, sample):
    """Returns the relative error of a gradient along a random direction, compared with central differences of the loss."""
    generator = torch.Generator().manual_seed(7)
    _, gradient = reference.gradients(model, [sample])
    noise = lambda p: torch.randn(p.shape, generator=generator, dtype=torch.float64)
    direction = {name: noise(p) for name, p in model.named_parameters()}
    slope = sum((gradient[name] * direction[name]).sum().item() for name in direction)
    step, losses = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2, 1):
            for name, p in model.named_parameters():
                p += sign * step * direction[name]
            losses.append(reference.nll_sum(model, sample).item() / sample.labelled)
    return abs((losses[0] - losses[1]) / (2 * step) - slope) / abs(slope)


class References(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.scratch = tempfile.TemporaryDirectory()
        cls.directory = Path(cls.scratch.name)
        for case in cases.CASES:
            cases.write_case(cls.directory / case.name, case)

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def model(self, name, dtype=torch.float64):
        return reference.load(self.directory / name, dtype)

    def samples(self, name):
        return reference.read_samples(self.directory / name / "batch.jsonl")

    def test_reference_computes_in_float64(self):
        for name in ("llama-rope-llama3", "mistral", "qwen2", "qwen3"):
            model, sample = self.model(name), self.samples(name)[0]
            self.assertEqual({b.dtype for b in model.buffers()}, {torch.float64}, name)
            self.assertLess(directional_error(model, sample), 1e-7, name)

    def test_double_alone_does_not_compute_in_float64(self):
        case = self.directory / "llama"
        narrow = AutoModelForCausalLM.from_pretrained(case, attn_implementation="eager").double().eval()
        tokens = self.samples("llama")[0].tokens
        logits = narrow(input_ids=torch.tensor([tokens])).logits[0]
        distance = reference.worst(logits, reference.logits_of(self.model("llama"), tokens))
        self.assertGreater(distance, 1e-9, "transformers now computes in float64 by itself: remove Widened")
        self.assertLess(distance, 1e-5)

    def test_loss_equals_transformers_on_padded_batch(self):
        for name in ("llama", "qwen2"):
            model, samples = self.model(name, torch.float32), self.samples(name)
            longest = max(len(sample.tokens) for sample in samples)
            pad = lambda values, filler: values + [filler] * (longest - len(values))
            tokens = torch.tensor([pad(sample.tokens, 0) for sample in samples])
            labels = torch.tensor([pad(sample.labels, IGNORED) for sample in samples])
            mask = torch.tensor([pad([1] * len(sample.tokens), 0) for sample in samples])
            with torch.no_grad():
                theirs = model(input_ids=tokens, attention_mask=mask, labels=labels).loss.item()
            ours = reference.evaluate(model, samples)
            self.assertAlmostEqual(ours["loss"], theirs, places=5)
            self.assertEqual(ours["tokens"], (labels[:, 1:] != IGNORED).sum().item())

    def test_packed_documents_equal_single_documents(self):
        model, samples = self.model("qwen3"), self.samples("qwen3")
        documents = [sample.tokens for sample in samples[:3]]
        alone = torch.cat([reference.logits_of(model, document) for document in documents])
        self.assertLess(reference.worst(reference.packed_logits(model, documents), alone), 1e-12)
        run_together = reference.logits_of(model, sum(documents, []))
        self.assertGreater(reference.worst(run_together, alone), 1e-2, "logits would not reveal missing separation of documents")

    def test_step_follows_published_adamw(self):
        """Repeats AdamW on all parameters of a model from the gradients."""
        training = Training(steps=3, rows_per_step=4, micro_batch=2)
        samples = reference.read_samples(self.directory / "llama" / "train.jsonl")
        trained, by_hand = self.model("llama"), self.model("llama")
        report = reference.train(trained, [[sample] for sample in samples], training)
        first, second = {}, {}
        for step in range(1, 4):
            loss, gradient = reference.gradients(by_hand, samples[4 * (step - 1): 4 * step])
            norm = sum((g ** 2).sum() for g in gradient.values()).sqrt().item()
            self.assertAlmostEqual(report[step - 1]["loss"], loss, places=12)
            self.assertAlmostEqual(report[step - 1]["norm"], norm, places=10)
            clip = min(1.0, training.clip_norm / (norm + 1e-6))
            with torch.no_grad():
                for name, p in by_hand.named_parameters():
                    g = gradient[name] * clip
                    first[name] = training.betas[0] * first.get(name, 0) + (1 - training.betas[0]) * g
                    second[name] = training.betas[1] * second.get(name, 0) + (1 - training.betas[1]) * g * g
                    mean = first[name] / (1 - training.betas[0] ** step)
                    spread = (second[name] / (1 - training.betas[1] ** step)).sqrt()
                    decay = training.weight_decay if p.ndim == 2 else 0.0
                    p -= training.learning_rate * (mean / (spread + training.eps) + decay * p)
        for name, p in by_hand.named_parameters():
            self.assertLess(reference.normwise(dict(trained.named_parameters())[name], p), 1e-10, name)

    def test_micro_batches_do_not_change_a_step(self):
        samples = reference.read_samples(self.directory / "mistral" / "train.jsonl")
        rows = reference.rows_of(samples, 12, pack=True)
        one, four = self.model("mistral"), self.model("mistral")
        reference.train(one, rows, Training(micro_batch=1))
        reference.train(four, rows, Training(micro_batch=4))
        distance = reference.largest(reference.normwise, dict(one.named_parameters()), dict(four.named_parameters()))
        self.assertLess(distance, 1e-9)

    def test_both_config_spellings_give_equal_models(self):
        old, new = (self.directory / name for name in ("llama-rope-llama3", "llama-rope-llama3-new-keys"))
        self.assertIn('"rope_scaling"', (old / "config.json").read_text())
        self.assertNotIn('"rope_scaling"', (new / "config.json").read_text())
        self.assertIn('"rope_parameters"', (new / "config.json").read_text())
        self.assertEqual(AutoConfig.from_pretrained(old).rope_parameters, AutoConfig.from_pretrained(new).rope_parameters)
        self.assertEqual((old / "model.safetensors").read_bytes(), (new / "model.safetensors").read_bytes())

    def test_files_have_declared_dtype(self):
        for name, dtype in (("llama-bf16", torch.bfloat16), ("qwen2-tied-f16", torch.float16)):
            weights = load_file(self.directory / name / "model.safetensors")
            self.assertEqual({w.dtype for w in weights.values()}, {dtype})

    def test_missing_and_superfluous_tensors_are_refused(self):
        for change in (lambda w: w.pop("lm_head.weight"), lambda w: w.update({"model.extra": torch.zeros(3)})):
            with tempfile.TemporaryDirectory() as broken:
                broken = Path(broken)
                cases.write_model(broken, BY_NAME["llama"])
                weights = load_file(broken / "model.safetensors")
                change(weights)
                save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
                with self.assertRaises(ValueError):
                    reference.load(broken)

    def test_samples_differ_in_length_and_labels(self):
        for case in cases.CASES:
            for file in ("batch.jsonl", "train.jsonl"):
                samples = reference.read_samples(self.directory / case.name / file)
                self.assertGreater(len({len(sample.tokens) for sample in samples}), 2)
                self.assertGreater(len({sample.labelled for sample in samples}), 2)
                self.assertTrue(all(sample.labelled > 0 for sample in samples))
                self.assertTrue(any(sample.labels[0] != IGNORED for sample in samples))

    def test_rows_predict_every_later_token_once(self):
        lengths = [5, 1, 2, 17, 8, 9, 24, 3]
        tokens = iter(range(1000))
        documents = [Sample(own, own) for own in ([next(tokens) for _ in range(n)] for n in lengths)]
        predictable = [token for document in documents for token in document.tokens[1:]]
        for pack in (False, True):
            for sequence in (1, 2, 7, 8, 9, 30):
                rows = reference.rows_of(documents, sequence, pack)
                parts = [part for row in rows for part in row]
                self.assertEqual([token for part in parts for token in part.tokens[1:]], predictable)
                positions = [sum(len(part.tokens) - 1 for part in row) for row in rows]
                self.assertLessEqual(max(positions), sequence)
                if pack:  # 68 tokens of documents of two or more, each in a position but the very last
                    self.assertIn(len(rows), (-(-67 // sequence), -(-68 // sequence)))
                else:
                    self.assertTrue(all(len(row) == 1 for row in rows))

    def test_unlabelled_samples_do_not_change_evaluation(self):
        model, samples = self.model("llama"), self.samples("llama")
        silent = [Sample([5], [5]), Sample([5, 6, 7], [IGNORED] * 3), Sample([5, 6, 7], [5, IGNORED, IGNORED])]
        self.assertEqual([sample.labelled for sample in silent], [0, 0, 0])
        self.assertEqual(reference.evaluate(model, silent + samples), reference.evaluate(model, samples))


if __name__ == "__main__":
    unittest.main()
