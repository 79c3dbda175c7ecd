// libcuda of the stand-in: device memory, mapped and plain, pinned host memory, copies and fills. Device memory is
// accessible only while work runs.

#include "driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace stand_in {

namespace {

// Device addresses: far from mappings of the process, and never readable by the host.
constexpr Address BASE = 0x2000'0000'0000, SPACE = 1ull << 42;
constexpr uint8_t CANARY = 0xc5, POISON = 0xff;
// Filling fresh memory with NaN touches pages, so only this much of an allocation is filled.
constexpr uint64_t POISONED_MAX = 1ull << 30;

// The most that this process ever held on a device, updated from the present amount.
void note(const Gpu& gpu) { used_at_most = std::max(used_at_most, gpu.arena + gpu.charges); }

struct Mapping {
    uint64_t bytes;
    bool accessible;
    uint64_t canary_from = 0;  // unused bytes from here to the end
    uint64_t charged = 0;      // granules of a plain allocation
    Gpu* gpu = nullptr;
};
std::map<Address, Mapping> mappings;
std::map<Address, uint64_t> reservations;
Address next = BASE;

struct Physical {
    int file;
    uint64_t bytes;
    Gpu* gpu;
    int references;  // the handle, and each mapping
};
std::map<uint64_t, Physical> physicals;
std::map<Address, uint64_t> mapped;  // the handle behind a mapping
uint64_t next_physical = 1;

std::map<uintptr_t, size_t> pinned;

void protect(int protection) {
    // Not at every synchronization if a test reads memory after every op: it costs more than the ops.
    static const bool guarded = setting("GUARD", "1") == "1";
    if (!guarded && protection == PROT_NONE) return;
    for (auto at = mappings.begin(); at != mappings.end();) {
        Address first = at->first, end = first;
        for (; at != mappings.end() && at->first == end && at->second.accessible; ++at) end += at->second.bytes;
        if (end == first) {
            ++at;
            continue;
        }
        if (mprotect((void*)first, end - first, protection)) die("mprotect of device memory");
    }
}

uint64_t granules(uint64_t bytes) { return (bytes + GRANULE - 1) / GRANULE * GRANULE; }

// Whether the environment requests a refusal of this allocation.
bool refused() {
    allocations++;
    std::string at = setting("OOM_AT", "0");
    return strtoull(at.c_str(), nullptr, 10) == allocations;
}

int take(Gpu& gpu, uint64_t bytes) {
    if (refused() || gpu.free() < bytes) return OUT_OF_MEMORY;
    gpu.arena += bytes;
    note(gpu);
    return OK;
}

Address reserve(uint64_t bytes) {
    Address at = next;
    next += granules(bytes) + GRANULE;  // leaves an unused gap
    if (next > BASE + SPACE) die("no device addresses are left");
    void* got = mmap((void*)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != (void*)at) die("device addresses are taken");
    // Opening and closing memory takes time for each of its pages, which large pages make few.
    madvise(got, bytes, MADV_HUGEPAGE);
    return at;
}

bool is_pinned(const void* host, size_t bytes) {
    auto after = pinned.upper_bound((uintptr_t)host);
    if (after == pinned.begin()) return false;
    --after;
    return (uintptr_t)host + bytes <= after->first + after->second;
}

// Whether [address, address + bytes) is mapped and accessible.
bool is_mapped(Address address, uint64_t bytes) {
    while (bytes > 0) {
        auto after = mappings.upper_bound(address);
        if (after == mappings.begin()) return false;
        --after;
        uint64_t end = after->first + (after->second.charged ? after->second.canary_from : after->second.bytes);
        if (!after->second.accessible || address >= end) return false;
        uint64_t part = std::min(bytes, end - address);
        address += part, bytes -= part;
    }
    return true;
}

}  // namespace

Open::Open() {
    if (depth++ == 0) protect(PROT_READ | PROT_WRITE);
}

Open::~Open() {
    if (--depth == 0) protect(PROT_NONE);
}

bool is_device(Address address) { return address >= BASE && address < BASE + SPACE; }

void check_canaries() {
    for (auto& [address, mapping] : mappings)
        for (uint64_t at = mapping.canary_from; mapping.charged && at < mapping.bytes; at++)
            if (((uint8_t*)address)[at] != CANARY) die("a kernel wrote beyond an allocation");
}

bool charge(Gpu& gpu, uint64_t bytes) {
    if (gpu.free() < bytes) return false;
    gpu.charges += bytes;
    note(gpu);
    return true;
}

}  // namespace stand_in

using namespace stand_in;

EXPORT int cuMemGetInfo_v2(size_t* free, size_t* total) {
    IN_CONTEXT;
    *free = current()->gpu->free();
    *total = current()->gpu->total;
    return OK;
}

