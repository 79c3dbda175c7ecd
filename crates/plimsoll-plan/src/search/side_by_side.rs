//! Questions that do not depend on each other, answered by as many threads as the machine has cores.

use std::sync::Mutex;
use std::thread;

/// `answer` of every question, in their order.
pub fn side_by_side<Q: Sync, A: Send>(questions: &[Q], answer: impl Fn(&Q) -> A + Sync) -> Vec<A> {
    let next = Mutex::new(questions.iter().enumerate());
    let answers = Mutex::new(questions.iter().map(|_| None).collect::<Vec<Option<A>>>());
    let take = || next.lock().expect("nobody panics while holding it").next();
    let work = || {
        while let Some((index, question)) = take() {
            let found = answer(question);
            answers.lock().expect("nobody panics while holding it")[index] = Some(found);
        }
    };
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get()).min(questions.len());
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    let answers = answers.into_inner().expect("a panic of a thread has been passed on");
    answers.into_iter().map(|answer| answer.expect("every question has been taken")).collect()
}

/// Two answers, found at the same time.
pub fn both<A: Send, B>(first: impl FnOnce() -> A + Send, second: impl FnOnce() -> B) -> (A, B) {
    thread::scope(|scope| {
        let first = scope.spawn(first);
        let second = second();
        (first.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), second)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_the_order_of_the_questions() {
        let questions: Vec<u64> = (0..100).collect();
        let slow_first = |&q: &u64| {
            (0..(100 - q) * 1000).fold(q, |a, b| std::hint::black_box(a.wrapping_add(b)));
            q * q
        };
        assert_eq!(side_by_side(&questions, slow_first), questions.iter().map(|q| q * q).collect::<Vec<_>>());
        assert_eq!(side_by_side(&[] as &[u64], |q| *q), Vec::<u64>::new());
    }
}
