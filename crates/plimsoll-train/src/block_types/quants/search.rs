//! Search for the scales of small groups of values, by weighted least squares.
//!
//! A group is quantized with several trial scales. For the codes of each trial, the best scale is the solution of a
//! linear least-squares problem. The trial with the smallest weighted error wins. Then the scales are rounded to the few
//! bits that a block has for them, and the neighbours of the rounded values are tried as well.
//!
//! Codes are whole numbers in f32, so that the compiler uses vector instructions.

/// Adding and subtracting it rounds a number of small magnitude to the nearest whole number, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// Scale and offset of a group: an element is about scale · code − offset. The offset is not negative.
#[derive(Clone, Copy, Debug, Default)]
pub struct Affine {
    pub scale: f32,
    pub offset: f32,
}

/// Rounds a number to the nearest whole number from `low` to `high`, both of small magnitude.
fn round_within(value: f32, low: f32, high: f32) -> f32 {
    (value.max(low).min(high) + ROUNDER) - ROUNDER
}

/// Returns the sum of a function of each index below N, a multiple of 8. There are 8 partial sums, so that the compiler
/// uses vector instructions.
fn sum<const N: usize>(term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0f32; 8];
    for start in (0..N).step_by(8) {
        for (lane, partial) in lanes.iter_mut().enumerate() {
            *partial += term(start + lane);
        }
    }
    lanes.iter().sum()
}

/// Returns the codes of a group from 0 to `levels`, as bytes.
pub fn affine_codes(values: &[f32; 32], affine: Affine, levels: f32) -> [u8; 32] {
    let inverse = super::invert(affine.scale);
    values.map(|value| round_within((value + affine.offset) * inverse, 0.0, levels) as u8)
}

/// Returns the weight of each element's squared error: large values matter more, and no value is without weight.
pub fn weights<const N: usize>(values: &[f32; N]) -> [f32; N] {
    let mean_square = values.iter().map(|value| value * value).sum::<f32>() / N as f32;
    let deviation = mean_square.sqrt();
    values.map(|value| deviation + value.abs())
}

/// Returns scale and offset of a group for codes from 0 to `levels`, with the smallest weighted error of all trials.
pub fn fit_affine(values: &[f32; 32], weights: &[f32; 32], levels: f32) -> Affine {
    let (low, high) = super::bounds(values);
    let (low, range) = (low.min(0.0), high - low.min(0.0));
    if range <= 0.0 || !range.is_finite() {
        return Affine { scale: 0.0, offset: -low };
    }
    let mut best = Affine { scale: range / levels, offset: -low };
    let mut least = affine_error(values, weights, best, levels);
    let problem = AffineProblem::of(values, weights);
    // More codes than levels cut off the largest values, fewer leave the largest codes unused.
    for trial in -12..=8 {
        let inverse = (levels + 0.1 * trial as f32) / range;
        let codes: [f32; 32] = std::array::from_fn(|i| round_within((values[i] - low) * inverse, 0.0, levels));
        let Some((solved, error)) = problem.solve(weights, &codes) else { continue };
        if error < least {
            (best, least) = (solved, error);
        }
    }
    best
}

/// The part of a least-squares problem that does not depend on the codes. In names, w stands for weights, x for values,
/// and c for codes.
struct AffineProblem {
    /// Sum of the weights.
    w: f32,
    /// Sum of the weighted values.
    wx: f32,
    /// Sum of the weighted squares.
    wxx: f32,
    /// Each weighted value.
    weighted: [f32; 32],
}

impl AffineProblem {
    fn of(values: &[f32; 32], weights: &[f32; 32]) -> AffineProblem {
        let weighted: [f32; 32] = std::array::from_fn(|i| weights[i] * values[i]);
        AffineProblem {
            w: sum::<32>(|i| weights[i]),
            wx: sum::<32>(|i| weighted[i]),
            wxx: sum::<32>(|i| weighted[i] * values[i]),
            weighted,
        }
    }

    /// Returns the best scale and offset for given codes, with their weighted error. The offset is kept from becoming
    /// negative. Returns `None` if all codes are equal.
    fn solve(&self, weights: &[f32; 32], codes: &[f32; 32]) -> Option<(Affine, f32)> {
        let AffineProblem { w, wx, wxx, weighted } = self;
        let wc = sum::<32>(|i| weights[i] * codes[i]);
        let wcc = sum::<32>(|i| weights[i] * codes[i] * codes[i]);
        let wcx = sum::<32>(|i| weighted[i] * codes[i]);
        let determinant = w * wcc - wc * wc;
        if determinant <= 0.0 {
            return None;
        }
        let scale = (w * wcx - wx * wc) / determinant;
        let offset = (wc * wcx - wcc * wx) / determinant;
        if offset >= 0.0 {
            return Some((Affine { scale, offset }, wxx - scale * wcx + offset * wx));
        }
        let scale = wcx / wcc;
        Some((Affine { scale, offset: 0.0 }, wxx - scale * wcx))
    }
}

/// Returns the weighted error of a group with the best codes for this scale and offset.
pub fn affine_error(values: &[f32; 32], weights: &[f32; 32], affine: Affine, levels: f32) -> f32 {
    let inverse = super::invert(affine.scale);
    sum::<32>(|i| {
        let code = round_within((values[i] + affine.offset) * inverse, 0.0, levels);
        let distance = affine.scale * code - affine.offset - values[i];
        weights[i] * distance * distance
    })
}

/// Lowest code of a group with a scale alone.
const SIGNED_LOW: f32 = -32.0;
/// Highest code of a group with a scale alone.
const SIGNED_HIGH: f32 = 31.0;

/// Returns the codes of a group with a scale alone, from 0 to 63: 32 more than the factor of the scale.
pub fn scaled_codes(values: &[f32; 16], scale: f32) -> [u8; 16] {
    let inverse = super::invert(scale);
    values.map(|value| (round_within(value * inverse, SIGNED_LOW, SIGNED_HIGH) - SIGNED_LOW) as u8)
}

/// Returns the scale of a group for factors from −32 to 31, with the smallest weighted error of all trials.
pub fn fit_scale(values: &[f32; 16], weights: &[f32; 16]) -> f32 {
    let extreme = super::extreme(values);
    if extreme == 0.0 || !extreme.is_finite() {
        return 0.0;
    }
    let mut best = extreme / SIGNED_LOW;
    let mut least = scale_error(values, weights, best);
    let wxx = sum::<16>(|i| weights[i] * values[i] * values[i]);
    for trial in -10..=10 {
        let inverse = (SIGNED_LOW + 0.15 * trial as f32) / extreme;
        let codes: [f32; 16] = std::array::from_fn(|i| round_within(values[i] * inverse, SIGNED_LOW, SIGNED_HIGH));
        let wcc = sum::<16>(|i| weights[i] * codes[i] * codes[i]);
        let wcx = sum::<16>(|i| weights[i] * codes[i] * values[i]);
        if wcc <= 0.0 {
            continue;
        }
        let scale = wcx / wcc;
        let error = wxx - scale * wcx;
        if error < least {
            (best, least) = (scale, error);
        }
    }
    best
}

/// Returns the weighted error of a group with the best codes for this scale.
pub fn scale_error(values: &[f32; 16], weights: &[f32; 16], scale: f32) -> f32 {
    let inverse = super::invert(scale);
    sum::<16>(|i| {
        let distance = scale * round_within(values[i] * inverse, SIGNED_LOW, SIGNED_HIGH) - values[i];
        weights[i] * distance * distance
    })
}
