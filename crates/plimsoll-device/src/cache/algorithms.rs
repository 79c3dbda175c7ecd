//! GEMM algorithms of GPUs, in `algorithms.json`. `cuda::products` chooses them; caching them keeps the bits of later
//! runs the same.

use super::{folder, load, save};
use crate::cuda::gpus::GpuInfo;
use plimsoll_core::GemmAlgorithms;
use std::path::Path;

/// Returns the GEMM algorithms that earlier runs cached for a GPU model. A run that uses them computes the same bits as
/// those runs. None if none are cached.
pub fn gemm_algorithms(gpu: &GpuInfo) -> Option<GemmAlgorithms> {
    load(&folder()?.join(FILE_NAME)).into_iter().find(|entry: &GemmAlgorithms| entry.gpu == gpu.name)
}

/// Caches the GEMM algorithms of a run for its GPU model. The algorithm that was first cached for a matrix product is
/// kept until the version of cuBLASLt or of the driver changes. Untimed algorithms are not cached, because faster ones may
/// exist.
pub fn store_gemm_algorithms(new: &GemmAlgorithms) {
    if let Some(folder) = folder().filter(|_| !new.untimed) {
        store_in(&folder, new);
    }
}

fn store_in(folder: &Path, new: &GemmAlgorithms) {
    let mut entries: Vec<GemmAlgorithms> = load(&folder.join(FILE_NAME));
    match entries.iter_mut().find(|entry| entry.gpu == new.gpu) {
        Some(entry) if entry.is_compatible_with(new) => {
            for (product, algorithm) in &new.chosen {
                entry.chosen.entry(product.clone()).or_insert_with(|| algorithm.clone());
            }
        }
        Some(entry) => entry.clone_from(new),
        None => entries.push(new.clone()),
    }
    save(folder, FILE_NAME, &entries);
}

/// Name of the file in the cache folder that holds the GEMM algorithms.
const FILE_NAME: &str = "algorithms.json";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_algorithms_are_kept_per_library_version() {
        let folder = tempfile::tempdir().unwrap();
        let algorithms = |library, chosen: &[(&str, &str)]| GemmAlgorithms {
            library,
            gpu: "Example".to_owned(),
            driver: 13_000,
            chosen: chosen.iter().map(|(product, which)| ((*product).to_owned(), (*which).to_owned())).collect(),
            untimed: false,
        };
        let kept = || load::<GemmAlgorithms>(&folder.path().join(FILE_NAME));
        store_in(folder.path(), &algorithms(13, &[("a", "1")]));
        store_in(folder.path(), &algorithms(13, &[("a", "2"), ("b", "3")]));
        assert_eq!(kept(), [algorithms(13, &[("a", "1"), ("b", "3")])]);
        store_in(folder.path(), &algorithms(14, &[("a", "4")]));
        assert_eq!(kept(), [algorithms(14, &[("a", "4")])]);
    }
}
