//! Low-rank adapters (Hu et al., "LoRA", 2021): `out += alpha / r · dropout(x) · Aᵀ · Bᵀ`, added to the product of a
//! frozen matrix. Arithmetic, initialization and names are those of PEFT.
//!
//! Adapters may differ between layers in rank and scale, and some layers may have none. The tensors of a projection
//! have a slot of the largest rank for each layer. A smaller adapter fills the first elements of its slot, and no op of
//! a forward or backward pass reads the others: they are zero, and so are their gradients.

use super::WeightSource;
use super::files;
use crate::builder::{Builder, Product};
use crate::models::ModelConfig;
use crate::models::weights::{Parameter, Target};
use crate::op::OpKind;
use crate::program::{Phase, Program, ProgramKind, ProgramSet};
use crate::tensor::{Index, Operand, TensorId};
use crate::workspace::Kernels;
use plimsoll_core::{Category, DType, WorkKind};
use std::ops::Range;

/// Settings of low-rank adapters (LoRA) on a frozen model, as in PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// r: rank of A and B; with [`Lora::modules`] the largest one.
    pub rank: u64,
    /// Numerator of alpha / r, the factor of an adapter's output.
    pub alpha: f64,
    /// Whether the factor is alpha / √r instead, which keeps the size of the output at any rank (Kalajdzievski,
    /// "rsLoRA", 2023).
    pub rank_stabilized: bool,
    /// Dropout probability of the adapters' inputs in training. Projections with the same input share the dropped
    /// elements; in PEFT each projection draws its own.
    pub dropout: f64,
    /// Projections with an adapter, in every layer or in some.
    pub targets: Vec<Target>,
    /// All adapters with their rank and alpha, if they differ or if some layers have none. `None` for adapters of
    /// `rank` and `alpha` on all `targets` in every layer.
    pub modules: Option<Vec<AdaptedModule>>,
    /// Seed of the initial values of A and of dropout.
    pub seed: u64,
    /// Origin of the initial A and B. A random start draws A uniformly within ± 1 / √columns, as in PEFT (Kaiming
    /// initialization with a = √5), and sets B to zero. For files, it lists the dtype of each of
    /// [`ModelConfig::adapter_parameters`].
    pub source: WeightSource,
}

/// A projection of one layer with its own adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptedModule {
    /// Layer of the model, counted from 0.
    pub layer: u64,
    /// Projection of the layer.
    pub target: Target,
    /// r: rank of A and B.
    pub rank: u64,
    /// Numerator of alpha / r.
    pub alpha: f64,
}

/// The rank of an adapter, and the factor of its output.
#[derive(Clone, Copy, Debug, PartialEq)]
struct AdapterShape {
    rank: u64,
    scale: f64,
}

impl Lora {
    /// Returns the largest adapters, on all targets in every layer. They stand for a layer of any adapters in plans.
    #[must_use]
    pub fn uniform(&self) -> Lora {
        Lora { modules: None, ..self.clone() }
    }

    /// Returns the matrices A and B of all adapters as files in PEFT's format store them.
    pub fn parameters(&self, config: &ModelConfig) -> Vec<Parameter> {
        config.adapter_parameters(self.ranks(config))
    }

    /// Returns a function from a layer and a projection to the rank of its adapter.
    fn ranks(&self, config: &ModelConfig) -> impl Fn(u64, Target) -> Option<u64> {
        let targets = config.own_targets(&self.targets);
        move |layer, target| self.shape(&targets, layer, target).map(|shape| shape.rank)
    }

    /// Returns rank and factor of the adapter on a projection of a layer; `None` without one. `targets` are the
    /// projections of the model with adapters.
    fn shape(&self, targets: &[Target], layer: u64, target: Target) -> Option<AdapterShape> {
        let (rank, alpha) = match &self.modules {
            None => targets.contains(&target).then_some((self.rank, self.alpha))?,
            Some(modules) => {
                let module = modules.iter().find(|module| (module.layer, module.target) == (layer, target))?;
                (module.rank, module.alpha)
            }
        };
        let divisor = if self.rank_stabilized { (rank as f64).sqrt() } else { rank as f64 };
        Some(AdapterShape { rank, scale: alpha / divisor })
    }

