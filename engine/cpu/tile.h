/* Code that all kernels share: vector instructions, the register tile of every product, packing, exponentials. Files
 * that must run on any processor do not include it.
 */
#ifndef TANDEM_TILE_H
#define TANDEM_TILE_H

#include <immintrin.h>
#include <string.h>

#include "kernels.h"

/* Between these two, functions are compiled for the processors that td_supported() accepts. */
#ifdef __clang__
#define TD_VECTOR_BEGIN                                                                                               \
    _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma\"))), "  \
            "apply_to = function)")
#define TD_VECTOR_END _Pragma("clang attribute pop")
#else
#define TD_VECTOR_BEGIN _Pragma("GCC target(\"avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma\")")
#define TD_VECTOR_END
#endif
#define TD_INLINE static inline __attribute__((always_inline, unused))
#define TD_UNROLL _Pragma("GCC unroll 16")

enum {
    LANES = 16,                    /* floats of a register */
    TILE_ROWS = 6,                 /* 6 x 4 accumulators, 4 registers of weights and one of x fit the 32 registers */
    TILE_VECTORS = 4,
    PANEL = TILE_VECTORS * LANES,  /* columns of a packed matrix that lie together: [in_features / 2][PANEL][2] */
};

static inline int64_t td_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t td_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t td_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t td_align(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

TD_VECTOR_BEGIN

/* Returns the mask of the first `count` of 16 lanes; 0 for a negative count. */
TD_INLINE __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

/* Stores x as bf16, rounded to nearest, ties to even. */
TD_INLINE void store_bf16(bf16 *place, __mmask16 lanes, __m512 x) {
    _mm256_mask_storeu_epi16(place, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}

/* acc[rows][vectors] += a[rows][2 * pairs] times the panel b; `rows` and `vectors` are constants where it is inlined.
 * One accumulator sums over all of k, so a row's sums do not depend on the number of rows. `fetched` cache lines from
 * `ahead` on are prefetched with each pair. Four lines, a whole pair, go to the first-level cache, as they are used
 * within 8 KB; fewer go to the second level, where whole slabs fit. Measured in benchmarks/results/cpu_engine.md.
 */
TD_INLINE void multiply(__m512 acc[TILE_ROWS][TILE_VECTORS], const int rows, const bf16 *a, int64_t a_stride,
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
            if (fetched == TILE_VECTORS)
                _mm_prefetch(ahead + (pair * fetched + line) * 64, _MM_HINT_T0);
            else
                _mm_prefetch(ahead + (pair * fetched + line) * 64, _MM_HINT_T1);
    }
}

/* Returns 2^x with a relative error below 3e-7; 0 on underflow, infinity on overflow. */
TD_INLINE __m512 exp2_ps(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 part = _mm512_sub_ps(x, whole); /* of [-1/2, 1/2] */
    __m512 y = _mm512_set1_ps(1.3333558e-3f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

/* Returns x / (1 + e^-z). */
TD_INLINE __m512 times_sigmoid(__m512 x, __m512 z) {
    __m512 e = exp2_ps(_mm512_mul_ps(z, _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
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

/* Rows of bf16; row i begins `places[i]` elements after `base`. Rows from `count` on are taken as zero. */
typedef struct {
    const bf16 *base;
    const int64_t *places; /* [64] */
    int64_t count;
} Rows;

/* Packs 16 rows of `pairs` pairs as 16 columns of a panel. `whole`: no row and no pair is missing. */
TD_INLINE void pack_square(const Rows *rows, int64_t first, int64_t pair, int64_t pairs, const int whole, bf16 *out) {
    __m512i in[LANES];
    TD_UNROLL for (int r = 0; r < LANES; r++) {
        const bf16 *row = rows->base + rows->places[first + r] + pair * 2;
        __mmask16 lanes = first + r < rows->count ? first_lanes(pairs) : 0;
        in[r] = whole ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi32(lanes, row);
    }
    transpose_pairs(in, out, whole ? LANES : pairs);
}

/* Packs one panel of rows of `width` elements (even). With each read of a row, the same elements of the row of `ahead`
 * with the same number are prefetched into the second-level cache. */
TD_INLINE void pack_rows(const Rows *rows, int64_t width, const Rows *ahead, bf16 *panel) {
    for (int64_t pair = 0; pair < width / 2; pair += LANES) {
        int64_t pairs = td_min(width / 2 - pair, LANES);
        for (int64_t first = 0; first < PANEL; first += LANES) {
            bf16 *out = panel + (pair * PANEL + first) * 2;
            TD_UNROLL for (int r = 0; r < LANES; r++)
                _mm_prefetch((const char *)(ahead->base + ahead->places[first + r] + pair * 2), _MM_HINT_T1);
            if (pairs == LANES && first + LANES <= rows->count)
                pack_square(rows, first, pair, pairs, 1, out);
            else
                pack_square(rows, first, pair, pairs, 0, out);
        }
    }
}

TD_VECTOR_END

#endif
