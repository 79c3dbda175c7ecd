//! Arguments of `report` and `runs`, which show runs after their end.

use clap::Args;
use std::path::PathBuf;

/// Arguments of `plimsoll report`, which writes the report of a run.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll report runs/my-llama
  plimsoll report runs/my-llama --markdown >> notes.md
  plimsoll report runs/my-llama --json | jq .devices[0].total
  plimsoll report runs/my-llama --advise

The page needs no network and no script. Runs that are under way, stopped or
died have reports, too.")]
pub struct ReportArgs {
    /// Folder of the run
    #[arg(value_name = "RUN_DIR")]
    pub run_dir: PathBuf,
    /// Print the report as Markdown, and write no file
    #[arg(long, conflicts_with = "json")]
    pub markdown: bool,
    /// Print the report as JSON, and write no file
    #[arg(long)]
    pub json: bool,
    /// Also plan changes of settings that make the run faster, which takes some seconds
    #[arg(long)]
    pub advise: bool,
}

/// Arguments of `plimsoll runs`, which lists runs.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll runs
  plimsoll runs --json | jq '.runs[] | select(.state == \"died\") | .folder'
  plimsoll runs --champions

Without --champions the command only reads. A champion is the fastest completed
run among those with the same model, method, precision, sequence length and
devices. champions.json keeps it when its folder is deleted.")]
pub struct RunsArgs {
    /// Folder that holds the run folders
    #[arg(value_name = "DIR", default_value = "runs")]
    pub dir: PathBuf,
    /// Update DIR/champions.json with the completed runs, and print the champions
    #[arg(long)]
    pub champions: bool,
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}
