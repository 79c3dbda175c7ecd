//! Runs every Program of a plan: loading, two training steps, evaluation, saving, generation and restoring.

use super::case::{Case, Rng};
use super::observed_device::{Observation, ObservedDevice, tensors_at_byte};
use super::reference::values;
use super::tally::Tally;
use plimsoll_core::{Category, DType, Recipe, Space};
use plimsoll_device::device::{Device, FileSpace};
use plimsoll_device::error::DeviceError;
use plimsoll_device::heap::{self, HeapGrowth};
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::models::decoder::{Generation, Scores};
use plimsoll_program::{Lifetime, Placement, ProgramKind, ProgramSet, Tensor, TensorId};
use plimsoll_train::data::Rows;
use plimsoll_train::engine::{Engine, ScoredWeights, SlotCopy, SlotTokens, StepInput, StepLoss};
use plimsoll_train::inference::sampling::Sampling;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

/// Largest permitted growth of the heap over one step, in bytes. The heap must not grow from step to step.
const KEPT_BYTES: i64 = 64 << 10;

/// All numeric results of an execution.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunValues {
    /// Loss and gradient norm of each step.
    pub losses: Vec<[f64; 2]>,
    /// Sum of the losses of the evaluated rows, and number of exactly predicted documents; `None` for a case without
    /// evaluation.
    pub evaluated: Option<(f64, u64)>,
    /// Log-probabilities of the labels of the evaluated rows; empty for a case without them.
    pub scores: Vec<f64>,
    /// Logits after the prompt, after each new token, and after a second prompt of one token. Empty for a case without
    /// text generation.
    pub logits: Vec<Vec<f64>>,
    /// Dtype and bytes of all weights and optimizer state after the steps, by tensor name and slot (`name[slot]`).
    pub tensors: BTreeMap<String, (DType, Vec<u8>)>,
}

impl RunValues {
    /// Returns whether all values of both executions are equal bit by bit.
    pub fn same_bits(&self, other: &RunValues) -> bool {
        let bits = |v: &[Vec<f64>]| v.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        let losses = |n: &RunValues| n.losses.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        let evaluated = |n: &RunValues| n.evaluated.map(|(loss, exact)| (loss.to_bits(), exact));
        losses(self) == losses(other)
            && evaluated(self) == evaluated(other)
            && bits(&self.logits) == bits(&other.logits)
            && bits(std::slice::from_ref(&self.scores)) == bits(std::slice::from_ref(&other.scores))
            && self.tensors == other.tensors
    }

    /// Returns whether all losses (also that of the evaluation), gradient norms and logits are finite.
    pub fn finite(&self) -> bool {
        let numbers = self.losses.iter().flatten().chain(self.logits.iter().flatten()).chain(&self.scores);
        numbers.into_iter().all(|x| x.is_finite()) && self.evaluated.is_none_or(|(loss, _)| loss.is_finite())
    }

    /// Returns the largest relative difference between both executions, and the name of the value that differs most.
    /// Losses, gradient norms and weight tensors (by the norm of their difference) are compared.
    pub fn distance(&self, other: &RunValues) -> (f64, String) {
        let relative = |a: f64, b: f64| if a == b { 0.0 } else { (a - b).abs() / a.abs().max(b.abs()) };
        let losses = self.losses.iter().flatten().zip(other.losses.iter().flatten());
        let losses = losses.map(|(a, b)| (relative(*a, *b), "loss or norm".to_owned()));
        // Optimizer state is skipped: with a true gradient of zero it averages rounding noise.
        let is_weight = |name: &str| !name.contains(".first[") && !name.contains(".second[");
        let weights = self.tensors.iter().filter(|(name, _)| is_weight(name)).map(|(name, (dtype, a))| {
            let (a, b) = (values(*dtype, a), values(*dtype, &other.tensors[name].1));
            let square = |x: f64| x * x;
            let apart: f64 = a.iter().zip(&b).map(|(a, b)| square(a - b)).sum();
            let size: f64 = a.iter().map(|a| square(*a)).sum();
            (if apart == 0.0 { 0.0 } else { (apart / size).sqrt() }, name.clone())
        });
        let worse = |a: &(f64, String), b: &(f64, String)| a.0.is_nan() || a.0 > b.0;
        losses.chain(weights).fold((0.0, String::new()), |worst, x| if worse(&x, &worst) { x } else { worst })
    }
}

