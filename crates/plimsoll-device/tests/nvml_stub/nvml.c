// libnvidia-ml of the NVML stub: handles, memory, processes and condition of the cards.

#include "cards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Codes of nvmlReturn_t.
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    VERSION_MISMATCH = 25
};

struct Memory {
    unsigned long long total, free, used;
};
struct Memory2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct ProcessInfo {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
struct Utilization {
    unsigned gpu, memory;
};

// NVML_VALUE_NOT_AVAILABLE, and the instance ids outside MIG.
static const unsigned long long VALUE_NOT_AVAILABLE = ~0ull;
static const unsigned NO_INSTANCE = ~0u;

static bool is_initialized;

// Leaves a function that needs an initialized library and a device.
#define ENTER(device)                             \
    do {                                          \
        if (!is_initialized) return UNINITIALIZED; \
        if (!(device)) return INVALID_ARGUMENT;    \
    } while (0)

EXPORT int nvmlInit_v2(void) {
    const char *code = getenv("PLIMSOLL_NVML_STUB_INIT");
    int result = code ? atoi(code) : SUCCESS;
    is_initialized = result == SUCCESS;
    return result;
}

EXPORT int nvmlShutdown(void) {
    is_initialized = false;
    return SUCCESS;
}

static int text(char *to, unsigned length, const char *from) {
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *to, unsigned length) {
    return is_initialized ? text(to, length, "580.65.06") : UNINITIALIZED;
}

// ---- handles ----

static void format_uuid(const struct Card *card, char to[64]) {
    unsigned char uuid[16];
    uuid_of(card, uuid);
    char *at = to + sprintf(to, card->model->is_mig ? "MIG-" : "GPU-");
    for (int i = 0; i < 16; i++) at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, struct Card **device) {
    ENTER(device);
    for (int i = 0; i < card_count(); i++) {
        char known[64];
        format_uuid(card(i), known);
        if (strcmp(known, uuid) == 0) return *device = card(i), SUCCESS;
    }
    return NOT_FOUND;
}

// The bus address of a MIG partition is that of its whole GPU.
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, struct Card **device) {
    ENTER(device);
    unsigned domain, bus, slot;
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) return INVALID_ARGUMENT;
    if (bus < 1 || bus > (unsigned)card_count()) return NOT_FOUND;
    struct Card *found = card((int)bus - 1);
    *device = found->whole ? found->whole : found;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct Card *device, struct Card **whole) {
    ENTER(device);
    *whole = device->whole;
    return device->whole ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(struct Card *device, unsigned *is_mig) {
    ENTER(device);
    *is_mig = device->model->is_mig;
    return SUCCESS;
}

// ---- memory and processes ----

static unsigned long long bytes(long mib) { return (unsigned long long)mib << 20; }

static long held_mib(const struct Card *device) {
    static _Thread_local struct Process list[MAX_PROCESSES];
    long held = 0;
    for (int i = 0, found = processes_on(device, list); i < found; i++) held += list[i].mib > 0 ? list[i].mib : 0;
    return held;
}

// The used figure of this function includes the reserved memory.
EXPORT int nvmlDeviceGetMemoryInfo(struct Card *device, struct Memory *memory) {
    ENTER(device);
    const struct Model *model = device->model;
    if (!model->has_memory) return NOT_SUPPORTED;
    long used = model->reserved_mib + held_mib(device);
    *memory = (struct Memory){bytes(model->total_mib), bytes(model->total_mib - used), bytes(used)};
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(struct Card *device, struct Memory2 *memory) {
    ENTER(device);
    const struct Model *model = device->model;
    if (memory->version != (sizeof *memory | 2u << 24)) return VERSION_MISMATCH;
    if (!model->has_memory) return NOT_SUPPORTED;
    long held = held_mib(device), free = model->total_mib - model->reserved_mib - held;
    memory->total = bytes(model->total_mib), memory->reserved = bytes(model->reserved_mib);
    memory->free = bytes(free), memory->used = bytes(held);
    return SUCCESS;
}

static int running(const struct Card *device, bool drawing, unsigned *count, struct ProcessInfo *infos) {
    ENTER(device);
    static _Thread_local struct Process list[MAX_PROCESSES];
    unsigned room = *count, needed = 0;
    for (int i = 0, found = processes_on(device, list); i < found; i++) {
        if (!(drawing ? list[i].draws : list[i].computes)) continue;
        bool is_known = device->model->has_process_memory && list[i].mib >= 0;
        unsigned instance = device->model->is_mig ? 1 : NO_INSTANCE;
        if (infos && needed < room)
            infos[needed] = (struct ProcessInfo){
                list[i].pid, is_known ? bytes(list[i].mib) : VALUE_NOT_AVAILABLE, instance, instance};
        needed++;
    }
    *count = needed;
    return needed > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(struct Card *device, unsigned *count, struct ProcessInfo *infos) {
    return running(device, false, count, infos);
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(struct Card *device, unsigned *count, struct ProcessInfo *infos) {
    return running(device, true, count, infos);
}

EXPORT int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    static _Thread_local struct Process list[MAX_PROCESSES];
    if (!is_initialized) return UNINITIALIZED;
    for (int number = 0; number < card_count(); number++) {
        if (!card(number)->model->has_process_names) continue;
        for (int i = 0, found = processes_on(card(number), list); i < found; i++)
            if (list[i].pid == pid) {
                // NVML cuts long names.
                snprintf(name, length, "%s", list[i].name);
                return SUCCESS;
            }
    }
    return NOT_FOUND;
}

// ---- condition ----

static int figure(int value, unsigned *to) {
    if (value == NOT_REPORTED) return NOT_SUPPORTED;
    *to = (unsigned)value;
    return SUCCESS;
}

// Declares a function that returns one figure of a model.
#define FIGURE(function, field)                                    \
    EXPORT int function(struct Card *device, unsigned *value) {    \
        ENTER(device);                                             \
        return figure(device->model->field, value);                \
    }

FIGURE(nvmlDeviceGetPowerUsage, milliwatts)
FIGURE(nvmlDeviceGetEnforcedPowerLimit, milliwatts_set)
FIGURE(nvmlDeviceGetPowerManagementLimit, milliwatts_set)
FIGURE(nvmlDeviceGetPowerManagementDefaultLimit, milliwatts_default)
FIGURE(nvmlDeviceGetMaxPcieLinkGeneration, generation_max)
FIGURE(nvmlDeviceGetMaxPcieLinkWidth, lanes_max)
FIGURE(nvmlDeviceGetCurrPcieLinkGeneration, generation)
FIGURE(nvmlDeviceGetCurrPcieLinkWidth, lanes)
FIGURE(nvmlDeviceGetDisplayActive, drives_display)

EXPORT int nvmlDeviceGetTemperature(struct Card *device, int sensor, unsigned *celsius) {
    ENTER(device);
    return sensor == 0 ? figure(device->model->celsius, celsius) : INVALID_ARGUMENT;
}

// Threshold 0 is the shutdown, a few degrees above threshold 1, the slowdown.
EXPORT int nvmlDeviceGetTemperatureThreshold(struct Card *device, int threshold, unsigned *celsius) {
    ENTER(device);
    int slowdown = device->model->slowdown_celsius;
    if (threshold == 0 && slowdown != NOT_REPORTED) return figure(slowdown + 3, celsius);
    return threshold == 1 ? figure(slowdown, celsius) : NOT_SUPPORTED;
}

// Clocks 0 and 1 are those of graphics and multiprocessors, clock 2 that of the memory.
EXPORT int nvmlDeviceGetClockInfo(struct Card *device, int clock, unsigned *mhz) {
    ENTER(device);
    if (clock < 0 || clock > 2) return INVALID_ARGUMENT;
    return figure(clock == 2 ? device->model->memory_clock_mhz : device->model->clock_mhz, mhz);
}

EXPORT int nvmlDeviceGetMaxClockInfo(struct Card *device, int clock, unsigned *mhz) {
    ENTER(device);
    return clock == 0 || clock == 1 ? figure(device->model->clock_mhz_max, mhz) : NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetUtilizationRates(struct Card *device, struct Utilization *rates) {
    ENTER(device);
    rates->memory = 0;
    return figure(device->model->busy_percent, &rates->gpu);
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(struct Card *device, unsigned long long *bits) {
    ENTER(device);
    unsigned value;
    int code = figure(device->model->throttle_bits, &value);
    if (code == SUCCESS) *bits = value;
    return code;
}
