//! Text generation by a team: the samples that a run draws at its end, and the completions on which it trains.

use crate::engine::failure::DeviceFailure;
use crate::engine::{SlotCopy, SlotTokens};
use crate::inference::CachedDecoder;
use crate::inference::batch::SlotDecoder;
use crate::inference::completions::{CompletionRequest, SampledCompletion, complete};
use crate::team::Team;
use std::ops::Range;
use std::sync::Arc;

impl Team {
    /// Completes all prompts of a request, and returns the completions in order. Each worker that holds the whole model
    /// completes a part of them, by its share of a step; otherwise the workers complete each together.
    ///
    /// # Errors
    /// The failure of a worker.
    pub fn complete(&mut self, request: &Arc<CompletionRequest>) -> Result<Vec<SampledCompletion>, DeviceFailure> {
        let count = request.prompts.len();
        if self.is_partitioned() {
            return complete(self, request, 0..count);
        }
        // Shares of a step are part of the plan, so a run that is repeated or resumed gives each device the same prompts.
        let shares: Vec<u64> = self.workers().iter().map(|worker| worker.sequences).collect();
        let (request, ranges) = (Arc::clone(request), split_by_shares(count, &shares));
        let parts = self.on_all(move |rank, engine| complete(engine, &request, ranges[rank].clone()))?;
        Ok(parts.concat())
    }
}

/// Splits `count` prompts into consecutive ranges, in proportion to `shares`.
fn split_by_shares(count: usize, shares: &[u64]) -> Vec<Range<usize>> {
    let total = shares.iter().sum::<u64>().max(1) as usize;
    let mut before = 0;
    let range = |&share: &u64| {
        let first = count * before / total;
        before += share as usize;
        first..count * before / total
    };
    shares.iter().map(range).collect()
}

/// The team generates with all workers together: each receives the same tokens. Of a pipeline only the last stage has logits;
/// otherwise all that compute have the same ones.
impl SlotDecoder for Team {
    fn slots(&self) -> usize {
        self.workers()[0].engine.slots()
    }

    fn capacity(&self) -> usize {
        self.workers()[0].engine.capacity()
    }

    fn append(&mut self, prompts: &[SlotTokens]) -> Result<(), DeviceFailure> {
        let prompts: Vec<(usize, Vec<i32>, usize)> =
            prompts.iter().map(|prompt| (prompt.slot, prompt.tokens.to_vec(), prompt.length)).collect();
        self.on_all(move |_, engine| {
            let prompts: Vec<SlotTokens> = prompts
                .iter()
                .map(|(slot, tokens, length)| SlotTokens { slot: *slot, tokens, length: *length })
                .collect();
            Ok(engine.append(&prompts)?)
        })?;
        Ok(())
    }

    fn copy_slots(&mut self, copies: &[SlotCopy]) -> Result<(), DeviceFailure> {
        let copies = copies.to_vec();
        self.on_all(move |_, engine| Ok(engine.copy_slots(&copies)?))?;
        Ok(())
    }

    fn decode(&mut self, tokens: &[i32], lengths: &[usize]) -> Result<(), DeviceFailure> {
        let (tokens, lengths) = (tokens.to_vec(), lengths.to_vec());
        self.on_all(move |_, engine| Ok(engine.decode(&tokens, &lengths)?))?;
        Ok(())
    }

    fn read_logits(&mut self, slot: usize, into: &mut Vec<f64>) -> Result<(), DeviceFailure> {
        let all = self.on_all(move |_, engine| {
            let mut logits = Vec::new();
            engine.read_logits(slot, &mut logits)?;
            Ok(logits)
        })?;
        *into = all.into_iter().find(|logits| !logits.is_empty()).expect("a worker has the output head");
        Ok(())
    }
}

impl CachedDecoder for Team {
    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceFailure> {
        if !self.is_partitioned() {
            let tokens = tokens.to_vec();
            return self.on_one(0, move |engine| Ok(engine.extend(&tokens, length)?));
        }
        // All workers receive the same tokens. Of a pipeline only the last stage has logits; otherwise all that compute
        // have the same ones.
        let tokens = tokens.to_vec();
        let all = self.on_all(move |_, engine| Ok(engine.extend(&tokens, length)?))?;
        Ok(all.into_iter().find(|logits| !logits.is_empty()).expect("a worker has the output head"))
    }

    fn capacity(&self) -> usize {
        self.workers()[0].engine.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_split_by_shares() {
        assert_eq!(split_by_shares(8, &[3, 1]), [0..6, 6..8]);
        assert_eq!(split_by_shares(5, &[1, 0, 1]), [0..2, 2..2, 2..5]);
        assert_eq!(split_by_shares(1, &[2, 2]), [0..0, 0..1]);
    }
}
