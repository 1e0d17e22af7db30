/* Draws the tokens that engine/steps/sampler.py, the reference, would draw, at a fraction of its cost.
 *
 * The drawn token has the greatest score + noise, and noise needs two logarithms. The noise of u = 1 - v, -log(-log u),
 * is at most -log v, which is at most -ln 2 times log2 of v as its exponent and mantissa approximate it from below
 * (log2(1 + m) >= m). So a hash and a comparison of float32 exclude all tokens but the few whose score and bound reach
 * the best so far; those are computed in float64, as the reference computes all.
 *
 * Top-k and top-p need a threshold and no order: a quickselect over counts and over masses finds it. No operation is
 * fused or reordered, so every processor computes the same weights and sums.
 */
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

#define ANY_INLINE static inline __attribute__((always_inline))
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

enum { BLOCK = 64, SUMS = 16, SAMPLED = 32, LANES = 32 };

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u, MIX_1 = 0xBF58476D1CE4E5B9u, MIX_2 = 0x94D049BB133111EBu;
static const double MOST_NOISE = 36.8;  /* above the noise of u = 1 - 2^-53 */
static const float SLACK = 1e-3f;       /* above the rounding error of float32 for scores and noise below 100 */
static const double LARGEST_TEMPERATURE = 1e20;

typedef struct {
    float *logits;  /* [vocab], padded with -inf to a multiple of BLOCK; -inf: banned or below min-p */
    int64_t vocab, padded;
    int64_t first;  /* the lowest id with the best logit */
    double best, temperature;
} row_of;

/* Top-k and top-p keep the `count` best tokens, of equals the lowest ids. `least`: the logit of the last one. */
typedef struct {
    float least;
    int64_t count;
} cut;

typedef struct {
    double mass;
    int64_t count;
} share;

typedef int64_t (*keeping)(const float *logits, double *weights, int64_t n, float above, float below, float *left);

ANY_INLINE double score_of(const row_of *row, float logit) { return ((double)logit - row->best) / row->temperature; }

ANY_INLINE uint64_t hash_of(uint64_t key, int64_t id) {
    uint64_t bits = key + (uint64_t)(id + 1) * GOLDEN;
    bits = (bits ^ (bits >> 30)) * MIX_1;
    bits = (bits ^ (bits >> 27)) * MIX_2;
    return (bits ^ (bits >> 31)) >> 12;
}

static double noise_of(uint64_t key, int64_t id) { return -log(-log(((double)hash_of(key, id) + 0.5) * 0x1p-52)); }