/// Files of a run, kept in memory instead of on disk. All have their final size from the start.
pub struct InMemoryFiles(BTreeMap<String, Vec<u8>>);

impl InMemoryFiles {
    /// Creates every file of a Program set. Model files hold random weights, all other files hold bytes of 0xff.
    pub fn new(set: &ProgramSet, rng: &mut Rng) -> InMemoryFiles {
        let files = set.tensors.iter().filter(|t| t.space == Space::File);
        InMemoryFiles(files.map(|t| (t.name.clone(), file_contents(t, rng))).collect())
    }
}

/// Returns random weights for a tensor of a model file, and bytes of 0xff for any other.
fn file_contents(tensor: &Tensor, rng: &mut Rng) -> Vec<u8> {
    if !tensor.name.starts_with("model:") {
        return vec![0xff; tensor.bytes() as usize];
    }
    (0..tensor.bytes() / tensor.dtype.bytes()).flat_map(|_| random_weight(tensor.dtype, rng)).collect()
}

/// Returns the bytes of a random number of `dtype` whose magnitude is that of a usual weight.
fn random_weight(dtype: DType, rng: &mut Rng) -> Vec<u8> {
    let (sign, power, rest) = (rng.range(0, 1), rng.range(0, 3), rng.range(0, (1 << 52) - 1));
    match dtype {
        DType::F16 => ((sign << 15 | (8 + power) << 10 | rest >> 42) as u16).to_le_bytes().to_vec(),
        DType::Bf16 => ((sign << 15 | (120 + power) << 7 | rest >> 45) as u16).to_le_bytes().to_vec(),
        _ => ((sign << 31 | (120 + power) << 23 | rest >> 29) as u32).to_le_bytes().to_vec(),
    }
}

impl FileSpace for InMemoryFiles {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.0[tensor][offset as usize..offset as usize + into.len()]);
        Ok(())
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        let file = self.0.get_mut(tensor).expect("a file of the set");
        file[offset as usize..offset as usize + from.len()].copy_from_slice(from);
        Ok(())
    }
}

fn read_persistent_tensors(engine: &mut Engine, set: &ProgramSet) -> BTreeMap<String, (DType, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for (id, tensor) in set.tensors.iter().enumerate() {
        let kept = matches!(tensor.category, Category::Weight | Category::Optimizer);
        if !kept || tensor.lifetime != Lifetime::Persistent || tensor.space == Space::File {
            continue;
        }
        for slot in 0..tensor.slots {
            let mut bytes = vec![0; tensor.bytes() as usize];
            engine.device().read(TensorId(id as u32), slot, &mut bytes);
            all.insert(format!("{}[{slot}]", tensor.name), (tensor.dtype, bytes));
        }
    }
    all
}

