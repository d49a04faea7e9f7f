/* See hello.h. No state. Text that came from outside is quoted in errors only after its length and
 * characters were checked. */
#include "proto/hello.h"

#include <inttypes.h>
#include <stddef.h>
#include <string.h>

/* Fields that must be equal where both sides have them. */
typedef enum FieldKind {
    FIELD_U32, /* printed in decimal */
    FIELD_U64, /* a hash, printed in hexadecimal */
} FieldKind;

typedef struct Field {
    const char *name;
    FieldKind kind;
    size_t offset; /* in Baton__Hello */
} Field;

static const Field fields[] = {
    {"model_id", FIELD_U64, offsetof(Baton__Hello, model_id)},
    {"fingerprint", FIELD_U64, offsetof(Baton__Hello, fingerprint)},
    {"tokenizer_hash", FIELD_U64, offsetof(Baton__Hello, tokenizer_hash)},
    {"tp", FIELD_U32, offsetof(Baton__Hello, tp)},
    {"page_tokens", FIELD_U32, offsetof(Baton__Hello, page_tokens)},
    {"kv_layout_hash", FIELD_U64, offsetof(Baton__Hello, kv_layout_hash)},
    {"hidden", FIELD_U32, offsetof(Baton__Hello, hidden)},
    {"n_experts", FIELD_U32, offsetof(Baton__Hello, n_experts)},
};

const char *hello_role_name(Baton__Role role) {
    static const char *const names[] = {"none", "router", "prefill", "decode", "expertd"};
    return role >= 0 && (size_t)role < sizeof names / sizeof *names ? names[role] : "none";
}

static bool text_ok(const char *s, size_t min, size_t max) {
    size_t n = s ? strlen(s) : 0;
    for (size_t i = 0; i < n && i <= max; i++)
        if (s[i] <= ' ' || s[i] > '~')
            return false;
    return n >= min && n <= max;
}

/* What can be said of a hello alone. */
static int check_form(const Baton__Hello *h, Err *err) {
    if (!text_ok(h->name, 1, HELLO_NAME_MAX))
        return err_set(err, E_MISMATCH, "hello without a printable name of at most %d characters",
                       HELLO_NAME_MAX);
    if (h->role < BATON__ROLE__ROLE_ROUTER || h->role > BATON__ROLE__ROLE_EXPERTD)
        return err_set(err, E_MISMATCH, "%s has no known role", h->name);
    if (h->generation == 0)
        return err_set(err, E_MISMATCH, "%s has no generation", h->name);
    if (!text_ok(h->kv_dtype, 0, 15))
        return err_set(err, E_MISMATCH, "%s has an unreadable kv_dtype", h->name);
    if (!text_ok(h->shm, 0, HELLO_NAME_MAX))
        return err_set(err, E_MISMATCH, "%s has an unreadable shm", h->name);
    if (!text_ok(h->expert_format, 0, 31))
        return err_set(err, E_MISMATCH, "%s has an unreadable expert_format", h->name);
    if (h->role == BATON__ROLE__ROLE_EXPERTD && h->shard >= h->n_shards)
        return err_set(err, E_MISMATCH, "%s has shard %u of %u", h->name, h->shard, h->n_shards);
    return 0;
}

/* The pairs of the protocol, in either order. */
static bool roles_talk(Baton__Role a, Baton__Role b) {
    bool a_worker = a == BATON__ROLE__ROLE_PREFILL || a == BATON__ROLE__ROLE_DECODE;
    bool b_worker = b == BATON__ROLE__ROLE_PREFILL || b == BATON__ROLE__ROLE_DECODE;
    return a_worker != b_worker || (a_worker && a != b);
}

static uint64_t field_value(const Baton__Hello *h, const Field *f) {
    const char *at = (const char *)h + f->offset;
    return f->kind == FIELD_U32 ? *(const uint32_t *)at : *(const uint64_t *)at;
}

static int check_field(const Baton__Hello *mine, const Baton__Hello *theirs, const Field *f,
                       Err *err) {
    uint64_t a = field_value(mine, f), b = field_value(theirs, f);
    if (a == b || a == 0 || b == 0)
        return 0;
    if (f->kind == FIELD_U32)
        return err_set(err, E_MISMATCH, "%s has %s %" PRIu64 ", %s expects %" PRIu64, theirs->name,
                       f->name, b, mine->name, a);
    return err_set(err, E_MISMATCH, "%s has %s %016" PRIx64 ", %s expects %016" PRIx64,
                   theirs->name, f->name, b, mine->name, a);
}

int hello_check(const Baton__Hello *mine, const Baton__Hello *theirs, Err *err) {
    int rc = check_form(theirs, err);
    if (rc)
        return rc;
    if (theirs->protocol != mine->protocol)
        return err_set(err, E_MISMATCH, "%s has protocol %u, %s expects %u", theirs->name,
                       theirs->protocol, mine->name, mine->protocol);
    if (!roles_talk(mine->role, theirs->role))
        return err_set(err, E_MISMATCH, "%s has role %s, %s is a %s and does not talk to it",
                       theirs->name, hello_role_name(theirs->role), mine->name,
                       hello_role_name(mine->role));
    /* Before kv_layout_hash, which differs with it and says less. */
    const char *a = mine->kv_dtype, *b = theirs->kv_dtype;
    if (a[0] && b[0] && strcmp(a, b) != 0)
        return err_set(err, E_MISMATCH, "%s has kv_dtype %s, %s expects %s", theirs->name, b,
                       mine->name, a);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((rc = check_field(mine, theirs, &fields[i], err)))
            return rc;
    return 0;
}

int hello_check_pair(const Baton__Hello *prefill, const Baton__Hello *decode, Err *err) {
    if (prefill->role != BATON__ROLE__ROLE_PREFILL || decode->role != BATON__ROLE__ROLE_DECODE)
        return err_set(err, E_MISMATCH, "%s and %s are a %s and a %s, not a prefill and a decode",
                       prefill->name, decode->name, hello_role_name(prefill->role),
                       hello_role_name(decode->role));
    return hello_check(prefill, decode, err);
}

bool hello_same_process(const Baton__Hello *a, const Baton__Hello *b) {
    return a->role == b->role && a->generation == b->generation && strcmp(a->name, b->name) == 0;
}

Baton__Hello *hello_copy(const Baton__Hello *h) {
    Baton__Hello *copy = xmalloc(sizeof *copy);
    *copy = *h;
    copy->name = xstrdup(h->name);
    copy->kv_dtype = xstrdup(h->kv_dtype);
    copy->model = xstrdup(h->model);
    copy->expert_format = xstrdup(h->expert_format);
    copy->shm = xstrdup(h->shm);
    if (h->held.len) {
        copy->held.data = xmalloc(h->held.len);
        memcpy(copy->held.data, h->held.data, h->held.len);
    }
    /* Fields of a later protocol are of no use here, and need not even be well formed. */
    copy->base.n_unknown_fields = 0;
    copy->base.unknown_fields = NULL;
    return copy;
}

void hello_free(Baton__Hello *h) {
    if (h)
        baton__hello__free_unpacked(h, NULL);
}
