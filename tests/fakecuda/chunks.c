/* Chunks: physical memory. Each is a file in the state directory, and whoever holds it (a handle, an exported
   descriptor, a descriptor inside an unread message, a mapping; in any process, also one without this library)
   shares an open file description that carries a read lock on the file's first byte. The kernel drops the lock with
   the last of them, however they go. A file whose first byte nobody has locked is therefore free memory: whoever
   counts removes it. The creator of legacy memory also locks the second byte: while that is locked, others may open.

   Counting, creating and opening happen under one lock on the file `ledger`. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "double.h"

enum { BYTE_HELD = 0, BYTE_OWNED = 1, NAME_BYTES = 64, FILL_STEP_BYTES = 1 << 20 };

static int folder_open(void) { return open(devices_folder(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

/* The descriptor that holds the ledger's lock until it is closed, or -1. */
static int ledger_lock(int folder) {
    int fd = openat(folder, "ledger", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return -1;
    while (flock(fd, LOCK_EX) != 0) {
        if (errno == EINTR) continue;
        close(fd);
        return -1;
    }
    return fd;
}

static bool read_lock(int fd, off_t first, off_t count) {
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = first, .l_len = count};
    return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

/* Whether another open file description has locked the byte. */
static bool locked(int fd, off_t byte) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static void name_of(const struct chunk *chunk, char name[NAME_BYTES]) {
    for (int i = 0; i < 16; i++) sprintf(name + 2 * i, "%02x", chunk->uuid[i]);
    snprintf(name + 32, NAME_BYTES - 32, "-%c-%016llx", (char)chunk->kind, (unsigned long long)chunk->id);
}

static bool parse_name(const char *name, struct chunk *chunk) {
    if (strlen(name) != 51 || name[32] != '-' || name[34] != '-') return false;
    for (int i = 0; i < 16; i++) {
        unsigned value;
        if (sscanf(name + 2 * i, "%2x", &value) != 1) return false;
        chunk->uuid[i] = (unsigned char)value;
    }
    chunk->kind = (enum chunk_kind)name[33];
    chunk->id = strtoull(name + 35, NULL, 16);
    return true;
}

bool chunks_same(const struct chunk *left, const struct chunk *right) {
    return left->id == right->id && left->kind == right->kind && memcmp(left->uuid, right->uuid, 16) == 0;
}

/* The bytes of one file that somebody holds; removes it when nobody does. */
static uint64_t count_or_remove(int folder, const char *name) {
    int fd = openat(folder, name, O_RDWR | O_CLOEXEC);
    struct stat status;
    bool known = fd >= 0 ? fstat(fd, &status) == 0 : fstatat(folder, name, &status, 0) == 0;
    bool held = fd < 0 || locked(fd, BYTE_HELD);
    if (fd >= 0) close(fd);
    if (!held) unlinkat(folder, name, 0);
    return known && held ? (uint64_t)status.st_size : 0;
}

static CUresult sum(int folder, const struct device *device, uint64_t *used_bytes) {
    DIR *listing = fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (listing == NULL) return CUDA_ERROR_OPERATING_SYSTEM;
    *used_bytes = 0;
    for (struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        struct chunk chunk;
        if (parse_name(entry->d_name, &chunk) && memcmp(chunk.uuid, device->uuid, 16) == 0)
            *used_bytes += count_or_remove(folder, entry->d_name);
    }
    closedir(listing);
    return CUDA_SUCCESS;
}

/* Fresh memory holds what somebody left there: 0xA5, another byte by KVPAGE_FAKECUDA_FILL, or zeros for "none". */
static bool fill(int fd, uint64_t size_bytes) {
    const char *wanted = getenv("KVPAGE_FAKECUDA_FILL");
    if (wanted != NULL && strcmp(wanted, "none") == 0) return posix_fallocate(fd, 0, (off_t)size_bytes) == 0;
    static char garbage[FILL_STEP_BYTES];
    memset(garbage, wanted == NULL ? 0xA5 : (int)strtol(wanted, NULL, 0), sizeof garbage);
    for (uint64_t done = 0; done < size_bytes;) {
        size_t step = size_bytes - done < sizeof garbage ? (size_t)(size_bytes - done) : sizeof garbage;
        ssize_t written = pwrite(fd, garbage, step, (off_t)done);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        done += (uint64_t)written;
    }
    return true;
}

/* A new, held, empty file within the device's total. Under the ledger's lock. */
static CUresult claim(int folder, const struct device *device, const struct chunk *chunk, int *fd) {
    uint64_t used_bytes;
    CUresult result = sum(folder, device, &used_bytes);
    if (result != CUDA_SUCCESS) return result;
    if (chunk->size_bytes > device->total_bytes || used_bytes > device->total_bytes - chunk->size_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char name[NAME_BYTES];
    name_of(chunk, name);
    *fd = openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (*fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    off_t locks = chunk->kind == CHUNK_LEGACY ? 2 : 1;
    if (ftruncate(*fd, (off_t)chunk->size_bytes) == 0 && read_lock(*fd, BYTE_HELD, locks)) return CUDA_SUCCESS;
    unlinkat(folder, name, 0);
    close(*fd);
    return CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult chunks_create(const struct device *device, enum chunk_kind kind, uint64_t size_bytes, struct chunk *chunk,
                       int *fd) {
    *chunk = (struct chunk){.kind = kind, .size_bytes = size_bytes};
    memcpy(chunk->uuid, device->uuid, 16);
    if (getrandom(&chunk->id, sizeof chunk->id, 0) != sizeof chunk->id) return CUDA_ERROR_OPERATING_SYSTEM;
    int folder = folder_open(), ledger = folder < 0 ? -1 : ledger_lock(folder);
    CUresult result = ledger < 0 ? CUDA_ERROR_OPERATING_SYSTEM : claim(folder, device, chunk, fd);
    if (ledger >= 0) close(ledger);
    if (folder >= 0) close(folder);
    if (result == CUDA_SUCCESS && !fill(*fd, size_bytes)) {
        close(*fd); /* now nobody holds it */
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

CUresult chunks_identify(int fd, struct chunk *chunk) {
    struct stat wanted, found;
    if (fstat(fd, &wanted) != 0) return CUDA_ERROR_INVALID_VALUE;
    int folder = folder_open();
    DIR *listing = folder < 0 ? NULL : fdopendir(folder);
    if (listing == NULL) return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    for (struct dirent *entry; result != CUDA_SUCCESS && (entry = readdir(listing)) != NULL;) {
        if (entry->d_ino != wanted.st_ino || !parse_name(entry->d_name, chunk)) continue;
        if (fstatat(folder, entry->d_name, &found, 0) != 0 || found.st_dev != wanted.st_dev) continue;
        chunk->size_bytes = (uint64_t)found.st_size;
        result = CUDA_SUCCESS;
    }
    closedir(listing);
    return result;
}

/* Opens the file and holds it if `byte` is locked by somebody already. */
static CUresult join(const struct chunk *chunk, off_t byte, int *fd) {
    char name[NAME_BYTES];
    name_of(chunk, name);
    int folder = folder_open(), ledger = folder < 0 ? -1 : ledger_lock(folder);
    *fd = ledger < 0 ? -1 : openat(folder, name, O_RDWR | O_CLOEXEC);
    bool absent = *fd < 0 && errno == ENOENT;
    bool joined = *fd >= 0 && locked(*fd, byte) && read_lock(*fd, BYTE_HELD, 1);
    if (*fd >= 0 && !joined) close(*fd);
    bool opened = *fd >= 0;
    if (ledger >= 0) close(ledger);
    if (folder >= 0) close(folder);
    if (joined) return CUDA_SUCCESS;
    return absent || opened ? CUDA_ERROR_MAP_FAILED : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult chunks_open(const struct chunk *chunk, int *fd) { return join(chunk, BYTE_HELD, fd); }

CUresult chunks_open_owned(struct chunk *chunk, int *fd) {
    CUresult result = join(chunk, BYTE_OWNED, fd);
    struct stat status;
    if (result == CUDA_SUCCESS && fstat(*fd, &status) == 0) chunk->size_bytes = (uint64_t)status.st_size;
    return result;
}

bool chunks_held(const struct chunk *chunk) {
    char name[NAME_BYTES];
    name_of(chunk, name);
    int folder = folder_open();
    bool held = folder >= 0 && count_or_remove(folder, name) > 0;
    if (folder >= 0) close(folder);
    return held;
}

CUresult chunks_used(const struct device *device, uint64_t *used_bytes) {
    int folder = folder_open(), ledger = folder < 0 ? -1 : ledger_lock(folder);
    CUresult result = ledger < 0 ? CUDA_ERROR_OPERATING_SYSTEM : sum(folder, device, used_bytes);
    if (ledger >= 0) close(ledger);
    if (folder >= 0) close(folder);
    return result;
}
