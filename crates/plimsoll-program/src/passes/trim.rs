//! Buffers that files pass through are made before it is known what will: a piece may be quantised elsewhere, or have
//! its home on the host. When a Program is whole, each is cut to the largest piece that it really holds, so that what is
//! planned is what is used.

use crate::program::ProgramSet;
use crate::tensor::{Index, Lifetime};
use plimsoll_core::{Category, Space};

/// Cuts every passing buffer of pieces to what ops touch of it.
pub fn trim(mut set: ProgramSet) -> ProgramSet {
    // What is touched of each tensor; none where it is touched elsewhere than at its beginning.
    let mut used: Vec<Option<u64>> = vec![Some(0); set.tensors.len()];
    for op in set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops) {
        for access in op.accesses(&|id| set.tensor(id).elements()) {
            let at_beginning = access.operand.offset == Index::fixed(0);
            let most = &mut used[access.operand.tensor.0 as usize];
            *most = most.filter(|_| at_beginning).map(|most| most.max(access.elements));
        }
    }
    for (tensor, used) in set.tensors.iter_mut().zip(used) {
        let passes = tensor.category == Category::Staging && tensor.lifetime == Lifetime::Transient;
        match used {
            Some(elements) if passes && tensor.space != Space::File && (1..tensor.elements()).contains(&elements) => {
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
    use crate::program::{Block, Program};
    use crate::tensor::Operand;
    use crate::workspace::Kernels;
    use plimsoll_core::{DType, WorkName};

    #[test]
    fn a_buffer_is_as_large_as_its_largest_piece() {
        let mut builder = Builder::new(DType::F32, Kernels::Cpu { threads: 1 });
        let mut buffer = |name: &str| builder.transient(name, &[100], DType::F32, Category::Staging, 1);
        let (pieces, moved, kept) = (buffer("pieces"), buffer("moved"), buffer("kept"));
        let weight = builder.transient("weight", &[100], DType::F32, Category::Activation, 1);
        let fill = |into: Operand, elements: u64| OpKind::Fill { into, value: 0.0, elements }.into();
        let ops = vec![
            fill(Operand::whole(pieces), 7),
            fill(Operand::whole(pieces), 30),
            fill(Operand::whole(moved).from(Index::fixed(3)), 20),
            fill(Operand::whole(kept), 100),
            fill(Operand::whole(weight), 2),
        ];
        let mut set = builder.set;
        let blocks = vec![Block::once("all", ops)];
        set.programs.push(Program {
            name: "load".into(),
            work: WorkName::Load,
            inputs: vec![],
            outputs: vec![],
            blocks,
        });
        let shapes: Vec<u64> = trim(set).tensors.iter().map(|tensor| tensor.elements()).collect();
        assert_eq!(shapes, [30, 100, 100, 100]);
    }
}
