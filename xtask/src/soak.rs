//! `cargo xtask soak`: the proof that plans are exact, on random small models and on whole processes.
//!
//! A case is a function of (seed, number): what fails is repeated alone with `--seed N --case K`. Cases run one after
//! another in a child process, so that a fault in the arena's guard pages ends a case and not the soak.

pub mod case;
mod checks;
mod drive;
mod ladder;
mod place;
mod plans;
mod refusals;
mod runs;
mod tally;
mod teams;
#[cfg(test)]
mod tests;
mod twin;
mod watch;
mod whole;

use crate::program;
use anyhow::{Context, bail};
use case::Case;
use clap::{Parser, ValueEnum};
use place::Place;
use plans::Size;
use plimsoll_core::DType;
use plimsoll_device::heap::Counting;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tally::Tally;

/// Shows what the heap gives while Programs run.
#[global_allocator]
static HEAP: Counting = Counting;

/// What [`Options::case_seconds`] is unless it is named.
const CASE_SECONDS_MAX: u64 = 300;

/// Shows on random small models and on whole processes that plans are exact. The full count is --runs 300; CI takes
/// --runs 40, and `cargo test` the share in xtask/tests/exact.rs.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask soak", no_binary_name = true)]
struct Options {
    /// Of the cases; the same seed gives the same cases.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many cases.
    #[arg(long, default_value_t = 300)]
    runs: u64,
    /// Only this case.
    #[arg(long)]
    case: Option<u64>,
    /// JSON instead of lines: what was found so far, after each case, and all of it last.
    #[arg(long)]
    json: bool,
    /// A case that takes more seconds hangs, where all of it is in one process.
    #[arg(long, default_value_t = CASE_SECONDS_MAX)]
    case_seconds: u64,
    /// Runs cases from this number on, and prints each tally as a line of JSON.
    #[arg(long, hide = true)]
    worker_from: Option<u64>,
    /// Only the cases, only the whole processes (larger runs, each in a process of its own), every op of the cases beside
    /// the CPU's in f64, plans of larger models under load lines of a GPU, plans and runs all over the ladder, runs
    /// whose device refuses memory at random, or teams of unequal devices that refuse and are lost at random.
    #[arg(long)]
    only: Option<Only>,
    /// Where the cases run: cpu, virtual, or cuda:0.
    #[arg(long, default_value = "cpu")]
    device: Place,
    /// Their arithmetic: f32, or bf16.
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: DType,
    /// How large the models of plans are.
    #[arg(long, default_value = "large")]
    size: Size,
    /// The program that refusals and teams start; without it, a release build of this tree.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// Begins no new case after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// One of the whole processes.
    #[arg(long, hide = true)]
    whole_worker: Option<usize>,
    /// Where it works.
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
}

/// A part of the soak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Only {
    Cases,
    Whole,
    Ops,
    Plans,
    Ladder,
    Refusals,
    Teams,
}

impl Options {
    /// A case where these want it.
    fn case_of(&self, number: u64) -> Case {
        Case::new(self.seed, number).on(self.device, self.dtype)
    }

    /// Whether cases start the program.
    fn starts(&self) -> bool {
        matches!(self.only, Some(Only::Refusals | Only::Teams))
    }

    fn run(&self, case: &Case) -> Tally {
        let binary = self.binary.as_deref().unwrap_or(Path::new(""));
        match self.only {
            Some(Only::Ops) => checks::run_ops(case),
            Some(Only::Ladder) => ladder::run_ladder(case.seed, case.number),
            Some(Only::Refusals) => refusals::run_refusals(binary, case.seed, case.number),
            Some(Only::Teams) => teams::run_team(binary, case.seed, case.number),
            Some(Only::Plans) => plans::run_plan(case.seed, case.number, self.size, self.device, self.dtype),
            _ => checks::run_case(case),
        }
    }

    /// What a worker has to know.
    fn handed_on(&self, started: Instant) -> Vec<String> {
        let mut list = vec![format!("--device={}", self.device), format!("--dtype={}", self.dtype)];
        let named = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map(|value| value.get_name().to_owned()).unwrap_or_default()
        };
        list.extend(self.only.map(|only| format!("--only={}", named(&|| only.to_possible_value()))));
        list.push(format!("--size={}", named(&|| self.size.to_possible_value())));
        list.extend(self.binary.iter().map(|binary| format!("--binary={}", binary.display())));
        let left = |seconds: u64| seconds.saturating_sub(started.elapsed().as_secs());
        list.extend(self.seconds.map(|seconds| format!("--seconds={}", left(seconds))));
        list
    }
}

