// Declarations shared by the parts of libcuda of the stand-in: driver.cpp (devices and contexts), memory.cpp (device and
// pinned memory), queues.cpp (queued work) and streams.cpp (streams, events, modules and launches).
#pragma once

#include "stand_in.h"

namespace stand_in {

// ---- driver.cpp ----

// Whether cuInit was called.
extern bool initialized;
// The primary contexts of all devices, also those without references.
extern std::vector<Context*> contexts;
// Counts that are printed at exit.
extern uint64_t allocations, launches, openings, used_at_most;

// ---- memory.cpp ----

// While an object of this type lives, this process may access device memory.
struct Open {
    static inline int depth = 0;
    Open();
    ~Open();
};

bool is_device(Address address);
// Ends the process if a kernel wrote beyond an allocation.
void check_canaries();

// ---- queues.cpp ----

// Reports accesses to device memory outside of queued work, and wrong accesses inside it.
void watch_faults();
// Runs one item of some stream. Returns whether any could run.
bool run_any();
// Runs items until a condition holds. Ends the process if none can run before.
int run_until(const std::function<bool()>& done);
// Runs all work of a context, or of all contexts.
int drain(Context* context);
int drain_all();
// Loses the device: queued work is dropped, and every later call fails.
int lose(const char* why);

}  // namespace stand_in

// Beginning of every call: takes the lock, and fails before cuInit and after the loss of the device.
#define ENTER                                            \
    std::lock_guard<std::recursive_mutex> guard(lock);   \
    if (!initialized) return NOT_INITIALIZED;            \
    if (lost != OK) return lost
// The same, for calls that need a current context.
#define IN_CONTEXT \
    ENTER;         \
    if (!current()) return INVALID_CONTEXT
