use super::*;
use crate::transport::in_process::InProcessTransport;
use crate::transport::{GroupHandle, PieceBuffers};
use plimsoll_core::DType;
use plimsoll_program::op::Exchange;
use plimsoll_program::tensor::Index;
use proptest::prelude::*;
use std::sync::Barrier;
use std::time::Duration;

/// Aborts the process if a test hangs.
struct Watchdog(#[expect(dead_code, reason = "it is dropped")] Sender<()>);

fn watchdog() -> Watchdog {
    let (alive, seen) = channel();
    thread::spawn(move || {
        if seen.recv_timeout(Duration::from_secs(300)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("a rank waits for ever");
            std::process::abort();
        }
    });
    Watchdog(alive)
}

/// Creates a group of `ranks` handles, connected pairwise by sockets.
fn wire_group(ranks: u32, round_bytes: u64) -> Vec<GroupHandle> {
    let mut wires: Vec<Vec<Option<Arc<dyn Wire>>>> = (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    for (one, other) in (0..ranks as usize).flat_map(|one| (0..one).map(move |other| (one, other))) {
        let (near_end, far_end) = UnixStream::pair().expect("the system provides sockets");
        wires[one][other] = Some(Arc::new(near_end));
        wires[other][one] = Some(Arc::new(far_end));
    }
    let epoch = Instant::now();
    let handle = |(rank, wires)| {
        let transport =
            WireTransport::with_round_bytes(rank, wires, epoch, round_bytes).expect("the system provides threads");
        GroupHandle { rank, transport, nccl: false }
    };
    (0..).zip(wires).map(handle).collect()
}

/// Creates a group of `ranks` handles in one process.
fn in_process_group(ranks: u32) -> Vec<GroupHandle> {
    let transport = InProcessTransport::new_group(ranks);
    (0..ranks).map(|rank| GroupHandle { rank, transport: transport.clone(), nccl: false }).collect()
}

/// The values of one piece on one rank.
#[derive(Clone, Debug)]
enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Values {
    fn address(&mut self) -> (*mut u8, DType) {
        match self {
            Values::F32(values) => (values.as_mut_ptr().cast(), DType::F32),
            Values::F64(values) => (values.as_mut_ptr().cast(), DType::F64),
        }
    }

    fn bits(&self) -> Vec<u64> {
        match self {
            Values::F32(values) => values.iter().map(|value| u64::from(value.to_bits())).collect(),
            Values::F64(values) => values.iter().map(|value| value.to_bits()).collect(),
        }
    }
}

/// Type and size of a piece: whether it is f64 (else f32), and the number of elements of each rank's part.
type PieceShape = (bool, Vec<u64>);

/// Returns pieces with values that differ between ranks and sums that depend on the order of addition.
fn pieces(shapes: &[PieceShape], rank: u32, salt: u64) -> Vec<Values> {
    let number =
        |i: u64| ((i * 37 + salt * 11 + u64::from(rank) * 101) % 1009) as f64 / 7.0 * 10f64.powi(i as i32 % 9 - 4);
    let values_of = |(is_f64, counts): &PieceShape| {
        let values = 0..counts.iter().sum::<u64>();
        match is_f64 {
            true => Values::F64(values.map(number).collect()),
            false => Values::F32(values.map(|i| number(i) as f32).collect()),
        }
    };
    shapes.iter().map(values_of).collect()
}

/// Runs a collective, split into rounds where the transport demands it.
fn run_collective(
    handle: &GroupHandle,
    collective: Collective,
    number: u64,
    counts: &[Vec<u64>],
    inputs: &mut [Values],
    outputs: &mut [Values],
) -> Result<f64, DeviceError> {
    let buffers = inputs.iter_mut().zip(outputs).zip(counts).map(|((input, output), counts)| {
        let ((input, dtype), (output, _)) = (input.address(), output.address());
        PieceBuffers {
            input,
            output: if collective == Collective::AllReduce { input } else { output },
            dtype,
            counts: counts.clone(),
        }
    });
    let exchange =
        Exchange { collective, pieces: vec![], rank: handle.rank, peer: None, sequence: Index::fixed(0), last: false };
    // SAFETY: the values are borrowed until all rounds are over.
    let call = unsafe { CollectiveCall::from_buffers(handle, &exchange, number, buffers.collect()) };
    match handle.transport.round_bytes() {
        None => handle.transport.exchange(call),
        Some(bytes) => call.split_into_rounds(bytes).try_fold(0.0, |_, round| handle.transport.exchange(round)),
    }
}

/// Runs collectives one after another on all ranks, and returns the bits of all buffers by rank.
fn run_on_all_ranks(handles: &[GroupHandle], collectives: &[(Collective, Vec<PieceShape>)]) -> Vec<Vec<Vec<u64>>> {
    let rank = |handle: &GroupHandle| {
        let mut left = Vec::new();
        for (number, (collective, shapes)) in (1..).zip(collectives) {
            let counts: Vec<Vec<u64>> = shapes.iter().map(|(_, counts)| counts.clone()).collect();
            let (mut inputs, mut outputs) =
                (pieces(shapes, handle.rank, number), pieces(shapes, handle.rank, number + 50));
            run_collective(handle, *collective, number, &counts, &mut inputs, &mut outputs).expect("no rank aborts");
            left.extend(inputs.iter().chain(&outputs).map(Values::bits));
        }
        left
    };
    thread::scope(|scope| {
        let threads: Vec<_> = handles.iter().map(|handle| scope.spawn(move || rank(handle))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn wire_collectives_match_in_process_bits(
        collectives in prop::collection::vec(
            (
                prop::sample::select(vec![Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather]),
                prop::collection::vec((any::<bool>(), prop::collection::vec(0u64..300, 3)), 1..4),
            ),
            1..5,
        ),
        round_bytes in 16u64..4000,
    ) {
        let _watchdog = watchdog();
        let over_wires = run_on_all_ranks(&wire_group(3, round_bytes), &collectives);
        prop_assert!(over_wires == run_on_all_ranks(&in_process_group(3), &collectives));
    }
}

/// Creates a send of `values` if `sends` is true, otherwise a receive into them.
fn message(handle: &GroupHandle, peer: u32, number: u64, values: &mut [f32], sends: bool) -> CollectiveCall {
    let mut counts = vec![0; handle.transport.world_size() as usize];
    counts[handle.rank as usize] = values.len() as u64;
    let at = values.as_mut_ptr().cast();
    let collective = if sends { Collective::Send } else { Collective::Receive };
    let sequence = Index::fixed(0);
    let exchange = Exchange { collective, pieces: vec![], rank: handle.rank, peer: Some(peer), sequence, last: false };
    // SAFETY: the callers keep the values until the send has completed or been cancelled.
    let buffers = vec![PieceBuffers { input: at, output: at, dtype: DType::F32, counts }];
    unsafe { CollectiveCall::from_buffers(handle, &exchange, number, buffers) }
}

#[test]
fn opposite_sends_do_not_block_their_senders() {
    let _watchdog = watchdog();
    const EACH: usize = 200_000;
    let (group, posted) = (wire_group(2, ROUND_BYTES), Barrier::new(2));
    thread::scope(|scope| {
        for handle in &group {
            let posted = &posted;
            scope.spawn(move || {
                let (transport, peer) = (&handle.transport, 1 - handle.rank);
                let mut sent: Vec<Vec<f32>> = (0..5).map(|i| vec![(handle.rank * 10 + i) as f32; EACH]).collect();
                // Both ranks post more than the sockets hold before either receives.
                for (number, values) in (0..).zip(&mut sent) {
                    transport.post_send(message(handle, peer, number, values, true)).expect("no rank aborts");
                }
                let lent = sent[4].as_ptr() as usize;
                let first = lent + 4 * EACH - 1;
                let last_is_borrowed = transport.is_borrowed(handle.rank, first..first + 1);
                posted.wait();
                assert!(last_is_borrowed, "more sends were transferred than the credits allow");
                for number in 0..5 {
                    let mut got = vec![-1.0f32; EACH];
                    transport.exchange(message(handle, peer, number, &mut got, false)).expect("no rank aborts");
                    assert!(got.iter().all(|&value| value == (peer * 10 + number as u32) as f32));
                }
                for number in 0..5 {
                    transport.wait_send(handle.rank, peer, number).expect("the send completes");
                }
                assert!(!transport.is_borrowed(handle.rank, first..first + 1));
            });
        }
    });
}

/// Runs an all-reduce of ones over all ranks.
fn sum_of_ones(handle: &GroupHandle, number: u64) -> Result<Vec<u64>, DeviceError> {
    let ranks = handle.transport.world_size() as usize;
    let mut ones = [Values::F32(vec![1.0; 90])];
    let counts = [vec![90 / ranks as u64; ranks]];
    let mut unused = ones.clone();
    let done = run_collective(handle, Collective::AllReduce, number, &counts, &mut ones, &mut unused);
    let untouched = ones[0].bits() == vec![u64::from(1f32.to_bits()); 90];
    assert!(done.is_ok() || untouched, "a failed collective leaves the memory unchanged");
    done.map(|_| ones[0].bits())
}

#[test]
fn abort_wakes_all_ranks_until_reset() {
    let _watchdog = watchdog();
    let group = wire_group(3, ROUND_BYTES);
    for attempt in 0..20 {
        let aborting_rank = attempt % 3;
        thread::scope(|scope| {
            for handle in &group {
                scope.spawn(move || {
                    if handle.rank != aborting_rank {
                        let error = sum_of_ones(handle, 1).expect_err("one rank aborts");
                        assert!(
                            matches!(error, DeviceError::PeerAborted { rank, .. } if rank == aborting_rank),
                            "{error}"
                        );
                        // Later calls of the same attempt fail as well.
                        assert!(sum_of_ones(handle, 2).is_err());
                    } else {
                        // A pending send is left behind by the abort.
                        let mut lost = vec![1.0; 100];
                        let posted = message(handle, (aborting_rank + 1) % 3, 7, &mut lost, true);
                        handle.transport.post_send(posted).expect("no rank has aborted yet");
                        handle.transport.abort(aborting_rank, "injected");
                        handle.transport.cancel_sends(aborting_rank);
                    }
                    // Other ranks may still be in the previous attempt.
                    handle.transport.reset();
                    let three = vec![u64::from(3f32.to_bits()); 90];
                    assert_eq!(sum_of_ones(handle, 3).expect("all ranks take part again"), three);
                    handle.transport.reset();
                });
            }
        });
    }
}

#[test]
fn lost_rank_and_mismatched_collective_are_reported() {
    let _watchdog = watchdog();
    let mut all = wire_group(3, ROUND_BYTES);
    let lost = all.remove(1);
    thread::scope(|scope| {
        let waiting: Vec<_> = all.iter().map(|handle| scope.spawn(move || sum_of_ones(handle, 1))).collect();
        drop(lost);
        let errors =
            waiting.into_iter().map(|waits| waits.join().expect("no rank panics").expect_err("a rank is lost"));
        let errors: Vec<_> = errors.collect();
        // A rank that hears of the abort before its own wire fails reports `PeerAborted`.
        let named = |error: &DeviceError| {
            matches!(error, DeviceError::PeerUnreachable { rank: 1, .. } | DeviceError::PeerAborted { rank: 1, .. })
        };
        assert!(errors.iter().all(named), "{errors:?}");
        assert!(errors.iter().any(|error| matches!(error, DeviceError::PeerUnreachable { .. })), "{errors:?}");
    });
    let all = wire_group(2, ROUND_BYTES);
    thread::scope(|scope| {
        let one = scope.spawn(|| sum_of_ones(&all[0], 1));
        let other = sum_of_ones(&all[1], 2);
        assert!(other.is_err() && one.join().expect("no rank panics").is_err());
    });
}

#[test]
fn invalid_frame_makes_sender_unreachable() {
    let _watchdog = watchdog();
    for bytes in [vec![0xff; HEADER_BYTES], vec![0; 3]] {
        let (near_end, far_end) = UnixStream::pair().expect("the system provides sockets");
        let wires: Vec<Option<Arc<dyn Wire>>> = vec![None, Some(Arc::new(near_end))];
        let transport = WireTransport::new(0, wires, Instant::now()).expect("the system provides threads");
        far_end.send(&bytes).expect("the socket is open");
        drop(far_end);
        let error = sum_of_ones(&GroupHandle { rank: 0, transport, nccl: false }, 1);
        assert!(matches!(error, Err(DeviceError::PeerUnreachable { rank: 1, .. })), "{error:?}");
    }
}
