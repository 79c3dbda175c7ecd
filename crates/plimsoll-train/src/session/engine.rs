//! [`Engine`]: one device with the Programs of a run. It runs steps, evaluations and text generation on rows that the
//! caller provides. It opens no files, reads no clock for decisions and does not choose the order of rows.

use crate::data::Rows;
use crate::fault_injection::FaultInjection;
use crate::files::StoredTensor;
use crate::remote::device::{Connection, RemoteDevice};
use crate::session::tensor_files::stored_tensors;
use crate::team::abandoned::PlaceholderDevice;
use crate::team::open::open_device;
use bytemuck::cast_slice;
use plimsoll_core::{Bytes, CollectiveBackend, DType, DeviceSpec, GemmAlgorithms, Recipe, Space};
use plimsoll_device::cpu::executor::{real_bytes, real_values};
use plimsoll_device::cuda::open::GpuMonitor;
use plimsoll_device::device::{Device, DeviceError, FileSpace, NoFiles, NoObserver, Observer, ProgramCall, Stats};
use plimsoll_device::probe::Memory;
use plimsoll_device::process;
use plimsoll_device::transport::GroupHandle;
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::scalars::{METRIC_COUNT, METRICS, Metric, SCALAR_COUNT, SCALARS, Scalar};
use plimsoll_program::{Program, ProgramKind, ProgramSet, Schedule, TensorId, schedule};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Scalars of a training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInput {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Learning rate.
    pub learning_rate: f64,
    /// AdamW decay rates of both moments, for bias correction.
    pub betas: [f64; 2],
    /// Largest global gradient norm; 0 disables clipping.
    pub clip_norm: f64,
    /// Labelled tokens of the whole step, over all devices.
    pub labelled_tokens: u64,
}

/// Loss and gradient norm of a step, known before the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLoss {
    /// Mean loss over the labelled tokens of the step.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub norm: f64,
}

impl StepLoss {
    /// Whether loss and norm are finite, so that the update may run.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.norm.is_finite()
    }
}

/// Sums over evaluated rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EvaluationSums {
    /// Sum of the negative log-likelihoods of the labelled tokens.
    pub loss_sum: f64,
    /// Number of labelled tokens.
    pub tokens: u64,
    /// Number of documents with at least one labelled token.
    pub samples: u64,
    /// Number of documents with all labelled tokens predicted as most likely.
    pub exact: u64,
}

impl EvaluationSums {
    /// Adds the sums of another micro-batch.
    pub fn add(&mut self, other: EvaluationSums) {
        self.loss_sum += other.loss_sum;
        self.tokens += other.tokens;
        self.samples += other.samples;
        self.exact += other.exact;
    }

    /// Returns the mean loss over the labelled tokens.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.tokens as f64
    }
}

/// Input tensors of a micro-batch. A pipeline stage needs some of them, a storage-only worker none.
struct BatchInputs {
    tokens: Option<InputTensor>,
    labels: Option<InputTensor>,
    positions: Option<InputTensor>,
    document_start: Option<InputTensor>,
    weights: Option<InputTensor>,
}

/// A tensor with one slot per micro-batch in flight.
#[derive(Clone, Copy)]
struct InputTensor {
    tensor: TensorId,
    slots: u32,
}

/// Input and output tensors of a generation pass. Of a pipeline, only the first stage has tokens and only the last has
/// logits. A storage-only worker has neither.
#[derive(Clone, Copy)]
struct GenerationTensors {
    tokens: Option<TensorId>,
    positions: Option<TensorId>,
    logits: Option<TensorId>,
    /// Most tokens of one pass.
    chunk: usize,
}

/// Tensors and Program properties of a `ProgramSet` that the engine needs at run time.
struct TensorTable {
    scalars: TensorId,
    metrics: TensorId,
    train: Option<BatchInputs>,
    /// Micro-batches that keep their activations in the arena at the same time; above 1 only on pipeline stages.
    in_flight: u32,
    /// Inputs of an evaluation, and the tensor that marks correct predictions; the latter exists where the loss is
    /// computed.
    evaluate: Option<(BatchInputs, Option<TensorId>)>,
    prefill: Option<GenerationTensors>,
    decode: Option<GenerationTensors>,
    capacity: usize,
    /// Number of ops of each Program.
    op_counts: HashMap<ProgramKind, u32>,
    /// Tensors that each Program reads from files or writes to them.
    files: HashMap<ProgramKind, Vec<StoredTensor>>,
}

