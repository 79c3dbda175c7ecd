// Runs unchanged CUDA C on the CPU, for tests of its arithmetic. The threads of a block are fibres that run one at a
// time from barrier to barrier. README.md lists the limits.
//
// A unit is: this file, touches.h behind it where PLIMSOLL_TOUCHES is defined, the kernel's source, and for each
// kernel a function
//     extern "C" int launch_NAME(const unsigned* grid, unsigned block, unsigned shared_bytes,
//                                void* const* arguments, int reverse);
// which calls shim::launch. 0 is success; else shim_error() says what went wrong.

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <utility>
#include <vector>

// PLIMSOLL_SHIM leaves out code that only a GPU compiler accepts; replacements are at the end of this file.
#define PLIMSOLL_SHIM
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time, all of it on one system thread.
#define __shared__ thread_local

struct dim3 {
    unsigned x, y, z;
};
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

constexpr unsigned THREADS_MAX = 1024, WARP = 32, STACK_BYTES = 64 << 10;
constexpr unsigned SHARED_FLOATS = 99 << 8, CANARIES = 64;
constexpr unsigned CANARY = 0xfedcba98u, POISON = 0xffffffffu;

enum State { FRESH, READY, AT_BARRIER, AT_WARP, DONE };

// The most bytes that a lane contributes to one exchange.
struct Gift {
    unsigned long long at[4];
};

struct Fibre {
    jmp_buf place;
    State state;
    Gift gift;
    unsigned long long what;  // the kind of exchange, which all lanes must agree on
    int vote;                 // at a barrier
    int at_work;              // inside shim functions; their own accesses are not recorded
    bool parked;              // at the end of a body, from where it can begin another one
};

// An asynchronous copy in progress; zeros if there is no `from`.
struct Copy {
    void* to;
    const void* from;
    unsigned bytes;
    bool landed;
};

// Both operands of a product as the lanes supplied them; assembled once for all participating lanes of the warp.
struct Sides {
    unsigned long long meeting;
    float a[16][16], b[16][8];
};

struct Block {
    Fibre fibres[THREADS_MAX];
    Gift exchanged[THREADS_MAX];
    std::vector<Copy> copies[THREADS_MAX];
    bool copies_are_late;
    unsigned long long meetings;  // of the lanes of any warp
    Sides sides;
    int any;
    unsigned current;
    bool running;                        // a fibre, not the scheduler
    unsigned launches, number, barriers; // launches so far; block index in its grid; barriers that the block has reached
    unsigned warp_barriers[THREADS_MAX / WARP];
    jmp_buf scheduler;
    ucontext_t contexts[THREADS_MAX];
    char* stacks;
    void (*body)(void*);
    void* closure;
    const char* error;
    struct Touches* touches;  // in touches.h
};
static thread_local Block* block = nullptr;

// Code without instrumentation of memory accesses: the shim's own, which runs between those of kernels.
#define UNWATCHED_CODE __attribute__((no_sanitize("thread", "alignment")))
#define UNWATCHED __attribute__((no_sanitize("thread", "alignment"), noinline))
// The same, compiled into its callers, which must be such code, too.
#define UNWATCHED_INLINE __attribute__((no_sanitize("thread", "alignment"), always_inline)) inline

// Accesses inside shim functions are not recorded.
struct AtWork {
    Fibre& fibre;
    UNWATCHED_INLINE AtWork() : AtWork(block) {}
    UNWATCHED_INLINE AtWork(Block* here) : fibre(here->fibres[here->current]) { fibre.at_work++; }
    UNWATCHED_INLINE ~AtWork() { fibre.at_work--; }
};

enum Touch { READ, WRITE };
#ifdef PLIMSOLL_TOUCHES
// Defined in touches.h. Records a read or write of bytes by an instruction that the compiler does not know.
void touch(const void* at, unsigned bytes, Touch touch);
// Marks bytes as being copied until this thread has waited for the copy.
void coming(const void* to, unsigned bytes);
void there(const void* to, unsigned bytes);
#else
inline void touch(const void*, unsigned, Touch) {}
inline void coming(const void*, unsigned) {}
inline void there(const void*, unsigned) {}
#endif

UNWATCHED_CODE inline void wait(State state) {
    Fibre& fibre = block->fibres[block->current];
    fibre.state = state;
    if (!_setjmp(fibre.place)) _longjmp(block->scheduler, 1);
}

UNWATCHED_CODE inline void enter() {
    for (;;) {
        Fibre& fibre = block->fibres[block->current];
        fibre.parked = false;
        block->body(block->closure);
        if (!block->copies[block->current].empty()) block->error = "a thread ends before its copies";
        fibre.state = DONE;
        fibre.parked = true;
        if (!_setjmp(fibre.place)) _longjmp(block->scheduler, 1);
    }
}

