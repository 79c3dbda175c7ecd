//! Load lines that the user has moved while the run was under way: `load-lines.json` in its folder. A run goes on with them
//! until the run file, or a flag, says something else than when they were moved.

use super::RunFile;
use crate::files::atomic;
use plimsoll_core::{Budget, Failure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A line that was moved.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Line {
    /// What the run file said.
    from: Budget,
    /// What the user said then.
    to: Budget,
}

fn path(run_dir: &Path) -> PathBuf {
    run_dir.join("load-lines.json")
}

impl RunFile {
    /// The load line of a device that is named with its `own`: where it was moved, else that, else that of all.
    pub(crate) fn line_of(&self, device: &str, own: Option<Budget>) -> Budget {
        self.moved.get(device).copied().or(own).unwrap_or(self.memory.line())
    }

    /// Takes over the lines that were moved when a run was under way in this folder, those of which this file says now what
    /// it said then.
    pub(super) fn take_moved(&mut self, run_dir: &Path) {
        let text = fs::read(path(run_dir)).unwrap_or_default();
        let lines: BTreeMap<String, Line> = serde_json::from_slice(&text).unwrap_or_default();
        let still = |(device, line): (String, Line)| {
            let holds = self.budget_of(&device) == line.from;
            holds.then_some((device, line.to))
        };
        self.moved = lines.into_iter().filter_map(still).collect();
    }

    /// Writes down the lines that are moved by now, whatever was before.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub(crate) fn keep_moved(&self, run_dir: &Path) -> Result<(), Failure> {
        let path = path(run_dir);
        if !self.moved.is_empty() {
            let line = |(device, &to): (&String, &Budget)| (device.clone(), Line { from: self.budget_of(device), to });
            let lines: BTreeMap<String, Line> = self.moved.iter().map(line).collect();
            let text = serde_json::to_vec_pretty(&lines).expect("plain data has a JSON form");
            return Ok(atomic::write_file(&path, &text)?);
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Failure::input(format!("{}: {error}", path.display()))
                    .hint("take it away, so that nothing follows it"))
            }
            _ => Ok(()),
        }
    }

    /// What is said of each line that a run goes on with.
    pub(crate) fn moved_lines(&self) -> Vec<String> {
        let line = |(device, to): (&String, &Budget)| {
            let said = self.budget_of(device);
            format!(
                "the load line of {device} is {to}, where it was moved while the run was under way (its file says {said}); \
                 --budget or --devices takes that back"
            )
        };
        self.moved.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Bytes;

    #[test]
    fn a_line_that_was_moved_holds_until_the_run_file_says_something_else() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let to = |gib| Budget::Amount(Bytes::gib(gib));
        let mut run = RunFile::from_settings(&["model.preset=llama-3.2-1b".into()]).unwrap();
        run.run.devices = "cpu,virtual:a=3GiB".into();
        run.moved = BTreeMap::from([("cpu".to_owned(), to(6)), ("virtual:a".to_owned(), to(2))]);
        run.keep_moved(dir).unwrap();
        let taken = |run: &RunFile| {
            let mut run = RunFile { moved: BTreeMap::new(), ..run.clone() };
            run.take_moved(dir);
            run
        };
        assert_eq!(taken(&run).moved, run.moved);
        assert_eq!((taken(&run).line_of("cpu", Some(to(9))), run.line_of("cuda:0", Some(to(9)))), (to(6), to(9)));
        let mut edited = run.clone();
        edited.memory.budget = Some(to(4));
        assert_eq!(
            taken(&edited).moved.keys().collect::<Vec<_>>(),
            ["virtual:a"],
            "that of the processor is another one"
        );
        edited.run.devices = "cpu,virtual:a=1GiB".into();
        assert!(taken(&edited).moved.is_empty());
        taken(&edited).keep_moved(dir).unwrap();
        assert!(taken(&run).moved.is_empty(), "it is forgotten");
    }
}
