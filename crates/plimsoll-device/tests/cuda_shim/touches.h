// Records the last access to each byte of shared and global memory, and the barriers in between. The compiler inserts a
// call before each access (-fsanitize=thread); this file defines the called functions.
//
// If one thread writes bytes that another accesses, a block barrier must separate the two, or a warp barrier
// (__syncwarp) if both are in one warp; a lane exchange orders nothing. No barrier separates blocks, so no other block
// may access bytes that a block writes in the same launch. For a byte that was read several times, the newest reader is
// kept, with a flag for other readers since the last barrier.
//
// Bytes around each tensor are its guards: a kernel may neither read nor write them.

#include <link.h>

#include <iterator>
#include <map>
#include <unordered_map>

// For closures, as UNWATCHED_INLINE.
#define UNWATCHED_CALL __attribute__((no_sanitize("thread", "alignment"), always_inline))

namespace shim {

// Thread and block numbers start at 1; several threads of warp w are SEVERAL_OF + w.
constexpr unsigned NOBODY = 0, SEVERAL_OF = 0x10000, SEVERAL = 0xffffffffu, PAGE_BYTES = 4096;

// The last access: its thread, and the numbers of block and warp barriers before it.
struct Last {
    unsigned who, block, barriers, warp_barriers;
};

struct Record {
    Last write, read;
    unsigned comes_by;
};

UNWATCHED_INLINE unsigned warp_of(unsigned who) { return who == SEVERAL ? SEVERAL : who >= SEVERAL_OF ? who - SEVERAL_OF : (who - 1) / WARP; }

// A page has a record for each 2^shift bytes, which all accesses of the launch so far touched together. At first these
// are words.
struct Page {
    unsigned launches, shift;
    Record records[PAGE_BYTES];
};

constexpr unsigned WORD_SHIFT = 2;

struct Touches {
    std::unordered_map<unsigned long long, Page*> pages;
    unsigned long long newest_number;
    Page* newest;
    // Thread-local variables of the system thread, which hold shared memory.
    const char* local;
    size_t local_bytes;
    // Bytes between guards, which were looked up last.
    const char *open_begin, *open_end;
    char words[200];
};

UNWATCHED static int find_local(dl_phdr_info* info, size_t, void* of) {
    Touches* touches = (Touches*)of;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const char* begins = (const char*)info->dlpi_tls_data;
        size_t bytes = info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type != PT_TLS || (char*)::shared < begins || (char*)::shared >= begins + bytes) continue;
        touches->local = begins;
        touches->local_bytes = bytes;
        return 1;
    }
    return 0;
}

// Returns a page, with the accesses of the present launch only.
UNWATCHED static Page* find_page(Block* here, unsigned long long number) {
    Page*& page = here->touches->pages[number];
    if (!page) page = (Page*)calloc(1, sizeof(Page));
    if (page->launches != here->launches) {
        page->launches = here->launches;
        page->shift = WORD_SHIFT;
        memset(page->records, 0, sizeof(Record) * (PAGE_BYTES >> WORD_SHIFT));
    }
    here->touches->newest = page;
    here->touches->newest_number = number;
    return page;
}

// Makes the records of a page finer.
UNWATCHED static void split(Page* page, unsigned shift) {
    for (unsigned i = PAGE_BYTES >> shift; i-- > 0;) page->records[i] = page->records[i >> (page->shift - shift)];
    page->shift = shift;
}

// Returns the page of an access. Its records are so fine that each lies inside or outside of the access.
UNWATCHED_INLINE Page* page_of(Block* here, unsigned long long at, unsigned bytes) {
    unsigned long long number = at / PAGE_BYTES;
    Page* page = here->touches->newest;
    bool is_newest = page && here->touches->newest_number == number && page->launches == here->launches;
    if (!is_newest) page = find_page(here, number);
    unsigned odd = (unsigned)at | bytes;
    if (odd & ((1u << page->shift) - 1)) split(page, __builtin_ctz(odd));
    return page;
}

