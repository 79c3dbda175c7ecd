//! What is done with a finished model: its loss on data, and tokens from a prompt.

pub mod merge;
pub mod samples;

use crate::config::{Long, RunFile};
use crate::data::{Dataset, Tokenizer};
use crate::planning::charges::settle_charges;
use crate::planning::prepare::{dataset, load_weights};
use crate::resolve::{Model, Resolved, Work};
use crate::session::engine::{Engine, Evaluated};
use crate::session::evaluation::{Cut, evaluate};
use crate::team::open::settle_gpu;
use plimsoll_core::Failure;
use plimsoll_plan::search::{Answer, search};
use plimsoll_program::models::decoder::Generation;
use samples::{Sampling, generate};
use serde::Serialize;

/// Sequences of an evaluation are no longer than this unless the user says so: a model's longest
/// sequence may take more memory than anybody wants to spend on a loss.
const SEQUENCE_MAX: u64 = 4096;
/// Sequences evaluated at once, at most.
const AT_ONCE: u64 = 16;
/// Tokens of a prompt that go in at once.
const CHUNK: u64 = 64;

/// The loss of a model on data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// Mean negative log-likelihood over the labelled tokens.
    pub loss: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// Labelled tokens.
    pub tokens: u64,
}

/// Text that a model wrote.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Text {
    /// What it was given.
    pub prompt: String,
    /// What it wrote.
    pub text: String,
    /// The tokens of that.
    pub tokens: Vec<i32>,
}

/// A planned evaluation.
pub struct Evaluation {
    file: RunFile,
    resolved: Resolved,
    data: Dataset,
    answer: Answer,
}

impl Evaluation {
    /// Plans to evaluate the run file's model on its evaluation data, each sample in a row of its own.
    /// Without `sequence`, rows are as long as the longest sample, as far as the model goes.
    ///
    /// # Errors
    /// What is wrong with the model or the data.
    pub fn new(mut file: RunFile, sequence: Option<u32>) -> Result<Evaluation, Failure> {
        let model = Model::open(&file)?;
        model.check_weights(&file)?;
        (file.data.pack, file.data.long) = (false, Long::Split);
        let most = model.config.max_positions.min(SEQUENCE_MAX) as u32;
        file.data.sequence = sequence.unwrap_or(most);
        file.train.batch_tokens = u64::from(file.data.sequence);
        if sequence.is_none() {
            // The longest sample is known once the data have been read; a second look is cheap.
            let (longest, _) = dataset(&file, &model, &file.data.eval, 1)?.longest_document();
            file.data.sequence = most.min((longest.max(2) - 1).try_into().unwrap_or(most));
        }
        let mut resolved = Resolved::to_run(&file, model, Work::Evaluate)?;
        let data = dataset(&file, &resolved.model, &file.data.eval, resolved.device.threads as usize)?;
        let sequence = u64::from(file.data.sequence);
        file.train.batch_tokens = sequence * data.rows().clamp(1, AT_ONCE);
        let plan = |resolved: &mut Resolved, file: &RunFile| {
            settle_charges(&mut resolved.device, file.batch_sequences(), sequence);
            let answer = search(&resolved.question(file, Work::Evaluate)?);
            match settle_gpu(&mut resolved.device, &answer, file.scratch())? {
                true => Ok(search(&resolved.question(file, Work::Evaluate)?)),
                false => Ok(answer),
            }
        };
        let answer = plan(&mut resolved, &file)?;
        let answer = resolved.or_on_cpu(&file, answer, plan)?;
        Ok(Evaluation { file, resolved, data, answer })
    }

    /// The plan, and what it is about.
    pub fn plan(&self) -> (&RunFile, &Resolved, &Answer) {
        (&self.file, &self.resolved, &self.answer)
    }

    /// Evaluates all samples.
    ///
    /// # Errors
    /// A model or data that cannot be read after all.
    pub fn run(self) -> Result<Loss, Failure> {
        let mut engine = open(&self.file, &self.resolved, self.answer)?;
        let cut = Cut { rows: 0..self.data.rows(), at_once: engine.recipe().micro_batch };
        let sum: Evaluated = evaluate(&mut engine, &self.data, &cut, 0)?;
        Ok(Loss { loss: sum.loss(), perplexity: sum.loss().exp(), tokens: sum.tokens })
    }
}

