/* Deterministic clock and randomness, so that counts do not vary. Loaded before libc (LD_PRELOAD).
 */
#include <stddef.h>
#include <stdint.h>
#include <sys/timerfd.h>
#include <sys/types.h>
#include <time.h>

static uint64_t state = 0x9e3779b97f4a7c15u;

/* splitmix64: a different number each time, because keys and tickets must be distinct. */
ssize_t getrandom(void *buf, size_t len, unsigned flags) {
    unsigned char *to = buf;
    (void)flags;
    for (size_t i = 0; i < len; i++) {
        uint64_t z = (state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        to[i] = (unsigned char)(z >> 56);
    }
    return (ssize_t)len;
}

/* Each call advances the clock by 100 ns. */
static uint64_t now = 1000000000u;

int clock_gettime(clockid_t id, struct timespec *at) {
    now += 100;
    at->tv_sec = (time_t)(now / 1000000000u) + (id == CLOCK_REALTIME ? 1700000000 : 0);
    at->tv_nsec = (long)(now % 1000000000u);
    return 0;
}

/* The kernel's timers use another clock, so they are disabled. */
int timerfd_settime(int fd, int flags, const struct itimerspec *value, struct itimerspec *old) {
    (void)fd;
    (void)flags;
    (void)value;
    (void)old;
    return 0;
}
