//! `cargo xtask soak`: tests on random small models and on whole processes that plans are exact.
//!
//! A case is a function of (seed, number): a failed one is repeated alone with `--seed N --case K`. Cases run one after
//! another in a worker process, so that a fault in the guard pages of an arena ends one case and not the soak.

mod advice;
mod budget;
pub mod case;
mod checks;
mod execution;
mod hostile;
mod ladder;
mod monotone;
mod observed_device;
mod plans;
mod reference;
mod refusals;
mod runs;
mod tally;
mod teams;
pub mod test_device;
#[cfg(test)]
mod tests;
mod whole_process;

use crate::program;
use anyhow::{Context, bail, ensure};
use budget::Models;
use case::Case;
use clap::{Parser, ValueEnum};
use hostile::HostileSoak;
use plans::Size;
use plimsoll_core::DType;
use plimsoll_device::heap::CountingAllocator;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tally::Tally;
use test_device::TestDevice;

/// Allocator that measures heap growth while Programs run.
#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

/// Default number of seconds after which a case counts as hanging ([`Options::case_seconds`]).
const CASE_SECONDS_MAX: u64 = 300;

/// Test on random small models and on whole processes that plans are exact.
///
/// A full soak has --runs 300, and --runs 5000 with --only hostile. CI uses --runs 24, and --runs 300 with --only hostile.
/// `cargo test` runs a smaller part in xtask/tests/exact.rs.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask soak", no_binary_name = true)]
struct Options {
    /// Seed of the cases.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of cases [default: 300, or 5000 with --only hostile].
    #[arg(long, alias = "questions")]
    runs: Option<u64>,
    /// Run only this case.
    #[arg(long)]
    case: Option<u64>,
    /// Print the results as JSON: an intermediate state after each case, and the final state at the end.
    #[arg(long)]
    json: bool,
    /// Seconds after which a case counts as hanging, if it runs in the worker process.
    #[arg(long, default_value_t = CASE_SECONDS_MAX)]
    case_seconds: u64,
    /// Run as a worker: run cases from this number on and print each tally as a line of JSON.
    #[arg(long, hide = true)]
    worker_from: Option<u64>,
    /// Run only one part of the soak.
    #[arg(long)]
    only: Option<Part>,
    /// Device for the cases: cpu, virtual, or cuda:0.
    #[arg(long, default_value = "cpu")]
    device: TestDevice,
    /// Arithmetic of the cases: f32 or bf16.
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: DType,
    /// Size of the models for --only plans.
    #[arg(long, default_value = "large")]
    size: Size,
    /// With --only budget: only runs with LoRA adapters, whose processes keep their load lines while they plan, too.
    #[arg(long)]
    adapters: bool,
    /// With --only advice: only plan, and measure no step, on a machine that does other work.
    #[arg(long)]
    plans_only: bool,
    /// With --only monotone: only models of few layers on at most four devices.
    #[arg(long)]
    small: bool,
    /// Program for --only refusals and teams [default: a release build of this workspace].
    #[arg(long)]
    binary: Option<PathBuf>,
    /// Start no new case after this many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Run as the worker for one of the whole processes.
    #[arg(long, hide = true)]
    whole_worker: Option<usize>,
    /// Folder of the whole processes.
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
}

/// Part of the soak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Random small models: budgets, placement, exact memory use, equal results
    Cases,
    /// Whole processes of larger runs
    Whole,
    /// Every op of the cases compared with the CPU in f64
    Ops,
    /// As ops, for attention with heads of 64 to 128 elements and up to 700 tokens
    Attention,
    /// Large models with load lines of a GPU
    Plans,
    /// Plans and runs for all rungs of the memory ladder
    Ladder,
    /// Runs on a device that refuses memory at random
    Refusals,
    /// Teams of unequal devices with random faults
    Teams,
    /// Damaged or lying files and absurd arguments
    Hostile,
    /// Small runs under tight load lines, by the kernel's count of each process
    Budget,
    /// Plans never get worse with more memory, and remedies are the least that is enough
    Monotone,
    /// Recommended commands give the bytes and the speed that they state
    Advice,
}

impl Options {
    /// Returns case `number` of the soak, on the device and in the arithmetic of these options.
    fn case_of(&self, number: u64) -> Case {
        let case = match self.only {
            Some(Part::Attention) => Case::attention(self.seed, number),
            _ => Case::new(self.seed, number),
        };
        case.on(self.device, self.dtype)
    }

    /// Returns whether each case starts the program, in processes of its own.
    fn starts_program(&self) -> bool {
        use Part::{Advice, Budget, Hostile, Monotone, Refusals, Teams};
        matches!(self.only, Some(Refusals | Teams | Hostile | Budget | Monotone | Advice))
    }

