//! Comparison with transformers, PyTorch and PEFT, by the fixtures that `parity/run make` wrote. `parity/README.md`
//! describes their content and justifies the tolerances.

use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, HostSpec, Link, Rates, Recipe, RecomputeLevel};
use plimsoll_device::cpu::executor::{open, real_values};
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanRequest, plan_recipe};
use plimsoll_program::models::Parameter;
use plimsoll_program::models::decoder::{AdamState, Generation, Method, Optimizer, Scores};
use plimsoll_program::{ProgramKind, ProgramSet, Share};
use plimsoll_train::data::{DataSpec, Dataset, Format, LongSamples, Objective, Rows};
use plimsoll_train::engine::tensor_files::{ModelSource, TensorWriter};
use plimsoll_train::engine::{Engine, StepInput};
use plimsoll_train::files::{AdapterDir, BaseModel, ModelDir, StoredTensor, WeightFiles, write_adapter_dir};
use plimsoll_train::inference::export::{DirectoryRequest, ExportSource, export_directory};
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const CASES: [&str; 23] = [
    "gemma2",
    "gemma3",
    "granite",
    "llama",
    "llama-bf16",
    "llama-gqa-tied",
    "llama-one-kv-head",
    "llama-rope-linear",
    "llama-rope-llama3",
    "llama-rope-llama3-new-keys",
    "llama-rope-yarn",
    "ministral3",
    "mistral",
    "mistral-window",
    "olmo2",
    "olmo3-new-keys",
    "phi3",
    "qwen2",
    "qwen2-tied-f16",
    "qwen2-window-new-keys",
    "qwen3",
    "qwen3-shards-new-keys",
    "smollm3",
];

/// A fixture: a model directory, data, and the reference values of transformers and PyTorch.
struct Case {
    name: &'static str,
    path: PathBuf,
    dir: ModelDir,
    reference: Value,
    tensors: WeightFiles,
    sequence: u64,
}

impl Case {
    fn open(name: &'static str) -> Case {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/fixtures").join(name);
        let reference = std::fs::read(path.join("reference.json")).expect("the fixture has a reference.json");
        let reference: Value = serde_json::from_slice(&reference).expect("reference.json is JSON");
        Case {
            name,
            dir: ModelDir::open(&path, &[]).unwrap_or_else(|e| panic!("{name}: {e}")),
            tensors: WeightFiles::open_files(vec![path.join("reference.safetensors")])
                .expect("the fixture has a reference.safetensors"),
            sequence: reference["sequence"].as_u64().expect("`sequence` is a number"),
            reference,
            path,
        }
    }

    /// Returns the reference value at a JSON pointer.
    fn number(&self, pointer: &str) -> f64 {
        self.reference.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{} has {pointer}", self.name))
    }

    /// Returns a reference tensor.
    fn tensor(&self, name: &str) -> Vec<f64> {
        let entry = self.tensors.entry(name).unwrap_or_else(|| panic!("{}: {name} is missing", self.name));
        let mut bytes = vec![0; entry.bytes as usize];
        self.tensors.read_at(entry, 0, &mut bytes).expect("readable");
        real_values(DType::F32, &bytes)
    }

    /// Opens a data file of the fixture and returns it with an empty row buffer.
    fn rows(&self, file: &str, cache: &Path) -> (Dataset, Rows) {
        let spec = DataSpec {
            patterns: vec![self.path.join(file).display().to_string()],
            format: Format::Tokens,
            split: None,
            sequence: self.sequence,
            pack: false,
            long: LongSamples::Refuse,
            vocab: self.dir.config.vocab,
            end_token: None,
            chat: plimsoll_train::data::ChatSpec::default(),
            objective: Objective::Supervised,
        };
        let data = Dataset::open(&spec, None, cache, 1, &mut |_, _| ControlFlow::Continue(())).expect("the data opens");
        let rows = Rows::new(data.rows(), self.sequence);
        (data, rows)
    }

