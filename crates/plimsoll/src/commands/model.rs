//! `plimsoll eval`, and helpers of the commands for trained models.

use super::hub::with_hub_files;
use super::plan::refuse_or_prompt;
use super::rates::measure_in_child;
use crate::args::EvalArgs;
use crate::output;
use plimsoll_core::{Exit, Failure, format_count};
use plimsoll_train::files::AdapterDir;
use plimsoll_train::inference::evaluation::PlannedEvaluation;
use plimsoll_train::resolve::{HubNeed, Resolved};
use serde::Serialize;

/// Computes the loss of a model on data and prints it.
///
/// # Errors
/// An invalid model or data; a model that does not fit.
pub fn eval(args: &EvalArgs) -> Result<Exit, Failure> {
    let mut request = with_hub_files(args.build_request()?, HubNeed::Run, false)?;
    request.measure_rates = Some(measure_in_child);
    let evaluation = PlannedEvaluation::new(request, args.sequence)?;
    let (run_config, resolved, answer) = evaluation.plan();
    if !answer.plan.fits {
        return refuse_or_prompt(run_config, &answer.plan, !args.json);
    }
    print_notes(resolved);
    let loss = evaluation.run()?;
    if args.json {
        output::print_json(&to_json(&loss));
    } else {
        output::print(&format!(
            "loss {:.4}, perplexity {:.2}, {}\n",
            loss.loss,
            loss.perplexity,
            format_count(loss.tokens, "labelled token")
        ));
    }
    Ok(Exit::Done)
}

/// Prints a note if other parts of the model are left out, one if the adapters name no base model, and one if the CPU
/// replaces an accelerator on which the model does not fit.
pub fn print_notes(resolved: &Resolved) {
    if let Some(note) = resolved.model.other_parts_note() {
        output::print_note(&note);
    }
    if let Some(note) = resolved.model.adapter.as_ref().and_then(AdapterDir::unknown_base_note) {
        output::print_note(&note);
    }
    if let Some(fallback) = &resolved.fallback {
        output::print_note(&fallback.to_string());
    }
}

/// Formats a result as JSON without line breaks.
pub fn to_json(result: &impl Serialize) -> String {
    serde_json::to_string(result).expect("results are plain data")
}
