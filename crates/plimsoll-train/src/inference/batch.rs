//! Continuous batching: several prompts are answered at once, and a prompt takes the place of an answer that ends.
//!
//! Each sequence has a slot of the key-value cache. The prefill Program processes all but the last token of new prompts,
//! several of them at once. A call of the decode Program computes one token of each slot. An answer depends on neither
//! the slot nor the other sequences: no row of a product depends on other rows, and each sequence has random draws of its
//! own.
//!
//! A prompt that is in a slot, or begins at the same time as an equal one, is copied instead of computed again. So is a
//! beginning that a prompt has in common with one in a slot.

use super::decoding::{Decoding, EndReason};
use super::sampling::{Choice, Sampling};
use crate::engine::failure::DeviceFailure;
use crate::engine::{Engine, SlotCopy, SlotTokens};
use plimsoll_core::Failure;
use std::ops::ControlFlow;
use std::thread;

/// Number of answers per slot that may wait for an earlier one. It bounds the memory of answers that are not written yet.
const WAITING_PER_SLOT: usize = 8;
/// Number of logits that are read before tokens are chosen by them: 1 MiB, because no plan counts them.
const LOGITS_AT_ONCE: usize = 1 << 17;
/// Smallest number of logits for which a thread begins. Choosing by them takes ten times as long as beginning.
const LOGITS_PER_THREAD: usize = 1 << 15;

/// A model with a key-value cache of several slots, one for each sequence that is generated at once.
pub trait SlotDecoder {
    /// Returns the number of slots.
    fn slots(&self) -> usize;

    /// Returns the number of tokens that a slot can hold.
    fn capacity(&self) -> usize;

    /// Appends tokens of prompts to slots, each slot at most once.
    ///
    /// # Errors
    /// A device that fails.
    fn append(&mut self, prompts: &[SlotTokens]) -> Result<(), DeviceFailure>;

    /// Copies tokens between slots. No slot is copied from and copied to.
    ///
    /// # Errors
    /// A device that fails.
    fn copy_slots(&mut self, copies: &[SlotCopy]) -> Result<(), DeviceFailure>;

    /// Appends one of `tokens` to each slot. `lengths` are the numbers of tokens that the slots hold before.
    ///
    /// # Errors
    /// A device that fails.
    fn decode(&mut self, tokens: &[i32], lengths: &[usize]) -> Result<(), DeviceFailure>;

    /// Replaces `into` by the logits of the next token of a slot, of shape `[V]`, after [`SlotDecoder::decode`].
    ///
    /// # Errors
    /// A device that fails.
    fn read_logits(&mut self, slot: usize, into: &mut Vec<f64>) -> Result<(), DeviceFailure>;
}

impl SlotDecoder for Engine {
    fn slots(&self) -> usize {
        Engine::slots(self)
    }

    fn capacity(&self) -> usize {
        Engine::capacity(self)
    }

    fn append(&mut self, prompts: &[SlotTokens]) -> Result<(), DeviceFailure> {
        Ok(Engine::append(self, prompts)?)
    }

    fn copy_slots(&mut self, copies: &[SlotCopy]) -> Result<(), DeviceFailure> {
        Ok(Engine::copy_slots(self, copies)?)
    }

    fn decode(&mut self, tokens: &[i32], lengths: &[usize]) -> Result<(), DeviceFailure> {
        Ok(Engine::decode(self, tokens, lengths)?)
    }

    fn read_logits(&mut self, slot: usize, into: &mut Vec<f64>) -> Result<(), DeviceFailure> {
        Ok(Engine::read_logits(self, slot, into)?)
    }
}

/// A prompt of a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchPrompt<'a> {
    /// Its tokens; at least one.
    pub tokens: &'a [i32],
    /// Largest number of new tokens; at least 1.
    pub max_new_tokens: usize,
    /// Seed of the random draws of the answer.
    pub seed: u64,
}

/// The receiver of the tokens of a batch. Prompts are named by their index.
pub trait BatchListener {
    /// Receives the next token of an answer, and ends the answer with `Break`.
    ///
    /// # Errors
    /// Any error ends the batch.
    fn on_token(&mut self, prompt: usize, token: i32) -> Result<ControlFlow<EndReason>, Failure>;

    /// Whether [`BatchListener::on_choice`] is called. Otherwise nothing computes log-probabilities.
    const TAKES_CHOICES: bool = false;

    /// Receives the token that was chosen, an end token too. Called after [`BatchListener::on_token`].
    fn on_choice(&mut self, prompt: usize, choice: Choice) {
        let _ = (prompt, choice);
    }

