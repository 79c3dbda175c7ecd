//! `cargo xtask soak`: the proof that plans are exact, on random small models and on whole processes.
//!
//! A case is a function of (seed, number): what fails is repeated alone with `--seed N --case K`. Cases run one after
//! another in a child process, so that a fault in the arena's guard pages ends a case and not the soak.

mod case;
mod checks;
mod drive;
mod tally;
#[cfg(test)]
mod tests;
mod watch;
mod whole;

use anyhow::{Context, bail};
use clap::{Parser, ValueEnum};
use plimsoll_device::heap::Counting;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tally::Tally;

/// Shows what the heap gives while Programs run.
#[global_allocator]
static HEAP: Counting = Counting;

/// A case that takes longer hangs.
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
    /// One JSON object instead of lines.
    #[arg(long)]
    json: bool,
    /// Runs cases from this number on, and prints each tally as a line of JSON.
    #[arg(long, hide = true)]
    worker_from: Option<u64>,
    /// Only the cases, or only the whole processes (larger runs, each in a process of its own).
    #[arg(long)]
    only: Option<Only>,
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
}

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
    let options = Options::try_parse_from(arguments).unwrap_or_else(|error| error.exit());
    let (first, end) = options.case.map_or((0, options.runs), |case| (case, case + 1));
    if let Some(from) = options.worker_from {
        return work(options.seed, from..options.runs);
    }
    if let (Some(number), Some(folder)) = (options.whole_worker, &options.folder) {
        return whole::work(number, folder);
    }
    let started = Instant::now();
    let mut tally = Tally::default();
    let mut next = if options.only == Some(Only::Whole) { end } else { first };
    while next < end {
        next = supervise(&options, next, end, &mut tally)?;
    }
    let alone = options.case.is_some() || options.only == Some(Only::Cases);
    let table = if alone { None } else { Some(whole::whole(&mut tally)?) };
    if options.json {
        println!("{}", serde_json::to_string(&tally)?);
    } else {
        if options.only != Some(Only::Whole) {
            println!("seed {}, cases {first} to {}", options.seed, end - 1);
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

/// Cases, one line of JSON before and after each.
fn work(seed: u64, numbers: std::ops::Range<u64>) -> anyhow::Result<()> {
    let say = |word: &Word| -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(word)?)?;
        Ok(out.flush()?)
    };
    for number in numbers {
        say(&Word::Starts(number))?;
        let tally = catch_unwind(AssertUnwindSafe(|| checks::run_case(seed, number))).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default();
            one_failure("no case panics", format!("{}: {said}", case::Case::new(seed, number)))
        });
        say(&Word::Ends(tally))?;
    }
    Ok(())
}

fn one_failure(kind: &str, message: String) -> Tally {
    let mut tally = Tally::default();
    tally.check(kind, false, || message);
    tally
}

/// Starts a worker at case `first` and listens to it; gives the case to go on from.
fn supervise(options: &Options, first: u64, end: u64, tally: &mut Tally) -> anyhow::Result<u64> {
    let program = std::env::current_exe().context("where is this program?")?;
    let mut child = Command::new(program)
        .args(["soak", "--seed", &options.seed.to_string(), "--runs", &end.to_string()])
        .args(["--worker-from", &first.to_string()])
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
    loop {
        match heard.recv_timeout(Duration::from_secs(CASE_SECONDS_MAX)) {
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
                }
            },
            Err(error) => {
                if error == RecvTimeoutError::Timeout {
                    child.kill().context("cannot end a worker that hangs")?;
                }
                let status = child.wait().context("cannot wait for a worker")?;
                let _ = listener.join();
                if let Some(number) = running {
                    let case = case::Case::new(options.seed, number);
                    tally.add(one_failure("no case ends the process", format!("{case}: {status}")));
                    return Ok(number + 1);
                }
                if next < end {
                    bail!("a worker ended before its work: {status}");
                }
                return Ok(next);
            }
        }
    }
}
