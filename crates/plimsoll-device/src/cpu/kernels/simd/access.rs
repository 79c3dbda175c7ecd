//! Access to slices by vectors, with a shorter last strip.

use super::{Real, Vector};

/// Calls `work(at, count)` for each strip of `LANES` elements in `0..n`; the last strip may be shorter.
#[inline(always)]
pub fn strips<T: Real, V: Vector<T::Wide>>(n: usize, mut work: impl FnMut(usize, usize)) {
    let mut at = 0;
    while at + V::LANES <= n {
        work(at, V::LANES);
        at += V::LANES;
    }
    if at < n {
        work(at, n - at);
    }
}

/// Reads the `count` elements from index `at` on into a vector. The other lanes come from `fill`.
#[inline(always)]
pub fn get_or<T: Real, V: Vector<T::Wide>>(slice: &[T], at: usize, count: usize, fill: V) -> V {
    assert!(count <= V::LANES && at + count <= slice.len());
    // SAFETY: the range is inside the slice.
    unsafe {
        if count == V::LANES {
            T::load(slice.as_ptr().add(at))
        } else {
            T::load_part(slice.as_ptr().add(at), count, fill)
        }
    }
}

/// Reads the `count` elements from index `at` on into a vector. The other lanes are zero.
#[inline(always)]
pub fn get<T: Real, V: Vector<T::Wide>>(slice: &[T], at: usize, count: usize) -> V {
    get_or(slice, at, count, V::splat(T::Wide::ZERO))
}

/// Writes the first `count` lanes to the elements from index `at` on.
#[inline(always)]
pub fn put<T: Real, V: Vector<T::Wide>>(slice: &mut [T], at: usize, count: usize, value: V) {
    assert!(count <= V::LANES && at + count <= slice.len());
    // SAFETY: the range is inside the slice.
    unsafe {
        if count == V::LANES {
            T::store(value, slice.as_mut_ptr().add(at))
        } else {
            T::store_part(value, slice.as_mut_ptr().add(at), count)
        }
    }
}

/// Prefetches the cache line at `at`, which may be an invalid address.
#[inline(always)]
pub fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: part of the baseline; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
