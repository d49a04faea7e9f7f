/* Packing of expert matrices into the layout that cuda_moe.cu reads. A thread makes one lane's 16
 * bytes of a quarter; a matrix is packed once, at start.
 *
 * Lane 4 * g + c has rows g and g + 8 of a tile. What a quarter covers of a row, and the lane has:
 *
 *   NVFP4  64 columns, [16c, 16c + 16): four words, one per step of 16 columns
 *
 *   e4m3   32 columns, [8c, 8c + 8): two words per step
 *
 *   bf16   16 columns, [4c, 4c + 4): one step, the fragment itself
 *
 *   fp32   high (even quarters) or low (odd) halves of 16 columns, as bf16
 *
 * The words of NVFP4 and e4m3 hold their bits where few operations turn them into bf16: see
 * cuda_moe_decode.cuh. A group's scale becomes 5 bits of exponent and 3 of mantissa, without
 * subnormals; its sign goes to the numbers. */
#include "kernels/cuda/cuda_moe.h"
#include "kernels/cuda/cuda_mma.cuh"

enum { THREADS = 128 };

static __device__ bool exists(const MoePack &p, int row, int col) {
    return row < p.rows && col < p.cols;
}

/* The e4m3 scale of a group; 0 beyond the matrix. */
static __device__ uint32_t group_scale(const MoePack &p, int row, int col) {
    return exists(p, row, col) ? p.scale[(size_t)row * p.scale_cols + col / NVFP4_GROUP] : 0;
}

/* A code with its group's sign; 0 where the group's scale is 0. */
static __device__ uint32_t nvfp4_code(const MoePack &p, int row, int col) {
    uint32_t scale = group_scale(p, row, col);
    if ((scale & 0x7f) == 0)
        return 0;
    uint32_t code = p.raw[(size_t)row * p.row_bytes + col / 2] >> (col % 2 * 4) & 15;
    return code ^ (scale >> 7 << 3);
}

/* e4m3 without its sign as 16 + exponent, 3 bits of mantissa. */
static __device__ uint32_t scale_code(uint32_t e4m3) {
    int e = (int)(e4m3 >> 3 & 15), m = (int)(e4m3 & 7);
    if (e > 0)
        return (uint32_t)(e - 7 + 16) << 3 | (uint32_t)m;
    if (m == 0)
        return 16 << 3;
    int top = m >= 4 ? 2 : m >= 2 ? 1 : 0;
    return (uint32_t)(top - 9 + 16) << 3 | (uint32_t)(m << (3 - top) & 7);
}

/* Fragment A of one step: a[0], a[1]: columns col, col + 1 of rows g and g + 8;
 * a[2], a[3]: the next two columns. Numbers of two columns share a word's halves. */
static __device__ uint32_t nvfp4_word(const MoePack &p, int row, int col) {
    uint32_t w = 0;
    for (int half = 0; half < 2; half++) {
        uint32_t v[4], h;
        for (int i = 0; i < 4; i++)
            v[i] = nvfp4_code(p, row + i % 2 * 8, col + i / 2 * 2 + half);
        h = (v[0] >> 3) << 15 | (v[0] & 7) << 6 | (v[1] >> 3) << 12 | (v[1] & 7) << 3 |
            (v[2] >> 3) << 14 | (v[2] & 7) | (v[3] >> 3) << 13 | (v[3] & 7) << 9;
        w |= h << (16 * half);
    }
    return w;
}

static __device__ uint32_t e4m3_word(const MoePack &p, int row, int col) {
    uint32_t w = 0;
    for (int half = 0; half < 2; half++) {
        uint32_t v[2], h;
        for (int i = 0; i < 2; i++)
            v[i] = exists(p, row + i * 8, col + half)
                       ? p.raw[(size_t)(row + i * 8) * p.row_bytes + (size_t)(col + half)]
                       : 0;
        h = (v[0] >> 7) << 15 | (v[0] & 0x7f) << 4 | (v[1] >> 7) << 14 | (v[1] >> 4 & 7) << 11 |
            (v[1] & 15);
        w |= h << (16 * half);
    }
    return w;
}

static __device__ uint32_t bf16_bits(const MoePack &p, int row, int col) {
    if (!exists(p, row, col))
        return 0;
    return reinterpret_cast<const uint16_t *>(p.raw + (size_t)row * p.row_bytes)[col];
}

static __device__ uint32_t f32_word(const MoePack &p, int row, int col, bool low) {
    float v[2] = {0, 0};
    uint32_t hi, lo;
    for (int i = 0; i < 2; i++)
        if (exists(p, row, col + i))
            v[i] = reinterpret_cast<const float *>(p.raw + (size_t)row * p.row_bytes)[col + i];
    split_bf16(v[0], v[1], &hi, &lo);
    return low ? lo : hi;
}

/* Word i of the lane's 16 bytes in quarter q; row: the tile's first plus g, col: the stage's first.
 */
static __device__ uint32_t packed_word(const MoePack &p, int row, int col, int q, int c, int i) {
    if (p.dtype == DT_NVFP4)
        return nvfp4_word(p, row, col + 64 * q + 16 * c + 4 * i);
    if (p.dtype == DT_F8E4M3)
        return e4m3_word(p, row, col + 32 * q + 8 * c + 2 * i);
    int r = row + i % 2 * 8;
    if (p.dtype == DT_F32)
        return f32_word(p, r, col + q / 2 * 16 + 4 * c + i / 2 * 2, q % 2);
    int k = col + 16 * q + 4 * c + i / 2 * 2;
    return bf16_bits(p, r, k) | bf16_bits(p, r, k + 1) << 16;
}

/* Blocks (stage, tile of the matrix), a warp per quarter. */
static __global__ void __launch_bounds__(THREADS) pack_kernel(MoePack p) {
    int stage = (int)blockIdx.x, tile = (int)blockIdx.y, q = (int)threadIdx.x / 32,
        lane = (int)threadIdx.x % 32, g = lane / 4, c = lane % 4, row = tile * MOE_TILE + g,
        col = stage * moe_stage_cols(p.dtype);
    size_t at =
        ((size_t)p.expert * p.to.tiles + (size_t)(p.first + tile * p.step)) * p.to.stages + stage;
    uint8_t *to = p.to.data + at * (size_t)moe_stage_bytes(p.dtype);
    uint32_t w[4];
    for (int i = 0; i < 4; i++)
        w[i] = packed_word(p, row, col, q, c, i);
    reinterpret_cast<uint4 *>(to)[q * 32 + lane] = make_uint4(w[0], w[1], w[2], w[3]);
    if (p.dtype != DT_NVFP4)
        return;
    uint8_t *scales = to + MOE_QUARTERS * MOE_QUARTER_BYTES + 8 * lane + 2 * q;
    for (int i = 0; i < 2; i++)
        scales[i] = (uint8_t)scale_code(group_scale(p, row + 8 * i, col + 64 * q + 16 * c) & 0x7f);
}

void cuda_moe_pack(const MoePack *p, cudaStream_t stream) {
    dim3 grid((unsigned)p->to.stages, (unsigned)p->tiles);
    launch(pack_kernel, grid, THREADS, 0, stream, false, *p);
}