/* Returns e^x for x <= 0, within two ulps; 0 below -708, too little to change a sum of at least 1. */
ANY_INLINE double exp_of(double x) {
    static const double inverse[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                     1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
    const double within = x < -708 ? -708 : x;
    const double shifted = within * 1.4426950408889634 + 0x1.8p52; /* the nearest integer, in the low bits */
    const double powers = shifted - 0x1.8p52;
    const double r = (within - powers * 6.93147180369123816490e-01) - powers * 1.90821492927058770002e-10;
    double y = inverse[0];
    _Pragma("GCC unroll 16") for (int i = 1; i < 14; i++) y = y * r + inverse[i];
    uint64_t exponent, bits;
    memcpy(&exponent, &shifted, sizeof exponent);
    memcpy(&bits, &y, sizeof bits);
    bits += exponent << 52;
    memcpy(&y, &bits, sizeof y);
    return x < -708 ? 0 : y;
}

ANY_INLINE float logit_at(const void *logits, const int is_bf16, int64_t id) {
    if (!is_bf16) return ((const float *)logits)[id];
    const uint32_t bits = (uint32_t)((const bf16 *)logits)[id] << 16;
    float logit;
    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

ANY_INLINE const void *logits_of(const td_draws *draws, int64_t row) {
    if (draws->samplings[row].adjusted) return draws->samplings[row].adjusted;
    return (const char *)draws->logits + row * draws->stride * (int64_t)(draws->is_bf16 ? sizeof(bf16) : sizeof(float));
}

ANY_INLINE int is_narrow(const td_draws *draws, int64_t row) {
    return draws->is_bf16 && !draws->samplings[row].adjusted;
}

ANY_INLINE void load(const td_draws *draws, int64_t row, float *to) {
    const void *from = logits_of(draws, row);
    if (!is_narrow(draws, row)) memcpy(to, from, (size_t)draws->vocab * sizeof *to);
    for (int64_t i = 0; is_narrow(draws, row) && i < draws->vocab; i++) to[i] = logit_at(from, 1, i);
}

/* Sets the logits of tokens that a mask excludes to -inf. */
ANY_INLINE void exclude(const uint32_t *mask, int64_t words, int64_t vocab, float *logits) {
    const int64_t whole = vocab / 32 < words ? vocab / 32 : words;
    for (int64_t w = 0; w < whole; w++) {
        const uint32_t bits = mask[w];
        float *const at = logits + w * 32;
        if (bits == UINT32_MAX) continue;
        for (int32_t l = 0; l < 32; l++) at[l] = bits >> l & 1 ? at[l] : -INFINITY;
    }
    for (int64_t i = whole * 32; i < vocab; i++)
        if (i / 32 >= words || !(mask[i / 32] >> (i & 31) & 1)) logits[i] = -INFINITY;
}

/* Returns the lowest id with the best allowed logit, in one pass over the logits in place. Words of a mask that exclude
 * all their tokens are skipped. Returns -1 if one of these logits is NaN or the best one is not finite. */
ANY_INLINE int64_t best_of(const void *logits, const int is_bf16, int64_t vocab, const uint32_t *mask, int64_t words) {
    float most[LANES], best = -INFINITY;
    int32_t places[LANES] = {0}, is_odd[LANES] = {0}, any_odd = 0;
    for (int l = 0; l < LANES; l++) most[l] = -INFINITY;
    for (int64_t w = 0; w * LANES < vocab; w++) {
        const uint32_t bits = !mask ? UINT32_MAX : w < words ? mask[w] : 0;
        if (!bits) continue;
        const int64_t start = w * LANES;
        float at[LANES];
        for (int l = 0; start + LANES > vocab && l < LANES; l++)
            at[l] = start + l < vocab ? logit_at(logits, is_bf16, start + l) : -INFINITY;
        for (int l = 0; start + LANES <= vocab && l < LANES; l++) at[l] = logit_at(logits, is_bf16, start + l);
        for (int l = 0; l < LANES; l++) {
            const float logit = bits & 1u << l ? at[l] : -INFINITY;
            is_odd[l] |= logit != logit;
            places[l] = logit > most[l] ? (int32_t)w : places[l];
            most[l] = logit > most[l] ? logit : most[l];
        }
    }
    for (int l = 0; l < LANES; l++) best = most[l] > best ? most[l] : best;
    for (int l = 0; l < LANES; l++) any_odd |= is_odd[l];
    int64_t id = INT64_MAX;
    for (int l = 0; l < LANES; l++) {
        const int64_t first = (int64_t)places[l] * LANES + l;
        id = most[l] == best && first < id ? first : id;
    }
    return any_odd || !(fabsf(best) <= FLT_MAX) ? -1 : id;
}

ANY_INLINE int64_t greedy_of(const td_draws *draws, int64_t row) {
    const void *logits = logits_of(draws, row);
    const uint32_t *mask = draws->samplings[row].mask;
    if (is_narrow(draws, row)) return best_of(logits, 1, draws->vocab, mask, draws->mask_words);
    return best_of(logits, 0, draws->vocab, mask, draws->mask_words);
}

static int is_among(const int64_t *ids, int64_t n, int64_t id) {
    int found = 0;
    for (int64_t i = 0; i < n; i++) found |= ids[i] == id;
    return found;
}

/* Returns the count and the mass of the tokens above the pivot, or not below it. Without weights each weighs 1. */
ANY_INLINE share share_of(const float *logits, const double *weights, int64_t n, float pivot, const int or_equal) {
    double sums[SUMS] = {0};
    int32_t counts[SUMS] = {0};
    for (int64_t i = 0; i < n; i += SUMS)
        for (int l = 0; l < SUMS; l++) counts[l] += or_equal ? logits[i + l] >= pivot : logits[i + l] > pivot;
    for (int64_t i = 0; weights && i < n; i += SUMS) /* GCC 12 compiles a sum of chosen lanes wrongly */
        for (int l = 0; l < SUMS; l++)
            sums[l] += weights[i + l] * (double)(or_equal ? logits[i + l] >= pivot : logits[i + l] > pivot);
    share found = {0, 0};
    for (int l = 0; l < SUMS; l++) found.count += counts[l];
    for (int l = 0; l < SUMS; l++) found.mass += sums[l];
    if (!weights) found.mass = (double)found.count;
    return found;
}

ANY_INLINE void pad(float *logits, double *weights, int64_t n) {
    for (int64_t i = n; i < n + SUMS; i++) {
        logits[i] = -INFINITY;
        if (weights) weights[i] = 0;
    }
}

/* Moves the logits between `above` and `below` to the front of `left`, with their weights. Returns their number. */
ANY_INLINE int64_t keep(const float *logits, double *weights, int64_t n, float above, float below, float *left) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        const float logit = logits[i];
        left[kept] = logit;
        if (weights) weights[kept] = weights[i];
        kept += (logit > above) & (logit < below);
    }
    return kept;
}

