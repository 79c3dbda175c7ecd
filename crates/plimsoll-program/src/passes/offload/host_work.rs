//! Ops that the host runs on host tensors, with copies of the few device tensors that they need. They use no staging
//! ring, but pending copies of the same regions must end first.

use super::ProgramRewriter;
use super::work_units::Region;
use crate::op::operands::operands_mut;
use crate::op::{Access, Mode, Queue};
use crate::program::Block;
use crate::tensor::{Operand, TensorId};
use plimsoll_core::Space;

impl ProgramRewriter<'_, '_> {
    /// Appends the blocks of a work unit (ops that run together) that the host runs, with copies of the device tensors
    /// that it reads or writes.
    pub(super) fn rewrite_host_unit(&mut self, name: &str, blocks: Vec<Block>) {
        if blocks[0].repeat > 1 {
            self.evict_all();
            self.flush(name, 0);
            self.blocks.extend(blocks);
            return;
        }
        for mut op in blocks.into_iter().flat_map(|block| block.ops) {
            let accesses = self.offloader.accesses(&op);
            let on_host = |access: &&Access| self.offloader.space(access.operand) == Space::Host;
            let touched: Vec<(Region, Mode)> =
                accesses.iter().filter(on_host).map(|a| (Region::of(a.operand, a.elements), a.mode)).collect();
            for (region, mode) in touched {
                self.release_region(region, mode);
            }
            let on_device: Vec<Access> =
                accesses.into_iter().filter(|access| self.offloader.space(access.operand) == Space::Device).collect();
            let mut written = Vec::new();
            for access in &on_device {
                let copy = self.host_copy_of(access);
                for operand in operands_mut(&mut op.kind).into_iter().filter(|operand| **operand == access.operand) {
                    *operand = Operand::whole(copy);
                }
                if access.mode != Mode::Read {
                    written.push((copy, *access));
                }
            }
            self.ops.push(op);
            for (copy, access) in written {
                self.copy(Operand::whole(copy), access.operand, access.elements, Queue::CopyIn);
            }
        }
    }

    /// Returns the buffer in host memory for the range of a device tensor that `access` touches. If the access reads,
    /// the range is copied into the buffer first, unless the buffer is up to date.
    fn host_copy_of(&mut self, access: &Access) -> TensorId {
        let region = Region::of(access.operand, access.elements);
        if let Some(&copy) = self.host_copies.get(&region) {
            return copy;
        }
        let tensor = &self.offloader.set.tensor(region.tensor).name;
        let name = format!("{}.copy.{tensor}.{}", self.program, region.slot.base);
        let copy = match self.offloader.set.find(&name) {
            Some(copy) => copy,
            None => self.offloader.add_buffer(name, region.tensor, region.elements, Space::Host, 1),
        };
        if access.mode != Mode::Write {
            self.copy(access.operand, Operand::whole(copy), region.elements, Queue::CopyOut);
            self.host_copies.insert(region, copy);
        }
        copy
    }

    /// Appends a copy and the wait for it.
    fn copy(&mut self, from: Operand, to: Operand, elements: u64, queue: Queue) {
        self.sequence += 1;
        self.start_copy(from, to, elements, self.sequence, queue);
        self.wait_for_copy(from, to, elements, self.sequence, queue);
    }
}
