//! TensorBoard event files of a run (`watch.tensorboard`): `RUN_DIR/tensorboard/events.out.tfevents.…`.
//!
//! Each start of a run writes a file of its own. The file says at which step it continues, so that TensorBoard drops the
//! steps of earlier files that are repeated. An event is one write, so a killed run leaves a file that can be read up to
//! the last complete event.
//!
//! | name | number |
//! |---|---|
//! | `train/loss`, `train/grad_norm`, `train/learning_rate`, `train/epoch` | as in the Trainer of Hugging Face |
//! | `train/train_tokens_per_second` | tokens of the step, padding included, by its seconds |
//! | `eval/loss`, `eval/runtime`, `eval/exact_match` | an evaluation, its seconds, its share of right answers |
//! | `memory/DEVICE/held_bytes`, `…/measured_peak_bytes` | measured bytes of the run on a device |
//! | `memory/DEVICE/predicted_peak_bytes`, `…/load_line_bytes` | the plan of that moment |

use super::tfrecord::{Content, Scalar, record};
use crate::snapshot::run_folder::StoredFile;
use plimsoll_core::{Bytes, CompletionFigures, Event, HeldMemory, Plan, PreferenceFigures, Record, RoundFigures};
use plimsoll_device::private_file;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Folder of the event files in a run folder.
pub const FOLDER: &str = "tensorboard";
/// Part of a file's name by which TensorBoard recognizes event files.
const NAME_PREFIX: &str = "events.out.tfevents.";
/// End of the name of our files.
const NAME_SUFFIX: &str = ".plimsoll";

/// Writes the events of a run to an event file.
pub struct TensorBoard {
    folder: PathBuf,
    /// Optimizer steps of one pass over the training data.
    steps_per_epoch: f64,
    /// The plan of the run, for the load lines and the predicted peaks.
    plan: StoredFile<Plan>,
    /// The file; `None` until the first event, and after a failed write.
    file: Option<File>,
    /// Whether a write has failed, after which nothing more is written.
    is_off: bool,
}

impl TensorBoard {
    /// Creates the writer for a run folder. `steps_per_epoch` is the number of optimizer steps of one pass over the
    /// training data. The file is created with the first event, because the run folder may not exist yet.
    pub fn new(run_folder: &Path, steps_per_epoch: f64) -> TensorBoard {
        TensorBoard {
            folder: run_folder.join(FOLDER),
            steps_per_epoch,
            plan: StoredFile::new(run_folder.join("plan.json")),
            file: None,
            is_off: false,
        }
    }

    /// Writes an event, as far as it has numbers. After a failed write, writes nothing more.
    ///
    /// # Errors
    /// The first failed write, as a warning.
    pub fn take(&mut self, event: &Record) -> Result<(), String> {
        if self.is_off {
            return Ok(());
        }
        self.write(event).map_err(|error| {
            (self.is_off, self.file) = (true, None);
            format!("{}: {error}; the run goes on without TensorBoard's event files", self.folder.display())
        })
    }

    fn write(&mut self, Record { time, event, .. }: &Record) -> io::Result<()> {
        if let Some(step) = restarted_at(event) {
            return self.append(&record(*time, step, &Content::Restart), *time);
        }
        let (step, scalars) = match event {
            Event::Step { step, .. } => (*step, self.scalars_of_step(event)),
            Event::Evaluation { step, loss, reward, exact_match, seconds, .. } => {
                let known = [
                    ("eval/loss", Some(*loss).filter(|loss| !loss.is_nan())),
                    ("eval/runtime", Some(*seconds)),
                    ("eval/exact_match", *exact_match),
                    ("eval/reward", *reward),
                ];
                (*step, known.into_iter().filter_map(|(tag, value)| Some(scalar(tag, value?))).collect())
            }
            Event::Round { step, figures, .. } => (*step, scalars_of_round(figures)),
            Event::Preferences { step, evaluation, figures } => {
                (*step, scalars_of_preferences(if *evaluation { "eval" } else { "train" }, figures))
            }
            _ => return Ok(()),
        };
        self.append(&record(*time, step, &Content::Scalars(&scalars)), *time)
    }