/// Compares the checkpoint and the saved model with the tensors in the arena. Describes the first mismatch; returns
/// `None` if all are equal. If weights have f32 master copies, checkpoints hold the masters, and the saved model holds
/// the weights.
fn find_file_mismatch(
    case: &Case,
    memory: &InMemoryFiles,
    tensors: &BTreeMap<String, (DType, Vec<u8>)>,
) -> Option<String> {
    for p in case.config.hf_parameters() {
        for (file, bytes) in &memory.0 {
            let Some((group, name)) = file.split_once(':') else { continue };
            let state = match name.strip_suffix(&p.hf_name) {
                Some("") => String::new(),
                Some(state) => format!(".{}", state.trim_end_matches('.')),
                None => continue,
            };
            if group == "model" {
                continue;
            }
            let layer = p.layer.unwrap_or(0);
            let master =
                tensors.get(&format!("{}.master[{layer}]", p.tensor)).filter(|_| state.is_empty() && group != "saved");
            let (dtype, tensor) = master.unwrap_or_else(|| &tensors[&format!("{}{state}[{layer}]", p.tensor)]);
            let size = dtype.bytes();
            let first = (p.offset * size) as usize;
            if tensor[first..first + (p.elements() * size) as usize] != bytes[..] {
                return Some(format!("{file} is not what the arena holds"));
            }
        }
    }
    None
}

/// Options for the execution of a plan.
#[derive(Clone, Copy)]
pub struct ExecutionOptions<'a> {
    /// Dtype of the arithmetic.
    pub precision: DType,
    /// Number of CPU threads.
    pub threads: u32,
    /// The way in which the device is observed while it runs.
    pub observation: Observation,
    /// Name of the case in failure messages.
    pub label: &'a str,
    /// Function that wraps the opened device. Tests inject a fault with it; by default it returns the device unchanged.
    pub damage: fn(Box<dyn Device>) -> Box<dyn Device>,
}

