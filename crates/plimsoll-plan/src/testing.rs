//! Devices and requests for tests.

use crate::search::{LossyOptions, PinnedChoices, PlanRequest};
use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, HostSpec, Link, OpRates, Rates};
use plimsoll_program::Share;
use plimsoll_program::models::ModelConfig;
use plimsoll_program::models::decoder::{AdamState, Optimizer, Scores, WeightSource};

/// Returns a simulated device with a fraction `pace` of the speed of a CPU core, and a link to the others.
pub(crate) fn device(pace: f64, budget: Bytes, team_link: Link) -> DeviceSpec {
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

/// Returns a request for steps of `sequences` sequences of `sequence` tokens, without a host.
pub(crate) fn request<'a>(
    config: &'a ModelConfig,
    device: &'a DeviceSpec,
    sequence: u64,
    sequences: u64,
) -> PlanRequest<'a> {
    let state = AdamState::Full;
    PlanRequest {
        config,
        precision: DType::F32,
        sequence,
        sequences,
        source: WeightSource::Random { seed: 1 },
        optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }),
        evaluate: false,
        scores: Scores::None,
        temperature: 1.0,
        generation: None,
        device,
        host: HostSpec::NONE,
        lossy: LossyOptions::default(),
        pins: PinnedChoices::default(),
        rungs: vec![],
        share: Share::SINGLE_DEVICE,
    }
}
