// libcuda of the stand-in: streams, events, modules and launches.

#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>

using namespace stand_in;

namespace {

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

}  // namespace

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