EXPORT int cuMemAlloc_v2(Address* address, size_t bytes) {
    IN_CONTEXT;
    if (bytes == 0) return INVALID_VALUE;
    uint64_t whole = granules(bytes + 1);
    Gpu& gpu = *current()->gpu;
    if (int code = take(gpu, granules(bytes))) return code;
    *address = reserve(whole);
    // Only the first page after it is checked, because pages cost time.
    uint64_t end = std::min(whole, bytes + 4096);
    mappings[*address] = {end, true, bytes, granules(bytes), &gpu};
    Open open;
    if (bytes <= POISONED_MAX) memset((void*)*address, POISON, bytes);
    memset((uint8_t*)*address + bytes, CANARY, end - bytes);
    return OK;
}

EXPORT int cuMemFree_v2(Address address) {
    ENTER;
    auto known = mappings.find(address);
    if (known == mappings.end() || !known->second.charged) return INVALID_VALUE;
    int code = drain_all();
    known->second.gpu->arena -= known->second.charged;
    munmap((void*)address, granules(known->second.bytes));
    mappings.erase(known);
    return code;
}

struct AllocationProperties {
    int type, handle_types, location_type, location;
};
struct AccessDescription {
    int location_type, location, flags;
};

EXPORT int cuMemGetAllocationGranularity(size_t* granularity, const AllocationProperties*, int) {
    ENTER;
    *granularity = GRANULE;
    return OK;
}

EXPORT int cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, unsigned long long) {
    ENTER;
    if (bytes == 0 || bytes % GRANULE) return INVALID_VALUE;
    *address = reserve(bytes);
    reservations[*address] = bytes;
    return OK;
}

EXPORT int cuMemAddressFree(Address address, size_t bytes) {
    ENTER;
    auto known = reservations.find(address);
    if (known == reservations.end() || known->second != bytes) return INVALID_VALUE;
    for (auto& [at, mapping] : mappings)
        if (at >= address && at < address + bytes) return INVALID_VALUE;
    munmap((void*)address, bytes);
    reservations.erase(known);
    return OK;
}

EXPORT int cuMemCreate(uint64_t* handle, size_t bytes, const AllocationProperties* properties, unsigned long long) {
    ENTER;
    if (bytes == 0 || bytes % GRANULE) return INVALID_VALUE;
    if (properties->type != 1 || properties->location_type != 1) return NOT_SUPPORTED;
    if (setting("VMM", "1") == "forbidden") return NOT_PERMITTED;
    if (properties->location < 0 || properties->location >= (int)gpus().size()) return INVALID_DEVICE;
    Gpu& gpu = gpus()[properties->location];
    if (int code = take(gpu, bytes)) return code;
    int file = memfd_create("stand-in", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes)) die("no memory for the stand-in");
    if (bytes <= POISONED_MAX) {
        void* all = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (all == MAP_FAILED) die("no memory for the stand-in");
        memset(all, POISON, bytes);
        munmap(all, bytes);
    }
    *handle = next_physical++;
    physicals[*handle] = {file, bytes, &gpu, 1};
    return OK;
}

static void release(uint64_t handle) {
    Physical& physical = physicals.at(handle);
    if (--physical.references > 0) return;
    close(physical.file);
    physical.gpu->arena -= physical.bytes;
    physicals.erase(handle);
}

EXPORT int cuMemRelease(uint64_t handle) {
    ENTER;
    if (!physicals.count(handle)) return INVALID_VALUE;
    release(handle);
    return OK;
}

EXPORT int cuMemMap(Address address, size_t bytes, size_t offset, uint64_t handle, unsigned long long) {
    ENTER;
    if (!physicals.count(handle) || bytes % GRANULE || offset != 0 || physicals[handle].bytes != bytes) return INVALID_VALUE;
    auto reservation = reservations.upper_bound(address);
    if (reservation == reservations.begin()) return INVALID_VALUE;
    --reservation;
    if (address + bytes > reservation->first + reservation->second) return INVALID_VALUE;
    for (auto& [at, mapping] : mappings)
        if (at < address + bytes && address < at + mapping.bytes) return INVALID_VALUE;
    void* got = mmap((void*)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physicals[handle].file, 0);
    if (got == MAP_FAILED) die("mapping device memory");
    physicals[handle].references++;
    mappings[address] = {bytes, false};
    mapped[address] = handle;
    return OK;
}

EXPORT int cuMemSetAccess(Address address, size_t bytes, const AccessDescription* access, size_t count) {
    ENTER;
    if (count != 1 || access->flags != 3) return NOT_SUPPORTED;
    for (Address at = address; at < address + bytes;) {
        auto known = mappings.find(at);
        if (known == mappings.end()) return INVALID_VALUE;
        known->second.accessible = true;
        at += known->second.bytes;
    }
    return OK;
}