// Runs a fibre until it waits or ends. Starting on a new stack needs a context; going on there does not, which is much
// faster.
UNWATCHED inline void resume(unsigned index) {
    block->current = index;
    threadIdx = {index, 0, 0};
    if (_setjmp(block->scheduler)) {
        block->running = false;
        return;
    }
    block->running = true;
    Fibre& fibre = block->fibres[index];
    if (fibre.state != FRESH || fibre.parked) _longjmp(fibre.place, 1);
    ucontext_t& context = block->contexts[index];
    getcontext(&context);
    context.uc_stack = {block->stacks + (size_t)index * STACK_BYTES, 0, STACK_BYTES};
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    setcontext(&context);
}

UNWATCHED_CODE inline bool all_are(unsigned first, unsigned end, State state) {
    for (unsigned i = first; i < end; i++)
        if (block->fibres[i].state != state) return false;
    return true;
}

// The exchange that also orders memory.
constexpr unsigned long long SYNC_WARP = 5;

// Resumes a warp once all its lanes wait in the same exchange.
UNWATCHED_CODE inline void release_warp(unsigned first) {
    if (!all_are(first, first + WARP, AT_WARP)) return;
    block->meetings++;
    if (block->fibres[first].what == SYNC_WARP) block->warp_barriers[first / WARP]++;
    for (unsigned i = first; i < first + WARP; i++) {
        if (block->fibres[i].what != block->fibres[first].what) block->error = "lanes meet in different exchanges";
        block->exchanged[i] = block->fibres[i].gift;
        block->fibres[i].state = READY;
    }
}

// Resumes a block once all its threads have reached the barrier.
UNWATCHED_CODE inline void release_block(unsigned threads) {
    if (!all_are(0, threads, AT_BARRIER)) return;
    block->barriers++;
    block->any = 0;
    for (unsigned i = 0; i < threads; i++) {
        block->any |= block->fibres[i].vote;
        block->fibres[i].state = READY;
    }
}

// Runs a warp as far as possible without the others. Returns whether it advanced.
UNWATCHED_CODE inline bool run_warp(unsigned first, bool reverse) {
    bool progress = false;
    for (bool more = true; more && !block->error;) {
        more = false;
        for (unsigned turn = 0; turn < WARP; turn++) {
            unsigned i = first + (reverse ? WARP - 1 - turn : turn);
            State state = block->fibres[i].state;
            if (state != FRESH && state != READY) continue;
            progress = more = true;
            resume(i);
        }
        release_warp(first);
    }
    return progress;
}

// Warps run one after the other, in order or in reverse, each as far ahead of the others as possible. A barrier or
// exchange that not all threads reach leaves no runnable thread, which is an error even if hardware would tolerate it.
UNWATCHED_CODE inline void run_block(unsigned threads, bool reverse) {
    for (unsigned i = 0; i < threads; i++) {
        block->fibres[i].state = FRESH;
        block->fibres[i].at_work = 0;
        block->copies[i].clear();
    }
    while (!block->error && !all_are(0, threads, DONE)) {
        bool progress = false;
        for (unsigned turn = 0; turn < threads; turn += WARP)
            progress |= run_warp(reverse ? threads - WARP - turn : turn, reverse);
        if (!progress) block->error = "threads wait for threads that never come";
        release_block(threads);
    }
}

}  // namespace shim

static thread_local __align__(16) float shared[shim::SHARED_FLOATS + shim::CANARIES];

