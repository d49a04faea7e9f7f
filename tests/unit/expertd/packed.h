/* Expert files of the tiny checkpoint in a folder of their own. */
#pragma once

#include "model/expert_pack.h"

enum { PACKED_FIRST = 1, PACKED_LAYERS = 9, PACKED_HIDDEN = 256, PACKED_INNER = 128 };

typedef struct Packed {
    char dir[64];
    Weights *weights;
    int bits, group;
} Packed;

/* Fails the test when it cannot. */
void packed_new(Packed *out, int bits, int group);
/* Removes the folder. */
void packed_free(Packed *p);
void packed_path(const Packed *p, int layer, char path[128]);
/* Writes the file of one layer, with codes of `bits`. */
void packed_write(const Packed *p, int layer, int bits);