    /// Appends a record in one write. Creates the file before the first one.
    fn append(&mut self, bytes: &[u8], time: f64) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let mut file = create_file(&self.folder, time)?;
                file.write_all(&record(time, 0, &Content::FileVersion))?;
                self.file.insert(file)
            }
        };
        file.write_all(bytes)
    }

    /// Returns the numbers of a step. A step without labels has no loss.
    fn scalars_of_step(&mut self, event: &Event) -> Vec<Scalar> {
        let Event::Step { step, loss, norm, learning_rate, tokens, seconds, memory, .. } = event else { return vec![] };
        let mut scalars = vec![
            scalar("train/grad_norm", *norm),
            scalar("train/learning_rate", *learning_rate),
            scalar("train/epoch", *step as f64 / self.steps_per_epoch),
            scalar("train/train_tokens_per_second", *tokens as f64 / seconds),
        ];
        if !loss.is_nan() {
            scalars.insert(0, scalar("train/loss", *loss));
        }
        if memory.is_some() {
            self.plan.refresh();
        }
        let plan = self.plan.content();
        scalars.extend(memory.iter().flatten().flat_map(|held| scalars_of_memory(held, plan)));
        scalars
    }
}

/// Returns the rewards of pairs of answers, with the names of TRL.
fn scalars_of_preferences(of: &str, figures: &PreferenceFigures) -> Vec<Scalar> {
    let named = [
        ("chosen", figures.chosen_reward),
        ("rejected", figures.rejected_reward),
        ("accuracies", figures.accuracy),
        ("margins", figures.margin()),
    ];
    named.map(|(name, value)| scalar(&format!("{of}/rewards/{name}"), value)).into()
}

/// Returns the figures of sampled completions, with the names of TRL. Those that are unknown are left out.
fn scalars_of_round(figures: &RoundFigures) -> Vec<Scalar> {
    let CompletionFigures { mean_length, clipped_ratio, .. } = figures.completions;
    let named = [
        ("train/reward", Some(figures.reward)),
        ("train/reward_std", Some(figures.reward_std)),
        ("train/frac_reward_zero_std", Some(figures.frac_reward_zero_std)),
        ("train/kl", figures.kl),
        ("train/entropy", figures.entropy),
        ("train/clip_ratio/region_mean", figures.clip_ratio),
        ("train/completions/mean_length", Some(mean_length)),
        ("train/completions/clipped_ratio", Some(clipped_ratio)),
    ];
    let known = named.into_iter().filter_map(|(tag, value)| Some((tag.to_owned(), value?)));
    let rewards = figures.rewards.iter().map(|(name, mean)| (format!("train/rewards/{name}/mean"), *mean));
    known.chain(rewards).filter(|(_, value)| !value.is_nan()).map(|(tag, value)| scalar(&tag, value)).collect()
}

/// Returns the memory of a device, with its plan and its load line, as far as they are known.
fn scalars_of_memory(held: &HeldMemory, plan: Option<&Plan>) -> Vec<Scalar> {
    let planned = plan.and_then(|plan| plan.devices.iter().find(|device| device.name == held.device));
    let known = [
        ("held_bytes", Some(held.held_bytes)),
        ("measured_peak_bytes", held.peak_bytes),
        ("predicted_peak_bytes", planned.map(|device| device.peak_bytes)),
        ("load_line_bytes", planned.map(|device| device.budget_bytes)),
    ];
    let named = |(name, bytes): (&str, Option<Bytes>)| {
        bytes.map(|bytes| scalar(&format!("memory/{}/{name}", held.device), bytes.0 as f64))
    };
    known.into_iter().filter_map(named).collect()
}

/// Returns a number with its name.
fn scalar(tag: &str, value: f64) -> Scalar {
    Scalar { tag: tag.to_owned(), value: value as f32 }
}

/// Returns the step from which on earlier events no longer count, if the run starts, or goes back to a checkpoint.
fn restarted_at(event: &Event) -> Option<u64> {
    match event {
        Event::Start { step, .. } => Some(*step),
        Event::DeviceLost { resumed_from_step: Some(step), .. } => Some(step.saturating_add(1)),
        _ => None,
    }
}

