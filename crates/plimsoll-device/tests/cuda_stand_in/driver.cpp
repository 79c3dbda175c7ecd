// libcuda of the stand-in: devices, contexts, memory, streams, events, modules, launches. Work is queued and runs late,
// in an order that streams and events allow and the seed chooses. Device memory is accessible only while work runs.

#include "stand_in.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace stand_in {

std::recursive_mutex lock;
int lost = OK;

namespace {

// Device addresses: far from mappings of the process, and never readable by the host.
constexpr Address BASE = 0x2000'0000'0000, SPACE = 1ull << 42;
constexpr uint8_t CANARY = 0xc5, POISON = 0xff;
// Filling fresh memory with NaN touches pages, so only this much of an allocation is filled.
constexpr uint64_t POISONED_MAX = 1ull << 30;

bool initialized = false;
std::vector<Context*> contexts;
thread_local std::vector<Context*> stack;
uint64_t allocations = 0, launches = 0, openings = 0, used_at_most = 0;

// The most that this process ever held on a device, updated from the present amount.
void note(const Gpu& gpu) { used_at_most = std::max(used_at_most, gpu.arena + gpu.charges); }

// Prints counts at exit, for tests that inject a fault at every call.
__attribute__((destructor)) void count() {
    if (setting("COUNT", "0") == "1")
        fprintf(stderr, "%s: %llu contexts opened, %llu allocations, %llu launches, at most %llu bytes\n", NAME,
                (unsigned long long)openings, (unsigned long long)allocations, (unsigned long long)launches,
                (unsigned long long)used_at_most);
}

// The work that runs now, for the message of a process that dies in it.
const char* volatile running = nullptr;

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

struct Event {
    std::shared_ptr<Mark> latest;
};

struct Function {
    struct Module* module;
    std::string name;
    int (*launch)(const unsigned*, unsigned, unsigned, void* const*, int);
    int (*sizes)(unsigned*);
    int shared_max = 48 << 10;
};

struct Module {
    void* library;
    Context* context;
    bool charged = false;
    std::map<std::string, Function*> functions;
};

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

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

// While an object of this type lives, this process may access device memory.
struct Open {
    static inline int depth = 0;
    Open() {
        if (depth++ == 0) protect(PROT_READ | PROT_WRITE);
    }
    ~Open() {
        if (--depth == 0) protect(PROT_NONE);
    }
};

void on_fault(int, siginfo_t* info, void*) {
    char text[256];
    Address at = (Address)info->si_addr;
    bool device = at >= BASE && at < BASE + SPACE;
    const char* what = running ? running : device ? "the host" : "something";
    int length = snprintf(text, sizeof text, "%s: %s touched %#llx, which is %s\n", NAME, what, (unsigned long long)at,
                          device && !running ? "device memory" : "nothing that it may touch");
    if (write(2, text, length) < 0) _exit(139);
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
}

void watch_faults() {
    static char alternate[64 << 10];
    stack_t alternate_stack = {};
    alternate_stack.ss_sp = alternate;
    alternate_stack.ss_size = sizeof alternate;
    sigaltstack(&alternate_stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

void check_canaries() {
    for (auto& [address, mapping] : mappings)
        for (uint64_t at = mapping.canary_from; mapping.charged && at < mapping.bytes; at++)
            if (((uint8_t*)address)[at] != CANARY) die("a kernel wrote beyond an allocation");
}

bool may_run(const Item& item) { return !(item.wait && !item.wait->done) && !(item.may && !item.may()); }

// Whether a context's streams wait for something outside this call.
bool is_held_up(Context* context) {
    for (Stream* stream : context->streams)
        if (!stream->items.empty() && stream->items.front().may) return true;
    return false;
}

// Streams with a first item that may run now.
std::vector<Stream*> ready() {
    std::vector<Stream*> list;
    for (Context* context : contexts) {
        std::vector<Stream*> all = context->streams;
        all.push_back(&context->null);
        for (Stream* stream : all)
            if (!stream->items.empty() && may_run(stream->items.front())) list.push_back(stream);
    }
    return list;
}

void run_one(Stream* stream) {
    Item item = std::move(stream->items.front());
    stream->items.pop_front();
    if (item.work && lost == OK) {
        running = item.name.c_str();
        item.work();
        running = nullptr;
    }
    if (item.record) {
        item.record->done = true;
        item.record->seconds = now();
    }
}

// Runs one item of some stream. With even odds the stream that ran last continues, so that streams get far ahead of
// others.
bool run_any() {
    static Stream* last = nullptr;
    std::vector<Stream*> list = ready();
    if (list.empty()) return false;
    bool again = draws()() % 2 && std::find(list.begin(), list.end(), last) != list.end();
    last = again ? last : list[draws()() % list.size()];
    Open open;
    run_one(last);
    return true;
}

int run_until(const std::function<bool()>& done) {
    Open open;
    while (!done()) {
        if (lost != OK) return lost;
        if (!run_any()) die("the host waits for work that was never queued, or that depends on other ranks");
    }
    check_canaries();
    return lost;
}

bool idle(Context* context) {
    if (!context->null.items.empty()) return false;
    for (Stream* stream : context->streams)
        if (!stream->items.empty()) return false;
    return true;
}

int drain(Context* context) {
    return run_until([&] { return idle(context); });
}

int drain_all() {
    // Work that waits for other ranks is skipped: the caller does not have to wait for it.
    for (Context* context : contexts)
        if (int code = run_until([&] { return idle(context) || (ready().empty() && is_held_up(context)); })) return code;
    return lost;
}

int lose(const char* why) {
    fprintf(stderr, "%s: %s\n", NAME, why);
    lost = atoi(setting("LOST_CODE", "719").c_str());
    for (Context* context : contexts) {
        context->null.items.clear();
        for (Stream* stream : context->streams) stream->items.clear();
    }
    return lost;
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
    return at;
}

bool is_device(Address address) { return address >= BASE && address < BASE + SPACE; }

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

void die(const std::string& what) {
    fprintf(stderr, "%s: %s%s%s\n", NAME, what.c_str(), running ? ", in " : "", running ? running : "");
    abort();
}

std::vector<std::string> split(const std::string& text, char at) {
    std::vector<std::string> parts;
    size_t from = 0;
    for (size_t to; (to = text.find(at, from)) != std::string::npos; from = to + 1) parts.push_back(text.substr(from, to - from));
    parts.push_back(text.substr(from));
    return parts;
}

uint64_t bytes_of(const std::string& text) {
    char* unit = nullptr;
    double number = strtod(text.c_str(), &unit);
    std::string rest = unit;
    if (rest == "GiB") return (uint64_t)(number * (1 << 30));
    if (rest == "MiB") return (uint64_t)(number * (1 << 20));
    if (rest == "KiB") return (uint64_t)(number * (1 << 10));
    if (rest.empty()) return (uint64_t)number;
    die("`" + text + "` is not a size");
}

uint64_t Gpu::foreign() const {
    static const std::string path = setting("FOREIGN_FILE", "");
    char text[64] = {};
    FILE* file = path.empty() ? nullptr : fopen(path.c_str(), "r");
    if (!file) return foreign_at_first;
    bool found = fscanf(file, "%63s", text) == 1;
    fclose(file);
    return found ? bytes_of(text) : foreign_at_first;
}

std::mt19937_64& draws() {
    static std::mt19937_64 draws(strtoull(setting("SEED", "1").c_str(), nullptr, 10));
    return draws;
}

std::vector<Gpu>& gpus() {
    static std::vector<Gpu> list = [] {
        std::vector<Gpu> list;
        std::vector<std::string> memories = split(setting("MEMORY", "8GiB"), ','), archs = split(setting("ARCH", "86"), ',');
        uint64_t foreign = bytes_of(setting("FOREIGN", "0"));
        for (size_t i = 0; i < memories.size(); i++) {
            unsigned arch = strtoul(archs[std::min(i, archs.size() - 1)].c_str(), nullptr, 10);
            list.push_back({(int)i, bytes_of(memories[i]), foreign, 0, 0, 0, arch});
        }
        return list;
    }();
    return list;
}

Context* current() { return stack.empty() ? nullptr : stack.back(); }

Stream* stream_of(void* handle) {
    Context* context = current();
    if (!context) return nullptr;
    if ((uintptr_t)handle <= 2) {
        // The null stream waits for blocking streams, and they for it.
        for (Stream* stream : context->streams)
            if (stream->blocking && run_until([&] { return stream->items.empty(); }) != OK) break;
        return &context->null;
    }
    for (Context* context : contexts)
        for (Stream* stream : context->streams)
            if (stream == handle) {
                if (stream->blocking) run_until([&] { return stream->context->null.items.empty(); });
                return stream;
            }
    return nullptr;
}

int enqueue(void* handle, std::string name, std::function<void()> work) {
    if (lost != OK) return lost;
    if (!current()) return INVALID_CONTEXT;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    stream->items.push_back({std::move(name), std::move(work), nullptr, nullptr, nullptr});
    // Real queues have bounded length, too.
    while (stream->items.size() > 1024 && run_any()) {}
    return lost;
}

int enqueue_when(void* handle, std::string name, std::function<bool()> may, std::function<void()> work) {
    if (int code = enqueue(handle, std::move(name), std::move(work))) return code;
    stream_of(handle)->items.back().may = std::move(may);
    return OK;
}

int finish(Stream* stream) {
    return run_until([&] { return stream->items.empty(); });
}

bool charge(Gpu& gpu, uint64_t bytes) {
    if (gpu.free() < bytes) return false;
    gpu.charges += bytes;
    note(gpu);
    return true;
}

}  // namespace stand_in

using namespace stand_in;

#define ENTER                                            \
    std::lock_guard<std::recursive_mutex> guard(lock);   \
    if (!initialized) return NOT_INITIALIZED;            \
    if (lost != OK) return lost
#define IN_CONTEXT \
    ENTER;         \
    if (!current()) return INVALID_CONTEXT

EXPORT int cuInit(unsigned) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!initialized) watch_faults();
    initialized = true;
    return setting("MEMORY", "8GiB") == "none" ? NO_DEVICE : OK;
}

