//! Group relative policy optimization: steps over completions with rewards. Each step has three parts:
//!
//! 1. The completions of the round, with their rewards: those of a file, or those that the model samples.
//! 2. `objective::groups` computes advantages, the loss, and its derivative with respect to the log-probability of each token.
//!    Unless all ratios are 1 and there is no KL penalty, `Team::score` computes the log-probabilities first. For the KL
//!    penalty of sampled completions, it also computes those under the initial weights, once in a round.
//! 3. The ordinary passes run with minus this derivative as loss weights. Their gradient is that of the objective.
//!
//! A round that is sampled is complete in its file before the first update. A run that continues within it, or returns to it,
//! reads the file. The random draws of a completion depend on the seed of the run, on the round, and on its place in the
//! round only, so a round that is sampled again is the same.

use crate::data::{Batch, PromptRecord, RolloutRewards, Rows, SourceRow, splitmix64};
use crate::engine::ScoredWeights;
use crate::events::EventLog;
use crate::inference::completions::CompletionRequest;
use crate::inference::sampling::Sampling;
use crate::objective::{RoundLoss, RoundScores, Rounds, Sample, WeightedLoss};
use crate::planning::completions::{CompletionSource, PromptSource};
use crate::rewards::weighted_sum;
use crate::session::interrupt::StepInterrupt;
use crate::session::reference::read_reference;
use crate::session::rewarding::{RewardedCompletion, prompt_value};
use crate::session::training::Session;
use plimsoll_core::{EvalResult, Event, RoundFigures, RoundSeconds};
use plimsoll_program::models::decoder::Scores;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Number of steps whose figures the result lists.
const LISTED_MAX: usize = 1000;

impl Session {
    /// Sets the loss weight of each token of the step's completions to minus the derivative of the loss with respect to its
    /// log-probability. Returns the loss of the step. If `stop` becomes true while rewards are computed, the run stops.
    pub(crate) fn set_completion_weights(
        &mut self,
        batch: &mut Batch,
        log: &mut EventLog,
        stop: &AtomicBool,
    ) -> Result<WeightedLoss, StepInterrupt> {
        let mut seconds = RoundSeconds::default();
        let mut samples = self.begin_round(batch, &mut seconds, log, stop)?;
        let (tokens, labelled_tokens) = (batch.rows.tokens.len() as u64, batch.rows.labelled_tokens());
        let run = &self.context.run;
        let (scores, iterates) = (run.scores(), run.grpo.num_iterations > 1);
        let mut policy = None;
        if scores != Scores::None {
            policy = Some(self.score_tokens(&mut batch.rows, ScoredWeights::Present, &mut seconds.score, log)?);
        }
        let mut is_completed = false;
        if scores == Scores::PresentAndInitial && samples.iter().any(|sample| sample.reference_logps.is_none()) {
            let initial = self.score_tokens(&mut batch.rows, ScoredWeights::Initial, &mut seconds.reference, log)?;
            samples.iter_mut().zip(initial).for_each(|(sample, logps)| sample.reference_logps = Some(logps));
            is_completed = true;
        }
        if let Some(policy) = policy.as_ref().filter(|_| iterates)
            && samples.iter().any(|sample| sample.old_logps.is_none())
        {
            complete_old_logps(&mut samples, policy);
            is_completed = true;
        }
        let rounds = self.rounds.as_mut().expect("the objective has rounds");
        let round = rounds.round_of(self.current_step);
        if is_completed {
            rounds.files.write(round, &samples)?;
        }
        let reference = match scores {
            Scores::PresentAndInitial => samples.iter().filter_map(|sample| sample.reference_logps.clone()).collect(),
            _ => read_reference(self.references.train.as_ref(), &batch.sources)?,
        };
        let reference = if reference.len() < samples.len() { vec![Vec::new(); samples.len()] } else { reference };
        let scores = RoundScores { policy: policy.as_deref(), reference: &reference };
        let found = RoundLoss::new(&rounds.settings, &samples, scores, &self.context.resolved.model.config.eos);
        rounds.current = Some((round, samples));
        found.weights.iter().enumerate().for_each(|(row, weights)| batch.rows.set_token_weights(row, weights));
        let figures = Box::new(RoundFigures { seconds, ..found.figures });
        let event = Event::Round { step: self.current_step, round, figures };
        let sampling_seconds = seconds.generate + seconds.reward;
        Ok(WeightedLoss { loss: found.loss, divisor: 1, tokens, labelled_tokens, sampling_seconds, event })
    }

