//! The command line as it is typed: one struct a command, one field a flag. A flag that stands for a
//! key of the run file is nothing but a setting of that key, so that the run file stays the one place
//! where meanings, defaults and checks live.

use clap::{Args, Parser, Subcommand};
use plimsoll_core::{Budget, Bytes, Failure, Plan, Rung};
use plimsoll_train::config::{RunFile, list_setting, model_setting, setting};
use plimsoll_train::fault_injection::Injection;
use plimsoll_train::resolve::check_followed;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Train language models on the devices you have, under a load line, from a plan that is exact.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version, arg_required_else_help = true, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model as a run file says; with no run file, the built-in example
    Train(TrainArgs),
    /// Show what a run would hold, Program by Program, and how fast it would be; nothing is run
    Plan(PlanArgs),
    /// Train several runs side by side on unequal devices, packed by bytes
    Sweep(SweepArgs),
    /// Show the devices of this machine, what Plimsoll would take of each, and why
    Devices(DevicesArgs),
    /// Move the load line of a run that is under way
    Budget(BudgetArgs),
    /// Measure devices, a training step, or several models
    Bench {
        /// What to measure.
        #[command(subcommand)]
        what: BenchCommand,
    },
    /// Measure the loss of a model on data
    Eval(EvalArgs),
    /// Continue a prompt with a model
    Generate(GenerateArgs),
    /// Fold adapters into the model that they belong to
    Merge(MergeArgs),
    /// Make this machine the head of a cluster (--head), or a part of one; needs the wheel, and Ray
    #[command(disable_help_flag = true)]
    Join(HandedOver),
    /// Show the machines of the cluster: devices, free bytes, and what runs where
    #[command(disable_help_flag = true)]
    Cluster(HandedOver),
    /// Try every device and every link of the cluster
    #[command(disable_help_flag = true)]
    Verify(HandedOver),
    /// Stop what this machine gives the cluster
    #[command(disable_help_flag = true)]
    Leave(HandedOver),
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure matrix products and memory of each device, alone and all at once; the planner's prices come from here
    Devices(BenchDevicesArgs),
    /// Time one training step of a model with random weights
    Step(BenchStepArgs),
    /// Plan several models, and train those that fit with random weights on random tokens
    Models(BenchModelsArgs),
}

impl Command {
    /// The words that name it.
    pub fn words(&self) -> &'static [&'static str] {
        match self {
            Command::Train(_) => &["train"],
            Command::Plan(_) => &["plan"],
            Command::Sweep(_) => &["sweep"],
            Command::Devices(_) => &["devices"],
            Command::Budget(_) => &["budget"],
            Command::Bench { what: BenchCommand::Devices(_) } => &["bench", "devices"],
            Command::Bench { what: BenchCommand::Step(_) } => &["bench", "step"],
            Command::Bench { what: BenchCommand::Models(_) } => &["bench", "models"],
            Command::Eval(_) => &["eval"],
            Command::Generate(_) => &["generate"],
            Command::Merge(_) => &["merge"],
            Command::Join(_) => &["join"],
            Command::Cluster(_) => &["cluster"],
            Command::Verify(_) => &["verify"],
            Command::Leave(_) => &["leave"],
        }
    }

    /// Whether the answer goes to a program.
    pub fn json(&self) -> bool {
        match self {
            Command::Train(args) => args.json,
            Command::Plan(args) => args.json,
            Command::Sweep(_) => false,
            Command::Devices(args) => args.json,
            Command::Budget(args) => args.json,
            Command::Bench { what: BenchCommand::Devices(_) | BenchCommand::Models(_) } => false,
            Command::Bench { what: BenchCommand::Step(_) } => true,
            Command::Eval(args) => args.json,
            Command::Generate(args) => args.json,
            Command::Merge(_) => false,
            Command::Join(args) | Command::Leave(args) | Command::Cluster(args) | Command::Verify(args) => {
                args.words.iter().any(|word| word == "--json")
            }
        }
    }
}

