//! A thread-safe memo table for the measurements of a search.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard};

/// Values computed once per key. The lock is not held while a value is computed, so two threads may compute one value
/// twice.
#[derive(Debug)]
pub(crate) struct Memo<K, V>(Mutex<HashMap<K, V>>);

impl<K, V> Default for Memo<K, V> {
    fn default() -> Memo<K, V> {
        Memo(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> Memo<K, V> {
    /// Returns the value of a key; `None` if no value is stored.
    pub fn get(&self, key: &K) -> Option<V> {
        self.lock().get(key).cloned()
    }

    /// Stores the value of a key.
    pub fn insert(&self, key: K, value: V) {
        self.lock().insert(key, value);
    }

    /// Returns the value of a key; computes and stores it first if no value is stored.
    pub fn get_or_compute(&self, key: K, compute: impl FnOnce() -> V) -> V {
        if let Some(value) = self.get(&key) {
            return value;
        }
        let value = compute();
        self.insert(key, value.clone());
        value
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, V>> {
        self.0.lock().expect("no panic occurs while the lock is held")
    }
}
