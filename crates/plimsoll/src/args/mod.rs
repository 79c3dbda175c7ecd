//! Command-line definitions: one struct per command, one field per flag, with its help text.
//!
//! A flag that stands for a key of the run file becomes a `KEY=VALUE` setting. Meanings, defaults and checks of keys
//! therefore live in one place: `plimsoll_train::config`. Commands themselves are in `commands/`.
//!
//! `run` has the commands that plan and train, `data` the one that shows their data, `doctor` the check before them,
//! `report` those about runs after their end, `model` those for trained models, `models` those that choose a model before
//! the first run, `bench` the benchmarks, and `values` the parsers of flag values.

mod bench;
mod cluster;
mod data;
mod doctor;
mod generate;
mod model;
mod models;
mod report;
mod run;
mod values;

pub use bench::{BenchDevicesArgs, BenchModelsArgs, BenchStepArgs};
pub use data::DataArgs;
pub use doctor::DoctorArgs;
pub use generate::{AnswerSettings, GenerateArgs};
pub use model::{EvalArgs, ExportArgs};
pub use models::{InitArgs, ModelsArgs};
pub use report::{ReportArgs, RunsArgs};
pub use run::{Example, PlanArgs, ProgressForm, SweepArgs, TrainArgs};

use clap::{Args, CommandFactory, Parser, Subcommand};
use plimsoll_core::Budget;
use plimsoll_train::config::{list_setting, setting};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Train and fine-tune language models within a fixed memory budget
///
/// Before a run starts, Plimsoll computes how many bytes it needs on each device and chooses the fastest recipe that
/// fits: micro-batch size, activation checkpointing, offload to host memory, and how several GPUs share the work (data
/// parallel, sharded as in FSDP, or pipeline parallel). While the run is under way, no device exceeds its memory limit.
#[derive(Debug, Parser)]
#[command(
    name = "plimsoll",
    version,
    arg_required_else_help = true,
    after_help = "\
First steps:
  plimsoll train                       train the built-in example
  plimsoll init                        write a run file, question by question
  plimsoll models                      list the models that fit on this machine
  plimsoll devices                     list devices and their memory
  plimsoll plan --model qwen2.5-7b --devices rtx3090,host=64GiB --allow lora
                                       check what fits, also on other hardware
  plimsoll data run.toml               show the data as the model will see them
  plimsoll train run.toml              train as run.toml describes
  plimsoll watch runs/my-run           watch a run from another terminal
  plimsoll report runs/my-run          write its report, runs/my-run/report.html
  plimsoll train --resume runs/my-run  continue from the newest checkpoint

Exit codes:
  0  done
  1  a bug in Plimsoll
  2  wrong input: a flag, a key of the run file, a model or data
  3  does not fit in memory; the message has commands that do fit
  4  stopped early; continue with --resume"
)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// A subcommand with its arguments.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train or fine-tune a model as a run file describes
    Train(TrainArgs),
    /// Show memory use and predicted speed of a run without running it
    Plan(PlanArgs),
    /// Show what a model will see of the data of a run: documents, labels, lengths, warnings
    Data(DataArgs),
    /// Train several runs side by side on the same devices
    Sweep(SweepArgs),
    /// Ask for model, data and limits, and write a run file with its plan
    Init(InitArgs),
    /// List the models that can be trained on this machine or on other devices, each planned
    Models(ModelsArgs),
    /// List the devices of this machine and their memory
    Devices(DevicesArgs),
    /// Check this machine, and a run on it, before the work: memory, drivers, limits, temperatures
    Doctor(DoctorArgs),
    /// Show a run or the devices of this machine live: planned and measured memory, load, progress
    Watch(WatchArgs),
    /// Write the report of a run as one page: predicted and measured memory and speed, plots, recoveries
    Report(ReportArgs),
    /// List the runs in a folder, and the fastest of each kind
    Runs(RunsArgs),
    /// Change the memory limit of a run that is under way
    Budget(BudgetArgs),
    /// Measure the speed of devices, training steps or models
    Bench {
        /// The benchmark.
        #[command(subcommand)]
        benchmark: BenchCommand,
    },
    /// Compute loss and perplexity of a model on a data set
    Eval(EvalArgs),
    /// Continue a prompt with a model
    Generate(GenerateArgs),
    /// Write a model for other programs: a merged model in 16 bit, or a GGUF file for llama.cpp and Ollama
    Export(ExportArgs),
    /// Add this machine to a cluster, or start one with --head (needs the Python wheel with Ray)
    #[command(disable_help_flag = true, override_usage = cluster::JOIN_USAGE, after_help = cluster::JOIN_OPTIONS)]
    Join(PassthroughArgs),
    /// List the machines of the cluster, their devices, free memory and runs
    #[command(disable_help_flag = true, override_usage = cluster::LIST_USAGE, after_help = cluster::LIST_OPTIONS)]
    Cluster(PassthroughArgs),
    /// Test every device and every network link of the cluster
    #[command(disable_help_flag = true, override_usage = cluster::VERIFY_USAGE, after_help = cluster::VERIFY_OPTIONS)]
    Verify(PassthroughArgs),
    /// Remove this machine from the cluster
    #[command(disable_help_flag = true, override_usage = cluster::LEAVE_USAGE, after_help = cluster::LEAVE_OPTIONS)]
    Leave(PassthroughArgs),
    /// Measure the rates of the processor and cache them, for the process that starts this one
    #[command(hide = true)]
    MeasureRates(MeasureRatesArgs),
}