    fn engine(&self, precision: DType, micro_batch: u32, level: RecomputeLevel) -> (Engine, ProgramSet) {
        self.engine_with(precision, micro_batch, level, None)
    }

    fn engine_with(
        &self,
        precision: DType,
        micro_batch: u32,
        level: RecomputeLevel,
        adapter: Option<&AdapterDir>,
    ) -> (Engine, ProgramSet) {
        let rates = Rates {
            f32_flops: 1e11,
            bf16_flops: 1e11,
            memory_bytes_per_second: 1e10,
            op_seconds: 1e-6,
            host_link: Link { bytes_per_second: 1e10, latency_seconds: 0.0 },
            measured: false,
            ops: plimsoll_core::OpRates::default(),
        };
        let device = DeviceSpec {
            name: "cpu".into(),
            kind: DeviceKind::Cpu,
            budget: Bytes::gib(1),
            charges: Bytes::ZERO,
            charges_measured: false,
            link_measured: false,
            nccl: None,
            team_link: Link::MEMORY,
            threads: 2,
            rates,
        };
        let weights = self.dir.require_weights().expect("fixtures have weights");
        let training = &self.reference["training"];
        let number = |key: &str| training[key].as_f64().unwrap_or_else(|| panic!("training has {key}: {training}"));
        let request = PlanRequest {
            config: &self.dir.config,
            precision,
            sequence: self.sequence,
            sequences: 4,
            source: weights.source(),
            optimizer: Some(Optimizer::AdamW {
                betas: [0.9, 0.95],
                eps: number("eps"),
                decay: number("weight_decay"),
                state: AdamState::Full,
            }),
            evaluate: true,
            scores: Scores::None,
            temperature: 1.0,
            generation: Some(Generation { slots: 1, capacity: 64, chunk: 16 }),
            device: &device,
            host: HostSpec::NONE,
            lossy: LossyOptions {
                method: adapter.map_or(Method::Full, |adapter| Method::Lora(adapter.lora(0.0, 1))),
                ..LossyOptions::default()
            },
            pins: PinnedChoices::default(),
            rungs: vec![],
            share: Share::SINGLE_DEVICE,
        };
        let recipe = Recipe::on_device(micro_batch, vec![level; self.dir.config.layers as usize]);
        let outcome = plan_recipe(&request, &recipe);
        plimsoll_program::passes::check::check(&outcome.set).expect("well-formed");
        let set = outcome.set.clone();
        let device = open(outcome.set, outcome.layout.placement, precision, 2, None).expect("the arena fits");
        let mut engine = Engine::new(device, &set, precision, recipe, self.sequence, self.dir.config.vocab);
        let sources = [weights].into_iter().chain(adapter.map(|adapter| &adapter.weights));
        engine.move_files(ProgramKind::Load, &mut ModelSource::new(sources)).expect("the weights load");
        engine.run(ProgramKind::InitOptimizer).expect("the optimizer starts from zero");
        (engine, set)
    }

    /// Reads a parameter by its Hugging Face name, or a tensor that belongs to it: `suffix` is "" or ".gradient".
    fn parameter(
        &self,
        engine: &mut Engine,
        set: &ProgramSet,
        hf_name: &str,
        suffix: &str,
        precision: DType,
    ) -> Vec<f64> {
        let parameters = self.dir.config.hf_parameters();
        let p = parameters.iter().find(|p| p.hf_name == hf_name).expect("the model has this parameter");
        Case::values(engine, set, p, suffix, precision)
    }

    /// Reads a parameter, or the tensor with `suffix` that belongs to it, from the device.
    fn values(engine: &mut Engine, set: &ProgramSet, p: &Parameter, suffix: &str, precision: DType) -> Vec<f64> {
        let id = set.find(&format!("{}{suffix}", p.tensor)).expect("the Program has this tensor");
        let mut bytes = vec![0; set.tensor(id).bytes() as usize];
        engine.device().read(id, p.layer.unwrap_or(0) as u32, &mut bytes);
        let all = real_values(precision, &bytes);
        all[p.offset as usize..(p.offset + p.elements()) as usize].to_vec()
    }
}

