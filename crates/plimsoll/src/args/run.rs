//! Arguments of `train`, `plan` and `sweep`.

use super::SettingArgs;
use super::values::{address, positive};
use clap::{Args, ValueEnum};
use plimsoll_core::{Failure, Plan, SweepReport, rung_names};
use plimsoll_device::regular_file;
use plimsoll_train::config::{RunConfig, list_setting, model_setting, setting};
use plimsoll_train::fault_injection::Injection;
use plimsoll_train::planning::check_stored_plan;
use plimsoll_train::resolve::{HubNeed, RunRequest, fetch_hub_files};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Form of the progress of a run on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProgressForm {
    /// The view of `plimsoll watch`.
    Tui,
    /// One line that is rewritten, or whole lines.
    Line,
    /// Events as JSON lines.
    Json,
    /// Only warnings and errors.
    None,
}

impl ProgressForm {
    /// Returns whether text for people is printed.
    pub fn is_for_people(self) -> bool {
        matches!(self, ProgressForm::Tui | ProgressForm::Line)
    }
}

/// An example that needs no files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Example {
    /// A small model learns to add numbers.
    Sums,
    /// A small model that forgets carries learns from rewards.
    Grpo,
    /// A small model that forgets carries learns from pairs of answers.
    Dpo,
}

impl Example {
    /// Returns the folder in which the example is written and trained.
    fn folder(self) -> &'static str {
        match self {
            Example::Sums => "runs/sums",
            Example::Grpo => "runs/sums-grpo",
            Example::Dpo => "runs/sums-dpo",
        }
    }
}

/// Arguments of `plimsoll train`, which trains, or resumes a run.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll train
  plimsoll train run.toml --budget 6GiB --set train.steps=20
  plimsoll train run.toml --set watch.tensorboard=true
  plimsoll train run.toml --serve
  plimsoll train --resume runs/my-run")]