EXPORT int cuDriverGetVersion(int* version) {
    *version = atoi(setting("DRIVER", "13020").c_str());
    return OK;
}

struct Code {
    int code;
    const char *name, *text;
};
static const Code CODES[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

static int code_text(int code, const char** out, const char* Code::*what) {
    for (const Code& known : CODES)
        if (known.code == code) {
            *out = known.*what;
            return OK;
        }
    *out = nullptr;
    return INVALID_VALUE;
}

EXPORT int cuGetErrorName(int code, const char** out) { return code_text(code, out, &Code::name); }
EXPORT int cuGetErrorString(int code, const char** out) { return code_text(code, out, &Code::text); }

// ---- devices ----

// The GPUs visible under CUDA_VISIBLE_DEVICES, in its order: by number or as GPU-uuid, up to the first invalid one.
// NVML ignores the variable.
static const std::vector<int>& visible() {
    static std::vector<int> list = [] {
        std::vector<int> list;
        const char* words = getenv("CUDA_VISIBLE_DEVICES");
        for (int i = 0; !words && i < (int)gpus().size(); i++) list.push_back(i);
        for (const std::string& word : words && *words ? split(words, ',') : std::vector<std::string>()) {
            size_t last = word.rfind('-');
            int number = last == std::string::npos ? atoi(word.c_str()) : (int)strtol(word.c_str() + last + 1, nullptr, 16);
            if (number < 0 || number >= (int)gpus().size()) break;
            list.push_back(number);
        }
        return list;
    }();
    return list;
}

EXPORT int cuDeviceGetCount(int* count) {
    ENTER;
    *count = (int)visible().size();
    return OK;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
    ENTER;
    if (ordinal < 0 || ordinal >= (int)visible().size()) return INVALID_DEVICE;
    *device = visible()[ordinal];
    return OK;
}

EXPORT int cuDeviceGetName(char* name, int length, int device) {
    ENTER;
    if (device < 0 || device >= (int)gpus().size()) return INVALID_DEVICE;
    snprintf(name, length, "%s", NAME);
    return OK;
}

EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    ENTER;
    if (device < 0 || device >= (int)gpus().size()) return INVALID_DEVICE;
    *bytes = gpus()[device].total;
    return OK;
}

