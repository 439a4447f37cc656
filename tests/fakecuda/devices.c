/* Devices: read from the state directory's file `devices`, narrowed by CUDA_VISIBLE_DEVICES.

   A line holds `key=value` words: uuid (32 hex digits), total_bytes, granularity_bytes, and optionally mig, vmm,
   posix_fd and ipc (0 or 1). */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

#define NAME "kvpage driver double: host memory, no GPU"

static struct device visible[MAX_DEVICES];
static int num_visible;
static char folder[PATH_BYTES]; /* the state directory, chosen at initialisation for good */

static bool read_uuid(const char *text, unsigned char uuid[16]) {
    for (int i = 0; i < 16; i++) {
        unsigned value;
        if (!isxdigit((unsigned char)text[2 * i]) || sscanf(text + 2 * i, "%2x", &value) != 1) return false;
        uuid[i] = (unsigned char)value;
    }
    return text[32] == '\0';
}

static bool read_word(const char *word, struct device *device) {
    const char *equals = strchr(word, '=');
    if (equals == NULL) return false;
    size_t length = (size_t)(equals - word);
    const char *value = equals + 1;
#define IS(key) (length == strlen(key) && strncmp(word, key, length) == 0)
    if (IS("uuid")) return read_uuid(value, device->uuid);
    uint64_t number = strtoull(value, NULL, 10);
    if (IS("total_bytes")) device->total_bytes = number;
    else if (IS("granularity_bytes")) device->granularity_bytes = number;
    else if (IS("mig")) device->is_mig = number != 0;
    else if (IS("vmm")) device->has_vmm = number != 0;
    else if (IS("posix_fd")) device->has_posix_fd = number != 0;
    else if (IS("ipc")) device->has_ipc = number != 0;
    else return false;
#undef IS
    return true;
}

static bool read_line(char *line, struct device *device) {
    *device = (struct device){.granularity_bytes = 2 << 20, .has_vmm = true, .has_posix_fd = true, .has_ipc = true};
    char *rest = NULL;
    for (char *word = strtok_r(line, " \n", &rest); word != NULL; word = strtok_r(NULL, " \n", &rest))
        if (!read_word(word, device)) return false;
    return device->total_bytes > 0 && device->granularity_bytes % 4096 == 0 && device->granularity_bytes > 0;
}

static int read_all(struct device all[MAX_DEVICES]) {
    const char *wanted = getenv("KVPAGE_FAKECUDA_DIR");
    if (wanted == NULL) {
        fprintf(stderr, "driver double: KVPAGE_FAKECUDA_DIR is not set\n");
        return -1;
    }
    char path[PATH_BYTES + 16], line[512];
    snprintf(folder, sizeof folder, "%s", wanted);
    snprintf(path, sizeof path, "%s/devices", folder);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        fprintf(stderr, "driver double: cannot read %s\n", path);
        return -1;
    }
    int count = 0;
    while (count >= 0 && fgets(line, sizeof line, file) != NULL)
        if (count == MAX_DEVICES || !read_line(line, &all[count++])) count = -1;
    fclose(file);
    if (count < 0) fprintf(stderr, "driver double: %s has a line that cannot be read, or too many\n", path);
    return count;
}

/* Whether `text` ("GPU-1f2e", dashes anywhere) begins the device's own name. */
static bool names(const char *text, const struct device *device) {
    if (strncmp(text, device->is_mig ? "MIG-" : "GPU-", 4) != 0) return false;
    char digits[33];
    for (int i = 0; i < 16; i++) sprintf(digits + 2 * i, "%02x", device->uuid[i]);
    int i = 0;
    for (text += 4; *text != '\0'; text++)
        if (*text != '-' && (i == 32 || tolower((unsigned char)*text) != digits[i++])) return false;
    return i > 0;
}

static int chosen(const char *text, const struct device *all, int count) {
    char *end;
    long number = strtol(text, &end, 10);
    if (end != text && *end == '\0') return number >= 0 && number < count ? (int)number : -1;
    int found = -1;
    for (int i = 0; i < count; i++) {
        if (!names(text, &all[i])) continue;
        if (found >= 0) return -1; /* a short form must name one device only */
        found = i;
    }
    return found;
}

/* As the real driver: the list ends at the first entry that names nothing, and naming a device twice shows none. */
static void narrow(const char *list, const struct device *all, int count) {
    bool taken[MAX_DEVICES] = {false};
    char copy[1024], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", list);
    for (char *text = strtok_r(copy, ", ", &rest); text != NULL; text = strtok_r(NULL, ", ", &rest)) {
        int index = chosen(text, all, count);
        if (index < 0) return;
        if (taken[index]) {
            num_visible = 0;
            return;
        }
        taken[index] = true;
        visible[num_visible++] = all[index];
    }
}

bool devices_load(void) {
    struct device all[MAX_DEVICES];
    int count = read_all(all);
    if (count < 0) return false;
    num_visible = 0;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (list != NULL) {
        narrow(list, all, count);
    } else {
        memcpy(visible, all, sizeof all[0] * (size_t)count);
        num_visible = count;
    }
    return true;
}

const char *devices_folder(void) { return folder; }

int devices_count(void) { return num_visible; }

struct device *devices_at(CUdevice ordinal) {
    return ordinal >= 0 && ordinal < num_visible ? &visible[ordinal] : NULL;
}

CUdevice devices_ordinal(const unsigned char uuid[16]) {
    for (int i = 0; i < num_visible; i++)
        if (memcmp(visible[i].uuid, uuid, 16) == 0) return i;
    return -1;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    ENTER(NEEDS_INIT, " ");
    if (count == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *count = num_visible;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(NEEDS_INIT, "ordinal=%d", ordinal);
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (devices_at(ordinal) == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal) {
    ENTER(NEEDS_INIT, "device=%d", ordinal);
    const struct device *device = devices_at(ordinal);
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (name == NULL || length <= 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    snprintf(name, (size_t)length, NAME "%s", device->is_mig ? " MIG 1g" : "");
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal) {
    ENTER(NEEDS_INIT, "device=%d", ordinal);
    const struct device *device = devices_at(ordinal);
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (uuid == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    memcpy(uuid->bytes, device->uuid, 16);
    LEAVE(CUDA_SUCCESS);
}

static int attribute_value(enum device_attribute attribute, const struct device *device, CUdevice ordinal) {
    switch (attribute) {
    case ATTRIBUTE_PCI_BUS_ID: return ordinal + 1;
    case ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    case ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT: return device->has_vmm;
    case ATTRIBUTE_POSIX_FILE_DESCRIPTOR: return device->has_posix_fd;
    case ATTRIBUTE_IPC_EVENT: return device->has_ipc;
    default: return 0; /* among them memory pools, which the double has not */
    }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice ordinal) {
    ENTER(NEEDS_INIT, "attribute=%d device=%d", attribute, ordinal);
    const struct device *device = devices_at(ordinal);
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (value == NULL || attribute <= 0) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *value = attribute_value((enum device_attribute)attribute, device, ordinal);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice ordinal) {
    ENTER(NEEDS_INIT, "device=%d", ordinal);
    if (devices_at(ordinal) == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (text == NULL || length < 13) LEAVE(CUDA_ERROR_INVALID_VALUE);
    snprintf(text, (size_t)length, "0000:%02x:00.0", ordinal + 1);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *total_bytes, CUdevice ordinal) {
    ENTER(NEEDS_INIT, "device=%d", ordinal);
    const struct device *device = devices_at(ordinal);
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (total_bytes == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *total_bytes = device->total_bytes;
    LEAVE(CUDA_SUCCESS);
}
