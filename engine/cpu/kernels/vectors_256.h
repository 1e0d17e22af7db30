/* The vector operations of the forward for AVX2 and FMA. vectors_512.h has the same operations for AVX-512 BF16. */
#ifndef TANDEM_VECTORS_H
#define TANDEM_VECTORS_H

#include "base.h"

enum {
    LANES = 8,     /* floats of a register */
    TILE_ROWS = 5, /* 5 x 2 accumulators, 2 registers of weights and one of x fit the 16 registers; of 6, some spill */
    TILE_VECTORS = PANEL / LANES,
};
#define FOR_EACH_ROWS(use) use(1) use(2) use(3) use(4) use(5) /* up to TILE_ROWS */

typedef __m256 vec;    /* LANES floats */
typedef __m256i vmask; /* which lanes of a vec */
typedef int emask;     /* whether 2 * LANES elements of bf16 are there */

TD_INLINE vec v_zero(void) { return _mm256_setzero_ps(); }
TD_INLINE vec v_set(float x) { return _mm256_set1_ps(x); }
TD_INLINE vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
TD_INLINE vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
TD_INLINE vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
TD_INLINE vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
TD_INLINE vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
TD_INLINE vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); } /* a * b + c */
TD_INLINE vec v_fms(vec a, vec b, vec c) { return _mm256_fmsub_ps(a, b, c); } /* a * b - c */
TD_INLINE vec v_round(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TD_INLINE vec v_where(vmask lanes, vec yes, vec no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(lanes)); }

TD_INLINE vec v_max_of(const vec x[TILE_VECTORS]) {
    return v_max(v_max(v_max(x[0], x[1]), v_max(x[2], x[3])), v_max(v_max(x[4], x[5]), v_max(x[6], x[7])));
}

TD_INLINE float v_sum(vec x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

TD_INLINE vec power_of_two(__m256i whole) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23));
}

/* Returns x * 2^whole, in two steps, each of which a float can hold. */
TD_INLINE vec v_scale(vec x, vec whole) {
    vec within = _mm256_min_ps(v_set(254), v_max(v_set(-252), whole));
    __m256i all = _mm256_cvtps_epi32(within), half = _mm256_srai_epi32(all, 1);
    return v_mul(v_mul(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(all, half)));
}

/* Returns the mask of the first `count` lanes; no lane for a negative count. */
TD_INLINE vmask first_lanes(int64_t count) {
    int within = count >= LANES ? LANES : count <= 0 ? 0 : (int)count;
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(within), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Returns the mask whose lane i is bit i. */
TD_INLINE vmask mask_of_bits(uint64_t bits) {
    __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)(bits & 0xff)), each), each);
}

/* Returns the mask of the first elements of a row that has `count` left, a multiple of 16. */
TD_INLINE emask first_elements(int64_t count) { return count >= 2 * LANES; }

TD_INLINE int has_all(vmask lanes) { return _mm256_movemask_ps(_mm256_castsi256_ps(lanes)) == 0xff; }

/* The addresses of v_load and v_store are aligned to a register. Lanes that v_load_some does not read are zero. */
TD_INLINE vec v_load(const float *place) { return _mm256_load_ps(place); }
TD_INLINE vec v_loadu(const float *place) { return _mm256_loadu_ps(place); }
TD_INLINE vec v_load_some(vmask lanes, const float *place) { return _mm256_maskload_ps(place, lanes); }
TD_INLINE void v_store(float *place, vec x) { _mm256_store_ps(place, x); }
TD_INLINE void v_store_some(float *place, vmask lanes, vec x) {
    if (has_all(lanes)) /* a store under a mask takes tens of cycles on some processors */
        _mm256_storeu_ps(place, x);
    else
        _mm256_maskstore_ps(place, lanes, x);
}

