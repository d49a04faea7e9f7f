/* ucx_info -d: the transports that UCX has, with their devices. Pure functions. */
#include "deploy/baton/facts_text.h"

#include <string.h>

/* "#      Transport: posix" */
static char *value_of(char *line, const char *key) {
    char *at = line + strspn(line, "# \t");
    size_t n = strlen(key);
    return strncmp(at, key, n) == 0 && at[n] == ':' ? facts_text_trim(at + n + 1) : NULL;
}

int facts_ucx_parse(Facts *f, FactsText *t, Err *err) {
    for (char *line, *value; (line = facts_text_line(t));) {
        if (*line && *line != '#')
            return facts_text_fail(t, err, "expected lines that begin with #, found \"%.60s\"",
                                   line);
        if ((value = value_of(line, "Transport"))) {
            if (f->n_ucx == FACTS_UCX)
                return facts_text_fail(t, err, "more than %d transports", FACTS_UCX);
            facts_text_copy(f->ucx[f->n_ucx++].transport, sizeof f->ucx->transport, value);
        } else if ((value = value_of(line, "Device")) && f->n_ucx > 0) {
            facts_text_copy(f->ucx[f->n_ucx - 1].device, sizeof f->ucx->device, value);
        }
    }
    return 0;
}
