/* RMSNorm in float32, as `transformers` computes it: over the input, then times the weight. */
#include "norms.h"

#include <math.h>

#include "tile.h"

TD_VECTOR_BEGIN

/* Returns 1 / sqrt(mean of squares + eps). */
TD_INLINE __m512 inverse_rms(const float *x, int64_t width, float eps) {
    __m512 sum = _mm512_setzero_ps(), other = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + LANES);
        sum = _mm512_fmadd_ps(a, a, sum);
        other = _mm512_fmadd_ps(b, b, other);
    }
    for (; i < width; i += LANES) {
        __m512 a = _mm512_maskz_loadu_ps(first_lanes(width - i), x + i);
        sum = _mm512_fmadd_ps(a, a, sum);
    }
    return _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(sum, other)) / (float)width + eps));
}

void td_rms_norm(const float *x, int64_t rows, int64_t width, const float *weight, float eps, bf16 *y) {
    for (int64_t row = 0; row < rows; row++, x += width, y += width) {
        __m512 inverse = inverse_rms(x, width, eps);
        for (int64_t i = 0; i < width; i += LANES) {
            __mmask16 lanes = first_lanes(width - i);
            __m512 normed = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), inverse);
            store_bf16(y + i, lanes, _mm512_mul_ps(normed, _mm512_maskz_loadu_ps(lanes, weight + i)));
        }
    }
}

void td_round(const float *x, int64_t count, bf16 *y) {
    for (int64_t i = 0; i < count; i += LANES) {
        __mmask16 lanes = first_lanes(count - i);
        store_bf16(y + i, lanes, _mm512_maskz_loadu_ps(lanes, x + i));
    }
}

void td_norm_in_place(float *x, int64_t width, const float *weight, float eps) {
    __m512 inverse = inverse_rms(x, width, eps);
    for (int64_t i = 0; i < width; i += LANES) {
        __mmask16 lanes = first_lanes(width - i);
        __m512 normed = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), inverse);
        _mm512_mask_storeu_ps(x + i, lanes, _mm512_mul_ps(normed, _mm512_maskz_loadu_ps(lanes, weight + i)));
    }
}

void td_add_rows(float *sums, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        __mmask16 lanes = first_lanes(count - i);
        __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, sums + i), _mm512_maskz_loadu_ps(lanes, x + i));
        _mm512_mask_storeu_ps(sums + i, lanes, sum);
    }
}

TD_VECTOR_END
