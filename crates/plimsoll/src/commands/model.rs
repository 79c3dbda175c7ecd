//! `plimsoll eval` and `plimsoll generate`: what a finished model says; `plimsoll merge`: what adapters make of it.

use super::plan::refuse;
use crate::args::{EvalArgs, GenerateArgs, MergeArgs};
use crate::say;
use plimsoll_core::{Exit, Failure, counted};
use plimsoll_train::files::AdapterDir;
use plimsoll_train::inference::samples::Sampling;
use plimsoll_train::inference::{Continuation, Evaluation};
use plimsoll_train::resolve::Resolved;
use serde::Serialize;

/// Prints the loss of a model on data.
///
/// # Errors
/// What is wrong with model or data, or does not fit.
pub fn eval(args: &EvalArgs) -> Result<Exit, Failure> {
    let evaluation = Evaluation::new(args.resolve()?, args.sequence)?;
    let (file, resolved, answer) = evaluation.plan();
    if !answer.plan.fits {
        return refuse(file, &answer.plan, !args.json);
    }
    note_oddities(resolved);
    let loss = evaluation.run()?;
    if args.json {
        say::answer(&line(&loss));
    } else {
        say::answer(&format!(
            "loss {:.4}, perplexity {:.2}, {}\n",
            loss.loss,
            loss.perplexity,
            counted(loss.tokens, "labelled token")
        ));
    }
    Ok(Exit::Done)
}

/// Prints what a model makes of a prompt.
///
/// # Errors
/// What is wrong with model or prompt, or does not fit.
pub fn generate(args: &GenerateArgs) -> Result<Exit, Failure> {
    let continuation = Continuation::new(args.resolve()?, &args.prompt, args.max_tokens as usize)?;
    let (file, resolved, answer) = continuation.plan();
    if !answer.plan.fits {
        return refuse(file, &answer.plan, !args.json);
    }
    note_oddities(resolved);
    let text = continuation.run(&Sampling {
        temperature: f64::from(args.temperature),
        top_k: args.top_k.unwrap_or(0) as usize,
        top_p: args.top_p.map_or(1.0, f64::from),
        seed: args.seed,
    })?;
    say::answer(&if args.json { line(&text) } else { format!("{}{}\n", text.prompt, text.text) });
    Ok(Exit::Done)
}

/// Folds adapters into their model.
///
/// # Errors
/// Directories that do not go together, and something that is there already.
pub fn merge(args: &MergeArgs) -> Result<Exit, Failure> {
    let note = plimsoll_train::inference::merge::merge(&args.base, &args.adapter, &args.out, &args.ignore_config_key)?;
    note.iter().for_each(|note| say::note(note));
    say::answer(&format!("model: {}\n", args.out.display()));
    Ok(Exit::Done)
}

/// Another device than the one that was asked for is never taken silently, nor are adapters of another model.
fn note_oddities(resolved: &Resolved) {
    if let Some(note) = resolved.model.adapter.as_ref().and_then(AdapterDir::of_nothing) {
        say::note(&note);
    }
    if let Some(fallback) = &resolved.fallback {
        say::note(&fallback.to_string());
    }
}

/// An answer for a program, on a line.
pub fn line(answer: &impl Serialize) -> String {
    serde_json::to_string(answer).expect("answers are plain data") + "\n"
}
