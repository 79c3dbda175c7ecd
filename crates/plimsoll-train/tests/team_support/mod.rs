//! Teams of small models for the tests: a `Case` describes a run, a `Team` executes it.

use plimsoll_core::{
    Bytes, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, Offload, Parallelism, Rates, Recipe,
    RecomputeLevel, Space, micro_batches,
};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Device, FileSpace, NoFiles};
use plimsoll_device::error::DeviceError;
use plimsoll_device::transport::in_process::InProcessTransport;
use plimsoll_device::transport::wire::{Wire, WireTransport};
use plimsoll_device::transport::{GroupHandle, Transport};
use plimsoll_device::virtual_device::{self, VirtualDeviceSpec};
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanOutcome, PlanRequest, plan_recipe};
use plimsoll_program::models::decoder::{
    AdamState, AdaptedModule, Generation, Lora, Method, Optimizer, Scores, WeightSource,
};
use plimsoll_program::models::{Extras, ModelConfig, ModelType, Target, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::passes::collective_agreement::check_agreement;
use plimsoll_program::{Call, Lifetime, ProgramKind, ProgramSet, Schedule, Share, TensorId};
use plimsoll_train::data::Rows;
use plimsoll_train::device_server::{DeviceServer, serve};
use plimsoll_train::engine::{Engine, EvaluationSums, StepInput, StepLoss};
use plimsoll_train::remote::device::Connection;
use plimsoll_train::remote::distributed::{ConnectedTeam, DistributedTransport, TeamEndpoint};
use plimsoll_train::remote::sockets::{StreamChannel, TcpPeerNetwork};
use plimsoll_train::remote::{Channel, PeerNetwork, RemoteConnector};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const LINK: Link = Link { bytes_per_second: 1e12, latency_seconds: 0.0 };
pub const SEQUENCE: u64 = 12;
pub const STEPS: u64 = 4;

/// Small models that each have a feature of their own: tied heads, biases, head norms, a separate head, norms of
/// outputs, caps of scores and logits, two rotary bases.
pub fn models() -> Vec<ModelConfig> {
    let small = |name: &str, layers: u64| {
        let known = preset(name).expect("listed");
        let (heads, kv_heads, head_dim) = (4, 2, 8);
        ModelConfig { hidden: 32, layers, heads, kv_heads, head_dim, ffn: 48, vocab: 67, ..known }
    };
    let of_inputs =
        [small("smollm2-135m", 3), small("qwen2.5-7b", 2), small("qwen3-0.6b", 1), small("llama-3.1-8b", 2)];
    let mut two_bases = small("gemma3-1b", 3);
    two_bases.extras.full_layers = vec![1];
    of_inputs.into_iter().chain([small("olmo2-7b", 3), small("gemma2-2b", 2), two_bases]).collect()
}

/// Returns a small model whose first layer does not rotate queries and keys. A backward pass of its first stage reads
/// shifted positions in place of the positions.
pub fn unrotated_model() -> ModelConfig {
    let extras = Extras { unrotated_layers: vec![0], ..Extras::default() };
    ModelConfig { model_type: ModelType::SmolLm3, extras, ..models().swap_remove(0) }
}

pub fn lora() -> LossyOptions {
    let lossy = LossyOptions::default();
    LossyOptions { method: Method::Lora(Lora { dropout: 0.25, rank: 4, ..lossy.lora.clone() }), ..lossy }
}

/// Adapters that differ between layers in rank and scale, and that some layers do not have.
pub fn partial_lora() -> LossyOptions {
    let module = |layer, target, rank, alpha| AdaptedModule { layer, target, rank, alpha };
    let of_layer = |layer: u64| {
        let queries = (layer % 2 == 1).then_some(module(layer, Target::Q, 2, 4.0));
        let down = (layer == 2).then_some(module(layer, Target::Down, 4, 8.0));
        queries.into_iter().chain([module(layer, Target::V, 1 + layer % 3, 3.0)]).chain(down)
    };
    let (targets, modules) = (vec![Target::Q, Target::V, Target::Down], (0..5).flat_map(of_layer).collect());
    let lossy = lora();
    let uniform = lossy.method.lora().expect("adapters").clone();
    LossyOptions { method: Method::Lora(Lora { targets, modules: Some(modules), ..uniform }), ..lossy }
}

pub fn device(kind: DeviceKind) -> DeviceSpec {
    DeviceSpec {
        name: "a".into(),
        kind,
        budget: Bytes::gib(2),
        charges: Bytes::ZERO,
        charges_measured: false,
        link_measured: false,
        nccl: None,
        threads: 1,
        team_link: LINK,
        rates: Rates {
            f32_flops: 1e11,
            bf16_flops: 1e11,
            memory_bytes_per_second: 1e10,
            op_seconds: 1e-6,
            host_link: LINK,
            measured: false,
            ops: plimsoll_core::OpRates::default(),
        },
    }
}

/// Returns the rows of a step. Some labels are masked, more of them in some rows than in others.
pub fn rows(range: Range<u64>, vocab: u64, step: u64) -> Rows {
    let mut rows = Rows::new(range.end - range.start, SEQUENCE);
    for row in range.start as i32..range.end as i32 {
        for i in 0..SEQUENCE as i32 {
            rows.tokens.push((row * 31 + i * 7 + step as i32 * 13) % vocab as i32);
            let counts = i >= row % 5 * 2;
            rows.labels.push(if counts { (row * 17 + i * 5 + step as i32) % vocab as i32 } else { -100 });
            let start = if i < 5 { 0 } else { 5 };
            rows.positions.push(i - start);
            rows.document_start.push(start);
            rows.weights.push(if counts { 1.0 } else { 0.0 });
        }
    }
    rows
}

/// A team and its run.
#[derive(Clone)]
pub struct Case {
    pub config: ModelConfig,
    pub precision: DType,
    pub kind: DeviceKind,
    pub lossy: LossyOptions,
    pub state: AdamState,
    pub parallelism: Parallelism,
    /// Weight of each rank's part of the state, for sharded teams.
    pub parts: Vec<u64>,
    /// First layer of each stage and the number of all layers, for pipelines; every stage then has all sequences.
    pub layers: Vec<u64>,
    pub offload: Offload,
    /// Whether ranks exchange over sockets, as in several processes.
    pub over_sockets: bool,
    /// Whether all ranks but the first are remote devices.
    pub remote: bool,
    /// Sequences and micro-batch of each rank; both 0 for a storage-only rank.
    pub ranks: Vec<(u64, u32)>,
    pub steps: u64,
}

/// Connector of a process with remote devices in its team.
pub struct TestConnector(pub Arc<TcpPeerNetwork>);

impl RemoteConnector for TestConnector {
    fn channel(&self, device: &str) -> io::Result<Arc<dyn Channel>> {
        unreachable!("{device} has its channel")
    }

    fn peer_network(&self) -> Arc<dyn PeerNetwork> {
        self.0.clone()
    }
}

impl Case {
    pub fn new(config: &ModelConfig, ranks: &[(u64, u32)]) -> Case {
        Case {
            config: config.clone(),
            precision: DType::F64,
            kind: DeviceKind::Cpu,
            lossy: LossyOptions::default(),
            state: AdamState::Full,
            parallelism: Parallelism::Data,
            parts: vec![],
            layers: vec![],
            offload: Offload::NOTHING,
            over_sockets: false,
            remote: false,
            ranks: ranks.into(),
            steps: STEPS,
        }
    }

    /// Returns the same run on one device.
    pub fn alone(&self) -> Case {
        Case { ranks: vec![(self.sequences(), 3)], offload: Offload::NOTHING, ..self.clone() }
    }

    /// Returns a pipeline with stages that begin at these layers; the last entry is the number of layers.
    pub fn pipeline(config: &ModelConfig, layers: &[u64], sequences: u64, micro_batch: u32) -> Case {
        let config = ModelConfig { layers: layers[layers.len() - 1], ..config.clone() };
        let ranks = vec![(sequences, micro_batch); layers.len() - 1];
        Case { parallelism: Parallelism::Pipeline, layers: layers.into(), ..Case::new(&config, &ranks) }
    }

    pub fn sequences(&self) -> u64 {
        self.own(self.ranks.len() - 1).end
    }

    pub fn share(&self, rank: usize) -> Share {
        Share {
            parallelism: (self.ranks.len() > 1).then_some(self.parallelism),
            rank: rank as u32,
            ranks: self.ranks.len() as u32,
            first_sequence: self.own(rank).start,
            state: self.parts.clone(),
            layers: self.layers.clone(),
            micro_batches: if self.parallelism == Parallelism::Sharded { self.max_micro_batches() } else { 0 },
        }
    }

    /// Returns the number of micro-batches of the rank with the most.
    pub fn max_micro_batches(&self) -> u64 {
        self.ranks.iter().map(|&(own, micro_batch)| micro_batches(own, micro_batch)).max().expect("a team has a device")
    }

    pub fn schedule(&self, rank: usize) -> Schedule {
        let (own, micro_batch) = self.ranks[rank];
        self.share(rank).schedule(self.share(rank).micro_batches_of(own, micro_batch) as u32)
    }

    /// Returns the sequences of a rank in a step.
    pub fn own(&self, rank: usize) -> Range<u64> {
        if self.parallelism == Parallelism::Pipeline {
            return 0..self.ranks[rank].0;
        }
        let first = self.ranks[..rank].iter().map(|rank| rank.0).sum();
        first..first + self.ranks[rank].0
    }

    /// Returns the planner request for a rank.
    pub fn question<'a>(&'a self, device: &'a DeviceSpec, rank: usize) -> PlanRequest<'a> {
        let (state, own) = (self.state, self.own(rank));
        PlanRequest {
            config: &self.config,
            precision: self.precision,
            sequence: SEQUENCE,
            sequences: own.end - own.start,
            source: WeightSource::Random { seed: 3 },
            optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }),
            evaluate: true,
            scores: Scores::None,
            temperature: 1.0,
            generation: Some(Generation { slots: 1, capacity: 8, chunk: 3 }),
            device,
            host: HostSpec { budget: Bytes::gib(2), memory_bytes_per_second: 1e10, file: FileSpec::NONE },
            lossy: self.lossy.clone(),
            pins: PinnedChoices::default(),
            rungs: vec![],
            share: self.share(rank),
        }
    }

    pub fn answer(&self, rank: usize) -> PlanOutcome {
        let device = device(self.kind);
        let question = self.question(&device, rank);
        let layers = question.share.own_layers(self.config.layers);
        let levels = RecomputeLevel::ALL.iter().rev().cycle();
        let recompute = levels.skip(rank).take((layers.end - layers.start) as usize).copied().collect();
        let recipe = Recipe { micro_batch: self.ranks[rank].1, recompute, offload: self.offload, rungs: vec![] };
        let answer = plan_recipe(&question, &recipe);
        check(&answer.set).unwrap_or_else(|malformed| panic!("{recipe}: {malformed}"));
        answer
    }

    pub fn open(&self, answer: &PlanOutcome) -> Box<dyn Device> {
        let (set, placement) = (answer.set.clone(), answer.layout.placement.clone());
        match self.kind {
            DeviceKind::Virtual => {
                let what = VirtualDeviceSpec {
                    scratch_folder: None,
                    name: "virtual:a".into(),
                    arena_budget: Bytes::gib(1),
                    threads: 1,
                    price: Box::new(|_, _| 0.0),
                    link: LINK,
                };
                virtual_device::open(what, set, placement, self.precision).expect("the arenas are given")
            }
            _ => executor::open(set, placement, self.precision, 1, None).expect("the arena is given"),
        }
    }

    /// Creates the transport of each rank.
    pub fn transports(&self) -> Vec<Arc<dyn Transport>> {
        let ranks = self.ranks.len();
        if !self.over_sockets {
            let transport = InProcessTransport::new_group(ranks as u32);
            return (0..ranks).map(|_| -> Arc<dyn Transport> { transport.clone() }).collect();
        }
        let mut wires: Vec<Vec<Option<Arc<dyn Wire>>>> = vec![vec![None; ranks]; ranks];
        for (one, other) in (0..ranks).flat_map(|one| (0..one).map(move |other| (one, other))) {
            let (here, there) = UnixStream::pair().expect("sockets are given");
            wires[one][other] = Some(Arc::new(here));
            wires[other][one] = Some(Arc::new(there));
        }
        let epoch = Instant::now();
        // Small rounds, so that a collective takes many of them.
        let over_sockets = |(rank, wires)| -> Arc<dyn Transport> {
            WireTransport::with_round_bytes(rank, wires, epoch, 5000).expect("threads are given")
        };
        (0..).zip(wires).map(over_sockets).collect()
    }

    /// Opens the first engine locally and all others as remote devices, joined in one group.
    pub fn spread(
        &self,
        answers: &[PlanOutcome],
        heartbeat_timeout: Duration,
    ) -> (Vec<Engine>, Vec<Arc<dyn Transport>>) {
        let vocab = self.config.vocab;
        let listens = || TcpPeerNetwork::listen("127.0.0.1:0").expect("a port");
        let remote = |(rank, answer): (usize, &PlanOutcome)| {
            let (requests_server, requests_client) = UnixStream::pair().expect("sockets are given");
            let (out_of_band_server, out_of_band_client) = UnixStream::pair().expect("sockets are given");
            let host = DeviceServer::new(listens()).expect("a thread");
            std::thread::spawn(move || serve(&host, requests_server, out_of_band_server));
            let spec = DeviceSpec { name: format!("host{rank}/virtual:a"), ..device(self.kind) };
            let connection =
                Connection::new(&spec.name, Arc::new(StreamChannel::new(requests_client, out_of_band_client)))
                    .expect("a thread");
            Engine::open_remote(
                connection,
                answer.clone(),
                self.precision,
                &spec,
                None,
                heartbeat_timeout,
                SEQUENCE,
                vocab,
            )
            .expect("it opens")
        };
        let first = Engine::new(
            self.open(&answers[0]),
            &answers[0].set,
            self.precision,
            answers[0].plan.recipe.clone(),
            SEQUENCE,
            vocab,
        );
        let mut engines: Vec<Engine> =
            std::iter::once(first).chain(answers.iter().enumerate().skip(1).map(remote)).collect();
        let member = |engine: &Engine| {
            engine.connection().map_or(TeamEndpoint::Local, |connection| TeamEndpoint::Remote(connection.clone()))
        };
        let members: Vec<TeamEndpoint> = engines.iter().map(member).collect();
        let gathered = DistributedTransport::connect_team(&members, &TestConnector(listens()), 1, false);
        let ConnectedTeam { transport, groups } = gathered.map_err(|(_, error)| error).expect("all ranks connect");
        for (engine, seat) in engines.iter_mut().zip(groups) {
            engine.join_group(seat).expect("the device joins the group");
        }
        (engines, vec![transport])
    }

    /// Opens an engine for each rank, joined in one group, with initial weights.
    pub fn team(&self) -> Team {
        let answers: Vec<PlanOutcome> = (0..self.ranks.len()).map(|rank| self.answer(rank)).collect();
        let schedules: Vec<Schedule> = (0..self.ranks.len()).map(|rank| self.schedule(rank)).collect();
        let ranks: Vec<_> = answers.iter().map(|answer| &answer.set).zip(&schedules).collect();
        check_agreement(&ranks).expect("all ranks agree");
        for program in [
            ProgramKind::Load,
            ProgramKind::InitOptimizer,
            ProgramKind::Evaluate,
            ProgramKind::Save,
            ProgramKind::Checkpoint,
            ProgramKind::Restore,
        ] {
            let calls = vec![Call { program, micro_batch: 0, last: true }];
            let schedule = Schedule { calls };
            let ranks: Vec<_> = answers.iter().map(|answer| (&answer.set, &schedule)).collect();
            check_agreement(&ranks).unwrap_or_else(|disagreement| panic!("{program}: {disagreement}"));
        }
        let engine = |answer: &PlanOutcome, rank: usize, transport: &Arc<dyn Transport>| {
            let mut device = self.open(answer);
            device
                .join_group(GroupHandle { rank: rank as u32, transport: transport.clone(), nccl: false })
                .expect("the device joins the group");
            let recipe = answer.plan.recipe.clone();
            Engine::new(device, &answer.set, self.precision, recipe, SEQUENCE, self.config.vocab)
        };
        let (engines, transports) = if self.remote {
            self.spread(&answers, Duration::from_secs(60))
        } else {
            let transports = self.transports();
            let ranks = answers.iter().enumerate().zip(&transports);
            (ranks.map(|((rank, answer), transport)| engine(answer, rank, transport)).collect(), transports)
        };
        let sets = answers.into_iter().map(|answer| answer.set).collect();
        let mut team = Team { case: self.clone(), engines, transports, sets };
        for program in [ProgramKind::Load, ProgramKind::InitOptimizer] {
            team.each(|_, engine| engine.run(program).expect("no rank aborts"));
        }
        team
    }

    /// Runs all steps.
    pub fn run(&self) -> RunResult {
        let mut team = self.team();
        let losses: Vec<StepLoss> = (1..=self.steps).map(|step| team.step(step)).collect();
        RunResult { losses, ranks: team.left() }
    }
}