namespace shim {

UNWATCHED_CODE inline void set_words(float* at, unsigned count, unsigned word) {
    for (unsigned i = 0; i < count; i++) memcpy(at + i, &word, 4);
}

UNWATCHED_CODE inline bool words_are(const float* at, unsigned count, unsigned word) {
    for (unsigned i = 0; i < count; i++)
        if (memcmp(at + i, &word, 4) != 0) return false;
    return true;
}

static thread_local char said[300];

template <class Call> UNWATCHED_CODE int run_grid(const unsigned* grid, unsigned threads, unsigned shared_bytes, bool reverse, Call call) {
    if (!block) {
        block = new Block();
        block->stacks = (char*)mmap(nullptr, (size_t)THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (block->stacks == MAP_FAILED) abort();
    }
    unsigned floats = (shared_bytes + 3) / 4;
    if (threads == 0 || threads % WARP || threads > THREADS_MAX || floats > SHARED_FLOATS) {
        snprintf(said, sizeof(said), "%u threads with %u bytes of shared memory", threads, shared_bytes);
        return 1;
    }
    block->error = nullptr;
    block->launches++;
    block->number = 0;
    block->copies_are_late = !reverse;
    block->body = [](void* closure) UNWATCHED_CODE { (*(Call*)closure)(); };
    block->closure = &call;
    blockDim = {threads, 1, 1};
    gridDim = {grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                block->number++;
                block->barriers = 0;
                memset(block->warp_barriers, 0, sizeof(block->warp_barriers));
                // Memory that is read before it is written reads as NaN.
                set_words(::shared, floats, POISON);
                set_words(::shared + floats, CANARIES, CANARY);
                run_block(threads, reverse);
                if (!words_are(::shared + floats, CANARIES, CANARY)) block->error = "writes beyond its shared memory";
                if (block->error) {
                    snprintf(said, sizeof(said), "block %u %u %u: %s", x, y, z, block->error);
                    return 1;
                }
            }
    return 0;
}

template <class... A, size_t... I>
int launch_with(void (*kernel)(A...), const unsigned* grid, unsigned threads, unsigned shared_bytes,
                void* const* arguments, int reverse, std::index_sequence<I...>) {
    return run_grid(grid, threads, shared_bytes, reverse != 0, [=]() UNWATCHED_CODE { kernel(*(A*)arguments[I]...); });
}

template <class... A>
int launch(void (*kernel)(A...), const unsigned* grid, unsigned threads, unsigned shared_bytes,
           void* const* arguments, int reverse) {
    return launch_with(kernel, grid, threads, shared_bytes, arguments, reverse, std::index_sequence_for<A...>());
}

// Contributes `value` to the warp's exchange. Returns all lanes' values, valid until the next exchange.
template <class T> UNWATCHED_CODE const Gift* exchange(unsigned mask, T value, unsigned long long what) {
    static_assert(sizeof(T) <= sizeof(Gift), "more than a lane can give");
    AtWork at_work;
    if (mask != 0xffffffffu) block->error = "an exchange between some lanes only";
    Fibre& fibre = block->fibres[block->current];
    fibre.gift = Gift();
    memcpy(&fibre.gift, &value, sizeof(T));
    fibre.what = what;
    wait(AT_WARP);
    return block->exchanged + threadIdx.x / WARP * WARP;
}

template <class T> UNWATCHED_CODE T given(const Gift* all, unsigned lane) {
    T value;
    memcpy(&value, all + lane, sizeof(T));
    return value;
}

UNWATCHED_CODE inline int barrier(int vote) {
    AtWork at_work;
    block->fibres[block->current].vote = vote;
    wait(AT_BARRIER);
    return block->any;
}

}  // namespace shim

extern "C" const char* shim_error() { return shim::said; }

inline void __syncthreads() { shim::barrier(0); }
inline void __syncwarp() { shim::exchange(0xffffffffu, 0, shim::SYNC_WARP); }
inline int __syncthreads_or(int vote) { return shim::barrier(vote != 0); }

template <class T> T __shfl_xor_sync(unsigned mask, T value, int step) {
    const shim::Gift* all = shim::exchange(mask, value, 1000 + step);
    return shim::given<T>(all, threadIdx.x % shim::WARP ^ step);
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
    const shim::Gift* all = shim::exchange(mask, (unsigned)(vote != 0), 1);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < shim::WARP; lane++) votes |= shim::given<unsigned>(all, lane) << lane;
    return votes;
}

// Rounded separately: no compiler fuses it with an addition.
inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;
    return product;
}

inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }

inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

// ---- instructions that tensor.cuh and common.cuh express in PTX, as the PTX ISA describes them ----
//
// "Matrix Fragments for mma.m16n8k16 with floating point type", "ldmatrix", "cp.async". Matrices are
// put together from all lanes' fragments element by element and multiplied whole.

namespace shim {

inline float of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }

// Nearest bf16, ties to even.
inline unsigned to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if (x != x) return 0x7fffu;
    unsigned low = bits & 0xffffu, high = bits >> 16;
    return low > 0x8000u || (low == 0x8000u && (high & 1u)) ? high + 1 : high;
}

struct Fragments {
    unsigned a[4], b[2];
};

// Row and column of element i (two per register) of a lane's fragment of A, B and C.
struct Place {
    unsigned row, column;
};

