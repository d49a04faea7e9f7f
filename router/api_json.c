/* See api_int.h. A body's bytes to a JSON tree that is not much larger than they are. */
#include "router/api_int.h"

/* An empty object takes two hundred bytes of memory for two of text, so that a large body of them
 * would take gigabytes. The bounds are far above what a conversation or a prompt of a million token
 * ids needs. */
enum { MAX_CONTAINERS = 1 << 17, MAX_COMMAS = 2 << 20 };

/* Counts objects and arrays, and the commas between values, outside of strings. */
static bool is_too_complex(const char *body, size_t len) {
    size_t n_containers = 0, n_commas = 0;
    bool in_string = false;
    for (size_t i = 0; i < len; i++) {
        char c = body[i];
        if (in_string && c == '\\')
            i++;
        else if (c == '"')
            in_string = !in_string;
        else if (!in_string && (c == '{' || c == '['))
            n_containers++;
        else if (!in_string && c == ',')
            n_commas++;
    }
    return n_containers > MAX_CONTAINERS || n_commas > MAX_COMMAS;
}

json_t *api_json(const char *body, size_t len, ApiError *error) {
    static const char *const type = "invalid_request_error";
    json_error_t at;
    if (is_too_complex(body, len)) {
        api_refuse(error, 400, type, "body_too_complex", NULL,
                   "the body has more than %d objects and arrays or %d values", MAX_CONTAINERS,
                   MAX_COMMAS);
        return NULL;
    }
    json_t *root = json_loadb(body, len, JSON_REJECT_DUPLICATES, &at);
    if (!root) {
        api_refuse(error, 400, type, "invalid_json", NULL,
                   "the body is not valid JSON: line %d, column %d (byte %d): %s", at.line,
                   at.column, at.position, at.text);
        return NULL;
    }
    if (json_is_object(root))
        return root;
    json_decref(root);
    api_refuse(error, 400, type, "invalid_type", NULL, "the body must be a JSON object");
    return NULL;
}
