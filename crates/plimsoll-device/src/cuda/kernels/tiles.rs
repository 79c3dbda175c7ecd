//! Tile sizes of the attention kernels for tensor cores: how many rows of keys or queries a block holds in shared
//! memory at once. The source gets them as macros and launches as bytes of shared memory, so the two always agree.

use crate::cuda::architecture::Architecture;

/// The GPU and the compiler for which kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Compute capability of the GPU.
    pub architecture: Architecture,
    /// Version of NVRTC: 1302 for 13.2.
    pub compiler: u32,
}

/// Rows of the tiles in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tiles {
    /// Keys that the forward kernel visits at once.
    pub keys: u64,
    /// Keys of a cache that the forward kernel visits at once.
    pub cached_keys: u64,
    /// Queries that the gradient of keys and values visits at once.
    pub met_queries: u64,
}

impl Tiles {
    /// Returns the tile sizes for heads of `head_dim` elements.
    ///
    /// The scores of 64 keys need too many registers beside the sums of heads above 64. Heads of 128 are an exception,
    /// except on compute capability 12.x and with compilers before CUDA 13.2, which then spill registers. Over a cache,
    /// they are an exception on 8.x only, where the kernel spills with 32 keys. Multiprocessors with 100 KiB of shared
    /// memory hold two blocks of the gradient only if these visit 16 queries at once; for some heads two blocks fit with
    /// 32, or not even with 16.
    pub fn new(head_dim: u64, target: Target) -> Tiles {
        let Architecture { major, minor } = target.architecture;
        let few_registers = major >= 12 || target.compiler < 1302;
        let little_shared_memory = major >= 12 || (major, minor) == (8, 6) || (major, minor) == (8, 9);
        Tiles {
            keys: if head_dim <= 64 || head_dim == 128 && !few_registers { 64 } else { 32 },
            cached_keys: if head_dim <= 64 || head_dim == 128 && major == 8 && !few_registers { 64 } else { 32 },
            met_queries: if little_shared_memory && matches!(head_dim, 64 | 96 | 112) { 16 } else { 32 },
        }
    }

    /// Returns the macros that the source of the kernels reads.
    pub(super) fn defines(self) -> String {
        let Tiles { keys, cached_keys, met_queries } = self;
        format!(
            "#define TILE_KEYS {keys}\n#define TILE_CACHED_KEYS {cached_keys}\n#define TILE_MET_QUERIES {met_queries}\n"
        )
    }
}
