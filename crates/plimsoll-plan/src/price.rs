//! What ops cost in time: a roofline of measured rates.
//!
//! An op takes a fixed price, plus its products at the product rate, plus the larger of its other
//! arithmetic and its memory traffic. Rates come from `plimsoll bench devices` (or a data sheet).

use plimsoll_core::{DType, Rates};
use plimsoll_program::{Call, Op, ProgramSet, TensorId};

/// Other arithmetic runs at this part of the product rate: vector units, no reuse of registers.
const OTHER_RATE: f64 = 0.1;

/// Predicted seconds of one op.
pub fn op_seconds(set: &ProgramSet, op: &Op, rates: &Rates, precision: DType) -> f64 {
    let cost = op.cost();
    let product_rate = match precision {
        DType::Bf16 => rates.bf16_flops,
        DType::F64 => rates.f32_flops / 2.0,
        _ => rates.f32_flops,
    };
    let elements_of = |id: TensorId| set.tensor(id).elements();
    let dtype_of = |id: TensorId| set.tensor(id).dtype;
    let moved = op.bytes_moved(&elements_of, &dtype_of) as f64 / rates.memory_bytes_per_second;
    let other = cost.other_flops / (rates.f32_flops * OTHER_RATE);
    let product = cost.product_flops / product_rate;
    rates.op_seconds + if product > 0.0 { product.max(moved) + other } else { moved.max(other) }
}

/// Predicted seconds of one call of a Program.
pub fn program_seconds(set: &ProgramSet, name: &str, rates: &Rates, precision: DType) -> f64 {
    set.program(name).map_or(0.0, |program| {
        program
            .blocks
            .iter()
            .map(|block| {
                let once: f64 = block.ops.iter().map(|op| op_seconds(set, op, rates, precision)).sum();
                once * f64::from(block.repeat)
            })
            .sum()
    })
}

/// Predicted seconds of a Schedule.
pub fn schedule_seconds(set: &ProgramSet, calls: &[Call], rates: &Rates, precision: DType) -> f64 {
    let mut known = std::collections::HashMap::new();
    calls
        .iter()
        .map(|call| *known.entry(&call.program).or_insert_with(|| program_seconds(set, &call.program, rates, precision)))
        .sum()
}

/// Operations in the matrix products of one micro-batch's forward and backward pass, recompute
/// left out: what the step must do. Its share of the measured peak is the distance to the limit.
pub fn needed_product_flops(set: &ProgramSet) -> f64 {
    let forward_once = |name: &str| -> f64 {
        set.program(name).map_or(0.0, |program| {
            program
                .blocks
                .iter()
                .map(|b| b.ops.iter().map(|op| op.cost().product_flops).sum::<f64>() * f64::from(b.repeat))
                .sum()
        })
    };
    let again = |name: &str| -> f64 {
        set.program(name).map_or(0.0, |program| {
            program
                .blocks
                .iter()
                .map(|b| {
                    let repeated = |op: &&Op| {
                        let elements_of = |id: TensorId| set.tensor(id).elements();
                        op.accesses(&elements_of).iter().any(|a| {
                            a.mode == plimsoll_program::Mode::Write
                                && set.tensor(a.operand.tensor).name.ends_with(".again")
                        })
                    };
                    b.ops.iter().filter(repeated).map(|op| op.cost().product_flops).sum::<f64>() * f64::from(b.repeat)
                })
                .sum()
        })
    };
    forward_once("forward") + forward_once("backward") - again("backward")
}
