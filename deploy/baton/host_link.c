/* What others know of the host: nvidia-smi of its GPUs, UCX of its transports. */
#include "deploy/baton/host_int.h"

#include "base/loop.h"
#include "proto/kvlink.h"

#include <uct/api/uct.h>

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { LINK_BYTES = 64 << 20, LINK_TIMEOUT_MS = 5000 };

/* ---- GPUs ---- */

/* Output of a command that ends within 20 s; nothing when it fails. */
static void run(const char *command, Buf *out) {
    char bytes[4096], *line = xasprintf("timeout 20 %s 2>/dev/null", command);
    FILE *f = popen(line, "re");
    free(line);
    if (!f)
        return;
    for (size_t n; (n = fread(bytes, 1, sizeof bytes, f)) > 0 && out->len < FACTS_FILE_MAX;)
        buf_put(out, bytes, n);
    if (pclose(f) != 0 || (out->len > 0 && memchr(out->data, 0, out->len)))
        buf_clear(out);
}

/* The node of the PCI device "00000000:1B:00.0"; -1 where the system does not tell. */
static int node_of(const char *root, const char *bus) {
    char id[32];
    size_t n = strlen(bus);
    int node = -1;
    if (n < 12 || n > 16)
        return -1;
    snprintf(id, sizeof id, "%s", bus + n - 12);
    for (char *p = id; *p; p++)
        *p = (char)tolower((unsigned char)*p);
    char *line = host_read_line(root, "/sys/bus/pci/devices/%s/numa_node", id);
    if (line && sscanf(line, "%d", &node) != 1)
        node = -1;
    free(line);
    return node >= 0 && node < FACTS_NODES ? node : -1;
}

/* nvidia-smi does not print nodes: a column of them is added, by the bus id, the third field. */
static void add_nodes(const char *root, char *text, Buf *out) {
    bool header = true;
    for (char *line; (line = strsep(&text, "\n"));) {
        char bus[32] = "";
        line[strcspn(line, "\r")] = 0;
        if (!*line)
            continue;
        sscanf(line, "%*[^,], %*[^,], %31[^, ]", bus);
        if (header)
            buf_printf(out, "%s, numa_node\n", line);
        else
            buf_printf(out, "%s, %d\n", line, node_of(root, bus));
        header = false;
    }
}

void host_put_gpus(const char *root, Buf *csv, Buf *topo) {
    Buf plain = {0};
    run("nvidia-smi --query-gpu=index,name,pci.bus_id,pcie.link.gen.max,pcie.link.gen.current,"
        "pcie.link.width.max,pcie.link.width.current,memory.total --format=csv",
        &plain);
    if (plain.len > 0) {
        add_nodes(root, plain.data, csv);
        run("nvidia-smi topo -m", topo);
    }
    buf_done(&plain);
}

/* ---- UCX ---- */

static void put_domain(uct_component_h component, const char *name, Buf *out) {
    uct_md_config_t *config;
    uct_md_h md;
    uct_tl_resource_desc_t *list;
    unsigned n;
    if (uct_md_config_read(component, NULL, NULL, &config) != UCS_OK)
        return;
    if (uct_md_open(component, name, config, &md) == UCS_OK) {
        if (uct_md_query_tl_resources(md, &list, &n) == UCS_OK) {
            for (unsigned i = 0; i < n; i++)
                buf_printf(out, "# Transport: %s\n# Device: %s\n", list[i].tl_name,
                           list[i].dev_name);
            uct_release_tl_resource_list(list);
        }
        uct_md_close(md);
    }
    uct_config_release(config);
}

static void put_component(uct_component_h component, Buf *out) {
    uct_component_attr_t attr = {.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT};
    if (uct_component_query(component, &attr) != UCS_OK || attr.md_resource_count == 0)
        return;
    uct_md_resource_desc_t *list = xcalloc(attr.md_resource_count, sizeof *list);
    attr = (uct_component_attr_t){.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCES,
                                  .md_resources = list,
                                  .md_resource_count = attr.md_resource_count};
    if (uct_component_query(component, &attr) == UCS_OK)
        for (unsigned i = 0; i < attr.md_resource_count; i++)
            put_domain(component, list[i].md_name, out);
    free(list);
}

void host_put_ucx(Buf *out) {
    uct_component_h *list;
    unsigned n;
    if (uct_query_components(&list, &n) != UCS_OK)
        return;
    for (unsigned i = 0; i < n; i++)
        put_component(list[i], out);
    uct_release_component_list(list);
}

static void on_notice(void *arg, const void *bytes, size_t len) {
    (void)arg;
    (void)bytes;
    (void)len;
}

void host_put_kv_link(Buf *out) {
    Loop *loop = loop_new();
    KvLinkConf conf = {.loop = loop,
                       .pool_bytes = LINK_BYTES,
                       .transports = "",
                       .devices = "",
                       .timeout_ms = LINK_TIMEOUT_MS,
                       .on_notice = on_notice};
    KvLink *link = NULL;
    double gb_per_s = 0;
    if (kvlink_open(&link, &conf, NULL) == 0 &&
        kvlink_selftest(link, LINK_BYTES, &gb_per_s, NULL) == 0) {
        const char *transport = kvlink_selftest_transport(link);
        if (*transport)
            buf_printf(out, "kv_transport: %s\n", transport);
        buf_printf(out, "kv_gb_per_s: %.2f\n", gb_per_s);
    }
    kvlink_close(link);
    loop_free(loop);
}
