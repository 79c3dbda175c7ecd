//! `plimsoll init`: collects the answers for a run file from flags and questions, plans the run, and writes the file last.
//!
//! | module | content |
//! |---|---|
//! | `answers` | [`Answers`]: everything that the run file says, with the checks of each answer |
//! | `dialogue` | the questions on the terminal |
//! | `out_file` | the checks of the run file's path, and the write |
//! | `run_file` | the text of the run file, with comments |

mod answers;
mod dialogue;
mod out_file;
mod run_file;

use super::hub::with_hub_files;
use super::plan::{plan_text, refusal_for_command};
use super::rates::measure_in_child;
use crate::args::InitArgs;
use crate::command_line::shell_quoted;
use crate::output;
use answers::Answers;
use plimsoll_core::{DeviceKind, Exit, Failure};
use plimsoll_train::config::{FallbackTarget, RunConfig};
use plimsoll_train::planning::{PlannedRun, plan};
use plimsoll_train::resolve::{HubNeed, RunRequest};
use plimsoll_train::session::start::check_new_run;

/// Writes a run file, and prints its plan and the command that starts it. Without `--yes`, asks for each answer that no flag
/// gives.
///
/// # Errors
/// Questions without a terminal, an invalid answer, an existing file, or a run that does not fit. No file is written then.
pub fn run(args: &InitArgs) -> Result<Exit, Failure> {
    if !args.yes && !output::is_interactive() {
        return Err(Failure::input("init asks questions, and its input or its messages are no terminal").hint(
            "give the answers as flags: plimsoll init --yes --model qwen2.5-0.5b --data data.jsonl --out run.toml",
        ));
    }
    let answers = if args.yes { Answers::from_flags(args)? } else { dialogue::ask(args)? };
    out_file::check(&answers.out, args.force)?;
    answers.protected().check(&answers.out)?;
    let text = run_file::text(&answers);
    let name = answers.out.display().to_string();
    let config = RunConfig::parse(&name, &text, &[])?;
    let request = with_hub_files(RunRequest::from(config), HubNeed::Plan, false)?;
    if let Some(failure) = check_new_run(&request).into_iter().next() {
        return Err(failure);
    }
    show_plan(request, &answers)?;
    if !args.yes && !dialogue::confirm(&format!("write {name}?"))? {
        return Err(dialogue::ended());
    }
    out_file::write(&answers.out, &text, args.force)?;
    let words = |command: &str| shell_quoted(&["plimsoll", command, &name].map(str::to_owned));
    output::print(&format!("\nwritten: {name}\nplan:    {}\nstart:   {}\n", words("plan"), words("train")));
    if !args.yes {
        // The file exists now.
        let again = Answers { force: true, ..answers };
        output::print(&format!("again:   {}\n", shell_quoted(&again.command())));
    }
    Ok(Exit::Done)
}

/// Plans the run on its devices and prints the plan. The processor does not take their place: the user would not have
/// chosen it.
///
/// # Errors
/// The run cannot be planned or does not fit. The hints are commands that write a run file which fits.
fn show_plan(mut request: RunRequest, answers: &Answers) -> Result<(), Failure> {
    request.measure_rates = Some(measure_in_child);
    request.config.run.fallback = FallbackTarget::None;
    output::print_progress("planning the run");
    let PlannedRun { resolved, devices, outcome } = plan(&request, false)?;
    if !outcome.plan.fits {
        let refusal = refusal_for_command(&request, &outcome.plan, &answers.command(), |_| None);
        let on_accelerator = devices.iter().any(|device| device.kind != DeviceKind::Cpu);
        return Err(if on_accelerator { refusal.hint("or train on the processor: --devices cpu") } else { refusal });
    }
    output::print(&plan_text(&request, &resolved.model, &devices, &outcome, false));
    Ok(())
}
