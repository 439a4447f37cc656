/* Ranges: device memory that is mapped in this process, of all kinds in one table. */
#include <string.h>
#include <sys/mman.h>

#include "double.h"

static struct range ranges[MAX_RANGES];
static int num_ranges;

struct range *ranges_add(const struct range *range) {
    if (num_ranges == MAX_RANGES) return NULL;
    ranges[num_ranges] = *range;
    return &ranges[num_ranges++];
}

void ranges_remove(struct range *range) { *range = ranges[--num_ranges]; }

struct range *ranges_at(CUdeviceptr address) {
    for (int i = 0; i < num_ranges; i++)
        if (address >= ranges[i].base && address - ranges[i].base < ranges[i].size_bytes) return &ranges[i];
    return NULL;
}

struct range *ranges_next(struct range *previous) {
    int i = previous == NULL ? 0 : (int)(previous - ranges) + 1;
    return i < num_ranges ? &ranges[i] : NULL;
}

bool ranges_overlap(CUdeviceptr base, uint64_t size_bytes) {
    for (int i = 0; i < num_ranges; i++)
        if (base < ranges[i].base + ranges[i].size_bytes && ranges[i].base < base + size_bytes) return true;
    return false;
}

void *ranges_address_space(uint64_t size_bytes, uint64_t alignment_bytes) {
    uint64_t wide_bytes = size_bytes + alignment_bytes;
    if (wide_bytes < size_bytes) return NULL;
    char *wide = mmap(NULL, wide_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED) return NULL;
    uint64_t before = (alignment_bytes - (uintptr_t)wide % alignment_bytes) % alignment_bytes;
    if (before > 0) munmap(wide, before);
    if (alignment_bytes > before) munmap(wide + before + size_bytes, alignment_bytes - before);
    return wide + before;
}
