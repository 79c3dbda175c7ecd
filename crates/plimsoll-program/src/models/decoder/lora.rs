//! Low-rank adapters (Hu et al., "LoRA", 2021): `out += alpha / r · dropout(x) · Aᵀ · Bᵀ`, added to the product of a
//! frozen matrix. Arithmetic, initialization and names are those of PEFT.

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

/// Settings of low-rank adapters (LoRA) on a frozen model, as in PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// r: rank of A and B.
    pub rank: u64,
    /// Numerator of alpha / r, the factor of an adapter's output.
    pub alpha: f64,
    /// Whether the factor is alpha / √r instead, which keeps the size of the output at any rank (Kalajdzievski,
    /// "rsLoRA", 2023).
    pub rank_stabilized: bool,
    /// Dropout probability of the adapters' inputs in training. Projections with the same input share the dropped
    /// elements; in PEFT each projection draws its own.
    pub dropout: f64,
    /// Projections with an adapter, in every layer.
    pub targets: Vec<Target>,
    /// Seed of the initial values of A and of dropout.
    pub seed: u64,
    /// Origin of the initial A and B. A random start draws A uniformly within ± 1 / √columns, as in PEFT (Kaiming
    /// initialization with a = √5), and sets B to zero. For files, it lists the dtype of each of
    /// [`ModelConfig::adapter_parameters`].
    pub source: WeightSource,
}

impl Lora {
    /// Returns the factor of an adapter's output: alpha / r, or alpha / √r.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }
    }

    /// Returns the matrices A and B of all adapters as files in PEFT's format store them.
    pub fn parameters(&self, config: &ModelConfig) -> Vec<Parameter> {
        config.adapter_parameters(&config.own_targets(&self.targets), self.rank)
    }

    /// Adds the tensors of all adapters, with a slot for each of `layers` layers. Returns the adapters in the order of
    /// [`Target::ALL`].
    pub(super) fn adapters(
        &self,
        builder: &mut Builder,
        config: &ModelConfig,
        layers: u32,
        dtype: DType,
    ) -> Vec<Adapter> {
        let mut targets = config.own_targets(&self.targets);
        targets.sort();
        targets.into_iter().map(|target| self.adapter(builder, config, layers, dtype, target)).collect()
    }

    /// Adds the tensors of the adapter of one projection, and returns the adapter.
    fn adapter(
        &self,
        builder: &mut Builder,
        config: &ModelConfig,
        layers: u32,
        dtype: DType,
        target: Target,
    ) -> Adapter {
        let ([rows, columns], [a, b]) = (target.shape(config), target.adapter());
        Adapter {
            target,
            a: builder.persistent(a, &[self.rank, columns], dtype, Category::Weight, layers),
            b: builder.persistent(b, &[rows, self.rank], dtype, Category::Weight, layers),
            first_column: target.first_row(config),
            columns: rows,
        }
    }
}

/// The tensors of the LoRA adapter of one projection, with a slot for each layer.
#[derive(Clone, Copy)]
pub(super) struct Adapter {
    pub target: Target,
    /// Matrix A, `[r, columns of the adapted matrix]`.
    pub a: TensorId,
    /// Matrix B, `[rows of the adapted matrix, r]`.
    pub b: TensorId,
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
    let adapters = lora.adapters(&mut builder, config, config.layers as u32, wide);

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
        let adapter = parameter.target.and_then(|target| adapters.iter().find(|adapter| adapter.target == target));
        let (staged, sum) = (Operand::whole(staging), Operand::whole(sum));
        let columns = parameter.shape[parameter.shape.len() - 1];
        // Pieces of adapted matrices are whole rows, each with its row of B.
        let room = if adapter.is_some() { elements_max / columns * columns } else { elements_max };
        merged.extend(files::pieces(name, elements, room, &mut |elements, offset| {
            let mut ops = files::read_piece(from, staged, elements, offset);
            if let Some(adapter) = adapter {
                let layer = parameter.layer.unwrap_or(0) as i64;
                let by_rank = |elements: i64| elements / columns as i64 * lora.rank as i64;
                let rows = Index { base: by_rank(offset.base), scale: by_rank(offset.scale), micro_batch: 0 };
                let (a, b) = (Operand::slot(adapter.a, layer), Operand::slot(adapter.b, layer).starting_at(rows));
                ops.push(OpKind::Cast { from: staged, to: sum, elements }.into());
                ops.push(builder.product(Product {
                    scale: lora.scale(),
                    accumulate: true,
                    ..Product::plain(b, a, sum, [elements / columns, columns, lora.rank])
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
