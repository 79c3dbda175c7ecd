//! The arena: the single allocation in which a device computes, between two guard pages.
//!
//! The plan decides where tensors lie in it, and the executor runs ops on them. This module also measures which bytes
//! were really written, independently of the planner.
//!
//! ```text
//!   │ guard page │ slack │ byte 0 ............... byte `bytes` │ tail │ guard page │
//!    no access             64-byte aligned                             no access
//! ```
//! A write just past the end hits the upper guard page and faults. The base must be aligned to [`ALIGNMENT`], so sizes
//! that are not a multiple of it have a *tail* of up to 63 bytes. A stray write into the tail, or into the *slack*
//! below the base (less than a page), does not fault; [`Arena::has_stray_writes`] detects it.
//!
//! [`Arena::resize`] changes the size between steps. The arena remains one address range between guard pages. New pages
//! are resident before any old ones are freed, and freed pages return to the system.

use crate::error::ArenaError;
use crate::probe;
use bytemuck::Pod;
use plimsoll_core::Bytes;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

/// Alignment of the arena's first byte, in bytes: a cache line, and the widest vector register.
pub const ALIGNMENT: u64 = 64;

/// Two bytes whose repetition is a NaN in bf16, f16, f32 and f64 (in f64 a signalling one), and an index out of every
/// range in i32. They overwrite tensors that are no longer in use, so reading one by mistake spoils the results
/// visibly.
const POISON: [u8; 2] = 0x7ff4_u16.to_ne_bytes();

/// Memory of an exact size between two guard pages. All its pages are resident from the start. A shortage of memory is
/// therefore an error of [`Arena::map`], and never a fault during a step. The bytes are initially zero.
#[derive(Debug)]
pub struct Arena {
    /// Start of the lower guard page.
    mapping: NonNull<u8>,
    page: usize,
    /// Bytes between the two guard pages, a multiple of the page size.
    body: usize,
    /// Number of unused bytes between the lower guard page and byte 0 of the arena.
    slack: usize,
    bytes: usize,
    /// Lengths in bytes of the kernel mappings that together form the memory between the guard pages, in address order.
    /// One `mremap` call can move only one mapping.
    mapped_lengths: Vec<usize>,
}

