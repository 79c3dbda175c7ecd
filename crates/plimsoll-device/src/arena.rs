//! The arena: the one allocation that a device computes in, between two guard pages, with the means to prove from
//! outside the planner how much of it was really used.
//!
//! Where tensors lie in it is the plan's business; what runs in it is the executor's.
//!
//! ```text
//!   │ guard page │ slack │ byte 0 ............... byte `bytes` │ tail │ guard page │
//!    no access             64-byte aligned                             no access
//! ```
//! The end of the arena sits at the upper guard page: writing one byte past it faults. The base has to stay aligned to
//! [`ALIGNMENT`], so for sizes that are no multiple of it up to 63 bytes of *tail* lie between; a stray write there,
//! or into the *slack* below the base (less than a page), does not fault but is found by [`Arena::strayed`].
//!
//! Between steps an arena may become another size ([`Arena::resize`]): it stays one range of addresses between guard
//! pages, grows by pages of its own that are there before anything is given up, and gives pages really back.

use crate::probe;
use bytemuck::Pod;
use plimsoll_core::{Bytes, Failure};
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

/// Alignment of the arena's first byte: a cache line, and the widest vector register.
pub const ALIGNMENT: u64 = 64;

/// Two bytes that are NaN as bf16, f16, f32 and f64 (there a signalling one), and make an index out of every range as
/// i32: whatever reads a dead tensor shows it.
const POISON: [u8; 2] = 0x7ff4_u16.to_ne_bytes();

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The machine, the container or a limit of the process does not give that much.
    #[error("an arena of {asked} is refused: {available} can be had ({bound_by})")]
    Refused {
        /// The size of the arena.
        asked: Bytes,
        /// What could be had at that moment.
        available: Bytes,
        /// What sets that limit.
        bound_by: String,
    },
    /// A call to the system failed for another reason.
    #[error("the system refuses `{call}` on the arena: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl From<ArenaError> for Failure {
    fn from(error: ArenaError) -> Failure {
        let message = error.to_string();
        match error {
            ArenaError::Refused { .. } => {
                Failure::does_not_fit(message).hint("give a smaller --budget, or end what else holds memory")
            }
            ArenaError::System { .. } => Failure::bug(message),
        }
    }
}

/// One exact-size mapping between two guard pages. All of it is held from the start: a shortage is an error of
/// [`Arena::map`], never a fault while a step runs. Its bytes are zero at first.
#[derive(Debug)]
pub struct Arena {
    /// Start of the lower guard page.
    mapping: NonNull<u8>,
    page: usize,
    /// Bytes between the guard pages, whole pages.
    body: usize,
    /// Bytes of slack below the base.
    slack: usize,
    bytes: usize,
    /// Lengths of the parts of the body, in order, that were mapped at different times: the system moves each by itself.
    parts: Vec<usize>,
}

