//! One device with the Programs of a run: steps, evaluations, tokens. No files, no clock, no order.

use crate::data::Rows;
use crate::fault_injection::Rehearsal;
use crate::files::StoredTensor;
use crate::remote::device::{Connection, FarDevice};
use crate::session::spaces::stored;
use crate::team::abreast::Gone;
use crate::team::open::open;
use bytemuck::cast_slice;
use plimsoll_core::{Algorithms, Bytes, CollectivesBy, DType, DeviceSpec, Recipe, Space};
use plimsoll_device::cpu::executor::{real_bytes, real_values};
use plimsoll_device::cuda::open::OnGpu;
use plimsoll_device::device::{Call, Device, DeviceError, FileSpace, NoFiles, Observer, Stats, Unobserved};
use plimsoll_device::probe::Memory;
use plimsoll_device::process;
use plimsoll_device::transport::Seat;
use plimsoll_plan::search::Answer;
use plimsoll_program::scalars::{METRIC_COUNT, METRICS, Metric, SCALAR_COUNT, SCALARS, Scalar};
use plimsoll_program::{Program, ProgramSet, Schedule, TensorId, schedule};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the host must give for a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInput {
    /// Counted from 1.
    pub step: u64,
    /// The rate.
    pub learning_rate: f64,
    /// The averages of AdamW: their bias is corrected.
    pub betas: [f64; 2],
    /// The global norm is clipped to this; 0 clips nothing.
    pub clip_norm: f64,
    /// Tokens that count in the loss of the whole step.
    pub labelled_tokens: u64,
}

/// What a step says before the weights change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLoss {
    /// Mean over the labelled tokens of the step.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub norm: f64,
}

impl StepLoss {
    /// Whether the update may be done.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.norm.is_finite()
    }
}

/// An evaluated micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluated {
    /// Sum of the negative log-likelihoods of labelled tokens.
    pub loss_sum: f64,
    /// Labelled tokens.
    pub tokens: u64,
    /// Documents with labels.
    pub samples: u64,
    /// Documents all of whose labelled tokens were the most likely ones.
    pub exact: u64,
}

impl Evaluated {
    /// Adds another micro-batch.
    pub fn add(&mut self, other: Evaluated) {
        self.loss_sum += other.loss_sum;
        self.tokens += other.tokens;
        self.samples += other.samples;
        self.exact += other.exact;
    }

    /// Mean over the labelled tokens.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.tokens as f64
    }
}

/// What the host fills for a micro-batch; a stage of a pipeline needs some of it, who computes nothing none.
struct Inputs {
    tokens: Option<Input>,
    labels: Option<Input>,
    positions: Option<Input>,
    document_start: Option<Input>,
    weights: Option<Input>,
}

/// A tensor with a slot for each micro-batch in flight.
#[derive(Clone, Copy)]
struct Input {
    tensor: TensorId,
    slots: u32,
}

/// What a pass of generation is given and gives: of the stages of a pipeline only the first takes tokens, and only the last
/// has logits; who computes nothing has none of it.
#[derive(Clone, Copy)]
struct Generating {
    tokens: Option<TensorId>,
    positions: Option<TensorId>,
    logits: Option<TensorId>,
    /// Tokens at once.
    room: usize,
}

/// The tensors of a set of Programs that the host fills and reads.
struct Names {
    scalars: TensorId,
    metrics: TensorId,
    train: Option<Inputs>,
    /// Micro-batches whose activations have room at once: several on a stage of a pipeline.
    in_flight: u32,
    /// The hits are where the loss is.
    evaluate: Option<(Inputs, Option<TensorId>)>,
    prefill: Option<Generating>,
    decode: Option<Generating>,
    capacity: usize,
    /// Ops of each Program.
    lengths: HashMap<String, u32>,
    /// What each Program reads from files, or writes.
    files: HashMap<String, Vec<StoredTensor>>,
}

impl Names {
    /// Of no Programs.
    fn none() -> Names {
        Names {
            scalars: TensorId(0),
            metrics: TensorId(0),
            train: None,
            in_flight: 1,
            evaluate: None,
            prefill: None,
            decode: None,
            capacity: 0,
            lengths: HashMap::new(),
            files: HashMap::new(),
        }
    }

