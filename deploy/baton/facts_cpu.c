/* lscpu: name, sockets, threads per core, instruction sets. Pure functions. */
#include "deploy/baton/facts_text.h"

#include <string.h>

static bool has_word(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += n)
        if ((at == list || at[-1] == ' ') && (at[n] == ' ' || !at[n]))
            return true;
    return false;
}

static void take_flags(Facts *f, const char *flags) {
    f->flags_known = true;
    f->has_amx = has_word(flags, "amx_tile") && has_word(flags, "amx_int8");
    f->has_vnni = has_word(flags, "avx512_vnni");
    f->has_avx2 = has_word(flags, "avx2");
}

static int take_number(FactsText *t, const char *key, const char *value, int high, int *out,
                       Err *err) {
    int64_t v;
    if (!facts_text_int(value, 0, high, &v))
        return facts_text_fail(t, err, "%s: expected a number up to %d, found \"%.60s\"", key, high,
                               value);
    *out = (int)v;
    return 0;
}

/* "NUMA node3 CPU(s): 96-127": when numactl.txt is missing. */
static int take_node_cpus(Facts *f, FactsText *t, const char *key, const char *value, Err *err) {
    int64_t node;
    FactsCpus cpus;
    if (!facts_text_quantity(key + strlen("NUMA node"), 0, FACTS_NODES - 1, &node))
        return facts_text_fail(t, err, "expected a node below %d, found \"%.60s\"", FACTS_NODES,
                               key);
    if (strcmp(value, "-") == 0)
        value = "";
    if (!facts_text_list(value, FACTS_CPUS, &cpus))
        return facts_text_fail(t, err, "%s: expected processors, found \"%.60s\"", key, value);
    FactsNode *n = &f->node[node];
    if (n->present) /* by numactl.txt, which comes first */
        return memcmp(&n->cpus, &cpus, sizeof cpus) == 0
                   ? 0
                   : facts_text_fail(t, err, "%s: numactl has other processors for this node", key);
    *n = (FactsNode){.present = true, .cpus = cpus, .size_mb = -1, .free_mb = -1};
    f->n_nodes = node >= f->n_nodes ? (int)node + 1 : f->n_nodes;
    return 0;
}

static int take_line(Facts *f, FactsText *t, char *line, Err *err) {
    char *colon = strchr(line, ':');
    if (!colon)
        return facts_text_fail(t, err, "expected \"name: value\", found \"%.60s\"", line);
    *colon = 0;
    char *key = facts_text_trim(line), *value = facts_text_trim(colon + 1);
    if (strcmp(key, "Model name") == 0)
        facts_text_copy(f->cpu_name, sizeof f->cpu_name, value);
    else if (strcmp(key, "CPU family") == 0)
        return take_number(t, key, value, 255, &f->family, err);
    else if (strcmp(key, "Model") == 0)
        return take_number(t, key, value, 255, &f->model, err);
    else if (strcmp(key, "Socket(s)") == 0 && strcmp(value, "-") != 0)
        return take_number(t, key, value, FACTS_NODES, &f->lscpu_sockets, err);
    else if (strcmp(key, "Thread(s) per core") == 0)
        return take_number(t, key, value, 8, &f->threads_per_core, err);
    else if (strcmp(key, "Hypervisor vendor") == 0)
        f->hypervisor = true;
    else if (strcmp(key, "Flags") == 0)
        take_flags(f, value);
    else if (strncmp(key, "NUMA node", 9) == 0 && key[9] >= '0' && key[9] <= '9')
        return take_node_cpus(f, t, key, value, err);
    return 0;
}

int facts_cpu_parse(Facts *f, FactsText *t, Err *err) {
    int rc = 0;
    for (char *line; rc == 0 && (line = facts_text_line(t));)
        if (*(line + strspn(line, " \t")))
            rc = take_line(f, t, line, err);
    return rc;
}
