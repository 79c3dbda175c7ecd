// Runs CUDA C on the CPU, source unchanged, for tests of its arithmetic: the threads of a block are
// fibres that run one at a time from barrier to barrier. What this cannot show is in README.md.
//
// A unit is: this file, the kernel's source, and for each kernel a function
//     extern "C" int launch_NAME(const unsigned* grid, unsigned block, unsigned shared_bytes,
//                                void* const* arguments, int reverse);
// which calls shim::launch. 0 is success; else a line on stderr says what went wrong.

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <utility>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time, all of it on one thread of the system.
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

struct Fibre {
    jmp_buf place;
    State state;
    unsigned long long value;  // given to the other lanes
    unsigned long long what;   // the kind of exchange, which all lanes must agree on
    int vote;                  // at a barrier
};

struct Block {
    Fibre fibres[THREADS_MAX];
    unsigned long long exchanged[THREADS_MAX];
    int any;
    unsigned current;
    jmp_buf scheduler;
    ucontext_t contexts[THREADS_MAX];
    char* stacks;
    void (*body)(void*);
    void* closure;
    const char* error;
};
static thread_local Block* block = nullptr;

inline void wait(State state) {
    Fibre& fibre = block->fibres[block->current];
    fibre.state = state;
    if (!_setjmp(fibre.place)) _longjmp(block->scheduler, 1);
}

inline void enter() {
    block->body(block->closure);
    block->fibres[block->current].state = DONE;
    _longjmp(block->scheduler, 1);
}

// Runs a fibre until it waits or ends. Starting on a stack of its own needs a context; going on does
// not, and is much faster without.
__attribute__((noinline)) inline void resume(unsigned index) {
    block->current = index;
    threadIdx = {index, 0, 0};
    if (_setjmp(block->scheduler)) return;
    Fibre& fibre = block->fibres[index];
    if (fibre.state != FRESH) _longjmp(fibre.place, 1);
    ucontext_t& context = block->contexts[index];
    getcontext(&context);
    context.uc_stack = {block->stacks + (size_t)index * STACK_BYTES, 0, STACK_BYTES};
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    setcontext(&context);
}

inline bool all_are(unsigned first, unsigned end, State state) {
    for (unsigned i = first; i < end; i++)
        if (block->fibres[i].state != state) return false;
    return true;
}

// Lets a warp go on whose lanes all wait for each other.
inline void release_warp(unsigned first) {
    if (!all_are(first, first + WARP, AT_WARP)) return;
    for (unsigned i = first; i < first + WARP; i++) {
        if (block->fibres[i].what != block->fibres[first].what) block->error = "lanes meet in different exchanges";
        block->exchanged[i] = block->fibres[i].value;
        block->fibres[i].state = READY;
    }
}

// Lets a block go on whose threads have all come to the barrier.
inline void release_block(unsigned threads) {
    if (!all_are(0, threads, AT_BARRIER)) return;
    block->any = 0;
    for (unsigned i = 0; i < threads; i++) {
        block->any |= block->fibres[i].vote;
        block->fibres[i].state = READY;
    }
}

// Runs a warp as far as it comes without the others. Whether it came any further.
inline bool run_warp(unsigned first, bool reverse) {
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

// Warps run one after the other, in order or in reverse, each as far ahead of those behind it as it
// can be. A barrier or an exchange that not all threads reach leaves nobody to run: an error, also where
// hardware would forgive.
inline void run_block(unsigned threads, bool reverse) {
    for (unsigned i = 0; i < threads; i++) block->fibres[i].state = FRESH;
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

inline void set_words(float* at, unsigned count, unsigned word) {
    for (unsigned i = 0; i < count; i++) memcpy(at + i, &word, 4);
}

inline bool words_are(const float* at, unsigned count, unsigned word) {
    for (unsigned i = 0; i < count; i++)
        if (memcmp(at + i, &word, 4) != 0) return false;
    return true;
}

template <class Call> int run_grid(const unsigned* grid, unsigned threads, unsigned shared_bytes, bool reverse, Call call) {
    if (!block) {
        block = new Block();
        block->stacks = (char*)mmap(nullptr, (size_t)THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (block->stacks == MAP_FAILED) abort();
    }
    unsigned floats = (shared_bytes + 3) / 4;
    if (threads == 0 || threads % WARP || threads > THREADS_MAX || floats > SHARED_FLOATS) {
        fprintf(stderr, "shim: %u threads with %u bytes of shared memory\n", threads, shared_bytes);
        return 1;
    }
    block->error = nullptr;
    block->body = [](void* closure) { (*(Call*)closure)(); };
    block->closure = &call;
    blockDim = {threads, 1, 1};
    gridDim = {grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                // What is read before it is written becomes NaN.
                set_words(::shared, floats, POISON);
                set_words(::shared + floats, CANARIES, CANARY);
                run_block(threads, reverse);
                if (!words_are(::shared + floats, CANARIES, CANARY)) block->error = "writes beyond its shared memory";
                if (block->error) {
                    fprintf(stderr, "shim: block %u %u %u: %s\n", x, y, z, block->error);
                    return 1;
                }
            }
    return 0;
}

template <class... A, size_t... I>
int launch_with(void (*kernel)(A...), const unsigned* grid, unsigned threads, unsigned shared_bytes,
                void* const* arguments, int reverse, std::index_sequence<I...>) {
    return run_grid(grid, threads, shared_bytes, reverse != 0, [=] { kernel(*(A*)arguments[I]...); });
}

template <class... A>
int launch(void (*kernel)(A...), const unsigned* grid, unsigned threads, unsigned shared_bytes,
           void* const* arguments, int reverse) {
    return launch_with(kernel, grid, threads, shared_bytes, arguments, reverse, std::index_sequence_for<A...>());
}

// Gives `value` to the warp; afterwards everybody's values are in block->exchanged.
template <class T> unsigned long long* exchange(unsigned mask, T value, unsigned long long what) {
    static_assert(sizeof(T) <= 8, "at most eight bytes");
    if (mask != 0xffffffffu) block->error = "an exchange between some lanes only";
    Fibre& fibre = block->fibres[block->current];
    fibre.value = 0;
    memcpy(&fibre.value, &value, sizeof(T));
    fibre.what = what;
    wait(AT_WARP);
    return block->exchanged + threadIdx.x / WARP * WARP;
}

inline int barrier(int vote) {
    block->fibres[block->current].vote = vote;
    wait(AT_BARRIER);
    return block->any;
}

}  // namespace shim

inline void __syncthreads() { shim::barrier(0); }
inline int __syncthreads_or(int vote) { return shim::barrier(vote != 0); }

template <class T> T __shfl_xor_sync(unsigned mask, T value, int step) {
    unsigned long long* all = shim::exchange(mask, value, 1000 + step);
    T other;
    memcpy(&other, all + (threadIdx.x % shim::WARP ^ step), sizeof(T));
    return other;
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
    unsigned long long* all = shim::exchange(mask, (unsigned)(vote != 0), 1);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < shim::WARP; lane++) votes |= (unsigned)all[lane] << lane;
    return votes;
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
