//! The folder of a sweep:
//!
//! - `sweep.json`: the report, rewritten after every change
//! - `NAME.toml`: the run file of a run, with every key
//! - `NAME.log`: warnings and errors of the processes of a run
//! - `NAME/`: the run folder

use super::devices::SharedDevices;
use crate::args::SweepArgs;
use plimsoll_core::{Event, Failure, Record, RunResult, SweepReport, SweepRun, SweepState};
use plimsoll_device::{private_file, regular_file};
use plimsoll_train::config::RunConfig;
use plimsoll_train::config::grid::{grid, runs};
use plimsoll_train::files::atomic;
use plimsoll_train::resolve::RunRequest;
use plimsoll_watch::text::shell_word;
use std::fs::{self, File, TryLockError};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Number of restarts of a run that ended early, without `--retries`.
const DEFAULT_RETRIES: u32 = 2;

/// Longest time that a resumed sweep waits for processes that still train since its interruption. They finish their
/// step, save and end.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(600);

/// Folder of a sweep, locked against use by another sweep.
pub struct SweepFolder {
    path: PathBuf,
    _lock: File,
}

/// Progress of a run according to its run folder.
#[derive(Default)]
pub struct RunProgress {
    /// Number of finished steps.
    pub steps: u64,
    /// Step of the newest checkpoint, from which the run would resume; 0 before the first.
    pub saved_step: u64,
    /// Training loss of the last step; `None` before the first one.
    pub loss: Option<f64>,
    /// Loss of the last evaluation; `None` before the first one.
    pub eval_loss: Option<f64>,
    /// Number of recoveries, which finish a step after an out-of-memory error or adapt to a changed load line.
    pub recoveries: u64,
    /// Result of the run; `None` while it is under way, and after a crash.
    pub result: Option<RunResult>,
}

/// Builds the configuration of each run with the run's name: every run file at every combination of the values of
/// `--set`.
///
/// # Errors
/// An invalid run file or grid.
pub fn requested_runs(args: &SweepArgs) -> Result<Vec<(String, RunConfig)>, Failure> {
    let files: Vec<&Path> = args.runs.iter().map(PathBuf::as_path).collect();
    runs(&files, &args.settings(), &grid(&args.set)?)
}

/// A new or resumed sweep.
pub struct OpenedSweep {
    /// Folder of the sweep.
    pub folder: SweepFolder,
    /// Configurations of the runs, in the order of the report.
    pub configs: Vec<RunConfig>,
    /// Report on all runs.
    pub report: SweepReport,
}

impl SweepFolder {
    /// Creates the folder of a new sweep and writes all run files.
    ///
    /// # Errors
    /// The folder already holds a sweep or cannot be written.
    pub fn create(
        args: &SweepArgs,
        named: Vec<(String, RunConfig)>,
        request: &RunRequest,
        devices: &SharedDevices,
    ) -> Result<OpenedSweep, Failure> {
        let path = args.dir.clone().unwrap_or_else(next_free_folder);
        if path.join("sweep.json").exists() {
            let message = format!("--dir: {} already holds a sweep", path.display());
            return Err(Failure::input(message)
                .hint(format!("to continue it: plimsoll sweep --resume {}", shell_word(&path.to_string_lossy())))
                .hint("to start another sweep: --dir runs/another"));
        }
        fs::create_dir_all(&path).map_err(|error| cannot("make", &path, &error))?;
        let folder = SweepFolder::lock(&path)?;
        let report = SweepReport {
            version: SweepReport::VERSION,
            requested_devices: request.run.devices.clone(),
            requested_budget: args.budget.clone(),
            retries: args.retries.unwrap_or(DEFAULT_RETRIES),
            workers: args.workers,
            devices: devices.initial_report(),
            runs: named.iter().map(|(name, _)| SweepRun::new(name)).collect(),
            predicted_seconds: 0.0,
            lower_bound_seconds: 0.0,
            seconds: 0.0,
        };
        let mut configs = Vec::new();
        for (name, mut config) in named {
            config.run.dir = folder.path.join(&name).to_string_lossy().into_owned();
            // The device of a run must not change its precision.
            config.decide_precision(devices.first_kind());
            write(&folder.run_file(&name), config.to_toml().as_bytes())?;
            configs.push(config);
        }
        folder.write(&report, None)?;
        Ok(OpenedSweep { folder, configs, report })
    }

