//! A conversation with the user. Its earlier messages stay as far as the planned cache has room for them.

use super::decoding::EndReason;
use super::generation::TextGenerator;
use super::text_stream::Continuation;
use crate::data::{Conversation, Message, Prompt};
use plimsoll_core::{Failure, format_count};
use std::ops::ControlFlow;

/// A conversation with the user.
pub struct Chat {
    generator: TextGenerator,
    conversation: Conversation,
}

/// The answer to a message of the user.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatAnswer {
    /// Its text.
    pub text: String,
    /// The reason for which it ends.
    pub end: EndReason,
    /// Number of earlier messages that were dropped before it, because the cache had no room for them.
    pub dropped_messages: usize,
}

impl Chat {
    /// Begins a conversation, with a message of the system if it has a text.
    pub fn new(generator: TextGenerator, system: Option<&str>) -> Chat {
        let messages = system.map(|text| Message::new("system", text.to_owned())).into_iter().collect();
        Chat { generator, conversation: Conversation { messages, ..Conversation::default() } }
    }

    /// Forgets all messages but that of the system.
    pub fn reset(&mut self) {
        self.conversation.messages.truncate(self.first_message());
    }

    /// Answers a message of the user. `on_text` is called with each piece of the answer, and ends it with `Break`. After
    /// an error the conversation is as it was before.
    ///
    /// # Errors
    /// A message that the template refuses or the cache cannot hold, and a device that fails.
    pub fn answer(
        &mut self,
        message: &str,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<ChatAnswer, Failure> {
        let before = self.conversation.clone();
        self.conversation.messages.push(Message::new("user", message.to_owned()));
        let answered = self.shorten().and_then(|(tokens, dropped_messages)| {
            let room = self.generator.context - tokens.len();
            let max_new_tokens = self.generator.max_new_tokens.min(room);
            let Continuation { text, end, .. } = self.generator.continue_tokens(&tokens, max_new_tokens, on_text)?;
            Ok(ChatAnswer { text, end, dropped_messages })
        });
        match &answered {
            Ok(answer) => self.conversation.messages.push(Message::new("assistant", answer.text.clone())),
            Err(_) => self.conversation = before,
        }
        answered
    }

    /// Drops the oldest questions with their answers until the cache has room for the conversation and an answer. Returns
    /// the tokens of the conversation, and the number of dropped messages.
    fn shorten(&mut self) -> Result<(Vec<i32>, usize), Failure> {
        let context = self.generator.context;
        let reserved = self.generator.max_new_tokens.min(context / 4).max(1);
        let mut dropped = 0;
        loop {
            let tokens = self.generator.encode(&Prompt::Conversation(Box::new(self.conversation.clone())))?;
            if tokens.len() + reserved <= context {
                return Ok((tokens, dropped));
            }
            let first = self.first_message();
            if self.conversation.messages.len() <= first + 1 {
                let given = format_count(tokens.len() as u64, "token");
                let message =
                    format!("the message takes {given}; the cache holds {context}, {reserved} of them for the answer");
                return Err(Failure::input(message).hint("shorten the message, or give a larger --context"));
            }
            // A question and its answer.
            self.conversation.messages.drain(first..first + 2);
            dropped += 2;
        }
    }

    /// Returns the index of the first message after that of the system.
    fn first_message(&self) -> usize {
        usize::from(self.conversation.messages.first().is_some_and(|message| message.role() == "system"))
    }
}