pub struct TrainArgs {
    /// Run file: model, data and training settings [default: a built-in example that learns to add numbers]
    #[arg(value_name = "RUN.toml", conflicts_with = "resume")]
    run_file: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingArgs,
    /// Continue the run in this folder from its newest valid checkpoint
    #[arg(long, value_name = "RUN_DIR")]
    resume: Option<PathBuf>,
    /// Use this plan (printed by `plimsoll plan --json`) instead of searching for one
    ///
    /// Micro-batch size, recompute levels, offload and the shares of several devices are taken from the plan. They stay
    /// for the whole run, unless run.deterministic = false.
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    plan: Option<PathBuf>,
    /// Train on these completions with their rewards instead of sampling some, with train.objective = "grpo"
    ///
    /// Stands for data.train, data.format = "rollouts" and no data.eval; see docs/grpo.md.
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    rollouts: Option<String>,
    /// Train a built-in example: sums, the default without a run file, grpo or dpo
    ///
    /// grpo and dpo first train a small model whose last samples lack carries. Then grpo rewards its right answers, and dpo prefers right
    /// answers to those without carries. Both run files and their data are written to runs/sums-grpo/example or runs/sums-dpo/example.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["run_file", "resume", "plan", "rollouts", "no_save", "serve"])]
    pub example: Option<Example>,
    /// Save no checkpoint and no model, for benchmarks
    #[arg(long, conflicts_with = "resume")]
    pub no_save: bool,
    /// Stop as after an interrupt when standard input is closed
    ///
    /// For runs that another program starts: the run finishes its step, saves a checkpoint and exits with code 4 when
    /// that program closes the pipe or ends.
    #[arg(long)]
    pub stop_on_eof: bool,
    /// Serve a page with the view of the run until it ends [default: 127.0.0.1:1876]
    ///
    /// As `plimsoll watch RUN_DIR --serve`: if port 1876 is in use, another one is chosen, and an address that other
    /// machines reach, such as 0.0.0.0:1876, gets a token, which is printed once to stderr. The server is a process of its
    /// own, which only reads the run folder.
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        num_args = 0..=1,
        value_parser = address,
        conflicts_with = "no_save",
        help_heading = "Output"
    )]
    pub serve: Option<Option<SocketAddr>>,
    /// Form of the progress on standard output
    ///
    /// tui: the view of `plimsoll watch`; q closes it, and the run goes on with lines. line: one line that is rewritten,
    /// or lines if standard output is no terminal. json: as --json. none: as --quiet.
    #[arg(long, value_name = "FORM", help_heading = "Output", conflicts_with_all = ["json", "quiet"])]
    progress: Option<ProgressForm>,
    /// Print events as JSON, one object per line, and the result as the last line
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Print only warnings and errors
    #[arg(long, short, help_heading = "Output")]
    quiet: bool,
    /// Simulate an out-of-memory error, for example at 12, 12:backward, 12:update:3 or 0:load (repeatable)
    ///
    /// STEP is a training step, PROGRAM a part of it, OP the number or name of an operation. Step 0 is the start of the
    /// run. DEVICE/STEP selects one device. random:0.01 refuses each allocation with a probability of 1 %.
    #[arg(long, value_name = "STEP[:PROGRAM[:OP]]", help_heading = "Fault injection")]
    inject_oom: Vec<String>,
    /// Simulate the loss of a device from a step on, or from a Program of that step on (repeatable)
    #[arg(long, value_name = "DEVICE:STEP[:PROGRAM]", help_heading = "Fault injection")]
    inject_loss: Vec<String>,
    /// Simulate a slow device: from this step on, its forward and backward passes take FACTOR times as long
    /// (repeatable)
    #[arg(long, value_name = "DEVICE:STEP:FACTOR", help_heading = "Fault injection")]
    inject_slow: Vec<String>,
    /// Simulate a device that stops responding: it sends no heartbeat from this step on (repeatable)
    ///
    /// The device resumes when the run has declared it lost. With :forever it never does. 0:open makes it unresponsive
    /// while it is opened.
    #[arg(long, value_name = "DEVICE:STEP[:open][:forever]", help_heading = "Fault injection")]
    inject_silence: Vec<String>,
}

impl TrainArgs {
    /// Returns the form of the progress.
    pub fn progress(&self) -> ProgressForm {
        match self.progress {
            Some(form) => form,
            None if self.json => ProgressForm::Json,
            None if self.quiet => ProgressForm::None,
            None => ProgressForm::Line,
        }
    }