/* Stores x as bf16, rounded to nearest, ties to even. */
TD_INLINE __m128i bf16_of(vec x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)); /* rounding could make it an infinity */
    vec is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256i kept = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(is_nan));
    __m256i high = _mm256_srli_epi32(kept, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
TD_INLINE void store_bf16(bf16 *place, vec x) { _mm_storeu_si128((__m128i *)place, bf16_of(x)); }
TD_INLINE void store_some_bf16(bf16 *place, vmask lanes, vec x) {
    bf16 all[LANES];
    if (has_all(lanes)) {
        store_bf16(place, x);
    } else {
        store_bf16(all, x);
        memcpy(place, all, 2 * (size_t)__builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(lanes))));
    }
}

enum { PIECE = 128 }; /* pairs that are multiplied at once; the widened rows of as many stay in the first-level cache */

/* Rows of a product's left side in float32. */
typedef struct {
    float of[TILE_ROWS][2 * PIECE];
} __attribute__((aligned(32))) Widened;

TD_INLINE void widen(Widened *x, const int rows, const bf16 *a, int64_t a_stride, int64_t pairs) {
    for (int64_t i = 0; i < 2 * pairs; i += LANES)
        TD_UNROLL for (int r = 0; r < rows; r++) {
            __m128i eight = _mm_setzero_si128();
            if (i + LANES <= 2 * pairs)
                eight = _mm_loadu_si128((const __m128i *)(a + r * a_stride + i));
            else
                memcpy(&eight, a + r * a_stride + i, (size_t)(2 * pairs - i) * sizeof *a);
            v_store(x->of[r] + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16)));
        }
}

/* The products of some neighbouring registers of a panel, from `first` on, whose accumulators fit the 16 registers. The
 * weights of a pair are widened to float32 where they are: the even one by a shift, the odd one by a mask. */
TD_INLINE void multiply_columns(vec acc[TILE_ROWS][TILE_VECTORS], const int rows, const int first, const int vectors,
                                const Widened *x, const bf16 *b, int64_t pairs, const char *ahead, const int fetched) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    vec sums[TILE_ROWS][TILE_VECTORS];
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = acc[r][first + v];
    for (int64_t pair = 0; pair < pairs; pair++) {
        const __m256i *weights = (const __m256i *)(b + pair * PANEL * 2) + first;
        vec w[TILE_VECTORS];
        TD_UNROLL for (int v = 0; v < vectors; v++)
            w[v] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256(weights + v), 16));
        TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < vectors; v++)
            sums[r][v] = v_fma(v_set(x->of[r][2 * pair]), w[v], sums[r][v]);
        TD_UNROLL for (int v = 0; v < vectors; v++)
            w[v] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256(weights + v), upper));
        TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < vectors; v++)
            sums[r][v] = v_fma(v_set(x->of[r][2 * pair + 1]), w[v], sums[r][v]);
        TD_UNROLL for (int line = 0; line < fetched; line++)
            if (fetched == PAIR_LINES)
                _mm_prefetch(ahead + (pair * fetched + line) * 64, _MM_HINT_T0);
            else
                _mm_prefetch(ahead + (pair * fetched + line) * 64, _MM_HINT_T1);
    }
    TD_UNROLL for (int r = 0; r < rows; r++) TD_UNROLL for (int v = 0; v < vectors; v++) acc[r][first + v] = sums[r][v];
}

/* acc[rows][vectors] += a[rows][2 * pairs] times the panel b; `rows` is a constant where it is inlined. One accumulator
 * sums over all of k, so a row's sums do not depend on the number of rows. `fetched` cache lines from `ahead` on are
 * prefetched with each pair, while the first columns are computed. */
