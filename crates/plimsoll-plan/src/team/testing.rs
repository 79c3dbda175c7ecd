//! What the tests of ways to share out ask about.

use crate::search::{Lossy, Pins, Question};
use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, HostSpec, Link, OpRates, Rates};
use plimsoll_program::Share;
use plimsoll_program::models::ModelConfig;
use plimsoll_program::models::decoder::{AdamState, Optimizer, Source};

/// A simulated device of so much of a core's speed, with this link to others.
pub(super) fn device(pace: f64, budget: Bytes, team_link: Link) -> DeviceSpec {
    let core = Rates {
        f32_flops: 100e9,
        bf16_flops: 200e9,
        memory_bytes_per_second: 20e9,
        op_seconds: 2e-6,
        host_link: Link { bytes_per_second: 16e9, latency_seconds: 10e-6 },
        measured: false,
        ops: OpRates::default(),
    };
    DeviceSpec {
        name: "any".into(),
        kind: DeviceKind::Virtual,
        budget,
        charges: Bytes::mib(8),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        threads: 1,
        rates: core.paced(pace),
        team_link,
    }
}

/// Steps of so many sequences of so many tokens each on a device beside no host.
pub(super) fn question<'a>(
    config: &'a ModelConfig,
    device: &'a DeviceSpec,
    sequence: u64,
    sequences: u64,
) -> Question<'a> {
    let state = AdamState::Full;
    Question {
        config,
        precision: DType::F32,
        sequence,
        sequences,
        source: Source::Random { seed: 1 },
        optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }),
        evaluate: false,
        generation: None,
        device,
        host: HostSpec::NONE,
        lossy: Lossy::default(),
        pins: Pins::default(),
        rungs: vec![],
        share: Share::ALONE,
    }
}