// Calls a function with the address and the record of each part of an access.
template <class Call> UNWATCHED_INLINE void for_records(Block* here, const char* first, unsigned bytes, Call call) {
    for (unsigned i = 0; i < bytes;) {
        unsigned long long at = (unsigned long long)first + i;
        Page* page = page_of(here, at, bytes - i);
        call(first + i, page->records[at % PAGE_BYTES >> page->shift]);
        i += 1u << page->shift;
    }
}

UNWATCHED static void wrong(const char* what, const char* at, unsigned other) {
    if (block->error) return;
    long offset = at - (const char*)::shared;
    bool is_shared = offset >= 0 && (size_t)offset < sizeof(::shared);
    char whose[40] = "several threads";
    if (other < SEVERAL_OF) snprintf(whose, sizeof(whose), "thread %u", other - 1);
    if (other >= SEVERAL_OF && other != SEVERAL) snprintf(whose, sizeof(whose), "several threads of warp %u", other - SEVERAL_OF);
    char where[40] = "not in the dynamic shared memory";
    if (is_shared) snprintf(where, sizeof(where), "shared memory, byte %ld", offset);
    char(&words)[200] = block->touches->words;
    snprintf(words, sizeof(words), "thread %u %s of %s (%s)", block->current, what, whose, where);
    block->error = words;
}

UNWATCHED static void find_touches(Block* here) {
    here->touches = new Touches();
    dl_iterate_phdr(find_local, here->touches);
    if (!here->touches->local) abort();
}

// Whether threads can share this memory.
UNWATCHED_INLINE bool is_watched(Block* here, const char* at, bool& local) {
    if (!here->touches) find_touches(here);
    const Touches& touches = *here->touches;
    local = at >= touches.local && at < touches.local + touches.local_bytes;
    bool on_stack = at >= here->stacks && at < here->stacks + (size_t)THREADS_MAX * STACK_BYTES;
    bool is_ours = at >= (const char*)here && at < (const char*)(here + 1);
    return !on_stack && !is_ours;
}

// Whether the last access may be concurrent with the access `now`.
UNWATCHED_INLINE bool is_unordered(const Last& last, const Last& now) {
    if (last.who == NOBODY || last.who == now.who) return last.who != NOBODY && last.block != now.block;
    if (last.block != now.block) return true;
    bool same_warp = warp_of(last.who) == warp_of(now.who);
    return last.barriers == now.barriers && !(same_warp && last.warp_barriers != now.warp_barriers);
}

// Guards by their end, with their beginning.
static thread_local std::map<const char*, const char*>* guards = nullptr;

UNWATCHED static bool find_guard(Touches& touches, const char* at, unsigned bytes) {
    if (!guards) return false;
    auto guard = guards->upper_bound(at);
    if (guard != guards->end() && at + bytes > guard->second) return true;
    touches.open_begin = guard == guards->begin() ? nullptr : std::prev(guard)->first;
    touches.open_end = guard == guards->end() ? (const char*)-1 : guard->second;
    return false;
}

UNWATCHED static void forget_open() {
    if (block && block->touches) block->touches->open_begin = block->touches->open_end = nullptr;
}

// Whether any of these bytes is in a guard.
UNWATCHED_INLINE bool is_guarded(Touches& touches, const char* at, unsigned bytes) {
    bool is_open = at >= touches.open_begin && at + bytes <= touches.open_end;
    return !is_open && find_guard(touches, at, bytes);
}

// Records the access `now` to bytes with a common record.
UNWATCHED_INLINE void touch_record(const char* at, Record& record, Last now, bool local, Touch touch) {
    // Every block has its own shared memory.
    if (local && record.write.block != now.block) record.write.who = record.comes_by = NOBODY;
    if (local && record.read.block != now.block) record.read.who = NOBODY;
    if (record.comes_by) wrong("touches what still comes by a copy", at, record.comes_by);
    if (touch == READ) {
        if (is_unordered(record.write, now)) wrong("reads, with no barrier between, a byte", at, record.write.who);
        if (record.read.who && record.read.block != now.block) {
            // Reads by several blocks are never ordered.
            record.read.block = SEVERAL;
            return;
        }
        if (is_unordered(record.read, now)) {
            unsigned warp = warp_of(now.who);
            now.who = warp_of(record.read.who) == warp ? SEVERAL_OF + warp : SEVERAL;
        }
        record.read = now;
        return;
    }
    if (is_unordered(record.write, now)) wrong("writes, with no barrier between, a byte", at, record.write.who);
    if (is_unordered(record.read, now)) wrong("writes what was just read, a byte", at, record.read.who);
    record.write = now;
}