/// Settings that `train` and `plan` share.
#[derive(Debug, Args)]
pub struct SettingArgs {
    /// Set any key of the run file, such as train.steps=20
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The devices, such as cpu=6GiB, or virtual:a=600MiB@1.0,virtual:b=200MiB@0.5, or on paper rtx3090,host=64GiB, or ray: all
    /// of the cluster
    #[arg(long)]
    devices: Option<String>,
    /// The most that a device may hold: a share of what is free, such as 90%, or an amount, such as 6GiB
    #[arg(long)]
    budget: Option<String>,
    /// Lossy rungs that the planner may take: bf16, adam8bit, lora, int8, nf4, with commas
    #[arg(long, value_name = "RUNGS")]
    allow: Option<String>,
    /// Accept a key of config.json that Plimsoll does not know
    #[arg(long, value_name = "KEY")]
    ignore_config_key: Vec<String>,
}

impl SettingArgs {
    /// As settings; `--set` comes last and wins.
    fn settings(&self) -> Vec<String> {
        let mut settings: Vec<String> =
            [("run.devices", &self.devices), ("memory.budget", &self.budget), ("memory.allow", &self.allow)]
                .into_iter()
                .filter_map(|(key, value)| value.as_ref().map(|value| setting(key, value)))
                .collect();
        if !self.ignore_config_key.is_empty() {
            settings.push(list_setting("model.ignore_config_keys", &self.ignore_config_key));
        }
        settings.extend(self.set.iter().cloned());
        settings
    }
}

/// `plimsoll train`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll train run.toml --budget 6GiB --set train.steps=20")]
pub struct TrainArgs {
    /// The run file; without one, a small model learns to add numbers
    #[arg(value_name = "RUN.toml", conflicts_with = "resume")]
    run_file: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingArgs,
    /// Go on with the run in this folder, from its newest good checkpoint
    #[arg(long, value_name = "RUN_DIR")]
    resume: Option<PathBuf>,
    /// Follow this plan, as `plimsoll plan --json` printed it: micro-batch, recompute, what waits where, shares of a team
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    plan: Option<PathBuf>,
    /// Rehearse: the device refuses memory there, such as 12, 12:backward, 12:update:3, 0:load, or random:0.01
    #[arg(long, value_name = "STEP[:PROGRAM[:OP]]")]
    inject_oom: Vec<String>,
    /// Rehearse: this device of a team is gone from this step on, or from the first time on that this Program is to run in it;
    /// can be repeated
    #[arg(long, value_name = "DEVICE:STEP[:PROGRAM]")]
    inject_loss: Vec<String>,
    /// Rehearse: from this step on the passes of this device of a team take so many times as long; can be repeated
    #[arg(long, value_name = "DEVICE:STEP:FACTOR")]
    inject_slow: Vec<String>,
    /// Rehearse: this device of a team gives no sign of life from this step on, until it is missed; `0:open`: while it is
    /// opened, alone or in a team; `forever`: its work does not end then either; can be repeated
    #[arg(long, value_name = "DEVICE:STEP[:open][:forever]")]
    inject_silence: Vec<String>,
    /// Save no checkpoint and no model: for runs that are only measured
    #[arg(long, conflicts_with = "resume")]
    pub no_save: bool,
    /// Stop, as after an interrupt, when standard input ends: whoever started the run is gone, or wants it to stop
    #[arg(long)]
    pub stop_on_eof: bool,
    /// Print events, one JSON object a line, and the result as the last
    #[arg(long)]
    pub json: bool,
    /// Print nothing but what goes wrong
    #[arg(long, short)]
    pub quiet: bool,
}

impl TrainArgs {
    /// Whether a run goes on (else one starts).
    pub fn resumes(&self) -> bool {
        self.resume.is_some()
    }

    /// Where the device shall refuse memory.
    ///
    /// # Errors
    /// A place that cannot be read.
    pub fn injections(&self) -> Result<Vec<Injection>, Failure> {
        let refusals = self.inject_oom.iter().map(|place| place.parse());
        let losses = self.inject_loss.iter().map(|place| Injection::loss(place));
        let slow = self.inject_slow.iter().map(|place| Injection::slow(place));
        let silent = self.inject_silence.iter().map(|place| Injection::silence(place));
        refusals.chain(losses).chain(slow).chain(silent).collect()
    }

