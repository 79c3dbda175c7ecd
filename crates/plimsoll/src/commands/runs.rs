//! `plimsoll runs`: the runs in a folder, or the champions among them.

use super::report::now;
use crate::args::RunsArgs;
use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_watch::runs::RunList;
use plimsoll_watch::runs::champions::ChampionFile;

/// Prints the runs in a folder, newest first. With `--champions`, updates `champions.json` and prints the champions.
///
/// # Errors
/// The folder cannot be read. With `--champions`, also if `champions.json` cannot be read or written.
pub fn run(args: &RunsArgs) -> Result<Exit, Failure> {
    let (json, text, notes) = if args.champions {
        let (champions, notes) = ChampionFile::update(&args.dir, now())?;
        (champions.json(), champions.text(&args.dir), notes)
    } else {
        let list = RunList::read(&args.dir, now())?;
        (list.json(), list.table(), list.notes)
    };
    match args.json {
        true => output::print_json(&json),
        false => output::print(&text),
    }
    notes.iter().for_each(|note| output::print_note(note));
    Ok(Exit::Done)
}
