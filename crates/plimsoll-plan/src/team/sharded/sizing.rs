//! The sizes of the shards of a sharded team, for given micro-batches.
//!
//! Shards are as even as the memory allows that each rank has free beside its activations. If that is not enough for the
//! whole model, all ranks recompute more, and at last a rest is offloaded to the host. More recompute than needed frees
//! memory for more even shards. With uneven shards the rank that owns the smallest has to receive the most, so even shards are
//! faster over slow links. The fastest of a few amounts of recompute is taken.

use super::ALL_PARTS;
use crate::bisection;
use crate::search::{RankCosts, ShardedBytes};

/// Factor on the sharded bytes that leaves room for the rounding of shards to whole parts and blocks.
const ROUNDING_ROOM: f64 = 1.002;
/// Number of steps of the fractions of recompute that are tried, to make the shards more even.
const RECOMPUTE_STEPS: u32 = 8;
/// Number of probes of the bisection that finds the least recompute.
const RECOMPUTE_PROBES: u32 = 20;

/// The inputs for sizing shards: the predicted seconds and bytes of the ranks of a team, and their memory.
pub(super) struct ShardSizing<'a> {
    /// The bytes that are sharded, of all ranks together.
    pub sharded: ShardedBytes,
    /// Predicted seconds and bytes of each rank, without recompute and with full recompute.
    pub costs: &'a [RankCosts],
    /// Bytes of each rank's arena that may be used.
    pub budgets: Vec<u64>,
    /// Bytes per second of each rank's link to the host.
    pub host_links: Vec<f64>,
    /// Each rank's fraction of the bytes that are offloaded.
    pub offload_fractions: Vec<f64>,
    /// Number of micro-batches of a step.
    pub micro_batch_count: u64,
}

/// Shards with the recompute and the offload that they need.
pub(super) struct SizedShards {
    /// The shard of each rank, in 1024ths of the whole.
    pub shards: Vec<u64>,
    /// The fraction of the layers that each rank recomputes.
    pub recompute: Vec<f64>,
    /// Bytes of the shards that are offloaded to the host, of all ranks together.
    pub offloaded: f64,
}

/// Predicted times of a rank.
#[derive(Clone, Copy)]
struct RankSeconds {
    per_step: f64,
    per_micro_batch: f64,
}

impl ShardSizing<'_> {
    fn ranks(&self) -> std::ops::Range<usize> {
        0..self.costs.len()
    }

    /// Returns the bytes that a rank has free for its shard if it recomputes this fraction of its layers.
    fn free_bytes(&self, rank: usize, recompute: f64) -> f64 {
        let bytes = self.costs[rank].transient_bytes;
        let (without, full) = (bytes.none as f64, bytes.full as f64);
        let activations = without + recompute * (full - without);
        (self.budgets[rank] as f64 - activations).max(0.0)
    }

    /// Returns the free bytes of all ranks together.
    fn total_free_bytes(&self, recompute: f64) -> f64 {
        self.ranks().map(|rank| self.free_bytes(rank, recompute)).sum()
    }

    /// Returns the bytes of a rank's shard.
    fn shard_bytes(&self, shards: &[u64], rank: usize) -> f64 {
        self.sharded.all * shards[rank] as f64 / ALL_PARTS as f64
    }

    /// Returns the bytes of a rank's shard for which its device has no room.
    fn offloaded_bytes(&self, shards: &[u64], recompute: &[f64], rank: usize) -> f64 {
        (self.shard_bytes(shards, rank) - self.free_bytes(rank, recompute[rank])).max(0.0)
    }

    /// Predicts the times of one rank. The further the team's smallest shard is below an even one, the longer the
    /// collectives take.
    fn rank_seconds(&self, shards: &[u64], recompute: &[f64], rank: usize) -> RankSeconds {
        let even = ALL_PARTS as f64 / self.costs.len() as f64;
        let smallest = shards.iter().min().map_or(0.0, |least| *least as f64 / even);
        let offloaded = self.offloaded_bytes(shards, recompute, rank);
        // Optimizer state is offloaded first: it crosses the link once a step, all else with every micro-batch.
        let offloaded_state = offloaded.min(self.shard_bytes(shards, rank) * self.sharded.optimizer / self.sharded.all);
        let link = self.host_links[rank];
        let passes = self.costs[rank].micro_batch_seconds(recompute[rank], self.costs.len(), smallest);
        let once = self.costs[rank].per_step_seconds * (shards[rank] as f64 / even).max(1.0);
        RankSeconds {
            per_step: once + 2.0 * offloaded_state / link,
            per_micro_batch: passes + 2.0 * (offloaded - offloaded_state) / link,
        }
    }

    /// Predicts the seconds of a step: the slowest rank sets the pace of the update and of each micro-batch.
    pub fn step_seconds(&self, shards: &[u64], recompute: &[f64]) -> f64 {
        let seconds: Vec<RankSeconds> = self.ranks().map(|rank| self.rank_seconds(shards, recompute, rank)).collect();
        let per_step = seconds.iter().map(|rank| rank.per_step).fold(0.0, f64::max);
        let per_micro_batch = seconds.iter().map(|rank| rank.per_micro_batch).fold(0.0, f64::max);
        per_step + self.micro_batch_count as f64 * per_micro_batch
    }

    /// Keeps the given shards, and sizes only recompute and offload. Each rank recomputes as little as possible, and
    /// offloads the bytes that have no room even with full recompute.
    pub fn with_fixed_shards(&self, shards: &[u64]) -> SizedShards {
        let recompute_of = |rank: usize| {
            let wanted = self.shard_bytes(shards, rank) * ROUNDING_ROOM;
            least_recompute(&|recompute| self.free_bytes(rank, recompute), wanted)
        };
        let recompute: Vec<f64> = self.ranks().map(recompute_of).collect();
        let offloaded = self.ranks().map(|rank| self.offloaded_bytes(shards, &recompute, rank)).sum();
        SizedShards { shards: shards.to_vec(), recompute, offloaded }
    }

    /// Sizes the shards so that the step is fastest. All ranks recompute a fraction of their layers: the least with which
    /// there is room, or one of a few larger ones that do not depend on load lines. Shards are as even as the room then
    /// allows, so more memory only makes them more even.
    pub fn with_fastest_shards(&self) -> SizedShards {
        let wanted = self.sharded.all * ROUNDING_ROOM;
        let least = least_recompute(&|recompute| self.total_free_bytes(recompute), wanted);
        let steps = (0..=RECOMPUTE_STEPS).map(|step| f64::from(step) / f64::from(RECOMPUTE_STEPS));
        let fractions = [least].into_iter().chain(steps.filter(|fraction| *fraction > least));
        let sized = fractions.map(|fraction| self.with_recompute(fraction, wanted));
        let seconds = |sized: &SizedShards| self.step_seconds(&sized.shards, &sized.recompute);
        sized.min_by(|a, b| seconds(a).total_cmp(&seconds(b))).expect("the least fraction is one")
    }

    /// Divides `wanted` bytes as evenly as the room beside this fraction of recompute allows. A rest without room is
    /// offloaded, in proportion to the links that it has to cross.
    fn with_recompute(&self, recompute: f64, wanted: f64) -> SizedShards {
        let offloaded = (wanted - self.total_free_bytes(recompute)).max(0.0);
        let room = |rank: usize| self.free_bytes(rank, recompute) + offloaded * self.offload_fractions[rank];
        let room: Vec<f64> = self.ranks().map(room).collect();
        SizedShards { shards: to_parts(&level(&room, wanted)), recompute: vec![recompute; self.costs.len()], offloaded }
    }
}

