/* How fast the tokenizer encodes: ordinary text, text its cache has not seen, and the runs that
 * make tokenizers quadratic.
 *
 * bench_tok [tokenizer.json [text.txt]], one thread. Each row: bytes, tokens, the best of three
 * times, MB/s, and the time per byte relative to the first row, which is the text repeated to 8 MB.
 */
#include "base/clock.h"
#include "model/tok.h"

#include <stdio.h>
#include <string.h>

enum { TEXT_BYTES = 8 << 20, RUN_BYTES = 1 << 20 };

typedef struct Bench {
    Tok *tok;
    TokScratch *scratch;
    double base_us; /* per byte, of the first row */
} Bench;

static void row(Bench *b, const char *name, const Buf *text) {
    int64_t best = INT64_MAX;
    size_t n_ids = 0;
    for (int i = 0; i < 3; i++) {
        TokIds ids = {0};
        Err err;
        int64_t start = clock_now_us();
        if (tok_encode(b->tok, b->scratch, text->data, text->len, true, SIZE_MAX, &ids, &err)) {
            printf("%-24s failed: %s\n", name, err.text);
            return;
        }
        int64_t us = clock_now_us() - start;
        if (us < best)
            best = us;
        n_ids = ids.n;
        tok_ids_done(&ids);
    }
    double per_byte = (double)best / (double)text->len;
    if (b->base_us == 0)
        b->base_us = per_byte;
    printf("%-24s %9zu bytes %9zu tokens %9.2f ms %8.2f MB/s %7.2f x\n", name, text->len, n_ids,
           (double)best / 1e3, 1 / per_byte, per_byte / b->base_us);
    fflush(stdout);
}

/* unit repeated up to n bytes, then tail. */
static void row_run(Bench *b, const char *name, const char *unit, const char *tail) {
    Buf text = {0};
    while (text.len < RUN_BYTES)
        buf_puts(&text, unit);
    buf_puts(&text, tail);
    row(b, name, &text);
    buf_done(&text);
}

/* Words of random letters, nearly all of them new to the cache. */
static void row_random_words(Bench *b) {
    Buf text = {0};
    uint64_t x = 88172645463325252u;
    while (text.len < TEXT_BYTES) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        char word[16];
        int n = 3 + (int)(x % 8);
        for (int i = 0; i < n; i++)
            word[i] = "etaoinshrdlucmfw"[x >> (4 * i + 3) & 15];
        buf_put(&text, word, (size_t)n);
        buf_puts(&text, x >> 60 ? " " : ".\n");
    }
    row(b, "random words", &text);
    buf_done(&text);
}

static int row_file(Bench *b, const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        return 1;
    }
    Buf once = {0}, text = {0};
    char chunk[4096];
    for (size_t n; (n = fread(chunk, 1, sizeof chunk, f)) > 0;)
        buf_put(&once, chunk, n);
    fclose(f);
    while (once.len && text.len < TEXT_BYTES)
        buf_put(&text, once.data, once.len);
    if (text.len)
        row(b, "text, repeated", &text);
    buf_done(&once);
    buf_done(&text);
    return 0;
}

int main(int argc, char **argv) {
    const char *json = argc > 1 ? argv[1] : "tests/models/tiny-glm52/fp8/tokenizer.json";
    Err err;
    Bench b = {0};
    int64_t start = clock_now_us();
    if (tok_open(&b.tok, json, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    printf("%-24s %9d rows %52.2f ms\n", "open", tok_size(b.tok),
           (double)(clock_now_us() - start) / 1e3);
    b.scratch = tok_scratch_new(b.tok);
    int rc = row_file(&b, argc > 2 ? argv[2] : "tests/models/tiny-glm52/eval/heldout.txt");
    if (rc == 0) {
        row_random_words(&b);
        row_run(&b, "letters", "a", "");
        row_run(&b, "letters, mixed", "abracadabra", "");
        row_run(&b, "chinese without spaces", "中文没有空格", "");
        row_run(&b, "spaces, then a letter", " ", "x");
        row_run(&b, "spaces of two widths", " \u3000", "x");
        row_run(&b, "tabs", "\t", "x");
        row_run(&b, "newlines", "\n", "x");
        row_run(&b, "newlines and spaces", "\n  \r", "    x");
        row_run(&b, "short runs of spaces", "          x", "");
        row_run(&b, "digits", "7", "");
        row_run(&b, "punctuation", "-", "\n");
        row_run(&b, "apostrophes", "'", "s");
        row_run(&b, "added tokens", "<|user|>", "");
        row_run(&b, "almost added tokens", "<|begin_of_transcription|", "");
        row_run(&b, "bytes that are not UTF-8", "\xff", "");
        row_run(&b, "cut characters", "\xe4\xb8", "");
    }
    tok_scratch_free(b.scratch);
    tok_close(b.tok);
    return rc;
}
