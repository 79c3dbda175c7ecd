//! A team is one run: however a step is shared out, losses, norms and weights are those of one device (to 1e-9 in f64,
//! where only the order of sums differs), all ranks have the same bits, and a rank that gives up anywhere leaves nobody
//! waiting and nothing half done.

mod common;

use common::Watchdog;
use plimsoll_core::{
    Bytes, Category, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, Offload, Rates, Recipe, RecomputeLevel,
    Sharing, Space, micro_batches,
};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Device, DeviceError, FileSpace, Memory, NoFiles, Observer, Unobserved};
use plimsoll_device::transport::memory::Memory as InProcess;
use plimsoll_device::transport::wire::{Wire, Wired};
use plimsoll_device::transport::{Seat, Transport};
use plimsoll_device::virtual_device::{self, Virtual};
use plimsoll_plan::search::{Answer, Lossy, Pins, Question, plan_of};
use plimsoll_plan::team::evaluating;
use plimsoll_program::models::decoder::{AdamState, Base, Generation, Lora, Method, Optimizer, Source};
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::passes::collectives::agree;
use plimsoll_program::{Call, Lifetime, Op, OpKind, ProgramSet, Schedule, Share, TensorId};
use plimsoll_train::data::Rows;
use plimsoll_train::remote::device::Connection;
use plimsoll_train::remote::host::Host;
use plimsoll_train::remote::spread::{self, Gathered, Member};
use plimsoll_train::remote::streams::{Streams, TcpWires, serve};
use plimsoll_train::remote::{Channel, Hosts, Wires};
use plimsoll_train::session::engine::{Engine, Evaluated, StepInput, StepLoss};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LINK: Link = Link { bytes_per_second: 1e12, latency_seconds: 0.0 };
const SEQUENCE: u64 = 12;
const STEPS: u64 = 4;

/// Each has something that the others lack: tied heads, biases, norms of heads, a head of its own.
fn models() -> Vec<ModelConfig> {
    let small = |name: &str, layers: u64| {
        let known = preset(name).expect("listed");
        let (heads, kv_heads, head_dim) = (4, 2, 8);
        ModelConfig { hidden: 32, layers, heads, kv_heads, head_dim, ffn: 48, vocab: 67, ..known }
    };
    vec![small("smollm2-135m", 3), small("qwen2.5-7b", 2), small("qwen3-0.6b", 1), small("llama-3.1-8b", 2)]
}

fn lora() -> Lossy {
    let lossy = Lossy::default();
    Lossy { method: Method::Lora(Lora { dropout: 0.25, rank: 4, ..lossy.lora.clone() }), ..lossy }
}

