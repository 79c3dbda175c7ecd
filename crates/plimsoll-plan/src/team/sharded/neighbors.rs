//! The neighbors of a sharded team: other sizes of shards. They are searched for recipes after the fastest sketch,
//! because the estimated times of sketches with offload are inexact.

use super::{Sharded, Sketch};
use crate::search::RecipeGoal;
use crate::team::candidate::TeamCandidate;
use plimsoll_core::DeviceSpec;
use std::collections::HashSet;

/// Most neighbors of the fastest team, and of the faster ones found, that are searched for recipes.
const MAX_NEIGHBORS: usize = 12;
/// The numbers of parts that move between shards for a neighbor.
const MOVED_PARTS: [u64; 2] = [8, 32];

impl Sharded<'_, '_> {
    /// Moves parts of shards between ranks that differ in a team that offloads, as long as that makes it faster. The
    /// estimated times of ranks that offload are inexact, so that the fastest sketch need not be the fastest team.
    pub(super) fn improve(&self, devices: &[usize], mut sketch: Sketch, mut best: TeamCandidate) -> TeamCandidate {
        let offloads = best.workers.iter().any(|worker| worker.host_bytes > 0);
        if !offloads || self.goal == RecipeGoal::LeastMemory || self.fixed_shards().is_some() {
            return best;
        }
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec_in_team(device, devices)).collect();
        let mut tried = HashSet::from([sketch.shards.clone()]);
        while let Some(neighbor) =
            self.neighbors(&sketch, &best).into_iter().find(|neighbor| !tried.contains(&neighbor.shards))
        {
            if tried.len() > MAX_NEIGHBORS {
                break;
            }
            tried.insert(neighbor.shards.clone());
            let found = self.rank_recipes(devices, &specs, &neighbor, best.seconds).ok();
            if let Some(faster) = found.filter(|found| found.seconds < best.seconds) {
                (sketch, best) = (neighbor, faster);
            }
        }
        best
    }

    /// Returns sketches in which ranks of one class have smaller shards and those of another larger ones. Identical ranks
    /// are of one class. `candidate` has the recipes of `sketch`.
    fn neighbors(&self, sketch: &Sketch, candidate: &TeamCandidate) -> Vec<Sketch> {
        let representative = self.representatives(&candidate.workers, &sketch.shards);
        let ranks = 0..representative.len();
        let members =
            |class: usize| -> Vec<usize> { ranks.clone().filter(|&rank| representative[rank] == class).collect() };
        let classes: Vec<Vec<usize>> = ranks.clone().map(members).filter(|class| !class.is_empty()).collect();
        let resized = |(from, to, parts): (&Vec<usize>, &Vec<usize>, u64)| {
            let shards = move_parts(&sketch.shards, from, to, parts)?;
            Some(Sketch { shards, ..sketch.clone() })
        };
        let pairs = classes.iter().flat_map(|from| classes.iter().map(move |to| (from, to)));
        let moves =
            pairs.filter(|(from, to)| from != to).flat_map(|(from, to)| MOVED_PARTS.map(|parts| (from, to, parts)));
        moves.filter_map(resized).collect()
    }
}

/// Moves about `parts` parts from the shards of the ranks `from` to those of the ranks `to`, the same number from and to
/// each. Returns `None` if a rank has too few.
fn move_parts(shards: &[u64], from: &[usize], to: &[usize], parts: u64) -> Option<Vec<u64>> {
    let (givers, takers) = (from.len() as u64, to.len() as u64);
    let rounds = (parts / (givers * takers)).max(1);
    let mut moved = shards.to_vec();
    for &rank in from {
        moved[rank] = moved[rank].checked_sub(rounds * takers)?;
    }
    to.iter().for_each(|&rank| moved[rank] += rounds * givers);
    Some(moved)
}
