//! Trimming of staging buffers. The decoder sizes the buffers for files before the other passes run: a piece may then
//! turn out to be offloaded or quantized elsewhere. This last pass shrinks each buffer to the largest piece that passes
//! through it, so that planned bytes equal used bytes.

use crate::program::ProgramSet;
use crate::tensor::{Index, Lifetime};
use plimsoll_core::{Category, Space};

/// Shrinks every staging buffer to the largest piece that passes through it. Buffers that an op touches from another
/// element than the first keep their size, and so do buffers that no op uses.
pub fn trim_staging_buffers(mut set: ProgramSet) -> ProgramSet {
    // Elements that ops touch of each tensor; `None` if an op does not start at the first element.
    let mut used: Vec<Option<u64>> = vec![Some(0); set.tensors.len()];
    for op in set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops) {
        for access in op.accesses(&|id| set.tensor(id).elements()) {
            let starts_at_zero = access.operand.offset == Index::fixed(0);
            let largest = &mut used[access.operand.tensor.0 as usize];
            *largest = largest.filter(|_| starts_at_zero).map(|largest| largest.max(access.elements));
        }
    }
    for (tensor, used) in set.tensors.iter_mut().zip(used) {
        let is_staging = tensor.category == Category::Staging && tensor.lifetime == Lifetime::Transient;
        match used {
            Some(elements)
                if is_staging && tensor.space != Space::File && (1..tensor.elements()).contains(&elements) =>
            {
                tensor.shape = vec![elements];
            }
            _ => {}
        }
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::Builder;
    use crate::op::OpKind;
    use crate::program::{Block, Program, ProgramKind};
    use crate::tensor::Operand;
    use crate::workspace::Kernels;
    use plimsoll_core::{DType, WorkKind};

    #[test]
    fn staging_buffer_shrinks_to_its_largest_piece() {
        let mut builder = Builder::new(DType::F32, Kernels::Cpu { threads: 1 });
        let mut buffer = |name: &str| builder.transient(name, &[100], DType::F32, Category::Staging, 1);
        let (pieces, moved, kept) = (buffer("pieces"), buffer("moved"), buffer("kept"));
        let weight = builder.transient("weight", &[100], DType::F32, Category::Activation, 1);
        let fill = |into: Operand, elements: u64| OpKind::Fill { into, value: 0.0, elements }.into();
        let ops = vec![
            fill(Operand::whole(pieces), 7),
            fill(Operand::whole(pieces), 30),
            fill(Operand::whole(moved).starting_at(Index::fixed(3)), 20),
            fill(Operand::whole(kept), 100),
            fill(Operand::whole(weight), 2),
        ];
        let mut set = builder.set;
        let blocks = vec![Block::once("all", ops)];
        set.programs.push(Program {
            kind: ProgramKind::Load,
            work: WorkKind::Load,
            inputs: vec![],
            outputs: vec![],
            blocks,
        });
        let shapes: Vec<u64> = trim_staging_buffers(set).tensors.iter().map(|tensor| tensor.elements()).collect();
        assert_eq!(shapes, [30, 100, 100, 100]);
    }
}
