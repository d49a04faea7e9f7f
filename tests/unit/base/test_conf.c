/* base/conf: precedence, refusals with file and line, printing that reads back, the shared command
 * line. */
#include "base/conf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Conf {
    char *host, *model;
    int64_t port, kv_bytes, wait_ms;
    double ratio;
    bool trace;
    int device;
} Conf;

#define AT(field) offsetof(Conf, field)
static const ConfOpt opts[] = {
    {"http", "host", CONF_STR, "127.0.0.1", 0, 0, NULL, "Address to bind.", AT(host)},
    {"http", "port", CONF_INT, "8080", 0, 65535, NULL, "Port to bind; 0 takes any free one.",
     AT(port)},
    {"kv", "size", CONF_SIZE, "16G", 1024, 1e13, NULL, "Bytes of the page pool.", AT(kv_bytes)},
    {"kv", "wait", CONF_MS, "2s", 1, 600000, NULL, "How long a transfer may take.", AT(wait_ms)},
    {"kv", "ratio", CONF_REAL, "0.5", 0, 1, NULL, "Share of the pool that prefixes may fill.",
     AT(ratio)},
    {"run", "device", CONF_ENUM, "cpu", 0, 0, "auto|cpu|cuda", "Where the model runs.", AT(device)},
    {"run", "trace", CONF_BOOL, "no", 0, 0, NULL, "Whether steps are traced.", AT(trace)},
    {0},
};
static const ConfTable table = {"baton-test", "tries the configuration", opts};

static const ConfOpt required_opts[] = {
    {"model", "path", CONF_STR, NULL, 0, 0, NULL, "Folder of the model.", AT(model)},
    {0},
};
static const ConfTable required_table = {"baton-test", "needs a model", required_opts};

static char path[] = P_tmpdir "/test_conf_XXXXXX"; /* replaced by the name of a fresh file */

static int make_file(void **state) {
    (void)state;
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state) {
    (void)state;
    return unlink(path);
}

static void write_bytes(const char *bytes, size_t n) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

/* Loading text fails with the code and with "FILE" + tail as the message. */
static void assert_refused(const char *text, int code, const char *tail) {
    Conf c = {0};
    Err err = {0};
    write_bytes(text, strlen(text));
    assert_int_equal(conf_load(&table, path, NULL, 0, &c, &err), code);
    assert_int_equal(strncmp(err.text, path, strlen(path)), 0);
    assert_string_equal(err.text + strlen(path), tail);
    assert_null(c.host);
}

static void default_file_override(void **state) {
    (void)state;
    Conf c = {0};
    Err err = {0};
    assert_int_equal(conf_load(&table, NULL, NULL, 0, &c, &err), 0);
    assert_string_equal(c.host, "127.0.0.1");
    assert_int_equal(c.port, 8080);
    assert_int_equal(c.kv_bytes, 16LL << 30);
    assert_int_equal(c.wait_ms, 2000);
    assert_int_equal(c.device, 1);
    assert_false(c.trace);
    conf_free(&table, &c);

    const char *text = "\xef\xbb\xbf# comment\n[http]\n  host = a.b ; why\n\tport=1\n[kv]\nsize: "
                       "64M\nwait = 1 min\n[run]\r\n"
                       "device = cuda\r\ntrace = ON\n";
    const char *overrides[] = {"http.port=99", "kv.ratio=1e-1", "http.port=100", "http.host=x=y.z"};
    write_bytes(text, strlen(text));
    assert_int_equal(conf_load(&table, path, overrides, 4, &c, &err), 0);
    assert_string_equal(c.host, "x=y.z");
    assert_int_equal(c.port, 100);
    assert_int_equal(c.kv_bytes, 64 << 20);
    assert_int_equal(c.wait_ms, 60000);
    assert_true(c.ratio == 0.1);
    assert_int_equal(c.device, 2);
    assert_true(c.trace);
    conf_free(&table, &c);
    assert_null(c.host);
}

static void unknown_names_are_refused_with_the_nearest(void **state) {
    (void)state;
    assert_refused("[http]\n\nprot = 1\n", E_INVAL,
                   ":3: [http] prot: unknown option; did you mean \"port\"?");
    assert_refused("[http]\nzzzzzz = 1\n", E_INVAL, ":2: [http] zzzzzz: unknown option");
    assert_refused("[http]\ndevice = cpu\n", E_INVAL,
                   ":2: [http] device: unknown option; it belongs to [run]");
    assert_refused("[htp]\n", E_INVAL, ":1: [htp]: unknown section; did you mean \"http\"?");
    assert_refused("[quux]\nport = 1\n", E_INVAL, ":1: [quux]: unknown section");
}

