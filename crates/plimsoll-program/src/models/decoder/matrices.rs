//! The matrices of the layers: whole, in the run's precision, or quantised by projection and made whole
//! again right before each product.

use super::{Base, Build};
use crate::builder::Builder;
use crate::formats::{NF4_BLOCK, NF4_GROUP, NF4_PIECE};
use crate::models::Target;
use crate::op::{Op, OpKind, Quantised};
use crate::tensor::{Index, Operand, TensorId};
use plimsoll_core::{Category, DType, RecomputeLevel};
use std::collections::HashMap;

/// A matrix of every layer, `[rows, columns]`.
pub(super) struct Matrix {
    pub name: &'static str,
    pub rows: u64,
    pub columns: u64,
    stored: Stored,
}

enum Stored {
    /// A slot for each layer.
    Plain(TensorId),
    /// One projection after the other.
    Quantised(Vec<Part>),
}

/// A projection that stands quantised.
pub(super) struct Part {
    pub target: Target,
    /// Its first element in the whole matrix.
    pub offset: u64,
    pub elements: u64,
    pub columns: u64,
    /// Of the block's layer.
    pub stored: Quantised,
}

impl Part {
    /// Pieces that are quantised by themselves have a multiple of so many elements.
    pub fn granule(&self) -> u64 {
        match self.stored {
            Quantised::Int8 { .. } => self.columns,
            Quantised::Nf4 { .. } => NF4_PIECE,
        }
    }

    /// The piece of layer `layer` that begins at element `offset`, a multiple of the granule wherever the
    /// block's variable is.
    pub fn piece(&self, layer: i64, offset: Index) -> Quantised {
        let at = |operand: Operand, of: u64, each: u64| {
            let scaled = |elements: i64| {
                // A piece that is the whole projection has none after it.
                let whole = elements >= self.elements as i64;
                debug_assert!(whole || elements % of as i64 == 0, "pieces begin where blocks do");
                elements / of as i64 * each as i64
            };
            let offset = Index { base: scaled(offset.base), scale: scaled(offset.scale), micro_batch: 0 };
            Operand { slot: Index::fixed(layer), ..operand }.from(offset)
        };
        match self.stored {
            Quantised::Int8 { codes, scales } => {
                Quantised::Int8 { codes: at(codes, 1, 1), scales: at(scales, self.columns, 1) }
            }
            Quantised::Nf4 { codes, scales, groups } => Quantised::Nf4 {
                codes: at(codes, 2, 1),
                scales: at(scales, NF4_BLOCK, 1),
                groups: at(groups, NF4_PIECE, 2),
            },
        }
    }
}

impl Matrix {
    /// The tensors of the fused matrix of that name.
    pub fn new(builder: &mut Builder, what: &Build, name: &'static str) -> Matrix {
        let (config, base, layers) = (what.config, what.base, what.depth());
        let targets: Vec<Target> = Target::ALL.into_iter().filter(|target| target.tensor() == name).collect();
        let rows = targets.iter().map(|target| target.shape(config)[0]).sum();
        let columns = targets[0].shape(config)[1];
        let mut quantised = |target: Target| {
            let elements = target.shape(config)[0] * columns;
            let mut tensor = |role: &str, elements: u64, dtype: DType| {
                let name = format!("{}.{role}", target.name());
                Operand::layer(builder.persistent(&name, &[elements], dtype, Category::Weight, layers), 0)
            };
            let blocks = elements.div_ceil(NF4_BLOCK);
            let stored = match base {
                Base::Nf4 => Quantised::Nf4 {
                    codes: tensor("codes", elements.div_ceil(2), DType::U8),
                    scales: tensor("scales", blocks, DType::U8),
                    groups: tensor("groups", 2 * blocks.div_ceil(NF4_GROUP), DType::F32),
                },
                Base::Int8 | Base::Plain => Quantised::Int8 {
                    codes: tensor("codes", elements, DType::U8),
                    scales: tensor("scales", elements / columns, DType::F32),
                },
            };
            Part { target, offset: target.first_row(config) * columns, elements, columns, stored }
        };
        let stored = match base {
            Base::Plain => {
                let dims = [rows, columns];
                Stored::Plain(builder.persistent(name, &dims, builder.precision, Category::Weight, layers))
            }
            Base::Int8 | Base::Nf4 => Stored::Quantised(targets.into_iter().map(&mut quantised).collect()),
        };
        Matrix { name, rows, columns, stored }
    }

    /// Its tensor, where it is not quantised.
    pub fn plain(&self) -> Option<TensorId> {
        match self.stored {
            Stored::Plain(id) => Some(id),
            Stored::Quantised(_) => None,
        }
    }

    /// Its projections, where it is quantised.
    pub fn parts(&self) -> &[Part] {
        match &self.stored {
            Stored::Plain(_) => &[],
            Stored::Quantised(parts) => parts,
        }
    }

    /// The matrix as a product reads it. Where it is quantised, `ops` make it whole before, in a buffer that is thrown
    /// away after the product, whatever else is kept.
    pub fn whole(
        &self,
        builder: &mut Builder,
        prefix: &str,
        layers: u32,
        ops: &mut Vec<Op>,
        dropped_from: &mut HashMap<TensorId, RecomputeLevel>,
    ) -> Operand {
        let parts = match &self.stored {
            Stored::Plain(id) => return Operand::layer(*id, 0),
            Stored::Quantised(parts) => parts,
        };
        let name = format!("{prefix}{}.whole", self.name);
        let dims = [self.rows, self.columns];
        let id = builder.transient(&name, &dims, builder.precision, Category::Workspace, layers);
        dropped_from.insert(id, RecomputeLevel::Nothing);
        let whole = Operand::layer(id, 0);
        for &Part { offset, elements, columns, stored, .. } in parts {
            let into = whole.from(Index::fixed(offset as i64));
            ops.push(OpKind::Dequantise { from: stored, into, elements, columns }.into());
        }
        whole
    }
}