pub struct Team {
    pub case: Case,
    pub engines: Vec<Engine>,
    pub transports: Vec<Arc<dyn Transport>>,
    pub sets: Vec<ProgramSet>,
}

pub type Weights = BTreeMap<(String, u32), Vec<u8>>;

/// Losses of all steps, and the weights and state of each rank.
pub struct RunResult {
    pub losses: Vec<StepLoss>,
    pub ranks: Vec<Weights>,
}

impl Team {
    /// Runs work on all ranks in parallel.
    pub fn each<R: Send>(&mut self, work: impl Fn(usize, &mut Engine) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let work = &work;
            let engines = self.engines.iter_mut().enumerate();
            let threads: Vec<_> = engines.map(|(rank, engine)| scope.spawn(move || work(rank, engine))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
        })
    }

    pub fn gradients(&mut self, step: u64) -> Vec<Result<StepLoss, DeviceError>> {
        let case = self.case.clone();
        let vocab = case.config.vocab;
        let loss_divisor = rows(0..case.sequences(), vocab, step).labelled_tokens();
        let input = StepInput { step, learning_rate: 1e-2, betas: [0.9, 0.95], clip_norm: 0.3, loss_divisor };
        let at_least = |rank| case.share(rank).micro_batches.max(1);
        self.each(|rank, engine| engine.gradients(&mut rows(case.own(rank), vocab, step), &input, at_least(rank)))
    }

    /// Runs a step on all ranks, which must agree on loss and norm.
    pub fn step(&mut self, step: u64) -> StepLoss {
        let losses: Vec<StepLoss> =
            self.gradients(step).into_iter().map(|loss| loss.expect("no rank aborts")).collect();
        assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
        self.each(|_, engine| engine.update().expect("no rank aborts"));
        losses[0]
    }

    /// Returns weights and state of each rank, offloaded or not, by their names in Programs without offload.
    pub fn left(&mut self) -> Vec<Weights> {
        let (engines, sets) = (&mut self.engines, &self.sets);
        let mut all = Vec::new();
        for (engine, set) in engines.iter_mut().zip(sets) {
            let mut weights = Weights::new();
            for (number, tensor) in set.tensors.iter().enumerate() {
                let changes = tensor.lifetime == Lifetime::Persistent && tensor.space != Space::File;
                if !changes || ["scalars", "metrics"].contains(&&*tensor.name) || tensor.name.contains(".gradient") {
                    continue;
                }
                let base = tensor.name.strip_suffix(".host").unwrap_or(&tensor.name);
                let evaluator = set.find(&format!("{base}.host")).map_or(0, |home| set.tensor(home).slots);
                for slot in 0..tensor.slots {
                    let mut bytes = vec![0; tensor.bytes() as usize];
                    engine.device().read(TensorId(number as u32), slot, &mut bytes);
                    let slot = if base == tensor.name { slot + evaluator } else { slot };
                    weights.insert((base.to_owned(), slot), bytes);
                }
            }
            all.push(weights);
        }
        all
    }
}

