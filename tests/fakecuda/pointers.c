/* Pointers: what an address is, and copying and filling through it. Touching mapped memory without the access for it
   is the error that ends a context: every later call in that context answers 700, as after a faulting kernel. */
#include <string.h>

#include "double.h"

/* Whether every byte is mapped, on the current device, and may be touched; poisons the context when it may not. */
static CUresult check(CUdeviceptr address, uint64_t size_bytes, int wanted) {
    CUdeviceptr end = address + size_bytes;
    while (address < end) {
        const struct range *range = ranges_at(address);
        if (range == NULL || devices_ordinal(range->chunk.uuid) != contexts_device()) return CUDA_ERROR_INVALID_VALUE;
        if ((range->access & wanted) != wanted) {
            contexts_poison(CUDA_ERROR_ILLEGAL_ADDRESS);
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        address = range->base + range->size_bytes;
    }
    return CUDA_SUCCESS;
}

static CUresult copy(void *to, const void *from, size_t size, bool to_device, bool from_device) {
    CUresult result = CUDA_SUCCESS;
    if (from_device) result = check((uintptr_t)from, size, CU_MEM_ACCESS_READ);
    if (to_device && result == CUDA_SUCCESS) result = check((uintptr_t)to, size, CU_MEM_ACCESS_READWRITE);
    if ((to == NULL || from == NULL) && size > 0) result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && size > 0) memmove(to, from, size);
    return result;
}

static void *at(CUdeviceptr address) { return (void *)(uintptr_t)address; }

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    ENTER(NEEDS_CONTEXT, "to=0x%llx size=%zu", to, size);
    LEAVE(copy(at(to), from, size, true, false));
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    ENTER(NEEDS_CONTEXT, "from=0x%llx size=%zu", from, size);
    LEAVE(copy(to, at(from), size, false, true));
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    ENTER(NEEDS_CONTEXT, "to=0x%llx from=0x%llx size=%zu", to, from, size);
    LEAVE(copy(at(to), at(from), size, true, true));
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    ENTER(NEEDS_CONTEXT, "to=0x%llx size=%zu stream=%p", to, size, stream);
    CUresult result = streams_check(stream);
    LEAVE(result != CUDA_SUCCESS ? result : copy(at(to), from, size, true, false));
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER(NEEDS_CONTEXT, "from=0x%llx size=%zu stream=%p", from, size, stream);
    CUresult result = streams_check(stream);
    LEAVE(result != CUDA_SUCCESS ? result : copy(to, at(from), size, false, true));
}

static CUresult set_bytes(CUdeviceptr address, unsigned char value, size_t count) {
    CUresult result = check(address, count, CU_MEM_ACCESS_READWRITE);
    if (result == CUDA_SUCCESS && count > 0) memset(at(address), value, count);
    return result;
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
    ENTER(NEEDS_CONTEXT, "ptr=0x%llx value=%u count=%zu", address, value, count);
    LEAVE(set_bytes(address, value, count));
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
    ENTER(NEEDS_CONTEXT, "ptr=0x%llx value=%u count=%zu stream=%p", address, value, count, stream);
    CUresult result = streams_check(stream);
    LEAVE(result != CUDA_SUCCESS ? result : set_bytes(address, value, count));
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER(NEEDS_CONTEXT, "free=%p total=%p", (void *)free_bytes, (void *)total_bytes);
    if (free_bytes == NULL || total_bytes == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    const struct device *device = devices_at(contexts_device());
    uint64_t used_bytes;
    CUresult result = chunks_used(device, &used_bytes);
    if (result != CUDA_SUCCESS) LEAVE(result);
    *total_bytes = device->total_bytes;
    *free_bytes = device->total_bytes - used_bytes;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER(NEEDS_CONTEXT, "ptr=0x%llx", address);
    const struct range *range = ranges_at(address);
    if (range == NULL) LEAVE(CUDA_ERROR_NOT_FOUND);
    if (base != NULL) *base = range->base;
    if (size != NULL) *size = range->size_bytes;
    LEAVE(CUDA_SUCCESS);
}

/* Writes the attribute; of an address that is not device memory, what "nothing" is for it. False: not one we have. */
static bool write_attribute(int attribute, const struct range *range, CUdeviceptr address, void *data) {
    int ordinal = range == NULL ? -2 : devices_ordinal(range->chunk.uuid);
    switch (attribute) {
    case POINTER_CONTEXT:
        *(CUcontext *)data = range == NULL || range->kind == RANGE_VMM ? NULL : &devices_at(ordinal)->context;
        return true;
    case POINTER_MEMORY_TYPE: *(unsigned *)data = range == NULL ? 0 : CU_MEMORYTYPE_DEVICE; return true;
    case POINTER_DEVICE_POINTER: *(CUdeviceptr *)data = range == NULL ? 0 : address; return true;
    case POINTER_HOST_POINTER: *(void **)data = NULL; return true;
    case POINTER_IS_MANAGED: *(unsigned *)data = 0; return true;
    case POINTER_DEVICE_ORDINAL: *(int *)data = ordinal; return true;
    case POINTER_IS_LEGACY_IPC_CAPABLE: *(bool *)data = range != NULL && range->kind == RANGE_ALLOCATED; return true;
    case POINTER_RANGE_START: *(CUdeviceptr *)data = range == NULL ? 0 : range->base; return true;
    case POINTER_RANGE_SIZE: *(size_t *)data = range == NULL ? 0 : range->size_bytes; return true;
    case POINTER_MAPPED: *(bool *)data = range != NULL; return true;
    default: return false;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    ENTER(NEEDS_INIT, "attribute=%d ptr=0x%llx", attribute, address);
    const struct range *range = ranges_at(address);
    if (data == NULL || range == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    LEAVE(write_attribute(attribute, range, address, data) ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED);
}

/* Unlike the single form, this one answers for an unknown address too. */
EXPORT CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **data, CUdeviceptr address) {
    ENTER(NEEDS_INIT, "count=%u ptr=0x%llx", count, address);
    if (attributes == NULL || data == NULL || count == 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    const struct range *range = ranges_at(address);
    for (unsigned i = 0; i < count; i++)
        if (!write_attribute(attributes[i], range, address, data[i])) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
    LEAVE(CUDA_SUCCESS);
}
