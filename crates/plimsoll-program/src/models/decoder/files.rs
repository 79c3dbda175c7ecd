//! Programs for files: loading a model, saving trained weights, checkpoints. Data passes through staging buffers, one
//! piece at a time.
//!
//! The prefix of a file tensor's name tells its file:
//!
//! | prefix | file |
//! |---|---|
//! | `model:` | the model that is loaded |
//! | `adapter:` | adapters that are loaded |
//! | `saved:` | trained weights of a run, which a separate evaluator may read directly |
//! | `checkpoint:` | master weights and optimizer state, to resume a run |

use super::backward::OptimizerTensor;
use super::matrices::Projection;
use super::{Decoder, Method, Optimizer, WeightSource, for_each_slot};
use crate::builder::Builder;
use crate::models::config::{QueryGrowth, Rotation};
use crate::models::weights::Parameter;
use crate::op::{Op, OpKind, Queue};
use crate::program::{Block, ProgramKind};
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, DType, Space, WorkKind};

/// Largest size in bytes of a staging buffer, through which data passes between files and the device. A single row that
/// is larger gets a larger buffer.
pub const STAGING_BYTES: u64 = 4 << 20;

/// Returns the operand of a parameter within the fused tensor `tensor`, on a device that holds the layers from `first`
/// on.
pub(super) fn parameter_operand(tensor: TensorId, parameter: &Parameter, first: u64) -> Operand {
    Operand { tensor, slot: Index::fixed(slot_of(parameter, first)), offset: Index::fixed(parameter.offset as i64) }
}

/// Returns the slot of a parameter's layer on a device that holds the layers from `first` on; 0 for a parameter outside
/// the layers.
fn slot_of(parameter: &Parameter, first: u64) -> i64 {
    parameter.layer.map_or(0, |layer| (layer - first) as i64)
}

/// Returns the buffer through which a Program moves elements of `dtype` between files and tensors. If there is none,
/// adds one of `elements_max` elements, or fewer so that it is no larger than [`STAGING_BYTES`].
pub(super) fn staging_buffer(builder: &mut Builder, program: ProgramKind, dtype: DType, elements_max: u64) -> TensorId {
    let name = format!("{program}.staging.{dtype}");
    if let Some(id) = builder.find(&name) {
        return id;
    }
    let elements = elements_max.min(STAGING_BYTES / dtype.bytes());
    builder.transient(&name, &[elements], dtype, Category::Staging, 1)
}

/// Returns the file tensor with this name, and adds it if needed. A file tensor stands for data in a file: ops copy
/// from and to it, and it has no place in an arena.
pub(super) fn file_tensor(builder: &mut Builder, name: &str, shape: &[u64], dtype: DType) -> TensorId {
    match builder.find(name) {
        Some(id) => id,
        None => builder.tensor(Tensor {
            name: name.into(),
            shape: shape.into(),
            dtype,
            space: Space::File,
            category: Category::Staging,
            lifetime: Lifetime::Persistent,
            slots: 1,
        }),
    }
}

/// Returns the blocks (loops of ops) that process `elements` elements in pieces of at most `capacity`: one for all full
/// pieces, one for the rest. `ops` returns the ops of a piece from its element count and its first element.
pub(super) fn pieces(
    name: &str,
    elements: u64,
    capacity: u64,
    ops: &mut dyn FnMut(u64, Index) -> Vec<Op>,
) -> Vec<Block> {
    let (full, rest) = (elements / capacity, elements % capacity);
    let mut blocks = Vec::new();
    if full > 0 {
        let ops = ops(capacity, Index::stride(capacity as i64));
        blocks.push(Block { name: name.into(), first: 0, step: 1, repeat: full as u32, ops });
    }
    if rest > 0 {
        blocks.push(Block::once(name, ops(rest, Index::fixed((full * capacity) as i64))));
    }
    blocks
}

/// Returns the ops that copy `elements` elements of a file, from `offset` on, to the device.
pub(super) fn read_piece(file: TensorId, into: Operand, elements: u64, offset: Index) -> Vec<Op> {
    transfer(Operand::whole(file).starting_at(offset), into, elements, Queue::CopyIn)
}

