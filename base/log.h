/* Log lines for journald (or a terminal) on standard error.
 *
 * One line per event: "<6>decode: req 7f3a...: text" when standard error is the journal, else with
 * a time stamp. Only daemons log above debug. Any thread may log; lines do not interleave. */
#pragma once

#include <stdbool.h>

typedef enum LogLevel {
    LOG_LV_ERR = 3,
    LOG_LV_WARN = 4,
    LOG_LV_INFO = 6,
    LOG_LV_DEBUG = 7
} LogLevel;

/* Sets the name printed before each line (borrowed for ever) and the least urgent level printed. */
void log_init(const char *name, LogLevel max_level);

/* Parses "error", "warn", "info" or "debug"; returns -1 for anything else. */
int log_level_parse(const char *s);

bool log_enabled(LogLevel level);
void log_line(LogLevel level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define LOG_ERR(...)  log_line(LOG_LV_ERR, __VA_ARGS__)
#define LOG_WARN(...) log_line(LOG_LV_WARN, __VA_ARGS__)
#define LOG_INFO(...) log_line(LOG_LV_INFO, __VA_ARGS__)
#define LOG_DEBUG(...)                                                                             \
    do {                                                                                           \
        if (log_enabled(LOG_LV_DEBUG))                                                             \
            log_line(LOG_LV_DEBUG, __VA_ARGS__);                                                   \
    } while (0)
