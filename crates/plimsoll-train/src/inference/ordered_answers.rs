//! The answers of a batch, in the order of their prompts.

use super::batch::{BatchListener, BatchPrompt};
use super::decoding::EndReason;
use super::text_stream::{Continuation, TextStream};
use crate::data::Tokenizer;
use plimsoll_core::Failure;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// The texts of a batch. Answers are given out in the order of their prompts, each as soon as those before it have ended.
pub(super) struct OrderedAnswers<'a> {
    tokenizer: &'a Tokenizer,
    stops: &'a [String],
    prompts: &'a [BatchPrompt<'a>],
    /// Texts under way, by the index of their prompt.
    streams: BTreeMap<usize, TextStream<'a>>,
    /// Answers that have ended before an earlier one, by the index of their prompt.
    waiting: BTreeMap<usize, Continuation>,
    /// Index of the prompt whose answer is given out next.
    next: usize,
    on_answer: &'a mut dyn FnMut(usize, Continuation) -> Result<(), Failure>,
}

impl<'a> OrderedAnswers<'a> {
    /// Returns the receiver of the answers to `prompts`, which end before the first of `stops`. `on_answer` is called with
    /// the index of each prompt and its answer.
    pub fn new(
        tokenizer: &'a Tokenizer,
        stops: &'a [String],
        prompts: &'a [BatchPrompt<'a>],
        on_answer: &'a mut dyn FnMut(usize, Continuation) -> Result<(), Failure>,
    ) -> OrderedAnswers<'a> {
        let (streams, waiting) = (BTreeMap::new(), BTreeMap::new());
        OrderedAnswers { tokenizer, stops, prompts, streams, waiting, next: 0, on_answer }
    }

    /// Removes the text of a prompt, or begins it.
    fn take_stream(&mut self, prompt: usize) -> TextStream<'a> {
        let OrderedAnswers { tokenizer, stops, prompts, .. } = *self;
        let begin = || TextStream::new(tokenizer, stops, prompts[prompt].tokens);
        self.streams.remove(&prompt).unwrap_or_else(begin)
    }
}

impl BatchListener for OrderedAnswers<'_> {
    fn on_token(&mut self, prompt: usize, token: i32) -> Result<ControlFlow<EndReason>, Failure> {
        let mut stream = self.take_stream(prompt);
        stream.push(token)?;
        let is_stopped = stream.is_stopped();
        self.streams.insert(prompt, stream);
        Ok(if is_stopped { ControlFlow::Break(EndReason::StopText) } else { ControlFlow::Continue(()) })
    }

    fn on_end(&mut self, prompt: usize, tokens: &[i32], end: EndReason) -> Result<(), Failure> {
        let mut stream = self.take_stream(prompt);
        stream.finish()?;
        let end = if stream.is_stopped() { EndReason::StopText } else { end };
        self.waiting.insert(prompt, Continuation { text: stream.text().to_owned(), tokens: tokens.to_vec(), end });
        while let Some(continuation) = self.waiting.remove(&self.next) {
            self.next += 1;
            (self.on_answer)(self.next - 1, continuation)?;
        }
        Ok(())
    }
}