// SAFETY: an `Arena` owns its mapping, which belongs to no thread; the methods that touch its bytes through `&self`
// are unsafe and leave races to their callers' promise, all others need `&mut self`.
unsafe impl Send for Arena {}
// SAFETY: as above: through a shared `&Arena` safe code can only ask for sizes, addresses and residency.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps an arena of exactly `bytes` bytes and makes all its pages resident.
    ///
    /// # Errors
    /// [`ArenaError::Refused`] where less than `bytes` is free for this process. That is looked up first, because a
    /// container over its limit is killed and not told.
    pub fn map(bytes: u64) -> Result<Arena, ArenaError> {
        let memory = probe::Memory::read();
        if Bytes(bytes) > memory.free {
            return Err(ArenaError::Refused { asked: Bytes(bytes), available: memory.free, bound_by: memory.bound_by });
        }
        Arena::map_unasked(bytes, &memory)
    }

    /// [`Arena::map`] without asking `memory` first; `memory` only serves the message.
    fn map_unasked(bytes: u64, memory: &probe::Memory) -> Result<Arena, ArenaError> {
        let refused =
            || ArenaError::Refused { asked: Bytes(bytes), available: memory.free, bound_by: memory.bound_by.clone() };
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
        // From here on dropping `arena` unmaps it, on every way out.
        let arena = Arena { mapping, page, body, slack: slack_of(size, body), bytes: size, parts: vec![body] };
        arena.open(0..body).map_err(system)?;
        Ok(arena)
    }

    /// Makes pages of the mapping (`range` counts from the first page after the guard) writable and resident. They hold
    /// zeros. Returns the call that failed; the reason is in `errno`.
    fn open(&self, range: Range<usize>) -> Result<(), &'static str> {
        let length = range.len();
        if length == 0 {
            return Ok(());
        }
        // SAFETY: between the guard pages of the mapping, which is ours; nobody uses these pages yet.
        let first = unsafe { self.first().add(range.start) };
        // SAFETY: as above.
        if unsafe { libc::mprotect(first.cast(), length, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            return Err("mprotect");
        }
        // Huge pages: measured on 1 GiB, 0.05 s instead of 0.34 s until all is resident, random reads 10 to 20 %
        // faster, and the same resident bytes, since they never reach over the edge of a mapping. Only advice: a
        // refusal changes nothing.
        // SAFETY: the range is ours, and the advice does not change its contents.
        unsafe { libc::madvise(first.cast(), length, libc::MADV_HUGEPAGE) };
        loop {
            // SAFETY: the range is ours and writable; this advice faults its pages in without changing them.
            if unsafe { libc::madvise(first.cast(), length, libc::MADV_POPULATE_WRITE) } == 0 {
                return Ok(());
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                // Linux before 5.14 does not know the advice.
                Some(libc::EINVAL) => break,
                _ => return Err("madvise"),
            }
        }
        for offset in (0..length).step_by(self.page) {
            // SAFETY: inside the writable range, which nobody else knows yet; a fresh page holds zeros anyway.
            unsafe { first.add(offset).write_volatile(0) };
        }
        Ok(())
    }

    /// Makes it an arena of exactly `bytes` bytes, in which the first `keep` bytes are what they were; all others hold
    /// the pattern of [`Arena::fill_pattern`]. What an arena grows by is resident before anything changes, and what it
    /// shrinks by goes back to the system. Its base may change.
    ///
    /// # Errors
    /// As [`Arena::map`]; the arena is then what it was, but for bytes above `keep`.
    ///
    /// # Panics
    /// Where `keep` is more than the old or the new size.
    pub fn resize(&mut self, bytes: u64, keep: u64) -> Result<(), ArenaError> {
        assert!(keep <= bytes.min(self.bytes as u64), "bug: {keep} bytes to keep from {} in {bytes}", self.bytes);
        let memory = probe::Memory::read();
        let available = memory.free + Bytes(self.body as u64);
        let refused = || ArenaError::Refused { asked: Bytes(bytes), available, bound_by: memory.bound_by.clone() };
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
        let (keep, old, slack) = (keep as usize, self.slack, slack_of(size, body));
        self.body().copy_within(old..old + keep, slack);
        if body < self.body
            && let Err(call) = self.cut(body)
        {
            let error = system(call);
            self.body().copy_within(slack..slack + keep, old);
            return Err(error);
        }
        (self.slack, self.bytes) = (slack, size);
        self.fill_pattern_but(slack..slack + keep);
        Ok(())
    }

    /// Makes the body longer, all of it resident, by moving its pages to where there is room behind them.
    fn grow(&mut self, body: usize) -> Result<(), &'static str> {
        let (page, held) = (self.page, self.body);
        let mapped = body.checked_add(2 * page).ok_or("mmap")?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            libc::mmap(ptr::null_mut(), mapped, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err("mmap");
        }
        let mapping = NonNull::new(start.cast::<u8>()).expect("the kernel maps nothing at address zero");
        // Dropped on every way out that fails.
        let mut larger = Arena { mapping, page, body, slack: 0, bytes: 0, parts: Vec::new() };
        larger.open(held..body)?;
        let mut moved = 0;
        for &length in self.parts.iter().filter(|&&length| length > 0) {
            // SAFETY: moves whole pages of our body, of one part, onto pages of our new mapping that hold nothing yet;
            // `&mut self` keeps everybody from looking at them.
            let to = unsafe {
                let (from, to) = (self.first().add(moved), larger.first().add(moved));
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                libc::mremap(from.cast(), length, length, flags, to.cast::<libc::c_void>())
            };
            // The system checks address and length, which are right, and then at worst lacks memory for its own tables.
            assert!(to != libc::MAP_FAILED || moved == 0, "mremap of a second part: {}", io::Error::last_os_error());
            if to == libc::MAP_FAILED {
                return Err("mremap");
            }
            moved += length;
        }
        larger.parts = std::mem::take(&mut self.parts);
        larger.parts.push(body - held);
        (larger.slack, larger.bytes) = (self.slack, self.bytes);
        std::mem::swap(self, &mut larger);
        // What was the body is no longer mapped, and its addresses may be somebody else's by now: only the guard pages
        // are left.
        larger.body = 0;
        // SAFETY: exactly the upper guard page of the old mapping.
        let unmapped = unsafe { libc::munmap(larger.first().add(held).cast(), page) };
        debug_assert_eq!(unmapped, 0, "munmap: {}", io::Error::last_os_error());
        let lower = larger.mapping;
        std::mem::forget(larger);
        // SAFETY: exactly the lower guard page of the old mapping.
        let unmapped = unsafe { libc::munmap(lower.as_ptr().cast(), page) };
        debug_assert_eq!(unmapped, 0, "munmap: {}", io::Error::last_os_error());
        Ok(())
    }

    /// Makes the body shorter: a new guard page behind it, and the rest back to the system.
    fn cut(&mut self, body: usize) -> Result<(), &'static str> {
        let (page, held) = (self.page, self.body);
        // SAFETY: a page of the body, which `&mut self` keeps everybody from looking at; fresh pages of no access take
        // its place at once.
        let guard = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            libc::mmap(self.first().add(body).cast(), page, libc::PROT_NONE, flags, -1, 0)
        };
        if guard == libc::MAP_FAILED {
            return Err("mmap");
        }
        // SAFETY: what lies between the new guard page and the end of the mapping, the old guard page included.
        let unmapped = unsafe { libc::munmap(self.first().add(body + page).cast(), held - body) };
        debug_assert_eq!(unmapped, 0, "munmap: {}", io::Error::last_os_error());
        self.body = body;
        let mut left = body;
        for part in &mut self.parts {
            *part = left.min(*part);
            left -= *part;
        }
        self.parts.retain(|&part| part > 0);
        Ok(())
    }

    /// The size that was asked for.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes as u64)
    }

    /// The first byte between the guard pages.
    fn first(&self) -> *mut u8 {
        // SAFETY: the mapping is two pages longer than the body, so this stays inside it.
        unsafe { self.mapping.as_ptr().add(self.page) }
    }

    /// The arena's byte 0, for calls to libraries. Valid for reads and writes of [`Arena::bytes`] bytes while the arena
    /// lives, under the promise of [`Arena::slice_mut`].
    pub fn base(&self) -> *mut u8 {
        // SAFETY: `slack <= body`, so this stays inside the mapping.
        unsafe { self.first().add(self.slack) }
    }

    /// Address of `len` elements of `T` at byte `offset`.
    ///
    /// # Panics
    /// Where they do not lie in the arena or are not aligned: the plan or the executor is wrong.
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

    /// `len` elements at byte `offset`.
    ///
    /// # Panics
    /// Where they do not lie in the arena or are not aligned.
    ///
    /// # Safety
    /// While the slice lives, nothing writes its bytes: no [`Arena::slice_mut`] and no pointer from [`Arena::base`].
    pub unsafe fn slice<T: Pod>(&self, offset: u64, len: usize) -> &[T] {
        let address = self.address(offset, len);
        // SAFETY: in bounds and aligned (`address` checked); always initialised, since fresh pages are zero and every
        // bit pattern is a `Pod`; unwritten while the slice lives, by the caller's promise; the borrow of `self` keeps
        // the mapping, and keeps out the methods that need `&mut self`.
        unsafe { std::slice::from_raw_parts(address, len) }
    }

    /// `len` elements at byte `offset`, to be written.
    ///
    /// The executor keeps the promise below so: one op runs at a time on a device; its operands are turned into slices
    /// when it starts and dropped when it ends; an op's writes overlap neither each other nor its reads, except for the
    /// in-place pairs it declares, which get one mutable slice (the packing, checked by the plan's verifier, gives
    /// tensors that live at once disjoint ranges). Threads of the pool get parts split off these slices.
    ///
    /// # Panics
    /// Where they do not lie in the arena or are not aligned.
    ///
    /// # Safety
    /// While the slice lives, nothing else reads or writes its bytes: no other slice of this arena overlaps it, and no
    /// pointer from [`Arena::base`] is used on it.
    #[allow(clippy::mut_from_ref)] // Disjoint tensors of one arena are written at once; that is what an arena is for.
    pub unsafe fn slice_mut<T: Pod>(&self, offset: u64, len: usize) -> &mut [T] {
        let address = self.address(offset, len);
        // SAFETY: as in `slice`; and unique while it lives, by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(address, len) }
    }

    /// All bytes between the guard pages.
    fn body(&mut self) -> &mut [u8] {
        // SAFETY: mapped, writable and initialised; `&mut self` excludes every slice handed out through `&self`.
        unsafe { std::slice::from_raw_parts_mut(self.first(), self.body) }
    }

    /// The arena's bytes, for who looks at it from outside while no op runs.
    pub fn contents(&mut self) -> &mut [u8] {
        let inside = self.slack..self.slack + self.bytes;
        &mut self.body()[inside]
    }

    /// The body as words of the pattern. Pages are whole words.
    fn words(&mut self) -> &mut [u64] {
        bytemuck::cast_slice_mut(self.body())
    }

    /// Fills the arena, slack and tail included, with a pattern in which every word depends on its place.
    pub fn fill_pattern(&mut self) {
        self.fill_pattern_but(0..0);
    }

    /// The same, but for bytes `kept` of the body.
    fn fill_pattern_but(&mut self, kept: Range<usize>) {
        let (first, last) = (kept.start / 8, kept.end.div_ceil(8));
        for (index, word) in self.words().iter_mut().enumerate() {
            if index < first || index >= last {
                *word = pattern(index);
            } else if index * 8 < kept.start || index * 8 + 8 > kept.end {
                // The words at both ends are kept in part.
                let mut bytes = pattern(index).to_ne_bytes();
                for (at, (byte, held)) in (index * 8..).zip(bytes.iter_mut().zip(word.to_ne_bytes())) {
                    *byte = if kept.contains(&at) { held } else { *byte };
                }
                *word = u64::from_ne_bytes(bytes);
            }
        }
    }

    /// After [`Arena::fill_pattern`]: the end of the topmost part that was written since, in bytes from the base.
    ///
    /// Compared in units of four bytes, so a last write that happens to equal the pattern hides once in 2³².
    pub fn high_water(&mut self) -> Bytes {
        let (slack, bytes) = (self.slack, self.bytes);
        // Words of the body up to the one that holds the arena's last byte; the base starts a word.
        let words = &self.words()[slack / 8..(slack + bytes).div_ceil(8)];
        let Some(last) = words.iter().enumerate().rposition(|(index, &word)| word != pattern(slack / 8 + index)) else {
            return Bytes::ZERO;
        };
        let (found, expected) = (words[last].to_ne_bytes(), pattern(slack / 8 + last).to_ne_bytes());
        let halves = if found[4..] == expected[4..] { 1 } else { 2 };
        Bytes((last as u64 * 8 + halves * 4).min(bytes as u64))
    }

    /// After [`Arena::fill_pattern`]: whether no byte of `range` (from the base) was written since.
    ///
    /// # Panics
    /// Where `range` does not lie in the arena.
    pub fn untouched(&mut self, range: Range<u64>) -> bool {
        let range = self.within_body(range);
        self.holds_pattern(range)
    }

    /// After [`Arena::fill_pattern`]: whether something was written beside the arena, into its slack or tail.
    pub fn strayed(&mut self) -> bool {
        let (slack, end, body) = (self.slack, self.slack + self.bytes, self.body);
        !(self.holds_pattern(0..slack) && self.holds_pattern(end..body))
    }

    /// Whether bytes `range` of the body still hold the pattern.
    fn holds_pattern(&mut self, range: Range<usize>) -> bool {
        let Range { start, end } = range;
        // Whole words fast, what is left at both ends by the byte.
        let (first, last) = (start.div_ceil(8), end / 8);
        if first >= last {
            let body = self.body();
            return (start..end).all(|at| body[at] == pattern(at / 8).to_ne_bytes()[at % 8]);
        }
        let words = &self.words()[first..last];
        words.iter().enumerate().all(|(index, &word)| word == pattern(first + index))
            && self.holds_pattern(start..first * 8)
            && self.holds_pattern(last * 8..end)
    }

    /// Overwrites `range` (from the base) with bytes that are NaN in every float type: a dead tensor that is read shows.
    ///
    /// # Panics
    /// Where `range` does not lie in the arena.
    pub fn poison(&mut self, range: Range<u64>) {
        let range = self.within_body(range);
        // The base is even in the body, so parity of the place keeps the two bytes in step with any element.
        let start = range.start;
        for (index, byte) in self.body()[range].iter_mut().enumerate() {
            *byte = POISON[(start + index) % 2];
        }
    }

    /// A range from the base as a range of the body.
    fn within_body(&self, range: Range<u64>) -> Range<usize> {
        assert!(
            range.start <= range.end && range.end <= self.bytes as u64,
            "bug: bytes {range:?} do not lie in an arena of {} bytes",
            self.bytes
        );
        self.slack + range.start as usize..self.slack + range.end as usize
    }

    /// Bytes of the mapping that are in memory now, asked of the system: whole pages.
    ///
    /// # Errors
    /// Where the system does not say.
    pub fn resident(&self) -> io::Result<Bytes> {
        const PAGES: usize = 4096;
        let mut present = [0u8; PAGES];
        let mut resident = 0;
        for offset in (0..self.body).step_by(PAGES * self.page) {
            let length = (self.body - offset).min(PAGES * self.page);
            // SAFETY: the range is ours and page-aligned, and `present` has a byte for each of its pages.
            if unsafe { libc::mincore(self.first().add(offset).cast(), length, present.as_mut_ptr()) } != 0 {
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
        // SAFETY: exactly the range that `mmap` gave; no slice outlives the arena it borrows from.
        let unmapped = unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.body + 2 * self.page) };
        debug_assert_eq!(unmapped, 0, "munmap: {}", io::Error::last_os_error());
    }
}