EXPORT int cuMemUnmap(Address address, size_t bytes) {
    ENTER;
    for (Address at = address; at < address + bytes;) {
        auto known = mappings.find(at);
        if (known == mappings.end() || known->second.charged) return INVALID_VALUE;
        uint64_t size = known->second.bytes;
        mmap((void*)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        release(mapped.at(at));
        mapped.erase(at);
        mappings.erase(known);
        at += size;
    }
    return OK;
}

EXPORT int cuMemHostAlloc(void** host, size_t bytes, unsigned) {
    IN_CONTEXT;
    if (refused()) return OUT_OF_MEMORY;
    void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) return OUT_OF_MEMORY;
    pinned[(uintptr_t)got] = bytes;
    *host = got;
    return OK;
}
EXPORT int cuMemAllocHost_v2(void** host, size_t bytes) { return cuMemHostAlloc(host, bytes, 0); }

EXPORT int cuMemFreeHost(void* host) {
    ENTER;
    auto known = pinned.find((uintptr_t)host);
    if (known == pinned.end()) return INVALID_VALUE;
    int code = drain_all();
    munmap(host, known->second);
    pinned.erase(known);
    return code;
}

EXPORT int cuMemHostRegister_v2(void* host, size_t bytes, unsigned) {
    IN_CONTEXT;
    if (setting("REGISTER", "1") == "0") return NOT_SUPPORTED;
    if (setting("REGISTER", "1") == "forbidden") return NOT_PERMITTED;
    pinned[(uintptr_t)host] = bytes;
    return OK;
}

EXPORT int cuMemHostUnregister(void* host) {
    ENTER;
    int code = drain_all();
    return pinned.erase((uintptr_t)host) ? code : INVALID_VALUE;
}

EXPORT int cuMemHostGetDevicePointer_v2(Address* address, void* host, unsigned) {
    ENTER;
    *address = (Address)host;
    return OK;
}

static int copy(Address to, Address from, size_t bytes, void* stream, bool wait) {
    if (bytes == 0) return OK;
    for (Address end : {to, from})
        if (is_device(end) && !is_mapped(end, bytes)) return INVALID_VALUE;
    std::function<void()> work = [=] { memmove((void*)to, (void*)from, bytes); };
    bool staged = !is_device(from) && !is_pinned((void*)from, bytes);
    if (staged) {
        // Pageable memory is read before the call returns.
        auto bytes_of_host = std::make_shared<std::vector<uint8_t>>((uint8_t*)from, (uint8_t*)from + bytes);
        work = [=] { memcpy((void*)to, bytes_of_host->data(), bytes); };
    }
    if (int code = enqueue(stream, "a copy", work)) return code;
    // Pageable memory is written before the call returns.
    if (wait || (!is_device(to) && !is_pinned((void*)to, bytes))) return finish(stream_of(stream));
    return OK;
}

EXPORT int cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) { IN_CONTEXT; return copy(to, (Address)from, bytes, nullptr, true); }
EXPORT int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) { IN_CONTEXT; return copy((Address)to, from, bytes, nullptr, true); }
EXPORT int cuMemcpyDtoD_v2(Address to, Address from, size_t bytes) { IN_CONTEXT; return copy(to, from, bytes, nullptr, false); }
EXPORT int cuMemcpy(Address to, Address from, size_t bytes) { IN_CONTEXT; return copy(to, from, bytes, nullptr, true); }
EXPORT int cuMemcpyAsync(Address to, Address from, size_t bytes, void* stream) { IN_CONTEXT; return copy(to, from, bytes, stream, false); }
EXPORT int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) { IN_CONTEXT; return copy(to, (Address)from, bytes, stream, false); }
EXPORT int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) { IN_CONTEXT; return copy((Address)to, from, bytes, stream, false); }
EXPORT int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) { IN_CONTEXT; return copy(to, from, bytes, stream, false); }

template <class T> static int fill(Address to, T value, size_t count, void* stream) {
    if (count == 0) return OK;
    if (!is_mapped(to, count * sizeof(T)) || to % sizeof(T)) return INVALID_VALUE;
    return enqueue(stream, "a fill", [=] { std::fill_n((T*)to, count, value); });
}

EXPORT int cuMemsetD8Async(Address to, unsigned char value, size_t count, void* stream) { IN_CONTEXT; return fill(to, value, count, stream); }
EXPORT int cuMemsetD16Async(Address to, unsigned short value, size_t count, void* stream) { IN_CONTEXT; return fill(to, value, count, stream); }
EXPORT int cuMemsetD32Async(Address to, unsigned value, size_t count, void* stream) { IN_CONTEXT; return fill(to, value, count, stream); }
EXPORT int cuMemsetD8_v2(Address to, unsigned char value, size_t count) { IN_CONTEXT; return fill(to, value, count, nullptr); }
EXPORT int cuMemsetD16_v2(Address to, unsigned short value, size_t count) { IN_CONTEXT; return fill(to, value, count, nullptr); }
EXPORT int cuMemsetD32_v2(Address to, unsigned value, size_t count) { IN_CONTEXT; return fill(to, value, count, nullptr); }
