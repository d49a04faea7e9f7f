/* Fuzzes foreign options: whatever is taken becomes config files that the daemons' own checks
 * pass. */
#include "deploy/baton/sglang.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = xcalloc(size + 1, 1);
    memcpy(text, data, size);
    Sglang s;
    Err err = {0};
    int rc = sglang_read(&s, "fuzz", text, &err);
    CHECK(rc == 0 || (err.code == rc && err.text[0]));
    if (rc == 0) {
        ConfDoc *docs;
        int n;
        Services services = {0};
        sglang_docs(&s, &docs, &n);
        CHECK(services_add_docs(&services, docs, n, &err) == 0);
        services_done(&services);
        for (int i = 0; i < n; i++)
            conf_doc_done(&docs[i]);
        free(docs);
        sglang_done(&s);
    }
    free(text);
    return 0;
}