/// A benchmark with its arguments.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure the devices of this machine: matrix products, memory bandwidth, disk
    ///
    /// Each device is measured alone, then all at the same time. The planner predicts step times from these rates.
    Devices(BenchDevicesArgs),
    /// Time one training step of a model with random weights
    ///
    /// The flags are those of the PyTorch script that it is compared with. Prints one line of JSON.
    Step(BenchStepArgs),
    /// Plan several models and train those that fit
    ///
    /// Every model has random weights and trains for one epoch on random tokens. A model that fails does not stop the
    /// others.
    Models(BenchModelsArgs),
}

impl Command {
    /// Returns the words that select the subcommand.
    pub fn path(&self) -> &'static [&'static str] {
        match self {
            Command::Train(_) => &["train"],
            Command::Plan(_) => &["plan"],
            Command::Data(_) => &["data"],
            Command::Sweep(_) => &["sweep"],
            Command::Init(_) => &["init"],
            Command::Models(_) => &["models"],
            Command::Devices(_) => &["devices"],
            Command::Doctor(_) => &["doctor"],
            Command::Watch(_) => &["watch"],
            Command::Report(_) => &["report"],
            Command::Runs(_) => &["runs"],
            Command::Budget(_) => &["budget"],
            Command::Bench { benchmark: BenchCommand::Devices(_) } => &["bench", "devices"],
            Command::Bench { benchmark: BenchCommand::Step(_) } => &["bench", "step"],
            Command::Bench { benchmark: BenchCommand::Models(_) } => &["bench", "models"],
            Command::Eval(_) => &["eval"],
            Command::Generate(_) => &["generate"],
            Command::Export(_) => &["export"],
            Command::Join(_) => &["join"],
            Command::Cluster(_) => &["cluster"],
            Command::Verify(_) => &["verify"],
            Command::Leave(_) => &["leave"],
            Command::MeasureRates(_) => &["measure-rates"],
        }
    }

    /// Returns whether stdout carries JSON, so that a failure must be printed there as JSON as well.
    pub fn prints_json(&self) -> bool {
        match self {
            Command::Train(args) => args.progress() == ProgressForm::Json,
            Command::Plan(args) => args.json,
            Command::Data(args) => args.json,
            Command::Sweep(_) | Command::Init(_) => false,
            Command::Models(args) => args.json,
            Command::Devices(args) => args.json,
            Command::Doctor(args) => args.json,
            Command::Watch(args) => args.json,
            Command::Report(args) => args.json,
            Command::Runs(args) => args.json,
            Command::Budget(args) => args.json,
            Command::Bench { benchmark: BenchCommand::Devices(_) | BenchCommand::Models(_) } => false,
            Command::Bench { benchmark: BenchCommand::Step(_) } => true,
            Command::Eval(args) => args.json,
            Command::Generate(args) => args.json,
            Command::Export(args) => args.json,
            Command::MeasureRates(_) => false,
            Command::Join(args) | Command::Leave(args) | Command::Cluster(args) | Command::Verify(args) => {
                args.arguments.iter().any(|argument| argument == "--json")
            }
        }
    }
}

/// Flags for any key of the run file.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// Set any key of the run file, for example train.steps=20 (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Ignore a key of the model's config.json that Plimsoll does not know (repeatable)
    #[arg(long, value_name = "KEY")]
    ignore_config_key: Vec<String>,
}

impl KeyArgs {
    /// Returns the flags as `KEY=VALUE` settings of the run file. Settings of `--set` come last and override the
    /// others.
    fn settings(&self) -> Vec<String> {
        let ignored = &self.ignore_config_key;
        let ignored = (!ignored.is_empty()).then(|| list_setting("model.ignore_config_keys", ignored));
        ignored.into_iter().chain(self.set.iter().cloned()).collect()
    }
}

