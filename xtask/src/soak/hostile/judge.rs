//! The verdict about one start: its exit code, its message, the files of the user and the result.

use super::process::Ended;
use super::scenario::Oracle;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Codes that the documentation lists for a command that meets hostile input.
const DOCUMENTED: [i32; 4] = [0, 2, 3, 4];
/// Largest relative difference of losses of two runs that differ in the order of sums.
const LOSS_DISTANCE: f64 = 1e-3;
/// Size in bytes of the largest file that is compared byte by byte. Larger files are compared by size and time of
/// modification only.
const COMPARED_BYTES: u64 = 4 << 20;
/// Largest permitted output on stderr.
const MESSAGE_BYTES: usize = 64 << 10;

/// Folders in which commands may write, and the outputs of the soak itself.
const OUTPUTS: [&str; 10] =
    ["out", "run", "runs", "sweep", "swept", "merged", "cache", "temporary", "outputs", "special"];

/// Result of a run: the loss of the last step, and the bytes of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct RunOutput {
    loss: f64,
    model: Vec<u8>,
}

impl RunOutput {
    /// Reads the result in a run folder; `None` if there is none.
    pub fn read(run: &Path) -> Option<RunOutput> {
        let result: Value = serde_json::from_slice(&fs::read(run.join("result.json")).ok()?).ok()?;
        let model = fs::read(run.join("model/model.safetensors")).ok()?;
        Some(RunOutput { loss: result["loss"]["last"].as_f64()?, model })
    }

    /// Returns the difference to the output of the undamaged run that the oracle does not permit; `None` if there is
    /// none.
    pub fn difference(&self, undamaged: &RunOutput, oracle: Oracle) -> Option<String> {
        let apart = (self.loss - undamaged.loss).abs() / undamaged.loss.abs();
        match oracle {
            Oracle::Any => None,
            Oracle::Near => {
                // NaN counts as different.
                let near = apart <= LOSS_DISTANCE;
                (!near).then(|| format!("the last loss is {} instead of {}", self.loss, undamaged.loss))
            }
            Oracle::Same => (self != undamaged)
                .then(|| format!("another model, its last loss {} instead of {}", self.loss, undamaged.loss)),
        }
    }
}

/// Returns the reason why an end is not as documented; `None` if it is. `failure` is the reason why the command has to
/// fail; `None` if it need not.
pub fn wrong_end(ended: &Ended, failure: Option<&str>) -> Option<String> {
    let said = first_lines(&ended.stderr);
    match ended.code() {
        Some(0) if failure.is_some() => failure.map(|reason| format!("exit 0 although {reason}")),
        Some(code) if DOCUMENTED.contains(&code) => None,
        _ => Some(format!("{}: {said}", ended.in_words())),
    }
}

/// Returns the reason why a message is not as documented; `None` if it is. A refusal contains one of `names`, if there
/// are any.
pub fn wrong_message(ended: &Ended, names: &[String]) -> Option<String> {
    let Ok(text) = std::str::from_utf8(&ended.stderr) else { return Some("stderr is no UTF-8".into()) };
    let said = first_lines(&ended.stderr);
    if let Some(raw) = text.chars().find(|c| acts_on_terminal(*c)) {
        return Some(format!("{raw:?} on stderr: {said}"));
    }
    if text.contains("panicked") || text.contains("a bug in") {
        return Some(format!("a bug: {said}"));
    }
    if text.len() > MESSAGE_BYTES {
        return Some(format!("{} bytes on stderr: {said}", text.len()));
    }
    let code = ended.code().unwrap_or_default();
    if code == 0 {
        return None;
    }
    let is_message = |line: &str| line.starts_with("error: ") || line.starts_with("stopped: ");
    // A run that stops may tell of it in its summary.
    let is_summary = code == 4 && !ended.stdout.is_empty();
    if !text.lines().any(is_message) && !text.contains("Usage: ") && !is_summary {
        return Some(format!("exit {code} without a message: {said}"));
    }
    let is_named = names.is_empty() || names.iter().any(|name| text.contains(name.as_str()));
    (code == 2 && !is_named).then(|| format!("names none of {names:?}: {said}"))
}

/// Returns the reason why stdout with `--json` is none; `None` if each line is JSON.
pub fn wrong_json(ended: &Ended) -> Option<String> {
    let lines = ended.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let mut values = serde_json::Deserializer::from_slice(&ended.stdout).into_iter::<Value>();
    let wrong = values.find_map(Result::err)?;
    Some(format!("{} lines on stdout that are no JSON: {wrong}", lines.count()))
}

/// Returns whether a character acts on a terminal: a control character, or an invisible one that changes the text.
fn acts_on_terminal(c: char) -> bool {
    let bidi = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
    bidi || c.is_control() && !matches!(c, '\n' | '\t')
}

/// Returns the beginning of a text on one line, for a report.
fn first_lines(bytes: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(bytes).chars().take(400).collect();
    text.trim().escape_debug().to_string()
}

/// State of one file of the user.
#[derive(Debug, PartialEq)]
enum FileState {
    Bytes(Vec<u8>),
    Large(u64, Option<SystemTime>),
    Link(PathBuf),
    Special,
}

/// The files of the user in the folder of an input.
#[derive(Debug, PartialEq)]
pub struct UserFiles(BTreeMap<PathBuf, FileState>);

impl UserFiles {
    /// Reads all files outside the folders in which commands may write.
    ///
    /// # Errors
    /// Fails if a folder cannot be read.
    pub fn read(folder: &Path) -> anyhow::Result<UserFiles> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default();
            if !OUTPUTS.iter().any(|output| name == *output) {
                add(&path, &mut files)?;
            }
        }
        Ok(UserFiles(files))
    }

    /// Returns the first file that is missing or different in `after`; `None` if all are as before. New files are
    /// permitted.
    pub fn changed(&self, after: &UserFiles) -> Option<String> {
        let changed = self.0.iter().find(|(path, state)| after.0.get(*path) != Some(*state))?;
        let name = changed.0.file_name().unwrap_or_default().display();
        Some(format!("{name} was {}, and is {}", brief(Some(changed.1)), brief(after.0.get(changed.0))))
    }
}

fn brief(state: Option<&FileState>) -> String {
    match state {
        Some(FileState::Bytes(bytes)) => {
            format!("{} bytes {:?}", bytes.len(), first_lines(&bytes[..bytes.len().min(40)]))
        }
        Some(other) => format!("{other:?}"),
        None => "missing".into(),
    }
}

fn add(path: &Path, files: &mut BTreeMap<PathBuf, FileState>) -> anyhow::Result<()> {
    let Ok(metadata) = path.symlink_metadata() else { return Ok(()) };
    let file_type = metadata.file_type();
    if file_type.is_dir() {
        for entry in fs::read_dir(path)? {
            add(&entry?.path(), files)?;
        }
        return Ok(());
    }
    let state = if file_type.is_symlink() {
        FileState::Link(fs::read_link(path)?)
    } else if file_type.is_fifo() || file_type.is_socket() {
        FileState::Special
    } else if metadata.len() > COMPARED_BYTES {
        FileState::Large(metadata.len(), metadata.modified().ok())
    } else {
        FileState::Bytes(fs::read(path).unwrap_or_default())
    };
    files.insert(path.to_owned(), state);
    Ok(())
}