    /// The stored plan that a new run shall follow.
    ///
    /// # Errors
    /// A file that cannot be read, or is no plan.
    pub fn plan(&self) -> Result<Option<Plan>, Failure> {
        let Some(path) = &self.plan else { return Ok(None) };
        let name = path.display();
        let wrong = |what: String| Failure::input(what).hint("make one with plimsoll plan RUN.toml --json");
        let text =
            std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot read the plan {name}: {error}")))?;
        let plan = serde_json::from_str(&text).map_err(|error| wrong(format!("{name} is no plan: {error}")))?;
        Ok(Some(plan))
    }

    /// The run file that all this means.
    ///
    /// # Errors
    /// What is wrong with the run file, a setting or the plan's file.
    pub fn resolve(&self) -> Result<RunFile, Failure> {
        let mut settings = self.settings.settings();
        if let Some(dir) = &self.resume {
            return RunFile::resume(dir, &settings);
        }
        if let (Some(plan), Some(path)) = (self.plan()?, &self.plan) {
            let asked = RunFile::load(self.run_file.as_deref(), &settings)?;
            check_followed(&asked, &plan, &path.display().to_string())?;
            settings.splice(0..0, recipe_settings(&plan));
        }
        let mut run_file = RunFile::load(self.run_file.as_deref(), &settings)?;
        run_file.check_trainable()?;
        let own_folder = settings.iter().any(|setting| setting.trim_start().starts_with("run.dir"));
        if self.run_file.is_none() && !own_folder {
            run_file.run.dir = next_free(&run_file.run.dir);
        }
        Ok(run_file)
    }
}

/// The built-in example can be run again and again: `runs/sums`, `runs/sums-2`, and so on.
fn next_free(folder: &str) -> String {
    let numbered = (2..).map(|number| format!("{folder}-{number}"));
    let mut folders = std::iter::once(folder.to_owned()).chain(numbered);
    folders.find(|folder| !Path::new(folder).join("run.toml").exists()).expect("numbers do not end")
}

/// The recipe of a stored plan, as pins. The devices of a team have a recipe each: what is the same for all are the rungs.
fn recipe_settings(plan: &Plan) -> Vec<String> {
    let levels: Vec<String> = plan.recipe.recompute.iter().map(ToString::to_string).collect();
    let rungs: Vec<String> = plan.recipe.rungs.iter().map(ToString::to_string).collect();
    let mut settings = vec![list_setting("train.rungs", &rungs)];
    if plan.team.is_empty() {
        settings.push(format!("recipe.micro_batch={}", plan.recipe.micro_batch));
        settings.push(list_setting("recipe.recompute", &levels));
    }
    settings
}

/// `plimsoll plan`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll plan --devices rtx3090,rtx3070,host=64GiB --model qwen2.5-7b --explain")]
pub struct PlanArgs {
    /// The run file; without one and without --model, the built-in example
    #[arg(value_name = "RUN.toml")]
    run_file: Option<PathBuf>,
    /// The model: a Hugging Face directory, a config.json, or the name of a known shape
    #[arg(long, value_name = "DIR|config.json|PRESET")]
    model: Option<String>,
    #[command(flatten)]
    settings: SettingArgs,
    /// Tokens of one sequence
    #[arg(long)]
    sequence: Option<u32>,
    /// Tokens of one optimizer step, a multiple of the sequence
    #[arg(long)]
    batch_tokens: Option<u64>,
    /// Print the plan as JSON
    #[arg(long)]
    pub json: bool,
    /// Show what each rung frees and costs (with --json, too), and every recipe that was tried
    #[arg(long)]
    pub explain: bool,
}

impl PlanArgs {
    /// The run file that all this means.
    ///
    /// # Errors
    /// What is wrong with the run file or a setting.
    pub fn resolve(&self) -> Result<RunFile, Failure> {
        let sequence = self.sequence.map(|sequence| format!("data.sequence={sequence}"));
        let batch_tokens = self.batch_tokens.map(|tokens| format!("train.batch_tokens={tokens}"));
        let mut settings: Vec<String> = sequence.into_iter().chain(batch_tokens).collect();
        settings.extend(self.settings.settings());
        match (&self.run_file, &self.model) {
            (run_file, None) => RunFile::load(run_file.as_deref(), &settings),
            (Some(run_file), Some(model)) => {
                settings.insert(0, model_setting(model));
                RunFile::load(Some(run_file), &settings)
            }
            (None, Some(model)) => {
                settings.insert(0, model_setting(model));
                RunFile::from_settings(&settings)
            }
        }
    }
}

