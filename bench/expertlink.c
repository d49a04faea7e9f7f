/* Round trip of an expert call with an empty computation: shared memory beside plain ZeroMQ over
 * ipc and tcp, in one run.
 *
 *   bench_expertlink [--caller CPU] [--daemon CPU] [--rounds 20000]
 *
 * Caller and daemon are processes of their own, each bound to one processor. The caller writes the
 * request (12 KB: a token's activations in 16 bits; or 98 KB) into its place and adds up the answer
 * (24 KB or 197 KB of fp32). In shared memory the daemon does nothing in between; as a message it
 * sends an answer of that size. */
#include "base/clock.h"
#include "proto/shmring.h"

#include <zmq.h>

#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_IN = 98304, MAX_OUT = 196608, SIZES = 2 };

static const int IN[SIZES] = {12288, 98304}, OUT[SIZES] = {24576, 196608};
static int rounds = 20000;
static float sum[MAX_OUT / 4];

static void bind_to(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (cpu >= 0 && sched_setaffinity(0, sizeof set, &set))
        perror("sched_setaffinity");
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

static void add_up(const void *answer, int bytes) {
    const float *y = answer;
    for (int i = 0; i < bytes / 4; i++)
        sum[i] += y[i];
}

static void report(const char *path, int size, double *us) {
    qsort(us, (size_t)rounds, sizeof *us, by_value);
    printf("%-10s %6d B in %6d B out: p50 %7.2f us, p99 %8.2f us, worst %9.2f us\n", path, IN[size],
           OUT[size], us[rounds / 2], us[rounds / 100 * 99], us[rounds - 1]);
    fflush(stdout);
}

/* ---- shared memory ---- */

static const ShmGeom GEOM = {1, MAX_IN, MAX_OUT, 4};

static void shm_daemon(const char *name) {
    ShmServer *s;
    Err err = {0};
    if (shmserver_open(&s, name, &GEOM, &err)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    for (;;) {
        uint32_t bell = shmserver_bell(s);
        ShmCall c;
        bool any = false;
        for (; shmserver_take(s, &c); any = true)
            shmserver_answer(s, &c, 0, NULL);
        if (!any)
            shmserver_sleep(s, bell, 1000);
    }
}

static void shm_caller(const char *name, const void *request, double *us) {
    ShmRing *r = NULL;
    Err err = {0};
    for (int i = 0; i < 200 && !r; i++)
        if (shmring_open(&r, name, &GEOM, 1000, &err))
            usleep(10000);
    if (!r) {
        fprintf(stderr, "%s\n", err.text);
        return;
    }
    for (int size = 0; size < SIZES; size++) {
        for (int i = -rounds / 10; i < rounds; i++) {
            double begin = now_us();
            ShmHead head = {0};
            memcpy(shmring_in(r, 0), request, (size_t)IN[size]);
            shmring_post(r, 0, &head);
            while (!shmring_wait(r, 0, 1000000))
                ;
            shmring_release(r, 0, &head);
            add_up(shmring_out(r, 0), OUT[size]);
            us[i < 0 ? 0 : i] = now_us() - begin;
        }
        report("shm", size, us);
    }
    shmring_close(r);
}

/* ---- ZeroMQ ---- */

static void zmq_daemon(const char *endpoint) {
    void *context = zmq_ctx_new(), *s = zmq_socket(context, ZMQ_PAIR);
    static char in[MAX_IN], out[MAX_OUT];
    if (zmq_bind(s, endpoint)) {
        perror(endpoint);
        exit(1);
    }
    for (int n; (n = zmq_recv(s, in, sizeof in, 0)) >= 0;)
        zmq_send(s, out, n == IN[0] ? (size_t)OUT[0] : (size_t)OUT[1], 0);
}

static void zmq_caller(const char *path, const char *endpoint, const void *request, double *us) {
    void *context = zmq_ctx_new(), *s = zmq_socket(context, ZMQ_PAIR);
    static char answer[MAX_OUT];
    int zero = 0;
    zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof zero);
    zmq_connect(s, endpoint);
    for (int size = 0; size < SIZES; size++) {
        for (int i = -rounds / 10; i < rounds; i++) {
            double begin = now_us();
            zmq_send(s, request, (size_t)IN[size], 0);
            zmq_recv(s, answer, sizeof answer, 0);
            add_up(answer, OUT[size]);
            us[i < 0 ? 0 : i] = now_us() - begin;
        }
        report(path, size, us);
    }
    zmq_close(s);
    zmq_ctx_term(context);
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"caller", 1, 0, 'c'}, {"daemon", 1, 0, 'd'}, {"rounds", 1, 0, 'r'}, {0}};
    int caller = 0, daemon_cpu = 1;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'c')
            caller = atoi(optarg);
        else if (c == 'd')
            daemon_cpu = atoi(optarg);
        else if (c == 'r' && atoi(optarg) >= 100)
            rounds = atoi(optarg);
        else
            return 2;
    }
    char shm[64], ipc[64], tcp[64];
    snprintf(shm, sizeof shm, "baton-bench-%d", getpid());
    snprintf(ipc, sizeof ipc, "ipc://@baton-bench-%d", getpid());
    snprintf(tcp, sizeof tcp, "tcp://127.0.0.1:%d", 20000 + getpid() % 20000);
    double *us = calloc((size_t)rounds, sizeof *us);
    char *request = calloc(1, MAX_IN);
    for (int k = 0; k < 3; k++) {
        pid_t child = fork();
        if (child == 0) {
            bind_to(daemon_cpu);
            if (k == 0)
                shm_daemon(shm);
            zmq_daemon(k == 1 ? ipc : tcp);
            exit(0);
        }
        bind_to(caller);
        if (k == 0)
            shm_caller(shm, request, us);
        else
            zmq_caller(k == 1 ? "zmq ipc" : "zmq tcp", k == 1 ? ipc : tcp, request, us);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    free(us);
    free(request);
    return 0;
}
