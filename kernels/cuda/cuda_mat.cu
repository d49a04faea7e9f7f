/* Packing of stored matrices, once, at start; and single rows of packed ones (embedding). Packing
 * moves each byte twice, behind the copy from the host; a row of the table is a few KiB. */
#include "kernels/cuda/cuda_mat.cuh"

enum { THREADS = 256 };

/* The raw code of (row, col) of the matrix, 0 outside of it. */
template <Dtype F> static __device__ uint32_t raw_code(const CudaMatPack &p, int row, int col) {
    if (row < 0 || row >= p.to.rows || col < 0 || col >= p.to.cols)
        return 0;
    const uint8_t *at = p.raw + (size_t)(row - p.row) * p.row_bytes;
    if constexpr (F == DT_F32)
        return reinterpret_cast<const uint32_t *>(at)[col];
    else if constexpr (F == DT_BF16)
        return reinterpret_cast<const uint16_t *>(at)[col];
    else if constexpr (F == DT_F8E4M3)
        return at[col];
    else
        return at[col / 2] >> (col % 2 * 4) & 15;
}

/* Which of the columns of a word stands at place i. */
template <Dtype F> static __device__ int column_at(int i) {
    if constexpr (F == DT_F8E4M3)
        return i % 2 * 2 + i / 2;
    else if constexpr (F == DT_NVFP4)
        return i % 4 * 2 + i / 4;
    else
        return i;
}

/* Word i of a lane's 16 bytes; col is the lane's first column. */
template <Dtype F>
static __device__ uint32_t packed_word(const CudaMatPack &p, int row, int col, int i) {
    constexpr int N = MAT_OWN<F> / 4, BITS = 32 / N; /* numbers of a word */
    uint32_t w = 0;
    for (int k = 0; k < N; k++)
        w |= raw_code<F>(p, row, col + i * N + column_at<F>(k)) << (k * BITS);
    return w;
}

static __device__ float e4m3_value(uint32_t code) {
    return unpack_f16(e4m3_to_f16(code)).x;
}

/* The scale of a group, times 2^116, as bf16: exact. */
static __device__ uint32_t group_scale(const CudaMatPack &p, int row, int col) {
    if (row < 0 || row >= p.to.rows || col >= p.to.cols)
        return 0;
    uint32_t code = p.group_scale[(size_t)(row - p.row) * (size_t)(p.to.cols / NVFP4_GROUP) +
                                  (size_t)(col / NVFP4_GROUP)];
    return __float_as_uint(e4m3_value(code) * power_of_2(116)) >> 16;
}

/* Blocks (block of columns, tile from the first on). */
template <Dtype F>
static __global__ void __launch_bounds__(THREADS) pack_kernel(CudaMatPack p, int first_tile) {
    int tile = first_tile + (int)blockIdx.y, block = (int)blockIdx.x;
    uint8_t *to =
        p.to.data + ((size_t)tile * (size_t)p.to.blocks + (size_t)block) * MAT_BLOCK_BYTES<F>;
    for (int i = (int)threadIdx.x; i < MAT_UNITS<F> * 64; i += THREADS) {
        int u = i / 64, half = i % 64 / 32, lane = i % 32;
        int row = tile * MAT_TILE + lane / 4 + 8 * half - p.to.row_pad,
            col = block * MAT_BLOCK + u * MAT_UNIT_COLS<F> + lane % 4 * MAT_OWN<F> - p.to.col_pad;
        uint32_t w[4];
        for (int k = 0; k < 4; k++)
            w[k] = packed_word<F>(p, row, col, k);
        reinterpret_cast<uint4 *>(to)[i] = make_uint4(w[0], w[1], w[2], w[3]);
        if constexpr (F == DT_NVFP4)
            reinterpret_cast<uint32_t *>(to + MAT_UNIT)[lane * 2 + half] =
                group_scale(p, row, col) | group_scale(p, row, col + NVFP4_GROUP) << 16;
    }
}

void cuda_mat_pack(const CudaMatPack *p, cudaStream_t stream) {
    int first = p->row == 0 ? 0 : (p->to.row_pad + p->row) / MAT_TILE,
        end =
            p->row + p->n == p->to.rows ? p->to.tiles : (p->to.row_pad + p->row + p->n) / MAT_TILE;
    by_format(p->to.dtype, [&](auto f) {
        launch(pack_kernel<f.value>, dim3((unsigned)p->to.blocks, (unsigned)(end - first)), THREADS,
               0, stream, false, *p, first);
    });
}

/* ---- rows as fp32, with the bits of mat_row_f32 ---- */

template <Dtype F> static __device__ float number_at(const CudaMat &m, int row, int col) {
    int r = m.row_pad + row, c = m.col_pad + col, tile = r / MAT_TILE, half = r % MAT_TILE / 8,
        block = c / MAT_BLOCK, in = c % MAT_BLOCK, u = in / MAT_UNIT_COLS<F>,
        lane = r % 8 * 4 + in % MAT_UNIT_COLS<F> / MAT_OWN<F>, i = in % MAT_OWN<F>;
    const uint8_t *at = block_at<F>(m, tile, block),
                  *p = at + u * MAT_UNIT + half * (MAT_UNIT / 2) + lane * 16;
    if constexpr (F == DT_F32) {
        return reinterpret_cast<const float *>(p)[i];
    } else if constexpr (F == DT_BF16) {
        return __uint_as_float((uint32_t) reinterpret_cast<const uint16_t *>(p)[i] << 16);
    } else if constexpr (F == DT_F8E4M3) {
        uint32_t code = p[i / 4 * 4 + i % 2 * 2 + i % 4 / 2];
        return e4m3_value(code) * m.scale[(size_t)tile * (size_t)m.blocks + (size_t)block];
    } else {
        uint32_t w = reinterpret_cast<const uint32_t *>(p)[i / 8],
                 code = w >> ((i % 2 * 4 + i % 8 / 2) * 4) & 15,
                 scale = reinterpret_cast<const uint16_t *>(
                     at + MAT_UNIT)[lane * 4 + half * 2 + i / NVFP4_GROUP];
        float group = __uint_as_float(scale << 16) * power_of_2(-116) * m.scale2,
              size = __uint_as_float((code & 7) << 22) * power_of_2(126), v = size * group;
        return code & 8 ? -v : v;
    }
}

/* A block per token. */
template <Dtype F>
static __global__ void __launch_bounds__(THREADS)
    embed_kernel(CudaMat table, const int32_t *token, float *out, int out_ld) {
    int row = token[blockIdx.x];
    for (int c = (int)threadIdx.x; c < table.cols; c += THREADS)
        out[(size_t)blockIdx.x * (size_t)out_ld + (size_t)c] = number_at<F>(table, row, c);
}

void cuda_embed(const CudaMat *table, const int32_t *token, float *out, int m, int out_ld,
                cudaStream_t stream) {
    by_format(table->dtype, [&](auto f) {
        launch(embed_kernel<f.value>, dim3((unsigned)m), THREADS, 0, stream, false, *table, token,
               out, out_ld);
    });
}