/// Flags for keys of the run file that `train`, `plan` and `bench models` share.
#[derive(Debug, Args)]
pub struct SettingArgs {
    #[command(flatten)]
    keys: KeyArgs,
    /// Devices to use, separated by commas, for example cuda:0,cuda:1 or cpu=6GiB
    ///
    /// cpu, cuda:0: a device of this machine. DEVICE=SIZE limits the memory of one device, for example cuda:0=6GiB.
    ///
    /// virtual:NAME=SIZE@CORES: a simulated accelerator on the CPU with SIZE of memory and the speed of CORES cores,
    /// for example virtual:a=600MiB@1.0,virtual:b=200MiB@0.5.
    ///
    /// rtx3090,host=64GiB: devices that are not present, for plans only. 8xrtx5090: several of them. rtx3070@1gbit: one
    /// with its link to the others.
    ///
    /// pc1/rtx3090,pc1/host=64GiB,pc2/rtx3070,pc2/host=32GiB,pc1-pc2=1gbit: machines that are not present, each with its
    /// own memory.
    ///
    /// card:NAME=12GiB,bf16=60TFLOPS,memory=450GB/s,link=12GB/s: a card that is in no table, for plans only.
    ///
    /// ray: all devices of the cluster.
    #[arg(long, help_heading = "Devices and memory")]
    devices: Option<String>,
    /// Memory limit of each device, an amount (6GiB) or a share of the free memory (90%) [default: 90%]
    ///
    /// The limit covers everything that a device holds: weights, gradients, optimizer state and activations, and also
    /// the CUDA context and libraries. An amount in --devices has precedence. Units: B, KiB, MiB, GiB.
    #[arg(long, value_name = "SIZE|SHARE", help_heading = "Devices and memory")]
    budget: Option<String>,
    /// Lossy memory savings that the planner may use if nothing else fits: bf16, adam8bit, lora, int8, nf4
    ///
    /// bf16: bfloat16 arithmetic. adam8bit: optimizer state in 8 bit. lora: train LoRA adapters and freeze the base
    /// model. int8, nf4: store the frozen base model in 8 or 4 bit (includes lora). Separate several by commas.
    #[arg(long, value_name = "RUNGS", help_heading = "Devices and memory")]
    allow: Option<String>,
}

impl SettingArgs {
    /// Returns the flags as `KEY=VALUE` settings of the run file. Settings of `--set` come last and override the
    /// others.
    fn settings(&self) -> Vec<String> {
        let mut settings: Vec<String> =
            [("run.devices", &self.devices), ("memory.budget", &self.budget), ("memory.allow", &self.allow)]
                .into_iter()
                .filter_map(|(key, value)| value.as_ref().map(|value| setting(key, value)))
                .collect();
        settings.extend(self.keys.settings());
        settings
    }
}

/// Arguments of `plimsoll budget`, which changes the memory limit of a running run.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll budget runs/my-llama 6GiB
  plimsoll budget runs/my-llama 50% --device cuda:1

Before its next step, the run switches to the fastest recipe that fits. If none
fits, the command exits with code 3 and the run continues unchanged.")]
pub struct BudgetArgs {
    /// Folder of the run
    #[arg(value_name = "RUN_DIR")]
    pub run_dir: PathBuf,
    /// New memory limit from the next step on, an amount (6GiB) or a share (50%)
    ///
    /// A share refers to the free memory plus the memory that the run holds. For a virtual device it refers to the
    /// size that the device was created with.
    #[arg(value_name = "SIZE|SHARE")]
    pub budget: Budget,
    /// Device to change, if the run uses several, for example cuda:1
    #[arg(long)]
    pub device: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `plimsoll devices`, which lists devices and their default limits.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Print the devices as JSON
    #[arg(long)]
    pub json: bool,
    /// Delete what earlier runs learned about devices: reduced memory limits and slower speeds
    #[arg(long, conflicts_with = "json")]
    pub forget: bool,
}

/// Arguments of `plimsoll watch`, which shows a run or the devices of this machine live.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll watch                 all devices of this machine and its Ray cluster
  plimsoll watch runs/my-llama   a run, under way or ended
  plimsoll watch --json runs/my-llama | jq .run.tokens_per_second
  plimsoll watch runs/my-llama --serve
                                 a page at http://127.0.0.1:1876
  plimsoll watch http://127.0.0.1:1876
                                 the same run, read from that page's server
  plimsoll watch --pid 4711      the memory of any process over time

