/* The split regex of tokenizer.json on PCRE2: translation, compilation, and the walk over the
 * pieces of a text.
 *
 * The compiled code is immutable and shared; match state lives in the caller's TokScratch.
 *
 * The regex is written for Oniguruma. PCRE2 reads the part of the syntax that split regexes use in
 * the same way, except that its \s also matches U+180E; so \s and \S are spelled out, and
 * constructs on which the two disagree are refused.
 *
 * Long runs stay linear: GLM's alternatives repeat single characters only, for which PCRE2 keeps
 * one counter and steps back through the run at most once per alternative ("\s*[\r\n]+", then
 * "\s+(?!\S)"), and the match that follows consumes the run but for its last character. The limits
 * below scale with the text so that such a run never meets them; they are there for regexes that do
 * not behave. */
#include "model/tok_int.h"

#include <ctype.h>
#include <string.h>

/* Unicode's White_Space, as Oniguruma's \s. */
#define WHITE_SPACE                                                                                \
    "\\t-\\r\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"       \
    "\\x{3000}"

enum {
    STEPS_BASE = 1000000, /* regex steps that any match may take, */
    STEPS_PER_BYTE = 16,  /* and more per byte of text */
    HEAP_KIB = 64 << 10,  /* backtracking memory of the interpreter */
    JIT_STACK_MIN = 32 << 10,
    JIT_STACK_MAX = 8 << 20,
};

static int regex_refuse(const char *field, const char *at, int n, Err *err) {
    return err_set(err, E_UNSUPPORTED, "%s: \"%.*s\" is not supported in a split regex", field, n,
                   at);
}

/* Translates the escape at p, a backslash, and returns its length; 0: refused. */
static int translate_escape(const char *p, bool in_class, Buf *out) {
    uint8_t c = (uint8_t)p[1];
    if (c == 's') {
        buf_puts(out, in_class ? WHITE_SPACE : "[" WHITE_SPACE "]");
    } else if (c == 'S') {
        buf_puts(out, in_class ? "\\S\\x{180e}" : "[^" WHITE_SPACE "]");
    } else if (ispunct(c) || c == ' ' || (c == 'x' && p[2] == '{') ||
               (isalpha(c) && strchr("dDpPrntf", c))) {
        buf_put(out, p, 2);
    } else {
        return 0;
    }
    return 2;
}

/* Rewrites an Oniguruma regex for PCRE2. */
static int translate(const char *regex, const char *field, Buf *out, Err *err) {
    const char *class_start = NULL; /* first byte after "[" or "[^" */
    for (const char *p = regex; *p;) {
        int n = 1;
        if (*p == '\\') {
            n = translate_escape(p, class_start, out);
            if (n == 0)
                return regex_refuse(field, p, p[1] & 0x80 ? 1 : 2, err);
        } else if (class_start) {
            if (*p == '[' || (*p == ']' && p == class_start) || strncmp(p, "&&", 2) == 0)
                return regex_refuse(field, p, 1, err);
            if (*p == ']')
                class_start = NULL;
            buf_put(out, p, 1);
        } else if (*p == '[') {
            n = p[1] == '^' ? 2 : 1;
            class_start = p + n;
            buf_put(out, p, (size_t)n);
        } else if (*p == '^' || *p == '$' || strncmp(p, "(*", 2) == 0) {
            return regex_refuse(field, p, *p == '(' ? 2 : 1, err);
        } else {
            buf_put(out, p, 1);
        }
        p += n;
    }
    return 0;
}

static int compile(pcre2_code **out, const char *regex, const char *field, Err *err) {
    int code;
    PCRE2_SIZE at;
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)regex, PCRE2_ZERO_TERMINATED,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    if (!re) {
        PCRE2_UCHAR text[160];
        pcre2_get_error_message(code, text, sizeof text);
        return err_set(err, E_FORMAT, "%s: %s", field, (const char *)text);
    }
    uint32_t empty;
    pcre2_pattern_info(re, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty) {
        pcre2_code_free(re);
        return err_set(err, E_UNSUPPORTED, "%s: the regex can match nothing", field);
    }
    pcre2_jit_compile(re, PCRE2_JIT_COMPLETE); /* without JIT the interpreter matches the same */
    *out = re;
    return 0;
}

int tok_regex_compile(pcre2_code **out, const char *regex, const char *field, Err *err) {
    if (strlen(regex) > TOK_REGEX_MAX)
        return err_set(err, E_LIMIT, "%s: longer than %d bytes", field, TOK_REGEX_MAX);
    Buf translated = {0};
    int rc = translate(regex, field, &translated, err);
    if (rc == 0)
        rc = compile(out, translated.data ? translated.data : "", field, err);
    buf_done(&translated);
    return rc;
}

void tok_split_init(TokScratch *s) {
    s->match = pcre2_match_data_create(1, NULL);
    s->context = pcre2_match_context_create(NULL);
    CHECK(s->match && s->context);
    pcre2_set_heap_limit(s->context, HEAP_KIB);
    s->jit_stack = pcre2_jit_stack_create(JIT_STACK_MIN, JIT_STACK_MAX, NULL);
    if (s->jit_stack)
        pcre2_jit_stack_assign(s->context, NULL, s->jit_stack);
}

void tok_split_done(TokScratch *s) {
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->context);
    pcre2_jit_stack_free(s->jit_stack);
}

void tok_split_start(TokScratch *s, TokSplit *split, const uint8_t *text, size_t len) {
    size_t steps = STEPS_BASE + STEPS_PER_BYTE * len;
    pcre2_set_match_limit(s->context, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
    *split = (TokSplit){.text = text, .len = len};
}

int tok_split_next(TokScratch *s, TokSplit *split, size_t *start, size_t *end, Err *err) {
    if (split->done == split->len)
        return 0;
    *start = split->done;
    if (split->found < split->found_end) {
        *end = split->done = split->found_end;
        split->found_end = 0;
        return 1;
    }
    int rc = pcre2_match(s->tok->regex, split->text, split->len, split->done, PCRE2_NO_UTF_CHECK,
                         s->match, s->context);
    if (rc == PCRE2_ERROR_NOMATCH) {
        *end = split->done = split->len;
        return 1;
    }
    if (rc < 0)
        return err_set(err, E_LIMIT, "split regex: gave up at byte %zu (pcre2 code %d)",
                       split->done, rc);
    const PCRE2_SIZE *match = pcre2_get_ovector_pointer(s->match);
    if (match[0] < split->done || match[1] <= match[0])
        return err_set(err, E_UNSUPPORTED, "split regex: matches nothing at byte %zu", split->done);
    if (match[0] > split->done) { /* what the regex skips is a piece of its own */
        split->found = match[0];
        split->found_end = match[1];
        *end = split->done = match[0];
        return 1;
    }
    *end = split->done = match[1];
    return 1;
}