impl TensorTable {
    /// Creates the table of a device without Programs.
    fn none() -> TensorTable {
        TensorTable {
            scalars: TensorId(0),
            metrics: TensorId(0),
            train: None,
            in_flight: 1,
            evaluate: None,
            prefill: None,
            decode: None,
            capacity: 0,
            op_counts: HashMap::new(),
            files: HashMap::new(),
        }
    }

    /// Looks up the tensors of these Programs.
    fn of(set: &ProgramSet) -> TensorTable {
        let find = |name: &str| set.find(name).unwrap_or_else(|| panic!("the Programs have no tensor `{name}`"));
        let named = |list: &[TensorId], name: &str| set.find(name).filter(|tensor| list.contains(tensor));
        let inputs = |program: &Program, prefix: &str| {
            let input = |name: &str| {
                let tensor = named(&program.inputs, &format!("{prefix}.{name}"))?;
                Some(InputTensor { tensor, slots: set.tensor(tensor).slots })
            };
            BatchInputs {
                tokens: input("tokens"),
                labels: input("labels"),
                positions: input("positions"),
                document_start: input("document_start"),
                weights: input("token_weights"),
            }
        };
        let generation = |name: ProgramKind| {
            set.program(name).map(|program| GenerationTensors {
                tokens: named(&program.inputs, &format!("{name}.tokens")),
                positions: named(&program.inputs, &format!("{name}.positions")),
                logits: named(&program.outputs, &format!("{name}.logits")),
                chunk: set.tensor(find(&format!("{name}.positions"))).elements() as usize,
            })
        };
        let train = set.program(ProgramKind::Forward).map(|program| inputs(program, "train"));
        TensorTable {
            scalars: find(SCALARS),
            metrics: find(METRICS),
            // Every backward pass reads the positions, so their slots are the micro-batches in flight.
            in_flight: train.as_ref().and_then(|train| train.positions).map_or(1, |input| input.slots),
            train,
            evaluate: set
                .program(ProgramKind::Evaluate)
                .map(|program| (inputs(program, "evaluate"), named(&program.outputs, "evaluate.correct"))),
            prefill: generation(ProgramKind::Prefill),
            decode: generation(ProgramKind::Decode),
            capacity: set.find("cache_keys").map_or(0, |keys| set.tensor(keys).shape[0] as usize),
            op_counts: set.programs.iter().map(|program| (program.kind, program.op_count() as u32)).collect(),
            files: set.programs.iter().map(|program| (program.kind, stored_tensors(set, program.kind))).collect(),
        }
    }
}

/// An open device with its Programs.
pub struct Engine {
    device: Box<dyn Device>,
    gpu: Option<GpuMonitor>,
    /// Connection to the process of a remote device.
    connection: Option<Arc<Connection>>,
    precision: DType,
    recipe: Recipe,
    sequence: usize,
    vocab: usize,
    tensors: TensorTable,
    observer: Box<dyn Observer>,
    faults: FaultInjection,
    /// Tick of the first update op that is not done; above 1 while an update is partly done.
    next_update_op: u32,
    /// Whether the device has joined a communication group.
    in_group: bool,
    /// Seconds of injected slowdown on a device with a fixed speed.
    injected_delay_seconds: f64,
    last_compute: Option<ComputeTime>,
}

/// Value of `next_update_op` after the last op of the update.
const UPDATE_DONE: u32 = u32::MAX;

/// Compute time of one worker in a step before the update, without waiting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ComputeTime {
    /// Number of forward and backward passes between `begin` and `norm`.
    pub micro_batches: u64,
    /// Measured seconds of these passes.
    pub seconds: f64,
}

impl Engine {
    /// Opens a device with the Programs of a plan. `algorithms` fixes the matrix product algorithms of a GPU, `scratch`
    /// is the folder of the scratch file.
    ///
    /// # Errors
    /// The device cannot be opened.
    pub fn open(
        answer: PlanOutcome,
        precision: DType,
        spec: &DeviceSpec,
        algorithms: Option<&GemmAlgorithms>,
        scratch: Option<&Path>,
        sequence: u64,
        vocab: u64,
    ) -> Result<Engine, DeviceError> {
        let set = answer.set.clone();
        let (device, gpu) = open_device(spec, answer.set, answer.layout.placement, precision, algorithms, scratch)?;
        let engine = Engine { gpu, ..Engine::new(device, &set, precision, answer.plan.recipe, sequence, vocab) };
        drop((set, answer.tried));
        // Planning and opening use more memory than the run keeps.
        process::trim_heap();
        Ok(engine)
    }

