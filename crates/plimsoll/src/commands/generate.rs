//! `plimsoll generate`: answers to prompts, and conversations with the user.

use super::answer_file::AnswerFile;
use super::hub::with_hub_files;
use super::model::{print_notes, to_json};
use super::plan::refuse_or_prompt;
use super::rates::measure_in_child;
use crate::args::{AnswerSettings, GenerateArgs};
use crate::output;
use plimsoll_core::{Exit, Failure, format_count};
use plimsoll_train::inference::EndReason;
use plimsoll_train::inference::chat::Chat;
use plimsoll_train::inference::generation::{PlannedGeneration, PreparedPrompt, TextGenerator};
use plimsoll_train::resolve::HubNeed;
use signal_hook::consts::SIGINT;
use std::io::{self, BufRead, IsTerminal};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time between two lines about the progress through a file of prompts.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Answers prompts, or talks with the user.
///
/// # Errors
/// An invalid model or prompt; a model that does not fit.
pub fn generate(args: &GenerateArgs) -> Result<Exit, Failure> {
    let mut request = with_hub_files(args.build_request()?, HubNeed::Run, false)?;
    request.measure_rates = Some(measure_in_child);
    let generation = PlannedGeneration::new(request, args.generation())?;
    let (run_config, resolved, answer) = generation.plan();
    if !answer.plan.fits {
        return refuse_or_prompt(run_config, &answer.plan, !args.json);
    }
    print_notes(resolved);
    generation.notes().iter().for_each(|note| output::print_note(note));
    if let Some(out) = &args.out {
        let settings = args.answer_settings(&answer.plan.recipe.rungs);
        return answer_file(generation, out, &settings);
    }
    let (mut generator, prompts) = generation.open()?;
    let [prompt] = &prompts[..] else { return talk(Chat::new(generator, args.system.as_deref())) };
    if args.json {
        let text = generator.answer(prompt, &mut |_| ControlFlow::Continue(()))?;
        output::print_json(&to_json(&text));
    } else {
        print_answer(&mut generator, prompt)?;
    }
    Ok(Exit::Done)
}

/// Prints the answer to a prompt while it is generated; a text with the prompt before it.
fn print_answer(generator: &mut TextGenerator, prompt: &PreparedPrompt) -> Result<(), Failure> {
    prompt.text().into_iter().for_each(output::print_generated);
    generator.answer(prompt, &mut |piece| {
        output::print_generated(piece);
        ControlFlow::Continue(())
    })?;
    output::print_generated("\n");
    Ok(())
}

/// Reads messages of the user line by line, and prints the answers. Ends with the input or `/exit`.
fn talk(mut chat: Chat) -> Result<Exit, Failure> {
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        output::print_note("/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer");
    }
    let interrupts = Interrupts::listen()?;
    let mut lines = io::stdin().lock().lines();
    loop {
        if is_terminal {
            output::print_generated("> ");
        }
        let Some(line) = lines.next() else { break };
        let line = line.map_err(|error| Failure::input(format!("standard input: cannot read a message: {error}")))?;
        match line.trim() {
            "" => {}
            "/exit" => break,
            "/reset" => chat.reset(),
            command if is_terminal && command.starts_with('/') => {
                output::print_note(&format!("{command} is no command; there are /reset and /exit"));
            }
            message => answer_message(&mut chat, message, &interrupts, is_terminal)?,
        }
    }
    if is_terminal {
        output::print_generated("\n");
    }
    Ok(Exit::Done)
}

/// Prints the answer to a message of the user. On a terminal, a refused message is an error on the screen only.
fn answer_message(chat: &mut Chat, message: &str, interrupts: &Interrupts, is_terminal: bool) -> Result<(), Failure> {
    interrupts.begin_answer();
    let answered = chat.answer(message, &mut |piece| {
        output::print_generated(piece);
        if interrupts.came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    interrupts.end_answer();
    let answer = match answered {
        Err(failure) if is_terminal && failure.exit == Exit::Input => {
            output::print_error(&failure);
            return Ok(());
        }
        answered => answered?,
    };
    output::print_generated("\n");
    if answer.dropped_messages > 0 {
        let count = format_count(answer.dropped_messages as u64, "old message");
        output::print_note(&format!("{count} dropped: the cache has no room for them (--context)"));
    }
    if answer.end == EndReason::Length {
        output::print_note("the answer reached its largest number of tokens (--max-tokens)");
    }
    Ok(())
}

/// Ctrl-C during a conversation: it stops an answer. Between answers it ends the program as usual.
struct Interrupts {
    ends_program: Arc<AtomicBool>,
    came: Arc<AtomicBool>,
}

impl Interrupts {
    fn listen() -> Result<Interrupts, Failure> {
        let (ends_program, came) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
        let listen = signal_hook::flag::register_conditional_default(SIGINT, Arc::clone(&ends_program))
            .and_then(|_| signal_hook::flag::register(SIGINT, Arc::clone(&came)));
        listen.map_err(|error| Failure::input(format!("cannot listen for Ctrl-C: {error}")))?;
        Ok(Interrupts { ends_program, came })
    }

    fn begin_answer(&self) {
        self.came.store(false, Ordering::SeqCst);
        self.ends_program.store(false, Ordering::SeqCst);
    }

    fn end_answer(&self) {
        self.ends_program.store(true, Ordering::SeqCst);
    }

    fn came(&self) -> bool {
        self.came.load(Ordering::SeqCst)
    }
}

/// Writes the answers to the prompts of a file. If `out` has answers to the first of them, it is continued. `settings`
/// are those that change answers.
fn answer_file(generation: PlannedGeneration, out: &Path, settings: &AnswerSettings) -> Result<Exit, Failure> {
    let count = generation.prompts();
    let mut answers = AnswerFile::open(out)?;
    let written = answers.read_written(generation.records())?;
    answers.check_settings(settings, written)?;
    if written > 0 {
        output::print_note(&format!("{} has {written} of {count} answers already", out.display()));
    }
    if written == count {
        return Ok(Exit::Done);
    }
    output::print_note(&generation.describe_sequences());
    let (mut generator, prompts) = generation.open()?;
    let mut last_progress = Instant::now();
    let mut done = written;
    generator.answer_all(&prompts[written..], &mut |prompt, answer| {
        answers.append(&prompt.keys, answer)?;
        done += 1;
        if last_progress.elapsed() >= PROGRESS_INTERVAL {
            output::print_progress(&format!("{done} of {count} prompts answered"));
            last_progress = Instant::now();
        }
        Ok(())
    })?;
    output::print(&format!("answers: {}\n", out.display()));
    Ok(Exit::Done)
}