static void bad_lines_are_named(void **state) {
    (void)state;
    assert_refused("port = 1\n", E_INVAL, ":1: port: option before the first [section]");
    assert_refused("[http]\nport = 1\nhost = a\n\nport = 1\n", E_INVAL,
                   ":5: [http] port: given twice");
    assert_refused("[http]\nport\n[htp]\n", E_FORMAT,
                   ":2: expected [section], key = value or a comment");
    assert_refused("[http\nport = 1", E_FORMAT, ":1: expected [section], key = value or a comment");
    assert_refused("[http]\nhost = a\nport = x\nnonsense\n", E_INVAL,
                   ":3: [http] port: expected an integer, from 0 to 65535, found \"x\"");

    Conf c = {0};
    Err err = {0};
    write_bytes("[http]\nho\0st = a\n", 17);
    assert_int_equal(conf_load(&table, path, NULL, 0, &c, &err), E_FORMAT);
    assert_non_null(strstr(err.text, ":2: zero byte"));

    char *big = calloc(1, 40000);
    strcpy(big, "[http]\nhost = ");
    memset(big + strlen(big), 'x', 30000);
    write_bytes(big, strlen(big));
    assert_int_equal(conf_load(&table, path, NULL, 0, &c, &err), E_LIMIT);
    assert_non_null(strstr(err.text, ":2: line too long"));
    big[14 + 5000] = '\0'; /* a long list of endpoints fits */
    write_bytes(big, strlen(big));
    assert_int_equal(conf_load(&table, path, NULL, 0, &c, &err), 0);
    assert_int_equal(strlen(c.host), 5000);
    conf_free(&table, &c);
    free(big);
}

static void files_that_cannot_be_read_are_named(void **state) {
    (void)state;
    Conf c = {0};
    Err err = {0};
    assert_int_equal(conf_load(&table, "no/such.conf", NULL, 0, &c, &err), E_IO);
    assert_string_equal(err.text, "cannot open no/such.conf: No such file or directory");
    assert_int_equal(conf_load(&table, ".", NULL, 0, &c, &err), E_IO);
    assert_non_null(strstr(err.text, "cannot read .: "));
}

static void bad_overrides_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"http.port", "--set http.port: expected section.key=value"},
        {"port=1", "--set port=1: expected section.key=value"},
        {"http.prot=1", "--set: [http] prot: unknown option; did you mean \"port\"?"},
        {"http.port=-1", "--set: [http] port: expected an integer, from 0 to 65535, found \"-1\""},
        {"http.host=a\nb",
         "--set: [http] host: expected text without control characters or \" ;\", found \"a b\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Conf c = {0};
        Err err = {0};
        assert_int_equal(conf_load(&table, NULL, &cases[i].text, 1, &c, &err), E_INVAL);
        assert_string_equal(err.text, cases[i].message);
    }
}

static void required_options_are_required(void **state) {
    (void)state;
    Conf c = {0};
    Err err = {0};
    assert_int_equal(conf_load(&required_table, NULL, NULL, 0, &c, &err), E_INVAL);
    assert_string_equal(err.text, "baton-test: [model] path: required option is missing");
    const char *given = "model.path=/m";
    assert_int_equal(conf_load(&required_table, NULL, &given, 1, &c, &err), 0);
    assert_string_equal(c.model, "/m");
    conf_free(&required_table, &c);
}

static void printed_files_read_back(void **state) {
    (void)state;
    Conf a = {0}, b = {0};
    Err err = {0};
    const char *overrides[] = {"http.host=::1", "kv.size=1536K", "kv.wait=90s", "kv.ratio=0.1",
                               "run.device=auto"};
    assert_int_equal(conf_load(&table, NULL, overrides, 5, &a, &err), 0);
    FILE *f = fopen(path, "w");
    conf_print(&table, &a, f);
    fclose(f);
    assert_int_equal(conf_load(&table, path, NULL, 0, &b, &err), 0);
    assert_string_equal(b.host, a.host);
    assert_true(b.kv_bytes == a.kv_bytes && b.wait_ms == 90000 && b.ratio == a.ratio &&
                b.device == 0);
    conf_free(&table, &a);
    conf_free(&table, &b);
}

/* The example file, in a buffer that the next call overwrites. */
static char *printed_defaults(void) {
    static char text[8192];
    FILE *f = fmemopen(text, sizeof text, "w");
    conf_print(&table, NULL, f);
    fclose(f);
    return text;
}

static void the_example_explains_every_option(void **state) {
    (void)state;
    Conf c = {0};
    char *text = printed_defaults();
    for (const ConfOpt *o = opts; o->section; o++) {
        char line[100];
        snprintf(line, sizeof line, "\n#%s = %s\n", o->key, o->def);
        assert_non_null(strstr(text, line));
        assert_non_null(strstr(text, o->help));
    }
    write_bytes(text, strlen(text));
    assert_int_equal(conf_load(&table, path, NULL, 0, &c, NULL), 0);
    conf_free(&table, &c);
    /* With the marks taken off, every line is an option that loads. */
    for (const ConfOpt *o = opts; o->section; o++) {
        char line[100];
        snprintf(line, sizeof line, "\n#%s = ", o->key);
        *(strchr(strstr(text, line), '#')) = ' ';
    }
    write_bytes(text, strlen(text));
    assert_int_equal(conf_load(&table, path, NULL, 0, &c, NULL), 0);
    assert_int_equal(c.wait_ms, 2000);
    conf_free(&table, &c);
}

