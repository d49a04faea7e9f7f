/* See checkpoint.h. */
#include "tests/unit/model/checkpoint.h"

#include "base/buf.h"

#include <dirent.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

Weights *checkpoint_open(const char *dir) {
    Weights *w;
    Err err = {0};
    if (weights_open(&w, dir, &err))
        fail_msg("%s", err.text);
    return w;
}

void checkpoint_new(Checkpoint *c) {
    strcpy(c->dir, "/tmp/baton-weights-XXXXXX");
    assert_non_null(mkdtemp(c->dir));
}

void checkpoint_free(Checkpoint *c) {
    DIR *d = opendir(c->dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.')
            assert_int_equal(unlink(checkpoint_path(c, e->d_name)), 0);
    closedir(d);
    assert_int_equal(rmdir(c->dir), 0);
}

const char *checkpoint_path(const Checkpoint *c, const char *name) {
    static char path[4][PATH_MAX];
    static int turn;
    char *out = path[turn++ % 4];
    assert_true(snprintf(out, PATH_MAX, "%s/%s", c->dir, name) < PATH_MAX);
    return out;
}

void checkpoint_bytes(const Checkpoint *c, const char *name, const void *bytes, size_t n) {
    FILE *f = fopen(checkpoint_path(c, name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

void checkpoint_json(const Checkpoint *c, const char *name, const char *text) {
    char *json = xstrdup(text);
    for (char *p = json; *p; p++)
        if (*p == '\'')
            *p = '"';
    checkpoint_bytes(c, name, json, strlen(json));
    free(json);
}

static void put_entry(Buf *header, const WeightsTensor *t, size_t begin) {
    buf_printf(header, "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[", header->len ? ',' : '{', t->name,
               t->dtype);
    for (int i = 0; i < t->n_dims; i++)
        buf_printf(header, "%s%lld", i ? "," : "", (long long)t->dim[i]);
    buf_printf(header, "],\"data_offsets\":[%zu,%zu]}", begin, begin + t->bytes);
}

void checkpoint_tensors(const Checkpoint *c, const char *name, const WeightsTensor *t, int n) {
    Buf header = {0}, file = {0}, data = {0};
    for (int i = 0; i < n; i++) {
        buf_put(&data, "\0\0\0\0\0\0\0", (8 - data.len % 8) % 8);
        put_entry(&header, &t[i], data.len);
        for (size_t k = 0; !t[i].data && k < t[i].bytes; k++)
            buf_put(&data, "", 1);
        if (t[i].data)
            buf_put(&data, t[i].data, t[i].bytes);
    }
    buf_puts(&header, n ? "}" : "{}");
    while (header.len % 8)
        buf_puts(&header, " ");
    uint64_t len = header.len;
    buf_put(&file, &len, 8);
    buf_put(&file, header.data, header.len);
    buf_put(&file, data.data, data.len);
    checkpoint_bytes(c, name, file.data, file.len);
    buf_done(&header);
    buf_done(&data);
    buf_done(&file);
}

void checkpoint_link(const Checkpoint *c, const char *name, const char *to) {
    char full[PATH_MAX];
    assert_non_null(realpath(to, full));
    assert_int_equal(symlink(full, checkpoint_path(c, name)), 0);
}
