//! Tokens of a rendered conversation, and their labels.
//!
//! The whole text is tokenized at once, so its tokens are those that the model sees in use. A token is labelled if it
//! lies in a trained turn as a whole. A token that is partly in two turns is not.
//!
//! A turn of the assistant ends with its end-of-turn token: the last special token, if only white space follows it.
//! This white space is not labelled, because generation stops before it. If white space separates that token from
//! another special token before it, both are end tokens (`<|end|>`, a line end, `<|endoftext|>`).

use super::turns::{MarkedText, Turn};
use super::{LabelledDocument, TemplateWarning, TrainOnEnd};
use crate::data::IGNORED_LABEL;
use crate::data::placed_token::PlacedToken;
use crate::data::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

/// The longest marker that is looked for in the text of a template.
const MARKER_BYTES_MAX: usize = 40;

/// The special tokens of a tokenizer.
pub(super) struct TokenMarkers {
    special: HashSet<u32>,
    begin: Option<(u32, String)>,
    adds_begin: bool,
}

/// A labelled document, with what was found at the ends of its turns of the assistant.
pub(super) struct Labelled {
    pub document: LabelledDocument,
    /// Whether one of the turns has no end token.
    pub lacks_end: bool,
    /// The trained tokens at which generation has to stop: the first end token of each turn.
    pub end_tokens: BTreeSet<u32>,
}

impl TokenMarkers {
    /// Looks up the special tokens. `variables` has the names that the model's files give them.
    pub fn new(tokenizer: &Tokenizer, variables: &Map<String, Value>) -> TokenMarkers {
        let id = |name: &str| {
            let token = variables.get(name)?.as_str()?;
            Some((tokenizer.token_id(token)?, token.to_owned()))
        };
        let mut special = tokenizer.special_ids();
        special.extend(["bos_token", "eos_token"].iter().filter_map(|name| id(name)).map(|(id, _)| id));
        let added = tokenizer.prefix().first().copied();
        let begin = id("bos_token").or_else(|| added.map(|id| (id, tokenizer.token_text(id))));
        TokenMarkers { special, adds_begin: begin.as_ref().map(|(id, _)| *id) == added && added.is_some(), begin }
    }

    /// Returns a warning for each marker such as `<|im_end|>` in the text of a template that is no token.
    pub fn split_markers(&self, tokenizer: &Tokenizer, template: &str) -> BTreeSet<TemplateWarning> {
        let starts = template.match_indices("<|").map(|(at, _)| &template[at..]);
        let markers = starts.filter_map(|text| {
            let marker = &text[..text.find("|>")? + 2];
            let name = &marker[2..marker.len() - 2];
            let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            (is_name && marker.len() <= MARKER_BYTES_MAX).then_some(marker)
        });
        let split = markers.filter(|marker| tokenizer.token_id(marker).is_none());
        split.map(|marker| TemplateWarning::SplitMarker(marker.to_owned())).collect()
    }

    /// Returns warnings about the begin token of a document.
    pub fn check(&self, tokens: &[PlacedToken]) -> Option<TemplateWarning> {
        let (begin, text) = self.begin.as_ref()?;
        let count = tokens.iter().take_while(|token| token.id == *begin).count();
        match count {
            0 if self.adds_begin => Some(TemplateWarning::NoBeginToken(text.clone())),
            0 | 1 => None,
            _ => Some(TemplateWarning::RepeatedBeginToken(text.clone())),
        }
    }

    /// Labels the tokens of a text.
    pub fn label(&self, text: &MarkedText, tokens: &[PlacedToken], ends: TrainOnEnd) -> Labelled {
        let mut labels = vec![IGNORED_LABEL; tokens.len()];
        let (mut lacks_end, mut end_tokens) = (false, BTreeSet::new());
        for turn in &text.turns {
            let mut inside = tokens_inside(tokens, &turn.bytes);
            if turn.from_assistant {
                let content = self.content_end(&text.text, &tokens[inside.clone()]) + inside.start;
                let has_end = content < inside.end && self.has_special(&tokens[content..inside.end]);
                lacks_end |= !has_end;
                if has_end {
                    if trains_end(ends, turn) {
                        end_tokens.extend(
                            tokens[content..].iter().find(|token| self.is_special(token)).map(|token| token.id),
                        );
                        self.label_special(&tokens[content..inside.end], &mut labels[content..inside.end]);
                    }
                    inside.end = content;
                }
            }
            for at in inside {
                labels[at] = tokens[at].id as i32;
            }
        }
        let ids = tokens.iter().map(|token| token.id as i32).collect();
        Labelled { document: LabelledDocument { ids, labels }, lacks_end, end_tokens }
    }

    fn is_special(&self, token: &PlacedToken) -> bool {
        self.special.contains(&token.id)
    }

    fn has_special(&self, tokens: &[PlacedToken]) -> bool {
        tokens.iter().any(|token| self.is_special(token))
    }

    fn label_special(&self, tokens: &[PlacedToken], labels: &mut [i32]) {
        for (token, label) in tokens.iter().zip(labels) {
            if self.is_special(token) {
                *label = token.id as i32;
            }
        }
    }

    /// Returns the index after the last token of a turn that is neither an end token nor white space after one.
    fn content_end(&self, text: &str, tokens: &[PlacedToken]) -> usize {
        let is_blank = |token: &PlacedToken| {
            let (start, end) = (token.start as usize, token.end as usize);
            text.get(start..end).is_some_and(|piece| piece.chars().all(char::is_whitespace))
        };
        let mut end = tokens.len();
        loop {
            let blanks =
                tokens[..end].iter().rev().take_while(|token| !self.is_special(token) && is_blank(token)).count();
            let at_end = end == tokens.len();
            match end.checked_sub(blanks + 1) {
                Some(at) if self.is_special(&tokens[at]) && (at_end || blanks > 0) => end = at,
                _ => return end,
            }
        }
    }
}

/// Returns whether the end token of a turn is trained.
fn trains_end(ends: TrainOnEnd, turn: &Turn) -> bool {
    match ends {
        TrainOnEnd::Turn => true,
        TrainOnEnd::Last => turn.is_last,
        TrainOnEnd::None => false,
    }
}

/// Returns the indices of the tokens that lie in `bytes` as a whole.
fn tokens_inside(tokens: &[PlacedToken], bytes: &Range<usize>) -> Range<usize> {
    let start = tokens.partition_point(|token| (token.start as usize) < bytes.start);
    let mut end = start;
    while end < tokens.len() && tokens[end].end as usize <= bytes.end && (tokens[end].start as usize) < bytes.end {
        end += 1;
    }
    start..end
}
