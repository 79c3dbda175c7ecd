//! Launches of the optimizer kernels, which update many tensors at once.

use super::*;

/// The most tensors that one launch of an optimizer kernel updates.
pub const TABLE_TENSORS: usize = 56;
/// Elements that one thread block of an optimizer kernel updates.
const UPDATE_CHUNK: u64 = 8192;

/// One tensor of a launch, laid out as `Tensor` in optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct TensorEntry {
    weight: Address,
    gradient: Address,
    first: Address,
    second: Address,
    first_scale: Address,
    second_scale: Address,
    elements: u64,
    decay: f32,
    first_block: u32,
}

/// The tensors of one launch, laid out as `Table` in optimizer.cu. The kernel receives it by value.
#[repr(C)]
#[derive(Clone, Debug, PartialEq)]
pub struct Table([TensorEntry; TABLE_TENSORS]);

/// A weight that an optimizer updates, with its gradient and state. An address that the optimizer does not need is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OptimizerTensor {
    /// Address of the f32 weight.
    pub weight: Address,
    /// Address of the weight's f32 gradient.
    pub gradient: Address,
    /// Address of AdamW's first moment (f32, or 8-bit codes) or of SGD's momentum buffer; 0 without momentum.
    pub first: Address,
    /// Address of AdamW's second moment (f32, or 8-bit codes); 0 for SGD.
    pub second: Address,
    /// Address of the scales of the first moment's 8-bit codes; 0 without codes.
    pub first_scale: Address,
    /// Address of the scales of the second moment's 8-bit codes; 0 without codes.
    pub second_scale: Address,
    /// Number of elements of the weight.
    pub elements: u64,
    /// Weight decay coefficient of this weight.
    pub decay: f64,
}

/// Packs tensors into tables of at most [`TABLE_TENSORS`]. Returns each table with its number of tensors and of thread
/// blocks. A block updates at most `chunk` elements of one tensor.
fn tables(tensors: &[OptimizerTensor], chunk: u64) -> impl Iterator<Item = (Box<Table>, u64, u64)> {
    tensors.chunks(TABLE_TENSORS).map(move |group| {
        let mut table = Box::new(Table([TensorEntry::default(); TABLE_TENSORS]));
        let mut blocks = 0;
        for (entry, tensor) in table.0.iter_mut().zip(group) {
            let OptimizerTensor { weight, gradient, first, second, first_scale, second_scale, elements, decay } =
                *tensor;
            let (decay, first_block) = (decay as f32, u32_of(blocks));
            *entry = TensorEntry {
                weight,
                gradient,
                first,
                second,
                first_scale,
                second_scale,
                elements,
                decay,
                first_block,
            };
            blocks += elements.div_ceil(chunk).max(1);
        }
        (table, group.len() as u64, blocks)
    })
}

/// Returns launches that update all tensors by one AdamW step.
pub fn adamw(tensors: &[OptimizerTensor], scalars: Address, betas: [f64; 2], eps: f64) -> Vec<Launch> {
    adamw_launches("adamw", tensors, scalars, betas, eps)
}

/// Returns launches that update all tensors by one AdamW step with 8-bit moments.
pub fn adamw8(tensors: &[OptimizerTensor], scalars: Address, betas: [f64; 2], eps: f64) -> Vec<Launch> {
    adamw_launches("adamw8", tensors, scalars, betas, eps)
}

fn adamw_launches(
    kernel: &'static str,
    tensors: &[OptimizerTensor],
    scalars: Address,
    betas: [f64; 2],
    eps: f64,
) -> Vec<Launch> {
    let unit = unit(Family::Optimizer, Real::F32);
    let launch_group = |(table, count, blocks)| {
        let mut arguments = vec![Argument::Table(table), at(scalars), n(count), n(UPDATE_CHUNK)];
        arguments.extend([float(1.0 - betas[0]), float(betas[1]), float(1.0 - betas[1]), float(eps)]);
        launch(unit, kernel, blocks, 256, arguments)
    };
    tables(tensors, UPDATE_CHUNK).map(launch_group).collect()
}

/// Returns launches that update all tensors by one step of stochastic gradient descent.
pub fn sgd(tensors: &[OptimizerTensor], scalars: Address, momentum: f64) -> Vec<Launch> {
    let unit = unit(Family::Optimizer, Real::F32);
    let launch_group = |(table, count, blocks)| {
        let arguments = vec![Argument::Table(table), at(scalars), n(count), n(UPDATE_CHUNK), float(momentum)];
        launch(unit, "sgd", blocks, 256, arguments)
    };
    tables(tensors, UPDATE_CHUNK).map(launch_group).collect()
}

/// Returns launches that add Σ x² over f32 tensors, given as (address, elements), to the squared gradient norm in
/// `metrics`. `partials` is the address of a workspace of [`NORM_PARTIALS`] f64 elements.
pub fn squared_norm(tensors: &[(Address, u64)], partials: Address, metrics: Address) -> Vec<Launch> {
    let unit = unit(Family::Optimizer, Real::F32);
    let squared = |&(gradient, elements)| OptimizerTensor { gradient, elements, ..OptimizerTensor::default() };
    let mut launches = Vec::new();
    for group in tensors.chunks(TABLE_TENSORS) {
        // Each tensor may have one partly filled block.
        let total: u64 = group.iter().map(|(_, elements)| elements).sum();
        let full = NORM_PARTIALS - TABLE_TENSORS as u64;
        let chunk = total.div_ceil(full).next_multiple_of(1024).max(16_384);
        let updated: Vec<OptimizerTensor> = group.iter().map(squared).collect();
        for (table, count, blocks) in tables(&updated, chunk) {
            let arguments = vec![Argument::Table(table), at(partials), n(count), Argument::U64(chunk)];
            launches.push(launch(unit, "squared_norm", blocks, 256, arguments));
            let sum = vec![at(partials), at(metrics), n(blocks)];
            launches.push(launch(unit, "squared_norm_sum", 1, 256, sum));
        }
    }
    launches
}

/// Returns the launch that computes the factor by which gradient clipping scales gradients. It reads the squared norm
/// in `metrics`, and writes the factor to `scalars`.
pub fn clip_factor(metrics: Address, scalars: Address) -> [Launch; 1] {
    [launch(unit(Family::Optimizer, Real::F32), "clip_factor", 1, 32, vec![at(metrics), at(scalars)])]
}