    /// Returns the flags that choose the output of a run.
    pub fn output_flags(&self) -> &'static [&'static str] {
        match self.progress() {
            ProgressForm::Tui => &["--progress", "tui"],
            ProgressForm::Line => &[],
            ProgressForm::Json => &["--json"],
            ProgressForm::None => &["--quiet"],
        }
    }

    /// Returns the folder of an example: `run.dir`, or else the first of `runs/NAME`, `runs/NAME-2`, … that does not exist.
    ///
    /// # Errors
    /// An invalid setting.
    pub fn example_folder(&self, example: Example) -> Result<String, Failure> {
        let settings = self.all_settings();
        let config = RunConfig::load(None, &settings)?;
        if names_folder(&settings) {
            return Ok(config.run.dir);
        }
        let numbered = (2..).map(|number| format!("{}-{number}", example.folder()));
        let mut folders = std::iter::once(example.folder().to_owned()).chain(numbered);
        Ok(folders.find(|folder| !Path::new(folder).exists()).expect("numbers do not end"))
    }

    /// Returns all settings of the run file.
    pub fn all_settings(&self) -> Vec<String> {
        self.settings.settings()
    }

    /// Returns the settings of devices, threads and memory.
    pub fn device_settings(&self) -> Vec<String> {
        let mut settings = self.all_settings();
        let is_kept =
            |setting: &String| ["run.devices", "run.threads", "memory."].iter().any(|key| setting.starts_with(key));
        settings.retain(is_kept);
        settings
    }

    /// Returns whether the command continues an existing run.
    pub fn resumes(&self) -> bool {
        self.resume.is_some()
    }

    /// Parses the faults to inject.
    ///
    /// # Errors
    /// A fault that cannot be parsed.
    pub fn injections(&self) -> Result<Vec<Injection>, Failure> {
        let out_of_memory = self.inject_oom.iter().map(|text| text.parse());
        let losses = self.inject_loss.iter().map(|text| Injection::loss(text));
        let slow = self.inject_slow.iter().map(|text| Injection::slow(text));
        let silent = self.inject_silence.iter().map(|text| Injection::silence(text));
        out_of_memory.chain(losses).chain(slow).chain(silent).collect()
    }

    /// Reads the stored plan of `--plan`; `None` without that flag.
    ///
    /// # Errors
    /// A file that cannot be read or does not contain a plan.
    pub fn plan(&self) -> Result<Option<Plan>, Failure> {
        let Some(path) = &self.plan else { return Ok(None) };
        let name = path.display();
        let wrong = |message: String| Failure::input(message).hint("create one with plimsoll plan RUN.toml --json");
        let text =
            regular_file::read_text(path).map_err(|error| wrong(format!("cannot read the plan {name}: {error}")))?;
        let plan = serde_json::from_str(&text).map_err(|error| wrong(format!("{name} is not a plan: {error}")))?;
        Ok(Some(plan))
    }

    /// Builds the request of the run from the run file and the flags, or from the run folder of `--resume`.
    ///
    /// # Errors
    /// An invalid run file, setting, plan file or run folder.
    pub fn build_request(&self) -> Result<RunRequest, Failure> {
        let mut settings = self.settings.settings();
        if let Some(dir) = &self.resume {
            return RunRequest::resume(dir, &settings);
        }
        if let Some(file) = &self.rollouts {
            let train = list_setting("data.train", std::slice::from_ref(file));
            settings.splice(0..0, [train, setting("data.format", "rollouts"), list_setting("data.eval", &[])]);
        }
        if let (Some(plan), Some(path)) = (self.plan()?, &self.plan) {
            let mut config = RunConfig::load(self.run_file.as_deref(), &settings)?;
            fetch_hub_files(&mut config, HubNeed::Plan, &mut |_| ())?;
            check_stored_plan(&config, &plan, &path.display().to_string())?;
            settings.splice(0..0, recipe_settings(&plan));
        }
        let mut request = RunRequest::from(RunConfig::load(self.run_file.as_deref(), &settings)?);
        request.check_trainable()?;
        if self.plan.is_some() {
            // A stored plan is kept, unless the user wants otherwise.
            request.run.deterministic.get_or_insert(true);
        }
        if self.run_file.is_none() && !names_folder(&settings) {
            request.run.dir = next_free_folder(&request.run.dir);
        }
        Ok(request)
    }
}

/// Returns whether settings name the run folder.
fn names_folder(settings: &[String]) -> bool {
    settings.iter().any(|setting| setting.trim_start().starts_with("run.dir"))
}

/// Returns the first of `folder`, `folder-2`, `folder-3`, … that holds no run. The built-in example can thus be
/// repeated.
fn next_free_folder(folder: &str) -> String {
    let numbered = (2..).map(|number| format!("{folder}-{number}"));
    let mut folders = std::iter::once(folder.to_owned()).chain(numbered);
    folders.find(|folder| !Path::new(folder).join("run.toml").exists()).expect("numbers do not end")
}

/// Returns the recipe of a stored plan as settings. The workers of a team have recipes of their own and share only the
/// lossy rungs, so for a team only the rungs are set.
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

/// Arguments of `plimsoll plan`, which plans a run without running it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll plan run.toml
  plimsoll plan --devices rtx3090,rtx3070,host=64GiB --model qwen2.5-7b --explain")]
