//! Load lines that the user changed while a run was active, stored as `load-lines.json` in the run folder. A resumed run keeps
//! each of them until the run file or a flag gives the device another load line than at the time of the change.

use super::RunRequest;
use crate::files::atomic;
use plimsoll_core::{Budget, Failure};
use plimsoll_device::regular_file;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A change of one load line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct BudgetChange {
    /// The load line in the run file at the time of the change.
    from: Budget,
    /// The load line that the user set.
    to: Budget,
}

fn overrides_path(run_dir: &Path) -> PathBuf {
    run_dir.join("load-lines.json")
}

impl RunRequest {
    /// Returns the load line (the most bytes that it may hold) of a device. The one that the user set while the run was
    /// active comes first, then `own` (the one in `run.devices`), then `memory.budget`.
    pub(crate) fn effective_budget(&self, device: &str, own: Option<Budget>) -> Budget {
        self.budget_overrides.get(device).copied().or(own).unwrap_or(self.memory.device_budget())
    }

    /// Loads the load lines that the user changed before this run was interrupted. A change is dropped if the run file
    /// now gives the device another load line than at the time of the change.
    pub(super) fn load_budget_overrides(&mut self, run_dir: &Path) {
        let text = regular_file::read(&overrides_path(run_dir)).unwrap_or_default();
        let changes: BTreeMap<String, BudgetChange> = serde_json::from_slice(&text).unwrap_or_default();
        let holds = |(device, change): (String, BudgetChange)| {
            let unchanged = self.budget_of(&device) == change.from;
            unchanged.then_some((device, change.to))
        };
        self.budget_overrides = changes.into_iter().filter_map(holds).collect();
    }

    /// Writes the changed load lines to a file in the folder `run_dir`, in place of those stored before. Removes the
    /// file if the user has changed none.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub(crate) fn save_budget_overrides(&self, run_dir: &Path) -> Result<(), Failure> {
        let path = overrides_path(run_dir);
        if !self.budget_overrides.is_empty() {
            let change =
                |(device, &to): (&String, &Budget)| (device.clone(), BudgetChange { from: self.budget_of(device), to });
            let changes: BTreeMap<String, BudgetChange> = self.budget_overrides.iter().map(change).collect();
            let text = serde_json::to_vec_pretty(&changes).expect("plain data has a JSON form");
            return Ok(atomic::write_file(&path, &text)?);
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Failure::input(format!("{}: {error}", path.display()))
                    .hint("delete this file, so that the run does not use outdated load lines"))
            }
            _ => Ok(()),
        }
    }

    /// Returns a note for each changed load line that this run uses.
    pub(crate) fn budget_override_notes(&self) -> Vec<String> {
        self.budget_overrides.iter().map(|(device, &to)| self.budget_override_note(device, to)).collect()
    }

    fn budget_override_note(&self, device: &str, to: Budget) -> String {
        let from = self.budget_of(device);
        format!(
            "the load line of {device} is {to}, as set while the run was active (its run file says {from}); use \
             --budget or --devices to replace it"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunConfig;
    use plimsoll_core::Bytes;

    #[test]
    fn budget_override_holds_until_run_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let to = |gib| Budget::Amount(Bytes::gib(gib));
        let mut run = RunRequest::from(RunConfig::from_settings(&["model.preset=llama-3.2-1b".into()]).unwrap());
        run.run.devices = "cpu,virtual:a=3GiB".into();
        run.budget_overrides = BTreeMap::from([("cpu".to_owned(), to(6)), ("virtual:a".to_owned(), to(2))]);
        run.save_budget_overrides(dir).unwrap();
        let loaded = |run: &RunRequest| {
            let mut run = RunRequest { budget_overrides: BTreeMap::new(), ..run.clone() };
            run.load_budget_overrides(dir);
            run
        };
        assert_eq!(loaded(&run).budget_overrides, run.budget_overrides);
        let lines = (loaded(&run).effective_budget("cpu", Some(to(9))), run.effective_budget("cuda:0", Some(to(9))));
        assert_eq!(lines, (to(6), to(9)));
        let mut edited = run.clone();
        edited.memory.budget = Some(to(4));
        assert_eq!(
            loaded(&edited).budget_overrides.keys().collect::<Vec<_>>(),
            ["virtual:a"],
            "the run file gives the processor another load line"
        );
        edited.run.devices = "cpu,virtual:a=1GiB".into();
        assert!(loaded(&edited).budget_overrides.is_empty());
        loaded(&edited).save_budget_overrides(dir).unwrap();
        assert!(loaded(&run).budget_overrides.is_empty(), "dropped overrides are deleted from the folder");
    }
}