/// Files in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Files(pub BTreeMap<String, Vec<u8>>);

impl FileSpace for Files {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.get(tensor).ok_or(io::ErrorKind::NotFound)?;
        into.copy_from_slice(&bytes[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        let bytes = self.0.entry(tensor.to_owned()).or_default();
        let end = offset as usize + from.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[offset as usize..end].copy_from_slice(from);
        Ok(())
    }
}

impl Team {
    /// Returns the files that save and checkpoint write. Rank 0 writes, the others send their parts; in a pipeline each
    /// stage writes its layers.
    pub fn files(&mut self) -> Files {
        let (stages, is_data_parallel) =
            (self.case.parallelism == Parallelism::Pipeline, self.case.parallelism == Parallelism::Data);
        let written = self.each(|rank, engine| {
            let mut files = Files::default();
            for program in [ProgramKind::Save, ProgramKind::Checkpoint] {
                match rank {
                    _ if stages => engine.move_files(program, &mut files).expect("no rank aborts"),
                    0 => engine.move_files(program, &mut files).expect("no rank aborts"),
                    _ if is_data_parallel => {}
                    _ => engine.move_files(program, &mut NoFiles).expect("no other rank touches files"),
                }
            }
            files
        });
        let names: usize = written.iter().map(|files| files.0.len()).sum();
        let all = Files(written.into_iter().flat_map(|files| files.0).collect());
        assert_eq!(all.0.len(), names, "nothing is written twice");
        all
    }