    /// Opens the folder of an interrupted sweep. Waits for training processes of that sweep that have not ended yet.
    ///
    /// # Errors
    /// The folder does not hold a sweep or is in use.
    pub fn resume(path: &Path, mut report: SweepReport) -> Result<OpenedSweep, Failure> {
        let folder = SweepFolder::lock(path)?;
        let mut configs = Vec::new();
        for row in &mut report.runs {
            let mut config = RunConfig::load(Some(&folder.run_file(&row.name)), &[])?;
            // The user may have moved the folder.
            config.run.dir = folder.path.join(&row.name).to_string_lossy().into_owned();
            write(&folder.run_file(&row.name), config.to_toml().as_bytes())?;
            configs.push(config);
            folder.wait_until_unlocked(&row.name)?;
            let progress = folder.progress(&row.name);
            let done = progress.result.is_some_and(|result| result.status == plimsoll_core::RunStatus::Done);
            if done && row.state != SweepState::Done {
                // The run ended after the sweep was interrupted.
                (row.state, row.exit) = (SweepState::Done, Some(0));
                (row.steps, row.loss, row.eval_loss) = (progress.steps, progress.loss, progress.eval_loss);
            }
            if row.state != SweepState::Done {
                row.retries = 0;
            }
        }
        Ok(OpenedSweep { folder, configs, report })
    }

    /// Reads the report of the sweep in a folder.
    ///
    /// # Errors
    /// The folder holds no report, or one that cannot be parsed.
    pub fn report(path: &Path) -> Result<SweepReport, Failure> {
        let file = path.join("sweep.json");
        let text = regular_file::read(&file).map_err(|_| {
            Failure::input(format!("{} is not a sweep folder: it has no sweep.json", path.display()))
                .hint("give the folder that --dir named, or runs/sweep")
        })?;
        serde_json::from_slice(&text)
            .map_err(|error| Failure::input(format!("{} cannot be read: {error}", file.display())))
    }

    fn lock(path: &Path) -> Result<SweepFolder, Failure> {
        let path = fs::canonicalize(path).map_err(|error| cannot("find", path, &error))?;
        let name = path.join(".lock");
        let lock = private_file::append(&name).map_err(|error| cannot("write", &name, &error))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            let message = format!("another plimsoll process runs a sweep in {}", path.display());
            return Err(Failure::input(message).hint("wait until it ends, or stop it first"));
        }
        Ok(SweepFolder { path, _lock: lock })
    }

    /// Waits until no process trains in the folder of a run.
    fn wait_until_unlocked(&self, name: &str) -> Result<(), Failure> {
        let began = Instant::now();
        let Ok(log) = regular_file::open(&self.run(name).join("events.jsonl")) else { return Ok(()) };
        while let Err(TryLockError::WouldBlock) = log.try_lock_shared() {
            if began.elapsed() > ORPHAN_TIMEOUT {
                let message = format!("another plimsoll process trains in {}", self.run(name).display());
                return Err(Failure::input(message).hint("stop it first"));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Returns the absolute path of the folder as text.
    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Returns the path of the run file of a run.
    pub fn run_file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.toml"))
    }

    /// Returns the path of the log of a run.
    pub fn log(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.log"))
    }

    /// Returns the path of the run folder of a run.
    pub fn run(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes the report to `sweep.json` and, if given, to the file `also`.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, report: &SweepReport, also: Option<&Path>) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(report).expect("plain data has a JSON form") + "\n";
        write(&self.path.join("sweep.json"), text.as_bytes())?;
        also.map_or(Ok(()), |also| write(also, text.as_bytes()))
    }

    /// Reads the progress of a run from its events and result.
    pub fn progress(&self, name: &str) -> RunProgress {
        let folder = self.run(name);
        let mut progress = RunProgress::default();
        let log = regular_file::open(&folder.join("events.jsonl")).ok().map(BufReader::new);
        for line in log.into_iter().flat_map(BufReader::lines).map_while(Result::ok) {
            let Ok(Record { event, .. }) = Record::from_line(line.as_bytes()) else { continue };
            match event {
                Event::Step { step, loss, .. } => (progress.steps, progress.loss) = (step, Some(loss)),
                Event::Evaluation { loss, .. } => progress.eval_loss = Some(loss).filter(|loss| !loss.is_nan()),
                Event::Checkpoint { step, .. } => progress.saved_step = step,
                Event::Recovery(_) => progress.recoveries += 1,
                _ => {}
            }
        }
        let result = regular_file::read(&folder.join("result.json")).ok();
        progress.result = result.and_then(|text| serde_json::from_slice(&text).ok());
        progress
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    Ok(atomic::write_file(path, bytes)?)
}

/// Returns the failure for a file operation on `path`. `what` is the verb for its message, such as `write`.
fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::input(format!("cannot {what} {}: {error}", path.display()))
        .hint("name a folder that can be written: --dir")
}

/// Returns the first of `runs/sweep`, `runs/sweep-2`, … that holds no sweep.
fn next_free_folder() -> PathBuf {
    let numbered = (2..).map(|number| format!("runs/sweep-{number}"));
    let mut folders = std::iter::once("runs/sweep".to_owned()).chain(numbered).map(PathBuf::from);
    folders.find(|folder| !folder.join("sweep.json").exists()).expect("numbers do not end")
}