    /// Opens the device in the process at the other end of a connection, see [`RemoteDevice::open`].
    ///
    /// # Errors
    /// The remote process reports an error or is lost.
    pub fn open_remote(
        connection: Arc<Connection>,
        answer: PlanOutcome,
        precision: DType,
        spec: &DeviceSpec,
        algorithms: Option<&GemmAlgorithms>,
        heartbeat_timeout: Duration,
        sequence: u64,
        vocab: u64,
    ) -> Result<Engine, DeviceError> {
        let (set, placement) = (answer.set.clone(), answer.layout.placement);
        let device = RemoteDevice::open(
            Arc::clone(&connection),
            spec,
            set,
            placement,
            precision,
            algorithms,
            heartbeat_timeout,
        )?;
        let engine = Engine::new(Box::new(device), &answer.set, precision, answer.plan.recipe, sequence, vocab);
        Ok(Engine { connection: Some(connection), ..engine })
    }

    /// Returns the connection to the process of a remote device.
    pub fn connection(&self) -> Option<&Arc<Connection>> {
        self.connection.as_ref()
    }

    /// Returns the GPU of this process, if the device is one.
    pub fn gpu(&self) -> Option<&GpuMonitor> {
        self.gpu.as_ref()
    }

    /// Returns size and free bytes of the memory that holds the arena; none where a GPU does not report them.
    pub fn memory(&mut self) -> Option<Memory> {
        self.device.available_memory().map(|available| available.memory)
    }

    /// Returns the measured bytes that are held on the device: for the CPU by the process, for a virtual device without
    /// its host side.
    pub fn held_bytes(&mut self) -> Bytes {
        if let Some(gpu) = &self.gpu {
            return gpu
                .process_bytes()
                .or_else(|| Some(self.device.available_memory()?.held_bytes))
                .unwrap_or_default();
        }
        if self.connection.is_some() {
            return self.device.available_memory().map_or(Bytes::ZERO, |available| available.held_bytes);
        }
        process::resident().unwrap_or(Bytes::ZERO).saturating_sub(self.device.memory().bytes(Space::Host))
    }

    /// Wraps an open device with the Programs of `set`.
    pub fn new(
        device: Box<dyn Device>,
        set: &ProgramSet,
        precision: DType,
        recipe: Recipe,
        sequence: u64,
        vocab: u64,
    ) -> Engine {
        Engine::rename_tensors(device, TensorTable::of(set), precision, recipe, [sequence, vocab])
    }

    /// Creates a placeholder for an engine that a worker thread owns, see [`PlaceholderDevice`].
    pub(crate) fn placeholder(device: &str) -> Engine {
        Engine::rename_tensors(
            PlaceholderDevice::of(device),
            TensorTable::none(),
            DType::F32,
            Recipe::on_device(1, vec![]),
            [0, 0],
        )
    }

    /// Creates an engine in its initial state.
    fn rename_tensors(
        device: Box<dyn Device>,
        tensors: TensorTable,
        precision: DType,
        recipe: Recipe,
        [sequence, vocab]: [u64; 2],
    ) -> Engine {
        Engine {
            precision,
            sequence: sequence as usize,
            vocab: vocab as usize,
            tensors,
            recipe,
            device,
            gpu: None,
            connection: None,
            observer: Box::new(NoObserver),
            faults: FaultInjection::default(),
            next_update_op: 1,
            in_group: false,
            injected_delay_seconds: 0.0,
            last_compute: None,
        }
    }

    /// Adopts the Programs of another plan of the same experiment. Weights and optimizer state stay bit-identical.
    /// After a failure, the engine is unchanged.
    ///
    /// # Errors
    /// The device refuses the new arena.
    pub fn adopt(&mut self, answer: PlanOutcome) -> Result<(), DeviceError> {
        self.faults.check_presence("re-plan")?;
        if self.faults.refuses_replan() {
            return Err(DeviceError::OutOfMemory { program: "re-plan".into(), tick: 1, op: "move" });
        }
        let tensors = TensorTable::of(&answer.set);
        self.device.adopt(answer.set, answer.layout.placement)?;
        (self.tensors, self.recipe) = (tensors, answer.plan.recipe);
        Ok(())
    }

