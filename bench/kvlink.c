/* bench_kvlink TRANSPORTS: GB/s of KV hand-over between two processes on this host.
 *
 * For prompts of 1k, 8k and 32k tokens: 78 layers, each a list of 64-token pages of 41,984 bytes
 * (fp8 latent rows), put layer by layer as prefill does, then one notice. Time runs from the first
 * put until the receiver, which has got the notice and thus all pages, says so through a pipe. The
 * medians of several rounds. The pools hold one layer; layers overwrite each other. */
#include "base/clock.h"
#include "proto/kvlink.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE_BYTES = 41984, LAYERS = 78, MAX_PAGES = 512, ROUNDS = 5 };

static void on_notice(void *arg, const void *bytes, size_t len) {
    const int *back = arg;
    (void)bytes, (void)len;
    CHECK(write(*back, "!", 1) == 1);
}

/* back: where notices are answered */
static KvLink *open_link(Loop *loop, const char *transports, int *back) {
    KvLinkConf conf = {.loop = loop,
                       .pool_bytes = (uint64_t)MAX_PAGES * PAGE_BYTES,
                       .transports = transports,
                       .devices = "",
                       .timeout_ms = 60000,
                       .on_notice = on_notice,
                       .arg = back};
    KvLink *link;
    Err err = {0};
    if (kvlink_open(&link, &conf, &err)) {
        fprintf(stderr, "bench_kvlink: %s\n", err.text);
        exit(1);
    }
    return link;
}

/* ---- the receiver: tells what a writer needs, then turns until it is killed ---- */

static void write_all(int fd, const void *p, size_t n) {
    CHECK(write(fd, p, n) == (ssize_t)n);
}

static void read_all(int fd, void *p, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t got = read(fd, (char *)p + at, n - at);
        CHECK(got > 0);
        at += (size_t)got;
    }
}

static void receiver(int fd, const char *transports) {
    Loop *loop = loop_new();
    KvRemote r;
    kvlink_describe(open_link(loop, transports, &fd), &r);
    write_all(fd, &r, sizeof r);
    write_all(fd, r.address, r.address_len);
    write_all(fd, r.rkey, r.rkey_len);
    loop_run(loop);
}

/* ---- the sender ---- */

typedef struct Sent {
    bool done;
    int status;
} Sent;

static void on_sent(void *arg, int status) {
    Sent *s = arg;
    s->done = true;
    s->status = status;
}

static double round_gb(Loop *loop, KvLink *link, KvPeer *peer, int fd, int tokens) {
    char answer;
    KvSeg seg[MAX_PAGES];
    Sent sent = {0};
    Err err = {0};
    int pages = tokens / 64;
    for (int i = 0; i < pages;
         i++) /* not in the order of memory, as pages of a pool that has been used for a while */
        seg[i] = (KvSeg){(uint64_t)i * PAGE_BYTES, (uint64_t)((i * 37) % pages) * PAGE_BYTES,
                         PAGE_BYTES};
    int64_t begin = clock_now_us();
    for (int layer = 0; layer < LAYERS; layer++)
        CHECK(kvlink_put(link, peer, seg, pages, &err) == 0);
    CHECK(kvlink_notify(link, peer, "ready", 5, on_sent, &sent, &err) == 0);
    while (!sent.done)
        uv_run(loop_uv(loop), UV_RUN_ONCE);
    CHECK(sent.status == 0);
    read_all(fd, &answer, 1);
    return (double)LAYERS * pages * PAGE_BYTES / (double)(clock_now_us() - begin) * 1e-3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void sender(int fd, const char *transports) {
    static const int tokens[] = {1024, 8192, 32768};
    Loop *loop = loop_new();
    KvLink *link = open_link(loop, transports, NULL);
    KvRemote r;
    KvPeer *peer;
    Err err = {0};
    read_all(fd, &r, sizeof r);
    void *address = xmalloc(r.address_len), *rkey = xmalloc(r.rkey_len);
    read_all(fd, address, r.address_len);
    read_all(fd, rkey, r.rkey_len);
    r.address = address;
    r.rkey = rkey;
    CHECK(kvlink_connect(link, &r, &peer, &err) == 0);
    round_gb(loop, link, peer, fd, 1024); /* connects */
    for (int i = 0; i < 3; i++) {
        double gb[ROUNDS];
        for (int k = 0; k < ROUNDS; k++)
            gb[k] = round_gb(loop, link, peer, fd, tokens[i]);
        qsort(gb, ROUNDS, sizeof *gb, by_value);
        printf("| kvlink, %s | %d tokens, %.0f MB | %.2f |\n",
               *transports ? transports : "UCX's choice", tokens[i],
               (double)LAYERS * (tokens[i] / 64) * PAGE_BYTES * 1e-6, gb[ROUNDS / 2]);
    }
    free(address);
    free(rkey);
    kvlink_close(link);
    loop_free(loop);
}

int main(int argc, char **argv) {
    int fd[2];
    if (argc != 2) {
        fprintf(stderr,
                "usage: bench_kvlink TRANSPORTS (\"posix\", \"tcp\", \"\" for UCX's choice)\n");
        return 2;
    }
    CHECK(pipe(fd) == 0);
    pid_t child = fork(); /* before either side touches UCX */
    if (child == 0) {
        receiver(fd[1], argv[1]);
        return 0;
    }
    sender(fd[0], argv[1]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return 0;
}
