/* Contexts: one primary context per device, a stack of current ones per thread, and the streams made in them.
   Work on a stream is done when the call that asks for it returns. */
#include "double.h"

enum { STACK_DEPTH = 16, MAX_STREAMS = 256 };

static _Thread_local struct context *stack[STACK_DEPTH];
static _Thread_local int depth;

static CUdevice streams[MAX_STREAMS]; /* the device's ordinal + 1, 0 for a free place */

static CUdevice ordinal_of(const struct context *context) {
    for (int i = 0; i < devices_count(); i++)
        if (context == &devices_at(i)->context) return i;
    return -1;
}

static bool active(const struct context *context) { return ordinal_of(context) >= 0 && context->retains > 0; }

CUresult contexts_check(void) {
    if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (!active(stack[depth - 1])) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return stack[depth - 1]->poison;
}

CUdevice contexts_device(void) { return ordinal_of(stack[depth - 1]); }

void contexts_poison(CUresult result) { stack[depth - 1]->poison = result; }

unsigned contexts_live(void) {
    unsigned count = 0;
    for (int i = 0; i < devices_count(); i++) count += devices_at(i)->context.retains;
    return count;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal) {
    ENTER(NEEDS_INIT, "device=%d", ordinal);
    struct device *device = devices_at(ordinal);
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (context == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    device->context.retains++;
    *context = &device->context;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    ENTER(NEEDS_INIT, "device=%d", ordinal);
    struct device *device = devices_at(ordinal);
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (device->context.retains == 0) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (--device->context.retains > 0) LEAVE(CUDA_SUCCESS);
    device->context.poison = CUDA_SUCCESS;
    legacy_drop(device); /* the context takes its allocations and streams with it */
    for (int i = 0; i < MAX_STREAMS; i++)
        if (streams[i] == ordinal + 1) streams[i] = 0;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned *flags, int *is_active) {
    ENTER(NEEDS_INIT, "device=%d", ordinal);
    const struct device *device = devices_at(ordinal);
    if (device == NULL) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (flags == NULL || is_active == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *flags = 0;
    *is_active = device->context.retains > 0;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(NEEDS_INIT, " ");
    if (context == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *context = depth == 0 ? NULL : stack[depth - 1];
    LEAVE(CUDA_SUCCESS);
}

/* Replaces the top of the stack; NULL takes it away. */
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(NEEDS_INIT, "device=%d", ordinal_of(context));
    if (context == NULL) {
        if (depth > 0) depth--;
        LEAVE(CUDA_SUCCESS);
    }
    if (!active(context)) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (depth == 0) depth = 1;
    stack[depth - 1] = context;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(NEEDS_INIT, "device=%d", ordinal_of(context));
    if (!active(context)) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (depth == STACK_DEPTH) LEAVE(CUDA_ERROR_INVALID_VALUE);
    stack[depth++] = context;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(NEEDS_INIT, " ");
    if (depth == 0) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (context != NULL) *context = stack[depth];
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetDevice(CUdevice *ordinal) {
    ENTER(NEEDS_CONTEXT, " ");
    if (ordinal == NULL) LEAVE(CUDA_ERROR_INVALID_VALUE);
    *ordinal = contexts_device();
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSynchronize(void) {
    ENTER(NEEDS_CONTEXT, "device=%d", depth == 0 ? -1 : contexts_device());
    LEAVE(CUDA_SUCCESS);
}

/* Streams are 16 and upwards: below lie the driver's own, 0 (legacy default), 1 (the same) and 2 (per thread). */
static CUstream stream_of(int place) { return (CUstream)(uintptr_t)(place + 16); }

static int place_of(CUstream stream) {
    uintptr_t place = (uintptr_t)stream - 16;
    return (uintptr_t)stream >= 16 && place < MAX_STREAMS && streams[place] != 0 ? (int)place : -1;
}

CUresult streams_check(CUstream stream) {
    return (uintptr_t)stream <= 2 || place_of(stream) >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

unsigned streams_live(void) {
    unsigned count = 0;
    for (int i = 0; i < MAX_STREAMS; i++) count += streams[i] != 0;
    return count;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTER(NEEDS_CONTEXT, "flags=%u", flags);
    if (stream == NULL || flags > 1) LEAVE(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (streams[i] != 0) continue;
        streams[i] = contexts_device() + 1;
        *stream = stream_of(i);
        LEAVE(CUDA_SUCCESS);
    }
    LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER(NEEDS_CONTEXT, "stream=%p", stream);
    int place = place_of(stream);
    if (place < 0) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    streams[place] = 0;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    ENTER(NEEDS_CONTEXT, "stream=%p", stream);
    LEAVE(streams_check(stream));
}
