/* Addresses: reserved virtual addresses, and the chunks mapped into them. A reserved address is inaccessible; so is a
   mapped one until access is set. */
#include <sys/mman.h>

#include "double.h"

struct reservation {
    CUdeviceptr base;
    uint64_t size_bytes; /* 0 for a free place */
};

static struct reservation reservations[MAX_RESERVATIONS];

unsigned addresses_live(uint64_t *size_bytes) {
    unsigned count = 0;
    *size_bytes = 0;
    for (int i = 0; i < MAX_RESERVATIONS; i++) {
        count += reservations[i].size_bytes > 0;
        *size_bytes += reservations[i].size_bytes;
    }
    return count;
}

static bool inside_one(CUdeviceptr base, uint64_t size_bytes) {
    for (int i = 0; i < MAX_RESERVATIONS; i++) {
        const struct reservation *one = &reservations[i];
        if (base >= one->base && size_bytes <= one->size_bytes && base - one->base <= one->size_bytes - size_bytes)
            return true;
    }
    return false;
}

uint64_t addresses_granularity(bool largest) {
    uint64_t chosen = 0;
    for (int i = 0; i < devices_count(); i++) {
        uint64_t one = devices_at(i)->granularity_bytes;
        if (chosen == 0 || (largest ? one > chosen : one < chosen)) chosen = one;
    }
    return chosen;
}

/* Nothing asks for a certain address, so the double has no place for that hint. */
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags) {
    ENTER(NEEDS_INIT, "size=%zu alignment=%zu", size, alignment);
    (void)hint;
    if (address == NULL || flags != 0 || size == 0 || size % addresses_granularity(false) != 0)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if ((alignment & (alignment - 1)) != 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    uint64_t least = addresses_granularity(true);
    for (int i = 0; i < MAX_RESERVATIONS; i++) {
        if (reservations[i].size_bytes > 0) continue;
        void *base = ranges_address_space(size, alignment > least ? alignment : least);
        if (base == NULL) break;
        reservations[i] = (struct reservation){.base = (uintptr_t)base, .size_bytes = size};
        *address = (uintptr_t)base;
        calls_note(&call, "ptr=0x%llx", *address);
        LEAVE(CUDA_SUCCESS);
    }
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER(NEEDS_INIT, "ptr=0x%llx size=%zu", address, size);
    for (int i = 0; i < MAX_RESERVATIONS; i++) {
        if (reservations[i].base != address || reservations[i].size_bytes != size || size == 0) continue;
        if (ranges_overlap(address, size)) LEAVE(CUDA_ERROR_INVALID_VALUE);
        munmap((void *)(uintptr_t)address, size);
        reservations[i] = (struct reservation){.size_bytes = 0};
        LEAVE(CUDA_SUCCESS);
    }
    LEAVE(CUDA_ERROR_INVALID_VALUE);
}

static void *hole(CUdeviceptr address, uint64_t size_bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)(uintptr_t)address, size_bytes, PROT_NONE, flags, -1, 0);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle value,
                         unsigned long long flags) {
    ENTER(NEEDS_INIT, "ptr=0x%llx size=%zu offset=%zu handle=%llu", address, size, offset, value);
    const struct handle *handle = handles_find(value);
    if (handle == NULL || flags != 0 || offset != 0 || size == 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    const struct chunk *chunk = handles_chunk(handle);
    uint64_t granularity = devices_at(devices_ordinal(chunk->uuid))->granularity_bytes;
    if (address % granularity != 0 || size % granularity != 0 || size > chunk->size_bytes)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!inside_one(address, size) || ranges_overlap(address, size)) LEAVE(CUDA_ERROR_INVALID_VALUE);
    struct range range = {.kind = RANGE_VMM, .base = address, .size_bytes = size, .chunk = *chunk, .handle = value};
    if (ranges_add(&range) == NULL) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    void *place = (void *)(uintptr_t)address;
    if (mmap(place, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles_fd(handle), 0) == MAP_FAILED) {
        ranges_remove(ranges_at(address));
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    }
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER(NEEDS_INIT, "ptr=0x%llx size=%zu", address, size);
    struct range *range = ranges_at(address);
    if (range == NULL || range->kind != RANGE_VMM || range->base != address || range->size_bytes != size)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (hole(address, size) == MAP_FAILED) LEAVE(CUDA_ERROR_OPERATING_SYSTEM);
    ranges_remove(range);
    LEAVE(CUDA_SUCCESS);
}

/* Whether [address, address + size) is whole mappings of the device, without a hole. */
static bool whole_mappings(CUdeviceptr address, uint64_t size_bytes, CUdevice ordinal) {
    CUdeviceptr end = address + size_bytes;
    while (address < end) {
        const struct range *range = ranges_at(address);
        if (range == NULL || range->kind != RANGE_VMM || range->base != address) return false;
        if (devices_ordinal(range->chunk.uuid) != ordinal) return false;
        address += range->size_bytes;
    }
    return address == end && size_bytes > 0;
}

static CUresult check_access(const CUmemAccessDesc *access) {
    if (access->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (devices_at(access->location.id) == NULL) return CUDA_ERROR_INVALID_DEVICE;
    bool known = access->flags == CU_MEM_ACCESS_NONE || access->flags == CU_MEM_ACCESS_READ ||
                 access->flags == CU_MEM_ACCESS_READWRITE;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The double's devices cannot reach each other's memory, so only the memory's own device can be given access. */
EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER(NEEDS_INIT, "ptr=0x%llx size=%zu device=%d flags=%d", address, size,
          access == NULL ? -1 : access->location.id, access == NULL ? -1 : access->flags);
    if (access == NULL || count != 1) LEAVE(CUDA_ERROR_INVALID_VALUE);
    CUresult result = check_access(access);
    if (result != CUDA_SUCCESS) LEAVE(result);
    if (!whole_mappings(address, size, access->location.id)) LEAVE(CUDA_ERROR_INVALID_VALUE);
    int protection = (access->flags & 1 ? PROT_READ : 0) | (access->flags & 2 ? PROT_WRITE : 0);
    if (mprotect((void *)(uintptr_t)address, size, protection) != 0) LEAVE(CUDA_ERROR_OPERATING_SYSTEM);
    for (struct range *range = ranges_next(NULL); range != NULL; range = ranges_next(range))
        if (range->base >= address && range->base < address + size) range->access = access->flags;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER(NEEDS_INIT, "ptr=%p", address);
    const struct range *range = ranges_at((uintptr_t)address);
    if (handle == NULL || range == NULL || range->kind != RANGE_VMM) LEAVE(CUDA_ERROR_INVALID_VALUE);
    CUresult result;
    *handle = handles_retain(range, &result);
    LEAVE(result);
}
