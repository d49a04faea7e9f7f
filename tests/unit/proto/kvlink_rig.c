/* See kvlink_rig.h. */
#include "kvlink_rig.h"

#include "base/clock.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { CHILD_IN = 3, CHILD_OUT = 4, CHILD_TIMEOUT_MS = 5000, BLOB_MAX = 1 << 16 };

void on_done(void *arg, int status) {
    Done *d = arg;
    d->n++;
    if (status) {
        d->n_failed++;
        d->status = status;
    }
}

void on_no_notice(void *arg, const void *bytes, size_t len) {
    (void)arg, (void)bytes, (void)len;
    fail_msg("a notice of %zu bytes came to the writer", len);
}

void turn(Loop *loop) {
    uv_run(loop_uv(loop), UV_RUN_NOWAIT);
    nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
}

void wait_done(Loop *loop, const Done *done, int n) {
    for (int64_t end = clock_now_ms() + RIG_WAIT_MS; done->n < n; turn(loop))
        if (clock_now_ms() > end)
            fail_msg("only %d of %d ended", done->n, n);
    assert_int_equal(done->n, n);
}

KvLink *kvlink_rig_open(Loop *loop, const char *transports, const char *devices,
                        uint64_t pool_bytes, int64_t timeout_ms, KvNoticeFn on_notice, void *arg) {
    Err err = {0};
    KvLink *l = NULL;
    KvLinkConf conf = {.loop = loop,
                       .pool_bytes = pool_bytes,
                       .transports = transports,
                       .devices = devices,
                       .timeout_ms = timeout_ms,
                       .on_notice = on_notice,
                       .arg = arg};
    if (kvlink_open(&l, &conf, &err))
        fail_msg("%s", err.text);
    return l;
}

KvPeer *kvlink_rig_connect(KvLink *writer, KvLink *reader) {
    Err err = {0};
    KvRemote remote;
    KvPeer *p = NULL;
    kvlink_describe(reader, &remote);
    if (kvlink_connect(writer, &remote, &p, &err))
        fail_msg("%s", err.text);
    return p;
}

static unsigned char pattern(size_t i, uint64_t seed) {
    return (unsigned char)(i * 31 + (i >> 8) * 7 + seed * 17 + 1);
}

void pattern_fill(unsigned char *bytes, size_t len, uint64_t seed) {
    for (size_t i = 0; i < len; i++)
        bytes[i] = pattern(i, seed);
}

bool pattern_holds(const unsigned char *bytes, size_t len, uint64_t seed) {
    for (size_t i = 0; i < len; i++)
        if (bytes[i] != pattern(i, seed))
            return false;
    return true;
}

int rig_send(KvLink *l, KvPeer *p, KvCheck check, Done *done) {
    uint64_t bytes;
    unsigned char *pool = kvlink_pool(l, &bytes);
    KvSeg seg = {check.at, check.at, check.bytes};
    pattern_fill(pool + check.at, check.bytes, check.seed);
    int rc = kvlink_put(l, p, &seg, 1, NULL);
    return rc ? rc : kvlink_notify(l, p, &check, sizeof check, on_done, done, NULL);
}

/* ---- the receiver ---- */

typedef struct Receiver {
    Loop *loop;
    KvLink *link;
} Receiver;

static void on_check(void *arg, const void *bytes, size_t len) {
    Receiver *r = arg;
    KvCheck c = {0};
    uint64_t pool_bytes;
    const unsigned char *pool = kvlink_pool(r->link, &pool_bytes);
    bool good = len == sizeof c;
    if (good) {
        memcpy(&c, bytes, sizeof c);
        good = c.bytes <= pool_bytes && c.at <= pool_bytes - c.bytes &&
               pattern_holds(pool + c.at, c.bytes, c.seed);
    }
    if (write(CHILD_OUT, good ? "y" : "n", 1) != 1)
        loop_stop(r->loop);
}

static void on_input_end(void *arg, int events) {
    Receiver *r = arg;
    (void)events;
    loop_stop(r->loop);
}

static bool write_all(int fd, const void *bytes, size_t len) {
    return write(fd, bytes, len) == (ssize_t)len; /* less than a pipe holds */
}

