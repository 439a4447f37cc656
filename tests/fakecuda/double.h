/* What the files of the double share. Each `.c` file is one noun; its functions carry that noun as a prefix.
   Everything here except `calls_begin` is called with the double's one mutex held. */
#ifndef KVPAGE_FAKECUDA_DOUBLE_H
#define KVPAGE_FAKECUDA_DOUBLE_H

#include <stdbool.h>

#include "abi.h"

enum { MAX_DEVICES = 16, MAX_HANDLES = 16384, MAX_RANGES = 16384, MAX_RESERVATIONS = 4096, PATH_BYTES = 512 };

/* calls.c: what happens around every call */

enum need { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT };

struct call {
    char function[48];
    char arguments[200];
    char note[120]; /* what came out, or what the real driver would have left undefined; only for the log */
};

CUresult calls_begin(struct call *call, enum need need, const char *function, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
CUresult calls_end(struct call *call, CUresult result);
void calls_note(struct call *call, const char *format, ...) __attribute__((format(printf, 2, 3)));
void calls_lock(void);
void calls_unlock(void);

#define ENTER(need, ...) \
    struct call call; \
    CUresult refused = calls_begin(&call, need, __func__, __VA_ARGS__); \
    if (refused != CUDA_SUCCESS) return refused
#define LEAVE(result) return calls_end(&call, (result))

/* faults.c: the schedule of `function:nth:action` */

struct verdict {
    unsigned delay_ms;
    bool kill;
    CUresult result;
};

bool faults_set(const char *schedule);
struct verdict faults_count(const char *function);

/* entries.c: the table of functions, and initialisation */

bool entries_initialised(void);
int entries_index(const char *function); /* -1 for a function the double does not have */
void entries_plain_name(const char *function, char *name, size_t size); /* without "_v2" */

/* devices.c: the devices this process sees */

struct context {
    unsigned retains;
    CUresult poison; /* a sticky error: what every later call in this context answers */
};

struct device {
    unsigned char uuid[16];
    uint64_t total_bytes;
    uint64_t granularity_bytes;
    bool is_mig, has_vmm, has_posix_fd, has_ipc;
    struct context context; /* the primary one; there are no others */
};

bool devices_load(void);
const char *devices_folder(void); /* the state directory */
int devices_count(void);
struct device *devices_at(CUdevice ordinal); /* NULL when there is none */
CUdevice devices_ordinal(const unsigned char uuid[16]); /* -1 when this process does not see it */

/* contexts.c: the primary contexts, and each thread's stack of them */

CUresult contexts_check(void);
CUdevice contexts_device(void); /* of the context that `contexts_check` has accepted */
void contexts_poison(CUresult result);
unsigned contexts_live(void);
CUresult streams_check(CUstream stream);
unsigned streams_live(void);

/* chunks.c: physical memory, one file each, and the ledger of who holds it */

enum chunk_kind { CHUNK_EXPORTABLE = 'e', CHUNK_PRIVATE = 'p', CHUNK_LEGACY = 'l' };

struct chunk {
    unsigned char uuid[16]; /* of its device */
    enum chunk_kind kind;
    uint64_t id;
    uint64_t size_bytes;
};

CUresult chunks_create(const struct device *device, enum chunk_kind kind, uint64_t size_bytes, struct chunk *chunk,
                       int *fd);
CUresult chunks_identify(int fd, struct chunk *chunk);
CUresult chunks_open(const struct chunk *chunk, int *fd); /* a new holder; MAP_FAILED when nobody holds it */
CUresult chunks_open_owned(struct chunk *chunk, int *fd); /* the same while its owner has it; fills size_bytes */
bool chunks_held(const struct chunk *chunk);
CUresult chunks_used(const struct device *device, uint64_t *used_bytes);
bool chunks_same(const struct chunk *left, const struct chunk *right);

/* ranges.c: memory mapped in this process */

enum range_kind { RANGE_VMM, RANGE_ALLOCATED, RANGE_OPENED };

struct range {
    enum range_kind kind;
    CUdeviceptr base;
    uint64_t size_bytes;
    struct chunk chunk;
    CUmemGenericAllocationHandle handle; /* the one it was mapped from; 0 for legacy memory */
    int access;
    unsigned opens; /* of an opened range */
};

struct range *ranges_add(const struct range *range); /* NULL when the table is full */
void ranges_remove(struct range *range);
struct range *ranges_at(CUdeviceptr address); /* the one that contains the address, or NULL */
struct range *ranges_next(struct range *previous); /* NULL starts; NULL ends */
bool ranges_overlap(CUdeviceptr base, uint64_t size_bytes);
void *ranges_address_space(uint64_t size_bytes, uint64_t alignment_bytes); /* inaccessible; NULL on failure */

/* handles.c and addresses.c: virtual memory management */

CUmemGenericAllocationHandle handles_retain(const struct range *range, CUresult *result);
struct handle *handles_find(CUmemGenericAllocationHandle value);
int handles_fd(const struct handle *handle);
const struct chunk *handles_chunk(const struct handle *handle);
unsigned handles_live(void);
unsigned addresses_live(uint64_t *size_bytes);
uint64_t addresses_granularity(bool largest);

/* legacy.c */

void legacy_drop(const struct device *device); /* when its context ends */

#endif
