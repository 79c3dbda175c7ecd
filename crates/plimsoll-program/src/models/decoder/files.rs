//! Files: loading a model, saving what was trained, checkpoints. Everything passes through staging buffers, a piece at
//! a time.
//!
//! What stands in a file-space tensor is said by the group before its name: `model:` the model that is loaded,
//! `adapter:` adapters that are loaded, `saved:` what a run makes, which another device may take as it comes, `checkpoint:`
//! what it needs to go on.

use super::backward::State;
use super::matrices::Part;
use super::{Decoder, Method, Optimizer, Source};
use crate::builder::Builder;
use crate::models::weights::Parameter;
use crate::op::{Op, OpKind, Queue};
use crate::program::Block;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, DType, Space, WorkName};

/// Bytes of a staging buffer, at most; more only where a single row is larger.
pub const STAGING_BYTES: u64 = 4 << 20;

/// The place of a parameter on a device that has the layers from `first` on.
pub(super) fn place_of(tensor: TensorId, parameter: &Parameter, first: u64) -> Operand {
    Operand { tensor, slot: Index::fixed(slot_of(parameter, first)), offset: Index::fixed(parameter.offset as i64) }
}

/// The slot of a parameter's layer among those from `first` on.
fn slot_of(parameter: &Parameter, first: u64) -> i64 {
    parameter.layer.map_or(0, |layer| (layer - first) as i64)
}

/// A place, further on.
pub(super) fn at(place: Operand, offset: Index) -> Operand {
    place.from(Index { base: place.offset.base + offset.base, ..offset })
}

/// A staging buffer for elements of `dtype`, no larger than the `most` that go through it.
pub(super) fn staging(builder: &mut Builder, program: &str, dtype: DType, most: u64) -> TensorId {
    let name = format!("{program}.staging.{dtype}");
    if let Some(id) = builder.find(&name) {
        return id;
    }
    let elements = most.min(STAGING_BYTES / dtype.bytes());
    builder.transient(&name, &[elements], dtype, Category::Staging, 1)
}