    /// Adds the tensors of all adapters, with a slot for each of `layers`. Returns the adapters in the order of
    /// [`Target::ALL`], one for each rank and scale of a projection.
    pub(super) fn adapters(
        &self,
        builder: &mut Builder,
        config: &ModelConfig,
        layers: Range<u64>,
        dtype: DType,
    ) -> Vec<Adapter> {
        let mut targets = config.own_targets(&self.targets);
        targets.sort();
        let mut adapters = Vec::new();
        for &target in &targets {
            let ([rows, columns], [a, b]) = (target.shape(config), target.adapter());
            let shapes: Vec<_> = layers.clone().map(|layer| self.shape(&targets, layer, target)).collect();
            let rank = if self.modules.is_some() { self.largest_rank(target) } else { self.rank };
            let slots = shapes.len() as u32;
            let a = builder.persistent(a, &[rank, columns], dtype, Category::Weight, slots);
            let b = builder.persistent(b, &[rows, rank], dtype, Category::Weight, slots);
            let mut distinct: Vec<AdapterShape> = Vec::new();
            for shape in shapes.iter().flatten() {
                if !distinct.contains(shape) {
                    distinct.push(*shape);
                }
            }
            if distinct.is_empty() {
                // The tensors exist on each device of a team, so that checkpoints have the same tensors.
                distinct.push(AdapterShape { rank, scale: 0.0 });
            }
            for shape in distinct {
                let layers = shapes.iter().map(|other| *other == Some(shape)).collect();
                let (first_column, AdapterShape { rank, scale }) = (target.first_row(config), shape);
                adapters.push(Adapter { target, a, b, first_column, columns: rows, rank, scale, layers });
            }
        }
        adapters
    }

    /// Returns the largest rank of the adapters on a projection.
    fn largest_rank(&self, target: Target) -> u64 {
        let modules = self.modules.iter().flatten().filter(|module| module.target == target);
        modules.map(|module| module.rank).max().unwrap_or(self.rank)
    }
}

/// The LoRA adapters of one projection that have the same rank and scale. Their tensors have a slot for each layer of the
/// device, and may be shared with adapters of other ranks and scales.
#[derive(Clone)]
pub(super) struct Adapter {
    pub target: Target,
    /// Matrix A, `[r, columns of the adapted matrix]`.
    pub a: TensorId,
    /// Matrix B, `[rows of the adapted matrix, r]`.
    pub b: TensorId,
    /// r: rank of A and B.
    pub rank: u64,
    /// Factor of the adapter's output.
    pub scale: f64,
    /// For each layer of the device, whether it has this adapter.
    pub layers: Vec<bool>,
    /// First column of the adapter's results in the output of the fused matrix (such as queries | keys | values).
    pub first_column: u64,
    /// Number of columns of the adapter's results.
    pub columns: u64,
}

/// An input of a layer's projections, such as the normed input of queries, keys and values. The LoRA adapters on one
/// input share its dropout mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(super) enum Site {
    AttentionIn = 0,
    AttentionOut = 1,
    FfnIn = 2,
    FfnMiddle = 3,
}

impl Site {
    pub fn name(self) -> &'static str {
        match self {
            Site::AttentionIn => "attention_in",
            Site::AttentionOut => "attention_out",
            Site::FfnIn => "ffn_in",
            Site::FfnMiddle => "ffn_middle",
        }
    }
}

