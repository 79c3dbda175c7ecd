//! The algorithms of GPUs' products, in `algorithms.json`. They are chosen where products are, and kept here so that the
//! next run has the same bits.

use super::store::{folder, load, save};
use crate::cuda::gpus::Card;
use plimsoll_core::Algorithms;
use std::path::Path;

/// The algorithms of products that were chosen on such a GPU: the same again give the same bits.
pub fn algorithms(card: &Card) -> Option<Algorithms> {
    load(&folder()?.join(ALGORITHMS)).into_iter().find(|known: &Algorithms| known.gpu == card.name)
}

/// Keeps the algorithms of a run's products for the next run. What was chosen first stays, as long as the library does.
pub fn keep_algorithms(new: &Algorithms) {
    if let Some(folder) = folder() {
        keep_algorithms_in(&folder, new);
    }
}

fn keep_algorithms_in(folder: &Path, new: &Algorithms) {
    let mut known: Vec<Algorithms> = load(&folder.join(ALGORITHMS));
    match known.iter_mut().find(|known| known.gpu == new.gpu) {
        Some(known) if known.of_the_same(new) => {
            for (product, algorithm) in &new.chosen {
                known.chosen.entry(product.clone()).or_insert_with(|| algorithm.clone());
            }
        }
        Some(known) => known.clone_from(new),
        None => known.push(new.clone()),
    }
    save(folder, ALGORITHMS, &known);
}

/// Where the algorithms of products are kept.
const ALGORITHMS: &str = "algorithms.json";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_algorithms_that_were_chosen_first_stay_as_long_as_the_library_does() {
        let folder = tempfile::tempdir().unwrap();
        let algorithms = |library, chosen: &[(&str, &str)]| Algorithms {
            library,
            gpu: "Example".to_owned(),
            driver: 13_000,
            chosen: chosen.iter().map(|(product, which)| ((*product).to_owned(), (*which).to_owned())).collect(),
        };
        let kept = || load::<Algorithms>(&folder.path().join(ALGORITHMS));
        keep_algorithms_in(folder.path(), &algorithms(13, &[("a", "1")]));
        keep_algorithms_in(folder.path(), &algorithms(13, &[("a", "2"), ("b", "3")]));
        assert_eq!(kept(), [algorithms(13, &[("a", "1"), ("b", "3")])]);
        keep_algorithms_in(folder.path(), &algorithms(14, &[("a", "4")]));
        assert_eq!(kept(), [algorithms(14, &[("a", "4")])]);
    }
}