/// What word `index` of the body holds until something is written: a mixing hash (the finaliser of splitmix64), so that
/// neither zeros nor shifted copies of the arena look untouched.
fn pattern(index: usize) -> u64 {
    let mut word = (index as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Bytes of slack below the base of an arena of `size` bytes in a body of `body`.
fn slack_of(size: usize, body: usize) -> usize {
    (body - size) / ALIGNMENT as usize * ALIGNMENT as usize
}

fn page_size() -> usize {
    // SAFETY: a question without arguments in memory; every Linux answers it.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).expect("a page has a size")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const CHILD: &str = "PLIMSOLL_TEST_CHILD";

    /// Runs this very test again in a child process, where `child` is true; returns the signal that ended it, or
    /// panics where it did not end by a signal and did not succeed.
    fn in_child(test: &str) -> Option<i32> {
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

    fn limit(resource: libc::__rlimit_resource_t, bytes: u64) {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: a plain system call on a struct that lives through it.
        assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
    }

    /// Touches the byte at `place(arena)` in a child, which has to be ended by it.
    fn faults(test: &str, place: impl Fn(&Arena) -> *mut u8, write: bool) {
        if !is_child() {
            assert_eq!(in_child(test), Some(libc::SIGSEGV));
            return;
        }
        limit(libc::RLIMIT_CORE, 0);
        let arena = Arena::map(3 * 4096 + 64).unwrap();
        // The nearest byte inside is fine: the fault below is the guard's.
        // SAFETY: inside the arena, which nobody else uses.
        unsafe { arena.base().add(3 * 4096 + 63).write_volatile(1) };
        let place = place(&arena);
        // SAFETY: not safe at all: this has to end the process.
        unsafe {
            if write {
                place.write_volatile(1)
            } else {
                std::hint::black_box(place.read_volatile());
            }
        }
    }

    #[test]
    fn a_write_one_byte_past_the_planned_size_faults() {
        faults(
            "a_write_one_byte_past_the_planned_size_faults",
            |arena| arena.base().wrapping_add(arena.bytes().0 as usize),
            true,
        );
    }

    #[test]
    fn a_read_past_the_planned_size_faults() {
        faults(
            "a_read_past_the_planned_size_faults",
            |arena| arena.base().wrapping_add(arena.bytes().0 as usize),
            false,
        );
    }

    #[test]
    fn a_write_a_page_below_the_arena_faults() {
        faults("a_write_a_page_below_the_arena_faults", |arena| arena.base().wrapping_sub(4096), true);
    }

    #[test]
    fn absurd_sizes_are_refused_with_what_can_be_had() {
        for bytes in [u64::MAX, u64::MAX - 4096, 1 << 60, 1 << 46] {
            match Arena::map(bytes) {
                Err(ArenaError::Refused { asked, available, bound_by }) => {
                    assert_eq!(asked, Bytes(bytes));
                    assert!(available > Bytes::ZERO && available < asked);
                    assert!(!bound_by.is_empty());
                }
                other => panic!("{bytes}: {other:?}"),
            }
        }
        assert_eq!(Failure::from(Arena::map(1 << 60).unwrap_err()).exit, plimsoll_core::Exit::DoesNotFit);
    }

    #[test]
    fn a_shortage_is_an_error_at_the_start() {
        if !is_child() {
            assert_eq!(in_child("a_shortage_is_an_error_at_the_start"), None);
            return;
        }
        let held = crate::process::virtual_size().unwrap();
        limit(libc::RLIMIT_AS, held.0 + (64 << 20));
        // The probe sees the limit of the process...
        let refused = Arena::map(256 << 20).unwrap_err();
        assert!(refused.to_string().contains("address space"), "{refused}");
        // ...and where it does not, the system's refusal comes back as the same error.
        let memory = probe::Memory::read();
        let refused = Arena::map_unasked(256 << 20, &memory).unwrap_err();
        assert!(matches!(refused, ArenaError::Refused { .. }), "{refused}");
        assert!(Arena::map(16 << 20).is_ok());
    }

    #[test]
    fn all_of_an_arena_is_resident_at_once_and_given_back_at_the_end() {
        if !is_child() {
            // In a process of its own, because the arenas of other tests come and go in this one.
            assert_eq!(in_child("all_of_an_arena_is_resident_at_once_and_given_back_at_the_end"), None);
            return;
        }
        let bytes = (64 << 20) + 12345;
        let resident = || crate::process::resident().unwrap();
        let before = resident();
        let arena = Arena::map(bytes).unwrap();
        // The kernel's counters of a process lag behind by a little.
        let (held, lag) = (Bytes(bytes.next_multiple_of(page_size() as u64)), Bytes::mib(1));
        assert_eq!(arena.resident().unwrap(), held);
        let grown = resident().saturating_sub(before);
        assert!(grown + lag > held && grown < held + lag, "{grown} for {held}");
        assert_eq!(arena.base() as u64 % ALIGNMENT, 0);
        // SAFETY: nobody writes.
        assert!(unsafe { arena.slice::<u8>(0, bytes as usize) }.iter().all(|&byte| byte == 0));
        drop(arena);
        assert!(resident() < before + lag);
    }

    #[test]
    fn an_empty_arena_is_an_arena() {
        let mut arena = Arena::map(0).unwrap();
        arena.fill_pattern();
        assert_eq!(arena.high_water(), Bytes::ZERO);
        assert_eq!(arena.resident().unwrap(), Bytes::ZERO);
        // SAFETY: no bytes at all.
        assert!(unsafe { arena.slice_mut::<f32>(0, 0) }.is_empty());
    }

    #[test]
    fn poison_is_no_number_in_any_type() {
        let mut arena = Arena::map(4096).unwrap();
        arena.poison(8..4096);
        // SAFETY: nobody writes while these are looked at.
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
    fn a_slice_past_the_end_is_a_bug_and_not_a_write() {
        let arena = Arena::map(1024).unwrap();
        // SAFETY: panics before there is a slice.
        unsafe { arena.slice_mut::<f32>(4, 256) };
    }

    #[test]
    #[should_panic(expected = "do not lie in an arena")]
    fn a_length_that_overflows_is_a_bug_and_not_a_write() {
        let arena = Arena::map(1024).unwrap();
        // SAFETY: panics before there is a slice.
        unsafe { arena.slice::<f64>(8, usize::MAX / 4) };
    }

    #[test]
    fn a_stray_write_beside_the_arena_is_found() {
        let mut arena = Arena::map(1000).unwrap();
        arena.fill_pattern();
        assert!(!arena.strayed());
        // SAFETY: byte 1000 is in the tail, below the guard page; nobody else uses it.
        unsafe { arena.base().add(1000).write(!*arena.base().add(1000)) };
        assert!(arena.strayed() && arena.untouched(0..1000));
        arena.fill_pattern();
        // SAFETY: the byte below the base is in the slack.
        unsafe { arena.base().sub(1).write(!*arena.base().sub(1)) };
        assert!(arena.strayed() && arena.high_water() == Bytes::ZERO);
    }

    #[test]
    fn what_an_arena_shrinks_by_goes_back_to_the_system() {
        if !is_child() {
            assert_eq!(in_child("what_an_arena_shrinks_by_goes_back_to_the_system"), None);
            return;
        }
        let resident = || crate::process::resident().unwrap();
        let held = crate::process::virtual_size().unwrap();
        let mut arena = Arena::map(64 << 20).unwrap();
        let before = resident();
        arena.resize(16 << 20, 1 << 20).unwrap();
        assert!(resident() + Bytes::mib(47) < before, "{} of {before}", resident());
        assert_eq!(arena.resident().unwrap(), Bytes::mib(16));
        arena.resize(48 << 20, 1 << 20).unwrap();
        assert_eq!(arena.resident().unwrap(), Bytes::mib(48));
        // What does not fit leaves the arena as it is.
        assert!(matches!(arena.resize(1 << 60, 1 << 20), Err(ArenaError::Refused { .. })));
        limit(libc::RLIMIT_AS, held.0 + (80 << 20));
        assert!(matches!(arena.resize(256 << 20, 1 << 20), Err(ArenaError::Refused { .. })));
        assert_eq!((arena.bytes(), arena.resident().unwrap()), (Bytes::mib(48), Bytes::mib(48)));
        drop(arena);
        assert!(crate::process::virtual_size().unwrap() < held + Bytes::mib(1), "nothing stays mapped");
    }

    #[test]
    fn a_resized_arena_still_ends_at_its_guard() {
        faults(
            "a_resized_arena_still_ends_at_its_guard",
            |arena| {
                let mut other = Arena::map(arena.bytes().0).unwrap();
                for bytes in [5 * 4096 + 64, 64, 9 * 4096 + 128] {
                    other.resize(bytes, 0).unwrap();
                    // SAFETY: the last byte inside, which nobody else uses.
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
        fn resized_arenas_keep_what_they_shall_and_nothing_else(sizes in prop::collection::vec((0u64..40_000, 0u64..40_000), 1..8)) {
            let mut arena = Arena::map(20_000).unwrap();
            arena.fill_pattern();
            for (round, (bytes, keep)) in sizes.into_iter().enumerate() {
                let keep = keep.min(bytes).min(arena.bytes().0);
                let known: Vec<u8> = arena.contents()[..keep as usize].to_vec();
                arena.resize(bytes, keep).unwrap();
                prop_assert_eq!(arena.bytes(), Bytes(bytes));
                prop_assert_eq!(arena.base() as u64 % ALIGNMENT, 0);
                prop_assert!(arena.contents()[..keep as usize] == known[..]);
                prop_assert!(arena.untouched(keep..bytes) && !arena.strayed());
                // Something is written up to a place of this round's own.
                let end = (bytes * (round as u64 % 3 + 1) / 3) as usize;
                arena.contents()[..end].iter_mut().for_each(|byte| *byte = !*byte);
            }
        }

        #[test]
        fn the_high_water_mark_is_exact(words in 1u64..5000, odd in 0u64..4, from in 0u64..5000, len in 1u64..5000, value: u32) {
            let bytes = words * 4 + odd;
            let mut arena = Arena::map(bytes).unwrap();
            arena.fill_pattern();
            prop_assert_eq!(arena.high_water(), Bytes::ZERO);
            let from = from % words;
            let len = len.min(words - from);
            let (start, end) = (from * 4, (from + len) * 4);
            // The last word is written with what was not there, as all but one value in 2^32 would be.
            // SAFETY: the only slice there is.
            let written = unsafe { arena.slice_mut::<u32>(start, len as usize) };
            let last = written[len as usize - 1];
            written.fill(value);
            if value == last { written[len as usize - 1] = !value; }
            prop_assert_eq!(arena.high_water(), Bytes(end));
            prop_assert!(!arena.strayed());
            prop_assert!(arena.untouched(0..start) && arena.untouched(end..bytes));
            prop_assert!(!arena.untouched(0..end) && !arena.untouched(end - 4..bytes));
        }
    }
}
