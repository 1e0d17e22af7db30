/* Digests of KV blocks, and copies that digest what they write: kvtransfer/digests.py has the definition.
 *
 * A digest multiplies every byte with 16 coefficients. One vpdpbusd adds 4 products to each of 16 sums, so the work is
 * 16 of them per 64 bytes, one per cycle. Everything else is arranged around that:
 *
 * - The vector holds the 16 sums of one piece. Four bytes of the piece are broadcast by the instruction itself, and its
 *   64 coefficients are loaded once for GROUP pieces. So a sum stays in one register, and nothing is added across lanes.
 * - The unsigned operand holds the coefficients plus 128. The excess, 128 times the sum of the piece's bytes, is
 *   subtracted at the end.
 * - Pieces are processed in bands of BAND bytes. A band is read from the source once, into the first-level cache; the
 *   same registers are written to the target. So the digest covers the bytes that were written, even if another process
 *   changes the source meanwhile. The next band is prefetched: the memory works while the processor multiplies.
 * - Copies of STREAMED_BYTES or more bypass the caches on their way to the target.
 *
 * Nothing here allocates or fails. Addresses need no alignment but that of the coefficients, 64 bytes.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define INLINE static inline __attribute__((always_inline)) VNNI

enum { PIECE = 8192, SUMS = 16, BAND = 512, GROUP = 8, LINE = 64, HASHED_PIECES = 2, DIGEST = 16, STREAMED_BYTES = 1 << 20 };

typedef struct {
    const uint8_t *source;         /* row i is at source + source_rows[i] * row_bytes; NULL: at i * row_bytes */
    const int64_t *source_rows;
    uint8_t *target;               /* row i is at target + target_rows[i] * row_bytes; NULL: nothing is copied */
    const int64_t *target_rows;
    int64_t num_rows, row_bytes;
    const uint8_t *coefficients;   /* of each fold one after the other: [folds][PIECE / 4][SUMS][4], plus 128 */
    int32_t *sums;                 /* scratch: num_rows * (pieces of a row + pieces of its sums) * SUMS */
    uint8_t *digests;              /* [num_rows][16] */
} td_digests;

/* Pieces of equal length that are processed together. */
typedef struct {
    const uint8_t *source[GROUP], *next[GROUP];  /* next: the addresses to prefetch */
    uint8_t *target[GROUP];
    int32_t *sums[GROUP];
} group;

int64_t td_version(void) { return 1; }

int64_t td_digests_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

static const uint8_t *source_of(const td_digests *rows, int64_t row) {
    return rows->source + (rows->source_rows ? rows->source_rows[row] : row) * rows->row_bytes;
}

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
    __m512i held[GROUP];
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

INLINE void sum_group(const int num, const group *group, int64_t num_bytes, const uint8_t *coefficients,
                      int is_streamed) {
    __attribute__((aligned(64))) uint8_t kept[GROUP * BAND];
    __m512i sums[GROUP], totals[GROUP];
    for (int p = 0; p < num; p++) sums[p] = totals[p] = _mm512_setzero_si512();
    for (int64_t start = 0; start < num_bytes; start += BAND) {
        const int64_t left = num_bytes - start;
        const uint8_t *next[GROUP];
        for (int p = 0; p < num; p++) {
            const uint8_t *source = group->source[p] + start;
            uint8_t *target = group->target[p] ? group->target[p] + start : NULL;
            totals[p] = left >= BAND ? take_band(source, target, kept + p * BAND, totals[p], is_streamed)
                                     : take_rest(source, target, left, kept + p * BAND, totals[p]);
            next[p] = left >= 2 * BAND ? source + BAND : group->next[p];
        }
        multiply_band(num, kept, coefficients + start * SUMS, sums, next);
    }
    for (int p = 0; p < num; p++) {
        const __m512i added = _mm512_set1_epi32(128 * _mm512_reduce_add_epi32(totals[p]));
        _mm512_storeu_si512(group->sums[p], _mm512_sub_epi32(sums[p], added));
    }
}

