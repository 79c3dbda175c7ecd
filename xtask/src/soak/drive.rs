//! Every Program of a plan, run: load, two steps, evaluation, files, tokens, restore.

use super::case::{Case, Draw};
use super::tally::Tally;
use super::twin::values;
use super::watch::{Look, Watched, standing_at};
use plimsoll_core::{Category, DType, Recipe, Space};
use plimsoll_device::device::{Device, DeviceError, FileSpace};
use plimsoll_device::heap::{self, Grown};
use plimsoll_plan::search::Answer;
use plimsoll_program::models::decoder::Generation;
use plimsoll_program::{Lifetime, Placement, ProgramSet, TensorId};
use plimsoll_train::inference::samples::Sampling;
use plimsoll_train::session::engine::{Engine, StepInput, StepLoss};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

/// What the heap may keep after a step: nothing grows from step to step.
const KEPT_BYTES: i64 = 64 << 10;

/// All numbers that a run leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    /// Loss and norm of each step.
    pub losses: Vec<[f64; 2]>,
    /// Sum of the losses of the evaluated rows, and documents that were hit.
    pub evaluated: Option<(f64, u64)>,
    /// Logits after the prompt and after each new token.
    pub logits: Vec<Vec<f64>>,
    /// Weights and optimizer state, after the steps, with the type of their elements.
    pub tensors: BTreeMap<String, (DType, Vec<u8>)>,
}

impl Numbers {
    /// Whether all bits are the same.
    pub fn same_bits(&self, other: &Numbers) -> bool {
        let bits = |v: &[Vec<f64>]| v.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        let losses = |n: &Numbers| n.losses.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        let evaluated = |n: &Numbers| n.evaluated.map(|(loss, exact)| (loss.to_bits(), exact));
        losses(self) == losses(other)
            && evaluated(self) == evaluated(other)
            && bits(&self.logits) == bits(&other.logits)
            && self.tensors == other.tensors
    }

    /// Whether there is no NaN and no infinity among losses and logits.
    pub fn finite(&self) -> bool {
        self.losses.iter().flatten().chain(self.logits.iter().flatten()).all(|x| x.is_finite())
            && self.evaluated.is_none_or(|(loss, _)| loss.is_finite())
    }

