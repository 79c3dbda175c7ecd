//! `plimsoll eval`, `plimsoll generate` and `plimsoll merge`: commands for trained models.

use super::plan::refuse_or_prompt;
use super::rates::measure_in_child;
use crate::args::{EvalArgs, GenerateArgs, MergeArgs};
use crate::output;
use plimsoll_core::{Exit, Failure, format_count};
use plimsoll_train::files::AdapterDir;
use plimsoll_train::inference::samples::Sampling;
use plimsoll_train::inference::{PlannedEvaluation, PlannedGeneration};
use plimsoll_train::resolve::Resolved;
use serde::Serialize;

/// Computes the loss of a model on data and prints it.
///
/// # Errors
/// An invalid model or data; a model that does not fit.
pub fn eval(args: &EvalArgs) -> Result<Exit, Failure> {
    let mut request = args.build_request()?;
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

/// Continues a prompt with a model and prints the text.
///
/// # Errors
/// An invalid model or prompt; a model that does not fit.
pub fn generate(args: &GenerateArgs) -> Result<Exit, Failure> {
    let mut request = args.build_request()?;
    request.measure_rates = Some(measure_in_child);
    let generation = PlannedGeneration::new(request, &args.prompt, args.max_tokens.map(u64::from))?;
    let (run_config, resolved, answer) = generation.plan();
    if !answer.plan.fits {
        return refuse_or_prompt(run_config, &answer.plan, !args.json);
    }
    print_notes(resolved);
    generation.shortened_note().into_iter().for_each(output::print_note);
    let text = generation.run(&Sampling {
        temperature: f64::from(args.temperature),
        top_k: args.top_k.unwrap_or(0) as usize,
        top_p: args.top_p.map_or(1.0, f64::from),
        seed: args.seed,
    })?;
    if args.json {
        output::print_json(&to_json(&text));
    } else {
        output::print_generated(&format!("{}{}\n", text.prompt, text.text));
    }
    Ok(Exit::Done)
}

/// Merges adapters into their base model.
///
/// # Errors
/// Adapters of another model, or an output folder that already exists.
pub fn merge(args: &MergeArgs) -> Result<Exit, Failure> {
    let note = plimsoll_train::inference::merge::merge(&args.base, &args.adapter, &args.out, &args.ignore_config_key)?;
    note.iter().for_each(|note| output::print_note(note));
    output::print(&format!("model: {}\n", args.out.display()));
    Ok(Exit::Done)
}

/// Prints a note if the adapters name no base model, and another if the CPU replaces an accelerator on which the model
/// does not fit.
fn print_notes(resolved: &Resolved) {
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
