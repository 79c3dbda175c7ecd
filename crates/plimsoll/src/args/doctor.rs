//! Arguments of `doctor`.

use super::SettingArgs;
use clap::Args;
use plimsoll_core::Failure;
use plimsoll_train::config::RunConfig;
use plimsoll_train::resolve::RunRequest;
use std::path::PathBuf;

/// Arguments of `plimsoll doctor`, which checks this machine, and a run on it, before the work.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll doctor
  plimsoll doctor run.toml --devices cuda
  plimsoll doctor --json | jq '.findings[] | select(.severity == \"error\")'

Each finding has the cost of the condition and the command that ends it. The
doctor changes nothing. On a machine of a Ray cluster it also checks the nodes,
with a process on each for some seconds. It exits with code 2 if there is an
error, else with 0.")]
pub struct DoctorArgs {
    /// Run file; without it, only the machine is checked
    #[arg(value_name = "RUN.toml")]
    pub run_file: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingArgs,
    /// Print the findings as JSON
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

impl DoctorArgs {
    /// Builds the request of the run from the run file and the flags.
    ///
    /// # Errors
    /// An invalid run file or setting.
    pub fn build_request(&self) -> Result<RunRequest, Failure> {
        Ok(RunConfig::load(self.run_file.as_deref(), &self.settings.settings())?.into())
    }

    /// Checks that flags of a run come with a run file.
    ///
    /// # Errors
    /// A flag of a run without a run file.
    pub fn check(&self) -> Result<(), Failure> {
        let settings = self.settings.settings();
        match (&self.run_file, settings.first()) {
            (None, Some(setting)) => {
                Err(Failure::input(format!("{setting} is a setting of a run, and no run is named"))
                    .hint("name its run file: plimsoll doctor run.toml"))
            }
            _ => Ok(()),
        }
    }
}
