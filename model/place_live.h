/* The placement of a running service: metrics of where experts are computed, the record of what was
 * routed, and, when asked for, residents that follow use.
 *
 * Loop thread; a change of one layer runs on the engine thread, between two steps. The number of
 * residents of each layer stays what it was at the start; layers without or with all of them never
 * change. */
#pragma once

#include "model/runtime.h"
#include "model/stepper.h"

typedef struct PlaceLive PlaceLive;

typedef struct PlaceLiveConf {
    Loop *loop;
    Stepper *stepper;
    Runtime *runtime;   /* its resident is changed; must have counts */
    const char *record; /* file that gets the counts each minute and at the end; "": none */
    int64_t update_ms;  /* how often residents are looked at; 0: never */
    /* One line for the log: a change, or (bad) why one or the record failed. */
    void (*on_note)(void *arg, bool bad, const char *text);
    void *arg;
} PlaceLiveConf;

PlaceLive *place_live_new(const PlaceLiveConf *conf);
/* After stepper_close; writes the record once more. NULL is a no-op. */
void place_live_free(PlaceLive *p);
