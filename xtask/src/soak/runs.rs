//! Small random runs of the program, and the results that they write. Each start is a process of its own under a
//! watchdog, so that memory and faults do not affect other runs.

use super::case::Rng;
use super::tally::Tally;
use super::whole_process::{ModelSizes, VOCAB_MIN, config, data};
use crate::program::{self, ProgramOutput};
use anyhow::{Context, bail, ensure};
use plimsoll_core::{Class, DType, Event, Exit, Plan, Record};
use plimsoll_device::private_file;
use plimsoll_program::models::ModelType;
use plimsoll_train::fault_injection::Injection;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The reward of half of the tokens.
const REWARD: &str = "
def evens(completions):
    return [sum(word[-1] in '02468' for word in text.split()) / max(1, len(text.split())) for text in completions]
";

/// Number of steps of each random run.
pub const STEPS: u64 = 6;
/// Number of documents for evaluation. Few, because training steps matter more here.
const EVAL_DOCUMENTS: usize = 6;
/// Largest permitted relative difference, in f32, of losses and gradient norms between two runs that differ in the
/// order of sums.
pub const F32_DISTANCE: f64 = 1e-3;
/// Largest permitted relative difference, in bf16, of losses and gradient norms between two runs that differ in the
/// order of sums.
pub const BF16_DISTANCE: f64 = 5e-2;

/// Seconds after which a process counts as hanging. On an idle machine, a process takes a few seconds.
const START_SECONDS_MAX: u64 = 180;
/// Largest number of processes that one case starts.
const STARTS_MAX: u64 = 12;
/// Seconds after which a case counts as hanging.
pub const CASE_SECONDS_MAX: u64 = STARTS_MAX * START_SECONDS_MAX;

/// A random run of the program, with its folder and settings. Its training may be started several times.
pub struct RandomRun {
    binary: PathBuf,
    /// Folder with all run folders of the case.
    pub folder: PathBuf,
    /// Settings of the run, as `KEY=VALUE`.
    pub settings: Vec<String>,
    /// Value of `run.devices`.
    pub devices: String,
    /// Probability with which a run of a Program fails with an injected out-of-memory error.
    pub share: f64,
    /// Arithmetic of the run.
    pub precision: DType,
    /// Name of the run in failure messages.
    pub label: String,
}

/// Returns the sizes of a random model of some hundred kilobytes.
pub fn small_model(rng: &mut Rng) -> ModelSizes {
    let kv_heads = rng.pick(&[1, 2]);
    let heads = kv_heads * rng.pick(&[1, 2]);
    let hidden = heads * rng.pick(&[8, 16]);
    let (layers, ffn, vocab) = (rng.range(1, 4), rng.range(8, 96), rng.pick(&[500, 600, 900]));
    ModelSizes { hidden, layers, heads, kv_heads, ffn, vocab }
}

