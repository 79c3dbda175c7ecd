//! Addresses of the pieces of a collective. Both ways to carry out a collective take them: [`super::nccl`] and
//! [`super::collectives`].

use super::driver::Address;
use plimsoll_core::DType;

/// Addresses of one piece of a collective in device memory.
#[derive(Clone, Copy, Debug)]
pub struct PieceAddresses {
    /// First byte of the input.
    pub input: Address,
    /// First byte of the output.
    pub output: Address,
    /// Data type of input and output.
    pub dtype: DType,
}
