/* numactl -H: nodes with their processors, sizes and distances. Pure functions. */
#include "deploy/baton/facts_text.h"

#include <stdio.h>
#include <string.h>

/* Processors stand as "0 1 2" or as "0-2". None may be of two nodes. */
static int take_cpus(Facts *f, FactsText *t, int node, const char *list, Err *err) {
    FactsNode *n = &f->node[node];
    if (facts_cpus_count(&n->cpus) > 0)
        return facts_text_fail(t, err, "the processors of node %d are given twice", node);
    if (!facts_text_list(list, FACTS_CPUS, &n->cpus))
        return facts_text_fail(t, err, "expected processors below %d, found \"%.60s\"", FACTS_CPUS,
                               list);
    for (int i = 0; i < f->n_nodes; i++)
        if (i != node && facts_cpus_meet(&f->node[i].cpus, &n->cpus))
            return facts_text_fail(t, err, "nodes %d and %d have a processor in common", i, node);
    return 0;
}

static int take_megabytes(FactsText *t, const char *value, int64_t *mb, Err *err) {
    if (*mb >= 0)
        return facts_text_fail(t, err, "given twice");
    if (facts_text_quantity(value, 0, (int64_t)1 << 40, mb) && strstr(value, " MB"))
        return 0;
    return facts_text_fail(t, err, "expected megabytes such as \"515651 MB\", found \"%.60s\"",
                           value);
}

/* "node N cpus: ...", "node N size: ...", "node N free: ..." */
static int take_node(Facts *f, FactsText *t, char *line, Err *err) {
    char *colon = strchr(line, ':'), what[16] = "";
    int node = -1, end = 0;
    if (!colon || sscanf(line, "node %d %15[a-z]%n", &node, what, &end) != 2 || line + end != colon)
        return facts_text_fail(t, err, "expected \"node N cpus:\", size or free, found \"%.60s\"",
                               line);
    if (node < 0 || node >= FACTS_NODES)
        return facts_text_fail(t, err, "node %d: at most %d nodes are understood", node,
                               FACTS_NODES);
    FactsNode *n = &f->node[node];
    n->present = true;
    f->n_nodes = node >= f->n_nodes ? node + 1 : f->n_nodes;
    char *value = facts_text_trim(colon + 1);
    if (strcmp(what, "cpus") == 0)
        return take_cpus(f, t, node, value, err);
    if (strcmp(what, "size") == 0)
        return take_megabytes(t, value, &n->size_mb, err);
    if (strcmp(what, "free") == 0)
        return take_megabytes(t, value, &n->free_mb, err);
    return facts_text_fail(t, err, "node %d has no \"%s\"", node, what);
}

/* The header "node   0   1" names the columns. */
static int take_header(FactsText *t, char *line, int *column, int *n, Err *err) {
    facts_text_word(&line);
    *n = 0;
    for (char *word; (word = facts_text_word(&line));) {
        int64_t node;
        if (*n >= FACTS_NODES || !facts_text_int(word, 0, FACTS_NODES - 1, &node))
            return facts_text_fail(t, err, "expected node numbers, found \"%.60s\"", word);
        column[(*n)++] = (int)node;
    }
    return 0;
}

static int take_distances(Facts *f, FactsText *t, char *line, const int *column, int n, Err *err) {
    char *word = facts_text_word(&line);
    int64_t node, d;
    size_t len = word ? strlen(word) : 0;
    if (len < 2 || word[len - 1] != ':')
        return facts_text_fail(t, err, "expected a row of distances");
    word[len - 1] = 0;
    if (!facts_text_int(word, 0, FACTS_NODES - 1, &node))
        return facts_text_fail(t, err, "expected a node number, found \"%.60s\"", word);
    for (int i = 0; i < n; i++) {
        word = facts_text_word(&line);
        if (!word || !facts_text_int(word, 1, 255, &d))
            return facts_text_fail(t, err, "expected %d distances, found \"%.60s\" as number %d", n,
                                   word ? word : "", i + 1);
        f->distance[node][column[i]] = (int)d;
    }
    return 0;
}

int facts_numa_parse(Facts *f, FactsText *t, Err *err) {
    int column[FACTS_NODES], n_columns = -1, rc = 0;
    bool distances = false;
    for (char *line; rc == 0 && (line = facts_text_line(t));) {
        line += strspn(line, " \t");
        if (!*line || strncmp(line, "available:", 10) == 0 || strncmp(line, "No NUMA", 7) == 0)
            continue;
        if (strncmp(line, "node distances:", 15) == 0)
            distances = true;
        else if (!distances)
            rc = take_node(f, t, line, err);
        else if (n_columns < 0 && strncmp(line, "node", 4) == 0)
            rc = take_header(t, line, column, &n_columns, err);
        else
            rc = take_distances(f, t, line, column, n_columns < 0 ? 0 : n_columns, err);
    }
    return rc;
}