    fn of(set: &ProgramSet) -> Names {
        let find = |name: &str| set.find(name).unwrap_or_else(|| panic!("the programs have no `{name}`"));
        let named = |list: &[TensorId], name: &str| set.find(name).filter(|tensor| list.contains(tensor));
        let inputs = |program: &Program, prefix: &str| {
            let input = |name: &str| {
                let tensor = named(&program.inputs, &format!("{prefix}.{name}"))?;
                Some(Input { tensor, slots: set.tensor(tensor).slots })
            };
            Inputs {
                tokens: input("tokens"),
                labels: input("labels"),
                positions: input("positions"),
                document_start: input("document_start"),
                weights: input("token_weights"),
            }
        };
        let generation = |name: &str| {
            set.program(name).map(|program| Generating {
                tokens: named(&program.inputs, &format!("{name}.tokens")),
                positions: named(&program.inputs, &format!("{name}.positions")),
                logits: named(&program.outputs, &format!("{name}.logits")),
                room: set.tensor(find(&format!("{name}.positions"))).elements() as usize,
            })
        };
        let train = set.program("forward").map(|program| inputs(program, "train"));
        Names {
            scalars: find(SCALARS),
            metrics: find(METRICS),
            // Positions are read by every backward pass.
            in_flight: train.as_ref().and_then(|train| train.positions).map_or(1, |input| input.slots),
            train,
            evaluate: set
                .program("evaluate")
                .map(|program| (inputs(program, "evaluate"), named(&program.outputs, "evaluate.correct"))),
            prefill: generation("prefill"),
            decode: generation("decode"),
            capacity: set.find("cache_keys").map_or(0, |keys| set.tensor(keys).shape[0] as usize),
            lengths: set.programs.iter().map(|program| (program.name.clone(), program.length() as u32)).collect(),
            files: set.programs.iter().map(|program| (program.name.clone(), stored(set, &program.name))).collect(),
        }
    }
}

/// A device that is ready to work.
pub struct Engine {
    device: Box<dyn Device>,
    gpu: Option<OnGpu>,
    /// The way to its process, where that is another one.
    far: Option<Arc<Connection>>,
    precision: DType,
    recipe: Recipe,
    sequence: usize,
    vocab: usize,
    names: Names,
    observer: Box<dyn Observer>,
    rehearsal: Rehearsal,
    /// The first op of the update that has not been done: above 1 from then on that a step is half taken until the next.
    update_from: u32,
    /// Whether it works in a team.
    seated: bool,
    /// Seconds that a rehearsal has held it up, whose pace cannot be changed.
    held_up: f64,
    computed: Option<Computed>,
}

/// No op of the update is left.
const UPDATED: u32 = u32::MAX;

/// What a device of a team computed in a step before the update: what it waited for is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Computed {
    /// So many forward and backward passes, between `begin` and `norm`.
    pub micro_batches: u64,
    /// What they took, measured.
    pub seconds: f64,
}

impl Engine {
    /// Opens a device with the Programs of a plan. Products of a GPU have the `algorithms` that they had before, where
    /// they are given; the scratch file is in the folder `scratch`.
    ///
    /// # Errors
    /// What the machine refuses.
    pub fn open(
        answer: Answer,
        precision: DType,
        spec: &DeviceSpec,
        algorithms: Option<&Algorithms>,
        scratch: Option<&Path>,
        sequence: u64,
        vocab: u64,
    ) -> Result<Engine, DeviceError> {
        let set = answer.set.clone();
        let (device, gpu) = open(spec, answer.set, answer.layout.placement, precision, algorithms, scratch)?;
        let engine = Engine { gpu, ..Engine::new(device, &set, precision, answer.plan.recipe, sequence, vocab) };
        drop((set, answer.tried));
        // Planning and opening weigh up more than is kept.
        process::give_back();
        Ok(engine)
    }

