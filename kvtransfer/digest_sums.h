/* The sums of the pieces of a digest, by the instructions of one kind of processor. digests.c chooses one. */
#ifndef DIGEST_SUMS_H
#define DIGEST_SUMS_H
#include <stdint.h>

enum { PIECE = 8192, SUMS = 16, BAND = 512, LINE = 64, MOST_PIECES = 8 };

/* Pieces of equal length that are processed together. */
typedef struct {
    const uint8_t *source[MOST_PIECES], *next[MOST_PIECES]; /* next: the addresses to prefetch */
    uint8_t *target[MOST_PIECES];                           /* NULL: nothing is copied */
    int32_t *sums[MOST_PIECES];
} td_pieces;

typedef struct {
    int width;         /* of its registers, in bits */
    int num_pieces;    /* that it processes together, at most MOST_PIECES */
    int matrix_bytes;  /* of the coefficients of one fold, in its own layout */
    int (*is_supported)(void);
    /* Sums `num` pieces of `num_bytes` each, and copies them to their targets. */
    void (*sum)(int num, const td_pieces *pieces, int64_t num_bytes, const void *coefficients, int is_streamed);
} td_kernel;

extern const td_kernel td_by_512, td_by_256;

#endif