    pub fn restore(&mut self, files: &Files) {
        self.each(|_, engine| engine.move_files(ProgramKind::Restore, &mut files.clone()).expect("no rank aborts"));
    }

    /// Evaluates some rows, with the same number of micro-batches on every rank.
    pub fn evaluated(&mut self) -> f64 {
        let case = self.case.clone();
        let times = case.share(0).micro_batches.max(1);
        let sums = self.each(|rank, engine| {
            let (own, micro_batch) = (case.own(rank), u64::from(case.ranks[rank].1));
            let micro_batch = if times > 1 { micro_batch } else { own.end - own.start };
            let mut sum = EvaluationSums::default();
            for first in (0..times).map(|time| own.start + time * micro_batch) {
                let mut rows = rows(first.min(own.end)..(first + micro_batch).min(own.end), case.config.vocab, 9);
                sum.add(engine.evaluate(&mut rows).expect("no rank aborts"));
            }
            sum.loss_sum
        });
        sums.iter().sum()
    }
}

impl Team {
    /// Returns the logits after a prompt and after one more token.
    pub fn generated(&mut self) -> Vec<f64> {
        let extend = |team: &mut Team, tokens: &[i32], length| {
            let all = team.each(|_, engine| engine.extend(tokens, length).expect("no rank aborts"));
            let found: Vec<Vec<f64>> = all.into_iter().filter(|logits| !logits.is_empty()).collect();
            assert!(found.iter().all(|logits| *logits == found[0]));
            found[0].clone()
        };
        let prompt = extend(self, &[5, 3, 1, 4, 2], 0);
        [prompt, extend(self, &[7], 5)].concat()
    }
}
