//! Teams on the stand-in: data parallel, sharded and pipeline training, and collectives by NCCL.

use super::*;

/// Aborts the process if ranks wait for each other for 240 s.
fn watchdog() -> Arc<AtomicBool> {
    let done = Arc::new(AtomicBool::new(false));
    let seen = done.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(240));
        if !seen.load(Ordering::Relaxed) {
            eprintln!("a rank hangs");
            std::process::abort();
        }
    });
    done
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn data_parallel_and_sharded_match_single_device() {
    const STEPS: usize = 3;
    let done = watchdog();
    let mut single = Run::on_stand_in(DType::F32);
    single.run(ProgramKind::Load);
    single.run(ProgramKind::InitOptimizer);
    let losses = single.train(STEPS);
    let weights = single.all_of(Category::Weight);
    let mut bits: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    // Algorithms are kept for the later runs, because timing might choose others.
    let mut algorithms: BTreeMap<(String, u32), GemmAlgorithms> = BTreeMap::new();
    for (parallelism, second_device, round_bytes, nccl) in [
        (Parallelism::Data, RankDevice::Gpu(0), ROUND_BYTES, false),
        (Parallelism::Data, RankDevice::Gpu(0), 1000, false),
        (Parallelism::Data, RankDevice::Cpu, 3000, false),
        (Parallelism::Sharded, RankDevice::Gpu(0), 1000, false),
        (Parallelism::Sharded, RankDevice::Cpu, ROUND_BYTES, false),
        (Parallelism::Data, RankDevice::Gpu(1), ROUND_BYTES, true),
        (Parallelism::Sharded, RankDevice::Gpu(1), 1000, true),
        // NCCL accepts each GPU once, so this team continues without it.
        (Parallelism::Data, RankDevice::Gpu(0), 3000, true),
    ] {
        let what = format!("{parallelism}, {round_bytes}, second device {second_device:?}, by NCCL: {nccl}");
        let on_cpu = second_device == RankDevice::Cpu;
        let of_rank =
            |rank: u32, on| Run::of_rank(rank, parallelism, on, algorithms.get(&(parallelism.to_string(), rank)));
        let mut team = [of_rank(0, RankDevice::Gpu(0)), of_rank(1, second_device)];
        if !on_cpu {
            let chosen =
                (0..).zip(&team).map(|(rank, run)| ((parallelism.to_string(), rank), run.device.algorithms().unwrap()));
            algorithms.extend(chosen);
        }
        let found = train_team(&mut team, round_bytes, nccl, STEPS);
        assert_eq!(found[0], found[1], "{what}");
        close(&found[0], &losses, 1e-5, &what);
        let [first, second] = team.each_mut().map(|run| run.all_of(Category::Weight));
        if parallelism == Parallelism::Data {
            assert!(first == second || on_cpu, "all have the same bits: {what}");
            for (name, want) in &weights {
                close(&first[name], want, 2e-4, name);
                close(&second[name], want, 2e-4, name);
            }
        }
        for run in &mut team {
            assert!(!run.device.memory().has_stray_writes(Space::Device), "{what}");
        }
        if !on_cpu {
            // Sums have the same order on every transport.
            let tensors = [first, second].into_iter().flat_map(BTreeMap::into_values);
            // Tensor parts that belong to other ranks are NaN.
            let all: Vec<u64> = found.into_iter().chain(tensors).flatten().map(f64::to_bits).collect();
            assert!(
                *bits.entry(parallelism.to_string()).or_insert_with(|| all.clone()) == all,
                "the same bits: {what}"
            );
        }
        check_backends(&mut team, second_device, nccl, &what);
    }
    done.store(true, Ordering::Relaxed);
}