// SAFETY: an `Arena` owns its mapping, which belongs to no thread. Methods that access its bytes through `&self` are
// unsafe and rely on their callers to prevent races; all others need `&mut self`.
unsafe impl Send for Arena {}
// SAFETY: through a shared `&Arena` safe code can only read sizes, addresses and residency.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps an arena of exactly `bytes` bytes and makes all its pages resident.
    ///
    /// # Errors
    /// [`ArenaError::OutOfMemory`] if this process has less than `bytes` available. This is checked before mapping,
    /// because the kernel kills a process that exceeds its container's limit. [`ArenaError::System`] if a system call
    /// fails for another reason.
    pub fn map(bytes: u64) -> Result<Arena, ArenaError> {
        let memory = probe::Memory::read();
        if Bytes(bytes) > memory.free {
            return Err(ArenaError::refused(Bytes(bytes), memory.free, &memory));
        }
        Arena::map_without_check(bytes, &memory)
    }

    /// Implements [`Arena::map`] without checking the available memory; `memory` only serves the error message.
    fn map_without_check(bytes: u64, memory: &probe::Memory) -> Result<Arena, ArenaError> {
        let refused = || ArenaError::refused(Bytes(bytes), memory.free, memory);
        let system = |call: &'static str| {
            let source = io::Error::last_os_error();
            if source.raw_os_error() == Some(libc::ENOMEM) { refused() } else { ArenaError::System { call, source } }
        };
        let page = page_size();
        let size = usize::try_from(bytes).map_err(|_| refused())?;
        let body = size.checked_next_multiple_of(page).ok_or_else(refused)?;
        let mapped = body.checked_add(2 * page).ok_or_else(refused)?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            libc::mmap(ptr::null_mut(), mapped, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(system("mmap"));
        }
        let mapping = NonNull::new(start.cast::<u8>()).expect("the kernel maps nothing at address zero");
        // From here on dropping `arena` unmaps it.
        let arena =
            Arena { mapping, page, body, slack: slack_bytes(size, body), bytes: size, mapped_lengths: vec![body] };
        arena.commit_pages(0..body).map_err(system)?;
        Ok(arena)
    }

    /// Makes fresh pages writable and resident; they hold zeros. `range` counts bytes from the end of the lower guard
    /// page. The error is the name of the failed system call; the reason is in `errno`.
    fn commit_pages(&self, range: Range<usize>) -> Result<(), &'static str> {
        let length = range.len();
        if length == 0 {
            return Ok(());
        }
        // SAFETY: between the guard pages of our mapping; no other code uses these pages yet.
        let start = unsafe { self.body_start().add(range.start) };
        // SAFETY: the range lies in our mapping, and no other code uses it yet.
        if unsafe { libc::mprotect(start.cast(), length, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            return Err("mprotect");
        }
        // Huge pages: measured on 1 GiB, they take 0.05 s instead of 0.34 s until all pages are resident, speed up
        // random reads by 10 to 20 %, and do not change the resident bytes, since they never cross the edge of a
        // mapping. Only advice: a refusal changes nothing.
        // SAFETY: the range is ours, and the advice does not change its contents.
        unsafe { libc::madvise(start.cast(), length, libc::MADV_HUGEPAGE) };
        loop {
            // SAFETY: the range is ours and writable; this advice faults its pages in without changing them.
            if unsafe { libc::madvise(start.cast(), length, libc::MADV_POPULATE_WRITE) } == 0 {
                return Ok(());
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                // Linux before 5.14 lacks this advice.
                Some(libc::EINVAL) => break,
                _ => return Err("madvise"),
            }
        }
        for offset in (0..length).step_by(self.page) {
            // SAFETY: inside the writable range, which no other code knows yet; a fresh page holds zeros anyway.
            unsafe { start.add(offset).write_volatile(0) };
        }
        Ok(())
    }

    /// Resizes the arena to exactly `bytes` bytes. The first `kept_bytes` bytes keep their values. All others are
    /// filled with the pattern by which later writes are detected. New pages are resident before anything changes, and
    /// freed pages return to the system. The arena's address may change.
    ///
    /// # Errors
    /// The errors of [`Arena::map`]. The arena then keeps its old size, but bytes above `kept_bytes` may have changed.
    ///
    /// # Panics
    /// If `kept_bytes` exceeds the old or the new size.
    pub fn resize(&mut self, bytes: u64, kept_bytes: u64) -> Result<(), ArenaError> {
        assert!(
            kept_bytes <= bytes.min(self.bytes as u64),
            "bug: {kept_bytes} bytes to keep from {} in {bytes}",
            self.bytes
        );
        let memory = probe::Memory::read();
        let available = memory.free + Bytes(self.body as u64);
        let refused = || ArenaError::refused(Bytes(bytes), available, &memory);
        let system = |call: &'static str| {
            let source = io::Error::last_os_error();
            if source.raw_os_error() == Some(libc::ENOMEM) { refused() } else { ArenaError::System { call, source } }
        };
        let size = usize::try_from(bytes).map_err(|_| refused())?;
        let body = size.checked_next_multiple_of(self.page).ok_or_else(refused)?;
        if body > self.body {
            if Bytes(body as u64) > available {
                return Err(refused());
            }
            self.grow(body).map_err(system)?;
        }
        let (kept_bytes, old, slack) = (kept_bytes as usize, self.slack, slack_bytes(size, body));
        self.body().copy_within(old..old + kept_bytes, slack);
        if body < self.body
            && let Err(call) = self.shrink(body)
        {
            let error = system(call);
            self.body().copy_within(slack..slack + kept_bytes, old);
            return Err(error);
        }
        (self.slack, self.bytes) = (slack, size);
        self.fill_pattern_except(slack..slack + kept_bytes);
        Ok(())
    }

    /// Grows the memory between the guard pages to `body` bytes, by moving its pages into a larger mapping. The new
    /// pages are resident. The error is the name of the failed system call; the reason is in `errno`.
    fn grow(&mut self, body: usize) -> Result<(), &'static str> {
        let (page, old_body_bytes) = (self.page, self.body);
        let mapped = body.checked_add(2 * page).ok_or("mmap")?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            libc::mmap(ptr::null_mut(), mapped, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err("mmap");
        }
        let mapping = NonNull::new(start.cast::<u8>()).expect("the kernel maps nothing at address zero");
        // Dropped, and thereby unmapped, on every error.
        let mut larger = Arena { mapping, page, body, slack: 0, bytes: 0, mapped_lengths: Vec::new() };
        larger.commit_pages(old_body_bytes..body)?;
        let mut moved = 0;
        for &length in self.mapped_lengths.iter().filter(|&&length| length > 0) {
            // SAFETY: moves whole pages of our body, from one mapping, onto untouched pages of our new mapping; `&mut
            // self` excludes all other accesses.
            let to = unsafe {
                let (from, to) = (self.body_start().add(moved), larger.body_start().add(moved));
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                libc::mremap(from.cast(), length, length, flags, to.cast::<libc::c_void>())
            };
            // The addresses and lengths are valid, so the kernel can only fail for lack of memory for its own tables.
            assert!(to != libc::MAP_FAILED || moved == 0, "mremap of a second part: {}", io::Error::last_os_error());
            if to == libc::MAP_FAILED {
                return Err("mremap");
            }
            moved += length;
        }
        larger.mapped_lengths = std::mem::take(&mut self.mapped_lengths);
        larger.mapped_lengths.push(body - old_body_bytes);
        (larger.slack, larger.bytes) = (self.slack, self.bytes);
        std::mem::swap(self, &mut larger);
        // The old body is unmapped and its addresses may already be reused. Only the old guard pages are left to unmap.
        larger.body = 0;
        // SAFETY: exactly the upper guard page of the old mapping.
        let unmapped = unsafe { libc::munmap(larger.body_start().add(old_body_bytes).cast(), page) };
        debug_assert_eq!(unmapped, 0, "munmap: {}", io::Error::last_os_error());
        let lower = larger.mapping;
        std::mem::forget(larger);
        // SAFETY: exactly the lower guard page of the old mapping.
        let unmapped = unsafe { libc::munmap(lower.as_ptr().cast(), page) };
        debug_assert_eq!(unmapped, 0, "munmap: {}", io::Error::last_os_error());
        Ok(())
    }

    /// Shrinks the memory between the guard pages to `body` bytes: maps a new guard page behind them and returns the
    /// rest to the system. The error is the name of the failed system call; the reason is in `errno`.
    fn shrink(&mut self, body: usize) -> Result<(), &'static str> {
        let (page, old_body_bytes) = (self.page, self.body);
        // SAFETY: a page of the body, which `&mut self` protects from other accesses; inaccessible pages replace it at
        // once.
        let guard = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            libc::mmap(self.body_start().add(body).cast(), page, libc::PROT_NONE, flags, -1, 0)
        };
        if guard == libc::MAP_FAILED {
            return Err("mmap");
        }
        // SAFETY: the range from the new guard page to the end of the mapping, including the old guard page.
        let unmapped = unsafe { libc::munmap(self.body_start().add(body + page).cast(), old_body_bytes - body) };
        debug_assert_eq!(unmapped, 0, "munmap: {}", io::Error::last_os_error());
        self.body = body;
        let mut left = body;
        for mapped_length in &mut self.mapped_lengths {
            *mapped_length = left.min(*mapped_length);
            left -= *mapped_length;
        }
        self.mapped_lengths.retain(|&mapped_length| mapped_length > 0);
        Ok(())
    }

    /// Returns the size of the arena as requested, without the unused bytes between it and its guard pages.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes as u64)
    }

    /// Returns the address of the first byte between the guard pages.
    fn body_start(&self) -> *mut u8 {
        // SAFETY: the mapping is two pages longer than the body, so this stays inside it.
        unsafe { self.mapping.as_ptr().add(self.page) }
    }

    /// Returns the address of byte 0, for calls to libraries. It is valid for reads and writes of [`Arena::bytes`]
    /// bytes until the arena is resized or dropped. No slice of the same bytes may be in use meanwhile.
    pub fn base(&self) -> *mut u8 {
        // SAFETY: `slack <= body`, so this stays inside the mapping.
        unsafe { self.body_start().add(self.slack) }
    }

    /// Returns the address of `len` elements of `T` at byte `offset`.
    ///
    /// # Panics
    /// If they lie outside the arena or are not aligned: the plan or the executor is wrong.
    fn address<T: Pod>(&self, offset: u64, len: usize) -> *mut T {
        let end = len.checked_mul(size_of::<T>()).and_then(|bytes| offset.checked_add(bytes as u64));
        assert!(
            end.is_some_and(|end| end <= self.bytes as u64),
            "bug: {len} elements of {} bytes at offset {offset} do not lie in an arena of {} bytes",
            size_of::<T>(),
            self.bytes
        );
        assert!(offset.is_multiple_of(align_of::<T>() as u64), "bug: offset {offset} is not aligned for its elements");
        // SAFETY: `offset <= bytes` was checked just now, and the base is followed by `bytes` mapped bytes.
        unsafe { self.base().add(offset as usize).cast() }
    }

    /// Returns `len` elements at byte `offset`.
    ///
    /// # Panics
    /// If they lie outside the arena or are not aligned.
    ///
    /// # Safety
    /// While the slice lives, no code writes its bytes, neither through [`Arena::slice_mut`] nor through
    /// [`Arena::base`].
    pub unsafe fn slice<T: Pod>(&self, offset: u64, len: usize) -> &[T] {
        let address = self.address(offset, len);
        // SAFETY: in bounds and aligned (`address` checked); initialised, since fresh pages are zero and every bit
        // pattern is a valid `Pod`; unwritten while the slice lives, by the caller's promise. The borrow of `self`
        // keeps the mapping and excludes methods that need `&mut self`.
        unsafe { std::slice::from_raw_parts(address, len) }
    }

    /// Returns `len` elements at byte `offset` for writing.
    ///
    /// The executor keeps the promise below as follows:
    ///
    /// - An op's operands become slices when it starts and are dropped when it ends.
    /// - An op's writes overlap neither each other nor its reads, except for its declared in-place pairs, which get one
    ///   mutable slice. The plan's verifier checks that tensors that live at the same time have disjoint ranges.
    /// - Threads of the pool get parts split off these slices.
    ///
    /// # Panics
    /// If the elements lie outside the arena or are not aligned.
    ///
    /// # Safety
    /// While the slice lives, no other code reads or writes its bytes: no other slice of this arena overlaps it, and no
    /// pointer from [`Arena::base`] is used on it.
    #[allow(clippy::mut_from_ref)] // Disjoint tensors of one arena are written at once; that is what an arena is for.
    pub unsafe fn slice_mut<T: Pod>(&self, offset: u64, len: usize) -> &mut [T] {
        let address = self.address(offset, len);
        // SAFETY: as in `slice`, and unique while it lives, by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(address, len) }
    }

    /// Returns all bytes between the guard pages: the arena, and the unused bytes below and above it.
    fn body(&mut self) -> &mut [u8] {
        // SAFETY: mapped, writable and initialised; `&mut self` excludes every slice handed out through `&self`.
        unsafe { std::slice::from_raw_parts_mut(self.body_start(), self.body) }
    }

    /// Returns all bytes of the arena, for reads and writes while no op runs.
    pub fn contents(&mut self) -> &mut [u8] {
        let inside = self.slack..self.slack + self.bytes;
        &mut self.body()[inside]
    }

    /// Returns all bytes between the guard pages as words of 8 bytes, the unit of the pattern that detects writes.
    fn pattern_words(&mut self) -> &mut [u64] {
        bytemuck::cast_slice_mut(self.body())
    }

    /// Fills the arena, and the unused bytes between it and its guard pages, with a pattern. Bytes that later differ
    /// from the pattern have been written. Each word of 8 bytes of the pattern depends on its index.
    pub fn fill_pattern(&mut self) {
        self.fill_pattern_except(0..0);
    }

    /// Fills the memory between the guard pages with the pattern of [`Arena::fill_pattern`], except for the byte range
    /// `kept`, which counts from the end of the lower guard page.
    fn fill_pattern_except(&mut self, kept: Range<usize>) {
        let (first_word, last) = (kept.start / 8, kept.end.div_ceil(8));
        for (index, word) in self.pattern_words().iter_mut().enumerate() {
            if index < first_word || index >= last {
                *word = pattern(index);
            } else if index * 8 < kept.start || index * 8 + 8 > kept.end {
                // The words at both ends are kept in part.
                let mut bytes = pattern(index).to_ne_bytes();
                for (at, (byte, old)) in (index * 8..).zip(bytes.iter_mut().zip(word.to_ne_bytes())) {
                    *byte = if kept.contains(&at) { old } else { *byte };
                }
                *word = u64::from_ne_bytes(bytes);
            }
        }
    }

    /// Returns the offset just past the highest byte written since [`Arena::fill_pattern`], rounded up to a multiple of
    /// four, but at most the arena's size. Zero if no byte was written.
    ///
    /// Four bytes count as written if they differ from the pattern. A random write equals the pattern once in 2³²
    /// times. Bytes that [`Arena::resize`] kept count as written.
    pub fn high_water(&mut self) -> Bytes {
        let (slack, bytes) = (self.slack, self.bytes);
        // Words of the body up to the one that holds the arena's last byte; the base starts a word.
        let pattern_words = &self.pattern_words()[slack / 8..(slack + bytes).div_ceil(8)];
        let Some(last) =
            pattern_words.iter().enumerate().rposition(|(index, &word)| word != pattern(slack / 8 + index))
        else {
            return Bytes::ZERO;
        };
        let (found, expected) = (pattern_words[last].to_ne_bytes(), pattern(slack / 8 + last).to_ne_bytes());
        let halves = if found[4..] == expected[4..] { 1 } else { 2 };
        Bytes((last as u64 * 8 + halves * 4).min(bytes as u64))
    }

    /// Whether no byte of `range` of the arena was written since [`Arena::fill_pattern`].
    ///
    /// # Panics
    /// If `range` lies outside the arena.
    pub fn is_untouched(&mut self, range: Range<u64>) -> bool {
        let range = self.to_body_range(range);
        self.holds_pattern(range)
    }

    /// Whether unused bytes between the arena and its guard pages were written since [`Arena::fill_pattern`].
    pub fn has_stray_writes(&mut self) -> bool {
        let (slack, end, body) = (self.slack, self.slack + self.bytes, self.body);
        !(self.holds_pattern(0..slack) && self.holds_pattern(end..body))
    }

    /// Whether bytes `range`, counted from the end of the lower guard page, still hold the pattern of
    /// [`Arena::fill_pattern`].
    fn holds_pattern(&mut self, range: Range<usize>) -> bool {
        let Range { start, end } = range;
        // Compares whole words quickly, and the bytes at both ends one by one.
        let (first_word, last) = (start.div_ceil(8), end / 8);
        if first_word >= last {
            let body = self.body();
            return (start..end).all(|at| body[at] == pattern(at / 8).to_ne_bytes()[at % 8]);
        }
        let pattern_words = &self.pattern_words()[first_word..last];
        pattern_words.iter().enumerate().all(|(index, &word)| word == pattern(first_word + index))
            && self.holds_pattern(start..first_word * 8)
            && self.holds_pattern(last * 8..end)
    }

    /// Overwrites bytes `range` of the arena with bytes that are NaN in every float type. A tensor that is read after
    /// its last planned use then spoils the results visibly.
    ///
    /// # Panics
    /// If `range` lies outside the arena.
    pub fn poison(&mut self, range: Range<u64>) {
        let range = self.to_body_range(range);
        // The base is at an even byte of the body, so the parity of the index aligns the two bytes with any element.
        let start = range.start;
        for (index, byte) in self.body()[range].iter_mut().enumerate() {
            *byte = POISON[(start + index) % 2];
        }
    }

    /// Converts a byte range of the arena into one that counts from the end of the lower guard page.
    fn to_body_range(&self, range: Range<u64>) -> Range<usize> {
        assert!(
            range.start <= range.end && range.end <= self.bytes as u64,
            "bug: bytes {range:?} do not lie in an arena of {} bytes",
            self.bytes
        );
        self.slack + range.start as usize..self.slack + range.end as usize
    }

    /// Returns the bytes of the arena that are resident now, in whole pages, as reported by the system.
    ///
    /// # Errors
    /// The system does not report it.
    pub fn resident(&self) -> io::Result<Bytes> {
        const PAGES: usize = 4096;
        let mut present = [0u8; PAGES];
        let mut resident = 0;
        for offset in (0..self.body).step_by(PAGES * self.page) {
            let length = (self.body - offset).min(PAGES * self.page);
            // SAFETY: the range is ours and page-aligned, and `present` has a byte for each of its pages.
            if unsafe { libc::mincore(self.body_start().add(offset).cast(), length, present.as_mut_ptr()) } != 0 {
                return Err(io::Error::last_os_error());
            }
            let pages = present[..length / self.page].iter().filter(|&&byte| byte & 1 == 1).count();
            resident += (pages * self.page) as u64;
        }
        Ok(Bytes(resident))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: exactly the range of this mapping; no slice outlives the arena it borrows from.
        let unmapped = unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.body + 2 * self.page) };
        debug_assert_eq!(unmapped, 0, "munmap: {}", io::Error::last_os_error());
    }
}

