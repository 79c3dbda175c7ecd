//! [`Engine`]: one device with the Programs of a run. It runs steps, evaluations and text generation on rows that the
//! caller provides. It opens no files, reads no clock for decisions and does not choose the order of rows.
//!
//! | module | content |
//! |---|---|
//! | `open` | opening of one device, measurement of the charges of a GPU |
//! | `tensors` | input and output tensors of the Programs |
//! | `evaluation` | evaluation of rows |
//! | `score` | log-probabilities of labels |
//! | `generation` | prompts and new tokens, with the key-value cache |
//! | `tensor_files` | file access of Programs that load or save tensors |
//! | `failure` | failures of work on a device |
//! | `placeholder` | the device that stands for one on another thread |
//! | `arena_use` | measured use of the device's arena by category |

pub mod arena_use;
pub(crate) mod evaluation;
pub(crate) mod failure;
mod generation;
pub(crate) mod open;
mod placeholder;
mod score;
pub mod tensor_files;
mod tensors;

pub use evaluation::EvaluationSums;
pub use generation::{SlotCopy, SlotTokens};
pub use score::ScoredWeights;

use crate::data::Rows;
use crate::fault_injection::FaultInjection;
use crate::files::StoredTensor;
use crate::remote::device::{Connection, RemoteDevice};
use arena_use::{ArenaObserver, ArenaUse, BytesByCategory, FullestMoment};
use bytemuck::cast_slice;
use open::open_device;
use placeholder::PlaceholderDevice;
use plimsoll_core::{Bytes, CollectiveBackend, DType, DeviceSpec, GemmAlgorithms, Recipe, Space};
use plimsoll_device::cpu::executor::{real_bytes, real_values};
use plimsoll_device::device::{Device, FileSpace, NoFiles, NoObserver, Observer, ProgramCall, Stats};
use plimsoll_device::error::DeviceError;
use plimsoll_device::gpu::GpuMonitor;
use plimsoll_device::probe::Memory;
use plimsoll_device::process;
use plimsoll_device::transport::GroupHandle;
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::scalars::{METRIC_COUNT, Metric, SCALAR_COUNT, Scalar};
use plimsoll_program::{ProgramKind, ProgramSet, Schedule, schedule};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tensors::{BatchInputs, InputTensor, TensorTable};

/// Numbers that a training step needs besides its rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInput {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Learning rate.
    pub learning_rate: f64,
    /// AdamW decay rates of the first and the second moment, for bias correction.
    pub betas: [f64; 2],
    /// Limit of the global gradient norm. Gradients with a larger norm are scaled down to this norm. 0 disables
    /// clipping.
    pub clip_norm: f64,
    /// Number by which the weighted sum of losses is divided. Without other weights, it is the number of labelled tokens in
    /// the whole step, summed over all devices.
    pub loss_divisor: u64,
}

/// Loss and gradient norm of a step. Both are known before the weights are updated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLoss {
    /// Weighted sum of the losses of the step, divided by [`StepInput::loss_divisor`].
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub norm: f64,
}

impl StepLoss {
    /// Whether loss and norm are both finite. The update runs only then.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.norm.is_finite()
    }
}

/// An open device with its Programs.
pub struct Engine {
    device: Box<dyn Device>,
    gpu: Option<GpuMonitor>,
    /// Connection to the process of a remote device; `None` for a device that this process opened.
    connection: Option<Arc<Connection>>,
    precision: DType,
    recipe: Recipe,
    sequence: usize,
    vocab: usize,
    tensors: TensorTable,
    observer: Box<dyn Observer>,
    arena_use: ArenaUse,
    faults: FaultInjection,
    /// Number of the first update op that is not done, counted from 1. It is above 1 after an out-of-memory error in
    /// the middle of an update, and [`UPDATE_DONE`] after the update.
    next_update_op: u32,
    /// Whether the device has joined a communication group.
    in_group: bool,
    /// Seconds that the engine has slept so far to inject slowness (`--inject-slow`). It sleeps only if the device
    /// cannot slow down its own ops.
    injected_delay_seconds: f64,
    last_compute: Option<ComputeTime>,
    /// Bytes of the logits that were read last. Their memory is used again.
    logit_bytes: Vec<u8>,
}

/// Value of `Engine::next_update_op` once all ops of the update are done.
const UPDATE_DONE: u32 = u32::MAX;