impl RandomRun {
    /// Creates run `number` of the soak with this seed. The functions `sizes` and `devices` choose its model and its
    /// devices.
    ///
    /// # Errors
    /// Fails if the folder of the run cannot be written.
    pub fn on(
        binary: &Path,
        (seed, number): (u64, u64),
        sizes: &dyn Fn(&mut Rng) -> ModelSizes,
        devices: &dyn Fn(&mut Rng) -> String,
    ) -> anyhow::Result<RandomRun> {
        let mut rng = Rng::new(seed ^ 9, number);
        let folder = private_file::temporary_folder().context("cannot make a folder")?.keep();
        program::write_device_rates(&folder.join("cache"))?;
        let sizes = sizes(&mut rng);
        let config = config(rng.pick(&ModelType::ALL), sizes);
        fs::write(folder.join("config.json"), config.to_json(None, DType::F32).to_string())?;
        let data = data(&folder, config.vocab)?;
        let some: Vec<String> = fs::read_to_string(&data)?.lines().take(EVAL_DOCUMENTS).map(str::to_owned).collect();
        fs::write(folder.join("eval.jsonl"), some.join("\n"))?;
        fs::write(folder.join("run.toml"), "")?;
        let precision = rng.pick(&[DType::F32, DType::F32, DType::Bf16]);
        let rungs = rng.pick(&[&[][..], &[], &["adam8bit"], &["lora"], &["lora", "int8"], &["lora", "nf4"]]);
        let devices = devices(&mut rng);
        let share = rng.pick(&[0.003, 0.01, 0.03, 0.1, 0.3]);
        let mut settings = vec![
            format!("model.path={}", folder.display()),
            "model.init=random".to_owned(),
            format!("data.train={data}"),
            "data.eval=eval.jsonl".into(),
            "data.format=tokens".into(),
            "data.sequence=32".into(),
            // Without packing, rows have different numbers of labels, so that other samples would be noticed.
            "data.pack=false".into(),
            "train.batch_tokens=256".into(),
            format!("train.steps={STEPS}"),
            "train.warmup_steps=0".into(),
            format!("train.precision={precision}"),
            format!("train.seed={}", number + 1),
            format!("train.save_every={}", rng.range(1, 4)),
            format!("train.eval_every={}", rng.range(2, 6)),
            format!("run.devices={devices}"),
            "run.threads=1".into(),
        ];
        if !rungs.is_empty() {
            settings.push(format!("train.rungs={}", rungs.join(",")));
        }
        if rng.chance(0.5) {
            settings.push(format!("recipe.micro_batch={}", rng.pick(&[1, 2, 4])));
        }
        let label = format!(
            "--seed {seed} --case {number}: {} layers, {precision}, rungs {rungs:?}, {devices}, random:{share}",
            config.layers
        );
        Ok(RandomRun { binary: binary.to_owned(), folder, settings, devices, share, precision, label })
    }

    /// Returns the run with these settings (`KEY=VALUE`) after its own, which they override.
    pub fn with(&self, settings: &[&str]) -> RandomRun {
        let (mut all, binary) = (self.settings.clone(), self.binary.clone());
        all.extend(settings.iter().map(|setting| (*setting).to_owned()));
        let (folder, devices, label) = (self.folder.clone(), self.devices.clone(), self.label.clone());
        RandomRun { binary, folder, settings: all, devices, label, ..*self }
    }