/// Returns the relative distance ‖a − b‖ / ‖b‖.
fn relative_distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().map(|b| square(*b)).sum::<f64>()).sqrt()
}

/// Returns the relative error |a − b| / |b|.
fn relative_error(a: f64, b: f64) -> f64 {
    ((a - b) / b).abs()
}

fn input(step: u64, loss_divisor: u64) -> StepInput {
    StepInput { step, learning_rate: 1e-2, betas: [0.9, 0.95], clip_norm: 0.5, loss_divisor }
}

#[test]
fn loss_and_gradients_match_transformers() {
    let cache = tempfile::tempdir().expect("a folder");
    for name in CASES {
        let case = Case::open(name);
        for (micro_batch, level) in
            [(4, RecomputeLevel::Nothing), (1, RecomputeLevel::Block), (3, RecomputeLevel::Norms)]
        {
            let (data, mut rows) = case.rows("batch.jsonl", cache.path());
            data.read(0..data.rows(), &mut rows).expect("rows");
            let labelled = rows.labelled_tokens();
            assert_eq!(labelled as f64, case.number("/batch/tokens"), "{name}");
            let (mut engine, set) = case.engine(DType::F32, micro_batch, level);
            let result = engine.gradients(&mut rows, &input(1, labelled), 1).expect("runs");
            assert!(relative_error(result.loss, case.number("/batch/loss")) < 1e-5, "{name}: loss {}", result.loss);
            for p in case.dir.config.hf_parameters() {
                let gradient = case.parameter(&mut engine, &set, &p.hf_name, ".gradient", DType::F32);
                let distance = relative_distance(&gradient, &case.tensor(&format!("grad.{}", p.hf_name)));
                assert!(
                    distance < 1e-4,
                    "{name}, micro-batch {micro_batch}, {level}: {} is {distance:e} away",
                    p.hf_name
                );
            }
        }
    }
}

/// A bf16 value has 8 significant bits, so every op adds a relative error of about 2^-9.
#[test]
fn bf16_training_is_close_to_f32_reference() {
    let cache = tempfile::tempdir().expect("a folder");
    for name in CASES {
        let case = Case::open(name);
        let (data, mut rows) = case.rows("batch.jsonl", cache.path());
        data.read(0..data.rows(), &mut rows).expect("rows");
        let labelled = rows.labelled_tokens();
        let (mut engine, set) = case.engine(DType::Bf16, 2, RecomputeLevel::Nothing);
        let result = engine.gradients(&mut rows, &input(1, labelled), 1).expect("runs");
        assert!(relative_error(result.loss, case.number("/batch/loss")) < 5e-3, "{name}: loss {}", result.loss);
        for p in case.dir.config.hf_parameters() {
            let gradient = case.parameter(&mut engine, &set, &p.hf_name, ".gradient", DType::F32);
            let distance = relative_distance(&gradient, &case.tensor(&format!("grad.{}", p.hf_name)));
            assert!(distance < 4e-2, "{name}: {} is {distance:e} away", p.hf_name);
        }
        let (data, mut rows) = case.rows("train.jsonl", cache.path());
        let (mut engine, _) = case.engine(DType::Bf16, 2, RecomputeLevel::Nothing);
        for step in 0..5 {
            data.read(4 * step..4 * step + 4, &mut rows).expect("rows");
            let labelled = rows.labelled_tokens();
            let result = engine.gradients(&mut rows, &input(step + 1, labelled), 1).expect("runs");
            let loss = case.number(&format!("/steps/{step}/loss"));
            assert!(relative_error(result.loss, loss) < 1e-2, "{name}, step {step}: loss {} not {loss}", result.loss);
            engine.update().expect("runs");
        }
    }
}

