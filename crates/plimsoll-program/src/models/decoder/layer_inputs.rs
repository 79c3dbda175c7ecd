//! The inputs of a layer that may differ between layers: rotary positions, and the first key that each token sees.
//!
//! Layers run as one block of ops, so what differs between them is data. If layers differ, a tensor of integers has a
//! slot for each layer, computed once at the start of a forward pass:
//!
//! - A sliding window moves the first key of a token up, as the start of its document does.
//! - In layers without rotation, all tokens have position 0, whose rotation is none.
//! - In layers with a rotation of their own, positions lie behind those of the other layers in the rotary table.

use super::Decoder;
use super::forward::Inputs;
use crate::op::{Op, OpKind};
use crate::tensor::{Operand, TensorId};
use plimsoll_core::{Category, DType};

/// A shift that moves every position to 0.
const TO_START: i32 = -i32::MAX;

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
        let layers = self.options.layers.clone();
        // A window that covers the longest sequence changes nothing.
        let hides_keys =
            layers.clone().any(|layer| config.window_of(layer).is_some_and(|window| window < self.table_rows));
        let starts = inputs.document_start.map(Operand::whole);
        let first_keys = if hides_keys {
            let to_window = |window: u64| i32::try_from(window).map_or(TO_START, |window| 1 - window);
            let shifts: Vec<i32> =
                layers.clone().map(|layer| config.window_of(layer).map_or(TO_START, to_window)).collect();
            Some(self.shift_positions(
                &format!("{prefix}first_keys"),
                rows,
                inputs.positions,
                starts,
                &shifts,
                &mut ops,
            ))
        } else {
            starts
        };
        let into_table = |number: usize| {
            i32::try_from(number as u64 * self.table_rows).expect("rows of the rotary table are 32-bit numbers")
        };
        let shifts: Vec<i32> = layers.map(|layer| config.rotation_of(layer).map_or(TO_START, into_table)).collect();
        let positions = if shifts.iter().all(|&shift| shift == 0) {
            Operand::whole(inputs.positions)
        } else {
            self.shift_positions(&format!("{prefix}layer_positions"), rows, inputs.positions, None, &shifts, &mut ops)
        };
        LayerInputs { positions, first_keys, ops }
    }

    /// Appends ops that move positions by the shift of each layer. Returns their operand, which has a slot per layer if
    /// the shifts differ.
    fn shift_positions(
        &mut self,
        name: &str,
        rows: u64,
        positions: TensorId,
        document_start: Option<Operand>,
        shifts: &[i32],
        ops: &mut Vec<Op>,
    ) -> Operand {
        let all_equal = shifts.iter().all(|shift| *shift == shifts[0]);
        let slots = if all_equal { 1 } else { shifts.len() };
        let id = self.builder.transient(name, &[rows], DType::I32, Category::Activation, slots as u32);
        for (slot, &shift) in shifts[..slots].iter().enumerate() {
            let (positions, out) = (Operand::whole(positions), Operand::slot(id, slot as i64));
            ops.push(OpKind::ShiftPositions { positions, document_start, out, rows, shift }.into());
        }
        if all_equal { Operand::whole(id) } else { Operand::layer(id, 0) }
    }
}