    /// Returns the models of the runs under tight load lines.
    fn budget_models(&self) -> Models {
        if self.adapters { Models::Adapters } else { Models::Small }
    }

    /// Returns the number of cases.
    fn runs(&self) -> u64 {
        self.runs.unwrap_or(if self.only == Some(Part::Hostile) { hostile::INPUTS } else { 300 })
    }

    fn run(&self, case: &Case) -> Tally {
        let binary = self.binary.as_deref().unwrap_or(Path::new(""));
        match self.only {
            Some(Part::Ops | Part::Attention) => checks::run_ops(case),
            Some(Part::Ladder) => ladder::run_ladder(case.seed, case.number),
            Some(Part::Refusals) => refusals::run_refusals(binary, case.seed, case.number),
            Some(Part::Teams) => teams::run_team(binary, case.seed, case.number),
            Some(Part::Budget) => budget::run_budget(binary, self.budget_models(), case.seed, case.number),
            Some(Part::Monotone) => monotone::run_question(binary, (case.seed, case.number), self.small),
            Some(Part::Advice) => advice::run_advice(binary, self.seed, case.number, !self.plans_only),
            Some(Part::Plans) => plans::run_plan(case.seed, case.number, self.size, self.device, self.dtype),
            _ => checks::run_case(case),
        }
    }

    /// Returns the arguments with which a worker process gets these options. `started` is the start of the soak.
    fn worker_arguments(&self, started: Instant) -> Vec<String> {
        let mut list = vec![format!("--device={}", self.device), format!("--dtype={}", self.dtype)];
        let named = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map(|value| value.get_name().to_owned()).unwrap_or_default()
        };
        list.extend(self.only.map(|only| format!("--only={}", named(&|| only.to_possible_value()))));
        list.extend(self.adapters.then(|| "--adapters".to_owned()));
        list.extend(self.plans_only.then(|| "--plans-only".to_owned()));
        list.extend(self.small.then(|| "--small".to_owned()));
        list.push(format!("--size={}", named(&|| self.size.to_possible_value())));
        list.extend(self.binary.iter().map(|binary| format!("--binary={}", binary.display())));
        let left = |seconds: u64| seconds.saturating_sub(started.elapsed().as_secs());
        list.extend(self.seconds.map(|seconds| format!("--seconds={}", left(seconds))));
        list
    }
}

/// Parses the arithmetic of the cases: `f32` or `bf16`.
fn dtype(text: &str) -> Result<DType, String> {
    [DType::F32, DType::Bf16].into_iter().find(|dtype| dtype.to_string() == text).ok_or("expected f32 or bf16".into())
}

/// Exit code of a worker process that lost its device. Only a new process can run the next case.
const DEVICE_LOST_EXIT: i32 = 75;

/// Message from a worker process: the number of the case that starts, or the results of the case that ended.
#[derive(Serialize, Deserialize)]
enum WorkerMessage {
    Started(u64),
    Finished(Tally),
}

/// Runs the cases in worker processes and prints the results. With hidden arguments, this process is itself such a
/// worker.
///
/// # Errors
/// Fails if a check failed, or if a process cannot be started.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let mut options = Options::try_parse_from(arguments).unwrap_or_else(|error| error.exit());
    if options.starts_program() && options.binary.is_none() {
        options.binary = Some(program::release()?);
    }
    options.binary = options.binary.map(std::path::absolute).transpose()?;
    let (first, end) = options.case.map_or((0, options.runs()), |case| (case, case + 1));
    let started = Instant::now();
    if let Some(from) = options.worker_from {
        return run_worker(&options, from..options.runs(), started);
    }
    if let (Some(number), Some(folder)) = (options.whole_worker, &options.folder) {
        return whole_process::run_one(number, folder);
    }
    let mut tally = Tally::default();
    if options.only == Some(Part::Hostile) {
        return run_hostile(&options, first..end, started);
    }
    let mut next = if options.only == Some(Part::Whole) { end } else { first };
    while next < end && !is_late(&options, started) {
        next = supervise(&options, next, end, started, &mut tally)?;
    }
    let whole = options.case.is_none() && options.device == TestDevice::Cpu;
    let whole = whole && options.only.is_none_or(|only| only == Part::Whole);
    let table = if whole { Some(whole_process::run_all(&mut tally)?) } else { None };
    if options.json {
        println!("{}", serde_json::to_string(&tally)?);
    } else {
        if next > first {
            println!("seed {}, cases {first} to {}", options.seed, next - 1);
        }
        println!("{:.0} s", started.elapsed().as_secs_f64());
        table.iter().for_each(|table| println!("{table}"));
        println!("{}", tally.lines());
    }
    if tally.failed() > 0 {
        bail!(
            "{} checks failed; repeat a case alone: cargo xtask soak --seed {} --case K",
            tally.failed(),
            options.seed
        );
    }
    Ok(())
}