EXPORT int cuDeviceGetUuid_v2(char* uuid, int device) {
    ENTER;
    memset(uuid, 0, 16);
    uuid[0] = (char)0x57, uuid[15] = (char)device;
    return OK;
}
EXPORT int cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

EXPORT int cuDeviceGetPCIBusId(char* id, int length, int device) {
    ENTER;
    snprintf(id, length, "00000000:%02X:00.0", device + 1);
    return OK;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
    ENTER;
    if (device < 0 || device >= (int)gpus().size()) return INVALID_DEVICE;
    unsigned arch = gpus()[device].arch;
    static const std::map<int, int> values = {
        {1, 1024},   {2, 1024},  {3, 1024},   {4, 64},      {5, 0x7fffffff}, {6, 65535},    {7, 65535},     {8, 48 << 10},
        {10, 32},    {12, 65536}, {13, 1000000}, {15, 1},   {16, 2},         {18, 0},       {19, 1},        {20, 0},
        {31, 1},     {32, 0},    {34, 0},     {36, 1000000}, {37, 64},       {38, 1 << 20}, {39, 1536},     {40, 2},
        {41, 1},     {50, 0},    {78, 1},     {81, 100 << 10}, {82, 65536},  {83, 1},       {106, 16},
        {111, 1 << 10}, {115, 0},
    };
    if (attribute == 75) return *value = (int)(arch / 10), OK;
    if (attribute == 76) return *value = (int)(arch % 10), OK;
    if (attribute == 33) return *value = device + 1, OK;
    if (attribute == 97) return *value = (int)bytes_of(setting("SHARED", "99KiB")), OK;
    if (attribute == 102) return *value = setting("VMM", "1") != "0", OK;
    auto known = values.find(attribute);
    if (known == values.end()) return INVALID_VALUE;
    *value = known->second;
    return OK;
}

