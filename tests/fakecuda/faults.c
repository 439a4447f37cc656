/* Faults: a schedule of `function:nth:action`, separated by commas. nth counts this process's calls of that function
   since the schedule was set, from 1; 0 means every call. The action is a CUresult number, `delay=<ms>` or `kill`. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

enum { MAX_FAULTS = 64, MAX_FUNCTIONS = 128 };

struct fault {
    int function;
    unsigned long nth;
    struct verdict verdict;
};

static struct fault faults[MAX_FAULTS];
static int num_faults;
static unsigned long num_calls[MAX_FUNCTIONS];

static bool read_number(const char *text, unsigned long *number) {
    char *end;
    *number = strtoul(text, &end, 10);
    return end != text && *end == '\0' && *text != '-';
}

static bool read_action(const char *text, struct verdict *verdict) {
    unsigned long number;
    if (strcmp(text, "kill") == 0) {
        verdict->kill = true;
    } else if (strncmp(text, "delay=", 6) == 0) {
        if (!read_number(text + 6, &number)) return false;
        verdict->delay_ms = (unsigned)number;
    } else {
        if (!read_number(text, &number) || number == 0 || number > CUDA_ERROR_UNKNOWN) return false;
        verdict->result = (CUresult)number;
    }
    return true;
}

static bool read_fault(char *text, struct fault *fault) {
    char *nth = strchr(text, ':'), *action = nth == NULL ? NULL : strchr(nth + 1, ':');
    if (action == NULL) return false;
    *nth++ = *action++ = '\0';
    *fault = (struct fault){.function = entries_index(text)};
    return fault->function >= 0 && read_number(nth, &fault->nth) && read_action(action, &fault->verdict);
}

bool faults_set(const char *schedule) {
    char copy[2048], *rest = NULL;
    struct fault wanted[MAX_FAULTS];
    int count = 0;
    if ((size_t)snprintf(copy, sizeof copy, "%s", schedule) >= sizeof copy) return false;
    for (char *text = strtok_r(copy, ", ", &rest); text != NULL; text = strtok_r(NULL, ", ", &rest))
        if (count == MAX_FAULTS || !read_fault(text, &wanted[count++])) return false;
    memcpy(faults, wanted, sizeof faults[0] * (size_t)count);
    num_faults = count;
    memset(num_calls, 0, sizeof num_calls);
    return true;
}

struct verdict faults_count(const char *function) {
    struct verdict total = {.result = CUDA_SUCCESS};
    int index = entries_index(function);
    if (index < 0 || index >= MAX_FUNCTIONS) return total;
    unsigned long nth = ++num_calls[index];
    for (int i = 0; i < num_faults; i++) {
        if (faults[i].function != index || (faults[i].nth != 0 && faults[i].nth != nth)) continue;
        total.delay_ms += faults[i].verdict.delay_ms;
        total.kill |= faults[i].verdict.kill;
        if (total.result == CUDA_SUCCESS) total.result = faults[i].verdict.result;
    }
    return total;
}
