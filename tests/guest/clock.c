// For LD_PRELOAD: gettimeofday(2) by the processor's time-stamp counter.
//
// perftest measures the rate of the time-stamp counter by calls of gettimeofday, and gives up
// ("inf") if the two do not agree well. In the guest such a call takes microseconds, and sometimes
// much longer.
#include <stdint.h>
#include <sys/time.h>
#include <time.h>
#include <x86intrin.h>

static double per_ns, epoch;

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

__attribute__((constructor)) static void calibrate(void) {
    double from = now(CLOCK_MONOTONIC), to;
    uint64_t start = __rdtsc();
    do {
        to = now(CLOCK_MONOTONIC);
    } while (to - from < 1e8);
    per_ns = (double)(__rdtsc() - start) / (to - from);
    epoch = now(CLOCK_REALTIME) - (double)__rdtsc() / per_ns;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    uint64_t ns = (uint64_t)(epoch + (double)__rdtsc() / per_ns);
    at->tv_sec = (time_t)(ns / 1000000000);
    at->tv_usec = (suseconds_t)(ns % 1000000000 / 1000);
    return 0;
}
