/* A program with many threads in every part of the double at once, for the sanitizers: it says nothing itself. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../abi.h"

extern CUresult cuInit(unsigned);
extern CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
extern CUresult cuDevicePrimaryCtxRelease_v2(CUdevice);
extern CUresult cuCtxSetCurrent(CUcontext);
extern CUresult cuStreamCreate(CUstream *, unsigned);
extern CUresult cuStreamDestroy_v2(CUstream);
extern CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
extern CUresult cuMemRelease(CUmemGenericAllocationHandle);
extern CUresult cuMemExportToShareableHandle(void *, CUmemGenericAllocationHandle, int, unsigned long long);
extern CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *, void *, int);
extern CUresult cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
extern CUresult cuMemAddressFree(CUdeviceptr, size_t);
extern CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
extern CUresult cuMemUnmap(CUdeviceptr, size_t);
extern CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
extern CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *, void *);
extern CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
extern CUresult cuMemFree_v2(CUdeviceptr);
extern CUresult cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr);
extern CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned);
extern CUresult cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t);
extern CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
extern CUresult cuMemGetInfo_v2(size_t *, size_t *);
extern CUresult cuPointerGetAttribute(void *, int, CUdeviceptr);
extern int kvpage_fakecuda_set_faults(const char *);

enum { NUM_THREADS = 4, NUM_ROUNDS = 50, GRAIN = 65536 };

static const CUmemAllocationProp PROP = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                         .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                         .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static const CUmemAccessDesc ACCESS = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                       .flags = CU_MEM_ACCESS_READWRITE};

static void expect(CUresult found, CUresult wanted, int line) {
    if (found == wanted) return;
    fprintf(stderr, "smoke.c:%d: %d instead of %d\n", line, found, wanted);
    exit(1);
}
#define OK(call) expect((call), CUDA_SUCCESS, __LINE__)

static void map_and_unmap(void) {
    CUmemGenericAllocationHandle made, imported, retained;
    CUdeviceptr address;
    int fd, ordinal;
    OK(cuMemCreate(&made, GRAIN, &PROP, 0));
    OK(cuMemExportToShareableHandle(&fd, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    OK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    OK(cuMemAddressReserve(&address, 2 * GRAIN, 0, 0, 0));
    OK(cuMemMap(address, GRAIN, 0, imported, 0));
    OK(cuMemSetAccess(address, GRAIN, &ACCESS, 1));
    OK(cuMemRelease(imported));
    OK(cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)address));
    OK(cuMemRelease(retained));
    OK(cuPointerGetAttribute(&ordinal, POINTER_DEVICE_ORDINAL, address));
    OK(cuMemsetD8_v2(address, 7, GRAIN));
    expect(cuMemUnmap(address, 2 * GRAIN), CUDA_ERROR_INVALID_VALUE, __LINE__);
    OK(cuMemUnmap(address, GRAIN));
    OK(cuMemAddressFree(address, 2 * GRAIN));
    OK(cuMemRelease(made));
}

static void allocate_and_free(void) {
    CUdeviceptr address, other;
    CUipcMemHandle handle;
    CUstream stream;
    char byte;
    size_t free_bytes, total_bytes;
    OK(cuStreamCreate(&stream, 0));
    OK(cuMemAlloc_v2(&address, 1));
    OK(cuIpcGetMemHandle(&handle, address));
    expect(cuIpcOpenMemHandle_v2(&other, handle, 1), CUDA_ERROR_INVALID_CONTEXT, __LINE__);
    OK(cuMemcpyDtoH_v2(&byte, address, 1));
    OK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
    OK(cuMemFree_v2(address));
    OK(cuStreamDestroy_v2(stream));
}

static void *run(void *unused) {
    CUcontext context;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    for (int round = 0; round < NUM_ROUNDS; round++) {
        map_and_unmap();
        allocate_and_free();
        if (kvpage_fakecuda_set_faults("cuMemCreate:1000000:2") != 0) exit(1);
    }
    return unused;
}

int main(void) {
    pthread_t threads[NUM_THREADS];
    OK(cuInit(0));
    for (int i = 0; i < NUM_THREADS; i++)
        if (pthread_create(&threads[i], NULL, run, NULL) != 0) return 1;
    for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < NUM_THREADS; i++) OK(cuDevicePrimaryCtxRelease_v2(0));
    puts("done");
    return 0;
}