    /// Receives all tokens of an answer after its end.
    ///
    /// # Errors
    /// Any error ends the batch.
    fn on_end(&mut self, prompt: usize, tokens: &[i32], end: EndReason) -> Result<(), Failure>;
}

/// The state of a slot of the cache.
#[derive(Default)]
struct Slot {
    /// The tokens in the cache of which the prefill Program has computed keys and values.
    cached: Vec<i32>,
    /// The sequence that is generated; `None` if the slot is free.
    sequence: Option<Sequence>,
}

/// A sequence that is generated.
struct Sequence {
    prompt: usize,
    /// Number of tokens of the prompt.
    given: usize,
    max_new_tokens: usize,
    seed: u64,
    /// The tokens of the prompt and of the answer so far. The last one is not in the cache.
    context: Vec<i32>,
}

impl Sequence {
    /// Chooses the next token by its `logits`, and describes the choice if that is asked for.
    fn choose(&self, rules: Sampling, describes: bool, logits: &mut [f64]) -> Choice {
        let sampling = Sampling { seed: self.seed, ..rules };
        if describes {
            return sampling.choose_and_describe(logits, &self.context);
        }
        Choice { token: sampling.choose(logits, &self.context) as i32, logp: 0.0, entropy: 0.0 }
    }
}

/// A batch under way.
struct Batch<'a, D, L> {
    decoder: &'a mut D,
    decoding: &'a Decoding<'a>,
    prompts: &'a [BatchPrompt<'a>],
    listener: &'a mut L,
    /// Largest number of threads that choose tokens.
    threads: usize,
    slots: Vec<Slot>,
    /// Memory for the logits of the slots whose tokens are chosen at once.
    logits: Vec<Vec<f64>>,
    /// Index of the next prompt.
    next: usize,
    /// Whether the answer to each prompt has ended.
    ended: Vec<bool>,
    /// Index of the first prompt whose answer has not ended.
    first_open: usize,
}

/// Answers `prompts` in as many sequences at once as `decoder` has slots. Prompts begin in their order; answers end in any
/// order. `decoding` has the rules of all; its own limit of new tokens and its seed have no effect. Up to `threads` threads choose
/// tokens.
///
/// # Errors
/// A device that fails, or an error of `listener`.
pub fn answer_batch<D: SlotDecoder, L: BatchListener>(
    decoder: &mut D,
    decoding: &Decoding,
    prompts: &[BatchPrompt],
    threads: usize,
    listener: &mut L,
) -> Result<(), DeviceFailure> {
    let slots = (0..decoder.slots()).map(|_| Slot::default()).collect();
    let ended = vec![false; prompts.len()];
    let mut batch = Batch {
        decoder,
        decoding,
        prompts,
        listener,
        threads,
        slots,
        logits: Vec::new(),
        next: 0,
        ended,
        first_open: 0,
    };
    loop {
        batch.fill()?;
        if batch.slots.iter().all(|slot| slot.sequence.is_none()) {
            return Ok(());
        }
        batch.step()?;
    }
}

/// A prompt that begins in a slot.
struct NewPrompt<'a> {
    slot: usize,
    /// The tokens that the prefill Program processes: all but the last one, which gives the logits of the next token.
    tokens: &'a [i32],
}