/// Runs hostile inputs and prints the results.
///
/// # Errors
/// Fails if a check failed, or if the undamaged files cannot be made.
fn run_hostile(options: &Options, numbers: std::ops::Range<u64>, started: Instant) -> anyhow::Result<()> {
    let soak = HostileSoak {
        binary: &std::path::absolute(options.binary.as_deref().unwrap_or(Path::new("plimsoll")))?,
        seed: options.seed,
        numbers,
        end: options.seconds.map(|seconds| started + Duration::from_secs(seconds)),
        keep: options.case.is_some(),
    };
    let mut tally = soak.run()?;
    if options.json {
        println!("{}", serde_json::to_string(&tally)?);
    } else {
        let table = hostile::table(&mut tally);
        println!("seed {}, {:.0} s\n{table}\n{}", options.seed, started.elapsed().as_secs_f64(), tally.lines());
    }
    ensure!(tally.failed() == 0, "{} checks failed; repeat an input: cargo xtask soak with its flags", tally.failed());
    Ok(())
}

/// Returns whether the time limit (`--seconds`) is over; false without a limit.
fn is_late(options: &Options, started: Instant) -> bool {
    options.seconds.is_some_and(|seconds| started.elapsed().as_secs() >= seconds)
}

/// Runs cases as a worker process, and prints a message before and after each case.
fn run_worker(options: &Options, numbers: std::ops::Range<u64>, started: Instant) -> anyhow::Result<()> {
    let send = |word: &WorkerMessage| -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(word)?)?;
        Ok(out.flush()?)
    };
    for number in numbers {
        if is_late(options, started) {
            break;
        }
        let case = options.case_of(number);
        send(&WorkerMessage::Started(number))?;
        let tally = catch_unwind(AssertUnwindSafe(|| options.run(&case))).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default();
            one_failure("no case panics", format!("{case}: {said}"))
        });
        send(&WorkerMessage::Finished(tally))?;
        if options.device.is_lost() {
            std::process::exit(DEVICE_LOST_EXIT);
        }
    }
    Ok(())
}

fn one_failure(kind: &str, message: String) -> Tally {
    let mut tally = Tally::default();
    tally.check(kind, false, || message);
    tally
}

/// Starts a worker process for the cases from `first` to `end` (exclusive), and adds its results to `tally`. Returns
/// the case from which a new worker has to continue.
fn supervise(options: &Options, first: u64, end: u64, started: Instant, tally: &mut Tally) -> anyhow::Result<u64> {
    let program = std::env::current_exe().context("where is this program?")?;
    let mut child = Command::new(program)
        .args(["soak", "--seed", &options.seed.to_string(), "--runs", &end.to_string()])
        .args(["--worker-from", &first.to_string()])
        .args(options.worker_arguments(started))
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start a worker")?;
    let stdout = child.stdout.take().context("the worker has no output")?;
    let (messages, received) = channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let word = serde_json::from_str::<WorkerMessage>(&line);
            if messages.send(word).is_err() {
                return;
            }
        }
    });
    let mut running = None;
    let mut next = first;
    let seconds = if options.starts_program() { runs::CASE_SECONDS_MAX } else { options.case_seconds };
    loop {
        match received.recv_timeout(Duration::from_secs(seconds)) {
            Ok(word) => match word.context("a worker message cannot be parsed")? {
                WorkerMessage::Started(number) => {
                    running = Some(number);
                    if std::io::stderr().is_terminal() {
                        eprint!("\rcase {number} of {end} ");
                    }
                }
                WorkerMessage::Finished(found) => {
                    tally.add(found);
                    next = running.take().context("a case ends that never started")? + 1;
                    if options.json {
                        println!("{}", serde_json::to_string(tally)?);
                    }
                }
            },
            Err(error) => {
                if error == RecvTimeoutError::Timeout {
                    child.kill().context("cannot end a worker that hangs")?;
                }
                let status = child.wait().context("cannot wait for a worker")?;
                let _ = reader.join();
                if let Some(number) = running {
                    let case = options.case_of(number);
                    tally.add(one_failure("no case ends the process", format!("{case}: {status}")));
                    return Ok(number + 1);
                }
                if next < end && !is_late(options, started) && status.code() != Some(DEVICE_LOST_EXIT) {
                    bail!("a worker ended before its work: {status}");
                }
                return Ok(next);
            }
        }
    }
}
