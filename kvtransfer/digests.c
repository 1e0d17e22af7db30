/* Digests of KV blocks, and copies that digest what they write: kvtransfer/digests.py has the definition.
 *
 * A digest multiplies every byte with 16 coefficients. Everything is arranged around that:
 *
 * - Pieces are processed in bands of BAND bytes. A band is read from the source once, into the first-level cache; the
 *   same registers are written to the target. So the digest covers the bytes that were written, even if another process
 *   changes the source meanwhile. The next band is prefetched: the memory works while the processor multiplies.
 * - The coefficients of a band are loaded once for several pieces (digests_512.c, digests_256.c).
 * - Copies of STREAMED_BYTES or more bypass the caches on their way to the target.
 *
 * Nothing here allocates or fails. Addresses need no alignment but that of the coefficients, 64 bytes.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "digest_sums.h"

enum { HASHED_PIECES = 2, DIGEST = 16, STREAMED_BYTES = 1 << 20 };

typedef struct {
    const uint8_t *source;         /* row i is at source + source_rows[i] * row_bytes; NULL: at i * row_bytes */
    const int64_t *source_rows;
    uint8_t *target;               /* row i is at target + target_rows[i] * row_bytes; NULL: nothing is copied */
    const int64_t *target_rows;
    int64_t num_rows, row_bytes;
    const uint8_t *coefficients;   /* of each fold one after the other, in the kernel's layout */
    int32_t *sums;                 /* scratch: num_rows * (pieces of a row + pieces of its sums) * SUMS */
    uint8_t *digests;              /* [num_rows][16] */
} td_digests;

int64_t td_version(void) { return 2; }

/* Returns the width of the widest kernel that this processor has, at most `widest` bits; 0 if it has none. */
int64_t td_digest_width(int64_t widest) {
    __builtin_cpu_init();
    if (widest >= td_by_512.width && td_by_512.is_supported()) return td_by_512.width;
    if (widest >= td_by_256.width && td_by_256.is_supported()) return td_by_256.width;
    return 0;
}

static const uint8_t *source_of(const td_digests *rows, int64_t row) {
    return rows->source + (rows->source_rows ? rows->source_rows[row] : row) * rows->row_bytes;
}

/* Sums pieces `first` to `last` - 1 of every row, each of `num_bytes`, and copies them if the digests have a target. */
static void sum_pieces(const td_kernel *kernel, const td_digests *rows, int64_t first, int64_t last, int64_t num_bytes,
                       int is_streamed) {
    const int64_t per_row = last - first, num_pieces = (rows->row_bytes + PIECE - 1) / PIECE;
    const int64_t count = rows->num_rows * per_row;
    for (int64_t start = 0; start < count; start += kernel->num_pieces) {
        td_pieces pieces;
        const int num = (int)(count - start < kernel->num_pieces ? count - start : kernel->num_pieces);
        for (int p = 0; p < num; p++) {
            const int64_t row = (start + p) / per_row, piece = first + (start + p) % per_row;
            const int64_t later = start + p + kernel->num_pieces, after = later < count ? later : count - 1;
            pieces.source[p] = source_of(rows, row) + piece * PIECE;
            pieces.next[p] = source_of(rows, after / per_row) + (first + after % per_row) * PIECE;
            pieces.target[p] =
                rows->target ? rows->target + rows->target_rows[row] * rows->row_bytes + piece * PIECE : NULL;
            pieces.sums[p] = rows->sums + (row * num_pieces + piece) * SUMS;
        }
        kernel->sum(num, &pieces, num_bytes, rows->coefficients, is_streamed);
    }
}

static void sum_rows(const td_kernel *kernel, const td_digests *rows) {
    const int64_t whole = rows->row_bytes / PIECE, rest = rows->row_bytes % PIECE;
    const int is_streamed = rows->target && rows->num_rows * rows->row_bytes >= STREAMED_BYTES &&
                            (uintptr_t)rows->target % LINE == 0 && rows->row_bytes % LINE == 0;
    if (whole) sum_pieces(kernel, rows, 0, whole, PIECE, is_streamed);
    if (rest) sum_pieces(kernel, rows, whole, whole + 1, rest, is_streamed);
    if (is_streamed) _mm_sfence(); /* the target is complete before any later store is seen */
}

