/* bench_expertlink [CLIENT_CORES DAEMON_CORES WORKER_CORE]: round trips of expert calls between two
 * processes on this host, through shared memory, ZeroMQ ipc and ZeroMQ tcp in the same run; then
 * what they add to a computation, awake as long as calls usually take and asleep after a moment.
 *
 * The daemon is expertd's own serving (serve.c) over a store that computes nothing, so that what is
 * measured is the way there and back: copying in, waking, taking, answering, adding up. The cores
 * are lists such as "0,1"; the client's calls run on the first of its list, ZeroMQ's threads
 * anywhere on it; without them nothing is pinned. Paths take turns, so that whatever else the
 * machine does meets all of them. The floor is what two processes that spin on one word need to
 * hand it to and fro, and the copying in and adding up of the payload on one core. */
#include "base/clock.h"
#include "base/log.h"
#include "expertd/serve.h"
#include "proto/expertlink.h"
#include "proto/hello.h"
#include "proto/shmring.h"

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { HIDDEN = 6144, K = 8, N_EXPERTS = 256, MAX_ROWS = 64, N_PATHS = 3 };
enum { ROUNDS = 2500, TURN = 50, DEADLINE_MS = 10000, SPIN_ROUNDS = 500 };

typedef struct Cores {
    const char *client, *daemon, *worker; /* NULL: not pinned */
} Cores;

static Cores cores;
static atomic_uint *compute_us; /* of a call; shared with the daemon */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

static _Noreturn void die(const char *what, const Err *err) {
    fprintf(stderr, "bench_expertlink: %s: %s\n", what, err->text);
    exit(1);
}

/* Pins the calling thread to the first n cores of a list. */
static int pin(const char *list, int n, Err *err) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const char *s = list; s && *s && n-- > 0;) {
        char *end;
        long core = strtol(s, &end, 10);
        if (end == s || core < 0 || core >= CPU_SETSIZE)
            return err_set(err, E_INVAL, "'%s' is no list of cores", list);
        CPU_SET((size_t)core, &set);
        s = *end == ',' ? end + 1 : end;
    }
    if (list && sched_setaffinity(0, sizeof set, &set) != 0)
        return err_set(err, E_IO, "cannot pin to '%s'", list);
    return 0;
}

/* ---- a store that computes nothing, but takes its time ---- */

bool store_holds(const Store *s, int layer, int expert) {
    (void)s;
    return layer == 0 && expert >= 0 && expert < N_EXPERTS;
}

int store_pin_caller(const Store *s, Err *err) {
    (void)s;
    return pin(cores.worker, 1, err);
}

StoreWork store_compute(Store *s, int layer, int n, int k, const float *x, const int32_t *id,
                        const float *weight, float *y, void (*between)(void *arg), void *arg) {
    (void)s, (void)layer, (void)k, (void)id, (void)weight, (void)between, (void)arg;
    int us = (int)atomic_load(compute_us);
    for (int64_t end = now_ns() + us * 1000; us > 0 && now_ns() < end;)
        ;
    for (int i = 0; i < n; i++) /* one word of each row says that it was here */
        y[(size_t)i * HIDDEN] = x[(size_t)i * HIDDEN];
    return (StoreWork){.n_experts = k};
}

/* ---- the daemon ---- */

static void on_message(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                       size_t blob_len) {
    serve_on_message(arg, peer, env, blob, blob_len);
}

static void on_event(void *arg, BusPeer *peer, BusEvent event, const char *reason) {
    (void)reason;
    if (event == BUS_GONE)
        serve_on_gone(arg, peer);
}

static BusServer *listen_at(Loop *loop, Serve *serve, const char *endpoint, const Baton__Hello *h) {
    BusCallbacks cb = {.arg = serve, .on_event = on_event, .on_message = on_message};
    BusServer *s;
    Err err = {0};
    if (bus_server_open(&s, loop, endpoint, h, NULL, &cb, &err))
        die(endpoint, &err);
    return s;
}