VNNI static void sum_any_group(int num, const group *group, int64_t num_bytes, const uint8_t *coefficients,
                               int is_streamed) {
    switch (num) {
        case 8: sum_group(8, group, num_bytes, coefficients, is_streamed); break;
        case 7: sum_group(7, group, num_bytes, coefficients, is_streamed); break;
        case 6: sum_group(6, group, num_bytes, coefficients, is_streamed); break;
        case 5: sum_group(5, group, num_bytes, coefficients, is_streamed); break;
        case 4: sum_group(4, group, num_bytes, coefficients, is_streamed); break;
        case 3: sum_group(3, group, num_bytes, coefficients, is_streamed); break;
        case 2: sum_group(2, group, num_bytes, coefficients, is_streamed); break;
        case 1: sum_group(1, group, num_bytes, coefficients, is_streamed); break;
    }
}

/* Sums pieces `first` to `last` - 1 of every row, each of `num_bytes`, and copies them if the digests have a target. */
VNNI static void sum_pieces(const td_digests *rows, int64_t first, int64_t last, int64_t num_bytes, int is_streamed) {
    const int64_t per_row = last - first, num_pieces = (rows->row_bytes + PIECE - 1) / PIECE;
    const int64_t count = rows->num_rows * per_row;
    for (int64_t start = 0; start < count; start += GROUP) {
        group group;
        const int num = (int)(count - start < GROUP ? count - start : GROUP);
        for (int p = 0; p < num; p++) {
            const int64_t row = (start + p) / per_row, piece = first + (start + p) % per_row;
            const int64_t after = start + p + GROUP < count ? start + p + GROUP : count - 1;
            group.source[p] = source_of(rows, row) + piece * PIECE;
            group.next[p] = source_of(rows, after / per_row) + (first + after % per_row) * PIECE;
            group.target[p] =
                rows->target ? rows->target + rows->target_rows[row] * rows->row_bytes + piece * PIECE : NULL;
            group.sums[p] = rows->sums + (row * num_pieces + piece) * SUMS;
        }
        sum_any_group(num, &group, num_bytes, rows->coefficients, is_streamed);
    }
}

VNNI static void sum_rows(const td_digests *rows) {
    const int64_t whole = rows->row_bytes / PIECE, rest = rows->row_bytes % PIECE;
    const int is_streamed = rows->target && rows->num_rows * rows->row_bytes >= STREAMED_BYTES &&
                            (uintptr_t)rows->target % LINE == 0 && rows->row_bytes % LINE == 0;
    if (whole) sum_pieces(rows, 0, whole, PIECE, is_streamed);
    if (rest) sum_pieces(rows, whole, whole + 1, rest, is_streamed);
    if (is_streamed) _mm_sfence(); /* the target is complete before any later store is seen */
}

/* Sums the sums until at most HASHED_PIECES are left, each time with the next matrix. Returns the last sums, and sets
 * their number for each row. */
VNNI static const int32_t *fold(const td_digests *rows, int64_t *num_left) {
    td_digests left = *rows;
    int64_t num_pieces = (rows->row_bytes + PIECE - 1) / PIECE;
    left.source_rows = NULL;
    left.target = NULL;
    while (num_pieces > HASHED_PIECES) {
        left.source = (const uint8_t *)left.sums;
        left.sums += left.num_rows * num_pieces * SUMS;
        left.coefficients += PIECE * SUMS;
        left.row_bytes = num_pieces * SUMS * (int64_t)sizeof *left.sums;
        sum_rows(&left);
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

void td_digest_rows(const td_digests *rows) {
    int64_t num_pieces;
    sum_rows(rows);
    const int32_t *sums = fold(rows, &num_pieces);
    for (int64_t row = 0; row < rows->num_rows; row++)
        hash_row((uint64_t)rows->row_bytes, sums + row * num_pieces * SUMS, num_pieces * SUMS,
                 rows->digests + row * DIGEST);
}
