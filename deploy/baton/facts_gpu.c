/* nvidia-smi: the list of GPUs as CSV and the matrix of their links. Pure functions. */
#include "deploy/baton/facts_text.h"

#include <ctype.h>
#include <string.h>

/* ---- CSV ---- */

typedef enum Column {
    COL_OTHER,
    COL_INDEX,
    COL_NAME,
    COL_BUS,
    COL_GEN_MAX,
    COL_GEN_NOW,
    COL_WIDTH_MAX,
    COL_WIDTH_NOW,
    COL_NODE,
    COL_MEMORY,
} Column;

enum { MAX_COLUMNS = 64 };

static Column column_of(const char *name) {
    static const struct {
        const char *name;
        Column column;
    } known[] = {
        {"index", COL_INDEX},
        {"name", COL_NAME},
        {"gpu_name", COL_NAME},
        {"pci.bus_id", COL_BUS},
        {"gpu_bus_id", COL_BUS},
        {"pcie.link.gen.max", COL_GEN_MAX},
        {"pcie.link.gen.current", COL_GEN_NOW},
        {"pcie.link.gen.gpucurrent", COL_GEN_NOW},
        {"pcie.link.width.max", COL_WIDTH_MAX},
        {"pcie.link.width.current", COL_WIDTH_NOW},
        {"numa_node", COL_NODE},
        {"memory.total", COL_MEMORY},
    };
    size_t n = strcspn(name, " ["); /* "memory.total [MiB]" */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strlen(known[i].name) == n && strncmp(known[i].name, name, n) == 0)
            return known[i].column;
    return COL_OTHER;
}

/* Cuts the next field off; NULL at the end of the line. */
static char *next_field(char **at) {
    char *field = *at;
    if (!field)
        return NULL;
    char *comma = strchr(field, ',');
    *at = comma ? comma + 1 : NULL;
    if (comma)
        *comma = 0;
    return facts_text_trim(field);
}

static bool not_told(const char *value) {
    return !*value || strcmp(value, "N/A") == 0 || strcmp(value, "[N/A]") == 0 ||
           strcmp(value, "[Not Supported]") == 0 || strcmp(value, "[Unknown Error]") == 0;
}

static bool take_int(const char *value, int low, int high, int *out) {
    int64_t v;
    if (strcmp(value, "-1") == 0 && low < 0)
        v = -1;
    else if (!facts_text_quantity(value, low < 0 ? 0 : low, high, &v))
        return false;
    *out = (int)v;
    return true;
}

static bool take_field(FactsGpu *g, Column c, const char *value, int *index) {
    switch (c) {
    case COL_INDEX:
        return take_int(value, 0, FACTS_GPUS - 1, index);
    case COL_NAME:
        facts_text_copy(g->name, sizeof g->name, value);
        return true;
    case COL_BUS:
        facts_text_copy(g->bus_id, sizeof g->bus_id, value);
        return true;
    case COL_GEN_MAX:
        return take_int(value, 1, 16, &g->gen_max);
    case COL_GEN_NOW:
        return take_int(value, 1, 16, &g->gen_now);
    case COL_WIDTH_MAX:
        return take_int(value, 1, 32, &g->width_max);
    case COL_WIDTH_NOW:
        return take_int(value, 1, 32, &g->width_now);
    case COL_NODE:
        return take_int(value, -1, FACTS_NODES - 1, &g->node);
    case COL_MEMORY:
        return facts_text_quantity(value, 1, (int64_t)1 << 32, &g->memory_mb);
    default:
        return true;
    }
}

static int take_row(Facts *f, FactsText *t, char *line, const Column *column, int n, int row,
                    Err *err) {
    FactsGpu g = {.node = -1, .present = true};
    int index = row, i = 0;
    for (char *value; (value = next_field(&line)); i++) {
        if (i >= n)
            return facts_text_fail(t, err, "more fields than the header's %d", n);
        if (!not_told(value) && !take_field(&g, column[i], value, &index))
            return facts_text_fail(t, err, "field %d: \"%.60s\" is out of range or no number",
                                   i + 1, value);
    }
    if (i < n)
        return facts_text_fail(t, err, "%d fields, the header has %d", i, n);
    if (index >= FACTS_GPUS)
        return facts_text_fail(t, err, "at most %d GPUs are understood", FACTS_GPUS);
    if (f->gpu[index].present)
        return facts_text_fail(t, err, "GPU %d is given twice", index);
    memcpy(g.link, f->gpu[index].link, sizeof g.link);
    memcpy(g.n_nvlink, f->gpu[index].n_nvlink, sizeof g.n_nvlink);
    if (g.node < 0)
        g.node = f->gpu[index].node;
    g.h2d_gb_per_s = f->gpu[index].h2d_gb_per_s;
    g.d2h_gb_per_s = f->gpu[index].d2h_gb_per_s;
    f->gpu[index] = g;
    f->n_gpus = index >= f->n_gpus ? index + 1 : f->n_gpus;
    return 0;
}

