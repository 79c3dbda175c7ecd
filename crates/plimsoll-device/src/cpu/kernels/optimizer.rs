//! Optimizer updates and the gradient norm for clipping, in the wide type of master weights, gradients and optimizer state.

use super::quantized::{encode_by_codebook, from_codebook};
use super::simd::{Encoder, Float, get, put, strips, vectorized};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_core::DType;
use plimsoll_program::formats::{self, STATE_BLOCK};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 16384;
/// Largest number of portions in which a sum of squares is computed. It does not depend on the number of threads, so
/// neither does the sum.
const PORTIONS: usize = 256;
/// Number of squares that are summed in their own type before they are added to a sum in f64.
const CHUNK_ELEMENTS: usize = 2048;

/// Returns Σ x² over all elements. It is NaN or infinite if an element is.
pub fn squared_norm<T: Float>(pool: &Pool, x: &[T]) -> f64 {
    let each = x.len().div_ceil(PORTIONS).next_multiple_of(CHUNK_ELEMENTS).max(MIN_TASK_ELEMENTS);
    let portions = x.len().div_ceil(each);
    let mut sums = [0.0f64; PORTIONS];
    let shared = Shared::new(&mut sums);
    pool.run(portions, |portion, _| {
        let part = &x[portion * each..x.len().min((portion + 1) * each)];
        // SAFETY: portions have disjoint sums.
        let sum = unsafe { shared.part(portion..portion + 1) };
        sum[0] = part.chunks(CHUNK_ELEMENTS).map(|run| squares(run).to_f64()).sum();
    });
    sums[..portions].iter().sum()
}

vectorized! {
    fn squares<T: Float, V>(x: &[T]) -> T {
        let mut sums = [V::splat(T::ZERO); 4];
        let mut turn = 0;
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value: V = get(x, at, count);
            sums[turn % 4] = value.mul_add(value, sums[turn % 4]);
            turn += 1;
        });
        ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum()
    }
}

/// Hyperparameters of one AdamW step.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<T> {
    /// Learning rate of this step.
    pub rate: T,
    /// β₁ and β₂.
    pub betas: [f64; 2],
    /// Term added to the root of the corrected second moment.
    pub eps: T,
    /// Decoupled weight decay.
    pub decay: T,
    /// 1 − β₁ᵗ and 1 − β₂ᵗ in step t.
    pub bias_corrections: [T; 2],
    /// Factor of all gradients, from clipping by their global norm; 1 without clipping.
    pub clip: T,
}

/// Computes one step of AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; the order of operations
/// of PyTorch): w −= rate · decay · w; then w −= rate / c₁ · m / (√v / √c₂ + eps). m (`first`) and v (`second`) are the
/// moving averages of g and g², and c₁ and c₂ the bias corrections.
pub fn adamw<T: Float>(
    pool: &Pool,
    step: AdamW<T>,
    weight: &mut [T],
    gradient: &[T],
    first: &mut [T],
    second: &mut [T],
) {
    let n = gradient.len();
    assert!(weight.len() == n && first.len() == n && second.len() == n);
    let (weight, first, second) = (Shared::new(weight), Shared::new(first), Shared::new(second));
    pool.split(n, MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        let (w, m, v) = unsafe { (weight.part(range.clone()), first.part(range.clone()), second.part(range.clone())) };
        adamw_part(step, w, &gradient[range], m, v);
    });
}

vectorized! {
    fn adamw_part<T: Float, V>(step: AdamW<T>, weight: &mut [T], gradient: &[T], first: &mut [T], second: &mut [T]) {
        let keep = V::splat(T::ONE - step.rate * step.decay);
        let clip = V::splat(step.clip);
        let mix_first = V::splat(T::from_f64(1.0 - step.betas[0]));
        let (keep_second, mix_second) = (V::splat(T::from_f64(step.betas[1])), V::splat(T::from_f64(1.0 - step.betas[1])));
        let minus_rate = V::splat(-(step.rate / step.bias_corrections[0]));
        let root = V::splat(T::ONE / step.bias_corrections[1].sqrt());
        let eps = V::splat(step.eps);
        strips::<T, V>(gradient.len(), #[inline(always)] |at, count| {
            let g = get::<T, V>(gradient, at, count) * clip;
            let m: V = get(first, at, count);
            let m = (g - m).mul_add(mix_first, m);
            let v = (g * g).mul_add(mix_second, get::<T, V>(second, at, count) * keep_second);
            let w = get::<T, V>(weight, at, count) * keep;
            put(weight, at, count, (m / v.sqrt().mul_add(root, eps)).mul_add(minus_rate, w));
            put(first, at, count, m);
            put(second, at, count, v);
        });
    }
}

/// AdamW moments of one byte each, in blocks of 256 elements with a scale (`plimsoll_program::formats`).
#[derive(Debug)]
pub struct State8<'a> {
    /// Codes of the first moments.
    pub first: &'a mut [u8],
    /// Scales of the first moments, one per block.
    pub first_scale: &'a mut [f32],
    /// Codes of the second moments.
    pub second: &'a mut [u8],
    /// Scales of the second moments, one per block.
    pub second_scale: &'a mut [f32],
}

