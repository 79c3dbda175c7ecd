//! A GPU that goes over to another plan loads what that has new when it adopts it, on the stand-in (it runs on the CPU).
//! A process of its own: what the GPU has free is looked at, and nobody else may take any.

mod cuda_stand_in;

use plimsoll_core::{DType, RecomputeLevel, Space};
use plimsoll_device::cuda::executor::Opened;
use plimsoll_device::device::{Device, Room};
use plimsoll_program::models::config::{ModelConfig, ModelType, RopeScaling};
use plimsoll_program::models::decoder::{AdamState, Base, Build, Method, Optimizer, Source, Training, build};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, Placement, ProgramSet, TensorId};

fn programs(micro_batch: u64) -> ProgramSet {
    let config = ModelConfig {
        model_type: ModelType::Llama,
        hidden: 24,
        layers: 2,
        heads: 3,
        kv_heads: 1,
        head_dim: 8,
        ffn: 40,
        vocab: 61,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::None,
        qkv_bias: false,
        qk_norm: false,
        max_positions: 64,
        bos: None,
        eos: vec![],
        init_std: 0.1,
    };
    build(&Build {
        config: &config,
        layers: 0..config.layers,
        precision: DType::F32,
        kernels: Kernels::Cuda,
        sequence: 8,
        micro_batch,
        source: Source::Random { seed: 4 },
        method: Method::Full,
        base: Base::Plain,
        streamed_head: false,
        training: Some(Training {
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-3, decay: 0.1, state: AdamState::Full },
            recompute: vec![RecomputeLevel::Nothing; 2],
        }),
        evaluate: false,
        generation: None,
        files: true,
    })
}

/// What stays stands lowest, as the planner has it, and nothing overlaps; above it is more room.
fn placed(set: &ProgramSet, room: u64) -> Placement {
    let mut order: Vec<usize> = (0..set.tensors.len()).collect();
    order.sort_by_key(|&index| set.tensors[index].lifetime != Lifetime::Persistent);
    let mut placement = Placement { offsets: vec![Vec::new(); set.tensors.len()], ..Placement::default() };
    for index in order {
        let tensor = &set.tensors[index];
        let end = match tensor.space {
            Space::Device => Some(&mut placement.arena_bytes),
            Space::Host => Some(&mut placement.host_bytes),
            Space::Scratch | Space::File => None,
        };
        let bytes = tensor.bytes().next_multiple_of(256);
        let first = end.map(|end| std::mem::replace(end, *end + bytes * u64::from(tensor.slots)));
        placement.offsets[index] = (0..tensor.slots).map(|slot| Some(first? + u64::from(slot) * bytes)).collect();
    }
    placement.arena_bytes += room;
    placement
}

/// A step on zeros: valid tokens, labels and positions.
fn step(device: &mut dyn Device, set: &ProgramSet) {
    for name in ["train.tokens", "train.labels", "train.positions", "train.document_start", "train.token_weights"] {
        let tensor = set.find(name).unwrap();
        device.write(tensor, 0, &vec![0; set.tensor(tensor).bytes() as usize]);
    }
    for program in ["begin", "forward", "backward", "norm", "update"] {
        device.run(program).unwrap();
    }
    device.settle().unwrap();
}

/// The bytes of everything that stays.
fn kept(device: &mut dyn Device, set: &ProgramSet) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for (number, tensor) in set.tensors.iter().enumerate() {
        let trained =
            tensor.category == plimsoll_core::Category::Weight || tensor.category == plimsoll_core::Category::Optimizer;
        if trained && tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device {
            for slot in 0..tensor.slots {
                let mut bytes = vec![0; tensor.bytes() as usize];
                device.read(TensorId(number as u32), slot, &mut bytes);
                all.push((format!("{}.{slot}", tensor.name), bytes));
            }
        }
    }
    all
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn what_another_plan_needs_is_loaded_when_it_is_adopted_and_not_in_a_step() {
    let (large, small) = (programs(16), programs(1));
    let opened = cuda_stand_in::open(small.clone(), placed(&small, 0), DType::F32, None).unwrap();
    let Opened { mut device, .. } = opened;
    device.run("load").unwrap();
    device.run("fresh").unwrap();
    step(&mut *device, &small);
    let trained = kept(&mut *device, &small);
    let held = |room: &Room| room.memory.free.0 + room.held.0;
    let before = device.room().unwrap();
    // Products of other sizes are other kernels of the library. First where each op has room aside, then where
    // operands have to stand on top of each other.
    for (set, room) in [(&large, 8 << 20), (&programs(64), 0)] {
        device.adopt(set.clone(), placed(set, room)).unwrap();
        let after = device.room().unwrap();
        assert_eq!(held(&after), held(&before), "what came is known to be held");
        assert_eq!(kept(&mut *device, set), trained, "what stays keeps every bit");
        assert!(!device.memory().strayed(Space::Device));
        step(&mut *device, set);
        assert_eq!(device.room().unwrap().memory.free, after.memory.free, "a step takes no memory");
        device.adopt(small.clone(), placed(&small, 0)).unwrap();
        // Back to what was trained, whatever the steps did.
        device.run("load").unwrap();
        device.run("fresh").unwrap();
        step(&mut *device, &small);
        assert_eq!(kept(&mut *device, &small), trained);
    }
}
