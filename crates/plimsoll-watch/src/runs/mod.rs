//! The runs in a folder: [`RunList`], newest first, and the best completed ones ([`champions`]).

pub mod champions;

use crate::report::Report;
use crate::snapshot::RunState;
use crate::snapshot::run_folder::RunFolder;
use crate::text::{columns, count, excerpt};
use champions::ChampionFile;
use plimsoll_core::{Bytes, Failure, Parallelism};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Version of the JSON form of [`RunList`]. It changes when a field changes its meaning or is removed.
pub const RUNS_VERSION: u32 = 1;
/// Most folders that are looked at.
const MAX_FOLDERS: usize = 20_000;

/// The runs in a folder. Unknown values are `null`, never 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunList {
    /// Version of this format.
    pub version: u32,
    /// The folder that holds the runs.
    pub folder: String,
    /// The runs, newest first.
    pub runs: Vec<RunRow>,
    /// Runs and files that cannot be read, each with the reason.
    pub notes: Vec<String>,
}

/// A run in few figures. They are those of its [`Report`].
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunRow {
    /// Folder of the run.
    pub folder: String,
    /// Whether the run is under way, and how it ended.
    pub state: RunState,
    /// Name of the model; `None` without a readable `run.toml`.
    pub model: Option<String>,
    /// Names of the devices that train.
    pub devices: Vec<String>,
    /// Whether any of them is simulated; speeds are then simulated.
    pub simulated: bool,
    /// The parallelism; `None` for a single device.
    pub parallelism: Option<Parallelism>,
    /// Number of completed steps.
    pub step: u64,
    /// Number of all steps; `None` if the length of the run is given in hours.
    pub steps: Option<u64>,
    /// Loss of the newest step.
    pub loss: Option<f64>,
    /// Loss of the newest evaluation.
    pub eval_loss: Option<f64>,
    /// Measured tokens (including padding) per second.
    pub tokens_per_second: Option<f64>,
    /// Largest measured peak of a device.
    pub measured_peak_bytes: Option<Bytes>,
    /// The device with that peak.
    pub peak_device: Option<String>,
    /// Time of the first event, in seconds since the Unix epoch.
    pub started_at: Option<f64>,
    /// Time of the newest event, in seconds since the Unix epoch.
    pub newest_at: Option<f64>,
    /// Whether `champions.json` lists this run.
    pub champion: bool,
}

impl RunList {
    /// Lists the runs in a folder, without changing anything. `at` is the present time, in seconds since the Unix epoch.
    ///
    /// # Errors
    /// The folder cannot be read, or has too many entries.
    pub fn read(folder: &Path, at: f64) -> Result<RunList, Failure> {
        let (champions, mut notes) = match ChampionFile::read(folder) {
            Ok(champions) => (champions, vec![]),
            Err(failure) => (ChampionFile::default(), vec![failure.message]),
        };
        let mut runs = Vec::new();
        for run in open_runs(folder)? {
            match run {
                Ok(run) => runs.push((last_change(&run), row(&run, &champions, at))),
                Err(failure) => notes.push(failure.message),
            }
        }
        runs.sort_by(|(one, one_row), (other, other_row)| {
            other.total_cmp(one).then_with(|| one_row.folder.cmp(&other_row.folder))
        });
        let runs = runs.into_iter().map(|(_, row)| row).collect();
        Ok(RunList { version: RUNS_VERSION, folder: folder.display().to_string(), runs, notes })
    }

    /// Returns the list as a JSON object on several lines.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data has a JSON form")
    }

    /// Returns the list as a table.
    pub fn table(&self) -> String {
        if self.runs.is_empty() {
            return format!("no runs in {}\n", self.folder);
        }
        let headings =
            ["run", "state", "model", "devices", "parallelism", "steps", "loss", "eval loss", "tokens/s", "peak"];
        let mut rows = vec![headings.map(str::to_owned).to_vec()];
        rows.extend(self.runs.iter().map(cells));
        let mut text = columns(&rows);
        if self.runs.iter().any(|run| run.champion) {
            text += "* champion: the fastest completed run of its kind (plimsoll runs --champions)\n";
        }
        text
    }
}