fn device(kind: DeviceKind) -> DeviceSpec {
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

/// Rows of a step, some of whose labels count for nothing, more of them in some rows than in others.
fn rows(range: Range<u64>, vocab: u64, step: u64) -> Rows {
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

/// What is run.
#[derive(Clone)]
struct Case {
    config: ModelConfig,
    precision: DType,
    kind: DeviceKind,
    lossy: Lossy,
    state: AdamState,
    sharing: Sharing,
    /// Parts of the state of each rank, where it is shared out.
    parts: Vec<u64>,
    /// The first layer of each rank and the number of all, where they are shared out: everybody then has all sequences.
    layers: Vec<u64>,
    offload: Offload,
    /// Whether ranks meet over wires, as those of several processes do.
    wired: bool,
    /// Whether all but the first are reached over channels as well.
    far: bool,
    /// Of each rank: its sequences, and those of a micro-batch; none of either where it only holds a part of the state.
    ranks: Vec<(u64, u32)>,
    steps: u64,
}

/// The process of a team some of whose devices are behind channels.
struct Driver(Arc<TcpWires>);

impl Hosts for Driver {
    fn channel(&self, device: &str) -> io::Result<Arc<dyn Channel>> {
        unreachable!("{device} has its channel")
    }

    fn wires(&self) -> Arc<dyn Wires> {
        self.0.clone()
    }
}

impl Case {
    fn new(config: &ModelConfig, ranks: &[(u64, u32)]) -> Case {
        Case {
            config: config.clone(),
            precision: DType::F64,
            kind: DeviceKind::Cpu,
            lossy: Lossy::default(),
            state: AdamState::Full,
            sharing: Sharing::Batch,
            parts: vec![],
            layers: vec![],
            offload: Offload::NOTHING,
            wired: false,
            far: false,
            ranks: ranks.into(),
            steps: STEPS,
        }
    }

    /// The same on one device.
    fn alone(&self) -> Case {
        Case { ranks: vec![(self.sequences(), 3)], offload: Offload::NOTHING, ..self.clone() }
    }

    /// A pipeline whose stages begin at these layers, up to the last of all.
    fn pipeline(config: &ModelConfig, layers: &[u64], sequences: u64, micro_batch: u32) -> Case {
        let config = ModelConfig { layers: layers[layers.len() - 1], ..config.clone() };
        let ranks = vec![(sequences, micro_batch); layers.len() - 1];
        Case { sharing: Sharing::Layers, layers: layers.into(), ..Case::new(&config, &ranks) }
    }

    fn sequences(&self) -> u64 {
        self.own(self.ranks.len() - 1).end
    }

    fn share(&self, rank: usize) -> Share {
        Share {
            sharing: (self.ranks.len() > 1).then_some(self.sharing),
            rank: rank as u32,
            ranks: self.ranks.len() as u32,
            first_sequence: self.own(rank).start,
            state: self.parts.clone(),
            layers: self.layers.clone(),
            micro_batches: if self.sharing == Sharing::State { self.together() } else { 0 },
        }
    }

    /// Micro-batches of whoever has most of them.
    fn together(&self) -> u64 {
        self.ranks.iter().map(|&(own, at_once)| micro_batches(own, at_once)).max().expect("a team has a device")
    }

    fn schedule(&self, rank: usize) -> Schedule {
        let (own, at_once) = self.ranks[rank];
        self.share(rank).schedule(self.share(rank).micro_batches_of(own, at_once) as u32)
    }

    /// The sequences of a rank in the step.
    fn own(&self, rank: usize) -> Range<u64> {
        if self.sharing == Sharing::Layers {
            return 0..self.ranks[rank].0;
        }
        let first = self.ranks[..rank].iter().map(|rank| rank.0).sum();
        first..first + self.ranks[rank].0
    }

    /// What the planner is asked about a rank.
    fn question<'a>(&'a self, device: &'a DeviceSpec, rank: usize) -> Question<'a> {
        let (state, own) = (self.state, self.own(rank));
        Question {
            config: &self.config,
            precision: self.precision,
            sequence: SEQUENCE,
            sequences: own.end - own.start,
            source: Source::Random { seed: 3 },
            optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }),
            evaluate: true,
            generation: Some(Generation { capacity: 8, chunk: 3 }),
            device,
            host: HostSpec { budget: Bytes::gib(2), memory_bytes_per_second: 1e10, file: FileSpec::NONE },
            lossy: self.lossy.clone(),
            pins: Pins::default(),
            rungs: vec![],
            share: self.share(rank),
        }
    }

    fn answer(&self, rank: usize) -> Answer {
        let device = device(self.kind);
        let question = self.question(&device, rank);
        let layers = question.share.own_layers(self.config.layers);
        let levels = RecomputeLevel::ALL.iter().rev().cycle();
        let recompute = levels.skip(rank).take((layers.end - layers.start) as usize).copied().collect();
        let recipe = Recipe { micro_batch: self.ranks[rank].1, recompute, offload: self.offload, rungs: vec![] };
        let answer = plan_of(&question, &recipe);
        check(&answer.set).unwrap_or_else(|malformed| panic!("{recipe}: {malformed}"));
        answer
    }

    fn open(&self, answer: &Answer) -> Box<dyn Device> {
        let (set, placement) = (answer.set.clone(), answer.layout.placement.clone());
        match self.kind {
            DeviceKind::Virtual => {
                let what = Virtual {
                    scratch: None,
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

    /// How each rank meets the others.
    fn transports(&self) -> Vec<Arc<dyn Transport>> {
        let ranks = self.ranks.len();
        if !self.wired {
            let transport = InProcess::between(ranks as u32);
            return (0..ranks).map(|_| -> Arc<dyn Transport> { transport.clone() }).collect();
        }
        let mut wires: Vec<Vec<Option<Arc<dyn Wire>>>> = vec![vec![None; ranks]; ranks];
        for (one, other) in (0..ranks).flat_map(|one| (0..one).map(move |other| (one, other))) {
            let (here, there) = UnixStream::pair().expect("sockets are given");
            wires[one][other] = Some(Arc::new(here));
            wires[other][one] = Some(Arc::new(there));
        }
        let epoch = Instant::now();
        // Small rounds: a collective of these models takes many.
        let wired = |(rank, wires)| -> Arc<dyn Transport> {
            Wired::in_rounds(rank, wires, epoch, 5000).expect("threads are given")
        };
        (0..).zip(wires).map(wired).collect()
    }

    /// Engines of which all but the first have their devices behind channels, all in their seats.
    fn spread(&self, answers: &[Answer], silence: Duration) -> (Vec<Engine>, Vec<Arc<dyn Transport>>) {
        let vocab = self.config.vocab;
        let listens = || TcpWires::listen("127.0.0.1:0").expect("a port");
        let far = |(rank, answer): (usize, &Answer)| {
            let (asked, asks) = UnixStream::pair().expect("sockets are given");
            let (beside, aside) = UnixStream::pair().expect("sockets are given");
            let host = Host::new(listens()).expect("a thread");
            std::thread::spawn(move || serve(&host, asked, beside));
            let spec = DeviceSpec { name: format!("host{rank}/virtual:a"), ..device(self.kind) };
            let connection = Connection::new(&spec.name, Arc::new(Streams::new(asks, aside))).expect("a thread");
            Engine::open_far(connection, answer.clone(), self.precision, &spec, None, silence, SEQUENCE, vocab)
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
            std::iter::once(first).chain(answers.iter().enumerate().skip(1).map(far)).collect();
        let member = |engine: &Engine| engine.far().map_or(Member::Here, |connection| Member::Far(connection.clone()));
        let members: Vec<Member> = engines.iter().map(member).collect();
        let gathered = spread::Spread::gather(&members, &Driver(listens()), 1, false);
        let Gathered { transport, seats } = gathered.map_err(|(_, error)| error).expect("all come");
        for (engine, seat) in engines.iter_mut().zip(seats) {
            engine.sit(seat).expect("it can work in a team");
        }
        (engines, vec![transport])
    }

    /// An engine for each rank, in their seats, with fresh weights.
    fn team(&self) -> Team {
        let answers: Vec<Answer> = (0..self.ranks.len()).map(|rank| self.answer(rank)).collect();
        let schedules: Vec<Schedule> = (0..self.ranks.len()).map(|rank| self.schedule(rank)).collect();
        let ranks: Vec<_> = answers.iter().map(|answer| &answer.set).zip(&schedules).collect();
        agree(&ranks).expect("all ranks agree");
        for program in ["load", "fresh", "evaluate", "save", "checkpoint", "restore"] {
            let calls = vec![Call { program: program.into(), micro_batch: 0, last: true }];
            let schedule = Schedule { calls };
            let ranks: Vec<_> = answers.iter().map(|answer| (&answer.set, &schedule)).collect();
            agree(&ranks).unwrap_or_else(|disagreement| panic!("{program}: {disagreement}"));
        }
        let engine = |answer: &Answer, rank: usize, transport: &Arc<dyn Transport>| {
            let mut device = self.open(answer);
            device
                .join(Seat { rank: rank as u32, transport: transport.clone(), nccl: false })
                .expect("it can work in a team");
            let recipe = answer.plan.recipe.clone();
            Engine::new(device, &answer.set, self.precision, recipe, SEQUENCE, self.config.vocab)
        };
        let (engines, transports) = if self.far {
            self.spread(&answers, Duration::from_secs(60))
        } else {
            let transports = self.transports();
            let ranks = answers.iter().enumerate().zip(&transports);
            (ranks.map(|((rank, answer), transport)| engine(answer, rank, transport)).collect(), transports)
        };
        let sets = answers.into_iter().map(|answer| answer.set).collect();
        let mut team = Team { case: self.clone(), engines, transports, sets };
        for program in ["load", "fresh"] {
            team.each(|_, engine| engine.run(program).expect("nobody gives up"));
        }
        team
    }

    /// What is left of a run.
    fn run(&self) -> Left {
        let mut team = self.team();
        let losses: Vec<StepLoss> = (1..=self.steps).map(|step| team.step(step)).collect();
        Left { losses, ranks: team.left() }
    }
}

struct Team {
    case: Case,
    engines: Vec<Engine>,
    transports: Vec<Arc<dyn Transport>>,
    sets: Vec<ProgramSet>,
}

type Weights = BTreeMap<(String, u32), Vec<u8>>;

/// The losses of all steps, and each rank's weights and state.
struct Left {
    losses: Vec<StepLoss>,
    ranks: Vec<Weights>,
}

impl Team {
    /// Work of all ranks at the same time.
    fn each<R: Send>(&mut self, work: impl Fn(usize, &mut Engine) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let work = &work;
            let engines = self.engines.iter_mut().enumerate();
            let threads: Vec<_> = engines.map(|(rank, engine)| scope.spawn(move || work(rank, engine))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
        })
    }

    fn gradients(&mut self, step: u64) -> Vec<Result<StepLoss, DeviceError>> {
        let case = self.case.clone();
        let vocab = case.config.vocab;
        let labelled_tokens = rows(0..case.sequences(), vocab, step).labelled_tokens();
        let input = StepInput { step, learning_rate: 1e-2, betas: [0.9, 0.95], clip_norm: 0.3, labelled_tokens };
        let at_least = |rank| case.share(rank).micro_batches.max(1);
        self.each(|rank, engine| engine.gradients(&mut rows(case.own(rank), vocab, step), &input, at_least(rank)))
    }

    /// A step of all, who have the same loss and norm.
    fn step(&mut self, step: u64) -> StepLoss {
        let losses: Vec<StepLoss> =
            self.gradients(step).into_iter().map(|loss| loss.expect("nobody gives up")).collect();
        assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
        self.each(|_, engine| engine.update().expect("nobody gives up"));
        losses[0]
    }

    /// Each rank's weights and state, wherever they wait, by their names in plain Programs.
    fn left(&mut self) -> Vec<Weights> {
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
                let beside = set.find(&format!("{base}.host")).map_or(0, |home| set.tensor(home).slots);
                for slot in 0..tensor.slots {
                    let mut bytes = vec![0; tensor.bytes() as usize];
                    engine.device().read(TensorId(number as u32), slot, &mut bytes);
                    let slot = if base == tensor.name { slot + beside } else { slot };
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
struct Files(BTreeMap<String, Vec<u8>>);

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
    /// What a save and a checkpoint leave: rank 0 writes, the others take part where they hold a part; or each stage what
    /// is its own.
    fn files(&mut self) -> Files {
        let (stages, whole) = (self.case.sharing == Sharing::Layers, self.case.sharing == Sharing::Batch);
        let written = self.each(|rank, engine| {
            let mut files = Files::default();
            for program in ["save", "checkpoint"] {
                match rank {
                    _ if stages => engine.move_files(program, &mut files).expect("nobody gives up"),
                    0 => engine.move_files(program, &mut files).expect("nobody gives up"),
                    _ if whole => {}
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

    fn restore(&mut self, files: &Files) {
        self.each(|_, engine| engine.move_files("restore", &mut files.clone()).expect("nobody gives up"));
    }

    /// The loss of some rows, of which every rank has as many micro-batches.
    fn evaluated(&mut self) -> f64 {
        let case = self.case.clone();
        let times = case.share(0).micro_batches.max(1);
        let sums = self.each(|rank, engine| {
            let (own, at_once) = (case.own(rank), u64::from(case.ranks[rank].1));
            let at_once = if times > 1 { at_once } else { own.end - own.start };
            let mut sum = Evaluated::default();
            for first in (0..times).map(|time| own.start + time * at_once) {
                let mut rows = rows(first.min(own.end)..(first + at_once).min(own.end), case.config.vocab, 9);
                sum.add(engine.evaluate(&mut rows).expect("nobody gives up"));
            }
            sum.loss_sum
        });
        sums.iter().sum()
    }
}

impl Team {
    /// Logits after a prompt, and after one token more.
    fn generated(&mut self) -> Vec<f64> {
        let extend = |team: &mut Team, tokens: &[i32], length| {
            let all = team.each(|_, engine| engine.extend(tokens, length).expect("nobody gives up"));
            let found: Vec<Vec<f64>> = all.into_iter().filter(|logits| !logits.is_empty()).collect();
            assert!(found.iter().all(|logits| *logits == found[0]));
            found[0].clone()
        };
        let prompt = extend(self, &[5, 3, 1, 4, 2], 0);
        [prompt, extend(self, &[7], 5)].concat()
    }
}

/// What a team comes to on some rows, and what one device does that is handed what the team saves: in the same order, as many
/// rows at once, from the same numbers.
fn is_evaluated_beside_it_with_the_same_bits(case: &Case) {
    let mut team = case.team();
    team.step(1);
    let files = team.files();
    let at_once = case.ranks.iter().map(|rank| rank.1).max().expect("a team has a device");
    let recompute = vec![RecomputeLevel::Nothing; case.config.layers as usize];
    let recipe = Recipe { micro_batch: at_once, recompute, offload: Offload::NOTHING, rungs: vec![] };
    let device = device(case.kind);
    let question = evaluating(&case.question(&device, 0));
    let answer = plan_of(&Question { sequences: u64::from(at_once), ..question }, &recipe);
    check(&answer.set).unwrap_or_else(|malformed| panic!("{recipe}: {malformed}"));
    let opened = case.open(&answer);
    let mut beside = Engine::new(opened, &answer.set, case.precision, recipe, SEQUENCE, case.config.vocab);
    beside.run("load").expect("nothing is read for it here");
    let mut evaluated = |files: &Files| {
        beside.move_files("renew", &mut files.clone()).expect("all that it takes was saved");
        let staged = case.sharing == Sharing::Layers;
        let cuts = if staged { &case.ranks[..1] } else { &case.ranks[..] };
        let sums = cuts.iter().enumerate().map(|(rank, (_, at_once))| {
            let (own, at_once) = (case.own(rank), u64::from(*at_once));
            let mut sum = Evaluated::default();
            for first in own.clone().step_by(at_once.max(1) as usize) {
                let mut rows = rows(first..(first + at_once).min(own.end), case.config.vocab, 9);
                sum.add(beside.evaluate(&mut rows).expect("it evaluates"));
            }
            sum.loss_sum
        });
        sums.sum::<f64>()
    };
    let first = evaluated(&files);
    assert_eq!(first.to_bits(), team.evaluated().to_bits(), "{first}");
    // And again, when they have gone on.
    team.step(2);
    let files = team.files();
    let second = evaluated(&files);
    assert_eq!(second.to_bits(), team.evaluated().to_bits(), "{second}");
    assert_ne!(first, second);
}

#[test]
fn a_device_beside_a_team_evaluates_with_the_bits_of_the_team() {
    let _watchdog = Watchdog::new();
    for (number, config) in models().iter().enumerate() {
        let kind = if number % 2 == 0 { DeviceKind::Cpu } else { DeviceKind::Virtual };
        for precision in [DType::F32, DType::Bf16] {
            let alone = Case { kind, precision, ..Case::new(config, &[(5, 2)]) };
            is_evaluated_beside_it_with_the_same_bits(&alone);
            let batch = Case { kind, precision, ..Case::new(config, &[(5, 2), (3, 3), (1, 1)]) };
            is_evaluated_beside_it_with_the_same_bits(&batch);
            is_evaluated_beside_it_with_the_same_bits(&Case { lossy: lora(), ..batch.clone() });
            let ranks = vec![(4, 2), (5, 3), (2, 1)];
            let state = Case { sharing: Sharing::State, parts: vec![700, 24, 300], ranks, ..batch };
            is_evaluated_beside_it_with_the_same_bits(&state);
            let ranks = vec![(0, 0), (5, 3), (3, 2)];
            is_evaluated_beside_it_with_the_same_bits(&Case { ranks, ..state });
        }
        if config.layers > 1 {
            is_evaluated_beside_it_with_the_same_bits(&Case::pipeline(config, &[0, 1, config.layers], 6, 2));
        }
    }
    let coarse = Lossy { base: Base::Nf4, ..lora() };
    let case = Case { lossy: coarse, precision: DType::Bf16, ..Case::new(&models()[1], &[(4, 2), (2, 2)]) };
    is_evaluated_beside_it_with_the_same_bits(&case);
}

/// The numbers in files, by the name of the tensor; codes of 8-bit state are left out, which small differences turn over.
fn stored(set: &ProgramSet, files: &Files) -> BTreeMap<String, Vec<f64>> {
    let values = files.0.iter().filter_map(|(name, bytes)| {
        let dtype = set.tensor(set.find(name)?).dtype;
        (dtype != DType::U8).then(|| match dtype {
            DType::F32 => (name.clone(), executor::real_values(DType::F32, bytes)),
            dtype => (name.clone(), numbers(dtype, bytes)),
        })
    });
    values.collect()
}

/// What one device comes to.
struct Alone {
    losses: Vec<StepLoss>,
    evaluated: f64,
    generated: Vec<f64>,
    set: ProgramSet,
    files: Files,
}

impl Alone {
    fn of(case: &Case) -> Alone {
        let mut alone = case.alone().team();
        let losses = (1..=case.steps).map(|step| alone.step(step)).collect();
        let (evaluated, generated, files) = (alone.evaluated(), alone.generated(), alone.files());
        Alone { losses, evaluated, generated, files, set: alone.sets.swap_remove(0) }
    }
}

/// State in parts, and files that are those of one device.
fn is_one_run_in_parts(case: &Case) {
    is_in_parts(&Alone::of(case), case);
}

/// The same of a run of which it is known what one device comes to: whatever waits, it is that.
fn is_in_parts(alone: &Alone, case: &Case) {
    let Case { config, precision, lossy, ranks, parts, offload, .. } = case;
    let what = format!(
        "{}, {precision}, {:?}, {ranks:?}, {parts:?}{:?}, {offload}",
        config.model_type, lossy.method, case.layers
    );
    let mut team = case.team();
    let tolerance = match (case.precision, case.state) {
        (DType::F64, AdamState::Full) => 1e-9,
        (DType::Bf16, _) => 3e-2,
        _ => 1e-4,
    };
    for (step, one) in (1..=case.steps).zip(&alone.losses) {
        let many = team.step(step);
        let apart = ((one.loss - many.loss) / one.loss).abs().max(((one.norm - many.norm) / one.norm).abs());
        assert!(apart < tolerance, "step {step}: {one:?} {many:?}: {what}");
    }
    let (one, many) = (alone.evaluated, team.evaluated());
    assert!(((one - many) / one).abs() < tolerance, "{one} {many}: {what}");
    for (one, many) in alone.generated.iter().zip(team.generated()) {
        assert!((one - many).abs() <= tolerance * one.abs().max(1.0), "logits {one} {many}: {what}");
    }
    let (one, many) = (&alone.files, team.files());
    let sizes = |files: &Files| files.0.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect::<Vec<_>>();
    assert_eq!(sizes(one), sizes(&many), "{what}");
    let (first, second) = (stored(&alone.set, one), stored(&alone.set, &many));
    assert!(first.keys().eq(second.keys()) && !first.is_empty());
    for (name, values) in &first {
        for (a, b) in values.iter().zip(&second[name]) {
            assert!((a - b).abs() <= tolerance * a.abs().max(1.0), "{name}: {a} {b}: {what}");
        }
    }
    // What goes on from the files has the bits of what went on without them.
    let mut again = case.team();
    again.restore(&many);
    assert!(again.files() == many, "{what}");
    assert_eq!(again.step(case.steps + 1), team.step(case.steps + 1), "{what}");
}

/// How a team goes over to other shares.
#[derive(Clone, Copy, Debug)]
enum Over {
    /// Everybody keeps what it holds, and computes other sequences.
    Adopting,
    /// Everybody holds something else.
    ByFiles,
}

/// Goes over to other shares after some steps: not a bit changes on the way, and what comes of it is what comes of those
/// who stayed as they were.
fn goes_over(before: &Case, over: Over, after: &Case) {
    let (mut stays, mut goes) = (before.team(), before.team());
    for step in 1..=STEPS {
        assert_eq!(stays.step(step), goes.step(step));
    }
    let files = goes.files();
    match over {
        Over::Adopting => {
            let answers: Vec<Answer> = (0..after.ranks.len()).map(|rank| after.answer(rank)).collect();
            goes.sets = answers.iter().map(|answer| answer.set.clone()).collect();
            goes.each(|rank, engine| engine.adopt(answers[rank].clone()).expect("there is room"));
            goes.case = after.clone();
        }
        Over::ByFiles => {
            goes = after.team();
            goes.restore(&files);
        }
    }
    assert!(goes.files() == files, "{over:?}: no bit changes on the way");
    for step in STEPS + 1..=2 * STEPS {
        let (one, other) = (stays.step(step), goes.step(step));
        assert!(((one.loss - other.loss) / one.loss).abs() < 1e-9, "{over:?}, step {step}: {one:?} {other:?}");
    }
    let (one, other) = (stays.files(), goes.files());
    let (one, other) = (stored(&stays.sets[0], &one), stored(&stays.sets[0], &other));
    assert!(one.keys().eq(other.keys()) && !one.is_empty());
    for (name, values) in &one {
        for (a, b) in values.iter().zip(&other[name]) {
            assert!((a - b).abs() <= 1e-9 * a.abs().max(1.0), "{over:?}, {name}: {a} {b}");
        }
    }
}

#[test]
fn shares_that_are_drawn_anew_on_the_way_change_nothing() {
    let _watchdog = Watchdog::new();
    let config = ModelConfig { layers: 3, ..models().swap_remove(3) };
    // Sequences go from one to the other; parts of the state stay.
    let state = |ranks: &[(u64, u32)]| Case {
        sharing: Sharing::State,
        parts: vec![700, 324],
        kind: DeviceKind::Virtual,
        ..Case::new(&config, ranks)
    };
    goes_over(&state(&[(4, 2), (4, 2)]), Over::Adopting, &state(&[(7, 7), (1, 1)]));
    // All of them, and some come back.
    goes_over(&state(&[(4, 2), (4, 2)]), Over::Adopting, &state(&[(0, 0), (8, 3)]));
    goes_over(&state(&[(8, 4), (0, 0)]), Over::Adopting, &state(&[(5, 3), (3, 2)]));
    // They go, too.
    let other_parts = Case { parts: vec![1000, 24], ..state(&[(6, 3), (2, 1)]) };
    goes_over(&state(&[(4, 4), (4, 4)]), Over::ByFiles, &other_parts);
    // A layer goes to another stage.
    let pipeline = |layers: &[u64]| Case { kind: DeviceKind::Virtual, ..Case::pipeline(&config, layers, 6, 2) };
    goes_over(&pipeline(&[0, 1, 3]), Over::ByFiles, &pipeline(&[0, 2, 3]));
}

/// The same fifty steps of eight sequences in every way that there is to share them out.
fn fifty_steps(precision: DType) -> Vec<(&'static str, Case)> {
    let config = ModelConfig { layers: 3, ..models().swap_remove(3) };
    let unequal = Case::new(&config, &[(6, 3), (2, 1)]);
    let ways = vec![
        ("one device", unequal.alone()),
        ("one device, a sequence at a time", Case { ranks: vec![(8, 1)], ..unequal.alone() }),
        ("a batch shared by 2 unequal devices", unequal.clone()),
        ("a batch shared by 8 equal devices", Case::new(&config, &[(1, 1); 8])),
        ("state in 2 unequal parts", Case { sharing: Sharing::State, parts: vec![700, 324], ..unequal.clone() }),
        (
            "state in 2 unequal parts, one of whose devices computes nothing",
            Case { sharing: Sharing::State, parts: vec![324, 700], ranks: vec![(8, 3), (0, 0)], ..unequal },
        ),
        ("a pipeline of 2 unequal stages", Case::pipeline(&config, &[0, 1, 3], 8, 2)),
    ];
    ways.into_iter().map(|(way, case)| (way, Case { precision, steps: 50, ..case })).collect()
}

/// How far a way is from one device over all steps: the largest distance of a loss, of a norm, and of a number that is saved
/// after the last.
struct Spread {
    way: &'static str,
    losses: f64,
    norms: f64,
    numbers: f64,
}

fn spread(precision: DType) -> Vec<Spread> {
    let ways = fifty_steps(precision);
    let set = ways[0].1.answer(0).set;
    let trained = |case: &Case| {
        let mut team = case.team();
        let losses: Vec<StepLoss> = (1..=case.steps).map(|step| team.step(step)).collect();
        (losses, stored(&set, &team.files()))
    };
    let (losses, numbers) = trained(&ways[0].1);
    assert!(losses[49].loss < 0.9 * losses[0].loss, "something is learned: {losses:?}");
    let apart = |(a, b): (f64, f64)| (a - b).abs() / a.abs().max(1.0);
    let largest = |pairs: &mut dyn Iterator<Item = (f64, f64)>| pairs.map(apart).fold(0.0, f64::max);
    let of = |&(way, ref case): &(&'static str, Case)| {
        let (others, other_numbers) = trained(case);
        assert!(numbers.keys().eq(other_numbers.keys()) && !numbers.is_empty(), "{way}");
        let steps = || losses.iter().zip(&others);
        let pairs = numbers.iter().flat_map(|(name, values)| values.iter().copied().zip(other_numbers[name].clone()));
        Spread {
            way,
            losses: largest(&mut steps().map(|(one, other)| (one.loss, other.loss))),
            norms: largest(&mut steps().map(|(one, other)| (one.norm, other.norm))),
            numbers: largest(&mut { pairs }),
        }
    };
    ways[1..].iter().map(of).collect()
}

#[test]
fn fifty_steps_are_the_same_however_they_are_shared_out() {
    let _watchdog = Watchdog::new();
    for Spread { way, losses, norms, numbers } in spread(DType::F64) {
        println!("f64, {way}: losses {losses:.1e}, norms {norms:.1e}, weights and state {numbers:.1e} apart");
        assert!(losses.max(norms).max(numbers) < 1e-9, "{way}: {losses:e}, {norms:e}, {numbers:e}");
    }
}

/// What is printed stands in `docs/measured/teams.md`. At this rate a step magnifies what rounding leaves, whoever takes it.
#[test]
fn fifty_steps_in_f32_are_no_further_apart_than_sums_in_another_order() {
    let _watchdog = Watchdog::new();
    let ways = spread(DType::F32);
    for Spread { way, losses, norms, numbers } in &ways {
        println!("f32, {way}: losses {losses:.1e}, norms {norms:.1e}, weights and state {numbers:.1e} apart");
        assert!(losses.max(*numbers) < 1e-2 && *norms < 1e-1, "{way}: {losses:e}, {norms:e}, {numbers:e}");
    }
}

#[test]
fn state_in_unequal_parts_is_the_run_of_one_device_and_writes_its_files() {
    let _watchdog = Watchdog::new();
    let shares = [
        (&[(5, 3), (2, 1)][..], vec![700, 324]),
        (&[(4, 2), (3, 2), (2, 1)], vec![100, 24, 900]),
        (&[(3, 3), (4, 4)], vec![0, 1024]),
        // Who computes nothing writes the files, or has most of the state.
        (&[(0, 0), (4, 2), (3, 2)], vec![100, 24, 900]),
        (&[(7, 3), (0, 0)], vec![24, 1000]),
    ];
    let methods =
        [(Lossy::default(), AdamState::Full), (lora(), AdamState::Full), (Lossy::default(), AdamState::Blockwise8)];
    for config in models() {
        for (lossy, state) in methods.clone() {
            for kind in [DeviceKind::Cpu, DeviceKind::Virtual] {
                let mut alone = BTreeMap::new();
                for (ranks, parts) in shares.clone() {
                    let (lossy, sharing) = (lossy.clone(), Sharing::State);
                    let case = Case { kind, lossy, state, sharing, parts, ..Case::new(&config, ranks) };
                    is_in_parts(alone.entry(case.sequences()).or_insert_with(|| Alone::of(&case)), &case);
                }
            }
        }
    }
}

#[test]
fn a_pipeline_of_unequal_stages_is_the_run_of_one_device_and_writes_its_files() {
    let _watchdog = Watchdog::new();
    // More micro-batches than stages, one that does not fill, fewer than stages.
    for (layers, sequences, micro_batch) in
        [(&[0, 3, 5][..], 5, 2), (&[0, 1, 2, 5], 7, 1), (&[0, 2, 4, 5], 4, 2), (&[0, 1, 2], 1, 1)]
    {
        for config in models() {
            for (lossy, state) in [
                (Lossy::default(), AdamState::Full),
                (lora(), AdamState::Full),
                (Lossy::default(), AdamState::Blockwise8),
            ] {
                let case = Case { lossy, state, ..Case::pipeline(&config, layers, sequences, micro_batch) };
                is_one_run_in_parts(&case);
                is_one_run_in_parts(&Case { kind: DeviceKind::Virtual, ..case });
            }
        }
    }
}

#[test]
fn a_pipeline_goes_with_masters_and_coarse_bases() {
    let _watchdog = Watchdog::new();
    let nf4 = Lossy { base: Base::Nf4, ..lora() };
    for config in models() {
        let case = Case::pipeline(&config, &[0, 1, 4], 5, 1);
        is_one_run_in_parts(&Case { precision: DType::Bf16, ..case.clone() });
        is_one_run_in_parts(&Case { precision: DType::F32, lossy: nf4.clone(), ..case });
    }
}

#[test]
fn a_pipeline_goes_with_whatever_waits_on_the_host_and_no_bit_changes() {
    let _watchdog = Watchdog::new();
    let none = Offload::NOTHING;
    // More than a stage has: all of them.
    let all = 4;
    let state = Offload { optimizer: all, ..none };
    // More micro-batches than stages, so that inputs of several wait at once; and a single one.
    for (layers, sequences, micro_batch) in [(&[0, 1, 4][..], 5, 1), (&[0, 2, 3, 5], 7, 2), (&[0, 1, 3], 2, 2)] {
        for config in models() {
            let kind = DeviceKind::Virtual;
            let plain = Case { kind, ..Case::pipeline(&config, layers, sequences, micro_batch) };
            let alone = Alone::of(&plain);
            let in_f32 = Case { precision: DType::F32, ..plain.clone() }.run();
            for offload in [
                Offload { optimizer: 1, ..none },
                state,
                Offload { update: true, ..state },
                Offload { gradients: 1, weights: 1, inputs: 1, ..state },
                Offload { gradients: all, weights: all, inputs: all, update: true, ..state },
                Offload { inputs: all, embedding: true, head: true, ..none },
                Offload { gradients: all, weights: all, inputs: all, embedding: true, head: true, ..state },
            ] {
                let case = Case { offload, ..plain.clone() };
                is_in_parts(&alone, &case);
                let waits = Case { precision: DType::F32, ..case }.run();
                assert_eq!(in_f32.losses, waits.losses, "{offload}");
                assert!(in_f32.ranks == waits.ranks, "{}, {offload}, {layers:?}", config.model_type);
            }
        }
    }
}

#[test]
fn a_tied_table_of_many_pieces_waits_on_the_host_at_both_ends_of_a_pipeline() {
    let _watchdog = Watchdog::new();
    let config = ModelConfig { vocab: 40_000, ..models().swap_remove(0) };
    let offload = Offload { optimizer: 4, gradients: 4, embedding: true, ..Offload::NOTHING };
    let case = Case { kind: DeviceKind::Virtual, offload, ..Case::pipeline(&config, &[0, 1, 3], 3, 1) };
    is_one_run_in_parts(&case);
    let case = Case { precision: DType::F32, ..case };
    let (plain, waits) = (Case { offload: Offload::NOTHING, ..case.clone() }.run(), case.run());
    assert!(plain.losses == waits.losses && plain.ranks == waits.ranks);
}

#[test]
fn a_stage_keeps_the_activations_of_the_micro_batches_in_flight_and_no_more() {
    let config = &models()[3];
    for (sequences, in_flight) in [(1, [1, 1, 1]), (2, [2, 2, 1]), (9, [3, 2, 1])] {
        let case = Case::pipeline(config, &[0, 2, 4, 6], sequences, 1);
        for (rank, in_flight) in in_flight.into_iter().enumerate() {
            let set = case.answer(rank).set;
            let slots = |name: &str| set.tensor(set.find(name).expect("it is there")).slots;
            assert_eq!(slots("train.hidden"), 3 * in_flight, "rank {rank}");
            assert_eq!(slots("train.positions"), in_flight, "rank {rank}");
            assert_eq!(slots("train.stream.gradient"), 1);
            assert_eq!(slots("evaluate.hidden"), 3);
        }
    }
}

#[test]
fn a_rank_holds_its_part_of_the_state_and_of_what_is_gathered_two_layers() {
    let config = ModelConfig { layers: 16, ..models().swap_remove(3) };
    let case = Case { sharing: Sharing::State, parts: vec![924, 100], ..Case::new(&config, &[(2, 1), (2, 1)]) };
    let held = |answer: &Answer| answer.layout.device.persistent_bytes as f64;
    let (alone, most, least) = (case.alone().answer(0), case.answer(0), case.answer(1));
    let table = alone.set.tensor(alone.set.find("rope_table").unwrap()).bytes() as f64;
    let parts = (held(&most) + held(&least) - 2.0 * table) / (held(&alone) - table);
    assert!((0.98..1.15).contains(&parts), "the parts are {parts} of the whole");
    assert!(held(&least) < 0.25 * held(&alone), "{} of {}", held(&least), held(&alone));
    for tensor in least.set.tensors.iter().filter(|tensor| tensor.name.ends_with(".whole")) {
        assert!(tensor.slots <= 2 && tensor.lifetime == Lifetime::Transient, "{}", tensor.name);
    }
}

#[test]
fn who_computes_nothing_has_its_part_of_the_state_and_what_is_gathered_and_no_activation() {
    let config = ModelConfig { layers: 16, ..models().swap_remove(3) };
    let case = Case { sharing: Sharing::State, parts: vec![512, 512], ..Case::new(&config, &[(4, 2), (0, 0)]) };
    let (computes, holds) = (case.answer(0), case.answer(1));
    assert!(holds.layout.device.persistent_bytes <= computes.layout.device.persistent_bytes);
    assert!(holds.layout.device.bytes < computes.layout.device.bytes);
    for (tensor, places) in holds.set.tensors.iter().zip(&holds.layout.placement.offsets) {
        let stands = places.iter().any(Option::is_some);
        assert!(!stands || tensor.category != Category::Activation, "{}", tensor.name);
    }
    let passes = ["forward", "backward", "evaluate", "prefill", "decode"];
    let ops = passes.iter().flat_map(|name| holds.set.program(name).expect("it takes part").trace());
    for (op, _) in ops {
        let zeros = matches!(op.kind, OpKind::Fill { value: 0.0, .. });
        assert!(zeros || matches!(op.kind, OpKind::CollectiveStart(_) | OpKind::CollectiveWait(_)), "{}", op.name());
    }
}

#[test]
fn state_in_parts_goes_with_masters_coarse_bases_and_what_waits_on_the_host() {
    let _watchdog = Watchdog::new();
    let none = Offload::NOTHING;
    let nf4 = Lossy { base: Base::Nf4, ..lora() };
    for config in models() {
        let layers = config.layers as u32;
        let sharing = Sharing::State;
        let case = Case { sharing, parts: vec![300, 724], ..Case::new(&config, &[(5, 3), (2, 1)]) };
        is_one_run_in_parts(&Case { precision: DType::Bf16, ..case.clone() });
        is_one_run_in_parts(&Case { precision: DType::F32, lossy: nf4.clone(), ..case.clone() });
        let holds = Case { ranks: vec![(0, 0), (7, 3)], ..case.clone() };
        is_one_run_in_parts(&Case { precision: DType::Bf16, lossy: nf4.clone(), ..holds.clone() });
        let kind = DeviceKind::Virtual;
        let alone = Alone::of(&Case { kind, ..case.clone() });
        for offload in [
            Offload { optimizer: layers, ..none },
            Offload { optimizer: layers, update: true, ..none },
            Offload { optimizer: layers, gradients: layers, weights: layers.div_ceil(2), ..none },
            Offload { inputs: layers, embedding: true, head: true, ..none },
        ] {
            is_in_parts(&alone, &Case { offload, kind, ..case.clone() });
            is_in_parts(&alone, &Case { offload, kind, ..holds.clone() });
        }
    }
}

fn numbers(precision: DType, bytes: &[u8]) -> Vec<f64> {
    executor::real_values(precision, bytes)
}

/// The largest distance between two runs, in losses, norms and every number that stays.
fn distance(precision: DType, a: &Left, b: &Left) -> f64 {
    let apart = |a: f64, b: f64| (a - b).abs() / a.abs().max(1.0);
    let losses = a.losses.iter().zip(&b.losses);
    let losses = losses.map(|(a, b)| apart(a.loss, b.loss).max(apart(a.norm, b.norm)));
    let (a, b) = (&a.ranks[0], &b.ranks[0]);
    assert!(a.keys().eq(b.keys()), "{:?} {:?}", a.keys(), b.keys());
    let values = a.iter().flat_map(|(key, bytes)| {
        numbers(precision, bytes).into_iter().zip(numbers(precision, &b[key])).collect::<Vec<_>>()
    });
    losses.chain(values.map(|(a, b)| apart(a, b))).fold(0.0, f64::max)
}

fn is_one_run(case: &Case) {
    let (alone, team) = (case.alone().run(), case.run());
    let what = format!("{}, {:?}, {:?}, {}", case.config.model_type, case.lossy.method, case.ranks, case.offload);
    let apart = distance(case.precision, &alone, &team);
    assert!(apart < 1e-9, "{apart:e} apart: {what}");
    for (rank, weights) in team.ranks.iter().enumerate() {
        let differs = weights.iter().find(|(key, bytes)| team.ranks[0].get(*key) != Some(bytes));
        assert!(differs.is_none(), "rank {rank} differs in {:?}: {what}", differs.map(|(key, _)| key));
    }
    assert!(alone.losses.iter().all(|step| step.norm > 0.0), "something is learned: {:?}", alone.losses);
}

#[test]
fn a_batch_that_is_shared_out_is_the_run_of_one_device() {
    let _watchdog = Watchdog::new();
    // Sequences that do not divide, micro-batches that do not fill.
    for ranks in [&[(5, 2), (2, 2)][..], &[(4, 3), (2, 1), (1, 1)], &[(1, 1), (7, 7)]] {
        for config in models() {
            for lossy in [Lossy::default(), lora()] {
                is_one_run(&Case { lossy, ..Case::new(&config, ranks) });
            }
        }
    }
}

#[test]
fn a_shared_batch_goes_with_whatever_waits_on_the_host() {
    let _watchdog = Watchdog::new();
    let none = Offload::NOTHING;
    for config in models() {
        let layers = config.layers as u32;
        for offload in [
            Offload { optimizer: layers, gradients: layers.div_ceil(2), ..none },
            Offload { optimizer: layers, gradients: layers, weights: layers, inputs: layers, ..none },
            Offload { embedding: true, head: true, ..none },
            Offload { optimizer: layers, gradients: layers, weights: layers, embedding: true, update: true, ..none },
        ] {
            for ranks in [[(5, 2), (2, 2)], [(2, 2), (1, 1)]] {
                is_one_run(&Case { offload, kind: DeviceKind::Virtual, ..Case::new(&config, &ranks) });
            }
        }
    }
}

/// Refuses one op, once.
struct Refuses {
    at: u32,
    one_at_a_time: bool,
    calls: u32,
}

impl Observer for Refuses {
    fn before(&mut self, tick: u32, op: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        self.calls += 1;
        if self.calls == self.at {
            return Err(DeviceError::Refused { program: "a step".into(), tick, op: op.name() });
        }
        Ok(())
    }

    fn one_at_a_time(&self) -> bool {
        self.one_at_a_time
    }
}

/// Ops of a step, up to its update, on one rank.
fn ops_of_step(case: &Case, set: &ProgramSet, rank: usize) -> u32 {
    let calls = case.schedule(rank).calls;
    let calls = calls.iter().filter(|call| call.program != "update");
    calls
        .map(|call| set.program(&call.program).unwrap().trace().filter(|(op, _)| op.runs(call.last)).count() as u32)
        .sum()
}

#[test]
fn a_rank_that_gives_up_anywhere_wakes_all_and_the_step_is_done_again_with_the_same_bits() {
    let _watchdog = Watchdog::new();
    for (kind, one_at_a_time) in [(DeviceKind::Cpu, true), (DeviceKind::Virtual, true), (DeviceKind::Virtual, false)] {
        let batch = Case { kind, ..Case::new(&models()[0], &[(3, 2), (2, 1), (1, 1)]) };
        let ranks = vec![(3, 2), (2, 1), (2, 1)];
        let state = Case { sharing: Sharing::State, parts: vec![500, 24, 500], ranks, ..batch.clone() };
        let holds = Case { ranks: vec![(4, 2), (0, 0), (2, 1)], ..state.clone() };
        let layers = Case { kind, ..Case::pipeline(&models()[0], &[0, 2, 3, 5], 4, 1) };
        [batch, state, holds, layers.clone()].iter().for_each(|case| gives_up_anywhere(case, one_at_a_time, 19));
        if kind == DeviceKind::Virtual {
            let offload = Offload { optimizer: 2, gradients: 2, weights: 1, inputs: 2, ..Offload::NOTHING };
            gives_up_anywhere(&Case { offload, ..layers }, one_at_a_time, 19);
        }
    }
}

#[test]
fn over_wires_and_channels_a_team_has_the_bits_of_one_process_and_a_rank_that_gives_up_wakes_all() {
    let _watchdog = Watchdog::new();
    // How wide numbers are is the wires' concern, and what runs there the channels'.
    for (precision, kind) in [(DType::F64, DeviceKind::Cpu), (DType::F32, DeviceKind::Virtual)] {
        let batch = Case { kind, precision, ..Case::new(&models()[0], &[(3, 2), (2, 1), (1, 1)]) };
        let ranks = vec![(3, 2), (2, 1), (2, 1)];
        let state = Case { sharing: Sharing::State, parts: vec![500, 24, 500], ranks, ..batch.clone() };
        let holds = Case { ranks: vec![(4, 2), (2, 1), (0, 0)], ..state.clone() };
        let layers = Case { kind, precision, ..Case::pipeline(&models()[0], &[0, 2, 3, 5], 4, 1) };
        let offload = Offload { optimizer: 2, gradients: 2, weights: 1, inputs: 2, ..Offload::NOTHING };
        let waits = Case { offload, ..layers.clone() };
        let cases = [batch, state, holds, layers, waits];
        for case in cases.iter().take(if kind == DeviceKind::Virtual { 5 } else { 4 }) {
            let mut one = case.team();
            let losses: Vec<StepLoss> = (1..=STEPS).map(|step| one.step(step)).collect();
            let (evaluated, generated) = (one.evaluated(), one.generated());
            let (files, left) = (one.files(), one.left());
            for far in [false, true] {
                let apart = Case { wired: !far, far, ..case.clone() };
                let what = format!("{kind:?} {precision} {:?} far: {far}", case.sharing);
                let mut several = apart.team();
                let found: Vec<StepLoss> = (1..=STEPS).map(|step| several.step(step)).collect();
                assert_eq!(losses, found, "{what}");
                assert_eq!((evaluated, &generated), (several.evaluated(), &several.generated()), "{what}");
                assert!(files == several.files() && left == several.left(), "{what}");
                several.restore(&files);
                assert!(files == several.files(), "{what}");
                if kind == DeviceKind::Virtual {
                    gives_up_anywhere(&apart, false, 43);
                }
            }
        }
    }
}

#[test]
fn a_device_elsewhere_that_hears_nothing_of_its_run_lets_go_by_itself() {
    let _watchdog = Watchdog::new();
    let case = Case { far: true, ..Case::new(&models()[0], &[(1, 1), (1, 1)]) };
    let answers = [case.answer(0), case.answer(1)];
    let (mut engines, _) = case.spread(&answers, Duration::from_millis(100));
    assert!(engines[1].far().expect("it is elsewhere").answers());
    loop {
        engines[1].device().write(TensorId(0), 0, &[]);
        match engines[1].device().settle() {
            Err(DeviceError::Lost { why, .. }) => break assert!(why.contains("its process has been started anew")),
            other => other.expect("it is there"),
        }
        // As if the run were cut off.
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// At every so many of its ops, and at each of the last ones.
fn gives_up_anywhere(case: &Case, one_at_a_time: bool, every: u32) {
    let kind = case.kind;
    let undisturbed = case.run();
    let mut team = case.team();
    let first = team.step(1);
    assert_eq!(first, undisturbed.losses[0]);
    for rank in 0..3 {
        let ops = ops_of_step(case, &team.sets[rank], rank);
        for at in (1..=ops).filter(|at| at % every == 1 || at + 12 > ops) {
            let refuses = Refuses { at, one_at_a_time, calls: 0 };
            team.engines[rank].observe(Box::new(refuses));
            let found = team.gradients(2);
            for (other, result) in found.iter().enumerate() {
                match result {
                    Err(DeviceError::Refused { .. }) => assert_eq!(other, rank),
                    Err(DeviceError::Peer { rank: named, .. }) => {
                        assert_eq!(*named as usize, rank);
                        assert_ne!(other, rank);
                    }
                    // The last ops of a step wait for nobody.
                    Ok(_) => assert!(at > ops - 60 && other != rank, "{kind:?}: rank {other} at {at} of {ops}"),
                    Err(other) => panic!("{other}"),
                }
            }
            team.engines[rank].observe(Box::new(Unobserved));
            team.transports.iter().for_each(|transport| transport.clear());
        }
    }
    let rest: Vec<StepLoss> = (2..=STEPS).map(|step| team.step(step)).collect();
    assert_eq!(rest, undisturbed.losses[1..], "{kind:?}");
    assert!(team.left() == undisturbed.ranks, "{kind:?}");
}

#[test]
fn collectives_write_what_they_declare_and_nothing_else() {
    let _watchdog = Watchdog::new();
    /// Looks at the whole arena around every collective.
    struct Looks {
        before: Vec<u8>,
        allowed: Vec<Range<usize>>,
        answer: Answer,
        seen: Arc<std::sync::atomic::AtomicU32>,
    }
    impl Looks {
        fn written(&self, op: &Op) -> Vec<Range<usize>> {
            let set = &self.answer.set;
            let accesses = op.accesses(&|id| set.tensor(id).elements());
            let written = accesses.into_iter().filter(|access| access.mode != plimsoll_program::Mode::Read);
            written
                .flat_map(|access| {
                    let tensor = set.tensor(access.operand.tensor);
                    (0..tensor.slots).map(move |slot| (access, tensor, slot))
                })
                .map(|(access, tensor, slot)| {
                    let first = self.answer.layout.placement.offset(access.operand.tensor, slot) as usize;
                    let first = first + access.operand.offset.base as usize * tensor.dtype.bytes() as usize;
                    first..first + (access.elements * tensor.dtype.bytes()) as usize
                })
                .collect()
        }
    }
    impl Observer for Looks {
        fn before(&mut self, _: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
            if let OpKind::CollectiveStart(_) = op.kind {
                self.allowed = self.written(op);
                self.before = memory.look(Space::Device, 0..memory.bytes(Space::Device).0).into_owned();
            }
            Ok(())
        }

        fn after(&mut self, _: u32, op: &Op, memory: &mut dyn Memory) {
            let OpKind::CollectiveStart(_) = op.kind else { return };
            self.seen.fetch_add(1, Ordering::Relaxed);
            let now = memory.look(Space::Device, 0..self.before.len() as u64);
            for (at, (a, b)) in self.before.iter().zip(now.iter()).enumerate() {
                assert!(a == b || self.allowed.iter().any(|range| range.contains(&at)), "{op:?} wrote byte {at}");
            }
        }
    }
    for config in models() {
        let case = Case::new(&config, &[(3, 1), (2, 2)]);
        let mut team = case.team();
        let seen = Arc::new(std::sync::atomic::AtomicU32::new(0));
        for (rank, engine) in team.engines.iter_mut().enumerate() {
            let (before, allowed, seen) = (vec![], vec![], seen.clone());
            engine.observe(Box::new(Looks { before, allowed, answer: case.answer(rank), seen }));
        }
        team.step(1);
        // The head or the embedding, each layer, the loss.
        assert!(seen.load(Ordering::Relaxed) as u64 >= 2 * (config.layers + 2));
    }
}

#[test]
fn an_engine_goes_from_thread_to_thread() {
    fn goes<T: Send>() {}
    goes::<Engine>();
    goes::<Box<dyn Device>>();
}