impl<'a, D: SlotDecoder, L: BatchListener> Batch<'a, D, L> {
    /// Begins answers in the free slots.
    fn fill(&mut self) -> Result<(), DeviceFailure> {
        let last_waiting = self.first_open + WAITING_PER_SLOT * self.slots.len();
        let mut new = Vec::new();
        for (number, slot) in self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.sequence.is_none()) {
            if self.next == self.prompts.len().min(last_waiting) {
                break;
            }
            let (prompt, BatchPrompt { tokens, max_new_tokens, seed }) = (self.next, self.prompts[self.next]);
            self.next += 1;
            let (_, before) = tokens.split_last().expect("prompts have tokens");
            new.push(NewPrompt { slot: number, tokens: before });
            slot.sequence =
                Some(Sequence { prompt, given: tokens.len(), max_new_tokens, seed, context: tokens.to_vec() });
        }
        // A prompt that repeats an earlier one copies it.
        let is_first = |at: usize| new[..at].iter().all(|earlier| earlier.tokens != new[at].tokens);
        let (first, repeated): (Vec<usize>, Vec<usize>) = (0..new.len()).partition(|&at| is_first(at));
        for numbers in [first, repeated] {
            self.begin(&numbers.iter().map(|&at| &new[at]).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Fills the slots of new prompts. The longest beginning that a slot holds is copied, the rest computed.
    fn begin(&mut self, new: &[&NewPrompt<'a>]) -> Result<(), DeviceFailure> {
        if new.is_empty() {
            return Ok(());
        }
        let (mut copies, mut appended) = (Vec::new(), Vec::new());
        let is_replaced = |slot: usize| new.iter().any(|prompt| prompt.slot == slot);
        for &&NewPrompt { slot, tokens } in new {
            let kept = common_length(&self.slots[slot].cached, tokens);
            let others = (0..self.slots.len()).filter(|other| !is_replaced(*other));
            let lengths = others.map(|other| (common_length(&self.slots[other].cached, tokens), other));
            // Of equal lengths, the first.
            let longest = lengths.max_by_key(|(length, other)| (*length, usize::MAX - other));
            let mut length = kept;
            if let Some((copied, from)) = longest.filter(|(copied, _)| *copied > kept) {
                copies.push(SlotCopy { from, to: slot, positions: kept..copied });
                length = copied;
            }
            appended.push(SlotTokens { slot, tokens: &tokens[length..], length });
        }
        if !copies.is_empty() {
            self.decoder.copy_slots(&copies)?;
        }
        self.decoder.append(&appended)?;
        for prompt in new {
            self.slots[prompt.slot].cached = prompt.tokens.to_vec();
        }
        Ok(())
    }

    /// Generates the next token of all sequences.
    fn step(&mut self) -> Result<(), DeviceFailure> {
        let last_place = self.decoder.capacity() - 1;
        let (mut tokens, mut lengths) = (Vec::new(), Vec::new());
        for slot in &mut self.slots {
            match &slot.sequence {
                Some(sequence) => {
                    tokens.push(sequence.context[sequence.context.len() - 1]);
                    lengths.push(sequence.context.len() - 1);
                }
                // A free slot computes a token behind those that it keeps.
                None => {
                    slot.cached.truncate(last_place);
                    tokens.push(0);
                    lengths.push(slot.cached.len());
                }
            }
        }
        self.decoder.decode(&tokens, &lengths)?;
        let open: Vec<usize> = (0..self.slots.len()).filter(|&slot| self.slots[slot].sequence.is_some()).collect();
        let mut rest = &open[..];
        while let Some(&first) = rest.first() {
            self.read_logits(0, first)?;
            let (now, later) = rest.split_at(rest.len().min(slots_at_once(self.logits[0].len())));
            for (number, slot) in now.iter().enumerate().skip(1) {
                self.read_logits(number, *slot)?;
            }
            for (slot, choice) in now.iter().zip(self.choose(now)) {
                self.advance(*slot, choice)?;
            }
            rest = later;
        }
        Ok(())
    }

    /// Reads the logits of a slot into the memory `number`.
    fn read_logits(&mut self, number: usize, slot: usize) -> Result<(), DeviceFailure> {
        if number == self.logits.len() {
            self.logits.push(Vec::new());
        }
        self.decoder.read_logits(slot, &mut self.logits[number])
    }

    /// Chooses the next tokens of `slots` by their logits, on several threads.
    fn choose(&mut self, slots: &[usize]) -> Vec<Choice> {
        let sequences = slots.iter().map(|slot| self.slots[*slot].sequence.as_ref().expect("the slot is in use"));
        let mut jobs: Vec<_> =
            sequences.zip(&mut self.logits).map(|(sequence, logits)| (sequence, logits, None)).collect();
        let sampling = *self.decoding.sampling;
        let choose = |(sequence, logits, choice): &mut (&Sequence, &mut Vec<f64>, Option<Choice>)| {
            choice.get_or_insert_with(|| sequence.choose(sampling, L::TAKES_CHOICES, logits));
        };
        let size: usize = jobs.iter().map(|(_, logits, _)| logits.len()).sum();
        let threads = self.threads.min(size / LOGITS_PER_THREAD).max(1);
        let each = jobs.len().div_ceil(threads);
        thread::scope(|scope| {
            let (mine, others) = jobs.split_at_mut(each);
            for part in others.chunks_mut(each) {
                // This thread also chooses for a thread that the system refuses.
                let _ = thread::Builder::new().spawn_scoped(scope, move || part.iter_mut().for_each(choose));
            }
            mine.iter_mut().for_each(choose);
        });
        jobs.iter_mut().for_each(choose);
        jobs.into_iter().filter_map(|(_, _, choice)| choice).collect()
    }

    /// Appends the next token to the sequence of a slot. Leaves the sequence in its slot unless it has ended.
    fn advance(&mut self, slot: usize, choice: Choice) -> Result<(), DeviceFailure> {
        let mut sequence = self.slots[slot].sequence.take().expect("the slot is in use");
        let Sequence { prompt, given, max_new_tokens, .. } = sequence;
        let limits = (given + max_new_tokens, self.decoder.capacity());
        let listener = &mut *self.listener;
        let mut failed = None;
        let end = self.decoding.append_token(&mut sequence.context, choice.token, limits, |token| {
            listener.on_token(prompt, token).unwrap_or_else(|failure| {
                failed = Some(failure);
                ControlFlow::Break(EndReason::Stopped)
            })
        });
        if let Some(failure) = failed {
            return Err(failure.into());
        }
        if L::TAKES_CHOICES {
            self.listener.on_choice(prompt, choice);
        }
        let Some(end) = end else {
            self.slots[slot].sequence = Some(sequence);
            return Ok(());
        };
        self.ended[prompt] = true;
        self.first_open += self.ended[self.first_open..].iter().take_while(|ended| **ended).count();
        Ok(self.listener.on_end(prompt, &sequence.context[given..], end)?)
    }
}

/// Returns the number of slots whose logits, `vocabulary` each, are read before their tokens are chosen.
fn slots_at_once(vocabulary: usize) -> usize {
    (LOGITS_AT_ONCE / vocabulary.max(1)).max(1)
}

/// Returns the number of first tokens that two lists have in common.
fn common_length(one: &[i32], other: &[i32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// A model that prefers the sum of the last two tokens of a slot and its length, modulo 10. It fails if a slot does not
    /// hold the tokens that the caller counts on.
    struct SumModel {
        slots: Vec<Vec<i32>>,
        prefilled: usize,
        copied: usize,
        decodes: usize,
    }

    impl SumModel {
        fn new(slots: usize) -> SumModel {
            SumModel { slots: vec![Vec::new(); slots], prefilled: 0, copied: 0, decodes: 0 }
        }

        fn next(&self, slot: usize) -> Vec<f64> {
            let cache = &self.slots[slot];
            let sum = cache.iter().rev().take(2).sum::<i32>() + cache.len() as i32;
            (0..10).map(|id| f64::from(u8::from(id == sum % 10)) + f64::from(id) / 100.0).collect()
        }

        fn put(&mut self, slot: usize, tokens: &[i32], length: usize) {
            assert!(length <= self.slots[slot].len() && length + tokens.len() <= 20);
            self.slots[slot].truncate(length);
            self.slots[slot].extend(tokens);
        }
    }

    impl SlotDecoder for SumModel {
        fn slots(&self) -> usize {
            self.slots.len()
        }

        fn capacity(&self) -> usize {
            20
        }

        fn append(&mut self, prompts: &[SlotTokens]) -> Result<(), DeviceFailure> {
            for prompt in prompts {
                self.prefilled += prompt.tokens.len();
                self.put(prompt.slot, prompt.tokens, prompt.length);
            }
            Ok(())
        }

        fn copy_slots(&mut self, copies: &[SlotCopy]) -> Result<(), DeviceFailure> {
            assert!(copies.iter().all(|one| copies.iter().all(|other| one.from != other.to)));
            for SlotCopy { from, to, positions } in copies {
                self.copied += positions.len();
                let tokens = self.slots[*from][positions.clone()].to_vec();
                self.put(*to, &tokens, positions.start);
            }
            Ok(())
        }

        fn decode(&mut self, tokens: &[i32], lengths: &[usize]) -> Result<(), DeviceFailure> {
            self.decodes += 1;
            assert!(tokens.len() == self.slots.len() && lengths.len() == tokens.len());
            for (slot, (token, length)) in tokens.iter().zip(lengths).enumerate() {
                self.put(slot, &[*token], *length);
            }
            Ok(())
        }

        fn read_logits(&mut self, slot: usize, into: &mut Vec<f64>) -> Result<(), DeviceFailure> {
            *into = self.next(slot);
            Ok(())
        }
    }

    #[derive(Default)]
    struct Answers {
        tokens: HashMap<usize, Vec<i32>>,
        ended: Vec<(usize, Vec<i32>, EndReason)>,
        /// Largest number of prompts by which a token was ahead of the first open answer.
        ahead: usize,
    }

    impl BatchListener for Answers {
        fn on_token(&mut self, prompt: usize, token: i32) -> Result<ControlFlow<EndReason>, Failure> {
            let open = (0..).find(|number| self.ended.iter().all(|(ended, ..)| ended != number)).unwrap();
            self.ahead = self.ahead.max(prompt - open);
            let tokens = self.tokens.entry(prompt).or_default();
            tokens.push(token);
            let is_stopped = tokens.ends_with(&[7]);
            Ok(if is_stopped { ControlFlow::Break(EndReason::StopText) } else { ControlFlow::Continue(()) })
        }

        fn on_end(&mut self, prompt: usize, tokens: &[i32], end: EndReason) -> Result<(), Failure> {
            self.ended.push((prompt, tokens.to_vec(), end));
            Ok(())
        }
    }

    fn answer(model: &mut SumModel, sampling: &Sampling, prompts: &[(Vec<i32>, usize)]) -> Answers {
        let decoding = Decoding { sampling, end_tokens: &[8], max_new_tokens: 0 };
        let batch =
            prompts.iter().map(|(tokens, limit)| BatchPrompt { tokens, max_new_tokens: *limit, seed: sampling.seed });
        let mut answers = Answers::default();
        answer_batch(model, &decoding, &batch.collect::<Vec<_>>(), 2, &mut answers).unwrap();
        answers
    }

    /// Returns 40 prompts of 1 to 7 tokens, with 1 to 12 new tokens.
    fn prompts() -> Vec<(Vec<i32>, usize)> {
        let tokens = |number: i32| (0..1 + number % 7).map(move |at| (number + at * at) % 6).collect();
        (0..40).map(|number| (tokens(number), 1 + number as usize * 5 % 12)).collect()
    }

    #[test]
    fn answers_do_not_depend_on_slots() {
        let drawn = Sampling { temperature: 0.4, seed: 3, ..Sampling::GREEDY };
        for sampling in [Sampling::GREEDY, drawn] {
            let mut alone = answer(&mut SumModel::new(1), &sampling, &prompts()).ended;
            assert!(alone.iter().enumerate().all(|(number, (prompt, ..))| number == *prompt));
            let ends: std::collections::HashSet<_> = alone.iter().map(|(.., end)| format!("{end:?}")).collect();
            assert_eq!(ends.len(), 3, "{ends:?}");
            for slots in [2, 3, 8, 40, 64] {
                let mut together = answer(&mut SumModel::new(slots), &sampling, &prompts()).ended;
                together.sort_by_key(|(prompt, ..)| *prompt);
                alone.sort_by_key(|(prompt, ..)| *prompt);
                assert_eq!(together, alone, "{slots}");
            }
        }
    }

    #[test]
    fn free_slots_are_filled_at_once() {
        let mut model = SumModel::new(2);
        // The answers to these have neither an end token nor the stop token.
        let prompts: Vec<_> = [4, 1, 1, 2].map(|limit| (vec![1], limit)).to_vec();
        let ended = answer(&mut model, &Sampling::GREEDY, &prompts).ended;
        assert_eq!(ended.iter().map(|(prompt, ..)| *prompt).collect::<Vec<_>>(), [1, 2, 0, 3]);
        assert_eq!(model.decodes, 4, "the longest answer takes four tokens");
    }

    #[test]
    fn common_beginnings_of_prompts_are_kept() {
        let mut model = SumModel::new(1);
        let prompts = [(vec![1, 2, 3, 4], 2), (vec![1, 2, 3, 5], 2), (vec![1, 2, 3, 5], 2)];
        answer(&mut model, &Sampling::GREEDY, &prompts);
        assert_eq!(model.prefilled, 3, "the prompts after the first have nothing new before their last token");
    }

    #[test]
    fn repeated_prompts_are_computed_once() {
        let mut model = SumModel::new(6);
        // Groups of three, which begin alike.
        let group = |last: i32| vec![(vec![1, 2, 3, 4, last, 1], 4); 3];
        let prompts: Vec<_> = (5..9).flat_map(group).collect();
        let found = answer(&mut model, &Sampling::GREEDY, &prompts).ended;
        // Those that begin at once are computed before any can be copied; those that follow have a beginning to keep.
        assert_eq!(model.prefilled, 2 * 5 + 2);
        assert!(model.copied >= 2 * 2 * 5, "{}", model.copied);
        let mut alone = answer(&mut SumModel::new(1), &Sampling::GREEDY, &prompts).ended;
        let mut together = found;
        together.sort_by_key(|(prompt, ..)| *prompt);
        alone.sort_by_key(|(prompt, ..)| *prompt);
        assert_eq!(together, alone);
    }

    #[test]
    fn answers_wait_for_few_earlier_ones() {
        let mut prompts = vec![(vec![1], 19)];
        prompts.extend(vec![(vec![1, 1], 1); 60]);
        let answers = answer(&mut SumModel::new(2), &Sampling::GREEDY, &prompts);
        assert!(answers.tokens[&0].len() > 5);
        assert_eq!(answers.ended.len(), 61);
        assert!(answers.ahead < 2 * WAITING_PER_SLOT, "{}", answers.ahead);
    }
}
