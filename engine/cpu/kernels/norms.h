/* RMSNorm in float32, as `transformers` computes it: over the input, then times the weight. */
#ifndef TANDEM_NORMS_H
#define TANDEM_NORMS_H

#include "tile.h"

/* Returns 1 / sqrt(mean of squares + eps). */
TD_INLINE vec inverse_rms(const float *x, int64_t width, float eps) {
    vec sum = v_zero(), other = v_zero();
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        vec a = v_loadu(x + i), b = v_loadu(x + i + LANES);
        sum = v_fma(a, a, sum);
        other = v_fma(b, b, other);
    }
    for (; i < width; i += LANES) {
        vec a = v_load_some(first_lanes(width - i), x + i);
        sum = v_fma(a, a, sum);
    }
    return v_set(1.0f / sqrtf(v_sum(v_add(sum, other)) / (float)width + eps));
}

void td_rms_norm(const float *x, int64_t rows, int64_t width, const float *weight, float eps, bf16 *y) {
    for (int64_t row = 0; row < rows; row++, x += width, y += width) {
        vec inverse = inverse_rms(x, width, eps);
        for (int64_t i = 0; i < width; i += LANES) {
            vmask lanes = first_lanes(width - i);
            vec normed = v_mul(v_load_some(lanes, x + i), inverse);
            store_some_bf16(y + i, lanes, v_mul(normed, v_load_some(lanes, weight + i)));
        }
    }
}

static void td_round(const float *x, int64_t count, bf16 *y) {
    for (int64_t i = 0; i < count; i += LANES) {
        vmask lanes = first_lanes(count - i);
        store_some_bf16(y + i, lanes, v_load_some(lanes, x + i));
    }
}

static void td_norm_in_place(float *x, int64_t width, const float *weight, float eps) {
    vec inverse = inverse_rms(x, width, eps);
    for (int64_t i = 0; i < width; i += LANES) {
        vmask lanes = first_lanes(width - i);
        vec normed = v_mul(v_load_some(lanes, x + i), inverse);
        v_store_some(x + i, lanes, v_mul(normed, v_load_some(lanes, weight + i)));
    }
}

static void td_add_rows(float *sums, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        vmask lanes = first_lanes(count - i);
        vec sum = v_add(v_load_some(lanes, sums + i), v_load_some(lanes, x + i));
        v_store_some(sums + i, lanes, sum);
    }
}

#endif
