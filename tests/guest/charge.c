/* Pins memory for each queue pair, as the drivers of adapters do. CHARGE_HOLD may name a file with
 * the name of a call (`create`, `destroy`, or `init`, `rtr` and `rts` for a change to that state)
 * and a number. Then that many such calls pass, and the next one waits as long as the file exists.
 * The library shows the wait by a file with `.held` appended to the name. If CHARGE_LIMIT names a
 * file with a number of bytes, a queue pair that needs more is refused, as if memory were scarce.
 * If CHARGE_MTU names a file with a number, the answer to a connect request carries this number
 * behind its private data, where a path MTU belongs. Loaded first (LD_PRELOAD):
 *
 *     cc -shared -fPIC -O2 -o charge.so tests/guest/charge.c
 *
 * librdmacm finds ibv_create_qp, ibv_modify_qp and ibv_destroy_qp in this library, as in any
 * library that was loaded before libibverbs. The bindings ask dlvsym for these functions and for
 * rdma_accept, which this library also has.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define IBV_ACCESS_LOCAL_WRITE 1
#define PAGE 4096

/* The beginning of struct ibv_qp_init_attr. */
struct init_attr {
    void *context, *send_cq, *recv_cq, *srq;
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

/* The beginning of struct rdma_conn_param, and its length. */
struct conn_param {
    const void *private_data;
    uint8_t private_data_len;
    uint8_t rest[15];
};
/* Length of the private data. A path MTU follows it. */
#define PRIVATE_DATA 56

struct charge {
    void *qp, *mr, *memory;
    size_t bytes;
    struct charge *next;
};

static struct charge *charges;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *function(const char *file, const char *name) {
    void *library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    return library ? dlsym(library, name) : NULL;
}

static void *verbs(const char *name) { return function("libibverbs.so.1", name); }

static void hold(const char *call) {
    const char *path = getenv("CHARGE_HOLD");
    static int passed;
    int passing = 0;
    char held[256], wanted[16] = "";
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file)
        return;
    int read = fscanf(file, "%15s %d", wanted, &passing);
    fclose(file);
    if (read != 2 || strcmp(wanted, call) || __sync_fetch_and_add(&passed, 1) < passing)
        return;
    snprintf(held, sizeof held, "%s.held", path);
    close(open(held, O_CREAT | O_WRONLY, 0600));
    while (!access(path, F_OK))
        usleep(1000);
    passed = 0;
}

static size_t power_of_two(size_t n) {
    size_t power = 1;
    while (power < n)
        power *= 2;
    return power;
}

static size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Bytes that the queues of a queue pair take, according to the source of ConnectX's driver (mlx5).
 * A work request is a control segment, an address and either a segment or the inline data, in
 * blocks of 64 bytes. Queues are powers of two, and the doorbell takes a page. */
static size_t bytes_of(const struct init_attr *attr) {
    size_t payload = rounded(4 + attr->max_inline_data, 16);
    size_t request = rounded(32 + (payload > 16 ? payload : 16), 64);
    size_t sends = power_of_two(attr->max_send_wr * request);
    size_t recvs = power_of_two(attr->max_recv_wr) * 16;
    return rounded(sends + recvs, PAGE) + PAGE;
}

/* The number in the file that a variable names, or `otherwise` without such a file. */
static size_t number(const char *variable, size_t otherwise) {
    const char *path = getenv(variable);
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t number = otherwise;
    if (file) {
        if (fscanf(file, "%zu", &number) != 1)
            abort();
        fclose(file);
    }
    return number;
}

static int is_allowed(size_t bytes) { return bytes <= number("CHARGE_LIMIT", (size_t)-1); }

void *ibv_create_qp(void *pd, void *attr) {
    hold("create");
    void *(*create)(void *, void *) = verbs("ibv_create_qp");
    void *(*reg)(void *, void *, size_t, int) = verbs("ibv_reg_mr");
    int (*dereg)(void *) = verbs("ibv_dereg_mr");
    struct charge *charge = calloc(1, sizeof *charge);
    charge->bytes = bytes_of(attr);
    charge->memory = aligned_alloc(PAGE, charge->bytes);
    memset(charge->memory, 0, charge->bytes);
    if (is_allowed(charge->bytes))
        charge->mr = reg(pd, charge->memory, charge->bytes, IBV_ACCESS_LOCAL_WRITE);
    if (charge->mr && !(charge->qp = create(pd, attr))) {
        int error = errno;
        dereg(charge->mr);
        errno = error;
    } else if (!charge->mr) {
        errno = ENOMEM;
    }
    if (!charge->qp) {
        int error = errno;
        free(charge->memory);
        free(charge);
        errno = error;
        return NULL;
    }
    void *qp = charge->qp;
    pthread_mutex_lock(&lock);
    charge->next = charges;
    charges = charge;
    pthread_mutex_unlock(&lock);
    return qp;
}

/* The first of the attributes is the state, and the first bit of the mask says that it counts. */
int ibv_modify_qp(void *qp, void *attr, int mask) {
    static const char *const states[] = {"reset", "init", "rtr", "rts"};
    unsigned state = *(unsigned *)attr;
    if ((mask & 1) && state < 4)
        hold(states[state]);
    int (*modify)(void *, void *, int) = verbs("ibv_modify_qp");
    return modify(qp, attr, mask);
}

int ibv_destroy_qp(void *qp) {
    int (*destroy)(void *) = verbs("ibv_destroy_qp");
    int (*dereg)(void *) = verbs("ibv_dereg_mr");
    hold("destroy");
    int error = destroy(qp);
    if (error)
        return error;
    pthread_mutex_lock(&lock);
    for (struct charge **at = &charges; *at; at = &(*at)->next) {
        struct charge *charge = *at;
        if (charge->qp == qp) {
            *at = charge->next;
            dereg(charge->mr);
            free(charge->memory);
            free(charge);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

int rdma_accept(void *id, struct conn_param *param) {
    int (*accept)(void *, void *) = function("librdmacm.so.1", "rdma_accept");
    size_t mtu = number("CHARGE_MTU", (size_t)-1);
    struct conn_param named = *param;
    unsigned char answer[PRIVATE_DATA + 1] = {0};
    if (mtu == (size_t)-1)
        return accept(id, param);
    memcpy(answer, param->private_data, param->private_data_len < PRIVATE_DATA ? param->private_data_len : PRIVATE_DATA);
    answer[PRIVATE_DATA] = mtu;
    named.private_data = answer;
    named.private_data_len = sizeof answer;
    return accept(id, &named);
}

void *dlvsym(void *library, const char *name, const char *version) {
    void *(*real)(void *, const char *, const char *) = dlsym(RTLD_NEXT, "dlvsym");
    if (library != RTLD_DEFAULT && library != RTLD_NEXT) {
        if (!strcmp(name, "ibv_create_qp"))
            return ibv_create_qp;
        if (!strcmp(name, "ibv_modify_qp"))
            return ibv_modify_qp;
        if (!strcmp(name, "ibv_destroy_qp"))
            return ibv_destroy_qp;
        if (!strcmp(name, "rdma_accept"))
            return rdma_accept;
    }
    return real ? real(library, name, version) : NULL;
}
