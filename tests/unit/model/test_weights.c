/* Checkpoints: the tiny ones, the fingerprint under resharding, and directories that are refused.
 */
#include "tests/unit/model/checkpoint.h"

#include "base/buf.h"

#include <jansson.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define TINY     "tests/models/tiny-glm52/"
#define INDEX    "model.safetensors.index.json"

/* ---- the tiny checkpoints ---- */

static json_t *read_index(const char *dir) {
    char path[128];
    snprintf(path, sizeof path, "%s/" INDEX, dir);
    json_t *root = json_load_file(path, 0, NULL), *map = json_object_get(root, "weight_map");
    assert_non_null(map);
    json_incref(map);
    json_decref(root);
    return map;
}

static void test_every_name_is_found(void **state) {
    (void)state;
    const char *const dir[] = {TINY "fp8", TINY "mixed"};
    const size_t count[] = {1006, 1678};
    for (size_t k = 0; k < 2; k++) {
        Weights *w = checkpoint_open(dir[k]);
        json_t *map = read_index(dir[k]), *file;
        const char *name;
        assert_int_equal(json_object_size(map), count[k]);
        json_object_foreach(map, name, file) {
            const WeightsTensor *t = weights_find(w, name);
            assert_non_null(t);
            assert_string_equal(t->name, name);
        }
        assert_null(weights_find(w, "model.norm"));
        assert_null(weights_find(w, ""));
        assert_int_equal(weights_shape(w)->hidden, 256);
        json_decref(map);
        weights_close(w);
    }
    weights_close(NULL);
}

/* ---- fingerprint ---- */

enum { N_TINY = 1006 };

/* All tensors of an open checkpoint, in the order of the index. */
static void collect(const Weights *w, const char *dir, WeightsTensor *out) {
    json_t *map = read_index(dir), *file;
    const char *name;
    int n = 0;
    json_object_foreach(map, name, file) out[n++] = *weights_find(w, name);
    assert_int_equal(n, N_TINY);
    json_decref(map);
}

/* Deals the tensors out to n_files files, last first, and writes the index. */
static void reshard(const Checkpoint *c, const WeightsTensor *t, int n_files) {
    Buf index = {0};
    buf_puts(&index, "{'metadata':{'total_size':1},'weight_map':{");
    for (int f = 0; f < n_files; f++) {
        WeightsTensor *part = xcalloc(N_TINY, sizeof *part);
        char file[32];
        int n = 0;
        snprintf(file, sizeof file, "part-%d", f);
        for (int i = N_TINY - 1; i >= 0; i--)
            if (i % n_files == f) {
                buf_printf(&index, "%s'%s':'%s'", n || f ? "," : "", t[i].name, file);
                part[n++] = t[i];
            }
        checkpoint_tensors(c, file, part, n);
        free(part);
    }
    buf_puts(&index, "}}");
    checkpoint_json(c, INDEX, index.data);
    buf_done(&index);
}

static uint64_t fingerprint(const char *dir) {
    Weights *w = checkpoint_open(dir);
    uint64_t sum = weights_fingerprint(w);
    weights_close(w);
    return sum;
}

static void test_fingerprint_knows_the_content(void **state) {
    (void)state;
    uint64_t fp8 = fingerprint(TINY "fp8"), mixed = fingerprint(TINY "mixed");
    assert_true(fp8 != 0 && mixed != 0 && fp8 != mixed);
    assert_true(fp8 == fingerprint(TINY "fp8"));
}

