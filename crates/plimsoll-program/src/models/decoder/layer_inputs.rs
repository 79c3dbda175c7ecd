//! The inputs of a layer that may differ between layers: rotary positions, and the first key that each token sees.
//!
//! Layers run as one block of ops, so what differs between them is data. If layers differ, a tensor of integers has a
//! slot for each layer, computed once at the start of a forward pass:
//!
//! - A sliding window moves the first key of a token up, as the start of its document does.
//! - In layers without rotation, all tokens have position 0, whose rotation is none.

use super::Decoder;
use super::forward::Inputs;
use crate::op::{Op, OpKind};
use crate::tensor::{Operand, TensorId};
use plimsoll_core::{Category, DType};

/// A window that no position exceeds.
const UNBOUNDED: u64 = i32::MAX as u64;

/// Operands of integers that a layer reads; the block's variable is the layer.
pub(super) struct LayerInputs {
    /// Position of each token in the rotary table, `[N]`.
    pub positions: Operand,
    /// First key that each token sees, `[N]`; `None` if each sees all keys of the cache up to its own.
    pub first_keys: Option<Operand>,
    /// Ops that compute the operands; empty if both are inputs of the host.
    pub ops: Vec<Op>,
}

impl Decoder<'_> {
    /// Returns what the layers of a forward pass over `rows` tokens read, from the inputs of the host.
    pub(super) fn layer_inputs(&mut self, prefix: &str, rows: u64, inputs: &Inputs) -> LayerInputs {
        let (config, mut ops) = (self.options.config, Vec::new());
        // A window that covers the longest sequence changes nothing.
        let windows: Vec<u64> =
            self.options.layers.clone().map(|layer| config.window_of(layer).unwrap_or(UNBOUNDED)).collect();
        let hides_keys = windows.iter().any(|&window| window < self.table_rows);
        let starts = inputs.document_start.map(Operand::whole);
        let first_keys = if hides_keys {
            Some(self.window_starts(&format!("{prefix}first_keys"), rows, inputs.positions, starts, &windows, &mut ops))
        } else {
            starts
        };
        // A window of one token starts at the position itself.
        let turns: Vec<u64> =
            self.options.layers.clone().map(|layer| if config.rotates(layer) { 1 } else { UNBOUNDED }).collect();
        let positions = if turns.iter().all(|&window| window == 1) {
            Operand::whole(inputs.positions)
        } else {
            self.window_starts(&format!("{prefix}layer_positions"), rows, inputs.positions, None, &turns, &mut ops)
        };
        LayerInputs { positions, first_keys, ops }
    }

    /// Appends ops that compute the window starts for the window of each layer. Returns their operand, which has a slot
    /// per layer if the windows differ.
    fn window_starts(
        &mut self,
        name: &str,
        rows: u64,
        positions: TensorId,
        document_start: Option<Operand>,
        windows: &[u64],
        ops: &mut Vec<Op>,
    ) -> Operand {
        let all_equal = windows.iter().all(|window| *window == windows[0]);
        let slots = if all_equal { 1 } else { windows.len() };
        let id = self.builder.transient(name, &[rows], DType::I32, Category::Activation, slots as u32);
        for (slot, &window) in windows[..slots].iter().enumerate() {
            let (positions, out) = (Operand::whole(positions), Operand::slot(id, slot as i64));
            ops.push(OpKind::WindowStart { positions, document_start, out, rows, window }.into());
        }
        if all_equal { Operand::whole(id) } else { Operand::layer(id, 0) }
    }
}
