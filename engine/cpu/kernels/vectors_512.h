/* The vector operations of the forward for AVX-512 BF16. vectors_256.h has the same operations for AVX2. */
#ifndef TANDEM_VECTORS_H
#define TANDEM_VECTORS_H

#include "base.h"

enum {
    LANES = 16,                    /* floats of a register */
    TILE_ROWS = 6,                 /* 6 x 4 accumulators, 4 registers of weights and one of x fit the 32 registers */
    TILE_VECTORS = PANEL / LANES,
};
#define FOR_EACH_ROWS(use) use(1) use(2) use(3) use(4) use(5) use(6) /* up to TILE_ROWS */

typedef __m512 vec;      /* LANES floats */
typedef __mmask16 vmask; /* which lanes of a vec */
typedef __mmask32 emask; /* which of 2 * LANES elements of bf16 */

TD_INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
TD_INLINE vec v_set(float x) { return _mm512_set1_ps(x); }
TD_INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
TD_INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
TD_INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
TD_INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
TD_INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
TD_INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); } /* a * b + c */
TD_INLINE vec v_fms(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); } /* a * b - c */
TD_INLINE vec v_max_of(const vec x[TILE_VECTORS]) { return v_max(v_max(x[0], x[1]), v_max(x[2], x[3])); }
TD_INLINE float v_sum(vec x) { return _mm512_reduce_add_ps(x); }
TD_INLINE vec v_round(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TD_INLINE vec v_scale(vec x, vec whole) { return _mm512_scalef_ps(x, whole); } /* x * 2^whole */
TD_INLINE vec v_where(vmask lanes, vec yes, vec no) { return _mm512_mask_mov_ps(no, lanes, yes); }

/* The addresses of v_load and v_store are aligned to a register. Lanes that v_load_some does not read are zero. */
TD_INLINE vec v_load(const float *place) { return _mm512_load_ps(place); }
TD_INLINE vec v_loadu(const float *place) { return _mm512_loadu_ps(place); }
TD_INLINE vec v_load_some(vmask lanes, const float *place) { return _mm512_maskz_loadu_ps(lanes, place); }
TD_INLINE void v_store(float *place, vec x) { _mm512_store_ps(place, x); }
TD_INLINE void v_store_some(float *place, vmask lanes, vec x) { _mm512_mask_storeu_ps(place, lanes, x); }

/* Returns the mask of the first `count` lanes; 0 for a negative count. */
TD_INLINE vmask first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (vmask)((1u << count) - 1);
}

/* Returns the mask whose lane i is bit i. */
TD_INLINE vmask mask_of_bits(uint64_t bits) { return (vmask)bits; }

/* Returns the mask of the first elements of a row that has `count` left, a multiple of 16. */
TD_INLINE emask first_elements(int64_t count) { return count >= 2 * LANES ? 0xffffffff : 0xffff; }

/* Stores x as bf16, rounded to nearest, ties to even. */
TD_INLINE void store_some_bf16(bf16 *place, vmask lanes, vec x) {
    _mm256_mask_storeu_epi16(place, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}
TD_INLINE void store_bf16(bf16 *place, vec x) { store_some_bf16(place, 0xffff, x); }

/* acc[rows][vectors] += a[rows][2 * pairs] times the panel b; `rows` and `vectors` are constants where it is inlined.
 * One accumulator sums over all of k, so a row's sums do not depend on the number of rows. `fetched` cache lines from
 * `ahead` on are prefetched with each pair. Four lines, a whole pair, go to the first-level cache, as they are used
 * within 8 KB; fewer go to the second level, where whole slabs fit. Measured in benchmarks/results/cpu_engine.md.
 */
TD_INLINE void multiply(vec acc[TILE_ROWS][TILE_VECTORS], const int rows, const bf16 *a, int64_t a_stride,
                        const bf16 *b, int64_t pairs, const char *ahead, const int fetched) {
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh w[TILE_VECTORS];
        TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++)
            w[v] = (__m512bh)_mm512_load_si512(b + (pair * PANEL + v * LANES) * 2);
        TD_UNROLL for (int r = 0; r < rows; r++) {
            int two;
            memcpy(&two, a + r * a_stride + pair * 2, sizeof two);
            __m512bh x = (__m512bh)_mm512_set1_epi32(two);
            TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], x, w[v]);
        }
        TD_UNROLL for (int line = 0; line < fetched; line++)
            if (fetched == PAIR_LINES)
                _mm_prefetch(ahead + (pair * fetched + line) * 64, _MM_HINT_T0);
            else
                _mm_prefetch(ahead + (pair * fetched + line) * 64, _MM_HINT_T1);
    }
}