pub struct PlanArgs {
    /// Run file [default: the built-in example, or random weights of --model]
    #[arg(value_name = "RUN.toml")]
    run_file: Option<PathBuf>,
    /// Model: a Hugging Face directory, a config.json, a GGUF file, a preset such as qwen2.5-7b, a size such as 7b, or a hub
    /// id such as hub:OWNER/NAME
    #[arg(long, value_name = "DIR|FILE|PRESET|HUB_ID")]
    model: Option<String>,
    #[command(flatten)]
    settings: SettingArgs,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS")]
    sequence: Option<u32>,
    /// Tokens per optimizer step, a multiple of the sequence length
    #[arg(long, value_name = "TOKENS")]
    batch_tokens: Option<u64>,
    /// Print the plan as JSON
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Show the op that sets each peak, the memory saved and the time added by each memory-saving step, and every recipe
    /// that was tried
    ///
    /// With --json, the plan gets the key `ladder`.
    #[arg(long, help_heading = "Output")]
    pub explain: bool,
    /// Recommend changes of settings that make the run faster, each with its predicted effect and its command
    ///
    /// Every change is planned. With --json, the plan gets the key `recommendations`.
    #[arg(long, help_heading = "Output")]
    pub advise: bool,
}

impl PlanArgs {
    /// Builds the request to plan from the run file and the flags. With `--model` and no run file, the model has random
    /// weights.
    ///
    /// # Errors
    /// An invalid run file or setting.
    pub fn build_request(&self) -> Result<RunRequest, Failure> {
        let sequence = self.sequence.map(|sequence| format!("data.sequence={sequence}"));
        let batch_tokens = self.batch_tokens.map(|tokens| format!("train.batch_tokens={tokens}"));
        let mut settings: Vec<String> = sequence.into_iter().chain(batch_tokens).collect();
        settings.extend(self.settings.settings());
        settings.splice(0..0, self.model.as_deref().map(model_setting));
        let config = match (&self.run_file, &self.model) {
            (None, Some(_)) => RunConfig::from_settings(&settings)?,
            (run_file, _) => RunConfig::load(run_file.as_deref(), &settings)?,
        };
        Ok(config.into())
    }
}

/// Arguments of `plimsoll sweep`, which runs several configurations at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  plimsoll sweep run.toml --devices cuda:0,cuda:1 \\
    --set train.learning_rate=1e-4,3e-4,1e-3 --set train.seed=1,2

This runs all six combinations of three learning rates and two seeds. Commas
inside brackets or quotes belong to a value. Every run is a process of its own,
gets a memory limit on one device, and starts when that memory is free.")]
pub struct SweepArgs {
    /// Run files [default: the built-in example]
    #[arg(value_name = "RUN.toml", conflicts_with = "resume")]
    pub runs: Vec<PathBuf>,
    /// Set a key of all run files to a value, or run once for each of several values: train.seed=1,2,3 (repeatable)
    ///
    /// Several keys with several values are combined: every value with every other.
    #[arg(long = "set", value_name = "KEY=VALUE[,VALUE...]", conflicts_with = "resume")]
    pub set: Vec<String>,
    /// Folder of the sweep; each run has a subfolder [default: runs/sweep, runs/sweep-2, ...]
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    pub dir: Option<PathBuf>,
    /// Continue the sweep in this folder: finished runs stay, all others are tried again
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Restarts of a run that ended early [default: 2]
    #[arg(long, value_name = "COUNT")]
    pub retries: Option<u32>,
    /// Maximum number of runs at the same time on a device [default: as many as fit in its memory]
    #[arg(long, value_name = "COUNT", value_parser = positive())]
    pub workers: Option<u32>,
    /// Devices that the runs share, separated by commas, for example cuda:0,cuda:1 or cpu=6GiB [default: those that
    /// `plimsoll train` takes]
    ///
    /// Also simulated devices (virtual:a=240MiB@0.6,virtual:b=80MiB@0.2) and ray: all devices of the cluster. See
    /// `plimsoll train --help` for the syntax.
    #[arg(long, help_heading = "Devices and memory")]
    pub devices: Option<String>,
    /// Memory limit of each device, an amount (6GiB) or a share of the free memory (90%) [default: 90%]
    #[arg(long, value_name = "SIZE|SHARE", help_heading = "Devices and memory")]
    pub budget: Option<String>,
    #[arg(
        long,
        value_name = "RUNGS",
        help = concat!("Lossy memory savings that runs may use if nothing else fits: ", rung_names!()),
        conflicts_with = "resume",
        help_heading = "Devices and memory"
    )]
    allow: Option<String>,
    /// Also write the report to this file as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
    /// Print only the table of results
    #[arg(long, short, help_heading = "Output")]
    pub quiet: bool,
    /// Simulate an out-of-memory error in one run, for example sums-seed=2=12:backward (repeatable)
    ///
    /// RUN is the name of the run in the table of the sweep. See `plimsoll train --help` for the rest.
    #[arg(long, value_name = "RUN=STEP[:PROGRAM[:OP]]", help_heading = "Fault injection")]
    pub inject_oom: Vec<String>,
    /// Print the resources that a run needs on a device as JSON. The sweep calls itself with this flag, because charges
    /// outside the arena can only be measured in a process of their own.
    #[arg(long, value_name = "RUN.toml", hide = true)]
    pub demand: Option<PathBuf>,
}