static void test_fingerprint_ignores_sharding(void **state) {
    (void)state;
    Checkpoint c;
    Weights *w = checkpoint_open(TINY "fp8");
    uint64_t want = weights_fingerprint(w);
    WeightsTensor *t = xcalloc(N_TINY, sizeof *t);
    collect(w, TINY "fp8", t);
    for (int n_files = 1; n_files <= 5; n_files += 2) {
        checkpoint_new(&c);
        checkpoint_link(&c, "config.json", TINY "fp8/config.json");
        reshard(&c, t, n_files);
        assert_true(fingerprint(c.dir) == want);
        checkpoint_free(&c);
    }
    checkpoint_new(&c);
    checkpoint_link(&c, "config.json", TINY "fp8/config.json");
    checkpoint_tensors(&c, "model.safetensors", t, N_TINY);
    assert_true(fingerprint(c.dir) == want);
    checkpoint_free(&c);
    free(t);
    weights_close(w);
}

static uint64_t model_id(const char *dir) {
    Weights *w = checkpoint_open(dir);
    uint64_t id = weights_id(w);
    weights_close(w);
    return id;
}

/* A copy of t[i] with its last byte changed stands in for it. */
static uint64_t id_with_changed(Checkpoint *c, WeightsTensor *t, int i) {
    const uint8_t *old = t[i].data;
    uint8_t *data = memcpy(xmalloc(t[i].bytes), old, t[i].bytes);
    data[t[i].bytes - 1] ^= 1;
    t[i].data = data;
    checkpoint_tensors(c, "model.safetensors", t, N_TINY);
    t[i].data = old;
    free(data);
    return model_id(c->dir);
}

/* The id is the model's: the format of its experts does not show in it, a change of its routing
 * does. */
static void test_id_knows_the_model(void **state) {
    (void)state;
    static const struct {
        const char *name;
        bool shows;
    } changes[] = {{"model.layers.3.mlp.gate.e_score_correction_bias", true},
                   {"model.layers.8.input_layernorm.weight", true},
                   {"model.norm.weight", true},
                   {"model.layers.3.mlp.experts.2.up_proj.weight", false}};
    Checkpoint c;
    Weights *w = checkpoint_open(TINY "fp8");
    uint64_t id = weights_id(w);
    assert_true(id != 0 && id == model_id(TINY "mixed") && id != weights_fingerprint(w));
    WeightsTensor *t = xcalloc(N_TINY, sizeof *t);
    collect(w, TINY "fp8", t);
    checkpoint_new(&c);
    checkpoint_link(&c, "config.json", TINY "fp8/config.json");
    for (size_t k = 0; k < COUNT(changes); k++) {
        int i = 0;
        while (strcmp(t[i].name, changes[k].name))
            i++;
        assert_true((id_with_changed(&c, t, i) != id) == changes[k].shows);
    }
    checkpoint_free(&c);
    free(t);
    weights_close(w);
}

static void test_fingerprint_sees_changes(void **state) {
    (void)state;
    uint8_t data[20000] = {0}, scalar[4] = {0};
    WeightsTensor t[] = {{"a", "U8", 2, {200, 100}, data, sizeof data},
                         {"b", "F32", 0, {0}, scalar, sizeof scalar}};
    uint64_t seen[10];
    int n = 0;
    Checkpoint c;
    checkpoint_new(&c);
    checkpoint_link(&c, "config.json", TINY "fp8/config.json");
    for (int change = 0; change < 8; change++) {
        data[0] = change == 1;
        data[4095] = change == 2;
        data[sizeof data - 1] = change == 3;
        scalar[3] = change == 4;
        t[0].dim[0] = change == 5 ? 100 : 200;
        t[0].dim[1] = change == 5 ? 200 : 100;
        t[0].dtype = change == 6 ? "I8" : "U8";
        t[0].name = change == 7 ? "aa" : "a";
        checkpoint_tensors(&c, "model.safetensors", t, 2);
        seen[n++] = fingerprint(c.dir);
    }
    checkpoint_tensors(&c, "model.safetensors", t, 1);
    seen[n++] = fingerprint(c.dir);
    json_t *config = json_load_file(TINY "fp8/config.json", 0, NULL);
    json_object_set_new(config, "rms_norm_eps", json_real(1e-6));
    assert_int_equal(unlink(checkpoint_path(&c, "config.json")), 0);
    assert_int_equal(json_dump_file(config, checkpoint_path(&c, "config.json"), 0), 0);
    seen[n++] = fingerprint(c.dir);
    json_decref(config);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            assert_true(seen[i] != seen[k]);
    checkpoint_free(&c);
}