    /// Joins a communication group. A remote device has joined in its own process and receives none.
    ///
    /// # Errors
    /// The device does not support collectives.
    pub fn join_group(&mut self, group: Option<GroupHandle>) -> Result<(), DeviceError> {
        group.map_or(Ok(()), |group| self.device.join_group(group))?;
        self.in_group = true;
        Ok(())
    }

    /// Returns the compute time of the last step; none for a device without a group or without a measurement.
    pub fn compute_time(&self) -> Option<ComputeTime> {
        self.last_compute
    }

    /// Returns the collective backend, where the device has a choice.
    pub fn collectives(&self) -> Option<CollectiveBackend> {
        self.device.collectives()
    }

    /// Returns the matrix product algorithms, where a library had to choose them.
    pub fn algorithms(&self) -> Option<GemmAlgorithms> {
        self.device.algorithms()
    }

    /// Whether opening the device chose some matrix product algorithms anew.
    pub fn chose_new_algorithms(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| gpu.newly_tuned)
    }

    /// Injects these faults into the following work.
    pub fn inject_faults(&mut self, faults: FaultInjection) {
        self.faults = faults;
    }

    /// Sets the step in progress, for fault injection.
    pub fn begin_step(&mut self, step: u64) {
        self.faults.begin_step(step);
    }

    /// Passes every op to `observer` from now on.
    pub fn observe(&mut self, observer: Box<dyn Observer>) {
        self.observer = observer;
    }

    /// Returns the recipe of the Programs.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Returns the file tensors of a Program, in the order of access.
    pub fn file_tensors(&self, program: ProgramKind) -> &[StoredTensor] {
        self.tensors.files.get(&program).map_or(&[], Vec::as_slice)
    }

    /// Runs a Program that reads or writes files: load, restore, save, checkpoint, renew.
    pub fn move_files(&mut self, program: ProgramKind, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.call(ProgramCall::of(program), files)
    }

    /// Runs a Program without inputs, such as the initialization of the optimizer.
    pub fn run(&mut self, program: ProgramKind) -> Result<(), DeviceError> {
        self.call(ProgramCall::of(program), &mut NoFiles)
    }

    /// Runs a Program call with the observer and the injected faults.
    fn call(&mut self, call: ProgramCall, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        let Engine { device, observer, faults, tensors, .. } = self;
        if faults.is_empty() {
            return device.run_observed(call, files, &mut **observer);
        }
        faults.check_presence(call.program.name())?;
        let slowdown =
            if [ProgramKind::Forward, ProgramKind::Backward].contains(&call.program) { faults.slowdown() } else { 1.0 };
        let must_sleep = !device.set_compute_slowdown(slowdown) && slowdown > 1.0;
        let (start, before) = (Instant::now(), device.compute_seconds());
        let length = tensors.op_counts.get(&call.program).copied().unwrap_or(1);
        let mut observer = faults.observer(call.program.name(), length, &mut **observer);
        device.run_observed(call, files, &mut observer)?;
        if must_sleep {
            device.synchronize()?;
            let last_compute = device.compute_seconds().zip(before).map(|(now, before)| now - before);
            let seconds = last_compute.unwrap_or_else(|| start.elapsed().as_secs_f64()) * (slowdown - 1.0);
            std::thread::sleep(Duration::from_secs_f64(seconds));
            self.injected_delay_seconds += seconds;
        }
        Ok(())
    }

    /// Returns the measured memory use.
    pub fn stats(&mut self) -> Stats {
        self.device.stats()
    }

    /// Returns the device, for access to its tensors.
    pub fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    fn set_scalars(&mut self, values: &[(Scalar, f64)]) {
        let mut all = [0.0; SCALAR_COUNT as usize];
        for &(place, value) in values {
            all[place as usize] = value;
        }
        self.device.write(self.tensors.scalars, 0, &real_bytes(self.precision.wide(), &all));
    }

    fn metric(&mut self, which: Metric) -> f64 {
        let mut bytes = [0; 8 * METRIC_COUNT as usize];
        self.device.read(self.tensors.metrics, 0, &mut bytes);
        real_values(DType::F64, &bytes)[which as usize]
    }

    /// Writes a range of values of `rows` to the inputs of a micro-batch.
    fn write_micro_batch(
        device: &mut dyn Device,
        precision: DType,
        inputs: &BatchInputs,
        rows: &Rows,
        range: std::ops::Range<usize>,
        micro_batch: u32,
    ) {
        let mut write = |input: Option<InputTensor>, bytes: &[u8]| {
            if let Some(InputTensor { tensor, slots }) = input {
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

    /// Pads `rows` with empty rows to whole micro-batches, at least `min_micro_batches` of them, and returns their number. Empty
    /// rows have no labelled tokens and do not change the result.
    fn pad_rows(&self, rows: &mut Rows, min_micro_batches: usize) -> usize {
        let size = self.recipe.micro_batch as usize;
        if size == 0 {
            assert!(rows.is_empty(), "a storage-only worker receives no rows");
            return min_micro_batches;
        }
        while rows.len() < min_micro_batches * size || !rows.len().is_multiple_of(size) {
            rows.push_padding_row();
        }
        rows.len() / size
    }

    /// Computes the gradients of all rows of a step and the clip factor. The weights do not change, so a failed step
    /// can be repeated. Runs at least `min_micro_batches` micro-batches: other workers of a sharded team wait for this device in
    /// each of them, even if it has no rows.
    pub fn gradients(
        &mut self,
        rows: &mut Rows,
        input: &StepInput,
        min_micro_batches: u64,
    ) -> Result<StepLoss, DeviceError> {
        // A step without any label still decays the moments.
        self.next_update_op = 1;
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
        let before = self.compute_seconds()?;
        self.run(ProgramKind::BeginStep)?;
        let values = self.recipe.micro_batch as usize * self.sequence;
        let micro_batch_count = self.pad_rows(rows, min_micro_batches.max(1) as usize);
        let schedule = Schedule::one_forward_one_backward(self.tensors.in_flight, 0, micro_batch_count as u32);
        for schedule::Call { program, micro_batch, last } in &schedule.calls {
            match program {
                ProgramKind::Forward => {
                    let inputs = self.tensors.train.as_ref().expect("the plan trains");
                    let first = *micro_batch as usize * values;
                    let (device, range) = (&mut *self.device, first..first + values);
                    Engine::write_micro_batch(device, self.precision, inputs, rows, range, *micro_batch);
                }
                ProgramKind::Backward => {}
                _ => continue,
            }
            self.call(
                ProgramCall { micro_batch: *micro_batch, is_last_micro_batch: *last, ..ProgramCall::of(*program) },
                &mut NoFiles,
            )?;
        }
        self.run(ProgramKind::GradientNorm)?;
        self.device.synchronize()?;
        let last_compute = self.compute_seconds()?.zip(before).map(|(now, before)| now - before);
        self.last_compute =
            last_compute.map(|seconds| ComputeTime { micro_batches: micro_batch_count as u64, seconds });
        let (loss, norm) = (self.metric(Metric::LossSum) * inverse_tokens, self.metric(Metric::NormSquared).sqrt());
        // A failed read of the metrics is reported here.
        self.device.synchronize()?;
        Ok(StepLoss { loss, norm })
    }

    /// Returns the compute seconds of the device so far, with injected delays; none without a group.
    fn compute_seconds(&mut self) -> Result<Option<f64>, DeviceError> {
        if !self.in_group {
            return Ok(None);
        }
        self.device.synchronize()?;
        Ok(self.device.compute_seconds().map(|seconds| seconds + self.injected_delay_seconds))
    }

    /// Updates the weights with the gradients of the step. After an out-of-memory error some tensors are updated and
    /// the others are not; the next call continues with the latter.
    pub fn update(&mut self) -> Result<(), DeviceError> {
        if self.next_update_op == UPDATE_DONE {
            return Ok(());
        }
        let result = self
            .call(ProgramCall { first_op: self.next_update_op, ..ProgramCall::of(ProgramKind::Update) }, &mut NoFiles);
        self.next_update_op = match &result {
            Ok(()) => UPDATE_DONE,
            Err(DeviceError::OutOfMemory { tick, .. }) => *tick,
            Err(_) => 1,
        };
        result
    }

    /// Returns the number of finished ops of the update; more than the update has ops once it is done.
    pub fn update_ops_done(&self) -> u64 {
        u64::from(self.next_update_op - 1)
    }

    /// Evaluates rows, in at least one micro-batch.
    pub fn evaluate(&mut self, rows: &mut Rows) -> Result<EvaluationSums, DeviceError> {
        let mut sum = EvaluationSums::default();
        let values = self.recipe.micro_batch as usize * self.sequence;
        for micro_batch in 0..self.pad_rows(rows, 1) {
            let range = micro_batch * values..(micro_batch + 1) * values;
            let zeros = [0; 8 * METRIC_COUNT as usize];
            self.device.write(self.tensors.metrics, 0, &zeros);
            let (inputs, correct) = self.tensors.evaluate.as_ref().expect("the plan evaluates");
            let correct = *correct;
            Engine::write_micro_batch(&mut *self.device, self.precision, inputs, rows, range.clone(), 0);
            self.run(ProgramKind::Evaluate)?;
            self.device.synchronize()?;
            // The other stages of a pipeline only pass activations on, and storage-only workers have no results.
            let Some(correct) = correct else { continue };
            let mut hits = vec![0i32; values];
            self.device.read(correct, 0, bytemuck::cast_slice_mut(&mut hits));
            sum.add(EvaluationSums {
                loss_sum: self.metric(Metric::LossSum),
                ..count_samples(&rows.labels[range.clone()], &rows.document_start[range], &hits, self.sequence)
            });
            self.device.synchronize()?;
        }
        Ok(sum)
    }

    /// Appends tokens to the `length` tokens in the key-value cache, and returns the logits (V values) for the next
    /// token. Returns nothing on a storage-only worker or on a pipeline stage before the last.
    pub fn extend(&mut self, tokens: &[i32], mut length: usize) -> Result<Vec<f64>, DeviceError> {
        let mut rest = tokens;
        let mut last_logits = None;
        while !rest.is_empty() {
            let prefill = self.tensors.prefill.expect("the plan generates");
            let (program, GenerationTensors { tokens, positions, logits, chunk }) = if rest.len() == 1 {
                (ProgramKind::Decode, self.tensors.decode.expect("the plan generates"))
            } else {
                (ProgramKind::Prefill, prefill)
            };
            let count = rest.len().min(chunk);
            let mut padded = vec![0i32; chunk];
            padded[..count].copy_from_slice(&rest[..count]);
            let position_values: Vec<i32> = (0..chunk).map(|i| (length + i) as i32).collect();
            self.set_scalars(&[(Scalar::CacheLength, length as f64), (Scalar::LastRow, (count - 1) as f64)]);
            if let Some(tokens) = tokens {
                self.device.write(tokens, 0, cast_slice(&padded));
            }
            if let Some(positions) = positions {
                self.device.write(positions, 0, cast_slice(&position_values));
            }
            self.run(program)?;
            length += count;
            rest = &rest[count..];
            last_logits = logits;
        }
        self.device.synchronize()?;
        assert!(length > 0, "generation needs at least one token");
        let Some(logits) = last_logits else { return Ok(Vec::new()) };
        let mut bytes = vec![0; self.vocab * self.precision.bytes() as usize];
        self.device.read(logits, 0, &mut bytes);
        self.device.synchronize()?;
        Ok(real_values(self.precision, &bytes))
    }

    /// Returns the capacity of the key-value cache in tokens.
    pub fn capacity(&self) -> usize {
        self.tensors.capacity
    }
}

/// Counts documents with labels, and those with all labelled tokens predicted correctly.
fn count_samples(labels: &[i32], document_start: &[i32], hits: &[i32], sequence: usize) -> EvaluationSums {
    let mut sum = EvaluationSums::default();
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
            Some((current_document, exact)) if *current_document == document => *exact &= hit,
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
    fn sample_is_exact_when_all_labels_are_predicted() {
        let labels = [-100, 5, 6, 7, -100, 8, 9, 9];
        let starts = [0, 0, 0, 3, 0, 0, 0, 3];
        let hits = [0, 1, 1, 1, 0, 1, 0, 1];
        let sum = count_samples(&labels, &starts, &hits, 4);
        assert_eq!((sum.samples, sum.exact, sum.tokens), (4, 3, 6));
    }
}
