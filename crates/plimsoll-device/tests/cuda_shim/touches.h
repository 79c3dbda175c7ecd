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

#include <map>
#include <unordered_map>

namespace shim {

// Thread and block numbers start at 1; several threads of warp w are SEVERAL_OF + w.
constexpr unsigned NOBODY = 0, SEVERAL_OF = 0x10000, SEVERAL = 0xffffffffu, PAGE_BYTES = 4096;

// The last access: its thread, and the numbers of block and warp barriers before it.
struct Last {
    unsigned who, block, barriers, warp_barriers;
};

struct Byte {
    Last write, read;
    unsigned comes_by;
};

inline unsigned warp_of(unsigned who) { return who == SEVERAL ? SEVERAL : who >= SEVERAL_OF ? who - SEVERAL_OF : (who - 1) / WARP; }

struct Page {
    unsigned launches;
    Byte bytes[PAGE_BYTES];
};

struct Touches {
    std::unordered_map<unsigned long long, Page*> pages;
    unsigned long long newest_number;
    Page* newest;
    // Thread-local variables of the system thread, which hold shared memory.
    const char* local;
    size_t local_bytes;
    char words[200];
};
static thread_local Touches* touches = nullptr;

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

UNWATCHED static Byte& byte_at(unsigned long long at) {
    unsigned long long number = at / PAGE_BYTES;
    if (!touches->newest || touches->newest_number != number) {
        Page*& page = touches->pages[number];
        if (!page) page = (Page*)calloc(1, sizeof(Page));
        touches->newest = page;
        touches->newest_number = number;
    }
    if (touches->newest->launches != block->launches) {
        memset(touches->newest, 0, sizeof(Page));
        touches->newest->launches = block->launches;
    }
    return touches->newest->bytes[at % PAGE_BYTES];
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
    snprintf(touches->words, sizeof(touches->words), "thread %u %s of %s (%s)", block->current, what, whose, where);
    block->error = touches->words;
}

// Whether threads can share this memory.
UNWATCHED static bool is_watched(const char* at, bool& local) {
    if (!touches) {
        touches = new Touches();
        dl_iterate_phdr(find_local, touches);
        if (!touches->local) abort();
    }
    local = at >= touches->local && at < touches->local + touches->local_bytes;
    bool on_stack = at >= block->stacks && at < block->stacks + (size_t)THREADS_MAX * STACK_BYTES;
    bool is_ours = at >= (const char*)block && at < (const char*)(block + 1);
    return !on_stack && !is_ours;
}

// Whether the last access may be concurrent with the access `now`.
UNWATCHED static bool is_unordered(const Last& last, const Last& now) {
    if (last.who == NOBODY || last.who == now.who) return last.who != NOBODY && last.block != now.block;
    if (last.block != now.block) return true;
    bool same_warp = warp_of(last.who) == warp_of(now.who);
    return last.barriers == now.barriers && !(same_warp && last.warp_barriers != now.warp_barriers);
}

// Guards by their end, with their beginning.
static thread_local std::map<const char*, const char*>* guards = nullptr;

// Whether any of these bytes is in a guard.
UNWATCHED static bool is_guarded(const char* at, unsigned bytes) {
    if (!guards) return false;
    auto guard = guards->upper_bound(at);
    return guard != guards->end() && at + bytes > guard->second;
}

UNWATCHED static void touch_byte(const char* at, bool local, Touch touch) {
    Byte& byte = byte_at((unsigned long long)at);
    unsigned warp = block->current / WARP;
    Last now = {block->current + 1, block->number, block->barriers, block->warp_barriers[warp]};
    // Every block has its own shared memory.
    if (local && byte.write.block != now.block) byte.write.who = byte.comes_by = NOBODY;
    if (local && byte.read.block != now.block) byte.read.who = NOBODY;
    if (byte.comes_by) wrong("touches what still comes by a copy", at, byte.comes_by);
    if (touch == READ) {
        if (is_unordered(byte.write, now)) wrong("reads, with no barrier between, a byte", at, byte.write.who);
        if (byte.read.who && byte.read.block != now.block) {
            // Reads by several blocks are never ordered.
            byte.read.block = SEVERAL;
            return;
        }
        if (is_unordered(byte.read, now)) now.who = warp_of(byte.read.who) == warp ? SEVERAL_OF + warp : SEVERAL;
        byte.read = now;
        return;
    }
    if (is_unordered(byte.write, now)) wrong("writes, with no barrier between, a byte", at, byte.write.who);
    if (is_unordered(byte.read, now)) wrong("writes what was just read, a byte", at, byte.read.who);
    byte.write = now;
}

UNWATCHED void touch(const void* at, unsigned bytes, Touch touch) {
    if (!block || !block->running) return;
    AtWork at_work;
    bool local = false;
    const char* first = (const char*)at;
    if (!is_watched(first, local)) return;
    if (!local && is_guarded(first, bytes) && !block->error) {
        snprintf(touches->words, sizeof(touches->words), "thread %u touches bytes outside a tensor", block->current);
        block->error = touches->words;
    }
    for (unsigned i = 0; i < bytes; i++) touch_byte(first + i, local, touch);
}

UNWATCHED void coming(const void* to, unsigned bytes) {
    touch(to, bytes, WRITE);
    for (unsigned i = 0; i < bytes; i++) byte_at((unsigned long long)to + i).comes_by = block->current + 1;
}

UNWATCHED void there(const void* to, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i++) byte_at((unsigned long long)to + i).comes_by = NOBODY;
    touch(to, bytes, WRITE);
}

// An access by the kernel itself.
UNWATCHED static void access(const void* at, unsigned long bytes, Touch how) {
    if (!block || !block->running || block->fibres[block->current].at_work) return;
    touch(at, (unsigned)bytes, how);
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
}

UNWATCHED void shim_guard(const char* begin, const char* end) { (*shim::guards)[end] = begin; }

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