    /// The same in the process at the other end of a connection, see [`FarDevice::open`].
    ///
    /// # Errors
    /// What that process says, or that it is gone.
    pub fn open_far(
        connection: Arc<Connection>,
        answer: Answer,
        precision: DType,
        spec: &DeviceSpec,
        algorithms: Option<&Algorithms>,
        silence: Duration,
        sequence: u64,
        vocab: u64,
    ) -> Result<Engine, DeviceError> {
        let (set, placement) = (answer.set.clone(), answer.layout.placement);
        let device = FarDevice::open(Arc::clone(&connection), spec, set, placement, precision, algorithms, silence)?;
        let engine = Engine::new(Box::new(device), &answer.set, precision, answer.plan.recipe, sequence, vocab);
        Ok(Engine { far: Some(connection), ..engine })
    }

    /// The way to its process, where that is another one.
    pub fn far(&self) -> Option<&Arc<Connection>> {
        self.far.as_ref()
    }

    /// The GPU, where it is one of this process's.
    pub fn gpu(&self) -> Option<&OnGpu> {
        self.gpu.as_ref()
    }

    /// The memory that the device's arena is in, as it is now for this process; none where a GPU does not say.
    pub fn memory(&mut self) -> Option<Memory> {
        self.device.room().map(|room| room.memory)
    }

    /// What is held now on the device (CPU: in the process; a virtual device: without its host side), measured.
    pub fn held(&mut self) -> Bytes {
        if let Some(gpu) = &self.gpu {
            return gpu.held().or_else(|| Some(self.device.room()?.held)).unwrap_or_default();
        }
        if self.far.is_some() {
            return self.device.room().map_or(Bytes::ZERO, |room| room.held);
        }
        process::resident().unwrap_or(Bytes::ZERO).saturating_sub(self.device.memory().bytes(Space::Host))
    }

    /// Wraps an opened device whose Programs are `set`.
    pub fn new(
        device: Box<dyn Device>,
        set: &ProgramSet,
        precision: DType,
        recipe: Recipe,
        sequence: u64,
        vocab: u64,
    ) -> Engine {
        Engine::around(device, Names::of(set), precision, recipe, [sequence, vocab])
    }

    /// Stands for the device of this name while that is elsewhere, see [`Gone`].
    pub(crate) fn gone(device: &str) -> Engine {
        Engine::around(Gone::of(device), Names::none(), DType::F32, Recipe::on_device(1, vec![]), [0, 0])
    }

    /// An engine that has done nothing yet.
    fn around(
        device: Box<dyn Device>,
        names: Names,
        precision: DType,
        recipe: Recipe,
        [sequence, vocab]: [u64; 2],
    ) -> Engine {
        Engine {
            precision,
            sequence: sequence as usize,
            vocab: vocab as usize,
            names,
            recipe,
            device,
            gpu: None,
            far: None,
            observer: Box::new(Unobserved),
            rehearsal: Rehearsal::default(),
            update_from: 1,
            seated: false,
            held_up: 0.0,
            computed: None,
        }
    }