    /// The largest relative distance of a loss, or of a tensor (norm-wise) among weights; and which it is.
    pub fn distance(&self, other: &Numbers) -> (f64, String) {
        let relative = |a: f64, b: f64| if a == b { 0.0 } else { (a - b).abs() / a.abs().max(b.abs()) };
        let losses = self.losses.iter().flatten().zip(other.losses.iter().flatten());
        let losses = losses.map(|(a, b)| (relative(*a, *b), "loss or norm".to_owned()));
        // State of the optimizer may be an average of rounding noise, where the true gradient is zero.
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

/// File-space tensors in memory, made whole before anything runs.
pub struct Memory(BTreeMap<String, Vec<u8>>);

impl Memory {
    /// Every file of the set: weights drawn, the rest still to be written.
    pub fn new(set: &ProgramSet, draw: &mut Draw) -> Memory {
        let files = set.tensors.iter().filter(|t| t.space == Space::File);
        let contents = |name: &str, dtype: DType, bytes: u64| {
            if !name.starts_with("model:") {
                return vec![0xff; bytes as usize];
            }
            (0..bytes / dtype.bytes()).flat_map(|_| weight(dtype, draw)).collect()
        };
        let mut contents = contents;
        Memory(files.map(|t| (t.name.clone(), contents(&t.name, t.dtype, t.bytes()))).collect())
    }
}

/// A number of a size that weights have, in the bytes of its type.
fn weight(dtype: DType, draw: &mut Draw) -> Vec<u8> {
    let (sign, power, rest) = (draw.from(0, 1), draw.from(0, 3), draw.from(0, (1 << 52) - 1));
    match dtype {
        DType::F16 => ((sign << 15 | (8 + power) << 10 | rest >> 42) as u16).to_le_bytes().to_vec(),
        DType::Bf16 => ((sign << 15 | (120 + power) << 7 | rest >> 45) as u16).to_le_bytes().to_vec(),
        _ => ((sign << 31 | (120 + power) << 23 | rest >> 29) as u32).to_le_bytes().to_vec(),
    }
}

impl FileSpace for Memory {
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

fn persistent(engine: &mut Engine, set: &ProgramSet) -> BTreeMap<String, (DType, Vec<u8>)> {
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

/// What files hold, checked against the tensors that were in the arena. Where weights have masters, checkpoints hold
/// these, and the saved model does not.
fn files_hold(case: &Case, memory: &Memory, tensors: &BTreeMap<String, (DType, Vec<u8>)>) -> Option<String> {
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

/// How a plan is run.
#[derive(Clone, Copy)]
pub struct How<'a> {
    /// Arithmetic.
    pub precision: DType,
    /// Threads.
    pub threads: u32,
    /// How closely it is looked at.
    pub look: Look,
    /// What the case is called in failures.
    pub label: &'a str,
    /// What is done to the device before anyone looks at it: faults are put in here.
    pub damage: fn(Box<dyn Device>) -> Box<dyn Device>,
}

impl<'a> How<'a> {
    /// In the case's precision with its threads, undamaged.
    pub fn new(case: &Case, label: &'a str) -> How<'a> {
        let undamaged = |device| device;
        How { precision: case.precision, threads: case.threads, look: Look::Beside, label, damage: undamaged }
    }
}

/// Logits after a prompt and after each token until the cache is full, and after a prompt of one token: every Program
/// of generation runs.
///
/// # Errors
/// What the device says.
pub fn generated(case: &Case, generation: Generation, engine: &mut Engine) -> Result<Vec<Vec<f64>>, DeviceError> {
    let prompt = case.prompt(generation);
    let (mut length, mut all) = (prompt.len(), Vec::new());
    let mut logits = engine.extend(&prompt, 0)?;
    loop {
        let token = Sampling::GREEDY.choose(&logits, length as u64) as i32;
        all.push(logits);
        if length as u64 == generation.capacity {
            break;
        }
        logits = engine.extend(&[token], length)?;
        length += 1;
    }
    // Where the prompt left no room behind it.
    all.push(engine.extend(&prompt[..1], 0)?);
    Ok(all)
}

/// One step on the case's rows: its loss, and what the heap gave meanwhile.
///
/// # Errors
/// What the device says.
pub fn trained(
    case: &Case,
    engine: &mut Engine,
    step: u64,
    learning_rate: f64,
) -> Result<(StepLoss, Grown), DeviceError> {
    let mut rows = case.rows(case.sequences, step);
    let labelled_tokens = rows.labelled_tokens();
    let input = StepInput { step, learning_rate, betas: [0.9, 0.95], clip_norm: case.clip_norm, labelled_tokens };
    // Rows are filled up to whole micro-batches: that is the loader's memory, not the step's.
    rows.tokens.reserve(1 << 12);
    let (loss, grown) = heap::grown(|| {
        let loss = engine.gradients(&mut rows, &input, 1)?;
        engine.update()?;
        Ok::<_, DeviceError>(loss)
    });
    Ok((loss?, grown))
}

/// Runs every Program of a plan.
///
/// # Errors
/// What the device says.
pub fn drive(case: &Case, answer: &Answer, how: How, tally: &mut Tally) -> Result<Numbers, DeviceError> {
    let found = Arc::new(Mutex::new(Tally::default()));
    let numbers = driven(case, answer, how, &found, tally);
    // Also what was found before the device failed.
    tally.add(std::mem::take(&mut *found.lock().expect("nobody panics with it")));
    numbers
}

/// The same; what is `found` at each op stands beside the tally.
fn driven(
    case: &Case,
    answer: &Answer,
    how: How,
    found: &Arc<Mutex<Tally>>,
    tally: &mut Tally,
) -> Result<Numbers, DeviceError> {
    let How { precision, threads, look, label, damage } = how;
    let set = Arc::new(answer.set.clone());
    let placement: Placement = answer.layout.placement.clone();
    let recipe: Recipe = answer.plan.recipe.clone();
    let inner = damage(case.place.open(answer.set.clone(), placement.clone(), precision, threads)?);
    let (its_set, its_found) = (Arc::clone(&set), Arc::clone(found));
    let device = Watched::new(inner, its_set, placement.clone(), precision, look, its_found, label.to_owned())?;
    let (sequence, vocab) = (case.sequence, case.config.vocab);
    let mut engine = Engine::new(Box::new(device), &set, precision, recipe.clone(), sequence, vocab);
    let mut memory = Memory::new(&set, &mut Draw::new(case.seed, case.number));
    let mut numbers = Numbers { losses: Vec::new(), evaluated: None, logits: Vec::new(), tensors: BTreeMap::new() };

    engine.move_files("load", &mut memory)?;
    if case.optimizer.is_some() {
        engine.run("fresh")?;
        for step in 1..=2 {
            let (loss, grown) = trained(case, &mut engine, step, 1e-2)?;
            numbers.losses.push([loss.loss, loss.norm]);
            if look == Look::Beside && step == 2 {
                let kept = grown.kept_bytes;
                tally.figure("heap kept after a step, bytes", kept as f64, kept <= KEPT_BYTES, || {
                    format!("{label}: {kept} bytes")
                });
            }
        }
    }
    let evaluation = |engine: &mut Engine| -> Result<Option<(f64, u64)>, DeviceError> {
        if !case.evaluate {
            return Ok(None);
        }
        let sum = engine.evaluate(&mut case.rows(u64::from(recipe.micro_batch) + 1, 99))?;
        Ok(Some((sum.loss_sum, sum.exact)))
    };
    numbers.evaluated = evaluation(&mut engine)?;
    numbers.tensors = persistent(&mut engine, &set);
    if case.optimizer.is_some() {
        engine.move_files("checkpoint", &mut memory)?;
        engine.move_files("save", &mut memory)?;
        let wrong = files_hold(case, &memory, &numbers.tensors);
        tally.check("files hold what the arena holds", wrong.is_none(), || {
            format!("{label}: {}", wrong.unwrap_or_default())
        });
    }
    if let Some(generation) = case.generation {
        numbers.logits = generated(case, generation, &mut engine)?;
    }
    if case.optimizer.is_some() {
        engine.move_files("restore", &mut memory)?;
        let same = persistent(&mut engine, &set) == numbers.tensors;
        tally.check("restore brings back every bit", same, || label.to_owned());
        let evaluated = evaluation(&mut engine)?;
        let same = evaluated.map(|(loss, _)| loss.to_bits()) == numbers.evaluated.map(|(loss, _)| loss.to_bits());
        tally.check("restore brings back every bit", same, || {
            format!("{label}: {evaluated:?} was {:?}", numbers.evaluated)
        });
    }
    if look == Look::Beside {
        let (planned, used) = (placement.arena_bytes, engine.stats().arena_measured_bytes.0);
        tally.figure("arena planned but not used, bytes", planned as f64 - used as f64, planned == used, || {
            let top = standing_at(&set, &placement, Space::Device, planned - 1).join(", ");
            format!("{label}: planned {planned}, used {used}; on top stands {top}")
        });
    }
    Ok(numbers)
}