    /// Returns the log-probability of each token of each completion in `rows` under these weights. Adds the time to
    /// `seconds`.
    fn score_tokens(
        &mut self,
        rows: &mut Rows,
        weights: ScoredWeights,
        seconds: &mut f64,
        log: &mut EventLog,
    ) -> Result<Vec<Vec<f64>>, StepInterrupt> {
        let begin = Instant::now();
        let scores = self.run_with_recovery(log, |session| session.team.score(rows, weights))?;
        *seconds += begin.elapsed().as_secs_f64();
        Ok((0..rows.len()).map(|row| rows.labelled_values(row, &scores)).collect())
    }

    /// Returns the completions of the step in progress, whose rows are then those of `batch`.
    fn begin_round(
        &mut self,
        batch: &mut Batch,
        seconds: &mut RoundSeconds,
        log: &mut EventLog,
        stop: &AtomicBool,
    ) -> Result<Vec<Sample>, StepInterrupt> {
        let rounds = self.rounds.as_mut().expect("the objective has rounds");
        let round = rounds.round_of(self.current_step);
        if self.info.step == 0 && rounds.current.is_none() {
            rounds.files.clear()?;
        }
        let known = rounds.current.take().filter(|(current, _)| *current == round).map(|(_, samples)| samples);
        let known = known.map_or_else(|| rounds.files.read(round), |samples| Ok(Some(samples)))?;
        if let Some(samples) = &known {
            let generations = rounds.settings.num_generations as usize;
            rounds.files.check(round, holds_samples(batch, samples, &rounds.source, generations))?;
        }
        let samples = match (known, &rounds.source) {
            (Some(samples), CompletionSource::Rollouts(_)) => return Ok(samples),
            (None, CompletionSource::Rollouts(rewards)) => return Ok(samples_of_rows(batch, rewards)),
            (Some(samples), CompletionSource::Prompts(_)) => samples,
            (None, CompletionSource::Prompts(_)) => self.sample_round(batch, round, seconds, log, stop)?,
        };
        batch.rows.clear();
        samples.iter().for_each(|sample| batch.rows.push_completion(&sample.prompt_ids, &sample.completion_ids));
        Ok(samples)
    }

    /// Samples completions of the prompts in `batch` with their rewards, and writes the file of the round.
    fn sample_round(
        &mut self,
        batch: &Batch,
        round: u64,
        seconds: &mut RoundSeconds,
        log: &mut EventLog,
        stop: &AtomicBool,
    ) -> Result<Vec<Sample>, StepInterrupt> {
        let generations = self.context.run.grpo.num_generations;
        let prompts: Vec<Vec<i32>> = (0..batch.rows.len()).map(|row| batch.rows.prompt_and_completion(row).0).collect();
        let first = splitmix64(splitmix64(self.context.run.train.seed) ^ round);
        let with_seeds = |(number, prompt): (usize, &Vec<i32>)| {
            let seeds = (0..generations).map(move |member| first ^ (number as u64 * generations + member));
            let prompt = prompt.clone();
            seeds.map(move |seed| (prompt.clone(), splitmix64(seed))).collect::<Vec<_>>()
        };
        let request = self.completion_request(prompts.iter().enumerate().flat_map(with_seeds).collect(), true);
        let source = self.prompt_source();
        let of_row = |row: &SourceRow| &source.train[row.source][row.row as usize];
        let repeated = batch.sources.iter().flat_map(|row| std::iter::repeat_n(of_row(row), generations as usize));
        let records: Vec<&PromptRecord> = repeated.collect();
        let rewarded = self.complete_and_reward(request, (&source, &records), seconds, log, stop)?;
        let all = rewarded.into_iter().zip(&records).enumerate();
        let samples: Vec<Sample> = all
            .map(|(index, (RewardedCompletion { completion, text, rewards }, record))| Sample {
                prompt: Some(prompt_value(record).clone()),
                completion: Some(text),
                prompt_ids: prompts[index / generations as usize].clone(),
                completion_ids: completion.tokens,
                rewards,
                old_logps: None,
                reference_logps: None,
                sampling_logps: Some(completion.logps),
                entropy: Some(completion.entropy),
            })
            .collect();
        let rounds = self.rounds.as_mut().expect("the objective has rounds");
        rounds.files.write(round, &samples)?;
        Ok(samples)
    }

    /// Returns the request to complete prompts: as the run file says if `samples`, else by the most likely tokens.
    fn completion_request(&self, prompts: Vec<(Vec<i32>, u64)>, samples: bool) -> CompletionRequest {
        let settings = &self.context.run.grpo;
        let sampling = Sampling {
            temperature: settings.temperature,
            top_k: settings.top_k as usize,
            top_p: settings.top_p,
            min_p: settings.min_p,
            repetition_penalty: settings.repetition_penalty,
            seed: 0,
        };
        CompletionRequest {
            prompts,
            max_new_tokens: settings.max_completion_length as usize,
            sampling: if samples { sampling } else { Sampling::GREEDY },
            end_tokens: self.context.resolved.model.config.eos.clone(),
            threads: (self.context.run.run.threads.on_host() / self.team.workers().len()).max(1),
            ended: None,
        }
    }