int facts_gpu_parse_csv(Facts *f, FactsText *t, Err *err) {
    Column column[MAX_COLUMNS];
    int n = 0, row = 0, rc = 0;
    for (char *line; rc == 0 && (line = facts_text_line(t));) {
        if (!*line)
            continue;
        if (n > 0) {
            rc = take_row(f, t, line, column, n, row++, err);
            continue;
        }
        bool named = false;
        for (char *name; (name = next_field(&line)); n++) {
            if (n == MAX_COLUMNS)
                return facts_text_fail(t, err, "more than %d columns", MAX_COLUMNS);
            column[n] = column_of(name);
            named |= column[n] == COL_NAME;
        }
        if (!named)
            return facts_text_fail(t, err, "expected a header with a column \"name\"");
    }
    return rc;
}

/* ---- links ---- */

/* "GPU12": 12; -1 for anything else. */
static int gpu_number(const char *word) {
    int64_t v;
    return strncmp(word, "GPU", 3) == 0 && facts_text_int(word + 3, 0, FACTS_GPUS - 1, &v) ? (int)v
                                                                                           : -1;
}

static bool link_of(const char *word, FactsLink *link, int *n_nvlink) {
    static const struct {
        const char *word;
        FactsLink link;
    } known[] = {{"X", FACTS_LINK_SELF},  {"PIX", FACTS_LINK_PIX},   {"PXB", FACTS_LINK_PXB},
                 {"PHB", FACTS_LINK_PHB}, {"NODE", FACTS_LINK_NODE}, {"SYS", FACTS_LINK_SYS},
                 {"SOC", FACTS_LINK_SYS}};
    int64_t v;
    *n_nvlink = 0;
    if (strncmp(word, "NV", 2) == 0 && facts_text_int(word + 2, 1, 64, &v)) {
        *link = FACTS_LINK_NV;
        *n_nvlink = (int)v;
        return true;
    }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].word, word) == 0) {
            *link = known[i].link;
            return true;
        }
    return false;
}

/* Columns of GPUs have their number, others (network cards) -1. "GPU NUMA ID" and the affinities
 * end the list. */
static int take_topo_header(FactsText *t, char *line, int *column, int *n, Err *err) {
    *n = 0;
    for (char *word; (word = facts_text_word(&line));) {
        int gpu = gpu_number(word);
        bool device = gpu >= 0 ||
                      (strncmp(word, "NIC", 3) == 0 && isdigit((unsigned char)word[3])) ||
                      strncmp(word, "mlx", 3) == 0;
        if (!device)
            break;
        if (*n == MAX_COLUMNS)
            return facts_text_fail(t, err, "more than %d columns", MAX_COLUMNS);
        for (int i = 0; gpu >= 0 && i < *n; i++)
            if (column[i] == gpu)
                return facts_text_fail(t, err, "GPU%d is given twice", gpu);
        column[(*n)++] = gpu;
    }
    return *n > 0 ? 0 : facts_text_fail(t, err, "expected a header with GPU0");
}

/* After the links: "CPU Affinity", "NUMA Affinity". */
static void take_affinity(FactsGpu *g, char *rest) {
    FactsCpus cpus;
    int64_t node;
    char *list = facts_text_word(&rest), *word = list ? facts_text_word(&rest) : NULL;
    if (word && facts_text_list(list, FACTS_CPUS, &cpus) &&
        facts_text_int(word, 0, FACTS_NODES - 1, &node) && g->node < 0)
        g->node = (int)node;
}

static int take_topo_row(Facts *f, FactsText *t, int gpu, char *line, const int *column, int n,
                         Err *err) {
    FactsGpu *g = &f->gpu[gpu];
    for (int i = 0; i < n; i++) {
        char *word = facts_text_word(&line);
        FactsLink link;
        int n_nvlink;
        if (!word)
            return facts_text_fail(t, err, "GPU%d: %d links, the header has %d", gpu, i, n);
        if (!link_of(word, &link, &n_nvlink))
            return facts_text_fail(
                t, err, "GPU%d: expected X, NV#, PIX, PXB, PHB, NODE or SYS, found \"%.60s\"", gpu,
                word);
        if (column[i] < 0)
            continue;
        if ((link == FACTS_LINK_SELF) != (column[i] == gpu))
            return facts_text_fail(t, err, "GPU%d: \"%.20s\" in the column of GPU%d", gpu, word,
                                   column[i]);
        g->link[column[i]] = link;
        g->n_nvlink[column[i]] = n_nvlink;
    }
    take_affinity(g, line);
    g->present = true; /* gpus.csv comes first, but may be missing */
    f->n_gpus = gpu >= f->n_gpus ? gpu + 1 : f->n_gpus;
    return 0;
}

int facts_gpu_parse_topo(Facts *f, FactsText *t, Err *err) {
    int column[MAX_COLUMNS], n = 0, rc = 0;
    bool seen[FACTS_GPUS] = {false};
    for (char *line; rc == 0 && (line = facts_text_line(t));) {
        char *at = line + strspn(line, " \t");
        if (strncmp(at, "Legend", 6) == 0)
            break;
        if (!*at)
            continue;
        if (n == 0) {
            rc = take_topo_header(t, at, column, &n, err);
            continue;
        }
        char *word = facts_text_word(&at);
        int gpu = word ? gpu_number(word) : -1;
        if (gpu < 0)
            continue; /* a network card */
        if (seen[gpu])
            return facts_text_fail(t, err, "GPU%d is given twice", gpu);
        seen[gpu] = true;
        f->links_known = true;
        rc = take_topo_row(f, t, gpu, at, column, n, err);
    }
    return rc;
}
