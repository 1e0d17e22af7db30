/* The sums of digests with AVX-512 VNNI.
 *
 * One vpdpbusd adds 4 products to each of 16 sums, so the work is 16 of them per 64 bytes, one per cycle:
 *
 * - The vector holds the 16 sums of one piece. Four bytes of the piece are broadcast by the instruction itself, and its
 *   64 coefficients are loaded once for all pieces. So a sum stays in one register, and nothing is added across lanes.
 * - The unsigned operand holds the coefficients plus 128. The excess, 128 times the sum of the piece's bytes, is
 *   subtracted at the end.
 *
 * Coefficients: uint8, [PIECE / 4][SUMS][4], plus 128.
 */
#include <immintrin.h>
#include <string.h>

#include "digest_sums.h"

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define INLINE static inline __attribute__((always_inline)) VNNI

enum { PIECES = 8 };

INLINE __m512i add_products(__m512i sums, __m512i unsigned_bytes, __m512i signed_bytes) {
    /* Assembly, because with the intrinsic GCC 12 copies the sums before and after it. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
    return sums;
}

/* Copies a band to the target and to `kept`, and adds its bytes to `total`. */
INLINE __m512i take_band(const uint8_t *source, uint8_t *target, uint8_t *kept, __m512i total, int is_streamed) {
    const __m512i ones = _mm512_set1_epi8(1);
    _Pragma("GCC unroll 8") for (int i = 0; i < BAND; i += LINE) {
        const __m512i bytes = _mm512_loadu_si512(source + i);
        if (target && is_streamed)
            _mm512_stream_si512((__m512i *)(target + i), bytes);
        else if (target)
            _mm512_storeu_si512(target + i, bytes);
        _mm512_store_si512(kept + i, bytes);
        total = add_products(total, ones, bytes);
    }
    return total;
}

/* Does the same for the last bytes of a row; `kept` is padded with zeros, which change no sum. */
INLINE __m512i take_rest(const uint8_t *source, uint8_t *target, int64_t num_bytes, uint8_t *kept, __m512i total) {
    memset(kept, 0, BAND);
    memcpy(kept, source, (size_t)num_bytes);
    if (target) memcpy(target, kept, (size_t)num_bytes);
    for (int i = 0; i < BAND; i += LINE)
        total = add_products(total, _mm512_set1_epi8(1), _mm512_load_si512(kept + i));
    return total;
}

INLINE void multiply_band(const int num, const uint8_t *kept, const uint8_t *coefficients, __m512i *sums,
                          const uint8_t *const *next) {
    __m512i held[PIECES];
    _Pragma("GCC unroll 8") for (int p = 0; p < num; p++) held[p] = sums[p];
    for (int line = 0; line < BAND; line += LINE) {
        _Pragma("GCC unroll 8") for (int p = 0; p < num; p++) _mm_prefetch((const char *)next[p] + line, _MM_HINT_T0);
        _Pragma("GCC unroll 2") for (int i = line; i < line + LINE; i += 4) {
            const __m512i factors = _mm512_load_si512(coefficients + i * SUMS);
            _Pragma("GCC unroll 8") for (int p = 0; p < num; p++)
                __asm__("vpdpbusd %2%{1to16%}, %1, %0"
                        : "+v"(held[p])
                        : "v"(factors), "m"(*(const int32_t *)(kept + p * BAND + i)));
        }
    }
    _Pragma("GCC unroll 8") for (int p = 0; p < num; p++) sums[p] = held[p];
}

INLINE void sum_some(const int num, const td_pieces *pieces, int64_t num_bytes, const uint8_t *coefficients,
                     int is_streamed) {
    __attribute__((aligned(64))) uint8_t kept[PIECES * BAND];
    __m512i sums[PIECES], totals[PIECES];
    for (int p = 0; p < num; p++) sums[p] = totals[p] = _mm512_setzero_si512();
    for (int64_t start = 0; start < num_bytes; start += BAND) {
        const int64_t left = num_bytes - start;
        const uint8_t *next[PIECES];
        for (int p = 0; p < num; p++) {
            const uint8_t *source = pieces->source[p] + start;
            uint8_t *target = pieces->target[p] ? pieces->target[p] + start : NULL;
            totals[p] = left >= BAND ? take_band(source, target, kept + p * BAND, totals[p], is_streamed)
                                     : take_rest(source, target, left, kept + p * BAND, totals[p]);
            next[p] = left >= 2 * BAND ? source + BAND : pieces->next[p];
        }
        multiply_band(num, kept, coefficients + start * SUMS, sums, next);
    }
    for (int p = 0; p < num; p++) {
        const __m512i added = _mm512_set1_epi32(128 * _mm512_reduce_add_epi32(totals[p]));
        _mm512_storeu_si512(pieces->sums[p], _mm512_sub_epi32(sums[p], added));
    }
}

VNNI static void sum_pieces(int num, const td_pieces *pieces, int64_t num_bytes, const void *coefficients,
                            int is_streamed) {
    switch (num) {
        case 8: sum_some(8, pieces, num_bytes, coefficients, is_streamed); break;
        case 7: sum_some(7, pieces, num_bytes, coefficients, is_streamed); break;
        case 6: sum_some(6, pieces, num_bytes, coefficients, is_streamed); break;
        case 5: sum_some(5, pieces, num_bytes, coefficients, is_streamed); break;
        case 4: sum_some(4, pieces, num_bytes, coefficients, is_streamed); break;
        case 3: sum_some(3, pieces, num_bytes, coefficients, is_streamed); break;
        case 2: sum_some(2, pieces, num_bytes, coefficients, is_streamed); break;
        case 1: sum_some(1, pieces, num_bytes, coefficients, is_streamed); break;
    }
}

static int is_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

const td_kernel td_by_512 = {512, PIECES, PIECE * SUMS, is_supported, sum_pieces};
