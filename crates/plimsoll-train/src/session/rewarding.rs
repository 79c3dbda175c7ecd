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
use std::sync::mpsc::{Receiver, Sender, channel};
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

/// The sender of completions. It sends their end when it is dropped, also by a panic: abandoned threads of lost devices may
/// hold the channel open for ever.
struct EndOfCompletions(Sender<Option<(usize, SampledCompletion)>>);

impl Drop for EndOfCompletions {
    fn drop(&mut self) {
        let _ = self.0.send(None);
    }
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
        scorer.rewards().begin_batch();
        let (sender, ended) = channel();
        request.ended = Some(sender.clone());
        let (begin, has_failed) = (Instant::now(), &AtomicBool::new(false));
        let (completions, known) = thread::scope(|scope| {
            let end = EndOfCompletions(sender);
            let score = move || {
                let known = scorer.score_ended(&ended, &[stop, has_failed]);
                // After a failure of sampling, that of a reward only says that it was stopped.
                known.map_err(|failure| (!has_failed.load(Ordering::Relaxed)).then_some(failure))
            };
            let scoring =
                thread::Builder::new().spawn_scoped(scope, score).map_err(|_| Failure::no_thread("for rewards"))?;
            let completions = self.complete_prompts(request, log);
            seconds.generate = begin.elapsed().as_secs_f64();
            has_failed.store(completions.is_err(), Ordering::Relaxed);
            drop(end);
            Ok::<_, Failure>((completions, scoring.join().expect("rewards do not panic")))
        })?;
        let rewarded = match known {
            // Sampling ends early after the failure of a reward.
            Err(Some(failure)) => Err(failure),
            known => scorer.score_rest(completions?, known.unwrap_or_default(), stop),
        };
        seconds.reward = begin.elapsed().as_secs_f64() - seconds.generate;
        for message in scorer.rewards().warnings() {
            log.emit(Event::Warning { message })?;
        }
        rewarded.map_err(|failure| StepInterrupt::Stop { failure, state_intact: true })
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
            let Ok(first) = ended.recv() else { break };
            let received: Vec<_> = std::iter::once(first).chain(ended.try_iter()).collect();
            is_over = received.iter().any(Option::is_none);
            known.extend(self.score(received.into_iter().flatten().collect(), stops)?);
        }
        Ok(known)
    }

    /// Returns all completions with their rewards. Those that are `known` are not rewarded again, unless they were sampled
    /// again after a failure, and differ.
    fn score_rest(
        &self,
        completions: Vec<SampledCompletion>,
        mut known: HashMap<usize, RewardedCompletion>,
        stop: &AtomicBool,
    ) -> Result<Vec<RewardedCompletion>, Failure> {
        known.retain(|number, rewarded| rewarded.completion == completions[*number]);
        let rest: Vec<(usize, SampledCompletion)> =
            completions.into_iter().enumerate().filter(|(number, _)| !known.contains_key(number)).collect();
        known.extend(self.score(rest, &[stop])?);
        let mut all: Vec<(usize, RewardedCompletion)> = known.into_iter().collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        Ok(all.into_iter().map(|(_, rewarded)| rewarded).collect())
    }

    /// Rewards completions, which keep their numbers.
    fn score(
        &self,
        completions: Vec<(usize, SampledCompletion)>,
        stops: &[&AtomicBool],
    ) -> Result<Vec<(usize, RewardedCompletion)>, Failure> {
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
        let rewarded =
            |(((number, completion), text), rewards)| (number, RewardedCompletion { completion, text, rewards });
        Ok(all.map(rewarded).collect())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Prompt, SourceLocation, Tokenizer};
    use crate::rewards::RewardSpec;
    use serde_json::json;
    use std::fs;
    use std::path::Path;
    use std::sync::Mutex;
    use std::time::Duration;

    /// Returns a source of prompts whose completions get these rewards. Token 5 is the word `t5`.
    fn source(folder: &Path, reward: &str) -> PromptSource {
        let vocab: serde_json::Map<String, Value> = (0..10).map(|id| (format!("t{id}"), json!(id))).collect();
        let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "t0"});
        let file = folder.join("tokenizer.json");
        fs::write(&file, json!({"version": "1.0", "added_tokens": [], "model": model}).to_string()).unwrap();
        let specs = [reward.parse::<RewardSpec>().unwrap()];
        let rewards = Rewards::open(&specs, &[], Duration::from_secs(60)).unwrap();
        let record = PromptRecord {
            location: SourceLocation::whole(folder),
            prompt: Prompt::Text("t1".into()),
            keys: json!({"prompt": "t1"}).as_object().unwrap().clone(),
        };
        let tokenizer = Tokenizer::load(&file).unwrap();
        PromptSource { train: vec![], eval: vec![record; 3], tokenizer, rewards: Mutex::new(rewards) }
    }

    fn completion(token: i32) -> SampledCompletion {
        SampledCompletion { tokens: vec![token, 2], logps: vec![-1.0; 2], entropy: 1.0 }
    }

    #[test]
    fn completions_are_rewarded_before_the_last_one_ends() {
        let folder = tempfile::tempdir().unwrap();
        let seen = folder.path().join("seen");
        let command = format!("command:while read line; do echo >> '{}'; echo 0.5; done", seen.display());
        let source = source(folder.path(), &command);
        let records: Vec<&PromptRecord> = source.eval.iter().collect();
        let scorer = &Scorer { source: &source, records: &records, end_tokens: &[2] };
        let (sender, ended) = channel();
        let known = thread::scope(|scope| {
            let scoring = scope.spawn(move || scorer.score_ended(&ended, &[]));
            let end = EndOfCompletions(sender.clone());
            sender.send(Some((1, completion(5)))).unwrap();
            let begin = Instant::now();
            while !seen.exists() {
                assert!(begin.elapsed() < Duration::from_secs(60), "the first completion gets no reward");
                thread::sleep(Duration::from_millis(5));
            }
            sender.send(Some((0, completion(6)))).unwrap();
            drop(end);
            scoring.join().unwrap().unwrap()
        });
        assert_eq!(known.len(), 2);
        // Completion 0 was sampled again, and differs. Completion 2 is new.
        let all = scorer.score_rest(vec![completion(7), completion(5), completion(8)], known, &AtomicBool::new(false));
        let texts: Vec<(String, Vec<Option<f64>>)> =
            all.unwrap().into_iter().map(|one| (one.text, one.rewards)).collect();
        assert_eq!(texts, ["t7", "t5", "t8"].map(|text| (text.to_owned(), vec![Some(0.5)])));
        assert_eq!(fs::read(&seen).unwrap().len(), 4, "completion 1 is not rewarded twice");
    }
}