/// Builds the Programs that add LoRA adapters to the matrices of a model directory (`plimsoll export --merged`), piece by piece.
///
/// Program `load` reads the adapters. Program `merge` reads each parameter of the model from the file tensor
/// `model:NAME`, and writes it to `merged:NAME` in the same dtype. `dtypes` has the dtype of each parameter in the
/// files, in the order of [`ModelConfig::hf_parameters`]. Arithmetic is f32. The whole model is never in memory.
///
/// # Panics
/// Panics if the adapters do not come from files.
pub fn merge(config: &ModelConfig, lora: &Lora, kernels: Kernels, dtypes: &[DType]) -> ProgramSet {
    let WeightSource::Files { dtypes: adapter_dtypes } = &lora.source else {
        panic!("merged adapters come from files")
    };
    let wide = DType::F32;
    let mut builder = Builder::new(wide, kernels);
    let adapters = lora.adapters(&mut builder, config, 0..config.layers, wide);

    let parameters = lora.parameters(config);
    let mut load = Vec::new();
    for (parameter, &dtype) in parameters.iter().zip(adapter_dtypes) {
        let tensor = builder.find(parameter.tensor).expect("every parameter has its tensor");
        let file = files::file_tensor(&mut builder, &format!("adapter:{}", parameter.hf_name), &parameter.shape, dtype);
        let elements_max = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let staging = files::staging_buffer(&mut builder, ProgramKind::Load, dtype, elements_max);
        let place = files::parameter_operand(tensor, parameter, 0);
        let (staged, room) = (Operand::whole(staging), builder.set.tensor(staging).elements());
        load.extend(files::pieces(&parameter.hf_name, parameter.elements(), room, &mut |elements, offset| {
            let mut ops = files::read_piece(file, staged, elements, offset);
            ops.push(OpKind::Cast { from: staged, to: place.offset_by(offset), elements }.into());
            ops
        }));
    }

    let mut merged = Vec::new();
    let parameters = config.hf_parameters();
    let elements_max = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
    let widest = parameters.iter().filter_map(|p| p.target.map(|_| p.shape[1])).max().unwrap_or(1);
    let elements_max = elements_max.min((files::STAGING_BYTES / wide.bytes()).max(widest));
    let sum = builder.transient("merge.sum", &[elements_max], wide, Category::Staging, 1);
    for (parameter, &dtype) in parameters.iter().zip(dtypes) {
        let (name, elements) = (&parameter.hf_name, parameter.elements());
        let from = files::file_tensor(&mut builder, &format!("model:{name}"), &parameter.shape, dtype);
        let to = files::file_tensor(&mut builder, &format!("merged:{name}"), &parameter.shape, dtype);
        let staging_name = format!("merge.staging.{dtype}");
        let found = builder.find(&staging_name);
        let staging =
            found.unwrap_or_else(|| builder.transient(&staging_name, &[elements_max], dtype, Category::Staging, 1));
        let adapter = parameter.target.zip(parameter.layer).and_then(|(target, layer)| {
            adapters.iter().find(|adapter| adapter.target == target && adapter.layers[layer as usize])
        });
        let (staged, sum) = (Operand::whole(staging), Operand::whole(sum));
        let columns = parameter.shape[parameter.shape.len() - 1];
        // Pieces of adapted matrices are whole rows, each with its row of B.
        let room = if adapter.is_some() { elements_max / columns * columns } else { elements_max };
        merged.extend(files::pieces(name, elements, room, &mut |elements, offset| {
            let mut ops = files::read_piece(from, staged, elements, offset);
            if let Some(adapter) = adapter {
                let layer = parameter.layer.unwrap_or(0) as i64;
                let by_rank = |elements: i64| elements / columns as i64 * adapter.rank as i64;
                let rows = Index { base: by_rank(offset.base), scale: by_rank(offset.scale), micro_batch: 0 };
                let (a, b) = (Operand::slot(adapter.a, layer), Operand::slot(adapter.b, layer).starting_at(rows));
                ops.push(OpKind::Cast { from: staged, to: sum, elements }.into());
                ops.push(builder.product(Product {
                    scale: adapter.scale,
                    accumulate: true,
                    ..Product::plain(b, a, sum, [elements / columns, columns, adapter.rank])
                }));
                ops.push(OpKind::Cast { from: sum, to: staged, elements }.into());
            }
            ops.extend(files::write_piece(staged, to, elements, offset));
            ops
        }));
    }
    for (work, kind, blocks) in
        [(WorkKind::Load, ProgramKind::Load, load), (WorkKind::Save, ProgramKind::Merge, merged)]
    {
        builder.set.programs.push(Program { work, kind, inputs: vec![], outputs: vec![], blocks });
        let programs = vec![builder.set.programs.len() - 1];
        builder.set.phases.push(Phase { programs });
    }
    builder.set
}