/* Does what `keep` does, in registers of 512 bits. */
WIDE static int64_t keep_by_512(const float *logits, double *weights, int64_t n, float above, float below,
                                float *left) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i += SUMS) {
        const __m512 found = _mm512_loadu_ps(logits + i);
        const __mmask16 lanes = _mm512_cmp_ps_mask(found, _mm512_set1_ps(above), _CMP_GT_OQ) &
                                _mm512_cmp_ps_mask(found, _mm512_set1_ps(below), _CMP_LT_OQ);
        if (!lanes) continue;
        _mm512_storeu_ps(left + kept, _mm512_maskz_compress_ps(lanes, found));
        if (weights) {
            const __m512d first = _mm512_loadu_pd(weights + i), second = _mm512_loadu_pd(weights + i + 8);
            const int64_t between = kept + __builtin_popcount(lanes & 0xff);
            _mm512_storeu_pd(weights + kept, _mm512_maskz_compress_pd((__mmask8)lanes, first));
            _mm512_storeu_pd(weights + between, _mm512_maskz_compress_pd((__mmask8)(lanes >> 8), second));
        }
        kept += __builtin_popcount(lanes);
    }
    return kept;
}

/* Returns the index of a pivot: of a few samples from the best on, the one that completes `part` of their mass. */
ANY_INLINE int64_t pivot_of(const float *logits, const double *weights, int64_t n, double part) {
    const int64_t num = n < SAMPLED ? n : SAMPLED;
    int64_t places[SAMPLED];
    double mass = 0;
    for (int64_t taken = 0; taken < num; taken++) {
        const int64_t place = taken * n / num;
        int64_t at = taken;
        for (; at > 0 && logits[places[at - 1]] < logits[place]; at--) places[at] = places[at - 1];
        places[at] = place;
        mass += weights ? weights[place] : 1;
    }
    double reached = 0;
    for (int64_t i = 0; i < num; i++) {
        reached += weights ? weights[places[i]] : 1;
        if (reached >= part * mass) return places[i];
    }
    return places[num - 1];
}

/* Returns the smallest set of best tokens whose weights sum to the goal. `logits` and `weights` end with pads of -inf
 * and 0. `left` has the same length and may be `logits`. The weights are overwritten. */
