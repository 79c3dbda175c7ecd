//! What GPUs hold outside the arena, in `charges.json`: the most that a run has seen. It is measured where a GPU is
//! opened.

use super::store::{folder, load, save};
use crate::cuda::gpus::{Card, Here};
use plimsoll_core::Bytes;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// What was held outside the arena on such a GPU with these libraries, where a run has measured it.
pub fn charges(here: &Here, card: &Card) -> Option<Bytes> {
    let (key, known) = (ChargesKey::of(here, card), load::<KnownCharges>(&folder()?.join(CHARGES)));
    known.into_iter().find(|known| known.key == key).map(|known| known.bytes)
}

/// Keeps what a run has measured. Runs differ in the kernels that they load: the most that was seen is what the next
/// one is planned with.
pub fn keep_charges(here: &Here, card: &Card, bytes: Bytes) {
    let Some(folder) = folder() else { return };
    keep_charges_in(&folder, ChargesKey::of(here, card), bytes);
}

fn keep_charges_in(folder: &Path, key: ChargesKey, bytes: Bytes) {
    let mut known: Vec<KnownCharges> = load(&folder.join(CHARGES));
    match known.iter_mut().find(|known| known.key == key) {
        Some(known) if known.bytes >= bytes => return,
        Some(known) => known.bytes = bytes,
        None => known.push(KnownCharges { key, bytes }),
    }
    save(folder, CHARGES, &known);
}

/// Where charges are kept.
const CHARGES: &str = "charges.json";

/// What charges hold for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ChargesKey {
    plimsoll: String,
    gpu: String,
    driver: String,
    cublaslt: String,
}

impl ChargesKey {
    fn of(here: &Here, card: &Card) -> ChargesKey {
        ChargesKey {
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            gpu: card.name.clone(),
            driver: here.driver_version.clone(),
            cublaslt: here.cublaslt().map(|found| found.version.clone()).unwrap_or_default(),
        }
    }
}

/// An entry of the charges.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KnownCharges {
    #[serde(flatten)]
    key: ChargesKey,
    bytes: Bytes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_charges_the_most_that_a_run_saw_is_kept_for_each_gpu_and_driver() {
        let folder = tempfile::tempdir().unwrap();
        let key = |driver: &str| ChargesKey {
            plimsoll: "0.1.0".to_owned(),
            gpu: "Example".to_owned(),
            driver: driver.to_owned(),
            cublaslt: "13.1".to_owned(),
        };
        let known = |driver: &str| {
            let known: Vec<KnownCharges> = load(&folder.path().join(CHARGES));
            known.into_iter().find(|known| known.key == key(driver)).map(|known| known.bytes)
        };
        keep_charges_in(folder.path(), key("550"), Bytes::mib(400));
        keep_charges_in(folder.path(), key("550"), Bytes::mib(480));
        keep_charges_in(folder.path(), key("550"), Bytes::mib(440));
        assert_eq!((known("550"), known("580")), (Some(Bytes::mib(480)), None));
        keep_charges_in(folder.path(), key("580"), Bytes::mib(300));
        assert_eq!((known("550"), known("580")), (Some(Bytes::mib(480)), Some(Bytes::mib(300))));
    }
}
