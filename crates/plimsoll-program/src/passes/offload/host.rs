//! What the host does where the tensors are: ops on homes, and copies of the little that it shares with the device. It
//! needs no rings, but what they still have to do with the same regions comes first.

use super::Rewrite;
use super::units::{Region, Unit};
use crate::op::{Access, Mode, Queue};
use crate::operands::operands_mut;
use crate::tensor::{Operand, TensorId};
use plimsoll_core::Space;

impl Rewrite<'_> {
    /// What the host does is done at home; the little that it shares with the device is copied for it.
    pub(super) fn by_host(&mut self, unit: &Unit) {
        if unit.blocks[0].repeat > 1 {
            self.await_all();
            self.flush(&unit.name);
            self.blocks.extend(unit.blocks.iter().cloned());
            return;
        }
        for op in unit.ops() {
            let mut op = op.clone();
            let accesses = self.pass.accesses(&op);
            let at_home = |access: &&Access| self.pass.space(access.operand) == Space::Host;
            let touched: Vec<(Region, Mode)> =
                accesses.iter().filter(at_home).map(|a| (Region::of(a.operand, a.elements), a.mode)).collect();
            for (region, mode) in touched {
                self.make_way_for(region, mode);
            }
            let mut back = Vec::new();
            let on_device: Vec<Access> =
                accesses.into_iter().filter(|access| self.pass.space(access.operand) == Space::Device).collect();
            for access in &on_device {
                let copy = self.copy_for_host(access);
                for operand in operands_mut(&mut op.kind).into_iter().filter(|operand| **operand == access.operand) {
                    *operand = Operand::whole(copy);
                }
                if access.mode != Mode::Read {
                    back.push((copy, *access));
                }
            }
            self.ops.push(op);
            for (copy, access) in back {
                self.copied(Operand::whole(copy), access.operand, access.elements, Queue::CopyIn);
            }
        }
    }

    /// The host's copy of what is on the device, fresh where the host reads it.
    fn copy_for_host(&mut self, access: &Access) -> TensorId {
        let region = Region::of(access.operand, access.elements);
        if let Some(&copy) = self.copies.get(&region) {
            return copy;
        }
        let name = format!("{}.copy.{}.{}", self.program, self.pass.set.tensor(region.tensor).name, region.slot.base);
        let copy = match self.pass.set.find(&name) {
            Some(copy) => copy,
            None => self.pass.buffer(name, region.tensor, region.elements, Space::Host, 1),
        };
        if access.mode != Mode::Write {
            self.copied(access.operand, Operand::whole(copy), region.elements, Queue::CopyOut);
            self.copies.insert(region, copy);
        }
        copy
    }

    fn copied(&mut self, from: Operand, to: Operand, elements: u64, queue: Queue) {
        self.sequence += 1;
        self.transfer(true, from, to, elements, self.sequence, queue);
        self.transfer(false, from, to, elements, self.sequence, queue);
    }
}
