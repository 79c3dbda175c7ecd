//! Adapters of low rank: `out += alpha / r · dropout(x) · Aᵀ · Bᵀ` beside the product of a frozen matrix
//! (Hu et al., "LoRA", 2021), as PEFT computes, initialises and names them.

use super::Source;
use super::files;
use crate::builder::{Builder, Product};
use crate::models::ModelConfig;
use crate::models::weights::{Parameter, Target};
use crate::op::OpKind;
use crate::program::{Phase, Program, ProgramSet};
use crate::tensor::{Index, Operand, TensorId};
use crate::workspace::Kernels;
use plimsoll_core::{Category, DType, WorkName};

/// Which adapters there are, and what becomes of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// r.
    pub rank: u64,
    /// What adapters add is multiplied with alpha / r.
    pub alpha: f64,
    /// The share of an adapter's input that is left out in training. The projections of one input leave out the same
    /// elements; in PEFT each draws its own.
    pub dropout: f64,
    /// Which projections have one.
    pub targets: Vec<Target>,
    /// Of A where it is drawn, and of what is left out.
    pub seed: u64,
    /// Where A and B come from: drawn (A uniform within ± 1 / √columns, which is Kaiming's rule with a = √5 as PEFT
    /// has it; B zero), or files with a type for each of `adapter_parameters`.
    pub source: Source,
}

impl Lora {
    /// What the products of A and B are multiplied with.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// A and B as they are in files.
    pub fn parameters(&self, config: &ModelConfig) -> Vec<Parameter> {
        config.adapter_parameters(&self.targets, self.rank)
    }

    /// Their tensors.
    pub(super) fn adapters(
        &self,
        builder: &mut Builder,
        config: &ModelConfig,
        layers: u32,
        dtype: DType,
    ) -> Vec<Adapter> {
        let mut targets = self.targets.clone();
        targets.sort();
        let mut adapter = |target: Target| {
            let ([rows, columns], [a, b]) = (target.shape(config), target.adapter());
            Adapter {
                target,
                a: builder.persistent(a, &[self.rank, columns], dtype, Category::Weight, layers),
                b: builder.persistent(b, &[rows, self.rank], dtype, Category::Weight, layers),
                first_column: target.first_row(config),
                columns: rows,
            }
        };
        targets.into_iter().map(&mut adapter).collect()
    }
}

/// An adapter of every layer.
#[derive(Clone, Copy)]
pub(super) struct Adapter {
    pub target: Target,
    /// `[r, columns of the matrix]`.
    pub a: TensorId,
    /// `[rows of the matrix, r]`.
    pub b: TensorId,
    /// Where its results begin among those of the fused matrix.
    pub first_column: u64,
    /// How many there are.
    pub columns: u64,
}

/// A place in a layer at which adapters see something.
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

/// Programs that fold adapters into the matrices of a model directory, a piece at a time: `load` reads the adapters,
/// `merge` the files of the model (`model:NAME`, one type of `dtypes` for each parameter) and writes the same
/// parameters in the same types (`merged:NAME`). Everything between is f32. The model itself never stands in memory.
///
/// # Panics
/// Where the adapters come from no files.
pub fn merge(config: &ModelConfig, lora: &Lora, kernels: Kernels, dtypes: &[DType]) -> ProgramSet {
    let Source::Files { dtypes: adapter_dtypes } = &lora.source else { panic!("adapters that are merged have files") };
    let wide = DType::F32;
    let mut builder = Builder::new(wide, kernels);
    let adapters = lora.adapters(&mut builder, config, config.layers as u32, wide);

    let parameters = lora.parameters(config);
    let mut load = Vec::new();
    for (parameter, &dtype) in parameters.iter().zip(adapter_dtypes) {
        let tensor = builder.find(parameter.tensor).expect("every parameter has its tensor");
        let file = files::file(&mut builder, &format!("adapter:{}", parameter.hf_name), &parameter.shape, dtype);
        let most = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let staging = files::staging(&mut builder, "load", dtype, most);
        let place = files::place_of(tensor, parameter, 0);
        let (staged, room) = (Operand::whole(staging), builder.set.tensor(staging).elements());
        load.extend(files::pieces(&parameter.hf_name, parameter.elements(), room, &mut |elements, offset| {
            let mut ops = files::fetch(file, staged, elements, offset);
            ops.push(OpKind::Cast { from: staged, to: files::at(place, offset), elements }.into());
            ops
        }));
    }

    let mut merged = Vec::new();
    let parameters = config.hf_parameters();
    let most = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
    let widest = parameters.iter().filter_map(|p| p.target.map(|_| p.shape[1])).max().unwrap_or(1);
    let most = most.min((files::STAGING_BYTES / wide.bytes()).max(widest));
    let sum = builder.transient("merge.sum", &[most], wide, Category::Staging, 1);
    for (parameter, &dtype) in parameters.iter().zip(dtypes) {
        let (name, elements) = (&parameter.hf_name, parameter.elements());
        let from = files::file(&mut builder, &format!("model:{name}"), &parameter.shape, dtype);
        let to = files::file(&mut builder, &format!("merged:{name}"), &parameter.shape, dtype);
        let staging_name = format!("merge.staging.{dtype}");
        let found = builder.find(&staging_name);
        let staging = found.unwrap_or_else(|| builder.transient(&staging_name, &[most], dtype, Category::Staging, 1));
        let adapter = parameter.target.and_then(|target| adapters.iter().find(|adapter| adapter.target == target));
        let (staged, sum) = (Operand::whole(staging), Operand::whole(sum));
        let columns = parameter.shape[parameter.shape.len() - 1];
        // Matrices go in whole rows: each has its row of B.
        let room = if adapter.is_some() { most / columns * columns } else { most };
        merged.extend(files::pieces(name, elements, room, &mut |elements, offset| {
            let mut ops = files::fetch(from, staged, elements, offset);
            if let Some(adapter) = adapter {
                let layer = parameter.layer.unwrap_or(0) as i64;
                let by_rank = |elements: i64| elements / columns as i64 * lora.rank as i64;
                let rows = Index { base: by_rank(offset.base), scale: by_rank(offset.scale), micro_batch: 0 };
                let (a, b) = (Operand::slot(adapter.a, layer), Operand::slot(adapter.b, layer).from(rows));
                ops.push(OpKind::Cast { from: staged, to: sum, elements }.into());
                ops.push(builder.product(Product {
                    scale: lora.scale(),
                    accumulate: true,
                    ..Product::plain(b, a, sum, [elements / columns, columns, lora.rank])
                }));
                ops.push(OpKind::Cast { from: sum, to: staged, elements }.into());
            }
            ops.extend(files::store(staged, to, elements, offset));
            ops
        }));
    }
    for (work, name, blocks) in [(WorkName::Load, "load", load), (WorkName::Save, "merge", merged)] {
        builder.set.programs.push(Program { work, name: name.into(), inputs: vec![], outputs: vec![], blocks });
        let programs = vec![builder.set.programs.len() - 1];
        builder.set.phases.push(Phase { programs });
    }
    builder.set
}