#[test]
fn weights_after_five_steps_match_pytorch() {
    let cache = tempfile::tempdir().expect("a folder");
    for name in CASES {
        let case = Case::open(name);
        let (data, mut rows) = case.rows("train.jsonl", cache.path());
        let (mut engine, set) = case.engine(DType::F32, 2, RecomputeLevel::Nothing);
        for step in 0..5 {
            data.read(4 * step..4 * step + 4, &mut rows).expect("rows");
            let labelled = rows.labelled_tokens();
            let result = engine.gradients(&mut rows, &input(step + 1, labelled), 1).expect("runs");
            let (loss, norm) =
                (case.number(&format!("/steps/{step}/loss")), case.number(&format!("/steps/{step}/norm")));
            assert!(relative_error(result.loss, loss) < 1e-5, "{name}, step {step}: loss {} not {loss}", result.loss);
            assert!(relative_error(result.norm, norm) < 1e-4, "{name}, step {step}: norm {} not {norm}", result.norm);
            engine.update().expect("runs");
        }
        for p in case.dir.config.hf_parameters() {
            let weight = case.parameter(&mut engine, &set, &p.hf_name, "", DType::F32);
            let distance = relative_distance(&weight, &case.tensor(&format!("after.{}", p.hf_name)));
            assert!(distance < 1e-4, "{name}: {} is {distance:e} away", p.hf_name);
        }
        data.read(0..4, &mut rows).expect("rows");
        let (batch, mut rows) = case.rows("batch.jsonl", cache.path());
        batch.read(0..batch.rows(), &mut rows).expect("rows");
        let after = engine.evaluate(&mut rows).expect("runs");
        assert!(relative_error(after.loss(), case.number("/batch_after/loss")) < 1e-5, "{name}");
    }
}

#[test]
fn logits_with_kv_cache_match_transformers() {
    let cache = tempfile::tempdir().expect("a folder");
    for name in CASES {
        let case = Case::open(name);
        let (data, mut rows) = case.rows("batch.jsonl", cache.path());
        let (mut engine, _) = case.engine(DType::F32, 4, RecomputeLevel::Nothing);
        for sample in 0..data.rows() {
            data.read([sample], &mut rows).expect("rows");
            let expected = case.tensor(&format!("logits.{sample}"));
            let vocab = case.dir.config.vocab as usize;
            let length = expected.len() / vocab;
            let largest = expected.iter().fold(0f64, |m, x| m.max(x.abs()));
            // A row holds all tokens except the last, which is only a target.
            let known = length.min(rows.tokens.len());
            // Prefills the first half in one call, then decodes token by token.
            let half = (known / 2).max(1);
            for at in half..=known {
                let (tokens, before) =
                    if at == half { (&rows.tokens[..half], 0) } else { (&rows.tokens[at - 1..at], at - 1) };
                let logits = engine.extend(tokens, before).expect("runs");
                let expected = &expected[(at - 1) * vocab..at * vocab];
                let worst = logits.iter().zip(expected).fold(0f64, |m, (a, b)| m.max((a - b).abs())) / largest;
                assert!(worst < 1e-5, "{name}, sample {sample}, position {}: {worst:e}", at - 1);
            }
        }
    }
}

#[test]
fn f64_gradients_do_not_depend_on_micro_batch() {
    let cache = tempfile::tempdir().expect("a folder");
    for name in ["llama-gqa-tied", "qwen2", "qwen3"] {
        let case = Case::open(name);
        let mut first: Option<Vec<Vec<f64>>> = None;
        for (micro_batch, level) in
            [(4, RecomputeLevel::Nothing), (1, RecomputeLevel::Nothing), (3, RecomputeLevel::Attention)]
        {
            let (data, mut rows) = case.rows("batch.jsonl", cache.path());
            data.read(0..data.rows(), &mut rows).expect("rows");
            let labelled = rows.labelled_tokens();
            let (mut engine, set) = case.engine(DType::F64, micro_batch, level);
            engine.gradients(&mut rows, &input(1, labelled), 1).expect("runs");
            let parameters = case.dir.config.hf_parameters();
            let all: Vec<Vec<f64>> = parameters
                .iter()
                .map(|p| case.parameter(&mut engine, &set, &p.hf_name, ".gradient", DType::F64))
                .collect();
            match &first {
                None => first = Some(all),
                Some(first) => {
                    for ((a, b), p) in all.iter().zip(first).zip(&parameters) {
                        assert!(relative_distance(a, b) < 1e-9, "{name}: {}", p.hf_name);
                    }
                }
            }
        }
    }
}

