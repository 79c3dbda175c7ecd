// Declarations shared by the parts of the stand-in for a GPU. README.md describes it and its limits.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

// Only the functions that NVIDIA's libraries export are visible from outside.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stand_in {

constexpr const char* NAME = "stand-in for a GPU (runs on the CPU)";
// Driver codes (CUresult).
constexpr int OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
              INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, INVALID_HANDLE = 400, NOT_FOUND = 500,
              DEVICE_UNAVAILABLE = 46, NOT_READY = 600, LAUNCH_FAILED = 719, NOT_PERMITTED = 800, NOT_SUPPORTED = 801;

constexpr uint64_t MIB = 1 << 20;
// Granularity of device memory, as in drivers.
constexpr uint64_t GRANULE = 2 * MIB;

using Address = uint64_t;

// Returns an environment variable, or the default.
inline std::string setting(const char* name, const char* usual) {
    const char* value = getenv((std::string("PLIMSOLL_STAND_IN_") + name).c_str());
    return value && *value ? value : usual;
}

std::vector<std::string> split(const std::string& text, char at);
// Parses "24GiB", "512MiB", "77".
uint64_t bytes_of(const std::string& text);

// A stand-in for one GPU.
struct Gpu {
    int number;
    uint64_t total;
    uint64_t foreign_at_first;
    uint64_t arena = 0; // granules that were handed out
    uint64_t charges = 0; // context, modules, libraries
    uint64_t spare = 0;   // part of the charges: memory of unloaded modules, for later ones
    unsigned arch;      // 86 for sm_86
    // Memory held by other processes; read from a file, if one is named, which may change at any time.
    uint64_t foreign() const;
    uint64_t used() const { return foreign() + arena + charges; }
    uint64_t free() const { return used() > total ? 0 : total - used(); }
};

struct Mark {
    bool done = false;
    double seconds = 0;
};

// One item of queued work. A record or a wait has a mark and no work.
struct Item {
    std::string name;
    std::function<void()> work;
    std::shared_ptr<Mark> record, wait;
    // Whether the item may run now: it may depend on other ranks, perhaps in other processes.
    std::function<bool()> may;
};

struct Context;

struct Stream {
    Context* context;
    bool blocking;  // waits for, and is waited for by, the null stream
    std::deque<Item> items;
};

struct Context {
    Gpu* gpu;
    int references = 0;
    Stream null;
    std::vector<Stream*> streams;
};

// Lock held during every call.
extern std::recursive_mutex lock;
// The code with which the device was lost; every later call returns it.
extern int lost;

std::vector<Gpu>& gpus();
Context* current();
// Returns the stream of a handle, with the meaning of the null stream; null for a bad handle.
Stream* stream_of(void* handle);
// Appends work to a stream. It runs during a later call, in any order that streams and events allow.
int enqueue(void* stream, std::string name, std::function<void()> work);
// Appends work that may run only when a condition holds. The host must not wait for it inside a call, because the rank
// that fulfils the condition may not have arrived yet.
int enqueue_when(void* stream, std::string name, std::function<bool()> may, std::function<void()> work);
// Runs work until the stream is empty.
int finish(Stream* stream);
// Allocates device memory outside the arena, as a library or module does. Returns whether there was room.
bool charge(Gpu& gpu, uint64_t bytes);
// Draws a number from the seed.
std::mt19937_64& draws();
// Reports an error of the caller and ends the process; a real driver would not do that.
[[noreturn]] void die(const std::string& what);

}  // namespace stand_in
