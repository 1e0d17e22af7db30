/* The sums of digests with AVX2.
 *
 * One vpmaddwd multiplies 16 numbers of 16 bits and adds their products by pairs, exactly: two bytes of a piece, widened
 * and broadcast, with the coefficients of 8 sums. A piece has its 16 sums in two registers, so the sums of four pieces and
 * the coefficients fill half of the sixteen, and nothing is added across lanes. The instruction that multiplies bytes is
 * of no use: its sums of pairs saturate.
 *
 * Coefficients: int16, [PIECE / 2][SUMS][2].
 */
#include <immintrin.h>
#include <string.h>

#include "digest_sums.h"

#define INLINE static inline __attribute__((always_inline, target("avx2")))

enum { PIECES = 4, HALF = 32 };

/* Copies a band to the target and, widened, to `kept`. */
INLINE void take_band(const uint8_t *source, uint8_t *target, int16_t *kept, int is_streamed) {
    for (int i = 0; i < BAND; i += HALF) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(source + i));
        if (target && is_streamed)
            _mm256_stream_si256((__m256i *)(target + i), bytes);
        else if (target)
            _mm256_storeu_si256((__m256i *)(target + i), bytes);
        _mm256_store_si256((__m256i *)(kept + i), _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)));
        _mm256_store_si256((__m256i *)(kept + i + HALF / 2), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1)));
    }
}

/* Does the same for the last bytes of a row; `kept` is padded with zeros, which change no sum. */
INLINE void take_rest(const uint8_t *source, uint8_t *target, int64_t num_bytes, int16_t *kept) {
    uint8_t rest[BAND] = {0};
    memcpy(rest, source, (size_t)num_bytes);
    if (target) memcpy(target, rest, (size_t)num_bytes);
    take_band(rest, NULL, kept, 0);
}

INLINE void multiply_band(const int num, const int16_t *kept, const int16_t *coefficients, __m256i *sums,
                          const uint8_t *const *next) {
    __m256i held[2 * PIECES];
    _Pragma("GCC unroll 8") for (int i = 0; i < 2 * num; i++) held[i] = sums[i];
    for (int line = 0; line < BAND; line += LINE) {
        _Pragma("GCC unroll 4") for (int p = 0; p < num; p++) _mm_prefetch((const char *)next[p] + line, _MM_HINT_T0);
        for (int i = line; i < line + LINE; i += 2) {
            const __m256i first = _mm256_load_si256((const __m256i *)(coefficients + i * SUMS));
            const __m256i second = _mm256_load_si256((const __m256i *)(coefficients + (i + 1) * SUMS));
            _Pragma("GCC unroll 4") for (int p = 0; p < num; p++) {
                int32_t pair;
                memcpy(&pair, kept + p * BAND + i, sizeof pair);
                const __m256i bytes = _mm256_set1_epi32(pair);
                held[2 * p] = _mm256_add_epi32(held[2 * p], _mm256_madd_epi16(bytes, first));
                held[2 * p + 1] = _mm256_add_epi32(held[2 * p + 1], _mm256_madd_epi16(bytes, second));
            }
        }
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 2 * num; i++) sums[i] = held[i];
}

INLINE void sum_some(const int num, const td_pieces *pieces, int64_t num_bytes, const int16_t *coefficients,
                     int is_streamed) {
    __attribute__((aligned(64))) int16_t kept[PIECES * BAND];
    __m256i sums[2 * PIECES];
    for (int i = 0; i < 2 * num; i++) sums[i] = _mm256_setzero_si256();
    for (int64_t start = 0; start < num_bytes; start += BAND) {
        const int64_t left = num_bytes - start;
        const uint8_t *next[PIECES];
        for (int p = 0; p < num; p++) {
            const uint8_t *source = pieces->source[p] + start;
            uint8_t *target = pieces->target[p] ? pieces->target[p] + start : NULL;
            if (left >= BAND)
                take_band(source, target, kept + p * BAND, is_streamed);
            else
                take_rest(source, target, left, kept + p * BAND);
            next[p] = left >= 2 * BAND ? source + BAND : pieces->next[p];
        }
        multiply_band(num, kept, coefficients + start * SUMS, sums, next);
    }
    for (int i = 0; i < 2 * num; i++)
        _mm256_storeu_si256((__m256i *)(pieces->sums[i / 2] + 8 * (i % 2)), sums[i]);
}

__attribute__((target("avx2"))) static void sum_pieces(int num, const td_pieces *pieces, int64_t num_bytes,
                                                       const void *coefficients, int is_streamed) {
    switch (num) {
        case 4: sum_some(4, pieces, num_bytes, coefficients, is_streamed); break;
        case 3: sum_some(3, pieces, num_bytes, coefficients, is_streamed); break;
        case 2: sum_some(2, pieces, num_bytes, coefficients, is_streamed); break;
        case 1: sum_some(1, pieces, num_bytes, coefficients, is_streamed); break;
    }
}

static int is_supported(void) { return __builtin_cpu_supports("avx2"); }

const td_kernel td_by_256 = {256, PIECES, 2 * PIECE * SUMS, is_supported, sum_pieces};
