//! The folder of a sweep: `sweep.json` (the report, written anew with every change), and for each run `NAME.toml` (the
//! run file, every key written out), `NAME.log` (what its processes complained of) and `NAME/` (the run folder).

use super::places::Places;
use crate::args::SweepArgs;
use plimsoll_core::{Event, Failure, Record, RunResult, SweepReport, SweepRun, SweepState};
use plimsoll_train::config::RunFile;
use plimsoll_train::config::grid::{grid, runs};
use plimsoll_train::files::atomic;
use plimsoll_watch::text::shell_word;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How often a run is started again where nobody says.
const RETRIES: u32 = 2;

/// How long workers that an earlier sweep left may take to stop: a step and a checkpoint.
const LEFT_MOST: Duration = Duration::from_secs(600);

/// A folder that no other sweep uses.
pub struct Folder {
    path: PathBuf,
    _lock: File,
}

/// What a run has left so far.
#[derive(Default)]
pub struct Known {
    /// Steps done.
    pub steps: u64,
    /// Steps of the newest checkpoint: a run goes on from there.
    pub saved: u64,
    /// The training loss of the last step.
    pub loss: Option<f64>,
    /// The loss of the last evaluation.
    pub eval_loss: Option<f64>,
    /// Rungs that were taken while it was under way.
    pub retreats: u64,
    /// How it ended last, where it did not crash.
    pub result: Option<RunResult>,
}

/// The runs that a command asks for, by name.
///
/// # Errors
/// What is wrong with the run files or the grid.
pub fn asked(args: &SweepArgs) -> Result<Vec<(String, RunFile)>, Failure> {
    let files: Vec<&Path> = args.runs.iter().map(PathBuf::as_path).collect();
    runs(&files, &args.settings(), &grid(&args.set)?)
}

type Opened = (Folder, Vec<RunFile>, SweepReport);

impl Folder {
    /// A new sweep of these runs on such devices: all run files, written out.
    ///
    /// # Errors
    /// What is wrong with the folder.
    pub fn make(
        args: &SweepArgs,
        named: Vec<(String, RunFile)>,
        devices: &RunFile,
        places: &Places,
    ) -> Result<Opened, Failure> {
        let path = args.dir.clone().unwrap_or_else(next_free);
        if path.join("sweep.json").exists() {
            let message = format!("--dir: {} holds a sweep already", path.display());
            return Err(Failure::input(message)
                .hint(format!("go on with it: plimsoll sweep --resume {}", shell_word(&path.to_string_lossy())))
                .hint("or start anew elsewhere: --dir runs/another"));
        }
        fs::create_dir_all(&path).map_err(|error| cannot("make", &path, &error))?;
        let folder = Folder::lock(&path)?;
        let report = SweepReport {
            version: SweepReport::VERSION,
            asked: devices.run.devices.clone(),
            retries: args.retries.unwrap_or(RETRIES),
            workers: args.workers,
            devices: places.reported(),
            runs: named.iter().map(|(name, _)| SweepRun::new(name)).collect(),
            predicted_seconds: 0.0,
            bound_seconds: 0.0,
            seconds: 0.0,
        };
        let mut all = Vec::new();
        for (name, mut file) in named {
            file.run.dir = folder.path.join(&name).to_string_lossy().into_owned();
            // Where a run happens to run must not decide what it computes.
            file.decide_precision(places.first());
            write(&folder.run_file(&name), file.to_toml().as_bytes())?;
            all.push(file);
        }
        folder.write(&report, None)?;
        Ok((folder, all, report))
    }

