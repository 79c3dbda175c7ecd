// libnvidia-ml of the stand-in: GPU status. Memory is that of this process and, if the environment requests it, of
// made-up others; other figures are plausible numbers.

#include "stand_in.h"

#include <unistd.h>

#include <algorithm>

namespace {

constexpr int SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7;

struct Memory {
    unsigned long long total, free, used;
};
struct Memory2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct Utilization {
    unsigned gpu, memory;
};
struct Process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
struct Pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

int text(char* to, unsigned length, const char* from) {
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

}  // namespace

using stand_in::Gpu;

EXPORT int nvmlInit_v2() { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned) { return SUCCESS; }
EXPORT int nvmlShutdown() { return SUCCESS; }

EXPORT const char* nvmlErrorString(int code) {
    switch (code) {
        case SUCCESS: return "Success";
        case INVALID_ARGUMENT: return "Invalid Argument";
        case NOT_SUPPORTED: return "Not Supported";
        case INSUFFICIENT_SIZE: return "Insufficient Size";
    }
    return "Unknown Error";
}

EXPORT int nvmlSystemGetDriverVersion(char* to, unsigned length) { return text(to, length, "0.0-stand-in"); }
EXPORT int nvmlSystemGetNVMLVersion(char* to, unsigned length) { return text(to, length, "13.0-stand-in"); }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = 13020;
    return SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion(int* version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = (unsigned)stand_in::gpus().size();
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu** gpu) {
    if (index >= stand_in::gpus().size()) return INVALID_ARGUMENT;
    *gpu = &stand_in::gpus()[index];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* id, Gpu** gpu) {
    const char* bus = strchr(id, ':');
    return nvmlDeviceGetHandleByIndex_v2(bus ? (unsigned)strtoul(bus + 1, nullptr, 16) - 1 : 0, gpu);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char* id, Gpu** gpu) {
    const char* last = strrchr(id, '-');
    return nvmlDeviceGetHandleByIndex_v2(last ? (unsigned)strtoul(last + 1, nullptr, 10) : 0, gpu);
}

EXPORT int nvmlDeviceGetIndex(Gpu* gpu, unsigned* index) {
    *index = (unsigned)gpu->number;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetName(Gpu*, char* to, unsigned length) { return text(to, length, stand_in::NAME); }

EXPORT int nvmlDeviceGetUUID(Gpu* gpu, char* to, unsigned length) {
    return text(to, length, ("GPU-stand-in-" + std::to_string(gpu->number)).c_str());
}

EXPORT int nvmlDeviceGetPciInfo_v3(Gpu* gpu, Pci* pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)gpu->number + 1;
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(Gpu* gpu, int* major, int* minor) {
    *major = (int)gpu->arch / 10, *minor = (int)gpu->arch % 10;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(Gpu* gpu, Memory* memory) {
    std::lock_guard<std::recursive_mutex> guard(stand_in::lock);
    *memory = {gpu->total, gpu->free(), gpu->used()};
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(Gpu* gpu, Memory2* memory) {
    std::lock_guard<std::recursive_mutex> guard(stand_in::lock);
    *memory = {memory->version, gpu->total, 0, gpu->free(), gpu->used()};
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Gpu* gpu, unsigned* count, Process* processes) {
    std::lock_guard<std::recursive_mutex> guard(stand_in::lock);
    // As in a container: process ids have no meaning there.
    if (stand_in::setting("PROCESSES", "1") == "0") {
        *count = 0;
        return SUCCESS;
    }
    std::vector<Process> all;
    if (gpu->foreign()) all.push_back({1, gpu->foreign(), ~0u, ~0u});
    if (gpu->charges) all.push_back({(unsigned)getpid(), gpu->arena + gpu->charges, ~0u, ~0u});
    unsigned room = *count;
    *count = (unsigned)all.size();
    if (room < all.size()) return INSUFFICIENT_SIZE;
    std::copy(all.begin(), all.end(), processes);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(Gpu* gpu, unsigned* count, Process* processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(gpu, count, processes);
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu*, unsigned* count, Process*) {
    *count = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetUtilizationRates(Gpu*, Utilization* utilization) {
    *utilization = {0, 0};
    return SUCCESS;
}

static int number(unsigned* to, unsigned value) {
    *to = value;
    return SUCCESS;
}

struct TemperatureRequest {
    unsigned version;
    int sensor;
    int temperature;
};
EXPORT int nvmlDeviceGetTemperature(Gpu*, int, unsigned* celsius) { return number(celsius, 36); }
EXPORT int nvmlDeviceGetTemperatureV(Gpu*, TemperatureRequest* request) {
    request->temperature = 36;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetTemperatureThreshold(Gpu*, int, unsigned* celsius) { return number(celsius, 90); }
EXPORT int nvmlDeviceGetPowerUsage(Gpu*, unsigned* milliwatts) { return number(milliwatts, 15000); }
EXPORT int nvmlDeviceGetEnforcedPowerLimit(Gpu*, unsigned* milliwatts) { return number(milliwatts, 65000); }
EXPORT int nvmlDeviceGetPowerManagementLimit(Gpu*, unsigned* milliwatts) { return number(milliwatts, 65000); }
EXPORT int nvmlDeviceGetClockInfo(Gpu*, int, unsigned* mhz) { return number(mhz, 1000); }
EXPORT int nvmlDeviceGetMaxClockInfo(Gpu*, int, unsigned* mhz) { return number(mhz, 1000); }
EXPORT int nvmlDeviceGetFanSpeed(Gpu*, unsigned*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNumGpuCores(Gpu*, unsigned* cores) { return number(cores, 2); }
EXPORT int nvmlDeviceGetMemoryBusWidth(Gpu*, unsigned* bits) { return number(bits, 64); }
EXPORT int nvmlDeviceGetCurrPcieLinkGeneration(Gpu*, unsigned* generation) { return number(generation, 4); }
EXPORT int nvmlDeviceGetCurrPcieLinkWidth(Gpu*, unsigned* width) { return number(width, 16); }
EXPORT int nvmlDeviceGetMaxPcieLinkGeneration(Gpu*, unsigned* generation) { return number(generation, 4); }
EXPORT int nvmlDeviceGetMaxPcieLinkWidth(Gpu*, unsigned* width) { return number(width, 16); }
static int throttle(unsigned long long* reasons) {
    *reasons = 0;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu*, unsigned long long* reasons) { return throttle(reasons); }
EXPORT int nvmlDeviceGetCurrentClocksEventReasons(Gpu*, unsigned long long* reasons) { return throttle(reasons); }