ANY_INLINE cut select_best(const float *logits, double *weights, int64_t n, double goal, double total, float *left,
                           const keeping keep) {
    share above = {0, 0};
    while (n > 0) {
        const int64_t place = pivot_of(logits, weights, n, (goal - above.mass) / total);
        const float pivot = logits[place];
        const double weight = weights ? weights[place] : 1;
        const share greater = share_of(logits, weights, n, pivot, 0);
        float lower = -INFINITY, upper = pivot;
        if (above.mass + greater.mass >= goal) {
            lower = pivot, upper = INFINITY;
            total = greater.mass;
        } else if (pivot == -INFINITY) {
            break;
        } else {
            const share equal = share_of(logits, weights, n, pivot, 1);
            if (above.mass + equal.mass >= goal) {
                double mass = above.mass + greater.mass;
                int64_t count = above.count + greater.count;
                do {
                    mass += weight;
                    count++;
                } while (mass < goal && count < above.count + equal.count);
                return (cut){pivot, count};
            }
            above.mass += equal.mass;
            above.count += equal.count;
            total -= equal.mass;
        }
        n = keep(logits, weights, n, lower, upper, left);
        logits = left;
        pad(left, weights, n);
    }
    return (cut){-INFINITY, INT64_MAX};
}

ANY_INLINE cut cut_of(const row_of *row, const td_sampling *sampling, float *left, double *weights,
                      const keeping keep) {
    cut kept = {-INFINITY, INT64_MAX};
    const float *logits = row->logits;
    int64_t n = row->vocab;
    if (sampling->top_k > 0 && sampling->top_k < n) {
        kept = select_best(logits, NULL, n, (double)sampling->top_k, (double)n, left, keep);
        if (sampling->top_p >= 1) return kept;
        n = keep(logits, NULL, n, kept.least, INFINITY, left);
        while (kept.least > -INFINITY && n < sampling->top_k) left[n++] = kept.least;
        pad(left, NULL, n);
        logits = left;
    }
    if (sampling->top_p >= 1) return kept;
    for (int64_t i = 0; i < n; i++) weights[i] = exp_of(score_of(row, logits[i]));
    for (int64_t i = n; i < n + SUMS; i++) weights[i] = 0;
    const double mass = share_of(logits, weights, n, -INFINITY, 1).mass;
    if (mass * sampling->top_p <= 0) return (cut){(float)row->best, 1};
    const cut nucleus = select_best(logits, weights, n, mass * sampling->top_p, mass, left, keep);
    return nucleus.count < kept.count ? nucleus : kept;
}

/* Returns whether the filters keep a token. Different logits may have equal scores; scores decide. */
static int is_kept(const row_of *row, cut kept, int64_t id) {
    const double least = score_of(row, kept.least), score = score_of(row, row->logits[id]);
    if (score != least) return score > least;
    int64_t before = 0;
    for (int64_t i = 0; i < row->vocab; i++) {
        const double other = score_of(row, row->logits[i]);
        before += other > least || (i < id && other == least);
    }
    return before < kept.count;
}

/* Returns the logit below which no token can reach `best` or is kept. */
ANY_INLINE float floor_of(const row_of *row, cut kept, double best) {
    double floor = row->best + row->temperature * (best - MOST_NOISE);
    const double least = kept.least - (row->best - kept.least) * 0x1p-48;
    if (least > floor) floor = least;
    return nextafterf((float)floor, -INFINITY);
}