/* ---- directories that are refused ---- */

/* Two shards: x in "one", y and z in "two". */
static const WeightsTensor xyz[] = {CHECKPOINT_ZEROS("x", "U8", 1, 1, 8, 0),
                                    CHECKPOINT_ZEROS("y", "U8", 1, 1, 8, 0),
                                    CHECKPOINT_ZEROS("z", "BF16", 2, 1, 8, 0)};

static const struct {
    const char *index;
    int rc;
    const char *error;
} indexes[] = {
    {"{'weight_map':{'x':'one','y':'two','z':'two'}}", 0, NULL},
    {"{'weight_map':{'z':'two','x':'one','y':'two'}}", 0, NULL},
    {"{'weight_map':{'x':'one','y':'two'}}", E_MISMATCH, "two: z is not in the index"},
    {"{'weight_map':{'x':'two','y':'two','z':'two'}}", E_MISMATCH, INDEX ": x is not in two"},
    {"{'weight_map':{'x':'one','y':'one','z':'two'}}", E_MISMATCH, INDEX ": y is not in one"},
    {"{'weight_map':{'x':'one','y':'two','z':'two','q':'two'}}", E_MISMATCH,
     INDEX ": q is not in two"},
    {"{'weight_map':{'x':'one','y':'copy','z':'two'}}", E_FORMAT, "y stands in both "},
    {"{'weight_map':{'x':'one','y':'two','z':'three'}}", E_IO, "/three: No such file"},
    {"{'weight_map':{'x':'../one'}}", E_FORMAT, INDEX ": file \"../one\": expected a plain name"},
    {"{'weight_map':{'x':'/etc/passwd'}}", E_FORMAT,
     INDEX ": file \"/etc/passwd\": expected a plain name"},
    {"{'weight_map':{'x':'..'}}", E_FORMAT, INDEX ": file \"..\": expected a plain name"},
    {"{'weight_map':{'x':'.'}}", E_FORMAT, INDEX ": file \".\": expected a plain name"},
    {"{'weight_map':{'x':''}}", E_FORMAT, INDEX ": file \"\": expected a plain name"},
    {"{'weight_map':{'x':7}}", E_FORMAT, INDEX ": x: expected a file name"},
    {"{'weight_map':{'x':'one','x':'one'}}", E_FORMAT, "duplicate object key"},
    {"{'weight_map':['x']}", E_FORMAT, "weight_map: expected an object"},
    {"{}", E_FORMAT, "weight_map: expected an object"},
    {"[]", E_FORMAT, "weight_map: expected an object"},
    {"{'weight_map':", E_FORMAT, INDEX ": line 1: "},
    {"{'weight_map':{'x':'short'}}", E_FORMAT, "/short: 3 bytes: too short"},
    {"{'weight_map':{'x':'folder'}}", E_IO, "/folder is not a file"},
    {"{'weight_map':{'x':'cut'}}", E_FORMAT, "/cut: x: "},
    {"{'weight_map':{'x':'text'}}", E_FORMAT, "/text: header length "},
};

static void must_refuse(const char *dir, int code, const char *error) {
    Weights *w = NULL;
    Err err = {0};
    int rc = weights_open(&w, dir, &err);
    if (rc != code || err.code != rc || !strstr(err.text, error))
        fail_msg("expected %d \"%s\", got %d \"%s\"", code, error, rc, err.text);
    assert_null(w);
}