/// `plimsoll sweep`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  plimsoll sweep run.toml --devices virtual:a=240MiB@0.6,virtual:b=80MiB@0.2 \\
    --set train.learning_rate=1e-4,3e-4,1e-3 --set train.seed=1,2

A key with several values, parted by commas, is tried with each; several such keys with all pairs: six runs here.
Commas in brackets or quotes belong to a value. Every run is planned for every device, and started where there is
room for its bytes; a worker holds no more than it was given.")]
pub struct SweepArgs {
    /// The run files; without one, the built-in example
    #[arg(value_name = "RUN.toml", conflicts_with = "resume")]
    pub runs: Vec<PathBuf>,
    /// Set a key of all run files, to one value or to each of several: train.seed=1,2,3
    #[arg(long = "set", value_name = "KEY=VALUE[,VALUE...]", conflicts_with = "resume")]
    pub set: Vec<String>,
    /// The devices that the runs share, such as cuda:0,cuda:1, cpu=6GiB, virtual:a=240MiB@0.6,virtual:b=80MiB@0.2, or ray: all
    /// of the cluster
    #[arg(long)]
    pub devices: Option<String>,
    /// The most that a device may hold: a share of what is free, such as 90%, or an amount, such as 6GiB
    #[arg(long)]
    budget: Option<String>,
    /// Lossy rungs that runs may take where nothing else fits: bf16, adam8bit, lora, int8, nf4, with commas
    #[arg(long, value_name = "RUNGS", conflicts_with = "resume")]
    allow: Option<String>,
    /// The folder of the sweep; each run has its own in it. Without one: runs/sweep, runs/sweep-2, ...
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    pub dir: Option<PathBuf>,
    /// Go on with the sweep in this folder: what is done stays, everything else is tried again
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// How often a run is started again that has ended early
    #[arg(long)]
    pub retries: Option<u32>,
    /// The most workers on a device; without it, as many as their bytes allow
    #[arg(long, value_parser = at_least_one())]
    pub workers: Option<u32>,
    /// Rehearse: in that run the device refuses memory there, such as sums-seed=2=12:backward
    #[arg(long, value_name = "RUN=STEP[:PROGRAM[:OP]]")]
    pub inject_oom: Vec<String>,
    /// Write the report to this file, too, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Print the table alone
    #[arg(long, short)]
    pub quiet: bool,
    /// Say what a run needs of a device, as JSON: what a sweep asks in a process of its own
    #[arg(long, value_name = "RUN.toml", hide = true)]
    pub demand: Option<PathBuf>,
}

impl SweepArgs {
    /// The settings of all runs, before those of the grid.
    pub fn settings(&self) -> Vec<String> {
        self.allow.iter().map(|allow| setting("memory.allow", allow)).collect()
    }

    /// The devices and their load lines, as a run file that says nothing else of interest; `before` are those of the sweep
    /// that goes on.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn devices(&self, before: Option<&str>) -> Result<RunFile, Failure> {
        let devices = self.devices.as_deref().or(before).map(|devices| setting("run.devices", devices));
        let budget = self.budget.as_deref().map(|budget| setting("memory.budget", budget));
        let settings: Vec<String> = devices.into_iter().chain(budget).collect();
        RunFile::load(None, &settings)
    }

    /// What is rehearsed: the run's name and the place.
    ///
    /// # Errors
    /// A place that cannot be read.
    pub fn injections(&self) -> Result<Vec<(String, String)>, Failure> {
        let read = |text: &String| {
            let (name, place) = text.rsplit_once('=').ok_or_else(|| {
                Failure::input(format!("--inject-oom `{text}`: expected RUN=STEP[:PROGRAM[:OP]]"))
                    .hint("a run is named as in the table of the sweep")
            })?;
            place.parse::<Injection>()?;
            Ok((name.to_owned(), place.to_owned()))
        };
        self.inject_oom.iter().map(read).collect()
    }
}

