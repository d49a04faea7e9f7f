/* Fuzzes a safetensors file: the input is the header, and the last two bytes are the number of data
 * bytes, so that the length before it always fits; an odd last byte takes the input as a whole file
 * instead. What is handed out lies inside the data, fits its shape, and overlaps with nothing. */
#include "model/weights.h"

#include <string.h>

typedef struct Seen {
    const uint8_t *from, *to; /* the file */
    const uint8_t *end;       /* of the latest tensor that is not empty */
} Seen;

static int element_bytes(const char *dtype) {
    static const char *const name[] = {"F8_E4M3", "U8", "BF16", "F32", "I64"};
    static const int bytes[] = {1, 1, 2, 4, 8};
    for (size_t i = 0; i < 5; i++)
        if (!strcmp(name[i], dtype))
            return bytes[i];
    return 0;
}

static int on_tensor(void *ctx, const WeightsTensor *t, Err *err) {
    Seen *s = ctx;
    (void)err;
    CHECK(t->name && strlen(t->name) <= 512 && t->n_dims >= 0 && t->n_dims <= 4);
    CHECK(t->data >= s->from && t->data <= s->to && t->bytes <= (size_t)(s->to - t->data));
    size_t elements = 1, each = (size_t)element_bytes(t->dtype);
    for (int i = 0; i < t->n_dims; i++) {
        CHECK(t->dim[i] >= 0);
        elements *= (size_t)t->dim[i];
    }
    CHECK(each == 0 || (elements * each == t->bytes && (size_t)(t->data - s->from) % each == 0));
    if (t->bytes) {
        CHECK(!s->end || t->data >= s->end);
        s->end = t->data + t->bytes;
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2)
        return 0;
    bool whole = data[size - 1] & 1;
    uint64_t header = size - 2;
    size_t n_data = whole ? 0 : (size_t)data[size - 2] + 256 * (size_t)(data[size - 1] >> 1);
    size_t n = whole ? (size_t)header : 8 + (size_t)header + n_data;
    uint8_t *file = xcalloc(n + !n, 1);
    if (whole) {
        memcpy(file, data, n);
    } else {
        memcpy(file, &header, 8);
        memcpy(file + 8, data, (size_t)header);
    }
    Seen s = {file, file + n, NULL};
    Err err = {0};
    int rc = weights_parse(file, n, on_tensor, &s, &err);
    CHECK(rc == 0 || (err.code == rc && err.text[0] && !s.end));
    free(file);
    return 0;
}