ANY_INLINE int64_t winner_of(const row_of *row, uint64_t key, cut kept) {
    const float best_logit = (float)row->best;
    const float scale = row->temperature > 1e-30 ? (float)(1 / row->temperature) : 1e30f;
    int64_t winner = row->first; /* kept by every filter */
    double best = noise_of(key, winner);
    float floor = floor_of(row, kept, best), needed = (float)best - SLACK;
    for (int64_t start = 0; start < row->padded; start += BLOCK) {
        const float *logits = row->logits + start;
        int32_t any = 0;
        for (int l = 0; l < BLOCK; l++) any |= logits[l] >= floor;
        if (!any) continue;
        float reach[BLOCK];
        for (int l = 0; l < BLOCK; l++) {
            const uint64_t bits = hash_of(key, start + l) | 0x3ff0000000000000u;
            double u;
            memcpy(&u, &bits, sizeof u); /* in [1, 2) */
            const float rest = (float)(2 - u - 0x1p-53);
            int32_t log2_of_rest;
            memcpy(&log2_of_rest, &rest, sizeof rest);
            reach[l] = (logits[l] - best_logit) * scale + (127 - (float)log2_of_rest * 0x1p-23f) * 0.693147181f;
        }
        any = 0;
        for (int l = 0; l < BLOCK; l++) any |= reach[l] >= needed;
        if (!any) continue;
        for (int l = 0; l < BLOCK; l++) {
            if (reach[l] < needed || logits[l] < floor) continue;
            const double total = noise_of(key, start + l) + score_of(row, logits[l]);
            const int64_t id = start + l;
            if (total < best || (total == best && id >= winner) || !is_kept(row, kept, id)) continue;
            winner = id, best = total;
            floor = floor_of(row, kept, best), needed = (float)best - SLACK;
        }
    }
    return winner;
}

ANY_INLINE void drop_below(const row_of *row, double least_score) {
    for (int64_t i = 0; i < row->vocab; i++)
        row->logits[i] = score_of(row, row->logits[i]) < least_score ? -INFINITY : row->logits[i];
}

ANY_INLINE int64_t padded_to_block(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK * BLOCK + BLOCK; }

ANY_INLINE void draw_rows(const td_draws *draws, const keeping keep) {
    const int64_t padded = padded_to_block(draws->vocab);
    double *weights = draws->scratch;
    float *logits = (float *)(weights + padded), *left = logits + padded;
    const int64_t *banned = draws->banned;
    for (int64_t i = 0; i < draws->rows; i++) {
        const td_sampling *sampling = draws->samplings + i;
        const int64_t *ours = banned, num_banned = sampling->num_banned;
        int64_t *token_id = draws->token_ids + i;
        banned += num_banned;
        *token_id = -1;
        if (sampling->temperature > LARGEST_TEMPERATURE) continue;
        if (sampling->temperature <= 0) *token_id = greedy_of(draws, i);
        if (sampling->temperature <= 0 && !is_among(ours, num_banned, *token_id)) continue;
        load(draws, i, logits);
        if (sampling->mask) exclude(sampling->mask, draws->mask_words, draws->vocab, logits);
        for (int64_t j = draws->vocab; j < padded; j++) logits[j] = -INFINITY;
        for (int64_t j = 0; j < num_banned; j++)
            if (ours[j] >= 0 && ours[j] < draws->vocab) logits[ours[j]] = -INFINITY;
        *token_id = best_of(logits, 0, draws->vocab, NULL, 0);
        if (*token_id < 0 || sampling->temperature <= 0) continue;
        const row_of row = {logits, draws->vocab, padded, *token_id, logits[*token_id], sampling->temperature};
        if (sampling->least_score > -INFINITY) drop_below(&row, sampling->least_score);
        *token_id = winner_of(&row, sampling->key, cut_of(&row, sampling, left, weights, keep));
    }
}

WIDE static void draw_by_512(const td_draws *draws) { draw_rows(draws, keep_by_512); }

__attribute__((target("avx2"))) static void draw_by_256(const td_draws *draws) { draw_rows(draws, keep); }

int64_t td_draw_scratch_bytes(int64_t vocab) {
    return padded_to_block(vocab) * (int64_t)(sizeof(double) + 2 * sizeof(float));
}

void td_draw(const td_draws *draws, int64_t widest) {
    __builtin_cpu_init();
    if (widest >= 512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        draw_by_512(draws);
    else if (widest >= 256 && __builtin_cpu_supports("avx2"))
        draw_by_256(draws);
    else
        draw_rows(draws, keep);
}