/// `plimsoll budget`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll budget runs/my-llama 6GiB")]
pub struct BudgetArgs {
    /// The folder of the run
    #[arg(value_name = "RUN_DIR")]
    pub run_dir: PathBuf,
    /// The most that its device may hold from the next step on: an amount, such as 6GiB, or a share, such as 50%, of what
    /// is free and what the run holds, of a virtual device of what it was made with
    pub budget: Budget,
    /// The device that is meant, where several work on the run
    #[arg(long)]
    pub device: Option<String>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// `plimsoll devices`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll devices --watch")]
pub struct DevicesArgs {
    /// Print the devices as JSON
    #[arg(long)]
    pub json: bool,
    /// Keep the table up to date until a key is pressed
    #[arg(long, conflicts_with = "json")]
    pub watch: bool,
    /// Forget what runs have found out that devices could not hold
    #[arg(long, conflicts_with_all = ["json", "watch"])]
    pub forget: bool,
}

/// `plimsoll bench devices`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll bench devices --duration 3m --json rates.json")]
pub struct BenchDevicesArgs {
    /// How long to measure in all, such as 30s or 3m
    #[arg(long, default_value = "30s", value_parser = duration)]
    pub duration: Duration,
    /// Write the figures to this file as JSON, too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `plimsoll bench step`: the options of the PyTorch script that it is held against.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll bench step --threads 2 --sequence 512 --batch 4")]
pub struct BenchStepArgs {
    /// Tokens in the vocabulary
    #[arg(long, default_value_t = 8192, value_parser = at_least_one())]
    pub vocab: u32,
    /// Layers
    #[arg(long, default_value_t = 6, value_parser = at_least_one())]
    pub layers: u32,
    /// Width of the stream
    #[arg(long, default_value_t = 384, value_parser = at_least_one())]
    pub hidden: u32,
    /// Heads of queries
    #[arg(long, default_value_t = 6, value_parser = at_least_one())]
    pub heads: u32,
    /// Heads of keys and values
    #[arg(long, default_value_t = 6, value_parser = at_least_one())]
    pub kv_heads: u32,
    /// Width of the feed-forward part
    #[arg(long, default_value_t = 1024, value_parser = at_least_one())]
    pub ffn: u32,
    /// Tokens of one sequence
    #[arg(long, default_value_t = 256, value_parser = at_least_one())]
    pub sequence: u32,
    /// Sequences of one micro-batch
    #[arg(long, default_value_t = 8, value_parser = at_least_one())]
    pub batch: u32,
    /// Micro-batches of one optimizer step
    #[arg(long, default_value_t = 1, value_parser = at_least_one())]
    pub accumulate: u32,
    /// Threads that compute, no more than there are [default: 2, where there are as many]
    #[arg(long, value_parser = at_least_one())]
    pub threads: Option<u32>,
    /// Steps that are timed
    #[arg(long, default_value_t = 10, value_parser = at_least_one())]
    pub steps: u32,
    /// Steps before those
    #[arg(long, default_value_t = 4)]
    pub warmup: u32,
    /// The arithmetic: f32 or bf16
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    pub dtype: String,
    /// The device: cpu, or cuda:0
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Keep only each block's input, and compute the rest again
    #[arg(long)]
    pub checkpoint: bool,
    /// Hold the arena under this, and let the planner find the fastest way that loses nothing
    #[arg(long, value_name = "SIZE", conflicts_with = "checkpoint")]
    pub memory: Option<Bytes>,
    /// What is trained: full (all weights), or lora (adapters of every projection)
    #[arg(long, default_value = "full", value_parser = ["full", "lora"])]
    pub method: String,
    /// Rank of the adapters; alpha is twice that
    #[arg(long, default_value_t = 16, value_parser = at_least_one())]
    pub rank: u32,
    /// How the frozen matrices beside adapters are stored: plain, int8 or nf4
    #[arg(long, default_value = "plain", value_parser = ["plain", "int8", "nf4"])]
    pub base: String,
}

/// `plimsoll bench models`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  plimsoll bench models 7b 11b 13b --devices cuda:0 --allow nf4,lora --json models.json"
)]
pub struct BenchModelsArgs {
    /// Models: sizes such as 7b, 11b or 13b, names of known shapes, Hugging Face directories, or config.json files
    #[arg(required = true, value_name = "MODEL")]
    pub models: Vec<String>,
    /// Sequences that each model is trained on, in all
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..1 << 32))]
    pub samples: u64,
    /// Tokens of one sequence
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    pub sequence: u32,
    #[command(flatten)]
    settings: SettingArgs,
    /// Write the rows to this file as JSON, too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl BenchModelsArgs {
    /// The run file for one of the models: random weights, trained once on all that is in `data`.
    ///
    /// # Errors
    /// What is wrong with a setting.
    pub fn resolve(&self, model: &str, data: &Path, run_dir: &Path) -> Result<RunFile, Failure> {
        const STEP_TOKENS: u64 = 65536;
        let sequence = u64::from(self.sequence);
        let at_once = (STEP_TOKENS / sequence).clamp(1, self.samples);
        let fixed = [
            ("data.format", "tokens".to_owned()),
            ("data.pack", "false".to_owned()),
            ("data.sequence", sequence.to_string()),
            ("model.init", "random".to_owned()),
            ("train.batch_tokens", (at_once * sequence).to_string()),
            ("train.epochs", "1".to_owned()),
        ];
        let mut settings = vec![model_setting(model)];
        settings.extend(fixed.iter().map(|(key, value)| format!("{key}={value}")));
        settings.push(setting("data.train", &data.to_string_lossy()));
        settings.push(setting("run.dir", &run_dir.to_string_lossy()));
        // What a device cannot hold is a row of its own, not one of the processor's.
        settings.push(setting("run.fallback", "none"));
        settings.extend(self.settings.settings());
        RunFile::from_settings(&settings)
    }
}