/* Sums the sums until at most HASHED_PIECES are left, each time with the next matrix. Returns the last sums, and sets
 * their number for each row. */
static const int32_t *fold(const td_kernel *kernel, const td_digests *rows, int64_t *num_left) {
    td_digests left = *rows;
    int64_t num_pieces = (rows->row_bytes + PIECE - 1) / PIECE;
    left.source_rows = NULL;
    left.target = NULL;
    while (num_pieces > HASHED_PIECES) {
        left.source = (const uint8_t *)left.sums;
        left.sums += left.num_rows * num_pieces * SUMS;
        left.coefficients += kernel->matrix_bytes;
        left.row_bytes = num_pieces * SUMS * (int64_t)sizeof *left.sums;
        sum_rows(kernel, &left);
        num_pieces = (left.row_bytes + PIECE - 1) / PIECE;
    }
    *num_left = num_pieces;
    return left.sums;
}

/* BLAKE2b (RFC 7693). */
static const uint64_t BLAKE_START[8] = {0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu,
                                        0xa54ff53a5f1d36f1u, 0x510e527fade682d1u, 0x9b05688c2b3e6c1fu,
                                        0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};
static const uint8_t BLAKE_ORDER[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

static uint64_t rotated(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

static void blake_mix(uint64_t *a, uint64_t *b, uint64_t *c, uint64_t *d, uint64_t first, uint64_t second) {
    *a += *b + first;
    *d = rotated(*d ^ *a, 32);
    *c += *d;
    *b = rotated(*b ^ *c, 24);
    *a += *b + second;
    *d = rotated(*d ^ *a, 16);
    *c += *d;
    *b = rotated(*b ^ *c, 63);
}

static void blake_block(uint64_t state[8], const uint8_t *block, uint64_t num_hashed, int is_last) {
    uint64_t words[16], v[16];
    memcpy(words, block, sizeof words);
    memcpy(v, state, 64);
    memcpy(v + 8, BLAKE_START, 64);
    v[12] ^= num_hashed;
    if (is_last) v[14] = ~v[14];
    for (int round = 0; round < 12; round++) {
        const uint8_t *at = BLAKE_ORDER[round];
        for (int i = 0; i < 4; i++)
            blake_mix(v + i, v + 4 + i, v + 8 + i, v + 12 + i, words[at[2 * i]], words[at[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            blake_mix(v + i, v + 4 + (i + 1) % 4, v + 8 + (i + 2) % 4, v + 12 + (i + 3) % 4, words[at[8 + 2 * i]],
                      words[at[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

/* The hash of the row's length and its last sums, personalised, 16 bytes. */
static void hash_row(uint64_t row_bytes, const int32_t *sums, int64_t num_sums, uint8_t *digest) {
    uint8_t message[2 * 128] = {0};
    const int64_t num_bytes = 8 + num_sums * (int64_t)sizeof *sums;
    uint64_t state[8], person[2];
    memcpy(message, &row_bytes, 8);
    memcpy(message + 8, sums, (size_t)num_bytes - 8);
    memcpy(state, BLAKE_START, sizeof state);
    memcpy(person, "tandem kv folded", sizeof person);
    state[0] ^= 0x01010000u ^ DIGEST;
    state[6] ^= person[0];
    state[7] ^= person[1];
    int64_t start = 0;
    for (; num_bytes - start > 128; start += 128) blake_block(state, message + start, (uint64_t)start + 128, 0);
    blake_block(state, message + start, (uint64_t)num_bytes, 1);
    memcpy(digest, state, DIGEST);
}

void td_digest_rows(const td_digests *rows, int64_t width) {
    const td_kernel *kernel = width == td_by_512.width ? &td_by_512 : &td_by_256;
    int64_t num_pieces;
    sum_rows(kernel, rows);
    const int32_t *sums = fold(kernel, rows, &num_pieces);
    for (int64_t row = 0; row < rows->num_rows; row++)
        hash_row((uint64_t)rows->row_bytes, sums + row * num_pieces * SUMS, num_pieces * SUMS,
                 rows->digests + row * DIGEST);
}
