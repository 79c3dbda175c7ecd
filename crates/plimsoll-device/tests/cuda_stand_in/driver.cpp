// libcuda of the stand-in: initialization, error texts, devices and contexts.

#include "driver.h"

#include <algorithm>

namespace stand_in {

std::recursive_mutex lock;
int lost = OK;
bool initialized = false;
std::vector<Context*> contexts;
static thread_local std::vector<Context*> stack;
uint64_t allocations = 0, launches = 0, openings = 0, used_at_most = 0;

// Prints counts at exit, for tests that inject a fault at every call.
__attribute__((destructor)) static void count() {
    if (setting("COUNT", "0") == "1")
        fprintf(stderr, "%s: %llu contexts opened, %llu allocations, %llu launches, at most %llu bytes\n", NAME,
                (unsigned long long)openings, (unsigned long long)allocations, (unsigned long long)launches,
                (unsigned long long)used_at_most);
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

}  // namespace stand_in

using namespace stand_in;

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
    {DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
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
    if (setting("TAKEN", "0") == "1") return DEVICE_UNAVAILABLE;
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