/// The Programs that an injected slowdown affects.
const SLOWED_PROGRAMS: [ProgramKind; 4] =
    [ProgramKind::Score, ProgramKind::Reference, ProgramKind::Forward, ProgramKind::Backward];

/// Compute time of one worker in one step, from the start of the step to the gradient norm. Excludes the update and
/// waits for other workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ComputeTime {
    /// Number of micro-batches that the worker ran in the step, each with a forward and a backward pass.
    pub micro_batches: u64,
    /// Measured compute seconds of all micro-batches together, and of the Programs that begin the step and compute the
    /// gradient norm.
    pub seconds: f64,
}

impl Engine {
    /// Opens a device of this process with the Programs of the plan in `answer`. `algorithms` fixes the matrix product
    /// algorithms of a GPU; with `None` its library chooses them. `scratch` is the folder of the scratch file; `None`
    /// without one. `sequence` is the number of tokens of a row, `vocab` the number of tokens of the vocabulary.
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
        let (tensors, recipe) = (TensorTable::of(&answer.set), answer.plan.recipe);
        let arena_use = ArenaUse::new(&answer.set);
        let (device, gpu) = open_device(spec, answer.set, answer.layout.placement, precision, algorithms, scratch)?;
        let engine = Engine::with_tensors(device, tensors, precision, recipe, [sequence, vocab]);
        let engine = Engine { gpu, arena_use, ..engine };
        drop(answer.tried);
        // Planning and opening use more memory than the run keeps.
        process::trim_heap();
        Ok(engine)
    }

    /// Opens the device in the process at the other end of a connection. That process closes the device if it receives
    /// nothing from the run for twice `heartbeat_timeout`. The other parameters are those of [`Engine::open`].
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
        let (tensors, recipe) = (TensorTable::of(&answer.set), answer.plan.recipe);
        let device = RemoteDevice::open(
            Arc::clone(&connection),
            spec,
            answer.set,
            answer.layout.placement,
            precision,
            algorithms,
            heartbeat_timeout,
        )?;
        let engine = Engine::with_tensors(Box::new(device), tensors, precision, recipe, [sequence, vocab]);
        Ok(Engine { connection: Some(connection), ..engine })
    }

    /// Returns the connection to the process of a remote device; `None` for a device that this process opened.
    pub fn connection(&self) -> Option<&Arc<Connection>> {
        self.connection.as_ref()
    }

    /// Returns the monitor of the GPU; `None` if the device is no GPU or is remote.
    pub fn gpu(&self) -> Option<&GpuMonitor> {
        self.gpu.as_ref()
    }

    /// Returns size and free bytes of the memory that holds the device arena; `None` if the device does not report
    /// them.
    pub fn memory(&mut self) -> Option<Memory> {
        self.device.available_memory().map(|available| available.memory)
    }

    /// Returns the measured bytes that the run holds on the device; 0 if nothing can be measured. For a GPU, these are
    /// the bytes of this process on the GPU. For a remote device, its process reports them. For the CPU or a virtual
    /// device, they are the resident memory of this process without the host arena.
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

    /// Wraps an open device with the Programs of `set`. `sequence` is the number of tokens of a row, `vocab` the number
    /// of tokens of the vocabulary.
    pub fn new(
        device: Box<dyn Device>,
        set: &ProgramSet,
        precision: DType,
        recipe: Recipe,
        sequence: u64,
        vocab: u64,
    ) -> Engine {
        let engine = Engine::with_tensors(device, TensorTable::of(set), precision, recipe, [sequence, vocab]);
        Engine { arena_use: ArenaUse::new(set), ..engine }
    }

    /// Creates a placeholder for an engine while a worker thread owns it. `device` is the name of its device. All work
    /// of the placeholder fails, see [`PlaceholderDevice`].
    pub(crate) fn placeholder(device: &str) -> Engine {
        Engine::with_tensors(
            PlaceholderDevice::of(device),
            TensorTable::none(),
            DType::F32,
            Recipe::on_device(1, vec![]),
            [0, 0],
        )
    }

    /// Creates an engine before its first step, without faults, communication group or measurements.
    fn with_tensors(
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
            arena_use: ArenaUse::default(),
            faults: FaultInjection::default(),
            next_update_op: 1,
            in_group: false,
            injected_delay_seconds: 0.0,
            last_compute: None,
            logit_bytes: Vec::new(),
        }
    }

    /// Switches the device to the Programs of `answer`, another plan of the same run. Weights and optimizer state stay
    /// bit-identical. After a failure, the engine keeps its old Programs.
    ///
    /// # Errors
    /// The device cannot switch to the new arena, for example for lack of memory, or it is lost.
    pub fn adopt(&mut self, answer: PlanOutcome) -> Result<(), DeviceError> {
        self.faults.check_presence("re-plan")?;
        if self.faults.refuses_replan() {
            return Err(DeviceError::OutOfMemory { program: "re-plan".into(), tick: 1, op: "move" });
        }
        let tensors = TensorTable::of(&answer.set);
        let arena_use = if self.connection.is_some() { ArenaUse::default() } else { ArenaUse::new(&answer.set) };
        self.device.adopt(answer.set, answer.layout.placement)?;
        (self.tensors, self.recipe, self.arena_use) = (tensors, answer.plan.recipe, arena_use);
        Ok(())
    }

    /// Joins the communication group of the team. `group` is `None` for a remote device, which has joined in its own
    /// process.
    ///
    /// # Errors
    /// The device does not support collectives.
    pub fn join_group(&mut self, group: Option<GroupHandle>) -> Result<(), DeviceError> {
        group.map_or(Ok(()), |group| self.device.join_group(group))?;
        self.in_group = true;
        Ok(())
    }

    /// Returns the compute time of the last step. Returns `None` before the first step, without a communication group,
    /// or if the device does not measure its compute time.
    pub fn compute_time(&self) -> Option<ComputeTime> {
        self.last_compute
    }

    /// Returns the backend that runs the device's collectives. Returns `None` before the first collective, without a
    /// communication group, or if the device has only one backend.
    pub fn collectives(&self) -> Option<CollectiveBackend> {
        self.device.collectives()
    }

    /// Returns the matrix product algorithms that the GPU's library chose; `None` for a device without such a choice.
    pub fn algorithms(&self) -> Option<GemmAlgorithms> {
        self.device.algorithms()
    }

    /// Whether the GPU's library chose some matrix product algorithms anew when the device was opened, because no
    /// earlier run had chosen them. Always false for a device that is no GPU of this process.
    pub fn chose_new_algorithms(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| gpu.newly_tuned)
    }

    /// Replaces the faults that are injected into the device's work from now on.
    pub fn inject_faults(&mut self, faults: FaultInjection) {
        self.faults = faults;
    }

    /// Sets the number of the step in progress, for fault injection.
    pub fn begin_step(&mut self, step: u64) {
        self.faults.begin_step(step);
    }

    /// Passes every op that the device runs to `observer` from now on.
    pub fn observe(&mut self, observer: Box<dyn Observer>) {
        self.observer = observer;
    }

    /// Returns the recipe of the present Programs.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Returns the tensors that this kind of Program reads from files or writes to files, in the order of access. The
    /// list is empty if the engine has no Program of this kind.
    pub fn file_tensors(&self, program: ProgramKind) -> &[StoredTensor] {
        self.tensors.files.get(&program).map_or(&[], Vec::as_slice)
    }

    /// Runs a Program that reads from or writes to `files`, such as [`ProgramKind::Load`] or
    /// [`ProgramKind::Checkpoint`].
    pub fn move_files(&mut self, program: ProgramKind, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.call(ProgramCall::of(program), files)
    }

    /// Runs a Program that accesses no files, such as the initialization of the optimizer.
    pub fn run(&mut self, program: ProgramKind) -> Result<(), DeviceError> {
        self.call(ProgramCall::of(program), &mut NoFiles)
    }

    /// Runs one call of a Program, which may access `files`. Passes its ops to the observer, and injects the faults of
    /// [`Engine::inject_faults`].
    fn call(&mut self, call: ProgramCall, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        let Engine { device, observer, faults, tensors, arena_use, .. } = self;
        let mut recording: ArenaObserver;
        let observer: &mut dyn Observer = if arena_use.begin(call) {
            recording = arena_use.observer(&mut **observer);
            &mut recording
        } else {
            &mut **observer
        };
        if faults.is_empty() {
            device.run_observed(call, files, observer)?;
            self.arena_use.end(call);
            return Ok(());
        }
        faults.check_presence(call.program.name())?;
        let slowdown = if SLOWED_PROGRAMS.contains(&call.program) { faults.slowdown() } else { 1.0 };
        let must_sleep = !device.set_compute_slowdown(slowdown) && slowdown > 1.0;
        let (start, before) = (Instant::now(), device.compute_seconds());
        let length = tensors.op_counts.get(&call.program).copied().unwrap_or(1);
        let mut observer = faults.observer(call.program.name(), length, observer);
        device.run_observed(call, files, &mut observer)?;
        self.arena_use.end(call);
        if must_sleep {
            device.synchronize()?;
            let last_compute = device.compute_seconds().zip(before).map(|(now, before)| now - before);
            let seconds = last_compute.unwrap_or_else(|| start.elapsed().as_secs_f64()) * (slowdown - 1.0);
            std::thread::sleep(Duration::from_secs_f64(seconds));
            self.injected_delay_seconds += seconds;
        }
        Ok(())
    }

    /// Returns the sizes of the arenas and the scratch file, with the measured high-water mark of each.
    pub fn stats(&mut self) -> Stats {
        self.device.stats()
    }

    /// Returns the measured bytes of the tensors in use at the fullest moment so far, by category and without the gaps
    /// between tensors. The measurement starts anew with each start and each re-plan. `None` before the first op, and
    /// for a remote device, of which this process sees planned ops only.
    pub fn tensors_in_use(&mut self) -> Option<&BytesByCategory> {
        self.arena_use.tensors_in_use()
    }

    /// Returns the measured bytes of the arena by category, if they may have changed since the last call: the tensors of
    /// [`Engine::tensors_in_use`], and the gaps up to the high-water mark as workspace.
    pub fn take_new_arena_use(&mut self) -> Option<BytesByCategory> {
        let tensors = self.arena_use.take_news().then(|| self.arena_use.tensors_in_use().cloned()).flatten()?;
        Some(arena_use::with_gaps(tensors, self.stats().arena_measured_bytes))
    }

    /// Returns the fullest moment so far with the buffers that were in use; `None` where
    /// [`Engine::tensors_in_use`] is.
    pub fn fullest_moment(&mut self) -> Option<FullestMoment> {
        self.arena_use.fullest_moment()
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

    /// Writes one micro-batch to its input tensors: the tokens, labels and other values of `rows` at the indices
    /// `range`, counted in tokens over all rows. `micro_batch` is the number of the micro-batch in the step, counted
    /// from 0; it selects the slot of each tensor.
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

    /// Appends empty rows to `rows` until they fill whole micro-batches, at least `min_micro_batches`. Returns the
    /// number of micro-batches. Empty rows have no labelled tokens and do not change the result. On a storage-only
    /// worker, appends no rows and returns `min_micro_batches`.
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

    /// Computes the gradients of `rows` and the clip factor, and returns loss and gradient norm of the step. The
    /// weights do not change, so a failed step can be repeated. Runs at least `min_micro_batches` micro-batches, even
    /// without rows, because in a sharded or pipeline team other workers wait for this device in each of them.
    pub fn gradients(
        &mut self,
        rows: &mut Rows,
        input: &StepInput,
        min_micro_batches: u64,
    ) -> Result<StepLoss, DeviceError> {
        // A step without any label still decays the moments.
        self.next_update_op = 1;
        let inverse_tokens = if input.loss_divisor == 0 { 0.0 } else { 1.0 / input.loss_divisor as f64 };
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

    /// Returns the compute seconds of the device since it was opened, with injected delays. Returns `None` if the
    /// device is in no communication group or does not measure them.
    fn compute_seconds(&mut self) -> Result<Option<f64>, DeviceError> {
        if !self.in_group {
            return Ok(None);
        }
        self.device.synchronize()?;
        Ok(self.device.compute_seconds().map(|seconds| seconds + self.injected_delay_seconds))
    }

    /// Updates the weights with the gradients of the step; does nothing if the update of the step is done. After an
    /// out-of-memory error, only some tensors are updated. The next call continues with the remaining ones.
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

    /// Returns the number of ops of the step's update that are done: 0 before the update, and some of them after an
    /// out-of-memory error. Once the whole update is done, returns a number above the op count of any update.
    pub fn update_ops_done(&self) -> u64 {
        u64::from(self.next_update_op - 1)
    }
}