static void nearest_is_near(void **state) {
    (void)state;
    static const char *const names[] = {"port", "host", "max_connections", NULL};
    assert_string_equal(conf_nearest("prot", names), "port");
    assert_string_equal(conf_nearest("hosts", names), "host");
    assert_string_equal(conf_nearest("max_conections", names), "max_connections");
    assert_null(conf_nearest("color", names));
    assert_null(conf_nearest("", names));
    char big[200];
    memset(big, 'p', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    assert_null(conf_nearest(big, names));
}

/* Runs conf_main with up to four arguments; what it prints goes to out[1000]. */
static int run_main(Conf *c, int *status, char *out, const char *a, const char *b, const char *d,
                    const char *e) {
    const char *args[] = {"baton-test", a, b, d, e, NULL};
    char *argv[6];
    int argc = 0;
    for (; argc < 5 && args[argc]; argc++)
        argv[argc] = strdup(args[argc]);
    argv[argc] = NULL;
    int n_args = argc, fds[2] = {dup(STDOUT_FILENO), dup(STDERR_FILENO)};
    FILE *capture = tmpfile();
    fflush(stdout);
    dup2(fileno(capture), STDOUT_FILENO);
    dup2(fileno(capture), STDERR_FILENO);
    int rc = conf_main(&table, argc, argv, c, status);
    fflush(stdout);
    dup2(fds[0], STDOUT_FILENO);
    dup2(fds[1], STDERR_FILENO);
    close(fds[0]);
    close(fds[1]);
    rewind(capture);
    out[fread(out, 1, 999, capture)] = '\0';
    fclose(capture);
    while (n_args-- > 0)
        free(argv[n_args]);
    return rc;
}

static void the_command_line_decides(void **state) {
    (void)state;
    Conf c = {0};
    char out[1000];
    int status;
    write_bytes("[http]\nport = 7\n", 16);
    assert_int_equal(run_main(&c, &status, out, "--config", path, "--set", "kv.wait=5ms"), 0);
    assert_int_equal(c.port, 7);
    assert_int_equal(c.wait_ms, 5);
    conf_free(&table, &c);

    assert_int_not_equal(run_main(&c, &status, out, "--check", "--config", path, NULL), 0);
    assert_int_equal(status, 0);
    assert_string_equal(out, "ok\n");
    assert_int_not_equal(run_main(&c, &status, out, "--print-config", "--config", path, NULL), 0);
    assert_int_equal(status, 0);
    assert_non_null(strstr(out, "[http]\nhost = 127.0.0.1\nport = 7\n"));
    assert_int_not_equal(run_main(&c, &status, out, "--print-defaults", NULL, NULL, NULL), 0);
    assert_non_null(strstr(out, "#port = 8080\n"));
    assert_int_not_equal(run_main(&c, &status, out, "--version", NULL, NULL, NULL), 0);
    assert_string_equal(out, "baton-test " BATON_VERSION "\n");
    assert_int_not_equal(run_main(&c, &status, out, "--help", NULL, NULL, NULL), 0);
    assert_int_equal(status, 0);
    assert_non_null(strstr(out, "--set SECTION.KEY=VALUE"));
    assert_null(c.host);
}

static void a_wrong_command_line_ends_with_2(void **state) {
    (void)state;
    static const char *const bad[][2] = {{"--nope", NULL},
                                         {"file.conf", NULL},
                                         {"--config", "no/such"},
                                         {"--set", "a.b=1"},
                                         {"--set", NULL}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Conf c = {0};
        char out[1000];
        int status = 0;
        assert_int_not_equal(run_main(&c, &status, out, bad[i][0], bad[i][1], NULL, NULL), 0);
        assert_int_equal(status, 2);
        assert_non_null(strstr(out, "baton-test: "));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_file_override),
        cmocka_unit_test(unknown_names_are_refused_with_the_nearest),
        cmocka_unit_test(bad_lines_are_named),
        cmocka_unit_test(files_that_cannot_be_read_are_named),
        cmocka_unit_test(bad_overrides_are_refused),
        cmocka_unit_test(required_options_are_required),
        cmocka_unit_test(printed_files_read_back),
        cmocka_unit_test(the_example_explains_every_option),
        cmocka_unit_test(nearest_is_near),
        cmocka_unit_test(the_command_line_decides),
        cmocka_unit_test(a_wrong_command_line_ends_with_2),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