#[test]
fn recompute_is_bit_exact() {
    let cache = tempfile::tempdir().expect("a folder");
    let cases = ["llama", "qwen2", "qwen3"].map(|name| (name, DType::F32));
    for (name, precision) in cases.into_iter().chain([("qwen2", DType::Bf16)]) {
        let case = Case::open(name);
        let mut first: Option<Vec<Vec<f64>>> = None;
        for level in RecomputeLevel::ALL {
            let (data, mut rows) = case.rows("train.jsonl", cache.path());
            let (mut engine, set) = case.engine(precision, 2, level);
            for step in 0..3 {
                data.read(4 * step..4 * step + 4, &mut rows).expect("rows");
                let labelled = rows.labelled_tokens();
                engine.gradients(&mut rows, &input(step + 1, labelled), 1).expect("runs");
                engine.update().expect("runs");
            }
            let parameters = case.dir.config.hf_parameters();
            let all: Vec<Vec<f64>> =
                parameters.iter().map(|p| case.parameter(&mut engine, &set, &p.hf_name, "", precision)).collect();
            match &first {
                None => first = Some(all),
                Some(first) => assert!(&all == first, "{name} in {precision}: {level} changes bits"),
            }
        }
    }
}

/// Adapters that PEFT wrote for the model of a fixture, with PEFT's reference values.
struct Adapters {
    case: Case,
    path: PathBuf,
    dir: AdapterDir,
}

impl Adapters {
    fn all() -> impl Iterator<Item = Adapters> {
        ["all", "q-v", "k-o-up-down", "pattern", "excluded", "layer", "ranks"].into_iter().map(|name| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/fixtures/adapters").join(name);
            let reference = std::fs::read(path.join("reference.json")).expect("the fixture has a reference.json");
            let reference: Value = serde_json::from_slice(&reference).expect("reference.json is JSON");
            let mut case = Case::open("llama-gqa-tied");
            assert_eq!(reference["base"], case.name);
            let training = case.reference["training"].take();
            let tokens = case.reference["batch"]["tokens"].take();
            (case.name, case.reference) = (name, reference);
            (case.reference["training"], case.reference["batch"]["tokens"]) = (training, tokens);
            case.tensors = WeightFiles::open_files(vec![path.join("reference.safetensors")]).expect("readable");
            let dir = AdapterDir::open(&path, &case.dir.config).unwrap_or_else(|e| panic!("{name}: {e}"));
            Adapters { case, path, dir }
        })
    }

    /// Compares the tensors with `suffix` of all adapters with the reference tensors of `kind`.
    fn check(&self, engine: &mut Engine, set: &ProgramSet, suffix: &str, kind: &str) {
        for (p, _) in &self.dir.weights.parameters {
            let found = Case::values(engine, set, p, suffix, DType::F32);
            let distance = relative_distance(&found, &self.case.tensor(&format!("{kind}.{}", p.hf_name)));
            assert!(distance < 1e-4, "{}: {kind} of {} is {distance:e} away", self.case.name, p.hf_name);
        }
    }
}

#[test]
fn adapter_loss_and_gradients_match_peft() {
    let cache = tempfile::tempdir().expect("a folder");
    for adapters in Adapters::all() {
        let case = &adapters.case;
        for (micro_batch, level) in [(4, RecomputeLevel::Nothing), (1, RecomputeLevel::Block)] {
            let (data, mut rows) = case.rows("batch.jsonl", cache.path());
            data.read(0..data.rows(), &mut rows).expect("rows");
            let labelled = rows.labelled_tokens();
            let (mut engine, set) = case.engine_with(DType::F32, micro_batch, level, Some(&adapters.dir));
            let result = engine.gradients(&mut rows, &input(1, labelled), 1).expect("runs");
            assert!(
                relative_error(result.loss, case.number("/batch/loss")) < 1e-5,
                "{}: loss {}",
                case.name,
                result.loss
            );
            adapters.check(&mut engine, &set, ".gradient", "grad");
        }
    }
}