/// Creates the file of a start at `time`, in seconds since the Unix epoch. TensorBoard reads files in the order of their
/// names, so the name is later than those of earlier starts.
fn create_file(folder: &Path, time: f64) -> io::Result<File> {
    private_file::make_folder(folder)?;
    let mut stamp = time.max(0.0) as u64;
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        let earlier = name.to_str().and_then(stamp_of);
        stamp = earlier.map_or(stamp, |earlier| stamp.max(earlier.saturating_add(1)));
    }
    private_file::create(&folder.join(format!("{NAME_PREFIX}{stamp:010}{NAME_SUFFIX}")))
}

/// Returns the seconds that the name of an event file holds; `None` for other files.
fn stamp_of(name: &str) -> Option<u64> {
    name.strip_prefix(NAME_PREFIX)?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::tests::{start, step};
    use plimsoll_core::EVENTS_VERSION;
    use std::fs;

    fn at(time: f64, event: Event) -> Record {
        Record { version: EVENTS_VERSION, time, event }
    }

    /// Returns the names of the event files of a run, in order, with their contents.
    fn files(run: &Path) -> Vec<(String, Vec<u8>)> {
        let entries = fs::read_dir(run.join(FOLDER)).into_iter().flatten().map(Result::unwrap);
        let read = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
        let mut files: Vec<(String, Vec<u8>)> = entries.map(read).collect();
        files.sort();
        files
    }

    fn contains(bytes: &[u8], part: &[u8]) -> bool {
        bytes.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn each_start_writes_a_later_file() {
        let run = tempfile::tempdir().unwrap();
        for first in [1, 11] {
            let mut log = TensorBoard::new(run.path(), 4.0);
            log.take(&at(1_700_000_000.5, start(20))).unwrap();
            log.take(&at(1_700_000_001.5, step(first, 0.1))).unwrap();
        }
        let files = files(run.path());
        let names: Vec<&str> = files.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["events.out.tfevents.1700000000.plimsoll", "events.out.tfevents.1700000001.plimsoll"]);
        for (_, bytes) in &files {
            assert!(bytes.starts_with(&record(1_700_000_000.5, 0, &Content::FileVersion)));
            assert!(contains(bytes, &record(1_700_000_000.5, 1, &Content::Restart)));
        }
    }

    #[test]
    fn step_without_labels_has_no_loss() {
        let run = tempfile::tempdir().unwrap();
        let mut log = TensorBoard::new(run.path(), 4.0);
        let mut unlabelled = step(1, 0.1);
        let Event::Step { loss, .. } = &mut unlabelled else { panic!("{unlabelled:?}") };
        *loss = f64::NAN;
        log.take(&at(1.0, unlabelled)).unwrap();
        let bytes = files(run.path()).remove(0).1;
        assert!(contains(&bytes, b"train/grad_norm") && !contains(&bytes, b"train/loss"));
        log.take(&at(1.0, step(2, 0.1))).unwrap();
        assert!(contains(&files(run.path()).remove(0).1, b"train/loss"));
    }

    #[test]
    fn return_to_a_checkpoint_replaces_later_steps() {
        let lost = Event::DeviceLost {
            step: 9,
            device: "virtual:a".to_owned(),
            reason: "silent".to_owned(),
            remaining_devices: vec![],
            resumed_from_step: Some(6),
        };
        assert_eq!(restarted_at(&lost), Some(7));
        let Event::DeviceLost { step, device, reason, remaining_devices, .. } = lost else { panic!() };
        let kept = Event::DeviceLost { step, device, reason, remaining_devices, resumed_from_step: None };
        assert_eq!(restarted_at(&kept), None);
    }

    #[test]
    fn unwritable_folder_is_warned_about_once() {
        let run = tempfile::tempdir().unwrap();
        fs::write(run.path().join(FOLDER), "no folder").unwrap();
        let mut log = TensorBoard::new(run.path(), 4.0);
        let warning = log.take(&at(1.0, start(20))).unwrap_err();
        assert!(warning.contains("/tensorboard: ") && warning.contains("the run goes on without"), "{warning}");
        fs::remove_file(run.path().join(FOLDER)).unwrap();
        assert_eq!(log.take(&at(2.0, step(1, 0.1))), Ok(()));
        assert!(files(run.path()).is_empty(), "it stays off");
    }
}
