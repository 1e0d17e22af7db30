/* What the kernels share: exponentials and the packing of rows. */
#ifndef TANDEM_TILE_H
#define TANDEM_TILE_H

/* Returns 2^x with a relative error below 3e-7; 0 on underflow, infinity on overflow. */
TD_INLINE vec v_exp2(vec x) {
    vec whole = v_round(x);
    vec part = v_sub(x, whole); /* of [-1/2, 1/2] */
    vec y = v_set(1.3333558e-3f);
    y = v_fma(y, part, v_set(9.6181291e-3f));
    y = v_fma(y, part, v_set(5.5504109e-2f));
    y = v_fma(y, part, v_set(2.4022651e-1f));
    y = v_fma(y, part, v_set(6.9314718e-1f));
    y = v_fma(y, part, v_set(1.0f));
    return v_scale(y, whole);
}

/* Returns x / (1 + e^-z). */
TD_INLINE vec times_sigmoid(vec x, vec z) {
    vec e = v_exp2(v_mul(z, v_set(-1.44269504f)));
    return v_div(x, v_add(v_set(1.0f), e));
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

#endif
