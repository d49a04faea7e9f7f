/* Fuzzes the facts' texts: the first byte chooses the parser, and what is taken holds together. */
#include "deploy/baton/facts.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const Facts *f) {
    int list[FACTS_NODES];
    CHECK(f->n_nodes >= 0 && f->n_nodes <= FACTS_NODES && f->n_gpus <= FACTS_GPUS);
    CHECK(f->n_ucx >= 0 && f->n_ucx <= FACTS_UCX);
    for (int i = 0; i < f->n_nodes; i++)
        if (f->node[i].present)
            CHECK(f->node[i].socket >= 0 && f->node[i].socket < f->n_sockets &&
                  f->node[i].n_cores >= 0);
    CHECK(facts_usable_nodes(f, list) <= f->n_nodes);
    CHECK(facts_n_gpus(f) <= f->n_gpus);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const names[] = {"numactl.txt", "lscpu.txt", "gpus.csv",
                                        "topo.txt",    "ucx.txt",   "host.txt"};
    if (size < 1)
        return 0;
    static Facts f;
    facts_init(&f);
    char *text = xcalloc(size, 1);
    memcpy(text, data + 1, size - 1);
    Err err = {0};
    int rc = facts_parse(&f, names[data[0] % 6], text, &err);
    CHECK(rc == 0 || (err.code == rc && err.text[0]));
    if (rc == 0 && facts_derive(&f, 0, &err) == 0)
        check(&f);
    free(text);
    return 0;
}