/* Tells the endpoints it listens at, then serves until it is killed. */
static void daemon_main(int out, const char *ipc) {
    static Shape shape = {.hidden = HIDDEN, .n_layers = 1, .n_experts = N_EXPERTS};
    uint64_t generation = clock_unique();
    char name[64];
    Serve *serve;
    Err err = {0};
    if (pin(cores.daemon, CPU_SETSIZE, &err))
        die("daemon", &err);
    snprintf(name, sizeof name, "baton-bench-%016llx", (unsigned long long)generation);
    Loop *loop = loop_new();
    if (serve_open(&serve, loop, NULL, &shape, MAX_ROWS, generation, name, &err))
        die("serve", &err);
    Baton__Hello h = BATON__HELLO__INIT;
    h.protocol = PROTOCOL_VERSION;
    h.role = BATON__ROLE__ROLE_EXPERTD;
    h.name = (char *)"expertd-bench";
    h.generation = generation;
    h.hidden = HIDDEN;
    h.n_shards = 1;
    h.max_rows = MAX_ROWS;
    h.shm = name;
    BusServer *tcp = listen_at(loop, serve, "tcp://127.0.0.1:*", &h);
    listen_at(loop, serve, ipc, &h);
    const char *endpoint = bus_server_endpoint(tcp);
    CHECK(write(out, endpoint, strlen(endpoint) + 1) > 0);
    loop_run(loop);
}

/* ---- the client ---- */

typedef struct Path {
    const char *name;
    ExpertLink *link;
    double us[ROUNDS];
} Path;

static Path path[N_PATHS] = {{.name = "shm"}, {.name = "ipc"}, {.name = "tcp"}};
static float x[MAX_ROWS * HIDDEN], sum[MAX_ROWS * HIDDEN], weight[MAX_ROWS * K];
static int32_t expert[MAX_ROWS * K];

static void open_paths(const char *ipc, const char *tcp) {
    const char *at[N_PATHS] = {ipc, ipc, tcp};
    Baton__Hello self = BATON__HELLO__INIT;
    self.protocol = PROTOCOL_VERSION;
    self.role = BATON__ROLE__ROLE_DECODE;
    self.hidden = HIDDEN;
    for (int i = 0; i < N_PATHS; i++) {
        Err err = {0};
        self.name = (char *)path[i].name;
        self.generation = clock_unique();
        if (expertlink_open(&path[i].link, &at[i], 1, &self, DEADLINE_MS, &err))
            die(path[i].name, &err);
        expertlink_transport(path[i].link, i == 0 ? EXPERTLINK_SHM : EXPERTLINK_ZMQ);
    }
}

static double call(Path *p, int rows) {
    Err err = {0};
    int64_t begin = now_ns();
    if (expertlink_post(p->link, 0, rows, K, x, expert, weight, &err) ||
        expertlink_wait(p->link, sum, &err))
        die(p->name, &err);
    return (double)(now_ns() - begin) * 1e-3;
}

static void pass_time(int us) {
    for (int64_t end = now_ns() + us * 1000; now_ns() < end;)
        ;
}

static int by_size(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return (d > 0) - (d < 0);
}

static double quantile(double *v, int n, double q) {
    qsort(v, (size_t)n, sizeof *v, by_size);
    return v[(int)(q * (n - 1))];
}

/* ---- the floor ---- */

static atomic_uint *shared_word(void) {
    void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

static double word_us[ROUNDS];

/* Median of a word's way to the worker's core and back, both ends awake. */
static double word_floor(void) {
    atomic_uint *word = shared_word();
    Err err = {0};
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        if (pin(cores.worker, 1, &err))
            die("floor", &err);
        for (unsigned n = 1; n < 2 * ROUNDS; n += 2) {
            for (int turn = 0; atomic_load(word) != n; turn++)
                if (turn > 20000) /* the other end may need this core */
                    sched_yield(), turn = 0;
            atomic_store(word, n + 1);
        }
        _exit(0);
    }
    for (unsigned n = 1; n < 2 * ROUNDS; n += 2) {
        int64_t begin = now_ns();
        atomic_store(word, n);
        for (int turn = 0; atomic_load(word) != n + 1; turn++)
            if (turn > 20000)
                sched_yield(), turn = 0;
        word_us[n / 2] = (double)(now_ns() - begin) * 1e-3;
    }
    CHECK(waitpid(pid, NULL, 0) == pid);
    return quantile(word_us, ROUNDS, 0.5);
}

/* Median of copying in and adding up on one core. */
static double copy_floor(int rows) {
    static float slot[MAX_ROWS * HIDDEN];
    size_t n = (size_t)rows * HIDDEN;
    for (int r = 0; r < ROUNDS; r++) {
        int64_t begin = now_ns();
        memcpy(slot, x, n * sizeof *x);
        __asm__ volatile("" ::"r"(slot) : "memory");
        for (size_t i = 0; i < n; i++)
            sum[i] += slot[i];
        __asm__ volatile("" ::"r"(sum) : "memory");
        word_us[r] = (double)(now_ns() - begin) * 1e-3;
    }
    return quantile(word_us, ROUNDS, 0.5);
}

/* ---- all of it ---- */