    /// A sweep that goes on. Workers of the one before that are still at it are waited for.
    ///
    /// # Errors
    /// A folder that is no sweep's, or is in use.
    pub fn again(path: &Path, mut report: SweepReport) -> Result<Opened, Failure> {
        let folder = Folder::lock(path)?;
        let mut files = Vec::new();
        for row in &mut report.runs {
            let mut file = RunFile::load(Some(&folder.run_file(&row.name)), &[])?;
            // The folder may have been moved since.
            file.run.dir = folder.path.join(&row.name).to_string_lossy().into_owned();
            write(&folder.run_file(&row.name), file.to_toml().as_bytes())?;
            files.push(file);
            folder.wait_for(&row.name)?;
            let known = folder.known(&row.name);
            let done = known.result.is_some_and(|result| result.status == plimsoll_core::RunStatus::Done);
            if done && row.state != SweepState::Done {
                // It ended when nobody looked.
                (row.state, row.exit) = (SweepState::Done, Some(0));
                (row.steps, row.loss, row.eval_loss) = (known.steps, known.loss, known.eval_loss);
            }
            if row.state != SweepState::Done {
                row.retries = 0;
            }
        }
        Ok((folder, files, report))
    }

    /// The report of the sweep in a folder.
    ///
    /// # Errors
    /// There is none.
    pub fn report(path: &Path) -> Result<SweepReport, Failure> {
        let file = path.join("sweep.json");
        let text = fs::read(&file).map_err(|_| {
            Failure::input(format!("{} is no folder of a sweep: it has no sweep.json", path.display()))
                .hint("name the folder that the sweep named when it started")
        })?;
        serde_json::from_slice(&text)
            .map_err(|error| Failure::input(format!("{} cannot be read: {error}", file.display())))
    }

    fn lock(path: &Path) -> Result<Folder, Failure> {
        let path = fs::canonicalize(path).map_err(|error| cannot("find", path, &error))?;
        let name = path.join(".lock");
        let lock = OpenOptions::new().create(true).append(true).open(&name);
        let lock = lock.map_err(|error| cannot("write", &name, &error))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            let message = format!("another plimsoll sweeps in {} now", path.display());
            return Err(Failure::input(message).hint("wait until it ends, or stop it first"));
        }
        Ok(Folder { path, _lock: lock })
    }

    /// Waits until no program trains in a run's folder.
    fn wait_for(&self, name: &str) -> Result<(), Failure> {
        let began = Instant::now();
        let Ok(log) = File::open(self.run(name).join("events.jsonl")) else { return Ok(()) };
        while let Err(TryLockError::WouldBlock) = log.try_lock_shared() {
            if began.elapsed() > LEFT_MOST {
                let message = format!("another plimsoll trains in {}", self.run(name).display());
                return Err(Failure::input(message).hint("stop it first"));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The folder, as a command names it.
    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The run file of a run.
    pub fn run_file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.toml"))
    }

    /// What the processes of a run complained of.
    pub fn log(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.log"))
    }

    /// The folder of a run.
    pub fn run(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes the report; to `also`, too.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, report: &SweepReport, also: Option<&Path>) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(report).expect("plain data has a JSON form") + "\n";
        write(&self.path.join("sweep.json"), text.as_bytes())?;
        also.map_or(Ok(()), |also| write(also, text.as_bytes()))
    }

    /// What a run has left so far.
    pub fn known(&self, name: &str) -> Known {
        let folder = self.run(name);
        let mut known = Known::default();
        for line in fs::read_to_string(folder.join("events.jsonl")).unwrap_or_default().lines() {
            let Ok(Record { event, .. }) = serde_json::from_str(line) else { continue };
            match event {
                Event::Step { step, loss, .. } => (known.steps, known.loss) = (step, Some(loss)),
                Event::Evaluation { loss, .. } => known.eval_loss = Some(loss),
                Event::Checkpoint { step, .. } => known.saved = step,
                Event::Retreat(_) => known.retreats += 1,
                _ => {}
            }
        }
        known.result = fs::read(folder.join("result.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
        known
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    Ok(atomic::write_file(path, bytes)?)
}

fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::input(format!("cannot {what} {}: {error}", path.display()))
        .hint("name a folder that can be written: --dir")
}

/// `runs/sweep`, `runs/sweep-2`, and so on.
fn next_free() -> PathBuf {
    let numbered = (2..).map(|number| format!("runs/sweep-{number}"));
    let mut folders = std::iter::once("runs/sweep".to_owned()).chain(numbered).map(PathBuf::from);
    folders.find(|folder| !folder.join("sweep.json").exists()).expect("numbers do not end")
}
