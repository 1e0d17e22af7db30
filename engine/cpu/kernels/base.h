/* What every file of the forward needs before its vector instructions: macros, the layout of packed matrices, rows. */
#ifndef TANDEM_BASE_H
#define TANDEM_BASE_H

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

/* Between these two, functions are compiled for processors with the named instructions. */
#define TD_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define TD_TARGET_BEGIN(names) TD_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define TD_TARGET_END _Pragma("clang attribute pop")
#else
#define TD_TARGET_BEGIN(names) _Pragma("GCC push_options") TD_PRAGMA(GCC target(names))
#define TD_TARGET_END _Pragma("GCC pop_options")
#endif
#define TD_INLINE static inline __attribute__((always_inline, unused))
#define TD_UNROLL _Pragma("GCC unroll 16")

enum {
    PANEL = 64,    /* columns of a packed matrix that lie together: [in_features / 2][PANEL][2] */
    PAIR_LINES = PANEL * 2 * (int)sizeof(bf16) / 64, /* cache lines of a panel that one pair of input features takes */
};

static inline int64_t td_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t td_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t td_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t td_align(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

/* Rows of bf16; row i begins `places[i]` elements after `base`. Rows from `count` on are taken as zero. */
typedef struct {
    const bf16 *base;
    const int64_t *places; /* [PANEL] */
    int64_t count;
} Rows;

#endif