impl SweepArgs {
    /// Returns the `KEY=VALUE` settings that all runs share. The caller adds the settings of `--set` after them.
    pub fn settings(&self) -> Vec<String> {
        self.allow.iter().map(|allow| setting("memory.allow", allow)).collect()
    }

    /// Builds a run configuration that only holds the devices of the sweep, their load lines, and the model of the first
    /// of its `runs`: the built-in example has default devices of its own. `before` is the report of the sweep that is
    /// resumed, whose devices and load line hold without flags; `None` for a new sweep. If neither it nor `--devices`
    /// names devices, those of the runs are taken. Load lines that all runs name alike hold for the sweep, unless a flag
    /// names others.
    ///
    /// # Errors
    /// Invalid devices or an invalid budget, or runs that name different devices.
    pub fn devices(&self, before: Option<&SweepReport>, runs: &[&RunConfig]) -> Result<RunRequest, Failure> {
        let devices = match self.devices.as_deref().or(before.map(|report| &*report.requested_devices)) {
            Some(devices) => Some(devices),
            None => common_devices(runs)?,
        };
        let devices = devices.map(|devices| setting("run.devices", devices));
        let budget = self.budget.as_deref().or(before.and_then(|report| report.requested_budget.as_deref()));
        let budget = budget.map(|budget| setting("memory.budget", budget));
        let settings: Vec<String> = devices.into_iter().chain(budget).collect();
        let mut config = RunConfig::load(None, &settings)?;
        if let [first, others @ ..] = runs {
            config.model.clone_from(&first.model);
            if others.iter().all(|run| run.memory.load_lines() == first.memory.load_lines()) {
                config.memory.budget = config.memory.budget.or(first.memory.budget);
                config.memory.host = first.memory.host;
            }
        }
        Ok(config.into())
    }

    /// Parses the faults to inject into pairs of run name and place (`STEP[:PROGRAM[:OP]]`).
    ///
    /// # Errors
    /// A fault that cannot be parsed.
    pub fn injections(&self) -> Result<Vec<(String, String)>, Failure> {
        self.inject_oom.iter().map(|text| parse_sweep_injection(text)).collect()
    }
}

/// Returns the devices that all runs name, in the notation of `--devices`; `None` without runs.
///
/// # Errors
/// Runs that name different devices.
fn common_devices<'a>(runs: &[&'a RunConfig]) -> Result<Option<&'a str>, Failure> {
    let mut named = runs.iter().map(|run| run.run.devices.as_str());
    let first = named.next();
    match named.find(|devices| Some(*devices) != first) {
        Some(other) => {
            let first = first.unwrap_or_default();
            Err(Failure::input(format!("run.devices: the runs name different devices, `{first}` and `{other}`"))
                .hint("name the devices that the runs share: --devices cuda:0,cuda:1"))
        }
        None => Ok(first),
    }
}

