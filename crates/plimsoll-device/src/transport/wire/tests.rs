use super::*;
use crate::transport::memory::Memory;
use crate::transport::{Place, Seat};
use plimsoll_program::op::Exchange;
use plimsoll_program::tensor::Index;
use proptest::prelude::*;
use std::sync::Barrier;
use std::time::Duration;

/// Ends the process where a test waits for ever.
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

/// A seat for each of so many ranks, with a socket between each two.
fn seats(ranks: u32, round_bytes: u64) -> Vec<Seat> {
    let mut wires: Vec<Vec<Option<Arc<dyn Wire>>>> = (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    for (one, other) in (0..ranks as usize).flat_map(|one| (0..one).map(move |other| (one, other))) {
        let (here, there) = UnixStream::pair().expect("sockets are given");
        wires[one][other] = Some(Arc::new(here));
        wires[other][one] = Some(Arc::new(there));
    }
    let epoch = Instant::now();
    let seat = |(rank, wires)| {
        let transport = Wired::in_rounds(rank, wires, epoch, round_bytes).expect("threads are given");
        Seat { rank, transport, nccl: false }
    };
    (0..).zip(wires).map(seat).collect()
}

/// The same in one process.
fn seats_in_memory(ranks: u32) -> Vec<Seat> {
    let transport = Memory::between(ranks);
    (0..ranks).map(|rank| Seat { rank, transport: transport.clone(), nccl: false }).collect()
}

/// A piece of a collective as one rank has it: as wide as its numbers.
#[derive(Clone, Debug)]
enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Values {
    fn place(&mut self) -> (*mut u8, DType) {
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

/// Whether a piece is wide, and each rank's part of it.
type Form = (bool, Vec<u64>);

/// Pieces with numbers that are different on every rank, and sums that depend on their order.
fn pieces(forms: &[Form], rank: u32, salt: u64) -> Vec<Values> {
    let number =
        |i: u64| ((i * 37 + salt * 11 + u64::from(rank) * 101) % 1009) as f64 / 7.0 * 10f64.powi(i as i32 % 9 - 4);
    let of = |(wide, counts): &Form| {
        let values = 0..counts.iter().sum::<u64>();
        match wide {
            true => Values::F64(values.map(number).collect()),
            false => Values::F32(values.map(|i| number(i) as f32).collect()),
        }
    };
    forms.iter().map(of).collect()
}

/// Takes part in a collective, in as many rounds as it takes.
fn meet(
    seat: &Seat,
    collective: Collective,
    number: u64,
    counts: &[Vec<u64>],
    inputs: &mut [Values],
    outputs: &mut [Values],
) -> Result<f64, DeviceError> {
    let places = inputs.iter_mut().zip(outputs).zip(counts).map(|((input, output), counts)| {
        let ((input, dtype), (output, _)) = (input.place(), output.place());
        Place {
            input,
            output: if collective == Collective::AllReduce { input } else { output },
            dtype,
            counts: counts.clone(),
        }
    });
    let exchange =
        Exchange { collective, pieces: vec![], rank: seat.rank, peer: None, sequence: Index::fixed(0), last: false };
    // SAFETY: the numbers are borrowed until all rounds are over.
    let meeting = unsafe { Meeting::of(seat, &exchange, number, places.collect()) };
    match seat.transport.round_bytes() {
        None => seat.transport.meet(meeting),
        Some(bytes) => meeting.rounds(bytes).try_fold(0.0, |_, round| seat.transport.meet(round)),
    }
}

/// What all ranks have after these collectives, one after the other.
fn met(seats: &[Seat], collectives: &[(Collective, Vec<Form>)]) -> Vec<Vec<Vec<u64>>> {
    let rank = |seat: &Seat| {
        let mut left = Vec::new();
        for (number, (collective, forms)) in (1..).zip(collectives) {
            let counts: Vec<Vec<u64>> = forms.iter().map(|(_, counts)| counts.clone()).collect();
            let (mut inputs, mut outputs) = (pieces(forms, seat.rank, number), pieces(forms, seat.rank, number + 50));
            meet(seat, *collective, number, &counts, &mut inputs, &mut outputs).expect("nobody gives up");
            left.extend(inputs.iter().chain(&outputs).map(Values::bits));
        }
        left
    };
    thread::scope(|scope| {
        let threads: Vec<_> = seats.iter().map(|seat| scope.spawn(move || rank(seat))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn collectives_over_wires_leave_the_bits_of_one_process(
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
        prop_assert!(met(&seats(3, round_bytes), &collectives) == met(&seats_in_memory(3), &collectives));
    }
}

/// A message of bytes that this rank lends.
fn message(seat: &Seat, peer: u32, number: u64, values: &mut [f32], sends: bool) -> Meeting {
    let mut counts = vec![0; seat.transport.ranks() as usize];
    counts[seat.rank as usize] = values.len() as u64;
    let at = values.as_mut_ptr().cast();
    let collective = if sends { Collective::Send } else { Collective::Receive };
    let sequence = Index::fixed(0);
    let exchange = Exchange { collective, pieces: vec![], rank: seat.rank, peer: Some(peer), sequence, last: false };
    // SAFETY: the callers keep the numbers until the message has been taken or withdrawn.
    unsafe { Meeting::of(seat, &exchange, number, vec![Place { input: at, output: at, dtype: DType::F32, counts }]) }
}

#[test]
fn messages_of_both_ends_pass_each_other_and_senders_go_on() {
    let _watchdog = watchdog();
    const EACH: usize = 200_000;
    let (seats, shown) = (seats(2, ROUND_BYTES), Barrier::new(2));
    thread::scope(|scope| {
        for seat in &seats {
            let shown = &shown;
            scope.spawn(move || {
                let (transport, peer) = (&seat.transport, 1 - seat.rank);
                let mut sent: Vec<Vec<f32>> = (0..5).map(|i| vec![(seat.rank * 10 + i) as f32; EACH]).collect();
                // Both show more than the wire holds before either looks at what came.
                for (number, values) in (0..).zip(&mut sent) {
                    transport.show(message(seat, peer, number, values, true)).expect("nobody gives up");
                }
                let lent = sent[4].as_ptr() as usize;
                let first = lent + 4 * EACH - 1;
                let ahead_at_most = transport.lends(seat.rank, first..first + 1);
                shown.wait();
                assert!(ahead_at_most, "more than may be ahead");
                for number in 0..5 {
                    let mut got = vec![-1.0f32; EACH];
                    transport.meet(message(seat, peer, number, &mut got, false)).expect("nobody gives up");
                    assert!(got.iter().all(|&value| value == (peer * 10 + number as u32) as f32));
                }
                for number in 0..5 {
                    transport.taken(seat.rank, peer, number).expect("it was taken");
                }
                assert!(!transport.lends(seat.rank, first..first + 1));
            });
        }
    });
}

/// Sums ones over all ranks.
fn sum_of_ones(seat: &Seat, number: u64) -> Result<Vec<u64>, DeviceError> {
    let ranks = seat.transport.ranks() as usize;
    let mut ones = [Values::F32(vec![1.0; 90])];
    let counts = [vec![90 / ranks as u64; ranks]];
    let mut unused = ones.clone();
    let done = meet(seat, Collective::AllReduce, number, &counts, &mut ones, &mut unused);
    let untouched = ones[0].bits() == vec![u64::from(1f32.to_bits()); 90];
    assert!(done.is_ok() || untouched, "a rank that leaves leaves with its memory as it was");
    done.map(|_| ones[0].bits())
}

#[test]
fn who_gives_up_wakes_all_and_the_next_attempt_knows_nothing_of_it() {
    let _watchdog = watchdog();
    let seats = seats(3, ROUND_BYTES);
    for attempt in 0..20 {
        let who = attempt % 3;
        thread::scope(|scope| {
            for seat in &seats {
                scope.spawn(move || {
                    if seat.rank != who {
                        let found = sum_of_ones(seat, 1).expect_err("one is missing");
                        assert!(matches!(found, DeviceError::Peer { rank, .. } if rank == who), "{found}");
                        // Who comes later hears of it, too.
                        assert!(sum_of_ones(seat, 2).is_err());
                    } else {
                        // It has shown something, and leaves it behind.
                        let mut lost = vec![1.0; 100];
                        let shown = message(seat, (who + 1) % 3, 7, &mut lost, true);
                        seat.transport.show(shown).expect("nobody has given up");
                        seat.transport.give_up(who, "it has had enough");
                        seat.transport.withdraw(who);
                    }
                    // Others may still be in the attempt before.
                    seat.transport.clear();
                    let three = vec![u64::from(3f32.to_bits()); 90];
                    assert_eq!(sum_of_ones(seat, 3).expect("all are there again"), three);
                    seat.transport.clear();
                });
            }
        });
    }
}

#[test]
fn who_is_gone_is_named_to_all_and_who_came_for_something_else_is_refused() {
    let _watchdog = watchdog();
    let mut all = seats(3, ROUND_BYTES);
    let gone = all.remove(1);
    thread::scope(|scope| {
        let waiting: Vec<_> = all.iter().map(|seat| scope.spawn(move || sum_of_ones(seat, 1))).collect();
        drop(gone);
        let found = waiting.into_iter().map(|waits| waits.join().expect("no rank panics").expect_err("one is gone"));
        let found: Vec<_> = found.collect();
        // Who hears of it from the other one before its own wire ends is told that rank 1 takes no part any more.
        let named = |error: &DeviceError| {
            matches!(error, DeviceError::CutOff { rank: 1, .. } | DeviceError::Peer { rank: 1, .. })
        };
        assert!(found.iter().all(named), "{found:?}");
        assert!(found.iter().any(|error| matches!(error, DeviceError::CutOff { .. })), "{found:?}");
    });
    let all = seats(2, ROUND_BYTES);
    thread::scope(|scope| {
        let one = scope.spawn(|| sum_of_ones(&all[0], 1));
        let other = sum_of_ones(&all[1], 2);
        assert!(other.is_err() && one.join().expect("no rank panics").is_err());
    });
}

#[test]
fn what_is_no_frame_cuts_its_sender_off() {
    let _watchdog = watchdog();
    for bytes in [vec![0xff; HEAD], vec![0; 3]] {
        let (here, there) = UnixStream::pair().expect("sockets are given");
        let wires: Vec<Option<Arc<dyn Wire>>> = vec![None, Some(Arc::new(here))];
        let transport = Wired::new(0, wires, Instant::now()).expect("threads are given");
        there.send(&bytes).expect("it is open");
        drop(there);
        let found = sum_of_ones(&Seat { rank: 0, transport, nccl: false }, 1);
        assert!(matches!(found, Err(DeviceError::CutOff { rank: 1, .. })), "{found:?}");
    }
}