    /// Goes on with the Programs of another plan of the same experiment: weights and optimizer stay as they are, bit
    /// for bit. When that fails, all is as it was.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn adopt(&mut self, answer: Answer) -> Result<(), DeviceError> {
        self.rehearsal.check_presence("re-plan")?;
        if self.rehearsal.refuses_replan() {
            return Err(DeviceError::Refused { program: "re-plan".into(), tick: 1, op: "move" });
        }
        let names = Names::of(&answer.set);
        self.device.adopt(answer.set, answer.layout.placement)?;
        (self.names, self.recipe) = (names, answer.plan.recipe);
        Ok(())
    }

    /// Takes a seat in a team; one that lives elsewhere has got it in its process, and is given none.
    ///
    /// # Errors
    /// A device that cannot work in one.
    pub fn sit(&mut self, seat: Option<Seat>) -> Result<(), DeviceError> {
        seat.map_or(Ok(()), |seat| self.device.join(seat))?;
        self.seated = true;
        Ok(())
    }

    /// What it computed in the last step; none of a device alone, or where it does not tell.
    pub fn computed(&self) -> Option<Computed> {
        self.computed
    }

    /// How it exchanges with the others of its team, where there is more than one way.
    pub fn collectives(&self) -> Option<CollectivesBy> {
        self.device.collectives()
    }

    /// What its products are done with, where a library had to choose.
    pub fn algorithms(&self) -> Option<Algorithms> {
        self.device.algorithms()
    }

    /// Whether some of these were chosen when it was opened.
    pub fn chose_anew(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| gpu.chosen_anew)
    }

    /// The device refuses where this says.
    pub fn rehearse(&mut self, rehearsal: Rehearsal) {
        self.rehearsal = rehearsal;
    }

    /// From now on this step is being done: for rehearsals.
    pub fn at_step(&mut self, step: u64) {
        self.rehearsal.at_step(step);
    }

    /// From now on `observer` sees every op.
    pub fn observe(&mut self, observer: Box<dyn Observer>) {
        self.observer = observer;
    }

    /// The choices that the Programs were built with.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The tensors of files that a Program reads or writes, in the order in which it does.
    pub fn files(&self, program: &str) -> &[StoredTensor] {
        self.names.files.get(program).map_or(&[], Vec::as_slice)
    }

    /// Runs a Program that reads or writes files: `load`, `restore`, `save`, `checkpoint`.
    pub fn move_files(&mut self, program: &str, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.call(Call::of(program), files)
    }

    /// Runs a Program without inputs: `fresh`.
    pub fn run(&mut self, program: &str) -> Result<(), DeviceError> {
        self.call(Call::of(program), &mut NoFiles)
    }

    fn call(&mut self, call: Call, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        let Engine { device, observer, rehearsal, names, .. } = self;
        if rehearsal.is_over() {
            return device.run_observed(call, files, &mut **observer);
        }
        rehearsal.check_presence(call.program)?;
        let slower = if ["forward", "backward"].contains(&call.program) { rehearsal.slower() } else { 1.0 };
        let held_up = !device.slow_down(slower) && slower > 1.0;
        let (start, before) = (Instant::now(), device.computed());
        let length = names.lengths.get(call.program).copied().unwrap_or(1);
        let mut observer = rehearsal.observer(call.program, length, &mut **observer);
        device.run_observed(call, files, &mut observer)?;
        if held_up {
            device.settle()?;
            let computed = device.computed().zip(before).map(|(now, before)| now - before);
            let seconds = computed.unwrap_or_else(|| start.elapsed().as_secs_f64()) * (slower - 1.0);
            std::thread::sleep(Duration::from_secs_f64(seconds));
            self.held_up += seconds;
        }
        Ok(())
    }

    /// What was used, measured.
    pub fn stats(&mut self) -> Stats {
        self.device.stats()
    }

    /// The device itself, to look at tensors.
    pub fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    fn set_scalars(&mut self, values: &[(Scalar, f64)]) {
        let mut all = [0.0; SCALAR_COUNT as usize];
        for &(place, value) in values {
            all[place as usize] = value;
        }
        self.device.write(self.names.scalars, 0, &real_bytes(self.precision.wide(), &all));
    }

    fn metric(&mut self, which: Metric) -> f64 {
        let mut bytes = [0; 8 * METRIC_COUNT as usize];
        self.device.read(self.names.metrics, 0, &mut bytes);
        real_values(DType::F64, &bytes)[which as usize]
    }

    /// Some values of `rows` as a micro-batch.
    fn feed(
        device: &mut dyn Device,
        precision: DType,
        inputs: &Inputs,
        rows: &Rows,
        range: std::ops::Range<usize>,
        micro_batch: u32,
    ) {
        let mut write = |input: Option<Input>, bytes: &[u8]| {
            if let Some(Input { tensor, slots }) = input {
                device.write(tensor, micro_batch % slots, bytes);
            }
        };
        write(inputs.tokens, cast_slice(&rows.tokens[range.clone()]));
        write(inputs.labels, cast_slice(&rows.labels[range.clone()]));
        write(inputs.positions, cast_slice(&rows.positions[range.clone()]));
        write(inputs.document_start, cast_slice(&rows.document_start[range.clone()]));
        match precision.wide() {
            DType::F32 => write(inputs.weights, cast_slice(&rows.weights[range])),
            _ => {
                let wide: Vec<f64> = rows.weights[range].iter().map(|&w| f64::from(w)).collect();
                write(inputs.weights, &real_bytes(precision.wide(), &wide));
            }
        }
    }

    /// Fills up with empty rows to whole micro-batches, and to so many at least, and says how many there are. Rows that were
    /// filled up before, for another micro-batch, are filled up further: empty rows count nothing.
    fn fill_up(&self, rows: &mut Rows, at_least: usize) -> usize {
        let size = self.recipe.micro_batch as usize;
        if size == 0 {
            assert!(rows.is_empty(), "who computes nothing is given nothing");
            return at_least;
        }
        while rows.len() < at_least * size || !rows.len().is_multiple_of(size) {
            rows.push_empty();
        }
        rows.len() / size
    }

    /// Gradients of all rows of a step, and the clip factor, in at least so many micro-batches: the others of a team wait for
    /// what this device adds to theirs, be it nothing. The weights stay as they are: a step that fails, or is not finite, can
    /// be dropped and done again.
    pub fn gradients(&mut self, rows: &mut Rows, input: &StepInput, at_least: u64) -> Result<StepLoss, DeviceError> {
        // A step whose rows have no label at all changes nothing but the averages.
        self.update_from = 1;
        let inverse_tokens = if input.labelled_tokens == 0 { 0.0 } else { 1.0 / input.labelled_tokens as f64 };
        let corrections = input.betas.map(|beta| 1.0 - beta.powf(input.step as f64));
        self.set_scalars(&[
            (Scalar::Step, input.step as f64),
            (Scalar::LearningRate, input.learning_rate),
            (Scalar::BiasCorrection1, corrections[0]),
            (Scalar::BiasCorrection2, corrections[1]),
            (Scalar::ClipNorm, input.clip_norm),
            (Scalar::ClipFactor, 1.0),
            (Scalar::InverseTokens, inverse_tokens),
        ]);
        let before = self.spent()?;
        self.run("begin")?;
        let values = self.recipe.micro_batch as usize * self.sequence;
        let count = self.fill_up(rows, at_least.max(1) as usize);
        let schedule = Schedule::one_forward_one_backward(self.names.in_flight, 0, count as u32);
        for schedule::Call { program, micro_batch, last } in &schedule.calls {
            match program.as_str() {
                "forward" => {
                    let inputs = self.names.train.as_ref().expect("the plan trains");
                    let first = *micro_batch as usize * values;
                    let (device, range) = (&mut *self.device, first..first + values);
                    Engine::feed(device, self.precision, inputs, rows, range, *micro_batch);
                }
                "backward" => {}
                _ => continue,
            }
            self.call(Call { micro_batch: *micro_batch, last: *last, ..Call::of(program) }, &mut NoFiles)?;
        }
        self.run("norm")?;
        self.device.settle()?;
        let computed = self.spent()?.zip(before).map(|(now, before)| now - before);
        self.computed = computed.map(|seconds| Computed { micro_batches: count as u64, seconds });
        let (loss, norm) = (self.metric(Metric::LossSum) * inverse_tokens, self.metric(Metric::NormSquared).sqrt());
        // What could not be read is said now.
        self.device.settle()?;
        Ok(StepLoss { loss, norm })
    }

    /// Seconds in which a device of a team has computed, and was held up as if it had.
    fn spent(&mut self) -> Result<Option<f64>, DeviceError> {
        if !self.seated {
            return Ok(None);
        }
        self.device.settle()?;
        Ok(self.device.computed().map(|seconds| seconds + self.held_up))
    }

    /// The weights change, once for all gradients. Refused in the middle, it has changed some tensors whole and left the others
    /// as they were: called again, it goes on with those.
    pub fn update(&mut self) -> Result<(), DeviceError> {
        if self.update_from == UPDATED {
            return Ok(());
        }
        let result = self.call(Call { from: self.update_from, ..Call::of("update") }, &mut NoFiles);
        self.update_from = match &result {
            Ok(()) => UPDATED,
            Err(DeviceError::Refused { tick, .. }) => *tick,
            Err(_) => 1,
        };
        result
    }

    /// Ops of the present update that are done; more than there are where it is over.
    pub fn updated(&self) -> u64 {
        u64::from(self.update_from - 1)
    }

    /// Loss and hits of some rows, in a micro-batch at least.
    pub fn evaluate(&mut self, rows: &mut Rows) -> Result<Evaluated, DeviceError> {
        let mut sum = Evaluated::default();
        let values = self.recipe.micro_batch as usize * self.sequence;
        for micro_batch in 0..self.fill_up(rows, 1) {
            let range = micro_batch * values..(micro_batch + 1) * values;
            let zeros = [0; 8 * METRIC_COUNT as usize];
            self.device.write(self.names.metrics, 0, &zeros);
            let (inputs, correct) = self.names.evaluate.as_ref().expect("the plan evaluates");
            let correct = *correct;
            Engine::feed(&mut *self.device, self.precision, inputs, rows, range.clone(), 0);
            self.run("evaluate")?;
            self.device.settle()?;
            // The other stages of a pipeline only pass on what they are given, and some only hold what others need.
            let Some(correct) = correct else { continue };
            let mut hits = vec![0i32; values];
            self.device.read(correct, 0, bytemuck::cast_slice_mut(&mut hits));
            sum.add(Evaluated {
                loss_sum: self.metric(Metric::LossSum),
                ..samples(&rows.labels[range.clone()], &rows.document_start[range], &hits, self.sequence)
            });
            self.device.settle()?;
        }
        Ok(sum)
    }

    /// Puts tokens behind the `length` tokens that the cache holds, and gives the logits of the one
    /// that follows the last; none on a stage of a pipeline that is not the last, or where nothing is computed.
    pub fn extend(&mut self, tokens: &[i32], mut length: usize) -> Result<Vec<f64>, DeviceError> {
        let mut rest = tokens;
        let mut logits_of = None;
        while !rest.is_empty() {
            let prefill = self.names.prefill.expect("the plan generates");
            let (program, Generating { tokens, positions, logits, room }) = if rest.len() == 1 {
                ("decode", self.names.decode.expect("the plan generates"))
            } else {
                ("prefill", prefill)
            };
            let count = rest.len().min(room);
            let mut padded = vec![0i32; room];
            padded[..count].copy_from_slice(&rest[..count]);
            let places: Vec<i32> = (0..room).map(|i| (length + i) as i32).collect();
            self.set_scalars(&[(Scalar::CacheLength, length as f64), (Scalar::LastRow, (count - 1) as f64)]);
            if let Some(tokens) = tokens {
                self.device.write(tokens, 0, cast_slice(&padded));
            }
            if let Some(positions) = positions {
                self.device.write(positions, 0, cast_slice(&places));
            }
            self.run(program)?;
            length += count;
            rest = &rest[count..];
            logits_of = logits;
        }
        self.device.settle()?;
        assert!(length > 0, "there are tokens to go on from");
        let Some(logits) = logits_of else { return Ok(Vec::new()) };
        let mut bytes = vec![0; self.vocab * self.precision.bytes() as usize];
        self.device.read(logits, 0, &mut bytes);
        self.device.settle()?;
        Ok(real_values(self.precision, &bytes))
    }

    /// Tokens that the cache of generation can hold.
    pub fn capacity(&self) -> usize {
        self.names.capacity
    }
}