#[test]
fn trained_and_saved_adapters_match_peft() {
    let cache = tempfile::tempdir().expect("a folder");
    for adapters in Adapters::all() {
        let case = &adapters.case;
        let (data, mut rows) = case.rows("train.jsonl", cache.path());
        let (mut engine, set) = case.engine_with(DType::F32, 2, RecomputeLevel::Nothing, Some(&adapters.dir));
        for step in 0..5 {
            data.read(4 * step..4 * step + 4, &mut rows).expect("rows");
            let labelled = rows.labelled_tokens();
            let result = engine.gradients(&mut rows, &input(step + 1, labelled), 1).expect("runs");
            let (loss, norm) =
                (case.number(&format!("/steps/{step}/loss")), case.number(&format!("/steps/{step}/norm")));
            assert!(
                relative_error(result.loss, loss) < 1e-5,
                "{}, step {step}: loss {} not {loss}",
                case.name,
                result.loss
            );
            assert!(
                relative_error(result.norm, norm) < 1e-4,
                "{}, step {step}: norm {} not {norm}",
                case.name,
                result.norm
            );
            engine.update().expect("runs");
        }
        adapters.check(&mut engine, &set, "", "after");
        // Saved adapters read back with the same values.
        let tensors: Vec<StoredTensor> = engine.file_tensors(ProgramKind::Save).to_vec();
        let out = cache.path().join(format!("{}-written", case.name));
        let base = BaseModel { name: &case.path, revision: None };
        write_adapter_dir(&out, &adapters.dir.config, Some(base), None, None, &tensors, |writer| {
            engine.move_files(ProgramKind::Save, &mut TensorWriter(writer)).expect("runs");
            Ok::<(), plimsoll_train::files::FilesError>(())
        })
        .expect("written");
        let reopened = AdapterDir::open(&out, &case.dir.config).expect("readable");
        assert_eq!(reopened.config, adapters.dir.config);
        assert_eq!(reopened.weights.parameters.len(), adapters.dir.weights.parameters.len());
        for (p, entry) in &reopened.weights.parameters {
            let mut bytes = vec![0; entry.bytes as usize];
            reopened.weights.files.read_at(entry, 0, &mut bytes).expect("readable");
            assert_eq!(real_values(DType::F32, &bytes), Case::values(&mut engine, &set, p, "", DType::F32));
        }
    }
}

#[test]
fn merged_model_has_loss_of_base_with_adapters() {
    let cache = tempfile::tempdir().expect("a folder");
    for adapters in Adapters::all() {
        let out = cache.path().join(adapters.case.name);
        let request = DirectoryRequest {
            source: ExportSource::find(&adapters.case.path, Some(&adapters.path)).expect("a model"),
            out: out.clone(),
            dtype: None,
            max_shard: None,
        };
        export_directory(&request, &mut |_| {}).expect("merged");
        let refused = export_directory(&request, &mut |_| {}).expect_err("an existing folder is not overwritten");
        assert!(refused.message.ends_with("already exists"), "{refused}");
        let expected = adapters.case.number("/merged/loss");
        let merged = Case { dir: ModelDir::open(&out, &[]).expect("a model"), ..adapters.case };
        let (data, mut rows) = merged.rows("batch.jsonl", cache.path());
        data.read(0..data.rows(), &mut rows).expect("rows");
        let (mut engine, _) = merged.engine(DType::F32, 4, RecomputeLevel::Nothing);
        let loss = engine.evaluate(&mut rows).expect("runs").loss();
        assert!(relative_error(loss, expected) < 1e-5, "{}: {loss} not {expected}", merged.name);
    }
}