/// Trains two ranks, rank `r` on sequence `r` of each step. Returns the loss per token of each step, for each rank.
fn train_team(team: &mut [Run; 2], round_bytes: u64, nccl: bool, steps: usize) -> Vec<Vec<f64>> {
    let transport = InProcessTransport::new_group_with_rounds(2, round_bytes);
    std::thread::scope(|scope| {
        let ranks = team.iter_mut().enumerate().map(|(rank, run)| {
            let group = GroupHandle { rank: rank as u32, transport: transport.clone(), nccl };
            scope.spawn(move || {
                run.device.join_group(group).unwrap();
                run.run(ProgramKind::Load);
                run.run(ProgramKind::InitOptimizer);
                let step = |step| {
                    run.gradients_of(step, rank..rank + 1);
                    run.run(ProgramKind::Update);
                    run.metric(Metric::LossSum) / 148.0
                };
                (0..steps).map(step).collect()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Checks that two GPUs used NCCL, that a GPU given twice was refused by NCCL, and that other teams had no choice.
fn check_backends(team: &mut [Run; 2], second_device: RankDevice, nccl: bool, what: &str) {
    let by = team.each_mut().map(|run| run.device.collectives());
    match (nccl, second_device) {
        (true, RankDevice::Gpu(1)) => assert_eq!(by, [const { Some(CollectiveBackend::Nccl) }; 2], "{what}"),
        (true, _) => {
            let [
                Some(CollectiveBackend::Host { reason: Some(reason) }),
                Some(CollectiveBackend::Host { reason: Some(_) }),
            ] = &by
            else {
                panic!("{by:?}")
            };
            assert!(reason.starts_with("NCCL refuses to connect the ranks: "), "{reason}");
        }
        _ => assert_eq!(by, [const { None }; 2], "{what}"),
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn pipeline_matches_single_device() {
    const STEPS: usize = 3;
    let done = watchdog();
    let mut single = Run::on_stand_in(DType::F32);
    single.run(ProgramKind::Load);
    single.run(ProgramKind::InitOptimizer);
    let losses = single.train(STEPS);
    let (evaluated, _) = single.evaluate();
    single.run(ProgramKind::Save);
    // Pipelines on two GPUs, on a GPU before the CPU, and on a GPU after it; messages take several rounds.
    for (on_cpu, round_bytes) in [([false, false], ROUND_BYTES), ([false, true], 1000), ([true, false], 3000)] {
        let what = format!("on the CPU: {on_cpu:?}, {round_bytes}");
        let transport = InProcessTransport::new_group_with_rounds(2, round_bytes);
        let share = |rank| {
            let (parallelism, layers) = (Some(Parallelism::Pipeline), vec![0, 1, 2]);
            Share { parallelism, rank, ranks: 2, layers, ..Share::SINGLE_DEVICE }
        };
        let mut team = [0, 1].map(|rank| Run::of_stage(&share(rank), 2, on_cpu[rank as usize]));
        let found: Vec<(Vec<f64>, f64)> = std::thread::scope(|scope| {
            let ranks = (0..).zip(&mut team).map(|(rank, run)| {
                let group = GroupHandle { rank, transport: transport.clone(), nccl: false };
                let calls = share(rank).schedule(2).calls;
                scope.spawn(move || {
                    run.device.join_group(group).unwrap();
                    run.run(ProgramKind::Load);
                    run.run(ProgramKind::InitOptimizer);
                    let step = |step| {
                        run.begin(step);
                        for call in calls.iter().filter(|call| call.program != ProgramKind::BeginStep) {
                            let micro_batch = call.micro_batch;
                            if call.program == ProgramKind::Forward {
                                run.batch_of("train.", 2 * step + micro_batch as usize, micro_batch);
                            }
                            let call = ProgramCall {
                                micro_batch,
                                is_last_micro_batch: call.last,
                                ..ProgramCall::of(call.program)
                            };
                            run.device.run_observed(call, &mut NoFiles, &mut NoObserver).unwrap();
                        }
                        run.metric(Metric::LossSum) / 148.0
                    };
                    let losses = (0..STEPS).map(step).collect();
                    run.put("metrics", &[0.0; METRIC_COUNT as usize]);
                    run.batch("evaluate.", 77);
                    run.run(ProgramKind::Evaluate);
                    let evaluated = run.metric(Metric::LossSum);
                    run.run(ProgramKind::Save);
                    (losses, evaluated)
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(found[0].0, found[1].0, "{what}");
        close(&found[0].0, &losses, 1e-5, &what);
        close(&[found[1].1], &[evaluated], 1e-5, &what);
        let mut saved = 0;
        for run in &mut team {
            for (name, bytes) in &run.files.0 {
                let dtype = run.set.tensor(run.set.find(name).unwrap()).dtype;
                close(&numbers(dtype, bytes), &numbers(dtype, &single.files.0[name]), 2e-4, name);
                saved += 1;
            }
            for space in [Space::Device, Space::Host] {
                assert!(!run.device.memory().has_stray_writes(space), "{what}");
            }
        }
        assert_eq!(saved, single.files.0.len(), "{what}");
    }
    done.store(true, Ordering::Relaxed);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn refused_step_releases_peers_and_can_be_repeated() {
    repeat_refused_step(false);
    repeat_refused_step(true);
}

fn repeat_refused_step(nccl: bool) {
    let done = watchdog();
    let transport = InProcessTransport::new_group_with_rounds(2, 1000);
    let mut team =
        [0, 1].map(|rank| Run::of_rank(rank, Parallelism::Data, RankDevice::Gpu(if nccl { rank } else { 0 }), None));
    let barrier = &Barrier::new(2);
    let found: Vec<f64> = std::thread::scope(|scope| {
        let ranks = team.iter_mut().enumerate().map(|(rank, run)| {
            let transport = transport.clone();
            scope.spawn(move || {
                run.device.join_group(GroupHandle { rank: rank as u32, transport: transport.clone(), nccl }).unwrap();
                run.run(ProgramKind::Load);
                run.run(ProgramKind::InitOptimizer);
                // Rank 1 refuses in the backward pass, after some gradients have been summed.
                run.begin(0);
                run.batch("train.", rank);
                run.run(ProgramKind::Forward);
                let ticks = run.set.program(ProgramKind::Backward).unwrap().op_count() as u32;
                let mut refusal = RefuseOnce { tick: if rank == 1 { ticks / 2 } else { 0 }, singly: false };
                let refused = run.try_run(ProgramKind::Backward, &mut refusal).unwrap_err();
                assert_eq!(refused.is_peer_failure(), rank == 0, "{refused}");
                barrier.wait();
                if rank == 0 {
                    transport.reset();
                }
                barrier.wait();
                run.gradients_of(0, rank..rank + 1);
                run.run(ProgramKind::Update);
                run.metric(Metric::LossSum) / 148.0
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let mut single = Run::on_stand_in(DType::F32);
    single.run(ProgramKind::Load);
    single.run(ProgramKind::InitOptimizer);
    close(&found, &[single.train(1)[0]; 2], 1e-5, "loss");
    let weights = single.all_of(Category::Weight);
    let got = team[0].all_of(Category::Weight);
    for (name, want) in &weights {
        close(&got[name], want, 2e-4, name);
    }
    done.store(true, Ordering::Relaxed);
}

/// Returns numbers that depend on rank and index, with sums that need rounding.
fn number(rank: usize, at: u64) -> f64 {
    let draw = (at * 7919 + rank as u64 * 104_729 + at * at % 977) % 100_003;
    draw as f64 / 100_003.0 * 10f64.powi((at % 7) as i32)
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn nccl_collectives_handle_any_piece_sizes() {
    let done = watchdog();
    // Staging bytes; element counts of each piece.
    let none: &[&[u64]] = &[&[0, 0, 0]];
    let odd: &[&[u64]] = &[&[0, 1, 777], &[1023, 0, 5], &[64, 64, 64], &[0, 0, 1]];
    let many = vec![&[3u64, 40, 1][..]; 150];
    for (staging_bytes, counts) in [(2048, odd), (5000, odd), (1 << 20, odd), (1 << 20, &many[..]), (4096, none)] {
        for dtype in [DType::F32, DType::F64] {
            for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
                let what = format!("{collective:?} of {dtype} through {staging_bytes} bytes");
                let transport = InProcessTransport::new_group_with_rounds(3, ROUND_BYTES);
                let found: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
                    let ranks = (0..3).map(|rank| {
                        let transport: Arc<dyn Transport> = transport.clone();
                        let group = GroupHandle { rank, transport, nccl: true };
                        scope.spawn(move || run_collective_on_rank(&group, dtype, collective, counts, staging_bytes))
                    });
                    let ranks: Vec<_> = ranks.collect();
                    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
                });
                for (rank, pieces) in found.iter().enumerate() {
                    for (counts, found) in counts.iter().zip(pieces) {
                        let rounded = |x: f64| if dtype == DType::F32 { f64::from(x as f32) } else { x };
                        let sum = |at: u64| {
                            let all = (0..3).map(|rank| rounded(number(rank, at)));
                            all.reduce(|sum, next| rounded(sum + next)).unwrap()
                        };
                        let (total, before) = (counts.iter().sum::<u64>(), counts[..rank].iter().sum::<u64>());
                        let firsts = |of: usize| counts[..of].iter().sum::<u64>();
                        let want: Vec<f64> = match collective {
                            Collective::AllReduce => (0..total).map(sum).collect(),
                            // The previous output is 1.
                            Collective::ReduceScatter => {
                                (0..counts[rank]).map(|at| rounded(1.0 + sum(before + at))).collect()
                            }
                            _ => (0..3)
                                .flat_map(|of| (0..counts[of]).map(move |at| (of, at)))
                                .map(|(of, at)| rounded(number(of, firsts(of) + at)))
                                .collect(),
                        };
                        assert_eq!(found, &want, "rank {rank}: {what}, {counts:?}");
                    }
                }
            }
        }
    }
    done.store(true, Ordering::Relaxed);
}

/// Runs a collective on one rank and returns its pieces afterwards.
fn run_collective_on_rank(
    group: &GroupHandle,
    dtype: DType,
    collective: Collective,
    counts: &[&[u64]],
    staging_bytes: u64,
) -> Vec<Vec<f64>> {
    let (context, mut nccl) = nccl_on(group.rank, staging_bytes);
    let (rank, size) = (group.rank as usize, dtype.bytes());
    let mut arena = DeviceArena::allocate(&context, 1 << 20).unwrap();
    let stream = Stream::new(&context).unwrap();
    let operand = |tensor| Operand { tensor: TensorId(tensor), slot: Index::fixed(0), offset: Index::fixed(0) };
    let (mut next, mut pieces, mut addresses, mut pinned) = (arena.base(), Vec::new(), Vec::new(), Vec::new());
    for counts in counts {
        let (total, before, own) = (counts.iter().sum::<u64>(), counts[..rank].iter().sum::<u64>(), counts[rank]);
        let mut take = |values: Vec<f64>| {
            let at = next;
            let bytes = bytes_of(dtype, &values);
            let room = Pinned::new(&context, bytes.len() as u64).unwrap();
            if !bytes.is_empty() {
                // SAFETY: both ranges have that many bytes, and no other work uses them.
                unsafe {
                    room.base().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                    stream.copy_in(at, room.base(), bytes.len() as u64).unwrap();
                }
            }
            pinned.push(room);
            next += bytes.len() as u64;
            at
        };
        let all = |first: u64, count: u64| (first..first + count).map(|at| number(rank, at)).collect();
        let (input, output) = match collective {
            Collective::AllReduce => {
                let both = take(all(0, total));
                (both, both)
            }
            Collective::ReduceScatter => (take(all(0, total)), take(vec![1.0; own as usize])),
            _ => (take(all(before, own)), take(vec![f64::NAN; total as usize])),
        };
        addresses.push((
            PieceAddresses { input, output, dtype },
            if collective == Collective::ReduceScatter { own } else { total },
        ));
        pieces.push(ExchangeRange { input: operand(0), output: operand(0), counts: counts.to_vec() });
    }
    let exchange =
        Exchange { collective, pieces, rank: group.rank, peer: None, sequence: Index::fixed(0), last: false };
    let piece_addresses: Vec<PieceAddresses> = addresses.iter().map(|(addresses, _)| *addresses).collect();
    // SAFETY: all addresses lie in the arena, and no other work uses it.
    assert!(
        unsafe { nccl.run_collective(&exchange, 7, &piece_addresses, group, &stream) }.unwrap(),
        "{:?}",
        nccl.backend()
    );
    let read = |(addresses, elements): &(PieceAddresses, u64)| {
        let mut bytes = vec![0; (elements * size) as usize];
        if !bytes.is_empty() {
            // SAFETY: the address lies in the arena; pageable memory is written before the stream completes.
            unsafe { stream.copy_out(bytes.as_mut_ptr(), addresses.output, bytes.len() as u64) }.unwrap();
            stream.synchronize().unwrap();
        }
        numbers(dtype, &bytes)
    };
    let found = addresses.iter().map(read).collect();
    nccl.close();
    stream.synchronize().unwrap();
    arena.resize_discarding(0).unwrap();
    found
}

/// Opens NCCL on a GPU with `staging_bytes`; its context becomes current on this thread.
fn nccl_on(ordinal: u32, staging_bytes: u64) -> (Arc<Context>, Nccl) {
    let folder = cuda_stand_in::folder();
    let driver = Arc::new(Driver::load(&folder.join("libcuda.so.1")).unwrap());
    let compiler = Arc::new(Compiler::open(&folder.join("libnvrtc.so.13"), "13", Some(folder)).unwrap());
    let library = Arc::new(nccl::Library::load(&folder.join("nccl/libnccl.so.2")).unwrap());
    let context = Context::open(&driver, ordinal, None).unwrap();
    let nccl = Nccl::new(&library, &compiler, &context, staging_bytes);
    (context, nccl)
}