    /// Returns the prompts of a run whose model samples.
    fn prompt_source(&self) -> Arc<PromptSource> {
        match self.rounds.as_ref().map(|rounds| &rounds.source) {
            Some(CompletionSource::Prompts(source)) => Arc::clone(source),
            _ => unreachable!("the model samples"),
        }
    }

    /// Evaluates the most likely completion of each evaluation prompt by its rewards, on the team. Does nothing without
    /// evaluation data.
    pub(crate) fn evaluate_rewards(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let Some(data) = self.context.eval.clone() else { return Ok(()) };
        let begin = Instant::now();
        let (mut rows, mut prompts) = (Rows::new(1, data.sequence()), Vec::new());
        for row in 0..data.rows() {
            data.read([row], &mut rows)?;
            prompts.push((rows.prompt_and_completion(0).0, 0));
        }
        let rounds = self.rounds.as_ref().expect("the objective has rounds");
        let CompletionSource::Prompts(source) = &rounds.source else { return Ok(()) };
        let (source, weights) = (Arc::clone(source), rounds.settings.reward_weights.clone());
        let records: Vec<&PromptRecord> = source.eval.iter().collect();
        let (request, never) = (self.completion_request(prompts, false), AtomicBool::new(false));
        let mut phases = RoundSeconds::default();
        let rewarded = self.complete_and_reward(request, (&source, &records), &mut phases, log, &never)?;
        let sums: Vec<f64> = rewarded.iter().filter_map(|rewarded| weighted_sum(&rewarded.rewards, &weights)).collect();
        let reward = (!sums.is_empty()).then(|| sums.iter().sum::<f64>() / sums.len() as f64);
        let (step, loss, exact_match, device) = (self.info.step, f64::NAN, None, None);
        self.last_eval = Some((step, EvalResult { loss, exact_match, preferences: None, reward }));
        let tokens = rewarded.iter().map(|rewarded| rewarded.completion.tokens.len() as u64).sum();
        let seconds = begin.elapsed().as_secs_f64();
        log.emit(Event::Evaluation { step, loss, reward, exact_match, tokens, seconds, device })?;
        Ok(())
    }

    /// Keeps the figures of a step with the gradient norm `norm` for the result. Returns the alarms that they raise.
    pub(crate) fn record_round(&mut self, figures: RoundFigures, norm: f64) -> Vec<String> {
        let Some(Rounds { figures: listed, alarms, settings, .. }) = &mut self.rounds else { return Vec::new() };
        let messages = alarms.observe(&figures, norm, settings);
        if listed.len() == LISTED_MAX {
            listed.pop_front();
        }
        listed.push_back((self.info.step, figures));
        messages
    }
}

/// Sets the old log-probabilities of completions that have none to those of the current weights.
fn complete_old_logps(samples: &mut [Sample], policy: &[Vec<f64>]) {
    for (sample, policy) in samples.iter_mut().zip(policy) {
        sample.old_logps.get_or_insert_with(|| policy.clone());
    }
}

/// Returns whether `samples` are completions of the rows of `batch`: those in the rows, or `generations` of each prompt.
fn holds_samples(batch: &Batch, samples: &[Sample], source: &CompletionSource, generations: usize) -> bool {
    let rows: Vec<(Vec<i32>, Vec<i32>)> =
        (0..batch.sources.len()).map(|row| batch.rows.prompt_and_completion(row)).collect();
    match source {
        CompletionSource::Rollouts(_) => {
            let same = |((prompt, completion), sample): (&(Vec<i32>, Vec<i32>), &Sample)| {
                *prompt == sample.prompt_ids && *completion == sample.completion_ids
            };
            rows.len() == samples.len() && rows.iter().zip(samples).all(same)
        }
        CompletionSource::Prompts(_) => {
            let of = |(index, sample): (usize, &Sample)| rows[index / generations].0 == sample.prompt_ids;
            rows.len() * generations == samples.len() && samples.iter().enumerate().all(of)
        }
    }
}

/// Returns the completions in the rows of `batch`. `rewards` has those of all rows of each source.
fn samples_of_rows(batch: &Batch, rewards: &[Vec<RolloutRewards>]) -> Vec<Sample> {
    let sample = |(index, of): (usize, &SourceRow)| {
        let (prompt_ids, completion_ids) = batch.rows.prompt_and_completion(index);
        let RolloutRewards { rewards, old_logps } = rewards[of.source][of.row as usize].clone();
        Sample { prompt_ids, completion_ids, rewards, old_logps, ..Sample::default() }
    };
    batch.sources.iter().enumerate().map(sample).collect()
}