The view ends with q, Esc or Ctrl-C, and the run goes on. If the output is no
terminal, lines are printed until the run has ended.")]
pub struct WatchArgs {
    /// Folder of the run, or URL of a served run; without it, the devices of this machine and its cluster are shown
    ///
    /// A URL is the address that --serve prints, such as http://127.0.0.1:1876. If the server has a token, the
    /// environment variable PLIMSOLL_TOKEN holds it.
    #[arg(value_name = "RUN_DIR|URL")]
    pub run_dir: Option<PathBuf>,
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = values::interval)]
    pub interval: f64,
    /// Print one snapshot as JSON and exit; with --pid, one line of JSON for each reading
    #[arg(long)]
    pub json: bool,
    /// Show the memory of any process, by its process id, until it ends
    ///
    /// Its memory on GPUs and on the host, the peak, the growth per minute with a warning of a leak, and what a run could
    /// take on each device.
    #[arg(long, value_name = "PID", value_parser = values::positive(), conflicts_with_all = ["run_dir", "advise", "serve"])]
    pub pid: Option<u32>,
    /// Seconds of readings from which the growth of the process is computed, 10 readings or more
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = values::interval, requires = "pid")]
    pub window: f64,
    /// Number of the process of the run that started this one. The view ends with it, and passes Ctrl-C on to it.
    #[arg(long, value_name = "PID", hide = true, requires = "run_dir")]
    pub of_process: Option<u32>,
    /// Recommend changes of settings that make the run faster
    ///
    /// Plans the run with each change, which takes seconds of processor time.
    #[arg(long, requires = "run_dir")]
    pub advise: bool,
    /// Serve a page with the view until Ctrl-C, and JSON, events and Prometheus metrics [default: 127.0.0.1:1876]
    ///
    /// If port 1876 is in use, another one is chosen. An address that other machines reach, such as 0.0.0.0:1876, gets a
    /// token, which is printed once to stderr.
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, value_parser = values::address, conflicts_with = "json")]
    pub serve: Option<Option<SocketAddr>>,
    /// Serve the page of the run that started this process, on the socket that is its standard input
    #[arg(long, hide = true, requires = "of_process", conflicts_with_all = ["json", "serve"])]
    pub serve_standard_input: bool,
}

/// Arguments of `plimsoll measure-rates`, which other commands start.
#[derive(Debug, Args)]
pub struct MeasureRatesArgs {
    /// Numbers of threads to measure with
    #[arg(required = true, value_name = "THREADS")]
    pub threads: Vec<u32>,
}

/// Arguments of a command that the Python package `plimsoll.ray` implements. It parses them itself, except `--help`.
#[derive(Debug, Args)]
pub struct PassthroughArgs {
    /// Arguments of the command
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS", hide = true)]
    pub arguments: Vec<OsString>,
}

impl PassthroughArgs {
    /// Returns the help of the command `name` if the arguments ask for it.
    pub fn help(&self, name: &str) -> Option<String> {
        let asks = self.arguments.iter().any(|argument| argument == "--help" || argument == "-h");
        let mut cli = Cli::command();
        cli.build();
        asks.then(|| cli.find_subcommand_mut(name).expect("the command exists").render_long_help().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn cluster_commands_print_their_help() {
        let asked = |line: &str| match Cli::parse_from(line.split_whitespace()).command {
            Command::Join(args) => args.help("join"),
            other => panic!("{other:?}"),
        };
        for line in ["plimsoll join --help", "plimsoll join 192.168.1.10 -h", "plimsoll join --token a --help"] {
            let help = asked(line).unwrap_or_else(|| panic!("{line}"));
            for word in ["Add this machine to a cluster", "Usage: plimsoll join [ADDRESS]", "--token <TOKEN>"] {
                assert!(help.contains(word), "{line}: {help}");
            }
        }
        assert_eq!(asked("plimsoll join --head"), None);
    }

    #[test]
    fn plan_flags_become_run_file_settings() {
        let line = "plimsoll plan --model qwen2.5-7b --devices rtx3090,host=64GiB --budget 6GiB --allow 16,8,4 \
                    --sequence 512 --batch-tokens 4096 --ignore-config-key odd";
        let Command::Plan(args) = Cli::parse_from(line.split_whitespace()).command else { panic!("expected plan") };
        let file = args.build_request().unwrap();
        assert_eq!(file.model.preset.as_deref(), Some("qwen2.5-7b"));
        assert_eq!(file.run.devices, "rtx3090,host=64GiB");
        assert_eq!(file.memory.device_budget().to_string(), "6GiB");
        assert_eq!(file.memory.allow.len(), 3);
        assert_eq!((file.data.sequence, file.train.batch_tokens), (512, 4096));
        assert_eq!(file.model.ignore_config_keys, ["odd"]);
    }
}
