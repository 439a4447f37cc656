/* Entries: the table of functions by which callers find them, initialisation, error names, and what a test may ask. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "double.h"

#define ENTRIES(X) \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuGetProcAddress_v2) \
    X(cuDeviceGet) X(cuDeviceGetCount) X(cuDeviceGetName) X(cuDeviceGetUuid_v2) X(cuDeviceGetAttribute) \
    X(cuDeviceGetPCIBusId) X(cuDeviceTotalMem_v2) \
    X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2) X(cuDevicePrimaryCtxGetState) \
    X(cuCtxGetCurrent) X(cuCtxSetCurrent) X(cuCtxPushCurrent_v2) X(cuCtxPopCurrent_v2) X(cuCtxGetDevice) \
    X(cuCtxSynchronize) X(cuStreamCreate) X(cuStreamDestroy_v2) X(cuStreamSynchronize) \
    X(cuMemGetAllocationGranularity) X(cuMemCreate) X(cuMemRelease) X(cuMemExportToShareableHandle) \
    X(cuMemImportFromShareableHandle) X(cuMemGetAllocationPropertiesFromHandle) X(cuMemAddressReserve) \
    X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemRetainAllocationHandle) \
    X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemGetAddressRange_v2) X(cuMemGetInfo_v2) \
    X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle_v2) X(cuIpcCloseMemHandle) \
    X(cuMemcpyHtoD_v2) X(cuMemcpyDtoH_v2) X(cuMemcpyDtoD_v2) X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoHAsync_v2) \
    X(cuMemsetD8_v2) X(cuMemsetD8Async) X(cuPointerGetAttribute) X(cuPointerGetAttributes)

/* Only their addresses are needed here, so all may have the same type. */
#define DECLARE(name) extern char name##_code[] __asm__(#name);
ENTRIES(DECLARE)

static const struct {
    const char *name;
    void *code;
} entries[] = {
#define ENTRY(name) {#name, name##_code},
    ENTRIES(ENTRY)
};

static const struct {
    CUresult code;
    const char *name;
    const char *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

enum { NUM_ENTRIES = sizeof entries / sizeof entries[0], NUM_ERRORS = sizeof errors / sizeof errors[0] };

static pid_t initialised_in; /* a forked child has to start again, and cannot: see cuInit */

bool entries_initialised(void) { return initialised_in == getpid(); }

void entries_plain_name(const char *function, char *name, size_t size) {
    size_t length = strlen(function);
    if (length > 3 && strcmp(function + length - 3, "_v2") == 0) length -= 3;
    snprintf(name, size, "%.*s", (int)length, function);
}

int entries_index(const char *function) {
    char wanted[64], name[64];
    entries_plain_name(function, wanted, sizeof wanted);
    for (int i = 0; i < NUM_ENTRIES; i++) {
        entries_plain_name(entries[i].name, name, sizeof name);
        if (strcmp(name, wanted) == 0) return i;
    }
    return -1;
}

/* A schedule with a typing error would let a test pass in which nothing fails, so it stops the process. */
__attribute__((constructor)) static void read_faults(void) {
    const char *schedule = getenv("KVPAGE_FAKECUDA_FAULTS");
    if (schedule == NULL || faults_set(schedule)) return;
    fprintf(stderr, "driver double: KVPAGE_FAKECUDA_FAULTS=%s is not function:nth:action\n", schedule);
    abort();
}

EXPORT CUresult cuInit(unsigned flags) {
    ENTER(NEEDS_NOTHING, "flags=%u", flags);
    if (flags != 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (entries_initialised()) LEAVE(CUDA_SUCCESS);
    if (initialised_in != 0) LEAVE(CUDA_ERROR_NOT_INITIALIZED); /* the driver does not work after a fork */
    if (!devices_load()) LEAVE(CUDA_ERROR_UNKNOWN);
    if (devices_count() == 0) LEAVE(CUDA_ERROR_NO_DEVICE);
    initialised_in = getpid();
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    if (version == NULL) return CUDA_ERROR_INVALID_VALUE;
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **text) {
    *text = NULL;
    for (int i = 0; i < NUM_ERRORS; i++)
        if (errors[i].code == code) *text = errors[i].name;
    return *text == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = NULL;
    for (int i = 0; i < NUM_ERRORS; i++)
        if (errors[i].code == code) *text = errors[i].text;
    return *text == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Under these names the driver has functions with other arguments, chosen by the version asked for (in 1000 times
   major plus 10 times minor); the double has the others. */
static bool other_signature(const char *name, int version) {
    if (strcmp(name, "cuGetProcAddress") == 0) return version < 12000;
    if (strcmp(name, "cuCtxGetDevice") == 0 || strcmp(name, "cuCtxSynchronize") == 0) return version >= 13000;
    return false;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **code, int version, uint64_t flags, int *status) {
    if (name == NULL || code == NULL) return CUDA_ERROR_INVALID_VALUE;
    (void)flags;
    int index = other_signature(name, version) ? -1 : entries_index(name);
    *code = index < 0 ? NULL : entries[index].code;
    if (status != NULL) *status = index < 0; /* 1: there is no such symbol */
    return index < 0 ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

struct kvpage_fakecuda_counts {
    uint64_t handles, mappings, mapped_bytes, reservations, reserved_bytes, allocations, opened, contexts, streams;
};

/* What this process holds now. Contexts counts retains; opened counts opens. */
EXPORT void kvpage_fakecuda_live(struct kvpage_fakecuda_counts *counts) {
    calls_lock();
    *counts = (struct kvpage_fakecuda_counts){
        .handles = handles_live(), .contexts = contexts_live(), .streams = streams_live()};
    counts->reservations = addresses_live(&counts->reserved_bytes);
    for (struct range *range = ranges_next(NULL); range != NULL; range = ranges_next(range)) {
        counts->mapped_bytes += range->size_bytes;
        if (range->kind == RANGE_VMM) counts->mappings++;
        if (range->kind == RANGE_ALLOCATED) counts->allocations++;
        if (range->kind == RANGE_OPENED) counts->opened += range->opens;
    }
    calls_unlock();
}

/* Replaces the schedule and counts from the start again; "" ends it. 0 when the text is a schedule, else 1. */
EXPORT int kvpage_fakecuda_set_faults(const char *schedule) {
    calls_lock();
    bool understood = faults_set(schedule);
    calls_unlock();
    return understood ? 0 : 1;
}
