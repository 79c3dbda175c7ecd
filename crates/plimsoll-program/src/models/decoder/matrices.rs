//! Storage of the layer matrices: in the run's precision, or quantized per projection and dequantized right before each
//! product.

use super::{Base, BuildOptions};
use crate::builder::Builder;
use crate::formats::{NF4_BLOCK, NF4_GROUP, NF4_PIECE};
use crate::models::Target;
use crate::op::{Op, OpKind, Quantized};
use crate::tensor::{Index, Operand, TensorId};
use foldhash::HashMap;
use plimsoll_core::{Category, DType, RecomputeLevel};

/// A matrix `[rows, columns]` of every layer, such as the fused one of queries, keys and values, and its storage.
#[derive(Clone)]
pub(super) struct Matrix {
    pub name: &'static str,
    pub rows: u64,
    pub columns: u64,
    stored: Stored,
}

#[derive(Clone)]
enum Stored {
    /// One tensor in the run's precision, with a slot per layer.
    Plain(TensorId),
    /// Quantized projections, in the order of their rows.
    Quantized(Vec<Projection>),
}

/// A projection (such as `q_proj`) that is stored quantized, as a part of a fused matrix.
#[derive(Clone)]
pub(super) struct Projection {
    pub target: Target,
    /// Index of its first element within the fused matrix.
    pub offset: u64,
    pub elements: u64,
    pub columns: u64,
    /// Operands of the projection's tensors; the block's variable is the layer, which selects the slot.
    pub stored: Quantized,
}

impl Projection {
    /// Adds the tensors of a quantized projection of all layers.
    fn new(builder: &mut Builder, options: &BuildOptions, target: Target) -> Projection {
        let (config, layers) = (options.config, options.depth());
        let [rows, columns] = target.shape(config);
        let elements = rows * columns;
        let mut tensor = |role: &str, elements: u64, dtype: DType| {
            let name = format!("{}.{role}", target.name());
            Operand::layer(builder.persistent(&name, &[elements], dtype, Category::Weight, layers), 0)
        };
        let blocks = elements.div_ceil(NF4_BLOCK);
        let stored = match options.base {
            Base::Nf4 => Quantized::Nf4 {
                codes: tensor("codes", elements.div_ceil(2), DType::U8),
                scales: tensor("scales", blocks, DType::U8),
                groups: tensor("groups", 2 * blocks.div_ceil(NF4_GROUP), DType::F32),
            },
            Base::Int8 | Base::Plain => Quantized::Int8 {
                codes: tensor("codes", elements, DType::U8),
                scales: tensor("scales", elements / columns, DType::F32),
            },
        };
        Projection { target, offset: target.first_row(config) * columns, elements, columns, stored }
    }

    /// Returns the granule, a number of elements: the projection can be quantized in pieces that start at its
    /// multiples.
    pub fn granule(&self) -> u64 {
        match self.stored {
            Quantized::Int8 { .. } => self.columns,
            Quantized::Nf4 { .. } => NF4_PIECE,
        }
    }

    /// Returns the piece of the projection in layer `layer` that starts at element `offset`. The offset must be a
    /// multiple of [`Projection::granule`] in every iteration of the block.
    pub fn piece(&self, layer: i64, offset: Index) -> Quantized {
        let at = |operand: Operand, group: u64, entries: u64| {
            let [base, scale] = [offset.base, offset.scale].map(|elements| self.entry(elements, group, entries));
            let operand = Operand { slot: Index::fixed(layer), ..operand };
            operand.starting_at(Index { base, scale, micro_batch: 0 })
        };
        match self.stored {
            Quantized::Int8 { codes, scales } => {
                Quantized::Int8 { codes: at(codes, 1, 1), scales: at(scales, self.columns, 1) }
            }
            Quantized::Nf4 { codes, scales, groups } => Quantized::Nf4 {
                codes: at(codes, 2, 1),
                scales: at(scales, NF4_BLOCK, 1),
                groups: at(groups, NF4_PIECE, 2),
            },
        }
    }

    /// Returns the index of the first code or scale that belongs to the projection's element with index `elements`.
    /// Each `group` elements have `entries` codes or scales.
    fn entry(&self, elements: i64, group: u64, entries: u64) -> i64 {
        // No piece follows one that is the whole projection.
        let is_end = elements >= self.elements as i64;
        debug_assert!(is_end || elements % group as i64 == 0, "pieces start at quantization blocks");
        elements / group as i64 * entries as i64
    }
}

impl Matrix {
    /// Adds the tensors of the matrix `name` of all layers, in the run's precision or quantized as `options.base` says.
    pub fn new(builder: &mut Builder, options: &BuildOptions, name: &'static str) -> Matrix {
        let (config, base, layers) = (options.config, options.base, options.depth());
        let targets: Vec<Target> = config.targets().iter().copied().filter(|target| target.tensor() == name).collect();
        let rows = targets.iter().map(|target| target.shape(config)[0]).sum();
        let columns = targets[0].shape(config)[1];
        let stored = match base {
            Base::Plain => {
                let dims = [rows, columns];
                Stored::Plain(builder.persistent(name, &dims, builder.precision, Category::Weight, layers))
            }
            Base::Int8 | Base::Nf4 => {
                let quantized = |target| Projection::new(builder, options, target);
                Stored::Quantized(targets.into_iter().map(quantized).collect())
            }
        };
        Matrix { name, rows, columns, stored }
    }

    /// Returns the matrix with another tensor in the run's precision. A quantized matrix stays.
    pub fn replaced_by(&self, copy: impl Fn(TensorId) -> TensorId) -> Matrix {
        let mut matrix = self.clone();
        if let Stored::Plain(id) = &mut matrix.stored {
            *id = copy(*id);
        }
        matrix
    }

    /// Returns the first projection of the matrix.
    pub fn target(&self) -> Option<Target> {
        Target::ALL.into_iter().find(|target| target.tensor() == self.name)
    }

    /// Returns the tensor of a matrix that is not quantized, and `None` for a quantized one.
    pub fn plain(&self) -> Option<TensorId> {
        match self.stored {
            Stored::Plain(id) => Some(id),
            Stored::Quantized(_) => None,
        }
    }

    /// Returns the projections of a quantized matrix; empty if it is not quantized.
    pub fn parts(&self) -> &[Projection] {
        match &self.stored {
            Stored::Plain(_) => &[],
            Stored::Quantized(parts) => parts,
        }
    }

    /// Returns the operand of the matrix for a product. A quantized matrix is first dequantized, by ops appended to
    /// `ops`, into a buffer that no recompute level keeps for the backward pass.
    pub fn dequantized(
        &self,
        builder: &mut Builder,
        prefix: &str,
        layers: u32,
        ops: &mut Vec<Op>,
        dropped_from: &mut HashMap<TensorId, RecomputeLevel>,
    ) -> Operand {
        let parts = match &self.stored {
            Stored::Plain(id) => return Operand::layer(*id, 0),
            Stored::Quantized(parts) => parts,
        };
        let name = format!("{prefix}{}.dequantized", self.name);
        let dims = [self.rows, self.columns];
        let id = builder.transient(&name, &dims, builder.precision, Category::Workspace, layers);
        dropped_from.insert(id, RecomputeLevel::Nothing);
        let dequantized = Operand::layer(id, 0);
        for &Projection { offset, elements, columns, stored, .. } in parts {
            let into = dequantized.starting_at(Index::fixed(offset as i64));
            ops.push(OpKind::Dequantize { from: stored, into, elements, columns }.into());
        }
        dequantized
    }
}