static void test_indexes(void **state) {
    (void)state;
    Checkpoint c;
    checkpoint_new(&c);
    checkpoint_link(&c, "config.json", TINY "fp8/config.json");
    checkpoint_tensors(&c, "one", xyz, 1);
    checkpoint_tensors(&c, "two", xyz + 1, 2);
    checkpoint_tensors(&c, "copy", xyz + 1, 1);
    checkpoint_tensors(&c, "cut", xyz, 1);
    struct stat st;
    assert_int_equal(stat(checkpoint_path(&c, "cut"), &st), 0);
    assert_int_equal(truncate(checkpoint_path(&c, "cut"), st.st_size - 1), 0);
    checkpoint_bytes(&c, "short", "abc", 3);
    checkpoint_bytes(&c, "text", "{\"weight_map\":{}}", 17);
    assert_int_equal(mkdir(checkpoint_path(&c, "folder"), 0700), 0);
    for (size_t i = 0; i < COUNT(indexes); i++) {
        checkpoint_json(&c, INDEX, indexes[i].index);
        if (indexes[i].rc)
            must_refuse(c.dir, indexes[i].rc, indexes[i].error);
        else
            weights_close(checkpoint_open(c.dir));
    }
    Buf b = {0};
    buf_puts(&b, "{'weight_map':{'x':'");
    for (int i = 0; i < 5000; i++)
        buf_puts(&b, "x");
    buf_puts(&b, "'}}");
    checkpoint_json(&c, INDEX, b.data);
    must_refuse(c.dir, E_LIMIT, "name too long");
    buf_done(&b);
    assert_int_equal(rmdir(checkpoint_path(&c, "folder")), 0);
    checkpoint_free(&c);
}

static void test_folders(void **state) {
    (void)state;
    Checkpoint c;
    checkpoint_new(&c);
    must_refuse("tests/models/nowhere", E_IO, "tests/models/nowhere/config.json");
    must_refuse(c.dir, E_IO, "/config.json");
    checkpoint_json(&c, "config.json", "{'model_type':'llama'}");
    must_refuse(c.dir, E_UNSUPPORTED, "/config.json: model_type: expected \"glm_moe_dsa\"");
    assert_int_equal(unlink(checkpoint_path(&c, "config.json")), 0);
    checkpoint_link(&c, "config.json", TINY "fp8/config.json");
    must_refuse(c.dir, E_IO, "/model.safetensors: No such file");
    checkpoint_bytes(&c, "model.safetensors", "", 0);
    must_refuse(c.dir, E_FORMAT, "/model.safetensors: 0 bytes: too short");
    checkpoint_tensors(&c, "model.safetensors", xyz, 0);
    Weights *w = checkpoint_open(c.dir); /* what is missing shows when it is asked for */
    assert_null(weights_find(w, "x"));
    weights_close(w);
    char *dir = xcalloc(1, 5001);
    memset(dir, 'd', 5000);
    must_refuse(dir, E_LIMIT, "path too long");
    free(dir);
    checkpoint_free(&c);
}

/* Shards may be links, as download caches lay them out. */
static void test_links(void **state) {
    (void)state;
    Checkpoint c;
    checkpoint_new(&c);
    checkpoint_link(&c, "config.json", TINY "fp8/config.json");
    checkpoint_link(&c, INDEX, TINY "fp8/" INDEX);
    checkpoint_link(&c, "model-00001-of-00002.safetensors",
                    TINY "fp8/model-00001-of-00002.safetensors");
    must_refuse(c.dir, E_IO, "model-00002-of-00002.safetensors: No such file");
    checkpoint_link(&c, "model-00002-of-00002.safetensors",
                    TINY "fp8/model-00002-of-00002.safetensors");
    assert_true(fingerprint(c.dir) == fingerprint(TINY "fp8"));
    checkpoint_free(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_name_is_found),
        cmocka_unit_test(test_fingerprint_knows_the_content),
        cmocka_unit_test(test_fingerprint_ignores_sharding),
        cmocka_unit_test(test_fingerprint_sees_changes),
        cmocka_unit_test(test_id_knows_the_model),
        cmocka_unit_test(test_indexes),
        cmocka_unit_test(test_folders),
        cmocka_unit_test(test_links),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
