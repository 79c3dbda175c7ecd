//! Hostile inputs: damaged or lying models, tokenizers, run files, plans, checkpoints, caches, data and arguments.
//!
//! Each input is a function of (seed, number). The program has to end within 20 s with a documented exit code and a
//! message, without a change to the user's files, and without a silent difference in the result.
//!
//! | module | content |
//! |---|---|
//! | `pool` | the undamaged files, made once per soak |
//! | `scenario` | the commands, and the files that each reads |
//! | `damage`, `text`, `tokenizers`, `values` | damage to a file |
//! | `arguments` | absurd arguments and surroundings |
//! | `input` | one input: a command, and its damage |
//! | `process` | one start of the program |
//! | `judge` | the verdict |

mod arguments;
mod damage;
mod input;
mod judge;
mod pool;
mod process;
mod scenario;
mod text;
mod tokenizers;
mod values;

use super::case::Rng;
use super::tally::Tally;
use anyhow::Context;
use input::Input;
use judge::{RunOutput, UserFiles};
use plimsoll_program::models::ModelType;
use pool::Pool;
use process::Start;
use scenario::{Oracle, SCENARIOS, Scenario};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// Number of inputs without `--runs`.
pub const INPUTS: u64 = 5000;

/// Inputs of one soak.
pub struct HostileSoak<'a> {
    /// Program under test.
    pub binary: &'a Path,
    /// Seed of the inputs.
    pub seed: u64,
    /// Numbers of the inputs.
    pub numbers: Range<u64>,
    /// Time after which no new input starts; `None` without one.
    pub end: Option<Instant>,
    /// Whether the folders of the inputs stay.
    pub keep: bool,
}

/// Undamaged files, and the results of undamaged runs by the place of their scenario.
struct Reference {
    pool: Pool,
    outputs: BTreeMap<usize, RunOutput>,
}

impl HostileSoak<'_> {
    /// Runs the inputs, several at once, and returns the results.
    ///
    /// # Errors
    /// Fails if the undamaged files cannot be made. Failed checks are in the tally.
    pub fn run(&self) -> anyhow::Result<Tally> {
        let pool = Pool::new(self.binary).context("the undamaged files")?;
        let mut reference = Reference { pool, outputs: BTreeMap::new() };
        for (place, scenario) in SCENARIOS.iter().enumerate().filter(|(_, scenario)| scenario.oracle != Oracle::Any) {
            let output = self.undamaged(&reference.pool, scenario, place)?;
            reference.outputs.insert(place, output);
        }
        let (tally, next) = (Mutex::new(Tally::default()), AtomicU64::new(self.numbers.start));
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| self.work(&reference, &next, &tally));
            }
        });
        if self.keep {
            eprintln!("files: {}", reference.pool.scratch.display());
        } else {
            let _ = fs::remove_dir_all(&reference.pool.scratch);
        }
        let mut tally = tally.into_inner().expect("no worker panics");
        tally.kinds.values_mut().for_each(|kind| kind.failed.sort());
        Ok(tally)
    }

    /// Runs one input after another until all are done or the time is over.
    fn work(&self, reference: &Reference, next: &AtomicU64, tally: &Mutex<Tally>) {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= self.numbers.end || self.end.is_some_and(|end| Instant::now() > end) {
                return;
            }
            let mut found = Tally::default();
            if let Err(error) = self.run_input(reference, number, &mut found) {
                found.check("inputs can be made", false, || format!("{}: {error:#}", self.label(number)));
            }
            tally.lock().expect("no worker panics").add(found);
        }
    }

    fn label(&self, number: u64) -> String {
        format!("--only hostile --seed {} --case {number}", self.seed)
    }

    /// Runs the command of a scenario on undamaged files, and returns its result.
    fn undamaged(&self, pool: &Pool, scenario: &Scenario, place: usize) -> anyhow::Result<RunOutput> {
        // Numbers of inputs do not reach these.
        let folder = pool.copy_for(u64::MAX - place as u64)?;
        let words = input::arguments_of(scenario, ModelType::Llama, &pool.folder);
        let ended = process::run(self.binary, &folder, &Start::new(words))?;
        let said = String::from_utf8_lossy(&ended.stderr);
        let output = RunOutput::read(&folder.join(scenario.output));
        let output = output.with_context(|| format!("undamaged: {}: {}: {said}", scenario.command, ended.in_words()));
        fs::remove_dir_all(&folder)?;
        output
    }

    /// Makes input `number`, starts the program on it and judges the end.
    fn run_input(&self, reference: &Reference, number: u64, tally: &mut Tally) -> anyhow::Result<()> {
        let mut rng = Rng::new(self.seed ^ 26, number);
        let folder = reference.pool.copy_for(number)?;
        let input = Input::draw(&reference.pool, &folder, &mut rng)?;
        let before = UserFiles::read(&folder)?;
        let ended = process::run(self.binary, &folder, &input.start)?;
        let after = UserFiles::read(&folder)?;
        let words = input.start.arguments.iter().map(|word| text::shown(&word.to_string_lossy()));
        let label = || {
            let command = words.clone().collect::<Vec<_>>().join(" ");
            let label = format!("{}: {}: plimsoll {command} | {}", self.label(number), input.kind, input.description);
            label.replace(&format!("{}/", folder.display()), "").escape_debug().to_string()
        };
        tally.cover(&format!("{}|{}", input.kind, ended.in_words()));
        let mut fault = |kind: &str, reason: Option<String>| {
            tally.check(kind, reason.is_none(), || format!("{}: {}", label(), reason.unwrap_or_default()));
        };
        fault("inputs end as documented, within 20 s", judge::wrong_end(&ended, input.failure));
        if input.undamaged {
            fault("undamaged inputs are accepted", (ended.code() != Some(0)).then(|| ended.in_words()));
        }
        if input.is_message_readable && ended.status.is_some() {
            fault("messages are printable and name the input", judge::wrong_message(&ended, &input.names));
        }
        if input.is_message_readable && input.start.arguments.iter().any(|word| word == "--json") {
            fault("JSON outputs are JSON", judge::wrong_json(&ended).filter(|_| has_json_stdout(&input)));
        }
        fault("files of the user stay", before.changed(&after));
        if let Some(place) = input.scenario.filter(|_| ended.code() == Some(0) && !ended.interrupted) {
            fault("no result differs silently", difference(&folder, place, reference));
        }
        if !self.keep {
            fs::remove_dir_all(&folder)?;
        }
        Ok(())
    }
}

