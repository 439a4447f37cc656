/* Calls: what happens around every one of them. First the fault schedule, then the mutex and what the function needs,
   then the function, then one line in the log (tab-separated: pid, tid, function, arguments, result, note). */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "double.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void calls_lock(void) { pthread_mutex_lock(&mutex); }
void calls_unlock(void) { pthread_mutex_unlock(&mutex); }

static void write_log(const struct call *call, const char *result) {
    const char *path = getenv("KVPAGE_FAKECUDA_LOG");
    if (path == NULL || *path == '\0') return;
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    char line[512];
    int length = snprintf(line, sizeof line, "%d\t%d\t%s\t%s\t%s\t%s\n", getpid(), gettid(), call->function,
                          call->arguments, result, call->note);
    if (write(fd, line, (size_t)length) != length) fprintf(stderr, "driver double: cannot write to %s\n", path);
    close(fd);
}

static void wait_ms(unsigned delay_ms) {
    struct timespec left = {.tv_sec = delay_ms / 1000, .tv_nsec = (long)(delay_ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0) continue;
}

static CUresult missing(enum need need) {
    if (need == NEEDS_NOTHING) return CUDA_SUCCESS;
    if (!entries_initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    return need == NEEDS_CONTEXT ? contexts_check() : CUDA_SUCCESS;
}

CUresult calls_begin(struct call *call, enum need need, const char *function, const char *format, ...) {
    entries_plain_name(function, call->function, sizeof call->function);
    call->note[0] = '\0';
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(call->arguments, sizeof call->arguments, format, arguments);
    va_end(arguments);
    calls_lock();
    struct verdict verdict = faults_count(call->function);
    calls_unlock();
    if (verdict.delay_ms > 0) wait_ms(verdict.delay_ms);
    calls_lock();
    if (verdict.kill) {
        write_log(call, "killed");
        kill(getpid(), SIGKILL);
    }
    if (verdict.result != CUDA_SUCCESS) calls_note(call, "injected");
    CUresult refused = verdict.result != CUDA_SUCCESS ? verdict.result : missing(need);
    return refused == CUDA_SUCCESS ? CUDA_SUCCESS : calls_end(call, refused);
}

CUresult calls_end(struct call *call, CUresult result) {
    char text[16];
    snprintf(text, sizeof text, "%d", result);
    write_log(call, text);
    calls_unlock();
    return result;
}

void calls_note(struct call *call, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(call->note, sizeof call->note, format, arguments);
    va_end(arguments);
}
