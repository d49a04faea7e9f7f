/* Page hashes: equal for equal KV wherever it stands, different for any byte of a present row,
 * blind to rows that are not there. And the arithmetic of pages. */
#include "kernels/kv_hash.h"

#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LAYERS = 3 };
static const int INDEX_SLOT[LAYERS] = {0, -1, 1};

typedef struct Pool {
    KvLayout layout;
    uint8_t *bytes;
} Pool;

static Pool pool_new(Dtype dtype, int n_pages) {
    Pool p = {.layout = {.dtype = dtype,
                         .n_slots = LAYERS,
                         .n_index = 2,
                         .kv_lora = 128,
                         .rope = 8,
                         .index_dim = 16,
                         .n_pages = n_pages}};
    p.bytes = xcalloc(1, kv_pool_bytes(&p.layout));
    return p;
}

static void pool_done(Pool *p) {
    free(p->bytes);
}

static uint64_t hash_page(const Pool *p, int32_t page, int rows) {
    return kv_hash_page(&p->layout, INDEX_SLOT, p->bytes, page, rows);
}

/* All bytes of rows [0, rows) of a page, in order. */
static void fill(Pool *p, int32_t page, int rows, int seed) {
    int k = seed;
    for (int layer = 0; layer < LAYERS; layer++) {
        KvRange r[3];
        int n = kv_layout_ranges(&p->layout, layer, INDEX_SLOT[layer], page, 0, rows, r);
        for (int i = 0; i < n; i++)
            for (uint64_t b = 0; b < r[i].bytes; b++)
                p->bytes[r[i].offset + b] = (uint8_t)(k++ * 37 >> 2);
    }
}

static const Dtype DTYPES[] = {DT_F32, DT_BF16, DT_F8E4M3};

static void test_equal_kv_hashes_equal_anywhere(void **state) {
    (void)state;
    for (int t = 0; t < 3; t++) {
        Pool a = pool_new(DTYPES[t], 4), b = pool_new(DTYPES[t], 9);
        memset(b.bytes, 0xaa, kv_pool_bytes(&b.layout));
        fill(&a, 1, 40, 3);
        fill(&b, 7, 40, 3);
        assert_true(hash_page(&a, 1, 40) == hash_page(&b, 7, 40));
        assert_true(hash_page(&a, 1, 40) != hash_page(&a, 1, 41));
        assert_true(hash_page(&a, 1, 40) != hash_page(&a, 2, 40));
        pool_done(&a);
        pool_done(&b);
    }
}

static void test_every_byte_of_a_row_counts_and_no_other(void **state) {
    (void)state;
    for (int t = 0; t < 3; t++) {
        Pool p = pool_new(DTYPES[t], 2);
        fill(&p, 1, 64, 5);
        uint64_t before = hash_page(&p, 1, 3), size = kv_pool_bytes(&p.layout);
        uint8_t *inside = xcalloc(1, size);
        for (int layer = 0; layer < LAYERS; layer++) {
            KvRange r[3];
            int n = kv_layout_ranges(&p.layout, layer, INDEX_SLOT[layer], 1, 0, 3, r);
            for (int i = 0; i < n; i++)
                memset(inside + r[i].offset, 1, r[i].bytes);
        }
        for (uint64_t at = 0; at < size; at++) {
            p.bytes[at] ^= 0x10;
            bool same = hash_page(&p, 1, 3) == before;
            assert_int_equal(same, !inside[at]);
            p.bytes[at] ^= 0x10;
            if (!inside[at])
                at += 60; /* the rest is large and all alike */
        }
        free(inside);
        pool_done(&p);
    }
}

static void test_pages_of_positions(void **state) {
    (void)state;
    assert_int_equal(kv_pages_of(0), 0);
    assert_int_equal(kv_pages_of(1), 1);
    assert_int_equal(kv_pages_of(64), 1);
    assert_int_equal(kv_pages_of(65), 2);
    assert_int_equal(kv_page_rows(130, 0), 64);
    assert_int_equal(kv_page_rows(130, 2), 2);
    assert_int_equal(kv_page_rows(128, 1), 64);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_kv_hashes_equal_anywhere),
        cmocka_unit_test(test_every_byte_of_a_row_counts_and_no_other),
        cmocka_unit_test(test_pages_of_positions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
