/* Counts the bytes that processes copy. Loaded before libc (LD_PRELOAD).
 *
 * The file named by TONIC_RDMA_BENCH_COPIES holds two counts in bytes over all processes that have
 * loaded this library: copied by memcpy and memmove, and moved into or out of the kernel by reads
 * and writes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

struct counts {
    atomic_ullong copied, kernel;
};
static struct counts none;
static struct counts *counts = &none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TONIC_RDMA_BENCH_COPIES");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED)
        counts = at;
}

/* The next library's function of this name, resolved on first use, which may precede all
 * constructors. */
#define NEXT(result, name, parameters)                                                                                 \
    static result(*next) parameters;                                                                                   \
    if (!next)                                                                                                         \
    next = (result(*) parameters)dlsym(RTLD_NEXT, #name)

static void *copy(void *to, const void *from, size_t len) {
    atomic_fetch_add_explicit(&counts->copied, len, memory_order_relaxed);
    /* dlsym itself may copy. */
    static __thread int busy;
    static void *(*move)(void *, const void *, size_t);
    if (!move && !busy) {
        busy = 1;
        move = (void *(*)(void *, const void *, size_t))dlsym(RTLD_NEXT, "memmove");
        busy = 0;
    }
    if (move)
        return move(to, from, len);
    volatile unsigned char *t = to;
    const unsigned char *f = from;
    if (t <= f)
        for (size_t i = 0; i < len; i++)
            t[i] = f[i];
    else
        for (size_t i = len; i-- > 0;)
            t[i] = f[i];
    return to;
}

void *memcpy(void *to, const void *from, size_t len) { return copy(to, from, len); }
void *memmove(void *to, const void *from, size_t len) { return copy(to, from, len); }

static ssize_t moved(ssize_t len) {
    if (len > 0)
        atomic_fetch_add_explicit(&counts->kernel, (unsigned long long)len, memory_order_relaxed);
    return len;
}

ssize_t read(int fd, void *buf, size_t len) {
    NEXT(ssize_t, read, (int, void *, size_t));
    return moved(next(fd, buf, len));
}
ssize_t write(int fd, const void *buf, size_t len) {
    NEXT(ssize_t, write, (int, const void *, size_t));
    return moved(next(fd, buf, len));
}
ssize_t readv(int fd, const struct iovec *iov, int n) {
    NEXT(ssize_t, readv, (int, const struct iovec *, int));
    return moved(next(fd, iov, n));
}
ssize_t writev(int fd, const struct iovec *iov, int n) {
    NEXT(ssize_t, writev, (int, const struct iovec *, int));
    return moved(next(fd, iov, n));
}
ssize_t recv(int fd, void *buf, size_t len, int flags) {
    NEXT(ssize_t, recv, (int, void *, size_t, int));
    return moved(next(fd, buf, len, flags));
}
ssize_t send(int fd, const void *buf, size_t len, int flags) {
    NEXT(ssize_t, send, (int, const void *, size_t, int));
    return moved(next(fd, buf, len, flags));
}
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    NEXT(ssize_t, recvmsg, (int, struct msghdr *, int));
    return moved(next(fd, message, flags));
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    NEXT(ssize_t, sendmsg, (int, const struct msghdr *, int));
    return moved(next(fd, message, flags));
}
