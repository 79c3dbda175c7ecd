//! Generation token by token, with a key-value cache that keeps the tokens of earlier prompts.

use super::sampling::Sampling;
use crate::engine::Engine;
use crate::engine::failure::DeviceFailure;
use serde::Serialize;
use std::ops::ControlFlow;

/// A model with a key-value cache that generates token by token: on one device, or on a team of devices.
pub trait CachedDecoder {
    /// Appends `tokens` to the cache, which holds `length` tokens before. Returns the logits of the next token, of
    /// shape `[V]`.
    ///
    /// # Errors
    /// A device that fails.
    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceFailure>;

    /// Appends `tokens` of a prompt to the cache as [`CachedDecoder::extend`] does. A decoder whose prompts and new tokens
    /// differ in rounding processes all tokens of a prompt alike.
    ///
    /// # Errors
    /// A device that fails.
    fn prefill(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceFailure> {
        self.extend(tokens, length)
    }

    /// Returns the number of tokens that the cache can hold.
    fn capacity(&self) -> usize;
}

impl CachedDecoder for Engine {
    fn prefill(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceFailure> {
        Ok(Engine::prefill(self, tokens, length)?)
    }

    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceFailure> {
        Ok(Engine::extend(self, tokens, length)?)
    }

    fn capacity(&self) -> usize {
        Engine::capacity(self)
    }
}

/// The reason for which a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// The model generated an end token.
    EndToken,
    /// The text has one of the user's stop texts.
    StopText,
    /// The largest number of new tokens was reached, or the cache is full.
    Length,
    /// The user stopped the generation.
    Stopped,
}

/// Rules of a generation.
pub struct Decoding<'a> {
    /// Choice of the next token.
    pub sampling: &'a Sampling,
    /// Tokens after which generation ends. They are part of the result.
    pub end_tokens: &'a [i64],
    /// Largest number of new tokens; at least 1.
    pub max_new_tokens: usize,
}

impl Decoding<'_> {
    /// Generates and returns the tokens that follow `prompt`. `cached` names the tokens in the cache of `decoder`; those
    /// with which the prompt begins are not computed again. `on_token` is called with each token, and ends the
    /// generation with `Break`.
    ///
    /// # Errors
    /// A device that fails. `cached` is empty then.
    pub fn run(
        &self,
        decoder: &mut impl CachedDecoder,
        cached: &mut Vec<i32>,
        prompt: &[i32],
        mut on_token: impl FnMut(i32) -> ControlFlow<EndReason>,
    ) -> Result<(Vec<i32>, EndReason), DeviceFailure> {
        // The last token of the prompt gives the logits of the next one.
        let equal = cached.iter().zip(prompt).take_while(|(cached, token)| cached == token).count();
        let kept = equal.min(prompt.len().saturating_sub(1));
        cached.clear();
        let mut context = prompt.to_vec();
        let limits = (prompt.len() + self.max_new_tokens, decoder.capacity());
        let mut logits = decoder.prefill(&prompt[kept..], kept)?;
        let reason = loop {
            let token = self.sampling.choose(&mut logits, &context) as i32;
            if let Some(reason) = self.append_token(&mut context, token, limits, &mut on_token) {
                break reason;
            }
            logits = decoder.extend(&context[context.len() - 1..], context.len() - 1)?;
        };
        let tokens = context[prompt.len()..].to_vec();
        // The last token is not in the cache.
        context.pop();
        *cached = context;
        Ok((tokens, reason))
    }

    /// Appends a chosen token to `context`, and passes it to `on_token`, unless it is an end token. The context may have
    /// `limit` tokens, and one more than the `capacity` of the cache. Returns the reason if the generation ends.
    pub fn append_token(
        &self,
        context: &mut Vec<i32>,
        token: i32,
        (limit, capacity): (usize, usize),
        on_token: impl FnOnce(i32) -> ControlFlow<EndReason>,
    ) -> Option<EndReason> {
        context.push(token);
        if self.end_tokens.contains(&i64::from(token)) {
            return Some(EndReason::EndToken);
        }
        if let ControlFlow::Break(reason) = on_token(token) {
            return Some(reason);
        }
        (context.len() >= limit || context.len() > capacity).then_some(EndReason::Length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model that prefers the sum of the last two tokens, modulo 10. It fails if its cache differs from the context.
    struct SumModel {
        cache: Vec<i32>,
        computed: usize,
    }

    impl CachedDecoder for SumModel {
        fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceFailure> {
            assert!(length <= self.cache.len() && !tokens.is_empty());
            self.cache.truncate(length);
            self.cache.extend(tokens);
            self.computed += tokens.len();
            let sum: i32 = self.cache.iter().rev().take(2).sum();
            Ok((0..10).map(|id| f64::from(u8::from(id == sum % 10))).collect())
        }

        fn capacity(&self) -> usize {
            12
        }
    }

    fn run(
        model: &mut SumModel,
        cached: &mut Vec<i32>,
        prompt: &[i32],
        max_new_tokens: usize,
        on_token: impl FnMut(i32) -> ControlFlow<EndReason>,
    ) -> (Vec<i32>, EndReason) {
        let decoding = Decoding { sampling: &Sampling::GREEDY, end_tokens: &[8], max_new_tokens };
        decoding.run(model, cached, prompt, on_token).unwrap()
    }

    #[test]
    fn generation_ends_for_its_reasons() {
        let proceed = |_| ControlFlow::Continue(());
        let (mut model, mut cached) = (SumModel { cache: vec![], computed: 0 }, vec![]);
        assert_eq!(run(&mut model, &mut cached, &[1, 1], 9, proceed), (vec![2, 3, 5, 8], EndReason::EndToken));
        assert_eq!(run(&mut model, &mut cached, &[1, 1], 3, proceed), (vec![2, 3, 5], EndReason::Length));
        let stop_at = |end| {
            move |token| if token == end { ControlFlow::Break(EndReason::StopText) } else { ControlFlow::Continue(()) }
        };
        assert_eq!(run(&mut model, &mut cached, &[1, 1], 9, stop_at(3)), (vec![2, 3], EndReason::StopText));
        // The last token of a full cache still has a place in the result.
        let (tokens, reason) = run(&mut model, &mut cached, &[1, 3, 4, 7, 1], 20, stop_at(-1));
        assert_eq!((tokens, reason), (vec![8], EndReason::EndToken));
        let long = [0; 10];
        assert_eq!(run(&mut model, &mut cached, &long, 20, proceed), (vec![0; 3], EndReason::Length));
    }

    #[test]
    fn tokens_in_the_cache_are_not_computed_again() {
        let proceed = |_| ControlFlow::Continue(());
        let (mut model, mut cached) = (SumModel { cache: vec![], computed: 0 }, vec![]);
        run(&mut model, &mut cached, &[1, 1], 3, proceed);
        assert_eq!((&cached[..], model.computed), (&[1, 1, 2, 3][..], 4));
        // The prompt goes on after the tokens in the cache.
        let (with_cache, _) = run(&mut model, &mut cached, &[1, 1, 2, 3, 5, 4], 2, proceed);
        assert_eq!(model.computed, 4 + 2 + 1);
        let alone = run(&mut SumModel { cache: vec![], computed: 0 }, &mut vec![], &[1, 1, 2, 3, 5, 4], 2, proceed).0;
        assert_eq!(with_cache, alone);
        // The same prompt again computes its last token.
        let before = model.computed;
        assert_eq!(run(&mut model, &mut cached, &[1, 1, 2, 3, 5, 4], 1, proceed).0, alone[..1]);
        assert_eq!(model.computed, before + 1);
    }
}