UNWATCHED_INLINE void touch_bytes(Block* here, const char* first, unsigned bytes, Touch touch) {
    // The containers of the standard library are instrumented.
    AtWork at_work(here);
    bool local = false;
    if (!is_watched(here, first, local)) return;
    if (!local && is_guarded(*here->touches, first, bytes) && !here->error) {
        char(&words)[200] = here->touches->words;
        snprintf(words, sizeof(words), "thread %u touches bytes outside a tensor", here->current);
        here->error = words;
    }
    unsigned who = here->current + 1;
    Last now = {who, here->number, here->barriers, here->warp_barriers[warp_of(who)]};
    for_records(here, first, bytes, [&](const char* at, Record& record) UNWATCHED_CALL {
        touch_record(at, record, now, local, touch);
    });
}

UNWATCHED void touch(const void* at, unsigned bytes, Touch touch) {
    if (block && block->running) touch_bytes(block, (const char*)at, bytes, touch);
}

// Notes by which thread's copy bytes are still to come.
UNWATCHED static void set_coming(const void* to, unsigned bytes, unsigned who) {
    for_records(block, (const char*)to, bytes, [&](const char*, Record& record) UNWATCHED_CALL { record.comes_by = who; });
}

UNWATCHED void coming(const void* to, unsigned bytes) {
    touch(to, bytes, WRITE);
    set_coming(to, bytes, block->current + 1);
}

UNWATCHED void there(const void* to, unsigned bytes) {
    set_coming(to, bytes, NOBODY);
    touch(to, bytes, WRITE);
}

// An access by the kernel itself.
UNWATCHED_INLINE void access(const void* at, unsigned long bytes, Touch how) {
    Block* here = block;
    if (!here || !here->running || here->fibres[here->current].at_work) return;
    touch_bytes(here, (const char*)at, (unsigned)bytes, how);
}

}  // namespace shim

#define ACCESSES(bytes)                                                                               \
    UNWATCHED void __tsan_read##bytes(void* at) { shim::access(at, bytes, shim::READ); }               \
    UNWATCHED void __tsan_write##bytes(void* at) { shim::access(at, bytes, shim::WRITE); }             \
    UNWATCHED void __tsan_unaligned_read##bytes(void* at) { shim::access(at, bytes, shim::READ); }     \
    UNWATCHED void __tsan_unaligned_write##bytes(void* at) { shim::access(at, bytes, shim::WRITE); }

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
UNWATCHED void __tsan_read_range(void* at, unsigned long bytes) { shim::access(at, bytes, shim::READ); }
UNWATCHED void __tsan_write_range(void* at, unsigned long bytes) { shim::access(at, bytes, shim::WRITE); }
UNWATCHED void __tsan_func_entry(void*) {}
UNWATCHED void __tsan_func_exit() {}
UNWATCHED void __tsan_init() {}

UNWATCHED void shim_no_guards() {
    if (!shim::guards) shim::guards = new std::map<const char*, const char*>();
    shim::guards->clear();
    shim::forget_open();
}

UNWATCHED void shim_guard(const char* begin, const char* end) {
    (*shim::guards)[end] = begin;
    shim::forget_open();
}

// Called by -fsanitize=alignment: a pack at an address that a GPU would refuse.
struct Where {
    const char* file;
    unsigned line, column;
};
UNWATCHED void __ubsan_handle_type_mismatch_v1(Where* where, unsigned long at) {
    static thread_local char words[120];
    if (!shim::block || shim::block->error) return;
    snprintf(words, sizeof(words), "an address that is not aligned to its type: %#lx, line %u", at, where->line);
    shim::block->error = words;
}
}
