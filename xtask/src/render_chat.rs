//! `cargo xtask render-chat`: answers JSON lines with a conversation, a template and settings by its text, tokens and
//! labels. `parity/templates.py` compares them with transformers.

use std::io::{BufRead, Write};

/// Answers each line of the standard input on the standard output.
///
/// # Errors
/// A line that is no request, or a stream that fails.
pub fn run() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = plimsoll_train::data::template::check::answer_line(&line?);
        writeln!(out, "{}", answer.map_err(|failure| anyhow::anyhow!("{failure}"))?)?;
    }
    Ok(())
}
