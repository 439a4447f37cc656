/* Handles: this process's names for chunks of virtual memory management: create, release, export, import. */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "double.h"

struct handle {
    CUmemGenericAllocationHandle value; /* 0 for a free place; never used twice */
    struct chunk chunk;
    int fd;
    unsigned references;
};

static struct handle handles[MAX_HANDLES];
static CUmemGenericAllocationHandle last_value = 0x1000;

struct handle *handles_find(CUmemGenericAllocationHandle value) {
    for (int i = 0; value != 0 && i < MAX_HANDLES; i++)
        if (handles[i].value == value) return &handles[i];
    return NULL;
}

int handles_fd(const struct handle *handle) { return handle->fd; }
const struct chunk *handles_chunk(const struct handle *handle) { return &handle->chunk; }

unsigned handles_live(void) {
    unsigned count = 0;
    for (int i = 0; i < MAX_HANDLES; i++) count += handles[i].references;
    return count;
}

/* Takes the descriptor over, also when the table is full. */
static CUresult add(const struct chunk *chunk, int fd, CUmemGenericAllocationHandle value,
                    CUmemGenericAllocationHandle *handle) {
    for (int i = 0; i < MAX_HANDLES; i++) {
        if (handles[i].value != 0) continue;
        handles[i] = (struct handle){.value = value, .chunk = *chunk, .fd = fd, .references = 1};
        *handle = value;
        return CUDA_SUCCESS;
    }
    close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUmemGenericAllocationHandle handles_retain(const struct range *range, CUresult *result) {
    struct handle *held = handles_find(range->handle);
    *result = CUDA_SUCCESS;
    if (held != NULL) {
        held->references++;
        return held->value;
    }
    int fd; /* the mapping outlived its handle: hold the chunk once more under the same value */
    CUmemGenericAllocationHandle value = 0;
    *result = chunks_open(&range->chunk, &fd);
    if (*result == CUDA_SUCCESS) *result = add(&range->chunk, fd, range->handle, &value);
    return value;
}

static CUresult check_properties(const CUmemAllocationProp *prop, struct device **device) {
    if (prop == NULL || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->win32HandleMetaData != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    *device = devices_at(prop->location.id);
    if (*device == NULL) return CUDA_ERROR_INVALID_DEVICE;
    if (!(*device)->has_vmm) return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE) return CUDA_SUCCESS;
    if (prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    return (*device)->has_posix_fd ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option) {
    ENTER(NEEDS_INIT, "option=%d", option);
    struct device *device;
    CUresult result = check_properties(prop, &device);
    if (result != CUDA_SUCCESS) LEAVE(result);
    bool known = option == CU_MEM_ALLOC_GRANULARITY_MINIMUM || option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    if (granularity == NULL || !known) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *granularity = device->granularity_bytes;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                            unsigned long long flags) {
    ENTER(NEEDS_INIT, "size=%zu device=%d types=%d", size, prop == NULL ? -1 : prop->location.id,
          prop == NULL ? -1 : prop->requestedHandleTypes);
    struct device *device;
    CUresult result = check_properties(prop, &device);
    if (result != CUDA_SUCCESS) LEAVE(result);
    if (handle == NULL || flags != 0 || size == 0 || size % device->granularity_bytes != 0)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    struct chunk chunk;
    int fd;
    enum chunk_kind kind = prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE ? CHUNK_PRIVATE : CHUNK_EXPORTABLE;
    result = chunks_create(device, kind, size, &chunk, &fd);
    if (result == CUDA_SUCCESS) result = add(&chunk, fd, ++last_value, handle);
    if (result == CUDA_SUCCESS) calls_note(&call, "handle=%llu", *handle);
    LEAVE(result);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle value) {
    ENTER(NEEDS_INIT, "handle=%llu", value);
    struct handle *handle = handles_find(value);
    if (handle == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (--handle->references == 0) {
        close(handle->fd);
        *handle = (struct handle){.value = 0};
    }
    LEAVE(CUDA_SUCCESS);
}

/* The descriptor is inherited by children that are not told otherwise, as the real driver's is. */
EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle value, int type,
                                             unsigned long long flags) {
    ENTER(NEEDS_INIT, "handle=%llu type=%d", value, type);
    const struct handle *handle = handles_find(value);
    if (shareable == NULL || handle == NULL || flags != 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
    if (handle->chunk.kind != CHUNK_EXPORTABLE) LEAVE(CUDA_ERROR_INVALID_VALUE);
    int fd = dup(handle->fd);
    if (fd < 0) LEAVE(CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareable = fd;
    calls_note(&call, "fd=%d", fd);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type) {
    int given = (int)(intptr_t)shareable;
    ENTER(NEEDS_INIT, "fd=%d type=%d", given, type);
    if (handle == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
    struct chunk chunk;
    CUresult result = chunks_identify(given, &chunk);
    if (result != CUDA_SUCCESS) LEAVE(result);
    if (chunk.kind != CHUNK_EXPORTABLE) LEAVE(CUDA_ERROR_INVALID_VALUE);
    const struct device *device = devices_at(devices_ordinal(chunk.uuid));
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (!device->has_vmm || !device->has_posix_fd) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
    int fd = fcntl(given, F_DUPFD_CLOEXEC, 0); /* the caller's own stays the caller's to close */
    if (fd < 0) LEAVE(CUDA_ERROR_OPERATING_SYSTEM);
    result = add(&chunk, fd, ++last_value, handle);
    if (result == CUDA_SUCCESS) calls_note(&call, "handle=%llu", *handle);
    LEAVE(result);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle value) {
    ENTER(NEEDS_INIT, "handle=%llu", value);
    const struct handle *handle = handles_find(value);
    if (prop == NULL || handle == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *prop = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = handle->chunk.kind == CHUNK_EXPORTABLE ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                                                                       : CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = devices_ordinal(handle->chunk.uuid)},
    };
    LEAVE(CUDA_SUCCESS);
}