static int receive(const char *transports, const char *devices, uint64_t pool_bytes) {
    Err err = {0};
    Receiver r = {.loop = loop_new()};
    KvRemote self;
    KvLinkConf conf = {.loop = r.loop,
                       .pool_bytes = pool_bytes,
                       .transports = transports,
                       .devices = devices,
                       .timeout_ms = CHILD_TIMEOUT_MS,
                       .on_notice = on_check,
                       .arg = &r};
    if (kvlink_open(&r.link, &conf, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    LoopFd *input = loop_fd_new(r.loop, CHILD_IN, UV_READABLE, on_input_end, &r);
    kvlink_describe(r.link, &self);
    bool told = input && write_all(CHILD_OUT, &self, sizeof self) &&
                write_all(CHILD_OUT, self.address, self.address_len) &&
                write_all(CHILD_OUT, self.rkey, self.rkey_len);
    if (told)
        loop_run(r.loop);
    loop_fd_free(input);
    kvlink_close(r.link);
    loop_free(r.loop);
    return told ? 0 : 1;
}

/* ---- the writer ---- */

static bool read_some(int fd, void *bytes, size_t len) {
    for (size_t got = 0; got < len;) {
        ssize_t n = read(fd, (char *)bytes + got, len - got);
        if (n <= 0)
            return false;
        got += (size_t)n;
    }
    return true;
}

/* Writes and notifies, with some work in flight all the time, until it is killed. */
static int write_on(const char *transports, const char *devices, uint64_t pool_bytes) {
    Loop *loop = loop_new();
    KvLink *link = NULL;
    KvPeer *peer = NULL;
    KvRemote r;
    Done done = {0};
    KvLinkConf conf = {.loop = loop,
                       .pool_bytes = pool_bytes,
                       .transports = transports,
                       .devices = devices,
                       .timeout_ms = CHILD_TIMEOUT_MS,
                       .on_notice = on_no_notice};
    if (!read_some(CHILD_IN, &r, sizeof r))
        return 1;
    void *address = xmalloc(r.address_len), *rkey = xmalloc(r.rkey_len);
    bool told =
        read_some(CHILD_IN, address, r.address_len) && read_some(CHILD_IN, rkey, r.rkey_len);
    r.address = address;
    r.rkey = rkey;
    if (!told || kvlink_open(&link, &conf, NULL) || kvlink_connect(link, &r, &peer, NULL))
        return 1;
    KvSeg seg = {0, 0, pool_bytes};
    pid_t self = getpid();
    for (int n = 0; done.n_failed == 0; turn(loop))
        for (; n - done.n < 8; n++)
            if (kvlink_put(link, peer, &seg, 1, NULL) ||
                kvlink_notify(link, peer, &self, sizeof self, on_done, &done, NULL))
                return 1;
    return 1;
}

void kvlink_rig_main(int argc, char **argv) {
    if (argc != 5)
        return;
    uint64_t pool_bytes = strtoull(argv[4], NULL, 10);
    if (!strcmp(argv[1], "receive"))
        exit(receive(argv[2], argv[3], pool_bytes));
    if (!strcmp(argv[1], "write"))
        exit(write_on(argv[2], argv[3], pool_bytes));
}

/* ---- and its parent ---- */

static void wait_readable(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (poll(&p, 1, RIG_WAIT_MS) != 1)
        fail_msg("the receiver is silent");
}

static void read_all(int fd, void *bytes, size_t len) {
    for (size_t got = 0; got < len;) {
        wait_readable(fd);
        ssize_t n = read(fd, (char *)bytes + got, len - got);
        assert_true(n > 0);
        got += (size_t)n;
    }
}

static _Noreturn void become_child(int in, int out, const char *role, const char *transports,
                                   const char *devices, const char *pool_bytes, const char *netns) {
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    /* first out of the way of the numbers that they are to have */
    int high_in = dup2(in, 20), high_out = dup2(out, 21);
    if (n > 0 && dup2(high_in, CHILD_IN) == CHILD_IN && dup2(high_out, CHILD_OUT) == CHILD_OUT) {
        self[n] = 0;
        for (int fd = CHILD_OUT + 1; fd < 1024; fd++)
            close(fd);
        if (netns)
            execlp("ip", "ip", "netns", "exec", netns, self, role, transports, devices, pool_bytes,
                   (char *)NULL);
        else
            execl(self, self, role, transports, devices, pool_bytes, (char *)NULL);
    }
    _exit(127);
}

static void spawn(Child *c, const char *role, const char *transports, const char *devices,
                  uint64_t pool_bytes, const char *netns) {
    int in[2], out[2];
    char number[32];
    snprintf(number, sizeof number, "%llu", (unsigned long long)pool_bytes);
    assert_int_equal(pipe(in), 0);
    assert_int_equal(pipe(out), 0);
    pid_t pid = fork();
    if (pid == 0)
        become_child(in[0], out[1], role, transports, devices, number, netns);
    assert_true(pid > 0);
    close(in[0]);
    close(out[1]);
    *c = (Child){.pid = pid, .in = in[1], .out = out[0]};
}

void child_start_writer(Child *c, const char *transports, KvLink *reader) {
    KvRemote self;
    kvlink_describe(reader, &self);
    spawn(c, "write", transports, "", self.bytes, NULL);
    assert_true(write_all(c->in, &self, sizeof self) &&
                write_all(c->in, self.address, self.address_len) &&
                write_all(c->in, self.rkey, self.rkey_len));
}

void child_start(Child *c, const char *transports, const char *devices, uint64_t pool_bytes,
                 const char *netns) {
    spawn(c, "receive", transports, devices, pool_bytes, netns);
    read_all(c->out, &c->remote, sizeof c->remote);
    assert_true(c->remote.address_len < BLOB_MAX && c->remote.rkey_len < BLOB_MAX);
    void *address = xmalloc(c->remote.address_len), *rkey = xmalloc(c->remote.rkey_len);
    read_all(c->out, address, c->remote.address_len);
    read_all(c->out, rkey, c->remote.rkey_len);
    c->remote.address = address;
    c->remote.rkey = rkey;
}

bool child_verdict(Child *c) {
    char answer;
    read_all(c->out, &answer, 1);
    return answer == 'y';
}

static int child_end(Child *c) {
    int status = 0;
    close(c->in);
    for (int64_t end = clock_now_ms() + RIG_WAIT_MS; waitpid(c->pid, &status, WNOHANG) == 0;) {
        if (clock_now_ms() > end)
            kill(c->pid, SIGKILL);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    close(c->out);
    free((void *)c->remote.address);
    free((void *)c->remote.rkey);
    return status;
}

void child_kill(Child *c) {
    kill(c->pid, SIGKILL);
    child_end(c);
}

void child_stop(Child *c) {
    int status = child_end(c);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}