/// Returns word `index` of the pattern that fills unwritten memory of an arena. The word is a hash of the index (the
/// finaliser of splitmix64). Neither zeros nor a shifted copy of the arena's bytes therefore look unwritten.
fn pattern(index: usize) -> u64 {
    let mut word = (index as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Returns the number of unused bytes below an arena of `size` bytes in a mapping with `body` bytes between its guard
/// pages.
fn slack_bytes(size: usize, body: usize) -> usize {
    (body - size) / ALIGNMENT as usize * ALIGNMENT as usize
}

fn page_size() -> usize {
    // SAFETY: a query without pointers, which every Linux answers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).expect("the page size is positive")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const CHILD: &str = "PLIMSOLL_TEST_CHILD";

    /// Runs the calling test again in a child process, in which [`is_child`] is true. Returns the signal that ended it;
    /// panics if the child failed without a signal.
    fn run_in_child(test: &str) -> Option<i32> {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", &format!("arena::tests::{test}")])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("running 1 test"), "no such test: {text}");
        assert!(output.status.success() || output.status.signal().is_some(), "the child failed: {text}");
        output.status.signal()
    }

    fn is_child() -> bool {
        std::env::var_os(CHILD).is_some()
    }

    fn set_limit(resource: libc::__rlimit_resource_t, bytes: u64) {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: a plain system call on a struct that lives through it.
        assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
    }

    /// Accesses the byte at `address_in(arena)` in a child process and checks that this ends it with SIGSEGV.
    fn assert_faults(test: &str, address_in: impl Fn(&Arena) -> *mut u8, write: bool) {
        if !is_child() {
            assert_eq!(run_in_child(test), Some(libc::SIGSEGV));
            return;
        }
        set_limit(libc::RLIMIT_CORE, 0);
        let arena = Arena::map(3 * 4096 + 64).unwrap();
        // The last byte inside is accessible, so the fault below comes from the guard page.
        // SAFETY: inside the arena, which no other code uses.
        unsafe { arena.base().add(3 * 4096 + 63).write_volatile(1) };
        let address = address_in(&arena);
        // SAFETY: not safe; the access must end the process.
        unsafe {
            if write {
                address.write_volatile(1)
            } else {
                std::hint::black_box(address.read_volatile());
            }
        }
    }

    #[test]
    fn write_past_the_end_faults() {
        assert_faults("write_past_the_end_faults", |arena| arena.base().wrapping_add(arena.bytes().0 as usize), true);
    }

    #[test]
    fn read_past_the_end_faults() {
        assert_faults("read_past_the_end_faults", |arena| arena.base().wrapping_add(arena.bytes().0 as usize), false);
    }

    #[test]
    fn write_below_the_arena_faults() {
        assert_faults("write_below_the_arena_faults", |arena| arena.base().wrapping_sub(4096), true);
    }

    #[test]
    fn oversized_arena_reports_available_memory() {
        for bytes in [u64::MAX, u64::MAX - 4096, 1 << 60, 1 << 46] {
            match Arena::map(bytes) {
                Err(ArenaError::OutOfMemory { requested, available, bound_by }) => {
                    assert_eq!(requested, Bytes(bytes));
                    assert!(available > Bytes::ZERO && available < requested);
                    assert!(!bound_by.is_empty());
                }
                other => panic!("{bytes}: {other:?}"),
            }
        }
        assert_eq!(
            plimsoll_core::Failure::from(Arena::map(1 << 60).unwrap_err()).exit,
            plimsoll_core::Exit::DoesNotFit
        );
    }

    #[test]
    fn shortage_is_an_error_of_map() {
        if !is_child() {
            assert_eq!(run_in_child("shortage_is_an_error_of_map"), None);
            return;
        }
        let virtual_bytes = crate::process::virtual_size().unwrap();
        set_limit(libc::RLIMIT_AS, virtual_bytes.0 + (64 << 20));
        // The probe sees the limit of the process.
        let refused = Arena::map(256 << 20).unwrap_err();
        assert!(refused.to_string().contains("address space"), "{refused}");
        // Without the probe, the system's refusal becomes the same error.
        let memory = probe::Memory::read();
        let refused = Arena::map_without_check(256 << 20, &memory).unwrap_err();
        assert!(matches!(refused, ArenaError::OutOfMemory { .. }), "{refused}");
        assert!(Arena::map(16 << 20).is_ok());
    }

    #[test]
    fn arena_is_resident_until_dropped() {
        if !is_child() {
            // In a process of its own, because other tests map arenas in this one.
            assert_eq!(run_in_child("arena_is_resident_until_dropped"), None);
            return;
        }
        let bytes = (64 << 20) + 12345;
        let resident = || crate::process::resident().unwrap();
        let before = resident();
        let arena = Arena::map(bytes).unwrap();
        // The kernel's counters of a process lag a little.
        let (arena_bytes, lag) = (Bytes(bytes.next_multiple_of(page_size() as u64)), Bytes::mib(1));
        assert_eq!(arena.resident().unwrap(), arena_bytes);
        let grown = resident().saturating_sub(before);
        assert!(grown + lag > arena_bytes && grown < arena_bytes + lag, "{grown} for {arena_bytes}");
        assert_eq!(arena.base() as u64 % ALIGNMENT, 0);
        // SAFETY: no thread writes.
        assert!(unsafe { arena.slice::<u8>(0, bytes as usize) }.iter().all(|&byte| byte == 0));
        drop(arena);
        assert!(resident() < before + lag);
    }

    #[test]
    fn empty_arena_works() {
        let mut arena = Arena::map(0).unwrap();
        arena.fill_pattern();
        assert_eq!(arena.high_water(), Bytes::ZERO);
        assert_eq!(arena.resident().unwrap(), Bytes::ZERO);
        // SAFETY: no bytes at all.
        assert!(unsafe { arena.slice_mut::<f32>(0, 0) }.is_empty());
    }

    #[test]
    fn poison_is_nan_in_every_float_type() {
        let mut arena = Arena::map(4096).unwrap();
        arena.poison(8..4096);
        // SAFETY: no thread writes during these reads.
        unsafe {
            assert!(arena.slice::<f64>(8, 511).iter().all(|x| x.is_nan()));
            assert!(arena.slice::<f32>(8, 1022).iter().all(|x| x.is_nan()));
            assert!(arena.slice::<half::bf16>(8, 2044).iter().all(|x| x.is_nan()));
            assert!(arena.slice::<half::f16>(8, 2044).iter().all(|x| x.is_nan()));
            assert!(arena.slice::<i32>(8, 1022).iter().all(|&x| x > 2_000_000_000));
            assert_eq!(arena.slice::<u64>(0, 1), [0]);
        }
    }

    #[test]
    #[should_panic(expected = "do not lie in an arena")]
    fn slice_past_the_end_panics() {
        let arena = Arena::map(1024).unwrap();
        // SAFETY: panics before there is a slice.
        unsafe { arena.slice_mut::<f32>(4, 256) };
    }

    #[test]
    #[should_panic(expected = "do not lie in an arena")]
    fn overflowing_length_panics() {
        let arena = Arena::map(1024).unwrap();
        // SAFETY: panics before there is a slice.
        unsafe { arena.slice::<f64>(8, usize::MAX / 4) };
    }

    #[test]
    fn stray_writes_outside_are_detected() {
        let mut arena = Arena::map(1000).unwrap();
        arena.fill_pattern();
        assert!(!arena.has_stray_writes());
        // SAFETY: byte 1000 is in the tail, below the guard page; no other code uses it.
        unsafe { arena.base().add(1000).write(!*arena.base().add(1000)) };
        assert!(arena.has_stray_writes() && arena.is_untouched(0..1000));
        arena.fill_pattern();
        // SAFETY: the byte below the base is in the slack.
        unsafe { arena.base().sub(1).write(!*arena.base().sub(1)) };
        assert!(arena.has_stray_writes() && arena.high_water() == Bytes::ZERO);
    }

    #[test]
    fn shrinking_returns_memory_to_the_system() {
        if !is_child() {
            assert_eq!(run_in_child("shrinking_returns_memory_to_the_system"), None);
            return;
        }
        let resident = || crate::process::resident().unwrap();
        let virtual_bytes = crate::process::virtual_size().unwrap();
        let mut arena = Arena::map(64 << 20).unwrap();
        let before = resident();
        arena.resize(16 << 20, 1 << 20).unwrap();
        assert!(resident() + Bytes::mib(47) < before, "{} of {before}", resident());
        assert_eq!(arena.resident().unwrap(), Bytes::mib(16));
        arena.resize(48 << 20, 1 << 20).unwrap();
        assert_eq!(arena.resident().unwrap(), Bytes::mib(48));
        // A refused size leaves the arena unchanged.
        assert!(matches!(arena.resize(1 << 60, 1 << 20), Err(ArenaError::OutOfMemory { .. })));
        set_limit(libc::RLIMIT_AS, virtual_bytes.0 + (80 << 20));
        assert!(matches!(arena.resize(256 << 20, 1 << 20), Err(ArenaError::OutOfMemory { .. })));
        assert_eq!((arena.bytes(), arena.resident().unwrap()), (Bytes::mib(48), Bytes::mib(48)));
        drop(arena);
        assert!(crate::process::virtual_size().unwrap() < virtual_bytes + Bytes::mib(1), "a mapping is left");
    }

    #[test]
    fn resized_arena_ends_at_its_guard() {
        assert_faults(
            "resized_arena_ends_at_its_guard",
            |arena| {
                let mut other = Arena::map(arena.bytes().0).unwrap();
                for bytes in [5 * 4096 + 64, 64, 9 * 4096 + 128] {
                    other.resize(bytes, 0).unwrap();
                    // SAFETY: the last byte inside, which no other code uses.
                    unsafe { other.base().add(bytes as usize - 1).write_volatile(1) };
                }
                let end = other.base().wrapping_add(other.bytes().0 as usize);
                std::mem::forget(other);
                end
            },
            true,
        );
    }

    proptest! {
        #[test]
        fn resize_keeps_only_the_kept_bytes(sizes in prop::collection::vec((0u64..40_000, 0u64..40_000), 1..8)) {
            let mut arena = Arena::map(20_000).unwrap();
            arena.fill_pattern();
            for (round, (bytes, kept_bytes)) in sizes.into_iter().enumerate() {
                let kept_bytes = kept_bytes.min(bytes).min(arena.bytes().0);
                let known: Vec<u8> = arena.contents()[..kept_bytes as usize].to_vec();
                arena.resize(bytes, kept_bytes).unwrap();
                prop_assert_eq!(arena.bytes(), Bytes(bytes));
                prop_assert_eq!(arena.base() as u64 % ALIGNMENT, 0);
                prop_assert!(arena.contents()[..kept_bytes as usize] == known[..]);
                prop_assert!(arena.is_untouched(kept_bytes..bytes) && !arena.has_stray_writes());
                // Writes up to an end that differs in each round.
                let end = (bytes * (round as u64 % 3 + 1) / 3) as usize;
                arena.contents()[..end].iter_mut().for_each(|byte| *byte = !*byte);
            }
        }

        #[test]
        fn high_water_mark_is_exact(pattern_words in 1u64..5000, odd in 0u64..4, from in 0u64..5000, len in 1u64..5000, value: u32) {
            let bytes = pattern_words * 4 + odd;
            let mut arena = Arena::map(bytes).unwrap();
            arena.fill_pattern();
            prop_assert_eq!(arena.high_water(), Bytes::ZERO);
            let from = from % pattern_words;
            let len = len.min(pattern_words - from);
            let (start, end) = (from * 4, (from + len) * 4);
            // The last word gets a value that differs from the pattern, as all but one of 2^32 values do.
            // SAFETY: the only slice there is.
            let written = unsafe { arena.slice_mut::<u32>(start, len as usize) };
            let last = written[len as usize - 1];
            written.fill(value);
            if value == last { written[len as usize - 1] = !value; }
            prop_assert_eq!(arena.high_water(), Bytes(end));
            prop_assert!(!arena.has_stray_writes());
            prop_assert!(arena.is_untouched(0..start) && arena.is_untouched(end..bytes));
            prop_assert!(!arena.is_untouched(0..end) && !arena.is_untouched(end - 4..bytes));
        }
    }
}