/// `plimsoll eval`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll eval runs/sums/model --data runs/sums/example/eval.jsonl --format tokens")]
pub struct EvalArgs {
    /// The model: a Hugging Face directory
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The data: a file or a glob, .jsonl or .txt
    #[arg(long, value_name = "FILE")]
    data: String,
    /// What a sample looks like: text or tokens
    #[arg(long)]
    format: Option<String>,
    /// Tokens of one sequence; longer samples are split. Without it, as long as the longest sample
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    pub sequence: Option<u32>,
    #[command(flatten)]
    place: PlaceArgs,
    /// Print loss, perplexity and tokens as JSON
    #[arg(long)]
    pub json: bool,
}

impl EvalArgs {
    /// The run file that all this means.
    ///
    /// # Errors
    /// What is wrong with a setting.
    pub fn resolve(&self) -> Result<RunFile, Failure> {
        let mut settings = self.place.settings(&self.dir);
        settings.push(setting("data.eval", &self.data));
        settings.extend(self.format.as_ref().map(|format| setting("data.format", format)));
        nothing_trained(RunFile::from_settings(&settings)?)
    }
}

/// `plimsoll generate`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll generate models/my-llama --prompt \"Once upon a time\" --max-tokens 50")]
pub struct GenerateArgs {
    /// The model: a Hugging Face directory
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The text to go on from
    #[arg(long, value_name = "TEXT")]
    pub prompt: String,
    /// New tokens at most
    #[arg(long, default_value_t = 64, value_parser = at_least_one())]
    pub max_tokens: u32,
    /// 0 takes the likeliest token each time; above, tokens are drawn
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f32,
    /// Draw from the likeliest tokens only, so many
    #[arg(long, value_parser = at_least_one())]
    pub top_k: Option<u32>,
    /// Draw from the likeliest tokens only, until they hold this share
    #[arg(long, value_parser = share)]
    pub top_p: Option<f32>,
    /// Seed of the drawing
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    place: PlaceArgs,
    /// Print the text and its tokens as JSON
    #[arg(long)]
    pub json: bool,
}

impl GenerateArgs {
    /// The run file that all this means.
    ///
    /// # Errors
    /// What is wrong with a setting.
    pub fn resolve(&self) -> Result<RunFile, Failure> {
        nothing_trained(RunFile::from_settings(&self.place.settings(&self.dir))?)
    }
}

/// `plimsoll merge`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll merge models/my-llama runs/my-llama/adapter models/my-llama-tuned")]
pub struct MergeArgs {
    /// The model: a Hugging Face directory
    #[arg(value_name = "BASE")]
    pub base: PathBuf,
    /// Its adapters: a PEFT directory
    #[arg(value_name = "ADAPTER")]
    pub adapter: PathBuf,
    /// The folder of the new model
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Accept a key of config.json that Plimsoll does not know
    #[arg(long, value_name = "KEY")]
    pub ignore_config_key: Vec<String>,
}