TD_INLINE void multiply(vec (*acc)[TILE_VECTORS], const int rows, const bf16 *a, int64_t a_stride,
                        const bf16 *b, int64_t pairs, const char *ahead, const int fetched) {
    const int vectors = rows == 1 ? TILE_VECTORS : rows == 2 ? 4 : 2; /* measured: benchmarks/results/cpu_engine.md */
    Widened x;
    __asm__ volatile("" : "+r"(acc) : : "memory"); /* keeps all but the sums of the present columns in memory */
    for (int64_t begin = 0; begin < pairs; begin += PIECE) {
        int64_t count = td_min(PIECE, pairs - begin);
        widen(&x, rows, a + begin * 2, a_stride, count);
        TD_UNROLL for (int first = 0; first < TILE_VECTORS; first += vectors)
            multiply_columns(acc, rows, first, vectors, &x, b + begin * PANEL * 2, count,
                             ahead + begin * fetched * 64, first ? 0 : fetched);
    }
}

/* Transposes 8 rows of 8 pairs into rows of a panel and writes the first `pairs` of them. */
TD_INLINE void transpose_pairs(__m256i in[LANES], bf16 *out, int64_t pairs) {
    __m256i a[LANES], b[LANES];
    TD_UNROLL for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
    }
    TD_UNROLL for (int i = 0; i < LANES; i += 4) { /* b[i + j]: columns j and j + 4 of four rows */
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    TD_UNROLL for (int i = 0; i < 4; i++) {
        a[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        a[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
    TD_UNROLL for (int i = 0; i < LANES; i++)
        if (i < pairs) _mm256_store_si256((__m256i *)(out + i * PANEL * 2), a[i]);
}

/* Packs 8 rows of `pairs` pairs as 8 columns of a panel. `whole`: no row and no pair is missing. */
TD_INLINE void pack_square(const Rows *rows, int64_t first, int64_t pair, int64_t pairs, const int whole, bf16 *out) {
    __m256i in[LANES];
    TD_UNROLL for (int r = 0; r < LANES; r++) {
        const int *row = (const int *)(rows->base + rows->places[first + r] + pair * 2);
        vmask lanes = first_lanes(first + r < rows->count ? pairs : 0);
        in[r] = whole ? _mm256_loadu_si256((const __m256i *)row) : _mm256_maskload_epi32(row, lanes);
    }
    transpose_pairs(in, out, whole ? LANES : pairs);
}

TD_INLINE __m256i elements_of(const bf16 *row, emask there) {
    return there ? _mm256_loadu_si256((const __m256i *)row) : _mm256_setzero_si256();
}

/* Packs 16 elements of 64 rows. `whole`: no row is missing. */
TD_INLINE void pack_columns(const Rows *rows, int64_t column, emask there, const Rows *ahead, const int whole,
                            bf16 *out) {
    for (int64_t row = 0; row < PANEL; row += 2, out += PANEL * 2) {
        const bf16 *even = rows->base + rows->places[row] + column;
        const bf16 *odd = rows->base + rows->places[row + 1] + column;
        __m256i a = elements_of(even, whole || (row < rows->count && there));
        __m256i b = elements_of(odd, whole || (row + 1 < rows->count && there));
        __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
        _mm_prefetch((const char *)(ahead->base + ahead->places[row] + column), _MM_HINT_T1);
        _mm_prefetch((const char *)(ahead->base + ahead->places[row + 1] + column), _MM_HINT_T1);
        _mm256_store_si256((__m256i *)out, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_store_si256((__m256i *)out + 1, _mm256_permute2x128_si256(low, high, 0x31));
    }
}

/* Returns the largest lane of each of 8 registers; that of register i is in lane LARGEST_LANE(i). */
#define LARGEST_LANE(i) (i)
TD_INLINE vec largest_lanes(const vec x[8]) {
    vec half[4], quarter[2];
    TD_UNROLL for (int i = 0; i < 4; i++)
        half[i] = v_max(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    TD_UNROLL for (int i = 0; i < 2; i++)
        quarter[i] = v_max(_mm256_shuffle_ps(half[2 * i], half[2 * i + 1], 0x44),
                           _mm256_shuffle_ps(half[2 * i], half[2 * i + 1], 0xee));
    return v_max(_mm256_permute2f128_ps(quarter[0], quarter[1], 0x20),
                 _mm256_permute2f128_ps(quarter[0], quarter[1], 0x31));
}

#endif