// ---- contexts ----

EXPORT int cuDevicePrimaryCtxRetain(Context** context, int device) {
    ENTER;
    if (device < 0 || device >= (int)gpus().size()) return INVALID_DEVICE;
    Gpu& gpu = gpus()[device];
    for (Context* known : contexts)
        if (known->gpu == &gpu) {
            if (known->references == 0 && !charge(gpu, bytes_of(setting("CONTEXT", "300MiB")))) return OUT_OF_MEMORY;
            if (known->references++ == 0) openings++;
            *context = known;
            return OK;
        }
    if (!charge(gpu, bytes_of(setting("CONTEXT", "300MiB")))) return OUT_OF_MEMORY;
    openings++;
    Context* made = new Context{&gpu, 1, {}, {}};
    made->null = {made, true, {}};
    contexts.push_back(made);
    *context = made;
    return OK;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    for (Context* known : contexts)
        if (known->gpu->number == device) {
            // Releasing the last reference ends the context, with everything that modules and libraries held in it.
            if (known->references > 0 && --known->references == 0) known->gpu->charges = known->gpu->spare = 0;
            return OK;
        }
    return INVALID_CONTEXT;
}

EXPORT int cuDevicePrimaryCtxSetFlags_v2(int, unsigned) { ENTER; return OK; }
EXPORT int cuDevicePrimaryCtxReset_v2(int) { ENTER; return NOT_SUPPORTED; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    ENTER;
    *flags = 0;
    *active = 0;
    for (Context* known : contexts) *active |= known->gpu->number == device;
    return OK;
}

EXPORT int cuCtxSetCurrent(Context* context) {
    ENTER;
    if (!stack.empty()) stack.pop_back();
    if (context) stack.push_back(context);
    return OK;
}

EXPORT int cuCtxGetCurrent(Context** context) {
    ENTER;
    *context = current();
    return OK;
}

EXPORT int cuCtxPushCurrent_v2(Context* context) {
    ENTER;
    stack.push_back(context);
    return OK;
}

EXPORT int cuCtxPopCurrent_v2(Context** context) {
    ENTER;
    if (stack.empty()) return INVALID_CONTEXT;
    *context = stack.back();
    stack.pop_back();
    return OK;
}

EXPORT int cuCtxGetDevice(int* device) {
    IN_CONTEXT;
    *device = current()->gpu->number;
    return OK;
}