/// A command that Python does: `plimsoll.ray` of the wheel knows its words, and its `--help`.
#[derive(Debug, Args)]
pub struct HandedOver {
    /// The words, as they were typed.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "WORDS")]
    pub words: Vec<OsString>,
}

/// Where and how a finished model runs.
#[derive(Debug, Args)]
struct PlaceArgs {
    /// Compute with these adapters of the model: a PEFT directory
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Lossy rungs that may be taken where the model does not fit: bf16, int8, nf4, with commas
    #[arg(long, value_name = "RUNGS")]
    allow: Option<String>,
    /// The device, such as cpu
    #[arg(long)]
    devices: Option<String>,
    /// The most that the device may hold: a share of what is free, such as 90%, or an amount, such as 6GiB
    #[arg(long)]
    budget: Option<String>,
    /// Threads that compute
    #[arg(long, value_parser = at_least_one())]
    threads: Option<u32>,
    /// Accept a key of config.json that Plimsoll does not know
    #[arg(long, value_name = "KEY")]
    ignore_config_key: Vec<String>,
}

impl PlaceArgs {
    fn settings(&self, model: &Path) -> Vec<String> {
        let mut settings = vec![setting("model.path", &model.to_string_lossy())];
        settings.extend(self.adapter.as_ref().map(|adapter| setting("model.adapter", &adapter.to_string_lossy())));
        settings.extend(self.allow.as_ref().map(|allow| setting("memory.allow", allow)));
        settings.extend(self.devices.as_ref().map(|devices| setting("run.devices", devices)));
        settings.extend(self.budget.as_ref().map(|budget| setting("memory.budget", budget)));
        settings.extend(self.threads.map(|threads| format!("run.threads={threads}")));
        if !self.ignore_config_key.is_empty() {
            settings.push(list_setting("model.ignore_config_keys", &self.ignore_config_key));
        }
        settings
    }
}

/// That only such rungs are allowed as there are where nothing is trained.
fn nothing_trained(file: RunFile) -> Result<RunFile, Failure> {
    let of_training = |rung: &&Rung| matches!(rung, Rung::Adam8bit | Rung::Lora);
    match file.memory.allow.iter().find(of_training) {
        Some(rung) => {
            Err(Failure::input(format!("--allow {rung}: nothing is trained here that this rung would change"))
                .hint("what may be allowed: bf16, int8, nf4"))
        }
        None => Ok(file),
    }
}

fn at_least_one() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// `90s`, `3m`, `1h`, `45`: seconds without a unit.
fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit {
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("expected a duration such as 30s, 3m or 1h".to_owned()),
    };
    let seconds = number.parse::<f64>().unwrap_or(0.0) * scale;
    if !(1.0..=86400.0).contains(&seconds) {
        return Err("expected a duration from 1s to 24h, such as 30s or 3m".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a number, 0 or more".to_owned()),
    }
}

fn share(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number > 0.0 && number <= 1.0 => Ok(number),
        _ => Err("expected a number above 0, at most 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_are_settings_of_the_run_file() {
        let line = "plimsoll plan --model qwen2.5-7b --devices rtx3090,host=64GiB --budget 6GiB --allow 16,8,4 \
                    --sequence 512 --batch-tokens 4096 --ignore-config-key odd";
        let Command::Plan(args) = Cli::parse_from(line.split_whitespace()).command else { panic!("no plan") };
        let file = args.resolve().unwrap();
        assert_eq!(file.model.preset.as_deref(), Some("qwen2.5-7b"));
        assert_eq!(file.run.devices, "rtx3090,host=64GiB");
        assert_eq!(file.memory.line().to_string(), "6GiB");
        assert_eq!(file.memory.allow.len(), 3);
        assert_eq!((file.data.sequence, file.train.batch_tokens), (512, 4096));
        assert_eq!(file.model.ignore_config_keys, ["odd"]);
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("3m"), Ok(Duration::from_secs(180)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("45"), Ok(Duration::from_secs(45)));
        for bad in ["", "m", "0s", "3 parsec", "-1s", "99999h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
