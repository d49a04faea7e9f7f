/* base/log: levels, the journal's form, bounded single lines, no interleaving. */
#include "base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char text[1 << 20];
static int saved_stderr;
static FILE *capture;

/* Sends standard error to a file, named to the process as the journal's stream or not. */
static void capture_start(bool journal, LogLevel level) {
    capture = tmpfile();
    assert_non_null(capture);
    saved_stderr = dup(STDERR_FILENO);
    dup2(fileno(capture), STDERR_FILENO);
    struct stat st;
    fstat(STDERR_FILENO, &st);
    char stream[64];
    snprintf(stream, sizeof stream, "%llu:%llu", (unsigned long long)st.st_dev,
             (unsigned long long)st.st_ino + !journal);
    setenv("JOURNAL_STREAM", stream, 1);
    log_init("decode", level);
}

static const char *capture_stop(void) {
    dup2(saved_stderr, STDERR_FILENO);
    close(saved_stderr);
    rewind(capture);
    text[fread(text, 1, sizeof text - 1, capture)] = '\0';
    fclose(capture);
    return text;
}

static void journal_lines_carry_the_priority(void **state) {
    (void)state;
    capture_start(true, LOG_LV_INFO);
    LOG_INFO("req %x: done, %d tokens", 0x7f3a, 12);
    LOG_ERR("bad");
    assert_string_equal(capture_stop(), "<6>decode: req 7f3a: done, 12 tokens\n<3>decode: bad\n");
}

static void other_lines_carry_the_time(void **state) {
    (void)state;
    capture_start(false, LOG_LV_INFO);
    LOG_WARN("slow");
    const char *s = capture_stop();
    int year, ms, end = 0;
    sscanf(s, "%4d-%*2d-%*2dT%*2d:%*2d:%*2d.%3dZ warn decode: slow\n%n", &year, &ms, &end);
    assert_int_equal(end, strlen(s));
    assert_true(year >= 2024);
}

static void levels_filter(void **state) {
    (void)state;
    capture_start(true, LOG_LV_WARN);
    LOG_INFO("no");
    LOG_DEBUG("no");
    LOG_WARN("yes");
    assert_false(log_enabled(LOG_LV_INFO));
    assert_string_equal(capture_stop(), "<4>decode: yes\n");
    assert_int_equal(log_level_parse("error"), LOG_LV_ERR);
    assert_int_equal(log_level_parse("warn"), LOG_LV_WARN);
    assert_int_equal(log_level_parse("info"), LOG_LV_INFO);
    assert_int_equal(log_level_parse("debug"), LOG_LV_DEBUG);
    assert_int_equal(log_level_parse("loud"), -1);
}

static void text_cannot_forge_a_line(void **state) {
    (void)state;
    capture_start(true, LOG_LV_INFO);
    LOG_INFO("path %s", "/a\n<3>decode: forged\x1b[2J");
    assert_string_equal(capture_stop(), "<6>decode: path /a <3>decode: forged [2J\n");
}

static void long_lines_are_cut(void **state) {
    (void)state;
    char *big = malloc(10000);
    memset(big, 'x', 9999);
    big[9999] = '\0';
    capture_start(true, LOG_LV_INFO);
    LOG_INFO("%s", big);
    const char *s = capture_stop();
    size_t n = strlen(s);
    assert_true(n <= 4096);
    assert_string_equal(s + n - 4, "...\n");
    free(big);
}

static void *write_lines(void *arg) {
    for (int i = 0; i < 500; i++)
        LOG_INFO("%s", (const char *)arg);
    return NULL;
}

static void lines_of_threads_do_not_interleave(void **state) {
    (void)state;
    static const char *const words[] = {"aaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbb"};
    capture_start(true, LOG_LV_INFO);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, write_lines, (void *)(uintptr_t)words[i]);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    char *s = (char *)(uintptr_t)capture_stop(), *rest;
    int n[2] = {0};
    for (char *line = strtok_r(s, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        assert_memory_equal(line, "<6>decode: ", 11);
        int which = line[11] == 'b';
        assert_string_equal(line + 11, words[which]);
        n[which]++;
    }
    assert_int_equal(n[0], 500);
    assert_int_equal(n[1], 500);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(journal_lines_carry_the_priority),
        cmocka_unit_test(other_lines_carry_the_time),
        cmocka_unit_test(levels_filter),
        cmocka_unit_test(text_cannot_forge_a_line),
        cmocka_unit_test(long_lines_are_cut),
        cmocka_unit_test(lines_of_threads_do_not_interleave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