/// Returns the least fraction of recompute, 0 to 1, with which there is room for the wanted bytes; 1 if no fraction is
/// enough.
fn least_recompute(room: &dyn Fn(f64) -> f64, wanted: f64) -> f64 {
    let is_enough = |recompute: f64| room(recompute) >= wanted;
    match is_enough(0.0) {
        true => 0.0,
        false => bisection::narrow(0.0, 1.0, RECOMPUTE_PROBES, f64::midpoint, |recompute| {
            is_enough(recompute).then_some(recompute)
        }),
    }
}

/// Divides `wanted` bytes over the ranks as evenly as the most bytes `room` of each rank allow.
fn level(room: &[f64], wanted: f64) -> Vec<f64> {
    let mut by_room: Vec<usize> = (0..room.len()).collect();
    by_room.sort_by(|&a, &b| room[a].total_cmp(&room[b]));
    let (mut bytes, mut left) = (vec![0.0; room.len()], wanted);
    for (done, &rank) in by_room.iter().enumerate() {
        bytes[rank] = room[rank].min(left / (room.len() - done) as f64);
        left -= bytes[rank];
    }
    bytes
}

/// Divides 1024 parts in proportion to the bytes of each rank, rounded down. Each remaining part goes to the rank that
/// lost most by rounding, relative to its bytes.
fn to_parts(bytes: &[f64]) -> Vec<u64> {
    let total: f64 = bytes.iter().sum();
    let exact: Vec<f64> = bytes.iter().map(|bytes| ALL_PARTS as f64 * bytes / total).collect();
    let mut parts: Vec<u64> = exact.iter().map(|part| *part as u64).collect();
    for _ in parts.iter().sum()..ALL_PARTS {
        let rest = |rank: usize| (exact[rank] - parts[rank] as f64) * total / exact[rank].max(1e-9);
        let largest = (0..parts.len()).max_by(|&a, &b| rest(a).total_cmp(&rest(b)).then(b.cmp(&a)));
        parts[largest.expect("a team has a device")] += 1;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_are_as_even_as_room_allows(room in prop::collection::vec(0.0f64..100.0, 1..6), fraction in 0.01f64..1.0) {
            let wanted = fraction * room.iter().sum::<f64>();
            let bytes = level(&room, wanted);
            prop_assert!((bytes.iter().sum::<f64>() - wanted).abs() < 1e-9 * wanted.max(1.0), "{bytes:?} {wanted}");
            prop_assert!(bytes.iter().zip(&room).all(|(bytes, room)| bytes <= room));
            // A rank with less than another has no room for more.
            let most = bytes.iter().copied().fold(0.0, f64::max);
            prop_assert!(bytes.iter().zip(&room).all(|(bytes, room)| bytes == room || *bytes > most - 1e-9), "{bytes:?} {room:?}");
        }
    }
}
