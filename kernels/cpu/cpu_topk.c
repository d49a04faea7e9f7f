/* The k largest of many scores, exactly: a radix select over the bits of the numbers. Pure; any
 * thread. */
#include "kernels/cpu/cpu.h"

enum { DIGIT_BITS = 11, BUCKETS = 1 << DIGIT_BITS, LAST_BITS = 32 - 2 * DIGIT_BITS };

/* fp32 bits in an order that unsigned comparison follows; -0 and 0 are one value. */
static inline uint32_t sortable(float f) {
    uint32_t u;
    f += 0.0f;
    memcpy(&u, &f, 4);
    return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}

/* The bucket that holds the *rank-th largest; *rank becomes its rank in there. */
static uint32_t find_bucket(const uint32_t *count, int n_buckets, int *rank) {
    uint32_t b = (uint32_t)n_buckets - 1;
    for (; (int)count[b] < *rank; b--)
        *rank -= (int)count[b];
    return b;
}

/* Counts the leading digits. Neighbouring scores tend to share one, so two sets of counters take
 * turns. */
static uint32_t leading_digit(const float *score, int n, uint32_t *count, int *rank) {
    uint32_t *even = count, *odd = count + BUCKETS;
    memset(count, 0, 2 * BUCKETS * sizeof *count);
    int i = 0;
    for (; i + 2 <= n; i += 2) {
        even[sortable(score[i]) >> (32 - DIGIT_BITS)]++;
        odd[sortable(score[i + 1]) >> (32 - DIGIT_BITS)]++;
    }
    if (i < n)
        even[sortable(score[i]) >> (32 - DIGIT_BITS)]++;
    for (int b = 0; b < BUCKETS; b++)
        even[b] += odd[b];
    return find_bucket(even, BUCKETS, rank);
}

/* The `bits` bits at `shift` of the *rank-th largest of v[n]; keeps in v those that have them. */
static uint32_t next_digit(uint32_t *v, int *n, int shift, int bits, uint32_t *count, int *rank) {
    uint32_t mask = (1u << bits) - 1;
    memset(count, 0, (mask + 1) * sizeof *count);
    for (int i = 0; i < *n; i++)
        count[(v[i] >> shift) & mask]++;
    uint32_t digit = find_bucket(count, (int)mask + 1, rank);
    int kept = 0;
    for (int i = 0; i < *n; i++) {
        uint32_t u = v[i];
        v[kept] = u;
        kept += ((u >> shift) & mask) == digit;
    }
    *n = kept;
    return digit;
}

size_t cpu_top_k_work(int n) {
    return 2 * (size_t)BUCKETS + 3 * (size_t)n;
}

void cpu_top_k(const float *score, int n, int k, uint32_t *work, int32_t *pos) {
    uint32_t *count = work, *value = work + 2 * (size_t)BUCKETS, *place = value + n,
             *same = place + n;
    int rank = k, n_left = 0, n_same = 0;
    uint32_t edge = leading_digit(score, n, count, &rank) << (32 - DIGIT_BITS);
    for (int i = 0; i < n; i++) { /* drops what is below the k-th largest by its leading digit */
        uint32_t u = sortable(score[i]);
        value[n_left] = u;
        place[n_left] = (uint32_t)i;
        n_left += u >= edge;
    }
    for (int i = 0; i < n_left; i++) {
        same[n_same] = value[i];
        n_same += value[i] >> (32 - DIGIT_BITS) == edge >> (32 - DIGIT_BITS);
    }
    edge |= next_digit(same, &n_same, LAST_BITS, DIGIT_BITS, count, &rank) << LAST_BITS;
    edge |= next_digit(same, &n_same, 0, LAST_BITS, count, &rank);
    /* everything above the edge, and the first `rank` of those on it */
    for (int i = 0, m = 0; m < k; i++) {
        int on_edge = value[i] == edge;
        pos[m] = (int32_t)place[i];
        m += (value[i] > edge) | (on_edge & (rank > 0));
        rank -= on_edge;
    }
}