/// Computes one step of AdamW with 8-bit moments, which are dequantized and quantized again block by block.
pub fn adamw8<T: Float>(pool: &Pool, step: AdamW<T>, weight: &mut [T], gradient: &[T], state: State8) {
    const BLOCK: usize = STATE_BLOCK as usize;
    let (n, blocks) = (gradient.len(), gradient.len().div_ceil(BLOCK));
    assert!(weight.len() == n && state.first.len() == n && state.second.len() == n);
    assert!(state.first_scale.len() == blocks && state.second_scale.len() == blocks);
    let (signed, unsigned) = (formats::dynamic_map(true), formats::dynamic_map(false));
    let (to_signed, to_unsigned) = (Encoder::shared(true), Encoder::shared(false));
    let (weight, first, second) = (Shared::new(weight), Shared::new(state.first), Shared::new(state.second));
    let (first_scale, second_scale) = (Shared::new(state.first_scale), Shared::new(state.second_scale));
    pool.split(blocks, MIN_TASK_ELEMENTS / BLOCK, |range, _| {
        for block in range {
            let part = block * BLOCK..n.min((block + 1) * BLOCK);
            let count = part.len();
            // SAFETY: blocks of one split are disjoint.
            let (w, first, second, first_scale, second_scale) = unsafe {
                (
                    weight.part(part.clone()),
                    first.part(part.clone()),
                    second.part(part.clone()),
                    first_scale.part(block..block + 1),
                    second_scale.part(block..block + 1),
                )
            };
            let (mut m, mut v) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
            let (m, v) = (&mut m[..count], &mut v[..count]);
            from_codebook(signed, first, first_scale[0], m);
            from_codebook(unsigned, second, second_scale[0], v);
            match (bytemuck::try_cast_slice_mut(m), bytemuck::try_cast_slice_mut(v)) {
                (Ok(m), Ok(v)) if T::DTYPE == DType::F32 => adamw_part(step, w, &gradient[part], m, v),
                _ => {
                    let mut wide = [[T::ZERO; BLOCK]; 2];
                    let [wide_m, wide_v] = &mut wide;
                    wide_m.iter_mut().zip(&*m).for_each(|(to, x)| *to = T::from_f64(f64::from(*x)));
                    wide_v.iter_mut().zip(&*v).for_each(|(to, x)| *to = T::from_f64(f64::from(*x)));
                    adamw_part(step, w, &gradient[part], &mut wide_m[..count], &mut wide_v[..count]);
                    m.iter_mut().zip(wide_m).for_each(|(to, x)| *to = x.to_f64() as f32);
                    v.iter_mut().zip(wide_v).for_each(|(to, x)| *to = x.to_f64() as f32);
                }
            }
            first_scale[0] = encode_by_codebook(to_signed, m, first);
            second_scale[0] = encode_by_codebook(to_unsigned, v, second);
        }
    });
}

/// Hyperparameters of one step of stochastic gradient descent.
#[derive(Clone, Copy, Debug)]
pub struct Sgd<T> {
    /// Learning rate of this step.
    pub rate: T,
    /// Momentum; used only with a momentum buffer.
    pub momentum: T,
    /// Weight decay: the gradient gets decay · w in addition.
    pub decay: T,
    /// Factor of all gradients, from clipping by their global norm; 1 without clipping.
    pub clip: T,
}

/// Computes one step of gradient descent as in PyTorch: g += decay · w; buffer = momentum · buffer + g; w −= rate ·
/// buffer. The caller sets the buffer to zero before the first step. Without a buffer (`None`) there is no momentum: w
/// −= rate · g.
pub fn sgd<T: Float>(pool: &Pool, step: Sgd<T>, weight: &mut [T], gradient: &[T], buffer: Option<&mut [T]>) {
    let n = gradient.len();
    assert!(weight.len() == n && buffer.as_ref().is_none_or(|buffer| buffer.len() == n));
    let (weight, buffer) = (Shared::new(weight), buffer.map(Shared::new));
    pool.split(n, MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        let weight = unsafe { weight.part(range.clone()) };
        match &buffer {
            // SAFETY: ranges of one split are disjoint.
            Some(buffer) => momentum_part(step, weight, &gradient[range.clone()], unsafe { buffer.part(range) }),
            None => sgd_part(step, weight, &gradient[range]),
        }
    });
}

vectorized! {
    fn sgd_part<T: Float, V>(step: Sgd<T>, weight: &mut [T], gradient: &[T]) {
        let (clip, decay, minus_rate) = (V::splat(step.clip), V::splat(step.decay), V::splat(-step.rate));
        strips::<T, V>(gradient.len(), #[inline(always)] |at, count| {
            let w: V = get(weight, at, count);
            let g = w.mul_add(decay, get::<T, V>(gradient, at, count) * clip);
            put(weight, at, count, g.mul_add(minus_rate, w));
        });
    }
}

vectorized! {
    fn momentum_part<T: Float, V>(step: Sgd<T>, weight: &mut [T], gradient: &[T], buffer: &mut [T]) {
        let (clip, decay, minus_rate) = (V::splat(step.clip), V::splat(step.decay), V::splat(-step.rate));
        let momentum = V::splat(step.momentum);
        strips::<T, V>(gradient.len(), #[inline(always)] |at, count| {
            let w: V = get(weight, at, count);
            let g = w.mul_add(decay, get::<T, V>(gradient, at, count) * clip);
            let g = get::<T, V>(buffer, at, count).mul_add(momentum, g);
            put(buffer, at, count, g);
            put(weight, at, count, g.mul_add(minus_rate, w));
        });
    }
}