    /// Returns the run with prompts instead of its data, whose completions it samples and rewards.
    ///
    /// # Errors
    /// Fails if files of the run cannot be written.
    pub fn with_sampled_completions(&self, rng: &mut Rng) -> anyhow::Result<RandomRun> {
        let word = |id: u64| format!("t{id}");
        let vocab: BTreeMap<String, u64> = (0..VOCAB_MIN).map(|id| (word(id), id)).collect();
        let split = json!({"type": "WhitespaceSplit"});
        let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": word(1)});
        let tokenizer = json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model});
        fs::write(self.folder.join("tokenizer.json"), tokenizer.to_string())?;
        for (file, count) in [("prompts.jsonl", 20), ("held-out.jsonl", 3)] {
            let mut prompt =
                || (0..rng.range(1, 8)).map(|_| word(rng.range(2, VOCAB_MIN - 1))).collect::<Vec<_>>().join(" ");
            let lines: Vec<String> =
                (0..count).map(|_| json!({"prompt": prompt(), "answer": "t7"}).to_string()).collect();
            fs::write(self.folder.join(file), lines.join("\n"))?;
        }
        let mut run = self.with(&[]);
        run.settings.retain(|setting| !["data.", "train.batch_tokens="].iter().any(|start| setting.starts_with(start)));
        let rewards = rng.pick(&["[\"regex:[02468]$\"]", "[\"length_penalty:3\", \"python:reward.py:evens\"]"]);
        fs::write(self.folder.join("reward.py"), REWARD)?;
        run.settings.extend([
            "train.objective=grpo".to_owned(),
            "data.train=prompts.jsonl".to_owned(),
            "data.eval=held-out.jsonl".to_owned(),
            format!("grpo.rewards={rewards}"),
            "grpo.num_generations=4".to_owned(),
            "grpo.prompts_per_step=2".to_owned(),
            "grpo.max_prompt_length=8".to_owned(),
            format!("grpo.max_completion_length={}", rng.range(3, 16)),
            format!("grpo.num_iterations={}", rng.pick(&[1, 1, 2])),
            format!("grpo.beta={}", rng.pick(&[0.0, 0.0, 0.1])),
        ]);
        run.label += ", sampled";
        Ok(run)
    }

    /// Runs a command of the program, such as `plan --json`, to its end. `with_settings` adds the run file and all
    /// settings.
    fn start(&self, command: &[&str], with_settings: bool) -> anyhow::Result<ProgramOutput> {
        program::start(&mut self.command(command, with_settings), &self.folder, START_SECONDS_MAX)
    }

    /// Returns a command of the program, such as `plan --json`, in the folder of the run. `with_settings` adds the run
    /// file and all settings.
    pub fn command(&self, command: &[&str], with_settings: bool) -> Command {
        let mut program = Command::new(&self.binary);
        program.current_dir(&self.folder).env("PLIMSOLL_CACHE", self.folder.join("cache")).args(command);
        if with_settings {
            program.arg("run.toml");
            program.args(self.settings.iter().flat_map(|setting| ["--set", setting]));
        }
        program
    }

    /// Plans the run. Returns the plan, which need not fit, and the text on stderr.
    ///
    /// # Errors
    /// Fails if the command fails without a plan.
    pub fn plan(&self) -> anyhow::Result<(Plan, String)> {
        let ended = self.start(&["plan", "--json"], true)?;
        let answered = [Exit::Done, Exit::DoesNotFit].map(|exit| Some(exit as i32)).contains(&ended.code);
        ensure!(answered, "plan ended with {:?}: {}", ended.code, ended.stderr);
        let plan: Plan = serde_json::from_str(&ended.stdout).context("the plan")?;
        ensure!(plan.fits == (ended.code == Some(0)), "a plan that fits: {}, exit {:?}", plan.fits, ended.code);
        Ok((plan, ended.stderr))
    }

    /// Trains with these faults in the run folder `run`, or resumes what was begun there. Returns `None` if the run is
    /// done, and the text on stderr if it stopped and can be resumed.
    ///
    /// # Errors
    /// Fails if the run ends in any other way.
    pub fn train(&self, run: &str, injections: &[Injection]) -> anyhow::Result<Option<String>> {
        // A run without a run file has never started.
        let begun = self.folder.join(run).join("run.toml").exists();
        let dir = format!("run.dir={run}");
        let mut words = vec!["train", "--quiet"];
        let injections: Vec<String> = injections.iter().map(ToString::to_string).collect();
        words.extend(injections.iter().flat_map(|injection| injection.split(' ')));
        words.extend(if begun { ["--resume", run] } else { ["--set", &dir] });
        let ended = self.start(&words, !begun)?;
        match ended.code {
            Some(0) => Ok(None),
            Some(code) if code == Exit::Stopped as i32 => Ok(Some(ended.stderr)),
            code => bail!("train ended with {code:?}: {}", ended.stderr),
        }
    }

    /// Checks that losses and gradient norms of two runs differ no more than by the order of sums. `what` is part of
    /// the check's name.
    pub fn compare_losses(&self, what: &str, one: &RunRecord, other: &RunRecord, tally: &mut Tally) {
        let most = if self.precision == DType::F32 { F32_DISTANCE } else { BF16_DISTANCE };
        let pairs = one.steps.values().zip(other.steps.values());
        let apart = pairs
            .flat_map(|(a, b)| [(a.loss, b.loss), (a.norm, b.norm)])
            .map(|(a, b)| (a - b).abs() / a.abs().max(b.abs()));
        let apart = apart.fold(0.0, f64::max);
        let kind = format!("distance of losses and norms {what}, {}", self.precision);
        tally.figure(&kind, apart, apart <= most, || format!("{}: {:?}, {:?}", self.label, one.steps, other.steps));
    }

    /// Checks that two runs had the same samples in every step, by the number of their labelled tokens.
    pub fn check_same_samples(&self, one: &RunRecord, other: &RunRecord, tally: &mut Tally) {
        let samples = |record: &RunRecord| {
            record.steps.iter().map(|(step, values)| (*step, values.labelled_tokens)).collect::<Vec<_>>()
        };
        tally.check("the samples of every step are the same", samples(one) == samples(other), || {
            format!("{}: {:?} was {:?}", self.label, samples(other), samples(one))
        });
    }
}

