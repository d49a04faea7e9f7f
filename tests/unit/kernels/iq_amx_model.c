/* The AMX kernel over a model of tiles in plain C: palette 1 with eight tiles of up to 16 rows of
 * 64 bytes. Shapes that do not fit each other end the test, as the instructions would fault. */
#define IQ_TILE_MODEL

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct Tile {
    int rows, row_bytes;
    _Alignas(64) uint8_t at[16][64];
} Tile;

static _Thread_local Tile tiles[8];
static _Thread_local int configured;

static void tile_config(const void *conf) {
    const uint8_t *c = conf;
    CHECK(c[0] == 1 && c[1] == 0);
    for (int i = 2; i < 16; i++)
        CHECK(c[i] == 0);
    for (int i = 0; i < 8; i++) {
        tiles[i].row_bytes = c[16 + 2 * i] | c[17 + 2 * i] << 8;
        tiles[i].rows = c[48 + i];
        CHECK(tiles[i].rows <= 16 && tiles[i].row_bytes <= 64);
        memset(tiles[i].at, 0, sizeof tiles[i].at);
    }
    configured = 1;
}

static void tile_release(void) {
    configured = 0;
}

static void tile_zero(int t) {
    CHECK(configured);
    memset(tiles[t].at, 0, sizeof tiles[t].at);
}

static void tile_load(int t, const void *from, size_t pitch) {
    tile_zero(t);
    for (int r = 0; r < tiles[t].rows; r++)
        memcpy(tiles[t].at[r], (const char *)from + (size_t)r * pitch, (size_t)tiles[t].row_bytes);
}

static void tile_store(int t, void *to, size_t pitch) {
    CHECK(configured);
    for (int r = 0; r < tiles[t].rows; r++)
        memcpy((char *)to + (size_t)r * pitch, tiles[t].at[r], (size_t)tiles[t].row_bytes);
}

static void tile_dot(int c, int a, int b) {
    CHECK(configured && tiles[a].row_bytes == 4 * tiles[b].rows && tiles[c].rows == tiles[a].rows &&
          tiles[c].row_bytes == tiles[b].row_bytes);
    for (int m = 0; m < tiles[c].rows; m++)
        for (int n = 0; n < tiles[c].row_bytes / 4; n++) {
            int32_t sum;
            memcpy(&sum, &tiles[c].at[m][4 * n], 4);
            for (int k = 0; k < tiles[a].row_bytes; k++)
                sum += (int8_t)tiles[a].at[m][k] * (int8_t)tiles[b].at[k / 4][4 * n + k % 4];
            memcpy(&tiles[c].at[m][4 * n], &sum, 4);
        }
}

static void tile_fence(void) {
}

#include "kernels/cpu/iq_amx_body.h"

const IqKern IQ_KERN_AMX_MODEL;
const IqKern IQ_KERN_AMX_MODEL = {
    .quant = iq_body_quant,
    .panels = amx_panels,
    .add_scaled = iq_body_add_scaled,
};