/// A tensor of a file.
pub(super) fn file(builder: &mut Builder, name: &str, shape: &[u64], dtype: DType) -> TensorId {
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

/// Blocks that go over `elements`, `room` at a time. `ops` are those of a piece: how many elements it has, and which is
/// its first.
pub(super) fn pieces(name: &str, elements: u64, room: u64, ops: &mut dyn FnMut(u64, Index) -> Vec<Op>) -> Vec<Block> {
    let (whole, rest) = (elements / room, elements % room);
    let mut blocks = Vec::new();
    if whole > 0 {
        let ops = ops(room, Index::stride(room as i64));
        blocks.push(Block { name: name.into(), first: 0, step: 1, repeat: whole as u32, ops });
    }
    if rest > 0 {
        blocks.push(Block::once(name, ops(rest, Index::fixed((whole * room) as i64))));
    }
    blocks
}

/// Part of a file to the beginning of a tensor on the device.
pub(super) fn fetch(file: TensorId, into: Operand, elements: u64, offset: Index) -> Vec<Op> {
    transfer(Operand::whole(file).from(offset), into, elements, Queue::CopyIn)
}

/// The beginning of a tensor on the device to a part of a file.
pub(super) fn store(from: Operand, file: TensorId, elements: u64, offset: Index) -> Vec<Op> {
    transfer(from, Operand::whole(file).from(offset), elements, Queue::CopyOut)
}

fn transfer(from: Operand, to: Operand, elements: u64, queue: Queue) -> Vec<Op> {
    vec![
        Op { kind: OpKind::TransferStart { from, to, elements, sequence: 0 }, queue },
        Op { kind: OpKind::TransferWait { from, to, elements, sequence: 0 }, queue },
    ]
}

/// Where a piece comes from, before it is what the device holds.
enum Origin {
    /// A file.
    File(TensorId),
    /// Normal numbers with this number.
    Normal { seed: u64, number: u64, std: f64 },
    /// Uniform ones.
    Uniform { seed: u64, number: u64, bound: f64 },
}

impl Decoder<'_> {
    fn weight_tensor(&self, parameter: &Parameter) -> TensorId {
        self.builder.find(parameter.tensor).expect("every parameter has its tensor")
    }

    fn place(&self, tensor: TensorId, parameter: &Parameter) -> Operand {
        place_of(tensor, parameter, self.what.layers.start)
    }

    /// Whether this device has a parameter.
    fn has(&self, parameter: &Parameter) -> bool {
        let tensor = self.builder.find(parameter.tensor);
        let coarse = || self.weights.matrices().iter().any(|matrix| matrix.name == parameter.tensor);
        let layer = parameter.layer.is_none_or(|layer| self.what.layers.contains(&layer));
        layer && (tensor.is_some() || coarse())
    }

    /// Whether this device writes a parameter to files: of those that several have, the first does.
    fn writes(&self, parameter: &Parameter) -> bool {
        self.has(parameter) && (self.what.is_first() || parameter.tensor != "embedding")
    }

    /// What a parameter is a part of, where that stands quantised.
    fn part_of(&self, parameter: &Parameter) -> Option<&Part> {
        let target = parameter.target?;
        let matrix = self.weights.matrices().into_iter().find(|matrix| matrix.name == parameter.tensor)?;
        matrix.parts().iter().find(|part| part.target == target)
    }

    pub(super) fn elements_of(&self, tensor: TensorId) -> u64 {
        self.builder.set.tensor(tensor).elements()
    }

    /// Fills a buffer with a piece.
    fn fill(origin: &Origin, into: Operand, elements: u64, first: Index) -> Vec<Op> {
        match *origin {
            Origin::File(file) => fetch(file, into, elements, first),
            Origin::Normal { seed, number, std } => {
                vec![OpKind::InitNormal { into, seed, number, first, std, elements }.into()]
            }
            Origin::Uniform { seed, number, bound } => {
                vec![OpKind::InitUniform { into, seed, number, first, bound, elements }.into()]
            }
        }
    }

    /// Blocks that bring a parameter to its place: a piece comes as `dtype` and is cast, or quantised, from there. At
    /// most `most` elements go through a buffer at once.
    fn bring(&mut self, parameter: &Parameter, origin: &Origin, dtype: DType, most: u64) -> Vec<Block> {
        let (name, elements) = (&parameter.hf_name, parameter.elements());
        let wide = self.what.precision.wide();
        if self.part_of(parameter).is_some() {
            return self.bring_quantised(parameter, origin, dtype, most);
        }
        let place = self.place(self.master(self.weight_tensor(parameter)), parameter);
        let drawn = !matches!(origin, Origin::File(_));
        if drawn && self.builder.set.tensor(place.tensor).dtype == wide {
            return vec![Block::once(name, Self::fill(origin, place, elements, Index::fixed(0)))];
        }
        let staging = staging(&mut self.builder, "load", dtype, most);
        let staged = Operand::whole(staging);
        pieces(name, elements, self.elements_of(staging), &mut |elements, offset| {
            let mut ops = Self::fill(origin, staged, elements, offset);
            ops.push(OpKind::Cast { from: staged, to: at(place, offset), elements }.into());
            ops
        })
    }

    fn bring_quantised(&mut self, parameter: &Parameter, origin: &Origin, dtype: DType, most: u64) -> Vec<Block> {
        let wide = self.what.precision.wide();
        // A row that is larger than a buffer makes the buffer larger.
        let least = self.weights.matrices().into_iter().flat_map(|m| m.parts()).map(|p| p.granule().min(p.elements));
        let least = least.max().unwrap_or(1);
        let mut buffer = |dtype: DType| {
            let name = format!("load.pieces.{dtype}");
            let most = most.min(STAGING_BYTES / dtype.bytes()).max(least);
            let found = self.builder.find(&name);
            found.unwrap_or_else(|| self.builder.transient(&name, &[most], dtype, Category::Staging, 1))
        };
        let (staging, widened) = (buffer(dtype), buffer(wide));
        let room = self.elements_of(staging).min(self.elements_of(widened));
        let part = self.part_of(parameter).expect("the caller has found it");
        let layer = slot_of(parameter, self.what.layers.start);
        let room = if room >= part.elements { room } else { room / part.granule() * part.granule() };
        pieces(&parameter.hf_name, part.elements, room, &mut |elements, offset| {
            let (staged, from) = (Operand::whole(staging), Operand::whole(widened));
            let mut ops = Self::fill(origin, staged, elements, offset);
            if staging != widened {
                ops.push(OpKind::Cast { from: staged, to: from, elements }.into());
            }
            let (into, columns) = (part.piece(layer, offset), part.columns);
            ops.push(OpKind::Quantise { from, into, elements, columns }.into());
            ops
        })
    }

    /// Blocks that bring the parameters of a file to their places.
    fn bring_files(&mut self, group: &str, parameters: &[Parameter], dtypes: &[DType]) -> Vec<Block> {
        let mut blocks = Vec::new();
        let own: Vec<(&Parameter, &DType)> = parameters.iter().zip(dtypes).filter(|(p, _)| self.has(p)).collect();
        for &(parameter, &dtype) in &own {
            let name = format!("{group}:{}", parameter.hf_name);
            let file = file(&mut self.builder, &name, &parameter.shape, dtype);
            let same = own.iter().filter(|(_, other)| **other == dtype);
            let most = same.map(|(p, _)| p.elements()).max().unwrap_or(1);
            blocks.extend(self.bring(parameter, &Origin::File(file), dtype, most));
        }
        blocks
    }

    /// Blocks that set all elements of a parameter.
    fn set_to(&self, parameter: &Parameter, value: f64) -> Block {
        let into = self.place(self.master(self.weight_tensor(parameter)), parameter);
        let fill = OpKind::Fill { into, value, elements: parameter.elements() };
        Block::once(&parameter.hf_name, vec![fill.into()])
    }

    fn load_model(&mut self) -> Vec<Block> {
        let parameters = self.what.config.hf_parameters();
        let seed = match &self.what.source {
            Source::Files { dtypes } => return self.bring_files("model", &parameters, dtypes),
            Source::Random { seed } => *seed,
            Source::Saved => return vec![],
        };
        let most = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let mut blocks = Vec::new();
        for (number, parameter) in
            parameters.iter().enumerate().filter(|(_, parameter)| self.has(parameter)).collect::<Vec<_>>()
        {
            if parameter.shape.len() == 2 {
                let origin = Origin::Normal { seed, number: number as u64, std: self.what.config.init_std };
                blocks.extend(self.bring(parameter, &origin, self.what.precision.wide(), most));
            } else {
                let value = if parameter.tensor == "qkv_bias" { 0.0 } else { 1.0 };
                blocks.push(self.set_to(parameter, value));
            }
        }
        blocks
    }

    /// Adapters begin as PEFT's: A drawn, B zero.
    fn load_adapters(&mut self) -> Vec<Block> {
        let Method::Lora(lora) = &self.what.method else { return vec![] };
        let parameters = lora.parameters(self.what.config);
        let seed = match &lora.source {
            Source::Files { dtypes } => return self.bring_files("adapter", &parameters, dtypes),
            Source::Random { seed } => *seed,
            Source::Saved => return vec![],
        };
        // Numbers go on after those of the model.
        let before = self.what.config.hf_parameters().len();
        let most = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let mut blocks = Vec::new();
        for (number, parameter) in
            parameters.iter().enumerate().filter(|(_, parameter)| self.has(parameter)).collect::<Vec<_>>()
        {
            if parameter.tensor.ends_with("lora_a") {
                let bound = 1.0 / (parameter.shape[1] as f64).sqrt();
                let origin = Origin::Uniform { seed, number: (before + number) as u64, bound };
                blocks.extend(self.bring(parameter, &origin, self.what.precision.wide(), most));
            } else {
                blocks.push(self.set_to(parameter, 0.0));
            }
        }
        blocks
    }

    fn table(&self) -> Block {
        let config = self.what.config;
        let kind = OpKind::RopeTable {
            table: Operand::whole(self.weights.rope_table),
            table_rows: self.table_rows,
            head_dim: config.head_dim,
            theta: config.rope_theta,
            scaling: config.rope_scaling,
        };
        Block::once("rope_table", vec![kind.into()])
    }

    pub(super) fn load(&mut self) {
        let mut blocks = vec![self.table()];
        blocks.extend(self.load_model());
        blocks.extend(self.load_adapters());
        blocks.extend(self.weights_of_masters());
        self.alone(WorkName::Load, "load", blocks);
        let trained = self.what.method.lora().map_or(&self.what.source, |lora| &lora.source);
        if *trained == Source::Saved {
            self.renew();
        }
    }

    /// What was trained, as `save` of the devices that train it gives it, in the same order.
    fn renew(&mut self) {
        let parameters = self.trained_parameters();
        let most = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let mut blocks = Vec::new();
        for parameter in &parameters {
            let (weight, name) = (self.weight_tensor(parameter), format!("saved:{}", parameter.hf_name));
            blocks.extend(self.moved(parameter, "renew", weight, &name, self.what.precision, most));
        }
        self.alone(WorkName::Load, "renew", blocks);
    }

    /// The parameters that are trained here, as files have them.
    fn trained_parameters(&self) -> Vec<Parameter> {
        let mut all = match &self.what.method {
            Method::Full => self.what.config.hf_parameters(),
            Method::Lora(lora) => lora.parameters(self.what.config),
        };
        all.retain(|parameter| self.has(parameter));
        all
    }

    /// `save` writes what was trained in the run's precision; `checkpoint` writes that (the masters, where there are
    /// any) and the optimizer's state in the wide type, and `restore` reads it. A frozen model is in neither: `load`
    /// comes before `restore` where one is.
    pub(super) fn save(&mut self, optimizer: &Optimizer) {
        let (precision, wide) = (self.what.precision, self.what.precision.wide());
        let parameters = self.trained_parameters();
        let most = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let mut save = Vec::new();
        for parameter in parameters.iter().filter(|parameter| self.writes(parameter)).collect::<Vec<_>>() {
            let tensor = self.master(self.weight_tensor(parameter));
            save.extend(self.moved(
                parameter,
                "save",
                tensor,
                &format!("saved:{}", parameter.hf_name),
                precision,
                most,
            ));
        }
        self.alone(WorkName::Save, "save", save);
        for (name, work) in [("checkpoint", WorkName::Save), ("restore", WorkName::Load)] {
            let mut blocks = if name == "restore" { vec![self.table()] } else { vec![] };
            let moved = |parameter: &&Parameter| name == "restore" || self.writes(parameter);
            for parameter in parameters.iter().filter(moved).collect::<Vec<_>>() {
                let tensor = self.master(self.weight_tensor(parameter));
                let file = format!("checkpoint:{}", parameter.hf_name);
                blocks.extend(self.moved(parameter, name, tensor, &file, wide, most));
                let states = optimizer.state(self.elements_of(self.weight_tensor(parameter))).into_iter();
                for State { role, .. } in states.filter(|state| state.dtype.is_none()) {
                    let tensor = self.builder.find(&format!("{}.{role}", parameter.tensor));
                    let tensor = tensor.expect("the optimizer's state has been made");
                    let file = format!("checkpoint:{role}.{}", parameter.hf_name);
                    blocks.extend(self.moved(parameter, name, tensor, &file, wide, most));
                }
            }
            blocks.extend(self.coarse_state(optimizer, name == "restore"));
            if name == "restore" {
                blocks.extend(self.weights_of_masters());
            }
            self.alone(work, name, blocks);
        }
    }

    /// A parameter of a tensor to a file, or back in `restore` and `renew`.
    fn moved(
        &mut self,
        parameter: &Parameter,
        program: &str,
        tensor: TensorId,
        name: &str,
        dtype: DType,
        most: u64,
    ) -> Vec<Block> {
        let file = file(&mut self.builder, name, &parameter.shape, dtype);
        let staging = staging(&mut self.builder, program, dtype, most);
        let (staged, place) = (Operand::whole(staging), self.place(tensor, parameter));
        pieces(name, parameter.elements(), self.elements_of(staging), &mut |elements, offset| {
            let place = at(place, offset);
            if matches!(program, "restore" | "renew") {
                let mut ops = fetch(file, staged, elements, offset);
                ops.push(OpKind::Cast { from: staged, to: place, elements }.into());
                ops
            } else {
                let mut ops = vec![OpKind::Cast { from: place, to: staged, elements }.into()];
                ops.extend(store(staged, file, elements, offset));
                ops
            }
        })
    }

    /// State whose blocks go over whole tensors, as it is: `checkpoint:first.qkv.3`.
    fn coarse_state(&mut self, optimizer: &Optimizer, restores: bool) -> Vec<Block> {
        let mut blocks = Vec::new();
        for weight in self.trained() {
            let Tensor { name, slots, .. } = self.builder.set.tensor(weight).clone();
            if !restores && !self.what.is_first() && name == "embedding" {
                continue;
            }
            let states = optimizer.state(self.elements_of(weight)).into_iter();
            for State { role, .. } in states.filter(|state| state.dtype.is_some()) {
                let id = self.builder.find(&format!("{name}.{role}")).expect("the optimizer's state has been made");
                let Tensor { shape, dtype, .. } = self.builder.set.tensor(id).clone();
                let first = if self.weights.of_layers(weight) { self.what.layers.start } else { 0 };
                for slot in 0..slots {
                    let file_name = format!("checkpoint:{role}.{name}.{}", first + u64::from(slot));
                    let file = file(&mut self.builder, &file_name, &shape, dtype);
                    let room = STAGING_BYTES / dtype.bytes();
                    blocks.extend(pieces(&file_name, shape[0], room, &mut |elements, offset| {
                        let place = Operand::slot(id, i64::from(slot)).from(offset);
                        let file = Operand::whole(file).from(offset);
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
