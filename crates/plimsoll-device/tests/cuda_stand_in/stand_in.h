// What the parts of the stand-in for a GPU share. What it is, and what it cannot show: README.md.
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

// Only what the libraries of NVIDIA export is seen from outside.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stand_in {

constexpr const char* NAME = "stand-in for a GPU (runs on the CPU)";
// Codes of the driver (CUresult).
constexpr int OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
              INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, INVALID_HANDLE = 400, NOT_FOUND = 500,
              NOT_READY = 600, LAUNCH_FAILED = 719, NOT_PERMITTED = 800, NOT_SUPPORTED = 801;

constexpr uint64_t MIB = 1 << 20;
// Device memory is handed out in these, as drivers do.
constexpr uint64_t GRANULE = 2 * MIB;

using Address = uint64_t;

// The environment's word for it, or what is usual.
inline std::string setting(const char* name, const char* usual) {
    const char* value = getenv((std::string("PLIMSOLL_STAND_IN_") + name).c_str());
    return value && *value ? value : usual;
}

std::vector<std::string> split(const std::string& text, char at);
// "24GiB", "512MiB", "77".
uint64_t bytes_of(const std::string& text);

// A stand-in for one GPU.
struct Gpu {
    int number;
    uint64_t total;
    uint64_t foreign_at_first;
    uint64_t arena = 0; // granules that were handed out
    uint64_t charges = 0; // context, modules, libraries
    uint64_t spare = 0;   // of the charges: what modules that are gone had, for those that come
    unsigned arch;      // 86 for sm_86
    // Held by other processes: as a file says, which may change, where one is named.
    uint64_t foreign() const;
    uint64_t used() const { return foreign() + arena + charges; }
    uint64_t free() const { return used() > total ? 0 : total - used(); }
};

struct Mark {
    bool done = false;
    double seconds = 0;
};

// One piece of queued work. A record or a wait has a mark and no work.
struct Item {
    std::string name;
    std::function<void()> work;
    std::shared_ptr<Mark> record, wait;
    // Whether it may run now: what comes of others, in other processes perhaps.
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

// Everything is called under this.
extern std::recursive_mutex lock;
// The code that the device was lost with, which every call gives from then on.
extern int lost;

std::vector<Gpu>& gpus();
Context* current();
// The stream behind a handle, with what the null stream means obeyed; null for a bad handle.
Stream* stream_of(void* handle);
// Puts work behind what the stream has. It runs at some later call, in any order that streams and events allow.
int enqueue(void* stream, std::string name, std::function<void()> work);
// The same of work that may run only when something holds. The host must not wait for that inside a call: who brings it
// about may not have come yet.
int enqueue_when(void* stream, std::string name, std::function<bool()> may, std::function<void()> work);
// Runs until nothing is left in the stream.
int finish(Stream* stream);
// Takes device memory beside the arena, as a library or a module does. Whether there was room.
bool charge(Gpu& gpu, uint64_t bytes);
// Draws of the seed.
std::mt19937_64& draws();
// Says what is wrong with the caller and ends the process: nothing that a driver would do.
[[noreturn]] void die(const std::string& what);

}  // namespace stand_in
