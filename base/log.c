/* Log lines on standard error: one write per line, so that lines of several threads do not
 * interleave. Any thread. */
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* What a pipe takes in one piece (PIPE_BUF): longer lines are cut and end in "...". */
#define LINE_MAX_BYTES 4096

static const char *log_name = "baton";       /* set by log_init, before other threads run */
static LogLevel log_max_level = LOG_LV_INFO; /* likewise */
static bool log_to_journal;                  /* likewise */
static pthread_mutex_t log_lock =
    PTHREAD_MUTEX_INITIALIZER; /* guards the order of partial writes */

/* The journal names the device and inode of its socket, so that a redirected standard error is not
 * taken for it. */
static bool stderr_is_journal(void) {
    const char *stream = getenv("JOURNAL_STREAM");
    struct stat st;
    unsigned long long dev, ino;
    return stream && sscanf(stream, "%llu:%llu", &dev, &ino) == 2 &&
           fstat(STDERR_FILENO, &st) == 0 && st.st_dev == dev && st.st_ino == ino;
}

void log_init(const char *name, LogLevel max_level) {
    log_name = name;
    log_max_level = max_level;
    log_to_journal = stderr_is_journal();
}

int log_level_parse(const char *s) {
    static const struct {
        const char *name;
        LogLevel level;
    } levels[] = {{"error", LOG_LV_ERR},
                  {"warn", LOG_LV_WARN},
                  {"info", LOG_LV_INFO},
                  {"debug", LOG_LV_DEBUG}};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (strcmp(s, levels[i].name) == 0)
            return levels[i].level;
    return -1;
}

bool log_enabled(LogLevel level) {
    return level <= log_max_level;
}

static const char *level_word(LogLevel level) {
    switch (level) {
    case LOG_LV_ERR:
        return "error";
    case LOG_LV_WARN:
        return "warn";
    case LOG_LV_INFO:
        return "info";
    default:
        return "debug";
    }
}

/* Writes the part before the text into line[LINE_MAX_BYTES] and returns its length. */
static size_t put_prefix(char *line, LogLevel level) {
    if (log_to_journal)
        return (size_t)snprintf(line, LINE_MAX_BYTES, "<%d>%.64s: ", level, log_name);
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t n = strftime(line, LINE_MAX_BYTES, "%Y-%m-%dT%H:%M:%S", &utc);
    return n + (size_t)snprintf(line + n, LINE_MAX_BYTES - n,
                                ".%03ldZ %s %.64s: ", now.tv_nsec / 1000000, level_word(level),
                                log_name);
}

void log_line(LogLevel level, const char *fmt, ...) {
    if (!log_enabled(level))
        return;
    char line[LINE_MAX_BYTES];
    size_t start = put_prefix(line, level), room = sizeof line - start - 1;
    va_list args;
    va_start(args, fmt);
    int wanted = vsnprintf(line + start, room, fmt, args);
    va_end(args);
    size_t n = wanted < 0 ? 0 : (size_t)wanted;
    if (n >= room) {
        n = room - 1;
        memcpy(line + start + n - 3, "...", 3);
    }
    /* Text from outside must not be able to start a line of its own. */
    for (size_t i = start; i < start + n; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = ' ';
    line[start + n] = '\n';

    pthread_mutex_lock(&log_lock);
    for (size_t done = 0, len = start + n + 1; done < len;) {
        ssize_t w = write(STDERR_FILENO, line + done, len - done);
        if (w <= 0)
            break; /* nobody reads the log; there is no better place to say so */
        done += (size_t)w;
    }
    pthread_mutex_unlock(&log_lock);
}