/// Returns the cells of a run in the table.
fn cells(run: &RunRow) -> Vec<String> {
    let unknown = || "-".to_owned();
    let loss = |loss: Option<f64>| loss.map_or_else(unknown, |loss| format!("{loss:.4}"));
    let simulated = if run.simulated { " (simulated)" } else { "" };
    let mark = if run.champion { " *" } else { "" };
    vec![
        format!("{}{mark}", excerpt(&run.folder)),
        match run.state {
            RunState::Died => "died".to_owned(),
            state => state.describe().to_owned(),
        },
        run.model.as_deref().map_or_else(unknown, excerpt),
        if run.devices.is_empty() { unknown() } else { excerpt(&run.devices.join(",")) },
        run.parallelism.map_or_else(unknown, |parallelism| parallelism.to_string()),
        run.steps.map_or_else(|| run.step.to_string(), |steps| format!("{}/{steps}", run.step)),
        loss(run.loss),
        loss(run.eval_loss),
        run.tokens_per_second.map_or_else(unknown, |rate| format!("{}{simulated}", count(rate))),
        run.measured_peak_bytes.map_or_else(unknown, |peak| peak.to_string()),
    ]
}

/// Returns the time of the newest event of a run; without events, that of the last change of its folder. In seconds since
/// the Unix epoch.
fn last_change(run: &RunFolder) -> f64 {
    let changed = || {
        let modified = run.path().metadata().and_then(|metadata| metadata.modified()).ok()?;
        modified.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64())
    };
    run.events.newest_time.or_else(changed).unwrap_or(0.0)
}

fn row(run: &RunFolder, champions: &ChampionFile, at: f64) -> RunRow {
    let report = Report::of(run, at);
    let largest = report.devices.iter().max_by_key(|device| device.total.measured_bytes);
    let largest = largest.filter(|device| device.total.measured_bytes.is_some());
    RunRow {
        folder: report.run.folder.clone(),
        state: report.run.state,
        model: report.settings.as_ref().map(|settings| settings.model.clone()),
        devices: report.starts.listed.back().map_or(vec![], |start| start.devices.clone()),
        simulated: report.run.simulated,
        parallelism: report.plan.as_ref().and_then(|plan| plan.parallelism),
        step: report.run.step,
        steps: report.run.steps,
        loss: report.run.loss,
        eval_loss: report.run.eval_loss,
        tokens_per_second: report.speed.measured_tokens_per_second,
        measured_peak_bytes: largest.and_then(|device| device.total.measured_bytes),
        peak_device: largest.map(|device| device.name.clone()),
        started_at: report.started_at,
        newest_at: report.newest_at,
        champion: champions.lists(&report),
    }
}

/// Returns the runs in a folder, and those one folder deeper, as in a sweep. Each is opened and read when its turn comes,
/// so that few logs are open at a time. A run that cannot be read is an error among them.
///
/// # Errors
/// The folder cannot be read, or has too many entries.
fn open_runs(folder: &Path) -> Result<impl Iterator<Item = Result<RunFolder, Failure>>, Failure> {
    let mut seen = 0;
    let mut paths = Vec::new();
    for path in folders_in(folder, &mut seen)? {
        if RunFolder::open(&path).is_ok() {
            paths.push(path);
            continue;
        }
        // A folder without permission holds no run of this user.
        let below = folders_in(&path, &mut seen).unwrap_or_default();
        paths.extend(below.into_iter().filter(|path| RunFolder::open(path).is_ok()));
    }
    if seen > MAX_FOLDERS {
        let message = format!("{}: has more than {MAX_FOLDERS} entries", folder.display());
        return Err(Failure::input(message).hint("name a folder that holds runs, such as runs"));
    }
    Ok(paths.into_iter().map(|path| read_run(&path)))
}

fn read_run(path: &Path) -> Result<RunFolder, Failure> {
    let mut run = RunFolder::open(path)?;
    run.refresh()?;
    Ok(run)
}

/// Returns the folders in a folder. Counts all entries in `seen`, and stops at the most that are looked at.
///
/// # Errors
/// The folder cannot be read.
fn folders_in(folder: &Path, seen: &mut usize) -> Result<Vec<PathBuf>, Failure> {
    let failed = |error: std::io::Error| {
        Failure::input(format!("{}: cannot list its runs: {error}", folder.display()))
            .hint("name the folder that holds the run folders: plimsoll runs DIR")
    };
    let mut folders = Vec::new();
    for entry in folder.read_dir().map_err(failed)? {
        *seen += 1;
        if *seen > MAX_FOLDERS {
            break;
        }
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            folders.push(path);
        }
    }
    Ok(folders)
}

#[cfg(test)]
mod tests;