impl<'a> ExecutionOptions<'a> {
    /// Returns options with the precision and threads of the case, without an injected fault, and without observing
    /// single ops.
    pub fn new(case: &Case, label: &'a str) -> ExecutionOptions<'a> {
        let undamaged = |device| device;
        ExecutionOptions {
            precision: case.precision,
            threads: case.threads,
            observation: Observation::Outcome,
            label,
            damage: undamaged,
        }
    }
}

/// Generates tokens until the cache is full. Returns the logits after the prompt, after each new token, and after a
/// second prompt of one token. With several sequences, each begins with a copy of the first tokens of the first one, and the
/// logits of all are returned after each of a few tokens. This runs every Program of text generation.
///
/// # Errors
/// Fails if the device fails.
pub fn generate_all(case: &Case, generation: Generation, engine: &mut Engine) -> Result<Vec<Vec<f64>>, DeviceError> {
    let prompt = case.prompt(generation);
    if generation.slots > 1 {
        return generate_sequences(&prompt[..prompt.len() / 2], engine);
    }
    let (mut length, mut all) = (prompt.len(), Vec::new());
    let mut logits = engine.extend(&prompt, 0)?;
    loop {
        let token = Sampling::GREEDY.choose(&mut logits, &[]) as i32;
        all.push(logits);
        if length as u64 == generation.capacity {
            break;
        }
        logits = engine.extend(&[token], length)?;
        length += 1;
    }
    // A prompt of one token, for prompts that fill the cache completely.
    all.push(engine.extend(&prompt[..1], 0)?);
    Ok(all)
}

/// Generates a few tokens of several sequences, which all have this prompt.
fn generate_sequences(prompt: &[i32], engine: &mut Engine) -> Result<Vec<Vec<f64>>, DeviceError> {
    let slots = engine.slots();
    engine.append(&[SlotTokens { slot: 0, tokens: prompt, length: 0 }])?;
    let copied = |slot: usize| prompt.len().saturating_sub(slot - 1);
    let copies: Vec<SlotCopy> =
        (1..slots).map(|slot| SlotCopy { from: 0, to: slot, positions: 0..copied(slot) }).collect();
    engine.copy_slots(&copies)?;
    let rest = |slot: usize| SlotTokens { slot, tokens: &prompt[copied(slot)..], length: copied(slot) };
    engine.append(&(1..slots).map(rest).collect::<Vec<_>>())?;
    let (mut tokens, mut all) = (vec![0; slots], Vec::new());
    for length in prompt.len()..prompt.len() + 3 {
        engine.decode(&tokens, &vec![length; slots])?;
        for (slot, token) in tokens.iter_mut().enumerate() {
            let mut logits = Vec::new();
            engine.read_logits(slot, &mut logits)?;
            *token = Sampling::GREEDY.choose(&mut logits, &[]) as i32;
            all.push(logits);
        }
    }
    Ok(all)
}

/// Trains one step on random rows of the case. Returns the loss, and the growth of the heap meanwhile.
///
/// # Errors
/// Fails if the device fails.
pub fn train_step(
    case: &Case,
    engine: &mut Engine,
    step: u64,
    learning_rate: f64,
) -> Result<(StepLoss, HeapGrowth), DeviceError> {
    let mut rows = case.rows(case.sequences, step);
    let loss_divisor = rows.labelled_tokens();
    let input = StepInput { step, learning_rate, betas: [0.9, 0.95], clip_norm: case.clip_norm, loss_divisor };
    // The loader pads rows to whole micro-batches. Its memory must not count as growth of the step.
    rows.tokens.reserve(1 << 12);
    let (loss, grown) = heap::measure_growth(|| {
        let loss = engine.gradients(&mut rows, &input, 1)?;
        engine.update()?;
        Ok::<_, DeviceError>(loss)
    });
    Ok((loss?, grown))
}

/// Runs every Program of a plan, adds the checks to `tally`, and returns the numeric results.
///
/// # Errors
/// Fails if the device fails.
pub fn execute(
    case: &Case,
    outcome: &PlanOutcome,
    options: ExecutionOptions,
    tally: &mut Tally,
) -> Result<RunValues, DeviceError> {
    let found = Arc::new(Mutex::new(Tally::default()));
    let numbers = execute_programs(case, outcome, options, &found, tally);
    // Checks from before a device failure count as well.
    tally.add(std::mem::take(&mut *found.lock().expect("no thread panics while it holds the lock")));
    numbers
}

/// Runs every Program of a plan and returns the numeric results. Checks by the observed device are added to `found`,
/// all others to `tally`.
fn execute_programs(
    case: &Case,
    outcome: &PlanOutcome,
    options: ExecutionOptions,
    found: &Arc<Mutex<Tally>>,
    tally: &mut Tally,
) -> Result<RunValues, DeviceError> {
    let ExecutionOptions { precision, threads, observation, label, damage } = options;
    let set = Arc::new(outcome.set.clone());
    let placement: Placement = outcome.layout.placement.clone();
    let recipe: Recipe = outcome.plan.recipe.clone();
    let inner = damage(case.device.open(outcome.set.clone(), placement.clone(), precision, threads)?);
    let (its_set, its_found) = (Arc::clone(&set), Arc::clone(found));
    let device =
        ObservedDevice::new(inner, its_set, placement.clone(), precision, observation, its_found, label.to_owned())?;
    let (sequence, vocab) = (case.sequence, case.config.vocab);
    let mut engine = Engine::new(Box::new(device), &set, precision, recipe.clone(), sequence, vocab);
    let mut memory = InMemoryFiles::new(&set, &mut Rng::new(case.seed, case.number));
    let mut numbers = RunValues::default();

    engine.move_files(ProgramKind::Load, &mut memory)?;
    let mut scored_rows = case.rows(u64::from(recipe.micro_batch) + 1, 99);
    let mut scores_at_start = Vec::new();
    if case.scores == Scores::PresentAndInitial {
        scores_at_start = score(&mut engine, &mut scored_rows, ScoredWeights::Present)?;
    }
    if case.optimizer.is_some() {
        engine.run(ProgramKind::InitOptimizer)?;
        for step in 1..=2 {
            let (loss, grown) = train_step(case, &mut engine, step, 1e-2)?;
            numbers.losses.push([loss.loss, loss.norm]);
            if observation == Observation::Outcome && step == 2 {
                let kept = grown.kept_bytes;
                tally.figure("heap kept after a step, bytes", kept as f64, kept <= KEPT_BYTES, || {
                    format!("{label}: {kept} bytes")
                });
            }
        }
    }
    numbers.evaluated = evaluate(case, recipe.micro_batch, &mut engine)?;
    if case.scores == Scores::PresentAndInitial {
        let initial = score(&mut engine, &mut scored_rows, ScoredWeights::Initial)?;
        let equal = initial.iter().zip(&scores_at_start).all(|(one, other)| one.to_bits() == other.to_bits());
        tally.check("scores under the initial weights stay", equal, || label.to_owned());
    }
    if case.scores != Scores::None {
        numbers.scores = score(&mut engine, &mut scored_rows, ScoredWeights::Present)?;
        check_scores(&numbers, label, tally);
    }
    numbers.tensors = read_persistent_tensors(&mut engine, &set);
    if case.optimizer.is_some() {
        engine.move_files(ProgramKind::Checkpoint, &mut memory)?;
        engine.move_files(ProgramKind::Save, &mut memory)?;
        let wrong = find_file_mismatch(case, &memory, &numbers.tensors);
        tally.check("files hold what the arena holds", wrong.is_none(), || {
            format!("{label}: {}", wrong.unwrap_or_default())
        });
    }
    if let Some(generation) = case.generation {
        numbers.logits = generate_all(case, generation, &mut engine)?;
    }
    if case.optimizer.is_some() {
        if case.scores == Scores::PresentAndInitial {
            engine.move_files(ProgramKind::Load, &mut memory)?;
        }
        engine.move_files(ProgramKind::Restore, &mut memory)?;
        let same = read_persistent_tensors(&mut engine, &set) == numbers.tensors;
        tally.check("restore brings back every bit", same, || label.to_owned());
        let evaluated = evaluate(case, recipe.micro_batch, &mut engine)?;
        let same = evaluated.map(|(loss, _)| loss.to_bits()) == numbers.evaluated.map(|(loss, _)| loss.to_bits());
        tally.check("restore brings back every bit", same, || {
            format!("{label}: {evaluated:?} was {:?}", numbers.evaluated)
        });
    }
    if observation == Observation::Outcome {
        let (planned, used) = (placement.arena_bytes, engine.stats().arena_measured_bytes.0);
        tally.figure("arena planned but not used, bytes", planned as f64 - used as f64, planned == used, || {
            let top = tensors_at_byte(&set, &placement, Space::Device, planned - 1).join(", ");
            format!("{label}: planned {planned}, used {used}; on top stands {top}")
        });
    }
    Ok(numbers)
}

/// Checks that the scores of the evaluated rows add up to their loss.
fn check_scores(numbers: &RunValues, label: &str, tally: &mut Tally) {
    if let Some((loss, _)) = numbers.evaluated {
        let scored = -numbers.scores.iter().sum::<f64>();
        let difference = (scored - loss).abs() / loss.abs().max(1.0);
        tally.figure("scores add up to the loss", difference, difference < 1e-4, || {
            format!("{label}: {scored} for {loss}")
        });
    }
}

/// Returns the log-probabilities of the labels of `rows` under these weights.
fn score(engine: &mut Engine, rows: &mut Rows, weights: ScoredWeights) -> Result<Vec<f64>, DeviceError> {
    Ok(engine.score(rows, weights, 1)?.expect("one device computes the loss"))
}

/// Evaluates more rows than one micro-batch has. Returns the sum of the losses and the number of exact matches; `None`
/// if the case has no evaluation.
fn evaluate(case: &Case, micro_batch: u32, engine: &mut Engine) -> Result<Option<(f64, u64)>, DeviceError> {
    if !case.evaluate {
        return Ok(None);
    }
    let sum = engine.evaluate(&mut case.rows(u64::from(micro_batch) + 1, 99))?;
    Ok(Some((sum.loss_sum, sum.exact)))
}
