//! Completions with rewards: while the team samples, a thread rewards the completions that have ended.

use crate::data::PromptRecord;
use crate::events::EventLog;
use crate::inference::completions::{CompletionRequest, SampledCompletion};
use crate::planning::completions::PromptSource;
use crate::rewards::{Completion, Rewards};
use crate::session::interrupt::StepInterrupt;
use crate::session::training::Session;
use plimsoll_core::{Event, Failure, RoundSeconds};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

/// A completion with its rewards.
#[derive(Clone, Debug)]
pub(super) struct RewardedCompletion {
    pub completion: SampledCompletion,
    /// Its text, without end tokens.
    pub text: String,
    /// Its rewards; `None` for no opinion.
    pub rewards: Vec<Option<f64>>,
}

/// Computes the rewards of completions of prompts.
struct Scorer<'a> {
    source: &'a PromptSource,
    /// The prompt of each completion.
    records: &'a [&'a PromptRecord],
    end_tokens: &'a [i64],
}

impl Session {
    /// Completes prompts on the team, and rewards each completion as soon as it ends. `records` has the prompt of each. Sets
    /// the seconds of sampling, and those by which rewards took longer. If `stop` becomes true while commands compute
    /// rewards, the run stops.
    pub(super) fn complete_and_reward(
        &mut self,
        mut request: CompletionRequest,
        (source, records): (&PromptSource, &[&PromptRecord]),
        seconds: &mut RoundSeconds,
        log: &mut EventLog,
        stop: &AtomicBool,
    ) -> Result<Vec<RewardedCompletion>, StepInterrupt> {
        let end_tokens = request.end_tokens.clone();
        let scorer = &Scorer { source, records, end_tokens: &end_tokens };
        let (sender, ended) = channel();
        request.ended = Some(sender.clone());
        let (begin, has_failed) = (Instant::now(), &AtomicBool::new(false));
        let (completions, known) = thread::scope(|scope| {
            let scoring = scope.spawn(move || scorer.score_ended(&ended, &[stop, has_failed]));
            let completions = self.complete_prompts(request, log);
            seconds.generate = begin.elapsed().as_secs_f64();
            has_failed.store(completions.is_err(), Ordering::Relaxed);
            // Abandoned threads of lost devices may hold the channel open, so its end is sent.
            let _ = sender.send(None);
            (completions, scoring.join().expect("rewards do not panic"))
        });
        let rewarded = completions.map(|completions| scorer.score_rest(completions, known, stop));
        seconds.reward = begin.elapsed().as_secs_f64() - seconds.generate;
        for message in scorer.rewards().warnings() {
            log.emit(Event::Warning { message })?;
        }
        rewarded?.map_err(|failure| StepInterrupt::Stop { failure, state_intact: true })
    }

    /// Completes prompts on the team. On a CPU with a load limit, a pause follows that keeps the machine usable.
    fn complete_prompts(
        &mut self,
        request: CompletionRequest,
        log: &mut EventLog,
    ) -> Result<Vec<SampledCompletion>, StepInterrupt> {
        let (request, begin) = (Arc::new(request), Instant::now());
        let completions = self.run_with_recovery(log, |session| session.team.complete(&request))?;
        thread::sleep(begin.elapsed().mul_f64(1.0 / self.context.cpu_duty - 1.0));
        Ok(completions)
    }
}

impl Scorer<'_> {
    fn rewards(&self) -> MutexGuard<'_, Rewards> {
        self.source.rewards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rewards completions as they end, several at once if they wait. Returns them by their number, at the end of all.
    fn score_ended(
        &self,
        ended: &Receiver<Option<(usize, SampledCompletion)>>,
        stops: &[&AtomicBool],
    ) -> Result<HashMap<usize, RewardedCompletion>, Failure> {
        let (mut known, mut is_over) = (HashMap::new(), false);
        while !is_over {
            // Without a sender, sampling has failed.
            let Ok(first) = ended.recv() else { break };
            let received: Vec<_> = std::iter::once(first).chain(ended.try_iter()).collect();
            is_over = received.iter().any(Option::is_none);
            let waiting: Vec<(usize, SampledCompletion)> = received.into_iter().flatten().collect();
            let numbers: Vec<usize> = waiting.iter().map(|(number, _)| *number).collect();
            known.extend(numbers.into_iter().zip(self.score(waiting, stops)?));
        }
        Ok(known)
    }

    /// Returns all completions with their rewards. Those that are `known` are not rewarded again, unless they were sampled
    /// again after a failure, and differ.
    fn score_rest(
        &self,
        completions: Vec<SampledCompletion>,
        known: Result<HashMap<usize, RewardedCompletion>, Failure>,
        stop: &AtomicBool,
    ) -> Result<Vec<RewardedCompletion>, Failure> {
        let mut known = known?;
        known.retain(|number, rewarded| rewarded.completion == completions[*number]);
        let rest: Vec<(usize, SampledCompletion)> =
            completions.into_iter().enumerate().filter(|(number, _)| !known.contains_key(number)).collect();
        let numbers: Vec<usize> = rest.iter().map(|(number, _)| *number).collect();
        known.extend(numbers.into_iter().zip(self.score(rest, &[stop])?));
        let mut all: Vec<(usize, RewardedCompletion)> = known.into_iter().collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        Ok(all.into_iter().map(|(_, rewarded)| rewarded).collect())
    }

    /// Rewards completions, which have these numbers.
    fn score(
        &self,
        completions: Vec<(usize, SampledCompletion)>,
        stops: &[&AtomicBool],
    ) -> Result<Vec<RewardedCompletion>, Failure> {
        let texts: Vec<String> =
            completions.iter().map(|(_, completion)| self.decode(completion)).collect::<Result<_, Failure>>()?;
        let found = completions.iter().zip(&texts).map(|((number, completion), text)| Completion {
            prompt: prompt_value(self.records[*number]),
            text,
            tokens: &completion.tokens,
            columns: &self.records[*number].keys,
        });
        let rewards = self.rewards().score(&found.collect::<Vec<_>>(), stops)?;
        let all = completions.into_iter().zip(texts).zip(rewards);
        Ok(all.map(|(((_, completion), text), rewards)| RewardedCompletion { completion, text, rewards }).collect())
    }

    /// Decodes a completion to text, without end tokens.
    fn decode(&self, completion: &SampledCompletion) -> Result<String, Failure> {
        let is_end = |token: &i32| self.end_tokens.contains(&i64::from(*token));
        let ids: Vec<u32> = completion.tokens.iter().take_while(|token| !is_end(token)).map(|&id| id as u32).collect();
        Ok(self.source.tokenizer.decode(&ids)?)
    }
}

/// Returns the prompt of a record, as the user wrote it.
pub(super) fn prompt_value(record: &PromptRecord) -> &Value {
    let keys = ["prompt", "messages", "conversations"];
    keys.iter().find_map(|key| record.keys.get(*key)).unwrap_or(&Value::Null)
}
