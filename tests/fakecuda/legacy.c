/* Legacy memory: allocations that belong to a context, and their inter-process handles. A handle names the whole
   allocation; it opens in other processes for as long as the allocating process lives and has not freed it. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "double.h"

static const char MAGIC[8] = "kvpagefk";

struct ipc_handle { /* what the 64 bytes hold */
    char magic[8];
    unsigned char uuid[16];
    uint64_t id;
    char zeros[32];
};

_Static_assert(sizeof(struct ipc_handle) == sizeof(CUipcMemHandle), "one fits into the other");

/* Maps a held chunk readable and writable; closes the descriptor in any case. */
static CUresult map_chunk(enum range_kind kind, const struct chunk *chunk, int fd, CUdeviceptr *address) {
    uint64_t alignment = devices_at(devices_ordinal(chunk->uuid))->granularity_bytes;
    void *base = ranges_address_space(chunk->size_bytes, alignment);
    CUresult result = base == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    if (base != NULL) {
        struct range range = {.kind = kind, .base = (uintptr_t)base, .size_bytes = chunk->size_bytes, .chunk = *chunk,
                              .access = CU_MEM_ACCESS_READWRITE, .opens = 1};
        int protection = PROT_READ | PROT_WRITE;
        if (mmap(base, chunk->size_bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED ||
            ranges_add(&range) == NULL) {
            munmap(base, chunk->size_bytes);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    close(fd);
    *address = (uintptr_t)base;
    return result;
}

static void unmap(struct range *range) {
    munmap((void *)(uintptr_t)range->base, range->size_bytes);
    ranges_remove(range);
}

static struct range *exactly(CUdeviceptr address, enum range_kind kind) {
    struct range *range = ranges_at(address);
    return range != NULL && range->base == address && range->kind == kind ? range : NULL;
}

static bool on_current_device(const struct range *range) {
    return devices_ordinal(range->chunk.uuid) == contexts_device();
}

void legacy_drop(const struct device *device) {
    struct range *range = ranges_next(NULL);
    while (range != NULL) {
        bool ends = range->kind != RANGE_VMM && memcmp(range->chunk.uuid, device->uuid, 16) == 0;
        if (ends) unmap(range); /* the table's last range moves into its place: look there again */
        range = ends ? ranges_next(NULL) : ranges_next(range);
    }
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    ENTER(NEEDS_CONTEXT, "size=%zu", size);
    const struct device *device = devices_at(contexts_device());
    uint64_t granularity = device->granularity_bytes;
    if (address == NULL || size == 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (size > UINT64_MAX - granularity) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    struct chunk chunk;
    int fd;
    CUresult result =
        chunks_create(device, CHUNK_LEGACY, (size + granularity - 1) / granularity * granularity, &chunk, &fd);
    if (result == CUDA_SUCCESS) result = map_chunk(RANGE_ALLOCATED, &chunk, fd, address);
    if (result == CUDA_SUCCESS) calls_note(&call, "ptr=0x%llx", *address);
    LEAVE(result);
}

/* Freeing what another process still has open is undefined with the real driver; the log says when it happened. */
EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(NEEDS_CONTEXT, "ptr=0x%llx", address);
    struct range *range = exactly(address, RANGE_ALLOCATED);
    if (range == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    struct chunk chunk = range->chunk;
    unmap(range);
    if (chunks_held(&chunk)) calls_note(&call, "undefined: another process still has it open");
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER(NEEDS_CONTEXT, "ptr=0x%llx", address);
    const struct range *range = ranges_at(address);
    if (handle == NULL || range == NULL || range->kind != RANGE_ALLOCATED) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!devices_at(devices_ordinal(range->chunk.uuid))->has_ipc) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
    struct ipc_handle content = {.id = range->chunk.id};
    memcpy(content.magic, MAGIC, sizeof MAGIC);
    memcpy(content.uuid, range->chunk.uuid, sizeof content.uuid);
    memcpy(handle, &content, sizeof content);
    LEAVE(CUDA_SUCCESS);
}

static bool read_handle(const CUipcMemHandle *handle, struct chunk *chunk) {
    static const char zeros[32];
    struct ipc_handle content;
    memcpy(&content, handle, sizeof content);
    bool whole = memcmp(content.magic, MAGIC, sizeof MAGIC) == 0 && memcmp(content.zeros, zeros, sizeof zeros) == 0;
    if (!whole) return false;
    *chunk = (struct chunk){.kind = CHUNK_LEGACY, .id = content.id};
    memcpy(chunk->uuid, content.uuid, sizeof chunk->uuid);
    return true;
}

static struct range *mapping_of(const struct chunk *chunk) {
    for (struct range *range = ranges_next(NULL); range != NULL; range = ranges_next(range))
        if (chunks_same(&range->chunk, chunk)) return range;
    return NULL;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    ENTER(NEEDS_CONTEXT, "flags=%u", flags); /* not the handle: who can read it can open it */
    struct chunk chunk;
    if (address == NULL || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || !read_handle(&handle, &chunk))
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    const struct device *device = devices_at(devices_ordinal(chunk.uuid));
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (!device->has_ipc) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
    if (devices_ordinal(chunk.uuid) != contexts_device()) LEAVE(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    struct range *mapped = mapping_of(&chunk);
    if (mapped != NULL && mapped->kind == RANGE_ALLOCATED) LEAVE(CUDA_ERROR_INVALID_CONTEXT); /* its own process */
    int fd;
    CUresult result = chunks_open_owned(&chunk, &fd);
    if (result != CUDA_SUCCESS) LEAVE(result);
    if (mapped != NULL) {
        close(fd);
        mapped->opens++;
        *address = mapped->base;
        LEAVE(CUDA_SUCCESS);
    }
    result = map_chunk(RANGE_OPENED, &chunk, fd, address);
    if (result == CUDA_SUCCESS) calls_note(&call, "ptr=0x%llx", *address);
    LEAVE(result);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(NEEDS_CONTEXT, "ptr=0x%llx", address);
    struct range *range = exactly(address, RANGE_OPENED);
    if (range == NULL || !on_current_device(range)) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (--range->opens == 0) unmap(range);
    LEAVE(CUDA_SUCCESS);
}