EXPORT int cuCtxSynchronize() {
    IN_CONTEXT;
    return drain(current());
}

EXPORT int cuCtxSetLimit(int, size_t) { IN_CONTEXT; return OK; }
EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    IN_CONTEXT;
    *least = 0, *greatest = -5;
    return OK;
}

// ---- memory ----

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

// ---- streams and events ----

EXPORT int cuStreamCreate(Stream** stream, unsigned flags) {
    IN_CONTEXT;
    *stream = new Stream{current(), (flags & 1) == 0, {}};
    current()->streams.push_back(*stream);
    return OK;
}
EXPORT int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }

EXPORT int cuStreamDestroy_v2(Stream* stream) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    // Queued work still runs, then the stream is destroyed.
    int code = lost != OK ? lost : finish(stream);
    auto& all = stream->context->streams;
    all.erase(std::remove(all.begin(), all.end(), stream), all.end());
    return code;
}

EXPORT int cuStreamSynchronize(void* handle) {
    IN_CONTEXT;
    Stream* stream = stream_of(handle);
    return stream ? finish(stream) : INVALID_HANDLE;
}

EXPORT int cuStreamQuery(void* handle) {
    IN_CONTEXT;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->items.empty()) return OK;
    run_any();
    return lost != OK ? lost : NOT_READY;
}

EXPORT int cuEventCreate(Event** event, unsigned) {
    IN_CONTEXT;
    *event = new Event;
    return OK;
}

EXPORT int cuEventDestroy_v2(Event* event) {
    delete event;
    return OK;
}

EXPORT int cuEventRecord(Event* event, void* handle) {
    IN_CONTEXT;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    event->latest = std::make_shared<Mark>();
    stream->items.push_back({"an event", nullptr, event->latest, nullptr, nullptr});
    return OK;
}
EXPORT int cuEventRecordWithFlags(Event* event, void* handle, unsigned) { return cuEventRecord(event, handle); }

EXPORT int cuStreamWaitEvent(void* handle, Event* event, unsigned) {
    IN_CONTEXT;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    // Waiting for an event that was never recorded has no effect.
    if (event->latest) stream->items.push_back({"a wait", nullptr, nullptr, event->latest, nullptr});
    return OK;
}

EXPORT int cuEventSynchronize(Event* event) {
    IN_CONTEXT;
    std::shared_ptr<Mark> mark = event->latest;
    return mark ? run_until([&] { return mark->done; }) : OK;
}

EXPORT int cuEventQuery(Event* event) {
    IN_CONTEXT;
    if (!event->latest || event->latest->done) return OK;
    run_any();
    return lost != OK ? lost : event->latest->done ? OK : NOT_READY;
}

EXPORT int cuEventElapsedTime_v2(float* milliseconds, Event* start, Event* end) {
    IN_CONTEXT;
    if (!start->latest || !end->latest) return INVALID_HANDLE;
    if (!start->latest->done || !end->latest->done) return NOT_READY;
    *milliseconds = (float)((end->latest->seconds - start->latest->seconds) * 1e3);
    return OK;
}
EXPORT int cuEventElapsedTime(float* milliseconds, Event* start, Event* end) { return cuEventElapsedTime_v2(milliseconds, start, end); }

EXPORT int cuLaunchHostFunc(void* stream, void (*call)(void*), void* data) {
    IN_CONTEXT;
    return enqueue(stream, "a function of the host", [=] { call(data); });
}

// ---- modules and launches ----

// Header that nvrtc.cpp writes before the shared object.
struct ImageHeader {
    char magic[16];
    uint64_t bytes;
    uint64_t arch;
};