/// A planned continuation of a prompt.
pub struct Continuation {
    file: RunFile,
    resolved: Resolved,
    tokenizer: Tokenizer,
    prompt: String,
    tokens: Vec<i32>,
    most: usize,
    capacity: u64,
    answer: Answer,
}

impl Continuation {
    /// Plans to go on from `prompt` for at most `most` tokens.
    ///
    /// # Errors
    /// What is wrong with the model, its tokenizer or the prompt.
    pub fn new(mut file: RunFile, prompt: &str, most: usize) -> Result<Continuation, Failure> {
        file.data.sequence = 1;
        file.train.batch_tokens = 1;
        let model = Model::open(&file)?;
        model.check_weights(&file)?;
        let mut resolved = Resolved::to_run(&file, model, Work::Evaluate)?;
        let path = resolved.model.tokenizer().ok_or_else(|| {
            Failure::input(format!("{} has no tokenizer.json", file.model_name()))
                .hint("put the model's tokenizer beside its weights")
        })?;
        let tokenizer = Tokenizer::load(&path)?;
        let tokens: Vec<i32> = tokenizer.encode(prompt)?.into_iter().map(|id| id as i32).collect();
        let vocab = resolved.model.config.vocab;
        if let Some(bad) = tokens.iter().find(|id| **id as u64 >= vocab) {
            return Err(Failure::input(format!("{}: token {bad} is not among the model's {vocab}", path.display()))
                .hint("this tokenizer is another model's"));
        }
        if tokens.is_empty() {
            return Err(Failure::input("the prompt has no tokens").hint("give some text to go on from"));
        }
        let positions = resolved.model.config.max_positions;
        let wanted = tokens.len() as u64 + most as u64;
        if wanted > positions {
            let message = format!(
                "{} tokens of prompt and {most} new ones are more than the {positions} positions of the model",
                tokens.len()
            );
            return Err(Failure::input(message).hint("ask for fewer with --max-tokens, or shorten the prompt"));
        }
        let capacity = wanted.next_multiple_of(CHUNK);
        let work = || Work::Generate(Generation { capacity, chunk: CHUNK });
        let plan = |resolved: &mut Resolved, file: &RunFile| {
            settle_charges(&mut resolved.device, 1, 1);
            let answer = search(&resolved.question(file, work())?);
            match settle_gpu(&mut resolved.device, &answer, file.scratch())? {
                true => Ok(search(&resolved.question(file, work())?)),
                false => Ok(answer),
            }
        };
        let answer = plan(&mut resolved, &file)?;
        let answer = resolved.or_on_cpu(&file, answer, plan)?;
        let prompt = prompt.to_owned();
        Ok(Continuation { file, resolved, tokenizer, prompt, tokens, most, capacity, answer })
    }

    /// The plan, and what it is about.
    pub fn plan(&self) -> (&RunFile, &Resolved, &Answer) {
        (&self.file, &self.resolved, &self.answer)
    }

    /// Writes the text.
    ///
    /// # Errors
    /// A model that cannot be read after all.
    pub fn run(self, sampling: &Sampling) -> Result<Text, Failure> {
        let mut engine = open(&self.file, &self.resolved, self.answer)?;
        let ends = &self.resolved.model.config.eos;
        let tokens = generate(&mut engine, &self.tokens, self.most, self.capacity as usize, ends, sampling)?;
        let text = |ids: &[i32]| self.tokenizer.decode(&ids.iter().map(|&id| id as u32).collect::<Vec<_>>());
        // What a token looks like depends on the one before it: a space, mostly.
        let (before, whole) = (text(&self.tokens)?, text(&[&self.tokens[..], &tokens].concat())?);
        let new = match whole.strip_prefix(&before) {
            Some(new) => new.to_owned(),
            None => text(&tokens)?,
        };
        Ok(Text { prompt: self.prompt, text: new, tokens })
    }
}

fn open(file: &RunFile, resolved: &Resolved, answer: Answer) -> Result<Engine, Failure> {
    let (sequence, vocab) = (u64::from(file.data.sequence), resolved.model.config.vocab);
    let device = &resolved.device;
    let precision = answer.precision;
    let mut engine = Engine::open(answer, precision, device, None, file.scratch(), sequence, vocab)?;
    load_weights(&mut engine, &resolved.model, file)?;
    Ok(engine)
}