/// Returns whether `--json` of this command takes no file, so that stdout has the JSON.
fn has_json_stdout(input: &Input) -> bool {
    let first = input.start.arguments.first().map(|word| word.to_string_lossy().into_owned());
    input.kind != "arguments" && !matches!(first.as_deref(), Some("sweep" | "bench"))
}

/// Returns the difference of a run to the undamaged run of the same scenario; `None` if there is none.
fn difference(folder: &Path, place: usize, reference: &Reference) -> Option<String> {
    let (scenario, undamaged) = (&SCENARIOS[place], reference.outputs.get(&place)?);
    match RunOutput::read(&folder.join(scenario.output)) {
        Some(output) => output.difference(undamaged, scenario.oracle),
        None => Some("exit 0 without a result".into()),
    }
}

/// Returns the number of inputs by kind and by end, as a table, and removes them from the tally.
pub fn table(tally: &mut Tally) -> String {
    let counts: Vec<(String, String, u64)> = std::mem::take(&mut tally.covered)
        .into_iter()
        .filter_map(|(feature, count)| {
            feature.split_once('|').map(|(kind, end)| (kind.to_owned(), end.to_owned(), count))
        })
        .collect();
    let ends: BTreeSet<&str> = counts.iter().map(|(_, end, _)| end.as_str()).collect();
    let kinds: BTreeSet<&str> = counts.iter().map(|(kind, ..)| kind.as_str()).collect();
    let mut table = format!("{:14}{:>8}", "input", "all");
    ends.iter().for_each(|end| {
        let _ = write!(table, "  {end}");
    });
    for kind in kinds {
        let of = |end: &str| {
            counts.iter().filter(|(a, b, _)| a == kind && (end.is_empty() || b == end)).map(|row| row.2).sum::<u64>()
        };
        let _ = write!(table, "\n{kind:14}{:>8}", of(""));
        for end in &ends {
            let _ = write!(table, "  {:>width$}", of(end), width = end.len());
        }
    }
    table
}

#[cfg(test)]
mod tests;