EXPORT int cuModuleLoadData(Module** module, const void* image) {
    IN_CONTEXT;
    ImageHeader header;
    memcpy(&header, image, sizeof header);
    if (memcmp(header.magic, "stand-in image\n", 16) != 0) return INVALID_IMAGE;
    // As with real cubins: equal major version, and no newer minor version.
    unsigned arch = current()->gpu->arch;
    if (header.arch / 10 != arch / 10 || header.arch > arch) return NO_BINARY_FOR_GPU;
    char path[] = "/tmp/stand-in-XXXXXX";
    int file = mkstemp(path);
    if (file < 0 || write(file, (const char*)image + sizeof header, header.bytes) != (ssize_t)header.bytes) die("cannot write a module");
    close(file);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    unlink(path);
    if (!library) {
        fprintf(stderr, "%s: %s\n", NAME, dlerror());
        return INVALID_IMAGE;
    }
    *module = new Module{library, current(), false, {}};
    return OK;
}
EXPORT int cuModuleLoadDataEx(Module** module, const void* image, unsigned, int*, void**) { return cuModuleLoadData(module, image); }

EXPORT int cuModuleUnload(Module* module) {
    ENTER;
    int code = drain_all();
    // A driver keeps the charged memory for the next module.
    if (module->charged) module->context->gpu->spare += GRANULE;
    delete module;
    return code;
}

EXPORT int cuModuleGetFunction(Function** function, Module* module, const char* name) {
    ENTER;
    Function*& known = module->functions[name];
    if (!known) {
        auto find = [&](const char* kind) { return dlsym(module->library, (std::string(kind) + name).c_str()); };
        void *launch = find("launch_"), *sizes = find("sizes_");
        if (!launch || !sizes) return NOT_FOUND;
        known = new Function{module, name, (decltype(Function::launch))launch, (decltype(Function::sizes))sizes};
    }
    *function = known;
    return OK;
}

EXPORT int cuModuleGetLoadingMode(int* mode) {
    *mode = 2;  // lazy
    return OK;
}

EXPORT int cuFuncSetAttribute(Function* function, int attribute, int value) {
    ENTER;
    if (attribute == 8) {
        if (value > (int)bytes_of(setting("SHARED", "99KiB"))) return INVALID_VALUE;
        function->shared_max = value;
    }
    return OK;
}

EXPORT int cuFuncGetAttribute(int* value, int attribute, Function* function) {
    ENTER;
    *value = attribute == 8 ? function->shared_max : attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return OK;
}

EXPORT int cuFuncSetCacheConfig(Function*, int) { ENTER; return OK; }
EXPORT int cuFuncLoad(Function*) { ENTER; return OK; }

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function*, int, size_t) {
    ENTER;
    *blocks = 1;
    return OK;
}

EXPORT int cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra) {
    IN_CONTEXT;
    if (extra || block_y != 1 || block_z != 1 || !grid_x || !grid_y || !grid_z || !block_x) return INVALID_VALUE;
    if (grid_y > 65535 || grid_z > 65535 || block_x > 1024 || (int)shared_bytes > function->shared_max) return INVALID_VALUE;
    if (function->module->context != current()) return INVALID_HANDLE;
    launches++;
    if (strtoull(setting("LOST_AT", "0").c_str(), nullptr, 10) == launches) return lose("the device is lost, as was asked for");
    // Modules are loaded to the device at first use.
    Gpu& gpu = *current()->gpu;
    if (!function->module->charged && gpu.spare >= GRANULE)
        gpu.spare -= GRANULE;
    else if (!function->module->charged && !charge(gpu, GRANULE))
        return OUT_OF_MEMORY;
    function->module->charged = true;
    unsigned sizes[64];
    int count = function->sizes(sizes);
    auto values = std::make_shared<std::vector<std::vector<uint64_t>>>();
    for (int i = 0; i < count; i++) {
        values->emplace_back((sizes[i] + 7) / 8);
        memcpy(values->back().data(), arguments[i], sizes[i]);
    }
    int reverse = (int)(draws()() % 2);
    auto work = [=] {
        const unsigned grid[3] = {grid_x, grid_y, grid_z};
        std::vector<void*> pointers;
        for (auto& value : *values) pointers.push_back(value.data());
        if (function->launch(grid, block_x, shared_bytes, pointers.data(), reverse) != 0) lose(("in " + function->name).c_str());
    };
    return enqueue(stream, "kernel " + function->name, work);
}

// Queries for tests: charges and granules of a device.
EXPORT int standInMemory(int device, uint64_t* arena, uint64_t* charges) {
    *arena = gpus().at(device).arena;
    *charges = gpus().at(device).charges;
    return OK;
}