static void measure(int rows, int gap_us, double word) {
    double floor_us = word + copy_floor(rows);
    for (int i = 0; i < N_PATHS; i++)
        for (int r = 0; r < 2 * TURN; r++)
            call(&path[i], rows); /* rings made, pages touched */
    for (int at = 0; at < ROUNDS; at += TURN)
        for (int i = 0; i < N_PATHS; i++)
            for (int r = at; r < at + TURN; r++) {
                pass_time(gap_us);
                path[i].us[r] = call(&path[i], rows);
            }
    double bytes = (double)rows * HIDDEN * sizeof(float) * 1e-3;
    for (int i = 0; i < N_PATHS; i++) {
        double p50 = quantile(path[i].us, ROUNDS, 0.5), p99 = quantile(path[i].us, ROUNDS, 0.99);
        printf("%4d %7.1f %7.1f %5d  %-4s %9.1f %9.1f %8.1f %8.1f\n", rows, bytes, bytes, gap_us,
               path[i].name, p50, p99, floor_us, p50 / floor_us);
    }
    fflush(stdout);
}

/* A decode step's calls: the same size, one after the other, each as long as a real layer. */
static void measure_waiting(int us) {
    static const int64_t spin[2] = {EXPERTLINK_SPIN_US, SHM_SPIN_US};
    static double took[2][SPIN_ROUNDS];
    double p50[2], p99[2];
    atomic_store(compute_us, (unsigned)us);
    for (int at = 0; at < SPIN_ROUNDS; at += TURN)
        for (int i = 0; i < 2; i++) {
            expertlink_spin(path[0].link, spin[i]);
            for (int r = at; r < at + TURN; r++)
                took[i][r] = call(&path[0], 1) - us;
        }
    atomic_store(compute_us, 0);
    for (int i = 0; i < 2; i++) {
        p50[i] = quantile(took[i], SPIN_ROUNDS, 0.5);
        p99[i] = quantile(took[i], SPIN_ROUNDS, 0.99);
    }
    printf("%10d %9.1f %9.1f %9.1f %9.1f %8.2f\n", us, p50[0], p99[0], p50[1], p99[1],
           p50[0] / p50[1]);
    fflush(stdout);
}

static void run_client(const char *ipc, const char *tcp) {
    Err err = {0};
    double word = word_floor();
    if (pin(cores.client, CPU_SETSIZE, &err))
        die("client", &err);
    open_paths(ipc, tcp);
    if (pin(cores.client, 1, &err)) /* ZeroMQ's threads have started on all of them */
        die("client", &err);
    for (int i = 0; i < MAX_ROWS * K; i++) {
        expert[i] = i % K;
        weight[i] = 1;
    }
    printf("hidden %d, k %d, %d rounds a path; a word there and back: %.2f us\n", HIDDEN, K, ROUNDS,
           word);
    printf("rows   kB in  kB out   gap  path    p50 us    p99 us floor us    ratio\n");
    for (int gap_us = 0; gap_us <= 300; gap_us += 300)
        for (int rows = 1; rows <= 8; rows += 7)
            measure(rows, gap_us, word);
    static const int layer_us[] = {100, 400, 700, 1000, 1400};
    printf("what a call of one row adds to its computation, us\n");
    printf("compute us awake p50 awake p99 sleep p50 sleep p99    ratio\n");
    for (size_t i = 0; i < sizeof layer_us / sizeof *layer_us; i++)
        measure_waiting(layer_us[i]);
    for (int i = 0; i < N_PATHS; i++)
        expertlink_close(path[i].link);
}

int main(int argc, char **argv) {
    if (argc != 1 && argc != 4) {
        fprintf(stderr, "usage: %s [CLIENT_CORES DAEMON_CORES WORKER_CORE]\n", argv[0]);
        return 2;
    }
    if (argc == 4)
        cores = (Cores){argv[1], argv[2], argv[3]};
    log_init("bench", LOG_LV_WARN);
    Err err = {0};
    compute_us = shared_word();
    if (pin(cores.client, 1, &err)) /* the floor is measured from here; the daemon pins itself */
        die("client", &err);
    char dir[] = "/tmp/bench_expertlink.XXXXXX", ipc[96], file[64], tcp[128] = "";
    CHECK(mkdtemp(dir));
    snprintf(file, sizeof file, "%s/socket", dir);
    snprintf(ipc, sizeof ipc, "ipc://%s", file);
    int fd[2];
    CHECK(pipe(fd) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        daemon_main(fd[1], ipc);
        _exit(0);
    }
    close(fd[1]);
    bool up = read(fd[0], tcp, sizeof tcp - 1) > 0;
    if (up)
        run_client(ipc, tcp);
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, NULL, 0) == pid);
    unlink(file);
    rmdir(dir);
    return up ? 0 : 1;
}