/* Transposes 16 rows of 16 pairs into rows of a panel and writes the first `pairs` of them. */
TD_INLINE void transpose_pairs(__m512i in[LANES], bf16 *out, int64_t pairs) {
    __m512i a[LANES], b[LANES];
    TD_UNROLL for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    TD_UNROLL for (int i = 0; i < LANES; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    TD_UNROLL for (int i = 0; i < 4; i++) { /* b[i], b[4 + i], ...: column i of every quarter */
        a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    }
    TD_UNROLL for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
        b[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
        b[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
        b[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
    }
    TD_UNROLL for (int i = 0; i < LANES; i++)
        if (i < pairs) _mm512_store_si512(out + i * PANEL * 2, b[i]);
}

/* Packs 16 rows of `pairs` pairs as 16 columns of a panel. `whole`: no row and no pair is missing. */
TD_INLINE void pack_square(const Rows *rows, int64_t first, int64_t pair, int64_t pairs, const int whole, bf16 *out) {
    __m512i in[LANES];
    TD_UNROLL for (int r = 0; r < LANES; r++) {
        const bf16 *row = rows->base + rows->places[first + r] + pair * 2;
        vmask lanes = first + r < rows->count ? first_lanes(pairs) : 0;
        in[r] = whole ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi32(lanes, row);
    }
    transpose_pairs(in, out, whole ? LANES : pairs);
}

/* Packs 32 elements of 64 rows. `whole`: no row and no element is missing. */
TD_INLINE void pack_columns(const Rows *rows, int64_t column, emask there, const Rows *ahead, const int whole,
                            bf16 *out) {
    short order[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++) order[i] = (short)((i & 1) * 2 * LANES + i / 2);
    __m512i low = _mm512_loadu_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
    for (int64_t row = 0; row < PANEL; row += 2, out += PANEL * 2) {
        const bf16 *even = rows->base + rows->places[row] + column;
        const bf16 *odd = rows->base + rows->places[row + 1] + column;
        __m512i a = whole ? _mm512_loadu_si512(even) : _mm512_maskz_loadu_epi16(row < rows->count ? there : 0, even);
        __m512i b = whole ? _mm512_loadu_si512(odd) : _mm512_maskz_loadu_epi16(row + 1 < rows->count ? there : 0, odd);
        _mm_prefetch((const char *)(ahead->base + ahead->places[row] + column), _MM_HINT_T1);
        _mm_prefetch((const char *)(ahead->base + ahead->places[row + 1] + column), _MM_HINT_T1);
        _mm512_store_si512(out, _mm512_permutex2var_epi16(a, low, b));
        _mm512_store_si512(out + 2 * LANES, _mm512_permutex2var_epi16(a, high, b));
    }
}

/* Returns the largest lane of each of 8 registers; that of register i is in lane LARGEST_LANE(i). */
#define LARGEST_LANE(i) ((i) % 4 * 4 + (i) / 4)
TD_INLINE vec largest_lanes(const vec x[8]) {
    vec half[4], quarter[2];
    TD_UNROLL for (int i = 0; i < 4; i++) half[i] =
        v_max(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44), _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
    TD_UNROLL for (int i = 0; i < 2; i++)
        quarter[i] = v_max(_mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0x88),
                           _mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0xdd));
    vec pairs = v_max(_mm512_unpacklo_ps(quarter[0], quarter[1]), _mm512_unpackhi_ps(quarter[0], quarter[1]));
    return v_max(pairs, _mm512_permute_ps(pairs, 0x4e));
}

#endif