/// `f32` or `bf16`.
fn dtype(text: &str) -> Result<DType, String> {
    [DType::F32, DType::Bf16].into_iter().find(|dtype| dtype.to_string() == text).ok_or("expected f32 or bf16".into())
}

/// A worker whose device is lost ends with this: the next case needs a new process.
const LOST: i32 = 75;

/// What a worker says.
#[derive(Serialize, Deserialize)]
enum Word {
    Starts(u64),
    Ends(Tally),
}

/// The chore.
///
/// # Errors
/// When something does not hold.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let mut options = Options::try_parse_from(arguments).unwrap_or_else(|error| error.exit());
    if options.starts() && options.binary.is_none() {
        options.binary = Some(program::release()?);
    }
    let (first, end) = options.case.map_or((0, options.runs), |case| (case, case + 1));
    let started = Instant::now();
    if let Some(from) = options.worker_from {
        return work(&options, from..options.runs, started);
    }
    if let (Some(number), Some(folder)) = (options.whole_worker, &options.folder) {
        return whole::work(number, folder);
    }
    let mut tally = Tally::default();
    let mut next = if options.only == Some(Only::Whole) { end } else { first };
    while next < end && !is_late(&options, started) {
        next = supervise(&options, next, end, started, &mut tally)?;
    }
    let whole = options.case.is_none() && options.device == Place::Cpu;
    let whole = whole && options.only.is_none_or(|only| only == Only::Whole);
    let table = if whole { Some(whole::whole(&mut tally)?) } else { None };
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

/// Whether the time is over.
fn is_late(options: &Options, started: Instant) -> bool {
    options.seconds.is_some_and(|seconds| started.elapsed().as_secs() >= seconds)
}

/// Cases, one line of JSON before and after each.
fn work(options: &Options, numbers: std::ops::Range<u64>, started: Instant) -> anyhow::Result<()> {
    let say = |word: &Word| -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(word)?)?;
        Ok(out.flush()?)
    };
    for number in numbers {
        if is_late(options, started) {
            break;
        }
        let case = options.case_of(number);
        say(&Word::Starts(number))?;
        let tally = catch_unwind(AssertUnwindSafe(|| options.run(&case))).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default();
            one_failure("no case panics", format!("{case}: {said}"))
        });
        say(&Word::Ends(tally))?;
        if options.device.is_lost() {
            std::process::exit(LOST);
        }
    }
    Ok(())
}

fn one_failure(kind: &str, message: String) -> Tally {
    let mut tally = Tally::default();
    tally.check(kind, false, || message);
    tally
}

/// Starts a worker at case `first` and listens to it; gives the case to go on from.
fn supervise(options: &Options, first: u64, end: u64, started: Instant, tally: &mut Tally) -> anyhow::Result<u64> {
    let program = std::env::current_exe().context("where is this program?")?;
    let mut child = Command::new(program)
        .args(["soak", "--seed", &options.seed.to_string(), "--runs", &end.to_string()])
        .args(["--worker-from", &first.to_string()])
        .args(options.handed_on(started))
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start a worker")?;
    let stdout = child.stdout.take().context("the worker has no output")?;
    let (words, heard) = channel();
    let listener = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let word = serde_json::from_str::<Word>(&line);
            if words.send(word).is_err() {
                return;
            }
        }
    });
    let mut running = None;
    let mut next = first;
    let seconds = if options.starts() { runs::CASE_SECONDS_MAX } else { options.case_seconds };
    loop {
        match heard.recv_timeout(Duration::from_secs(seconds)) {
            Ok(word) => match word.context("a worker says what nobody understands")? {
                Word::Starts(number) => {
                    running = Some(number);
                    if std::io::stderr().is_terminal() {
                        eprint!("\rcase {number} of {end} ");
                    }
                }
                Word::Ends(found) => {
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
                let _ = listener.join();
                if let Some(number) = running {
                    let case = options.case_of(number);
                    tally.add(one_failure("no case ends the process", format!("{case}: {status}")));
                    return Ok(number + 1);
                }
                if next < end && !is_late(options, started) && status.code() != Some(LOST) {
                    bail!("a worker ended before its work: {status}");
                }
                return Ok(next);
            }
        }
    }
}