inline Place place_in_a(unsigned lane, unsigned i) {
    unsigned group = lane >> 2, thread = lane % 4;
    bool upper = i < 2 || (4 <= i && i < 6);
    return {upper ? group : group + 8, thread * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}

inline Place place_in_b(unsigned lane, unsigned i) {
    unsigned group = lane >> 2, thread = lane % 4;
    return {thread * 2 + (i & 1) + (i < 2 ? 0 : 8), group};
}

inline Place place_in_c(unsigned lane, unsigned i) {
    unsigned group = lane >> 2, thread = lane % 4;
    return {i < 2 ? group : group + 8, thread * 2 + (i & 1)};
}

inline unsigned half_of(unsigned word, unsigned i) { return i & 1 ? word >> 16 : word & 0xffffu; }

// Lanes 8i to 8i + 7 supply the rows of matrix i; to[i] is this lane's fragment of it.
inline void load_four(const void* row, unsigned (&to)[4], bool transposed) {
    AtWork at_work;
    if ((unsigned long long)row % 16) block->error = "a row of a matrix that is not aligned to 16 bytes";
    const Gift* all = exchange(0xffffffffu, row, transposed ? 3 : 2);
    unsigned lane = threadIdx.x % WARP;
    for (unsigned i = 0; i < 4; i++) {
        unsigned halves[2];
        for (unsigned j = 0; j < 2; j++) {
            unsigned first = lane / 4, second = lane % 4 * 2 + j;
            unsigned from = transposed ? second : first, column = transposed ? first : second;
            const char* place = given<const char*>(all, i * 8 + from) + column * 2;
            unsigned short element;
            memcpy(&element, place, 2);
            touch(place, 2, READ);
            halves[j] = element;
        }
        to[i] = halves[0] | halves[1] << 16;
    }
}

// In one thread order a copy completes when it is waited for, in the other at once. A thread that does not wait reads
// old bytes in the first, and a copy into bytes that are still read destroys them in the second.
inline void land(Copy& copy) {
    if (copy.from)
        memcpy(copy.to, copy.from, copy.bytes);
    else
        memset(copy.to, 0, copy.bytes);
    copy.landed = true;
}

inline void begin_copy(void* to, const void* from, unsigned bytes, bool real) {
    AtWork at_work;
    if (((unsigned long long)to | (unsigned long long)from) % bytes) block->error = "a copy that is not aligned to its size";
    Copy copy = {to, real ? from : nullptr, bytes, false};
    if (real) touch(from, bytes, READ);
    coming(to, bytes);
    if (!block->copies_are_late) land(copy);
    block->copies[block->current].push_back(copy);
}

}  // namespace shim

namespace shim {

inline const Sides& sides(const Gift* all) {
    // State of this block: units are separate libraries, and their blocks count meetings from the start.
    Sides& sides = block->sides;
    if (sides.meeting == block->meetings) return sides;
    sides.meeting = block->meetings;
    for (unsigned lane = 0; lane < WARP; lane++) {
        Fragments of = given<Fragments>(all, lane);
        for (unsigned i = 0; i < 8; i++) {
            Place at = place_in_a(lane, i);
            sides.a[at.row][at.column] = of_bf16(half_of(of.a[i / 2], i));
        }
        for (unsigned i = 0; i < 4; i++) {
            Place at = place_in_b(lane, i);
            sides.b[at.row][at.column] = of_bf16(half_of(of.b[i / 2], i));
        }
    }
    return sides;
}

}  // namespace shim

inline void mma(float (&sums)[4], const unsigned (&left)[4], unsigned right0, unsigned right1) {
    shim::AtWork at_work;
    shim::Fragments mine = {{left[0], left[1], left[2], left[3]}, {right0, right1}};
    const shim::Sides& sides = shim::sides(shim::exchange(0xffffffffu, mine, 4));
    for (unsigned i = 0; i < 4; i++) {
        shim::Place at = shim::place_in_c(threadIdx.x % shim::WARP, i);
        double sum = sums[i];
        for (unsigned k = 0; k < 16; k++) sum += (double)sides.a[at.row][k] * (double)sides.b[k][at.column];
        sums[i] = (float)sum;
    }
}

inline void load_matrices(const void* row, unsigned (&to)[4]) { shim::load_four(row, to, false); }
inline void load_transposed(const void* row, unsigned (&to)[4]) { shim::load_four(row, to, true); }

inline void copy_pack(void* to, const void* from, bool real) { shim::begin_copy(to, from, 16, real); }
inline void copy_word(void* to, const void* from, bool real) { shim::begin_copy(to, from, 4, real); }

inline void copies_landed() {
    shim::AtWork at_work;
    for (shim::Copy& copy : shim::block->copies[threadIdx.x]) {
        if (!copy.landed) shim::land(copy);
        shim::there(copy.to, copy.bytes);
    }
    shim::block->copies[threadIdx.x].clear();
}

inline unsigned narrow_both(float low, float high) { return shim::to_bf16(low) | shim::to_bf16(high) << 16; }
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