/// Counts documents with labels, and those whose labelled tokens were all hit.
fn samples(labels: &[i32], document_start: &[i32], hits: &[i32], sequence: usize) -> Evaluated {
    let mut sum = Evaluated::default();
    let mut current: Option<((usize, i32), bool)> = None;
    let mut close = |current: Option<((usize, i32), bool)>| {
        if let Some((_, exact)) = current {
            sum.samples += 1;
            sum.exact += u64::from(exact);
        }
    };
    let mut tokens = 0;
    for (i, &label) in labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
        tokens += 1;
        let document = (i / sequence, document_start[i]);
        let hit = hits[i] == 1 && label >= 0;
        match &mut current {
            Some((same, exact)) if *same == document => *exact &= hit,
            other => {
                close(other.take());
                *other = Some((document, hit));
            }
        }
    }
    close(current);
    sum.tokens = tokens;
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_counts_as_exact_only_when_all_its_labels_were_hit() {
        let labels = [-100, 5, 6, 7, -100, 8, 9, 9];
        let starts = [0, 0, 0, 3, 0, 0, 0, 3];
        let hits = [0, 1, 1, 1, 0, 1, 0, 1];
        let sum = samples(&labels, &starts, &hits, 4);
        assert_eq!((sum.samples, sum.exact, sum.tokens), (4, 3, 6));
    }
}