/// Values of one training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepValues {
    labelled_tokens: u64,
    loss: f64,
    norm: f64,
}

/// Step values and events of a run, and hashes of the tensor files of its final checkpoint.
pub struct RunRecord {
    /// Values of each step, by its number. For a repeated step, those of its last execution.
    pub steps: BTreeMap<u64, StepValues>,
    /// All events in order.
    pub events: Vec<Event>,
    /// Name and hash of each tensor file in the final checkpoint.
    pub tensors: Vec<(String, u64)>,
    /// The completions of each round, in order; none for runs that sample none.
    pub rounds: Vec<Vec<SampledText>>,
}

/// A completion of a round.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledText {
    /// Its prompt.
    pub prompt: Value,
    /// Its tokens.
    pub tokens: Value,
    /// Its rewards.
    pub rewards: Value,
}

impl RunRecord {
    /// Reads the events and the final checkpoint in the folder of a finished run.
    ///
    /// # Errors
    /// Fails if a file is missing or invalid.
    pub fn read(run: &Path) -> anyhow::Result<RunRecord> {
        let (mut steps, mut events) = (BTreeMap::new(), Vec::new());
        for line in fs::read_to_string(run.join("events.jsonl"))?.lines() {
            let event = Record::from_line(line.as_bytes())?.event;
            if let Event::Step { step, loss, norm, labelled_tokens, .. } = event {
                steps.insert(step, StepValues { labelled_tokens, loss, norm });
            }
            events.push(event);
        }
        let mut tensors = Vec::new();
        for entry in fs::read_dir(run.join(format!("checkpoints/step-{STEPS}")))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                tensors.push((name, hash(&path)?));
            }
        }
        tensors.sort();
        ensure!(!tensors.is_empty(), "no tensors in the last checkpoint");
        let rounds =
            (1..=STEPS).map(|round| run.join(format!("rounds/round-{round}.jsonl"))).filter(|file| file.exists());
        let rounds = rounds.map(|file| read_round(&file)).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(RunRecord { steps, events, tensors, rounds })
    }

    /// Returns the class (identical, reordered or lossy) of each recovery of the run.
    pub fn classes(&self) -> Vec<Class> {
        let class = |event: &Event| if let Event::Recovery(recovery) = event { Some(recovery.class) } else { None };
        self.events.iter().filter_map(class).collect()
    }
}

/// Reads the completions of a round.
fn read_round(file: &Path) -> anyhow::Result<Vec<SampledText>> {
    let text = fs::read_to_string(file)?;
    let read = |line: &str| {
        let record: Value = serde_json::from_str(line)?;
        let [prompt, tokens, rewards] = ["prompt_ids", "completion_ids", "rewards"].map(|key| record[key].clone());
        Ok(SampledText { prompt, tokens, rewards })
    };
    text.lines().map(read).collect()
}

/// Returns a hash of the contents of a file.
fn hash(path: &Path) -> anyhow::Result<u64> {
    let (mut file, mut hasher) = (BufReader::new(fs::File::open(path)?), DefaultHasher::new());
    loop {
        let bytes = file.fill_buf()?;
        if bytes.is_empty() {
            return Ok(hasher.finish());
        }
        hasher.write(bytes);
        let read = bytes.len();
        file.consume(read);
    }
}
