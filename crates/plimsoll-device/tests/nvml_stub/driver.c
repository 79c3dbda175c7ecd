// libcuda of the NVML stub: the functions that list GPUs. There is no context, no memory and no kernel.

#include "cards.h"

#include <stdio.h>
#include <string.h>

// Codes of CUresult.
enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101 };
// Attributes of CUdevice_attribute.
enum { MULTIPROCESSORS = 16, COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76 };

static const struct Model *model_of(int device) {
    return device >= 0 && device < card_count() ? card(device)->model : NULL;
}

EXPORT int cuInit(unsigned flags) { return card_count() == 0 ? NO_DEVICE : OK; }

EXPORT int cuDriverGetVersion(int *version) {
    *version = 13000;
    return OK;
}

EXPORT int cuDeviceGetCount(int *count) {
    *count = card_count();
    return OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return model_of(ordinal) ? OK : INVALID_DEVICE;
}

EXPORT int cuDeviceGetName(char *name, int length, int device) {
    if (!model_of(device)) return INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", model_of(device)->name);
    return OK;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (!model_of(device)) return INVALID_DEVICE;
    *bytes = (size_t)model_of(device)->cuda_mib << 20;
    return OK;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    if (!model_of(device)) return INVALID_DEVICE;
    uuid_of(card(device), uuid);
    return OK;
}

EXPORT int cuDeviceGetPCIBusId(char *id, int length, int device) {
    if (!model_of(device)) return INVALID_DEVICE;
    snprintf(id, (size_t)length, "0000:%02X:00.0", (unsigned)device + 1);
    return OK;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const struct Model *model = model_of(device);
    if (!model) return INVALID_DEVICE;
    switch (attribute) {
        case MULTIPROCESSORS: *value = (int)model->multiprocessors; return OK;
        case COMPUTE_MAJOR: *value = (int)model->compute_major; return OK;
        case COMPUTE_MINOR: *value = (int)model->compute_minor; return OK;
        default: return INVALID_VALUE;
    }
}
