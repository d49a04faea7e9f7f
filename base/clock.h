/* Monotonic time. Any thread. */
#pragma once

#include <stdint.h>

int64_t clock_now_us(void);
int64_t clock_now_ms(void);
/* Seconds since the epoch, for "created" fields. */
int64_t clock_wall_s(void);

/* Unpredictable 64 bits, never 0: request ids, generations. */
uint64_t clock_unique(void);
