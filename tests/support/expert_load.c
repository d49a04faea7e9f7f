/* expert_load ENDPOINT TRANSPORT LAYER EXPERTS CALLS [again]: calls experts of one expertd without
 * a pause, small and large calls in turn, until CALLS have been answered (0: for ever) or one
 * fails; with again, a call that the daemon's end or absence made fail is called again after a
 * moment.
 *
 * Every answer is compared with the first of its size. Ends with 0 when all were answered, with 3
 * when the daemon ended the connection or refused, with 4 when it missed the deadline, with 1 on a
 * wrong answer. Prints the path of the calls and a digest of the answers once each size has been
 * answered, the calls and the reason at its end. TRANSPORT: auto, shm, zmq. */
#include "base/clock.h"
#include "proto/expertlink.h"
#include "proto/hello.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { K = 2, SIZES = 2, DEADLINE_MS = 3000, PAUSE_US = 20000 };
static const int ROWS[SIZES] = {1, 100};

typedef struct Load {
    ExpertLink *link;
    int layer, n_experts, hidden;
    float *x, *weight, *sum, *first[SIZES]; /* of the largest size */
    int32_t *expert;
} Load;

static void fill(Load *l) {
    size_t most = (size_t)ROWS[SIZES - 1], n = most * (size_t)l->hidden;
    l->x = xcalloc(n, sizeof *l->x);
    l->sum = xcalloc(n, sizeof *l->sum);
    l->weight = xcalloc(most * K, sizeof *l->weight);
    l->expert = xcalloc(most * K, sizeof *l->expert);
    for (size_t i = 0; i < n; i++)
        l->x[i] = 0.01f * (float)(i % 17);
    for (int i = 0; i < (int)most * K; i++) {
        l->expert[i] = (i + i / K) % l->n_experts;
        l->weight[i] = 0.25f * (float)(1 + i % 3);
    }
}

static int call(Load *l, int size, Err *err) {
    size_t bytes = (size_t)ROWS[size] * (size_t)l->hidden * sizeof(float);
    memset(l->sum, 0, bytes);
    int rc = expertlink_post(l->link, l->layer, ROWS[size], K, l->x, l->expert, l->weight, err);
    if (rc == 0)
        rc = expertlink_wait(l->link, l->sum, err);
    if (rc)
        return rc;
    if (!l->first[size]) {
        l->first[size] = xmalloc(bytes);
        memcpy(l->first[size], l->sum, bytes);
    }
    return memcmp(l->first[size], l->sum, bytes) ? err_set(err, E_MISMATCH, "a wrong answer") : 0;
}

/* Of all bits of the first answers. */
static uint64_t digest(const Load *l) {
    uint64_t h = 14695981039346656037ull;
    for (int s = 0; s < SIZES; s++) {
        const uint8_t *at = (const uint8_t *)l->first[s];
        for (size_t i = 0; i < (size_t)ROWS[s] * (size_t)l->hidden * sizeof(float); i++)
            h = (h ^ at[i]) * 1099511628211ull;
    }
    return h;
}

static int open_link(Load *l, const char *endpoint, const char *transport, Err *err) {
    Baton__Hello self = BATON__HELLO__INIT;
    char name[32];
    self.protocol = PROTOCOL_VERSION;
    self.role = BATON__ROLE__ROLE_DECODE;
    self.generation = clock_unique();
    snprintf(name, sizeof name, "load-%016llx", (unsigned long long)self.generation);
    self.name = name;
    int rc = expertlink_open(&l->link, &endpoint, 1, &self, DEADLINE_MS, err);
    if (rc)
        return rc;
    l->hidden = expertlink_hidden(l->link);
    expertlink_transport(l->link, strcmp(transport, "shm") == 0   ? EXPERTLINK_SHM
                                  : strcmp(transport, "zmq") == 0 ? EXPERTLINK_ZMQ
                                                                  : EXPERTLINK_AUTO);
    return 0;
}

int main(int argc, char **argv) {
    Load l = {0};
    Err err = {0};
    bool again = argc == 7 && strcmp(argv[6], "again") == 0;
    if (argc != 6 + again || (l.n_experts = atoi(argv[4])) < K) {
        fprintf(stderr, "usage: %s ENDPOINT TRANSPORT LAYER EXPERTS CALLS [again]\n", argv[0]);
        return 2;
    }
    l.layer = atoi(argv[3]);
    long most = atol(argv[5]), n = 0, failures = 0;
    int rc = open_link(&l, argv[1], argv[2], &err);
    if (rc == 0)
        fill(&l);
    for (; rc == 0 && (most == 0 || n < most); n++) {
        while ((rc = call(&l, (int)(n % SIZES), &err)) && again && rc != E_MISMATCH) {
            failures++;
            usleep(PAUSE_US);
        }
        if (n == SIZES - 1 && rc == 0) {
            printf("%s\n%016llx\n", expertlink_path(l.link, 0), (unsigned long long)digest(&l));
            fflush(stdout);
        }
    }
    printf("%ld calls, %ld again, %s\n", n, failures, rc ? err.text : "all answered");
    expertlink_close(l.link);
    for (int i = 0; i < SIZES; i++)
        free(l.first[i]);
    free(l.x);
    free(l.sum);
    free(l.weight);
    free(l.expert);
    return rc == 0 ? 0 : rc == E_PEER ? 3 : rc == E_DEADLINE ? 4 : 1;
}