/// Splits `RUN=STEP[:PROGRAM[:OP]]` at the last `=` into the name of the run and the place. Checks that the place is
/// valid.
fn parse_sweep_injection(text: &str) -> Result<(String, String), Failure> {
    let (name, place) = text.rsplit_once('=').ok_or_else(|| {
        Failure::input(format!("--inject-oom `{text}`: expected RUN=STEP[:PROGRAM[:OP]]"))
            .hint("RUN is a name in the table of the sweep")
    })?;
    place.parse::<Injection>()?;
    Ok((name.to_owned(), place.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, Command};
    use super::*;
    use clap::Parser;

    /// Returns the report of a sweep with this value of `--budget`, on the CPU.
    fn report(budget: Option<&str>) -> SweepReport {
        SweepReport {
            version: SweepReport::VERSION,
            requested_devices: "cpu".into(),
            requested_budget: budget.map(str::to_owned),
            retries: 2,
            workers: None,
            devices: vec![],
            runs: vec![],
            predicted_seconds: 1.0,
            lower_bound_seconds: 1.0,
            seconds: 0.0,
        }
    }

    #[test]
    fn sweep_takes_the_devices_of_its_runs() {
        let Command::Sweep(args) = Cli::parse_from(["plimsoll", "sweep"]).command else { panic!("expected sweep") };
        let run =
            |devices: &str| RunConfig::from_settings(&["model.preset=7b".into(), setting("run.devices", devices)]);
        let (cpu, other, example) = (run("cpu=6GiB").unwrap(), run("cpu=7GiB").unwrap(), RunConfig::load(None, &[]));
        let taken = args.devices(None, &[&cpu, &cpu]).unwrap();
        assert_eq!((&*taken.run.devices, taken.model.preset.as_deref()), ("cpu=6GiB", Some("7b")));
        let before = report(None);
        assert_eq!(args.devices(Some(&before), &[&cpu, &other]).unwrap().run.devices, "cpu");
        assert!(args.devices(None, &[&cpu, &other]).unwrap_err().message.contains("`cpu=6GiB` and `cpu=7GiB`"));
        // Load lines count if all runs agree on them and no flag names others.
        let lines =
            |args: &SweepArgs, runs: &[&RunConfig]| args.devices(Some(&before), runs).unwrap().memory.load_lines();
        let with = |budget: &str| {
            let settings = ["model.preset=7b", "memory.host=3GiB"].map(str::to_owned).to_vec();
            RunConfig::from_settings(&[settings, vec![setting("memory.budget", budget)]].concat()).unwrap()
        };
        let (small, large) = (with("6GiB"), with("7GiB"));
        assert_eq!(lines(&args, &[&small, &small]), small.memory.load_lines());
        assert_eq!(lines(&args, &[&small, &large]), cpu.memory.load_lines());
        let line = ["plimsoll", "sweep", "--budget", "2GiB"];
        let Command::Sweep(flagged) = Cli::parse_from(line).command else { panic!("expected sweep") };
        assert_eq!(lines(&flagged, &[&small]), with("2GiB").memory.load_lines());
        // A resumed sweep keeps its load line, unless a flag names another one.
        let resumed =
            |args: &SweepArgs| args.devices(Some(&report(Some("5GiB"))), &[&small]).unwrap().memory.load_lines();
        assert_eq!(resumed(&args), with("5GiB").memory.load_lines());
        assert_eq!(resumed(&flagged), with("2GiB").memory.load_lines());
        // Without run files, the built-in example keeps its own devices.
        let example = example.unwrap();
        assert_eq!(args.devices(None, &[&example]).unwrap().model, example.model);
    }
}
