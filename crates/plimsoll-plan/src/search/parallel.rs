//! Independent computations on as many threads as the machine has cores.

use std::iter::Enumerate;
use std::slice::Iter;
use std::sync::Mutex;
use std::thread;

/// Applies `function` to every item in parallel. Results are in the order of the items.
pub fn parallel_map<T: Sync, R: Send>(items: &[T], function: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = Mutex::new(items.iter().enumerate());
    let results = Mutex::new(items.iter().map(|_| None).collect::<Vec<Option<R>>>());
    let work = || apply_to_rest(&function, &next, &results);
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get()).min(items.len());
    thread::scope(|scope| {
        // If the system refuses a thread, the others compute its items.
        (1..threads).all(|_| thread::Builder::new().spawn_scoped(scope, work).is_ok());
        work();
    });
    let results = results.into_inner().expect("the scope has passed on a panic of any thread");
    results.into_iter().map(|result| result.expect("every item has been computed")).collect()
}

/// Applies `function` to the items that other threads have not taken, until there are none.
fn apply_to_rest<T, R>(function: &impl Fn(&T) -> R, next: &Mutex<Enumerate<Iter<T>>>, results: &Mutex<Vec<Option<R>>>) {
    let take = || next.lock().expect("no panic occurs while the lock is held").next();
    while let Some((index, item)) = take() {
        let result = function(item);
        results.lock().expect("no panic occurs while the lock is held")[index] = Some(result);
    }
}

/// Runs two functions in parallel and returns both results. If the system refuses a thread, runs them in turn.
pub fn join<A: Send, B>(first: impl FnOnce() -> A + Send, second: impl FnOnce() -> B) -> (A, B) {
    let waiting = Mutex::new(Some(first));
    let run_first = || take(&waiting).map(|first| first());
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, run_first);
        let second = second();
        let first = match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_) => run_first(),
        };
        (first.expect("only one of both threads takes the function"), second)
    })
}

/// Takes the value out of a slot that threads share.
fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().expect("no panic occurs while the lock is held").take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parallel_map_keeps_item_order() {
        let items: Vec<u64> = (0..100).collect();
        let slow_first = |&item: &u64| {
            (0..(100 - item) * 1000).fold(item, |a, b| std::hint::black_box(a.wrapping_add(b)));
            item * item
        };
        assert_eq!(parallel_map(&items, slow_first), items.iter().map(|item| item * item).collect::<Vec<_>>());
        assert_eq!(parallel_map(&[] as &[u64], |item| *item), Vec::<u64>::new());
    }
}