/// Returns the ops that copy `elements` elements from the device to a file, at `offset`.
pub(super) fn write_piece(from: Operand, file: TensorId, elements: u64, offset: Index) -> Vec<Op> {
    transfer(from, Operand::whole(file).starting_at(offset), elements, Queue::CopyOut)
}

fn transfer(from: Operand, to: Operand, elements: u64, queue: Queue) -> Vec<Op> {
    vec![
        Op { kind: OpKind::TransferStart { from, to, elements, sequence: 0 }, queue },
        Op { kind: OpKind::TransferWait { from, to, elements, sequence: 0 }, queue },
    ]
}

/// The origin of a parameter's values when a run starts.
enum PieceSource {
    /// A file, by its file tensor.
    File(TensorId),
    /// Normal random numbers of standard deviation `std`. `number` is the index of the parameter, so that parameters
    /// get different numbers.
    Normal { seed: u64, number: u64, std: f64 },
    /// Uniform random numbers from −`bound` to `bound`. `number` is the index of the parameter, so that parameters get
    /// different numbers.
    Uniform { seed: u64, number: u64, bound: f64 },
}

impl Decoder<'_> {
    fn weight_tensor(&self, parameter: &Parameter) -> TensorId {
        self.builder.find(parameter.tensor).expect("every parameter has its tensor")
    }

    fn place(&self, tensor: TensorId, parameter: &Parameter) -> Operand {
        parameter_operand(tensor, parameter, self.options.layers.start)
    }

    /// Returns whether this device holds a parameter; a pipeline stage holds those of its layers.
    fn has_parameter(&self, parameter: &Parameter) -> bool {
        let tensor = self.builder.find(parameter.tensor);
        let is_matrix = || self.weights.matrices().iter().any(|matrix| matrix.name == parameter.tensor);
        let has_layer = parameter.layer.is_none_or(|layer| self.options.layers.contains(&layer));
        has_layer && (tensor.is_some() || is_matrix())
    }

    /// Returns whether this device writes a parameter to files: each one that it holds, with one exception. If the last
    /// pipeline stage holds the embedding as its tied head, only the first stage writes it.
    fn writes_parameter(&self, parameter: &Parameter) -> bool {
        self.has_parameter(parameter) && (self.options.is_first() || parameter.tensor != "embedding")
    }

    /// Returns the quantized projection that stores a parameter, and `None` if the parameter is not quantized.
    fn quantized_projection(&self, parameter: &Parameter) -> Option<&Projection> {
        let target = parameter.target?;
        let matrix = self.weights.matrices().into_iter().find(|matrix| matrix.name == parameter.tensor)?;
        matrix.parts().iter().find(|part| part.target == target)
    }

    pub(super) fn elements_of(&self, tensor: TensorId) -> u64 {
        self.builder.set.tensor(tensor).elements()
    }

    /// Returns the ops that read from a file, or generate, `elements` elements of a parameter from element `first` on,
    /// and write them to `into`.
    fn fill_piece(source: &PieceSource, into: Operand, elements: u64, first: Index) -> Vec<Op> {
        match *source {
            PieceSource::File(file) => read_piece(file, into, elements, first),
            PieceSource::Normal { seed, number, std } => {
                vec![OpKind::InitNormal { into, seed, number, first, std, elements }.into()]
            }
            PieceSource::Uniform { seed, number, bound } => {
                vec![OpKind::InitUniform { into, seed, number, first, bound, elements }.into()]
            }
        }
    }

    /// Returns the blocks (loops of ops) that load a parameter piece by piece. Each piece arrives as `dtype` in a
    /// staging buffer of at most `elements_max` elements, and is then cast or quantized to its place. Random numbers
    /// for a tensor in f32 (f64 in an f64 run) need no buffer.
    fn load_parameter(
        &mut self,
        parameter: &Parameter,
        source: &PieceSource,
        dtype: DType,
        elements_max: u64,
    ) -> Vec<Block> {
        let (name, elements) = (&parameter.hf_name, parameter.elements());
        let wide = self.options.precision.wide();
        if self.quantized_projection(parameter).is_some() {
            return self.load_quantized(parameter, source, dtype, elements_max);
        }
        let place = self.place(self.master_or_weight(self.weight_tensor(parameter)), parameter);
        let is_random = !matches!(source, PieceSource::File(_));
        if is_random && self.builder.set.tensor(place.tensor).dtype == wide {
            return vec![Block::once(name, Self::fill_piece(source, place, elements, Index::fixed(0)))];
        }
        let staging = staging_buffer(&mut self.builder, ProgramKind::Load, dtype, elements_max);
        let staged = Operand::whole(staging);
        pieces(name, elements, self.elements_of(staging), &mut |elements, offset| {
            let mut ops = Self::fill_piece(source, staged, elements, offset);
            ops.push(OpKind::Cast { from: staged, to: place.offset_by(offset), elements }.into());
            ops
        })
    }

    fn load_quantized(
        &mut self,
        parameter: &Parameter,
        source: &PieceSource,
        dtype: DType,
        elements_max: u64,
    ) -> Vec<Block> {
        let wide = self.options.precision.wide();
        // The buffer must hold the largest piece that can be quantized separately.
        let granules = self.weights.matrices().into_iter().flat_map(|m| m.parts()).map(|p| p.granule().min(p.elements));
        let least = granules.max().unwrap_or(1);
        let [staging, widened] = [dtype, wide].map(|dtype| self.pieces_buffer(dtype, elements_max, least));
        let room = self.elements_of(staging).min(self.elements_of(widened));
        let part = self.quantized_projection(parameter).expect("the caller has found it");
        let layer = slot_of(parameter, self.options.layers.start);
        let room = if room >= part.elements { room } else { room / part.granule() * part.granule() };
        pieces(&parameter.hf_name, part.elements, room, &mut |elements, offset| {
            let (staged, from) = (Operand::whole(staging), Operand::whole(widened));
            let mut ops = Self::fill_piece(source, staged, elements, offset);
            if staging != widened {
                ops.push(OpKind::Cast { from: staged, to: from, elements }.into());
            }
            let (into, columns) = (part.piece(layer, offset), part.columns);
            ops.push(OpKind::Quantize { from, into, elements, columns }.into());
            ops
        })
    }

    /// Returns the buffer for pieces of quantized parameters in `dtype`. If there is none, adds one of `elements_max`
    /// elements, or fewer within [`STAGING_BYTES`], but at least `least`.
    fn pieces_buffer(&mut self, dtype: DType, elements_max: u64, least: u64) -> TensorId {
        let name = format!("load.pieces.{dtype}");
        let elements = elements_max.min(STAGING_BYTES / dtype.bytes()).max(least);
        let found = self.builder.find(&name);
        found.unwrap_or_else(|| self.builder.transient(&name, &[elements], dtype, Category::Staging, 1))
    }

    /// Returns the blocks (loops of ops) that load parameters from files with these dtypes. `group` is the prefix of
    /// the file tensors' names, such as `model`.
    fn load_from_files(&mut self, group: &str, parameters: &[Parameter], dtypes: &[DType]) -> Vec<Block> {
        let mut blocks = Vec::new();
        let own: Vec<(&Parameter, &DType)> =
            parameters.iter().zip(dtypes).filter(|(p, _)| self.has_parameter(p)).collect();
        for &(parameter, &dtype) in &own {
            let name = format!("{group}:{}", parameter.hf_name);
            let file = file_tensor(&mut self.builder, &name, &parameter.shape, dtype);
            let same = own.iter().filter(|(_, other)| **other == dtype);
            let elements_max = same.map(|(p, _)| p.elements()).max().unwrap_or(1);
            blocks.extend(self.load_parameter(parameter, &PieceSource::File(file), dtype, elements_max));
        }
        blocks
    }

    /// Returns the block that sets all elements of a parameter to `value`.
    fn set_constant(&self, parameter: &Parameter, value: f64) -> Block {
        let into = self.place(self.master_or_weight(self.weight_tensor(parameter)), parameter);
        let fill = OpKind::Fill { into, value, elements: parameter.elements() };
        Block::once(&parameter.hf_name, vec![fill.into()])
    }

    fn load_model(&mut self) -> Vec<Block> {
        let parameters = self.options.config.hf_parameters();
        let seed = match &self.options.source {
            WeightSource::Files { dtypes } => return self.load_from_files("model", &parameters, dtypes),
            WeightSource::Random { seed } => *seed,
            WeightSource::LiveRun => return vec![],
        };
        let elements_max = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        // A new norm multiplies by one.
        let norm_weight = 1.0 - self.options.config.model_type.norm_offset();
        let mut blocks = Vec::new();
        for (number, parameter) in
            parameters.iter().enumerate().filter(|(_, parameter)| self.has_parameter(parameter)).collect::<Vec<_>>()
        {
            if parameter.shape.len() == 2 {
                let origin = PieceSource::Normal { seed, number: number as u64, std: self.options.config.init_std };
                blocks.extend(self.load_parameter(parameter, &origin, self.options.precision.wide(), elements_max));
            } else {
                let value = if parameter.hf_name.ends_with(".bias") { 0.0 } else { norm_weight };
                blocks.push(self.set_constant(parameter, value));
            }
        }
        blocks
    }

    /// Returns the blocks (loops of ops) that load adapters from files, or set A to random numbers and B to zero as in
    /// PEFT. Empty without adapters, and if they come from a live run.
    fn load_adapters(&mut self) -> Vec<Block> {
        let Method::Lora(lora) = &self.options.method else { return vec![] };
        let parameters = lora.parameters(self.options.config);
        if lora.source == WeightSource::LiveRun {
            return vec![];
        }
        let adapters = self.partial_adapters().into_iter().map(|id| self.master_or_weight(id));
        let mut blocks: Vec<Block> = adapters.map(|id| self.clear(id)).collect();
        let seed = match &lora.source {
            WeightSource::Random { seed } => *seed,
            WeightSource::Files { dtypes } => {
                blocks.extend(self.load_from_files("adapter", &parameters, dtypes));
                return blocks;
            }
            WeightSource::LiveRun => unreachable!("returned above"),
        };
        // Parameter numbers continue after those of the model.
        let before = self.options.config.hf_parameters().len();
        let elements_max = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        for (number, parameter) in
            parameters.iter().enumerate().filter(|(_, parameter)| self.has_parameter(parameter)).collect::<Vec<_>>()
        {
            if parameter.tensor.ends_with("lora_a") {
                let bound = 1.0 / (parameter.shape[1] as f64).sqrt();
                let origin = PieceSource::Uniform { seed, number: (before + number) as u64, bound };
                blocks.extend(self.load_parameter(parameter, &origin, self.options.precision.wide(), elements_max));
            } else {
                blocks.push(self.set_constant(parameter, 0.0));
            }
        }
        blocks
    }

    /// Returns the tensors of trained adapters that differ between layers. They do not fill all elements of their
    /// slots, but the update computes with all, so what is unused must be zero.
    fn partial_adapters(&self) -> Vec<TensorId> {
        let differ = self.options.method.lora().is_some_and(|lora| lora.modules.is_some());
        if differ && self.options.training.is_some() { self.trained_weights() } else { vec![] }
    }

    /// Returns the block that sets all slots of a tensor to zero.
    fn clear(&self, id: TensorId) -> Block {
        let tensor = self.builder.set.tensor(id);
        let into = Operand::layer(id, 0);
        for_each_slot(tensor, OpKind::Fill { into, value: 0.0, elements: tensor.elements() })
    }

    /// Returns the block that fills the rotary table, for each rotation of the model one after another. If queries grow,
    /// the rows of keys follow.
    fn rope_table_block(&self) -> Block {
        let config = self.options.config;
        let growth = config.query_growth_within(self.table_rows);
        let of_queries = config.rotations().into_iter().map(|rotation| (rotation, growth));
        let of_keys = config.rotations().into_iter().filter(|_| growth.is_some()).map(|rotation| (rotation, None));
        let all = (0..).zip(of_queries.chain(of_keys));
        let ops = all.map(|(number, (rotation, growth))| self.rope_table_op(number, rotation, growth).into()).collect();
        Block::once("rope_table", ops)
    }

    /// Returns the op that fills part `number` of the rotary table, which has rows for every position.
    fn rope_table_op(&self, number: u64, rotation: Rotation, growth: Option<QueryGrowth>) -> OpKind {
        let Rotation { theta, scaling, amplitude } = rotation;
        let (table_rows, head_dim) = (self.table_rows, self.options.config.head_dim);
        let first = Index::fixed((number * table_rows * head_dim) as i64);
        let table = Operand::whole(self.weights.rope_table).starting_at(first);
        OpKind::RopeTable { table, table_rows, head_dim, theta, scaling, amplitude, growth }
    }

    pub(super) fn load(&mut self) {
        let mut blocks = vec![self.rope_table_block()];
        blocks.extend(self.load_model());
        blocks.extend(self.load_adapters());
        blocks.extend(self.cast_masters());
        blocks.extend(self.copy_initial());
        self.push_program_as_phase(WorkKind::Load, ProgramKind::Load, blocks);
        let trained = self.options.method.lora().map_or(&self.options.source, |lora| &lora.source);
        if *trained == WeightSource::LiveRun {
            self.reload_weights();
        }
    }

    /// Adds the Program [`ProgramKind::ReloadWeights`] of a device that only evaluates. It reads the trained weights in
    /// the order in which the training devices save them.
    fn reload_weights(&mut self) {
        let parameters = self.trained_parameters();
        let elements_max = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let mut blocks = Vec::new();
        for parameter in &parameters {
            let (weight, name) = (self.weight_tensor(parameter), format!("saved:{}", parameter.hf_name));
            let program = ProgramKind::ReloadWeights;
            blocks.extend(self.move_parameter(parameter, program, weight, &name, self.options.precision, elements_max));
        }
        self.push_program_as_phase(WorkKind::Load, ProgramKind::ReloadWeights, blocks);
    }

    /// Returns the trained parameters of this device, as files store them.
    fn trained_parameters(&self) -> Vec<Parameter> {
        let mut all = match &self.options.method {
            Method::Full => self.options.config.hf_parameters(),
            Method::Lora(lora) => lora.parameters(self.options.config),
        };
        all.retain(|parameter| self.has_parameter(parameter));
        all
    }

    /// Adds the Programs `save`, `checkpoint` and `restore`.
    ///
    /// `save` writes trained weights in the run's precision. `checkpoint` writes trained weights (the masters, if there
    /// are any) and optimizer state in f32 (f64 in an f64 run); `restore` reads them. Frozen weights and copies of initial
    /// weights are in neither: a run with some runs `load` before `restore`.
    pub(super) fn save(&mut self, optimizer: &Optimizer) {
        let (precision, wide) = (self.options.precision, self.options.precision.wide());
        let parameters = self.trained_parameters();
        let elements_max = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let mut save = Vec::new();
        for parameter in parameters.iter().filter(|parameter| self.writes_parameter(parameter)).collect::<Vec<_>>() {
            let tensor = self.master_or_weight(self.weight_tensor(parameter));
            save.extend(self.move_parameter(
                parameter,
                ProgramKind::Save,
                tensor,
                &format!("saved:{}", parameter.hf_name),
                precision,
                elements_max,
            ));
        }
        self.push_program_as_phase(WorkKind::Save, ProgramKind::Save, save);
        for (program, work) in [(ProgramKind::Checkpoint, WorkKind::Save), (ProgramKind::Restore, WorkKind::Load)] {
            let restores = program == ProgramKind::Restore;
            let mut blocks = if restores { vec![self.rope_table_block()] } else { vec![] };
            if restores {
                blocks.extend(self.clear_partial_state(optimizer));
            }
            let moved = |parameter: &&Parameter| restores || self.writes_parameter(parameter);
            for parameter in parameters.iter().filter(moved).collect::<Vec<_>>() {
                let tensor = self.master_or_weight(self.weight_tensor(parameter));
                let file = format!("checkpoint:{}", parameter.hf_name);
                blocks.extend(self.move_parameter(parameter, program, tensor, &file, wide, elements_max));
                let states = optimizer.state(self.elements_of(self.weight_tensor(parameter))).into_iter();
                for OptimizerTensor { role, .. } in states.filter(|state| state.dtype.is_none()) {
                    let tensor = self.builder.find(&format!("{}.{role}", parameter.tensor));
                    let tensor = tensor.expect("the optimizer state exists");
                    let file = format!("checkpoint:{role}.{}", parameter.hf_name);
                    blocks.extend(self.move_parameter(parameter, program, tensor, &file, wide, elements_max));
                }
            }
            blocks.extend(self.move_quantized_state(optimizer, restores));
            if restores {
                blocks.extend(self.cast_masters());
            }
            self.push_program_as_phase(work, program, blocks);
        }
    }

    /// Returns the blocks that set the optimizer state of [`Decoder::partial_adapters`] to zero.
    fn clear_partial_state(&self, optimizer: &Optimizer) -> Vec<Block> {
        let mut blocks = Vec::new();
        for weight in self.partial_adapters() {
            let Tensor { name, .. } = self.builder.set.tensor(weight);
            for OptimizerTensor { role, .. } in optimizer.state(self.elements_of(weight)) {
                let state = self.builder.find(&format!("{name}.{role}")).expect("the optimizer state exists");
                blocks.push(self.clear(state));
            }
        }
        blocks
    }

    /// Returns the blocks (loops of ops) that copy a parameter, a part of `tensor`, to the file tensor `name` with
    /// dtype `dtype`. In the Programs `restore` and [`ProgramKind::ReloadWeights`] they copy from the file to `tensor`.
    fn move_parameter(
        &mut self,
        parameter: &Parameter,
        program: ProgramKind,
        tensor: TensorId,
        name: &str,
        dtype: DType,
        elements_max: u64,
    ) -> Vec<Block> {
        let file = file_tensor(&mut self.builder, name, &parameter.shape, dtype);
        let staging = staging_buffer(&mut self.builder, program, dtype, elements_max);
        let reads = matches!(program, ProgramKind::Restore | ProgramKind::ReloadWeights);
        let (staged, place) = (Operand::whole(staging), self.place(tensor, parameter));
        pieces(name, parameter.elements(), self.elements_of(staging), &mut |elements, offset| {
            let place = place.offset_by(offset);
            if reads {
                let mut ops = read_piece(file, staged, elements, offset);
                ops.push(OpKind::Cast { from: staged, to: place, elements }.into());
                ops
            } else {
                let mut ops = vec![OpKind::Cast { from: place, to: staged, elements }.into()];
                ops.extend(write_piece(staged, file, elements, offset));
                ops
            }
        })
    }

    /// Returns the blocks (loops of ops) that copy 8-bit optimizer state to files, or from files if `restores`. A
    /// quantization block may cross from one parameter of a fused tensor to the next. Files are therefore named after
    /// the fused tensor and the layer: `checkpoint:first.qkv.3`.
    fn move_quantized_state(&mut self, optimizer: &Optimizer, restores: bool) -> Vec<Block> {
        let mut blocks = Vec::new();
        for weight in self.trained_weights() {
            let Tensor { name, slots, .. } = self.builder.set.tensor(weight).clone();
            if !restores && !self.options.is_first() && name == "embedding" {
                continue;
            }
            let states = optimizer.state(self.elements_of(weight)).into_iter();
            for OptimizerTensor { role, .. } in states.filter(|state| state.dtype.is_some()) {
                let id = self.builder.find(&format!("{name}.{role}")).expect("the optimizer state exists");
                let Tensor { shape, dtype, .. } = self.builder.set.tensor(id).clone();
                let first = if self.weights.has_layer_slots(weight) { self.options.layers.start } else { 0 };
                for slot in 0..slots {
                    let file_name = format!("checkpoint:{role}.{name}.{}", first + u64::from(slot));
                    let file = file_tensor(&mut self.builder, &file_name, &shape, dtype);
                    let room = STAGING_BYTES / dtype.bytes();
                    blocks.extend(pieces(&file_name, shape[0], room, &mut |elements, offset| {
                        let place = Operand::slot(id, i64::from(slot)).starting_at(offset);
                        let file = Operand::whole(file).starting_at(offset);
                        match restores {
                            true => transfer(file, place, elements, Queue::CopyIn),
                            false => transfer(place, file, elements, Queue::CopyOut),
                        }
                    }));
                }
            }
        }
        blocks
    }
}
