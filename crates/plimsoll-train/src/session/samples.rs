//! Text generation by a team, for the samples that a run draws at its end.

use crate::engine::failure::DeviceFailure;
use crate::inference::CachedDecoder;
use crate::team::Team;

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
