/* Fuzzes base/conf: an INI file and, after a zero byte, one override. No input may crash it, every
 * refusal has words, and what it accepts prints as a file that reads back to the same values. */
#include "base/conf.h"

#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct Conf {
    char *host, *list;
    int64_t port, size, wait_ms;
    double ratio;
    bool trace;
    int device;
} Conf;

static const ConfOpt opts[] = {
    {"http", "host", CONF_STR, "::", 0, 0, NULL, "Address.", offsetof(Conf, host)},
    {"http", "port", CONF_INT, "80", -5, 65535, NULL, "Port.", offsetof(Conf, port)},
    {"kv", "size", CONF_SIZE, "1G", 0, 0, NULL, "Bytes.", offsetof(Conf, size)},
    {"kv", "wait", CONF_MS, "2s", 0, 1e12, NULL, "Time.", offsetof(Conf, wait_ms)},
    {"kv", "ratio", CONF_REAL, "0.5", 0, 0, NULL, "Share.", offsetof(Conf, ratio)},
    {"run", "device", CONF_ENUM, "cpu", 0, 0, "auto|cpu|cuda", "Device.", offsetof(Conf, device)},
    {"run", "trace", CONF_BOOL, "no", 0, 0, NULL, "Trace.", offsetof(Conf, trace)},
    {"run", "list", CONF_STR, "", 0, 0, NULL, "Text.", offsetof(Conf, list)},
    {0},
};
static const ConfTable table = {"fuzz", "tries files", opts};

/* Loads the bytes as a file through a descriptor in memory. */
static int load(const void *bytes, size_t n, const char *override, Conf *out, Err *err) {
    int fd = memfd_create("conf", MFD_CLOEXEC);
    CHECK(fd >= 0 && write(fd, bytes, n) == (ssize_t)n);
    char path[64];
    snprintf(path, sizeof path, "/dev/fd/%d", fd);
    int rc = conf_load(&table, path, &override, override ? 1 : 0, out, err);
    close(fd);
    return rc;
}

static bool same(const Conf *a, const Conf *b) {
    return strcmp(a->host, b->host) == 0 && strcmp(a->list, b->list) == 0 && a->port == b->port &&
           a->size == b->size && a->wait_ms == b->wait_ms && a->ratio == b->ratio &&
           a->trace == b->trace && a->device == b->device;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *zero = size ? memchr(data, 0, size) : NULL;
    size_t n = zero ? (size_t)(zero - data) : size, n_override = zero ? size - n - 1 : 0;
    char *override = NULL;
    if (zero) {
        override = xcalloc(1, n_override + 1);
        memcpy(override, zero + 1, n_override);
    }
    Conf a = {0}, b = {0};
    Err err = {0};
    if (load(data, n, override, &a, &err) != 0) {
        CHECK(err.code != 0 && err.text[0] && !a.host && !a.list);
    } else {
        char *text;
        size_t len;
        FILE *f = open_memstream(&text, &len);
        conf_print(&table, &a, f);
        fclose(f);
        CHECK(load(text, len, NULL, &b, &err) == 0 && same(&a, &b));
        conf_free(&table, &a);
        conf_free(&table, &b);
        free(text);
    }
    free(override);
    return 0;
}
